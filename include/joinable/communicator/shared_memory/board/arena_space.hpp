// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Memory from which the arenas of one rank are cut. One thread at a time. It is there as long as
/// its owner or an arena: so an arena may outlive its communicator.
/// @pre the memory itself stays mapped as long as `reserve` exists
class ArenaSpace {
public:
    struct Close {
        void operator()(ArenaSpace* space) const noexcept {
            space->is_closed_ = true;
            space->end_if_unused();
        }
    };
    using Owner = std::unique_ptr<ArenaSpace, Close>;
    /// Is told what is going to be written, and throws where there is no memory for it.
    using Reserve = std::function<void(std::byte const* data, std::size_t bytes)>;

    [[nodiscard]] static Owner make(std::span<std::byte> memory, Reserve reserve) {
        return Owner{new ArenaSpace{memory, std::move(reserve)}};
    }
    ArenaSpace(ArenaSpace const&) = delete;
    ArenaSpace& operator=(ArenaSpace const&) = delete;

    /// The first gap that is large enough, zeroed; nothing where there is none. Linear in the arenas.
    [[nodiscard]] std::optional<Arena> allocate(std::size_t bytes, std::size_t alignment) {
        check_alignment(alignment);
        if (bytes == 0) {
            return Arena{};
        }
        auto const start = reinterpret_cast<std::uintptr_t>(memory_.data());
        std::size_t end = 0; // of the arena before
        for (auto next = taken_.begin();; ++next) {
            std::size_t const begin = (start + end + alignment - 1) / alignment * alignment - start;
            std::size_t const limit = next == taken_.end() ? memory_.size() : next->begin;
            if (begin <= limit && bytes <= limit - begin) {
                std::byte* const data = memory_.data() + begin;
                reserve_(data, bytes);
                taken_.insert(next, {begin, begin + bytes});
                std::memset(data, 0, bytes); // something else may have been there
                return Arena{data, bytes, &release, this};
            }
            if (next == taken_.end()) {
                return std::nullopt;
            }
            end = next->end;
        }
    }

    /// Whether all of `bytes` bytes from `data` on lie in this memory.
    [[nodiscard]] bool holds(void const* data, std::size_t bytes) const noexcept {
        std::uintptr_t const offset = reinterpret_cast<std::uintptr_t>(data) -
                                      reinterpret_cast<std::uintptr_t>(memory_.data());
        return offset <= memory_.size() && bytes <= memory_.size() - offset;
    }

private:
    struct Range { ///< as places in the memory
        std::size_t begin;
        std::size_t end;
    };

    ArenaSpace(std::span<std::byte> memory, Reserve reserve) noexcept
        : memory_{memory}, reserve_{std::move(reserve)} {}
    ~ArenaSpace() = default;

    static void release(void* context, std::byte* data, std::size_t) noexcept {
        auto* const space = static_cast<ArenaSpace*>(context);
        auto const begin = static_cast<std::size_t>(data - space->memory_.data());
        std::erase_if(space->taken_, [&](Range const& range) { return range.begin == begin; });
        space->end_if_unused();
    }
    void end_if_unused() noexcept {
        if (is_closed_ && taken_.empty()) {
            delete this;
        }
    }

    std::span<std::byte> memory_;
    Reserve reserve_;
    std::vector<Range> taken_; ///< in the order of their places
    bool is_closed_ = false;
};

}}} // namespace joinable::v0::detail
