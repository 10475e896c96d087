// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <optional>

#include <joinable/communicator/work.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How a caller proceeds with operations in flight.
enum class Waiting : std::uint8_t {
    blocks,
    tests, ///< ends by the deadline
    polls, ///< like tests, without a deadline
};

/// Whether `work` is complete, or there is none. Complete work is destroyed.
template <Work W>
[[nodiscard]] bool is_complete(std::optional<W>& work, Waiting waiting) {
    if (!work) {
        return true;
    }
    if (waiting == Waiting::blocks) {
        work->wait();
    } else if (waiting == Waiting::tests ? !work->test() : !make_progress(*work)) {
        return false;
    }
    work.reset();
    return true;
}

}}} // namespace joinable::v0::detail
