// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/runtime.hpp>

/// @file
/// What each call does first, and the errors that a thread is left with.

namespace joinable_tests::fake_cuda {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t injected = cudaSuccess;
thread_local std::size_t injected_later = 0;
thread_local cudaError_t sticky = cudaSuccess;

/// After these "the process must be terminated and relaunched", says driver_types.h.
bool is_sticky(cudaError_t error) {
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return true;
    default: return false;
    }
}
/// What a process leaves goes with it: the fake cannot end a rank, so it takes things back.
bool gives_back(std::string const& function) {
    return function.find("Destroy") != std::string::npos || function.starts_with("cudaFree");
}

/// What cudaThreadExchangeStreamCaptureMode calls potentially unsafe: not observed by a capture. Where
/// the thread's mode or its own captures prohibit that, the captures that do so are invalid.
cudaError_t refuse_unsafe(std::string const& function) {
    static std::set<std::string> const unsafe{
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "cudaFreeHost",
        "cudaEventQuery",
        "cudaEventSynchronize",
        "cudaStreamQuery",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize"
    };
    if (capture_mode == cudaStreamCaptureModeRelaxed || !unsafe.contains(function)) {
        return cudaSuccess;
    }
    cudaError_t error = cudaSuccess;
    for (auto const& capture : runtime().all_captures()) {
        bool const is_own = capture->thread == std::this_thread::get_id();
        if (is_own ? capture->mode != cudaStreamCaptureModeRelaxed
                   : capture->mode == cudaStreamCaptureModeGlobal &&
                         capture_mode == cudaStreamCaptureModeGlobal) {
            capture->is_invalid = true;
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    return error;
}

/// Counts the call; not success: what it was told to fail with.
cudaError_t begin(char const* function) {
    {
        std::lock_guard const lock{runtime().mutex};
        ++runtime().calls[function];
    }
    if (injected != cudaSuccess && injected_later-- == 0) {
        return std::exchange(injected, cudaSuccess);
    }
    return cudaSuccess;
}

} // namespace

cudaError_t give(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}
cudaError_t call(char const* function, std::function<cudaError_t()> const& body) {
    cudaError_t const error = begin(function);
    if (sticky == cudaSuccess && is_sticky(error)) {
        sticky = error;
    }
    if (sticky != cudaSuccess) {
        if (gives_back(function)) {
            static_cast<void>(body());
        }
        return give(sticky);
    }
    cudaError_t const refused = error == cudaSuccess ? refuse_unsafe(function) : error;
    return give(refused == cudaSuccess ? body() : refused);
}
cudaError_t sticky_error() {
    return sticky;
}
void die(std::string const& text) {
    std::fprintf(stderr, "fake_cuda: %s\n", text.c_str());
    std::abort();
}

void fail_next(cudaError_t error, std::size_t later) {
    injected = error;
    injected_later = later;
}
void relaunch() {
    sticky = last_error = cudaSuccess;
}
bool has_failed() {
    return std::exchange(injected, cudaSuccess) == cudaSuccess;
}
std::size_t calls(char const* function) {
    std::lock_guard const lock{runtime().mutex};
    auto const found = runtime().calls.find(function);
    return found == runtime().calls.end() ? 0 : found->second;
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaGetLastError() {
    return sticky != cudaSuccess ? sticky : std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
    return sticky != cudaSuccess ? sticky : last_error;
}
char const* cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    default: return "an error of the fake runtime";
    }
}
char const* cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    default: return "cudaErrorOfTheFake";
    }
}

} // extern "C"
