// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include <support/drawn/training.hpp>
#include <support/numbers.hpp>

namespace joinable_tests::drawn {

using Gradients = std::vector<std::optional<Numbers>>; ///< per parameter; none = there is none

/// The same training on one rank, by what the documentation says of averages: no communicator, no
/// bucket, no guard. Bitwise, since sums over ranks are in rank order and factors come before them.
class SerialTraining {
public:
    /// May take failures out of `training` that come too late to be skipped.
    explicit SerialTraining(Training& training) : training_{training} {
        for (int rank = 0; rank < training.world; ++rank) {
            ranks_.emplace_back();
            ranks_.back().rank = rank;
            ranks_.back().accumulated.resize(training.parameters.size());
            for (Parameter const& parameter : training.parameters) {
                bool const starts =
                    parameter.starts_with_gradient[static_cast<std::size_t>(rank)] ||
                    (parameter.is_trained && training.options.gradient_as_bucket_view && !has_map()
                    );
                ranks_.back().gradients.push_back(
                    starts ? std::optional{Numbers(joinable::numel(parameter.extents))}
                           : std::nullopt
                );
            }
        }
        for (std::size_t e = 0; e < training.epochs.size() && !is_refused_; ++e) {
            run(e);
        }
    }

    /// Whether the training is one that the library refuses: a changed static graph.
    [[nodiscard]] bool is_refused() const noexcept { return is_refused_; }
    /// [epoch][round][rank]
    [[nodiscard]] auto const& gradients() const noexcept { return results_; }
    [[nodiscard]] auto const& buffers() const noexcept { return buffers_; }

private:
    struct Accumulated {
        std::size_t batches = 0;
        std::uint64_t weight = 0;
    };
    enum class Writer { none, active, joined }; ///< of an average, by the reductions of a guard
    struct Rank {
        int rank = 0;
        Gradients gradients;
        std::vector<Writer> writers;
        double buffer = 0;
        std::vector<bool> accumulated; ///< in rounds that did not sync, where there is a map
        bool has_accumulated = false;
        bool is_recorded = false; ///< its static graph
        Accumulated held;         ///< since the last round that synced, in this epoch
    };
    /// What a rank brings to a round that syncs.
    struct Part {
        bool has_pass = false; ///< also one that failed
        bool contributes = true;
        std::uint64_t weight = 0;
        std::vector<bool> takes; ///< per parameter: its gradient is in the sum
        std::vector<bool> uses;  ///< per parameter: what it says in the map
        bool prepares = false;   ///< its backward pass began
        bool passes = false;     ///< and ended
        bool brings = false;     ///< without a pass, what it accumulated
    };

    [[nodiscard]] bool has_map() const {
        return training_.options.find_unused || training_.options.static_graph;
    }

    void run(std::size_t e) {
        Epoch& epoch = training_.epochs[e];
        results_.emplace_back();
        buffers_.emplace_back();
        for (Rank& rank : ranks_) { // which have discarded their windows
            rank.held = {};
            rank.writers.assign(rank.gradients.size(), Writer::none);
            rank.accumulated.assign(rank.accumulated.size(), false);
            rank.has_accumulated = false;
        }
        for (std::size_t k = 0; k < epoch.rounds.size() && !is_refused_; ++k) {
            RoundPlan& plan = epoch.rounds[k];
            std::vector<Part> parts;
            for (Rank& rank : ranks_) {
                auto const r = static_cast<std::size_t>(rank.rank);
                bool const is_active = k < epoch.lengths[r];
                if (is_active) {
                    reset(rank, plan.reset);
                }
                if (plan.evaluates) {
                    continue;
                }
                Part part;
                if (is_active) {
                    part = train(rank, e, k);
                } else {
                    part = shadow(rank, epoch);
                }
                parts.push_back(part);
            }
            if (!plan.evaluates && plan.will_sync) {
                reduce(epoch, k, parts);
            }
            pass_forward(e, k);
            results_.back().emplace_back();
            buffers_.back().emplace_back();
            for (Rank const& rank : ranks_) {
                results_.back().back().push_back(rank.gradients);
                buffers_.back().back().push_back(rank.buffer);
            }
        }
        for (Rank& rank : ranks_) {
            for (std::size_t p = 0; p < rank.writers.size(); ++p) {
                zero_if(rank, p, rank.writers[p] == Writer::joined);
            }
        }
        if (epoch.is_guarded() && training_.options.sync_at_end) {
            std::size_t authority = 0; // the highest of those that trained longest
            for (std::size_t r = 0; r < ranks_.size(); ++r) {
                authority = epoch.lengths[r] >= epoch.lengths[authority] ? r : authority;
            }
            send_buffer(authority);
        }
    }

    /// What becomes of a joined rank's gradient, where gradients are zeroed at the end.
    void zero_if(Rank& rank, std::size_t p, bool is_meant) const {
        auto& gradient = rank.gradients[p];
        if (is_meant && gradient &&
            training_.options.joined_gradients == joinable::JoinedGradients::zeroed_at_end) {
            gradient->assign(gradient->size(), 0.0);
        }
    }

    void send_buffer(std::size_t source) {
        double const buffer = ranks_[source].buffer;
        for (Rank& rank : ranks_) {
            rank.buffer = training_.options.broadcast_buffers ? buffer : rank.buffer;
        }
    }

    void pass_forward(std::size_t e, std::size_t k) {
        Epoch const& epoch = training_.epochs[e];
        RoundPlan const& plan = epoch.rounds[k];
        bool const syncs = plan.will_sync && !plan.evaluates;
        bool const is_first = training_.options.buffer_sync == joinable::BufferSync::before_forward;
        std::size_t source = 0; // the lowest active rank
        while (k >= epoch.lengths[source]) {
            ++source;
        }
        if (syncs && is_first) {
            send_buffer(source);
        }
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            Fails const fails = plan.batches[r].fails;
            if (k < epoch.lengths[r] && (fails == Fails::nowhere || fails == Fails::in_backward)) {
                ranks_[r].buffer = statistic(ranks_[r].rank, e, k);
            }
        }
        if (syncs && !is_first) {
            send_buffer(source);
        }
    }

    void reset(Rank& rank, Reset reset) const {
        for (std::size_t const p : training_.trained()) {
            auto& gradient = rank.gradients[p];
            if (reset == Reset::drop && training_.parameters[p].has_set_grad) {
                gradient.reset();
            } else if (reset != Reset::keep && gradient) {
                gradient->assign(gradient->size(), 0.0);
            }
        }
    }

    void add(Rank& rank, std::size_t e, std::size_t k, std::size_t p) const {
        Parameter const& parameter = training_.parameters[p];
        auto& gradient = rank.gradients[p];
        if (!gradient) {
            gradient.emplace(joinable::numel(parameter.extents));
        }
        for (std::size_t i = 0; i < gradient->size(); ++i) {
            (*gradient)[i] =
                plus(parameter.dtype, (*gradient)[i], contribution(rank.rank, e, k, p, i));
        }
    }

    /// A batch of an active rank.
    Part train(Rank& rank, std::size_t e, std::size_t k) {
        Epoch& epoch = training_.epochs[e];
        RoundPlan const& plan = epoch.rounds[k];
        Batch& batch = epoch.rounds[k].batches[static_cast<std::size_t>(rank.rank)];
        Accumulated& held = rank.held;
        bool const is_recording = training_.options.static_graph && !rank.is_recorded;
        if (batch.fails == Fails::in_backward && plan.will_sync && rank.is_recorded &&
            std::set<std::size_t>{batch.marks.begin(), batch.marks.end()}.size() !=
                training_.trained().size()) {
            batch.fails = Fails::in_forward; // the first bucket may be on its way already
        }
        bool const skips = batch.fails == Fails::before_the_round;
        std::uint64_t const weight =
            skips && epoch.guard != Guard::known_lengths ? 0 : batch.weight;
        std::size_t marks = batch.marks.size();
        if (skips || batch.fails == Fails::in_forward) {
            marks = 0;
        } else if (batch.fails == Fails::in_backward && (!plan.will_sync || is_recording)) {
            marks = batch.marks_before_failure;
        }
        std::size_t const count = training_.parameters.size();
        std::vector<bool> marked(count);
        for (std::size_t m = 0; m < marks; ++m) {
            add(rank, e, k, batch.marks[m]);
            marked[batch.marks[m]] = true;
        }
        if (!plan.will_sync) {
            for (std::size_t p = 0; has_map() && p < count; ++p) {
                rank.accumulated[p] = rank.accumulated[p] || marked[p];
            }
            rank.has_accumulated = rank.has_accumulated || batch.fails == Fails::nowhere ||
                                   batch.fails == Fails::in_backward;
            held.batches += skips ? 0 : 1;
            held.weight += weight;
            return {};
        }
        Part part{
            !skips,
            !skips || held.batches != 0,
            weight + held.weight,
            std::vector<bool>(count),
            std::vector<bool>(count)
        };
        part.prepares = batch.fails == Fails::nowhere || batch.fails == Fails::in_backward;
        part.passes = batch.fails == Fails::nowhere;
        if (batch.fails == Fails::nowhere) {
            bool const is_held =
                training_.options.unused_gradients == joinable::UnusedGradients::held;
            for (std::size_t const p : training_.trained()) {
                part.uses[p] = !has_map() || marked[p] || rank.accumulated[p];
                part.takes[p] = part.uses[p] || is_held;
            }
            rank.is_recorded = true;
        } else if (skips) {
            bring_accumulated(rank, part);
        } else if (batch.fails == Fails::in_backward && training_.finds_unused()) {
            for (std::size_t const p : training_.trained()) {
                part.uses[p] = true; // said before the pass
            }
        }
        held = {};
        return part;
    }

    Part shadow(Rank& rank, Epoch const& epoch) const {
        std::size_t const count = training_.parameters.size();
        Part part{false, false, 0, std::vector<bool>(count), std::vector<bool>(count)};
        if (epoch.carries) {
            part.contributes = rank.held.batches != 0;
            part.weight = rank.held.weight;
            bring_accumulated(rank, part);
        }
        return part;
    }

    void bring_accumulated(Rank const& rank, Part& part) const {
        if (part.contributes && rank.has_accumulated) {
            for (std::size_t const p : training_.trained()) {
                part.takes[p] = !has_map() || rank.accumulated[p];
            }
            part.uses = part.takes;
            part.brings = true;
        }
    }

    /// The divisor of the average, but for weights.
    [[nodiscard]] double
    divisor_of(Epoch const& epoch, std::size_t k, std::vector<Part> const& parts) const {
        if (epoch.average == Average::initial || !epoch.is_guarded()) {
            return training_.world;
        }
        int contributors = 0;
        for (std::size_t r = 0; r < parts.size(); ++r) {
            bool const is_active = k < epoch.lengths[r];
            if (epoch.guard == Guard::known_lengths) {               // nobody hears of failures
                std::size_t const before = k + 1 - epoch.sync_every; // the first round since
                contributors += is_active || (epoch.carries && epoch.lengths[r] > before) ? 1 : 0;
            } else {
                contributors += parts[r].contributes ? 1 : 0;
            }
        }
        return contributors;
    }

    void reduce(Epoch const& epoch, std::size_t k, std::vector<Part>& parts) {
        bool const is_weighted = epoch.average == Average::weighted;
        std::uint64_t weights = 0;
        for (Part const& part : parts) {
            weights += part.weight;
        }
        bool const is_zero = is_weighted && weights == 0;
        for (Part& part : parts) { // nobody contributes; ranks without a pass know it in a guard
            part.contributes = part.contributes && !is_zero;
            if (is_zero && epoch.is_guarded() && !part.has_pass) {
                part.uses.assign(part.uses.size(), false);
                part.brings = false;
            }
        }
        double const divisor =
            is_weighted ? static_cast<double>(weights) : divisor_of(epoch, k, parts);
        std::vector<double> factors;
        for (Part const& part : parts) {
            bool const is_mean =
                is_weighted && training_.options.gradient_kind == joinable::GradientKind::mean;
            double const own = is_mean ? static_cast<double>(part.weight) : 1.0;
            factors.push_back(part.contributes ? own / divisor : 0.0);
        }
        std::vector<bool> const used = used_by_some(parts);
        for (std::size_t const p : training_.trained()) {
            Numbers const average = average_of(p, parts, factors);
            bool const others_have_none = is_absent(p, k, epoch, parts);
            for (Rank& rank : ranks_) {
                auto const r = static_cast<std::size_t>(rank.rank);
                bool const has_joined = k >= epoch.lengths[r];
                if (used[p]) {
                    receive(rank, p, has_joined, average);
                } else if (!parts[r].passes && (has_joined || !parts[r].brings)) {
                    follow(rank, p, has_joined, others_have_none);
                }
            }
        }
        for (Rank& rank : ranks_) {
            rank.accumulated.assign(rank.accumulated.size(), false);
            rank.has_accumulated = false;
            rank.held = {};
        }
    }

    std::vector<bool> used_by_some(std::vector<Part> const& parts) {
        std::size_t const count = training_.parameters.size();
        if (!has_map()) {
            return std::vector<bool>(count, true);
        }
        std::vector<bool> used(count);
        for (Part const& part : parts) {
            for (std::size_t p = 0; p < count; ++p) {
                used[p] = used[p] || part.uses[p];
                is_refused_ = is_refused_ || (graph_ && part.uses[p] && !(*graph_)[p]);
            }
        }
        if (!training_.options.static_graph) {
            return used;
        }
        if (!graph_ && used != std::vector<bool>(count)) {
            graph_ = used;
        }
        return graph_ ? *graph_ : used;
    }

    /// Whether active ranks ran a pass or brought what they accumulated, and none of them has a gradient of an
    /// unused parameter.
    [[nodiscard]] bool is_absent(
        std::size_t p, std::size_t k, Epoch const& epoch, std::vector<Part> const& parts
    ) const {
        bool is_absent = false;
        for (std::size_t r = 0; r < parts.size(); ++r) {
            bool const tells = parts[r].prepares || (parts[r].brings && k < epoch.lengths[r]);
            if (tells && ranks_[r].gradients[p]) {
                return false;
            }
            is_absent = is_absent || tells;
        }
        return is_absent;
    }
    /// A rank that brings nothing, where no rank uses the parameter. Drawn parameters cannot release
    /// gradients.
    void follow(Rank& rank, std::size_t p, bool has_joined, bool is_absent) const {
        using joinable::JoinedGradients;
        Parameter const& parameter = training_.parameters[p];
        auto& gradient = rank.gradients[p];
        if (has_joined && training_.options.joined_gradients == JoinedGradients::untouched) {
            return;
        }
        bool const can_have = training_.finds_unused() && !is_absent && parameter.has_set_grad;
        if (gradient || can_have) {
            gradient.emplace(joinable::numel(parameter.extents));
        }
        rank.writers[p] = has_joined ? Writer::joined : Writer::active;
    }
    void receive(Rank& rank, std::size_t p, bool has_joined, Numbers const& average) const {
        using joinable::JoinedGradients;
        if (!has_joined || training_.options.joined_gradients != JoinedGradients::untouched) {
            rank.gradients[p] = average;
            rank.writers[p] = has_joined ? Writer::joined : Writer::active;
        }
    }

    [[nodiscard]] Numbers average_of(
        std::size_t p, std::vector<Part> const& parts, std::vector<double> const& factors
    ) const {
        Parameter const& parameter = training_.parameters[p];
        Numbers average;
        for (std::size_t i = 0; i < joinable::numel(parameter.extents); ++i) {
            Numbers terms;
            for (std::size_t r = 0; r < ranks_.size(); ++r) {
                auto const& gradient = ranks_[r].gradients[p];
                bool const is_there = parts[r].takes[p] && gradient && factors[r] != 0.0;
                terms.push_back(
                    is_there ? times(parameter.dtype, (*gradient)[i], factors[r]) : 0.0
                );
            }
            average.push_back(sum_of(parameter.dtype, terms));
        }
        return average;
    }

    Training& training_;
    std::vector<Rank> ranks_;
    std::optional<std::vector<bool>> graph_; ///< what some rank used in the first iteration
    bool is_refused_ = false;
    std::vector<std::vector<std::vector<Gradients>>> results_;
    std::vector<std::vector<std::vector<double>>> buffers_;
};

} // namespace joinable_tests::drawn
