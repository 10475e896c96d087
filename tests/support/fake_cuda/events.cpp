// SPDX-License-Identifier: BSL-1.0
#include <chrono>
#include <memory>
#include <mutex>
#include <ratio>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/runtime.hpp>

namespace joinable_tests::fake_cuda {

cudaError_t last_record(cudaEvent_t event, std::shared_ptr<Milestone>& record) {
    {
        std::lock_guard const lock{runtime().mutex};
        if (!runtime().events.contains(event)) {
            die("an event that was destroyed, or is none, is undefined behaviour");
        }
    }
    std::lock_guard const lock{event->mutex};
    record = event->last;
    return cudaSuccess;
}

std::size_t live_events() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().events.size();
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    return call("cudaEventCreateWithFlags", [&]() -> cudaError_t {
        *event = new CUevent_st{{}, {}, current_device, {}, {}};
        std::lock_guard const lock{runtime().mutex};
        runtime().events.insert(*event);
        return cudaSuccess;
    });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return call("cudaEventDestroy", [&]() -> cudaError_t {
        {
            std::lock_guard const lock{runtime().mutex};
            if (runtime().events.erase(event) == 0) {
                die("cudaEventDestroy of an event that was destroyed, or is none");
            }
        }
        delete event;
        return cudaSuccess;
    });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return call("cudaEventRecord", [&]() -> cudaError_t {
        std::shared_ptr<Milestone> before;
        if (auto const error = last_record(event, before); error != cudaSuccess) {
            return error;
        }
        auto const found = runtime().find(stream);
        if (found->device != event->device) {
            return cudaErrorInvalidResourceHandle;
        }
        event->capture = found->is_capturing ? found->capture : nullptr;
        if (found->is_capturing) {
            event->clock = found->capture->streams[found.get()];
            return cudaSuccess;
        }
        auto record = std::make_shared<Milestone>();
        auto const error = launch(stream, [record] { record->reach(); });
        if (error == cudaSuccess) {
            std::lock_guard const lock{event->mutex};
            event->last = std::move(record);
        }
        return error;
    });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return call("cudaEventQuery", [&]() -> cudaError_t {
        std::shared_ptr<Milestone> record;
        if (auto const error = last_record(event, record); error != cudaSuccess) {
            return error;
        }
        if (event->capture) {
            return cudaErrorCapturedEvent;
        }
        return !record || record->is_reached() ? cudaSuccess : cudaErrorNotReady;
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return call("cudaEventSynchronize", [&]() -> cudaError_t {
        std::shared_ptr<Milestone> record;
        if (auto const error = last_record(event, record); error != cudaSuccess) {
            return error;
        }
        if (record) {
            record->wait();
        }
        return cudaSuccess;
    });
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return call("cudaEventElapsedTime", [&]() -> cudaError_t {
        std::shared_ptr<Milestone> first;
        std::shared_ptr<Milestone> last;
        for (auto const& [event, record] : {std::pair{start, &first}, std::pair{end, &last}}) {
            if (auto const error = last_record(event, *record); error != cudaSuccess) {
                return error;
            }
            if (!*record) {
                return cudaErrorInvalidResourceHandle;
            }
        }
        if (!first->is_reached() || !last->is_reached()) {
            return cudaErrorNotReady;
        }
        *milliseconds = std::chrono::duration<float, std::milli>{last->at() - first->at()}.count();
        return cudaSuccess;
    });
}

} // extern "C"
