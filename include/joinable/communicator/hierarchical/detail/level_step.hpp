// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
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
    std::vector<std::size_t> counts = {}; ///< of each rank of the level
    std::vector<std::size_t> pairs = {
    }; ///< in an all_to_all: from each rank, then from each to each
    Buffer memory = {}; ///< of what replaces it
    std::vector<LeadersCopy> copies = {};
};

/// Starts a step on its level.
[[nodiscard]] inline AnyWork start_step(AnyInterface& level, LevelStep const& step) {
    PartSizes const parts = PartSizes::of(step.counts);
    bool const exchanges = step.signature.collective == Collective::all_to_all;
    return level.post(
        {step.signature, step.in, step.out, parts, exchanges ? PartSizes::of(step.pairs) : parts},
        {exchanges ? Counts{step.pairs}.subspan(step.counts.size()) : step.counts, step.memory}
    );
}

}}} // namespace joinable::v0::detail
