// SPDX-License-Identifier: BSL-1.0
#pragma once

// A rank on a GPU. It launches no kernels, so any compiler accepts it.

#include <joinable/join.hpp>
#include <joinable/nccl.hpp>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include "data.hpp"
#include "device_model.hpp"
#include "on_cuda.hpp"
#include "train.hpp"

namespace train_text {

inline void require(cudaError_t error, char const* call) {
    if (error != cudaSuccess) {
        throw joinable::CommunicationError{
            std::string{call} + " failed: " + cudaGetErrorString(error)
        };
    }
}

class CudaStream {
public:
    CudaStream() {
        require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    CudaStream(CudaStream const&) = delete;
    CudaStream& operator=(CudaStream const&) = delete;
    ~CudaStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
    [[nodiscard]] cudaStream_t get() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

/// Counts the GPUs in a separate process: ranks may be processes, and CUDA does not survive a fork.
/// @throws NoDevice.
inline int count_gpus() {
    struct Answer {
        int gpus;
        cudaError_t error;
    };
    auto const answer = joinable::shared_buffer<Answer>(1);
    joinable::run_processes(1, [&](auto&) {
        answer[0].error = cudaGetDeviceCount(&answer[0].gpus);
    });
    if (answer[0].error != cudaSuccess || answer[0].gpus == 0) {
        throw NoDevice{
            std::string{"--device cuda needs a GPU, but CUDA finds none here ("} +
            cudaGetErrorString(answer[0].error) +
            "); see what nvidia-smi says, or take --device host"
        };
    }
    return answer[0].gpus;
}

/// @throws InputError
inline void require_gpus(Options const& options, int gpus) {
    if (options.communicator == Kind::thread && options.ranks > gpus) {
        throw InputError{
            "--device cuda with thread ranks needs a GPU for each of the " +
            std::to_string(options.ranks) + " ranks, but there are " + std::to_string(gpus) +
            "; give --ranks " + std::to_string(gpus) +
            ", or --communicator process, whose ranks may share one"
        };
    }
}

/// Trains a rank on one of `gpus` GPUs. `make_launch(comm)` returns a function that launches
/// kernels on the stream of `comm`'s data.
template <class MakeLaunch>
Findings train_on_gpu(
    joinable::AnyCommunicator& hosts, Job const& job, int gpus, MakeLaunch const& make_launch
) {
    if (hosts.size() > gpus) { // NCCL refuses two ranks on one GPU, unless their hosts differ
        static_cast<void>(
            setenv("NCCL_HOSTID", ("train_text-" + std::to_string(hosts.rank())).c_str(), 1)
        );
    }
    require(cudaSetDevice(hosts.rank() % gpus), "cudaSetDevice");
    CudaStream const stream;
    joinable::NcclCommunicator comm{hosts, {.stream = stream.get()}};
    auto const launch = make_launch(comm);
    Options const& o = job.options;
    DeviceModel model{
        comm.device_memory(), launch, Model{o.seed + static_cast<std::uint64_t>(hosts.rank())}
    };
    if (o.rule != Rule::sgd || o.sharding != Sharding::none) {
        return train_sharded(comm, hosts, model, rule_of(o), job);
    }
    DeviceSgd optimizer{
        comm.device_memory(), launch, model.parameters(), {o.rate(), job.longest}, o.momentum
    };
    return train_by_engine(comm, hosts, model, optimizer, job);
}

} // namespace train_text
