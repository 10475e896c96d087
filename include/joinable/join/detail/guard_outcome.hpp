// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/control.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/rank_groups.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The outcome of a guard on this rank: whether it has ended, and why.
class GuardOutcome {
public:
    /// `groups`: null if all communicators have the same ranks.
    GuardOutcome(std::vector<ControlCommunicator*> communicators, RankGroups const* groups)
        : communicators_{std::move(communicators)}, groups_{groups},
          state_{groups == nullptr ? 0U : 2U} {}

    /// Keeps the reason of a failure that is about to leave the guard. Only the first one since
    /// forget() counts. The message is `text` if no exception is in flight or the exception has no
    /// message. An exception that names ranks of another communicator blames none: ranks that the
    /// guard does not have, or those of a group that numbers its ranks otherwise.
    void record(std::string_view text) {
        if (!recorded_) {
            recorded_ = believed(failure_of(std::current_exception()));
            if (names_others(recorded_->ranks)) {
                recorded_ = AbortReason{FailureKind::peer_failed, {}, recorded_->message};
            }
            if (recorded_->message.empty()) {
                recorded_->message = text;
            }
        }
    }
    /// This rank fails with a text that the program chose, and that says more than any exception.
    void fail_with(std::string_view text) {
        recorded_ = AbortReason{FailureKind::peer_failed, {}, std::string{text}};
        is_chosen_ = true;
    }
    /// Keeps the reason of a failed roll call, which all ranks throw. Peers are told it, unless a
    /// reason was kept before.
    void record_end_of_roll_calls(AbortReason const& reason) {
        failure_ = reason;
        if (!recorded_) {
            recorded_ = believed(reason);
        }
    }
    /// The program has handled the failure, and the round in which it was is over.
    void forget() noexcept {
        recorded_.reset();
        is_chosen_ = false;
    }
    /// It is not over: a text that the program chose is for all of the round.
    void forget_exception() noexcept {
        if (!is_chosen_) {
            recorded_.reset();
        }
    }
    /// The reason that peers are told.
    [[nodiscard]] AbortReason reason() const { return recorded_.value_or(failure_of({})); }

    [[nodiscard]] bool is_over() const noexcept { return (state_ & 1U) != 0; }
    /// One question, because most guards are asked in each round and have neither.
    [[nodiscard]] bool is_over_or_has_groups() const noexcept { return state_ != 0; }
    void end() noexcept { state_ |= 1U; }

    /// Ends with a failure that all ranks agreed on. All of them throw it.
    [[noreturn]] void fail(AbortReason const& failure) {
        end();
        failure_ = failure;
        throw_failure(failure);
    }

    /// The same where only this rank knows: tells every rank, wherever it waits. require_alive() throws it.
    void fail_alone(AbortReason const& failure) {
        failure_ = failure;
        is_told_ = false;
        abort(failure);
    }
    /// Whether nothing has thrown that failure yet.
    [[nodiscard]] bool owes_failure() const noexcept { return !is_told_; }

    /// Ends and tells every rank, wherever it waits. The first reason that the communicator of the
    /// roll calls was given goes to the others, too: it may be why this rank leaves unrecorded.
    void abort(AbortReason reason) {
        end();
        for (ControlCommunicator* communicator : communicators_) {
            communicator->abort(groups_ ? groups_->reason_for(*communicator, reason) : reason);
            if (auto const first = control().abort_reason()) {
                reason = {first->kind, own_ranks(*first), first->message};
            }
        }
    }

    /// @throws ContractViolation  the guard has ended without a failure; else the failure again.
    void require_alive() {
        if (is_over() || failure_) {
            throw_end();
        }
    }

    /// The communicator of the roll calls.
    [[nodiscard]] ControlCommunicator& control() const noexcept { return *communicators_.front(); }
    [[nodiscard]] bool can_abort() const noexcept {
        return std::all_of(communicators_.begin(), communicators_.end(), [](auto* communicator) {
            return communicator->can_abort();
        });
    }

private:
    [[noreturn]] void throw_end() {
        if (failure_) {
            is_told_ = true;
            throw_failure(*failure_);
        }
        throw ContractViolation{"this guard has ended; construct a new Join for more rounds"};
    }

    /// The reason of an exception, by ranks that one of the communicators may have named.
    [[nodiscard]] AbortReason believed(AbortReason reason) const {
        bool const is_ours =
            std::any_of(communicators_.begin(), communicators_.end(), [&](auto* communicator) {
                return communicator->may_have_thrown(reason) &&
                       (groups_ == nullptr || groups_->may_name(*communicator, reason));
            });
        if (!is_ours && groups_ != nullptr && !control().is_aborted()) {
            if (auto renamed = groups_->in_guard(reason)) {
                return *std::move(renamed);
            }
        }
        return is_ours ? reason : failure_in_group(std::move(reason));
    }
    /// Whether these are ranks of a larger communicator than the guard's.
    [[nodiscard]] bool names_others(std::vector<int> const& ranks) const {
        return !ranks.empty() && *std::max_element(ranks.begin(), ranks.end()) >= control().size();
    }

    std::vector<ControlCommunicator*> communicators_; ///< distinct
    RankGroups const* groups_;
    unsigned state_; ///< 1: it is over; 2: there are groups; added
    bool is_told_ = true;
    bool is_chosen_ = false;              ///< what was recorded is fail_with()'s
    std::optional<AbortReason> recorded_; ///< why this rank leaves
    std::optional<AbortReason> failure_;  ///< the failure that the guard threw
};

}}} // namespace joinable::v0::detail
