// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/by_members.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/settle.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
#include <joinable/communicator/substitute.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Bytes that a leader copies within its memory. Source and destination do not overlap.
struct LeadersCopy {
    std::byte* to;
    std::byte const* from;
    std::size_t bytes;
};

/// A collective of one level, which is a part of one of all ranks. Or, if it has copies, only these.
struct LevelStep {
    Level level = Level::local;
    Descriptor signature = {}; ///< with counts if parts differ
    ConstBuffer in = {};       ///< as `out` if the collective is in place
    Buffer out = {};
    std::vector<std::size_t> counts = {};     ///< of each rank of the level
    std::vector<std::size_t> counts_out = {}; ///< of an all_to_all: what comes from each
    std::vector<std::size_t> pairs = {};      ///< of an all_to_all: from each to each
    Buffer memory = {};                       ///< of what replaces it
    std::vector<LeadersCopy> copies = {};
};

/// A step that was started, whatever type its work has.
class RunningStep {
public:
    RunningStep() = default;
    RunningStep(RunningStep const&) = delete;
    RunningStep& operator=(RunningStep const&) = delete;
    virtual ~RunningStep() = default;
    [[nodiscard]] virtual bool is_settled(Waiting waiting) = 0;
};

template <Work W>
class RunningWork final : public RunningStep {
public:
    explicit RunningWork(W work) : work_{std::move(work)} {}
    [[nodiscard]] bool is_settled(Waiting waiting) override {
        return detail::is_settled(work_, waiting);
    }

private:
    std::optional<W> work_;
};

/// Starts a step on its level.
template <class Comm>
[[nodiscard]] std::unique_ptr<RunningStep> start_step(Comm& comm, LevelStep const& step) {
    auto const run = []<Work W>(W work) -> std::unique_ptr<RunningStep> {
        return std::make_unique<RunningWork<W>>(std::move(work));
    };
    PartSizes const parts = PartSizes::of(step.counts);
    bool const exchanges = step.signature.collective == Collective::all_to_all;
    Request const request{
        step.signature, step.in, step.out, parts, exchanges ? PartSizes::of(step.counts_out) : parts
    };
    return by_members(comm, request, run, [&](Collective) {
        return run(Substitute{comm, request, {exchanges ? step.pairs : step.counts, step.memory}});
    });
}

}}} // namespace joinable::v0::detail
