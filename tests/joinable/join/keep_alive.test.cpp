// SPDX-License-Identifier: BSL-1.0
// A rank that is busy for longer than the deadline, and says so, holds up the others but fails none.
#include <joinable/join/guard.hpp>

#include <vector>

#include <doctest/doctest.h>
#include <support/all_reducer.hpp>
#include <support/keep_alive.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using joinable::ThreadCommunicator;

TEST_CASE("a rank that keeps itself alive is waited for") {
    run_ranks_together({1, 2, 4}, [](ThreadCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Join guard{joinable::participants(reducer), {.timeout = long_deadline}};
        for (int i = 0; i < 3; ++i) {
            if (i == 1 && comm.rank() == comm.size() - 1) {
                stay_away_alive(guard);
            }
            CHECK(reducer() == comm.size());
        }
        CHECK(guard.finish().rounds == 3);
    });
}

TEST_CASE("one that does not is named") {
    run_ranks_together({2, 4}, [](ThreadCommunicator& comm) {
        AllReducer reducer{comm};
        int const busy = comm.size() - 1;
        try {
            joinable::Join guard{joinable::participants(reducer), {.timeout = long_deadline}};
            reducer();
            if (comm.rank() == busy) {
                wait_until([&] { return comm.is_aborted(); });
            }
            reducer();
            FAIL_CHECK("no exception");
        } catch (joinable::TimedOut const& error) {
            CHECK(error.missing() == std::vector{busy});
        }
    });
}

TEST_CASE("over a control communicator that cannot, keep_alive says what it needs") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        CoreOnly<ThreadCommunicator> host{comm};
        ThreadCommunicator data = comm.split(0, comm.rank());
        AllReducer reducer{data};
        joinable::Join guard{joinable::participants(reducer), joinable::control(host)};
        CHECK_THROWS_WITH_AS(
            guard.keep_alive(),
            "Join::keep_alive() needs communicators that have it, and NCCL a control communicator "
            "that has it or shares memory",
            joinable::ContractViolation
        );
        reducer();
        guard.finish();
    });
}

} // namespace
