// SPDX-License-Identifier: BSL-1.0
// What a GPU is, and how fast it copies its own memory: see ../gpu.sh. With --probe one kernel runs.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <cuda_runtime_api.h>

namespace {

void cuda(cudaError_t error, char const* call) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
        std::exit(1);
    }
}

__global__ void write_index(unsigned int* to) {
    to[threadIdx.x] = threadIdx.x;
}

/// Whether a kernel runs and writes.
bool probe() {
    std::array<unsigned int, 32> found{};
    unsigned int* memory = nullptr;
    cuda(cudaMalloc(&memory, sizeof found), "cudaMalloc");
    write_index<<<1, 32>>>(memory);
    cuda(cudaGetLastError(), "a kernel");
    cuda(cudaMemcpy(found.data(), memory, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    cuda(cudaFree(memory), "cudaFree");
    return found.back() == 31;
}

/// The median time of a copy within the device's memory, in milliseconds.
float time_copy(std::size_t bytes) {
    void* from = nullptr;
    void* to = nullptr;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    cuda(cudaMalloc(&from, bytes), "cudaMalloc");
    cuda(cudaMalloc(&to, bytes), "cudaMalloc");
    cuda(cudaMemset(from, 0x5a, bytes), "cudaMemset");
    cuda(cudaEventCreate(&begin), "cudaEventCreate");
    cuda(cudaEventCreate(&end), "cudaEventCreate");
    std::array<float, 11> times{};
    for (int round = -2; round < static_cast<int>(times.size()); ++round) { // two warm up
        cuda(cudaEventRecord(begin), "cudaEventRecord");
        cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync");
        cuda(cudaEventRecord(end), "cudaEventRecord");
        cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
        cuda(
            cudaEventElapsedTime(
                &times[static_cast<std::size_t>(round < 0 ? 0 : round)], begin, end
            ),
            "cudaEventElapsedTime"
        );
    }
    std::sort(times.begin(), times.end());
    cuda(cudaFree(to), "cudaFree");
    cuda(cudaFree(from), "cudaFree");
    return times[times.size() / 2];
}

} // namespace

int main(int argc, char** argv) {
    if (!probe()) {
        std::fprintf(stderr, "a kernel ran, but its memory holds something else\n");
        return 1;
    }
    if (argc == 2 && argv[1] == std::string_view{"--probe"}) {
        return 0;
    }
    cudaDeviceProp device{};
    int driver = 0;
    int runtime = 0;
    cuda(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    std::printf(
        "%s: %d multiprocessors, %.1f GiB, CUDA of the driver %d, of this program %d\n",
        device.name,
        device.multiProcessorCount,
        static_cast<double>(device.totalGlobalMem) / (1U << 30U),
        driver,
        runtime
    );
    constexpr std::size_t bytes = std::size_t{1} << 30U;
    float const milliseconds = time_copy(bytes);
    std::printf(
        "a copy of 1 GiB: %.1f us, %.0f GB/s read and written\n",
        1e3 * static_cast<double>(milliseconds),
        2e-6 * static_cast<double>(bytes) / static_cast<double>(milliseconds)
    );
    return 0;
}
