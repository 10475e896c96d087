// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <joinable/communicator/algorithms/detail/message_step.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The steps of one rank along a tree in which whole buffers travel.
///
/// Ranks are numbered from 0, starting with the root. The parent's number is the rank's number
/// without its lowest non-zero digit, in base `radix`: 2 makes a binomial tree, N a star.
class TreeSteps {
public:
    TreeSteps() = default;
    TreeSteps(std::int64_t radix, int ranks, int root, int rank, std::size_t count) noexcept
        : radix_{radix}, ranks_{ranks}, root_{root}, number_{(rank + ranks - root) % ranks},
          whole_{0, count} {
        std::int64_t power = 1;
        for (; power < ranks && number_ / power % radix == 0; power *= radix) {
            children_ += (std::min)((ranks - 1 - number_) / power, radix - 1);
        }
        if (number_ != 0) {
            parent_ = rank_of(number_ - number_ / power % radix * power);
        }
    }

    /// Combines the buffers of all ranks at the root, those of children in ascending order.
    [[nodiscard]] bool climb(std::int64_t step_number, MessageStep& step) const noexcept {
        if (step_number < 2 * children_) {
            if (step_number % 2 == 0) {
                step.receive = whole_with(child(step_number / 2), 0);
            } else {
                step.combine = {0, false, whole_};
            }
            return true;
        }
        if (parent_ != Transfer::nobody) {
            step.send = whole_with(parent_);
        }
        return parent_ != Transfer::nobody && step_number == 2 * children_;
    }
    /// Sends the root's buffer to all ranks. The last children come first, because they have the
    /// most to do.
    [[nodiscard]] bool descend(std::int64_t step_number, MessageStep& step) const noexcept {
        std::int64_t const received = parent_ != Transfer::nobody ? 1 : 0;
        if (step_number < received) {
            step.receive = whole_with(parent_);
            return true;
        }
        std::int64_t const next = children_ - 1 - (step_number - received);
        if (next >= 0) {
            step.send = whole_with(child(next));
        }
        return next >= 0;
    }

private:
    [[nodiscard]] int rank_of(std::int64_t number) const noexcept {
        return static_cast<int>((number + root_) % ranks_);
    }
    [[nodiscard]] int child(std::int64_t index) const noexcept {
        std::int64_t power = 1;
        for (; index >= radix_ - 1; index -= radix_ - 1) {
            power *= radix_;
        }
        return rank_of(number_ + (index + 1) * power);
    }
    [[nodiscard]] Transfer whole_with(int peer, int slot = Transfer::in_place) const noexcept {
        return whole_.is_empty() ? Transfer{} : Transfer{peer, slot, whole_};
    }

    std::int64_t radix_ = 2;
    std::int64_t ranks_ = 1;
    std::int64_t root_ = 0;
    std::int64_t number_ = 0; ///< of this rank
    std::int64_t children_ =
        0; ///< radix - 1 for each digit below the lowest one that is not 0, if there are as many
    int parent_ = Transfer::nobody;
    ElementRange whole_;
};

}}} // namespace joinable::v0::detail
