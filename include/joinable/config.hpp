// SPDX-License-Identifier: BSL-1.0
#pragma once

// The only header with conditional compilation: what differs between compilers and systems is
// named here once, everything else is the same text for every flag set.

#include <cstdint>

#define JOINABLE_VERSION_MAJOR 0
#define JOINABLE_VERSION_MINOR 1
#define JOINABLE_VERSION_PATCH 0

namespace joinable::inline v0 {

/// The version of this library; ranks compare it when they enter a guard together.
inline constexpr std::uint32_t library_version =
    JOINABLE_VERSION_MAJOR * 10'000 + JOINABLE_VERSION_MINOR * 100 + JOINABLE_VERSION_PATCH;

} // namespace joinable::inline v0

// How a function with a loop over elements is compiled, so that it is as fast in a program built
// with -O2 for every processor as in one built with -O3 for this one. Clang vectorises loops at -O2;
// GCC does so where it is asked to.
#if defined(__clang__)
#define JOINABLE_LOOP_OPTIONS
#define JOINABLE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl"
#else
#define JOINABLE_LOOP_OPTIONS gnu::optimize("O3"),
#define JOINABLE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
#if defined(__x86_64__)
#define JOINABLE_LOOP [[JOINABLE_LOOP_OPTIONS gnu::noinline]]
#define JOINABLE_LOOP_AVX2 [[ JOINABLE_LOOP_OPTIONS gnu::noinline, gnu::target("avx2") ]]
#define JOINABLE_LOOP_AVX512 [[ JOINABLE_LOOP_OPTIONS gnu::noinline, gnu::target(JOINABLE_AVX512) ]]
#else
#define JOINABLE_LOOP [[JOINABLE_LOOP_OPTIONS gnu::noinline]]
#define JOINABLE_LOOP_AVX2 JOINABLE_LOOP
#define JOINABLE_LOOP_AVX512 JOINABLE_LOOP
#endif

namespace joinable::inline v0::detail {

/// The instruction sets for which loops over elements exist, from the one that every processor has.
enum class InstructionSet : std::uint8_t { baseline, avx2, avx512 };

/// What this processor has. Costs a load and a test.
inline InstructionSet instruction_set() noexcept {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
        __builtin_cpu_supports("avx512vl") != 0) {
        return InstructionSet::avx512;
    }
    if (__builtin_cpu_supports("avx2") != 0) {
        return InstructionSet::avx2;
    }
#endif
    return InstructionSet::baseline;
}

/// Tells the core that this is a spinning loop, so that its sibling thread gets the resources.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace joinable::inline v0::detail
