// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/attachments.hpp>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/verdict.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
Attachment::attach(JoinState& state, LocalRounds& rounds, AttachedAs const& as) noexcept {
    if (!is_attached(state)) {
        begin(state, as);
        state.local_rounds_ = &rounds;
        state.has_window_of_guard_ = !as.sees_all;
    }
}

JOINABLE_DEFINITION void Attachment::detach() noexcept {
    if (attached_ != nullptr) {
        forget_rounds();
    }
    if (JoinState* const state = std::exchange(attached_, nullptr)) {
        state->attached_ = nullptr;
        if (state->session_ != nullptr && averages_ != Averages::none) {
            state->window_ = averages_ == Averages::gradients ? state->session_->window()
                                                              : state->session_->untouched_window();
        }
        if (std::exchange(state->has_window_of_guard_, false) && averages_ != Averages::none) {
            state->window_ = state->local_rounds_->window();
        }
        state->session_ = nullptr;
        state->words_ = nullptr;
        state->local_rounds_ = nullptr;
        state->may_be_cleared_ = true;
    }
}

JOINABLE_DEFINITION void Deadlines::exchange(
    std::vector<ControlCommunicator*> const& communicators, std::chrono::nanoseconds deadline
) {
    before_.reserve(communicators.size()); // or one could be changed and not restored
    for (ControlCommunicator* communicator : communicators) {
        auto const before = communicator->exchange_deadline(deadline);
        if (!before) {
            throw ContractViolation{"JoinOptions::timeout needs communicators that "
                                    "have set_deadline()"};
        }
        before_.push_back({communicator, *before});
    }
}

JOINABLE_DEFINITION void Deadlines::restore() noexcept {
    for (; !before_.empty(); before_.pop_back()) { // the last one first: one may set another's
        before_.back().communicator->exchange_deadline(before_.back().deadline);
    }
}

JOINABLE_DEFINITION void check_options(JoinOptions const& options) {
    auto const timeout = options.timeout.value_or(std::chrono::nanoseconds{1}).count();
    auto const inputs = static_cast<std::int64_t>(options.inputs.value_or(0));
    std::uint64_t const weight = options.weight_per_input.value_or(0);
    std::string const wrong =
        timeout <= 0
            ? concat("timeout must be positive, or no wait could end well; given ", timeout, " ns")
        : inputs < 0 ? concat("inputs is ", inputs, "; give the number of this rank's inputs")
        : options.sync_every == 0 ? "sync_every must be at least 1, given 0"
        : weight > max_weight     ? "weight_per_input: " + refusal_of(weight)
                                  : "";
    if (!wrong.empty()) {
        throw ContractViolation{"JoinOptions::" + wrong};
    }
}

JOINABLE_DEFINITION void
check_same_ranks(std::vector<ControlCommunicator*> const& communicators, bool has_groups) {
    ControlCommunicator const& first = *communicators.front();
    if (first.size() > max_world_size) {
        throw ContractViolation{
            concat("a guard takes at most ", max_world_size, " ranks, given ", first.size())
        };
    }
    auto const place = [](ControlCommunicator const& communicator) {
        return concat("rank ", communicator.rank(), " of ", communicator.size());
    };
    for (ControlCommunicator const* other : communicators) {
        if (place(*other) != place(first) && !(has_groups && other->size() < first.size())) {
            throw ContractViolation{
                "the communicators of a guard's participants must have the same ranks in the same "
                "order, but one says " +
                place(first) + " and another " + place(*other) +
                "; for groups of ranks, see groups_of()"
            };
        }
    }
}

}}} // namespace joinable::v0::detail
