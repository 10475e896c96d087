// SPDX-License-Identifier: BSL-1.0
#pragma once

// Names the differences between compilers and systems. All other text is the same for every set of
// flags, but for a few headers of one system or compiler, which tests/layers.py lists.

#if __cplusplus < 202002L
#error "joinable needs C++20: compile with -std=c++20"
#include <joinable needs C++20> // does not exist, so that no error follows
#endif
#if !defined(__cpp_exceptions)
#error "joinable reports failures by exceptions: compile without -fno-exceptions"
#include <joinable needs exceptions> // nor does this
#endif

#include <cstdint>

#define JOINABLE_VERSION_MAJOR 0
#define JOINABLE_VERSION_MINOR 2
#define JOINABLE_VERSION_PATCH 0

namespace joinable { inline namespace v0 {

/// The version of this library. Ranks compare it when they enter a guard together, and where they
/// connect by TCP or by a name.
inline constexpr std::uint32_t library_version =
    JOINABLE_VERSION_MAJOR * 10'000 + JOINABLE_VERSION_MINOR * 100 + JOINABLE_VERSION_PATCH;

}} // namespace joinable::v0

// Definitions of heavy functions. In a header-only program they are inline functions. With
// JOINABLE_SEPARATE_COMPILATION the headers only declare them, and the one source file that
// includes <joinable/src.hpp> compiles them. impl/X.ipp has those that X.hpp declares.
// The same holds for members of templates for the types in JOINABLE_INSTANTIATE.
#if !defined(JOINABLE_SEPARATE_COMPILATION)
#define JOINABLE_HAS_DEFINITIONS 1
#define JOINABLE_DEFINITION inline
#define JOINABLE_INSTANTIATE(...)
#elif defined(JOINABLE_SOURCE)
#define JOINABLE_HAS_DEFINITIONS 1
#define JOINABLE_DEFINITION
#define JOINABLE_INSTANTIATE(...) template __VA_ARGS__;
#else
#define JOINABLE_HAS_DEFINITIONS 0
#define JOINABLE_INSTANTIATE(...) extern template __VA_ARGS__;
#endif
// A program that mixes both modes does not link: the symbol is thread-local in one file and not in
// the other, which linkers refuse. The symbol has no size, and the section that refers to it is not
// loaded.
#if defined(__ELF__) && !defined(__CUDACC__)
#define JOINABLE_MODE                                                                              \
    "joinable.v0.needs_JOINABLE_SEPARATE_COMPILATION_in_all_files_and_src_hpp_in_one_or_in_none"
#define JOINABLE_MODE_OF(section, binding, type)                                                   \
    asm(".pushsection " section "\n" binding " " JOINABLE_MODE "\n.hidden " JOINABLE_MODE          \
        "\n.type " JOINABLE_MODE "," type "\n" JOINABLE_MODE ":\n.popsection");
#if !defined(JOINABLE_SEPARATE_COMPILATION)
JOINABLE_MODE_OF(".tbss,\"awT\",@nobits", ".weak", "@tls_object")
#elif defined(JOINABLE_SOURCE)
JOINABLE_MODE_OF(".rodata", ".globl", "@object")
#else
asm(".pushsection .joinable,\"\",@progbits\n.dc.a " JOINABLE_MODE "\n.popsection");
#if defined(__x86_64__) // the first reference in the code, so the first undefined one; clang 14 drops it
asm(".pushsection .text\n.reloc ., BFD_RELOC_NONE, " JOINABLE_MODE "\n.popsection");
#endif
#endif
#endif

// Attributes of functions with a loop over elements. They make the loop as fast in a program built
// with -O2 for every processor as in one built with -O3 for this processor. Clang vectorises loops
// at -O2; GCC does so on request.
#if defined(__clang__)
#define JOINABLE_LOOP_OPTIONS
#define JOINABLE_AVX512 "f16c,avx512f,avx512bw,avx512dq,avx512vl"
#else
#if defined(__x86_64__)
#define JOINABLE_LOOP_OPTIONS gnu::optimize("O3", "align-loops=32"),
#else // nothing is fused, which JOINABLE_ROUNDED_PRODUCT relies on
#define JOINABLE_LOOP_OPTIONS gnu::optimize("O3", "align-loops=32", "fp-contract=off"),
#endif
#define JOINABLE_AVX512 "f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
// For loops of at most 16 turns over an array that should stay in registers. nvcc does not know the
// pragma, but gives it to its host compiler.
#if defined(__CUDACC__)
#define JOINABLE_UNROLL                                                                            \
    _Pragma("nv_diagnostic push") _Pragma("nv_diag_suppress 1675") _Pragma("GCC unroll 16")        \
        _Pragma("nv_diagnostic pop")
#else
#define JOINABLE_UNROLL _Pragma("GCC unroll 16")
#endif
// Before a loop whose turns are independent, though what they read and write may be the same memory.
#if defined(__clang__)
#if __has_feature(undefined_behavior_sanitizer) // whose checks leave no loop to vectorise, of which clang would warn
#define JOINABLE_INDEPENDENT
#else
#define JOINABLE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#endif
#elif defined(__CUDACC__)
#define JOINABLE_INDEPENDENT                                                                       \
    _Pragma("nv_diagnostic push") _Pragma("nv_diag_suppress 1675") _Pragma("GCC ivdep")            \
        _Pragma("nv_diagnostic pop")
#else
#define JOINABLE_INDEPENDENT _Pragma("GCC ivdep")
#endif
// For kernels that wait for memory: with at most 32 registers a thread, a multiprocessor holds as
// many threads as it can. Compilers before CUDA 12.4 take what they like.
#if defined(__maxnreg__)
#define JOINABLE_FEW_REGISTERS __maxnreg__(32)
#else
#define JOINABLE_FEW_REGISTERS
#endif
// A number that all threads of a warp have. From sm_80 on the compiler then knows so, and keeps what
// follows from it once for all of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define JOINABLE_OF_WARP(number) __reduce_max_sync(~0U, number)
#else
#define JOINABLE_OF_WARP(number) (number)
#endif
// Functions that kernels call, too.
#if defined(__CUDACC__)
#define JOINABLE_HOST_DEVICE __host__ __device__
#else
#define JOINABLE_HOST_DEVICE
#endif
// A rounded product of numbers or registers. Compilers may fuse other products with the following
// sum. Clang follows the pragma unless -ffp-contract=fast is given. On a GPU there is an
// instruction for it.
#if defined(__CUDA_ARCH__)
namespace joinable { inline namespace v0 { namespace detail {
template <class Register, class Factor>
Register rounded_product(Register const& a, Factor const& b) {
    return a * b; // of the host, which compiles no code here
}
__host__ __device__ inline float rounded_product(float a, float b) {
    return __fmul_rn(a, b);
}
__host__ __device__ inline double rounded_product(double a, double b) {
    return __dmul_rn(a, b);
}
}}} // namespace joinable::v0::detail
#define JOINABLE_ROUNDED_PRODUCT(result, a, b) result = ::joinable::detail::rounded_product(a, b)
#elif defined(__clang__)
#define JOINABLE_ROUNDED_PRODUCT(result, a, b)                                                     \
    do {                                                                                           \
        _Pragma("clang fp contract(off)") result = (a) * (b);                                      \
    } while (false)
#elif defined(__x86_64__)
#define JOINABLE_ROUNDED_PRODUCT(result, a, b)                                                     \
    do {                                                                                           \
        result = (a) * (b);                                                                        \
        asm("" : "+v"(result));                                                                    \
    } while (false)
#else
#define JOINABLE_ROUNDED_PRODUCT(result, a, b) result = (a) * (b)
#endif
#if defined(__x86_64__)
#define JOINABLE_LOOP [[JOINABLE_LOOP_OPTIONS gnu::noinline]]
#define JOINABLE_LOOP_AVX2 [[ JOINABLE_LOOP_OPTIONS gnu::noinline, gnu::target("avx2,f16c") ]]
#define JOINABLE_LOOP_AVX512 [[ JOINABLE_LOOP_OPTIONS gnu::noinline, gnu::target(JOINABLE_AVX512) ]]
#define JOINABLE_INLINE_AVX2 [[gnu::target("avx2,f16c"), gnu::always_inline]] inline
#else
#define JOINABLE_INLINE_AVX2 [[gnu::always_inline]] inline
#define JOINABLE_LOOP [[JOINABLE_LOOP_OPTIONS gnu::noinline]]
#define JOINABLE_LOOP_AVX2 JOINABLE_LOOP
#define JOINABLE_LOOP_AVX512 JOINABLE_LOOP
#endif

namespace joinable { inline namespace v0 { namespace detail {

/// The instruction sets for which loops over elements exist. Every processor has the first one.
enum class InstructionSet : std::uint8_t { baseline, avx2, avx512 };

/// The instruction set of this processor. Costs a load and a test.
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

/// Eight numbers of f16 and of f32.
using EightHalves [[gnu::vector_size(16)]] = short;
using EightFloats [[gnu::vector_size(32)]] = float;

// Conversions of eight numbers at once, on processors with an instruction for them: all with AVX2.
// <immintrin.h> calls these builtins, but is too large to include.
#if defined(__x86_64__)
inline constexpr bool has_half_conversions = true;
inline constexpr bool has_streaming_stores = true; ///< movntdq and sfence
JOINABLE_INLINE_AVX2 void widen(EightHalves const& from, EightFloats& to) noexcept {
    to = __builtin_ia32_vcvtph2ps256(from);
}
JOINABLE_INLINE_AVX2 void narrow(EightFloats const& from, EightHalves& to) noexcept {
    to = __builtin_ia32_vcvtps2ph256(from, 0); // to nearest, ties to even
}
#else
inline constexpr bool has_half_conversions = false;
inline constexpr bool has_streaming_stores = false;
inline void widen(EightHalves const&, EightFloats&) noexcept {}
inline void narrow(EightFloats const&, EightHalves&) noexcept {}
#endif

/// Whether the thread sanitizer runs a thread of its own in this program.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool has_thread_sanitizer = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool has_thread_sanitizer = true;
#else
inline constexpr bool has_thread_sanitizer = false;
#endif
#else
inline constexpr bool has_thread_sanitizer = false;
#endif

/// Tells the core that this is a spin loop, so that the sibling thread gets the resources.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}}} // namespace joinable::v0::detail
