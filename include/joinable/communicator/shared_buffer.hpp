// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
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

struct SharedHandle;

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

/// One rank's handle to elements that all ranks see. shared_buffer() makes it; the elements start
/// as zeros. Like a view, a const handle gives access to mutable elements. The elements live until
/// the last handle is destroyed (memory of a device: until the one that made it is), even after ranks and communicators have ended. It models Tensor.
///
/// Each rank that passes it as the output of a collective writes the result when its own part
/// completes. Pass it on one rank only, or call barrier() before anything else is written there.
///
/// The ranks must order concurrent writes themselves, with std::atomic_ref. A write before a
/// barrier() is visible to the other ranks after it.
template <class T>
class SharedBuffer {
public:
    using value_type = T;

    SharedBuffer() = default; ///< no elements
    /// For shared_buffer(), and for memory of a device. @pre `memory` is there, with room for `count` elements
    SharedBuffer(Arena memory, std::size_t count, DeviceId device = {}) noexcept
        : memory_{std::move(memory)}, count_{count}, device_{device} {
        detail::check_shared_element<T>();
    }
    SharedBuffer(SharedBuffer&& other) noexcept
        : memory_{std::move(other.memory_)}, count_{std::exchange(other.count_, 0)},
          device_{other.device_} {}
    SharedBuffer& operator=(SharedBuffer&& other) noexcept {
        memory_ = std::move(other.memory_);
        count_ = std::exchange(other.count_, 0);
        device_ = other.device_;
        return *this;
    }
    ~SharedBuffer() = default;

    /// With <joinable/shared_memory.hpp>: a value by which other processes of this machine open the
    /// same elements. Local. From the first call on, this process has a thread that gives them access,
    /// until this buffer is destroyed or the process ends. So call it after run_processes(), which refuses a process with
    /// other threads. Afterwards those that have opened the elements keep them, and nobody else can. One thread at a time calls it.
    /// @throws ContractViolation   the elements are in the heap of this process, as those of thread ranks and
    ///                             of a single rank are, or there are none.
    /// @throws CommunicationError  the system refuses a socket or a thread.
    template <class Handle = SharedHandle>
    [[nodiscard]] auto handle() const { // deduced, so that its sentence is the first error
        static_assert(
            requires { sizeof(Handle); },
            "SharedBuffer: include <joinable/shared_memory.hpp> for handle() and open()"
        );
        if constexpr (requires { sizeof(Handle); }) {
            return Handle::of(memory_, count_, sizeof(T));
        }
    }
    /// With <joinable/shared_memory.hpp>, or a CudaSharedHandle of <joinable/cuda.hpp>: the elements of a handle.
    /// Local; waits at most for `patience`. The buffer on which handle() was called must live meanwhile, not
    /// afterwards; that of a CudaSharedHandle must outlive all that were opened, and CUDA takes what time it takes.
    /// @throws ContractViolation   the handle is empty, or of elements of another size.
    /// @throws CommunicationError  that buffer no longer exists, is in another network namespace (as that of
    ///                             another container), belongs to another user, does not answer, or was
    ///                             made with another secret; or the system refuses the memory.
    template <class Handle>
    [[nodiscard]] static SharedBuffer
    open(Handle const& handle, std::chrono::nanoseconds patience = std::chrono::seconds{10}) {
        if (handle.count() == 0 || handle.element_bytes() != sizeof(T)) {
            throw ContractViolation{
                handle.count() == 0
                    ? "SharedBuffer::open(): the handle is empty; give one that handle() has made"
                    : detail::concat(
                          "SharedBuffer::open(): expected a handle of elements of ",
                          sizeof(T),
                          " bytes, but its elements have ",
                          handle.element_bytes(),
                          ": open it with the element type with which the buffer was made"
                      )
            };
        }
        Arena memory = handle.open(sizeof(T), patience);
        DeviceId const device = Handle::device_of(memory);
        return {std::move(memory), handle.count(), device};
    }

    [[nodiscard]] T* data() const noexcept { return reinterpret_cast<T*>(memory_.data()); }
    [[nodiscard]] std::size_t size() const noexcept { return count_; }
    /// Where the elements are. The host reads and writes only its own.
    [[nodiscard]] DeviceId device() const noexcept { return device_; }
    [[nodiscard]] T* begin() const noexcept { return data(); }
    [[nodiscard]] T* end() const noexcept { return data() + count_; }
    /// @pre i < size()
    [[nodiscard]] T& operator[](std::size_t i) const noexcept { return data()[i]; }

private:
    Arena memory_;
    std::size_t count_ = 0;
    DeviceId device_;
};

template <Element U>
struct tensor_traits<SharedBuffer<U>> {
    using value_type = U;
    static U* data(SharedBuffer<U> const& t) noexcept { return t.data(); }
    static std::array<std::size_t, 1> extents(SharedBuffer<U> const& t) noexcept {
        return {{t.size()}};
    }
    static DeviceId device(SharedBuffer<U> const& t) noexcept { return t.device(); }
};

/// Makes `count` zeroed elements that all ranks of `comm` share. Collective; blocks. `count` is the
/// same on every rank. It replaces shared tensors of torch.multiprocessing. For memory that exists
/// before and after the ranks, use shared_buffer(count).
/// @throws Mismatch            ranks give different counts; on all of them.
/// @throws CommunicationError, std::bad_alloc  the memory cannot be allocated; on all ranks.
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
