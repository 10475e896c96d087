// SPDX-License-Identifier: BSL-1.0
// Modules of libtorch that freeze, unfreeze, get layers, are converted and are cloned between guards: values equal those of
// libtorch alone, in double, over all batches.
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>

#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>

namespace {

using joinable::DataParallelOptions;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using torch::Tensor;

/// Each rank starts with other values.
torch::nn::Linear make_layer(std::int64_t in, std::int64_t out, int rank, double start) {
    torch::nn::Linear layer{in, out};
    layer->to(torch::kDouble);
    torch::NoGradGuard const quiet;
    for (Tensor& parameter : layer->parameters()) {
        Tensor const numbers = torch::arange(parameter.numel(), torch::kDouble);
        parameter.copy_((torch::sin(numbers + start) / 2 + rank).reshape(parameter.sizes()));
    }
    return layer;
}
struct NetImpl : torch::nn::Module {
    torch::nn::Linear first = nullptr;
    torch::nn::Linear second = nullptr;
    torch::nn::Linear added = nullptr;

    explicit NetImpl(int rank)
        : first{register_module("first", make_layer(2, 3, rank, 0.5))},
          second{register_module("second", make_layer(3, 2, rank, 1.5))} {}
    Tensor forward(Tensor const& input) {
        Tensor output = second(torch::tanh(first(input)));
        return added ? added(torch::tanh(output)) : output;
    }
};
TORCH_MODULE(Net);

constexpr std::size_t most_inputs = 4;
/// How many inputs a rank has: 2, 4, 3, 2, ...
std::size_t inputs_of(int rank) {
    return 2 + static_cast<std::size_t>(2 * rank % 3);
}
Tensor input_of(int rank, std::size_t step) {
    return torch::tensor({{rank - 1.5, static_cast<double>(step % 7) / 4}}, torch::kDouble);
}
void set_trained(torch::nn::Linear& layer, bool is_trained) {
    for (Tensor& parameter : layer->parameters()) {
        parameter.set_requires_grad(is_trained);
        parameter.mutable_grad().reset();
    }
}
/// The model of before each epoch, and what its optimizer has to step.
void change(Net& model, torch::optim::SGD& optimizer, int rank, int epoch) {
    if (epoch == 1) {
        set_trained(model->first, true);
        set_trained(model->second, false);
    } else if (epoch == 2) {
        set_trained(model->second, true);
        model->added = model->register_module("added", make_layer(2, 2, rank, 2.5));
        optimizer.add_param_group({model->added->parameters()});
    } else if (epoch == 3) {
        model->to(torch::kFloat);
        model->to(torch::kDouble);
    }
}
torch::optim::SGD make_optimizer(Net& model) {
    return torch::optim::SGD{model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5)};
}
constexpr int epochs = 5;

std::size_t inputs_of_all(int world) {
    return world == 1 ? 2 : most_inputs;
}
/// An epoch of libtorch alone, from the `first` step on. An average divides by all ranks.
template <class Model>
void train_epoch_alone(
    Model& model, torch::optim::Optimizer& optimizer, int world, std::size_t first
) {
    for (std::size_t input = 0; input < inputs_of_all(world); ++input) {
        optimizer.zero_grad();
        Tensor loss = torch::zeros({}, torch::kDouble);
        for (int rank = 0; rank < world; ++rank) {
            if (input < inputs_of(rank)) {
                loss = loss + model->forward(input_of(rank, first + input)).square().sum() / world;
            }
        }
        loss.backward();
        optimizer.step();
    }
}
std::vector<Tensor> train_alone(int world) {
    Net model{0};
    set_trained(model->first, false);
    torch::optim::SGD optimizer = make_optimizer(model);
    for (int epoch = 0; epoch < epochs; ++epoch) {
        change(model, optimizer, 0, epoch);
        train_epoch_alone(
            model, optimizer, world, static_cast<std::size_t>(epoch) * inputs_of_all(world)
        );
    }
    return model->parameters();
}

TEST_CASE("a module that freezes, gets layers and is converted trains as libtorch alone") {
    std::vector<DataParallelOptions> const all{
        {}, {.gradient_as_bucket_view = true}, {.find_unused = true}
    };
    for (std::size_t k = 0; k < all.size(); ++k) {
        CAPTURE(k);
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            Net model{comm.rank()};
            set_trained(model->first, false);
            torch::optim::SGD optimizer = make_optimizer(model);
            joinable::torch::DistributedDataParallel ddp{comm, model, all[k]};
            std::size_t step = 0;
            for (int epoch = 0; epoch < epochs; ++epoch) {
                change(model, optimizer, comm.rank(), epoch);
                ddp.refresh();
                joinable::torch::Step stepper{comm, optimizer};
                std::size_t const begin = step;
                joinable::Join guard{joinable::participants(ddp, stepper)};
                for (std::size_t input = 0; input < inputs_of(comm.rank()); ++input, ++step) {
                    optimizer.zero_grad();
                    ddp.forward(input_of(comm.rank(), step)).square().sum().backward();
                    stepper.step();
                }
                guard.finish();
                step = begin + inputs_of_all(comm.size());
            }
            std::vector<Tensor> const alone = train_alone(comm.size());
            std::vector<Tensor> const parameters = model->parameters();
            REQUIRE(parameters.size() == alone.size());
            for (std::size_t i = 0; i < alone.size(); ++i) {
                CAPTURE(i);
                CHECK(torch::allclose(parameters[i], alone[i], 1e-6, 1e-6)); // rounded to float
            }
        });
    }
}

TEST_CASE("a module that was trained is converted, and refresh() takes it with its gradients") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model{comm.rank()};
        Net alone{0};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        for (auto const type : {torch::kDouble, torch::kFloat, torch::kDouble}) {
            model->to(type); // the gradients of the pass before stay as they are
            ddp.refresh();
            alone->to(type);
            for (Net* const one : {&model, &alone}) {
                for (Tensor& parameter : (*one)->parameters()) {
                    parameter.mutable_grad().reset();
                }
            }
            ddp.forward(input_of(comm.rank(), 1).to(type)).square().sum().backward();
            Tensor loss = torch::zeros({}, type);
            for (int rank = 0; rank < comm.size(); ++rank) {
                loss =
                    loss + alone->forward(input_of(rank, 1).to(type)).square().sum() / comm.size();
            }
            loss.backward();
            CHECK((model->second->weight.grad().scalar_type() == type));
            CHECK(torch::allclose(
                model->second->weight.grad(), alone->second->weight.grad(), 1e-4, 1e-4
            ));
        }
    });
}

TEST_CASE("handles of gradients in buckets outlive a refresh, frozen ones, too") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model{0};
        joinable::torch::DistributedDataParallel ddp{
            comm, model, {.gradient_as_bucket_view = true}
        };
        ddp.forward(input_of(1, 1)).square().sum().backward();
        Tensor const trained = model->second->weight.grad();
        Tensor const frozen = model->first->weight.grad();
        Tensor const copies[] = {trained.clone(), frozen.clone()};
        model->first->weight.set_requires_grad(false);
        ddp.refresh();
        CHECK(torch::equal(trained, copies[0]));
        CHECK(torch::equal(frozen, copies[1]));
        CHECK(torch::equal(model->first->weight.grad(), copies[1]));
        CHECK(torch::equal(model->second->weight.grad(), copies[0]));
        CHECK(model->second->weight.grad().data_ptr() == ddp.buckets()[0].views[1].data());
    });
}

TEST_CASE("a value that was set anew is sent by refresh(), also at the address of the one before") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        std::vector<double> memory(6);
        auto const in_memory = [&] {
            return torch::from_blob(memory.data(), {3, 2}, torch::kDouble);
        };
        Net model{0};
        Tensor const weight = model->first->weight;
        weight.set_data(in_memory());
        joinable::torch::DistributedDataParallel ddp{comm, model};
        weight.set_data(weight.to(torch::kFloat)); // to() and back
        memory.assign(6, comm.rank() + 1.0);
        weight.set_data(in_memory());
        ddp.refresh();
        CHECK(torch::equal(weight, torch::ones({3, 2}, torch::kDouble)));
    });
}

TEST_CASE("a late layer of frozen parameters or buffers alone is refused where a guard begins") {
    for (bool const is_frozen : {true, false}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            torch::nn::Sequential model{make_layer(2, 2, 0, 0.5)};
            joinable::torch::DistributedDataParallel ddp{comm, model};
            if (is_frozen) {
                torch::nn::Linear late = make_layer(2, 2, comm.rank(), 1.5);
                set_trained(late, false);
                model->push_back(late);
            } else {
                model->push_back(torch::nn::BatchNorm1d{torch::nn::BatchNormOptions{2}.affine(false)
                });
            }
            std::string text;
            try {
                joinable::Join const guard{joinable::participants(ddp)};
            } catch (joinable::ContractViolation const& error) {
                text = error.what();
            }
            CAPTURE(text);
            CHECK(text.starts_with(
                is_frozen ? "parameter 1.weight came into the module after the "
                          : "buffer 1.running_mean came into the module after the "
            ));
            CHECK(text.find("so it would be neither averaged nor sent") != std::string::npos);
        });
    }
}

TEST_CASE("ranks whose modules differ say so, and the model is as it was before") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Net model{0};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        model->first->bias.set_requires_grad(comm.rank() != 0);
        CHECK_THROWS_AS(ddp.refresh(), joinable::Mismatch);
        model->first->bias.set_requires_grad(true);
        ddp.forward(input_of(comm.rank(), 1)).square().sum().backward();
        std::vector<Tensor> inputs;
        Tensor loss = torch::zeros({}, torch::kDouble);
        Net alone{0};
        for (int rank = 0; rank < comm.size(); ++rank) {
            loss = loss + alone->forward(input_of(rank, 1)).square().sum() / comm.size();
        }
        loss.backward();
        CHECK(torch::allclose(model->first->bias.grad(), alone->first->bias.grad()));
    });
}

/// A stack of layers in a model of its own, and what libtorch alone makes of it.
struct TrainedStack {
    TrainedStack(
        ThreadCommunicator& comm,
        torch::nn::Sequential const& start,
        torch::nn::Sequential const& start_alone,
        DataParallelOptions const& options
    )
        : model{start}, optimizer{optimizer_of(model)}, ddp{comm, model, options},
          step{comm, optimizer}, alone{start_alone}, optimizer_alone{optimizer_of(alone)} {}

    void compute(Tensor const& input) {
        optimizer.zero_grad();
        ddp.forward(input).square().sum().backward();
    }

    torch::nn::Sequential model;
    torch::optim::SGD optimizer;
    joinable::torch::DistributedDataParallel<ThreadCommunicator, torch::nn::SequentialImpl> ddp;
    joinable::torch::Step<ThreadCommunicator, torch::optim::SGD> step;
    torch::nn::Sequential alone;
    torch::optim::SGD optimizer_alone;

private:
    static torch::optim::SGD optimizer_of(torch::nn::Sequential const& net) {
        return torch::optim::SGD{net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5)};
    }
};
torch::nn::Sequential make_stack(int rank) {
    return torch::nn::Sequential{
        make_layer(2, 3, rank, 0.5), torch::nn::Tanh{}, make_layer(3, 2, rank, 1.5)
    };
}
std::vector<Tensor> copies(std::vector<Tensor> const& tensors) {
    std::vector<Tensor> all;
    for (Tensor const& tensor : tensors) {
        all.push_back(tensor.detach().clone());
    }
    return all;
}
void check_equal(std::vector<Tensor> const& tensors, std::vector<Tensor> const& expected) {
    REQUIRE(tensors.size() == expected.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        CAPTURE(i);
        CHECK(torch::allclose(tensors[i], expected[i], 0, 1e-12));
    }
}

TEST_CASE("a clone of a module in training has values of its own, and both train as libtorch alone"
) {
    for (bool const are_views : {false, true}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            DataParallelOptions const options{.gradient_as_bucket_view = are_views};
            std::size_t first = 0;
            auto const train = [&](auto&& guard, auto&... stacks) {
                for (std::size_t input = 0; input < inputs_of(comm.rank()); ++input) {
                    (stacks.compute(input_of(comm.rank(), first + input)), ...);
                    (stacks.step.step(), ...);
                }
                guard.finish();
                (train_epoch_alone(stacks.alone, stacks.optimizer_alone, comm.size(), first), ...);
                first += inputs_of_all(comm.size());
            };
            TrainedStack one{comm, make_stack(comm.rank()), make_stack(0), options};
            train(joinable::Join{joinable::participants(one.ddp, one.step)}, one);

            torch::nn::Sequential const clone{
                std::dynamic_pointer_cast<torch::nn::SequentialImpl>(one.model->clone())
            };
            torch::nn::Sequential const clone_alone = make_stack(0);
            auto const copy_alone = clone_alone->parameters();
            for (std::size_t i = 0; i < copy_alone.size(); ++i) {
                torch::NoGradGuard const quiet;
                copy_alone[i].copy_(one.alone->parameters()[i]);
                CHECK(!clone->parameters()[i].grad().defined());
            }
            TrainedStack two{comm, clone, clone_alone, options};
            std::vector<Tensor> const before = copies(one.model->parameters());
            train(joinable::Join{joinable::participants(two.ddp, two.step)}, two);
            for (std::size_t i = 0; i < before.size(); ++i) {
                CHECK(torch::equal(one.model->parameters()[i], before[i]));
            }
            train(
                joinable::Join{joinable::participants(one.ddp, one.step, two.ddp, two.step)},
                one,
                two
            );
            train(joinable::Join{joinable::participants(one.ddp, one.step)}, one);
            check_equal(one.model->parameters(), one.alone->parameters());
            check_equal(two.model->parameters(), two.alone->parameters());
        });
    }
}

} // namespace
