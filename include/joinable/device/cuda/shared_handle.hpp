// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include <cuda_runtime_api.h>

#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

/// Names the elements of a SharedBuffer in memory of a CUDA device for other processes of this machine, as
/// SharedHandle does for host memory: `buffer.handle<CudaSharedHandle>()` makes it, and
/// `SharedBuffer<T>::open(handle)` opens it, on the current device of the thread. The memory is an arena that
/// CudaDevice::allocate() has made:
///
///     SharedBuffer<float> weights{device.allocate(count * sizeof(float), 256), count, device.id()};
///
/// A plain value of eleven numbers that models Tensor, as in `broadcast(comm, handle, 0)`. A process that has it may read and
/// write the elements, and other allocations in the same 2 MiB: CUDA asks for no secret and no user.
///
/// The buffer on which handle() was called must outlive all that were opened: CUDA calls it undefined to free
/// memory that another process still has open. Wait for the device (`cudaDeviceSynchronize()`) before an opened
/// buffer ends, as its destructor waits for a busy device a second at most; then a barrier orders their ends.
struct CudaSharedHandle {
    /// CUDA's handle of the allocation, where in it the elements begin, their number, and the bytes of one. Zeros: no
    /// handle.
    std::array<std::uint64_t, 11> words{};

    [[nodiscard]] std::size_t count() const noexcept { return static_cast<std::size_t>(words[9]); }
    [[nodiscard]] std::uint64_t element_bytes() const noexcept { return words[10]; }

    /// For SharedBuffer. Local.
    /// @throws ContractViolation   CudaDevice::allocate() has not made the memory, or another process has.
    /// @throws CommunicationError  CUDA refuses.
    [[nodiscard]] static CudaSharedHandle
    of(Arena const& memory, std::size_t count, std::size_t element_bytes) {
        auto const* const block = detail::CudaBlock::of(memory);
        if (block == nullptr || block->free != &cudaFree) {
            throw ContractViolation{
                count == 0
                    ? "SharedBuffer::handle(): the buffer has no elements, which no process can open"
                : block == nullptr || block->free != &close
                    ? "SharedBuffer::handle(): the elements are not of CudaDevice::allocate(); a handle of "
                      "host memory is SharedHandle"
                    : "SharedBuffer::handle(): another process has made the memory; take that one's handle"
            };
        }
        detail::CurrentCudaDevice const current{block->device};
        cudaIpcMemHandle_t of_allocation{};
        detail::require_cuda(
            cudaIpcGetMemHandle(&of_allocation, block->data), "cudaIpcGetMemHandle"
        );
        static_assert(sizeof of_allocation == 8 * sizeof(std::uint64_t));
        CudaSharedHandle handle;
        std::memcpy(handle.words.data(), &of_allocation, sizeof of_allocation);
        handle.words[8] =
            static_cast<std::uint64_t>(memory.data() - static_cast<std::byte const*>(block->data));
        handle.words[9] = count;
        handle.words[10] = element_bytes;
        return handle;
    }
    /// For SharedBuffer and share_parameters(): opens it `on` a device; the host stands for the current one. Local; CUDA
    /// waits for no other process. @pre the handle names elements of `element_bytes`
    [[nodiscard]] Arena
    open(std::size_t element_bytes, std::chrono::nanoseconds, DeviceId on = {}) const {
        int device = on.index;
        if (on.kind != DeviceKind::cuda) {
            detail::require_cuda(cudaGetDevice(&device), "cudaGetDevice");
        }
        detail::CurrentCudaDevice const current{device};
        cudaIpcMemHandle_t of_allocation{};
        std::memcpy(&of_allocation, words.data(), sizeof of_allocation);
        auto block = std::make_unique<detail::CudaBlock>(
            detail::CudaBlock{nullptr, device, std::chrono::minutes{5}, &close}
        );
        detail::require_cuda(
            cudaIpcOpenMemHandle(&block->data, of_allocation, cudaIpcMemLazyEnablePeerAccess),
            "cudaIpcOpenMemHandle, which opens memory of another process that has not freed it,"
        );
        std::byte* const data = static_cast<std::byte*>(block->data) + words[8];
        return {data, count() * element_bytes, &detail::CudaBlock::release, block.release()};
    }
    /// For SharedBuffer: where an arena of open() is.
    [[nodiscard]] static DeviceId device_of(Arena const& opened) noexcept {
        return {DeviceKind::cuda, detail::CudaBlock::of(opened)->device};
    }

private:
    /// Closing does not wait for work that uses the memory, as freeing does.
    static cudaError_t close(void* data) {
        detail::wait_for_cuda_device();
        return cudaIpcCloseMemHandle(data);
    }
};

template <>
struct tensor_traits<CudaSharedHandle> {
    using value_type = std::uint64_t;
    static std::uint64_t* data(CudaSharedHandle& handle) noexcept { return handle.words.data(); }
    static std::uint64_t const* data(CudaSharedHandle const& handle) noexcept {
        return handle.words.data();
    }
    static std::array<std::size_t, 1> extents(CudaSharedHandle const& handle) noexcept {
        return {{handle.words.size()}};
    }
};

}} // namespace joinable::v0
