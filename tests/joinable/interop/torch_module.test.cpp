// SPDX-License-Identifier: BSL-1.0
// The tensors of a libtorch module that are left out, and those whose gradients are rows.
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>

namespace {

using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::Mismatch;
using joinable::PeerFailed;
using joinable::ThreadCommunicator;
using joinable_tests::run_ranks;
using torch::Tensor;

double number(Tensor const& tensor) {
    return tensor.flatten()[0].item<double>();
}

/// What a constructor throws, with the type of the error before it.
std::string thrown_by(std::function<void()> const& body) {
    try {
        body();
    } catch (ContractViolation const& error) {
        return std::string{"ContractViolation: "} + error.what();
    } catch (PeerFailed const& error) {
        return std::string{"PeerFailed: "} + error.what();
    } catch (Mismatch const& error) {
        return std::string{"Mismatch: "} + error.what();
    }
    return "";
}

// ---- tensors that are left out

/// y = (body + head) x, with a number in each buffer.
struct TwoPartsImpl : torch::nn::Module {
    explicit TwoPartsImpl(int rank)
        : body{register_module(
              "body", torch::nn::Linear{torch::nn::LinearOptions{1, 1}.bias(false)}
          )},
          head{
              register_module("head", torch::nn::Linear{torch::nn::LinearOptions{1, 1}.bias(false)})
          } {
        to(torch::kDouble);
        torch::NoGradGuard const no_graph;
        body->weight.fill_(1 + rank);
        head->weight.fill_(1 + rank);
        sent = register_buffer("sent", torch::full({2}, 10.0 + rank, torch::kDouble));
        kept = register_buffer("kept", torch::full({2}, 10.0 + rank, torch::kDouble));
    }
    Tensor forward(Tensor const& inputs) { return body->forward(inputs) + head->forward(inputs); }

    torch::nn::Linear body, head;
    Tensor sent, kept;
};
TORCH_MODULE(TwoParts);

TEST_CASE("what options.ignore names stays each rank's own, and the rest is averaged") {
    for (bool const finds_unused : {false, true}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            TwoParts model{comm.rank()};
            torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions{0.5}};
            joinable::torch::DistributedDataParallel ddp{
                comm, model, {.find_unused = finds_unused, .ignore = {"head.*", "kept"}}
            };
            joinable::torch::Step step{comm, optimizer};
            CHECK(number(model->body->weight) == 1);
            CHECK(number(model->head->weight) == 1 + comm.rank());
            CHECK(number(model->sent) == 10);
            CHECK(number(model->kept) == 10 + comm.rank());
            int const rounds = 1 + comm.rank() % 2;
            int const last = comm.size() == 1 ? 1 : 2;
            {
                joinable::Join join{joinable::participants(ddp, step)};
                for (int round = 0; round < rounds; ++round) {
                    optimizer.zero_grad();
                    model->sent.fill_(20.0 + comm.rank());
                    model->kept.fill_(20.0 + comm.rank());
                    Tensor const inputs = torch::full({1, 1}, 2.0 + comm.rank(), torch::kDouble);
                    ddp.forward(inputs).sum().backward();
                    double sum = 0;
                    for (int rank = round == 0 ? 0 : 1; rank < comm.size(); rank += 1 + round) {
                        sum += 2.0 + rank;
                    }
                    CHECK(
                        number(model->body->weight.grad()) ==
                        doctest::Approx(sum / comm.size()).epsilon(1e-14)
                    );
                    CHECK(number(model->head->weight.grad()) == 2.0 + comm.rank());
                    CHECK(number(model->sent) == 20 + (round == 0 || comm.size() == 1 ? 0 : 1));
                    CHECK(number(model->kept) == 20 + comm.rank());
                    step.step();
                }
                join.finish();
            }
            double body = 1;
            for (int round = 0; round < last; ++round) {
                for (int rank = round == 0 ? 0 : 1; rank < comm.size(); rank += 1 + round) {
                    body -= 0.5 * (2.0 + rank) / comm.size();
                }
            }
            CHECK(number(model->body->weight) == doctest::Approx(body).epsilon(1e-14));
            // A plain optimizer beside it steps the own gradient in every round that it follows.
            CHECK(number(model->head->weight) == 1 + comm.rank() - last * 0.5 * (2 + comm.rank()));
        });
    }
}

TEST_CASE("a name of nothing is refused with near names, and the others learn of it") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        TwoParts model{comm.rank()};
        DataParallelOptions options;
        options.ignore = {"head.weight", comm.rank() == 0 ? "head.wieght" : "kept"};
        std::string const text =
            thrown_by([&] { joinable::torch::DistributedDataParallel{comm, model, options}; });
        if (comm.rank() == 0) {
            CHECK(
                text ==
                "ContractViolation: DataParallelOptions::ignore has \"head.wieght\", which is the name of no "
                "parameter or buffer of the module; near names are \"head.weight\", \"body.weight\", \"sent\""
            );
        } else {
            CHECK(text.find("PeerFailed: ") == 0);
            CHECK(text.find("near names are \"head.weight\"") != std::string::npos);
        }
    });
    joinable::SelfCommunicator alone;
    torch::nn::Flatten empty;
    CHECK(
        thrown_by([&] { joinable::torch::DistributedDataParallel{alone, empty, {.ignore = {"*"}}}; }
        ) ==
        "ContractViolation: DataParallelOptions::ignore has \"*\", which is the name of no parameter or buffer of the "
        "module, which has none"
    );
}

TEST_CASE("ranks that ignore different names are told both lists") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        TwoParts model{comm.rank()};
        DataParallelOptions options;
        options.ignore = {comm.rank() == 1 ? "kept" : "sent"}; // as many, and of the same extents
        std::string const text =
            thrown_by([&] { joinable::torch::DistributedDataParallel{comm, model, options}; });
        CHECK(
            text.find(
                R"(Mismatch: options differ: ignore: rank 0 has ["sent"], rank 1 has ["kept"])"
            ) == 0
        );
    });
}

/// A weight that is registered under two names.
struct TiedImpl : torch::nn::Module {
    TiedImpl() {
        weight = register_parameter("first", torch::ones({2}));
        register_parameter("second", weight);
        register_parameter("other", torch::ones({3}));
    }
    Tensor weight;
};
TORCH_MODULE(Tied);

TEST_CASE("a tied parameter is ignored by both of its names, or by none") {
    joinable::SelfCommunicator alone;
    Tied model;
    CHECK(
        thrown_by([&] {
            joinable::torch::DistributedDataParallel{alone, model, {.ignore = {"second"}}};
        }) ==
        "ContractViolation: DataParallelOptions::ignore names \"second\", but not \"first\", which is the same "
        "tensor; name both, or neither"
    );
    joinable::torch::DistributedDataParallel ddp{alone, model, {.ignore = {"first", "second"}}};
    REQUIRE(ddp.buckets().size() == 1);
    CHECK(ddp.buckets()[0].parameters.size() == 1);
}

TEST_CASE("a layer that came later is not missed if its name is ignored") {
    joinable::SelfCommunicator alone;
    TwoParts model{0};
    joinable::torch::DistributedDataParallel ddp{alone, model, {.ignore = {"*head*"}}};
    model->register_module("other_head", torch::nn::Linear{1, 1});
    joinable::Join{joinable::participants(ddp)}.finish();
    model->register_module("late", torch::nn::Linear{1, 1});
    CHECK_THROWS_WITH_AS(
        (joinable::Join{joinable::participants(ddp)}),
        doctest::Contains("parameter late.weight came into the module after"),
        ContractViolation
    );
}

} // namespace
