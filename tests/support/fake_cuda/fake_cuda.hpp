// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include <cuda_runtime_api.h>

/// @file
/// A CUDA runtime for machines without a GPU, linked in the place of libcudart: the sources beside
/// this header define the functions of <cuda_runtime_api.h> that the library and its tests call.
///
/// What it does, beside what NVIDIA's manual says of each function:
/// - Devices (8, or as set_device_count says) are host memory. Allocated memory is full of
///   `poison`, and so is memory before it is freed: code that relies on zeros, or reads too early, gets nonsense.
/// - Code of the host cannot reach a device's memory: the touch ends the program with a sentence (guarded.hpp).
/// - Each stream is a thread that runs closures in order. All copies are asynchronous, those from and
///   to pageable memory too; but before one from pageable memory the host waits for the stream, as the
///   runtime may. So it is harsher than a GPU in both ways.
/// - Each device has a null stream, the legacy one: what is put on it runs behind everything that is on
///   the blocking streams of its device, and what is put on these runs behind it.
/// - Kernels are launched on streams of the current device only, and an event is recorded on streams of
///   the device that was current when it was made.
/// - A capture forbids calls as its mode and those of other threads say, and becomes invalid by them.
/// - Memory that was allocated in stream order is poisoned when the stream comes to it.
/// - What is launched while a stream captures becomes a node of its graph; a graph's nodes run one by
///   one, in the order in which they were captured.
/// - What is undefined ends the program with a message: a stream, event or graph that was destroyed.
/// - After an error that leaves a process in an inconsistent state, as cudaErrorIllegalAddress, all
///   calls of the thread give it, as a rank that is a thread stands for a process.
/// - No kernels.
/// README.md has a table of what each call returns.
namespace joinable_tests::fake_cuda {

inline constexpr int poison = 0xcd; ///< what a byte that nobody wrote holds

/// The calling thread runs code of a device while this lives, as a kernel: it reaches device memory. For a test that
/// looks at such memory, or fills it, while no stream is at work on it.
class DeviceCode {
public:
    DeviceCode();
    DeviceCode(DeviceCode const&) = delete;
    DeviceCode& operator=(DeviceCode const&) = delete;
    ~DeviceCode();

    /// Called where it touches an address: whether it is to try again.
    bool open(void* address);

private:
    struct Opened {
        std::byte* data;
        std::uint64_t number;
    };

    DeviceCode* outer_;
    std::array<Opened, 256> opened_;
    std::size_t count_ = 0;
    void* not_found_ = nullptr;
};

/// Launches a kernel: runs `work` on the stream, after what is there. Null: the null stream of the
/// current device. For other fakes, whose kernels may wait for each other: each stream has a thread of
/// its own.
/// @throws std::runtime_error  the stream is of another device than the current one, a capture is
///                             invalid by it or was before, or this thread is left with an error for
///                             good.
void enqueue(cudaStream_t stream, std::function<void()> work);
/// The same for a library that makes a device current before.
void enqueue(int device, cudaStream_t stream, std::function<void()> work);
/// Where the stream captures: a node that at each launch of its graph is asked for what runs then.
/// Returns whether it captures.
bool capture(cudaStream_t stream, std::function<std::function<void()>()> const& work_of_launch);
/// Whether everything that is on the stream has run.
[[nodiscard]] bool is_idle(cudaStream_t stream);
/// Waits until all streams are idle, those that were destroyed included.
void drain();

/// Device and pinned memory that was neither freed nor is on its way to be.
[[nodiscard]] std::size_t live_allocations();
[[nodiscard]] std::size_t live_streams();
[[nodiscard]] std::size_t live_events();
/// Graphs, and what was instantiated of them.
[[nodiscard]] std::size_t live_graphs();
/// Whether all of [data, data + bytes) is in one allocation of a device that is alive.
[[nodiscard]] bool is_device_memory(void const* data, std::size_t bytes = 1);

/// From now on each stream waits so long before each operation; zero at start.
void delay_every_operation(std::chrono::nanoseconds delay);
/// The calling thread's next call that can fail does, after `later` more that do not, without doing
/// anything else.
void fail_next(cudaError_t error, std::size_t later = 0);
/// The calling thread's process was terminated and begins anew, after an error that stays.
void relaunch();
/// Forgets what fail_next() said, if it was not reached. Returns whether it was reached.
bool has_failed();
void set_device_count(int count);
/// Whether cudaMallocAsync works: true at start, false on systems without memory pools.
void set_memory_pools(bool has);
/// How often a function was called in this process since the start, by its name.
[[nodiscard]] std::size_t calls(char const* function);

} // namespace joinable_tests::fake_cuda
