// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/device/cuda/copy_kernels.hpp has kernels: include it where nvcc compiles"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <joinable/config.hpp>
#include <joinable/device/cuda/copy.hpp>
#include <joinable/device/cuda/launch_batch.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// Two kernels for copies. Where elements lie side by side in both places, threads move words of 16
/// bytes. All other copies go element by element.

namespace joinable { inline namespace v0 { namespace detail {

/// An element in memory as the number that is computed with, and back: 16-bit numbers are computed
/// in float and rounded once, as on the host.
template <class Stored>
struct StoredElement {
    using Number = Stored;
    __host__ __device__ static Number read(Stored element) { return element; }
    __host__ __device__ static Stored written(Number number) { return number; }
};
template <>
struct StoredElement<__half> {
    using Number = float;
    __host__ __device__ static Number read(__half element) { return __half2float(element); }
    __host__ __device__ static __half written(Number number) { return __float2half_rn(number); }
};
template <>
struct StoredElement<__nv_bfloat16> {
    using Number = float;
    __host__ __device__ static Number read(__nv_bfloat16 element) {
        return __bfloat162float(element);
    }
    __host__ __device__ static __nv_bfloat16 written(Number number) {
        return __float2bfloat16_rn(number);
    }
};

// The element that a copy writes.

template <class T>
struct FillZero {
    using Element = T;
    static constexpr bool reads = false;
    __host__ __device__ T operator()(T) const { return T{}; }
};
template <class T>
struct CopyBits {
    using Element = T;
    static constexpr bool reads = true;
    __host__ __device__ T operator()(T element) const { return element; }
};
template <class T>
struct ScaleElement {
    using Element = T;
    static constexpr bool reads = true;
    typename StoredElement<T>::Number factor;
    __host__ __device__ T operator()(T element) const {
        return StoredElement<T>::written(StoredElement<T>::read(element) * factor);
    }
};

/// Calls `run(element)` with a null pointer to the type in memory of a floating-point dtype. All
/// threads of a block take the same branch.
#pragma nv_exec_check_disable // `run` may be of the host
template <class Run>
__host__ __device__ decltype(auto) visit_stored(DType dtype, Run const& run) {
    switch (dtype) {
    case DType::f16: return run(static_cast<__half const*>(nullptr));
    case DType::bf16: return run(static_cast<__nv_bfloat16 const*>(nullptr));
    case DType::f64: return run(static_cast<double const*>(nullptr));
    default: return run(static_cast<float const*>(nullptr));
    }
}
/// Calls `run(ScaleElement)` for a floating-point dtype.
template <class Run>
__host__ __device__ void visit_scaled(DType dtype, double factor, Run const& run) {
    visit_stored(dtype, [&]<class T>(T const*) {
        run(ScaleElement<T>{static_cast<typename StoredElement<T>::Number>(factor)});
    });
}

/// A copy of elements that lie side by side in both places, in less memory than a CudaCopy.
struct ContiguousCopy {
    void const* from; ///< null: zeros
    void* to;
    union {
        double factor;
        double const* factor_at; ///< where `reads_factor`
    };
    std::size_t count; ///< of bytes
    DType dtype;
    bool reads_factor;
};
/// The number of bytes of a block.
inline constexpr std::size_t block_bytes = std::size_t{1} << 14U;
__host__ __device__ inline std::size_t block_share(ContiguousCopy const&) {
    return block_bytes;
}

[[nodiscard]] inline bool is_contiguous_copy(CudaCopy const& copy) noexcept {
    return copy.levels == 1 && copy.has_rows();
}
struct TakeContiguous {
    bool operator()(CudaCopy const& copy, ContiguousCopy& item) const noexcept {
        if (!is_contiguous_copy(copy)) {
            return false;
        }
        item.from = copy.from;
        item.to = copy.to;
        item.factor = copy.factor;
        item.count = copy.count * size_of(copy.dtype);
        item.dtype = copy.dtype;
        item.reads_factor = copy.factor_at != nullptr;
        if (item.reads_factor) {
            item.factor_at = copy.factor_at;
        }
        return true;
    }
};
struct TakeStrided {
    bool operator()(CudaCopy const& copy, CudaCopy& item) const noexcept {
        bool const takes = !is_contiguous_copy(copy);
        if (takes) {
            item = copy;
        }
        return takes;
    }
};

inline constexpr unsigned int word_bytes = 16;

/// The word at `place`, which is aligned.
__host__ __device__ inline uint4 load_word(std::byte const* place) {
    uint4 word;
    std::memcpy(&word, __builtin_assume_aligned(place, word_bytes), word_bytes);
    return word;
}
__host__ __device__ inline void store_word(std::byte* place, uint4 const& word) {
    std::memcpy(__builtin_assume_aligned(place, word_bytes), &word, word_bytes);
}
/// The word that begins `shift` bytes after the aligned word `low`, whose neighbour is `high`.
/// @pre shift < word_bytes
__host__ __device__ inline uint4 shifted_word(uint4 low, uint4 high, unsigned int shift) {
    if ((shift & 8U) != 0) {
        low = {low.z, low.w, high.x, high.y};
        high = {high.z, high.w, 0, 0};
    }
    if ((shift & 4U) != 0) {
        low = {low.y, low.z, low.w, high.x};
        high.x = high.y;
    }
    unsigned int const bits = 8 * (shift & 3U);
    auto const join = [bits](unsigned int lower, unsigned int upper) {
        std::uint64_t const both = std::uint64_t{upper} << 32U | lower;
        return static_cast<unsigned int>(both >> bits);
    };
    return {join(low.x, low.y), join(low.y, low.z), join(low.z, low.w), join(low.w, high.x)};
}

template <class Operation>
__host__ __device__ uint4 operate(Operation const& operation, uint4 const& word) {
    using T = typename Operation::Element;
    T elements[word_bytes / sizeof(T)];
    std::memcpy(elements, &word, word_bytes);
    for (T& element : elements) {
        element = operation(element);
    }
    uint4 result;
    std::memcpy(&result, elements, word_bytes);
    return result;
}

/// One thread's part of `words` words. The target is aligned, the source lies `shift` bytes after
/// an aligned word. Reads the words that hold its bytes, so one more than it writes if it is
/// shifted. Several words are loaded before one is stored.
template <bool is_shifted, class Operation>
__host__ __device__ void move_words(
    Operation const& operation,
    std::byte const* from,
    std::byte* to,
    unsigned int words,
    unsigned int shift,
    unsigned int thread
) {
    constexpr unsigned int unroll = is_shifted ? 2 : 4;
    std::byte const* const source = from - shift;
    for (unsigned int first = thread; first < words; first += unroll * block_threads) {
        uint4 low[unroll] = {};
        uint4 high[unroll] = {};
#pragma unroll
        for (unsigned int k = 0; k < unroll; ++k) {
            unsigned int const at = (first + k * block_threads) * word_bytes;
            if (Operation::reads && first + k * block_threads < words) {
                low[k] = load_word(source + at);
                if constexpr (is_shifted) {
                    high[k] = load_word(source + at + word_bytes);
                }
            }
        }
#pragma unroll
        for (unsigned int k = 0; k < unroll; ++k) {
            if (first + k * block_threads < words) {
                uint4 const word = is_shifted ? shifted_word(low[k], high[k], shift) : low[k];
                store_word(to + (first + k * block_threads) * word_bytes, operate(operation, word));
            }
        }
    }
}

/// Which bytes of a block are moved in words. The others, before and after them, are single elements.
struct WordRange {
    unsigned int before; ///< bytes before the first word of the target
    unsigned int words;
    unsigned int shift; ///< bytes from an aligned word to the first word of the source
};
/// Leaves out the words for which a thread would read beside the source.
__host__ __device__ inline WordRange
words_of_block(std::uintptr_t from, std::uintptr_t to, unsigned int bytes) {
    auto const before = static_cast<unsigned int>((word_bytes - to % word_bytes) % word_bytes);
    auto const shift = static_cast<unsigned int>((from + before) % word_bytes);
    unsigned int const margin = shift == 0 ? 0 : word_bytes;
    unsigned int const outside = before + 2 * margin;
    return {before + margin, bytes < outside ? 0 : (bytes - outside) / word_bytes, shift};
}

/// One thread's part of the `bytes` bytes of a block.
template <class Operation>
__host__ __device__ void move_block(
    Operation const& operation,
    std::byte const* from,
    std::byte* to,
    unsigned int bytes,
    unsigned int thread
) {
    using T = typename Operation::Element;
    auto const [before, words, shift] = words_of_block(
        reinterpret_cast<std::uintptr_t>(from), reinterpret_cast<std::uintptr_t>(to), bytes
    );
    if (shift == 0) {
        move_words<false>(operation, from + before, to + before, words, 0, thread);
    } else if constexpr (Operation::reads) {
        move_words<true>(operation, from + before, to + before, words, shift, thread);
    }
    unsigned int const rest = (bytes - words * word_bytes) / sizeof(T);
    for (unsigned int i = thread; i < rest; i += block_threads) {
        unsigned int const at =
            i * sizeof(T) < before ? i * sizeof(T) : i * sizeof(T) + words * word_bytes;
        T element{};
        if (Operation::reads) {
            std::memcpy(&element, __builtin_assume_aligned(from + at, sizeof(T)), sizeof(T));
        }
        element = operation(element);
        std::memcpy(__builtin_assume_aligned(to + at, sizeof(T)), &element, sizeof(T));
    }
}

template <std::size_t Room>
using ContiguousBatch = LaunchBatch<ContiguousCopy, Room>;
/// The bytes of a kernel's arguments: up to 32764 from CUDA 12.1 on.
inline constexpr std::size_t most_bytes = CUDART_VERSION >= 12010 ? 32764 : 4096;
/// The numbers of copies in a launch with arguments of 4 KiB, and with the largest ones.
inline constexpr std::size_t few_copies = items_in<ContiguousCopy, 4096>;
inline constexpr std::size_t many_copies = items_in<ContiguousCopy, most_bytes>;
static_assert(sizeof(ContiguousBatch<few_copies>) <= 4096);
static_assert(sizeof(ContiguousBatch<many_copies>) <= most_bytes);

/// The work of thread `thread` of a block.
__host__ __device__ inline void
copy_range(BlockRange<ContiguousCopy> const& range, unsigned int thread) {
    auto const [copy, begin, end] = range;
    double const factor = copy.reads_factor ? *copy.factor_at : copy.factor;
    bool const is_zero = copy.from == nullptr || (copy.reads_factor && factor == 0.0);
    auto* const to = static_cast<std::byte*>(copy.to) + begin;
    auto const* const from = is_zero ? to : static_cast<std::byte const*>(copy.from) + begin;
    auto const bytes = static_cast<unsigned int>(end - begin);
    auto const run = [&](auto const& operation) { move_block(operation, from, to, bytes, thread); };
    if (is_zero) {
        run(FillZero<std::uint8_t>{});
    } else if (factor == 1.0) {
        run(CopyBits<std::uint8_t>{});
    } else {
        visit_scaled(copy.dtype, factor, run);
    }
}
template <std::size_t Room>
__global__ JOINABLE_FEW_REGISTERS void
run_copies(__grid_constant__ ContiguousBatch<Room> const batch) {
    copy_range(range_of_this_block(batch), threadIdx.x);
}

/// One thread's part of the elements [begin, end) of a copy: every `block_threads`-th element.
/// Several elements are loaded before one is stored. `Index` is the type of divisions, which 32 bits
/// do faster.
template <class Index, class Operation>
__host__ __device__ void move_elements(
    CudaCopy const& copy,
    Operation const& operation,
    bool is_zero,
    std::size_t begin,
    std::size_t end,
    unsigned int thread
) {
    using T = typename Operation::Element;
    constexpr unsigned int unroll = sizeof(Index) == 4 ? 4 : 1; // without spilling registers
    unsigned int const last = copy.levels - 1U;                 // the outermost loop
    for (std::size_t first = begin + thread; first < end; first += unroll * block_threads) {
        Index rest[unroll];
        std::size_t from[unroll] = {};
        std::size_t to[unroll] = {};
#pragma unroll
        for (unsigned int k = 0; k < unroll; ++k) { // where there is none, the last one
            std::size_t const element = first + k * block_threads;
            rest[k] = static_cast<Index>(element < end ? element : end - 1);
        }
#pragma unroll 1
        for (unsigned int l = 0; l <= last; ++l) {
            CudaCopy::Level const& level = copy.level[l];
            auto const extent = static_cast<Index>(level.extent);
#pragma unroll
            for (unsigned int k = 0; k < unroll; ++k) {
                Index const index = l == last ? rest[k] : rest[k] % extent;
                rest[k] /= extent;
                from[k] += index * level.from;
                to[k] += index * level.to;
            }
        }
        T elements[unroll] = {};
#pragma unroll
        for (unsigned int k = 0; k < unroll; ++k) {
            if (!is_zero) {
                elements[k] = static_cast<T const*>(copy.from)[from[k]];
            }
        }
#pragma unroll
        for (unsigned int k = 0; k < unroll; ++k) {
            if (first + k * block_threads < end) {
                static_cast<T*>(copy.to)[to[k]] = operation(elements[k]);
            }
        }
    }
}

/// The number of copies in a launch; its argument has at most 4 KiB.
inline constexpr std::size_t strided_in_launch = items_in<CudaCopy, 4096>;
using StridedBatch = LaunchBatch<CudaCopy, strided_in_launch>;
static_assert(sizeof(StridedBatch) <= 4096);

/// The work of thread `thread` of a block.
__host__ __device__ inline void copy_range(BlockRange<CudaCopy> const& range, unsigned int thread) {
    auto const [copy, begin, end] = range;
    double const factor = copy.factor_at != nullptr ? *copy.factor_at : copy.factor;
    bool const is_zero = copy.from == nullptr || (copy.factor_at != nullptr && factor == 0.0);
    auto const run = [&](auto const& operation) {
        if (copy.count >> 32U == 0) {
            move_elements<std::uint32_t>(copy, operation, is_zero, begin, end, thread);
        } else {
            move_elements<std::uint64_t>(copy, operation, is_zero, begin, end, thread);
        }
    };
    if (!is_zero && factor != 1.0) {
        visit_scaled(copy.dtype, factor, run);
        return;
    }
    switch (copy.element_bytes) {
    case 1: run(CopyBits<std::uint8_t>{}); return;
    case 2: run(CopyBits<std::uint16_t>{}); return;
    case 4: run(CopyBits<std::uint32_t>{}); return;
    default: run(CopyBits<std::uint64_t>{}); return;
    }
}
template <class Batch>
__global__
__launch_bounds__(block_threads, 4) void run_strided_copies(__grid_constant__ Batch const batch) {
    copy_range(range_of_block(batch, blockIdx.x), threadIdx.x);
}

/// Calls `run(batch)` for each launch that all copies, which are independent, need. Stops at the
/// first error.
template <class Run>
cudaError_t for_each_launch(CudaCopy const* copies, std::size_t count, Run const& run) {
    bool has_strided = false;
    auto const take = [&](CudaCopy const& copy, ContiguousCopy& item) {
        bool const takes = TakeContiguous{}(copy, item);
        has_strided |= !takes;
        return takes;
    };
    // A few copies use a smaller argument.
    auto const error = count <= few_copies
                           ? for_each_batch<ContiguousBatch<few_copies>>(copies, count, run, take)
                           : for_each_batch<ContiguousBatch<many_copies>>(copies, count, run, take);
    return error != cudaSuccess || !has_strided
               ? error
               : for_each_batch<StridedBatch>(copies, count, run, TakeStrided{});
}
template <std::size_t Room>
auto kernel_of(ContiguousBatch<Room> const&) {
    return &run_copies<Room>;
}
inline auto kernel_of(StridedBatch const&) {
    return &run_strided_copies<StridedBatch>;
}
inline cudaError_t
launch_all_copies(CudaCopy const* copies, std::size_t count, cudaStream_t stream) {
    return for_each_launch(copies, count, [stream](auto const& batch) {
        return launch_batch(kernel_of(batch), batch, batch.first_block[batch.count], stream);
    });
}
inline cudaError_t load_copies() {
    auto error = load_kernel(&run_copies<few_copies>);
    error = error == cudaSuccess ? load_kernel(&run_copies<many_copies>) : error;
    return error == cudaSuccess ? load_kernel(&run_strided_copies<StridedBatch>) : error;
}

}}} // namespace joinable::v0::detail
