// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <cstring>
#include <mutex>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/runtime.hpp>

using namespace joinable_tests::fake_cuda;

namespace {

void copy_rows(
    std::byte* to,
    std::size_t to_pitch,
    std::byte const* from,
    std::size_t from_pitch,
    std::size_t width,
    std::size_t height
) {
    for (std::size_t row = 0; row < height; ++row) {
        std::memmove(to + row * to_pitch, from + row * from_pitch, width);
    }
}

bool is_pageable(void const* memory) {
    std::lock_guard const lock{runtime().mutex};
    return runtime().containing(memory) == runtime().allocations.end() &&
           !runtime().device_of_opened(memory);
}

} // namespace

extern "C" {

cudaError_t cudaMemcpyAsync(
    void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream
) {
    return call("cudaMemcpyAsync", [&]() -> cudaError_t {
        if (kind == cudaMemcpyHostToDevice && is_pageable(from)) {
            if (auto const found = runtime().find(stream); found && !found->is_capturing) {
                found->wait_until_idle();
            }
        }
        return launch(stream, [=] {
            if (bytes != 0) { // the addresses may be null then
                std::memmove(to, from, bytes);
            }
        });
    });
}
cudaError_t cudaMemcpy2DAsync(
    void* to,
    std::size_t to_pitch,
    void const* from,
    std::size_t from_pitch,
    std::size_t width,
    std::size_t height,
    cudaMemcpyKind,
    cudaStream_t stream
) {
    return call("cudaMemcpy2DAsync", [&]() -> cudaError_t {
        if (width > to_pitch || width > from_pitch) {
            return cudaErrorInvalidPitchValue;
        }
        return launch(stream, [=] {
            copy_rows(
                static_cast<std::byte*>(to),
                to_pitch,
                static_cast<std::byte const*>(from),
                from_pitch,
                width,
                height
            );
        });
    });
}
/// Without arrays and without offsets: what is in linear memory.
cudaError_t cudaMemcpy3DAsync(cudaMemcpy3DParms const* parameters, cudaStream_t stream) {
    return call("cudaMemcpy3DAsync", [&]() -> cudaError_t {
        cudaMemcpy3DParms const p = *parameters;
        auto const has_offset = [](cudaPos const& pos) {
            return pos.x != 0 || pos.y != 0 || pos.z != 0;
        };
        if (p.srcArray != nullptr || p.dstArray != nullptr || has_offset(p.srcPos) ||
            has_offset(p.dstPos)) {
            return cudaErrorInvalidValue;
        }
        if (p.extent.width > p.srcPtr.pitch || p.extent.width > p.dstPtr.pitch) {
            return cudaErrorInvalidPitchValue;
        }
        return launch(stream, [p] {
            for (std::size_t slice = 0; slice < p.extent.depth; ++slice) {
                copy_rows(
                    static_cast<std::byte*>(p.dstPtr.ptr) + slice * p.dstPtr.pitch * p.dstPtr.ysize,
                    p.dstPtr.pitch,
                    static_cast<std::byte const*>(p.srcPtr.ptr) +
                        slice * p.srcPtr.pitch * p.srcPtr.ysize,
                    p.srcPtr.pitch,
                    p.extent.width,
                    p.extent.height
                );
            }
        });
    });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    return call("cudaMemsetAsync", [&]() -> cudaError_t {
        auto const set = [=] {
            if (bytes != 0) { // memset() takes no null pointer
                std::memset(to, value, bytes);
            }
        };
        return launch(stream, set, cudaGraphNodeTypeMemset);
    });
}
cudaError_t cudaMemset2DAsync(
    void* to,
    std::size_t pitch,
    int value,
    std::size_t width,
    std::size_t height,
    cudaStream_t stream
) {
    return call("cudaMemset2DAsync", [&]() -> cudaError_t {
        if (width > pitch) {
            return cudaErrorInvalidPitchValue;
        }
        return launch(stream, [=] {
            for (std::size_t row = 0; row < height; ++row) {
                std::memset(static_cast<std::byte*>(to) + row * pitch, value, width);
            }
        });
    });
}

} // extern "C"
