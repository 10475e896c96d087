// SPDX-License-Identifier: BSL-1.0
// Guards over MPI whose ranks are on one machine: roll calls need not travel by MPI.
#include <joinable/mpi.hpp>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/mpi_ranks.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::MpiCommunicator;

TEST_CASE("a guard over MPI has its roll calls in shared memory, where control() says so") {
    run_mpi_groups({1, 2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator mpi{group};
        long creator = ::getpid(); // for a name that no other run has
        MPI_Bcast(&creator, 1, MPI_LONG, 0, group);
        joinable::ProcessCommunicator host = joinable::ProcessCommunicator::attach(
            {.rank = mpi.rank(),
             .size = mpi.size(),
             .job =
                 "joinable_over_mpi_" + std::to_string(creator) + "_" + std::to_string(mpi.size())}
        );
        for (bool const by_shared_memory : {false, true}) {
            RecordingCommunicator comm{mpi};
            std::vector<Param<float>> params = make_params<float>({3});
            joinable::DistributedDataParallel ddp{comm, params};
            comm.trace.clear();
            int const inputs = 1 + mpi.rank() % 3; // rounds beyond these are shadowed
            auto const train_in = [&](auto& guard) {
                for (int i = 0; i < inputs; ++i) {
                    drop_gradients(params);
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        add_gradient(params[0], mpi.size());
                        ready(0);
                    });
                    int active = 0;
                    for (int rank = 0; rank < mpi.size(); ++rank) {
                        active += i < 1 + rank % 3 ? 1 : 0;
                    }
                    CHECK(params[0].g(0) == static_cast<float>(active));
                }
                guard.finish();
            };
            if (by_shared_memory) {
                joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                train_in(guard);
            } else {
                joinable::Join guard{joinable::participants(ddp)};
                train_in(guard);
            }
            auto const roll_calls =
                std::count_if(comm.trace.begin(), comm.trace.end(), [](std::string_view entry) {
                    return entry.starts_with("all_reduce") && entry.ends_with("u64");
                });
            CHECK((roll_calls == 0) == by_shared_memory);
        }
    });
}

} // namespace
