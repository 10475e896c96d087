// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/any_communicator.hpp>
#include <joinable/join.hpp>
#include <joinable/nccl.hpp>
#include <joinable/per_device.hpp>
#include <joinable/trace.hpp>

namespace {

using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::NcclCommunicator;
using namespace joinable_tests;

/// Runs body(hosts, comm, model) on every rank, and looks for leaks.
template <class Body>
void run_models(std::initializer_list<int> sizes, DType dtype, bool has_kernels, Body const& body) {
    run_participants(sizes, [&](joinable::ThreadCommunicator& hosts) {
        DeviceModel model{hosts.rank(), dtype};
        NcclCommunicator comm{
            hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
        };
        if (has_kernels) {
            comm.device_memory().use_kernels(joinable_tests::host_kernels());
        }
        body(hosts, comm, model);
    });
    check_nothing_is_left();
}

/// 16 bits are exact where divisors are powers of two: in which order NCCL sums is its own affair.
std::initializer_list<int> exact_sizes(DType dtype) {
    static constexpr std::initializer_list<int> all{1, 2, 3, 4};
    static constexpr std::initializer_list<int> powers{1, 2, 4};
    return joinable::size_of(dtype) == 2 ? powers : all;
}

TEST_CASE("gradients are averaged over NCCL, by copies and as bucket views, in each dtype") {
    for (auto const delay : {std::chrono::microseconds{0}, std::chrono::microseconds{50}}) {
        fake_cuda::delay_every_operation(delay);
        for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
            for (bool const views : {false, true}) {
                for (bool const has_kernels : {false, true}) {
                    run_models(
                        exact_sizes(dtype),
                        dtype,
                        has_kernels,
                        [&](auto& hosts, auto& comm, auto& model) {
                            DistributedDataParallel ddp{comm, model.params, small_buckets(views)};
                            for (int batch = 0; batch < 3; ++batch) {
                                ddp.forward([] {});
                                ddp.backward([&](auto ready) { model.backward(batch, ready); });
                                CHECK(
                                    model.gradients() ==
                                    model.averages(batch, all_ranks(0, hosts.size()), hosts.size())
                                );
                            }
                            CHECK(ddp.buckets().size() > 1); // they have been cut anew
                        }
                    );
                }
            }
        }
    }
    fake_cuda::delay_every_operation({});
}

TEST_CASE("NCCL behind a type of any transport of devices gives the same averages") {
    run_models({1, 2, 3, 4}, DType::f32, true, [&](auto& hosts, auto& comm, auto& model) {
        joinable::BasicAnyCommunicator<joinable::CudaDevice> any{comm};
        CHECK(any.transport() == "nccl");
        DistributedDataParallel ddp{any, model.params, small_buckets(true)};
        joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
        for (int batch = 0; batch <= hosts.rank(); ++batch) { // uneven
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(batch, ready); });
            CHECK(
                model.gradients() ==
                model.averages(batch, all_ranks(batch, hosts.size()), hosts.size())
            );
        }
        guard.finish();
    });
}

TEST_CASE("gradients are averaged over NCCL when the device gets its kernels after the model") {
    for (bool const views : {false, true}) {
        run_models({1, 2, 3, 4}, DType::f32, false, [&](auto& hosts, auto& comm, auto& model) {
            DistributedDataParallel ddp{comm, model.params, small_buckets(views)};
            for (int batch = 0; batch < 3; ++batch) {
                if (batch == 1) {
                    comm.device_memory().use_kernels(joinable_tests::host_kernels());
                }
                ddp.forward([] {});
                ddp.backward([&](auto ready) { model.backward(batch, ready); });
                CHECK(
                    model.gradients() ==
                    model.averages(batch, all_ranks(0, hosts.size()), hosts.size())
                );
            }
        });
    }
}

TEST_CASE(
    "values on a device are compared after what the engine has requested, with gaps and by columns"
) {
    for (bool const is_equal : {false, true}) {
        for (bool const has_kernels : {false, true}) {
            run_models(
                {2, 3, 4},
                DType::f32,
                has_kernels,
                [&](auto& hosts, auto& comm, auto& model) {
                    DistributedDataParallel ddp{comm, model.params, {.verify_replicas = 2}};
                    std::size_t rounds = 0;
                    auto const train = [&] {
                        joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
                        for (; rounds < 4; ++rounds) {
                            launch(model.stream(), [&, rounds] { // the step
                                std::this_thread::sleep_for(std::chrono::milliseconds{1});
                                for (std::size_t p = 0; p < model.params.size(); ++p) {
                                    auto numbers = read(model.params[p].value.view());
                                    numbers.back() += 1;
                                    bool const differs =
                                        hosts.rank() == hosts.size() - 1 && p == 2 && !is_equal;
                                    numbers.front() += differs && rounds == 2 ? 2 : 1;
                                    model.params[p].value.assign(numbers);
                                }
                            });
                            ddp.forward([] {});
                            ddp.backward([&](auto ready) { model.backward(0, ready); });
                        }
                        guard.finish();
                    };
                    std::string text;
                    try {
                        train();
                    } catch (joinable::Mismatch const& error) {
                        text = error.what();
                        CHECK(error.ranks() == std::vector{hosts.size() - 1});
                    }
                    CAPTURE(text);
                    CHECK(rounds == (is_equal ? 4 : 3));
                    CHECK(
                        (text.find("replicas differ: parameter 2: rank 0 has") == 0) == !is_equal
                    );
                    (void)cudaStreamSynchronize(model.stream());
                }
            );
        }
    }
}

TEST_CASE(
    "a report says nothing of how long buckets take on a device, of which the host knows nothing"
) {
    run_models(
        {1, 2},
        DType::f32,
        true,
        [](auto& hosts, NcclCommunicator& comm, DeviceModel& model) {
            DistributedDataParallel<NcclCommunicator, joinable::AllReduce, joinable::TraceTimeline>
                ddp{comm, model.params};
            ddp.timeline().start(1000);
            joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
            ddp.forward([] {});
            ddp.backward([&](auto ready) { model.backward(0, ready); });
            guard.finish();
            auto const report = joinable::data_parallel_report(ddp);
            CHECK(report.device.starts_with("CUDA device "));
            CHECK(report.timed_rounds == 1);
            CHECK(report.backward > std::chrono::nanoseconds{});
            CHECK_FALSE(report.buckets);
            CHECK_FALSE(report.overlap);
            CHECK(to_json(report).find("overlap") == std::string::npos);
            CHECK(to_string(report).find("buckets  ") == std::string::npos);
            static_cast<void>(model.gradients());
        }
    );
}

TEST_CASE("a collective that a rank never joins does not hold the buckets of another communicator"
) {
    for (bool const has_pools : {true, false}) {
        CAPTURE(has_pools);
        fake_cuda::set_memory_pools(has_pools);
        Meeting trained{2};
        run_ranks({2}, [&](joinable::ThreadCommunicator& hosts) {
            DeviceModel model{hosts.rank(), DType::f32};
            auto others = hosts.split(0, hosts.rank());
            NcclCommunicator other{others, {.deadline = std::chrono::seconds{60}}};
            NcclCommunicator comm{
                hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
            };
            comm.device_memory().use_kernels(joinable_tests::host_kernels());
            comm.device_memory().set_deadline(std::chrono::milliseconds{20}); // without pools
            DeviceArray<float> const data{1};
            std::optional<joinable::NcclWork> never;
            if (hosts.rank() == 0) {
                never.emplace(other.all_reduce(data.buffer(), joinable::ReduceOp::max));
            }
            {
                DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
                for (int batch = 0; batch < 3; ++batch) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) { model.backward(batch, ready); });
                    CHECK(model.gradients() == model.averages(batch, all_ranks(0, 2), 2));
                }
                CHECK(ddp.buckets().size() > 1); // they have been cut anew
                trained.meet();
                other.set_deadline(std::chrono::milliseconds{300});
                if (hosts.rank() == 0) {
                    CHECK_THROWS_AS(never->synchronize(), joinable::TimedOut);
                } else {
                    CHECK_THROWS_AS(other.barrier(), joinable::TimedOut);
                }
            }
        });
        wait_until([] { return joinable::detail::late_cuda_frees() == 0; });
        check_nothing_is_left();
    }
    fake_cuda::set_memory_pools(true);
}

TEST_CASE("joined ranks shadow over NCCL, and receive the averages") {
    for (bool const views : {false, true}) {
        for (bool const has_kernels : {false, true}) {
            run_models(
                {1, 2, 3, 4},
                DType::f32,
                has_kernels,
                [&](auto& hosts, auto& comm, auto& model) {
                    auto options = small_buckets(views);
                    options.joined_gradients = joinable::JoinedGradients::kept;
                    DistributedDataParallel ddp{comm, model.params, options};
                    int const rounds = hosts.size();
                    joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
                    for (int batch = 0; batch <= hosts.rank(); ++batch) {
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) { model.backward(batch, ready); });
                        CHECK(
                            model.gradients() ==
                            model.averages(batch, all_ranks(batch, hosts.size()), hosts.size())
                        );
                    }
                    (void)guard.finish();
                    CHECK(model.gradients() == model.averages(rounds - 1, {rounds - 1}, rounds));
                }
            );
        }
    }
}

TEST_CASE("a sum over NCCL takes a factor of each rank, of floating-point numbers alone") {
    joinable_tests::run_nccl_ranks({1, 2, 4}, [](auto& comm, auto&, cudaStream_t stream) {
        joinable_tests::DeviceArray<double> const numbers{{1.0, 2.0, -3.0}, stream};
        comm.all_reduce(numbers.buffer(), joinable::ReduceOp::sum, comm.rank() + 0.5).wait();
        double factors = 0;
        for (int rank = 0; rank < comm.size(); ++rank) {
            factors += rank + 0.5;
        }
        CHECK(
            numbers.read(comm, stream) == std::vector<double>{factors, 2 * factors, -3 * factors}
        );
        joinable_tests::DeviceArray<int> const integers{{1}, stream};
        CHECK_THROWS_WITH_AS(
            (void)comm.all_reduce(integers.buffer(), joinable::ReduceOp::sum, 0.5),
            "a reduction with a factor is a sum of floating-point or complex numbers, but was given sum of "
            "i32; leave the factor out, or convert the buffer",
            joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)comm.all_reduce(numbers.buffer(), joinable::ReduceOp::max, 0.5),
            joinable::ContractViolation
        );
    });
}

/// A round with weights, in a guard where rank 0 has run out if `has_joined`, and rank 1 skips its
/// batch if `skips`. Returns what it threw.
std::string train_tokens(
    joinable::ThreadCommunicator& hosts,
    DistributedDataParallel<NcclCommunicator>& ddp,
    DeviceModel& model,
    std::uint64_t tokens,
    bool has_joined = false,
    bool skips = false
) {
    try {
        joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
        if (!has_joined || hosts.rank() != 0) {
            ddp.forward([] {}, {.weight = tokens});
            if (skips && hosts.rank() == 1) {
                ddp.skip();
            } else {
                ddp.backward([&](auto ready) { model.backward(1000, ready); });
            }
        }
        (void)guard.finish();
    } catch (joinable::ContractViolation const& error) {
        return error.what();
    }
    return {};
}
std::string refusal(std::string const& factor, std::string const& rounded) {
    return "gradients of f16 would be multiplied by " + factor +
           ", which the communicator rounds to f16, to " + rounded +
           "; call use_kernels() of its device_memory(), so that the device multiplies in f32";
}
joinable::DataParallelOptions options_of(joinable::GradientKind kind, bool views) {
    joinable::DataParallelOptions options = small_buckets(views);
    options.gradient_kind = kind;
    return options;
}

TEST_CASE("a sum by tokens over NCCL is refused on all ranks where f16 cannot hold its factor") {
    struct {
        std::uint64_t tokens; ///< of all ranks
        std::string text;
    } const cases[] = {
        {1'002, {}},
        {262'144, {}}, // below the normal numbers, but a power of two
        {3'000'000, refusal("3.33333e-07", "3.57628e-07")},
        {48'000'000, refusal("2.08333e-08", "0")},
    };
    for (auto const& one : cases) { // clang 14 captures no structured binding
        std::uint64_t const tokens = one.tokens;
        for (bool const has_joined : {false, true}) {
            for (bool const skips : {false, true}) {
                CAPTURE(tokens);
                auto const sizes = {2, has_joined ? 3 : 4, has_joined ? 4 : 8};
                run_models(sizes, DType::f16, false, [&](auto& hosts, auto& comm, auto& model) {
                    int const active = has_joined ? hosts.size() - 1 : hosts.size();
                    auto const own = tokens / static_cast<std::uint64_t>(active);
                    if (own * static_cast<std::uint64_t>(active) == tokens) {
                        auto const options = options_of(joinable::GradientKind::sum, false);
                        DistributedDataParallel ddp{comm, model.params, options};
                        CHECK(train_tokens(hosts, ddp, model, own, has_joined, skips) == one.text);
                    }
                });
            }
        }
    }
}

TEST_CASE("kernels scale what f16 cannot hold, and NCCL what other gradients multiply by") {
    using joinable::GradientKind;
    auto const check = [](DType dtype, GradientKind kind, bool has_kernels) {
        for (bool const views : {false, true}) {
            run_models({1, 2, 4}, dtype, has_kernels, [&](auto& hosts, auto& comm, auto& model) {
                DistributedDataParallel ddp{comm, model.params, options_of(kind, views)};
                constexpr std::uint64_t tokens = 20'000'000;
                CHECK(train_tokens(hosts, ddp, model, tokens).empty());
                auto const gradients = model.gradients();
                auto const means = model.averages(1000, all_ranks(0, hosts.size()), hosts.size());
                double const divisor = kind == GradientKind::sum ? double{tokens} : 1.0;
                for (std::size_t i = 0; i < gradients.size(); ++i) {
                    for (std::size_t e = 0; e < gradients[i].size(); ++e) {
                        double const exact = means[i][e] / divisor; // above 5e-5
                        CHECK(gradients[i][e] / exact == doctest::Approx(1).epsilon(0.01));
                    }
                }
            });
        }
    };
    check(DType::f16, GradientKind::sum, true);
    check(DType::f16, GradientKind::mean, true);
    check(DType::f16, GradientKind::mean, false);
    check(DType::bf16, GradientKind::sum, false);
    check(DType::f32, GradientKind::sum, false);
}

TEST_CASE("the device of an NCCL communicator works on the caller's stream, whichever it is now") {
    joinable_tests::run_nccl_ranks({1}, [](auto& comm, auto&, cudaStream_t stream) {
        joinable_tests::Stream const other;
        CHECK(comm.device_memory().stream() == stream);
        CHECK(comm.device_memory().engine_stream() == stream);
        comm.set_stream(other);
        CHECK(comm.device_memory().stream() == other);
        CHECK(comm.device_memory().engine_stream() == other);
        CHECK(comm.device_memory().id().index == comm.device());
    });
}

TEST_CASE("an exception in a backward pass over NCCL is the same error on all ranks") {
    run_participants({2, 3}, [](joinable::ThreadCommunicator& hosts) {
        DeviceModel model{hosts.rank(), DType::f32};
        NcclCommunicator comm{
            hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
        };
        comm.device_memory().use_kernels(joinable_tests::host_kernels());
        DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
        auto const train = [&] {
            joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
            for (int batch = 0; batch < 3; ++batch) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    model.backward(batch, [&](std::size_t i) {
                        if (hosts.rank() == 1 && batch == 1 && i == 1) {
                            throw std::runtime_error{"bad sample"};
                        }
                        ready(i);
                    });
                });
            }
        };
        if (hosts.rank() == 1) {
            CHECK_THROWS_WITH_AS(train(), "bad sample", std::runtime_error);
        } else {
            CHECK_THROWS_AS(train(), joinable::PeerFailed);
        }
    });
    fake_cuda::drain();
}

/// How often a host has asked whether a device has come so far.
std::size_t polls() {
    return fake_cuda::calls("cudaStreamQuery") + fake_cuda::calls("cudaEventQuery");
}
/// Runs train(comm, model, other, fail) on every rank, with NCCL as it is, and as other types refer to it. In
/// `fail` rank 1 throws, when the others wait for a device that waits for it.
template <class Train>
void fail_beside_streams(Train const& train) {
    auto const run = [&](int size, auto const& as_type) {
        Meeting arrived{size};
        run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
            DeviceModel model{hosts.rank(), DType::f32};
            DeviceModel other{hosts.rank(), DType::f32};
            auto const fail = [&] {
                arrived.meet();
                if (hosts.rank() == 1) {
                    wait_until([begun = polls()] { return polls() > begun + 40; });
                    throw std::runtime_error{"the disk is full"};
                }
            };
            auto const fails = [&] {
                NcclCommunicator nccl{
                    hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{20}}
                };
                nccl.device_memory().use_kernels(joinable_tests::host_kernels());
                auto&& comm = as_type(nccl);
                train(comm, model, other, fail);
            };
            if (hosts.rank() == 1) {
                CHECK_THROWS_WITH_AS(fails(), "the disk is full", std::runtime_error);
            } else {
                CHECK_THROWS_AS(fails(), joinable::PeerFailed);
            }
        });
        fake_cuda::drain();
    };
    for (int const size : {2, 3, 4}) {
        run(size, [](NcclCommunicator& nccl) -> NcclCommunicator& { return nccl; });
        run(size, [](NcclCommunicator& nccl) {
            return joinable::BasicAnyCommunicator<joinable::CudaDevice>{nccl};
        });
        run(size, [](NcclCommunicator& nccl) { return joinable::PerDevice{nccl}; });
    }
}

TEST_CASE("replicas on a device are compared until a rank fails, whatever type its NCCL has") {
    fail_beside_streams([](auto& comm, DeviceModel& model, DeviceModel&, auto const& fail) {
        DistributedDataParallel ddp{comm, model.params, {.verify_replicas = 1}};
        for (int batch = 0; batch < 4; ++batch) {
            ddp.forward([] {});
            ddp.backward([&](auto ready
                         ) { // compares the values, which come behind earlier gradients
                if (comm.rank() == 1 && batch == 2) {
                    fail(); // has compared, but sums no gradients
                }
                model.backward(batch, ready);
            });
            if (batch == 2) {
                fail(); // the host has not waited for the gradients
            }
        }
    });
}

TEST_CASE("a model over NCCL behind another type waits no longer for a rank that fails instead") {
    fail_beside_streams([](auto& comm, DeviceModel& model, DeviceModel& other, auto const& fail) {
        DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
        fail();
        DistributedDataParallel further{comm, other.params, small_buckets(false)};
    });
}

} // namespace
