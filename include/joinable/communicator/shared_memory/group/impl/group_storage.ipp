// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/group/group_storage.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void ThreadModels::enter(void const* group, TrainedMemory const& memory) {
    std::lock_guard const lock{mutex_};
    entries_.push_back({group, &memory});
    for (Entry const& other : entries_) {
        if (other.group == group && other.memory->number == memory.number) {
            require_apart(memory, *other.memory);
        }
    }
}

JOINABLE_DEFINITION void
ThreadModels::require_apart(TrainedMemory const& memory, TrainedMemory const& other) {
    std::size_t const own = memory.parts.size();
    std::vector<AddressRange> ranges = memory.ranges;
    for (AddressRange range : other.ranges) {
        range.index += own;
        ranges.push_back(range);
    }
    auto const shared = find_shared(
        std::move(ranges),
        [&](std::size_t i) { return i < own ? memory.view_of(i) : other.view_of(i - own); },
        [&](std::size_t i, std::size_t k) {
            return i < own && k >= own && memory.rank != other.rank;
        }
    );
    if (!shared) {
        return;
    }
    std::string text = memory.text_of(shared->first);
    std::string there = other.text_of(shared->second - own);
    bool const are_alike = text == there;
    int const ranks[] = {(std::min)(memory.rank, other.rank), (std::max)(memory.rank, other.rank)};
    if (are_alike) {
        text = concat("ranks ", ranks[0], " and ", ranks[1], " share ", text);
    } else {
        if (other.rank == ranks[0]) {
            text.swap(there);
        }
        text +=
            concat(" on rank ", ranks[0], " and ", there, " on rank ", ranks[1], " share memory");
    }
    text += "; make a model for each rank, in the body of run_threads";
    if (are_alike && !memory.parts[shared->first].is_gradient) {
        text += ", or set DataParallelOptions::shares_values";
    }
    throw ContractViolation{text};
}

JOINABLE_DEFINITION void ThreadModels::leave(TrainedMemory const& memory) noexcept {
    std::lock_guard const lock{mutex_};
    std::erase_if(entries_, [&](Entry const& entry) { return entry.memory == &memory; });
}

}}} // namespace joinable::v0::detail
