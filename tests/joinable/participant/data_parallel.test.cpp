// SPDX-License-Identifier: BSL-1.0
#include <joinable/participant/data_parallel.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::GradientKind;
using joinable::Join;
using joinable::participants;

using Params = std::vector<Param<double>>;

/// A parameter whose value and gradient are strided views of dtype and type known to the compiler.
struct Strided {
    joinable::StridedView<float> value;
    joinable::StridedView<float> grad;
};
/// One whose dtype is known at run time only.
struct Untyped {
    joinable::AnyView value;
    joinable::AnyView grad;
};

/// Ranks differ until rank 0's values are taken.
Params params_of(int rank) {
    return make_params({3, 1, 5, 2}, 1.0 + rank);
}

/// The data of a rank: uneven numbers of samples per batch and of batches.
struct Batch {
    std::vector<double> samples;
};
std::vector<Batch> batches_of(int rank) {
    std::vector<Batch> batches(static_cast<std::size_t>(2 + 2 * rank % 5));
    for (std::size_t b = 0; b < batches.size(); ++b) {
        for (std::size_t s = 0; s <= (b + static_cast<std::size_t>(rank)) % 3; ++s) {
            batches[b].samples.push_back(
                0.25 * static_cast<double>(rank) + 0.5 * static_cast<double>(b) -
                0.125 * static_cast<double>(s)
            );
        }
    }
    return batches;
}

/// The gradient of one sample with respect to element i of parameter p: some smooth function of the
/// parameter itself, so that errors of one step show in the next.
double sample_gradient(double value, double sample, std::size_t p, std::size_t i) {
    return std::sin(value + sample) + 0.1 * static_cast<double>(p + i) * sample;
}

enum class Average { initial, active, weighted_mean, weighted_sum };

/// Serial oracle: the union of the data on one rank, each round's average by its formula.
std::vector<std::vector<double>> train_serially(int world, Average average, double rate) {
    Params params = params_of(0);
    std::size_t rounds = 0;
    for (int rank = 0; rank < world; ++rank) {
        rounds = std::max(rounds, batches_of(rank).size());
    }
    for (std::size_t round = 0; round < rounds; ++round) {
        double active = 0;
        double samples = 0;
        for (int rank = 0; rank < world; ++rank) {
            auto const batches = batches_of(rank);
            if (round < batches.size()) {
                active += 1;
                samples += static_cast<double>(batches[round].samples.size());
            }
        }
        std::vector<std::vector<double>> next;
        for (std::size_t p = 0; p < params.size(); ++p) {
            next.push_back(params[p].value);
            for (std::size_t i = 0; i < next[p].size(); ++i) {
                double total = 0;
                for (int rank = 0; rank < world; ++rank) {
                    auto const batches = batches_of(rank);
                    if (round >= batches.size()) {
                        continue;
                    }
                    double sum = 0;
                    for (double const sample : batches[round].samples) {
                        sum += sample_gradient(params[p].value[i], sample, p, i);
                    }
                    auto const n = static_cast<double>(batches[round].samples.size());
                    bool const is_weighted =
                        average == Average::weighted_mean || average == Average::weighted_sum;
                    total += is_weighted ? sum : sum / n;
                }
                double const divisor = average == Average::initial  ? world
                                       : average == Average::active ? active
                                                                    : samples;
                next[p][i] -= rate * total / divisor;
            }
        }
        for (std::size_t p = 0; p < params.size(); ++p) {
            params[p].value = next[p];
        }
    }
    std::vector<std::vector<double>> values;
    for (auto const& param : params) {
        values.push_back(param.value);
    }
    return values;
}

template <class Comm>
std::vector<std::vector<double>>
train_together(Comm& comm, Average average, bool views, double rate, std::size_t cap_bytes) {
    Params params = params_of(comm.rank());
    bool const is_sum = average == Average::weighted_sum;
    bool const is_weighted = is_sum || average == Average::weighted_mean;
    DistributedDataParallel ddp{
        comm,
        params,
        {.bucket_cap_bytes = cap_bytes,
         .first_bucket_bytes = 16,
         .gradient_as_bucket_view = views,
         .gradient_kind = is_sum ? GradientKind::sum : GradientKind::mean,
         .sync_at_end = false}
    };
    joinable::Step step{comm, [&] {
                            for (auto& param : params) {
                                for (std::size_t i = 0; i < param.value.size(); ++i) {
                                    param.value[i] -= rate * param.g(i);
                                }
                            }
                        }};
    {
        Join guard{
            participants(ddp, step),
            joinable::divide_by_initial_world_size = average != Average::active
        };
        for (Batch const& batch : batches_of(comm.rank())) {
            joinable::RoundNotice notice;
            if (is_weighted) {
                notice.weight = batch.samples.size();
            }
            ddp.forward([] {}, notice);
            ddp.backward([&](auto ready) {
                // A different order on every rank: the buckets are launched in index order anyway.
                for (std::size_t k = 0; k < params.size(); ++k) {
                    std::size_t const p =
                        (k + static_cast<std::size_t>(comm.rank())) % params.size();
                    for (std::size_t i = 0; i < params[p].value.size(); ++i) {
                        double sum = 0;
                        for (double const sample : batch.samples) {
                            sum += sample_gradient(params[p].value[i], sample, p, i);
                        }
                        params[p].g(i) =
                            is_sum ? sum : sum / static_cast<double>(batch.samples.size());
                    }
                    ready(p);
                }
            });
            step.step();
        }
        guard.finish();
    }
    std::vector<std::vector<double>> values;
    for (auto const& param : params) {
        values.push_back(param.value);
    }
    return values;
}

TEST_CASE(
    "ranks with uneven shards train as one rank does on the union of their data" *
    doctest::test_suite("[long]")
) {
    for (Average const average :
         {Average::initial, Average::active, Average::weighted_mean, Average::weighted_sum}) {
        for (bool const views : {false, true}) {
            for (std::size_t const cap : {std::size_t{1}, std::size_t{40}, std::size_t{1} << 20U}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    auto const expected = train_serially(comm.size(), average, 0.1);
                    auto const values = train_together(comm, average, views, 0.1, cap);
                    CAPTURE(static_cast<int>(average));
                    CAPTURE(views);
                    for (std::size_t p = 0; p < values.size(); ++p) {
                        for (std::size_t i = 0; i < values[p].size(); ++i) {
                            CHECK(values[p][i] == doctest::Approx(expected[p][i]).epsilon(1e-12));
                        }
                    }
                });
            }
        }
    }
}

TEST_CASE("all ranks end with the same bits, before any final sync") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const values = train_together(comm, Average::weighted_mean, false, 0.1, 40);
        std::vector<double> flat;
        for (auto const& value : values) {
            flat.insert(flat.end(), value.begin(), value.end());
        }
        std::vector<double> all(flat.size() * static_cast<std::size_t>(comm.size()));
        comm.all_gather(joinable::to_const_buffer(flat), joinable::to_buffer(all)).wait();
        for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK(all[i] == flat[i % flat.size()]);
        }
    });
}

TEST_CASE(
    "process ranks train to the same bits as thread ranks" *
    doctest::skip(!ranks_share_memory || !sums_in_rank_order)
) {
    for (Average const average : {Average::initial, Average::active, Average::weighted_mean}) {
        for (bool const views : {false, true}) {
            for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
                std::vector<std::vector<double>> by_threads;
                over_ranks({world}, [&](RankCommunicator& comm) {
                    auto values = train_together(comm, average, views, 0.1, 40);
                    if (comm.rank() == comm.size() - 1) {
                        by_threads = std::move(values);
                    }
                });
                auto const train = [&](joinable::ProcessCommunicator& comm) {
                    CHECK(train_together(comm, average, views, 0.1, 40) == by_threads);
                };
                run_process_ranks({world}, train);
                run_named_ranks({world}, train);
            }
        }
    }
}

TEST_CASE("the core concept's members are enough for a model") {
    over_ranks({1, 2, 4}, [](RankCommunicator& inner) {
        CoreOnly comm{inner};
        auto const expected = train_serially(comm.size(), Average::active, 0.1);
        auto const values = train_together(comm, Average::active, false, 0.1, 40);
        CHECK(values[0][0] == doctest::Approx(expected[0][0]).epsilon(1e-12));
    });
}

/// Leaves factors to the sum, also where that rounds them to the dtype. Here they have it.
struct SumsScaled : CoreOnly<RankCommunicator> {
    using CoreOnly<RankCommunicator>::CoreOnly;
    using CoreOnly<RankCommunicator>::all_reduce;
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op, double factor) {
        return inner_.all_reduce(buffer, op, factor);
    }
};
static_assert(joinable::ScalesSums<SumsScaled>);

TEST_CASE("whether gradients are scaled as they are packed or as they are summed changes no bit") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        SumsScaled sums_scaled{comm};
        CoreOnly packs_scaled{comm};
        for (bool const are_views : {false, true}) {
            for (Average const average : {Average::initial, Average::weighted_mean}) {
                CHECK(
                    train_together(sums_scaled, average, are_views, 0.1, 40) ==
                    train_together(packs_scaled, average, are_views, 0.1, 40)
                );
            }
        }
    });
}

TEST_CASE(
    "every rank issues the same collectives, joined ranks too" * doctest::skip(!ranks_share_memory)
) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<std::vector<std::string>> traces(static_cast<std::size_t>(world));
        over_ranks({world}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            train_together(comm, Average::weighted_mean, false, 0.1, 40);
            traces[static_cast<std::size_t>(comm.rank())] = comm.trace;
        });
        for (auto const& trace : traces) {
            CHECK(trace == traces.front());
        }
    }
}

TEST_CASE("the tutorial's numbers: gradients of 3 with the initial world, 6 with the active ranks"
) {
    // Inputs 5 and 6, gradient 1 per input, gradients not zeroed: what PyTorch leaves on the rank
    // that trains longest. Joined ranks of ours receive the same average.
    for (bool const by_initial : {true, false}) {
        over_ranks({2}, [&](RankCommunicator& comm) {
            std::vector<Param<float>> params;
            params.emplace_back(1);
            DistributedDataParallel ddp{
                comm, params, {.joined_gradients = joinable::JoinedGradients::kept}
            };
            Join guard{participants(ddp), joinable::divide_by_initial_world_size = by_initial};
            for (int i = 0; i < 5 + comm.rank(); ++i) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    params[0].g(0) += 1.0F;
                    ready(0);
                });
            }
            guard.finish();
            CHECK(params[0].g(0) == (by_initial ? 3.0F : 6.0F));
        });
    }
}

TEST_CASE("weights give the same result outside a guard and in one that is not enabled") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        auto const gradient_with = [&](auto const& make_guard) {
            std::vector<Param<double>> params;
            params.emplace_back(1);
            DistributedDataParallel ddp{comm, params};
            [[maybe_unused]] auto const guard = make_guard(ddp);
            auto const weight = static_cast<std::uint64_t>(comm.rank() + 1);
            ddp.forward([] {}, {.weight = weight});
            ddp.backward([&](auto ready) {
                params[0].g(0) = comm.rank();
                ready(0);
            });
            return params[0].g(0);
        };
        double weighted = 0;
        double weights = 0;
        for (int rank = 0; rank < comm.size(); ++rank) {
            weighted += rank * (rank + 1.0);
            weights += rank + 1.0;
        }
        double const expected = weighted / weights;
        CHECK(gradient_with([](auto&) { return 0; }) == doctest::Approx(expected));
        CHECK(gradient_with([](auto& ddp) {
                  return Join{participants(ddp), {.enable = false}};
              }) == doctest::Approx(expected));
        CHECK(gradient_with([](auto& ddp) {
                  return Join{participants(ddp)};
              }) == doctest::Approx(expected));
    });
}

TEST_CASE("weights that sum to 0 average to zeros, of both kinds, and the optimizer steps") {
    enum class Guarded { yes, not_enabled, no };
    for (Guarded const guarded : {Guarded::yes, Guarded::not_enabled, Guarded::no}) {
        for (GradientKind const kind : {GradientKind::mean, GradientKind::sum}) {
            for (bool const views : {false, true}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    Params params = make_params<double>({1});
                    DistributedDataParallel ddp{
                        comm, params, {.gradient_as_bucket_view = views, .gradient_kind = kind}
                    };
                    int contributors = 0;
                    double velocity = 8.0;
                    joinable::Step step{comm, [&](joinable::Round const& round) {
                                            contributors = round.contributor_count();
                                            velocity = velocity / 2 + params[0].g(0);
                                        }};
                    std::optional<Join<decltype(ddp), decltype(step)>> guard;
                    if (guarded != Guarded::no) {
                        guard.emplace(
                            participants(ddp, step),
                            joinable::JoinOptions{.enable = guarded == Guarded::yes}
                        );
                    }
                    ddp.forward([] {}, {.weight = 0});
                    ddp.backward([&](auto ready) {
                        params[0].g(0) = kind == GradientKind::mean ? std::nan("") : 5.0;
                        ready(0);
                    });
                    step.step();
                    CHECK(params[0].g(0) == 0.0);
                    CHECK(velocity == 4.0);
                    CHECK(contributors == (guarded == Guarded::yes ? 0 : comm.size()));
                    ddp.forward([] {}, {.weight = 2}); // and training goes on
                    ddp.backward([&](auto ready) {
                        params[0].g(0) = kind == GradientKind::mean ? 1.0 : 2.0;
                        ready(0);
                    });
                    step.step();
                    CHECK(params[0].g(0) == 1.0);
                    CHECK(contributors == comm.size());
                });
            }
        }
    }
}

TEST_CASE("rounds without gradients, evaluation and accumulation, reduce nothing") {
    over_ranks({1, 2, 4}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        Join guard{participants(ddp)};
        comm.trace.clear();
        for (int i = 0; i < 1 + comm.rank(); ++i) {
            ddp.forward([] {}, {.phase = joinable::Phase::evaluate});
            ddp.forward([] {}, {.will_sync = false});
            ddp.backward([&](auto ready) { ready(0); });
        }
        auto const result = guard.finish();
        for (std::string const& collective : comm.trace) {
            CHECK(collective != "all_reduce 1 f64");
        }
        CHECK(result.rounds == 2 * static_cast<std::size_t>(comm.size()));
        CHECK(result.unsynced_rounds == static_cast<std::size_t>(comm.size()));
    });
}

TEST_CASE(
    "models with another count, shape or dtype are refused on all ranks by the first difference"
) {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const odd = comm.size() - 1;
        auto const construct = [&]<class T>(T, std::size_t count, std::size_t numel) {
            std::vector<Param<T>> params;
            for (std::size_t i = 0; i < count; ++i) {
                params.emplace_back(i == 1 ? numel : 4);
            }
            std::string text;
            try {
                DistributedDataParallel ddp{comm, params};
            } catch (joinable::Mismatch const& error) {
                CHECK(error.ranks() == std::vector{odd});
                text = error.what();
            }
            return text;
        };
        bool const is_odd = comm.rank() == odd;
        CHECK(
            construct(0.0, is_odd ? 3 : 2, 4) ==
            joinable::detail::concat(
                "models differ: number of parameters: rank 0 has 2, rank ", odd, " has 3"
            )
        );
        CHECK(
            construct(0.0, 3, is_odd ? 5 : 4) ==
            joinable::detail::concat(
                "models differ: parameter 1: rank 0 has f64 (4), rank ", odd, " has f64 (5)"
            )
        );
        CHECK(
            (is_odd ? construct(0.0F, 3, 4) : construct(0.0, 3, 4)) ==
            joinable::detail::concat(
                "models differ: parameter 0: rank 0 has f64 (4), rank ", odd, " has f32 (4)"
            )
        );
        CHECK(construct(0.0, 3, 4).empty()); // the communicator stays usable
    });
}

struct Pointed {
    joinable::AnyView value;
    joinable::AnyView grad;
    std::string name;
    bool requires_grad = true;
};

TEST_CASE("elements at a null pointer are named on all ranks when the model is made") {
    enum class Null { value, gradient, both_gradients, buffer, state };
    for (Null const null :
         {Null::value, Null::gradient, Null::both_gradients, Null::buffer, Null::state}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::vector<double> memory(12);
            bool const is_odd = comm.rank() == comm.size() - 1;
            auto const view = [&](std::size_t at, bool is_null) {
                void* const data = is_null && is_odd ? nullptr : memory.data() + at;
                return joinable::AnyView{data, joinable::DType::f64, {2}, {1}};
            };
            bool const are_both = null == Null::both_gradients;
            std::vector<Pointed> params{
                {view(0, false), view(2, are_both), "first"},
                {view(4, null == Null::value), view(6, are_both || null == Null::gradient), "last"}
            };
            std::vector<joinable::AnyView> buffers{view(8, null == Null::buffer)};
            std::vector<joinable::AnyView> state{view(10, null == Null::state)};
            std::string text;
            try {
                DistributedDataParallel ddp{comm, params, joinable::buffers(buffers)};
                ddp.attach_state(state);
            } catch (joinable::ContractViolation const& error) {
                CHECK(is_odd);
                text = error.what();
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == comm.size() - 1);
                text = error.what();
            }
            std::string const why =
                null == Null::value      ? "parameter 1 (last) has a value at a null"
                : null == Null::gradient ? "parameter 1 (last) has a gradient at a null pointer"
                : are_both               ? "parameter 0 (first) has a gradient at a null pointer"
                : null == Null::buffer   ? "buffer 0 has elements at a null pointer"
                                         : "state tensor 0 has elements at a null pointer";
            CAPTURE(text);
            CHECK(text.find(why) != std::string::npos);
        });
    }
}

TEST_CASE("a tensor without elements, and a frozen parameter's gradient, may be at a null pointer"
) {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<double> memory(6);
        auto const view = [](double* data, std::size_t count) {
            return joinable::AnyView{data, joinable::DType::f64, {count}, {1}};
        };
        std::vector<Pointed> params{
            {view(memory.data(), 2), view(memory.data() + 2, 2), "trained"},
            {view(nullptr, 0), view(nullptr, 0), "empty"},
            {view(memory.data() + 4, 1), view(nullptr, 1), "frozen", false},
            {view(memory.data() + 5, 1), view(nullptr, 1), "frozen, too", false}
        };
        CHECK_NOTHROW(DistributedDataParallel{comm, params});
    });
}

TEST_CASE("a gradient that loses its memory later is named, not read") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<double> memory(4);
        auto const view = [](void* data) {
            return joinable::AnyView{data, joinable::DType::f64, {2}, {1}};
        };
        std::vector<Pointed> params{{view(memory.data()), view(memory.data() + 2), "weight"}};
        DistributedDataParallel ddp{comm, params};
        ddp.forward([] {});
        auto const pass = [&](auto ready) {
            params[0].grad = view(nullptr);
            ready(0);
        };
        CHECK_THROWS_WITH_AS(
            ddp.backward(pass),
            "parameter 0 (weight) has a gradient at a null pointer; give it memory, or no gradient, "
            "where grad() is empty",
            joinable::ContractViolation
        );
    });
}

TEST_CASE("make_data_parallel makes on the heap what the constructor makes") {
    run_ranks({1, 2}, [](auto& comm) {
        Params params = params_of(comm.rank());
        auto const plain = joinable::make_data_parallel(comm, params, {.bucket_cap_bytes = 16});
        CHECK(plain->options().bucket_cap_bytes == 16);
        CHECK(params[0].value == params_of(0)[0].value);
        std::vector<double> means(3, comm.rank());
        auto const with_buffers = joinable::make_data_parallel(
            comm, params, joinable::buffers(means), {.find_unused = true}
        );
        CHECK(means == std::vector<double>(3, 0.0));
        CHECK(with_buffers->options().find_unused);
        with_buffers->forward([] {});
        with_buffers->backward([&](auto ready) {
            for (std::size_t i = 0; i < params.size(); ++i) {
                for (std::size_t k = 0; k < params[i].value.size(); ++k) {
                    params[i].g(k) = comm.rank();
                }
                ready(i);
            }
        });
        CHECK(params[1].g(0) == 0.5 * (comm.size() - 1));
    });
}

TEST_CASE("options that differ are refused on all ranks") {
    joinable::DataParallelOptions const others[] = {
        {.bucket_cap_bytes = 100},
        {.first_bucket_bytes = 100},
        {.gradient_as_bucket_view = true},
        {.find_unused = true},
        {.static_graph = true},
        {.gradient_kind = GradientKind::sum},
        {.bucket_caps_bytes = {100}},
        {.rebuild_buckets = false},
        {.joined_gradients = joinable::JoinedGradients::kept},
        {.unused_gradients = joinable::UnusedGradients::held},
    };
    for (joinable::DataParallelOptions const& other : others) {
        over_ranks({2, 4}, [&](RankCommunicator& comm) {
            std::vector<Param<double>> params;
            params.emplace_back(1);
            auto const construct = [&] {
                DistributedDataParallel ddp{
                    comm, params, comm.rank() == 0 ? other : joinable::DataParallelOptions{}
                };
            };
            CHECK_THROWS_AS(construct(), joinable::Mismatch);
        });
    }
}

TEST_CASE("a constructor that fails on one rank fails on all, with its text") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>*> params;
        Param<double> param{1};
        params.push_back(comm.rank() == 1 ? nullptr : &param);
        auto const construct = [&] { DistributedDataParallel ddp{comm, params}; };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(construct(), joinable::ContractViolation);
        } else {
            try {
                construct();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == 1);
                CHECK(std::string{error.what()} == "rank 1 failed: parameters: pointer 0 is null");
            }
        }
        comm.barrier();
    });
}

TEST_CASE("parameters of several types and dtypes are one model") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<float>> floats;
        floats.emplace_back(3, static_cast<float>(comm.rank()));
        std::vector<Param<double>> doubles;
        doubles.emplace_back(2, 5.0 + comm.rank());
        std::vector<Param<joinable::BFloat16>> small;
        small.emplace_back(4);
        floats[0].name = "f";
        DistributedDataParallel ddp{comm, joinable::parameters(floats, doubles, small)};
        CHECK(ddp.buckets().size() == 3);
        CHECK(floats[0].value[2] == 0.0F);
        CHECK(doubles[0].value[1] == 5.0);
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            floats[0].g(1) = 1.0F;
            doubles[0].g(1) = static_cast<double>(comm.rank());
            small[0].g(3) = joinable::BFloat16{2.0F};
            for (std::size_t i : {2U, 1U, 0U}) {
                ready(i);
            }
        });
        CHECK(floats[0].g(1) == doctest::Approx(1.0F));
        CHECK(doubles[0].g(1) == doctest::Approx((comm.size() - 1) / 2.0));
        CHECK(static_cast<float>(small[0].g(3)) == doctest::Approx(2.0F).epsilon(0.02));
    });
}

TEST_CASE("a throw in the passes or verbs reaches the peers with its text") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        std::string text;
        try {
            Join guard{participants(ddp)};
            for (int i = 0; i < 3; ++i) {
                ddp.forward([&] {
                    if (i == 1 && comm.rank() == 1) {
                        throw std::runtime_error{"bad sample"};
                    }
                });
                ddp.backward([](auto ready) { ready(0); });
            }
            guard.finish();
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.rank() == 1);
            text = error.what();
        } catch (std::runtime_error const& error) {
            text = error.what();
        }
        CHECK(text == (comm.rank() == 1 ? "bad sample" : "rank 1 failed: bad sample"));
    });
}

TEST_CASE("in a guard a forward without its backward is a violation, outside it is nothing") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        for (int i = 0; i < 3; ++i) { // outputs that are not used
            ddp.forward([] {});
        }
        ddp.backward([](auto ready) { ready(0); });
    });
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        auto const twice = [&] {
            Join guard{participants(ddp)};
            ddp.forward([] {});
            ddp.forward([] {});
        };
        CHECK_THROWS_AS(twice(), joinable::ContractViolation);
    });
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        auto const leave = [&] {
            Join guard{participants(ddp)};
            ddp.forward([] {});
            guard.finish();
        };
        CHECK_THROWS_AS(leave(), joinable::ContractViolation);
    });
}

TEST_CASE("a model without parameters to train is refused") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params;
        auto const construct = [&] { DistributedDataParallel ddp{comm, params}; };
        CHECK_THROWS_WITH_AS(
            construct(),
            doctest::Contains("the list of parameters is empty"),
            joinable::ContractViolation
        );
        params.emplace_back(1);
        params[0].requires_grad = false;
        CHECK_THROWS_WITH_AS(
            construct(),
            doctest::Contains("no parameter requires a gradient"),
            joinable::ContractViolation
        );
    });
}

TEST_CASE("a parameter listed twice, and values or gradients in one place, are named on all ranks"
) {
    enum class Shared {
        listing,
        values,
        gradients,
        gradient_and_own_value,
        gradient_and_another_value
    };
    for (Shared const shared :
         {Shared::listing,
          Shared::values,
          Shared::gradients,
          Shared::gradient_and_own_value,
          Shared::gradient_and_another_value}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::vector<double> memory(10);
            bool const is_odd = comm.rank() == comm.size() - 1;
            auto const view = [&](std::size_t at) {
                return joinable::AnyView{memory.data() + at, joinable::DType::f64, {2}, {1}};
            };
            // By one of two elements, but for the last.
            std::vector<Pointed> params{
                {view(0), view(5), "first"},
                {view(is_odd && shared == Shared::values ? 1 : 2),
                 view(
                     !is_odd                                        ? 7
                     : shared == Shared::gradients                  ? 6
                     : shared == Shared::gradient_and_own_value     ? 3
                     : shared == Shared::gradient_and_another_value ? 0
                                                                    : 7
                 ),
                 "second"}
            };
            bool const is_twice = is_odd && shared == Shared::listing;
            std::vector<Pointed*> const list{params.data(), params.data() + (is_twice ? 0 : 1)};
            std::string text;
            try {
                DistributedDataParallel ddp{comm, list};
            } catch (joinable::ContractViolation const& error) {
                CHECK(is_odd);
                text = error.what();
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == comm.size() - 1);
                text = error.what();
            }
            std::string const why =
                shared == Shared::listing
                    ? "parameter 0 (first) and parameter 1 (first) share memory"
                : shared == Shared::values
                    ? "parameter 0 (first) and parameter 1 (second) share memory"
                : shared == Shared::gradients
                    ? "the gradients of parameter 0 (first) and parameter 1 "
                      "(second) share memory"
                : shared == Shared::gradient_and_own_value
                    ? "the gradient of parameter 1 (second) shares memory with the value of "
                      "parameter 1 (second), which its average would overwrite; give"
                    : "the gradient of parameter 1 (second) shares memory with the value of "
                      "parameter 0 (first), which its average would overwrite; give";
            std::string const who =
                is_odd ? "" : joinable::detail::concat("rank ", comm.size() - 1, " failed: ");
            CAPTURE(text);
            CHECK(text.starts_with(who + why));
        });
    }
}

TEST_CASE("a model follows the notice that next() gave: it reduces in rounds that sync, no others"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        comm.trace.clear();
        Join guard{participants(ddp)};
        int const inputs = 1 + comm.rank();
        std::size_t reduced = 0;
        for (int i = 0; i < inputs; ++i) {
            CHECK(guard.next(true, {.phase = joinable::Phase::evaluate}));
            ddp.forward([] {});
            CHECK(guard.next(true, {.will_sync = false, .weight = 2}));
            ddp.forward([] {});
            ddp.backward([&](auto ready) { ready(0); });
            CHECK(guard.next(true, {.weight = 2}));
            params[0].g(0) = 1.0;
            ddp.forward([] {});
            ddp.backward([&](auto ready) { ready(0); });
            CHECK(params[0].g(0) == doctest::Approx(1.0)); // weighted: over the active ranks
        }
        guard.finish();
        for (std::string const& collective : comm.trace) {
            reduced += collective == "all_reduce 1 f64" ? 1U : 0U;
        }
        CHECK(reduced == static_cast<std::size_t>(comm.size()));
    });
}

TEST_CASE("a model can be trained on after a peer left a guard between rounds") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params;
        params.emplace_back(1);
        DistributedDataParallel ddp{comm, params};
        auto const train = [&](bool fails) {
            Join guard{participants(ddp)};
            for (int i = 0; i < 2; ++i) {
                if (fails && i == 1 && comm.rank() == 1) {
                    throw std::domain_error{"no more data"};
                }
                params[0].g(0) = 1.0;
                ddp.forward([] {});
                ddp.backward([](auto ready) { ready(0); });
            }
            guard.finish();
        };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(train(true), std::domain_error);
        } else {
            CHECK_THROWS_AS(train(true), joinable::PeerFailed);
        }
        train(false);
        CHECK(params[0].g(0) == doctest::Approx(1.0));
    });
}

TEST_CASE("a rank of weight 0 contributes nothing, not even a mean over no samples") {
    for (bool const views : {false, true}) {
        over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
            std::vector<Param<double>> params;
            params.emplace_back(1);
            DistributedDataParallel ddp{comm, params, {.gradient_as_bucket_view = views}};
            Join guard{participants(ddp)};
            ddp.forward([] {}, {.weight = comm.rank() == 0 ? 0U : 3U});
            ddp.backward([&](auto ready) {
                params[0].g(0) = comm.rank() == 0 ? std::nan("") : 5.0;
                ready(0);
            });
            guard.finish();
            CHECK(params[0].g(0) == doctest::Approx(5.0));
        });
    }
}

TEST_CASE("the first parameter that differs is named where it has a name") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        std::vector<Param<float>> params;
        params.emplace_back(2);
        params.emplace_back(comm.rank() == 1 ? 3U : 4U);
        params[1].name = "fc.weight";
        auto const construct = [&] { DistributedDataParallel ddp{comm, params}; };
        CHECK_THROWS_WITH_AS(
            construct(),
            "models differ: parameter 1 (fc.weight): rank 0 has f32 (4), rank 1 has f32 (3)",
            joinable::Mismatch
        );
    });
}

TEST_CASE("strides that differ are refused on all ranks") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        std::vector<float> value(6);
        std::vector<float> gradient(6);
        bool const by_columns = comm.rank() == 1;
        auto const strided = [&](std::vector<float>& storage) {
            return by_columns ? joinable::as_strided(storage, {2, 3}, {1, 2})
                              : joinable::as_strided(storage, {2, 3}, {3, 1});
        };
        std::vector<Strided> params{{strided(value), strided(gradient)}};
        auto const construct = [&] { DistributedDataParallel ddp{comm, params}; };
        CHECK_THROWS_AS(construct(), joinable::Mismatch);
    });
}

TEST_CASE("gradients are averaged whatever their strides, with typed and untyped neighbours") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        // By columns; with gaps in the gradient; with gaps in both.
        std::vector<std::vector<float>> memory(6, std::vector<float>(24, -1.0F));
        std::vector<Strided> strided{
            {joinable::as_strided(memory[0], {3, 4}, {1, 3}),
             joinable::as_strided(memory[1], {3, 4}, {4, 1})},
            {joinable::as_strided(memory[2], {3, 4}, {4, 1}),
             joinable::as_strided(memory[3], {3, 4}, {8, 2})},
            {joinable::as_strided(memory[4], {3, 4}, {8, 1}),
             joinable::as_strided(memory[5], {3, 4}, {1, 6})},
        };
        std::vector<double> value(2);
        std::vector<double> gradient(2);
        std::vector<Untyped> untyped{{joinable::AnyView{value}, joinable::AnyView{gradient}}};
        DistributedDataParallel ddp{
            comm,
            joinable::parameters(strided, untyped),
            {.bucket_cap_bytes = 100, .first_bucket_bytes = 1}
        };
        auto const element = [&](std::size_t p, std::size_t i, std::size_t j) {
            return static_cast<float>(100 * p + 10 * i + j);
        };
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t const p : {1U, 0U, 3U, 2U}) {
                if (p == 3) {
                    gradient[1] = comm.rank();
                } else {
                    for (std::size_t i = 0; i < 3; ++i) {
                        for (std::size_t j = 0; j < 4; ++j) {
                            strided[p].grad(i, j) =
                                element(p, i, j) * static_cast<float>(comm.rank() + 1);
                        }
                    }
                }
                ready(p);
            }
        });
        float const mean_rank = static_cast<float>(comm.size() + 1) / 2.0F;
        for (std::size_t p = 0; p < 3; ++p) {
            for (std::size_t i = 0; i < 3; ++i) {
                for (std::size_t j = 0; j < 4; ++j) {
                    CHECK(strided[p].grad(i, j) == doctest::Approx(element(p, i, j) * mean_rank));
                }
            }
        }
        CHECK(gradient[1] == doctest::Approx((comm.size() - 1) / 2.0));
        CHECK(memory[3][1] == -1.0F); // gaps are not written
        CHECK(memory[5][3] == -1.0F);
    });
}

} // namespace
