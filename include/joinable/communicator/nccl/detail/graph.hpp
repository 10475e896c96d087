// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/detail/calls.hpp>
#include <joinable/communicator/nccl/detail/post.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/error.hpp>

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
