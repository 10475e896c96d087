// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/shared_memory/board/stored_reason.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Why something ended for all: the first to say so wins, and what it takes to end it is done once.
/// It lies in memory that processes share, and whoever is at it may be killed: so writers have
/// numbers, below max_ranks, which no two processes share.
class FirstReason {
public:
    static constexpr int nobody = max_ranks; ///< a writer that does not die

    /// Whether it was the first. `close()` runs after the reason is written. If not, some other writer
    /// may still be at it, or have died: then take_over() is called for it.
    template <class Close>
    bool give(AbortReason const& reason, int writer, Close const& close) noexcept {
        bool const is_first = begin(open, writer);
        if (is_first) {
            write(reason, writer, close);
        }
        return is_first;
    }
    /// `writer` does what the `dead` one has begun, or begins. False: there was nothing to do, though
    /// another writer may still be at it.
    template <class Close>
    bool take_over(int dead, AbortReason const& reason, int writer, Close const& close) noexcept {
        if (begin(open, writer) || begin(writing(dead), writer)) {
            write(reason, writer, close);
            return true;
        }
        int expected = written(dead);
        bool const is_written = state_.compare_exchange_strong(expected, written(writer));
        if (is_written) {
            finish(close);
        }
        return is_written;
    }

    /// Somebody is at it, or it is given.
    [[nodiscard]] bool has_begun() const noexcept { return state_.load() != open; }
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

}}} // namespace joinable::v0::detail
