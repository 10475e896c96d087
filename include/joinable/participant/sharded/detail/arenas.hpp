// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/bucket/memory.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Memory for packed buckets. The reduction of gradients and the exchange of values take turns with
/// it.
class BucketArenas {
public:
    explicit BucketArenas(BufferMemory const& memory) : memory_{memory} {}

    /// Makes the first `count` arenas at least this large.
    void reserve(std::size_t count, std::size_t bytes) {
        for (std::size_t k = 0; k < count; ++k) {
            static_cast<void>(data(k, bytes));
        }
    }
    /// Arena `k`, of at least `bytes`. It loses its contents when it grows.
    [[nodiscard]] std::byte* data(std::size_t k, std::size_t bytes) {
        if (k >= arenas_.size()) {
            arenas_.resize(k + 1);
        }
        if (bytes > arenas_[k].bytes()) {
            arenas_[k] = memory_.allocate(bytes);
        }
        return arenas_[k].data();
    }
    /// Frees all arenas but the first `count`.
    void keep(std::size_t count) noexcept {
        for (std::size_t k = count; k < arenas_.size(); ++k) {
            arenas_[k] = Arena{};
        }
    }
    /// The bytes of all arenas.
    [[nodiscard]] std::size_t bytes() const noexcept {
        std::size_t bytes = 0;
        for (Arena const& arena : arenas_) {
            bytes += arena.bytes();
        }
        return bytes;
    }

private:
    BufferMemory memory_;
    std::vector<Arena> arenas_;
};

}}} // namespace joinable::v0::detail
