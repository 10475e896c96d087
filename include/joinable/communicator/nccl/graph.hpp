// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
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
#include <joinable/communicator/nccl/detail/check.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A CUDA graph of what an engine launches on the caller's stream, and of collectives between that.
/// It can run with the collectives alone, on zeros: then the engine's nodes are switched off, and
/// others on that make the zeros. NCCL asks that all ranks run what they captured together, so it is
/// one graph in both roles, and all ranks capture in the same place of their program.
///
/// It refers to its communicator, which it must not outlive. Needs CUDA 12.3.
class NcclGraph final : public HoldsNcclKernels {
public:
    explicit NcclGraph(NcclCollectives& comm) : rank_{comm.rank_}, checks_{comm.checks_} {
        rank_.check(
            cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"
        );
        rank_.hold(*this);
    }
    NcclGraph(NcclGraph const&) = delete;
    NcclGraph& operator=(NcclGraph const&) = delete;
    ~NcclGraph() {
        rank_.unhold(*this);
        release_kernels();
        static_cast<void>(cudaEventDestroy(event_));
    }

    [[nodiscard]] NcclRank& rank() const noexcept { return rank_; }
    [[nodiscard]] bool is_captured() const noexcept { return executable_ != nullptr; }

    /// Collective, though nothing is sent. What `body()` launches on the caller's stream does not run:
    /// it becomes the graph, and so do the collectives that it gives to add(). Nothing is left of a
    /// graph when it throws.
    /// @throws ContractViolation  the caller's stream cannot be captured, or what it was given cannot
    ///         be switched off.
    template <class Body>
    void capture(Body const& body) {
        rank_.begin_call();
        release_kernels();
        try {
            begin();
            body();
            end();
        } catch (...) {
            release_kernels();
            throw;
        }
    }
    /// Within capture(): `issue(NcclCalls)` gives NCCL a collective, in place, of a buffer of which
    /// a shadow makes zeros before.
    template <class Issue>
    void add(Request const& request, Issue const& issue) {
        if (checks_) {
            agree_on_collective(rank_, request);
        }
        Buffer const& buffer = request.out;
        cudaStream_t const stream = rank_.stream();
        note(engine_);
        order(origin_, stream);
        rank_.check(cudaMemsetAsync(buffer.data, 0, buffer.bytes(), stream), "cudaMemsetAsync");
        note(zeros_);
        NcclCalls const nccl{rank_.handle(), stream, rank_.size()};
        rank_.check(issue(nccl), name_of(request.signature.collective));
        rank_.finish_call("captures a collective"); // NCCL may do it by a thread of its own
        std::vector<cudaGraphNode_t> of_nccl;
        note(of_nccl);
        ++collectives_;
    }

    /// From the next launch on. @pre is_captured()
    void set_shadow(bool is_shadow) {
        if (role_ == (is_shadow ? Role::shadow : Role::engine)) {
            return;
        }
        enable(engine_, !is_shadow);
        enable(zeros_, is_shadow);
        role_ = is_shadow ? Role::shadow : Role::engine;
    }
    /// Behind what is on the caller's stream and what `before(stream)` launches. The launch has one
    /// user. @pre set_shadow() was called.
    template <class Before>
    [[nodiscard]] NcclLaunch& launch(Before const& before) {
        rank_.begin_call();
        return rank_.post(collectives_, [&] {
            before(rank_.stream());
            rank_.check(cudaGraphLaunch(executable_, rank_.stream()), "cudaGraphLaunch");
        });
    }

    /// Launches that are under way go on.
    void release_kernels() noexcept override {
        if (std::exchange(is_capturing_, false)) {
            cudaGraph_t same = nullptr;
            static_cast<void>(cudaStreamEndCapture(origin_, &same));
        }
        if (executable_ != nullptr) {
            static_cast<void>(cudaGraphExecDestroy(std::exchange(executable_, nullptr)));
        }
        if (graph_ != nullptr) {
            static_cast<void>(cudaGraphDestroy(std::exchange(graph_, nullptr)));
        }
        static_cast<void>(cudaGetLastError()); // of a capture that failed: nobody is to find it
        seen_.clear();
        engine_.clear();
        zeros_.clear();
        role_ = Role::none;
        collectives_ = 0;
    }

private:
    enum class Role : std::uint8_t { none, engine, shadow };

    void begin() {
        origin_ = rank_.caller();
        rank_.check(cudaGraphCreate(&graph_, 0), "cudaGraphCreate");
        // Relaxed: NCCL may call what no other mode allows, and from another thread.
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
        note(engine_);
        order(rank_.stream(), origin_);
        cudaGraph_t same = nullptr;
        is_capturing_ = false;
        refuse(
            cudaStreamEndCapture(origin_, &same),
            "cudaStreamEndCapture",
            "the passes launch, and wait for nothing; streams that they use beside the caller's "
            "begin "
            "behind it and end before it"
        );
        for (cudaGraphNode_t const node : engine_) {
            cudaGraphNodeType type{};
            rank_.check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
            if (type != cudaGraphNodeTypeKernel && type != cudaGraphNodeTypeMemcpy &&
                type != cudaGraphNodeTypeMemset) {
                throw ContractViolation{"the passes of a captured step launch kernels, copies and "
                                        "memsets, which a rank "
                                        "that shadows switches off, but they hold something else, "
                                        "such as a function of "
                                        "the host; do that outside the passes"};
            }
        }
        rank_.check(
            cudaGraphInstantiateWithFlags(&executable_, graph_, 0), "cudaGraphInstantiateWithFlags"
        );
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
    /// In the graph: what comes on `later` from now on depends on what is on `earlier`.
    void order(cudaStream_t earlier, cudaStream_t later) {
        if (earlier != later) {
            rank_.check(cudaEventRecord(event_, earlier), "cudaEventRecord");
            rank_.check(cudaStreamWaitEvent(later, event_, 0), "cudaStreamWaitEvent");
        }
    }
    /// Adds the nodes that have come since the last call.
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
    void enable(std::vector<cudaGraphNode_t> const& nodes, bool is_enabled) {
        for (cudaGraphNode_t const node : nodes) {
            rank_.check(
                cudaGraphNodeSetEnabled(executable_, node, is_enabled ? 1 : 0),
                "cudaGraphNodeSetEnabled"
            );
        }
    }

    NcclRank& rank_;
    bool checks_;
    cudaEvent_t event_ = nullptr;
    cudaStream_t origin_ = nullptr;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
    bool is_capturing_ = false;
    Role role_ = Role::none; ///< which nodes are switched on
    std::uint64_t collectives_ = 0;
    std::set<cudaGraphNode_t> seen_;
    std::vector<cudaGraphNode_t> engine_;
    std::vector<cudaGraphNode_t> zeros_;
};

}}} // namespace joinable::v0::detail
