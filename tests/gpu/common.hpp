// SPDX-License-Identifier: BSL-1.0
#pragma once

// What the checks and the measurements on a GPU have in common. All of it also compiles, and runs, over
// the doubles of CUDA and NCCL: ranks are whatever `Hosts` is.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <support/nccl_ranks.hpp>

#include <joinable/join.hpp>
#include <joinable/nccl.hpp>

namespace joinable_gpu {

using joinable_tests::cuda;
using joinable_tests::DeviceArray;
using joinable_tests::Stream;

joinable::CudaKernels kernels(); ///< of kernels.cu, which nvcc compiles

/// @throws std::runtime_error  which ends all ranks, with this text.
inline void expect(bool is_so, std::string const& what) {
    if (!is_so) {
        throw std::runtime_error{what};
    }
}

/// Makes a GPU this rank's, which it may share with others: NCCL takes two ranks of one GPU for a mistake
/// unless they seem to be on several machines. Returns which one.
template <class Hosts>
int take_device(Hosts& hosts) {
    int gpus = 0;
    cuda(cudaGetDeviceCount(&gpus));
    if (hosts.size() > gpus) {
        auto const name = "joinable-" + std::to_string(hosts.rank());
        static_cast<void>(setenv("NCCL_HOSTID", name.c_str(), 1));
    }
    int const device = hosts.rank() % gpus;
    cuda(cudaSetDevice(device));
    return device;
}

/// Members are made in this order: a stream is one of the current device.
template <class Hosts>
struct Rank {
    Hosts& hosts;
    int device;
    Stream stream{};
    joinable::NcclCommunicator comm;

    /// Without kernels, NCCL scales and the runtime copies.
    explicit Rank(Hosts& ranks, joinable::CudaKernels const& kernels = {})
        : hosts{ranks}, device{take_device(ranks)},
          comm{ranks, {.stream = stream, .deadline = std::chrono::seconds{30}}} {
        if (kernels.run != nullptr) {
            comm.device_memory().use_kernels(kernels);
        }
    }
};

/// A parameter on the device, zeroed, and a gradient that can be told where it is.
struct Param {
    DeviceArray<std::uint8_t> value_memory;
    DeviceArray<std::uint8_t> grad_memory;
    joinable::AnyView value;
    joinable::AnyView grad;

    Param(joinable::DType dtype, std::size_t count, int device)
        : value_memory{count * joinable::size_of(dtype)},
          grad_memory{count * joinable::size_of(dtype)},
          value{view(value_memory, dtype, count, device)},
          grad{view(grad_memory, dtype, count, device)} {
        for (void* const memory : {value.data(), grad.data()}) {
            cuda(cudaMemsetAsync(memory, 0, count * joinable::size_of(dtype), nullptr));
        }
        cuda(cudaStreamSynchronize(nullptr));
    }

private:
    static joinable::AnyView view(
        DeviceArray<std::uint8_t> const& memory,
        joinable::DType dtype,
        std::size_t count,
        int device
    ) {
        return {memory.buffer().data, dtype, {count}, {1}, {joinable::DeviceKind::cuda, device}};
    }
};

[[nodiscard]] inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

} // namespace joinable_gpu

template <>
struct joinable::parameter_traits<joinable_gpu::Param> {
    using P = joinable_gpu::Param;
    static AnyView const* value(P& p) { return &p.value; }
    static AnyView* grad(P& p) { return &p.grad; }
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
};
