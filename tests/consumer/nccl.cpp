// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl_graphs.hpp>

#include <array>
#include <cstdio>
#include <string_view>

#include <cuda_runtime_api.h>

#include <joinable/communicator/self.hpp>

// Linked with the real NCCL. With a GPU its only rank sums, and captures a step; without one it is told
// so in one sentence.
namespace {

using Pair = std::array<float, 2>;

/// What a captured step makes of `values` in three rounds, of which two replay: the average of one rank.
Pair captured_average(joinable::NcclCommunicator& comm, Pair const& values) {
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    comm.set_stream(stream);
    void* batch = nullptr;
    void* gradient = nullptr;
    cudaMalloc(&batch, sizeof values);
    cudaMalloc(&gradient, sizeof values);
    cudaMemcpy(batch, values.data(), sizeof values, cudaMemcpyHostToDevice);
    {
        joinable::CapturedStep step{
            comm,
            {{gradient, values.size(), joinable::DType::f32}},
            [&](auto const& ready) {
                cudaMemcpyAsync(gradient, batch, sizeof values, cudaMemcpyDeviceToDevice, stream);
                ready(0);
            }
        };
        for (int round = 0; round < 3; ++round) {
            step.step();
        }
        comm.synchronize();
    }
    Pair average{};
    cudaMemcpy(average.data(), gradient, sizeof average, cudaMemcpyDeviceToHost);
    comm.set_stream(nullptr);
    cudaFree(gradient);
    cudaFree(batch);
    cudaStreamDestroy(stream);
    return average;
}

} // namespace

int main() {
    int devices = 0;
    bool const has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    try {
        joinable::SelfCommunicator alone;
        joinable::NcclCommunicator comm{alone};
        Pair const values{3.0F, 4.0F};
        Pair sums{};
        void* data = nullptr;
        cudaMalloc(&data, sizeof values);
        cudaMemcpy(data, values.data(), sizeof values, cudaMemcpyHostToDevice);
        comm.all_reduce({data, values.size(), joinable::DType::f32}, joinable::ReduceOp::sum)
            .wait();
        comm.synchronize();
        cudaMemcpy(sums.data(), data, sizeof sums, cudaMemcpyDeviceToHost);
        cudaFree(data);
        std::printf("NCCL sums of one rank: %g %g\n", double{sums[0]}, double{sums[1]});
        Pair const average = captured_average(comm, values);
        std::printf("its captured average: %g %g\n", double{average[0]}, double{average[1]});
        return has_gpu && sums == values && average == values ? 0 : 1;
    } catch (joinable::CommunicationError const& error) {
        std::printf("%s\n", error.what());
        std::string_view const text = error.what();
        return !has_gpu && text.find(" failed: ") != std::string_view::npos ? 0 : 1;
    }
}
