// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/guarded.hpp>
#include <support/fake_cuda/runtime.hpp>

namespace joinable_tests::fake_cuda {

std::size_t live_allocations() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().allocations.size();
}
bool is_device_memory(void const* data, std::size_t bytes) {
    std::lock_guard const lock{runtime().mutex};
    auto const found = runtime().containing(data);
    return found != runtime().allocations.end() && found->second.type != cudaMemoryTypeHost &&
           static_cast<std::byte const*>(data) + bytes <= found->first + found->second.bytes;
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
    return call("cudaMalloc", [&]() -> cudaError_t {
        *data = nullptr;
        if (bytes == 0) {
            return cudaSuccess;
        }
        *data = runtime().allocate(bytes, current_device, cudaMemoryTypeDevice);
        if (*data == nullptr) {
            return cudaErrorMemoryAllocation;
        }
        std::memset(*data, poison, bytes);
        guard(static_cast<std::byte*>(*data), bytes, current_device);
        return cudaSuccess;
    });
}
/// Without attachment to a stream, and without the hints of cudaMemAdvise.
cudaError_t cudaMallocManaged(void** data, std::size_t bytes, unsigned int flags) {
    return call("cudaMallocManaged", [&]() -> cudaError_t {
        if (bytes == 0 || flags != cudaMemAttachGlobal) {
            return cudaErrorInvalidValue;
        }
        *data = runtime().allocate(bytes, current_device, cudaMemoryTypeManaged);
        if (*data == nullptr) {
            return cudaErrorMemoryAllocation;
        }
        std::memset(*data, poison, bytes);
        return cudaSuccess;
    });
}
cudaError_t cudaFree(void* data) {
    return call("cudaFree", [&]() -> cudaError_t {
        if (data == nullptr) {
            return cudaSuccess;
        }
        runtime().wait_until_idle(current_device);
        std::ptrdiff_t const bytes = runtime().forget(data, false);
        if (bytes < 0) {
            return cudaErrorInvalidValue;
        }
        std::memset(data, poison, static_cast<std::size_t>(bytes));
        std::free(data);
        return cudaSuccess;
    });
}
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
    return call("cudaMallocAsync", [&]() -> cudaError_t {
        auto const found = runtime().find(stream);
        *data = nullptr;
        {
            std::lock_guard const lock{runtime().mutex};
            if (!runtime().has_pools) {
                return cudaErrorNotSupported;
            }
        }
        if (bytes == 0) {
            return cudaSuccess;
        }
        int const device = stream == nullptr ? current_device : found->device;
        *data = runtime().allocate(bytes, device, cudaMemoryTypeDevice);
        if (*data == nullptr) {
            return cudaErrorMemoryAllocation;
        }
        {
            std::lock_guard const lock{runtime().mutex};
            runtime().allocations[static_cast<std::byte*>(*data)].is_of_a_pool = true;
        }
        guard(static_cast<std::byte*>(*data), bytes, device);
        auto const error =
            launch(stream, [memory = *data, bytes] { std::memset(memory, poison, bytes); });
        if (error != cudaSuccess) {
            runtime().forget(*data, false);
            std::free(std::exchange(*data, nullptr));
        }
        return error;
    });
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
    return call("cudaFreeAsync", [&]() -> cudaError_t {
        if (data == nullptr) {
            return cudaSuccess;
        }
        std::shared_ptr<CUstream_st> found;
        if (auto const error = waitable(stream, found); error != cudaSuccess) {
            return error;
        }
        std::ptrdiff_t const bytes = runtime().forget(data, false);
        if (bytes < 0) {
            return cudaErrorInvalidValue;
        }
        return launch(stream, [data, bytes] {
            std::memset(data, poison, static_cast<std::size_t>(bytes));
            std::free(data);
        });
    });
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned int) {
    return call("cudaHostAlloc", [&]() -> cudaError_t {
        *data =
            bytes == 0 ? nullptr : runtime().allocate(bytes, current_device, cudaMemoryTypeHost);
        return *data == nullptr && bytes != 0 ? cudaErrorMemoryAllocation : cudaSuccess;
    });
}
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
    return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* data) {
    return call("cudaFreeHost", [&]() -> cudaError_t {
        if (sticky_error() != cudaSuccess) { // a stream may still be at a copy: a GPU's would not
            runtime().wait_until_idle(current_device);
        }
        if (data != nullptr && runtime().forget(data, true) < 0) {
            return cudaErrorInvalidValue;
        }
        std::free(data);
        return cudaSuccess;
    });
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    return call("cudaMemGetInfo", [&]() -> cudaError_t {
        *total = std::size_t{80} << 30U;
        *free = *total;
        std::lock_guard const lock{runtime().mutex};
        for (auto const& [data, allocation] : runtime().allocations) {
            bool const is_here =
                allocation.type == cudaMemoryTypeDevice && allocation.device == current_device;
            *free -= is_here ? allocation.bytes : 0;
        }
        return cudaSuccess;
    });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* pointer) {
    return call("cudaPointerGetAttributes", [&]() -> cudaError_t {
        auto* const address = const_cast<void*>(pointer);
        std::lock_guard const lock{runtime().mutex};
        auto const found = runtime().containing(pointer);
        *attributes = {};
        if (auto const device = runtime().device_of_opened(pointer)) {
            attributes->type = cudaMemoryTypeDevice;
            attributes->device = *device;
            attributes->devicePointer = address;
            return cudaSuccess;
        }
        if (found == runtime().allocations.end()) {
            attributes->type = cudaMemoryTypeUnregistered;
            attributes->device = -2; // cudaInvalidDeviceId
            attributes->hostPointer = address;
            return cudaSuccess;
        }
        attributes->type = found->second.type;
        attributes->device = found->second.device;
        attributes->devicePointer = address;
        attributes->hostPointer = found->second.type == cudaMemoryTypeDevice ? nullptr : address;
        return cudaSuccess;
    });
}

} // extern "C"
