// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>

#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

/// @file
/// The common parts of calls of the CUDA runtime: their errors, the device on which they act, captures
/// of other threads, and memory that goes back.

namespace joinable { inline namespace v0 { namespace detail {

/// @throws CommunicationError
inline void require_cuda(cudaError_t error, std::string_view call) {
    if (error != cudaSuccess) {
        static_cast<void>(cudaGetLastError()); // or the next call that asks finds it
        throw CommunicationError{
            concat(call, " failed: ", cudaGetErrorName(error), ", ", cudaGetErrorString(error))
        };
    }
}

/// Whether an earlier call or launch of this thread failed, and nobody has asked for the error. That
/// something is not complete yet is no error.
[[nodiscard]] inline bool has_cuda_error() noexcept {
    cudaError_t const last = cudaPeekAtLastError();
    return last != cudaSuccess && last != cudaErrorNotReady;
}
/// Nothing else tells that a launch of the engine failed, and a query of work that is not complete would
/// replace the error. Forgets it. An error that stays is for the next call to tell.
/// @throws ContractViolation
inline void require_no_cuda_error() {
    if (!has_cuda_error()) {
        return;
    }
    cudaError_t const last = cudaGetLastError();
    if (cudaPeekAtLastError() == cudaSuccess) {
        throw ContractViolation{concat(
            "an earlier call of CUDA in this thread failed, or a launch, and nobody has asked for the "
            "error: ",
            cudaGetErrorString(last),
            "; ask cudaGetLastError() after launches"
        )};
    }
}

/// Every call of CUDA or NCCL is made while such an object lives, in any thread of an engine:
/// - A device is the current one of the thread. Events are made on it, the null stream is its own, and
///   NCCL launches kernels of one rank on it.
/// - A CUDA graph that another thread captures does not forbid calls that it does not concern, such as
///   queries of events, and they do not break it.
/// - The calls leave no error to the thread. An error of the engine from before stays, unless a call
///   replaces it: see require_no_cuda_error().
class CurrentCudaDevice {
public:
    /// @throws CommunicationError  the device cannot be used.
    explicit CurrentCudaDevice(int index) {
        require_cuda(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != index) {
            require_cuda(cudaSetDevice(index), "cudaSetDevice");
            is_changed_ = true;
        }
        relax();
    }
    /// For calls that then fail themselves, or give things back: does what it can.
    CurrentCudaDevice(int index, std::nothrow_t) noexcept {
        is_changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != index &&
                      cudaSetDevice(index) == cudaSuccess;
        relax();
    }
    CurrentCudaDevice(CurrentCudaDevice const&) = delete;
    CurrentCudaDevice& operator=(CurrentCudaDevice const&) = delete;
    ~CurrentCudaDevice() {
        if (is_relaxed_) {
            static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
        }
        if (is_changed_) {
            static_cast<void>(cudaSetDevice(before_));
        }
        if (!leaves_error_ && cudaPeekAtLastError() != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
        }
    }

private:
    void relax() noexcept {
        is_relaxed_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
    }

    bool leaves_error_ = has_cuda_error();
    int before_ = 0;
    bool is_changed_ = false;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    bool is_relaxed_ = false;
};

struct DestroysInCuda {
    void operator()(cudaEvent_t event) const noexcept {
        static_cast<void>(cudaEventDestroy(event));
    }
    void operator()(cudaStream_t stream) const noexcept {
        static_cast<void>(cudaStreamDestroy(stream));
    }
};
using CudaEvent = std::unique_ptr<CUevent_st, DestroysInCuda>;
using CudaStream = std::unique_ptr<CUstream_st, DestroysInCuda>;

/// An event that orders work; it measures no time.
[[nodiscard]] inline cudaError_t make_event(CudaEvent& event) noexcept {
    cudaEvent_t made = nullptr;
    cudaError_t const error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    event.reset(made);
    return error;
}
/// A stream that does not wait for the null stream.
[[nodiscard]] inline cudaError_t make_stream(CudaStream& stream) noexcept {
    cudaStream_t made = nullptr;
    cudaError_t const error = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    stream.reset(made);
    return error;
}

/// Whether work on the stream goes into a CUDA graph, or, on the null stream, cannot be: a stream that
/// waits for it captures one. @throws CommunicationError  the runtime refuses otherwise.
[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    cudaError_t const error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaErrorStreamCaptureImplicit) {
        static_cast<void>(cudaGetLastError());
        return true;
    }
    require_cuda(error, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

/// Calls f(), which may never return, on a thread of its own. Returns the result, or nothing if `time`
/// passes before: the thread then goes on alone, and f keeps what it needs.
/// @throws std::system_error, std::bad_alloc  there is no thread; f() was not called.
template <class F>
[[nodiscard]] std::optional<std::invoke_result_t<F&>>
run_within(std::chrono::nanoseconds time, F f) {
    auto const task =
        std::make_shared<std::packaged_task<std::invoke_result_t<F&>()>>(std::move(f));
    auto result = task->get_future();
    std::thread{[task] { (*task)(); }}.detach();
    constexpr std::chrono::nanoseconds longest =
        std::chrono::hours{24 * 365}; // the clock's sum fits
    if (result.wait_for((std::min)(time, longest)) != std::future_status::ready) {
        return std::nullopt;
    }
    return result.get();
}

/// For a thread of our own, which ends soon: it works on a device, and leaves captures of others alone.
/// Another device that it set, even the one from before, would get a context.
inline void use_cuda_device(int index) noexcept {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    static_cast<void>(cudaSetDevice(index));
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

/// Waits for all work of the current device, on such a thread. cudaDeviceSynchronize() refuses in any mode while a
/// stream of the device captures, and breaks that capture. Freeing waits as well, and does neither.
inline void wait_for_cuda_device() noexcept {
    void* mark = nullptr;
    if (cudaMalloc(&mark, 1) == cudaSuccess) { // else the device is lost, or full
        static_cast<void>(cudaFree(mark));
    } else {
        static_cast<void>(cudaDeviceSynchronize());
    }
}

/// How many threads are still at give_back() after its deadline.
[[nodiscard]] inline std::atomic<int>& late_cuda_frees() noexcept {
    static std::atomic<int> threads{0};
    return threads;
}

/// Frees memory of a device by `free()`, at once if the device is idle. CUDA waits for all work of the
/// device then, and nothing but a bound ends that wait where a rank never joins a collective, of
/// whichever communicator. So `free()` runs on a thread of its own. At the deadline, after a second at
/// most, the host goes on: what keeps the device busy may need it. The thread frees the memory when the
/// device allows. The host waits for one such thread only.
template <class Free>
void give_back(int device, std::chrono::nanoseconds deadline, Free free) noexcept {
    enum State : int { running, late, over };
    try {
        bool const is_stuck = late_cuda_frees() > 0;
        auto const state = std::make_shared<std::atomic<int>>(running);
        auto const run = [=] {
            use_cuda_device(device);
            if (is_stuck) { // free() may rely on memory that was freed before
                wait_for_cuda_device();
            }
            free();
            late_cuda_frees() -= state->exchange(over) == late ? 1 : 0;
            return true;
        };
        constexpr std::chrono::nanoseconds longest = std::chrono::seconds{1};
        if (!run_within(
                is_stuck ? std::chrono::nanoseconds{0} : (std::min)(deadline, longest), run
            )) {
            ++late_cuda_frees(); // before the thread can see that it is late
            int expected = running;
            late_cuda_frees() -= state->compare_exchange_strong(expected, late) ? 0 : 1;
        }
    } catch (...) { // NOLINT(bugprone-empty-catch): there is no thread, so the memory stays
    }
}

/// A block of device or pinned memory, as the context of an arena, which may outlive its device.
struct CudaBlock {
    void* data;
    int device;
    std::chrono::nanoseconds deadline; ///< see give_back()
    cudaError_t (*free)(void*);

    /// That of an arena; null if it has another kind of memory.
    [[nodiscard]] static CudaBlock const* of(Arena const& arena) noexcept {
        return static_cast<CudaBlock const*>(arena.context_of(&release));
    }
    static void release(void* context, std::byte*, std::size_t) noexcept {
        std::unique_ptr<CudaBlock const> const block{static_cast<CudaBlock*>(context)};
        give_back(block->device, block->deadline, [data = block->data, free = block->free] {
            static_cast<void>(free(data));
        });
    }
};

}}} // namespace joinable::v0::detail
