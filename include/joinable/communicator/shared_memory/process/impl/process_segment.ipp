// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/process/process_segment.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <utility>

#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/shared_memory/board/system.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ProcessSegment::ProcessSegment(int size) : staging_at_{bytes_for(size, 0)} {
    // Address space, not memory: the system allocates a page when a rank first writes to it.
    for (room_ = most_room;; room_ /= 2) {
        std::size_t const bytes = bytes_for(size, room_);
        mapped_ = map_shared(bytes, -1, MAP_NORESERVE);
        if (mapped_.data() != nullptr) {
            break;
        }
        if (room_ <= least_room) {
            throw CommunicationError{concat(
                "expected ",
                bytes,
                " bytes of shared memory for ",
                size,
                " process ranks, but mmap says: ",
                std::strerror(errno),
                "; allow more address space, or use fewer ranks"
            )};
        }
    }
    memory_ = mapped_.data();
    madvise(memory_, mapped_.bytes(), MADV_DONTDUMP); // a dump would allocate all of it
    create(size);
}

JOINABLE_DEFINITION void ProcessSegment::clear(std::byte* data, std::size_t bytes) {
    auto const zero = [this](std::byte* begin, std::byte const* end) {
        if (auto const n = static_cast<std::size_t>(end - begin); n != 0) {
            reserve(begin, n);
            std::memset(begin, 0, n);
        }
    };
    std::size_t const page = page_size();
    std::size_t const before = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
    std::byte* const end = data + bytes;
    if (before < bytes) {
        std::byte* const first = data + before;
        std::size_t const inner = (bytes - before) / page * page;
        if (inner != 0 && madvise(first, inner, MADV_REMOVE) == 0) {
            zero(data, first);
            zero(first + inner, end);
            return;
        }
    }
    zero(data, end);
}

JOINABLE_DEFINITION Outcome& ProcessSegment::outcome(int rank) const noexcept {
    return std::launder(reinterpret_cast<Outcome*>(at(outcomes_at(board_->size()))))[rank];
}

JOINABLE_DEFINITION std::span<std::byte> ProcessSegment::staging(int rank) const noexcept {
    std::size_t const offset = page_offset_of(rank, board_->size());
    return {
        at(staging_at_ + static_cast<std::size_t>(rank) * room_ + offset), room_ - tables_end_at
    };
}

JOINABLE_DEFINITION
ProcessSegment::ProcessSegment(int size, std::size_t room, std::byte* memory, bool is_creator)
    : staging_at_{bytes_for(size, 0)}, room_{room}, memory_{memory},
      board_{&Board::at_address(memory)} {
    if (is_creator) {
        create(size);
    }
}

JOINABLE_DEFINITION std::array<BlockPart, 3> ProcessSegment::parts_at_start(int size) {
    auto const [board, group] = Group::parts_at_start(size);
    return {{board, group, {outcomes_at(size), width(size) * sizeof(Outcome)}}};
}

JOINABLE_DEFINITION std::size_t ProcessSegment::bytes_for(int size, std::size_t room) {
    std::size_t const tables = outcomes_at(size) + width(size) * sizeof(Outcome);
    return (tables + tables_end_at - 1) / tables_end_at * tables_end_at + width(size) * room;
}

JOINABLE_DEFINITION void ProcessSegment::create(int size) {
    board_ = &Group::create(all_numbers(size), {at(0), outcomes_at(size)}).board();
    ::new (at(outcomes_at(size))) Outcome[width(size)];
}

JOINABLE_DEFINITION ProcessRank::ProcessRank(ProcessSegment& segment, int rank) : GroupRank{
          segment.group(),
          rank,
          // An arena may outlive this object, so it keeps alive a segment that nothing else owns.
          std::make_shared<GroupStorage<Room>>(
              segment.staging(rank),
              [&segment,
               kept = segment.weak_from_this().lock()](std::byte const* data, std::size_t bytes) {
                  segment.reserve(data, bytes);
              },
              [&segment](std::byte* data, std::size_t bytes) { segment.clear(data, bytes); }
          )
      },
      outcome_{&segment.outcome(rank)} {}

JOINABLE_DEFINITION
ProcessRank::ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage)
    : GroupRank{group, rank, std::move(storage)} {}

JOINABLE_DEFINITION std::chrono::nanoseconds
ProcessRank::set_deadline(std::chrono::nanoseconds deadline) noexcept {
    if (outcome_ != nullptr && is_here()) {
        outcome_->deadline.store(deadline.count());
    }
    return GroupRank::set_deadline(deadline);
}

}}} // namespace joinable::v0::detail
