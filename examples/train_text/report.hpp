// SPDX-License-Identifier: BSL-1.0
#pragma once

// The report, in readable form.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <vector>

#include "data.hpp"
#include "options.hpp"
#include "train.hpp"

namespace train_text {

/// The sizes of the ranks' texts: their sum and the shortest one.
struct Sizes {
    std::size_t sum = 0;
    std::size_t shortest = 0;

    explicit Sizes(std::vector<Text> const& texts) : shortest{texts.front().size()} {
        for (Text const& text : texts) {
            sum += text.size();
            shortest = std::min(shortest, text.size());
        }
    }
};

inline void print_ranks(std::vector<Text> const& texts, std::vector<Findings> const& findings) {
    std::printf(
        "\nrank      bytes    rounds trained    rounds shadowed    time waited    parameter bytes    "
        "optimizer bytes\n"
    );
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        std::printf(
            "%4zu %10zu %17zu %18zu %12.3f s %18zu %18zu\n",
            rank,
            texts[rank].size(),
            findings[rank].own_rounds,
            findings[rank].shadow_rounds,
            findings[rank].waited,
            findings[rank].value_bytes,
            findings[rank].state_bytes
        );
    }
}

[[nodiscard]] inline bool have_same_bits(std::vector<Findings> const& findings) {
    Findings const& first = findings.front();
    return std::all_of(findings.begin(), findings.end(), [&](Findings const& other) {
        return other.digest == first.digest && other.state_digest == first.state_digest;
    });
}

/// The mean over ranks, in seconds.
[[nodiscard]] inline double mean_wait(std::vector<Findings> const& findings) {
    double sum = 0;
    for (Findings const& one : findings) {
        sum += one.waited;
    }
    return sum / static_cast<double>(findings.size());
}

/// Why the digest need not be that of thread ranks.
[[nodiscard]] inline char const* note_on_sums(Options const& options) {
    if (options.ranks > 2 && options.communicator == Kind::mpi) {
        return " (MPI orders the sums, so other communicators may give another one)";
    }
    if (options.ranks > 2 && options.communicator == Kind::machines) {
        return " (machines sum first, so other communicators may give another one)";
    }
    return "";
}

inline void report(
    Options const& options,
    Corpus const& corpus,
    std::vector<Text> const& texts,
    std::vector<Findings> const& findings
) {
    Sizes const sizes{texts};
    Findings const& first = findings.front();
    auto const percent = [&](std::size_t bytes) {
        return 100.0 * static_cast<double>(bytes) / static_cast<double>(corpus.training_bytes());
    };

    print_ranks(texts, findings);
    std::printf("\nrounds                   %zu in %d epochs\n", first.rounds, options.epochs);
    std::printf("data used                %.1f %%", percent(sizes.sum));
    if (options.mode == Mode::join) {
        std::printf(
            " (trimmed to the shortest rank: %.1f %%)", percent(sizes.shortest * texts.size())
        );
    }
    std::printf(
        "\nbits per held-out byte   %.3f before, %.3f after\n", first.bits_before, first.bits_after
    );
    std::printf(
        "speed                    %.0f bytes per second\n",
        static_cast<double>(sizes.sum) * options.epochs / first.seconds
    );
    double const rounds = std::max<double>(1, static_cast<double>(first.rounds));
    std::printf(
        "each round               %.1f us, of which ranks wait %.1f us in roll calls\n",
        1e6 * first.seconds / rounds,
        1e6 * mean_wait(findings) / rounds
    );
    if (first.sent_bytes != 0) {
        std::printf(
            "%s                %.0f bytes sent by each rank in a round\n",
            options.reduction == Reduction::local ? "values   " : "gradients",
            static_cast<double>(first.sent_bytes) / rounds
        );
    }
    std::printf(
        "%s  %s\n",
        options.sharding == Sharding::none && options.reduction != Reduction::local
            ? "parameters and state   "
            : "parameters             ",
        have_same_bits(findings) ? "the same bit for bit on all ranks, without any final sync"
                                 : "DIFFER between ranks"
    );
    std::printf(
        "digest of parameters     %016llx%s\n",
        static_cast<unsigned long long>(first.digest),
        note_on_sums(options)
    );
    if (options.picture.empty()) {
        std::printf(
            "next                     add --picture run.svg: who trained, waited and shadowed when\n"
        );
    } else {
        std::printf("next                     open %s in a browser\n", options.picture.c_str());
    }
}

} // namespace train_text
