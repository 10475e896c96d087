// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Why a process that says so is no rank of any group; empty if it is one.
[[nodiscard]] inline std::string why_no_rank(int rank, int size) {
    bool const is_none = rank < 0 || rank >= size || size > max_ranks;
    std::string const given = concat(", but was given rank ", rank, " of ", size);
    char const* const what = "expected a rank from 0 to below the world size, which is at most ";
    return is_none ? concat(what, max_ranks, given) : std::string{};
}
/// @throws ContractViolation  a process says that it is a rank that no group has.
inline void check_own_rank(int rank, int size) {
    if (std::string const why = why_no_rank(rank, size); !why.empty()) {
        throw ContractViolation{why};
    }
}

}}} // namespace joinable::v0::detail
