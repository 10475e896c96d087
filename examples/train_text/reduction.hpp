// SPDX-License-Identifier: BSL-1.0
#pragma once

// How gradients travel, chosen when the program runs, or what is sent in their place.

#include <joinable/any_communicator.hpp>
#include <joinable/compression.hpp>
#include <joinable/join.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <variant>

#include "model.hpp"
#include "options.hpp"
#include "train.hpp"

namespace train_text {

/// A communicator that counts the bytes that this rank gives to its collectives.
template <joinable::Communicator Comm>
struct Counted {
    Comm& comm;
    std::uint64_t& bytes;

    [[nodiscard]] int rank() const { return comm.rank(); }
    [[nodiscard]] int size() const { return comm.size(); }
    void barrier() { comm.barrier(); }
    auto broadcast(joinable::Buffer buffer, int root) { return comm.broadcast(buffer, root); }
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        bytes += buffer.bytes();
        return comm.all_reduce(buffer, op);
    }
    template <class... Counts>
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out, Counts const&... counts) {
        bytes += in.bytes();
        return comm.all_gather(in, out, counts...);
    }
    template <class... Counts>
    auto all_to_all(joinable::ConstBuffer in, joinable::Buffer out, Counts const&... counts) {
        bytes += in.bytes();
        return comm.all_to_all(in, out, counts...);
    }
};

/// One of several reductions.
class ChosenReduction {
    using Comm = joinable::AnyCommunicator;
    using Chosen = std::variant<
        joinable::Fp16Compression<>,
        joinable::Bf16Compression<>,
        joinable::Int8Compression,
        joinable::TopK,
        joinable::PowerSgd>;

public:
    static constexpr bool delivers = true;
    static constexpr std::size_t steps = 2; // the most that one of them needs

    explicit ChosenReduction(Chosen chosen)
        : name{std::visit([](auto const& one) { return std::string_view{one.name}; }, chosen)},
          chosen_{std::move(chosen)} {}

    std::string_view name;
    std::uint64_t sent_bytes = 0;

    [[nodiscard]] bool scales(Comm& comm) const {
        return std::visit([&](auto const& one) { return one.scales(comm); }, chosen_);
    }
    void prepare(Comm& comm, joinable::BucketParts parts) {
        std::visit([&](auto& one) { one.prepare(comm, parts); }, chosen_);
    }
    [[nodiscard]] joinable::AnyWork
    start(Comm& comm, joinable::BucketRun const& run, double factor, bool contributes) {
        Counted<Comm> counted{comm, sent_bytes};
        return std::visit(
            [&](auto& one) -> joinable::AnyWork {
                return one.start(counted, run, factor, contributes);
            },
            chosen_
        );
    }
    [[nodiscard]] joinable::AnyWork
    advance(Comm& comm, joinable::BucketRun const& run, std::size_t step) {
        Counted<Comm> counted{comm, sent_bytes};
        return std::visit(
            [&](auto& one) -> joinable::AnyWork {
                if constexpr (requires { one.advance(counted, run, step); }) {
                    return one.advance(counted, run, step);
                } else {
                    return joinable::AnyWork{joinable::CompletedWork{}};
                }
            },
            chosen_
        );
    }
    void finish(Comm& comm, joinable::BucketRun const& run) {
        std::visit([&](auto& one) { one.finish(comm, run); }, chosen_);
    }
    void agree_on(joinable::AgreementList& list) const {
        std::visit(
            [&](auto const& one) {
                if constexpr (requires { one.agree_on(list); }) {
                    one.agree_on(list);
                }
            },
            chosen_
        );
    }
    void end_iteration() {
        std::visit(
            [](auto& one) {
                if constexpr (requires { one.end_iteration(); }) {
                    one.end_iteration();
                }
            },
            chosen_
        );
    }

private:
    Chosen chosen_;
};

[[nodiscard]] inline ChosenReduction reduction_of(Options const& options) {
    switch (options.reduction) {
    case Reduction::fp16: return ChosenReduction{joinable::Fp16Compression<>{}};
    case Reduction::bf16: return ChosenReduction{joinable::Bf16Compression<>{}};
    case Reduction::int8: return ChosenReduction{joinable::Int8Compression{}};
    case Reduction::topk: return ChosenReduction{joinable::TopK{.density = options.density}};
    default:
        return ChosenReduction{joinable::PowerSgd{.rank = options.vectors, .start_iteration = 10}};
    }
}

/// In the place of what saves a training: ranks step apart, and average their values after their steps.
struct Averaged {
    joinable::PeriodicAverage<joinable::AnyCommunicator>& average;

    static std::size_t rounds() { return 0; }
    void step() const { average.step(); }
    template <class... Js>
    auto participants(Js&... joinables) const {
        return joinable::participants(joinables..., average);
    }
};

/// Local SGD. The momentum of each rank stays its own.
inline Findings train_locally(
    joinable::AnyCommunicator& comm,
    joinable::AnyCommunicator& hosts,
    Model& model,
    Sgd& optimizer,
    Job const& job
) {
    auto ddp = data_parallel(comm, model, job.options, joinable::NoReduction{});
    joinable::PeriodicAverage average{comm, model.parameters(), {.period = job.options.period}};
    joinable::Step step{comm, std::function{[&] { optimizer.step(model.parameters()); }}};
    auto const finish = [&](Findings& findings) {
        std::size_t averages = average.rounds() / job.options.period;
        std::size_t const epochs = static_cast<std::size_t>(job.options.epochs);
        for (std::size_t epoch = 1; epoch <= epochs; ++epoch) { // each averages what is left
            averages += epoch * (job.longest / epochs) % job.options.period == 0 ? 0 : 1;
        }
        findings.sent_bytes = averages * findings.value_bytes;
        for (auto const& numbers : optimizer.velocity()) {
            findings.state_bytes += numbers.size() * sizeof(float);
        }
    };
    return train(
        comm, hosts, model, Trainer{ddp, step, [](std::size_t) {}, finish, Averaged{average}}, job
    );
}

} // namespace train_text
