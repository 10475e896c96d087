// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/communicator/arena.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable::inline v0::detail {

/// What each rank asks for, in bytes, by rank: all of them must ask for the same. `doing` says what
/// they do.
/// @throws Mismatch  on all ranks, which have the same sizes here.
inline void
check_same_size(std::span<std::uint64_t const> sizes, std::string_view doing = "share memory") {
    std::vector<int> ranks;
    std::string text =
        concat("ranks ", doing, " of different sizes: rank 0 of ", sizes[0], " bytes");
    for (std::size_t rank = 1; rank < sizes.size(); ++rank) {
        if (sizes[rank] != sizes[0]) {
            ranks.push_back(static_cast<int>(rank));
            text += concat(", rank ", rank, " of ", sizes[rank]);
        }
    }
    if (!ranks.empty()) {
        throw Mismatch{ranks, text + "; give the same count of the same elements on every rank"};
    }
}

/// Memory from the heap that all ranks have, which are threads; it is there until the last rank's
/// arena is gone. Collective, blocks.
/// @throws Mismatch        see check_same_size.
/// @throws std::bad_alloc  on all ranks.
template <class Comm>
[[nodiscard]] Arena share_heap(Comm& comm, std::size_t bytes) {
    struct Owned {
        Arena memory;
        std::atomic<int> owners;
    };
    std::unique_ptr<Owned> made;
    if (comm.rank() == 0) {
        try {
            made.reset(new Owned{Arena{bytes}, comm.size()});
        } catch (std::bad_alloc const&) { // NOLINT(bugprone-empty-catch): the null pointer says so
        }
    }
    auto const ranks = static_cast<std::size_t>(comm.size());
    std::array<std::uint64_t, 2> const mine{bytes, reinterpret_cast<std::uintptr_t>(made.get())};
    std::vector<std::array<std::uint64_t, 2>> all(ranks);
    comm.all_gather({mine.data(), 2, DType::u64}, {all.data(), 2 * ranks, DType::u64}).wait();
    std::vector<std::uint64_t> sizes;
    for (auto const& said : all) {
        sizes.push_back(said[0]);
    }
    check_same_size(sizes);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rank 0's, of the same process
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

} // namespace joinable::inline v0::detail
