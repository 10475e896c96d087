// SPDX-License-Identifier: BSL-1.0
// What PyTorch's tests of FSDP and of ZeroRedundancyOptimizer (2.15) expect, said of libtorch
// modules and optimizers. The oracles: DistributedDataParallel of this library with libtorch's
// optimizer on each rank, and libtorch on one rank. The tests of test_fully_shard_training.py that
// compare values, then those of test_zero_redundancy_optimizer.py, and where each is here: in this
// file, in another torch_NAME.test.cpp (T:NAME), in participant/upstream_zero.test.cpp (U), or
// nowhere, and why.
//
// test_train_parity_single_group_*,
// test_train_parity_multi_group            here
// *_cpu_offload_eager, *_async_op,
// test_explicit_prefetching                nowhere: values lie on the module's device, and the next
//                                          unit is always in flight
// test_post_optim_event                    T:devices, where operations of a stream take long
// test_non_root_forward_backward           T:values: "layers that a pass or a loss ..."
// test_multi_forward_module                here
// test_train_parity_with_activation_*      T:values: "a checkpointed block of libtorch ..."
// test_train_parity_with_shared_params,
// test_train_shared_params_uneven_shard    here
// test_shared_params_separate_*_error      nowhere: a parameter is in one unit
// test_gradient_accumulation               here
// test_reset_iter_state_after_exception    T:values: "a batch that fails in a pass ..."
// test_double_forward_*                    here, in one pass. Two are refused, T:mistakes:
//                                          "forward() twice"
// test_to_float64_after_init               T:values, refused: "each mistake with values ..."
// test_param_registration_after_*          T:values: "the values of two layers ... exist at a time"
// test_train_parity_hsdp                   here: a group shares the state, all ranks the values
// test_clip_grad_norm_1d                   here, of test_fully_shard_clip_grad_norm_.py
//
// test_state_dict, test_collect_shards     here, of joinable's rules. torch::Optimizer has it in a
//                                          Checkpoint: T:optimizer
// test_lr_scheduler                        T:optimizer: "a scheduler of libtorch sets the rate ..."
// test_constructor                         T:optimizer: "what is wrong with an optimizer ..."
// test_step, test_step_with_closure,
// test_zero_join_cpu                       T:optimizer: "sharded, libtorch's optimizers step ..."
// test_zero_join_gpu                       T:devices
// test_sharding                            T:optimizer: "each rank has an optimizer ..."
// test_add_param_group,
// test_multiple_param_groups               here, and T:optimizer: "groups of libtorch's ..."
// test_nondefault_process_group            here
// test_local_optimizer_parity              T:optimizer, as test_step
// test_zero_model_parallel                 nowhere: an optimizer is on one device
// test_ddp_zero_overlap                    T:sharded: "owners of a libtorch module step ..."
#include <joinable/interop/torch_sharded.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/zero.hpp>

namespace {

using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using namespace joinable_tests::small_net;
using torch::Tensor;

auto const adam_of_model = [](std::vector<Tensor> mine) {
    return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{1e-2}};
};
template <class Net>
Net in_double(Net net) {
    net->to(torch::kDouble);
    fill(*net);
    return net;
}
/// Each parameter once. Tied ones are listed twice.
std::vector<Tensor> distinct_of(torch::nn::Module const& module) {
    std::vector<Tensor> distinct;
    for (Tensor const& tensor : module.parameters()) {
        auto const is_tensor = [&](Tensor const& other) { return other.is_same(tensor); };
        if (std::none_of(distinct.begin(), distinct.end(), is_tensor)) {
            distinct.push_back(tensor);
        }
    }
    return distinct;
}

// -- values in parts beside DistributedDataParallel -----------------------------------------------

void check_values(torch::nn::Module const& module, torch::nn::Module const& expected) {
    auto const values = module.parameters();
    auto const others = expected.parameters();
    REQUIRE(values.size() == others.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        CHECK(torch::allclose(values[i], others[i], 0, 1e-9));
    }
}

/// Keeps the values of a module while the result lives.
using Use = std::function<std::shared_ptr<void>(torch::nn::Module const&)>;
Use const use_nothing = [](torch::nn::Module const&) { return nullptr; };
template <class Sharded>
Use use_of(Sharded& sharded) {
    return [&](torch::nn::Module const& part) {
        return std::make_shared<typename Sharded::HeldValues>(sharded.use(part));
    };
}

/// Trains by libtorch's Adam on each rank, and by the same in parts. The pass returns a loss.
/// Compiled once for each class of nets.
template <class Net>
void check_parity(
    std::function<Net()> const& make,
    std::function<Tensor(int rank, int pass)> const& inputs,
    std::function<Tensor(Net&, Tensor const&, Use const&)> const& pass,
    ShardedOptions const& options,
    int passes_of_a_step = 1
) {
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        CAPTURE(comm.size());
        auto alike = make();
        auto model = make();
        auto optimizer = adam_of_model(distinct_of(*alike));
        joinable::torch::DistributedDataParallel ddp{comm, alike};
        joinable::torch::ShardedDataParallel sharded{comm, model, adam_of_model, options};
        Use const use = use_of(sharded);
        for (int step = 0; step < 10; ++step) {
            CAPTURE(step);
            alike->zero_grad(step % 2 == 0);
            model->zero_grad(step % 2 == 0);
            for (int k = 0; k < passes_of_a_step; ++k) {
                Tensor const batch = inputs(comm.rank(), step * passes_of_a_step + k);
                joinable::RoundNotice const notice{.will_sync = k + 1 == passes_of_a_step};
                Tensor const expected =
                    ddp.forward([&] { return pass(alike, batch, use_nothing); }, notice);
                Tensor const loss =
                    sharded.forward([&] { return pass(model, batch, use); }, notice);
                CHECK(torch::equal(loss, expected));
                expected.backward();
                loss.backward();
            }
            optimizer.step();
            sharded.step();
        }
        auto const held = sharded.use_all();
        auto const values = model->parameters();
        for (std::size_t i = 0; i < values.size(); ++i) {
            CHECK(torch::equal(values[i], alike->parameters()[i]));
        }
    });
}
ShardedOptions in_units(std::vector<std::size_t> units) {
    return {.sharding = Sharding::parameters, .units = std::move(units)};
}

auto const rows_of_model = [](torch::nn::Sequential& net, Tensor x, Use const& use) {
    for (auto& layer : *net) {
        auto const held = use(*layer.ptr());
        x = layer.forward(x);
    }
    return x.sum();
};

// test_train_parity_single_group_shard_dim0, test_train_parity_multi_group,
// test_gradient_accumulation
TEST_CASE("ten steps of a libtorch module in parts have the losses and the values of DDP's") {
    struct Widths {
        std::int64_t in, hidden, out;
    };
    for (Widths const& widths : {Widths{16, 15, 8}, Widths{7, 15, 3}, Widths{16, 17, 8}}) {
        auto const make = [&] {
            return in_double(torch::nn::Sequential{
                torch::nn::Linear{widths.in, widths.hidden},
                torch::nn::ReLU{},
                torch::nn::Linear{widths.hidden, widths.out}
            });
        };
        auto const inputs = [&](int rank, int) { return numbers({4, widths.in}, 40 + rank); };
        auto const at_once = [](torch::nn::Sequential& net, Tensor const& x, Use const& use) {
            auto const held = use(*net);
            return net->forward(x).sum();
        };
        check_parity<torch::nn::Sequential>(make, inputs, at_once, in_units({4}));
        check_parity<torch::nn::Sequential>(make, inputs, rows_of_model, in_units({2, 2}));
        for (Sharding const sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
            check_parity<torch::nn::Sequential>(
                make, inputs, rows_of_model, {.sharding = sharding}
            );
        }
    }
    auto const deep = [] {
        torch::nn::Sequential net;
        for (int k = 0; k < 5; ++k) {
            net->push_back(torch::nn::Linear{6, 6});
            net->push_back(torch::nn::Tanh{});
        }
        return in_double(net);
    };
    auto const inputs = [](int rank, int pass) { return numbers({3, 6}, 5 * rank + pass); };
    check_parity<torch::nn::Sequential>(deep, inputs, rows_of_model, in_units({2, 2, 2, 2, 2}));
    check_parity<torch::nn::Sequential>(deep, inputs, rows_of_model, in_units({2, 2, 2, 2, 2}), 3);
    check_parity<torch::nn::Sequential>(
        deep, inputs, rows_of_model, {.sharding = Sharding::gradients}, 3
    );
}

struct MultiForwardImpl : torch::nn::Module {
    torch::nn::Linear inner = register_module("inner", torch::nn::Linear{4, 4});
    torch::nn::Linear outer = register_module("outer", torch::nn::Linear{4, 5});
};
TORCH_MODULE(MultiForward);

// test_multi_forward_module, test_double_forward_with_nested_fsdp_and_checkpoint
TEST_CASE("a layer that a pass of a libtorch module in parts runs twice trains as DDP's does") {
    auto const make = [] { return in_double(MultiForward{}); };
    auto const inputs = [](int rank, int step) { return numbers({6, 4}, 7 * rank + step); };
    auto const twice = [](MultiForward& net, Tensor const& x, Use const& use) {
        Tensor both;
        {
            auto const held = use(*net->inner);
            both = net->inner->forward(x) + net->inner->forward(x.cos());
        }
        auto const held = use(*net->outer);
        return net->outer->forward(both).sum();
    };
    auto const two_batches = [](MultiForward& net, Tensor const& x, Use const& use) {
        auto const held = use(*net);
        auto const run = [&](Tensor const& batch) {
            return net->outer->forward(torch::tanh(net->inner->forward(batch))).sum();
        };
        return (run(x) - run(x.cos())).pow(2);
    };
    check_parity<MultiForward>(make, inputs, twice, in_units({2, 2}));
    check_parity<MultiForward>(make, inputs, two_batches, in_units({2, 2}));
}

/// Words in, the next ones out, by the same weight.
struct TiedImpl : torch::nn::Module {
    explicit TiedImpl(std::int64_t words)
        : table{register_module("table", torch::nn::Embedding{words, 6})},
          hidden{register_module("hidden", torch::nn::Linear{6, 6})} {
        register_parameter("head", table->weight);
    }
    torch::nn::Embedding table;
    torch::nn::Linear hidden;
};
TORCH_MODULE(Tied);

// test_train_parity_with_shared_params, test_train_shared_params_uneven_shard
TEST_CASE("tied weights of a libtorch module in parts train as DDP's do, all of their rows") {
    static constexpr std::int64_t words = 17; // which no number of ranks here divides
    auto const make = [] { return in_double(Tied{words}); };
    auto const inputs = [](int rank, int step) {
        return (torch::arange(8, torch::kLong) * 3 + 5 * rank + step) % words;
    };
    auto const pass = [](Tied& net, Tensor const& text, Use const& use) {
        auto const table = use(*net->table); // kept, as its weight is used again
        Tensor x = net->table->forward(text);
        {
            auto const held = use(*net->hidden);
            x = torch::tanh(net->hidden->forward(x));
        }
        Tensor const scores = torch::linear(x, net->table->weight);
        return torch::nn::functional::cross_entropy(scores, text);
    };
    check_parity<Tied>(make, inputs, pass, in_units({1, 2}));
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        Tied model = make();
        Tensor const before = model->table->weight.detach().clone();
        joinable::torch::ShardedDataParallel sharded{
            comm,
            model,
            joinable::Adam{.learning_rate = 1e-2},
            {.sharding = Sharding::parameters, .partition = joinable::Partition::flat}
        };
        Use const use = use_of(sharded);
        sharded.forward([&] { return pass(model, inputs(comm.rank(), 0), use); }).backward();
        sharded.step();
        auto const held = sharded.use_all();
        CHECK((model->table->weight - before).abs().sum(1).ne(0).all().item<bool>());
    });
}

/// A normalisation without bias, which libtorch's C++ does not have.
struct ScaledNormImpl : torch::nn::Module {
    explicit ScaledNormImpl(std::int64_t width)
        : scale{register_parameter("scale", torch::ones({width}))} {}
    Tensor forward(Tensor const& x) { return torch::layer_norm(x, scale.sizes(), scale); }
    Tensor scale;
};
TORCH_MODULE(ScaledNorm);

struct PerceptronImpl : torch::nn::Module {
    PerceptronImpl(std::int64_t width, std::int64_t factor)
        : in{register_module("in", torch::nn::Linear{width, factor * width})},
          out{register_module("out", torch::nn::Linear{factor * width, width})} {}
    Tensor forward(Tensor const& x) {
        return torch::relu(out->forward(torch::relu(in->forward(x))));
    }
    torch::nn::Linear in, out;
};
TORCH_MODULE(Perceptron);

// test_train_parity_hsdp
TEST_CASE("groups that share libtorch's values or state train in micro-batches as DDP does") {
    for (std::int64_t const width : {3, 16, 17}) {
        CAPTURE(width);
        auto const make = [&] {
            return in_double(torch::nn::Sequential{
                ScaledNorm{width}, Perceptron{width, 3}, Perceptron{width, 4}, Perceptron{width, 3}
            });
        };
        auto const inputs = [&](int rank, int pass) {
            return numbers({8, width}, 5 * rank + pass);
        };
        check_parity<torch::nn::Sequential>(make, inputs, rows_of_model, in_units({1, 4, 4, 4}), 3);
        for (bool const syncs_each : {false, true}) {
            run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
                ThreadCommunicator node = comm.split(comm.rank() / 2, comm.rank());
                auto alike = make();
                auto model = make();
                auto optimizer = adam_of_model(alike->parameters());
                joinable::torch::DistributedDataParallel whole{comm, alike};
                joinable::torch::DistributedDataParallel ddp{comm, model};
                joinable::ZeroRedundancyOptimizer zero{
                    comm,
                    node,
                    joinable::torch::parameters(model),
                    joinable::Adam{.learning_rate = 1e-2}
                };
                for (int step = 0; step < 5; ++step) {
                    CAPTURE(step);
                    for (int micro = 0; micro < 3; ++micro) {
                        Tensor const batch = inputs(comm.rank(), 3 * step + micro);
                        joinable::RoundNotice const notice{.will_sync = syncs_each || micro == 2};
                        Tensor const expected = whole.forward(batch).sum();
                        Tensor const loss = ddp.forward(notice, batch).sum();
                        CHECK(torch::allclose(loss, expected, 1e-9, 0));
                        expected.backward();
                        loss.backward();
                    }
                    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
                        Tensor const& mean = alike->parameters()[i].grad();
                        CHECK(torch::allclose(model->parameters()[i].grad(), mean, 1e-9, 1e-12));
                    }
                    optimizer.step();
                    zero.step();
                    check_values(*model, *alike);
                    alike->zero_grad(step % 2 == 0);
                    model->zero_grad(step % 2 == 0);
                }
                std::vector<std::size_t> bytes{zero.state_bytes()};
                joinable::all_reduce(node, bytes).wait();
                CHECK(bytes[0] == 2 * sizeof(double) * numbers_of(*model).size());
            });
        }
    }
}

/// Tokens in, scores of the next ones out, by the same weight.
struct TextImpl : torch::nn::Module {
    static constexpr std::int64_t words = 8, length = 16, width = 16, heads = 4, depth = 2;

    TextImpl() {
        table = register_module("table", torch::nn::Embedding{words, width});
        places = register_module("places", torch::nn::Embedding{length, width});
        auto const options = torch::nn::TransformerEncoderLayerOptions(width, heads)
                                 .dim_feedforward(4 * width)
                                 .dropout(0);
        for (std::int64_t k = 0; k < depth; ++k) {
            layers.push_back(register_module(
                "layer" + std::to_string(k), torch::nn::TransformerEncoderLayer{options}
            ));
        }
        norm = register_module("norm", torch::nn::LayerNorm{torch::nn::LayerNormOptions{{width}}});
    }
    Tensor forward(Tensor const& text, Use const& use) {
        auto const held_table = use(*table);
        Tensor x = table->forward(text);
        {
            auto const held = use(*places);
            x = (x + places->forward(torch::arange(length, torch::kLong))).transpose(0, 1);
        }
        for (auto& layer : layers) {
            auto const held = use(*layer);
            x = layer->forward(x);
        }
        auto const held = use(*norm);
        return torch::linear(norm->forward(x.transpose(0, 1)), table->weight);
    }

    torch::nn::Embedding table{nullptr}, places{nullptr};
    std::vector<torch::nn::TransformerEncoderLayer> layers;
    torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Text);

// test_clip_grad_norm_1d. Values show the clipped gradients by SGD at rate 1: Adam's steps hide a
// factor that all gradients have.
TEST_CASE("a libtorch module in any sharding is clipped by the norm of DDP's, of each type") {
    constexpr double max_norm = 1;
    auto const sgd = [](std::vector<Tensor> mine) {
        return torch::optim::SGD{std::move(mine), torch::optim::SGDOptions{1}};
    };
    for (double const norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
        CAPTURE(norm_type);
        auto const is_above = [&](Tensor const& gradient) {
            return gradient.norm(norm_type).item<double>() > max_norm;
        };
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            auto const text = torch::arange(3 * TextImpl::length, torch::kLong)
                                  .mul(3 + comm.rank())
                                  .remainder(TextImpl::words)
                                  .view({3, TextImpl::length});
            for (Sharding const sharding :
                 {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
                CAPTURE(static_cast<int>(sharding));
                auto alike = in_double(Text{});
                auto model = in_double(Text{});
                auto const values = distinct_of(*alike);
                auto optimizer = sgd(values);
                ShardedOptions options{.sharding = sharding};
                if (sharding == Sharding::parameters) {
                    options.units = {1, 1, 12, 12, 2};
                }
                joinable::torch::DistributedDataParallel ddp{comm, alike};
                joinable::torch::ShardedDataParallel sharded{comm, model, sgd, options};
                Use const use = use_of(sharded);
                for (int step = 0; step < 10; ++step) {
                    CAPTURE(step);
                    alike->zero_grad();
                    model->zero_grad();
                    auto const loss_of_text = [&](Text& net, Use const& held) {
                        return net->forward(text, held).sum() * 1000;
                    };
                    Tensor const expected =
                        ddp.forward([&] { return loss_of_text(alike, use_nothing); });
                    Tensor const loss = sharded.forward([&] { return loss_of_text(model, use); });
                    CHECK(torch::allclose(loss, expected, 1e-9, 1e-9));
                    expected.backward();
                    loss.backward();
                    for (Tensor const& value : values) {
                        CHECK(is_above(value.grad())); // else clipping would show little
                    }
                    double const norm =
                        torch::nn::utils::clip_grad_norm_(values, max_norm, norm_type);
                    for (Tensor const& value : values) {
                        CHECK(!is_above(value.grad()));
                    }
                    sharded.clip_grad_norm_(max_norm, norm_type);
                    optimizer.step();
                    sharded.step();
                    CHECK(sharded.grad_norm() == doctest::Approx(norm).epsilon(1e-9));
                    auto const held = sharded.use_all();
                    check_values(*model, *alike);
                }
            }
        });
    }
}

// As in T: "a gradient penalty is no backward pass ...", for DDP
TEST_CASE("a gradient penalty of a sharded libtorch module trains as that of DDP") {
    auto const penalised = [](Tensor const& outputs, Tensor const& inputs) {
        Tensor const slope =
            torch::autograd::grad({outputs.sum()}, {inputs}, {}, true, /*create_graph=*/true)[0];
        return outputs.pow(2).sum() + slope.pow(2).sum();
    };
    for (Sharding const sharding : {Sharding::optimizer, Sharding::gradients}) {
        run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
            auto const make = [] {
                return in_double(torch::nn::Sequential{
                    torch::nn::Linear{3, 4}, torch::nn::Tanh{}, torch::nn::Linear{4, 1}
                });
            };
            auto alike = make();
            auto model = make();
            auto optimizer = adam_of_model(alike->parameters());
            joinable::torch::DistributedDataParallel ddp{comm, alike};
            joinable::torch::ShardedDataParallel sharded{
                comm, model, adam_of_model, {.sharding = sharding}
            };
            for (int step = 0; step < 10; ++step) {
                alike->zero_grad(true);
                model->zero_grad(true);
                Tensor const inputs = numbers({2, 3}, 3 * comm.rank() + step).requires_grad_(true);
                penalised(ddp.forward(inputs), inputs).backward();
                optimizer.step();
                penalised(sharded.forward(inputs), inputs).backward();
                sharded.step();
            }
            check_close(numbers_of(*model), numbers_of(*alike));
        });
    }
}

// -- optimizers -----------------------------------------------------------------------------------

/// The state of a parameter that libtorch's Adam has.
template <class Optimizer>
torch::optim::AdamParamState const& state_in(Optimizer& optimizer, Tensor const& tensor) {
    auto& states = optimizer.state();
    using Key = typename std::remove_cvref_t<decltype(states)>::key_type;
    if constexpr (std::is_same_v<Key, std::string>) { // before libtorch 2.2
        std::ostringstream text;
        text << tensor.unsafeGetTensorImpl();
        return static_cast<torch::optim::AdamParamState&>(*states.at(text.str()));
    } else {
        return static_cast<torch::optim::AdamParamState&>(*states.at(tensor.unsafeGetTensorImpl()));
    }
}

// test_state_dict, test_collect_shards
TEST_CASE("the state of a libtorch model is gathered as libtorch has it on one rank, and loaded") {
    run_ranks({1, 2, 3, 4}, [](ThreadCommunicator& comm) {
        auto const options = torch::optim::AdamOptions{0.1}.amsgrad(true);
        joinable::Adam const rule{.learning_rate = 0.1, .amsgrad = true};
        SmallNet alone, model;
        torch::optim::Adam optimizer{alone->parameters(), options};
        joinable::ZeroRedundancyOptimizer zero{comm, joinable::torch::parameters(model), rule};
        auto const compute_gradients = [&](int step) {
            for (SmallNet const& net : {alone, model}) {
                double shift = step;
                for (Tensor const& parameter : net->parameters()) {
                    parameter.mutable_grad() = numbers(parameter.sizes(), ++shift);
                }
            }
        };
        for (int step = 0; step < 3; ++step) {
            compute_gradients(step);
            optimizer.step();
            zero.step();
        }
        int const root = comm.size() - 1;
        zero.consolidate(root);
        joinable::OptimizerState<joinable::Adam> gathered;
        if (comm.rank() == root) {
            gathered = zero.state();
            auto const parameters = alone->parameters();
            REQUIRE(gathered.parameters.size() == parameters.size());
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                auto const& expected = state_in(optimizer, parameters[i]);
                auto const& state = gathered.parameters[i];
                CHECK(static_cast<std::int64_t>(state.steps) == expected.step());
                REQUIRE(state.tensors.size() == 3);
                Tensor const tensors[] = {
                    expected.exp_avg(), expected.exp_avg_sq(), expected.max_exp_avg_sq()
                };
                char const* const names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
                for (std::size_t k = 0; k < 3; ++k) {
                    joinable::StateTensor const& tensor = state.tensors[k];
                    CHECK(tensor.name == names[k]);
                    CHECK(tensor.dtype == joinable::DType::f64);
                    std::vector<std::byte> bytes = tensor.elements;
                    Tensor const is =
                        torch::from_blob(bytes.data(), tensors[k].sizes(), torch::kDouble);
                    CHECK(torch::allclose(is, tensors[k], 1e-13, 1e-15));
                }
            }
        }
        joinable::ZeroRedundancyOptimizer other{
            comm,
            joinable::torch::parameters(model),
            joinable::Adam{.amsgrad = true},
            {.partition = joinable::Partition::flat}
        };
        other.load(gathered, root);
        for (int step = 3; step < 6; ++step) {
            compute_gradients(step);
            optimizer.step();
            other.step();
        }
        check_close(numbers_of(*model), numbers_of(*alone));
    });
}

// test_add_param_group, test_multiple_param_groups, test_zero_join_cpu
TEST_CASE("weights and biases in groups of their own train as libtorch's groups on one rank") {
    namespace optim = torch::optim;
    auto const of_weights = optim::SGDOptions{0.1}.momentum(0.9).weight_decay(0.01);
    auto const of_biases = optim::SGDOptions{0.05}.momentum(0.5);
    auto const deal = [](SmallNet const& net) { // weights, then biases
        std::pair<std::vector<Tensor>, std::vector<Tensor>> groups;
        for (Tensor const& parameter : net->parameters()) {
            (parameter.dim() == 2 ? groups.first : groups.second).push_back(parameter);
        }
        return groups;
    };
    auto const made_by = [](optim::SGDOptions const& options) {
        return [options](std::vector<Tensor> mine) { return optim::SGD{std::move(mine), options}; };
    };
    run_ranks({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        SmallNet alone;
        auto const [weights, biases] = deal(alone);
        std::vector<optim::OptimizerParamGroup> groups;
        groups.emplace_back(weights, std::make_unique<optim::SGDOptions>(of_weights));
        groups.emplace_back(biases, std::make_unique<optim::SGDOptions>(of_biases));
        // Since libtorch 2.15 these are what a group has left as libtorch's own defaults.
        optim::SGD optimizer{groups, optim::SGDOptions{0.05}};
        for (int round = 0; round < rounds; ++round) {
            alone->zero_grad(true);
            for (int rank = 0; rank < comm.size() && round < rounds_of(rank); ++rank) {
                Tensor const outputs = alone->forward(inputs_of(rank, round));
                (loss_of(outputs, rank, round) / comm.size()).backward();
            }
            optimizer.step();
        }
        SmallNet model;
        auto const [own_weights, own_biases] = deal(model);
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        joinable::torch::Optimizer zero{comm, own_weights, made_by(of_weights)};
        zero.add_parameter_group(own_biases, made_by(of_biases));
        joinable::Join guard{joinable::participants(ddp, zero)};
        for (int round = 0; round < rounds_of(comm.rank()); ++round) {
            model->zero_grad(true);
            loss_of(ddp.forward(inputs_of(comm.rank(), round)), comm.rank(), round).backward();
            zero.step();
        }
        guard.finish();
        check_close(numbers_of(*model), numbers_of(*alone));
    });
}

// test_nondefault_process_group
TEST_CASE("every other rank shares libtorch's state in a group of its own") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& all) {
        ThreadCommunicator comm = all.split(all.rank() % 2, all.rank());
        auto const adam = [](std::vector<Tensor> mine) {
            return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{0.1}};
        };
        Training const expected = train_alone(comm.size(), adam);
        SmallNet model;
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        joinable::torch::Optimizer zero{comm, joinable::torch::parameters(model), adam};
        joinable::Join guard{joinable::participants(ddp, zero)};
        for (int round = 0; round < rounds_of(comm.rank()); ++round) {
            zero.local().param_groups()[0].options().set_lr(rate_of(round));
            model->zero_grad(true);
            loss_of(ddp.forward(inputs_of(comm.rank(), round)), comm.rank(), round).backward();
            zero.step();
        }
        guard.finish();
        check_close(numbers_of(*model), expected.values);
    });
}

} // namespace
