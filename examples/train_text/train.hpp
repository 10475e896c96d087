// SPDX-License-Identifier: BSL-1.0
#pragma once

// What one rank does, and all of them. The function train() is the part to read.

#include <joinable/join.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data.hpp"
#include "model.hpp"
#include "progress.hpp"

namespace train_text {

enum class Mode { join, drop, even };
enum class Kind { thread, process }; ///< what ranks are

struct Options {
    std::vector<std::string> paths;
    Mode mode = Mode::join;
    bool without_join = false;
    Kind communicator = Kind::thread;
    int ranks = 4;
    int epochs = 3;
    std::size_t batch_size = 64;
    std::size_t limit_bytes = 0;
    std::uint64_t seed = 1;
    float rate = 0.15F;
    float momentum = 0.9F;

    /// How many batches a text makes in all epochs; the last of an epoch may be smaller.
    [[nodiscard]] std::size_t batches_of(Text const& text) const {
        return static_cast<std::size_t>(epochs) * ((text.size() + batch_size - 1) / batch_size);
    }
};

/// What a rank has found out: no more than bytes, so that a process can tell another.
struct Findings {
    std::size_t rounds;     ///< of all epochs
    std::size_t own_rounds; ///< of these with a batch
    std::size_t shadow_rounds;
    std::uint64_t digest; ///< of the bits of all parameters and momentum
    double seconds;       ///< of training
    double bits_before;   ///< per held-out byte; measured by rank 0
    double bits_after;
};

inline double bits_per_byte(Model& model, Text const& text) {
    double bits = 0;
    for (auto const& batch : make_batches(text.size(), 256, {})) {
        bits += model.forward(text, batch) * static_cast<double>(batch.size());
    }
    return bits / static_cast<double>(text.size());
}

inline std::uint64_t digest_of(Model& model, Sgd const& optimizer) {
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

/// Trains on this rank's text, together with the other ranks on theirs. `longest` is the number of
/// batches of the rank that has most.
template <class Comm>
Findings train(
    Comm& comm,
    Options const& options,
    Text const& text,
    std::size_t longest,
    Text const& held_out,
    Progress const& progress
) {
    auto const rank = static_cast<std::uint64_t>(comm.rank());
    Findings findings{};

    Model model{options.seed + rank}; // ranks start differently: ddp takes rank 0's parameters
    Sgd optimizer{model.parameters(), options.rate, options.momentum, longest};
    // Every rank steps in every round: there is nothing to sync at the end, as the report shows.
    joinable::DistributedDataParallel ddp{comm, model.parameters(), {.sync_at_end = false}};
    joinable::Step step{comm, [&] { optimizer.step(model.parameters()); }};

    if (rank == 0) {
        findings.bits_before = bits_per_byte(model, held_out);
    }
    std::optional<ProgressDisplay> display;
    if (rank == 0) {
        display.emplace(progress);
    }
    comm.barrier();
    auto const start = std::chrono::steady_clock::now();
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        joinable::Shuffle const shuffle{options.seed + rank, static_cast<std::uint64_t>(epoch)};
        joinable::Join guard{joinable::participants(ddp, step), {.enable = !options.without_join}};
        for (auto const& batch : make_batches(text.size(), options.batch_size, shuffle)) {
            ddp.forward([&] { return model.forward(text, batch); }, {.weight = batch.size()});
            ddp.backward([&](auto ready) { model.backward(ready); });
            step.step();
            progress.advance(comm.rank());
        }
        progress.set_shadowing(comm.rank(), true);
        joinable::JoinResult const result = guard.finish();
        progress.set_shadowing(comm.rank(), false);
        findings.rounds += result.rounds;
        findings.own_rounds += result.own_rounds;
        findings.shadow_rounds += result.shadow_rounds;
    }
    std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
    findings.seconds = taken.count();
    display.reset();

    findings.digest = digest_of(model, optimizer);
    if (rank == 0) {
        findings.bits_after = bits_per_byte(model, held_out);
    }
    return findings;
}

/// Trains on as many ranks as there are texts, threads or processes. What they find comes back through
/// memory that this process shares with its ranks, of either kind.
/// @throws joinable::PeerFailed  a rank failed, or left the others.
inline std::vector<Findings>
train_ranks(Options const& options, std::vector<Text> const& texts, Text const& held_out) {
    std::vector<std::size_t> batches;
    for (Text const& text : texts) {
        batches.push_back(options.batches_of(text));
    }
    std::size_t const longest = *std::max_element(batches.begin(), batches.end());
    Progress const progress{batches};
    auto const findings = joinable::shared_buffer<Findings>(texts.size());
    auto const body = [&](auto& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        findings[rank] = train(comm, options, texts[rank], longest, held_out, progress);
    };
    if (options.communicator == Kind::process) {
        joinable::run_processes(options.ranks, body);
    } else {
        joinable::run_threads(options.ranks, body);
    }
    return {findings.begin(), findings.end()};
}

} // namespace train_text
