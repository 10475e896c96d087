// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  a process says that it is a rank that no group has.
inline void check_own_rank(int rank, int size) {
    if (rank < 0 || rank >= size || size > max_ranks) {
        std::string const given = concat(", but was given rank ", rank, " of ", size);
        throw ContractViolation{concat(
            "expected a rank from 0 to below the world size, which is at most ", max_ranks, given
        )};
    }
}

}}} // namespace joinable::v0::detail
