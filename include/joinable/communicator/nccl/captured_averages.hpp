// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/calls.hpp>
#include <joinable/communicator/nccl/detail/graph.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/copy.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

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
