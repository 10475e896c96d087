// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// Counts how often each gradient becomes ready. The first iteration is recorded. In later ones a
/// gradient is final when it became ready as often as then. Local.
class StaticGraph {
public:
    explicit StaticGraph(std::size_t parameters) : calls_(parameters), left_(parameters) {}

    [[nodiscard]] bool is_recorded() const noexcept { return is_recorded_; }
    /// Whether the recorded iteration used parameter `i`.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return calls_[i] != 0; }

    /// Starts an iteration.
    void begin() {
        if (is_recorded_) {
            left_ = calls_;
        } else {
            calls_.assign(calls_.size(), 0);
        }
    }

    /// Counts a mark of gradient `i`. Returns whether it is the last one of the recorded number.
    [[nodiscard]] bool mark(std::size_t i) noexcept {
        if (!is_recorded_) {
            ++calls_[i];
            return false;
        }
        return --left_[i] == 0;
    }
    void record() noexcept { is_recorded_ = true; }

private:
    std::vector<std::uint32_t> calls_;
    std::vector<std::uint32_t> left_;
    bool is_recorded_ = false;
};

}}} // namespace joinable::v0::detail
