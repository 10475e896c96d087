// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <joinable/communicator/mpi/detail/lock.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The memory of one rank that MPI reads and writes. MPI cannot cancel a collective, so it gets no
/// buffer of the caller, except those in an arena from here.
class MpiMemory {
public:
    explicit MpiMemory(std::shared_ptr<MpiLock> lock) : lock_{std::move(lock)} {}
    MpiMemory(MpiMemory const&) = delete;
    MpiMemory& operator=(MpiMemory const&) = delete;
    ~MpiMemory() {
        for (Blocks const& blocks : blocks_) {
            for (std::byte* const block : blocks.free) {
                ::operator delete(block);
            }
        }
    }

    /// A block for an operation in flight. Blocks are reused, so repeating a size allocates
    /// nothing.
    [[nodiscard]] std::byte* take(std::size_t bytes) {
        auto& [free, count] = blocks_[class_of(bytes)];
        if (free.empty()) {
            free.reserve(count + 1);
            auto* const made =
                static_cast<std::byte*>(::operator new(std::size_t{1} << class_of(bytes)));
            ++count;
            return made;
        }
        std::byte* const block = free.back();
        free.pop_back();
        return block;
    }
    /// `bytes` is the size given to take().
    void give_back(std::byte* block, std::size_t bytes) noexcept {
        blocks_[class_of(bytes)].free.push_back(block); // has room
    }

    /// Whether MPI may use the buffer directly.
    [[nodiscard]] bool has(ConstBuffer buffer) const noexcept {
        auto const* const data = static_cast<std::byte const*>(buffer.data);
        return std::any_of(arenas_.begin(), arenas_.end(), [&](Arena const& arena) {
            return data >= arena.data() && data + buffer.bytes() <= arena.data() + arena.bytes();
        });
    }

    /// From here on nothing is freed, because MPI may still write to it.
    void hold() noexcept { is_held_ = true; }
    /// MPI has finished with the held memory.
    void release() noexcept {
        is_held_ = false;
        held_.clear();
    }

    /// Zeroed memory from the heap. MPI's own allocator would end the job on failure, and its
    /// memory could not be freed once MPI is finalised. The arena may outlive the rank; both share
    /// this object.
    /// @throws std::bad_alloc
    [[nodiscard]] static Arena
    allocate(std::shared_ptr<MpiMemory> const& memory, std::size_t bytes, std::size_t alignment) {
        if (bytes > PTRDIFF_MAX) {
            throw std::bad_alloc{};
        }
        Arena own{bytes, alignment};
        if (bytes == 0) {
            return own;
        }
        auto owner = std::make_unique<std::shared_ptr<MpiMemory>>(memory);
        memory->held_.reserve(memory->held_.size() + memory->arenas_.size() + 1);
        std::byte* const data = own.data();
        memory->arenas_.push_back(std::move(own));
        return Arena{data, bytes, &release, owner.release()};
    }

private:
    /// Those of one size.
    struct Blocks {
        std::vector<std::byte*> free;
        std::size_t count = 0; ///< of all, also of those that are not free
    };

    /// Sizes are rounded up to a power of two, so that a few blocks serve many sizes.
    [[nodiscard]] static std::size_t class_of(std::size_t bytes) noexcept {
        constexpr std::size_t least = 64;
        return static_cast<std::size_t>(std::bit_width((std::max)(bytes, least) - 1));
    }
    static void release(void* context, std::byte* data, std::size_t) noexcept {
        std::unique_ptr<std::shared_ptr<MpiMemory>> const owner{
            static_cast<std::shared_ptr<MpiMemory>*>(context)
        };
        MpiMemory& memory = **owner;
        auto const held = memory.lock_->take();
        auto const found =
            std::find_if(memory.arenas_.begin(), memory.arenas_.end(), [&](Arena const& arena) {
                return arena.data() == data;
            });
        if (memory.is_held_) {
            memory.held_.push_back(std::move(*found)); // it has capacity for all arenas
        }
        memory.arenas_.erase(found);
    }

    std::shared_ptr<MpiLock> lock_; ///< the rank's
    std::array<Blocks, 65> blocks_; ///< by the logarithm of their size
    std::vector<Arena> arenas_;     ///< the memory of the callers' arenas
    std::vector<Arena> held_;       ///< of callers' arenas that were destroyed
    bool is_held_ = false;
};

}}} // namespace joinable::v0::detail
