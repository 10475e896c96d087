// SPDX-License-Identifier: BSL-1.0
// Gradients that stay on their ranks: local SGD by the passes of a model. Compared with serial runs in double.
#include <joinable/bucket/compression/no_reduction.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/bucket/reducer.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/periodic_average.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::NoReduction;
using joinable::PeriodicAverage;

constexpr double rate = 0.25;

std::size_t inputs_of(int rank) {
    return 9 - static_cast<std::size_t>(rank * 4 % 7);
}
/// The gradient of a quadratic loss, whose minimum is another one on each rank and in each round.
double gradient_of(double value, std::size_t element, int rank, std::size_t round) {
    return value -
           static_cast<double>((rank + 1) * (rank + 2)) * (1 + 0.5 * static_cast<double>(element)) +
           static_cast<double>(round * round) / 16;
}

/// Which parameters a round leaves without a gradient.
bool is_used(std::size_t parameter, int rank, std::size_t round) {
    return parameter != 1 || (static_cast<std::size_t>(rank) + round) % 3 != 0;
}

/// Element `element` of all ranks after local SGD, whose averages count steps.
double
serial(int ranks, std::size_t element, std::optional<std::size_t> sparse, std::size_t period) {
    std::vector<double> values(static_cast<std::size_t>(ranks), 1.0);
    std::vector<double> steps(values.size());
    auto const average = [&] {
        double sum = 0;
        double total = 0;
        for (std::size_t r = 0; r < values.size(); ++r) {
            sum += steps[r] * values[r];
            total += steps[r];
        }
        if (total > 0) {
            values.assign(values.size(), sum / total);
            steps.assign(steps.size(), 0);
        }
    };
    for (std::size_t round = 1; round <= inputs_of(0); ++round) {
        for (int rank = 0; rank < ranks; ++rank) {
            auto const r = static_cast<std::size_t>(rank);
            if (round > inputs_of(rank)) {
                continue;
            }
            if (!sparse || is_used(*sparse, rank, round)) {
                values[r] -= rate * gradient_of(values[r], element, rank, round);
            }
            steps[r] += 1;
        }
        if (round % period == 0) {
            average();
        }
    }
    average();
    return values.front();
}

/// What a training does besides.
struct Kind {
    bool are_views;
    bool find_unused;
    bool static_graph;
};

TEST_CASE(
    "local SGD by the passes of a model is local SGD, for views and copies, however gradients are marked"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (Kind const kind :
             {Kind{},
              {true, false, false},
              {false, true, false},
              {true, true, false},
              {false, false, true}}) {
            auto params = make_params<double>({3, 70, 2}, comm.rank() == 0 ? 1.0 : -7.0);
            std::vector<double> buffer{0};
            DistributedDataParallel ddp{
                comm,
                params,
                joinable::buffers(buffer),
                DataParallelOptions{
                    .bucket_cap_bytes = 64,
                    .first_bucket_bytes = 8,
                    .gradient_as_bucket_view = kind.are_views,
                    .find_unused = kind.find_unused,
                    .static_graph = kind.static_graph,
                    .sync_at_end = false
                },
                NoReduction{}
            };
            PeriodicAverage average{comm, params, {.period = 3}};
            std::size_t steps = 0;
            std::size_t round = 0;
            joinable::Step step{comm, [&] {
                                    ++steps;
                                    for (std::size_t p = 0; p < params.size(); ++p) {
                                        if (kind.find_unused && !is_used(p, comm.rank(), round)) {
                                            continue;
                                        }
                                        for (std::size_t k = 0; k < params[p].value.size(); ++k) {
                                            params[p].value[k] -= rate * params[p].g(k);
                                        }
                                    }
                                }};
            joinable::Join guard{joinable::participants(ddp, step, average)};
            for (round = 1; round <= inputs_of(comm.rank()); ++round) {
                buffer[0] = static_cast<double>(100 * round) + comm.rank();
                ddp.forward([] {});
                auto const unused = [&](std::size_t p) {
                    return kind.find_unused && !is_used(p, comm.rank(), round);
                };
                ddp.backward(
                    [&](auto ready) {
                        for (std::size_t p = params.size(); p-- > 0;) {
                            if (unused(p)) {
                                continue;
                            }
                            for (std::size_t k = 0; k < params[p].value.size(); ++k) {
                                params[p].g(k) =
                                    gradient_of(params[p].value[k], k, comm.rank(), round);
                            }
                            ready(p);
                        }
                    },
                    unused
                );
                CHECK(buffer[0] == static_cast<double>(100 * round)); // rank 0 is the last to join
                step.step();
                average.step();
            }
            guard.finish();
            CHECK(steps == inputs_of(comm.rank())); // and none on joined ranks
            CHECK(buffer[0] == static_cast<double>(100 * inputs_of(0)));
            for (std::size_t p = 0; p < params.size(); ++p) {
                for (std::size_t k = 0; k < params[p].value.size(); ++k) {
                    auto const sparse = kind.find_unused ? std::optional{p} : std::nullopt;
                    CHECK(
                        params[p].value[k] ==
                        doctest::Approx(serial(comm.size(), k, sparse, 3)).epsilon(1e-12)
                    );
                }
            }
        }
    });
}

/// The bits of all gradients.
std::vector<std::uint32_t> bits_of(std::vector<Param<float>> const& params) {
    std::vector<std::uint32_t> bits;
    for (Param<float> const& param : params) {
        for (std::size_t k = 0; param.grad && k < param.value.size(); ++k) {
            bits.push_back(std::bit_cast<std::uint32_t>(param.g(k)));
        }
    }
    return bits;
}
/// Numbers that no arithmetic leaves as they are: NaN with a payload, -0, and others.
void fill(std::vector<Param<float>>& params, int rank) {
    for (Param<float>& param : params) {
        for (std::size_t k = 0; k < param.value.size(); ++k) {
            auto const number = static_cast<std::uint32_t>(k + 5 * static_cast<std::size_t>(rank));
            param.g(k) = std::bit_cast<float>(
                k == 1   ? 0x7fa0'0001U + number
                : k == 2 ? 0x8000'0000U
                         : 0x3f00'0001U + 77 * number
            );
        }
    }
}

TEST_CASE(
    "gradients stay bit for bit: of a pass, of a failed one, what was accumulated, and on joined ranks"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const are_views : {false, true}) {
            for (auto const joined :
                 {joinable::JoinedGradients::zeroed_at_end, joinable::JoinedGradients::untouched}) {
                auto params = make_params<float>({3, 40});
                DistributedDataParallel ddp{
                    comm,
                    params,
                    DataParallelOptions{
                        .first_bucket_bytes = 16,
                        .gradient_as_bucket_view = are_views,
                        .sync_at_end = false,
                        .joined_gradients = joined
                    },
                    NoReduction{}
                };
                std::vector<std::uint32_t> expected;
                auto const mark = [&](auto ready) {
                    fill(params, comm.rank());
                    expected = bits_of(params);
                    ready(1);
                    ready(0);
                };
                joinable::Join guard{joinable::participants(ddp)};
                int const inputs = comm.size() - comm.rank();
                for (int i = 0; i < inputs; ++i) {
                    ddp.forward([] {}, {.will_sync = i % 2 == 0});
                    ddp.backward(mark);
                    CHECK(bits_of(params) == expected);
                }
                if (comm.rank() == 0) { // the last one
                    ddp.forward([] {});
                    CHECK_THROWS_AS(
                        ddp.backward([&](auto ready) {
                            fill(params, 9);
                            ready(1);
                            throw std::runtime_error{"out of memory"};
                        }),
                        std::runtime_error
                    );
                    expected = bits_of(params);
                    ddp.skip();
                    CHECK(bits_of(params) == expected);
                    ddp.skip();
                    CHECK(bits_of(params) == expected);
                }
                auto const result = guard.finish();
                CHECK(result.rounds == static_cast<std::size_t>(comm.size() + 2));
                CHECK(bits_of(params) == expected);
                CHECK(bits_of(params).size() == 43);
            }
        }
    });
}

TEST_CASE("buckets have memory only for views, and an iteration runs no collective at all") {
    over_ranks({1, 2, 4}, [](RankCommunicator& inner) {
        for (Kind const kind :
             {Kind{}, {true, false, false}, {false, true, false}, {true, false, true}}) {
            RecordingCommunicator comm{inner};
            auto params = make_params<float>({3, 40});
            joinable::Reducer reducer{
                comm,
                joinable::parameters(params),
                joinable::BucketOptions{
                    .first_bucket_bytes = 16,
                    .gradient_as_bucket_view = kind.are_views,
                    .find_unused = kind.find_unused,
                    .static_graph = kind.static_graph
                },
                NoReduction{}
            };
            CHECK(reducer.buckets().size() == (kind.are_views ? 2 : 0));
            CHECK(!reducer.is_rebuild_due());
            fill(params, comm.rank());
            auto const expected = bits_of(params);
            for (int iteration = 0; iteration < 3; ++iteration) {
                std::vector<std::size_t> unused;
                if (kind.find_unused) {
                    unused.push_back(1);
                }
                reducer.prepare_for_backward(0.125, unused);
                if (!kind.find_unused) {
                    reducer.mark_ready(1);
                }
                reducer.mark_ready(0);
                reducer.finalize_backward();
                reducer.contribute_zeros(0, true);
                CHECK(bits_of(params) == expected);
            }
            CHECK(comm.trace.empty());

            // Marks are checked as in any model.
            reducer.prepare_for_backward(1.0);
            reducer.mark_ready(0);
            CHECK_THROWS_WITH_AS(
                reducer.finalize_backward(),
                doctest::Contains("did not mark parameter 1"),
                ContractViolation
            );
        }
    });
}

/// Counts what it is told.
struct CountingTimeline {
    struct Range {};
    int rounds = 0;
    int shadowed = 0;
    int buckets = 0;
    int passes = 0;
    Range round(bool is_shadow) {
        ++(is_shadow ? shadowed : rounds);
        return {};
    }
    Range bucket(std::size_t, std::size_t) {
        ++buckets;
        return {};
    }
    Range forward() {
        ++passes;
        return {};
    }
    Range backward() {
        ++passes;
        return {};
    }
};

TEST_CASE("rounds and passes are told to the timeline, and no bucket, because none travels") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<float>({3, 40});
        DistributedDataParallel<RankCommunicator, NoReduction, CountingTimeline> ddp{
            comm, params, DataParallelOptions{.sync_at_end = false}
        };
        joinable::Join guard{joinable::participants(ddp)};
        int const inputs = comm.size() - comm.rank();
        for (int i = 0; i < inputs; ++i) {
            ddp.forward([] {});
            ddp.backward([](auto ready) {
                ready(0);
                ready(1);
            });
        }
        guard.finish();
        CHECK(ddp.timeline().rounds == inputs);
        CHECK(ddp.timeline().passes == 2 * inputs);
        CHECK(ddp.timeline().shadowed == comm.rank());
        CHECK(ddp.timeline().buckets == 0);
    });
}

TEST_CASE("what averages or needs equal values is refused on all ranks, in a sentence") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<float>({3});
        auto const is_refused = [&](DataParallelOptions const& options, char const* text) {
            CHECK_THROWS_WITH_AS(
                (DistributedDataParallel{comm, params, options, NoReduction{}}),
                doctest::Contains(text),
                ContractViolation
            );
        };
        is_refused({}, "sync_at_end gives all ranks the values of one");
        is_refused({.sync_at_end = false, .verify_replicas = 2}, "verify_replicas compares values");
        is_refused(
            {.gradient_kind = joinable::GradientKind::sum, .sync_at_end = false},
            "GradientKind::sum says how"
        );
        DistributedDataParallel ddp{
            comm, params, DataParallelOptions{.sync_at_end = false}, NoReduction{}
        };
        PeriodicAverage average{comm, params};
        auto const is_no_guard =
            [&](char const* text, joinable::JoinOptions const& options, auto&... others) {
                CHECK_THROWS_WITH_AS(
                    static_cast<void>(joinable::Join{joinable::participants(others...), options}),
                    doctest::Contains(text),
                    ContractViolation
                );
            };
        is_no_guard("weight_per_input weighs", {.inputs = 1, .weight_per_input = 2}, ddp);
        joinable::ZeroRedundancyOptimizer zero{comm, params, joinable::Sgd{}};
        is_no_guard("a sharded optimizer beside them has no averages", {}, ddp, zero);
        is_no_guard("a sharded optimizer beside them has no averages", {}, zero, ddp);
        is_no_guard("a sharded optimizer beside them has no averages", {}, average, zero);

        auto others = make_params<float>({2});
        DistributedDataParallel averaged{comm, others};
        joinable::Step step{comm, [] {}};
        is_no_guard(
            "a Step runs on joined ranks where gradients are averaged", {}, ddp, averaged, step
        );
        is_no_guard(
            "a Step runs on joined ranks where gradients are averaged", {}, averaged, step, average
        );

        DistributedDataParallel same{comm, params};
        is_no_guard("both average", {}, ddp, same);
        is_no_guard("both average", {}, same, average);
        // Each of these can be beside a model that is averaged, without a Step.
        joinable::Join guard{joinable::participants(ddp, averaged, average)};
        guard.finish();
    });
}

TEST_CASE("a weight is refused in the round that gives it, on all ranks, joined ones too") {
    // A rank may hear of another's refusal before it comes to its own, also while it still makes its model.
    auto const refused =
        doctest::Contains("this round has a weight, but NoReduction averages nothing");
    DataParallelOptions const options{.sync_at_end = false};
    over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
        auto params = make_params<float>({3});
        auto const train = [&] {
            DistributedDataParallel ddp{comm, params, options, NoReduction{}};
            ddp.forward([] {}, {.weight = 3}); // outside a guard
            ddp.backward([](auto ready) { ready(0); });
        };
        CHECK_THROWS_WITH(train(), refused);
    });
    over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
        auto params = make_params<float>({3});
        auto const train = [&] {
            DistributedDataParallel ddp{comm, params, options, NoReduction{}};
            joinable::Join guard{joinable::participants(ddp)};
            if (comm.rank() == 0) {
                ddp.forward([] {}, {.weight = 3});
                ddp.backward([](auto ready) { ready(0); });
            }
            guard.finish();
        };
        CHECK_THROWS_WITH(train(), refused);
    });
}

TEST_CASE(
    "a model that is averaged keeps its window and its joined ranks beside one that stays local"
) {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        auto local = make_params<double>({2});
        auto averaged = make_params<double>({2});
        DistributedDataParallel alone{
            comm, local, DataParallelOptions{.sync_at_end = false}, NoReduction{}
        };
        DistributedDataParallel ddp{comm, averaged};
        auto const round = [&](bool syncs) {
            for (auto* const params : {&local, &averaged}) {
                add_gradient((*params)[0], 1.0);
            }
            alone.forward([] {}, {.will_sync = syncs});
            alone.backward([](auto ready) { ready(0); });
            ddp.forward([] {}, {.will_sync = syncs});
            ddp.backward([](auto ready) { ready(0); });
        };
        round(false);
        local[0].g(0) = local[0].g(1) = 0; // clears no window: the other model's gradients count
        joinable::Join guard{joinable::participants(alone, ddp)};
        if (comm.rank() == 0) { // the others join with what they have accumulated
            round(true);
            double const sum = 2.0 + (comm.size() - 1);
            CHECK(averaged[0].g(0) == doctest::Approx(sum / comm.size()));
        }
        guard.finish();
        CHECK(local[0].g(1) == (comm.rank() == 0 ? 1.0 : 0.0));
    });
}

} // namespace
