// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <nccl.h>

/// @file
/// NCCL's memory and its registration. They are newer than everything else used here: ncclMemAlloc
/// and ncclCommRegister came with NCCL 2.19, ncclCommWindowRegister with 2.27. Template arguments
/// delay their lookup to the calls, so that this compiles with older headers.

namespace joinable { inline namespace v0 { namespace detail {

/// NCCL_WIN_COLL_SYMMETRIC, which older headers lack: in each collective, all ranks use the same
/// offset from the start of their windows.
inline constexpr int symmetric_window = 0x01;
/// NCCL_WIN_REQUIRED_ALIGNMENT: the alignment of a window's start, in bytes.
inline constexpr std::size_t window_alignment = 4096;

/// A place for a pointer that NCCL writes, of a type that older headers do not name.
struct NcclPointerSlot {
    void** place;
    template <class T>
    operator T**() const noexcept { // NOLINT(google-explicit-constructor)
        return reinterpret_cast<T**>(place);
    }
};
struct NcclPointer {
    void* pointer;
    template <class T>
    operator T*() const noexcept { // NOLINT(google-explicit-constructor)
        return static_cast<T*>(pointer);
    }
};

template <class Data>
concept nccl_allocates = requires(Data** data, std::size_t bytes) { ncclMemAlloc(data, bytes); };
template <class Handle>
concept nccl_has_windows =
    requires(Handle comm, void* data, std::size_t bytes, NcclPointerSlot made) {
        ncclCommWindowRegister(comm, data, bytes, made, symmetric_window);
    };
template <class Handle>
concept nccl_registers =
    requires(Handle comm, void* data, std::size_t bytes, NcclPointerSlot made) {
        ncclCommRegister(comm, data, bytes, made);
    };

template <class Handle>
inline constexpr bool nccl_can_register = nccl_has_windows<Handle> || nccl_registers<Handle>;

/// Allocates memory of the current device. `Data` is void.
template <class Data>
[[nodiscard]] ncclResult_t
nccl_allocate([[maybe_unused]] Data** data, [[maybe_unused]] std::size_t bytes) {
    if constexpr (nccl_allocates<Data>) {
        return ncclMemAlloc(data, bytes);
    } else {
        return ncclInvalidUsage;
    }
}
template <class Data>
void nccl_free([[maybe_unused]] Data* data) noexcept {
    if constexpr (nccl_allocates<Data>) {
        static_cast<void>(ncclMemFree(data));
    }
}

/// Registers memory that NCCL has allocated, as a window if the header has windows. Collective.
/// With a non-blocking communicator, the result is at `made` once NCCL reports success; `made` must
/// stay in place. The result is null if this system does not support registration.
template <class Handle>
[[nodiscard]] ncclResult_t nccl_register(
    [[maybe_unused]] Handle comm,
    [[maybe_unused]] void* data,
    [[maybe_unused]] std::size_t bytes,
    [[maybe_unused]] void** made
) {
    if constexpr (nccl_has_windows<Handle>) {
        return ncclCommWindowRegister(comm, data, bytes, NcclPointerSlot{made}, symmetric_window);
    } else if constexpr (nccl_registers<Handle>) {
        return ncclCommRegister(comm, data, bytes, NcclPointerSlot{made});
    } else {
        return ncclInvalidUsage;
    }
}
/// Local: NCCL removes its own rank's mappings without asking other ranks. Nothing may use the
/// memory any more. `made` is not null.
template <class Handle>
void nccl_deregister([[maybe_unused]] Handle comm, [[maybe_unused]] void* made) noexcept {
    if constexpr (nccl_has_windows<Handle>) {
        static_cast<void>(ncclCommWindowDeregister(comm, NcclPointer{made}));
    } else if constexpr (nccl_registers<Handle>) {
        static_cast<void>(ncclCommDeregister(comm, NcclPointer{made}));
    }
}

}}} // namespace joinable::v0::detail
