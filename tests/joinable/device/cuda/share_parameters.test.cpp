// SPDX-License-Identifier: BSL-1.0
// Processes whose models have their values in one memory of a device, over the fake runtime. The oracle: closed forms of
// what each process writes there.
#include <joinable/participant/share_parameters.hpp>

#include <chrono>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <csignal>
#include <cuda_runtime_api.h>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/gathered_param.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/device/cuda/shared_handle.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;
using joinable::AnyView;
using joinable::Arena;
using joinable::CudaDevice;
using joinable::CudaSharedHandle;
using joinable::DType;
using joinable::ProcessCommunicator;
using joinable::share_parameters;
using joinable::SharedParameters;
using joinable_tests::GatheredParam;
using joinable_tests::Numbers;

/// How often this process, and before a fork the one that made it, has called these.
struct Calls {
    std::size_t opened = fake::calls("cudaIpcOpenMemHandle");
    std::size_t closed = fake::calls("cudaIpcCloseMemHandle");
};

/// How many copies were put on streams.
std::size_t copies() {
    return fake::calls("cudaMemcpyAsync") + fake::calls("cudaMemcpy2DAsync") +
           fake::calls("cudaMemcpy3DAsync");
}

constexpr int second = 1; // which is not the current device

/// A model whose values are on a device, in an engine's own memory.
struct DeviceModel {
    std::vector<Arena> memory;
    std::vector<GatheredParam> params;
};
/// A permuted matrix, one with gaps, nothing, a frozen one of other elements, and a scalar. Its elements tell the rank.
DeviceModel model_of(int rank, int device = second) {
    DeviceModel model;
    CudaDevice on{device, nullptr, nullptr};
    std::vector<joinable_tests::StridedParam> params;
    auto const add = [&](DType dtype, joinable::Shape extents, joinable::Shape strides) {
        params.push_back({{{dtype, extents, strides}, {dtype, extents, strides}, {}, true}});
    };
    add(DType::f32, {3, 5}, {1, 3});
    add(DType::f64, {2, 2}, {7, 2});
    add(DType::f32, {0}, {1});
    add(DType::i64, {4}, {1});
    params.back().requires_grad = false;
    add(DType::f32, {}, {});
    model.params = joinable_tests::gathered(std::move(params));
    for (std::size_t i = 0; i < model.params.size(); ++i) {
        AnyView const here = model.params[i].value;
        AnyView& value = model.params[i].value;
        model.memory.push_back(on.allocate(256, Arena::default_alignment));
        value = {model.memory[i].data(), here.dtype(), here.extents(), here.strides(), on.id()};
        Numbers numbers;
        for (std::size_t k = 0; k < value.numel(); ++k) {
            numbers.push_back(static_cast<double>(10 * (i + 1) + k) + 1000 * rank);
        }
        joinable_tests::poke(value, numbers);
    }
    return model;
}
Numbers numbers_of_rank_0(std::size_t parameter, std::size_t count) {
    Numbers numbers;
    for (std::size_t k = 0; k < count; ++k) {
        numbers.push_back(static_cast<double>(10 * (parameter + 1) + k));
    }
    return numbers;
}
/// A device with a stream of its own: a fork of a process that has used the null stream has none.
class OwnDevice {
public:
    explicit OwnDevice(int index = second) : stream_{stream_on(index)} {
        device_.emplace(index, stream_.get(), stream_.get());
    }
    CudaDevice& operator*() { return *device_; }

private:
    static joinable::detail::CudaStream stream_on(int index) {
        joinable::detail::CurrentCudaDevice const current{index};
        joinable::detail::CudaStream stream;
        joinable::detail::require_cuda(joinable::detail::make_stream(stream), "make_stream");
        return stream;
    }
    joinable::detail::CudaStream stream_;
    std::optional<CudaDevice> device_;
};
template <class Comm>
SharedParameters shared_of(Comm& comm, DeviceModel& model, OwnDevice& device) {
    return share_parameters<CudaSharedHandle>(comm, model.params, *device);
}
template <class F>
std::string text_of(F const& f) {
    try {
        f();
    } catch (std::exception const& error) {
        return error.what();
    }
    return {};
}
/// A fork has none of the streams' threads of the process that made it.
template <class Body>
void over_processes(std::initializer_list<int> sizes, Body const& body) {
    joinable_tests::run_process_ranks(sizes, body, {.other_threads = true});
}
/// Ends the others' before rank 0's, as CUDA asks for.
void end(ProcessCommunicator& comm, std::optional<SharedParameters>& shared) {
    if (comm.rank() != 0) {
        shared.reset();
    }
    comm.barrier();
    shared.reset();
}

TEST_CASE("the values of processes are rank 0's, in one memory of the device, each in its order") {
    over_processes({1, 2, 3, 4, 8}, [](ProcessCommunicator& comm) {
        joinable::DeviceId const id{joinable::DeviceKind::cuda, second};
        DeviceModel model = model_of(comm.rank());
        OwnDevice of_values;
        std::size_t const before = fake::live_allocations();
        Calls const calls;
        std::optional<SharedParameters> shared{shared_of(comm, model, of_values)};
        CHECK(fake::live_allocations() == before + (comm.rank() == 0 ? 1 : 0));
        CHECK(shared->buffer().size() == 64 * 4);
        CHECK(shared->buffer().device() == id);
        for (std::size_t i = 0; i < model.params.size(); ++i) {
            AnyView const value = model.params[i].value;
            CHECK(value.device() == id);
            CHECK(joinable_tests::peek(value) == numbers_of_rank_0(i, value.numel()));
            auto const* const data = static_cast<std::byte const*>(value.data());
            bool const is_in = data >= shared->buffer().begin() && data < shared->buffer().end();
            CHECK(is_in == (value.numel() != 0));
            CHECK(model.params[i].sets == (value.numel() != 0 ? 1 : 0));
        }
        CHECK(model.params[0].value.strides() == joinable::Shape{1, 3}); // which its engine reads
        CHECK(model.params[1].value.strides() == joinable::Shape{2, 1}); // without gaps
        int current = -1;
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK(current == 0); // as before

        comm.barrier();
        auto const weights = model.params[1].value.as<double>();
        if (comm.rank() == comm.size() - 1) {
            fake::DeviceCode const code;
            weights(1, 0) -= 0.5 * 8; // a step of one rank
        }
        comm.barrier();
        CHECK(joinable_tests::peek(model.params[1].value) == Numbers{20, 21, 22 - 4, 23});
        CHECK(joinable_tests::peek(model.params[0].value) == numbers_of_rank_0(0, 15));
        CHECK(joinable_tests::peek(model.params[3].value) == numbers_of_rank_0(3, 4));
        end(comm, shared);
        CHECK(fake::live_allocations() == before);
        CHECK(Calls{}.opened - calls.opened == (comm.rank() == 0 ? 0 : 1));
        CHECK(Calls{}.closed - calls.closed == (comm.rank() == 0 ? 0 : 1));
        for (GatheredParam const& param : model.params) {
            CHECK(param.releases == param.sets);
        }
    });
}

TEST_CASE("the copies to shared device memory come after the engine's work on the values") {
    over_processes({2, 3}, [](ProcessCommunicator& comm) {
        DeviceModel model = model_of(comm.rank());
        REQUIRE(cudaSetDevice(second) == cudaSuccess);
        cudaStream_t engine = nullptr;
        cudaStream_t stream = nullptr;
        REQUIRE(cudaStreamCreateWithFlags(&engine, cudaStreamNonBlocking) == cudaSuccess);
        REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        fake::delay_every_operation(std::chrono::milliseconds{5});
        AnyView const scalar = model.params[4].value;
        fake::enqueue(engine, [&] { *static_cast<float*>(scalar.data()) = 3; });
        std::optional<SharedParameters> shared;
        {
            CudaDevice on{second, stream, engine};
            shared.emplace(share_parameters<CudaSharedHandle>(comm, model.params, on));
        }
        CHECK(joinable_tests::peek(model.params[4].value) == Numbers{3.0});
        fake::delay_every_operation({});
        fake::drain();
        end(comm, shared);
        CHECK(cudaStreamDestroy(stream) == cudaSuccess);
        CHECK(cudaStreamDestroy(engine) == cudaSuccess);
    });
}

TEST_CASE("a process with shared device memory that is killed leaves nothing") {
    for (int const killed : {0, 1}) {
        CAPTURE(killed);
        CHECK_THROWS_AS(
            over_processes(
                {3},
                [killed](ProcessCommunicator& comm) {
                    DeviceModel model = model_of(comm.rank());
                    std::size_t const before = fake::live_allocations();
                    OwnDevice of_values;
                    Calls const calls;
                    std::optional<SharedParameters> shared{shared_of(comm, model, of_values)};
                    comm.barrier();
                    if (comm.rank() == killed) {
                        std::raise(SIGKILL);
                    }
                    CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
                    CHECK(joinable_tests::peek(model.params[4].value) == Numbers{50.0});
                    if (comm.rank() != 0) {
                        shared.reset();
                        CHECK(Calls{}.closed - calls.closed == 1);
                        CHECK(fake::live_allocations() == before);
                    }
                    // Rank 0 cannot know when the other has closed the memory: its process ends with it.
                    std::raise(SIGKILL);
                }
            ),
            joinable::PeerFailed
        );
    }
}

TEST_CASE("what a process cannot share on a device is told to all, and leaves nothing") {
    over_processes({2, 3}, [](ProcessCommunicator& comm) {
        bool const is_last = comm.rank() == comm.size() - 1;
        std::string const last = "rank " + std::to_string(comm.size() - 1);
        DeviceModel model = model_of(comm.rank());
        std::size_t const before = fake::live_allocations();
        Calls const calls;
        std::size_t failed_opens = 0;
        OwnDevice of_values;
        OwnDevice other{0};
        auto const refusal_on = [&](OwnDevice& device) {
            std::string text = text_of([&] { (void)shared_of(comm, model, device); });
            INFO(text);
            CHECK(fake::live_allocations() == before);
            CHECK(Calls{}.opened - calls.opened == Calls{}.closed - calls.closed + failed_opens);
            return text;
        };
        auto const refusal = [&] { return refusal_on(of_values); };
        auto const has = [](std::string const& text, std::string const& part) {
            CAPTURE(text);
            CAPTURE(part);
            return text.find(part) != std::string::npos;
        };
        AnyView const value = model.params[1].value;

        // The values of one rank are on another device than it gives.
        CHECK(has(
            refusal_on(is_last ? other : of_values),
            is_last
                ? "share_parameters: the value of parameter 0 is on CUDA device 1, but the shared memory would be "
                  "on CUDA device 0; give the device of the values"
                : last + " failed: share_parameters: the value of parameter 0 is on CUDA device 1"
        ));
        // All is on another device there.
        {
            DeviceModel elsewhere = model_of(comm.rank(), is_last ? 0 : second);
            std::string const text =
                text_of([&] { (void)shared_of(comm, elsewhere, is_last ? other : of_values); });
            CHECK(has(
                text,
                "models differ: device: rank 0 has CUDA device 1, " + last + " has CUDA device 0"
            ));
            CHECK(elsewhere.params[0].sets == 0);
        }
        // On the host; by the form for the host.
        CHECK(has(
            text_of([&] { (void)share_parameters(comm, model.params); }),
            "share_parameters: the value of parameter 0 is on CUDA device 1, but the shared memory would be on the "
            "host; give the device of the values, as in share_parameters<CudaSharedHandle>(comm, model, device)"
        ));
        { // and the other way round
            DeviceModel on_host = model_of(comm.rank());
            for (GatheredParam& param : on_host.params) {
                param.value = param.own->value.view();
            }
            CHECK(has(
                text_of([&] { (void)shared_of(comm, on_host, of_values); }),
                "share_parameters: the value of parameter 0 is on the host, but the shared memory would be on CUDA "
                "device 1; values on the host take share_parameters(comm, model)"
            ));
        }
        // Elements that share memory.
        model.params[1].value = {value.data(), DType::f64, {2, 2}, {0, 1}, value.device()};
        CHECK(has(refusal(), "trained; give it a contiguous copy"));
        model.params[1].value = value;
        CHECK(model.params[0].sets == 0);

        // Rank 0 has no memory, or cannot copy; another rank cannot open it.
        if (comm.rank() == 0) {
            fake::fail_next(cudaErrorMemoryAllocation, 2); // behind cudaGetDevice and cudaSetDevice
        }
        CHECK(has(refusal(), "cudaMalloc"));
        (void)fake::has_failed();
        CHECK(joinable_tests::peek(model.params[4].value) == Numbers{50.0 + 1000 * comm.rank()});

        if (is_last) { // behind cudaGetDevice and cudaSetDevice
            failed_opens = 1;
            fake::fail_next(cudaErrorMapBufferObjectFailed, 2);
        }
        CHECK(has(refusal(), "cudaIpcOpenMemHandle, which opens memory of another process"));
        CHECK(fake::has_failed());
        CHECK(model.params[0].sets == (is_last ? 0 : 1));
        for (GatheredParam const& param : model.params) {
            CHECK(param.releases == param.sets);
        }

        model = model_of(comm.rank());
        // set_value fails on one: the others have moved their values, and have closed the memory before rank 0 frees it.
        model.params[3].set_fails = is_last;
        CHECK(has(refusal(), is_last ? "bad_alloc" : last + " failed"));
        for (GatheredParam const& param : model.params) {
            CHECK(param.releases == param.sets);
        }
        CHECK(model.params[0].releases == 1);

        model = model_of(comm.rank());
        std::optional<SharedParameters> shared{shared_of(comm, model, of_values)}; // they go on
        CHECK(joinable_tests::peek(model.params[4].value) == Numbers{50.0});
        end(comm, shared);
    });
}

TEST_CASE(
    "an engine that captures a graph is told so, and nothing is copied later to memory that ended"
) {
    over_processes({1, 2, 3}, [](ProcessCommunicator& comm) {
        DeviceModel model = model_of(comm.rank());
        OwnDevice own, engine;
        cudaStream_t const captured = (*engine).stream();
        CudaDevice device{second, (*own).stream(), captured};
        std::size_t const before = fake::live_allocations();
        if (comm.rank() == 0) {
            REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        }
        std::string const text =
            text_of([&] { (void)share_parameters<CudaSharedHandle>(comm, model.params, device); });
        CAPTURE(text);
        CHECK(text.find("captures a CUDA graph; end the capture") != std::string::npos);
        if (comm.rank() == 0) {
            cudaGraph_t graph = nullptr;
            CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
            CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        }
        CHECK(fake::live_allocations() == before);
        {
            // Memory of that size, perhaps at that place.
            Arena const other = device.allocate(std::size_t{64} * 4, Arena::default_alignment);
            joinable_tests::poke(
                {other.data(), DType::u8, {other.bytes()}, {1}}, Numbers(other.bytes(), 7)
            );
            std::size_t const copied = copies();
            device.finish();
            fake::drain();
            CHECK(copies() == copied);
            CHECK(
                joinable_tests::peek({other.data(), DType::u8, {other.bytes()}, {1}}) ==
                Numbers(64 * 4, 7)
            );
        }
        std::optional<SharedParameters> shared{
            share_parameters<CudaSharedHandle>(comm, model.params, device)
        };
        CHECK(joinable_tests::peek(model.params[4].value) == Numbers{50.0});
        end(comm, shared);
    });
}

TEST_CASE("no call of CUDA that fails leaves memory, a value that ended or a copy for later") {
    joinable::SelfCommunicator comm;
    bool has_failed_to_copy = false;
    for (std::size_t later = 0; later < 60; ++later) {
        CAPTURE(later);
        DeviceModel model = model_of(0);
        OwnDevice own, engine;
        CudaDevice device{second, (*own).stream(), (*engine).stream()};
        std::size_t const before = fake::live_allocations();
        fake::fail_next(cudaErrorNotSupported, later);
        std::string const text =
            text_of([&] { (void)share_parameters<CudaSharedHandle>(comm, model.params, device); });
        (void)fake::has_failed();
        (void)cudaGetLastError();
        CHECK(fake::live_allocations() == before);
        std::size_t const copied = copies();
        device.finish();
        CHECK(copies() == copied);
        for (GatheredParam const& param : model.params) {
            CHECK(param.releases == param.sets);
        }
        if (!text.empty()) { // before a value has moved
            CHECK(joinable_tests::peek(model.params[4].value) == Numbers{50.0});
            has_failed_to_copy =
                has_failed_to_copy || text.find("a copy on the device") != std::string::npos;
        }
    }
    CHECK(has_failed_to_copy);
}

TEST_CASE("thread ranks are told that handles are for processes") {
    for (int const ranks : {2, 3}) {
        joinable_tests::run_ranks({ranks}, [](joinable::ThreadCommunicator& comm) {
            DeviceModel model = model_of(comm.rank());
            OwnDevice of_values;
            CHECK_THROWS_WITH_AS(
                (void)shared_of(comm, model, of_values),
                "share_parameters: handles are for other processes, but these ranks are threads of one; give their "
                "parameters views of one allocation",
                joinable::ContractViolation
            );
            CHECK(model.params[0].sets == 0);
            comm.barrier();
        });
    }
    joinable_tests::run_ranks({1}, [](joinable::ThreadCommunicator& comm) {
        DeviceModel model = model_of(0);
        OwnDevice of_values;
        auto const shared = shared_of(comm, model, of_values);
        CHECK(joinable_tests::peek(model.params[0].value) == numbers_of_rank_0(0, 15));
        std::vector<GatheredParam> none;
        CHECK(share_parameters<CudaSharedHandle>(comm, none, *of_values).buffer().size() == 0);
    });
}

} // namespace
