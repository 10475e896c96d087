// SPDX-License-Identifier: BSL-1.0
// One model over two GPUs of each rank: an NCCL communicator for each.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include <support/failure_text.hpp>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/keep_alive.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/join.hpp>
#include <joinable/nccl.hpp>
#include <joinable/per_device.hpp>
#include <joinable/shadowed.hpp>

namespace {

using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::NcclCommunicator;
using joinable::PerDevice;
using joinable::ThreadCommunicator;
using namespace joinable_tests;

joinable::NcclOptions options_of(int device, cudaStream_t stream) {
    joinable::NcclOptions options;
    options.stream = stream;
    options.device = device;
    options.deadline = std::chrono::seconds{60};
    return options;
}

struct TwoGpus {
    TwoGpus(ThreadCommunicator& hosts, DType dtype)
        : lower{hosts.rank(), dtype, 2 * hosts.rank()},
          upper{hosts.rank(), dtype, 2 * hosts.rank() + 1},
          of_lower{hosts, options_of(2 * hosts.rank(), lower.stream())},
          of_upper{hosts, options_of(2 * hosts.rank() + 1, upper.stream())},
          comm{of_lower, of_upper} {
        for (DeviceModel* model : {&lower, &upper}) {
            for (DeviceParam& param : model->params) {
                params.push_back(&param);
            }
        }
    }
    template <class Ready>
    void backward(int batch, Ready const& ready) {
        upper.backward(batch, [&](std::size_t k) { ready(lower.params.size() + k); });
        lower.backward(batch, ready);
    }
    void check(std::vector<Numbers> const& expected) {
        CHECK(lower.gradients() == expected);
        CHECK(upper.gradients() == expected);
    }

    DeviceModel lower;
    DeviceModel upper;
    NcclCommunicator of_lower;
    NcclCommunicator of_upper;
    PerDevice<NcclCommunicator> comm;
    std::vector<DeviceParam*> params;
};

template <class Body>
void run_gpus(std::initializer_list<int> sizes, DType dtype, Body const& body) {
    SixteenDevices const devices;
    for (bool const has_kernels : {false, true}) {
        run_participants(sizes, [&](ThreadCommunicator& hosts) {
            TwoGpus gpus{hosts, dtype};
            if (has_kernels) {
                gpus.of_lower.device_memory().use_kernels(host_kernels());
                gpus.of_upper.device_memory().use_kernels(host_kernels());
            }
            body(hosts, gpus);
        });
        check_nothing_is_left();
    }
}

TEST_CASE("one model over two GPUs of each rank is averaged over NCCL, with uneven inputs") {
    for (DType const dtype : {DType::f32, DType::f64}) {
        for (bool const views : {false, true}) {
            auto const average = [&](ThreadCommunicator& hosts, TwoGpus& gpus) {
                DistributedDataParallel ddp{gpus.comm, gpus.params, small_buckets(views)};
                joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
                for (int batch = 0; batch <= hosts.rank(); ++batch) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) { gpus.backward(batch, ready); });
                    gpus.check(
                        gpus.lower.averages(batch, all_ranks(batch, hosts.size()), hosts.size())
                    );
                }
                CHECK(guard.finish().rounds == static_cast<std::size_t>(hosts.size()));
            };
            run_gpus({1, 2, 3, 4}, dtype, average);
            if (dtype == DType::f32 && views) {
                run_gpus({8}, dtype, average);
            }
        }
    }
}

TEST_CASE("without control(), outside a guard, words travel by the first GPU's communicator") {
    run_gpus({2}, DType::f32, [](ThreadCommunicator& hosts, TwoGpus& gpus) {
        auto options = small_buckets(false);
        options.find_unused = true;
        DistributedDataParallel ddp{gpus.comm, gpus.params, options};
        for (int batch = 0; batch < 2; ++batch) {
            ddp.forward([] {}, {.weight = 1});
            ddp.backward([&](auto ready) { gpus.backward(batch, ready); });
            gpus.check(gpus.lower.averages(batch, all_ranks(0, hosts.size()), hosts.size()));
        }
        CHECK(
            gpus.comm.set_deadline(std::chrono::seconds{50}) ==
            std::chrono::nanoseconds{std::chrono::seconds{60}}
        );
        CHECK(
            gpus.of_upper.set_deadline(std::chrono::seconds{40}) ==
            std::chrono::nanoseconds{std::chrono::seconds{50}}
        );
    });
}

TEST_CASE("ranks that give the communicators in another order wait until the deadline") {
    run_gpus({2, 3}, DType::f32, [](ThreadCommunicator& hosts, TwoGpus& gpus) {
        bool const is_other = hosts.rank() == 1;
        PerDevice comm{
            is_other ? gpus.of_upper : gpus.of_lower, is_other ? gpus.of_lower : gpus.of_upper
        };
        comm.set_deadline(std::chrono::milliseconds{300});
        CHECK_THROWS_AS(DistributedDataParallel(comm, gpus.params), joinable::TimedOut);
    });
}

/// A sum over all ranks by the communicator of the GPU that is current.
struct SumOnGpu {
    SumOnGpu(int device, cudaStream_t its_stream)
        : stream{(cuda(cudaSetDevice(device)), its_stream)}, data{{1}, stream} {}

    cudaStream_t stream;
    DeviceArray<int> data;
};

TEST_CASE("collectives of a model over one GPU are of a model of that GPU, in the same guard") {
    run_gpus({1, 2, 3}, DType::f32, [](ThreadCommunicator& hosts, TwoGpus& gpus) {
        auto in_model = joinable::shadowed(gpus.of_lower);
        {
            DistributedDataParallel both{gpus.comm, gpus.params};
            says(
                failure_of([&] { both.attach_collectives(in_model); }),
                "contract: attach_collectives() was given a shadowed() communicator of another "
                "communicator; make it of the one that this participant has"
            );
        }
        SumOnGpu const sum{2 * hosts.rank(), gpus.lower.stream()};
        DistributedDataParallel lower{gpus.of_lower, gpus.lower.params, small_buckets(false)};
        DistributedDataParallel upper{gpus.of_upper, gpus.upper.params, small_buckets(false)};
        lower.attach_collectives(in_model);
        joinable::Join guard{joinable::participants(lower, upper), joinable::control(hosts)};
        for (int batch = 0; batch <= hosts.rank(); ++batch) {
            std::vector<std::size_t> of_upper;
            lower.forward([&] {
                in_model.all_reduce(sum.data.buffer(), joinable::ReduceOp::sum).wait();
            });
            lower.backward([&](auto ready) {
                gpus.upper.backward(batch, [&](std::size_t k) { of_upper.push_back(k); });
                gpus.lower.backward(batch, ready);
            });
            upper.forward([] {});
            upper.backward([&](auto ready) {
                for (std::size_t const k : of_upper) {
                    ready(k);
                }
            });
            gpus.check(gpus.lower.averages(batch, all_ranks(batch, hosts.size()), hosts.size()));
        }
        guard.finish();
        // Each round multiplies 1 by the number of its active ranks, of which this one was in the first ones.
        int expected = 1;
        for (int batch = 0; batch <= hosts.rank(); ++batch) {
            expected *= hosts.size() - batch;
        }
        CHECK(sum.data.read(gpus.of_lower, sum.stream) == std::vector{expected});
    });
}

TEST_CASE("a guard with a timeout gives all GPUs the longest deadline back") {
    run_gpus({1, 2, 3, 4}, DType::f32, [](ThreadCommunicator& hosts, TwoGpus& gpus) {
        using std::chrono::nanoseconds;
        using std::chrono::seconds;
        for (bool const is_lower_longer : {false, true}) {
            gpus.of_lower.set_deadline(seconds{is_lower_longer ? 70 : 50});
            gpus.of_upper.set_deadline(seconds{is_lower_longer ? 50 : 70});
            DistributedDataParallel ddp{gpus.comm, gpus.params, small_buckets(false)};
            {
                joinable::Join guard{
                    joinable::participants(ddp),
                    joinable::control(hosts),
                    joinable::JoinOptions{.timeout = seconds{40}}
                };
                ddp.forward([] {});
                ddp.backward([&](auto ready) { gpus.backward(0, ready); });
                for (NcclCommunicator* const one : {&gpus.of_lower, &gpus.of_upper}) {
                    CHECK(one->set_deadline(seconds{40}) == nanoseconds{seconds{40}});
                }
            }
            for (NcclCommunicator* const one : {&gpus.of_lower, &gpus.of_upper}) {
                CHECK(one->set_deadline(seconds{60}) == nanoseconds{seconds{70}});
            }
        }
    });
}

TEST_CASE("the ranks that either GPU waits for are missing") {
    run_gpus({2, 3, 4}, DType::f32, [](ThreadCommunicator& hosts, TwoGpus& gpus) {
        for (bool const is_upper : {false, true}) {
            SumOnGpu const sum{
                2 * hosts.rank() + (is_upper ? 1 : 0), (is_upper ? gpus.upper : gpus.lower).stream()
            };
            NcclCommunicator& used = is_upper ? gpus.of_upper : gpus.of_lower;
            NcclCommunicator& other = is_upper ? gpus.of_lower : gpus.of_upper;
            if (hosts.rank() == 1) { // the others have come
                hosts.barrier();
            }
            auto work = gpus.comm.all_reduce(sum.data.buffer(), joinable::ReduceOp::sum);
            if (hosts.rank() != 1) {
                CHECK(other.missing_ranks().empty());
                std::vector<int> const missing = gpus.comm.missing_ranks();
                CHECK(
                    std::count(missing.begin(), missing.end(), 1) == 1
                ); // and those that are late
                CHECK(std::count(missing.begin(), missing.end(), hosts.rank()) == 0);
                hosts.barrier();
            }
            work.synchronize();
            CHECK(sum.data.read(used, sum.stream) == std::vector{hosts.size()});
            CHECK(gpus.comm.missing_ranks().empty());
            hosts.barrier();
        }
    });
}

TEST_CASE("a rank that stays away keeps the waits of both GPUs alive") {
    run_participants({2}, [](ThreadCommunicator& hosts) {
        TwoGpus gpus{hosts, DType::f32};
        SumOnGpu const upper{2 * hosts.rank() + 1, gpus.upper.stream()};
        SumOnGpu const lower{2 * hosts.rank(), gpus.lower.stream()};
        gpus.comm.barrier();
        gpus.comm.set_deadline(long_deadline);
        if (hosts.rank() == 1) {
            stay_away_alive(gpus.comm);
        }
        auto of_lower = gpus.comm.all_reduce(lower.data.buffer(), joinable::ReduceOp::sum);
        auto of_upper = gpus.comm.all_reduce(upper.data.buffer(), joinable::ReduceOp::sum);
        of_upper.synchronize();
        of_lower.synchronize();
        CHECK(upper.data.read(gpus.of_upper, upper.stream) == std::vector{2});
        CHECK(lower.data.read(gpus.of_lower, lower.stream) == std::vector{2});
    });
    check_nothing_is_left();
}

TEST_CASE("a rank that throws while both GPUs have buckets under way ends all ranks") {
    run_gpus({2, 3, 4, 8}, DType::f32, [](ThreadCommunicator& hosts, TwoGpus& gpus) {
        DistributedDataParallel ddp{gpus.comm, gpus.params, small_buckets(false)};
        std::string const text = failure_of([&] {
            joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
            for (int batch = 0;; ++batch) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    gpus.backward(batch, [&](std::size_t i) {
                        if (hosts.rank() == 1 && batch == 1 && i == 1) {
                            throw std::runtime_error{"no more memory"};
                        }
                        ready(i);
                    });
                });
            }
        });
        says(text, hosts.rank() == 1 ? "other: no more memory" : "peer: ");
        says(text, "no more memory");
        CHECK(gpus.of_lower.is_aborted());
        CHECK(gpus.of_upper.is_aborted());
    });
}

} // namespace
