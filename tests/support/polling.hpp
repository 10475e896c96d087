// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/keep_alive.hpp>
#include <support/wait_until.hpp>

#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// What a rank sees that tests a work in a loop, over every transport of the host.

namespace joinable_tests {

/// What all ranks of one group count, in memory that all of them have.
struct PollCounts {
    std::atomic<int> posted{0};
    std::atomic<int> timed_out{0};
};

/// Rank 0 tests until its deadline, while the last rank does not come; all others hear of it.
template <class Comm>
void poll_until_deadline(Comm& comm, PollCounts& counts) {
    int const culprit = comm.size() - 1;
    comm.barrier();
    if (comm.rank() == culprit) {
        wait_until(counts.timed_out, culprit);
        CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut);
        return;
    }
    std::int32_t value = 1;
    auto work = comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum);
    ++counts.posted;
    if (comm.rank() == 0) {
        wait_until(counts.posted, culprit);
        comm.set_deadline(std::chrono::milliseconds{100});
    }
    try {
        while (!work.test()) {
            std::this_thread::yield();
        }
        FAIL_CHECK("no exception");
    } catch (joinable::TimedOut const& error) {
        CHECK(error.missing() == std::vector{culprit});
        CHECK(
            error.what() ==
            "rank " + std::to_string(culprit) +
                " did not arrive within 0.1 s, while rank 0 waits in all_reduce of 1 "
                "i32 with sum"
        );
        ++counts.timed_out;
    }
    CHECK(comm.is_aborted());
}

/// The last rank comes late, but says that it is at work.
template <class Comm>
void poll_for_rank_at_work(Comm& comm) {
    comm.barrier();
    comm.set_deadline(long_deadline);
    if (comm.rank() == comm.size() - 1) {
        stay_away_alive(comm);
    }
    std::int32_t value = 1;
    auto work = comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum);
    while (!work.test()) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
    CHECK(value == comm.size());
    comm.barrier();
}

/// A gap between tests counts as 10 ms at most. progress() has no deadline at all.
template <class Comm>
void poll_now_and_then(Comm& comm, PollCounts& counts) {
    comm.barrier();
    int const culprit = comm.size() - 1;
    if (comm.rank() == culprit) {
        wait_until(counts.timed_out, culprit);
        CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut);
        return;
    }
    std::int32_t value = 1;
    auto work = comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum);
    ++counts.posted;
    wait_until(counts.posted, culprit);
    if (comm.rank() == 0) {
        comm.set_deadline(std::chrono::milliseconds{100});
        for (int i = 0; i < 10; ++i) {
            CHECK(!work.progress());
            std::this_thread::sleep_for(std::chrono::milliseconds{20});
        }
        for (int i = 0; i < 10; ++i) { // nine gaps: 90 ms
            CHECK(!work.test());
            std::this_thread::sleep_for(std::chrono::milliseconds{20});
        }
    }
    CHECK_THROWS_AS(
        [&] {
            while (!work.test()) {
                std::this_thread::sleep_for(std::chrono::milliseconds{20});
            }
        }(),
        joinable::TimedOut
    );
    ++counts.timed_out;
}

} // namespace joinable_tests
