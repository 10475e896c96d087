// SPDX-License-Identifier: BSL-1.0
// What ranks of MPI find out about each other at a deadline, and what they say to be waited for.
#include <joinable/communicator/mpi/communicator.hpp>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/mpi_ranks.hpp>
#include <support/shared.hpp>

#include <joinable/communicator/collectives.hpp>

namespace {

using namespace joinable_tests;
using joinable::MpiCommunicator;
using Clock = std::chrono::steady_clock;

/// The ranks that f() names as missing.
template <class F>
std::vector<int> missing_in(F const& f) {
    try {
        f();
    } catch (joinable::TimedOut const& failure) {
        return failure.missing();
    }
    return {};
}

/// Hears and answers, but posts nothing.
void listen_until_abort(MpiCommunicator& comm) {
    while (!comm.is_aborted()) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
}

TEST_CASE("two overdue works that are tested in turn end at the deadline") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        comm.set_deadline(std::chrono::milliseconds{100});
        int const last = comm.size() - 1;
        if (comm.rank() == last) {
            listen_until_abort(comm);
            return;
        }
        auto const start = Clock::now();
        std::vector<int> x{1};
        std::vector<int> y{1};
        auto first = joinable::all_reduce(comm, x);
        auto second = joinable::all_reduce(comm, y);
        CHECK(missing_in([&] {
                  for (bool is_done = false;
                       !is_done && Clock::now() - start < std::chrono::seconds{20};) {
                      bool const is_first_done = first.test();
                      is_done = second.test() && is_first_done;
                  }
              }) == std::vector{last});
    });
}

TEST_CASE("a rank that answers nothing is named after the deadline and the patience") {
    Shared<std::atomic<int>> ended;
    constexpr std::chrono::milliseconds deadline{100};
    constexpr auto patience = 2 * short_patience; // the others answer each other
    run_mpi_groups({2, 3, 4}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, {.patience = patience}};
        comm.set_deadline(deadline);
        int const last = comm.size() - 1;
        auto const start = Clock::now();
        comm.barrier();
        if (comm.rank() == last) { // it computes
            while (*ended < last && Clock::now() - start < std::chrono::seconds{12}) {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
            }
        }
        CHECK(missing_in([&] {
                  comm.barrier(); // the last rank's may end, because the others have posted theirs
                  comm.barrier();
              }) == std::vector{last});
        CHECK(Clock::now() - start >= deadline + patience);
        CHECK(Clock::now() - start < std::chrono::seconds{10});
        ++*ended;
        MPI_Barrier(group);
        *ended = 0;
        MPI_Barrier(group);
    });
}

/// Lets MPI move what is posted, but hears nothing.
void let_mpi_work(MPI_Comm group) {
    auto const end = Clock::now() + std::chrono::milliseconds{100};
    while (Clock::now() < end) {
        int is_there = 0;
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, group, &is_there, MPI_STATUS_IGNORE);
        std::this_thread::sleep_for(std::chrono::microseconds{100});
    }
}

TEST_CASE("the answers to one question are not taken for those to the next") {
    run_mpi_groups({3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        comm.set_deadline(std::chrono::milliseconds{100});
        int const last = comm.size() - 1;
        comm.barrier();
        std::vector<int> x{1};
        if (comm.rank() == last) { // the others ask before it comes, and it answers none of them
            std::this_thread::sleep_for(std::chrono::milliseconds{400});
            auto work = joinable::all_reduce(comm, x);
            let_mpi_work(group);
            work.wait();
            listen_until_abort(comm);
            return;
        }
        joinable::all_reduce(comm, x).wait();
        CHECK(x[0] == comm.size());
        CHECK(missing_in([&] { joinable::all_reduce(comm, x).wait(); }) == std::vector{last});
    });
}

} // namespace
