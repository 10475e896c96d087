// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Decides how long a rank's host waits, and for which ranks. In memory that all ranks share, each
/// rank publishes how many collectives it has posted, and when it last called keep_alive(). A
/// deadline starts again if the ranks that this one waits for have called keep_alive() meanwhile.
/// Without such memory nothing is known.
class NcclDeadline {
public:
    using Clock = std::chrono::steady_clock;      ///< the same for all processes of a machine
    static constexpr std::size_t line_bytes = 64; ///< a rank's own cache line

    NcclDeadline(std::chrono::nanoseconds length, int rank, int size) noexcept
        : length_{length}, rank_{rank}, size_{size} {}

    [[nodiscard]] std::chrono::nanoseconds length() const noexcept { return length_; }
    std::chrono::nanoseconds set_length(std::chrono::nanoseconds length) noexcept {
        return std::exchange(length_, length);
    }

    /// `memory` is zeroed and has a line for each rank, or is empty.
    void share(Arena memory) noexcept { memory_ = std::move(memory); }
    [[nodiscard]] bool is_shared() const noexcept { return memory_.data() != nullptr; }
    void arrive(std::uint64_t number) const noexcept {
        if (is_shared()) {
            word(rank_, posted).store(number, std::memory_order_release);
        }
    }
    void keep_alive() const noexcept {
        if (is_shared()) {
            auto const now = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
            word(rank_, alive_at).store(now, std::memory_order_release);
        }
    }
    /// The ranks that have not posted this collective. Empty if that is unknown, or `number` is 0.
    [[nodiscard]] std::vector<int> missing(std::uint64_t number) const {
        return ranks_where(is_shared() ? size_ : 0, [&](int rank) {
            return word(rank, posted).load(std::memory_order_acquire) < number;
        });
    }

    /// Whether some rank has not posted this collective, as far as known.
    [[nodiscard]] bool may_be_missing(std::uint64_t number) const {
        return number == 0 || !is_shared() || !missing(number).empty();
    }

    /// At the deadline: how much longer a wait may last, or fail(reason). `doing` describes the wait, and
    /// `number` is that of the collective that it is for; 0: none. The deadline starts again only if
    /// all ranks that this one is known to wait for have called keep_alive(). If those ranks are
    /// unknown, any other rank's call is enough.
    template <class Fail>
    [[nodiscard]] std::chrono::nanoseconds
    more_time(std::string_view doing, std::uint64_t number, Fail const& fail) const {
        std::vector<int> overdue = missing(number);
        bool const are_known = !overdue.empty();
        if (!are_known) {
            overdue = ranks_where(size_, [&](int other) { return other != rank_; });
        }
        std::size_t const awaited = overdue.size();
        auto const left =
            take_ranks_at_work(overdue, length_, [&](int other) { return last_sign_of(other); });
        if (are_known ? !overdue.empty() : overdue.size() == awaited) {
            overdue.resize(are_known ? overdue.size() : 0);
            fail(reason(std::move(overdue), doing, number));
        }
        return left;
    }

private:
    enum Word : std::uint8_t { posted, alive_at }; ///< of a rank's line

    [[nodiscard]] std::atomic_ref<std::uint64_t> word(int rank, Word which) const noexcept {
        std::byte* const line = memory_.data() + static_cast<std::size_t>(rank) * line_bytes;
        return std::atomic_ref<std::uint64_t>{reinterpret_cast<std::uint64_t*>(line)[which]};
    }
    /// The clock's epoch, if there was no call.
    [[nodiscard]] Clock::time_point last_sign_of(int rank) const noexcept {
        std::uint64_t const ticks =
            is_shared() ? word(rank, alive_at).load(std::memory_order_acquire) : 0;
        return Clock::time_point{Clock::duration{static_cast<Clock::rep>(ticks)}};
    }
    [[nodiscard]] AbortReason
    reason(std::vector<int> missing, std::string_view doing, std::uint64_t number) const {
        std::string who = "no answer";
        if (!missing.empty()) {
            who = concat(ranks_text(missing), " did not arrive");
        } else if (number != 0 && is_shared()) {
            who = "all ranks arrived, but nothing came";
        }
        double const seconds = std::chrono::duration<double>(length_).count();
        std::string text = concat(who, " within ", seconds, " s, while rank ", rank_, " ", doing);
        return {FailureKind::timed_out, std::move(missing), std::move(text)};
    }

    std::chrono::nanoseconds length_;
    int rank_;
    int size_;
    Arena memory_;
};

}}} // namespace joinable::v0::detail
