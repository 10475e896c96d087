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
            // In rounds that it follows a rank has no gradient of its own.
            CHECK(
                number(model->head->weight) == 1 + comm.rank() - rounds * 0.5 * (2 + comm.rank())
            );
        });
    }
}

TEST_CASE("a joined rank keeps what it accumulated for ignored parameters until it is stepped, once"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        TwoParts model{comm.rank()};
        torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions{0.5}};
        joinable::torch::DistributedDataParallel ddp{comm, model, {.ignore = {"head.*", "kept"}}};
        joinable::torch::Step step{comm, optimizer};
        Tensor const inputs = torch::ones({1, 1}, torch::kDouble);
        int const is_odd = comm.rank() % 2;
        auto const epoch = [&](int batches) {
            joinable::Join join{joinable::participants(ddp, step), {.sync_every = 4}};
            for (int batch = 1; batch <= batches; ++batch) {
                ddp.forward(inputs).sum().backward();
                if (batch % 4 == 0) {
                    step.step();
                    optimizer.zero_grad();
                }
            }
            if (is_odd == 0) { // the others have joined
                torch::NoGradGuard const no_graph;
                static_cast<void>(ddp.forward(inputs));
            }
            join.finish();
        };
        double const odd = comm.size() / 2; // ranks
        epoch(is_odd != 0 ? 3 : 8);         // the second window of odd ranks is empty
        double const body = 1 - 0.5 * (8 - 5 * odd / comm.size());
        CHECK(number(model->body->weight) == doctest::Approx(body).epsilon(1e-14));
        CHECK(number(model->head->weight) == 1 + comm.rank() - 0.5 * (is_odd != 0 ? 3 : 8));
        optimizer.zero_grad();
        epoch(is_odd != 0 ? 1 : 2); // no round syncs
        epoch(4);                   // goes on with what they hold
        CHECK(
            number(model->body->weight) ==
            doctest::Approx(body - 0.5 * (6 - odd / comm.size())).epsilon(1e-14)
        );
        CHECK(number(model->head->weight) == 1 + comm.rank() - 0.5 * (is_odd != 0 ? 3 + 5 : 8 + 6));
    });
}

TEST_CASE("a joined rank whose gradients stay untouched keeps those of ignored parameters, too") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        TwoParts model{comm.rank()};
        joinable::torch::DistributedDataParallel ddp{
            comm,
            model,
            {.joined_gradients = joinable::JoinedGradients::untouched, .ignore = {"head.*", "kept"}}
        };
        Tensor const inputs = torch::full({1, 1}, 2.0 + comm.rank(), torch::kDouble);
        int const batches = comm.rank() % 2 != 0 ? 3 : 8; // odd ranks join within the first window
        joinable::Join join{
            joinable::participants(ddp), {.sync_every = 4, .carry_accumulated = false}
        };
        for (int batch = 0; batch < batches; ++batch) {
            ddp.forward(inputs).sum().backward();
        }
        join.finish();
        CHECK(number(model->head->weight.grad()) == batches * (2.0 + comm.rank()));
        if (comm.rank() % 2 != 0) {
            CHECK(number(model->body->weight.grad()) == batches * (2.0 + comm.rank()));
        }
    });
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

// ---- gradients that are rows

/// Embeddings, whose gradients are rows or not, and a layer without them.
struct WordsImpl : torch::nn::Module {
    static constexpr std::int64_t words = 11;
    static constexpr std::int64_t width = 3;

    explicit WordsImpl(bool is_sparse)
        : one{register_module(
              "one",
              torch::nn::Embedding{torch::nn::EmbeddingOptions{words, width}.sparse(is_sparse)}
          )},
          bag{register_module(
              "bag",
              torch::nn::EmbeddingBag{
                  torch::nn::EmbeddingBagOptions{words, width}.mode(torch::kSum).sparse(is_sparse)
              }
          )},
          last{register_module("last", torch::nn::Linear{width, 1})} {
        torch::NoGradGuard const no_graph;
        float element = 0;
        for (Tensor& parameter : parameters()) {
            auto values = parameter.view({-1});
            for (std::int64_t i = 0; i < values.size(0); ++i) {
                element = element > 2 ? element - 3.1F : element + 0.37F;
                values[i] = element;
            }
        }
    }
    Tensor forward(Tensor const& indices, bool uses_bag) {
        Tensor sum = one->forward(indices).tanh().sum(0);
        if (uses_bag) {
            sum = sum + bag->forward(indices, torch::zeros({1}, torch::kLong)).tanh().sum(0);
        }
        return last->forward(sum.unsqueeze(0)).sum();
    }

    torch::nn::Embedding one;
    torch::nn::EmbeddingBag bag;
    torch::nn::Linear last;
};
TORCH_MODULE(Words);

/// Some indices twice, and none in some rounds.
Tensor indices_of(int rank, int round) {
    std::vector<std::int64_t> indices;
    for (int k = 0; k < (2 * rank + 3 * round) % 6; ++k) {
        indices.push_back((rank * 7 + round * 5 + k * k * 3) % WordsImpl::words);
    }
    return torch::tensor(indices, torch::kLong);
}

void check_rows(Tensor const& gradient, Tensor const& dense) {
    REQUIRE(gradient.defined());
    REQUIRE(gradient.is_sparse());
    CHECK(gradient.is_coalesced());
    Tensor const indices = gradient.indices()[0];
    for (std::int64_t i = 1; i < indices.size(0); ++i) {
        CHECK(indices[i - 1].item<std::int64_t>() < indices[i].item<std::int64_t>());
    }
    CHECK(torch::equal(gradient.to_dense(), dense));
}

TEST_CASE("sparse gradients of embeddings have the bits of dense ones, on ranks with uneven inputs"
) {
    for (bool const finds_unused : {false, true}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            Words sparse{true};
            Words dense{false};
            DataParallelOptions const options{.find_unused = finds_unused};
            joinable::torch::DistributedDataParallel ddp{comm, sparse, options};
            joinable::torch::DistributedDataParallel twin{comm, dense, options};
            int const rounds = 1 + comm.rank() * 3 % 4;
            Tensor kept;
            Tensor kept_copy;
            {
                joinable::Join join{joinable::participants(ddp, twin)};
                for (int round = 0; round < rounds; ++round) {
                    Tensor const indices = indices_of(comm.rank(), round);
                    bool const uses_bag = !finds_unused || (comm.rank() + round) % 3 == 1;
                    sparse->zero_grad(true);
                    dense->zero_grad(true);
                    ddp.forward(indices, uses_bag).backward();
                    twin.forward(indices, uses_bag).backward();
                    check_rows(sparse->one->weight.grad(), dense->one->weight.grad());
                    if (dense->bag->weight.grad().defined()) {
                        check_rows(sparse->bag->weight.grad(), dense->bag->weight.grad());
                    } else {
                        CHECK(!sparse->bag->weight.grad().defined());
                    }
                    CHECK(torch::equal(sparse->last->weight.grad(), dense->last->weight.grad()));
                    if (round == 0) {
                        kept = sparse->one->weight.grad();
                        kept_copy = kept.to_dense();
                    }
                }
                join.finish();
            }
            CHECK(torch::equal(kept.to_dense(), kept_copy)); // it had memory of its own
            bool has_joined = false;
            for (int rank = 0; rank < comm.size(); ++rank) {
                has_joined = has_joined || 1 + rank * 3 % 4 > rounds;
            }
            if (has_joined) { // and has no average left that its optimizer could use twice
                CHECK(sparse->one->weight.grad()._nnz() == 0);
            }
        });
    }
}

TEST_CASE("a sparse gradient is the mean over ranks of the rows that each has") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        torch::nn::Embedding table{torch::nn::EmbeddingOptions{6, 2}.sparse(true)};
        joinable::torch::DistributedDataParallel ddp{comm, table};
        CHECK(ddp.buckets().empty());
        auto const rank = static_cast<std::int64_t>(comm.rank());
        // Row 5 three times from each rank, and row rank % 5 as often as its number says.
        std::vector<std::int64_t> indices{5, 5, 5};
        indices.insert(indices.end(), static_cast<std::size_t>(rank), rank % 5);
        ddp.forward(torch::tensor(indices, torch::kLong)).sum().backward();
        std::vector<double> counts(6);
        counts[5] = 3 * comm.size();
        for (int other = 0; other < comm.size(); ++other) {
            counts[static_cast<std::size_t>(other % 5)] += other;
        }
        Tensor const gradient = table->weight.grad().to_dense();
        for (std::size_t row = 0; row < counts.size(); ++row) {
            for (int column = 0; column < 2; ++column) {
                CHECK(
                    gradient[static_cast<std::int64_t>(row)][column].item<double>() ==
                    doctest::Approx(counts[row] / comm.size()).epsilon(1e-6)
                );
            }
        }
    });
}

TEST_CASE("rows that zero_grad() cleared are none, also where a batch is skipped") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        torch::nn::Embedding model{torch::nn::EmbeddingOptions{8, 2}.sparse(true)};
        joinable::torch::DistributedDataParallel ddp{comm, model};
        Tensor expected = torch::zeros({8, 2});
        expected.slice(0, 0, comm.size()) += 1.0 / comm.size();
        for (int round = 0; round < 3; ++round) {
            model->zero_grad(false); // libtorch 1.13 leaves a gradient of two sparse dimensions
            if (round == 1 && comm.rank() == 0) {
                ddp.skip();
            } else {
                ddp.forward(torch::tensor({comm.rank()}, torch::kLong)).sum().backward();
            }
            expected[0] = round == 1 ? 0 : 1.0 / comm.size();
            CHECK(torch::allclose(model->weight.grad().to_dense(), expected));
        }
    });
}

TEST_CASE("rows that zero_grad() cleared are none where a pass does not use their table") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        auto const options = torch::nn::EmbeddingOptions{8, 2}.sparse(true);
        torch::nn::Sequential model{torch::nn::Embedding{options}, torch::nn::Embedding{options}};
        joinable::torch::DistributedDataParallel ddp{comm, model, {.find_unused = true}};
        Tensor const words = torch::tensor({comm.rank()}, torch::kLong);
        auto const rows_of = [&](int table) {
            return model[static_cast<std::size_t>(table)]->as<torch::nn::Embedding>()->forward(words
            );
        };
        Tensor expected = torch::zeros({8, 2});
        expected.slice(0, 0, comm.size()) += 1.0 / comm.size();
        for (int round = 0; round < 3; ++round) {
            model->zero_grad(false); // libtorch 1.13 leaves gradients of two sparse dimensions
            bool const uses_both = round != 1 || comm.rank() != 0;
            Tensor const sum = ddp.forward([&] {
                return uses_both ? (rows_of(0) + rows_of(1)).sum() : rows_of(0).sum();
            });
            sum.backward();
            CHECK(torch::allclose(model->parameters()[0].grad().to_dense(), expected));
            Tensor second = expected.clone();
            second[0] = round == 1 ? 0 : 1.0 / comm.size();
            CHECK(torch::allclose(model->parameters()[1].grad().to_dense(), second));
        }
    });
}

TEST_CASE("rows of passes that do not sync travel with the next one, and an optimizer steps by them"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        Words sparse{true};
        Words dense{false};
        joinable::torch::DistributedDataParallel ddp{comm, sparse};
        joinable::torch::DistributedDataParallel twin{comm, dense};
        torch::optim::SGD optimizer{sparse->parameters(), torch::optim::SGDOptions{0.1}};
        torch::optim::SGD other{dense->parameters(), torch::optim::SGDOptions{0.1}};
        joinable::torch::Step step{comm, optimizer};
        joinable::torch::Step other_step{comm, other};
        joinable::Join join{joinable::participants(ddp, step, twin, other_step)};
        for (int window = 0; window < 1 + comm.rank() % 2; ++window) {
            optimizer.zero_grad();
            other.zero_grad();
            for (int micro = 0; micro < 3; ++micro) {
                Tensor const indices = indices_of(comm.rank(), 3 * window + micro);
                bool const syncs = micro == 2;
                ddp.forward({.will_sync = syncs}, indices, true).backward();
                twin.forward({.will_sync = syncs}, indices, true).backward();
                if (syncs) {
                    step.step();
                    other_step.step();
                }
            }
        }
        join.finish();
        for (std::size_t i = 0; i < sparse->parameters().size(); ++i) {
            CHECK(torch::allclose(sparse->parameters()[i], dense->parameters()[i], 1e-5, 1e-6));
        }
    });
}

/// A table that is looked up by a function, or by a product with all of it.
struct LookupImpl : torch::nn::Module {
    LookupImpl()
        : table{register_parameter("table", torch::ones({5, 2}))},
          known{register_module(
              "known", torch::nn::Embedding{torch::nn::EmbeddingOptions{5, 2}.sparse(true)}
          )} {}
    Tensor forward(bool is_sparse, bool is_dense = false) {
        Tensor const indices = torch::tensor({1, 3, 1}, torch::kLong);
        Tensor const rows = known->forward(indices);
        Tensor sum = rows.sum() + torch::embedding(table, indices, -1, false, is_sparse).sum();
        return is_dense ? sum + known->weight.sum() : sum;
    }
    Tensor table;
    torch::nn::Embedding known;
};
TORCH_MODULE(Lookup);

TEST_CASE("a parameter that is no embedding is named, to have sparse gradients") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        Lookup model;
        joinable::torch::DistributedDataParallel ddp{comm, model, {.sparse = {"tab*"}}};
        ddp.forward(true).backward();
        Tensor const rows = model->table.grad();
        CHECK(torch::equal(rows._indices()[0], torch::tensor({1, 3}, torch::kLong)));
        CHECK(torch::allclose(rows._values()[0], torch::full({2}, 2.0F)));
        CHECK(torch::allclose(rows._values()[1], torch::ones({2})));
        std::string const text = thrown_by([&] {
            joinable::torch::DistributedDataParallel{comm, model, {.sparse = {"tabel"}}};
        });
        CHECK(text.find("sparse has \"tabel\"") != std::string::npos);
        CHECK(text.find("near names are \"table\"") != std::string::npos);
    });
}

TEST_CASE("a gradient of the other kind is refused by name, and the others learn of it") {
    for (bool const is_sparse : {true, false}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            Lookup model;
            std::string const text = thrown_by([&] {
                joinable::torch::DistributedDataParallel ddp{comm, model};
                joinable::Join join{joinable::participants(ddp)};
                bool const is_culprit = comm.rank() == 0;
                ddp.backward(ddp.forward(is_culprit && is_sparse, is_culprit && !is_sparse));
                join.finish();
            });
            CAPTURE(text);
            CHECK(text.find(comm.rank() == 0 ? "ContractViolation: " : "PeerFailed: ") == 0);
            char const* const expected =
                is_sparse
                    ? "(table) on rank 0 has a sparse gradient, but its gradients were dense"
                    : "(known.weight) on rank 0 has a dense gradient, but its gradients were sparse";
            CHECK(text.find(expected) != std::string::npos);
        });
    }
}

TEST_CASE("ranks that have other embeddings with sparse gradients are refused") {
    run_ranks({2, 3, 4}, [](ThreadCommunicator& comm) {
        Words model{comm.rank() != 1};
        std::string const text =
            thrown_by([&] { joinable::torch::DistributedDataParallel{comm, model}; });
        CHECK(text.find("Mismatch: models differ: parameter 0 (one.weight)") == 0);
        CHECK(text.find("sparse gradients") != std::string::npos);
    });
}

TEST_CASE("an embedding on its own, in a holder of layers or frozen, is found") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        torch::nn::Sequential model{
            torch::nn::Embedding{torch::nn::EmbeddingOptions{4, 2}.sparse(true)},
            torch::nn::Linear{2, 1}
        };
        auto const parameters = joinable::torch::parameters(model);
        CHECK(parameters[0].is_sparse());
        CHECK(!parameters[1].is_sparse());
        model[0]->as<torch::nn::Embedding>()->weight.requires_grad_(false);
        joinable::torch::DistributedDataParallel ddp{comm, model};
        ddp.forward(torch::tensor({1, 2}, torch::kLong)).sum().backward();
        CHECK(!model[0]->as<torch::nn::Embedding>()->weight.grad().defined());
    });
}

} // namespace

TEST_CASE("with sparse_as_dense embeddings get dense gradients, also as views of buckets") {
    for (bool const are_views : {false, true}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            Words sparse{true};
            Words dense{false};
            joinable::torch::DistributedDataParallel ddp{
                comm,
                sparse,
                DataParallelOptions{.gradient_as_bucket_view = are_views, .sparse_as_dense = true}
            };
            joinable::torch::DistributedDataParallel twin{comm, dense, DataParallelOptions{}};
            joinable::Join join{joinable::participants(ddp, twin)};
            for (int round = 0; round < 2 + comm.rank(); ++round) {
                Tensor const indices = indices_of(comm.rank(), round);
                bool const drops = round != 1; // else rows are added to dense zeros
                sparse->zero_grad(drops);
                dense->zero_grad(drops);
                ddp.forward(indices, true).backward();
                twin.forward(indices, true).backward();
                CHECK(!sparse->one->weight.grad().is_sparse());
                CHECK(torch::equal(sparse->one->weight.grad(), dense->one->weight.grad()));
                CHECK(torch::equal(sparse->bag->weight.grad(), dense->bag->weight.grad()));
                CHECK(torch::equal(sparse->last->weight.grad(), dense->last->weight.grad()));
            }
            join.finish();
        });
    }
}
