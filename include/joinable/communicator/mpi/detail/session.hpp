// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>

#include <mpi.h>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// MPI from its initialisation to its end, if this object has initialised it.
class MpiSession {
public:
    MpiSession() = default; ///< others have, or will
    MpiSession(MpiSession&& other) noexcept : ends_{std::exchange(other.ends_, false)} {}
    MpiSession& operator=(MpiSession&& other) noexcept {
        std::swap(ends_, other.ends_);
        return *this;
    }
    /// MPI_Finalize waits for all ranks, without a deadline. So it is called only if all ranks get here within 5 s. If
    /// one does not, mpirun ends the job, because this process ends without that call.
    ~MpiSession() {
        if (ends_ && is_mpi_running() && all_get_here()) {
            static_cast<void>(MPI_Finalize());
        }
    }

    /// Collective if MPI is not initialised.
    /// @throws ContractViolation   MPI is finalised already, and cannot begin anew; or another MPI's launcher started
    ///                             this process, so MPI connects it to nobody.
    /// @throws CommunicationError  MPI reports an error.
    [[nodiscard]] static MpiSession begin() {
        MpiSession session;
        int is_initialized = 0;
        static_cast<void>(MPI_Initialized(&is_initialized));
        if (is_initialized == 0) {
            int level = 0;
            check_mpi(
                MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread"
            );
            session.ends_ = true;
            // MPI reports some errors of waits there, whichever communicator they concern.
            check_mpi(
                MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
                "MPI_Comm_set_errhandler"
            );
        } else if (!is_mpi_running()) {
            throw ContractViolation{
                "MPI is finalised already, and a process can initialise it only once: an earlier "
                "from_environment() has ended it; destroy that communicator last"
            };
        }
        check_launcher();
        return session;
    }

private:
    static void check_launcher() {
        int size = 0;
        check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
        for (char const* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
            char const* const told = std::getenv(name);
            if (size == 1 && told != nullptr && std::string_view{told} != "1") {
                throw ContractViolation{concat(
                    "the launcher started ",
                    told,
                    " ranks (",
                    name,
                    "), but MPI connects this one to no other: it is the launcher of another MPI than the program "
                    "was built with; use mpirun of that one"
                )};
            }
        }
    }
    static bool all_get_here() {
        MPI_Request request = MPI_REQUEST_NULL;
        int is_met = 0;
        if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) {
            return false;
        }
        auto const is_over = [&] {
            return MPI_Test(&request, &is_met, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_met != 0;
        };
        auto const nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds{1}); };
        return wait_at_most(std::chrono::seconds{5}, is_over, nap) && is_met != 0;
    }

    bool ends_ = false;
};

}}} // namespace joinable::v0::detail
