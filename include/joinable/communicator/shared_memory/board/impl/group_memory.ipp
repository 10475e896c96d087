// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/board/group_memory.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

#include <joinable/communicator/shared_memory/board/system.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
Room::Room(std::span<std::byte> memory, ArenaSpace::Reserve reserve, Clear clear)
    : memory_{memory}, size_{memory.size()}, reserve_{std::move(reserve)}, clear_{std::move(clear)},
      unreserved_{{0, memory.size()}} {}

JOINABLE_DEFINITION Arena Room::arena(std::size_t bytes, std::size_t alignment) {
    std::lock_guard const lock{mutex_};
    std::size_t const half = memory_.size() / 2;
    if (!arenas_owner_ && (given_.empty() || given_.back().end <= half)) {
        arenas_owner_ = ArenaSpace::make(memory_.subspan(half), reserve_);
        arenas_.store(arenas_owner_.get(), std::memory_order_release);
        size_.store(half, std::memory_order_relaxed);
    }
    std::optional<Arena> found;
    if (arenas_owner_) {
        found = arenas_owner_->allocate(bytes, alignment);
    }
    return found ? std::move(*found) : Arena{bytes, alignment};
}

JOINABLE_DEFINITION std::byte* Room::allocate(std::size_t bytes) {
    BlockPart const all{0, in_cache_lines(bytes)};
    return allocate(bytes, {&all, 1}, {0, 0});
}

JOINABLE_DEFINITION std::byte*
Room::allocate(std::size_t bytes, std::span<BlockPart const> used, BlockPart zeros) {
    std::size_t const size = in_cache_lines(bytes);
    std::lock_guard const lock{mutex_};
    return take_first_fit(given_, memory_.first(this->size()), size, 1, [&](std::size_t first) {
        for (BlockPart const& part : used) {
            reserve(first + part.offset, first + part.offset + part.bytes);
        }
        if (zeros.bytes != 0) {
            std::size_t const begin = first + zeros.offset;
            unreserve(begin, begin + zeros.bytes); // before that: it may throw halfway
            clear_(memory_.data() + begin, zeros.bytes);
        }
    });
}

JOINABLE_DEFINITION void Room::reserve(std::size_t begin, std::size_t end) {
    // Whole pages, so that what is left consists of few large parts.
    std::size_t const page = page_size();
    std::size_t const in_page = reinterpret_cast<std::uintptr_t>(memory_.data()) % page;
    begin -= (std::min)(begin, (in_page + begin) % page);
    end = (std::min)((in_page + end + page - 1) / page * page - in_page, size());
    auto const first = std::upper_bound(
        unreserved_.begin(),
        unreserved_.end(),
        begin,
        [](std::size_t offset, MemoryRange const& gap) { return offset < gap.end; }
    );
    auto at = first - unreserved_.begin();
    while (at != std::ssize(unreserved_) && unreserved_.data()[at].begin < end) {
        unreserved_.reserve(unreserved_.size() + 1); // must not fail once memory is reserved
        auto const place = unreserved_.begin() + at;
        MemoryRange const gap = *place;
        MemoryRange const part{(std::max)(gap.begin, begin), (std::min)(gap.end, end)};
        reserve_(memory_.data() + part.begin, part.end - part.begin);
        unreserved_.erase(place);
        for (MemoryRange const& rest :
             {MemoryRange{gap.begin, part.begin}, MemoryRange{part.end, gap.end}}) {
            if (rest.begin != rest.end) {
                unreserved_.insert(unreserved_.begin() + at++, rest);
            }
        }
    }
}

JOINABLE_DEFINITION void Room::unreserve(std::size_t begin, std::size_t end) {
    std::size_t const page = page_size();
    std::size_t const in_page = reinterpret_cast<std::uintptr_t>(memory_.data()) % page;
    begin = (in_page + begin + page - 1) / page * page - in_page;
    end -= (std::min)(end, (in_page + end) % page);
    if (begin >= end) {
        return;
    }
    // The parts that the new one meets become one with it.
    auto const first =
        std::find_if(unreserved_.begin(), unreserved_.end(), [&](MemoryRange const& gap) {
            return begin <= gap.end;
        });
    auto const last = std::find_if(first, unreserved_.end(), [&](MemoryRange const& gap) {
        return end < gap.begin;
    });
    if (first != last) {
        begin = (std::min)(begin, first->begin);
        end = (std::max)(end, std::prev(last)->end);
    }
    unreserved_.insert(unreserved_.erase(first, last), {begin, end});
}

JOINABLE_DEFINITION void Room::free(std::byte* memory, std::size_t bytes) noexcept {
    auto const begin = static_cast<std::size_t>(memory - memory_.data());
    std::size_t const end = begin + in_cache_lines(bytes);
    std::lock_guard const lock{mutex_};
    std::erase_if(given_, [&](MemoryRange const& range) {
        return range.begin == begin && range.end == end;
    });
}

}}} // namespace joinable::v0::detail
