// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <type_traits>
#include <utility>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
consteval void check_shared_element() {
    static_assert(
        std::is_trivially_copyable_v<T>,
        "shared_buffer: processes share bytes, so the elements must be trivially copyable: "
        "numbers, or structures of them, but no containers and no strings"
    );
}

template <class T>
[[nodiscard]] std::size_t bytes_of_elements(std::size_t count) {
    if (count > (std::numeric_limits<std::size_t>::max)() / sizeof(T)) {
        throw ContractViolation{
            concat("a shared buffer of ", count, " elements of ", sizeof(T), " bytes: too many")
        };
    }
    return count * sizeof(T);
}

} // namespace detail

/// The handle of one rank to elements that all ranks see: made by shared_buffer(), zero at first.
/// A const handle gives access to elements that are not const, as a view does. The elements live until
/// the last handle is destroyed, also after ranks and communicators have ended. It models Tensor. Each rank that gives it as the output
/// of a collective writes the result, at its own time: give it on one rank, or meet at a barrier()
/// before anything else is written there.
///
/// What ranks write at the same time is theirs to order, by std::atomic_ref; what a rank wrote
/// before a barrier() the others see behind it.
template <class T>
class SharedBuffer {
public:
    using value_type = T;

    SharedBuffer() = default; ///< no elements
    /// For shared_buffer(). @pre `memory` has room for `count` elements
    SharedBuffer(Arena memory, std::size_t count) noexcept
        : memory_{std::move(memory)}, count_{count} {
        detail::check_shared_element<T>();
    }
    SharedBuffer(SharedBuffer&& other) noexcept
        : memory_{std::move(other.memory_)}, count_{std::exchange(other.count_, 0)} {}
    SharedBuffer& operator=(SharedBuffer&& other) noexcept {
        memory_ = std::move(other.memory_);
        count_ = std::exchange(other.count_, 0);
        return *this;
    }
    ~SharedBuffer() = default;

    [[nodiscard]] T* data() const noexcept { return reinterpret_cast<T*>(memory_.data()); }
    [[nodiscard]] std::size_t size() const noexcept { return count_; }
    [[nodiscard]] T* begin() const noexcept { return data(); }
    [[nodiscard]] T* end() const noexcept { return data() + count_; }
    /// @pre i < size()
    [[nodiscard]] T& operator[](std::size_t i) const noexcept { return data()[i]; }

private:
    Arena memory_;
    std::size_t count_ = 0;
};

template <Element U>
struct tensor_traits<SharedBuffer<U>> {
    using value_type = U;
    static U* data(SharedBuffer<U> const& t) noexcept { return t.data(); }
    static std::array<std::size_t, 1> extents(SharedBuffer<U> const& t) noexcept {
        return {{t.size()}};
    }
};

/// Makes `count` elements that all ranks of `comm` share, all of them zero. Collective, blocks; the
/// same count on every rank. What torch.multiprocessing's shared tensors are for; memory that is
/// there before the ranks are, and after, is shared_buffer(count).
/// @throws Mismatch            ranks give different counts; on all of them.
/// @throws CommunicationError, std::bad_alloc  there is no such memory; on all ranks.
template <class T, Communicator Comm>
[[nodiscard]] SharedBuffer<T> shared_buffer(Comm& comm, std::size_t count) {
    detail::check_shared_element<T>();
    static_assert(
        SharesMemory<Comm>,
        "shared_buffer: this communicator has no member 'Arena share(std::size_t bytes)'; add it, "
        "or use one that models SharesMemory: its ranks must be on one machine"
    );
    return {comm.share(detail::bytes_of_elements<T>(count)), count};
}

}} // namespace joinable::v0
