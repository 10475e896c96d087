// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/thread.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/checks.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION ThreadCommunicator::ThreadCommunicator(
    detail::Group group, int rank, std::shared_ptr<detail::GroupStorage<detail::Heap>> storage
)
    : BoardCommunicator{group, rank, std::move(storage)},
      models_{rank_.storage()->models(), &group.board()} {}

JOINABLE_DEFINITION ThreadCommunicator ThreadCommunicator::split(int color, int key) {
    return {rank_, allot_slot(color, key)};
}

JOINABLE_DEFINITION Arena ThreadCommunicator::share(std::size_t bytes) {
    struct Owned {
        Arena memory;
        std::atomic<int> owners;
    };
    std::unique_ptr<Owned> made;
    if (rank() == 0) {
        try {
            made.reset(new Owned{Arena{bytes}, size()});
        } catch (std::bad_alloc const&) { // NOLINT(bugprone-empty-catch): a null pointer reports it
        }
    }
    auto const ranks = static_cast<std::size_t>(size());
    std::array<std::uint64_t, 2> const mine{bytes, reinterpret_cast<std::uintptr_t>(made.get())};
    std::vector<std::array<std::uint64_t, 2>> all(ranks);
    all_gather({mine.data(), 2, DType::u64}, {all.data(), 2 * ranks, DType::u64}).wait();
    std::vector<std::uint64_t> sizes;
    for (auto const& words : all) {
        sizes.push_back(words[0]);
    }
    detail::check_same_size(sizes, is_renumbered());
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rank 0's pointer, in the same process
    auto* const owned = reinterpret_cast<Owned*>(static_cast<std::uintptr_t>(all[0][1]));
    if (owned == nullptr) {
        throw std::bad_alloc{};
    }
    static_cast<void>(made.release()); // now every rank owns it
    auto const release = [](void* its, std::byte*, std::size_t) noexcept {
        auto* const shared = static_cast<Owned*>(its);
        if (shared->owners.fetch_sub(1) == 1) {
            delete shared;
        }
    };
    return {owned->memory.data(), bytes, release, owned};
}

JOINABLE_DEFINITION ThreadCommunicator::ThreadCommunicator(
    detail::GroupRank<detail::Heap> const& parent, Slot const& slot
)
    : ThreadCommunicator{slot.group, slot.rank, parent.storage()} {
    set_deadline(parent.deadline());
}

}} // namespace joinable::v0
