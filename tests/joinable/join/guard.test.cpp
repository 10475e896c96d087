// SPDX-License-Identifier: BSL-1.0
// What PyTorch tests of its guard is in upstream_join.test.cpp.
#include <joinable/join/guard.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/delayed_communicator.hpp>
#include <support/recording_communicator.hpp>
#include <support/volume.hpp>

#include <joinable/participant/action.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::EndPolicy;
using joinable::Join;
using joinable::participants;

TEST_CASE("ranks with fewer inputs shadow the others (main hooks, one participant)") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        int total = 0;
        Join guard{participants(reducer)};
        for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
            total += reducer();
        }
        auto const result = guard.finish();
        CHECK(total == upstream_total(comm.rank(), comm.size()));
        auto const world = static_cast<std::size_t>(comm.size());
        auto const rank = static_cast<std::size_t>(comm.rank());
        CHECK(result.rounds == 2 + world);
        CHECK(result.own_rounds == 3 + rank);
        CHECK(result.shadow_rounds == world - 1 - rank);
        CHECK(reducer.shadows == comm.size() - 1 - comm.rank());
        for (std::size_t other = 0; other < world; ++other) {
            CHECK(result.rounds_per_rank[other] == 3 + other);
        }
        CHECK(result.last_joiners == std::vector{comm.size() - 1});
        CHECK(result.authoritative_rank == comm.size() - 1);
        CHECK_FALSE(result.stopped_early);
    });
}

/// Logs the hooks that run at the end of a guard.
class Ending {
public:
    Ending(RankCommunicator& comm, std::string name, std::vector<std::string>& log)
        : comm_{comm}, name_{std::move(name)}, log_{log} {}

    struct Hook {
        Ending& owner;
        void main_hook() {}
        void post_hook(bool) { owner.log_.push_back(owner.name_ + " post"); }
        void end_hook() { owner.log_.push_back(owner.name_ + " end"); }
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {*this}; }
    RankCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    RankCommunicator& comm_;
    std::string name_;
    std::vector<std::string>& log_;
    joinable::JoinState state_;
};

TEST_CASE("end hooks run once, after the post hooks of all participants") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<std::string> log;
        Ending a{comm, "a", log};
        Ending b{comm, "b", log};
        Join guard{participants(a, b)};
        for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
            joinable::notify_join_context(a);
            joinable::notify_join_context(b);
        }
        guard.finish();
        CHECK(log == std::vector<std::string>{"a post", "b post", "a end", "b end"});
    });
}

TEST_CASE(
    "a result says how long this rank waited for roll calls, and for ranks that tell who has arrived"
) {
    for (bool const is_late : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& inner) {
            DelayedCommunicator comm{inner, is_late};
            AllReducer reducer{inner};
            auto const start = std::chrono::steady_clock::now();
            Join guard{participants(reducer), joinable::control(comm)};
            for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
                reducer();
            }
            joinable::JoinResult const result = guard.finish();
            CHECK(result.waited <= std::chrono::steady_clock::now() - start);
            if (is_late) { // for each round, and for the end
                CHECK(
                    result.waited >=
                    (result.rounds + 1) * DelayedCommunicator<RankCommunicator>::delay
                );
            } else {
                CHECK(result.waited > std::chrono::nanoseconds::zero()); // who arrived last
            }
        });
    }
}

TEST_CASE("a guard that is not enabled attaches and sends nothing") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        AllReducer a{comm};
        AllReducer b{comm};
        int total = 0;
        Join guard{participants(a, b), {.enable = false}};
        for (int i = 0; i < 3; ++i) {
            total += a();
            total += b();
        }
        auto const result = guard.finish();
        CHECK(total == 6 * comm.size());
        CHECK(comm.trace.size() == 6);
        CHECK(result.own_rounds == 3);
        CHECK(result.rounds_per_rank.empty()); // nothing tells it the others'
        CHECK(a.posts == 0);
    });
}

/// Takes part in rounds of one phase.
template <joinable::Phase phase>
struct InPhase {
    RankCommunicator& comm;
    joinable::JoinState state = {};

    struct Hook {
        void main_hook() {}
        void post_hook(bool) {}
        static bool takes_part(joinable::Round const& round) { return round.phase() == phase; }
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    RankCommunicator& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
    void operator()() { joinable::notify_join_context(*this, {.phase = phase}).done(); }
};

TEST_CASE("participants of different rounds open one each, in any guard") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const is_enabled : {true, false}) {
            InPhase<joinable::Phase::evaluate> evaluate{comm};
            InPhase<joinable::Phase::train> train{comm};
            Join guard{participants(train, evaluate), {.enable = is_enabled}};
            for (std::size_t i = 0; i < 3; ++i) {
                train();
                CHECK(guard.round().number() == 2 * i);
                evaluate();
                CHECK(guard.round().number() == 2 * i + 1);
                CHECK(guard.round().phase() == joinable::Phase::evaluate);
            }
            CHECK(guard.finish().own_rounds == 6);
        }
    });
}

TEST_CASE("under throw_early announcing throws, so that no rank begins a round that is not held") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        int begun = 0;
        auto const train = [&] {
            Join guard{participants(reducer), {.end_policy = EndPolicy::throw_early}};
            for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
                auto pending = joinable::announce_round(reducer);
                CHECK(pending.is_answered());
                ++begun;
                joinable::Round round = pending.wait();
                CHECK(round.number() == static_cast<std::size_t>(i));
                round.done();
            }
            guard.finish();
        };
        if (comm.size() == 1) {
            train();
        } else {
            CHECK_THROWS_AS(train(), joinable::EarlyTermination);
        }
        CHECK(begun == 3);
    });
}

TEST_CASE("throw_early with even inputs ends normally") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer), {.end_policy = EndPolicy::throw_early}};
        for (int i = 0; i < 3; ++i) {
            reducer();
        }
        CHECK(guard.finish().last_joiners.size() == static_cast<std::size_t>(comm.size()));
        CHECK(reducer.posts == 1);
    });
}

TEST_CASE("stop_at_first leaves every rank after the shortest, with the post hooks") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        int total = 0;
        int i = 0;
        Join guard{participants(reducer), {.end_policy = EndPolicy::stop_at_first}};
        while (guard.next(i < upstream_inputs(comm.rank()))) {
            total += reducer();
            ++i;
        }
        auto const result = guard.finish();
        CHECK(total == 3 * comm.size());
        CHECK(result.rounds == 3);
        CHECK(result.stopped_early == (comm.size() > 1));
        CHECK(result.last_joiners.size() == static_cast<std::size_t>(comm.size()));
        CHECK(reducer.posts == 1);
    });
}

TEST_CASE("stop_at_first needs a loop that knows before it computes") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const open_by_notification = [&] {
            Join guard{participants(reducer), {.end_policy = EndPolicy::stop_at_first}};
            reducer();
        };
        CHECK_THROWS_AS(open_by_notification(), joinable::ContractViolation);
    });
}

TEST_CASE("a vote of any rank stops all before the next round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        std::vector<int> const inputs(10);
        int rounds = 0;
        Join guard{participants(reducer)};
        for ([[maybe_unused]] int const input : guard.iterate(inputs)) {
            reducer();
            if (++rounds == 4 && comm.rank() == comm.size() - 1) {
                guard.vote_stop();
            }
        }
        auto const result = guard.finish();
        CHECK(rounds == 4);
        CHECK(result.stopped_early);
        CHECK(result.rounds == 4);
    });
}

TEST_CASE("a vote of a rank that opens no round, over notifications, is refused on all ranks") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const run = [&] {
            Join guard{participants(reducer)};
            if (comm.rank() == 0) {
                guard.vote_stop();
            } else {
                reducer();
            }
            guard.finish();
        };
        CHECK_THROWS_AS(run(), joinable::ContractViolation);
        CHECK_FALSE(comm.is_aborted());
        comm.barrier();
    });
}

TEST_CASE("iterate gives every element a round and announces what it is told") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        std::vector<std::uint64_t> inputs;
        for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
            inputs.push_back(static_cast<std::uint64_t>(10 + i));
        }
        std::uint64_t last_sum = 0;
        Join guard{participants(reducer)};
        for (auto const weight : guard.iterate(inputs, [](std::uint64_t input) {
                 return joinable::RoundNotice{.weight = input};
             })) {
            CHECK(guard.round().weight() == weight);
            last_sum = guard.round().weight_sum();
            reducer();
        }
        guard.finish();
        // In a rank's last round the ranks from it on are active, all with the same weight.
        auto const active = static_cast<std::uint64_t>(comm.size() - comm.rank());
        CHECK(
            last_sum == active * static_cast<std::uint64_t>(10 + upstream_inputs(comm.rank()) - 1)
        );
    });
}

TEST_CASE("a round knows who is active") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const check = [&](joinable::Round const& round) {
            int const joined = std::max(0, static_cast<int>(round.number()) - 2);
            CHECK(round.active_count() == comm.size() - joined);
            CHECK(round.buffer_source() == joined);
            for (int rank = 0; rank < comm.size(); ++rank) {
                CHECK(round.is_active(rank) == (rank >= joined));
            }
            CHECK(round.is_shadow() == (comm.rank() < joined));
            CHECK(round.in_guard());
        };
        reducer.before_reduction = check;
        reducer.before_shadow = check;
        Join guard{participants(reducer)};
        for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
            reducer();
        }
        guard.finish();
    });
}

TEST_CASE("ranks without any input shadow from the first round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        int total = 0;
        Join guard{participants(reducer)};
        for (int i = 0; comm.rank() == 0 && i < 3; ++i) {
            total += reducer();
        }
        auto const result = guard.finish();
        CHECK(total == (comm.rank() == 0 ? 3 : 0));
        CHECK(result.rounds == 3);
        CHECK(result.last_joiners == std::vector{0});
    });
}

TEST_CASE("all ranks without inputs end at once, all of them last joiners") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer)};
        auto const result = guard.finish();
        CHECK(result.rounds == 0);
        CHECK(result.last_joiners.size() == static_cast<std::size_t>(comm.size()));
        CHECK(guard.finish().rounds == 0); // again: the same
    });
}

TEST_CASE("a participant can enter another guard when the first has ended") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        for (int epoch = 0; epoch < 3; ++epoch) {
            int total = 0;
            Join guard{participants(reducer)};
            for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
                total += reducer();
            }
            guard.finish();
            CHECK(total == upstream_total(comm.rank(), comm.size()));
        }
        CHECK(reducer() == comm.size()); // outside: a plain all-reduce
    });
}

TEST_CASE("the core concept's members are enough for a guard") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& inner) {
        CoreOnly comm{inner};
        AllReducer reducer{comm};
        int total = 0;
        Join guard{participants(reducer), runs_post_hook = true};
        for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
            total += reducer();
        }
        guard.finish();
        CHECK(total == upstream_total(comm.rank(), comm.size()));
    });
}

// Deduces, because nvcc 13 cannot compile a static_assert over the types of local lambdas.
template <class... Js>
constexpr bool run_as_listed(Js const&...) {
    return std::same_as<joinable::hook_sequence<Js...>, std::index_sequence_for<Js...>>;
}

TEST_CASE("an action and a step take part without a class") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        int reduced = 0;
        int state = 0;
        auto const sum = [&](int value) {
            comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
            return value;
        };
        joinable::Action action{
            comm, [&](int x) { return reduced = sum(x); }, [&] { reduced = sum(0); }
        };
        joinable::Step step{comm, [&] { state = (31 * state + reduced) % 1009; }};
        Join guard{participants(step, action)}; // runs in hook order all the same
        CHECK(run_as_listed(step, action));
        for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
            step.step();
            CHECK(action(1) <= comm.size());
        }
        guard.finish();
        int highest = state;
        comm.all_reduce({&highest, 1, joinable::DType::i32}, joinable::ReduceOp::max).wait();
        CHECK(state == highest); // the optimizer's state is the same on all ranks
    });
}

TEST_CASE(
    "every rank issues the same collectives, one roll call per round" *
    doctest::skip(!ranks_share_memory)
) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<std::vector<std::string>> traces(static_cast<std::size_t>(world));
        over_ranks({world}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            AllReducer a{comm};
            AllReducer b{comm};
            {
                Join guard{participants(a, b)};
                for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
                    a();
                    b();
                }
            }
            traces[static_cast<std::size_t>(comm.rank())] = comm.trace;
        });
        // Entry; each round: roll call, names when ranks arrive, two reductions; the end; closing.
        std::string const roll_call = "all_reduce 7 u64";
        std::string const names = "all_reduce 4 u64";
        std::string const reduction = "all_reduce 1 i32";
        std::vector<std::string> expected{roll_call};
        for (int round = 0; round < upstream_inputs(world - 1); ++round) {
            expected.push_back(roll_call);
            if (round >= 3) {
                expected.push_back(names);
            }
            expected.insert(expected.end(), {reduction, reduction});
        }
        expected.insert(expected.end(), {roll_call, names, roll_call});
        for (auto const& trace : traces) {
            CHECK(trace == expected);
        }
    }
}

TEST_CASE("a rank shadows thousands of rounds" * doctest::test_suite("[long]")) {
    static constexpr std::size_t rounds = volume<std::size_t>(20'000);
    over_ranks({2}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer)};
        for (std::size_t i = 0; comm.rank() == 0 && i < rounds; ++i) {
            reducer();
        }
        CHECK(guard.finish().rounds == rounds);
    });
}

} // namespace
