// SPDX-License-Identifier: BSL-1.0
// What PyTorch's tests of DistributedDataParallel (2.15) expect, said of libtorch modules. The oracles: one process
// that computes all ranks' losses in double, and closed forms. The tests of CommonDistributedDataParallelTest
// (test_c10d_common.py) and DistributedDataParallelTest (test_c10d_gloo.py, test_c10d_nccl.py), then some of
// distributed_test.py, and where each is here: in this file, in torch.test.cpp (T) or another torch_NAME.test.cpp
// (T:NAME), in participant/upstream.test.cpp (U), or nowhere, and why.
//
// test_ddp_checkpointing_once, _twice,
// _twice_static_graph, _unused_params,
// _weight_sharing, _twice_weight_sharing   here. C++ has re-entrant checkpoints alone
// test_ddp_checkpointing_dynamic_module,
// _dynamic_weight_sharing                  nowhere: re-entrant ones are refused there. Branches without them: T:drawn
// test_multiple_outputs_multiple_backward  here, refused: all losses of a pass go into one backward pass
// test_single_dtype_*, test_multi_dtype_*,
// test_fp16                                here
// test_channels_last_contig,
// test_grad_layout_*                       here, and U
// test_param_layout_mismatch_error         here, and U
// test_ignored_output                      here
// test_accumulate_gradients_module         here, refused without no_sync(); T: "rounds in no_sync() accumulate ..."
// test_failure_recovery                    here, and U
// test_ddp_comm_hook_*, test_powerSGD_*,
// test_*_ddp_comm_hooks_nccl               here. That a hook is registered once, what it takes and what it returns:
//                                          nowhere, a reduction is a type that is given once
// test_invalid_powerSGD_state              nowhere: each start of PowerSgd works with each setting
// test_gloo_backend_cpu_module             here, over sockets; T, over threads and processes
// test_*_backend_*gpu_module*              T:devices
// test_global_local_unused_params_grad,
// test_find_unused_parameters_*            T: "parameters that the outputs do not use ...", T:mistakes, and U
// test_dataclass_output*,
// test_arbitrary_forward_return_value      T: "with find_unused a pass returns what can be looked into"
// test_sparse_gradients*                   T:module
// test_ignored_sharded_tensor              T:module: a parameter is ignored by its name
// test_save_load_checkpoint                T: "a training goes on from what one rank has written ..."
// test_no_grad                             T: "a forward pass without a graph is an evaluation"
// test_ddp_weight_sharing                  T: "... tied weights are averaged once"
// test_ddp_complex_params                  T: "complex parameters ..."
// test_sync_batch_norm_*                   T:sync_batch_norm
// test_ddp_buffer_sync_multi_forward_*     T:mistakes: "forward() twice"
// test_ddp_with_lazy_parameters            nowhere: libtorch has no lazy modules in C++
// test_pass_default_pg                     nowhere: no group is the default one
//
// test_ddp_multiple_nested_unused_params_* here
// test_output_unused_in_loss_*             here, refused: the loss goes into the pass
// test_invalid_static_graph                here
// test_ddp_new_tensor_in_fwd*,
// test_ddp_returns_tensor_with_no_grad     here
// test_ddp_inference                       here
// test_ddp_buffer_hook_allreduce*          here
// test_ddp_create_graph                    T:mistakes: "create_graph"
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>
#include <support/socket_ranks.hpp>
#include <support/torch_small_net.hpp>

#include <joinable/algorithms.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/compression.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/join/round.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace {

using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using joinable_tests::small_net::fill;
using joinable_tests::small_net::numbers;
using joinable_tests::small_net::refusal;
using joinable_tests::small_net::RunsBlockAgain;
using torch::Tensor;

/// The gradients of the mean of `loss(rank)` over the ranks, which one process computes by its own module.
std::vector<Tensor>
mean_gradients(torch::nn::Module const& alone, int ranks, std::function<Tensor(int)> const& loss) {
    std::vector<Tensor> const trained = alone.parameters();
    std::vector<Tensor> means(trained.size());
    for (int rank = 0; rank < ranks; ++rank) {
        auto const own = torch::autograd::grad({loss(rank) / ranks}, trained, {}, {}, false, true);
        for (std::size_t k = 0; k < own.size(); ++k) {
            if (own[k].defined()) {
                means[k] = means[k].defined() ? means[k] + own[k] : own[k];
            }
        }
    }
    return means;
}
void check_gradients(
    torch::nn::Module const& module, std::vector<Tensor> const& expected, double tolerance = 1e-12
) {
    std::vector<Tensor> const trained = module.parameters();
    REQUIRE(trained.size() == expected.size());
    for (std::size_t k = 0; k < trained.size(); ++k) {
        CAPTURE(k);
        Tensor const gradient = trained[k].grad();
        REQUIRE(gradient.defined() == expected[k].defined());
        if (gradient.defined()) {
            Tensor const error = gradient.to(torch::kDouble) - expected[k].to(torch::kDouble);
            CHECK(error.abs().max().item<double>() <= tolerance);
        }
    }
}
bool has(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

/// A layer whose weight may be that of another one. It computes in its own type, by operations that libtorch has on the
/// host for each of them.
struct LayerImpl : torch::nn::Module {
    explicit LayerImpl(Tensor const& weight_or_none = {}, c10::ScalarType type = torch::kDouble)
        : weight{register_parameter(
              "weight", weight_or_none.defined() ? weight_or_none : torch::zeros({3, 3}, type)
          )},
          bias{register_parameter("bias", torch::zeros({3}, type))} {}
    Tensor forward(Tensor const& inputs) {
        return (inputs.to(weight.scalar_type()).unsqueeze(1) * weight).sum(2) + bias;
    }

    Tensor weight, bias;
};
TORCH_MODULE(Layer);

struct TwoLayersImpl : torch::nn::Module {
    explicit TwoLayersImpl(
        bool shares_weight = false,
        c10::ScalarType first_type = torch::kDouble,
        c10::ScalarType second_type = torch::kDouble
    )
        : first{register_module("first", Layer{Tensor{}, first_type})},
          second{register_module(
              "second", Layer{shares_weight ? first->weight : Tensor{}, second_type}
          )} {
        fill(*this);
    }
    Tensor forward(Tensor const& inputs) { return second->forward(first->forward(inputs).pow(2)); }

    Layer first, second;
};
TORCH_MODULE(TwoLayers);

Tensor inputs_of(int rank) {
    return numbers({2, 3}, 10 + rank);
}
Tensor loss_of(Tensor const& outputs) {
    return (outputs.to(torch::kDouble) - 0.25).pow(2).sum();
}

// -- layers that run again in the backward pass ------------------------------------------------------

enum class Checkpoint { once, twice, whole };

/// Keeps what runs again until the backward pass has run.
struct Checkpointed {
    TwoLayers model;
    Checkpoint kind;
    RunsBlockAgain::Run second = [this](Tensor const& x) { return model->second->forward(x); };
    RunsBlockAgain::Run whole = [this](Tensor const& x) { return model->forward(x); };

    [[nodiscard]] Tensor forward(Tensor const& inputs, bool runs_again) {
        auto const run = [&](RunsBlockAgain::Run const& block, Tensor const& x) {
            return runs_again ? RunsBlockAgain::apply(x, &block) : block(x);
        };
        if (kind == Checkpoint::whole) {
            return run(whole, inputs);
        }
        Tensor const outputs = run(second, model->first->forward(inputs).pow(2));
        return kind == Checkpoint::twice ? run(second, outputs) : outputs;
    }
};

/// Three rounds. Returns what refuses them.
std::string train_checkpointed(
    ThreadCommunicator& comm,
    Checkpoint kind,
    bool shares_weight,
    DataParallelOptions const& options
) {
    auto const inputs = [](int rank) { return inputs_of(rank).requires_grad_(true); };
    Checkpointed alone{TwoLayers{shares_weight}, kind};
    auto const expected = mean_gradients(*alone.model, comm.size(), [&](int rank) {
        return loss_of(alone.forward(inputs(rank), false));
    });
    Checkpointed net{TwoLayers{shares_weight}, kind};
    ThreadCommunicator own = comm.split(0, comm.rank()); // a refusal ends it
    joinable::torch::DistributedDataParallel ddp{own, net.model, options};
    return refusal([&] {
        for (int round = 0; round < 3; ++round) {
            net.model->zero_grad(false);
            Tensor const outputs =
                ddp.forward([&] { return net.forward(inputs(comm.rank()), true); });
            loss_of(outputs).backward();
            check_gradients(*net.model, expected);
        }
    });
}

// test_ddp_checkpointing_once, _twice_static_graph, _weight_sharing, _twice_weight_sharing, and with static_graph
// _unused_params
TEST_CASE("layers that run again in the backward pass are averaged, also those that share a weight"
) {
    for (bool const views : {false, true}) {
        for (bool const is_static : {false, true}) {
            run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
                DataParallelOptions const options{
                    .gradient_as_bucket_view = views,
                    .find_unused = is_static, // which static_graph ignores
                    .static_graph = is_static
                };
                for (bool const shares_weight : {false, true}) {
                    for (auto const kind :
                         {Checkpoint::once, Checkpoint::twice, Checkpoint::whole}) {
                        bool const runs_once = kind != Checkpoint::twice &&
                                               (!shares_weight || kind == Checkpoint::whole);
                        if (is_static || runs_once) {
                            CHECK(train_checkpointed(comm, kind, shares_weight, options).empty());
                        }
                    }
                }
            });
        }
    }
}

// test_ddp_checkpointing_twice, _unused_params
TEST_CASE(
    "layers that run again are refused where PyTorch refuses them, by a sentence that names one"
) {
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            std::string text = train_checkpointed(
                comm, Checkpoint::twice, false, {.gradient_as_bucket_view = views}
            );
            CHECK(has(text, "second."));
            CHECK(has(text, "was marked ready twice in an iteration"));
            CHECK(has(text, "turn static_graph on, which counts its uses"));
            for (auto const kind : {Checkpoint::once, Checkpoint::twice}) {
                text = train_checkpointed(
                    comm, kind, false, {.gradient_as_bucket_view = views, .find_unused = true}
                );
                CHECK(has(text, "second."));
                CHECK(has(text, "turn static_graph on in place of find_unused"));
            }
        });
    }
}

// -- losses and outputs ------------------------------------------------------------------------------

/// Two outputs of two layers.
struct TwoOutputsImpl : torch::nn::Module {
    TwoOutputsImpl() { fill(*this); }
    std::tuple<Tensor, Tensor> forward(Tensor const& inputs) {
        return {a->forward(inputs), b->forward(inputs)};
    }

    Layer a = register_module("a", Layer{}), b = register_module("b", Layer{});
};
TORCH_MODULE(TwoOutputs);

char const* const outputs_of_no_loss =
    "not all gradients became ready; give those that the pass does not use to backward() or prepare_for_backward() as "
    "unused, or check that all outputs of forward reach the loss";

// test_multiple_outputs_multiple_backward: PyTorch ends its reduction with the last gradient, joinable with the first
// backward pass
TEST_CASE("two losses of one pass have one backward pass, and a sentence refuses two") {
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& all) {
            TwoOutputs alone;
            auto const expected = mean_gradients(*alone, all.size(), [&](int rank) {
                auto const [a, b] = alone->forward(inputs_of(rank));
                return loss_of(a) + loss_of(b);
            });
            for (bool const finds_unused : {false, true}) {
                ThreadCommunicator comm = all.split(0, all.rank());
                TwoOutputs model;
                joinable::torch::DistributedDataParallel ddp{
                    comm, model, {.gradient_as_bucket_view = views, .find_unused = finds_unused}
                };
                for (int round = 0; round < 2; ++round) {
                    model->zero_grad();
                    auto const [a, b] = ddp.forward(inputs_of(comm.rank()));
                    torch::autograd::backward({loss_of(a), loss_of(b)}, {Tensor{}, Tensor{}});
                    check_gradients(*model, expected);
                }
                auto const [a, b] = ddp.forward(inputs_of(comm.rank()));
                std::string const text = refusal([&, first = a] { loss_of(first).backward(); });
                CHECK(has(text, "not all gradients became ready"));
                CHECK(has(text, "parameter 2 (b.weight), parameter 3 (b.bias)"));
                CHECK(has(text, outputs_of_no_loss) == finds_unused);
            }
        });
    }
}

// test_output_unused_in_loss_tuple_module, _dict_module
TEST_CASE(
    "an output that the loss does not use is refused, and left out of a pass that has the loss"
) {
    run_ranks({2, 3}, [](ThreadCommunicator& all) {
        TwoOutputs alone;
        auto const loss = [](TwoOutputs& net, Tensor const& inputs, bool uses_both) {
            auto const [a, b] = net->forward(inputs);
            return uses_both ? loss_of(a * b) : loss_of(b);
        };
        auto const expected = [&](bool uses_both) {
            return mean_gradients(*alone, all.size(), [&](int rank) {
                return loss(alone, inputs_of(rank), uses_both);
            });
        };
        ThreadCommunicator comm = all.split(0, all.rank());
        TwoOutputs model;
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        Tensor const inputs = inputs_of(comm.rank());
        auto const train = [&](bool uses_both) {
            ddp.forward([&] { return loss(model, inputs, uses_both); }).backward();
        };
        train(false); // a has no gradient before, and none after
        check_gradients(*model, expected(false));
        model->zero_grad(true);
        train(true);
        check_gradients(*model, expected(true));
        Tensor const kept = model->a->weight.grad().clone();
        train(false); // what a has stays
        CHECK(torch::equal(model->a->weight.grad(), kept));
        std::string const text = refusal([&] {
            auto const outputs = ddp.forward(inputs);
            loss_of(std::get<1>(outputs)).backward();
        });
        CHECK(has(text, outputs_of_no_loss));
        CHECK(has(text, "parameter 0 (a.weight), parameter 1 (a.bias)"));

        ThreadCommunicator other = all.split(1, all.rank()); // a static graph finds out by itself
        TwoOutputs fixed;
        joinable::torch::DistributedDataParallel still{other, fixed, {.static_graph = true}};
        for (int round = 0; round < 3; ++round) {
            fixed->zero_grad();
            auto const outputs = still.forward(inputs);
            loss_of(std::get<1>(outputs)).backward();
            check_gradients(*fixed, expected(false));
        }
    });
}

// test_ignored_output, test_ignored_output_with_unused_parameters
TEST_CASE("outside a guard a module's outputs may be ignored, with a layer that is not used, too") {
    for (bool const finds_unused : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            auto const forward = [&](TwoOutputs& net, Tensor const& inputs) {
                return finds_unused ? net->b->forward(inputs)
                                    : loss_of(net->a->forward(inputs)) + net->b->forward(inputs);
            };
            TwoOutputs alone, model;
            auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                return loss_of(forward(alone, inputs_of(rank)));
            });
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.find_unused = finds_unused}
            };
            auto const pass = [&] { return forward(model, inputs_of(comm.rank())); };
            for (int round = 0; round < 4; ++round) {
                CHECK(ddp.forward(pass).requires_grad());
            }
            for (int round = 0; round < 4; ++round) {
                model->zero_grad();
                loss_of(ddp.forward(pass)).backward();
                check_gradients(*model, expected);
            }
        });
    }
}

// test_ddp_new_tensor_in_fwd, _static_graph; test_ddp_returns_tensor_with_no_grad
TEST_CASE("a pass may return tensors that it has made, which need no gradient") {
    for (bool const finds_unused : {false, true}) {
        for (bool const is_static : {false, true}) {
            run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
                TwoLayers alone, model;
                auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                    return loss_of(alone->forward(inputs_of(rank)));
                });
                joinable::torch::DistributedDataParallel ddp{
                    comm, model, {.find_unused = finds_unused, .static_graph = is_static}
                };
                Tensor made;
                for (int round = 0; round < 3; ++round) {
                    model->zero_grad();
                    auto const [outputs, of_round, nested] = ddp.forward([&] {
                        return std::tuple{
                            model->forward(inputs_of(comm.rank())),
                            made.defined() ? made : numbers({1, 3}, 0),
                            std::vector<Tensor>{numbers({1, 3}, 1)}
                        };
                    });
                    made = of_round;
                    CHECK(!made.grad_fn());
                    CHECK(!nested[0].grad_fn());
                    loss_of(outputs).backward();
                    check_gradients(*model, expected);
                }
            });
        }
    }
}

// -- names and graphs in error texts -----------------------------------------------------------------

/// As upstream's: of the layers in `inner` the passes use one.
struct NestedImpl : torch::nn::Module {
    struct InnerImpl : torch::nn::Module {
        torch::nn::Embedding table = register_module("table", torch::nn::Embedding{3, 3});
        Layer spare = register_module("spare", Layer{});
        Layer used = register_module("used", Layer{});
    };
    TORCH_MODULE(Inner);

    Tensor forward(Tensor const& inputs) { return inner->used->forward(inputs); }

    Inner inner = register_module("inner", Inner{});
};
TORCH_MODULE(Nested);

// test_ddp_multiple_nested_unused_params_error, _err_ignore_params
TEST_CASE("the text about unused parameters has their full names, and none of those used or ignored"
) {
    for (bool const ignores : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& all) {
            ThreadCommunicator comm = all.split(0, all.rank());
            Nested model;
            model->to(torch::kDouble);
            DataParallelOptions options;
            if (ignores) {
                options.ignore = {"inner.table.*"};
            }
            joinable::torch::DistributedDataParallel ddp{comm, model, options};
            std::string const text =
                refusal([&] { ddp.forward(inputs_of(comm.rank())).sum().backward(); });
            CAPTURE(text);
            CHECK(has(text, "turn the option find_unused or static_graph on"));
            CHECK(has(text, "(inner.spare.weight)"));
            CHECK(has(text, "(inner.spare.bias)"));
            CHECK(has(text, "(inner.table.weight)") == !ignores);
            CHECK(!has(text, "inner.used"));
        });
    }
}

// test_invalid_static_graph
TEST_CASE("a static graph that changes is refused, in each direction, by the names of what changed"
) {
    for (bool const first_uses_both : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& all) {
            ThreadCommunicator comm = all.split(0, all.rank());
            TwoOutputs model;
            joinable::torch::DistributedDataParallel ddp{comm, model, {.static_graph = true}};
            auto const train = [&](bool uses_both) {
                auto const outputs = ddp.forward(inputs_of(comm.rank()));
                Tensor const loss = loss_of(std::get<1>(outputs));
                (uses_both ? loss + loss_of(std::get<0>(outputs)) : loss).backward();
            };
            train(first_uses_both);
            std::string const text = refusal([&] { train(!first_uses_both); });
            CAPTURE(text);
            CHECK(has(text, "(a."));
            CHECK(!has(text, "(b."));
            CHECK(has(
                text,
                first_uses_both
                    ? "parameters are not used, but were in the first iteration: with static_graph all iterations use "
                      "the same parameters; turn it off and find_unused on"
                    : "with static_graph all iterations use the same parameters; turn it off and find_unused on"
            ));
        });
    }
}

// test_accumulate_gradients_module: PyTorch adds up without an average
TEST_CASE("a pass of the module itself is refused, and accumulates with no_sync()") {
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            TwoLayers alone, model;
            auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                return loss_of(alone->forward(inputs_of(rank))) +
                       loss_of(alone->forward(inputs_of(rank + 7)));
            });
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = views}
            };
            for (int round = 0; round < 2; ++round) {
                model->zero_grad();
                {
                    auto const local = ddp.no_sync();
                    loss_of(ddp.forward(inputs_of(comm.rank() + 7))).backward();
                }
                loss_of(ddp.forward(inputs_of(comm.rank()))).backward();
                check_gradients(*model, expected);
            }
            std::string const text =
                refusal([&] { loss_of(model->forward(inputs_of(comm.rank()))).backward(); });
            CHECK(has(text, "call ddp.forward(inputs) in place of the module's"));
        });
    }
}

// test_ddp_inference, and passes without a graph between a forward pass and its backward pass
TEST_CASE("one rank evaluates its module alone, between rounds and in the middle of one") {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        TwoLayers alone, model;
        auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
            return loss_of(alone->forward(inputs_of(rank)));
        });
        joinable::torch::DistributedDataParallel ddp{comm, model};
        auto const evaluate = [&] {
            Tensor const inputs = inputs_of(20);
            Tensor const seen = alone->forward(inputs).detach();
            {
                torch::NoGradGuard const no_graph;
                CHECK(torch::equal(model->forward(inputs), seen));
            }
            c10::InferenceMode const inference;
            CHECK(torch::equal(model->forward(inputs), seen));
        };
        for (int round = 0; round < 2; ++round) {
            model->zero_grad();
            if (comm.rank() == 0) {
                evaluate();
                torch::NoGradGuard const no_graph;
                CHECK(!ddp.forward(inputs_of(20)).requires_grad());
            }
            Tensor const loss = loss_of(ddp.forward(inputs_of(comm.rank())));
            if (comm.rank() == 1) {
                evaluate();
            }
            loss.backward();
            check_gradients(*model, expected);
        }
    });
}

// -- types and layouts -------------------------------------------------------------------------------

/// The distance of 1 to the next number, at least as large as the rounding of a sum of a few.
double precision_of(c10::ScalarType type) {
    return type == torch::kBFloat16 ? 1.0 / 128
           : type == torch::kHalf   ? 1.0 / 1024
           : type == torch::kFloat  ? 1.0 / (1 << 23)
                                    : 1e-14;
}

// test_single_dtype_*, test_multi_dtype_*, test_fp16_*
TEST_CASE("modules of 16-bit numbers, and of two types, have the gradients of one process in double"
) {
    using Types = std::pair<c10::ScalarType, c10::ScalarType>;
    for (Types const& types : {
             Types{torch::kBFloat16, torch::kBFloat16},
             Types{torch::kHalf, torch::kHalf},
             Types{torch::kHalf, torch::kFloat},
             Types{torch::kDouble, torch::kBFloat16},
             Types{torch::kFloat, torch::kDouble},
         }) {
        for (bool const views : {false, true}) {
            run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
                c10::ScalarType const first = types.first, second = types.second;
                CAPTURE(c10::toString(first));
                CAPTURE(c10::toString(second));
                TwoLayers alone;
                TwoLayers model{false, first, second};
                {
                    torch::NoGradGuard const no_graph; // the values that the other one has rounded
                    for (std::size_t k = 0; k < 4; ++k) {
                        alone->parameters()[k].copy_(model->parameters()[k]);
                    }
                }
                auto const inputs = [&](int rank) { return inputs_of(rank).to(first); };
                auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                    return loss_of(alone->forward(inputs(rank)));
                });
                joinable::torch::DistributedDataParallel ddp{
                    comm, model, {.gradient_as_bucket_view = views}
                };
                CHECK(ddp.buckets().size() == (first == second ? 1 : 2));
                double const tolerance = 8 * (std::max)(precision_of(first), precision_of(second));
                for (int round = 0; round < 3; ++round) {
                    model->zero_grad();
                    loss_of(ddp.forward(inputs(comm.rank()))).backward();
                    check_gradients(*model, expected, tolerance);
                    CHECK((model->first->weight.grad().scalar_type() == first));
                    CHECK((model->second->weight.grad().scalar_type() == second));
                }
            });
        }
    }
}

// test_fp16, test_fp16_grad_is_view
TEST_CASE("an average of half precision does not overflow where only the sum would") {
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            struct Scale : torch::nn::Module {
                Tensor forward(Tensor const& inputs) { return (weight * inputs).sum(); }
                Tensor weight = register_parameter("weight", torch::ones({1, 1}, torch::kHalf));
            } model;
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = views}
            };
            ddp.forward(torch::full({1, 1}, 32768, torch::kHalf)).backward();
            double const mean = model.weight.grad().item<double>();
            CHECK(mean == doctest::Approx(32768).epsilon(1.0 / 1024));
        });
    }
}

/// The second convolution has its weight in the order of channels last.
struct ConvolutionsImpl : torch::nn::Module {
    explicit ConvolutionsImpl(bool has_channels_last) {
        to(torch::kDouble);
        fill(*this);
        if (has_channels_last) {
            Tensor& weight = second->weight;
            weight.set_data(weight.detach().contiguous(torch::MemoryFormat::ChannelsLast));
        }
    }
    Tensor forward(Tensor const& inputs) {
        return second->forward(torch::tanh(first->forward(inputs)));
    }

    torch::nn::Conv2d first =
        register_module("first", torch::nn::Conv2d{torch::nn::Conv2dOptions(2, 3, {2, 2})});
    torch::nn::Conv2d second =
        register_module("second", torch::nn::Conv2d{torch::nn::Conv2dOptions(3, 2, {2, 2})});
};
TORCH_MODULE(Convolutions);

// test_channels_last_contig, test_grad_layout_1devicemodule_1replicaperprocess
TEST_CASE(
    "a module in channels last is trained, and its gradients keep the strides of its parameters"
) {
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            Convolutions alone{false}, model{true};
            auto const inputs = [](int rank) { return numbers({2, 2, 5, 4}, 10 + rank); };
            auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                return loss_of(alone->forward(inputs(rank)));
            });
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = views}
            };
            for (bool const to_none : {true, true, false}) {
                model->zero_grad(to_none);
                Tensor const images =
                    inputs(comm.rank()).contiguous(torch::MemoryFormat::ChannelsLast);
                loss_of(ddp.forward(images)).backward();
                check_gradients(*model, expected);
                for (Tensor const& parameter : model->parameters()) {
                    CHECK((parameter.grad().strides() == parameter.strides()));
                }
            }
            CHECK(model->second->weight.stride(1) == 1);
        });
    }
}

// test_param_layout_mismatch_error
TEST_CASE("a module whose weight lies in another order than rank 0's is refused on all ranks") {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        Convolutions model{comm.rank() != 0};
        std::string const text =
            refusal([&] { joinable::torch::DistributedDataParallel{comm, model}; });
        CHECK(text.starts_with(
            "models differ: parameter 2 (second.weight): rank 0 has f64 (2, 3, 2, 2), rank 1 has f64 (2, 3, 2, 2), "
            "strides (12, 1, 6, 3)"
        ));
    });
}

// -- reductions and buffers --------------------------------------------------------------------------

// test_default_ddp_comm_hooks_nccl, test_fp16_compress_wrapper_*, test_bf16_compress_wrapper_*
TEST_CASE("gradients of a module travel as 16-bit numbers, and differ by their rounding alone") {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        TwoLayers alone;
        auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
            return loss_of(alone->forward(inputs_of(rank)));
        });
        auto const check = [&](auto reduction, c10::ScalarType type) {
            TwoLayers model;
            joinable::torch::DistributedDataParallel ddp{comm, model, {}, std::move(reduction)};
            for (int round = 0; round < 2; ++round) {
                model->zero_grad();
                loss_of(ddp.forward(inputs_of(comm.rank()))).backward();
                check_gradients(*model, expected, 8 * precision_of(type));
                Tensor const gradient = model->first->weight.grad();
                CHECK(torch::equal(gradient, gradient.to(type).to(torch::kDouble)));
            }
        };
        check(joinable::Fp16Compression<>{}, torch::kHalf);
        check(joinable::Bf16Compression<>{}, torch::kBFloat16);
    });
}

// test_powerSGD_ddp_comm_hook_nccl: the rows are of one frequency, so all gradients lie in a space of two dimensions
TEST_CASE("PowerSgd over a module is exact for gradients of its rank or less, and cuts others to it"
) {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        auto const linear = [] {
            torch::nn::Linear model{16, 16};
            model->to(torch::kDouble);
            fill(*model);
            return model;
        };
        auto const row_of = [](int rank) { return numbers({1, 16}, 3.0 * rank * rank); };
        auto alone = linear();
        auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
            return loss_of(alone->forward(row_of(rank)));
        });
        for (std::size_t const rank : {1U, 2U, 3U}) {
            CAPTURE(rank);
            auto model = linear();
            joinable::PowerSgd reduction;
            reduction.rank = rank;
            reduction.start_iteration = 0;
            joinable::torch::DistributedDataParallel ddp{comm, model, {}, std::move(reduction)};
            loss_of(ddp.forward(row_of(comm.rank()))).backward();
            Tensor const gradient = model->weight.grad();
            double const error = (gradient - expected[0]).abs().max().item<double>();
            CHECK((error < 1e-6) == (rank > 1));
            Tensor const minors = gradient.slice(0, 1) * gradient[0][0] -
                                  gradient.slice(0, 1).select(1, 0).unsqueeze(1) * gradient[0];
            CHECK((minors.abs().max().item<double>() < 1e-12) == (rank == 1));
        }
    });
}

// test_ddp_comm_hook_future_passing_cpu
TEST_CASE("a reduction of one's own delivers to a module what it makes of its buckets") {
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            TwoLayers model;
            auto const hook = [](ThreadCommunicator& over, joinable::BucketRun const& run) {
                auto* const all = static_cast<double*>(run.buffer.data);
                std::fill(all, all + run.buffer.count, 2.0 / over.size());
                return over.all_reduce(run.buffer, joinable::ReduceOp::sum);
            };
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = views}, joinable::reduce_by("twos", hook)
            };
            for (int round = 0; round < 2; ++round) {
                loss_of(ddp.forward(inputs_of(comm.rank()))).backward();
                for (Tensor const& parameter : model->parameters()) {
                    CHECK(((parameter.grad() - 2).abs().max().item<double>() < 1e-15));
                }
            }
        });
    }
}

// test_ddp_buffer_hook_allreduce, _return_future, test_ddp_broadcast_buffer_via_hook
TEST_CASE("a hook averages the buffers of a module, in a guard with uneven inputs") {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        struct Counting : torch::nn::Module {
            Tensor forward(Tensor const& inputs) {
                seen += inputs.sum().detach();
                return layer->forward(inputs);
            }
            Layer layer = register_module("layer", Layer{});
            Tensor seen = register_buffer("seen", torch::zeros({2}, torch::kDouble));
        } model;
        torch::optim::SGD optimizer{model.parameters(), 0.1};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        joinable::torch::Step step{comm, optimizer};
        ddp.set_buffer_hook([](ThreadCommunicator& over,
                               std::vector<joinable::AnyView> const& buffers,
                               joinable::Round const& round) {
            REQUIRE(buffers.size() == 1);
            auto const numbers_seen = buffers[0].as<double>();
            double sums[] = {
                round.is_shadow() ? 0 : numbers_seen(0), round.is_shadow() ? 0 : numbers_seen(1)
            };
            over.all_reduce({sums, 2, joinable::DType::f64}, joinable::ReduceOp::sum).wait();
            numbers_seen(0) = sums[0] / round.active_count();
            numbers_seen(1) = sums[1] / round.active_count();
        });
        joinable::Join guard{joinable::participants(ddp, step)};
        double expected = 0;
        for (int round = 0; round <= comm.rank(); ++round) { // rank r has r + 1 inputs of 1 + r
            ddp.forward(torch::full({1, 3}, 1.0 + comm.rank(), torch::kDouble)).sum().backward();
            double sum = 0;
            for (int rank = round; rank < comm.size(); ++rank) {
                sum += 3 * (1.0 + rank);
            }
            expected += sum / (comm.size() - round);
            CHECK(model.seen[0].item<double>() == doctest::Approx(expected).epsilon(1e-14));
            CHECK(model.seen[1].item<double>() == doctest::Approx(expected).epsilon(1e-14));
            step.step();
        }
        guard.finish();
    });
}

// -- other modules, ranks and ends -------------------------------------------------------------------

// As DDP does in PyTorch with packed sequences
TEST_CASE("an LSTM is trained by packed sequences, whose lengths differ between ranks") {
    namespace rnn = torch::nn::utils::rnn;
    for (bool const views : {false, true}) {
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            auto const lstm = [] {
                torch::nn::LSTM model{torch::nn::LSTMOptions(2, 3).num_layers(2)};
                model->to(torch::kDouble);
                fill(*model);
                return model;
            };
            auto const forward = [](torch::nn::LSTM& model, int rank) {
                Tensor const lengths = torch::tensor({4 + rank, 2, 1}, torch::kLong);
                auto const packed =
                    rnn::pack_padded_sequence(numbers({4 + rank, 3, 2}, rank), lengths);
                return std::get<0>(model->forward_with_packed_input(packed)).data();
            };
            auto alone = lstm();
            auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                return loss_of(forward(alone, rank));
            });
            auto model = lstm();
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = views}
            };
            for (int round = 0; round < 2; ++round) {
                model->zero_grad();
                loss_of(ddp.forward([&] { return forward(model, comm.rank()); })).backward();
                check_gradients(*model, expected);
            }
        });
    }
}

// test_gloo_backend_cpu_module, _grad_is_view
TEST_CASE("a module is trained over a transport of messages as by one process") {
    for (bool const views : {false, true}) {
        joinable_tests::run_socket_ranks({2, 3}, [&](joinable_tests::SocketCommunicator& sockets) {
            joinable::MessageCommunicator comm{sockets};
            TwoLayers alone, model;
            torch::optim::SGD optimizer{model->parameters(), 0.1};
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.first_bucket_bytes = 64, .gradient_as_bucket_view = views}
            };
            for (int round = 0; round < 3; ++round) {
                auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                    return loss_of(alone->forward(inputs_of(rank + round)));
                });
                optimizer.zero_grad();
                loss_of(ddp.forward(inputs_of(comm.rank() + round))).backward();
                check_gradients(*model, expected);
                optimizer.step();
                torch::NoGradGuard const no_graph;
                for (std::size_t k = 0; k < expected.size(); ++k) {
                    alone->parameters()[k].sub_(expected[k], 0.1);
                }
            }
        });
    }
}

// test_failure_recovery: a new group, and a new model of the same module
TEST_CASE("after a failure in the backward pass a module is trained on over a new communicator") {
    for (bool const views : {false, true}) {
        std::vector<TwoLayers> models(3);
        DataParallelOptions const options{.gradient_as_bucket_view = views};
        auto const model_of = [&](ThreadCommunicator& comm) -> TwoLayers& {
            return models[static_cast<std::size_t>(comm.rank())];
        };
        std::string const text = refusal([&] {
            run_ranks({3}, [&](ThreadCommunicator& comm) {
                TwoLayers& model = model_of(comm);
                joinable::torch::DistributedDataParallel ddp{comm, model, options};
                joinable::Join guard{joinable::participants(ddp)};
                loss_of(ddp.forward(inputs_of(comm.rank()))).backward();
                Tensor outputs = ddp.forward(inputs_of(comm.rank()));
                if (comm.rank() == 1) {
                    outputs.register_hook([](Tensor const&) {
                        throw std::runtime_error{"a node went away"};
                    });
                }
                ddp.backward(loss_of(outputs));
            });
        });
        CHECK(has(text, "a node went away"));
        run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
            TwoLayers alone;
            TwoLayers& model = model_of(comm);
            auto const expected = mean_gradients(*alone, comm.size(), [&](int rank) {
                return loss_of(alone->forward(inputs_of(rank)));
            });
            joinable::torch::DistributedDataParallel ddp{comm, model, options};
            joinable::Join guard{joinable::participants(ddp)};
            for (int round = 0; round < 2; ++round) {
                model->zero_grad(false); // gradients of the model that failed are still there
                loss_of(ddp.forward(inputs_of(comm.rank()))).backward();
                check_gradients(*model, expected);
            }
            guard.finish();
        });
    }
}

} // namespace
