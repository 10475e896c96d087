// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/nccl/captured_averages.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/fwd.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/participant/averaging.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// Explains in one sentence over which communicators a CapturedStep runs.
template <class Comm>
consteval bool models_captured_step() {
    constexpr bool is_nccl = std::is_base_of_v<NcclCollectives, Comm>;
    static_assert(
        is_nccl,
        "CapturedStep: the communicator has to be an NcclCommunicator or an NcclCommunicatorRef, "
        "whose collectives a CUDA graph can hold; over another one use DistributedDataParallel"
    );
    return is_nccl;
}

} // namespace detail

/// Captures the passes of an engine and the reduction of their gradients as one CUDA graph, over
/// NCCL.
///
/// @code
/// joinable::CapturedStep captured{comm, gradients, [&](auto ready) { model.passes(ready); }};
/// joinable::Step step{comm, [&] { optimizer.step(model); }};
/// joinable::Join guard{joinable::participants(captured, step), joinable::control(hosts)};
/// for (auto const& batch : batches) {
///     model.load(batch);                            // to where the captured passes read it
///     captured.step({.weight = batch.size()});      // replays
///     step.step();
/// }
/// @endcode
///
/// `passes(ready)` enqueues both passes on the caller's stream. It calls ready(i) when gradient i
/// is final there, for 0, 1, 2, ... in this order; the all-reduce of the gradient then overlaps
/// with the rest. It is called in the first round and in the first round after a guard. All other
/// rounds launch the graph again, so every batch must lie in the same memory and have the same
/// size.
///
/// Passes need one run before they are captured: cuBLAS, cuDNN and kernels that are loaded lazily
/// allocate and wait for the device when they are first called, which a capture does not allow. Run
/// them once on the same stream, with a `ready` that does nothing, before the first round.
///
/// A rank that has run out launches the same graph with the engine's nodes disabled and contributes
/// zeros; its gradients receive the averages, too. When the guard ends, they are zeroed, unless
/// JoinedGradients::kept is given. The graph reads the factor of a gradient from
/// device memory when it runs, so weights and divisors may change in each round. Every round trains
/// and syncs.
///
/// If the device has kernels (CudaDevice::use_kernels) when the passes are captured, these scale
/// gradients in place, and NCCL's sum is a plain one, which NCCL can run by its symmetric kernels.
/// Otherwise NCCL scales: see GradientKind::sum. All ranks have kernels, or none.
template <class Comm, class Passes>
class CapturedStep {
    static_assert(detail::models_captured_step<Comm>());

public:
    /// Local. `gradients` have floating-point dtypes and are in memory of the communicator's
    /// device, in the order in which they become ready; the same on every rank.
    /// @throws ContractViolation  a buffer is not like this, there is none, two of them share memory,
    ///         or JoinedGradients::untouched is given.
    CapturedStep(
        Comm& comm,
        std::vector<Buffer> gradients,
        Passes passes,
        GradientKind kind = GradientKind::mean,
        JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end
    )
        : comm_{comm}, gradients_{std::move(gradients)}, passes_{std::move(passes)},
          averaging_{kind}, words_{comm}, joined_gradients_{joined_gradients}, averages_{comm} {
        if (joined_gradients == JoinedGradients::untouched) {
            throw ContractViolation{"a captured step reduces gradients in their own memory, so a "
                                    "joined rank cannot leave them untouched; give it "
                                    "JoinedGradients::kept or JoinedGradients::zeroed_at_end"};
        }
        for (Buffer const& gradient : gradients_) {
            averages_.check(gradient);
            if (!is_floating_point(gradient.dtype) || gradient.count == 0) {
                throw ContractViolation{detail::concat(
                    "a captured step averages gradients of floating-point numbers, but was given ",
                    gradient.count,
                    " ",
                    name_of(gradient.dtype),
                    "; leave that out"
                )};
            }
        }
        check_distinct();
    }
    CapturedStep(CapturedStep const&) = delete;
    CapturedStep& operator=(CapturedStep const&) = delete;
    /// Waits for the work in flight, up to the deadline. While unwinding it aborts.
    ~CapturedStep() = default;

    /// Runs a round. Enqueues both passes and the averages and returns; the caller's stream waits
    /// for them. The host blocks when it is four rounds ahead. Collective.
    /// @throws ContractViolation  the round does not sync, or one since the last average did not; the
    ///         passes did not call ready(i) for all gradients; or NCCL would round the factor of a sum too
    ///         much, see GradientKind::sum.
    void step(RoundNotice notice = {}) {
        if (!notice.will_sync || notice.phase != Phase::train) {
            std::string_view const text =
                "a captured step reduces gradients in each of its rounds, but was given a notice of a "
                "round that does not; leave will_sync and phase as they are";
            detail::record_failure(*this, text);
            throw ContractViolation{std::string{text}};
        }
        Round const round = notify_join_context(*this, notice);
        detail::run_part(*this, round, [&] {
            if (!round.will_sync()) {
                throw ContractViolation{"a captured step reduces gradients in each of its rounds, "
                                        "but another participant "
                                        "opened one that does not sync; do not call step() in it"};
            }
            if (round.accumulated_rounds() != 0) {
                throw ContractViolation{detail::concat(
                    "a captured step reduces gradients in each of its rounds, but ",
                    round.accumulated_rounds(),
                    " training rounds before this one did not sync, and its average would be divided by what other "
                    "participants accumulated there; sync in each round of a guard with a CapturedStep"
                )};
            }
            run(round, true);
        });
    }

    class Hook {
    public:
        using label = labels::gradients;
        static constexpr bool gives_notice = true;

        Hook(CapturedStep& step, bool divides_by_initial_world_size) noexcept
            : step_{step},
              divides_{
                  step.averaging_.divides_by_initial_world_size, divides_by_initial_world_size
              } {}
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;
        /// A rank that was joined throughout has captured no passes.
        ~Hook() {
            step_.end_guard();
            step_.averages_.release_kernels();
        }
        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) { step_.run(round, false); }
        void post_hook(bool) noexcept {}

    private:
        CapturedStep& step_;
        detail::ScopedFlag divides_; ///< set for the guard
    };

    using join_keywords = keywords<divide_by_initial_world_size_t>;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, args.get(divide_by_initial_world_size, true)};
    }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "CapturedStep"; }
    static constexpr std::string_view join_verb = "step()";
    void list_claims(ParameterClaims& claims) const {
        for (std::size_t i = 0; i < gradients_.size(); ++i) {
            claims.add_averaged(view_of(gradients_[i]), i);
        }
    }
    void agree_on(AgreementList& list) const {
        list.add("gradient_kind", averaging_.kind == GradientKind::mean ? "mean" : "sum");
        list.add(
            "joined_gradients",
            joined_gradients_ == JoinedGradients::kept ? "kept" : "zeroed_at_end"
        );
        list.add("number of gradients", gradients_.size());
        for (Buffer const& gradient : gradients_) {
            list.add("gradient", detail::concat(gradient.count, " ", name_of(gradient.dtype)));
        }
    }

private:
    /// @throws ContractViolation
    void check_distinct() const {
        if (gradients_.empty()) {
            throw ContractViolation{"a captured step averages gradients, but was given none"};
        }
        auto const shared = detail::find_shared(gradients_.size(), [&](std::size_t i) {
            return view_of(gradients_[i]);
        });
        if (shared) {
            throw ContractViolation{detail::concat(
                "gradients ",
                shared->first,
                " and ",
                shared->second,
                " of a captured step share memory, so they would be averaged twice; list tied ones once"
            )};
        }
    }
    [[nodiscard]] AnyView view_of(Buffer const& gradient) const {
        DeviceId const device{DeviceKind::cuda, comm_.device()};
        return {gradient.data, gradient.dtype, Shape{gradient.count}, Shape{1}, device};
    }

    void run(Round const& round, bool is_active) {
        double const factor = averaging_.factor(words_, round, [&](double common) {
            for (Buffer const& gradient : gradients_) {
                averages_.check_factor(common, gradient.dtype);
            }
        });
        if (!averages_.is_captured()) {
            averages_.capture([&] { record(is_active); });
        }
        averages_.run(factor, !is_active);
        has_shadowed_last_ = !is_active;
    }
    /// The averages of a shadowed round are nothing that this rank's next pass may add to.
    void end_guard() noexcept {
        if (!std::exchange(has_shadowed_last_, false) ||
            joined_gradients_ != JoinedGradients::zeroed_at_end) {
            return;
        }
        try {
            for (Buffer const& gradient : gradients_) {
                averages_.zero(gradient);
            }
        } catch (...
        ) { // NOLINT(bugprone-empty-catch): another exception may be in flight, or the device is lost
        }
    }

    void record(bool is_active) {
        std::size_t next = 0;
        auto const ready = [&](std::size_t gradient) {
            if (gradient != next || gradient >= gradients_.size()) {
                throw ContractViolation{detail::concat(
                    "the passes of a captured step say in order which of the ",
                    gradients_.size(),
                    " gradients are ready: expected ready(",
                    next,
                    "), but were given ready(",
                    gradient,
                    "); list the gradients in the order in which they become final"
                )};
            }
            averages_.add(gradients_[next++]);
        };
        if (is_active) {
            passes_(ready);
            if (next != gradients_.size()) {
                throw ContractViolation{detail::concat(
                    "the passes of a captured step called ready() for ",
                    next,
                    " of ",
                    gradients_.size(),
                    " gradients; call it for each, in their order"
                )};
            }
        } else {
            for (Buffer const& gradient : gradients_) {
                averages_.add(gradient);
            }
        }
    }
    Comm& comm_;
    std::vector<Buffer> gradients_;
    Passes passes_;
    detail::Averaging averaging_;
    detail::ControlOver<Comm&> words_; ///< for weights
    JoinedGradients joined_gradients_;
    bool has_shadowed_last_ = false;        ///< what wrote the gradients last was a shadowed round
    detail::NcclCapturedAverages averages_; ///< waits for its runs before others are destroyed
    JoinState state_;
};

template <class Comm, class Passes>
CapturedStep(Comm&, std::vector<Buffer>, Passes, GradientKind = {}, JoinedGradients = {})
    -> CapturedStep<Comm, Passes>;

}} // namespace joinable::v0
