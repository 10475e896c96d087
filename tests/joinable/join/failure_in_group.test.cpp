// SPDX-License-Identifier: BSL-1.0
// A group that was split off counts its ranks itself. When its failure leaves a guard, the guard's ranks must not
// take these numbers for their own.
#include <joinable/join/guard.hpp>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/thrown_by.hpp>

#include <joinable/agreement/on_all_ranks.hpp>
#include <joinable/participant/action.hpp>

namespace {

using namespace joinable_tests;
using joinable::FailureKind;
using joinable::Join;
using joinable::participants;

char const* const fire = "disk on fire";

struct Injected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void meet(RankCommunicator& comm) {
    int one = 1;
    comm.all_reduce({&one, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
}

/// Its rank `culprit` fails, which all its ranks throw.
void fail_in(RankCommunicator& group, int culprit, FailureKind kind = FailureKind::peer_failed) {
    if (group.rank() == culprit) {
        group.abort({kind, {culprit}, "rank " + std::to_string(culprit) + " failed: " + fire});
    }
    meet(group);
    throw std::logic_error{"the group goes on"};
}

/// What this rank throws from a round of a guard over `comm`.
struct Thrown {
    std::vector<int> ranks;
    std::string text;
};

/// Runs fail() in a round. What it throws leaves the guard on the rank `leaver`. Other ranks handle it, and
/// learn that from the guard.
template <class Fail>
std::optional<Thrown> run_guard(RankCommunicator& comm, int leaver, Fail const& fail) {
    joinable::Action action{
        comm,
        [&] {
            try {
                fail();
            } catch (joinable::Error const&) {
                if (comm.rank() == leaver) {
                    throw;
                }
            }
            if (comm.rank() != leaver) {
                meet(comm);
            }
        },
        [] {}
    };
    auto const run = [&] {
        Join guard{participants(action)};
        action();
        guard.finish();
    };
    if (comm.rank() == leaver) {
        CHECK_THROWS_AS(run(), joinable::Error);
        return {};
    }
    try {
        run();
    } catch (joinable::PeerFailed const& failure) {
        return Thrown{failure.ranks(), failure.what()};
    } catch (joinable::TimedOut const& failure) {
        return Thrown{failure.ranks(), failure.what()};
    } catch (joinable::Mismatch const& failure) {
        return Thrown{failure.ranks(), failure.what()};
    }
    FAIL_CHECK("no exception");
    return {};
}

TEST_SUITE_BEGIN("[split]");

TEST_CASE("a group says whether ranks have other numbers there, and its failures say it too") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const last = comm.size() - 1;
        auto const check = [&](bool is_second, bool is_renumbered) {
            auto group = comm.split(is_second ? 1 : 0, comm.rank());
            CHECK(group.is_renumbered() == is_renumbered);
            auto const failure = thrown_by<joinable::PeerFailed>([&] { fail_in(group, 0); });
            CHECK(failure.is_renumbered() == is_renumbered);
        };
        bool const is_1_or_2 = comm.rank() == 1 || comm.rank() == 2;
        check(false, false); // all of them
        check(comm.rank() == last, comm.rank() == last);
        check(comm.rank() != 0, comm.rank() != 0);
        check(is_1_or_2, is_1_or_2 || last > 2);
        CHECK_FALSE(comm.is_renumbered());
    });
}

TEST_CASE(
    "the failure of a smaller group names the rank that leaves the guard, not the group's number"
) {
    for (FailureKind const kind :
         {FailureKind::peer_failed, FailureKind::timed_out, FailureKind::mismatch}) {
        CAPTURE(static_cast<int>(kind));
        over_ranks({2, 3, 4, 8}, [kind](RankCommunicator& comm) {
            int const last = comm.size() - 1;
            bool const is_in_group = comm.rank() != 0;
            auto group = comm.split(is_in_group ? 1 : 0, comm.rank());
            auto const thrown = run_guard(comm, last, [&] {
                if (is_in_group) {
                    fail_in(group, 0, kind);
                }
            });
            if (thrown) {
                CHECK(thrown->ranks == std::vector{last});
                CHECK(
                    thrown->text == "rank " + std::to_string(last) +
                                        " failed: in a group split off: rank 0 failed: " + fire
                );
            }
        });
    }
}

TEST_CASE("the failure of a group in another order names the rank that leaves the guard") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const last = comm.size() - 1;
        auto group = comm.split(0, -comm.rank());
        auto const thrown = run_guard(comm, last, [&] { fail_in(group, 0); });
        if (thrown) {
            CHECK(thrown->ranks == std::vector{last});
            CHECK(thrown->text.find(fire) != std::string::npos);
        }
    });
}

TEST_CASE("the failure of a group that counts its ranks as the guard does names its culprit") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        int const last = comm.size() - 1;
        {
            auto group = comm.split(0, comm.rank()); // of all ranks
            auto data = comm.split(0, comm.rank());
            auto const thrown =
                run_guard(data, 0, [&] { fail_in(group, last, FailureKind::timed_out); });
            if (thrown) {
                CHECK(thrown->ranks == std::vector{last});
                CHECK(thrown->text == "rank " + std::to_string(last) + " failed: " + fire);
            }
        }
        bool const is_first = comm.rank() != last;
        auto group = comm.split(is_first ? 0 : 1, comm.rank()); // of the first ranks
        auto const thrown = run_guard(comm, last - 1, [&] {
            if (is_first) {
                fail_in(group, 0);
            }
        });
        if (thrown) {
            CHECK(thrown->ranks == std::vector{0});
        }
    });
}

TEST_CASE("a guard over a group believes that group and groups that count as it does") {
    over_ranks({3, 4, 8}, [](RankCommunicator& comm) {
        auto group = comm.split(comm.rank() == 0 ? 0 : 1, comm.rank());
        auto data = comm.split(comm.rank() == 0 ? 0 : 1, comm.rank());
        if (comm.rank() != 0) {
            int const last = group.size() - 1;
            {
                auto hidden = group.split(0, group.rank());
                auto other = group.split(0, group.rank());
                auto const thrown = run_guard(other, 0, [&] { fail_in(hidden, last); });
                if (thrown) {
                    CHECK(thrown->ranks == std::vector{last});
                }
            }
            AllReducer reducer{data};
            joinable::Action action{
                group,
                [&] {
                    try {
                        fail_in(group, last);
                    } catch (joinable::PeerFailed const&) {
                        if (group.rank() == 0) {
                            throw;
                        }
                    }
                    meet(data); // the others learn from the guard
                },
                [] {}
            };
            auto const run = [&] {
                Join guard{participants(reducer, action)};
                reducer();
                action();
            };
            auto const failure = thrown_by<joinable::PeerFailed>(run);
            CHECK(failure.ranks() == std::vector{last});
            CHECK(data.abort_reason().value().ranks == std::vector{last});
        }
    });
}

TEST_CASE(
    "a guard over a smaller group that fails within a round of another guard names no rank of that"
) {
    over_ranks({3, 4, 8}, [](RankCommunicator& comm) {
        int const last = comm.size() - 1;
        bool const is_in_group = comm.rank() != 0;
        auto group = comm.split(is_in_group ? 1 : 0, comm.rank());
        auto const thrown = run_guard(comm, last, [&] {
            if (!is_in_group) {
                return;
            }
            AllReducer inner{group};
            inner.ends_its_part = true;
            try {
                Join guard{participants(inner)};
                inner();
                if (group.rank() == 0) {
                    guard.fail(fire);
                    throw Injected{fire}; // between rounds: nothing is aborted
                }
                guard.finish();
            } catch (Injected const&) {
            } catch (joinable::PeerFailed const&) {
                if (comm.rank() == last) { // with others, the outer guard may have aborted all
                    CHECK_FALSE(group.is_aborted());
                }
                throw;
            }
        });
        if (thrown) {
            CHECK(thrown->ranks == std::vector{last});
            CHECK(thrown->text.find(fire) != std::string::npos);
        }
    });
}

TEST_CASE("a failure that ranks of a guard agree on within a round keeps its culprit") {
    for (bool const has_ranks : {true, false}) { // the type that those throw who are told
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            int const last = comm.size() - 1;
            auto const thrown = run_guard(comm, 0, [&] {
                joinable::detail::ControlOver<RankCommunicator&> control{comm};
                try {
                    joinable::detail::on_all_ranks(control, [&](auto&) {
                        if (comm.rank() == last && has_ranks) {
                            throw Injected{fire};
                        }
                        if (comm.rank() == last) {
                            throw joinable::CommunicationError{fire};
                        }
                    });
                } catch (std::exception const&) {
                    if (comm.rank() != last) {
                        throw;
                    }
                }
            });
            if (thrown) {
                CHECK(thrown->ranks == std::vector{last});
                CHECK(thrown->text == "rank " + std::to_string(last) + " failed: " + fire);
            }
        });
    }
}

TEST_SUITE_END();

} // namespace
