// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include <support/draw.hpp>
#include <support/rows.hpp>
#include <support/volume.hpp>

#include <joinable/join/options.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

// What a whole training is, drawn from a seed: the model, the shards, and all that can go wrong.

namespace joinable_tests::drawn {

struct Parameter {
    joinable::DType dtype = joinable::DType::f32;
    joinable::Shape extents;
    joinable::Shape value_strides;
    std::vector<joinable::Shape> gradient_strides; ///< per rank: each engine as it likes
    std::vector<bool> starts_with_gradient;        ///< per rank
    bool is_trained = true;
    bool has_set_grad = true;
    bool has_release_grad = false; ///< only with has_set_grad
};

/// Where the batch of one rank fails, if it does.
enum class Fails { nowhere, before_the_round, in_forward, in_backward };

/// What one rank does in a round.
struct Batch {
    Fails fails = Fails::nowhere;
    std::vector<bool> is_unused;    ///< per parameter
    std::vector<std::size_t> marks; ///< in the order in which gradients become ready
    std::size_t marks_before_failure = 0;
    std::uint64_t weight = 1;
    bool says_weight = true; ///< where it is skipped before the round, in a guard
};

/// What an engine does with gradients before a batch, or after a step.
enum class Reset { keep, zero, drop };

struct RoundPlan {
    bool will_sync = true;
    bool evaluates = false;
    Reset reset = Reset::keep;
    bool resets_late = false;   ///< between the forward and the backward pass
    std::vector<Batch> batches; ///< per rank
};

/// The caller that opens rounds and announces what they are.
enum class Guard {
    none,          ///< there is none
    disabled,      ///< JoinOptions::enable is false
    notices,       ///< forward() opens rounds
    next,          ///< next() does
    iterate,       ///< iterate() does
    look_ahead,    ///< the same, one element early
    periods,       ///< forward() does, JoinOptions say the rest
    known_lengths, ///< nobody has to
};
enum class Average { initial, active, weighted };

/// What becomes of a window that the epoch before left open.
enum class Leftover { kept, cleared, discarded };

/// A rank leaves a guard by an exception before one of its rounds, or after its last one. All ranks hear of it, and go
/// on with the next epoch.
struct Leave {
    int rank = 0;
    std::size_t round = 0;
};

struct Epoch {
    Leftover leftover = Leftover::kept;
    Reset clearing = Reset::zero; ///< how it is cleared
    Guard guard = Guard::notices;
    Average average = Average::initial;
    bool carries = true;
    bool uses_no_sync = false; ///< in place of notices
    std::size_t sync_every = 1;
    std::vector<std::size_t> lengths;            ///< per rank
    std::vector<std::uint64_t> weight_per_input; ///< per rank, where JoinOptions say it
    std::vector<RoundPlan> rounds;
    std::optional<Leave> leave;

    [[nodiscard]] bool has_loop() const {
        return guard == Guard::next || guard == Guard::iterate || guard == Guard::look_ahead;
    }
    [[nodiscard]] bool is_guarded() const {
        return guard != Guard::none && guard != Guard::disabled;
    }
    /// JoinOptions say what rounds are, not notices.
    [[nodiscard]] bool is_periodic() const {
        return guard == Guard::periods || guard == Guard::known_lengths;
    }
    /// Whether ranks say in each round that they go on, so that one can leave between rounds.
    [[nodiscard]] bool can_be_left() const { return is_guarded() && guard != Guard::known_lengths; }
    /// How many rounds take place.
    [[nodiscard]] std::size_t round_count() const { return leave ? leave->round : rounds.size(); }
};

/// Where a rank dies, if it gets there.
struct Death {
    enum Place { before, in_forward, in_backward, after_pass, after_round };
    int rank = 0;
    std::size_t epoch = 0;
    std::size_t round = 0;
    Place place = before;
};

/// The participants that train. All that step do so by momentum, whose state remembers each wrong gradient.
enum class Model {
    averages, ///< DistributedDataParallel alone: no value changes
    step,     ///< beside it a Step
    zero,     ///< or a ZeroRedundancyOptimizer
    not_sharded,
    sharded_optimizer,
    sharded_gradients,
    sharded_parameters,
    zero_alone ///< a ZeroRedundancyOptimizer that averages gradients itself
};

struct Training {
    int world = 1;
    Model model = Model::averages;
    Reset after_step =
        Reset::keep; ///< what the engine does then; a Step does it on joined ranks, too
    bool attaches_momentum = false; ///< of a Step to the model
    /// Engines of all ranks make and drop gradients alike, as engines do. Owners step a parameter once, for all ranks,
    /// and need it; replicas that a Step steps then stay equal.
    bool has_one_gradient = false;
    bool has_one_bucket = false;
    joinable::Partition partition = joinable::Partition::by_parameters;
    std::optional<Death> death;
    joinable::DataParallelOptions options;
    std::vector<Parameter> parameters;
    std::vector<Epoch> epochs;

    [[nodiscard]] bool finds_unused() const { return options.find_unused && !options.static_graph; }
    /// Averages go to the owners of parameters, and gradients stay as passes leave them.
    [[nodiscard]] bool reduces_to_owners() const {
        return model == Model::sharded_gradients || model == Model::sharded_parameters ||
               model == Model::zero_alone;
    }
    [[nodiscard]] bool has_owners() const {
        return model != Model::averages && model != Model::step;
    }
    [[nodiscard]] bool is_sharded_model() const {
        return has_owners() && model != Model::zero && model != Model::zero_alone;
    }
    [[nodiscard]] std::vector<std::size_t> trained() const {
        std::vector<std::size_t> indices;
        for (std::size_t p = 0; p < parameters.size(); ++p) {
            if (parameters[p].is_trained) {
                indices.push_back(p);
            }
        }
        return indices;
    }
};

/// What a mark of a parameter adds to element `e` of its gradient: small integers.
inline double
contribution(int rank, std::size_t epoch, std::size_t round, std::size_t p, std::size_t e) {
    return static_cast<double>(
               (31 * static_cast<std::size_t>(rank) + 17 * epoch + 7 * round + 5 * p + 3 * e) % 9
           ) -
           4.0;
}

/// What a forward pass leaves in the model's buffer.
inline double statistic(int rank, std::size_t epoch, std::size_t round) {
    return 1000.0 * rank + 100.0 * static_cast<double>(epoch + 1) + static_cast<double>(round);
}

/// What a row of a table chooses. Its epochs have one kind of guard.
enum Factor : std::size_t {
    model,
    guard,
    fails,
    leaves, ///< a rank leaves the first guard
    leftover,
    average,
    carries,
    after_step,
    joined_gradients,
    finds_unused,
    is_static,
    unused_gradients,
    views,
    kind,
    broadcasts,
    buffer_sync,
    sync_at_end,
    verify_ready,
    partition,
};
using Choices = Row<19>;
inline constexpr Choices choices{8, 8, 4, 2, 3, 3, 2, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};

/// Whether no other row chooses the same training: where a choice has no effect, or cannot be made, a row has the
/// first one of its factor.
inline bool is_distinct(Choices const& row) {
    auto const has = [&](Factor factor, auto... ones) {
        return ((row[factor] == static_cast<std::size_t>(ones)) || ...);
    };
    auto const is_first = [&](auto... factors) { return ((row[factors] == 0) && ...); };
    bool const is_guarded = !has(guard, Guard::none, Guard::disabled);
    bool const can_be_left = is_guarded && !has(guard, Guard::known_lengths);
    bool const has_loop = has(guard, Guard::next, Guard::iterate, Guard::look_ahead);
    bool const is_alone = has(model, Model::zero_alone);
    bool const is_one_class = !has(model, Model::averages, Model::step, Model::zero); // it shards
    bool const cuts = is_one_class && !has(model, Model::not_sharded);
    bool const has_owned_gradients =
        is_alone || has(model, Model::sharded_gradients, Model::sharded_parameters);
    bool const is_untouched = has(joined_gradients, joinable::JoinedGradients::untouched);
    bool const steps = !has(model, Model::averages);
    return (is_guarded || (is_first(carries, joined_gradients, sync_at_end) && !has(average, 1))) &&
           (can_be_left || is_first(leaves)) &&
           (!is_alone || (has(fails, 0, has_loop ? 1 : 0) &&
                          is_first(kind, broadcasts, buffer_sync, sync_at_end, verify_ready))) &&
           (steps ? !is_untouched && (has(model, Model::step) || !is_first(after_step))
                  : is_first(after_step)) &&
           (!is_untouched || is_first(carries)) &&
           (!is_one_class || is_first(finds_unused, is_static, joined_gradients, unused_gradients)
           ) &&
           (!has_owned_gradients || is_first(views)) &&
           !(has(finds_unused, 1) && has(is_static, 1)) &&
           (has(broadcasts, 1) || is_first(buffer_sync)) &&
           (cuts || has(model, Model::zero) || is_first(partition));
}

class DrawTraining {
public:
    /// With `is_tame` nothing fails and all ranks have the same graph. What a row chooses is not drawn.
    DrawTraining(std::uint64_t seed, bool is_tame, Choices const* row = nullptr)
        : draw_{seed}, is_tame_{is_tame}, row_{row} {}

    Training operator()() {
        training_.world = group_of_participants(draw_.one_of({1, 2, 3, 4, 8}));
        draw_options();
        draw_model();
        std::size_t const count = draw_.between(1, 12);
        bool const are_all_settable = training_.options.gradient_as_bucket_view ||
                                      training_.after_step == Reset::drop ||
                                      training_.model == Model::sharded_parameters;
        std::size_t const settable =
            are_all_settable || draw_.one_in(2) ? count : draw_.below(count + 1);
        bool const drops_alike = training_.has_one_gradient && training_.after_step == Reset::drop;
        std::size_t releasable = draw_.one_in(2) || drops_alike ? settable : 0;
        releasable =
            training_.reduces_to_owners() ? 0 : releasable; // they release what they copied
        for (std::size_t p = 0; p < count; ++p) {
            draw_parameter(p < settable, p < releasable);
        }
        training_.parameters[draw_.below(count)].is_trained = true;
        for (Parameter& parameter : training_.parameters) {
            if (parameter.is_trained && !joinable::is_floating_point(parameter.dtype)) {
                parameter.dtype = joinable::DType::f64;
            }
            if (parameter.is_trained && training_.has_one_bucket) {
                parameter.dtype = training_.options.gradient_as_bucket_view ? joinable::DType::f32
                                                                            : joinable::DType::f64;
            }
        }
        if (training_.options.static_graph) {
            draw_graphs();
        }
        std::size_t const epochs = draw_.between(1, 4);
        while (training_.epochs.size() < (row_ != nullptr ? 2 : epochs)) {
            draw_epoch();
        }
        return training_;
    }

    /// One rank does not live to see the end.
    Death draw_death() {
        Death death{};
        death.rank = static_cast<int>(draw_.below(world()));
        death.epoch = draw_.below(training_.epochs.size());
        auto const length =
            training_.epochs[death.epoch].lengths[static_cast<std::size_t>(death.rank)];
        death.round = draw_.below(length + 1); // one too many: at the end of the epoch
        death.place = draw_.one_of(
            {Death::before,
             Death::in_forward,
             Death::in_backward,
             Death::after_pass,
             Death::after_round}
        );
        return death;
    }

private:
    [[nodiscard]] std::size_t world() const { return static_cast<std::size_t>(training_.world); }

    /// What the row chooses, in place of what was drawn.
    template <class T>
    [[nodiscard]] T take(Factor factor, T drawn) const {
        return row_ != nullptr ? static_cast<T>((*row_)[factor]) : drawn;
    }

    void draw_model() {
        auto& options = training_.options;
        auto const drawn = draw_.one_of(
            {Model::averages,
             Model::step,
             Model::step,
             Model::step,
             Model::zero,
             Model::not_sharded,
             Model::sharded_optimizer,
             Model::sharded_gradients,
             Model::sharded_parameters,
             Model::zero_alone}
        );
        training_.model = take(model, drawn);
        training_.has_one_bucket =
            draw_.one_in(3) && (!training_.has_owners() || training_.model == Model::zero);
        if (training_.has_one_bucket) {
            options.bucket_cap_bytes = options.first_bucket_bytes = 1U << 20U;
            options.bucket_caps_bytes.clear();
        }
        if (training_.model == Model::averages) {
            return;
        }
        if (options.joined_gradients == joinable::JoinedGradients::untouched) {
            options.joined_gradients =
                joinable::JoinedGradients::kept; // joined ranks step by averages
        }
        training_.attaches_momentum = draw_.one_in(2);
        training_.has_one_gradient = training_.has_owners() || draw_.one_in(2);
        training_.after_step =
            take(after_step, draw_.one_of({Reset::keep, Reset::zero, Reset::drop}));
        if (training_.has_owners() && training_.after_step == Reset::keep) {
            training_.after_step = Reset::zero;
        }
        training_.has_one_gradient =
            training_.has_one_gradient && training_.after_step != Reset::keep;
        training_.partition = take(
            partition, draw_.one_of({joinable::Partition::by_parameters, joinable::Partition::flat})
        );
        if (training_.is_sharded_model() || training_.model == Model::zero_alone) {
            // ShardedOptions have none of these.
            options.static_graph = false;
            options.find_unused = training_.reduces_to_owners();
            options.joined_gradients = joinable::JoinedGradients::zeroed_at_end;
            options.unused_gradients = joinable::UnusedGradients::zero;
        }
        if (training_.reduces_to_owners()) {
            options.gradient_as_bucket_view = false;
        }
        if (training_.model == Model::zero_alone) {
            options.gradient_kind = joinable::GradientKind::mean;
            options.sync_at_end = false;
        }
    }

    void draw_options() {
        auto& options = training_.options;
        options.bucket_cap_bytes = draw_.one_of<std::size_t>({1, 40, 200, 1U << 20U});
        options.first_bucket_bytes = draw_.one_of<std::size_t>({1, 24, 1U << 20U});
        using joinable::BufferSync;
        using joinable::GradientKind;
        using joinable::JoinedGradients;
        using joinable::UnusedGradients;
        options.gradient_as_bucket_view = take(views, draw_.one_in(2));
        options.gradient_kind = take(kind, draw_.one_of({GradientKind::sum, GradientKind::mean}));
        options.find_unused = take(finds_unused, draw_.one_in(2));
        options.static_graph = take(is_static, draw_.one_in(3));
        options.rebuild_buckets = !draw_.one_in(3);
        options.broadcast_buffers = take(broadcasts, !draw_.one_in(4));
        options.buffer_sync = take(
            buffer_sync, draw_.one_of({BufferSync::before_forward, BufferSync::after_forward})
        );
        options.sync_at_end = take(sync_at_end, draw_.one_in(2));
        options.joined_gradients = take(
            joined_gradients,
            draw_.one_of(
                {JoinedGradients::zeroed_at_end, JoinedGradients::kept, JoinedGradients::untouched}
            )
        );
        options.unused_gradients =
            take(unused_gradients, draw_.one_of({UnusedGradients::held, UnusedGradients::zero}));
        options.verify_ready = take(verify_ready, draw_.one_in(4));
        if (draw_.one_in(3)) {
            for (std::size_t n = draw_.between(1, 3); n > 0; --n) {
                options.bucket_caps_bytes.push_back(draw_.below(120));
            }
        }
    }

    joinable::Shape draw_strides(joinable::Shape const& extents) {
        // Dimensions from the densest to the widest, with a gap of some factor before each.
        std::vector<std::size_t> order(extents.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        order = draw_.one_in(2) ? draw_.shuffled(order)
                                : std::vector<std::size_t>(order.rbegin(), order.rend());
        joinable::Shape strides = extents;
        std::size_t step = draw_.one_in(4) ? 2U : 1U;
        for (std::size_t const d : order) {
            strides[d] = step;
            step *= (std::max)(extents[d], std::size_t{1});
            step += draw_.one_in(5) ? 1U : 0U;
        }
        return strides;
    }

    void draw_parameter(bool has_set_grad, bool has_release_grad) {
        using joinable::DType;
        Parameter parameter;
        parameter.is_trained = !draw_.one_in(6);
        parameter.dtype = draw_.one_of({DType::f16, DType::bf16, DType::f32, DType::f64});
        if (!parameter.is_trained && draw_.one_in(2)) {
            parameter.dtype = DType::i32;
        }
        for (std::size_t d = draw_.below(4); d > 0; --d) {
            parameter.extents.push_back(draw_.one_in(12) ? 0U : draw_.between(1, 4));
        }
        parameter.value_strides = draw_strides(parameter.extents);
        parameter.has_set_grad = has_set_grad;
        parameter.has_release_grad = has_release_grad;
        bool const starts = !draw_.one_in(3);
        for (std::size_t rank = 0; rank < world(); ++rank) {
            parameter.gradient_strides.push_back(draw_strides(parameter.extents));
            bool const own = training_.has_one_gradient ? starts : !draw_.one_in(3);
            parameter.starts_with_gradient.push_back(!has_set_grad || own);
        }
        training_.parameters.push_back(parameter);
    }

    /// Per rank, how often each parameter becomes ready; with a static graph always the same.
    void draw_graphs() {
        bool const is_same = is_tame_ || draw_.one_in(2);
        for (std::size_t rank = 0; rank < world(); ++rank) {
            std::vector<std::size_t> uses(training_.parameters.size());
            for (std::size_t const p : training_.trained()) {
                uses[p] = draw_.one_of<std::size_t>({0, 1, 1, 1, 2});
            }
            graphs_.push_back(is_same && rank > 0 ? graphs_.front() : uses);
        }
    }

    void draw_epoch() {
        Epoch epoch;
        auto const drawn = draw_.one_of(
            {Guard::none,
             Guard::disabled,
             Guard::notices,
             Guard::notices,
             Guard::next,
             Guard::iterate,
             Guard::look_ahead,
             Guard::periods,
             Guard::known_lengths}
        );
        epoch.guard = take(guard, drawn);
        epoch.average =
            take(average, draw_.one_of({Average::initial, Average::active, Average::weighted}));
        draw_leftover(epoch);
        bool const is_untouched =
            training_.options.joined_gradients == joinable::JoinedGradients::untouched;
        epoch.carries = take(carries, !draw_.one_in(3)) && !is_untouched;
        epoch.uses_no_sync = (!epoch.is_guarded() || epoch.guard == Guard::notices) &&
                             draw_.one_in(2) && training_.model != Model::zero_alone;
        epoch.sync_every = draw_.between(1, 3);
        std::size_t const longest = draw_.between(1, 7);
        std::size_t const every = draw_.below(longest + 1);
        for (std::size_t rank = 0; rank < world(); ++rank) {
            epoch.lengths.push_back(
                !epoch.is_guarded() ? every
                : draw_.one_in(3)   ? 0
                                    : draw_.below(longest + 1)
            );
        }
        for (std::size_t rank = 0; rank < world(); ++rank) {
            epoch.weight_per_input.push_back(draw_.below(4));
        }
        std::size_t const rounds = *std::max_element(epoch.lengths.begin(), epoch.lengths.end());
        draw_leave(epoch);
        std::size_t failing = draw_.one_of<std::size_t>({0, 0, 0, 1, 3, 8});
        if (row_ != nullptr) {
            failing = take(fails, Fails::nowhere) == Fails::nowhere ? 0 : 3;
        }
        failing = is_tame_ ? 0 : failing;
        for (std::size_t round = 0; round < rounds; ++round) {
            draw_round(epoch, round, failing);
        }
        training_.epochs.push_back(epoch);
    }

    void draw_leave(Epoch& epoch) {
        bool const is_left = take(leaves, draw_.one_in(3));
        if (!epoch.can_be_left() || !is_left || (row_ != nullptr && !training_.epochs.empty())) {
            return;
        }
        auto const& lengths = epoch.lengths;
        auto const longest = std::max_element(lengths.begin(), lengths.end()) - lengths.begin();
        std::size_t const rank =
            draw_.one_in(2) ? draw_.below(world()) : static_cast<std::size_t>(longest);
        // Look-ahead announces the next round within each round: a rank cannot leave between them.
        std::size_t const last = epoch.guard == Guard::look_ahead ? 0 : lengths[rank];
        bool const runs = last != 0 && !draw_.one_in(4);
        epoch.leave = Leave{static_cast<int>(rank), runs ? draw_.between(1, last) : 0};
    }

    /// Weights may not begin or end within a window.
    void draw_leftover(Epoch& epoch) {
        bool const was_left = !training_.epochs.empty() && training_.epochs.back().leave;
        auto const drawn = draw_.one_of(
            {Leftover::kept, Leftover::kept, Leftover::kept, Leftover::cleared, Leftover::discarded}
        );
        epoch.leftover = take(leftover, was_left && draw_.one_in(2) ? Leftover::kept : drawn);
        epoch.clearing = training_.has_one_gradient ? training_.after_step
                                                    : draw_.one_of({Reset::zero, Reset::drop});
        if (!training_.epochs.empty() &&
            (was_left || draw_.one_in(2))) { // or most windows would be discarded
            epoch.average = training_.epochs.back().average;
        }
        bool const was_weighted =
            !training_.epochs.empty() && training_.epochs.back().average == Average::weighted;
        bool const looks = epoch.guard != Guard::none; // where it begins
        if (was_weighted != (epoch.average == Average::weighted) &&
            !(epoch.leftover == Leftover::cleared && looks)) {
            epoch.leftover = Leftover::discarded;
        }
    }

    void draw_round(Epoch& epoch, std::size_t round, std::size_t failing) {
        RoundPlan plan;
        plan.reset = draw_.one_of({Reset::keep, Reset::zero, Reset::drop});
        if (training_.has_one_gradient) {
            plan.reset = draw_.one_in(4) ? training_.after_step : Reset::keep;
        }
        plan.resets_late = draw_.one_in(4);
        std::size_t const rounds = *std::max_element(epoch.lengths.begin(), epoch.lengths.end());
        bool leaves_window = draw_.one_in(round + 1 == rounds ? 2 : 3);
        if (epoch.leave && round + 1 == epoch.leave->round) {
            leaves_window = !draw_.one_in(4);
        }
        plan.will_sync = epoch.is_periodic() ? (round + 1) % epoch.sync_every == 0 : !leaves_window;
        plan.evaluates = !epoch.is_periodic() && draw_.one_in(round == 0 ? 3 : 8);
        bool const is_alone = training_.model == Model::zero_alone;
        plan.resets_late = plan.resets_late && !is_alone; // it has no passes
        if (is_alone && !epoch.has_loop() && !epoch.is_periodic()) {
            plan.will_sync = true; // it is step() that opens rounds
            plan.evaluates = false;
        }
        for (std::size_t rank = 0; rank < world(); ++rank) {
            Batch batch = draw_batch(epoch, rank);
            if (failing != 0 && draw_.one_in(failing)) {
                batch.fails = take(
                    fails,
                    draw_.one_of({Fails::before_the_round, Fails::in_forward, Fails::in_backward})
                );
                if (plan.evaluates && batch.fails == Fails::in_backward) {
                    batch.fails = Fails::in_forward;
                }
                if (is_alone) {
                    batch.fails = epoch.has_loop() ? Fails::before_the_round : Fails::nowhere;
                }
                // Until the first bucket is full: where the graph is all of the model it is not.
                bool const may_fill = !training_.has_one_bucket || batch.marks.empty();
                if (training_.finds_unused() && batch.fails == Fails::in_backward && may_fill) {
                    batch.is_unused.assign(batch.is_unused.size(), false);
                    batch.marks = ordered(training_.trained());
                }
            }
            batch.marks_before_failure = draw_.below(batch.marks.size() + 1);
            plan.batches.push_back(batch);
        }
        epoch.rounds.push_back(plan);
    }

    Batch draw_batch(Epoch const& epoch, std::size_t rank) {
        Batch batch;
        batch.is_unused.resize(training_.parameters.size());
        if (training_.options.static_graph) {
            for (std::size_t p = 0; p < graphs_[rank].size(); ++p) {
                batch.marks.insert(batch.marks.end(), graphs_[rank][p], p);
            }
        } else {
            for (std::size_t const p : training_.trained()) {
                batch.is_unused[p] = training_.finds_unused() && draw_.one_in(2);
                if (!batch.is_unused[p]) {
                    batch.marks.push_back(p);
                }
            }
        }
        batch.marks = ordered(batch.marks);
        batch.weight = epoch.is_periodic() ? epoch.weight_per_input[rank] : draw_.below(5);
        batch.says_weight = !epoch.is_guarded() || draw_.one_in(2);
        return batch;
    }

    std::vector<std::size_t> ordered(std::vector<std::size_t> marks) {
        marks = draw_.shuffled(marks);
        if (training_.model == Model::sharded_parameters) {
            std::sort(marks.rbegin(), marks.rend()); // as values are gathered
        }
        return marks;
    }

    Draw draw_;
    bool is_tame_;
    Choices const* row_;
    Training training_;
    std::vector<std::vector<std::size_t>> graphs_;
};

} // namespace joinable_tests::drawn
