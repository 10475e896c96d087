// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// Makes MPI communicators from a given one.

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  MPI is not running, or `comm` is not an intracommunicator with at
///                            most as many ranks as a host communicator may have.
inline void check_mpi_communicator(MPI_Comm comm) {
    if (!is_mpi_running()) {
        throw ContractViolation{
            "expected MPI to run, but it is not initialised, or it is finalised already: make the "
            "communicator between MPI_Init and MPI_Finalize"
        };
    }
    int connects_two = 0;
    if (comm == MPI_COMM_NULL || MPI_Comm_test_inter(comm, &connects_two) != MPI_SUCCESS ||
        connects_two != 0) {
        throw ContractViolation{
            "expected the communicator of one group of ranks, but was given MPI_COMM_NULL, or one "
            "that connects two groups"
        };
    }
    int size = 0;
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    if (size > max_ranks) {
        throw ContractViolation{
            concat("expected at most ", max_ranks, " ranks, but the communicator has ", size)
        };
    }
}

/// While this object lives, MPI returns the errors of `comm`; its duplicates return theirs for
/// ever. By default errors end the job.
class MpiErrorsReturned {
public:
    explicit MpiErrorsReturned(MPI_Comm comm) : comm_{comm} {
        check_mpi(MPI_Comm_get_errhandler(comm, &before_), "MPI_Comm_get_errhandler");
        static_cast<void>(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
    }
    ~MpiErrorsReturned() {
        if (!is_kept_) {
            static_cast<void>(MPI_Comm_set_errhandler(comm_, before_));
        }
        static_cast<void>(MPI_Errhandler_free(&before_));
    }
    MpiErrorsReturned(MpiErrorsReturned const&) = delete;
    MpiErrorsReturned& operator=(MpiErrorsReturned const&) = delete;

    /// From here on errors are returned for ever.
    void keep() noexcept { is_kept_ = true; }

private:
    MPI_Comm comm_;
    MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
    bool is_kept_ = false;
};

/// The memory that MPI writes to until all ranks have arrived.
struct MpiPending {
    MPI_Comm made = MPI_COMM_NULL;
    std::vector<std::uint64_t> words = {}; ///< of each rank, and this rank's again
    MPI_Request request = MPI_REQUEST_NULL;
};
/// @throws TimedOut  not all ranks have arrived by the deadline. `pending` is then never freed.
inline void
finish(std::unique_ptr<MpiPending>& pending, std::chrono::nanoseconds deadline, char const* call) {
    auto const is_done = [&] {
        int is_so = 0;
        check_mpi(MPI_Test(&pending->request, &is_so, MPI_STATUS_IGNORE), call);
        return is_so != 0;
    };
    if (!wait_at_most(deadline, is_done, MpiPause{})) {
        static_cast<void>(pending.release());
        throw TimedOut{
            {},
            concat(
                "some ranks of an MPI communicator did not come within ",
                std::chrono::duration<double>(deadline).count(),
                " s; MPI does not tell which"
            )
        };
    }
}

/// Collective; ends at the deadline. Only all ranks together can free an MPI communicator. If a
/// rank throws later, its duplicate is never freed, and neither is one that is incomplete at the
/// deadline.
/// @throws TimedOut            some ranks did not come.
/// @throws CommunicationError  MPI reports an error.
[[nodiscard]] inline MPI_Comm duplicate(MPI_Comm comm, std::chrono::nanoseconds deadline) {
    auto pending = std::make_unique<MpiPending>();
    check_mpi(MPI_Comm_idup(comm, &pending->made, &pending->request), "MPI_Comm_idup");
    finish(pending, deadline, "MPI_Comm_idup");
    return pending->made;
}
/// Collective; ends at the deadline. A rank whose deadline passed earlier does not call this. A
/// late rank that found the others' earlier part complete thus ends at its own deadline.
/// Returns one word from each rank.
/// @throws as duplicate() does.
[[nodiscard]] inline std::vector<std::uint64_t>
meet(MPI_Comm comm, std::uint64_t word, std::chrono::nanoseconds deadline) {
    int size = 0;
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    auto pending = std::make_unique<MpiPending>();
    pending->words.resize(static_cast<std::size_t>(size) + 1, word);
    std::uint64_t* const words = pending->words.data();
    check_mpi(
        MPI_Iallgather(
            words + size, 1, MPI_UINT64_T, words, 1, MPI_UINT64_T, comm, &pending->request
        ),
        "MPI_Iallgather"
    );
    finish(pending, deadline, "MPI_Iallgather");
    pending->words.pop_back();
    return std::move(pending->words);
}

}}} // namespace joinable::v0::detail
