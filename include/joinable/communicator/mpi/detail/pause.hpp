// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/polling.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How long a rank waits for answers, for its last messages to be sent, and for the others to
/// complete its collectives.
inline constexpr std::chrono::seconds mpi_patience{2};

/// In the first millisecond there is no pause: each poll moves data, and MPI itself yields if it
/// knows that ranks share cores.
struct MpiPause : PollPause {
    MpiPause() noexcept : PollPause{std::chrono::milliseconds{1}} {}
};

/// Polls until `is_so()`, for the time `moment`. Returns whether it came true.
template <class IsSo>
bool wait_for_a_moment(IsSo const& is_so, std::chrono::nanoseconds moment = mpi_patience) {
    return wait_at_most(moment, is_so, MpiPause{});
}

}}} // namespace joinable::v0::detail
