// SPDX-License-Identifier: BSL-1.0
// A network trained by several ranks equals the same network trained by one, which computes each
// average by its formula. All comparisons are bitwise: sums over ranks are in rank order, and
// factors come before them, here as there.
#include <joinable/participant/data_parallel.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/branching_net.hpp>
#include <support/volume.hpp>

#include <joinable/detail/text.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using Gradients = std::vector<std::vector<double>>;

enum class Shards { even, uneven, one_without, all_but_one_without };
enum class Mode { plain, finds_unused, is_static };
enum class Average { initial, active, weighted_mean, weighted_sum };

struct Case {
    Shards shards;
    Mode mode;
    bool views;
    std::size_t accumulation; ///< micro-batches per round that syncs
    Average average;

    [[nodiscard]] bool is_weighted() const {
        return average == Average::weighted_mean || average == Average::weighted_sum;
    }
    [[nodiscard]] std::size_t length_of(int rank, int world) const {
        switch (shards) {
        case Shards::even: return 5;
        case Shards::uneven: return static_cast<std::size_t>(1 + 3 * rank % 7);
        case Shards::one_without: return rank == 0 ? 0 : static_cast<std::size_t>(4 + rank % 2);
        case Shards::all_but_one_without: return rank == world / 2 ? 7 : 0;
        }
        return 0;
    }
    /// Micro-batches have 1 to 3 samples. In a static graph each rank takes one head, else each
    /// micro-batch does.
    [[nodiscard]] std::vector<Sample> batch(int rank, std::size_t i) const {
        std::vector<Sample> samples;
        auto const r = static_cast<std::size_t>(rank);
        bool const is_right = mode == Mode::is_static ? r % 2 == 1 : (r + i) % 3 == 0;
        for (std::size_t s = 0; s <= (i + r) % 3; ++s) {
            double const x = 0.25 * static_cast<double>(r) + 0.5 * static_cast<double>(i);
            samples.push_back({{x - static_cast<double>(s), 1.0 - x}, 0.5 * x, is_right});
        }
        return samples;
    }
    /// What a micro-batch adds to the gradients, the mean or the sum over its samples.
    [[nodiscard]] Gradients
    gradients(BranchingNet const& net, std::vector<Sample> const& samples) const {
        Gradients gradients = net.zero_gradients();
        double const scale =
            average == Average::weighted_sum ? 1.0 : 1.0 / static_cast<double>(samples.size());
        for (Sample const& sample : samples) {
            net.add_gradient(sample, scale, gradients);
        }
        return gradients;
    }
    /// Whether a micro-batch uses a parameter. Where nobody asks, all are said to be used.
    [[nodiscard]] bool uses(std::vector<Sample> const& samples, std::size_t p) const {
        bool const is_right = samples.front().takes_right_head;
        bool const is_other = p == (is_right ? BranchingNet::left : BranchingNet::right);
        return mode == Mode::plain || (p != BranchingNet::spare && !is_other);
    }
};

/// What one rank holds between two rounds that sync, in the serial training.
struct Accumulated {
    Gradients gradients;
    std::vector<bool> uses = std::vector<bool>(BranchingNet::count);
    std::uint64_t weight = 0;
    bool contributes = false;
};

/// By the formulas: sum of factor * gradient over ranks, in rank order.
template <class T>
std::vector<T> average_of(
    std::vector<Accumulated> const& ranks, std::vector<double> const& factors, std::size_t p
) {
    std::vector<T> average(ranks.front().gradients[p].size());
    for (std::size_t i = 0; i < average.size(); ++i) {
        for (std::size_t r = 0; r < ranks.size(); ++r) {
            T const gradient = ranks[r].contributes && ranks[r].uses[p]
                                   ? static_cast<T>(ranks[r].gradients[p][i])
                                   : T{};
            T const term = gradient * static_cast<T>(factors[r]);
            average[i] = r == 0 ? term : average[i] + term;
        }
    }
    return average;
}

BranchingNet train_serially(Case const& what, int world) {
    BranchingNet net;
    std::size_t rounds = 0;
    for (int rank = 0; rank < world; ++rank) {
        rounds = std::max(rounds, what.length_of(rank, world));
    }
    std::vector<Accumulated> const nothing(
        static_cast<std::size_t>(world), Accumulated{.gradients = net.zero_gradients()}
    );
    std::vector<Accumulated> held = nothing;
    std::vector<bool> is_in_graph; ///< static: what the first iteration used
    for (std::size_t i = 0; i < rounds; ++i) {
        for (int rank = 0; rank < world; ++rank) {
            if (i >= what.length_of(rank, world)) {
                continue;
            }
            auto const batch = what.batch(rank, i);
            Gradients const gradients = what.gradients(net, batch);
            Accumulated& own = held[static_cast<std::size_t>(rank)];
            own.weight += batch.size();
            own.contributes = true;
            for (std::size_t p = 0; p < gradients.size(); ++p) {
                own.uses[p] = own.uses[p] || what.uses(batch, p);
                for (std::size_t e = 0; e < gradients[p].size(); ++e) {
                    double const sum = own.gradients[p][e] + gradients[p][e];
                    own.gradients[p][e] = p < 2 ? static_cast<float>(sum) : sum;
                }
            }
        }
        if (i % what.accumulation != what.accumulation - 1) {
            continue;
        }
        double contributors = 0;
        double weights = 0;
        std::vector<bool> used(BranchingNet::count);
        for (Accumulated const& rank : held) {
            contributors += rank.contributes ? 1 : 0;
            weights += static_cast<double>(rank.weight);
            for (std::size_t p = 0; p < used.size(); ++p) {
                used[p] = used[p] || rank.uses[p];
            }
        }
        double const divisor = what.is_weighted()                ? weights
                               : what.average == Average::active ? contributors
                                                                 : world;
        std::vector<double> factors;
        for (Accumulated const& rank : held) {
            double const own =
                what.average == Average::weighted_mean ? static_cast<double>(rank.weight) : 1.0;
            factors.push_back(rank.contributes ? own / divisor : 0.0);
        }
        if (what.mode == Mode::is_static) {
            is_in_graph = is_in_graph.empty() ? used : is_in_graph;
            used = is_in_graph;
        }
        net.for_each([&]<class T>(Param<T>& param, std::size_t p) {
            if (used[p]) {
                net.step(param, p, average_of<T>(held, factors, p));
            }
        });
        held = nothing;
    }
    return net;
}

/// The same on the ranks of any communicator. Throws where a bit differs from the serial one.
template <class Comm>
void train_together(Comm& comm, Case const& what) {
    BranchingNet const expected = train_serially(what, comm.size());
    BranchingNet net{1.0 + comm.rank()}; // until rank 0's values are taken
    joinable::DistributedDataParallel ddp{
        comm,
        joinable::parameters(net.floats, net.doubles),
        {.bucket_cap_bytes = 48,
         .first_bucket_bytes = 8,
         .gradient_as_bucket_view = what.views,
         .find_unused = what.mode == Mode::finds_unused,
         .static_graph = what.mode == Mode::is_static,
         .gradient_kind = what.average == Average::weighted_sum ? joinable::GradientKind::sum
                                                                : joinable::GradientKind::mean,
         .sync_at_end = false}
    };
    net.for_each([](auto& param, std::size_t) { param.grad = {}; });
    // Gradients are dropped after the step: joined ranks do so, too, or would keep old ones of what
    // is not used any more.
    joinable::Step step{comm, [&] {
                            net.for_each([&]<class T>(Param<T>& param, std::size_t p) {
                                if (param.grad) {
                                    auto const view = param.grad.template as<T>();
                                    net.step(param, p, std::vector<T>(view.begin(), view.end()));
                                    param.grad = {};
                                }
                            });
                        }};
    {
        joinable::Join guard{
            joinable::participants(ddp, step),
            joinable::divide_by_initial_world_size = what.average != Average::active
        };
        for (std::size_t i = 0; i < what.length_of(comm.rank(), comm.size()); ++i) {
            auto const batch = what.batch(comm.rank(), i);
            bool const syncs = i % what.accumulation == what.accumulation - 1;
            joinable::RoundNotice notice{.will_sync = syncs};
            if (what.is_weighted()) {
                notice.weight = batch.size();
            }
            Gradients gradients;
            ddp.forward([&] { gradients = what.gradients(net, batch); }, notice);
            auto const pass = [&](auto const& ready) {
                net.for_each([&]<class T>(Param<T>& param, std::size_t p) {
                    if (!what.uses(batch, p)) {
                        return;
                    }
                    if (!param.grad) {
                        param.storage.assign(param.value.size(), T{});
                        param.grad = joinable::AnyView{param.storage};
                    }
                    for (std::size_t e = 0; e < gradients[p].size(); ++e) {
                        T& element = param.g(e);
                        element = static_cast<T>(static_cast<double>(element) + gradients[p][e]);
                    }
                    ready(p);
                });
            };
            if (what.mode == Mode::finds_unused) {
                ddp.backward(pass, [&](std::size_t p) { return !what.uses(batch, p); });
            } else {
                ddp.backward(pass);
            }
            if (syncs) {
                step.step();
            }
        }
        guard.finish();
    }
    for (std::size_t p = 0; p < BranchingNet::count; ++p) {
        bool const is_same = p < 2 ? net.floats[p].value == expected.floats[p].value
                                   : net.doubles[p - 2].value == expected.doubles[p - 2].value;
        if (!is_same || net.velocities[p] != expected.velocities[p]) {
            throw std::runtime_error{joinable::detail::concat(
                "rank ", comm.rank(), " of ", comm.size(), ": parameter ", p, " differs"
            )};
        }
    }
}

TEST_CASE(
    "a network trained by any number of ranks is, to the bit, the one that one rank trains" *
    doctest::test_suite("[long]") * doctest::skip(!sums_in_rank_order)
) {
    std::size_t cases = 0;
    for (Shards const shards :
         {Shards::even, Shards::uneven, Shards::one_without, Shards::all_but_one_without}) {
        for (Mode const mode : {Mode::plain, Mode::finds_unused, Mode::is_static}) {
            for (bool const views : {false, true}) {
                for (std::size_t const accumulation : {1U, 3U}) {
                    for (Average const average :
                         {Average::initial,
                          Average::active,
                          Average::weighted_mean,
                          Average::weighted_sum}) {
                        CAPTURE(static_cast<int>(shards));
                        CAPTURE(static_cast<int>(mode));
                        CAPTURE(views);
                        CAPTURE(accumulation);
                        CAPTURE(static_cast<int>(average));
                        Case const what{shards, mode, views, accumulation, average};
                        in_turn({1, 2, 3, 4, 8}, cases++, [&](int ranks) {
                            CHECK_NOTHROW(over_ranks({ranks}, [&](auto& comm) {
                                train_together(comm, what);
                            }));
                        });
                    }
                }
            }
        }
    }
}

TEST_CASE("training moves every parameter that some rank uses, and no other") {
    Case const what{Shards::uneven, Mode::finds_unused, false, 1, Average::initial};
    BranchingNet const trained = train_serially(what, 4);
    BranchingNet const fresh;
    for (std::size_t p = 0; p < 2; ++p) {
        CHECK(trained.floats[p].value != fresh.floats[p].value);
    }
    for (std::size_t p = 0; p < 3; ++p) {
        CHECK(trained.doubles[p].value != fresh.doubles[p].value);
    }
    CHECK(trained.doubles[3].value == fresh.doubles[3].value);
}

} // namespace
