// SPDX-License-Identifier: BSL-1.0
// Checkpoints of parameters and state in device memory. The oracle: the file of the same training in host
// memory, byte for byte.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <support/checkpoint_file.hpp>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/device_training.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/folder.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>
#include <support/sharded_training.hpp>
#include <support/volume.hpp>

#include <joinable/checkpoint.hpp>
#include <joinable/compression.hpp>
#include <joinable/join.hpp>
#include <joinable/nccl.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::Checkpoint;
using joinable::Partition;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using namespace joinable_tests;

std::string bytes_of(std::filesystem::path const& file) {
    std::ifstream stream{file, std::ios::binary};
    return {std::istreambuf_iterator<char>{stream}, std::istreambuf_iterator<char>{}};
}

/// What follows the header, which has the bytes between a rule's members, too.
std::string data_of(std::filesystem::path const& file) {
    std::string const bytes = bytes_of(file);
    std::uint64_t header = 0;
    REQUIRE(bytes.size() > sizeof(header));
    std::memcpy(&header, bytes.data(), sizeof(header));
    return bytes.substr(sizeof(header) + header);
}

auto const no_use = [](std::size_t) { return 0; };

template <class Sharded, class Backward>
void step(Sharded& sharded, Sharding sharding, Backward const& backward) {
    if (sharding == Sharding::parameters) {
        sharded.forward([](auto use) { static_cast<void>(use); });
        sharded.backward([&](auto ready, auto use) { backward(ready, use); });
    } else {
        sharded.forward([] {});
        sharded.backward([&](auto ready) { backward(ready, no_use); });
    }
    sharded.step();
}

/// Trains two rounds in host memory and saves them.
void save_on_host(
    ThreadCommunicator& hosts,
    Model const& model,
    ShardedOptions options,
    std::filesystem::path const& file
) {
    options.sharding = // the file is the same for each, but in host memory passes would need `use`
        options.sharding == Sharding::parameters ? Sharding::gradients : options.sharding;
    std::vector<StridedParam> params = make(model);
    ShardedDataParallel sharded{hosts, params, Adam{.learning_rate = 0.02}, options};
    Checkpoint save{sharded, file};
    for (int round = 0; round < 2; ++round) {
        step(sharded, options.sharding, [&](auto ready, auto const&) {
            backward_on_host(params, hosts.rank(), round, ready);
        });
    }
    save.write();
}

TEST_CASE("a checkpoint of a device is that of the host, byte for byte, and is read there") {
    fake_cuda::delay_every_operation(std::chrono::microseconds{20});
    Folder const folder;
    int number = 0;
    for (Model const& model :
         {Model{.dtype = DType::bf16, .frozen = 2}, Model{.has_strides = true}}) {
        for (Sharding const sharding :
             {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
            for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
                std::string const name = std::to_string(number++);
                auto const on_host = folder.file("host" + name);
                auto const there = folder.file("device" + name);
                auto const again = folder.file("again" + name);
                ShardedOptions const options{
                    .sharding = sharding, .partition = partition, .bucket_cap_bytes = 64
                };
                auto const check = [&](ThreadCommunicator& hosts, auto& comm, auto& engine) {
                    save_on_host(hosts, model, options, on_host);
                    auto const train = [&](auto& sharded, DeviceEngine& of, int rounds) {
                        for (int round = 0; round < rounds; ++round) {
                            step(sharded, sharding, [&](auto ready, auto use) {
                                of.backward(round, ready, use);
                            });
                        }
                    };
                    ShardedDataParallel sharded{
                        comm, engine.params, Adam{.learning_rate = 0.02}, options
                    };
                    Checkpoint save{sharded, there};
                    train(sharded, engine, 2);
                    save.write();
                    if (hosts.rank() == 0) {
                        CHECK((data_of(there) == data_of(on_host)));
                        CHECK(!data_of(there).empty());
                    }
                    DeviceEngine other{model, engine};
                    ShardedDataParallel resumed{
                        comm, other.params, Adam{.learning_rate = 0.5}, options
                    };
                    train(resumed, other, 1); // reading replaces it
                    Checkpoint load{resumed, again};
                    load.read(on_host);
                    load.write();
                    if (hosts.rank() == 0) {
                        CHECK((bytes_of(again) == bytes_of(on_host)));
                    }
                };
                auto const run = [&](ThreadCommunicator& hosts) {
                    DeviceEngine engine{model, hosts.rank()};
                    if (partition == Partition::flat && hosts.size() == 2) {
                        StreamCommunicator comm{hosts, engine.stream()};
                        comm.device_memory().use_kernels(host_kernels());
                        check(hosts, comm, engine);
                    } else {
                        joinable::NcclCommunicator comm{
                            hosts, {.stream = engine.stream(), .deadline = std::chrono::seconds{60}}
                        };
                        comm.device_memory().use_kernels(host_kernels());
                        check(hosts, comm, engine);
                    }
                };
                auto const turn = static_cast<std::size_t>(number / 2);
                in_turn({1, 2}, turn, [&](int size) { run_ranks({size}, run); });
                check_nothing_is_left();
            }
        }
    }
    fake_cuda::delay_every_operation({});
}

/// Two matrices that PowerSgd compresses, one of them by columns, and a vector.
struct Extents {
    joinable::Shape extents;
    joinable::Shape strides;
};
std::vector<Extents> matrices() {
    return {{{24, 30}, {30, 1}}, {{7}, {1}}, {{30, 12}, {1, 30}}};
}
struct MatricesOnDevice : DeviceModel {
    explicit MatricesOnDevice(int rank) : DeviceModel{rank, DType::f32} {
        params.clear();
        for (auto const& [extents, strides] : matrices()) {
            params.emplace_back(DType::f32, extents, strides);
        }
    }
};

TEST_CASE(
    "residuals on devices are read by other numbers of ranks, summed as in host memory, or are zero"
) {
    Folder const folder;
    auto const saved = folder.file("saved");
    auto const on_host = folder.file("host");
    auto const there = folder.file("device");
    auto const reduction = [] { return joinable::PowerSgd{.start_iteration = 1}; };
    auto const run_on_host = [&](ThreadCommunicator& comm, auto const& body) {
        std::vector<StridedParam> params;
        for (auto const& [extents, strides] : matrices()) {
            params.push_back(StridedParam{
                {OwnedTensor{DType::f32, extents, strides},
                 OwnedTensor{DType::f32, extents, strides},
                 {}}
            });
            write(params.back().value.view(), Numbers(params.back().value.view().numel()));
            params.back().need_grad();
        }
        joinable::DistributedDataParallel ddp{comm, params, {}, reduction()};
        body(ddp, params);
    };
    for (std::pair<int, int> const& ranks : {std::pair{4, 2}, {2, 4}, {1, 3}, {3, 2}, {8, 1}}) {
        int const from = ranks.first;
        int const to = ranks.second;
        CAPTURE(from);
        CAPTURE(to);
        run_ranks({from}, [&](ThreadCommunicator& comm) {
            run_on_host(comm, [&](auto& ddp, auto& params) {
                for (int batch = 0; batch < 3; ++batch) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        for (std::size_t i = params.size(); i-- > 0;) {
                            Numbers numbers(params[i].grad.numel());
                            for (std::size_t e = 0; e < numbers.size(); ++e) {
                                numbers[e] = DeviceModel::gradient_of(comm.rank(), i, e, batch);
                            }
                            write(params[i].grad, numbers);
                            ready(i);
                        }
                    });
                }
                Checkpoint{participants(ddp), saved}.write();
            });
        });
        run_ranks({to}, [&](ThreadCommunicator& comm) {
            run_on_host(comm, [&](auto& ddp, auto&) {
                Checkpoint{participants(ddp), saved}.read();
                Checkpoint{participants(ddp), on_host}.write();
            });
        });
        run_ranks({to}, [&](ThreadCommunicator& hosts) {
            MatricesOnDevice model{hosts.rank()};
            StreamCommunicator comm{hosts, model.stream()};
            comm.device_memory().use_kernels(host_kernels());
            joinable::DistributedDataParallel ddp{comm, model.params, {}, reduction()};
            for (int batch = 0; batch < 2; ++batch) { // the file replaces what this leaves
                ddp.forward([] {});
                ddp.backward([&](auto ready) { model.backward(batch, ready); });
            }
            Checkpoint{participants(ddp), saved}.read();
            Checkpoint{participants(ddp), there}.write();
        });
        check_nothing_is_left();
        CHECK((data_of(there) == data_of(on_host)));
        ReadFile const before = read_checkpoint(saved);
        ReadFile const after = read_checkpoint(there);
        for (std::string const name : {"0/residual/", "2/residual/"}) {
            for (int rank = 0; rank < to; ++rank) {
                Numbers const residual = after.numbers(name + std::to_string(rank));
                Numbers sum(residual.size());
                for (int of_file = rank; of_file < from; of_file += to) {
                    Numbers const one = before.numbers(name + std::to_string(of_file));
                    for (std::size_t e = 0; e < sum.size(); ++e) {
                        sum[e] += one[e];
                    }
                    CHECK(std::any_of(one.begin(), one.end(), [](double x) { return x != 0; }));
                }
                CHECK(std::equal(sum.begin(), sum.end(), residual.begin(), [](double a, double b) {
                    return std::abs(a - b) < 1e-4;
                }));
            }
        }
    }
}

} // namespace
