// SPDX-License-Identifier: BSL-1.0
// Tensors of libtorch in the memory of a GPU, over the fakes of CUDA and NCCL, on which libtorch
// computes, too (fake_cuda/torch_device.hpp). The oracle of trainings: libtorch itself in host
// memory, on one rank, over all samples.
#include <joinable/interop/torch_sharded.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/fake_cuda/torch_device.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/cuda.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/per_device.hpp>
#include <joinable/zero.hpp>

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
    use_fake_cuda_in_torch();
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

// -- trainings, which libtorch computes there ------------------------------------------------------

namespace net = small_net;

auto const adam_on_device = [](std::vector<Tensor> mine) {
    return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{0.1}};
};
constexpr double longest_gradient = 0.05;

/// Runs `body(comm, hosts, model)` on ranks over NCCL, each with the net on its device. Each
/// operation of a stream takes its time: what does not wait for it reads what was there before.
template <class Body>
void with_nets(Body const& body) {
    use_fake_cuda_in_torch();
    fake_cuda::delay_every_operation(std::chrono::microseconds{20});
    run_nccl_ranks({1, 2, 3}, [&](auto& comm, auto& hosts, cudaStream_t stream) {
        comm.device_memory().use_kernels(host_kernels());
        TorchStreams::set_current(comm.rank(), stream);
        net::SmallNet model;
        model->to(at::Device{at::kCUDA, static_cast<c10::DeviceIndex>(comm.rank())});
        body(comm, hosts, model);
    });
    fake_cuda::delay_every_operation({});
    check_nothing_is_left();
}
Tensor inputs_on(Tensor const& parameter, int rank, int round) {
    return net::inputs_of(rank, round).to(parameter.device());
}
Tensor loss_on_device(Tensor const& outputs, int rank, int round) {
    return (outputs - net::targets_of(rank, round).to(outputs.device())).pow(2).mean();
}
void check_values(net::SmallNet const& model, std::vector<double> const& expected) {
    std::vector<double> numbers;
    for (Tensor const& parameter : model->parameters()) {
        CHECK(parameter.device().is_cuda());
        Tensor const flat = parameter.detach().to(torch::kCPU).flatten();
        auto const* const data = flat.data_ptr<double>();
        numbers.insert(numbers.end(), data, data + flat.numel());
    }
    net::check_close(numbers, expected, 1e-9);
}

/// libtorch 2 asks the real driver for a stream where autograd adds gradients on a device.
bool adds_gradients_on_fakes() {
    if (TORCH_VERSION_MAJOR < 2 || torch::cuda::is_available()) {
        return true;
    }
    std::puts("skipped: libtorch 2 adds gradients on GPUs only where there is one");
    return false;
}

TEST_CASE("libtorch's Adam steps on each GPU what its rank owns, also when ranks have joined") {
    if (!adds_gradients_on_fakes()) {
        return;
    }
    for (bool const is_alone : {false, true}) { // it averages the gradients, too
        with_nets([&](auto& comm, joinable::ThreadCommunicator& hosts, net::SmallNet& model) {
            using Comm = std::remove_reference_t<decltype(comm)>;
            net::Training const expected = net::train_alone(comm.size(), adam_on_device);
            std::optional<joinable::torch::DistributedDataParallel<Comm, net::SmallNetImpl>> ddp;
            if (!is_alone) {
                ddp.emplace(
                    comm,
                    model,
                    joinable::DataParallelOptions{.first_bucket_bytes = 64, .find_unused = true}
                );
            }
            joinable::torch::Optimizer zero{
                comm,
                joinable::torch::parameters(model),
                adam_on_device,
                joinable::ZeroOptions{.bucket_cap_bytes = 100, .reduces_gradients = is_alone}
            };
            std::vector<double> losses;
            auto const train_on = [&](auto& guard) {
                for (int round = 0; round < net::rounds_of(comm.rank()); ++round) {
                    zero.local().param_groups()[0].options().set_lr(net::rate_of(round));
                    Tensor const loss = zero.step([&] {
                        model->zero_grad(true);
                        Tensor const inputs = inputs_on(model->first->bias, comm.rank(), round);
                        Tensor const outputs =
                            is_alone ? model->forward(inputs) : ddp->forward(inputs);
                        Tensor const result = loss_on_device(outputs, comm.rank(), round);
                        result.backward();
                        return result;
                    });
                    losses.push_back(loss.template item<double>());
                }
                guard.finish();
            };
            if (is_alone) {
                joinable::Join guard{joinable::participants(zero), joinable::control(hosts)};
                train_on(guard);
            } else {
                joinable::Join guard{joinable::participants(*ddp, zero), joinable::control(hosts)};
                train_on(guard);
            }
            check_values(model, expected.values);
            if (comm.rank() == 0) {
                net::check_close(losses, expected.losses, 1e-9);
            }
            for (auto const& item : zero.local().state()) {
                auto const& state = static_cast<torch::optim::AdamParamState&>(*item.second);
                CHECK(state.exp_avg().device() == model->first->bias.device());
            }
        });
    }
}

template <class Rule>
void check_sharded_on_devices(Rule const& rule, joinable::ShardedOptions const& options) {
    CAPTURE(static_cast<int>(options.sharding));
    with_nets([&](auto& comm, joinable::ThreadCommunicator& hosts, net::SmallNet& model) {
        auto const clip = [&](net::SmallNet& alone) {
            if (!options.step_in_backward) {
                torch::nn::utils::clip_grad_norm_(alone->parameters(), longest_gradient);
            }
        };
        net::Training const expected = net::train_alone(comm.size(), adam_on_device, clip);
        joinable::torch::ShardedDataParallel sharded{comm, model, rule, options};
        std::vector<double> losses;
        joinable::Join guard{joinable::participants(sharded), joinable::control(hosts)};
        for (int round = 0; round < net::rounds_of(comm.rank()); ++round) {
            if constexpr (requires { sharded.local(); }) {
                sharded.local().param_groups()[0].options().set_lr(net::rate_of(round));
            } else {
                sharded.rule().learning_rate = net::rate_of(round);
            }
            model->zero_grad(true);
            Tensor const outputs = sharded.forward([&] {
                Tensor hidden = inputs_on(model->first->bias, comm.rank(), round);
                {
                    auto const held = sharded.use(model->first);
                    hidden = torch::tanh(model->first->forward(hidden));
                }
                auto const held = sharded.use(model->second);
                return model->second->forward(hidden);
            });
            Tensor const loss = loss_on_device(outputs, comm.rank(), round);
            loss.backward();
            losses.push_back(loss.template item<double>());
            if (!options.step_in_backward) {
                sharded.clip_grad_norm_(longest_gradient);
            }
            sharded.step();
        }
        guard.finish();
        if (comm.rank() == 0) {
            net::check_close(losses, expected.losses, 1e-9);
        }
        auto const held = sharded.use_all();
        check_values(model, expected.values);
    });
}

TEST_CASE("a sharded libtorch module trains on GPUs as one process does in host memory") {
    if (!adds_gradients_on_fakes()) {
        return;
    }
    using joinable::Sharding;
    for (Sharding const sharding :
         {Sharding::parameters, Sharding::gradients, Sharding::optimizer, Sharding::none}) {
        joinable::ShardedOptions options{.sharding = sharding, .bucket_cap_bytes = 100};
        if (sharding == Sharding::parameters) {
            options.units = {2, 2, 2};
        }
        check_sharded_on_devices(joinable::Adam{}, options);
        check_sharded_on_devices(adam_on_device, options);
        if (sharding == Sharding::gradients || sharding == Sharding::parameters) {
            options.step_in_backward = true;
            check_sharded_on_devices(joinable::Adam{}, options);
        }
    }
}

TEST_CASE("a batch that fails in autograd's thread of a GPU is skipped, or the others hear of it") {
    if (!adds_gradients_on_fakes()) {
        return;
    }
    for (bool const skips : {true, false}) {
        with_nets([&](auto& comm, joinable::ThreadCommunicator& hosts, net::SmallNet& model) {
            joinable::torch::ShardedDataParallel sharded{
                comm, model, adam_on_device, {.sharding = joinable::Sharding::gradients}
            };
            bool const fails = comm.rank() == comm.size() - 1;
            auto const loss_of_round = [&](int round) {
                Tensor const outputs = sharded.forward([&] {
                    Tensor const inputs = inputs_on(model->first->bias, comm.rank(), round);
                    Tensor const result = model->forward(inputs);
                    return fails && round == 1 ? net::ThrowsInBackward::apply(result) : result;
                });
                return loss_on_device(outputs, comm.rank(), round);
            };
            std::string const text =
                net::train_or_skip(sharded, skips, loss_of_round, joinable::control(hosts));
            if (!text.empty()) {
                // After a pass of its own, that thread has let go of the one that failed.
                torch::ones_like(model->first->bias).requires_grad_(true).sum().backward();
            }
            CAPTURE(text);
            CHECK(
                (text.find("a batch that cannot be differentiated") != std::string::npos) == !skips
            );
        });
    }
}

} // namespace
