// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/numbers.hpp>
#include <support/ranks.hpp>

#include <joinable/cuda.hpp>
#include <joinable/join.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;
using joinable::AnyView;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Shape;
using joinable::ThreadCommunicator;
using namespace joinable_tests;

/// Runs body(host, comm, model) on every rank, with kernels or without, and looks for leaks.
template <class Body>
void run_devices(std::initializer_list<int> sizes, DType dtype, Body const& body) {
    for (bool const has_kernels : {false, true}) {
        run_participants(sizes, [&](ThreadCommunicator& host) {
            DeviceModel model{host.rank(), dtype};
            if (has_kernels) {
                StreamCommunicator comm{host, model.stream()};
                comm.device_memory().use_kernels(host_kernels());
                body(host, comm, model);
            } else {
                ScalingStreamCommunicator comm{host, model.stream()};
                body(host, comm, model);
            }
        });
        check_nothing_is_left();
    }
}

TEST_CASE("gradients on devices are averaged, by copies and as bucket views, in each dtype") {
    for (auto const delay : {std::chrono::microseconds{0}, std::chrono::microseconds{50}}) {
        fake::delay_every_operation(delay);
        for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
            for (bool const views : {false, true}) {
                run_devices({1, 2, 3, 4}, dtype, [&](auto& host, auto& comm, DeviceModel& model) {
                    DistributedDataParallel ddp{comm, model.params, small_buckets(views)};
                    for (int batch = 0; batch < 3; ++batch) {
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) { model.backward(batch, ready); });
                        CHECK(
                            model.gradients() ==
                            model.averages(batch, all_ranks(0, host.size()), host.size())
                        );
                    }
                    CHECK(ddp.buckets().size() > 1); // they have been cut anew
                    for (joinable::Bucket const& bucket : ddp.buckets()) {
                        CHECK(fake::is_device_memory(bucket.buffer.data, bucket.buffer.bytes()));
                    }
                });
            }
        }
    }
    fake::delay_every_operation({});
}

TEST_CASE("what gradients hold moves into the buckets before the engine goes on") {
    run_devices({1, 2}, DType::f32, [](auto&, auto& comm, DeviceModel& model) {
        joinable_tests::launch(model.stream(), [&] {
            model.params[1].own.assign(Numbers(5, 3.0));
        });
        joinable::DataParallelOptions options = small_buckets(true);
        options.sync_at_start = false;
        DistributedDataParallel const ddp{comm, model.params, options};
        CHECK(model.params[1].grad.data() != model.params[1].own.view().data());
        CHECK(model.gradients()[1] == Numbers(5, 3.0));
    });
}

TEST_CASE("joined ranks shadow on their devices, and receive the averages") {
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        for (bool const views : {false, true}) {
            for (auto const joined :
                 {joinable::JoinedGradients::kept, joinable::JoinedGradients::zeroed_at_end}) {
                run_devices({2, 3, 4}, dtype, [&](auto& host, auto& comm, DeviceModel& model) {
                    auto options = small_buckets(views);
                    options.joined_gradients = joined;
                    DistributedDataParallel ddp{comm, model.params, options};
                    int const rounds = host.size();
                    joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                    for (int batch = 0; batch <= host.rank(); ++batch) {
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) { model.backward(batch, ready); });
                        CHECK(
                            model.gradients() ==
                            model.averages(batch, all_ranks(batch, host.size()), host.size())
                        );
                    }
                    auto const result = guard.finish();
                    CHECK(result.rounds == static_cast<std::size_t>(rounds));
                    auto expected = model.averages(rounds - 1, {rounds - 1}, rounds);
                    if (joined == joinable::JoinedGradients::zeroed_at_end &&
                        host.rank() != rounds - 1) {
                        for (Numbers& numbers : expected) {
                            numbers.assign(numbers.size(), 0.0);
                        }
                    }
                    CHECK(model.gradients() == expected);
                });
            }
        }
    }
}

TEST_CASE("parameters start as rank 0's and end as the last rank's that trained, on devices too") {
    run_devices({1, 2, 4}, DType::f32, [](auto& host, auto& comm, DeviceModel& model) {
        auto const fill = [&](DeviceTensor const& tensor, double number) {
            joinable_tests::launch(model.stream(), [view = tensor.view(), number] {
                joinable_tests::write(view, Numbers(view.numel(), number));
            });
        };
        std::vector<DeviceTensor> buffers{{DType::i64, {3}, {1}}, {DType::f32, {2, 2}, {1, 2}}};
        std::vector<DeviceTensor> state{{DType::f32, {6}, {1}}};
        std::vector<AnyView> const buffer_views{buffers[0].view(), buffers[1].view()};
        std::vector<AnyView> const state_views{state[0].view()};
        auto const fill_all = [&](double number) {
            for (DeviceParam const& param : model.params) {
                fill(param.value, number);
            }
            fill(buffers[0], number);
            fill(buffers[1], number);
            fill(state[0], number);
        };
        auto const holds = [&](double number) {
            (void)cudaStreamSynchronize(model.stream());
            for (DeviceParam const& param : model.params) {
                CHECK(param.value.numbers() == Numbers(param.value.view().numel(), number));
            }
            CHECK(buffers[0].numbers() == Numbers(3, number));
            CHECK(buffers[1].numbers() == Numbers(4, number));
            CHECK(state[0].numbers() == Numbers(6, number));
        };
        fill_all(host.rank() + 7);
        DistributedDataParallel ddp{comm, model.params, joinable::buffers(buffer_views)};
        ddp.attach_state(state_views);
        holds(7);
        {
            joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
            for (int batch = 0; batch <= host.rank(); ++batch) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) { model.backward(batch, ready); });
            }
            fill_all(host.rank() + 20);
        }
        holds(host.size() - 1 + 20);
    });
}

TEST_CASE("parameters that no rank uses stay, and those that one rank uses get its average") {
    run_devices({2, 3}, DType::f32, [](auto& host, auto& comm, DeviceModel& model) {
        DistributedDataParallel ddp{
            comm,
            model.params,
            {.bucket_cap_bytes = 64, .first_bucket_bytes = 16, .find_unused = true}
        };
        for (int batch = 0; batch < 2; ++batch) {
            std::vector<Numbers> const before = model.gradients();
            std::vector<std::size_t> unused{0}; // by nobody
            if (host.rank() != 0) {
                unused.push_back(2); // by rank 0 alone
            }
            ddp.forward([] {});
            ddp.backward(
                [&](auto ready) {
                    model.backward(batch, [&](std::size_t i) {
                        if (i == 0 || (i == 2 && host.rank() != 0)) {
                            joinable_tests::launch(
                                model.stream(),
                                [=, grad = model.params[i].grad] {
                                    joinable_tests::write(grad, before[i]); // as it was
                                }
                            );
                        } else {
                            ready(i);
                        }
                    });
                },
                unused
            );
            auto const after = model.gradients();
            CHECK(after[0] == before[0]);
            CHECK(after[1] == model.averages(batch, all_ranks(0, host.size()), host.size())[1]);
            CHECK(after[2] == model.averages(batch, {0}, host.size())[2]);
        }
    });
}

TEST_CASE("averages by weight go over devices, in a guard and outside") {
    run_devices({1, 2, 4}, DType::f64, [](auto& host, auto& comm, DeviceModel& model) {
        DistributedDataParallel ddp{comm, model.params};
        auto const round = [&] {
            auto const weight = static_cast<std::uint64_t>(host.rank()) + 1;
            ddp.forward([] {}, {.weight = weight});
            ddp.backward([&](auto ready) { model.backward(0, ready); });
            model.check_weighted(host.size());
        };
        round();
        joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
        round();
    });
}

TEST_CASE("a batch that failed after its first gradient contributes zeros, on a device") {
    run_devices({2, 3}, DType::f32, [](auto& host, auto& comm, DeviceModel& model) {
        DistributedDataParallel ddp{comm, model.params}; // one bucket: nothing is sent at once
        for (int batch = 0; batch < 2; ++batch) {
            ddp.forward([] {});
            if (host.rank() == 0) {
                CHECK_THROWS_AS(
                    ddp.backward([&](auto ready) {
                        model.backward(batch, [&](std::size_t i) {
                            if (i == 1) {
                                throw std::runtime_error{"out of memory"};
                            }
                            ready(i);
                        });
                    }),
                    std::runtime_error
                );
                ddp.skip();
            } else {
                ddp.backward([&](auto ready) { model.backward(batch, ready); });
            }
            CHECK(
                model.gradients() == model.averages(batch, all_ranks(1, host.size()), host.size())
            );
        }
    });
}

TEST_CASE("a bucket is packed in one launch, and delivered with the others in one") {
    run_ranks({1, 2}, [](ThreadCommunicator& host) {
        DeviceModel model{host.rank(), DType::f32};
        StreamCommunicator comm{host, model.stream()};
        comm.device_memory().use_kernels(host_kernels());
        DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
        auto const iterate = [&] {
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(0, ready); });
        };
        iterate();
        iterate();
        host.barrier();
        int const before = joinable_tests::kernel_launches;
        host.barrier();
        iterate();
        host.barrier();
        auto const launches = joinable_tests::kernel_launches - before;
        CHECK(launches == host.size() * (static_cast<int>(ddp.buckets().size()) + 1));
    });
}

TEST_CASE("a model that is not on the communicator's device is refused on all ranks") {
    run_ranks({1, 2}, [](ThreadCommunicator& host) {
        auto const text_of = [](auto const& work) -> std::string {
            try {
                work();
            } catch (joinable::ContractViolation const& error) {
                return error.what();
            } catch (joinable::PeerFailed const& error) {
                return error.what();
            }
            return {};
        };
        DeviceModel model{host.rank(), DType::f32};
        ScalingStreamCommunicator comm{host, model.stream()};
        (void)cudaSetDevice(7);
        if (host.rank() == 0) {
            model.params.emplace_back(DType::f32, Shape{2}, Shape{1});
        } else {
            (void)cudaSetDevice(host.rank());
            model.params.emplace_back(DType::f32, Shape{2}, Shape{1});
        }
        CHECK(text_of([&] {
                  DistributedDataParallel const ddp(comm, model.params);
              }).find("parameter 4 is on CUDA device ") != std::string::npos);
        model.params.pop_back();
        std::vector<std::vector<float>> on_host(1, std::vector<float>(3));
        CHECK(text_of([&] {
                  DistributedDataParallel const ddp(comm, model.params, joinable::buffers(on_host));
              }).find("buffer 0 is not on CUDA device") != std::string::npos);
        StreamCommunicator without{host, model.stream()};
        CHECK(text_of([&] {
                  DistributedDataParallel const ddp(without, model.params);
              }).find("its kernels are missing") != std::string::npos);
        DistributedDataParallel const ddp{comm, model.params}; // nothing is aborted
    });
    fake::drain();
    CHECK(fake::live_allocations() == 0);
}

TEST_CASE("an engine that captures a graph is told so before anything is submitted") {
    run_ranks({1}, [](ThreadCommunicator& host) {
        DeviceModel model{0, DType::f32};
        ScalingStreamCommunicator comm{host, model.stream()};
        DistributedDataParallel ddp{comm, model.params};
        ddp.forward([] {});
        CHECK(cudaStreamBeginCapture(model.stream(), cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK_THROWS_AS(
            ddp.backward([&](auto ready) {
                for (std::size_t i = 0; i < model.params.size(); ++i) {
                    ready(i);
                }
            }),
            joinable::ContractViolation
        );
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamEndCapture(model.stream(), &graph) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    });
    fake::drain();
}

} // namespace
