// SPDX-License-Identifier: BSL-1.0
// Mistakes that users of libtorch make, each with the sentence that says so. The last rank makes them, or all ranks; the
// others learn of it.
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>

namespace {

using joinable::DataParallelOptions;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using torch::Tensor;

torch::nn::Sequential two_layers(int width = 3, c10::ScalarType type = torch::kDouble) {
    torch::nn::Sequential model{
        torch::nn::Linear{2, width}, torch::nn::Tanh{}, torch::nn::Linear{width, 1}
    };
    model->to(type);
    return model;
}
Tensor inputs(c10::ScalarType type = torch::kDouble) {
    return torch::ones({2, 2}, type);
}

/// A training whose parts are there, on each rank.
struct Parts {
    explicit Parts(ThreadCommunicator& c, DataParallelOptions const& options = {})
        : comm{c}, ddp{std::in_place, comm, model, options}, step{comm, optimizer} {}

    [[nodiscard]] bool is_last() const { return comm.rank() == comm.size() - 1; }
    Tensor loss() { return ddp->forward(inputs()).sum(); }
    /// Rounds in a guard; in the second one the last rank does something else.
    template <class Round>
    void train(Round&& mistaken) {
        joinable::Join guard{joinable::participants(*ddp, step)};
        for (int i = 0; i < 3; ++i) {
            model->zero_grad();
            if (i == 1 && is_last()) {
                mistaken();
            } else {
                loss().backward();
                step.step();
            }
        }
        guard.finish();
    }

    ThreadCommunicator& comm;
    torch::nn::Sequential model = two_layers();
    torch::optim::SGD optimizer{model->parameters(), 0.1};
    using Ddp = decltype(joinable::torch::DistributedDataParallel{
        std::declval<ThreadCommunicator&>(), std::declval<torch::nn::Sequential&>()
    });
    std::optional<Ddp> ddp;
    joinable::torch::Step<ThreadCommunicator, torch::optim::SGD> step;
};

struct Mistake {
    char const* what;
    char const* sentence; ///< a part of it
    void (*make)(ThreadCommunicator&);
    int fewest_ranks = 1;          ///< that can make it
    char const* others = sentence; ///< for the other ranks
};

torch::nn::Sequential& shared_model() {
    static torch::nn::Sequential model = two_layers();
    return model;
}

struct WithoutDerivative : torch::autograd::Function<WithoutDerivative> {
    static Tensor forward(torch::autograd::AutogradContext*, Tensor const& x) { return x.clone(); }
    static torch::autograd::variable_list
    backward(torch::autograd::AutogradContext*, torch::autograd::variable_list const&) {
        throw std::runtime_error{"a function has no derivative"};
    }
};

bool is_last(ThreadCommunicator& comm) {
    return comm.rank() == comm.size() - 1;
}

Mistake const mistakes[] = {
    {"to() after wrapping",
     "make the DistributedDataParallel after to()",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             parts.model->to(torch::kFloat);
             parts.ddp->forward(inputs(torch::kFloat)).sum().backward();
         });
     }},
    {"unfreezing after wrapping",
     "requires a gradient now, but did not when the DistributedDataParallel was made",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         model->parameters()[0].requires_grad_(false);
         joinable::torch::DistributedDataParallel ddp{comm, model};
         model->parameters()[0].requires_grad_(true);
         ddp.forward(inputs()).sum().backward();
     }},
    {"freezing after wrapping",
     "are frozen now",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.model->parameters()[0].requires_grad_(false);
         parts.loss().backward();
     }},
    {"one module for all thread ranks",
     "share the value of parameter 0 (0.weight); make a model for each rank",
     [](ThreadCommunicator& comm) {
         joinable::torch::DistributedDataParallel ddp{comm, shared_model()};
     },
     2},
    {"another model on one rank",
     "has f64 (3, 2), rank ",
     [](ThreadCommunicator& comm) {
         auto model = two_layers(is_last(comm) ? 4 : 3);
         joinable::torch::DistributedDataParallel ddp{comm, model};
     },
     2},
    {"another dtype on one rank",
     "models differ: parameter 0 (0.weight): rank 0 has f64 (3, 2)",
     [](ThreadCommunicator& comm) {
         auto model = two_layers(3, is_last(comm) ? torch::kFloat : torch::kDouble);
         joinable::torch::DistributedDataParallel ddp{comm, model};
     },
     2},
    {"buffers of other extents on one rank",
     "models differ: buffer 0: rank 0 has f32 (3)",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         model->register_buffer("seen", torch::zeros({is_last(comm) ? 2 : 3}));
         joinable::torch::DistributedDataParallel ddp{comm, model};
     },
     2},
    {"a parameter of 8-bit or half complex numbers",
     "a torch::Tensor has elements of type ComplexHalf",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         model->register_parameter("table", torch::empty({2}, torch::kComplexHalf), false);
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"backward twice",
     "call ddp.forward(inputs) in place of the module's",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             Tensor const loss = parts.loss();
             loss.backward({}, true);
             loss.backward();
         });
     }},
    {"the module's forward()",
     "call ddp.forward(inputs) in place of the module's",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.model->forward(inputs()).sum().backward(); });
     }},
    {"forward() twice",
     "the previous forward pass had no backward pass",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             Tensor const first = parts.loss();
             (first + parts.loss()).backward();
         });
     }},
    {"no backward pass",
     "(a forward without its backward?)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             parts.loss();
             parts.step.step();
         });
     }},
    {"no backward pass, and the end",
     "announced round 0, but never waited for it (a forward without its backward?)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         joinable::Join guard{joinable::participants(*parts.ddp)};
         Tensor const loss = parts.loss();
         guard.finish();
         loss.backward();
     }},
    {"no step",
     "the next one in hook order is participant 1 (Step)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.loss().backward(); });
     }},
    {"a step without a round",
     "the first one in hook order is participant 0 (DistributedDataParallel)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.step.step(); });
     }},
    {"NoGradGuard on one rank",
     "ranks disagree about round 1: phase: rank 0 has train",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             torch::NoGradGuard const no_graph;
             parts.loss();
             parts.step.step();
         });
     },
     2},
    {"a backward pass of an evaluation",
     "does not require grad and does not have a grad_fn",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         torch::NoGradGuard const no_graph;
         parts.loss().backward();
     }},
    {"a loss that is no scalar",
     "grad can be implicitly created only for scalar outputs",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.ddp->forward(inputs()).backward(); });
     },
     1,
     "an exception left the guard"},
    {"a loss without the module",
     "(a forward without its backward?)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             Tensor const outputs = parts.loss().detach().requires_grad_(true);
             (outputs * 2).backward();
             parts.step.step();
         });
     }},
    {"a part of the module unused",
     "not all gradients became ready",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             parts.ddp
                 ->forward([&] {
                     return parts.model[2]
                         ->as<torch::nn::Linear>()
                         ->forward(torch::ones({1, 3}, torch::kDouble))
                         .sum();
                 })
                 .backward();
             parts.step.step();
         });
     }},
    {"a module without parameters",
     "the list of parameters is empty",
     [](ThreadCommunicator& comm) {
         torch::nn::Sequential model{torch::nn::Tanh{}};
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"a module without trained parameters",
     "no parameter requires a gradient",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         for (Tensor& parameter : model->parameters()) {
             parameter.requires_grad_(false);
         }
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"an empty holder on one rank",
     "a holder or a pointer was given that refers to no module; make the module first",
     [](ThreadCommunicator& comm) {
         auto model = is_last(comm) ? torch::nn::Sequential{nullptr} : two_layers();
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"a null pointer on one rank",
     "a holder or a pointer was given that refers to no module; make the module first",
     [](ThreadCommunicator& comm) {
         auto model = is_last(comm) ? nullptr : two_layers().ptr();
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"a parameter that is computed from others, on one rank",
     "parameter twice is computed from other tensors, so a backward pass adds no gradient to it; register",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         Tensor const twice = model->parameters()[0] * 2;
         model->register_parameter("twice", is_last(comm) ? twice : twice.detach());
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"a module made in InferenceMode",
     "Inference tensors cannot be saved for backward",
     [](ThreadCommunicator& comm) {
         torch::nn::Sequential model{nullptr};
         {
             c10::InferenceMode const inference;
             model = two_layers();
         }
         joinable::torch::DistributedDataParallel ddp{comm, model};
         ddp.forward(inputs()).sum().backward();
     }},
    {"create_graph",
     "has a graph of its own (create_graph)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             parts.loss().backward({}, {}, true);
             parts.step.step();
         });
     }},
    {"a sparse gradient of a parameter that was not named",
     "name it in DataParallelOptions::sparse",
     [](ThreadCommunicator& comm) {
         torch::nn::Embedding model{torch::nn::EmbeddingOptions{3, 2}};
         joinable::torch::DistributedDataParallel ddp{comm, model};
         ddp.forward([&] {
                return torch::embedding(
                           model->weight, torch::zeros({1}, torch::kLong), -1, false, true
                )
                    .sum();
            }
         ).backward();
     }},
    {"the model is destroyed before the backward pass",
     "was destroyed between forward() and its backward pass",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         Tensor const loss = parts.loss();
         parts.ddp.reset();
         loss.backward();
     }},
    {"two models of one module",
     "both average parameter 0 (0.weight)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         Parts::Ddp second{comm, parts.model};
         joinable::Join guard{joinable::participants(*parts.ddp, second)};
     }},
    {"a function without a derivative",
     "a function has no derivative",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.ddp->backward(WithoutDerivative::apply(parts.loss())); });
     }},
    {"a hook that throws",
     "a hook has had enough",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             Tensor const outputs = parts.ddp->forward(inputs());
             outputs.register_hook([](Tensor const&) {
                 throw std::runtime_error{"a hook has had enough"};
             });
             parts.ddp->backward(outputs.sum());
         });
     }},
    {"a layer after wrapping",
     "parameter extra.weight came into the module after the DistributedDataParallel was made",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.model->register_module("extra", torch::nn::Linear{2, 2});
         parts.train([] {});
     }},
    {"a layer in place of another one after wrapping",
     "parameter 2.weight came into the module after the DistributedDataParallel was made",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.model->replace_module("2", torch::nn::Linear{3, 1});
         parts.train([] {});
     }},
    {"layers in another order on one rank",
     "models differ: parameter 0 (0.weight): rank 0 has f64 (3, 2), rank ",
     [](ThreadCommunicator& comm) {
         torch::nn::Linear const narrow{2, 3}, wide{3, 1};
         torch::nn::Sequential model{
             is_last(comm) ? wide : narrow, torch::nn::Tanh{}, is_last(comm) ? narrow : wide
         };
         model->to(torch::kDouble);
         joinable::torch::DistributedDataParallel ddp{comm, model};
     },
     2},
    {"a layer that is frozen on one rank",
     "models differ: parameter 0 (0.weight): rank 0 has f64 (3, 2)",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         model->parameters()[0].requires_grad_(!is_last(comm));
         joinable::torch::DistributedDataParallel ddp{comm, model};
     },
     2},
    {"a parameter on a device that is none",
     "a torch::Tensor is on meta; joinable knows cpu and cuda",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         model->register_parameter("late", torch::empty({2}, torch::device(torch::kMeta)));
         joinable::torch::DistributedDataParallel ddp{comm, model};
     }},
    {"a name to ignore that is none",
     "DataParallelOptions::ignore has \"first.weight\", which is the name of no parameter or buffer",
     [](ThreadCommunicator& comm) { Parts const parts{comm, {.ignore = {"first.weight"}}}; }},
    {"a batch of another width",
     "mat1 and mat2 shapes cannot be multiplied",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.ddp->forward(torch::ones({2, 3}, torch::kDouble)); });
     },
     1,
     "an exception left the guard"},
    {"a batch of another type",
     "dtype",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.ddp->forward(inputs(torch::kFloat)); });
     },
     1,
     "an exception left the guard"},
    {"a clone of the module is trained",
     "(a forward without its backward?)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         auto const clone =
             std::dynamic_pointer_cast<torch::nn::SequentialImpl>(parts.model->clone());
         parts.train([&] {
             parts.ddp->forward([&] { return clone->forward(inputs()); }).sum().backward();
             parts.step.step();
         });
     }},
    {"two steps in a round",
     "participant 1 (Step)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] {
             parts.loss().backward();
             parts.step.step();
             parts.step.step();
         });
     }},
    {"refresh() in a guard",
     "refresh() was called in a guard or in a round; call it before, on every rank",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.train([&] { parts.ddp->refresh(); });
     },
     1,
     "an exception left the guard"},
    {"refresh() in a round",
     "refresh() was called in a guard or in a round; call it before, on every rank",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         Tensor const loss = parts.loss();
         parts.ddp->refresh();
     }},
    {"refresh() of another module on one rank",
     "models differ: parameter 0 (0.weight)",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         parts.model->parameters()[0].requires_grad_(!is_last(comm));
         parts.ddp->refresh();
     },
     2},
    {"refresh() after what is ignored has gone",
     "DataParallelOptions::ignore has \"extra.weight\", which is the name of no parameter or buffer",
     [](ThreadCommunicator& comm) {
         auto model = two_layers();
         model->register_module("extra", torch::nn::Linear{2, 2});
         joinable::torch::DistributedDataParallel ddp{
             comm, model, {.ignore = {"extra.weight", "extra.bias"}}
         };
         if (is_last(comm)) {
             model->unregister_module("extra");
         }
         ddp.refresh();
     }},
    {"refresh() of a module without trained parameters",
     "no parameter requires a gradient",
     [](ThreadCommunicator& comm) {
         Parts parts{comm};
         for (Tensor& parameter : parts.model->parameters()) {
             parameter.requires_grad_(!is_last(comm));
         }
         parts.ddp->refresh();
     },
     1,
     "models differ"},
};

TEST_CASE("each mistake of a libtorch user is answered by one sentence, and nobody hangs") {
    for (Mistake const& mistake : mistakes) {
        CAPTURE(mistake.what);
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& all) {
            if (all.size() < mistake.fewest_ranks) {
                return;
            }
            ThreadCommunicator comm = all.split(0, all.rank()); // what goes wrong ends with it
            std::string text;
            try {
                mistake.make(comm);
            } catch (std::exception const& error) {
                text = error.what();
            }
            CAPTURE(comm.rank());
            CAPTURE(text);
            bool const is_told = text.find(mistake.sentence) != std::string::npos;
            CHECK((is_told || (!is_last(comm) && text.find(mistake.others) != std::string::npos)));
        });
    }
}

} // namespace
