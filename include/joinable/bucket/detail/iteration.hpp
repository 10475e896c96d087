// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/bucket/detail/static_graph.hpp>
#include <joinable/bucket/detail/used_map.hpp>
#include <joinable/bucket/gradients.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's side of an iteration: which gradients are ready, which are unused, which buckets are
/// full. Packs gradients when they are ready and reports wrong calls. Local.
class Iteration {
public:
    Iteration(Gradients& gradients, BucketOptions const& options);

    /// Whether the map of used parameters is exchanged in every iteration.
    [[nodiscard]] bool sends_map() const noexcept { return finds_unused_ && used_; }
    /// Empty if all parameters are used, or need not be: see Gradients::receive_averages().
    [[nodiscard]] std::optional<UsedMap>& used() noexcept { return used_; }
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return !used_ || used_->is_used(i); }

    /// Fills the place of a parameter that another rank uses, before the bucket is sent. If this
    /// rank does not use it, writes zeros or what the gradient holds.
    void take_unused(std::size_t i) const;
    /// Whether every gradient of a bucket is in its place or known to be unused.
    [[nodiscard]] bool is_full(std::size_t bucket) const noexcept {
        return pending_[bucket] == 0 && !is_recording_;
    }

    // -- the course of an iteration ----------------------------------------------------------------

    /// Gradients will be marked, unless `without` says that there is no pass: then contribute_nothing() or
    /// contribute_accumulated() follows.
    void begin(double factor, std::optional<WithoutPass> const& without);

    void leave_out(std::size_t i);
    /// With find_unused, leaves out the parameters that were frozen since they were listed.
    void leave_out_frozen();
    /// Leaves out the parameters that the recorded graph does not use.
    void leave_out_unrecorded();

    /// Checks a mark. Returns whether the gradient is final; then take() follows.
    [[nodiscard]] bool mark(std::size_t i);
    void take(std::size_t i) {
        gradients_.pack(i, factor_);
        enter(i, State::ready);
    }
    void mark_accumulated(std::size_t i) {
        require_trained(i);
        accumulated_.mark(i, gradients_.parameters()[i]);
    }
    [[nodiscard]] bool holds_accumulated() const noexcept { return accumulated_.has_elements(); }

    void contribute_nothing();
    /// Handles a parameter of a rank without a pass.
    void contribute_accumulated(std::size_t i) { may_be_unused() ? take_or_leave(i) : take(i); }
    /// Forgets what was accumulated. Between iterations.
    void discard_accumulated() noexcept { accumulated_.clear(); }

    /// Ends the pass. Parameters that a static graph did not mark in its first iteration are
    /// unused; all others must be ready.
    void complete();
    void write_used();
    /// Called after the averages are delivered. See WithoutPass: gives the parameters that no rank used the
    /// gradients that they have on ranks with a pass, zeros or none.
    void follow_others();

    /// The order in which the gradients became ready, unused ones last. Empty if this rank had
    /// none.
    [[nodiscard]] std::vector<std::size_t> const& ready_order() const noexcept {
        return ready_order_;
    }
    /// The buckets have been cut by an order, so no further order is recorded.
    void set_ordered() {
        records_order_ = false;
        fit_to_buckets();
    }

    void end();
    /// Forgets an iteration that was not finished.
    void abandon() noexcept { is_open_ = false; }

    [[nodiscard]] bool is_open() const noexcept { return is_open_; }
    void require_open(std::string_view verb) const;
    void require_closed() const;
    /// Whether trained parameter `i` has not become ready.
    [[nodiscard]] bool is_missing(std::size_t i) const {
        return gradients_.is_trained(i) && states_[i] == State::pending;
    }

private:
    enum class State : std::uint8_t { pending, ready, unused };

    [[nodiscard]] bool is_unused(std::size_t i) const noexcept {
        return states_[i] == State::unused;
    }
    [[nodiscard]] std::vector<std::size_t> const& trained() const noexcept {
        return gradients_.trained();
    }
    void fit_to_buckets() { pending_.resize(gradients_.buckets().size()); }

    [[nodiscard]] bool may_be_unused() const noexcept { return finds_unused_ || graph_; }
    /// With a static graph, later iterations cannot send a parameter that no rank used in the first
    /// one.
    void take_used(std::size_t i);
    /// Handles a parameter that this iteration does not use: its gradient may hold earlier rounds.
    void take_or_leave(std::size_t i) { accumulated_[i] ? take_used(i) : enter(i, State::unused); }
    void enter(std::size_t i, State state) {
        states_[i] = state;
        --pending_[gradients_.bucket_of(i)];
    }

    /// If a parameter has several marks, the last one counts.
    void complete_ready_order();

    // -- errors -----------------------------------------------------------------------------------

    void require_trained(std::size_t i) const;

    void require_markable(std::size_t i) const;

    void require_all_ready() const;

    [[nodiscard]] std::string concat_missing(std::string_view text) const;
    /// Whether trained parameter `i` was frozen since it was listed.
    [[nodiscard]] bool is_frozen(std::size_t i) const {
        return !gradients_.parameters()[i].requires_grad();
    }

    Gradients& gradients_;
    std::vector<State> states_; ///< per parameter
    AccumulatedMarks accumulated_;
    std::vector<std::size_t> pending_; ///< per bucket: gradients that are not in place
    std::optional<UsedMap> used_;
    std::optional<StaticGraph> graph_;
    std::vector<std::size_t> ready_order_;
    double factor_ = 0;
    bool finds_unused_;
    bool sends_held_;
    std::optional<WithoutPass> without_; ///< pass in the open iteration of this rank
    bool records_order_;
    bool is_open_ = false;
    bool is_recording_ = false; ///< the static graph: used parameters are known only at the end
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/detail/iteration.ipp>
#endif
