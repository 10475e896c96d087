// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/detail/gradients.hpp>
#include <joinable/bucket/detail/static_graph.hpp>
#include <joinable/bucket/detail/used_map.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>

namespace joinable::inline v0 {

/// Averages gradients over ranks, bucket by bucket, while the backward pass still runs. Stands
/// alone: an engine without a guard drives it by its verbs.
///
/// One iteration: prepare_for_backward(factor); mark_ready(i) for every trainable parameter, in any
/// order; finalize_backward(). A rank without gradients runs contribute_zeros() instead. The
/// collectives of an iteration, on every rank:
///
/// | collective                 | when                                                            |
/// |----------------------------|-----------------------------------------------------------------|
/// | sum of the map of used     | find_unused: every iteration; static_graph: the first one       |
/// | parameters                 |                                                                 |
/// | sums of buckets            | in index order, each when it is full: never in ready order. With|
/// |                            | a map, of each run of parameters that some rank uses            |
/// | broadcast of the ready     | once, after the first iteration: the buckets are cut anew       |
/// | order                      | (DataParallelOptions::rebuild_buckets)                          |
///
/// Nothing is allocated after the buckets are final.
template <Communicator Comm>
class Reducer {
public:
    /// Local. `comm` must outlive the reducer; so must what the parameters refer to.
    /// @throws ContractViolation  no parameter requires a gradient, or one of integers does; a
    ///         gradient does not fit its value; gradients as bucket views without set_grad. Nothing
    ///         was changed.
    Reducer(Comm& comm, ParameterList parameters, DataParallelOptions const& options = {})
        : comm_{comm}, gradients_{std::move(parameters), options, static_cast<int>(comm.rank())},
          states_(gradients_.parameters().size()),
          finds_unused_{options.find_unused && !options.static_graph},
          is_rebuild_due_{detail::rebuilds(options)} {
        std::size_t const count = gradients_.parameters().size();
        std::size_t const trained = gradients_.trained().size();
        if (options.find_unused || options.static_graph) {
            map_.emplace(comm, count);
            accumulated_.resize(count);
        }
        if (options.static_graph) {
            graph_.emplace(count);
        }
        ready_order_.reserve(trained);
        order_message_.resize(is_rebuild_due_ ? trained + 1 : 0);
        fit_to_buckets();
    }

    Reducer(Reducer const&) = delete;
    Reducer& operator=(Reducer const&) = delete;

    [[nodiscard]] ParameterList const& parameters() const noexcept {
        return gradients_.parameters();
    }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return gradients_.buckets();
    }

    /// Starts an iteration in which this rank's gradients are multiplied by `factor` as they are
    /// packed: the divisor of the average, with this rank's weight in it. With factor 0 it
    /// contributes zeros, whatever its gradients hold: a mean over no samples is not a number.
    /// `unused` says which parameters get no gradient: a range of indices, or a predicate over
    /// them. `order_source` is the rank whose ready order is taken for new buckets, the same on all
    /// ranks. Collective in effect; does not block.
    /// @throws ContractViolation  the previous iteration was not finalized; parameters are unused
    ///         without find_unused, or are listed twice, out of range or not trainable.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(double factor, Unused const& unused = {}, int order_source = 0) {
        begin({factor, order_source, graph_ && !graph_->is_recorded()});
        if constexpr (std::is_invocable_r_v<bool, Unused const&, std::size_t>) {
            for (std::size_t const i : gradients_.trained()) {
                if (unused(i)) {
                    leave_out(i);
                }
            }
        } else {
            for (auto const i : unused) {
                leave_out(static_cast<std::size_t>(i));
            }
        }
        if (graph_ && graph_->is_recorded()) {
            for (std::size_t const i : gradients_.trained()) {
                if (!graph_->is_used(i)) {
                    take_or_leave(i);
                }
            }
        }
        if (finds_unused_) {
            launch_map();
        }
        advance();
    }

    /// Gradient `i` was added to in a round that is not reduced. Needed where parameters may go
    /// unused: what was accumulated counts in the next iteration, used there or not. Local.
    /// @throws ContractViolation  `i` is out of range or needs no gradient.
    void mark_accumulated(std::size_t i) {
        check_index(i);
        if (map_) {
            accumulated_[i] = true;
        }
    }

    /// The gradient of parameter `i` is final: packs it, and launches every bucket that is full and
    /// whose predecessors are launched. A parameter without gradient contributes zeros. With a
    /// static graph every use marks; the last one counts. Collective in effect; does not block.
    /// @throws ContractViolation  no iteration is prepared, `i` is out of range or needs no
    ///         gradient, was marked before or said to be unused, or its gradient does not fit its
    ///         value. The iteration is lost.
    void mark_ready(std::size_t i) {
        check_mark(i);
        if (is_rebuild_due_) {
            ready_order_.push_back(i);
        }
        if (!graph_ || graph_->mark(i)) {
            take(i);
            advance();
        }
    }

    /// From here on this rank contributes zeros: a batch failed. finalize_backward() is still to be
    /// called. Collective in effect; does not block.
    /// @throws ContractViolation  no iteration is open, or a bucket is on its way: too late.
    void contribute_nothing() {
        require_iteration("contribute_nothing()");
        if (iteration_->next_bucket != 0) {
            throw ContractViolation{detail::concat(
                "a batch cannot be skipped on rank ",
                static_cast<int>(comm_.rank()),
                " any more: its first bucket is on its way to the others; let the exception leave "
                "the guard"
            )};
        }
        iteration_->is_recording = false;
        ready_order_.clear();
        for (std::size_t const i : gradients_.trained()) {
            states_[i] = State::unused;
        }
        std::fill(pending_.begin(), pending_.end(), std::size_t{0});
        advance();
    }

    /// Waits for all buckets and writes the averages into the gradients; a parameter without
    /// gradient gets a view of its bucket where set_grad allows it. What no rank uses stays as it
    /// is. Collective.
    /// @throws ContractViolation  parameters were not marked (the text lists them), the graph is not
    ///         the first iteration's, or one has no place for its average; what the communicator
    ///         throws.
    void finalize_backward() {
        require_iteration("finalize_backward()");
        if (iteration_->is_recording) {
            record_graph();
        }
        require_all_ready();
        if (map_) {
            if (!map_->is_known() && !map_->is_launched()) {
                launch_map();
            }
            map_->wait();
        }
        advance();
        deliver();
        if (is_rebuild_due_) {
            rebuild();
        }
        if (graph_ && map_->is_empty()) {
            map_->clear(); // no rank had gradients: the graph is still to be seen
        }
        std::fill(accumulated_.begin(), accumulated_.end(), false);
        iteration_.reset();
    }

    /// The whole iteration of a rank that has no gradients: the same collectives with zeros, and
    /// the averages written into its gradients. Collective. Throws what finalize_backward() throws.
    void contribute_zeros(int order_source = 0) {
        begin({0.0, order_source, false});
        contribute_nothing();
        finalize_backward();
    }

    /// The same for a rank that runs no backward pass, but whose gradients hold what it accumulated
    /// in earlier rounds (mark_accumulated): they are multiplied by `factor` and take part.
    void contribute_accumulated(double factor, int order_source = 0) {
        begin({factor, order_source, false});
        for (std::size_t const i : gradients_.trained()) {
            map_ ? take_or_leave(i) : take(i);
        }
        finalize_backward();
    }

private:
    enum class State : std::uint8_t { pending, ready, unused };

    struct Iteration {
        double factor;
        int order_source;
        bool is_recording; ///< of the static graph: what is used is known at the end only
        std::size_t next_bucket = 0;
        std::size_t launched = 0; ///< works
    };

    // -- the script of an iteration, the same for ranks with and without gradients ---------------

    void begin(Iteration iteration) {
        if (iteration_) {
            throw ContractViolation{concat_missing(
                "the previous iteration was not finalized; call finalize_backward() first"
            )};
        }
        iteration_ = iteration;
        for (std::size_t b = 0; b < pending_.size(); ++b) {
            pending_[b] = buckets()[b].parameters.size();
        }
        std::fill(states_.begin(), states_.end(), State::pending);
        ready_order_.clear();
        if (finds_unused_) {
            map_->clear();
        }
        if (graph_) {
            graph_->begin();
        }
    }

    void launch_map() {
        for (std::size_t const i : gradients_.trained()) {
            if (states_[i] != State::unused) {
                map_->use(i);
            }
        }
        map_->launch();
    }

    /// Launches, in index order, the buckets that are full. What is used by some rank is known
    /// before the first one: so nothing that no rank uses is sent.
    void advance() {
        if (iteration_->is_recording) {
            return;
        }
        if (map_ && !map_->is_known() && !map_->test()) {
            return;
        }
        std::size_t& next = iteration_->next_bucket;
        while (next < buckets().size() && pending_[next] == 0) {
            launch_bucket(buckets()[next++]);
        }
    }

    void launch_bucket(Bucket const& bucket) {
        for_each_run(bucket, [&](std::size_t first, std::size_t last) {
            Buffer run{bucket.views[first].data(), 0, bucket.buffer.dtype};
            for (std::size_t k = first; k < last; ++k) {
                run.count += bucket.views[k].numel();
                if (states_[bucket.parameters[k]] == State::unused) {
                    gradients_.zero(bucket.parameters[k]);
                }
            }
            static_cast<void>( // nvcc 13 warns of a dropped reference to a work, too
                works_[iteration_->launched++].emplace(comm_.all_reduce(run, ReduceOp::sum))
            );
        });
    }

    void deliver() {
        std::size_t work = 0;
        for (Bucket const& bucket : buckets()) {
            for_each_run(bucket, [&](std::size_t first, std::size_t last) {
                works_[work]->wait();
                works_[work++].reset();
                for (std::size_t k = first; k < last; ++k) {
                    gradients_.deliver(bucket.parameters[k]);
                }
            });
        }
    }

    /// Calls f(first, last) for every run of a bucket's parameters that some rank uses.
    template <class F>
    void for_each_run(Bucket const& bucket, F const& f) const {
        std::size_t const count = bucket.parameters.size();
        auto const is_used = [&](std::size_t k) {
            return !map_ || map_->is_used(bucket.parameters[k]);
        };
        for (std::size_t first = 0; first < count; ++first) {
            if (is_used(first)) {
                std::size_t last = first + 1;
                while (last < count && is_used(last)) {
                    ++last;
                }
                f(first, last);
                first = last;
            }
        }
    }

    /// Takes over the order of `order_source`, if it has one: a rank that skipped has none, and the
    /// next iteration tries again.
    void rebuild() {
        std::size_t const count = gradients_.trained().size();
        if (comm_.rank() == iteration_->order_source) {
            complete_ready_order();
            order_message_[0] = ready_order_.size() == count ? 1 : 0;
            std::copy(ready_order_.begin(), ready_order_.end(), order_message_.begin() + 1);
        }
        comm_
            .broadcast(
                Buffer{order_message_.data(), order_message_.size(), DType::u64},
                iteration_->order_source
            )
            .wait();
        if (order_message_[0] != 0) {
            gradients_.rebuild({order_message_.begin() + 1, order_message_.end()});
            fit_to_buckets();
            is_rebuild_due_ = false;
        }
    }

    // -- what this rank's gradients do -----------------------------------------------------------

    void take(std::size_t i) {
        gradients_.pack(i, iteration_->factor);
        settle(i, State::ready);
    }
    /// A parameter that this iteration does not use: its gradient may be of earlier rounds.
    void take_or_leave(std::size_t i) {
        if (accumulated_[i]) {
            require_globally_used(i);
            take(i);
        } else {
            settle(i, State::unused);
        }
    }
    void settle(std::size_t i, State state) {
        states_[i] = state;
        --pending_[gradients_.bucket_of(i)];
    }

    void leave_out(std::size_t i) {
        check_index(i);
        char const* const wrong =
            !finds_unused_
                ? " was said to be unused, but DataParallelOptions::find_unused is off or "
                  "static_graph finds out by itself; turn find_unused on"
            : states_[i] != State::pending ? " was said to be unused twice"
                                           : nullptr;
        if (wrong != nullptr) {
            throw ContractViolation{gradients_.describe(i) + wrong};
        }
        take_or_leave(i);
    }

    /// The first iteration of a static graph has come to its end: what was not marked is unused.
    void record_graph() {
        complete_ready_order();
        for (std::size_t const i : gradients_.trained()) {
            if (graph_->is_used(i)) {
                require_globally_used(i);
                take(i);
            } else {
                take_or_leave(i);
            }
        }
        graph_->record();
        iteration_->is_recording = false;
    }

    /// Of several marks of a parameter the last one counts; unused ones come last.
    void complete_ready_order() {
        if (!graph_ || ready_order_.empty()) {
            return;
        }
        std::vector<std::size_t> order; // from the end, each one once
        std::vector<bool> is_listed(states_.size());
        auto const list = [&](std::size_t i) {
            if (!is_listed[i]) {
                is_listed[i] = true;
                order.push_back(i);
            }
        };
        for (std::size_t k = gradients_.trained().size(); k-- > 0;) {
            if (std::size_t const i = gradients_.trained()[k]; !graph_->is_used(i)) {
                list(i);
            }
        }
        for (std::size_t k = ready_order_.size(); k-- > 0;) {
            list(ready_order_[k]);
        }
        ready_order_.assign(order.rbegin(), order.rend());
    }

    void fit_to_buckets() {
        pending_.resize(buckets().size());
        // With a map each parameter may be a run of its own, between two that nobody uses.
        works_ = std::vector<std::optional<work_of<Comm>>>(
            map_ ? gradients_.trained().size() : buckets().size()
        );
    }

    // -- what can be wrong -----------------------------------------------------------------------

    void check_index(std::size_t i) const {
        if (i >= states_.size()) {
            throw ContractViolation{detail::concat(
                "parameter ",
                i,
                " is out of range on rank ",
                static_cast<int>(comm_.rank()),
                ": there are ",
                states_.size(),
                " parameters"
            )};
        }
        if (!gradients_.is_trained(i)) {
            throw ContractViolation{detail::concat(
                gradients_.describe(i), " was marked, but does not require a gradient"
            )};
        }
    }

    void check_mark(std::size_t i) const {
        check_index(i);
        std::string_view const wrong =
            !iteration_
                ? " was marked ready outside an iteration; call prepare_for_backward() first"
            : states_[i] == State::unused && graph_
                ? " is used, but was not in the first iteration: with static_graph all iterations "
                  "use the same parameters; turn it off and find_unused on"
            : states_[i] == State::unused
                ? " was said to be unused, but became ready; leave it out of the unused ones"
            : states_[i] == State::ready && graph_
                ? " became ready more often than in the first iteration: with static_graph all "
                  "iterations use parameters equally often; turn it off"
            : states_[i] == State::ready
                ? " was marked ready twice in an iteration; mark a parameter that is shared by "
                  "modules or used in several passes once, when its last use is done, or turn "
                  "static_graph on, which counts its uses"
                : "";
        if (!wrong.empty()) {
            throw ContractViolation{detail::concat(gradients_.describe(i), wrong)};
        }
    }

    void require_iteration(std::string_view verb) const {
        if (!iteration_) {
            throw ContractViolation{
                detail::concat(verb, " without prepare_for_backward(): no iteration is open")
            };
        }
    }

    void require_all_ready() const {
        if (std::any_of(pending_.begin(), pending_.end(), [](std::size_t n) { return n != 0; })) {
            throw ContractViolation{concat_missing(
                graph_ ? "parameters are not used, but were in the first iteration: with "
                         "static_graph all iterations use the same parameters; turn it off and "
                         "find_unused on"
                : finds_unused_
                    ? "not all gradients became ready; give those that the pass does not use to "
                      "prepare_for_backward() as unused, or check that all outputs of forward "
                      "reach "
                      "the loss"
                    : "not all gradients became ready; mark every trainable parameter in each "
                      "iteration, set requires_grad to false where there is nothing to train, or "
                      "turn DataParallelOptions::find_unused or static_graph on"
            )};
        }
    }

    /// With a static graph, after the first iteration, no bucket sends what no rank used in it.
    void require_globally_used(std::size_t i) const {
        if (graph_ && map_->is_known() && !map_->is_used(i)) {
            throw ContractViolation{detail::concat(
                gradients_.describe(i),
                " is used, but no rank used it in the first iteration: with static_graph all "
                "iterations use the same parameters; turn it off and find_unused on"
            )};
        }
    }

    [[nodiscard]] std::string concat_missing(std::string_view text) const {
        std::vector<std::size_t> missing;
        for (std::size_t i = 0; i < states_.size(); ++i) {
            if (gradients_.is_trained(i) && states_[i] == State::pending) {
                missing.push_back(i);
            }
        }
        if (missing.empty()) {
            return std::string{text};
        }
        constexpr std::size_t most = 16; // a text for people; the rest is counted
        std::string names;
        for (std::size_t k = 0; k < missing.size() && k < most; ++k) {
            names += (k == 0 ? "" : ", ") +
                     detail::describe_parameter(gradients_.parameters(), missing[k]);
        }
        if (missing.size() > most) {
            names += detail::concat(" and ", missing.size() - most, " more");
        }
        return detail::concat(
            text, " (rank ", static_cast<int>(comm_.rank()), " did not mark ", names, ")"
        );
    }

    Comm& comm_;
    detail::Gradients gradients_;
    std::vector<State> states_;        ///< per parameter
    std::vector<std::size_t> pending_; ///< per bucket: gradients that are not ready
    bool finds_unused_;
    bool is_rebuild_due_;
    std::vector<bool> accumulated_; ///< per parameter, where some may go unused
    std::optional<detail::StaticGraph> graph_;
    std::vector<std::size_t> ready_order_;     ///< of this iteration, while a rebuild is due
    std::vector<std::uint64_t> order_message_; ///< whether there is an order, and the order
    std::optional<Iteration> iteration_;
    // Destroyed first: they use the memory of what is above.
    std::optional<detail::UsedMap<Comm>> map_;
    std::vector<std::optional<work_of<Comm>>> works_;
};

} // namespace joinable::inline v0
