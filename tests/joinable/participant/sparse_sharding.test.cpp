// SPDX-License-Identifier: BSL-1.0
// Sharded training of embeddings whose gradients are rows: owners send the rows that they have stepped.
#include <joinable/join.hpp>
#include <joinable/zero.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/embedding.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>

namespace {

using joinable::ContractViolation;
using joinable::Sgd;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;
using joinable_tests::Embedding;

/// Two embeddings and a dense parameter, which a pass of each rank gives rows in each of its rounds.
struct WordModel {
    static constexpr double rate = 0.5;

    explicit WordModel(bool are_rows)
        : embeddings{Embedding{are_rows}, Embedding{are_rows}, Embedding{false}} {
        for (std::size_t e = 0; e < embeddings.size(); ++e) {
            for (std::size_t i = 0; i < embeddings[e].value.size(); ++i) {
                embeddings[e].value[i] = static_cast<float>(first(e, i));
            }
        }
        clear();
    }

    static double first(std::size_t e, std::size_t i) {
        return static_cast<double>((i + 5 * e) % 7) * 0.25 - 0.5;
    }
    static int inputs_of(int rank) { return 2 + rank * 3 % 5; }
    static std::size_t rows_of(int rank, int round, std::size_t e) {
        return (static_cast<std::size_t>(rank * 2 + round * 3) + e) % 6; // also none
    }
    static std::size_t index_of(int rank, int round, std::size_t e, std::size_t k) {
        return (static_cast<std::size_t>(rank * 7 + round * 5) + k * k * 3 + e) % Embedding::words;
    }
    static float element_of(int rank, int round, std::size_t k, std::size_t column) {
        std::size_t const number = static_cast<std::size_t>(rank + 3 * round) + 5 * k + 7 * column;
        return static_cast<float>(number % 13) * 0.37F - 2.0F;
    }

    void clear() {
        for (Embedding& embedding : embeddings) {
            embedding.indices.reset();
            embedding.rows.clear();
            embedding.dense.assign(embedding.is_sparse ? 0 : embedding.value.size(), 0.0F);
        }
    }
    void pass(int rank, int round) {
        for (std::size_t e = 0; e < embeddings.size(); ++e) {
            Embedding& embedding = embeddings[e];
            if (embedding.is_sparse) {
                embedding.indices.emplace();
            }
            for (std::size_t k = 0; k < rows_of(rank, round, e); ++k) {
                std::size_t const row = index_of(rank, round, e, k);
                for (std::size_t c = 0; c < Embedding::width; ++c) {
                    float const element = element_of(rank, round, k, c);
                    if (embedding.is_sparse) {
                        embedding.rows.push_back(element);
                    } else {
                        embedding.dense[row * Embedding::width + c] += element;
                    }
                }
                if (embedding.is_sparse) {
                    embedding.indices->push_back(static_cast<std::int64_t>(row));
                }
            }
        }
    }
    [[nodiscard]] joinable::ParameterList parameters() {
        std::vector<Embedding*> list;
        for (Embedding& embedding : embeddings) {
            list.push_back(&embedding);
        }
        return joinable::parameters(list);
    }

    /// The value of an element after all rounds of all ranks: plain SGD in double.
    static double trained(int ranks, std::size_t e, std::size_t i) {
        double value = first(e, i);
        for (int rank = 0; rank < ranks; ++rank) {
            for (int round = 0; round < inputs_of(rank); ++round) {
                for (std::size_t k = 0; k < rows_of(rank, round, e); ++k) {
                    std::size_t const row = index_of(rank, round, e, k);
                    if (row == i / Embedding::width) {
                        value -= rate / ranks * element_of(rank, round, k, i % Embedding::width);
                    }
                }
            }
        }
        return value;
    }

    std::array<Embedding, 3> embeddings;
};

/// Trains both; what they train has to be plain SGD, bit for bit the same.
template <class Comm, class Train>
void check_training(Comm& comm, Train const& train) {
    WordModel sparse{true};
    WordModel dense{false};
    train(sparse);
    train(dense);
    for (std::size_t e = 0; e < sparse.embeddings.size(); ++e) {
        CHECK(sparse.embeddings[e].value == dense.embeddings[e].value);
        for (std::size_t i = 0; i < sparse.embeddings[e].value.size(); ++i) {
            double const trained = WordModel::trained(comm.size(), e, i);
            CHECK(
                static_cast<double>(sparse.embeddings[e].value[i]) ==
                doctest::Approx(trained).epsilon(1e-5)
            );
        }
    }
}

std::string refusal_of_rows(ZeroOptions const& options, auto const& rule) {
    joinable::SelfCommunicator comm;
    WordModel model{true};
    try {
        ZeroRedundancyOptimizer zero{comm, model.parameters(), rule, options};
    } catch (ContractViolation const& error) {
        return error.what();
    }
    return "";
}

} // namespace

TEST_CASE("sharded embeddings train as dense ones do, also if their owners have joined") {
    auto const body = [](auto& comm) {
        for (bool const own_together : {false, true}) {
            std::vector<int> const owners =
                own_together ? std::vector<int>{0, 0, 0}
                             : std::vector<int>{comm.size() - 1, 0, comm.size() / 2};
            for (Sharding const sharding : {Sharding::none, Sharding::optimizer}) {
                check_training(comm, [&](WordModel& model) {
                    ShardedDataParallel sharded{
                        comm,
                        model.parameters(),
                        Sgd{.learning_rate = WordModel::rate},
                        ShardedOptions{.sharding = sharding, .owners = owners}
                    };
                    joinable::Join join{joinable::participants(sharded)};
                    for (int round = 0; round < WordModel::inputs_of(comm.rank()); ++round) {
                        model.clear();
                        sharded.forward([] {});
                        sharded.backward([&](auto ready) {
                            model.pass(comm.rank(), round);
                            for (std::size_t i : {2U, 0U, 1U}) {
                                ready(i);
                            }
                        });
                        sharded.step();
                    }
                    join.finish();
                });
            }
            check_training(comm, [&](WordModel& model) {
                joinable::DistributedDataParallel ddp{comm, model.parameters()};
                ZeroRedundancyOptimizer zero{
                    comm,
                    model.parameters(),
                    Sgd{.learning_rate = WordModel::rate},
                    ZeroOptions{.owners = owners}
                };
                joinable::Join join{joinable::participants(ddp, zero)};
                for (int round = 0; round < WordModel::inputs_of(comm.rank()); ++round) {
                    model.clear();
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        model.pass(comm.rank(), round);
                        for (std::size_t i : {0U, 1U, 2U}) {
                            ready(i);
                        }
                    });
                    zero.step();
                }
                join.finish();
            });
        }
    };
    joinable_tests::run_ranks({1, 2, 3, 4, 8}, body);
    joinable_tests::run_process_ranks({1, 2, 3, 4}, body);
}

TEST_CASE("an owner sends the rows that it has stepped, and no others") {
    joinable_tests::run_ranks({1, 2, 4}, [](auto& inner) {
        joinable_tests::RecordingCommunicator comm{inner};
        Embedding embedding;
        std::vector<Embedding*> model{&embedding};
        int const owner = comm.size() - 1;
        ZeroRedundancyOptimizer zero{
            comm,
            joinable::parameters(model),
            Sgd{.learning_rate = 0.5},
            ZeroOptions{.owners = {owner}}
        };
        for (bool const has_rows : {true, false}) {
            embedding.indices.emplace();
            embedding.rows.clear();
            embedding.short_indices.clear();
            if (has_rows && comm.rank() == owner) { // other ranks need none
                embedding.short_indices = {2, 3, 7};
                embedding.indices->resize(3);
                embedding.rows = {2, 4, 6, 8, 10, 12, -2, -4, -6};
            }
            comm.trace.clear();
            zero.step();
            std::vector<std::string> sent;
            for (std::string const& entry : comm.trace) {
                if (entry.starts_with("broadcast")) {
                    sent.push_back(entry);
                }
            }
            CHECK(
                sent == (has_rows ? std::vector<std::string>{"broadcast 3 i64", "broadcast 9 f32"}
                                  : std::vector<std::string>{})
            );
            std::vector<float> expected(Embedding::words * Embedding::width);
            std::array<float, 6> const two_rows{-1, -2, -3, -4, -5, -6};
            std::copy(two_rows.begin(), two_rows.end(), expected.begin() + 6);
            std::copy_n(std::array<float, 3>{1, 2, 3}.begin(), 3, expected.begin() + 21);
            CHECK(embedding.value == expected);
        }
    });
}

TEST_CASE("rows that an owner cannot step are refused before a value changes") {
    struct Case {
        char const* text;
        std::vector<std::int64_t> indices;
        bool is_dense;
    };
    for (Case const& mistake :
         {Case{"is not rows that ascend, each once", {3, 3}, false},
          Case{"is not rows that ascend, each once", {3, 1}, false},
          Case{"is not rows that ascend, each once", {-1, 1}, false},
          Case{"is not rows that ascend, each once", {1, 11}, false},
          Case{"is not rows that ascend, each once", {1}, false}, // for two rows of elements
          Case{"is dense, but its gradients were sparse", {}, true}}) {
        joinable_tests::run_ranks({1, 2, 3}, [&](auto& comm) {
            Embedding embedding;
            std::vector<Embedding*> model{&embedding};
            ZeroRedundancyOptimizer zero{
                comm, joinable::parameters(model), Sgd{.learning_rate = 0.5}
            };
            if (comm.rank() == 0) { // the owner
                embedding.indices = mistake.indices;
                embedding.rows.assign(6, 1.0F);
                if (mistake.is_dense) {
                    embedding.indices.reset();
                    embedding.dense.resize(embedding.value.size());
                }
            }
            try {
                zero.step();
                FAIL("nothing was thrown");
            } catch (joinable::PeerFailed const& error) {
                CHECK(comm.rank() != 0);
                CHECK(error.ranks() == std::vector<int>{0});
            } catch (ContractViolation const& error) {
                CHECK(comm.rank() == 0);
                CHECK(std::string{error.what()}.find(mistake.text) != std::string::npos);
            }
            CHECK(embedding.value == std::vector<float>(embedding.value.size()));
        });
    }
}

TEST_CASE("sharded training that cannot step rows is refused in a sentence that says why") {
    auto const holds = [](std::string const& text, char const* part) {
        CAPTURE(text);
        CHECK(text.find("(embedding) has sparse gradients, but ") != std::string::npos);
        CHECK(text.find(part) != std::string::npos);
    };
    Sgd const plain{.learning_rate = 0.5};
    CHECK(refusal_of_rows({}, plain).empty());
    CHECK(refusal_of_rows({}, Sgd{.learning_rate = 0.5, .maximize = true}).empty());
    holds(refusal_of_rows({.reduces_gradients = true}, plain), "use Sharding::none or");
    holds(
        refusal_of_rows({.partition = joinable::Partition::flat}, plain), "use Partition::by_par"
    );
    holds(
        refusal_of_rows({.before_step = [](auto const&) { return true; }}, plain),
        "before_step takes dense ones"
    );
    holds(
        refusal_of_rows({.parameters_as_bucket_view = true}, plain),
        "leave parameters_as_bucket_view out"
    );
    holds(refusal_of_rows({}, Sgd{.momentum = 0.9}), "Sgd with these settings also steps");
    holds(refusal_of_rows({}, Sgd{.weight_decay = 0.1}), "Sgd with these settings also steps");
    holds(refusal_of_rows({}, joinable::Adam{}), "Adam with these settings also steps");

    joinable::SelfCommunicator comm;
    WordModel model{true};
    ZeroRedundancyOptimizer zero{comm, model.parameters(), plain};
    zero.rule().weight_decay = 0.1;
    CHECK_THROWS_WITH_AS(
        zero.step(), doctest::Contains("Sgd with these settings also steps"), ContractViolation
    );
}
