// SPDX-License-Identifier: BSL-1.0
// A program that mpirun starts: a guard over ranks of MPI with different numbers of inputs.
#include <cstdio>
#include <vector>

#include <mpi.h>

#include <joinable/join.hpp>
#include <joinable/mpi.hpp>
#include <joinable/tcp.hpp> // beside another transport

int main(int count, char** arguments) {
    MPI_Init(&count, &arguments);
    bool is_right = false;
    { // before MPI_Finalize
        joinable::MpiCommunicator comm{MPI_COMM_WORLD};
        std::vector<float> value(1);
        joinable::Step step{comm, [&] {
                                value[0] = 1;
                                joinable::all_reduce(comm, value).wait();
                            }};
        joinable::Join guard{joinable::participants(step)};
        for (int input = 0; input < 3 + comm.rank(); ++input) {
            step.step();
        }
        auto const result = guard.finish();
        is_right = value[0] == static_cast<float>(comm.size()) &&
                   result.rounds == static_cast<std::size_t>(2 + comm.size());
        std::printf("rank %d of %d: %zu rounds\n", comm.rank(), comm.size(), result.rounds);
    }
    MPI_Finalize();
    return is_right ? 0 : 1;
}
