// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/engine/endpoint.hpp>
// Endpoints of a group that the library does not compile once.
#include <joinable/communicator/shared_memory/engine/impl/endpoint.ipp>

namespace joinable_tests {

/// What an Endpoint needs of a group, over nothing but a board: for tests that go without one.
struct BoardGroup {
    joinable::detail::Board& at;
    [[nodiscard]] joinable::detail::Board& board() const { return at; }
    void abort(joinable::AbortReason const& reason, int rank) const { at.abort(reason, rank); }
    static void reserve(void const*, std::size_t) {}
    static std::chrono::nanoseconds look_for_deaths() { return (std::chrono::nanoseconds::max)(); }
};

} // namespace joinable_tests
