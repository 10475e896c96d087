// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/stored_reason.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// Why something ended for all: the first to say so wins, and what it takes to end it is done once.
/// It lies in memory that processes share, and whoever is at it may be killed: so writers have
/// numbers, below ArrivalLine::max_ranks, which no two processes share.
class FirstReason {
public:
    static constexpr int nobody = ArrivalLine::max_ranks; ///< writes in the place of the dead

    /// Returns when some reason is given. `close()` runs after the reason is written.
    template <class Close>
    void give(AbortReason const& reason, int writer, Close const& close) noexcept {
        if (begin(open, writer)) {
            write(reason, writer, close);
        }
        while (!is_given()) { // whoever writes is at it, or take_over() is called for it
            cpu_relax();
        }
    }
    /// Does what the `dead` writer has begun, or begins. Returns at once, though another writer may
    /// still be at it. One thread at a time calls this.
    template <class Close>
    void take_over(int dead, AbortReason const& reason, Close const& close) noexcept {
        if (begin(open, nobody) || begin(writing(dead), nobody)) {
            write(reason, nobody, close);
        } else if (int expected = written(dead);
                   state_.compare_exchange_strong(expected, written(nobody))) {
            finish(close);
        }
    }

    [[nodiscard]] bool is_given() const noexcept { return state_.load() == given; }
    /// @pre a close() has begun
    [[nodiscard]] AbortReason reason() const { return reason_.load(); }

private:
    enum : int { open, given };
    static constexpr int writing(int writer) noexcept { return 2 * writer + 2; }
    static constexpr int written(int writer) noexcept { return 2 * writer + 3; }

    bool begin(int expected, int writer) noexcept {
        return state_.compare_exchange_strong(expected, writing(writer));
    }
    template <class Close>
    void write(AbortReason const& reason, int writer, Close const& close) noexcept {
        reason_.store(reason);
        state_.store(written(writer));
        finish(close);
    }
    template <class Close>
    void finish(Close const& close) noexcept {
        close();
        state_.store(given);
    }

    std::atomic<int> state_{open};
    StoredReason reason_;
};

} // namespace joinable::inline v0::detail
