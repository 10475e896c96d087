// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// Messages between two ranks, including those that no rank has received.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::size_t bytes_of_message(MpiOperation const& operation) noexcept {
    return operation.transfer.signature.count * size_of(operation.transfer.signature.dtype);
}

inline void start_message(MpiOperation& operation, MpiLimits limits, MPI_Comm comm) {
    std::size_t const bytes = bytes_of_message(operation);
    MPI_Datatype type = MPI_BYTE;
    int count = static_cast<int>(bytes);
    if (bytes > limits.most) {
        type = operation.tables.made.emplace_back(type_of_part(DType::u8, bytes, 0, limits.most));
        count = 1;
    }
    MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
    std::byte* const data = operation.transfer.out;
    if (operation.is_send) {
        check_mpi(
            MPI_Isend(data, count, type, operation.peer, operation.tag, comm, &request), "MPI_Isend"
        );
    } else {
        check_mpi(
            MPI_Irecv(data, count, type, operation.peer, operation.tag, comm, &request), "MPI_Irecv"
        );
    }
}

/// Whether a receive has ended. MPI says only once how, so the operation keeps it.
[[nodiscard]] inline bool has_received(MpiOperation& operation) {
    if (operation.received) {
        return true;
    }
    MPI_Request& request = operation.tables.requests.front();
    int is_done = 0;
    MPI_Status status;
    int const code = MPI_Test(&request, &is_done, &status);
    int error_class = MPI_SUCCESS;
    if (code != MPI_SUCCESS) {
        check_mpi(MPI_Error_class(code, &error_class), "MPI_Error_class");
    }
    if (error_class == MPI_ERR_TRUNCATE) {
        request = MPI_REQUEST_NULL; // it has ended
        operation.received = MpiOperation::too_much;
        return true;
    }
    check_mpi(code, "MPI_Test");
    if (is_done != 0) {
        MPI_Count bytes = 0;
        check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
        operation.received = bytes;
    }
    return is_done != 0;
}

/// The reason if the message has another size than `rank` expects. @pre has_received()
[[nodiscard]] inline std::optional<AbortReason>
difference_of_size(MpiOperation const& operation, int rank) {
    std::size_t const expected = bytes_of_message(operation);
    MPI_Count const bytes = operation.received.value();
    if (static_cast<std::size_t>(bytes) == expected) {
        return std::nullopt;
    }
    return AbortReason{
        FailureKind::mismatch,
        both_ranks(rank, operation.peer),
        concat(
            "rank ",
            rank,
            " expects ",
            expected,
            " bytes in ",
            operation.text(),
            ", which sent ",
            bytes == MpiOperation::too_much ? to_text(std::string_view{"more"}) : to_text(bytes)
        )
    };
}

/// Whether MPI has cancelled a receive as requested (true) or has delivered its message (false).
/// Nothing if neither.
[[nodiscard]] inline std::optional<bool> is_cancelled(MpiOperation& receive) {
    int is_done = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&receive.tables.requests.front(), &is_done, &status), "MPI_Test");
    if (is_done == 0) {
        return std::nullopt;
    }
    int is_so = 0;
    check_mpi(MPI_Test_cancelled(&status, &is_so), "MPI_Test_cancelled");
    return is_so != 0;
}

/// Receives and discards the next message of a rank. Returns whether there was one.
[[nodiscard]] inline bool drop_message(int from, MPI_Comm comm) {
    int is_there = 0;
    MPI_Status status; // not MPI_Improbe: it would take the message before there is memory for it
    check_mpi(MPI_Iprobe(from, MPI_ANY_TAG, comm, &is_there, &status), "MPI_Iprobe");
    if (is_there == 0) {
        return false;
    }
    MPI_Count bytes = 0;
    check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
    int const room = static_cast<int>((std::min)(bytes, static_cast<MPI_Count>(INT_MAX)));
    std::vector<std::byte> dropped(static_cast<std::size_t>(room));
    check_mpi(
        MPI_Recv(dropped.data(), room, MPI_BYTE, from, status.MPI_TAG, comm, MPI_STATUS_IGNORE),
        "MPI_Recv"
    );
    return true;
}

}}} // namespace joinable::v0::detail
