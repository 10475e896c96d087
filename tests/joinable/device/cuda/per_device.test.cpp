// SPDX-License-Identifier: BSL-1.0
// One model over two devices of each rank.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <support/failure_text.hpp>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>
#include <support/time_of_death.hpp>
#include <support/volume.hpp>

#include <joinable/compression.hpp>
#include <joinable/cuda.hpp>
#include <joinable/join.hpp>
#include <joinable/per_device.hpp>
#include <joinable/refresh.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;
using joinable::AnyView;
using joinable::DataParallelOptions;
using joinable::DeviceId;
using joinable::DeviceKind;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::PerDevice;
using joinable::ProcessCommunicator;
using joinable::Shape;
using joinable::ThreadCommunicator;
using namespace joinable_tests;

/// Every other parameter of a rank is on its first device, the others are on its second one. On odd ranks that has the
/// lower number.
template <class Comm>
struct SplitModel {
    template <class Host>
    explicit SplitModel(Host& host, DType dtype = DType::f32)
        : first_device{2 * host.rank() + host.rank() % 2},
          second_device{2 * host.rank() + 1 - host.rank() % 2},
          first{host.rank(), dtype, first_device}, second{host.rank(), dtype, second_device},
          of_first{host, first.stream(), first_device},
          of_second{host, second.stream(), second_device}, comm{of_first, of_second} {
        for (std::size_t k = 0; k < first.params.size(); ++k) {
            params.push_back(&first.params[k]);
            params.push_back(&second.params[k]);
        }
    }

    /// The pass of a batch: gradients become ready on both devices in turns.
    template <class Ready>
    void backward(int batch, Ready const& ready) {
        std::vector<std::size_t> of_first_ones;
        first.backward(batch, [&](std::size_t k) { of_first_ones.push_back(k); });
        second.backward(batch, [&](std::size_t k) {
            ready(2 * k + 1);
            ready(2 * k);
        });
        CHECK(of_first_ones.size() == first.params.size());
    }
    void check(std::vector<Numbers> const& expected) {
        CHECK(first.gradients() == expected);
        CHECK(second.gradients() == expected);
    }
    void wait() {
        (void)cudaStreamSynchronize(first.stream());
        (void)cudaStreamSynchronize(second.stream());
    }

    int first_device;
    int second_device;
    DeviceModel first;
    DeviceModel second;
    Comm of_first;
    Comm of_second;
    PerDevice<Comm> comm;
    std::vector<DeviceParam*> params;
};

/// Runs body(host, model) on a rank, with kernels or without.
template <class Host, class Body>
void run_rank(Host& host, DType dtype, bool has_kernels, Body const& body) {
    if (has_kernels) {
        SplitModel<StreamCommunicatorOf<Host>> model{host, dtype};
        model.of_first.device_memory().use_kernels(host_kernels());
        model.of_second.device_memory().use_kernels(host_kernels());
        body(host, model);
    } else {
        SplitModel<ScalingStreamCommunicatorOf<Host>> model{host, dtype};
        body(host, model);
    }
}

/// Runs body(host, model) on every rank, with kernels or without, and looks for leaks.
template <class Body>
void run_split(std::initializer_list<int> sizes, DType dtype, Body const& body) {
    SixteenDevices const devices;
    for (bool const has_kernels : {false, true}) {
        run_participants(sizes, [&](ThreadCommunicator& host) {
            run_rank(host, dtype, has_kernels, body);
        });
        check_nothing_is_left();
    }
}
/// The same where ranks are processes, each with two devices of its own. A fork has none of the threads of streams, so
/// this comes first: a lock that such a thread has, as one of a sanitizer, would stay locked.
template <class Body>
void run_split_processes(std::initializer_list<int> sizes, DType dtype, Body const& body) {
    SixteenDevices const devices;
    for (bool const has_kernels : {false, true}) {
        run_process_ranks(
            sizes,
            [&](ProcessCommunicator& host) {
                run_rank(host, dtype, has_kernels, body);
                check_nothing_is_left();
            },
            {.other_threads = true}
        );
    }
}

int device_of(void const* memory) {
    cudaPointerAttributes found{};
    CHECK(cudaPointerGetAttributes(&found, memory) == cudaSuccess);
    return found.device;
}
/// Each bucket is on the device of its parameters; each device has some.
template <class Model>
void check_devices(Model const& model, std::vector<joinable::Bucket> const& buckets) {
    std::array<std::size_t, 2> counts{};
    for (joinable::Bucket const& bucket : buckets) {
        bool const is_second = bucket.parameters.front() % 2 == 1;
        int const device = is_second ? model.second_device : model.first_device;
        ++counts[is_second ? 1 : 0];
        CHECK(device_of(bucket.buffer.data) == device);
        for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
            CHECK(bucket.parameters[k] % 2 == bucket.parameters.front() % 2);
            CHECK(bucket.views[k].device() == DeviceId{DeviceKind::cuda, device});
        }
    }
    CHECK(counts[0] != 0);
    CHECK(counts[0] == counts[1]);
}

TEST_CASE("one model over two devices of each rank is averaged, with uneven inputs, in each dtype"
) {
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        for (bool const views : {false, true}) {
            auto const average = [&](ThreadCommunicator& host, auto& model) {
                DistributedDataParallel ddp{model.comm, model.params, small_buckets(views)};
                check_devices(model, ddp.buckets());
                joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                for (int batch = 0; batch <= host.rank(); ++batch) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) { model.backward(batch, ready); });
                    // The oracle is the formula by which each device's gradients were made.
                    model.check(
                        model.first.averages(batch, all_ranks(batch, host.size()), host.size())
                    );
                }
                CHECK(guard.finish().rounds == static_cast<std::size_t>(host.size()));
                check_devices(model, ddp.buckets()); // they have been cut anew
                CHECK(ddp.buckets().size() > 2);
            };
            run_split({1, 2, 3, 4}, dtype, average);
            if (dtype == DType::f32 && views) {
                run_split({8}, dtype, average);
            }
        }
    }
}

TEST_CASE("an operation on either device may take its time") {
    fake::delay_every_operation(std::chrono::microseconds{50});
    run_split({1, 2, 3}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        DistributedDataParallel ddp{model.comm, model.params, small_buckets(false)};
        for (int batch = 0; batch < 3; ++batch) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(batch, ready); });
            model.check(model.first.averages(batch, all_ranks(0, host.size()), host.size()));
        }
    });
    fake::delay_every_operation({});
}

/// y = b (a x), with a on the first device and b on the second one, and a running mean of x on the second one.
class SplitNet {
public:
    static constexpr std::size_t width = 3;

    SplitNet(int first, int second, double seed) {
        (void)cudaSetDevice(first);
        params.emplace_back(DType::f64, Shape{width}, Shape{1});
        (void)cudaSetDevice(second);
        params.emplace_back(DType::f64, Shape{width}, Shape{1});
        mean.emplace_back(DType::f64, Shape{1}, Shape{1});
        for (std::size_t p = 0; p < 2; ++p) {
            params[p].value.assign(start(seed, p));
        }
        mean[0].assign({seed});
        views.push_back(mean[0].view());
    }

    static Numbers start(double seed, std::size_t param) {
        Numbers numbers(width);
        for (std::size_t e = 0; e < width; ++e) {
            numbers[e] = seed + 0.25 * static_cast<double>(e + 2 * param);
        }
        return numbers;
    }
    /// The gradients of (y - 1)^2 / 2.
    static std::array<Numbers, 2> gradients(Numbers const& a, Numbers const& b, double x) {
        double error = -1;
        for (std::size_t e = 0; e < width; ++e) {
            error += a[e] * b[e] * x;
        }
        std::array<Numbers, 2> all{Numbers(width), Numbers(width)};
        for (std::size_t e = 0; e < width; ++e) {
            all[0][e] = error * b[e] * x;
            all[1][e] = error * a[e] * x;
        }
        return all;
    }

    std::vector<DeviceParam> params;
    std::vector<DeviceTensor> mean;
    std::vector<AnyView> views;
};
/// The input of a rank's batch.
double input(int rank, int batch) {
    return 0.5 + 0.125 * rank - 0.0625 * batch;
}
constexpr double rate = 0.0625;

/// The same training in double, by one process that has all inputs.
struct SerialNet {
    explicit SerialNet(double seed) : a{SplitNet::start(seed, 0)}, b{SplitNet::start(seed, 1)} {}

    void step(int batch, int ranks) {
        Numbers sum_a(SplitNet::width);
        Numbers sum_b(SplitNet::width);
        for (int rank = batch; rank < ranks; ++rank) { // the others have run out
            auto const mine = SplitNet::gradients(a, b, input(rank, batch));
            for (std::size_t e = 0; e < SplitNet::width; ++e) {
                sum_a[e] += mine[0][e];
                sum_b[e] += mine[1][e];
            }
        }
        for (std::size_t e = 0; e < SplitNet::width; ++e) {
            a[e] -= rate * sum_a[e] / ranks;
            b[e] -= rate * sum_b[e] / ranks;
        }
    }

    Numbers a;
    Numbers b;
};

void check_close(Numbers const& found, Numbers const& expected) {
    REQUIRE(found.size() == expected.size());
    for (std::size_t e = 0; e < found.size(); ++e) {
        CHECK(found[e] == doctest::Approx(expected[e]).epsilon(1e-12));
    }
}

TEST_CASE("a net over two devices trains as one process that has all inputs") {
    for (std::pair<bool, bool> const& way :
         {std::pair{true, false}, {true, true}, {false, false}, {false, true}}) {
        bool const over_processes = way.first;
        bool const views = way.second;
        auto const train = [&](auto& host, auto& model) {
            SplitNet net{model.first_device, model.second_device, 1.0 + host.rank()};
            std::vector<AnyView> const state{net.params[0].own.view()};
            DistributedDataParallel ddp{
                model.comm, net.params, joinable::buffers(net.views), small_buckets(views)
            };
            model.wait();
            check_close(net.params[0].value.numbers(), SplitNet::start(1, 0)); // those of rank 0
            check_close(net.params[1].value.numbers(), SplitNet::start(1, 1));
            check_close(net.mean[0].numbers(), {1});
            joinable::Step step{model.comm, [&] {
                                    model.wait();
                                    for (DeviceParam& param : net.params) {
                                        Numbers value = param.value.numbers();
                                        Numbers const gradient = peek(param.grad);
                                        for (std::size_t e = 0; e < value.size(); ++e) {
                                            value[e] -= rate * gradient[e];
                                        }
                                        param.value.assign(value);
                                    }
                                }};
            SerialNet serial{1};
            joinable::Join guard{joinable::participants(ddp, step), joinable::control(host)};
            for (int batch = 0; batch <= host.rank(); ++batch) {
                double const x = input(host.rank(), batch);
                net.mean[0].assign({x});
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    model.wait(); // buffers are those of the lowest active rank
                    check_close(net.mean[0].numbers(), {input(batch, batch)});
                    auto const mine = SplitNet::gradients(
                        net.params[0].value.numbers(), net.params[1].value.numbers(), x
                    );
                    poke(net.params[1].grad, mine[1]);
                    ready(1);
                    poke(net.params[0].grad, mine[0]);
                    ready(0);
                });
                step.step();
                serial.step(batch, host.size());
                check_close(net.params[0].value.numbers(), serial.a);
                check_close(net.params[1].value.numbers(), serial.b);
            }
            guard.finish();
            for (int batch = host.rank() + 1; batch < host.size(); ++batch) {
                serial.step(batch, host.size());
            }
            model.wait();
            check_close(net.params[0].value.numbers(), serial.a);
            check_close(net.params[1].value.numbers(), serial.b);
        };
        if (over_processes) {
            run_split_processes(
                views ? std::initializer_list<int>{1, 3, 8} : std::initializer_list<int>{2, 4},
                DType::f64,
                train
            );
        } else {
            run_split({1, 2, 3, 4, 8}, DType::f64, train);
        }
    }
}

TEST_CASE("values and attached state of both devices go from one rank to all") {
    run_split({2, 3, 4}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        auto const fill = [&](double number) {
            for (DeviceParam const* param : model.params) {
                param->value.assign(Numbers(param->value.view().numel(), number));
            }
        };
        auto const holds = [&](double number) {
            model.wait();
            for (DeviceParam const* param : model.params) {
                CHECK(param->value.numbers() == Numbers(param->value.view().numel(), number));
            }
        };
        fill(host.rank() + 3);
        auto options = small_buckets(false);
        options.sync_at_end = true;
        std::vector<AnyView> state; // of the second device, then of the first one
        DistributedDataParallel ddp{model.comm, model.params, options};
        holds(3);
        std::vector<DeviceTensor> tensors;
        for (int const device : {model.second_device, model.first_device}) {
            (void)cudaSetDevice(device);
            tensors.emplace_back(DType::f32, Shape{2, 2}, Shape{3, 1});
            tensors.back().assign(Numbers(4, host.rank() + device % 2 + 5.0));
            state.push_back(tensors.back().view());
        }
        ddp.attach_state(state);
        model.wait();
        CHECK(tensors[0].numbers() == Numbers(4, 6.0)); // rank 0 has devices 0 and 1
        CHECK(tensors[1].numbers() == Numbers(4, 5.0));
        {
            joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
            for (int batch = 0; batch <= host.rank(); ++batch) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) { model.backward(batch, ready); });
            }
            model.wait();
            fill(host.rank() + 20);
        }
        holds(host.size() - 1 + 20); // the last one that trained
    });
}

TEST_CASE(
    "parameters that no rank uses stay on both devices, and others get the average of those that do"
) {
    run_split({1, 2, 3}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        auto options = small_buckets(false);
        options.find_unused = true;
        DistributedDataParallel ddp{model.comm, model.params, options};
        for (int batch = 0; batch < 3; ++batch) {
            // In each bucket a run of its own. 2 (of the first device) is nobody's, 3 (of the second) is rank 0's.
            std::vector<std::size_t> unused{2};
            if (host.rank() != 0) {
                unused.push_back(3);
            }
            std::vector<Numbers> const before = model.first.gradients();
            ddp.forward([] {});
            ddp.backward(
                [&](auto ready) {
                    model.backward(batch, [&](std::size_t i) {
                        if (std::find(unused.begin(), unused.end(), i) == unused.end()) {
                            ready(i);
                            return;
                        }
                        auto& part = i == 2 ? model.first : model.second;
                        (void)cudaSetDevice(i == 2 ? model.first_device : model.second_device);
                        launch(part.stream(), [view = part.params[1].grad, old = before[1]] {
                            write(view, old);
                        });
                        (void)cudaSetDevice(model.second_device); // that of the pass
                    });
                },
                unused
            );
            auto const all = model.first.averages(batch, all_ranks(0, host.size()), host.size());
            auto const first = model.first.gradients();
            auto const second = model.second.gradients();
            for (std::size_t k = 0; k < all.size(); ++k) {
                CHECK(first[k] == (k == 1 ? before[1] : all[k]));
                CHECK(
                    second[k] ==
                    (k == 1 ? model.second.averages(batch, {0}, host.size())[1] : all[k])
                );
            }
        }
    });
}

TEST_CASE("a static graph over two devices, a skipped batch, and gradients that are kept") {
    for (bool const views : {false, true}) {
        run_split({2, 3}, DType::f32, [&](ThreadCommunicator& host, auto& model) {
            auto options = small_buckets(views);
            options.static_graph = true;
            options.joined_gradients = joinable::JoinedGradients::kept;
            DistributedDataParallel ddp{model.comm, model.params, options};
            {
                joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                for (int batch = 0; batch <= host.rank(); ++batch) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) { model.backward(batch, ready); });
                    model.check(
                        model.first.averages(batch, all_ranks(batch, host.size()), host.size())
                    );
                }
            }
            int const last = host.size() - 1;
            model.check(model.first.averages(last, {last}, host.size())); // of a joined rank, too
            ddp.forward([] {});
            if (host.rank() == 0) {
                ddp.skip();
            } else {
                ddp.backward([&](auto ready) { model.backward(1, ready); });
            }
            model.check(model.first.averages(1, all_ranks(1, host.size()), host.size()));
        });
    }
}

TEST_CASE("averages by weight go over both devices") {
    run_split({1, 2, 4}, DType::f64, [](ThreadCommunicator& host, auto& model) {
        DistributedDataParallel ddp{model.comm, model.params};
        ddp.forward([] {}, {.weight = static_cast<std::uint64_t>(host.rank()) + 1});
        ddp.backward([&](auto ready) { model.backward(0, ready); });
        model.first.check_weighted(host.size());
        model.second.check_weighted(host.size());
    });
}

TEST_CASE("replicas are compared on both devices, whatever their strides") {
    for (std::size_t const changed :
         {4U, 5U, 6U, 7U}) { // by columns and with gaps, on either device
        run_split({2, 3}, DType::f32, [&](ThreadCommunicator& host, auto& model) {
            auto options = small_buckets(false);
            options.verify_replicas = 1;
            DistributedDataParallel ddp{model.comm, model.params, options};
            auto const round = [&] {
                ddp.forward([] {});
                ddp.backward([&](auto ready) { model.backward(0, ready); });
            };
            round();
            model.wait();
            if (host.rank() == 1) {
                Numbers numbers = model.params[changed]->value.numbers();
                numbers.back() += 1;
                model.params[changed]->value.assign(numbers);
            }
            std::string const text = failure_of(round);
            says(text, "mismatch: ");
            says(text, "replicas differ: parameter " + std::to_string(changed));
        });
    }
}

TEST_CASE("replicas are compared in memory that each device gets once") {
    run_split({1, 2, 3}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        auto options = small_buckets(false);
        options.verify_replicas = 1;
        DistributedDataParallel ddp{model.comm, model.params, options};
        auto const allocations = [&] {
            host.barrier(); // no rank is in a round
            std::size_t const calls = fake::calls("cudaMalloc");
            host.barrier();
            return calls;
        };
        std::size_t before = 0;
        for (int batch = 0; batch < 4; ++batch) {
            if (batch == 2) { // buckets have been cut anew
                before = allocations();
            }
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(batch, ready); });
            model.check(model.first.averages(batch, all_ranks(0, host.size()), host.size()));
        }
        CHECK(allocations() == before);
    });
}

TEST_CASE("a model over two devices takes other parameters, and refuses those placed elsewhere") {
    for (bool const views : {false, true}) {
        run_split({1, 2, 3}, DType::f32, [&](ThreadCommunicator& host, auto& model) {
            DistributedDataParallel ddp{model.comm, model.params, small_buckets(views)};
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(0, ready); });
            std::vector<DeviceParam*> fewer =
                model.params; // the first one of each device is frozen
            fewer.erase(fewer.begin(), fewer.begin() + 2);
            auto const train = [&](int batch) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    model.backward(batch, [&](std::size_t i) {
                        if (i >= 2) {
                            ready(i - 2);
                        }
                    });
                });
                check_devices(model, ddp.buckets());
                auto expected = model.first.averages(batch, all_ranks(0, host.size()), host.size());
                for (std::size_t e = 0; e < expected[0].size(); ++e) { // its own pass's
                    expected[0][e] = DeviceModel::gradient_of(host.rank(), 0, e, batch);
                }
                model.check(expected);
            };
            ddp.refresh(fewer);
            train(1);
            train(2); // buckets have been cut anew
            std::vector<DeviceParam*> placed = fewer;
            if (host.rank() == host.size() - 1) {
                std::swap(placed[0], placed[1]);
            }
            if (host.size() > 1) {
                std::string const text = failure_of([&] { ddp.refresh(placed); });
                says(text, "mismatch: models differ: parameter 0: rank 0 has f32 (5), rank ");
                says(text, ", by communicator 1");
            }
            train(3); // as before
            ddp.refresh(model.params);
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(4, ready); });
            model.check(model.first.averages(4, all_ranks(0, host.size()), host.size()));
        });
    }
}

TEST_CASE("a rank that throws in its pass, or between two, fails on all ranks with one error") {
    for (std::pair<bool, bool> const& way :
         {std::pair{true, false}, {true, true}, {false, false}, {false, true}}) {
        bool const over_processes = way.first;
        bool const is_within = way.second;
        auto const fail = [&](auto& host, auto& model) {
            DistributedDataParallel ddp{model.comm, model.params, small_buckets(false)};
            std::string const text = failure_of([&] {
                joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                for (int batch = 0;; ++batch) {
                    if (host.rank() == 1 && batch == 1 && !is_within) {
                        throw std::runtime_error{"no more memory"};
                    }
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        std::size_t marked = 0;
                        model.backward(batch, [&](std::size_t i) {
                            ready(i);
                            if (host.rank() == 1 && batch == 1 && ++marked == 3) {
                                throw std::runtime_error{"no more memory"}; // a bucket has left
                            }
                        });
                    });
                }
            });
            says(text, host.rank() == 1 ? "other: no more memory" : "peer: rank 1 failed");
            CHECK(model.of_first.is_aborted() == is_within);
            CHECK(model.of_second.is_aborted() == is_within); // both, whichever was in use
            CHECK(model.comm.is_aborted() == is_within);
            CHECK(model.comm.abort_reason().has_value() == is_within);
            if (!is_within) {
                host.barrier(); // a rank that has gone has aborted
            }
        };
        if (over_processes) {
            run_split_processes({2, 3, 4, 8}, DType::f32, fail);
        } else {
            run_split({2, 3, 4, 8}, DType::f32, fail);
        }
    }
}

TEST_CASE("an abort of the whole ends the waits of all ranks on both devices") {
    auto const end = [](auto& host, auto& model) {
        DistributedDataParallel ddp{model.comm, model.params, small_buckets(false)};
        ddp.forward([] {});
        if (host.rank() == 0) {
            model.comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 has had enough", {}}
            );
        }
        std::string const text =
            failure_of([&] { ddp.backward([&](auto ready) { model.backward(0, ready); }); });
        says(text, "peer: rank 0 has had enough");
        CHECK(model.of_first.is_aborted());
        CHECK(model.of_second.is_aborted());
    };
    run_split_processes({2, 3, 4, 8}, DType::f32, end);
    run_split({2, 3, 4, 8}, DType::f32, end);
}

/// What the others of a rank that is killed have heard.
struct Told {
    TimeOfDeath time;
    std::atomic<int> named{0};
};

TEST_CASE("a process with two devices that is killed is named by the others, which leave nothing") {
    SixteenDevices const devices;
    std::vector<TimeOfDeath::Clock::duration> delays;
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        for (int const culprit :
             {0, world - 1}) { // while all are active; when the others have joined
            for (bool const is_within : {false, true}) {
                CAPTURE(world);
                CAPTURE(culprit);
                CAPTURE(is_within);
                Shared<Told> told;
                auto const train = [&](ProcessCommunicator& host, auto& model) {
                    auto const die = [&] {
                        told->time.happens();
                        std::raise(SIGKILL);
                    };
                    std::string const text = failure_of([&] {
                        DistributedDataParallel ddp{model.comm, model.params, small_buckets(false)};
                        joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                        for (int batch = 0; batch <= host.rank(); ++batch) {
                            bool const is_last = host.rank() == culprit && batch == culprit;
                            if (is_last && !is_within) {
                                die();
                            }
                            ddp.forward([] {});
                            ddp.backward([&](auto ready) {
                                std::size_t marked = 0;
                                model.backward(batch, [&](std::size_t i) {
                                    ready(i);
                                    if (is_last && ++marked == 3) {
                                        die(); // a bucket has left
                                    }
                                });
                            });
                        }
                        guard.finish();
                    });
                    told->time.is_heard();
                    std::string const name = "peer: rank " + std::to_string(culprit) + " failed";
                    told->named += text.starts_with(name) ? 1 : 0;
                    CHECK(model.comm.is_aborted());
                };
                auto const run = [&] {
                    run_process_ranks(
                        {world},
                        [&](ProcessCommunicator& host) {
                            run_rank(host, DType::f32, culprit == 0, train);
                            check_nothing_is_left();
                        },
                        {.other_threads = true}
                    );
                };
                says(
                    failure_of(run),
                    "peer: rank " + std::to_string(culprit) +
                        " failed: its process was killed by signal 9"
                );
                CHECK(told->named == world - 1);
                delays.push_back(told->time.delay());
            }
        }
    }
    CHECK(most_of(delays) < std::chrono::seconds{1});
    CHECK(
        *std::max_element(delays.begin(), delays.end()) < std::chrono::seconds{30}
    ); // half of the deadline
}

TEST_CASE("an abort of one device's communicator counts for the whole") {
    run_split({2}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        CHECK(!model.comm.is_aborted());
        CHECK(!model.comm.abort_reason());
        host.barrier();
        if (host.rank() == 0) {
            model.of_second.abort({joinable::FailureKind::peer_failed, {0}, "its GPU was lost", {}}
            );
        }
        host.barrier();
        CHECK(model.comm.is_aborted());
        CHECK(!model.of_first.is_aborted());
        REQUIRE(model.comm.abort_reason());
        says(model.comm.abort_reason()->message, "its GPU was lost");
        host.barrier(); // a rank that has gone has aborted
    });
}

TEST_CASE("kernels on one device alone are not enough") {
    run_ranks({2}, [](ThreadCommunicator& host) {
        SplitModel<StreamCommunicator> model{host};
        model.of_second.device_memory().use_kernels(host_kernels());
        says(
            failure_of([&] { DistributedDataParallel const ddp(model.comm, model.params); }),
            "its kernels are missing"
        );
        model.of_first.device_memory().use_kernels(host_kernels());
        DistributedDataParallel const ddp(model.comm, model.params);
    });
    check_nothing_is_left();
}

TEST_CASE("a parameter, a buffer or a state on a third device is refused by name on all ranks") {
    run_split({1, 2, 3}, DType::f32, [](ThreadCommunicator&, auto& model) {
        (void)cudaSetDevice(7);
        DeviceParam elsewhere{DType::f32, Shape{2}, Shape{1}};
        std::vector<AnyView> const views{elsewhere.value.view()};
        std::vector<DeviceParam*> more = model.params;
        more.push_back(&elsewhere);
        int const lower = (std::min)(model.first_device, model.second_device);
        std::string const devices =
            "CUDA device " + std::to_string(lower) + " or CUDA device " + std::to_string(lower + 1);
        says(
            failure_of([&] { DistributedDataParallel const ddp(model.comm, more); }),
            "contract: parameter 8 is on CUDA device 7, but its communicator moves memory of " +
                devices + "; give a communicator of its device, or PerDevice those of all"
        );
        says(
            failure_of([&] {
                DistributedDataParallel const ddp(
                    model.comm, model.params, joinable::buffers(views)
                );
            }),
            "contract: buffer 0 is not on " + devices + "; give a copy that is"
        );
        DistributedDataParallel ddp{model.comm, model.params}; // nothing is aborted
        says(
            failure_of([&] { ddp.attach_state(views); }),
            "contract: state tensor 0 is not on " + devices + "; give a copy that is"
        );
        model.params[3]->grad = elsewhere.own.view();
        std::string const text =
            failure_of([&] { DistributedDataParallel const next(model.comm, model.params); });
        says(text, "contract: the gradient of parameter 3 on rank ");
        says(text, "is f32 (2) on CUDA device 7, but its value is f32 (5) on CUDA device ");
    });
}

TEST_CASE("ranks that place the same tensor on another one of their devices differ") {
    run_split({2, 3, 4}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        int const culprit = host.size() - 1;
        std::vector<DeviceParam*> placed = model.params;
        if (host.rank() == culprit) {
            std::swap(placed[2], placed[3]); // of the same dtype and extents
        }
        std::string const text =
            failure_of([&] { DistributedDataParallel const ddp(model.comm, placed); });
        std::string const of_culprit = std::to_string(culprit);
        says(
            text,
            "mismatch: models differ: parameter 2: rank 0 has f32 (5), rank " + of_culprit +
                " has f32 (5), by communicator 1"
        );
        auto const view_of = [&](bool is_second) {
            (void)cudaSetDevice(is_second ? model.second_device : model.first_device);
            return DeviceTensor{DType::f32, {2}, {1}};
        };
        std::vector<DeviceTensor> const tensors{view_of(host.rank() == culprit)};
        std::vector<AnyView> const views{tensors[0].view()};
        says(
            failure_of([&] {
                DistributedDataParallel const ddp(
                    model.comm, model.params, joinable::buffers(views)
                );
            }),
            "models differ: buffer 0: rank 0 has f32 (2), rank " + of_culprit +
                " has f32 (2), by communicator 1"
        );
        DistributedDataParallel ddp{model.comm, model.params}; // nothing is aborted
        says(
            failure_of([&] { ddp.attach_state(views); }),
            "models differ: state tensor 0: rank 0 has f32 (2), rank " + of_culprit +
                " has f32 (2), by communicator 1"
        );
    });
}

TEST_CASE("communicators of one device, of other ranks, or none, are refused in a sentence each") {
    run_ranks({2}, [](ThreadCommunicator& host) {
        int const device = host.rank();
        ScalingStreamCommunicator one{host, nullptr, device};
        ScalingStreamCommunicator same{host, nullptr, device};
        ThreadCommunicator alone = host.split(host.rank(), 0);
        ScalingStreamCommunicator other{alone, nullptr, device + 2};
        says(
            failure_of([&] { PerDevice const both(one, same); }),
            "contract: PerDevice: two communicators are of CUDA device " + std::to_string(device) +
                "; give one for each device"
        );
        std::string const ranks = failure_of([&] { PerDevice const both(one, other); });
        says(
            ranks,
            "contract: PerDevice: this is rank " + std::to_string(device) + " of 2 in the first"
        );
        says(ranks, "but rank 0 of 1 in another one; give communicators of the same ranks");
        says(
            failure_of([&] {
                PerDevice<ScalingStreamCommunicator> const none(
                    std::vector<ScalingStreamCommunicator*>{}
                );
            }),
            "contract: PerDevice: there is no communicator; give one for each device"
        );
    });
    check_nothing_is_left();
}

/// A reduction of a user, with memory of its own.
struct AsksForMemory : joinable::AllReduce {
    static constexpr std::string_view name = "AsksForMemory";

    joinable::Arena memory{};

    template <class Comm>
    void prepare(Comm& comm, joinable::BucketParts) {
        memory = joinable::make_arena(comm, 64);
    }
};

TEST_CASE(
    "a reduction with memory of its own is refused on all ranks, but one by a function goes over both devices"
) {
    run_split({1, 2}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        if (!model.comm.device_memory().can_scale()) {
            return; // both need kernels
        }
        auto const refuses = [&](auto reduction, std::string_view text) {
            says(
                failure_of([&] {
                    DistributedDataParallel const ddp(
                        model.comm, model.params, std::move(reduction)
                    );
                }),
                text
            );
        };
        std::string const has_several =
            ": PerDevice has several devices, whose kernels it does not run; average by AllReduce, or "
            "make a model for each device";
        refuses(joinable::CastTo<DType::f64>{}, "contract: CastTo<f64>" + has_several);
        refuses(joinable::CastTo<DType::f32>{}, "contract: CastTo<f32>" + has_several); // no memory
        refuses(joinable::PowerSgd{}, "contract: PowerSgd" + has_several);
        refuses(AsksForMemory{}, "contract: PerDevice: memory was asked for that has no device");
        DistributedDataParallel
            ddp{model.comm,
                model.params,
                small_buckets(false),
                joinable::reduce_by("plain sum", [](auto& comm, joinable::BucketRun const& run) {
                    return comm.all_reduce(run.buffer, joinable::ReduceOp::sum);
                })};
        ddp.forward([] {});
        ddp.backward([&](auto ready) { model.backward(0, ready); });
        model.check(model.first.averages(0, all_ranks(0, host.size()), host.size()));
    });
}

TEST_CASE("a communicator is that of a device, and memory elsewhere is refused") {
    run_split({1, 2, 3}, DType::f32, [](ThreadCommunicator& host, auto& model) {
        DeviceId const first{DeviceKind::cuda, model.first_device};
        DeviceId const second{DeviceKind::cuda, model.second_device};
        CHECK(&model.comm.at(first) == &model.of_first);
        CHECK(&model.comm.at(second) == &model.of_second);
        int const lower = (std::min)(model.first_device, model.second_device);
        std::string const but = ", but one of CUDA device " + std::to_string(lower) +
                                " or CUDA device " + std::to_string(lower + 1);
        std::string const none = "contract: PerDevice: there is no communicator of ";
        CHECK(failure_of([&] {
                  (void)model.comm.at({DeviceKind::cuda, 7});
              }) == none + "CUDA device 7" + but);
        CHECK(failure_of([&] { (void)model.comm.at({}); }) == none + "the host" + but);
        (void)cudaSetDevice(7);
        DeviceTensor const elsewhere{DType::f32, {2}, {1}};
        float on_host = 1;
        (void)cudaSetDevice(model.first_device); // where CUDA says that pinned memory is
        joinable::Arena const pinned = model.of_first.device_memory().allocate_staging(64);
        for (void* const data :
             {static_cast<void*>(elsewhere.view().data()),
              static_cast<void*>(&on_host),
              static_cast<void*>(pinned.data())}) {
            bool const is_on_host = data != elsewhere.view().data();
            auto const refused = [&](std::string const& text) {
                CHECK(text == none + (is_on_host ? "the host" : "CUDA device 7") + but);
            };
            joinable::Buffer const buffer{data, 1, DType::f32};
            refused(failure_of([&] { model.comm.broadcast(buffer, 0).wait(); }));
            refused(failure_of([&] {
                model.comm.all_reduce(buffer, joinable::ReduceOp::sum).wait();
            }));
        }
        model.comm.all_reduce({&on_host, 0, DType::f32}, joinable::ReduceOp::sum)
            .wait();                                           // no memory
        DistributedDataParallel ddp{model.comm, model.params}; // nothing is aborted
        ddp.forward([] {});
        ddp.backward([&](auto ready) { model.backward(0, ready); });
        model.check(model.first.averages(0, all_ranks(0, host.size()), host.size()));
    });
}

TEST_CASE("what one device cannot submit is forgotten, and the others submit") {
    enum class End { submit, finish };
    for (End const end : {End::submit, End::finish}) {
        for (std::size_t const failing : {0U, 1U, 2U}) { // 2: both
            run_ranks({1}, [&](ThreadCommunicator& host) {
                SplitModel<ScalingStreamCommunicator> model{host};
                std::array<DeviceModel*, 2> const models{&model.first, &model.second};
                joinable::SeveralDevices& devices = model.comm.device_memory();
                std::array<Numbers, 2> before;
                std::array<std::vector<DeviceTensor>, 2> from; // ends before the next submission
                for (std::size_t k = 0; k < 2; ++k) {
                    (void)cudaSetDevice(devices.at(k).id().index);
                    DeviceParam const& target = models[k]->params[0];
                    before[k] = target.value.numbers();
                    from[k].emplace_back(
                        DType::f32, target.value.view().extents(), target.value.view().strides()
                    );
                    from[k][0].assign(Numbers(before[k].size(), 7.5));
                    devices.copy(from[k][0].view(), target.value.view());
                    if (failing == k || failing == 2) {
                        REQUIRE(
                            cudaStreamBeginCapture(
                                models[k]->stream(), cudaStreamCaptureModeRelaxed
                            ) == cudaSuccess
                        );
                    }
                }
                auto const submit = [&] {
                    end == End::submit ? devices.submit() : devices.finish();
                };
                says(failure_of(submit), "captures a CUDA graph; end the capture");
                for (std::size_t k = 0; k < 2; ++k) {
                    if (failing == k || failing == 2) {
                        cudaGraph_t graph = nullptr;
                        REQUIRE(cudaStreamEndCapture(models[k]->stream(), &graph) == cudaSuccess);
                        (void)cudaGraphDestroy(graph);
                    }
                }
                fake::drain();
                auto const is_as_it_was = [&](std::size_t k) {
                    bool const is_failing = failing == k || failing == 2;
                    Numbers const expected =
                        is_failing ? before[k] : Numbers(before[k].size(), 7.5);
                    return models[k]->params[0].value.numbers() == expected;
                };
                CHECK(is_as_it_was(0));
                CHECK(is_as_it_was(1));
                from = {};
                submit();
                fake::drain();
                CHECK(is_as_it_was(0)); // nothing of the first submission is left
                CHECK(is_as_it_was(1));
            });
        }
    }
    run_ranks({1}, [](ThreadCommunicator& host) { // of two errors, the first device's is thrown
        SplitModel<ScalingStreamCommunicator> model{host};
        REQUIRE(
            cudaStreamBeginCapture(model.second.stream(), cudaStreamCaptureModeRelaxed) ==
            cudaSuccess
        );
        fake::fail_next(cudaErrorNotSupported);
        says(failure_of([&] { model.comm.device_memory().submit(); }), "communication: ");
        CHECK(fake::has_failed());
        cudaGraph_t graph = nullptr;
        REQUIRE(cudaStreamEndCapture(model.second.stream(), &graph) == cudaSuccess);
        (void)cudaGraphDestroy(graph);
    });
    check_nothing_is_left();
}

TEST_CASE("any number of communicators is one, which finds each by its device") {
    run_ranks({2}, [](ThreadCommunicator& host) {
        std::vector<std::unique_ptr<ScalingStreamCommunicator>> owned;
        std::vector<ScalingStreamCommunicator*> all;
        for (int k = 0; k < 4; ++k) {
            owned.push_back(
                std::make_unique<ScalingStreamCommunicator>(host, nullptr, 4 * host.rank() + k)
            );
            all.push_back(owned.back().get());
        }
        PerDevice comm{all};
        CHECK(comm.rank() == host.rank());
        CHECK(comm.size() == 2);
        for (int k = 0; k < 4; ++k) {
            CHECK(
                &comm.at({DeviceKind::cuda, 4 * host.rank() + k}) ==
                all[static_cast<std::size_t>(k)]
            );
        }
        comm.barrier();
    });
    check_nothing_is_left();
}

} // namespace
