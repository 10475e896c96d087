// SPDX-License-Identifier: BSL-1.0
// What an all_reduce costs beside a bare MPI_Iallreduce: one program, turn by turn, so that a busy machine
// slows both. A plain program for mpirun: bench_mpi [turns [MiB]]. Rank 0 prints medians in microseconds, of 8 bytes
// and of 1, 4, 16, ... MiB up to that many. bench_mpi plans: as bench_plans, over MPI.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <mpi.h>

#include <joinable/mpi.hpp>

#include "chosen_plans.hpp"

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double>& times) {
    auto const middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
}

template <class Run>
double microseconds(Run const& run) {
    MPI_Barrier(MPI_COMM_WORLD);
    auto const start = Clock::now();
    run();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

/// Bare MPI, by its own wait and by tests alone; ours from the heap and from an arena.
void compare(joinable::MpiCommunicator& comm, std::size_t bytes, std::size_t turns) {
    std::size_t const count = bytes / sizeof(float);
    std::vector<float> buffer(count, 0);
    std::vector<float> in(count, 0);
    joinable::Arena const arena = comm.allocate(bytes);
    joinable::Buffer const ours{buffer.data(), count, joinable::DType::f32};
    joinable::Buffer const in_arena{arena.data(), count, joinable::DType::f32};
    auto const bare = [&](void const* from, void* to, bool tests) {
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_Iallreduce(
            from, to, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request
        );
        int is_done = 0;
        while (tests && is_done == 0) {
            MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
        }
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    };
    std::vector<double> times[5];
    for (std::size_t turn = 0; turn < turns; ++turn) {
        times[0].push_back(microseconds([&] { bare(in.data(), buffer.data(), false); }));
        times[3].push_back(microseconds([&] {
            comm.all_reduce(ours, joinable::ReduceOp::sum).wait();
        }));
        // The same memory for these, in turns: the first of them finds less of it in a cache.
        for (std::size_t k = 0; k < 3; ++k) {
            switch ((turn + k) % 3) {
            case 0:
                times[1].push_back(microseconds([&] { bare(MPI_IN_PLACE, arena.data(), false); }));
                break;
            case 1:
                times[2].push_back(microseconds([&] { bare(MPI_IN_PLACE, arena.data(), true); }));
                break;
            default:
                times[4].push_back(microseconds([&] {
                    comm.all_reduce(in_arena, joinable::ReduceOp::sum).wait();
                }));
            }
        }
    }
    if (comm.rank() == 0) {
        std::printf(
            "%9zu bytes, %d ranks: MPI_Iallreduce %.1f, in place %.1f, by tests %.1f; ours %.1f, in an "
            "arena %.1f\n",
            bytes,
            comm.size(),
            median(times[0]),
            median(times[1]),
            median(times[2]),
            median(times[3]),
            median(times[4])
        );
    }
}

} // namespace

int main(int count, char** arguments) {
    MPI_Init(&count, &arguments);
    {
        joinable::MpiCommunicator comm{MPI_COMM_WORLD};
        if (count > 1 && std::string_view{arguments[1]} == "plans") {
            print_chosen_plans("MPI", comm);
            count = 1;
        }
        auto const argument = [&](int i, unsigned long otherwise) {
            return count > i ? std::strtoul(arguments[i], nullptr, 10) : otherwise;
        };
        std::size_t const turns = argument(1, 300);
        compare(comm, 8, turns);
        for (std::size_t mebibytes = 1; mebibytes <= argument(2, 1); mebibytes *= 4) {
            compare(comm, mebibytes << 20U, turns / mebibytes + 10);
        }
    }
    MPI_Finalize();
}
