// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/torch_data.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <sstream>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/join/options.hpp>
#include <joinable/participant/action.hpp>

namespace {

using joinable::ThreadCommunicator;
using joinable::torch::ShardSampler;
using joinable_tests::run_ranks;

std::vector<std::size_t> drawn_from(ShardSampler& sampler, std::size_t batch_size) {
    std::vector<std::size_t> all;
    while (auto const batch = sampler.next(batch_size)) {
        CHECK((batch->size() == batch_size || all.size() + batch->size() == sampler.size()));
        all.insert(all.end(), batch->begin(), batch->end());
    }
    CHECK(!sampler.next(batch_size).has_value());
    return all;
}

TEST_CASE("the samplers of all ranks draw each index once, in each epoch") {
    for (int const ranks : {1, 2, 3, 4, 8}) {
        for (std::size_t const count : std::vector<std::size_t>{0, 1, 7, 8, 30}) {
            for (bool const shuffles : {false, true}) {
                std::vector<ShardSampler> samplers;
                for (int rank = 0; rank < ranks; ++rank) {
                    joinable::Share const share{rank, ranks};
                    samplers.push_back(
                        shuffles ? ShardSampler{count, share, {.seed = 3}}
                                 : ShardSampler{count, share}
                    );
                }
                std::vector<std::size_t> before;
                for (int epoch = 0; epoch < 3; ++epoch) {
                    std::vector<std::size_t> all;
                    for (ShardSampler& sampler : samplers) {
                        sampler.reset();
                        CHECK(sampler.size() >= count / samplers.size());
                        CHECK(sampler.size() <= count / samplers.size() + 1);
                        auto const mine = drawn_from(sampler, 3);
                        all.insert(all.end(), mine.begin(), mine.end());
                    }
                    if (epoch > 0 && count == 30) {
                        CHECK((all == before) == !shuffles);
                    }
                    before = all;
                    std::sort(all.begin(), all.end());
                    std::vector<std::size_t> expected(count);
                    std::iota(expected.begin(), expected.end(), std::size_t{0});
                    CHECK(all == expected);
                }
            }
        }
    }
    ShardSampler sampler{5, {1, 2}};
    CHECK(drawn_from(sampler, 2) == std::vector<std::size_t>{1, 3});
    sampler.reset(9);
    CHECK(drawn_from(sampler, 2) == std::vector<std::size_t>{1, 3, 5, 7});
}

/// Loads into one what another one, or itself, has saved.
void load_saved(ShardSampler& into, ShardSampler const& from) {
    torch::serialize::OutputArchive out;
    from.save(out);
    std::stringstream file;
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    into.load(in);
}

TEST_CASE("a sampler that is loaded goes on where another one was saved") {
    ShardSampler sampler{40, {1, 3}, {.seed = 5}};
    drawn_from(sampler, 4);
    sampler.reset();
    sampler.next(4);
    ShardSampler other{40, {1, 3}, {.seed = 5}};
    load_saved(other, sampler);
    other.reset(); // as a data loader does before it begins
    for (int epoch = 0; epoch < 2; ++epoch) {
        std::vector<std::size_t> rest;
        while (auto const batch = other.next(4)) {
            rest.insert(rest.end(), batch->begin(), batch->end());
            CHECK(*sampler.next(4) == *batch);
        }
        CHECK(rest.size() == (epoch == 0 ? 9 : 13));
        sampler.reset();
        other.reset();
    }
}

TEST_CASE("a loaded sampler that is drawn from by hand has all of the next epoch") {
    ShardSampler sampler{40, {1, 3}, {.seed = 5}};
    sampler.next(4);
    ShardSampler other{40, {1, 3}, {.seed = 5}};
    load_saved(other, sampler);
    std::size_t rest = 0;
    while (auto const batch = other.next(4)) {
        rest += batch->size();
    }
    CHECK(rest == 9); // of 13
    other.reset();
    ShardSampler next_epoch{40, {1, 3}, {.seed = 5, .epoch = 1}};
    CHECK(drawn_from(other, 4) == drawn_from(next_epoch, 4));
}

TEST_CASE("a loaded sampler that is reset to another number of elements has these") {
    ShardSampler sampler{40, {1, 3}};
    load_saved(sampler, sampler);
    sampler.reset(7);
    CHECK(drawn_from(sampler, 4) == std::vector<std::size_t>{1, 4});
}

TEST_CASE("a loaded sampler that is reset to the number that it has goes on") {
    ShardSampler sampler{40, {1, 3}};
    sampler.next(4);
    ShardSampler other{40, {1, 3}};
    load_saved(other, sampler);
    other.reset(40); // as a ChunkDataset does before it begins
    while (auto const batch = sampler.next(4)) {
        CHECK(*other.next(4) == *batch);
    }
    CHECK(!other.next(4).has_value());
}

/// The numbers from 0, each with the square of it.
struct Squares : torch::data::datasets::Dataset<Squares> {
    explicit Squares(std::size_t count) : count_{count} {}
    torch::data::Example<> get(std::size_t index) override {
        double const x = static_cast<double>(index);
        return {torch::tensor(x, torch::kDouble), torch::tensor(x * x, torch::kDouble)};
    }
    c10::optional<std::size_t> size() const override { return count_; }

private:
    std::size_t count_;
};

TEST_CASE("a guard iterates over data loaders of different lengths, with or without weights") {
    for (std::size_t const workers : {std::size_t{0}, std::size_t{2}}) {
        for (bool const weighs : {false, true}) {
            run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
                constexpr std::size_t count = 11;
                auto loader = torch::data::make_data_loader(
                    Squares{count}.map(torch::data::transforms::Stack<>()),
                    ShardSampler{count, comm, {.seed = 1}},
                    torch::data::DataLoaderOptions{}.batch_size(2).workers(workers)
                );
                std::vector<double> sums(2);
                std::vector<double> batch_sums(2);
                auto const add = [&] {
                    joinable::all_reduce(comm, std::span{batch_sums}).wait();
                    sums[0] += batch_sums[0];
                    sums[1] += batch_sums[1];
                };
                joinable::Action action{comm, add, [&] {
                                            batch_sums = {0, 0};
                                            add();
                                        }};
                for (int epoch = 0; epoch < 2; ++epoch) {
                    sums = {0, 0};
                    joinable::Join join{joinable::participants(action)};
                    auto const run = [&](auto&& range) {
                        for (auto& batch : range) {
                            batch_sums = {
                                batch.data.sum().template item<double>(),
                                batch.target.sum().template item<double>()
                            };
                            action();
                        }
                    };
                    if (weighs) {
                        run(join.iterate(*loader, [](auto const& batch) {
                            return joinable::RoundNotice{.weight = batch.data.size(0)};
                        }));
                    } else {
                        run(join.iterate(*loader));
                    }
                    auto const most = (count + static_cast<std::size_t>(comm.size()) - 1) /
                                      static_cast<std::size_t>(comm.size());
                    CHECK(join.finish().rounds == (most + 1) / 2);
                    CHECK(sums[0] == 10 * 11 / 2);
                    CHECK(sums[1] == 10 * 11 * 21 / 6);
                }
            });
        }
    }
}

/// What an evaluation of the numbers below `count` has seen, on all ranks.
struct Tally {
    explicit Tally(std::size_t count)
        : seen{torch::zeros({static_cast<std::int64_t>(count)}, torch::kLong)} {}

    void add(torch::data::Example<> const& batch, torch::Tensor const& outputs) {
        loss += torch::mse_loss(outputs.flatten(), batch.target, at::Reduction::Sum);
        seen.index_add_(
            0, batch.data.to(torch::kLong), torch::ones({batch.data.size(0)}, torch::kLong)
        );
    }

    torch::Tensor seen;
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
};

TEST_CASE("an evaluation over data loaders counts each sample once, also where ranks have none") {
    for (std::size_t const count : std::vector<std::size_t>{1, 3, 7, 8, 21}) {
        CAPTURE(count);
        for (std::size_t const workers : {std::size_t{0}, std::size_t{2}}) {
            for (bool const in_guard : {false, true}) {
                run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
                    torch::nn::Linear model{1, 1};
                    model->to(torch::kDouble);
                    joinable::torch::DistributedDataParallel ddp{comm, model};
                    auto loader = torch::data::make_data_loader(
                        Squares{count}.map(torch::data::transforms::Stack<>()),
                        ShardSampler{count, comm, {.seed = 1}},
                        torch::data::DataLoaderOptions{}.batch_size(2).workers(workers)
                    );
                    torch::NoGradGuard const no_graph;
                    Tally tally{count};
                    if (in_guard) { // as layers that communicate need it
                        joinable::Join join{joinable::participants(ddp)};
                        auto const evaluates = [](auto const&) {
                            return joinable::RoundNotice{.phase = joinable::Phase::evaluate};
                        };
                        for (auto const& batch : join.iterate(*loader, evaluates)) {
                            tally.add(batch, ddp.forward(batch.data.unsqueeze(1)));
                        }
                        auto const ranks = static_cast<std::size_t>(comm.size());
                        auto const most = (count + ranks - 1) / ranks;
                        CHECK(join.finish().rounds == (most + 1) / 2);
                    } else {
                        for (auto const& batch : *loader) {
                            tally.add(batch, model->forward(batch.data.unsqueeze(1)));
                        }
                    }
                    joinable::all_reduce(comm, tally.seen).wait();
                    joinable::all_reduce(comm, tally.loss).wait();
                    CHECK(torch::equal(tally.seen, torch::ones_like(tally.seen)));
                    auto const x = torch::arange(static_cast<double>(count), torch::kDouble);
                    auto const outputs = model->forward(x.unsqueeze(1)).flatten();
                    auto const loss = torch::mse_loss(outputs, x.square(), at::Reduction::Sum);
                    CHECK(torch::allclose(tally.loss, loss, 1e-12, 1e-12));
                });
            }
        }
    }
}

} // namespace
