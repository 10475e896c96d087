// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/bucket/detail/gradients.hpp>
#include <joinable/bucket/detail/static_graph.hpp>
#include <joinable/bucket/detail/used_map.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's side of an iteration: which gradients are ready, which are unused, which buckets are
/// full; packs gradients when their time has come, and says what was done wrong. Local.
class Iteration {
public:
    Iteration(Gradients& gradients, BucketOptions const& options);

    /// Whether the map of used parameters is exchanged in every iteration.
    [[nodiscard]] bool finds_unused() const noexcept { return finds_unused_; }
    /// None: all parameters are used.
    [[nodiscard]] std::optional<UsedMap>& used() noexcept { return used_; }
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return !used_ || used_->is_used(i); }

    /// Its place in a bucket is about to be sent, because another rank uses the parameter: where this
    /// one does not, puts zeros there, or what the gradient holds.
    void take_unused(std::size_t i) const;
    /// Whether everything of a bucket is in its place, or is known to be unused.
    [[nodiscard]] bool is_full(std::size_t bucket) const noexcept {
        return pending_[bucket] == 0 && !is_recording_;
    }

    // -- the course of an iteration ----------------------------------------------------------------

    /// `has_pass`: gradients will be marked. Else contribute_nothing() or
    /// contribute_accumulated() follows.
    void begin(double factor, bool has_pass);

    void leave_out(std::size_t i);
    /// What the recorded graph does not use.
    void leave_out_unrecorded();

    void mark(std::size_t i);
    void mark_accumulated(std::size_t i) {
        require_trained(i);
        if (used_) {
            accumulated_[i] = true;
        }
    }

    void contribute_nothing();
    void contribute_accumulated() {
        for (std::size_t const i : trained()) {
            used_ ? take_or_leave(i) : take(i);
        }
    }

    /// The pass has come to its end: what a static graph did not mark in its first iteration is
    /// unused, everything else must be ready.
    void complete();
    void write_used();

    /// In which order the gradients became ready, unused ones last; empty where this rank had none.
    [[nodiscard]] std::vector<std::size_t> const& ready_order() const noexcept {
        return ready_order_;
    }
    /// The buckets have been cut by an order: no more is recorded.
    void set_ordered() {
        records_order_ = false;
        fit_to_buckets();
    }

    void end();

    void require_open(std::string_view verb) const;

private:
    enum class State : std::uint8_t { pending, ready, unused };

    [[nodiscard]] bool is_unused(std::size_t i) const noexcept {
        return states_[i] == State::unused;
    }
    [[nodiscard]] std::vector<std::size_t> const& trained() const noexcept {
        return gradients_.trained();
    }
    void fit_to_buckets() { pending_.resize(gradients_.buckets().size()); }

    void take(std::size_t i) {
        gradients_.pack(i, factor_);
        settle(i, State::ready);
    }
    /// With a static graph, after the first iteration, no bucket sends what no rank used in it.
    void take_used(std::size_t i);
    /// A parameter that this iteration does not use: its gradient may be of earlier rounds.
    void take_or_leave(std::size_t i) { accumulated_[i] ? take_used(i) : settle(i, State::unused); }
    void settle(std::size_t i, State state) {
        states_[i] = state;
        --pending_[gradients_.bucket_of(i)];
    }

    /// Of several marks of a parameter the last one counts.
    void complete_ready_order();

    // -- what can be wrong -------------------------------------------------------------------------

    void require_trained(std::size_t i) const;

    void require_markable(std::size_t i) const;

    void require_all_ready() const;

    [[nodiscard]] std::string concat_missing(std::string_view text) const;

    Gradients& gradients_;
    std::vector<State> states_;        ///< per parameter
    std::vector<std::size_t> pending_; ///< per bucket: gradients that are not in their place
    std::optional<UsedMap> used_;
    std::vector<bool> accumulated_; ///< per parameter, where some may go unused
    std::optional<StaticGraph> graph_;
    std::vector<std::size_t> ready_order_;
    double factor_ = 0;
    bool finds_unused_;
    bool sends_held_;
    bool has_pass_ = false; ///< this rank's, of the open iteration
    bool records_order_;
    bool is_open_ = false;
    bool is_recording_ = false; ///< the static graph: what is used is known at the end only
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/detail/iteration.ipp>
#endif
