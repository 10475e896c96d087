// SPDX-License-Identifier: BSL-1.0
// Tensors of libtorch in the memory of a GPU, over the fakes of CUDA and NCCL. libtorch itself computes nothing
// here: without CUDA it can only say where such a tensor is, and ask for streams.
#include <joinable/interop/torch_tensor.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/cuda.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/per_device.hpp>

namespace {

using namespace joinable_tests;
using torch::Tensor;

constexpr std::size_t rows = 5;
constexpr std::size_t columns = 3;

/// A parameter on the current device, column-major, and its gradient.
class DeviceParameter {
public:
    explicit DeviceParameter(int device, cudaStream_t stream)
        : value_{std::vector<float>(rows * columns, 1.0F), stream},
          grad_{std::vector<float>(rows * columns), stream}, tensor{on(value_, device)} {
        tensor.set_requires_grad(true);
        tensor.mutable_grad() = on(grad_, device);
    }

private:
    static Tensor on(DeviceArray<float> const& memory, int device) {
        at::Device const place{at::kCUDA, static_cast<at::DeviceIndex>(device)};
        return at::for_blob(memory.buffer().data, {rows, columns})
            .strides({1, rows})
            .options(at::TensorOptions{place}.dtype(at::kFloat))
            .target_device(place)
            .make_tensor();
    }

    DeviceArray<float> value_;
    DeviceArray<float> grad_;

public:
    Tensor tensor;
};

std::vector<float>
read(joinable::NcclCommunicator& comm, Tensor const& tensor, cudaStream_t stream) {
    std::vector<float> values(rows * columns);
    cuda(cudaMemcpyAsync(
        values.data(), tensor.data_ptr(), values.size() * 4, cudaMemcpyDeviceToHost, stream
    ));
    comm.synchronize();
    return values;
}

/// Rank r has r + 1 inputs; in round k its gradients are (r + 1)(k + 1).
void train(
    joinable::NcclCommunicator& comm,
    joinable::ThreadCommunicator& hosts,
    cudaStream_t stream,
    bool views
) {
    comm.device_memory().use_kernels(host_kernels());
    std::vector<DeviceParameter> storage;
    for (int i = 0; i < 3; ++i) {
        storage.emplace_back(comm.rank(), stream);
    }
    std::vector<Tensor> parameters;
    for (DeviceParameter const& parameter : storage) {
        parameters.push_back(parameter.tensor);
    }
    joinable::DistributedDataParallel ddp{
        comm,
        parameters,
        {.gradient_as_bucket_view = views, .joined_gradients = joinable::JoinedGradients::kept}
    };
    joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
    auto const check = [&](int round) {
        float sum = 0;
        for (int active = round; active < comm.size(); ++active) {
            sum += static_cast<float>((active + 1) * (round + 1));
        }
        std::vector<float> const average(rows * columns, sum / static_cast<float>(comm.size()));
        for (Tensor const& parameter : parameters) {
            CHECK(parameter.grad().device().is_cuda());
            CHECK(parameter.grad().stride(1) == static_cast<std::int64_t>(rows));
            CHECK(read(comm, parameter.grad(), stream) == average);
        }
    };
    for (int round = 0; round <= comm.rank(); ++round) {
        std::vector<float> const own(
            rows * columns, static_cast<float>((comm.rank() + 1) * (round + 1))
        );
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = parameters.size(); i-- > 0;) {
                void* const grad = parameters[i].grad().data_ptr();
                cuda(cudaMemcpyAsync(
                    grad, own.data(), own.size() * 4, cudaMemcpyHostToDevice, stream
                ));
                ready(i);
            }
        });
        check(round);
    }
    CHECK(guard.finish().rounds == static_cast<std::size_t>(comm.size()));
    check(comm.size() - 1);
}

TEST_CASE(
    "gradients of torch tensors on a GPU are averaged by NCCL, in place or as views of buckets"
) {
    for (bool const views : {false, true}) {
        run_nccl_ranks({1, 2, 4}, [views](auto& comm, auto& hosts, cudaStream_t stream) {
            train(comm, hosts, stream, views);
        });
    }
}

/// What libtorch asks of CUDA about streams, answered by the fake. Each thread has its own current streams.
class TorchStreams final : public c10::impl::DeviceGuardImplInterface {
public:
    static cudaStream_t set_current(int device, cudaStream_t stream) {
        return std::exchange(current[static_cast<std::size_t>(device)], stream);
    }

    [[nodiscard]] c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    [[nodiscard]] c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device const before = getDevice();
        setDevice(device);
        return before;
    }
    [[nodiscard]] c10::Device getDevice() const override {
        int device = 0;
        cuda(cudaGetDevice(&device));
        return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
    }
    void setDevice(c10::Device device) const override { cuda(cudaSetDevice(device.index())); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        (void)cudaSetDevice(device.index());
    }
    [[nodiscard]] c10::Stream getStream(c10::Device device) const noexcept override {
        auto const stream = current[static_cast<std::size_t>(device.index())];
        return c10::Stream{c10::Stream::UNSAFE, device, reinterpret_cast<std::intptr_t>(stream)};
    }
    [[nodiscard]] c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        c10::Stream const before = getStream(stream.device());
        set_current(stream.device_index(), stream_of(stream));
        return before;
    }
    void record(void** event, c10::Stream const& stream, c10::DeviceIndex, c10::EventFlag)
        const override {
        c10::Device const before = exchangeDevice(stream.device());
        auto made = static_cast<cudaEvent_t>(*event);
        if (made == nullptr) {
            cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
            *event = made;
        }
        cuda(cudaEventRecord(made, stream_of(stream)));
        setDevice(before);
    }
    void block(void* event, c10::Stream const& stream) const override {
        cuda(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event), 0));
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        if (event != nullptr) {
            (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
        }
    }
    /// None for which autograd would start threads.
    [[nodiscard]] c10::DeviceIndex deviceCount() const noexcept override { return 0; }

private:
    static cudaStream_t stream_of(c10::Stream const& stream) {
        return reinterpret_cast<cudaStream_t>(static_cast<std::intptr_t>(stream.id()));
    }
    static thread_local inline std::array<cudaStream_t, 8> current{};
};

/// Counts how often a bucket is launched while the same model launches another one.
class LaunchesAtOnce {
public:
    static inline std::atomic<int> count{0};

    struct Range {};
    static Range round(bool) { return {}; }
    Range bucket(std::size_t, std::size_t) {
        count += is_launching_.exchange(true) ? 1 : 0;
        for (int i = 0; i < 200; ++i) {
            std::this_thread::yield(); // to another thread that may launch
        }
        is_launching_ = false;
        return {};
    }

private:
    std::atomic<bool> is_launching_{false};
};

struct ModuleOnDevices : torch::nn::Module {
    void add(Tensor const& tensor) {
        register_parameter("p" + std::to_string(parameters().size()), tensor);
    }
};

/// One of a rank's two devices. The model is made on one stream, on which autograd then writes, and trained on another.
struct DeviceOfRank {
    explicit DeviceOfRank(joinable::ThreadCommunicator& hosts, int number)
        : index{on(2 * hosts.rank() + number)}, comm{hosts, trained_on, index} {
        comm.device_memory().use_kernels(host_kernels());
        for (int i = 0; i < 6; ++i) {
            parameters.emplace_back(index, made_on);
        }
        cuda(cudaStreamSynchronize(made_on));
    }
    ~DeviceOfRank() {
        (void)cudaStreamSynchronize(made_on);
        (void)cudaStreamSynchronize(trained_on);
    }

    /// What autograd does in the thread that it has for a device. Kernels on its stream are slow.
    void accumulate(float gradient) {
        on(index);
        TorchStreams::set_current(index, made_on);
        for (std::size_t i = parameters.size(); i-- > 0;) {
            Tensor const& tensor = parameters[i].tensor;
            auto* const elements = static_cast<float*>(tensor.grad().data_ptr());
            launch(made_on, [=, value = gradient * static_cast<float>(i + 1)] {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
                std::fill_n(elements, rows * columns, value);
            });
            auto const node = torch::autograd::impl::grad_accumulator(tensor);
            for (auto const& hook : node->post_hooks()) {
                (*hook)({}, {});
            }
        }
    }
    void check(float average) {
        on(index);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            std::vector<float> values(rows * columns);
            void* const grad = parameters[i].tensor.grad().data_ptr();
            cuda(cudaMemcpyAsync(
                values.data(), grad, values.size() * 4, cudaMemcpyDeviceToHost, trained_on
            ));
            cuda(cudaStreamSynchronize(trained_on));
            CHECK(
                values == std::vector<float>(rows * columns, average * static_cast<float>(i + 1))
            );
        }
    }

    int index;
    Stream made_on;
    Stream trained_on;
    StreamCommunicator comm;
    std::vector<DeviceParameter> parameters;

private:
    static int on(int device) {
        cuda(cudaSetDevice(device));
        return device;
    }
};

TEST_CASE("autograd's threads of two devices take turns, and each device's stream waits for its own"
) {
    static TorchStreams streams;
    static c10::impl::DeviceGuardImplRegistrar const registered{c10::DeviceType::CUDA, &streams};
    LaunchesAtOnce::count = 0;
    run_participants({1, 2, 4}, [](joinable::ThreadCommunicator& hosts) {
        DeviceOfRank first{hosts, 0};
        DeviceOfRank second{hosts, 1};
        auto const module = std::make_shared<ModuleOnDevices>();
        for (std::size_t i = 0; i < first.parameters.size(); ++i) {
            module->add(first.parameters[i].tensor);
            module->add(second.parameters[i].tensor);
        }
        joinable::PerDevice comm{first.comm, second.comm};
        using Comm = joinable::PerDevice<StreamCommunicator>;
        joinable::torch::
            DistributedDataParallel<Comm, ModuleOnDevices, joinable::AllReduce, LaunchesAtOnce>
                ddp{comm, module, small_buckets(false)};
        for (DeviceOfRank* const device : {&first, &second}) {
            TorchStreams::set_current(device->index, device->trained_on);
        }
        joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
        for (int batch = 1; batch <= 3; ++batch) {
            auto const backward = [&](Tensor const&) {
                auto const own = static_cast<float>(batch * (hosts.rank() + 1));
                auto other = std::async(std::launch::async, [&] { second.accumulate(own); });
                std::async(std::launch::async, [&] { first.accumulate(own); }).get();
                other.get();
            };
            Tensor const outputs = ddp.forward([&] {
                Tensor const inside = torch::ones({1}).set_requires_grad(true) * 1;
                inside.register_hook(backward);
                return inside * 1;
            });
            ddp.backward(outputs);
            auto const average = static_cast<float>(batch * (hosts.size() + 1)) / 2;
            first.check(average);
            second.check(average);
        }
        CHECK(guard.finish().rounds == 3);
    });
    CHECK(LaunchesAtOnce::count == 0);
    check_nothing_is_left();
}

} // namespace
