// SPDX-License-Identifier: BSL-1.0
// Gradients that are rows of an embedding: ranks send the rows that they have, and all get the sums.
#include <joinable/join.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/embedding.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/bucket/compression/no_reduction.hpp>
#include <joinable/bucket/compression/reduce_by.hpp>
#include <joinable/bucket/reducer.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::PeerFailed;
using joinable::Reducer;
using joinable::Shape;
using joinable::SparseRows;
using joinable::StridedView;

constexpr std::size_t vocabulary = Embedding::words;
constexpr std::size_t width = Embedding::width;

/// A rank's row `k` of a round: its index and its elements.
std::int64_t index_of(int rank, std::size_t round, std::size_t k) {
    return static_cast<std::int64_t>(
        (static_cast<std::size_t>(rank) * 7 + round * 5 + k * k * 3) % vocabulary
    );
}
float element_of(int rank, std::size_t round, std::size_t k, std::size_t column) {
    auto const number =
        static_cast<float>((static_cast<std::size_t>(rank) + 3 * round + 5 * k + 7 * column) % 13);
    return number * 0.37F - 2.0F;
}
/// None in some rounds, several of one index in others.
std::size_t rows_of(int rank, std::size_t round) {
    return (static_cast<std::size_t>(rank) * 2 + round * 3) % 6;
}
std::size_t inputs_of(int rank) {
    return 2 + static_cast<std::size_t>(rank * 3 % 5);
}

/// Adds the rows of a round, as a backward pass does.
void add_rows(Embedding& embedding, int rank, std::size_t round) {
    if (!embedding.is_sparse) {
        for (std::size_t k = 0; k < rows_of(rank, round); ++k) {
            for (std::size_t c = 0; c < width; ++c) {
                embedding.dense[static_cast<std::size_t>(index_of(rank, round, k)) * width + c] +=
                    element_of(rank, round, k, c);
            }
        }
        return;
    }
    if (!embedding.indices) {
        embedding.indices.emplace();
        embedding.rows.clear();
    }
    for (std::size_t k = 0; k < rows_of(rank, round); ++k) {
        embedding.indices->push_back(index_of(rank, round, k));
        for (std::size_t c = 0; c < width; ++c) {
            embedding.rows.push_back(element_of(rank, round, k, c));
        }
    }
}
void clear(Embedding& embedding) {
    embedding.indices.reset();
    embedding.rows.clear();
    embedding.dense.assign(embedding.is_sparse ? 0 : embedding.value.size(), 0.0F);
}

using Sums = std::map<std::int64_t, std::vector<float>>;
Sums sums_in(Embedding const& embedding) {
    Sums sums;
    if (embedding.indices) {
        for (std::size_t k = 0; k < embedding.indices->size(); ++k) {
            auto const row = embedding.rows.begin() + static_cast<std::ptrdiff_t>(k * width);
            sums[(*embedding.indices)[k]] =
                std::vector<float>(row, row + static_cast<std::ptrdiff_t>(width));
        }
    }
    return sums;
}
/// What all ranks with a pass in one of these rounds sum, in rank order and in f32.
Sums expected(int ranks, std::vector<std::size_t> const& rounds_of_window, float factor) {
    Sums sums;
    for (int rank = 0; rank < ranks; ++rank) {
        Sums mine;
        for (std::size_t const round : rounds_of_window) {
            for (std::size_t k = 0; round < inputs_of(rank) && k < rows_of(rank, round); ++k) {
                std::vector<float>& row =
                    mine.try_emplace(index_of(rank, round, k), width).first->second;
                for (std::size_t c = 0; c < width; ++c) {
                    row[c] += element_of(rank, round, k, c);
                }
            }
        }
        for (auto const& [index, row] : mine) {
            std::vector<float>& sum = sums.try_emplace(index, width).first->second;
            for (std::size_t c = 0; c < width; ++c) {
                sum[c] += row[c] * factor;
            }
        }
    }
    return sums;
}

} // namespace

TEST_CASE("all ranks get the sum of all ranks' rows, joined ranks too, and each index once") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        Embedding embedding;
        Embedding other{false};
        std::vector<Embedding*> model{&embedding, &other};
        clear(other);
        DistributedDataParallel ddp{comm, joinable::parameters(model)};
        std::size_t round = 0;
        {
            Join join{participants(ddp)};
            for (std::size_t const input :
                 join.iterate(std::vector<std::size_t>(inputs_of(comm.rank())))) {
                static_cast<void>(input);
                clear(embedding);
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    add_rows(embedding, comm.rank(), round);
                    ready(0);
                    ready(1);
                });
                REQUIRE(embedding.indices.has_value());
                std::vector<std::int64_t> const& indices = *embedding.indices;
                CHECK(std::is_sorted(indices.begin(), indices.end()));
                CHECK(indices.size() == sums_in(embedding).size());
                float const factor = 1.0F / static_cast<float>(comm.size());
                CHECK(sums_in(embedding) == expected(comm.size(), {round}, factor));
                ++round;
            }
        }
        // A rank that joined has no average left that its optimizer could use twice.
        bool has_joined = false;
        for (int rank = 0; rank < comm.size(); ++rank) {
            has_joined = has_joined || inputs_of(rank) > inputs_of(comm.rank());
        }
        CHECK((embedding.indices && embedding.indices->empty()) == has_joined);
    });
}

TEST_CASE("rows have the bits of dense gradients, where ranks are summed in their order") {
    run_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        Embedding sparse;
        Embedding dense{false};
        std::vector<Embedding*> model{&sparse, &dense};
        clear(dense);
        DistributedDataParallel ddp{comm, joinable::parameters(model)};
        Join join{participants(ddp)};
        std::size_t round = 0;
        for (std::size_t const input :
             join.iterate(std::vector<std::size_t>(inputs_of(comm.rank())))) {
            static_cast<void>(input);
            clear(sparse);
            clear(dense);
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                add_rows(sparse, comm.rank(), round);
                add_rows(dense, comm.rank(), round);
                ready(1);
                ready(0);
            });
            std::vector<float> scattered(vocabulary * width);
            for (auto const& [index, row] : sums_in(sparse)) {
                std::copy(
                    row.begin(),
                    row.end(),
                    scattered.begin() + index * static_cast<std::ptrdiff_t>(width)
                );
            }
            CHECK(scattered == dense.dense);
            ++round;
        }
    });
}

TEST_CASE("rows of rounds that do not sync travel with the next one that does") {
    run_all_ranks({1, 2, 3, 4}, [](auto& comm) {
        Embedding embedding;
        std::vector<Embedding*> model{&embedding};
        DistributedDataParallel ddp{comm, joinable::parameters(model)};
        {
            auto const unsynced = ddp.no_sync();
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                add_rows(embedding, comm.rank(), 0);
                ready(0);
            });
        }
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            add_rows(embedding, comm.rank(), 1);
            ready(0);
        });
        float const factor = 1.0F / static_cast<float>(comm.size());
        Sums const sums = expected(comm.size(), {0, 1}, factor);
        for (auto const& [index, row] : sums_in(embedding)) {
            for (std::size_t c = 0; c < width; ++c) {
                CHECK(row[c] == doctest::Approx(sums.at(index)[c]));
            }
        }
        CHECK(sums_in(embedding).size() == sums.size());
    });
}

TEST_CASE(
    "an embedding that no rank uses keeps what it has, and one that others use gets their rows"
) {
    run_all_ranks({1, 2, 3, 4}, [](auto& comm) {
        Embedding used;
        Embedding unused;
        std::vector<Embedding*> model{&used, &unused};
        Reducer reducer{
            comm, joinable::parameters(model), joinable::BucketOptions{.find_unused = true}
        };
        clear(unused);
        add_rows(unused, comm.rank(), 3);
        Sums const before = sums_in(unused);
        bool const uses = comm.rank() == comm.size() - 1;
        reducer.prepare_for_backward(1.0, [&](std::size_t i) { return i == 1 || !uses; });
        if (uses) {
            add_rows(used, 0, 1);
            reducer.mark_ready(0);
        }
        reducer.finalize_backward();
        CHECK(sums_in(unused) == before);
        Embedding one;
        add_rows(one, 0, 1);
        CHECK(sums_in(used).size() == sums_in(one).size());
        // A rank without a pass then has no rows of a gradient that nobody uses.
        if (uses) {
            reducer.prepare_for_backward(1.0, [](std::size_t) { return true; });
            reducer.finalize_backward();
            CHECK(!sums_in(used).empty());
        } else {
            reducer.contribute_zeros();
            CHECK(sums_in(used).empty());
        }
    });
}

TEST_CASE("indices of 32 bits and rows of a rank that weighs nothing") {
    run_all_ranks({1, 2, 4}, [](auto& comm) {
        Embedding embedding;
        std::vector<Embedding*> model{&embedding};
        Reducer reducer{comm, joinable::parameters(model)};
        embedding.indices.emplace();
        embedding.short_indices = {4, 4, 1};
        embedding.rows = {1, 1, 1, 2, 2, 2, 8, 8, 8};
        if (comm.rank() != 0) { // a mean over no samples
            embedding.rows[4] = std::numeric_limits<float>::infinity();
        }
        reducer.prepare_for_backward(comm.rank() == 0 ? 0.5 : 0.0);
        reducer.mark_ready(0);
        reducer.finalize_backward();
        CHECK(sums_in(embedding) == Sums{{1, {4, 4, 4}}, {4, {1.5, 1.5, 1.5}}});
    });
}

TEST_CASE(
    "rows of the last own round stay on a joined rank that is untouched, and end with the reducer"
) {
    run_all_ranks({2, 3, 4}, [](auto& comm) {
        ViewedEmbedding embedding;
        std::vector<ViewedEmbedding*> model{&embedding};
        {
            Reducer reducer{
                comm,
                joinable::parameters(model),
                joinable::BucketOptions{.joined_gradients = joinable::JoinedGradients::untouched}
            };
            std::vector<float> last;
            for (std::size_t round = 0; round < 4; ++round) {
                if (comm.rank() == 0 && round > 0) {
                    reducer.contribute_zeros(0, true);
                    auto const rows = embedding.gradient.values.template as<float>();
                    CHECK(std::vector<float>(rows.begin(), rows.end()) == last);
                    continue;
                }
                embedding.indices = {static_cast<std::int64_t>(round), 7};
                embedding.rows.assign(2 * width, static_cast<float>(round + 1));
                embedding.gradient = {
                    {embedding.indices.data(), DType::i64, {2}, {1}},
                    {embedding.rows.data(), DType::f32, {2, width}, {width, 1}}
                };
                reducer.prepare_for_backward(1.0);
                reducer.mark_ready(0);
                reducer.finalize_backward();
                auto const rows = embedding.gradient.values.template as<float>();
                last.assign(rows.begin(), rows.end());
                CHECK(last.size() == 2 * width);
            }
        }
        CHECK(!embedding.gradient);
    });
}

TEST_CASE("a rank without a pass has no gradient of an embedding of which the others have none") {
    run_all_ranks({1, 2, 3}, [](auto& comm) {
        Embedding embedding;
        std::vector<Embedding*> model{&embedding};
        Reducer reducer{
            comm, joinable::parameters(model), joinable::BucketOptions{.find_unused = true}
        };
        for (bool const has_rows : {false, true}) {
            clear(embedding);
            if (has_rows) {
                embedding.indices.emplace();
            }
            if (comm.rank() == 0) {
                clear(embedding);
                reducer.prepare_for_backward(1.0, [](std::size_t) { return true; });
                reducer.finalize_backward();
            } else {
                reducer.contribute_zeros(0, true);
            }
            reducer.end_guard();
            CHECK(!embedding.indices.has_value());
        }
    });
}

TEST_CASE("a gradient of rows that still changes after ready() is named, its indices too") {
    for (bool const changes_index : {false, true}) {
        run_ranks({1}, [&](auto& comm) {
            Embedding embedding;
            std::vector<Embedding*> model{&embedding};
            DistributedDataParallel ddp{
                comm, joinable::parameters(model), DataParallelOptions{.verify_ready = true}
            };
            ddp.forward([] {});
            auto const pass = [&](auto ready) {
                embedding.indices = {{1, 2}};
                embedding.rows.assign(2 * width, 1.0F);
                ready(0);
                changes_index ? static_cast<void>((*embedding.indices)[0] = 3)
                              : static_cast<void>(embedding.rows[0] = 4.0F);
            };
            CHECK_THROWS_WITH_AS(
                ddp.backward(pass), doctest::Contains("changed after ready(0)"), ContractViolation
            );
        });
    }
}

TEST_CASE("a communicator that cannot gather is refused") {
    run_ranks({1, 2}, [](auto& comm) {
        CoreOnly core{comm};
        Embedding embedding;
        std::vector<Embedding*> model{&embedding};
        CHECK_THROWS_WITH_AS(
            (Reducer{core, joinable::parameters(model)}),
            doctest::Contains(
                "embedding) has sparse gradients, but this communicator has no all_gather"
            ),
            ContractViolation
        );
    });
}

namespace {

/// Throws in one of the gathers of a rank.
template <class Comm>
class FailingGathers : public CoreOnly<Comm> {
public:
    using CoreOnly<Comm>::CoreOnly;

    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out) {
        return this->inner_.all_gather(in, out);
    }
    auto
    all_gather(joinable::ConstBuffer in, joinable::Buffer out, joinable::detail::Counts counts) {
        if (++calls == throws_at) {
            throw std::runtime_error{"no memory"};
        }
        return this->inner_.all_gather(in, out, counts);
    }
    void abort(joinable::AbortReason const& reason) { this->inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return this->inner_.is_aborted(); }
    [[nodiscard]] auto abort_reason() const { return this->inner_.abort_reason(); }
    auto set_deadline(std::chrono::nanoseconds deadline) {
        return this->inner_.set_deadline(deadline);
    }

    int calls = 0;
    int throws_at = 0;
};
template <class Comm>
FailingGathers(Comm&) -> FailingGathers<Comm>;

TEST_CASE("with NoReduction each rank keeps the rows that it has, in their order") {
    run_ranks({1, 2, 3}, [](joinable::ThreadCommunicator& inner) {
        CoreOnly comm{inner}; // without all_gather
        std::vector<Embedding> params(1);
        params[0].indices = {7, 2, 7};
        params[0].rows.assign(3 * width, static_cast<float>(comm.rank()));
        auto const rows = params[0].rows;
        Reducer reducer{comm, joinable::parameters(params), {}, joinable::NoReduction{}};
        for (int iteration = 0; iteration < 2; ++iteration) {
            reducer.prepare_for_backward(0.5);
            reducer.mark_ready(0);
            reducer.finalize_backward();
            reducer.contribute_zeros(0, true);
        }
        CHECK(*params[0].indices == std::vector<std::int64_t>{7, 2, 7});
        CHECK(params[0].rows == rows);
    });
}

} // namespace

TEST_CASE("a throw in any gather of any rank ends the guard of all, by its number") {
    for (int const throws_at : {1, 2, 3, 4, 6}) { // counts, indices and rows, of two rounds
        for (int const culprit : {0, 2}) {
            run_all_ranks({3}, [&](auto& comm) {
                FailingGathers failing{comm};
                failing.throws_at = comm.rank() == culprit ? throws_at : 0;
                Embedding embedding;
                std::vector<Embedding*> model{&embedding};
                DistributedDataParallel ddp{failing, joinable::parameters(model)};
                auto const train = [&] {
                    Join join{participants(ddp)};
                    std::size_t round = 1;
                    for (int const input :
                         join.iterate(std::vector<int>(comm.rank() == 1 ? 1 : 3))) {
                        static_cast<void>(input);
                        clear(embedding);
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) {
                            add_rows(embedding, comm.rank(), round++);
                            ready(0);
                        });
                    }
                };
                try {
                    train();
                    FAIL("nothing was thrown");
                } catch (PeerFailed const& error) {
                    CHECK(comm.rank() != culprit);
                    CHECK(error.ranks() == std::vector<int>{culprit});
                } catch (std::runtime_error const& error) {
                    CHECK(comm.rank() == culprit);
                    CHECK(std::string{error.what()} == "no memory");
                }
            });
        }
    }
}

TEST_CASE("an iteration whose rows were not all gathered is not finished by a second try") {
    joinable::SelfCommunicator comm;
    FailingGathers failing{comm};
    failing.throws_at = 2;
    Embedding embedding;
    std::vector<Embedding*> model{&embedding};
    Reducer reducer{failing, joinable::parameters(model)};
    add_rows(embedding, 0, 1);
    reducer.prepare_for_backward(1.0);
    reducer.mark_ready(0);
    CHECK_THROWS_WITH_AS(reducer.finalize_backward(), "no memory", std::runtime_error);
    CHECK_THROWS_AS(reducer.finalize_backward(), ContractViolation);
    CHECK(failing.calls == 2);
}

TEST_CASE(
    "rows that do not fit, and gradients of the other kind, are refused by name, and others learn of it"
) {
    struct Mistake {
        char const* text;
        void (*make)(Embedding&);
    };
    Mistake const mistakes[] = {
        {"has the index 11, but the parameter has 11 rows",
         [](Embedding& of) {
             of.indices = {{11}};
             of.rows = {1, 2, 3};
         }},
        {"has the index -1", [](Embedding& of) { of.indices = {{-1}}, of.rows = {1, 2, 3}; }},
        {"give it n indices of i32 or i64 and n rows",
         [](Embedding& of) { of.indices = {{1, 2}}, of.rows = {1, 2, 3}; }},
        {"values of f32 (3, 2)",
         [](Embedding& of) {
             of.indices = {{1, 2, 3}};
             of.rows = {1, 2, 3, 4, 5, 6};
             of.row_width = 2;
         }},
        {"has a dense gradient, but its gradients were sparse",
         [](Embedding& of) { of.dense.resize(of.value.size()); }},
    };
    for (Mistake const& mistake : mistakes) {
        CAPTURE(mistake.text);
        run_ranks({1, 2, 4}, [&](auto& comm) {
            Embedding embedding;
            std::vector<Embedding*> model{&embedding};
            DistributedDataParallel ddp{comm, joinable::parameters(model)};
            auto const train = [&] {
                Join join{participants(ddp)};
                for (int const input : join.iterate(std::vector<int>(3))) {
                    static_cast<void>(input);
                    ddp.forward([] {});
                    ddp.backward([&](auto ready) {
                        clear(embedding);
                        if (comm.rank() == 0) {
                            mistake.make(embedding);
                        } else {
                            add_rows(embedding, comm.rank(), 1);
                        }
                        ready(0);
                    });
                }
            };
            try {
                train();
                FAIL("nothing was thrown");
            } catch (PeerFailed const& error) {
                CHECK(comm.rank() != 0);
                CHECK(error.ranks() == std::vector<int>{0});
            } catch (ContractViolation const& error) {
                CHECK(comm.rank() == 0);
                CHECK(std::string{error.what()}.find(mistake.text) != std::string::npos);
                CHECK(std::string{error.what()}.find("embedding") != std::string::npos);
            }
        });
    }
}

TEST_CASE("a gradient of rows of a parameter that was dense is refused") {
    Embedding dense{false};
    joinable::SelfCommunicator comm;
    std::vector<Embedding*> model{&dense};
    Reducer reducer{comm, joinable::parameters(model)};
    dense.indices.emplace(); // zero rows are none
    reducer.prepare_for_backward(1.0);
    reducer.mark_ready(0);
    clear(dense);
    reducer.finalize_backward();
    dense.dense.clear();
    dense.indices = {{1}};
    dense.rows = {1, 2, 3};
    reducer.prepare_for_backward(1.0);
    CHECK_THROWS_WITH_AS(
        reducer.mark_ready(0),
        doctest::Contains("has a sparse gradient, but its gradients were dense"),
        ContractViolation
    );
}

TEST_CASE("ranks agree which gradients are rows") {
    run_ranks({2, 3}, [](auto& comm) {
        Embedding embedding{comm.rank() != 0};
        clear(embedding);
        std::vector<Embedding*> model{&embedding};
        CHECK_THROWS_AS(
            (DistributedDataParallel{comm, joinable::parameters(model)}), joinable::Mismatch
        );
    });
}

// -- rows that travel as dense gradients -----------------------------------------------------------

namespace {

void clear(ViewedEmbedding& embedding) {
    embedding.gradient = {};
    embedding.indices.clear();
    embedding.rows.clear();
}
void clear(EitherEmbedding& embedding) {
    embedding.dense = {};
    clear(static_cast<ViewedEmbedding&>(embedding));
}

void add_in_place(StridedView<float> const& dense, int rank, std::size_t round) {
    for (std::size_t k = 0; k < rows_of(rank, round); ++k) {
        for (std::size_t c = 0; c < width; ++c) {
            dense(static_cast<std::size_t>(index_of(rank, round, k)), c) +=
                element_of(rank, round, k, c);
        }
    }
}
/// Appends to the engine's own rows; adds to rows that it was given where they lie.
void add_rows(ViewedEmbedding& embedding, int rank, std::size_t round) {
    if (embedding.gradient && embedding.gradient.values.data() != embedding.rows.data()) {
        add_in_place(embedding.gradient.values.as<float>(), rank, round);
        return;
    }
    for (std::size_t k = 0; k < rows_of(rank, round); ++k) {
        embedding.indices.push_back(index_of(rank, round, k));
        for (std::size_t c = 0; c < width; ++c) {
            embedding.rows.push_back(element_of(rank, round, k, c));
        }
    }
    std::size_t const n = embedding.indices.size();
    embedding.gradient = {
        {embedding.indices.data(), DType::i64, {n}, {1}},
        {embedding.rows.data(), DType::f32, {n, width}, {width, 1}}
    };
}
void add_rows(EitherEmbedding& embedding, int rank, std::size_t round) {
    if (embedding.dense) {
        add_in_place(embedding.dense.as<float>(), rank, round);
    } else {
        add_rows(static_cast<ViewedEmbedding&>(embedding), rank, round);
    }
}

/// Checks that all rows are there, and returns their elements.
std::vector<float> all_rows_of(Embedding const& embedding) {
    REQUIRE(embedding.indices.has_value());
    for (std::size_t k = 0; k < vocabulary; ++k) {
        CHECK((*embedding.indices)[k] == static_cast<std::int64_t>(k));
    }
    CHECK(embedding.indices->size() == vocabulary);
    return embedding.rows;
}
std::vector<float> all_rows_of(ViewedEmbedding const& embedding) {
    REQUIRE(bool{embedding.gradient});
    auto const indices = embedding.gradient.indices.as<std::int64_t>();
    auto const elements = embedding.gradient.values.as<float>();
    Embedding copied;
    copied.indices.emplace(indices.begin(), indices.end());
    copied.rows.assign(elements.begin(), elements.end());
    return all_rows_of(copied);
}
std::vector<float> all_rows_of(EitherEmbedding const& embedding) {
    CHECK(!embedding.gradient);
    auto const elements = embedding.dense.as<float>();
    return {elements.begin(), elements.end()};
}

std::vector<float> scattered(Sums const& sums) {
    std::vector<float> dense(vocabulary * width);
    for (auto const& [index, row] : sums) {
        auto const first = dense.begin() + index * static_cast<std::ptrdiff_t>(width);
        std::copy(row.begin(), row.end(), first);
    }
    return dense;
}

/// Two embeddings of one pass, of which one is dense from the start.
template <class Rows>
struct Twins {
    Rows rows = Rows();
    Embedding dense{false};

    [[nodiscard]] joinable::ParameterList parameters() {
        std::vector<Rows*> first{&rows};
        std::vector<Embedding*> second{&dense};
        return joinable::parameters(first, second);
    }
    void clear_both() {
        clear(rows);
        clear(dense);
    }
    void add(int rank, std::size_t round) {
        add_rows(rows, rank, round);
        add_rows(dense, rank, round);
    }
};

template <class F>
void for_each_engine(F const& f) {
    f(Twins<Embedding>{});
    f(Twins<ViewedEmbedding>{});
    f(Twins<EitherEmbedding>{});
}

} // namespace

TEST_CASE("rows as dense gradients are the sums of all ranks, with the bits of dense ones") {
    for (bool const are_views : {false, true}) {
        run_all_ranks({1, 2, 3, 4, 8}, [&](auto& comm) {
            for_each_engine([&](auto model) {
                if (are_views && !std::is_same_v<decltype(model.rows), EitherEmbedding>) {
                    return; // the dense twin has no set_grad, and is left out below
                }
                model.clear_both();
                std::vector list{&model.rows};
                DistributedDataParallel ddp{
                    comm,
                    are_views ? joinable::parameters(list) : model.parameters(),
                    DataParallelOptions{
                        .gradient_as_bucket_view = are_views, .sparse_as_dense = true
                    }
                };
                std::size_t round = 0;
                bool has_joined = false;
                for (int rank = 0; rank < comm.size(); ++rank) {
                    has_joined = has_joined || inputs_of(rank) > inputs_of(comm.rank());
                }
                {
                    Join join{participants(ddp)};
                    for (std::size_t const input :
                         join.iterate(std::vector<std::size_t>(inputs_of(comm.rank())))) {
                        static_cast<void>(input);
                        model.clear_both();
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) {
                            model.add(comm.rank(), round);
                            if (!are_views) {
                                ready(1);
                            }
                            ready(0);
                        });
                        float const factor = 1.0F / static_cast<float>(comm.size());
                        auto const sums = scattered(expected(comm.size(), {round}, factor));
                        CHECK(all_rows_of(model.rows) == sums);
                        if (!are_views) {
                            CHECK(model.dense.dense == sums);
                        }
                        ++round;
                    }
                }
                if (has_joined) { // nothing is left that could count twice
                    CHECK(all_rows_of(model.rows) == std::vector<float>(vocabulary * width));
                }
            });
        });
    }
}

TEST_CASE("rows of 16 bits are added in float, those of one rank and those of all") {
    auto const check = []<class Number>(auto& comm, Number, bool as_dense) {
        using Many = NumberEmbedding<Number>;
        std::vector<Many> model(1);
        DistributedDataParallel ddp{comm, model, DataParallelOptions{.sparse_as_dense = as_dense}};
        Join join{participants(ddp)};
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            // Index 2: as many rows of 1 as 16 bits cannot count one by one. Index 4: much of rank 0, little of others.
            constexpr std::size_t count = std::is_same_v<Number, joinable::Half> ? 2500 : 300;
            model[0].indices.emplace(count, 2);
            model[0].indices->push_back(4);
            model[0].rows.assign(count * width, Number{1.0F});
            model[0].rows.insert(
                model[0].rows.end(), width, Number{comm.rank() == 0 ? count * 0.8F : 0.5F}
            );
            ready(0);
        });
        double const unit = std::is_same_v<Number, joinable::Half> ? 0x1p-11 : 0x1p-8;
        double const large = std::is_same_v<Number, joinable::Half> ? 2500 : 300;
        std::map<std::int64_t, double> const exact{
            {2, large}, {4, (0.8 * large + 0.5 * (comm.size() - 1)) / comm.size()}
        };
        for (std::size_t k = 0; k < model[0].indices->size(); ++k) {
            std::int64_t const index = (*model[0].indices)[k];
            double const wanted = exact.contains(index) ? exact.at(index) : 0.0;
            for (std::size_t c = 0; c < width; ++c) {
                auto const got =
                    static_cast<double>(static_cast<float>(model[0].rows[k * width + c]));
                CAPTURE(index);
                CHECK(
                    std::abs(got - wanted) <= 2 * unit * wanted
                ); // few roundings, whatever the count
            }
        }
        CHECK(model[0].indices->size() == (as_dense ? vocabulary : 2));
    };
    run_all_ranks({1, 2, 3, 4, 8}, [&](auto& comm) {
        for (bool const as_dense : {false, true}) {
            check(comm, joinable::Half{}, as_dense);
            check(comm, joinable::BFloat16{}, as_dense);
        }
    });
}

TEST_CASE("a pass may add rows to averages that the engine was given, also where buckets move") {
    run_all_ranks({1, 2, 3, 4}, [](auto& comm) {
        for_each_engine([&](auto model) {
            model.clear_both();
            DistributedDataParallel ddp{
                comm, model.parameters(), DataParallelOptions{.sparse_as_dense = true}
            };
            for (std::size_t round = 0; round < 4; ++round) {
                auto const pass = [&](auto ready) {
                    model.add(comm.rank(), round);
                    ready(0); // another order than the first one, by which buckets are cut
                    ready(1);
                };
                if (round == 2) {
                    auto const unsynced = ddp.no_sync();
                    ddp.forward([] {});
                    ddp.backward(pass);
                } else {
                    ddp.forward([] {});
                    ddp.backward(pass);
                    CHECK(all_rows_of(model.rows) == model.dense.dense);
                    float const factor = 1.0F / static_cast<float>(comm.size());
                    CHECK(
                        (round != 0 ||
                         all_rows_of(model.rows) == scattered(expected(comm.size(), {0}, factor)))
                    );
                }
            }
        });
    });
}

TEST_CASE("rows as dense gradients that some ranks do not use are as dense ones") {
    run_all_ranks({1, 2, 3, 4}, [](auto& comm) {
        for_each_engine([&](auto model) {
            model.clear_both();
            Reducer reducer{
                comm,
                model.parameters(),
                joinable::BucketOptions{.find_unused = true, .sparse_as_dense = true}
            };
            bool const uses = comm.rank() == comm.size() - 1;
            for (std::size_t round = 1; round < 4; ++round) {
                reducer.prepare_for_backward(0.5, [&](std::size_t) { return !uses; });
                if (uses) {
                    model.add(0, round);
                    reducer.mark_ready(0);
                    reducer.mark_ready(1);
                }
                reducer.finalize_backward();
                CHECK(all_rows_of(model.rows) == model.dense.dense);
            }
            auto const before = model.dense.dense;
            CHECK(before != std::vector<float>(before.size()));
            if (uses) { // untouched where there is a pass, zero where there is none
                reducer.prepare_for_backward(1.0, [](std::size_t) { return true; });
                reducer.finalize_backward();
                CHECK(all_rows_of(model.rows) == before);
            } else {
                reducer.contribute_zeros();
                CHECK(all_rows_of(model.rows) == std::vector<float>(before.size()));
            }
            // A rank that weighs nothing sends nothing of what it has.
            model.clear_both();
            model.add(comm.rank(), 1);
            bool const weighs = comm.rank() == 0;
            reducer.prepare_for_backward(weighs ? 1.0 : 0.0);
            reducer.mark_ready(0);
            reducer.mark_ready(1);
            reducer.finalize_backward();
            CHECK(all_rows_of(model.rows) == scattered(expected(1, {1}, 1.0F)));
            CHECK(model.dense.dense == scattered(expected(1, {1}, 1.0F)));
        });
    });
}

TEST_CASE(
    "rows as dense gradients stay on a joined rank that is untouched, and end with the reducer"
) {
    run_all_ranks({2, 3}, [](auto& comm) {
        ViewedEmbedding embedding;
        std::vector<ViewedEmbedding*> model{&embedding};
        {
            Reducer reducer{
                comm,
                joinable::parameters(model),
                joinable::BucketOptions{
                    .joined_gradients = joinable::JoinedGradients::untouched,
                    .sparse_as_dense = true
                }
            };
            std::vector<float> last;
            for (std::size_t round = 0; round < 3; ++round) {
                if (comm.rank() == 0 && round > 0) {
                    reducer.contribute_zeros(0, true);
                    CHECK(all_rows_of(embedding) == last);
                    continue;
                }
                clear(embedding);
                add_rows(embedding, comm.rank(), round);
                reducer.prepare_for_backward(1.0);
                reducer.mark_ready(0);
                reducer.finalize_backward();
                last = all_rows_of(embedding);
            }
        }
        CHECK(!embedding.gradient);
    });
}

TEST_CASE("rows as dense gradients need no all_gather, and take the reductions of dense ones") {
    run_ranks({1, 2, 3}, [](auto& inner) {
        CoreOnly comm{inner};
        Embedding embedding;
        std::vector<Embedding*> model{&embedding};
        std::size_t elements = 0;
        Reducer reducer{
            comm,
            joinable::parameters(model),
            joinable::BucketOptions{.sparse_as_dense = true},
            joinable::reduce_by(
                "count",
                [&](auto& ranks, joinable::BucketRun const& run) {
                    elements += run.buffer.count;
                    return ranks.all_reduce(run.buffer, joinable::ReduceOp::sum);
                }
            )
        };
        add_rows(embedding, comm.rank(), 1);
        reducer.prepare_for_backward(0.5);
        reducer.mark_ready(0);
        reducer.finalize_backward();
        CHECK(all_rows_of(embedding) == scattered(expected(comm.size(), {1}, 0.5F)));
        CHECK(elements == vocabulary * width);
    });
}

TEST_CASE("with NoReduction and bucket views rows lie in the buckets as they are") {
    joinable::SelfCommunicator comm;
    ViewedEmbedding embedding;
    std::vector<ViewedEmbedding*> model{&embedding};
    add_rows(embedding, 0, 1);
    add_rows(embedding, 0, 1);
    Reducer reducer{
        comm,
        joinable::parameters(model),
        joinable::BucketOptions{.gradient_as_bucket_view = true, .sparse_as_dense = true},
        joinable::NoReduction{}
    };
    CHECK(all_rows_of(embedding) == scattered(expected(1, {1, 1}, 1.0F)));
}

TEST_CASE("rows that do not fit a dense gradient, or come beside one, are refused by name") {
    joinable::SelfCommunicator comm;
    auto const refuses = [&](char const* text, auto const& make) {
        EitherEmbedding embedding;
        std::vector<EitherEmbedding*> model{&embedding};
        Reducer reducer{
            comm, joinable::parameters(model), joinable::BucketOptions{.sparse_as_dense = true}
        };
        reducer.prepare_for_backward(1.0);
        make(embedding);
        CHECK_THROWS_WITH_AS(reducer.mark_ready(0), doctest::Contains(text), ContractViolation);
    };
    refuses("has the index 11, but the parameter has 11 rows", [](EitherEmbedding& of) {
        add_rows(of, 0, 1);
        of.indices[1] = 11;
    });
    refuses("give it n indices of i32 or i64 and n rows", [](EitherEmbedding& of) {
        add_rows(of, 0, 1);
        of.gradient.indices = {of.indices.data(), DType::i64, {1}, {1}};
    });
    std::vector<float> dense(vocabulary * width);
    refuses("has a dense gradient and a sparse one", [&](EitherEmbedding& of) {
        of.dense = {dense.data(), DType::f32, {vocabulary, width}, {width, 1}};
        add_rows(static_cast<ViewedEmbedding&>(of), 0, 1);
    });
}
