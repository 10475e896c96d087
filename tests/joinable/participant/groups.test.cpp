// SPDX-License-Identifier: BSL-1.0
// A part of a model that all ranks share, and experts that groups of them share, in one guard: the numbers of one
// process in double, wherever ranks run out.
#include <joinable/join/groups.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/linear_model.hpp>
#include <support/thrown_by.hpp>
#include <support/volume.hpp>

#include <joinable/bucket/compression/no_reduction.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/periodic_average.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::JoinOptions;
using joinable::participants;
using joinable::RoundNotice;

enum class Average { over_all, over_contributors, by_weight };
enum class Opens { notification, next, look_ahead, known_lengths };

struct Plan {
    std::vector<int> lengths;  ///< of each rank
    std::vector<int> group_of; ///< each rank
    Average average = Average::over_all;
    std::size_t sync_every = 1;
    bool skips = false; ///< some ranks, some batches
    Opens opens = Opens::notification;

    [[nodiscard]] bool skips_batch(int rank, int batch) const {
        return skips && (rank + 2 * batch) % 3 == 0;
    }
};

std::uint64_t weight_of(int rank, int batch) {
    return 1 + static_cast<std::uint64_t>((2 * rank + batch) % 4);
}

struct Values {
    double shared = 1.0;
    double expert = 2.0;
    double velocity = 0.0; ///< of the expert: a step of zeros would show

    [[nodiscard]] double gradient_of_shared(int rank, int batch) const {
        return 0.3 * shared + 0.5 * expert + 0.1 * (rank + 1) + 0.01 * batch;
    }
    [[nodiscard]] double gradient_of_expert(int rank, int batch) const {
        return 0.2 * expert - 0.4 * shared + 0.07 * (rank + 1) - 0.02 * batch;
    }
};
constexpr double rate = 0.125;
constexpr double momentum = 0.75;

// -- on one process ------------------------------------------------------------------------------------

/// What a rank has accumulated since the last round that synced.
struct Held {
    double shared = 0;
    double expert = 0;
    std::uint64_t weight = 0;
    bool has_any = false;
};

/// The average over some ranks; none if nothing is there to average.
std::optional<double> average(
    Plan const& plan, std::vector<Held> const& all, std::vector<int> const& ranks, double Held::* of
) {
    double sum = 0;
    std::uint64_t weight = 0;
    int contributors = 0;
    for (int const rank : ranks) {
        Held const& held = all[static_cast<std::size_t>(rank)];
        if (held.has_any) {
            bool const weighs = plan.average == Average::by_weight;
            sum += (weighs ? static_cast<double>(held.weight) : 1.0) * held.*of;
            weight += held.weight;
            ++contributors;
        }
    }
    double const divisor = plan.average == Average::over_all    ? static_cast<double>(ranks.size())
                           : plan.average == Average::by_weight ? static_cast<double>(weight)
                                                                : static_cast<double>(contributors);
    return contributors == 0 ? std::nullopt : std::optional{sum / divisor};
}

/// The values of each rank after the training. Ranks of a group have the same.
std::vector<Values> train_serially(Plan const& plan) {
    std::size_t const world = plan.lengths.size();
    std::vector<Values> values(world);
    std::vector<Held> held(world);
    std::vector<int> everybody(world);
    std::iota(everybody.begin(), everybody.end(), 0);
    int const rounds = *std::max_element(plan.lengths.begin(), plan.lengths.end());
    int const groups = *std::max_element(plan.group_of.begin(), plan.group_of.end());
    for (int round = 0; round < rounds; ++round) {
        std::vector<bool> is_active(world);
        for (int rank = 0; rank < static_cast<int>(world); ++rank) {
            auto const r = static_cast<std::size_t>(rank);
            is_active[r] = round < plan.lengths[r];
            if (is_active[r] && !plan.skips_batch(rank, round)) {
                held[r].shared += values[r].gradient_of_shared(rank, round);
                held[r].expert += values[r].gradient_of_expert(rank, round);
                held[r].weight += weight_of(rank, round);
                held[r].has_any = true;
            }
        }
        if ((static_cast<std::size_t>(round) + 1) % plan.sync_every != 0) {
            continue;
        }
        double const shared = average(plan, held, everybody, &Held::shared).value_or(0.0);
        for (int group = 0; group <= groups; ++group) {
            std::vector<int> members;
            bool some_is_active = false;
            for (int const rank : everybody) {
                auto const r = static_cast<std::size_t>(rank);
                if (plan.group_of[r] == group) {
                    members.push_back(rank);
                    some_is_active = some_is_active || is_active[r];
                }
            }
            auto const expert = average(plan, held, members, &Held::expert);
            for (int const rank : members) {
                Values& own = values[static_cast<std::size_t>(rank)];
                if (some_is_active || expert) {
                    own.velocity = momentum * own.velocity + expert.value_or(0.0);
                    own.expert -= rate * own.velocity;
                }
                own.shared -= rate * shared;
            }
        }
        held.assign(world, {});
    }
    return values;
}

// -- on ranks ------------------------------------------------------------------------------------------

template <class Loop>
void run_loop(Plan const& plan, int rank, auto& guard, auto const& notice_of, Loop const& loop) {
    std::vector<int> batches(static_cast<std::size_t>(plan.lengths[static_cast<std::size_t>(rank)])
    );
    std::iota(batches.begin(), batches.end(), 0);
    switch (plan.opens) {
    case Opens::notification:
    case Opens::known_lengths:
        for (int const batch : batches) {
            loop(batch);
        }
        break;
    case Opens::next:
        for (int const batch : guard.iterate(batches, notice_of)) {
            loop(batch);
        }
        break;
    case Opens::look_ahead:
        for (int const batch : guard.iterate(joinable::look_ahead, batches, notice_of)) {
            loop(batch);
        }
        break;
    }
}

Values train(RankCommunicator& comm, RankCommunicator& group, Plan const& plan) {
    int const rank = comm.rank();
    auto shared = make_params<double>({1}, Values{}.shared);
    auto expert = make_params<double>({1}, Values{}.expert);
    DistributedDataParallel of_all{comm, shared};
    DistributedDataParallel of_group{group, expert};
    auto const clear = [](Param<double>& param) { param.g(0) = 0; };
    joinable::Step step_all{comm, [&] {
                                shared[0].value[0] -= rate * shared[0].g(0);
                                clear(shared[0]);
                            }};
    double velocity = 0;
    joinable::Step step_group{group, [&] {
                                  velocity = momentum * velocity + expert[0].g(0);
                                  expert[0].value[0] -= rate * velocity;
                                  clear(expert[0]);
                              }};
    auto const notice_of = [&](int batch) {
        RoundNotice notice{};
        if (plan.average == Average::by_weight) {
            notice.weight = weight_of(rank, batch);
        }
        notice.skips = plan.skips_batch(rank, batch);
        notice.will_sync = (static_cast<std::size_t>(batch) + 1) % plan.sync_every == 0;
        return notice;
    };
    JoinOptions options{};
    if (plan.opens == Opens::known_lengths) {
        options.sync_every = plan.sync_every;
        options.inputs = static_cast<std::size_t>(plan.lengths[static_cast<std::size_t>(rank)]);
    }
    {
        Join guard{
            participants(of_all, of_group, step_all, step_group),
            joinable::groups_of(comm),
            options,
            joinable::divide_by_initial_world_size = plan.average == Average::over_all
        };
        run_loop(plan, rank, guard, notice_of, [&](int batch) {
            auto const before = Values{shared[0].value[0], expert[0].value[0]};
            RoundNotice const notice = notice_of(batch);
            auto const pass = [&](auto& model, auto& params, double gradient) {
                if (notice.skips) {
                    model.skip({.will_sync = notice.will_sync});
                    return;
                }
                model.forward([] {}, plan.opens == Opens::known_lengths ? RoundNotice{} : notice);
                model.backward([&](auto ready) {
                    add_gradient(params[0], gradient);
                    ready(0);
                });
            };
            pass(of_all, shared, before.gradient_of_shared(rank, batch));
            pass(of_group, expert, before.gradient_of_expert(rank, batch));
            if (guard.round().will_sync()) {
                step_all.step();
                step_group.step();
            }
        });
        guard.finish();
    }
    return {shared[0].value[0], expert[0].value[0], velocity};
}

std::string text_of(Plan const& plan) {
    std::string text;
    for (std::size_t r = 0; r < plan.lengths.size(); ++r) {
        text += std::to_string(plan.lengths[r]) + " ";
    }
    return text;
}

void check(RankCommunicator& comm, RankCommunicator& group, Plan const& plan) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    Values const expected = train_serially(plan)[rank];
    Values const trained = train(comm, group, plan);
    CAPTURE(text_of(plan));
    CAPTURE(rank);
    CAPTURE(static_cast<int>(plan.average));
    CAPTURE(static_cast<int>(plan.opens));
    CAPTURE(plan.sync_every);
    CAPTURE(plan.skips);
    CHECK(trained.shared == doctest::Approx(expected.shared).epsilon(1e-12));
    CHECK(trained.expert == doctest::Approx(expected.expert).epsilon(1e-12));
}

/// All lengths up to `most` of so many ranks.
std::vector<std::vector<int>> all_lengths(int world, int most) {
    std::vector<std::vector<int>> all{{}};
    for (int rank = 0; rank < world; ++rank) {
        std::vector<std::vector<int>> longer;
        for (auto const& lengths : all) {
            for (int length = 0; length <= most; ++length) {
                longer.push_back(lengths);
                longer.back().push_back(length);
            }
        }
        all = std::move(longer);
    }
    std::erase_if(all, [](auto const& lengths) {
        return *std::max_element(lengths.begin(), lengths.end()) == 0;
    });
    return all;
}

/// Groups of `of` ranks that follow each other; the last one may be smaller.
std::vector<int> groups_of(int world, int of) {
    std::vector<int> group_of;
    for (int rank = 0; rank < world; ++rank) {
        group_of.push_back(rank / of);
    }
    return group_of;
}
/// Ranks that follow each other are in different groups.
std::vector<int> dealt_groups(int world) {
    std::vector<int> group_of;
    for (int rank = 0; rank < world; ++rank) {
        group_of.push_back(rank % 2);
    }
    return group_of;
}

constexpr Average all_averages[] = {
    Average::over_all, Average::over_contributors, Average::by_weight
};

TEST_SUITE_BEGIN("[groups]");

TEST_CASE("a model of all ranks and experts of pairs of them train as one process does") {
    over_ranks({4}, [](RankCommunicator& comm) {
        auto group = comm.split(comm.rank() / 2, comm.rank());
        std::size_t turn = 0;
        for (auto const& lengths : all_lengths(4, 3)) {
            for (Average const average : all_averages) {
                // Any length of any rank meets each average.
                if (is_left_out(turn++, 7, comm.size())) {
                    continue;
                }
                check(
                    comm,
                    group,
                    {.lengths = lengths, .group_of = groups_of(4, 2), .average = average}
                );
            }
        }
    });
}

TEST_CASE("the same with groups of any size, skipped batches, and gradients that accumulate") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const world = comm.size();
        std::size_t turn = 0;
        for (auto const& group_of :
             {groups_of(world, 1), groups_of(world, 2), groups_of(world, 3), dealt_groups(world)}) {
            // Some number their ranks the other way round.
            int const rank = comm.rank();
            int const color = group_of[static_cast<std::size_t>(rank)];
            bool const has_all = std::count(group_of.begin(), group_of.end(), color) == world;
            auto group = comm.split(color, color % 2 == 1 && !has_all ? -rank : rank);
            Plan plan{.lengths = {}, .group_of = group_of};
            for (int seed = 0; seed < 12; ++seed) {
                if (is_left_out(turn++, 5, world)) {
                    continue;
                }
                plan.lengths.clear();
                for (int r = 0; r < world; ++r) {
                    plan.lengths.push_back((seed + r * (seed % 5 + 1) + r / 2) % 5);
                }
                plan.lengths[static_cast<std::size_t>(seed % world)] = 1 + seed % 4;
                for (Average const average : all_averages) {
                    plan.average = average;
                    plan.skips = seed % 3 == 0;
                    plan.sync_every = 1 + static_cast<std::size_t>(seed) % 2;
                    plan.opens = plan.skips ? Opens::notification : static_cast<Opens>(seed % 3);
                    check(comm, group, plan);
                }
                plan.skips = false;
                plan.opens = Opens::known_lengths;
                plan.average = all_averages[seed % 2];
                check(comm, group, plan);
            }
        }
    });
}

/// What `enter()` throws from a guard's constructor.
template <class Error>
void check_refused(std::string const& part_of_text, auto const& enter) {
    auto const error = thrown_by<Error>(enter);
    CAPTURE(std::string{error.what()});
    CHECK(std::string{error.what()}.find(part_of_text) != std::string::npos);
}

TEST_CASE("a group's communicator needs groups_of()") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        auto group = comm.split(comm.rank() % 2, comm.rank());
        joinable::Action all{comm, [] {}, [] {}};
        joinable::Action some{group, [] {}, [] {}};
        try {
            Join guard{participants(all, some)};
            FAIL_CHECK("entered");
        } catch (joinable::ContractViolation const& error) {
            CHECK(std::string{error.what()}.find("see groups_of()") != std::string::npos);
        }
    });
}

TEST_CASE("groups that overlap, leave ranks out, or have other ranks are refused on all ranks") {
    over_ranks({4, 8}, [](RankCommunicator& comm) {
        int const half = comm.size() / 2;
        int const rank = comm.rank();
        // Halves whose ranks are in two guards, and pairs across them.
        auto control = comm.split(rank / half, rank);
        auto pairs = comm.split(rank % half, (rank % half) % 2 == 0 ? rank : -rank);
        auto alone = comm.split(rank, 0);
        joinable::Action all{comm, [] {}, [] {}};
        if (half > 2) {
            joinable::Action crossing{pairs, [] {}, [] {}};
            check_refused<joinable::Mismatch>("ranks that are not in this guard", [&] {
                joinable::Action own{control, [] {}, [] {}};
                Join guard{participants(own, crossing), joinable::groups_of(control)};
            });
        }
        joinable::Action of_pair{pairs, [] {}, [] {}};
        joinable::Action of_one{alone, [] {}, [] {}};
        bool const is_first = rank == 0;
        check_refused<joinable::Mismatch>(
            "its groups overlap, or leave out ranks of the guard (rank",
            [&] {
                if (is_first) {
                    joinable::Action one{alone, [] {}, [] {}};
                    Join guard{participants(all, one), joinable::groups_of(comm)};
                } else {
                    joinable::Action one{pairs, [] {}, [] {}};
                    Join guard{participants(all, one), joinable::groups_of(comm)};
                }
            }
        );
        check_refused<joinable::Mismatch>("groups of the participants", [&] {
            joinable::Action first{alone, [] {}, [] {}};
            if (is_first) {
                joinable::Action second{alone, [] {}, [] {}};
                Join guard{participants(first, second), joinable::groups_of(comm)};
            } else {
                joinable::Action second{pairs, [] {}, [] {}};
                Join guard{participants(first, second), joinable::groups_of(comm)};
            }
        });
        CHECK_FALSE(comm.is_aborted());
        CHECK_FALSE(pairs.is_aborted());
        Join guard{participants(all, of_pair, of_one), joinable::groups_of(comm)};
        guard.finish();
    });
}

TEST_CASE("what a group averages is stepped over its communicator, and the reverse") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        auto group = comm.split(comm.rank() % 2, comm.rank());
        auto params = make_params<double>({1}, 1.0);
        DistributedDataParallel expert{group, params};
        joinable::Step step{comm, [] {}};
        joinable::Step of_group{group, [] {}};
        auto const unstepped = [&] {
            Join guard{participants(expert, step), joinable::groups_of(comm)};
        };
        auto const unaveraged = [&] {
            Join guard{participants(of_group, step), joinable::groups_of(comm)};
        };
        CHECK_THROWS_WITH_AS(
            unstepped(),
            "a group without an active rank neither averages nor steps, so its values need participants for both "
            "over one communicator, but over that of a DistributedDataParallel nothing steps",
            joinable::ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            unaveraged(),
            "a group without an active rank neither averages nor steps, so its values need participants for both "
            "over one communicator, but over that of a Step nothing averages",
            joinable::ContractViolation
        );
    });
}

std::size_t local_inputs_of(int rank) { // the ranks of one group end before those of the other
    return rank % 2 == 0 ? 2 + static_cast<std::size_t>(rank) / 2
                         : 17 - static_cast<std::size_t>(rank);
}
double local_gradient_of(double value, int rank, std::size_t round) {
    return value - (rank + 1) * (rank + 2) + 0.5 * static_cast<double>(round);
}

/// The value of these ranks after local SGD, whose averages count steps.
double local_sgd_serially(std::vector<int> const& ranks, std::size_t period) {
    std::vector<double> values(ranks.size(), 1.0);
    std::vector<double> steps(ranks.size());
    auto const average = [&] {
        double const total = std::accumulate(steps.begin(), steps.end(), 0.0);
        if (total > 0) {
            double const sum = std::inner_product(values.begin(), values.end(), steps.begin(), 0.0);
            values.assign(values.size(), sum / total);
            steps.assign(steps.size(), 0.0);
        }
    };
    bool some_is_active = true;
    for (std::size_t round = 1; some_is_active; ++round) {
        some_is_active = false;
        for (std::size_t r = 0; r < ranks.size(); ++r) {
            if (round <= local_inputs_of(ranks[r])) {
                values[r] -= rate * local_gradient_of(values[r], ranks[r], round);
                steps[r] += 1;
                some_is_active = true;
            }
        }
        if (round % period == 0) {
            average();
        }
    }
    average();
    return values.front();
}

TEST_CASE("local SGD over groups is that of each group alone, and a step may be over any ranks") {
    over_ranks({2, 4, 8}, [](RankCommunicator& comm) {
        auto group = comm.split(comm.rank() % 2, comm.rank());
        std::vector<int> everybody;
        std::vector<int> members;
        for (int rank = 0; rank < comm.size(); ++rank) {
            everybody.push_back(rank);
            if (rank % 2 == comm.rank() % 2) {
                members.push_back(rank);
            }
        }
        auto const train = [&](RankCommunicator& averages, RankCommunicator& steps) {
            auto params = make_params<double>({1}, 1.0);
            DistributedDataParallel ddp{
                averages,
                params,
                joinable::DataParallelOptions{.sync_at_end = false},
                joinable::NoReduction{}
            };
            joinable::Step step{steps, [&] { params[0].value[0] -= rate * params[0].g(0); }};
            joinable::PeriodicAverage average{averages, params, {.period = 3}};
            Join guard{participants(ddp, step, average), joinable::groups_of(comm)};
            for (std::size_t round = 1; round <= local_inputs_of(comm.rank()); ++round) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    params[0].g(0) = local_gradient_of(params[0].value[0], comm.rank(), round);
                    ready(0);
                });
                step.step();
                average.step();
            }
            guard.finish();
            return params[0].value[0];
        };
        CHECK(train(group, group) == doctest::Approx(local_sgd_serially(members, 3)));
        CHECK(train(group, comm) == doctest::Approx(local_sgd_serially(members, 3)));
        CHECK(train(comm, group) == doctest::Approx(local_sgd_serially(everybody, 3)));
    });
}

struct Injected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Point {
    between_rounds,
    in_part_of_all,
    in_part_of_group,
    in_shadow_of_group,
    in_post_hook
};
constexpr Point all_points[] = {
    Point::between_rounds,
    Point::in_part_of_all,
    Point::in_part_of_group,
    Point::in_shadow_of_group,
    Point::in_post_hook
};

TEST_CASE("a throw at any point ends all ranks, and one between rounds leaves all usable") {
    for (int const world : groups_of_participants({3, 4, 8})) {
        for (Point const point : all_points) {
            for (int culprit = 0; culprit < world; ++culprit) {
                if (point == Point::in_shadow_of_group &&
                    (culprit % 2 == 1 || culprit == world - 1)) {
                    continue; // the last joiner of a pair never shadows
                }
                CAPTURE(world);
                CAPTURE(static_cast<int>(point));
                CAPTURE(culprit);
                over_ranks({world}, [&](RankCommunicator& outer) {
                    // The control communicator and the group have no abort in common.
                    auto comm = outer.split(0, outer.rank());
                    auto group = outer.split(outer.rank() / 2, outer.rank());
                    bool const is_me = comm.rank() == culprit;
                    auto const fail_at = [&](Point here) {
                        if (is_me && here == point) {
                            throw Injected{"disk on fire"};
                        }
                    };
                    AllReducer of_all{comm};
                    AllReducer of_group{group};
                    of_all.ends_its_part = of_group.ends_its_part = true;
                    of_all.before_reduction = [&](auto const&) { fail_at(Point::in_part_of_all); };
                    of_group.before_reduction = [&](auto const&) {
                        fail_at(Point::in_part_of_group);
                    };
                    of_group.before_shadow = [&](auto const&) {
                        fail_at(Point::in_shadow_of_group);
                    };
                    of_group.before_post = [&](auto const&) { fail_at(Point::in_post_hook); };
                    auto const run = [&] {
                        Join guard{participants(of_all, of_group), joinable::groups_of(comm)};
                        try {
                            for (int i = 0; i < 1 + comm.rank(); ++i) {
                                of_all();
                                of_group();
                                fail_at(Point::between_rounds);
                            }
                        } catch (Injected const& error) {
                            guard.fail(error.what());
                            throw;
                        }
                        guard.finish();
                    };
                    if (is_me) {
                        CHECK_THROWS_AS(run(), Injected);
                    } else {
                        auto const error = thrown_by<joinable::PeerFailed>(run);
                        std::string const text = error.what();
                        CAPTURE(text);
                        CHECK(text.find("disk on fire") != std::string::npos);
                    }
                    bool const stays_usable = point == Point::between_rounds;
                    CHECK(comm.is_aborted() == !stays_usable);
                    CHECK(group.is_aborted() == !stays_usable);
                    if (stays_usable) {
                        comm.barrier();
                        group.barrier();
                    } else {
                        auto const reason = comm.abort_reason().value();
                        CHECK(reason.ranks == std::vector{culprit});
                        CHECK(
                            reason.message ==
                            "rank " + std::to_string(culprit) + " failed: disk on fire"
                        );
                    }
                });
            }
        }
    }
}

TEST_CASE(
    "a group hears why its guard has ended, although a rank leaves by what it has not recorded"
) {
    for (bool const is_between_rounds : {false, true}) {
        CAPTURE(is_between_rounds);
        over_ranks({4}, [&](RankCommunicator& outer) {
            auto comm = outer.split(0, outer.rank());
            auto group = outer.split(outer.rank() / 2, outer.rank());
            AllReducer of_all{comm};
            AllReducer of_group{group};
            of_all.ends_its_part = of_group.ends_its_part = true;
            of_group.before_reduction = [&](auto const&) {
                if (comm.rank() == 2) {
                    throw Injected{"disk on fire"};
                }
            };
            auto const run = [&] {
                Join guard{participants(of_all, of_group), joinable::groups_of(comm)};
                of_all();
                if (comm.rank() == 1 && !is_between_rounds) {
                    comm.barrier(); // no participant records what it throws
                }
                try {
                    of_group(); // rank 0 waits for rank 1
                } catch (Injected const& error) {
                    guard.fail(error.what());
                    throw;
                }
                if (comm.rank() == 0) {
                    group.barrier();
                } else {
                    comm.barrier();
                }
                guard.finish();
            };
            if (comm.rank() == 2) {
                CHECK_THROWS_AS(run(), Injected);
            } else {
                std::string const text = thrown_by<joinable::PeerFailed>(run).what();
                CAPTURE(text);
                CHECK(text.find("disk on fire") != std::string::npos);
            }
        });
    }
}

TEST_CASE("ranks that the failure of a group names have the guard's numbers for all") {
    over_ranks({4}, [](RankCommunicator& outer) {
        auto comm = outer.split(0, outer.rank());
        auto group = outer.split(outer.rank() / 2, outer.rank());
        auto shared = make_params<double>({1}, 1.0);
        auto expert = make_params<double>({1}, 1.0);
        joinable::DistributedDataParallel of_all{comm, shared};
        joinable::DistributedDataParallel of_group{group, expert};
        auto const run = [&] {
            Join guard{participants(of_all, of_group), joinable::groups_of(comm)};
            of_all.forward([] {});
            of_all.backward([](auto ready) { ready(0); });
            of_group.forward([] {});
            of_group.backward([&](auto ready) {
                if (comm.rank() == 2) { // says of rank 3 what a deadline would say
                    group.abort({joinable::FailureKind::timed_out, {1}, "rank 1 did not come"});
                }
                ready(0);
            });
            guard.finish();
        };
        CHECK_THROWS_AS(run(), joinable::TimedOut);
        REQUIRE(comm.is_aborted());
        CHECK(comm.abort_reason()->ranks == std::vector{3});
    });
}

TEST_SUITE_END();

} // namespace
