// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>

#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The device of one rank, and two streams: that of its collectives, and the caller's, on which the
/// caller makes and uses data. Members that call CUDA do so while a CurrentCudaDevice lives, and throw
/// CommunicationError if it fails.
class NcclStreams {
public:
    explicit NcclStreams(cudaStream_t caller) noexcept : caller_{caller} {}
    NcclStreams(NcclStreams const&) = delete;
    NcclStreams& operator=(NcclStreams const&) = delete;

    /// Call this once. Takes the current device. Collectives run on `stream`, or on a new stream if
    /// there is none.
    void use_device(std::optional<cudaStream_t> stream) {
        check_cuda(
            cudaGetDevice(&device_),
            "an NCCL rank needs a GPU that this process can use, but cudaGetDevice"
        );
        check_cuda(make_event(ready_), "cudaEventCreate");
        if (!stream) {
            check_cuda(make_stream(own_stream_), "cudaStreamCreate");
        }
        stream_ = stream.value_or(own_stream_.get());
    }

    [[nodiscard]] int device() const noexcept { return device_; }
    /// The stream of the collectives.
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
    [[nodiscard]] cudaStream_t caller() const noexcept { return caller_; }
    cudaStream_t set_caller(cudaStream_t stream) noexcept { return std::exchange(caller_, stream); }

    /// Later work on the stream of the collectives runs after earlier work on `earlier`, a stream of
    /// this device, such as the caller's.
    /// @throws ContractViolation  it cannot be used.
    void order_after(cudaStream_t earlier) const {
        require_not_capturing(earlier);
        if (earlier != stream_) {
            check_stream(cudaEventRecord(ready_.get(), earlier), "cudaEventRecord");
            check_cuda(cudaStreamWaitEvent(stream_, ready_.get(), 0), "cudaStreamWaitEvent");
        }
    }
    /// Later work on a stream of the caller runs after the event.
    /// @throws ContractViolation  the stream cannot be used.
    void order_before(cudaEvent_t event, cudaStream_t stream) const {
        require_not_capturing(stream);
        check_stream(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
    }
    /// Whether the work on a stream of the caller has run.
    /// @throws ContractViolation  the stream cannot be used.
    [[nodiscard]] bool has_run(cudaStream_t stream) const {
        require_not_capturing(stream); // before the query, which would end a capture
        cudaError_t const found = cudaStreamQuery(stream);
        if (found == cudaErrorNotReady) {
            return false;
        }
        check_stream(found, "cudaStreamQuery");
        return true;
    }

private:
    static void require_not_capturing(cudaStream_t stream) {
        if (is_capturing(stream)) {
            throw ContractViolation{
                "the stream on which this communicator's data is made or used captures a CUDA graph, "
                "which cannot hold collectives, or is the default stream while another one captures: "
                "end the capture before them, or leave it to a CapturedStep"
            };
        }
    }
    /// Checks the result of a CUDA call on a stream of the caller.
    /// @throws ContractViolation  the stream is of another device. CUDA's behaviour with a
    ///                            destroyed stream is undefined.
    void check_stream(cudaError_t error, std::string_view call) const {
        if (error == cudaErrorInvalidResourceHandle) {
            throw ContractViolation{concat(
                "the stream on which data is made or used cannot be: ",
                call,
                " says ",
                cudaGetErrorString(error),
                "; give set_stream() one of device ",
                device_
            )};
        }
        check_cuda(error, call);
    }

    int device_ = -1;
    cudaStream_t caller_;
    CudaStream own_stream_;
    cudaStream_t stream_ = nullptr;
    CudaEvent ready_; ///< on another stream, after the data
};

}}} // namespace joinable::v0::detail
