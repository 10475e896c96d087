// SPDX-License-Identifier: BSL-1.0
// A throw at every point of a guard, on every rank: the others end with the same typed error that
// names the thrower, the thrower with its own exception, and nobody waits for the deadline.
#include <joinable/join/guard.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/failure_text.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/step.hpp>

namespace {

/// What peers see of an exception that no code of the guard has seen.
char const* const unknown =
    "rank 1 failed: an exception left the guard, whose text only that rank knows; guard.fail(text) passes a text on";

using namespace joinable_tests;
using joinable::Join;
using joinable::participants;

struct Injected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Point {
    hook_constructor,
    before_first_round,
    between_rounds,
    inside_a_part,
    between_parts,
    in_a_shadow,
    in_a_post_hook,
};
constexpr Point all_points[] = {
    Point::hook_constructor,
    Point::before_first_round,
    Point::between_rounds,
    Point::inside_a_part,
    Point::between_parts,
    Point::in_a_shadow,
    Point::in_a_post_hook,
};

struct GuardOutcome {
    bool threw_own = false;
    std::vector<int> named;
    std::string text;
    bool is_aborted = false;
};

/// Runs two participants with 3 + rank inputs and throws at `point` on `culprit`.
GuardOutcome run_with_fault(RankCommunicator& comm, Point point, int culprit, bool says_why) {
    GuardOutcome ending;
    AllReducer a{comm};
    AllReducer b{comm};
    a.ends_its_part = b.ends_its_part = true;
    bool const is_me = comm.rank() == culprit;
    auto const boom = [&](Point here) {
        if (is_me && here == point) {
            throw Injected{"disk on fire"};
        }
    };
    a.before_hook = [&] { boom(Point::hook_constructor); };
    a.before_reduction = [&](joinable::Round const& round) {
        if (round.number() == 1) {
            boom(Point::inside_a_part);
        }
    };
    b.before_shadow = [&](auto const&) { boom(Point::in_a_shadow); };
    b.before_post = [&](auto const&) { boom(Point::in_a_post_hook); };
    try {
        Join guard{participants(a, b)};
        try {
            boom(Point::before_first_round);
            for (int i = 0; i < 3 + comm.rank(); ++i) {
                a();
                if (i == 2) {
                    boom(Point::between_parts);
                }
                b();
                if (i == 1) {
                    boom(Point::between_rounds);
                }
            }
        } catch (Injected const& error) {
            if (says_why) {
                guard.fail(error.what());
            }
            throw;
        }
        guard.finish();
    } catch (Injected const&) {
        ending.threw_own = true;
    } catch (joinable::PeerFailed const& error) {
        ending.named = error.ranks();
        ending.text = error.what();
    }
    ending.is_aborted = comm.is_aborted();
    return ending;
}

TEST_CASE("a throw anywhere ends every other rank with PeerFailed that names the thrower") {
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        for (Point const point : all_points) {
            for (int culprit = 0; culprit < world; ++culprit) {
                if (point == Point::in_a_shadow && culprit == world - 1) {
                    continue; // the last joiner never shadows
                }
                CAPTURE(world);
                CAPTURE(static_cast<int>(point));
                CAPTURE(culprit);
                Shared<std::atomic<int>> began; // none where mpirun has started fewer
                Shared<std::atomic<int>> ended;
                auto const start = std::chrono::steady_clock::now();
                over_ranks({world}, [&](RankCommunicator& comm) {
                    ++*began;
                    GuardOutcome const ending = run_with_fault(comm, point, culprit, true);
                    int const rank = comm.rank();
                    CAPTURE(rank);
                    CHECK(ending.threw_own == (rank == culprit));
                    if (rank != culprit) {
                        CHECK(ending.named == std::vector{culprit});
                        CHECK(
                            ending.text ==
                            "rank " + std::to_string(culprit) + " failed: disk on fire"
                        );
                    }
                    ++*ended;
                });
                CHECK(*ended == *began);
                CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds{30});
            }
        }
    }
}

TEST_CASE("a throw between rounds leaves the communicators usable, one inside a round does not") {
    for (int const world : groups_of_participants({2, 4})) {
        for (Point const point : all_points) {
            if (point == Point::in_a_shadow) {
                continue;
            }
            CAPTURE(world);
            CAPTURE(static_cast<int>(point));
            bool const stays_usable = point == Point::hook_constructor ||
                                      point == Point::before_first_round ||
                                      point == Point::between_rounds;
            over_ranks({world}, [&](RankCommunicator& comm) {
                GuardOutcome const ending = run_with_fault(comm, point, 0, false);
                CHECK(ending.is_aborted == !stays_usable);
                if (stays_usable) {
                    comm.barrier();
                    int one = 1;
                    comm.all_reduce({&one, 1, joinable::DType::i32}, joinable::ReduceOp::sum)
                        .wait();
                    CHECK(one == comm.size());
                }
            });
        }
    }
}

TEST_CASE("the text is a default when the thrower did not say why") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        GuardOutcome const ending = run_with_fault(comm, Point::between_rounds, 1, false);
        if (comm.rank() != 1) {
            CHECK(ending.text == unknown);
        }
    });
}

TEST_CASE(
    "peers are told of the failure that left the guard, not of one that was handled before" *
    doctest::test_suite("[split]")
) {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& inner) {
        struct Case {
            int rounds; ///< after the one in which all ranks handled a failure
            bool says_why;
            bool is_in_post_hook;
            char const* told;
        };
        for (Case const& one :
             {Case{0, true, false, "rank 1 failed: disk full"},
              Case{1, true, false, "rank 1 failed: disk full"},
              Case{1, false, false, unknown},
              Case{0, false, true, "rank 1 failed: disk full"}}) {
            auto comm = inner.split(0, inner.rank());
            AllReducer reducer{comm};
            reducer.before_post = [&](joinable::JoinResult const&) {
                if (comm.rank() == 1) {
                    throw Injected{"disk full"};
                }
            };
            int steps = 0;
            joinable::Step step{comm, [&] {
                                    if (++steps == 1) {
                                        throw Injected{"handled"};
                                    }
                                }};
            auto const run = [&] {
                Join guard{participants(reducer, step)};
                for (int round = 0; round <= one.rounds; ++round) {
                    reducer();
                    try {
                        step.step();
                    } catch (Injected const&) { // on all ranks
                    }
                }
                if (comm.rank() == 1 && !one.is_in_post_hook) {
                    if (one.says_why) {
                        guard.fail("disk full");
                    }
                    throw Injected{"disk full"};
                }
                guard.finish();
            };
            if (comm.rank() == 1) {
                CHECK_THROWS_AS(run(), Injected);
            } else {
                CHECK_THROWS_WITH_AS(run(), one.told, joinable::PeerFailed);
            }
        }
    });
}

TEST_CASE("with look-ahead peers are told of no failure and no text of an earlier round") {
    for (bool const is_chosen : {false, true}) {
        CAPTURE(is_chosen);
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            AllReducer reducer{comm};
            joinable::Step step{comm, [&] {
                                    if (!is_chosen) {
                                        throw Injected{"handled"};
                                    }
                                }};
            auto const run = [&] {
                Join guard{participants(reducer, step)};
                for (int const batch :
                     guard.iterate(joinable::look_ahead, std::vector<int>{0, 1})) {
                    if (batch == 1 && comm.rank() == 1) {
                        throw Injected{"disk full"};
                    }
                    reducer();
                    if (is_chosen) {
                        guard.fail("handled");
                    }
                    try {
                        step.step();
                    } catch (Injected const&) { // on all ranks
                    }
                }
                guard.finish();
            };
            if (comm.rank() == 1) {
                CHECK_THROWS_AS(run(), Injected);
            } else {
                CHECK_THROWS_WITH_AS(run(), unknown, joinable::PeerFailed);
            }
        });
    }
}

TEST_CASE("a text that fail() was given is for all parts of its round") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Step step{comm, [&] {
                                if (comm.rank() == 1) {
                                    throw Injected{"loss is NaN"};
                                }
                            }};
        auto const run = [&] {
            Join guard{participants(reducer, step)};
            reducer();
            if (comm.rank() == 1) {
                guard.fail("shard 7 is damaged");
            }
            step.step();
            guard.finish();
        };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(run(), Injected);
        } else {
            CHECK_THROWS_WITH_AS(run(), "rank 1 failed: shard 7 is damaged", joinable::PeerFailed);
        }
    });
}

TEST_CASE("peers are told of the failure that left the guard, not of one handled in the same round"
) {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Action log{comm, [] { throw Injected{"disk full"}; }, [] {}};
        joinable::Step step{comm, [&] {
                                if (comm.rank() == 1) {
                                    throw Injected{"loss is NaN"};
                                }
                            }};
        auto const run = [&] {
            Join guard{participants(reducer, log, step)};
            reducer();
            try {
                log();
            } catch (Injected const&) { // on all ranks
            }
            step.step();
            guard.finish();
        };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(run(), Injected);
        } else {
            CHECK_THROWS_WITH_AS(run(), "rank 1 failed: loss is NaN", joinable::PeerFailed);
        }
    });
}

TEST_CASE(
    "ranks that another communicator names are not taken for ranks of the guard" *
    doctest::test_suite("[split]")
) {
    enum class Throws { between_rounds, in_a_part, where_it_is_recorded };
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (Throws const where :
             {Throws::between_rounds, Throws::in_a_part, Throws::where_it_is_recorded}) {
            auto group = comm.split(0, comm.rank());
            auto const meet = [&](Throws here) {
                if (here == where && group.rank() == 1) {
                    throw joinable::PeerFailed{{99}, "rank 99 failed: of other ranks"};
                }
            };
            AllReducer reducer{group};
            reducer.ends_its_part = true;
            reducer.before_reduction = [&](joinable::Round const&) { meet(Throws::in_a_part); };
            joinable::Action action{group, [&] { meet(Throws::where_it_is_recorded); }, [] {}};
            auto const run = [&] {
                Join guard{participants(reducer, action)};
                reducer();
                action();
                meet(Throws::between_rounds);
                guard.finish();
            };
            try {
                run();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& failure) {
                CHECK(failure.ranks() == std::vector{group.rank() == 1 ? 99 : 1});
                std::string const own = "rank 99 failed: of other ranks";
                bool const is_recorded = where == Throws::where_it_is_recorded;
                CHECK(
                    failure.what() == (group.rank() == 1 ? own
                                       : is_recorded     ? "rank 1 failed: " + own
                                                         : unknown)
                );
            }
        }
    });
}

TEST_CASE("a round cannot be waited for after its guard, nor in another one") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::PendingRound late;
        {
            Join guard{participants(reducer)};
            late = joinable::announce_round(reducer);
            CHECK(late.wait().active_count() == comm.size());
            late.wait().done();
            guard.finish();
        }
        CHECK_THROWS_AS(static_cast<void>(late.wait()), joinable::ContractViolation);
        Join again{participants(reducer)};
        CHECK_THROWS_AS(static_cast<void>(late.wait()), joinable::ContractViolation);
        again.finish();
    });
}

TEST_CASE("a round that was refused cannot be waited for again, and the communicators stay usable"
) {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        reducer.ends_its_part = true;
        try {
            Join guard{participants(reducer)};
            reducer();
            if (comm.rank() == 0) {
                throw Injected{"disk on fire"};
            }
            auto refused = joinable::announce_round(reducer);
            CHECK_THROWS_AS(static_cast<void>(refused.wait()), joinable::PeerFailed);
            CHECK_THROWS_AS(static_cast<void>(refused.wait()), joinable::PeerFailed);
        } catch (Injected const&) { // NOLINT(bugprone-empty-catch): the others hear of it
        }
        int value = 1;
        comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
        CHECK(value == comm.size());
    });
}

TEST_CASE("what ended a guard is thrown again, also if it was the communicator") {
    Shared<std::atomic<bool>> gave_up;
    over_ranks({2}, [&](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const run = [&] {
            auto const timeout = std::chrono::milliseconds{comm.rank() == 0 ? 500 : 60'000};
            Join guard{participants(reducer), {.timeout = timeout}};
            if (comm.rank() == 1) {
                wait_until(*gave_up, true);
            } else {
                CHECK_THROWS_AS(reducer(), joinable::TimedOut);
                *gave_up = true;
            }
            reducer();
        };
        CHECK_THROWS_AS(run(), joinable::TimedOut);
    });
}

TEST_CASE("a round in a post hook is refused, and the others learn why") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        reducer.ends_its_part = true;
        bool const is_culprit = comm.rank() == 0;
        reducer.before_post = [&](auto const&) {
            if (is_culprit) {
                reducer();
            }
        };
        auto const run = [&] {
            Join guard{participants(reducer)};
            for (int i = 0; i <= comm.rank(); ++i) {
                reducer();
            }
            guard.finish();
        };
        std::string const text =
            "participant 0 (AllReducer) notified in a post hook, after the last round of the "
            "guard; open rounds before finish()";
        if (is_culprit) {
            CHECK_THROWS_WITH_AS(run(), text.c_str(), joinable::ContractViolation);
        } else {
            auto const told = "rank 0 failed: " + text;
            CHECK_THROWS_WITH_AS(run(), told.c_str(), joinable::PeerFailed);
        }
    });
}

TEST_CASE("two ranks that fail in the same round are both named") {
    over_ranks({3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        reducer.ends_its_part = true;
        std::vector<int> named;
        try {
            Join guard{participants(reducer)};
            for (int i = 0; i < 3; ++i) {
                reducer();
                if (i == 1 && comm.rank() <= 1) {
                    throw Injected{"both"};
                }
            }
            guard.finish();
        } catch (Injected const&) {
            named = {0, 1};
        } catch (joinable::PeerFailed const& error) {
            named = error.ranks();
        }
        CHECK(named == std::vector{0, 1});
    });
}

TEST_CASE("a throw after all ranks agreed to stop reaches those that run their post hooks") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        reducer.ends_its_part = true;
        auto const run = [&] {
            Join guard{participants(reducer), runs_post_hook = true};
            while (guard.next(true)) {
                reducer();
                guard.vote_stop();
            }
            if (comm.rank() == 0) {
                throw Injected{"disk on fire"};
            }
            guard.finish();
        };
        if (comm.rank() == 0) {
            CHECK_THROWS_AS(run(), Injected);
            return;
        }
        std::vector<int> named;
        try {
            run();
        } catch (joinable::PeerFailed const& error) {
            named = error.ranks();
        }
        CHECK(named == std::vector{0});
    });
}

TEST_CASE("a rank that never comes is named after the deadline, on every rank that waits") {
    for (int const world : groups_of_participants({2, 4})) {
        Shared<std::atomic<int>> timed_out;
        Shared<std::atomic<int>> arrived;
        Shared<std::atomic<int>> gave_up;
        over_ranks({world}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            comm.posted = [&] { ++*arrived; };
            AllReducer reducer{comm};
            if (comm.rank() == 1) { // stuck in its own code until the others have given up
                wait_until(*gave_up, world - 1);
                return;
            }
            try {
                if (comm.rank() == 0) { // gives up, when rank 1 is the only one to miss
                    wait_until(*arrived, world - 2);
                    comm.set_deadline(std::chrono::milliseconds{100});
                }
                Join guard{participants(reducer)};
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{1});
                ++*timed_out;
            }
            ++*gave_up;
        });
        CHECK(*timed_out == *gave_up); // none where mpirun has started fewer
    }
}

TEST_CASE("a rank that stalls in a round is named, and the guard's timeout is restored") {
    Shared<std::atomic<bool>> gave_up;
    over_ranks({2}, [&](RankCommunicator& comm) {
        AllReducer reducer{comm};
        try {
            auto const timeout = std::chrono::milliseconds{comm.rank() == 0 ? 500 : 60'000};
            Join guard{participants(reducer), {.timeout = timeout}};
            reducer();
            if (comm.rank() == 1) {
                wait_until(*gave_up, true);
            }
            reducer();
            FAIL_CHECK("no exception");
        } catch (joinable::TimedOut const& error) {
            *gave_up = true;
            CHECK(error.missing() == std::vector{1});
        }
        CHECK(comm.set_deadline(std::chrono::seconds{1}) == std::chrono::seconds{60});
    });
}

TEST_CASE("ranks that open different rounds all throw the same Mismatch") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        std::string text;
        try {
            Join guard{participants(reducer)};
            bool const weighted = comm.rank() == comm.size() - 1;
            guard.next(true, {.weight = weighted ? std::optional<std::uint64_t>{5} : std::nullopt});
            FAIL_CHECK("no exception");
        } catch (joinable::Mismatch const& error) {
            CHECK(error.ranks() == std::vector{comm.size() - 1});
            text = error.what();
        }
        CHECK(
            text == joinable::detail::concat(
                        "ranks disagree about round 0: has a weight: rank 0 has false, rank ",
                        comm.size() - 1,
                        " has true; every active rank must open the same round"
                    )
        );
        comm.barrier(); // no data moved, nobody aborted
    });
}

TEST_CASE("ranks that construct different guards all throw Mismatch") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        AllReducer a{comm};
        AllReducer b{comm};
        auto const enter = [&] {
            if (comm.rank() == 0) {
                Join guard{participants(a)};
            } else {
                Join guard{participants(a, b)};
            }
        };
        CHECK_THROWS_AS(enter(), joinable::Mismatch);
        auto const other_policy = [&] {
            Join guard{
                participants(a),
                {.end_policy = comm.rank() == 0 ? joinable::EndPolicy::drain
                                                : joinable::EndPolicy::throw_early}
            };
        };
        CHECK_THROWS_AS(other_policy(), joinable::Mismatch);
        comm.barrier();
        Join guard{participants(a, b)}; // what failed has left nothing attached
    });
}

/// What a guard over two participants says about a loop that misuses them. One group for each, as
/// a violation inside a round aborts the communicator.
template <class Loop>
std::string violation_of(Loop const& loop) {
    std::string text;
    over_ranks({1}, [&](RankCommunicator& comm) {
        AllReducer a{comm};
        AllReducer b{comm};
        try {
            Join guard{participants(a, b)};
            loop(guard, a, b);
            guard.finish();
        } catch (joinable::ContractViolation const& error) {
            text = error.what();
        }
    });
    return text;
}

TEST_CASE(
    "a participant that is missing, out of turn or twice in a round is named" *
    doctest::skip(!ranks_share_memory)
) {
    says(
        violation_of([](auto&, auto&, auto& b) { b(); }),
        "notified first in round 0, but the first one in hook order is participant 0"
    );
    says(
        violation_of([](auto&, auto& a, auto&) {
            a();
            a();
        }),
        "participant 0"
    );
    says(
        violation_of([](auto&, auto& a, auto&) { a(); }),
        "takes part in round 0, but did not notify"
    );
    says(
        violation_of([](auto& guard, auto& a, auto& b) {
            guard.next(true);
            a();
            b();
            a();
        }),
        "notified again in round 0"
    );
    says(
        violation_of([](auto& guard, auto& a, auto& b) {
            guard.next(true);
            a();
            b();
            guard.next(true);
            guard.next(true);
        }),
        "participant 0"
    );
    says(
        violation_of([](auto& guard, auto& a, auto& b) {
            a();
            b();
            guard.vote_stop();
        }),
        "vote_stop() needs a loop that runs on next() or iterate()"
    );
    says(
        violation_of([](auto&, auto& a, auto& b) {
            a.before_reduction = [](joinable::Round round) { round.hold(); };
            a();
            b();
        }),
        " is held open; end that part first, as by skip() after a pass that threw; the order of such a round is "
    );
    says(
        violation_of([](auto&, auto& a, auto& b) {
            static_cast<void>(joinable::announce_round(a));
            b();
        }),
        "participant 1 (AllReducer) notified, but participant 0 (AllReducer) announced round 0, and has not waited "
        "for it (a forward without its backward?)"
    );
    says(
        violation_of([](auto&, auto& a, auto&) {
            static_cast<void>(joinable::announce_round(a));
            a();
        }),
        "participant 0 (AllReducer) announced round 0, but never waited for it (a forward without its backward?)"
    );
    says(
        violation_of([](auto& guard, auto&, auto&) {
            guard.next(true, {.weight = std::uint64_t{1} << 50U});
        }),
        "is above the maximum"
    );
    says(
        violation_of([](auto& guard, auto&, auto&) { guard.next(true, {.weight = -1}); }),
        "a weight of -1 is negative; give the number of samples or tokens"
    );
}

TEST_CASE("what a guard refuses on one rank is told to the others") {
    using Guard = Join<AllReducer<RankCommunicator>>;
    struct Misuse {
        char const* told;
        std::function<void(Guard&, AllReducer<RankCommunicator>&, bool is_own)> run;
    };
    Misuse const misuses[] = {
        {"rank 0 failed: vote_stop() needs a loop that runs on next() or iterate(), so that no rank computes a "
         "round that was stopped",
         [](auto& guard, auto& reducer, bool is_own) {
             reducer();
             if (is_own) {
                 guard.vote_stop();
             }
             reducer();
         }},
        {"rank 0 failed: participant 0 (AllReducer) notified again in round 0; call next() before each round",
         [](auto& guard, auto& reducer, bool is_own) {
             guard.next(true);
             reducer();
             if (is_own) {
                 reducer();
             }
             guard.next(true);
         }},
        {"rank 0 failed: a weight of -1 is negative; give the number of samples or tokens",
         [](auto&, auto& reducer, bool is_own) {
             reducer();
             static_cast<void>(joinable::notify_join_context(reducer, {.weight = is_own ? -1 : 1}));
         }},
        {"rank 0 failed: the loader is broken",
         [](auto& guard, auto& reducer, bool is_own) {
             std::vector<int> const batches{0, 1, 2};
             auto const announce = [&](int batch) {
                 if (is_own && batch == 1) {
                     throw Injected{"the loader is broken"};
                 }
                 return joinable::RoundNotice{};
             };
             for (int const batch : guard.iterate(joinable::look_ahead, batches, announce)) {
                 CHECK(batch < 3);
                 reducer();
             }
         }},
        {"rank 0 failed: a weight of -1 is negative; give the number of samples or tokens",
         [](auto& guard, auto& reducer, bool is_own) {
             std::vector<int> const batches{0, 1, 2};
             auto const announce = [&](int batch) {
                 return joinable::RoundNotice{.weight = is_own && batch == 1 ? -1 : 1};
             };
             for (int const batch : guard.iterate(joinable::look_ahead, batches, announce)) {
                 CHECK(batch < 3);
                 reducer();
             }
         }},
    };
    for (Misuse const& misuse : misuses) {
        CAPTURE(misuse.told);
        over_ranks({2, 4}, [&](RankCommunicator& comm) {
            AllReducer reducer{comm};
            reducer.ends_its_part = true;
            std::string told;
            try {
                Join guard{participants(reducer)};
                misuse.run(guard, reducer, comm.rank() == 0);
                guard.finish();
            } catch (joinable::PeerFailed const& error) {
                told = error.what();
            } catch (joinable::ContractViolation const&) {
                told = "its own";
            } catch (Injected const&) {
                told = "its own";
            }
            CHECK(told == (comm.rank() == 0 ? "its own" : misuse.told));
        });
    }
}

TEST_CASE("guard.fail(text) in a handler says more than the exception that is handled") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        reducer.ends_its_part = true;
        auto const run = [&] {
            Join guard{participants(reducer)};
            reducer();
            if (comm.rank() == 1) {
                try {
                    throw Injected{"bad bytes"};
                } catch (Injected const&) {
                    guard.fail("shard 7 is damaged");
                    throw;
                }
            }
            guard.finish();
        };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(run(), Injected);
        } else {
            CHECK_THROWS_WITH_AS(run(), "rank 1 failed: shard 7 is damaged", joinable::PeerFailed);
        }
    });
}

TEST_CASE("a guard that is not enabled has no roll call that could carry a vote") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer), {.enable = false}};
        CHECK(guard.next(true));
        CHECK_THROWS_WITH_AS(
            guard.vote_stop(),
            "vote_stop() needs roll calls; leave JoinOptions::enable true to vote",
            joinable::ContractViolation
        );
    });
}

TEST_CASE("a vote after the end of a guard is refused") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer)};
        CHECK(guard.next(true));
        reducer();
        guard.finish();
        CHECK_THROWS_WITH_AS(
            guard.vote_stop(),
            "this guard has ended; construct a new Join for more rounds",
            joinable::ContractViolation
        );
    });
}

TEST_CASE("a participant that takes no part in a round and notifies all the same is told so") {
    for (int const size : groups_of_participants({1, 2, 3, 4, 8})) {
        for (int const way : {0, 1, 2, 3}) {
            bool const has_loop = way % 2 == 1;
            bool const is_enabled = way < 2;
            CAPTURE(size);
            CAPTURE(has_loop);
            CAPTURE(is_enabled);
            Shared<std::atomic<int>> summed;
            over_ranks({size}, [&](RankCommunicator& comm) {
                AllReducer sum{comm};
                joinable::Step step{comm, [] {}};
                auto const train = [&] {
                    Join guard{participants(sum, step), {.enable = is_enabled, .sync_every = 2}};
                    if (has_loop) {
                        guard.next(true);
                    }
                    sum();
                    ++*summed;
                    // A rank that is not here yet would hear of the violation of another one.
                    wait_until(*summed, size);
                    step.step(); // as an engine does that accumulates and forgot when to step
                };
                CHECK_THROWS_WITH_AS(
                    train(),
                    "participant 1 (Step) takes no part in round 0, which does not sync; call "
                    "step() only in rounds that concern it",
                    joinable::ContractViolation
                );
            });
        }
    }
}

TEST_CASE("a participant twice in a guard, or in two guards, is refused and the first one goes on"
) {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const twice = [&] { Join guard{participants(reducer, reducer)}; };
        CHECK_THROWS_WITH_AS(
            twice(),
            doctest::Contains("is twice among the participants of a guard; list it once"),
            joinable::ContractViolation
        );
        Join guard{participants(reducer)};
        auto const again = [&] { Join second{participants(reducer)}; };
        CHECK_THROWS_AS(again(), joinable::ContractViolation);
        CHECK(reducer() == comm.size());
        CHECK(guard.finish().rounds == 1);
    });
}

TEST_CASE("communicators of different sizes in one guard are refused") {
    over_ranks({2}, [](RankCommunicator& comm) {
        over_ranks({1}, [&](RankCommunicator& alone) {
            AllReducer a{comm};
            AllReducer b{alone};
            auto const mixed = [&] { Join guard{participants(a, b)}; };
            CHECK_THROWS_AS(mixed(), joinable::ContractViolation);
        });
    });
}

TEST_CASE("a timeout over a communicator without a deadline is refused") {
    over_ranks({2}, [](RankCommunicator& inner) {
        CoreOnly comm{inner};
        AllReducer reducer{comm};
        auto const with_timeout = [&] {
            Join guard{participants(reducer), {.timeout = std::chrono::seconds{1}}};
        };
        CHECK_THROWS_AS(with_timeout(), joinable::ContractViolation);
    });
}

/// What a rank saw of a guard whose message number `nth` it cannot send, if it is the culprit, who
/// does not leave before all others have ended.
template <class Guarded>
void fail_to_send(int size, int culprit, int nth, Guarded const& guarded) {
    Shared<std::atomic<int>> ended;
    over_ranks({size}, [&](RankCommunicator& inner) {
        inner.set_deadline(std::chrono::seconds{20});
        RecordingCommunicator comm{inner};
        bool const is_culprit = comm.rank() == culprit;
        int sent = 0;
        comm.before = [&](joinable::Buffer words) {
            sent += words.dtype == joinable::DType::u64 ? 1 : 0;
            if (is_culprit && sent == nth) {
                throw std::bad_alloc{};
            }
        };
        AllReducer reducer{comm};
        if (is_culprit) {
            CHECK_THROWS_AS(guarded(comm, reducer), std::bad_alloc);
            wait_until(*ended, size - 1);
        } else {
            std::vector<int> named;
            try {
                guarded(comm, reducer);
            } catch (joinable::PeerFailed const& failure) {
                named = failure.ranks();
            } catch (joinable::Error const& failure) {
                MESSAGE(std::string{failure.what()});
            }
            CHECK(named == std::vector{culprit});
            ++*ended;
        }
    });
}

TEST_CASE("a rank that cannot send one of a guard's messages fails on all at once") {
    for (int const size : groups_of_participants({2, 3, 4, 8})) {
        for (int const culprit : {0, size - 1}) {
            CAPTURE(size);
            CAPTURE(culprit);
            fail_to_send(size, culprit, 2, [](auto& comm, auto& reducer) { // the lengths
                auto const inputs = static_cast<std::size_t>(comm.rank());
                Join guard{participants(reducer), {.inputs = inputs}};
            });
            fail_to_send(size, culprit, 2, [](auto& comm, auto& reducer) { // how guards differ
                auto const policy = comm.rank() == 1 ? joinable::EndPolicy::throw_early
                                                     : joinable::EndPolicy::drain;
                Join guard{participants(reducer), {.end_policy = policy}};
            });
            fail_to_send(size, culprit, 3, [](auto& comm, auto& reducer) { // how rounds differ
                Join guard{participants(reducer)};
                guard.next(true, {.will_sync = comm.rank() != 1});
            });
            fail_to_send(size, culprit, 3, [](auto& comm, auto& reducer) { // who arrives
                Join guard{participants(reducer)};
                if (comm.rank() != 0) {
                    reducer();
                }
            });
        }
    }
}

TEST_CASE("a guard that a hook has failed refuses what active ranks call, and runs none of it") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        bool const is_culprit = comm.rank() == 0;
        AllReducer a{comm};
        a.ends_its_part = true;
        a.before_shadow = [](auto const&) { throw Injected{"disk on fire"}; };
        int steps = 0;
        joinable::Step step{comm, [&] { ++steps; }};
        auto const train = [&] {
            Join guard{participants(a, step)};
            a();
        };
        if (is_culprit) {
            Join guard{participants(a, step)};
            CHECK_THROWS_AS(guard.finish(), Injected);
            CHECK_THROWS_WITH_AS(
                step.step(),
                "this guard has ended; construct a new Join for more rounds",
                joinable::ContractViolation
            );
            CHECK(steps == 0);
        } else {
            CHECK_THROWS_AS(train(), joinable::PeerFailed);
        }
    });
}

/// Its name is destroyed before its state, which ends the guard.
struct NamedLast {
    RankCommunicator& comm;
    joinable::JoinState state = {};
    std::string name = "a participant whose name lies on the heap";

    struct Hook {
        void main_hook() {}
        void post_hook(bool) {}
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    RankCommunicator& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
    [[nodiscard]] std::string_view join_name() const { return name; }
};

TEST_CASE("a participant's name is told though it was destroyed before") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::string text;
        try {
            std::unique_ptr<NamedLast> participant{new NamedLast{comm}};
            Join guard{participants(*participant)};
            participant.reset();
            guard.finish();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CAPTURE(text);
        CHECK(
            text.find("participant 0 (a participant whose name lies on the heap) on rank ") !=
            std::string::npos
        );
    });
}

TEST_CASE(
    "a participant that is destroyed before its guard ends the guard on every rank, by a sentence"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        std::string const text =
            "participant 0 (AllReducer) on rank 0 was destroyed before the Join that it takes part in; declare the "
            "Join after its participants";
        std::optional<AllReducer<RankCommunicator>> reducer{std::in_place, comm};
        auto const run = [&] {
            Join guard{participants(*reducer)};
            (*reducer)();
            if (comm.rank() == 0) {
                reducer.reset();
            }
            guard.finish();
        };
        CHECK(std::string{thrown_by<joinable::ContractViolation>(run).what()} == text);
    });
    over_ranks(
        {2},
        [](RankCommunicator& comm) { // with the guard's own exception in flight, that one is told
            std::string text;
            try {
                std::optional<AllReducer<RankCommunicator>> reducer{std::in_place, comm};
                Join guard{participants(*reducer)};
                (*reducer)();
                if (comm.rank() == 0) {
                    guard.fail("out of memory");
                    struct Ends {
                        std::optional<AllReducer<RankCommunicator>>& reducer;
                        ~Ends() { reducer.reset(); }
                    } const ends{reducer};
                    throw Injected{"out of memory"};
                }
                guard.finish();
            } catch (std::exception const& error) {
                text = error.what();
            }
            CHECK(text.find("out of memory") != std::string::npos);
        }
    );
}

TEST_CASE("a guard leaves a participant alone that lies where its own was destroyed") {
    joinable::SelfCommunicator first;
    joinable::SelfCommunicator second;
    std::optional<AllReducer<joinable::SelfCommunicator>> reducer{std::in_place, first};
    std::optional<Join<AllReducer<joinable::SelfCommunicator>>> lost;
    lost.emplace(participants(*reducer));
    reducer.emplace(second);
    CHECK_THROWS_AS(lost->finish(), joinable::ContractViolation);
    Join guard{participants(*reducer)};
    lost.reset();
    CHECK((*reducer)() == 1);
    CHECK(guard.finish().rounds == 1);
}

/// Its hook counts its destructions.
struct Counted {
    RankCommunicator& comm;
    int& ended;
    joinable::JoinState state = {};

    struct Hook {
        int& ended;
        ~Hook() { ++ended; }
        void main_hook() {}
        void post_hook(bool) {}
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {ended}; }
    RankCommunicator& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
};

TEST_CASE("the hook of a participant that is destroyed before its guard is not touched again") {
    for (int const size : groups_of_participants({1, 2, 3})) {
        Shared<std::atomic<int>> entered;
        over_ranks({size}, [&](RankCommunicator& comm) {
            int destroyed = 0;
            int alive = 0;
            Counted survivor{comm, alive};
            auto const run = [&] {
                std::unique_ptr<Counted> lost{new Counted{comm, destroyed}};
                Join guard{participants(*lost, survivor)};
                ++*entered; // a rank that is still entering would leave with the first one
                wait_until(*entered, size);
                lost.reset();
            };
            CHECK_THROWS_AS(run(), joinable::ContractViolation);
            CHECK(destroyed == 0); // it may refer to what is no more
            CHECK(alive == 1);
        });
    }
}

} // namespace
