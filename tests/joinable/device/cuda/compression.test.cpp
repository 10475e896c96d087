// SPDX-License-Identifier: BSL-1.0
// Reductions whose buckets are on devices. The oracle: the same training in host memory, whose sums have one order.
#include <joinable/compression.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/numbers.hpp>
#include <support/ranks.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>

#include <joinable/cuda.hpp>
#include <joinable/join.hpp>
#include <joinable/refresh.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Shape;
using joinable::ThreadCommunicator;
using namespace joinable_tests;

constexpr std::size_t rounds = 6;
constexpr std::size_t of_infinity = 3; // the round in which a gradient has an infinite element
std::size_t inputs_of(int rank) {
    return rounds - static_cast<std::size_t>(rank);
}

struct Extents {
    Shape extents;
    Shape strides;
};
std::vector<Extents> model_extents() {
    return {{{24, 70}, {70, 1}}, {{7}, {1}}, {{70, 24}, {1, 70}}, {{300, 3, 5}, {15, 5, 1}}};
}
Numbers make_gradient(std::size_t parameter, std::size_t count, int rank, std::size_t round) {
    Numbers numbers(count);
    for (std::size_t i = 0; i < count; ++i) {
        auto const x = static_cast<double>(i % 70) + 1.5 * static_cast<double>(parameter);
        auto const y = static_cast<double>(i / 70) + static_cast<double>(round);
        numbers[i] = std::sin(0.3 * x) * std::cos(0.2 * y) * (rank + 1) + 0.2 * std::cos(x * y);
    }
    if (round == of_infinity && rank == 0 && parameter == 0) {
        numbers[5] = std::numeric_limits<double>::infinity();
    }
    return numbers;
}
/// Each is computed once: all trainings have the same.
Numbers const& gradient_in(std::size_t parameter, int rank, std::size_t round) {
    static std::vector<Numbers> const all = [] {
        std::vector<Numbers> made;
        std::vector<Extents> const model = model_extents();
        for (int r = 0; r < 4; ++r) {
            for (std::size_t of_round = 0; of_round < rounds; ++of_round) {
                for (std::size_t i = 0; i < model.size(); ++i) {
                    std::size_t count = 1;
                    for (std::size_t const extent : model[i].extents) {
                        count *= extent;
                    }
                    made.push_back(make_gradient(i, count, r, of_round));
                }
            }
        }
        return made;
    }();
    std::size_t const parameters = all.size() / (4 * rounds);
    return all.at((static_cast<std::size_t>(rank) * rounds + round) * parameters + parameter);
}

/// The gradients of all rounds, on a rank.
using History = std::vector<std::vector<Numbers>>;

/// Trains rounds of two guards: backward(round, ready) is a pass, gradients() reads what ranks got. Between them the model
/// is listed again.
template <class Ddp, class Control, class Backward, class Read>
History train(Ddp& ddp, Control& control, Backward const& backward, Read const& gradients) {
    History history;
    for (int epoch = 0; epoch < 2; ++epoch) {
        joinable::Join guard{joinable::participants(ddp), joinable::control(control)};
        for (std::size_t round = 0; round < inputs_of(control.rank()); ++round) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) { backward(round, ready); });
            history.push_back(gradients());
            if (round == 1) {
                if constexpr (requires { ddp.reduction().scale_residuals(0.5); }) {
                    ddp.reduction().scale_residuals(0.5);
                }
            }
        }
        guard.finish();
        history.push_back(gradients()); // those of the last shadowed round
        if (epoch == 0) {
            ddp.refresh(); // what the reduction keeps stays
        }
    }
    return history;
}
joinable::DataParallelOptions options() {
    return {.bucket_cap_bytes = 8000, .first_bucket_bytes = 4000};
}

std::vector<StridedParam> host_model(DType dtype) {
    std::vector<StridedParam> model;
    for (auto const& [extents, strides] : model_extents()) {
        model.push_back(StridedParam{
            {OwnedTensor{dtype, extents, strides}, OwnedTensor{dtype, extents, strides}, {}}
        });
        model.back().need_grad();
    }
    return model;
}
template <class Ready>
void host_pass(std::vector<StridedParam>& model, int rank, std::size_t round, Ready const& ready) {
    for (std::size_t i = model.size(); i-- > 0;) {
        write(model[i].grad, gradient_in(i, rank, round));
        ready(i);
    }
}
std::vector<Numbers> gradients_of(std::vector<StridedParam> const& model) {
    std::vector<Numbers> all;
    for (StridedParam const& param : model) {
        all.push_back(read(param.grad));
    }
    return all;
}
template <class Reduction>
History train_on_host(ThreadCommunicator& host, DType dtype, Reduction reduction) {
    std::vector<StridedParam> model = host_model(dtype);
    DistributedDataParallel ddp{host, model, options(), std::move(reduction)};
    return train(
        ddp,
        host,
        [&](std::size_t round, auto ready) { host_pass(model, host.rank(), round, ready); },
        [&] { return gradients_of(model); }
    );
}

/// A model on the rank's device, and the stream of its engine.
struct OnDevice : DeviceModel {
    OnDevice(int rank, DType dtype) : DeviceModel{rank, dtype} {
        params.clear();
        for (auto const& [extents, strides] : model_extents()) {
            params.emplace_back(dtype, extents, strides);
        }
    }
    template <class Ready>
    void pass(int rank, std::size_t round, Ready const& ready) {
        for (std::size_t i = params.size(); i-- > 0;) {
            joinable_tests::launch(stream(), [grad = params[i].grad, i, rank, round] {
                write(grad, gradient_in(i, rank, round));
            });
            ready(i);
        }
    }
};

template <class Reduction>
History train_on_device(ThreadCommunicator& host, DType dtype, Reduction reduction) {
    OnDevice model{host.rank(), dtype};
    StreamCommunicator comm{host, model.stream()};
    comm.device_memory().use_kernels(host_kernels());
    DistributedDataParallel ddp{comm, model.params, options(), std::move(reduction)};
    std::size_t allocated = 0;
    return train(
        ddp,
        host,
        [&](std::size_t round, auto ready) {
            if (host.size() == 1) { // the buckets are cut anew after the first round
                allocated = round == 1 ? fake::live_allocations() : round == 0 ? 0 : allocated;
            }
            model.pass(host.rank(), round, ready);
        },
        [&] {
            CHECK((allocated == 0 || fake::live_allocations() == allocated));
            return model.gradients();
        }
    );
}

bool is_same(Numbers const& a, Numbers const& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) {
            return false;
        }
    }
    return a.size() == b.size();
}
void check_same(History const& device, History const& host) {
    REQUIRE(device.size() == host.size());
    for (std::size_t round = 0; round < host.size(); ++round) {
        for (std::size_t i = 0; i < host[round].size(); ++i) {
            CAPTURE(round);
            CAPTURE(i);
            CHECK(is_same(device[round][i], host[round][i]));
        }
    }
}

/// Calls check(make) with functions that make reductions: under a sanitizer one of three, in turn.
template <class Check>
void for_each_reduction(std::size_t turn, Check const& check) {
    std::size_t k = 0;
    auto const check_in_turn = [&](auto const& make) {
        if (!is_left_out(k++, 3, turn)) {
            check(make);
        }
    };
    check_in_turn([] { return joinable::Fp16Compression<>{}; });
    check_in_turn([] { return joinable::Bf16Compression<>{}; });
    check_in_turn([] { return joinable::CastTo<DType::f32>{}; });
    check_in_turn([] {
        return joinable::CastTo<DType::f64, joinable::PowerSgd>{{.rank = 2, .start_iteration = 1}};
    });
    check_in_turn([] { return joinable::PowerSgd{.start_iteration = 1}; });
    check_in_turn([] {
        return joinable::PowerSgd{.rank = 3, .start_iteration = 0, .warm_start = false};
    });
    check_in_turn([] {
        return joinable::PowerSgd{.rank = 2, .start_iteration = 0, .error_feedback = false};
    });
}

TEST_CASE("compressed buckets of devices have the bits of the host's, with uneven inputs") {
    std::size_t number = 0;
    for (auto const delay : {std::chrono::microseconds{0}, std::chrono::microseconds{20}}) {
        fake::delay_every_operation(delay);
        for (DType const dtype : {DType::f32, DType::bf16, DType::f64}) {
            // Each dtype meets two sizes and, of them, other reductions.
            in_turn({1, 2, 4}, number + number / 3, [&](int size) {
                run_participants({size}, [&](ThreadCommunicator& host) {
                    for_each_reduction(number + 2 * (number / 3), [&](auto const& make) {
                        CAPTURE(make().name);
                        auto const expected = train_on_host(host, dtype, make());
                        check_same(train_on_device(host, dtype, make()), expected);
                    });
                });
            });
            ++number;
        }
        check_nothing_is_left();
    }
    fake::delay_every_operation({});
}

/// The text with which a model is refused.
template <class Comm, class Reduction>
std::string refusal(Comm& comm, OnDevice& model, Reduction reduction) {
    try {
        DistributedDataParallel const ddp{comm, model.params, options(), std::move(reduction)};
    } catch (joinable::ContractViolation const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("reductions that a device cannot compute are refused in a sentence, which ends nothing") {
    run_ranks({1, 2}, [](ThreadCommunicator& host) {
        OnDevice model{host.rank(), DType::f32};
        ScalingStreamCommunicator comm{host, model.stream()};
        CHECK(
            refusal(comm, model, joinable::Fp16Compression<>{}) ==
            "CastTo<f16>: the device of these gradients has no kernels; give its use_kernels() what "
            "joinable::cuda_kernels() returns, or use AllReduce"
        );
        auto kernels = host_kernels();
        kernels.compute = nullptr; // those of an earlier version
        comm.device_memory().use_kernels(kernels);
        CHECK(
            refusal(comm, model, joinable::PowerSgd{}) ==
            "PowerSgd: the device of these gradients has no kernels; give its use_kernels() what "
            "joinable::cuda_kernels() returns, or use AllReduce"
        );
        joinable::detail::DeviceStep const step =
            joinable::detail::cast_step({}, 1.0, {nullptr, 1, DType::f32});
        CHECK_THROWS_WITH_AS(
            comm.device_memory().compute(&step, 1),
            "compute: there are no kernels for it; call CudaDevice::use_kernels first",
            joinable::ContractViolation
        );
        comm.device_memory().use_kernels(host_kernels());
        DistributedDataParallel ddp{comm, model.params, options(), joinable::PowerSgd{}};
        ddp.forward([] {});
        ddp.backward([&](auto ready) { model.pass(host.rank(), 0, ready); });
        CHECK(model.gradients()[1].size() == 7);
    });
    check_nothing_is_left();
}

TEST_CASE("an exception in a compressed pass on a device is PeerFailed on other ranks") {
    for (std::size_t const of_round : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
        run_ranks({2, 4}, [&](ThreadCommunicator& host) {
            OnDevice model{host.rank(), DType::f32};
            StreamCommunicator comm{host, model.stream()};
            comm.device_memory().use_kernels(host_kernels());
            DistributedDataParallel ddp{
                comm, model.params, options(), joinable::PowerSgd{.start_iteration = 1}
            };
            auto const training = [&] {
                joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                for (std::size_t round = 0; round < rounds; ++round) {
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        model.pass(host.rank(), round, [&](std::size_t i) {
                            if (round == of_round && host.rank() == 1 && i == 1) {
                                throw std::runtime_error{"bad sample"};
                            }
                            ready(i);
                        });
                    });
                }
                guard.finish();
            };
            if (host.rank() == 1) {
                CHECK_THROWS_WITH_AS(training(), "bad sample", std::runtime_error);
            } else {
                CHECK_THROWS_AS(training(), joinable::PeerFailed);
            }
        });
        check_nothing_is_left();
    }
}

thread_local bool next_launch_fails = false;

TEST_CASE("after a kernel that could not be launched, PowerSgd computes a skipped round once") {
    for (std::size_t const failing : {0U, 1U}) {
        run_ranks({1, 2, 4}, [&](ThreadCommunicator& host) {
            bool const fails = host.rank() == host.size() - 1;
            auto const make = [] { return joinable::PowerSgd{.rank = 2, .start_iteration = 0}; };
            auto const train_on = [&](auto& ddp, auto const& pass, auto const& gradients) {
                History history;
                joinable::Join guard{joinable::participants(ddp), joinable::control(host)};
                for (std::size_t round = 0; round < of_infinity; ++round) {
                    ddp.forward([] {});
                    auto const backward = [&](auto ready) { pass(round, ready); };
                    next_launch_fails = fails && round == failing;
                    if (!next_launch_fails) {
                        ddp.backward(backward);
                    } else {
                        if constexpr (requires { ddp.join_communicator().device_memory(); }) {
                            CHECK_THROWS_AS(ddp.backward(backward), joinable::CommunicationError);
                        }
                        ddp.skip();
                    }
                    history.push_back(gradients());
                }
                guard.finish();
                return history;
            };
            std::vector<StridedParam> params = host_model(DType::f32);
            DistributedDataParallel on_host{host, params, options(), make()};
            History const expected = train_on(
                on_host,
                [&](std::size_t round, auto ready) {
                    host_pass(params, host.rank(), round, ready);
                },
                [&] { return gradients_of(params); }
            );
            OnDevice model{host.rank(), DType::f32};
            StreamCommunicator comm{host, model.stream()};
            auto kernels = host_kernels();
            kernels.compute = [](joinable::detail::DeviceStep const* steps,
                                 std::size_t count,
                                 cudaStream_t stream) {
                return std::exchange(next_launch_fails, false) ? cudaErrorInvalidConfiguration
                                                               : host_steps(steps, count, stream);
            };
            comm.device_memory().use_kernels(kernels);
            DistributedDataParallel ddp{comm, model.params, options(), make()};
            History const history = train_on(
                ddp,
                [&](std::size_t round, auto ready) { model.pass(host.rank(), round, ready); },
                [&] { return model.gradients(); }
            );
            check_same(history, expected);
            for (std::size_t element = 0; element < 7; ++element) { // they travel whole
                double sum = 0;
                for (int rank = 0; rank + 1 < host.size(); ++rank) {
                    sum += gradient_in(1, rank, failing)[element];
                }
                CHECK(std::abs(history[failing][1][element] - sum / host.size()) < 1e-6);
            }
        });
        check_nothing_is_left();
    }
}

TEST_CASE("a kernel that cannot be launched ends the round with the runtime's error") {
    run_ranks({1}, [](ThreadCommunicator& host) {
        OnDevice model{host.rank(), DType::f32};
        StreamCommunicator comm{host, model.stream()};
        auto kernels = host_kernels();
        kernels.compute = [](joinable::detail::DeviceStep const*, std::size_t, cudaStream_t) {
            return cudaErrorInvalidConfiguration;
        };
        comm.device_memory().use_kernels(kernels);
        DistributedDataParallel ddp{comm, model.params, options(), joinable::Bf16Compression<>{}};
        ddp.forward([] {});
        CHECK_THROWS_AS(
            ddp.backward([&](auto ready) { model.pass(host.rank(), 0, ready); }),
            joinable::CommunicationError
        );
    });
    check_nothing_is_left();
}

} // namespace
