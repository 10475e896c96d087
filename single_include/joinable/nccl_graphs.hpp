// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <new>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "join.hpp"
#include "nccl.hpp"

// ---- joinable/communicator/nccl/detail/graph.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A CUDA graph of an engine's launches on the caller's stream, with collectives among them. A
/// shadow runs only the collectives: the engine's nodes are then disabled. NCCL requires that all
/// ranks run together what they captured together. So one graph serves both roles, and all ranks
/// capture at the same point of their program.
///
/// The communicator must outlive this object. Needs CUDA 12.3.
class NcclGraph final : public HoldsNcclKernels {
public:
    explicit NcclGraph(NcclCollectives& comm) : rank_{comm.rank_}, checks_{comm.checks_} {
        rank_.on_device([&] { check_cuda(make_event(event_), "cudaEventCreateWithFlags"); });
        rank_.add_holder(*this);
    }
    NcclGraph(NcclGraph const&) = delete;
    NcclGraph& operator=(NcclGraph const&) = delete;
    ~NcclGraph() {
        rank_.remove_holder(*this);
        release_kernels();
    }

    [[nodiscard]] NcclRank& rank() const noexcept { return rank_; }
    [[nodiscard]] bool is_captured() const noexcept { return executable_ != nullptr; }

    /// Collective, although nothing is sent. Work that `body()` launches on the caller's stream
    /// does not run: it becomes the graph, with the collectives that it passes to add(). If this
    /// throws, no graph is left.
    /// @throws ContractViolation  the caller's stream cannot be captured, or a captured node cannot
    ///                            be disabled.
    template <class Body>
    void capture(Body const& body) {
        rank_.begin_call();
        release_kernels();
        try {
            rank_.on_device([&] { begin(); });
            body();
            require_capturing();
            rank_.on_device([&] { end(); });
        } catch (...) {
            release_kernels();
            throw;
        }
    }
    /// Within capture(): `issue(nccl, stream)` starts an in-place collective by NcclCalls. Its
    /// launches on the stream before that run in both roles. `can_zero`: a launch may zero the
    /// buffer before all that, see set_role().
    template <class Issue>
    void add(Request const& request, bool can_zero, Issue const& issue) {
        if (checks_) {
            agree_on_collective(rank_, request);
        }
        require_capturing();
        Buffer const& buffer = request.out;
        cudaStream_t const stream = rank_.stream();
        rank_.on_device([&] {
            note(engine_.list);
            order(origin_, stream);
            if (can_zero) {
                rank_.check(
                    cudaMemsetAsync(buffer.data, 0, buffer.bytes(), stream), "cudaMemsetAsync"
                );
                note(zeros_.list);
            }
            NcclCalls const nccl{rank_.handle(), stream, rank_.size()};
            rank_.check(issue(nccl, stream), name_of(request.signature.collective));
            rank_.finish_call("captures a collective"); // NCCL may capture it on its own thread
            std::vector<cudaGraphNode_t> of_nccl;
            note(of_nccl);
        });
        ++collectives_;
    }

    /// Takes effect at the next launch. @pre is_captured()
    void set_role(bool is_shadow, bool zeroes) {
        rank_.on_device([&] {
            enable(engine_, !is_shadow);
            enable(zeros_, zeroes);
        });
    }
    /// Launches the graph after the work on the caller's stream and the work that `before(stream)`
    /// launches. The launch has one user. @pre set_role() was called.
    template <class Before>
    [[nodiscard]] NcclLaunch& launch(Before const& before) {
        rank_.begin_call();
        return rank_.post(collectives_, rank_.caller(), [&] {
            before(rank_.stream());
            rank_.check(cudaGraphLaunch(executable_, rank_.stream()), "cudaGraphLaunch");
        });
    }

    /// Unfinished launches continue.
    void release_kernels() noexcept override {
        CurrentCudaDevice const current{rank_.device(), std::nothrow};
        if (std::exchange(is_capturing_, false)) {
            cudaGraph_t same = nullptr;
            static_cast<void>(cudaStreamEndCapture(origin_, &same));
            static_cast<void>(cudaGetLastError()); // that of the failed capture, which was thrown
        }
        if (executable_ != nullptr) {
            static_cast<void>(cudaGraphExecDestroy(std::exchange(executable_, nullptr)));
        }
        if (graph_ != nullptr) {
            static_cast<void>(cudaGraphDestroy(std::exchange(graph_, nullptr)));
        }
        seen_.clear();
        engine_ = {};
        zeros_ = {};
        collectives_ = 0;
    }

private:
    /// Nodes that are enabled and disabled together.
    struct Nodes {
        std::vector<cudaGraphNode_t> list;
        bool are_enabled = true; ///< as in a graph that was just made
    };
    static constexpr std::string_view passes_advice =
        "the passes must not wait for the device, and other streams that they use must begin after "
        "the caller's stream and end before it";

    void begin() {
        origin_ = rank_.caller();
        rank_.check(cudaGraphCreate(&graph_, 0), "cudaGraphCreate");
        // Relaxed, because NCCL may make calls that other modes forbid, also from another thread.
        refuse(
            cudaStreamBeginCaptureToGraph(
                origin_, graph_, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed
            ),
            "cudaStreamBeginCaptureToGraph",
            "give set_stream() a stream that is not the default one and captures nothing yet"
        );
        is_capturing_ = true;
    }
    void end() {
        note(engine_.list);
        order(rank_.stream(), origin_);
        cudaGraph_t same = nullptr;
        is_capturing_ = false;
        refuse(cudaStreamEndCapture(origin_, &same), "cudaStreamEndCapture", passes_advice);
        for (cudaGraphNode_t const node : engine_.list) {
            cudaGraphNodeType type{};
            rank_.check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
            if (type != cudaGraphNodeTypeKernel && type != cudaGraphNodeTypeMemcpy &&
                type != cudaGraphNodeTypeMemset) {
                throw ContractViolation{
                    "the passes of a captured step may launch only kernels, copies and memsets, which a "
                    "shadowing rank can disable, but they launch something else, such as a host function; "
                    "do that outside the passes"
                };
            }
        }
        rank_.check(
            cudaGraphInstantiateWithFlags(&executable_, graph_, 0), "cudaGraphInstantiateWithFlags"
        );
    }
    /// @throws ContractViolation  something in the passes has made the capture invalid.
    void require_capturing() const {
        CurrentCudaDevice const current{rank_.device(), std::nothrow};
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusInvalidated;
        static_cast<void>(cudaStreamIsCapturing(origin_, &status));
        if (status != cudaStreamCaptureStatusActive) {
            refuse(cudaErrorStreamCaptureInvalidated, "cudaStreamIsCapturing", passes_advice);
        }
    }
    /// @throws ContractViolation
    static void refuse(cudaError_t error, std::string_view call, std::string_view advice) {
        if (error != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            throw ContractViolation{concat(
                "a step cannot be captured: ",
                call,
                " says ",
                cudaGetErrorString(error),
                "; ",
                advice
            )};
        }
    }
    /// In the graph: later work on `later` depends on earlier work on `earlier`.
    void order(cudaStream_t earlier, cudaStream_t later) {
        if (earlier != later) {
            rank_.check(cudaEventRecord(event_.get(), earlier), "cudaEventRecord");
            rank_.check(cudaStreamWaitEvent(later, event_.get(), 0), "cudaStreamWaitEvent");
        }
    }
    /// Collects the nodes added since the last call.
    void note(std::vector<cudaGraphNode_t>& fresh) {
        std::size_t count = 0;
        rank_.check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
        std::vector<cudaGraphNode_t> all(count);
        if (count != 0) {
            rank_.check(cudaGraphGetNodes(graph_, all.data(), &count), "cudaGraphGetNodes");
        }
        for (cudaGraphNode_t const node : all) {
            if (seen_.insert(node).second) {
                fresh.push_back(node);
            }
        }
    }
    void enable(Nodes& nodes, bool is_enabled) {
        if (std::exchange(nodes.are_enabled, is_enabled) == is_enabled) {
            return;
        }
        for (cudaGraphNode_t const node : nodes.list) {
            rank_.check(
                cudaGraphNodeSetEnabled(executable_, node, is_enabled ? 1 : 0),
                "cudaGraphNodeSetEnabled"
            );
        }
    }

    NcclRank& rank_;
    bool checks_;
    CudaEvent event_;
    cudaStream_t origin_ = nullptr;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
    bool is_capturing_ = false;
    std::uint64_t collectives_ = 0;
    std::set<cudaGraphNode_t> seen_;
    Nodes engine_;
    Nodes zeros_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/nccl/captured_averages.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A CUDA graph of an engine's passes and the averages of their gradients. Each run reads the
/// rank's factor from device memory, so the factor may change from run to run. Kernels scale the
/// gradients in place before the sum. Without kernels NCCL scales them, by the factor in their dtype.
///
/// The communicator must outlive this object. One thread at a time may use it.
class NcclCapturedAverages {
public:
    explicit NcclCapturedAverages(NcclCollectives& comm)
        : device_{comm.device_memory()}, graph_{comm},
          staging_{device_.allocate_staging(max_turns * sizeof(Factors))},
          factors_{device_.allocate(sizeof(Factors), Arena::default_alignment)} {}
    NcclCapturedAverages(NcclCapturedAverages const&) = delete;
    NcclCapturedAverages& operator=(NcclCapturedAverages const&) = delete;
    /// Waits for unfinished runs, and for what was posted beside them, up to the deadline. During
    /// unwinding it aborts unfinished runs.
    ~NcclCapturedAverages() {
        for (NcclLaunch*& turn : turns_) {
            try {
                if (unwinding_.has_begun() && turn != nullptr && !turn->is_final()) {
                    abort_for_exception(graph_.rank(), "a captured step");
                }
                end(turn);
            } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
            }
        }
        try { // freeing memory waits for all work of the device, and has no deadline
            graph_.rank().finish_launches();
        } catch (...) { // NOLINT(bugprone-empty-catch): the failure has ended it on all ranks
        }
    }

    /// @throws ContractViolation  the gradient is not in memory that the device's collectives move.
    void check(Buffer gradient) const {
        check_memory(gradient);
        graph_.rank().check_memory(gradient);
    }

    /// A factor that all ranks are about to give. @throws ContractViolation  see check_rounding()
    void check_factor(double factor, DType dtype) const {
        if (!device_.can_scale()) {
            check_rounding(factor, dtype);
        }
    }

    /// Whether there is a graph. One from before the device got its kernels does not count.
    [[nodiscard]] bool is_captured() const noexcept {
        return graph_.is_captured() && has_kernels_ == device_.can_scale();
    }
    /// See NcclGraph::capture. `body` calls add() where a gradient is final.
    template <class Body>
    void capture(Body const& body) {
        has_kernels_ = device_.can_scale();
        graph_.capture(body);
    }
    /// Within capture(): averages a gradient of a floating-point dtype.
    void add(Buffer gradient) {
        RequestsOf const requests{graph_.rank().rank(), graph_.rank().size()};
        if (has_kernels_) { // with factor 0 they write zeros
            Request const request = requests.all_reduce(gradient, ReduceOp::sum);
            graph_.add(request, false, [&](NcclCalls const& nccl, cudaStream_t stream) {
                scale(gradient, stream);
                return nccl.collective(request);
            });
        } else { // factor 0 would keep a NaN
            Request const request = requests.all_reduce(gradient, ReduceOp::sum, 1.0);
            graph_.add(request, true, [&](NcclCalls const& nccl, cudaStream_t) {
                return nccl.scaled_all_reduce(gradient, factor_at(gradient.dtype));
            });
        }
    }

    /// Runs the graph after the work on the caller's stream; later work on that stream follows it.
    /// A shadow runs none of the engine's nodes. With factor 0 this rank contributes zeros. The host
    /// waits while it is four runs ahead. @pre is_captured()
    void run(double factor, bool is_shadow) {
        graph_.rank().require_no_error(); // waits below would replace it
        graph_.set_role(is_shadow, factor == 0.0);
        NcclLaunch*& turn = turns_[next_];
        std::byte* const staged = staging_.data() + next_ * sizeof(Factors);
        next_ = (next_ + 1) % turns_.size();
        end(turn);
        Factors factors{};
        for (std::size_t index = 0; index < factors.size(); ++index) {
            if (auto const dtype = static_cast<DType>(index); is_floating_point(dtype)) {
                factors[index] = nccl_scalar(dtype, factor);
            }
        }
        std::memcpy(staged, &factors, sizeof(Factors));
        turn = &graph_.launch([&](cudaStream_t stream) {
            graph_.rank().check(
                cudaMemcpyAsync(
                    factors_.data(), staged, sizeof(Factors), cudaMemcpyHostToDevice, stream
                ),
                "cudaMemcpyAsync"
            );
        });
        graph_.rank().order_before(*turn, graph_.rank().caller());
    }

    /// Writes zeros to a gradient after the work on the caller's stream.
    void zero(Buffer gradient) {
        NcclRank& rank = graph_.rank();
        rank.on_device([&] {
            check_cuda(
                cudaMemsetAsync(gradient.data, 0, gradient.bytes(), rank.caller()),
                "cudaMemsetAsync"
            );
        });
    }

    /// Forgets the graph; unfinished runs continue.
    void release_kernels() noexcept { graph_.release_kernels(); }

private:
    /// The factor in each dtype that gradients have, indexed by dtype.
    using Factors = std::array<NcclScalar, dtype_count>;
    static constexpr std::size_t max_turns = 4; ///< how many runs the host may be ahead

    [[nodiscard]] void* factor_at(DType dtype) const noexcept {
        return factors_.data() + static_cast<std::size_t>(dtype) * sizeof(NcclScalar);
    }
    /// Launches a kernel that multiplies a gradient by the factor in device memory.
    void scale(Buffer gradient, cudaStream_t stream) {
        AnyView const view{gradient.data, gradient.dtype, {gradient.count}, {1}, device_.id()};
        CudaCopy copy = cuda_copy(view.data(), view.strides(), 1.0, view);
        copy.factor_at = static_cast<double const*>(factor_at(DType::f64));
        graph_.rank().on_device([&] {
            CurrentCudaDevice const current{graph_.rank().device()};
            require_cuda(device_.kernels().run(&copy, 1, stream), "a kernel");
        });
    }
    void end(NcclLaunch*& turn) {
        if (NcclLaunch* const launch = std::exchange(turn, nullptr)) {
            graph_.rank().release(*launch);
            graph_.rank().synchronize(*launch);
        }
    }

    CudaDevice& device_;
    bool has_kernels_ = false; ///< when the graph was captured
    NcclGraph graph_;
    Arena staging_; ///< on the host, per turn, as a launch may read it late
    Arena factors_; ///< on the device, for the graphs; freed first, which waits for them
    std::array<NcclLaunch*, max_turns> turns_{}; ///< unfinished, or null
    std::size_t next_ = 0;
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/captured/captured_step.hpp

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

// ---- joinable/nccl_graphs.hpp

/// @file
/// Opt-in: steps as CUDA graphs, over NCCL. Needs CUDA 12.3 and everything that <joinable/nccl.hpp>
/// needs. Tested over fake CUDA and NCCL libraries, and on one H200.
