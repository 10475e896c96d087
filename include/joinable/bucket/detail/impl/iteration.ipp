// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/detail/iteration.hpp>

#include <algorithm>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Iteration::Iteration(Gradients& gradients, BucketOptions const& options)
    : gradients_{gradients}, states_(gradients.parameters().size()),
      finds_unused_{options.find_unused && !options.static_graph},
      sends_held_{options.unused_gradients == UnusedGradients::held},
      records_order_{rebuilds(options) && gradients.receive_averages()} {
    accumulated_.resize(states_.size());
    if (gradients.receive_averages() && (options.find_unused || options.static_graph)) {
        used_.emplace(states_.size());
    }
    if (options.static_graph) {
        graph_.emplace(states_.size());
    }
    ready_order_.reserve(gradients.trained().size());
    fit_to_buckets();
}

JOINABLE_DEFINITION void Iteration::take_unused(std::size_t i) const {
    if (is_unused(i)) {
        bool const is_held = sends_held_ && !without_;
        is_held ? gradients_.pack(i, factor_) : gradients_.zero(i);
    }
}

JOINABLE_DEFINITION void Iteration::begin(double factor, WithoutPass const* without) {
    require_closed();
    is_open_ = true;
    is_marked_ = false;
    factor_ = factor;
    without_.reset();
    if (without != nullptr) {
        without_ = *without;
    }
    is_recording_ = without == nullptr && graph_ && !graph_->is_recorded();
    for (std::size_t b = 0; b < gradients_.buckets().size(); ++b) {
        pending_[b] = gradients_.buckets()[b].parameters.size();
    }
    pending_.back() = gradients_.without_bucket();
    std::fill(states_.begin(), states_.end(), State::pending);
    ready_order_.clear();
    if (sends_map()) {
        used_->clear();
    }
    if (graph_) {
        graph_->begin();
    }
}

JOINABLE_DEFINITION void Iteration::leave_out(std::size_t i) {
    require_trained(i);
    char const* const wrong =
        !finds_unused_
            ? " was said to be unused, but the option find_unused is off or "
              "static_graph finds out by itself; turn find_unused on, or mark it ready with a gradient of zeros"
        : states_[i] != State::pending ? " was said to be unused twice"
                                       : nullptr;
    if (wrong != nullptr) {
        throw ContractViolation{gradients_.describe(i) + wrong};
    }
    take_or_leave(i);
}

JOINABLE_DEFINITION void Iteration::leave_out_others() {
    bool const is_recorded = graph_ && graph_->is_recorded();
    for (std::size_t const i : trained()) {
        bool const is_frozen_now = sends_map() && states_[i] == State::pending && is_frozen(i);
        if (is_frozen_now || (is_recorded && !graph_->is_used(i))) {
            take_or_leave(i);
        }
    }
}

JOINABLE_DEFINITION bool Iteration::mark(std::size_t i) {
    require_trained(i);
    is_marked_ = true;
    if (sends_map() && is_open_ && states_[i] != State::pending && is_frozen(i)) {
        return false; // an engine may mark all parameters
    }
    require_markable(i);
    gradients_.require_marked(i);
    if (records_order_) {
        ready_order_.push_back(i);
    }
    return !graph_ || graph_->mark(i);
}

JOINABLE_DEFINITION void Iteration::contribute_nothing() {
    if (!without_) { // the pass failed
        without_.emplace();
    }
    is_recording_ = false;
    ready_order_.clear();
    for (std::size_t const i : trained()) {
        states_[i] = State::unused;
    }
    std::fill(pending_.begin(), pending_.end(), std::size_t{0});
}

JOINABLE_DEFINITION void Iteration::require_closed() const {
    if (is_open_) {
        throw ContractViolation{concat_missing(
            "the previous iteration was not finalized; call finalize_backward() first"
        )};
    }
}

JOINABLE_DEFINITION void Iteration::complete() {
    if (graph_) {
        complete_ready_order();
    }
    if (is_recording_) {
        for (std::size_t const i : trained()) {
            graph_->is_used(i) ? take_used(i) : take_or_leave(i);
        }
        graph_->record();
        is_recording_ = false;
    }
    require_all_ready();
}

JOINABLE_DEFINITION void Iteration::write_used() {
    for (std::size_t const i : trained()) {
        if (!is_unused(i)) {
            used_->use(i);
        } else if (!without_ || without_->is_like_pass()) {
            used_->leave_out(i, gradients_.has(i));
        }
    }
}

JOINABLE_DEFINITION void Iteration::follow_others() {
    if (!used_ || !without_ || !without_->follows_others()) {
        return;
    }
    for (std::size_t k = 0; k < trained().size(); ++k) {
        if (std::size_t const i = trained()[k]; !used_->is_used(i)) {
            // A static graph sends no map in later iterations, but gradients may come and go.
            gradients_.follow_others(
                i,
                !finds_unused_        ? OtherGradient::unknown
                : used_->is_absent(i) ? OtherGradient::none
                                      : OtherGradient::zeros
            );
        }
    }
}

JOINABLE_DEFINITION void Iteration::end() {
    if (graph_ && used_ && used_->is_empty()) {
        used_->clear(); // no rank had gradients: the graph is not recorded yet
    }
    if (!without_ || !without_->is_untouched()) {
        discard_accumulated();
    }
    is_open_ = false;
}

JOINABLE_DEFINITION void Iteration::require_open(std::string_view verb) const {
    if (!is_open_) {
        throw ContractViolation{
            concat(verb, " without prepare_for_backward(): no iteration is open")
        };
    }
}

JOINABLE_DEFINITION void Iteration::take_used(std::size_t i) {
    if (graph_ && used_ && used_->is_known() && !used_->is_used(i)) {
        throw ContractViolation{concat(
            gradients_.describe(i),
            " is used, but no rank used it in the first iteration: with static_graph all "
            "iterations use the same parameters; turn it off and find_unused on"
        )};
    }
    take(i);
}

JOINABLE_DEFINITION void Iteration::complete_ready_order() {
    if (ready_order_.empty()) {
        return;
    }
    std::vector<std::size_t> order; // from the end, each once
    std::vector<bool> is_listed(states_.size());
    auto const list = [&](std::size_t i) {
        if (!is_listed[i]) {
            is_listed[i] = true;
            order.push_back(i);
        }
    };
    for (std::size_t k = trained().size(); k-- > 0;) {
        if (!graph_->is_used(trained()[k])) {
            list(trained()[k]);
        }
    }
    for (std::size_t k = ready_order_.size(); k-- > 0;) {
        list(ready_order_[k]);
    }
    ready_order_.assign(order.rbegin(), order.rend());
}

JOINABLE_DEFINITION void Iteration::require_trained(std::size_t i) const {
    require_in_range(i, states_.size(), gradients_.rank());
    if (!gradients_.is_trained(i)) {
        throw ContractViolation{
            concat(gradients_.describe(i), why_not_trained(gradients_.parameters()[i]))
        };
    }
}

JOINABLE_DEFINITION void Iteration::require_markable(std::size_t i) const {
    char const* const wrong =
        !is_open_ ? " was marked ready outside ddp.backward() or before prepare_for_backward()"
        : is_unused(i) && graph_
            ? " is used, but was not in the first iteration: with static_graph all iterations "
              "use the same parameters; turn it off and find_unused on"
        : is_unused(i) ? " was said to be unused, but became ready; leave it out of the unused ones"
        : states_[i] == State::ready && graph_
            ? " became ready more often than in the first iteration: with static_graph all "
              "iterations use parameters equally often; turn it off"
        : states_[i] == State::ready && gradients_.receive_averages()
            ? " was marked ready twice in an iteration; mark a parameter that is shared by "
              "modules or used in several passes once, when its last use is done, or turn "
              "static_graph on, which counts its uses"
        : states_[i] == State::ready
            ? " was marked ready twice in an iteration; mark a parameter that is shared by modules or used in "
              "several passes once, when its last use is done"
            : nullptr;
    if (wrong != nullptr) {
        throw ContractViolation{gradients_.describe(i) + wrong};
    }
}

JOINABLE_DEFINITION void Iteration::require_all_ready() const {
    if (std::any_of(pending_.begin(), pending_.end(), [](std::size_t n) { return n != 0; })) {
        bool is_frozen_now = false;
        for (std::size_t const i : trained()) {
            is_frozen_now = is_frozen_now || (!finds_unused_ && is_missing(i) && is_frozen(i));
        }
        throw ContractViolation{concat_missing(
            is_frozen_now && graph_
                ? "parameters that were in the first iteration are frozen now, but with static_graph all "
                  "iterations use the same parameters; turn it off and find_unused on, or list them again: by "
                  "refresh() of a model that has it, else in a new one"
            : is_frozen_now
                ? "parameters that were trained when they were listed are frozen now, so not all gradients became "
                  "ready; turn the option find_unused on, if the model has it, or list them again: by refresh() "
                  "of a model that has it, else in a new one"
            : graph_
                ? "parameters are not used, but were in the first iteration: with "
                  "static_graph all iterations use the same parameters; turn it off and find_unused on"
            : finds_unused_
                ? "not all gradients became ready; give those that the pass does not use to backward() or "
                  "prepare_for_backward() as unused, or check that all outputs of forward reach the loss"
                : "not all gradients became ready; mark every trainable parameter in each "
                  "iteration, set requires_grad to false where there is nothing to train, or "
                  "turn the option find_unused or static_graph on"
        )};
    }
}

JOINABLE_DEFINITION std::string Iteration::concat_missing(std::string_view text) const {
    return detail::concat_missing(
        text,
        gradients_.parameters(),
        gradients_.rank(),
        [&](std::size_t i) { return is_missing(i); }
    );
}

}}} // namespace joinable::v0::detail
