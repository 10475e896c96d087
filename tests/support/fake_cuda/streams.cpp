// SPDX-License-Identifier: BSL-1.0
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/guarded.hpp>
#include <support/fake_cuda/runtime.hpp>

namespace joinable_tests::fake_cuda {

cudaError_t launch(cudaStream_t handle, std::function<void()> work, cudaGraphNodeType type) {
    auto const stream = runtime().find(handle);
    if (stream->is_capturing) {
        if (stream->capture->is_invalid) {
            return cudaErrorStreamCaptureInvalidated;
        }
        stream->capture->add(stream.get(), type, [work] { return work; });
        return cudaSuccess;
    }
    if (auto const error = usable(*stream); error != cudaSuccess) {
        return error;
    }
    for (auto const& other : runtime().ordered_with(*stream)) {
        if (auto const end = other->mark()) {
            stream->enqueue([end] { end->wait(); });
        }
    }
    stream->enqueue(std::move(work));
    return cudaSuccess;
}

cudaError_t usable(CUstream_st const& stream) {
    if (!stream.is_legacy) {
        return cudaSuccess;
    }
    for (auto const& other : runtime().ordered_with(stream)) {
        if (other->is_capturing) {
            other->capture->is_invalid = true;
            return cudaErrorStreamCaptureImplicit;
        }
    }
    return cudaSuccess;
}

cudaError_t waitable(cudaStream_t handle, std::shared_ptr<CUstream_st>& stream) {
    stream = runtime().find(handle);
    if (stream->is_capturing) {
        stream->capture->is_invalid = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    return usable(*stream);
}

namespace {

/// Sets the calling thread's device while it lives.
struct CurrentDevice {
    explicit CurrentDevice(int device) : before{std::exchange(current_device, device)} {}
    CurrentDevice(CurrentDevice const&) = delete;
    CurrentDevice& operator=(CurrentDevice const&) = delete;
    ~CurrentDevice() { current_device = before; }
    int before;
};

bool is_idle(CUstream_st& stream) {
    bool idle = stream.is_idle();
    if (stream.is_legacy) {
        for (auto const& other : runtime().ordered_with(stream)) {
            idle = idle && other->is_idle();
        }
    }
    return idle;
}

} // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) {
    cudaError_t error = sticky_error();
    if (error == cudaSuccess && runtime().find(stream)->device != current_device) {
        error = give(cudaErrorInvalidResourceHandle);
    }
    if (error == cudaSuccess) {
        error = give(launch(stream, std::move(work), cudaGraphNodeTypeKernel));
    }
    if (error != cudaSuccess) {
        throw std::runtime_error{std::string{"Cuda failure '"} + cudaGetErrorString(error) + "'"};
    }
}
void enqueue(int device, cudaStream_t stream, std::function<void()> work) {
    CurrentDevice const current{device};
    enqueue(stream, std::move(work));
}
bool is_idle(cudaStream_t stream) {
    return is_idle(*runtime().find(stream));
}
void drain() {
    for (auto const& stream : runtime().all_streams()) {
        stream->wait_until_idle();
    }
    std::unique_lock lock{runtime().mutex};
    runtime().closed.wait(lock, [] { return runtime().closing.empty(); });
}
std::size_t live_streams() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().streams.size();
}
void delay_every_operation(std::chrono::nanoseconds delay) {
    delay_ns = delay.count();
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
    return call("cudaStreamCreateWithFlags", [&]() -> cudaError_t {
        auto started = runtime().start(current_device, flags);
        std::lock_guard const lock{runtime().mutex};
        *stream = started.get();
        runtime().streams[*stream] = std::move(started);
        return cudaSuccess;
    });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return call("cudaStreamDestroy", [&]() -> cudaError_t {
        std::shared_ptr<CUstream_st> found;
        {
            std::lock_guard const lock{runtime().mutex};
            auto node = runtime().streams.extract(stream);
            if (node.empty()) {
                die("cudaStreamDestroy of a stream that was destroyed, or is none");
            }
            found = std::move(node.mapped());
            runtime().closing.insert(found);
        }
        {
            std::lock_guard const lock{found->mutex};
            found->is_closing = true;
        }
        found->changed.notify_all();
        return cudaSuccess;
    });
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
    return call("cudaStreamGetDevice", [&]() -> cudaError_t {
        auto const found = runtime().find(stream);
        *device = stream == nullptr ? current_device : found->device;
        return cudaSuccess;
    });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return call("cudaStreamSynchronize", [&]() -> cudaError_t {
        std::shared_ptr<CUstream_st> found;
        if (auto const error = waitable(stream, found); error != cudaSuccess) {
            return error;
        }
        for (auto const& other : runtime().ordered_with(*found)) {
            if (auto const end = found->is_legacy ? other->mark() : nullptr) {
                end->wait();
            }
        }
        found->wait_until_idle();
        return cudaSuccess;
    });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return call("cudaStreamQuery", [&]() -> cudaError_t {
        std::shared_ptr<CUstream_st> found;
        if (auto const error = waitable(stream, found); error != cudaSuccess) {
            return error;
        }
        return is_idle(*found) ? cudaSuccess : cudaErrorNotReady;
    });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
    return call("cudaStreamWaitEvent", [&]() -> cudaError_t {
        std::shared_ptr<Milestone> record;
        if (auto const error = last_record(event, record); error != cudaSuccess) {
            return error;
        }
        auto const found = runtime().find(stream);
        if (event->capture) {
            if (found->is_capturing && found->capture != event->capture) {
                return cudaErrorStreamCaptureMerge;
            }
            found->is_capturing = true;
            found->capture = event->capture;
            merge(found->capture->streams[found.get()], event->clock);
            return cudaSuccess;
        }
        if (found->is_capturing) {
            found->capture->is_invalid = true;
            return cudaErrorStreamCaptureIsolation;
        }
        return launch(stream, [record] {
            if (record) {
                record->wait();
            }
        });
    });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return call("cudaLaunchHostFunc", [&]() -> cudaError_t {
        auto const on_host = [function, data] {
            HostCode const code;
            function(data);
        };
        return launch(stream, on_host, cudaGraphNodeTypeHost);
    });
}

} // extern "C"
