// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>

#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/waits.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The two streams of one rank: that of its collectives, and the caller's, on which data is made and
/// used.
class NcclStreams : public NcclWaits {
public:
    NcclStreams(std::unique_ptr<NcclControl> control, NcclOptions const& options)
        : NcclWaits{std::move(control), options}, caller_{options.stream.value_or(nullptr)} {}

    /// That of the collectives.
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
    /// On which data is made and used.
    [[nodiscard]] cudaStream_t caller() const noexcept { return caller_; }
    cudaStream_t set_caller(cudaStream_t stream) noexcept { return std::exchange(caller_, stream); }

protected:
    ~NcclStreams() {
        if (ready_ != nullptr) {
            static_cast<void>(cudaEventDestroy(ready_));
        }
        if (owns_stream_) {
            static_cast<void>(cudaStreamDestroy(stream_));
        }
    }

    /// Of the current device. None given: one of its own.
    void use_stream(std::optional<cudaStream_t> stream) {
        check_cuda(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "cudaEventCreate");
        if (stream) {
            stream_ = *stream;
            return;
        }
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        owns_stream_ = true;
    }

    /// The result of a call of CUDA in which a stream of the caller is at stake.
    /// @throws ContractViolation  it is of another device; nothing is aborted. What CUDA does with one
    ///         that was destroyed is undefined.
    void check_stream(cudaError_t error, std::string_view call) {
        if (error == cudaErrorInvalidResourceHandle) {
            static_cast<void>(cudaGetLastError());
            throw ContractViolation{concat(
                "the stream on which data is made or used cannot be: ",
                call,
                " says ",
                cudaGetErrorString(error),
                "; give set_stream() one of device ",
                device()
            )};
        }
        check(error, call);
    }

    /// What goes on the stream of the collectives from now on runs after what is on the caller's.
    /// @throws ContractViolation  the caller's stream cannot be used.
    void order_after_caller() {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        check_stream(cudaStreamIsCapturing(caller_, &capture), "cudaStreamIsCapturing");
        if (capture != cudaStreamCaptureStatusNone) {
            throw ContractViolation{
                "the stream on which this communicator's data is made captures a CUDA graph, which "
                "cannot hold collectives: end the capture before them, or leave it to a "
                "CapturedStep"
            };
        }
        if (caller_ != stream_) {
            check_stream(cudaEventRecord(ready_, caller_), "cudaEventRecord");
            check(cudaStreamWaitEvent(stream_, ready_, 0), "cudaStreamWaitEvent");
        }
    }

    [[nodiscard]] bool has_caller_run() {
        cudaError_t const found = cudaStreamQuery(caller_);
        if (found == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            throw_if_aborted();
            return false;
        }
        check_stream(found, "cudaStreamQuery");
        return true;
    }

private:
    cudaStream_t caller_;
    cudaStream_t stream_ = nullptr;
    bool owns_stream_ = false;
    cudaEvent_t ready_ = nullptr; ///< on the caller's stream, behind the data
};

}}} // namespace joinable::v0::detail
