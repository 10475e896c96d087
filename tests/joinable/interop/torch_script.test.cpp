// SPDX-License-Identifier: BSL-1.0
// Modules of TorchScript, which torch::jit::load() gives: values equal those of libtorch alone, in double, over all batches.
#include <joinable/interop/torch.hpp>

#include <torch/script.h>
#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>

#include <joinable/interop/torch_optimizer.hpp>
#include <joinable/interop/torch_sharded.hpp>
#include <joinable/join/guard.hpp>

namespace {

using joinable::DataParallelOptions;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using torch::Tensor;
using torch::jit::IValue;

Tensor numbers(std::vector<std::int64_t> const& extents, double start) {
    std::int64_t count = 1;
    for (std::int64_t const extent : extents) {
        count *= extent;
    }
    return (torch::sin(torch::arange(count, torch::kDouble) * 1.7 + start) / 2).reshape(extents);
}

/// A layer of TorchScript.
torch::jit::Module layer(std::string const& name, std::int64_t in, std::int64_t out, double start) {
    torch::jit::Module one{name};
    one.register_parameter("weight", numbers({out, in}, start).requires_grad_(true), false);
    one.register_parameter("bias", numbers({out}, start + 1).requires_grad_(true), false);
    one.define(R"(
        def forward(self, x):
            return torch.matmul(x, self.weight.t()) + self.bias
    )");
    return one;
}
/// The text of a file with tanh(W x + b), of which two heads of the same layer and one of another layer are made.
std::string const& file() {
    static std::string const text = [] {
        torch::jit::Module model{"Net"};
        model.register_module("first", layer("First", 2, 3, 0));
        torch::jit::Module const head = layer("Head", 3, 2, 3);
        model.register_module("head", head);
        model.register_module("tied", head);
        model.register_module("other", layer("Other", 3, 2, 5));
        model.register_buffer("seen", torch::zeros({}, torch::kDouble));
        model.define(R"(
            def forward(self, x, is_other: bool):
                self.seen += 1.0
                hidden = torch.tanh(self.first.forward(x))
                if is_other:
                    return self.other.forward(hidden), {"head": [hidden.detach()]}
                return self.head.forward(hidden) + self.tied.forward(hidden), {"head": [hidden.detach()]}
        )");
        std::ostringstream stream;
        model.save(stream);
        return stream.str();
    }();
    return text;
}
std::vector<Tensor> parameters_of(torch::jit::Module const& model) {
    std::vector<Tensor> all;
    for (auto const& one : joinable::detail::distinct_tensors(model.named_parameters())) {
        all.push_back(one.tensor);
    }
    return all;
}

/// Each rank loads it, and begins with values of its own.
torch::jit::Module load(int rank) {
    std::istringstream stream{file()};
    torch::jit::Module model = torch::jit::load(stream);
    torch::NoGradGuard const quiet;
    for (Tensor const& parameter : parameters_of(model)) {
        parameter.add_(rank);
    }
    return model;
}

int inputs_of(int rank) {
    return 5 - rank % 3;
}
std::vector<IValue> input_of(int rank, int step) {
    return {numbers({2, 2}, 10 * rank + step), step % 2 == 1};
}
Tensor loss_of(IValue const& outputs) {
    return outputs.toTuple()->elements()[0].toTensor().square().sum();
}
/// libtorch alone, without TorchScript. An average divides by all ranks.
std::vector<Tensor> train_alone(int world) {
    std::vector<Tensor> values{
        numbers({3, 2}, 0),
        numbers({3}, 1),
        numbers({2, 3}, 3),
        numbers({2}, 4),
        numbers({2, 3}, 5),
        numbers({2}, 6)
    };
    for (Tensor& value : values) {
        value.requires_grad_(true);
    }
    torch::optim::SGD optimizer{values, torch::optim::SGDOptions(0.05).momentum(0.5)};
    for (int step = 0; step < inputs_of(0); ++step) {
        Tensor loss = torch::zeros({}, torch::kDouble);
        for (int rank = 0; rank < world; ++rank) {
            if (step < inputs_of(rank)) {
                Tensor const x = numbers({2, 2}, 10 * rank + step);
                Tensor const hidden = torch::tanh(torch::matmul(x, values[0].t()) + values[1]);
                Tensor const outputs = step % 2 == 1
                                           ? torch::matmul(hidden, values[4].t()) + values[5]
                                           : 2 * (torch::matmul(hidden, values[2].t()) + values[3]);
                loss = loss + outputs.square().sum() / world;
            }
        }
        for (Tensor& value : values) { // unused: zeros, which an optimizer steps by
            value.mutable_grad() = torch::zeros_like(value);
        }
        loss.backward();
        optimizer.step();
    }
    return values;
}
void check_close(std::vector<Tensor> const& values, std::vector<Tensor> const& expected) {
    REQUIRE(values.size() == expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        CAPTURE(i);
        CHECK(torch::allclose(values[i], expected[i], 1e-12, 1e-12));
    }
}
void clear(torch::jit::Module const& model) {
    for (Tensor const& value : parameters_of(model)) {
        value.mutable_grad() = torch::zeros_like(value);
    }
}

TEST_CASE(
    "a TorchScript module trains on uneven inputs as libtorch alone, with a tied layer and one that is not used"
) {
    for (bool const are_views : {false, true}) {
        CAPTURE(are_views);
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            torch::jit::Module model = load(comm.rank());
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.gradient_as_bucket_view = are_views, .find_unused = true}
            };
            torch::optim::SGD optimizer{
                parameters_of(model), torch::optim::SGDOptions(0.05).momentum(0.5)
            };
            joinable::torch::Step step{comm, optimizer};
            joinable::Join guard{joinable::participants(ddp, step)};
            for (int i = 0; i < inputs_of(comm.rank()); ++i) {
                clear(model);
                loss_of(ddp.forward(input_of(comm.rank(), i))).backward();
                step.step();
            }
            guard.finish();
            check_close(parameters_of(model), train_alone(comm.size()));
            CHECK(model.attr("seen").toTensor().item<double>() == inputs_of(0));
        });
    }
}

TEST_CASE(
    "an optimizer of libtorch that ranks share steps a TorchScript module, as does a sharded one"
) {
    auto const sgd = [](std::vector<Tensor> mine) {
        return torch::optim::SGD{std::move(mine), torch::optim::SGDOptions(0.05).momentum(0.5)};
    };
    for (bool const is_sharded : {false, true}) {
        CAPTURE(is_sharded);
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            torch::jit::Module model = load(comm.rank());
            if (is_sharded) {
                joinable::torch::ShardedDataParallel sharded{
                    comm, model, sgd, {.sharding = joinable::Sharding::gradients}
                };
                joinable::Join guard{joinable::participants(sharded)};
                for (int i = 0; i < inputs_of(comm.rank()); ++i) {
                    loss_of(sharded.forward(input_of(comm.rank(), i))).backward();
                    sharded.step();
                }
                guard.finish();
            } else {
                joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
                joinable::torch::Optimizer optimizer{comm, joinable::torch::parameters(model), sgd};
                joinable::Join guard{joinable::participants(ddp, optimizer)};
                for (int i = 0; i < inputs_of(comm.rank()); ++i) {
                    clear(model);
                    loss_of(ddp.forward(input_of(comm.rank(), i))).backward();
                    optimizer.step();
                }
                guard.finish();
            }
            check_close(parameters_of(model), train_alone(comm.size()));
        });
    }
}

TEST_CASE("find_unused looks into dictionaries and lists of TorchScript") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        torch::jit::Module model{"Net"};
        Tensor const used = torch::ones({2}, torch::kDouble).requires_grad_(true);
        model.register_parameter("used", used, false);
        model.register_parameter("unused", torch::ones({2}).requires_grad_(true), false);
        model.define(R"(
            def forward(self, x):
                return {"losses": [self.used * x]}
        )");
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        double sum = 0;
        for (int rank = 0; rank < comm.size(); ++rank) {
            sum += rank + 1;
        }
        for (int round = 0; round < 2; ++round) {
            std::vector<IValue> const inputs{torch::full({2}, comm.rank() + 1.0, torch::kDouble)};
            used.mutable_grad().reset();
            IValue const outputs = ddp.forward(inputs);
            outputs.toGenericDict().at("losses").toListRef()[0].toTensor().sum().backward();
            CHECK(torch::allclose(used.grad(), torch::full({2}, sum / comm.size(), torch::kDouble))
            );
        }
    });
}

TEST_CASE("a buffer that a TorchScript pass assigns anew is sent as the module has it then") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        torch::jit::Module model{"Net"};
        model.register_parameter("weight", torch::ones({2}).requires_grad_(true), false);
        model.register_buffer("seen", torch::zeros({2}));
        model.register_attribute( // as those of BatchNorm
            "last",
            c10::OptionalType::ofTensor(),
            torch::zeros({2}),
            false,
            true
        );
        model.define(R"(
            def forward(self, x):
                self.seen = self.seen + x
                self.last = x.clone()
                return self.weight * x
        )");
        joinable::torch::DistributedDataParallel ddp{comm, model};
        std::vector<IValue> const inputs{torch::full({2}, comm.rank() + 1.0)};
        for (int epoch = 1; epoch <= 2; ++epoch) {
            joinable::Join guard{joinable::participants(ddp)};
            for (int i = 0; i < 2 + comm.rank(); ++i) {
                ddp.forward(inputs).toTensor().sum().backward();
            }
            guard.finish();
            // Each round adds the input of the lowest rank that has one: 1, 1, 2, 3.
            constexpr int sums[] = {2, 4, 7};
            Tensor const seen = torch::full({2}, epoch * sums[comm.size() - 1], torch::kFloat);
            CHECK(torch::equal(model.attr("seen").toTensor(), seen));
            CHECK(torch::equal(model.attr("last").toTensor(), torch::full({2}, comm.size() + 0.0)));
        }
        CHECK_NOTHROW(joinable::torch::DistributedDataParallel{comm, model, {.ignore = {"last"}}});
    });
}

TEST_CASE(
    "what a TorchScript pass puts into a buffer is sent, but its graph and input stay as they are"
) {
    for (joinable::BufferSync const sync :
         {joinable::BufferSync::after_forward, joinable::BufferSync::before_forward}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            torch::jit::Module model{"Net"};
            Tensor const first = numbers({2}, 0).requires_grad_(true);
            Tensor const second = numbers({2}, 1).requires_grad_(true);
            model.register_parameter("first", first, false);
            model.register_parameter("second", second, false);
            model.register_buffer("hidden", torch::zeros({2}, torch::kDouble));
            model.register_buffer("last", torch::zeros({2}, torch::kDouble));
            model.define(R"(
                def forward(self, x):
                    hidden = torch.tanh(self.first * x)
                    self.hidden = hidden.detach()
                    self.last = x
                    return self.second * hidden
            )");
            joinable::torch::DistributedDataParallel ddp{comm, model, {.buffer_sync = sync}};
            auto const last = [&] { return model.attr("last").toTensor(); };
            for (int round = 0; round < 3; ++round) {
                Tensor sum = torch::zeros({}, torch::kDouble);
                for (int rank = 0; rank < comm.size(); ++rank) {
                    Tensor const x = numbers({2}, 10 * rank + round);
                    sum = sum + (second * torch::tanh(first * x)).sum();
                }
                auto const expected = torch::autograd::grad({sum / comm.size()}, {first, second});
                first.mutable_grad().reset();
                second.mutable_grad().reset();
                Tensor const x = numbers({2}, 10 * comm.rank() + round);
                ddp.forward(std::vector<IValue>{x}).toTensor().sum().backward();
                CHECK(torch::allclose(first.grad(), expected[0], 1e-12, 1e-12));
                CHECK(torch::allclose(second.grad(), expected[1], 1e-12, 1e-12));
                CHECK(torch::equal(x, numbers({2}, 10 * comm.rank() + round)));
                if (sync == joinable::BufferSync::after_forward) {
                    CHECK(torch::equal(last(), numbers({2}, round)));
                }
            }
            Tensor const x = numbers({2}, 10 * comm.rank() + 7);
            model.forward({x});
            ddp.refresh();
            CHECK(torch::equal(x, numbers({2}, 10 * comm.rank() + 7)));
            CHECK(torch::equal(last(), numbers({2}, 7)));
        });
    }
}

/// A module with buffers that may be None, as those of BatchNorm, whose pass assigns to "last".
torch::jit::Module net_with(
    std::vector<std::string> const& names, c10::IValue const& start, std::string const& assigned
) {
    torch::jit::Module model{"Net"};
    model.register_parameter("weight", torch::ones({2}).requires_grad_(true), false);
    for (std::string const& name : names) {
        model.register_attribute(name, c10::OptionalType::ofTensor(), start, false, true);
    }
    model.define(
        "def forward(self, x):\n    self.last = " + assigned + "\n    return self.weight * x\n"
    );
    return model;
}

TEST_CASE("a TorchScript buffer that is None at first is each rank's own until refresh()") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        torch::jit::Module model = net_with({"last"}, {}, "x");
        joinable::torch::DistributedDataParallel ddp{comm, model};
        std::vector<IValue> const inputs{torch::full({2}, comm.rank() + 1.0)};
        for (int epoch = 0; epoch < 2; ++epoch) {
            joinable::Join guard{joinable::participants(ddp)};
            ddp.forward(inputs).toTensor().sum().backward();
            guard.finish();
            CHECK(torch::equal(model.attr("last").toTensor(), inputs[0].toTensor()));
        }
        ddp.refresh();
        CHECK(torch::equal(model.attr("last").toTensor(), torch::ones({2})));
        CHECK(torch::equal(inputs[0].toTensor(), torch::full({2}, comm.rank() + 1.0)));
        torch::jit::Module other = net_with({"last"}, {}, "x");
        CHECK_NOTHROW(joinable::torch::DistributedDataParallel{comm, other, {.ignore = {"last"}}});
    });
}

struct Mistake {
    char const* what;
    char const* sentence; ///< a part of it
    void (*make)(ThreadCommunicator&);
};
bool is_last(ThreadCommunicator& comm) {
    return comm.rank() == comm.size() - 1;
}

Mistake const mistakes[] = {
    {"a frozen module, whose parameters are constants",
     "the list of parameters is empty",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model{"Net"};
         model.register_parameter("weight", torch::ones({2}), false);
         model.define("def forward(self, x):\n    return self.weight * x\n");
         model.eval();
         model = torch::jit::freeze(model);
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"to() after wrapping, on one rank",
     "make the DistributedDataParallel after to()",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = load(0);
         joinable::torch::DistributedDataParallel ddp{comm, model};
         if (is_last(comm)) {
             model.to(torch::kFloat);
         }
         auto input = input_of(0, 0);
         input[0] = input[0].toTensor().to(is_last(comm) ? torch::kFloat : torch::kDouble);
         joinable::Join guard{joinable::participants(ddp)};
         loss_of(ddp.forward(input)).backward();
         guard.finish();
     }},
    {"Sharding::parameters",
     "train a TorchScript module with Sharding::gradients",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = load(0);
         joinable::torch::ShardedDataParallel sharded{
             comm, model, joinable::Sgd{}, {.sharding = joinable::Sharding::parameters}
         };
     }},
    {"half of a tied layer is ignored",
     "DataParallelOptions::ignore names \"head.weight\", but not \"tied.weight\"",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = load(0);
         joinable::torch::DistributedDataParallel ddp{comm, model, {.ignore = {"head.*"}}};
     }},
    {"half of a tied buffer that may be None is ignored",
     "DataParallelOptions::ignore names \"last\", but not \"again\"",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = net_with({"last", "again"}, torch::zeros({2}), "x");
         joinable::torch::DistributedDataParallel ddp{comm, model, {.ignore = {"last"}}};
     }},
    {"a pass that leaves None in a buffer",
     "buffer last is None, but was a tensor",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = net_with({"last"}, torch::zeros({2}), "None");
         joinable::torch::DistributedDataParallel ddp{comm, model};
         ddp.forward(std::vector<IValue>{torch::ones({2})}).toTensor().sum().backward();
     }},
    {"the module's forward()",
     "call ddp.forward(inputs) in place of the module's",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = load(0);
         joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
         loss_of(model.forward(input_of(0, 0))).backward();
     }},
    {"a layer that is not used",
     "not all gradients became ready",
     [](ThreadCommunicator& comm) {
         torch::jit::Module model = load(0);
         joinable::torch::DistributedDataParallel ddp{comm, model};
         loss_of(ddp.forward(input_of(0, 0))).backward();
     }},
};

TEST_CASE("each mistake with a TorchScript module is answered by a sentence on all ranks") {
    for (Mistake const& mistake : mistakes) {
        CAPTURE(mistake.what);
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& all) {
            ThreadCommunicator comm = all.split(0, all.rank()); // what goes wrong ends with it
            std::string text;
            try {
                mistake.make(comm);
            } catch (std::exception const& error) {
                text = error.what();
            }
            CAPTURE(comm.rank());
            CAPTURE(text);
            CHECK(text.find(mistake.sentence) != std::string::npos);
        });
    }
}

TEST_CASE("what a TorchScript module ignores stays each rank's own") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        torch::jit::Module model = load(comm.rank());
        std::string const names[] = {"head.*", "tied.*", "other.*"};
        joinable::torch::DistributedDataParallel ddp{
            comm, model, {.ignore = {names[0], names[1], names[2]}}
        };
        Tensor const bias = model.attr("head").toModule().attr("bias").toTensor();
        CHECK(torch::allclose(bias, numbers({2}, 4) + comm.rank()));
        torch::optim::SGD optimizer{parameters_of(model), 0.0};
        joinable::torch::Step step{comm, optimizer};
        joinable::Join guard{joinable::participants(ddp, step)};
        for (int i = 0; i < inputs_of(comm.rank()); ++i) {
            loss_of(ddp.forward(input_of(comm.rank(), 0))).backward();
            step.step();
        }
        guard.finish();
        CHECK(torch::allclose(bias, numbers({2}, 4) + comm.rank()));
        bool const has_joined = inputs_of(comm.rank()) < inputs_of(0);
        CHECK(bias.grad().defined() == !has_joined);
        Tensor const first = model.attr("first").toModule().attr("bias").toTensor();
        CHECK(first.grad().defined());
    });
}

} // namespace
