// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/guarded.hpp>
#include <support/fake_cuda/stream.hpp>

/// @file
/// What the files of the fake have in common: everything that is alive, and what each call does first.

namespace joinable_tests::fake_cuda {

/// Ends the program: nothing that a test does may come to this.
[[noreturn]] void die(std::string const& text);
/// What every call of this thread gives from now on, as it leaves its process in an inconsistent state.
[[nodiscard]] cudaError_t sticky_error();

inline thread_local int current_device = 0;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

struct Allocation {
    std::size_t bytes;
    int device;
    cudaMemoryType type;
    int file = -1;             ///< the memory's own, once another process may open it
    bool is_of_a_pool = false; ///< then none may
};
/// Memory of another process, from cudaIpcOpenMemHandle.
struct Opened {
    std::byte* data;
    std::size_t bytes;
    int file;
    std::size_t times;
};

/// Takes shared pages from an allocation, whose memory is the process's own again.
void unshare(std::byte* data, Allocation const& allocation);

/// All that is alive. Never destroyed: threads of streams may outlive main().
struct Runtime {
    std::mutex mutex;
    std::condition_variable closed;
    std::map<std::byte*, Allocation> allocations;
    std::map<CUstream_st*, std::shared_ptr<CUstream_st>> streams;
    std::set<std::shared_ptr<CUstream_st>> closing;
    std::set<CUevent_st*> events;
    std::set<CUgraph_st*> graphs;
    std::set<CUgraphExec_st*> executables;
    std::map<std::pair<std::uint64_t, int>, Opened> opened; ///< by the file's inode and the device
    std::map<std::string, std::size_t> calls;
    std::map<int, std::shared_ptr<CUstream_st>> null_streams; ///< by device
    std::set<std::shared_ptr<Capture>> captures;
    int devices = 8;
    bool has_pools = true;

    std::shared_ptr<CUstream_st> start(int device, unsigned int flags, bool is_legacy = false) {
        auto stream = std::make_shared<CUstream_st>(device, flags, is_legacy);
        std::thread{[this, stream] {
            stream->run();
            std::lock_guard const lock{mutex};
            closing.erase(stream);
            closed.notify_all();
        }}.detach();
        return stream;
    }
    std::shared_ptr<CUstream_st> find(cudaStream_t stream) {
        std::lock_guard const lock{mutex};
        if (stream == nullptr) {
            auto& null_stream = null_streams[current_device];
            if (!null_stream) {
                null_stream = start(current_device, cudaStreamDefault, true);
            }
            return null_stream;
        }
        auto const found = streams.find(stream);
        if (found == streams.end()) {
            die("a stream that was destroyed, or is none, is undefined behaviour");
        }
        return found->second;
    }
    std::vector<std::shared_ptr<CUstream_st>> all_streams() {
        std::lock_guard const lock{mutex};
        std::vector<std::shared_ptr<CUstream_st>> all(closing.begin(), closing.end());
        for (auto const& [handle, stream] : streams) {
            all.push_back(stream);
        }
        for (auto const& [device, stream] : null_streams) {
            all.push_back(stream);
        }
        return all;
    }
    /// Those that the null stream of a device is ordered with, or that null stream for one of these.
    std::vector<std::shared_ptr<CUstream_st>> ordered_with(CUstream_st const& stream) {
        auto all = all_streams();
        std::erase_if(all, [&](auto const& other) {
            return other->device != stream.device ||
                   !(stream.is_legacy ? other->is_blocking()
                                      : stream.is_blocking() && other->is_legacy);
        });
        return all;
    }
    std::vector<std::shared_ptr<Capture>> all_captures() {
        std::lock_guard const lock{mutex};
        return {captures.begin(), captures.end()};
    }
    void wait_until_idle(int device) {
        for (auto const& stream : all_streams()) {
            if (stream->device == device) {
                stream->wait_until_idle();
            }
        }
    }
    /// The allocation that has an address in it.
    std::map<std::byte*, Allocation>::iterator containing(void const* address) {
        auto const* const byte = static_cast<std::byte const*>(address);
        auto found = allocations.upper_bound(const_cast<std::byte*>(byte));
        if (found == allocations.begin()) {
            return allocations.end();
        }
        --found;
        return byte < found->first + found->second.bytes ? found : allocations.end();
    }
    /// The device on which memory of another process is open here.
    [[nodiscard]] std::optional<int> device_of_opened(void const* address) const {
        auto const* const byte = static_cast<std::byte const*>(address);
        for (auto const& [key, one] : opened) {
            if (byte >= one.data && byte < one.data + one.bytes) {
                return key.second;
            }
        }
        return std::nullopt;
    }
    std::byte* allocate(std::size_t bytes, int device, cudaMemoryType type) {
        // More than cudaMalloc's 256: the pages are the allocation's alone, so that they can be shared.
        constexpr std::size_t alignment = 4096;
        std::size_t const room = (bytes + alignment - 1) / alignment * alignment;
        auto* const data = static_cast<std::byte*>(std::aligned_alloc(alignment, room));
        if (data != nullptr) {
            std::lock_guard const lock{mutex};
            allocations[data] = {bytes, device, type};
        }
        return data;
    }
    /// Forgets an allocation of the host's or of a device's. Returns its size, or -1 where there is none.
    std::ptrdiff_t forget(void* data, bool of_host) {
        std::lock_guard const lock{mutex};
        auto const found = allocations.find(static_cast<std::byte*>(data));
        if (found == allocations.end() || (found->second.type == cudaMemoryTypeHost) != of_host) {
            return -1;
        }
        auto const bytes = static_cast<std::ptrdiff_t>(found->second.bytes);
        Allocation const forgotten = found->second;
        allocations.erase(found);
        unguard(static_cast<std::byte*>(data)
        ); // a kernel may still use what the stream frees later
        if (forgotten.file >= 0) {
            unshare(static_cast<std::byte*>(data), forgotten);
        }
        return bytes;
    }
};

inline Runtime& runtime() {
    static auto* const all = new Runtime;
    return *all;
}

/// An error is the calling thread's last one from then on. Returns it.
cudaError_t give(cudaError_t error);
/// What every call does: counts itself, fails where it was told to, and else gives what `body()`
/// returns.
[[nodiscard]] cudaError_t call(char const* function, std::function<cudaError_t()> const& body);

/// Puts work on a stream, or in the graph that it captures. What is not a kernel may be put on a
/// stream of any device.
[[nodiscard]] cudaError_t launch(
    cudaStream_t handle,
    std::function<void()> work,
    cudaGraphNodeType type = cudaGraphNodeTypeMemcpy
);
/// Whether the null stream can be used: not while a blocking stream of its device captures, which
/// then is invalid.
[[nodiscard]] cudaError_t usable(CUstream_st const& stream);
/// `stream` where the host may wait for it.
[[nodiscard]] cudaError_t waitable(cudaStream_t handle, std::shared_ptr<CUstream_st>& stream);
/// The last record of an event; refuses events that do not exist.
[[nodiscard]] cudaError_t last_record(cudaEvent_t event, std::shared_ptr<Milestone>& record);

} // namespace joinable_tests::fake_cuda
