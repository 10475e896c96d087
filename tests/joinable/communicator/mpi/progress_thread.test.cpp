// SPDX-License-Identifier: BSL-1.0
// A thread beside a rank of MPI that completes its collectives, answers for it, and hears how they fail.
#include <joinable/communicator/progress_thread.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/mpi_ranks.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/mpi.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::MpiCommunicator;
using joinable::MpiOptions;
using joinable::ProgressThread;
using joinable::ReduceOp;
using Clock = std::chrono::steady_clock;

/// What a rank does that calls neither the library nor MPI, until so many others have ended their part.
void compute_until(std::atomic<int> const& ended, int others) {
    auto const end = Clock::now() + std::chrono::seconds{60};
    while (ended < others && Clock::now() < end) {
        std::this_thread::yield();
    }
    CHECK(ended == others);
}
/// Makes `ended` 0 again on all ranks.
void reset(std::atomic<int>& ended, MPI_Comm group) {
    MPI_Barrier(group);
    ended = 0;
    MPI_Barrier(group);
}
void listen_until_abort(MpiCommunicator& comm) {
    while (!comm.is_aborted()) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
}

TEST_CASE("a ProgressThread completes what its rank has posted while that computes") {
    Shared<std::atomic<int>> ended;
    for (bool const compares : {false, true}) { // if so, data moves only after a pass of rank 0
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.check = compares}};
            std::vector<float> large(300'000, 1);
            std::vector<float> small(3, 1);
            std::vector<float> all(3 * static_cast<std::size_t>(comm.size()));
            {
                std::optional<ProgressThread> progress;
                if (comm.rank() == 0) {
                    progress.emplace(comm);
                }
                auto first = joinable::all_reduce(comm, large);
                auto second = joinable::all_gather(comm, std::vector<float>(3, 1), all);
                auto third = joinable::all_reduce(comm, small);
                if (comm.rank() == 0) {
                    compute_until(*ended, comm.size() - 1);
                }
                first.wait();
                second.wait();
                third.wait();
                ++*ended;
            }
            CHECK(large == std::vector<float>(300'000, static_cast<float>(comm.size())));
            CHECK(small == std::vector<float>(3, static_cast<float>(comm.size())));
            CHECK(all == std::vector<float>(all.size(), 1));
            reset(*ended, group);
        });
    }
}

TEST_CASE("a rank that computes beside a ProgressThread is not named as missing") {
    Shared<std::atomic<int>> ended;
    run_mpi_groups({3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, {.deadline = std::chrono::milliseconds{300}}};
        int const last = comm.size() - 1;
        if (comm.rank() == last) {
            listen_until_abort(comm);
        } else {
            std::optional<ProgressThread> progress;
            if (comm.rank() == 0) {
                progress.emplace(comm);
            }
            int x = 1;
            auto work = comm.all_reduce({&x, 1, DType::i32}, ReduceOp::sum);
            if (comm.rank() == 0) {
                compute_until(*ended, comm.size() - 2);
            }
            auto const failure = thrown_by<joinable::TimedOut>([&] { work.wait(); });
            CHECK(failure.missing() == std::vector{last});
            ++*ended;
        }
        reset(*ended, group);
    });
}

TEST_CASE("a ProgressThread ends all ranks when one leaves for which its own waits") {
    Shared<std::atomic<int>> ended;
    run_mpi_groups({3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, {.deadline = std::chrono::seconds{60}}};
        comm.barrier();
        MPI_Barrier(group
        ); // or a rank may hear that rank 1 has left before it has left the barrier
        if (comm.rank() == 1) {
            return;
        }
        std::optional<ProgressThread> progress;
        int x = 1;
        if (comm.rank() == 0) {
            progress.emplace(comm);
            auto work = comm.all_reduce({&x, 1, DType::i32}, ReduceOp::sum);
            compute_until(*ended, comm.size() - 2);
            CHECK(thrown_by<joinable::PeerFailed>([&] { work.wait(); }).rank() == 1);
            *ended = 0; // the other ranks have read it no more since they ended
        } else {        // has posted nothing, so nothing of its own ends it
            listen_until_abort(comm);
            CHECK(thrown_by<joinable::PeerFailed>([&] { comm.barrier(); }).rank() == 1);
            ++*ended;
        }
    });
}

TEST_CASE("a Mismatch that a ProgressThread finds is thrown by its rank, and its reason by all") {
    Shared<std::atomic<int>> ended;
    run_mpi_groups({3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, {.check = true}};
        std::optional<ProgressThread> progress;
        if (comm.rank() == 0) {
            progress.emplace(comm);
        }
        std::vector<float> x(10, 1);
        std::size_t const count = comm.rank() == 1 ? 9 : 10;
        auto work = comm.all_reduce({x.data(), count, DType::f32}, ReduceOp::sum);
        if (comm.rank() == 0) {
            compute_until(*ended, comm.size() - 1);
        }
        check_thrown<joinable::Mismatch>(
            std::vector{1},
            "ranks run different collectives: rank 0 all_reduce of 10 f32 with sum, rank 1 "
            "all_reduce of 9 f32 with sum",
            [&] { work.wait(); }
        );
        CHECK(x == std::vector<float>(10, 1));
        ++*ended;
        reset(*ended, group);
    });
}

TEST_CASE("ranks with and without ProgressThreads do all kinds of things beside them") {
    for (bool const compares : {false, true}) {
        run_mpi_groups({1, 2, 3, 4, 8}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.check = compares}};
            auto pair = comm.split(comm.rank() / 2, 0);
            std::optional<ProgressThread> progress;
            std::optional<ProgressThread> of_pair;
            if (comm.rank() % 2 == 0) {
                progress.emplace(comm);
                of_pair.emplace(pair);
            }
            auto const size = static_cast<float>(comm.size());
            int const next = (comm.rank() + 1) % comm.size();
            int const previous = (comm.rank() + comm.size() - 1) % comm.size();
            int right = 0;
            constexpr int turns = 60;
            for (int turn = 0; turn < turns; ++turn) {
                if (turn == turns / 2) { // others come, while nothing or something is in flight
                    progress.reset();
                }
                joinable::Arena const arena = comm.allocate(100 * sizeof(float));
                auto* const numbers = reinterpret_cast<float*>(arena.data());
                std::fill_n(numbers, 100, 1.0F);
                std::vector<float> in_pair(20, 1);
                std::vector<int> sent{turn};
                std::vector<int> got{-1};
                auto sum = comm.all_reduce({numbers, 100, DType::f32}, ReduceOp::sum);
                auto sum_of_pair = joinable::all_reduce(pair, in_pair);
                auto send = joinable::send(comm, sent, next);
                auto receive = joinable::receive(comm, got, previous);
                if (turn == turns / 2 && comm.rank() % 2 == 1) {
                    progress.emplace(comm);
                }
                {
                    joinable::Arena const freed = pair.allocate(50); // while the thread may deliver
                }
                while (!sum_of_pair.test()) {
                    std::this_thread::yield();
                }
                receive.wait();
                send.wait();
                sum.wait();
                right += numbers[99] == size && got[0] == turn &&
                                 in_pair[19] == static_cast<float>(pair.size())
                             ? 1
                             : 0;
            }
            CHECK(right == turns);
            {
                auto late = pair.split(0, 0); // MPI blocks there
                late.barrier();
            }
            std::vector<float> x(50'000, 1);
            auto work = joinable::all_reduce(comm, x); // and the threads end while it is in flight
            progress.reset();
            of_pair.reset();
            work.wait();
            CHECK(x == std::vector<float>(50'000, size));
        });
    }
}

TEST_CASE("below MPI_THREAD_MULTIPLE a ProgressThread is refused"
) { // a run of its own: see mpi_main.cpp
    int level = MPI_THREAD_MULTIPLE;
    MPI_Query_thread(&level);
    if (level == MPI_THREAD_MULTIPLE) {
        CHECK_NOTHROW(run_mpi_ranks({1}, [](MpiCommunicator& comm) { ProgressThread{comm}; }));
        return;
    }
    CHECK(level == MPI_THREAD_FUNNELED);
    run_mpi_ranks({1, 2}, [](MpiCommunicator& comm) {
        CHECK_THROWS_WITH_AS(
            ProgressThread{comm},
            "a ProgressThread needs MPI_THREAD_MULTIPLE, but MPI runs with MPI_THREAD_FUNNELED: start MPI by "
            "MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level) and look at the level that it gives, or "
            "do without a ProgressThread and call test() now and then",
            joinable::ContractViolation
        );
        comm.barrier(); // the communicator can be used further
    });
}

} // namespace
