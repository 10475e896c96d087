// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <atomic>
#include <cstddef>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/device/arena.hpp>
#include <joinable/nccl_graphs.hpp>

/// @file
/// Which thread of an engine calls a communicator, what device is current there, what other threads
/// capture, and what errors the engine has left.

namespace {

using namespace joinable_tests;
using doctest::Contains;
using joinable::ContractViolation;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

int current_device() {
    int device = -1;
    cuda(cudaGetDevice(&device));
    return device;
}

/// What a test gives to calls of a communicator, allocated before.
struct Data {
    explicit Data(NcclCommunicator const& comm)
        : sums(2), parts(static_cast<std::size_t>(comm.size())), host(2),
          tensor{joinable::DType::f32, {2}, {1}}, copy{joinable::DType::f32, {2}, {1}} {}

    [[nodiscard]] float* numbers() const { return static_cast<float*>(sums.buffer().data); }

    DeviceArray<float> sums;
    DeviceArray<float> parts;
    std::vector<float> host;
    DeviceTensor tensor;
    DeviceTensor copy;
};

/// Calls everything that runs on a device, on the present stream of the caller.
void call_everything(NcclCommunicator& comm, Data& data) {
    cudaStream_t const stream = comm.stream();
    auto const size = static_cast<float>(comm.size());
    auto& memory = comm.device_memory();
    float const mine[] = {1.0F, 2.0F};
    for (int i = 0; i < 3; ++i) { // later ones reuse events
        memory.upload(mine, data.numbers(), sizeof mine);
        comm.all_reduce(data.sums.buffer(), ReduceOp::sum, 0.5).wait();
        memory.download(data.numbers(), data.host.data(), sizeof mine);
        CHECK(data.host == std::vector{0.5F * size, 1.0F * size});
    }
    {
        auto first = comm.all_reduce(data.sums.buffer(), ReduceOp::sum);
        auto second = comm.all_reduce(data.parts.buffer(), ReduceOp::max);
        while (!second.test()) {
        }
        first.synchronize();
    }
    {
        std::optional<joinable::NcclWork> sent;
        std::optional<joinable::NcclWork> received;
        {
            auto const group = comm.group();
            sent.emplace(comm.send(data.sums.part(0, 1), comm.rank()));
            received.emplace(comm.receive(data.parts.part(0, 1), comm.rank()));
        }
        received->wait();
    }
    CHECK(comm.missing_ranks().empty());
    {
        joinable::Arena const arena = comm.allocate(64);
        CHECK(comm.register_arena(arena));
        float* const there = reinterpret_cast<float*>(arena.data());
        comm.all_reduce({there, 2, joinable::DType::f32}, ReduceOp::sum, 2.0).wait();
        joinable::Arena const other = memory.allocate(64, 64);
        joinable::Arena const staging = memory.allocate_staging(64);
        CHECK(other.data() != nullptr);
    }
    memory.copy(data.tensor.view(), data.copy.view());
    memory.finish();
    comm.synchronize();
    comm.barrier();
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(comm.stream() == stream);
}

TEST_CASE("a communicator is called from any thread, whatever device is current there") {
    run_nccl_ranks({1, 2, 3}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Data data{comm};
        for (cudaStream_t const caller : {stream, cudaStream_t{nullptr}, comm.stream()}) {
            comm.set_stream(caller);
            std::async(
                std::launch::async,
                [&] { // its device is 0 at first
                    CHECK(current_device() == 0);
                    call_everything(comm, data);
                    CHECK(current_device() == 0);
                    int const other = (comm.device() + 1) % 8;
                    cuda(cudaSetDevice(other));
                    call_everything(comm, data);
                    CHECK(current_device() == other);
                }
            )
                .get();
        }
    });
    fake_cuda::drain();
    CHECK(fake_cuda::live_allocations() == 0);
    CHECK(fake_cuda::live_events() == 0);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("one thread uses communicators of two devices in turn, and ends them") {
    run_ranks({1, 2}, [](joinable::ThreadCommunicator& hosts) {
        auto others = hosts.split(0, hosts.rank());
        NcclCommunicator first{hosts, {.device = hosts.rank()}};
        NcclCommunicator second{others, {.device = hosts.rank() + 4}};
        cuda(cudaSetDevice(first.device()));
        Data of_first{first};
        cuda(cudaSetDevice(second.device()));
        Data of_second{second};
        for (int i = 0; i < 3; ++i) {
            call_everything(first, of_first);
            call_everything(second, of_second);
        }
        CHECK(current_device() == second.device());
        first.synchronize();
        second.synchronize();
    });
    fake_cuda::drain();
    CHECK(fake_cuda::live_allocations() == 0);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a step is captured and run by a thread whose current device is another one") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Data data{comm};
        std::async(std::launch::async, [&] {
            int const other = (comm.device() + 1) % 8;
            cuda(cudaSetDevice(other));
            joinable::CapturedStep step{
                comm,
                {data.sums.buffer()},
                [&](auto const& ready) {
                    CHECK(current_device() == other); // that of the engine is its own
                    cuda(cudaMemsetAsync(data.numbers(), 0, 2 * sizeof(float), stream));
                    ready(0);
                }
            };
            step.step();
            step.step();
            comm.synchronize();
            CHECK(current_device() == other);
        }).get();
    });
    fake_cuda::drain();
    CHECK(fake_cuda::live_events() == 0);
}

/// A stream of a device that captures in CUDA's default mode, in a thread of its own, meanwhile.
class CaptureElsewhere {
public:
    explicit CaptureElsewhere(int device) {
        std::promise<void> begun;
        thread_ = std::thread{[&, this] {
            cuda(cudaSetDevice(device));
            Stream const stream;
            cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
            begun.set_value();
            is_over_.wait(false);
            cudaGraph_t graph = nullptr;
            CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
            if (graph != nullptr) {
                cuda(cudaGraphDestroy(graph));
            }
        }};
        begun.get_future().wait();
    }
    CaptureElsewhere(CaptureElsewhere const&) = delete;
    CaptureElsewhere& operator=(CaptureElsewhere const&) = delete;
    ~CaptureElsewhere() {
        is_over_ = true;
        is_over_.notify_all();
        thread_.join();
    }

private:
    std::atomic<bool> is_over_{false};
    std::thread thread_;
};

TEST_CASE("a graph that another thread captures is not broken by a communicator, nor breaks it") {
    run_nccl_ranks({1, 2, 3}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        Data data{comm};
        std::optional<CaptureElsewhere> capture;
        comm.barrier(); // tests allocate in a mode that forbids it meanwhile
        if (comm.rank() == 0) {
            capture.emplace(7);
        }
        comm.barrier();
        for (cudaStream_t const caller : {stream, cudaStream_t{nullptr}}) {
            comm.set_stream(caller);
            call_everything(comm, data);
        }
        {
            NcclCommunicator part = comm.split(0, comm.rank()); // begins and ends meanwhile
            part.set_stream(stream);
            joinable::CapturedStep step{part, {data.sums.buffer()}, [](auto const& ready) {
                                            ready(0);
                                        }};
            step.step();
            part.synchronize();
        }
        hosts.barrier();
        capture.reset();
        hosts.barrier();
    });
    fake_cuda::drain();
    CHECK(fake_cuda::live_graphs() == 0);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("memory is given and taken while another thread captures a graph on the device") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t) {
        std::optional<CaptureElsewhere> capture;
        hosts.barrier(); // tests allocate in a mode that forbids it meanwhile
        capture.emplace(comm.device());
        hosts.barrier();
        {
            joinable::Arena const of_nccl = comm.allocate(64);
            joinable::Arena const of_device = comm.device_memory().allocate(64, 64);
        }
        hosts.barrier();
        capture.reset();
        hosts.barrier();
    });
    fake_cuda::drain();
}

TEST_CASE("memory of a communicator is zeroed beside the caller's stream") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        std::atomic<bool> is_late{true};
        fake_cuda::enqueue(stream, [&] { is_late.wait(true); });
        {
            joinable::Arena const arena = comm.allocate(64); // as where others have not posted yet
            is_late = false;
            is_late.notify_all();
        }
        cuda(cudaStreamSynchronize(stream));
        hosts.barrier();
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        {
            joinable::Arena const arena = comm.allocate(64);
        }
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
        std::size_t nodes = 1;
        cuda(cudaGraphGetNodes(graph, nullptr, &nodes));
        CHECK(nodes == 0);
        cuda(cudaGraphDestroy(graph));
    });
    fake_cuda::drain();
}

TEST_CASE("a caller's default stream that a capture occupies is refused, and nothing ends by it") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Data data{comm};
        comm.set_stream(nullptr);
        std::atomic<bool> is_late{true};
        fake_cuda::enqueue(nullptr, [&] { is_late.wait(true); });
        auto work = comm.all_reduce(data.sums.buffer(), ReduceOp::sum);
        cudaStream_t blocking = nullptr;
        cuda(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
        cuda(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
        for (cudaStream_t const caller : {cudaStream_t{nullptr}, blocking}) {
            comm.set_stream(caller);
            CHECK_THROWS_WITH_AS(
                comm.all_reduce(data.sums.buffer(), ReduceOp::sum).wait(),
                Contains("captures a CUDA graph"),
                ContractViolation
            );
            CHECK_THROWS_WITH_AS(
                work.wait(caller), Contains("captures a CUDA graph"), ContractViolation
            );
            CHECK_THROWS_WITH_AS(
                comm.device_memory().submit(), Contains("captures a CUDA graph"), ContractViolation
            );
        }
        is_late = false;
        is_late.notify_all();
        for (cudaStream_t const caller : {cudaStream_t{nullptr}, blocking}) {
            comm.set_stream(caller);
            CHECK_THROWS_WITH_AS(
                comm.synchronize(), Contains("captures a CUDA graph"), ContractViolation
            );
        }
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamEndCapture(blocking, &graph) == cudaSuccess); // it was not broken
        cuda(cudaGraphDestroy(graph));
        cuda(cudaStreamDestroy(blocking));
        comm.set_stream(stream);
        work.wait();
        call_everything(comm, data);
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an error that the engine has not asked for is told, and not replaced by a query's") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Data data{comm};
        std::atomic<bool> is_late{true};
        fake_cuda::enqueue(stream, [&] { is_late.wait(true); });
        auto work = comm.all_reduce(data.sums.buffer(), ReduceOp::sum);
        CHECK_FALSE(work.test());
        CHECK(cudaPeekAtLastError() == cudaSuccess); // what was asked is not left to the engine
        std::vector<std::function<void()>> const calls{
            [&] { comm.all_reduce(data.sums.buffer(), ReduceOp::sum).wait(); },
            [&] { static_cast<void>(work.test()); },
            [&] { work.wait(); },
            [&] { work.synchronize(); },
            [&] { comm.synchronize(); },
            [&] { static_cast<void>(comm.group()); },
        };
        for (auto const& call : calls) {
            fake_cuda::fail_next(cudaErrorInvalidConfiguration);
            CHECK(cudaEventQuery(nullptr) == cudaErrorInvalidConfiguration); // a launch
            CHECK_THROWS_WITH_AS(call(), Contains("invalid configuration"), ContractViolation);
            CHECK(cudaGetLastError() == cudaSuccess); // told once
        }
        CHECK(cudaStreamQuery(stream) == cudaErrorNotReady); // no error: the engine only asked
        CHECK_FALSE(work.test());
        fake_cuda::fail_next(cudaErrorInvalidConfiguration);
        CHECK(cudaEventQuery(nullptr) == cudaErrorInvalidConfiguration);
        joinable::Arena const other = comm.device_memory().allocate(64, 64);
        CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration); // it replaces nothing
        is_late = false;
        is_late.notify_all();
        work.synchronize();
        call_everything(comm, data);
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an error of the engine keeps nothing that ends from waiting, and ends no rank") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        Data data{comm};
        auto const fail = [] { // a launch of the engine
            fake_cuda::fail_next(cudaErrorInvalidConfiguration);
            CHECK(cudaEventQuery(nullptr) == cudaErrorInvalidConfiguration);
        };
        std::optional<joinable::NcclWork> work{
            comm.all_reduce(data.sums.buffer(), ReduceOp::sum, 0.5)
        };
        fail();
        work.reset();
        CHECK(fake_cuda::is_idle(comm.stream()));
        static_cast<void>(cudaGetLastError());
        {
            auto const group = comm.group();
            work.emplace(comm.all_reduce(data.sums.buffer(), ReduceOp::sum, 0.5));
            fail();
        }
        work.reset();
        CHECK(fake_cuda::is_idle(comm.stream()));
        static_cast<void>(cudaGetLastError());
        std::size_t const aborted = fake_nccl::calls("ncclCommAbort");
        std::size_t const destroyed = fake_nccl::calls("ncclCommDestroy");
        {
            NcclCommunicator const part = comm.split(0, comm.rank());
            fail();
        }
        static_cast<void>(cudaGetLastError());
        CHECK(fake_nccl::calls("ncclCommAbort") == aborted);
        CHECK(fake_nccl::calls("ncclCommDestroy") == destroyed + 1);
        call_everything(comm, data);
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a collective asks for the current device a few times, and does not change it") {
    run_nccl_ranks({1}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        comm.all_reduce(data.buffer(), ReduceOp::sum, 1.0).wait();
        std::size_t const asked = fake_cuda::calls("cudaGetDevice");
        std::size_t const changed = fake_cuda::calls("cudaSetDevice");
        comm.all_reduce(data.buffer(), ReduceOp::sum, 1.0).wait();
        CHECK(fake_cuda::calls("cudaGetDevice") - asked <= 5);
        CHECK(fake_cuda::calls("cudaSetDevice") == changed);
    });
}

} // namespace
