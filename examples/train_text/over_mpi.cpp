// SPDX-License-Identifier: BSL-1.0
#include <joinable/mpi.hpp>
#include <joinable/tcp.hpp>

#include <chrono>
#include <thread>

#include <mpi.h>

#include "launch.hpp"
#include "launched.hpp"
#include "options.hpp"

namespace {

/// MPI from beginning to end.
class Mpi {
public:
    Mpi() {
        int level = MPI_THREAD_SINGLE;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
        // MPI reports some errors of waits there, whichever communicator they concern.
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
    Mpi(Mpi const&) = delete;
    Mpi& operator=(Mpi const&) = delete;
    /// MPI_Finalize waits for all ranks, without a deadline. It is called if all ranks get here. If
    /// one cannot, mpirun ends the job, because this process leaves without that call.
    ~Mpi() {
        using Clock = std::chrono::steady_clock;
        MPI_Request request = MPI_REQUEST_NULL;
        int is_met = 0;
        MPI_Ibarrier(MPI_COMM_WORLD, &request);
        for (auto const end = Clock::now() + std::chrono::seconds{5};
             is_met == 0 && Clock::now() < end;) {
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
            MPI_Test(&request, &is_met, MPI_STATUS_IGNORE);
        }
        if (is_met != 0) {
            MPI_Finalize();
        }
    }
};

/// The same ranks, connected by TCP as the launcher says.
joinable::TcpCommunicator tcp_ranks(train_text::Options const& options) {
    try {
        return joinable::TcpCommunicator::from_environment(options.deadline());
    } catch (joinable::ContractViolation const& error) {
        throw train_text::InputError{error.what()};
    }
}

} // namespace

int train_text::run_over_mpi(Options const& options, Program const& program) {
    Mpi const mpi;
    joinable::MpiCommunicator comm{
        MPI_COMM_WORLD,
        // Without a guard a rank that runs out does something else than the others.
        {.deadline = options.deadline(), .check = options.without_join}
    };
    if (!options.has_tcp_roll_calls) {
        return run_as_rank(comm, options, program);
    }
    joinable::TcpCommunicator hosts = tcp_ranks(options);
    return run_as_rank(comm, hosts, options, program);
}
