// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

/// @file
/// Memory that the host's code cannot reach: a device's. Its pages have no permission; what a thread touches in
/// DeviceCode is opened by the fault, until that ends. Anywhere else the touch ends the program with a sentence.
/// A touch is missed while a kernel uses the same allocation, and between cudaFreeAsync and when the stream frees.

namespace joinable_tests::fake_cuda {

class DeviceCode;

/// Whether there is such memory: not for the thread sanitizer, which would take the lock that opens and closes for an
/// order of kernels.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool guards_memory = false;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool guards_memory = false;
#else
inline constexpr bool guards_memory = true;
#endif
#else
inline constexpr bool guards_memory = true;
#endif

/// From now on only a device's code reaches these pages, which are the memory's alone.
void guard(std::byte* data, std::size_t bytes, int device);
/// Anybody does again, if that was said of the memory.
void unguard(std::byte* data);

/// The calling thread runs code of the host while this lives, in a device's order.
class HostCode {
public:
    HostCode() noexcept;
    HostCode(HostCode const&) = delete;
    HostCode& operator=(HostCode const&) = delete;
    ~HostCode();

private:
    DeviceCode* outer_;
};

} // namespace joinable_tests::fake_cuda
