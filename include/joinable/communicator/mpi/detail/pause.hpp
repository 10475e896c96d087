// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>

#include <joinable/communicator/detail/polling.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// In the first millisecond there is no pause: each poll moves data, and MPI itself yields if it
/// knows that ranks share cores.
struct MpiPause : PollPause {
    MpiPause() noexcept : PollPause{std::chrono::milliseconds{1}} {}
};

}}} // namespace joinable::v0::detail
