// SPDX-License-Identifier: BSL-1.0
#pragma once

// The work of one rank and of all ranks. Read train() first.

#include <joinable/any_communicator.hpp>
#include <joinable/join.hpp>
#include <joinable/trace.hpp>
#include <joinable/zero.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "data.hpp"
#include "model.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "rule.hpp"
#include "saving.hpp"

namespace train_text {

/// The inputs of a rank.
struct Job {
    Options const& options;
    Text const& text;
    Text const& held_out;
    std::size_t longest; ///< the largest number of batches of a rank
    Progress const& progress;
};

template <class Model>
double bits_per_byte(Model& model, Text const& text) {
    auto const& loaded = model.load(text);
    double bits = 0;
    for (auto const& batch : make_batches(text.size(), 256, {})) {
        model.forward(loaded, batch);
        bits += model.loss() * static_cast<double>(batch.size());
    }
    return bits / static_cast<double>(text.size());
}

inline std::vector<std::vector<float>> values_of(Model& model) {
    std::vector<std::vector<float>> values;
    for (Parameter const& parameter : model.parameters()) {
        values.push_back(parameter.value.numbers);
    }
    return values;
}

/// All parameters, then all momentum.
inline std::vector<std::vector<float>> state_of(Model& model, Sgd const& optimizer) {
    std::vector<std::vector<float>> state = values_of(model);
    state.insert(state.end(), optimizer.velocity().begin(), optimizer.velocity().end());
    return state;
}

inline std::uint64_t digest_of(std::vector<std::vector<float>> const& state) {
    std::string bytes;
    for (auto const& numbers : state) {
        bytes.append(reinterpret_cast<char const*>(numbers.data()), numbers.size() * sizeof(float));
    }
    return hash_of(bytes);
}

/// What a rank announces of a batch. Gradients that stay on their ranks are not weighted.
template <class Passes>
joinable::RoundNotice notice_of(Passes const&, std::size_t batch_size) {
    if constexpr (requires { requires Passes::leaves_gradients_local(); }) {
        return {};
    } else {
        return {.weight = batch_size};
    }
}

/// Gives every rank all values during the lifetime of the returned object. Collective.
template <class Passes>
auto all_values(Passes& passes) {
    if constexpr (requires { passes.use_all(); }) {
        return passes.use_all();
    } else {
        return AllValues{};
    }
}

/// Waits until the device has done what a rank enqueued, with a deadline, because other ranks take
/// part.
template <class Comm>
void wait_for_device(Comm& comm) {
    if constexpr (requires { comm.synchronize(); }) {
        comm.synchronize();
    }
}

/// The objects that train() joins: passes and optimizer. One participant may be both.
template <class Passes, class Optimizer, class Save>
struct Trainer {
    Passes& passes;
    Optimizer& optimizer;
    std::function<void(std::size_t round)> prepare; ///< on an active rank before its step
    std::function<void(Findings&)> finish;          ///< reports this rank's part of the state
    Save save;

    [[nodiscard]] auto participants() const {
        if constexpr (std::is_same_v<Passes, Optimizer>) {
            return save.participants(passes);
        } else {
            return save.participants(passes, optimizer);
        }
    }
};
// clang 14 does not deduce it without this guide.
template <class Passes, class Optimizer, class Prepare, class Finish, class Save>
Trainer(Passes&, Optimizer&, Prepare, Finish, Save) -> Trainer<Passes, Optimizer, Save>;

/// Every rank steps in every round, so nothing is synced at the end, as the report shows.
template <class Comm, class Model, class Reduction = joinable::AllReduce>
auto data_parallel(Comm& comm, Model& model, Options const& options, Reduction reduction = {}) {
    return joinable::DistributedDataParallel<Comm, Reduction, joinable::TraceTimeline>{
        comm,
        model.parameters(),
        joinable::DataParallelOptions{
            .first_bucket_bytes = options.bucket_bytes,
            .gradient_as_bucket_view = options.device == Where::cuda,
            .sync_at_end = false
        },
        std::move(reduction)
    };
}

[[nodiscard]] inline bool records(Options const& options) {
    return !options.picture.empty() || !options.trace.empty();
}
/// On a device a rank would have to wait for each loss, which changes what is recorded.
[[nodiscard]] inline bool samples_loss(Options const& options) {
    return records(options) && options.device == Where::host;
}
/// Begins to record for --picture and --trace, if they are given. A bucket has one parameter or more.
inline void
start_recording(joinable::TraceTimeline& timeline, std::size_t parameters, Job const& job) {
    if (records(job.options)) {
        constexpr std::size_t most = 4'000'000; // of 32 bytes
        timeline.start((std::min)(most, job.longest * (parameters + 9)));
    }
}
/// Writes what was recorded. Collective.
template <class Hosts>
void write_recorded(Hosts& hosts, joinable::TraceTimeline const& timeline, Options const& options) {
    if (!options.picture.empty()) {
        joinable::write_picture(
            hosts, timeline, options.picture, {.samples = "bits per byte of a batch"}
        );
    }
    if (!options.trace.empty()) {
        joinable::write_trace(hosts, timeline, options.trace);
    }
}

/// Trains on this rank's text, together with the other ranks on theirs. `comm` moves gradients;
/// `hosts` connects the same ranks on the host. Both may be the same object if ranks compute on the
/// host.
template <class Comm, class Hosts, class Model, class Passes, class Optimizer, class Save>
Findings train(
    Comm& comm,
    Hosts& hosts,
    Model& model,
    Trainer<Passes, Optimizer, Save> const& trainer,
    Job const& job
) {
    Options const& options = job.options;
    auto const rank = static_cast<std::uint64_t>(comm.rank());
    Findings findings{};
    {
        [[maybe_unused]] auto const values = all_values(trainer.passes);
        if (rank == 0) {
            findings.bits_before = bits_per_byte(model, job.held_out);
        }
    }
    auto const& text = model.load(job.text);
    std::optional<ProgressDisplay> display;
    if (rank == 0) {
        display.emplace(job.progress);
    }
    start_recording(trainer.passes.timeline(), model.parameters().size(), job);
    comm.barrier();
    auto const start = std::chrono::steady_clock::now();
    std::size_t const rounds = job.longest / static_cast<std::size_t>(options.epochs);
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        joinable::Shuffle const shuffle{options.seed + rank, static_cast<std::uint64_t>(epoch)};
        auto const batches = make_batches(job.text.size(), options.batch_size, shuffle);
        // A resumed training has run the earlier rounds already.
        std::size_t const first = static_cast<std::size_t>(epoch) * rounds;
        std::size_t round =
            (std::clamp)(static_cast<std::size_t>(trainer.save.rounds()), first, first + rounds);
        std::size_t const had = (std::min)(round - first, batches.size());
        for (std::size_t i = 0; i < had; ++i) {
            job.progress.advance(comm.rank());
        }
        joinable::Join guard{
            trainer.participants(), joinable::control(hosts), {.enable = !options.without_join}
        };
        for (auto const& batch : std::span{batches}.subspan(had)) {
            trainer.passes.forward(
                [&](auto const&... use) { model.forward(text, batch, use...); },
                notice_of(trainer.passes, batch.size())
            );
            trainer.passes.backward([&](auto const& ready, auto const&... use) {
                model.backward(ready, use...);
            });
            if (samples_loss(options)) {
                trainer.passes.timeline().sample(model.loss());
            }
            trainer.prepare(round++);
            trainer.optimizer.step();
            trainer.save.step();
            job.progress.advance(comm.rank());
        }
        job.progress.set_shadowing(comm.rank(), true);
        joinable::JoinResult const result = guard.finish();
        wait_for_device(comm);
        job.progress.set_shadowing(comm.rank(), false);
        findings.rounds += result.rounds;
        findings.own_rounds += result.own_rounds;
        findings.shadow_rounds += result.shadow_rounds;
        findings.waited += std::chrono::duration<double>(result.waited).count();
    }
    std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
    findings.seconds = taken.count();
    display.reset();
    write_recorded(hosts, trainer.passes.timeline(), options);

    [[maybe_unused]] auto const values = all_values(trainer.passes);
    auto const numbers = values_of(model);
    findings.digest = digest_of(numbers);
    for (auto const& parameter : numbers) {
        findings.value_bytes += parameter.size() * sizeof(float);
    }
    trainer.finish(findings);
    if (rank == 0) {
        findings.bits_after = bits_per_byte(model, job.held_out);
    }
    return findings;
}

/// What all ranks have to do together. `shown` of them show their progress.
class Workload {
public:
    Workload(Options const& options, std::vector<Text> const& texts, std::size_t shown)
        : batches_{batches_of(options, texts)}, progress_{batches_, shown} {}

    /// A rank's part. Refers to all arguments and to this.
    [[nodiscard]] Job job(Options const& options, Text const& text, Text const& held_out) const {
        std::size_t const longest = *std::max_element(batches_.begin(), batches_.end());
        return {options, text, held_out, longest, progress_};
    }

private:
    static std::vector<std::size_t>
    batches_of(Options const& options, std::vector<Text> const& texts) {
        std::vector<std::size_t> batches;
        for (Text const& text : texts) {
            batches.push_back(options.batches_of(text));
        }
        return batches;
    }

    std::vector<std::size_t> batches_;
    Progress progress_;
};

/// Runs `rank(hosts, job)` on as many ranks as there are texts. Ranks are threads or processes; memory shared with
/// this process returns their findings.
/// @throws joinable::PeerFailed  a rank failed or left the others.
inline std::vector<Findings> run_ranks(
    Options const& options,
    std::vector<Text> const& texts,
    Text const& held_out,
    std::function<Findings(joinable::AnyCommunicator& hosts, Job const& job)> const& rank
) {
    Workload const workload{options, texts, texts.size()};
    auto const findings = joinable::shared_buffer<Findings>(texts.size());
    auto const body = [&](auto& comm) {
        joinable::AnyCommunicator hosts{comm};
        hosts.set_deadline(options.deadline());
        auto const r = static_cast<std::size_t>(hosts.rank());
        findings[r] = rank(hosts, workload.job(options, texts[r], held_out));
    };
    if (options.communicator == Kind::process) {
        joinable::run_processes(options.ranks, body);
    } else {
        joinable::run_threads(options.ranks, body);
    }
    return {findings.begin(), findings.end()};
}

/// An all-reduce gets all gradients, which have the size of the values.
template <class Reduction>
std::uint64_t sent_bytes(Reduction const& reduction, Findings const& findings) {
    if constexpr (requires { reduction.sent_bytes; }) {
        return reduction.sent_bytes;
    } else {
        return findings.rounds * findings.value_bytes;
    }
}

/// Trains with the engine's own optimizer, all of it on every rank.
template <
    class Comm,
    class Hosts,
    class Model,
    class Optimizer,
    class Reduction = joinable::AllReduce>
Findings train_by_engine(
    Comm& comm,
    Hosts& hosts,
    Model& model,
    Optimizer& optimizer,
    Job const& job,
    Reduction reduction = {}
) {
    auto ddp = data_parallel(comm, model, job.options, std::move(reduction));
    joinable::Step step{comm, std::function{[&] { optimizer.step(model.parameters()); }}};
    auto const finish = [&](Findings& findings) {
        findings.state_digest = digest_of(state_of(model, optimizer));
        for (auto const& numbers : optimizer.velocity()) {
            findings.state_bytes += numbers.size() * sizeof(float);
        }
        findings.sent_bytes = sent_bytes(ddp.reduction(), findings);
    };
    return train(
        comm, hosts, model, Trainer{ddp, step, [](std::size_t) {}, finish, NotSaved{}}, job
    );
}

inline std::uint64_t digest_of(joinable::OptimizerState<ChosenRule> const& state) {
    std::string bytes;
    for (auto const& parameter : state.parameters) {
        for (auto const& tensor : parameter.tensors) {
            auto const* const data = reinterpret_cast<char const*>(tensor.elements.data());
            bytes.append(data, tensor.elements.size());
        }
    }
    return hash_of(bytes);
}

inline joinable::Sharding sharding_of(Sharding sharding) {
    switch (sharding) {
    case Sharding::optimizer: return joinable::Sharding::optimizer;
    case Sharding::gradients: return joinable::Sharding::gradients;
    case Sharding::parameters: return joinable::Sharding::parameters;
    default: return joinable::Sharding::none;
    }
}

/// Trains with a rule of joinable; each rank has a part of its state, or with Sharding::none all.
template <class Comm, class Hosts, class Model>
Findings
train_sharded(Comm& comm, Hosts& hosts, Model& model, ChosenRule const& rule, Job const& job) {
    Sharding const sharding = job.options.sharding;
    FallingRate const rate{job.options.rate(), job.longest};
    joinable::ShardedDataParallel<Comm, ChosenRule, joinable::TraceTimeline> sharded{
        comm,
        model.parameters(),
        rule,
        joinable::ShardedOptions{
            .sharding = sharding_of(sharding),
            .bucket_cap_bytes = job.options.bucket_bytes,
            .sync_at_end = false,
        }
    };
    auto const prepare = [&](std::size_t round) { sharded.rule().set_rate(rate.at(round)); };
    auto const finish = [&](Findings& findings) {
        if (sharding == Sharding::parameters) {
            findings.value_bytes = sharded.value_bytes();
        }
        findings.state_bytes = sharded.state_bytes();
        for (int rank = 0; sharding == Sharding::none && rank < comm.size(); ++rank) {
            sharded.consolidate(rank);
            if (rank == comm.rank()) {
                findings.state_digest = digest_of(sharded.state());
            }
        }
    };
    auto const train_and = [&](auto const& save) {
        return train(comm, hosts, model, Trainer{sharded, sharded, prepare, finish, save}, job);
    };
    return job.options.save.is_wanted() ? train_saved(sharded, job.options.save, train_and)
                                        : train_and(NotSaved{});
}

inline ChosenRule rule_of(Options const& options) {
    switch (options.rule) {
    case Rule::adam: return ChosenRule{joinable::Adam{}};
    case Rule::adamw: return ChosenRule{joinable::AdamW{}};
    default: return ChosenRule{joinable::Sgd{.momentum = options.momentum}};
    }
}

} // namespace train_text
