// SPDX-License-Identifier: BSL-1.0
#include <joinable/cuda_kernels.hpp>

#include <cstddef>
#include <vector>

#include "cuda_ranks.hpp"
#include "rule.hpp"

namespace train_text {

namespace {

template <class Kernel>
__global__ void run_kernel(std::size_t count, Kernel const kernel) {
    std::size_t const index = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (index < count) {
        kernel(index);
    }
}

/// A thread of the GPU for each index.
struct CudaLaunch {
    cudaStream_t stream;

    template <class Kernel>
    void operator()(std::size_t count, Kernel const& kernel) const {
        constexpr unsigned int threads = 256;
        auto const blocks = static_cast<unsigned int>((count + threads - 1) / threads);
        if (blocks != 0) {
            run_kernel<<<blocks, threads, 0, stream>>>(count, kernel);
            require(cudaGetLastError(), "a kernel");
        }
    }
};

} // namespace

std::vector<Findings>
train_on_cuda(Options const& options, std::vector<Text> const& texts, Text const& held_out) {
    int const gpus = count_gpus();
    require_gpus(options, gpus);
    return run_ranks(options, texts, held_out, [&](auto& hosts, Job const& job) {
        return train_on_gpu(hosts, job, gpus, [](joinable::NcclCommunicator& comm) {
            comm.device_memory().use_kernels(joinable::cuda_kernels<ChosenRule>());
            return CudaLaunch{comm.device_memory().engine_stream()};
        });
    });
}

} // namespace train_text
