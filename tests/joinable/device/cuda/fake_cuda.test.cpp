// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/guarded.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;

cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    return stream;
}
cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    return event;
}
template <class T>
T* allocate(std::size_t count) {
    void* data = nullptr;
    REQUIRE(cudaMalloc(&data, count * sizeof(T)) == cudaSuccess);
    return static_cast<T*>(data);
}

/// Holds a stream until it is opened.
struct Gate {
    std::atomic<bool> is_open{false};
    void hold(cudaStream_t stream) {
        fake::enqueue(stream, [this] { is_open.wait(false); });
    }
    void open() {
        is_open = true;
        is_open.notify_all();
    }
};

TEST_CASE("a stream runs in order, beside the host, and says when it is idle") {
    cudaStream_t const stream = make_stream();
    std::vector<int> order;
    Gate gate;
    gate.hold(stream);
    for (int i = 0; i < 3; ++i) {
        fake::enqueue(stream, [&order, i] { order.push_back(i); });
    }
    CHECK_FALSE(fake::is_idle(stream));
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK(cudaGetLastError() == cudaErrorNotReady);
    CHECK(cudaGetLastError() == cudaSuccess);
    gate.open();
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(fake::is_idle(stream));
    CHECK(cudaStreamQuery(stream) == cudaSuccess);
    CHECK(order == std::vector{0, 1, 2});
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

/// What `call` says while its process ends by a signal, in one that is forked for it.
template <class Call>
std::string last_words_of(Call const& call) {
    fake::drain(); // no thread of a stream is left that holds a lock
    int ends[2]{};
    REQUIRE(pipe(ends) == 0);
    pid_t const child = fork();
    if (child == 0) {
        std::signal(SIGABRT, SIG_DFL);
        std::signal(SIGSEGV, SIG_DFL);
        dup2(ends[1], STDERR_FILENO);
        call();
        _exit(0);
    }
    close(ends[1]);
    std::string text(500, ' '); // less than a pipe holds
    int status = 0;
    bool const has_died = waitpid(child, &status, 0) == child && WIFSIGNALED(status);
    ssize_t const size = read(ends[0], text.data(), text.size());
    close(ends[0]);
    text.resize(has_died && size > 0 ? static_cast<std::size_t>(size) : 0);
    return text;
}
template <class Call>
bool ends_the_program(Call const& call) {
    return last_words_of(call).starts_with("fake_cuda: ");
}

TEST_CASE("what was destroyed is undefined, which ends the program") {
    cudaStream_t const stream = make_stream();
    cudaEvent_t const event = make_event();
    CHECK(cudaEventDestroy(event) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(ends_the_program([&] { (void)cudaStreamQuery(stream); }));
    CHECK(ends_the_program([&] { (void)cudaMemsetAsync(nullptr, 0, 0, stream); }));
    CHECK(ends_the_program([&] { (void)cudaStreamDestroy(stream); }));
    CHECK(ends_the_program([&] { (void)cudaEventRecord(event, nullptr); }));
    CHECK(ends_the_program([&] { (void)cudaEventDestroy(event); }));
    CHECK_FALSE(ends_the_program([&] { (void)cudaStreamQuery(nullptr); }));
}

TEST_CASE("streams do not wait for each other, unless an event says so") {
    cudaStream_t const first = make_stream();
    cudaStream_t const second = make_stream();
    cudaEvent_t const event = make_event();
    Gate gate;
    int value = 0;
    std::vector<int> seen;
    gate.hold(first);
    fake::enqueue(first, [&] { value = 7; });
    fake::enqueue(second, [&] { seen.push_back(1); }); // not held
    CHECK(cudaStreamSynchronize(second) == cudaSuccess);
    CHECK(cudaEventQuery(event) == cudaSuccess); // nothing is recorded
    CHECK(cudaEventRecord(event, first) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
    fake::enqueue(second, [&] { seen.push_back(value); });
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    CHECK_FALSE(fake::is_idle(second));
    CHECK(seen == std::vector{1});
    gate.open();
    CHECK(cudaEventSynchronize(event) == cudaSuccess);
    CHECK(cudaEventDestroy(event) == cudaSuccess); // who waits for it keeps what it needs
    CHECK(cudaStreamSynchronize(second) == cudaSuccess);
    CHECK(seen == std::vector{1, 7});
    (void)cudaStreamDestroy(first);
    (void)cudaStreamDestroy(second);
    fake::drain();
    CHECK(fake::live_streams() == 0);
    CHECK(fake::live_events() == 0);
}

TEST_CASE("a wait is for the record that was the last one when it was put on the stream") {
    cudaStream_t const first = make_stream();
    cudaStream_t const second = make_stream();
    cudaEvent_t const event = make_event();
    CHECK(cudaEventRecord(event, first) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
    Gate gate;
    gate.hold(first);
    CHECK(cudaEventRecord(event, first) == cudaSuccess);
    CHECK(cudaStreamSynchronize(second) == cudaSuccess); // else it would wait for the gate
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    gate.open();
    (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(first);
    (void)cudaStreamDestroy(second);
    fake::drain();
}

TEST_CASE("memory has a device, is full of poison, and is missed when it is not freed") {
    CHECK(fake::live_allocations() == 0);
    CHECK(cudaSetDevice(3) == cudaSuccess);
    auto* const bytes = allocate<unsigned char>(100);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(fake::live_allocations() == 1);
    {
        fake::DeviceCode const code;
        CHECK(bytes[99] == fake::poison);
    }
    CHECK(fake::is_device_memory(bytes, 100));
    CHECK_FALSE(fake::is_device_memory(bytes, 101));
    cudaPointerAttributes attributes{};
    CHECK(cudaPointerGetAttributes(&attributes, bytes + 99) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeDevice);
    CHECK(attributes.device == 3);
    int host = 0;
    CHECK(cudaPointerGetAttributes(&attributes, &host) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeUnregistered);
    void* pinned = nullptr;
    CHECK(cudaHostAlloc(&pinned, 8, cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaPointerGetAttributes(&attributes, pinned) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeHost);
    CHECK(cudaFreeHost(pinned) == cudaSuccess);
    void* managed = nullptr;
    CHECK(cudaMallocManaged(&managed, 0, cudaMemAttachGlobal) == cudaErrorInvalidValue);
    CHECK(cudaMallocManaged(&managed, 8, cudaMemAttachGlobal) == cudaSuccess);
    CHECK(fake::is_device_memory(managed, 8));
    CHECK(cudaPointerGetAttributes(&attributes, managed) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeManaged);
    CHECK(attributes.hostPointer == managed);
    CHECK(cudaFree(managed) == cudaSuccess);
    CHECK(cudaFree(bytes) == cudaSuccess);
    CHECK(cudaFree(bytes) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(fake::live_allocations() == 0);
}

/// Puts 1 into each element on a stream, as a kernel does.
void fill(cudaStream_t stream, int* data, std::size_t count) {
    fake::enqueue(stream, [=] { std::fill_n(data, count, 1); });
}

TEST_CASE("the host cannot reach a device's memory, and its kernels, its copies and nobody else do"
) {
    if constexpr (!fake::guards_memory) {
        return;
    }
    auto const made = [] {
        (void)cudaSetDevice(3);
        return allocate<int>(4);
    };
    std::string const read = last_words_of([&] { _exit(made()[1]); });
    CHECK(read.starts_with("fake_cuda: the host read device memory: byte 4 of 16 at 0x"));
    CHECK(read.ends_with(" of device 3\n"));
    CHECK(last_words_of([&] { made()[3] = 1; }
    ).starts_with("fake_cuda: the host wrote device memory: byte 12 of 16 at 0x"));
    CHECK(ends_the_program([&] { // memory of a pool
        void* data = nullptr;
        (void)cudaMallocAsync(&data, 16, nullptr);
        static_cast<int*>(data)[0] = 1;
    }));
    CHECK(ends_the_program([&] { // a kernel has had it, in DeviceCode the same
        int* const data = made();
        cudaStream_t const stream = make_stream();
        fill(stream, data, 4);
        (void)cudaStreamSynchronize(stream);
        fake::drain();
        data[0] = 1;
    }));
    CHECK(ends_the_program([&] { // a function of the host, in a stream's order
        (void)cudaLaunchHostFunc(
            make_stream(), [](void* data) { *static_cast<int*>(data) = 1; }, made()
        );
        fake::drain();
    }));
    CHECK(ends_the_program([&] { // other pages than those of which a handle was made
        int* const data = made();
        cudaIpcMemHandle_t handle{};
        (void)cudaIpcGetMemHandle(&handle, data);
        data[0] = 1;
    }));
    CHECK(last_words_of([] { std::raise(SIGSEGV); }).empty()); // what is no touch is not spoken of
}

TEST_CASE("device memory is reached by several at once, and goes while a kernel has it open") {
    cudaStream_t const first = make_stream();
    cudaStream_t const second = make_stream();
    void* memory = nullptr;
    REQUIRE(cudaMallocAsync(&memory, 4 * sizeof(int), first) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(first) == cudaSuccess);
    int* const data = static_cast<int*>(memory);
    Gate gate;
    fake::enqueue(first, [&] {
        data[0] = 1;
        gate.is_open.wait(false);
        data[1] = 1;
    });
    fill(second, data + 2, 2);
    CHECK(cudaStreamSynchronize(second) == cudaSuccess); // which closes nothing of the first
    CHECK(cudaFreeAsync(memory, first) == cudaSuccess);
    gate.open();
    CHECK(cudaStreamSynchronize(first) == cudaSuccess);
    std::vector<int> pinned_back(4);
    void* more[20]{};
    for (void*& one : more) { // some have the place of the first, and are closed as all
        REQUIRE(cudaMalloc(&one, 16) == cudaSuccess);
    }
    fake::enqueue(first, [&] { // each is opened
        for (void* const one : more) {
            std::fill_n(static_cast<int*>(one), 4, 5);
        }
    });
    CHECK(
        cudaMemcpyAsync(pinned_back.data(), more[19], 16, cudaMemcpyDeviceToHost, first) ==
        cudaSuccess
    );
    CHECK(cudaStreamSynchronize(first) == cudaSuccess);
    CHECK(pinned_back == std::vector{5, 5, 5, 5});
    for (void* const one : more) {
        CHECK(cudaFree(one) == cudaSuccess);
    }
    (void)cudaStreamDestroy(first);
    (void)cudaStreamDestroy(second);
    fake::drain();
}

TEST_CASE("memory of a stream is poisoned when the stream comes to it") {
    cudaStream_t const stream = make_stream();
    Gate gate;
    gate.hold(stream);
    void* data = nullptr;
    CHECK(cudaMallocAsync(&data, 4, stream) == cudaSuccess);
    {
        fake::DeviceCode const code;
        std::memset(data, 0, 4); // too early: not in the order of the stream
    }
    CHECK(fake::live_allocations() == 1);
    gate.open();
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    {
        fake::DeviceCode const code;
        CHECK(static_cast<unsigned char*>(data)[0] == fake::poison);
    }
    CHECK(cudaFreeAsync(data, stream) == cudaSuccess);
    CHECK(fake::live_allocations() == 0);
    fake::set_memory_pools(false);
    CHECK(cudaMallocAsync(&data, 4, stream) == cudaErrorNotSupported);
    fake::set_memory_pools(true);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    fake::drain();
    (void)cudaGetLastError();
}

TEST_CASE("copies of one, two and three dimensions, and memset, move what they say") {
    cudaStream_t const stream = make_stream();
    std::vector<int> host(24);
    for (std::size_t i = 0; i < host.size(); ++i) {
        host[i] = static_cast<int>(i);
    }
    auto* const all = allocate<int>(24);
    auto* const part = allocate<int>(8);
    CHECK(cudaMemcpyAsync(all, host.data(), 96, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    // Two of six columns of four rows.
    CHECK(
        cudaMemcpy2DAsync(part, 8, all + 1, 24, 8, 4, cudaMemcpyDeviceToDevice, stream) ==
        cudaSuccess
    );
    std::vector<int> back(8);
    CHECK(cudaMemcpyAsync(back.data(), part, 32, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(back == std::vector{1, 2, 7, 8, 13, 14, 19, 20});
    // Two of three columns of two of four rows of two slices.
    cudaMemcpy3DParms box{};
    box.srcPtr = {all, 12, 3, 4};
    box.dstPtr = {part, 8, 2, 2};
    box.extent = {8, 2, 2};
    box.kind = cudaMemcpyDefault;
    CHECK(cudaMemcpy3DAsync(&box, stream) == cudaSuccess);
    CHECK(cudaMemcpyAsync(back.data(), part, 32, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(back == std::vector{0, 1, 3, 4, 12, 13, 15, 16});
    CHECK(cudaMemset2DAsync(part, 8, 0, 4, 4, stream) == cudaSuccess);
    CHECK(cudaMemsetAsync(part, 0, 8, stream) == cudaSuccess);
    CHECK(cudaMemcpyAsync(back.data(), part, 32, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(back == std::vector{0, 0, 0, 4, 0, 13, 0, 16});
    CHECK(
        cudaMemcpy2DAsync(part, 4, all, 24, 8, 4, cudaMemcpyDefault, stream) ==
        cudaErrorInvalidPitchValue
    );
    (void)cudaGetLastError();
    (void)cudaFree(all);
    (void)cudaFree(part);
    (void)cudaStreamDestroy(stream);
    fake::drain();
}

TEST_CASE("before a copy from pageable memory the host waits for the stream, not from pinned memory"
) {
    cudaStream_t const stream = make_stream();
    auto* const there = allocate<int>(2);
    void* pinned = nullptr;
    REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
    *static_cast<int*>(pinned) = 5;
    Gate gate;
    gate.hold(stream);
    CHECK(cudaMemcpyAsync(there, pinned, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    CHECK_FALSE(fake::is_idle(stream));
    int const pageable = 6;
    bool has_waited = false;
    std::thread copy{[&] {
        auto const error = cudaMemcpyAsync(there + 1, &pageable, 4, cudaMemcpyHostToDevice, stream);
        has_waited = error == cudaSuccess && gate.is_open;
    }};
    std::this_thread::sleep_for(std::chrono::milliseconds{20});
    gate.open();
    copy.join();
    CHECK(has_waited);
    int back[2]{};
    CHECK(cudaMemcpyAsync(back, there, 8, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(back[0] == 5);
    CHECK(back[1] == 6);
    CHECK(cudaFreeHost(pinned) == cudaSuccess);
    CHECK(cudaFree(there) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("an injected error is given once, to the thread that asked for it, and does nothing else"
) {
    fake::fail_next(cudaErrorMemoryAllocation, 1);
    int device = -1;
    std::thread{[] {
        int other = -1;
        CHECK(cudaGetDevice(&other) == cudaSuccess);
        CHECK(cudaGetDevice(&other) == cudaSuccess);
    }}.join();
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    void* data = nullptr;
    CHECK(cudaMalloc(&data, 4) == cudaErrorMemoryAllocation);
    CHECK(data == nullptr);
    CHECK(fake::has_failed());
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    fake::fail_next(cudaErrorUnknown);
    CHECK_FALSE(fake::has_failed());
    CHECK(cudaGetDevice(&device) == cudaSuccess);
}

TEST_CASE("after an error that leaves a process inconsistent, all calls give it, but things go back"
) {
    std::size_t const events = fake::live_events();
    cudaEvent_t const event = make_event();
    cudaStream_t const stream = make_stream();
    fake::fail_next(cudaErrorIllegalAddress);
    CHECK(cudaStreamQuery(stream) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    void* data = nullptr;
    CHECK(cudaMalloc(&data, 4) == cudaErrorIllegalAddress);
    CHECK_THROWS_AS(fake::enqueue(stream, [] {}), std::runtime_error);
    std::thread{[&] { CHECK(cudaStreamQuery(stream) == cudaSuccess); }}.join();
    CHECK(cudaEventDestroy(event) == cudaErrorIllegalAddress);
    CHECK(fake::live_events() == events);
    CHECK(cudaStreamDestroy(stream) == cudaErrorIllegalAddress);
    fake::relaunch();
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaMalloc(&data, 4) == cudaSuccess);
    CHECK(cudaFree(data) == cudaSuccess);
    fake::drain();
}

TEST_CASE("each operation takes as long as it is told to") {
    cudaStream_t const stream = make_stream();
    fake::delay_every_operation(std::chrono::milliseconds{5});
    auto const start = std::chrono::steady_clock::now();
    fake::enqueue(stream, [] {});
    fake::enqueue(stream, [] {});
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    fake::delay_every_operation({});
    CHECK(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds{10});
    (void)cudaStreamDestroy(stream);
    fake::drain();
}

TEST_CASE("the time between two events is known when a stream has come to both") {
    cudaStream_t const stream = make_stream();
    cudaEvent_t const start = make_event();
    cudaEvent_t const end = make_event();
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorInvalidResourceHandle);
    Gate gate;
    CHECK(cudaEventRecord(start, stream) == cudaSuccess);
    gate.hold(stream);
    CHECK(cudaEventRecord(end, stream) == cudaSuccess);
    CHECK(cudaEventSynchronize(start) == cudaSuccess);
    CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
    auto const begun = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds{2});
    auto const least = std::chrono::steady_clock::now() - begun;
    gate.open();
    CHECK(cudaEventSynchronize(end) == cudaSuccess);
    CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess);
    CHECK(milliseconds >= std::chrono::duration<float, std::milli>{least}.count());
    CHECK(cudaEventElapsedTime(&milliseconds, end, start) == cudaSuccess);
    CHECK(milliseconds < 0);
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
    cudaGetLastError();
}

TEST_CASE("devices are as many as a test says, and a stream and its events are of one") {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
    CHECK(count == 8);
    fake::set_device_count(2);
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    cudaStream_t const stream = make_stream();
    CHECK(cudaSetDevice(0) == cudaSuccess);
    int device = -1;
    CHECK(cudaStreamGetDevice(stream, &device) == cudaSuccess);
    CHECK(device == 1);
    cudaEvent_t const event = make_event();
    CHECK(cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
    CHECK_THROWS(fake::enqueue(stream, [] {})); // a kernel
    CHECK(cudaMemsetAsync(nullptr, 0, 0, stream) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess);
    CHECK(cudaEventQuery(event) == cudaSuccess);
    int runs = 0;
    fake::enqueue(1, stream, [&] { ++runs; }); // makes the device current
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(runs == 1);
    CHECK(cudaEventRecord(event, nullptr) == cudaSuccess); // each device has its own null stream
    CHECK(cudaSetDevice(1) == cudaSuccess);
    CHECK(cudaEventRecord(event, nullptr) == cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamGetDevice(nullptr, &device) == cudaSuccess);
    CHECK(device == 1);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    fake::set_device_count(8);
    (void)cudaGetLastError();
    (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(stream);
    fake::drain();
}

/// Ends the capture of a stream, in which something invalid was tried.
void is_invalid_and_ends(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    CHECK(cudaStreamIsCapturing(stream, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusInvalidated);
    CHECK_THROWS(fake::enqueue(stream, [] {}));
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    (void)cudaGetLastError();
    CHECK(fake::live_graphs() == 0);
}

TEST_CASE("a stream that captures runs nothing and cannot be waited for") {
    cudaStream_t const stream = make_stream();
    cudaStreamCaptureStatus status{};
    CHECK(cudaStreamIsCapturing(stream, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusNone);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    CHECK(cudaStreamIsCapturing(stream, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusActive);
    int runs = 0;
    fake::enqueue(stream, [&] { ++runs; });
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(runs == 0);
    (void)cudaGraphDestroy(graph);
    CHECK(fake::live_graphs() == 0);
    for (auto const ask : {&cudaStreamSynchronize, &cudaStreamQuery}) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(ask(stream) == cudaErrorStreamCaptureUnsupported);
        is_invalid_and_ends(stream);
    }
    (void)cudaStreamDestroy(stream);
    fake::drain();
}

TEST_CASE("a capture forbids unsafe calls as its mode and those of other threads say") {
    // The mode of the capture, whether the call is in its thread, the mode of that thread.
    constexpr auto global = cudaStreamCaptureModeGlobal;
    constexpr auto local = cudaStreamCaptureModeThreadLocal;
    constexpr auto relaxed = cudaStreamCaptureModeRelaxed;
    cudaStream_t const stream = make_stream();
    cudaStream_t const other = make_stream();
    cudaEvent_t const event = make_event();
    void* const block = allocate<float>(1);
    std::vector<std::function<cudaError_t()>> const unsafe{
        [&] { return cudaEventQuery(event); },
        [&] { return cudaEventSynchronize(event); },
        [&] { return cudaStreamQuery(other); },
        [&] { return cudaStreamSynchronize(other); },
        [&] {
            void* made = nullptr;
            auto const error = cudaMalloc(&made, 4);
            (void)(error == cudaSuccess ? cudaFree(made) : error);
            return error;
        },
        [&] {
            void* made = nullptr;
            auto const error = cudaMallocHost(&made, 4);
            (void)(error == cudaSuccess ? cudaFreeHost(made) : error);
            return error;
        },
    };
    for (auto const begun : {global, local, relaxed}) {
        for (bool const is_own : {true, false}) {
            for (auto const mode : {global, local, relaxed}) {
                for (auto const& call : unsafe) {
                    CAPTURE(int{begun});
                    CAPTURE(is_own);
                    CAPTURE(int{mode});
                    bool const is_forbidden =
                        mode != relaxed &&
                        (is_own ? begun != relaxed : begun == global && mode == global);
                    fake::drain(); // a query gives success
                    CHECK(cudaStreamBeginCapture(stream, begun) == cudaSuccess);
                    cudaError_t found{};
                    auto const in_mode = [&] {
                        auto before = mode;
                        CHECK(cudaThreadExchangeStreamCaptureMode(&before) == cudaSuccess);
                        CHECK(before == global);
                        found = call();
                        CHECK(cudaThreadExchangeStreamCaptureMode(&before) == cudaSuccess);
                        CHECK(before == mode);
                        CHECK(cudaEventRecord(event, other) == cudaSuccess); // allowed in any case
                        (void)cudaGetLastError();
                    };
                    if (is_own) {
                        in_mode();
                    } else {
                        std::thread{in_mode}.join();
                    }
                    if (is_forbidden) {
                        CHECK(found == cudaErrorStreamCaptureUnsupported);
                        is_invalid_and_ends(stream);
                    } else {
                        CHECK(found == cudaSuccess);
                        cudaGraph_t graph = nullptr;
                        CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
                        (void)cudaGraphDestroy(graph);
                    }
                }
            }
        }
    }
    CHECK(cudaFree(block) == cudaSuccess);
    (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(other);
    (void)cudaStreamDestroy(stream);
    fake::drain();
    CHECK(fake::live_graphs() == 0);
}

TEST_CASE("a capture that is not relaxed ends in its thread, and a device that captures cannot stop"
) {
    cudaStream_t const stream = make_stream();
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    std::thread{[&] {
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureWrongThread);
    }}.join();
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    (void)cudaGraphDestroy(graph);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaErrorStreamCaptureUnsupported);
    is_invalid_and_ends(stream);
    (void)cudaStreamDestroy(stream);
    fake::drain();
}

TEST_CASE("the null stream of a device is ordered with its blocking streams, and with no others") {
    cudaStream_t blocking = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault) == cudaSuccess);
    cudaStream_t const other = make_stream();
    for (bool const is_null_first : {true, false}) {
        CAPTURE(is_null_first);
        cudaStream_t const first = is_null_first ? nullptr : blocking;
        cudaStream_t const second = is_null_first ? blocking : nullptr;
        Gate gate;
        std::atomic<int> seen{0};
        std::atomic<int> value{0};
        gate.hold(first);
        fake::enqueue(first, [&] { value = 7; });
        fake::enqueue(second, [&] { seen = value.load(); });
        fake::enqueue(other, [&] { value = 3; });
        CHECK(cudaStreamSynchronize(other) == cudaSuccess); // not held
        CHECK(cudaSetDevice(1) == cudaSuccess);
        CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess); // nor is that of another device
        CHECK(cudaSetDevice(0) == cudaSuccess);
        CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady);
        CHECK(cudaStreamQuery(second) == cudaErrorNotReady);
        gate.open();
        CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);
        CHECK(cudaStreamSynchronize(second) == cudaSuccess);
        CHECK(seen == 7);
    }
    (void)cudaGetLastError();
    (void)cudaStreamDestroy(other);
    (void)cudaStreamDestroy(blocking);
    fake::drain();
}

TEST_CASE("the null stream cannot be used while a blocking stream of its device captures") {
    cudaStreamCaptureStatus status{};
    cudaEvent_t const event = make_event();
    std::vector<std::function<cudaError_t()>> const uses{
        [] { return cudaStreamQuery(nullptr); },
        [] { return cudaStreamSynchronize(nullptr); },
        [&] { return cudaEventRecord(event, nullptr); },
        [&] { return cudaStreamWaitEvent(nullptr, event, 0); },
    };
    for (auto const& use : uses) {
        for (unsigned int const flags :
             {0x00U, 0x01U}) { // cudaStreamDefault, cudaStreamNonBlocking
            cudaStream_t stream = nullptr;
            REQUIRE(cudaStreamCreateWithFlags(&stream, flags) == cudaSuccess);
            bool const is_blocking = flags == 0;
            auto const expected = is_blocking ? cudaErrorStreamCaptureImplicit : cudaSuccess;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
            auto mode = cudaStreamCaptureModeRelaxed;
            (void)cudaThreadExchangeStreamCaptureMode(&mode);
            CHECK(cudaStreamIsCapturing(nullptr, &status) == expected);
            CHECK(cudaStreamIsCapturing(stream, &status) == cudaSuccess);
            CHECK(status == cudaStreamCaptureStatusActive); // asking does no harm
            CHECK(cudaSetDevice(1) == cudaSuccess);
            CHECK(cudaStreamIsCapturing(nullptr, &status) == cudaSuccess); // that of device 1
            CHECK(cudaSetDevice(0) == cudaSuccess);
            CHECK(use() == expected);
            (void)cudaThreadExchangeStreamCaptureMode(&mode);
            if (is_blocking) {
                is_invalid_and_ends(stream);
            } else {
                cudaGraph_t graph = nullptr;
                CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
                (void)cudaGraphDestroy(graph);
            }
            (void)cudaStreamDestroy(stream);
        }
    }
    (void)cudaGetLastError();
    (void)cudaEventDestroy(event);
    fake::drain();
}

TEST_CASE("a graph runs what its streams were given, as often as it is launched") {
    cudaStream_t const stream = make_stream();
    cudaStream_t const other = make_stream();
    cudaEvent_t event = nullptr;
    (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    std::vector<int> log;
    auto const capture = [&](bool joins) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        fake::enqueue(stream, [&] { log.push_back(1); });
        CHECK(cudaEventRecord(event, stream) == cudaSuccess);
        CHECK(cudaStreamWaitEvent(other, event, 0) == cudaSuccess);
        fake::enqueue(other, [&] { log.push_back(2); });
        CHECK(cudaEventRecord(event, other) == cudaSuccess);
        CHECK(cudaEventQuery(event) == cudaErrorCapturedEvent);
        if (joins) {
            CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess);
        }
        cudaGraph_t graph = nullptr;
        CHECK(
            cudaStreamEndCapture(stream, &graph) ==
            (joins ? cudaSuccess : cudaErrorStreamCaptureUnjoined)
        );
        return graph;
    };
    CHECK(capture(false) == nullptr);
    cudaGraph_t const graph = capture(true);
    cudaGraphExec_t executable = nullptr;
    CHECK(cudaGraphInstantiateWithFlags(&executable, graph, 0) == cudaSuccess);
    CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
    std::vector<cudaGraphNode_t> nodes(2);
    std::size_t count = nodes.size();
    CHECK(cudaGraphGetNodes(graph, nodes.data(), &count) == cudaSuccess);
    CHECK(cudaGraphNodeSetEnabled(executable, nodes[0], 0) == cudaSuccess);
    CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
    fake::drain();
    CHECK(log == std::vector<int>{1, 2, 2});
    (void)cudaGraphExecDestroy(executable);
    (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(other);
    (void)cudaStreamDestroy(stream);
    fake::drain();
    CHECK(fake::live_graphs() == 0);
}

TEST_CASE("handles are given of cudaMalloc's memory only, by its base") {
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    cudaStream_t const stream = make_stream();
    void* of_a_pool = nullptr;
    void* own = nullptr;
    void* pinned = nullptr;
    REQUIRE(cudaMallocAsync(&of_a_pool, 256, stream) == cudaSuccess);
    REQUIRE(cudaMalloc(&own, 256) == cudaSuccess);
    REQUIRE(cudaMallocHost(&pinned, 256) == cudaSuccess);
    cudaIpcMemHandle_t handle{};
    CHECK(cudaIpcGetMemHandle(&handle, of_a_pool) == cudaErrorInvalidValue);
    CHECK(cudaIpcGetMemHandle(&handle, pinned) == cudaErrorInvalidValue);
    CHECK(cudaIpcGetMemHandle(&handle, static_cast<char*>(own) + 64) == cudaErrorInvalidValue);
    CHECK(cudaIpcGetMemHandle(&handle, own) == cudaSuccess);
    (void)cudaGetLastError();
    CHECK(cudaFreeAsync(of_a_pool, stream) == cudaSuccess);
    fake::drain();
    void* again = nullptr; // it may be the memory that the pool had
    REQUIRE(cudaMalloc(&again, 256) == cudaSuccess);
    CHECK(cudaIpcGetMemHandle(&handle, again) == cudaSuccess);
    for (void* const data : {own, again}) {
        CHECK(cudaFree(data) == cudaSuccess);
    }
    CHECK(cudaFreeHost(pinned) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    fake::drain();
}

} // namespace
