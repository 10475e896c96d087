// SPDX-License-Identifier: BSL-1.0
#include <mutex>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/runtime.hpp>

namespace joinable_tests::fake_cuda {

void set_device_count(int count) {
    std::lock_guard const lock{runtime().mutex};
    runtime().devices = count;
}
void set_memory_pools(bool has) {
    std::lock_guard const lock{runtime().mutex};
    runtime().has_pools = has;
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    return call("cudaGetDeviceCount", [&]() -> cudaError_t {
        std::lock_guard const lock{runtime().mutex};
        *count = runtime().devices;
        return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
    });
}
cudaError_t cudaGetDevice(int* device) {
    return call("cudaGetDevice", [&]() -> cudaError_t {
        *device = current_device;
        return cudaSuccess;
    });
}
cudaError_t cudaSetDevice(int device) {
    return call("cudaSetDevice", [&]() -> cudaError_t {
        std::lock_guard const lock{runtime().mutex};
        if (device < 0 || device >= runtime().devices) {
            return cudaErrorInvalidDevice;
        }
        current_device = device;
        return cudaSuccess;
    });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return call("cudaDeviceGetAttribute", [&]() -> cudaError_t {
        std::lock_guard const lock{runtime().mutex};
        if (device < 0 || device >= runtime().devices) {
            return cudaErrorInvalidDevice;
        }
        if (attribute != cudaDevAttrMemoryPoolsSupported) {
            return cudaErrorInvalidValue;
        }
        *value = runtime().has_pools ? 1 : 0;
        return cudaSuccess;
    });
}
cudaError_t cudaDeviceSynchronize() {
    return call("cudaDeviceSynchronize", [&]() -> cudaError_t {
        for (auto const& capture : runtime().all_captures()) {
            if (capture->device == current_device) { // in whatever mode
                capture->is_invalid = true;
                return cudaErrorStreamCaptureUnsupported;
            }
        }
        runtime().wait_until_idle(current_device);
        return cudaSuccess;
    });
}

} // extern "C"
