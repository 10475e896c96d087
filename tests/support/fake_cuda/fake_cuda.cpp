// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <support/fake_cuda/capture.hpp>
#include <support/fake_cuda/fake_cuda.hpp>

namespace fake = joinable_tests::fake_cuda;

namespace {

std::atomic<std::int64_t> delay_ns{0};

/// Something that a stream gets to, once.
class Milestone {
public:
    void reach() {
        {
            std::lock_guard const lock{mutex_};
            is_reached_ = true;
        }
        changed_.notify_all();
    }
    bool is_reached() {
        std::lock_guard const lock{mutex_};
        return is_reached_;
    }
    void wait() {
        std::unique_lock lock{mutex_};
        changed_.wait(lock, [this] { return is_reached_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_reached_ = false;
};

} // namespace

/// The runtime's header declares these two in the global namespace and leaves them to us.
struct CUstream_st {
    CUstream_st(int on, unsigned int with) : device{on}, flags{with} {}

    void enqueue(std::function<void()> work) {
        {
            std::lock_guard const lock{mutex};
            queue.push_back(std::move(work));
        }
        changed.notify_all();
    }
    bool is_idle() {
        std::lock_guard const lock{mutex};
        return queue.empty();
    }
    void wait_until_idle() {
        std::unique_lock lock{mutex};
        changed.wait(lock, [this] { return queue.empty(); });
    }
    /// What the thread of a stream does until the stream is destroyed and empty.
    void run() {
        std::unique_lock lock{mutex};
        for (;;) {
            changed.wait(lock, [this] { return !queue.empty() || is_closing; });
            if (queue.empty()) {
                return;
            }
            auto work =
                std::move(queue.front()); // its place stays: an empty queue is an idle stream
            lock.unlock();
            if (auto const delay = delay_ns.load(); delay > 0) {
                std::this_thread::sleep_for(std::chrono::nanoseconds{delay});
            }
            work();
            work = nullptr;
            lock.lock();
            queue.pop_front();
            changed.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue; ///< the first one runs
    bool is_closing = false;
    std::atomic<bool> is_capturing{false};
    std::shared_ptr<joinable_tests::fake_cuda::Capture> capture; ///< while it captures
    int device;
    unsigned int flags;
};

struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<Milestone> last; ///< null: not recorded
    int device;
    std::shared_ptr<joinable_tests::fake_cuda::Capture> capture = {
    }; ///< where it was recorded last
    joinable_tests::fake_cuda::Clock clock = {};
};

namespace {

struct Allocation {
    std::size_t bytes;
    int device;
    cudaMemoryType type;
};

/// All that is alive. Never destroyed: threads of streams may outlive main().
struct Runtime {
    std::mutex mutex;
    std::condition_variable closed;
    std::map<std::byte*, Allocation> allocations;
    std::map<CUstream_st*, std::shared_ptr<CUstream_st>> streams;
    std::set<std::shared_ptr<CUstream_st>> closing;
    std::set<CUevent_st*> events;
    std::set<CUgraph_st*> graphs;
    std::set<CUgraphExec_st*> executables;
    std::map<std::string, std::size_t> calls;
    std::shared_ptr<CUstream_st> null_stream;
    int devices = 8;
    bool has_pools = true;

    std::shared_ptr<CUstream_st> start(int device, unsigned int flags) {
        auto stream = std::make_shared<CUstream_st>(device, flags);
        std::thread{[this, stream] {
            stream->run();
            std::lock_guard const lock{mutex};
            closing.erase(stream);
            closed.notify_all();
        }}.detach();
        return stream;
    }
    std::shared_ptr<CUstream_st> find(cudaStream_t stream) {
        std::lock_guard const lock{mutex};
        if (stream == nullptr) {
            if (!null_stream) {
                null_stream = start(0, cudaStreamDefault);
            }
            return null_stream;
        }
        auto const found = streams.find(stream);
        return found == streams.end() ? nullptr : found->second;
    }
    std::vector<std::shared_ptr<CUstream_st>> all_streams() {
        std::lock_guard const lock{mutex};
        std::vector<std::shared_ptr<CUstream_st>> all(closing.begin(), closing.end());
        for (auto const& [handle, stream] : streams) {
            all.push_back(stream);
        }
        if (null_stream) {
            all.push_back(null_stream);
        }
        return all;
    }
    /// The allocation that has an address in it.
    std::map<std::byte*, Allocation>::iterator containing(void const* address) {
        auto const* const byte = static_cast<std::byte const*>(address);
        auto found = allocations.upper_bound(const_cast<std::byte*>(byte));
        if (found == allocations.begin()) {
            return allocations.end();
        }
        --found;
        return byte < found->first + found->second.bytes ? found : allocations.end();
    }
    std::byte* allocate(std::size_t bytes, int device, cudaMemoryType type) {
        constexpr std::size_t alignment = 256; // as cudaMalloc
        std::size_t const room = (bytes + alignment - 1) / alignment * alignment;
        auto* const data = static_cast<std::byte*>(std::aligned_alloc(alignment, room));
        if (data != nullptr) {
            std::lock_guard const lock{mutex};
            allocations[data] = {bytes, device, type};
        }
        return data;
    }
    /// Forgets an allocation. Returns its size, or -1 where there is none.
    std::ptrdiff_t forget(void* data, cudaMemoryType type) {
        std::lock_guard const lock{mutex};
        auto const found = allocations.find(static_cast<std::byte*>(data));
        if (found == allocations.end() || found->second.type != type) {
            return -1;
        }
        auto const bytes = static_cast<std::ptrdiff_t>(found->second.bytes);
        allocations.erase(found);
        return bytes;
    }
};

Runtime& runtime() {
    static auto* const all = new Runtime;
    return *all;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t injected = cudaSuccess;
thread_local std::size_t injected_later = 0;

cudaError_t give(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

/// What every call does first: counts it, and fails where it was told to.
cudaError_t begin(char const* function) {
    {
        std::lock_guard const lock{runtime().mutex};
        ++runtime().calls[function];
    }
    if (injected != cudaSuccess && injected_later-- == 0) {
        return give(std::exchange(injected, cudaSuccess));
    }
    return cudaSuccess;
}

/// Puts work on a stream, or in the graph that it captures.
cudaError_t launch(
    cudaStream_t handle,
    std::function<void()> work,
    cudaGraphNodeType type = cudaGraphNodeTypeMemcpy
) {
    auto const stream = runtime().find(handle);
    if (!stream) {
        return give(cudaErrorInvalidResourceHandle);
    }
    if (stream->is_capturing) {
        stream->capture->add(stream.get(), type, [work] { return work; });
        return cudaSuccess;
    }
    stream->enqueue(std::move(work));
    return cudaSuccess;
}

/// `stream` where the host may wait for it.
cudaError_t waitable(cudaStream_t handle, std::shared_ptr<CUstream_st>& stream) {
    stream = runtime().find(handle);
    return give(
        !stream                ? cudaErrorInvalidResourceHandle
        : stream->is_capturing ? cudaErrorStreamCaptureUnsupported
                               : cudaSuccess
    );
}

/// The last record of an event; refuses events that do not exist.
cudaError_t last_record(cudaEvent_t event, std::shared_ptr<Milestone>& record) {
    {
        std::lock_guard const lock{runtime().mutex};
        if (!runtime().events.contains(event)) {
            return give(cudaErrorInvalidResourceHandle);
        }
    }
    std::lock_guard const lock{event->mutex};
    record = event->last;
    return cudaSuccess;
}

cudaGraph_t new_graph() {
    auto* const graph = new CUgraph_st;
    std::lock_guard const lock{runtime().mutex};
    runtime().graphs.insert(graph);
    return graph;
}
bool forget_graph(cudaGraph_t graph) {
    {
        std::lock_guard const lock{runtime().mutex};
        if (runtime().graphs.erase(graph) == 0) {
            return false;
        }
    }
    delete graph;
    return true;
}
cudaError_t begin_capture(cudaStream_t stream, cudaGraph_t graph, bool owns_graph) {
    auto const found = runtime().find(stream);
    if (!found || stream == nullptr || found->is_capturing) {
        return give(cudaErrorStreamCaptureUnsupported);
    }
    found->capture = std::make_shared<fake::Capture>(fake::Capture{stream, graph, owns_graph, {}});
    found->is_capturing = true;
    return cudaSuccess;
}

void copy_rows(
    std::byte* to,
    std::size_t to_pitch,
    std::byte const* from,
    std::size_t from_pitch,
    std::size_t width,
    std::size_t height
) {
    for (std::size_t row = 0; row < height; ++row) {
        std::memmove(to + row * to_pitch, from + row * from_pitch, width);
    }
}

} // namespace

// -- what tests see ----------------------------------------------------------------------------------

void fake::enqueue(cudaStream_t stream, std::function<void()> work) {
    if (launch(stream, std::move(work), cudaGraphNodeTypeKernel) != cudaSuccess) {
        throw std::invalid_argument{"fake_cuda: the stream does not exist"};
    }
}
bool fake::capture(
    cudaStream_t stream, std::function<std::function<void()>()> const& work_of_launch
) {
    auto const found = runtime().find(stream);
    if (!found || !found->is_capturing) {
        return false;
    }
    found->capture->add(found.get(), cudaGraphNodeTypeKernel, work_of_launch);
    return true;
}
std::size_t fake::live_graphs() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().graphs.size() + runtime().executables.size();
}
bool fake::is_idle(cudaStream_t stream) {
    auto const found = runtime().find(stream);
    return found && found->is_idle();
}
void fake::drain() {
    for (auto const& stream : runtime().all_streams()) {
        stream->wait_until_idle();
    }
    std::unique_lock lock{runtime().mutex};
    runtime().closed.wait(lock, [] { return runtime().closing.empty(); });
}
std::size_t fake::live_allocations() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().allocations.size();
}
std::size_t fake::live_streams() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().streams.size();
}
std::size_t fake::live_events() {
    std::lock_guard const lock{runtime().mutex};
    return runtime().events.size();
}
bool fake::is_device_memory(void const* data, std::size_t bytes) {
    std::lock_guard const lock{runtime().mutex};
    auto const found = runtime().containing(data);
    return found != runtime().allocations.end() && found->second.type == cudaMemoryTypeDevice &&
           static_cast<std::byte const*>(data) + bytes <= found->first + found->second.bytes;
}
void fake::delay_every_operation(std::chrono::nanoseconds delay) {
    delay_ns = delay.count();
}
void fake::fail_next(cudaError_t error, std::size_t later) {
    injected = error;
    injected_later = later;
}
bool fake::has_failed() {
    return std::exchange(injected, cudaSuccess) == cudaSuccess;
}
void fake::set_device_count(int count) {
    std::lock_guard const lock{runtime().mutex};
    runtime().devices = count;
}
void fake::set_memory_pools(bool has) {
    std::lock_guard const lock{runtime().mutex};
    runtime().has_pools = has;
}
std::size_t fake::calls(char const* function) {
    std::lock_guard const lock{runtime().mutex};
    auto const found = runtime().calls.find(function);
    return found == runtime().calls.end() ? 0 : found->second;
}

// -- the runtime -------------------------------------------------------------------------------------
// The first line of each function: an injected error comes before everything else.

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    if (auto const error = begin("cudaGetDeviceCount"); error != cudaSuccess) {
        return error;
    }
    std::lock_guard const lock{runtime().mutex};
    *count = runtime().devices;
    return give(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
    if (auto const error = begin("cudaGetDevice"); error != cudaSuccess) {
        return error;
    }
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (auto const error = begin("cudaSetDevice"); error != cudaSuccess) {
        return error;
    }
    std::lock_guard const lock{runtime().mutex};
    if (device < 0 || device >= runtime().devices) {
        return give(cudaErrorInvalidDevice);
    }
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (auto const error = begin("cudaDeviceGetAttribute"); error != cudaSuccess) {
        return error;
    }
    std::lock_guard const lock{runtime().mutex};
    if (device < 0 || device >= runtime().devices) {
        return give(cudaErrorInvalidDevice);
    }
    if (attribute != cudaDevAttrMemoryPoolsSupported) {
        return give(cudaErrorInvalidValue);
    }
    *value = runtime().has_pools ? 1 : 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    if (auto const error = begin("cudaDeviceSynchronize"); error != cudaSuccess) {
        return error;
    }
    for (auto const& stream : runtime().all_streams()) {
        if (stream->device == current_device) {
            stream->wait_until_idle();
        }
    }
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
    return last_error;
}
char const* cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "an error of the fake runtime";
    }
}
char const* cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    default: return "cudaErrorOfTheFake";
    }
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
    if (auto const error = begin("cudaStreamCreateWithFlags"); error != cudaSuccess) {
        return error;
    }
    auto started = runtime().start(current_device, flags);
    std::lock_guard const lock{runtime().mutex};
    *stream = started.get();
    runtime().streams[*stream] = std::move(started);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (auto const error = begin("cudaStreamDestroy"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<CUstream_st> found;
    {
        std::lock_guard const lock{runtime().mutex};
        auto node = runtime().streams.extract(stream);
        if (node.empty()) {
            return give(cudaErrorInvalidResourceHandle);
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
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
    if (auto const error = begin("cudaStreamGetDevice"); error != cudaSuccess) {
        return error;
    }
    auto const found = runtime().find(stream);
    if (!found) {
        return give(cudaErrorInvalidResourceHandle);
    }
    *device = stream == nullptr ? current_device : found->device;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (auto const error = begin("cudaStreamSynchronize"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<CUstream_st> found;
    if (auto const error = waitable(stream, found); error != cudaSuccess) {
        return error;
    }
    found->wait_until_idle();
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (auto const error = begin("cudaStreamQuery"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<CUstream_st> found;
    if (auto const error = waitable(stream, found); error != cudaSuccess) {
        return error;
    }
    return give(found->is_idle() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
    if (auto const error = begin("cudaStreamWaitEvent"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<Milestone> record;
    if (auto const error = last_record(event, record); error != cudaSuccess) {
        return error;
    }
    auto const found = runtime().find(stream);
    if (found && event->capture) {
        if (found->is_capturing && found->capture != event->capture) {
            return give(cudaErrorStreamCaptureMerge);
        }
        found->is_capturing = true;
        found->capture = event->capture;
        fake::merge(found->capture->streams[found.get()], event->clock);
        return cudaSuccess;
    }
    if (found && found->is_capturing) {
        return give(cudaErrorStreamCaptureIsolation);
    }
    return launch(stream, [record] {
        if (record) {
            record->wait();
        }
    });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    if (auto const error = begin("cudaStreamIsCapturing"); error != cudaSuccess) {
        return error;
    }
    auto const found = runtime().find(stream);
    if (!found) {
        return give(cudaErrorInvalidResourceHandle);
    }
    *status = found->is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (auto const error = begin("cudaStreamBeginCapture"); error != cudaSuccess) {
        return error;
    }
    cudaGraph_t const graph = new_graph();
    auto const error = begin_capture(stream, graph, true);
    if (error != cudaSuccess) {
        forget_graph(graph);
    }
    return error;
}
cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t stream,
    cudaGraph_t graph,
    cudaGraphNode_t const*,
    cudaGraphEdgeData const*,
    std::size_t,
    cudaStreamCaptureMode
) {
    if (auto const error = begin("cudaStreamBeginCaptureToGraph"); error != cudaSuccess) {
        return error;
    }
    return begin_capture(stream, graph, false);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (auto const error = begin("cudaStreamEndCapture"); error != cudaSuccess) {
        return error;
    }
    auto const found = runtime().find(stream);
    if (!found || !found->is_capturing || found->capture->origin != stream) {
        return give(cudaErrorIllegalState);
    }
    auto const capture = found->capture;
    *graph = capture->graph;
    bool const is_joined = capture->is_joined();
    for (auto const& [other, clock] : capture->streams) {
        other->is_capturing = false;
        other->capture = nullptr;
    }
    if (!is_joined) {
        if (cudaGraph_t const lost = std::exchange(*graph, nullptr); capture->owns_graph) {
            forget_graph(lost);
        }
        return give(cudaErrorStreamCaptureUnjoined);
    }
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    if (auto const error = begin("cudaLaunchHostFunc"); error != cudaSuccess) {
        return error;
    }
    return launch(stream, [function, data] { function(data); }, cudaGraphNodeTypeHost);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    if (auto const error = begin("cudaEventCreateWithFlags"); error != cudaSuccess) {
        return error;
    }
    *event = new CUevent_st{{}, {}, current_device, {}, {}};
    std::lock_guard const lock{runtime().mutex};
    runtime().events.insert(*event);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (auto const error = begin("cudaEventDestroy"); error != cudaSuccess) {
        return error;
    }
    {
        std::lock_guard const lock{runtime().mutex};
        if (runtime().events.erase(event) == 0) {
            return give(cudaErrorInvalidResourceHandle);
        }
    }
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (auto const error = begin("cudaEventRecord"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<Milestone> before;
    if (auto const error = last_record(event, before); error != cudaSuccess) {
        return error;
    }
    auto const found = runtime().find(stream);
    if (!found || (stream != nullptr && found->device != event->device)) {
        return give(cudaErrorInvalidResourceHandle);
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
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (auto const error = begin("cudaEventQuery"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<Milestone> record;
    if (auto const error = last_record(event, record); error != cudaSuccess) {
        return error;
    }
    if (event->capture) {
        return give(cudaErrorCapturedEvent);
    }
    return give(!record || record->is_reached() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (auto const error = begin("cudaEventSynchronize"); error != cudaSuccess) {
        return error;
    }
    std::shared_ptr<Milestone> record;
    if (auto const error = last_record(event, record); error != cudaSuccess) {
        return error;
    }
    if (record) {
        record->wait();
    }
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
    if (auto const error = begin("cudaMalloc"); error != cudaSuccess) {
        return error;
    }
    *data = nullptr;
    if (bytes == 0) {
        return cudaSuccess;
    }
    *data = runtime().allocate(bytes, current_device, cudaMemoryTypeDevice);
    if (*data == nullptr) {
        return give(cudaErrorMemoryAllocation);
    }
    std::memset(*data, fake::poison, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
    if (auto const error = begin("cudaFree"); error != cudaSuccess) {
        return error;
    }
    if (data == nullptr) {
        return cudaSuccess;
    }
    for (auto const& stream : runtime().all_streams()) {
        if (stream->device == current_device) {
            stream->wait_until_idle();
        }
    }
    std::ptrdiff_t const bytes = runtime().forget(data, cudaMemoryTypeDevice);
    if (bytes < 0) {
        return give(cudaErrorInvalidValue);
    }
    std::memset(data, fake::poison, static_cast<std::size_t>(bytes));
    std::free(data);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
    if (auto const error = begin("cudaMallocAsync"); error != cudaSuccess) {
        return error;
    }
    auto const found = runtime().find(stream);
    *data = nullptr;
    if (!found) {
        return give(cudaErrorInvalidResourceHandle);
    }
    {
        std::lock_guard const lock{runtime().mutex};
        if (!runtime().has_pools) {
            return give(cudaErrorNotSupported);
        }
    }
    if (bytes == 0) {
        return cudaSuccess;
    }
    int const device = stream == nullptr ? current_device : found->device;
    *data = runtime().allocate(bytes, device, cudaMemoryTypeDevice);
    if (*data == nullptr) {
        return give(cudaErrorMemoryAllocation);
    }
    auto const error =
        launch(stream, [memory = *data, bytes] { std::memset(memory, fake::poison, bytes); });
    if (error != cudaSuccess) {
        runtime().forget(*data, cudaMemoryTypeDevice);
        std::free(std::exchange(*data, nullptr));
    }
    return error;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
    if (auto const error = begin("cudaFreeAsync"); error != cudaSuccess) {
        return error;
    }
    if (data == nullptr) {
        return cudaSuccess;
    }
    std::shared_ptr<CUstream_st> found;
    if (auto const error = waitable(stream, found); error != cudaSuccess) {
        return error;
    }
    std::ptrdiff_t const bytes = runtime().forget(data, cudaMemoryTypeDevice);
    if (bytes < 0) {
        return give(cudaErrorInvalidValue);
    }
    return launch(stream, [data, bytes] {
        std::memset(data, fake::poison, static_cast<std::size_t>(bytes));
        std::free(data);
    });
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned int) {
    if (auto const error = begin("cudaHostAlloc"); error != cudaSuccess) {
        return error;
    }
    *data = bytes == 0 ? nullptr : runtime().allocate(bytes, current_device, cudaMemoryTypeHost);
    return give(*data == nullptr && bytes != 0 ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
    return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* data) {
    if (auto const error = begin("cudaFreeHost"); error != cudaSuccess) {
        return error;
    }
    if (data != nullptr && runtime().forget(data, cudaMemoryTypeHost) < 0) {
        return give(cudaErrorInvalidValue);
    }
    std::free(data);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* pointer) {
    if (auto const error = begin("cudaPointerGetAttributes"); error != cudaSuccess) {
        return error;
    }
    auto* const address = const_cast<void*>(pointer);
    std::lock_guard const lock{runtime().mutex};
    auto const found = runtime().containing(pointer);
    *attributes = {};
    if (found == runtime().allocations.end()) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2; // cudaInvalidDeviceId
        attributes->hostPointer = address;
        return cudaSuccess;
    }
    attributes->type = found->second.type;
    attributes->device = found->second.device;
    attributes->devicePointer = address;
    attributes->hostPointer = found->second.type == cudaMemoryTypeHost ? address : nullptr;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void* to, void const* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream
) {
    if (auto const error = begin("cudaMemcpyAsync"); error != cudaSuccess) {
        return error;
    }
    return launch(stream, [=] {
        if (bytes != 0) { // the addresses may be null then
            std::memmove(to, from, bytes);
        }
    });
}
cudaError_t cudaMemcpy2DAsync(
    void* to,
    std::size_t to_pitch,
    void const* from,
    std::size_t from_pitch,
    std::size_t width,
    std::size_t height,
    cudaMemcpyKind,
    cudaStream_t stream
) {
    if (auto const error = begin("cudaMemcpy2DAsync"); error != cudaSuccess) {
        return error;
    }
    if (width > to_pitch || width > from_pitch) {
        return give(cudaErrorInvalidPitchValue);
    }
    return launch(stream, [=] {
        copy_rows(
            static_cast<std::byte*>(to),
            to_pitch,
            static_cast<std::byte const*>(from),
            from_pitch,
            width,
            height
        );
    });
}
/// Without arrays and without offsets: what is in linear memory.
cudaError_t cudaMemcpy3DAsync(cudaMemcpy3DParms const* parameters, cudaStream_t stream) {
    if (auto const error = begin("cudaMemcpy3DAsync"); error != cudaSuccess) {
        return error;
    }
    cudaMemcpy3DParms const p = *parameters;
    auto const has_offset = [](cudaPos const& pos) {
        return pos.x != 0 || pos.y != 0 || pos.z != 0;
    };
    if (p.srcArray != nullptr || p.dstArray != nullptr || has_offset(p.srcPos) ||
        has_offset(p.dstPos)) {
        return give(cudaErrorInvalidValue);
    }
    if (p.extent.width > p.srcPtr.pitch || p.extent.width > p.dstPtr.pitch) {
        return give(cudaErrorInvalidPitchValue);
    }
    return launch(stream, [p] {
        for (std::size_t slice = 0; slice < p.extent.depth; ++slice) {
            copy_rows(
                static_cast<std::byte*>(p.dstPtr.ptr) + slice * p.dstPtr.pitch * p.dstPtr.ysize,
                p.dstPtr.pitch,
                static_cast<std::byte const*>(p.srcPtr.ptr) +
                    slice * p.srcPtr.pitch * p.srcPtr.ysize,
                p.srcPtr.pitch,
                p.extent.width,
                p.extent.height
            );
        }
    });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    if (auto const error = begin("cudaMemsetAsync"); error != cudaSuccess) {
        return error;
    }
    return launch(stream, [=] { std::memset(to, value, bytes); }, cudaGraphNodeTypeMemset);
}
cudaError_t cudaMemset2DAsync(
    void* to,
    std::size_t pitch,
    int value,
    std::size_t width,
    std::size_t height,
    cudaStream_t stream
) {
    if (auto const error = begin("cudaMemset2DAsync"); error != cudaSuccess) {
        return error;
    }
    if (width > pitch) {
        return give(cudaErrorInvalidPitchValue);
    }
    return launch(stream, [=] {
        for (std::size_t row = 0; row < height; ++row) {
            std::memset(static_cast<std::byte*>(to) + row * pitch, value, width);
        }
    });
}

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned int) {
    if (auto const error = begin("cudaGraphCreate"); error != cudaSuccess) {
        return error;
    }
    *graph = new_graph();
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    if (auto const error = begin("cudaGraphDestroy"); error != cudaSuccess) {
        return error;
    }
    return give(forget_graph(graph) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
    if (auto const error = begin("cudaGraphGetNodes"); error != cudaSuccess) {
        return error;
    }
    if (nodes == nullptr) {
        *count = graph->nodes.size();
        return cudaSuccess;
    }
    for (std::size_t i = 0; i < *count; ++i) {
        nodes[i] = i < graph->nodes.size() ? graph->nodes[i].get() : nullptr;
    }
    return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
    if (auto const error = begin("cudaGraphNodeGetType"); error != cudaSuccess) {
        return error;
    }
    *type = node->type;
    return cudaSuccess;
}
cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    if (auto const error = begin("cudaGraphInstantiateWithFlags"); error != cudaSuccess) {
        return error;
    }
    *executable = new CUgraphExec_st;
    for (auto const& node : graph->nodes) {
        (*executable)->nodes.push_back({node});
    }
    std::lock_guard const lock{runtime().mutex};
    runtime().executables.insert(*executable);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    if (auto const error = begin("cudaGraphExecDestroy"); error != cudaSuccess) {
        return error;
    }
    {
        std::lock_guard const lock{runtime().mutex};
        if (runtime().executables.erase(executable) == 0) {
            return give(cudaErrorInvalidValue);
        }
    }
    delete executable;
    return cudaSuccess;
}
cudaError_t
cudaGraphNodeSetEnabled(cudaGraphExec_t executable, cudaGraphNode_t node, unsigned int is_enabled) {
    if (auto const error = begin("cudaGraphNodeSetEnabled"); error != cudaSuccess) {
        return error;
    }
    if (node->type != cudaGraphNodeTypeKernel && node->type != cudaGraphNodeTypeMemcpy &&
        node->type != cudaGraphNodeTypeMemset) {
        return give(cudaErrorInvalidValue);
    }
    for (auto& own : executable->nodes) {
        if (own.node.get() == node) {
            own.is_enabled = is_enabled != 0;
            return cudaSuccess;
        }
    }
    return give(cudaErrorInvalidValue);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (auto const error = begin("cudaGraphLaunch"); error != cudaSuccess) {
        return error;
    }
    for (auto const& [node, is_enabled] : executable->nodes) {
        if (is_enabled) {
            if (auto const error = launch(stream, node->make()); error != cudaSuccess) {
                return error;
            }
        }
    }
    return cudaSuccess;
}

} // extern "C"
