// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>

namespace joinable { inline namespace v0 { namespace detail {

/// The elements [begin, end) of a collective's buffer.
struct ElementRange {
    std::size_t begin = 0;
    std::size_t end = 0;

    [[nodiscard]] constexpr std::size_t size() const noexcept { return end - begin; }
    [[nodiscard]] constexpr bool is_empty() const noexcept { return begin == end; }
    /// Part `index` of `parts` consecutive parts. If the parts cannot be equal, the first ones have
    /// one more element than the others.
    [[nodiscard]] constexpr ElementRange part(std::size_t index, std::size_t parts) const noexcept {
        std::size_t const least = size() / parts;
        std::size_t const longer = size() % parts;
        std::size_t const first = begin + least * index + (std::min)(index, longer);
        return {first, first + least + (index < longer ? 1 : 0)};
    }

    friend constexpr bool operator==(ElementRange const&, ElementRange const&) = default;
};

/// One side of a message: these elements travel to or from rank `peer`.
struct Transfer {
    static constexpr int nobody = -1;   ///< as a peer: no message
    static constexpr int in_place = -1; ///< as a slot: the elements in the buffer itself

    int peer = nobody;
    int slot = in_place; ///< a receive may use scratch memory instead: slot 0 or 1
    ElementRange range = {};

    [[nodiscard]] constexpr bool is_none() const noexcept { return peer == nobody; }
};

/// Combines a slot into these elements of the buffer.
struct Combination {
    int slot = 0;
    bool slot_is_left = false; ///< the slot's elements are the left operands
    ElementRange range = {};

    [[nodiscard]] constexpr bool is_none() const noexcept { return range.is_empty(); }
};

/// One step of one rank in a collective: at most one send, at most one receive and at most one
/// combination. They use different elements and slots, so they may run at the same time. The next
/// step begins when all of them have ended.
///
/// In every schedule of this library, the steps of all ranks belong to rounds. In a round each rank
/// sends at most one message and receives at most one, and both sides of a message are in the same
/// round. If ranks start both messages of a step before they wait for either, they never deadlock.
struct MessageStep {
    Transfer send = {};
    Transfer receive = {};
    Combination combine = {};
};

}}} // namespace joinable::v0::detail
