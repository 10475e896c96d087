// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable as one header, for projects that copy one file. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <variant>
#include <vector>

// ---- joinable/config.hpp

// The only header with conditional compilation. It names the differences between compilers and
// systems; all other text is the same for every set of flags.

#if __cplusplus < 202002L
#error "joinable needs C++20: compile with -std=c++20"
#include <joinable needs C++20> // does not exist, so that no error follows
#endif
#if !defined(__cpp_exceptions)
#error "joinable reports failures by exceptions: compile without -fno-exceptions"
#include <joinable needs exceptions> // nor does this
#endif

#define JOINABLE_VERSION_MAJOR 0
#define JOINABLE_VERSION_MINOR 1
#define JOINABLE_VERSION_PATCH 0

namespace joinable { inline namespace v0 {

/// The version of this library. Ranks compare it when they enter a guard together.
inline constexpr std::uint32_t library_version =
    JOINABLE_VERSION_MAJOR * 10'000 + JOINABLE_VERSION_MINOR * 100 + JOINABLE_VERSION_PATCH;

}} // namespace joinable::v0

// Definitions of heavy functions. In a header-only program they are inline functions. With
// JOINABLE_SEPARATE_COMPILATION the headers only declare them, and the one source file that
// includes <joinable/src.hpp> compiles them. They are in X.ipp beside the X.hpp that declares them.
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
#define JOINABLE_LOOP_OPTIONS gnu::optimize("O3"),
#else // nothing is fused, which JOINABLE_ROUNDED_PRODUCT relies on
#define JOINABLE_LOOP_OPTIONS gnu::optimize("O3", "fp-contract=off"),
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

// ---- joinable/fwd.hpp

/// @file
/// Declarations of everything that other code may specialise or name before its definition.
///
/// Customization points. Class templates whose primary is undefined or a default:
/// | template               | adapts                                       | header                 |
/// |------------------------|----------------------------------------------|------------------------|
/// | `tensor_traits<T>`     | an engine's tensor                           | tensor/traits.hpp      |
/// | `parameter_traits<P>`  | an engine's parameter (a value and gradient) | tensor/parameter.hpp   |
/// | `hook_order<Hook>`     | where a hook of another library runs         | hook/ordering.hpp      |
///
/// Optional const members of a participant, and static members of a keyword:
/// | member                 | meaning                                      | header                 |
/// |------------------------|----------------------------------------------|------------------------|
/// | `join_name()`          | the name in guards and error texts           | join/joinable.hpp      |
/// | `agree_on(list)`       | what ranks compare when they enter a guard   | join/joinable.hpp      |
/// | `K::agree_on(list, v)` | how ranks compare values of a keyword        | hook/keywords.hpp      |
/// | `K::per_rank`          | ranks do not compare values of a keyword     | hook/keywords.hpp      |

namespace joinable { inline namespace v0 {

enum class DType : std::uint8_t;
struct Buffer;
struct ConstBuffer;
class Shape;
class AnyView;
template <class T>
class StridedView;

template <class T>
struct tensor_traits;
template <class P>
struct parameter_traits;
template <class Hook>
struct hook_order;

enum class ReduceOp : std::uint8_t;

class NcclCollectives;

class AgreementList;

class JoinState;
class Round;
class PendingRound;
struct RoundNotice;
struct JoinResult;

}} // namespace joinable::v0

// ---- joinable/error.hpp

namespace joinable { inline namespace v0 {

/// The kind of a failure, as it is sent between ranks. See `throw_failure` for the matching
/// exceptions.
enum class FailureKind : std::uint8_t { peer_failed, timed_out, mismatch, communication, contract };

/// The reason of an abort. The first reason wins, and every rank throws it.
struct AbortReason {
    FailureKind kind = FailureKind::communication;
    std::vector<int> ranks; ///< ascending: the ranks that failed, did not arrive or differ
    std::string message;
    /// -1: `ranks` are ranks of the aborted communicator. Otherwise they are ranks of a larger
    /// communicator that runs on it, and this is the rank there that passed the reason on. See
    /// HierarchicalCommunicator.
    int origin = -1;
    bool has_left = false; ///< `ranks` have destroyed their communicator, and did not fail
};

/// The base of all failures that a correct program can meet.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The caller violated a documented precondition; the call moved no data.
class ContractViolation : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

/// The transport failed, and the communicator is aborted; or a file operation failed (see
/// Checkpoint), and it is not.
class CommunicationError : public Error {
public:
    using Error::Error;
};

/// A failure with culprits: one class per `FailureKind`, so that handlers can distinguish them.
template <FailureKind>
class FailureOfRanks : public Error {
public:
    FailureOfRanks(std::vector<int> ranks, std::string const& message)
        : Error{message}, ranks_{std::move(ranks)} {}

    /// The culprits, ascending. Empty only if the communicator does not know them.
    [[nodiscard]] std::vector<int> const& ranks() const noexcept { return ranks_; }

private:
    std::vector<int> ranks_;
};

/// Another rank threw, died or left. `rank()` is the lowest such rank.
class PeerFailed : public FailureOfRanks<FailureKind::peer_failed> {
public:
    using FailureOfRanks::FailureOfRanks;
    [[nodiscard]] int rank() const noexcept { return ranks().empty() ? -1 : ranks().front(); }
};

/// Some ranks did not arrive before the deadline: `missing()`, if the communicator knows them.
class TimedOut : public FailureOfRanks<FailureKind::timed_out> {
public:
    using FailureOfRanks::FailureOfRanks;
    [[nodiscard]] std::vector<int> const& missing() const noexcept { return ranks(); }
};

/// Ranks do different things where all must do the same. `ranks()` are the ranks that differ from
/// the lowest rank. No data was moved.
class Mismatch : public FailureOfRanks<FailureKind::mismatch> {
public:
    using FailureOfRanks::FailureOfRanks;
};

/// Some ranks ran out of inputs under `EndPolicy::throw_early`. The communicator stays usable.
class EarlyTermination : public Error {
public:
    EarlyTermination(std::vector<int> ranks, std::string const& message)
        : Error{message}, ranks_{std::move(ranks)} {}

    /// The ranks that ran out, ascending.
    [[nodiscard]] std::vector<int> const& ranks() const noexcept { return ranks_; }

private:
    std::vector<int> ranks_;
};

namespace detail {
/// The culprits as ranks of the aborted communicator. Empty if the reason has ranks of a larger one.
[[nodiscard]] inline std::vector<int> own_ranks(AbortReason const& reason) {
    return reason.origin < 0 ? reason.ranks : std::vector<int>{};
}
} // namespace detail

/// Throws the exception for `reason`: the same type and text on every rank.
[[noreturn]] inline void throw_failure(AbortReason const& reason) {
    switch (reason.kind) {
    case FailureKind::peer_failed: throw PeerFailed{detail::own_ranks(reason), reason.message};
    case FailureKind::timed_out: throw TimedOut{detail::own_ranks(reason), reason.message};
    case FailureKind::mismatch: throw Mismatch{detail::own_ranks(reason), reason.message};
    case FailureKind::contract: throw ContractViolation{reason.message};
    case FailureKind::communication: break;
    }
    throw CommunicationError{reason.message};
}

}} // namespace joinable::v0

// ---- joinable/tensor/dtype.hpp

namespace joinable { inline namespace v0 {

/// The element types that communicators move and reduce.
enum class DType : std::uint8_t { f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64 };

namespace detail {

inline constexpr std::string_view dtype_names[] = {
    "f16", "bf16", "f32", "f64", "i8", "u8", "i32", "u32", "i64", "u64"
};

} // namespace detail

/// The number of DTypes. Their values are [0, dtype_count).
inline constexpr std::size_t dtype_count = std::size(detail::dtype_names);

[[nodiscard]] constexpr bool is_floating_point(DType dtype) noexcept {
    switch (dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64: return true;
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64: break;
    }
    return false;
}
/// Whether elements have 16 bits (Half or BFloat16). Arithmetic on them uses float.
[[nodiscard]] constexpr bool is_half_precision(DType dtype) noexcept {
    return dtype == DType::f16 || dtype == DType::bf16;
}

/// IEEE 754 binary16 as storage. It has no arithmetic of its own: reductions convert to float.
/// Conversion from float rounds to nearest, ties to even.
struct Half {
    std::uint16_t bits = 0;

    Half() = default;
    explicit constexpr Half(float value) noexcept;
    explicit constexpr operator float() const noexcept;
    friend constexpr bool operator==(Half, Half) = default; ///< compares bits, not numbers
};

/// The upper half of a float (8 exponent bits, 7 mantissa bits) as storage, like `Half`.
struct BFloat16 {
    std::uint16_t bits = 0;

    BFloat16() = default;
    explicit constexpr BFloat16(float value) noexcept;
    explicit constexpr operator float() const noexcept;
    friend constexpr bool operator==(BFloat16, BFloat16) = default; ///< compares bits
};

namespace detail {

template <class T>
inline constexpr bool is_integer_of =
    std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, wchar_t> &&
    !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t> &&
    (sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8);

template <class T>
concept has_dtype = std::same_as<T, Half> || std::same_as<T, BFloat16> || std::same_as<T, float> ||
                    std::same_as<T, double> || is_integer_of<T>;

template <class T>
consteval DType find_dtype() {
    if constexpr (std::same_as<T, Half>) {
        return DType::f16;
    } else if constexpr (std::same_as<T, BFloat16>) {
        return DType::bf16;
    } else if constexpr (std::same_as<T, float>) {
        return DType::f32;
    } else if constexpr (std::same_as<T, double>) {
        return DType::f64;
    } else if constexpr (sizeof(T) == 1) {
        return std::is_signed_v<T> ? DType::i8 : DType::u8;
    } else if constexpr (sizeof(T) == 4) {
        return std::is_signed_v<T> ? DType::i32 : DType::u32;
    } else {
        return std::is_signed_v<T> ? DType::i64 : DType::u64;
    }
}

} // namespace detail

/// A type that has a `DType`. It is not const.
///
/// | expression    | result  | meaning                                                             |
/// |---------------|---------|---------------------------------------------------------------------|
/// | `dtype_of<T>` | `DType` | by kind and size: `long` and `long long` share one                  |
///
/// Models: float, double, Half, BFloat16, and the integers of 1, 4 and 8 bytes, except bool and
/// wide characters. Use unsigned char for masks that are communicated (buffers, broadcasts): a sum
/// of bools would not be a bool.
template <class T>
concept Element = detail::has_dtype<T>;

/// The `DType` of an element type.
template <Element T>
inline constexpr DType dtype_of = detail::find_dtype<T>();

/// The size of one element in bytes.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
    switch (dtype) {
    case DType::i8:
    case DType::u8: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64: break;
    }
    return 8;
}

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view name_of(DType dtype) noexcept {
    return detail::dtype_names[static_cast<std::size_t>(dtype)];
}

/// Calls `function(std::type_identity<T>{})` with the storage type of `dtype`. This is the only
/// place where a run-time dtype becomes a type.
template <class F>
constexpr decltype(auto) visit_dtype(DType dtype, F&& function) {
    switch (dtype) {
    case DType::f16: return function(std::type_identity<Half>{});
    case DType::bf16: return function(std::type_identity<BFloat16>{});
    case DType::f32: return function(std::type_identity<float>{});
    case DType::f64: return function(std::type_identity<double>{});
    case DType::i8: return function(std::type_identity<std::int8_t>{});
    case DType::u8: return function(std::type_identity<std::uint8_t>{});
    case DType::i32: return function(std::type_identity<std::int32_t>{});
    case DType::u32: return function(std::type_identity<std::uint32_t>{});
    case DType::i64: return function(std::type_identity<std::int64_t>{});
    case DType::u64: break;
    }
    return function(std::type_identity<std::uint64_t>{});
}

constexpr Half::Half(float value) noexcept {
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const sign = static_cast<std::uint16_t>((word >> 16) & 0x8000U);
    std::uint32_t const magnitude = word & 0x7fff'ffffU;
    if (magnitude > 0x7f80'0000U) { // NaN stays NaN, quiet
        bits = static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
    } else if (magnitude >= 0x477f'f000U) { // rounds to infinity
        bits = static_cast<std::uint16_t>(sign | 0x7c00U);
    } else if (magnitude >= 0x3880'0000U) { // normal: rebias the exponent from 127 to 15
        std::uint32_t const rounded = magnitude - 0x3800'0000U + 0xfffU + ((magnitude >> 13) & 1U);
        bits = static_cast<std::uint16_t>(sign | (rounded >> 13));
    } else if (magnitude < 0x3300'0000U) { // below half of the smallest subnormal
        bits = sign;
    } else { // subnormal: shift the significand, round to nearest even
        std::uint32_t const shift = 126U - (magnitude >> 23);
        std::uint32_t const significand = (magnitude & 0x7f'ffffU) | 0x80'0000U;
        std::uint32_t const kept = significand >> shift;
        std::uint32_t const rest = significand & ((1U << shift) - 1U);
        std::uint32_t const half = 1U << (shift - 1U);
        bool const up = rest > half || (rest == half && (kept & 1U) != 0);
        bits = static_cast<std::uint16_t>(sign | (kept + (up ? 1U : 0U)));
    }
}

constexpr Half::operator float() const noexcept {
    std::uint32_t const sign = (static_cast<std::uint32_t>(bits) & 0x8000U) << 16;
    std::uint32_t const exponent = (bits >> 10) & 0x1fU;
    std::uint32_t const mantissa = bits & 0x3ffU;
    if (exponent == 0) { // zero or subnormal: mantissa times 2^-24
        float const magnitude = static_cast<float>(mantissa) * 0x1p-24F;
        return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
    }
    std::uint32_t const wide = exponent == 0x1fU ? 0xffU : exponent + 112U;
    return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

constexpr BFloat16::BFloat16(float value) noexcept {
    auto const word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fff'ffffU) > 0x7f80'0000U) { // NaN stays NaN, quiet
        bits = static_cast<std::uint16_t>((word >> 16) | 0x40U);
    } else {
        bits = static_cast<std::uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
    }
}

constexpr BFloat16::operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

}} // namespace joinable::v0

// ---- joinable/tensor/buffer.hpp

namespace joinable { inline namespace v0 {

/// Contiguous memory that a communicator reads and writes. Does not own it.
struct Buffer {
    void* data = nullptr;
    std::size_t count = 0; ///< in elements
    DType dtype = DType::f32;

    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

/// Contiguous memory that a communicator only reads. Does not own it.
struct ConstBuffer {
    void const* data = nullptr;
    std::size_t count = 0; ///< in elements
    DType dtype = DType::f32;

    constexpr ConstBuffer() = default;
    constexpr ConstBuffer(void const* address, std::size_t elements, DType type) noexcept
        : data{address}, count{elements}, dtype{type} {}
    // NOLINTNEXTLINE(google-explicit-constructor): reading writable memory is always safe
    constexpr ConstBuffer(Buffer buffer) noexcept
        : data{buffer.data}, count{buffer.count}, dtype{buffer.dtype} {}

    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

}} // namespace joinable::v0

// ---- joinable/tensor/reduce_op.hpp

namespace joinable { inline namespace v0 {

/// How a reduction combines two elements. Sums and products of integers wrap around. Bitwise
/// operations are for integers only.
enum class ReduceOp : std::uint8_t { sum, product, min, max, bit_and, bit_or };

namespace detail {

inline constexpr std::string_view reduce_op_names[] = {
    "sum", "product", "min", "max", "bit_and", "bit_or"
};

} // namespace detail

/// The number of ReduceOps. Their values are [0, reduce_op_count).
inline constexpr std::size_t reduce_op_count = std::size(detail::reduce_op_names);

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view name_of(ReduceOp op) noexcept {
    return detail::reduce_op_names[static_cast<std::size_t>(op)];
}

}} // namespace joinable::v0

// ---- joinable/detail/text.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The result of a call that names something: a text that outlives the call. One that is returned by
/// value, such as a std::string, would die before its view is read.
template <class Text>
concept lasting_text = std::convertible_to<Text, std::string_view> &&
                       (std::is_lvalue_reference_v<Text> || std::is_pointer_v<Text> ||
                        std::ranges::enable_borrowed_range<Text>);

inline std::string to_text(std::string_view piece) {
    return std::string{piece};
}

template <std::integral Number>
std::string to_text(Number number) {
    return std::to_string(number);
}

/// With a point, whatever the locale: so many significant digits, or digits after the point if it is
/// fixed.
inline std::string number_text(double number, std::chars_format format, int digits) {
    std::array<char, 400> text{}; // the largest number has 309 digits
    auto const end =
        std::to_chars(text.data(), text.data() + text.size(), number, format, digits).ptr;
    return {text.data(), end};
}

/// Six significant digits in the shortest form: "0.5", "300", "1e-07".
inline std::string to_text(double number) {
    return number_text(number, std::chars_format::general, 6);
}

/// "3", "3 and 5", "1, 3 and 5": the form of ranks and indices in error texts.
template <class Number>
std::string to_text(std::vector<Number> const& numbers) {
    std::string text;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (i != 0) {
            text += i + 1 == numbers.size() ? " and " : ", ";
        }
        text += to_text(numbers[i]);
    }
    return text;
}

/// At least three significant digits, for people: "12.3", "4711".
inline std::string rounded_text(double number) {
    return number < 99.95 ? number_text(number, std::chars_format::general, 3)
                          : number_text(number, std::chars_format::fixed, 0);
}

/// A piece of a text and the function that appends it. concat() is instantiated for very many lists
/// of types, so the code of each instance must be small.
struct TextPiece {
    void const* piece;
    void (*append)(std::string& text, void const* piece);
};

template <class Piece>
TextPiece text_piece(Piece const& piece) noexcept {
    return {&piece, [](std::string& text, void const* from) {
                text += to_text(*static_cast<Piece const*>(from));
            }};
}
inline TextPiece text_piece(char const* piece) noexcept { // also for literals of any length
    return {piece, [](std::string& text, void const* from) {
                text += static_cast<char const*>(from);
            }};
}

inline std::string concat_pieces(std::initializer_list<TextPiece> pieces) {
    std::string text;
    for (TextPiece const& piece : pieces) {
        piece.append(text, piece.piece);
    }
    return text;
}

/// Joins strings, numbers and lists of numbers into one error text.
template <class... Pieces>
std::string concat(Pieces const&... pieces) {
    return concat_pieces({text_piece(pieces)...});
}

/// "rank 3" or "ranks 1, 3 and 5".
inline std::string ranks_text(std::vector<int> const& ranks) {
    return concat(ranks.size() == 1 ? "rank " : "ranks ", ranks);
}

}}} // namespace joinable::v0::detail

// ---- joinable/tensor/shape.hpp

namespace joinable { inline namespace v0 {

/// The maximum number of dimensions of a tensor.
inline constexpr std::size_t max_tensor_rank = 8;

/// The extents or the strides of a tensor: a list of at most `max_tensor_rank` numbers that never
/// allocates. A scalar has none.
class Shape {
public:
    constexpr Shape() = default;
    constexpr Shape(std::initializer_list<std::size_t> values)
        : Shape{std::span<std::size_t const>{values.begin(), values.size()}} {}

    /// @throws ContractViolation  more than `max_tensor_rank` values.
    explicit constexpr Shape(std::span<std::size_t const> values) {
        for (std::size_t const value : values) {
            push_back(value);
        }
    }

    constexpr void push_back(std::size_t value) {
        if (rank_ == max_tensor_rank) {
            throw ContractViolation{
                detail::concat("a tensor has at most ", max_tensor_rank, " dimensions")
            };
        }
        values_[rank_++] = value;
    }

    [[nodiscard]] constexpr std::size_t size() const noexcept { return rank_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return rank_ == 0; }
    constexpr std::size_t& operator[](std::size_t i) noexcept { return values_[i]; }
    constexpr std::size_t operator[](std::size_t i) const noexcept { return values_[i]; }
    [[nodiscard]] constexpr std::size_t const* begin() const noexcept { return values_.data(); }
    [[nodiscard]] constexpr std::size_t const* end() const noexcept {
        return values_.data() + rank_;
    }
    [[nodiscard]] constexpr std::size_t const* data() const noexcept { return values_.data(); }

    friend constexpr bool operator==(Shape const& a, Shape const& b) noexcept {
        for (std::size_t i = 0; i < a.rank_ && a.rank_ == b.rank_; ++i) {
            if (a.values_[i] != b.values_[i]) {
                return false;
            }
        }
        return a.rank_ == b.rank_;
    }

private:
    std::array<std::size_t, max_tensor_rank> values_{};
    std::size_t rank_ = 0;
};

/// The number of elements: the product of the extents, 1 for a scalar.
/// @throws ContractViolation  the product does not fit in std::size_t.
[[nodiscard]] constexpr std::size_t numel(Shape const& extents) {
    std::size_t product = 1;
    bool overflow = false;
    for (std::size_t const extent : extents) {
        if (extent == 0) {
            return 0;
        }
        overflow = overflow || product > (std::numeric_limits<std::size_t>::max)() / extent;
        product *= extent;
    }
    if (overflow) {
        throw ContractViolation{"the product of a tensor's extents does not fit in std::size_t"};
    }
    return product;
}

/// The strides, in elements, of a dense tensor whose last dimension varies fastest.
[[nodiscard]] constexpr Shape row_major_strides(Shape const& extents) {
    Shape strides = extents;
    std::size_t stride = 1;
    for (std::size_t i = extents.size(); i-- > 0;) {
        strides[i] = stride;
        stride *= extents[i];
    }
    return strides;
}

namespace detail {

/// The same numbers in reverse order.
[[nodiscard]] constexpr Shape reversed(Shape const& shape) {
    Shape other;
    for (std::size_t i = shape.size(); i-- > 0;) {
        other.push_back(shape[i]);
    }
    return other;
}

} // namespace detail

/// The strides, in elements, of a dense tensor whose first dimension varies fastest.
[[nodiscard]] constexpr Shape column_major_strides(Shape const& extents) {
    return detail::reversed(row_major_strides(detail::reversed(extents)));
}

/// Whether elements lie one after another in row-major order. Strides of dimensions of extent 1 do
/// not matter. A tensor without elements is contiguous.
[[nodiscard]] constexpr bool is_contiguous(Shape const& extents, Shape const& strides) {
    if (extents.size() != strides.size()) {
        return false;
    }
    std::size_t stride = 1;
    bool contiguous = true;
    for (std::size_t i = extents.size(); i-- > 0;) {
        if (extents[i] == 0) {
            return true;
        }
        contiguous = contiguous && (extents[i] == 1 || strides[i] == stride);
        stride *= extents[i];
    }
    return contiguous;
}

namespace detail {

/// "(2, 3)": how error texts show extents and strides.
[[nodiscard]] inline std::string to_text(Shape const& shape) {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    return text + ")";
}

/// The size of the largest possible object, in bytes. Larger counts and steps are errors.
inline constexpr std::size_t max_bytes = (std::numeric_limits<std::size_t>::max)() / 2;

/// Throws ContractViolation for a number that was negative before conversion to std::size_t. It is
/// larger than any possible size of memory.
constexpr void check_not_negative(char const* what, std::size_t dimension, std::size_t value) {
    if (value > max_bytes) {
        throw ContractViolation{
            to_text(what) + " of dimension " + to_text(dimension) + " is -" +
            to_text(std::size_t{0} - value) +
            ", but must not be negative; start at the other end, or copy the tensor"
        };
    }
}

/// The number of elements of memory that a view spans: 1 + the largest offset. An empty view spans
/// 0, whatever its strides.
/// @throws ContractViolation  extents and strides differ in number, one of them is negative, or the
///                            view has more elements or spans more bytes than memory can have.
constexpr std::size_t
checked_reach(Shape const& extents, Shape const& strides, std::size_t element_bytes) {
    if (extents.size() != strides.size()) {
        throw ContractViolation{
            "a view needs one stride per extent, but got " + to_text(extents.size()) +
            " extents and " + to_text(strides.size()) + " strides"
        };
    }
    for (std::size_t d = 0; d < extents.size(); ++d) {
        check_not_negative("the extent", d, extents[d]);
    }
    std::size_t const count = numel(extents);
    if (count == 0) {
        return 0;
    }
    std::size_t const limit = max_bytes / element_bytes;
    std::size_t last = 0;
    bool fits = count <= max_bytes; // elements may share memory, but iterators count them
    for (std::size_t d = 0; d < extents.size(); ++d) {
        check_not_negative("the stride", d, strides[d]);
        std::size_t const steps = extents[d] - 1;
        fits = fits && (steps == 0 || strides[d] <= (limit - 1 - last) / steps);
        last += fits ? steps * strides[d] : 0;
    }
    if (!fits) {
        throw ContractViolation{
            "a view of extents " + to_text(extents) + " and strides " + to_text(strides) +
            " reaches further than memory can; make extents or strides smaller"
        };
    }
    return last + 1;
}

/// @throws ContractViolation  the view spans more than these bytes.
constexpr void check_storage(
    Shape const& extents, Shape const& strides, std::size_t element_bytes, std::size_t storage_bytes
) {
    std::size_t const bytes = checked_reach(extents, strides, element_bytes) * element_bytes;
    if (bytes > storage_bytes) {
        throw ContractViolation{
            "a tensor of extents " + to_text(extents) + " and strides " + to_text(strides) +
            " spans " + to_text(bytes) + " bytes, but its memory has " + to_text(storage_bytes) +
            "; strides are in elements of " + to_text(element_bytes) + " bytes, not in bytes"
        };
    }
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/tensor/traits.hpp

namespace joinable { inline namespace v0 {

/// The kind of a device.
enum class DeviceKind : std::uint8_t { host, cuda };

/// One device: the host, or an accelerator by its index.
struct DeviceId {
    DeviceKind kind = DeviceKind::host;
    int index = 0;

    friend constexpr bool operator==(DeviceId, DeviceId) = default;
};

/// Adapts a tensor type. Specialise it for the engine's own type, `T` without const or reference.
/// In the specialisation, write `::` before a class `Tensor`, `Parameter`, `Buffer` or `Shape` of
/// the global namespace, because this namespace has classes of these names.
///
/// Types of Eigen, Armadillo and xtensor, and std::mdspan, need no specialisation: include
/// interop/eigen.hpp, armadillo.hpp, xtensor.hpp or mdspan.hpp.
///
/// Traits of a base class do not apply to derived classes (such as `arma::Col` from `arma::Mat`).
/// One constrained specialisation adapts a whole family; the specialisations in this header still
/// take precedence:
/// ```cpp
/// template <class T>
///     requires std::derived_from<T, Base>
/// struct joinable::tensor_traits<T> { ... };
/// ```
///
/// | member                                           | required                                 |
/// |--------------------------------------------------|------------------------------------------|
/// | `using value_type = U;`                          | one of the two: the dtype is static ...  |
/// | `static DType dtype(T const& t);`                | ... or known at run time                 |
/// | `static U* data(T& t);`                          | to be written (`void*` with run-time     |
/// |                                                  | dtype); of a const tensor if T is a view |
/// | `static U const* data(T const& t);`              | to be read                               |
/// | `static auto extents(T const& t);`               | a range of integers, at most 8           |
/// | `static auto strides(T const& t);`               | optional, in elements; else dense        |
/// | `static std::size_t storage_bytes(T const& t);`  | optional: the bytes from data(t) to the  |
/// |                                                  | end of its memory, which extents and     |
/// |                                                  | strides may not exceed                   |
/// | `static DeviceId device(T const& t);`            | optional; else the host                  |
/// | `static constexpr bool is_column_major = true;`  | optional: the first dimension varies     |
/// |                                                  | fastest; else the last one does          |
/// | `static constexpr bool is_expression = true;`    | instead of all others: T has no memory,  |
/// |                                                  | and an error text says so                |
template <class T>
struct tensor_traits; // primary undefined: a type without a specialisation is no tensor

template <Element U, class Allocator>
struct tensor_traits<std::vector<U, Allocator>> {
    using value_type = U;
    static U* data(std::vector<U, Allocator>& t) noexcept { return t.data(); }
    static U const* data(std::vector<U, Allocator> const& t) noexcept { return t.data(); }
    static std::array<std::size_t, 1> extents(std::vector<U, Allocator> const& t) noexcept {
        return {{t.size()}};
    }
};

template <Element U, std::size_t N>
struct tensor_traits<std::array<U, N>> {
    using value_type = U;
    static constexpr U* data(std::array<U, N>& t) noexcept { return t.data(); }
    static constexpr U const* data(std::array<U, N> const& t) noexcept { return t.data(); }
    static constexpr std::array<std::size_t, 1> extents(std::array<U, N> const&) noexcept {
        return {{N}};
    }
};

template <class U, std::size_t Extent>
    requires Element<std::remove_const_t<U>>
struct tensor_traits<std::span<U, Extent>> {
    using value_type = std::remove_const_t<U>;
    static constexpr U* data(std::span<U, Extent> const& t) noexcept { return t.data(); }
    static constexpr std::array<std::size_t, 1> extents(std::span<U, Extent> const& t) noexcept {
        return {{t.size()}};
    }
};

}} // namespace joinable::v0

// ---- joinable/tensor/tensor.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
using traits_of = tensor_traits<std::remove_cvref_t<T>>;

template <class T>
using lvalue_of = std::add_lvalue_reference_t<std::remove_reference_t<T>>;

template <class T>
concept has_tensor_traits = requires { sizeof(traits_of<T>); };

template <class T>
concept has_static_dtype =
    requires { typename traits_of<T>::value_type; } && Element<typename traits_of<T>::value_type>;

template <class T>
concept has_run_time_dtype = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::dtype(t) } -> std::same_as<DType>;
};

template <class Range>
concept range_of_integers = requires(Range const& range) {
    std::begin(range);
    std::end(range);
    requires std::integral<std::remove_cvref_t<decltype(*std::begin(range))>>;
};

template <class T>
concept has_extents = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::extents(t) } -> range_of_integers;
};

template <class T>
concept has_strides = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::strides(t) } -> range_of_integers;
};

template <class T>
concept has_storage_bytes = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::storage_bytes(t) } -> std::same_as<std::size_t>;
};

template <class T>
concept has_device = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::device(t) } -> std::same_as<DeviceId>;
};

/// Whether a member of traits does not take these arguments. One whose constraint is not satisfied
/// takes them, though it cannot be called, and is no mistake.
template <class Member, class... Arguments>
concept takes_others = !std::is_invocable_v<Member, Arguments...>;

// An optional member of another signature would be ignored.
template <class T>
concept has_other_dtype =
    !has_run_time_dtype<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::dtype(t);
    } || requires {
        requires takes_others<decltype(&traits_of<T>::dtype), std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_strides =
    !has_strides<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::strides(t);
    } || requires {
        requires takes_others<decltype(&traits_of<T>::strides), std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_storage_bytes =
    !has_storage_bytes<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::storage_bytes(t);
    } || requires {
        requires takes_others<
            decltype(&traits_of<T>::storage_bytes),
            std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_device =
    !has_device<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::device(t);
    } || requires {
        requires takes_others<decltype(&traits_of<T>::device), std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_is_column_major = requires { &traits_of<T>::is_column_major; } && !requires {
    requires std::same_as<decltype(traits_of<T>::is_column_major), bool const>;
    typename std::bool_constant<traits_of<T>::is_column_major>;
};

/// The traits of a view take a const tensor whatever its elements are. The traits of a container
/// take it as it is. Passing the lvalue as given covers both.
template <class T>
concept has_data = requires(lvalue_of<T> t) {
    { traits_of<T>::data(t) } -> std::convertible_to<void const*>;
};

template <class T>
concept has_writable_data = requires(lvalue_of<T> t) {
    { traits_of<T>::data(t) } -> std::convertible_to<void*>;
};

template <class T>
concept is_column_major = requires { requires traits_of<T>::is_column_major; };

template <class T>
concept is_expression = requires { requires traits_of<T>::is_expression; };

template <class Range>
Shape shape_of(Range const& range) {
    Shape shape;
    for (auto const value : range) {
        if constexpr (std::signed_integral<std::remove_cvref_t<decltype(value)>>) {
            if (value < 0) {
                throw ContractViolation{concat(
                    "an extent or a stride of a tensor is ", value, ", but must not be negative"
                )};
            }
        }
        shape.push_back(static_cast<std::size_t>(value));
    }
    return shape;
}

} // namespace detail

/// A tensor that can be read: `tensor_traits` describes it.
///
/// `t` is an lvalue of `T`, with its constness; `traits` is `tensor_traits<T>`.
/// | expression                                | result              | meaning                                  |
/// |-------------------------------------------|---------------------|------------------------------------------|
/// | `traits`                                  | complete            | how the type is adapted                  |
/// | `traits::value_type` or `traits::dtype(t)` | Element, or `DType` | the type of the elements                 |
/// | `traits::data(t)`                         | a pointer           | the first element                        |
/// | `traits::extents(t)`                      | a range of integers | one per dimension, at most 8             |
/// | `traits::strides(t)` (optional)           | a range of integers | in elements; dense without it            |
/// | `traits::storage_bytes(t)` (optional)     | `std::size_t`       | memory from data(t) on, for checks       |
/// | `traits::device(t)` (optional)            | `DeviceId`          | where the memory is; the host without it |
/// | `traits::is_column_major` (optional)      | `bool`              | which dimension varies fastest: the first |
/// |                                           |                     | if true, the last without it             |
///
/// Required, but not checkable: the memory stays in place while a collective uses it. Models:
/// std::vector, std::array, std::span, StridedView, AnyView; std::variant of tensors
/// (tensor/variant.hpp).
template <class T>
concept Tensor = detail::has_tensor_traits<T> &&
                 (detail::has_static_dtype<T> || detail::has_run_time_dtype<T>) &&
                 detail::has_data<T> && detail::has_extents<T>;

/// A tensor whose elements can be written.
///
/// `t` is an lvalue of `T`, with its constness.
/// | expression                  | result                 | meaning                             |
/// |-----------------------------|------------------------|-------------------------------------|
/// | `tensor_traits<T>::data(t)` | a pointer to non-const | the first element, to be written to |
///
/// Models: std::vector, std::array, std::span and StridedView of elements that are not const, AnyView.
template <class T>
concept WritableTensor = Tensor<T> && detail::has_writable_data<T>;

namespace detail {

/// A container of bools, or a tensor whose traits say that its elements are bools. It is refused
/// rather than treated as u8, because a sum of bools would not be a bool.
template <class T>
concept has_bool_elements = !Tensor<T> && (requires {
    requires std::same_as<typename std::remove_cvref_t<T>::value_type, bool>;
} || requires { requires std::same_as<typename traits_of<T>::value_type, bool>; });

/// A container whose elements have no DType, such as std::vector<short>.
template <class T>
concept has_other_elements = !has_tensor_traits<T> && requires {
    typename std::remove_cvref_t<T>::value_type;
    requires !Element<typename std::remove_cvref_t<T>::value_type>;
};

} // namespace detail

/// Explains in one sentence why a type is not a Tensor: `static_assert(models_tensor<My>());`.
template <class T>
consteval bool models_tensor() {
    static_assert(
        !detail::has_bool_elements<T>,
        "Tensor: bool has no DType, and std::vector<bool> no contiguous elements; use unsigned char"
    );
    static_assert(
        !detail::has_other_elements<T>,
        "Tensor: the elements have no DType; use float, double, Half, BFloat16 or an integer of 1, 4 or 8 "
        "bytes"
    );
    constexpr bool is_number = std::is_arithmetic_v<std::remove_cvref_t<T>>;
    static_assert(!is_number, "Tensor: a number is no tensor; give std::span{&number, 1}");
    constexpr bool is_pointer = std::is_pointer_v<std::decay_t<T>>; // or an array of C
    static_assert(
        !is_pointer || detail::has_tensor_traits<T>,
        "Tensor: a pointer does not say how many elements it points to; give std::span{pointer, count}"
    );
    static_assert(
        detail::has_tensor_traits<T> || detail::has_other_elements<T> || is_number || is_pointer,
        "Tensor: specialise joinable::tensor_traits for this very type (one for its base class does not "
        "count; see tensor/traits.hpp)"
    );
    static_assert(
        !detail::is_expression<T>,
        "Tensor: this is an expression without memory of its own; assign it to a matrix or an array, "
        "and give that"
    );
    if constexpr (detail::has_tensor_traits<T> && !detail::is_expression<T>) {
        static_assert(
            !detail::has_other_dtype<T>,
            "Tensor: tensor_traits::dtype must be 'static DType dtype(T const&)', and return a "
            "joinable::DType: translate an enum of the engine there"
        );
        static_assert(
            detail::has_static_dtype<T> || detail::has_run_time_dtype<T> ||
                detail::has_other_dtype<T>,
            "Tensor: tensor_traits needs value_type (an element type that has a DType) or "
            "'static DType dtype(T const&)'"
        );
        static_assert(
            detail::has_data<T>, "Tensor: tensor_traits needs 'static U* data(T&)' for this type"
        );
        static_assert(
            detail::has_extents<T>,
            "Tensor: tensor_traits needs 'static auto extents(T const&)', a range of integers; for one "
            "number n return std::array{n}"
        );
        static_assert(
            !detail::has_other_is_column_major<T>,
            "Tensor: tensor_traits::is_column_major must be 'static constexpr bool is_column_major = true'"
        );
        static_assert(
            !detail::has_other_strides<T>,
            "Tensor: tensor_traits::strides must be 'static auto strides(T const&)' and return a range of "
            "integers"
        );
        static_assert(
            !detail::has_other_storage_bytes<T>,
            "Tensor: tensor_traits::storage_bytes must be 'static std::size_t storage_bytes(T const&)'"
        );
        static_assert(
            !detail::has_other_device<T>,
            "Tensor: tensor_traits::device must be 'static DeviceId device(T const&)'"
        );
    }
    return Tensor<T>;
}

/// Explains in one sentence why a type is not a WritableTensor.
template <class T>
consteval bool models_writable_tensor() {
    if constexpr (models_tensor<T>()) {
        static_assert(
            detail::has_writable_data<T>,
            "Tensor: tensor_traits::data returns a pointer to const elements, but values, gradients "
            "and buffers are written; return one to elements that are not const"
        );
    }
    return WritableTensor<T>;
}

/// The dtype of a tensor.
template <Tensor T>
[[nodiscard]] constexpr DType dtype(T const& tensor) {
    if constexpr (detail::has_static_dtype<T>) {
        return dtype_of<typename detail::traits_of<T>::value_type>;
    } else {
        return detail::traits_of<T>::dtype(tensor);
    }
}

/// The extents of a tensor.
template <Tensor T>
[[nodiscard]] constexpr Shape extents(T const& tensor) {
    return detail::shape_of(detail::traits_of<T>::extents(tensor));
}

/// The strides of a tensor, in elements.
/// @throws ContractViolation  strides and extents differ in number, or a stride is negative.
template <Tensor T>
[[nodiscard]] constexpr Shape strides(T const& tensor) {
    if constexpr (detail::has_strides<T>) {
        Shape const given = detail::shape_of(detail::traits_of<T>::strides(tensor));
        if (std::size_t const rank = joinable::extents(tensor).size(); given.size() != rank) {
            throw ContractViolation{detail::concat(
                "a tensor has ", rank, " extents but ", given.size(), " strides; give one for each"
            )};
        }
        return given;
    } else if constexpr (detail::is_column_major<T>) {
        return column_major_strides(joinable::extents(tensor));
    } else {
        return row_major_strides(joinable::extents(tensor));
    }
}

/// The device that has a tensor's memory.
template <Tensor T>
[[nodiscard]] constexpr DeviceId device(T const& tensor) {
    if constexpr (detail::has_device<T>) {
        return detail::traits_of<T>::device(tensor);
    } else {
        return {};
    }
}

namespace detail {

/// Whether a tensor has this dtype, these extents and this device. Makes no Shape.
template <Tensor T>
[[nodiscard]] constexpr bool
is_like(T const& tensor, DType dtype, Shape const& extents, DeviceId device) {
    if (joinable::dtype(tensor) != dtype || joinable::device(tensor) != device) {
        return false;
    }
    std::size_t dimension = 0;
    for (auto const extent : traits_of<T>::extents(tensor)) {
        if (dimension == extents.size() ||
            static_cast<std::size_t>(extent) != extents[dimension++]) {
            return false;
        }
    }
    return dimension == extents.size();
}

} // namespace detail

/// The number of elements of a tensor.
template <Tensor T>
[[nodiscard]] constexpr std::size_t numel(T const& tensor) {
    return joinable::numel(joinable::extents(tensor));
}

/// Whether a tensor's elements lie one after another in the order of its type: column-major if its
/// traits say so, else row-major.
template <Tensor T>
[[nodiscard]] constexpr bool is_contiguous(T const& tensor) {
    if constexpr (detail::is_column_major<T>) {
        return joinable::is_contiguous(
            detail::reversed(joinable::extents(tensor)), detail::reversed(joinable::strides(tensor))
        );
    } else {
        return joinable::is_contiguous(joinable::extents(tensor), joinable::strides(tensor));
    }
}

/// The memory of a contiguous tensor, for writing. Elements are in the order of the tensor's type,
/// so ranks that exchange them must use tensors of the same order.
/// @throws ContractViolation  the tensor is not contiguous.
template <WritableTensor T>
[[nodiscard]] constexpr Buffer to_buffer(T&& tensor) {
    if (!joinable::is_contiguous(tensor)) {
        throw ContractViolation{
            "a collective needs a contiguous tensor; copy the strided one into a dense one first"
        };
    }
    return {detail::traits_of<T>::data(tensor), joinable::numel(tensor), joinable::dtype(tensor)};
}

/// The memory of a contiguous tensor, for reading. Elements are in the order of the tensor's type.
/// @throws ContractViolation  the tensor is not contiguous.
template <Tensor T>
[[nodiscard]] constexpr ConstBuffer to_const_buffer(T const& tensor) {
    if (!joinable::is_contiguous(tensor)) {
        throw ContractViolation{
            "a collective needs a contiguous tensor; copy the strided one into a dense one first"
        };
    }
    return {detail::traits_of<T>::data(tensor), joinable::numel(tensor), joinable::dtype(tensor)};
}

}} // namespace joinable::v0

// ---- joinable/tensor/strided_view.hpp

namespace joinable { inline namespace v0 {

/// A non-owning tensor of up to `max_tensor_rank` dimensions whose elements need not be contiguous.
/// Cheap to copy. Iterates over all elements in row-major order of their indices.
template <class T>
class StridedView {
public:
    using value_type = std::remove_const_t<T>;

    class iterator {
    public:
        using value_type = std::remove_const_t<T>;
        using difference_type = std::ptrdiff_t;
        using reference = T&;
        using pointer = T*;
        using iterator_category = std::random_access_iterator_tag;

        iterator() = default;
        iterator(StridedView const* view, std::size_t position) noexcept
            : view_{view}, position_{position} {}

        reference operator*() const noexcept { return view_->data_[view_->offset_of(position_)]; }
        pointer operator->() const noexcept { return &**this; }
        reference operator[](difference_type n) const noexcept { return *(*this + n); }
        iterator& operator++() noexcept { return *this += 1; }
        iterator& operator--() noexcept { return *this -= 1; }
        iterator operator++(int) noexcept { return std::exchange(*this, *this + 1); }
        iterator operator--(int) noexcept { return std::exchange(*this, *this - 1); }
        iterator& operator+=(difference_type n) noexcept {
            position_ = static_cast<std::size_t>(static_cast<difference_type>(position_) + n);
            return *this;
        }
        iterator& operator-=(difference_type n) noexcept { return *this += -n; }
        friend iterator operator+(iterator it, difference_type n) noexcept { return it += n; }
        friend iterator operator+(difference_type n, iterator it) noexcept { return it += n; }
        friend iterator operator-(iterator it, difference_type n) noexcept { return it -= n; }
        friend difference_type operator-(iterator const& a, iterator const& b) noexcept {
            return static_cast<difference_type>(a.position_) -
                   static_cast<difference_type>(b.position_);
        }
        friend bool operator==(iterator const& a, iterator const& b) noexcept {
            return a.position_ == b.position_;
        }
        friend auto operator<=>(iterator const& a, iterator const& b) noexcept {
            return a.position_ <=> b.position_;
        }

    private:
        StridedView const* view_ = nullptr; ///< iterators are valid as long as the view object
        std::size_t position_ = 0;
    };

    StridedView() = default;

    /// @throws ContractViolation  extents and strides differ in number, one is negative (a signed
    ///                            number converted to std::size_t), or the view is larger than
    ///                            memory can be.
    StridedView(T* data, Shape const& extents, Shape const& strides)
        : data_{data}, extents_{extents}, strides_{strides} {
        (void)detail::checked_reach(extents, strides, sizeof(T));
        numel_ = joinable::numel(extents);
    }

    /// A view of mutable elements converts to a view of const elements.
    template <class U>
        requires std::same_as<U const, T> && (!std::is_const_v<U>)
    // NOLINTNEXTLINE(google-explicit-constructor)
    StridedView(StridedView<U> const& other)
        : StridedView{other.data(), other.extents(), other.strides()} {}

    [[nodiscard]] T* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t numel() const noexcept { return numel_; }
    [[nodiscard]] std::size_t size() const noexcept { return numel_; }
    [[nodiscard]] Shape const& extents() const noexcept { return extents_; }
    [[nodiscard]] Shape const& strides() const noexcept { return strides_; }
    [[nodiscard]] bool is_contiguous() const { return joinable::is_contiguous(extents_, strides_); }

    /// The element at one index per dimension. @pre every index is below its extent.
    template <std::convertible_to<std::size_t>... Indices>
    T& operator()(Indices... indices) const {
        if (sizeof...(Indices) != extents_.size()) {
            throw ContractViolation{
                "a view of " + detail::to_text(extents_.size()) + " dimensions was given " +
                detail::to_text(sizeof...(Indices)) + " indices"
            };
        }
        std::size_t offset = 0;
        std::size_t dimension = 0;
        ((offset += static_cast<std::size_t>(indices) * strides_[dimension++]), ...);
        return data_[offset];
    }

    [[nodiscard]] iterator begin() const noexcept { return {this, 0}; }
    [[nodiscard]] iterator end() const noexcept { return {this, numel_}; }

private:
    [[nodiscard]] std::size_t offset_of(std::size_t position) const noexcept {
        std::size_t offset = 0;
        for (std::size_t d = extents_.size(); d-- > 0;) {
            offset += position % extents_[d] * strides_[d];
            position /= extents_[d];
        }
        return offset;
    }

    T* data_ = nullptr;
    Shape extents_{0}; ///< a default-constructed view has no elements
    Shape strides_{1};
    std::size_t numel_ = 0;
};

template <class T>
    requires Element<std::remove_const_t<T>>
struct tensor_traits<StridedView<T>> {
    using value_type = std::remove_const_t<T>;
    static T* data(StridedView<T> const& view) noexcept { return view.data(); }
    static Shape const& extents(StridedView<T> const& view) noexcept { return view.extents(); }
    static Shape const& strides(StridedView<T> const& view) noexcept { return view.strides(); }
};

/// Views contiguous storage with any extents and strides, starting at element `offset`. Local.
/// Negative strides are refused: by the compiler in a list of constants, else at run time.
/// @throws ContractViolation  the view would reach beyond the storage; also as StridedView.
template <class Storage>
[[nodiscard]] auto as_strided(
    Storage&& storage,
    std::span<std::size_t const> extents,
    std::span<std::size_t const> strides,
    std::size_t offset = 0
) {
    static_assert(
        std::contiguous_iterator<decltype(std::begin(storage))>,
        "as_strided: the storage must be a contiguous range, such as std::vector or std::span"
    );
    static_assert(
        std::is_lvalue_reference_v<Storage> ||
            std::ranges::enable_borrowed_range<std::remove_cv_t<Storage>>,
        "as_strided: a temporary storage would be destroyed before the view is used; give it a name"
    );
    using T = std::remove_pointer_t<decltype(std::data(storage))>;
    StridedView<T> const whole{std::data(storage), Shape{extents}, Shape{strides}};
    std::size_t const needed = detail::checked_reach(whole.extents(), whole.strides(), sizeof(T));
    std::size_t const given = std::size(storage);
    if (offset > given || needed > given - offset) {
        throw ContractViolation{
            "a strided view needs " + detail::to_text(needed) + " elements from offset " +
            detail::to_text(offset) + " on, but the storage has " + detail::to_text(given) +
            "; make extents, strides or the offset smaller"
        };
    }
    return StridedView<T>{whole.data() + offset, whole.extents(), whole.strides()};
}

template <class Storage>
[[nodiscard]] auto as_strided(
    Storage&& storage,
    std::initializer_list<std::size_t> extents,
    std::initializer_list<std::size_t> strides,
    std::size_t offset = 0
) {
    return as_strided(
        std::forward<Storage>(storage),
        std::span<std::size_t const>{extents.begin(), extents.size()},
        std::span<std::size_t const>{strides.begin(), strides.size()},
        offset
    );
}

/// The part of a view with indices [start, start + length) in one dimension. Local.
/// @throws ContractViolation  the dimension does not exist, or the range is not within it.
template <class T>
[[nodiscard]] StridedView<T>
narrow(StridedView<T> const& view, std::size_t dimension, std::size_t start, std::size_t length) {
    if (dimension >= view.extents().size()) {
        throw ContractViolation{detail::concat(
            "narrow: there is no dimension ", dimension, " in a view of ", view.extents().size()
        )};
    }
    std::size_t const extent = view.extents()[dimension];
    if (start > extent || length > extent - start) {
        throw ContractViolation{
            "narrow: " + detail::to_text(length) + " elements from " + detail::to_text(start) +
            " on are not in dimension " + detail::to_text(dimension) + ", which has " +
            detail::to_text(extent)
        };
    }
    Shape extents = view.extents();
    extents[dimension] = length;
    // An empty view keeps the pointer, which must not leave the storage.
    T* const data = length == 0 ? view.data() : view.data() + start * view.strides()[dimension];
    return {data, extents, view.strides()};
}

}} // namespace joinable::v0

// ---- joinable/tensor/any_view.hpp

namespace joinable { inline namespace v0 {

/// A non-owning writable tensor whose dtype is known at run time. A default-constructed one is
/// empty: it stands for "no tensor".
class AnyView {
public:
    AnyView() = default;

    /// Views any writable tensor.
    template <WritableTensor T>
        requires(!std::same_as<std::remove_cvref_t<T>, AnyView>)
    explicit AnyView(T&& tensor)
        : AnyView{
              detail::traits_of<T>::data(tensor),
              joinable::dtype(tensor),
              joinable::extents(tensor),
              joinable::strides(tensor),
              joinable::device(tensor)
          } {
        if constexpr (detail::has_storage_bytes<T>) {
            detail::check_storage(
                extents_,
                strides_,
                size_of(dtype_),
                detail::traits_of<T>::storage_bytes(std::as_const(tensor))
            );
        }
    }

    /// @throws ContractViolation  extents and strides differ in number, one is negative (a signed
    ///                            number converted to std::size_t), or the view is larger than
    ///                            memory can be.
    AnyView(
        void* data, DType dtype, Shape const& extents, Shape const& strides, DeviceId device = {}
    )
        : data_{data}, extents_{extents}, strides_{strides}, device_{device}, dtype_{dtype},
          is_tensor_{true} {
        (void)detail::checked_reach(extents, strides, size_of(dtype));
    }

    /// Whether there is a tensor, even one without elements.
    explicit operator bool() const noexcept { return is_tensor_; }

    [[nodiscard]] void* data() const noexcept { return data_; }
    [[nodiscard]] DType dtype() const noexcept { return dtype_; }
    [[nodiscard]] Shape const& extents() const noexcept { return extents_; }
    [[nodiscard]] Shape const& strides() const noexcept { return strides_; }
    [[nodiscard]] DeviceId device() const noexcept { return device_; }
    [[nodiscard]] std::size_t numel() const { return joinable::numel(extents_); }
    [[nodiscard]] bool is_contiguous() const { return joinable::is_contiguous(extents_, strides_); }

    /// The same tensor with a static element type.
    /// @throws ContractViolation  the elements are not of type `T`.
    template <Element T>
    [[nodiscard]] StridedView<T> as() const {
        if (dtype_ != dtype_of<T>) {
            throw ContractViolation{
                "a tensor of " + detail::to_text(name_of(dtype_)) +
                " was asked for its elements as " + detail::to_text(name_of(dtype_of<T>))
            };
        }
        return {static_cast<T*>(data_), extents_, strides_};
    }

private:
    void* data_ = nullptr;
    Shape extents_{0}; ///< an empty view has no elements, so it is never read or written
    Shape strides_{1};
    DeviceId device_;
    DType dtype_ = DType::f32;
    bool is_tensor_ = false;
};

namespace detail {

/// "f32 (2, 3)": how error texts name a tensor.
[[nodiscard]] inline std::string to_text(AnyView const& view) {
    return view ? concat(name_of(view.dtype()), " ", to_text(view.extents())) : "missing";
}

/// "the host", or "CUDA device 1".
[[nodiscard]] inline std::string to_text(DeviceId device) {
    return device.kind == DeviceKind::host ? "the host" : concat("CUDA device ", device.index);
}

/// Whether the tensor has memory, or needs none because it has no elements.
[[nodiscard]] inline bool has_memory(AnyView const& view) {
    return view.data() != nullptr || view.numel() == 0;
}

/// A view of any writable tensor. Returns an AnyView unchanged.
template <class T>
[[nodiscard]] AnyView view_of(T&& tensor) {
    if constexpr (std::same_as<std::remove_cvref_t<T>, AnyView>) {
        return tensor;
    } else {
        return AnyView{tensor};
    }
}

/// Whether two tensors have the same number and type of elements, on the same device.
[[nodiscard]] inline bool is_like(AnyView const& a, AnyView const& b) {
    return static_cast<bool>(a) == static_cast<bool>(b) && a.dtype() == b.dtype() &&
           a.extents() == b.extents() && a.device() == b.device();
}

} // namespace detail

template <>
struct tensor_traits<AnyView> {
    static DType dtype(AnyView const& view) noexcept { return view.dtype(); }
    static void* data(AnyView const& view) noexcept { return view.data(); }
    static Shape const& extents(AnyView const& view) noexcept { return view.extents(); }
    static Shape const& strides(AnyView const& view) noexcept { return view.strides(); }
    static DeviceId device(AnyView const& view) noexcept { return view.device(); }
};

}} // namespace joinable::v0

// ---- joinable/tensor/overlap.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// The dimensions of extent above 1, sorted by stride, smallest first.
Shape dimensions_by_stride(Shape const& extents, Shape const& strides);

} // namespace detail

/// Whether a tensor's elements fill its memory without gaps or overlap, in any order of dimensions.
/// A flat buffer can then keep its strides. This is the rule of PyTorch's
/// is_non_overlapping_and_dense.
[[nodiscard]] bool is_non_overlapping_and_dense(Shape const& extents, Shape const& strides);

namespace detail {

/// The strides of a tensor in a flat buffer. A dense tensor keeps its own, so that both are read in
/// the same order; any other tensor becomes row-major.
[[nodiscard]] inline Shape dense_strides(Shape const& extents, Shape const& strides) {
    return is_non_overlapping_and_dense(extents, strides) ? strides : row_major_strides(extents);
}

/// Counts the ways in which `total` is a sum of multiples of strides, each taken less than `count`
/// times. This decides whether two indices name the same memory. It is a bounded Diophantine
/// equation, as in NumPy's solve_may_share_memory, and hard in general. Nested, permuted, sliced
/// and padded layouts take only a few steps, because the largest stride leaves few choices.
class SumsOfStrides {
public:
    /// Adds a stride that may be taken 0 to `count - 1` times. At most 16 strides.
    void add(std::size_t stride, std::size_t count) noexcept;

    /// Merges terms that have the same stride. This keeps the set of possible sums, but not the
    /// number of ways.
    void merge_equal_strides() noexcept;

    /// Whether there are at least `wanted` ways. Also true if the search took too many steps.
    [[nodiscard]] bool has(std::size_t total, int wanted) noexcept;

private:
    struct Term {
        std::size_t stride;
        std::size_t count;
        std::size_t rest;    ///< the largest sum of this term and the later ones
        std::size_t divisor; ///< common to all sums of this term and the later ones
    };
    static constexpr int max_steps = 10'000; ///< about half a millisecond

    void sort() noexcept;

    void search(std::size_t i, std::size_t total) noexcept;

    std::array<Term, 2 * max_tensor_rank> terms_{};
    std::size_t size_ = 0;
    int wanted_ = 0;
    int steps_ = 0;
};

/// Whether each stride exceeds the distance that all smaller ones span. Then no two indices share
/// an element.
bool is_nested(Shape const& extents, Shape const& strides);

bool is_overlapping(Shape const& extents, Shape const& strides);

} // namespace detail

/// Whether two different indices of a tensor may name the same element, as with a stride of 0. Such
/// a tensor can be read, but writing all of its elements has no defined result. Local. The answer
/// is exact, except that a layout that takes more than 10,000 steps to decide counts as
/// overlapping. Layouts from slicing, padding, permuting and broadcasting take a few steps.
/// @throws ContractViolation  extents and strides do not describe a view; see StridedView.
template <Tensor T>
[[nodiscard]] bool is_overlapping(T const& tensor) {
    Shape const shape = joinable::extents(tensor);
    Shape const steps = joinable::strides(tensor);
    (void)detail::checked_reach(shape, steps, size_of(joinable::dtype(tensor)));
    return detail::is_overlapping(shape, steps);
}

/// Whether some element of one tensor may share memory with an element of the other. Local. The
/// tensors may differ in everything. The answer is exact like `is_overlapping` if both have
/// elements of the same size at a multiple of that size; otherwise overlapping address ranges
/// count.
/// @throws ContractViolation  extents and strides do not describe a view; see StridedView.
template <Tensor A, Tensor B>
[[nodiscard]] bool share_memory(A const& a, B const& b) {
    Shape const extents_a = joinable::extents(a);
    Shape const extents_b = joinable::extents(b);
    Shape const strides_a = joinable::strides(a);
    Shape const strides_b = joinable::strides(b);
    std::size_t const size = size_of(joinable::dtype(a));
    std::size_t const size_b = size_of(joinable::dtype(b));
    std::size_t const reach_a = detail::checked_reach(extents_a, strides_a, size);
    std::size_t const reach_b = detail::checked_reach(extents_b, strides_b, size_b);
    void const* const data_a = detail::traits_of<A const>::data(a);
    void const* const data_b = detail::traits_of<B const>::data(b);
    auto const first_a = reinterpret_cast<std::uintptr_t>(data_a);
    auto const first_b = reinterpret_cast<std::uintptr_t>(data_b);
    if (joinable::device(a) != joinable::device(b) || first_a >= first_b + reach_b * size_b ||
        first_b >= first_a + reach_a * size || reach_a == 0 || reach_b == 0) {
        return false;
    }
    // The difference may be negative, modulo 2^64. The reach of b, added below, makes up for it.
    std::size_t const difference = first_b - first_a;
    if (size != size_b || difference % size != 0) {
        return true;
    }
    // Element i of a is element k of b if a's steps up to i and b's steps from k to its last
    // element together equal the distance from a's first element to b's last one.
    detail::SumsOfStrides sums;
    std::size_t total =
        first_b >= first_a ? difference / size : std::size_t{0} - (first_a - first_b) / size;
    for (std::size_t d = 0; d < extents_a.size(); ++d) {
        sums.add(strides_a[d], extents_a[d]);
    }
    for (std::size_t d = 0; d < extents_b.size(); ++d) {
        sums.add(strides_b[d], extents_b[d]);
        total += strides_b[d] * (extents_b[d] - 1);
    }
    sums.merge_equal_strides();
    return sums.has(total, 1);
}

namespace detail {

/// The bytes from a view's first element to its last one.
struct AddressRange {
    std::byte const* begin = nullptr; ///< null: it has no elements
    std::byte const* end = nullptr;
    std::size_t index = 0; ///< of the view

    static AddressRange of(AnyView const& view, std::size_t index);
};

/// The indices of two views that share memory, the smaller one first, if `counts` of their indices
/// is true. Of several such pairs it is the least one. `view_of(index)` returns a view.
/// Complexity: sorts the ranges; compares views whose ranges overlap.
std::optional<std::pair<std::size_t, std::size_t>> find_shared(
    std::vector<AddressRange> ranges,
    std::function<AnyView(std::size_t)> const& view_of,
    std::function<bool(std::size_t, std::size_t)> const& counts
);

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/tensor/overlap.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <numeric>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Shape dimensions_by_stride(Shape const& extents, Shape const& strides) {
    Shape order;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        if (extents[d] > 1) {
            order.push_back(d);
        }
    }
    for (std::size_t i = 1; i < order.size(); ++i) { // insertion sort of at most eight
        for (std::size_t k = i; k > 0 && strides[order[k]] < strides[order[k - 1]]; --k) {
            std::swap(order[k], order[k - 1]);
        }
    }
    return order;
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION bool is_non_overlapping_and_dense(Shape const& extents, Shape const& strides) {
    if (numel(extents) == 0) {
        return true;
    }
    std::size_t expected = 1;
    for (std::size_t const d : detail::dimensions_by_stride(extents, strides)) {
        if (strides[d] != expected) {
            return false;
        }
        expected *= extents[d];
    }
    return true;
}

}} // namespace joinable::v0

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void SumsOfStrides::add(std::size_t stride, std::size_t count) noexcept {
    if (stride != 0 && count > 1) {
        terms_[size_++] = {stride, count, 0, 0};
    }
}

JOINABLE_DEFINITION void SumsOfStrides::merge_equal_strides() noexcept {
    sort();
    std::size_t merged = 0;
    for (std::size_t i = 0; i < size_; ++i) {
        if (merged != 0 && terms_[merged - 1].stride == terms_[i].stride) {
            terms_[merged - 1].count += terms_[i].count - 1;
        } else {
            terms_[merged++] = terms_[i];
        }
    }
    size_ = merged;
}

JOINABLE_DEFINITION bool SumsOfStrides::has(std::size_t total, int wanted) noexcept {
    sort();
    std::size_t rest = 0;
    std::size_t divisor = 0;
    for (std::size_t i = size_; i-- > 0;) {
        rest += terms_[i].stride * (terms_[i].count - 1);
        divisor = std::gcd(divisor, terms_[i].stride);
        terms_[i].rest = rest;
        terms_[i].divisor = divisor;
    }
    wanted_ = wanted;
    steps_ = 0;
    search(0, total);
    return wanted_ <= 0;
}

JOINABLE_DEFINITION void SumsOfStrides::sort() noexcept {
    auto const end = terms_.begin() + static_cast<std::ptrdiff_t>(size_);
    std::sort(terms_.begin(), end, [](Term const& a, Term const& b) {
        return a.stride > b.stride;
    });
}

JOINABLE_DEFINITION void SumsOfStrides::search(std::size_t i, std::size_t total) noexcept {
    if (i == size_) {
        wanted_ -= total == 0 ? 1 : 0;
        return;
    }
    Term const& term = terms_[i];
    if (total > term.rest || total % term.divisor != 0) {
        return;
    }
    std::size_t const later = term.rest - term.stride * (term.count - 1);
    std::size_t const first = total <= later ? 0 : (total - later + term.stride - 1) / term.stride;
    std::size_t const last = (std::min)(term.count - 1, total / term.stride);
    for (std::size_t k = first; k <= last && wanted_ > 0; ++k) {
        if (++steps_ > max_steps) {
            wanted_ = 0;
            return;
        }
        search(i + 1, total - k * term.stride);
    }
}

JOINABLE_DEFINITION bool is_nested(Shape const& extents, Shape const& strides) {
    std::size_t reach = 0;
    for (std::size_t const d : dimensions_by_stride(extents, strides)) {
        if (strides[d] <= reach) {
            return false;
        }
        reach += strides[d] * (extents[d] - 1);
    }
    return true;
}

JOINABLE_DEFINITION bool is_overlapping(Shape const& extents, Shape const& strides) {
    if (numel(extents) < 2 || is_nested(extents, strides)) {
        return false;
    }
    // Two indices name one element if the difference of indices, each in -(extent - 1) to extent -
    // 1, steps to 0 without being 0. Counted from the lowest difference:
    SumsOfStrides sums;
    std::size_t total = 0;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        if (extents[d] > 1 && strides[d] == 0) {
            return true;
        }
        sums.add(strides[d], 2 * extents[d] - 1);
        total += strides[d] * (extents[d] - 1);
    }
    return sums.has(total, 2);
}

JOINABLE_DEFINITION AddressRange AddressRange::of(AnyView const& view, std::size_t index) {
    if (view.data() == nullptr || view.numel() == 0) {
        return {};
    }
    auto const* const begin = static_cast<std::byte const*>(view.data());
    std::size_t const size = size_of(view.dtype());
    return {begin, begin + size * checked_reach(view.extents(), view.strides(), size), index};
}

JOINABLE_DEFINITION std::optional<std::pair<std::size_t, std::size_t>> find_shared(
    std::vector<AddressRange> ranges,
    std::function<AnyView(std::size_t)> const& view_of,
    std::function<bool(std::size_t, std::size_t)> const& counts
) {
    std::sort(ranges.begin(), ranges.end(), [](AddressRange const& a, AddressRange const& b) {
        return std::less<>{}(a.begin, b.begin);
    });
    std::optional<std::pair<std::size_t, std::size_t>> least;
    for (std::size_t a = 0; a < ranges.size(); ++a) { // a range without elements overlaps none
        for (std::size_t b = a + 1;
             b < ranges.size() && std::less<>{}(ranges[b].begin, ranges[a].end);
             ++b) {
            std::size_t const i = (std::min)(ranges[a].index, ranges[b].index);
            std::size_t const k = (std::max)(ranges[a].index, ranges[b].index);
            if ((!least || std::pair{i, k} < *least) && counts(i, k) &&
                share_memory(view_of(i), view_of(k))) {
                least.emplace(i, k);
            }
        }
    }
    return least;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/copy.hpp

namespace joinable { inline namespace v0 {

namespace detail {

bool is_same_view(AnyView const& a, AnyView const& b);

/// Throws ContractViolation unless the elements of `from` can be copied to `to`.
void check_pair(std::string_view what, AnyView const& from, AnyView const& to);

template <class T, class U>
consteval void check_elements() {
    static_assert(
        !std::is_const_v<U>,
        "copy, scale_copy and add: the elements of the target must not be const"
    );
    static_assert(
        std::same_as<std::remove_const_t<T>, std::remove_const_t<U>>,
        "copy, scale_copy and add: source and target must have the same type of elements"
    );
}

/// A read-only view, in the form that the kernels take.
template <class T>
AnyView source_view(StridedView<T> const& view) {
    using U = std::remove_const_t<T>;
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): the kernels do not write to a source
    return {const_cast<U*>(view.data()), dtype_of<U>, view.extents(), view.strides()};
}

} // namespace detail

/// Copies elements between views that may have different strides. Local, on the host; no
/// allocation. Source and target must be the same view or share no element. Only the source may
/// have indices that share elements (a stride of 0 broadcasts).
/// @throws ContractViolation  dtypes, extents or devices do not match, elements of the target share
///                            memory, or the views overlap otherwise; nothing was written.
void copy(AnyView const& from, AnyView const& to);

/// `to = from * factor`, in one pass. f16 and bf16 are computed in float, f32 and f64 in their own
/// type. Integers take only the factor 1. Local, on the host; no allocation. Views as for `copy`.
/// @throws ContractViolation  as `copy`, or an integer would be scaled; nothing was written.
void scale_copy(AnyView const& from, double factor, AnyView const& to);

/// `to += from`, in one pass. f16 and bf16 are computed in float and rounded once; integers wrap.
/// Local, on the host; no allocation. Views as for `copy`; adding a view to itself doubles it.
/// @throws ContractViolation  as `copy`; nothing was written.
void add(AnyView const& from, AnyView const& to);

/// Sets all elements to zero. Does nothing for an empty view. Local, on the host; no allocation.
/// Indices may share elements.
/// @throws ContractViolation  the tensor is not on the host, or is a null pointer.
void fill_zero(AnyView const& to);

/// The same for views with static element types. Views of different elements, targets of const
/// elements and scaled integers do not compile.
template <class T, class U>
void copy(StridedView<T> const& from, StridedView<U> const& to) {
    detail::check_elements<T, U>();
    copy(detail::source_view(from), AnyView{to});
}

template <class T, class U>
void scale_copy(StridedView<T> const& from, double factor, StridedView<U> const& to) {
    detail::check_elements<T, U>();
    static_assert(
        !std::integral<U>, "scale_copy: integers cannot be scaled, only floating-point elements can"
    );
    scale_copy(detail::source_view(from), factor, AnyView{to});
}

template <class T, class U>
void add(StridedView<T> const& from, StridedView<U> const& to) {
    detail::check_elements<T, U>();
    add(detail::source_view(from), AnyView{to});
}

template <class T>
void fill_zero(StridedView<T> const& to) {
    detail::check_elements<T, T>();
    fill_zero(AnyView{to});
}

}} // namespace joinable::v0

// ---- joinable/reduction/arithmetic.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <bit>
#include <concepts>
#include <cstdint>

namespace joinable { inline namespace v0 { namespace detail {

// The functions below are written for vectorisers: they have no branches and compare only signed
// numbers (SSE2 has no other comparison). They are always inlined, so that they are compiled for
// their caller's instruction set.

/// `yes` if the condition holds, else `no`, without a branch into which a compiler could move work.
[[gnu::always_inline]] constexpr std::uint32_t
select(bool condition, std::uint32_t yes, std::uint32_t no) noexcept {
    std::uint32_t const mask = 0U - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

/// Converts between float and a 16-bit format in the low half of a word. The bits are the same as
/// those of BFloat16 and Half.
template <class T>
struct Conversion;

template <>
struct Conversion<BFloat16> {
    [[gnu::always_inline]] static constexpr float widen(std::uint32_t bits) noexcept {
        return std::bit_cast<float>(bits << 16);
    }
    [[gnu::always_inline]] static constexpr std::uint32_t narrow(float value) noexcept {
        auto const word = std::bit_cast<std::uint32_t>(value);
        bool const is_nan = static_cast<std::int32_t>(word & 0x7fff'ffffU) > 0x7f80'0000;
        std::uint32_t const rounded = word + 0x7fffU + ((word >> 16) & 1U);
        return (is_nan ? word | 0x40'0000U : rounded) >> 16;
    }
};

template <>
struct Conversion<Half> {
    [[gnu::always_inline]] static constexpr float widen(std::uint32_t bits) noexcept {
        auto const magnitude = static_cast<std::int32_t>(bits & 0x7fffU);
        std::uint32_t const shifted = static_cast<std::uint32_t>(magnitude) << 13;
        // Zero and subnormals: the mantissa times 2^-24, exactly.
        auto const subnormal =
            std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
        // Others: the exponent is rebiased from 15 to 127; that of infinity and NaN becomes 255.
        std::uint32_t const other =
            shifted + 0x3800'0000U + select(magnitude > 0x7bff, 0x3800'0000U, 0U);
        return std::bit_cast<float>(
            ((bits & 0x8000U) << 16) | select(magnitude < 0x400, subnormal, other)
        );
    }
    [[gnu::always_inline]] static constexpr std::uint32_t narrow(float value) noexcept {
        auto const word = std::bit_cast<std::uint32_t>(value);
        auto const magnitude = static_cast<std::int32_t>(word & 0x7fff'ffffU);
        auto const bits = static_cast<std::uint32_t>(magnitude);
        // Below 2^-14: adding 0.5, whose last place is 2^-24, rounds to a subnormal.
        std::uint32_t const subnormal =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5F) - 0x3f00'0000U;
        std::uint32_t const normal = (bits - 0x3800'0000U + 0xfffU + ((bits >> 13) & 1U)) >> 13;
        std::uint32_t const nan = 0x7e00U | ((bits >> 13) & 0x1ffU);
        std::uint32_t result = select(magnitude < 0x3880'0000, subnormal, normal);
        result = select(magnitude >= 0x477f'f000, 0x7c00U, result); // rounds to infinity
        result = select(magnitude > 0x7f80'0000, nan, result);
        return ((word >> 16) & 0x8000U) | result;
    }
};

template <class T>
concept sixteen_bits = std::same_as<T, Half> || std::same_as<T, BFloat16>;

/// The unsigned integer of a size. Integers are added in it, because it wraps.
template <std::size_t Bytes>
struct unsigned_of_size;
template <>
struct unsigned_of_size<1> {
    using type = std::uint8_t;
};
template <>
struct unsigned_of_size<2> {
    using type = std::uint16_t;
};
template <>
struct unsigned_of_size<4> {
    using type = std::uint32_t;
};
template <>
struct unsigned_of_size<8> {
    using type = std::uint64_t;
};
template <std::size_t Bytes>
using bits_of_size = typename unsigned_of_size<Bytes>::type;

/// Applies an operation to the halves of two words, and returns a word of the two results.
template <class T, class Operation>
[[gnu::always_inline]] inline std::uint32_t
each_half(Operation const& operation, std::uint32_t source, std::uint32_t target) noexcept {
    using C = Conversion<T>;
    float low = C::widen(target & 0xffffU);
    float high = C::widen(target >> 16);
    operation.compute(C::widen(source & 0xffffU), low);
    operation.compute(C::widen(source >> 16), high);
    return C::narrow(low) | (C::narrow(high) << 16);
}

// An operation on elements. `Element` is the type in memory. `Word` is the type of one computation:
// one element, or two of 16 bits (a single one is then in the low half). The call takes a word of
// the source and the word of the target that it replaces. `compute` does the same to widened 16-bit
// numbers, to one or to a register full.

/// target = source * factor
template <class T>
struct Scale {
    using Element = T;
    using Word = T;
    T factor;

    explicit Scale(double number) noexcept : factor{static_cast<T>(number)} {}
    [[gnu::always_inline]] T operator()(T source, T) const noexcept { return source * factor; }
};

template <sixteen_bits T>
struct Scale<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;
    float factor;

    explicit Scale(double number) noexcept : factor{static_cast<float>(number)} {}
    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = source * factor;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word) const noexcept {
        return each_half<T>(*this, source, 0);
    }
};

/// target = target + source
template <class T>
struct Add {
    using Element = T;
    using Word = T;

    [[gnu::always_inline]] T operator()(T source, T target) const noexcept {
        return static_cast<T>(target + source);
    }
};

template <sixteen_bits T>
struct Add<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;

    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = target + source;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word target) const noexcept {
        return each_half<T>(*this, source, target);
    }
};

/// target = source; only the bits matter.
template <class Bits>
struct Assign {
    using Element = Bits;
    using Word = Bits;

    [[gnu::always_inline]] Bits operator()(Bits source, Bits) const noexcept { return source; }
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/rows.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

/// Rows of elements at equal distances, in bytes.
template <class Byte>
struct Rows {
    Byte* data;
    std::size_t step;     ///< from element to element
    std::size_t next = 0; ///< from row to row
};

/// Memory is read and written as bytes, so no engine's element type can alias.
template <class T>
[[gnu::always_inline]] inline T load(std::byte const* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}
template <class T>
[[gnu::always_inline]] inline void store(std::byte* to, T value) noexcept {
    std::memcpy(to, &value, sizeof(T));
}

/// Writes a register past the caches, to a multiple of 16 bytes, if the processor can. Other
/// threads see the data after `finish_streams()`.
using Bytes16 [[gnu::vector_size(16)]] = unsigned char;
template <class Register>
[[gnu::always_inline]] inline void stream(std::byte* to, Register const& value) noexcept {
    if constexpr (has_streaming_stores) {
        std::array<Bytes16, sizeof(Register) / 16> pieces;
        std::memcpy(&pieces, &value, sizeof(Register));
        for (Bytes16 const& piece : pieces) {
            asm volatile("movntdq %1, %0" : "=m"(*reinterpret_cast<Bytes16*>(to)) : "x"(piece));
            to += sizeof(piece);
        }
    }
}
template <bool exist = has_streaming_stores>
[[gnu::always_inline]] inline void finish_streams() noexcept {
    if constexpr (exist) {
        asm volatile("sfence" : : : "memory");
    }
}

template <class Operation>
[[gnu::always_inline]] inline void
words(Operation const& operation, std::byte const* from, std::byte* to, std::size_t count) {
    using Word = typename Operation::Word;
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t const at = i * sizeof(Word);
        store<Word>(to + at, operation(load<Word>(from + at), load<Word>(to + at)));
    }
}

/// The same for rows that do not overlap, so that the compiler need not check it.
template <class Operation>
[[gnu::always_inline]] inline void words_apart(
    Operation const& operation,
    std::byte const* __restrict from,
    std::byte* __restrict to,
    std::size_t count
) {
    words(operation, from, to, count);
}
template <class Bits>
void words_apart(Assign<Bits> const&, std::byte const* from, std::byte* to, std::size_t count) {
    std::memcpy(to, from, count * sizeof(Bits));
}

/// One row from element `done` on, compiled for the caller's instruction set. The rows are the same
/// or do not overlap.
template <class Operation>
[[gnu::always_inline]] inline void apply(
    Operation const operation,
    Rows<std::byte const> const& from,
    Rows<std::byte> const& to,
    std::size_t done,
    std::size_t count
) {
    using Element = typename Operation::Element;
    using Word = typename Operation::Word;
    if (from.step == sizeof(Element) && to.step == sizeof(Element) && done == 0) {
        std::size_t const whole = count * sizeof(Element) / sizeof(Word);
        if (from.data == to.data) {
            words(operation, to.data, to.data, whole);
        } else {
            words_apart(operation, from.data, to.data, whole);
        }
        done = whole * sizeof(Word) / sizeof(Element);
    }
    for (std::size_t i = done; i < count; ++i) {
        std::byte* const target = to.data + i * to.step;
        Word const result =
            operation(load<Element>(from.data + i * from.step), load<Element>(target));
        store<Element>(target, static_cast<Element>(result));
    }
}

/// Rows from element `done` on.
template <class Operation>
[[gnu::always_inline]] inline void apply_from(
    std::size_t done,
    Operation const& operation,
    Rows<std::byte const> from,
    Rows<std::byte> to,
    std::size_t count,
    std::size_t rows
) {
    for (; rows != 0; --rows, from.data += from.next, to.data += to.next) {
        apply(operation, from, to, done, count);
    }
}

template <class Operation>
inline constexpr bool is_of_halves = false;
template <class Operation>
    requires std::same_as<typename Operation::Number, Half>
inline constexpr bool is_of_halves<Operation> = true;

/// Applies an operation to the f16 numbers in each row that fill whole registers, which the
/// processor converts. Returns their number.
template <class Operation>
JOINABLE_INLINE_AVX2 std::size_t apply_to_eights(
    Operation const& operation,
    Rows<std::byte const> from,
    Rows<std::byte> to,
    std::size_t count,
    std::size_t rows
) {
    if constexpr (has_half_conversions && is_of_halves<Operation>) {
        if (from.step == 2 && to.step == 2) {
            for (; rows != 0; --rows, from.data += from.next, to.data += to.next) {
                for (std::size_t i = 0; i + 8 <= count; i += 8) {
                    EightHalves halves;
                    EightFloats source;
                    EightFloats target;
                    std::memcpy(&halves, from.data + 2 * i, sizeof(halves));
                    widen(halves, source);
                    std::memcpy(&halves, to.data + 2 * i, sizeof(halves));
                    widen(halves, target);
                    operation.compute(source, target);
                    narrow(target, halves);
                    std::memcpy(to.data + 2 * i, &halves, sizeof(halves));
                }
            }
            return count / 8 * 8;
        }
    }
    return 0;
}

// The same loop for each instruction set. AVX2 conversions run before it, because only a function
// for AVX2 can inline them.
template <class Operation>
JOINABLE_LOOP void apply_baseline(
    Operation const& operation,
    Rows<std::byte const> from,
    Rows<std::byte> to,
    std::size_t count,
    std::size_t rows
) {
    apply_from(0, operation, from, to, count, rows);
}
template <class Operation>
JOINABLE_LOOP_AVX2 void apply_avx2(
    Operation const& operation,
    Rows<std::byte const> from,
    Rows<std::byte> to,
    std::size_t count,
    std::size_t rows
) {
    std::size_t const done = apply_to_eights(operation, from, to, count, rows);
    apply_from(done, operation, from, to, count, rows);
}
template <class Operation>
JOINABLE_LOOP_AVX512 void apply_avx512(
    Operation const& operation,
    Rows<std::byte const> from,
    Rows<std::byte> to,
    std::size_t count,
    std::size_t rows
) {
    std::size_t const done = apply_to_eights(operation, from, to, count, rows);
    apply_from(done, operation, from, to, count, rows);
}

/// The function that applies an operation to some rows on this processor.
template <class Operation>
auto rows_function(InstructionSet set = instruction_set()) noexcept {
    switch (set) {
    case InstructionSet::avx512: return &apply_avx512<Operation>;
    case InstructionSet::avx2: return &apply_avx2<Operation>;
    case InstructionSet::baseline: break;
    }
    return &apply_baseline<Operation>;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/detail/transpose.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

/// A register as bytes, like Bytes16. Compilers find the instruction for larger elements by the
/// bytes that move together.
using Bytes32 [[gnu::vector_size(32)]] = unsigned char;
using Bytes64 [[gnu::vector_size(64)]] = unsigned char;
using Words16 [[gnu::vector_size(16)]] = std::uint64_t;
using Words32 [[gnu::vector_size(32)]] = std::uint64_t;

/// Interleaves elements of `size` bytes from the low or high halves of two registers. Returns which
/// byte of the two, one after the other, becomes byte i. A wider register is several registers of
/// 16 bytes side by side.
template <std::size_t width, std::size_t size, bool high>
constexpr int interleaved(std::size_t i) noexcept {
    std::size_t const element = i % 16 / size;
    std::size_t const start = i / 16 * 16 + (high ? 8 : 0);
    return static_cast<int>(start + element % 2 * width + element / 2 * size + i % size);
}

// Lists, because nvcc 13 loses the expansion of a pack in the arguments of this builtin.
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes16 const& a, Bytes16 const& b, Bytes16& result) noexcept {
    constexpr auto at = &interleaved<16, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15)
    );
    // clang-format on
}
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes32 const& a, Bytes32 const& b, Bytes32& result) noexcept {
    constexpr auto at = &interleaved<32, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20), at(21),
        at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30), at(31)
    );
    // clang-format on
}
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes64 const& a, Bytes64 const& b, Bytes64& result) noexcept {
    constexpr auto at = &interleaved<64, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20), at(21),
        at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30), at(31), at(32),
        at(33), at(34), at(35), at(36), at(37), at(38), at(39), at(40), at(41), at(42), at(43),
        at(44), at(45), at(46), at(47), at(48), at(49), at(50), at(51), at(52), at(53), at(54),
        at(55), at(56), at(57), at(58), at(59), at(60), at(61), at(62), at(63)
    );
    // clang-format on
}

/// Fills a register with 16 bytes from each of several places, which are `step` bytes apart.
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t, Bytes16& result) noexcept {
    result = load<Bytes16>(from);
}
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t step, Bytes32& result) noexcept {
    auto const low = load<Words16>(from);
    auto const high = load<Words16>(from + step);
    result = reinterpret_cast<Bytes32>(__builtin_shufflevector(low, high, 0, 1, 2, 3));
}
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t step, Bytes64& result) noexcept {
    Bytes32 low;
    Bytes32 high;
    load_pieces(from, step, low);
    load_pieces(from + 2 * step, step, high);
    result = reinterpret_cast<Bytes64>(__builtin_shufflevector(
        reinterpret_cast<Words32>(low), reinterpret_cast<Words32>(high), 0, 1, 2, 3, 4, 5, 6, 7
    ));
}

/// Transposes squares. Each has as many rows as 16 bytes have elements. The squares below the first
/// one become its neighbours, as many as fill a register. Interleaving the first half of the rows
/// with the second half, log2(rows) times, is a perfect shuffle of all index bits.
template <class Bits, class Register, bool streams>
[[gnu::always_inline]] inline void transpose_squares(
    std::byte const* from, std::size_t from_step, std::byte* to, std::size_t to_step
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    std::array<Register, n> rows;
    JOINABLE_UNROLL
    for (Register& row : rows) {
        load_pieces(from, n * from_step, row);
        from += from_step;
        asm("" : "+r"(from)); // else compilers keep the addresses of all rows, on the stack
    }
    JOINABLE_UNROLL
    for (std::size_t done = 1; done < n; done *= 2) {
        std::array<Register, n> next;
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < n / 2; ++i) {
            interleave<sizeof(Bits), false>(rows[i], rows[i + n / 2], next[2 * i]);
            interleave<sizeof(Bits), true>(rows[i], rows[i + n / 2], next[2 * i + 1]);
        }
        rows = next;
    }
    JOINABLE_UNROLL
    for (std::size_t i = 0; i < n; ++i) {
        Register const row = rows[i]; // no reference: it must stay in a register
        if constexpr (streams) {
            stream(to, row);
        } else {
            std::memcpy(to, &row, sizeof(row));
        }
        to += to_step;
        asm("" : "+r"(to));
    }
}

/// A plane: element (i, k) is read at `from + i * row_step + k * column_step` bytes and written to
/// `to + k * to_step + i * sizeof(Bits)`.
struct Plane {
    std::byte const* from;
    std::size_t row_step;
    std::size_t rows;
    std::size_t column_step;
    std::size_t columns;
    std::byte* to;
    std::size_t to_step;
};

/// Prefetches the memory of a plane that will be read soon. Inlined, because GCC drops calls of a
/// function that does nothing else.
[[gnu::always_inline]] inline void prefetch(Plane const& plane) noexcept {
    for (std::size_t i = 0; i < plane.rows; ++i) {
        for (std::size_t at = 0; at < plane.columns * plane.column_step; at += 64) {
            __builtin_prefetch(plane.from + i * plane.row_step + at);
        }
    }
}

/// Transposes the rows from `done` on that whole squares cover. Returns the number of rows done so
/// far.
template <class Bits, class Register, bool streams = false>
[[gnu::always_inline]] inline std::size_t transpose_rows(Plane const plane, std::size_t done) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    constexpr std::size_t height = sizeof(Register) / sizeof(Bits);
    for (; done + height <= plane.rows; done += height) {
        for (std::size_t k = 0; k + n <= plane.columns; k += n) {
            transpose_squares<Bits, Register, streams>(
                plane.from + done * plane.row_step + k * sizeof(Bits),
                plane.row_step,
                plane.to + k * plane.to_step + done * sizeof(Bits),
                plane.to_step
            );
        }
    }
    return done;
}

/// Transposes a plane, with the widest registers first.
template <class Bits, class Register, bool streams = false>
[[gnu::always_inline]] inline void transpose_plane(Plane const plane) {
    std::size_t even_rows = 0;
    std::size_t even_columns = 0;
    if (plane.column_step == sizeof(Bits)) {
        even_rows = transpose_rows<Bits, Register, streams>(plane, 0);
        even_rows = transpose_rows<Bits, Bytes16>(plane, even_rows);
        even_columns = plane.columns * sizeof(Bits) / 16 * 16 / sizeof(Bits);
    }
    std::size_t const first = even_columns == plane.columns ? even_rows : 0;
    for (std::size_t i = first; i < plane.rows; ++i) {
        for (std::size_t k = i < even_rows ? even_columns : 0; k < plane.columns; ++k) {
            store<Bits>(
                plane.to + k * plane.to_step + i * sizeof(Bits),
                load<Bits>(plane.from + i * plane.row_step + k * plane.column_step)
            );
        }
    }
}

// The same loop for each instruction set.
template <class Bits>
JOINABLE_LOOP void transpose_baseline(Plane plane) {
    transpose_plane<Bits, Bytes16>(plane);
}
template <class Bits>
JOINABLE_LOOP_AVX2 void transpose_avx2(Plane plane) {
    transpose_plane<Bits, Bytes32>(plane);
}
/// With `streams`, each row of the target starts at a multiple of 64 bytes.
template <class Bits, bool streams = false>
JOINABLE_LOOP_AVX512 void transpose_avx512(Plane plane) {
    transpose_plane<Bits, Bytes64, streams>(plane);
    if constexpr (streams) {
        finish_streams();
    }
}

/// The function that transposes on this processor through the caches.
template <class Bits>
auto transpose_function(InstructionSet set = instruction_set()) noexcept {
    switch (set) {
    case InstructionSet::avx512: return &transpose_avx512<Bits>;
    case InstructionSet::avx2: return &transpose_avx2<Bits>;
    case InstructionSet::baseline: break;
    }
    return &transpose_baseline<Bits>;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/detail/loops.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace joinable { inline namespace v0 { namespace detail {

/// The order in which to visit the elements of two views of the same extents. The target's smallest
/// step is innermost, since writes cost more than reads. Dimensions of extent 1 are dropped, and
/// neighbours are merged if both views step through them evenly. Steps are in bytes.
class Loops {
public:
    Loops(Shape const& extents, Shape const& from, Shape const& to, std::size_t element_bytes) {
        Shape order;
        for (std::size_t d = 0; d < extents.size(); ++d) {
            if (extents[d] == 1) {
                continue;
            }
            order.push_back(d);
            for (std::size_t i = order.size() - 1; i > 0; --i) { // insertion sort of at most eight
                std::size_t const outer = order[i - 1];
                if (to[outer] > to[d] || (to[outer] == to[d] && from[outer] >= from[d])) {
                    break;
                }
                order[i] = outer;
                order[i - 1] = d;
            }
        }
        for (std::size_t const d : order) {
            std::size_t const from_step = from[d] * element_bytes;
            std::size_t const to_step = to[d] * element_bytes;
            if (rank_ != 0 && levels_[rank_ - 1].from == extents[d] * from_step &&
                levels_[rank_ - 1].to == extents[d] * to_step) {
                levels_[rank_ - 1] = {
                    levels_[rank_ - 1].extent * extents[d], from_step, to_step, 0
                };
            } else {
                levels_[rank_++] = {extents[d], from_step, to_step, 0};
            }
        }
        if (rank_ == 0) { // a single element
            levels_[rank_++] = {1, element_bytes, element_bytes, 0};
        }
        choose_tiles();
    }

    struct Level {
        std::size_t extent;
        std::size_t from;
        std::size_t to;
        std::size_t index;
    };

    /// Outermost first.
    [[nodiscard]] std::span<Level const> levels() const noexcept { return {levels_.data(), rank_}; }
    /// The innermost loop: a row.
    [[nodiscard]] Level const& inner() const noexcept { return levels_[rank_ - 1]; }

    /// Whether the source is read across its rows. The two innermost loops then run over tiles, and
    /// `across()` is the loop with small steps in the source.
    [[nodiscard]] bool has_tiles() const noexcept { return has_tiles_; }
    [[nodiscard]] Level const& across() const noexcept { return levels_[rank_ - 2]; }

    /// Calls `body(from, to)` at the start of every row, or of every plane if there are tiles.
    template <class Body>
    void for_each(std::byte const* from, std::byte* to, Body const& body) {
        std::size_t const outer = rank_ - (has_tiles_ ? 2 : 1);
        for (;;) {
            body(from, to);
            std::size_t d = outer;
            for (;; --d) { // an odometer
                if (d == 0) {
                    return;
                }
                Level& level = levels_[d - 1];
                from += level.from;
                to += level.to;
                if (++level.index < level.extent) {
                    break;
                }
                from -= level.from * level.extent;
                to -= level.to * level.extent;
                level.index = 0;
            }
        }
    }

private:
    void choose_tiles() noexcept {
        std::size_t across = rank_ - 1;
        for (std::size_t d = 0; d + 1 < rank_; ++d) { // a step of 0 reads nothing new
            if (levels_[d].from != 0 && levels_[d].from < levels_[across].from) {
                across = d;
            }
        }
        has_tiles_ = across != rank_ - 1;
        if (has_tiles_) {
            auto const first = levels_.begin() + static_cast<std::ptrdiff_t>(across);
            auto const last = levels_.begin() + static_cast<std::ptrdiff_t>(rank_) - 1;
            std::rotate(first, first + 1, last);
        }
    }

    std::array<Level, max_tensor_rank> levels_{}; ///< outermost first
    std::size_t rank_ = 0;
    bool has_tiles_ = false;
};

/// How a plane is transposed: in tiles of this many columns and rows.
template <class Bits>
struct Tiling {
    void (*transpose)(Plane);
    std::size_t columns;
    std::size_t rows;
    bool is_direct;   ///< writes to the target, else into a buffer
    bool is_in_cache; ///< fits in the second-level cache
};

/// The length of a buffered tile's sides, in elements. At this length the processor prefetches rows
/// on both sides. In cache, half of it is enough and stays in the first level.
template <class Bits>
inline constexpr std::size_t large_tile = sizeof(Bits) == 1 ? 256 : 512 / sizeof(Bits);

/// The tiling of `plane` for a processor. If elements are only moved, from a dense source to a
/// dense target, they go there directly in two cases: the plane fits in cache and its rows do not
/// evict each other, or it fits in no cache (memcpy then writes past the caches, too).
template <class Bits>
Tiling<Bits> tiling_of(Plane const& plane, bool is_dense, InstructionSet set) noexcept {
    auto* const transpose = transpose_function<Bits>(set);
    bool const is_wide = set == InstructionSet::avx512;
    std::size_t const bytes = plane.rows * plane.columns * sizeof(Bits);
    bool const is_in_cache = bytes <= std::size_t{1} << 20U;
    // This many rows of the target keep their lines in a first-level cache of 8 ways of 4 KiB.
    std::size_t const power = std::size_t{1} << std::countr_zero(plane.to_step | 4096U);
    std::size_t const run = (std::min)((is_wide ? 128 : 64) / sizeof(Bits), 8 * 4096 / power);
    if (is_dense && is_in_cache && run * sizeof(Bits) >= 64) {
        return {transpose, run, plane.rows, true, true};
    }
    bool const is_aligned = (reinterpret_cast<std::uintptr_t>(plane.to) | plane.to_step) % 64 == 0;
    if (is_dense && is_wide && is_aligned && bytes >= std::size_t{16} << 20U) {
        return {&transpose_avx512<Bits, true>, 512 / sizeof(Bits), 256 / sizeof(Bits), true, false};
    }
    std::size_t const size = large_tile<Bits> / (is_in_cache ? 2 : 1);
    return {transpose, size, size, false, is_in_cache};
}

/// Applies `rows_function(from, to, count, rows)` to a plane whose source is read across. Tiles are
/// first transposed, into a buffer or directly to the target, so that each cache line is touched
/// once.
template <class Bits, bool only_moves, class RowsFunction>
void for_each_tile(
    Loops::Level const& across,
    Loops::Level const& inner,
    std::byte const* from,
    std::byte* to,
    RowsFunction const& rows_function
) {
    Plane const plane{from, inner.from, inner.extent, across.from, across.extent, to, across.to};
    bool const is_dense = only_moves && inner.to == sizeof(Bits) && across.from == sizeof(Bits);
    Tiling<Bits> const tiling = tiling_of<Bits>(plane, is_dense, instruction_set());
    auto const tile_at = [&](std::size_t i, std::size_t k) {
        Plane tile = plane;
        tile.from += i * plane.row_step + k * plane.column_step;
        tile.rows = (std::min)(tiling.rows, plane.rows - i);
        tile.columns = (std::min)(tiling.columns, plane.columns - k);
        tile.to += i * inner.to + k * plane.to_step;
        return tile;
    };
    alignas(64) std::array<std::byte, large_tile<Bits> * large_tile<Bits> * sizeof(Bits)> buffer;
    for (std::size_t k = 0; k < plane.columns; k += tiling.columns) {
        for (std::size_t i = 0; i < plane.rows; i += tiling.rows) {
            Plane tile = tile_at(i, k);
            Rows<std::byte> const target{tile.to, inner.to, tile.to_step};
            if (!tiling.is_direct) {
                tile.to = buffer.data();
                tile.to_step = tiling.rows * sizeof(Bits);
            }
            tiling.transpose(tile);
            if (!tiling.is_in_cache && i + tiling.rows < plane.rows) {
                prefetch(tile_at(i + tiling.rows, k)); // no processor predicts a step of rows
            }
            if (!tiling.is_direct) {
                Rows<std::byte const> const source{tile.to, sizeof(Bits), tile.to_step};
                rows_function(source, target, tile.rows, tile.columns);
            }
        }
    }
}

/// Applies `rows_function(from, to, count, rows)`, which takes two `Rows`, to all elements of two
/// views.
template <class Bits, bool only_moves = false, class RowsFunction>
void for_all_rows(
    Loops& loops, std::byte const* from, std::byte* to, RowsFunction const& rows_function
) {
    Loops::Level const inner = loops.inner();
    if (loops.has_tiles()) {
        Loops::Level const across = loops.across();
        loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
            for_each_tile<Bits, only_moves>(across, inner, source, target, rows_function);
        });
    } else {
        loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
            rows_function(
                Rows<std::byte const>{source, inner.from},
                Rows<std::byte>{target, inner.to},
                inner.extent,
                std::size_t{1}
            );
        });
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/copy.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstddef>

namespace joinable { inline namespace v0 { namespace detail {

inline void check_on_host(std::string_view what, std::string_view role, AnyView const& view) {
    if (view.device().kind != DeviceKind::host) {
        throw ContractViolation{
            to_text(what) + ": the " + to_text(role) + " is on " + to_text(view.device()) +
            ", but this runs on the host; copy it to host memory first, with the engine's own means"
        };
    }
    if (!has_memory(view)) {
        throw ContractViolation{
            to_text(what) + ": the " + to_text(role) + " is a null pointer for " +
            to_text(view.numel()) + " elements; give it memory first"
        };
    }
}

JOINABLE_DEFINITION bool is_same_view(AnyView const& a, AnyView const& b) {
    if (a.data() != b.data()) {
        return false;
    }
    for (std::size_t d = 0; d < a.extents().size(); ++d) {
        if (a.extents()[d] > 1 && a.strides()[d] != b.strides()[d]) {
            return false;
        }
    }
    return true;
}

JOINABLE_DEFINITION void check_pair(std::string_view what, AnyView const& from, AnyView const& to) {
    if (!from || !to) {
        throw ContractViolation{concat(
            what,
            " needs two tensors, but the ",
            from ? "target" : "source",
            " is an empty view; give it a tensor"
        )};
    }
    if (from.dtype() != to.dtype() || from.extents() != to.extents()) {
        throw ContractViolation{
            to_text(what) + " needs two tensors of the same dtype and extents, but got " +
            to_text(from) + " and " + to_text(to)
        };
    }
    check_on_host(what, "source", from);
    check_on_host(what, "target", to);
    if (is_overlapping(to.extents(), to.strides())) {
        throw ContractViolation{
            to_text(what) + ": elements of the target share memory (extents " +
            to_text(to.extents()) + ", strides " + to_text(to.strides()) +
            "); write to a view in which each index has its own element"
        };
    }
    if (!is_same_view(from, to) && share_memory(from, to)) {
        throw ContractViolation{
            to_text(what) +
            ": source and target overlap in memory and are not the same view; go through a copy of "
            "the source"
        };
    }
}

/// Applies an operation to each element of `to` and the element of `from` at the same index.
template <class Operation>
void for_each_element(Operation const& operation, AnyView const& from, AnyView const& to) {
    if (to.numel() == 0) {
        return;
    }
    using Element = typename Operation::Element;
    Loops loops{to.extents(), from.strides(), to.strides(), sizeof(Element)};
    auto* const function = rows_function<Operation>();
    using Bits = bits_of_size<sizeof(Element)>;
    for_all_rows<Bits, std::same_as<Operation, Assign<Bits>>>(
        loops,
        static_cast<std::byte const*>(from.data()),
        static_cast<std::byte*>(to.data()),
        [&](auto const& source, auto const& target, std::size_t count, std::size_t rows) {
            function(operation, source, target, count, rows);
        }
    );
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION void copy(AnyView const& from, AnyView const& to) {
    detail::check_pair("copy", from, to);
    if (detail::is_same_view(from, to)) {
        return;
    }
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        detail::for_each_element(detail::Assign<detail::bits_of_size<sizeof(T)>>{}, from, to);
    });
}

JOINABLE_DEFINITION void scale_copy(AnyView const& from, double factor, AnyView const& to) {
    if (factor == 1.0) {
        copy(from, to);
        return;
    }
    detail::check_pair("scale_copy", from, to);
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        if constexpr (std::is_integral_v<T>) {
            throw ContractViolation{
                "scale_copy: a tensor of " + detail::to_text(name_of(from.dtype())) +
                " cannot be scaled by " + detail::to_text(factor) +
                "; only floating-point dtypes can"
            };
        } else {
            detail::for_each_element(detail::Scale<T>{factor}, from, to);
        }
    });
}

JOINABLE_DEFINITION void add(AnyView const& from, AnyView const& to) {
    detail::check_pair("add", from, to);
    visit_dtype(from.dtype(), [&]<class T>(std::type_identity<T>) {
        if constexpr (std::is_integral_v<T>) {
            detail::for_each_element(detail::Add<detail::bits_of_size<sizeof(T)>>{}, from, to);
        } else {
            detail::for_each_element(detail::Add<T>{}, from, to);
        }
    });
}

JOINABLE_DEFINITION void fill_zero(AnyView const& to) {
    detail::check_on_host("fill_zero", "tensor", to);
    if (to.numel() == 0) {
        return;
    }
    visit_dtype(to.dtype(), [&]<class T>(std::type_identity<T>) {
        using Bits = detail::bits_of_size<sizeof(T)>;
        auto* const target = static_cast<std::byte*>(to.data());
        detail::Loops loops{to.extents(), to.strides(), to.strides(), sizeof(T)};
        detail::for_all_rows<Bits>(
            loops,
            target,
            target,
            [](auto const&, auto const& row, std::size_t count, std::size_t) {
                if (row.step == sizeof(T)) {
                    std::memset(row.data, 0, count * sizeof(T));
                } else {
                    for (std::size_t i = 0; i < count; ++i) {
                        detail::store<Bits>(row.data + i * row.step, Bits{});
                    }
                }
            }
        );
    });
}

}} // namespace joinable::v0

#endif

// ---- joinable/tensor/parameter.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// A result of `parameter_traits` for a value or a gradient: it can be dereferenced and may be
/// empty (a pointer, an optional view).
template <class P>
concept pointer_like_to_tensor = requires(P&& pointer) {
    static_cast<bool>(pointer);
    requires WritableTensor<decltype(*pointer)>;
};

template <class T>
constexpr T* address_of_gradient(T& gradient) noexcept {
    return std::addressof(gradient);
}
template <class T>
constexpr T* address_of_gradient(std::optional<T>& gradient) noexcept {
    return gradient ? std::addressof(*gradient) : nullptr;
}

/// The base of a `parameter_traits` that is not specialised.
struct DefaultParameterTraits {};

template <class P>
concept has_value_and_grad_members = requires(P& p) {
    requires WritableTensor<decltype((p.value))>;
    requires WritableTensor<decltype(*address_of_gradient(p.grad))>;
};

} // namespace detail

/// Adapts a parameter type: a value and its gradient. Specialise it for the engine's own type:
///
/// | member                                        | meaning                                          |
/// |-----------------------------------------------|--------------------------------------------------|
/// | `static auto value(P& p)`                     | pointer-like to a writable Tensor                |
/// | `static auto grad(P& p)`                      | the same; empty = there is no gradient           |
/// | `static bool requires_grad(P const& p)`       | optional; else all parameters are trained        |
/// | `static std::string_view name(P const& p)`    | optional; error texts use it                     |
/// | `static void set_grad(P& p, AnyView view)`    | optional; makes `view` the gradient: enables     |
/// |                                               | gradients as bucket views                        |
/// | `static void release_grad(P& p)`              | optional; frees the gradient, which is averaged  |
/// |                                               | or of no use: grad(p) is empty until the next    |
/// |                                               | backward pass, or set_grad(p)                    |
/// | `static void set_value(P& p, AnyView view)`   | optional, with the next: makes `view` the value  |
/// | `static void release_value(P& p)`             | frees the value, or forgets the view that it is: |
/// |                                               | ranks keep parts of values; must not throw,      |
/// |                                               | because it also runs while an exception unwinds  |
/// | `static constexpr bool is_handle = true`      | optional; copies of P share storage              |
///
/// The default serves every class with members `value` and `grad` that are writable tensors; `grad`
/// may be a std::optional. It uses the members `requires_grad` and `name` if there are any. In a
/// specialisation, write `::` before a class `Parameter` of the global namespace.
template <class P>
struct parameter_traits : detail::DefaultParameterTraits {
    static constexpr auto value(P& p) noexcept
        requires detail::has_value_and_grad_members<P>
    {
        return std::addressof(p.value);
    }
    static constexpr auto grad(P& p) noexcept
        requires detail::has_value_and_grad_members<P>
    {
        return detail::address_of_gradient(p.grad);
    }
    static constexpr bool requires_grad(P const& p)
        requires requires {
            { p.requires_grad } -> std::convertible_to<bool>;
        }
    {
        return p.requires_grad;
    }
    static constexpr std::string_view name(P const& p)
        requires requires {
            { p.name } -> std::convertible_to<std::string_view>;
        }
    {
        return p.name;
    }
};

namespace detail {

template <class P>
using parameter_traits_of = parameter_traits<std::remove_cvref_t<P>>;

template <class P>
concept has_value = requires(std::remove_cvref_t<P>& p) {
    { parameter_traits_of<P>::value(p) } -> pointer_like_to_tensor;
};
template <class P>
concept has_grad = requires(std::remove_cvref_t<P>& p) {
    { parameter_traits_of<P>::grad(p) } -> pointer_like_to_tensor;
};
template <class P>
concept has_set_grad = requires(std::remove_cvref_t<P>& p, AnyView const& view) {
    parameter_traits_of<P>::set_grad(p, view);
};
template <class P>
concept has_release_grad =
    requires(std::remove_cvref_t<P>& p) { parameter_traits_of<P>::release_grad(p); };
template <class P>
concept has_set_value = requires(std::remove_cvref_t<P>& p, AnyView const& view) {
    parameter_traits_of<P>::set_value(p, view);
    parameter_traits_of<P>::release_value(p);
};
template <class P>
concept has_name = requires(std::remove_cvref_t<P> const& p) {
    requires lasting_text<decltype(parameter_traits_of<P>::name(p))>;
};
template <class P>
concept has_requires_grad = requires(std::remove_cvref_t<P> const& p) {
    { parameter_traits_of<P>::requires_grad(p) } -> std::convertible_to<bool>;
};
template <class P>
concept is_handle_parameter = requires { requires parameter_traits_of<P>::is_handle; };

template <class P>
concept has_default_traits = std::derived_from<parameter_traits_of<P>, DefaultParameterTraits>;
/// The class that declares requires_grad.
template <class P>
using declares_requires_grad =
    std::conditional_t<has_default_traits<P>, std::remove_cvref_t<P>, parameter_traits_of<P>>;

// An optional member of another signature, or without its partner, would be ignored.
template <class P>
concept has_other_requires_grad = requires {
    requires std::is_member_function_pointer_v<decltype(&declares_requires_grad<P>::requires_grad)>;
} || (!has_default_traits<P> && !has_requires_grad<P> && (requires(std::remove_cvref_t<P> const& p) {
    parameter_traits_of<P>::requires_grad(p);
} || requires {
    requires takes_others<decltype(&parameter_traits_of<P>::requires_grad), std::remove_cvref_t<P> const&>;
}));
template <class P>
concept has_other_name = !has_name<P> && (requires(std::remove_cvref_t<P> const& p) {
    parameter_traits_of<P>::name(p);
} || requires {
    requires takes_others<decltype(&parameter_traits_of<P>::name), std::remove_cvref_t<P> const&>;
});
template <class P>
concept has_other_set_grad = requires {
    requires takes_others<
        decltype(&parameter_traits_of<P>::set_grad),
        std::remove_cvref_t<P>&,
        AnyView const&>;
};
template <class P>
concept has_other_release_grad = requires {
    requires takes_others<decltype(&parameter_traits_of<P>::release_grad), std::remove_cvref_t<P>&>;
};
template <class P>
concept has_other_set_value =
    !has_set_value<P> && (requires(std::remove_cvref_t<P>& p, AnyView const& view) {
        parameter_traits_of<P>::set_value(p, view);
    } || requires(std::remove_cvref_t<P>& p) { parameter_traits_of<P>::release_value(p); } || requires {
        requires takes_others<
            decltype(&parameter_traits_of<P>::set_value),
            std::remove_cvref_t<P>&,
            AnyView const&>;
    } || requires {
        requires takes_others<decltype(&parameter_traits_of<P>::release_value), std::remove_cvref_t<P>&>;
    });
template <class P>
concept has_other_is_handle = requires { &parameter_traits_of<P>::is_handle; } && !requires {
    requires std::same_as<decltype(parameter_traits_of<P>::is_handle), bool const>;
    typename std::bool_constant<parameter_traits_of<P>::is_handle>;
};

/// Explains why an optional member is unusable. Returns true if all are usable.
template <class P>
consteval bool has_usable_options() {
    static_assert(
        !has_other_requires_grad<P>,
        "Parameter: requires_grad must be a data member that converts to bool, or 'static bool "
        "requires_grad(P const&)' in parameter_traits; else frozen parameters would be trained"
    );
    static_assert(
        !has_other_set_grad<P>,
        "Parameter: parameter_traits::set_grad must be 'static void set_grad(P&, AnyView)'"
    );
    static_assert(
        !has_other_release_grad<P>,
        "Parameter: parameter_traits::release_grad must be 'static void release_grad(P&)'"
    );
    static_assert(
        !has_other_name<P>,
        "Parameter: parameter_traits::name must be 'static std::string_view name(P const&)', a view of a "
        "text that the parameter keeps"
    );
    static_assert(
        !has_other_is_handle<P>,
        "Parameter: parameter_traits::is_handle must be 'static constexpr bool is_handle = true'"
    );
    static_assert(
        !has_other_set_value<P>,
        "Parameter: parameter_traits needs both 'static void set_value(P&, AnyView)' and 'static void "
        "release_value(P&)', or neither"
    );
    return true;
}

} // namespace detail

/// A trainable tensor with its gradient, as `parameter_traits` describes it.
///
/// `p` is an lvalue of `P`.
/// | expression                        | result                        | meaning                     |
/// |-----------------------------------|-------------------------------|-----------------------------|
/// | `parameter_traits<P>::value(p)`   | pointer-like to WritableTensor| the value; never empty      |
/// | `parameter_traits<P>::grad(p)`    | pointer-like to WritableTensor| the gradient; empty = none  |
///
/// Required, but not checkable: value and gradient have the same extents and dtype.
template <class P>
concept Parameter = detail::has_value<P> && detail::has_grad<P>;

namespace detail {

template <class T>
inline constexpr bool is_raw_pointer = std::is_pointer_v<std::remove_reference_t<T>>;

/// Explains why the member `value` or `grad` is unusable. `Member` is a reference to it.
template <class Member>
consteval bool models_parameter_member() {
    if constexpr (is_raw_pointer<Member>) {
        static_assert(
            !is_raw_pointer<Member>,
            "Parameter: 'value' or 'grad' is a raw pointer, which does not say how many elements it "
            "has; use std::span, or specialise joinable::parameter_traits"
        );
        return false;
    } else {
        return models_writable_tensor<std::remove_reference_t<Member>>();
    }
}

/// Explains why the result of `parameter_traits::value` or `grad` is unusable.
template <class Returned>
consteval bool models_parameter_pointer() {
    constexpr bool is_pointer_like = requires(Returned pointer) {
        static_cast<bool>(pointer);
        *pointer;
    };
    static_assert(
        is_pointer_like,
        "Parameter: parameter_traits::value and grad return something to dereference, as a pointer to "
        "a tensor or a std::optional view, not the tensor itself"
    );
    if constexpr (is_pointer_like) {
        return models_parameter_member<decltype(*std::declval<Returned&>())>();
    }
    return false;
}

} // namespace detail

/// Explains in one sentence why a class is not a Parameter:
/// `static_assert(models_parameter<My>());`.
template <class P>
consteval bool models_parameter() {
    using Traits = detail::parameter_traits_of<P>;
    constexpr bool is_default = detail::has_default_traits<P>;
    if constexpr (Parameter<P>) {
        using Value = decltype(*Traits::value(std::declval<std::remove_cvref_t<P>&>()));
        using Grad = decltype(*Traits::grad(std::declval<std::remove_cvref_t<P>&>()));
        return detail::has_usable_options<P>() && models_tensor<std::remove_reference_t<Value>>() &&
               models_tensor<std::remove_reference_t<Grad>>();
    } else if constexpr (is_default) {
        constexpr bool has_members = requires(P& p) {
            p.value;
            p.grad;
        };
        constexpr bool is_model = requires(P& p) { p.parameters(); };
        static_assert(
            has_members || !is_model,
            "Parameter: a model was given in place of its parameters; give model.parameters()"
        );
        static_assert(
            has_members || is_model,
            "Parameter: give the class members 'value' and 'grad' (public, of these names), or specialise "
            "joinable::parameter_traits for this very type"
        );
        if constexpr (has_members) {
            return detail::models_parameter_member<decltype((std::declval<P&>().value))>() &&
                   detail::models_parameter_member<
                       decltype(*detail::address_of_gradient(std::declval<P&>().grad))>();
        }
        return false;
    } else {
        constexpr bool has_both = requires(P& p) {
            Traits::value(p);
            Traits::grad(p);
        };
        static_assert(
            has_both,
            "Parameter: parameter_traits needs 'static auto value(P&)' and 'static auto grad(P&)'"
        );
        if constexpr (has_both) {
            return detail::models_parameter_pointer<decltype(Traits::value(std::declval<P&>()))>(
                   ) &&
                   detail::models_parameter_pointer<decltype(Traits::grad(std::declval<P&>()))>();
        }
        return false;
    }
}

}} // namespace joinable::v0

// ---- joinable/tensor/detail/handle_list.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A list of type-erased handles. An index is a position in the list.
///
/// `Handle` has these members:
/// - `Handle::takes<T>`: whether it can be made from a `T&` and perhaps an owner.
/// - `Handle::shares_storage<T>`: whether a copy of a `T` is as good as the object itself.
/// - `Handle::of_null(i)`: the handle for a null pointer at position `i`, unless it throws.
template <class Handle>
class HandleList {
public:
    [[nodiscard]] std::size_t size() const noexcept { return items_.size(); }
    [[nodiscard]] Handle const& operator[](std::size_t i) const { return items_[i]; }
    [[nodiscard]] auto begin() const noexcept { return items_.begin(); }
    [[nodiscard]] auto end() const noexcept { return items_.end(); }
    void push_back(Handle handle) { items_.push_back(std::move(handle)); }

private:
    std::vector<Handle> items_;
};

template <class Range>
using item_of = std::remove_reference_t<decltype(*std::begin(std::declval<Range&>()))>;

template <class T, class Handle>
concept pointer_to_taken = requires(T& pointer) {
    static_cast<bool>(pointer);
    requires Handle::template takes<std::remove_reference_t<decltype(*pointer)>>;
};

template <class Range, class Handle>
concept list_of = std::derived_from<std::remove_cvref_t<Range>, HandleList<Handle>>;

template <class Range, class Handle>
concept range_of_taken =
    Handle::template takes<item_of<Range>> || pointer_to_taken<item_of<Range>, Handle>;

/// Whether `append` can make handles for the items of the range, or for a single object in place of
/// a range.
template <class Range, class Handle>
concept has_items_for = list_of<Range, Handle> || range_of_taken<Range, Handle> ||
                        Handle::template takes<std::remove_reference_t<Range>>;

/// Appends a handle to `object`, or to a copy of it if the object is temporary.
template <bool Stays, class Handle, class T>
void append_object(HandleList<Handle>& list, T& object) {
    constexpr bool is_shared = Handle::template shares_storage<T>;
    static_assert(
        Stays || is_shared,
        "parameters, buffers: a temporary object, or a temporary range of objects, would be destroyed before it is "
        "used; give it a name, or set parameter_traits::is_handle if copies share storage"
    );
    if constexpr (Stays) {
        list.push_back(Handle{object});
    } else if constexpr (is_shared) {
        // Copied, not moved: a temporary view may refer to handles that another object owns.
        auto owned = std::make_shared<std::remove_const_t<T>>(object);
        list.push_back(Handle{*owned, owned});
    }
}

/// Appends handles to the objects in a range. For a named range, or a temporary view such as a span,
/// it keeps the addresses of objects and copies of pointers and smart pointers. It copies the handles
/// in a temporary range. The items
/// of a list are appended one by one. A single object counts as a range of one.
template <class Handle, class Range>
void append(HandleList<Handle>& list, Range&& range) {
    if constexpr (list_of<Range, Handle>) {
        for (Handle const& handle : range) {
            list.push_back(handle);
        }
    } else if constexpr (!range_of_taken<Range, Handle>) {
        append_object<std::is_lvalue_reference_v<Range>>(list, range);
    } else if constexpr (Handle::template takes<item_of<Range>>) {
        constexpr bool is_view = std::ranges::enable_borrowed_range<std::remove_cv_t<Range>>;
        constexpr bool is_shared = Handle::template shares_storage<item_of<Range>>;
        constexpr bool items_stay = std::is_lvalue_reference_v<decltype(*std::begin(range))> &&
                                    (std::is_lvalue_reference_v<Range> || (is_view && !is_shared));
        for (auto&& item : range) {
            append_object<items_stay>(list, item);
        }
    } else {
        using Pointer = std::remove_const_t<item_of<Range>>;
        constexpr bool is_owning_copy =
            std::copy_constructible<Pointer> && !std::is_pointer_v<Pointer>;
        static_assert(
            std::copy_constructible<Pointer> || std::is_lvalue_reference_v<Range> ||
                std::ranges::enable_borrowed_range<std::remove_cv_t<Range>>,
            "parameters, buffers: a temporary range of unique pointers would take its objects with "
            "it; give the range a name, or use shared pointers"
        );
        for (auto&& pointer : range) {
            if (!pointer) {
                list.push_back(Handle::of_null(list.size()));
            } else if constexpr (is_owning_copy) {
                list.push_back(Handle{*pointer, std::make_shared<Pointer>(pointer)});
            } else {
                list.push_back(Handle{*pointer});
            }
        }
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/tensor/parameters.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// What a parameter was at some time.
struct ParameterState {
    Shape extents; ///< of its value, like the next two
    DeviceId device;
    DType dtype;
    bool has_value;
    bool requires_grad;
};

} // namespace detail

/// A type-erased handle to one parameter of an engine. Cheap to copy. It does not own the parameter
/// unless it was made from an owning pointer or a handle type.
class AnyParameter {
public:
    /// A handle to the parameter `object`. `owner` keeps it alive, if needed.
    template <Parameter P>
    explicit AnyParameter(P& object, std::shared_ptr<void> owner = {})
        : object_{const_cast<std::remove_const_t<P>*>(std::addressof(object))},
          functions_{&table<P>}, owner_{std::move(owner)} {
        static_assert(models_parameter<std::remove_const_t<P>>());
        static_assert(
            !std::is_const_v<P> || detail::is_handle_parameter<P>,
            "parameters: const parameters cannot be trained, since values and gradients are "
            "written; give a range or pointers that are not const"
        );
    }

    [[nodiscard]] AnyView value() const { return functions_->value(object_); }
    /// Empty if the parameter has no gradient now.
    [[nodiscard]] AnyView grad() const { return functions_->grad(object_); }
    [[nodiscard]] bool can_set_grad() const noexcept { return functions_->set_grad != nullptr; }
    /// Makes `view` the gradient.
    /// @throws ContractViolation  the parameter's traits cannot: `can_set_grad()` is false.
    void set_grad(AnyView const& view) const {
        if (!can_set_grad()) {
            throw ContractViolation{"a gradient cannot be set: parameter_traits of this type needs "
                                    "'static void set_grad(P&, AnyView)'"};
        }
        functions_->set_grad(object_, view);
    }
    [[nodiscard]] bool can_release_grad() const noexcept {
        return functions_->release_grad != nullptr;
    }
    /// Frees the gradient, if the parameter's traits can.
    void release_grad() const {
        if (functions_->release_grad != nullptr) {
            functions_->release_grad(object_);
        }
    }
    [[nodiscard]] bool can_set_value() const noexcept { return functions_->set_value != nullptr; }
    /// Makes `view` the value; release_value() frees or forgets it. Both need can_set_value().
    void set_value(AnyView const& view) const { functions_->set_value(object_, view); }
    void release_value() const { functions_->release_value(object_); }
    [[nodiscard]] bool requires_grad() const { return functions_->requires_grad(object_); }
    /// Whether the parameter is what it was: it requires a gradient as before, and its value has the
    /// same extents, dtype and device, unless it has none or had none. Cheaper than value().
    [[nodiscard]] bool is_as(detail::ParameterState const& before) const {
        return functions_->is_as(object_, before);
    }
    /// Empty if the parameter has no name.
    [[nodiscard]] std::string_view name() const { return functions_->name(object_); }

    template <class P>
    static constexpr bool takes = Parameter<P>;
    template <class P>
    static constexpr bool shares_storage = detail::is_handle_parameter<P>;
    [[noreturn]] static AnyParameter of_null(std::size_t position) {
        throw ContractViolation{detail::concat("parameters: pointer ", position, " is null")};
    }

private:
    struct Functions {
        AnyView (*value)(void*);
        AnyView (*grad)(void*);
        void (*set_grad)(void*, AnyView const&);  ///< null: not supported
        void (*release_grad)(void*);              ///< null: not supported
        void (*set_value)(void*, AnyView const&); ///< null, like the next one: not supported
        void (*release_value)(void*);
        bool (*requires_grad)(void*);
        bool (*is_as)(void*, detail::ParameterState const&);
        std::string_view (*name)(void*);
    };

    template <class Pointer>
    static AnyView view_of(Pointer&& pointer) {
        return pointer ? detail::view_of(*pointer) : AnyView{};
    }

    template <class P>
    static bool requires_grad_of(void* p) {
        if constexpr (detail::has_requires_grad<P>) {
            using Object = std::remove_const_t<P>;
            return detail::parameter_traits_of<P>::requires_grad(*static_cast<Object*>(p));
        } else {
            return p != nullptr;
        }
    }

    template <class P>
    static consteval Functions make_table() {
        using Traits = detail::parameter_traits_of<P>;
        using Object = std::remove_const_t<P>;
        Functions functions{};
        functions.value = [](void* p) { return view_of(Traits::value(*static_cast<Object*>(p))); };
        functions.grad = [](void* p) { return view_of(Traits::grad(*static_cast<Object*>(p))); };
        if constexpr (detail::has_set_grad<P>) {
            functions.set_grad = [](void* p, AnyView const& view) {
                Traits::set_grad(*static_cast<Object*>(p), view);
            };
        }
        if constexpr (detail::has_release_grad<P>) {
            functions.release_grad = [](void* p) {
                Traits::release_grad(*static_cast<Object*>(p));
            };
        }
        if constexpr (detail::has_set_value<P>) {
            functions.set_value = [](void* p, AnyView const& view) {
                Traits::set_value(*static_cast<Object*>(p), view);
            };
            functions.release_value = [](void* p) {
                Traits::release_value(*static_cast<Object*>(p));
            };
        }
        functions.requires_grad = requires_grad_of<P>;
        functions.is_as = [](void* p, detail::ParameterState const& before) -> bool {
            if (requires_grad_of<P>(p) != before.requires_grad) {
                return false;
            }
            auto&& value = Traits::value(*static_cast<Object*>(p));
            return !value || !before.has_value ||
                   detail::is_like(*value, before.dtype, before.extents, before.device);
        };
        functions.name = [](void* p) -> std::string_view {
            if constexpr (detail::has_name<P>) {
                return Traits::name(*static_cast<Object*>(p));
            } else {
                (void)p;
                return {};
            }
        };
        return functions;
    }

    template <class P>
    static constexpr Functions table = make_table<P>();

    void* object_;
    Functions const* functions_;
    std::shared_ptr<void> owner_;
};

/// The parameters of a model, of any types. An index is a position in the list.
class ParameterList : public detail::HandleList<AnyParameter> {};

namespace detail {

/// Explains which items of a range parameters() refuses, and why.
template <class Range>
consteval bool says_what_parameters_lack() {
    if constexpr (has_items_for<Range, AnyParameter>) {
        return true;
    } else if constexpr (!requires { typename item_of<Range>; }) {
        return models_parameter<std::remove_cvref_t<Range>>();
    } else if constexpr (requires(item_of<Range>& pointer) { *pointer; }) {
        return models_parameter<std::remove_cvref_t<decltype(*std::declval<item_of<Range>&>())>>();
    } else {
        return models_parameter<std::remove_cvref_t<item_of<Range>>>();
    }
}

} // namespace detail

/// Joins ranges of parameters of different types into one list, in order. For a named range, the
/// list keeps the addresses of objects and copies of pointers and smart pointers (shared ones share
/// ownership). A temporary range must hold pointers or handles (parameter_traits::is_handle), which
/// are copied. Const parameters and temporary ranges of unique pointers are compile errors. The
/// items of a ParameterList are appended one by one. Local.
/// @throws ContractViolation  a pointer is null.
template <class... Ranges>
[[nodiscard]] ParameterList parameters(Ranges&&... ranges) {
    ParameterList list;
    if constexpr ((detail::says_what_parameters_lack<Ranges>() && ...)) {
        (detail::append(list, std::forward<Ranges>(ranges)), ...);
    }
    return list;
}

namespace detail {

/// How error texts name a parameter of a list whose indices count from `first`.
inline std::string
describe_parameter(ParameterList const& parameters, std::size_t i, std::size_t first = 0) {
    auto const name = parameters[i].name();
    std::size_t const index = first + i;
    return name.empty() ? concat("parameter ", index)
                        : concat("parameter ", index, " (", name, ")");
}

/// Throws ContractViolation unless parameter `i` has a value on `device`.
inline void check_value(ParameterList const& parameters, std::size_t i, DeviceId device) {
    AnyView const value = parameters[i].value();
    if (!value || value.device() != device || !has_memory(value)) {
        throw ContractViolation{
            describe_parameter(parameters, i) + (!value ? " has no value"
                                                 : value.device() != device
                                                     ? " is not on " + to_text(device)
                                                     : " has a value at a null pointer")
        };
    }
}

/// Throws ContractViolation where the gradient of parameter `i` has elements, but no memory.
inline void
check_gradient(ParameterList const& parameters, std::size_t i, AnyView const& gradient) {
    if (!has_memory(gradient)) {
        throw ContractViolation{
            describe_parameter(parameters, i) +
            " has a gradient at a null pointer; give it memory, or no gradient, where grad() is empty"
        };
    }
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/tensor/tensor_list.hpp

namespace joinable { inline namespace v0 {

/// A type-erased handle to one tensor of an engine. Unlike a view, it follows the tensor when the
/// engine gives it other memory. Cheap to copy. It does not own the tensor unless it was made from
/// an owning pointer or a view type.
class AnyTensor {
public:
    /// A handle to the tensor `object`. `owner` keeps it alive, if needed.
    template <class T>
        requires WritableTensor<T&>
    explicit AnyTensor(T& object, std::shared_ptr<void> owner = {})
        : object_{const_cast<std::remove_const_t<T>*>(std::addressof(object))},
          view_{[](void* tensor) { return detail::view_of(*static_cast<T*>(tensor)); }},
          owner_{std::move(owner)} {
        static_assert(models_tensor<std::remove_const_t<T>>());
    }

    /// The tensor as it is now; empty for a null pointer.
    [[nodiscard]] AnyView view() const { return view_ != nullptr ? view_(object_) : AnyView{}; }

    template <class T>
    static constexpr bool takes = WritableTensor<T&>;
    /// A const object that can be written is a view, or a handle to shared storage.
    template <class T>
    static constexpr bool shares_storage = WritableTensor<T const&>;
    /// The list reports a null pointer when it is used, because its user can then tell the other
    /// ranks.
    static AnyTensor of_null(std::size_t) { return {}; }

private:
    AnyTensor() = default;

    void* object_ = nullptr;
    AnyView (*view_)(void*) = nullptr;
    std::shared_ptr<void> owner_;
};

/// Tensors of any types. An index is a position in the list.
class TensorList : public detail::HandleList<AnyTensor> {};

/// Tensors that may move to other memory, but keep their dtypes, extents and devices. A plan of
/// them is made once and asks each time for their addresses.
class FixedTensors {
public:
    /// Local. Errors call each tensor `what`.
    /// @throws ContractViolation  a tensor is missing, has no memory (a null pointer) or is not on
    ///                            `device`.
    FixedTensors(TensorList tensors, std::string_view what, DeviceId device = {});

    /// Views of the tensors at their current addresses. Local; valid until the next call; does not
    /// allocate.
    /// @throws ContractViolation  the extents, dtype or device of a tensor have changed, or it has
    ///                            no memory.
    std::vector<AnyView> const& views();

    /// Appends the tensors of another object. Local.
    void append(FixedTensors const& more);

private:
    [[noreturn]] void refuse(std::size_t i, std::string const& why) const;

    TensorList tensors_;
    std::string_view what_;
    std::vector<AnyView> views_;
};

/// The buffers of a model: state that training changes, but not by gradients (running means).
class BufferList : public TensorList {
public:
    explicit BufferList(TensorList list) : TensorList{std::move(list)} {}
};

namespace detail {

template <class Range>
concept holds_bools =
    has_bool_elements<Range> || requires { requires has_bool_elements<item_of<Range>>; };

template <class... Ranges>
TensorList tensor_list(Ranges&&... ranges) {
    static_assert(
        !(holds_bools<Ranges> || ...),
        "buffers: bool has no DType, and std::vector<bool> no contiguous elements; use unsigned char"
    );
    static_assert(
        (has_items_for<Ranges, AnyTensor> && ...),
        "buffers: each argument must be a tensor that can be written, or a range of such or of pointers "
        "to such: not const, and with a specialisation of joinable::tensor_traits"
    );
    TensorList list;
    (append(list, std::forward<Ranges>(ranges)), ...);
    return list;
}

} // namespace detail

/// Joins tensors, and ranges of tensors, of different types into one list, in order. The list keeps
/// the addresses of named tensors, so it follows a tensor that moves to other memory. It keeps
/// copies of pointers. A temporary must be a view, or a range of pointers or views; these are
/// copied. Local.
template <class... Ranges>
[[nodiscard]] BufferList buffers(Ranges&&... ranges) {
    return BufferList{detail::tensor_list(std::forward<Ranges>(ranges)...)};
}

}} // namespace joinable::v0

// ---- joinable/tensor/tensor_list.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION
FixedTensors::FixedTensors(TensorList tensors, std::string_view what, DeviceId device)
    : tensors_{std::move(tensors)}, what_{what} {
    for (AnyTensor const& tensor : tensors_) {
        AnyView const view = tensor.view();
        if (!view || view.device() != device || !detail::has_memory(view)) {
            refuse(
                views_.size(),
                !view ? " is missing; give a pointer that is not null"
                : view.device() != device
                    ? " is not on " + detail::to_text(device) + "; give a copy that is"
                    : " has elements at a null pointer; give it memory"
            );
        }
        views_.push_back(view);
    }
}

JOINABLE_DEFINITION std::vector<AnyView> const& FixedTensors::views() {
    for (std::size_t i = 0; i < views_.size(); ++i) {
        AnyView const now = tensors_[i].view();
        if (!detail::is_like(now, views_[i]) || !detail::has_memory(now)) {
            refuse(
                i,
                " was " + detail::to_text(views_[i]) + ", but now is " + detail::to_text(now) +
                    (detail::has_memory(now) ? "" : " at a null pointer") +
                    "; it may move, but neither grow nor change"
            );
        }
        views_[i] = now;
    }
    return views_;
}

JOINABLE_DEFINITION void FixedTensors::append(FixedTensors const& more) {
    detail::append(tensors_, more.tensors_);
    views_.insert(views_.end(), more.views_.begin(), more.views_.end());
}

JOINABLE_DEFINITION void FixedTensors::refuse(std::size_t i, std::string const& why) const {
    throw ContractViolation{detail::concat(what_, " ", i, why)};
}

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/work.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class W>
concept has_wait = requires(W& work) { work.wait(); };

template <class W>
concept has_test = requires(W& work) {
    { work.test() } -> std::convertible_to<bool>;
};

} // namespace detail

/// A collective that was started and may not be complete.
///
/// `work` is an lvalue of `W`.
/// | expression    | result              | meaning                                                  |
/// |---------------|---------------------|----------------------------------------------------------|
/// | `work.wait()` |                     | returns when this rank's buffers are final; throws the   |
/// |               |                     | error that ended the collective; may be called again     |
/// | `work.test()` | convertible to bool | makes progress without blocking; true once wait() would  |
/// |               |                     | return at once                                           |
///
/// A loop of test() ends as wait() does. In this library it throws TimedOut while some rank has not
/// arrived, once the time between tests adds up to the deadline. Each gap counts as at most 10 ms.
///
/// A work may have a member `bool progress()`: test() without that deadline. It is for callers that
/// test occasionally during other work and finally wait.
///
/// Required, but not checkable: the buffers stay alive until wait() has returned. The destructor of
/// unfinished work waits; during unwinding it aborts. Either way no peer touches freed memory.
/// Models: CompletedWork, ThreadWork.
template <class W>
concept Work = std::move_constructible<W> && detail::has_wait<W> && detail::has_test<W>;

namespace detail {

/// Tests without a deadline, for a caller that will finally wait.
template <Work W>
[[nodiscard]] bool make_progress(W& work) {
    if constexpr (requires { work.progress(); }) {
        return work.progress();
    } else {
        return work.test();
    }
}

} // namespace detail

/// A work that was complete when it started.
struct CompletedWork {
    void wait() const noexcept {}
    [[nodiscard]] bool test() const noexcept { return true; }
};

}} // namespace joinable::v0

// ---- joinable/communicator/communicator.hpp

namespace joinable { inline namespace v0 {

/// How long a collective waits for the other ranks unless set_deadline() says otherwise.
inline constexpr std::chrono::nanoseconds default_deadline = std::chrono::minutes{5};

namespace detail {

/// The length of the sums by which ranks agree: the roll calls of a guard, its entry, and the comparison of
/// models when they are made.
inline constexpr std::size_t agreement_words = 7;

template <class C>
concept has_rank = requires(C const& comm) {
    { comm.rank() } -> std::convertible_to<int>;
};
template <class C>
concept has_size = requires(C const& comm) {
    { comm.size() } -> std::convertible_to<int>;
};
template <class C>
concept has_all_reduce = requires(C& comm, Buffer buffer, ReduceOp op) {
    { comm.all_reduce(buffer, op) } -> Work;
};
template <class C>
concept has_broadcast = requires(C& comm, Buffer buffer, int root) {
    { comm.broadcast(buffer, root) } -> Work;
};
template <class C>
concept has_barrier = requires(C& comm) { comm.barrier(); };

template <class C>
concept has_abort = requires(C& comm, AbortReason reason) {
    comm.abort(reason);
    { comm.is_aborted() } -> std::convertible_to<bool>;
};
template <class C>
concept has_set_deadline = requires(C& comm, std::chrono::nanoseconds deadline) {
    { comm.set_deadline(deadline) } -> std::convertible_to<std::chrono::nanoseconds>;
};
template <class C>
concept has_missing_ranks = requires(C const& comm) {
    { comm.missing_ranks() } -> std::convertible_to<std::vector<int>>;
};

template <class C>
concept has_keep_alive = requires(C& comm) { comm.keep_alive(); };

} // namespace detail

/// The possible `device_type`s of a communicator: the device whose memory it moves. Without one it
/// moves host memory. Both are Devices (device/device.hpp).
class HostDevice;
class CudaDevice;

namespace detail {

template <class C>
struct device_type_of : std::type_identity<HostDevice> {};
template <class C>
    requires requires { typename C::device_type; }
struct device_type_of<C> : std::type_identity<typename C::device_type> {};

template <class C>
concept reduces_host_memory = std::same_as<typename device_type_of<C>::type, HostDevice>;

} // namespace detail

/// A group of ranks that run collectives together. Optional operations: capabilities.hpp.
///
/// `comm` is an lvalue of `C`.
/// | expression                     | result             | meaning                                  |
/// |--------------------------------|--------------------|------------------------------------------|
/// | `comm.rank()`                  | convertible to int | this rank, in [0, size()); never changes |
/// | `comm.size()`                  | convertible to int | number of ranks, the same on every rank  |
/// | `comm.all_reduce(buffer, op)`  | Work               | combines `buffer` over all ranks in place|
/// | `comm.broadcast(buffer, root)` | Work               | copies the buffer of `root` to all ranks |
/// | `comm.barrier()`               |                    | blocks until every rank has called it    |
/// | `C::device_type`               | optional           | HostDevice (default) or CudaDevice       |
/// | `comm.device_memory()`         | `device_type&`     | needed unless device_type is HostDevice; |
/// |                                |                    | work submitted there before a collective |
/// |                                |                    | runs before it; work submitted after its |
/// |                                |                    | wait() sees the result                   |
///
/// Required, but not checkable: every rank calls the same collectives in the same order. A
/// collective that throws because of another rank leaves the communicator aborted. One thread at a
/// time may use an object; different ranks are independent. A communicator need not be movable.
/// Archetype: tests/support/archetypes.hpp. Models: SelfCommunicator, ThreadCommunicator.
template <class C>
concept Communicator = detail::has_rank<C> && detail::has_size<C> && detail::has_all_reduce<C> &&
                       detail::has_broadcast<C> && detail::has_barrier<C>;

/// A communicator on which any rank can end the waits of all ranks.
///
/// | expression           | result              | meaning                                         |
/// |----------------------|---------------------|-------------------------------------------------|
/// | `comm.abort(reason)` |                     | local; every wait that cannot complete throws   |
/// |                      |                     | `reason` on every rank; the first reason wins   |
/// | `comm.is_aborted()`  | convertible to bool | whether any rank has aborted                    |
template <class C>
concept Aborts = Communicator<C> && detail::has_abort<C>;

/// A communicator whose waits end in `TimedOut` (default: `default_deadline`).
///
/// | expression             | result                   | meaning                                   |
/// |------------------------|--------------------------|-------------------------------------------|
/// | `comm.set_deadline(d)` | std::chrono::nanoseconds | local; for waits that start later;        |
/// |                        |                          | returns the deadline that was in force    |
template <class C>
concept HasDeadline = Communicator<C> && detail::has_set_deadline<C>;

/// A communicator on which a slow rank can report that it is still working.
///
/// | expression          | result | meaning                                                        |
/// |---------------------|--------|----------------------------------------------------------------|
/// | `comm.keep_alive()` |        | local; waits for this rank are extended: they now end one      |
/// |                     |        | deadline from this call                                        |
template <class C>
concept RenewsDeadline = HasDeadline<C> && detail::has_keep_alive<C>;

/// A communicator that reports which ranks have not arrived at the oldest pending collective.
///
/// | expression             | result           | meaning                                         |
/// |------------------------|------------------|-------------------------------------------------|
/// | `comm.missing_ranks()` | std::vector<int> | local; ascending; empty when nothing is pending |
template <class C>
concept ReportsMissing = Communicator<C> && detail::has_missing_ranks<C>;

/// Explains in one sentence why a class is not a Communicator.
template <class C>
consteval bool models_communicator() {
    static_assert(detail::has_rank<C>, "Communicator: expected a member 'int rank() const'");
    static_assert(detail::has_size<C>, "Communicator: expected a member 'int size() const'");
    static_assert(
        detail::has_all_reduce<C>,
        "Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)"
    );
    static_assert(
        detail::has_broadcast<C>,
        "Communicator: expected a member 'Work broadcast(Buffer, int root)' (in place)"
    );
    static_assert(detail::has_barrier<C>, "Communicator: expected a member 'void barrier()'");
    return Communicator<C>;
}

namespace detail {
/// Stands for a communicator that was not passed to a participant. The assertion explains it.
struct NoCommunicator {};

/// Accepts any argument. A deduction guide that takes it loses to every other guide, and explains
/// the error.
struct AnyArgument {
    template <class T>
    AnyArgument(T&&);
};
} // namespace detail

/// The work that `C` returns from its all-reduce.
template <Communicator C>
using work_of =
    std::remove_cvref_t<decltype(std::declval<C&>().all_reduce(Buffer{}, ReduceOp::sum))>;

}} // namespace joinable::v0

// ---- joinable/device/arena.hpp

namespace joinable { inline namespace v0 {

namespace detail {

void check_alignment(std::size_t alignment);

/// The offset within a page, in bytes, at which the arenas of a rank begin. Elements that are
/// combined have the same offset in the buffers of all ranks. If all buffers began at the start of
/// a page, as large blocks of the heap do, these elements would compete for one set of a
/// first-level cache, which has 8 or 12 lines. The ranks' arenas therefore begin as far apart as a
/// page allows. From 64 ranks on, some ranks share an offset.
[[nodiscard]] constexpr std::size_t page_offset_of(int rank, int size) noexcept {
    constexpr int lines = 64; // of 64 bytes in a page
    int const apart = size < lines ? lines / size : 1;
    return static_cast<std::size_t>(rank * apart % lines) * 64;
}

} // namespace detail

/// Owns zeroed host memory, from the heap or from a communicator. Movable, not copyable. It may
/// outlive the object that made it.
class Arena {
public:
    static constexpr std::size_t default_alignment = 64; ///< a cache line
    /// Takes back `bytes` bytes at `data`. `context` is the one with which the arena was made.
    using Release = void (*)(void* context, std::byte* data, std::size_t bytes) noexcept;

    Arena() = default;
    /// Allocates from the heap. With `page_offset`, a multiple of the alignment, the arena begins
    /// that many bytes after the start of a page of 4096 bytes.
    /// @throws std::bad_alloc; ContractViolation  alignment is not a power of two.
    explicit Arena(
        std::size_t bytes,
        std::size_t alignment = default_alignment,
        std::optional<std::size_t> page_offset = {}
    );
    /// For communicators. Calls `release`, if given, exactly once.
    Arena(std::byte* data, std::size_t bytes, Release release, void* context) noexcept
        : data_{data}, bytes_{bytes}, release_{release}, context_{context} {}
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;
    ~Arena() {
        if (release_ != nullptr) {
            release_(context_, data_, bytes_);
        }
    }

    /// Null if the arena has no bytes.
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    static void free_block(void* block, std::byte*, std::size_t) noexcept {
        ::operator delete(block);
    }

    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
    Release release_ = nullptr;
    void* context_ = nullptr;
};

}} // namespace joinable::v0

// ---- joinable/device/arena.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_alignment(std::size_t alignment) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        throw ContractViolation{
            concat("memory is aligned to a power of two in bytes, but was asked for ", alignment)
        };
    }
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION
Arena::Arena(std::size_t bytes, std::size_t alignment, std::optional<std::size_t> page_offset) {
    detail::check_alignment(alignment);
    if (bytes == 0) {
        return;
    }
    std::size_t const offset = page_offset.value_or(0);
    if (page_offset) {
        alignment = (std::max)(alignment, std::size_t{4096});
    }
    std::size_t room = bytes + alignment + offset;
    if (room < bytes) {
        throw std::bad_alloc{};
    }
    void* const block = ::operator new(room);
    void* start = block;
    std::align(alignment, bytes + offset, start, room);
    std::byte* const data = static_cast<std::byte*>(start) + offset;
    std::memset(data, 0, bytes);
    *this = Arena{data, bytes, &free_block, block};
}

JOINABLE_DEFINITION Arena::Arena(Arena&& other) noexcept
    : data_{std::exchange(other.data_, nullptr)}, bytes_{std::exchange(other.bytes_, 0)},
      release_{std::exchange(other.release_, nullptr)}, context_{other.context_} {}

JOINABLE_DEFINITION Arena& Arena::operator=(Arena&& other) noexcept {
    Arena old{std::move(other)};
    std::swap(data_, old.data_);
    std::swap(bytes_, old.bytes_);
    std::swap(release_, old.release_);
    std::swap(context_, old.context_);
    return *this;
}

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/capabilities.hpp

/// @file
/// One concept for each optional operation of a communicator that moves data or owns memory. All
/// are collective unless stated otherwise. `comm` is an lvalue of `C`, `in` is a ConstBuffer, and
/// `out` and `buffer` are Buffers. `counts` is a std::span<std::size_t const> with each rank's
/// number of elements; it need not outlive the call. Parts lie one after another in rank order.
///
/// ProcessCommunicator models all but RegistersArenas. ThreadCommunicator also lacks
/// AllocatesArena, because its ranks share the heap. SelfCommunicator also lacks SendsAndReceives
/// and Splits.

namespace joinable { inline namespace v0 {

namespace detail {

using Counts = std::span<std::size_t const>;

template <class C>
concept has_all_gather = requires(C& comm, ConstBuffer in, Buffer out, Counts counts) {
    { comm.all_gather(in, out) } -> Work;
    { comm.all_gather(in, out, counts) } -> Work;
};
template <class C>
concept has_reduce_scatter =
    requires(C& comm, ConstBuffer in, Buffer out, ReduceOp op, Counts counts) {
        { comm.reduce_scatter(in, out, op) } -> Work;
        { comm.reduce_scatter(in, out, op, counts) } -> Work;
    };
template <class C>
concept has_reduce = requires(C& comm, Buffer buffer, ReduceOp op, int root) {
    { comm.reduce(buffer, op, root) } -> Work;
};
template <class C>
concept has_gather = requires(C& comm, ConstBuffer in, Buffer out, int root, Counts counts) {
    { comm.gather(in, out, root) } -> Work;
    { comm.gather(in, out, root, counts) } -> Work;
};
template <class C>
concept has_scatter = requires(C& comm, ConstBuffer in, Buffer out, int root, Counts counts) {
    { comm.scatter(in, out, root) } -> Work;
    { comm.scatter(in, out, root, counts) } -> Work;
};
template <class C>
concept has_all_to_all = requires(C& comm, ConstBuffer in, Buffer out, Counts counts) {
    { comm.all_to_all(in, out) } -> Work;
    { comm.all_to_all(in, out, counts, counts) } -> Work;
};
template <class C>
concept has_send = requires(C& comm, ConstBuffer buffer, int to, int tag) {
    { comm.send(buffer, to, tag) } -> Work;
};
template <class C>
concept has_receive = requires(C& comm, Buffer buffer, int from, int tag) {
    { comm.receive(buffer, from, tag) } -> Work;
};
template <class C>
concept has_split = requires(C& comm, int color, int key) {
    { comm.split(color, key) } -> Communicator;
};

template <class C>
concept has_scaled_all_reduce = requires(C& comm, Buffer buffer, ReduceOp op, double factor) {
    { comm.all_reduce(buffer, op, factor) } -> Work;
};
template <class C>
concept has_scaled_reduce_scatter = requires(
    C& comm,
    ConstBuffer in,
    Buffer out,
    ReduceOp op,
    double factor,
    std::span<std::size_t const> counts
) {
    { comm.reduce_scatter(in, out, op, factor) } -> Work;
    { comm.reduce_scatter(in, out, op, factor, counts) } -> Work;
};
template <class C>
concept has_allocate = requires(C& comm, std::size_t bytes, std::size_t alignment) {
    { comm.allocate(bytes, alignment) } -> std::same_as<Arena>;
};
template <class C>
concept has_register_arena = requires(C& comm, Arena const& arena) {
    { comm.register_arena(arena) } -> std::same_as<bool>;
};
template <class C>
concept has_share = requires(C& comm, std::size_t bytes) {
    { comm.share(bytes) } -> std::same_as<Arena>;
};

} // namespace detail

/// A communicator that concatenates one buffer of each rank, in rank order, on every rank.
///
/// | expression                         | result | meaning                                        |
/// |------------------------------------|--------|------------------------------------------------|
/// | `comm.all_gather(in, out)`         | Work   | `out.count == in.count * size()`               |
/// | `comm.all_gather(in, out, counts)` | Work   | rank r has `in.count == counts[r]`; the same   |
/// |                                    |        | counts on every rank                           |
template <class C>
concept AllGathers = Communicator<C> && detail::has_all_gather<C>;

/// A communicator that combines buffers over all ranks and leaves each rank its part.
///
/// | expression                                 | result | meaning                                |
/// |--------------------------------------------|--------|----------------------------------------|
/// | `comm.reduce_scatter(in, out, op)`         | Work   | `in.count == out.count * size()`       |
/// | `comm.reduce_scatter(in, out, op, counts)` | Work   | rank r has `out.count == counts[r]`;   |
/// |                                            |        | the same counts on every rank          |
template <class C>
concept ReduceScatters = Communicator<C> && detail::has_reduce_scatter<C>;

/// A communicator that combines buffers over all ranks and stores the result on one of them.
///
/// | expression                      | result | meaning                                           |
/// |---------------------------------|--------|---------------------------------------------------|
/// | `comm.reduce(buffer, op, root)` | Work   | in place at the root; the others' are not changed |
template <class C>
concept Reduces = Communicator<C> && detail::has_reduce<C>;

/// A communicator that concatenates one buffer of each rank, in rank order, on one rank.
///
/// | expression                           | result | meaning                                      |
/// |--------------------------------------|--------|----------------------------------------------|
/// | `comm.gather(in, out, root)`         | Work   | root: `out.count == in.count * size()`;      |
/// |                                      |        | other ranks ignore `out`                     |
/// | `comm.gather(in, out, root, counts)` | Work   | rank r has `in.count == counts[r]`; only the |
/// |                                      |        | root reads `counts`                          |
template <class C>
concept Gathers = Communicator<C> && detail::has_gather<C>;

/// A communicator that distributes the parts of one rank's buffer to all ranks.
///
/// | expression                            | result | meaning                                     |
/// |---------------------------------------|--------|---------------------------------------------|
/// | `comm.scatter(in, out, root)`         | Work   | root: `in.count == out.count * size()`;     |
/// |                                       |        | other ranks ignore `in`                     |
/// | `comm.scatter(in, out, root, counts)` | Work   | rank r has `out.count == counts[r]`; only   |
/// |                                       |        | the root reads `counts`                     |
template <class C>
concept Scatters = Communicator<C> && detail::has_scatter<C>;

/// A communicator that sends a part of each rank's buffer to each other rank.
///
/// | expression                                         | result | meaning                        |
/// |----------------------------------------------------|--------|--------------------------------|
/// | `comm.all_to_all(in, out)`                         | Work   | equal parts: part r of `in` is |
/// |                                                    |        | part `rank()` of r's `out`     |
/// | `comm.all_to_all(in, out, counts_in, counts_out)`  | Work   | counts_in[r] elements go to r, |
/// |                                                    |        | counts_out[r] come from it     |
template <class C>
concept AllToAlls = Communicator<C> && detail::has_all_to_all<C>;

/// A communicator on which two ranks exchange messages. Not collective.
///
/// | expression                        | result | meaning                                         |
/// |-----------------------------------|--------|-------------------------------------------------|
/// | `comm.send(in, to, tag)`          | Work   | messages with one tag between two ranks stay in |
/// | `comm.receive(buffer, from, tag)` | Work   | order; count and dtype are the same on both     |
template <class C>
concept SendsAndReceives = Communicator<C> && detail::has_send<C> && detail::has_receive<C>;

/// A communicator that can be split into communicators of groups of its ranks.
///
/// | expression               | result       | meaning                                            |
/// |--------------------------|--------------|----------------------------------------------------|
/// | `comm.split(color, key)` | Communicator | blocks; one for the ranks of each color (>= 0),    |
/// |                          |              | ordered by key, then rank; aborting `comm` aborts  |
/// |                          |              | it too                                             |
template <class C>
concept Splits = Communicator<C> && detail::has_split<C>;

/// A communicator that scales each rank's buffer by that rank's factor while it sums. Averaging
/// then needs one pass fewer. This is a separate collective: either all ranks give a factor or none
/// does.
///
/// | expression                              | result | meaning                                   |
/// |-----------------------------------------|--------|-------------------------------------------|
/// | `comm.all_reduce(buffer, op, factor)`   | Work   | sums `factor * buffer` in place; `op` is  |
/// |                                         |        | sum, the dtype is floating-point          |
/// | `C::rounds_factors`                     | bool   | optional, static: whether the factor is   |
/// |                                         |        | rounded to the buffer's dtype. Without it:|
/// |                                         |        | if the communicator moves device memory.  |
/// |                                         |        | Then gradients are scaled before the sum, |
/// |                                         |        | if their device can (Device::can_scale)   |
template <class C>
concept ScalesSums = Communicator<C> && detail::has_scaled_all_reduce<C>;

/// A communicator that scales in the same way when each rank gets a part of the sum.
///
/// | expression                                         | result | meaning                               |
/// |----------------------------------------------------|--------|---------------------------------------|
/// | `comm.reduce_scatter(in, out, op, factor)`         | Work   | like ReduceScatters, but sums         |
/// | `comm.reduce_scatter(in, out, op, factor, counts)` | Work   | `factor * in`; `op` is sum            |
template <class C>
concept ScalesScatteredSums =
    ScalesSums<C> && ReduceScatters<C> && detail::has_scaled_reduce_scatter<C>;

/// A communicator that provides memory whose buffers it moves without copying them first. Not
/// collective. Use make_arena() in code that must also run on other communicators.
///
/// | expression                         | result | meaning                                        |
/// |------------------------------------|--------|------------------------------------------------|
/// | `comm.allocate(bytes, alignment)`  | Arena  | zeroed; alignment is a power of two; may       |
/// |                                    |        | outlive `comm`                                 |
template <class C>
concept AllocatesArena = Communicator<C> && detail::has_allocate<C>;

/// A communicator that moves buffers in its own arenas faster once all ranks have registered them.
/// It may refuse. Allocation stays local, so ranks can first find out whether all of them have the
/// same arena.
///
/// | expression                   | result | meaning                                             |
/// |------------------------------|--------|-----------------------------------------------------|
/// | `comm.register_arena(arena)` | bool   | blocks; `arena` is from `comm.allocate()` and has   |
/// |                              |        | the same size on all ranks, else Mismatch; false on |
/// |                              |        | all ranks: refused, and usable as it is             |
template <class C>
concept RegistersArenas = AllocatesArena<C> && detail::has_register_arena<C>;

/// A communicator whose ranks run on one machine and can share memory. shared_buffer() makes typed
/// elements of it.
///
/// | expression           | result | meaning                                                      |
/// |----------------------|--------|--------------------------------------------------------------|
/// | `comm.share(bytes)`  | Arena  | blocks; the same zeroed memory on every rank, freed when the |
/// |                      |        | last rank destroys its arena; `bytes` is the same on all     |
/// |                      |        | ranks, else Mismatch                                         |
template <class C>
concept SharesMemory = Communicator<C> && detail::has_share<C>;

}} // namespace joinable::v0

// ---- joinable/device/squares.hpp

namespace joinable { inline namespace v0 {

/// A sum of the squares of a tensor's elements, for Device::sum_squares().
struct SquareSum {
    AnyView tensor; ///< of a floating-point dtype
    double* sum;    ///< in the memory of the tensor's device
};

namespace detail {

// The order of a sum of squares, which is the same on every device, and so are the bits. Elements
// count in the order of their indices, the last index changes fastest, wherever they lie in memory.
// The squares of each run of `square_block` elements are summed, then the sums of the runs, both in
// the same way: number i goes to lane i % square_lanes, a lane adds its numbers in order, and the
// upper half of the lanes is added to the lower half until one lane is left.

inline constexpr std::size_t square_lanes = 256;
inline constexpr std::size_t square_block = 8 * square_lanes;

/// The number of runs.
[[nodiscard]] JOINABLE_HOST_DEVICE constexpr std::size_t square_blocks(std::size_t elements
) noexcept {
    return (elements + square_block - 1) / square_block;
}

/// Lane `lane` of the lower half takes its number of the upper half.
JOINABLE_HOST_DEVICE inline void fold_lane(double* lanes, std::size_t half, std::size_t lane) {
    lanes[lane] += lanes[lane + half];
}

/// A square has the same bits whether a compiler fuses it with the following sum or not: that of a
/// float is exact in double.
JOINABLE_HOST_DEVICE inline double square_of(float number) {
    double const wide = static_cast<double>(number);
    return wide * wide;
}
JOINABLE_HOST_DEVICE inline double square_of(double number) {
    double square;
    JOINABLE_ROUNDED_PRODUCT(square, number, number);
    return square;
}

/// Where the elements of a tensor lie, in the order of their indices. Steps are in elements.
struct IndexOrder {
    struct Level {
        std::size_t extent;
        std::size_t step;
    };

    std::uint32_t levels;         ///< at least one
    Level level[max_tensor_rank]; ///< innermost first; neighbours are merged where possible

    IndexOrder(Shape const& extents, Shape const& strides);
    IndexOrder() = default;

    [[nodiscard]] JOINABLE_HOST_DEVICE std::size_t place_of(std::size_t element) const {
        std::size_t place = 0;
        for (std::uint32_t l = 0; l + 1 < levels; ++l) {
            place += element % level[l].extent * level[l].step;
            element /= level[l].extent;
        }
        return place + element * level[levels - 1].step;
    }
};

/// The sum for a tensor in host memory.
[[nodiscard]] double sum_of_squares(AnyView const& tensor);

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/device/squares.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <type_traits>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION IndexOrder::IndexOrder(Shape const& extents, Shape const& strides)
    : levels{0}, level{} {
    for (std::size_t d = extents.size(); d-- > 0;) {
        if (extents[d] == 1) {
            continue;
        }
        if (levels != 0 && level[levels - 1].extent * level[levels - 1].step == strides[d]) {
            level[levels - 1].extent *= extents[d];
        } else {
            level[levels++] = {extents[d], strides[d]};
        }
    }
    if (levels == 0) { // a single element
        level[levels++] = {1, 1};
    }
}

/// Numbers that are added in lanes.
struct SquareLanes {
    std::array<double, square_lanes> sums{};

    [[nodiscard]] double total() noexcept {
        for (std::size_t half = square_lanes / 2; half != 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) {
                fold_lane(sums.data(), half, lane);
            }
        }
        return sums.front();
    }
};

template <class T>
[[nodiscard]] double sum_of_squares_as(T const* first, std::size_t count, IndexOrder const& order) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    SquareLanes all;
    SquareLanes block;
    std::size_t blocks = 0;
    auto const close = [&] {
        all.sums[blocks++ % square_lanes] += block.total();
        block = {};
    };
    auto const [run, step] = order.level[0];
    std::size_t done = 0;
    for (std::size_t begin = 0; begin < count; begin += run) {
        T const* from = first + order.place_of(begin);
        for (std::size_t left = run; left != 0;) {
            std::size_t const lane = done % square_lanes;
            std::size_t const some = (std::min)(left, square_lanes - lane);
            for (std::size_t i = 0; i < some; ++i) {
                block.sums[lane + i] += square_of(static_cast<Wide>(from[i * step]));
            }
            from += some * step;
            left -= some;
            done += some;
            if (done % square_block == 0) {
                close();
            }
        }
    }
    if (done % square_block != 0) {
        close();
    }
    return all.total();
}

JOINABLE_DEFINITION double sum_of_squares(AnyView const& tensor) {
    std::size_t const count = tensor.numel();
    IndexOrder const order{tensor.extents(), tensor.strides()};
    switch (tensor.dtype()) {
    case DType::f16:
        return sum_of_squares_as(static_cast<Half const*>(tensor.data()), count, order);
    case DType::bf16:
        return sum_of_squares_as(static_cast<BFloat16 const*>(tensor.data()), count, order);
    case DType::f64:
        return sum_of_squares_as(static_cast<double const*>(tensor.data()), count, order);
    default: return sum_of_squares_as(static_cast<float const*>(tensor.data()), count, order);
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/update.hpp

namespace joinable { inline namespace v0 {

/// Elements that an update rule steps, in the memory of a device. No two updates of one call have
/// memory in common.
struct DeviceUpdate {
    void* values;          ///< of `dtype`
    void const* gradients; ///< of `dtype`; may be `values`
    void* masters;         ///< of f32, for values of 16 bits; null: the values are stepped
    void* state;           ///< the first array, of the type that is computed in; null: no state
    std::size_t stride;    ///< from one array of the state to the next, in elements
    std::size_t count;
    std::uint64_t step; ///< of this parameter, counted from 1
    DType dtype;
};

/// An update rule whose class a device does not know.
struct DeviceRule {
    void const* id;       ///< equal for equal classes, within a program or shared object
    void const* settings; ///< the rule
    std::size_t bytes;    ///< of the rule, which is trivially copyable
    void (*on_host)(void const* settings, DeviceUpdate const& update); ///< steps in host memory
};

namespace detail {

/// Its address is DeviceRule::id.
template <class Rule>
inline char rule_id = 0;

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/device/device.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// A range of bytes and its new position.
struct Section {
    std::size_t from;
    std::size_t to;
    std::size_t bytes;
    std::size_t position; ///< how many sections come before it
};

} // namespace detail

/// A kind of memory and the operations on it. Buckets use the device of the gradients. Operations
/// run in the order of submissions, possibly asynchronously. Operations of one submission are
/// independent: none reads or writes memory that another one writes. One thread at a time may use
/// an object.
class Device {
public:
    Device() = default;
    Device(Device const&) = delete;
    Device& operator=(Device const&) = delete;
    virtual ~Device() = default;

    /// The device whose memory this is.
    [[nodiscard]] virtual DeviceId id() const noexcept = 0;
    /// Zeroed memory; may outlive the device. `alignment` is a power of two.
    [[nodiscard]] virtual Arena allocate(std::size_t bytes, std::size_t alignment) = 0;

    // Operations like the functions of the same names in device/copy.hpp. They may be deferred
    // until submit(), so views must stay valid until then.
    virtual void copy(AnyView const& from, AnyView const& to) = 0;
    virtual void scale_copy(AnyView const& from, double factor, AnyView const& to) = 0;
    virtual void fill_zero(AnyView const& to) = 0;
    /// Whether scale_copy() takes other factors than 1.
    [[nodiscard]] virtual bool can_scale() const noexcept = 0;

    /// Starts the operations requested so far, after all that the engine has requested of this
    /// memory.
    virtual void submit() = 0;
    /// Submits. Later requests of the engine run after these operations.
    virtual void finish() = 0;

    /// Whether update() can step by this rule.
    [[nodiscard]] virtual bool can_update(DeviceRule const& rule) const noexcept = 0;
    /// Submits, then steps elements by a rule. `rule` and `updates` may change when this returns.
    virtual void update(DeviceRule const& rule, std::span<DeviceUpdate const> updates) = 0;

    /// Whether sum_squares() works.
    [[nodiscard]] virtual bool can_sum_squares() const noexcept = 0;
    /// Submits, then adds the squares of each tensor's elements to a number, in double, in the order
    /// of device/squares.hpp: all devices compute the same bits. No two numbers are the same one.
    /// `sums` may change when this returns.
    virtual void sum_squares(std::span<SquareSum const> sums) = 0;

    /// Submits, then moves sections within an arena: see detail::permute_sections.
    virtual void permute(Arena const& arena, std::vector<detail::Section>& sections) = 0;
    /// Zeroed host memory from which upload() need not wait. It may outlive the device.
    [[nodiscard]] virtual Arena allocate_staging(std::size_t bytes) = 0;
    /// Copies from the host, in the order of submissions. `from` must stay valid until a later
    /// download() has returned.
    virtual void upload(void const* from, void* to, std::size_t bytes) = 0;
    /// Copies to the host, in the order of submissions; blocks until it is done.
    virtual void download(void const* from, void* to, std::size_t bytes) = 0;
};

namespace detail {

[[nodiscard]] inline bool is_on_host(Device const& device) noexcept {
    return device.id() == DeviceId{};
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/device/detail/permute_sections.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Exchanges two ranges that do not overlap, through a buffer on the stack.
void swap_bytes(std::byte* a, std::byte* b, std::size_t bytes) noexcept;

/// Exchanges two neighbours, `left` and `right` bytes long, by swapping blocks (Gries and Mills,
/// "Swapping sections", 1981): each byte is written at most twice, all in long runs.
void rotate_bytes(std::byte* first, std::size_t left, std::size_t right) noexcept;

[[nodiscard]] std::size_t bytes_of(Section const* sections, std::size_t count) noexcept;

/// Moves the sections with a position below `pivot` before the others, with their bytes. The order
/// within both groups is kept. `base` is the address of the first section. Returns the number of
/// sections before the others.
std::size_t partition_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t pivot
) noexcept;

/// Sorts adjacent sections by position, with their bytes. `first` is the lowest position; the
/// positions have no gaps.
void sort_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t first = 0
) noexcept;

/// Moves sections within one block of memory, without another block. `sections` are in the order of
/// `from`. There may be gaps between them, whose contents are lost. Complexity: linear in the bytes
/// if the order stays the same; else at most that times the square of the logarithm of the number
/// of sections.
void permute_sections(std::byte* memory, std::vector<Section>& sections) noexcept;

}}} // namespace joinable::v0::detail

// ---- joinable/device/detail/permute_sections.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void swap_bytes(std::byte* a, std::byte* b, std::size_t bytes) noexcept {
    std::array<std::byte, 4096> buffer;
    while (bytes != 0) {
        std::size_t const n = (std::min)(bytes, buffer.size());
        std::memcpy(buffer.data(), a, n);
        std::memcpy(a, b, n);
        std::memcpy(b, buffer.data(), n);
        a += n;
        b += n;
        bytes -= n;
    }
}

JOINABLE_DEFINITION void
rotate_bytes(std::byte* first, std::size_t left, std::size_t right) noexcept {
    while (left != 0 && right != 0) {
        std::size_t const n = (std::min)(left, right);
        swap_bytes(first, first + left, n);
        first += n;
        (left <= right ? right : left) -= n;
    }
}

JOINABLE_DEFINITION std::size_t bytes_of(Section const* sections, std::size_t count) noexcept {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
        bytes += sections[i].bytes;
    }
    return bytes;
}

JOINABLE_DEFINITION std::size_t partition_sections(
    std::byte* base, Section* sections, std::size_t count, std::size_t pivot
) noexcept {
    if (count < 2) {
        return count == 1 && sections->position < pivot ? 1 : 0;
    }
    std::size_t const half = count / 2;
    Section* const high = sections + half;
    std::size_t const low_bytes = bytes_of(sections, half);
    std::size_t const low_front = partition_sections(base, sections, half, pivot);
    std::size_t const high_front = partition_sections(base + low_bytes, high, count - half, pivot);
    std::size_t const kept = bytes_of(sections, low_front);
    rotate_bytes(base + kept, low_bytes - kept, bytes_of(high, high_front));
    rotate_bytes(
        reinterpret_cast<std::byte*>(sections + low_front),
        (half - low_front) * sizeof(Section),
        high_front * sizeof(Section)
    );
    return low_front + high_front;
}

JOINABLE_DEFINITION void
sort_sections(std::byte* base, Section* sections, std::size_t count, std::size_t first) noexcept {
    std::size_t sorted = 0;
    while (sorted < count && sections[sorted].position == first + sorted) {
        ++sorted;
    }
    if (sorted < count) {
        std::size_t const half = count / 2;
        partition_sections(base, sections, count, first + half);
        sort_sections(base, sections, half, first);
        sort_sections(base + bytes_of(sections, half), sections + half, count - half, first + half);
    }
}

JOINABLE_DEFINITION void
permute_sections(std::byte* memory, std::vector<Section>& sections) noexcept {
    std::size_t end = 0;
    for (Section const& section : sections) { // closes the gaps
        std::memmove(memory + end, memory + section.from, section.bytes);
        end += section.bytes;
    }
    sort_sections(memory, sections.data(), sections.size());
    for (std::size_t i = sections.size(); i-- > 0;) { // opens the new ones
        end -= sections[i].bytes;
        std::memmove(memory + sections[i].to, memory + end, sections[i].bytes);
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/host.hpp

namespace joinable { inline namespace v0 {

/// The host's memory. Every operation is complete when its call returns.
class HostDevice final : public Device {
public:
    [[nodiscard]] DeviceId id() const noexcept override { return {}; }
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        return Arena{bytes, alignment};
    }
    void copy(AnyView const& from, AnyView const& to) override { joinable::copy(from, to); }
    void scale_copy(AnyView const& from, double factor, AnyView const& to) override {
        joinable::scale_copy(from, factor, to);
    }
    void fill_zero(AnyView const& to) override { joinable::fill_zero(to); }
    [[nodiscard]] bool can_scale() const noexcept override { return true; }
    void submit() override {}
    void finish() override {}
    [[nodiscard]] bool can_update(DeviceRule const&) const noexcept override { return true; }
    void update(DeviceRule const& rule, std::span<DeviceUpdate const> updates) override {
        for (DeviceUpdate const& update : updates) {
            rule.on_host(rule.settings, update);
        }
    }
    [[nodiscard]] bool can_sum_squares() const noexcept override { return true; }
    void sum_squares(std::span<SquareSum const> sums) override {
        for (SquareSum const& one : sums) {
            *one.sum += detail::sum_of_squares(one.tensor);
        }
    }
    void permute(Arena const& arena, std::vector<detail::Section>& sections) override {
        detail::permute_sections(arena.data(), sections);
    }
    [[nodiscard]] Arena allocate_staging(std::size_t bytes) override { return Arena{bytes}; }
    void upload(void const* from, void* to, std::size_t bytes) override {
        std::memcpy(to, from, bytes);
    }
    void download(void const* from, void* to, std::size_t bytes) override {
        std::memcpy(to, from, bytes);
    }
};

namespace detail {

/// The one host device; it has no state. It is local to a function: a file that includes this
/// header without using a device then contains neither the object nor the kernels that its table
/// names.
[[nodiscard]] inline HostDevice& the_host() noexcept {
    static HostDevice host;
    return host;
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/communicator/device_of.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Communicators of host memory are not asked; they need no device_memory().
template <class C>
concept gives_device = requires(C& comm) {
    { comm.device_memory() } -> std::convertible_to<Device&>;
};

/// The device whose memory a communicator moves.
template <Communicator Comm>
[[nodiscard]] Device& device_of(Comm& comm) noexcept {
    if constexpr (reduces_host_memory<Comm>) {
        (void)comm;
        return the_host();
    } else {
        static_assert(
            gives_device<Comm>,
            "a communicator that moves device memory needs a member 'device_type& "
            "device_memory()', "
            "where device_type derives from joinable::Device; CudaDevice is in <joinable/cuda.hpp>"
        );
        return comm.device_memory();
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/make_arena.hpp

namespace joinable { inline namespace v0 {

/// Allocates zeroed memory for buffers that go through `comm`. If `comm` models AllocatesArena, it
/// provides memory that it need not copy. Otherwise the memory is from the heap or the device.
/// Local.
template <Communicator Comm>
[[nodiscard]] Arena
make_arena(Comm& comm, std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
    if constexpr (AllocatesArena<Comm>) {
        return comm.allocate(bytes, alignment);
    } else if constexpr (detail::gives_device<Comm>) {
        return comm.device_memory().allocate(bytes, alignment);
    } else {
        if (alignment > Arena::default_alignment) { // it may not start at a multiple of it
            return Arena{bytes, alignment};
        }
        return Arena{bytes, alignment, detail::page_offset_of(comm.rank(), comm.size())};
    }
}

}} // namespace joinable::v0

// ---- joinable/communicator/collectives.hpp

/// @file
/// The collectives over tensors instead of buffers. They are collective, as the members that they
/// call are. Each returns the communicator's Work. The tensors must live until that work has been
/// waited for. All throw ContractViolation before any data moves if a tensor is not contiguous.
/// Elements travel in memory order, so gathering column-major tensors places their columns side by
/// side.

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
consteval void check_written_tensor() {
    static_assert(
        !Tensor<T> || WritableTensor<T>,
        "a collective writes this tensor: give it one whose data() is a pointer to non-const"
    );
    (void)models_tensor<T>();
}

template <class T>
concept communicator_to_use =
    std::is_lvalue_reference_v<T> && Communicator<std::remove_reference_t<T>>;

/// Arguments among which is a communicator, but not in first place, or one that is const or
/// temporary.
template <class First, class... Rest>
concept misplaces_communicator =
    !communicator_to_use<First> &&
    (Communicator<std::remove_cvref_t<First>> || ... || Communicator<std::remove_cvref_t<Rest>>);

/// A communicator, and arguments among which is a pointer: it is no tensor, and its count is one argument
/// too many.
template <class First, class... Rest>
concept gives_pointers =
    communicator_to_use<First> && (std::is_pointer_v<std::remove_cvref_t<Rest>> || ...);

template <class First, class... Rest>
concept misuses_collective =
    misplaces_communicator<First, Rest...> || gives_pointers<First, Rest...>;

/// Explains them. Returns what the caller may wait for.
template <class First, class... Rest>
[[nodiscard]] CompletedWork explain_arguments() {
    static_assert(
        !misplaces_communicator<First, Rest...>,
        "a collective takes the communicator first, which is an object with a name and not const, as in "
        "all_reduce(comm, tensor)"
    );
    static_assert(
        !gives_pointers<First, Rest...>,
        "a collective takes tensors; give a pointer and its count as a span, as in all_reduce(comm, "
        "std::span{pointer, count})"
    );
    return {};
}

} // namespace detail

/// Combines `tensor` over all ranks, in place. The same count and dtype on every rank.
template <Communicator Comm, class T>
[[nodiscard]] auto all_reduce(Comm& comm, T&& tensor, ReduceOp op = ReduceOp::sum) {
    detail::check_written_tensor<T>();
    return comm.all_reduce(joinable::to_buffer(tensor), op);
}

/// Copies the tensor of `root` to all ranks. The same count and dtype on every rank.
template <Communicator Comm, class T>
[[nodiscard]] auto broadcast(Comm& comm, T&& tensor, int root) {
    detail::check_written_tensor<T>();
    return comm.broadcast(joinable::to_buffer(tensor), root);
}
/// Explains what is missing.
template <Communicator Comm, class T>
[[nodiscard]] auto broadcast(Comm& comm, T&& tensor) {
    static_assert(
        !Communicator<Comm>,
        "broadcast: say from which rank the tensor is copied, as in broadcast(comm, tensor, 0)"
    );
    return joinable::broadcast(comm, tensor, 0);
}

/// Combines `tensor` over all ranks, in place at `root`. The tensors of the other ranks do not
/// change.
template <Communicator Comm, class T>
[[nodiscard]] auto reduce(Comm& comm, T&& tensor, ReduceOp op, int root) {
    detail::check_written_tensor<T>();
    static_assert(
        Reduces<Comm>,
        "reduce: this communicator has no member 'Work reduce(Buffer, ReduceOp, int root)'; add "
        "it, or use one that models Reduces"
    );
    return comm.reduce(joinable::to_buffer(tensor), op, root);
}

/// Concatenates the tensors of all ranks, in rank order, on every rank: `out` has size() times the
/// elements of `in`. With `counts`, rank r contributes counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto all_gather(Comm& comm, In const& in, Out&& out, Counts const&... counts) {
    (void)models_tensor<In>();
    detail::check_written_tensor<Out>();
    static_assert(
        AllGathers<Comm>,
        "all_gather: this communicator has no member 'Work all_gather(ConstBuffer in, Buffer "
        "out)' without and with counts; add it, or use one that models AllGathers"
    );
    return comm.all_gather(
        joinable::to_const_buffer(in), joinable::to_buffer(out), detail::Counts{counts}...
    );
}

/// Combines `in` over all ranks. Rank r receives the part that starts at r * numel(out): `in` has
/// size() times the elements of `out`. With `counts`, rank r receives counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto reduce_scatter(
    Comm& comm, In const& in, Out&& out, ReduceOp op = ReduceOp::sum, Counts const&... counts
) {
    (void)models_tensor<In>();
    detail::check_written_tensor<Out>();
    static_assert(
        ReduceScatters<Comm>,
        "reduce_scatter: this communicator has no member 'Work reduce_scatter(ConstBuffer in, "
        "Buffer out, ReduceOp)' without and with counts; add it, or use one that models "
        "ReduceScatters"
    );
    return comm.reduce_scatter(
        joinable::to_const_buffer(in), joinable::to_buffer(out), op, detail::Counts{counts}...
    );
}

/// Concatenates the tensors of all ranks, in rank order, in `out` of the root. Other ranks ignore
/// `out`. With `counts`, rank r contributes counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto gather(Comm& comm, In const& in, Out&& out, int root, Counts const&... counts) {
    (void)models_tensor<In>();
    detail::check_written_tensor<Out>();
    static_assert(
        Gathers<Comm>,
        "gather: this communicator has no member 'Work gather(ConstBuffer in, Buffer out, int "
        "root)' without and with counts; add it, or use one that models Gathers"
    );
    return comm.gather(
        joinable::to_const_buffer(in), joinable::to_buffer(out), root, detail::Counts{counts}...
    );
}

/// Distributes the parts of the root's `in` to `out` of all ranks. Other ranks ignore `in`. With
/// `counts`, rank r receives counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto scatter(Comm& comm, In const& in, Out&& out, int root, Counts const&... counts) {
    (void)models_tensor<In>();
    detail::check_written_tensor<Out>();
    static_assert(
        Scatters<Comm>,
        "scatter: this communicator has no member 'Work scatter(ConstBuffer in, Buffer out, int "
        "root)' without and with counts; add it, or use one that models Scatters"
    );
    return comm.scatter(
        joinable::to_const_buffer(in), joinable::to_buffer(out), root, detail::Counts{counts}...
    );
}

/// Sends part r of `in` to rank r, and receives part r of `out` from it. Parts differ in size if
/// the counts of `in` and of `out` are given.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto all_to_all(Comm& comm, In const& in, Out&& out, Counts const&... counts) {
    (void)models_tensor<In>();
    detail::check_written_tensor<Out>();
    static_assert(
        AllToAlls<Comm>,
        "all_to_all: this communicator has no member 'Work all_to_all(ConstBuffer in, Buffer "
        "out)' without and with counts; add it, or use one that models AllToAlls"
    );
    static_assert(
        sizeof...(Counts) == 0 || sizeof...(Counts) == 2,
        "all_to_all takes the counts of the input and of the output, or neither"
    );
    return comm.all_to_all(
        joinable::to_const_buffer(in), joinable::to_buffer(out), detail::Counts{counts}...
    );
}

/// Not collective. Sends `tensor` to rank `to`, which receives it with the same tag.
template <Communicator Comm, class In>
[[nodiscard]] auto send(Comm& comm, In const& tensor, int to, int tag = 0) {
    (void)models_tensor<In>();
    static_assert(
        SendsAndReceives<Comm>,
        "send: this communicator has no members 'Work send(ConstBuffer, int to, int tag)' and "
        "'Work receive(Buffer, int from, int tag)'; add them, or use one that models "
        "SendsAndReceives"
    );
    return comm.send(joinable::to_const_buffer(tensor), to, tag);
}

/// Not collective. Receives the tensor that rank `from` sends with the same tag, count and dtype.
template <Communicator Comm, class Out>
[[nodiscard]] auto receive(Comm& comm, Out&& tensor, int from, int tag = 0) {
    detail::check_written_tensor<Out>();
    static_assert(
        SendsAndReceives<Comm>,
        "receive: this communicator has no members 'Work send(ConstBuffer, int to, int tag)' and "
        "'Work receive(Buffer, int from, int tag)'; add them, or use one that models "
        "SendsAndReceives"
    );
    return comm.receive(joinable::to_buffer(tensor), from, tag);
}

/// @cond
// Each explains a call whose communicator is misplaced, const or temporary, or that gives pointers.
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto all_reduce(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto broadcast(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto reduce(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto all_gather(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto reduce_scatter(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto gather(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto scatter(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto all_to_all(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto send(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
template <class First, class... Rest>
    requires detail::misuses_collective<First, Rest...>
[[nodiscard]] auto receive(First&&, Rest&&...) {
    return detail::explain_arguments<First, Rest...>();
}
/// @endcond

}} // namespace joinable::v0

// ---- joinable/detail/hash.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// FNV-1a with 64 bits, the same on every machine. Two inputs collide by accident once in 2^64;
/// collisions on purpose are easy.
class Hash {
public:
    constexpr Hash& add(std::string_view bytes) noexcept {
        for (char const byte : bytes) {
            add_byte(static_cast<unsigned char>(byte));
        }
        return *this;
    }
    constexpr Hash& add(std::uint64_t number) noexcept {
        for (int shift = 0; shift < 64; shift += 8) {
            add_byte((number >> shift) & 0xffU);
        }
        return *this;
    }
    [[nodiscard]] constexpr std::uint64_t value() const noexcept { return value_; }

private:
    constexpr void add_byte(std::uint64_t byte) noexcept {
        value_ = (value_ ^ byte) * 0x100'0000'01b3U;
    }

    std::uint64_t value_ = 0xcbf2'9ce4'8422'2325U;
};

}}} // namespace joinable::v0::detail

// ---- joinable/agreement/agreement_list.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class V>
inline constexpr bool is_optional = false;
template <class V>
inline constexpr bool is_optional<std::optional<V>> = true;

template <class V>
using element_of = std::remove_cvref_t<decltype(*std::begin(std::declval<V const&>()))>;

/// Whether AgreementList can hold a value: a number, an enumerator, a string, or a range or an
/// optional of these.
template <class V>
consteval bool is_agreeable() {
    if constexpr (std::is_arithmetic_v<V> || std::is_enum_v<V> ||
                  std::is_convertible_v<V const&, std::string_view>) {
        return true;
    } else if constexpr (is_optional<V>) {
        return is_agreeable<typename V::value_type>();
    } else if constexpr (requires { typename element_of<V>; }) {
        if constexpr (!std::is_same_v<element_of<V>, V>) { // a path's element is a path
            return is_agreeable<element_of<V>>();
        }
    }
    return false;
}

inline std::string in_quotes(std::string_view string) {
    std::string text = "\"";
    for (char const letter : string) {
        text.append(letter == '"' || letter == '\\' ? "\\" : "") += letter;
    }
    return text + '"';
}

/// A text that no other value of the type has. In ranges and optionals, strings are quoted.
template <class V>
std::string agreed_text(V const& value, bool is_inside = false) {
    if constexpr (std::is_same_v<V, bool>) {
        return value ? "true" : "false";
    } else if constexpr (std::is_enum_v<V>) {
        return agreed_text(static_cast<std::underlying_type_t<V>>(value));
    } else if constexpr (std::is_floating_point_v<V>) {
        std::array<char, 64> text{}; // the shortest text that reads back as the number
        return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
    } else if constexpr (std::is_integral_v<V>) {
        return std::to_string(value);
    } else if constexpr (std::is_convertible_v<V const&, std::string_view>) {
        return is_inside ? in_quotes(value) : std::string{std::string_view{value}};
    } else if constexpr (is_optional<V>) {
        return value ? agreed_text(*value, true) : "no value";
    } else {
        std::string text;
        for (auto const& element : value) {
            text += text.empty() ? "" : ", ";
            text += agreed_text<element_of<V>>(element, true);
        }
        return "[" + text + "]";
    }
}

/// What an agreed value is in memory: an enumerator as its number.
enum class AgreedType : std::uint8_t {
    other,
    boolean,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
    f32,
    f64
};
template <class V>
consteval AgreedType agreed_type() {
    if constexpr (std::is_same_v<V, bool>) {
        return AgreedType::boolean;
    } else if constexpr (std::is_enum_v<V>) {
        return agreed_type<std::underlying_type_t<V>>();
    } else if constexpr (std::is_same_v<V, float>) {
        return AgreedType::f32;
    } else if constexpr (std::is_same_v<V, double>) {
        return AgreedType::f64;
    } else if constexpr (std::is_integral_v<V> && sizeof(V) <= 8) {
        constexpr int first = std::is_signed_v<V> ? static_cast<int>(AgreedType::i8)
                                                  : static_cast<int>(AgreedType::u8);
        return static_cast<AgreedType>(first + std::countr_zero(sizeof(V)));
    } else {
        return AgreedType::other;
    }
}

} // namespace detail

/// The labels and values that must be the same on all ranks, in the order in which they are
/// compared. A participant lists what its ranks must share in
/// `void agree_on(AgreementList& list) const`; a guard calls it when it is entered. An item
/// consists of its two texts, and its hash follows from them.
class AgreementList {
public:
    /// `value` is a number, an enumerator, a string, or a range or an optional of these.
    /// Floating-point numbers are compared by their bits, except for NaNs.
    template <class V>
    void add(std::string_view label, V const& value) {
        static_assert(
            detail::is_agreeable<V>(),
            "AgreementList: expected a number, an enumerator, a string, or a range or an optional "
            "of these"
        );
        items_.push_back({title_ + std::string{label}, detail::agreed_text(value)});
        places_.push_back({&value, detail::agreed_type<V>()});
    }

    /// The labels of the following items begin with `title`, such as "options differ: ".
    void begin_section(std::string title) { title_ = std::move(title); }

    struct Item {
        std::string label;
        std::string value;
    };
    [[nodiscard]] std::vector<Item> const& items() const noexcept { return items_; }

    /// Where the value of an item was when it was added. A checkpoint sets members there.
    struct Place {
        void const* at;
        detail::AgreedType type;
    };
    [[nodiscard]] std::vector<Place> const& places() const noexcept { return places_; }

    /// The hash of an item; 0 beyond the last one.
    [[nodiscard]] std::uint64_t hash(std::size_t i) const noexcept {
        if (i >= items_.size()) {
            return 0;
        }
        auto const& [label, value] = items_[i];
        detail::Hash const hash = detail::Hash{}.add(label).add(value).add(value.size());
        return (std::max)(hash.value(), std::uint64_t{1});
    }
    /// For each item the hash of it and all items after it, a function of its hash and of the next
    /// one's, and 0 at the end.
    [[nodiscard]] std::vector<std::uint64_t> hashes_from() const {
        std::vector<std::uint64_t> hashes(items_.size() + 1);
        for (std::size_t i = items_.size(); i-- > 0;) {
            hashes[i] = chained(i, hashes[i + 1]);
        }
        return hashes;
    }
    /// One of these; 0 beyond the last item. Allocates nothing.
    [[nodiscard]] std::uint64_t hash_from(std::size_t first) const noexcept {
        std::uint64_t rest = 0;
        for (std::size_t i = items_.size(); i > first; --i) {
            rest = chained(i - 1, rest);
        }
        return rest;
    }

private:
    [[nodiscard]] std::uint64_t chained(std::size_t i, std::uint64_t rest) const noexcept {
        return detail::Hash{}.add(hash(i)).add(rest).value();
    }

    std::string title_;
    std::vector<Item> items_;
    std::vector<Place> places_; ///< one for each item
};

}} // namespace joinable::v0

// ---- joinable/hook/join_hook.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class H>
concept has_main_hook_of_round = requires(H& hook, Round const& round) { hook.main_hook(round); };
template <class H>
concept has_main_hook = has_main_hook_of_round<H> || requires(H& hook) { hook.main_hook(); };
template <class H>
concept has_post_hook_of_result =
    requires(H& hook, JoinResult const& result) { hook.post_hook(result); };
template <class H>
concept has_end_hook = requires(H& hook) { hook.end_hook(); } || requires { &H::end_hook; };
template <class H>
concept has_post_hook = has_post_hook_of_result<H> || requires(H& hook) { hook.post_hook(bool{}); };
template <class H>
concept names_main_hook = requires { &H::main_hook; }; // with any parameters
template <class H>
concept names_post_hook = requires { &H::post_hook; };
template <class H>
concept names_takes_part = requires { &H::takes_part; };
template <class H>
concept has_takes_part = requires(Round const& round) {
    { H::takes_part(round) } -> std::convertible_to<bool>;
};
template <class H>
inline constexpr bool gives_notice = requires { requires H::gives_notice; };

} // namespace detail

/// What a joined rank runs in place of a participant.
///
/// `hook` is an lvalue of `H`. It is constructed in place and need not be movable.
/// | expression                                | meaning                                          |
/// |-------------------------------------------|--------------------------------------------------|
/// | `hook.main_hook()` or                     | runs the collectives of one round, the same and  |
/// | `hook.main_hook(round)`                   | in the same order as the active ranks do         |
/// | `hook.post_hook(is_last_joiner)` or       | runs once on every rank, when all have joined    |
/// | `hook.post_hook(result)`                  | or the guard was stopped                         |
/// | `hook.end_hook()` (optional)              | local; runs once after the post hooks of all     |
/// |                                           | participants                                     |
/// | `H::takes_part(round)` (optional, static) | whether it takes part in the round; may read     |
/// |                                           | only number, phase and will_sync of the Round    |
/// | `H::gives_notice` (optional, static bool) | its participant's notification carries a notice, |
/// |                                           | so it must be the first of a round               |
///
/// hook/ordering.hpp describes where it runs among other hooks.
template <class H>
concept JoinHook = detail::has_main_hook<H> && detail::has_post_hook<H>;

/// Says in one sentence why a class is not a JoinHook.
template <class H>
consteval bool models_join_hook() {
    static_assert(
        detail::has_main_hook<H> || !detail::names_main_hook<H>,
        "JoinHook: main_hook cannot be called; its parameters must be 'void main_hook()' or "
        "'void main_hook(Round const&)'"
    );
    static_assert(
        detail::has_post_hook<H> || !detail::names_post_hook<H>,
        "JoinHook: post_hook cannot be called; its parameters must be "
        "'void post_hook(bool is_last_joiner)' or 'void post_hook(JoinResult const&)'"
    );
    static_assert(
        detail::has_takes_part<H> || !detail::names_takes_part<H>,
        "JoinHook: takes_part cannot be asked; declare it 'static bool takes_part(Round const&)'"
    );
    static_assert(
        detail::has_main_hook<H> || detail::names_main_hook<H>,
        "JoinHook: expected a member 'void main_hook()' or 'void main_hook(Round const&)'"
    );
    static_assert(
        detail::has_post_hook<H> || detail::names_post_hook<H>,
        "JoinHook: expected a member 'void post_hook(bool is_last_joiner)' or "
        "'void post_hook(JoinResult const&)'"
    );
    return JoinHook<H>;
}

}} // namespace joinable::v0

// ---- joinable/hook/keywords.hpp

namespace joinable { inline namespace v0 {

/// One `keyword = value`, as given to a guard.
template <class K>
struct KeywordArgument {
    typename K::value_type value;
};

namespace detail {

/// Refuses silent changes of meaning: a flag takes only flags, and a whole number takes no
/// fraction.
template <class From, class To>
concept keyword_value = std::convertible_to<From, To> &&
                        std::same_as<std::remove_cvref_t<From>, bool> == std::same_as<To, bool> &&
                        !(std::floating_point<std::remove_cvref_t<From>> && std::integral<To>);

/// @throws ContractViolation  `To` cannot hold the number.
template <class To, class From>
constexpr void check_keyword_value(From const& value) {
    if constexpr (std::integral<From> && std::integral<To> && !std::same_as<To, bool>) {
        auto const held = static_cast<To>(value); // std::in_range refuses characters
        if (static_cast<From>(held) != value || (held > To{}) != (value > From{})) {
            throw ContractViolation{concat(
                "a keyword whose value is a whole number ",
                std::signed_integral<To> ? "of " : "without sign of ",
                8 * sizeof(To),
                " bits was given ",
                value,
                "; give it a number that fits, or make its type larger"
            )};
        }
    }
}

template <class K>
concept compares_values = requires(AgreementList& list, typename K::value_type const& value) {
    K::agree_on(list, value);
};
template <class K>
inline constexpr bool is_per_rank = requires { requires K::per_rank; };

} // namespace detail

/// The base of a keyword object `K` whose value is a `V`:
/// @code
/// inline constexpr struct sync_max_count_t : keyword<sync_max_count_t, bool> {
///     using keyword::operator=;
/// } sync_max_count{};
/// @endcode
/// `sync_max_count = true` is then an argument of `Join`, and `args.get(sync_max_count, false)`
/// reads it in `join_hook`. The value must be the same on every rank or given on none, unless `K`
/// has a `static constexpr bool per_rank = true`. Numbers, enumerators, strings, ranges and
/// optionals of these are compared. For another type `K` needs a
/// `static void agree_on(AgreementList& list, V const& value)`.
template <class K, class V>
struct keyword {
    using value_type = V;

    // NOLINTNEXTLINE(misc-unconventional-assign-operator): spells an argument, assigns nothing
    constexpr KeywordArgument<K> operator=(detail::keyword_value<V> auto&& value) const {
        detail::check_keyword_value<V>(value);
        return {static_cast<V>(std::forward<decltype(value)>(value))};
    }
};

/// The keywords that a joinable accepts: `using join_keywords = keywords<sync_max_count_t>;`.
template <class... Ks>
struct keywords {};

/// The keyword values that `join_hook` receives. The type is the same whichever keywords were
/// given, so the hook's type does not depend on the call.
template <class Keywords>
class arguments;

template <class... Ks>
class arguments<keywords<Ks...>> {
public:
    arguments() = default;

    /// The value given for a keyword, or `otherwise`.
    template <class K>
    [[nodiscard]] constexpr typename K::value_type
    get(K const&, typename K::value_type otherwise) const {
        static_assert(
            (std::same_as<K, Ks> || ...),
            "arguments::get: this keyword is not in the joinable's join_keywords; add it there"
        );
        auto const& given = std::get<Slot<K>>(values_).value;
        return given ? *given : otherwise;
    }

    /// Stores a value if this joinable accepts the keyword, otherwise does nothing.
    template <class K>
    constexpr void set(KeywordArgument<K> const& argument) {
        if constexpr ((std::same_as<K, Ks> || ...)) {
            std::get<Slot<K>>(values_).value = argument.value;
        }
    }

    /// Calls `visit(std::type_identity<K>{}, value)` for each keyword; the value is an optional.
    template <class Visit>
    constexpr void for_each(Visit const& visit) const {
        (visit(std::type_identity<Ks>{}, std::get<Slot<Ks>>(values_).value), ...);
    }

private:
    template <class K>
    struct Slot {
        std::optional<typename K::value_type> value;
    };
    std::tuple<Slot<Ks>...> values_;
};

namespace detail {

template <class K, class Keywords>
inline constexpr bool accepts_keyword = false;
template <class K, class... Ks>
inline constexpr bool accepts_keyword<K, keywords<Ks...>> = (std::same_as<K, Ks> || ...);

/// A function template, so that a failing assertion shows the keyword.
template <class K, std::size_t TimesGiven, class... AcceptedKeywords>
consteval bool check_keyword() {
    static_assert(
        (accepts_keyword<K, AcceptedKeywords> || ...),
        "no participant of this Join accepts the keyword (see check_keyword<...>); correct its "
        "name or add it to a participant's join_keywords"
    );
    static_assert(
        TimesGiven == 1, "the keyword is given twice (see check_keyword<...>); give it once"
    );
    return true;
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/hook/ordering.hpp

namespace joinable { inline namespace v0 {

/// A list of labels, for what a hook runs before or after.
template <class... Labels>
struct labels_of {};

/// Labels of this library's hooks. An engine may add types of its own.
namespace labels {
struct gradients; ///< gradients are reduced here
struct shards;    ///< sharded optimizer state is exchanged here
struct step;      ///< a plain optimizer steps here
} // namespace labels

/// Places a hook among the hooks of one guard. The default reads the hook's own members, all
/// optional: `label` (default: the hook's type), `runs_before`, `runs_after` (labels_of<...>), and
/// `post_runs_before`, `post_runs_after` if the post hooks run in another order. To place a hook of
/// another library, specialise this with `label`, `before`, `after` and, if needed, `post_before`,
/// `post_after`. A label that no hook of the guard carries constrains nothing. Among hooks that may
/// come next, hooks that give notices come first; then the argument order decides. Meant for up to
/// 31 hooks in one guard.
template <class Hook>
struct hook_order {};

namespace detail {

// The declarations of a hook: hook_order's member, else the hook's own, else a default.
template <class H>
struct label_of : std::type_identity<H> {};
template <class H>
    requires requires { typename H::label; } && (!requires { typename hook_order<H>::label; })
struct label_of<H> : std::type_identity<typename H::label> {};
template <class H>
    requires requires { typename hook_order<H>::label; }
struct label_of<H> : std::type_identity<typename hook_order<H>::label> {};

template <class H>
struct before_of : std::type_identity<labels_of<>> {};
template <class H>
    requires requires { typename H::runs_before; } &&
             (!requires { typename hook_order<H>::before; })
struct before_of<H> : std::type_identity<typename H::runs_before> {};
template <class H>
    requires requires { typename hook_order<H>::before; }
struct before_of<H> : std::type_identity<typename hook_order<H>::before> {};

template <class H>
struct after_of : std::type_identity<labels_of<>> {};
template <class H>
    requires requires { typename H::runs_after; } && (!requires { typename hook_order<H>::after; })
struct after_of<H> : std::type_identity<typename H::runs_after> {};
template <class H>
    requires requires { typename hook_order<H>::after; }
struct after_of<H> : std::type_identity<typename hook_order<H>::after> {};

template <class H>
struct post_before_of : before_of<H> {};
template <class H>
    requires requires { typename H::post_runs_before; } &&
             (!requires { typename hook_order<H>::post_before; })
struct post_before_of<H> : std::type_identity<typename H::post_runs_before> {};
template <class H>
    requires requires { typename hook_order<H>::post_before; }
struct post_before_of<H> : std::type_identity<typename hook_order<H>::post_before> {};

template <class H>
struct post_after_of : after_of<H> {};
template <class H>
    requires requires { typename H::post_runs_after; } &&
             (!requires { typename hook_order<H>::post_after; })
struct post_after_of<H> : std::type_identity<typename H::post_runs_after> {};
template <class H>
    requires requires { typename hook_order<H>::post_after; }
struct post_after_of<H> : std::type_identity<typename hook_order<H>::post_after> {};

template <class Label, class Labels>
inline constexpr bool contains_label = false;
template <class Label, class... Ls>
inline constexpr bool contains_label<Label, labels_of<Ls...>> = (std::same_as<Label, Ls> || ...);

struct MainPhase {
    template <class H>
    using before = typename before_of<H>::type;
    template <class H>
    using after = typename after_of<H>::type;
};
struct PostPhase {
    template <class H>
    using before = typename post_before_of<H>::type;
    template <class H>
    using after = typename post_after_of<H>::type;
};

template <std::size_t N>
struct Order {
    std::array<std::size_t, N> sequence{}; ///< hook indices in the order in which they run
    std::array<bool, N> on_cycle{};
    bool has_cycle = false;
};

template <std::size_t N>
using Edges = std::array<std::array<bool, N>, N>; ///< [i][j]: hook i runs before hook j

template <class Phase, class... Hooks>
consteval auto edges_of() {
    constexpr std::size_t n = sizeof...(Hooks);
    Edges<n> edges{};
    std::size_t row = 0;
    auto const fill_row = [&]<class H>(std::type_identity<H>) {
        std::size_t column = 0;
        auto const fill = [&]<class Other>(std::type_identity<Other>) {
            edges[row][column] =
                row != column &&
                (contains_label<
                     typename label_of<Other>::type,
                     typename Phase::template before<H>> ||
                 contains_label<typename label_of<H>::type, typename Phase::template after<Other>>);
            ++column;
        };
        (fill(std::type_identity<Hooks>{}), ...);
        ++row;
    };
    (fill_row(std::type_identity<Hooks>{}), ...);
    return edges;
}

/// Kahn's algorithm (1962), always taking the lowest ready index, `preferred` ones first. The order
/// is unique, stable, and the same on every rank. Hooks that remain are also peeled from the end,
/// so that only hooks on a cycle are blamed.
template <std::size_t N>
constexpr Order<N> solve(Edges<N> const& edges, std::array<bool, N> const& preferred) {
    Order<N> order;
    std::array<bool, N> done{};
    auto const is_free = [&](std::size_t i, bool from_the_end) {
        for (std::size_t j = 0; j < N; ++j) {
            if (!done[j] && (from_the_end ? edges[i][j] : edges[j][i])) {
                return false;
            }
        }
        return !done[i];
    };
    std::size_t count = 0;
    for (bool progress = true; progress;) {
        progress = false;
        for (bool const preference : {true, false}) {
            for (std::size_t i = 0; i < N && !progress; ++i) {
                if (preferred[i] == preference && is_free(i, false)) {
                    done[i] = true;
                    order.sequence[count++] = i;
                    progress = true;
                }
            }
        }
    }
    order.has_cycle = count != N;
    for (bool progress = order.has_cycle; progress;) {
        progress = false;
        for (std::size_t i = 0; i < N; ++i) {
            if (is_free(i, true)) {
                done[i] = true;
                progress = true;
            }
        }
    }
    for (std::size_t i = 0; i < N; ++i) {
        order.on_cycle[i] = !done[i];
    }
    return order;
}

/// A class template, so that a failing assertion shows the hooks.
template <class... Hooks>
struct hooks_on_cycle {
    static_assert(
        sizeof...(Hooks) == 0,
        "these hooks must run both before and after each other (see hooks_on_cycle<...>); remove "
        "one of their before or after labels"
    );
};

template <class Phase, class... Hooks>
struct ordered_hooks {
    static constexpr Order<sizeof...(Hooks)> order =
        solve<sizeof...(Hooks)>(edges_of<Phase, Hooks...>(), {{gives_notice<Hooks>...}});

    template <class Cycle, std::size_t Index, class... Rest>
    struct collect : std::type_identity<Cycle> {};
    template <class... Found, std::size_t Index, class H, class... Rest>
    struct collect<labels_of<Found...>, Index, H, Rest...>
        : collect<
              std::
                  conditional_t<order.on_cycle[Index], labels_of<Found..., H>, labels_of<Found...>>,
              Index + 1,
              Rest...> {};

    template <class Culprits>
    struct blame;
    template <class... Culprits>
    struct blame<labels_of<Culprits...>> : hooks_on_cycle<Culprits...> {};

    static constexpr bool is_solved =
        sizeof(blame<typename collect<labels_of<>, 0, Hooks...>::type>) != 0;

    template <std::size_t... Is>
    static auto sequence_of(std::index_sequence<Is...>)
        -> std::index_sequence<order.sequence[Is]...>;
    using sequence = decltype(sequence_of(std::make_index_sequence<sizeof...(Hooks)>{}));
};

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/bucket/tensor_size.hpp

namespace joinable { inline namespace v0 {

/// The properties of a tensor that bucket assignment needs. It can replace tensors that have no
/// memory yet, so a layout can be computed before the model is made, or at compile time.
struct TensorSize {
    std::size_t numel = 0;
    DType dtype = DType::f32;
    DeviceId device = {};

    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return numel * size_of(dtype); }
    /// Whether tensors of both sizes may share a bucket, which has one dtype and one device.
    [[nodiscard]] constexpr bool shares_buckets_with(TensorSize const& other) const noexcept {
        return dtype == other.dtype && device == other.device;
    }
};

namespace detail {

template <class T>
concept has_tensor_size =
    Tensor<T> || Parameter<T> || std::same_as<std::remove_cvref_t<T>, AnyParameter> ||
    std::same_as<std::remove_cvref_t<T>, TensorSize>;

/// The size of a tensor, or that of a parameter's value.
template <has_tensor_size T>
[[nodiscard]] constexpr TensorSize tensor_size_of(T&& object) {
    using Object = std::remove_cvref_t<T>;
    if constexpr (std::same_as<Object, TensorSize>) {
        return object;
    } else if constexpr (std::same_as<Object, AnyParameter>) {
        return tensor_size_of(object.value());
    } else if constexpr (Tensor<T>) {
        return {joinable::numel(object), joinable::dtype(object), joinable::device(object)};
    } else {
        // Traits take mutable parameters, but the size is only read.
        return tensor_size_of(*parameter_traits<Object>::value(const_cast<Object&>(object)));
    }
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/bucket/assignment.hpp

namespace joinable { inline namespace v0 {

/// The tensors of each bucket, and the limit in bytes that the bucket was cut by (0 for a sparse
/// tensor, which has a bucket of its own).
struct BucketAssignment {
    std::vector<std::vector<std::size_t>> buckets;
    std::vector<std::size_t> limits;
};

namespace detail {

constexpr void check_assignment_input(
    std::size_t count,
    std::span<std::size_t const> limits,
    std::span<bool const> expect_sparse,
    std::span<std::size_t const> indices
) {
    if (count == 0 || limits.empty()) {
        throw ContractViolation{concat(
            "bucket assignment needs at least one tensor and one limit, but got ",
            count,
            " tensors and ",
            limits.size(),
            " limits"
        )};
    }
    if ((!expect_sparse.empty() && expect_sparse.size() != count) ||
        (!indices.empty() && indices.size() != count)) {
        throw ContractViolation{concat(
            "bucket assignment of ",
            count,
            " tensors needs as many sparse flags and indices, or "
            "none, but got ",
            expect_sparse.size(),
            " flags and ",
            indices.size(),
            " indices"
        )};
    }
    // Vectors are filled with a value: what libstdc++ 12 does without one is not a constant
    // expression for clang, and neither is its std::vector<bool>.
    std::vector<unsigned char> seen(indices.empty() ? 0 : count, 0);
    for (std::size_t const index : indices) {
        if (index >= count || seen[index]) {
            throw ContractViolation{concat(
                "bucket assignment: index ",
                index,
                index >= count ? " is out of range for " : " is given twice for ",
                count,
                " tensors; give a permutation"
            )};
        }
        seen[index] = 1;
    }
}

} // namespace detail

/// Cuts tensors into buckets of one dtype and device each, in order. A bucket closes after the
/// tensor with which it reaches its limit in bytes. The next bucket of that dtype and device gets
/// the next limit; the last limit repeats. Tensors flagged in `expect_sparse` are alone in their
/// buckets.
///
/// `indices` permutes the order in which tensors are taken. Without it buckets are sorted by their
/// lowest tensor. With it they stay in the order in which they closed; buckets left open at the end
/// follow in the order of the first tensor of their dtype and device. So the result is the same
/// everywhere. Local; also in constant expressions. `tensors` is a random-access range of Tensors,
/// Parameters or TensorSizes. The rule is that of PyTorch's _compute_bucket_assignment_by_size.
/// Complexity: linear in the tensors times the number of different dtypes and devices.
/// @throws ContractViolation  there are no tensors or limits, sizes differ, or the indices are not
///         a permutation.
template <class Tensors>
[[nodiscard]] constexpr BucketAssignment compute_bucket_assignment_by_size(
    Tensors const& tensors,
    std::span<std::size_t const> limits,
    std::span<bool const> expect_sparse = {},
    std::span<std::size_t const> indices = {}
) {
    static_assert(
        detail::has_tensor_size<decltype(*std::begin(tensors))>,
        "compute_bucket_assignment_by_size: the elements of the range must model Tensor or "
        "Parameter, or be a TensorSize; specialise joinable::tensor_traits for their type"
    );
    struct Open {
        TensorSize kind; ///< the first tensor's dtype and device
        std::size_t limit_index = 0;
        std::size_t bytes = 0;
        std::vector<std::size_t> members;
    };
    std::size_t const count = static_cast<std::size_t>(std::size(tensors));
    detail::check_assignment_input(count, limits, expect_sparse, indices);
    BucketAssignment result;
    std::vector<Open> open; // few dtypes and devices: a linear search beats hashing
    auto const close = [&](Open& group) {
        result.buckets.push_back(std::exchange(group.members, {}));
        result.limits.push_back(limits[group.limit_index]);
        group.bytes = 0;
        group.limit_index = (std::min)(group.limit_index + 1, limits.size() - 1);
    };
    auto const first = std::begin(tensors);
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t const t = indices.empty() ? i : indices[i];
        if (!expect_sparse.empty() && expect_sparse[t]) {
            result.buckets.push_back({t});
            result.limits.push_back(0);
            continue;
        }
        auto const size = detail::tensor_size_of(first[static_cast<std::ptrdiff_t>(t)]);
        auto group = std::find_if(open.begin(), open.end(), [&](Open const& candidate) {
            return candidate.kind.shares_buckets_with(size);
        });
        if (group == open.end()) {
            open.push_back({size, 0, 0, {}});
            group = std::prev(open.end());
        }
        group->members.push_back(t);
        group->bytes += size.bytes();
        if (group->bytes >= limits[group->limit_index]) {
            close(*group);
        }
    }
    for (Open& group : open) {
        if (!group.members.empty()) {
            close(group);
        }
    }
    if (indices.empty()) {
        std::vector<std::size_t> order(result.buckets.size(), 0);
        for (std::size_t b = 0; b < order.size(); ++b) {
            order[b] = b;
        }
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return result.buckets[a].front() < result.buckets[b].front(); // ascending inside
        });
        BucketAssignment sorted;
        for (std::size_t const b : order) {
            sorted.buckets.push_back(std::move(result.buckets[b]));
            sorted.limits.push_back(result.limits[b]);
        }
        return sorted;
    }
    return result;
}

template <class Tensors>
[[nodiscard]] constexpr BucketAssignment compute_bucket_assignment_by_size(
    Tensors const& tensors,
    std::initializer_list<std::size_t> limits,
    std::initializer_list<bool> expect_sparse = {},
    std::initializer_list<std::size_t> indices = {}
) {
    return compute_bucket_assignment_by_size(
        tensors,
        std::span<std::size_t const>{limits.begin(), limits.size()},
        std::span<bool const>{expect_sparse.begin(), expect_sparse.size()},
        std::span<std::size_t const>{indices.begin(), indices.size()}
    );
}

}} // namespace joinable::v0

// ---- joinable/bucket/options.hpp

namespace joinable { inline namespace v0 {

/// The gradients of a rank that has joined a guard and shadows the reductions of the others.
enum class JoinedGradients : std::uint8_t {
    /// The averages during the guard. When it ends, zeros in every gradient whose last write was a
    /// reduction that this rank shadowed: for engines that zero gradients before the pass or after
    /// the step. If no rank uses a parameter in a round, the gradient of a rank without a pass
    /// becomes zeros at once, or a Step would use an earlier average again. If ranks with a pass
    /// have no gradient when backward() begins, because the engine drops gradients, it is released
    /// (parameter_traits with set_grad and release_grad), so that a Step skips the parameter, too.
    zeroed_at_end,
    /// The averages, also after the guard has ended: for engines that never zero gradients. A parameter
    /// that no rank uses in a round becomes what ranks with a pass have, as above.
    kept,
    /// The gradients of this rank's last own round, as in PyTorch. Not together with a Step; needs
    /// JoinOptions::carry_accumulated = false. If gradients may lie in buckets (set_grad) it
    /// allocates the same memory again.
    untouched,
};

/// What a rank sends for a parameter that its pass does not use, but another rank's does.
enum class UnusedGradients : std::uint8_t {
    zero, ///< zeros, and what it accumulated in rounds that did not sync
    held, ///< the gradient's contents, even of a reduced round, as in PyTorch
};

/// How gradients are cut into buckets. The same on every rank.
struct BucketOptions {
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U; ///< a bucket closes when it reaches this
    /// The limit of the bucket that is launched first, at most bucket_cap_bytes. It is small, so
    /// that communication starts early.
    std::size_t first_bucket_bytes = std::size_t{1} << 20U;
    /// Gradients live in the buckets and are never copied. Needs parameter_traits::set_grad for
    /// every parameter. The gradients are valid as long as the reducer.
    bool gradient_as_bucket_view = false;
    /// Parameters may have no gradient in an iteration. The engine names them before backward, and
    /// ranks exchange one small map per iteration. A parameter that no rank uses is neither sent
    /// nor touched on ranks with a pass; one that another rank uses gets the average.
    bool find_unused = false;
    /// Every iteration uses the same parameters equally often. A rank records them in its first
    /// iteration and checks all others. Finds unused parameters by itself and sends one map in
    /// total.
    bool static_graph = false;
    /// Limits of the first bucket, the second and so on; the last one repeats. If given, they
    /// replace the two limits above.
    std::vector<std::size_t> bucket_caps_bytes = {};
    /// There is one bucket per dtype until the order in which gradients become ready is known.
    /// After the first iteration it is cut by that order. Off: cut at once, from the last parameter
    /// to the first. No effect with find_unused unless static_graph is on.
    bool rebuild_buckets = true;
    JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end;
    UnusedGradients unused_gradients = UnusedGradients::zero;
};

namespace detail {

/// Whether buckets are cut after the order of gradients is known.
[[nodiscard]] inline bool rebuilds(BucketOptions const& options) noexcept {
    return options.rebuild_buckets && (options.static_graph || !options.find_unused);
}

/// The limits of all buckets, one after another.
[[nodiscard]] inline std::vector<std::size_t> bucket_limits(BucketOptions const& options) {
    if (!options.bucket_caps_bytes.empty()) {
        return options.bucket_caps_bytes;
    }
    return {
        (std::min)(options.first_bucket_bytes, options.bucket_cap_bytes), options.bucket_cap_bytes
    };
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/bucket/memory.hpp

namespace joinable { inline namespace v0 {

/// Allocates buckets for classes that know no communicator: in the memory that a communicator
/// moves, from make_arena(), or on the heap. Refers to the communicator.
class BufferMemory {
public:
    BufferMemory() = default; ///< the heap
    template <Communicator Comm>
    explicit BufferMemory(Comm& comm) noexcept
        : device_{&detail::device_of(comm)}, comm_{&comm}, make_{[](void* from, std::size_t bytes) {
              return make_arena(*static_cast<Comm*>(from), bytes);
          }} {}

    /// The device that reads and writes the arenas.
    [[nodiscard]] Device& device() const noexcept { return *device_; }
    [[nodiscard]] DeviceId id() const noexcept { return device_->id(); }
    [[nodiscard]] Arena allocate(std::size_t bytes) const {
        return make_ == nullptr ? Arena{bytes} : make_(comm_, bytes);
    }

private:
    Device* device_ = &detail::the_host();
    void* comm_ = nullptr;
    Arena (*make_)(void* comm, std::size_t bytes) = nullptr;
};

}} // namespace joinable::v0

// ---- joinable/bucket/bucket.hpp

namespace joinable { inline namespace v0 {

/// Alignment of buckets in an arena, in bytes: whole cache lines, so that no two buckets share one.
inline constexpr std::size_t bucket_alignment = Arena::default_alignment;

/// Gradients, or other tensors, of one dtype that are sent in one collective.
struct Bucket {
    Buffer buffer;                       ///< all of them, one after another
    std::vector<std::size_t> parameters; ///< indices into the ParameterList
    std::vector<AnyView> views;          ///< each one's gradient in the buffer
};

namespace detail {

/// The trainable parameters, last one first. Gradients usually become ready in this order.
std::vector<std::size_t> expected_ready_order(ParameterList const& parameters);

} // namespace detail

/// The buckets of a model and their memory, one arena per dtype. All members are local. The same
/// calls give the same results on all ranks with the same parameters.
class BucketLayout {
public:
    BucketLayout() = default; ///< no buckets

    /// Cuts the parameters in `order` into buckets, which close when they reach their limit in
    /// bytes. The arenas are in `memory` and have the size of the gradients plus at most one cache
    /// line per parameter. Complexity: linear in the parameters, plus the cost of the arenas.
    /// @throws ContractViolation  no parameter is listed, or a value is missing or on another
    ///         device.
    BucketLayout(
        ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits,
        BufferMemory const& memory = {}
    );

    /// In launch order: as they fill when gradients become ready in `order`.
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept { return buckets_; }
    /// The bytes of all arenas.
    [[nodiscard]] std::size_t bytes() const noexcept;

    /// Calls f(arena) for each arena, in the same order on all ranks with the same parameters.
    template <class F>
    void for_each_arena(F const& f) const {
        for (Arena const& arena : arenas_) {
            if (arena.bytes() != 0) {
                f(arena);
            }
        }
    }

    /// Cuts the same parameters again. Contents move with them inside the arenas, on the host
    /// without a second copy. Earlier views then refer to other gradients. `order` is a permutation
    /// of the previous one.
    /// Complexity: in bytes, linear if the order stays, else times at most the square of the
    /// logarithm of the number of parameters.
    void rebuild(
        ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits
    );

private:
    static std::size_t index(DType dtype) noexcept { return static_cast<std::size_t>(dtype); }

    static std::size_t offset_in(Arena const& arena, AnyView const& view) noexcept;
    /// Calls f(parameter, view) for everything in the arena of a dtype, in the order of offsets.
    template <class F>
    static void for_each_place(std::vector<Bucket> const& buckets, std::size_t dtype, F const& f) {
        for (Bucket const& bucket : buckets) {
            for (std::size_t k = 0; k < bucket.views.size(); ++k) {
                if (index(bucket.buffer.dtype) == dtype) {
                    f(bucket.parameters[k], bucket.views[k]);
                }
            }
        }
    }

    void
    cut(ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits);

    BufferMemory memory_;
    std::array<Arena, dtype_count> arenas_; ///< by dtype; empty if no parameter has it
    std::vector<Bucket> buckets_;
};

/// The buckets of a model whose gradients become ready from the last trainable parameter to the
/// first, for inspection or planning. Local. Throws what BucketLayout throws.
[[nodiscard]] inline BucketLayout
make_bucket_layout(ParameterList const& parameters, BucketOptions const& options) {
    return {parameters, detail::expected_ready_order(parameters), detail::bucket_limits(options)};
}

}} // namespace joinable::v0

// ---- joinable/bucket/bucket.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <numeric>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<std::size_t> expected_ready_order(ParameterList const& parameters) {
    std::vector<std::size_t> order;
    for (std::size_t i = parameters.size(); i-- > 0;) {
        if (parameters[i].requires_grad()) {
            order.push_back(i);
        }
    }
    return order;
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION BucketLayout::BucketLayout(
    ParameterList const& parameters,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits,
    BufferMemory const& memory
)
    : memory_{memory} {
    if (order.empty()) {
        throw ContractViolation{detail::concat(
            parameters.size() == 0 ? "the list of parameters is empty"
                                   : "no parameter requires a gradient",
            ": there is nothing to reduce; give the parameters to train, with requires_grad = true, or run "
            "without this model"
        )};
    }
    std::array<std::size_t, dtype_count> bytes{};
    for (std::size_t const i : order) {
        detail::check_value(parameters, i, memory_.id());
        AnyView const value = parameters[i].value();
        bytes[index(value.dtype())] += // for any cut: each may start a bucket
            value.numel() * size_of(value.dtype()) + bucket_alignment;
    }
    for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
        if (bytes[dtype] != 0) {
            arenas_[dtype] = memory_.allocate(bytes[dtype]);
        }
    }
    cut(parameters, order, limits);
}

JOINABLE_DEFINITION std::size_t BucketLayout::bytes() const noexcept {
    std::size_t bytes = 0;
    for (Arena const& arena : arenas_) {
        bytes += arena.bytes();
    }
    return bytes;
}

JOINABLE_DEFINITION void BucketLayout::rebuild(
    ParameterList const& parameters,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits
) {
    std::vector<Bucket> const before = std::exchange(buckets_, {});
    cut(parameters, order, limits);
    for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
        Arena const& arena = arenas_[dtype];
        std::vector<std::size_t> position(parameters.size());
        std::vector<std::size_t> offset(parameters.size());
        std::size_t count = 0;
        for_each_place(buckets_, dtype, [&](std::size_t i, AnyView const& view) {
            position[i] = count++;
            offset[i] = offset_in(arena, view);
        });
        std::vector<detail::Section> sections;
        for_each_place(before, dtype, [&](std::size_t i, AnyView const& view) {
            std::size_t const bytes = view.numel() * size_of(view.dtype());
            sections.push_back({offset_in(arena, view), offset[i], bytes, position[i]});
        });
        memory_.device().permute(arena, sections);
    }
}

JOINABLE_DEFINITION std::size_t
BucketLayout::offset_in(Arena const& arena, AnyView const& view) noexcept {
    return static_cast<std::size_t>(static_cast<std::byte*>(view.data()) - arena.data());
}

JOINABLE_DEFINITION void BucketLayout::cut(
    ParameterList const& parameters,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits
) {
    std::vector<AnyView> values;
    for (std::size_t const i : order) {
        values.push_back(parameters[i].value());
    }
    std::vector<std::size_t> as_given(order.size()); // keeps buckets in the order they fill in
    std::iota(as_given.begin(), as_given.end(), std::size_t{0});
    auto const assignment = compute_bucket_assignment_by_size(values, limits, {}, as_given);

    std::array<std::size_t, dtype_count> used{};
    for (auto const& members : assignment.buckets) {
        DType const dtype = values[members.front()].dtype();
        std::size_t& offset = used[index(dtype)];
        std::byte* const base = arenas_[index(dtype)].data();
        Bucket bucket{{base + offset, 0, dtype}, {}, {}};
        for (std::size_t const member : members) {
            AnyView const& value = values[member];
            bucket.parameters.push_back(order[member]);
            bucket.views.emplace_back(
                base + offset,
                dtype,
                value.extents(),
                detail::dense_strides(value.extents(), value.strides()),
                memory_.id()
            );
            bucket.buffer.count += value.numel();
            offset += value.numel() * size_of(dtype);
        }
        offset = (offset + bucket_alignment - 1) / bucket_alignment * bucket_alignment;
        buckets_.push_back(std::move(bucket));
    }
}

}} // namespace joinable::v0

#endif

// ---- joinable/bucket/broadcast_coalesced.hpp

namespace joinable { inline namespace v0 {

/// Copies tensors from one rank to all, many in one broadcast, as often as needed. The packing is
/// planned once. Addresses and strides of tensors are read on each run.
class CoalescedBroadcast {
public:
    /// Local. Plans pieces; a piece closes with the tensor by which it reaches `piece_bytes`.
    /// Allocates up to two pieces in `memory`, where the tensors must be, too. Error texts call a
    /// tensor `what`.
    /// @throws ContractViolation  a tensor is missing (a null pointer) or on another device.
    explicit CoalescedBroadcast(
        TensorList tensors,
        std::size_t piece_bytes,
        std::string_view what = "tensor",
        BufferMemory const& memory = {}
    );

    /// Collective over `comm`. All ranks must have planned for tensors of the same extents and
    /// dtypes in the same order; strides may differ. Blocks until this rank's tensors are written.
    /// At most two pieces are in flight; no allocation.
    /// @throws ContractViolation  what current_views() throws, before anything is sent.
    /// @throws what the communicator throws; tensors that were not reached are unchanged.
    template <Communicator Comm>
    void run(Comm& comm, int root) {
        std::vector<AnyView> const& views = current_views();
        bool const is_root = comm.rank() == root;
        Device& device = memory_.device();
        auto const move = [&](Bucket const& piece) {
            for (std::size_t k = 0; k < piece.views.size(); ++k) {
                AnyView const& tensor = views[piece.parameters[k]];
                is_root ? device.copy(tensor, piece.views[k]) : device.copy(piece.views[k], tensor);
            }
        };
        using BroadcastWork = std::remove_cvref_t<decltype(comm.broadcast(Buffer{}, root))>;
        std::array<std::optional<BroadcastWork>, 2> works;
        for (std::size_t p = 0; p < pieces_.size() + 2; ++p) {
            std::optional<BroadcastWork>& work = works[p % 2];
            if (work) {
                work->wait();
                work.reset();
                if (!is_root) {
                    move(pieces_[p - 2]);
                }
            }
            if (p < pieces_.size()) {
                if (is_root) {
                    move(pieces_[p]);
                }
                device.submit(); // the previous contents of these arenas have been read
                // nvcc 13 warns of a dropped reference to a work, too
                static_cast<void>(work.emplace(comm.broadcast(pieces_[p].buffer, root)));
            }
        }
        device.finish();
    }

    /// See FixedTensors::views.
    std::vector<AnyView> const& current_views() { return tensors_.views(); }

private:
    FixedTensors tensors_;
    BufferMemory memory_;
    std::vector<Arena> arenas_;  ///< for pieces of even and of odd index
    std::vector<Bucket> pieces_; ///< the ones that are not empty, with row-major views
};

/// Copies tensors from `root` to all ranks: makes a CoalescedBroadcast and runs it once. `tensors`
/// is a range that joinable::buffers() takes. Collective.
template <Communicator Comm, class Tensors>
void broadcast_coalesced(Comm& comm, Tensors&& tensors, std::size_t buffer_bytes, int root) {
    CoalescedBroadcast{
        detail::tensor_list(std::forward<Tensors>(tensors)),
        buffer_bytes,
        "tensor",
        BufferMemory{comm}
    }.run(comm, root);
}

}} // namespace joinable::v0

// ---- joinable/bucket/broadcast_coalesced.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION CoalescedBroadcast::CoalescedBroadcast(
    TensorList tensors, std::size_t piece_bytes, std::string_view what, BufferMemory const& memory
)
    : tensors_{std::move(tensors), what, memory.id()}, memory_{memory} {
    std::vector<AnyView> const& views = current_views();
    if (views.empty()) {
        return;
    }
    std::array<std::size_t, 1> const limits{{piece_bytes}};
    std::array<std::size_t, 2> memory_bytes{};
    for (auto& members : compute_bucket_assignment_by_size(views, limits).buckets) {
        Bucket piece{{nullptr, 0, views[members.front()].dtype()}, std::move(members), {}};
        for (std::size_t const member : piece.parameters) {
            piece.buffer.count += views[member].numel();
        }
        if (piece.buffer.count != 0) {
            std::size_t& bytes = memory_bytes[pieces_.size() % 2];
            bytes = (std::max)(bytes, piece.buffer.bytes());
            pieces_.push_back(std::move(piece));
        }
    }
    for (std::size_t const bytes : memory_bytes) {
        arenas_.push_back(memory_.allocate(bytes));
    }
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
        std::byte* place = arenas_[p % 2].data();
        pieces_[p].buffer.data = place;
        for (std::size_t const member : pieces_[p].parameters) {
            Shape const& extents = views[member].extents();
            DType const dtype = views[member].dtype();
            pieces_[p].views.emplace_back(
                place, dtype, extents, row_major_strides(extents), memory_.id()
            );
            place += views[member].numel() * size_of(dtype);
        }
    }
}

}} // namespace joinable::v0

#endif

// ---- joinable/bucket/timeline.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
concept times_rounds = requires(T& timeline, bool is_shadow) {
    { timeline.round(is_shadow) } -> std::move_constructible;
};
template <class T>
concept times_buckets = requires(T& timeline, std::size_t n) {
    { timeline.bucket(n, n) } -> std::move_constructible;
};
template <class T>
concept times_forward = requires(T& timeline) {
    { timeline.forward() } -> std::move_constructible;
};
template <class T>
concept times_backward = requires(T& timeline) {
    { timeline.backward() } -> std::move_constructible;
};
template <class T>
concept times_roll_calls = requires(T& timeline) {
    { timeline.roll_call() } -> std::move_constructible;
};
template <class T>
concept notes_waits = requires(T& timeline, std::chrono::steady_clock::time_point time) {
    timeline.waited(time, time);
};

} // namespace detail

/// A class that is told when a rank's rounds and buckets begin and end, to show them in a profiler. Each
/// expression begins a range of time and returns an object. The destruction of the object ends the range.
/// Ranges end in any order, and also if a round fails.
///
/// `timeline` is an lvalue of `T`.
/// | expression                      | begins                                                       |
/// |---------------------------------|--------------------------------------------------------------|
/// | `timeline.round(is_shadow)`     | a training round: from where it is opened, or shadowed, to   |
/// |                                 | its end on this rank                                         |
/// | `timeline.bucket(index, bytes)` | a collective of a bucket, or of a part of it: from its launch|
/// |                                 | to its wait, as the host sees it                             |
///
/// Optional; each may be missing without the others:
/// | expression                      | begins, or reports                                           |
/// |---------------------------------|--------------------------------------------------------------|
/// | `timeline.forward()`            | a forward pass, in a round or of an evaluation               |
/// | `timeline.backward()`           | a backward pass, including the wait for its last buckets     |
/// | `timeline.roll_call()`          | a roll call that the model opens: from announcing the round  |
/// |                                 | to the verdict, so the forward pass is inside                |
/// | `timeline.waited(begin, end)`   | when the host was blocked in the roll call of a round, by    |
/// |                                 | std::chrono::steady_clock; called afterwards                 |
///
/// Local; called by the thread that runs the round. Models: NoTimeline, NvtxTimeline (nvtx.hpp),
/// TraceTimeline (trace.hpp).
template <class T>
concept Timeline =
    std::default_initializable<T> && detail::times_rounds<T> && detail::times_buckets<T>;

/// Records nothing and costs nothing.
struct NoTimeline {
    struct Range {};
    static constexpr Range round(bool /*is_shadow*/) noexcept { return {}; }
    static constexpr Range bucket(std::size_t /*index*/, std::size_t /*bytes*/) noexcept {
        return {};
    }
    /// Explains that a model without a TraceTimeline has nothing to start.
    template <class Capacity>
    static void start(Capacity) {
        static_assert(
            sizeof(Capacity) == 0,
            "start: this model records nothing; name a TraceTimeline in its type, as in "
            "DistributedDataParallel<Comm, AllReduce, TraceTimeline> ddp{...}"
        );
    }
};

namespace detail {

/// The optional ranges of a Timeline `T`. A member does nothing if `T` lacks its expression.
template <class T>
class PassRanges {
    struct Nothing {};
    static auto begin_forward(T& timeline) {
        if constexpr (times_forward<T>) {
            return timeline.forward();
        } else {
            return Nothing{};
        }
    }
    static auto begin_backward(T& timeline) {
        if constexpr (times_backward<T>) {
            return timeline.backward();
        } else {
            return Nothing{};
        }
    }
    static auto begin_roll_call(T& timeline) {
        if constexpr (times_roll_calls<T>) {
            return timeline.roll_call();
        } else {
            return Nothing{};
        }
    }

public:
    void open_forward(T& timeline) { static_cast<void>(forward_.emplace(begin_forward(timeline))); }
    void open_backward(T& timeline) {
        static_cast<void>(backward_.emplace(begin_backward(timeline)));
    }
    /// A round is announced. Without `is_answered` its verdict is still to come.
    void announce(T& timeline, bool is_answered) {
        is_heard_ = false;
        if (!is_answered) {
            static_cast<void>(roll_call_.emplace(begin_roll_call(timeline)));
        }
    }
    /// The verdict is there, and with it `round`. Only the first of these after announce() counts.
    template <class R>
    void hear(T& timeline, R const& round) {
        if (!std::exchange(is_heard_, true)) {
            roll_call_.reset();
            note_wait(timeline, round);
        }
    }
    void end_passes() noexcept { // inner ranges first
        forward_.reset();
        backward_.reset();
    }
    void end_all() noexcept {
        end_passes();
        roll_call_.reset();
    }
    template <class R>
    static void note_wait(T& timeline, R const& round) {
        if constexpr (notes_waits<T>) {
            if (auto const wait = round.waited(); wait.begin != wait.end) {
                timeline.waited(wait.begin, wait.end);
            }
        }
    }

private:
    std::optional<decltype(begin_roll_call(std::declval<T&>()))> roll_call_;
    std::optional<decltype(begin_forward(std::declval<T&>()))> forward_;
    std::optional<decltype(begin_backward(std::declval<T&>()))> backward_;
    bool is_heard_ = true;
};

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/communicator/scaled_sums.hpp

namespace joinable { inline namespace v0 { namespace detail {

template <class C>
concept says_whether_it_rounds = requires {
    { C::rounds_factors } -> std::convertible_to<bool>;
};

/// Whether a communicator rounds the factors of its scaled sums: see ScalesSums.
template <Communicator Comm>
[[nodiscard]] consteval bool rounds_factors() {
    if constexpr (says_whether_it_rounds<Comm>) {
        return Comm::rounds_factors;
    } else {
        return !reduces_host_memory<Comm>;
    }
}

/// Whether gradients are multiplied as they are packed, although the sum could do it. A device
/// multiplies numbers of 16 bits in float, and so is more exact than a sum that rounds factors.
template <Communicator Comm>
[[nodiscard]] bool scales_before_sum(Comm& comm) noexcept {
    return rounds_factors<Comm>() && device_of(comm).can_scale();
}

/// Checks the factor of a sum that rounds it to the dtype of the gradients. All ranks have the same
/// one, and so the same verdict. bf16 has the exponents of f32, so it holds the factor of any
/// divisor as closely as it holds a gradient. f16 does not.
/// @throws ContractViolation
inline void check_rounding(double factor, DType dtype) {
    if (dtype != DType::f16) {
        return;
    }
    constexpr double epsilon = 0x1p-10; // of f16
    auto const rounded = static_cast<double>(static_cast<float>(Half{static_cast<float>(factor)}));
    if ((std::max)(rounded - factor, factor - rounded) > epsilon * (std::max)(factor, -factor)) {
        throw ContractViolation{concat(
            "gradients of f16 would be multiplied by ",
            factor,
            ", which the communicator rounds to f16, to ",
            rounded,
            "; call use_kernels() of its device_memory(), so that the device multiplies in f32"
        )};
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/all_reduce.hpp

namespace joinable { inline namespace v0 {

/// The payload of one collective of a reducer: a bucket, or a run of its parameters if some of them
/// are not used. The same runs on all ranks.
struct BucketRun {
    std::size_t bucket; ///< its index
    Buffer buffer;      ///< in the bucket's memory, valid as long as the reducer
};

namespace detail {

template <class R>
concept names_reduction = requires {
    { R::name } -> std::convertible_to<std::string_view>;
};
template <class R>
concept says_whether_it_delivers = requires {
    { R::delivers } -> std::convertible_to<bool>;
};
template <class R, class Comm>
concept says_whether_it_scales = requires(R const& reduction, Comm& comm) {
    { reduction.scales(comm) } -> std::convertible_to<bool>;
};
template <class R, class Comm>
concept starts_runs = requires(R& reduction, Comm& comm, BucketRun const& run, double factor) {
    { reduction.start(comm, run, factor, true) } -> Work;
};
template <class R, class Comm>
concept finishes_runs =
    requires(R& reduction, Comm& comm, BucketRun const& run) { reduction.finish(comm, run); };

} // namespace detail

/// How a bucket travels: the operation of a Reducer on a full bucket. The same on all ranks.
///
/// `reduction` is an lvalue of `R`, `comm` of `Comm`, `run` a BucketRun.
/// | expression                      | result      | meaning                                        |
/// |---------------------------------|-------------|------------------------------------------------|
/// | `R::name`                       | string view | for error texts; ranks compare it              |
/// | `R::delivers`                   | bool        | whether run.buffer holds the averages after    |
/// |                                 |             | finish(): then the reducer writes them into    |
/// |                                 |             | the gradients of all ranks. Else the reduction |
/// |                                 |             | put them where they belong, such as to owners  |
/// | `reduction.scales(comm)`        | bool        | whether start() multiplies by the factor; else |
/// |                                 |             | gradients are multiplied as they are packed    |
/// | `reduction.start(comm, run,     | Work        | collective, does not block: sends the run.     |
/// | factor, contributes)`           |             | `factor` is 1 unless it scales and this rank   |
/// |                                 |             | contributes; else the run holds zeros          |
/// | `reduction.finish(comm, run)`   |             | called after waiting for the work, in the order|
/// |                                 |             | of start(); may release what the run needed    |
/// Not checkable, but required: start() issues the same collectives on every rank, whether the rank
/// contributes or not. The reducer owns the reduction. Models: AllReduce.
template <class R, class Comm>
concept BucketReduction =
    std::move_constructible<R> && Communicator<Comm> && detail::names_reduction<R> &&
    detail::says_whether_it_delivers<R> && detail::says_whether_it_scales<R, Comm> &&
    detail::starts_runs<R, Comm> && detail::finishes_runs<R, Comm>;

/// Says in one sentence why a class is not a BucketReduction.
template <class R, class Comm>
consteval bool models_bucket_reduction() {
    static_assert(
        detail::names_reduction<R>,
        "BucketReduction: expected a member 'static constexpr std::string_view name'"
    );
    static_assert(
        detail::says_whether_it_delivers<R>,
        "BucketReduction: expected a member 'static constexpr bool delivers'"
    );
    static_assert(
        detail::says_whether_it_scales<R, Comm>,
        "BucketReduction: expected a member 'bool scales(Comm&) const'"
    );
    static_assert(
        detail::starts_runs<R, Comm>,
        "BucketReduction: expected a member 'Work start(Comm&, BucketRun const&, double factor, "
        "bool "
        "contributes)'"
    );
    static_assert(
        detail::finishes_runs<R, Comm>,
        "BucketReduction: expected a member 'void finish(Comm&, BucketRun const&)'"
    );
    return BucketReduction<R, Comm>;
}

/// Sums each bucket over all ranks, in place: every rank gets every average.
struct AllReduce {
    static constexpr std::string_view name = "AllReduce";
    static constexpr bool delivers = true;

    /// If the sum scales, gradients that live in their buckets are not touched before it.
    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm& comm) noexcept {
        return ScalesSums<Comm> && !detail::scales_before_sum(comm);
    }
    template <Communicator Comm>
    [[nodiscard]] static work_of<Comm>
    start(Comm& comm, BucketRun const& run, [[maybe_unused]] double factor, bool /*contributes*/) {
        if constexpr (ScalesSums<Comm>) {
            if (scales(comm)) { // also without a contribution: all ranks run the same collective
                return comm.all_reduce(run.buffer, ReduceOp::sum, factor);
            }
        }
        return comm.all_reduce(run.buffer, ReduceOp::sum);
    }
    template <Communicator Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

}} // namespace joinable::v0

// ---- joinable/agreement/host_collectives.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A communicator of device memory that sums and broadcasts words of the host itself.
template <class C>
concept gives_host_words = requires(C& comm) { comm.host_words(); };

/// The object that moves the words.
template <class Comm>
[[nodiscard]] auto& carrier_of_words(Comm& comm) noexcept {
    if constexpr (!reduces_host_memory<Comm> && gives_host_words<Comm>) {
        return comm.host_words();
    } else {
        return comm;
    }
}

/// Collectives over a few words on the host, over any communicator. One that moves device memory
/// carries them itself, by host_words(), or they go through memory of its device: see
/// agreement/staged_collectives.hpp, which every device includes. Then one is under way at a time.
template <class Comm>
class HostCollectives {
    static_assert(
        reduces_host_memory<Comm> || gives_host_words<Comm> || !gives_device<Comm>,
        "words of the host go through a communicator of device memory: include "
        "<joinable/agreement/staged_collectives.hpp>"
    );

public:
    using Work = std::remove_cvref_t<
        decltype(carrier_of_words(std::declval<Comm&>()).all_reduce(Buffer{}, ReduceOp::sum))>;

    explicit HostCollectives(Comm& comm) noexcept : comm_{comm} {}

    [[nodiscard]] Work all_reduce(Buffer buffer, ReduceOp op) {
        return carrier_of_words(comm_).all_reduce(buffer, op);
    }
    [[nodiscard]] auto broadcast(Buffer buffer, int root) {
        return carrier_of_words(comm_).broadcast(buffer, root);
    }
    /// Copies to the host what is in memory of the device after the work that was submitted there.
    /// `to` is from Device::allocate_staging(). Blocks, up to the deadline.
    void download(void const* from, void* to, std::size_t bytes) {
        if constexpr (reduces_host_memory<Comm>) {
            std::memcpy(to, from, bytes);
        } else {
            carrier_of_words(comm_).download(from, to, bytes);
        }
    }

private:
    Comm& comm_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/agreement/control.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The type-erased communicator by which the ranks of guards, models and groups agree. Erasure
/// keeps the type of a guard independent of it. It is small, because its users only sum words and
/// abort.
class ControlCommunicator {
public:
    ControlCommunicator() = default;
    ControlCommunicator(ControlCommunicator const&) = delete;
    ControlCommunicator& operator=(ControlCommunicator const&) = delete;
    virtual ~ControlCommunicator() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int size() const = 0;
    /// An identity: the same for two participants over one communicator object.
    [[nodiscard]] virtual void const* address() const noexcept = 0;
    /// Another object over the same communicator, which must outlive it. While a sum of this one is
    /// under way, it may have one, too. Local.
    [[nodiscard]] virtual std::unique_ptr<ControlCommunicator> twin() = 0;

    /// Starts summing `words` over all ranks, in place. One sum at a time.
    virtual void post_sum(std::span<std::uint64_t> words) = 0;
    /// Makes progress. Only wait_sum() ends at the deadline.
    [[nodiscard]] virtual bool test_sum() = 0;
    virtual void wait_sum() = 0;

    /// Local. Does nothing if the communicator cannot abort.
    virtual void abort(AbortReason const& reason) = 0;
    [[nodiscard]] virtual bool can_abort() const noexcept = 0;

    /// Local. Returns false if the communicator cannot renew deadlines.
    virtual bool keep_alive() = 0;

    /// Local. Returns the previous deadline, or none if the communicator has no deadline.
    virtual std::optional<std::chrono::nanoseconds>
    exchange_deadline(std::chrono::nanoseconds deadline) = 0;

    void sum(std::span<std::uint64_t> words) {
        post_sum(words);
        wait_sum();
    }
    /// Sends `words` of one rank to all. The other ranks add zeros.
    void broadcast(std::span<std::uint64_t> words, int root) {
        if (rank() != root) {
            std::fill(words.begin(), words.end(), 0);
        }
        sum(words);
    }
    /// The concatenation of all ranks' words. Every rank gives the same number of words.
    [[nodiscard]] std::vector<std::uint64_t> gather(std::span<std::uint64_t const> mine) {
        std::vector<std::uint64_t> all(static_cast<std::size_t>(size()) * mine.size());
        std::copy(
            mine.begin(), mine.end(), all.data() + static_cast<std::size_t>(rank()) * mine.size()
        );
        sum(all);
        return all;
    }
};

/// `Held` is a communicator or a reference to one. A `Base` may have more members than guards need;
/// a class derived from this implements them.
template <class Held, class Base = ControlCommunicator>
class ControlOver : public Base {
    using Comm = std::remove_reference_t<Held>;

public:
    explicit ControlOver(Comm& comm) noexcept
        requires std::is_reference_v<Held>
        : comm_{comm}, host_{comm_} {}
    /// `make()` returns the communicator, which need not be movable.
    template <std::invocable Make>
    explicit ControlOver(Make const& make) : comm_(make()), host_{comm_} {}

    [[nodiscard]] int rank() const override { return comm_.rank(); }
    [[nodiscard]] int size() const override { return comm_.size(); }
    [[nodiscard]] void const* address() const noexcept override { return &comm_; }
    [[nodiscard]] std::unique_ptr<ControlCommunicator> twin() override {
        return std::make_unique<ControlOver<Comm&>>(comm_);
    }

    void post_sum(std::span<std::uint64_t> words) override {
        work_.reset();
        static_cast<void>(work_.emplace( // nvcc 13 warns of a dropped reference to a work, too
            host_.all_reduce(Buffer{words.data(), words.size(), DType::u64}, ReduceOp::sum)
        ));
    }
    [[nodiscard]] bool test_sum() override { return make_progress(*work_); }
    void wait_sum() override {
        work_->wait();
        work_.reset();
    }

    void abort(AbortReason const& reason) override {
        if constexpr (Aborts<Comm>) {
            comm_.abort(reason);
        }
    }
    [[nodiscard]] bool can_abort() const noexcept override { return Aborts<Comm>; }

    bool keep_alive() override {
        if constexpr (RenewsDeadline<Comm>) {
            comm_.keep_alive();
        }
        return RenewsDeadline<Comm>;
    }

    std::optional<std::chrono::nanoseconds> exchange_deadline(std::chrono::nanoseconds deadline
    ) override {
        if constexpr (HasDeadline<Comm>) {
            return comm_.set_deadline(deadline);
        } else {
            return {};
        }
    }

protected:
    [[nodiscard]] Comm& communicator() noexcept { return comm_; }
    [[nodiscard]] Comm const& communicator() const noexcept { return comm_; }

private:
    Held comm_;
    HostCollectives<Comm> host_;
    std::optional<typename HostCollectives<Comm>::Work> work_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/without_pass.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// What ranks with a backward pass have as the gradient of a parameter that no rank used.
enum class OtherGradient : std::uint8_t { zeros, none, unknown };

/// The rule for a rank that runs no backward pass in a round, because it has joined, skips, or failed. It
/// sends zeros, or what it accumulated in earlier rounds. The rule says what its gradients are afterwards, so
/// that optimizers do the same on all ranks and nothing counts twice.
struct WithoutPass {
    bool has_joined = false;
    bool sends_accumulated = false;
    JoinedGradients joined = JoinedGradients::zeroed_at_end;

    /// Whether the rank keeps what it holds, and receives nothing.
    [[nodiscard]] constexpr bool is_untouched() const noexcept {
        return has_joined && joined == JoinedGradients::untouched;
    }
    /// Whether the gradients of its engine count like those of a rank with a pass, where no rank uses a
    /// parameter. A joined rank may hold averages of earlier rounds.
    [[nodiscard]] constexpr bool is_like_pass() const noexcept {
        return sends_accumulated && !has_joined;
    }
    /// Whether a gradient that receives no average becomes what the others have.
    [[nodiscard]] constexpr bool follows_others() const noexcept {
        return !is_untouched() && !is_like_pass();
    }
};

/// Makes a gradient what `other` says. If the parameter cannot drop or take gradients, what it has becomes
/// zeros. `zeros` makes a view of zeros for a parameter that has no gradient, but needs one. Enqueues.
template <class Zeros>
void follow_other(
    AnyParameter const& parameter, OtherGradient other, Device& device, Zeros const& zeros
) {
    AnyView const gradient = parameter.grad();
    if (gradient && other == OtherGradient::none && parameter.can_release_grad() &&
        parameter.can_set_grad()) {
        parameter.release_grad();
    } else if (gradient) {
        device.fill_zero(gradient);
    } else if (other == OtherGradient::zeros && parameter.can_set_grad()) {
        parameter.set_grad(zeros());
    }
}

/// On a joined rank, where averages go to owners alone: nothing replaces what was sent or dropped, so it
/// becomes zeros. Enqueues.
inline void clear_gradient(AnyParameter const& parameter, Device& device) {
    if (AnyView const gradient = parameter.grad()) {
        device.fill_zero(gradient);
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/detail/gradients.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// When gradients move into buckets: in the constructor, or in take_gradients() after all ranks
/// have constructed theirs.
enum class TakeGradients : bool { now, later };

/// The gradients of a model and their places in buckets: packs, delivers and moves them.
/// Independent of communicators and iterations; all members are local. Gradients on a device must
/// keep their memory from pack() until device().submit().
class Gradients {
public:
    /// Buckets are in `memory`; all gradients must be on the same device.
    /// @throws ContractViolation  see Reducer's constructor. Nothing was changed.
    Gradients(
        ParameterList parameters,
        BucketOptions const& options,
        int rank,
        BufferMemory const& memory = {},
        TakeGradients take_them = TakeGradients::now
    );

    Gradients(Gradients const&) = delete; // places refer to the layout
    Gradients& operator=(Gradients const&) = delete;

    /// Moves gradients into the buckets, if they are to be views. If parameters may be unused, one
    /// without a gradient stays without until it gets one.
    void take() {
        if (are_views_) {
            move_into_buckets(only_existing_);
        }
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }
    /// The trained parameters, in the order in which buckets were cut.
    [[nodiscard]] std::vector<std::size_t> const& trained() const noexcept { return trained_; }
    [[nodiscard]] bool is_trained(std::size_t i) const noexcept {
        return places_[i].view != nullptr;
    }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept { return layout_.buckets(); }
    /// See BucketLayout::for_each_arena.
    template <class F>
    void for_each_arena(F const& f) const {
        layout_.for_each_arena(f);
    }
    [[nodiscard]] std::size_t bucket_of(std::size_t i) const noexcept { return places_[i].bucket; }

    /// Copies gradient `i`, times `factor`, into its bucket in one pass. Writes zeros if there is
    /// no gradient or the factor is 0, because a mean over no samples is NaN. Complete after
    /// device().submit().
    void pack(std::size_t i, double factor) const;
    void zero(std::size_t i) const { device().fill_zero(*places_[i].view); }
    [[nodiscard]] bool has(std::size_t i) const { return bool{parameters_[i].grad()}; }

    [[nodiscard]] Device& device() const noexcept { return memory_.device(); }

    /// Begins an iteration of a rank that has joined or has not.
    void begin(bool has_joined);
    [[nodiscard]] JoinedGradients joined_gradients() const noexcept { return joined_; }
    /// On a rank that ran no pass: makes gradient `i`, which no rank used, what it is on ranks with
    /// a pass. See follow_other().
    void follow_others(std::size_t i, OtherGradient other);
    /// Ends an iteration after all averages are delivered.
    void complete() const;
    /// Ends the guard, in any way: zeroes the averages that this rank got after it had joined, unless they
    /// are kept. Enqueues.
    void end_guard();

    /// Makes the average in the bucket gradient `i`: copies it or sets a view. Complete after
    /// device().finish().
    void deliver(std::size_t i);

    /// Cuts the buckets again, by `order`. Gradients that live in them move along.
    void rebuild(std::vector<std::size_t> order);

    /// The name of this rank's parameter `i` in error texts.
    [[nodiscard]] std::string describe(std::size_t i) const;

private:
    struct Place {
        AnyView const* view = nullptr; ///< null: the parameter is not trained
        std::size_t bucket = 0;
    };

    static std::vector<std::size_t> one_bucket() { return {static_cast<std::size_t>(-1)}; }

    [[nodiscard]] bool needs_backup() const;

    static void find_places(std::vector<Place>& places, BucketLayout const& layout);

    [[nodiscard]] bool leaves_untouched() const noexcept {
        return WithoutPass{.has_joined = has_joined_, .joined = joined_}.is_untouched();
    }
    /// Whether the gradient lives in its bucket.
    [[nodiscard]] bool is_resident(std::size_t i) const;

    void move_into_buckets(bool existing_only);

    void require_fit(std::size_t i, AnyView const& gradient) const;

    ParameterList parameters_;
    BufferMemory memory_;
    int rank_;
    bool are_views_;
    bool only_existing_;
    JoinedGradients joined_;
    bool has_joined_ = false; ///< in this iteration
    std::vector<std::size_t> limits_;
    std::vector<std::size_t> trained_;
    BucketLayout layout_;
    /// Holds gradients that live in buckets while the buckets carry the averages of others. All
    /// ranks reduce in the same buckets, because communicators have registered them.
    BucketLayout backup_;
    std::vector<Place> places_;        ///< per parameter
    std::vector<Place> backup_places_; ///< per parameter
    std::vector<bool> is_of_others_;   ///< per parameter: written last after this rank joined
};

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/detail/gradients.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Gradients::Gradients(
    ParameterList parameters,
    BucketOptions const& options,
    int rank,
    BufferMemory const& memory,
    TakeGradients take_them
)
    : parameters_{std::move(parameters)}, memory_{memory}, rank_{rank},
      are_views_{options.gradient_as_bucket_view},
      only_existing_{options.find_unused || options.static_graph},
      joined_{options.joined_gradients}, limits_{bucket_limits(options)},
      trained_{expected_ready_order(parameters_)},
      layout_{parameters_, trained_, rebuilds(options) ? one_bucket() : limits_, memory},
      backup_{
          needs_backup() ? BucketLayout{parameters_, trained_, one_bucket(), memory}
                         : BucketLayout{}
      },
      places_(parameters_.size()), backup_places_(parameters_.size()),
      is_of_others_(parameters_.size()) {
    find_places(places_, layout_);
    find_places(backup_places_, backup_);
    for (std::size_t const i : trained_) {
        if (DType const dtype = parameters_[i].value().dtype(); !is_floating_point(dtype)) {
            throw ContractViolation{concat(
                describe(i),
                " is of ",
                name_of(dtype),
                ": gradients are averaged, which needs floating point; set its requires_grad "
                "to "
                "false, or make it a buffer"
            )};
        }
        if (AnyView const gradient = parameters_[i].grad()) {
            require_fit(i, gradient);
        }
        if (are_views_ && !parameters_[i].can_set_grad()) {
            throw ContractViolation{concat(
                "gradients as bucket views need parameter_traits::set_grad, which ",
                describe(i),
                " has not; specialise it, or turn gradient_as_bucket_view off"
            )};
        }
    }
    if (take_them == TakeGradients::now) {
        take();
    }
}

JOINABLE_DEFINITION void Gradients::pack(std::size_t i, double factor) const {
    AnyView const gradient = parameters_[i].grad();
    if (gradient) {
        require_fit(i, gradient);
    }
    if (!gradient || factor == 0.0) {
        zero(i);
    } else {
        device().scale_copy(gradient, factor, *places_[i].view);
    }
}

JOINABLE_DEFINITION void Gradients::begin(bool has_joined) {
    has_joined_ = has_joined;
    if (!leaves_untouched()) {
        return;
    }
    for (std::size_t const i : trained_) {
        if (is_resident(i)) {
            device().copy(*places_[i].view, *backup_places_[i].view);
        }
    }
    device().submit(); // before zeros replace them
}

JOINABLE_DEFINITION void Gradients::follow_others(std::size_t i, OtherGradient other) {
    is_of_others_[i] = has_joined_;
    follow_other(parameters_[i], other, device(), [&] {
        zero(i);
        return *places_[i].view;
    });
}

JOINABLE_DEFINITION void Gradients::complete() const {
    for (std::size_t k = 0; leaves_untouched() && k < trained_.size(); ++k) {
        if (std::size_t const i = trained_[k]; is_resident(i)) {
            device().copy(*backup_places_[i].view, *places_[i].view);
        }
    }
}

JOINABLE_DEFINITION void Gradients::end_guard() {
    for (std::size_t i = 0; i < is_of_others_.size(); ++i) {
        if (is_of_others_[i] && joined_ == JoinedGradients::zeroed_at_end) {
            clear_gradient(parameters_[i], device());
        }
        is_of_others_[i] = false;
    }
    device().finish();
}

JOINABLE_DEFINITION void Gradients::deliver(std::size_t i) {
    if (leaves_untouched()) {
        return;
    }
    is_of_others_[i] = has_joined_;
    AnyParameter const& parameter = parameters_[i];
    AnyView const& view = *places_[i].view;
    AnyView const gradient = parameter.grad();
    if (gradient) {
        require_fit(i, gradient);
        if (gradient.data() == view.data()) {
            return;
        }
    }
    if (gradient && !are_views_) {
        device().copy(view, gradient);
    } else if (parameter.can_set_grad()) {
        parameter.set_grad(view);
    } else {
        throw ContractViolation{concat(
            describe(i),
            " has no gradient to receive the average in; give it a zero gradient before the "
            "first iteration, or specialise parameter_traits::set_grad"
        )};
    }
}

JOINABLE_DEFINITION void Gradients::rebuild(std::vector<std::size_t> order) {
    std::vector<std::size_t> residents;
    for (std::size_t const i : trained_) {
        if (is_resident(i)) {
            residents.push_back(i);
        }
    }
    trained_ = std::move(order);
    layout_.rebuild(parameters_, trained_, limits_);
    find_places(places_, layout_);
    for (std::size_t const i : residents) {
        parameters_[i].set_grad(*places_[i].view);
    }
}

JOINABLE_DEFINITION std::string Gradients::describe(std::size_t i) const {
    return concat(describe_parameter(parameters_, i), " on rank ", rank_);
}

JOINABLE_DEFINITION bool Gradients::needs_backup() const {
    return joined_ == JoinedGradients::untouched &&
           std::any_of(trained_.begin(), trained_.end(), [&](std::size_t i) {
               return parameters_[i].can_set_grad();
           });
}

JOINABLE_DEFINITION void
Gradients::find_places(std::vector<Place>& places, BucketLayout const& layout) {
    for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
        Bucket const& bucket = layout.buckets()[b];
        for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
            places[bucket.parameters[k]] = {&bucket.views[k], b};
        }
    }
}

JOINABLE_DEFINITION bool Gradients::is_resident(std::size_t i) const {
    AnyView const gradient = parameters_[i].grad();
    return gradient && gradient.data() == places_[i].view->data();
}

JOINABLE_DEFINITION void Gradients::move_into_buckets(bool existing_only) {
    for (std::size_t const i : trained_) {
        AnyView const& view = *places_[i].view;
        AnyView const gradient = parameters_[i].grad();
        if (gradient) {
            device().copy(gradient, view);
        }
        if (gradient || !existing_only) {
            parameters_[i].set_grad(view);
        }
    }
    device().finish();
}

JOINABLE_DEFINITION void Gradients::require_fit(std::size_t i, AnyView const& gradient) const {
    check_gradient(parameters_, i, gradient);
    AnyView const& view = *places_[i].view;
    if (gradient.dtype() != view.dtype() || gradient.extents() != view.extents() ||
        gradient.device() != view.device()) {
        bool const are_together = gradient.device() == view.device();
        auto const text = [&](AnyView const& tensor) {
            return to_text(tensor) + (are_together ? "" : " on " + to_text(tensor.device()));
        };
        throw ContractViolation{concat(
            "the gradient of ",
            describe(i),
            " is ",
            text(gradient),
            ", but its value is ",
            text(view),
            "; both need the same dtype, extents and device"
        )};
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/bucket/detail/static_graph.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Counts how often each gradient becomes ready. The first iteration is recorded. In later ones a
/// gradient is final when it became ready as often as then. Local.
class StaticGraph {
public:
    explicit StaticGraph(std::size_t parameters) : calls_(parameters), left_(parameters) {}

    [[nodiscard]] bool is_recorded() const noexcept { return is_recorded_; }
    /// Whether the recorded iteration used parameter `i`.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return calls_[i] != 0; }

    /// Starts an iteration.
    void begin() {
        if (is_recorded_) {
            left_ = calls_;
        } else {
            calls_.assign(calls_.size(), 0);
        }
    }

    /// Counts a mark of gradient `i`. Returns whether it is the last one of the recorded number.
    [[nodiscard]] bool mark(std::size_t i) noexcept {
        if (!is_recorded_) {
            ++calls_[i];
            return false;
        }
        return --left_[i] == 0;
    }
    void record() noexcept { is_recorded_ = true; }

private:
    std::vector<std::uint32_t> calls_;
    std::vector<std::uint32_t> left_;
    bool is_recorded_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/detail/used_map.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Tells which parameters some rank uses, and what ranks have of those that none uses. It has a word
/// per parameter; the owner of the map sums them over ranks. A word counts ranks with a backward
/// pass in three fields: those that use the parameter, those that do not and have a gradient of it,
/// and those that have none. Local.
class UsedMap {
public:
    explicit UsedMap(std::size_t parameters) : counts_(parameters) {}

    /// Clears all counts, including those of other ranks.
    void clear() noexcept {
        std::fill(counts_.begin(), counts_.end(), 0);
        is_known_ = false;
    }
    /// Records that this rank uses parameter `i`.
    void use(std::size_t i) noexcept { counts_[i] = user; }
    /// Records that this rank's pass does not use parameter `i`.
    void leave_out(std::size_t i, bool has_gradient) noexcept {
        counts_[i] = has_gradient ? holder : 1;
    }

    /// The counts to sum over all ranks.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return counts_; }
    /// Called after the words have been summed.
    void set_known() noexcept { is_known_ = true; }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }

    /// Whether some rank uses parameter `i`; before the map is known, whether this rank does.
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return counts_[i] >= user; }
    /// Whether some rank ran a pass, and parameter `i` has no gradient on any rank that did.
    [[nodiscard]] bool is_absent(std::size_t i) const noexcept {
        return counts_[i] != 0 && counts_[i] < holder;
    }
    /// Whether no rank uses any parameter.
    [[nodiscard]] bool is_empty() const noexcept {
        return std::all_of(counts_.begin(), counts_.end(), [](auto word) { return word < user; });
    }

private:
    static constexpr std::uint64_t holder = std::uint64_t{1} << 21U; // a field counts 2^21 ranks
    static constexpr std::uint64_t user = std::uint64_t{1} << 42U;

    std::vector<std::uint64_t> counts_;
    bool is_known_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/marks.hpp

namespace joinable { inline namespace v0 {

/// @file
/// What Reducer and ShardReducer share for the marks of a rank's backward pass. Local.

namespace detail {

/// Calls f(i) for each parameter that a backward pass leaves out. `unused` is a range of indices,
/// or a predicate over the indices in `trained`.
template <class Unused, class F>
void for_each_unused(Unused const& unused, std::vector<std::size_t> const& trained, F const& f) {
    if constexpr (std::is_invocable_r_v<bool, Unused const&, std::size_t>) {
        for (std::size_t const i : trained) {
            if (unused(i)) {
                f(i);
            }
        }
    } else {
        for (auto const i : unused) {
            f(static_cast<std::size_t>(i));
        }
    }
}

/// The argument `ready` of a backward pass, which marks a gradient.
template <class F>
class Ready {
public:
    explicit Ready(F mark) : mark_{std::move(mark)} {}

    void operator()(std::size_t i) const { mark_(i); }
    /// Explains an argument that is no index.
    template <class Other>
        requires(!std::convertible_to<Other, std::size_t>)
    void operator()(Other const&) const {
        static_assert(
            std::convertible_to<Other, std::size_t>,
            "ready: it takes the index of a parameter in the list that was given, as in ready(0)"
        );
    }

private:
    F mark_;
};

inline void require_in_range(std::size_t i, std::size_t count, int rank) {
    if (i >= count) {
        throw ContractViolation{concat(
            "parameter ", i, " is out of range on rank ", rank, ": there are ", count, " parameters"
        )};
    }
}

[[noreturn]] inline void refuse_late_skip(int rank) {
    throw ContractViolation{concat(
        "a batch cannot be skipped on rank ",
        rank,
        " any more: its first bucket is on its way to the others; let the exception leave "
        "the guard"
    )};
}

/// The gradients that hold something of rounds that were not reduced.
class AccumulatedMarks {
public:
    void resize(std::size_t parameters) { marks_.resize(parameters, false); }
    void mark(std::size_t i, AnyParameter const& parameter) {
        marks_[i] = true;
        has_elements_ = has_elements_ || parameter.value().numel() != 0;
    }
    [[nodiscard]] bool operator[](std::size_t i) const { return marks_[i]; }
    /// Whether any of them has elements.
    [[nodiscard]] bool has_elements() const noexcept { return has_elements_; }
    void clear() noexcept {
        marks_.assign(marks_.size(), false);
        has_elements_ = false;
    }

private:
    std::vector<bool> marks_;
    bool has_elements_ = false;
};

/// Starts the collectives of an iteration. If one cannot start, the iteration cannot be finished, because a
/// bucket would be delivered that nothing has reduced.
class Launches {
public:
    template <class F>
    void start(F const& f) {
        is_lost_ = true;
        f();
        is_lost_ = false;
    }
    /// A new iteration begins, or zeros replace this one's gradients.
    void reset() noexcept { is_lost_ = false; }
    /// @throws ContractViolation  a collective could not start.
    void require_whole() const {
        if (is_lost_) {
            throw ContractViolation{
                "the reduction of a bucket could not start, so this iteration cannot be finished; call skip(), or "
                "let the exception leave the guard"
            };
        }
    }

private:
    bool is_lost_ = false;
};

/// Why a parameter cannot be marked that was not trained when the model was made.
[[nodiscard]] inline std::string_view why_not_trained(AnyParameter const& parameter) {
    return parameter.requires_grad()
               ? " was marked and requires a gradient now, but did not when the model was made; make the model "
                 "anew after unfreezing parameters"
               : " was marked, but does not require a gradient";
}

/// `text`, followed by the parameters that this rank did not mark (those with is_missing(i)), if
/// any, and by the first of them that was frozen after the model was made.
template <class F>
[[nodiscard]] std::string concat_missing(
    std::string_view text, ParameterList const& parameters, int rank, F const& is_missing
) {
    constexpr std::size_t most = 16; // for readers; the rest is counted
    std::size_t missing = 0;
    std::string names;
    std::string frozen;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!is_missing(i)) {
            continue;
        }
        if (missing++ < most) {
            names += (missing == 1 ? "" : ", ") + describe_parameter(parameters, i);
        }
        if (frozen.empty() && !parameters[i].requires_grad()) {
            frozen = concat(
                "; ",
                describe_parameter(parameters, i),
                " requires no gradient any more, but did when the model was made: make the model anew after "
                "freezing parameters"
            );
        }
    }
    if (missing > most) {
        names += concat(" and ", missing - most, " more");
    }
    return missing == 0 ? std::string{text}
                        : concat(text, " (rank ", rank, " did not mark ", names, ")", frozen);
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/bucket/detail/iteration.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's side of an iteration: which gradients are ready, which are unused, which buckets are
/// full. Packs gradients when they are ready and reports wrong calls. Local.
class Iteration {
public:
    Iteration(Gradients& gradients, BucketOptions const& options);

    /// Whether the map of used parameters is exchanged in every iteration.
    [[nodiscard]] bool finds_unused() const noexcept { return finds_unused_; }
    /// Empty if all parameters are used.
    [[nodiscard]] std::optional<UsedMap>& used() noexcept { return used_; }
    [[nodiscard]] bool is_used(std::size_t i) const noexcept { return !used_ || used_->is_used(i); }

    /// Fills the place of a parameter that another rank uses, before the bucket is sent. If this
    /// rank does not use it, writes zeros or what the gradient holds.
    void take_unused(std::size_t i) const;
    /// Whether every gradient of a bucket is in its place or known to be unused.
    [[nodiscard]] bool is_full(std::size_t bucket) const noexcept {
        return pending_[bucket] == 0 && !is_recording_;
    }

    // -- the course of an iteration ----------------------------------------------------------------

    /// Gradients will be marked, unless `without` says that there is no pass: then contribute_nothing() or
    /// contribute_accumulated() follows.
    void begin(double factor, std::optional<WithoutPass> const& without);

    void leave_out(std::size_t i);
    /// With find_unused, leaves out the parameters that were frozen since they were listed.
    void leave_out_frozen();
    /// Leaves out the parameters that the recorded graph does not use.
    void leave_out_unrecorded();

    void mark(std::size_t i);
    void mark_accumulated(std::size_t i) {
        require_trained(i);
        accumulated_.mark(i, gradients_.parameters()[i]);
    }
    [[nodiscard]] bool holds_accumulated() const noexcept { return accumulated_.has_elements(); }

    void contribute_nothing();
    void contribute_accumulated() {
        for (std::size_t const i : trained()) {
            used_ ? take_or_leave(i) : take(i);
        }
    }
    /// Forgets what was accumulated. Between iterations.
    void discard_accumulated() noexcept { accumulated_.clear(); }

    /// Ends the pass. Parameters that a static graph did not mark in its first iteration are
    /// unused; all others must be ready.
    void complete();
    void write_used();
    /// Called after the averages are delivered. See WithoutPass: gives the parameters that no rank used the
    /// gradients that they have on ranks with a pass, zeros or none.
    void follow_others();

    /// The order in which the gradients became ready, unused ones last. Empty if this rank had
    /// none.
    [[nodiscard]] std::vector<std::size_t> const& ready_order() const noexcept {
        return ready_order_;
    }
    /// The buckets have been cut by an order, so no further order is recorded.
    void set_ordered() {
        records_order_ = false;
        fit_to_buckets();
    }

    void end();

    void require_open(std::string_view verb) const;

private:
    enum class State : std::uint8_t { pending, ready, unused };

    [[nodiscard]] bool is_unused(std::size_t i) const noexcept {
        return states_[i] == State::unused;
    }
    [[nodiscard]] std::vector<std::size_t> const& trained() const noexcept {
        return gradients_.trained();
    }
    void fit_to_buckets() { pending_.resize(gradients_.buckets().size()); }

    void take(std::size_t i) {
        gradients_.pack(i, factor_);
        settle(i, State::ready);
    }
    /// With a static graph, later iterations cannot send a parameter that no rank used in the first
    /// one.
    void take_used(std::size_t i);
    /// Handles a parameter that this iteration does not use: its gradient may hold earlier rounds.
    void take_or_leave(std::size_t i) { accumulated_[i] ? take_used(i) : settle(i, State::unused); }
    void settle(std::size_t i, State state) {
        states_[i] = state;
        --pending_[gradients_.bucket_of(i)];
    }

    /// If a parameter has several marks, the last one counts.
    void complete_ready_order();

    // -- errors -----------------------------------------------------------------------------------

    void require_trained(std::size_t i) const;

    void require_markable(std::size_t i) const;

    void require_all_ready() const;

    [[nodiscard]] std::string concat_missing(std::string_view text) const;
    [[nodiscard]] bool is_missing(std::size_t i) const {
        return gradients_.is_trained(i) && states_[i] == State::pending;
    }
    /// Whether trained parameter `i` was frozen since it was listed.
    [[nodiscard]] bool is_frozen(std::size_t i) const {
        return !gradients_.parameters()[i].requires_grad();
    }

    Gradients& gradients_;
    std::vector<State> states_; ///< per parameter
    AccumulatedMarks accumulated_;
    std::vector<std::size_t> pending_; ///< per bucket: gradients that are not in place
    std::optional<UsedMap> used_;
    std::optional<StaticGraph> graph_;
    std::vector<std::size_t> ready_order_;
    double factor_ = 0;
    bool finds_unused_;
    bool sends_held_;
    std::optional<WithoutPass> without_; ///< pass in the open iteration of this rank
    bool records_order_;
    bool is_open_ = false;
    bool is_recording_ = false; ///< the static graph: used parameters are known only at the end
};

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/detail/iteration.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Iteration::Iteration(Gradients& gradients, BucketOptions const& options)
    : gradients_{gradients}, states_(gradients.parameters().size()),
      finds_unused_{options.find_unused && !options.static_graph},
      sends_held_{options.unused_gradients == UnusedGradients::held},
      records_order_{rebuilds(options)} {
    accumulated_.resize(states_.size());
    if (options.find_unused || options.static_graph) {
        used_.emplace(states_.size());
    }
    if (options.static_graph) {
        graph_.emplace(states_.size());
    }
    ready_order_.reserve(gradients.trained().size());
    fit_to_buckets();
}

JOINABLE_DEFINITION void Iteration::take_unused(std::size_t i) const {
    if (is_unused(i)) {
        bool const is_held = sends_held_ && !without_;
        is_held ? gradients_.pack(i, factor_) : gradients_.zero(i);
    }
}

JOINABLE_DEFINITION void
Iteration::begin(double factor, std::optional<WithoutPass> const& without) {
    if (is_open_) {
        throw ContractViolation{concat_missing(
            "the previous iteration was not finalized; call finalize_backward() first"
        )};
    }
    is_open_ = true;
    factor_ = factor;
    without_ = without;
    is_recording_ = !without && graph_ && !graph_->is_recorded();
    for (std::size_t b = 0; b < pending_.size(); ++b) {
        pending_[b] = gradients_.buckets()[b].parameters.size();
    }
    std::fill(states_.begin(), states_.end(), State::pending);
    ready_order_.clear();
    if (finds_unused_) {
        used_->clear();
    }
    if (graph_) {
        graph_->begin();
    }
}

JOINABLE_DEFINITION void Iteration::leave_out(std::size_t i) {
    require_trained(i);
    char const* const wrong =
        !finds_unused_
            ? " was said to be unused, but the option find_unused is off or "
              "static_graph finds out by itself; turn find_unused on, or mark it ready with a gradient of zeros"
        : states_[i] != State::pending ? " was said to be unused twice"
                                       : nullptr;
    if (wrong != nullptr) {
        throw ContractViolation{gradients_.describe(i) + wrong};
    }
    take_or_leave(i);
}

JOINABLE_DEFINITION void Iteration::leave_out_frozen() {
    for (std::size_t k = 0; finds_unused_ && k < trained().size(); ++k) {
        if (std::size_t const i = trained()[k]; states_[i] == State::pending && is_frozen(i)) {
            take_or_leave(i);
        }
    }
}

JOINABLE_DEFINITION void Iteration::leave_out_unrecorded() {
    for (std::size_t k = 0; graph_ && graph_->is_recorded() && k < trained().size(); ++k) {
        if (!graph_->is_used(trained()[k])) {
            take_or_leave(trained()[k]);
        }
    }
}

JOINABLE_DEFINITION void Iteration::mark(std::size_t i) {
    require_trained(i);
    if (finds_unused_ && is_open_ && is_unused(i) && is_frozen(i)) {
        return; // an engine may mark all parameters
    }
    require_markable(i);
    if (records_order_) {
        ready_order_.push_back(i);
    }
    if (!graph_ || graph_->mark(i)) {
        take(i);
    }
}

JOINABLE_DEFINITION void Iteration::contribute_nothing() {
    if (!without_) { // the pass failed
        without_.emplace();
    }
    is_recording_ = false;
    ready_order_.clear();
    for (std::size_t const i : trained()) {
        states_[i] = State::unused;
    }
    std::fill(pending_.begin(), pending_.end(), std::size_t{0});
}

JOINABLE_DEFINITION void Iteration::complete() {
    if (is_recording_) {
        complete_ready_order();
        for (std::size_t const i : trained()) {
            graph_->is_used(i) ? take_used(i) : take_or_leave(i);
        }
        graph_->record();
        is_recording_ = false;
    } else if (graph_) {
        complete_ready_order();
    }
    require_all_ready();
}

JOINABLE_DEFINITION void Iteration::write_used() {
    for (std::size_t const i : trained()) {
        if (!is_unused(i)) {
            used_->use(i);
        } else if (!without_ || without_->is_like_pass()) {
            used_->leave_out(i, gradients_.has(i));
        }
    }
}

JOINABLE_DEFINITION void Iteration::follow_others() {
    if (!used_ || !without_ || !without_->follows_others()) {
        return;
    }
    for (std::size_t k = 0; k < trained().size(); ++k) {
        if (std::size_t const i = trained()[k]; !used_->is_used(i)) {
            // A static graph sends no map in later iterations, but gradients may come and go.
            gradients_.follow_others(
                i,
                !finds_unused_        ? OtherGradient::unknown
                : used_->is_absent(i) ? OtherGradient::none
                                      : OtherGradient::zeros
            );
        }
    }
}

JOINABLE_DEFINITION void Iteration::end() {
    if (graph_ && used_->is_empty()) {
        used_->clear(); // no rank had gradients: the graph is not recorded yet
    }
    if (!without_ || !without_->is_untouched()) {
        discard_accumulated();
    }
    is_open_ = false;
}

JOINABLE_DEFINITION void Iteration::require_open(std::string_view verb) const {
    if (!is_open_) {
        throw ContractViolation{
            concat(verb, " without prepare_for_backward(): no iteration is open")
        };
    }
}

JOINABLE_DEFINITION void Iteration::take_used(std::size_t i) {
    if (graph_ && used_->is_known() && !used_->is_used(i)) {
        throw ContractViolation{concat(
            gradients_.describe(i),
            " is used, but no rank used it in the first iteration: with static_graph all "
            "iterations use the same parameters; turn it off and find_unused on"
        )};
    }
    take(i);
}

JOINABLE_DEFINITION void Iteration::complete_ready_order() {
    if (ready_order_.empty()) {
        return;
    }
    std::vector<std::size_t> order; // from the end, each once
    std::vector<bool> is_listed(states_.size());
    auto const list = [&](std::size_t i) {
        if (!is_listed[i]) {
            is_listed[i] = true;
            order.push_back(i);
        }
    };
    for (std::size_t k = trained().size(); k-- > 0;) {
        if (!graph_->is_used(trained()[k])) {
            list(trained()[k]);
        }
    }
    for (std::size_t k = ready_order_.size(); k-- > 0;) {
        list(ready_order_[k]);
    }
    ready_order_.assign(order.rbegin(), order.rend());
}

JOINABLE_DEFINITION void Iteration::require_trained(std::size_t i) const {
    require_in_range(i, states_.size(), gradients_.rank());
    if (!gradients_.is_trained(i)) {
        throw ContractViolation{
            concat(gradients_.describe(i), why_not_trained(gradients_.parameters()[i]))
        };
    }
}

JOINABLE_DEFINITION void Iteration::require_markable(std::size_t i) const {
    require_trained(i);
    char const* const wrong =
        !is_open_ ? " was marked ready outside an iteration; call prepare_for_backward() first"
        : is_unused(i) && graph_
            ? " is used, but was not in the first iteration: with static_graph all iterations "
              "use the same parameters; turn it off and find_unused on"
        : is_unused(i) ? " was said to be unused, but became ready; leave it out of the unused ones"
        : states_[i] == State::ready && graph_
            ? " became ready more often than in the first iteration: with static_graph all "
              "iterations use parameters equally often; turn it off"
        : states_[i] == State::ready
            ? " was marked ready twice in an iteration; mark a parameter that is shared by "
              "modules or used in several passes once, when its last use is done, or turn "
              "static_graph on, which counts its uses"
            : nullptr;
    if (wrong != nullptr) {
        throw ContractViolation{gradients_.describe(i) + wrong};
    }
}

JOINABLE_DEFINITION void Iteration::require_all_ready() const {
    if (std::any_of(pending_.begin(), pending_.end(), [](std::size_t n) { return n != 0; })) {
        bool is_frozen_now = false;
        for (std::size_t const i : trained()) {
            is_frozen_now = is_frozen_now || (is_missing(i) && is_frozen(i));
        }
        throw ContractViolation{concat_missing(
            is_frozen_now && graph_
                ? "parameters that were in the first iteration are frozen now, but with static_graph all "
                  "iterations use the same parameters; turn it off and find_unused on, or freeze parameters "
                  "before the model's participant is made"
            : is_frozen_now
                ? "parameters that were trained when they were listed are frozen now, so not all gradients became "
                  "ready; turn the option find_unused on, or freeze parameters before the model's participant is "
                  "made"
            : graph_ ? "parameters are not used, but were in the first iteration: with "
                       "static_graph all iterations use the same parameters; turn it off and "
                       "find_unused on"
            : finds_unused_
                ? "not all gradients became ready; give those that the pass does not use to "
                  "prepare_for_backward() as unused, or check that all outputs of forward "
                  "reach "
                  "the loss"
                : "not all gradients became ready; mark every trainable parameter in each "
                  "iteration, set requires_grad to false where there is nothing to train, or "
                  "turn the option find_unused or static_graph on"
        )};
    }
}

JOINABLE_DEFINITION std::string Iteration::concat_missing(std::string_view text) const {
    return detail::concat_missing(
        text,
        gradients_.parameters(),
        gradients_.rank(),
        [&](std::size_t i) { return is_missing(i); }
    );
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/bucket/reducer.hpp

namespace joinable { inline namespace v0 {

/// Averages gradients over ranks, bucket by bucket, while the backward pass still runs. An engine
/// without a guard can drive it directly by its verbs.
///
/// One iteration: prepare_for_backward(factor), then mark_ready(i) for every trainable parameter in
/// any order, then finalize_backward(). A rank without gradients calls contribute_zeros() instead.
/// Every rank runs these collectives in an iteration:
///
/// | collective                 | when                                                            |
/// |----------------------------|-----------------------------------------------------------------|
/// | sum of the map of used     | find_unused: every iteration; static_graph: the first one       |
/// | parameters                 |                                                                 |
/// | buckets, by the reduction  | in index order, each when it is full, never in ready order. With|
/// |                            | a map, one for each run of parameters that some rank uses       |
/// | broadcast of the ready     | once, after the first iteration, to cut the buckets again       |
/// | order                      | (BucketOptions::rebuild_buckets)                                |
///
/// `Reduction` defines how a bucket travels, see BucketReduction. Nothing is allocated after the
/// buckets are final. `Times` is notified of each collective of a bucket.
template <Communicator Comm, class Reduction = AllReduce, Timeline Times = NoTimeline>
class Reducer {
    static_assert(models_bucket_reduction<Reduction, Comm>());

public:
    /// Local. Buckets are in arenas of make_arena(). `comm` and the objects that the parameters
    /// refer to must outlive the reducer.
    /// @throws ContractViolation  no parameter requires a gradient, or one of integers does; a
    ///         gradient does not fit its value; gradients as bucket views lack set_grad; neither
    ///         the device (Device::can_scale()) nor the reduction can scale gradients. Nothing was
    ///         changed.
    Reducer(
        Comm& comm,
        ParameterList parameters,
        BucketOptions const& options = {},
        Reduction reduction = {},
        detail::TakeGradients take = detail::TakeGradients::now
    )
        : comm_{comm}, host_{comm}, reduction_{checked(comm, std::move(reduction))},
          gradients_{
              std::move(parameters),
              options,
              static_cast<int>(comm.rank()),
              BufferMemory{comm},
              take
          },
          iteration_{gradients_, options}, is_rebuild_due_{detail::rebuilds(options)},
          words_{&own_words_}, own_words_{comm} {
        order_message_.resize(is_rebuild_due_ ? gradients_.trained().size() + 1 : 0);
        fit_to_buckets();
    }

    Reducer(Reducer const&) = delete;
    Reducer& operator=(Reducer const&) = delete;

    /// Registers the memory of the buckets with the communicator, if it can (RegistersArenas).
    /// Collective, once, after all ranks have made their reducers of the same parameters. All
    /// iterations use that memory, also on ranks without gradients.
    void register_memory() {
        if constexpr (RegistersArenas<Comm>) {
            gradients_.for_each_arena([this](Arena const& arena) {
                static_cast<void>(comm_.register_arena(arena)); // else it is used unregistered
            });
        }
    }

    /// Makes gradients views of the buckets, if BucketOptions::gradient_as_bucket_view is set. For
    /// a reducer made with TakeGradients::later. Local.
    void take_gradients() { gradients_.take(); }

    [[nodiscard]] ParameterList const& parameters() const noexcept {
        return gradients_.parameters();
    }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return gradients_.buckets();
    }

    /// Whether buckets are still to be cut anew. Local.
    [[nodiscard]] bool is_rebuild_due() const noexcept { return is_rebuild_due_; }

    [[nodiscard]] Reduction& reduction() noexcept { return reduction_; }
    [[nodiscard]] Times& timeline() noexcept { return timeline_; }
    /// Ends the timeline ranges of an iteration that failed. Local.
    void end_ranges() noexcept {
        for (auto& range : ranges_) {
            range.reset();
        }
    }

    /// Checks a factor that all ranks are about to give, such as that of a sum over all tokens. Local,
    /// the same verdict on all ranks.
    /// @throws ContractViolation  gradients have f16, the sum multiplies by the factor and rounds it
    ///         (ScalesSums), and f16 cannot hold it. Nothing was changed.
    void check_factor(double factor) {
        if (detail::rounds_factors<Comm>() && scales(comm_, reduction_)) {
            for (Bucket const& bucket : buckets()) {
                detail::check_rounding(factor, bucket.buffer.dtype);
            }
        }
    }

    /// Sends the map of the next iteration by `words`, of the same ranks in host memory, not by the
    /// communicator of the gradients. On a device, a map does not travel behind gradients then. The
    /// same on every rank. Local.
    void send_words_by(detail::ControlCommunicator& words) noexcept { words_ = &words; }
    /// Called before `words` is destroyed. A map that is under way there is lost. Local.
    void forget_words() noexcept {
        words_ = &own_words_;
        is_map_posted_ = false;
    }

    /// Starts an iteration. This rank's gradients are multiplied by `factor`, the divisor of the
    /// average with this rank's weight in it, as they are packed or as they are summed
    /// (ScalesSums). With factor 0 this rank contributes zeros whatever its gradients hold, because
    /// a mean over no samples is NaN. See check_factor() for small factors. `unused` names the
    /// parameters that get no gradient: a range of indices or a predicate over them; with find_unused, parameters that were frozen since they
    /// were listed are unused as well. `order_source` is the rank whose ready order is used
    /// for new buckets, the same on all ranks. Collective in effect; does not block.
    /// @throws ContractViolation  the previous iteration was not finalized; parameters are unused
    ///         without find_unused, or are listed twice, out of range or not trainable.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(double factor, Unused const& unused = {}, int order_source = 0) {
        begin(factor, order_source, std::nullopt);
        detail::for_each_unused(unused, gradients_.trained(), [&](std::size_t i) {
            iteration_.leave_out(i);
        });
        iteration_.leave_out_frozen();
        iteration_.leave_out_unrecorded();
        if (iteration_.finds_unused()) {
            launch_map();
        }
    }

    /// Records that gradient `i` was added to in a round that is not reduced: if parameters may be
    /// unused, the next iteration sends it even if the pass does not use it. Local.
    /// @throws ContractViolation  `i` is out of range or needs no gradient.
    void mark_accumulated(std::size_t i) { iteration_.mark_accumulated(i); }

    /// Marks the gradient of parameter `i` as final. Packs it, launches every full bucket whose
    /// predecessors are launched, and tests the oldest bucket in flight, so that communicators can
    /// make progress during the pass. A parameter without a gradient contributes zeros. With a
    /// static graph every use marks, and the last mark counts. Collective in effect; does not
    /// block.
    /// @throws ContractViolation  no iteration is prepared, `i` is out of range or needs no
    ///         gradient, was marked before or declared unused, or its gradient does not fit its
    ///         value. The iteration is lost.
    /// @throws what the communicator throws.
    void mark_ready(std::size_t i) {
        launches_.require_whole();
        iteration_.mark(i);
        advance();
        if (tested_ < launched_ && detail::make_progress(*works_[tested_])) {
            ++tested_;
        }
    }

    /// Contributes zeros from now on, because a batch failed. Call finalize_backward() afterwards.
    /// Collective in effect; does not block.
    /// @throws ContractViolation  no iteration is open, or it is too late: a bucket is in flight.
    void contribute_nothing() {
        iteration_.require_open("contribute_nothing()");
        if (launched_ != 0) {
            detail::refuse_late_skip(static_cast<int>(comm_.rank()));
        }
        gradients_.device().submit(); // what was packed, before zeros replace it
        iteration_.contribute_nothing();
        contributes_ = false;
        factor_ = 1.0; // of zeros
        next_bucket_ = 0;
        launches_.reset();
        advance();
    }

    /// Waits for all buckets and writes the averages into the gradients. A parameter without a
    /// gradient gets a view of its bucket if it has set_grad. Parameters that no rank uses are not
    /// touched, except by contribute_zeros(). Collective.
    /// @throws ContractViolation  parameters were not marked (the text lists them), the graph
    ///         differs from the first iteration's, or a parameter has no place for its average.
    /// @throws what the communicator throws.
    void finalize_backward() {
        iteration_.require_open("finalize_backward()");
        launches_.require_whole();
        iteration_.complete();
        if (auto const& used = iteration_.used(); used && !used->is_known()) {
            if (!is_map_posted_) {
                launch_map();
            }
            wait_for_map();
        }
        advance();
        deliver();
        if (is_rebuild_due_) {
            rebuild();
        }
        gradients_.device().finish();
        iteration_.end();
        words_ = &own_words_;
    }

    /// Runs a whole iteration for a rank that has no gradients: the same collectives with zeros;
    /// the averages are written into its gradients, and zeros or nothing for a parameter that no
    /// rank uses. For a rank that has joined a guard, BucketOptions::joined_gradients says what
    /// happens to these. Collective. Throws what finalize_backward() throws.
    void contribute_zeros(int order_source = 0, bool has_joined = false) {
        begin(0.0, order_source, without_pass(has_joined, false));
        contribute_nothing();
        finalize_backward();
    }

    /// The same for a rank without a backward pass whose gradients hold what it accumulated in
    /// earlier rounds (mark_accumulated). They are multiplied by `factor` and contribute.
    void contribute_accumulated(double factor, int order_source = 0, bool has_joined = false) {
        begin(factor, order_source, without_pass(has_joined, true));
        iteration_.contribute_accumulated();
        finalize_backward();
    }

    /// Whether mark_accumulated() was called since the last iteration. Local.
    [[nodiscard]] bool holds_accumulated() const noexcept { return iteration_.holds_accumulated(); }
    /// Forgets what mark_accumulated() recorded, because the gradients were cleared. Between iterations. Local.
    void discard_window() { iteration_.discard_accumulated(); }

    /// Called when a guard has ended, in any way: averages in the gradients of joined ranks last until then.
    /// Enqueues on the device. Local.
    void end_guard() { gradients_.end_guard(); }

private:
    using Range = decltype(std::declval<Times&>().bucket(0, 0));
    using BucketWork = std::remove_cvref_t<decltype(std::declval<Reduction&>().start(
        std::declval<Comm&>(), std::declval<BucketRun const&>(), 1.0, true
    ))>;

    // The script of an iteration, the same on ranks with and without gradients.

    [[nodiscard]] detail::WithoutPass without_pass(bool has_joined, bool sends_accumulated) const {
        return {has_joined, sends_accumulated, gradients_.joined_gradients()};
    }

    void begin(double factor, int order_source, std::optional<detail::WithoutPass> const& without) {
        contributes_ = factor != 0.0; // else zeros are packed
        // A device may have got its kernels since the last iteration.
        bool const scales_later = scales(comm_, reduction_) && contributes_;
        gradients_.begin(without && without->has_joined);
        end_ranges(); // of an iteration that failed
        iteration_.begin(scales_later ? 1.0 : factor, without);
        factor_ = scales_later ? factor : 1.0;
        order_source_ = order_source;
        next_bucket_ = 0;
        launches_.reset();
        launched_ = 0;
        tested_ = 0;
    }

    void launch_map() {
        iteration_.write_used();
        words_->post_sum(iteration_.used()->words());
        is_map_posted_ = true;
    }
    void wait_for_map() {
        words_->wait_sum();
        is_map_posted_ = false;
        iteration_.used()->set_known();
    }

    /// Launches the full buckets in index order. The map of used parameters is known before the
    /// first one, so parameters that no rank uses are never sent.
    void advance() {
        if (auto const& used = iteration_.used(); used && !used->is_known()) {
            if (!is_map_posted_ || !words_->test_sum()) {
                return;
            }
            wait_for_map();
        }
        while (next_bucket_ < buckets().size() && iteration_.is_full(next_bucket_)) {
            launches_.start([&] { launch_bucket(next_bucket_); });
            ++next_bucket_;
        }
    }

    void launch_bucket(std::size_t index) {
        Bucket const& bucket = buckets()[index];
        for_each_run(bucket, [&](std::size_t first, std::size_t last) {
            for (std::size_t k = first; k < last; ++k) {
                iteration_.take_unused(bucket.parameters[k]);
            }
            gradients_.device().submit();
            BucketRun const& run = runs_[launched_] = run_of(index, first, last);
            static_cast<void>(ranges_[launched_].emplace(timeline_.bucket(index, run.buffer.bytes())
            ));
            static_cast<void>(
                works_[launched_].emplace(reduction_.start(comm_, run, factor_, contributes_))
            );
            ++launched_; // a work that could not start is not waited for
        });
    }
    [[nodiscard]] BucketRun run_of(std::size_t index, std::size_t first, std::size_t last) const {
        Bucket const& bucket = buckets()[index];
        BucketRun run{index, {bucket.views[first].data(), 0, bucket.buffer.dtype}};
        for (std::size_t k = first; k < last; ++k) {
            run.buffer.count += bucket.views[k].numel();
        }
        return run;
    }

    [[nodiscard]] static Reduction checked(Comm& comm, Reduction reduction) {
        static_cast<void>(scales(comm, reduction));
        return reduction;
    }
    [[nodiscard]] static bool scales(Comm& comm, Reduction const& reduction) {
        bool const can = reduction.scales(comm);
        if (!can && !detail::device_of(comm).can_scale()) {
            throw ContractViolation{
                "gradients of a device are to be scaled, but its kernels are missing and the "
                "communicator cannot scale what it sums; give the device its kernels, see Device"
            };
        }
        return can;
    }

    void deliver() {
        std::size_t work = 0;
        for (Bucket const& bucket : buckets()) {
            for_each_run(bucket, [&](std::size_t first, std::size_t last) {
                works_[work]->wait();
                ranges_[work].reset();
                works_[work].reset();
                reduction_.finish(comm_, runs_[work++]);
                for (std::size_t k = first; Reduction::delivers && k < last; ++k) {
                    gradients_.deliver(bucket.parameters[k]);
                }
            });
        }
        gradients_.complete();
        iteration_.follow_others();
    }

    /// Calls f(first, last) for every run of a bucket's parameters that some rank uses.
    template <class F>
    void for_each_run(Bucket const& bucket, F const& f) const {
        std::size_t const count = bucket.parameters.size();
        auto const is_used = [&](std::size_t k) {
            return iteration_.is_used(bucket.parameters[k]);
        };
        for (std::size_t first = 0; first < count; ++first) {
            if (is_used(first)) {
                std::size_t last = first + 1;
                while (last < count && is_used(last)) {
                    ++last;
                }
                f(first, last);
                first = last;
            }
        }
    }

    /// Takes the order of `order_source`. A rank that skipped has none; then the next iteration
    /// tries again.
    void rebuild() {
        if (comm_.rank() == order_source_) {
            std::vector<std::size_t> const& order = iteration_.ready_order();
            order_message_[0] = order.size() + 1 == order_message_.size() ? 1 : 0;
            std::copy(order.begin(), order.end(), order_message_.begin() + 1);
        }
        Buffer const message{order_message_.data(), order_message_.size(), DType::u64};
        host_.broadcast(message, order_source_).wait();
        if (order_message_[0] != 0) {
            gradients_.rebuild({order_message_.begin() + 1, order_message_.end()});
            iteration_.set_ordered();
            fit_to_buckets();
            is_rebuild_due_ = false;
        }
    }

    void fit_to_buckets() {
        // With a map each parameter may be a run of its own, between two unused ones.
        std::size_t const runs = iteration_.used() ? gradients_.trained().size() : buckets().size();
        works_ = std::vector<std::optional<BucketWork>>(runs);
        ranges_ = std::vector<std::optional<Range>>(runs);
        runs_.resize(runs);
    }

    Comm& comm_;
    detail::HostCollectives<Comm> host_;
    Reduction reduction_;
    double factor_ = 1; ///< applied by the reduction
    bool contributes_ = false;
    detail::Gradients gradients_;
    detail::Iteration iteration_;
    int order_source_ = 0;
    std::size_t next_bucket_ = 0;
    detail::Launches launches_;
    std::size_t launched_ = 0; ///< number of works started
    std::size_t tested_ = 0;   ///< number of works known to be complete
    bool is_rebuild_due_;
    std::vector<std::uint64_t> order_message_; ///< whether there is an order, and the order
    Times timeline_;
    std::vector<BucketRun> runs_;              ///< of the works
    std::vector<std::optional<Range>> ranges_; ///< of the works
    bool is_map_posted_ = false;
    detail::ControlCommunicator* words_ = nullptr; ///< of the open or the next iteration
    // Destroyed first, because they use the memory of the members above.
    detail::ControlOver<Comm&> own_words_;
    std::vector<std::optional<BucketWork>> works_;
};

template <class Comm>
Reducer(Comm&, ParameterList) -> Reducer<Comm>;
template <class Comm>
Reducer(Comm&, ParameterList, BucketOptions) -> Reducer<Comm>;
template <class Comm, class Reduction>
Reducer(Comm&, ParameterList, BucketOptions, Reduction) -> Reducer<Comm, Reduction>;

}} // namespace joinable::v0

// ---- joinable/join/options.hpp

namespace joinable { inline namespace v0 {

/// The behaviour of a guard when some ranks have run out of inputs and others have not.
enum class EndPolicy : std::uint8_t {
    drain,         ///< the others continue to their end, and the joined ranks shadow them
    stop_at_first, ///< all ranks leave after the same number of rounds, without an exception
    throw_early,   ///< all ranks throw EarlyTermination, before the pass of that round
};

/// The kind of work that an active rank does in a round.
enum class Phase : std::uint8_t {
    train,
    evaluate, ///< no gradients, so the round never syncs
};

namespace detail {

/// An optional weight. It refuses fractions, because std::optional converts 0.5 to 0 without a warning.
class OptionalWeight : public std::optional<std::uint64_t> {
    using Base = std::optional<std::uint64_t>;

public:
    constexpr OptionalWeight(Base const& weight = {}) noexcept : Base{weight} {} // NOLINT
    constexpr OptionalWeight(std::nullopt_t) noexcept {}                         // NOLINT
    template <class T>
        requires std::is_arithmetic_v<T>
    constexpr OptionalWeight(T weight) noexcept // NOLINT(google-explicit-constructor)
        : Base{static_cast<std::uint64_t>(weight)} {
        static_assert(
            std::integral<T>,
            "RoundNotice: a weight is a whole number of samples or tokens; give an integer"
        );
    }

    template <std::same_as<OptionalWeight> T> // no conversions: those are std::optional's
    friend constexpr bool operator==(T const& a, T const& b) noexcept {
        return static_cast<Base const&>(a) == static_cast<Base const&>(b);
    }
};

} // namespace detail

/// A rank's announcement of the round that it opens. All active ranks must announce the same, apart
/// from the value of `weight` and `skips`.
struct RoundNotice {
    bool will_sync = true; ///< whether gradients are reduced in this round
    Phase phase = Phase::train;
    /// The number of samples or tokens in this rank's input; averages are then weighted. None =
    /// unweighted. All rounds that accumulate together have one, or none has.
    detail::OptionalWeight weight = {};
    /// This rank has no gradient of its own for this round (a batch that failed), so it counts with
    /// weight 0. In a guard it may omit `weight` where the others give one. Outside a guard, and in
    /// one that is not enabled, it gives `.weight = 0` there. With known lengths
    /// (JoinOptions::inputs) the others do not learn of it: its weight stays in the divisor, and
    /// they count it as a contributor.
    bool skips = false;

    friend constexpr bool operator==(RoundNotice const&, RoundNotice const&) = default;
};

/// Options of a guard. These must be the same on every rank, or all ranks throw Mismatch when they
/// enter: `end_policy`, `sync_every`, `carry_accumulated`, and whether `inputs` and
/// `weight_per_input` are given. `enable` must be the same, too: the others wait until the deadline
/// for a rank that does not enter.
struct JoinOptions {
    bool enable = true; ///< false: nothing is attached and nothing is sent
    EndPolicy end_policy = EndPolicy::drain;
    /// Overrides the deadline of the communicators inside the guard. Positive.
    std::optional<std::chrono::nanoseconds> timeout = {};
    /// This rank's number of inputs. When every rank gives it and the communicators can abort,
    /// rounds need no roll calls. Votes, leaving early and notices other than the default are then
    /// errors.
    std::optional<std::size_t> inputs = {};
    /// The weight of a default notice.
    detail::OptionalWeight weight_per_input = {};
    /// With default notices only every `sync_every`th training round of this guard syncs.
    std::size_t sync_every = 1;
    /// A rank that runs out adds what it accumulated in rounds that did not sync to the next
    /// reduction, once. False drops it, as PyTorch does.
    bool carry_accumulated = true;
    /// Called when this rank has shadowed more than `skew_limit` rounds in a row, at most once a
    /// minute in this process. An exception that it throws leaves the guard.
    std::function<void(std::string_view)> warn = {};
    std::size_t skew_limit = 1000;
};

namespace detail {

/// The notice of a round after `round` training rounds. A default notice, or one that sets only `skips`, gets
/// the options' weight and sync period.
[[nodiscard]] inline RoundNotice
completed(RoundNotice notice, JoinOptions const& options, std::size_t round) noexcept {
    if (notice == RoundNotice{.skips = notice.skips}) {
        notice.will_sync = (round + 1) % options.sync_every == 0;
        notice.weight = options.weight_per_input;
    }
    return notice;
}

} // namespace detail

/// The enumerator's name for error texts.
[[nodiscard]] constexpr std::string_view name_of(EndPolicy policy) noexcept {
    constexpr std::string_view names[] = {"drain", "stop_at_first", "throw_early"};
    return names[static_cast<std::size_t>(policy)];
}

}} // namespace joinable::v0

// ---- joinable/detail/failure.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The reason to tell peers about an exception. A failure that came from other ranks keeps its
/// culprits. Any other has none yet, which stands for the rank that throws it.
AbortReason failure_of(std::exception_ptr const& error);

/// The failure that ended the communicator by which ranks meet, from its exception.
AbortReason reason_of(std::exception_ptr const& error);

std::string failure_text(std::vector<int> const& ranks, std::string const& text);

/// The same reason, ready to be thrown on other ranks. Without culprits `rank` is the culprit,
/// unless it is an error without culprits on all ranks.
AbortReason blamed_on(int rank, AbortReason reason);

}}} // namespace joinable::v0::detail

// ---- joinable/detail/failure.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION AbortReason failure_of(std::exception_ptr const& error) {
    if (!error) {
        return {FailureKind::peer_failed, {}, {}};
    }
    try {
        std::rethrow_exception(error);
    } catch (PeerFailed const& failure) {
        return {FailureKind::peer_failed, failure.ranks(), failure.what()};
    } catch (TimedOut const& failure) {
        return {FailureKind::timed_out, failure.ranks(), failure.what()};
    } catch (Mismatch const& failure) {
        return {FailureKind::mismatch, failure.ranks(), failure.what()};
    } catch (std::exception const& other) {
        return {FailureKind::peer_failed, {}, other.what()};
    } catch (...) {
        return {FailureKind::peer_failed, {}, "an exception that is no std::exception"};
    }
}

JOINABLE_DEFINITION AbortReason reason_of(std::exception_ptr const& error) {
    try {
        std::rethrow_exception(error);
    } catch (CommunicationError const& failure) {
        return {FailureKind::communication, {}, failure.what()};
    } catch (ContractViolation const& failure) {
        return {FailureKind::contract, {}, failure.what()};
    } catch (...) {
        return failure_of(error);
    }
}

JOINABLE_DEFINITION std::string
failure_text(std::vector<int> const& ranks, std::string const& text) {
    std::string const left =
        "an exception left the guard, whose text only that rank knows; guard.fail(text) passes a text on";
    return ranks_text(ranks) + " failed: " + (text.empty() ? left : text);
}

JOINABLE_DEFINITION AbortReason blamed_on(int rank, AbortReason reason) {
    bool const is_of_all =
        reason.kind == FailureKind::communication || reason.kind == FailureKind::contract;
    if (reason.ranks.empty() && !is_of_all) {
        reason.ranks = {rank};
        reason.message = failure_text(reason.ranks, reason.message);
    }
    return reason;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/agreement/agree.hpp

/// @file
/// The mechanism by which an error or a difference on one rank becomes an error on all ranks.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr int max_world_size = 1 << 18; ///< so that no sum of squares overflows
inline constexpr std::uint32_t digest_mask = (1U << 23) - 1;

/// Tells whether all of `count` ranks added the same value F < 2^23. The sum and the sum of squares
/// determine this, because the mean of squares equals the square of the mean only if all values are
/// equal.
struct Agreement {
    std::uint64_t sum = 0;
    std::uint64_t squares = 0;

    static Agreement of(std::uint32_t value) noexcept {
        return {value, static_cast<std::uint64_t>(value) * value};
    }
    [[nodiscard]] std::optional<std::uint32_t> value(std::uint64_t count) const noexcept;
};

/// The words of a sum that shows whether ranks have the same 64 bits: three agreements, on 22 bits
/// each.
struct HashAgreement {
    static constexpr std::size_t words = 6;

    static void write(std::uint64_t* to, std::uint64_t hash) noexcept;
    static bool is_common(std::uint64_t const* sum, std::uint64_t ranks) noexcept;
};

inline constexpr std::size_t text_bytes = 256; ///< of one rank's text, in any message

/// Writes a text that only one rank adds to the sum. A text that is too long ends with "...".
void write_text(std::span<std::uint64_t> words, std::string_view text);
std::string read_text(std::span<std::uint64_t const> words);

/// The ranks of a sum of one bit per rank, from `first` on.
void set_bit(std::span<std::uint64_t> words, int bit);
void append_bits(std::vector<int>& ranks, std::span<std::uint64_t const> words, int first);

/// The questions that ranks ask each other after they found a difference, in messages of one size.
/// All ranks of `control` make the same calls.
class Inquiry {
public:
    /// `count` ranks have a say, `lowest` is the lowest of them. A rank without a say adds nothing.
    Inquiry(ControlCommunicator& control, int lowest, std::uint64_t count, bool has_say)
        : control_{control}, lowest_{lowest}, count_{count}, has_say_{has_say} {}

    /// The ranks for which `is_so` is true, ascending.
    [[nodiscard]] std::vector<int> ranks_with(bool is_so);

    /// The reason to throw after some ranks failed, the lowest with its `text`.
    [[nodiscard]] AbortReason failure(bool has_failed, std::string_view text);

    /// The reason to throw after hashes of lists differed. It names the first item that differs.
    [[nodiscard]] AbortReason difference(AgreementList const& list);

private:
    static constexpr std::size_t slot_count = 64;
    static constexpr int bits = 64 * slot_count * HashAgreement::words;
    static constexpr std::size_t label_bytes = 112;

    /// Each slot holds one item; the last slot stands for all further items.
    [[nodiscard]] std::size_t first_difference(AgreementList const& list);

    [[nodiscard]] std::span<std::uint64_t> place(std::size_t byte, std::size_t bytes) noexcept {
        return std::span{words_}.subspan(byte / 8, bytes / 8);
    }
    void write_item(std::size_t at, AgreementList::Item const& item);
    [[nodiscard]] AgreementList::Item read_item(std::size_t at);
    /// Where the name begins in "models differ: parameter 3": after the title.
    [[nodiscard]] static std::size_t name_in(std::string const& label);
    /// "rank 1 compares models (parameter 3: f32)".
    [[nodiscard]] static std::string place_of(int rank, AgreementList::Item const& item);
    /// If the labels differ, the text has both, and their common title once.
    [[nodiscard]] std::string text_of(int other);

    ControlCommunicator& control_;
    int lowest_;
    std::uint64_t count_;
    bool has_say_;
    std::array<std::uint64_t, slot_count * HashAgreement::words> words_{};
};

/// Collective. Returns the reason to throw for ranks without an error, if a rank has an error or
/// lists differ. A rank with an error then throws its own. `tally` may point to two counts of 20 bits, which
/// become their sums. Throws what the communicator throws.
/// Complexity: without errors and differences one sum of seven words, and no allocation.
[[nodiscard]] std::optional<AbortReason> find_disagreement(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error,
    std::uint64_t* tally = nullptr
);

/// Collective. Returns if no rank has an error and all lists are equal. Otherwise all ranks throw:
/// a rank with a `local_error` that one, the others PeerFailed with its text. If lists differ, all
/// throw Mismatch, which names the first item that differs, two values of it and the ranks that
/// differ from rank 0. The communicator stays usable then; any other error has aborted it.
void agree(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error = {}
);

/// Runs f() where the others expect no failure: they run collectives next. If it throws, these throw
/// PeerFailed with its text, provided that the communicator can abort.
template <Communicator Comm, class F>
void abort_if_throws(Comm& comm, F const& f) {
    try {
        f();
    } catch (...) {
        if constexpr (Aborts<Comm>) {
            comm.abort(blamed_on(comm.rank(), failure_of(std::current_exception())));
        }
        throw;
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/agreement/agree.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::optional<std::uint32_t> Agreement::value(std::uint64_t count
) const noexcept {
    if (count == 0) {
        return 0;
    }
    std::uint64_t const mean = sum / count;
    if (sum % count != 0 || squares != count * mean * mean) {
        return {};
    }
    return static_cast<std::uint32_t>(mean);
}

JOINABLE_DEFINITION void HashAgreement::write(std::uint64_t* to, std::uint64_t hash) noexcept {
    for (unsigned part = 0; part < 3; ++part) {
        constexpr std::uint64_t mask = (1U << 22) - 1;
        auto const said = Agreement::of(static_cast<std::uint32_t>((hash >> (22 * part)) & mask));
        to[2 * part] = said.sum;
        to[2 * part + 1] = said.squares;
    }
}

JOINABLE_DEFINITION bool
HashAgreement::is_common(std::uint64_t const* sum, std::uint64_t ranks) noexcept {
    return Agreement{sum[0], sum[1]}.value(ranks) && Agreement{sum[2], sum[3]}.value(ranks) &&
           Agreement{sum[4], sum[5]}.value(ranks);
}

JOINABLE_DEFINITION void write_text(std::span<std::uint64_t> words, std::string_view text) {
    std::size_t const space = 8 * words.size();
    std::string written{text.substr(0, space)};
    if (text.size() > space) {
        written.replace(space - 3, 3, "...");
    }
    std::memcpy(words.data(), written.data(), written.size());
}

JOINABLE_DEFINITION std::string read_text(std::span<std::uint64_t const> words) {
    std::string text(8 * words.size(), '\0');
    std::memcpy(text.data(), words.data(), text.size());
    std::erase(text, '\0');
    return text;
}

JOINABLE_DEFINITION void set_bit(std::span<std::uint64_t> words, int bit) {
    words[static_cast<std::size_t>(bit / 64)] |= std::uint64_t{1} << (bit % 64);
}

JOINABLE_DEFINITION void
append_bits(std::vector<int>& ranks, std::span<std::uint64_t const> words, int first) {
    for (int bit = 0; bit < 64 * static_cast<int>(words.size()); ++bit) {
        if (((words[static_cast<std::size_t>(bit / 64)] >> (bit % 64)) & 1U) != 0) {
            ranks.push_back(first + bit);
        }
    }
}

JOINABLE_DEFINITION std::vector<int> Inquiry::ranks_with(bool is_so) {
    std::vector<int> ranks;
    for (int first = 0; first < control_.size(); first += bits) {
        words_ = {};
        int const mine = control_.rank() - first;
        if (is_so && mine >= 0 && mine < bits) {
            set_bit(words_, mine);
        }
        control_.sum(words_);
        append_bits(ranks, words_, first);
    }
    return ranks;
}

JOINABLE_DEFINITION AbortReason Inquiry::failure(bool has_failed, std::string_view text) {
    std::vector<int> ranks = ranks_with(has_failed);
    words_ = {};
    write_text(place(0, text_bytes), text);
    control_.broadcast(words_, ranks.front());
    std::string message = failure_text(ranks, read_text(place(0, text_bytes)));
    return {FailureKind::peer_failed, std::move(ranks), std::move(message)};
}

JOINABLE_DEFINITION AbortReason Inquiry::difference(AgreementList const& list) {
    std::size_t const item = first_difference(list);
    words_ = {list.hash(item)};
    control_.broadcast(words_, lowest_);
    std::vector<int> ranks = ranks_with(has_say_ && list.hash(item) != words_[0]);
    int const other = ranks.empty() ? lowest_ : ranks.front();
    words_ = {};
    bool const is_lowest = control_.rank() == lowest_;
    if ((is_lowest || control_.rank() == other) && item < list.items().size()) {
        write_item(is_lowest ? 0 : text_bytes, list.items()[item]);
    }
    control_.sum(words_);
    std::string text = text_of(other);
    if (ranks.size() > 1) {
        text += concat("; ", ranks_text(ranks), " differ from rank ", lowest_);
    }
    return {FailureKind::mismatch, std::move(ranks), std::move(text)};
}

JOINABLE_DEFINITION std::size_t Inquiry::first_difference(AgreementList const& list) {
    constexpr std::size_t last = slot_count - 1;
    std::vector<std::uint64_t> const hashes_from = list.hashes_from();
    for (std::size_t first = 0;; first += last) {
        words_ = {};
        for (std::size_t slot = 0; has_say_ && slot < slot_count; ++slot) {
            std::size_t const item = first + slot;
            HashAgreement::write(
                &words_[slot * HashAgreement::words],
                slot != last                ? list.hash(item)
                : item < hashes_from.size() ? hashes_from[item]
                                            : 0
            );
        }
        control_.sum(words_);
        std::size_t slot = 0;
        while (slot < slot_count &&
               HashAgreement::is_common(&words_[slot * HashAgreement::words], count_)) {
            ++slot;
        }
        if (slot != last) {
            return first + slot;
        }
    }
}

JOINABLE_DEFINITION void Inquiry::write_item(std::size_t at, AgreementList::Item const& item) {
    write_text(place(at, label_bytes), item.label);
    write_text(place(at + label_bytes, text_bytes - label_bytes), item.value);
}

JOINABLE_DEFINITION AgreementList::Item Inquiry::read_item(std::size_t at) {
    AgreementList::Item item{read_text(place(at, label_bytes)), "nothing"};
    if (!item.label.empty()) {
        item.value = read_text(place(at + label_bytes, text_bytes - label_bytes));
    }
    return item;
}

JOINABLE_DEFINITION std::size_t Inquiry::name_in(std::string const& label) {
    std::size_t const colon = label.find(": ");
    return colon == std::string::npos ? 0 : colon + 2;
}

JOINABLE_DEFINITION std::string Inquiry::place_of(int rank, AgreementList::Item const& item) {
    std::string const title = item.label.substr(0, item.label.find(" differ: "));
    return concat("rank ", rank, " compares ", title, " (") +
           item.label.substr(name_in(item.label)) + ": " + item.value + ")";
}

JOINABLE_DEFINITION std::string Inquiry::text_of(int other) {
    auto const [label, value] = read_item(0);
    auto const there = read_item(text_bytes);
    std::size_t const name = name_in(there.label);
    std::string const text = (label.empty() ? there.label : label) + ": rank ";
    std::string const has = concat(lowest_, " has ", value, ", rank ", other, " has ");
    if (label == there.label || label.empty() || there.label.empty()) {
        return text + has + there.value;
    }
    if (label.substr(0, name_in(label)) == there.label.substr(0, name)) {
        return text + has + there.label.substr(name) + ": " + there.value;
    }
    return "ranks are at different places of the program: " + place_of(lowest_, {label, value}) +
           ", " + place_of(other, there) + "; do the same on every rank, in the same order";
}

JOINABLE_DEFINITION std::optional<AbortReason> find_disagreement(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error,
    std::uint64_t* tally
) {
    constexpr unsigned errors = 20; // bits of their count
    static_assert(agreement_words == 1 + HashAgreement::words);
    std::array<std::uint64_t, agreement_words> words{};
    words[0] = (local_error ? 1U : 0U) | (tally != nullptr ? *tally << errors : 0);
    HashAgreement::write(&words[1], list.hash_from(0));
    control.sum(words);
    if (tally != nullptr) {
        *tally = words[0] >> errors;
    }
    words[0] &= (1U << errors) - 1;
    auto const ranks = static_cast<std::uint64_t>(control.size());
    Inquiry inquiry{control, 0, ranks, true};
    if (words[0] != 0) {
        return inquiry.failure(local_error != nullptr, failure_of(local_error).message);
    }
    if (!HashAgreement::is_common(&words[1], ranks)) {
        return inquiry.difference(list);
    }
    return {};
}

JOINABLE_DEFINITION void agree(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& local_error
) {
    std::optional<AbortReason> failure;
    try {
        failure = find_disagreement(control, list, local_error);
    } catch (...) { // a rank's own error says more than that others did not come to hear it
        if (local_error) {
            control.abort(blamed_on(control.rank(), failure_of(local_error)));
            std::rethrow_exception(local_error);
        }
        control.abort(blamed_on(control.rank(), reason_of(std::current_exception())));
        throw;
    }
    if (local_error) {
        std::rethrow_exception(local_error);
    }
    if (failure) {
        throw_failure(*failure);
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/verdict.hpp

/// @file
/// The words of a roll call, and the verdict that every rank computes from their sum.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::uint64_t max_weight = std::uint64_t{1} << 45;

/// Says why a weight above max_weight is refused. A negative number became such a weight, and is one again.
[[nodiscard]] inline std::string refusal_of(std::uint64_t weight) {
    auto const given = static_cast<std::int64_t>(weight);
    return given < 0
               ? concat("a weight of ", given, " is negative; give the number of samples or tokens")
               : concat("a weight of ", given, " is above the maximum of ", max_weight);
}

/// The contents of a roll call: one rank's contribution, or the sum over all ranks. encode() packs them
/// into seven words: three counts of 20 bits share a word, and so do `code` and `silent`; `code` and
/// `digest` each have a second word for their squares.
struct RollCallLanes {
    std::uint32_t active = 0;
    std::uint32_t arrived = 0;      ///< ran out of inputs since the previous roll call
    std::uint32_t failed = 0;       ///< leaves by an exception
    std::uint32_t stop = 0;         ///< votes to stop
    std::uint32_t weighted = 0;     ///< gives a weight
    std::uint32_t contributors = 0; ///< has a gradient for this round or from before
    std::uint64_t weight = 0;       ///< in a round that syncs, with the weight held before
    Agreement code;                 ///< readable: see RoundCode
    Agreement digest;               ///< the number of the round that the rank opens
    std::uint32_t silent = 0; ///< skips without a weight, so it agrees with weights and without

    using Words = std::array<std::uint64_t, agreement_words>;

    [[nodiscard]] Words encode() const noexcept;
    static RollCallLanes decode(Words const& words) noexcept;

    /// Whether all ranks announce the same round, apart from weights.
    [[nodiscard]] bool have_one_code() const noexcept {
        return code.value(active) && digest.value(active);
    }

private:
    static constexpr unsigned count_at = 44;     ///< sums of 2^18 values below 2^23 are below 2^41
    using Fields = std::array<std::uint32_t, 3>; ///< of 20 bits each: 2^18 ranks fit
    static std::uint64_t packed(std::uint64_t a, std::uint64_t b, std::uint64_t c) noexcept {
        return a | b << 20 | c << 40;
    }
    static Fields unpacked(std::uint64_t word) noexcept;
};

/// What ranks that ran out of inputs since the last round that synced had accumulated before, in rounds
/// that did not sync. It belongs to the next round that does.
struct Carry {
    std::uint64_t ranks = 0; ///< the ranks that accumulated anything
    std::uint64_t weight = 0;

    friend constexpr bool operator==(Carry const&, Carry const&) = default;
};

/// How a rank opened a round. With look_ahead the rank announces the next round before this round's
/// collectives, and joined ranks do the same.
enum class Opening : std::uint8_t { notification, next, look_ahead };

/// The code lane: everything about a round that active ranks must agree on and that error texts
/// name.
struct RoundCode {
    Phase phase = Phase::train;
    bool syncs = false;
    Opening opening = Opening::notification;
    std::uint32_t opener = 0; ///< index of the notifying participant

    [[nodiscard]] std::uint32_t encode() const noexcept;
    static RoundCode decode(std::uint32_t code) noexcept;
    /// Lists a round for ranks that disagree about it. `is_weighted` is none if some rank that is compared
    /// is silent about it.
    void agree_on(AgreementList& list, std::optional<bool> is_weighted) const;
};

enum class Verdict : std::uint8_t {
    go_on,     ///< the round is open
    failed,    ///< a rank leaves by an exception: the others throw PeerFailed
    mismatch,  ///< active ranks announced different rounds: all throw Mismatch
    stop,      ///< a vote, or a rank has arrived under EndPolicy::stop_at_first
    early_end, ///< a rank has arrived under EndPolicy::throw_early
    end,       ///< no rank is active any more
};

/// Judges the sum in an order that gives every rank the same verdict. A failure hides a mismatch,
/// because a leaving rank cannot say what it would have done. Both hide an end.
[[nodiscard]] Verdict judge(RollCallLanes const& said, EndPolicy policy) noexcept;

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/verdict.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION RollCallLanes::Words RollCallLanes::encode() const noexcept {
    std::uint64_t const ranks = packed(active, arrived, failed);
    std::uint64_t const say = packed(stop, weighted, contributors);
    std::uint64_t const coded = code.sum | std::uint64_t{silent} << count_at;
    return {{ranks, say, weight, coded, code.squares, digest.sum, digest.squares}};
}

JOINABLE_DEFINITION RollCallLanes RollCallLanes::decode(Words const& words) noexcept {
    auto const [active, arrived, failed] = unpacked(words[0]);
    auto const [stop, weighted, contributors] = unpacked(words[1]);
    std::uint64_t const code = words[3] << (64 - count_at) >> (64 - count_at);
    auto const silent = static_cast<std::uint32_t>(words[3] >> count_at);
    return {
        active,
        arrived,
        failed,
        stop,
        weighted,
        contributors,
        words[2],
        {code, words[4]},
        {words[5], words[6]},
        silent
    };
}

JOINABLE_DEFINITION RollCallLanes::Fields RollCallLanes::unpacked(std::uint64_t word) noexcept {
    auto const from = [&](unsigned bit) {
        return static_cast<std::uint32_t>(word >> bit) << 12 >> 12;
    };
    return {{from(0), from(20), from(40)}};
}

JOINABLE_DEFINITION std::uint32_t RoundCode::encode() const noexcept {
    return static_cast<std::uint32_t>(phase) | (syncs ? 2U : 0U) |
           static_cast<std::uint32_t>(opening) << 2 | opener << 4;
}

JOINABLE_DEFINITION RoundCode RoundCode::decode(std::uint32_t code) noexcept {
    return {
        static_cast<Phase>(code & 1U),
        (code & 2U) != 0,
        static_cast<Opening>((code >> 2) & 3U),
        code >> 4
    };
}

JOINABLE_DEFINITION void
RoundCode::agree_on(AgreementList& list, std::optional<bool> is_weighted) const {
    list.add("phase", phase == Phase::train ? "train" : "evaluate");
    list.add("will_sync", syncs);
    if (is_weighted) {
        list.add("has a weight", *is_weighted);
    }
    list.add(
        "opened by",
        opening == Opening::notification ? concat("participant ", opener)
        : opening == Opening::next       ? "next()"
                                         : "look-ahead"
    );
}

JOINABLE_DEFINITION Verdict judge(RollCallLanes const& said, EndPolicy policy) noexcept {
    if (said.failed > 0) {
        return Verdict::failed;
    }
    if (!said.have_one_code() ||
        (said.weighted != 0 && said.weighted + said.silent != said.active)) {
        return Verdict::mismatch;
    }
    if (said.stop > 0) {
        return said.active > 0 ? Verdict::stop : Verdict::end;
    }
    if (said.active == 0) {
        return Verdict::end;
    }
    if (said.arrived > 0 && policy == EndPolicy::stop_at_first) {
        return Verdict::stop;
    }
    if (said.arrived > 0 && policy == EndPolicy::throw_early) {
        return Verdict::early_end;
    }
    return Verdict::go_on;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/window.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The training rounds since the last one that synced, as one rank counts them. It lives across guards,
/// because gradients do, and ends where gradients are reduced.
struct Window {
    std::size_t rounds = 0;        ///< rounds that did not sync, on any rank
    std::size_t batches = 0;       ///< those to which this rank added a gradient
    std::uint64_t weight = 0;      ///< of these batches
    bool is_weighted = false;      ///< whether these batches gave a weight
    std::size_t last_batches = 0;  ///< of the last of these rounds
    std::uint64_t last_weight = 0; ///< likewise

    /// Whether the gradients of this rank hold something.
    [[nodiscard]] bool is_open() const noexcept { return batches != 0; }
    /// Whether the next average counts anything of it. A batch that was skipped may have a weight.
    [[nodiscard]] bool is_empty() const noexcept { return batches == 0 && weight == 0; }
    /// Whether two participants of a rank hold the same batches.
    [[nodiscard]] bool holds_the_same(Window const& other) const noexcept {
        return batches == other.batches && weight == other.weight &&
               is_weighted == other.is_weighted;
    }

    /// Checks a notice before its round. The rank adds `own` to its weight.
    /// @throws ContractViolation  together with the held weight it is too large to be summed over
    ///         all ranks; or it has a weight and the batches of the window have none, or the reverse.
    void require_continued(RoundNotice const& notice, std::uint64_t own) const {
        if (own > max_weight) {
            throw ContractViolation{refusal_of(own)};
        }
        if (notice.phase != Phase::train) {
            return;
        }
        if (own > max_weight - weight) {
            throw ContractViolation{
                "a weight of " + to_text(own) + " after " + to_text(weight) + " in " +
                to_text(rounds) + " rounds that did not sync is above the maximum of " +
                to_text(max_weight) + " together; sync more often, or weigh in a larger unit"
            };
        }
        if (is_open() && !notice.skips && notice.weight.has_value() != is_weighted) {
            throw ContractViolation{concat(
                "the gradients hold ",
                batches,
                is_weighted
                    ? " batches with weights that no round has reduced, but this round has no weight"
                    : " batches without weights that no round has reduced, but this round has a weight",
                "; discard_window(), or give weights as in the rounds before"
            )};
        }
    }

    /// Counts a round in which this rank had an input of weight `own`.
    void pass(bool syncs, RoundNotice const& notice, std::uint64_t own) noexcept {
        if (!syncs && notice.phase == Phase::train) {
            last_batches = notice.skips ? 0 : 1;
            last_weight = own;
            batches += last_batches;
            weight += own;
            is_weighted = notice.skips ? is_weighted : notice.weight.has_value();
        }
        pass(syncs, notice.phase);
    }
    /// Counts a round that this rank only followed.
    void pass(bool syncs, Phase phase) noexcept {
        if (syncs) {
            *this = {};
        } else if (phase == Phase::train) {
            ++rounds;
        }
    }
    /// The gradients were cleared before the pass of the last round, or, with `in_round` false, after it.
    void clear(bool in_round) noexcept {
        *this = in_round
                    ? Window{1, last_batches, last_weight, is_weighted, last_batches, last_weight}
                    : Window{};
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/round.hpp

namespace joinable { inline namespace v0 {

namespace detail {
class Session;
class Rounds;
} // namespace detail

/// One forward pass of the active ranks, as all ranks agreed on it. Outside a guard, and in one
/// that is not enabled, all ranks count as active, and only this rank's own weight is known. Cheap
/// to copy; `is_active` is valid until the next round opens.
class Round {
public:
    Round() = default;

    /// The round of a participant outside enabled guards. It takes all ranks as active and
    /// contributing, and knows this rank's weight only.
    static Round outside_guard(
        int world_size, RoundNotice const& notice, detail::Window const& window = {}
    ) noexcept {
        Round round;
        round.active_count_ = round.contributor_count_ = world_size;
        round.phase_ = notice.phase;
        round.will_sync_ = notice.will_sync && notice.phase == Phase::train;
        round.is_weighted_ = notice.weight.has_value() || (notice.skips && window.is_weighted);
        round.contributes_ = !notice.skips || window.is_open();
        round.weight_ = round.weight_sum_ =
            (notice.skips ? 0 : notice.weight.value_or(0)) + (round.will_sync_ ? window.weight : 0);
        round.accumulated_rounds_ = window.rounds;
        return round;
    }

    /// Counted from 0 inside a guard.
    [[nodiscard]] std::size_t number() const noexcept { return number_; }
    [[nodiscard]] Phase phase() const noexcept { return phase_; }
    /// Whether gradients are reduced.
    [[nodiscard]] bool will_sync() const noexcept { return will_sync_; }
    [[nodiscard]] int active_count() const noexcept { return active_count_; }
    [[nodiscard]] inline bool is_active(int rank) const;
    /// Whether notices carry weights.
    [[nodiscard]] bool is_weighted() const noexcept { return is_weighted_; }
    /// The sum of all ranks' weights. Outside a guard, this rank's own weight.
    [[nodiscard]] std::uint64_t weight_sum() const noexcept { return weight_sum_; }
    /// This rank's weight. In a round that syncs it includes the weights since the last one that
    /// did. On a shadowing rank it is 0, except in the first round that syncs after it ran out:
    /// there it is what the rank held.
    [[nodiscard]] std::uint64_t weight() const noexcept { return weight_; }
    /// Whether this rank's gradients are in the sum of this round. False if the rank skips the
    /// round and accumulated nothing since the last round that synced, or if the weights of all
    /// ranks sum to 0. On a shadowing rank it is true only in the first round that syncs after it
    /// ran out, and only if it accumulated something before (JoinOptions::carry_accumulated).
    [[nodiscard]] bool contributes() const noexcept { return contributes_; }
    /// The number of contributing ranks, the same on all ranks: the divisor of an average over
    /// them. If it is 0, the average is zeros. Outside a guard and with known lengths, ranks that
    /// skip are not known; outside a guard this is the number of ranks.
    [[nodiscard]] int contributor_count() const noexcept { return contributor_count_; }
    /// The number of training rounds that did not sync between the last round that did and this
    /// one, those before the guard included. The same on all ranks, unless they discarded different
    /// windows.
    [[nodiscard]] std::size_t accumulated_rounds() const noexcept { return accumulated_rounds_; }
    /// The lowest active rank. It broadcasts fresh state.
    [[nodiscard]] int buffer_source() const noexcept { return buffer_source_; }
    /// Whether this rank has run out of inputs and only shadows.
    [[nodiscard]] bool is_shadow() const noexcept { return is_shadow_; }
    /// When this rank was blocked until all ranks had opened this round. `begin == end` if the answer had
    /// arrived before it was needed and no rank has run out in this round, and outside a guard.
    struct Wait {
        std::chrono::steady_clock::time_point begin;
        std::chrono::steady_clock::time_point end;
    };
    [[nodiscard]] Wait waited() const noexcept { return waited_; }
    /// Whether an enabled guard opened this round.
    [[nodiscard]] bool in_guard() const noexcept { return session_ != nullptr; }

    /// Keeps this participant's part of the round open until done(). Call it right after the
    /// notification if collectives follow later. Local. Outside a guard it does nothing.
    inline void hold();
    /// Ends this participant's part. All its collectives of the round must be complete. Local.
    inline void done();

private:
    friend class detail::Session;
    friend class detail::Rounds;
    friend class PendingRound;

    detail::Session* session_ = nullptr;
    Wait waited_{};
    std::size_t position_ = 0;
    std::size_t number_ = 0;
    std::uint64_t weight_ = 0;
    std::uint64_t weight_sum_ = 0;
    std::size_t accumulated_rounds_ = 0;
    int active_count_ = 1;
    int contributor_count_ = 1;
    int buffer_source_ = 0;
    Phase phase_ = Phase::train;
    bool will_sync_ = true;
    bool is_weighted_ = false;
    bool is_shadow_ = false;
    bool contributes_ = true;
};

}} // namespace joinable::v0

// ---- joinable/join/result.hpp

namespace joinable { inline namespace v0 {

/// What happened inside a guard. The same on every rank, but for `own_rounds`, `shadow_rounds` and
/// `waited`. Over a guard that was not enabled it counts this rank's own rounds alone.
struct JoinResult {
    std::size_t rounds = 0;        ///< rounds that some rank was active in
    std::size_t own_rounds = 0;    ///< rounds with an input of this rank
    std::size_t shadow_rounds = 0; ///< rounds that this rank shadowed
    std::vector<std::size_t> rounds_per_rank;
    std::vector<int> last_joiners; ///< the ranks that were active to the end, ascending
    int authoritative_rank = 0;    ///< the highest last joiner
    bool stopped_early = false;    ///< by a vote or EndPolicy::stop_at_first
    /// Training rounds after the last one that synced, those before this guard included: what they accumulated is
    /// still in the gradients.
    std::size_t unsynced_rounds = 0;
    std::chrono::nanoseconds waited{}; ///< blocked in roll calls
};

/// The result as a table for people: a line per rank, its rounds and how many it shadowed, and a
/// mark for the last joiners.
[[nodiscard]] std::string to_string(JoinResult const& result);

/// Prints the table to any stream that takes a std::string.
template <class Stream>
    requires requires(Stream& stream, std::string const& text) { stream << text; }
Stream& operator<<(Stream& stream, JoinResult const& result) {
    stream << to_string(result);
    return stream;
}

}} // namespace joinable::v0

// ---- joinable/join/result.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION std::string to_string(JoinResult const& result) {
    auto const cell = [](auto const& value) {
        std::string const text = detail::concat(value);
        return std::string(text.size() < 8 ? 8 - text.size() : 1, ' ') + text;
    };
    std::string table = "rank   rounds shadowed\n";
    for (std::size_t rank = 0; rank < result.rounds_per_rank.size(); ++rank) {
        std::size_t const own = result.rounds_per_rank[rank];
        auto const& last = result.last_joiners;
        bool const is_last = std::count(last.begin(), last.end(), static_cast<int>(rank)) != 0;
        table += cell(rank).substr(4) + " " + cell(own) + " " + cell(result.rounds - own);
        table += is_last ? " last\n" : "\n";
    }
    double const milliseconds = std::chrono::duration<double, std::milli>(result.waited).count();
    table +=
        detail::concat(result.rounds, " rounds", result.stopped_early ? ", stopped early" : "");
    table += detail::concat("; this rank ran ", result.own_rounds, ", shadowed ");
    table += detail::concat(result.shadow_rounds, ", waited ", milliseconds, " ms");
    if (result.unsynced_rounds != 0) {
        table += detail::concat("; the last ", result.unsynced_rounds, " did not sync");
    }
    return table + "\n";
}

}} // namespace joinable::v0

#endif

// ---- joinable/join/detail/schedule.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard whose ranks gave their numbers of inputs at entry. They determine what a
/// roll call would hear, so nothing is sent. Every rank has the same schedule.
class Schedule {
public:
    /// What one rank said at entry.
    struct Shard {
        std::uint64_t inputs = 0;
        std::uint64_t weight = 0;       ///< of each input
        std::uint64_t held_batches = 0; ///< before the guard, see Window
        std::uint64_t held_weight = 0;  ///< of these
    };

    Schedule(std::vector<Shard> shards, bool is_weighted, std::size_t sync_every);

    /// The code of a round with the default notice.
    [[nodiscard]] RoundCode code(std::size_t round) const noexcept {
        return {Phase::train, (round + 1) % sync_every_ == 0};
    }

    /// Checks `rank`'s announcement of `round`.
    /// @throws ContractViolation  it leaves earlier or later than it said at entry, votes to stop,
    ///         or gives another notice.
    void require_promised(int rank, std::size_t round, RollCallLanes const& mine) const;

    /// The sum of what all ranks say in the next round; arriving() are the ranks that arrive in it.
    /// Skips are not known, so all active ranks are contributors.
    [[nodiscard]] RollCallLanes next();
    /// Ascending.
    [[nodiscard]] std::vector<int> const& arriving() const noexcept { return arriving_; }
    /// What the arriving ranks accumulated.
    [[nodiscard]] Carry const& carry() const noexcept { return carry_; }

private:
    [[nodiscard]] std::uint64_t rounds_in_weight(RoundCode const& code) const noexcept {
        return code.syncs ? sync_every_ : 1;
    }
    /// What `rank` says as its weight in `round`. It has been in all rounds since the last one that synced.
    [[nodiscard]] std::uint64_t weight_in(int rank, std::size_t round) const noexcept {
        bool const is_first_sync = round + 1 == sync_every_;
        return weight_of(rank) * rounds_in_weight(code(round)) +
               (is_first_sync ? shard(rank).held_weight : 0);
    }
    [[nodiscard]] Shard const& shard(int rank) const noexcept {
        return shards_[static_cast<std::size_t>(rank)];
    }
    [[nodiscard]] std::uint64_t inputs_of(int rank) const noexcept { return shard(rank).inputs; }
    [[nodiscard]] std::uint64_t weight_of(int rank) const noexcept { return shard(rank).weight; }

    std::vector<Shard> shards_;
    bool is_weighted_;
    std::size_t sync_every_;
    std::vector<int> by_length_; ///< shortest first, equal ones by rank
    std::uint64_t weight_ = 0;   ///< of an input of all active ranks
    std::uint64_t held_ = 0;     ///< of all active ranks, before the guard
    std::size_t joined_ = 0;
    std::size_t round_ = 0;
    std::vector<int> arriving_;
    Carry carry_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/schedule.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
Schedule::Schedule(std::vector<Shard> shards, bool is_weighted, std::size_t sync_every)
    : shards_{std::move(shards)}, is_weighted_{is_weighted}, sync_every_{sync_every} {
    for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
        by_length_.push_back(static_cast<int>(rank));
        weight_ += shards_[rank].weight;
        held_ += shards_[rank].held_weight;
    }
    std::sort(by_length_.begin(), by_length_.end(), [this](int a, int b) {
        return std::pair{inputs_of(a), a} < std::pair{inputs_of(b), b};
    });
}

JOINABLE_DEFINITION void
Schedule::require_promised(int rank, std::size_t round, RollCallLanes const& mine) const {
    std::uint64_t const inputs = inputs_of(rank);
    if (mine.active != 0 && round >= inputs) {
        throw ContractViolation{
            "rank " + to_text(rank) +
            " opened more rounds than JoinOptions::inputs = " + to_text(inputs) + " promised"
        };
    }
    if (mine.active == 0 && round < inputs) {
        throw ContractViolation{
            "rank " + to_text(rank) + " left after " + to_text(round) +
            " rounds, but JoinOptions::inputs = " + to_text(inputs) +
            " promised more; without known lengths a rank may leave when it likes"
        };
    }
    if (mine.stop != 0) {
        throw ContractViolation{
            "vote_stop() needs roll calls; leave JoinOptions::inputs empty to vote"
        };
    }
    if (mine.active == 0) {
        return;
    }
    RoundCode const said = RoundCode::decode(static_cast<std::uint32_t>(mine.code.sum));
    RoundCode const expected = code(round);
    if (said.phase != expected.phase || said.syncs != expected.syncs ||
        (mine.weighted != 0) != is_weighted_ || mine.weight != weight_in(rank, round)) {
        throw ContractViolation{
            "the notice of round " + to_text(round) +
            " differs from what JoinOptions::inputs, weight_per_input and sync_every fixed at "
            "entry; give no notice, or leave JoinOptions::inputs empty"
        };
    }
}

JOINABLE_DEFINITION RollCallLanes Schedule::next() {
    arriving_.clear();
    carry_ = {};
    std::uint64_t const unsynced = round_ % sync_every_;
    bool const holds = round_ < sync_every_; // what was there before the guard
    while (joined_ < by_length_.size() && inputs_of(by_length_[joined_]) == round_) {
        Shard const& shard = this->shard(by_length_[joined_]);
        weight_ -= shard.weight;
        held_ -= shard.held_weight;
        carry_.weight +=
            (is_weighted_ ? shard.weight * unsynced : 0) + (holds ? shard.held_weight : 0);
        carry_.ranks += unsynced != 0 || (holds && shard.held_batches != 0) ? 1 : 0;
        arriving_.push_back(by_length_[joined_++]);
    }
    RollCallLanes said;
    auto const active = static_cast<std::uint32_t>(by_length_.size() - joined_);
    RoundCode const fixed = code(round_);
    bool const is_first_sync = ++round_ == sync_every_;
    Agreement const one = Agreement::of(fixed.encode());
    said.active = active;
    said.arrived = static_cast<std::uint32_t>(arriving_.size());
    said.weighted = is_weighted_ ? active : 0;
    said.contributors = active;
    said.weight =
        (is_weighted_ ? weight_ * rounds_in_weight(fixed) : 0) + (is_first_sync ? held_ : 0);
    said.code = {one.sum * active, one.squares * active};
    return said;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/used_settings.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The settings by which this rank has stepped in a guard, in rounds in which all ranks were active.
/// Roll calls compare their digest, so that ranks which step by other settings hear of it.
class UsedSettings {
public:
    /// Adds the settings of one step. `list`, whose hash is `hash`, names them; it lives as long as
    /// the guard, and each caller gives its own.
    void add(AgreementList const& list, std::uint64_t hash) {
        chain_ = Hash{}.add(chain_).add(hash).value();
        if (std::find(lists_.begin(), lists_.end(), &list) == lists_.end()) {
            lists_.push_back(&list);
        }
    }

    /// 0 before the first step.
    [[nodiscard]] std::uint32_t digest() const noexcept {
        return static_cast<std::uint32_t>(chain_) & digest_mask;
    }
    /// Lists the last settings, and last a hash of all, by which ranks differ in any case.
    [[nodiscard]] AgreementList list() const {
        AgreementList all;
        for (AgreementList const* const settings : lists_) {
            for (AgreementList::Item const& item : settings->items()) {
                all.add(item.label, item.value);
            }
        }
        all.begin_section("settings differ: ");
        all.add("hash over all steps of this guard", chain_);
        return all;
    }

private:
    std::uint64_t chain_ = 0;
    std::vector<AgreementList const*> lists_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/roll_call.hpp

/// @file
/// The agreement that opens every round: one sum of seven words, from which every rank computes the
/// same verdict. It is independent of guards, participants and RAII.

namespace joinable { inline namespace v0 { namespace detail {

/// Runs roll calls, and keeps track of which ranks are active. All ranks of `control` make the same
/// calls.
class RollCall {
public:
    RollCall(ControlCommunicator& control, EndPolicy policy);

    /// Starts a roll call; `answer()` ends it. Asynchronous, no allocation. `carry` is what this
    /// rank accumulated, if it arrives.
    /// @throws ContractViolation  it differs from the schedule, see follow().
    void post(RollCallLanes const& mine, Carry const& carry = {});
    /// Starts the last one of a guard, in which no rank is active. All ranks compare the settings by
    /// which they have stepped.
    void post_closing();
    /// The settings by which this rank has stepped. A rank that opens a round compares them.
    [[nodiscard]] UsedSettings& settings() noexcept { return settings_; }
    [[nodiscard]] bool is_posted() const noexcept { return posted_; }
    [[nodiscard]] bool test() { return schedule_ || control_.test_sum(); }
    /// Whether answer() waits once more for all ranks, because some arrived or failed.
    /// @pre test()
    [[nodiscard]] bool needs_another_message() const noexcept {
        RollCallLanes const said = RollCallLanes::decode(words_);
        return !schedule_ && said.arrived + said.failed > 0;
    }

    /// For guards with known lengths. The schedule now answers instead of a sum, and nothing is sent,
    /// until it gives a verdict other than `go_on`.
    void follow(Schedule schedule) { schedule_ = std::move(schedule); }
    [[nodiscard]] bool is_scheduled() const noexcept { return schedule_.has_value(); }

    /// Waits for the posted roll call and returns the verdict, the same on every rank. Sends one
    /// more message only when a rank arrives or fails, or when ranks disagree. `text` is sent along
    /// if this rank failed. Throws what the communicator throws.
    Verdict answer(std::string_view text = {});

    /// The sum of what all ranks said in the last roll call.
    [[nodiscard]] RollCallLanes const& said() const noexcept { return said_; }
    /// The ranks that arrived in the last roll call that had arrivals, ascending.
    [[nodiscard]] std::vector<int> const& arrived() const noexcept { return arrived_; }
    /// What the ranks that arrived in the last roll call had accumulated; nothing if none arrived.
    [[nodiscard]] Carry const& carry() const noexcept { return carry_; }
    /// After the verdicts failed and mismatch: the reason that every rank throws.
    [[nodiscard]] AbortReason const& failure() const noexcept { return failure_; }

    /// The number of opened rounds, including the current one.
    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_; }
    [[nodiscard]] bool is_active(int rank) const { return is_active_[index(rank)]; }
    [[nodiscard]] std::size_t rounds_of(int rank) const {
        return is_active(rank) ? rounds_ : joined_after_[index(rank)];
    }
    [[nodiscard]] int lowest_active() const noexcept { return lowest_active_; }

private:
    static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

    Verdict hear(std::string_view text);

    void note_arrivals(std::vector<int> const& ranks);

    /// Sums a bitmap of the arriving ranks and their carry. Roll calls do not contain the carry, because
    /// ranks post them before they know whether the round syncs, and a round that does not sync sums
    /// only the weights of its active ranks.
    void exchange_arrivals();

    /// Compares the active ranks. If only weights differ, it compares the ranks that say whether
    /// they have one; if only settings differ, it names these.
    void name_difference();
    void name_setting();

    ControlCommunicator& control_;
    EndPolicy policy_;
    RollCallLanes mine_;
    RollCallLanes said_;
    RollCallLanes::Words words_{};
    bool posted_ = false;
    std::size_t rounds_ = 0;
    int lowest_active_ = 0;
    std::vector<std::size_t> joined_after_;
    std::vector<bool> is_active_;
    std::vector<int> arrived_;
    Carry my_carry_;
    Carry carry_;
    std::optional<Schedule> schedule_;
    UsedSettings settings_;
    bool is_closing_ = false;
    AbortReason failure_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/roll_call.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstdint>
#include <span>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION RollCall::RollCall(ControlCommunicator& control, EndPolicy policy)
    : control_{control}, policy_{policy}, joined_after_(static_cast<std::size_t>(control.size())),
      is_active_(static_cast<std::size_t>(control.size()), true) {}

JOINABLE_DEFINITION void RollCall::post(RollCallLanes const& mine, Carry const& carry) {
    mine_ = mine;
    if (mine.active != 0) {
        auto const round = static_cast<std::uint32_t>(mine.digest.sum);
        mine_.digest = Agreement::of(round ^ settings_.digest());
    }
    my_carry_ = carry;
    if (schedule_) {
        schedule_->require_promised(control_.rank(), rounds_, mine);
    } else {
        words_ = mine_.encode();
        control_.post_sum(words_);
    }
    posted_ = true;
}

JOINABLE_DEFINITION void RollCall::post_closing() {
    is_closing_ = true;
    RollCallLanes lanes;
    lanes.digest = Agreement::of(settings_.digest());
    post(lanes);
}

JOINABLE_DEFINITION Verdict RollCall::answer(std::string_view text) {
    Verdict const verdict = hear(text);
    if (verdict == Verdict::mismatch) {
        name_difference();
    }
    rounds_ += verdict == Verdict::go_on ? 1 : 0;
    return verdict;
}

JOINABLE_DEFINITION Verdict RollCall::hear(std::string_view text) {
    carry_ = {};
    if (schedule_) {
        said_ = schedule_->next();
        if (said_.arrived > 0) {
            carry_ = schedule_->carry();
            note_arrivals(schedule_->arriving());
        }
    } else {
        control_.wait_sum();
        said_ = RollCallLanes::decode(words_);
        if (said_.arrived > 0) {
            exchange_arrivals();
        }
        if (said_.failed > 0) {
            bool const has_failed = mine_.failed != 0;
            auto const size = static_cast<std::uint64_t>(control_.size());
            failure_ = Inquiry{control_, 0, size, true}.failure(has_failed, text);
        }
    }
    posted_ = false;
    Verdict const verdict = is_closing_ && said_.failed == 0
                                ? said_.digest.value(static_cast<std::uint64_t>(control_.size()))
                                      ? Verdict::end
                                      : Verdict::mismatch
                                : judge(said_, policy_);
    if (verdict != Verdict::go_on) {
        schedule_.reset();
    }
    return verdict;
}

JOINABLE_DEFINITION void RollCall::note_arrivals(std::vector<int> const& ranks) {
    arrived_ = ranks;
    for (int const rank : ranks) {
        is_active_[index(rank)] = false;
        joined_after_[index(rank)] = rounds_;
    }
    while (lowest_active_ + 1 < control_.size() && !is_active_[index(lowest_active_)]) {
        ++lowest_active_;
    }
}

JOINABLE_DEFINITION void RollCall::exchange_arrivals() {
    std::size_t const carry_at = (is_active_.size() + 63) / 64;
    std::vector<std::uint64_t> words(carry_at + 2);
    if (mine_.arrived != 0) {
        set_bit(words, control_.rank());
    }
    words[carry_at] = my_carry_.ranks;
    words[carry_at + 1] = my_carry_.weight;
    control_.sum(words);
    std::vector<int> ranks;
    append_bits(ranks, std::span{words}.first(carry_at), 0);
    note_arrivals(ranks);
    carry_ = {words[carry_at], words[carry_at + 1]};
}

JOINABLE_DEFINITION void RollCall::name_setting() {
    bool const has_say = is_closing_ || mine_.active != 0;
    auto const count = is_closing_ ? static_cast<std::uint64_t>(control_.size()) : said_.active;
    int const lowest = is_closing_ ? 0 : lowest_active_;
    failure_ = Inquiry{control_, lowest, count, has_say}.difference(settings_.list());
    failure_.message +=
        "; ranks have stepped by them, so values are mixed: go on from a checkpoint, with the "
        "same settings on every rank";
}

JOINABLE_DEFINITION void RollCall::name_difference() {
    if (is_closing_ || (said_.code.value(said_.active) && !said_.digest.value(said_.active))) {
        name_setting();
        return;
    }
    int lowest = lowest_active_;
    std::uint64_t count = said_.active;
    bool has_say = mine_.active != 0;
    std::optional<bool> is_weighted;
    if (said_.silent == 0 || said_.have_one_code()) {
        is_weighted = mine_.weighted != 0;
        has_say = has_say && mine_.silent == 0;
        count -= said_.silent;
    }
    if (count != said_.active) {
        lowest = Inquiry{control_, lowest, count, has_say}.ranks_with(has_say).front();
    }
    AgreementList list;
    list.begin_section(concat("ranks disagree about round ", rounds_, ": "));
    RoundCode::decode(static_cast<std::uint32_t>(mine_.code.sum)).agree_on(list, is_weighted);
    failure_ = Inquiry{control_, lowest, count, has_say}.difference(list);
    failure_.message += "; every active rank must open the same round";
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/detail/type_name.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The name of a type as the compiler prints it. It differs between compilers, so use it only in
/// error texts.
template <class T>
[[nodiscard]] constexpr std::string_view type_name() noexcept {
    std::string_view const text = __PRETTY_FUNCTION__;
    std::string_view const marker = "T = ";
    auto const begin = text.find(marker);
    if (begin == std::string_view::npos) {
        return text;
    }
    std::string_view const rest = text.substr(begin + marker.size());
    return rest.substr(0, rest.find_first_of(";]"));
}

/// The declared name of a class, without namespaces and template arguments, which compilers print
/// differently.
template <class T>
[[nodiscard]] constexpr std::string_view class_name() noexcept {
    std::string_view name = type_name<T>();
    if (name.ends_with('>')) {
        std::size_t depth = 0;
        std::size_t at = name.size();
        do {
            --at;
            depth += name[at] == '>' ? 1U : 0U;
            depth -= name[at] == '<' ? 1U : 0U;
        } while (depth != 0 && at != 0);
        name = name.substr(0, at);
    }
    auto const before = name.find_last_of(": >)");
    return before == std::string_view::npos ? name : name.substr(before + 1);
}

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/local_rounds.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard that is not enabled. Nothing is sent, but the options and the notices of
/// next() apply to the participants as in an enabled guard.
class LocalRounds {
public:
    explicit LocalRounds(JoinOptions const& options) : options_{options} {}
    /// The rounds before the guard that did not sync.
    void begin(std::size_t unsynced) noexcept { unsynced_ = unsynced; }
    LocalRounds(LocalRounds const&) = delete; // knows the options by address
    LocalRounds& operator=(LocalRounds const&) = delete;

    /// Opens a round by next().
    void open(RoundNotice const& notice) noexcept {
        opened_ = completed(notice, options_, training_rounds_);
        count(*opened_);
    }
    /// Completes a participant's notice. If next() opened no round, the first participant opens it.
    /// Later participants use their own notice or the options', not the first one's.
    [[nodiscard]] RoundNotice announce(bool is_first, RoundNotice const& notice) noexcept {
        if (opened_) {
            bool const says_nothing_new =
                notice == RoundNotice{} || notice == RoundNotice{.skips = opened_->skips};
            return says_nothing_new ? *opened_ : notice;
        }
        bool const opens = is_first || rounds_ == 0;
        std::size_t const last_trains = last_phase_ == Phase::train ? 1 : 0;
        RoundNotice const said =
            completed(notice, options_, training_rounds_ - (opens ? 0 : last_trains));
        if (is_first) {
            count(said);
        }
        return said;
    }

    [[nodiscard]] std::size_t count() const noexcept { return rounds_; }
    /// The training rounds after the last one that synced.
    [[nodiscard]] std::size_t unsynced() const noexcept { return unsynced_; }

private:
    void count(RoundNotice const& notice) noexcept {
        ++rounds_;
        last_phase_ = notice.phase;
        training_rounds_ += notice.phase == Phase::train ? 1 : 0;
        if (notice.phase == Phase::train) {
            unsynced_ = notice.will_sync ? 0 : unsynced_ + 1;
        }
    }

    JoinOptions const& options_;
    std::optional<RoundNotice> opened_; ///< by the last next()
    std::size_t rounds_ = 0;
    std::size_t training_rounds_ = 0;
    Phase last_phase_ = Phase::evaluate;
    std::size_t unsynced_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/guard_outcome.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The outcome of a guard on this rank: whether it has ended, and why.
class GuardOutcome {
public:
    explicit GuardOutcome(std::vector<ControlCommunicator*> communicators)
        : communicators_{std::move(communicators)} {}

    /// Keeps the reason of a failure that is about to leave the guard. Only the first one since
    /// forget() counts. The message is `text` if no exception is in flight or the exception has no
    /// message. An exception that names ranks which the guard does not have blames none.
    void record(std::string_view text) {
        if (!recorded_) {
            recorded_ = failure_of(std::current_exception());
            if (names_others(recorded_->ranks)) {
                recorded_ = AbortReason{FailureKind::peer_failed, {}, recorded_->message};
            }
            if (recorded_->message.empty()) {
                recorded_->message = text;
            }
        }
    }
    /// Keeps the reason of a failed roll call, which all ranks throw, unless a reason was kept
    /// before.
    void record_end_of_roll_calls(AbortReason const& reason) {
        if (!recorded_) {
            recorded_ = reason;
        }
    }
    /// The program has handled the failure.
    void forget() noexcept { recorded_.reset(); }
    /// The reason that peers are told.
    [[nodiscard]] AbortReason reason() const { return recorded_.value_or(failure_of({})); }

    [[nodiscard]] bool is_over() const noexcept { return is_over_; }
    void end() noexcept { is_over_ = true; }

    /// Ends with a failure that all ranks agreed on. All of them throw it.
    [[noreturn]] void fail(AbortReason const& failure) {
        is_over_ = true;
        failure_ = failure;
        throw_failure(failure);
    }

    /// The same where only this rank knows: tells every rank, wherever it waits. require_alive() throws it.
    void fail_alone(AbortReason const& failure) {
        failure_ = failure;
        is_told_ = false;
        abort(failure);
    }
    /// Whether nothing has thrown that failure yet.
    [[nodiscard]] bool owes_failure() const noexcept { return !is_told_; }

    /// Ends and tells every rank, wherever it waits.
    void abort(AbortReason const& reason) {
        is_over_ = true;
        for (ControlCommunicator* communicator : communicators_) {
            communicator->abort(reason);
        }
    }

    /// @throws ContractViolation  the guard has ended without a failure; else the failure again.
    void require_alive() {
        if (failure_) {
            is_told_ = true;
            throw_failure(*failure_);
        }
        if (is_over_) {
            throw ContractViolation{"this guard has ended; construct a new Join for more rounds"};
        }
    }

    /// The communicator of the roll calls.
    [[nodiscard]] ControlCommunicator& control() const noexcept { return *communicators_.front(); }
    [[nodiscard]] bool can_abort() const noexcept {
        bool can = true;
        for (ControlCommunicator const* communicator : communicators_) {
            can = can && communicator->can_abort();
        }
        return can;
    }

private:
    /// Whether these are ranks of a larger communicator than the guard's.
    [[nodiscard]] bool names_others(std::vector<int> const& ranks) const {
        return !ranks.empty() && *std::max_element(ranks.begin(), ranks.end()) >= control().size();
    }

    std::vector<ControlCommunicator*> communicators_; ///< distinct
    bool is_over_ = false;
    bool is_told_ = true;
    std::optional<AbortReason> recorded_; ///< why this rank leaves
    std::optional<AbortReason> failure_;  ///< the failure that the guard threw
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/rounds.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// An active rank's announcement of a round.
struct Announcement {
    RoundNotice notice;
    Opening opening = Opening::notification;
    std::size_t opener = 0; ///< the participant that notifies

    [[nodiscard]] bool syncs() const noexcept {
        return notice.will_sync && notice.phase == Phase::train;
    }
};

/// The rounds of a guard on one rank. Announcing a round posts its roll call, hear() waits for the verdict,
/// and adopt() makes the Round that all ranks agreed on. It knows neither the turns inside a round nor how a
/// guard ends.
class Rounds {
public:
    Rounds(ControlCommunicator& control, JoinOptions const& options)
        : control_{control}, options_{options}, roll_call_{control, options.end_policy} {}

    /// Collective. Ranks exchange their numbers of inputs and need no roll calls from now on.
    void exchange_lengths();

    // -- announcing ------------------------------------------------------------------------------

    /// What this rank holds when the guard begins. `is_weighted`: whether the open windows of any rank are.
    void begin(Window const& window, bool is_weighted) noexcept {
        window_ = window;
        was_weighted_ = is_weighted;
    }
    [[nodiscard]] Window const& window() const noexcept { return window_; }
    /// What a joined rank holds if joined ranks leave their gradients untouched.
    [[nodiscard]] Window const& untouched_window() const noexcept {
        return dropped_.is_open() ? dropped_ : window_;
    }
    /// See Window::clear. The weight of the window has not been announced.
    void clear_window(bool in_round) noexcept { window_.clear(in_round); }

    /// The notice of the next round, with the options' weight and sync period where it has none.
    /// @throws ContractViolation  see Window::require_continued.
    [[nodiscard]] RoundNotice completed(RoundNotice const& notice) const;

    /// The next round as this rank announces it, before the others have answered.
    [[nodiscard]] Round preview(Announcement const& said) const noexcept;

    /// Posts the roll call of a round that this rank opens.
    void announce(Announcement const& said);
    /// Announces that this rank has run out of inputs, and what it holds.
    void announce_arrival();
    /// Announces at most a vote, for a rank that has joined. A vote may follow the announced arrival
    /// with look-ahead or from a hook.
    void announce_nothing() {
        RollCallLanes lanes;
        lanes.stop = take_vote();
        roll_call_.post(lanes);
    }

    /// Announces the end of a guard whose post hooks have run.
    void announce_closing() { roll_call_.post_closing(); }
    /// The settings by which this rank steps.
    [[nodiscard]] UsedSettings& settings() noexcept { return roll_call_.settings(); }

    /// Tells the others that this rank leaves by an exception.
    void announce_failure(std::string const& text) {
        RollCallLanes lanes;
        lanes.failed = 1;
        roll_call_.post(lanes);
        roll_call_.answer(text);
    }

    void vote_stop() noexcept { vote_ = true; }
    [[nodiscard]] bool has_vote() const noexcept { return vote_; }

    // -- hearing ---------------------------------------------------------------------------------

    [[nodiscard]] bool is_posted() const noexcept { return roll_call_.is_posted(); }
    [[nodiscard]] bool is_scheduled() const noexcept { return roll_call_.is_scheduled(); }
    [[nodiscard]] RollCall const& roll_call() const noexcept { return roll_call_; }

    /// Waits for the roll call that was posted, and returns its verdict.
    Verdict hear();

    /// After the verdict to go on: the round as all ranks agreed on it. `own` is this rank's
    /// announcement, or empty if it shadows the round.
    [[nodiscard]] Round adopt(Session& session, std::optional<Announcement> const& own);
    /// How the active ranks opened the last round. Not known with known lengths.
    [[nodiscard]] Opening opening() const noexcept { return agreed_code().opening; }
    [[nodiscard]] bool was_voted_down() const noexcept { return roll_call_.said().stop > 0; }

    /// The result up to now.
    [[nodiscard]] JoinResult result(bool stopped_early) const;
    [[nodiscard]] std::size_t shadow_rounds() const noexcept { return result_.shadow_rounds; }

private:
    [[nodiscard]] RoundCode agreed_code() const noexcept;
    [[nodiscard]] bool contributes(Announcement const& said) const noexcept {
        return !said.notice.skips || window_.is_open();
    }
    /// 0 if it skips. With known lengths a rank that skips keeps the promised weight.
    [[nodiscard]] std::uint64_t own_weight(RoundNotice const& notice) const noexcept {
        return notice.skips && !is_scheduled() ? 0 : notice.weight.value_or(0);
    }
    /// A round that syncs includes the weight held since the last one that did.
    [[nodiscard]] std::uint64_t weight_of(Announcement const& said) const noexcept {
        return own_weight(said.notice) + (said.syncs() ? window_.weight : 0);
    }
    [[nodiscard]] std::uint32_t take_vote() noexcept {
        return vote_ && !std::exchange(is_vote_sent_, true) ? 1 : 0;
    }

    ControlCommunicator& control_;
    JoinOptions const& options_;
    RollCall roll_call_;
    Window window_;  ///< of this rank; if it has joined, before it joined
    Window dropped_; ///< what it held when it joined, if that was dropped
    std::size_t training_rounds_ = 0;
    Carry carry_;               ///< of all ranks that joined since the last round that synced
    bool was_weighted_ = false; ///< in the last training round that told
    bool vote_ = false;
    bool is_vote_sent_ = false;
    Round::Wait waited_{}; ///< in the last hear()
    JoinResult result_;    ///< counts rounds as they pass
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/rounds.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void Rounds::exchange_lengths() {
    std::uint64_t const weight = options_.weight_per_input.value_or(0);
    std::array<std::uint64_t, 4> const mine{
        {options_.inputs.value_or(0), weight, window_.batches, window_.weight}
    };
    std::vector<std::uint64_t> const all = control_.gather(mine);
    std::vector<Schedule::Shard> shards;
    for (std::size_t k = 0; k < all.size(); k += mine.size()) {
        shards.push_back({all[k], all[k + 1], all[k + 2], all[k + 3]});
    }
    bool const is_weighted = options_.weight_per_input.has_value();
    roll_call_.follow(Schedule{std::move(shards), is_weighted, options_.sync_every});
}

JOINABLE_DEFINITION RoundNotice Rounds::completed(RoundNotice const& notice) const {
    RoundNotice const said = detail::completed(notice, options_, training_rounds_);
    window_.require_continued(said, own_weight(said));
    return said;
}

JOINABLE_DEFINITION Round Rounds::preview(Announcement const& said) const noexcept {
    Round round;
    round.number_ = roll_call_.rounds();
    round.phase_ = said.notice.phase;
    round.will_sync_ = said.syncs();
    return round;
}

JOINABLE_DEFINITION void Rounds::announce(Announcement const& said) {
    RoundCode const code{
        said.notice.phase, said.syncs(), said.opening, static_cast<std::uint32_t>(said.opener)
    };
    RollCallLanes lanes;
    lanes.active = 1;
    lanes.stop = take_vote();
    bool const holds_weights = said.notice.skips && window_.is_open() && window_.is_weighted;
    lanes.weighted = said.notice.weight || holds_weights ? 1 : 0;
    lanes.silent = said.notice.skips && lanes.weighted == 0 ? 1 : 0;
    lanes.contributors = contributes(said) ? 1 : 0;
    lanes.weight = weight_of(said);
    lanes.code = Agreement::of(code.encode());
    lanes.digest = Agreement::of(static_cast<std::uint32_t>(roll_call_.rounds()) & digest_mask);
    roll_call_.post(lanes);
}

JOINABLE_DEFINITION void Rounds::announce_arrival() {
    RollCallLanes lanes;
    lanes.arrived = 1;
    lanes.stop = take_vote();
    roll_call_.post(lanes, {window_.is_open() ? 1U : 0U, window_.weight});
}

JOINABLE_DEFINITION Verdict Rounds::hear() {
    waited_ = {};
    if (roll_call_.test() && !roll_call_.needs_another_message()) {
        return roll_call_.answer();
    }
    auto const begin = std::chrono::steady_clock::now();
    Verdict const verdict = roll_call_.answer();
    waited_ = {begin, std::chrono::steady_clock::now()};
    result_.waited += waited_.end - begin;
    return verdict;
}

JOINABLE_DEFINITION Round Rounds::adopt(Session& session, std::optional<Announcement> const& own) {
    RollCallLanes const& said = roll_call_.said();
    RoundCode const code = agreed_code();
    Round round;
    round.session_ = &session;
    round.waited_ = waited_;
    round.number_ = roll_call_.rounds() - 1;
    round.phase_ = code.phase;
    round.will_sync_ = code.syncs;
    if (code.phase == Phase::train && said.silent != said.active) {
        was_weighted_ = said.weighted != 0;
    }
    // If all ranks skip, none tells whether it is weighted; joined ranks may hold gradients of the
    // last round that told.
    round.is_weighted_ = said.weighted != 0 || (said.silent == said.active && was_weighted_);
    round.active_count_ = static_cast<int>(said.active);
    bool const takes_carry = code.syncs && options_.carry_accumulated;
    carry_.ranks += roll_call_.carry().ranks;
    carry_.weight += roll_call_.carry().weight;
    round.contributor_count_ =
        static_cast<int>(said.contributors + (takes_carry ? carry_.ranks : 0));
    round.contributes_ = own ? contributes(*own) : takes_carry && window_.is_open();
    round.weight_sum_ = said.weight + (takes_carry ? carry_.weight : 0);
    round.weight_ = own ? weight_of(*own) : takes_carry ? window_.weight : 0;
    if (round.will_sync_ && round.is_weighted_ && round.weight_sum_ == 0) {
        round.contributor_count_ = 0; // the average is zeros
        round.contributes_ = false;
    }
    round.accumulated_rounds_ = window_.rounds;
    round.buffer_source_ = roll_call_.lowest_active();
    round.is_shadow_ = !own;
    ++(own ? result_.own_rounds : result_.shadow_rounds);
    training_rounds_ += code.phase == Phase::train ? 1 : 0;
    if (code.syncs) {
        carry_ = {};
    }
    if (own) {
        window_.pass(code.syncs, own->notice, own_weight(own->notice));
    } else {
        if (code.syncs && !takes_carry && window_.is_open()) {
            dropped_ = window_;
        }
        window_.pass(code.syncs, code.phase);
    }
    return round;
}

JOINABLE_DEFINITION JoinResult Rounds::result(bool stopped_early) const {
    JoinResult result = result_;
    result.rounds = roll_call_.rounds();
    result.stopped_early = stopped_early;
    result.unsynced_rounds = window_.rounds;
    std::vector<int> const& arrived = roll_call_.arrived();
    bool const some_arrived = roll_call_.said().arrived > 0;
    for (int rank = 0; rank < control_.size(); ++rank) {
        result.rounds_per_rank.push_back(roll_call_.rounds_of(rank));
        bool const arrives_last =
            some_arrived && std::find(arrived.begin(), arrived.end(), rank) != arrived.end();
        if (arrives_last || (stopped_early && roll_call_.is_active(rank))) {
            result.last_joiners.push_back(rank);
        }
    }
    result.authoritative_rank = result.last_joiners.back();
    return result;
}

JOINABLE_DEFINITION RoundCode Rounds::agreed_code() const noexcept {
    RollCallLanes const& said = roll_call_.said();
    return RoundCode::decode(said.code.value(said.active).value_or(0));
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/turn_order.hpp

namespace joinable { inline namespace v0 { namespace detail {

[[noreturn]] inline void throw_violation(std::string const& text) {
    throw ContractViolation{text};
}

/// The facts about a participant that a session needs.
struct ParticipantInfo {
    std::string_view name;
    bool (*takes_part)(Round const&) = nullptr; ///< null: in every round
    std::string_view verb = {};                 ///< the member that notifies, if it is given
};

/// The turns of participants inside a round. A part begins with the participant's notification. It
/// ends with the next participant's notification or, if it was held open, with done(). Positions
/// are in hook order.
class TurnOrder {
public:
    explicit TurnOrder(std::vector<ParticipantInfo> participants)
        : participants_{std::move(participants)} {}

    [[nodiscard]] std::size_t count() const noexcept { return participants_.size(); }
    [[nodiscard]] std::string name(std::size_t position) const;

    [[nodiscard]] bool takes_part(std::size_t position, Round const& round) const {
        auto* const asks = participants_[position].takes_part;
        return asks == nullptr || asks(round);
    }
    /// The first participant, from `from` on, that takes part in the round.
    [[nodiscard]] std::optional<std::size_t> first(Round const& round, std::size_t from = 0) const;
    /// The participant whose part comes next in the open round, if any.
    [[nodiscard]] std::optional<std::size_t> next() const {
        return round_ ? first(*round_, cursor_) : std::nullopt;
    }

    /// @throws ContractViolation  the round that `opener` announces begins with another
    ///         participant.
    void require_first(std::size_t opener, Round const& announced) const;

    void open(Round const& round) {
        round_ = round;
        cursor_ = 0;
    }
    void close() {
        round_.reset();
        done();
    }
    void begin(std::size_t position) {
        cursor_ = position + 1;
        is_open_ = true;
    }
    void hold(std::size_t position) { held_by_ = position; }
    void done() {
        held_by_.reset();
        is_open_ = false;
    }

    /// Begins the part of `position` in the open round. Returns false if `position` may open the
    /// next round; with `loop_opens_rounds` it may not.
    /// @throws ContractViolation  it is not its turn.
    bool take_turn(std::size_t position, bool loop_opens_rounds);

    /// @throws ContractViolation  a part is held open, or a participant is missing.
    void require_complete() const;

    /// Whether a part has begun and not ended. A part without done() ends with the next part.
    [[nodiscard]] bool is_open() const noexcept { return is_open_ || held_by_; }
    /// Whether no participant owes a collective.
    [[nodiscard]] bool are_complete() const { return !is_open_ && !held_by_ && !next(); }

private:
    [[nodiscard]] std::string_view verb(std::size_t position) const {
        return participants_[position].verb;
    }
    /// The verb that follows its name in error texts.
    [[nodiscard]] std::string notified(std::size_t position) const;
    /// The end of a text: the order of the participants that take part in the round.
    [[nodiscard]] std::string order(Round const& round) const;
    [[nodiscard]] std::string takes_no_part(std::size_t position, Round const& round) const;

    std::vector<ParticipantInfo> participants_;
    std::optional<Round> round_;
    std::size_t cursor_ = 0; ///< parts before this position have begun
    std::optional<std::size_t> held_by_;
    bool is_open_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/turn_order.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::string TurnOrder::name(std::size_t position) const {
    return concat("participant ", position, " (", participants_[position].name, ")");
}

JOINABLE_DEFINITION std::optional<std::size_t>
TurnOrder::first(Round const& round, std::size_t from) const {
    for (std::size_t i = from; i < participants_.size(); ++i) {
        if (takes_part(i, round)) {
            return i;
        }
    }
    return {};
}

JOINABLE_DEFINITION void
TurnOrder::require_first(std::size_t opener, Round const& announced) const {
    auto const expected = first(announced);
    if (!expected) {
        throw_violation(takes_no_part(opener, announced));
    }
    if (expected != opener) {
        if (round_ && !takes_part(opener, *round_)) {
            throw_violation(takes_no_part(opener, *round_));
        }
        throw_violation(
            name(opener) + notified(opener) + " first in round " + to_text(announced.number()) +
            ", but the first one in hook order is " + name(*expected) + order(announced)
        );
    }
}

JOINABLE_DEFINITION bool TurnOrder::take_turn(std::size_t position, bool loop_opens_rounds) {
    if (held_by_) {
        throw_violation(concat(
            name(position),
            notified(position),
            " while the part of ",
            name(*held_by_),
            " is held open",
            round_ ? order(*round_) : ""
        ));
    }
    auto const expected = next();
    if (expected == position) {
        begin(position);
        return true;
    }
    if (expected) {
        throw_violation(
            name(position) + notified(position) + " in round " + to_text(round_->number()) +
            ", but the next one in hook order is " + name(*expected) + order(*round_)
        );
    }
    if (loop_opens_rounds && round_ && !takes_part(position, *round_)) {
        throw_violation(takes_no_part(position, *round_));
    }
    if (loop_opens_rounds && round_) {
        throw_violation(
            name(position) + notified(position) + " again in round " + to_text(round_->number()) +
            "; call next() before each round"
        );
    }
    if (loop_opens_rounds) {
        throw_violation(concat(name(position), notified(position), " before next() opened a round")
        );
    }
    return false;
}

JOINABLE_DEFINITION void TurnOrder::require_complete() const {
    if (held_by_) {
        throw_violation(concat(
            "the part of ",
            name(*held_by_),
            " in round ",
            round_->number(),
            " is still held open (a forward without its backward?)"
        ));
    }
    if (auto const missing = next()) {
        throw_violation(concat(
            name(*missing),
            " takes part in round ",
            round_->number(),
            ", but did not ",
            verb(*missing).empty() ? "notify" : "call ",
            verb(*missing),
            order(*round_)
        ));
    }
}

JOINABLE_DEFINITION std::string TurnOrder::notified(std::size_t position) const {
    return verb(position).empty() ? " notified" : concat(" called ", verb(position));
}

JOINABLE_DEFINITION std::string TurnOrder::order(Round const& round) const {
    std::string text;
    for (auto i = first(round); i; i = first(round, *i + 1)) {
        text += text.empty() ? "; the order of such a round is " : ", then ";
        text += verb(*i).empty() ? name(*i) : concat(verb(*i), " of ", name(*i));
    }
    return text;
}

JOINABLE_DEFINITION std::string
TurnOrder::takes_no_part(std::size_t position, Round const& round) const {
    return concat(
        name(position),
        " takes no part in round ",
        round.number(),
        round.will_sync() ? ", which syncs" : ", which does not sync",
        verb(position).empty() ? "; notify" : concat("; call ", verb(position)),
        " only in rounds that concern it"
    );
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/session.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The hooks of a guard behind virtual functions, so that the loop over rounds need not be a
/// template.
class HookRunner {
public:
    HookRunner() = default;
    HookRunner(HookRunner const&) = delete;
    HookRunner& operator=(HookRunner const&) = delete;
    virtual void run_main_hook(std::size_t position, Round const& round) = 0;
    virtual void run_post_hooks(JoinResult const& result, bool is_last_joiner) = 0;

protected:
    ~HookRunner() = default;
};

/// One rank's side of a guard: the open round, whose part it is, and how the guard ends. It does
/// everything except owning hooks and restoring what the guard attached.
class Session {
public:
    Session(
        std::vector<ControlCommunicator*> communicators,
        std::vector<ParticipantInfo> participants,
        JoinOptions const& options
    );

    Session(Session const&) = delete; // rounds know the options by address
    Session& operator=(Session const&) = delete;

    /// Collective. Agrees on `list`, and exchanges the numbers of inputs if ranks know them. `window` is what
    /// this rank has accumulated. Rethrows `local_error`, if there is one.
    /// @throws PeerFailed, Mismatch  on all ranks together.
    void
    enter(AgreementList const& list, Window const& window, std::exception_ptr const& local_error);

    [[nodiscard]] bool can_abort() const noexcept { return outcome_.can_abort(); }

    /// What this rank has accumulated since the last round that synced.
    [[nodiscard]] Window const& window() const noexcept { return rounds_.window(); }
    [[nodiscard]] Window const& untouched_window() const noexcept {
        return rounds_.untouched_window();
    }
    /// See Window::clear.
    /// @throws ContractViolation  ranks have been told of its weight, which would divide by what is not there.
    void clear_window(bool in_round);

    /// For words that the open part of a participant sums over all ranks, joined ones too. They go
    /// through the control communicator, after the roll calls that were posted before.
    [[nodiscard]] ControlCommunicator& words() const noexcept { return *words_; }

    // -- what participants call ------------------------------------------------------------------

    /// Opens a round (`answer` waits for it), or begins a part of the open one. Local, except with
    /// EndPolicy::throw_early: then it waits, so that no pass runs for a round that does not take
    /// place.
    void announce(std::size_t position, RoundNotice const& notice);

    /// Blocks until the announced round is agreed on, and returns it.
    Round answer(std::size_t position) {
        settle();
        Round round = round_;
        round.position_ = position;
        return round;
    }

    void hold(std::size_t position) {
        if (!is_shadowing_) {
            turns_.hold(position);
        }
    }
    void done() { turns_.done(); }

    /// Whether rounds continue. Joined ranks then run the collectives of participants and no others.
    /// Local.
    [[nodiscard]] bool runs_rounds() const noexcept {
        return !outcome_.is_over() && !stopped_ && !has_ended_;
    }

    /// Called before an object outside this guard uses one of its communicators.
    /// @throws ContractViolation  joined ranks would not follow, because no part of a participant
    ///         is open and rounds have not ended.
    void require_followed(std::string_view name);

    /// Notes the settings of a step in a round in which all ranks are active. Ranks compare them in
    /// the next roll call and when the guard closes. See UsedSettings::add().
    void note_settings(AgreementList const& list, std::uint64_t hash) {
        rounds_.settings().add(list, hash);
    }

    void record_failure(std::string_view text) { outcome_.record(text); }
    void forget_failure() noexcept { outcome_.forget(); }

    [[nodiscard]] bool is_active(int rank) const { return rounds_.roll_call().is_active(rank); }
    /// Whether the announced round is open. A round that this rank shadows is open, even if
    /// look-ahead has already posted the next roll call.
    [[nodiscard]] bool is_answered() const noexcept {
        return !rounds_.is_posted() || is_ahead_ || is_shadowing_;
    }
    [[nodiscard]] bool announced_sync() const noexcept {
        return is_answered() ? round_.will_sync() : opened_ && opened_->syncs();
    }

    /// Whether next() or iterate() opened the round. Local.
    [[nodiscard]] bool loop_opens_rounds() const noexcept {
        return opened_ && opened_->opening != Opening::notification;
    }
    /// Whether they announced a batch that is not skipped. Local.
    [[nodiscard]] bool has_announced_batch() const noexcept {
        return loop_opens_rounds() && !opened_->notice.skips;
    }

    // -- what the guard calls --------------------------------------------------------------------

    /// Opens a round if this rank has an input. False tells it to leave the loop.
    bool next(bool have_input, RoundNotice const& notice, Opening opening);

    /// Announces the round after the open one, before the collectives of the open one. Without a
    /// notice it announces that this rank has no further round.
    void look_ahead(std::optional<RoundNotice> const& notice);

    void vote_stop();

    /// Joins, shadows until all ranks have joined, and runs the post hooks.
    void finish(HookRunner& hooks);

    /// Leaves a guard by an exception. Never throws, and blocks at most until the deadline. Between
    /// rounds it announces the failure in the next roll call; anywhere else it aborts the
    /// communicators.
    void leave_by_exception() noexcept;

    /// The result of finish(), once it has run.
    [[nodiscard]] std::optional<JoinResult> const& result() const noexcept { return result_; }
    [[nodiscard]] bool is_over() const noexcept { return outcome_.is_over(); }
    /// A participant is destroyed, so the guard cannot go on.
    void lose_participant(std::size_t position) noexcept;
    [[nodiscard]] bool has_lost_participant() const noexcept { return has_lost_participant_; }
    /// @throws ContractViolation  that loss ended the guard, and this rank has not been told.
    void require_told() {
        if (outcome_.owes_failure()) {
            outcome_.require_alive();
        }
    }
    [[nodiscard]] Round const& round() const noexcept { return round_; }

private:
    static constexpr char const* stop_needs_loop =
        "votes and EndPolicy::stop_at_first need a loop that runs on next() or iterate(), so that "
        "no rank computes a round that was stopped";

    Announcement open(RoundNotice const& notice, Opening opening, std::size_t opener);

    /// Waits for the answer of a posted roll call, if there is one, and acts on it.
    void settle();

    /// Returns the answer, or throws the verdicts that end the guard with an exception.
    Verdict hear();

    /// Aborts after an exchange of all ranks has thrown, on this rank alone or because the
    /// communicator failed. The others cannot continue. Rethrows `error`.
    [[noreturn]] void fail_together(std::exception_ptr const& error) {
        fail_together(error, reason_of(error));
    }
    [[noreturn]] void fail_together(std::exception_ptr const& error, AbortReason const& reason) {
        outcome_.record_end_of_roll_calls(reason);
        abort();
        std::rethrow_exception(error);
    }

    /// Tells every rank, wherever it waits, why this one leaves.
    void abort() noexcept;

    Verdict act_on(Verdict verdict);

    void check_later_notice(std::size_t position, RoundNotice const& notice) const;

    void require_no_announcement() const;

    void require_complete_round() const {
        require_no_announcement();
        turns_.require_complete();
    }

    /// Aborts if this rank has announced a round ahead: the others already compute it and need this
    /// rank.
    void require_nothing_ahead();

    [[nodiscard]] bool is_between_rounds() const;

    /// Why ranks that accumulated with weights and without them cannot enter. Collective.
    [[nodiscard]] AbortReason difference_of_windows(Window const& window) const;

    // -- the end ---------------------------------------------------------------------------------

    void shadow_until_end(HookRunner& hooks);

    GuardOutcome outcome_;
    std::unique_ptr<ControlCommunicator> words_;
    TurnOrder turns_;
    JoinOptions options_;
    Rounds rounds_;

    Round round_;
    std::optional<Announcement> opened_; ///< the last round that this rank opened
    bool is_ahead_ = false;              ///< the posted roll call is that of the next round
    std::optional<Announcement> ahead_;  ///< its notice; none when it announces the end
    bool is_shadowing_ = false;
    bool has_lost_participant_ = false;
    bool stopped_ = false;   ///< by agreement, before every rank ran out
    bool has_ended_ = false; ///< the end verdict was heard, post hooks run
    std::optional<JoinResult> result_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/skew.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <string>

namespace joinable { inline namespace v0 { namespace detail {

/// Lets one call per minute through, from any thread.
class OncePerMinute {
public:
    [[nodiscard]] bool allows(std::chrono::steady_clock::time_point now) noexcept {
        Ticks const ticks = now.time_since_epoch().count();
        Ticks next = next_.load(std::memory_order_relaxed);
        return ticks >= next && next_.compare_exchange_strong(next, ticks + minute);
    }

private:
    using Ticks = std::chrono::steady_clock::rep;
    static constexpr Ticks minute =
        std::chrono::steady_clock::duration{std::chrono::minutes{1}}.count();
    std::atomic<Ticks> next_{(std::numeric_limits<Ticks>::min)()};
};

/// Shared by all guards and ranks of this process.
[[nodiscard]] inline OncePerMinute& skew_warnings() noexcept {
    static OncePerMinute warnings;
    return warnings;
}

/// Warns the user that this rank has been shadowing for many rounds. That costs time, and the data
/// is often dealt badly.
inline void warn_of_skew(JoinOptions const& options, int rank, std::size_t shadow_rounds) {
    if (shadow_rounds <= options.skew_limit || !options.warn ||
        !skew_warnings().allows(std::chrono::steady_clock::now())) {
        return;
    }
    options.warn(
        "rank " + to_text(rank) + " ran out of inputs and has shadowed " + to_text(shadow_rounds) +
        " rounds of the others; deal the data more evenly if that costs too much "
        "(JoinOptions::skew_limit is " +
        to_text(options.skew_limit) + ")"
    );
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/session.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Session::Session(
    std::vector<ControlCommunicator*> communicators,
    std::vector<ParticipantInfo> participants,
    JoinOptions const& options
)
    : outcome_{std::move(communicators)}, words_{outcome_.control().twin()},
      turns_{std::move(participants)}, options_{options}, rounds_{outcome_.control(), options_} {}

JOINABLE_DEFINITION void Session::enter(
    AgreementList const& list, Window const& window, std::exception_ptr const& local_error
) {
    std::optional<AbortReason> failure;
    try {
        constexpr unsigned with_weights = 0; // counts of 20 bits
        constexpr unsigned without_weights = 20;
        std::uint64_t open = std::uint64_t{window.is_open() ? 1U : 0U}
                             << (window.is_weighted ? with_weights : without_weights);
        failure = find_disagreement(outcome_.control(), list, local_error, &open);
        bool const some_have = (open & ((1U << without_weights) - 1)) != 0;
        if (!failure && some_have && open >> without_weights != 0) {
            failure = difference_of_windows(window);
        }
        rounds_.begin(window, some_have);
        if (!failure && options_.inputs && can_abort()) {
            rounds_.exchange_lengths();
        }
    } catch (...) {
        if (local_error) { // it says more than that the others did not come to hear it
            fail_together(local_error, failure_of(local_error));
        }
        try {
            throw;
        } catch (TimedOut const& timeout) {
            std::string const text = timeout.what();
            fail_together(std::make_exception_ptr(
                TimedOut{timeout.ranks(), text + "; a Join with enable = false does not enter"}
            ));
        } catch (...) {
            fail_together(std::current_exception());
        }
    }
    if (local_error) {
        std::rethrow_exception(local_error);
    }
    if (failure) {
        throw_failure(*failure);
    }
}

JOINABLE_DEFINITION AbortReason Session::difference_of_windows(Window const& window) const {
    ControlCommunicator& control = outcome_.control();
    Inquiry inquiry{control, 0, static_cast<std::uint64_t>(control.size()), true};
    std::vector<int> ranks = inquiry.ranks_with(window.is_open() && !window.is_weighted);
    std::string text = concat(
        "guards differ: ",
        ranks_text(ranks),
        " accumulated batches without weights before this guard, others with weights; clear gradients before the "
        "guard, or call discard_window() on all ranks"
    );
    return {FailureKind::mismatch, std::move(ranks), std::move(text)};
}

JOINABLE_DEFINITION void Session::clear_window(bool in_round) {
    bool const is_round_open = in_round || !turns_.are_complete();
    if (rounds_.is_scheduled() || rounds_.is_posted() || (is_round_open && round_.will_sync())) {
        throw_violation(concat(
            "gradients that hold ",
            window().batches,
            " batches which no round has reduced were cleared after their weight was announced; clear gradients "
            "before the guard, or call discard_window()"
        ));
    }
    rounds_.clear_window(is_round_open);
}

JOINABLE_DEFINITION void Session::announce(std::size_t position, RoundNotice const& notice) {
    outcome_.require_alive();
    if (is_shadowing_) {
        return; // a hook may run code of active ranks
    }
    require_no_announcement();
    if (turns_.take_turn(position, loop_opens_rounds())) {
        check_later_notice(position, notice);
        return;
    }
    opened_ = open(notice, Opening::notification, position);
    if (options_.end_policy == EndPolicy::throw_early) {
        settle();
    }
}

JOINABLE_DEFINITION void Session::require_followed(std::string_view name) {
    if (!runs_rounds() || is_shadowing_ || turns_.is_open()) {
        return;
    }
    std::string const text = concat(
        name,
        " is used while its communicator is in a guard that does not list it, so joined ranks would not "
        "follow; add it to the guard's participants(...), or call it after finish()"
    );
    outcome_.record(text); // it is no participant, so nobody else would
    throw_violation(text);
}

JOINABLE_DEFINITION bool
Session::next(bool have_input, RoundNotice const& notice, Opening opening) {
    if (stopped_) {
        return false;
    }
    outcome_.require_alive();
    require_complete_round();
    if (!have_input) {
        return false;
    }
    if (is_ahead_ && (opening != Opening::look_ahead || !ahead_)) {
        throw_violation("a loop with look-ahead has already announced this rank's next round; run "
                        "one such loop in a guard, and no next() beside it");
    }
    opened_ = is_ahead_ ? std::exchange(ahead_, {}) : open(notice, opening, 0);
    is_ahead_ = false;
    settle();
    return !stopped_;
}

JOINABLE_DEFINITION void Session::look_ahead(std::optional<RoundNotice> const& notice) {
    if (rounds_.is_scheduled()) {
        return; // everybody knows
    }
    if (notice) {
        ahead_ = open(*notice, Opening::look_ahead, 0);
    } else {
        rounds_.announce_arrival();
    }
    is_ahead_ = true;
}

JOINABLE_DEFINITION void Session::vote_stop() {
    if (opened_ && opened_->opening == Opening::notification) {
        throw_violation(
            "vote_stop() needs a loop that runs on next() or iterate(), so that no rank "
            "computes a round that was stopped"
        );
    }
    rounds_.vote_stop();
}

JOINABLE_DEFINITION void Session::finish(HookRunner& hooks) {
    outcome_.require_alive();
    try {
        require_complete_round();
        outcome_.forget(); // a failure in the last round was handled
        require_nothing_ahead();
        if (!stopped_) {
            shadow_until_end(hooks);
        }
        has_ended_ = true;
        JoinResult result = rounds_.result(stopped_);
        auto const& last = result.last_joiners;
        bool const is_last =
            std::find(last.begin(), last.end(), outcome_.control().rank()) != last.end();
        hooks.run_post_hooks(result, is_last);
        rounds_.announce_closing(); // a post hook that fails on one rank fails on all
        hear();
        outcome_.end();
        result_ = std::move(result);
    } catch (...) {
        outcome_.record({});
        leave_by_exception();
        throw;
    }
}

JOINABLE_DEFINITION void Session::lose_participant(std::size_t position) noexcept {
    has_lost_participant_ = true;
    if (std::uncaught_exceptions() > 0) {
        leave_by_exception(); // which says more
    }
    if (outcome_.is_over()) {
        return;
    }
    try {
        int const rank = outcome_.control().rank();
        outcome_.fail_alone(
            {FailureKind::contract,
             {rank},
             concat(
                 turns_.name(position),
                 " on rank ",
                 rank,
                 " was destroyed before the Join that it takes part in; declare the Join after its participants"
             )}
        );
    } catch (...) {
        outcome_.end();
    }
}

JOINABLE_DEFINITION void Session::leave_by_exception() noexcept {
    if (outcome_.is_over()) {
        return;
    }
    try {
        AbortReason const reason = outcome_.reason();
        if (is_between_rounds() && reason.ranks.empty()) {
            outcome_.end();
            rounds_.announce_failure(reason.message);
            return;
        }
    } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is in flight goes on
        return;
    }
    abort();
}

JOINABLE_DEFINITION Announcement
Session::open(RoundNotice const& notice, Opening opening, std::size_t opener) {
    outcome_.forget(); // a failure before this round was handled
    Announcement const said{rounds_.completed(notice), opening, opener};
    if (opening == Opening::notification) {
        if (rounds_.has_vote() || options_.end_policy == EndPolicy::stop_at_first) {
            throw_violation(stop_needs_loop);
        }
        turns_.require_first(opener, rounds_.preview(said));
    }
    rounds_.announce(said);
    return said;
}

JOINABLE_DEFINITION void Session::settle() {
    if (is_answered()) {
        return;
    }
    if (hear() == Verdict::stop) {
        stopped_ = true;
        return;
    }
    round_ = rounds_.adopt(*this, opened_);
    turns_.open(round_);
    if (opened_ && opened_->opening == Opening::notification) {
        turns_.begin(opened_->opener);
    }
}

JOINABLE_DEFINITION Verdict Session::hear() {
    Verdict verdict{};
    try {
        verdict = rounds_.hear();
    } catch (...) {
        fail_together(std::current_exception());
    }
    return act_on(verdict);
}

JOINABLE_DEFINITION void Session::abort() noexcept {
    try {
        outcome_.abort(blamed_on(outcome_.control().rank(), outcome_.reason()));
    } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is in flight goes on
    }
}

JOINABLE_DEFINITION Verdict Session::act_on(Verdict verdict) {
    switch (verdict) {
    case Verdict::failed:
    case Verdict::mismatch: outcome_.fail(rounds_.roll_call().failure());
    case Verdict::early_end:
        outcome_.end();
        throw EarlyTermination{
            rounds_.roll_call().arrived(),
            to_text(ranks_text(rounds_.roll_call().arrived())) + " ran out of inputs after " +
                to_text(rounds_.roll_call().rounds()) + " rounds"
        };
    case Verdict::stop: // a rank that opens no round can always vote
        if (rounds_.was_voted_down() && rounds_.opening() == Opening::notification) {
            outcome_.fail({FailureKind::contract, {}, stop_needs_loop});
        }
        break;
    case Verdict::go_on:
    case Verdict::end: break;
    }
    return verdict;
}

JOINABLE_DEFINITION void
Session::check_later_notice(std::size_t position, RoundNotice const& notice) const {
    if (!opened_ || notice == RoundNotice{} || notice == opened_->notice) {
        return;
    }
    if (notice != RoundNotice{.skips = opened_->notice.skips}) {
        throw_violation(concat(
            turns_.name(position),
            " gave a notice that differs from the one that opened round ",
            round_.number(),
            opened_->opening == Opening::notification
                ? "; give the notice to the participant that comes first in hook order"
                : "; give the notice to next() or to the announce function of iterate()"
        ));
    }
}

JOINABLE_DEFINITION void Session::require_no_announcement() const {
    if (!is_answered()) {
        throw_violation(concat(
            turns_.name(opened_ ? opened_->opener : 0),
            " announced round ",
            rounds_.roll_call().rounds(),
            ", but never waited for it (a forward without its backward?)"
        ));
    }
}

JOINABLE_DEFINITION void Session::require_nothing_ahead() {
    if (ahead_) {
        AbortReason const reason{
            FailureKind::contract,
            {outcome_.control().rank()},
            "rank " + to_text(outcome_.control().rank()) +
                " left a loop with look-ahead before its end, but had announced round " +
                to_text(rounds_.roll_call().rounds()) +
                "; vote_stop() instead, or iterate without look_ahead"
        };
        outcome_.abort(reason);
        throw_failure(reason);
    }
}

JOINABLE_DEFINITION bool Session::is_between_rounds() const {
    return !rounds_.is_posted() && !rounds_.is_scheduled() && turns_.are_complete() && !stopped_ &&
           !has_ended_ && !is_shadowing_; // after a stop come the post hooks
}

JOINABLE_DEFINITION void Session::shadow_until_end(HookRunner& hooks) {
    turns_.close();
    if (!std::exchange(is_ahead_, false)) {
        rounds_.announce_arrival();
    }
    for (;;) {
        Verdict const verdict = hear();
        if (verdict != Verdict::go_on) {
            stopped_ = verdict == Verdict::stop;
            return;
        }
        is_shadowing_ = true;
        round_ = rounds_.adopt(*this, {});
        if (rounds_.opening() == Opening::look_ahead) {
            rounds_.announce_nothing(); // before this round's collectives, as active ranks do
        }
        turns_.open(round_);
        for (auto part = turns_.next(); part; part = turns_.next()) {
            turns_.begin(*part);
            round_.position_ = *part;
            hooks.run_main_hook(*part, round_);
        }
        turns_.close();
        is_shadowing_ = false;
        warn_of_skew(options_, outcome_.control().rank(), rounds_.shadow_rounds());
        if (!rounds_.is_posted()) {
            rounds_.announce_nothing();
        }
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/occupation.hpp

/// @file
/// The communicators that are inside guards.

namespace joinable { inline namespace v0 { namespace detail {

/// Allows a communicator in one guard at a time. With two guards, the roll calls of one could meet
/// those of the other, depending on the data. Communicators are classes of the user, so the record
/// is kept here, for this process.
class Occupation {
public:
    Occupation() = default;
    Occupation(Occupation const&) = delete;
    Occupation& operator=(Occupation const&) = delete;
    ~Occupation() { end(); }

    /// @throws ContractViolation  one of them is inside a guard.
    void begin(std::vector<ControlCommunicator*> const& communicators, Session& session);
    void end() noexcept;

    /// The guard that a communicator is inside of; null if none.
    [[nodiscard]] static Session* session_over(void const* communicator) noexcept;

private:
    struct Entry {
        void const* communicator;
        Session* session;
    };
    /// The communicators that are inside guards of this process.
    struct Occupied {
        std::atomic_flag busy{};
        std::atomic<std::size_t> count{0}; ///< the number of entries; 0 in programs without guards
        std::vector<Entry> entries;
    };
    static std::vector<Entry>::const_iterator
    find(std::vector<Entry> const& entries, void const* communicator) noexcept;
    static Occupied& in_guards() noexcept {
        static Occupied occupied;
        return occupied;
    }

    /// Held for a few dozen instructions.
    class Lock {
    public:
        explicit Lock(std::atomic_flag& busy) noexcept : busy_{busy} {
            while (busy_.test_and_set(std::memory_order_acquire)) {
                cpu_relax();
            }
        }
        Lock(Lock const&) = delete;
        Lock& operator=(Lock const&) = delete;
        ~Lock() { busy_.clear(std::memory_order_release); }

    private:
        std::atomic_flag& busy_;
    };

    Session* session_ = nullptr;
};

/// Called before an object outside the guard uses `communicator`. Error texts call it `name`.
/// @throws ContractViolation  the communicator is inside a guard, and joined ranks would not
///         follow.
inline void require_unguarded(void const* communicator, std::string_view name) {
    if (Session* const session = Occupation::session_over(communicator)) {
        session->require_followed(name);
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/occupation.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
Occupation::begin(std::vector<ControlCommunicator*> const& communicators, Session& session) {
    Occupied& occupied = in_guards();
    Lock const lock{occupied.busy};
    std::vector<Entry>& all = occupied.entries;
    for (ControlCommunicator const* communicator : communicators) {
        if (find(all, communicator->address()) != all.end()) {
            throw ContractViolation{"a second Join over a communicator that is "
                                    "inside a guard already; end that one "
                                    "first, or split() the communicator"};
        }
    }
    all.reserve(all.size() + communicators.size()); // or some could be recorded and others not
    for (ControlCommunicator const* communicator : communicators) {
        all.push_back({communicator->address(), &session});
    }
    occupied.count.store(all.size(), std::memory_order_release);
    session_ = &session;
}

JOINABLE_DEFINITION void Occupation::end() noexcept {
    if (session_ == nullptr) {
        return;
    }
    Occupied& occupied = in_guards();
    Lock const lock{occupied.busy};
    std::erase_if(occupied.entries, [this](Entry const& entry) {
        return entry.session == session_;
    });
    occupied.count.store(occupied.entries.size(), std::memory_order_release);
    session_ = nullptr;
}

JOINABLE_DEFINITION Session* Occupation::session_over(void const* communicator) noexcept {
    Occupied& occupied = in_guards();
    if (occupied.count.load(std::memory_order_acquire) == 0) {
        return nullptr;
    }
    Lock const lock{occupied.busy};
    auto const entry = find(occupied.entries, communicator);
    return entry == occupied.entries.end() ? nullptr : entry->session;
}

JOINABLE_DEFINITION std::vector<Occupation::Entry>::const_iterator
Occupation::find(std::vector<Entry> const& entries, void const* communicator) noexcept {
    return std::find_if(entries.begin(), entries.end(), [&](Entry const& entry) {
        return entry.communicator == communicator;
    });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/parameter_claims.hpp

namespace joinable { inline namespace v0 {

/// The parameters that the participants of a guard average and step. A participant lists its own in
/// `void list_claims(ParameterClaims& claims) const`. A guard refuses two participants that average,
/// or that step, one parameter.
class ParameterClaims {
public:
    /// Claims that the caller averages the gradients of the trained parameters of `parameters`,
    /// which must live until the guard is made. Texts count them from `first`.
    void add_averaged(ParameterList const& parameters, std::size_t first = 0);
    /// The same for the values that the caller steps.
    void add_stepped(ParameterList const& parameters, std::size_t first = 0);

    /// The following claims are those of the next participant. For guards.
    void begin_participant(std::string_view name) { names_.push_back(name); }
    /// @throws ContractViolation  two participants average, or step, one parameter. The text names
    ///         it and them.
    void require_disjoint() const;

private:
    struct Claim {
        std::size_t participant; ///< an index of names_
        ParameterList const* parameters;
        std::size_t index;
        std::size_t first;
        bool is_gradient;
    };

    void
    add(std::vector<Claim>& claims,
        ParameterList const& parameters,
        std::size_t first,
        bool is_gradient);
    void require_disjoint(
        std::vector<Claim> const& claims, std::string_view verb, std::string_view consequence
    ) const;

    std::vector<std::string_view> names_;
    std::vector<Claim> averaged_; ///< of values and of gradients
    std::vector<Claim> stepped_;
};

}} // namespace joinable::v0

// ---- joinable/join/parameter_claims.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <string>
#include <utility>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION void
ParameterClaims::add_averaged(ParameterList const& parameters, std::size_t first) {
    add(averaged_, parameters, first, false); // a value that ranks keep in parts has no memory here
    add(averaged_, parameters, first, true);
}

JOINABLE_DEFINITION void
ParameterClaims::add_stepped(ParameterList const& parameters, std::size_t first) {
    add(stepped_, parameters, first, false);
}

JOINABLE_DEFINITION void ParameterClaims::add(
    std::vector<Claim>& claims, ParameterList const& parameters, std::size_t first, bool is_gradient
) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad()) {
            claims.push_back({names_.size() - 1, &parameters, i, first, is_gradient});
        }
    }
}

JOINABLE_DEFINITION void ParameterClaims::require_disjoint() const {
    require_disjoint(
        averaged_,
        "average",
        "it would be averaged twice in a round; let one participant average it: a DistributedDataParallel over "
        "both models, without ZeroOptions::reduces_gradients beside it"
    );
    require_disjoint(
        stepped_, "step", "it would be stepped twice in a round; give each parameter to one of them"
    );
}

JOINABLE_DEFINITION void ParameterClaims::require_disjoint(
    std::vector<Claim> const& claims, std::string_view verb, std::string_view consequence
) const {
    if (claims.empty() || claims.front().participant == claims.back().participant) {
        return; // a participant has checked its own
    }
    auto const view_of = [&](std::size_t k) {
        AnyParameter const& parameter = (*claims[k].parameters)[claims[k].index];
        return claims[k].is_gradient ? parameter.grad() : parameter.value();
    };
    std::vector<detail::AddressRange> ranges;
    for (std::size_t k = 0; k < claims.size(); ++k) {
        ranges.push_back(detail::AddressRange::of(view_of(k), k));
    }
    auto const shared =
        detail::find_shared(std::move(ranges), view_of, [&](std::size_t a, std::size_t b) {
            return claims[a].participant != claims[b].participant;
        });
    if (!shared) {
        return;
    }
    auto const participant = [&](Claim const& claim) {
        return detail::concat(
            "participant ", claim.participant, " (", names_[claim.participant], ")"
        );
    };
    auto const parameter = [](Claim const& claim) {
        return detail::describe_parameter(*claim.parameters, claim.index, claim.first);
    };
    Claim const& one = claims[shared->first];
    Claim const& other = claims[shared->second];
    std::string const named = parameter(one);
    std::string const also = parameter(other);
    throw ContractViolation{
        participant(one) + " and " + participant(other) + " both " + std::string{verb} + " " +
        named + (named == also ? std::string{} : ", which is " + also + " of the second one") +
        ", so " + std::string{consequence}
    };
}

}} // namespace joinable::v0

#endif

// ---- joinable/join/joinable.hpp

namespace joinable { inline namespace v0 {

inline bool Round::is_active(int rank) const {
    return session_ == nullptr || session_->is_active(rank);
}

inline void Round::hold() {
    if (session_ != nullptr) {
        session_->hold(position_);
    }
}

inline void Round::done() {
    if (session_ != nullptr) {
        session_->done();
    }
}

namespace detail {
class Attachment;
class WindowOf;

/// A guard's side of a participant's state; null once the participant is destroyed.
struct AttachedState {
    JoinState* state = nullptr;
};

Session* session_of(JoinState const& state) noexcept;

/// Where the window of a participant ends outside a guard.
enum class WindowEnd : std::uint8_t {
    opening,   ///< where a round that syncs opens
    reduction, ///< where WindowOf::end() is called: the round may be opened anew before
};
} // namespace detail

/// The state that a joinable class owns: whether it is inside a guard, and inside which one, and what its
/// rank accumulated since the last round that synced. A new state is inside none.
class JoinState {
public:
    JoinState() = default;
    JoinState(JoinState const&) = delete;
    JoinState& operator=(JoinState const&) = delete;
    /// In a guard, it ends the guard: its hooks refer to the participant.
    ~JoinState() {
        if (attached_ != nullptr) {
            attached_->state = nullptr;
        }
        if (session_ != nullptr) {
            session_->lose_participant(position_);
        }
    }

private:
    friend class detail::Attachment;
    friend class detail::WindowOf;
    friend class PendingRound;
    friend detail::Session* detail::session_of(JoinState const& state) noexcept;

    /// The round of a participant outside enabled guards. Adds the weight that the state holds.
    /// @throws ContractViolation  see Window::require_continued.
    Round open_alone(int world_size, RoundNotice const& notice, detail::WindowEnd end) {
        RoundNotice const said =
            local_rounds_ == nullptr ? notice : local_rounds_->announce(position_ == 0, notice);
        Round const round = Round::outside_guard(world_size, said, window_);
        std::uint64_t const own = said.skips ? 0 : said.weight.value_or(0);
        window_.require_continued(said, own);
        if (!round.will_sync() || end == detail::WindowEnd::opening) {
            window_.pass(round.will_sync(), said, own);
        }
        return round;
    }

    detail::AttachedState* attached_ = nullptr;
    detail::Session* session_ = nullptr;
    std::uint64_t guards_ = 0;    ///< how many there were, this one included
    detail::Window window_;       ///< outside guards, and in guards that are not enabled
    bool may_be_cleared_ = false; ///< a guard has begun or ended since the last backward pass
    std::size_t position_ = 0;
    detail::LocalRounds* local_rounds_ = nullptr; ///< of a guard that is not enabled
};

namespace detail {

/// What a participant knows of its window, inside a guard and outside. Users clear the gradients of an
/// incomplete window where an epoch begins, and say so to nobody; so the participant looks.
class WindowOf {
public:
    explicit WindowOf(JoinState& state) noexcept : state_{state} {}

    /// Inside a guard, that of all its participants.
    [[nodiscard]] Window const& window() const noexcept {
        return state_.session_ != nullptr ? state_.session_->window() : state_.window_;
    }
    /// Whether the gradients hold something, and may have been cleared.
    [[nodiscard]] bool may_be_cleared() const noexcept {
        return state_.may_be_cleared_ && window().is_open();
    }
    /// The first backward pass after a guard has begun or ended begins now, or its batch is skipped.
    void stop_looking() noexcept { state_.may_be_cleared_ = false; }
    /// The gradients were cleared, before or after the pass of the last round.
    /// @throws ContractViolation  ranks have been told of the window's weight.
    void clear(bool in_round) {
        if (state_.session_ != nullptr) {
            state_.session_->clear_window(in_round);
        }
        state_.window_.clear(in_round);
    }
    /// Gradients were reduced. Inside a guard the window ended when the round was agreed on.
    void end() noexcept {
        stop_looking();
        state_.window_ = {};
    }

private:
    JoinState& state_;
};

} // namespace detail

/// Describes a guard to a participant that enters it.
struct GuardView {
    bool carries_accumulated; ///< JoinOptions::carry_accumulated
    bool steps;               ///< a hook is labelled labels::step or labels::shards
    bool reduces;             ///< a hook is labelled labels::gradients
    /// The addresses of the values whose gradients are averaged. Incomplete if a participant that
    /// averages has no list_averaged(std::vector<void const*>&) const.
    std::vector<void const*> averaged;
    bool lists_all_averaged;
};

namespace detail {

inline Session* session_of(JoinState const& state) noexcept {
    return state.session_;
}

/// Called before the owner of `state` communicates; error texts call it `name`.
/// @throws ContractViolation  its communicator is inside a guard, but the owner is not, and no part
///         of a participant of that guard is open.
template <class Comm>
void require_listed(JoinState const& state, Comm const& comm, std::string_view name) {
    if (session_of(state) == nullptr) {
        require_unguarded(std::addressof(comm), name);
    }
}

template <class J>
struct join_keywords_of : std::type_identity<keywords<>> {};
template <class J>
    requires requires { typename J::join_keywords; }
struct join_keywords_of<J> : std::type_identity<typename J::join_keywords> {};

template <class J>
using arguments_of = arguments<typename join_keywords_of<J>::type>;

template <class J>
concept has_join_hook = requires(J& joinable, arguments_of<J> const& args) {
    requires std::is_object_v<decltype(joinable.join_hook(args))>;
};
template <class J>
concept has_join_communicator = requires(J& joinable) {
    requires std::is_lvalue_reference_v<decltype(joinable.join_communicator())>;
    requires Communicator<std::remove_reference_t<decltype(joinable.join_communicator())>>;
};
template <class J>
concept has_join_state = requires(J& joinable) {
    { joinable.join_state() } -> std::same_as<JoinState&>;
};
// A member that is declared in another way is called, too, so that the compiler reports the error.
template <class J>
concept has_join_name =
    requires(J const& joinable) { joinable.join_name(); } || requires { &J::join_name; };
template <class J>
concept has_join_verb = requires { std::string_view{J::join_verb}; };
/// The name of a participant in error texts. Valid as long as the participant and its name.
template <class J>
std::string_view join_name_of(J const& joinable) {
    if constexpr (has_join_name<J>) {
        static_assert(
            lasting_text<decltype(joinable.join_name())>,
            "Joinable: join_name() must be 'std::string_view join_name() const', a view of a text that the "
            "class keeps"
        );
        return joinable.join_name();
    } else {
        return class_name<J>();
    }
}

template <class J>
concept has_agree_on = requires(J const& joinable, AgreementList& list) {
    joinable.agree_on(list);
} || requires { &J::agree_on; };

template <class J>
concept has_check_guard = requires(J const& joinable, GuardView const& view) {
    joinable.check_guard(view);
} || requires { &J::check_guard; };

template <class J>
concept has_list_claims = requires(J const& joinable, ParameterClaims& claims) {
    joinable.list_claims(claims);
} || requires { &J::list_claims; };

template <class Keywords>
inline constexpr bool are_comparable = true;
template <class... Ks>
inline constexpr bool are_comparable<keywords<Ks...>> =
    ((compares_values<Ks> || is_per_rank<Ks> || is_agreeable<typename Ks::value_type>()) && ...);

} // namespace detail

/// The hook that a joinable returns.
template <detail::has_join_hook J>
using join_hook_t =
    decltype(std::declval<J&>().join_hook(std::declval<detail::arguments_of<J> const&>()));

/// The communicator of a joinable.
template <detail::has_join_communicator J>
using join_communicator_t =
    std::remove_reference_t<decltype(std::declval<J&>().join_communicator())>;

/// A class that can take part in a guard.
///
/// `joinable` is an lvalue of `J`.
/// | expression                     | result        | meaning                                       |
/// |--------------------------------|---------------|-----------------------------------------------|
/// | `joinable.join_hook(args)`     | JoinHook      | what joined ranks run in its place; local;    |
/// |                                |               | `args` is arguments<J::join_keywords>, and no |
/// |                                |               | member join_keywords means keywords<>         |
/// | `joinable.join_communicator()` | Communicator& | the communicator of its collectives           |
/// | `joinable.join_state()`        | JoinState&    | a member that it owns                         |
/// | `joinable.join_name()`         | string_view   | its name in texts, the same on every rank;    |
/// | (optional, const)              |               | default: the name of the class                |
/// | `J::join_verb`                 | string_view   | the member that notifies, for texts, such as  |
/// | (optional)                     |               | "step()"                                      |
/// | `joinable.agree_on(list)`      |               | adds to an AgreementList what must be the     |
/// | (optional, const)              |               | same on every rank that enters a guard        |
/// | `joinable.check_guard(view)`   |               | throws if it cannot take part in the guard    |
/// | (optional, const)              |               | that a GuardView describes                    |
/// | `joinable.list_claims(claims)` |               | adds to ParameterClaims the parameters that   |
/// | (optional, const)              |               | it averages or steps                          |
///
/// Not checkable, but required: the class calls notify_join_context or announce_round before its
/// collectives of a round.
template <class J>
concept Joinable = detail::has_join_hook<J> && JoinHook<join_hook_t<J>> &&
                   detail::has_join_communicator<J> && detail::has_join_state<J>;

/// Says in one sentence why a class is not Joinable.
template <class J>
consteval bool models_joinable() {
    static_assert(
        detail::has_join_hook<J>,
        "Joinable: expected a member 'join_hook(arguments<join_keywords>)' that returns a JoinHook "
        "by value"
    );
    if constexpr (detail::has_join_hook<J>) {
        [[maybe_unused]] constexpr bool is_hook = models_join_hook<join_hook_t<J>>();
    }
    static_assert(
        detail::has_join_communicator<J>,
        "Joinable: expected a member 'join_communicator()' that returns a Communicator by reference"
    );
    static_assert(
        detail::has_join_state<J>, "Joinable: expected a member 'JoinState& join_state()'"
    );
    static_assert(
        detail::are_comparable<typename detail::join_keywords_of<J>::type>,
        "Joinable: ranks cannot compare the values of a keyword in join_keywords; give the keyword "
        "'static void agree_on(AgreementList&, V const&)', or 'static constexpr bool per_rank = "
        "true' where ranks may differ"
    );
    return Joinable<J>;
}

/// A round that was announced and may not be answered yet. Outside a guard it is always answered.
class PendingRound {
public:
    PendingRound() = default;

    /// Announces on behalf of the owner of `state`: see announce_round.
    PendingRound(
        JoinState& state,
        int world_size,
        RoundNotice const& notice,
        detail::WindowEnd end = detail::WindowEnd::opening
    ) {
        if (state.session_ != nullptr) {
            state_ = &state;
            guard_ = state.guards_;
            state.session_->announce(state.position_, notice);
            return;
        }
        local_ = state.open_alone(world_size, notice, end);
    }

    /// Blocks until all ranks have opened the round; call it before the first collective.
    /// @throws PeerFailed, Mismatch, EarlyTermination  the ranks agreed on it; the guard is over.
    /// @throws TimedOut  and other errors of the communicator; the guard is over.
    /// @throws ContractViolation  the guard has been destroyed.
    [[nodiscard]] Round wait() {
        if (state_ == nullptr) {
            return local_;
        }
        if (!is_in_guard()) {
            throw ContractViolation{
                "the guard in which this round was announced has ended; wait() for a round before its "
                "guard ends"
            };
        }
        return state_->session_->answer(state_->position_);
    }

    /// Whether gradients will be reduced, according to this rank's announcement. Local.
    [[nodiscard]] bool will_sync() const noexcept {
        return is_in_guard() ? state_->session_->announced_sync() : local_.will_sync();
    }

    /// Outside a guard: the window that this round was to reduce was discarded, after it was announced. Local.
    void forget(detail::Window const& window) noexcept {
        local_.weight_ -= window.weight;
        local_.weight_sum_ -= window.weight;
        local_.accumulated_rounds_ = 0;
    }

    /// Whether wait() returns at once, because another participant opened the round or no guard is
    /// open. Local.
    [[nodiscard]] bool is_answered() const noexcept {
        return !is_in_guard() || state_->session_->is_answered();
    }

private:
    [[nodiscard]] bool is_in_guard() const noexcept {
        return state_ != nullptr && state_->session_ != nullptr && state_->guards_ == guard_;
    }

    JoinState* state_ = nullptr; ///< of the owner, if it was in a guard
    std::uint64_t guard_ = 0;    ///< which one of its guards
    Round local_;
};

/// Announces the collectives of a participant without waiting. The first participant of a round
/// opens it (posts the roll call); the others follow in hook order. Call it before the forward pass
/// and call wait() before the first collective, so that the roll call overlaps with the pass.
///
/// Collective over the active ranks; joined ranks follow by shadowing. While this rank shadows, the
/// call does nothing. Outside any guard it only records what accumulates until a round syncs. With
/// EndPolicy::throw_early it waits, because a rank that has run out ends the guard before the pass.
/// @throws ContractViolation  it is not this participant's turn, or the notice is refused; the text
///         names the participants. Also if the participant is in no guard, but its communicator is
///         in one, and no part of a participant of that guard is open: joined ranks would not
///         follow.
/// @throws what PendingRound::wait throws, with EndPolicy::throw_early.
template <class J>
PendingRound announce_round(J& joinable, RoundNotice notice = {}) {
    static_assert(models_joinable<J>());
    detail::require_listed(
        joinable.join_state(), joinable.join_communicator(), detail::join_name_of(joinable)
    );
    return {joinable.join_state(), joinable.join_communicator().size(), notice};
}

/// Announces the collectives of a participant and waits until all ranks have opened the round. See
/// announce_round and PendingRound::wait for the callers and the errors.
template <class J>
Round notify_join_context(J& joinable, RoundNotice notice = {}) {
    return announce_round(joinable, notice).wait();
}

/// Keeps the text of a failure, and the exception being handled if there is one. Peers see it when
/// the exception leaves the guard. Local. Only the first record of a round counts; outside a guard
/// the call does nothing. Call it where a participant's verb catches an exception, then rethrow.
template <class J>
void record_failure(J& joinable, std::string_view text) {
    if (auto* const session = detail::session_of(joinable.join_state()); session != nullptr) {
        session->record_failure(text);
    }
}

namespace detail {

/// Discards what record_failure kept: the joinable has handled the failure, and the guard
/// continues.
template <class J>
void forget_failure(J& joinable) noexcept {
    if (auto* const session = session_of(joinable.join_state()); session != nullptr) {
        session->forget_failure();
    }
}

} // namespace detail

/// The order in which the main hooks of these joinables run: a std::index_sequence of their
/// positions in the argument list.
template <Joinable... Js>
using hook_sequence =
    typename detail::ordered_hooks<detail::MainPhase, join_hook_t<Js>...>::sequence;

/// The order of their post hooks.
template <Joinable... Js>
using post_hook_sequence =
    typename detail::ordered_hooks<detail::PostPhase, join_hook_t<Js>...>::sequence;

namespace detail {

/// Runs the collectives of a participant whose round has been opened, and ends its part.
template <class J, class F>
decltype(auto) run_part(J& joinable, Round round, F&& collectives) {
    try {
        if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
            std::forward<F>(collectives)();
            round.done();
        } else {
            using Result = std::invoke_result_t<F>;
            Result&& result = std::forward<F>(collectives)();
            round.done();
            return static_cast<Result>(std::forward<Result>(result));
        }
    } catch (...) {
        record_failure(joinable, {});
        throw;
    }
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/join/participants.hpp

namespace joinable { inline namespace v0 {

/// The participants of a guard: made by participants().
template <class... Js>
struct Participants {
    std::tuple<Js&...> joinables;
};

namespace detail {

/// The result of participants() after an assertion has explained what is wrong with its arguments.
/// A guard that is made of it does not repeat the error in worse words.
struct RefusedParticipants {};

template <class>
inline constexpr bool never = false;

template <class J>
concept is_dereferenceable = requires(J& joinable) { *joinable; };

template <class... Hooks>
consteval void check_order() {
    static_assert(ordered_hooks<MainPhase, Hooks...>::is_solved);
    static_assert(ordered_hooks<PostPhase, Hooks...>::is_solved);
}

} // namespace detail

/// Lists the joinables of a guard and marks where the list ends. It takes non-const lvalues only;
/// they must outlive the guard. All compile-time errors of participants are reported here: the
/// return type is deduced, so compilers check this body before the guard.
template <class... Js>
[[nodiscard]] auto participants(Js&&... joinables) {
    static_assert(sizeof...(Js) > 0, "participants: a Join needs at least one participant");
    static_assert(sizeof...(Js) < 32, "participants: a Join takes at most 31 participants");
    constexpr bool are_named = (std::is_lvalue_reference_v<Js> && ...);
    static_assert(
        are_named,
        "participants: a temporary cannot take part; give it a name that outlives the Join"
    );
    constexpr bool are_mutable = (!std::is_const_v<std::remove_reference_t<Js>> && ...);
    static_assert(
        are_mutable,
        "participants: a const object cannot take part, because the guard changes its "
        "join_state(); pass one that is not const"
    );
    constexpr bool are_joinable = (models_joinable<std::remove_cvref_t<Js>>() && ...);
    if constexpr (sizeof...(Js) > 0 && are_named && are_mutable && are_joinable) {
        detail::check_order<join_hook_t<std::remove_cvref_t<Js>>...>();
        return Participants<std::remove_cvref_t<Js>...>{
            std::tuple<std::remove_cvref_t<Js>&...>{joinables...}
        };
    } else {
        return detail::RefusedParticipants{};
    }
}

/// Explains pointers in place of participants.
template <class... Js>
    requires(detail::is_dereferenceable<Js> || ...)
[[nodiscard]] auto participants(Js&&...) {
    static_assert(
        !(detail::is_dereferenceable<Js> || ...),
        "participants: give the participants themselves instead of pointers to them, as in "
        "participants(*ddp, step)"
    );
    return detail::RefusedParticipants{};
}

/// The communicator of a guard's roll calls and of its participants' words: made by control().
template <Communicator Comm>
struct Control {
    Comm& communicator;
};

/// Names the communicator for a guard's roll calls, in place of the communicator of the first
/// participant in hook order. Participants also send words by it, such as maps of used parameters.
/// It must reduce host memory and have the same ranks in the same order.
/// It must outlive the guard, and must not be used for anything that could come between two roll
/// calls.
template <class Comm>
[[nodiscard]] Control<Comm> control(Comm& communicator) {
    static_assert(models_communicator<Comm>());
    static_assert(
        detail::reduces_host_memory<Comm>,
        "control: expected a communicator that reduces host memory"
    );
    return {communicator};
}

}} // namespace joinable::v0

// ---- joinable/detail/unwinding.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A member that tells the destructor of an object whether an exception destroys the object.
/// Exceptions from before the construction of the object do not count.
class Unwinding {
public:
    [[nodiscard]] bool has_begun() const noexcept { return std::uncaught_exceptions() > before_; }

private:
    int before_ = std::uncaught_exceptions();
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/attachments.hpp

/// @file
/// The changes that a guard makes outside itself, each undone by a destructor, and the checks
/// before them.

namespace joinable { inline namespace v0 { namespace detail {

/// Whether a participant averages gradients, and if so, what joined ranks do with theirs.
enum class Averages : std::uint8_t { none, gradients, but_leaves_joined_untouched };

/// Sets a participant's state for as long as its guard lives.
class Attachment {
public:
    Attachment() = default;
    Attachment(Attachment const&) = delete;
    Attachment& operator=(Attachment const&) = delete;
    ~Attachment() { detach(); }

    static bool is_attached(JoinState const& state) noexcept {
        return state.session_ != nullptr || state.local_rounds_ != nullptr;
    }
    /// `averages`: what its rank accumulated in the guard is the participant's when the guard ends.
    void
    attach(JoinState& state, Session& session, std::size_t position, Averages averages) noexcept {
        begin(state, position, averages);
        state.session_ = &session;
        ++state.guards_;
    }
    /// For a guard that is not enabled. If the state is in another guard, this changes nothing.
    void
    attach(JoinState& state, LocalRounds& rounds, std::size_t position, Averages averages) noexcept;

    void detach() noexcept;

private:
    void begin(JoinState& state, std::size_t position, Averages averages) noexcept {
        attached_.state = &state;
        state.attached_ = &attached_;
        averages_ = averages;
        state.position_ = position;
        state.may_be_cleared_ = true;
        forget_rounds();
    }
    /// A participant that averages nothing counts anew in each guard.
    void forget_rounds() noexcept {
        if (averages_ == Averages::none) {
            attached_.state->window_ = {};
        }
    }

    AttachedState attached_;
    Averages averages_ = Averages::none;
};

struct NamedState {
    JoinState* state;
    std::string_view name;
    Averages averages;
};
/// What all participants that average have accumulated; nothing if there is none.
/// @throws ContractViolation  they differ.
[[nodiscard]] Window common_window(std::initializer_list<NamedState> participants);
/// @throws ContractViolation  a participant is in a guard twice, or in another one.
void check_states(std::initializer_list<NamedState> participants);

/// Restores the deadlines of communicators that a guard has overridden.
class Deadlines {
public:
    Deadlines() = default;
    Deadlines(Deadlines const&) = delete;
    Deadlines& operator=(Deadlines const&) = delete;
    ~Deadlines() { restore(); }

    /// @throws ContractViolation  a communicator has no deadline.
    void exchange(
        std::vector<ControlCommunicator*> const& communicators, std::chrono::nanoseconds deadline
    );
    void restore() noexcept;

private:
    std::vector<std::pair<ControlCommunicator*, std::chrono::nanoseconds>> before_;
};

/// @throws ContractViolation  an option is out of its range.
void check_options(JoinOptions const& options);

/// @throws ContractViolation  with known lengths, the window goes on with weights, but inputs have none, or the
///         reverse.
void check_weights(JoinOptions const& options, Window const& window);

/// @throws ContractViolation  the communicators have different ranks, or too many.
void check_same_ranks(std::vector<ControlCommunicator*> const& communicators);

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/attachments.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void Attachment::attach(
    JoinState& state, LocalRounds& rounds, std::size_t position, Averages averages
) noexcept {
    if (!is_attached(state)) {
        begin(state, position, averages);
        state.local_rounds_ = &rounds;
    }
}

JOINABLE_DEFINITION void Attachment::detach() noexcept {
    if (attached_.state != nullptr) {
        forget_rounds();
    }
    if (JoinState* const state = std::exchange(attached_.state, nullptr)) {
        state->attached_ = nullptr;
        if (state->session_ != nullptr && averages_ != Averages::none) {
            state->window_ = averages_ == Averages::gradients ? state->session_->window()
                                                              : state->session_->untouched_window();
        }
        state->session_ = nullptr;
        state->local_rounds_ = nullptr;
        state->may_be_cleared_ = true;
    }
}

JOINABLE_DEFINITION Window common_window(std::initializer_list<NamedState> participants) {
    NamedState const* first = nullptr;
    for (NamedState const& mine : participants) {
        if (mine.averages == Averages::none) {
            continue;
        }
        if (first == nullptr) {
            first = &mine;
            continue;
        }
        Window const& window = WindowOf{*mine.state}.window();
        Window const& common = WindowOf{*first->state}.window();
        if (!window.holds_the_same(common)) {
            throw ContractViolation{concat(
                "the participants of a guard that average gradients must have accumulated the same batches, but "
                "a ",
                first->name,
                " holds ",
                common.batches,
                " batches of weight ",
                common.weight,
                " and a ",
                mine.name,
                " holds ",
                window.batches,
                " batches of weight ",
                window.weight,
                "; clear the gradients of both before the guard, or call discard_window()"
            )};
        }
    }
    return first == nullptr ? Window{} : WindowOf{*first->state}.window();
}

JOINABLE_DEFINITION void check_states(std::initializer_list<NamedState> participants) {
    for (auto const* mine = participants.begin(); mine != participants.end(); ++mine) {
        auto const is_same = [&](NamedState const& other) { return other.state == mine->state; };
        if (std::any_of(participants.begin(), mine, is_same)) {
            throw ContractViolation{concat(
                "a ", mine->name, " is twice among the participants of a guard; list it once"
            )};
        }
        if (Attachment::is_attached(*mine->state)) {
            throw ContractViolation{
                concat("a ", mine->name, " already takes part in another guard; end that one first")
            };
        }
    }
}

JOINABLE_DEFINITION void Deadlines::exchange(
    std::vector<ControlCommunicator*> const& communicators, std::chrono::nanoseconds deadline
) {
    before_.reserve(communicators.size()); // or one could be changed and not restored
    for (ControlCommunicator* communicator : communicators) {
        auto const before = communicator->exchange_deadline(deadline);
        if (!before) {
            throw ContractViolation{"JoinOptions::timeout needs communicators that "
                                    "have set_deadline()"};
        }
        before_.emplace_back(communicator, *before);
    }
}

JOINABLE_DEFINITION void Deadlines::restore() noexcept {
    for (auto const& [communicator, deadline] : before_) {
        communicator->exchange_deadline(deadline);
    }
    before_.clear();
}

JOINABLE_DEFINITION void check_options(JoinOptions const& options) {
    if (options.timeout && *options.timeout <= std::chrono::nanoseconds::zero()) {
        throw ContractViolation{concat(
            "JoinOptions::timeout must be positive, or no wait could end well; given ",
            options.timeout->count(),
            " ns"
        )};
    }
    if (options.sync_every == 0) {
        throw ContractViolation{"JoinOptions::sync_every must be at least 1, given 0"};
    }
    if (options.weight_per_input.value_or(0) > max_weight) {
        throw ContractViolation{
            "JoinOptions::weight_per_input: " + refusal_of(*options.weight_per_input)
        };
    }
}

JOINABLE_DEFINITION void check_weights(JoinOptions const& options, Window const& window) {
    if (options.inputs) {
        window.require_continued({.weight = options.weight_per_input}, 0);
    }
}

JOINABLE_DEFINITION void check_same_ranks(std::vector<ControlCommunicator*> const& communicators) {
    ControlCommunicator const& first = *communicators.front();
    if (first.size() > max_world_size) {
        throw ContractViolation{
            concat("a guard takes at most ", max_world_size, " ranks, given ", first.size())
        };
    }
    auto const place = [](ControlCommunicator const& communicator) {
        return concat("rank ", communicator.rank(), " of ", communicator.size());
    };
    for (ControlCommunicator const* other : communicators) {
        if (place(*other) != place(first)) {
            throw ContractViolation{
                "the communicators of a guard's participants "
                "must have the same ranks in the same "
                "order, but one says " +
                place(first) + " and another " + place(*other)
            };
        }
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/join/detail/hooks.hpp

namespace joinable { inline namespace v0 { namespace detail {

template <std::size_t First, std::size_t... Rest>
consteval std::size_t first_of(std::index_sequence<First, Rest...>) {
    return First;
}

template <class J, class... Ks>
arguments_of<J> arguments_from(KeywordArgument<Ks> const&... keywords) {
    arguments_of<J> args{};
    (args.set(keywords), ...);
    return args;
}

/// A hook constructed in place, so that it need not be movable.
template <std::size_t Index, class J>
struct HookSlot {
    template <class... Ks>
    explicit HookSlot(J& joinable, KeywordArgument<Ks> const&... keywords)
        : hook{joinable.join_hook(arguments_from<J>(keywords...))} {}

    join_hook_t<J> hook;
};

template <class Indices, class... Js>
struct HookSlots;
template <std::size_t... Is, class... Js>
struct HookSlots<std::index_sequence<Is...>, Js...> : HookSlot<Is, Js>... {
    template <class... Ks>
    explicit HookSlots(std::tuple<Js&...> const& joinables, KeywordArgument<Ks> const&... keywords)
        : HookSlot<Is, Js>(std::get<Is>(joinables), keywords...)... {}
};

/// The hooks of a guard, stored in argument order and run in the order that their labels require.
template <class... Js>
class GuardHooks final : public HookRunner {
public:
    template <class... Ks>
    explicit GuardHooks(std::tuple<Js&...> const& joinables, KeywordArgument<Ks> const&... keywords)
        : slots_{joinables, keywords...} {}

    void run_main_hook(std::size_t position, Round const& round) override {
        run_main(position, round, hook_sequence<Js...>{});
    }
    void run_post_hooks(JoinResult const& result, bool is_last_joiner) override {
        run_post(result, is_last_joiner, post_hook_sequence<Js...>{});
    }

    /// The facts about a participant that a session needs.
    template <class J>
    static ParticipantInfo describe(J const& joinable) {
        using Hook = join_hook_t<J>;
        ParticipantInfo info{join_name_of(joinable)};
        if constexpr (has_takes_part<Hook>) {
            info.takes_part = [](Round const& round) -> bool { return Hook::takes_part(round); };
        }
        if constexpr (has_join_verb<J>) {
            info.verb = J::join_verb;
        }
        return info;
    }

private:
    template <std::size_t Index>
    auto& hook() {
        using J = std::tuple_element_t<Index, std::tuple<Js...>>;
        return static_cast<HookSlot<Index, J>&>(slots_).hook;
    }

    template <std::size_t... Is>
    void run_main(std::size_t position, Round const& round, std::index_sequence<Is...>) {
        std::size_t current = 0;
        auto const run = [&](auto& hook) {
            if constexpr (has_main_hook_of_round<std::remove_reference_t<decltype(hook)>>) {
                hook.main_hook(round);
            } else {
                hook.main_hook();
            }
        };
        ((current++ == position ? run(hook<Is>()) : void()), ...);
    }

    template <std::size_t... Is>
    void run_post(JoinResult const& result, bool is_last_joiner, std::index_sequence<Is...>) {
        auto const run = [&](auto& hook) {
            if constexpr (has_post_hook_of_result<std::remove_reference_t<decltype(hook)>>) {
                hook.post_hook(result);
            } else {
                hook.post_hook(is_last_joiner);
            }
        };
        (run(hook<Is>()), ...);
        auto const end = [](auto& hook) {
            if constexpr (has_end_hook<std::remove_reference_t<decltype(hook)>>) {
                hook.end_hook();
            }
        };
        (end(hook<Is>()), ...);
    }

    HookSlots<std::index_sequence_for<Js...>, Js...> slots_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/join/detail/entry.hpp

/// @file
/// The lists that ranks compare when they enter a guard.

namespace joinable { inline namespace v0 { namespace detail {

/// Leaves out `enable`, because ranks without it do not enter, and what may differ by rank.
inline void agree_on(AgreementList& list, JoinOptions const& options, bool can_abort) {
    list.begin_section("options differ: ");
    list.add("end_policy", name_of(options.end_policy));
    char const* const inputs = can_abort ? "a value" : "a value, but cannot abort";
    list.add("inputs", options.inputs ? inputs : "no value");
    list.add("weight_per_input", options.weight_per_input ? "a value" : "no value");
    list.add("sync_every", options.sync_every);
    list.add("carry_accumulated", options.carry_accumulated);
}

inline std::string title_of(std::vector<std::string_view> const& names, std::size_t position) {
    return concat("guards differ: participant ", position, " (", names[position], "): ");
}

template <class K>
void agree_on_keyword(AgreementList& list, std::optional<typename K::value_type> const& value) {
    std::string_view name = class_name<K>();
    name.remove_suffix(name.ends_with("_t") ? 2 : 0);
    std::string const label = concat("keyword ", name);
    if constexpr (compares_values<K>) {
        list.add(label, value ? "a value" : "no value");
        if (value) {
            K::agree_on(list, *value);
        }
    } else if constexpr (!is_per_rank<K>) {
        list.add(label, value);
    }
}

/// The entries of one participant: its keywords and what its agree_on() adds.
template <class J, class... Ks>
void agree_on_participant(
    AgreementList& list, J const& joinable, KeywordArgument<Ks> const&... keywords
) {
    if constexpr (!std::is_same_v<arguments_of<J>, arguments<joinable::keywords<>>>) {
        arguments_from<J>(keywords...).for_each([&]<class K>(K, auto const& value) {
            agree_on_keyword<typename K::type>(list, value);
        });
    }
    if constexpr (has_agree_on<J>) {
        joinable.agree_on(list);
    }
}

template <class Label, class... Js>
inline constexpr bool has_label =
    (std::is_same_v<typename label_of<join_hook_t<Js>>::type, Label> || ...);

template <class J>
void list_averaged(J const& joinable, GuardView& view) {
    if constexpr (requires { joinable.list_averaged(view.averaged); }) {
        joinable.list_averaged(view.averaged);
    } else if constexpr (has_label<labels::gradients, J>) {
        view.lists_all_averaged = false;
    }
}

/// A participant averages if its hook is labelled so, or if it says so.
template <class J>
Averages averages_of(J const& joinable) {
    bool averages = has_label<labels::gradients, J>;
    if constexpr (requires { joinable.averages_gradients(); }) {
        averages = joinable.averages_gradients();
    }
    bool leaves_untouched = false;
    if constexpr (requires { joinable.leaves_joined_untouched(); }) {
        leaves_untouched = joinable.leaves_joined_untouched();
    }
    return !averages          ? Averages::none
           : leaves_untouched ? Averages::but_leaves_joined_untouched
                              : Averages::gradients;
}

/// Before a guard: a participant that averages forgets what it accumulated, if its gradients were cleared.
template <class J>
void forget_cleared(J& joinable) {
    if constexpr (requires { joinable.forget_cleared(); }) {
        joinable.forget_cleared();
    }
}

template <class J>
void list_claims(J const& joinable, ParameterClaims& claims) {
    claims.begin_participant(join_name_of(joinable));
    if constexpr (has_list_claims<J>) {
        joinable.list_claims(claims);
    }
}

template <class J>
void check_guard(J const& joinable, GuardView const& view) {
    if constexpr (has_check_guard<J>) {
        joinable.check_guard(view);
    }
}

/// Lists the participants in hook order, the order of post hooks, the options, then each
/// participant.
template <std::size_t... Main, std::size_t... Post, class... Js, class... Ks>
AgreementList entry_list(
    std::tuple<Js&...> const& joinables,
    std::index_sequence<Main...>,
    std::index_sequence<Post...>,
    JoinOptions const& options,
    bool can_abort,
    KeywordArgument<Ks> const&... keywords
) {
    std::vector<std::string_view> const names{join_name_of(std::get<Main>(joinables))...};
    std::vector<std::size_t> positions(names.size());
    std::size_t position = 0;
    ((positions[Main] = position++), ...);
    AgreementList list;
    list.begin_section("guards differ: ");
    list.add("library version", library_version);
    list.add("participants", names);
    list.add("order of post hooks", std::vector<std::size_t>{positions[Post]...});
    agree_on(list, options, can_abort);
    position = 0;
    ((list.begin_section(title_of(names, position++)),
      agree_on_participant(list, std::get<Main>(joinables), keywords...)),
     ...);
    return list;
}

}}} // namespace joinable::v0::detail

// ---- joinable/join/guarded_range.hpp

namespace joinable { inline namespace v0 {

/// The tag of Join::iterate that posts every roll call one element early.
inline constexpr struct look_ahead_t {
} look_ahead{};

namespace detail {

/// The notice of a range whose elements need none.
struct DefaultNotice {
    template <class Element>
    RoundNotice operator()(Element const&) const noexcept {
        return {};
    }
};

template <class Range>
concept is_range = requires(std::remove_reference_t<Range>& range) {
    std::begin(range);
    std::end(range);
};

/// An element of a range that was read once: a range may load a batch each time it is read.
template <class Element>
class ReadElement {
    using Kept = std::conditional_t<
        std::is_reference_v<Element>,
        std::remove_reference_t<Element>*,
        std::optional<Element>>;

public:
    template <class Iterator>
    void read(Iterator const& position) {
        if constexpr (std::is_reference_v<Element>) {
            Element&& element = *position;
            kept_ = std::addressof(element);
        } else {
            kept_.reset();
            kept_.emplace(*position);
        }
    }
    void take(ReadElement& other) {
        if constexpr (std::is_reference_v<Element>) {
            kept_ = other.kept_;
        } else {
            kept_.reset();
            if (other.kept_) {
                kept_.emplace(std::move(*other.kept_));
            }
        }
    }
    /// The element, as a new read gives it.
    [[nodiscard]] Element&& get() const noexcept { return static_cast<Element&&>(*kept_); }

private:
    mutable Kept kept_{};
};

} // namespace detail

/// The result of Join::iterate: an input range that opens a round before each element, and reads
/// each element of its range once. It calls `announce` once for each. With look-ahead and `announce`
/// an element that is a reference is read twice, as forward ranges allow: the next one may lie in the
/// same place. An element that is a value can be moved from.
template <class Guard, class Range, class Announce, bool LooksAhead>
class GuardedRange {
    using Inner = decltype(std::begin(std::declval<std::remove_reference_t<Range>&>()));
    using InnerEnd = decltype(std::end(std::declval<std::remove_reference_t<Range>&>()));
    using Element = decltype(*std::declval<Inner const&>());
    static constexpr bool reads_early = !std::is_same_v<Announce, detail::DefaultNotice>;
    static_assert(
        std::is_invocable_r_v<RoundNotice, Announce&, std::remove_reference_t<Element>&>,
        "iterate: what announces a round takes an element and returns a RoundNotice, such as "
        "[](auto const& batch) { return joinable::RoundNotice{.weight = batch.size()}; }; look_ahead comes "
        "before the range"
    );
    static_assert(
        !LooksAhead || std::forward_iterator<Inner>,
        "iterate: look_ahead needs a forward range, because it looks at the next element early"
    );

public:
    GuardedRange(Guard& guard, Range&& range, Announce announce)
        : guard_{guard}, range_{std::forward<Range>(range)}, announce_{std::move(announce)} {}

    class iterator {
    public:
        iterator(GuardedRange& parent, Inner position, InnerEnd end)
            : parent_{&parent}, position_{std::move(position)}, end_{std::move(end)} {
            parent_->guard_.recorded([&] { notice_ = notice_of(position_); });
            open();
        }
        /// Valid until the next increment.
        decltype(auto) operator*() const {
            if constexpr (reads_early && !(LooksAhead && std::is_reference_v<Element>)) {
                return (LooksAhead ? current_ : next_).get();
            } else {
                return parent_->guard_.recorded([&]() -> decltype(auto) { return *position_; });
            }
        }
        iterator& operator++() {
            parent_->guard_.recorded([&] {
                ++position_;
                if constexpr (!LooksAhead) { // else the notice is known
                    notice_ = notice_of(position_);
                }
            });
            open();
            return *this;
        }
        friend bool operator==(iterator const& it, std::default_sentinel_t) { return it.is_done_; }

    private:
        void open() {
            RoundNotice const notice = notice_.value_or(RoundNotice{});
            if constexpr (LooksAhead) {
                is_done_ = !parent_->guard_.next_ahead(notice_.has_value(), notice);
                if (!is_done_) {
                    current_.take(next_);
                    parent_->guard_.recorded([&] { notice_ = notice_of(std::next(position_)); });
                    parent_->guard_.announce_ahead(notice_);
                }
            } else {
                is_done_ = !parent_->guard_.next(notice_.has_value(), notice);
            }
        }
        /// Reads the element there, if announcing needs it.
        std::optional<RoundNotice> notice_of(Inner const& position) {
            if (position == end_) {
                return {};
            }
            if constexpr (reads_early) {
                next_.read(position);
                auto&& element = next_.get();
                RoundNotice const notice =
                    parent_->announce_(element); // an optional would also accept a number
                return notice;
            } else {
                return RoundNotice{};
            }
        }

        GuardedRange* parent_;
        Inner position_;
        InnerEnd end_;
        std::optional<RoundNotice> notice_; ///< of the element that was read last; none at the end
        detail::ReadElement<Element> next_; ///< was read last
        detail::ReadElement<Element> current_; ///< was read before it
        bool is_done_ = false;
    };

    iterator begin() { return {*this, std::begin(range_), std::end(range_)}; }
    [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

private:
    Guard& guard_;
    Range range_;
    Announce announce_;
};

}} // namespace joinable::v0

// ---- joinable/join/guard.hpp

namespace joinable { inline namespace v0 {

/// Lets ranks with different numbers of inputs run collectives together. A rank that has run out of
/// inputs shadows the collectives of the others until all ranks are done. A failure of one rank
/// becomes the same typed error on all ranks.
///
/// @code
/// joinable::Join guard{joinable::participants(ddp, step), {.end_policy = ...}, keyword = value};
/// // or {participants(...), control(comm), {...}, keyword = value}; all but the first are optional
/// for (auto const& batch : my_shard) { ddp.forward(...); ddp.backward(...); step.step(); }
/// auto const result = guard.finish();
/// @endcode
///
/// A participant's notification, next() or iterate() opens a round, in the same way on all ranks.
/// Construction, finish() and the destructor are collective. When an exception leaves the guard on
/// one rank, the others see PeerFailed. Between rounds they learn of it in their next roll call,
/// and the communicators stay usable; anywhere else the communicators are aborted. After the guard
/// itself has thrown it is over, and its participants can enter another one.
/// Cost: one sum of seven words per round, and one more message when a rank arrives or fails.
/// Nothing with known lengths (JoinOptions::inputs).
template <class... Js>
class [[nodiscard("a Join guards until it is destroyed: give it a name")]] Join {
    using Sequence = hook_sequence<Js...>;
    using Hooks = detail::GuardHooks<Js...>;

public:
    /// Collective. After a throw nothing stays attached.
    /// @throws ContractViolation  a participant or a communicator is in another guard, a
    ///         participant is twice in this one, two participants average or step one parameter, or
    ///         the communicators differ in rank or size, or cannot keep the timeout.
    /// @throws PeerFailed  another rank's constructor threw.
    /// @throws Mismatch  the ranks construct different guards; the text names the first difference,
    ///         with both values.
    template <class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    explicit Join(Participants<Js...> list, KeywordArgument<Ks>... keywords)
        : Join{own_control(), list, {}, keywords...} {}

    template <class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(Participants<Js...> list, JoinOptions const& options, KeywordArgument<Ks>... keywords)
        : Join{own_control(), list, options, keywords...} {}

    template <class Comm, class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(Participants<Js...> list, Control<Comm> control, KeywordArgument<Ks>... keywords)
        : Join{erased(control.communicator), list, {}, keywords...} {}

    template <class Comm, class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(
        Participants<Js...> list,
        Control<Comm> control,
        JoinOptions const& options,
        KeywordArgument<Ks>... keywords
    )
        : Join{erased(control.communicator), list, options, keywords...} {}

    Join(Join const&) = delete;
    Join& operator=(Join const&) = delete;

    /// Calls finish() unless that was done or an exception is in flight. May throw what finish()
    /// throws.
    ~Join() noexcept(false) {
        if (session_.has_lost_participant()) {
            if (hooks_) { // not destroyed: they refer to what was
                std::allocator<Hooks>{}.deallocate(hooks_.release(), 1);
            }
            if (!unwinding_.has_begun()) {
                session_.require_told();
            }
            return;
        }
        if (!options_.enable || session_.is_over()) {
            return;
        }
        if (unwinding_.has_begun()) {
            session_.leave_by_exception();
        } else {
            finish();
        }
    }

    /// Opens a round. Collective over the active ranks. With `have_input` false it sends nothing;
    /// finish() announces the end. Returns whether to run a round. False means to leave the loop,
    /// also when all ranks agreed to stop.
    /// @throws what a roll call throws: see PendingRound::wait.
    bool next(bool have_input, RoundNotice const& notice = {}) {
        if (!options_.enable) {
            if (have_input) {
                local_rounds_.open(notice);
            }
            return have_input;
        }
        return recorded([&] { return session_.next(have_input, notice, detail::Opening::next); });
    }

    /// Calls next() for each element of a range:
    /// `for (auto& batch : guard.iterate(batches, announce))`. `announce(element)` returns the
    /// RoundNotice of the element's round. A rank that leaves the loop by break joins.
    template <detail::is_range Range, class Announce = detail::DefaultNotice>
    [[nodiscard]] auto iterate(Range&& range, Announce announce = {}) {
        return GuardedRange<Join, Range, Announce, false>{
            *this, std::forward<Range>(range), std::move(announce)
        };
    }

    /// Explains that a number of rounds is no range.
    template <class Given, class... More>
        requires(!detail::is_range<Given> && !std::same_as<Given, look_ahead_t const&>)
    [[nodiscard]] auto iterate(Given&&, More&&...) {
        static_assert(
            detail::is_range<Given>,
            "iterate: expected a range of inputs; for a number of rounds give std::views::iota(0, rounds)"
        );
        return std::array<int, 0>{};
    }
    /// Explains a notice in place of a function that returns one.
    template <class Range>
    [[nodiscard]] auto iterate(Range&&, RoundNotice const&) {
        static_assert(
            detail::never<Range>,
            "iterate: after the range comes a function that returns the notice of an element, such as "
            "[](auto const&) { return joinable::RoundNotice{.weight = 32}; }"
        );
        return std::array<int, 0>{};
    }

    /// The same for a forward range, one element early: each round's roll call is posted before the
    /// collectives of the previous round, so the answer is there when it is needed. A vote takes
    /// effect one round later. Leaving such a loop by break is a ContractViolation on all ranks,
    /// because the others already compute a round that this rank has announced. Call vote_stop()
    /// instead.
    template <class Range, class Announce = detail::DefaultNotice>
    [[nodiscard]] auto iterate(look_ahead_t, Range&& range, Announce announce = {}) {
        return GuardedRange<Join, Range, Announce, true>{
            *this, std::forward<Range>(range), std::move(announce)
        };
    }

    /// Votes to stop all ranks together. The next roll call carries the vote, and no rank runs that
    /// round. Local.
    /// @throws ContractViolation  notifications open the rounds.
    void vote_stop() {
        if (options_.enable) {
            session_.vote_stop();
        }
    }

    /// Tells the others that this rank is still working (a validation, a checkpoint). They wait for
    /// it one more deadline from now. Local.
    /// @throws ContractViolation  the control communicator has no keep_alive().
    void keep_alive()
        requires(RenewsDeadline<join_communicator_t<Js>> && ...)
    {
        for (detail::ControlCommunicator* communicator : communicators(Sequence{})) {
            if (options_.enable && !communicator->keep_alive()) {
                throw ContractViolation{"Join::keep_alive() needs a control communicator that has "
                                        "keep_alive() (see RenewsDeadline)"};
            }
        }
    }

    /// Local. Keeps the text that peers see if an exception leaves the guard in this round.
    void fail(std::string_view text) {
        session_.forget_failure();
        session_.record_failure(text);
    }

    [[nodiscard]] bool enabled() const noexcept { return options_.enable; }

    /// The round that was opened last.
    [[nodiscard]] Round const& round() const noexcept { return session_.round(); }

    /// Joins, shadows the others until all have joined or stopped, and runs the post hooks.
    /// Collective. Further calls return the same result.
    /// @throws what a roll call or a hook throws; the guard is over then.
    JoinResult finish() {
        if (!options_.enable) {
            JoinResult result;
            result.rounds = result.own_rounds = local_rounds_.count();
            result.unsynced_rounds = local_rounds_.unsynced();
            auto const& control = *controls_.front();
            result.authoritative_rank = control.rank();
            result.last_joiners = {control.rank()};
            return result;
        }
        if (!session_.result()) {
            session_.finish(*hooks_);
            release();
        }
        return *session_.result();
    }

private:
    template <class, class, class, bool>
    friend class GuardedRange;

    using Erased = std::unique_ptr<detail::ControlCommunicator>;

    template <class Comm>
    static Erased erased(Comm& comm) {
        return std::make_unique<detail::ControlOver<Comm&>>(comm);
    }
    /// Without control() the roll calls use the first participant's communicator.
    static Erased own_control() {
        using First = std::tuple_element_t<detail::first_of(Sequence{}), std::tuple<Js...>>;
        static_assert(
            detail::reduces_host_memory<join_communicator_t<First>>,
            "Join: the communicator of the first participant in hook order reduces device memory "
            "only; add control(comm) after participants(...), with a host-side communicator"
        );
        return nullptr;
    }

    template <class... Ks>
    Join(
        Erased control,
        Participants<Js...> list,
        JoinOptions const& options,
        KeywordArgument<Ks> const&... keywords
    )
        : options_{options}, control_{std::move(control)},
          controls_{make_controls(list.joinables, std::index_sequence_for<Js...>{})},
          session_{communicators(Sequence{}), describe(list.joinables, Sequence{}), options} {
        static_assert((check_keyword<Ks, Ks...>() && ...));
        if (!options.enable) {
            detail::check_options(options_);
            local_rounds_.begin(window_of(list.joinables).rounds);
            attach(list.joinables, local_rounds_, Sequence{});
            return;
        }
        AgreementList entry;
        detail::Window window;
        std::exception_ptr error;
        try {
            window = window_of(list.joinables);
            detail::check_weights(options_, window);
            prepare(list.joinables, keywords...);
            entry = detail::entry_list(
                list.joinables,
                Sequence{},
                post_hook_sequence<Js...>{},
                options_,
                session_.can_abort(),
                keywords...
            );
        } catch (...) {
            error = std::current_exception();
        }
        session_.enter(entry, window, error);
        attach(list.joinables, session_, Sequence{});
    }

    /// What f() throws will leave the guard, and peers see its text.
    template <class F>
    decltype(auto) recorded(F const& f) {
        try {
            return f();
        } catch (...) {
            session_.record_failure({});
            throw;
        }
    }
    bool next_ahead(bool have_input, RoundNotice const& notice) {
        return options_.enable ? session_.next(have_input, notice, detail::Opening::look_ahead)
                               : next(have_input, notice);
    }
    void announce_ahead(std::optional<RoundNotice> const& notice) {
        if (options_.enable) {
            session_.look_ahead(notice);
        }
    }

    /// Restores everything that the guard attached.
    void release() noexcept {
        for (detail::Attachment& attachment : attachments_) {
            attachment.detach();
        }
        hooks_.reset();
        deadlines_.restore();
        occupation_.end();
    }

    using Controls = std::array<std::unique_ptr<detail::ControlCommunicator>, sizeof...(Js)>;

    template <class K, class... Given>
    static consteval bool check_keyword() {
        return detail::check_keyword<
            K,
            (static_cast<std::size_t>(std::same_as<K, Given>) + ...),
            typename detail::join_keywords_of<Js>::type...>();
    }

    template <std::size_t... Is>
    static Controls make_controls(std::tuple<Js&...> const& joinables, std::index_sequence<Is...>) {
        return {{std::make_unique<detail::ControlOver<join_communicator_t<Js>&>>(
            std::get<Is>(joinables).join_communicator()
        )...}};
    }

    /// The distinct communicators: the control communicator, then the others in hook order. The
    /// first one serves the roll calls.
    template <std::size_t... Is>
    std::vector<detail::ControlCommunicator*> communicators(std::index_sequence<Is...>) const {
        std::vector<detail::ControlCommunicator*> distinct;
        auto const add = [&](detail::ControlCommunicator* candidate) {
            for (auto const* known : distinct) {
                if (known->address() == candidate->address()) {
                    return;
                }
            }
            distinct.push_back(candidate);
        };
        if (control_) {
            add(control_.get());
        }
        (add(controls_[Is].get()), ...);
        return distinct;
    }

    template <std::size_t... Is>
    static std::vector<detail::ParticipantInfo>
    describe(std::tuple<Js&...> const& joinables, std::index_sequence<Is...>) {
        return {Hooks::describe(std::get<Is>(joinables))...};
    }

    /// The local checks and the hooks. A failure here fails on all ranks in the entry exchange.
    template <class... Ks>
    void prepare(std::tuple<Js&...> const& joinables, KeywordArgument<Ks> const&... keywords) {
        auto const all = communicators(Sequence{});
        detail::check_options(options_);
        detail::check_same_ranks(all);
        occupation_.begin(all, session_);
        GuardView view{};
        view.carries_accumulated = options_.carry_accumulated;
        view.steps =
            detail::has_label<labels::step, Js...> || detail::has_label<labels::shards, Js...>;
        view.reduces = detail::has_label<labels::gradients, Js...>;
        view.lists_all_averaged = true;
        std::apply(
            [&](Js&... participant) {
                (detail::list_averaged(participant, view), ...);
                detail::check_states({{&participant.join_state(), detail::type_name<Js>(), {}}...});
                check_claims(joinables, Sequence{});
                (detail::check_guard(participant, view), ...);
            },
            joinables
        );
        if (options_.timeout) {
            deadlines_.exchange(all, *options_.timeout);
        }
        hooks_ = std::make_unique<Hooks>(joinables, keywords...);
    }

    /// What this rank has accumulated and not cleared.
    static detail::Window window_of(std::tuple<Js&...> const& joinables) {
        return std::apply(
            [](Js&... participant) {
                (detail::forget_cleared(participant), ...);
                return detail::common_window({detail::NamedState{
                    &participant.join_state(),
                    detail::join_name_of(participant),
                    detail::averages_of(participant)
                }...});
            },
            joinables
        );
    }

    /// In hook order, by which texts number participants.
    template <std::size_t... Is>
    static void check_claims(std::tuple<Js&...> const& joinables, std::index_sequence<Is...>) {
        ParameterClaims claims;
        (detail::list_claims(std::get<Is>(joinables), claims), ...);
        claims.require_disjoint();
    }

    template <class Rounds, std::size_t... Is>
    void attach(std::tuple<Js&...> const& joinables, Rounds& rounds, std::index_sequence<Is...>) {
        std::size_t position = 0;
        (std::get<Is>(attachments_)
             .attach(
                 std::get<Is>(joinables).join_state(),
                 rounds,
                 position++,
                 detail::averages_of(std::get<Is>(joinables))
             ),
         ...);
    }

    JoinOptions options_;
    detail::Unwinding unwinding_;
    Erased control_;
    Controls controls_;
    detail::Occupation occupation_;
    detail::Deadlines deadlines_;
    detail::Session session_;
    std::unique_ptr<Hooks> hooks_;
    detail::LocalRounds local_rounds_{options_}; ///< used when it is not enabled
    std::array<detail::Attachment, sizeof...(Js)> attachments_;
};

}} // namespace joinable::v0

// ---- joinable/join/explain.hpp

/// @file
/// Explains in one sentence why the arguments of `Join guard{...}` fit no constructor. Without this
/// header the compiler says "class template argument deduction failed" and lists candidates. Each
/// deduction guide below is a worse match than the guides of the constructors, so it is chosen only
/// when those do not match. It names a class whose assertion is the explanation. A parameter `...`
/// takes braces with a misspelt name, which match nothing else. The guides follow the class: clang
/// (14 and 19) otherwise forgets the guides of its constructors.

namespace joinable { inline namespace v0 {

namespace detail {

/// Any participants(...). The conversion makes a guide a worse match than a constructor's.
struct SomeParticipants {
    template <class... Js>
    SomeParticipants(Participants<Js...> const&);
};

template <class T>
inline constexpr bool are_participants = false;
template <class... Js>
inline constexpr bool are_participants<Participants<Js...>> = true;

template <class Given>
struct ParticipantsNotFirst {
    static_assert(
        never<Given>,
        "Join: put participants(...) first, as in Join guard{participants(a, b), {.end_policy = "
        "EndPolicy::drain}, keyword = value}"
    );
};

template <class Given>
struct ArgumentsAfterParticipants {
    static_assert(
        never<Given>,
        "Join: what follows participants(...) must be control(comm) if needed, then options in "
        "braces with the names and the order of JoinOptions, then keyword = value; write "
        "JoinOptions{...} to be told which name is wrong"
    );
};

template <class Keyword>
struct KeywordBeforeOptions {
    static_assert(never<Keyword>, "Join: options in braces must come before keyword = value");
};

struct AlreadyExplained {};

template <class Explanation>
struct Explained {};

} // namespace detail

/// The class that a guard with wrong arguments becomes. It holds only the explanation.
template <class Explanation>
class Join<detail::Explained<Explanation>> : Explanation {
public:
    template <class... Arguments>
    explicit Join(Arguments&&...);
    explicit Join(...);
};

/// The first argument is not participants(...).
template <class Given>
    requires(!detail::are_participants<std::remove_cvref_t<Given>>)
Join(Given&&, ...) -> Join<detail::Explained<detail::ParticipantsNotFirst<Given>>>;
/// The first argument is something in braces.
Join(...) -> Join<detail::Explained<detail::ParticipantsNotFirst<void>>>;

/// participants() has explained the error already.
Join(detail::RefusedParticipants, ...) -> Join<detail::Explained<detail::AlreadyExplained>>;

/// The arguments after participants(...) have none of the accepted forms.
Join(detail::SomeParticipants, ...)
    -> Join<detail::Explained<detail::ArgumentsAfterParticipants<void>>>;
/// The options follow a keyword.
template <class K>
Join(detail::SomeParticipants, KeywordArgument<K>, ...)
    -> Join<detail::Explained<detail::KeywordBeforeOptions<K>>>;

}} // namespace joinable::v0

// ---- joinable/participant/action.hpp

namespace joinable { inline namespace v0 {

/// Makes any collective a participant, without a class: `Action log{comm, act, shadow};`.
///
/// Active ranks call `log(...)` once per round, which runs `act(...)`. Joined ranks run `shadow()`
/// (or `shadow(round)`), which must issue the same collectives in the same order.
template <class Comm, class Act, class Shadow>
class Action {
    static_assert(
        !std::is_same_v<Comm, detail::NoCommunicator>,
        "Action: expected a communicator and two functions, as in Action log{comm, act, shadow}"
    );
    static_assert(models_communicator<Comm>());
    static_assert(
        std::invocable<Shadow&> || std::invocable<Shadow&, Round const&>,
        "Action: the shadow, which is the last argument, is a function that takes nothing or the Round"
    );

public:
    Action(Comm& comm, Act act, Shadow shadow)
        : comm_{comm}, act_{std::move(act)}, shadow_{std::move(shadow)} {}

    /// Collective. Returns what `act` returns, throws what it throws.
    template <class... Args>
        requires std::invocable<Act&, Args...>
    decltype(auto) operator()(Args&&... args) {
        Round const round = notify_join_context(*this);
        return detail::run_part(*this, round, [&]() -> decltype(auto) {
            return act_(std::forward<Args>(args)...);
        });
    }

    class Hook {
    public:
        explicit Hook(Action& action) noexcept : action_{action} {}
        void main_hook(Round const& round) {
            if constexpr (std::invocable<Shadow&, Round const&>) {
                action_.shadow_(round);
            } else {
                action_.shadow_();
            }
        }
        void post_hook(bool) noexcept {}

    private:
        Action& action_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "Action"; }
    static constexpr std::string_view join_verb = "operator()";

private:
    Comm& comm_;
    Act act_;
    Shadow shadow_;
    JoinState state_;
};

template <class Comm, class Act, class Shadow>
Action(Comm&, Act, Shadow) -> Action<Comm, Act, Shadow>;
/// Explains which argument is missing.
template <class Act, class Shadow>
Action(Act, Shadow) -> Action<detail::NoCommunicator, Act, Shadow>;

}} // namespace joinable::v0

// ---- joinable/participant/options.hpp

namespace joinable { inline namespace v0 {

/// What a rank's gradient is if notices carry weights. g is the gradient and w the weight; both
/// cover all samples of the rank since the last round that synced.
enum class GradientKind : std::uint8_t {
    mean, ///< the mean over the rank's own samples; the average is sum(w * g) / sum(w)
    sum,  ///< the sum over them; the average is sum(g) / sum(w). Gradients of f16 over NCCL then
          ///< need kernels (CudaDevice::use_kernels) if f16 cannot hold 1 / sum(w): otherwise the
          ///< round is a ContractViolation on all ranks before a gradient is sent
};

/// When buffers are sent in a round that syncs. Both wait for the round's roll call. Before the
/// forward pass this wait costs time; after it, the pass has hidden the roll call.
enum class BufferSync : std::uint8_t { after_forward, before_forward };

/// How gradients are cut into buckets (see BucketOptions) and averaged, and how the rest of a model
/// is kept equal. The same on every rank.
struct DataParallelOptions {
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U; ///< a bucket closes when it reaches this
    /// The limit of the bucket that is launched first, at most bucket_cap_bytes. It is small, so
    /// that communication starts early.
    std::size_t first_bucket_bytes = std::size_t{1} << 20U;
    /// Gradients live in the buckets and are never copied. Needs parameter_traits::set_grad for
    /// every parameter. The gradients are valid as long as the reducer.
    bool gradient_as_bucket_view = false;
    /// Parameters may have no gradient in an iteration. The engine names them before backward, those
    /// that were frozen since they were listed count without being named, and ranks exchange one small
    /// map per iteration before the first bucket, in a guard by its control communicator. A parameter that no rank uses is neither sent nor touched on ranks with a pass;
    /// one that another rank uses gets the average.
    bool find_unused = false;
    /// Every iteration uses the same parameters equally often. A rank records them in its first
    /// iteration and checks all others. Finds unused parameters by itself and sends one map in
    /// total.
    bool static_graph = false;
    /// Buffers are sent from the lowest active rank in every round that syncs, and with the model
    /// at the start and the end. Rounds that accumulate do not send them. Off: each rank keeps its
    /// own.
    bool broadcast_buffers = true;
    GradientKind gradient_kind = GradientKind::mean;
    /// Limits of the first bucket, the second and so on; the last one repeats. If given, they
    /// replace the two limits above.
    std::vector<std::size_t> bucket_caps_bytes = {};
    /// There is one bucket per dtype until the order in which gradients become ready is known.
    /// After the first iteration it is cut by that order. Off: cut at once, from the last parameter
    /// to the first. No effect with find_unused unless static_graph is on.
    bool rebuild_buckets = true;
    BufferSync buffer_sync = BufferSync::after_forward;
    /// Take rank 0's values at construction. Off: they must be equal on all ranks already.
    bool sync_at_start = true;
    /// When a guard ends, take the values of the last rank that trained.
    bool sync_at_end = true;
    /// What a joined rank keeps in its gradients.
    JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end;
    /// What a rank sends for a parameter that its pass does not use.
    UnusedGradients unused_gradients = UnusedGradients::zero;
    /// For debugging. Hashes each gradient at ready(i) and again after the backward pass, and
    /// throws ContractViolation with the name of a gradient that changed in between. Nothing is
    /// sent before that, so nothing overlaps. Gradients must be in host memory.
    bool verify_ready = false;
    /// Thread ranks may share the memory of values, as long as each has gradients of its own. Off: a
    /// ContractViolation when the model is made. Turn sync_at_start and sync_at_end off as well,
    /// because what is sent is written by all ranks.
    bool shares_values = false;
};

/// The options that the buckets of a model need.
[[nodiscard]] inline BucketOptions bucket_options(DataParallelOptions const& options) {
    return {
        .bucket_cap_bytes = options.bucket_cap_bytes,
        .first_bucket_bytes = options.first_bucket_bytes,
        .gradient_as_bucket_view = options.gradient_as_bucket_view,
        .find_unused = options.find_unused,
        .static_graph = options.static_graph,
        .bucket_caps_bytes = options.bucket_caps_bytes,
        .rebuild_buckets = options.rebuild_buckets,
        .joined_gradients = options.joined_gradients,
        .unused_gradients = options.unused_gradients,
    };
}

}} // namespace joinable::v0

// ---- joinable/communicator/model_table.hpp

/// @file
/// Finds ranks of one process that are about to train the same memory.

namespace joinable { inline namespace v0 { namespace detail {

/// The memory that one rank is about to train, and how texts name it.
struct TrainedMemory {
    struct Part {
        std::size_t parameter;
        bool is_gradient;
    };

    int rank = 0;
    std::uint64_t number = 0; ///< how many models the rank has made, this one included
    ParameterList parameters = {};
    std::vector<Part> parts = {};
    std::vector<AddressRange> ranges = {}; ///< of each part

    void add(Part part) {
        parts.push_back(part);
        ranges.push_back(AddressRange::of(view_of(parts.size() - 1), parts.size() - 1));
    }
    [[nodiscard]] AnyView view_of(std::size_t part) const {
        AnyParameter const& parameter = parameters[parts[part].parameter];
        return parts[part].is_gradient ? parameter.grad() : parameter.value();
    }
    /// "the gradient of parameter 3 (fc.weight)".
    [[nodiscard]] std::string text_of(std::size_t part) const {
        return (parts[part].is_gradient ? "the gradient of " : "the value of ") +
               describe_parameter(parameters, parts[part].parameter);
    }
};

/// One rank's access to the memory that the ranks of its process train, during the exchange in which
/// they agree on a model. A communicator whose ranks share a process has a member
/// `ModelTable* model_table()`, null if its ranks do not.
class ModelTable {
public:
    ModelTable() = default;
    ModelTable(ModelTable const&) = delete;
    ModelTable& operator=(ModelTable const&) = delete;

    /// Numbers the models of this rank. All ranks make the same ones.
    [[nodiscard]] std::uint64_t next() noexcept { return ++made_; }
    /// Enters what this rank trains; leave() follows. The last rank to enter sees all others.
    /// @throws ContractViolation  another rank trains some of it as well.
    virtual void enter(TrainedMemory const& memory) = 0;
    virtual void leave(TrainedMemory const& memory) noexcept = 0;

protected:
    ~ModelTable() = default;

private:
    std::uint64_t made_ = 0;
};

template <class Comm>
concept has_model_table = requires(Comm& comm) {
    { comm.model_table() } -> std::convertible_to<ModelTable*>;
};

/// The entry of a rank that makes a model, for as long as the exchange of the ranks lasts. Make it
/// on every rank, whatever fails there. Local.
class ModelEntry {
public:
    template <Communicator Comm>
    explicit ModelEntry(Comm& comm) {
        if constexpr (has_model_table<Comm>) {
            table_ = comm.model_table();
            memory_.rank = comm.rank();
            memory_.number = table_ == nullptr ? 0 : table_->next();
        }
    }
    ModelEntry(ModelEntry const&) = delete;
    ModelEntry& operator=(ModelEntry const&) = delete;
    ~ModelEntry() { leave(); }

    /// Enters the gradients of trained parameters and, unless ranks may share them, their values.
    /// @throws ContractViolation  another rank trains some of that memory as well.
    void enter(ParameterList const& parameters, bool shares_values) {
        if (table_ == nullptr) {
            return;
        }
        memory_.parameters = parameters;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            if (parameters[i].requires_grad()) {
                if (!shares_values) {
                    memory_.add({i, false});
                }
                memory_.add({i, true});
            }
        }
        is_entered_ = true;
        table_->enter(memory_);
    }
    /// The ranks have agreed or failed: memory may be freed and used again.
    void leave() noexcept {
        if (is_entered_) {
            is_entered_ = false;
            table_->leave(memory_);
        }
    }

private:
    ModelTable* table_ = nullptr;
    TrainedMemory memory_;
    bool is_entered_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/detail/scoped_flag.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Sets a flag for its lifetime, then restores the previous value.
class ScopedFlag {
public:
    ScopedFlag(bool& flag, bool value) noexcept
        : flag_{flag}, before_{std::exchange(flag, value)} {}
    ScopedFlag(ScopedFlag const&) = delete;
    ScopedFlag& operator=(ScopedFlag const&) = delete;
    ~ScopedFlag() { flag_ = before_; }

private:
    bool& flag_;
    bool before_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/averaging.hpp

namespace joinable { inline namespace v0 {

/// Keyword of a guard, for each DistributedDataParallel in it. Gradients are divided by the number
/// of all ranks (true, the default) or of the contributing ranks (Round::contributor_count()). It
/// has no effect if notices carry weights.
inline constexpr struct divide_by_initial_world_size_t
    : keyword<divide_by_initial_world_size_t, bool> {
    using keyword::operator=;
} divide_by_initial_world_size{};

namespace detail {

/// How gradients are averaged.
struct Averaging {
    GradientKind kind;
    bool divides_by_initial_world_size = true;

    /// The factor of a rank's gradients that makes their sum the average; 0 if the weights of all
    /// ranks sum to 0. Calls accept(f), which may throw, if the gradients of all ranks are multiplied
    /// by f, one over a sum of weights: on ranks that contribute nothing, too. Local in a guard.
    /// Outside a guard a weighted round sums the weights by `words`, which is collective.
    template <class Accept>
    [[nodiscard]] double
    factor(ControlCommunicator& words, Round const& round, Accept const& accept) const {
        double own = 1.0;
        double divisor = divides_by_initial_world_size ? words.size() : round.contributor_count();
        if (round.is_weighted()) {
            std::uint64_t total = round.weight_sum();
            if (!round.in_guard()) { // no roll call has summed the weights
                words.sum({&total, 1});
            }
            if (total == 0) {
                return 0.0;
            }
            own = kind == GradientKind::mean ? static_cast<double>(round.weight()) : 1.0;
            divisor = static_cast<double>(total);
            if (kind == GradientKind::sum) {
                accept(1.0 / divisor);
            }
        }
        return round.contributes() ? own / divisor : 0.0;
    }
};

} // namespace detail
}} // namespace joinable::v0

// ---- joinable/participant/detail/check_parameters.hpp

namespace joinable { inline namespace v0 { namespace detail {

void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
);

/// Refuses parameters without a value on `device`, parameters with elements at a null pointer, and
/// parameters whose values or gradients share memory: they would be averaged and stepped more than
/// once. Local.
/// Complexity: sorts the parameters; compares those whose address ranges overlap.
void check_parameters(ParameterList const& list, DeviceId device);

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/check_parameters.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstddef>
#include <utility>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
) {
    std::vector<AddressRange> ranges;
    for (std::size_t i = 0; i < list.size(); ++i) {
        ranges.push_back(AddressRange::of(view_of(list[i]), i));
    }
    auto const shared = find_shared(
        std::move(ranges),
        [&](std::size_t i) { return view_of(list[i]); },
        [](std::size_t, std::size_t) { return true; }
    );
    if (shared) {
        throw ContractViolation{
            to_text(what) + to_text(describe_parameter(list, shared->first)) + " and " +
            to_text(describe_parameter(list, shared->second)) +
            " share memory; list a shared parameter once, and give views of one storage as "
            "one parameter"
        };
    }
}

JOINABLE_DEFINITION void check_parameters(ParameterList const& list, DeviceId device) {
    for (std::size_t i = 0; i < list.size(); ++i) {
        check_value(list, i, device);
        if (list[i].requires_grad()) {
            check_gradient(list, i, list[i].grad());
        }
    }
    check_distinct(list, "", [](AnyParameter const& parameter) { return parameter.value(); });
    check_distinct(list, "the gradients of ", [](AnyParameter const& parameter) {
        return parameter.grad();
    });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/detail/compared_model.hpp

/// @file
/// The properties of a model that ranks compare: see agreement/agree.hpp.

namespace joinable { inline namespace v0 { namespace detail {

void agree_on(AgreementList& list, DataParallelOptions const& options);

/// Lists each parameter with its name, dtype, extents, strides and requires_grad. Returns the
/// counts as a text.
std::string agree_on(AgreementList& list, ParameterList const& parameters);

/// Lists each tensor with its dtype and extents.
void agree_on(AgreementList& list, TensorList const& tensors, std::string_view kind);

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/compared_model.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstddef>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void agree_on(AgreementList& list, DataParallelOptions const& options) {
    list.add("bucket_cap_bytes", options.bucket_cap_bytes);
    list.add("first_bucket_bytes", options.first_bucket_bytes);
    list.add("gradient_as_bucket_view", options.gradient_as_bucket_view);
    list.add("find_unused", options.find_unused);
    list.add("static_graph", options.static_graph);
    list.add("broadcast_buffers", options.broadcast_buffers);
    list.add("gradient_kind", options.gradient_kind == GradientKind::mean ? "mean" : "sum");
    list.add("bucket_caps_bytes", options.bucket_caps_bytes);
    list.add("rebuild_buckets", options.rebuild_buckets);
    bool const is_before = options.buffer_sync == BufferSync::before_forward;
    list.add("buffer_sync", is_before ? "before_forward" : "after_forward");
    list.add("sync_at_start", options.sync_at_start);
    list.add("sync_at_end", options.sync_at_end);
    constexpr std::string_view joined[] = {"zeroed_at_end", "kept", "untouched"};
    list.add("joined_gradients", joined[static_cast<std::size_t>(options.joined_gradients)]);
    bool const is_zero = options.unused_gradients == UnusedGradients::zero;
    list.add("unused_gradients", is_zero ? "zero" : "held");
    list.add("verify_ready", options.verify_ready);
    list.add("shares_values", options.shares_values);
}

JOINABLE_DEFINITION std::string agree_on(AgreementList& list, ParameterList const& parameters) {
    list.add("number of parameters", parameters.size());
    std::size_t elements = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        AnyView const value = parameters[i].value();
        elements += value.numel();
        std::string text = to_text(value);
        if (value.strides() != row_major_strides(value.extents())) {
            text += ", strides " + to_text(value.strides());
        }
        text += parameters[i].requires_grad() ? "" : ", no requires_grad";
        list.add(describe_parameter(parameters, i), text);
    }
    return concat(parameters.size(), " parameters of ", elements, " elements");
}

JOINABLE_DEFINITION void
agree_on(AgreementList& list, TensorList const& tensors, std::string_view kind) {
    list.add(concat("number of ", kind, "s"), tensors.size());
    std::size_t i = 0;
    for (AnyTensor const& tensor : tensors) {
        list.add(concat(kind, " ", i++), to_text(tensor.view()));
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/detail/listed_model.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// What parameters were when a participant listed them. Each training forward compares them with
/// what they are now. Local.
class ListedModel {
public:
    /// With `holds_values` false the engine does not hold the values between passes, so they are not
    /// compared.
    ListedModel(ParameterList parameters, bool holds_values);

    /// Complexity: a few nanoseconds for each parameter.
    /// @throws ContractViolation  a frozen parameter is trained now, or a value has another dtype,
    ///         other extents or another device. `participant` is its class, for texts.
    void require_same(std::string_view participant) const {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (!parameters_[i].is_as(listed_[i])) {
                require_same(i, participant);
            }
        }
    }

private:
    void require_same(std::size_t i, std::string_view participant) const;

    ParameterList parameters_;
    std::vector<ParameterState> listed_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/listed_model.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <string>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ListedModel::ListedModel(ParameterList parameters, bool holds_values)
    : parameters_{std::move(parameters)} {
    listed_.reserve(parameters_.size());
    for (AnyParameter const& parameter : parameters_) {
        AnyView const value = parameter.value();
        listed_.push_back(
            {value.extents(),
             value.device(),
             value.dtype(),
             holds_values && static_cast<bool>(value),
             parameter.requires_grad()}
        );
    }
}

JOINABLE_DEFINITION void
ListedModel::require_same(std::size_t i, std::string_view participant) const {
    ParameterState const& listed = listed_[i];
    std::string const what = describe_parameter(parameters_, i);
    std::string const made{participant};
    if (!listed.requires_grad && parameters_[i].requires_grad()) {
        throw ContractViolation{
            what + " requires a gradient now, but did not when the " + made +
            " was made, so it would not be averaged; make the " + made + " after unfreezing"
        };
    }
    AnyView const value = parameters_[i].value();
    if (!listed.has_value || !value) {
        return; // it may be frozen now: then it has no gradient, which the backward pass notices
    }
    bool const is_moved = value.device() != listed.device;
    if (!is_moved && value.dtype() == listed.dtype && value.extents() == listed.extents) {
        return;
    }
    auto const text = [&](DType dtype, Shape const& extents, DeviceId device) {
        return concat(name_of(dtype), " ", to_text(extents)) +
               (is_moved ? " on " + to_text(device) : std::string{});
    };
    throw ContractViolation{
        what + " is " + text(value.dtype(), value.extents(), value.device()) + " now, but was " +
        text(listed.dtype, listed.extents, listed.device) + " when the " + made +
        " was made; make the " + made +
        (value.extents() == listed.extents ? " after to()" : " after resizing")
    };
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/bucket/cleared.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Whether the engine has cleared all gradients: each is absent, or its bytes are zero. Reads until the first
/// byte that is not; copies gradients of a device to the host. Local.
[[nodiscard]] bool are_cleared(ParameterList const& parameters, Device& device);

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/cleared.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstddef>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

namespace cleared {

[[nodiscard]] inline bool are_zeros(std::byte const* bytes, std::size_t count) {
    return std::all_of(bytes, bytes + count, [](std::byte byte) { return byte == std::byte{}; });
}

/// Copies a gradient that is on a device or has gaps first.
[[nodiscard]] inline bool is_zero(AnyView const& gradient, Device& device) {
    std::size_t const bytes = gradient.numel() * size_of(gradient.dtype());
    if (bytes == 0) {
        return true;
    }
    if (is_on_host(device) && gradient.is_contiguous()) {
        return are_zeros(static_cast<std::byte const*>(gradient.data()), bytes);
    }
    Arena const dense = device.allocate(bytes, size_of(gradient.dtype()));
    Shape const& extents = gradient.extents();
    device.copy(
        gradient,
        {dense.data(), gradient.dtype(), extents, row_major_strides(extents), gradient.device()}
    );
    device.submit();
    std::vector<std::byte> on_host(bytes);
    device.download(dense.data(), on_host.data(), bytes);
    return are_zeros(on_host.data(), bytes);
}

} // namespace cleared

JOINABLE_DEFINITION bool are_cleared(ParameterList const& parameters, Device& device) {
    for (AnyParameter const& parameter : parameters) {
        AnyView const gradient = parameter.requires_grad() ? parameter.grad() : AnyView{};
        if (gradient && !cleared::is_zero(gradient, device)) {
            return false;
        }
    }
    return true;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/detail/hidden_rounds.hpp

namespace joinable { inline namespace v0 { namespace detail {

class HiddenRounds;

/// The communicator of collectives that a model issues within its passes, as seen by the participant that
/// runs the passes.
class HiddenCollectives {
public:
    HiddenCollectives(HiddenCollectives const&) = delete;
    HiddenCollectives& operator=(HiddenCollectives const&) = delete;

protected:
    HiddenCollectives() = default;
    inline ~HiddenCollectives();

    /// The rounds of the participant that it is attached to; null if there is none.
    [[nodiscard]] HiddenRounds* rounds() const noexcept { return rounds_; }

private:
    friend class HiddenRounds;

    /// The communicator that it was split from.
    [[nodiscard]] virtual void const* parent() const noexcept = 0;
    /// Collective over all ranks: joined ranks are in follow(). Ends a section of the passes.
    virtual void end_section(Round const& round) = 0;
    /// Collective. Called on a joined rank. Runs the collectives of the active ranks until a section of
    /// their passes ends.
    virtual void follow(Round const& round) = 0;

    HiddenRounds* rounds_ = nullptr;
};

/// The collectives that a participant's model issues in its passes. A round has one or two sections. The
/// second one begins where all ranks run a collective of the participant and wait for it. Joined ranks
/// follow each section step by step.
class HiddenRounds {
public:
    /// `state` is the participant's.
    explicit HiddenRounds(JoinState& state) noexcept : state_{state} {}
    HiddenRounds(HiddenRounds const&) = delete;
    HiddenRounds& operator=(HiddenRounds const&) = delete;
    ~HiddenRounds() {
        if (attached_ != nullptr) {
            attached_->rounds_ = nullptr;
        }
    }

    /// @throws ContractViolation  see Passes::attach_collectives.
    void attach(HiddenCollectives& collectives, void const* communicator) {
        char const* const why =
            collectives.parent() != communicator
                ? "attach_collectives() was given a shadowed() communicator of another communicator; "
                  "make it of the one that this participant has"
            : attached_ != nullptr || collectives.rounds_ != nullptr
                ? "a participant has one shadowed() communicator, which has one participant; give the "
                  "same one to all layers of the model"
                : nullptr;
        if (why != nullptr) {
            throw ContractViolation{why};
        }
        attached_ = &collectives;
        collectives.rounds_ = this;
    }

    [[nodiscard]] Session* session() const noexcept { return session_of(state_); }
    void agree_on(AgreementList& list) const {
        if (attached_ != nullptr) { // ranks that have not called it lack this item
            list.add("attach_collectives()", "called");
        }
    }
    /// The round of the pass that this rank runs, if it runs one.
    [[nodiscard]] std::optional<PendingRound>& pending() noexcept { return pending_; }
    /// Whether joined ranks follow. A round then lasts until its passes have ended.
    [[nodiscard]] bool are_followed() const noexcept {
        return attached_ != nullptr && session() != nullptr;
    }
    /// @throws ContractViolation  a rank without a pass cannot go on with the others.
    void require_pass(std::string_view verb) const {
        if (attached_ != nullptr) {
            throw ContractViolation{concat(
                verb,
                " cannot follow the collectives that other ranks run in their passes over a shadowed() "
                "communicator; let the exception leave the guard, or give the model an empty batch"
            )};
        }
    }

    // -- active ranks ----------------------------------------------------------------------------

    /// A pass begins; it may issue collectives.
    void begin(PendingRound const& pending) { pending_ = pending; }
    void end_section(Round const& round) {
        if (are_followed()) {
            attached_->end_section(round);
        }
    }
    /// The last pass of the round is over.
    void end(Round const& round) {
        pending_.reset();
        end_section(round);
    }
    /// Forgets the pass of a round that failed.
    void reset() noexcept { pending_.reset(); }

    // -- joined ranks ----------------------------------------------------------------------------

    void follow(Round const& round) {
        if (attached_ != nullptr) {
            attached_->follow(round);
        }
    }

private:
    friend HiddenCollectives;

    JoinState& state_;
    HiddenCollectives* attached_ = nullptr;
    std::optional<PendingRound> pending_; ///< in a pass
};

inline HiddenCollectives::~HiddenCollectives() {
    if (rounds_ != nullptr) {
        rounds_->attached_ = nullptr;
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/module_state.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// All of a model except its gradients, kept equal on all ranks. Parameters, buffers and attached
/// state are sent from one rank at the start and the end, buffers in every round that syncs.
template <Communicator Comm>
class ModuleState {
public:
    using BufferHook =
        std::function<void(Comm&, std::vector<AnyView> const& buffers, Round const&)>;

    /// Local. @throws ContractViolation  a buffer is missing or on another device.
    ModuleState(
        Comm& comm, ParameterList parameters, BufferList buffers, DataParallelOptions const& options
    )
        : comm_{comm}, parameters_{std::move(parameters)},
          has_buffers_{!(buffers.begin() == buffers.end())},
          buffers_{std::move(buffers), piece_bytes, "buffer", BufferMemory{comm}},
          options_{options} {}

    /// The script of a round that syncs, on active and shadowing ranks. Collective; only a hook may
    /// allocate.
    void sync_buffers(Round const& round) {
        if (!options_.broadcast_buffers) {
            return;
        }
        if (hook_) {
            hook_(comm_, buffers_.current_views(), round);
        } else {
            buffers_.run(comm_, round.buffer_source());
        }
    }

    /// Collective. Sends parameters, buffers and attached state of `root` to all ranks.
    void sync(int root) { plan_sync().run(comm_, root); }

    /// Local. Allocates everything that sync() needs, so that a rank without enough memory can
    /// report it before the others wait.
    [[nodiscard]] CoalescedBroadcast plan_sync() {
        std::vector<AnyView> views;
        for (AnyParameter const& parameter : parameters_) {
            views.push_back(parameter.value());
        }
        if (options_.broadcast_buffers) {
            auto const& buffers = buffers_.current_views();
            views.insert(views.end(), buffers.begin(), buffers.end());
        }
        auto const& state = attached_.views();
        views.insert(views.end(), state.begin(), state.end());
        TensorList list = tensor_list(std::move(views));
        return CoalescedBroadcast{std::move(list), piece_bytes, "tensor", BufferMemory{comm_}};
    }

    [[nodiscard]] DataParallelOptions const& options() const noexcept { return options_; }
    /// Whether buffers are sent before the forward pass; if not, before the backward pass.
    [[nodiscard]] bool syncs_before_forward() const noexcept {
        return options_.broadcast_buffers && options_.buffer_sync == BufferSync::before_forward;
    }
    /// Whether they are sent after it, so that ranks wait for each other there.
    [[nodiscard]] bool syncs_after_forward() const noexcept {
        return options_.broadcast_buffers && options_.buffer_sync == BufferSync::after_forward &&
               (hook_ != nullptr || has_buffers_);
    }

    /// Local. @throws ContractViolation  no broadcast would be replaced.
    void set_buffer_hook(BufferHook hook) {
        if (!options_.broadcast_buffers) {
            throw ContractViolation{
                "a buffer hook takes the place of the broadcast of buffers, which is off; turn "
                "broadcast_buffers on"
            };
        }
        hook_ = std::move(hook);
    }

    /// Collective. See DistributedDataParallel::attach_state.
    template <class... Ranges>
    void attach(Ranges&&... ranges) {
        std::optional<FixedTensors> all;
        std::optional<CoalescedBroadcast> broadcast;
        AgreementList compared;
        compared.begin_section("models differ: ");
        std::exception_ptr error;
        try {
            TensorList const list = tensor_list(std::forward<Ranges>(ranges)...);
            agree_on(compared, list, "state tensor");
            all.emplace(attached_).append({list, "state tensor", device_of(comm_).id()});
            broadcast.emplace(list, piece_bytes, "state tensor", BufferMemory{comm_});
        } catch (...) {
            error = std::current_exception();
        }
        ControlOver<Comm&> control{comm_};
        agree(control, compared, error);
        broadcast->run(comm_, 0);
        attached_ = std::move(*all);
    }

private:
    static constexpr std::size_t piece_bytes = std::size_t{250} << 20U;

    Comm& comm_;
    ParameterList parameters_;
    bool has_buffers_;
    CoalescedBroadcast buffers_;
    FixedTensors attached_{{}, "state tensor"};
    DataParallelOptions options_;
    BufferHook hook_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/ready_check.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// When marks reach the reducer, if gradients are checked.
enum class CheckedMarks : std::uint8_t {
    after_pass, ///< where a bucket in flight changes gradients itself
    at_once,    ///< where the reducer leaves gradients as they are, or releases them
};

/// Finds gradients that still change after their ready(i), see DataParallelOptions::verify_ready.
class ReadyCheck {
public:
    /// @throws ContractViolation  gradients are on a device, where the host cannot read them.
    ReadyCheck(ParameterList parameters, DeviceId device, CheckedMarks marks);

    void begin() noexcept { marks_.clear(); }
    /// Calls `mark_ready(i)`, now or in release().
    template <class F>
    void mark(std::size_t i, F const& mark_ready) {
        if (is_at_once_) {
            mark_ready(i);
        }
        marks_.push_back({i, hash_of(i)}); // of no gradient, if it was released
    }

    /// Calls `mark_ready(i)` for each mark that mark() has kept, in order. If a gradient has several
    /// marks (a static graph), the last one counts.
    /// @throws ContractViolation  a gradient has changed since it was marked, or was made anew.
    template <class F>
    void release(F const& mark_ready) {
        std::vector<bool> is_checked(parameters_.size());
        for (auto mark = marks_.rbegin(); mark != marks_.rend(); ++mark) {
            if (mark->i >= parameters_.size() || is_checked[mark->i]) {
                continue;
            }
            is_checked[mark->i] = true;
            std::uint64_t const now = hash_of(mark->i);
            bool const is_gone = is_at_once_ && now == no_gradient;
            if (now != mark->hash && !is_gone) {
                throw ContractViolation{concat(
                    "the gradient of ",
                    describe_parameter(parameters_, mark->i),
                    " changed after ready(",
                    mark->i,
                    "); call ready when nothing is added to it any more (libtorch: from a hook "
                    "after accumulation, not from register_hook)"
                )};
            }
        }
        for (std::size_t k = 0; !is_at_once_ && k < marks_.size(); ++k) {
            mark_ready(marks_[k].i);
        }
        marks_.clear();
    }

private:
    static constexpr std::uint64_t no_gradient = 0;

    struct Mark {
        std::size_t i;
        std::uint64_t hash;
    };

    /// The hash of the elements in logical order, because a gradient may move and may have gaps
    /// between its elements.
    [[nodiscard]] std::uint64_t hash_of(std::size_t i) const;
    static void add(Hash& hash, char const* data, AnyView const& view, std::size_t dimension);

    ParameterList parameters_;
    bool is_at_once_;
    std::vector<Mark> marks_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/ready_check.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <string_view>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
ReadyCheck::ReadyCheck(ParameterList parameters, DeviceId device, CheckedMarks marks)
    : parameters_{std::move(parameters)}, is_at_once_{marks == CheckedMarks::at_once} {
    if (device != DeviceId{}) {
        throw ContractViolation{concat(
            "verify_ready reads gradients from the host, but this "
            "communicator's are on ",
            to_text(device),
            "; leave it off"
        )};
    }
}

JOINABLE_DEFINITION std::uint64_t ReadyCheck::hash_of(std::size_t i) const {
    AnyView const gradient = i < parameters_.size() ? parameters_[i].grad() : AnyView{};
    if (!gradient || !has_memory(gradient)) {
        return no_gradient; // the reducer reports it where there has to be one
    }
    Hash hash;
    add(hash, static_cast<char const*>(gradient.data()), gradient, 0);
    return hash.value();
}

JOINABLE_DEFINITION void
ReadyCheck::add(Hash& hash, char const* data, AnyView const& view, std::size_t dimension) {
    std::size_t const element = size_of(view.dtype());
    if (dimension == view.extents().size()) {
        hash.add(std::string_view{data, element});
        return;
    }
    for (std::size_t i = 0; i < view.extents()[dimension]; ++i) {
        add(hash, data + i * view.strides()[dimension] * element, view, dimension + 1);
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/passes.hpp

namespace joinable { inline namespace v0 {

/// The passes of a model whose gradients are averaged: the verbs that DistributedDataParallel and
/// ShardedDataParallel share. `GradientReducer` has the interface of Reducer and averages gradients
/// as they become ready.
template <Communicator Comm, class GradientReducer>
class Passes {
public:
    /// Attaches tensors of an optimizer's state (momentum, step counts). `ranges` are ranges that
    /// joinable::buffers() takes. All ranks agree on count, extents and dtypes and take rank 0's
    /// values. When a guard ends, the tensors are sent with the model. Collective, outside a guard.
    /// @throws ContractViolation  called in a guard, or a tensor is missing; then the others throw
    ///         PeerFailed.
    /// @throws Mismatch  the text names the first tensor that differs.
    template <class... Ranges>
    void attach_state(Ranges&&... ranges) {
        require_outside("attach_state()");
        module_->attach(std::forward<Ranges>(ranges)...);
    }

    /// Replaces the broadcast of buffers by `hook(comm, buffers, round)` in each round that syncs.
    /// On joined ranks round.is_shadow() is true, and the hook must issue the same collectives
    /// (with zeros, if it sums). Its exceptions must leave the guard, because skip() would call it
    /// again. A null function restores the broadcast. Local, the same on every rank, outside a
    /// guard.
    /// @throws ContractViolation  in a guard or a round, or broadcast_buffers is off.
    void set_buffer_hook(
        std::function<void(Comm&, std::vector<AnyView> const& buffers, Round const&)> hook
    ) {
        require_outside("set_buffer_hook()");
        module_->set_buffer_hook(std::move(hook));
    }

    /// Attaches the result of shadowed() for this participant's communicator. In guards, joined ranks then
    /// take part in the collectives that the model runs over it in its passes, until one of the two objects is
    /// destroyed. As long as it is attached, skip() is refused, and in a guard each forward pass of a training
    /// round needs its backward pass. See ShadowedCommunicator. Local, the same on every rank, outside a guard.
    /// @throws ContractViolation  called in a guard or a round; `collectives` is of another communicator or
    ///         attached already, or another one is; or Sharding::parameters, whose passes gather values.
    void attach_collectives(detail::HiddenCollectives& collectives) {
        require_outside("attach_collectives()");
        if (gathers_values()) {
            throw ContractViolation{
                "with Sharding::parameters joined ranks follow only the gathering of values, not the "
                "collectives of a model; use another sharding"
            };
        }
        hidden_.attach(collectives, &comm_);
    }
    /// Explains a communicator that shadowed() has not made.
    template <class Other>
        requires(!std::derived_from<Other, detail::HiddenCollectives>)
    void attach_collectives(Other const&) {
        static_assert(
            std::derived_from<Other, detail::HiddenCollectives>,
            "attach_collectives: give it the result of joinable::shadowed(comm), which has a name and lives as "
            "long as the model"
        );
    }

    /// Announces a round and runs the forward pass, which overlaps with the roll call. Returns what
    /// `pass` returns. Collective over the active ranks. If `pass` throws, the round is open for
    /// the others: continue with skip().
    /// @throws ContractViolation  in training, a parameter was unfrozen, or its value has another
    ///         dtype, other extents or another device than when it was listed. Outside an enabled
    ///         guard this aborts the communicator.
    template <class F>
    decltype(auto) forward(F&& pass, RoundNotice const& notice = {}) {
        static_assert(
            takes<F>(),
            "forward: the pass is a callable, as in ddp.forward([&] { loss = model.forward(batch); }); a value "
            "was given, or a callable of other arguments"
        );
        begin_forward(notice);
        try {
            return guarded([&]() -> decltype(auto) {
                ForwardEnd const end{*this};
                return run(std::forward<F>(pass));
            });
        } catch (...) {
            if (stage_ == Stage::idle) {
                stage_ = Stage::failed;
            }
            throw;
        }
    }

    /// Explains an argument in the place of a notice that is none.
    template <class F, class Other>
        requires(!std::convertible_to<Other, RoundNotice>)
    void forward(F&&, Other const&) {
        static_assert(
            std::convertible_to<Other, RoundNotice>,
            "forward: after the pass comes a RoundNotice, as in ddp.forward(pass, {.weight = 32})"
        );
    }

    /// Runs the backward pass, averages gradients as they become ready, and waits for all of them.
    /// `pass` takes a callable `ready(i)`; `unused` is as for prepare_for_backward(). In a round
    /// that does not sync it only runs the pass, and gradients accumulate.
    template <class F, class Unused = std::initializer_list<std::size_t>>
    void backward(F&& pass, Unused const& unused = {}) {
        detail::Ready const ready{[this](std::size_t i) { mark_ready(i); }};
        constexpr bool takes_ready = takes<F, decltype(ready)>();
        static_assert(
            takes_ready,
            "backward: the pass takes a callable, as in ddp.backward([&](auto ready) { ... }), and calls ready(i) "
            "when gradient i is final"
        );
        if constexpr (takes_ready) {
            prepare_for_backward(unused);
            guarded([&] { run(std::forward<F>(pass), ready); });
            finalize_backward();
        }
    }

    /// Announces a round. Collective over the active ranks. Does not block in a round that syncs,
    /// except with EndPolicy::throw_early. The opener of the round says whether it syncs: with
    /// next() and iterate() by the notice given there, otherwise by this notice. A round inside
    /// no_sync() never syncs.
    /// @throws ContractViolation  the previous forward had no backward; see announce_round.
    void prepare_for_forward(RoundNotice notice = {}) {
        guarded([&] {
            if (gathers_values()) {
                throw ContractViolation{
                    "with Sharding::parameters values are there while a pass uses them; call forward(pass) and "
                    "backward(pass)"
                };
            }
            begin_forward(notice);
            if (stage_ == Stage::idle) {
                ranges_.end_passes(); // no call marks the end of an evaluation
                if (hidden_.are_followed()) {
                    throw ContractViolation{
                        "joined ranks follow the collectives of an evaluation until it ends; call forward(pass)"
                    };
                }
            }
        });
    }

    /// Blocks until all ranks have opened the round. `unused` names the parameters that the
    /// backward pass gives no gradient: a range of indices or a predicate over them, see
    /// DataParallelOptions::find_unused. See PendingRound::wait for the errors.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(Unused const& unused = {}) {
        guarded([&] {
            ranges_.end_passes();
            forget_if_cleared();
            window().stop_looking(); // zeros from here on are gradients
            if (stage_ == Stage::unsynced) {
                has_accumulated_ = true;
                if constexpr (gathers) {
                    reducer_->begin_accumulating();
                }
                ranges_.open_backward(reducer_->timeline());
                return;
            }
            if (stage_ != Stage::forward) {
                throw ContractViolation{"a backward pass needs a forward pass before it"};
            }
            begin_reduction();
            if (ready_check_) {
                ready_check_->begin();
            }
            double const factor = factor_of(round_);
            stage_ = Stage::backward; // skip() can follow if `unused` throws
            reducer_->prepare_for_backward(factor, unused, round_.buffer_source());
            ranges_.open_backward(reducer_->timeline());
        });
    }

    /// See Reducer::mark_ready. In a round that does not sync the gradient counts as accumulated,
    /// and the next round that syncs reduces it.
    void mark_ready(std::size_t i) {
        guarded([&] {
            if (stage_ == Stage::unsynced) {
                has_accumulated_ = true;
                reducer_->mark_accumulated(i);
            } else if (ready_check_) {
                ready_check_->mark(i, [this](std::size_t k) { reducer_->mark_ready(k); });
            } else {
                reducer_->mark_ready(i);
            }
        });
    }

    /// See Reducer::finalize_backward. In a round that does not sync it ends the backward pass.
    void finalize_backward() {
        guarded([&] {
            ranges_.end_passes();
            if (stage_ == Stage::unsynced) {
                end_unsynced(true);
                stage_ = Stage::idle;
                round_range_.reset();
            } else {
                if (ready_check_) {
                    ready_check_->release([this](std::size_t i) { reducer_->mark_ready(i); });
                }
                hidden_.end(round_);
                reducer_->finalize_backward();
                end_reduction();
            }
        });
    }

    /// Rounds that open during the lifetime of the result do not sync: gradients accumulate. With
    /// next() and iterate(), use {.will_sync = false} there instead. The same on all ranks. Local.
    [[nodiscard("keep what no_sync() returns: rounds do not sync while it lives")]] auto
    no_sync() noexcept {
        return detail::ScopedFlag{is_inside_no_sync_, true};
    }

    /// Forgets what this rank accumulated since the last round that synced, because its gradients were cleared.
    /// The next average counts neither. Inside a guard that is not enabled, and outside guards. Local, between
    /// rounds.
    ///
    /// It is seldom needed: where a guard begins, and until the first backward pass after a guard has begun or ended,
    /// the participant looks whether all gradients are absent or zeros, and forgets the window then.
    /// @throws ContractViolation  inside an enabled guard, or a round is open. Nothing was changed.
    void discard_window() {
        require_outside("discard_window()");
        forget_window();
    }

    /// Runs a round without this rank's batch, because the batch failed (out of memory, a bad
    /// sample). The round continues on all ranks. Call it instead of forward(), or after forward()
    /// or backward() threw. The optimizer steps as usual.
    ///
    /// | called                              | this rank's weight | its gradients               |
    /// |-------------------------------------|--------------------|-----------------------------|
    /// | before the round is opened, by      | 0                  | what it accumulated before  |
    /// | forward(), next() or iterate()      |                    |                             |
    /// | then, until its first bucket is sent| as announced       | zeros                       |
    /// | later                               |                    | ContractViolation: too late |
    ///
    /// In a round that does not sync (before its backward pass has ended) it ends the round and undoes nothing.
    /// After an evaluation whose forward() threw it skips the next batch, as forward() would run it; but it ends the
    /// evaluation where next() or iterate() opened it and no further round, and where passes communicate. If the
    /// weights sum to 0, because all ranks skip, the average is zeros: see Round::contributor_count. Outside a guard,
    /// and in one that is not enabled, call `skip({.weight = 0})` if the others give a weight.
    /// With a shadowed() communicator it is a ContractViolation, because others wait for this rank
    /// within their passes. Collective: blocks until the averages are written, if the round syncs.
    void skip(RoundNotice notice = {}) {
        guarded([&] {
            require_stepped();
            hidden_.require_pass("skip()");
            if constexpr (gathers) {
                reducer_->require_let_go(); // before any collective, so skip() can be called again
            }
            detail::forget_failure(*this); // the failure of the batch: peers need not learn of it
            ranges_.end_passes();
            auto const* const session = detail::session_of(state_);
            if (stage_ == Stage::failed && !is_last_evaluation_open(session)) {
                stage_ = Stage::idle; // as for forward()
            }
            if (stage_ == Stage::idle && session != nullptr && session->has_announced_batch()) {
                open_round({}); // the batch failed after next() announced it
            } else if (stage_ == Stage::idle) {
                notice.skips = true;
                open_round(notice);
                if (stage_ == Stage::forward) {
                    begin_reduction();
                    contribute_without_pass(round_);
                    end_reduction();
                }
            }
            if (stage_ == Stage::forward) {
                begin_reduction();
                (void)factor_of(round_); // the others may sum weights
                reducer_->contribute_zeros(round_.buffer_source());
                end_reduction();
            } else if (stage_ == Stage::backward) {
                reducer_->contribute_nothing();
                reducer_->finalize_backward();
                end_reduction();
            }
            window().stop_looking();
            if (stage_ != Stage::reduced) {
                end_unsynced(round_.phase() == Phase::train);
                stage_ = Stage::idle;
            }
            round_range_.reset();
        });
    }

    /// Explains an argument that is no notice.
    template <class Other>
        requires(!std::convertible_to<Other, RoundNotice>)
    void skip(Other const&) {
        static_assert(
            std::convertible_to<Other, RoundNotice>,
            "skip: it takes no argument or a RoundNotice, as in ddp.skip({.weight = 0})"
        );
    }

    using join_keywords = keywords<divide_by_initial_world_size_t>;
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }

    /// For guards: before they begin.
    void forget_cleared() {
        if (detail::session_of(state_) == nullptr && !window().window().is_empty() &&
            are_cleared()) {
            forget_window();
        }
    }
    /// For guards: joined ranks then keep what they accumulated.
    [[nodiscard]] bool leaves_joined_untouched() const noexcept {
        return module_->options().joined_gradients == JoinedGradients::untouched;
    }

protected:
    friend GradientReducer;

    /// Whether `GradientReducer` may gather values for passes, as detail::ShardedReduction does. It
    /// then also passes `use` to them.
    static constexpr bool gathers = requires(GradientReducer& reducer) { reducer.begin_forward(); };

    /// Whether a pass takes these arguments.
    template <class F, class... Args>
    [[nodiscard]] static consteval bool takes() {
        if constexpr (gathers) {
            return GradientReducer::template takes<Passes, F, Args...>();
        } else {
            return std::invocable<F, Args...>;
        }
    }
    template <class F, class... Args>
    decltype(auto) run(F&& pass, Args const&... args) {
        if constexpr (gathers) {
            return GradientReducer::run(*this, pass, args...);
        } else {
            return std::forward<F>(pass)(args...);
        }
    }
    [[nodiscard]] bool gathers_values() const noexcept {
        if constexpr (gathers) {
            return reducer_->gathers_values();
        }
        return false;
    }

    /// `state` is the participant's. With `steps` the derived class calls end_round() after its
    /// step; otherwise the round ends with the reduction.
    Passes(Comm& comm, JoinState& state, GradientKind kind, bool steps) noexcept
        : comm_{comm}, averaging_{kind}, words_{comm}, hidden_{state}, state_{state},
          steps_{steps} {}
    Passes(Passes const&) = delete;
    Passes& operator=(Passes const&) = delete;
    ~Passes() = default;

    /// The stage of the open round.
    /// - idle: no round is open, or it has no gradients
    /// - forward: the forward pass of a round that syncs
    /// - backward: its backward pass
    /// - reduced: its step, if this class steps
    /// - unsynced: all of a round that does not sync
    /// - failed: an evaluation that threw
    enum class Stage : std::uint8_t { idle, forward, backward, reduced, unsynced, failed };

    using Times = std::remove_reference_t<decltype(std::declval<GradientReducer&>().timeline())>;
    using RoundRange = decltype(std::declval<Times&>().round(false));

    void require_stepped() const {
        if (stage_ == Stage::reduced) {
            throw ContractViolation{
                "the previous round has not been stepped; call step() after each backward pass that syncs, and "
                "after skip()"
            };
        }
    }
    void require_outside(std::string_view verb) const {
        bool const is_over = // an evaluation that failed
            stage_ == Stage::failed && !gathers_values() && !hidden_.are_followed();
        if ((stage_ != Stage::idle && !is_over) || detail::session_of(state_) != nullptr) {
            throw ContractViolation{detail::concat(
                verb, " was called in a guard or in a round; call it before, on every rank"
            )};
        }
        detail::require_listed(state_, comm_, verb);
    }

    void begin_forward(RoundNotice notice) {
        guarded([&] {
            // Outside a guard, a forward pass whose outputs are not used announced nothing.
            bool const is_open = stage_ == Stage::forward && detail::session_of(state_) != nullptr;
            require_stepped();
            bool const has_failed = stage_ == Stage::failed;
            if (gathers_values() && (stage_ == Stage::unsynced || has_failed)) {
                throw ContractViolation{
                    "the passes of the previous round have not ended, and all ranks gather values in them; "
                    "call backward(), or skip() after a failure"
                };
            }
            if (hidden_.are_followed() && (stage_ == Stage::unsynced || has_failed)) {
                throw ContractViolation{
                    "the passes of the previous round have not ended, and joined ranks follow collectives in "
                    "them; call backward(), or announce a forward pass that has no backward pass with {.phase = "
                    "Phase::evaluate}"
                };
            }
            if (is_open || stage_ == Stage::backward) {
                throw ContractViolation{
                    "the previous forward pass had no backward pass; announce such a round with {.will_sync "
                    "= false} or {.phase = Phase::evaluate}, and call skip() after a pass that failed"
                };
            }
            check_listed(notice);
            open_round(notice);
            ranges_.open_forward(reducer_->timeline());
        });
    }
    /// Before the round is announced, so that the failure of a rank is one between rounds. Ranks
    /// outside an enabled guard have no roll call that tells the others.
    void check_listed(RoundNotice const& notice) {
        auto const* const session = detail::session_of(state_);
        bool const is_open = session != nullptr && session->has_announced_batch();
        if ((is_open ? session->round().phase() : notice.phase) != Phase::train) {
            return;
        }
        auto const compare = [&] { listed_->require_same(name_in_texts()); };
        session != nullptr ? compare() : detail::abort_if_throws(comm_, compare);
    }
    [[nodiscard]] std::string_view name_in_texts() const noexcept {
        return steps_ ? "ShardedDataParallel" : "DistributedDataParallel";
    }
    void open_round(RoundNotice notice) {
        notice.will_sync = notice.will_sync && !is_inside_no_sync_;
        if (gathers_values() || (notice.will_sync && notice.phase == Phase::train)) {
            detail::require_listed(state_, comm_, name_in_texts());
        }
        ranges_.end_all();
        if (notice.phase == Phase::train) {
            forget_if_cleared();
            round_range_.reset();
            static_cast<void>(round_range_.emplace(reducer_->timeline().round(false)));
        }
        pending_ = PendingRound{state_, comm_.size(), notice, detail::WindowEnd::reduction};
        ranges_.announce(reducer_->timeline(), pending_.is_answered());
        bool syncs = pending_.will_sync();
        hidden_.begin(pending_);
        bool const holds = gathers_values() || hidden_.are_followed();
        if (!syncs || gathers_values() || module_->syncs_before_forward() ||
            pending_.is_answered()) {
            hear_round();
            syncs = round_.will_sync();
            if (!syncs && !holds) {
                round_.done(); // nothing is reduced, so the part ends here
            } else {
                round_.hold(); // no other participant communicates until the gradients are reduced
                if (syncs && module_->syncs_before_forward()) {
                    module_->sync_buffers(round_);
                }
            }
        }
        stage_ = syncs                            ? Stage::forward
                 : round_.phase() == Phase::train ? Stage::unsynced
                                                  : Stage::idle;
    }

    /// Whether skip() belongs to the evaluation that failed.
    [[nodiscard]] bool is_last_evaluation_open(detail::Session const* session) const noexcept {
        bool const is_of_loop = session != nullptr && session->loop_opens_rounds() &&
                                session->round().number() == round_.number();
        return gathers_values() || hidden_.are_followed() || is_of_loop;
    }
    void hear_round() {
        round_ = pending_.wait();
        ranges_.hear(reducer_->timeline(), round_);
    }
    void begin_reduction() {
        hear_round();
        round_.hold();
        if (meets_between_passes()) {
            hidden_.end_section(round_); // joined ranks come there
        }
        prepare_reduction(round_);
    }
    /// Whether ranks wait for each other between the passes.
    [[nodiscard]] bool meets_between_passes() const noexcept {
        bool meets = module_->syncs_after_forward();
        if constexpr (gathers) {
            meets = meets || reducer_->meets_between_passes();
        }
        return meets;
    }
    /// By which all ranks sum a few words: the guard's control communicator, which no gradients
    /// delay, and outside a guard the communicator of the gradients.
    [[nodiscard]] detail::ControlCommunicator& words() noexcept {
        auto const* const session = detail::session_of(state_);
        return session != nullptr ? session->words() : words_;
    }
    /// The work between the passes, on training and on shadowing ranks.
    void prepare_reduction(Round const& round) {
        reducer_->send_words_by(words());
        if constexpr (gathers) {
            reducer_->reduces_after_pass(
                hidden_.are_followed() && round.active_count() < comm_.size()
            );
            reducer_->finish_forward();
            // If it refuses, no message was sent, so skip() can follow.
            reducer_->begin_round(round);
        }
        if (!module_->syncs_before_forward()) {
            module_->sync_buffers(round);
        }
    }
    void end_reduction() {
        stage_ = Stage::reduced;
        has_accumulated_ = false;
        window().end();
        round_range_.reset();
        if (!steps_) {
            end_round();
        }
    }
    void end_round() {
        stage_ = Stage::idle;
        round_.done();
    }
    /// A round that reduces nothing was held if its passes communicate.
    void end_unsynced([[maybe_unused]] bool trains) {
        if constexpr (gathers) {
            if (reducer_->gathers_values()) {
                reducer_->finish_passes(trains);
                round_.done();
            }
        }
        hidden_.end(round_);
        if (hidden_.are_followed()) {
            round_.done();
        }
    }
    /// Ends a forward pass, and the round too if the pass returned and nothing follows.
    struct ForwardEnd {
        Passes& passes;
        detail::Unwinding unwinding{};

        explicit ForwardEnd(Passes& of) : passes{of} {}
        ForwardEnd(ForwardEnd const&) = delete;
        ForwardEnd& operator=(ForwardEnd const&) = delete;
        ~ForwardEnd() noexcept(false) {
            passes.ranges_.end_passes();
            if (unwinding.has_begun()) {
                return;
            }
            if constexpr (gathers) {
                passes.reducer_->finish_forward();
            }
            if (passes.stage_ == Stage::idle) { // an evaluation
                passes.end_unsynced(false);
            }
        }
    };
    /// Ends the timeline ranges of a round that failed.
    void end_ranges() noexcept {
        if (reducer_) {
            reducer_->end_ranges();
        }
        ranges_.end_all();
        round_range_.reset();
    }

    /// @throws ContractViolation  on all ranks: see Reducer::check_factor.
    [[nodiscard]] double factor_of(Round const& round) {
        return averaging_.factor(words(), round, [&](double factor) {
            reducer_->check_factor(factor);
        });
    }

    /// The reduction of a rank that runs no pass, because it has joined or skips. It may hold
    /// gradients of earlier rounds.
    void contribute_without_pass(Round const& round) {
        double const factor = factor_of(round);
        bool const sends_accumulated = has_accumulated_ && round.contributes();
        if (!round.is_shadow() || !leaves_joined_untouched()) {
            has_accumulated_ = false;
        }
        if (sends_accumulated) {
            reducer_->contribute_accumulated(factor, round.buffer_source(), round.is_shadow());
        } else {
            reducer_->contribute_zeros(round.buffer_source(), round.is_shadow());
        }
    }

    [[nodiscard]] detail::WindowOf window() const noexcept { return detail::WindowOf{state_}; }
    [[nodiscard]] bool are_cleared() const {
        return detail::are_cleared(reducer_->parameters(), detail::device_of(comm_));
    }
    /// Both halves: how much was accumulated, and in which gradients.
    void forget_window() {
        bool const is_counted = stage_ == Stage::unsynced; // this round
        window().clear(is_counted);
        has_accumulated_ = false;
        reducer_->discard_window();
    }
    /// Before a round is announced, and before its backward pass. A forward pass whose backward pass is yet to come
    /// has a weight, but no gradients, so zeros do not tell that these were cleared.
    /// @throws ContractViolation  ranks have been told of the window's weight.
    void forget_if_cleared() {
        if (!window().may_be_cleared() || !reducer_->holds_accumulated() || !are_cleared()) {
            return;
        }
        detail::Window const before = window().window();
        forget_window();
        if (stage_ == Stage::forward) {
            pending_.forget(before); // outside a guard
        }
    }

    void begin_guard() {
        stage_ = Stage::idle; // discards what was left open
        hidden_.reset();
        if constexpr (gathers) {
            reducer_->begin_guard();
        }
    }
    /// On every path out of a guard. Runs no collective and does not wait.
    void end_guard() noexcept {
        stage_ = Stage::idle;
        hidden_.reset();
        reducer_->forget_words();
        try {
            reducer_->end_guard();
        } catch (...
        ) { // NOLINT(bugprone-empty-catch): another exception may be in flight, or a device is lost
        }
    }
    void sync_at_end(JoinResult const& result) {
        if (module_->options().sync_at_end) {
            module_->sync(result.authoritative_rank);
        }
    }
    /// Runs on joined ranks in place of the passes of a round that syncs.
    void shadow(Round const& round) {
        if (module_->syncs_before_forward()) {
            module_->sync_buffers(round);
        }
        if (meets_between_passes()) {
            hidden_.follow(round);
        }
        prepare_reduction(round);
        hidden_.follow(round);
        contribute_without_pass(round);
    }

    template <class F>
    decltype(auto) guarded(F&& verb) {
        try {
            return std::forward<F>(verb)();
        } catch (...) {
            end_ranges();
            record_failure(*this, {});
            throw;
        }
    }

    Comm& comm_;
    detail::Averaging averaging_;
    detail::ControlOver<Comm&> words_;       ///< outside guards
    std::optional<GradientReducer> reducer_; ///< set by the derived class, like the next one
    std::optional<detail::ModuleState<Comm>> module_;
    std::optional<detail::ListedModel> listed_;
    std::optional<detail::ReadyCheck> ready_check_; ///< with verify_ready
    detail::HiddenRounds hidden_;                   ///< collectives of the model
    Round round_;
    Stage stage_ = Stage::idle;

private:
    JoinState& state_;
    PendingRound pending_;
    std::optional<RoundRange> round_range_; ///< during an open training round of this rank
    detail::PassRanges<Times> ranges_;      ///< inside the round
    bool steps_;
    bool is_inside_no_sync_ = false;
    bool has_accumulated_ = false; ///< gradients, since the last round that synced
};

}} // namespace joinable::v0

// ---- joinable/participant/data_parallel.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class T, class Comm, class Reduction>
concept describes_model =
    std::convertible_to<T, BufferList> || std::convertible_to<T, DataParallelOptions> ||
    (std::convertible_to<T, Reduction> && BucketReduction<Reduction, Comm>);

/// The parameters of a model, or why they could not be listed.
struct ListedParameters {
    ParameterList list;
    std::exception_ptr error;
};
template <class Parameters>
ListedParameters listed(Parameters&& parameters) {
    ListedParameters result;
    try {
        result.list = joinable::parameters(std::forward<Parameters>(parameters));
    } catch (...) {
        result.error = std::current_exception();
    }
    return result;
}

/// Checks the communicator before a base class does.
template <class Comm, class Reduction, class Times>
struct PassesOver {
    static_assert(models_communicator<Comm>());
    static_assert(
        !Timeline<Reduction>,
        "DistributedDataParallel: a timeline is the third template argument, as in "
        "DistributedDataParallel<Comm, AllReduce, TraceTimeline>"
    );
    using type = Passes<Comm, Reducer<Comm, Reduction, Times>>;
};

} // namespace detail

/// Keeps the replicas of a model equal. Parameters start with rank 0's values, and gradients are
/// averaged while the backward pass runs. In a guard joined ranks shadow and receive the same
/// averages.
///
/// @code
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// ddp.forward([&] { loss = model.forward(batch); }, {.weight = batch.size()});
/// ddp.backward([&](auto ready) { model.backward(ready); }); // ready(i): gradient i is final
/// @endcode
///
/// An engine with its own hooks calls the verbs: prepare_for_forward, prepare_for_backward,
/// mark_ready, finalize_backward. The average is over the initial world, over the active ranks
/// (divide_by_initial_world_size = false), or by weight if notices carry one. `Reduction` defines
/// how a bucket travels, see BucketReduction. `Times` is notified when rounds and buckets begin and
/// end.
///
/// Zero gradients before the pass or after the step. A joined rank runs neither. Its gradients hold
/// the averages of the others' rounds until the guard ends, and are then zeroed, so that its first
/// pass in the next guard starts from zeros (DataParallelOptions::joined_gradients). If the body of
/// a Step zeros gradients after the step, it does so on joined ranks as well.
template <class Comm, class Reduction = AllReduce, Timeline Times = NoTimeline>
class DistributedDataParallel : public detail::PassesOver<Comm, Reduction, Times>::type {
    using Base = typename detail::PassesOver<Comm, Reduction, Times>::type;

public:
    /// Collective. `parameters` is a range that joinable::parameters() takes, or its result;
    /// `buffers` is the result of joinable::buffers(). All ranks agree on counts, extents, dtypes
    /// and options, then take rank 0's values.
    /// @throws ContractViolation  Reducer refuses the arguments, a buffer is missing or on another
    ///         device, or thread ranks train the same memory; the other ranks throw PeerFailed, as
    ///         after any other local failure, such as std::bad_alloc.
    /// @throws Mismatch  ranks have different options or models; the text names the first option,
    ///         parameter or buffer that differs, with both values.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        BufferList buffers,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : DistributedDataParallel{
              detail::listed(std::forward<Parameters>(parameters)),
              comm,
              std::move(buffers),
              options,
              std::move(reduction)
          } {}

    /// A model without buffers.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              options,
              std::move(reduction)
          } {}
    /// With default options. The type is deduced, so that {} is never taken as a reduction.
    template <class Parameters, class R, std::enable_if_t<std::is_same_v<R, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, BufferList buffers, R reduction)
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              std::move(buffers),
              DataParallelOptions{},
              std::move(reduction)
          } {}
    template <class Parameters, class R, std::enable_if_t<std::is_same_v<R, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, R reduction)
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              DataParallelOptions{},
              std::move(reduction)
          } {}

    /// Explains an argument in the place of buffers or options that is neither.
    template <
        class Parameters,
        class Other,
        class... Rest,
        // No requires clause: clang 14 ignores it in the implicit deduction guide.
        std::enable_if_t<!detail::describes_model<Other, Comm, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, Other&&, Rest&&...)
        : DistributedDataParallel{comm, std::forward<Parameters>(parameters)} {
        static_assert(
            detail::describes_model<Other, Comm, Reduction>,
            "DistributedDataParallel: after the parameters come buffers(ranges...), if the model "
            "has any, then options in braces with the names and the order of DataParallelOptions"
        );
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return reducer_->buckets();
    }
    /// Whether they will be cut anew, by the order in which gradients became ready. Local.
    [[nodiscard]] bool is_rebuild_due() const noexcept { return reducer_->is_rebuild_due(); }
    [[nodiscard]] DataParallelOptions const& options() const noexcept { return module_->options(); }
    [[nodiscard]] Reduction& reduction() noexcept { return reducer_->reduction(); }
    [[nodiscard]] Times& timeline() noexcept { return reducer_->timeline(); }

    /// Runs on joined ranks: the same buckets with zeros, and the averages into their gradients.
    class Hook {
    public:
        using label = labels::gradients;
        static constexpr bool gives_notice = true;

        Hook(DistributedDataParallel& ddp, bool divides_by_initial_world_size) noexcept
            : ddp_{ddp},
              divides_{
                  ddp.averaging_.divides_by_initial_world_size, divides_by_initial_world_size
              } {
            ddp.begin_guard();
        }
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;
        /// An iteration may be open, if an exception ends the guard.
        ~Hook() { ddp_.end_guard(); }

        void main_hook(Round const& round) {
            detail::PassRanges<Times>::note_wait(ddp_.timeline(), round);
            if (round.phase() != Phase::train) {
                ddp_.hidden_.follow(round);
                return;
            }
            [[maybe_unused]] auto const range = ddp_.timeline().round(true);
            try {
                if (round.will_sync()) {
                    ddp_.shadow(round);
                } else {
                    ddp_.hidden_.follow(round);
                }
            } catch (...) {
                ddp_.end_ranges();
                throw;
            }
        }
        void post_hook(JoinResult const& result) { ddp_.sync_at_end(result); }

    private:
        DistributedDataParallel& ddp_;
        detail::ScopedFlag divides_; ///< set for the guard
    };

    using typename Base::join_keywords;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, args.get(divide_by_initial_world_size, true)};
    }
    [[nodiscard]] std::string_view join_name() const noexcept { return "DistributedDataParallel"; }
    static constexpr std::string_view join_verb = "forward() or skip()";
    /// Lists the options and the model. Models whose parameters are listed in another order differ.
    void agree_on(AgreementList& list) const {
        detail::agree_on(list, module_->options());
        list.add("reduction", Reduction::name);
        list.add("model", model_);
        hidden_.agree_on(list);
    }
    /// For GuardView::averaged.
    void list_averaged(std::vector<void const*>& values) const {
        for (AnyParameter const& parameter : reducer_->parameters()) {
            if (parameter.requires_grad()) {
                values.push_back(parameter.value().data());
            }
        }
    }
    void list_claims(ParameterClaims& claims) const { claims.add_averaged(reducer_->parameters()); }
    /// @throws ContractViolation  joined ranks leave their gradients untouched, but other
    ///         participants use them.
    void check_guard(GuardView const& guard) const {
        char const* const why =
            guard.carries_accumulated
                ? "JoinedGradients::untouched leaves on a joined rank what it accumulated, which the "
                  "guard would reduce as well; give it {.carry_accumulated = false}"
            : guard.steps
                ? "JoinedGradients::untouched keeps averages from joined ranks, so a Step or a "
                  "sharded optimizer beside it would step by old gradients; leave the option out"
                : nullptr;
        if (module_->options().joined_gradients == JoinedGradients::untouched && why != nullptr) {
            throw ContractViolation{why};
        }
    }

private:
    /// All types of parameters share this constructor.
    DistributedDataParallel(
        detail::ListedParameters const& parameters,
        Comm& comm,
        BufferList buffers,
        DataParallelOptions const& options,
        Reduction reduction
    )
        : Base{comm, state_, options.gradient_kind, false} {
        detail::ModelEntry entry{comm};
        AgreementList compared;
        std::optional<CoalescedBroadcast> start;
        std::exception_ptr error;
        try {
            if (parameters.error) {
                std::rethrow_exception(parameters.error);
            }
            ParameterList const& list = parameters.list;
            detail::check_parameters(list, detail::device_of(comm).id());
            compared.begin_section("options differ: ");
            detail::agree_on(compared, options);
            compared.add("reduction", Reduction::name);
            compared.begin_section("models differ: ");
            std::size_t const first = compared.items().size();
            model_ = detail::agree_on(compared, list);
            detail::agree_on(compared, buffers, "buffer");
            model_ += detail::concat(", hash ", compared.hash_from(first));
            reducer_.emplace(
                comm,
                list,
                bucket_options(options),
                std::move(reduction),
                detail::TakeGradients::later // a rank may refuse the model
            );
            module_.emplace(comm, list, std::move(buffers), options);
            listed_.emplace(list, true);
            if (options.verify_ready) {
                ready_check_.emplace(
                    list, detail::device_of(comm).id(), detail::CheckedMarks::after_pass
                );
            }
            if (options.sync_at_start) {
                start.emplace(module_->plan_sync());
            }
            entry.enter(list, options.shares_values);
        } catch (...) {
            error = std::current_exception();
        }
        detail::ControlOver<Comm&> control{comm};
        detail::agree(control, compared, error);
        entry.leave();
        detail::abort_if_throws(comm, [&] { reducer_->take_gradients(); });
        reducer_->register_memory();
        if (start) {
            start->run(comm, 0);
        }
    }

    using Base::hidden_;
    using Base::listed_;
    using Base::module_;
    using Base::ready_check_;
    using Base::reducer_;

    std::string model_; ///< in the form that guards compare
    JoinState state_;
};

template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, BufferList) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, BufferList, DataParallelOptions)
    -> DistributedDataParallel<Comm>;

template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, Reduction) -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, BufferList, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, BufferList, DataParallelOptions, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;

/// Makes a DistributedDataParallel that is kept by a pointer, without naming its type. Collective; see the
/// constructor. std::make_unique cannot deduce the arguments of a class template. A member that is made in
/// the constructor's list, or a std::optional, needs no pointer.
template <class Comm, class Parameters>
[[nodiscard]] std::unique_ptr<DistributedDataParallel<Comm>> make_data_parallel(
    Comm& comm, Parameters&& parameters, BufferList buffers, DataParallelOptions const& options = {}
) {
    return std::make_unique<DistributedDataParallel<Comm>>(
        comm, std::forward<Parameters>(parameters), std::move(buffers), options
    );
}
/// A model without buffers.
template <class Comm, class Parameters>
[[nodiscard]] std::unique_ptr<DistributedDataParallel<Comm>>
make_data_parallel(Comm& comm, Parameters&& parameters, DataParallelOptions const& options = {}) {
    return joinable::make_data_parallel(
        comm, std::forward<Parameters>(parameters), joinable::buffers(), options
    );
}

namespace detail {

/// Stands for the communicator if options in braces have a wrong name.
template <class Options>
struct MisspeltOptions {
    static_assert(
        !std::is_same_v<Options, DataParallelOptions>,
        "DistributedDataParallel: after the parameters come buffers(ranges...), if the model has any, "
        "then options in braces with the names and the order of DataParallelOptions; write "
        "DataParallelOptions{...} to be told which name is wrong"
    );
};

} // namespace detail

/// The class that a model with such options becomes. It holds only the explanation.
template <class Options>
class DistributedDataParallel<detail::MisspeltOptions<Options>> : detail::MisspeltOptions<Options> {
public:
    template <class... Arguments>
    explicit DistributedDataParallel(Arguments&&...);
    explicit DistributedDataParallel(...);
};
/// `...` takes braces with a misspelt name.
DistributedDataParallel(detail::AnyArgument, detail::AnyArgument, ...)
    -> DistributedDataParallel<detail::MisspeltOptions<DataParallelOptions>>;

}} // namespace joinable::v0

// ---- joinable/participant/step.hpp

namespace joinable { inline namespace v0 {

/// Makes a plain optimizer a participant: `Step step{comm, [&] { optimizer.step(model); }};`.
///
/// Active ranks call step() once in every round that syncs. Joined ranks run the same body on the
/// same reduced gradients, so parameters and optimizer state stay equal on all ranks without any
/// message. Runs after labels::gradients. `body` may take the Round. To skip the step if no rank
/// had a gradient, return if `round.contributor_count() == 0`, which is the same on all ranks.
template <class Comm, class Body>
class Step {
    static_assert(
        !std::is_same_v<Comm, detail::NoCommunicator>,
        "Step: the communicator comes first, as in Step step{comm, [&] { optimizer.step(model); }}"
    );
    static_assert(models_communicator<Comm>());
    static_assert(
        std::invocable<Body&> || std::invocable<Body&, Round const&>,
        "Step: the body is a function that takes nothing or the Round, as in Step step{comm, [&] { "
        "optimizer.step(model); }}"
    );

public:
    Step(Comm& comm, Body body) : comm_{comm}, body_{std::move(body)} {}

    /// Local, apart from the notification.
    /// @throws ContractViolation  the round of the guard does not sync: ranks would step apart.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { run(round); });
    }

    class Hook {
    public:
        using label = labels::step;
        using runs_after = labels_of<labels::gradients>;

        explicit Hook(Step& step) noexcept : step_{step} {}
        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) { step_.run(round); }
        void post_hook(bool) noexcept {}

    private:
        Step& step_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "Step"; }
    static constexpr std::string_view join_verb = "step()";

private:
    void run(Round const& round) {
        if constexpr (std::invocable<Body&, Round const&>) {
            body_(round);
        } else {
            body_();
        }
    }

    Comm& comm_;
    Body body_;
    JoinState state_;
};

template <class Comm, class Body>
Step(Comm&, Body) -> Step<Comm, Body>;
/// Explains which argument is missing.
template <class Body>
Step(Body) -> Step<detail::NoCommunicator, Body>;

}} // namespace joinable::v0

// ---- joinable/optimizer/settings.hpp

/// @file
/// The settings of the update rules in optimizer/rules.hpp, which has what they compute: include
/// <joinable/zero.hpp> to train by them. A program without it can name them, so that the compiler says what is
/// missing.

namespace joinable { inline namespace v0 {

template <std::floating_point T>
struct UpdateRange;

namespace detail {

template <class T, bool has_momentum>
struct SgdUpdate;

} // namespace detail

/// Stochastic gradient descent, with momentum if it is not 0. The first step uses the undamped
/// gradient as the momentum.
struct Sgd {
    double learning_rate = 1e-3;
    double momentum = 0;
    double dampening = 0;
    double weight_decay = 0;
    bool nesterov = false;
    bool maximize = false;

    [[nodiscard]] std::span<std::string_view const> state_names() const noexcept;
    template <class T>
    void update(UpdateRange<T> const& range) const;
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const;
    void(check)() const; // parenthesised: systems define a macro of this name
    template <class List>
    void agree_on(List& list) const;

private:
    template <class T, bool has_momentum>
    [[nodiscard]] detail::SgdUpdate<T, has_momentum> made(std::uint64_t step) const;
};

/// Adam (Kingma and Ba, 2015). The weight decay is added to the gradient. With amsgrad (Reddi et
/// al., 2018) the largest average of squares is used.
struct Adam {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    bool amsgrad = false;
    bool maximize = false;

    [[nodiscard]] std::span<std::string_view const> state_names() const noexcept;
    template <class T>
    void update(UpdateRange<T> const& range) const;
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const;
    void(check)() const; // parenthesised: systems define a macro of this name
    template <class List>
    void agree_on(List& list) const;
};

/// Adam with a weight decay that shrinks the value and is not part of the gradient (Loshchilov and
/// Hutter, 2019).
struct AdamW {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 1e-2;
    bool amsgrad = false;
    bool maximize = false;

    [[nodiscard]] std::span<std::string_view const> state_names() const noexcept;
    template <class T>
    void update(UpdateRange<T> const& range) const;
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const;
    void(check)() const; // parenthesised: systems define a macro of this name
    template <class List>
    void agree_on(List& list) const;
};

}} // namespace joinable::v0

// ---- joinable/participant/needs_zero.hpp

/// @file
/// Declares the classes of <joinable/zero.hpp> for a program that has not included it: the compiler then says so.
/// The deduction guides lose to all others.

namespace joinable { inline namespace v0 {

template <class Comm, class Rule>
class ZeroRedundancyOptimizer;
template <class Comm, class Rule, Timeline Times = NoTimeline>
class ShardedDataParallel;

namespace detail {

/// Stands for the communicator where no constructor was seen.
struct NoHeader {};

} // namespace detail

/// The class for arguments that no constructor takes. It holds only the explanation.
template <class Rule>
class ZeroRedundancyOptimizer<detail::NoHeader, Rule> {
    static_assert(
        std::is_void_v<Rule>,
        "ZeroRedundancyOptimizer: include <joinable/zero.hpp>, and give a communicator, parameters and the "
        "optimizer as in Adam{...}"
    );

public:
    explicit ZeroRedundancyOptimizer(...);
};
ZeroRedundancyOptimizer(...) -> ZeroRedundancyOptimizer<detail::NoHeader, int>;

/// The same.
template <class Rule>
class ShardedDataParallel<detail::NoHeader, Rule> {
    static_assert(
        std::is_void_v<Rule>,
        "ShardedDataParallel: include <joinable/zero.hpp>, and give a communicator, parameters and the "
        "optimizer as in Adam{...}"
    );

public:
    explicit ShardedDataParallel(...);
};
ShardedDataParallel(...) -> ShardedDataParallel<detail::NoHeader, int>;

}} // namespace joinable::v0

// ---- joinable/core.hpp

/// @file
/// Everything that needs no threads: guards over an engine's own communicator.

// Each header follows the headers it includes. g++ then needs three lines, not ten, to say where an
// error was included from.
// clang-format off
// clang-format on

// ---- joinable/detail/kept_range.hpp

/// @file
/// The ways in which a view keeps the range it was made from.

namespace joinable { inline namespace v0 { namespace detail {

/// A reference to a named range, kept by address.
template <class Range>
class RangeReference {
public:
    RangeReference() = default;
    explicit constexpr RangeReference(Range& range) noexcept : range_{&range} {}
    [[nodiscard]] constexpr auto begin() const { return std::begin(*range_); }
    [[nodiscard]] constexpr auto end() const { return std::end(*range_); }

private:
    Range* range_ = nullptr;
};

template <class Range>
inline constexpr bool is_view = std::ranges::enable_view<Range>;
template <class Range>
inline constexpr bool is_view<RangeReference<Range>> = true;

/// Whether iterators outlive the range object.
template <class Range>
inline constexpr bool is_borrowed = std::ranges::enable_borrowed_range<Range>;
template <class Range>
inline constexpr bool is_borrowed<RangeReference<Range>> = true;

/// The type that keeps an argument of type `Range&&`: a named container is referenced, a view is
/// copied, a temporary container is moved.
template <class Range>
using Kept = std::conditional_t<
    std::is_lvalue_reference_v<Range> && !is_view<std::remove_cvref_t<Range>>,
    RangeReference<std::remove_reference_t<Range>>,
    std::remove_cvref_t<Range>>;

template <class Range>
[[nodiscard]] constexpr Kept<Range> keep(Range&& range) {
    return Kept<Range>(std::forward<Range>(range));
}

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/bucketed_view.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class Range>
concept has_multi_pass_iterators = requires(Range& range) {
    { std::begin(range) } -> std::forward_iterator;
    { std::end(range) } -> std::same_as<decltype(std::begin(range))>;
};

/// The category that the legacy iterator tag may claim: it promises references to elements.
template <class Reference>
using tag_for_t = std::conditional_t<
    std::is_lvalue_reference_v<Reference>,
    std::forward_iterator_tag,
    std::input_iterator_tag>;

} // namespace detail

/// One bucket of a BucketedView: the elements of the underlying range that share it, in order.
/// Elements are found while they are read, never beyond the last one requested. Valid as long as
/// the underlying range.
template <class BaseIterator>
class LazyBucket {
public:
    class iterator {
    public:
        using value_type = std::iter_value_t<BaseIterator>;
        using difference_type = std::ptrdiff_t;
        using reference = std::iter_reference_t<BaseIterator>;
        using pointer = void;
        using iterator_concept = std::forward_iterator_tag;
        using iterator_category = detail::tag_for_t<reference>;

        iterator() = default;
        constexpr iterator(LazyBucket const& bucket, BaseIterator at, std::size_t index)
            : at_{at}, end_{bucket.end_}, index_{index}, kind_{bucket.kind_},
              bytes_{bucket.kind_.bytes()}, limit_{bucket.limit_} {}

        [[nodiscard]] constexpr reference operator*() const { return *at_; }
        /// The position of this element in the underlying range.
        [[nodiscard]] constexpr std::size_t index() const noexcept { return index_; }
        constexpr iterator& operator++() {
            if (bytes_ >= limit_) { // this element has closed the bucket
                at_ = end_;
                return *this;
            }
            for (++at_, ++index_; at_ != end_; ++at_, ++index_) {
                TensorSize const size = detail::tensor_size_of(*at_);
                if (size.shares_buckets_with(kind_)) {
                    bytes_ += size.bytes();
                    break;
                }
            }
            return *this;
        }
        constexpr iterator operator++(int) {
            iterator const old = *this;
            ++*this;
            return old;
        }
        friend constexpr bool operator==(iterator const& a, iterator const& b) {
            return a.at_ == b.at_;
        }

    private:
        BaseIterator at_{};
        BaseIterator end_{};
        std::size_t index_ = 0;
        TensorSize kind_;
        std::size_t bytes_ = 0; ///< of the bucket, up to and with this element
        std::size_t limit_ = 0;
    };

    LazyBucket() = default;
    constexpr LazyBucket(
        BaseIterator first, BaseIterator end, std::size_t index, TensorSize kind, std::size_t limit
    )
        : first_{first}, end_{end}, index_{index}, kind_{kind}, limit_{limit} {}

    [[nodiscard]] constexpr iterator begin() const { return {*this, first_, index_}; }
    [[nodiscard]] constexpr iterator end() const { return {*this, end_, index_}; }
    [[nodiscard]] constexpr DType dtype() const noexcept { return kind_.dtype; }
    [[nodiscard]] constexpr DeviceId device() const noexcept { return kind_.device; }
    /// The limit in bytes of this bucket.
    [[nodiscard]] constexpr std::size_t limit() const noexcept { return limit_; }

private:
    BaseIterator first_{};
    BaseIterator end_{};
    std::size_t index_ = 0; ///< of first_
    TensorSize kind_;       ///< of its first element
    std::size_t limit_ = 0;
};

/// The buckets of a range of Tensors, Parameters or TensorSizes, as
/// compute_bucket_assignment_by_size gives them for the same limits. Each one is cut on demand. A
/// forward range of LazyBucket; iterators are valid as long as the view. `Base` keeps the range: a
/// reference or the range itself.
///
/// Buckets come in the order of their lowest elements, and buckets of different dtypes and devices
/// interleave. A bucket that closes early waits for buckets that began before it, but never for
/// what follows: the next bucket begins at the first element that no earlier one has taken. Finding
/// the beginning of a bucket reads at most the last elements of the earlier ones and the element
/// after those. Reading a bucket reads nothing beyond its last element, which is the one that
/// reaches the limit. A bucket that stays open is read to the end of the range. No bucket is
/// stored.
///
/// Complexity: reading all buckets is linear in the elements times the number of different dtypes
/// and devices. An iterator allocates a few words per dtype and device met so far.
template <class Base>
class BucketedView {
public:
    using base_iterator = decltype(std::begin(std::declval<Base const&>()));

    class iterator {
    public:
        using value_type = LazyBucket<base_iterator>;
        using difference_type = std::ptrdiff_t;
        using reference = value_type;
        using pointer = void;
        using iterator_concept = std::forward_iterator_tag;
        using iterator_category = std::input_iterator_tag; // buckets are values, not references

        iterator() = default;
        constexpr iterator(BucketedView const& view, base_iterator first)
            : view_{&view}, first_{first} {}

        [[nodiscard]] constexpr value_type operator*() const {
            TensorSize const kind = detail::tensor_size_of(*first_);
            std::size_t cut = 0;
            for (Kind const& known : kinds_) {
                if (known.size.shares_buckets_with(kind)) {
                    cut = known.buckets;
                }
            }
            auto const& limits = view_->limits_;
            return {
                first_,
                std::end(view_->base_),
                index_,
                kind,
                limits[(std::min)(cut, limits.size() - 1)]
            };
        }
        constexpr iterator& operator++() {
            take(**this);
            auto const end = std::end(view_->base_);
            do {
                ++first_;
                ++index_;
            } while (first_ != end && is_taken(index_, detail::tensor_size_of(*first_)));
            return *this;
        }
        constexpr iterator operator++(int) {
            iterator const old = *this;
            ++*this;
            return old;
        }
        friend constexpr bool operator==(iterator const& a, iterator const& b) {
            return a.first_ == b.first_;
        }

    private:
        struct Kind {
            TensorSize size;       ///< of one such tensor
            std::size_t buckets;   ///< how many of its buckets were passed
            std::size_t taken_end; ///< the position after their last element
        };

        constexpr void take(value_type const& bucket) {
            std::size_t last = index_;
            for (auto it = bucket.begin(); it != bucket.end(); ++it) {
                last = it.index();
            }
            TensorSize const size{0, bucket.dtype(), bucket.device()};
            for (Kind& known : kinds_) {
                if (known.size.shares_buckets_with(size)) {
                    ++known.buckets;
                    known.taken_end = last + 1;
                    return;
                }
            }
            kinds_.push_back({size, 1, last + 1});
        }
        [[nodiscard]] constexpr bool is_taken(std::size_t index, TensorSize const& size) const {
            return std::any_of(kinds_.begin(), kinds_.end(), [&](Kind const& known) {
                return index < known.taken_end && known.size.shares_buckets_with(size);
            });
        }

        BucketedView const* view_ = nullptr;
        base_iterator first_{};
        std::size_t index_ = 0; ///< of first_
        std::vector<Kind> kinds_;
    };

    BucketedView() = default;
    /// @throws ContractViolation  no limit is given.
    constexpr BucketedView(Base base, std::span<std::size_t const> limits)
        : base_{std::move(base)}, limits_(limits.begin(), limits.end()) {
        if (limits.empty()) {
            throw ContractViolation{"views::bucketed needs at least one limit, but got none"};
        }
    }

    [[nodiscard]] constexpr iterator begin() const { return {*this, std::begin(base_)}; }
    [[nodiscard]] constexpr iterator end() const { return {*this, std::end(base_)}; }

private:
    Base base_{};
    std::vector<std::size_t> limits_; ///< few: copying them with the view is cheap
};

namespace views {

namespace detail {

/// The right operand of `range | bucketed(limits)`.
class BucketedClosure {
public:
    explicit constexpr BucketedClosure(std::span<std::size_t const> limits)
        : limits_(limits.begin(), limits.end()) {}

    template <class Range>
    friend constexpr auto operator|(Range&& range, BucketedClosure const& closure) {
        using Value = std::remove_cvref_t<Range>;
        static_assert(
            joinable::detail::has_tensor_size<decltype(*std::begin(range))>,
            "views::bucketed: the elements of the range must model Tensor or Parameter, or be a "
            "TensorSize; specialise joinable::tensor_traits for their type"
        );
        static_assert(
            joinable::detail::has_multi_pass_iterators<Value const>,
            "views::bucketed: the range must be a forward range also when it is const, and its "
            "begin and end of one type; copy it into a container first"
        );
        using Base = joinable::detail::Kept<Range>;
        return BucketedView<Base>{
            joinable::detail::keep(std::forward<Range>(range)), closure.limits_
        };
    }

private:
    std::vector<std::size_t> limits_;
};

} // namespace detail

/// `range | views::bucketed(limits)`: the BucketedView of a forward range. A named container is
/// referenced, a view is copied, a temporary container is moved into the result. Local; an empty
/// range has no buckets.
/// @throws ContractViolation  there are no limits.
[[nodiscard]] constexpr auto bucketed(std::span<std::size_t const> limits) {
    return detail::BucketedClosure{limits};
}
[[nodiscard]] constexpr auto bucketed(std::initializer_list<std::size_t> limits) {
    return detail::BucketedClosure{std::span<std::size_t const>{limits.begin(), limits.size()}};
}

} // namespace views

}} // namespace joinable::v0

/// A view, unless it owns its range, which a copy would copy, too.
template <class Base>
inline constexpr bool std::ranges::enable_view<joinable::BucketedView<Base>> =
    joinable::detail::is_view<Base>;

/// Its iterators refer only to the underlying range.
template <class BaseIterator>
inline constexpr bool std::ranges::enable_borrowed_range<joinable::LazyBucket<BaseIterator>> = true;
template <class BaseIterator>
inline constexpr bool std::ranges::enable_view<joinable::LazyBucket<BaseIterator>> = true;

// ---- joinable/bucket/fixed_assignment.hpp

namespace joinable { inline namespace v0 {

/// A bucket assignment of at most `Capacity` tensors that does not allocate, so that it can be a
/// constexpr variable. A BucketAssignment exists only during the evaluation of a constant
/// expression.
///
///     constexpr std::array<TensorSize, 3> sizes{{{10}, {10}, {5, DType::f64}}};
///     constexpr FixedBucketAssignment<3> layout{compute_bucket_assignment_by_size(sizes, {80})};
template <std::size_t Capacity>
class FixedBucketAssignment {
public:
    /// @throws ContractViolation  there are more tensors than the capacity.
    explicit constexpr FixedBucketAssignment(BucketAssignment const& assignment) {
        for (auto const& members : assignment.buckets) {
            if (members.size() > Capacity - starts_[size_]) {
                throw ContractViolation{detail::concat(
                    "a fixed bucket assignment has room for ",
                    Capacity,
                    " tensors, but the one it was given has more; raise its capacity"
                )};
            }
            limits_[size_] = assignment.limits[size_];
            starts_[size_ + 1] = starts_[size_] + members.size();
            std::copy(members.begin(), members.end(), tensors_.data() + starts_[size_]);
            ++size_;
        }
    }

    /// The number of buckets.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    /// The tensors of bucket `b`. @pre b < size()
    [[nodiscard]] constexpr std::span<std::size_t const> operator[](std::size_t b) const noexcept {
        return {tensors_.data() + starts_[b], starts_[b + 1] - starts_[b]};
    }
    /// The limit in bytes that each bucket was cut by, as in BucketAssignment.
    [[nodiscard]] constexpr std::span<std::size_t const> limits() const noexcept {
        return {limits_.data(), size_};
    }

private:
    std::array<std::size_t, Capacity> tensors_{}; ///< of all buckets, one after another
    std::array<std::size_t, Capacity + 1> starts_{};
    std::array<std::size_t, Capacity> limits_{};
    std::size_t size_ = 0;
};

}} // namespace joinable::v0

// ---- joinable/communicator/environment.hpp

namespace joinable { inline namespace v0 {

/// How a launcher describes this process in environment variables.
struct LaunchEnvironment {
    std::string_view launcher; ///< the launcher whose variables were used
    int rank = 0;
    int size = 0;
    std::string job;    ///< the same on all ranks; differs between jobs
    std::string spread; ///< evidence that the ranks are on several machines; else empty
};

namespace detail {

/// The environment variables of one launcher. An empty name means that it has no such variable.
struct Launcher {
    std::string_view name;
    char const* rank;
    char const* size;
    char const* marker;              ///< only this launcher sets it
    std::array<char const*, 2> job;  ///< together they identify the job
    std::array<char const*, 2> more; ///< these too, where they are set
    char const* local_size;          ///< ranks on this machine
    char const* machines;
    std::string_view without_job; ///< what to do if `job` is not set
};

/// The order matters: a launcher that another one starts comes first, because its variables are
/// more specific.
inline constexpr std::array<Launcher, 6> launchers{{
    {"joinable",
     "JOINABLE_RANK",
     "JOINABLE_WORLD_SIZE",
     "JOINABLE_RANK",
     {"JOINABLE_JOB", ""},
     {"", ""},
     "",
     "",
     "set it to a text that is the same on all ranks of this job and differs between jobs"},
    {"torchrun",
     "RANK",
     "WORLD_SIZE",
     "TORCHELASTIC_RUN_ID",
     {"MASTER_ADDR", "MASTER_PORT"},
     {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
     "LOCAL_WORLD_SIZE",
     "",
     "start the ranks by torchrun, or set JOINABLE_JOB"},
    {"mpirun of Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_RANK",
     {"PMIX_NAMESPACE", ""},
     {"", ""},
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     "",
     "start the ranks by mpirun, or set JOINABLE_JOB"},
    {"mpiexec of MPICH",
     "PMI_RANK",
     "PMI_SIZE",
     "PMI_RANK",
     {"PMI_JOBID", ""},
     {"", ""},
     "MPI_LOCALNRANKS",
     "",
     "MPICH's mpiexec names no job: start the ranks by mpiexec -genv JOINABLE_JOB $$"},
    {"torch.distributed",
     "RANK",
     "WORLD_SIZE",
     "RANK",
     {"MASTER_ADDR", "MASTER_PORT"},
     {"", ""},
     "LOCAL_WORLD_SIZE",
     "",
     "set it as for torch.distributed, or set JOINABLE_JOB"},
    {"srun",
     "SLURM_PROCID",
     "SLURM_NTASKS",
     "SLURM_PROCID",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     {"", ""},
     "",
     "SLURM_STEP_NUM_NODES",
     "start the ranks by srun, not by sbatch alone, or set JOINABLE_JOB"},
}};

/// Reads one environment by `lookup(name)`, which returns null for a variable that is not set.
template <class Lookup>
class LaunchReader {
public:
    explicit LaunchReader(Lookup const& lookup) noexcept : lookup_{lookup} {}

    [[nodiscard]] LaunchEnvironment read() const {
        for (Launcher const& launcher : launchers) {
            if (is_set(launcher.marker)) {
                return read(launcher);
            }
        }
        throw ContractViolation{concat(
            "expected the rank of this process in an environment variable, but found none of ",
            names_of_ranks(),
            "; start the ranks by mpirun, torchrun or srun, or set JOINABLE_RANK, "
            "JOINABLE_WORLD_SIZE and JOINABLE_JOB"
        )};
    }

private:
    [[nodiscard]] std::string_view text(char const* name) const {
        char const* const value = *name == '\0' ? nullptr : lookup_(name);
        return value == nullptr ? std::string_view{} : value;
    }
    [[nodiscard]] bool is_set(char const* name) const { return !text(name).empty(); }

    [[nodiscard]] LaunchEnvironment read(Launcher const& launcher) const {
        LaunchEnvironment found{launcher.name, 0, 0, {}, {}};
        found.size = number(launcher, launcher.size);
        if (found.size < 1) {
            refuse(launcher.size, "at least 1 rank");
        }
        found.rank = number(launcher, launcher.rank);
        if (found.rank < 0 || found.rank >= found.size) {
            refuse(launcher.rank, concat("a rank below ", launcher.size, " = ", found.size));
        }
        found.job = job(launcher);
        found.spread = spread(launcher, found.size);
        return found;
    }

    [[nodiscard]] int number(Launcher const& launcher, char const* name) const {
        std::string_view const given = text(name);
        if (given.empty()) {
            throw ContractViolation{concat(
                launcher.marker,
                " is set, so ",
                name,
                " was expected, too, but it is not set; set both as ",
                launcher.name,
                " does, or unset ",
                launcher.marker
            )};
        }
        int value = 0;
        auto const [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
        if (error != std::errc{} || end != given.data() + given.size()) {
            refuse(name, "a number");
        }
        return value;
    }
    [[noreturn]] void refuse(char const* name, std::string const& expected) const {
        throw ContractViolation{
            concat("expected ", expected, " in ", name, ", but it is \"", text(name), "\"")
        };
    }

    [[nodiscard]] std::string job(Launcher const& launcher) const {
        if (is_set("JOINABLE_JOB")) {
            return std::string{text("JOINABLE_JOB")};
        }
        std::string job{launcher.name};
        for (char const* const name : launcher.job) {
            if (*name != '\0' && !is_set(name)) {
                throw ContractViolation{concat(
                    "expected a value that identifies this job in ",
                    name,
                    ", but it is not set; ",
                    launcher.without_job
                )};
            }
            job += *name != '\0' ? concat("/", text(name)) : "";
        }
        for (char const* const name : launcher.more) {
            job += *name != '\0' ? concat("/", text(name)) : "";
        }
        return job;
    }

    [[nodiscard]] std::string spread(Launcher const& launcher, int size) const {
        if (is_set(launcher.local_size)) {
            return number(launcher, launcher.local_size) == size ? std::string{}
                                                                 : concat(
                                                                       launcher.local_size,
                                                                       " is ",
                                                                       text(launcher.local_size),
                                                                       " and ",
                                                                       launcher.size,
                                                                       " is ",
                                                                       size
                                                                   );
        }
        if (launcher.name == launchers.front().name) {
            return {}; // set by hand, perhaps for ranks within one task of a launcher
        }
        for (Launcher const& outer : launchers) { // srun sets the ranks of MPICH, too
            if (is_set(outer.machines) && number(outer, outer.machines) != 1) {
                return concat(outer.machines, " is ", text(outer.machines));
            }
        }
        return {};
    }

    [[nodiscard]] static std::string names_of_ranks() {
        std::string names;
        for (Launcher const& launcher : launchers) {
            if (names.find(concat(" ", launcher.rank)) == std::string::npos) {
                names += concat(names.empty() ? "" : ", ", launcher.rank);
            }
        }
        return names;
    }

    Lookup const& lookup_;
};

} // namespace detail

/// Reads what the launcher of this process says: mpirun of Open MPI, mpiexec of MPICH, torchrun, or
/// srun. JOINABLE_RANK and JOINABLE_WORLD_SIZE take precedence over these. JOINABLE_JOB names the
/// job under every launcher. `lookup(name)` returns the value of a variable, or null if it is not
/// set.
/// @throws ContractViolation  variables are missing, are not numbers, or contradict each other.
template <class Lookup>
[[nodiscard]] LaunchEnvironment launch_environment(Lookup const& lookup) {
    return detail::LaunchReader<Lookup>{lookup}.read();
}
[[nodiscard]] inline LaunchEnvironment launch_environment() {
    return launch_environment([](char const* name) { return std::getenv(name); });
}

}} // namespace joinable::v0

// ---- joinable/communicator/shared_memory/board/arena_space.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Memory that is divided into the arenas of one rank. Any thread may use it: arenas of several
/// communicators lie in it. Its owner or any arena keeps it alive, so an arena may outlive its
/// communicator.
/// @pre the memory itself stays mapped while `reserve` exists
class ArenaSpace {
public:
    struct Close {
        void operator()(ArenaSpace* space) const noexcept {
            space->finish([space] { space->is_closed_ = true; });
        }
    };
    using Owner = std::unique_ptr<ArenaSpace, Close>;
    /// Called before memory is written for the first time. Throws if the system cannot provide it.
    using Reserve = std::function<void(std::byte const* data, std::size_t bytes)>;

    [[nodiscard]] static Owner make(std::span<std::byte> memory, Reserve reserve) {
        return Owner{new ArenaSpace{memory, std::move(reserve)}};
    }
    ArenaSpace(ArenaSpace const&) = delete;
    ArenaSpace& operator=(ArenaSpace const&) = delete;

    /// Takes the first gap that is large enough, zeroed; nothing if there is none. Linear in the
    /// number of arenas.
    [[nodiscard]] std::optional<Arena> allocate(std::size_t bytes, std::size_t alignment);

    /// Whether all of `bytes` bytes from `data` on lie in this memory.
    [[nodiscard]] bool holds(void const* data, std::size_t bytes) const noexcept;

private:
    struct Range { ///< as offsets in the memory
        std::size_t begin;
        std::size_t end;
    };

    ArenaSpace(std::span<std::byte> memory, Reserve reserve) noexcept
        : memory_{memory}, reserve_{std::move(reserve)} {}
    ~ArenaSpace() = default;

    static void release(void* context, std::byte* data, std::size_t) noexcept;
    /// Calls f() under the lock, and then ends this object if nothing uses it any more.
    template <class F>
    void finish(F const& f) noexcept {
        bool is_unused = false;
        {
            std::lock_guard const lock{mutex_};
            f();
            is_unused = is_closed_ && taken_.empty();
        }
        if (is_unused) { // so no other thread can come
            delete this;
        }
    }

    std::span<std::byte> memory_;
    Reserve reserve_;
    std::mutex mutex_;         ///< for what follows
    std::vector<Range> taken_; ///< sorted by offset
    bool is_closed_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/arena_space.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstdint>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::optional<Arena>
ArenaSpace::allocate(std::size_t bytes, std::size_t alignment) {
    check_alignment(alignment);
    if (bytes == 0) {
        return Arena{};
    }
    std::lock_guard const lock{mutex_};
    auto const start = reinterpret_cast<std::uintptr_t>(memory_.data());
    std::size_t end = 0; // of the previous arena
    for (auto next = taken_.begin();; ++next) {
        std::size_t const begin = (start + end + alignment - 1) / alignment * alignment - start;
        std::size_t const limit = next == taken_.end() ? memory_.size() : next->begin;
        if (begin <= limit && bytes <= limit - begin) {
            std::byte* const data = memory_.data() + begin;
            reserve_(data, bytes);
            taken_.insert(next, {begin, begin + bytes});
            std::memset(data, 0, bytes); // another arena may have used it
            return Arena{data, bytes, &release, this};
        }
        if (next == taken_.end()) {
            return std::nullopt;
        }
        end = next->end;
    }
}

JOINABLE_DEFINITION bool ArenaSpace::holds(void const* data, std::size_t bytes) const noexcept {
    std::uintptr_t const offset =
        reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(memory_.data());
    return offset <= memory_.size() && bytes <= memory_.size() - offset;
}

JOINABLE_DEFINITION void ArenaSpace::release(void* context, std::byte* data, std::size_t) noexcept {
    auto* const space = static_cast<ArenaSpace*>(context);
    auto const begin = static_cast<std::size_t>(data - space->memory_.data());
    space->finish([&] {
        std::erase_if(space->taken_, [&](Range const& range) { return range.begin == begin; });
    });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/board/group_memory.hpp

/// @file
/// The memory of a rank that other ranks can reach. Thread ranks and process ranks differ only in
/// this. Both allocate whole cache lines, and take back only their own.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::size_t cache_line = 64;

[[nodiscard]] constexpr std::size_t in_cache_lines(std::size_t bytes) noexcept {
    return (bytes + cache_line - 1) / cache_line * cache_line;
}

/// The bytes of a page, by which the system takes memory back. Some systems have pages of 64 KiB.
[[nodiscard]] std::size_t page_size() noexcept;

/// A part of a block of memory.
struct BlockPart {
    std::size_t offset;
    std::size_t bytes;
};

/// For thread ranks, which reach all memory.
class Heap {
public:
    static constexpr bool is_all_in_reach = true;
    /// Whether the other ranks can reach the buffer.
    [[nodiscard]] static bool reaches(ConstBuffer) noexcept { return true; }

    /// @throws std::bad_alloc
    [[nodiscard]] static std::byte* allocate(std::size_t bytes) {
        return static_cast<std::byte*>(::operator new(bytes, std::align_val_t{cache_line}));
    }
    /// A block whose part `zeros` is zeroed.
    /// @throws std::bad_alloc
    [[nodiscard]] static std::byte*
    allocate(std::size_t bytes, std::span<BlockPart const>, BlockPart zeros) {
        std::byte* const block = allocate(bytes);
        std::memset(block + zeros.offset, 0, zeros.bytes);
        return block;
    }
    static void free(std::byte* memory, std::size_t) noexcept {
        ::operator delete(memory, std::align_val_t{cache_line});
    }
};

/// The part of the shared memory that belongs to one process rank. Only that rank knows which bytes
/// of it are in use. Several threads may use the rank's communicators.
class Room {
public:
    static constexpr bool is_all_in_reach = false;

    /// Zeroes memory. It may give whole pages back to the system, so they are reserved again before
    /// they are used. It may throw what ArenaSpace::Reserve throws.
    using Clear = std::function<void(std::byte* data, std::size_t bytes)>;

    /// `reserve` is called before bytes are used for the first time.
    explicit Room(
        std::span<std::byte> memory,
        ArenaSpace::Reserve reserve = [](auto...) {},
        Clear clear = [](std::byte* data, std::size_t bytes) { std::memset(data, 0, bytes); }
    );
    Room(Room const&) = delete;
    Room& operator=(Room const&) = delete;

    /// The largest block that it could give if none were in use. Half of the memory from the first
    /// arena on.
    [[nodiscard]] std::size_t size() const noexcept {
        return size_.load(std::memory_order_relaxed);
    }

    /// An arena in the upper half of the memory, which allocate() then no longer uses. On the heap
    /// if there is no room. Throws what `reserve` throws.
    [[nodiscard]] Arena arena(std::size_t bytes, std::size_t alignment);
    /// Whether the other ranks can reach the buffer in place: whether it is in an arena.
    [[nodiscard]] bool reaches(ConstBuffer buffer) const noexcept {
        // Without the lock: each collective asks, and another thread may make the first arena.
        ArenaSpace const* const arenas = arenas_.load(std::memory_order_acquire);
        return arenas != nullptr && arenas->holds(buffer.data, buffer.bytes());
    }

    /// The lowest free block, because memory that was used before is in the caches. Null if there
    /// is none. Linear in the gaps. Throws what `reserve` throws.
    [[nodiscard]] std::byte* allocate(std::size_t bytes);
    /// The same, but of the block only `used` is reserved, and `zeros` is zeroed. Before the caller
    /// uses other parts, it reserves them itself.
    [[nodiscard]] std::byte*
    allocate(std::size_t bytes, std::span<BlockPart const> used, BlockPart zeros);
    void free(std::byte* memory, std::size_t bytes) noexcept;

private:
    struct Gap { ///< as offsets in the memory
        std::size_t begin;
        std::size_t end;
    };

    /// Reserves what is not reserved yet of the pages of these bytes.
    void reserve(std::size_t begin, std::size_t end);
    /// The pages that lie in these bytes are no longer reserved.
    void unreserve(std::size_t begin, std::size_t end);

    std::span<std::byte> memory_;   ///< never changes
    std::atomic<std::size_t> size_; ///< of the part of it for everything but arenas
    ArenaSpace::Reserve reserve_;
    Clear clear_;
    std::vector<Gap> unreserved_;    ///< sorted by offset; parts of it others may have reserved
    ArenaSpace::Owner arenas_owner_; ///< from the first arena on
    std::atomic<ArenaSpace*> arenas_{nullptr}; ///< what that owns
    std::mutex mutex_;
    std::vector<Gap> gaps_; ///< sorted by offset
    std::size_t given_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/group_memory.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <unistd.h>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::size_t page_size() noexcept {
    static auto const bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

JOINABLE_DEFINITION
Room::Room(std::span<std::byte> memory, ArenaSpace::Reserve reserve, Clear clear)
    : memory_{memory}, size_{memory.size()}, reserve_{std::move(reserve)}, clear_{std::move(clear)},
      unreserved_{{0, memory.size()}}, gaps_{{0, memory.size()}} {}

JOINABLE_DEFINITION Arena Room::arena(std::size_t bytes, std::size_t alignment) {
    std::lock_guard const lock{mutex_};
    std::size_t const half = memory_.size() / 2;
    if (Gap* const last = gaps_.empty() ? nullptr : &gaps_.back();
        !arenas_owner_ && last != nullptr && last->end == memory_.size() && last->begin <= half) {
        arenas_owner_ = ArenaSpace::make(memory_.subspan(half), reserve_);
        arenas_.store(arenas_owner_.get(), std::memory_order_release);
        size_.store(half, std::memory_order_relaxed);
        last->end = half;
    }
    std::optional<Arena> found;
    if (arenas_owner_) {
        found = arenas_owner_->allocate(bytes, alignment);
    }
    return found ? std::move(*found) : Arena{bytes, alignment};
}

JOINABLE_DEFINITION std::byte* Room::allocate(std::size_t bytes) {
    BlockPart const all{0, in_cache_lines(bytes)};
    return allocate(bytes, {&all, 1}, {0, 0});
}

JOINABLE_DEFINITION std::byte*
Room::allocate(std::size_t bytes, std::span<BlockPart const> used, BlockPart zeros) {
    std::size_t const size = in_cache_lines(bytes);
    std::lock_guard const lock{mutex_};
    if (gaps_.capacity() < given_ + 2) { // for free(), which must not fail
        gaps_.reserve(2 * given_ + 16);
    }
    auto const gap = std::find_if(gaps_.begin(), gaps_.end(), [&](Gap const& candidate) {
        return size <= candidate.end - candidate.begin;
    });
    if (gap == gaps_.end()) {
        return nullptr;
    }
    std::byte* const found = memory_.data() + gap->begin;
    for (BlockPart const& part : used) {
        reserve(gap->begin + part.offset, gap->begin + part.offset + part.bytes);
    }
    if (zeros.bytes != 0) {
        std::size_t const begin = gap->begin + zeros.offset;
        unreserve(begin, begin + zeros.bytes); // before that: it may throw halfway
        clear_(found + zeros.offset, zeros.bytes);
    }
    gap->begin += size;
    if (gap->begin == gap->end) {
        gaps_.erase(gap);
    }
    ++given_;
    return found;
}

JOINABLE_DEFINITION void Room::reserve(std::size_t begin, std::size_t end) {
    // Whole pages, so that what is left consists of few large parts.
    std::size_t const page = page_size();
    std::size_t const in_page = reinterpret_cast<std::uintptr_t>(memory_.data()) % page;
    begin -= (std::min)(begin, (in_page + begin) % page);
    end = (std::min)((in_page + end + page - 1) / page * page - in_page, size());
    auto const first = std::upper_bound(
        unreserved_.begin(),
        unreserved_.end(),
        begin,
        [](std::size_t offset, Gap const& gap) { return offset < gap.end; }
    );
    auto at = first - unreserved_.begin();
    while (at != std::ssize(unreserved_) && unreserved_.data()[at].begin < end) {
        unreserved_.reserve(unreserved_.size() + 1); // must not fail once memory is reserved
        auto const place = unreserved_.begin() + at;
        Gap const gap = *place;
        Gap const part{(std::max)(gap.begin, begin), (std::min)(gap.end, end)};
        reserve_(memory_.data() + part.begin, part.end - part.begin);
        unreserved_.erase(place);
        for (Gap const& rest : {Gap{gap.begin, part.begin}, Gap{part.end, gap.end}}) {
            if (rest.begin != rest.end) {
                unreserved_.insert(unreserved_.begin() + at++, rest);
            }
        }
    }
}

JOINABLE_DEFINITION void Room::unreserve(std::size_t begin, std::size_t end) {
    std::size_t const page = page_size();
    std::size_t const in_page = reinterpret_cast<std::uintptr_t>(memory_.data()) % page;
    begin = (in_page + begin + page - 1) / page * page - in_page;
    end -= (std::min)(end, (in_page + end) % page);
    if (begin >= end) {
        return;
    }
    // The parts that the new one meets become one with it.
    auto const first = std::find_if(unreserved_.begin(), unreserved_.end(), [&](Gap const& gap) {
        return begin <= gap.end;
    });
    auto const last =
        std::find_if(first, unreserved_.end(), [&](Gap const& gap) { return end < gap.begin; });
    if (first != last) {
        begin = (std::min)(begin, first->begin);
        end = (std::max)(end, std::prev(last)->end);
    }
    unreserved_.insert(unreserved_.erase(first, last), {begin, end});
}

JOINABLE_DEFINITION void Room::free(std::byte* memory, std::size_t bytes) noexcept {
    auto const begin = static_cast<std::size_t>(memory - memory_.data());
    std::size_t const end = begin + in_cache_lines(bytes);
    std::lock_guard const lock{mutex_};
    --given_;
    auto const after =
        std::find_if(gaps_.begin(), gaps_.end(), [&](Gap const& gap) { return begin < gap.begin; });
    bool const joins_before = after != gaps_.begin() && std::prev(after)->end == begin;
    bool const joins_after = after != gaps_.end() && after->begin == end;
    if (joins_before && joins_after) {
        std::prev(after)->end = after->end;
        gaps_.erase(after);
    } else if (joins_before) {
        std::prev(after)->end = end;
    } else if (joins_after) {
        after->begin = begin;
    } else {
        gaps_.insert(after, {begin, end});
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/descriptor.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The maximum number of ranks of a host communicator: a root must fit into 13 bits of an arrival.
inline constexpr int max_ranks = 1 << 13;

enum class Collective : std::uint8_t {
    all_reduce,
    broadcast,
    barrier,
    reduce,
    all_gather,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
    scaled_all_reduce,
    scaled_reduce_scatter,
};

[[nodiscard]] constexpr std::string_view name_of(Collective collective) noexcept {
    constexpr std::string_view names[] = {
        "all_reduce",
        "broadcast",
        "barrier",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "gather",
        "scatter",
        "all_to_all",
        "scaled all_reduce",
        "scaled reduce_scatter",
    };
    return names[static_cast<std::size_t>(collective)];
}

[[nodiscard]] constexpr bool is_scaled(Collective collective) noexcept {
    return collective == Collective::scaled_all_reduce ||
           collective == Collective::scaled_reduce_scatter;
}

/// Describes the collective that a rank is about to run. It must be the same on all ranks.
struct Descriptor {
    Collective collective = Collective::barrier;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    std::size_t count = 0;   ///< elements of one rank's share, or of all if there are no shares
    bool has_counts = false; ///< shares differ; tables have them, and `count` is not compared
    double factor = 1.0;     ///< of a scaled sum: differs between ranks, so it is not compared

    friend bool operator==(Descriptor const& a, Descriptor const& b) noexcept {
        return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op &&
               a.root == b.root && a.has_counts == b.has_counts &&
               (a.has_counts || a.count == b.count);
    }

    /// Collective, dtype, operation and root as one number, with the root in the highest bits. It
    /// has 24 bits if there are at most max_ranks.
    [[nodiscard]] constexpr std::uint64_t word() const noexcept {
        static_assert(dtype_count <= 16, "a dtype has four bits");
        static_assert(reduce_op_count <= 8, "an operation has three bits");
        return static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(dtype) << 4U |
               static_cast<std::uint64_t>(op) << 8U | static_cast<std::uint64_t>(root) << 11U;
    }
    [[nodiscard]] static constexpr Descriptor
    of_word(std::uint64_t word, std::size_t count, bool has_counts) noexcept {
        return {
            static_cast<Collective>(word & 0xfU),
            static_cast<DType>(word >> 4U & 0xfU),
            static_cast<ReduceOp>(word >> 8U & 0x7U),
            static_cast<int>(word >> 11U),
            count,
            has_counts
        };
    }

    [[nodiscard]] bool is_reduction() const noexcept {
        return collective == Collective::all_reduce || collective == Collective::reduce ||
               collective == Collective::reduce_scatter || is_scaled(collective);
    }

    /// Whether it looks like a sum of agreement_words. A sum of yours may look the same, so only texts ask.
    [[nodiscard]] bool is_agreement() const noexcept {
        return collective == Collective::all_reduce && dtype == DType::u64 && op == ReduceOp::sum &&
               count == agreement_words;
    }

    [[nodiscard]] std::string text() const {
        std::string said = concat(name_of(collective));
        if (has_counts) {
            said += concat(" by counts of ", joinable::name_of(dtype));
        } else if (collective != Collective::barrier) {
            said += concat(" of ", count, " ", joinable::name_of(dtype));
        }
        if (is_reduction()) {
            said += concat(" with ", joinable::name_of(op));
        }
        if (collective == Collective::broadcast || collective == Collective::scatter) {
            said += concat(" from rank ", root);
        }
        if (collective == Collective::reduce || collective == Collective::gather) {
            said += concat(" to rank ", root);
        }
        if (is_agreement()) {
            said += " (a guard's roll call or entry, or the making of a model)";
        }
        return said;
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/request.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// How many elements one rank sends to each rank, or expects from each: the caller's table, one
/// size for all ranks, or one for a single rank. Refers to the table.
class PartSizes {
public:
    constexpr PartSizes() = default; ///< nothing for any rank
    [[nodiscard]] static constexpr PartSizes equal(std::size_t size) noexcept {
        return {nullptr, size, all_ranks};
    }
    [[nodiscard]] static constexpr PartSizes only(int rank, std::size_t size) noexcept {
        return {nullptr, size, rank};
    }
    [[nodiscard]] static constexpr PartSizes of(Counts table) noexcept {
        return {table.data(), 0, all_ranks};
    }

    [[nodiscard]] constexpr std::size_t operator[](int rank) const noexcept {
        if (table_ != nullptr) {
            return table_[rank];
        }
        return rank_ == all_ranks || rank_ == rank ? size_ : 0;
    }
    /// Copies the sizes to a table with one entry per rank.
    template <class Count>
    constexpr void copy_to(std::span<Count> table) const noexcept {
        int rank = 0;
        for (Count& count : table) {
            count = (*this)[rank++];
        }
    }

private:
    static constexpr int all_ranks = -1;

    constexpr PartSizes(std::size_t const* table, std::size_t size, int rank) noexcept
        : table_{table}, size_{size}, rank_{rank} {}

    std::size_t const* table_ = nullptr;
    std::size_t size_ = 0;
    int rank_ = all_ranks;
};

/// One collective as one rank requests it. Its arguments have been checked, and it omits buffers
/// that the collective does not use on this rank. It refers to buffers and tables, and lives only
/// during the call that posts it.
///
/// If ranks have parts, it also has the sizes of the parts. Parts lie one after another in rank
/// order. In all_gather and gather, however, every rank in `sends` gets the same part.
struct Request {
    Descriptor signature = {}; ///< must be the same on all ranks
    ConstBuffer in = {};       ///< empty if this rank contributes nothing
    Buffer out = {};           ///< empty if this rank receives nothing; may be `in`
    PartSizes sends = {};      ///< elements of `in` for each rank
    PartSizes expects = {};    ///< elements of `out` from each rank
};

/// Makes the requests of one rank. Every transport uses it, so all check the same arguments with
/// the same error texts.
/// @throws ContractViolation  an argument is wrong.
struct RequestsOf {
    int rank = 0;
    int size = 1;

    using Tables = std::optional<Counts>; ///< none: all parts are equal

    [[nodiscard]] Request all_reduce(Buffer buffer, ReduceOp op) const;
    [[nodiscard]] Request all_reduce(Buffer buffer, ReduceOp op, double factor) const;
    [[nodiscard]] Request reduce(Buffer buffer, ReduceOp op, int root) const;
    [[nodiscard]] Request broadcast(Buffer buffer, int root) const;
    [[nodiscard]] Request barrier() const { return {}; }

    [[nodiscard]] Request all_gather(ConstBuffer in, Buffer out, Tables counts = {}) const;
    [[nodiscard]] Request
    reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Tables counts = {}) const;
    [[nodiscard]] Request reduce_scatter(
        ConstBuffer in, Buffer out, ReduceOp op, double factor, Tables counts = {}
    ) const;
    [[nodiscard]] Request gather(ConstBuffer in, Buffer out, int root, Tables counts = {}) const;
    [[nodiscard]] Request scatter(ConstBuffer in, Buffer out, int root, Tables counts = {}) const;
    [[nodiscard]] Request all_to_all(ConstBuffer in, Buffer out) const;
    [[nodiscard]] Request
    all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) const;

private:
    /// The sizes of the parts of `whole`. This rank's part has the size of `part`, and `part` may
    /// be at that place in `whole`.
    [[nodiscard]] PartSizes divide(ConstBuffer part, ConstBuffer whole, Tables const& counts) const;
    [[nodiscard]] static Descriptor by_parts(
        Collective collective,
        ConstBuffer part,
        Tables const& counts,
        int root = 0,
        ReduceOp op = ReduceOp::sum
    ) {
        return {collective, part.dtype, op, root, counts ? 0 : part.count, counts.has_value()};
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/checks.hpp

/// @file
/// The checks of every communicator before any data moves. Checks of a rank's own arguments throw
/// ContractViolation on that rank. Checks across ranks throw Mismatch on all of them.

namespace joinable { inline namespace v0 { namespace detail {

void check_reduction(ConstBuffer buffer, ReduceOp op);

void check_scaled(ConstBuffer buffer, ReduceOp op);

void check_memory(ConstBuffer buffer);

/// `what` names the role of the rank: "root", "destination".
void check_rank(std::string_view what, int rank, int size);

inline void check_root(int root, int size) {
    check_rank("root", root, size);
}

void check_same_dtype(ConstBuffer a, ConstBuffer b);

void check_count(std::string_view what, std::size_t expected, std::size_t given);

[[nodiscard]] bool overlap(ConstBuffer a, ConstBuffer b) noexcept;

/// Any rank may write one part of a large message while another still reads the next. `part` must
/// therefore lie outside of `whole`, or start exactly at element `own` of it.
void check_place(ConstBuffer part, ConstBuffer whole, std::size_t own);

/// `in` and `out` have one part of equal size for each rank.
void check_parts(ConstBuffer in, ConstBuffer out, int size);

void check_apart(ConstBuffer in, ConstBuffer out);

/// `whole` must have `size` times as many elements as `part`, of the same dtype.
void check_share(ConstBuffer part, ConstBuffer whole, int size);

/// The number of elements before the share of `rank`.
[[nodiscard]] constexpr std::size_t offset_of(Counts counts, std::size_t rank) noexcept {
    std::size_t sum = 0;
    for (std::size_t const count : counts.first(rank)) {
        sum += count;
    }
    return sum;
}

/// `counts` must have one entry per rank, and their sum must be the elements of `whole`.
void check_counts(Counts counts, ConstBuffer whole, int size);

/// The same; `part` must also have this rank's count of elements.
void check_counts(Counts counts, ConstBuffer part, ConstBuffer whole, int rank, int size);

/// Checks that all ranks ask for the same number of bytes. `sizes` has what each rank asks for, by
/// rank. `doing` says what they do.
/// @throws Mismatch  on all ranks, because they compare the same sizes.
void check_same_size(std::span<std::uint64_t const> sizes, std::string_view doing = "share memory");

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/checks.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_reduction(ConstBuffer buffer, ReduceOp op) {
    if ((op == ReduceOp::bit_and || op == ReduceOp::bit_or) && is_floating_point(buffer.dtype)) {
        throw ContractViolation{concat(
            "a reduction with ",
            name_of(op),
            " needs integers, but the elements are ",
            name_of(buffer.dtype)
        )};
    }
}

JOINABLE_DEFINITION void check_scaled(ConstBuffer buffer, ReduceOp op) {
    if (op != ReduceOp::sum || !is_floating_point(buffer.dtype)) {
        throw ContractViolation{concat(
            "a reduction with a factor is a sum of floating-point numbers, but was given ",
            name_of(op),
            " of ",
            name_of(buffer.dtype),
            "; leave the factor out, or convert the buffer"
        )};
    }
}

JOINABLE_DEFINITION void check_memory(ConstBuffer buffer) {
    if (buffer.data == nullptr && buffer.count != 0) {
        throw ContractViolation{
            concat("a collective was given a null pointer for ", buffer.count, " elements")
        };
    }
    if (buffer.count > static_cast<std::size_t>(PTRDIFF_MAX) / size_of(buffer.dtype)) {
        throw ContractViolation{concat(
            "a collective was given ",
            buffer.count,
            " elements of ",
            name_of(buffer.dtype),
            ", more than any memory has: did a size below 0 wrap around?"
        )};
    }
}

JOINABLE_DEFINITION void check_rank(std::string_view what, int rank, int size) {
    if (rank < 0 || rank >= size) {
        throw ContractViolation{
            concat(what, " ", rank, " is no rank of a communicator of ", size, " ranks")
        };
    }
}

JOINABLE_DEFINITION void check_same_dtype(ConstBuffer a, ConstBuffer b) {
    if (a.dtype != b.dtype) {
        throw ContractViolation{concat(
            "a collective needs two buffers of one dtype, but got ",
            name_of(a.dtype),
            " and ",
            name_of(b.dtype)
        )};
    }
}

JOINABLE_DEFINITION void
check_count(std::string_view what, std::size_t expected, std::size_t given) {
    if (expected != given) {
        throw ContractViolation{
            concat(what, " of a collective must have ", expected, " elements here, but has ", given)
        };
    }
}

JOINABLE_DEFINITION bool overlap(ConstBuffer a, ConstBuffer b) noexcept {
    std::less<> const before; // defined for pointers into different objects, too
    auto const* const first = static_cast<std::byte const*>(a.data);
    auto const* const second = static_cast<std::byte const*>(b.data);
    return a.count != 0 && b.count != 0 && before(first, second + b.bytes()) &&
           before(second, first + a.bytes());
}

JOINABLE_DEFINITION void check_place(ConstBuffer part, ConstBuffer whole, std::size_t own) {
    if (overlap(part, whole) &&
        static_cast<std::byte const*>(part.data) !=
            static_cast<std::byte const*>(whole.data) + own * size_of(whole.dtype)) {
        throw ContractViolation{
            "the input and the output of a collective overlap: they must lie apart, or the smaller "
            "one must be this rank's part of the other"
        };
    }
}

JOINABLE_DEFINITION void check_parts(ConstBuffer in, ConstBuffer out, int size) {
    check_memory(in);
    check_memory(out);
    if (in.dtype != out.dtype || in.count != out.count ||
        in.count % static_cast<std::size_t>(size) != 0) {
        throw ContractViolation{concat(
            "an all_to_all over ",
            size,
            " ranks without counts needs two buffers of one dtype and count, a multiple of ",
            size,
            ", but got ",
            in.count,
            " of ",
            name_of(in.dtype),
            " and ",
            out.count,
            " of ",
            name_of(out.dtype)
        )};
    }
}

JOINABLE_DEFINITION void check_apart(ConstBuffer in, ConstBuffer out) {
    if (overlap(in, out)) {
        throw ContractViolation{"the input and the output of an all_to_all must not overlap"};
    }
}

JOINABLE_DEFINITION void check_share(ConstBuffer part, ConstBuffer whole, int size) {
    check_memory(part);
    check_memory(whole);
    auto const ranks = static_cast<std::size_t>(size); // a product could overflow
    if (part.dtype != whole.dtype || whole.count % ranks != 0 ||
        whole.count / ranks != part.count) {
        throw ContractViolation{concat(
            "a collective over ",
            size,
            " ranks needs one buffer of ",
            size,
            " times the elements of the other and the same dtype, but got ",
            part.count,
            " of ",
            name_of(part.dtype),
            " and ",
            whole.count,
            " of ",
            name_of(whole.dtype)
        )};
    }
}

JOINABLE_DEFINITION void check_counts(Counts counts, ConstBuffer whole, int size) {
    check_memory(whole);
    if (counts.size() != static_cast<std::size_t>(size)) {
        throw ContractViolation{concat(
            "a collective over ", size, " ranks needs ", size, " counts, but got ", counts.size()
        )};
    }
    std::size_t left = whole.count; // a sum could overflow
    for (std::size_t const count : counts) {
        if (count > left) {
            left = whole.count + 1;
            break;
        }
        left -= count;
    }
    if (left != 0) {
        throw ContractViolation{concat(
            "the counts of a collective must add up to the ",
            whole.count,
            " elements of the buffer that they divide, but they add up to ",
            left > whole.count ? "more" : "less"
        )};
    }
}

JOINABLE_DEFINITION void
check_counts(Counts counts, ConstBuffer part, ConstBuffer whole, int rank, int size) {
    check_memory(part);
    check_same_dtype(part, whole);
    check_counts(counts, whole, size);
    check_count("this rank's own part", counts[static_cast<std::size_t>(rank)], part.count);
}

JOINABLE_DEFINITION void
check_same_size(std::span<std::uint64_t const> sizes, std::string_view doing) {
    std::vector<int> ranks;
    std::string text =
        concat("ranks ", doing, " of different sizes: rank 0 of ", sizes[0], " bytes");
    for (std::size_t rank = 1; rank < sizes.size(); ++rank) {
        if (sizes[rank] != sizes[0]) {
            ranks.push_back(static_cast<int>(rank));
            text += concat(", rank ", rank, " of ", sizes[rank]);
        }
    }
    if (!ranks.empty()) {
        throw Mismatch{ranks, text + "; give the same count of the same elements on every rank"};
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/request.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Request RequestsOf::all_reduce(Buffer buffer, ReduceOp op) const {
    check_memory(buffer);
    check_reduction(buffer, op);
    return {{Collective::all_reduce, buffer.dtype, op, 0, buffer.count}, buffer, buffer};
}

JOINABLE_DEFINITION Request
RequestsOf::all_reduce(Buffer buffer, ReduceOp op, double factor) const {
    check_memory(buffer);
    check_scaled(buffer, op);
    return {
        {Collective::scaled_all_reduce, buffer.dtype, op, 0, buffer.count, false, factor},
        buffer,
        buffer
    };
}

JOINABLE_DEFINITION Request RequestsOf::reduce(Buffer buffer, ReduceOp op, int root) const {
    check_memory(buffer);
    check_reduction(buffer, op);
    check_root(root, size);
    return {
        {Collective::reduce, buffer.dtype, op, root, buffer.count},
        buffer,
        rank == root ? buffer : Buffer{}
    };
}

JOINABLE_DEFINITION Request RequestsOf::broadcast(Buffer buffer, int root) const {
    check_memory(buffer);
    check_root(root, size);
    return {
        {Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count},
        rank == root ? ConstBuffer{buffer} : ConstBuffer{},
        buffer
    };
}

JOINABLE_DEFINITION Request
RequestsOf::all_gather(ConstBuffer in, Buffer out, Tables counts) const {
    PartSizes const parts = divide(in, out, counts);
    return {
        by_parts(Collective::all_gather, in, counts), in, out, PartSizes::equal(in.count), parts
    };
}

JOINABLE_DEFINITION Request
RequestsOf::reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Tables counts) const {
    PartSizes const parts = divide(out, in, counts);
    check_reduction(in, op);
    return {
        by_parts(Collective::reduce_scatter, out, counts, 0, op),
        in,
        out,
        parts,
        PartSizes::equal(out.count)
    };
}

JOINABLE_DEFINITION Request RequestsOf::reduce_scatter(
    ConstBuffer in, Buffer out, ReduceOp op, double factor, Tables counts
) const {
    check_scaled(in, op);
    Request request = reduce_scatter(in, out, op, counts);
    request.signature.collective = Collective::scaled_reduce_scatter;
    request.signature.factor = factor;
    return request;
}

JOINABLE_DEFINITION Request
RequestsOf::gather(ConstBuffer in, Buffer out, int root, Tables counts) const {
    check_memory(in);
    check_root(root, size);
    bool const is_root = rank == root;
    return {
        by_parts(Collective::gather, in, counts, root),
        in,
        is_root ? out : Buffer{},
        PartSizes::only(root, in.count),
        is_root ? divide(in, out, counts) : PartSizes{}
    };
}

JOINABLE_DEFINITION Request
RequestsOf::scatter(ConstBuffer in, Buffer out, int root, Tables counts) const {
    check_memory(out);
    check_root(root, size);
    bool const is_root = rank == root;
    return {
        by_parts(Collective::scatter, out, counts, root),
        is_root ? in : ConstBuffer{},
        out,
        is_root ? divide(out, in, counts) : PartSizes{},
        PartSizes::only(root, out.count)
    };
}

JOINABLE_DEFINITION Request RequestsOf::all_to_all(ConstBuffer in, Buffer out) const {
    check_parts(in, out, size);
    check_apart(in, out);
    std::size_t const share = in.count / static_cast<std::size_t>(size);
    PartSizes const parts = PartSizes::equal(share);
    return {{Collective::all_to_all, in.dtype, ReduceOp::sum, 0, share}, in, out, parts, parts};
}

JOINABLE_DEFINITION Request
RequestsOf::all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) const {
    check_same_dtype(in, out);
    check_counts(counts_in, in, size);
    check_counts(counts_out, out, size);
    check_apart(in, out);
    return {
        by_parts(Collective::all_to_all, in, counts_in),
        in,
        out,
        PartSizes::of(counts_in),
        PartSizes::of(counts_out)
    };
}

JOINABLE_DEFINITION PartSizes
RequestsOf::divide(ConstBuffer part, ConstBuffer whole, Tables const& counts) const {
    auto const index = static_cast<std::size_t>(rank);
    if (counts) {
        check_counts(*counts, part, whole, rank, size);
        check_place(part, whole, offset_of(*counts, index));
        return PartSizes::of(*counts);
    }
    check_share(part, whole, size);
    check_place(part, whole, part.count * index);
    return PartSizes::equal(part.count);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/collective_members.hpp

/// @file
/// The collectives as members of a communicator. A transport derives from one of these classes and
/// implements one function, `Work post(Request const&)`. It keeps post() private and makes
/// BasicCollectives<Derived, Work> a friend. A transport that lacks some collectives derives from
/// the smaller class, or says what it offers, so that its communicator does not model the other
/// capabilities.

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of every communicator.
template <class Derived, class Work>
class BasicCollectives {
public:
    /// In place.
    Work all_reduce(Buffer buffer, ReduceOp op) { return start(requests().all_reduce(buffer, op)); }
    /// Copies the buffer of `root` to all ranks.
    Work broadcast(Buffer buffer, int root) { return start(requests().broadcast(buffer, root)); }
    /// Explains what is missing.
    template <class T = Buffer>
    Work broadcast(T const& buffer) {
        static_assert(
            sizeof(T) == 0,
            "broadcast: say from which rank the buffer is copied, as in comm.broadcast(buffer, 0)"
        );
        return broadcast(buffer, 0);
    }
    /// Blocks until every rank has called it.
    void barrier() { start(requests().barrier()).wait(); }

protected:
    [[nodiscard]] RequestsOf requests() const noexcept {
        auto const& comm = static_cast<Derived const&>(*this);
        return {comm.rank(), comm.size()};
    }
    [[nodiscard]] Work start(Request const& request) {
        return static_cast<Derived&>(*this).post(request);
    }
};

/// Says which collectives a communicator has beyond those of every communicator.
struct OffersAll {
    static constexpr bool scaled_sums = true;
    static constexpr bool reduce = true;
    static constexpr bool all_gather = true;
    static constexpr bool reduce_scatter = true;
    static constexpr bool scaled_scattered_sums = true;
    static constexpr bool gather = true;
    static constexpr bool scatter = true;
    static constexpr bool all_to_all = true;
};

/// The collectives of all capabilities that `Offers` names.
template <class Derived, class Work, class Offers = OffersAll>
class Collectives : public BasicCollectives<Derived, Work> {
public:
    using BasicCollectives<Derived, Work>::all_reduce;
    /// Sums each rank's buffer times that rank's factor, in place. The dtype is floating-point, and
    /// `op` is sum. Either all ranks give a factor or none does.
    Work all_reduce(Buffer buffer, ReduceOp op, double factor)
        requires(Offers::scaled_sums)
    {
        return this->start(this->requests().all_reduce(buffer, op, factor));
    }

    /// In place at the root; the other ranks' buffers do not change.
    Work reduce(Buffer buffer, ReduceOp op, int root)
        requires(Offers::reduce)
    {
        return this->start(this->requests().reduce(buffer, op, root));
    }

    /// `out` has `size()` times the elements of `in`; `in` may be this rank's part of `out`.
    Work all_gather(ConstBuffer in, Buffer out)
        requires(Offers::all_gather)
    {
        return this->start(this->requests().all_gather(in, out));
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    Work all_gather(ConstBuffer in, Buffer out, Counts counts)
        requires(Offers::all_gather)
    {
        return this->start(this->requests().all_gather(in, out, counts));
    }

    /// `in` has `size()` times the elements of `out`; `out` may be this rank's part of `in`.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op)
        requires(Offers::reduce_scatter)
    {
        return this->start(this->requests().reduce_scatter(in, out, op));
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Counts counts)
        requires(Offers::reduce_scatter)
    {
        return this->start(this->requests().reduce_scatter(in, out, op, counts));
    }

    /// Sums each rank's `in` times that rank's factor. The dtype is floating-point, and `op` is
    /// sum. Either all ranks give a factor or none does.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor)
        requires(Offers::scaled_scattered_sums)
    {
        return this->start(this->requests().reduce_scatter(in, out, op, factor));
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor, Counts counts)
        requires(Offers::scaled_scattered_sums)
    {
        return this->start(this->requests().reduce_scatter(in, out, op, factor, counts));
    }

    /// At the root `out` has `size()` times the elements of `in`, and `in` may be its part. Other
    /// ranks ignore `out`.
    Work gather(ConstBuffer in, Buffer out, int root)
        requires(Offers::gather)
    {
        return this->start(this->requests().gather(in, out, root));
    }
    /// Rank r contributes counts[r] elements; only the root reads `counts`.
    Work gather(ConstBuffer in, Buffer out, int root, Counts counts)
        requires(Offers::gather)
    {
        return this->start(this->requests().gather(in, out, root, counts));
    }

    /// At the root `in` has `size()` times the elements of `out`, and `out` may be its part. Other
    /// ranks ignore `in`.
    Work scatter(ConstBuffer in, Buffer out, int root)
        requires(Offers::scatter)
    {
        return this->start(this->requests().scatter(in, out, root));
    }
    /// Rank r receives counts[r] elements; only the root reads `counts`.
    Work scatter(ConstBuffer in, Buffer out, int root, Counts counts)
        requires(Offers::scatter)
    {
        return this->start(this->requests().scatter(in, out, root, counts));
    }

    /// Sends part r of `in` to rank r, which stores it as this rank's part of `out`. Both have the
    /// same count, a multiple of `size()`; they do not overlap.
    Work all_to_all(ConstBuffer in, Buffer out)
        requires(Offers::all_to_all)
    {
        return this->start(this->requests().all_to_all(in, out));
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    Work all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out)
        requires(Offers::all_to_all)
    {
        return this->start(this->requests().all_to_all(in, out, counts_in, counts_out));
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/tuning.hpp

/// @file
/// Thresholds between two ways of doing the same thing. None of them changes a result.
/// tests/benchmarks/tune.py measures alternatives to each number and prints this table again.

namespace joinable { inline namespace v0 { namespace detail { namespace tuning {

/// Up to this many bytes every rank combines all contributions for itself; beyond it ranks share
/// the work.
inline constexpr std::size_t slot_bytes = 2048;
/// Up to this many bytes in all, each rank has one chunk; beyond it there are several, which others
/// may take over.
inline constexpr std::size_t one_chunk_bytes = std::size_t{256} << 10U;
inline constexpr std::size_t chunks_per_rank = 4;
inline constexpr std::size_t largest_chunk_bytes = std::size_t{256} << 10U;

/// A message moves in slices of this many bytes if other ranks cannot reach some rank's buffer,
/// unless all of it fits in this many slices. If ranks share cores, each meeting costs a context
/// switch.
inline constexpr std::size_t slice_bytes = std::size_t{128} << 10U;
inline constexpr std::size_t crowded_slice_bytes = std::size_t{512} << 10U;
inline constexpr std::size_t slices_per_ring = 4;

/// How often a wait checks before it yields its core: if every rank has a core, and if not.
inline constexpr int spins = 200;
inline constexpr int crowded_spins = 20;
/// How often a wait yields before it sleeps.
inline constexpr int yields = 100;

}}}} // namespace joinable::v0::detail::tuning

// ---- joinable/communicator/shared_memory/board/arrival_line.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Whether every rank combines all contributions for itself; else the ranks share the work in
/// chunks.
[[nodiscard]] inline bool is_small(Descriptor const& said) noexcept {
    bool const leaves_all_with_one_share =
        said.collective == Collective::all_reduce || said.collective == Collective::broadcast ||
        said.collective == Collective::barrier || said.collective == Collective::reduce;
    return leaves_all_with_one_share && said.count * size_of(said.dtype) <= tuning::slot_bytes;
}

/// One rank's arrival in one collective, on one cache line. A small message needs no other line.
///
/// `word` holds, from the highest bit: frozen (1 bit), has counts (1), root (13), descriptor (11),
/// inline count (7), sequence number (31). An inline count of 0 means that the payload begins with
/// the count, which is compared unless there are counts. A rank arrives by one compare-and-swap on
/// `word`; an abort sets the frozen bit. One step thus decides whether a rank has arrived before an
/// abort, and all ranks see the same.
struct alignas(64) ArrivalLine {
    std::atomic<std::uint64_t> word{empty};
    std::array<std::uint64_t, 7> payload{};

    static constexpr std::size_t inline_bytes = 56;
    // The payload of a large collective:
    static constexpr std::size_t count = 0;
    static constexpr std::size_t in = 1;  ///< address of the input, as an offset from the board
    static constexpr std::size_t out = 2; ///< of the output, likewise
    static constexpr std::size_t factor = 3;
    static constexpr std::size_t ring = 4; ///< size of the ring that has both, in bytes; 0: no ring
    static constexpr std::uint64_t frozen = std::uint64_t{1} << 63U;
    static constexpr std::uint64_t sequence_mask = (std::uint64_t{1} << 31U) - 1;
    static constexpr std::uint64_t empty = sequence_mask; ///< no collective in a fresh slot has it

    static std::uint64_t
    encode(std::uint64_t sequence, Descriptor const& said, bool is_inline) noexcept {
        std::uint64_t const inline_count = is_inline ? said.count + 1 : 0;
        return (sequence & sequence_mask) | inline_count << 31U | said.word() << 38U |
               static_cast<std::uint64_t>(said.has_counts) << 62U;
    }
    [[nodiscard]] static bool tells_count(std::uint64_t word) noexcept {
        return (word >> 31U & 0x7fU) == 0 && (word >> 62U & 1U) == 0;
    }
    [[nodiscard]] static Descriptor
    decode(std::uint64_t word, std::array<std::uint64_t, 7> const& payload) noexcept {
        std::uint64_t const inline_count = word >> 31U & 0x7fU;
        return Descriptor::of_word(
            word >> 38U & 0xff'ffffU,
            static_cast<std::size_t>(inline_count != 0 ? inline_count - 1 : payload[count]),
            (word >> 62U & 1U) != 0
        );
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/reasons.hpp

/// @file
/// The reasons why a collective ends on all ranks, in the same words for every transport.

namespace joinable { inline namespace v0 { namespace detail {

/// The maximum length of a reason's text between ranks, in bytes.
inline constexpr std::size_t most_reason_text = 4000;
/// The end of a text that was cut.
inline constexpr std::string_view cut_mark = "...";
/// How many bytes to keep of a text longer than `most` bytes, before that mark. It keeps whole
/// UTF-8 characters.
[[nodiscard]] inline std::size_t
length_before_cut(std::string_view text, std::size_t most = most_reason_text) noexcept {
    std::size_t length = most - cut_mark.size();
    while (length != 0 && (static_cast<unsigned char>(text[length]) & 0xc0U) == 0x80U) {
        --length;
    }
    return length;
}

/// `rank` has finished with its communicator.
[[nodiscard]] inline AbortReason reason_of_leaving(int rank) {
    return {
        FailureKind::peer_failed,
        {rank},
        concat("rank ", rank, " left while others wait for it"),
        -1,
        true
    };
}

/// Whether a reason says that, whatever precedes it.
[[nodiscard]] inline bool is_leaving(AbortReason const& reason) {
    return reason.kind == FailureKind::peer_failed &&
           reason.message.ends_with(" left while others wait for it");
}

/// The ranks `overdue` "did not <do>" in time, while `rank` does what `meanwhile` says.
[[nodiscard]] inline AbortReason reason_of_delay(
    std::vector<int> const& overdue,
    std::string_view to_do,
    std::chrono::nanoseconds deadline,
    int rank,
    std::string const& meanwhile
) {
    double const seconds = std::chrono::duration<double>(deadline).count();
    return {
        FailureKind::timed_out,
        overdue,
        concat(
            ranks_text(overdue),
            " did not ",
            to_do,
            " within ",
            seconds,
            " s, while rank ",
            rank,
            " ",
            meanwhile
        )
    };
}

/// One side of a message.
[[nodiscard]] inline std::string
text_of_message(bool is_send, int tag, std::uint64_t count, DType dtype) {
    return concat(
        is_send ? "a send of " : "a receive of ",
        count,
        " ",
        joinable::name_of(dtype),
        " with tag ",
        tag
    );
}
/// The two sides of a message differ: `mine` on `rank`, `theirs` on `peer`.
[[nodiscard]] inline AbortReason
reason_of_messages(int rank, int peer, std::string const& mine, std::string const& theirs) {
    return {
        FailureKind::mismatch,
        rank == peer ? std::vector{rank}
                     : std::vector{(std::min)(rank, peer), (std::max)(rank, peer)},
        concat("messages between rank ", rank, " and rank ", peer, ": ", mine, " meets ", theirs)
    };
}

/// Why ranks cannot run their collectives together, if these differ. `said_by(rank)` is that rank's
/// Descriptor, or has text() and is_agreement() as a Descriptor has. Ranks that have the same ones find the same reason.
template <class SaidBy>
[[nodiscard]] std::optional<AbortReason> find_difference(int size, SaidBy const& said_by) {
    auto const first = said_by(0);
    AbortReason reason{FailureKind::mismatch, {}, {}};
    bool agrees = first.is_agreement(); // some rank
    for (int rank = 1; rank < size; ++rank) {
        if (auto const other = said_by(rank); !(other == first)) {
            agrees = agrees || other.is_agreement();
            reason.ranks.push_back(rank);
            reason.message += concat(", rank ", rank, " ", other.text());
        }
    }
    if (reason.ranks.empty()) {
        return std::nullopt;
    }
    reason.message =
        concat("ranks run different collectives: rank 0 ", first.text(), reason.message);
    if (agrees) {
        reason.message +=
            "; joined ranks follow only the participants of their guard: give any other collective to an "
            "Action or to shadowed(comm), and enter the same guards on all ranks, one after another";
    }
    return reason;
}

/// The same for tables of counts. sent(from, to) is what `from` sends to `to`, and expected(from,
/// to) is what `to` expects from `from`.
template <class Sent, class Expected>
[[nodiscard]] std::optional<AbortReason> find_difference_of_counts(
    int size, Descriptor const& said, Sent const& sent, Expected const& expected
) {
    for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
            if (sent(from, to) != expected(from, to)) {
                return AbortReason{
                    FailureKind::mismatch,
                    from == to ? std::vector{from}
                               : std::vector{(std::min)(from, to), (std::max)(from, to)},
                    concat(
                        "counts differ in ",
                        said.text(),
                        ": rank ",
                        from,
                        " has ",
                        sent(from, to),
                        " elements for rank ",
                        to,
                        ", which expects ",
                        expected(from, to)
                    )
                };
            }
        }
    }
    return std::nullopt;
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/stored_reason.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// An AbortReason in memory of fixed size, which another process may read. A longer text is cut and
/// ends in "...".
class StoredReason {
public:
    static constexpr std::size_t max_text = most_reason_text;

    void store(AbortReason const& reason) noexcept;

    [[nodiscard]] AbortReason load() const;

private:
    FailureKind kind_ = FailureKind::communication;
    bool has_left_ = false;
    int origin_ = -1;
    std::array<std::uint64_t, max_ranks / 64> ranks_{}; ///< a bit for each
    std::size_t length_ = 0;
    std::array<char, max_text> text_{};
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/stored_reason.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <cstring>
#include <string>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void StoredReason::store(AbortReason const& reason) noexcept {
    kind_ = reason.kind;
    has_left_ = reason.has_left;
    origin_ = reason.origin;
    ranks_.fill(0);
    for (int const rank : reason.ranks) {
        if (rank >= 0 && rank < max_ranks) {
            auto const at = static_cast<std::size_t>(rank);
            ranks_[at / 64] |= std::uint64_t{1} << at % 64;
        }
    }
    length_ = reason.message.size();
    bool const is_cut = length_ > max_text;
    if (is_cut) {
        length_ = length_before_cut(reason.message);
        std::memcpy(text_.data() + length_, cut_mark.data(), cut_mark.size());
    }
    std::memcpy(text_.data(), reason.message.data(), length_);
    length_ += is_cut ? cut_mark.size() : 0;
}

JOINABLE_DEFINITION AbortReason StoredReason::load() const {
    AbortReason reason{kind_, {}, std::string{text_.data(), length_}, origin_, has_left_};
    for (int rank = 0; rank < max_ranks; ++rank) {
        auto const at = static_cast<std::size_t>(rank);
        if ((ranks_[at / 64] >> at % 64 & 1U) != 0) {
            reason.ranks.push_back(rank);
        }
    }
    return reason;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/deadline.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The time at which a wait that starts now ends. From now to a year from now, because the sum, or
/// the time that is left, could overflow.
[[nodiscard]] inline std::chrono::steady_clock::time_point end_of_wait(
    std::chrono::nanoseconds deadline,
    std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now()
) noexcept {
    constexpr std::chrono::nanoseconds year = std::chrono::hours{24 * 365};
    return now + std::clamp(deadline, std::chrono::nanoseconds{0}, year);
}

/// Removes from `overdue` the ranks that have reported that they are working. Returns how long to
/// wait for the first of them, or the deadline if none was removed. `waited_for(rank)` is how long
/// this rank has waited since that rank's last report.
template <class WaitedFor>
[[nodiscard]] std::chrono::nanoseconds take_ranks_at_work(
    std::vector<int>& overdue, std::chrono::nanoseconds deadline, WaitedFor const& waited_for
) {
    std::chrono::nanoseconds left = deadline;
    std::erase_if(overdue, [&](int rank) {
        std::chrono::nanoseconds const waited = waited_for(rank);
        bool const is_at_work = waited < deadline;
        left = is_at_work ? (std::min)(left, deadline - waited) : left;
        return is_at_work;
    });
    return left;
}

/// How long a work has been polled: the sum of the times between its tests.
class PolledTime {
public:
    /// A gap between two tests counts as at most so much, because a rank may compute there for a
    /// long time.
    static constexpr std::chrono::nanoseconds gap_of_tests = std::chrono::milliseconds{10};
    /// A rank that blocks looks again at once, so a long gap means that its machine is busy, or that
    /// its process was stopped. It counts as at most half the deadline, so the rank looks again.
    static constexpr std::chrono::nanoseconds gap_of_waits = (std::chrono::nanoseconds::max)();

    /// Call this when a test finds nothing. Whether the deadline has passed.
    [[nodiscard]] bool reaches(
        std::chrono::nanoseconds deadline, std::chrono::nanoseconds longest_gap = gap_of_tests
    ) noexcept {
        auto const now = std::chrono::steady_clock::now();
        if (tested_at_ != std::chrono::steady_clock::time_point{}) {
            longest_gap = (std::min)(longest_gap, (std::max)(deadline / 2, gap_of_tests));
            polled_ += (std::min)(std::chrono::nanoseconds{now - tested_at_}, longest_gap);
        }
        tested_at_ = now;
        return polled_ >= deadline;
    }
    [[nodiscard]] std::chrono::nanoseconds count() const noexcept { return polled_; }
    void set(std::chrono::nanoseconds polled) noexcept { polled_ = polled; }

private:
    std::chrono::steady_clock::time_point tested_at_{}; ///< never, at first
    std::chrono::nanoseconds polled_{0};
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/futex.hpp

#if defined(__linux__)
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

/// @file
/// Lets a thread sleep until a word changes, even one that other processes write. Besides
/// config.hpp, which must not include system headers, this is the only header that differs between
/// systems.

namespace joinable { inline namespace v0 { namespace detail {

using FutexWord = std::atomic<std::uint32_t>;
static_assert(sizeof(FutexWord) == sizeof(std::uint32_t) && FutexWord::is_always_lock_free);

#if defined(__linux__)

/// Returns soon after `word` has changed from `seen` and a thread has called futex_wake_all, or at
/// `end`. It may also return spuriously, so the caller checks again.
inline void futex_wait(
    FutexWord& word, std::uint32_t seen, std::chrono::steady_clock::time_point end
) noexcept {
    auto const since_boot = end.time_since_epoch(); // the steady clock is CLOCK_MONOTONIC
    auto const seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    std::timespec until{};
    until.tv_sec = static_cast<decltype(until.tv_sec)>(seconds.count());
    until.tv_nsec =
        static_cast<decltype(until.tv_nsec)>(std::chrono::nanoseconds{since_boot - seconds}.count()
        );
    // FUTEX_WAIT takes a duration; this takes the time at which the wait ends.
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

inline void futex_wake_all(FutexWord& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

inline void
futex_wait(FutexWord& word, std::uint32_t seen, std::chrono::steady_clock::time_point end) {
    if (word.load() == seen && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::microseconds{50});
    }
}
inline void futex_wake_all(FutexWord&) noexcept {}

#endif

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/waiting.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// For a thread that others always wake: it sleeps until the deadline.
struct SleepThrough {
    constexpr std::chrono::nanoseconds operator()() const noexcept {
        return (std::chrono::nanoseconds::max)();
    }
};

/// Waits in three stages: spins while an answer usually takes less than a system call, yields so
/// that more ranks than cores make progress, then sleeps. A yield lasts while other programs use
/// the core, so the yielding stage also ends by time: a wait that checks for deaths before it
/// sleeps then does so soon. Signalling a change costs one load unless a rank sleeps. The object
/// may lie in memory that several processes share.
class WaitingRoom {
public:
    /// After this time a wait no longer yields.
    static constexpr std::chrono::milliseconds longest_yielding{10};

    /// Spins for some microseconds if every rank has a core. Longer spinning would delay a peer
    /// that shares its core with another program.
    explicit WaitingRoom(int ranks)
        : is_crowded_{static_cast<unsigned>(ranks) > std::thread::hardware_concurrency()} {}

    /// Whether there are more ranks than cores.
    [[nodiscard]] bool is_crowded() const noexcept { return is_crowded_; }

    /// Returns true once `ready()`, false at the deadline. The values that `ready` reads must be
    /// changed before wake(), and read here, by sequentially consistent operations. Either the
    /// waker then sees the sleeper, or the sleeper sees the change. `before_sleep()` returns the
    /// longest time to sleep; it may change values that `ready` reads.
    template <class Ready, class BeforeSleep = SleepThrough>
    bool wait(
        Ready const& ready, std::chrono::nanoseconds deadline, BeforeSleep const& before_sleep = {}
    ) {
        int const spins = is_crowded_ ? tuning::crowded_spins : tuning::spins;
        for (int i = 0; i < spins; ++i) {
            if (ready()) {
                return true;
            }
            cpu_relax();
        }
        auto const start = std::chrono::steady_clock::now();
        for (int i = 0; i < tuning::yields; ++i) {
            if (ready()) {
                return true;
            }
            if (std::chrono::steady_clock::now() - start >= longest_yielding) {
                break;
            }
            std::this_thread::yield();
        }
        return sleep(ready, end_of_wait(deadline, start), before_sleep);
    }
    /// The last stage only, for a thread that can do nothing without an answer.
    template <class Ready, class BeforeSleep = SleepThrough>
    bool sleep(
        Ready const& ready,
        std::chrono::steady_clock::time_point end,
        BeforeSleep const& before_sleep = {}
    ) {
        sleepers_.fetch_add(1);
        std::uint32_t seen = wakes_.load(); // before the last check: a later wake ends the sleep
        bool is_ready = ready();
        while (!is_ready && std::chrono::steady_clock::now() < end) {
            futex_wait(wakes_, seen, (std::min)(end, end_of_wait(before_sleep())));
            seen = wakes_.load();
            is_ready = ready();
        }
        sleepers_.fetch_sub(1);
        return is_ready;
    }

    [[nodiscard]] bool has_sleepers() const noexcept { return sleepers_.load() != 0; }
    void wake() noexcept {
        if (has_sleepers()) {
            wakes_.fetch_add(1);
            futex_wake_all(wakes_);
        }
    }

private:
    bool is_crowded_;
    std::atomic<int> sleepers_{0}; ///< including those that were killed while asleep
    FutexWord wakes_{0};
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/first_reason.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The reason why something ended on all ranks. The first writer wins. The work that ends it is
/// done once, or repeated where that has no effect. It lies in memory that processes share. A
/// writer may be killed or stopped at any point, so writers have unique numbers, below max_ranks.
///
/// take_over() replaces a dead writer. A stopped writer cannot be distinguished from a slow one and
/// may continue at any time. After a while another writer overtakes it, with a reason in another
/// place. The place that the state finally names holds the reason of all ranks.
class FirstReason {
public:
    static constexpr int nobody = max_ranks; ///< a writer that cannot die
    /// How long a writer may do nothing before another one overtakes it.
    static constexpr std::chrono::nanoseconds patience = std::chrono::seconds{1};

    /// Returns whether this writer was first. `close()` runs after the reason is written. If it was
    /// not first, another writer may still be writing, or may have died or been stopped: see
    /// take_over() and settle().
    template <class Close>
    bool give(AbortReason const& reason, int writer, Close const& close) noexcept {
        State const mine{Phase::writing, 0, writer};
        bool const is_first = change(State{}, mine);
        if (is_first) {
            write(mine, reason, close);
        }
        return is_first;
    }
    /// `writer` continues or starts the work of the `dead` writer. Returns false if there was
    /// nothing to do; another writer may still be writing.
    template <class Close>
    bool take_over(int dead, AbortReason const& reason, int writer, Close const& close) noexcept {
        State const seen{state_.load()};
        bool const is_of_dead = seen.phase() != Phase::given && seen.writer() == dead;
        if (seen.phase() != Phase::open && !is_of_dead) {
            return false;
        }
        Phase const phase = seen.phase() == Phase::open ? Phase::writing : seen.phase();
        State const mine{phase, seen.place(), writer};
        if (!change(seen, mine)) {
            return false;
        }
        if (phase == Phase::writing) {
            write(mine, reason, close);
        } else {
            finish(mine, close);
        }
        return true;
    }
    /// Returns when the reason is given. That takes some seconds at most, unless more ranks are
    /// stopped. A writer that does nothing for a while is overtaken: `writer` closes for it, or
    /// gives `reason`.
    /// @pre has_begun()
    template <class Close, class BeforeSleep>
    void settle(
        WaitingRoom& room,
        AbortReason const& reason,
        int writer,
        Close const& close,
        BeforeSleep const& before_sleep
    ) noexcept {
        for (;;) {
            State const seen{state_.load()};
            if (seen.phase() == Phase::given) {
                return;
            }
            auto const has_changed = [&] { return state_.load() != seen.word; };
            if (!room.wait(has_changed, patience, before_sleep)) {
                overtake(seen, reason, writer, close);
                room.wake();
            }
        }
    }

    /// Whether a writer has begun to give a reason, or has given it.
    [[nodiscard]] bool has_begun() const noexcept { return state().phase() != Phase::open; }
    [[nodiscard]] bool is_given() const noexcept { return state().phase() == Phase::given; }
    /// The writer that gives it, or gave it.
    [[nodiscard]] int writer() const noexcept { return state().writer(); }
    /// @pre a close() has begun
    [[nodiscard]] AbortReason reason() const {
        std::size_t const place = state().place();
        if (place == places) {
            return {
                FailureKind::communication,
                {},
                "the processes that were to tell why all ends were stopped, one after another"
            };
        }
        return reasons_[place].load();
    }

private:
    static constexpr std::size_t places = 3; ///< for reasons; the next number means none
    enum class Phase : std::uint8_t { open, writing, written, given };
    struct State {
        std::uint32_t word = 0;

        constexpr State() = default;
        constexpr explicit State(std::uint32_t of) noexcept : word{of} {}
        constexpr State(Phase phase, std::size_t place, int writer) noexcept
            : word{
                  static_cast<std::uint32_t>(phase) | static_cast<std::uint32_t>(place) << 2U |
                  static_cast<std::uint32_t>(writer) << 4U
              } {}
        [[nodiscard]] Phase phase() const noexcept { return static_cast<Phase>(word & 3U); }
        [[nodiscard]] std::size_t place() const noexcept { return word >> 2U & 3U; }
        [[nodiscard]] int writer() const noexcept { return static_cast<int>(word >> 4U); }
    };

    [[nodiscard]] State state() const noexcept { return State{state_.load()}; }
    bool change(State from, State to) noexcept {
        return state_.compare_exchange_strong(from.word, to.word);
    }
    template <class Close>
    void write(State mine, AbortReason const& reason, Close const& close) noexcept {
        reasons_[mine.place()].store(reason);
        State const written{Phase::written, mine.place(), mine.writer()};
        if (change(mine, written)) { // else this one was stopped, and overtaken
            finish(written, close);
        }
    }
    template <class Close>
    void finish(State written, Close const& close) noexcept {
        close();
        change(written, {Phase::given, written.place(), written.writer()});
    }
    template <class Close>
    void overtake(State seen, AbortReason const& reason, int writer, Close const& close) noexcept {
        if (seen.phase() == Phase::written) {
            finish(seen, close);
            return;
        }
        std::size_t const place = seen.place() + 1;
        State const mine{place == places ? Phase::written : Phase::writing, place, writer};
        if (!change(seen, mine)) {
            return;
        }
        if (place == places) {
            finish(mine, close);
        } else {
            write(mine, reason, close);
        }
    }

    std::atomic<std::uint32_t> state_{0};
    std::array<StoredReason, places> reasons_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/board.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's progress in its share of the chunks of a large collective. The rank resets it before
/// it arrives, when no rank uses the previous collective in that slot any more.
struct alignas(64) ChunkProgress {
    std::atomic<std::uint64_t> claimed{0}; ///< of its share, by any rank; may exceed it
    std::atomic<std::uint64_t> done{0};    ///< by this rank, of all shares; in slices: of its own
    std::atomic<std::uint64_t> lent{0};    ///< slices that it has copied to its ring so far
    std::atomic<bool> has_given_up{false}; ///< it copies no more slices

    void reset() noexcept;
};

/// The thread that computes for a rank: its own, in waits and tests, or a separate one.
enum class Worker : std::uint8_t { rank, helper };

/// The meeting place of one group's ranks. It does not know threads: ranks are numbers, and a rank
/// that waits or tests does the work. It lies in memory given to it, followed by its tables, and
/// holds no addresses. Ranks may therefore also be processes that share that memory.
class alignas(64) Board {
public:
    using Count = std::size_t;
    static constexpr std::size_t max_in_flight = 64; ///< collectives; a slot each

    /// @throws ContractViolation  `size` is below 1, or above the largest number in an arrival.
    static int checked(int size);

    /// The memory that create() needs.
    /// @throws ContractViolation  `size` is below 1, or above the largest number in an arrival.
    [[nodiscard]] static std::size_t bytes_for(int size) {
        return counts_at(checked(size)) + counts_per_arrival(size) * arrivals(size) * sizeof(Count);
    }
    /// The number of leading bytes that are used from the start. The rest is not touched before
    /// slot(), sends() or expects() are used.
    [[nodiscard]] static std::size_t bytes_at_start(int size) { return slots_at(checked(size)); }
    /// @pre `memory` is aligned for a Board, has bytes_for(size), and outlives the result, which
    /// need not be destroyed.
    static Board& create(int size, std::span<std::byte> memory);
    /// The board that another process created at `memory`.
    static Board& at_address(std::byte* memory) noexcept {
        return *std::launder(reinterpret_cast<Board*>(memory));
    }
    Board(Board const&) = delete;
    Board& operator=(Board const&) = delete;

    [[nodiscard]] int size() const noexcept { return size_; }

    /// An address as its distance from the board, for other ranks. The distance is the same in
    /// processes that map the memory at different addresses.
    [[nodiscard]] std::uint64_t place_of(void const* address) const noexcept {
        return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(this);
    }
    [[nodiscard]] std::byte* place_at(std::uint64_t place) noexcept;

    [[nodiscard]] ArrivalLine& line(int rank, std::uint64_t sequence) noexcept {
        return lines()[arrival(rank, sequence)];
    }
    [[nodiscard]] ChunkProgress& progress(int rank, std::uint64_t sequence) noexcept;
    /// Room for a contribution of `rank` that is too long for its line but not for a slot.
    [[nodiscard]] std::byte* slot(int rank, std::uint64_t sequence) noexcept {
        return at(slots_at(size_)) + arrival(rank, sequence) * tuning::slot_bytes;
    }

    /// The tables of `rank` in a collective by counts: the elements that it sends to each rank,
    /// then those that it expects from each. Unused memory is never touched.
    [[nodiscard]] std::span<Count> sends(int rank, std::uint64_t sequence) noexcept {
        return counts_of(rank, sequence).first(width(size_));
    }
    [[nodiscard]] std::span<Count> expects(int rank, std::uint64_t sequence) noexcept {
        return counts_of(rank, sequence).last(width(size_));
    }

    [[nodiscard]] bool has_arrived(int rank, std::uint64_t sequence) noexcept;
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence);

    /// `rank` has finished all collectives before this number.
    [[nodiscard]] std::atomic<std::uint64_t>& retired(int rank) noexcept {
        return state_of(rank).retired;
    }
    /// Collectives before this number are no longer used for `rank`. Once that is so for all ranks,
    /// their slots are free for reuse. The order of the two steps matters: a helper that this does
    /// not see yet sees that its rank has retired the collective, and skips it (begin_helping).
    [[nodiscard]] std::uint64_t release(int rank) noexcept;

    /// The steady clock's time of the last keep_alive() of `rank`; 0 is never.
    [[nodiscard]] std::atomic<std::chrono::steady_clock::rep>& alive_at(int rank) noexcept {
        return state_of(rank).alive_at;
    }

    /// The ranks that have not finished a collective that must end before `sequence` can start.
    [[nodiscard]] std::vector<int> holding_up(std::uint64_t sequence);

    /// The first reason wins. Returns when nothing can arrive any more. Writers are numbered as
    /// FirstReason says; the numbers differ from ranks if this is the board of a subgroup. If the
    /// first writer dies, mark_dead() must be called for it: `before_sleep` does so where no other
    /// process does. If the first writer is stopped, this reason may become the one of all ranks.
    template <class BeforeSleep = SleepThrough>
    void
    abort(AbortReason const& reason, int writer, BeforeSleep const& before_sleep = {}) noexcept {
        reason_.give(reason, writer, [this] { freeze(); });
        room.wake(); // also those that wait for other things than this board's end
        reason_.settle(room, reason, writer, [this] { freeze(); }, before_sleep);
    }
    /// Records that the writer with this number has died, anywhere, even in an abort. It had `rank`
    /// on this board; negative: none. `burier` is the writer that records the death, or
    /// FirstReason::nobody. The burier may itself die meanwhile and then be marked dead. Each rank
    /// that finds a writer dead may call this, so it may be called many times. Returns at once,
    /// although another writer may not have finished its own abort.
    void mark_dead(int rank, int number, AbortReason const& reason, int burier) noexcept;
    [[nodiscard]] bool is_dead(int rank) noexcept { return state_of(rank).is_dead.load(); }

    /// Between these calls a worker of `rank` may claim chunks of a collective.
    void begin_computing(int rank, Worker worker, std::uint64_t sequence) noexcept {
        computes(state_of(rank), worker).store(sequence);
    }
    void end_computing(int rank, Worker worker) noexcept {
        computes(state_of(rank), worker).store(nothing);
    }
    /// The same for a helper, which does not know which collectives its rank has finished. Returns
    /// whether the collective is still its rank's; if so, its slots stay unchanged until
    /// end_computing(). Call that even after false.
    [[nodiscard]] bool begin_helping(int rank, std::uint64_t sequence) noexcept {
        begin_computing(rank, Worker::helper, sequence);
        return retired(rank).load() <= sequence;
    }

    /// The ranks that may have claimed a chunk of a collective and not finished it.
    [[nodiscard]] std::vector<int> computing(std::uint64_t sequence);
    /// From now on no rank waits for a chunk of `rank`.
    void give_up_on(int rank) noexcept {
        state_of(rank).is_given_up.store(true);
        has_lost_.store(true);
        room.wake();
    }

    /// Whether some chunk of a collective will never be computed, because the rank that had claimed
    /// it died or was given up, and no other rank can still finish one. All ranks find the same.
    /// @pre all chunks are claimed
    [[nodiscard]] bool may_be_lost(std::uint64_t sequence) noexcept;

    /// Whether a rank is ending the board or has ended it. True on every rank that has failed
    /// because of that.
    [[nodiscard]] bool is_ending() const noexcept { return reason_.has_begun(); }
    /// True only if nothing can arrive any more; this does not change again.
    [[nodiscard]] bool is_aborted() const noexcept { return reason_.is_given(); }
    /// The writer that ends the board or has ended it. @pre is_ending()
    [[nodiscard]] int ended_by() const noexcept { return reason_.writer(); }
    /// @pre some line is frozen
    [[nodiscard]] AbortReason reason() const { return reason_.reason(); }

private:
    static constexpr std::uint64_t nothing = ~std::uint64_t{0};
    struct alignas(64) RankState {
        std::atomic<std::uint64_t> retired{0};
        std::atomic<std::chrono::steady_clock::rep> alive_at{0};
        std::array<std::atomic<std::uint64_t>, 2> computes{nothing, nothing}; ///< per worker
        std::atomic<bool> is_dead{false};
        std::atomic<bool> is_given_up{false}; ///< stopped within a chunk at some rank's deadline
    };

    [[nodiscard]] static std::atomic<std::uint64_t>&
    computes(RankState& state, Worker worker) noexcept {
        return state.computes[static_cast<std::size_t>(worker)];
    }

    [[nodiscard]] static bool may_compute(RankState const& state, std::uint64_t sequence) noexcept;

    void freeze() noexcept;

    explicit Board(int size) noexcept : room{size}, helpers_room{size}, size_{size} {}

    static constexpr std::size_t width(int size) noexcept { return static_cast<std::size_t>(size); }
    static constexpr std::size_t arrivals(int size) noexcept { return width(size) * max_in_flight; }
    static constexpr std::size_t counts_per_arrival(int size) noexcept { return 2 * width(size); }
    // The memory after the board has, for each rank: arrival lines, state, progress, slots, tables
    // of counts.
    static constexpr std::size_t lines_at() noexcept { return sizeof(Board); }
    static constexpr std::size_t ranks_at(int size) noexcept {
        return lines_at() + arrivals(size) * sizeof(ArrivalLine);
    }
    static constexpr std::size_t progress_at(int size) noexcept {
        return ranks_at(size) + width(size) * sizeof(RankState);
    }
    static constexpr std::size_t slots_at(int size) noexcept {
        return progress_at(size) + arrivals(size) * sizeof(ChunkProgress);
    }
    static constexpr std::size_t counts_at(int size) noexcept {
        return slots_at(size) + arrivals(size) * tuning::slot_bytes;
    }

    [[nodiscard]] std::byte* at(std::size_t offset) noexcept {
        return reinterpret_cast<std::byte*>(this) + offset;
    }
    [[nodiscard]] ArrivalLine* lines() noexcept {
        return std::launder(reinterpret_cast<ArrivalLine*>(at(lines_at())));
    }
    [[nodiscard]] RankState& state_of(int rank) noexcept {
        return std::launder(reinterpret_cast<RankState*>(at(ranks_at(size_))))[rank];
    }
    [[nodiscard]] static std::size_t arrival(int rank, std::uint64_t sequence) noexcept {
        return static_cast<std::size_t>(rank) * max_in_flight + sequence % max_in_flight;
    }
    [[nodiscard]] std::span<Count> counts_of(int rank, std::uint64_t sequence) noexcept;

public:
    WaitingRoom room;
    WaitingRoom helpers_room; ///< for threads that only wait for chunks to claim

private:
    int size_;
    std::atomic<bool> has_lost_{false};
    FirstReason reason_;
};
static_assert(std::is_trivially_destructible_v<Board>);

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/board/board.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void ChunkProgress::reset() noexcept {
    claimed.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    lent.store(0, std::memory_order_relaxed);
    has_given_up.store(false, std::memory_order_relaxed);
}

JOINABLE_DEFINITION int Board::checked(int size) {
    if (size < 1 || size > max_ranks) {
        throw ContractViolation{
            concat("a group needs between 1 and ", max_ranks, " ranks, but was given ", size)
        };
    }
    return size;
}

JOINABLE_DEFINITION Board& Board::create(int size, std::span<std::byte> memory) {
    auto* const board = ::new (memory.data()) Board{size};
    ::new (board->at(lines_at())) ArrivalLine[arrivals(size)];
    ::new (board->at(ranks_at(size))) RankState[width(size)];
    ::new (board->at(progress_at(size))) ChunkProgress[arrivals(size)];
    // Slots and tables of counts are not touched before they are used.
    ::new (board->at(counts_at(size))) Count[counts_per_arrival(size) * arrivals(size)];
    return *board;
}

JOINABLE_DEFINITION std::byte* Board::place_at(std::uint64_t place) noexcept {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it may lie outside of the board
    return reinterpret_cast<std::byte*>(
        reinterpret_cast<std::uintptr_t>(this) + static_cast<std::uintptr_t>(place)
    );
}

JOINABLE_DEFINITION ChunkProgress& Board::progress(int rank, std::uint64_t sequence) noexcept {
    return std::launder(reinterpret_cast<ChunkProgress*>(at(progress_at(size_)))
    )[arrival(rank, sequence)];
}

JOINABLE_DEFINITION bool Board::has_arrived(int rank, std::uint64_t sequence) noexcept {
    return (line(rank, sequence).word.load() & ArrivalLine::sequence_mask) ==
           (sequence & ArrivalLine::sequence_mask);
}

JOINABLE_DEFINITION std::vector<int> Board::missing(std::uint64_t sequence) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
        if (!has_arrived(rank, sequence)) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

JOINABLE_DEFINITION std::uint64_t Board::release(int rank) noexcept {
    RankState& state = state_of(rank);
    std::uint64_t const retired = state.retired.load();
    return (std::min)(retired, computes(state, Worker::helper).load());
}

JOINABLE_DEFINITION std::vector<int> Board::holding_up(std::uint64_t sequence) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
        if (release(rank) + max_in_flight <= sequence) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

JOINABLE_DEFINITION void
Board::mark_dead(int rank, int number, AbortReason const& reason, int burier) noexcept {
    if (is_aborted() && (rank < 0 || is_dead(rank))) {
        return; // else the ranks that find it would wake each other endlessly
    }
    reason_.take_over(number, reason, burier, [this] { freeze(); });
    if (rank >= 0) { // after that: a rank that sees it asks for the reason
        state_of(rank).is_dead.store(true);
        has_lost_.store(true);
    }
    room.wake();
}

JOINABLE_DEFINITION std::vector<int> Board::computing(std::uint64_t sequence) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
        if (may_compute(state_of(rank), sequence)) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

JOINABLE_DEFINITION bool Board::may_be_lost(std::uint64_t sequence) noexcept {
    bool is_left_undone = false;
    for (int rank = 0; has_lost_.load() && rank < size_; ++rank) {
        RankState const& state = state_of(rank);
        bool const has_claimed = may_compute(state, sequence);
        if (has_claimed && !state.is_dead.load() && !state.is_given_up.load()) {
            return false;
        }
        is_left_undone = is_left_undone || has_claimed;
    }
    return is_left_undone;
}

JOINABLE_DEFINITION bool
Board::may_compute(RankState const& state, std::uint64_t sequence) noexcept {
    return std::any_of(state.computes.begin(), state.computes.end(), [&](auto const& at) {
        return at.load() == sequence;
    });
}

JOINABLE_DEFINITION void Board::freeze() noexcept {
    for (std::size_t i = 0; i < arrivals(size_); ++i) {
        lines()[i].word.fetch_or(ArrivalLine::frozen);
    }
}

JOINABLE_DEFINITION std::span<Board::Count>
Board::counts_of(int rank, std::uint64_t sequence) noexcept {
    auto* const counts = std::launder(reinterpret_cast<Count*>(at(counts_at(size_))));
    std::size_t const n = counts_per_arrival(size_);
    return {counts + arrival(rank, sequence) * n, n};
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/engine/helper.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Computes for a rank, in parallel with it, in collectives in which all ranks have arrived. It
/// reads only the board. The rank does not know of it, and finishes its collectives as usual.
class Helper {
public:
    Helper(Board& board, int rank) noexcept : board_{board}, rank_{rank} {}

    /// Runs until stop().
    void run();
    void stop() noexcept {
        stops_.store(true);
        board_.helpers_room.wake();
    }

private:
    /// Computes in the oldest collective that has work left. Returns whether there was one.
    bool help();

    [[nodiscard]] bool have_all_arrived(std::uint64_t sequence) noexcept;

    /// @pre all ranks have arrived, and the slots do not change
    bool compute(std::uint64_t sequence);

    Board& board_;
    int rank_;
    std::atomic<bool> stops_{false};
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/engine/exchange.hpp

/// @file
/// The work of a collective in which all ranks have arrived. Nothing here waits, and any rank can
/// do the work for all.

namespace joinable { inline namespace v0 { namespace detail {

/// Stands for a rank: the block is reduced from all ranks, or goes to all ranks.
inline constexpr int every_rank = -1;

/// A part of a large collective: `size` elements. They start at `in_at` in the input of rank
/// `from`, and at `out_at` in the output of rank `to`.
struct Block {
    std::size_t size;
    int from = every_rank;
    int to = every_rank;
    std::size_t in_at = 0;
    std::size_t out_at = 0;
};

/// The addresses at which one rank itself finds its buffers, if the others use different ones.
struct OwnPlace {
    int rank = -1;           ///< none
    std::byte* in = nullptr; ///< only read from
    std::byte* out = nullptr;
};

/// A collective in which all ranks have arrived, as blocks to move or reduce. Blocks are numbered,
/// and all ranks number them alike.
class Exchange {
public:
    Exchange(
        Board& board, std::uint64_t sequence, Descriptor const& said, OwnPlace const& own = {}
    ) noexcept
        : board_{board}, sequence_{sequence}, said_{said}, own_{own} {}

    [[nodiscard]] int blocks() const noexcept;

    /// The number of elements in block `b`, without computing its place.
    [[nodiscard]] std::size_t size_of_block(int b) const noexcept;

    /// Linear in the number of ranks.
    [[nodiscard]] Block block(int b) const noexcept;

    /// Computes the elements [begin, end) of all blocks, one after another, for all ranks.
    void run(std::size_t begin, std::size_t end) const;

private:
    /// The number of elements that rank `from` sends to rank `to`.
    [[nodiscard]] std::size_t share(int from, int to) const noexcept;

    /// The address of byte `offset` in a rank's input or output. If the rank has a ring, the bytes
    /// up to the end of the slice follow it.
    [[nodiscard]] std::byte* shared(int rank, std::size_t word, std::size_t offset) const noexcept;
    [[nodiscard]] std::byte* input(int rank, std::size_t offset) const noexcept {
        return rank == own_.rank ? own_.in + offset : shared(rank, ArrivalLine::in, offset);
    }
    [[nodiscard]] std::byte* output(int rank, std::size_t offset) const noexcept {
        return rank == own_.rank ? own_.out + offset : shared(rank, ArrivalLine::out, offset);
    }

    void run_part(Block const& block, std::size_t begin, std::size_t end) const;

    Board& board_;
    std::uint64_t sequence_;
    Descriptor const& said_;
    OwnPlace own_;
};

/// Whether all ranks have arrived for the same collective. With counts, their tables are compared
/// too.
bool say_the_same(Board& board, std::uint64_t sequence) noexcept;

/// Why the ranks' calls do not match, or nothing. All ranks compute the same from the same lines
/// and tables.
std::optional<AbortReason>
disagreement(Board& board, std::uint64_t sequence, Descriptor const& mine);

/// The address of each rank's contribution to a small message.
[[nodiscard]] std::byte*
contribution(Board& board, std::uint64_t sequence, int rank, bool is_on_line) noexcept;

/// A small message: every rank reads all contributions and combines them by itself.
void combine_contributions(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& said,
    bool is_on_line,
    int rank,
    void* out
);

}}} // namespace joinable::v0::detail

// ---- joinable/reduction/reduce.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <cstddef>

namespace joinable { inline namespace v0 { namespace detail {

/// A function from an index to a value, or none. Refers to the given function.
template <class T>
class Numbered {
public:
    Numbered() = default;
    template <class Function>
    Numbered(std::size_t number, Function const& function) noexcept
        : size_{number}, function_{&function}, call_{[](void const* called, std::size_t i) {
              return (*static_cast<Function const*>(called))(i);
          }} {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] T operator[](std::size_t i) const { return call_(function_, i); }

private:
    std::size_t size_ = 0;
    void const* function_ = nullptr;
    T (*call_)(void const*, std::size_t) = nullptr;
};
/// The addresses of all ranks' inputs, or of the outputs.
using Places = Numbered<std::byte*>;
/// The factors by which inputs are multiplied before they are added. May be empty.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. The bits
/// do not depend on which rank computes them or on how the work was divided. There is at least one
/// input and one output. An output may be one of the inputs; otherwise they do not overlap. With
/// factors it is a sum of floating-point numbers, each multiplied and rounded first. 16-bit numbers
/// are multiplied as floats.
void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors = {},
    InstructionSet set = instruction_set()
);

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/halves.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

/// @file
/// Converts rows of 16-bit numbers to float and back, with the same bits as Half and BFloat16.
/// Compiled for each instruction set. Rows do not overlap.

namespace joinable { inline namespace v0 { namespace detail {

template <sixteen_bits T>
struct Widen {
    static constexpr std::size_t from_bytes = sizeof(T);
    static constexpr std::size_t to_bytes = sizeof(float);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store<float>(to, Conversion<T>::widen(load<std::uint16_t>(from)));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        widen(load<EightHalves>(from), floats);
        std::memcpy(to, &floats, sizeof(floats));
    }
};

template <sixteen_bits T>
struct Narrow {
    static constexpr std::size_t from_bytes = sizeof(float);
    static constexpr std::size_t to_bytes = sizeof(T);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store(to, static_cast<std::uint16_t>(Conversion<T>::narrow(load<float>(from))));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        EightHalves halves;
        std::memcpy(&floats, from, sizeof(floats));
        narrow(floats, halves);
        store(to, halves);
    }
};

template <class C>
[[gnu::always_inline]] inline void convert_from(
    std::size_t done, std::byte const* __restrict from, std::byte* __restrict to, std::size_t count
) noexcept {
    for (std::size_t i = done; i < count; ++i) {
        C::one(from + i * C::from_bytes, to + i * C::to_bytes);
    }
}
/// Converts with the processor's instruction, if there is one. Returns the number of converted
/// elements.
template <class C>
JOINABLE_INLINE_AVX2 std::size_t
convert_eights(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    std::size_t done = 0;
    if constexpr (C::has_instruction) {
        for (; done + 8 <= count; done += 8) {
            C::eight(from + done * C::from_bytes, to + done * C::to_bytes);
        }
    }
    return done;
}

template <class C>
JOINABLE_LOOP void
convert_baseline(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    convert_from<C>(0, from, to, count);
}
template <class C>
JOINABLE_LOOP_AVX2 void
convert_avx2(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    convert_from<C>(convert_eights<C>(from, to, count), from, to, count);
}

template <class C>
JOINABLE_LOOP_AVX512 void
convert_avx512(std::byte const* from, std::byte* to, std::size_t count) noexcept {
    convert_from<C>(convert_eights<C>(from, to, count), from, to, count);
}

/// The function that converts a row on this processor.
template <class C>
auto* conversion_function(InstructionSet set) noexcept {
    switch (set) {
    case InstructionSet::avx512: return &convert_avx512<C>;
    case InstructionSet::avx2: return &convert_avx2<C>;
    case InstructionSet::baseline: break;
    }
    return &convert_baseline<C>;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/lanes.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

/// @file
/// Elements in registers, and the operations of a reduction on them. Registers are compiler vector
/// types, and the functions are always inlined. The same source thus compiles for each instruction
/// set, at any optimisation level.

namespace joinable { inline namespace v0 { namespace detail {

/// A register of elements.
template <class T, std::size_t width>
struct Lanes {
    using Register [[gnu::vector_size(width)]] = T;
    static constexpr std::size_t bytes = width;
    Register numbers;

    [[gnu::always_inline]] void load(std::byte const* from) noexcept {
        std::memcpy(&numbers, from, width);
    }
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        std::memcpy(to, &numbers, width);
    }
    template <class Operation>
    [[gnu::always_inline]] void combine(Operation const& operation, Lanes const& next) noexcept {
        operation(numbers, next.numbers);
    }
    /// Rounds the product before it is added, so that all processors give the same bits.
    [[gnu::always_inline]] void scale(T factor) noexcept {
        if constexpr (width == sizeof(T)) {
            T product;
            JOINABLE_ROUNDED_PRODUCT(product, numbers[0], factor);
            numbers[0] = product;
        } else {
            JOINABLE_ROUNDED_PRODUCT(numbers, numbers, factor);
        }
    }
};

/// Registers that are computed together. They are half of a processor's registers, so that many
/// loads are in flight before something is written. Four take 1.2 times as long in the second-level
/// cache, as do twelve.
template <class L>
struct EightLanes {
    static constexpr std::size_t number = 8;
    static constexpr std::size_t bytes = number * L::bytes;
    L lanes[number];

    [[gnu::always_inline]] void load(std::byte const* from) noexcept {
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < number; ++i) {
            lanes[i].load(from + i * L::bytes);
        }
    }
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < number; ++i) {
            lanes[i].store(to + i * L::bytes);
        }
    }
    template <class Operation>
    [[gnu::always_inline]] void
    combine(Operation const& operation, EightLanes const& next) noexcept {
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < number; ++i) {
            lanes[i].combine(operation, next.lanes[i]);
        }
    }
    template <class T>
    [[gnu::always_inline]] void scale(T factor) noexcept {
        JOINABLE_UNROLL
        for (L& lane : lanes) {
            lane.scale(factor);
        }
    }
};

// An operation on registers: `a`, of the lower ranks, becomes the result of `a` and `b`.
// `Number<T>` is a type that gives the same bits as T. Fewer types mean less to compile.

/// Integers are added and multiplied as unsigned, because these wrap around. Signed overflow is
/// undefined, and reducing any rank's data must be defined.
template <class T>
struct without_sign {
    using type = T;
};
template <std::integral T>
struct without_sign<T> {
    using type = bits_of_size<sizeof(T)>;
};

struct Plus {
    template <class T>
    using Number = typename without_sign<T>::type;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a + b;
    }
};
/// Adds each rank's value times that rank's factor. Floating-point numbers only.
struct PlusScaled : Plus {
    template <class T>
    using Number = std::conditional_t<std::floating_point<T>, T, float>;
};
struct Times {
    template <class T>
    using Number = typename without_sign<T>::type;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a * b;
    }
};
/// Keeps a NaN of the lowest rank and ignores a NaN of another rank, as `std::min` does.
struct Lesser {
    template <class T>
    using Number = T;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = b < a ? b : a;
    }
};
struct Greater {
    template <class T>
    using Number = T;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a < b ? b : a;
    }
};
struct BitAnd {
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a & b;
    }
};
struct BitOr {
    template <class>
    using Number = std::uint8_t;
    template <class Register>
    [[gnu::always_inline]] void operator()(Register& a, Register const& b) const noexcept {
        a = a | b;
    }
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/reduce.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <type_traits>

namespace joinable { inline namespace v0 { namespace detail {

/// One pass of a reduction. It reads every input once, in order, and writes every output. An output
/// may be one of the inputs; otherwise they do not overlap.
struct ReductionPass {
    std::span<std::byte const* const> inputs;
    std::span<std::byte* const> outputs;
    std::size_t bytes;
    double const* factors = nullptr; ///< for each input, for PlusScaled

    static constexpr std::size_t most = 16; ///< of inputs, of outputs: more would overload a cache
};

template <class T, class Operation, class L>
[[gnu::always_inline]] inline void
load_input(L& lanes, ReductionPass const& pass, std::size_t input, std::size_t at) noexcept {
    lanes.load(pass.inputs[input] + at);
    if constexpr (std::is_same_v<Operation, PlusScaled>) {
        lanes.scale(static_cast<T>(pass.factors[input]));
    }
}

/// Reduces from byte `at` of every input as long as there are whole lanes. It reads all inputs of a
/// lane before it writes. Returns the byte at which it stopped.
template <class T, class L, class Operation>
[[gnu::always_inline]] inline std::size_t
reduce_lanes(Operation const& operation, ReductionPass const& pass, std::size_t at) noexcept {
    for (; at + L::bytes <= pass.bytes; at += L::bytes) {
        L result;
        load_input<T, Operation>(result, pass, 0, at);
        for (std::size_t i = 1; i < pass.inputs.size(); ++i) {
            L next;
            load_input<T, Operation>(next, pass, i, at);
            result.combine(operation, next);
        }
        for (std::byte* const output : pass.outputs) {
            result.store(output + at);
        }
    }
    return at;
}

template <class T, std::size_t width, class Operation>
[[gnu::always_inline]] inline void
reduce_bytes(Operation const& operation, ReductionPass const& pass) noexcept {
    std::size_t at = reduce_lanes<T, EightLanes<Lanes<T, width>>>(operation, pass, 0);
    at = reduce_lanes<T, Lanes<T, width>>(operation, pass, at);
    if constexpr (width > 16) {
        at = reduce_lanes<T, Lanes<T, 16>>(operation, pass, at);
    }
    reduce_lanes<T, Lanes<T, sizeof(T)>>(operation, pass, at);
}

// The same loop for each instruction set. AVX-512 is only for float, the type of gradients and of
// widened 16-bit numbers: it helps in cache, and every further function takes time to compile.
template <class T, class Operation>
JOINABLE_LOOP void reduce_baseline(ReductionPass const& pass) noexcept {
    reduce_bytes<T, 16>(Operation{}, pass);
}
template <class T, class Operation>
JOINABLE_LOOP_AVX2 void reduce_avx2(ReductionPass const& pass) noexcept {
    reduce_bytes<T, 32>(Operation{}, pass);
}

template <class Operation>
JOINABLE_LOOP_AVX512 void reduce_avx512(ReductionPass const& pass) noexcept {
    reduce_bytes<float, 64>(Operation{}, pass);
}

/// The type in which a reduction computes: 16-bit numbers are widened first.
template <class T>
using accumulator_of = std::conditional_t<sixteen_bits<T>, float, T>;

using RunPass = void (*)(ReductionPass const&) noexcept;

template <class Operation>
RunPass pass_function(DType dtype, InstructionSet set) {
    return visit_dtype(dtype, [&]<class Stored>(std::type_identity<Stored>) -> RunPass {
        using T = typename Operation::template Number<accumulator_of<Stored>>;
        if constexpr (std::is_same_v<T, float>) {
            if (set == InstructionSet::avx512) {
                return &reduce_avx512<Operation>;
            }
        }
        return set == InstructionSet::baseline ? &reduce_baseline<T, Operation>
                                               : &reduce_avx2<T, Operation>;
    });
}

/// The function that runs passes on this processor, over numbers that are computed in their stored
/// type.
inline RunPass pass_function(DType dtype, ReduceOp op, InstructionSet set) {
    switch (op) {
    case ReduceOp::sum: return pass_function<Plus>(dtype, set);
    case ReduceOp::product: return pass_function<Times>(dtype, set);
    case ReduceOp::min: return pass_function<Lesser>(dtype, set);
    case ReduceOp::max: return pass_function<Greater>(dtype, set);
    case ReduceOp::bit_and: return pass_function<BitAnd>(dtype, set);
    case ReduceOp::bit_or: break;
    }
    return pass_function<BitOr>(dtype, set);
}

/// The function that runs passes of this reduction, scaled or not.
inline RunPass pass_function(DType dtype, ReduceOp op, bool is_scaled, InstructionSet set) {
    return is_scaled ? pass_function<PlusScaled>(dtype, set) : pass_function(dtype, op, set);
}

/// A reduction of `bytes` bytes to every output, computed tile by tile in the first-level cache. It
/// is for more inputs or outputs than one pass takes, and for 16-bit numbers, which accumulate in
/// float and are rounded once.
class TiledReduction {
public:
    TiledReduction(DType dtype, ReduceOp op, Factors const& factors, InstructionSet set)
        : factors_{factors} {
        if (is_half_precision(dtype)) {
            bool const is_half = dtype == DType::f16;
            widen_ = is_half ? conversion_function<Widen<Half>>(set)
                             : conversion_function<Widen<BFloat16>>(set);
            narrow_ = is_half ? conversion_function<Narrow<Half>>(set)
                              : conversion_function<Narrow<BFloat16>>(set);
            dtype = DType::f32;
        }
        run_pass_ = pass_function(dtype, op, factors.size() != 0, set);
    }

    void run(Places const& inputs, Places const& outputs, std::size_t bytes) {
        for (std::size_t at = 0; at < bytes; at += tile_bytes) {
            std::size_t const n = (std::min)(tile_bytes, bytes - at);
            std::byte const* const sum = reduce_tile(inputs, at, n);
            std::byte* const first = outputs[0] + at;
            if (narrow_ != nullptr) {
                narrow_(sum, first, n / sizeof(Half));
            } else {
                std::memcpy(first, sum, n);
            }
            for (std::size_t i = 1; i < outputs.size(); ++i) {
                std::memcpy(outputs[i] + at, first, n);
            }
        }
    }

private:
    static constexpr std::size_t tile_bytes = 2048;
    using Tile = std::array<std::byte, 2 * tile_bytes>; // room for widened numbers

    /// Returns the unrounded result, in the first tile.
    std::byte const* reduce_tile(Places const& inputs, std::size_t at, std::size_t n) {
        bool const widens = widen_ != nullptr;
        std::byte* const sum = tiles_[0].data();
        std::array<std::byte const*, ReductionPass::most> from;
        std::array<double, ReductionPass::most> factors;
        std::size_t filled = 0;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            from[filled] = inputs[i] + at;
            factors[filled] = factors_.size() == 0 ? 1.0 : factors_[i];
            if (widens) {
                widen_(from[filled], tiles_[filled].data(), n / sizeof(Half));
                from[filled] = tiles_[filled].data();
            }
            ++filled;
            if (filled == from.size() || i + 1 == inputs.size()) {
                run_pass_({{from.data(), filled}, {&sum, 1}, widens ? 2 * n : n, factors.data()});
                from[0] = sum;
                factors[0] = 1.0;
                filled = 1;
            }
        }
        return sum;
    }

    Factors factors_;
    RunPass run_pass_;
    void (*widen_)(std::byte const*, std::byte*, std::size_t) noexcept = nullptr;
    void (*narrow_)(std::byte const*, std::byte*, std::size_t) noexcept = nullptr;
    alignas(64) std::array<Tile, ReductionPass::most> tiles_;
};

JOINABLE_DEFINITION void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors,
    InstructionSet set
) {
    std::size_t const bytes = count * size_of(dtype);
    std::array<std::byte const*, ReductionPass::most> from;
    std::array<std::byte*, ReductionPass::most> to;
    if (is_half_precision(dtype) || inputs.size() > from.size() || outputs.size() > to.size()) {
        return TiledReduction{dtype, op, factors, set}.run(inputs, outputs, bytes);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        from[i] = inputs[i];
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        to[i] = outputs[i];
    }
    std::array<double, ReductionPass::most> by;
    for (std::size_t i = 0; i < factors.size(); ++i) {
        by[i] = factors[i];
    }
    pass_function(dtype, op, factors.size() != 0, set)(
        {{from.data(), inputs.size()}, {to.data(), outputs.size()}, bytes, by.data()}
    );
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/engine/exchange.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <bit>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION int Exchange::blocks() const noexcept {
    switch (said_.collective) {
    case Collective::all_reduce:
    case Collective::broadcast:
    case Collective::barrier:
    case Collective::scaled_all_reduce:
    case Collective::reduce: return 1;
    case Collective::all_to_all: return board_.size() * board_.size();
    default: return board_.size();
    }
}

JOINABLE_DEFINITION std::size_t Exchange::size_of_block(int b) const noexcept {
    switch (said_.collective) {
    case Collective::all_gather: return share(b, 0);
    case Collective::gather: return share(b, said_.root);
    case Collective::reduce_scatter:
    case Collective::scaled_reduce_scatter: return share(0, b);
    case Collective::scatter: return share(said_.root, b);
    case Collective::all_to_all: return share(b / board_.size(), b % board_.size());
    default: return said_.count;
    }
}

JOINABLE_DEFINITION Block Exchange::block(int b) const noexcept {
    std::size_t const size = size_of_block(b);
    auto const before = [&] {
        std::size_t sum = 0;
        for (int other = 0; other < b; ++other) {
            sum += size_of_block(other);
        }
        return sum;
    };
    switch (said_.collective) {
    case Collective::broadcast: return {size, said_.root};
    case Collective::reduce: return {size, every_rank, said_.root};
    case Collective::all_gather: return {size, b, every_rank, 0, before()};
    case Collective::gather: return {size, b, said_.root, 0, before()};
    case Collective::reduce_scatter:
    case Collective::scaled_reduce_scatter: return {size, every_rank, b, before(), 0};
    case Collective::scatter: return {size, said_.root, b, before(), 0};
    case Collective::all_to_all: {
        Block found{size, b / board_.size(), b % board_.size()};
        for (int rank = 0; rank < found.to; ++rank) {
            found.in_at += share(found.from, rank);
        }
        for (int rank = 0; rank < found.from; ++rank) {
            found.out_at += share(rank, found.to);
        }
        return found;
    }
    default: return {size};
    }
}

JOINABLE_DEFINITION void Exchange::run(std::size_t begin, std::size_t end) const {
    std::size_t first = 0; // of the block, in the same count
    for (int b = 0; b < blocks() && first < end; ++b) {
        std::size_t const size = size_of_block(b);
        std::size_t const from = (std::max)(begin, first);
        std::size_t const to = (std::min)(end, first + size);
        if (from < to) {
            run_part(block(b), from - first, to - first);
        }
        first += size;
    }
}

JOINABLE_DEFINITION std::size_t Exchange::share(int from, int to) const noexcept {
    return said_.has_counts ? board_.sends(from, sequence_)[static_cast<std::size_t>(to)]
                            : said_.count;
}

JOINABLE_DEFINITION std::byte*
Exchange::shared(int rank, std::size_t word, std::size_t offset) const noexcept {
    auto const& said = board_.line(rank, sequence_).payload;
    std::uint64_t const ring = said[ArrivalLine::ring];
    return board_.place_at(said[word]) + (ring == 0 ? offset : offset % ring);
}

JOINABLE_DEFINITION void
Exchange::run_part(Block const& block, std::size_t begin, std::size_t end) const {
    std::size_t const element = size_of(said_.dtype);
    auto const from = [&](std::size_t rank) {
        return input(static_cast<int>(rank), (block.in_at + begin) * element);
    };
    auto const to = [&](std::size_t k) {
        int const rank = block.to == every_rank ? static_cast<int>(k) : block.to;
        return output(rank, (block.out_at + begin) * element);
    };
    auto const ranks = static_cast<std::size_t>(board_.size());
    std::size_t const outputs = block.to == every_rank ? ranks : 1;
    bool const scales = is_scaled(said_.collective);
    if (ranks == 1 && from(0) == to(0) && !scales) {
        return; // a sum over one rank needs no work
    }
    if (block.from == every_rank) {
        auto const factor = [&](std::size_t rank) {
            return std::bit_cast<double>(
                board_.line(static_cast<int>(rank), sequence_).payload[ArrivalLine::factor]
            );
        };
        reduce_to(
            said_.dtype,
            said_.op,
            {ranks, from},
            {outputs, to},
            end - begin,
            {scales ? ranks : 0, factor}
        );
        return;
    }
    std::byte const* const source = from(static_cast<std::size_t>(block.from));
    for (std::size_t k = 0; k < outputs; ++k) {
        if (std::byte* const target = to(k); target != source) {
            std::memcpy(target, source, (end - begin) * element);
        }
    }
}

JOINABLE_DEFINITION bool say_the_same(Board& board, std::uint64_t sequence) noexcept {
    ArrivalLine const& first = board.line(0, sequence);
    std::uint64_t const word = first.word.load(std::memory_order_relaxed) & ~ArrivalLine::frozen;
    for (int rank = 1; rank < board.size(); ++rank) {
        ArrivalLine const& line = board.line(rank, sequence);
        if ((line.word.load(std::memory_order_relaxed) & ~ArrivalLine::frozen) != word ||
            (ArrivalLine::tells_count(word) &&
             line.payload[ArrivalLine::count] != first.payload[ArrivalLine::count])) {
            return false;
        }
    }
    return true;
}

JOINABLE_DEFINITION std::optional<AbortReason>
disagreement(Board& board, std::uint64_t sequence, Descriptor const& mine) {
    auto const said_by = [&](int rank) {
        ArrivalLine const& line = board.line(rank, sequence);
        return ArrivalLine::decode(line.word.load(std::memory_order_relaxed), line.payload);
    };
    if (!say_the_same(board, sequence)) {
        return find_difference(board.size(), said_by);
    }
    if (!mine.has_counts) {
        return std::nullopt;
    }
    return find_difference_of_counts(
        board.size(),
        mine,
        [&](int from, int to) { return board.sends(from, sequence)[static_cast<std::size_t>(to)]; },
        [&](int from, int to) {
            return board.expects(to, sequence)[static_cast<std::size_t>(from)];
        }
    );
}

JOINABLE_DEFINITION std::byte*
contribution(Board& board, std::uint64_t sequence, int rank, bool is_on_line) noexcept {
    return is_on_line ? reinterpret_cast<std::byte*>(board.line(rank, sequence).payload.data())
                      : board.slot(rank, sequence);
}

JOINABLE_DEFINITION void combine_contributions(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& said,
    bool is_on_line,
    int rank,
    void* out
) {
    auto const contributed_by = [&](std::size_t from) {
        return contribution(board, sequence, static_cast<int>(from), is_on_line);
    };
    if (said.count == 0 || (said.collective == Collective::reduce && rank != said.root)) {
        return;
    }
    if (said.collective == Collective::broadcast) {
        auto const* const from = contributed_by(static_cast<std::size_t>(said.root));
        std::memcpy(out, from, said.count * size_of(said.dtype));
        return;
    }
    auto const in_place = [&](std::size_t) { return static_cast<std::byte*>(out); };
    auto const ranks = static_cast<std::size_t>(board.size());
    reduce_to(said.dtype, said.op, {ranks, contributed_by}, {1, in_place}, said.count);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/engine/chunks.hpp

/// @file
/// How the ranks that have arrived in a large collective share its work. Each rank starts with its
/// own share, whose data is still in its caches from the last time, and then takes over chunks from
/// others. No rank therefore waits for a busy one.

namespace joinable { inline namespace v0 { namespace detail {

/// A large message is divided into `chunks` ranges of `chunk` elements, the same on every rank.
struct Cut {
    std::size_t total = 0;
    std::size_t chunk = 1;
    std::size_t chunks = 0;

    Cut() = default;
    Cut(Exchange const& exchange, std::size_t element, int world_size) noexcept;

    /// The first chunk of a rank's share, which ends at the first chunk of the next rank.
    [[nodiscard]] std::size_t first_of(int rank, int world_size) const noexcept {
        return chunks * static_cast<std::size_t>(rank) / static_cast<std::size_t>(world_size);
    }
    /// The number of chunks in the share.
    [[nodiscard]] std::size_t share_of(int rank, int world_size) const noexcept {
        return first_of(rank + 1, world_size) - first_of(rank, world_size);
    }
};

[[nodiscard]] bool chunks_are_done(Board& board, std::uint64_t sequence, Cut const& cut) noexcept;

/// Whether some chunk will never be done, because the rank that had claimed it died and the board
/// has a reason. All ranks find the same. @pre all chunks are claimed
[[nodiscard]] inline bool
chunks_are_lost(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    return board.is_aborted() && board.may_be_lost(sequence) &&
           !chunks_are_done(board, sequence, cut);
}

[[nodiscard]] bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut, int owner) noexcept;
/// Whether any rank's share has unclaimed chunks.
[[nodiscard]] bool has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut) noexcept;

/// A worker of `rank` computes chunks until none is left to claim in `shares` shares, starting with
/// its own. Returns whether all chunks are done, by any worker.
bool run_chunks(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& said,
    Cut const& cut,
    int rank,
    int shares,
    Worker worker = Worker::rank
);

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/engine/chunks.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <atomic>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
Cut::Cut(Exchange const& exchange, std::size_t element, int world_size) noexcept {
    for (int b = 0; b < exchange.blocks(); ++b) {
        total += exchange.size_of_block(b);
    }
    std::size_t const bytes = total * element;
    auto const ranks = static_cast<std::size_t>(world_size);
    // Small messages have one chunk per rank, as long as taking over half of one would save less
    // than moving a line between two processors. Other chunks are small enough that all ranks end
    // together, and large enough that claiming costs nothing.
    std::size_t const wanted =
        bytes <= tuning::one_chunk_bytes
            ? bytes / ranks
            : (std::min)(bytes / (tuning::chunks_per_rank * ranks), tuning::largest_chunk_bytes);
    constexpr std::size_t line = 64;
    chunk = (wanted / line + 1) * line / element;
    chunks = (total + chunk - 1) / chunk;
}

JOINABLE_DEFINITION bool
chunks_are_done(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    std::uint64_t done = 0;
    for (int rank = 0; rank < board.size(); ++rank) {
        done += board.progress(rank, sequence).done.load();
    }
    return done == cut.chunks;
}

JOINABLE_DEFINITION bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut, int owner) noexcept {
    auto const claimed = board.progress(owner, sequence).claimed.load(std::memory_order_relaxed);
    return claimed < cut.share_of(owner, board.size());
}

JOINABLE_DEFINITION bool
has_unclaimed(Board& board, std::uint64_t sequence, Cut const& cut) noexcept {
    for (int owner = 0; owner < board.size(); ++owner) {
        if (has_unclaimed(board, sequence, cut, owner)) {
            return true;
        }
    }
    return false;
}

JOINABLE_DEFINITION bool run_chunks(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& said,
    Cut const& cut,
    int rank,
    int shares,
    Worker worker
) {
    int const ranks = board.size();
    std::uint64_t done = 0;
    bool computes = false;
    for (int k = 0; k < shares; ++k) {
        int const owner = rank + k < ranks ? rank + k : rank + k - ranks;
        std::size_t const first = cut.first_of(owner, ranks);
        std::size_t const share = cut.share_of(owner, ranks);
        std::atomic<std::uint64_t>& claimed = board.progress(owner, sequence).claimed;
        while (claimed.load(std::memory_order_relaxed) < share) {
            if (!computes) {
                board.begin_computing(rank, worker, sequence);
                computes = true;
            }
            std::uint64_t const mine = claimed.fetch_add(1);
            if (mine >= share) {
                break;
            }
            std::size_t const begin = (first + static_cast<std::size_t>(mine)) * cut.chunk;
            Exchange{board, sequence, said}.run(begin, (std::min)(cut.total, begin + cut.chunk));
            ++done;
        }
    }
    if (computes) {
        if (done != 0) {
            board.progress(rank, sequence).done.fetch_add(done);
        }
        board.end_computing(rank, worker);
        board.room.wake(); // after that: a rank may wait for chunks, or until nobody computes any
    }
    return chunks_are_done(board, sequence, cut);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/engine/slices.hpp

/// @file
/// Moves a large collective in slices if other ranks cannot reach some rank's buffer. Each such
/// rank has a ring that all can reach. A slice is copied in, reduced and copied out while it is in
/// the caches. A rank copies the next slices while others still process the current one. Each rank
/// computes its share of every slice. No other rank takes it over, because the rank must make its
/// copies anyway.

namespace joinable { inline namespace v0 { namespace detail {

/// The parts of a message of `total` elements, the same on every rank.
struct Slices {
    std::size_t total = 0;
    std::size_t element = 1; ///< bytes
    std::size_t chunk = 1;   ///< elements of a slice that one rank computes
    int ranks = 1;

    Slices() = default;
    Slices(Board const& board, Descriptor const& said) noexcept;

    /// Whether such a collective can be sliced: each rank must have corresponding elements at the
    /// same offset of its buffer.
    [[nodiscard]] static bool fit(Collective collective) noexcept {
        return collective == Collective::all_reduce || collective == Collective::broadcast ||
               collective == Collective::reduce || collective == Collective::scaled_all_reduce;
    }
    /// The bytes that a rank needs for its slices in flight. Smaller messages are not sliced.
    [[nodiscard]] static std::size_t ring_bytes(Board const& board) noexcept {
        return tuning::slices_per_ring * chunk_bytes(board) *
               static_cast<std::size_t>(board.size());
    }

    [[nodiscard]] std::size_t count() const noexcept;
    /// The elements [first, second) of a slice that belong to the shares of ranks [from, to).
    [[nodiscard]] std::pair<std::size_t, std::size_t>
    range(std::size_t slice, int from, int to) const noexcept;

private:
    /// Whole cache lines.
    [[nodiscard]] static std::size_t chunk_bytes(Board const& board) noexcept;
};

/// One rank's progress in a sliced collective.
class Pipeline {
public:
    Pipeline() = default;
    /// @pre all ranks have arrived
    Pipeline(Board& board, std::uint64_t sequence, Descriptor const& said) noexcept
        : sequence_{sequence}, slices_{board, said}, count_{slices_.count()} {}

    [[nodiscard]] static bool is_needed(Board& board, std::uint64_t sequence) noexcept;

    /// Does all that is possible without waiting. Returns whether this rank's buffers are final.
    /// `Memory` copies ranges of bytes to and from this rank's ring.
    template <class Memory>
    bool advance(Board& board, Descriptor const& said, int rank, Memory& memory) {
        ChunkProgress& mine = board.progress(rank, sequence_);
        auto const own = memory.own(sequence_);
        auto* const in = static_cast<std::byte*>(const_cast<void*>(own.in)); // is only read
        OwnPlace const place{rank, in, static_cast<std::byte*>(own.out)};
        Exchange const exchange{board, sequence_, said, place};
        for (bool moves = true; moves;) {
            moves = false;
            if (lent_ < limit_of_lending(board, rank)) {
                for_shares_of_others(lent_, rank, [&](std::size_t begin, std::size_t end) {
                    memory.copy_in(sequence_, begin, end);
                });
                mine.lent.store(++lent_);
                board.room.wake();
                moves = true;
            }
            if (can_compute(board)) {
                board.begin_computing(rank, Worker::rank, sequence_);
                if (!is_given_up(board)) { // a rank that gives up from here on waits for the end
                    auto const [begin, end] = slices_.range(computed_, rank, rank + 1);
                    exchange.run(begin, end);
                    mine.done.store(++computed_);
                }
                board.end_computing(rank, Worker::rank);
                board.room.wake();
                moves = true;
            }
            if (taken_ < done_by_all(board)) {
                for_shares_of_others(taken_, rank, [&](std::size_t begin, std::size_t end) {
                    memory.copy_out(sequence_, begin, end);
                });
                ++taken_;
                moves = true;
            }
        }
        return taken_ == count_;
    }

    [[nodiscard]] bool can_advance(Board& board, int rank) const noexcept {
        return lent_ < limit_of_lending(board, rank) || can_compute(board) ||
               taken_ < done_by_all(board);
    }

    /// The ranks for which this rank waits, if it cannot advance.
    [[nodiscard]] std::vector<int> holding_up(Board& board) const;

    /// Whether this rank, which cannot advance, never will. That is so if an unfinished rank has
    /// died, if a rank has given up, or if the deadline of a rank for which it waits has passed.
    [[nodiscard]] bool is_lost(Board& board) const;
    /// Whether some rank is still computing a slice and may access this rank's memory. Ranks that
    /// have died, or have been stopped past the deadline, do not count.
    /// @pre this rank has announced that it gives up, so that no rank begins another slice
    [[nodiscard]] bool is_in_use(Board& board) const;

private:
    [[nodiscard]] static bool is_overdue(AbortReason const& reason, int rank) noexcept;
    /// Whether any rank has given up. It then expects no other rank in its memory any more.
    [[nodiscard]] bool is_given_up(Board& board) const noexcept;
    [[nodiscard]] bool can_compute(Board& board) const noexcept {
        return computed_ < lent_by_all(board) && !is_given_up(board);
    }

    /// Calls `copy` with byte ranges. A rank reads and writes its own share in place.
    template <class Copy>
    void for_shares_of_others(std::size_t slice, int rank, Copy const& copy) const {
        for (auto const& [begin, end] :
             {slices_.range(slice, 0, rank), slices_.range(slice, rank + 1, slices_.ranks)}) {
            copy(begin * slices_.element, end * slices_.element);
        }
    }
    [[nodiscard]] std::uint64_t limit_of_lending(Board& board, int rank) const noexcept;
    /// The minimum of a number that each rank publishes.
    [[nodiscard]] std::uint64_t
    least(Board& board, std::atomic<std::uint64_t> ChunkProgress::* told) const noexcept;
    [[nodiscard]] std::uint64_t lent_by_all(Board& board) const noexcept {
        return least(board, &ChunkProgress::lent);
    }
    [[nodiscard]] std::uint64_t done_by_all(Board& board) const noexcept {
        return least(board, &ChunkProgress::done);
    }

    std::uint64_t sequence_ = 0;
    Slices slices_;
    std::uint64_t count_ = 0;    ///< slices in all
    std::uint64_t lent_ = 0;     ///< slices that this rank has copied in
    std::uint64_t computed_ = 0; ///< slices whose share it has computed
    std::uint64_t taken_ = 0;    ///< slices that it has copied out
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/engine/slices.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Slices::Slices(Board const& board, Descriptor const& said) noexcept
    : total{said.count}, element{size_of(said.dtype)}, chunk{chunk_bytes(board) / element},
      ranks{board.size()} {}

JOINABLE_DEFINITION std::size_t Slices::count() const noexcept {
    std::size_t const slice = chunk * static_cast<std::size_t>(ranks);
    return (total + slice - 1) / slice;
}

JOINABLE_DEFINITION std::pair<std::size_t, std::size_t>
Slices::range(std::size_t slice, int from, int to) const noexcept {
    auto const start = [&](int rank) {
        std::size_t const chunks =
            slice * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(rank);
        return (std::min)(total, chunks * chunk);
    };
    return {start(from), start(to)};
}

JOINABLE_DEFINITION std::size_t Slices::chunk_bytes(Board const& board) noexcept {
    constexpr std::size_t line = 64;
    std::size_t const slice =
        board.room.is_crowded() ? tuning::crowded_slice_bytes : tuning::slice_bytes;
    return (slice / static_cast<std::size_t>(board.size()) / line + 1) * line;
}

JOINABLE_DEFINITION bool Pipeline::is_needed(Board& board, std::uint64_t sequence) noexcept {
    for (int rank = 0; rank < board.size(); ++rank) {
        if (board.line(rank, sequence).payload[ArrivalLine::ring] != 0) {
            return true;
        }
    }
    return false;
}

JOINABLE_DEFINITION std::vector<int> Pipeline::holding_up(Board& board) const {
    std::uint64_t const done = done_by_all(board);
    std::uint64_t const lent = lent_by_all(board);
    std::vector<int> ranks;
    for (int rank = 0; done != count_ && rank < board.size(); ++rank) {
        ChunkProgress const& its = board.progress(rank, sequence_);
        if (done < lent ? its.done.load() == done : its.lent.load() == lent) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

JOINABLE_DEFINITION bool Pipeline::is_lost(Board& board) const {
    if (!board.is_aborted()) {
        return false;
    }
    for (int rank = 0; rank < board.size(); ++rank) {
        ChunkProgress const& its = board.progress(rank, sequence_);
        if (board.is_dead(rank) && (its.lent.load() != count_ || its.done.load() != count_)) {
            return true;
        }
    }
    if (is_given_up(board)) {
        return true;
    }
    AbortReason const reason = board.reason();
    std::vector<int> const ranks = holding_up(board);
    return std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
        return is_overdue(reason, rank);
    });
}

JOINABLE_DEFINITION bool Pipeline::is_in_use(Board& board) const {
    AbortReason const reason = board.reason();
    for (int const rank : board.computing(sequence_)) {
        if (!board.is_dead(rank) && !is_overdue(reason, rank)) {
            return true;
        }
    }
    return false;
}

JOINABLE_DEFINITION bool Pipeline::is_overdue(AbortReason const& reason, int rank) noexcept {
    return reason.kind == FailureKind::timed_out && reason.origin < 0 &&
           std::find(reason.ranks.begin(), reason.ranks.end(), rank) != reason.ranks.end();
}

JOINABLE_DEFINITION bool Pipeline::is_given_up(Board& board) const noexcept {
    for (int rank = 0; rank < board.size(); ++rank) {
        if (board.progress(rank, sequence_).has_given_up.load()) {
            return true;
        }
    }
    return false;
}

JOINABLE_DEFINITION std::uint64_t
Pipeline::limit_of_lending(Board& board, int rank) const noexcept {
    bool const has_ring = board.line(rank, sequence_).payload[ArrivalLine::ring] != 0;
    return has_ring ? (std::min)(count_, taken_ + tuning::slices_per_ring) : count_;
}

JOINABLE_DEFINITION std::uint64_t
Pipeline::least(Board& board, std::atomic<std::uint64_t> ChunkProgress::* told) const noexcept {
    std::uint64_t least = count_;
    for (int rank = 0; rank < board.size(); ++rank) {
        least = (std::min)(least, (board.progress(rank, sequence_).*told).load());
    }
    return least;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/engine/helper.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void Helper::run() {
    auto const forever = end_of_wait(SleepThrough{}());
    while (!stops_.load()) {
        board_.helpers_room.sleep([&] { return stops_.load() || help(); }, forever);
    }
}

JOINABLE_DEFINITION bool Helper::help() {
    std::uint64_t const first = board_.retired(rank_).load();
    for (std::uint64_t k = 0; k < Board::max_in_flight; ++k) {
        std::uint64_t const sequence = first + k;
        if (!board_.has_arrived(rank_, sequence)) {
            return false;
        }
        if (have_all_arrived(sequence)) {
            bool const is_still_there = board_.begin_helping(rank_, sequence);
            bool const has_computed = is_still_there && compute(sequence);
            board_.end_computing(rank_, Worker::helper);
            board_.room.wake(); // a rank may wait for the slots
            if (has_computed) {
                return true;
            }
        }
    }
    return false;
}

JOINABLE_DEFINITION bool Helper::have_all_arrived(std::uint64_t sequence) noexcept {
    for (int rank = 0; rank < board_.size(); ++rank) {
        if (!board_.has_arrived(rank, sequence)) {
            return false;
        }
    }
    return true;
}

JOINABLE_DEFINITION bool Helper::compute(std::uint64_t sequence) {
    ArrivalLine const& line = board_.line(rank_, sequence);
    Descriptor const said = ArrivalLine::decode(line.word.load(), line.payload);
    if (is_small(said) || disagreement(board_, sequence, said)) {
        return false; // the rank itself aborts
    }
    if (Pipeline::is_needed(board_, sequence)) {
        return false; // it does not know the rank's own addresses
    }
    Cut const cut{Exchange{board_, sequence, said}, size_of(said.dtype), board_.size()};
    bool const has_some = has_unclaimed(board_, sequence, cut);
    if (has_some) {
        run_chunks(board_, sequence, said, cut, rank_, board_.size(), Worker::helper);
    }
    return has_some;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/group/mailbox.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One side of a message: a send that waits for its receive, or a receive that waits for its send.
/// It lies in memory of the rank that wrote it.
struct alignas(64) PendingMessage {
    enum class State : std::uint8_t { waiting, taken, done };

    std::atomic<State> state{State::waiting}; ///< taken: the other side copies
    bool is_send = false;
    DType dtype = DType::u8;
    std::int32_t tag = 0;
    std::uint64_t count = 0;
    std::uint64_t data = 0; ///< an offset from the board; a send only reads it
    std::uint64_t next = 0; ///< offset of the next message in the mailbox; 0 is none
};

/// Not a template's member: nvcc 13 would look there for an operator new with an alignment.
PendingMessage& write_message(
    std::byte* memory, bool is_send, int tag, ConstBuffer said, std::uint64_t data_place
) noexcept;

/// The messages from one rank to another: messages of either side that wait for the other side, in
/// the order in which they were written. It lies in memory that processes share and holds no
/// addresses; zeros are an empty mailbox. Its lock only concerns two ranks that would wait for each
/// other anyway, and no data is copied while it is held.
class Mailbox {
public:
    [[nodiscard]] bool try_lock() noexcept { return lock_.exchange(1) == 0; }
    void unlock() noexcept { lock_.store(0); }

    /// The other side's oldest message with this tag; null if there is none. Linear in the waiting
    /// messages. @pre locked; so for all members below
    [[nodiscard]] PendingMessage* find(Board& board, bool is_send, int tag) const noexcept;
    void append(Board& board, PendingMessage& pending) noexcept;
    void remove(Board& board, PendingMessage& pending) noexcept;

private:
    static PendingMessage& at(Board& board, std::uint64_t place) noexcept {
        return *std::launder(reinterpret_cast<PendingMessage*>(board.place_at(place)));
    }

    std::atomic<std::uint32_t> lock_{0};
    std::uint64_t first_ = 0; ///< offsets of messages; 0 is none
    std::uint64_t last_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/mailbox.ipp

#if JOINABLE_HAS_DEFINITIONS

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION PendingMessage& write_message(
    std::byte* memory, bool is_send, int tag, ConstBuffer said, std::uint64_t data_place
) noexcept {
    auto* const pending = ::new (memory) PendingMessage{};
    pending->is_send = is_send;
    pending->dtype = said.dtype;
    pending->tag = tag;
    pending->count = said.count;
    pending->data = data_place;
    return *pending;
}

JOINABLE_DEFINITION PendingMessage*
Mailbox::find(Board& board, bool is_send, int tag) const noexcept {
    for (std::uint64_t place = first_; place != 0;) {
        PendingMessage& pending = at(board, place);
        if (pending.is_send != is_send && pending.tag == tag) {
            return &pending;
        }
        place = pending.next;
    }
    return nullptr;
}

JOINABLE_DEFINITION void Mailbox::append(Board& board, PendingMessage& pending) noexcept {
    std::uint64_t const place = board.place_of(&pending);
    (last_ == 0 ? first_ : at(board, last_).next) = place;
    last_ = place;
}

JOINABLE_DEFINITION void Mailbox::remove(Board& board, PendingMessage& pending) noexcept {
    std::uint64_t const place = board.place_of(&pending);
    std::uint64_t before = 0;
    for (std::uint64_t other = first_; other != place; other = at(board, other).next) {
        before = other;
    }
    (before == 0 ? first_ : at(board, before).next) = pending.next;
    last_ = last_ == place ? before : last_;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/group/group.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Detects ranks that have died, where no other process does, and reserves memory for them.
class Watch {
public:
    Watch() = default;
    Watch(Watch const&) = delete;
    Watch& operator=(Watch const&) = delete;
    /// May take some microseconds. Returns how long it need not be called again.
    virtual std::chrono::nanoseconds look_for_deaths() noexcept = 0;
    /// Called before memory that the ranks share is used for the first time.
    /// @throws CommunicationError  there is no memory; the group is aborted.
    virtual void reserve(std::byte const*, std::size_t) {}

protected:
    ~Watch() = default;
};

/// What the ranks of one group share: the board for collectives, a mailbox for each pair of ranks,
/// and the groups that were split from it. All of it is one block of memory without addresses. This
/// class is one rank's view of it, and costs two pointers.
///
/// A rank's number is its rank in the outermost group. It stays the same in every subgroup. Numbers
/// identify writers of a FirstReason and holders of a lock.
class Group {
public:
    [[nodiscard]] static std::size_t bytes_for(int size) {
        return mailboxes_at(size) + width(size) * width(size) * sizeof(Mailbox);
    }
    /// The parts of that memory that are used from the start. The others need reserve().
    [[nodiscard]] static std::array<BlockPart, 2> parts_at_start(int size);
    /// The part that create() needs zeroed.
    [[nodiscard]] static BlockPart zeros_at_start(int size) {
        return {mailboxes_at(size), bytes_for(size) - mailboxes_at(size)};
    }
    /// `numbers` are the members' numbers, by rank in this group. Touches only the parts that are
    /// used from the start.
    /// @pre `memory` is as for a Board, has bytes_for(size), and zeros in zeros_at_start(size)
    static Group create(std::span<int const> numbers, std::span<std::byte> memory);
    /// The group of a board that create() has made.
    explicit Group(Board& board, Watch* watch = nullptr) noexcept : board_{&board}, watch_{watch} {}

    [[nodiscard]] Board& board() const noexcept { return *board_; }
    [[nodiscard]] int number_of(int rank) const noexcept { return member(rank).number; }
    [[nodiscard]] Mailbox& mailbox(int from, int to) const noexcept;

    /// `rank` ends the collectives, the messages, and the groups that were split from this one. The
    /// first reason wins, across parent groups too: a parent may have been aborted before that
    /// abort has reached this group. Returns when nothing can start any more in any of these
    /// groups.
    void abort(AbortReason const& reason, int rank) const {
        end(ended_by().value_or(reason), number_of(rank));
    }

    /// `rank` leaves. Collectives can no longer complete, but the others still have their messages
    /// and their groups without it. This must be the rank's last use of the group, whose memory may
    /// be destroyed after that.
    void leave(int rank) const;

    /// Records that the rank with this number has died, in any group; `death` says how. Ends what
    /// abort() ends, in all groups of which it was a member, with its rank there. A group that this
    /// or another rank was already ending keeps its reason. Returns false if another process is
    /// doing this or holds the lock of other groups: it may have died as well, so call this again
    /// soon. `burier` is as for Board. @pre this is the outermost group
    bool mark_dead(int number, std::string const& death, int burier) const {
        return mark_dead(number, death, {FailureKind::peer_failed, {}, death}, true, burier);
    }
    /// Called by a rank before it first writes to a slot, a table of counts or a mailbox.
    /// @throws CommunicationError  there is no memory for it; the outermost group is aborted.
    void reserve(void const* data, std::size_t bytes) const {
        if (watch_ != nullptr) {
            watch_->reserve(static_cast<std::byte const*>(data), bytes);
        }
    }
    /// For Endpoint.
    std::chrono::nanoseconds look_for_deaths() const noexcept {
        return watch_ == nullptr ? SleepThrough{}() : watch_->look_for_deaths();
    }
    /// Another group in the same memory, by its offset from this board.
    [[nodiscard]] Group group_at(std::uint64_t place) const noexcept {
        return Group{Board::at_address(board_->place_at(place)), watch_};
    }

    /// Whether its collectives or its messages have ended, for `rank`. Completes an end that
    /// another rank has begun. It is therefore true on a rank that has failed because of that end,
    /// and nothing can start after it was true.
    [[nodiscard]] bool is_aborted(int rank) const;

    /// Whether a waiting message to or from `peer` will never be delivered.
    [[nodiscard]] bool is_lost(int peer) const noexcept {
        return shared().end.is_given() || member(peer).has_left.load();
    }
    /// The reason. A rank that leaves because a parent group has ended gives the parent's reason.
    /// @pre is_lost(peer), or `peer` is the rank that leaves
    [[nodiscard]] AbortReason loss(int peer) const {
        return ended_by().value_or(reason_of_leaving(peer));
    }

    /// The ranks that `said` names, as numbered in this group. Requires that `said` ended this
    /// group, its collectives, or those of a subgroup of which the rank with this number was a
    /// member. Otherwise nothing.
    [[nodiscard]] std::optional<std::vector<int>>
    ranks_here(AbortReason const& said, int number) const;

    /// Whether groups have been split from this one; their errors use different numbers.
    [[nodiscard]] bool has_split() const noexcept { return shared().has_split.load(); }

    /// From now on `child` ends with this group. Returns false if this group has ended already.
    [[nodiscard]] bool adopt(Group child) const noexcept;
    /// Whether the memory of an adopted group may be freed: all members have left it and its
    /// subgroups. If so, no rank can find the group any more. The caller is the rank with `number`,
    /// whose memory the group uses.
    [[nodiscard]] bool retire(int number) const noexcept;

private:
    struct alignas(cache_line) Shared {
        FirstReason end; ///< of messages and subgroups; the board has its own
        std::atomic<int> present{0};
        std::atomic<bool> has_split{false};
        // The subgroups, as offsets of their boards from this one. A rank that reads the list or
        // adds to it does not wait, and a rank that is killed or stopped meanwhile leaves it
        // intact.
        std::atomic<int> locked_by{0}; ///< number + 1 of the rank that removes a group; 0: none
        std::atomic<int> visitors{0};  ///< readers; meanwhile no memory in it is freed
        std::atomic<std::uint64_t> children{0}; ///< the newest; 0: none
        std::atomic<std::uint64_t> next{0};     ///< the next older one, relative to the parent
        std::uint64_t parent = 0;               ///< 0: none
    };
    struct Member {
        int number = 0;
        std::atomic<bool> has_left{false};
    };
    static_assert(std::is_trivially_destructible_v<Shared>);

    static std::size_t width(int size) noexcept { return static_cast<std::size_t>(size); }
    static std::size_t shared_at(int size) { return in_cache_lines(Board::bytes_for(size)); }
    static std::size_t members_at(int size) { return shared_at(size) + sizeof(Shared); }
    static std::size_t mailboxes_at(int size) {
        return in_cache_lines(members_at(size) + width(size) * sizeof(Member));
    }

    [[nodiscard]] int size() const noexcept { return board_->size(); }
    [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
        return reinterpret_cast<std::byte*>(board_) + offset;
    }
    [[nodiscard]] Shared& shared() const noexcept {
        return *std::launder(reinterpret_cast<Shared*>(at(shared_at(size()))));
    }
    [[nodiscard]] Member& member(int rank) const noexcept {
        return std::launder(reinterpret_cast<Member*>(at(members_at(size()))))[rank];
    }
    [[nodiscard]] int rank_of(int number) const noexcept;

    /// The reason that has ended this group or a parent. Groups are ended from the outermost one
    /// inwards, so a rank may learn of it before this group has ended.
    [[nodiscard]] std::optional<AbortReason> ended_by() const;

    void end(AbortReason const& reason, int writer) const;

    /// `reason` is the parent group's: this death, or an earlier reason.
    bool mark_dead(
        int number, std::string const& death, AbortReason reason, bool is_of_death, int burier
    ) const;

    template <class Do>
    void for_each_child(Do const& visit) const {
        shared().visitors.fetch_add(1);
        for (std::uint64_t place = shared().children.load(); place != 0;) {
            Group const child = group_at(place);
            visit(child);
            place = child.shared().next.load();
        }
        shared().visitors.fetch_sub(1);
    }
    void add(Group child) const noexcept;
    /// @pre it is in the list, and this rank holds the lock
    void remove(Group child) const noexcept;

    Board* board_;
    Watch* watch_ = nullptr; ///< null: another process does it
};

/// The numbers of the members of the outermost group, which are their ranks.
[[nodiscard]] std::vector<int> all_numbers(int world_size);

/// The reason that the other ranks get when a failure ends the body of `rank`. An error may name
/// ranks of a subgroup; they are translated to ranks of the outermost group. If that subgroup is
/// unknown, this rank is named.
[[nodiscard]] AbortReason reason_of_exit(Group group, int rank, AbortReason reason);

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/group.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::array<BlockPart, 2> Group::parts_at_start(int size) {
    return {{
        {0, Board::bytes_at_start(size)},
        {shared_at(size), mailboxes_at(size) - shared_at(size)},
    }};
}

JOINABLE_DEFINITION Group
Group::create(std::span<int const> numbers, std::span<std::byte> memory) { // zeros: no messages
    int const size = static_cast<int>(numbers.size());
    Group const group{Board::create(size, memory)};
    ::new (group.at(shared_at(size))) Shared{};
    auto* const members = ::new (group.at(members_at(size))) Member[width(size)];
    for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
        members[rank].number = numbers[rank];
    }
    group.shared().present.store(size);
    return group;
}

JOINABLE_DEFINITION Mailbox& Group::mailbox(int from, int to) const noexcept {
    auto* const first = std::launder(reinterpret_cast<Mailbox*>(at(mailboxes_at(size()))));
    return first[width(from) * width(size()) + width(to)];
}

JOINABLE_DEFINITION void Group::leave(int rank) const {
    member(rank).has_left.store(true);
    board_->abort(loss(rank), number_of(rank), [this] { return look_for_deaths(); });
    shared().present.fetch_sub(1);
}

JOINABLE_DEFINITION bool Group::is_aborted(int rank) const {
    bool const is_of_all = shared().end.has_begun();
    if (!is_of_all && !board_->is_ending()) {
        return false;
    }
    if (board_->is_aborted() && (!is_of_all || shared().end.is_given())) {
        return true;
    }
    int const culprit = rank_of(is_of_all ? shared().end.writer() : board_->ended_by());
    AbortReason reason{
        FailureKind::communication, {}, "a process that was to tell why all ends was stopped"
    };
    if (culprit >= 0) {
        reason = reason_of_delay(
            {culprit}, "finish its abort", FirstReason::patience, rank, "waits for it"
        );
    }
    if (is_of_all) {
        end(reason, number_of(rank));
    } else {
        board_->abort(reason, number_of(rank), [this] { return look_for_deaths(); });
    }
    return true;
}

JOINABLE_DEFINITION std::optional<std::vector<int>>
Group::ranks_here(AbortReason const& said, int number) const {
    auto const is_of = [&](auto const& end) { return end.reason().message == said.message; };
    if ((shared().end.is_given() && is_of(shared().end)) ||
        (board_->is_aborted() && is_of(*board_))) {
        return said.ranks;
    }
    std::optional<std::vector<int>> found;
    for_each_child([&](Group child) {
        if (!found && child.rank_of(number) >= 0) {
            found = child.ranks_here(said, number);
            if (found) {
                std::erase_if(*found, [&](int rank) { return rank >= child.size(); });
                std::transform(found->begin(), found->end(), found->begin(), [&](int rank) {
                    return rank_of(child.number_of(rank));
                });
                std::sort(found->begin(), found->end());
            }
        }
    });
    return found;
}

JOINABLE_DEFINITION bool Group::adopt(Group child) const noexcept {
    shared().has_split.store(true);
    child.shared().parent = child.board_->place_of(board_);
    add(child);
    return !shared().end.is_given(); // if not ended, a later end finds the child
}

JOINABLE_DEFINITION bool Group::retire(int number) const noexcept {
    if (shared().present.load() != 0 || shared().parent == 0 || shared().children.load() != 0) {
        return false;
    }
    Group const parent = group_at(shared().parent); // lives as long as it has children
    int nobody = 0;
    if (!parent.shared().locked_by.compare_exchange_strong(nobody, number + 1)) {
        return false; // try again later
    }
    parent.remove(*this);
    bool const is_free = parent.shared().visitors.load() == 0;
    if (!is_free) { // another rank may still use it: try again later
        parent.add(*this);
    }
    parent.shared().locked_by.store(0);
    return is_free;
}

JOINABLE_DEFINITION int Group::rank_of(int number) const noexcept {
    int rank = size() - 1;
    while (rank >= 0 && number_of(rank) != number) {
        --rank;
    }
    return rank;
}

JOINABLE_DEFINITION std::optional<AbortReason> Group::ended_by() const {
    Group group = *this;
    while (!group.shared().end.is_given()) {
        if (group.shared().parent == 0) {
            return std::nullopt;
        }
        group = group.group_at(group.shared().parent);
    }
    return group.shared().end.reason();
}

JOINABLE_DEFINITION void Group::end(AbortReason const& reason, int writer) const {
    auto const before_sleep = [this] { return look_for_deaths(); };
    shared().end.give(reason, writer, [] {});
    shared().end.settle(board_->room, reason, writer, [] {}, before_sleep);
    AbortReason const first = shared().end.reason();
    board_->abort(first, writer, before_sleep);
    for_each_child([&](Group child) { child.end(first, writer); });
}

JOINABLE_DEFINITION bool Group::mark_dead(
    int number, std::string const& death, AbortReason reason, bool is_of_death, int burier
) const {
    int const rank = rank_of(number);
    if (is_of_death && rank >= 0) {
        reason.ranks = {rank};
        reason.message = concat("rank ", rank, " failed: ", death);
    }
    if (shared().end.take_over(number, reason, burier, [] {})) {
        board_->room.wake();
    }
    if (!shared().end.is_given()) {
        return false; // another rank is doing it, or has died meanwhile
    }
    AbortReason const first = shared().end.reason();
    is_of_death = is_of_death && first.message == reason.message;
    board_->mark_dead(rank, number, first, burier);
    int holder = number + 1;
    shared().locked_by.compare_exchange_strong(holder, 0);
    bool is_everywhere = true;
    for_each_child([&](Group child) {
        is_everywhere = child.mark_dead(number, death, first, is_of_death, burier) && is_everywhere;
    });
    return is_everywhere;
}

JOINABLE_DEFINITION void Group::add(Group child) const noexcept {
    std::uint64_t const place = board_->place_of(child.board_);
    std::uint64_t first = shared().children.load();
    do {
        child.shared().next.store(first);
    } while (!shared().children.compare_exchange_weak(first, place));
}

JOINABLE_DEFINITION void Group::remove(Group child) const noexcept {
    std::uint64_t const place = board_->place_of(child.board_);
    std::uint64_t const next = child.shared().next.load();
    std::uint64_t newer = place;
    if (shared().children.compare_exchange_strong(newer, next)) {
        return;
    }
    while (group_at(newer).shared().next.load() != place) { // older ones do not move
        newer = group_at(newer).shared().next.load();
    }
    group_at(newer).shared().next.store(next);
}

JOINABLE_DEFINITION std::vector<int> all_numbers(int world_size) {
    std::vector<int> numbers;
    numbers.reserve(static_cast<std::size_t>(Board::checked(world_size)));
    for (int rank = 0; rank < world_size; ++rank) {
        numbers.push_back(rank);
    }
    return numbers;
}

JOINABLE_DEFINITION AbortReason reason_of_exit(Group group, int rank, AbortReason reason) {
    if (!reason.ranks.empty() && group.has_split()) {
        std::vector<int> const ranks = group.ranks_here(reason, rank).value_or(std::vector<int>{});
        if (!ranks.empty() && ranks != reason.ranks) {
            reason.message = concat(ranks_text(ranks), ", in a group split off: ", reason.message);
        }
        reason.ranks = ranks;
    }
    return blamed_on(rank, std::move(reason));
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/group/board_communicator.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The members that communicators over a board have in common. `Rank` is a GroupRank. `Work` is the
/// type of its collectives and messages. The communicators' own docstrings describe the guarantees.
template <class Rank, class Work>
class BoardCommunicator : public Collectives<BoardCommunicator<Rank, Work>, Work> {
public:
    BoardCommunicator(BoardCommunicator const&) = delete;
    BoardCommunicator& operator=(BoardCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    /// Not collective. Complete when rank `to` has received the message. Messages between two ranks
    /// with the same tag arrive in order. Count and dtype must be the same on both sides, else
    /// Mismatch on both.
    Work send(ConstBuffer buffer, int to, int tag = 0);
    /// Not collective. Receives a message of send().
    Work receive(Buffer buffer, int from, int tag = 0);

    /// Local. The first reason wins; every wait that can no longer complete throws it.
    void abort(AbortReason const& reason) { rank_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return rank_.group().is_aborted(rank()); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Ranks that wait for this one now wait for one more deadline from this call.
    void keep_alive() noexcept { rank_.keep_alive(); }

    /// Local. The ranks that have not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const { return rank_.missing_ranks(); }

    /// For ProgressThread.
    [[nodiscard]] Helper helper() noexcept { return {rank_.group().board(), rank_.rank()}; }

protected:
    /// A place in a group that split() makes.
    struct Slot {
        Group group;
        int rank;
    };

    // Without the constraint it would take the place of the copy that is deleted above.
    template <class... Arguments>
        requires std::constructible_from<Rank, Arguments...>
    explicit BoardCommunicator(Arguments&&... arguments)
        : rank_{std::forward<Arguments>(arguments)...} {}
    /// The rank leaves its group: ranks that wait for it throw PeerFailed. Nothing in a process that
    /// the rank has forked.
    ~BoardCommunicator();

    /// The part of split() that precedes the new communicator.
    [[nodiscard]] Slot allot_slot(int color, int key);

    Rank rank_;

private:
    friend class BasicCollectives<BoardCommunicator, Work>;

    Unwinding unwinding_;

    Work post(Request const& request) { return {rank_, rank_.post(request)}; }
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/board_communicator.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace joinable { inline namespace v0 { namespace detail {

template <class Rank, class Work>
Work BoardCommunicator<Rank, Work>::send(ConstBuffer buffer, int to, int tag) {
    check_memory(buffer);
    check_rank("destination", to, size());
    // A send only reads its buffer; both sides of a message share one type.
    Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
    return {rank_, rank_.post_message(true, to, tag, read)};
}

template <class Rank, class Work>
Work BoardCommunicator<Rank, Work>::receive(Buffer buffer, int from, int tag) {
    check_memory(buffer);
    check_rank("source", from, size());
    return {rank_, rank_.post_message(false, from, tag, buffer)};
}

template <class Rank, class Work>
BoardCommunicator<Rank, Work>::~BoardCommunicator() {
    if (!rank_.home().is_here()) {
        return;
    }
    if (unwinding_.has_begun()) {
        rank_.abort_for_exception("the scope of its communicator");
    }
    rank_.group().leave(rank());
}

template <class Rank, class Work>
typename BoardCommunicator<Rank, Work>::Slot
BoardCommunicator<Rank, Work>::allot_slot(int color, int key) {
    if (color < 0) {
        throw ContractViolation{concat("split needs a color of at least 0, but was given ", color)};
    }
    std::array<std::int32_t, 2> const mine{color, key};
    std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
    this->all_gather({mine.data(), 2, DType::i32}, {all.data(), 2 * all.size(), DType::i32}).wait();
    std::vector<int> members;
    for (int other = 0; other < size(); ++other) {
        if (all[static_cast<std::size_t>(other)][0] == color) {
            members.push_back(other);
        }
    }
    std::sort(members.begin(), members.end(), [&](int a, int b) {
        return std::pair{all[static_cast<std::size_t>(a)][1], a} <
               std::pair{all[static_cast<std::size_t>(b)][1], b};
    });
    int const maker = members.front();
    std::uint64_t const made = rank() == maker ? rank_.make_group(members) : 0;
    std::vector<std::uint64_t> places(all.size());
    this->all_gather({&made, 1, DType::u64}, {places.data(), places.size(), DType::u64}).wait();
    std::uint64_t const place = places[static_cast<std::size_t>(maker)];
    if (place == 0) {
        throw CommunicationError{concat(
            "rank ",
            maker,
            " has no memory left that it shares, for a group of ",
            members.size(),
            " ranks: wait for what is under way, or leave groups before making new ones"
        )};
    }
    auto const slot = std::find(members.begin(), members.end(), rank());
    return {rank_.group().group_at(place), static_cast<int>(slot - members.begin())};
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/home_process.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The process in which an object was made. A process that is forked later has a copy of the
/// object, which must not speak for the rank.
class HomeProcess {
public:
    [[nodiscard]] bool is_here() const noexcept { return id_ == ::getpid(); }
    /// @throws ContractViolation  this is another process.
    void require_here(int rank) const {
        if (!is_here()) {
            throw ContractViolation{concat(
                "expected rank ",
                rank,
                " in process ",
                id_,
                ", which attached, but process ",
                ::getpid(),
                " that was forked since calls its communicator: attach after the fork"
            )};
        }
    }

private:
    pid_t id_ = ::getpid();
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/engine/lent_memory.hpp

/// @file
/// Where the other ranks find the buffers of a large collective until it is done.

namespace joinable { inline namespace v0 { namespace detail {

struct LentAddresses {
    void const* in = nullptr;
    void* out = nullptr;
    std::size_t ring = 0; ///< bytes of the ring to which slices are copied in turn; 0: no ring
};

/// For threads, which access each other's buffers in place.
class OwnMemory {
public:
    static constexpr bool needs_slices = false;

    OwnMemory() = default;
    explicit OwnMemory(std::shared_ptr<Heap> const&) noexcept {}

    [[nodiscard]] static bool lend(std::uint64_t, ConstBuffer, Buffer, std::size_t) noexcept {
        return true;
    }
    [[nodiscard]] static LentAddresses lent(std::uint64_t, ConstBuffer in, Buffer out) noexcept {
        return {in.data, out.data};
    }
    [[nodiscard]] static LentAddresses own(std::uint64_t) noexcept { return {}; }
    static void copy_in(std::uint64_t, std::size_t, std::size_t) noexcept {}
    static void copy_out(std::uint64_t, std::size_t, std::size_t) noexcept {}
    static void give_back(std::uint64_t) noexcept {}
};

/// For processes. They access buffers in arenas in place, and other buffers through copies in
/// memory that all processes can reach.
class StagedMemory {
public:
    static constexpr bool needs_slices = true;

    explicit StagedMemory(std::shared_ptr<Room> room) noexcept : room_{std::move(room)} {}
    /// Uses memory that nothing else uses.
    explicit StagedMemory(std::span<std::byte> memory)
        : StagedMemory{std::make_shared<Room>(memory)} {}
    StagedMemory(StagedMemory&&) = default;
    StagedMemory& operator=(StagedMemory&&) = delete;
    ~StagedMemory() { // the remaining collectives never complete
        for (Loan const& loan : loans_) {
            free(loan);
        }
    }

    /// See Room.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) {
        return room_->arena(bytes, alignment);
    }

    /// Copies the input to free shared memory, unless it is in an arena. If `ring` is not 0, a
    /// larger message gets only a ring of that many bytes; its input and output must then be the
    /// same, or one of them empty. Returns false if there is no room until something is given back.
    /// Linear in the elements.
    /// @throws ContractViolation  there will never be room. Throws what the Room throws.
    [[nodiscard]] bool
    lend(std::uint64_t sequence, ConstBuffer in, Buffer out, std::size_t ring = 0);
    [[nodiscard]] LentAddresses lent(std::uint64_t sequence, ConstBuffer, Buffer) const noexcept {
        return loans_[sequence % loans_.size()].at;
    }

    /// The rank's own addresses of the buffers of a collective that moves in slices.
    [[nodiscard]] LentAddresses own(std::uint64_t sequence) const noexcept;
    /// Copies the bytes [begin, end) of the input to their place in the ring. They must not pass
    /// its end.
    void copy_in(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept;
    /// Copies them from the ring to the output.
    void copy_out(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept;

    /// Copies the output to the rank's own buffer, unless it was written there directly.
    void give_back(std::uint64_t sequence) noexcept;

private:
    struct Loan {
        std::byte* copies = nullptr; ///< null: nothing was copied
        std::size_t bytes = 0;
        LentAddresses at = {};
        ConstBuffer in = {}; ///< copied to `copies`
        Buffer out = {};     ///< copied back from there
    };
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memcpy(to, from, bytes);
        }
    }
    void free(Loan const& loan) noexcept {
        if (loan.copies != nullptr) {
            room_->free(loan.copies, loan.bytes);
        }
    }

    std::shared_ptr<Room> room_;
    std::array<Loan, Board::max_in_flight> loans_{};
};

/// The class for a rank that has its memory from `Memory`.
template <class Memory>
using LentBy = std::conditional_t<Memory::is_all_in_reach, OwnMemory, StagedMemory>;

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/engine/lent_memory.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool
StagedMemory::lend(std::uint64_t sequence, ConstBuffer in, Buffer out, std::size_t ring) {
    bool const copies_in = !room_->reaches(in);
    bool const copies_out = !room_->reaches(out);
    bool const is_in_place = in.data == out.data && copies_in;
    std::size_t const in_bytes = copies_in ? in_cache_lines(in.bytes()) : 0;
    std::size_t const out_at = is_in_place ? 0 : in_bytes;
    std::size_t const out_end = copies_out ? out_at + in_cache_lines(out.bytes()) : 0;
    std::size_t const all = (std::max)(in_bytes, out_end);
    bool const is_sliced = ring != 0 && all > ring;
    std::size_t const bytes = is_sliced ? ring : all;
    if (bytes > room_->size()) {
        throw ContractViolation{concat(
            "a collective of ",
            bytes,
            " bytes does not fit in the ",
            room_->size(),
            " bytes that a process rank shares: cut it into smaller ones"
        )};
    }
    std::byte* const copies = bytes == 0 ? nullptr : room_->allocate(bytes);
    if (bytes != 0 && copies == nullptr) {
        return false;
    }
    Loan& loan = loans_[sequence % loans_.size()];
    loan = {copies, bytes, {}, copies_in ? in : ConstBuffer{}, copies_out ? out : Buffer{}};
    if (is_sliced) {
        loan.at = {copies, copies, ring};
        return true;
    }
    loan.at = {copies_in ? copies : in.data, copies_out ? copies + out_at : out.data};
    copy(copies, loan.in.data, loan.in.bytes());
    return true;
}

JOINABLE_DEFINITION LentAddresses StagedMemory::own(std::uint64_t sequence) const noexcept {
    Loan const& loan = loans_[sequence % loans_.size()];
    return loan.at.ring == 0 ? loan.at : LentAddresses{loan.in.data, loan.out.data};
}

JOINABLE_DEFINITION void
StagedMemory::copy_in(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept {
    Loan const& loan = loans_[sequence % loans_.size()];
    if (loan.in.count != 0) {
        auto const* const from = static_cast<std::byte const*>(loan.in.data) + begin;
        copy(loan.copies + begin % loan.bytes, from, end - begin);
    }
}

JOINABLE_DEFINITION void
StagedMemory::copy_out(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept {
    Loan const& loan = loans_[sequence % loans_.size()];
    if (loan.out.count != 0) {
        auto* const to = static_cast<std::byte*>(loan.out.data) + begin;
        copy(to, loan.copies + begin % loan.bytes, end - begin);
    }
}

JOINABLE_DEFINITION void StagedMemory::give_back(std::uint64_t sequence) noexcept {
    Loan& loan = loans_[sequence % loans_.size()];
    if (loan.at.ring == 0) {
        copy(loan.out.data, loan.at.out, loan.out.bytes());
    }
    free(loan);
    loan = {};
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/engine/endpoint.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One rank at a board. It posts its collectives and finishes them in any order.
///
/// Copies of a `Group` are the same group. It has these members:
/// - board()
/// - abort(reason, rank), which may abort more than the board.
/// - look_for_deaths(), which marks dead ranks where no other process does. It returns how long it
///   need not be called.
/// - reserve(), which is called before the rank uses memory of the board for the first time.
///
/// `Memory` is where the other ranks find this rank's buffers.
template <class Group, class Memory = OwnMemory>
class Endpoint {
public:
    Endpoint(Group group, int rank, Memory memory = {}) noexcept;
    Endpoint(Endpoint const&) = delete;
    Endpoint& operator=(Endpoint const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return board_.size(); }

    [[nodiscard]] std::chrono::nanoseconds deadline() const noexcept { return deadline_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    void abort(AbortReason const& reason) { group_.abort(reason, rank_); }

    void keep_alive() noexcept { board_.alive_at(rank_).store(now().time_since_epoch().count()); }

    /// The ranks that have not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        return retired_ == next_ ? std::vector<int>{} : board_.missing(retired_);
    }

    [[nodiscard]] Memory& memory() noexcept { return memory_; }

    /// Arrives in the next collective and returns its number.
    std::uint64_t post(Request const& request);

    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < retired_ || pending_[sequence % Board::max_in_flight].is_done;
    }

    /// Makes progress. Returns whether this rank's buffers are final.
    /// @throws TimedOut  after aborting the group: polling reached the deadline, and ranks are
    ///                   missing.
    [[nodiscard]] bool test(std::uint64_t sequence);

    /// Makes progress, by at most this rank's own share if that is not computed yet. A rank that
    /// tests during other work thus does no more than the others. Also moves slices of other
    /// collectives, for which other ranks may wait. Returns whether its buffers are final.
    [[nodiscard]] bool progress(std::uint64_t sequence);

    /// Makes progress, by up to that many shares. Returns whether this rank's buffers are final.
    [[nodiscard]] bool try_finish(std::uint64_t sequence, int shares);

    void finish(std::uint64_t sequence);

    /// Waits until `ready()` or until the deadline. The deadline starts again when a rank for which
    /// this one waits calls keep_alive(). `holding_up()` lists those ranks. If it is empty at the
    /// deadline, the wait returns although `ready()` is false.
    /// @throws TimedOut  after aborting the group: they "did not <do>", while this rank `does()`.
    template <class Ready, class HoldingUp, class Does>
    void wait_for_others(
        Ready const& ready, HoldingUp const& holding_up, char const* to_do, Does const& does
    );
    /// The same for a rank that tests instead of waiting, and has just found that it is not ready.
    /// Returns whether the group was aborted because of that.
    template <class HoldingUp, class Does>
    [[nodiscard]] bool has_polled_too_long(
        PolledTime& polled, HoldingUp const& holding_up, char const* to_do, Does const& does
    );

    /// Waits for `ready()` until the deadline; returns whether it came true. Meanwhile this rank's
    /// other collectives make progress. The deadline starts again whenever one of them does.
    template <class Ready>
    bool wait(Ready const& ready, std::chrono::nanoseconds deadline);

private:
    struct Pending {
        Descriptor said;
        void* out = nullptr;
        bool is_small = false;   ///< every rank combines it by itself
        bool is_on_line = false; ///< it fits on the arrival line and needs no slot
        bool is_sliced = false;  ///< else in chunks
        bool is_done = false;
        bool has_agreed = false;
        bool is_refused = false; ///< the ranks' calls differ: nothing to compute
        Cut cut = {};
        Pipeline pipeline = {};
        PolledTime polled = {};
    };
    enum class Arrival : std::uint8_t { waiting, complete, never };

    [[nodiscard]] static std::chrono::steady_clock::time_point now() noexcept {
        return std::chrono::steady_clock::now();
    }
    [[nodiscard]] Pending& pending_of(std::uint64_t sequence) noexcept {
        return pending_[sequence % Board::max_in_flight];
    }

    /// Keeps in `overdue` the ranks that have not called keep_alive() for a deadline, while this
    /// one waited for them. Returns how much longer to wait for the others.
    [[nodiscard]] std::chrono::nanoseconds
    take_overdue(std::vector<int>& overdue, std::chrono::nanoseconds waited);
    /// Called before this rank writes to its slot or table at this position of the board.
    void reserve_once(
        std::uint64_t& reserved, std::uint64_t sequence, void const* data, std::size_t bytes
    );
    /// Gives up on ranks that have not finished a chunk at the deadline: their processes have been
    /// stopped.
    void give_up_on_computing(std::uint64_t sequence);
    /// Waits until the pipeline can advance, or never will.
    void wait_for_slices(std::uint64_t sequence);
    [[nodiscard]] bool has_given_up(std::uint64_t sequence) noexcept {
        return board_.progress(rank_, sequence).has_given_up.load();
    }
    void give_up(std::uint64_t sequence) noexcept;

    /// The slot of the next collective is free when every rank has finished the collective that
    /// used it before.
    void make_room();

    /// The first collective of this rank in which it can compute. If there is none, the next
    /// number.
    [[nodiscard]] std::uint64_t find_other() noexcept {
        std::uint64_t other = retired_;
        while (other != next_ && !can_compute(other)) {
            ++other;
        }
        return other;
    }
    [[nodiscard]] bool can_compute(std::uint64_t sequence) noexcept;
    /// Whether this rank can copy or compute slices.
    [[nodiscard]] bool has_slices(std::uint64_t sequence) noexcept;
    void advance_other(std::uint64_t sequence) noexcept;
    [[nodiscard]] bool has_own_share(std::uint64_t sequence, Pending const& pending) noexcept {
        return !pending.is_small && has_unclaimed(board_, sequence, pending.cut, rank_);
    }
    [[nodiscard]] Arrival arrival_of(std::uint64_t sequence) noexcept;

    void retire() noexcept;

    void
    abort_for(std::vector<int> const& overdue, char const* to_do, std::string const& meanwhile) {
        group_.abort(reason_of_delay(overdue, to_do, deadline_, rank_, meanwhile), rank_);
    }

    Group group_;
    Board& board_;
    int rank_;
    Memory memory_;
    std::chrono::nanoseconds deadline_ = default_deadline;
    std::uint64_t next_ = 0;        ///< sequence number of the next collective
    std::uint64_t retired_ = 0;     ///< this rank has finished all before
    std::uint64_t all_retired_ = 0; ///< all ranks have, as far as known
    static_assert(Board::max_in_flight == 64, "a bit for each");
    std::uint64_t slots_ = 0;  ///< of this rank that have memory
    std::uint64_t counts_ = 0; ///< tables that have memory
    std::array<Pending, Board::max_in_flight> pending_{};
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/engine/endpoint.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <bit>

namespace joinable { inline namespace v0 { namespace detail {

template <class Group, class Memory>
Endpoint<Group, Memory>::Endpoint(Group group, int rank, Memory memory) noexcept
    : group_{group}, board_{group_.board()}, rank_{rank}, memory_{std::move(memory)} {}

template <class Group, class Memory>
std::uint64_t Endpoint<Group, Memory>::post(Request const& request) {
    auto const& [said, in, out, sends, expects] = request;
    make_room();
    std::uint64_t const sequence = next_;
    std::size_t const bytes = said.count * size_of(said.dtype);
    bool const is_small = detail::is_small(said);
    bool const is_on_line = is_small && bytes <= ArrivalLine::inline_bytes;
    pending_of(sequence) = {said, out.data, is_small, is_on_line};
    ArrivalLine& line = board_.line(rank_, sequence);
    std::uint64_t old = line.word.load(std::memory_order_acquire); // of the reason, if frozen
    if ((old & ArrivalLine::frozen) != 0) {
        throw_failure(board_.reason());
    }
    if (!is_on_line) {
        line.payload[ArrivalLine::count] = said.count;
    }
    if (!is_small) {
        std::size_t const ring = Slices::fit(said.collective) ? Slices::ring_bytes(board_) : 0;
        while (!memory_.lend(sequence, in, out, ring)) {
            if (retired_ == next_) {
                throw ContractViolation{
                    "a collective finds no place in the memory that a rank shares: wait for "
                    "messages and for collectives of other groups that are under way"
                };
            }
            finish(retired_);
        }
        LentAddresses const at = memory_.lent(sequence, in, out);
        line.payload[ArrivalLine::in] = board_.place_of(at.in);
        line.payload[ArrivalLine::out] = board_.place_of(at.out);
        line.payload[ArrivalLine::factor] = std::bit_cast<std::uint64_t>(said.factor);
        line.payload[ArrivalLine::ring] = at.ring;
        if (said.has_counts) {
            auto const mine = board_.sends(rank_, sequence);
            reserve_once(counts_, sequence, mine.data(), 2 * mine.size_bytes());
            sends.copy_to(mine);
            expects.copy_to(board_.expects(rank_, sequence));
        }
        board_.progress(rank_, sequence).reset();
    } else if (in.count != 0) {
        auto* const place = contribution(board_, sequence, rank_, is_on_line);
        if (!is_on_line) {
            reserve_once(slots_, sequence, place, tuning::slot_bytes);
        }
        std::memcpy(place, in.data, bytes);
    }
    std::uint64_t const word = ArrivalLine::encode(sequence, said, is_on_line);
    if (!line.word.compare_exchange_strong(old, word)) { // frozen meanwhile: aborted
        throw_failure(board_.reason());
    }
    ++next_;
    board_.room.wake();
    if (!is_small && board_.helpers_room.has_sleepers() &&
        arrival_of(sequence) == Arrival::complete) {
        board_.helpers_room.wake(); // the last rank to arrive does this
    }
    return sequence;
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::test(std::uint64_t sequence) {
    if (progress(sequence)) {
        return true;
    }
    Pending& pending = pending_of(sequence);
    return arrival_of(sequence) == Arrival::waiting &&
           has_polled_too_long(
               pending.polled,
               [&] { return board_.missing(sequence); },
               "arrive",
               [&] { return "waits in " + pending.said.text(); }
           ) &&
           progress(sequence); // throws unless all have arrived meanwhile
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::progress(std::uint64_t sequence) {
    Pending const& pending = pending_of(sequence);
    bool const is_first =
        !is_done(sequence) && (!pending.has_agreed || has_own_share(sequence, pending));
    if (try_finish(sequence, is_first ? 1 : size())) {
        return true;
    }
    for (std::uint64_t other = retired_; Memory::needs_slices && other != next_; ++other) {
        if (other != sequence && has_slices(other)) {
            advance_other(other);
        }
    }
    group_.look_for_deaths(); // a rank that polls may never wait
    return false;
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::try_finish(std::uint64_t sequence, int shares) {
    if (is_done(sequence)) {
        return true;
    }
    Pending& pending = pending_of(sequence);
    if (!pending.has_agreed) {
        switch (arrival_of(sequence)) {
        case Arrival::waiting: return false;
        case Arrival::never: throw_failure(board_.reason());
        case Arrival::complete: break;
        }
        if (auto const reason = disagreement(board_, sequence, pending.said)) {
            pending.is_refused = true;
            group_.abort(*reason, rank_);
            throw_failure(*reason);
        }
        pending.is_sliced = !pending.is_small && Pipeline::is_needed(board_, sequence);
        if (pending.is_sliced) {
            pending.pipeline = Pipeline{board_, sequence, pending.said};
        } else if (!pending.is_small) {
            pending.cut =
                Cut{Exchange{board_, sequence, pending.said}, size_of(pending.said.dtype), size()};
        }
        pending.has_agreed = true;
    }
    if (pending.is_small) {
        combine_contributions(
            board_, sequence, pending.said, pending.is_on_line, rank_, pending.out
        );
    } else if (pending.is_sliced) {
        if (!pending.pipeline.advance(board_, pending.said, rank_, memory_)) {
            if (pending.pipeline.is_lost(board_)) {
                give_up(sequence);
                if (!pending.pipeline.is_in_use(board_)) {
                    throw_failure(board_.reason());
                }
            }
            return false;
        }
        memory_.give_back(sequence);
    } else if (run_chunks(board_, sequence, pending.said, pending.cut, rank_, shares)) {
        memory_.give_back(sequence);
    } else if (shares == size() && chunks_are_lost(board_, sequence, pending.cut)) {
        throw_failure(board_.reason());
    } else {
        return false;
    }
    pending.is_done = true;
    retire();
    return true;
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::finish(std::uint64_t sequence) {
    if (try_finish(sequence, size())) {
        return;
    }
    Pending const& pending = pending_of(sequence);
    wait_for_others(
        [&] { return arrival_of(sequence) != Arrival::waiting; },
        [&] { return board_.missing(sequence); },
        "arrive",
        [&] { return "waits in " + pending.said.text(); }
    );
    while (!try_finish(sequence, size())) { // all ranks have arrived
        if (pending.is_sliced) {
            wait_for_slices(sequence);
            continue;
        }
        auto const is_over = [&] { // the last chunks are being computed
            return chunks_are_done(board_, sequence, pending.cut) ||
                   chunks_are_lost(board_, sequence, pending.cut);
        };
        // A thread never stops for long, and even a late one still writes to this rank's buffer.
        if (!wait(is_over, deadline_) && Memory::needs_slices) {
            give_up_on_computing(sequence);
        }
    }
}

template <class Group, class Memory>
template <class Ready, class HoldingUp, class Does>
void Endpoint<Group, Memory>::wait_for_others(
    Ready const& ready, HoldingUp const& holding_up, char const* to_do, Does const& does
) {
    auto const start = now();
    std::chrono::nanoseconds left = deadline_;
    while (!wait(ready, left)) {
        std::vector<int> overdue = holding_up();
        if (overdue.empty()) {
            return;
        }
        left = take_overdue(overdue, now() - start);
        if (!overdue.empty()) {
            abort_for(overdue, to_do, does());
        }
    }
}

template <class Group, class Memory>
template <class HoldingUp, class Does>
bool Endpoint<Group, Memory>::has_polled_too_long(
    PolledTime& polled, HoldingUp const& holding_up, char const* to_do, Does const& does
) {
    if (!polled.reaches(deadline_)) {
        return false;
    }
    std::vector<int> overdue = holding_up();
    polled.set(deadline_ - take_overdue(overdue, polled.count()));
    if (!overdue.empty()) {
        abort_for(overdue, to_do, does());
    }
    return !overdue.empty();
}

template <class Group, class Memory>
template <class Ready>
bool Endpoint<Group, Memory>::wait(Ready const& ready, std::chrono::nanoseconds deadline) {
    for (;;) {
        std::uint64_t other = next_;
        auto const is_ready_or_free = [&] { return ready() || (other = find_other()) != next_; };
        if (!board_.room.wait(is_ready_or_free, deadline, [&] {
                return group_.look_for_deaths();
            })) {
            return false;
        }
        if (other == next_) {
            return true;
        }
        advance_other(other);
    }
}

template <class Group, class Memory>
std::chrono::nanoseconds
Endpoint<Group, Memory>::take_overdue(std::vector<int>& overdue, std::chrono::nanoseconds waited) {
    return take_ranks_at_work(overdue, deadline_, [&](int rank) {
        std::chrono::steady_clock::time_point const alive{
            std::chrono::steady_clock::duration{board_.alive_at(rank).load()}
        };
        return (std::min)(waited, std::chrono::nanoseconds{now() - alive});
    });
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::reserve_once(
    std::uint64_t& reserved, std::uint64_t sequence, void const* data, std::size_t bytes
) {
    std::uint64_t const bit = std::uint64_t{1} << sequence % Board::max_in_flight;
    if ((reserved & bit) == 0) {
        group_.reserve(data, bytes);
        reserved |= bit;
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::give_up_on_computing(std::uint64_t sequence) {
    std::vector<int> const overdue = board_.computing(sequence);
    if (!overdue.empty()) {
        abort_for(overdue, "finish its share", "waits in " + pending_of(sequence).said.text());
    }
    for (int const rank : overdue) {
        board_.give_up_on(rank);
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::wait_for_slices(std::uint64_t sequence) {
    Pipeline const& pipeline = pending_of(sequence).pipeline;
    auto const is_over = [&] {
        return is_done(sequence) || pipeline.can_advance(board_, rank_) ||
               (pipeline.is_lost(board_) && (!has_given_up(sequence) || !pipeline.is_in_use(board_))
               );
    };
    wait_for_others(
        is_over,
        [&] { return board_.is_aborted() ? std::vector<int>{} : pipeline.holding_up(board_); },
        "copy a slice",
        [&] { return "waits in " + pending_of(sequence).said.text(); }
    );
    if (!is_over()) { // the deadline of a group that had failed before
        give_up(sequence);
        throw_failure(board_.reason());
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::give_up(std::uint64_t sequence) noexcept {
    if (!has_given_up(sequence)) {
        board_.progress(rank_, sequence).has_given_up.store(true);
        board_.room.wake();
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::make_room() {
    constexpr std::uint64_t max_in_flight = Board::max_in_flight;
    if (next_ < max_in_flight + all_retired_) {
        return;
    }
    if (retired_ + max_in_flight <= next_) {
        finish(retired_);
    }
    auto const others_have_room = [&] {
        all_retired_ = next_;
        for (int rank = 0; rank < size(); ++rank) {
            all_retired_ = (std::min)(all_retired_, board_.release(rank));
        }
        return next_ < max_in_flight + all_retired_ || board_.is_aborted();
    };
    wait_for_others(
        others_have_room,
        [&] { return board_.holding_up(next_); },
        "finish a collective",
        [] { return "posts another one"; }
    );
    if (board_.is_aborted()) {
        throw_failure(board_.reason());
    }
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::can_compute(std::uint64_t sequence) noexcept {
    Pending const& pending = pending_of(sequence);
    return !pending.is_small && !pending.is_done && !pending.is_refused &&
           arrival_of(sequence) == Arrival::complete &&
           (!pending.has_agreed ||
            (pending.is_sliced ? pending.pipeline.can_advance(board_, rank_)
                               : has_unclaimed(board_, sequence, pending.cut)));
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::has_slices(std::uint64_t sequence) noexcept {
    Pending const& pending = pending_of(sequence);
    return can_compute(sequence) &&
           (pending.has_agreed ? pending.is_sliced : Pipeline::is_needed(board_, sequence));
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::advance_other(std::uint64_t sequence) noexcept {
    try {
        static_cast<void>(try_finish(sequence, size()));
    } catch (...) { // NOLINT(bugprone-empty-catch): its own wait() throws it
    }
}

template <class Group, class Memory>
typename Endpoint<Group, Memory>::Arrival Endpoint<Group, Memory>::arrival_of(std::uint64_t sequence
) noexcept {
    for (int rank = 0; rank < size(); ++rank) {
        std::uint64_t const word = board_.line(rank, sequence).word.load();
        if ((word & ArrivalLine::sequence_mask) != (sequence & ArrivalLine::sequence_mask)) {
            return (word & ArrivalLine::frozen) != 0 ? Arrival::never : Arrival::waiting;
        }
    }
    return Arrival::complete;
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::retire() noexcept {
    std::uint64_t retired = retired_;
    while (retired < next_ && pending_of(retired).is_done) {
        ++retired;
    }
    if (retired != retired_) {
        retired_ = retired;
        board_.retired(rank_).store(retired);
        board_.room.wake();
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/group/thread_models.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The memory of the models that thread ranks are making, of all groups. Any thread may call it.
class ThreadModels {
public:
    /// `group` identifies the group whose ranks make the model.
    /// @throws ContractViolation  a rank that makes the same model has entered some of this memory.
    ///         The entry stays until leave().
    void enter(void const* group, TrainedMemory const& memory);
    void leave(TrainedMemory const& memory) noexcept;

private:
    static void require_apart(TrainedMemory const& memory, TrainedMemory const& other);

    struct Entry {
        void const* group;
        TrainedMemory const* memory;
    };

    std::mutex mutex_;
    std::vector<Entry> entries_;
};

/// The same for one rank of one group.
class ThreadModelTable final : public ModelTable {
public:
    ThreadModelTable(ThreadModels& models, void const* group) noexcept
        : models_{models}, group_{group} {}
    void enter(TrainedMemory const& memory) override { models_.enter(group_, memory); }
    void leave(TrainedMemory const& memory) noexcept override { models_.leave(memory); }

private:
    ThreadModels& models_;
    void const* group_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/thread_models.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void ThreadModels::enter(void const* group, TrainedMemory const& memory) {
    std::lock_guard const lock{mutex_};
    entries_.push_back({group, &memory});
    for (Entry const& other : entries_) {
        if (other.group == group && other.memory->number == memory.number) {
            require_apart(memory, *other.memory);
        }
    }
}

JOINABLE_DEFINITION void
ThreadModels::require_apart(TrainedMemory const& memory, TrainedMemory const& other) {
    std::size_t const own = memory.parts.size();
    std::vector<AddressRange> ranges = memory.ranges;
    for (AddressRange range : other.ranges) {
        range.index += own;
        ranges.push_back(range);
    }
    auto const shared = find_shared(
        std::move(ranges),
        [&](std::size_t i) { return i < own ? memory.view_of(i) : other.view_of(i - own); },
        [&](std::size_t i, std::size_t k) {
            return i < own && k >= own && memory.rank != other.rank;
        }
    );
    if (!shared) {
        return;
    }
    std::string text = memory.text_of(shared->first);
    std::string there = other.text_of(shared->second - own);
    bool const are_alike = text == there;
    int const ranks[] = {(std::min)(memory.rank, other.rank), (std::max)(memory.rank, other.rank)};
    if (are_alike) {
        text = concat("ranks ", ranks[0], " and ", ranks[1], " share ", text);
    } else {
        if (other.rank == ranks[0]) {
            text.swap(there);
        }
        text +=
            concat(" on rank ", ranks[0], " and ", there, " on rank ", ranks[1], " share memory");
    }
    text += "; make a model for each rank, in the body of run_threads";
    if (are_alike && !memory.parts[shared->first].is_gradient) {
        text += ", or set DataParallelOptions::shares_values";
    }
    throw ContractViolation{text};
}

JOINABLE_DEFINITION void ThreadModels::leave(TrainedMemory const& memory) noexcept {
    std::lock_guard const lock{mutex_};
    std::erase_if(entries_, [&](Entry const& entry) { return entry.memory == &memory; });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/group/group_storage.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The memory of a rank (Room) or of all thread ranks together (Heap), and the groups in it. The
/// communicators that use it keep it alive. Any thread may call it.
template <class Memory>
class GroupStorage {
public:
    template <class... Arguments>
    explicit GroupStorage(Arguments const&... arguments) : memory_{arguments...} {}
    ~GroupStorage() {
        for (Owned const& owned : groups_) {
            give_back(owned);
        }
    }
    GroupStorage(GroupStorage const&) = delete;
    GroupStorage& operator=(GroupStorage const&) = delete;

    [[nodiscard]] Memory& memory() noexcept { return memory_; }
    /// Of thread ranks, which all have this storage.
    [[nodiscard]] ThreadModels& models() noexcept { return models_; }

    /// Makes a group of ranks with these numbers; `maker` is the caller's number. Nothing if there
    /// is no memory. Also frees the memory of groups that all ranks have left.
    [[nodiscard]] std::optional<Group> make(std::span<int const> numbers, int maker) {
        std::lock_guard const lock{mutex_};
        for (std::size_t i = groups_.size(); i-- > 0;) { // subgroups before their parents
            if (groups_[i].group.retire(maker)) {
                give_back(groups_[i]);
                groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(i));
            }
        }
        int const size = static_cast<int>(numbers.size());
        std::size_t const bytes = Group::bytes_for(size);
        groups_.reserve(groups_.size() + 1);
        std::byte* const block =
            memory_.allocate(bytes, Group::parts_at_start(size), Group::zeros_at_start(size));
        if (block == nullptr) {
            return std::nullopt;
        }
        groups_.push_back({Group::create(numbers, {block, bytes}), bytes});
        return groups_.back().group;
    }

private:
    struct Owned {
        Group group;
        std::size_t bytes;
    };
    void give_back(Owned const& owned) noexcept {
        memory_.free(reinterpret_cast<std::byte*>(&owned.group.board()), owned.bytes);
    }

    Memory memory_;
    ThreadModels models_;
    std::mutex mutex_;
    std::vector<Owned> groups_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/group_rank.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One side's view of its message.
struct Message {
    bool is_send = false;
    int peer = -1; ///< the rank of the other side
    int tag = 0;
    Buffer buffer = {};
    PendingMessage* pending = nullptr; ///< while it waits; null: delivered
    PolledTime polled = {};

    [[nodiscard]] std::string text() const {
        return text_of_message(is_send, tag, buffer.count, buffer.dtype);
    }
};

/// The common part of a rank's communicator and works.
///
/// The second rank to arrive copies the message, so no background progress is needed and a busy
/// rank delays nobody. If ranks cannot reach each other's buffers, the first one leaves a copy, or
/// room for one, in memory that both reach.
template <class Memory>
class GroupRank : public Endpoint<Group, LentBy<Memory>> {
    using Base = Endpoint<Group, LentBy<Memory>>;

public:
    GroupRank(Group group, int rank, std::shared_ptr<GroupStorage<Memory>> storage);

    [[nodiscard]] Group const& group() const noexcept { return group_; }
    [[nodiscard]] std::shared_ptr<GroupStorage<Memory>> const& storage() const noexcept {
        return storage_;
    }

    [[nodiscard]] HomeProcess const& home() const noexcept { return home_; }

    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what);

    /// Makes a group of these ranks of this group, in their order; this rank is the first. Returns
    /// its offset from this board, or 0 if there is no memory.
    /// @throws PeerFailed, ...  this group was aborted.
    [[nodiscard]] std::uint64_t make_group(std::vector<int> members);

    /// Leaves a message for the other side, or delivers it at once.
    /// @throws Mismatch           the other side has another count or dtype; on both, unless the
    ///                            group has failed before.
    /// @throws ContractViolation  the memory for this rank's messages is full.
    [[nodiscard]] Message post_message(bool is_send, int peer, int tag, Buffer buffer);

    /// Whether waiting for the message would return at once, or throw.
    [[nodiscard]] bool is_settled(Message const& message) const noexcept;

    /// Blocks until the message is settled. After that no rank accesses its buffer. Returns whether
    /// it was delivered; if not, group().loss(peer) is the reason.
    [[nodiscard]] bool finish_message(Message& message);

    /// Call this when the message is not settled. Returns whether polling has reached the deadline;
    /// if so, the group is aborted.
    [[nodiscard]] bool has_polled_message_too_long(Message& message);

private:
    using State = PendingMessage::State;

    [[nodiscard]] static bool waits(Message const& message) noexcept {
        return message.pending->state.load() == State::waiting;
    }
    [[nodiscard]] static std::vector<int> missing_in(Message const& message) {
        return waits(message) ? std::vector{message.peer} : std::vector<int>{};
    }
    [[nodiscard]] static char const* what_is_missing(Message const& message) noexcept {
        return message.is_send ? "receive" : "send";
    }

    /// @throws CommunicationError  there is no memory for it; only the first message may need some.
    [[nodiscard]] Mailbox& mailbox_of(Message const& message);
    [[nodiscard]] std::byte* data_of(PendingMessage const& pending) noexcept {
        return group_.board().place_at(pending.data);
    }
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memmove(to, from, bytes); // a rank may send to itself
        }
    }

    /// Waits until this rank has locked the mailbox, or never will. Returns whether it has.
    [[nodiscard]] bool lock(Mailbox& mailbox, int peer);

    void unlock(Mailbox& mailbox) noexcept {
        mailbox.unlock();
        group_.board().room.wake(); // a rank may wait for it, whatever happens to this message
    }

    /// Takes the other side's message, if there is one. Otherwise leaves this side's, if it has
    /// been written.
    [[nodiscard]] PendingMessage* meet(Message& message);

    void deliver(Message const& message, PendingMessage& other) noexcept;

    /// Whether the message was delivered. If not, the other side can no longer find it, or the
    /// other process was stopped while it copied the message and keeps it.
    [[nodiscard]] bool is_delivered(Message& message);
    void abort_for_copy(Message const& message);

    /// Whether the other side can reach the buffer itself. There is no copy then.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return storage_->memory().reaches(buffer);
    }
    [[nodiscard]] std::size_t bytes_of(Message const& message) const noexcept {
        return sizeof(PendingMessage) + (is_in_reach(message.buffer) ? 0 : message.buffer.bytes());
    }
    [[nodiscard]] PendingMessage& write_message(Message const& message);
    void throw_away(Message& message) noexcept;

    [[noreturn]] void throw_mismatch(Message const& mine, Message const& theirs);

    Group group_;
    HomeProcess home_;
    std::shared_ptr<GroupStorage<Memory>> storage_;
    std::array<std::vector<bool>, 2> mailboxes_; ///< that have memory: from this rank, to it
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/group_rank.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <new>
#include <optional>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

template <class Memory>
GroupRank<Memory>::GroupRank(Group group, int rank, std::shared_ptr<GroupStorage<Memory>> storage)
    : Base{group, rank, LentBy<Memory>{std::shared_ptr<Memory>{storage, &storage->memory()}}},
      group_{group}, storage_{std::move(storage)} {}

template <class Memory>
void GroupRank<Memory>::abort_for_exception(std::string const& what) {
    group_.abort(
        blamed_on(this->rank(), {FailureKind::peer_failed, {}, "an exception left " + what}),
        this->rank()
    );
}

template <class Memory>
std::uint64_t GroupRank<Memory>::make_group(std::vector<int> members) {
    for (int& member : members) {
        member = group_.number_of(member);
    }
    std::optional<Group> made;
    try {
        made = storage_->make(members, members.front());
    } catch (std::bad_alloc const&) { // NOLINT(bugprone-empty-catch): all members get no group
    }
    if (!made) {
        return 0;
    }
    if (!group_.adopt(*made)) {
        throw_failure(group_.loss(this->rank()));
    }
    return group_.board().place_of(&made->board());
}

template <class Memory>
Message GroupRank<Memory>::post_message(bool is_send, int peer, int tag, Buffer buffer) {
    Message message{is_send, peer, tag, buffer};
    PendingMessage* other = meet(message);
    if (other == nullptr) {
        message.pending = &write_message(message);
        other = meet(message); // it may have come meanwhile
    }
    if (other != nullptr) {
        deliver(message, *other);
        throw_away(message);
        group_.board().room.wake();
    }
    return message;
}

template <class Memory>
bool GroupRank<Memory>::is_settled(Message const& message) const noexcept {
    switch (message.pending->state.load()) {
    case PendingMessage::State::waiting: return group_.is_lost(message.peer);
    case PendingMessage::State::taken: return group_.board().is_dead(message.peer);
    case PendingMessage::State::done: break;
    }
    return true;
}

template <class Memory>
bool GroupRank<Memory>::finish_message(Message& message) {
    if (!is_settled(message)) {
        this->wait_for_others(
            [&] { return !waits(message) || group_.is_lost(message.peer); },
            [&] { return missing_in(message); },
            what_is_missing(message),
            [&] { return "waits in " + message.text(); }
        );
    }
    bool const has_come = is_delivered(message);
    if (has_come && !message.is_send && !is_in_reach(message.buffer)) {
        copy(message.buffer.data, data_of(*message.pending), message.buffer.bytes());
    }
    throw_away(message);
    return has_come;
}

template <class Memory>
bool GroupRank<Memory>::has_polled_message_too_long(Message& message) {
    return this->has_polled_too_long(
        message.polled,
        [&] { return missing_in(message); },
        what_is_missing(message),
        [&] { return "waits in " + message.text(); }
    );
}

template <class Memory>
Mailbox& GroupRank<Memory>::mailbox_of(Message const& message) {
    auto const peer = static_cast<std::size_t>(message.peer);
    Mailbox& mailbox = message.is_send ? group_.mailbox(this->rank(), message.peer)
                                       : group_.mailbox(message.peer, this->rank());
    std::vector<bool>& reserved = mailboxes_[message.is_send ? 1 : 0];
    reserved.resize(static_cast<std::size_t>(this->size()));
    if (!reserved[peer]) {
        group_.reserve(&mailbox, sizeof mailbox);
        reserved[peer] = true;
    }
    return mailbox;
}

template <class Memory>
bool GroupRank<Memory>::lock(Mailbox& mailbox, int peer) {
    bool is_mine = mailbox.try_lock();
    if (!is_mine) {
        this->wait_for_others(
            [&] { return (is_mine = mailbox.try_lock()) || group_.is_lost(peer); },
            [&] { return std::vector{peer}; },
            "let a mailbox go",
            [] { return "waits for it"; }
        );
    }
    return is_mine;
}

template <class Memory>
PendingMessage* GroupRank<Memory>::meet(Message& message) {
    Board& board = group_.board();
    Mailbox& mailbox = mailbox_of(message);
    if (!lock(mailbox, message.peer)) {
        throw_away(message);
        throw_failure(group_.loss(message.peer));
    }
    PendingMessage* const other = mailbox.find(board, message.is_send, message.tag);
    if (other != nullptr) {
        Message const theirs{
            !message.is_send, this->rank(), other->tag, {nullptr, other->count, other->dtype}
        };
        if (other->count != message.buffer.count || other->dtype != message.buffer.dtype) {
            unlock(mailbox);
            throw_away(message);
            throw_mismatch(message, theirs);
        }
        mailbox.remove(board, *other);
        other->state.store(State::taken);
    } else if (message.pending != nullptr) {
        mailbox.append(board, *message.pending);
    }
    unlock(mailbox);
    return other;
}

template <class Memory>
void GroupRank<Memory>::deliver(Message const& message, PendingMessage& other) noexcept {
    if (message.is_send) {
        copy(data_of(other), message.buffer.data, message.buffer.bytes());
    } else {
        copy(message.buffer.data, data_of(other), message.buffer.bytes());
    }
    other.state.store(State::done); // the other rank may now destroy it
}

template <class Memory>
bool GroupRank<Memory>::is_delivered(Message& message) {
    PendingMessage& pending = *message.pending;
    Mailbox& mailbox = mailbox_of(message);
    for (;;) {
        bool is_locked = false;
        auto const is_over = [&] {
            State const state = pending.state.load();
            return state == State::done ||
                   (state == State::waiting && (is_locked = mailbox.try_lock())) ||
                   group_.board().is_dead(message.peer); // messages to it are withdrawn, too
        };
        // A thread never stops for long, and even a late one still copies to this rank's buffer.
        while (!this->wait(is_over, this->deadline())) {
            if (!Memory::is_all_in_reach) {
                abort_for_copy(message);
                message.pending = nullptr;
                return false;
            }
        }
        if (!is_locked) {
            return pending.state.load() == State::done;
        }
        bool const waits = pending.state.load() == State::waiting;
        if (waits) {
            mailbox.remove(group_.board(), pending);
        }
        unlock(mailbox);
        if (waits) {
            return false;
        }
    }
}

template <class Memory>
void GroupRank<Memory>::abort_for_copy(Message const& message) {
    group_.abort(
        reason_of_delay(
            {message.peer},
            "finish its copy",
            this->deadline(),
            this->rank(),
            "waits in " + message.text()
        ),
        this->rank()
    );
}

template <class Memory>
PendingMessage& GroupRank<Memory>::write_message(Message const& message) {
    std::byte* const memory = storage_->memory().allocate(bytes_of(message));
    if (memory == nullptr) {
        throw ContractViolation{concat(
            message.text(),
            " finds no place in the memory that a rank shares: wait for what is under way, or "
            "cut it into smaller ones"
        )};
    }
    void* data = message.buffer.data;
    if (!is_in_reach(message.buffer)) {
        data = memory + sizeof(PendingMessage);
        if (message.is_send) {
            copy(data, message.buffer.data, message.buffer.bytes());
        }
    }
    return detail::write_message(
        memory, message.is_send, message.tag, message.buffer, group_.board().place_of(data)
    );
}

template <class Memory>
void GroupRank<Memory>::throw_away(Message& message) noexcept {
    if (message.pending != nullptr) {
        auto* const memory = reinterpret_cast<std::byte*>(message.pending);
        storage_->memory().free(memory, bytes_of(message));
        message.pending = nullptr;
    }
}

template <class Memory>
void GroupRank<Memory>::throw_mismatch(Message const& mine, Message const& theirs) {
    group_.abort(
        reason_of_messages(this->rank(), mine.peer, mine.text(), theirs.text()), this->rank()
    );
    throw_failure(group_.loss(mine.peer)); // the reason may be another one
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/group/group_work.hpp

namespace joinable { inline namespace v0 { namespace detail {

template <class Rank, class Work>
class BoardCommunicator;

/// A collective or a message of one rank. Its destructor waits up to the deadline; during unwinding
/// it aborts. After that no other rank accesses this rank's buffers.
template <class Memory>
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] GroupWork {
public:
    GroupWork(GroupWork&& other) noexcept;
    GroupWork& operator=(GroupWork&&) = delete;

    ~GroupWork();

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  the ranks' calls differ; no data moved.
    /// @throws TimedOut, PeerFailed, ...  the reason why the communicator was aborted, unless every
    ///         rank had arrived before and none died during its share of the work.
    void wait();
    /// Makes progress; true once wait() would return at once.
    /// @throws as wait() does; TimedOut while some rank has not arrived, once the time between
    ///         tests of this work adds up to the deadline. Each gap counts as at most 10 ms.
    [[nodiscard]] bool test();
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress();

private:
    template <class, class>
    friend class BoardCommunicator;
    GroupWork(GroupRank<Memory>& rank, std::uint64_t sequence) noexcept;
    GroupWork(GroupRank<Memory>& rank, Message const& message) noexcept;

    [[nodiscard]] bool is_message() const noexcept { return message_.peer >= 0; }

    GroupRank<Memory>* rank_;
    std::uint64_t sequence_ = 0;
    Message message_;
    bool is_lost_ = false;
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/group/group_work.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

template <class Memory>
GroupWork<Memory>::GroupWork(GroupWork&& other) noexcept
    : rank_{std::exchange(other.rank_, nullptr)}, sequence_{other.sequence_},
      message_{other.message_}, is_lost_{other.is_lost_}, unwinding_{other.unwinding_} {}

template <class Memory>
GroupWork<Memory>::~GroupWork() {
    if (rank_ == nullptr || !rank_->home().is_here() ||
        (is_message() ? message_.pending == nullptr : rank_->is_done(sequence_))) {
        return;
    }
    try {
        if (unwinding_.has_begun()) {
            rank_->abort_for_exception(is_message() ? "a message" : "a collective");
        }
        wait();
    } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
    }
}

template <class Memory>
void GroupWork<Memory>::wait() {
    if (!is_message()) {
        rank_->finish(sequence_);
    } else if (message_.pending != nullptr) {
        is_lost_ = !rank_->finish_message(message_);
    }
    if (is_lost_) {
        throw_failure(rank_->group().loss(message_.peer));
    }
}

template <class Memory>
bool GroupWork<Memory>::test() {
    if (!is_message()) {
        return rank_->test(sequence_);
    }
    return progress() || (rank_->has_polled_message_too_long(message_) && progress());
}

template <class Memory>
bool GroupWork<Memory>::progress() {
    if (!is_message()) {
        return rank_->progress(sequence_);
    }
    if (message_.pending != nullptr && !rank_->is_settled(message_)) {
        rank_->group().look_for_deaths(); // a rank that polls may never wait
        return false;
    }
    wait();
    return true;
}

template <class Memory>
GroupWork<Memory>::GroupWork(GroupRank<Memory>& rank, std::uint64_t sequence) noexcept
    : rank_{&rank}, sequence_{sequence} {}

template <class Memory>
GroupWork<Memory>::GroupWork(GroupRank<Memory>& rank, Message const& message) noexcept
    : rank_{&rank}, message_{message} {}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/process/process_segment.hpp

#if defined(__linux__)

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include <sys/mman.h>

namespace joinable { inline namespace v0 { namespace detail {

/// How the body of a rank ended, for the process that started it.
struct alignas(64) Outcome {
    enum State : int { running, returned, threw };

    std::atomic<State> state{running};
    std::atomic<std::chrono::nanoseconds::rep> deadline{default_deadline.count()};
    StoredReason reason; ///< of its exception
};

/// The memory that process ranks share: their group, their outcomes, and room for each rank's
/// buffers. It is mapped before the processes are created, so it has one address in all of them. It
/// has no name, so killing any process leaves nothing in /dev/shm.
class ProcessSegment : public Watch, public std::enable_shared_from_this<ProcessSegment> {
public:
    /// @throws ContractViolation   a group cannot have so many ranks.
    /// @throws CommunicationError  there is no memory.
    explicit ProcessSegment(int size);
    virtual ~ProcessSegment() {
        if (bytes_ != 0) {
            munmap(memory_, bytes_);
        }
    }
    ProcessSegment(ProcessSegment const&) = delete;
    ProcessSegment& operator=(ProcessSegment const&) = delete;

    [[nodiscard]] Board& board() const noexcept { return *board_; }
    [[nodiscard]] Group group() noexcept { return Group{*board_, this}; }
    /// Does nothing: the process that started the ranks detects deaths.
    std::chrono::nanoseconds look_for_deaths() noexcept override { return SleepThrough{}(); }
    /// Zeroes memory. Gives whole pages back to the system until they are used again.
    /// @throws CommunicationError  as reserve().
    void clear(std::byte* data, std::size_t bytes);
    [[nodiscard]] Outcome& outcome(int rank) const noexcept;
    /// Where a rank puts data for the others: copies of its buffers, messages, subgroups.
    [[nodiscard]] std::span<std::byte> staging(int rank) const noexcept;

protected:
    static constexpr std::size_t most_room = std::size_t{1} << 36U; // for each rank
    static constexpr std::size_t least_room = std::size_t{1} << 24U;

    /// Uses memory that a derived class has mapped and will unmap.
    /// @pre it starts at a page, has bytes_for(size, room), and is zeroed; one process creates it
    ProcessSegment(int size, std::size_t room, std::byte* memory, bool is_creator);
    /// The parts of that memory that are used from the start. The others need reserve().
    static std::array<BlockPart, 3> parts_at_start(int size);
    /// The offset of staging(), if `room` is 0.
    static std::size_t bytes_for(int size, std::size_t room);

private:
    static constexpr std::size_t tables_end_at = 4096; ///< at a multiple of this, on all systems

    void create(int size);
    static std::size_t width(int size) noexcept { return static_cast<std::size_t>(size); }
    static std::size_t outcomes_at(int size) {
        return (Group::bytes_for(size) + alignof(Outcome) - 1) / alignof(Outcome) *
               alignof(Outcome);
    }
    [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
        return static_cast<std::byte*>(memory_) + offset;
    }

    std::size_t staging_at_;
    std::size_t room_ = 0;
    std::size_t bytes_ = 0; ///< to unmap
    void* memory_ = nullptr;
    Board* board_ = nullptr;
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/process/process_segment.ipp

#if defined(__linux__)
#if JOINABLE_HAS_DEFINITIONS

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ProcessSegment::ProcessSegment(int size) : staging_at_{bytes_for(size, 0)} {
    // Address space, not memory: the system allocates a page when a rank first writes to it.
    for (room_ = most_room;; room_ /= 2) {
        bytes_ = bytes_for(size, room_);
        memory_ = mmap(
            nullptr,
            bytes_,
            PROT_READ | PROT_WRITE,
            MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
            -1,
            0
        );
        if (memory_ != MAP_FAILED) {
            break;
        }
        if (room_ <= least_room) {
            throw CommunicationError{concat(
                "expected ",
                bytes_,
                " bytes of shared memory for ",
                size,
                " process ranks, but mmap says: ",
                std::strerror(errno),
                "; allow more address space, or use fewer ranks"
            )};
        }
    }
    madvise(memory_, bytes_, MADV_DONTDUMP); // a dump would allocate all of it
    create(size);
}

JOINABLE_DEFINITION void ProcessSegment::clear(std::byte* data, std::size_t bytes) {
    auto const zero = [this](std::byte* begin, std::byte const* end) {
        if (auto const n = static_cast<std::size_t>(end - begin); n != 0) {
            reserve(begin, n);
            std::memset(begin, 0, n);
        }
    };
    std::size_t const page = page_size();
    std::size_t const before = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
    std::byte* const end = data + bytes;
    if (before < bytes) {
        std::byte* const first = data + before;
        std::size_t const inner = (bytes - before) / page * page;
        if (inner != 0 && madvise(first, inner, MADV_REMOVE) == 0) {
            zero(data, first);
            zero(first + inner, end);
            return;
        }
    }
    zero(data, end);
}

JOINABLE_DEFINITION Outcome& ProcessSegment::outcome(int rank) const noexcept {
    return std::launder(reinterpret_cast<Outcome*>(at(outcomes_at(board_->size()))))[rank];
}

JOINABLE_DEFINITION std::span<std::byte> ProcessSegment::staging(int rank) const noexcept {
    std::size_t const offset = page_offset_of(rank, board_->size());
    return {
        at(staging_at_ + static_cast<std::size_t>(rank) * room_ + offset), room_ - tables_end_at
    };
}

JOINABLE_DEFINITION
ProcessSegment::ProcessSegment(int size, std::size_t room, std::byte* memory, bool is_creator)
    : staging_at_{bytes_for(size, 0)}, room_{room}, memory_{memory},
      board_{&Board::at_address(memory)} {
    if (is_creator) {
        create(size);
    }
}

JOINABLE_DEFINITION std::array<BlockPart, 3> ProcessSegment::parts_at_start(int size) {
    auto const [board, group] = Group::parts_at_start(size);
    return {{board, group, {outcomes_at(size), width(size) * sizeof(Outcome)}}};
}

JOINABLE_DEFINITION std::size_t ProcessSegment::bytes_for(int size, std::size_t room) {
    std::size_t const tables = outcomes_at(size) + width(size) * sizeof(Outcome);
    return (tables + tables_end_at - 1) / tables_end_at * tables_end_at + width(size) * room;
}

JOINABLE_DEFINITION void ProcessSegment::create(int size) {
    board_ = &Group::create(all_numbers(size), {at(0), outcomes_at(size)}).board();
    ::new (at(outcomes_at(size))) Outcome[width(size)];
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/process/process_rank.hpp

#if defined(__linux__)

#include <chrono>
#include <memory>

namespace joinable { inline namespace v0 { namespace detail {

/// One process's part of its group: what its communicator and its works have in common.
class ProcessRank : public GroupRank<Room> {
public:
    ProcessRank(ProcessSegment& segment, int rank);
    /// A rank of a group that was split from the group of all.
    ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage);

    /// After a failure, the process that started this one waits this long for the others. Only the
    /// deadline of the outermost group counts.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept;

private:
    Outcome* outcome_ = nullptr;
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/process/process_rank.ipp

#if defined(__linux__)
#if JOINABLE_HAS_DEFINITIONS

#include <cstddef>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ProcessRank::ProcessRank(ProcessSegment& segment, int rank) : GroupRank{
          segment.group(),
          rank,
          // An arena may outlive this object, so it keeps alive a segment that nothing else owns.
          std::make_shared<GroupStorage<Room>>(
              segment.staging(rank),
              [&segment,
               kept = segment.weak_from_this().lock()](std::byte const* data, std::size_t bytes) {
                  segment.reserve(data, bytes);
              },
              [&segment](std::byte* data, std::size_t bytes) { segment.clear(data, bytes); }
          )
      },
      outcome_{&segment.outcome(rank)} {}

JOINABLE_DEFINITION
ProcessRank::ProcessRank(Group group, int rank, std::shared_ptr<GroupStorage<Room>> storage)
    : GroupRank{group, rank, std::move(storage)} {}

JOINABLE_DEFINITION std::chrono::nanoseconds
ProcessRank::set_deadline(std::chrono::nanoseconds deadline) noexcept {
    if (outcome_ != nullptr) {
        outcome_->deadline.store(deadline.count());
    }
    return GroupRank::set_deadline(deadline);
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/process.hpp

#if defined(__linux__) // elsewhere there are no process ranks

namespace joinable { inline namespace v0 {

/// A collective or a message between process ranks, with wait() and test(). All communicators in
/// shared memory use the same class template.
using ProcessWork = detail::GroupWork<detail::Room>;

namespace detail {

/// The first base, so that the segment outlives the bases that use it.
struct SegmentOwner {
    std::shared_ptr<ProcessSegment> owned; ///< null: another object owns it
};

} // namespace detail

/// Identifies one rank of a group of independent processes, for ProcessCommunicator::attach.
struct AttachOptions {
    int rank = 0;
    int size = 1;
    std::string job; ///< the same on all ranks of the group; unique while the group exists
    std::chrono::nanoseconds deadline = default_deadline; ///< for attach() and all waits
};

/// Ranks are processes of this machine, with one object in each. run_processes() makes them;
/// independently started processes attach to each other by a name.
///
/// Collectives behave like those of ThreadCommunicator and give bitwise identical results. They are
/// asynchronous, combine in rank order, and up to 64 may be in flight. A busy rank delays no other
/// rank. Buffers of more than 2 KiB are copied to memory that the ranks share; wait() or test()
/// copies the result back. The side of a message that arrives first copies it there too. Buffers in
/// an arena of this communicator are not copied: the other ranks read and write them in place. A
/// rank has up to 64 GiB for all of this, including the groups that it splits off, or less if the
/// system gives less address space. Memory that has been used is kept for reuse until the ranks
/// end.
///
/// From 512 KiB on (2 MiB if ranks share cores), an all_reduce, reduce or broadcast moves in slices
/// if any rank's buffer is in no arena. Ranks copy slices in and out while others compute. Every
/// rank copies its own slices inside wait() or test() of any collective, so a rank that computes
/// something else then delays the others.
///
/// If a rank is killed, all others get PeerFailed at once, in every group. The error has the killed
/// rank's number in that group, if it was a member. Attached ranks check each other while they
/// wait. They detect the death of the thread that attached, so that thread must live as long as the
/// communicator and those split from it.
///
/// All members that take buffers throw ContractViolation before any data moves if counts or dtypes
/// do not fit, the root is not a rank, memory is missing or overlaps, or the operation is bitwise
/// on floating-point numbers. The caller must keep buffers until the work has been waited for.
/// Spans of counts are copied.
class ProcessCommunicator : detail::SegmentOwner,
                            public detail::BoardCommunicator<detail::ProcessRank, ProcessWork> {
public:
    /// Meets the other ranks of the job. Each rank calls this in its own process or thread, as the
    /// same user of the same machine. Returns when all have arrived. Until then the job has a file
    /// in /dev/shm; afterwards killing any process leaves nothing there. A rank takes about 14 KiB
    /// of /dev/shm at the start and more on use: 2 KiB for each message of up to 2 KiB in flight, a
    /// table for each collective with counts in flight, and the space for its buffers. The same
    /// holds for each rank of a group that is split off. A rank for which there is no space throws
    /// CommunicationError, and the others throw PeerFailed. The same happens at once if rank 0
    /// fails or is killed at the start, also before it has any space.
    /// @throws TimedOut            some ranks, which it names, had not arrived at the deadline.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   the rank is out of range or already taken; ranks have
    ///                             different world sizes.
    /// @throws CommunicationError  /dev/shm is full; the job's file there is damaged, or of another
    ///                             version of this library. Files of other users that have its name
    ///                             are ignored.
    static ProcessCommunicator attach(AttachOptions const& options);

    /// Attaches a rank that mpirun, mpiexec, torchrun or srun started; see launch_environment().
    /// @throws ContractViolation  also if launch_environment() fails, or the ranks are on several
    ///                            machines.
    static ProcessCommunicator
    from_environment(std::chrono::nanoseconds deadline = default_deadline);

    /// For run_processes.
    ProcessCommunicator(detail::ProcessSegment& segment, int rank);

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits the deadline. Aborting this communicator aborts
    /// the group, but not the reverse. Errors name ranks by their numbers in the group where they
    /// occur.
    [[nodiscard]] ProcessCommunicator split(int color, int key);

    /// Local. Zeroed memory that the ranks share, for buffers that are reduced often. Memory of
    /// destroyed arenas is reused. The first arena reserves half of the shared memory for arenas.
    /// When that is full, further arenas are on the heap, and their buffers are copied like any
    /// others. An arena may outlive the communicator but not the process. One thread at a time may
    /// use or destroy an arena or its communicator.
    /// @throws ContractViolation  alignment is not a power of two.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment);

    /// Collective; blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes);

private:
    ProcessCommunicator(
        std::shared_ptr<detail::ProcessSegment> segment, AttachOptions const& options
    );
    ProcessCommunicator(ProcessCommunicator const& parent, Slot const& slot);
};

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/detail/shared_mapping.hpp

#if defined(__linux__)

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// Gives a file this size. Returns 0, or why the system refuses.
[[nodiscard]] inline int resize_file(int file, std::size_t bytes) noexcept {
    rlimit limit{};
    getrlimit(RLIMIT_FSIZE, &limit);
    if (limit.rlim_cur < bytes) {
        return EFBIG; // ftruncate would kill the process
    }
    return ftruncate(file, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

/// Maps memory of a file. Without a file, only processes that are created later share the memory.
/// If the system refuses, returns an empty arena and sets errno.
[[nodiscard]] inline Arena map_shared(std::size_t bytes, int file = -1) noexcept {
    int const kind = MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0);
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind, file, 0);
    if (memory == MAP_FAILED) {
        return {};
    }
    auto const unmap = [](void*, std::byte* data, std::size_t size) noexcept {
        munmap(data, size);
    };
    return {static_cast<std::byte*>(memory), bytes, unmap, nullptr};
}

class FileHandle {
public:
    explicit FileHandle(int number) noexcept : number_{number} {}
    ~FileHandle() {
        if (number_ >= 0) {
            close(number_);
        }
    }
    FileHandle(FileHandle const&) = delete;
    FileHandle& operator=(FileHandle const&) = delete;
    [[nodiscard]] int number() const noexcept { return number_; }

private:
    int number_;
};

/// Memory that the processes of all ranks map, each at its own address. The system counts its
/// mappings, so killing any process leaves nothing of it. Collective; blocks. Rank 0 makes a file
/// without a name, and the others open it through rank 0's process. A process number may mean
/// another process there, as in another container, so they compare device and inode.
/// @throws Mismatch            see check_same_size.
/// @throws CommunicationError  a rank cannot map it; on all ranks.
template <class Comm>
[[nodiscard]] Arena share_mapping(Comm& comm, std::size_t bytes) {
    std::uint64_t const mine = bytes;
    std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
    comm.all_gather({&mine, 1, DType::u64}, {all.data(), all.size(), DType::u64}).wait();
    check_same_size(all);
    if (bytes == 0) {
        return {};
    }
    enum Word : std::size_t { error, process, number, device, inode, words };
    auto const identity = [](int file) noexcept {
        struct stat status{};
        fstat(file, &status);
        return std::array{
            static_cast<std::int64_t>(status.st_dev), static_cast<std::int64_t>(status.st_ino)
        };
    };
    bool const is_maker = comm.rank() == 0;
    FileHandle const made{is_maker ? memfd_create("joinable", MFD_CLOEXEC) : -1};
    int const refused = made.number() < 0 ? errno : resize_file(made.number(), bytes);
    auto const own = identity(made.number());
    std::array<std::int64_t, words> maker{refused, getpid(), made.number(), own[0], own[1]};
    comm.broadcast({maker.data(), maker.size(), DType::i64}, 0).wait();

    Arena memory;
    auto failure = static_cast<std::int32_t>(maker[error]);
    if (failure == 0) {
        std::string const path = concat("/proc/", maker[process], "/fd/", maker[number]);
        FileHandle const opened{
            is_maker ? -1 : open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
        };
        int const file = is_maker ? made.number() : opened.number();
        if (file < 0) {
            failure = errno;
        } else if (identity(file) != std::array{maker[device], maker[inode]}) {
            failure = ESTALE;
        } else {
            memory = map_shared(bytes, file);
            failure = memory.data() != nullptr ? 0 : errno;
        }
    }
    comm.all_reduce({&failure, 1, DType::i32}, ReduceOp::max).wait();
    if (failure != 0) {
        throw CommunicationError{concat(
            "expected ",
            bytes,
            " bytes of memory that all ranks share, but on one of them ",
            failure == ESTALE ? "rank 0's process number is another process"
                              : concat("the system says: ", std::strerror(failure)),
            "; ranks need memfd_create() and each other's /proc/<process>/fd, and so one machine, "
            "one user and one namespace of processes"
        )};
    }
    return memory;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/process/shared_object.hpp

#if JOINABLE_HAS_DEFINITIONS
#if defined(__linux__)

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// Where the system keeps POSIX shared memory.
inline constexpr char const* shared_memory_folder = "/dev/shm";

inline void sleep_for(std::chrono::nanoseconds time) noexcept {
    std::timespec left{};
    left.tv_nsec = static_cast<decltype(left.tv_nsec)>(time.count());
    nanosleep(&left, nullptr);
}

/// A POSIX shared-memory object, open in this process. It gets its name when it is complete. A
/// process removes the name only after it has checked that it is this object's. No process
/// therefore finds an incomplete object or removes another one.
class SharedObject {
public:
    /// Creates an object without name and bytes. It ends with the last process that has it open.
    /// @throws CommunicationError  the system refuses.
    static SharedObject create() {
        SharedObject object{
            ::open(shared_memory_folder, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR)
        };
        if (object.file_ < 0 || fchmod(object.file_, S_IRUSR | S_IWUSR) != 0) {
            throw CommunicationError{concat(
                "expected to make a shared-memory object in ",
                shared_memory_folder,
                ", but the system says: ",
                std::strerror(errno),
                "; mount a tmpfs there that user ",
                geteuid(),
                " may write"
            )};
        }
        return object;
    }
    /// Nothing if no object has this name.
    /// @throws CommunicationError  there is one, but this process may not open it.
    static std::optional<SharedObject> find(std::string const& path) {
        SharedObject object{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
        if (object.file_ >= 0) {
            return object;
        }
        if (int const error = errno; error != ENOENT) {
            struct stat of{};
            bool const is_known = lstat(path.c_str(), &of) == 0;
            throw CommunicationError{concat(
                "expected to open ",
                path,
                ", which belongs to user ",
                is_known ? concat(of.st_uid) : "unknown",
                ", as user ",
                geteuid(),
                ", but the system says: ",
                std::strerror(error),
                "; remove it, or give the job another id"
            )};
        }
        return std::nullopt;
    }
    ~SharedObject() {
        if (file_ >= 0) {
            close(file_);
        }
    }
    SharedObject(SharedObject&& other) noexcept : file_{std::exchange(other.file_, -1)} {}
    SharedObject& operator=(SharedObject&&) = delete;

    [[nodiscard]] struct stat status() const noexcept {
        struct stat now{};
        fstat(file_, &now);
        return now;
    }
    /// Reads the first bytes without mapping them, because the object may be shorter. Returns
    /// whether they exist.
    [[nodiscard]] bool read(std::span<std::byte> bytes) const noexcept {
        return pread(file_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
    }
    /// Whether this process may give the object this size, and map it.
    [[nodiscard]] bool can_have(std::size_t bytes) const noexcept {
        rlimit limit{};
        getrlimit(RLIMIT_FSIZE, &limit); // beyond this limit ftruncate kills the process
        std::byte* const memory = limit.rlim_cur < bytes ? nullptr : map(bytes);
        return memory != nullptr && munmap(memory, bytes) == 0;
    }
    /// @throws CommunicationError  the system refuses.
    void resize(std::size_t bytes) const {
        if (int const error = resize_file(file_, bytes); error != 0) {
            throw CommunicationError{concat(
                "a shared-memory object could not have ",
                bytes,
                " bytes: ",
                std::strerror(error),
                error == EFBIG ? "; raise the limit of file sizes (ulimit -f)" : ""
            )};
        }
    }
    /// Locks the object until this view of it is closed: by the destructor, or by the system when
    /// the process ends, in whatever way. Another lock than that of remove_name(). Returns false if
    /// the system has no such locks.
    /// @pre no other process has locked it
    [[nodiscard]] bool lock() const noexcept {
        struct flock all = lock_of_all();
        return fcntl(file_, F_OFD_SETLK, &all) == 0;
    }
    /// Whether another view of this object has locked it.
    [[nodiscard]] bool is_locked() const noexcept {
        struct flock all = lock_of_all();
        return fcntl(file_, F_OFD_GETLK, &all) != 0 || all.l_type != F_UNLCK;
    }
    /// Maps the object, starting at byte `from`, the first of a page. Null if there is no address
    /// space.
    [[nodiscard]] std::byte* map(std::size_t bytes, std::size_t from = 0) const noexcept {
        void* const memory = mmap(
            nullptr,
            bytes,
            PROT_READ | PROT_WRITE,
            MAP_SHARED | MAP_NORESERVE,
            file_,
            static_cast<off_t>(from)
        );
        return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
    }

    /// Gives it a name. Returns false if another object has that name.
    /// @throws CommunicationError  the system refuses.
    [[nodiscard]] bool publish(std::string const& path) const {
        std::string const self = concat("/proc/self/fd/", file_);
        if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
            return true;
        }
        if (errno != EEXIST) {
            throw CommunicationError{
                concat("the name ", path, " could not be made: ", std::strerror(errno))
            };
        }
        return false;
    }

    /// Does nothing if the name is another object's, or free. Processes that remove the name of the
    /// same object do so one after another, so that no new object can get the name in between.
    void remove_name(std::string const& path) const noexcept {
        // A process that was stopped in here is not waited for: it removes the name when it
        // continues.
        for (int i = 0; i < 100 && has_name(path); ++i) {
            if (flock(file_, LOCK_EX | LOCK_NB) == 0) {
                if (has_name(path)) {
                    unlink(path.c_str());
                }
                flock(file_, LOCK_UN);
                return;
            }
            sleep_for(std::chrono::milliseconds{1});
        }
    }

    /// Allocates the memory now. If the system had none, a later write would raise SIGBUS. Returns
    /// whether this was complete by `end`. Complexity: linear in the bytes that the system has to
    /// clear.
    /// @throws CommunicationError  memory is full. Part of [at, at + bytes) may be reserved.
    bool reserve(
        std::size_t at,
        std::size_t bytes,
        std::chrono::steady_clock::time_point end = (std::chrono::steady_clock::time_point::max)()
    ) const {
        // In steps, which get smaller if a fast interval timer interrupts them, because the system
        // restarts an interrupted one.
        constexpr std::size_t smallest_step = 4096;
        std::size_t step = std::size_t{16} << 20U;
        for (std::size_t done = 0; done < bytes;) {
            if (std::chrono::steady_clock::now() >= end) {
                return false;
            }
            std::size_t const next = (std::min)(step, bytes - done);
            int const error =
                posix_fallocate(file_, static_cast<off_t>(at + done), static_cast<off_t>(next));
            if (error == 0) {
                done += next;
            } else if (error == EINTR) {
                step = (std::max)(step / 2, smallest_step);
            } else {
                throw CommunicationError{full(bytes - done, error)};
            }
        }
        return true;
    }

    /// The objects of this user that have this name, with or without a number: see
    /// publish_first_free.
    [[nodiscard]] static std::vector<std::string> own_of(std::string const& path) {
        std::vector<std::string> found;
        std::unique_ptr<DIR, int (*)(DIR*)> const folder{opendir(shared_memory_folder), closedir};
        std::string_view const name =
            std::string_view{path}.substr(std::string_view{shared_memory_folder}.size() + 1);
        for (dirent const* entry = nullptr;
             folder != nullptr && (entry = readdir(folder.get())) != nullptr;) {
            std::string_view const other{entry->d_name};
            std::string const of_entry = concat(shared_memory_folder, "/", other);
            bool const is_named =
                other.starts_with(name) &&
                (other.size() == name.size() || other.substr(name.size()).starts_with("."));
            struct stat status{};
            if (is_named && lstat(of_entry.c_str(), &status) == 0 && status.st_uid == geteuid()) {
                found.push_back(of_entry);
            }
        }
        std::sort(found.begin(), found.end());
        return found;
    }
    /// Gives the object this name, followed by the first number that avoids other users' objects,
    /// if needed. No other user can thus block a job's name. Returns the name, or nothing if
    /// another object of this user has it.
    [[nodiscard]] std::optional<std::string> publish_first_free(std::string const& path) const {
        for (int number = 1;; ++number) {
            std::string const named = number == 1 ? path : concat(path, ".", number);
            if (publish(named)) {
                return named;
            }
            struct stat status{};
            if (lstat(named.c_str(), &status) != 0 || status.st_uid == geteuid()) {
                return std::nullopt;
            }
        }
    }

    /// How much memory the system has for objects, for people.
    [[nodiscard]] static std::string bytes_free() {
        struct statvfs room{};
        statvfs(shared_memory_folder, &room);
        return concat(
            static_cast<std::size_t>(room.f_bavail) * room.f_frsize,
            " of its ",
            static_cast<std::size_t>(room.f_blocks) * room.f_frsize,
            " bytes free"
        );
    }

private:
    [[nodiscard]] bool has_name(std::string const& path) const noexcept {
        struct stat named{};
        struct stat const own = status();
        return lstat(path.c_str(), &named) == 0 && named.st_ino == own.st_ino &&
               named.st_dev == own.st_dev;
    }
    static struct flock lock_of_all() noexcept {
        struct flock all{};
        all.l_type = F_WRLCK;
        all.l_whence = SEEK_SET;
        return all;
    }
    explicit SharedObject(int file) noexcept : file_{file} {}

    static std::string full(std::size_t bytes, int error) {
        return concat(
            "expected ",
            bytes,
            " more bytes of shared memory, but ",
            shared_memory_folder,
            error == ENOSPC ? " is full" : concat(" refuses: ", std::strerror(error)),
            ", with ",
            bytes_free(),
            "; make it larger, or have less in flight"
        );
    }

    int file_;
};

/// Memory mapped from an object. The destructor unmaps it.
class Mapping {
public:
    /// @throws CommunicationError  there is no address space.
    Mapping(SharedObject const& object, std::size_t bytes, std::size_t from = 0)
        : begin_{object.map(bytes, from)}, bytes_{bytes} {
        if (begin_ == nullptr) {
            throw CommunicationError{concat(
                "expected to map ",
                bytes,
                " bytes of shared memory, but the system says: ",
                std::strerror(errno),
                "; allow more address space"
            )};
        }
        madvise(begin_, bytes_, MADV_DONTDUMP); // a dump would allocate all of it
    }
    ~Mapping() {
        if (begin_ != nullptr) {
            munmap(begin_, bytes_);
        }
    }
    Mapping(Mapping&& other) noexcept
        : begin_{std::exchange(other.begin_, nullptr)}, bytes_{other.bytes_} {}
    Mapping& operator=(Mapping&&) = delete;

    [[nodiscard]] std::byte* begin() const noexcept { return begin_; }
    void keep() noexcept { begin_ = nullptr; }

private:
    std::byte* begin_;
    std::size_t bytes_;
};

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/process/members.hpp

#if JOINABLE_HAS_DEFINITIONS
#if defined(__linux__)

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <cerrno>
#include <pthread.h>
#include <unistd.h>

/// @file
/// The members of a group whose processes have no parent that watches them: the beginning of its
/// shared-memory object.

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's place in the group. The rank holds a robust mutex while it takes part. If the thread
/// that locked it dies, in whatever way, the system marks the mutex for the next process that tries
/// it. That works between containers, too, where process numbers mean nothing.
class alignas(64) Member {
public:
    Member() noexcept {
        pthread_mutexattr_t attributes{};
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&alive_, &attributes);
        pthread_mutexattr_destroy(&attributes);
    }

    /// Call this from the thread of this rank that attaches. Returns false if another process has
    /// this rank.
    [[nodiscard]] bool enter() noexcept {
        // Lock the mutex first: once others see that this rank is here, they can also detect its
        // death. Until then only another process of this rank tries the mutex.
        int const locked = pthread_mutex_trylock(&alive_);
        if (locked != 0 && locked != EOWNERDEAD) {
            return false;
        }
        if (process() != 0) { // it has died or left: this mutex does not change
            pthread_mutex_unlock(&alive_);
            return false;
        }
        if (locked == EOWNERDEAD) { // it died before other ranks saw it
            pthread_mutex_consistent(&alive_);
        }
        process_.store(static_cast<int>(getpid()));
        has_come_.store(true);
        return true;
    }
    /// Says that this rank is here but will not take part. The others treat it as dead.
    void fail() noexcept { has_failed_.store(true); }
    [[nodiscard]] bool has_failed() const noexcept { return has_failed_.load(); }
    /// Says that this rank no longer takes part. `entered` is the thread that called enter().
    /// Returns false in another thread: the memory must then stay mapped until that thread has
    /// ended.
    [[nodiscard]] bool leave(pthread_t entered) noexcept {
        has_left_.store(true);
        return pthread_equal(entered, pthread_self()) != 0 && pthread_mutex_unlock(&alive_) == 0;
    }

    [[nodiscard]] bool has_come() const noexcept { return has_come_.load(); }
    [[nodiscard]] bool has_left() const noexcept { return has_left_.load(); }
    /// The process number in its own namespace; 0 before it enters.
    [[nodiscard]] int process() const noexcept { return process_.load(); }

    /// For the other ranks: whether it died while it took part. Once true, this stays true. If the
    /// caller dies at any point in here, the next caller finds the same.
    [[nodiscard]] bool has_died() noexcept {
        if (has_failed()) {
            return true;
        }
        if (process() == 0 || has_left_.load()) {
            return false;
        }
        switch (pthread_mutex_trylock(&alive_)) {
        case 0: // it is entering or leaving now
            pthread_mutex_unlock(&alive_);
            return false;
        case EOWNERDEAD:
            pthread_mutex_unlock(&alive_); // unrepaired: from now on it is ENOTRECOVERABLE
            return true;
        case ENOTRECOVERABLE: return true;
        default: return false;
        }
    }

private:
    std::atomic<int> process_{0};
    std::atomic<bool> has_come_{false};
    std::atomic<bool> has_left_{false};
    std::atomic<bool> has_failed_{false};
    pthread_mutex_t alive_{};
};

/// The first bytes of the object. A process compares them before it maps the rest.
struct alignas(64) Heading {
    static constexpr std::uint64_t joinable_magic = 0x656c62616e696f6a; ///< "joinable"
    /// By what ranks lay out the memory that they share, and share the work on it.
    static constexpr std::uint64_t agreed[] = {
        library_version,
        sizeof(Member),
        sizeof(Board),
        sizeof(ArrivalLine),
        sizeof(StoredReason),
        Board::max_in_flight,
        tuning::slot_bytes,
        tuning::one_chunk_bytes,
        tuning::chunks_per_rank,
        tuning::largest_chunk_bytes,
        tuning::slice_bytes,
        tuning::crowded_slice_bytes,
        tuning::slices_per_ring,
        std::uint64_t{tuning::spins},
        std::uint64_t{tuning::crowded_spins},
        std::uint64_t{tuning::yields},
    };
    [[nodiscard]] static constexpr std::uint64_t layout_of(std::span<std::uint64_t const> numbers) {
        Hash hash;
        for (std::uint64_t const number : numbers) {
            hash.add(number);
        }
        return hash.value();
    }
    static std::uint64_t const own_layout; ///< differs between programs that cannot share memory

    std::uint64_t magic = joinable_magic;
    std::uint64_t layout = own_layout;
    std::uint64_t size = 0; ///< ranks
    std::uint64_t room = 0; ///< bytes per rank for buffers
};
inline constexpr std::uint64_t Heading::own_layout = Heading::layout_of(Heading::agreed);

/// The beginning of the object: the heading, then a Member for each rank. It exists before the rest
/// of the object, for which there may be no memory.
struct alignas(64) MemberTable {
    enum State : int { starting, ready, failed }; ///< of the rest, which rank 0 makes

    Heading heading;
    std::atomic<State> state{starting};
    StoredReason failure = {}; ///< why it failed

    [[nodiscard]] Member& member(int rank) noexcept {
        return std::launder(reinterpret_cast<Member*>(this + 1))[rank];
    }
    [[nodiscard]] std::vector<int> missing_ranks() {
        std::vector<int> ranks;
        for (int rank = 0; rank < static_cast<int>(heading.size); ++rank) {
            if (!member(rank).has_come()) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }
    static constexpr std::size_t used_bytes_for(int size) noexcept {
        return sizeof(MemberTable) + static_cast<std::size_t>(size) * sizeof(Member);
    }
    /// Where the rest begins: at a page, also on systems with pages of 64 KiB.
    static constexpr std::size_t bytes_for(int size) noexcept {
        constexpr std::size_t largest_page = std::size_t{64} << 10U;
        return (used_bytes_for(size) + largest_page - 1) / largest_page * largest_page;
    }
    static MemberTable& create(std::byte* memory, Heading const& heading) {
        auto* const table = ::new (memory) MemberTable{heading};
        ::new (static_cast<void*>(table + 1)) Member[heading.size];
        return *table;
    }
};

/// A rank's place in the table of an object. The destructor leaves. The table has its own mapping,
/// because the thread that attached has a mutex in it.
class Membership {
public:
    /// @pre this thread has entered as `rank`
    Membership(Mapping table, int rank) noexcept : table_{std::move(table)}, rank_{rank} {}
    Membership(Membership&& other) noexcept
        : table_{std::move(other.table_)}, rank_{other.rank_}, thread_{other.thread_},
          home_{other.home_} {}
    Membership& operator=(Membership&&) = delete;
    ~Membership() {
        if (is_open() && home_.is_here() && !table().member(rank_).leave(thread_)) {
            table_.keep(); // that thread still has its mutex
        }
    }

    [[nodiscard]] bool is_open() const noexcept { return table_.begin() != nullptr; }
    [[nodiscard]] MemberTable& table() const noexcept { return at(table_); }
    [[nodiscard]] static MemberTable& at(Mapping const& memory) noexcept {
        return *std::launder(reinterpret_cast<MemberTable*>(memory.begin()));
    }

private:
    Mapping table_;
    int rank_;
    pthread_t thread_ = pthread_self();
    HomeProcess home_;
};

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/process/start_notice.hpp

#if JOINABLE_HAS_DEFINITIONS
#if defined(__linux__)

#include <chrono>
#include <optional>
#include <string>
#include <utility>

/// @file
/// How the other ranks of a job hear of a failure of rank 0 before its table of members exists.

namespace joinable { inline namespace v0 { namespace detail {

/// Says that rank 0 makes the object of a job: an empty file, which rank 0 keeps locked until it has
/// published the table of members. An empty file needs no memory, so it also serves
/// where /dev/shm is full.
class StartNotice {
public:
    /// The name of the notice for the object `path`. SharedObject::own_of(path) does not return it.
    [[nodiscard]] static std::string path_for(std::string const& path) {
        return concat(path, "-start");
    }
    /// Also removes what a dead rank 0 has left. Nothing if another rank 0 of this job shows one.
    /// Shows none where the system has no locks.
    /// @throws CommunicationError  the system refuses.
    [[nodiscard]] static std::optional<StartNotice> make(std::string const& path) {
        std::string const base = path_for(path);
        for (std::string const& other : SharedObject::own_of(base)) {
            auto const left = SharedObject::find(other);
            if (left && !left->is_locked()) {
                left->remove_name(other);
            }
        }
        auto object = SharedObject::create();
        if (!object.lock()) { // before others can see it
            return StartNotice{std::move(object), {}};
        }
        auto named = object.publish_first_free(base);
        if (!named) {
            return std::nullopt;
        }
        return StartNotice{std::move(object), std::move(*named)};
    }
    StartNotice(StartNotice&& other) noexcept
        : object_{std::move(other.object_)}, path_{std::exchange(other.path_, {})} {}
    StartNotice& operator=(StartNotice&&) = delete;
    /// The table is published, or fail() has told the others.
    ~StartNotice() {
        if (!path_.empty()) {
            object_.remove_name(path_);
        }
    }

    /// Tells the others that rank 0 has failed. Returns at `end`, because other ranks may not have
    /// looked before.
    void fail(std::chrono::steady_clock::time_point end) const {
        object_.resize(1); // needs no memory either
        while (std::chrono::steady_clock::now() < end) {
            sleep_for(std::chrono::milliseconds{2});
        }
    }

private:
    StartNotice(SharedObject object, std::string path) noexcept
        : object_{std::move(object)}, path_{std::move(path)} {}

    SharedObject object_;
    std::string path_;
};

/// For a rank that finds that rank 0 has died: removes what rank 0 left under this name, but not
/// before the other ranks had the time to find it as well.
[[noreturn]] inline void
throw_death_of_rank_zero(SharedObject const& object, std::string const& path) {
    sleep_for(std::chrono::milliseconds{100}); // the others look every two milliseconds
    object.remove_name(path);
    throw PeerFailed{{0}, "rank 0 failed: its process died"};
}

/// How another rank sees rank 0's notice.
class StartNoticeView {
public:
    /// `path` is the name of the object that rank 0 makes.
    /// @throws CommunicationError  the system lets this process make no object, as it lets no other
    ///                             one.
    explicit StartNoticeView(std::string const& path) : base_{StartNotice::path_for(path)} {
        static_cast<void>(SharedObject::create());
    }

    /// Whether rank 0 has shown a notice that has ended. Rank 0 has then published the table, or
    /// failed. What has ended before this rank looks for the first time is an older job's.
    [[nodiscard]] bool has_ended(bool is_first) {
        if (!object_) {
            find(is_first);
        }
        return object_ && (has_failed() || !object_->is_locked());
    }
    /// @pre has_ended(), and there is no table
    [[noreturn]] void throw_failure_of_rank_zero() const {
        if (!has_failed()) {
            throw_death_of_rank_zero(*object_, path_);
        }
        throw PeerFailed{
            {0},
            concat(
                "rank 0 failed before it had memory for a table of its ranks: its own error says "
                "why; ",
                shared_memory_folder,
                " has ",
                SharedObject::bytes_free()
            )
        };
    }

private:
    void find(bool is_first) {
        for (std::string const& path : SharedObject::own_of(base_)) {
            auto found = SharedObject::find(path);
            if (found && is_first && !found->is_locked()) {
                found->remove_name(path);
            } else if (found) {
                object_.emplace(std::move(*found));
                path_ = path;
                return;
            }
        }
    }
    [[nodiscard]] bool has_failed() const noexcept { return object_->status().st_size != 0; }

    std::string base_;
    std::optional<SharedObject> object_; ///< kept open once found, because its name may vanish
    std::string path_;
};

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/process/named_segment.hpp

#if JOINABLE_HAS_DEFINITIONS
#if defined(__linux__)

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// The path under which the ranks of a job meet. If other users have that name, a number is
/// appended. Another user gets other names. A user who knows the job id can create objects with
/// such names, but ranks ignore them, because they have another owner.
inline std::string path_of_job(std::string_view job) {
    std::uint64_t const hash = Hash{}.add(concat(geteuid(), ":", job)).value();
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) {
        digits += "0123456789abcdef"[hash >> shift & 0xfU];
    }
    return concat(shared_memory_folder, "/joinable-", geteuid(), "-", digits);
}

/// One rank's view of a segment in which unrelated processes meet by a name. Rank 0 shows a start
/// notice, makes a table of members, publishes it under the name, and then makes the rest. If rank
/// 0 fails before it has published the table, the others see its notice end; if it fails later,
/// they find the reason in the table. The name is removed when all have arrived, so a job that is
/// killed later leaves nothing. A rank that gives up before removes it as well. If a whole job is killed
/// before all have arrived, the next job of that name finds its creator dead and removes the
/// leftover. That is safe: without a name no rank can join it, and a rank that has already joined
/// detects the death by itself.
///
/// The object has address space for all that ranks may ever use, and memory for what they do use:
/// the lines of a board from the start; slots, tables of counts, mailboxes and buffers at their
/// first use.
class NamedSegment final : public ProcessSegment {
public:
    /// Returns when all ranks have arrived.
    /// @throws TimedOut            some ranks, which it names, had not arrived at the deadline.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   another process has this rank; the object is another job's, or
    ///                             from programs that cannot share memory with this one.
    /// @throws CommunicationError  there is no memory, or the name belongs to something else.
    static std::shared_ptr<NamedSegment>
    attach(int rank, int size, std::string_view job, std::chrono::nanoseconds deadline) {
        static_cast<void>(Board::bytes_for(size)); // throws if a group cannot be so large
        std::string const path = path_of_job(job);
        auto const end = end_of_wait(deadline);
        std::optional<StartNoticeView> rank_zero;
        if (rank != 0) {
            rank_zero.emplace(path);
        }
        for (bool is_first = true;; is_first = false) {
            bool const has_ended = rank_zero && rank_zero->has_ended(is_first);
            auto segment = rank == 0 ? create(path, size, end, deadline)
                                     : find(path, rank, size, end, deadline, is_first);
            if (segment != nullptr) {
                segment->wait_for_all(end, deadline);
                return segment;
            }
            if (has_ended) { // and has published no table before that
                rank_zero->throw_failure_of_rank_zero();
            }
            if (std::chrono::steady_clock::now() >= end) {
                throw TimedOut{
                    {0}, not_in_time({0}, path, deadline, concat(rank, " looks for it"))
                };
            }
            sleep_for(std::chrono::milliseconds{2});
        }
    }

    /// Leaves the group.
    ~NamedSegment() override = default;
    NamedSegment(NamedSegment const&) = delete;
    NamedSegment& operator=(NamedSegment const&) = delete;

    std::chrono::nanoseconds look_for_deaths() noexcept override {
        auto const now = std::chrono::steady_clock::now().time_since_epoch();
        Ticks next = next_look_.load();
        if (now >= next && next_look_.compare_exchange_strong(next, now + between_looks)) {
            for (int other = 0; other < board().size(); ++other) {
                Member& member = table().member(other);
                if (other != rank_ && member.has_died()) {
                    group().mark_dead(
                        other,
                        member.has_failed()
                            ? "it could not attach"
                            : "its process died, or the thread that called attach() ended",
                        rank_
                    );
                }
            }
        }
        return next_look_.load() - now;
    }

    void reserve(std::byte const* data, std::size_t bytes) override {
        try {
            std::size_t const at = MemberTable::bytes_for(board().size());
            object_.reserve(at + static_cast<std::size_t>(data - memory_.begin()), bytes);
        } catch (CommunicationError const& error) {
            group().abort(blamed_on(rank_, {FailureKind::peer_failed, {}, error.what()}), rank_);
            throw;
        }
    }

private:
    /// Ranks throw PeerFailed within a tenth of a second of a death, plus the time for which other
    /// programs use this process's cores. A wait checks after it has yielded for a while, and then
    /// at this interval.
    static constexpr std::chrono::milliseconds between_looks{25};
    using Ticks = std::chrono::steady_clock::duration;

    /// How long a failed rank 0 waits for ranks that must learn of the failure; they start at the
    /// same time.
    static constexpr std::chrono::seconds patience_for_others{2};

    /// Takes ownership only when it can no longer fail.
    NamedSegment(
        SharedObject&& object,
        Membership&& membership,
        Mapping&& memory,
        std::string const& path,
        int rank
    )
        : ProcessSegment{static_cast<int>(membership.table().heading.size),
                         static_cast<std::size_t>(membership.table().heading.room), memory.begin(),
                         rank == 0},
          path_{path}, rank_{rank}, object_{std::move(object)},
          membership_{std::move(membership)}, memory_{std::move(memory)} {}

    /// Null: the name was a dead job's and is free now.
    static std::shared_ptr<NamedSegment> create(
        std::string const& path,
        int size,
        std::chrono::steady_clock::time_point end,
        std::chrono::nanoseconds deadline
    ) {
        for (std::string const& other : SharedObject::own_of(path)) {
            remove_if_dead(other, size);
        }
        auto published = publish_with_notice(path, size, end);
        if (!published) {
            return nullptr;
        }
        auto& [object, membership, named] = *published;
        MemberTable& table = membership.table();
        std::size_t const room = static_cast<std::size_t>(table.heading.room);
        std::size_t const table_bytes = MemberTable::bytes_for(size);
        try {
            object.resize(object_bytes(size, room));
            for (auto const& [at, bytes] : parts_at_start(size)) {
                if (!object.reserve(table_bytes + at, bytes, end)) {
                    throw TimedOut{
                        {0},
                        concat(
                            "rank 0 did not reserve memory in ",
                            named,
                            " within ",
                            std::chrono::duration<double>(deadline).count(),
                            " s"
                        )
                    };
                }
            }
            Mapping memory{object, bytes_for(size, room), table_bytes};
            std::shared_ptr<NamedSegment> segment{new NamedSegment{
                std::move(object), std::move(membership), std::move(memory), named, 0
            }};
            table.state.store(MemberTable::ready);
            return segment;
        } catch (...) {
            if (!membership.is_open()) { // this rank has left
                throw;
            }
            table.failure.store(blamed_on(0, failure_of(std::current_exception())));
            table.state.store(MemberTable::failed);
            auto const enough = (std::min)(end, end_of_wait(patience_for_others));
            while (!table.missing_ranks().empty() && std::chrono::steady_clock::now() < enough) {
                sleep_for(std::chrono::milliseconds{2});
            }
            object.remove_name(named);
            throw;
        }
    }
    struct Published {
        SharedObject object;
        Membership membership;
        std::string path;
    };
    /// Nothing if another rank 0 of this job does the same, or has done it.
    static std::optional<Published> publish_with_notice(
        std::string const& path, int size, std::chrono::steady_clock::time_point end
    ) {
        auto const notice = StartNotice::make(path);
        if (!notice) {
            return std::nullopt;
        }
        try {
            return publish_table(path, size);
        } catch (...) {
            if (size > 1) {
                notice->fail((std::min)(end, end_of_wait(patience_for_others)));
            }
            throw;
        }
    }
    /// Nothing if another object of this user has the name.
    static std::optional<Published> publish_table(std::string const& path, int size) {
        Heading heading;
        heading.size = static_cast<std::uint64_t>(size);
        auto object = SharedObject::create();
        heading.room = most_room;
        while (heading.room > least_room && !object.can_have(object_bytes(size, heading.room))) {
            heading.room /= 2;
        }
        std::size_t const table_bytes = MemberTable::bytes_for(size);
        object.resize(table_bytes);
        object.reserve(0, MemberTable::used_bytes_for(size));
        Mapping mapped{object, table_bytes};
        MemberTable& table = MemberTable::create(mapped.begin(), heading);
        static_cast<void>(table.member(0).enter());
        Membership membership{std::move(mapped), 0};
        auto named = object.publish_first_free(path);
        if (!named) {
            return std::nullopt;
        }
        return Published{std::move(object), std::move(membership), std::move(*named)};
    }
    static void remove_if_dead(std::string const& path, int size) {
        auto const other = SharedObject::find(path);
        if (!other) {
            return;
        }
        require_usable(*other, path, size);
        Mapping const found{*other, MemberTable::bytes_for(size)};
        Member& creator = Membership::at(found).member(0);
        if (!creator.has_died() && !creator.has_left()) {
            throw ContractViolation{concat(
                "expected no other rank 0 of this job, but ",
                path,
                " belongs to process ",
                creator.process(),
                ", which is alive: give each job that runs at the same time another id"
            )};
        }
        other->remove_name(path);
    }

    /// Null: there is none yet. What a dead rank 0 has made is an older job's if it is there when
    /// this rank looks for the first time.
    static std::shared_ptr<NamedSegment> find(
        std::string const& base,
        int rank,
        int size,
        std::chrono::steady_clock::time_point end,
        std::chrono::nanoseconds deadline,
        bool is_first
    ) {
        for (std::string const& path : SharedObject::own_of(base)) {
            if (auto object = SharedObject::find(path)) {
                require_usable(*object, path, size);
                Mapping mapped{*object, MemberTable::bytes_for(size)};
                Member& creator = Membership::at(mapped).member(0);
                bool const is_dead = creator.has_died();
                if (is_dead && !is_first) {
                    throw_death_of_rank_zero(*object, path);
                }
                if (is_dead || creator.has_left()) { // apparently of an older job
                    object->remove_name(path);
                    continue;
                }
                return join(std::move(*object), std::move(mapped), path, rank, end, deadline);
            }
        }
        return nullptr;
    }
    /// Joins the segment that rank 0 makes.
    static std::shared_ptr<NamedSegment> join(
        SharedObject object,
        Mapping mapped,
        std::string const& path,
        int rank,
        std::chrono::steady_clock::time_point end,
        std::chrono::nanoseconds deadline
    ) {
        MemberTable& table = Membership::at(mapped);
        if (!table.member(rank).enter()) {
            throw ContractViolation{concat(
                "expected no other rank ",
                rank,
                " of this job, but process ",
                table.member(rank).process(),
                " is attached to ",
                path,
                " as that rank: give each rank its number, and each job that runs at the same time "
                "another id"
            )};
        }
        Membership membership{std::move(mapped), rank};
        try {
            while (table.state.load() == MemberTable::starting) {
                if (table.member(0).has_died()) {
                    throw_death_of_rank_zero(object, path);
                }
                if (std::chrono::steady_clock::now() >= end) {
                    throw TimedOut{
                        {0}, not_in_time({0}, path, deadline, concat(rank, " is attached to it"))
                    };
                }
                sleep_for(std::chrono::milliseconds{1});
            }
            if (table.state.load() == MemberTable::failed) {
                throw_failure(table.failure.load());
            }
            int const size = static_cast<int>(table.heading.size);
            std::size_t const table_bytes = MemberTable::bytes_for(size);
            Mapping memory{object, bytes_for(size, table.heading.room), table_bytes};
            return std::shared_ptr<NamedSegment>{new NamedSegment{
                std::move(object), std::move(membership), std::move(memory), path, rank
            }};
        } catch (...) {
            table.member(rank).fail();
            throw;
        }
    }

    void
    wait_for_all(std::chrono::steady_clock::time_point end, std::chrono::nanoseconds deadline) {
        board().room.wake();
        auto const all_have_come = [&] { return table().missing_ranks().empty(); };
        bool const is_over = board().room.wait(
            [&] { return all_have_come() || board().is_aborted(); },
            end - std::chrono::steady_clock::now(),
            [&] { return look_for_deaths(); }
        );
        std::vector<int> const missing = table().missing_ranks();
        if (!is_over && !missing.empty()) {
            group().abort(
                {FailureKind::timed_out,
                 missing,
                 not_in_time(missing, path_, deadline, concat(rank_, " is attached to it"))},
                rank_
            );
        }
        // Every rank does this, so that a rank that returns from here knows that the name is free.
        object_.remove_name(path_);
        if (!missing.empty()) {
            throw_failure(board().reason());
        }
    }

    static std::string not_in_time(
        std::vector<int> const& missing,
        std::string const& path,
        std::chrono::nanoseconds deadline,
        std::string const& who_waits
    ) {
        return concat(
            ranks_text(missing),
            missing == std::vector{0} ? " did not make " : " did not attach to ",
            path,
            " within ",
            std::chrono::duration<double>(deadline).count(),
            " s, while rank ",
            who_waits,
            ": start all ranks of a job on one machine, as one user, with the same job id"
        );
    }

    /// Checks that this process may use the object.
    static void require_usable(SharedObject const& object, std::string const& path, int size) {
        auto const refuse = [&](std::string const& expected, std::string const& given) {
            throw CommunicationError{concat(
                "expected ",
                path,
                " to have ",
                expected,
                ", but it has ",
                given,
                "; remove it, or give the job another id"
            )};
        };
        struct stat const status = object.status();
        if (status.st_uid != geteuid()) {
            refuse(concat("the owner ", geteuid()), concat("the owner ", status.st_uid));
        }
        if (!S_ISREG(status.st_mode)) {
            refuse("a regular file", "another type");
        }
        if (unsigned const mode = status.st_mode & 0777U; mode != (S_IRUSR | S_IWUSR)) {
            refuse("mode 600 (octal)", concat("mode ", mode >> 6U, mode >> 3U & 7U, mode & 7U));
        }
        Heading heading;
        if (!object.read(std::as_writable_bytes(std::span{&heading, 1}))) {
            refuse(
                concat("at least ", sizeof(Heading), " bytes"), concat(status.st_size, " bytes")
            );
        }
        if (heading.magic != Heading::joinable_magic) {
            refuse("what a joinable program writes first", "something else");
        }
        if (heading.layout != Heading::own_layout) {
            refuse(
                concat("layout ", Heading::own_layout, " of this program"),
                concat(
                    "layout ",
                    heading.layout,
                    ": build the programs of all ranks with the same version of joinable"
                )
            );
        }
        if (heading.size != static_cast<std::uint64_t>(size)) {
            throw ContractViolation{concat(
                "expected a group of ",
                size,
                " ranks, but ",
                path,
                " was made for ",
                heading.size,
                "; start all ranks of a job with the same world size, and give each job that runs "
                "at the same time another id"
            )};
        }
        // Map the table only, before rank 0 makes the rest.
        std::size_t const bytes = object_bytes(size, (std::min)(heading.room, most_room));
        auto const has = static_cast<std::size_t>(status.st_size);
        if ((has != bytes && has != MemberTable::bytes_for(size)) || heading.room > most_room) {
            refuse(concat(bytes, " bytes"), concat(has, " bytes"));
        }
    }

    static std::size_t object_bytes(int size, std::size_t room) {
        return MemberTable::bytes_for(size) + bytes_for(size, room);
    }
    [[nodiscard]] MemberTable& table() const noexcept { return membership_.table(); }

    std::string path_;
    int rank_;
    SharedObject object_;
    Membership membership_;
    Mapping memory_;
    std::atomic<Ticks> next_look_{Ticks{}}; ///< for any waiting thread of this rank
};

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/process.ipp

#if JOINABLE_HAS_DEFINITIONS

#if defined(__linux__)

#include <utility>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION ProcessCommunicator ProcessCommunicator::attach(AttachOptions const& options) {
    if (options.rank < 0 || options.rank >= options.size) {
        throw ContractViolation{detail::concat(
            "expected a rank from 0 to below the world size, but was given rank ",
            options.rank,
            " of ",
            options.size
        )};
    }
    return ProcessCommunicator{
        detail::NamedSegment::attach(options.rank, options.size, options.job, options.deadline),
        options
    };
}

JOINABLE_DEFINITION ProcessCommunicator
ProcessCommunicator::from_environment(std::chrono::nanoseconds deadline) {
    LaunchEnvironment const launch = launch_environment();
    if (!launch.spread.empty()) {
        throw ContractViolation{detail::concat(
            "expected all ranks on this machine, as they share its memory, but ",
            launch.spread,
            ": start them on one machine, or use a communicator that has a network"
        )};
    }
    return attach({launch.rank, launch.size, launch.job, deadline});
}

JOINABLE_DEFINITION
ProcessCommunicator::ProcessCommunicator(detail::ProcessSegment& segment, int rank)
    : SegmentOwner{}, BoardCommunicator{segment, rank} {}

JOINABLE_DEFINITION ProcessCommunicator ProcessCommunicator::split(int color, int key) {
    return {*this, allot_slot(color, key)};
}

JOINABLE_DEFINITION Arena ProcessCommunicator::allocate(std::size_t bytes, std::size_t alignment) {
    return rank_.memory().allocate(bytes, alignment);
}

JOINABLE_DEFINITION Arena ProcessCommunicator::share(std::size_t bytes) {
    return detail::share_mapping(*this, bytes);
}

JOINABLE_DEFINITION ProcessCommunicator::ProcessCommunicator(
    std::shared_ptr<detail::ProcessSegment> segment, AttachOptions const& options
)
    : SegmentOwner{std::move(segment)}, BoardCommunicator{*owned, options.rank} {
    set_deadline(options.deadline);
}

JOINABLE_DEFINITION
ProcessCommunicator::ProcessCommunicator(ProcessCommunicator const& parent, Slot const& slot)
    : SegmentOwner{parent}, BoardCommunicator{slot.group, slot.rank, parent.rank_.storage()} {
    set_deadline(parent.rank_.deadline());
}

}} // namespace joinable::v0

#endif

#endif

// ---- joinable/communicator/shared_memory/process.hpp

#if defined(__linux__)
namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_INSTANTIATE(class Endpoint<Group, LentBy<Room>>)
JOINABLE_INSTANTIATE(class GroupRank<Room>)
JOINABLE_INSTANTIATE(class GroupWork<Room>)
JOINABLE_INSTANTIATE(class BoardCommunicator<ProcessRank, ProcessWork>)

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/progress_thread.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// What a thread beside a rank does for it: run() until stop().
template <class Comm>
concept HasHelper = requires(Comm& comm) {
    comm.helper().run();
    comm.helper().stop();
};

} // namespace detail

/// A thread that completes a rank's collectives while the rank does something else.
///
/// Without it, collectives make progress only while a rank waits or tests. With it they also
/// progress in between, on another core. It helps if ranks leave cores idle, as when they wait for
/// a device or for data. If every core computes, it only competes with its rank. Results are
/// bitwise identical with and without it.
///
/// Over thread and process ranks it computes the rank's share of collectives of more than 2 KiB
/// that all ranks have posted, and else sleeps.
///
/// Over MPI it tests all collectives and messages in flight and delivers their results. It also
/// receives aborts and answers the other ranks, so they do not name its rank as missing in a
/// collective that this rank has posted. If it finds a failure, it tells all ranks; its own rank
/// throws the reason at its next call. It polls while something is in flight. Otherwise it looks
/// for messages every 10 ms. It rests while the rank waits. MPI must be initialised with
/// MPI_THREAD_MULTIPLE.
///
/// Each rank decides for itself whether to have one. One thread serves one communicator, not those
/// split from it.
class ProgressThread {
public:
    /// Local. `comm` is a ThreadCommunicator, a ProcessCommunicator or an MpiCommunicator. It must
    /// outlive this object, and MPI must still run when this object is destroyed. Only a thread that
    /// may use `comm` constructs or destroys this object.
    /// @throws std::system_error  the system cannot start another thread.
    /// @throws ContractViolation  MPI runs with a lower level than MPI_THREAD_MULTIPLE.
    template <class Comm>
    explicit ProgressThread(Comm& comm) {
        static_assert(
            detail::HasHelper<Comm>,
            "ProgressThread: the communicator has to be a ThreadCommunicator, a ProcessCommunicator or an "
            "MpiCommunicator, whose collectives another thread can complete; over others call test() now and then"
        );
        if constexpr (detail::HasHelper<Comm>) {
            using Helper = decltype(comm.helper());
            std::shared_ptr<Helper> const helper{new Helper(comm.helper())};
            stop_ = [helper] { helper->stop(); };
            thread_ = std::thread{[&helps = *helper] { helps.run(); }};
        }
    }
    /// Local. Returns after the chunk that the thread is computing, or after its turn over MPI.
    ~ProgressThread() {
        stop_();
        thread_.join();
    }
    ProgressThread(ProgressThread const&) = delete;
    ProgressThread& operator=(ProgressThread const&) = delete;

private:
    std::function<void()> stop_; ///< owns what the thread runs
    std::thread thread_;
};

}} // namespace joinable::v0

// ---- joinable/communicator/shared_buffer.hpp

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

/// One rank's handle to elements that all ranks see. shared_buffer() makes it; the elements start
/// as zeros. Like a view, a const handle gives access to mutable elements. The elements live until
/// the last handle is destroyed, even after ranks and communicators have ended. It models Tensor.
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

// ---- joinable/communicator/shared_memory/process/child_processes.hpp

#if defined(__linux__)

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// The processes of one group, as seen by the process that started them. The destructor kills those
/// that are left.
class ChildProcesses {
public:
    /// `other_threads` is the number of threads that the processes do not get.
    explicit ChildProcesses(ProcessSegment& segment, int other_threads = 0);
    ~ChildProcesses();
    ChildProcesses(ChildProcesses const&) = delete;
    ChildProcesses& operator=(ChildProcesses const&) = delete;

    /// Starts the process of the next rank. Returns true in the new process, which must end by
    /// _exit.
    /// @throws CommunicationError  the system cannot create more processes.
    [[nodiscard]] bool start();

    /// Returns when all have ended. Tells the others about each death. After the first failure the
    /// others have their longest deadline to end; then they are killed.
    void wait();

    /// How the process of `rank` died. Empty if it ended normally, or had to be killed after
    /// another rank's failure.
    [[nodiscard]] std::string const& death(int rank) const noexcept {
        return deaths_[static_cast<std::size_t>(rank)];
    }

    /// Why processes that had to be killed may have been stuck, for the end of an error's text.
    /// Empty if none was, or if they lack no thread.
    [[nodiscard]] std::string killed_text() const;

private:
    struct Child {
        pid_t id;
        int handle;
        int rank;
    };
    static constexpr int unknown = -1;

    static void end(Child const& child) noexcept {
        // By its handle: its number may belong to another process if the program ignores SIGCHLD.
        syscall(SYS_pidfd_send_signal, child.handle, SIGKILL, nullptr, 0);
    }
    static int reap(Child const& child) noexcept;

    void note(int rank, int status);

    /// Tells the others. Processes left over were stopped by another death that is not yet
    /// recorded.
    void mark_dead();

    [[nodiscard]] std::chrono::nanoseconds longest_deadline() const noexcept;
    [[nodiscard]] static std::chrono::steady_clock::time_point in_a_moment() noexcept {
        return std::chrono::steady_clock::now() + std::chrono::milliseconds{1};
    }
    [[nodiscard]] static int milliseconds_until(std::chrono::steady_clock::time_point end) noexcept;

    ProcessSegment& segment_;
    std::vector<Child> children_;
    std::vector<std::string> deaths_;
    std::vector<int> unburied_; ///< ranks
    std::vector<int> killed_;   ///< ranks that did not end by themselves
    int other_threads_;
    std::vector<pollfd> waited_for_;
    bool has_failure_ = false;
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/process/child_processes.ipp

#if defined(__linux__)
#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cerrno>
#include <limits>
#include <sys/prctl.h>
#include <sys/wait.h>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ChildProcesses::ChildProcesses(ProcessSegment& segment, int other_threads)
    : segment_{segment}, other_threads_{other_threads} {
    auto const size = static_cast<std::size_t>(segment.board().size());
    children_.reserve(size);
    deaths_.resize(size);
    waited_for_.resize(size);
}

JOINABLE_DEFINITION ChildProcesses::~ChildProcesses() {
    for (Child const& child : children_) {
        end(child);
    }
    for (Child const& child : children_) {
        reap(child);
        close(child.handle);
    }
}

JOINABLE_DEFINITION bool ChildProcesses::start() {
    pid_t const parent = getpid();
    pid_t const child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) { // it died before that
            _exit(1);
        }
        for (Child const& other : children_) {
            close(other.handle);
        }
        children_.clear(); // they are this process's siblings
        return true;
    }
    auto const rank = static_cast<int>(children_.size());
    if (child > 0) {
        int const handle = static_cast<int>(syscall(SYS_pidfd_open, child, 0)); // closed on exec
        if (handle >= 0) {
            children_.push_back({child, handle, rank});
            return false;
        }
        int const error = errno;
        kill(child, SIGKILL);
        reap({child, -1, rank});
        errno = error;
    }
    throw CommunicationError{concat(
        "a process for rank ",
        rank,
        " could not be started: ",
        std::strerror(errno),
        "; process ranks need fork() and the pidfd_open() of Linux 5.3"
    )};
}

JOINABLE_DEFINITION void ChildProcesses::wait() {
    auto limit = (std::chrono::steady_clock::time_point::max)();
    while (!children_.empty()) {
        waited_for_.clear();
        for (Child const& child : children_) {
            waited_for_.push_back({child.handle, POLLIN, 0});
        }
        auto const again = unburied_.empty() ? limit : (std::min)(limit, in_a_moment());
        poll(waited_for_.data(), waited_for_.size(), milliseconds_until(again));
        bool const is_over = std::chrono::steady_clock::now() >= limit;
        for (std::size_t i = children_.size(); i-- > 0;) {
            Child const child = children_[i];
            bool const has_ended = (waited_for_[i].revents & POLLIN) != 0;
            if (has_ended || is_over) {
                children_.erase(children_.begin() + static_cast<std::ptrdiff_t>(i));
                if (has_ended) {
                    note(child.rank, reap(child));
                } else { // no failure of its own, but a consequence of others
                    end(child);
                    reap(child);
                    killed_.push_back(child.rank);
                }
                close(child.handle);
            }
        }
        mark_dead();
        if (has_failure_ && limit == (std::chrono::steady_clock::time_point::max)()) {
            limit = end_of_wait(longest_deadline());
        }
    }
}

JOINABLE_DEFINITION std::string ChildProcesses::killed_text() const {
    if (killed_.empty() || other_threads_ == 0) {
        return {};
    }
    std::vector<int> ranks = killed_;
    std::sort(ranks.begin(), ranks.end());
    return concat(
        "; ",
        ranks_text(ranks),
        " had to be killed: this process had ",
        other_threads_ + 1,
        " threads when it was forked, and a rank gets one of them; if it waits for another (of "
        "OpenMP, a BLAS), call run_processes before threads start"
    );
}

JOINABLE_DEFINITION int ChildProcesses::reap(Child const& child) noexcept {
    int status = 0;
    pid_t reaped = 0;
    do { // NOLINT(cppcoreguidelines-avoid-do-while)
        reaped = waitpid(child.id, &status, 0);
    } while (reaped < 0 && errno == EINTR);
    return reaped == child.id ? status : unknown; // the program may ignore SIGCHLD
}

JOINABLE_DEFINITION void ChildProcesses::note(int rank, int status) {
    Outcome::State const state = segment_.outcome(rank).state.load();
    bool const was_killed = status != unknown && WIFSIGNALED(status);
    has_failure_ = has_failure_ || state != Outcome::returned || was_killed;
    if (state != Outcome::running && !was_killed) {
        return;
    }
    std::string& death = deaths_[static_cast<std::size_t>(rank)];
    if (was_killed) {
        death = concat("its process was killed by signal ", WTERMSIG(status));
    } else if (status != unknown) {
        death = concat("its process ended with status ", WEXITSTATUS(status));
    } else {
        death = "its process ended";
    }
    unburied_.push_back(rank);
}

JOINABLE_DEFINITION void ChildProcesses::mark_dead() {
    std::erase_if(unburied_, [&](int rank) {
        return segment_.group().mark_dead(rank, death(rank), FirstReason::nobody);
    });
}

JOINABLE_DEFINITION std::chrono::nanoseconds ChildProcesses::longest_deadline() const noexcept {
    std::chrono::nanoseconds longest{0};
    for (Child const& child : children_) {
        std::chrono::nanoseconds const its{segment_.outcome(child.rank).deadline.load()};
        longest = (std::max)(longest, its);
    }
    return longest;
}

JOINABLE_DEFINITION int ChildProcesses::milliseconds_until(std::chrono::steady_clock::time_point end
) noexcept {
    if (end == (std::chrono::steady_clock::time_point::max)()) {
        return -1;
    }
    auto const left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    constexpr int most = (std::numeric_limits<int>::max)();
    return static_cast<int>(std::clamp<std::chrono::milliseconds::rep>(left.count(), 0, most));
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_memory/run_processes.hpp

#if defined(__linux__) // elsewhere there are no process ranks

#include <cerrno>
#include <cstring>

namespace joinable { inline namespace v0 {

/// How run_processes() starts ranks.
struct ProcessOptions {
    /// Starts them although this process has other threads. The body then uses nothing that waits
    /// for one of these, such as OpenMP after its first parallel loop.
    bool other_threads = false;
};

namespace detail {

/// Runs one rank in its new process, until the process exits.
[[noreturn]] void run_rank(
    ProcessSegment& segment, int rank, std::function<void(ProcessCommunicator&)> const& body
) noexcept;

/// The number of threads of this process beside this one; 0 if the system does not tell. A thread
/// that was joined may be listed for a moment: while there are others, it asks again for `patience`.
[[nodiscard]] int count_other_threads(std::chrono::milliseconds patience);

/// Throws the error of the first rank that failed by itself, not because of another. If several
/// did, it is the one that the abort names.
void throw_first_failure(ProcessSegment& segment, ChildProcesses const& children);

/// The part of run_processes() that does not depend on the body's type, so that it is compiled
/// once.
void run_processes_of(
    int world_size,
    std::function<void(ProcessCommunicator&)> const& body,
    ProcessOptions const& options
);

} // namespace detail

/// Makes `count` zeroed elements that this process shares with processes that it creates later. Use
/// it to return results from run_processes(). Local; no rank calls it. The result may not be
/// copyable, so a body refers to it.
///
/// @code
/// auto const losses = joinable::shared_buffer<double>(4);
/// joinable::run_processes(4, [&](auto& comm) { losses[comm.rank()] = train(comm); });
/// @endcode
/// @throws CommunicationError  the system cannot provide the memory.
template <class T>
[[nodiscard]] SharedBuffer<T> shared_buffer(std::size_t count) {
    detail::check_shared_element<T>();
    std::size_t const bytes = detail::bytes_of_elements<T>(count);
    if (count == 0) {
        return {};
    }
    Arena memory = detail::map_shared(bytes);
    if (memory.data() == nullptr) {
        throw CommunicationError{detail::concat(
            "expected ", bytes, " bytes of shared memory, but mmap says: ", std::strerror(errno)
        )};
    }
    return {std::move(memory), count};
}

/// Runs `body(ProcessCommunicator&)` in `world_size` new processes, one rank each, and waits for
/// all. The new processes are copies of this one that have only this thread. This process does not
/// see their changes, except in a shared_buffer(). Each ends with its body; destructors of static
/// objects do not run. They are killed if this process dies or this thread ends.
///
/// A rank that waits for a thread that it does not have never returns, and no deadline ends that.
/// OpenMP and libraries of linear algebra keep threads after their first use, so call this before.
/// A process with other threads is refused unless `options` say `{.other_threads = true}`. The
/// thread sanitizer has a thread of its own, so under it nothing is counted.
///
/// If a body throws or a process dies, the waits of the other ranks throw PeerFailed. Ranks that
/// have not ended after one more deadline, the longest that any of them has set, are killed.
/// @throws PeerFailed          with the number and the text of the rank that failed first.
/// @throws ContractViolation   world_size is below 1, or this process has other threads.
/// @throws CommunicationError  the system has no memory or no processes for the ranks.
template <class F>
void run_processes(int world_size, F body, ProcessOptions options = {}) {
    static_assert(
        std::invocable<F&, ProcessCommunicator&>,
        "run_processes: each rank calls body(ProcessCommunicator&), which this body does not take"
    );
    detail::run_processes_of(world_size, std::ref(body), options);
}

/// Explains what is missing.
template <class F>
void run_processes(F const&) {
    static_assert(
        std::is_void_v<F>,
        "run_processes: the number of ranks comes first, as in run_processes(4, [](joinable::ProcessCommunicator& comm) "
        "{ ... })"
    );
}
/// Explains arguments in another order.
template <class F>
    requires(!std::convertible_to<F, int>)
void run_processes(F const&, int) {
    static_assert(
        std::convertible_to<F, int>,
        "run_processes: the number of ranks comes first, as in run_processes(4, body)"
    );
}

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/shared_memory/run_processes.ipp

#if JOINABLE_HAS_DEFINITIONS

#if defined(__linux__)

#include <chrono>
#include <cstdio>
#include <dirent.h>
#include <exception>
#include <thread>
#include <unistd.h>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void run_rank(
    ProcessSegment& segment, int rank, std::function<void(ProcessCommunicator&)> const& body
) noexcept {
    Outcome& outcome = segment.outcome(rank);
    {
        ProcessCommunicator comm{segment, rank};
        try {
            body(comm);
            outcome.state.store(Outcome::returned);
        } catch (...) {
            AbortReason const reason = failure_of(std::current_exception());
            AbortReason const told = reason_of_exit(segment.group(), rank, reason);
            outcome.reason.store(reason.ranks.empty() ? reason : told);
            outcome.state.store(Outcome::threw);
            comm.abort(told);
        }
    }
    std::fflush(nullptr); // _exit skips the program's destructors and open files
    _exit(outcome.state.load() == Outcome::returned ? 0 : 1);
}

JOINABLE_DEFINITION int count_other_threads(std::chrono::milliseconds patience) {
    auto const count = [] {
        DIR* const tasks = opendir("/proc/self/task");
        if (tasks == nullptr) {
            return 0;
        }
        int others = -1;
        while (dirent const* const task = readdir(tasks)) {
            others += task->d_name[0] != '.' ? 1 : 0;
        }
        closedir(tasks);
        return others;
    };
    int others = count();
    for (; others > 0 && patience.count() > 0; --patience) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
        others = count();
    }
    return others;
}

JOINABLE_DEFINITION void
throw_first_failure(ProcessSegment& segment, ChildProcesses const& children) {
    int const size = segment.board().size();
    std::vector<AbortReason> failures;
    auto const look_at = [&](int rank) {
        if (!children.death(rank).empty()) {
            failures.push_back({FailureKind::peer_failed, {}, children.death(rank)});
        } else if (segment.outcome(rank).state.load() == Outcome::threw) {
            failures.push_back(segment.outcome(rank).reason.load());
        } else {
            return;
        }
        bool const is_own = failures.back().ranks.empty();
        failures.back() = blamed_on(rank, failures.back());
        if (is_own) {
            throw PeerFailed{
                failures.back().ranks, failures.back().message + children.killed_text()
            };
        }
    };
    if (segment.board().is_aborted()) {
        for (int const rank : own_ranks(segment.board().reason())) {
            if (rank < size) {
                look_at(rank);
            }
        }
    }
    for (int rank = 0; rank < size; ++rank) {
        look_at(rank);
    }
    if (!failures.empty()) {
        throw PeerFailed{failures.front().ranks, failures.front().message + children.killed_text()};
    }
}

JOINABLE_DEFINITION void run_processes_of(
    int world_size,
    std::function<void(ProcessCommunicator&)> const& body,
    ProcessOptions const& options
) {
    std::chrono::seconds const patience{options.other_threads ? 0 : 1};
    int const others = has_thread_sanitizer ? 0 : count_other_threads(patience);
    if (others != 0 && !options.other_threads) {
        throw ContractViolation{concat(
            "run_processes: expected a process with one thread, but it has ",
            others == 1 ? "another thread" : concat(others, " other threads"),
            ", which its ranks do not get: a rank that waits for such a thread (of OpenMP, a BLAS) "
            "hangs for ever; call run_processes before threads start, or give it "
            "{.other_threads = true} if the ranks need none"
        )};
    }
    ProcessSegment segment{world_size};
    ChildProcesses children{segment, others};
    std::fflush(nullptr); // else each rank would print this process's buffered output again
    for (int rank = 0; rank < world_size; ++rank) {
        if (children.start()) {
            run_rank(segment, rank, body);
        }
    }
    children.wait();
    throw_first_failure(segment, children);
}

}}} // namespace joinable::v0::detail

#endif

#endif

// ---- joinable/communicator/shared_memory/thread.hpp

namespace joinable { inline namespace v0 {

/// A collective or a message between thread ranks, with wait() and test(). All communicators in
/// shared memory use the same class template.
using ThreadWork = detail::GroupWork<detail::Heap>;

/// Ranks are threads of this process. run_threads() makes one object per rank.
///
/// Reductions combine every element in rank order, so results are bitwise identical in whatever
/// order ranks arrive. A scaled sum rounds each product before adding it; products of 16-bit
/// numbers are rounded to float. Everything is asynchronous: a rank that waits or tests does the
/// work of all ranks, so a busy rank delays nobody. Up to 64 collectives may be in flight; posting
/// another one first completes the oldest. Every collective compares what the ranks are about to
/// do. A collective neither allocates nor locks, and makes no system call unless a rank waits long.
///
/// All members that take buffers throw ContractViolation before any data moves if counts or dtypes
/// do not fit, the root is not a rank, memory is missing or overlaps, or the operation is bitwise
/// on floating-point numbers. The caller must keep buffers until the work has been waited for.
/// Spans of counts are copied.
class ThreadCommunicator
    : public detail::BoardCommunicator<detail::GroupRank<detail::Heap>, ThreadWork> {
public:
    /// For run_threads.
    ThreadCommunicator(
        detail::Group group, int rank, std::shared_ptr<detail::GroupStorage<detail::Heap>> storage
    );

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits the deadline. Aborting this communicator aborts
    /// the group, but not the reverse. Errors name ranks by their numbers in the group where they
    /// occur.
    [[nodiscard]] ThreadCommunicator split(int color, int key);

    /// Collective; blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes);

    /// For participants that train a model.
    [[nodiscard]] detail::ModelTable* model_table() noexcept { return &models_; }

private:
    ThreadCommunicator(detail::GroupRank<detail::Heap> const& parent, Slot const& slot);

    detail::ThreadModelTable models_;
};

}} // namespace joinable::v0

// ---- joinable/communicator/shared_memory/group/shared_heap.hpp

#if JOINABLE_HAS_DEFINITIONS

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// Heap memory that ranks share as threads. It lives until the last rank's arena is destroyed.
/// Collective; blocks.
/// @throws Mismatch        see check_same_size.
/// @throws std::bad_alloc  on all ranks.
template <class Comm>
[[nodiscard]] Arena share_heap(Comm& comm, std::size_t bytes) {
    struct Owned {
        Arena memory;
        std::atomic<int> owners;
    };
    std::unique_ptr<Owned> made;
    if (comm.rank() == 0) {
        try {
            made.reset(new Owned{Arena{bytes}, comm.size()});
        } catch (std::bad_alloc const&) { // NOLINT(bugprone-empty-catch): a null pointer reports it
        }
    }
    auto const ranks = static_cast<std::size_t>(comm.size());
    std::array<std::uint64_t, 2> const mine{bytes, reinterpret_cast<std::uintptr_t>(made.get())};
    std::vector<std::array<std::uint64_t, 2>> all(ranks);
    comm.all_gather({mine.data(), 2, DType::u64}, {all.data(), 2 * ranks, DType::u64}).wait();
    std::vector<std::uint64_t> sizes;
    for (auto const& said : all) {
        sizes.push_back(said[0]);
    }
    check_same_size(sizes);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rank 0's pointer, in the same process
    auto* const owned = reinterpret_cast<Owned*>(static_cast<std::uintptr_t>(all[0][1]));
    if (owned == nullptr) {
        throw std::bad_alloc{};
    }
    static_cast<void>(made.release()); // now every rank owns it
    auto const release = [](void* its, std::byte*, std::size_t) noexcept {
        auto* const shared = static_cast<Owned*>(its);
        if (shared->owners.fetch_sub(1) == 1) {
            delete shared;
        }
    };
    return {owned->memory.data(), bytes, release, owned};
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/shared_memory/thread.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <utility>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION ThreadCommunicator::ThreadCommunicator(
    detail::Group group, int rank, std::shared_ptr<detail::GroupStorage<detail::Heap>> storage
)
    : BoardCommunicator{group, rank, std::move(storage)},
      models_{rank_.storage()->models(), &group.board()} {}

JOINABLE_DEFINITION ThreadCommunicator ThreadCommunicator::split(int color, int key) {
    return {rank_, allot_slot(color, key)};
}

JOINABLE_DEFINITION Arena ThreadCommunicator::share(std::size_t bytes) {
    return detail::share_heap(*this, bytes);
}

JOINABLE_DEFINITION ThreadCommunicator::ThreadCommunicator(
    detail::GroupRank<detail::Heap> const& parent, Slot const& slot
)
    : ThreadCommunicator{slot.group, slot.rank, parent.storage()} {
    set_deadline(parent.deadline());
}

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/shared_memory/thread.hpp

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_INSTANTIATE(class Endpoint<Group, LentBy<Heap>>)
JOINABLE_INSTANTIATE(class GroupRank<Heap>)
JOINABLE_INSTANTIATE(class GroupWork<Heap>)
JOINABLE_INSTANTIATE(class BoardCommunicator<GroupRank<Heap>, ThreadWork>)

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/shared_memory/run_threads.hpp

namespace joinable { inline namespace v0 {

namespace detail {

bool is_of_a_peer(std::exception_ptr const& error);

/// The first exception that a rank's body threw by itself, not because another rank failed. `named`
/// are the ranks that the abort names.
std::exception_ptr
original(std::vector<std::exception_ptr> const& errors, std::vector<int> const& named, int first);

/// The part of run_threads() that does not depend on the body's type, so that it is compiled once.
void run_threads_of(int world_size, std::function<void(ThreadCommunicator&)> const& body);

} // namespace detail

/// Runs `body(ThreadCommunicator&)` on `world_size` threads, one rank each, and waits for all.
///
/// If a body throws, the waits of the other ranks throw PeerFailed, and this function rethrows the
/// original exception. If a rank returns while others wait for it, they throw PeerFailed with its
/// number at once. A thread that blocks in the caller's own code cannot be ended.
/// @throws ContractViolation  world_size is below 1.
template <class F>
void run_threads(int world_size, F body) {
    static_assert(
        std::invocable<F&, ThreadCommunicator&>,
        "run_threads: each rank calls body(ThreadCommunicator&), which this body does not take"
    );
    detail::run_threads_of(world_size, std::ref(body));
}

/// Explains what is missing.
template <class F>
void run_threads(F const&) {
    static_assert(
        std::is_void_v<F>,
        "run_threads: the number of ranks comes first, as in run_threads(4, [](joinable::ThreadCommunicator& comm) "
        "{ ... })"
    );
}
/// Explains arguments in another order.
template <class F>
    requires(!std::convertible_to<F, int>)
void run_threads(F const&, int) {
    static_assert(
        std::convertible_to<F, int>,
        "run_threads: the number of ranks comes first, as in run_threads(4, body)"
    );
}

}} // namespace joinable::v0

// ---- joinable/communicator/shared_memory/run_threads.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool is_of_a_peer(std::exception_ptr const& error) {
    try {
        std::rethrow_exception(error);
    } catch (PeerFailed const&) {
        return true;
    } catch (...) {
        return false;
    }
}

JOINABLE_DEFINITION std::exception_ptr
original(std::vector<std::exception_ptr> const& errors, std::vector<int> const& named, int first) {
    std::vector<int> ranks = named;
    if (first >= 0) {
        ranks.push_back(first);
    }
    std::exception_ptr found;
    auto const look_at = [&](std::exception_ptr const& error) {
        if (error && (!found || (is_of_a_peer(found) && !is_of_a_peer(error)))) {
            found = error;
        }
    };
    for (int const rank : ranks) {
        if (static_cast<std::size_t>(rank) < errors.size()) { // any code may abort, with any ranks
            look_at(errors[static_cast<std::size_t>(rank)]);
        }
    }
    for (std::exception_ptr const& error : errors) {
        look_at(error);
    }
    return found;
}

JOINABLE_DEFINITION void
run_threads_of(int world_size, std::function<void(ThreadCommunicator&)> const& body) {
    auto const storage = std::make_shared<GroupStorage<Heap>>();
    Group const group = storage->make(all_numbers(world_size), 0).value();
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
    std::atomic<int> first_to_throw{-1};
    auto const run = [&](int rank) {
        ThreadCommunicator comm{group, rank, storage};
        try {
            body(comm);
        } catch (...) {
            errors[static_cast<std::size_t>(rank)] = std::current_exception();
            int expected = -1;
            first_to_throw.compare_exchange_strong(expected, rank);
            comm.abort(reason_of_exit(group, rank, failure_of(std::current_exception())));
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(static_cast<std::size_t>(world_size));
        try {
            for (int rank = 1; rank < world_size; ++rank) {
                threads.emplace_back(run, rank);
            }
        } catch (...) { // no more threads: the started ones must not wait for them
            group.abort(
                {FailureKind::communication, {}, "a thread for a rank could not be started"}, 0
            );
            throw;
        }
        run(0);
    }
    if (auto const error =
            original(errors, own_ranks(group.board().reason()), first_to_throw.load())) {
        std::rethrow_exception(error);
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/self.hpp

namespace joinable { inline namespace v0 {

/// The communicator of a single rank. Every operation is complete when it starts. It checks its
/// arguments as the other communicators do, so a program that runs alone also runs on several
/// ranks. It cannot send, receive or split.
class SelfCommunicator : public detail::Collectives<SelfCommunicator, CompletedWork> {
public:
    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return 1; }

    /// See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes) {
        throw_if_aborted();
        return Arena{bytes};
    }

    void abort(AbortReason reason) {
        if (!is_aborted_) {
            reason_ = std::move(reason);
            is_aborted_ = true;
        }
    }
    [[nodiscard]] bool is_aborted() const noexcept { return is_aborted_; }

private:
    friend class detail::BasicCollectives<SelfCommunicator, CompletedWork>;

    void throw_if_aborted() const {
        if (is_aborted_) {
            throw_failure(reason_);
        }
    }
    [[nodiscard]] CompletedWork post(detail::Request const& request) const {
        auto const& [said, in, out, sends, expects] = request;
        throw_if_aborted();
        if (detail::is_scaled(said.collective)) {
            auto const view = [](void const* data, Buffer const& like) {
                return AnyView{const_cast<void*>(data), like.dtype, {like.count}, {1}};
            };
            scale_copy(view(in.data, out), said.factor, view(out.data, out));
        } else if (in.count != 0 && in.data != out.data) {
            std::memcpy(out.data, in.data, in.bytes());
        }
        return {};
    }

    AbortReason reason_;
    bool is_aborted_ = false;
};

}} // namespace joinable::v0

// ---- joinable/participant/over_shared_memory.hpp

// Models over ranks of one machine, with defaults. A program that compiles the library once compiles these classes
// there as well.

namespace joinable { inline namespace v0 {

JOINABLE_INSTANTIATE(class detail::ControlOver<ThreadCommunicator&>)
JOINABLE_INSTANTIATE(void CoalescedBroadcast::run(ThreadCommunicator&, int))
JOINABLE_INSTANTIATE(class detail::ModuleState<ThreadCommunicator>)
JOINABLE_INSTANTIATE(class Reducer<ThreadCommunicator>)
JOINABLE_INSTANTIATE(class Passes<ThreadCommunicator, Reducer<ThreadCommunicator>>)
JOINABLE_INSTANTIATE(class DistributedDataParallel<ThreadCommunicator>)

#if defined(__linux__) // elsewhere there are no process ranks
JOINABLE_INSTANTIATE(class detail::ControlOver<ProcessCommunicator&>)
JOINABLE_INSTANTIATE(void CoalescedBroadcast::run(ProcessCommunicator&, int))
JOINABLE_INSTANTIATE(class detail::ModuleState<ProcessCommunicator>)
JOINABLE_INSTANTIATE(class Reducer<ProcessCommunicator>)
JOINABLE_INSTANTIATE(class Passes<ProcessCommunicator, Reducer<ProcessCommunicator>>)
JOINABLE_INSTANTIATE(class DistributedDataParallel<ProcessCommunicator>)
#endif

}} // namespace joinable::v0

// ---- joinable/data/shuffle.hpp

namespace joinable { inline namespace v0 {

/// Selects the order of an epoch. The same two numbers give the same order on every rank, with
/// every compiler and standard library. Different pairs give different orders: epoch 1 of seed 7 is
/// not epoch 0 of seed 8.
struct Shuffle {
    std::uint64_t seed = 0;
    std::uint64_t epoch = 0; ///< count it up, or every epoch has the same order
};

namespace detail {

/// The upper half of the product.
[[nodiscard]] constexpr std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) noexcept {
    constexpr std::uint64_t low = 0xffff'ffff; // the standard has no 128-bit integer
    std::uint64_t const cross = (a >> 32) * (b & low) + ((a & low) * (b & low) >> 32);
    std::uint64_t const other = (a & low) * (b >> 32) + (cross & low);
    return (a >> 32) * (b >> 32) + (cross >> 32) + (other >> 32);
}

/// SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA
/// 2014), with the constants of Vigna's public domain code. Not for secrets.
class SplitMix64 {
public:
    explicit constexpr SplitMix64(std::uint64_t state) noexcept : state_{state} {}

    /// The generator of an epoch. Each epoch starts at its own state, which the generator of the
    /// seed draws. Any epoch can be reached directly, because states are counted up.
    explicit constexpr SplitMix64(Shuffle shuffle) noexcept : state_{0} {
        SplitMix64 states{SplitMix64{shuffle.seed}() + shuffle.epoch * increment};
        state_ = states();
    }

    constexpr std::uint64_t operator()() noexcept {
        state_ += increment;
        std::uint64_t bits = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9U;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
        return bits ^ (bits >> 31);
    }

    /// A number below `bound`, uniformly distributed. @pre bound is not 0.
    /// Lemire, "Fast random integer generation in an interval" (ACM TOMACS 29, 2019): mostly one
    /// multiplication and no division; draws again with a probability below bound / 2^64.
    constexpr std::uint64_t below(std::uint64_t bound) noexcept {
        std::uint64_t drawn = (*this)();
        if (drawn * bound < bound) {
            std::uint64_t const uneven = -bound % bound; // 2^64 mod bound
            while (drawn * bound < uneven) {
                drawn = (*this)();
            }
        }
        return multiply_high(drawn, bound);
    }

private:
    static constexpr std::uint64_t increment = 0x9e3779b97f4a7c15; // 2^64 / golden ratio, odd

    std::uint64_t state_;
};

} // namespace detail

/// The numbers from 0 to `count` - 1 in the order of an epoch. Local; the same on every rank.
///
/// Fisher and Yates's shuffle, from the last place to the first. Not std::shuffle, because its
/// result differs between standard libraries. Complexity: linear, one draw for each place but one.
[[nodiscard]] constexpr std::vector<std::size_t> permutation(std::size_t count, Shuffle shuffle) {
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) {
        order[i] = i;
    }
    detail::SplitMix64 random{shuffle};
    for (std::size_t left = count; left > 1; --left) {
        std::swap(order[left - 1], order[static_cast<std::size_t>(random.below(left))]);
    }
    return order;
}

}} // namespace joinable::v0

// ---- joinable/data/shard.hpp

namespace joinable { inline namespace v0 {

/// One rank's share of a range. Any object with rank() and size() converts to it, and so does
/// `{rank, size}`. A rank with several workers gives each its own share:
/// `{rank * workers + worker, size * workers}`.
class Share {
public:
    /// @throws ContractViolation  the rank is out of range.
    constexpr Share(int rank, int size) : rank_{rank}, size_{size} {
        if (rank < 0 || rank >= size) {
            throw ContractViolation{detail::concat(
                "a shard is for a rank from 0 to the number of ranks - 1, but got rank ",
                rank,
                " of ",
                size
            )};
        }
    }
    template <class Comm>
        requires detail::has_rank<Comm> && detail::has_size<Comm>
    // NOLINTNEXTLINE(google-explicit-constructor)
    constexpr Share(Comm const& comm)
        : Share{static_cast<int>(comm.rank()), static_cast<int>(comm.size())} {}

    [[nodiscard]] constexpr int rank() const noexcept { return rank_; }
    [[nodiscard]] constexpr int size() const noexcept { return size_; }

private:
    int rank_;
    int size_;
};

namespace detail {

/// The positions `first`, `first + step`, ... without a list in memory.
struct Stride {
    std::size_t first = 0;
    std::size_t step = 1;
    std::size_t count = 0;

    /// Deals `count` elements one by one.
    static constexpr Stride of(std::size_t count, Share share) noexcept {
        auto const rank = static_cast<std::size_t>(share.rank());
        auto const size = static_cast<std::size_t>(share.size());
        return {rank, size, count / size + (rank < count % size ? 1 : 0)};
    }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return count; }
    [[nodiscard]] constexpr std::size_t operator[](std::size_t i) const noexcept {
        return first + i * step;
    }
};

/// The form of the positions that iterators keep.
constexpr Stride cursor_of(Stride const& positions) noexcept {
    return positions;
}
constexpr std::size_t const* cursor_of(std::vector<std::size_t> const& positions) noexcept {
    return positions.data();
}

template <class Range>
concept has_sized_random_access = requires(Range& range) {
    { std::begin(range) } -> std::random_access_iterator;
    { std::end(range) } -> std::sized_sentinel_for<decltype(std::begin(range))>;
};

template <class Range>
[[nodiscard]] constexpr std::size_t count_of(Range const& range) {
    static_assert(
        has_sized_random_access<Range const>,
        "shard: the range must be random access and sized, also when it is const; copy it into a "
        "std::vector first"
    );
    return static_cast<std::size_t>(std::end(range) - std::begin(range));
}

} // namespace detail

/// Some elements of a range, in their own order. A sized random-access range.
///
/// `Base` keeps the range: a reference or the range itself. `Positions` are positions in it: a list
/// or a rule. Iterators are valid as long as the shard. With a rule and a referenced range they are
/// valid as long as the range. Made by shard and shard_by_weight.
template <class Base, class Positions>
class Shard {
public:
    using base_iterator = decltype(std::begin(std::declval<Base const&>()));

    class iterator {
        using Cursor = decltype(detail::cursor_of(std::declval<Positions const&>()));

    public:
        using value_type = std::iter_value_t<base_iterator>;
        using difference_type = std::ptrdiff_t;
        using reference = std::iter_reference_t<base_iterator>;
        using pointer = std::add_pointer_t<reference>;
        using iterator_concept = std::random_access_iterator_tag;
        using iterator_category = std::conditional_t<
            std::is_lvalue_reference_v<reference>,
            std::random_access_iterator_tag,
            std::input_iterator_tag>; // the old tag promises references to elements

        iterator() = default;
        constexpr iterator(base_iterator const& base, Cursor cursor, std::size_t place)
            : base_{base}, cursor_{cursor}, place_{static_cast<std::ptrdiff_t>(place)} {}

        /// The position of this element in the underlying range.
        [[nodiscard]] constexpr std::size_t index() const {
            return cursor_[static_cast<std::size_t>(place_)];
        }
        [[nodiscard]] constexpr reference operator*() const {
            return base_[static_cast<std::iter_difference_t<base_iterator>>(index())];
        }
        [[nodiscard]] constexpr pointer operator->() const
            requires std::is_lvalue_reference_v<reference>
        {
            return std::addressof(**this);
        }
        [[nodiscard]] constexpr reference operator[](std::ptrdiff_t n) const {
            return *(*this + n);
        }
        constexpr iterator& operator++() { return *this += 1; }
        constexpr iterator& operator--() { return *this -= 1; }
        constexpr iterator operator++(int) { return std::exchange(*this, *this + 1); }
        constexpr iterator operator--(int) { return std::exchange(*this, *this - 1); }
        constexpr iterator& operator+=(std::ptrdiff_t n) {
            place_ += n;
            return *this;
        }
        constexpr iterator& operator-=(std::ptrdiff_t n) { return *this += -n; }
        friend constexpr iterator operator+(iterator it, std::ptrdiff_t n) { return it += n; }
        friend constexpr iterator operator+(std::ptrdiff_t n, iterator it) { return it += n; }
        friend constexpr iterator operator-(iterator it, std::ptrdiff_t n) { return it -= n; }
        friend constexpr std::ptrdiff_t operator-(iterator const& a, iterator const& b) {
            return a.place_ - b.place_;
        }
        friend constexpr bool operator==(iterator const& a, iterator const& b) {
            return a.place_ == b.place_;
        }
        friend constexpr auto operator<=>(iterator const& a, iterator const& b) {
            return a.place_ <=> b.place_;
        }

    private:
        base_iterator base_{};
        Cursor cursor_{};
        std::ptrdiff_t place_ = 0; ///< in the shard
    };

    Shard() = default;
    /// @pre every position lies in the range.
    constexpr Shard(Base base, Positions positions)
        : base_{std::move(base)}, positions_{std::move(positions)} {}

    [[nodiscard]] constexpr iterator begin() const { return at(0); }
    [[nodiscard]] constexpr iterator end() const { return at(size()); }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return positions_.size(); }
    [[nodiscard]] constexpr bool empty() const noexcept { return size() == 0; }
    /// @pre i < size()
    [[nodiscard]] constexpr decltype(auto) operator[](std::size_t i) const { return *at(i); }
    /// The position in the underlying range of element `i`. @pre i < size()
    [[nodiscard]] constexpr std::size_t index(std::size_t i) const { return positions_[i]; }

private:
    [[nodiscard]] constexpr iterator at(std::size_t place) const {
        return {std::begin(base_), detail::cursor_of(positions_), place};
    }

    Base base_{};
    Positions positions_{};
};

/// The elements that one rank works on when a range is dealt to all ranks one by one: elements
/// rank, rank + size, rank + 2 * size, ... Every element belongs to one rank. Nothing is padded and
/// nothing is dropped, so ranks may differ by one element, and some have none if there are fewer
/// elements than ranks. A Join guard allows this. Local; the range must be the same on all ranks.
///
/// Elements are dealt one by one, not in blocks. Round k of all ranks thus takes the elements from
/// k * size on, in the order in which a single rank would take them. If the data is sorted by label
/// or length, each rank still gets elements from everywhere.
///
///     for (auto& batch : joinable::shard(batches, comm)) { ... }
///
/// The range must be random access (also when const) and sized, and must keep its size while the
/// shard is used. A named container is referenced. A view is copied. A temporary container is moved
/// into the result; copying such a result copies the container, so it is not a view. Constant time
/// and no memory.
template <class Range>
[[nodiscard]] constexpr auto shard(Range&& range, Share share) {
    detail::Stride const positions = detail::Stride::of(detail::count_of(range), share);
    return Shard<detail::Kept<Range>, detail::Stride>{
        detail::keep(std::forward<Range>(range)), positions
    };
}

/// Explains swapped arguments.
template <class Comm, class Range>
    requires detail::has_rank<Comm> && detail::has_size<Comm> &&
             (!std::convertible_to<Range, Share>)
constexpr auto shard(Comm const&, Range&&, Shuffle = {}) {
    static_assert(
        std::convertible_to<Range, Share>,
        "shard: the range comes first and then the communicator, as in shard(batches, comm)"
    );
}

/// The same for the range in the order of an epoch, which is the same on all ranks. Every epoch
/// deals and orders anew. The result owns a list of its positions.
///
///     for (auto& batch : joinable::shard(batches, comm, {.seed = 7, .epoch = epoch})) { ... }
///
/// Complexity: linear in the range, on every rank. Memory for one position per element during
/// construction, and per own element afterwards.
template <class Range>
[[nodiscard]] constexpr auto shard(Range&& range, Share share, Shuffle shuffle) {
    auto const dealt = joinable::shard(permutation(detail::count_of(range), shuffle), share);
    return Shard<detail::Kept<Range>, std::vector<std::size_t>>{
        detail::keep(std::forward<Range>(range)),
        std::vector<std::size_t>(dealt.begin(), dealt.end())
    };
}

}} // namespace joinable::v0

/// A view, unless it owns its range or a list, which a copy would copy, too.
template <class Base>
inline constexpr bool std::ranges::enable_view<joinable::Shard<Base, joinable::detail::Stride>> =
    joinable::detail::is_view<Base>;
template <class Base>
inline constexpr bool
    std::ranges::enable_borrowed_range<joinable::Shard<Base, joinable::detail::Stride>> =
        joinable::detail::is_borrowed<Base>;

// ---- joinable/data/shard_by_weight.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class W>
concept is_weight = (std::integral<W> && !std::same_as<W, bool>) || std::floating_point<W>;

/// The type in which weights are summed: exact for integers.
template <class W>
using WeightSum = std::conditional_t<std::integral<W>, std::uint64_t, double>;

template <class W>
[[nodiscard]] constexpr bool is_valid_weight(W weight) noexcept {
    if constexpr (std::unsigned_integral<W>) {
        return true;
    } else { // NaN fails both comparisons
        return weight >= 0 &&
               static_cast<WeightSum<W>>(weight) <= (std::numeric_limits<WeightSum<W>>::max)();
    }
}

/// @throws ContractViolation  a weight is negative or not finite, or their sum is too large.
template <class Range, class Weight>
[[nodiscard]] auto weights_of(Range const& range, Weight& weight) {
    using W = std::remove_cvref_t<decltype(std::invoke(weight, *std::begin(range)))>;
    using Load = WeightSum<W>;
    std::vector<Load> weights;
    weights.reserve(count_of(range));
    Load left = (std::numeric_limits<Load>::max)();
    for (auto const& element : range) {
        W const given = std::invoke(weight, element);
        if (!is_valid_weight(given)) {
            throw ContractViolation{concat(
                "shard_by_weight: the weight of an element must be finite and not negative, but "
                "that of element ",
                weights.size(),
                " is ",
                std::conditional_t<std::integral<W>, W, double>(given)
            )};
        }
        auto const value = static_cast<Load>(given);
        if (value > left) {
            throw ContractViolation{concat(
                "shard_by_weight: the weights up to element ",
                weights.size(),
                " add up to more than ",
                (std::numeric_limits<Load>::max)(),
                "; give them in a larger unit"
            )};
        }
        left -= value;
        weights.push_back(value);
    }
    return weights;
}

/// The elements of the rank, in the order of `order`, a permutation of all elements. The heaviest
/// element goes first; each goes to the least loaded rank.
template <class Weight>
[[nodiscard]] std::vector<std::size_t> longest_processing_time_first(
    std::span<Weight const> weights, Share share, std::vector<std::size_t> order
) {
    struct Load {
        Weight weight = 0;
        std::size_t count = 0; ///< or one rank would get all elements without a weight
        int rank = 0;
    };
    auto const is_behind = [](Load const& a, Load const& b) {
        return std::tie(a.weight, a.count, a.rank) > std::tie(b.weight, b.count, b.rank);
    };
    std::vector<std::size_t> places(order.size()); // in `order`, heaviest first
    std::iota(places.begin(), places.end(), std::size_t{0});
    // Not std::stable_sort: clang 19 warns of what libstdc++ 12 calls in it.
    std::sort(places.begin(), places.end(), [&](std::size_t a, std::size_t b) {
        return std::tie(weights[order[b]], a) < std::tie(weights[order[a]], b);
    });
    std::vector<Load> loads(static_cast<std::size_t>(share.size()));
    for (std::size_t rank = 0; rank < loads.size(); ++rank) {
        loads[rank].rank = static_cast<int>(rank);
    } // ascending: already a heap
    std::vector<bool> is_own(weights.size());
    for (std::size_t const place : places) {
        std::pop_heap(loads.begin(), loads.end(), is_behind);
        Load& least = loads.back();
        least.weight += weights[order[place]];
        ++least.count;
        is_own[order[place]] = least.rank == share.rank();
        std::push_heap(loads.begin(), loads.end(), is_behind);
    }
    std::erase_if(order, [&](std::size_t element) { return !is_own[element]; });
    order.shrink_to_fit();
    return order;
}

template <class Range, class Weight>
[[nodiscard]] auto
deal_by_weight(Range&& range, Share share, Weight& weight, std::vector<std::size_t> order) {
    static_assert(
        is_weight<std::remove_cvref_t<decltype(std::invoke(weight, *std::begin(range)))>>,
        "shard_by_weight: the weight of an element must be an integer or a floating-point number"
    );
    auto const weights = weights_of(range, weight);
    auto positions = longest_processing_time_first(std::span{weights}, share, std::move(order));
    return Shard<Kept<Range>, std::vector<std::size_t>>{
        keep(std::forward<Range>(range)), std::move(positions)
    };
}

} // namespace detail

/// The elements that one rank works on when a range is dealt by weight, in the order of the range.
/// Ranks get about the same total weight although elements differ, as files differ in length. Every
/// element belongs to one rank. Local; the range and its weights must be the same on all ranks.
///
///     for (File const& file : joinable::shard_by_weight(files, comm, &File::bytes)) { ... }
///
/// `weight` is called once with each element, in order, and returns an integer or a floating-point
/// number that is not negative. Elements are dealt from the heaviest on. Each goes to the rank with
/// the smallest sum so far; ties go to the rank with the fewest elements, then to the lowest rank.
/// The largest sum of a rank is at most 4/3 - 1/(3 * size) times the optimum: Graham, "Bounds on
/// multiprocessing timing anomalies" (SIAM J. Appl. Math. 17, 1969), theorem 2.
///
/// The range: as for shard. The result owns a list of its positions.
/// @throws ContractViolation  a weight is negative or not finite, or the sum of all weights does
///         not fit into a std::uint64_t (of integers) or a double.
/// Complexity: n log n + n log size comparisons for n elements, on every rank. Memory for a weight
/// and two positions per element during construction.
template <class Range, class Weight>
[[nodiscard]] auto shard_by_weight(Range&& range, Share share, Weight weight) {
    std::vector<std::size_t> order(detail::count_of(range));
    std::iota(order.begin(), order.end(), std::size_t{0});
    return detail::deal_by_weight(std::forward<Range>(range), share, weight, std::move(order));
}

/// The same in the order of an epoch. Elements of equal weight are dealt at random; the ranks' sums
/// of weights are the same in every epoch.
template <class Range, class Weight>
[[nodiscard]] auto shard_by_weight(Range&& range, Share share, Weight weight, Shuffle shuffle) {
    auto order = permutation(detail::count_of(range), shuffle);
    return detail::deal_by_weight(std::forward<Range>(range), share, weight, std::move(order));
}

}} // namespace joinable::v0

// ---- joinable/tensor/flat_parameters.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// One parameter of `flat_parameters`. Its gradient cannot be moved, because the engine's kernels
/// write to its address.
struct FlatParameter {
    AnyView value;
    AnyView grad;
};

/// The elements of contiguous memory that outlives the object `range`.
template <class Range>
[[nodiscard]] auto flat_elements(Range&& range) {
    constexpr bool is_contiguous = requires { std::span{range}; };
    static_assert(
        is_contiguous,
        "flat_parameters: values and gradients are contiguous ranges, such as std::vector or std::span; "
        "for a pointer and a count give std::span{pointer, count}"
    );
    static_assert(
        std::is_lvalue_reference_v<Range> ||
            std::ranges::enable_borrowed_range<std::remove_cv_t<Range>>,
        "flat_parameters: temporary memory would be destroyed before it is used; give it a name"
    );
    if constexpr (is_contiguous) {
        using T = typename decltype(std::span{range})::element_type;
        static_assert(
            Element<T>,
            "flat_parameters: values and gradients are written, and of a type that has a DType: float, "
            "double, Half or BFloat16, not const"
        );
        return std::span<T>{range};
    }
}

} // namespace detail

/// The parameters of an engine that keeps all values in one block of memory and all gradients in
/// another. Parameter i has `sizes[i]` elements in both, directly after those of parameter i - 1.
/// Elements after the last parameter are not trained. Local.
///
/// `values` and `gradients` are contiguous ranges of one element type. Their memory must stay in
/// place while the list or a copy of it is used, because the parameters are views and own nothing.
/// `sizes` is only read during the call.
///
/// Such gradients cannot be views of buckets (`gradient_as_bucket_view`), because kernels write
/// them to fixed addresses. Each gradient is copied into its bucket when it is ready, and the
/// average is copied back. The backward pass still overlaps with the reductions;
/// tests/benchmarks/README.md has the cost of the copies. If an engine finds each gradient through
/// its own pointer, which others may set, specialise `parameter_traits` with `set_grad` instead.
/// @throws ContractViolation  a size is negative, or the sizes sum to more than the number of
///                            values or gradients.
template <class Values, class Gradients, class Sizes>
[[nodiscard]] ParameterList
flat_parameters(Values&& values, Gradients&& gradients, Sizes const& sizes, DeviceId device = {}) {
    static_assert(
        detail::range_of_integers<Sizes>,
        "flat_parameters: the sizes are a range of integers, one for each parameter"
    );
    auto const value = detail::flat_elements(std::forward<Values>(values));
    auto const gradient = detail::flat_elements(std::forward<Gradients>(gradients));
    using T = typename decltype(value)::element_type;
    static_assert(
        std::is_same_v<T, typename decltype(gradient)::element_type>,
        "flat_parameters: values and gradients are of one element type"
    );
    auto const list = std::make_shared<std::vector<detail::FlatParameter>>();
    std::size_t begin = 0;
    for (auto const given : sizes) {
        auto const size = static_cast<std::size_t>(given);
        // A negative size converts to a huge number, which this refuses too.
        if (size > value.size() - begin || size > gradient.size() - begin) {
            throw ContractViolation{detail::concat(
                "flat_parameters: parameter ",
                list->size(),
                " has ",
                given,
                " elements from ",
                begin,
                " on, but there are ",
                value.size(),
                " values and ",
                gradient.size(),
                " gradients; give sizes in elements, in the order in which parameters lie"
            )};
        }
        auto const view = [&](T* memory) {
            return AnyView{memory + begin, dtype_of<T>, {size}, {1}, device};
        };
        list->push_back({view(value.data()), view(gradient.data())});
        begin += size;
    }
    ParameterList parameters;
    for (detail::FlatParameter& parameter : *list) {
        parameters.push_back(AnyParameter{parameter, list});
    }
    return parameters;
}

}} // namespace joinable::v0

// ---- joinable/tensor/variant.hpp

namespace joinable { inline namespace v0 {

/// A tensor of one of several types, such as an engine's `std::variant<FloatTensor, HalfTensor>`.
/// It is writable if every alternative is. All members throw std::bad_variant_access if the variant
/// is valueless by exception.
template <class... Ts>
    requires(Tensor<Ts> && ...)
struct tensor_traits<std::variant<Ts...>> {
    static DType dtype(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::dtype(tensor); }, t);
    }
    template <class Variant>
    static auto data(Variant& t) {
        using Data = std::conditional_t<
            std::is_const_v<Variant>,
            std::conditional_t<(WritableTensor<Ts const> && ...), void*, void const*>,
            std::conditional_t<(WritableTensor<Ts> && ...), void*, void const*>>;
        return std::visit(
            [](auto& tensor) -> Data { return detail::traits_of<decltype(tensor)>::data(tensor); },
            t
        );
    }
    static Shape extents(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::extents(tensor); }, t);
    }
    static Shape strides(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::strides(tensor); }, t);
    }
    static DeviceId device(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::device(tensor); }, t);
    }
};

}} // namespace joinable::v0

// ---- joinable/join.hpp

/// @file
/// Everything: the core, its communicators, the planning of buckets, the dealing of data to ranks,
/// and adapters for models with one memory or with several tensor types.

// The core comes first. It orders its own headers so that errors need few lines to say where they
// were included from.
// clang-format off
// clang-format on
