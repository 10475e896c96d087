// SPDX-License-Identifier: BSL-1.0
// The adapter for libtorch with tensors on a GPU: results, streams, and an iteration of what perceptron.cpp and
// ddp_torch.py measure. The checks also run in host memory.

#include <joinable/interop/torch_sharded.hpp>

#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gpu/iteration.hpp>

namespace {

using namespace joinable_gpu;
using Hosts = joinable::ProcessCommunicator;
using c10::cuda::CUDAStream;
using c10::cuda::CUDAStreamGuard;
using torch::Tensor;

/// Also writes a buffer, which differs between ranks until it is sent.
struct NetImpl : torch::nn::Module {
    NetImpl()
        : first{register_module("first", torch::nn::Linear{48, 96})},
          second{register_module("second", torch::nn::Linear{96, 7})},
          seen{register_buffer("seen", torch::zeros({1}))} {}
    Tensor forward(Tensor const& inputs) {
        {
            torch::NoGradGuard const no_graph;
            seen += inputs.square().mean();
        }
        return second->forward(torch::relu(first->forward(inputs)));
    }

    torch::nn::Linear first, second;
    Tensor seen;
};
TORCH_MODULE(Net);

/// The same on all ranks.
Net make_net(torch::Device device) {
    torch::manual_seed(1);
    Net net;
    net->to(device);
    return net;
}

/// How ranks train: where tensors are, and what makes work on streams late.
struct Place {
    torch::Device device = torch::kCPU;
    std::function<void()> delay = [] {};
};

/// Any rank can make the inputs of all.
Tensor input_of(int rank, int round, Place const& place) {
    auto const seed = static_cast<std::uint64_t>(97 * rank + round + 1);
    return torch::randn({16, 48}, at::detail::createCPUGenerator(seed)).to(place.device);
}
/// The same, but the values come late, in the order of the current stream.
Tensor late_input_of(int rank, int round, Place const& place) {
    Tensor const input = input_of(rank, round, place);
    Tensor late = torch::full_like(input, std::numeric_limits<float>::quiet_NaN());
    place.delay();
    late.copy_(input);
    return late;
}

/// The gradients of `net` without data parallelism, averaged over the ranks from `first` on.
std::vector<Tensor> averages(Net& net, int first, int ranks, int round, Place const& place) {
    std::vector<Tensor> sums;
    for (Tensor const& parameter : net->parameters()) {
        sums.push_back(torch::zeros_like(parameter, parameter.options().requires_grad(false)));
    }
    for (int rank = first; rank < ranks; ++rank) {
        net->zero_grad();
        net->forward(input_of(rank, round, place)).square().sum().backward();
        for (std::size_t i = 0; i < sums.size(); ++i) {
            sums[i] += net->parameters()[i].grad();
        }
    }
    for (Tensor& sum : sums) {
        sum /= ranks;
    }
    return sums;
}

/// Halves and sums of two are exact, so up to two ranks have the same bits.
void expect_equal(Tensor const& is, Tensor const& should, int ranks, std::string const& what) {
    bool const is_equal =
        ranks <= 2 ? torch::equal(is, should) : torch::allclose(is, should, 1e-4, 1e-6);
    if (!is_equal) {
        auto const off = (is - should).abs().max().item<double>();
        expect(false, what + " is off by " + std::to_string(off));
    }
}

/// libtorch waits without an end for a rank that never comes.
template <class Comm>
void wait_for_work(Comm& comm) {
    if constexpr (requires { comm.synchronize(); }) {
        comm.synchronize();
    }
}

joinable::DataParallelOptions small_buckets(bool views) {
    joinable::DataParallelOptions options;
    options.bucket_cap_bytes = 8192;
    options.first_bucket_bytes = 1024;
    options.gradient_as_bucket_view = views;
    options.joined_gradients = joinable::JoinedGradients::kept;
    return options;
}

using Within = std::function<void(std::function<void()> const&)>;

/// `within(body)` calls `body()`, which trains.
template <class Comm>
void check_averages(Comm& comm, Place const& place, bool views, Within const& within) {
    Net net = make_net(place.device);
    Net plain = make_net(place.device);
    joinable::torch::DistributedDataParallel ddp{comm, net, small_buckets(views)};
    within([&] {
        void const* place_of_gradient = nullptr;
        for (int round = 0; round < 6; ++round) {
            net->zero_grad(round % 2 == 0); // else they are added to
            ddp.forward(late_input_of(comm.rank(), round, place)).square().sum().backward();
            wait_for_work(comm);
            auto const should = averages(plain, 0, comm.size(), round, place);
            for (std::size_t i = 0; i < should.size(); ++i) {
                Tensor const is = net->parameters()[i].grad();
                expect(is.device() == net->parameters()[i].device(), "a gradient is elsewhere");
                expect_equal(
                    is, should[i], comm.size(), "round " + std::to_string(round) + ": a gradient"
                );
            }
            void const* const data = net->parameters()[0].grad().data_ptr();
            expect(
                !views || round < 2 || data == place_of_gradient, "a gradient has left its bucket"
            );
            place_of_gradient = data;
        }
    });
}

torch::optim::SGD make_optimizer(std::vector<Tensor> parameters) {
    return torch::optim::SGD{std::move(parameters), torch::optim::SGDOptions{0.001}.momentum(0.9)};
}
std::vector<Tensor> copies_of(Net const& net) {
    std::vector<Tensor> copies;
    for (Tensor const& parameter : net->parameters()) {
        copies.push_back(parameter.detach().clone());
    }
    return copies;
}

/// Rank r has r + 1 inputs, by which `train(net, rounds)` trains and returns the values then. All
/// ranks end with what one rank computes that has all inputs.
template <class Comm, class Train>
void check_training(
    Comm& comm, Hosts& hosts, Place const& place, std::string const& what, Train const& train
) {
    Net net = make_net(place.device);
    Net plain = make_net(place.device);
    torch::optim::SGD plain_optimizer = make_optimizer(plain->parameters());
    std::size_t rounds = 0;
    std::vector<Tensor> const values = train(net, rounds);
    expect(rounds == static_cast<std::size_t>(comm.size()), what + ": a number of rounds");
    wait_for_work(comm);
    for (int round = 0; round < comm.size(); ++round) {
        auto const gradients = averages(plain, round, comm.size(), round, place);
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            plain->parameters()[i].mutable_grad() = gradients[i];
        }
        plain_optimizer.step();
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        Tensor const should = plain->parameters()[i].detach();
        expect_equal(values[i], should, comm.size(), what + ": a parameter");
    }
    double const seen = net->seen.item<double>(); // differs, unless it is sent
    std::array<double, 2> extremes{seen, -seen};
    hosts
        .all_reduce(
            {extremes.data(), extremes.size(), joinable::DType::f64}, joinable::ReduceOp::max
        )
        .wait();
    expect(extremes[0] == -extremes[1], what + ": ranks end with different buffers");
}

template <class Comm>
void check_uneven_inputs(Comm& comm, Hosts& hosts, Place const& place, bool views) {
    check_training(comm, hosts, place, "uneven inputs", [&](Net& net, std::size_t& rounds) {
        torch::optim::SGD optimizer = make_optimizer(net->parameters());
        joinable::torch::DistributedDataParallel ddp{comm, net, small_buckets(views)};
        joinable::torch::Step step{comm, optimizer};
        joinable::Join guard{joinable::participants(ddp, step), joinable::control(hosts)};
        for (int round = 0; round <= comm.rank(); ++round) {
            optimizer.zero_grad();
            ddp.forward(late_input_of(comm.rank(), round, place)).square().sum().backward();
            step.step();
        }
        rounds = guard.finish().rounds;
        return copies_of(net);
    });
}

/// The same where ranks have parts of the state of libtorch's optimizer, or of gradients and
/// values, too.
template <class Comm>
void check_sharded(Comm& comm, Hosts& hosts, Place const& place, bool views) {
    check_training(comm, hosts, place, "torch::Optimizer", [&](Net& net, std::size_t& rounds) {
        joinable::torch::DistributedDataParallel ddp{comm, net, small_buckets(views)};
        joinable::torch::Optimizer zero{comm, joinable::torch::parameters(net), &make_optimizer};
        joinable::Join guard{joinable::participants(ddp, zero), joinable::control(hosts)};
        for (int round = 0; round <= comm.rank(); ++round) {
            net->zero_grad();
            ddp.forward(late_input_of(comm.rank(), round, place)).square().sum().backward();
            zero.step();
        }
        rounds = guard.finish().rounds;
        return copies_of(net);
    });
    using joinable::Sharding;
    for (Sharding const sharding :
         {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
        auto const what =
            "torch::ShardedDataParallel, stage " + std::to_string(static_cast<int>(sharding));
        check_training(comm, hosts, place, what, [&](Net& net, std::size_t& rounds) {
            joinable::torch::ShardedDataParallel sharded{
                comm, net, &make_optimizer, {.sharding = sharding, .bucket_cap_bytes = 8192}
            };
            joinable::Join guard{joinable::participants(sharded), joinable::control(hosts)};
            for (int round = 0; round <= comm.rank(); ++round) {
                net->zero_grad();
                Tensor const inputs = late_input_of(comm.rank(), round, place);
                auto const pass = [&] {
                    auto const held = sharded.use(net);
                    return net->forward(inputs);
                };
                sharded.forward(pass).square().sum().backward();
                sharded.clip_grad_norm_(std::numeric_limits<float>::max());
                sharded.step();
            }
            rounds = guard.finish().rounds;
            auto const held = sharded.use_all();
            return copies_of(net);
        });
    }
}

void check_in_host_memory(Hosts& hosts) {
    for (bool const views : {false, true}) {
        check_averages(hosts, {}, views, [](auto const& body) { body(); });
        check_uneven_inputs(hosts, hosts, {}, views);
        check_sharded(hosts, hosts, {}, views);
    }
}

/// The caller's stream is libtorch's current one.
struct TorchRank {
    joinable::NcclCommunicator comm;

    explicit TorchRank(Hosts& hosts)
        : comm{
              hosts,
              {.stream = c10::cuda::getCurrentCUDAStream().stream(),
               .deadline = std::chrono::seconds{20}}
          } {
        comm.device_memory().use_kernels(kernels());
    }
};

void check_on_gpu(Hosts& hosts) {
    auto const device = static_cast<c10::DeviceIndex>(take_device(hosts));
    auto const sleep = [] { at::cuda::sleep(2'000'000); }; // about 1 ms
    auto const check = [&](bool views) {
        Place const place{{torch::kCUDA, device}, sleep};
        TorchRank rank{hosts};
        check_averages(rank.comm, place, views, [](auto const& body) { body(); });
        check_uneven_inputs(rank.comm, hosts, place, views);
        check_sharded(rank.comm, hosts, place, views);
    };
    // What is made on one stream trains on another one, while the first is busy.
    auto const check_other_stream = [&](bool views) {
        CUDAStream const first = c10::cuda::getCurrentCUDAStream();
        CUDAStream const second = c10::cuda::getStreamFromPool(false, device);
        Place const place{{torch::kCUDA, device}, [&] {
                              sleep();
                              CUDAStreamGuard const on_first{first};
                              at::cuda::sleep(8'000'000);
                          }};
        TorchRank rank{hosts};
        check_averages(rank.comm, place, views, [&](auto const& body) {
            rank.comm.synchronize();
            CUDAStreamGuard const on_second{second};
            rank.comm.set_stream(second);
            body();
            rank.comm.synchronize();
            rank.comm.set_stream(first);
        });
    };
    for (bool const views : {false, true}) {
        check(views);
        {
            CUDAStreamGuard const aside{c10::cuda::getStreamFromPool(false, device)};
            check(views);
        }
        check_other_stream(views);
    }
}

void measure(Rank<Hosts>& rank, torch::ScalarType dtype, std::int64_t batch, std::FILE* file) {
    constexpr std::int64_t width = 1768;
    torch::Device const device{torch::kCUDA, static_cast<c10::DeviceIndex>(rank.device)};
    auto const make = [&] {
        torch::manual_seed(1);
        torch::nn::Sequential net;
        for (int layer = 0; layer < 8; ++layer) {
            net->push_back(torch::nn::Linear{torch::nn::LinearOptions{width, width}.bias(false)});
        }
        net->to(device, dtype);
        return net;
    };
    Tensor const inputs =
        torch::rand({batch, width}, torch::TensorOptions{device}.dtype(dtype)) * 2 - 1;
    Tensor const ones = torch::ones_like(inputs);
    torch::nn::Sequential alone = make();
    torch::nn::Sequential copied = make();
    torch::nn::Sequential viewed = make();
    joinable::DataParallelOptions options;
    options.sync_at_end = false;
    joinable::torch::DistributedDataParallel copies{rank.comm, copied, options};
    options.gradient_as_bucket_view = true;
    joinable::torch::DistributedDataParallel views{rank.comm, viewed, options};
    auto const iteration = [&](auto& net, auto const& forward) {
        return [&] {
            net->zero_grad();
            forward().backward(ones);
        };
    };
    auto const plain = [&] { return alone->forward(inputs); };
    auto const with_copies = [&] { return copies.forward(inputs); };
    auto const with_views = [&] { return views.forward(inputs); };
    auto const with_weights = [&] { return views.forward({.weight = 32}, inputs); };
    auto const guarded = in_guard(rank.hosts, views);
    auto const result = measure_variants(
        rank,
        {{"passes", iteration(alone, plain)},
         {"copies", iteration(copied, with_copies)},
         {"views", iteration(viewed, with_views)},
         {"views,guard", iteration(viewed, with_views), guarded},
         {"views,guard,weights", iteration(viewed, with_weights), guarded}},
        7
    );
    if (rank.hosts.rank() == 0) {
        std::string const name =
            (dtype == torch::kFloat ? "f32 " : "bf16 ") + std::to_string(batch) + " libtorch";
        write(stdout, name, result);
        write(file, name, result);
    }
}

void measure_on_gpu(Hosts& hosts, char const* path) {
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{nullptr, std::fclose};
    if (hosts.rank() == 0) {
        file.reset(std::fopen(path, "w"));
        expect(file != nullptr, std::string{"cannot write "} + path);
    }
    Rank<Hosts> rank{hosts, kernels()};
    CUDAStreamGuard const on_its_stream{
        c10::cuda::getStreamFromExternal(rank.stream, static_cast<c10::DeviceIndex>(rank.device))
    };
    for (std::int64_t const batch : {32, 4096}) {
        measure(rank, torch::kFloat, batch, file.get());
        measure(rank, torch::kBFloat16, batch, file.get());
    }
}

} // namespace

int main(int argc, char** argv) {
    std::string_view const what = argc >= 3 ? argv[1] : "";
    int const ranks = argc >= 3 ? std::atoi(argv[2]) : 0;
    if (ranks < 1 || argc != (what == "measure" ? 4 : 3) ||
        (what != "host" && what != "check" && what != "measure")) {
        std::fprintf(
            stderr,
            "usage: %s host|check <ranks>, or measure <ranks> <file for ddp_torch.py>\n",
            argv[0]
        );
        return 2;
    }
    try {
        // No rank has begun with CUDA before it is a process of its own.
        auto const body = [&](Hosts& hosts) {
            hosts.set_deadline(std::chrono::seconds{30});
            if (what == "host") {
                check_in_host_memory(hosts);
            } else if (what == "check") {
                check_on_gpu(hosts);
            } else {
                measure_on_gpu(hosts, argv[3]);
            }
        };
        // Its BLAS may have threads, and starts its own again in a forked process.
        joinable::run_processes(ranks, body, {.other_threads = true});
        if (what != "measure") {
            std::printf(
                "%d ranks: gradients and parameters of libtorch are what a run without data parallelism gives\n",
                ranks
            );
        }
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
