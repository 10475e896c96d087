// SPDX-License-Identifier: BSL-1.0
// A loop of tests ends as a wait does.
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/polling.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using joinable::TimedOut;

/// Runs `body(comm, counts)` over threads, processes, and processes that meet by a name.
template <class Body>
void run_with_counts(std::initializer_list<int> sizes, Body const& body) {
    for (int const size : sizes) {
        for (int kind = 0; kind < 3; ++kind) {
            Shared<PollCounts> counts;
            auto const of_rank = [&](auto& comm) { body(comm, *counts); };
            switch (kind) {
            case 0: run_ranks({size}, of_rank); break;
            case 1: run_process_ranks({size}, of_rank); break;
            default: run_named_ranks({size}, of_rank); break;
            }
        }
    }
}

TEST_CASE("a loop of tests beside a rank that does not come ends at the deadline, and names it") {
    run_with_counts({2, 3, 4, 8}, [](auto& comm, PollCounts& counts) {
        poll_until_deadline(comm, counts);
    });
}

TEST_CASE("a loop of tests goes on while the rank that is missing says that it is at work") {
    run_ranks_together({2, 3}, [](auto& comm) { poll_for_rank_at_work(comm); });
    run_named_ranks({2}, [](auto& comm) { poll_for_rank_at_work(comm); });
}

TEST_CASE("a rank that tests now and then has more time, and progress() never times out") {
    run_with_counts({2, 3}, [](auto& comm, PollCounts& counts) {
        poll_now_and_then(comm, counts);
    });
}

TEST_CASE("a loop of tests of a message ends at the deadline, and names the other side") {
    for (bool const is_send : {true, false}) {
        run_with_counts({2, 3}, [&](auto& comm, PollCounts& counts) {
            if (comm.rank() == 1) {
                wait_until(counts.timed_out, 1);
                return;
            }
            if (comm.rank() != 0) {
                return;
            }
            comm.set_deadline(std::chrono::milliseconds{100});
            std::int32_t value = 1;
            joinable::Buffer const buffer{&value, 1, DType::i32};
            auto work = is_send ? comm.send(buffer, 1) : comm.receive(buffer, 1);
            for (int i = 0; i < 10; ++i) {
                CHECK(!work.progress());
                std::this_thread::sleep_for(std::chrono::milliseconds{20});
            }
            try {
                while (!work.test()) {
                    std::this_thread::yield();
                }
                FAIL_CHECK("no exception");
            } catch (TimedOut const& error) {
                CHECK(error.missing() == std::vector{1});
            }
            ++counts.timed_out;
        });
    }
}

TEST_CASE("a loop of tests of a message moves the slices of sums for which other ranks wait") {
    for (bool const is_send : {true, false}) {
        for (bool const is_tested : {true, false}) {
            run_with_counts({2, 3}, [&](auto& comm, PollCounts&) {
                constexpr std::size_t count = 700'001; // more than a rank stages at once
                std::vector<float> values(count, 1.0F);
                auto sum = comm.all_reduce({values.data(), count, DType::f32}, ReduceOp::sum);
                std::int32_t value = comm.rank();
                joinable::Buffer const buffer{&value, 1, DType::i32};
                if (comm.rank() == 0) {
                    comm.set_deadline(std::chrono::seconds{20});
                    auto work = is_send ? comm.send(buffer, 1) : comm.receive(buffer, 1);
                    while (!(is_tested ? work.test() : work.progress())) {
                    }
                }
                sum.wait();
                if (comm.rank() == 1) { // comes when its sum is there
                    (is_send ? comm.receive(buffer, 0) : comm.send(buffer, 0)).wait();
                }
                CHECK(values == std::vector<float>(count, static_cast<float>(comm.size())));
                CHECK((comm.rank() > 1 || value == (is_send ? 0 : 1)));
            });
        }
    }
}

TEST_CASE("a loop of tests beside a process that is stopped ends at the deadline") {
    Shared<std::atomic<int>> posted;
    Shared<std::atomic<int>> named;
    Shared<std::atomic<int>> heard;
    CHECK_THROWS_AS(
        run_process_ranks(
            {3},
            [&](ProcessCommunicator& comm) {
                comm.barrier();
                std::chrono::milliseconds const soon{500};
                if (comm.rank() == 1) {
                    comm.set_deadline(soon); // it is killed that long after the others have failed
                    std::raise(SIGSTOP);
                }
                std::int32_t value = 1;
                auto work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
                ++*posted;
                wait_until(*posted, 2);
                if (comm.rank() == 0) { // gives up, when the stopped one is the only one to miss
                    comm.set_deadline(soon);
                }
                try {
                    while (!work.test()) {
                    }
                } catch (TimedOut const& error) {
                    comm.set_deadline(soon);
                    *named += error.missing() == std::vector{1} ? 1 : 0;
                    ++*heard;
                    wait_until(*heard, 2); // the longest deadline of who is left counts
                    throw;
                }
            }
        ),
        joinable::Error
    );
    CHECK(*named == 2);
}

} // namespace
