// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/meeting.hpp>
#include <support/ranks.hpp>

#include <joinable/nccl.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable_tests {

inline void cuda(cudaError_t error) {
    if (error != cudaSuccess) {
        throw std::runtime_error{std::string{"CUDA: "} + cudaGetErrorString(error)};
    }
}

/// A stream of the current device.
class Stream {
public:
    Stream() { cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(Stream const&) = delete;
    Stream& operator=(Stream const&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    operator cudaStream_t() const noexcept { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

/// Elements in the memory of the current device, which are written and read in the order of a stream.
template <class T>
class DeviceArray {
public:
    explicit DeviceArray(std::size_t count) : count_{count} {
        void* data = nullptr;
        cuda(cudaMalloc(&data, count * sizeof(T)));
        data_ = static_cast<T*>(data);
    }
    DeviceArray(std::vector<T> values, cudaStream_t stream) : DeviceArray{values.size()} {
        staged_ = std::move(values);
        cuda(cudaMemcpyAsync(
            data_, staged_.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream
        ));
    }
    DeviceArray(DeviceArray&& other) noexcept
        : data_{std::exchange(other.data_, nullptr)}, count_{other.count_},
          staged_{std::move(other.staged_)} {}
    DeviceArray& operator=(DeviceArray&&) = delete;
    ~DeviceArray() { cudaFree(data_); }

    [[nodiscard]] joinable::Buffer buffer() const noexcept {
        return {data_, count_, joinable::dtype_of<T>};
    }
    /// Elements from `first` on.
    [[nodiscard]] joinable::Buffer part(std::size_t first, std::size_t count) const noexcept {
        return {data_ + first, count, joinable::dtype_of<T>};
    }
    /// What is there when the stream comes to it; the host waits, as `comm` waits.
    template <class Comm>
    [[nodiscard]] std::vector<T> read(Comm& comm, cudaStream_t stream) const {
        std::vector<T> values(count_);
        cuda(cudaMemcpyAsync(
            values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream
        ));
        try {
            comm.synchronize();
        } catch (...) {
            cudaStreamSynchronize(stream); // not stuck any more, and still to write to `values`
            throw;
        }
        return values;
    }

private:
    T* data_ = nullptr;
    std::size_t count_;
    std::vector<T> staged_;
};

using NcclBody = std::function<
    void(joinable::NcclCommunicator&, joinable::ThreadCommunicator& hosts, cudaStream_t)>;

/// Runs `body(comm, hosts, stream)` over groups of NCCL ranks of these sizes, one after another: each is
/// a thread with a device of its own, and a stream on which it makes and uses data. When a body begins,
/// all ranks have their communicator: one that fails at once ends no constructor of another one.
inline void run_nccl_ranks(
    std::initializer_list<int> sizes, joinable::NcclOptions const& options, NcclBody const& body
) {
    for (int const size : sizes) {
        Meeting begun{size};
        run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
            fake_cuda::relaunch(); // ranks stand for processes, of which each is a new one
            cuda(cudaSetDevice(hosts.rank()));
            Stream const stream;
            joinable::NcclOptions mine = options;
            mine.stream = static_cast<cudaStream_t>(stream);
            joinable::NcclCommunicator comm{hosts, mine};
            begun.meet();
            body(comm, hosts, stream);
        });
    }
}
inline void run_nccl_ranks(std::initializer_list<int> sizes, NcclBody const& body) {
    run_nccl_ranks(sizes, {.deadline = std::chrono::seconds{60}}, body);
}

} // namespace joinable_tests
