// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>

namespace joinable { inline namespace v0 { namespace detail {

/// When a wait that starts now ends. A year stands for any longer time: the sum would overflow.
[[nodiscard]] inline std::chrono::steady_clock::time_point
end_of_wait(std::chrono::nanoseconds deadline) noexcept {
    constexpr std::chrono::nanoseconds year = std::chrono::hours{24 * 365};
    return std::chrono::steady_clock::now() + (std::min)(deadline, year);
}

}}} // namespace joinable::v0::detail
