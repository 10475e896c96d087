// SPDX-License-Identifier: BSL-1.0
// Trains a language model over bytes on ranks that have different amounts of real text.

#include <joinable/join.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "arguments.hpp"
#include "data.hpp"
#include "host_ranks.hpp"
#include "launch.hpp"
#include "on_cuda.hpp"
#include "options.hpp"
#include "plan.hpp"
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

/// Training takes long, and its results are written at its end. A file that is replaced needs a folder to write to.
/// @throws InputError  a file of this name cannot be written.
void require_writable(char const* option, std::string const& file, bool is_replaced = false) {
    if (file.empty()) {
        return;
    }
    auto const refuse = [&](std::string const& reason) {
        throw InputError{std::string{option} + " " + file + ": " + reason};
    };
    std::string folder = std::filesystem::path{file}.parent_path().string();
    folder = folder.empty() ? "." : folder;
    std::error_code code;
    auto const status = std::filesystem::status(folder, code);
    if (status.type() == std::filesystem::file_type::none) {
        refuse(folder + ": " + code.message());
    }
    if (!is_directory(status)) {
        refuse(
            exists(status) ? folder + " is no folder"
                           : "there is no folder " + folder + "; make it, or give another one"
        );
    }
    if (std::filesystem::is_directory(file, code)) {
        refuse("is a folder; give the name of a file");
    }
    bool const writes_over = !is_replaced && std::filesystem::exists(file, code);
    if (access(writes_over ? file.c_str() : folder.c_str(), W_OK) != 0) {
        refuse("cannot be written: " + std::generic_category().message(errno));
    }
}

/// Reads, trains and reports. If a launcher started the ranks, only rank 0's process prints.
int train_and_report(Options const& options, TrainRanks const& train, int rank) {
    require_savable(options.save, options.sharding != Sharding::none);
    bool const prints = rank <= 0;
    if (prints) { // rank 0 writes these files
        require_writable("--picture", options.picture);
        require_writable("--trace", options.trace);
        require_writable("--checkpoint", options.save.file, true);
    }
    Corpus const corpus{options.paths, options.limit_bytes};
    std::vector<Text> const texts = deal(corpus, options);
    if (prints) {
        std::printf(
            "%zu files with %zu bytes to train on, %zu bytes held out, %d %s ranks%s\n",
            corpus.files().size(),
            corpus.training_bytes(),
            corpus.held_out().size(),
            options.ranks,
            options.communicator == Kind::machines ? "process"
                                                   : name_of(options.communicator).c_str(),
            options.device == Where::cuda ? " on GPUs" : ""
        );
    }
    std::vector<Findings> findings;
    try {
        findings = train(options, texts, corpus.held_out());
    } catch (joinable::Error const& error) {
        auto const* const peer = dynamic_cast<joinable::PeerFailed const*>(&error);
        if (!prints && peer != nullptr && peer->rank() != 0) { // that rank and rank 0 say why
            return failed;
        }
        std::fflush(stdout);
        std::string const where = prints ? "" : "rank " + std::to_string(rank) + ": ";
        std::fprintf(stderr, "\ntrain_text: %s%s\n", where.c_str(), error.what());
        if (options.without_join && prints) {
            std::fprintf(
                stderr,
                "%s ran out of batches, and nobody shadows its collectives without a guard.\n"
                "Here that is an error at once; with most other libraries it is a hang.\n",
                peer == nullptr ? "A rank" : ("Rank " + std::to_string(peer->rank())).c_str()
            );
        }
        return failed;
    }
    if (prints) {
        report(options, corpus, texts, findings);
    }
    return have_same_bits(findings) ? 0 : failed;
}

int run(Options const& options) {
    if (options.only_plans) {
        print_plan(options);
        return 0;
    }
    if (options.is_launched() && options.device == Where::cuda) {
        throw InputError{"--device cuda needs --communicator thread or process"};
    }
    switch (options.communicator) {
    case Kind::mpi: return run_over_mpi(options, train_and_report);
    case Kind::tcp: return run_over_tcp(options, train_and_report);
    case Kind::gloo: return run_over_gloo(options, train_and_report);
    case Kind::machines: return run_over_machines(options, train_and_report);
    default:
        return train_and_report(
            options, options.device == Where::cuda ? train_on_cuda : train_ranks, -1
        );
    }
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
