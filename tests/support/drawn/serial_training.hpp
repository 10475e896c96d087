// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include <support/drawn/training.hpp>
#include <support/numbers.hpp>

namespace joinable_tests::drawn {

using Gradients = std::vector<std::optional<Numbers>>; ///< per parameter; none = there is none

/// What a value starts with on a rank. Rank 0's count.
inline double first_value(int rank, std::size_t p, std::size_t e) {
    return static_cast<double>((7 * p + 3 * e) % 5) - 2.0 + rank;
}

/// The optimizer of drawn trainings: a momentum of a half and a rate of an eighth, which multiply without rounding.
/// `value` has a double's precision, or a float's if the dtype is of 32 bits or less.
inline void descend(joinable::DType dtype, double gradient, double& momentum, double& value) {
    auto const step = [&]<class T>(T) {
        T const moved = T(0.5) * static_cast<T>(momentum) + static_cast<T>(gradient);
        momentum = static_cast<double>(moved);
        value = static_cast<double>(static_cast<T>(static_cast<T>(value) - T(0.125) * moved));
    };
    dtype == joinable::DType::f64 ? step(double{}) : step(float{});
}
/// What a value in memory holds of a number.
inline double rounded(joinable::DType dtype, double number) {
    return joinable::is_floating_point(dtype) ? plus(dtype, number, 0.0) : number;
}

/// Whether numbers are equal. Where they have overflowed, each is none.
inline bool are_same(Numbers const& a, Numbers const& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
        return x == y || (std::isnan(x) && std::isnan(y));
    });
}

/// The same training on one rank, by what the documentation says of averages: no communicator, no
/// bucket, no guard. Bitwise, since sums over ranks are in rank order and factors come before them.
class SerialTraining {
public:
    /// May take out of `training` failures that come too late to be skipped, and gradients that are cleared when
    /// ranks have been told what they hold.
    /// With `sums_scale` the communicator multiplies what it sums, which rounds numbers of 16 bits once.
    SerialTraining(Training& training, bool sums_scale)
        : training_{training}, sums_scale_{sums_scale} {
        for (int rank = 0; rank < training.world; ++rank) {
            ranks_.emplace_back();
            for (std::size_t p = 0; p < training.parameters.size(); ++p) {
                Parameter const& parameter = training.parameters[p];
                Numbers numbers(joinable::numel(parameter.extents));
                ranks_.back().momentum.push_back(numbers);
                for (std::size_t i = 0; i < numbers.size(); ++i) {
                    numbers[i] = first_value(0, p, i);
                }
                if (rank == 0) {
                    first_values_.push_back(numbers);
                }
                ranks_.back().values.push_back(numbers);
                ranks_.back().masters.push_back(numbers);
            }
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
        for (Parameter const& parameter : training.parameters) {
            delivered_.emplace_back(joinable::numel(parameter.extents));
        }
        for (std::size_t e = 0; e < training.epochs.size() && !is_refused_; ++e) {
            run(e);
        }
    }

    /// Whether the training is one that the library refuses, because of a changed static graph, or whose owners
    /// step by gradients that differ from those of other ranks.
    [[nodiscard]] bool is_refused() const noexcept { return is_refused_; }
    /// [epoch][round][rank]. The last round is the end of the epoch.
    [[nodiscard]] auto const& gradients() const noexcept { return results_; }
    [[nodiscard]] auto const& values() const noexcept { return values_; }
    [[nodiscard]] auto const& first_values() const noexcept { return first_values_; }
    [[nodiscard]] auto const& buffers() const noexcept { return buffers_; }
    /// The sum of all averages of each parameter that all ranks get.
    [[nodiscard]] auto const& delivered() const noexcept { return delivered_; }

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
        std::vector<Numbers> values;
        std::vector<Numbers> masters; ///< of values that an owner steps
        std::vector<Numbers> momentum;
        double buffer = 0;
        std::vector<bool> accumulated; ///< in rounds that did not sync
        bool has_accumulated = false;
        bool is_recorded = false;      ///< its static graph
        bool looks = false;            ///< whether gradients were cleared
        Accumulated held;              ///< since the last round that synced
        std::size_t held_at_entry = 0; ///< batches, when the guard began

        /// The gradients were cleared.
        void forget_window() {
            held = {};
            accumulated.assign(accumulated.size(), false);
            has_accumulated = false;
        }
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
    [[nodiscard]] bool is_alone() const { return training_.model == Model::zero_alone; }

    // -- windows that an epoch leaves open -----------------------------------------------------------------

    /// Whether no gradient of a trained parameter holds anything but zeros.
    [[nodiscard]] bool is_cleared(Rank const& rank) const {
        for (std::size_t const p : training_.trained()) {
            if (rank.gradients[p] &&
                std::any_of(rank.gradients[p]->begin(), rank.gradients[p]->end(), [](double x) {
                    return x != 0 || std::signbit(x);
                })) {
                return false;
            }
        }
        return true;
    }
    void begin_epoch(Epoch const& epoch) {
        for (Rank& rank : ranks_) {
            if (epoch.leftover == Leftover::cleared) {
                reset(rank, epoch.clearing);
            } else if (epoch.leftover == Leftover::discarded) {
                rank.forget_window();
            }
            rank.writers.assign(rank.gradients.size(), Writer::none);
            if (epoch.guard == Guard::none) {
                continue;
            }
            if ((rank.held.batches != 0 || rank.held.weight != 0) && is_cleared(rank)) {
                rank.forget_window();
            }
            rank.looks = true;
            rank.held_at_entry = rank.held.batches;
        }
    }
    /// Whether a rank looks if its gradients are cleared: until its first batch after a guard has begun or ended.
    [[nodiscard]] bool looks(Rank const& rank) const {
        bool holds = false;
        for (std::size_t const p : training_.trained()) {
            holds = holds ||
                    (rank.accumulated[p] && joinable::numel(training_.parameters[p].extents) != 0);
        }
        return rank.looks && rank.held.batches != 0 && holds && !is_alone();
    }
    /// Whether it does in this round.
    [[nodiscard]] bool may_see(Rank const& rank, Epoch const& epoch, RoundPlan const& plan) const {
        return looks(rank) && (!plan.evaluates || epoch.has_loop());
    }
    /// If it `looks`, gradients that are cleared count no more.
    void look(Rank& rank, bool looks) const {
        if (looks && is_cleared(rank)) {
            rank.forget_window();
        }
    }
    /// Whether ranks have been told what gradients hold, before a batch clears them.
    [[nodiscard]] static bool is_told(Epoch const& epoch, RoundPlan const& plan) {
        bool const syncs = plan.will_sync && !plan.evaluates;
        switch (epoch.guard) {
        case Guard::none:
        case Guard::disabled: return false;
        case Guard::look_ahead:
        case Guard::known_lengths: return true;
        case Guard::next:
        case Guard::iterate: return syncs;
        default: return syncs && plan.resets_late;
        }
    }

    // -- a round -------------------------------------------------------------------------------------------

    void run(std::size_t e) {
        Epoch& epoch = training_.epochs[e];
        results_.emplace_back();
        values_.emplace_back();
        buffers_.emplace_back();
        begin_epoch(epoch);
        for (std::size_t k = 0; k < epoch.round_count() && !is_refused_; ++k) {
            run_round(e, k);
        }
        if (epoch.leave && !is_refused_) {
            hear_of_leave(e);
        }
        for (Rank& rank : ranks_) {
            bool const ends = epoch.is_guarded() && !epoch.leave;
            look(rank, ends && looks(rank)); // those that trained to the end, too
            for (std::size_t p = 0; p < rank.writers.size(); ++p) {
                zero_if(rank, p, rank.writers[p] == Writer::joined);
            }
        }
        if (epoch.is_guarded() && !epoch.leave && training_.options.sync_at_end) {
            std::size_t authority = 0; // the highest of those that trained longest
            for (std::size_t r = 0; r < ranks_.size(); ++r) {
                authority = epoch.lengths[r] >= epoch.lengths[authority] ? r : authority;
            }
            send_buffer(authority);
            for (Rank& rank : ranks_) {
                rank.values = ranks_[authority].values;
                if (training_.attaches_momentum) {
                    rank.momentum = ranks_[authority].momentum;
                }
            }
        }
        for (Rank& rank : ranks_) {
            rank.looks = rank.looks || epoch.guard != Guard::none;
        }
        record();
    }

    void run_round(std::size_t e, std::size_t k) {
        Epoch& epoch = training_.epochs[e];
        RoundPlan const& plan = epoch.rounds[k];
        keep_what_is_told(epoch, k);
        std::vector<Part> parts;
        for (Rank& rank : ranks_) {
            auto const r = static_cast<std::size_t>(rank.rank);
            bool const is_active = k < epoch.lengths[r];
            if (k == epoch.lengths[r]) {
                look(rank, looks(rank)); // before it says that it has no further input
            }
            if (is_active) {
                reset(rank, plan.resets_late ? Reset::keep : plan.reset);
                look(rank, may_see(rank, epoch, plan));
            }
            if (plan.evaluates) {
                continue;
            }
            parts.push_back(is_active ? train(rank, e, k) : shadow(rank, epoch));
        }
        if (!plan.evaluates && plan.will_sync) {
            reduce(epoch, k, parts);
        }
        pass_forward(e, k);
        if (!plan.evaluates && plan.will_sync && training_.model != Model::averages) {
            step(epoch, k);
        }
        record();
    }

    /// Gradients that ranks have been told of are not cleared.
    void keep_what_is_told(Epoch& epoch, std::size_t k) const {
        RoundPlan& plan = epoch.rounds[k];
        plan.resets_late = plan.resets_late && !plan.evaluates;
        for (Rank const& rank : ranks_) {
            bool const is_active = k < epoch.lengths[static_cast<std::size_t>(rank.rank)];
            if (is_active && is_told(epoch, plan) && may_see(rank, epoch, plan)) {
                plan.reset = Reset::keep;
            }
        }
    }

    /// The round that does not take place, because one rank has left. The others have begun it, each as far as its
    /// first wait: nothing of it counts, but what an engine did to its gradients and buffers stays.
    void hear_of_leave(std::size_t e) {
        Epoch& epoch = training_.epochs[e];
        std::size_t const k = epoch.leave->round;
        if (k < epoch.rounds.size()) {
            keep_what_is_told(epoch, k);
        }
        for (Rank& rank : ranks_) {
            std::size_t const length = epoch.lengths[static_cast<std::size_t>(rank.rank)];
            if (rank.rank == epoch.leave->rank) {
                continue;
            }
            if (k >= length) {
                look(rank, k == length && looks(rank));
            } else if (!epoch.has_loop() && !(is_alone() && epoch.is_periodic())) {
                begin_in_vain(rank, e, k); // else next() throws
            }
        }
    }
    void begin_in_vain(Rank& rank, std::size_t e, std::size_t k) const {
        Epoch const& epoch = training_.epochs[e];
        RoundPlan const& plan = epoch.rounds[k];
        Batch const& batch = plan.batches[static_cast<std::size_t>(rank.rank)];
        reset(rank, plan.resets_late ? Reset::keep : plan.reset);
        look(rank, may_see(rank, epoch, plan));
        if (is_alone()) { // it opens the round when gradients are there
            for (std::size_t const p : batch.marks) {
                add(rank, e, k, p);
            }
            return;
        }
        bool const sends_buffers_first =
            training_.options.broadcast_buffers &&
            training_.options.buffer_sync == joinable::BufferSync::before_forward;
        bool const waits_before_pass = plan.evaluates || !plan.will_sync || sends_buffers_first ||
                                       training_.model == Model::sharded_parameters;
        bool const passes = batch.fails == Fails::nowhere || batch.fails == Fails::in_backward;
        if (passes && !waits_before_pass) {
            rank.buffer = statistic(rank.rank, e, k);
            reset(rank, plan.resets_late ? plan.reset : Reset::keep);
        }
    }

    void record() {
        results_.back().emplace_back();
        values_.back().emplace_back();
        buffers_.back().emplace_back();
        for (Rank const& rank : ranks_) {
            results_.back().back().push_back(rank.gradients);
            values_.back().back().push_back(rank.values);
            buffers_.back().back().push_back(rank.buffer);
        }
    }

    // -- the step ------------------------------------------------------------------------------------------

    void step(Epoch const& epoch, std::size_t k) {
        if (training_.has_one_gradient && !training_.reduces_to_owners()) {
            check_one_gradient(epoch, k);
        }
        for (Rank& rank : ranks_) {
            for (std::size_t const p : training_.trained()) {
                auto const& gradient = gradient_of_step(rank, p, epoch, k);
                if (gradient) {
                    descend(rank, p, *gradient);
                }
            }
        }
        for (Rank& rank : ranks_) {
            bool const is_active = k < epoch.lengths[static_cast<std::size_t>(rank.rank)];
            if (is_active || training_.model == Model::step) {
                reset(rank, training_.after_step);
            } else if (training_.reduces_to_owners()) {
                reset(rank, Reset::zero); // what was sent or dropped does not count again
            }
        }
        if (training_.has_one_gradient && !is_refused_) {
            require_replicas();
        }
    }
    /// @throws std::logic_error  the rules of this class step replicas apart.
    void require_replicas() const {
        for (Rank const& rank : ranks_) {
            for (std::size_t p = 0; p < rank.values.size(); ++p) {
                if (!are_same(rank.values[p], ranks_[0].values[p])) {
                    throw std::logic_error{"replicas differ"};
                }
            }
        }
    }
    [[nodiscard]] std::optional<Numbers> const&
    gradient_of_step(Rank const& rank, std::size_t p, Epoch const& epoch, std::size_t k) const {
        if (training_.reduces_to_owners()) {
            return averages_[p];
        }
        if (!training_.has_owners()) {
            return rank.gradients[p];
        }
        std::size_t lowest = 0; // active ranks have the same
        while (k >= epoch.lengths[lowest]) {
            ++lowest;
        }
        return ranks_[lowest].gradients[p];
    }
    void descend(Rank& rank, std::size_t p, Numbers const& gradient) const {
        joinable::DType const dtype = training_.parameters[p].dtype;
        Numbers& masters = training_.has_owners() ? rank.masters[p] : rank.values[p];
        for (std::size_t i = 0; i < gradient.size(); ++i) {
            drawn::descend(dtype, gradient[i], rank.momentum[p][i], masters[i]);
            masters[i] = training_.has_owners() ? masters[i] : rounded(dtype, masters[i]);
            rank.values[p][i] = rounded(dtype, masters[i]);
        }
    }
    /// A joined rank may have zeros where active ones have nothing to step by: owners know better. With a Step it has to
    /// have what the others have, which require_replicas() checks, unless these step by what no rank has cleared.
    void check_one_gradient(Epoch const& epoch, std::size_t k) {
        std::size_t lowest = 0;
        while (k >= epoch.lengths[lowest]) {
            ++lowest;
        }
        for (std::size_t const p : training_.trained()) {
            auto const& meant = ranks_[lowest].gradients[p];
            for (std::size_t r = 0; r < ranks_.size(); ++r) {
                auto const& other = ranks_[r].gradients[p];
                bool const is_active = k < epoch.lengths[r];
                if (!is_active && !training_.has_owners()) {
                    bool const is_old = !used_[p] && meant && *meant != Numbers(meant->size());
                    is_refused_ = is_refused_ || is_old;
                    continue;
                }
                bool const is_same =
                    bool(meant) == bool(other) && (!meant || are_same(*meant, *other));
                is_refused_ = is_refused_ || !(is_same || (!is_active && !meant));
            }
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
        if (is_alone()) {
            return;
        }
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
        bool const may_fill = !training_.has_one_bucket || batch.marks.empty();
        if (batch.fails == Fails::in_backward && plan.will_sync && rank.is_recorded && may_fill &&
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
        } else if (batch.fails == Fails::in_backward && training_.reduces_to_owners()) {
            marks = 0; // any may fill the first bucket; no average replaces them
        }
        std::size_t const count = training_.parameters.size();
        std::vector<bool> marked(count);
        bool const has_pass = batch.fails == Fails::nowhere || batch.fails == Fails::in_backward;
        if (has_pass && plan.resets_late) {
            reset(rank, plan.reset);
            look(rank, may_see(rank, epoch, plan));
        }
        rank.looks =
            rank.looks && skips; // a batch that has begun ends it, also where it is skipped then
        for (std::size_t m = 0; m < marks; ++m) {
            add(rank, e, k, batch.marks[m]);
            marked[batch.marks[m]] = true;
        }
        if (!plan.will_sync) {
            for (std::size_t p = 0; p < count; ++p) {
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
            if (is_alone()) { // it has no marks
                part.takes.assign(count, true);
            }
        } else if (skips) {
            bring_accumulated(rank, part);
        } else if (batch.fails == Fails::in_backward && training_.finds_unused()) {
            for (std::size_t const p : training_.trained()) {
                // Said before the pass.
                part.uses[p] = !batch.is_unused[p] || rank.accumulated[p];
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
        if (is_alone()) {
            part.takes.assign(part.takes.size(), true);
        } else if (part.contributes && rank.has_accumulated) {
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
                bool const holds =
                    epoch.lengths[r] > before || (before == 0 && ranks_[r].held_at_entry != 0);
                contributors += is_active || (epoch.carries && holds) ? 1 : 0;
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
        Numbers factors;
        for (Part const& part : parts) {
            bool const is_mean =
                is_weighted && training_.options.gradient_kind == joinable::GradientKind::mean;
            double const own = is_mean ? static_cast<double>(part.weight) : 1.0;
            factors.push_back(part.contributes ? own / divisor : 0.0);
        }
        if (training_.reduces_to_owners()) {
            averages_.assign(training_.parameters.size(), std::nullopt);
            for (std::size_t const p : training_.trained()) {
                averages_[p] = average_of(p, parts, factors);
            }
            end_windows(epoch, k);
            return;
        }
        used_ = used_by_some(parts);
        for (std::size_t const p : training_.trained()) {
            Numbers const average = average_of(p, parts, factors);
            for (std::size_t i = 0; used_[p] && i < average.size(); ++i) {
                delivered_[p][i] += average[i];
            }
            bool const others_have_none = is_absent(p, k, epoch, parts);
            for (Rank& rank : ranks_) {
                auto const r = static_cast<std::size_t>(rank.rank);
                bool const has_joined = k >= epoch.lengths[r];
                if (used_[p]) {
                    receive(rank, p, has_joined, average);
                } else if (!parts[r].passes && (has_joined || !parts[r].brings)) {
                    follow(rank, p, has_joined, others_have_none);
                }
            }
        }
        end_windows(epoch, k);
    }
    void end_windows(Epoch const& epoch, std::size_t k) {
        for (Rank& rank : ranks_) {
            bool const is_active = k < epoch.lengths[static_cast<std::size_t>(rank.rank)];
            if (is_active ||
                training_.options.joined_gradients != joinable::JoinedGradients::untouched) {
                rank.forget_window();
            }
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
    /// A rank that brings nothing, where no rank uses the parameter.
    void follow(Rank& rank, std::size_t p, bool has_joined, bool is_absent) const {
        using joinable::JoinedGradients;
        Parameter const& parameter = training_.parameters[p];
        auto& gradient = rank.gradients[p];
        if (has_joined && training_.options.joined_gradients == JoinedGradients::untouched) {
            return;
        }
        if (training_.finds_unused() && is_absent && parameter.has_release_grad) {
            gradient.reset();
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

    [[nodiscard]] Numbers
    average_of(std::size_t p, std::vector<Part> const& parts, Numbers const& factors) const {
        Parameter const& parameter = training_.parameters[p];
        Numbers average;
        // Data parallel models train over a communicator that has the members of the core only.
        bool const is_core = !training_.has_owners() || training_.model == Model::zero;
        for (std::size_t i = 0; i < joinable::numel(parameter.extents); ++i) {
            Numbers numbers;
            Numbers used;
            for (std::size_t r = 0; r < ranks_.size(); ++r) {
                auto const& gradient = ranks_[r].gradients[p];
                bool const is_there = parts[r].takes[p] && gradient;
                numbers.push_back(is_there ? (*gradient)[i] : 0.0);
                used.push_back(is_there ? factors[r] : 0.0);
            }
            average.push_back(scaled_sum_of(parameter.dtype, numbers, used, sums_scale_ && !is_core)
            );
        }
        return average;
    }

    Training& training_;
    bool sums_scale_;
    std::vector<Rank> ranks_;
    std::optional<std::vector<bool>> graph_; ///< what some rank used in the first iteration
    bool is_refused_ = false;
    std::vector<bool> used_; ///< by some rank, per parameter, in the last round that synced
    std::vector<Numbers> first_values_;
    std::vector<std::optional<Numbers>> averages_; ///< those that only owners have, per parameter
    std::vector<std::vector<std::vector<Gradients>>> results_;
    std::vector<std::vector<std::vector<std::vector<Numbers>>>> values_;
    std::vector<std::vector<std::vector<double>>> buffers_;
    std::vector<Numbers> delivered_;
};

} // namespace joinable_tests::drawn
