// SPDX-License-Identifier: BSL-1.0
// Sharded optimizers in device memory. The oracle: the whole optimizer of ranks that are threads, in host
// memory, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/device_training.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>
#include <support/sharded_training.hpp>
#include <support/volume.hpp>

#include <joinable/join.hpp>
#include <joinable/nccl.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::ContractViolation;
using joinable::DType;
using joinable::NcclCommunicator;
using joinable::Partition;
using joinable::Shape;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;
using namespace joinable_tests;

/// Runs body(hosts, comm, engine) on every rank over NCCL, and looks for leaks.
template <class Body>
void over_nccl(std::initializer_list<int> sizes, Model const& model, Body const& body) {
    run_participants(sizes, [&](ThreadCommunicator& hosts) {
        DeviceEngine engine{model, hosts.rank()};
        NcclCommunicator comm{
            hosts, {.stream = engine.stream(), .deadline = std::chrono::seconds{60}}
        };
        comm.device_memory().use_kernels(host_kernels());
        body(hosts, comm, engine);
    });
    check_nothing_is_left();
}
/// The same over a communicator that has all-reduce and broadcast alone, on a stream of its own.
template <class Body>
void over_streams(std::initializer_list<int> sizes, Model const& model, Body const& body) {
    run_participants(sizes, [&](ThreadCommunicator& hosts) {
        DeviceEngine engine{model, hosts.rank()};
        StreamCommunicator comm{hosts, engine.stream()};
        comm.device_memory().use_kernels(host_kernels());
        body(hosts, comm, engine);
    });
    check_nothing_is_left();
}

/// Each operation of a stream takes its time: what does not wait for it reads what was there before.
class Delay {
public:
    Delay() { fake_cuda::delay_every_operation(std::chrono::microseconds{20}); }
    ~Delay() { fake_cuda::delay_every_operation({}); }
};

std::vector<ShardedOptions> const all_options = [] {
    std::vector<ShardedOptions> all;
    for (Sharding const sharding :
         {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            for (std::size_t const cap : {std::size_t{64}, std::size_t{1} << 20U}) {
                all.push_back(
                    {.sharding = sharding, .partition = partition, .bucket_cap_bytes = cap}
                );
                if (joinable::detail::reduces_to_owners(sharding)) {
                    all.push_back(all.back());
                    all.back().step_in_backward = true;
                }
            }
        }
    }
    return all;
}();

template <class Comm, class Rule>
std::vector<Numbers> train_sharded(
    ThreadCommunicator& hosts,
    Comm& comm,
    DeviceEngine& engine,
    Inputs const& inputs,
    Rule const& rule,
    ShardedOptions const& options
) {
    ShardedDataParallel sharded{comm, engine.params, rule, options};
    {
        Join guard{participants(sharded), joinable::control(hosts)};
        for (int round = 0; round < inputs(comm.rank()); ++round) {
            if (options.sharding == Sharding::parameters) {
                sharded.forward([](auto use) { static_cast<void>(use); });
                sharded.backward([&](auto ready, auto use) { engine.backward(round, ready, use); });
            } else {
                sharded.forward([] {});
                sharded.backward([&](auto ready) { engine.backward(round, ready); });
            }
            sharded.step();
        }
        guard.finish();
    }
    auto const held = sharded.use_all();
    return engine.values();
}

TEST_CASE("a training sharded over devices has the values of one on the host, bit for bit") {
    Delay const delay;
    std::size_t turn = 0;
    for (Inputs const& inputs : inputs_of) {
        for_each_rule([&](auto const& rule) {
            ShardedOptions const& options = all_options[turn++ % all_options.size()];
            ShardedOptions const& other = all_options[turn++ % all_options.size()];
            auto const check = [&](ShardedOptions const& chosen) {
                return [&](auto& hosts, auto& comm, auto& engine) {
                    auto const whole = train_on_host(hosts, {}, inputs, rule);
                    CHECK(train_sharded(hosts, comm, engine, inputs, rule, chosen) == whole);
                };
            };
            in_turn({1, 2, 4}, turn / 2, [&](int size) {
                over_nccl({size}, {}, check(options));
                over_streams({size}, {}, check(other));
            });
        });
    }
}

TEST_CASE("each dtype and layout trains sharded over devices, by each sharding and partition") {
    Model const models[] = {
        {.dtype = DType::f64},
        {.dtype = DType::bf16},
        {.dtype = DType::f16, .has_strides = true},
        {.has_strides = true, .frozen = 1},
        {.is_large = true},
    };
    for (std::size_t m = 0; m < std::size(models); ++m) { // so each choice meets both transports
        Model const& model = models[m];
        Adam const rule{.learning_rate = 0.02};
        for (std::size_t k = 0; k < all_options.size(); ++k) {
            if (is_left_out(k / 2, 4, m)) {
                continue;
            }
            ShardedOptions const& options = all_options[k];
            auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                auto const whole = train_on_host(hosts, model, inputs_of[1], rule);
                CHECK(train_sharded(hosts, comm, engine, inputs_of[1], rule, options) == whole);
            };
            (k + m) % 2 == 0 ? over_nccl({2}, model, check) : over_streams({2}, model, check);
        }
    }
}

/// An engine's optimizer, which needs no kernels of ours: descends at a rate.
struct DeviceDescent {
    struct Settings {
        double rate;
    } now;
    cudaStream_t stream;

    [[nodiscard]] Settings& settings() noexcept { return now; }
    void step(joinable::WholeParameter const& parameter) {
        launch(stream, [value = parameter.value, gradient = parameter.gradient, rate = now.rate] {
            Numbers numbers = read(value);
            Numbers const steps = read(gradient);
            for (std::size_t k = 0; k < numbers.size(); ++k) {
                numbers[k] -= rate * steps[k];
            }
            write(value, numbers);
        });
    }
};
static_assert(joinable::LocalOptimizer<DeviceDescent>);

TEST_CASE("sharded gradients of f16 are scaled by kernels, or refused where NCCL would round") {
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        for (bool const has_kernels : {true, false}) {
            run_participants({1, 2, 4}, [&](ThreadCommunicator& hosts) {
                DeviceModel model{hosts.rank(), DType::f16};
                NcclCommunicator comm{
                    hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
                };
                if (has_kernels) {
                    comm.device_memory().use_kernels(host_kernels());
                }
                std::string said;
                try {
                    ShardedDataParallel sharded{
                        comm,
                        model.params,
                        DeviceDescent{{1e6}, model.stream()},
                        {.sharding = sharding, .gradient_kind = joinable::GradientKind::sum}
                    };
                    Join guard{participants(sharded), joinable::control(hosts)};
                    sharded.forward([] {}, {.weight = 20'000'000});
                    sharded.backward([&](auto ready) { model.backward(1000, ready); });
                    sharded.step();
                    guard.finish();
                } catch (ContractViolation const& error) {
                    said = error.what();
                }
                CHECK(said.empty() == has_kernels);
                CHECK((said.find("call use_kernels()") != std::string::npos) == !has_kernels);
                auto const means = model.averages(1000, all_ranks(0, hosts.size()), hosts.size());
                (void)cudaStreamSynchronize(model.stream());
                for (std::size_t i = 0; has_kernels && i < means.size(); ++i) {
                    Numbers const values = model.params[i].value.numbers();
                    for (std::size_t e = 0; e < values.size(); ++e) { // 1e6 / 20e6
                        CHECK(values[e] / (-means[i][e] / 20) == doctest::Approx(1).epsilon(0.01));
                    }
                }
            });
            check_nothing_is_left();
        }
    }
}

/// Trains by a DistributedDataParallel and a ZeroRedundancyOptimizer, or by the latter alone.
template <class Comm, class Optimizer>
std::vector<Numbers> train_zero(
    ThreadCommunicator& hosts,
    Comm& comm,
    DeviceEngine& engine,
    Inputs const& inputs,
    Optimizer& zero,
    bool reduces
) {
    std::optional<joinable::DistributedDataParallel<Comm>> ddp;
    auto const run = [&](auto& guard, auto const& pass) {
        for (int round = 0; round < inputs(comm.rank()); ++round) {
            pass(round);
            zero.step();
        }
        guard.finish();
    };
    if (reduces) {
        Join guard{participants(zero), joinable::control(hosts)};
        run(guard, [&](int round) { engine.backward(round, [](std::size_t) {}); });
    } else {
        ddp.emplace(comm, engine.params, small_buckets(comm.size() == 2));
        Join guard{participants(*ddp, zero), joinable::control(hosts)};
        run(guard, [&](int round) {
            ddp->forward([] {});
            ddp->backward([&](auto ready) { engine.backward(round, ready); });
        });
    }
    return engine.values();
}

TEST_CASE("the optimizer alone is sharded over devices, beside what averages and by itself") {
    Delay const delay;
    Model const model{.dtype = DType::bf16, .has_strides = true, .is_large = true};
    AdamW const rule{.learning_rate = 0.02, .amsgrad = true};
    std::size_t turn = 0;
    for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
        for (bool const reduces : {false, true}) {
            for (bool const views : {false, true}) {
                auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                    Inputs const& inputs = inputs_of[2];
                    auto const whole = train_on_host(hosts, model, inputs, rule);
                    ZeroRedundancyOptimizer zero{
                        comm,
                        engine.params,
                        rule,
                        ZeroOptions{
                            .partition = partition,
                            .bucket_cap_bytes = 256,
                            .reduces_gradients = reduces,
                            .parameters_as_bucket_view = views
                        }
                    };
                    CHECK(train_zero(hosts, comm, engine, inputs, zero, reduces) == whole);
                    zero.reload(); // changes nothing: values are their masters, rounded
                    CHECK(engine.values() == whole);
                };
                Model dense = model; // views have the layout of a bucket
                dense.has_strides = !views;
                in_turn({1, 2, 4}, turn++, [&](int size) { over_nccl({size}, dense, check); });
                over_streams({2}, dense, check);
            }
        }
    }
}

TEST_CASE("a part that begins and ends within values with gaps is stepped and sent") {
    Delay const delay;
    auto const make_two = [] { // of parts of 32 elements the second one has some of each
        std::vector<StridedParam> params;
        for (auto const& [extents, strides] :
             {std::pair{Shape{4, 10}, Shape{12, 1}}, std::pair{Shape{7, 8}, Shape{9, 1}}}) {
            params.push_back({{{DType::f32, extents, strides}, {DType::f32, extents, strides}, {}}}
            );
            Numbers values;
            for (std::size_t k = 0; k < params.back().value.view().numel(); ++k) {
                values.push_back(static_cast<double>(k % 13) / 8.0 - 0.75);
            }
            write(params.back().value.view(), values);
        }
        return params;
    };
    ZeroOptions const options{.partition = Partition::flat, .reduces_gradients = true};
    over_nccl({4}, {}, [&](auto& hosts, auto& comm, auto& engine) {
        std::vector<StridedParam> params = make_two();
        engine.params.clear();
        for (StridedParam const& param : params) {
            engine.params.emplace_back(param, engine.stream());
        }
        ZeroRedundancyOptimizer on_host{hosts, params, Adam{}, options};
        ZeroRedundancyOptimizer zero{comm, engine.params, Adam{}, options};
        for (int round = 0; round < 2; ++round) {
            backward_on_host(params, hosts.rank(), round, [](std::size_t) {});
            on_host.step();
            engine.backward(round, [](std::size_t) {});
            zero.step();
        }
        CHECK(engine.values() == values_of(params));
    });
}

/// As bytes: every tensor of every parameter.
template <class Rule>
std::vector<std::vector<std::byte>> bytes_of(joinable::OptimizerState<Rule> const& state) {
    std::vector<std::vector<std::byte>> bytes;
    for (auto const& parameter : state.parameters) {
        bytes.emplace_back(1, static_cast<std::byte>(parameter.steps));
        for (joinable::StateTensor const& tensor : parameter.tensors) {
            bytes.push_back(tensor.elements);
        }
    }
    return bytes;
}

TEST_CASE("state is gathered from devices to host memory, and loaded from there") {
    Delay const delay;
    for (Sharding const sharding : {Sharding::none, Sharding::gradients}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            ShardedOptions const options{
                .sharding = sharding, .partition = partition, .bucket_cap_bytes = 64
            };
            Model const model{.dtype = DType::bf16, .has_strides = true};
            Adam const rule{.learning_rate = 0.02};
            auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                int const last = comm.size() - 1;
                auto const step = [&](auto& sharded, int round) {
                    sharded.forward([] {});
                    sharded.backward([&](auto ready) { engine.backward(round, ready); });
                    sharded.step();
                };
                std::vector<StridedParam> params = make(model);
                ShardedDataParallel on_host{hosts, params, rule, options};
                for (int round = 0; round < 2; ++round) {
                    on_host.forward([] {});
                    on_host.backward([&](auto ready) {
                        backward_on_host(params, comm.rank(), round, ready);
                    });
                    on_host.step();
                }
                on_host.consolidate(last);
                ShardedDataParallel first{comm, engine.params, rule, options};
                step(first, 0);
                step(first, 1);
                first.consolidate(last);
                joinable::OptimizerState<Adam> state;
                if (comm.rank() == last) {
                    state = first.state();
                    CHECK(bytes_of(state) == bytes_of(on_host.state()));
                }
                DeviceEngine other{model, engine};
                for (std::size_t i = 0; i < other.params.size(); ++i) {
                    launch(other.stream(), [to = other.params[i].value, &from = engine.params[i]] {
                        write(to, read(from.value));
                    });
                }
                (void)cudaStreamSynchronize(other.stream());
                ShardedDataParallel second{comm, other.params, rule, options};
                second.load(state, last);
                second.consolidate(last);
                if (comm.rank() == last) {
                    CHECK(bytes_of(second.state()) == bytes_of(state));
                }
                step(first, 2);
                std::swap(engine.params, other.params); // the same pass for the other one
                step(second, 2);
                auto const values = engine.values();
                std::swap(engine.params, other.params);
                CHECK(engine.values() == values);
            };
            over_nccl({1, 2, 4}, model, check);
            over_streams({2}, model, check);
        }
    }
}

/// An engine's own optimizer, which launches kernels on the engine's stream.
struct EngineSgd {
    struct Settings {
        double rate;
    };
    cudaStream_t stream;
    Settings own{0.125};

    void step(joinable::WholeParameter const& parameter) {
        launch(stream, [parameter, rate = own.rate] {
            Numbers values = read(parameter.value);
            Numbers const gradients = read(parameter.gradient);
            for (std::size_t k = 0; k < values.size(); ++k) {
                values[k] -= rate * gradients[k];
            }
            write(parameter.value, values);
        });
    }
    Settings& settings() { return own; }
};

TEST_CASE("an engine's own optimizer steps on its stream") {
    Delay const delay;
    for (Sharding const sharding : {Sharding::optimizer, Sharding::gradients}) {
        Model const model{.dtype = DType::f64}; // where a product and a sum are exact
        auto const check = [&](auto& hosts, auto& comm, auto& engine) {
            auto const whole =
                train_on_host(hosts, model, inputs_of[1], Sgd{.learning_rate = 0.125});
            ShardedOptions const options{.sharding = sharding, .bucket_cap_bytes = 64};
            CHECK(
                train_sharded(
                    hosts, comm, engine, inputs_of[1], EngineSgd{engine.stream()}, options
                ) == whole
            );
        };
        over_nccl({1, 2, 4}, model, check);
        over_streams({2}, model, check);
    }
}

TEST_CASE("before_step changes gradients on the device, by kernels on the engine's stream") {
    Delay const delay;
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            // With joined ranks, hosts wait before: settings travel.
            Inputs const& inputs = inputs_of[partition == Partition::flat ? 2 : 0];
            auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                // Halving gradients is exact, and for Sgd the same as halving the rate.
                auto const whole = train_on_host(hosts, {}, inputs, Sgd{.learning_rate = 0.0625});
                ShardedOptions options{.sharding = sharding, .partition = partition};
                options.before_step = [&](joinable::ShardGradients const& gradients) {
                    CHECK(gradients.device() == comm.device_memory().id());
                    for (joinable::ShardGradient const& gradient : gradients) {
                        CHECK(gradient.view.device() == gradients.device());
                        launch(engine.stream(), [view = gradient.view] {
                            Numbers numbers = read(view);
                            for (double& number : numbers) {
                                number /= 2;
                            }
                            write(view, numbers);
                        });
                    }
                    gradients.scale(0.25); // after these kernels, and before those
                    for (joinable::ShardGradient const& gradient : gradients) {
                        launch(engine.stream(), [view = gradient.view] {
                            Numbers numbers = read(view);
                            for (double& number : numbers) {
                                number = 4 * number + 1;
                            }
                            write(view, numbers);
                        });
                    }
                    gradients.scale(2);
                    for (joinable::ShardGradient const& gradient : gradients) {
                        launch(engine.stream(), [view = gradient.view] {
                            Numbers numbers = read(view);
                            for (double& number : numbers) {
                                number = (number - 2) / 2;
                            }
                            write(view, numbers);
                        });
                    }
                    return gradients.sum(1.0) > 0;
                };
                Sgd const rule{.learning_rate = 0.125};
                CHECK(train_sharded(hosts, comm, engine, inputs, rule, options) == whole);
            };
            over_nccl({2, 4}, {}, check);
            over_streams({2}, {}, check);
        }
    }
}

/// The values after the same sharded training in host memory.
template <class Rule>
std::vector<Numbers> train_sharded_on_host(
    ThreadCommunicator& hosts,
    Model const& model,
    Inputs const& inputs,
    Rule const& rule,
    ShardedOptions const& options
) {
    std::vector<StridedParam> params = make(model);
    ShardedDataParallel sharded{hosts, params, rule, options};
    {
        Join guard{participants(sharded)};
        for (int round = 0; round < inputs(hosts.rank()); ++round) {
            sharded.forward([] {});
            sharded.backward([&](auto ready) {
                backward_on_host(params, hosts.rank(), round, ready);
            });
            sharded.step();
        }
        guard.finish();
    }
    return values_of(params);
}

TEST_CASE("ClipNorm clips on devices as on the host, bit for bit") {
    Delay const delay;
    Model const models[] = {
        {},
        {.dtype = DType::f64, .has_strides = true},
        {.dtype = DType::bf16, .has_strides = true, .frozen = 1},
        {.dtype = DType::f16},
    };
    std::size_t turn = 0;
    for (Model const& model : models) {
        for (ShardedOptions options : all_options) {
            if (options.step_in_backward || options.bucket_cap_bytes != 64) {
                continue; // the former is refused with a before_step
            }
            Inputs const& inputs = inputs_of[turn % 4];
            auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                AdamW const rule{.learning_rate = 0.02};
                // Its sums and steps do not depend on how it is sharded.
                ShardedOptions on_host = options;
                on_host.sharding = Sharding::optimizer;
                on_host.partition = Partition::by_parameters;
                joinable::ClipNorm clip{0.5};
                on_host.before_step = std::ref(clip);
                auto const whole = train_sharded_on_host(hosts, model, inputs, rule, on_host);
                double const norm = clip.norm();
                CHECK((norm > 0.5) == (comm.size() > 1 || inputs(0) != 0)); // it did clip
                clip = joinable::ClipNorm{0.5};
                ShardedOptions there = options;
                there.before_step = std::ref(clip);
                CHECK(train_sharded(hosts, comm, engine, inputs, rule, there) == whole);
                CHECK(clip.norm() == norm); // sums of these gradients' squares are exact
            };
            bool const lies_otherwise = model.has_strides && options.partition == Partition::flat &&
                                        options.sharding == Sharding::optimizer;
            if (lies_otherwise) {
                continue; // is refused, as on the host
            }
            if (turn % 3 == 0) {
                over_streams({2}, model, check);
            } else {
                in_turn({1, 2, 4}, turn / 2, [&](int size) { over_nccl({size}, model, check); });
            }
            ++turn;
        }
    }
}

TEST_CASE("a norm at most the largest one changes nothing on a device") {
    over_nccl({2}, {}, [](auto& hosts, auto& comm, auto& engine) {
        Sgd const rule{.learning_rate = 0.1};
        auto const whole = train_on_host(hosts, {}, inputs_of[1], rule);
        joinable::ClipNorm clip{1e9};
        ShardedOptions const options{
            .sharding = Sharding::gradients, .before_step = std::ref(clip)
        };
        CHECK(train_sharded(hosts, comm, engine, inputs_of[1], rule, options) == whole);
        CHECK(clip.norm() > 0);
    });
}

/// Scales losses, and halves the scale where a gradient became infinite: nobody steps then.
struct LossScale {
    double scale = 8;
    int skipped = 0;
};

TEST_CASE("an infinite gradient on one device makes all ranks skip the step, joined ones too") {
    Delay const delay;
    for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                int const last = comm.size() - 1;
                int const rounds = comm.rank() == last ? 4 : 1;
                Sgd const rule{.learning_rate = 0.5};
                std::vector<StridedParam> expected = make({});
                DistributedDataParallel ddp{hosts, expected};
                WholeOptimizer<Sgd> whole{expected, rule};
                int round_of_step = 0;
                Step step{hosts, [&] {
                              if (round_of_step++ != 1) { // the round with the infinity
                                  whole.step();
                              }
                          }};
                {
                    Join guard{participants(ddp, step)};
                    for (int round = 0; round < rounds; ++round) {
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) {
                            backward(expected, {}, comm.rank(), round, ready);
                        });
                        step.step();
                    }
                    guard.finish();
                }
                LossScale loss;
                std::vector<double> squares;
                ShardedOptions options{.sharding = sharding, .partition = partition};
                options.shared = {loss};
                options.before_step = [&](joinable::ShardGradients const& gradients) {
                    squares.resize(gradients.parameter_count());
                    gradients.sum_squares(squares);
                    for (double const square : squares) {
                        if (!std::isfinite(square)) {
                            loss.scale /= 2;
                            ++loss.skipped;
                            return false;
                        }
                    }
                    gradients.scale(1 / loss.scale);
                    return true;
                };
                ShardedDataParallel sharded{comm, engine.params, rule, options};
                {
                    Join guard{participants(sharded), joinable::control(hosts)};
                    for (int round = 0; round < rounds; ++round) {
                        loss.scale *= 2; // only on ranks that are active
                        sharded.forward([] {});
                        sharded.backward([&](auto ready) {
                            for (std::size_t i = engine.params.size(); i-- > 0;) {
                                engine.params[i].need_grad();
                                launch(
                                    engine.stream(),
                                    [grad = engine.params[i].grad,
                                     i,
                                     round,
                                     rank = comm.rank(),
                                     is_last = comm.rank() == last,
                                     scale = loss.scale] {
                                        Numbers numbers(grad.numel());
                                        for (std::size_t k = 0; k < numbers.size(); ++k) {
                                            numbers[k] = gradient_of(rank, round, i, k) * scale;
                                        }
                                        if (is_last && round == 1 && i == 3) {
                                            numbers[7] = std::numeric_limits<double>::infinity();
                                        }
                                        write(grad, numbers);
                                    }
                                );
                                ready(i);
                            }
                        });
                        sharded.step();
                    }
                    guard.finish();
                }
                CHECK(engine.values() == values_of(expected));
                CHECK(loss.skipped == 1);
                CHECK(loss.scale == 64.0);
            };
            over_nccl({1, 2, 4}, {}, check);
            over_streams({2}, {}, check);
        }
    }
}

TEST_CASE("without kernels that sum squares ClipNorm is refused on every rank, in a sentence") {
    over_nccl({1, 3}, {}, [](auto& hosts, auto& comm, auto& engine) {
        joinable::CudaKernels kernels = host_kernels();
        kernels.sum_squares = nullptr;
        comm.device_memory().use_kernels(kernels);
        ShardedOptions const options{.before_step = joinable::ClipNorm{1.0}};
        std::string const text = " has no kernels that sum the squares of gradients; give the "
                                 "communicator's device_memory().use_kernels() what "
                                 "joinable::cuda_kernels() returns";
        try {
            train_sharded(hosts, comm, engine, inputs_of[0], Sgd{}, options);
            FAIL("it was not refused");
        } catch (ContractViolation const& error) {
            CHECK(error.what() == "CUDA device " + std::to_string(comm.rank()) + text);
        } catch (joinable::PeerFailed const& error) { // of a rank that was faster
            CHECK(std::string{error.what()}.find(text) != std::string::npos);
        }
    });
}

TEST_CASE("norms of any type are those of the host, bit for bit") {
    Delay const delay;
    for (double const type : {1.0, 3.0, std::numeric_limits<double>::infinity()}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            for (Sharding const sharding : {Sharding::none, Sharding::gradients}) {
                bool const is_flat = partition == Partition::flat;
                if (is_flat && (type == 3.0 || sharding == Sharding::none)) {
                    continue; // cubes of parts are rounded before they are added
                }
                Model const model{.dtype = DType::f64, .has_strides = !is_flat};
                auto const check = [&](auto& hosts, auto& comm, auto& engine) {
                    AdamW const rule{.learning_rate = 0.02};
                    joinable::ClipNorm clip{0.0625, {.norm_type = type}};
                    ShardedOptions options{.sharding = Sharding::optimizer};
                    options.before_step = std::ref(clip);
                    auto const whole =
                        train_sharded_on_host(hosts, model, inputs_of[1], rule, options);
                    double const norm = clip.norm();
                    CHECK(norm > 0.0625); // it did clip
                    clip = joinable::ClipNorm{0.0625, {.norm_type = type}};
                    options.sharding = sharding;
                    options.partition = partition;
                    CHECK(train_sharded(hosts, comm, engine, inputs_of[1], rule, options) == whole);
                    CHECK(clip.norm() == norm);
                };
                over_nccl({1, 2, 4}, model, check); // sums of averages of 3 are rounded
                over_streams({2}, model, check);
            }
        }
    }
}

TEST_CASE("clipping by value is refused on a device, in a sentence") {
    over_nccl({1, 3}, {}, [](auto& hosts, auto& comm, auto& engine) {
        ShardedOptions options{.sharding = Sharding::gradients};
        options.before_step = [&](joinable::ShardGradients const& gradients) {
            std::string const device = "CUDA device " + std::to_string(comm.rank());
            CHECK(gradients.max(double(comm.rank())) == comm.size() - 1);
            CHECK_THROWS_WITH_AS(
                joinable::ClipValue{1.0}(gradients),
                ("gradients are clipped by value in host memory alone, but these are on " + device +
                 "; launch a kernel of yours for each view, on the engine's stream")
                    .c_str(),
                ContractViolation
            );
            return true;
        };
        Sgd const rule{.learning_rate = 0.125};
        CHECK(
            train_sharded(hosts, comm, engine, inputs_of[1], rule, options) ==
            train_on_host(hosts, {}, inputs_of[1], rule)
        );
    });
}

TEST_CASE("room for another number of sums is refused, in a sentence") {
    run_ranks({1, 2}, [](ThreadCommunicator& hosts) {
        std::vector<StridedParam> params = make({});
        std::vector<double> squares(3);
        ShardedDataParallel sharded{
            hosts,
            params,
            Sgd{},
            ShardedOptions{
                .before_step =
                    [&](joinable::ShardGradients const& gradients) {
                        CHECK_THROWS_WITH_AS(
                            gradients.sum_squares(squares),
                            "sum_squares gives a number for each of 7 parameters, but was given room for 3; "
                            "give as many as parameter_count()",
                            ContractViolation
                        );
                        return true;
                    }
            }
        };
        sharded.forward([] {});
        sharded.backward([&](auto ready) { backward(params, {}, hosts.rank(), 0, ready); });
        sharded.step();
    });
}

TEST_CASE("without kernels for its rule a sharded optimizer is refused on every rank, in a sentence"
) {
    run_participants({1, 2, 3}, [](ThreadCommunicator& hosts) {
        DeviceEngine engine{{}, hosts.rank()};
        NcclCommunicator comm{
            hosts, {.stream = engine.stream(), .deadline = std::chrono::seconds{60}}
        };
        auto const check = [&] {
            std::string const text =
                "CUDA device " + std::to_string(hosts.rank()) +
                " has no kernels that step by Adam; give the communicator's "
                "device_memory().use_kernels() what joinable::cuda_kernels() returns, or for a rule of your own "
                "cuda_kernels<Adam>(), in a source file that nvcc compiles";
            CHECK_THROWS_WITH_AS(
                (ZeroRedundancyOptimizer{comm, engine.params, Adam{}}),
                text.c_str(),
                ContractViolation
            );
            CHECK_THROWS_WITH_AS(
                (ShardedDataParallel{comm, engine.params, Adam{}}), text.c_str(), ContractViolation
            );
        };
        check();
        comm.device_memory().use_kernels({&host_copies});
        check();
        comm.device_memory().use_kernels(
            {&host_copies,
             [](joinable::detail::DeviceRule const& rule) {
                 return rule.id == joinable::detail::device_rule(Sgd{}).id;
             },
             &host_updates}
        );
        check();
        ShardedDataParallel const sgd{comm, engine.params, Sgd{}};
        CHECK_THROWS_WITH_AS(
            comm.device_memory().update(joinable::detail::device_rule(Adam{}), {}),
            "update: there are no kernels for this rule; call CudaDevice::use_kernels first",
            ContractViolation
        );
    });
    check_nothing_is_left();
}

/// How often the host has waited for a device, or taken or given back memory.
std::vector<std::size_t> waits() {
    std::vector<std::size_t> counts;
    for (char const* function :
         {"cudaStreamSynchronize",
          "cudaEventSynchronize",
          "cudaDeviceSynchronize",
          "cudaMalloc",
          "cudaFree",
          "cudaMallocHost",
          "cudaFreeHost"}) {
        counts.push_back(fake_cuda::calls(function));
    }
    return counts;
}

TEST_CASE("a step makes no host wait for its device, and steps a bucket in one launch") {
    for (ShardedOptions options : all_options) {
        if (options.sharding == Sharding::parameters) {
            continue; // passes wait for nothing either, but their turns are many more
        }
        Meeting quiet{2};
        Meeting counted{2};
        over_nccl({2}, {}, [&](auto&, auto& comm, auto& engine) {
            ShardedDataParallel sharded{comm, engine.params, Adam{}, options};
            auto const step = [&](int round) {
                sharded.forward([] {});
                sharded.backward([&](auto ready) { engine.backward(round, ready); });
                sharded.step();
            };
            step(0);
            step(1); // a DistributedDataParallel has cut its buckets anew
            quiet.meet();
            auto const before = waits();
            int const launches = update_launches;
            quiet.meet();
            step(2);
            step(3);
            counted.meet();
            CHECK(waits() == before);
            // Values have seven parameters, one of them empty. In a bucket of any size they are one launch.
            CHECK(update_launches - launches <= 2 * 2 * (options.bucket_cap_bytes == 64 ? 6 : 1));
            CHECK(update_launches - launches >= 2);
            counted.meet();
        });
    }
}

TEST_CASE("gradients are freed when their bucket is copied, and what a rank skips is not lost") {
    Delay const delay;
    over_nccl({2}, {}, [](auto&, auto& comm, auto& engine) {
        ShardedDataParallel sharded{
            comm,
            engine.params,
            Sgd{},
            ShardedOptions{.sharding = Sharding::gradients, .bucket_cap_bytes = 64}
        };
        for (int round = 0; round < 3; ++round) {
            sharded.forward([] {});
            sharded.backward([&](auto ready) { engine.backward(round, ready); });
            for (EngineParam const& param : engine.params) {
                CHECK(param.releases == round + 1);
                CHECK(!param.grad);
            }
            sharded.step();
        }
    });
}

std::atomic<int> updates_before_failure{0};

cudaError_t failing_updates(
    joinable::detail::DeviceRule const& rule,
    joinable::detail::DeviceUpdate const* updates,
    std::size_t count,
    cudaStream_t stream
) {
    int device = 0;
    (void)cudaGetDevice(&device);
    if (device == 1 && updates_before_failure-- == 0) {
        return cudaErrorInvalidConfiguration;
    }
    return host_updates(rule, updates, count, stream);
}

TEST_CASE("a launch that fails on one rank is the same error on all ranks, which names it") {
    for (std::size_t k = 0; k < all_options.size(); ++k) {
        ShardedOptions const& options = all_options[k];
        for (int const before : {0, 3}) {
            if (is_left_out(k, 2, before)) {
                continue;
            }
            updates_before_failure = before;
            run_participants({2, 3}, [&](ThreadCommunicator& hosts) {
                DeviceEngine engine{{}, hosts.rank()};
                NcclCommunicator comm{
                    hosts, {.stream = engine.stream(), .deadline = std::chrono::seconds{60}}
                };
                comm.device_memory().use_kernels(
                    {&host_copies, [](auto const&) { return true; }, &failing_updates}
                );
                std::string const text =
                    "a kernel of a rule failed: cudaErrorInvalidConfiguration, "
                    "invalid configuration argument";
                try {
                    train_sharded(hosts, comm, engine, [](int) { return 8; }, Sgd{}, options);
                    FAIL("no error");
                } catch (joinable::PeerFailed const& error) { // a collective in flight may say less
                    CHECK(hosts.rank() != 1);
                    CHECK(error.rank() == 1);
                } catch (joinable::CommunicationError const& error) {
                    CHECK(hosts.rank() == 1);
                    CHECK(error.what() == text);
                }
                updates_before_failure = before;
            });
            fake_cuda::drain();
        }
    }
}

} // namespace
