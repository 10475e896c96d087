// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <support/drawn/serial_training.hpp>
#include <support/drawn/training.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>
#include <support/strided_param.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace joinable_tests::drawn {

/// Thrown by a batch, as an engine out of memory does.
struct BatchFailed {};
/// Thrown where a rank dies.
struct RankDied : std::runtime_error {
    RankDied() : std::runtime_error{"out of luck"} {}
};

/// One rank of a drawn training, over any communicator: throws where something differs from the
/// serial one, or ranks issue different collectives.
template <class Inner>
class DrawnRank {
    using Comm = RecordingCommunicator<Inner>;
    using Ddp = joinable::DistributedDataParallel<Comm>;
    using NoSync = decltype(std::declval<Ddp&>().no_sync());

public:
    DrawnRank(Inner& inner, Training const& training, SerialTraining const& serial)
        : inner_{inner}, comm_{inner}, training_{training}, serial_{serial} {
        for (Parameter const& parameter : training.parameters) {
            FixedParam made{
                {parameter.dtype, parameter.extents, parameter.value_strides},
                {parameter.dtype, parameter.extents, parameter.gradient_strides[me()]},
                {},
                parameter.is_trained
            };
            if (parameter.starts_with_gradient[me()]) {
                made.grad = made.own.view();
            }
            if (parameter.has_set_grad) {
                settable_.push_back(StridedParam{std::move(made)});
            } else {
                fixed_.push_back(std::move(made));
            }
        }
    }

    void run() {
        Ddp ddp{
            comm_,
            joinable::parameters(settable_, fixed_),
            joinable::buffers(buffers_),
            training_.options
        };
        for (epoch_ = 0; epoch_ < training_.epochs.size(); ++epoch_) {
            ddp.discard_window(); // epochs differ in whether they have weights
            if (plan().is_guarded()) {
                run_guarded(ddp);
            } else {
                run_alone(ddp);
            }
        }
        for (std::size_t p = 0; p < training_.parameters.size(); ++p) {
            require(param(p).value.has_its_gaps() && param(p).own.has_its_gaps(), "gaps", 0, p);
        }
        compare_traces();
    }

private:
    [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(inner_.rank()); }
    [[nodiscard]] Epoch const& plan() const { return training_.epochs[epoch_]; }
    FixedParam& param(std::size_t p) {
        return p < settable_.size() ? settable_[p] : fixed_[p - settable_.size()];
    }

    void run_alone(Ddp& ddp) {
        std::optional<joinable::Join<Ddp>> disabled;
        if (plan().guard == Guard::disabled) {
            disabled.emplace(joinable::participants(ddp), joinable::JoinOptions{.enable = false});
        }
        for (std::size_t k = 0; k < plan().lengths[me()]; ++k) {
            run_batch(ddp, k);
            may_die(k, Death::after_round);
            compare(k);
        }
        may_die(plan().lengths[me()], Death::after_round);
    }

    void run_guarded(Ddp& ddp) {
        // Sees what joined ranks have after each round, too.
        joinable::Action observer{
            comm_,
            [this](std::size_t k) { compare(k); },
            [this](joinable::Round const& round) { compare(round.number()); }
        };
        joinable::JoinOptions options{.carry_accumulated = plan().carries};
        if (plan().is_periodic()) {
            options.sync_every = plan().sync_every;
            if (plan().average == Average::weighted) {
                options.weight_per_input = 1 + me() % 3;
            }
            if (plan().guard == Guard::known_lengths) {
                options.inputs = plan().lengths[me()];
            }
        }
        joinable::Join guard{
            joinable::participants(ddp, observer),
            options,
            joinable::divide_by_initial_world_size = plan().average == Average::initial
        };
        auto const run_round = [&](std::size_t k) {
            run_batch(ddp, k);
            may_die(k, Death::after_pass);
            observer(k);
            may_die(k, Death::after_round);
        };
        std::vector<std::size_t> rounds(plan().lengths[me()]);
        std::iota(rounds.begin(), rounds.end(), std::size_t{0});
        if (plan().guard == Guard::look_ahead) {
            auto const announce = [&](std::size_t k) { return notice_of(k); };
            for (std::size_t const k : guard.iterate(joinable::look_ahead, rounds, announce)) {
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

    void run_batch(Ddp& ddp, std::size_t k) {
        RoundPlan const& round = plan().rounds[k];
        Batch const& batch = round.batches[me()];
        reset(round.reset);
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
                [&] {
                    may_die(k, Death::in_forward);
                    if (batch.fails == Fails::in_forward) {
                        throw BatchFailed{};
                    }
                    buffers_[0][0] = statistic(inner_.rank(), epoch_, k);
                },
                notice
            );
            if (round.evaluates) {
                return;
            }
            auto const pass = [&](auto const& ready) { run_backward(ddp, k, ready); };
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
            if (!round.evaluates || plan().has_loop()) { // else it would skip the next batch
                ddp.skip();
            }
        }
    }

    template <class Ready>
    void run_backward(Ddp& ddp, std::size_t k, Ready const& ready) {
        RoundPlan const& round = plan().rounds[k];
        Batch const& batch = round.batches[me()];
        bool const fails = batch.fails == Fails::in_backward;
        std::vector<std::size_t> const first = ddp.buckets().front().parameters;
        for (std::size_t m = 0; m < batch.marks.size(); ++m) {
            std::size_t const p = batch.marks[m];
            // In a round that syncs, before the first bucket is full; else as drawn.
            bool const is_late = m >= batch.marks_before_failure;
            bool const would_fill =
                round.will_sync && p == last_of(first, batch.marks) && !is_recording();
            if (fails && (would_fill || is_late)) {
                throw BatchFailed{};
            }
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

    void compare(std::size_t k) {
        require(buffers_[0][0] == serial_.buffers()[epoch_][k][me()], "buffer", k, 0);
        Gradients const& expected = serial_.gradients()[epoch_][k][me()];
        for (std::size_t p = 0; p < expected.size(); ++p) {
            FixedParam& parameter = param(p);
            require(bool(parameter.grad) == expected[p].has_value(), "existence", k, p);
            if (expected[p]) {
                require(read(parameter.grad) == *expected[p], "gradient", k, p);
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
    std::vector<StridedParam> settable_;
    std::vector<FixedParam> fixed_;
    std::vector<std::vector<double>> buffers_{{0.0}};
    std::size_t epoch_ = 0;
    bool has_graph_ = false; ///< the static one was recorded
};

} // namespace joinable_tests::drawn
