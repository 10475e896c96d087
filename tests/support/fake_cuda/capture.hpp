// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

/// @file
/// Graphs of the fake: what is launched while streams capture, in that order, which is one of those
/// that the edges between them allow. A launch of a graph runs its nodes one by one.

namespace joinable_tests::fake_cuda {

/// Asked at each launch of its graph for what runs then.
using MakeWork = std::function<std::function<void()>()>;

/// How many nodes of each stream come before something.
using Clock = std::map<CUstream_st const*, std::size_t>;

inline void merge(Clock& clock, Clock const& other) {
    for (auto const& [stream, count] : other) {
        clock[stream] = clock[stream] < count ? count : clock[stream];
    }
}

} // namespace joinable_tests::fake_cuda

/// The runtime's header declares these in the global namespace and leaves them to us.
struct CUgraphNode_st {
    cudaGraphNodeType type;
    joinable_tests::fake_cuda::MakeWork make;
};
struct CUgraph_st {
    std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
};
struct CUgraphExec_st {
    struct Node {
        std::shared_ptr<CUgraphNode_st> node;
        bool is_enabled = true;
    };
    std::vector<Node> nodes;
};

namespace joinable_tests::fake_cuda {

/// What streams that capture together have in common. One thread at a time uses it, but any thread
/// may invalidate it.
struct Capture {
    cudaStream_t origin;
    cudaGraph_t graph;
    bool owns_graph;
    int device;
    cudaStreamCaptureMode mode;            ///< said when it began
    std::thread::id thread;                ///< that began it
    std::map<CUstream_st*, Clock> streams; ///< that take part, and what each is behind
    std::atomic<bool> is_invalid{false};

    void add(CUstream_st* stream, cudaGraphNodeType type, MakeWork make) {
        graph->nodes.push_back(
            std::make_shared<CUgraphNode_st>(CUgraphNode_st{type, std::move(make)})
        );
        ++streams[stream][stream];
    }
    /// Whether the stream that began it is behind all that others were given.
    [[nodiscard]] bool is_joined() {
        Clock const seen = streams[origin];
        for (auto const& [stream, clock] : streams) {
            auto const own = clock.find(stream);
            auto const found = seen.find(stream);
            if (own != clock.end() && (found == seen.end() || found->second < own->second)) {
                return false;
            }
        }
        return true;
    }
};

} // namespace joinable_tests::fake_cuda
