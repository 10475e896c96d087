// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <support/draw.hpp>
#include <support/drawn/serial_training.hpp>
#include <support/drawn/training.hpp>
#include <support/gathered_param.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>
#include <support/strided_param.hpp>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>

namespace joinable_tests::drawn {

/// Thrown by a batch, as an engine out of memory does.
struct BatchFailed {};
/// Thrown where a rank dies.
struct RankDied : std::runtime_error {
    RankDied() : std::runtime_error{"out of luck"} {}
};

/// Thrown where a rank leaves a guard.
struct RankLeft {};

/// What happens to gradients that travel compressed, as a seed says, the same on all ranks.
struct Disturbances {
    std::uint64_t seed = 0;
    bool has_infinities = false; ///< elements of a rank's gradients that are infinite or NaN
    bool has_scales = false;     ///< changes of the loss scale

    [[nodiscard]] Draw draw(std::uint64_t round, std::uint64_t run) const {
        return Draw{joinable::detail::Hash{}.add(seed).add(round).add(run).value()};
    }
};

/// A reduction that adds up what it delivers. Where it delivers what is not finite, it looks that all ranks do so and
/// keep what they kept before, and counts the gradients of all ranks as lost.
template <class Reduction>
struct Observed : Reduction {
    std::vector<Numbers>* delivered; ///< per parameter, in row-major order
    std::vector<Numbers>* lost;      ///< by this rank, alike
    Disturbances disturbances;
    std::uint64_t round = 0;

    using State = std::vector<Numbers>; ///< per tensor of some parameters
    /// What a run begins with, by its first parameter.
    struct Start {
        std::vector<Numbers> gradients; ///< per part, times the factor
        State state;
    };
    std::map<std::size_t, Start> starts = {};

    template <class Comm>
    auto start(Comm& comm, joinable::BucketRun const& run, double factor, bool contributes) {
        Start begun{{}, state_of(run)};
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            begun.gradients.push_back(numbers_of(run, k));
            for (double& number : begun.gradients.back()) {
                number *= factor;
            }
        }
        starts[run.parts[0].parameter] = std::move(begun);
        Draw draw = disturbances.draw(round, run.parts[0].parameter);
        bool const disturbs = draw.one_in(4);
        auto const disturbed =
            static_cast<int>(draw.below(static_cast<std::uint64_t>(comm.size())));
        if (disturbances.has_infinities && disturbs && contributes && disturbed == comm.rank()) {
            std::size_t const k = draw.below(run.parts.size());
            if (run.parts[k].count != 0) {
                using Limits = std::numeric_limits<double>;
                Numbers numbers = numbers_of(run, k);
                numbers[draw.below(numbers.size())] =
                    draw.one_in(3) ? Limits::quiet_NaN()
                                   : (draw.one_in(2) ? 1 : -1) * Limits::infinity();
                write(view_of(run, k), numbers);
            }
        }
        return Reduction::start(comm, run, factor, contributes);
    }
    template <class Comm>
    void finish(Comm& comm, joinable::BucketRun const& run) {
        Reduction::finish(comm, run);
        Start const& begun = starts.at(run.parts[0].parameter);
        bool const is_finite = joinable::detail::are_finite(run.buffer);
        std::array<int, 2> found{is_finite ? 1 : 0, is_finite ? 0 : 1};
        comm.all_reduce({found.data(), 2, joinable::DType::i32}, joinable::ReduceOp::max).wait();
        if (found[0] == found[1]) {
            throw std::runtime_error{"averages are finite on some ranks alone"};
        }
        if (!is_finite && state_of(run, begun.state) != begun.state) {
            throw std::runtime_error{"what ranks keep has changed by what is not finite"};
        }
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            std::size_t const parameter = run.parts[k].parameter;
            if (is_finite) {
                add((*delivered)[parameter], numbers_of(run, k), 1);
            } else { // and the training goes on with zeros
                add((*lost)[parameter], begun.gradients[k], 1);
                write(view_of(run, k), Numbers(run.parts[k].count));
            }
        }
    }
    void end_iteration() {
        if constexpr (requires { Reduction::end_iteration(); }) {
            Reduction::end_iteration();
        }
        if constexpr (requires { Reduction::scale_residuals(1.0); }) {
            Draw draw = disturbances.draw(round, 1000);
            if (disturbances.has_scales && draw.one_in(3)) {
                double const factor = draw.one_in(2) ? 2 : 0.5;
                for_each_residual([&](std::size_t parameter, Numbers const& numbers) {
                    add((*lost)[parameter], numbers, 1 - factor);
                });
                Reduction::scale_residuals(factor);
            }
        }
        ++round;
    }

private:
    static void add(Numbers& to, Numbers const& numbers, double factor) {
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            to[i] += numbers[i] * factor;
        }
    }
    static joinable::AnyView view_of(joinable::BucketRun const& run, std::size_t k) {
        joinable::BucketPart const& part = run.parts[k];
        return {run.part(k).data, part.dtype, part.extents, part.strides};
    }
    static Numbers numbers_of(joinable::BucketRun const& run, std::size_t k) {
        return read(view_of(run, k));
    }
    template <class F>
    void for_each_tensor(F const& f) {
        if constexpr (joinable::detail::saves_state<Reduction>) {
            joinable::ReductionState state;
            Reduction::save(state);
            for (joinable::ReductionTensor const& tensor : state.tensors) {
                f(tensor, read({tensor.data, tensor.dtype, tensor.extents, tensor.strides}));
            }
        }
    }
    template <class F>
    void for_each_residual(F const& f) {
        for_each_tensor([&](joinable::ReductionTensor const& tensor, Numbers const& numbers) {
            if (tensor.name == "residual") {
                f(tensor.parameter, numbers);
            }
        });
    }
    /// The residuals of a run's parameters, and the matrices with which rounds begin, as zeros if they
    /// were zeros before: no round had begun with them.
    State state_of(joinable::BucketRun const& run, State const& before = {}) {
        State state;
        for_each_tensor([&](joinable::ReductionTensor const& tensor, Numbers const& numbers) {
            for (joinable::BucketPart const& part : run.parts) {
                if (tensor.parameter != part.parameter) {
                    continue;
                }
                Numbers const zeros(numbers.size());
                bool const is_new = tensor.name != "residual" && state.size() < before.size() &&
                                    before[state.size()] == zeros;
                state.push_back(is_new ? zeros : numbers);
            }
        });
        return state;
    }
};

/// One rank of a drawn training, over any communicator: throws where something differs from the
/// serial one, or ranks issue different collectives. With another reduction than AllReduce it throws
/// where the averages that were delivered, and what ranks keep, are not the sum of the serial one's.
template <class Inner, class Reduction = joinable::AllReduce>
class DrawnRank {
    static constexpr bool is_exact = std::is_same_v<Reduction, joinable::AllReduce>;
    using Comm = std::conditional_t<is_exact, RecordingCommunicator<Inner>, Inner&>;
    static constexpr joinable::Sgd rule{.learning_rate = 0.125, .momentum = 0.5};

public:
    DrawnRank(
        Inner& inner,
        Training const& training,
        SerialTraining const& serial,
        Reduction reduction = {},
        Disturbances const& disturbances = {}
    )
        : inner_{inner}, comm_{inner}, training_{training}, serial_{serial},
          reduction_{std::move(reduction)}, disturbances_{disturbances} {
        for (Parameter const& parameter : training.parameters) {
            FixedParam made{
                {parameter.dtype, parameter.extents, parameter.value_strides},
                {parameter.dtype, parameter.extents, parameter.gradient_strides[me()]},
                {},
                parameter.is_trained
            };
            Numbers values(joinable::numel(parameter.extents));
            momentum_.push_back(values);
            for (std::size_t e = 0; e < values.size(); ++e) {
                values[e] = first_value(inner_.rank(), momentum_.size() - 1, e);
            }
            write(made.value.view(), values);
            if (parameter.starts_with_gradient[me()]) {
                made.grad = made.own.view();
            }
            if (parameter.has_release_grad) {
                releasable_.push_back(StridedParam{std::move(made)});
            } else if (parameter.has_set_grad) {
                settable_.push_back(StridedParam{std::move(made)});
            } else {
                fixed_.push_back(std::move(made));
            }
        }
    }

    void run() {
        switch (training_.model) {
        case Model::averages:
        case Model::step:
        case Model::zero: run_data_parallel(); break;
        case Model::zero_alone: {
            joinable::ZeroRedundancyOptimizer zero{inner_, parameters(), rule, zero_options()};
            train(inner_, zero, zero);
            break;
        }
        case Model::sharded_parameters: {
            for (StridedParam& param : settable_) {
                gathered_.emplace_back(
                    std::shared_ptr<StridedParam>{std::shared_ptr<void>{}, &param}
                );
            }
            run_sharded(gathered_);
            break;
        }
        default: run_sharded(parameters());
        }
        for (std::size_t p = 0; p < training_.parameters.size(); ++p) {
            require(param(p).value.has_its_gaps() && param(p).own.has_its_gaps(), "gaps", 0, p);
        }
        if constexpr (is_exact) {
            compare_traces();
        }
    }

private:
    [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(inner_.rank()); }
    [[nodiscard]] Epoch const& plan() const { return training_.epochs[epoch_]; }
    FixedParam& param(std::size_t p) {
        if (p < releasable_.size()) {
            return releasable_[p];
        }
        p -= releasable_.size();
        return p < settable_.size() ? settable_[p] : fixed_[p - settable_.size()];
    }
    joinable::ParameterList parameters() {
        return joinable::parameters(droppable(releasable_), settable_, fixed_);
    }

    void run_data_parallel() {
        joinable::DistributedDataParallel ddp{
            comm_, parameters(), joinable::buffers(buffers_), training_.options, made_reduction()
        };
        if (training_.model == Model::averages) {
            train(comm_, ddp, ddp);
        } else if (training_.model == Model::step) {
            if (training_.attaches_momentum) {
                ddp.attach_state(momentum_);
            }
            joinable::Step step{comm_, [this] {
                                    descend();
                                    reset(training_.after_step);
                                }};
            train(comm_, ddp, step, step);
        } else {
            joinable::ZeroRedundancyOptimizer zero{comm_, parameters(), rule, zero_options()};
            train(comm_, ddp, zero, zero);
        }
        if constexpr (!is_exact) {
            compare_sums(ddp);
        }
    }
    auto made_reduction() {
        if constexpr (is_exact) {
            return reduction_;
        } else {
            for (Parameter const& parameter : training_.parameters) {
                delivered_.emplace_back(joinable::numel(parameter.extents));
            }
            lost_ = delivered_;
            return Observed<Reduction>{{std::move(reduction_)}, &delivered_, &lost_, disturbances_};
        }
    }
    template <class Ddp>
    void compare_sums(Ddp& ddp) {
        std::vector<Numbers> sums = delivered_;
        for (std::size_t p = 0; p < sums.size(); ++p) {
            Numbers lost = lost_[p];
            inner_
                .all_reduce(
                    {lost.data(), lost.size(), joinable::DType::f64}, joinable::ReduceOp::sum
                )
                .wait();
            for (std::size_t i = 0; i < lost.size(); ++i) {
                sums[p][i] += lost[i];
            }
        }
        for (joinable::ReductionTensor const& tensor : ddp.saved().reduction.tensors) {
            if (tensor.name == "residual") {
                Numbers kept = read({tensor.data, tensor.dtype, tensor.extents, tensor.strides});
                inner_
                    .all_reduce(
                        {kept.data(), kept.size(), joinable::DType::f64}, joinable::ReduceOp::sum
                    )
                    .wait();
                for (std::size_t i = 0; i < kept.size(); ++i) {
                    sums[tensor.parameter][i] += kept[i];
                }
            }
        }
        for (std::size_t const p : training_.trained()) {
            for (std::size_t i = 0; i < sums[p].size(); ++i) {
                double const expected = serial_.delivered()[p][i];
                require(std::abs(sums[p][i] - expected) < 1e-9, "what is delivered and kept", i, p);
            }
        }
    }
    template <class Parameters>
    void run_sharded(Parameters&& listed) {
        using joinable::Sharding;
        joinable::DataParallelOptions const& options = training_.options;
        joinable::ShardedOptions const sharded_options{
            .sharding = training_.model == Model::not_sharded         ? Sharding::none
                        : training_.model == Model::sharded_optimizer ? Sharding::optimizer
                        : training_.model == Model::sharded_gradients ? Sharding::gradients
                                                                      : Sharding::parameters,
            .partition = training_.partition,
            .bucket_cap_bytes = options.bucket_cap_bytes,
            .gradient_kind = options.gradient_kind,
            .broadcast_buffers = options.broadcast_buffers,
            .buffer_sync = options.buffer_sync,
            .sync_at_end = options.sync_at_end,
            .gradient_as_bucket_view = options.gradient_as_bucket_view,
            .verify_ready = options.verify_ready,
        };
        joinable::ShardedDataParallel sharded{
            inner_, listed, joinable::buffers(buffers_), rule, sharded_options
        };
        train(inner_, sharded, sharded);
    }
    [[nodiscard]] joinable::ZeroOptions zero_options() const {
        return {
            .partition = training_.partition,
            .bucket_cap_bytes = training_.options.bucket_cap_bytes,
            .reduces_gradients = training_.model == Model::zero_alone,
        };
    }

    /// All epochs. `optimizer` may be the model; `beside` are participants beside it.
    template <class GuardComm, class Trained, class Optimizer, class... Beside>
    void train(GuardComm& comm, Trained& model, Optimizer& optimizer, Beside&... beside) {
        auto const run_round = [&](auto* guard, std::size_t k) {
            bool const syncs = plan().rounds[k].will_sync && !plan().rounds[k].evaluates;
            if constexpr (requires { model.skip(); }) {
                run_batch(model, k);
                may_die(k, Death::after_pass);
                if constexpr (requires { optimizer.step(); }) {
                    if (syncs) {
                        optimizer.step();
                    }
                }
            } else {
                run_batch_alone(model, guard, k);
            }
            if (syncs && training_.has_owners()) {
                reset(training_.after_step);
            }
        };
        for (epoch_ = 0; epoch_ < training_.epochs.size(); ++epoch_) {
            if (plan().leftover == Leftover::cleared) {
                reset(plan().clearing);
            } else if (plan().leftover == Leftover::discarded) {
                model.discard_window();
            }
            if (plan().is_guarded()) {
                run_until_left([&] { run_guarded(run_round, comm, model, beside...); });
            } else {
                run_unguarded(run_round, model, beside...);
            }
            [[maybe_unused]] auto const held = [&] {
                if constexpr (requires { model.use_all(); }) {
                    return model.use_all();
                } else {
                    return 0;
                }
            }();
            are_gathered_ = true;
            compare(plan().round_count());
            are_gathered_ = false;
        }
    }

    /// The rank that leaves catches what it threw, and all others the failure that they hear of.
    template <class Run>
    void run_until_left(Run const& run) {
        auto const& leave = plan().leave;
        bool const is_left = leave && leave->rank != inner_.rank();
        try {
            run();
        } catch (RankLeft const&) {
            return;
        } catch (joinable::PeerFailed const& error) {
            if (!is_left || error.rank() != leave->rank) {
                throw;
            }
            return;
        }
        require(!leave, "leaving", plan().round_count(), 0);
    }

    template <class RunRound, class Trained, class... Beside>
    void run_unguarded(RunRound const& run_round, Trained& model, Beside&... beside) {
        std::optional<joinable::Join<Trained, Beside...>> disabled;
        if (plan().guard == Guard::disabled) {
            disabled.emplace(
                joinable::participants(model, beside...), joinable::JoinOptions{.enable = false}
            );
        }
        for (std::size_t k = 0; k < plan().lengths[me()]; ++k) {
            run_round(disabled ? &*disabled : nullptr, k);
            may_die(k, Death::after_round);
            compare(k);
        }
        may_die(plan().lengths[me()], Death::after_round);
    }

    template <class RunRound, class GuardComm, class Trained, class... Beside>
    void run_guarded(RunRound const& round_of, GuardComm& comm, Trained& model, Beside&... beside) {
        // Sees what joined ranks have after each round, too.
        joinable::Action observer{
            comm,
            [this](std::size_t k) { compare(k); },
            [this](joinable::Round const& round) { compare(round.number()); }
        };
        joinable::JoinOptions options{.carry_accumulated = plan().carries};
        if (plan().is_periodic()) {
            options.sync_every = plan().sync_every;
            if (plan().average == Average::weighted) {
                options.weight_per_input = plan().weight_per_input[me()];
            }
            if (plan().guard == Guard::known_lengths) {
                options.inputs = plan().lengths[me()];
            }
        }
        joinable::Join guard{
            joinable::participants(model, beside..., observer),
            options,
            joinable::divide_by_initial_world_size = plan().average == Average::initial
        };
        auto const run_round = [&](std::size_t k) {
            round_of(&guard, k);
            observer(k);
            may_die(k, Death::after_round);
            may_leave(k + 1);
        };
        std::vector<std::size_t> rounds(plan().lengths[me()]);
        std::iota(rounds.begin(), rounds.end(), std::size_t{0});
        auto const announce = [&](std::size_t k) { return notice_of(k); };
        may_leave(0);
        if (plan().guard == Guard::look_ahead) {
            for (std::size_t const k : guard.iterate(joinable::look_ahead, rounds, announce)) {
                run_round(k);
            }
        } else if (plan().guard == Guard::iterate) {
            for (std::size_t const k : guard.iterate(rounds, announce)) {
                run_round(k);
            }
        } else {
            for (std::size_t const k : rounds) {
                if (plan().guard == Guard::next) {
                    require(guard.next(true, notice_of(k)), "next", k, 0);
                }
                run_round(k);
            }
        }
        may_die(plan().lengths[me()], Death::after_round);
        auto const result = guard.finish();
        require(result.rounds == plan().rounds.size(), "rounds", result.rounds, 0);
    }

    void may_die(std::size_t k, Death::Place place) const {
        auto const& death = training_.death;
        if (death && death->rank == inner_.rank() && death->epoch == epoch_ && death->round == k &&
            death->place <= place) {
            throw RankDied{};
        }
    }
    /// Between rounds: before round `k`.
    void may_leave(std::size_t k) const {
        auto const& leave = plan().leave;
        if (leave && leave->rank == inner_.rank() && leave->round == k) {
            throw RankLeft{};
        }
    }

    /// What is said of round `k` when it opens.
    [[nodiscard]] joinable::RoundNotice notice_of(std::size_t k) const {
        RoundPlan const& round = plan().rounds[k];
        Batch const& batch = round.batches[me()];
        joinable::RoundNotice notice;
        if (!plan().is_periodic()) {
            notice.will_sync = round.will_sync || plan().uses_no_sync;
            notice.phase = round.evaluates ? joinable::Phase::evaluate : joinable::Phase::train;
            if (plan().average == Average::weighted) {
                notice.weight = batch.weight;
            }
        }
        notice.skips = batch.fails == Fails::before_the_round;
        if (notice.skips && !batch.says_weight) {
            notice.weight = {};
        }
        return notice;
    }

    template <class Trained>
    void run_batch(Trained& ddp, std::size_t k) {
        using NoSync = decltype(ddp.no_sync());
        RoundPlan const& round = plan().rounds[k];
        Batch const& batch = round.batches[me()];
        reset(round.resets_late ? Reset::keep : round.reset);
        may_die(k, Death::before);
        std::unique_ptr<NoSync> quiet;
        if (plan().uses_no_sync && !round.will_sync && !round.evaluates) {
            quiet.reset(new NoSync(ddp.no_sync()));
        }
        joinable::RoundNotice notice = notice_of(k);
        bool const skips = std::exchange(notice.skips, false);
        if (plan().has_loop()) {
            notice = {}; // said already
        }
        if (skips) {
            ddp.skip(notice);
            return;
        }
        if (plan().has_loop() && batch.fails == Fails::in_forward && k % 2 == 0) {
            ddp.skip(); // before the pass, but next() has announced the batch
            return;
        }
        try {
            ddp.forward(
                [&](auto const&... use) {
                    may_die(k, Death::in_forward);
                    if (batch.fails == Fails::in_forward) {
                        throw BatchFailed{};
                    }
                    for (std::size_t p = 0; p < gathered_.size(); ++p) {
                        [[maybe_unused]] auto const held = std::tuple{use(p)...};
                        compare_value(p, values_before(k)[p], k);
                    }
                    buffers_[0][0] = statistic(inner_.rank(), epoch_, k);
                },
                notice
            );
            if (round.evaluates) {
                return;
            }
            reset(round.resets_late ? round.reset : Reset::keep);
            auto const pass = [&](auto const& ready, auto const&... use) {
                run_backward(ddp, k, ready, use...);
            };
            if (training_.finds_unused() && k % 2 == 0) {
                ddp.backward(pass, [&](std::size_t p) { return batch.is_unused[p]; });
            } else if (training_.finds_unused()) {
                std::vector<std::size_t> unused;
                for (std::size_t p = 0; p < batch.is_unused.size(); ++p) {
                    if (batch.is_unused[p]) {
                        unused.push_back(p);
                    }
                }
                ddp.backward(pass, unused);
            } else {
                ddp.backward(pass);
            }
        } catch (BatchFailed const&) {
            bool const is_open = plan().has_loop() || training_.model == Model::sharded_parameters;
            if (!round.evaluates || is_open) { // else it would skip the next batch
                ddp.skip();
            }
        }
    }

    /// The optimizer of a Step.
    void descend() {
        for (std::size_t const p : training_.trained()) {
            if (param(p).grad) {
                joinable::AnyView const& view = param(p).value.view();
                Numbers values = read(view);
                Numbers const gradient = read(param(p).grad);
                for (std::size_t e = 0; e < values.size(); ++e) {
                    drawn::descend(view.dtype(), gradient[e], momentum_[p][e], values[e]);
                }
                write(view, values);
            }
        }
    }

    /// A round of a ZeroRedundancyOptimizer that averages gradients itself.
    template <class Zero, class Opener>
    void run_batch_alone(Zero& zero, Opener* guard, std::size_t k) {
        RoundPlan const& round = plan().rounds[k];
        Batch const& batch = round.batches[me()];
        may_die(k, Death::before);
        if (!plan().has_loop() && plan().is_periodic()) {
            require(guard->next(true), "next", k, 0);
        }
        reset(round.reset);
        if (round.evaluates) {
            return;
        }
        for (std::size_t m = 0; m < batch.marks.size() && batch.fails == Fails::nowhere; ++m) {
            add(k, batch.marks[m]);
        }
        may_die(k, Death::after_pass);
        if (round.will_sync) {
            bool const is_open = plan().has_loop() || plan().is_periodic();
            zero.step(is_open ? joinable::RoundNotice{} : notice_of(k));
        }
    }

    template <class Trained, class Ready, class... Use>
    void run_backward(Trained& ddp, std::size_t k, Ready const& ready, Use const&... use) {
        RoundPlan const& round = plan().rounds[k];
        Batch const& batch = round.batches[me()];
        bool const fails = batch.fails == Fails::in_backward;
        std::vector<std::size_t> first;
        if constexpr (requires { ddp.buckets(); }) {
            first = ddp.buckets().front().parameters;
        }
        for (std::size_t m = 0; m < batch.marks.size(); ++m) {
            std::size_t const p = batch.marks[m];
            // In a round that syncs, before the first bucket is full; else as drawn.
            bool const is_late = m >= batch.marks_before_failure;
            bool const would_fill =
                round.will_sync && !is_recording() &&
                (training_.is_sharded_model() || p == last_of(first, batch.marks));
            if (fails && (would_fill || is_late)) {
                throw BatchFailed{};
            }
            [[maybe_unused]] auto const held = std::tuple{use(p)...};
            add(k, p);
            ready(p);
            if (m == batch.marks_before_failure) {
                may_die(k, Death::in_backward);
            }
        }
        if (fails) {
            throw BatchFailed{};
        }
        has_graph_ = has_graph_ || round.will_sync;
    }

    [[nodiscard]] bool is_recording() const {
        return training_.options.static_graph && !has_graph_;
    }

    static std::size_t
    last_of(std::vector<std::size_t> const& bucket, std::vector<std::size_t> const& marks) {
        auto const it = std::find_if(marks.rbegin(), marks.rend(), [&](std::size_t p) {
            return std::find(bucket.begin(), bucket.end(), p) != bucket.end();
        });
        return it == marks.rend() ? marks.size() + bucket.size() + 1000 : *it;
    }

    void add(std::size_t k, std::size_t p) {
        FixedParam& parameter = param(p);
        parameter.need_grad();
        Numbers numbers = read(parameter.grad);
        for (std::size_t e = 0; e < numbers.size(); ++e) {
            numbers[e] = plus(
                parameter.grad.dtype(), numbers[e], contribution(inner_.rank(), epoch_, k, p, e)
            );
        }
        write(parameter.grad, numbers);
    }

    void reset(Reset reset) {
        for (std::size_t const p : training_.trained()) {
            FixedParam& parameter = param(p);
            if (reset == Reset::drop && training_.parameters[p].has_set_grad) {
                parameter.grad = {};
            } else if (reset != Reset::keep && parameter.grad) {
                write(parameter.grad, Numbers(parameter.grad.numel()));
            }
        }
    }

    /// The values of all parameters on this rank when round `k` begins.
    [[nodiscard]] std::vector<Numbers> const& values_before(std::size_t k) const {
        if (k > 0) {
            return serial_.values()[epoch_][k - 1][me()];
        }
        return epoch_ > 0 ? serial_.values()[epoch_ - 1].back()[me()] : serial_.first_values();
    }
    void compare_value(std::size_t p, Numbers const& expected, std::size_t k) {
        if (!is_exact) {
            return;
        }
        bool const is_gathered = p < gathered_.size() && gathered_[p].value;
        auto const& view = is_gathered ? gathered_[p].value : param(p).value.view();
        require(are_same(read(view), expected), "value", k, p);
    }
    void compare(std::size_t k) {
        if (!is_exact) {
            return;
        }
        for (std::size_t p = 0; p < training_.parameters.size(); ++p) {
            if (gathered_.empty() || are_gathered_) { // else there are no values between passes
                compare_value(p, serial_.values()[epoch_][k][me()][p], k);
            }
        }
        require(buffers_[0][0] == serial_.buffers()[epoch_][k][me()], "buffer", k, 0);
        Gradients const& expected = serial_.gradients()[epoch_][k][me()];
        for (std::size_t p = 0; p < expected.size(); ++p) {
            FixedParam& parameter = param(p);
            require(bool(parameter.grad) == expected[p].has_value(), "existence", k, p);
            if (expected[p]) {
                require(are_same(read(parameter.grad), *expected[p]), "gradient", k, p);
            }
        }
    }

    void compare_traces() {
        std::uint64_t hash = 0;
        for (std::string const& collective : comm_.trace) {
            hash = hash * 1'000'003 + std::hash<std::string>{}(collective);
        }
        std::array<std::uint64_t, 2> bounds{hash, ~hash};
        inner_.all_reduce({bounds.data(), 2, joinable::DType::u64}, joinable::ReduceOp::max).wait();
        require(bounds[0] == hash && bounds[1] == ~hash, "trace", comm_.trace.size(), 0);
    }

    void require(bool is_right, char const* what, std::size_t round, std::size_t p) const {
        if (!is_right) {
            throw std::runtime_error{joinable::detail::concat(
                what,
                " differs on rank ",
                inner_.rank(),
                " in epoch ",
                epoch_,
                ", round ",
                round,
                ", parameter ",
                p
            )};
        }
    }

    Inner& inner_;
    Comm comm_;
    Training const& training_;
    SerialTraining const& serial_;
    Reduction reduction_;
    Disturbances disturbances_;
    std::vector<Numbers> delivered_; ///< by it
    std::vector<Numbers> lost_;      ///< of this rank
    std::vector<StridedParam> releasable_;
    std::vector<StridedParam> settable_;
    std::vector<FixedParam> fixed_;
    std::vector<GatheredParam> gathered_; ///< with sharded values, in place of the others
    bool are_gathered_ = false;
    std::vector<Numbers> momentum_; ///< of a Step
    std::vector<std::vector<double>> buffers_{{0.0}};
    std::size_t epoch_ = 0;
    bool has_graph_ = false; ///< the static one was recorded
};

} // namespace joinable_tests::drawn
