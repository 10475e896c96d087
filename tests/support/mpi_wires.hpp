// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/mpi/communicator.hpp>

namespace joinable_tests {

/// Communicators of a rank, on which a test can say what a rank would, to some ranks only.
struct Wires {
    explicit Wires(
        MPI_Comm group, std::chrono::nanoseconds time_for_others = joinable::MpiOptions{}.patience
    )
        : data{duplicate(group)}, alarm{duplicate(group)}, patience{time_for_others} {
        MPI_Comm_rank(group, &rank);
        MPI_Comm_size(group, &size);
    }

    [[nodiscard]] std::shared_ptr<joinable::detail::MpiRank>
    make_rank(std::shared_ptr<joinable::detail::MpiRank> parent = nullptr) const {
        joinable::MpiOptions const options{
            .deadline = std::chrono::seconds{20}, .patience = patience
        };
        return std::make_shared<joinable::detail::MpiRank>(
            data, alarm, rank, size, options, joinable::detail::MpiLimits{}, std::move(parent)
        );
    }
    void tell(int to, joinable::detail::MpiWord word, std::vector<std::byte> const& body) const {
        MPI_Send(
            body.data(), static_cast<int>(body.size()), MPI_BYTE, to, static_cast<int>(word), alarm
        );
    }

    [[nodiscard]] static MPI_Comm duplicate(MPI_Comm comm) {
        MPI_Comm made = MPI_COMM_NULL;
        MPI_Comm_dup(comm, &made);
        MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
        return made;
    }

    MPI_Comm data;
    MPI_Comm alarm;
    std::chrono::nanoseconds patience;
    int rank = 0;
    int size = 0;
};

} // namespace joinable_tests
