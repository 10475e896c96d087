// SPDX-License-Identifier: BSL-1.0
// Trains a language model over bytes on ranks that have different amounts of real text.

#include <joinable/join.hpp>

#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "data.hpp"
#include "model.hpp"
#include "progress.hpp"

namespace {

using namespace train_text;

enum class Mode { join, drop, even };

struct Options {
    std::vector<std::string> paths;
    Mode mode = Mode::join;
    bool without_join = false;
    int ranks = 4;
    int epochs = 2;
    std::size_t batch_size = 64;
    std::size_t limit_bytes = 0;
    std::uint64_t seed = 1;
    float rate = 0.15F;
    float momentum = 0.9F;
};

/// What the ranks of a run have found out; each writes its own entry.
struct Findings {
    explicit Findings(int ranks)
        : results(static_cast<std::size_t>(ranks)), digests(static_cast<std::size_t>(ranks)) {}

    std::vector<std::vector<joinable::JoinResult>> results; ///< per rank and epoch
    std::vector<std::uint64_t> digests; ///< of parameters and momentum, per rank
    double bits_before = 0;
    double bits_after = 0;
};

double bits_per_byte(Model& model, Text const& text) {
    double bits = 0;
    for (auto const& batch : make_batches(text.size(), 256, 0)) {
        bits += model.forward(text, batch) * static_cast<double>(batch.size());
    }
    return bits / static_cast<double>(text.size());
}

std::uint64_t digest_of(Model& model, Sgd const& optimizer) {
    std::string bytes;
    auto const add = [&](std::vector<float> const& numbers) {
        bytes.append(reinterpret_cast<char const*>(numbers.data()), numbers.size() * sizeof(float));
    };
    for (Parameter const& parameter : model.parameters()) {
        add(parameter.value.numbers);
    }
    for (auto const& velocity : optimizer.velocity()) {
        add(velocity);
    }
    return hash_of(bytes);
}

/// The texts of all ranks. Mode drop trims them to the shortest.
std::vector<Text> deal(Corpus const& corpus, Options const& options) {
    std::vector<Text> texts;
    for (int rank = 0; rank < options.ranks; ++rank) {
        texts.push_back(
            options.mode == Mode::even ? corpus.equal_part(rank, options.ranks)
                                       : corpus.dealt_to(rank, options.ranks)
        );
    }
    if (options.mode == Mode::drop) {
        std::size_t shortest = texts.front().size();
        for (Text const& text : texts) {
            shortest = std::min(shortest, text.size());
        }
        for (Text& text : texts) {
            text.resize(shortest);
        }
    }
    return texts;
}

/// One rank's training: this is the part to read.
void train(
    joinable::ThreadCommunicator& comm,
    Options const& options,
    Text const& text,
    Text const& held_out,
    Progress& progress,
    Findings& findings
) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    Model model{options.seed + rank}; // ranks start differently: ddp takes rank 0's parameters
    Sgd optimizer{model.parameters(), options.rate, options.momentum};
    joinable::DistributedDataParallel ddp{comm, model.parameters()};
    joinable::Step step{comm, [&] { optimizer.step(model.parameters()); }};
    if (rank == 0) {
        findings.bits_before = bits_per_byte(model, held_out);
    }
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        auto const seed = options.seed + 1000 * static_cast<std::uint64_t>(epoch) + rank;
        joinable::Join guard{joinable::participants(ddp, step), {.enable = !options.without_join}};
        for (auto const& batch : make_batches(text.size(), options.batch_size, seed)) {
            ddp.forward([&] { return model.forward(text, batch); }, {.weight = batch.size()});
            ddp.backward([&](auto ready) { model.backward(ready); });
            step.step();
            progress.advance(comm.rank());
        }
        progress.set_shadowing(comm.rank(), true);
        findings.results[rank].push_back(guard.finish());
        progress.set_shadowing(comm.rank(), false);
    }
    findings.digests[rank] = digest_of(model, optimizer);
    if (rank == 0) {
        findings.bits_after = bits_per_byte(model, held_out);
    }
}

/// Prints what came out. Returns whether all ranks hold the same bits.
bool report(
    Options const& options,
    Corpus const& corpus,
    std::vector<Text> const& texts,
    Findings const& findings,
    double seconds
) {
    std::size_t trained = 0;
    std::size_t shortest = texts.front().size();
    for (Text const& text : texts) {
        trained += text.size();
        shortest = std::min(shortest, text.size());
    }
    auto const percent = [&](std::size_t bytes) {
        return 100.0 * static_cast<double>(bytes) / static_cast<double>(corpus.training_bytes());
    };
    std::printf("\nrank      bytes    own rounds    shadow rounds\n");
    std::size_t rounds = 0;
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        std::size_t own = 0;
        std::size_t shadow = 0;
        for (joinable::JoinResult const& result : findings.results[rank]) {
            own += result.own_rounds;
            shadow += result.shadow_rounds;
            rounds += rank == 0 ? result.rounds : 0;
        }
        std::printf("%4zu %10zu %13zu %16zu\n", rank, texts[rank].size(), own, shadow);
    }
    bool same = true;
    for (std::uint64_t const digest : findings.digests) {
        same = same && digest == findings.digests.front();
    }
    std::printf("\nrounds in %d epochs      %zu\n", options.epochs, rounds);
    std::printf("data used               %.1f %%", percent(trained));
    if (options.mode == Mode::join) {
        std::printf(" (trimmed to the shortest rank: %.1f %%)", percent(shortest * texts.size()));
    }
    std::printf("\nbits per held-out byte  %.3f before, %.3f after\n", findings.bits_before,
                findings.bits_after);
    std::printf("speed                   %.0f bytes per second\n",
                static_cast<double>(trained) * options.epochs / seconds);
    std::printf("parameters and momentum %s\n",
                same ? "the same bit for bit on all ranks, without any final sync"
                     : "DIFFER between ranks");
    return same;
}

int run(Options options) {
    if (options.paths.empty()) {
        options.paths = {JOINABLE_SOURCE_DIR};
    }
    Corpus const corpus{options.paths, options.limit_bytes};
    std::vector<Text> const texts = deal(corpus, options);
    std::vector<std::size_t> totals;
    for (Text const& text : texts) {
        totals.push_back(
            static_cast<std::size_t>(options.epochs) *
            ((text.size() + options.batch_size - 1) / options.batch_size)
        );
    }
    std::printf(
        "%zu files, %zu bytes to train on, %zu held out, %d ranks\n",
        corpus.files().size(),
        corpus.training_bytes(),
        corpus.held_out().size(),
        options.ranks
    );
    Findings findings{options.ranks};
    auto const start = std::chrono::steady_clock::now();
    try {
        Progress progress{totals};
        joinable::run_threads(options.ranks, [&](joinable::ThreadCommunicator& comm) {
            train(
                comm,
                options,
                texts[static_cast<std::size_t>(comm.rank())],
                corpus.held_out(),
                progress,
                findings
            );
        });
    } catch (joinable::PeerFailed const& error) {
        std::printf("\n%s\n", error.what());
        if (options.without_join) {
            std::printf("Without a guard the ranks with more data are left alone with a collective. "
                        "Here that is an error at once; elsewhere it is a hang.\n");
        }
        return 1;
    }
    double const seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report(options, corpus, texts, findings, seconds) ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Trains a language model over bytes on ranks with different amounts of text."};
    app.add_option("paths", options.paths, "files and folders (default: the text of this repository)");
    std::map<std::string, Mode> const modes{
        {"join", Mode::join}, {"drop", Mode::drop}, {"even", Mode::even}
    };
    app.add_option("--mode", options.mode, "join: use all data; drop: trim to the shortest rank; "
                                           "even: equal parts")
        ->transform(CLI::CheckedTransformer(modes));
    app.add_flag("--without-join", options.without_join, "show what happens without a guard");
    app.add_option("--ranks", options.ranks, "number of ranks")->check(CLI::Range(1, 256));
    app.add_option("--epochs", options.epochs, "passes over the text")->check(CLI::Range(1, 1000));
    app.add_option("--batch", options.batch_size, "bytes per batch and rank")
        ->check(CLI::Range(1, 1 << 20));
    app.add_option("--limit-bytes", options.limit_bytes, "train on at most so many bytes; 0: all");
    app.add_option("--seed", options.seed, "of the parameters and the order of batches");
    app.add_option("--rate", options.rate, "learning rate")->check(CLI::PositiveNumber);
    app.add_option("--momentum", options.momentum, "of the optimizer")->check(CLI::Range(0.0, 1.0));
    CLI11_PARSE(app, argc, argv);
    try {
        return run(options);
    } catch (std::exception const& error) {
        std::fprintf(stderr, "train_text: %s\n", error.what());
        return 2;
    }
}
