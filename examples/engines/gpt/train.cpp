// SPDX-License-Identifier: BSL-1.0
// Trains a small GPT-2 over process ranks whose texts differ in length, and for comparison one alone
// on the union of their batches. Both end with the same values, up to rounding.
#include <joinable/join.hpp>
#include <joinable/zero.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "../../train_text/data.hpp"
#include "gpt.hpp"

namespace {

using train_text::Text;
using Number = double; // a float is enough, but small differences grow in training
using Gpt = gpt::Gpt<Number>;
using AdamW = gpt::AdamW<Number>;

struct Options {
    int ranks = 2;
    std::size_t epochs = 3;
    std::size_t limit_bytes = 30'000;
    bool shards_optimizer = false;
};

constexpr std::size_t windows_per_batch = 4;
constexpr double rate = 3e-3;
constexpr double decay = 0.01;

/// The batches of a text in an epoch: windows in a new order. The last window is short, and so is
/// the last batch.
std::vector<gpt::Batch> batches_of(Text const& text, std::size_t epoch) {
    std::size_t const context = gpt::Shape{}.context;
    std::size_t const windows = text.empty() ? 0 : (text.size() - 1 + context - 1) / context;
    std::vector<gpt::Batch> batches;
    for (std::size_t const window : joinable::permutation(windows, {.seed = 1, .epoch = epoch})) {
        if (batches.empty() || batches.back().size() == windows_per_batch) {
            batches.emplace_back();
        }
        std::size_t const begin = window * context;
        batches.back().push_back(
            std::span{text}.subspan(begin, std::min(context + 1, text.size() - begin))
        );
    }
    return batches;
}

double loss_on(Gpt& model, Text const& text) {
    double sum = 0;
    std::size_t tokens = 0;
    for (gpt::Batch const& batch : batches_of(text, 0)) {
        sum += model.forward(batch) * static_cast<double>(gpt::tokens_of(batch));
        tokens += gpt::tokens_of(batch);
    }
    return sum / static_cast<double>(tokens);
}

class Stopwatch {
public:
    [[nodiscard]] double seconds() const {
        return std::chrono::duration<double>{std::chrono::steady_clock::now() - begin_}.count();
    }

private:
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Trains one model on all batches of a round at once. Returns a loss per epoch.
std::vector<double> train_alone(
    std::vector<Text> const& texts, Text const& held_out, Options const& options, Gpt& model
) {
    AdamW adam{rate, decay};
    std::vector<double> losses;
    for (std::size_t epoch = 0; epoch < options.epochs; ++epoch) {
        std::vector<gpt::Batch> rounds;
        for (Text const& text : texts) {
            std::vector<gpt::Batch> const batches = batches_of(text, epoch);
            rounds.resize(std::max(rounds.size(), batches.size()));
            for (std::size_t i = 0; i < batches.size(); ++i) {
                rounds[i].insert(rounds[i].end(), batches[i].begin(), batches[i].end());
            }
        }
        for (gpt::Batch const& batch : rounds) {
            model.forward(batch);
            model.backward([](std::size_t) {});
            adam.step(model.values(), model.gradients());
        }
        losses.push_back(loss_on(model, held_out));
    }
    return losses;
}

/// The work of a rank. `step` steps the optimizer, and joined ranks follow it. Calls
/// after_epoch(epoch) with the same values on all ranks.
template <class Ddp, class Step, class AfterEpoch>
void train_rank(
    Ddp& ddp, Step& step, Gpt& model, Text const& text, std::size_t epochs, AfterEpoch after_epoch
) {
    for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (gpt::Batch const& batch : batches_of(text, epoch)) {
            // Weighted by tokens, because windows and batches may be short.
            ddp.forward([&] { model.forward(batch); }, {.weight = gpt::tokens_of(batch)});
            ddp.backward([&](auto ready) { model.backward(ready); });
            step.step();
        }
        guard.finish(); // shadows until the last rank has run out
        after_epoch(epoch);
    }
}

void train_together(
    joinable::ProcessCommunicator& comm,
    Text const& text,
    Options const& options,
    Gpt& model,
    auto after_epoch
) {
    auto const parameters =
        joinable::flat_parameters(model.values(), model.gradients(), model.sizes());
    // About a bucket for each layer, so that most of them travel during the backward pass.
    constexpr std::size_t bucket_bytes = 50'000 * sizeof(Number);
    joinable::DistributedDataParallel ddp{
        comm, parameters, {.bucket_cap_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes}
    };
    if (options.shards_optimizer) {
        joinable::ZeroRedundancyOptimizer zero{
            comm, parameters, joinable::AdamW{.learning_rate = rate, .weight_decay = decay}
        };
        train_rank(ddp, zero, model, text, options.epochs, after_epoch);
    } else {
        AdamW adam{rate, decay};
        joinable::Step step{comm, [&] { adam.step(model.values(), model.gradients()); }};
        train_rank(ddp, step, model, text, options.epochs, after_epoch);
    }
}

/// Draws bytes one after another.
std::string continue_text(Gpt& model, std::string text, std::size_t bytes) {
    std::mt19937_64 random{1};
    std::size_t const context = model.shape().context;
    Text bytes_so_far{text.begin(), text.end()};
    for (std::size_t i = 0; i < bytes; ++i) {
        bytes_so_far.push_back(0); // whatever it is, the model predicts it
        std::size_t const seen = std::min(context + 1, bytes_so_far.size());
        model.forward({std::span{bytes_so_far}.last(seen)});
        auto const probabilities = model.last_probabilities();
        std::discrete_distribution<int> draw{probabilities.begin(), probabilities.end()};
        bytes_so_far.back() = static_cast<std::uint8_t>(draw(random));
        char const byte = static_cast<char>(bytes_so_far.back());
        text += (byte >= ' ' && byte <= '~') || byte == '\n' ? byte : '?';
    }
    return text;
}

int run(Options const& options) {
    train_text::Corpus const corpus{{JOINABLE_SOURCE_DIR "/include/joinable"}, options.limit_bytes};
    std::vector<Text> texts;
    std::size_t longest = 0;
    for (int rank = 0; rank < options.ranks; ++rank) {
        Text const& text = texts.emplace_back(corpus.dealt_to(rank, options.ranks));
        std::size_t const batches = batches_of(text, 0).size();
        std::printf("rank %d has %zu bytes in %zu batches\n", rank, text.size(), batches);
        longest = std::max(longest, batches);
    }
    Gpt single{gpt::Shape{}, 0};
    std::size_t const count = single.values().size();
    std::printf(
        "%zu parameters in %zu tensors, %zu rounds per epoch, %zu bytes held out\n",
        count,
        single.sizes().size(),
        longest,
        corpus.held_out().size()
    );
    std::fflush(stdout);
    Stopwatch const alone;
    std::vector<double> const losses_alone = train_alone(texts, corpus.held_out(), options, single);
    double const seconds_alone = alone.seconds();

    std::printf("epoch  loss of %d ranks  loss alone  difference\n", options.ranks);
    std::fflush(stdout);
    auto const values = joinable::shared_buffer<Number>(count * texts.size());
    Stopwatch const together;
    joinable::run_processes(options.ranks, [&](joinable::ProcessCommunicator& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        Gpt model{gpt::Shape{}, rank}; // all get rank 0's values
        train_together(comm, texts[rank], options, model, [&](std::size_t epoch) {
            if (rank == 0) {
                double const loss = loss_on(model, corpus.held_out());
                std::printf(
                    "%5zu %15.5f %11.5f %11.0e\n",
                    epoch + 1,
                    loss,
                    losses_alone[epoch],
                    std::abs(loss - losses_alone[epoch])
                );
                std::fflush(stdout);
            }
        });
        std::copy(model.values().begin(), model.values().end(), &values[rank * count]);
    });
    std::printf(
        "%d ranks took %.1f s, one alone %.1f s\n", options.ranks, together.seconds(), seconds_alone
    );
    double distance = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        distance = std::max(distance, std::abs(values[i] - single.values()[i % count]));
    }
    std::printf("values of any rank differ from those alone by at most %.0e\n", distance);
    std::copy_n(&values[0], count, single.values().begin());
    std::printf("the ranks' model writes: %s\n", continue_text(single, "/// The ", 200).c_str());
    return distance < 1e-6 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Trains a small GPT-2 over process ranks with uneven texts, and alone."};
    app.add_option("--ranks", options.ranks, "How many ranks, 1 to 64. Default: 2.")
        ->check(CLI::Range(1, 64))
        ->option_text("N");
    app.add_option("--epochs", options.epochs, "Passes over the texts. Default: 3.")
        ->check(CLI::Range(1, 1000))
        ->option_text("N");
    app.add_option(
           "--limit-bytes", options.limit_bytes, "Bytes of text, at least 2000. Default: 30000."
    )
        ->check(CLI::Range(2000, 100'000'000))
        ->option_text("N");
    app.add_flag(
        "--shard-optimizer",
        options.shards_optimizer,
        "Each rank keeps a part of the optimizer's state."
    );
    CLI11_PARSE(app, argc, argv);
    try {
        return run(options);
    } catch (std::exception const& error) {
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 1;
    }
}
