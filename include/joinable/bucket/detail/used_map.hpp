// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <joinable/communicator/communicator.hpp>

namespace joinable::inline v0::detail {

/// Which parameters some rank uses: a sum over ranks of one count per parameter, in flight beside
/// other work. Nothing is allocated after construction.
template <Communicator Comm>
class UsedMap {
public:
    UsedMap(Comm& comm, std::size_t parameters) : comm_{comm}, counts_(parameters) {}

    /// Local: forgets what is in the map, that of other ranks included.
    void clear() noexcept {
        std::fill(counts_.begin(), counts_.end(), 0);
        is_known_ = false;
    }
    /// Local: this rank uses parameter `i`.
    void use(std::size_t i) noexcept { counts_[i] = 1; }

    /// Collective; does not block. wait() or a test() that succeeded ends it.
    void launch() {
        static_cast<void>(work_.emplace(
            comm_.all_reduce(Buffer{counts_.data(), counts_.size(), DType::i32}, ReduceOp::sum)
        ));
    }
    [[nodiscard]] bool is_launched() const noexcept { return work_.has_value(); }
    /// Whether the map of all ranks is there. False unless it was launched.
    [[nodiscard]] bool test() {
        if (work_ && work_->test()) {
            wait();
        }
        return is_known_;
    }
    void wait() {
        if (work_) {
            work_->wait();
            work_.reset();
            is_known_ = true;
        }
    }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }
    [[nodiscard]] bool is_empty() const noexcept {
        return std::all_of(counts_.begin(), counts_.end(), [](auto count) { return count == 0; });
    }
    /// Whether some rank uses parameter `i`; of this rank alone before the map is known.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return counts_[i] != 0; }

private:
    Comm& comm_;
    std::vector<std::int32_t> counts_;
    bool is_known_ = false;
    std::optional<work_of<Comm>> work_; ///< destroyed before the memory that it uses
};

} // namespace joinable::inline v0::detail
