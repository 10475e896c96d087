// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/device/cuda/kernels.hpp has kernels: include it where nvcc compiles"
#endif

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <joinable/device/cuda/copy.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

inline constexpr unsigned int copy_threads = 256;
/// The number of elements that a block of threads copies.
inline constexpr std::size_t copy_chunk = 8 * copy_threads;

/// The argument of one launch, passed by value.
template <std::size_t Room>
struct CopyBatch {
    CudaCopy copies[Room];
    std::uint32_t first_block[Room + 1]; ///< of each copy, and the number of all blocks
    std::uint32_t count;
};

/// The number of copies that fit into a kernel's arguments: 4 KiB, and 32764 bytes from CUDA 12.1
/// on.
template <std::size_t Bytes>
inline constexpr std::size_t copies_in =
    (Bytes - 2 * sizeof(std::uint32_t)) / (sizeof(CudaCopy) + sizeof(std::uint32_t));
inline constexpr std::size_t few_copies = copies_in<4096>;
inline constexpr std::size_t many_copies = copies_in<(CUDART_VERSION >= 12010 ? 32764 : 4096)>;
static_assert(sizeof(CopyBatch<few_copies>) <= 4096);

template <class T>
struct CopyBits {
    __host__ __device__ T operator()(T element) const { return element; }
};
/// As on the host: 16-bit numbers are computed in float and rounded once.
template <class T>
struct ScaleElement {
    T factor;
    __host__ __device__ T operator()(T element) const { return element * factor; }
};
template <>
struct ScaleElement<__half> {
    float factor;
    __host__ __device__ __half operator()(__half element) const {
        return __float2half_rn(__half2float(element) * factor);
    }
};
template <>
struct ScaleElement<__nv_bfloat16> {
    float factor;
    __host__ __device__ __nv_bfloat16 operator()(__nv_bfloat16 element) const {
        return __float2bfloat16_rn(__bfloat162float(element) * factor);
    }
};

/// One thread's part of the elements [begin, end) of a copy: every `threads`-th element.
template <class T, class Operation>
__host__ __device__ void copy_elements(
    CudaCopy const& copy,
    Operation const& operation,
    std::size_t begin,
    std::size_t end,
    unsigned int thread,
    unsigned int threads
) {
    for (std::size_t element = begin + thread; element < end; element += threads) {
        std::size_t rest = element;
        std::size_t from = 0;
        std::size_t to = 0;
        for (unsigned int l = 0; l + 1 < copy.levels; ++l) {
            std::size_t const index = rest % copy.level[l].extent;
            rest /= copy.level[l].extent;
            from += index * copy.level[l].from;
            to += index * copy.level[l].to;
        }
        from += rest * copy.level[copy.levels - 1].from; // the outermost loop
        to += rest * copy.level[copy.levels - 1].to;
        static_cast<T*>(copy.to)[to] =
            copy.from == nullptr ? T{} : operation(static_cast<T const*>(copy.from)[from]);
    }
}

/// The same for any dtype. All threads of a block take the same branch.
__host__ __device__ inline void copy_part(
    CudaCopy const& copy,
    std::size_t begin,
    std::size_t end,
    unsigned int thread,
    unsigned int threads
) {
    auto const run = [&]<class T>(auto const& operation, T const*) {
        copy_elements<T>(copy, operation, begin, end, thread, threads);
    };
    bool const scales = copy.factor != 1.0 && copy.from != nullptr;
    switch (copy.dtype) {
    case DType::f16:
        if (scales) {
            run(ScaleElement<__half>{static_cast<float>(copy.factor)},
                static_cast<__half const*>(nullptr));
            return;
        }
        break;
    case DType::bf16:
        if (scales) {
            run(ScaleElement<__nv_bfloat16>{static_cast<float>(copy.factor)},
                static_cast<__nv_bfloat16 const*>(nullptr));
            return;
        }
        break;
    case DType::f32:
        if (scales) {
            run(ScaleElement<float>{static_cast<float>(copy.factor)},
                static_cast<float const*>(nullptr));
            return;
        }
        break;
    case DType::f64:
        if (scales) {
            run(ScaleElement<double>{copy.factor}, static_cast<double const*>(nullptr));
            return;
        }
        break;
    default: break;
    }
    switch (copy.dtype) {
    case DType::i8:
    case DType::u8:
        run(CopyBits<std::uint8_t>{}, static_cast<std::uint8_t const*>(nullptr));
        return;
    case DType::f16:
    case DType::bf16:
        run(CopyBits<std::uint16_t>{}, static_cast<std::uint16_t const*>(nullptr));
        return;
    case DType::f32:
    case DType::i32:
    case DType::u32:
        run(CopyBits<std::uint32_t>{}, static_cast<std::uint32_t const*>(nullptr));
        return;
    default: run(CopyBits<std::uint64_t>{}, static_cast<std::uint64_t const*>(nullptr)); return;
    }
}

/// The work of thread `thread` of block `block`.
template <std::size_t Room>
__host__ __device__ void
copy_in_block(CopyBatch<Room> const& batch, std::uint32_t block, unsigned int thread) {
    std::uint32_t low = 0; // the last copy that begins at or before this block
    std::uint32_t high = batch.count;
    while (high - low > 1) {
        std::uint32_t const middle = low + (high - low) / 2;
        (batch.first_block[middle] <= block ? low : high) = middle;
    }
    CudaCopy const& copy = batch.copies[low];
    std::size_t const begin = (block - batch.first_block[low]) * copy_chunk;
    std::size_t const end = copy.count - begin < copy_chunk ? copy.count : begin + copy_chunk;
    copy_part(copy, begin, end, thread, copy_threads);
}

template <std::size_t Room>
__global__ void run_copies(__grid_constant__ CopyBatch<Room> const batch) {
    copy_in_block(batch, blockIdx.x, threadIdx.x);
}

/// Fills a batch. Returns how many copies were taken; copies without elements need no block.
template <std::size_t Room>
std::size_t fill_batch(CopyBatch<Room>& batch, CudaCopy const* copies, std::size_t count) {
    std::size_t taken = 0;
    batch.count = 0;
    batch.first_block[0] = 0;
    for (; taken < count && batch.count < Room; ++taken) {
        if (std::size_t const blocks = (copies[taken].count + copy_chunk - 1) / copy_chunk;
            blocks != 0) {
            batch.copies[batch.count] = copies[taken];
            ++batch.count;
            batch.first_block[batch.count] =
                batch.first_block[batch.count - 1] + static_cast<std::uint32_t>(blocks);
        }
    }
    return taken;
}

template <std::size_t Room>
cudaError_t launch_copies(CudaCopy const* copies, std::size_t count, cudaStream_t stream) {
    for (std::size_t next = 0; next < count;) {
        CopyBatch<Room> batch;
        next += fill_batch(batch, copies + next, count - next);
        if (std::uint32_t const blocks = batch.first_block[batch.count]; blocks != 0) {
            void* arguments[] = {&batch};
            auto const error = cudaLaunchKernel(
                reinterpret_cast<void const*>(&run_copies<Room>),
                dim3(blocks),
                dim3(copy_threads),
                arguments,
                0,
                stream
            );
            if (error != cudaSuccess) {
                return error;
            }
        }
    }
    return cudaSuccess;
}

/// A launch copies its whole argument, however full it is. A few copies therefore use a smaller
/// one.
inline cudaError_t
launch_all_copies(CudaCopy const* copies, std::size_t count, cudaStream_t stream) {
    return count <= few_copies ? launch_copies<few_copies>(copies, count, stream)
                               : launch_copies<many_copies>(copies, count, stream);
}

} // namespace detail

/// Kernels for CudaDevice::use_kernels. A submission of up to 138 copies is one launch; larger ones
/// need one launch for each 138 (17 before CUDA 12.1). Compiled by nvcc 13 and run thread by thread
/// on the host; not run on a GPU yet. Include this in one source file that nvcc compiles. Other
/// files need only a declaration of a function that returns this result.
[[nodiscard]] inline CudaKernels cuda_kernels() noexcept {
    return {&detail::launch_all_copies};
}

}} // namespace joinable::v0
