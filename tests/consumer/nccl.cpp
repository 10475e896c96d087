// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <array>
#include <cstdio>
#include <string_view>

#include <cuda_runtime_api.h>

#include <joinable/communicator/self.hpp>

// Linked with the real NCCL. With a GPU its only rank sums; without one it is told so in one sentence.
int main() {
    int devices = 0;
    bool const has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    try {
        joinable::SelfCommunicator alone;
        joinable::NcclCommunicator comm{alone};
        std::array<float, 2> values{3.0F, 4.0F};
        std::array<float, 2> sums{};
        void* data = nullptr;
        cudaMalloc(&data, sizeof values);
        cudaMemcpy(data, values.data(), sizeof values, cudaMemcpyHostToDevice);
        comm.all_reduce({data, values.size(), joinable::DType::f32}, joinable::ReduceOp::sum)
            .wait();
        comm.synchronize();
        cudaMemcpy(sums.data(), data, sizeof sums, cudaMemcpyDeviceToHost);
        cudaFree(data);
        std::printf("NCCL sums of one rank: %g %g\n", double{sums[0]}, double{sums[1]});
        return has_gpu && sums == values ? 0 : 1;
    } catch (joinable::CommunicationError const& error) {
        std::printf("%s\n", error.what());
        std::string_view const text = error.what();
        return !has_gpu && text.find(" failed: ") != std::string_view::npos ? 0 : 1;
    }
}
