// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// An AbortReason in memory of fixed size, which another process may read. A longer text is cut and
/// ends in "...".
class StoredReason {
public:
    void store(AbortReason const& reason) noexcept { size_ = pack(reason, bytes_); }
    [[nodiscard]] AbortReason load() const {
        return unpacked_reason(std::span{bytes_}.first(size_)).value_or(AbortReason{});
    }

private:
    std::size_t size_ = 0;
    std::array<std::byte, most_told_bytes> bytes_{};
};

/// The reason why something ended on all ranks. The first writer wins. The work that ends it is
/// done once, or repeated where that has no effect. It lies in memory that processes share. A
/// writer may be killed or stopped at any point, so writers have unique numbers, below max_ranks.
///
/// take_over() replaces a dead writer. A stopped writer cannot be distinguished from a slow one and
/// may continue at any time. After a while another writer overtakes it, with a reason in another
/// place. The place that the state finally names holds the reason of all ranks.
class FirstReason {
public:
    static constexpr int nobody = max_ranks; ///< a writer that cannot die
    /// How long a writer may do nothing before another one overtakes it.
    static constexpr std::chrono::nanoseconds patience = std::chrono::seconds{1};

    /// Returns whether this writer was first. `close()` runs after the reason is written. If it was
    /// not first, another writer may still be writing, or may have died or been stopped: see
    /// take_over() and await_given().
    template <class Close>
    bool give(AbortReason const& reason, int writer, Close const& close) noexcept {
        State const mine{Phase::writing, 0, writer};
        bool const is_first = change(State{}, mine);
        if (is_first) {
            write(mine, reason, close);
        }
        return is_first;
    }
    /// `writer` continues or starts the work of the `dead` writer. Returns false if there was
    /// nothing to do; another writer may still be writing.
    template <class Close>
    bool take_over(int dead, AbortReason const& reason, int writer, Close const& close) noexcept {
        State const seen{state_.load()};
        bool const is_of_dead = seen.phase() != Phase::given && seen.writer() == dead;
        if (seen.phase() != Phase::open && !is_of_dead) {
            return false;
        }
        Phase const phase = seen.phase() == Phase::open ? Phase::writing : seen.phase();
        State const mine{phase, seen.place(), writer};
        if (!change(seen, mine)) {
            return false;
        }
        if (phase == Phase::writing) {
            write(mine, reason, close);
        } else {
            finish(mine, close);
        }
        return true;
    }
    /// Returns when the reason is given. That takes some seconds at most, unless more ranks are
    /// stopped. A writer that does nothing for a while is overtaken: `writer` closes for it, or
    /// gives `reason`.
    /// @pre has_begun()
    template <class Close, class BeforeSleep>
    void await_given(
        WaitQueue& room,
        AbortReason const& reason,
        int writer,
        Close const& close,
        BeforeSleep const& before_sleep
    ) noexcept {
        for (;;) {
            State const seen{state_.load()};
            if (seen.phase() == Phase::given) {
                return;
            }
            auto const has_changed = [&] { return state_.load() != seen.word; };
            if (!room.wait(has_changed, patience, before_sleep)) {
                overtake(seen, reason, writer, close);
                room.wake();
            }
        }
    }

    /// Whether a writer has begun to give a reason, or has given it.
    [[nodiscard]] bool has_begun() const noexcept { return state().phase() != Phase::open; }
    [[nodiscard]] bool is_given() const noexcept { return state().phase() == Phase::given; }
    /// The writer that gives it, or gave it.
    [[nodiscard]] int writer() const noexcept { return state().writer(); }
    /// @pre a close() has begun
    [[nodiscard]] AbortReason reason() const {
        std::size_t const place = state().place();
        if (place == places) {
            return {
                FailureKind::communication,
                {},
                "no abort reason is known: the processes that wrote it were stopped, one after another"
            };
        }
        return reasons_[place].load();
    }

private:
    static constexpr std::size_t places = 3; ///< for reasons; the next number means none
    enum class Phase : std::uint8_t { open, writing, written, given };
    struct State {
        std::uint32_t word = 0;

        constexpr State() = default;
        constexpr explicit State(std::uint32_t of) noexcept : word{of} {}
        constexpr State(Phase phase, std::size_t place, int writer) noexcept
            : word{
                  static_cast<std::uint32_t>(phase) | static_cast<std::uint32_t>(place) << 2U |
                  static_cast<std::uint32_t>(writer) << 4U
              } {}
        [[nodiscard]] Phase phase() const noexcept { return static_cast<Phase>(word & 3U); }
        [[nodiscard]] std::size_t place() const noexcept { return word >> 2U & 3U; }
        [[nodiscard]] int writer() const noexcept { return static_cast<int>(word >> 4U); }
    };

    [[nodiscard]] State state() const noexcept { return State{state_.load()}; }
    bool change(State from, State to) noexcept {
        return state_.compare_exchange_strong(from.word, to.word);
    }
    template <class Close>
    void write(State mine, AbortReason const& reason, Close const& close) noexcept {
        reasons_[mine.place()].store(reason);
        State const written{Phase::written, mine.place(), mine.writer()};
        if (change(mine, written)) { // else this one was stopped, and overtaken
            finish(written, close);
        }
    }
    template <class Close>
    void finish(State written, Close const& close) noexcept {
        close();
        change(written, {Phase::given, written.place(), written.writer()});
    }
    template <class Close>
    void overtake(State seen, AbortReason const& reason, int writer, Close const& close) noexcept {
        if (seen.phase() == Phase::written) {
            finish(seen, close);
            return;
        }
        std::size_t const place = seen.place() + 1;
        State const mine{place == places ? Phase::written : Phase::writing, place, writer};
        if (!change(seen, mine)) {
            return;
        }
        if (place == places) {
            finish(mine, close);
        } else {
            write(mine, reason, close);
        }
    }

    std::atomic<std::uint32_t> state_{0};
    std::array<StoredReason, places> reasons_;
};

}}} // namespace joinable::v0::detail
