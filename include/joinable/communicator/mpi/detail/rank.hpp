// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/mpi/detail/alarm.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/in_flight.hpp>
#include <joinable/communicator/mpi/detail/lock.hpp>
#include <joinable/communicator/mpi/detail/memory.hpp>
#include <joinable/communicator/mpi/detail/messages.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/communicator/mpi/detail/peers.hpp>
#include <joinable/communicator/mpi/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The ranks of `group`, as numbered in `whole`.
[[nodiscard]] inline std::vector<int> numbers_in(MPI_Comm whole, MPI_Comm group, int size) {
    MPI_Group from = MPI_GROUP_NULL;
    MPI_Group to = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(group, &from), "MPI_Comm_group");
    check_mpi(MPI_Comm_group(whole, &to), "MPI_Comm_group");
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<int> numbers(ranks.size());
    check_mpi(
        MPI_Group_translate_ranks(from, size, ranks.data(), to, numbers.data()),
        "MPI_Group_translate_ranks"
    );
    check_mpi(MPI_Group_free(&from), "MPI_Group_free");
    check_mpi(MPI_Group_free(&to), "MPI_Group_free");
    return numbers;
}

/// One rank of an MPI communicator: its operations (MpiInFlight), its control messages (MpiPeers),
/// and its end. If MPI may still use its memory, it is kept until the process ends: keep().
class MpiRank : public HasWorks, public std::enable_shared_from_this<MpiRank> {
public:
    /// Owns both MPI communicators. An abort of `parent` aborts this rank.
    MpiRank(
        MPI_Comm data,
        MPI_Comm alarm,
        int rank,
        int size,
        MpiOptions const& options,
        MpiLimits limits,
        std::shared_ptr<MpiRank> parent
    )
        : data_{data}, rank_{rank}, size_{size}, options_{options}, limits_{limits},
          parent_{std::move(parent)},
          is_renumbered_{parent_ != nullptr && renumbers(numbers_in(parent_->data_, data, size))},
          lock_{parent_ == nullptr ? std::make_shared<MpiLock>() : parent_->lock_},
          in_flight_{
              data,
              alarm,
              rank,
              size,
              limits,
              lock_,
              [this](AbortReason const& reason) { fail(reason); }
          },
          peers_{alarm, rank, size, options.patience} {}
    MpiRank(MpiRank const&) = delete;
    MpiRank& operator=(MpiRank const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] bool is_renumbered() const noexcept { return is_renumbered_; }
    [[nodiscard]] MPI_Comm data() const noexcept { return data_; }
    [[nodiscard]] MpiOptions const& options() const noexcept { return options_; }
    [[nodiscard]] MpiLimits limits() const noexcept { return limits_; }
    /// The callers of all functions below hold it.
    [[nodiscard]] MpiLock& lock() const noexcept { return *lock_; }
    [[nodiscard]] MpiLock::Held hold() const {
        require_here(rank_); // in another process, no thread may be there to let it go
        return lock_->take();
    }
    [[nodiscard]] std::shared_ptr<MpiMemory> const& memory() const noexcept {
        return in_flight_.memory();
    }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(options_.deadline, deadline);
    }

    // -- collectives and messages -----------------------------------------------------------------

    [[nodiscard]] MpiOperation& post(Request const& request) {
        throw_if_aborted([&] { return request.signature.text(); });
        lock_->notify();
        return in_flight_.post(request, options_);
    }
    [[nodiscard]] MpiOperation& post_message(bool is_send, int peer, int tag, Buffer buffer) {
        throw_if_aborted([&] { return std::string{is_send ? "a send" : "a receive"}; });
        lock_->notify();
        std::uint64_t const number = peers_.messages(peer, is_send);
        MpiOperation& operation = in_flight_.post_message(is_send, peer, tag, buffer, number);
        peers_.count_message(peer, is_send); // not one for which there was no memory
        return operation;
    }
    void finish(MpiOperation& operation) {
        finish(operation, [&] { return progress(operation); });
    }
    template <class IsOver>
    void finish(MpiOperation& operation, IsOver const& is_over) {
        wait_until(options_.deadline, is_over, MpiPause{}, [&] { return more_time(operation); });
    }
    /// The same for the meeting before ranks block inside MPI. When an abort comes, others may
    /// already be inside. This rank then follows them, if its part of the meeting ends within half
    /// the time for which closing ranks wait for it. It does not wait for a rank that has left
    /// without coming. Where it has no memory for a message, it goes on, too.
    void finish_meeting(MpiOperation& operation) {
        auto const is_over = [&] { return if_memory([&] { return progress(operation); }); };
        try {
            finish(operation, is_over);
        } catch (...) { // an abort may be a ContractViolation, too, which is no Error
            bool const is_met = operation.state == MpiOperation::State::lost &&
                                operation.moves_data() && has_met(operation);
            if (!is_met) {
                throw;
            }
            in_flight_.complete(operation);
        }
    }
    [[nodiscard]] bool test(MpiOperation& operation) {
        if (progress(operation)) {
            return true;
        }
        operation.polled.extend_when_reached(options_.deadline, WaitClock::gap_of_tests, [&] {
            return more_time(operation);
        });
        return false;
    }
    /// Whether the operation is complete.
    /// @throws the error that ended the rank, if that came first.
    [[nodiscard]] bool progress(MpiOperation& operation) {
        if (operation.state == MpiOperation::State::complete) {
            return true;
        }
        if (operation.state != MpiOperation::State::lost) {
            if (in_flight_.advance(operation)) {
                return true;
            }
            poll();
            if (operation.state == MpiOperation::State::complete) { // before an abort
                return true;
            }
            if (auto const rank = peers_.departed_peer(operation); rank && !failure_) {
                abort(reason_of_leaving(*rank));
            }
        }
        throw_if_aborted([&] { return operation.text(); });
        return false;
    }
    /// Whether waiting for it would return at once, or throw.
    [[nodiscard]] static bool is_done(MpiOperation const& operation) noexcept {
        return operation.state >= MpiOperation::State::complete;
    }
    [[nodiscard]] static char const* kind_of(MpiOperation const& operation) noexcept {
        return operation.is_message() ? "a message" : "a collective";
    }
    /// The operations in flight.
    struct InFlight {
        std::size_t open = 0;
        std::uint64_t posted = 0;

        friend bool operator==(InFlight const&, InFlight const&) = default;
    };
    /// Tests all open operations, without a deadline. A failure ends all ranks; the
    /// user's thread throws it.
    InFlight help() noexcept {
        try {
            in_flight_.advance_all();
            poll();
            for (MpiOperation const* const operation : in_flight_.open()) {
                if (auto const rank = peers_.departed_peer(*operation); rank && !failure_) {
                    fail(reason_of_leaving(*rank));
                }
            }
        } catch (...) {
            if (!failure_) { // there is no memory
                abort_for_exception(*this, "its ProgressThread");
            }
        }
        return {failure_ ? 0 : in_flight_.open().size(), in_flight_.posted()};
    }
    void release(MpiOperation& operation) { in_flight_.release(operation); }

    /// The ranks that have not posted this rank's oldest unfinished collective, as far as ranks
    /// answer. Ranks answer while they wait or test.
    [[nodiscard]] std::vector<int> missing_ranks() {
        poll();
        MpiOperation* const oldest = in_flight_.oldest_collective();
        if (oldest == nullptr || failure_) {
            return {};
        }
        MpiOperation& operation = *oldest;
        require([&] { peers_.ask(operation); });
        for (MpiPause pause; !peers_.has_answers(operation) && !failure_; pause()) {
            poll();
        }
        std::vector<int> missing = peers_.missing(operation);
        return failure_ || in_flight_.advance(operation) ? std::vector<int>{} : missing;
    }

    // -- the end ----------------------------------------------------------------------------------

    void abort(AbortReason const& reason) {
        if (!failure_) {
            poll();
        }
        if (!failure_) {
            take_over(sendable(reason, size_));
            tell_reason();
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        throw_failure(*failure_);
    }
    [[nodiscard]] std::optional<AbortReason> const& abort_reason() {
        poll();
        return failure_;
    }
    [[nodiscard]] bool is_aborted() { return abort_reason().has_value(); }
    /// `what()` names what begins or waits now.
    template <class F>
    void throw_if_aborted(F const& what) {
        take_over_from_parents();
        if (failure_) {
            throw_failure(in_words_of(rank_, what(), *failure_));
        }
    }
    void keep_alive() {
        if (!failure_) {
            require([&] { peers_.keep_alive(options_.deadline); });
        }
    }
    /// Runs f(). An MPI error in it ends all ranks.
    template <class F>
    void require(F const& f) {
        try {
            f();
        } catch (CommunicationError const& error) {
            fail(reason_of_mpi_error(rank_, error));
        }
    }

    /// The rank's last act. Collective unless it is unwinding: waits for the others up to the
    /// deadline, or briefly after an abort. Ranks complete for each other the collectives that an
    /// abort interrupted. If they cannot, or a rank has ended, MPI keeps this rank's memory.
    void close(bool is_unwinding) noexcept {
        if (!is_mpi_running()) {
            keep();
            return;
        }
        try {
            poll_if_memory();
            if (is_unwinding && !failure_) {
                if (in_flight_.open().empty()) {
                    if_memory([&] {
                        take_over_unwinding({rank_, std::chrono::steady_clock::now()});
                        return true;
                    });
                } else {
                    abort_for_exception(*this, what_unwinds);
                }
            }
            if (failure_ && !has_told_ && !unwinding_) {
                tell_reason(); // else others may first learn that this rank has left
            }
            bool const is_staying =
                !is_unwinding && !unwinding_ && in_flight_.can_be_left(options_.check);
            bool const has_said =
                wait_patiently(options_.patience, [&] { return say_last_word(is_staying); });
            bool const is_over =
                has_said && is_staying && hear_last_words() && drain() && drop_messages();
            bool const has_sent =
                wait_patiently(options_.patience, [&] { return peers_.has_sent(); });
            if (!is_over || !has_sent) {
                keep();
                peers_.stop_listening();
                return;
            }
            memory()->release();
            peers_.close();
            check_mpi(MPI_Comm_free(&data_), "MPI_Comm_free");
        } catch (...) {
            keep();
        }
    }

private:
    static constexpr char const* what_unwinds = "the scope of its communicator";

    // -- what the others say ----------------------------------------------------------------------

    /// Receives messages, here and in the parent groups. An MPI error there ends this rank.
    void poll() {
        if (parent_ != nullptr) {
            parent_->poll();
            take_over_from_parents();
        }
        try {
            peers_.poll(in_flight_.posted(), !failure_, [this](AbortReason const& reason) {
                take_over(reason);
            });
            if (auto const& heard = peers_.unwinding(); heard && !can_complete(*heard)) {
                take_over_unwinding(*heard);
            }
        } catch (CommunicationError const& error) {
            if (!failure_) {
                take_over(sendable(reason_of_mpi_error(rank_, error), size_));
                tell_reason();
            }
        }
    }
    /// Whether what is open here may still complete without the unwound ranks. They have completed
    /// their part of it, and what it brings may be the reason for which they ended: a guard tells
    /// all ranks of a failure in a collective. Their messages are faster than the data.
    [[nodiscard]] bool can_complete(MpiUnwinding const& unwinding) const {
        auto const& open = in_flight_.open();
        return !open.empty() &&
               std::none_of(
                   open.begin(),
                   open.end(),
                   [&](MpiOperation const* one) { return peers_.departed_peer(*one).has_value(); }
               ) &&
               std::chrono::steady_clock::now() - unwinding.heard_at < options_.patience / 2;
    }
    /// All ranks have heard, or will hear, of that from the unwound rank, so this one does not tell
    /// them; it repeats the blame in its last word, which may come first.
    void take_over_unwinding(MpiUnwinding const& unwinding) {
        if (!failure_) {
            unwinding_ = unwinding;
            take_over(reason_of_exception(unwinding.blamed, what_unwinds));
        }
    }
    /// Tells the others why this rank has failed, as far as MPI can. Ranks that do not receive this
    /// learn later that this rank has left.
    void tell_reason() noexcept {
        try {
            peers_.tell_all(MpiWord::abort, packed(*failure_, MpiAlarm::most_bytes));
            has_told_ = true;
            static_cast<void>(peers_.has_sent());
        } catch (...) { // NOLINT(bugprone-empty-catch): this rank has failed already
        }
    }
    void take_over_from_parents() {
        for (MpiRank const* one = parent_.get(); one != nullptr; one = one->parent_.get()) {
            if (one->unwinding_ && !can_complete(*one->unwinding_)) {
                take_over_unwinding(*one->unwinding_);
            } else if (one->failure_ && !one->unwinding_) {
                AbortReason reason = *one->failure_;
                reason.has_left = false; // not this group, in which its ranks have other numbers
                take_over(reason);
            }
        }
    }
    void take_over(AbortReason const& reason) {
        if (!failure_) {
            failure_ = reason;
            failure_->is_renumbered = is_renumbered_;
            in_flight_.lose();
        }
    }
    /// At the deadline: how much longer to wait. Nothing if that is not known yet.
    /// @throws TimedOut
    [[nodiscard]] std::optional<std::chrono::nanoseconds> more_time(MpiOperation& operation) {
        require([&] { peers_.ask(operation); });
        if (!peers_.has_answers(operation)) {
            return std::nullopt;
        }
        std::vector<int> overdue = peers_.missing(operation);
        if (overdue.empty()) { // all ranks have arrived, and MPI is working
            if (std::exchange(operation.is_stalled, true)) {
                fail(reason_of_stall(rank_, operation));
            }
            return options_.deadline;
        }
        auto const left = peers_.take_at_work(overdue, options_.deadline);
        if (!overdue.empty()) {
            fail(reason_of_delay(
                overdue, "arrive", options_.deadline, rank_, "waits in " + operation.text()
            ));
        }
        return left;
    }

    /// f(), or false if there is no memory for it. What it has not heard stays for the next poll.
    template <class F>
    static bool if_memory(F const& f) {
        try {
            return f();
        } catch (std::bad_alloc const&) {
            return false;
        }
    }
    void poll_if_memory() {
        if_memory([&] {
            poll();
            return true;
        });
    }
    /// Polls until `is_so()`, or for that time. Returns whether it came true.
    template <class IsSo>
    [[nodiscard]] static bool wait_patiently(std::chrono::nanoseconds time, IsSo const& is_so) {
        return wait_at_most(time, [&] { return if_memory(is_so); }, MpiPause{});
    }
    /// Whether a meeting that an abort has interrupted ends all the same.
    [[nodiscard]] bool has_met(MpiOperation& meeting) {
        bool is_met = false;
        auto const is_decided = [&] {
            poll();
            is_met = has_ended(meeting.tables);
            return is_met || peers_.departed_peer(meeting);
        };
        static_cast<void>(wait_patiently(options_.patience / 2, is_decided));
        return is_met;
    }

    // -- closing ----------------------------------------------------------------------------------

    [[nodiscard]] bool say_last_word(bool is_staying) {
        MpiLeave leave{.posted = in_flight_.posted()};
        if (is_staying) {
            leave.open = in_flight_.open_collectives();
        } else if (unwinding_) {
            leave.blamed = static_cast<std::uint64_t>(unwinding_->blamed);
        }
        peers_.say_last_word(
            is_staying   ? MpiWord::leave
            : unwinding_ ? MpiWord::unwound
                         : MpiWord::gone,
            std::move(leave)
        );
        return true;
    }
    /// Whether all ranks have left in time, and none has stopped before.
    [[nodiscard]] bool hear_last_words() {
        auto end = end_of_wait(options_.deadline);
        bool is_short = false;
        for (MpiPause pause; !peers_.have_all_left(); pause()) {
            poll_if_memory();
            auto const now = std::chrono::steady_clock::now();
            if (failure_ && !std::exchange(is_short, true)) {
                end = (std::min)(end, end_of_wait(options_.patience, now));
            }
            if (now >= end || peers_.is_any_gone()) {
                return false;
            }
        }
        return !peers_.is_any_gone();
    }
    /// Completes the collectives that are open on any rank. All ranks have received the same
    /// messages, so all decide alike.
    [[nodiscard]] bool drain() {
        auto const open = peers_.open();
        return open && in_flight_.drain(*open, options_.patience, [&](int peer) {
            peers_.discount_receive(peer);
        });
    }
    /// Discards messages that no rank has received. MPI may give this communicator's number to the
    /// next one, which would then receive them. Returns whether all have come.
    [[nodiscard]] bool drop_messages() {
        return wait_patiently(options_.patience, [&] {
            for (int from = 0; from < size_; ++from) {
                while (peers_.has_unreceived(from)) {
                    if (!drop_message(from, data_)) {
                        return false;
                    }
                    static_cast<void>(peers_.count_message(from, false));
                }
            }
            return true;
        });
    }
    void keep() noexcept;

    MPI_Comm data_;
    int rank_;
    int size_;
    MpiOptions options_;
    MpiLimits limits_;
    std::shared_ptr<MpiRank> parent_;
    bool is_renumbered_;
    std::optional<AbortReason> failure_;
    bool has_told_ = false;                 ///< the reason to the others
    std::optional<MpiUnwinding> unwinding_; ///< the failure, if it is one
    std::shared_ptr<MpiLock> lock_;
    MpiInFlight in_flight_;
    MpiPeers peers_; ///< last, because it starts to receive, and others may throw
};

/// A rank while no ProgressThread uses it.
class HeldMpiRank {
public:
    /// @throws ContractViolation  as HasWorks::require_here().
    explicit HeldMpiRank(MpiRank& rank) : rank_{rank}, held_{rank.hold()} {}
    [[nodiscard]] MpiRank* operator->() const noexcept { return &rank_; }

private:
    MpiRank& rank_;
    MpiLock::Held held_;
};

/// Memory that MPI may still use after its rank was destroyed. It is never freed.
inline std::vector<std::shared_ptr<MpiRank>>& kept_mpi_ranks() {
    static auto& kept = *new std::vector<std::shared_ptr<MpiRank>>;
    return kept;
}

inline void MpiRank::keep() noexcept {
    static auto& mutex = *new std::mutex; // several threads may end communicators
    memory()->hold();
    try {
        std::scoped_lock const lock{mutex};
        kept_mpi_ranks().push_back(shared_from_this());
    } catch (...) {
        new std::shared_ptr<MpiRank>{shared_from_this()};
    }
}

}}} // namespace joinable::v0::detail
