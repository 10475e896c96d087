// SPDX-License-Identifier: BSL-1.0
#include <joinable/cuda_kernels.hpp>

namespace joinable_gpu {

joinable::CudaKernels kernels() {
    return joinable::cuda_kernels();
}

} // namespace joinable_gpu
