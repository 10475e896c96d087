// SPDX-License-Identifier: BSL-1.0
// Trains a language model over bytes on ranks that have different amounts of real text.

#include <joinable/join.hpp>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <vector>

#include <CLI/CLI.hpp>

#include "arguments.hpp"
#include "data.hpp"
#include "on_cuda.hpp"
#include "report.hpp"
#include "train.hpp"

namespace {

using namespace train_text;

// Exit codes other than 0.
constexpr int failed = 1;      // a rank left or failed, or ranks hold different bits
constexpr int wrong_input = 2; // wrong arguments, or no readable text
constexpr int no_device = 3;   // no GPU, or a program built without CUDA

/// The texts of all ranks. Mode drop trims them to the shortest one.
std::vector<Text> deal(Corpus const& corpus, Options const& options) {
    std::vector<Text> texts;
    for (int rank = 0; rank < options.ranks; ++rank) {
        texts.push_back(
            options.mode == Mode::even ? corpus.equal_part(rank, options.ranks)
                                       : corpus.dealt_to(rank, options.ranks)
        );
    }
    if (options.mode == Mode::drop) {
        std::size_t const shortest = Sizes{texts}.shortest;
        if (shortest == 0) {
            throw InputError{
                "there are more ranks than files, so nothing is left when all are trimmed to the "
                "shortest; give more files or fewer --ranks"
            };
        }
        for (Text& text : texts) {
            text.resize(shortest);
        }
    }
    return texts;
}

int run(Options const& options) {
    require_savable(options.save, options.sharding != Sharding::none);
    Corpus const corpus{options.paths, options.limit_bytes};
    std::vector<Text> const texts = deal(corpus, options);
    std::printf(
        "%zu files with %zu bytes to train on, %zu bytes held out, %d %s ranks%s\n",
        corpus.files().size(),
        corpus.training_bytes(),
        corpus.held_out().size(),
        options.ranks,
        options.communicator == Kind::process ? "process" : "thread",
        options.device == Where::cuda ? " on GPUs" : ""
    );
    std::vector<Findings> findings;
    try {
        auto const& run_on = options.device == Where::cuda ? train_on_cuda : train_ranks;
        findings = run_on(options, texts, corpus.held_out());
    } catch (joinable::PeerFailed const& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "\ntrain_text: %s\n", error.what());
        if (options.without_join) {
            std::fprintf(
                stderr,
                "Rank %d ran out of batches, and nobody shadows its collectives without a guard.\n"
                "Here that is an error at once; with most other libraries it is a hang.\n",
                error.rank()
            );
        }
        return failed;
    }
    return report(options, corpus, texts, findings) ? 0 : failed;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app;
    try {
        options = parse(app, argc, argv, JOINABLE_SOURCE_DIR);
    } catch (CLI::ParseError const& error) { // --help ends here, too, with 0
        return app.exit(error) == 0 ? 0 : wrong_input;
    }
    try {
        return run(options);
    } catch (std::exception const& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "train_text: %s\n", error.what());
        if (dynamic_cast<NoDevice const*>(&error) != nullptr) {
            return no_device;
        }
        return dynamic_cast<InputError const*>(&error) != nullptr ? wrong_input : failed;
    }
}
