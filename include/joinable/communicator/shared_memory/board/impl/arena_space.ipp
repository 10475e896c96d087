// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/board/arena_space.hpp>

#include <cstdint>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::optional<Arena>
ArenaSpace::allocate(std::size_t bytes, std::size_t alignment) {
    check_alignment(alignment);
    if (bytes == 0) {
        return Arena{};
    }
    std::lock_guard const lock{mutex_};
    std::byte* const data =
        take_first_fit(taken_, memory_, bytes, alignment, [&](std::size_t begin) {
            reserve_(memory_.data() + begin, bytes);
            std::memset(memory_.data() + begin, 0, bytes); // another arena may have used it
        });
    if (data == nullptr) {
        return std::nullopt;
    }
    ++arenas_;
    return Arena{data, bytes, &release, this};
}

JOINABLE_DEFINITION bool ArenaSpace::holds(void const* data, std::size_t bytes) const noexcept {
    std::uintptr_t const offset =
        reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(memory_.data());
    return offset <= memory_.size() && bytes <= memory_.size() - offset;
}

JOINABLE_DEFINITION void ArenaSpace::keep(void const* data) noexcept {
    std::lock_guard const lock{mutex_};
    if (holds(data, 0)) {
        auto const offset =
            static_cast<std::size_t>(static_cast<std::byte const*>(data) - memory_.data());
        for (MemoryRange& range : taken_) {
            range.is_kept = range.is_kept || (range.begin <= offset && offset < range.end);
        }
    }
}

JOINABLE_DEFINITION void ArenaSpace::release(void* context, std::byte* data, std::size_t) noexcept {
    auto* const space = static_cast<ArenaSpace*>(context);
    auto const begin = static_cast<std::size_t>(data - space->memory_.data());
    space->finish([&] {
        std::erase_if(space->taken_, [&](MemoryRange const& range) {
            return range.begin == begin && !range.is_kept;
        });
        --space->arenas_;
    });
}

}}} // namespace joinable::v0::detail
