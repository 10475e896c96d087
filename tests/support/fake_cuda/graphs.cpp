// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/capture.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/runtime.hpp>

namespace joinable_tests::fake_cuda {

namespace {

cudaGraph_t new_graph() {
    auto* const graph = new CUgraph_st;
    std::lock_guard const lock{runtime().mutex};
    runtime().graphs.insert(graph);
    return graph;
}
bool forget_graph(cudaGraph_t graph) {
    {
        std::lock_guard const lock{runtime().mutex};
        if (runtime().graphs.erase(graph) == 0) {
            return false;
        }
    }
    delete graph;
    return true;
}
cudaError_t
begin_capture(cudaStream_t stream, cudaGraph_t graph, bool owns_graph, cudaStreamCaptureMode mode) {
    auto const found = runtime().find(stream);
    if (stream == nullptr || found->is_capturing) {
        return cudaErrorStreamCaptureUnsupported;
    }
    found->capture = std::make_shared<Capture>();
    Capture& capture = *found->capture;
    capture.origin = stream;
    capture.graph = graph;
    capture.owns_graph = owns_graph;
    capture.device = found->device;
    capture.mode = mode;
    capture.thread = std::this_thread::get_id();
    capture.streams[found.get()];
    found->is_capturing = true;
    std::lock_guard const lock{runtime().mutex};
    runtime().captures.insert(found->capture);
    return cudaSuccess;
}

} // namespace

bool capture(cudaStream_t stream, std::function<std::function<void()>()> const& work_of_launch) {
    auto const found = runtime().find(stream);
    if (!found->is_capturing) {
        return false;
    }
    found->capture->add(found.get(), cudaGraphNodeTypeKernel, work_of_launch);
    return true;
}
std::size_t live_graphs() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().graphs.size() + runtime().executables.size();
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return call("cudaStreamIsCapturing", [&]() -> cudaError_t {
        auto const found = runtime().find(stream);
        for (auto const& other : runtime().ordered_with(*found)) {
            if (found->is_legacy && other->is_capturing) {
                return cudaErrorStreamCaptureImplicit; // which leaves that capture as it is
            }
        }
        *status = !found->is_capturing         ? cudaStreamCaptureStatusNone
                  : found->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                               : cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    capture_mode = std::exchange(*mode, capture_mode); // a number of the thread: nothing can fail
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return call("cudaStreamBeginCapture", [&]() -> cudaError_t {
        cudaGraph_t const graph = new_graph();
        auto const error = begin_capture(stream, graph, true, mode);
        if (error != cudaSuccess) {
            forget_graph(graph);
        }
        return error;
    });
}
cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t stream,
    cudaGraph_t graph,
    cudaGraphNode_t const*,
    cudaGraphEdgeData const*,
    std::size_t,
    cudaStreamCaptureMode mode
) {
    return call("cudaStreamBeginCaptureToGraph", [&]() -> cudaError_t {
        return begin_capture(stream, graph, false, mode);
    });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    return call("cudaStreamEndCapture", [&]() -> cudaError_t {
        auto const found = runtime().find(stream);
        if (!found->is_capturing || found->capture->origin != stream) {
            return cudaErrorIllegalState;
        }
        auto const capture = found->capture;
        if (capture->mode != cudaStreamCaptureModeRelaxed &&
            capture->thread != std::this_thread::get_id()) {
            return cudaErrorStreamCaptureWrongThread;
        }
        *graph = capture->graph;
        bool const is_joined = capture->is_joined();
        for (auto const& [other, clock] : capture->streams) {
            other->is_capturing = false;
            other->capture = nullptr;
        }
        {
            std::lock_guard const lock{runtime().mutex};
            runtime().captures.erase(capture);
        }
        if (is_joined && !capture->is_invalid) {
            return cudaSuccess;
        }
        if (cudaGraph_t const lost = std::exchange(*graph, nullptr); capture->owns_graph) {
            forget_graph(lost);
        }
        return capture->is_invalid ? cudaErrorStreamCaptureInvalidated
                                   : cudaErrorStreamCaptureUnjoined;
    });
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned int) {
    return call("cudaGraphCreate", [&]() -> cudaError_t {
        *graph = new_graph();
        return cudaSuccess;
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return call("cudaGraphDestroy", [&]() -> cudaError_t {
        if (!forget_graph(graph)) {
            die("cudaGraphDestroy of a graph that was destroyed, or is none");
        }
        return cudaSuccess;
    });
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
    return call("cudaGraphGetNodes", [&]() -> cudaError_t {
        if (nodes == nullptr) {
            *count = graph->nodes.size();
            return cudaSuccess;
        }
        for (std::size_t i = 0; i < *count; ++i) {
            nodes[i] = i < graph->nodes.size() ? graph->nodes[i].get() : nullptr;
        }
        return cudaSuccess;
    });
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
    return call("cudaGraphNodeGetType", [&]() -> cudaError_t {
        *type = node->type;
        return cudaSuccess;
    });
}
cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    return call("cudaGraphInstantiateWithFlags", [&]() -> cudaError_t {
        *executable = new CUgraphExec_st;
        for (auto const& node : graph->nodes) {
            (*executable)->nodes.push_back({node});
        }
        std::lock_guard const lock{runtime().mutex};
        runtime().executables.insert(*executable);
        return cudaSuccess;
    });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    return call("cudaGraphExecDestroy", [&]() -> cudaError_t {
        {
            std::lock_guard const lock{runtime().mutex};
            if (runtime().executables.erase(executable) == 0) {
                die("cudaGraphExecDestroy of an executable that was destroyed, or is none");
            }
        }
        delete executable;
        return cudaSuccess;
    });
}
cudaError_t
cudaGraphNodeSetEnabled(cudaGraphExec_t executable, cudaGraphNode_t node, unsigned int is_enabled) {
    return call("cudaGraphNodeSetEnabled", [&]() -> cudaError_t {
        if (node->type != cudaGraphNodeTypeKernel && node->type != cudaGraphNodeTypeMemcpy &&
            node->type != cudaGraphNodeTypeMemset) {
            return cudaErrorInvalidValue;
        }
        for (auto& own : executable->nodes) {
            if (own.node.get() == node) {
                own.is_enabled = is_enabled != 0;
                return cudaSuccess;
            }
        }
        return cudaErrorInvalidValue;
    });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return call("cudaGraphLaunch", [&]() -> cudaError_t {
        for (auto const& [node, is_enabled] : executable->nodes) {
            if (is_enabled) {
                if (auto const error = launch(stream, node->make()); error != cudaSuccess) {
                    return error;
                }
            }
        }
        return cudaSuccess;
    });
}

} // extern "C"
