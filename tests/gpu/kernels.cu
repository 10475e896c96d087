// SPDX-License-Identifier: BSL-1.0
#include <joinable/device/cuda/kernels.hpp>

namespace joinable_gpu {

joinable::CudaKernels kernels() {
    return joinable::cuda_kernels();
}

} // namespace joinable_gpu
