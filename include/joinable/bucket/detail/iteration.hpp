// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/bucket/gradients.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Tells which parameters some rank uses, and what ranks have of those that none uses. It has a word
/// per parameter; the owner of the map sums them over ranks. A word counts ranks with a backward
/// pass in three fields: those that use the parameter, those that do not and have a gradient of it,
/// and those that have none. Local.
class UsedMap {
public:
    explicit UsedMap(std::size_t parameters) : counts_(parameters) {}

    /// Clears all counts, including those of other ranks.
    void clear() noexcept {
        std::fill(counts_.begin(), counts_.end(), 0);
        is_known_ = false;
    }
    void use(std::size_t i) noexcept { counts_[i] = user; }
    /// Records that this rank's pass does not use parameter `i`.
    void leave_out(std::size_t i, bool has_gradient) noexcept {
        counts_[i] = has_gradient ? holder : 1;
    }

    /// The counts to sum over all ranks.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return counts_; }
    /// Called after the words have been summed.
    void set_known() noexcept { is_known_ = true; }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }

    /// Whether some rank uses parameter `i`; before the map is known, whether this rank does.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return counts_[i] >= user; }
    /// Whether some rank ran a pass, and parameter `i` has no gradient on any rank that did.
    [[nodiscard]] bool is_absent(std::size_t i) const noexcept {
        return counts_[i] != 0 && counts_[i] < holder;
    }
    /// Whether no rank uses any parameter.
    [[nodiscard]] bool is_empty() const noexcept {
        return std::all_of(counts_.begin(), counts_.end(), [](auto word) { return word < user; });
    }

private:
    static constexpr std::uint64_t holder = std::uint64_t{1} << 21U; // a field counts 2^21 ranks
    static constexpr std::uint64_t user = std::uint64_t{1} << 42U;

    std::vector<std::uint64_t> counts_;
    bool is_known_ = false;
};

/// Counts how often each gradient becomes ready. The first iteration is recorded. In later ones a
/// gradient is final when it became ready as often as then. Local.
class StaticGraph {
public:
    explicit StaticGraph(std::size_t parameters) : calls_(parameters), left_(parameters) {}

    [[nodiscard]] bool is_recorded() const noexcept { return is_recorded_; }
    /// Whether the recorded iteration used parameter `i`.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return calls_[i] != 0; }

    /// Starts an iteration.
    void begin() {
        if (is_recorded_) {
            left_ = calls_;
        } else {
            calls_.assign(calls_.size(), 0);
        }
    }

    /// Counts a mark of gradient `i`. Returns whether it is the last one of the recorded number.
    [[nodiscard]] bool mark(std::size_t i) noexcept {
        if (!is_recorded_) {
            ++calls_[i];
            return false;
        }
        return --left_[i] == 0;
    }
    void record() noexcept { is_recorded_ = true; }

private:
    std::vector<std::uint32_t> calls_;
    std::vector<std::uint32_t> left_;
    bool is_recorded_ = false;
};

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

    /// Whether the pass has marked anything, so that full buckets leave once the map of used parameters is known.
    [[nodiscard]] bool is_marked() const noexcept { return is_marked_; }

    // -- the course of an iteration ----------------------------------------------------------------

    /// Gradients will be marked, unless `without` says that there is no pass: then contribute_nothing() or
    /// contribute_accumulated() follows.
    void begin(double factor, WithoutPass const* without);

    void leave_out(std::size_t i);
    /// Leaves out what is unused without being named: with find_unused the parameters that were
    /// frozen since they were listed, else those that the recorded graph does not use.
    void leave_out_others();

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
    /// The gradients that lie in no bucket count as one after the last.
    void fit_to_buckets() { pending_.resize(gradients_.buckets().size() + 1); }

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
    bool is_marked_ = false;
    bool is_recording_ = false; ///< the static graph: used parameters are known only at the end
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/detail/impl/iteration.ipp>
#endif
