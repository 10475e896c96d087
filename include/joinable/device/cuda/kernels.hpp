// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/device/cuda/kernels.hpp has kernels: include it where nvcc compiles"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <joinable/device/cuda/copy.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/device/update.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/optimizer/shard_state.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

inline constexpr unsigned int block_threads = 256;
/// The number of elements of a block of threads.
inline constexpr std::size_t block_elements = 8 * block_threads;

/// The argument of one launch, passed by value: copies, updates or sums, each with a `count` of
/// elements.
template <class Item, std::size_t Room>
struct LaunchBatch {
    Item items[Room];
    std::uint32_t first_block[Room + 1]; ///< of each item, and the number of all blocks
    std::uint32_t count;
};
template <std::size_t Room>
using CopyBatch = LaunchBatch<CudaCopy, Room>;

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
    unsigned int threads,
    bool is_zero
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
            is_zero ? T{} : operation(static_cast<T const*>(copy.from)[from]);
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
    double const factor = copy.factor_at == nullptr ? copy.factor : *copy.factor_at;
    bool const is_zero = copy.from == nullptr || (copy.factor_at != nullptr && factor == 0.0);
    auto const run = [&]<class T>(auto const& operation, T const*) {
        copy_elements<T>(copy, operation, begin, end, thread, threads, is_zero);
    };
    bool const scales = factor != 1.0 && !is_zero;
    switch (copy.dtype) {
    case DType::f16:
        if (scales) {
            run(ScaleElement<__half>{static_cast<float>(factor)},
                static_cast<__half const*>(nullptr));
            return;
        }
        break;
    case DType::bf16:
        if (scales) {
            run(ScaleElement<__nv_bfloat16>{static_cast<float>(factor)},
                static_cast<__nv_bfloat16 const*>(nullptr));
            return;
        }
        break;
    case DType::f32:
        if (scales) {
            run(ScaleElement<float>{static_cast<float>(factor)},
                static_cast<float const*>(nullptr));
            return;
        }
        break;
    case DType::f64:
        if (scales) {
            run(ScaleElement<double>{factor}, static_cast<double const*>(nullptr));
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

/// The elements of a block, which are of one item.
template <class Item>
struct BlockRange {
    Item const& item;
    std::size_t begin;
    std::size_t end;
};
template <class Item, std::size_t Room>
__host__ __device__ BlockRange<Item>
range_of_block(LaunchBatch<Item, Room> const& batch, std::uint32_t block) {
    std::uint32_t low = 0; // the last item that begins at or before this block
    std::uint32_t high = batch.count;
    while (high - low > 1) {
        std::uint32_t const middle = low + (high - low) / 2;
        (batch.first_block[middle] <= block ? low : high) = middle;
    }
    Item const& item = batch.items[low];
    std::size_t const begin = (block - batch.first_block[low]) * block_elements;
    std::size_t const end =
        item.count - begin < block_elements ? item.count : begin + block_elements;
    return {item, begin, end};
}

/// The work of thread `thread` of block `block`.
template <std::size_t Room>
__host__ __device__ void
copy_in_block(CopyBatch<Room> const& batch, std::uint32_t block, unsigned int thread) {
    auto const range = range_of_block(batch, block);
    copy_part(range.item, range.begin, range.end, thread, block_threads);
}

template <std::size_t Room>
__global__ void run_copies(__grid_constant__ CopyBatch<Room> const batch) {
    copy_in_block(batch, blockIdx.x, threadIdx.x);
}

/// Fills a batch. Returns how many items were taken; items without elements need no block.
template <class Item, std::size_t Room>
std::size_t fill_batch(LaunchBatch<Item, Room>& batch, Item const* items, std::size_t count) {
    std::size_t taken = 0;
    batch.count = 0;
    batch.first_block[0] = 0;
    for (; taken < count && batch.count < Room; ++taken) {
        if (std::size_t const blocks = (items[taken].count + block_elements - 1) / block_elements;
            blocks != 0) {
            batch.items[batch.count] = items[taken];
            ++batch.count;
            batch.first_block[batch.count] =
                batch.first_block[batch.count - 1] + static_cast<std::uint32_t>(blocks);
        }
    }
    return taken;
}

/// Calls `run(batch)` for each batch of all items that needs a block. Stops at the first error.
template <class Batch, class Item, class Run>
cudaError_t for_each_batch(Item const* items, std::size_t count, Run const& run) {
    cudaError_t error = cudaSuccess;
    for (std::size_t next = 0; next < count && error == cudaSuccess;) {
        Batch batch;
        next += fill_batch(batch, items + next, count - next);
        if (batch.count != 0) {
            error = run(batch);
        }
    }
    return error;
}

/// Launches `kernel(batch, others...)` with `blocks` blocks.
template <class Batch, class... Others>
cudaError_t launch_batch(
    void (*kernel)(Batch, Others...),
    std::remove_const_t<Batch> const& batch,
    std::uint32_t blocks,
    cudaStream_t stream,
    Others... others
) {
    // The runtime copies the arguments.
    void* arguments[] = {const_cast<std::remove_const_t<Batch>*>(&batch), &others...};
    return cudaLaunchKernel(
        reinterpret_cast<void const*>(kernel),
        dim3(blocks),
        dim3(block_threads),
        arguments,
        0,
        stream
    );
}

/// Launches `kernel` with all items as its first argument, batch by batch, and with `others`.
template <class Batch, class Item, class... Others>
cudaError_t launch_batches(
    void (*kernel)(Batch, Others...),
    Item const* items,
    std::size_t count,
    cudaStream_t stream,
    Others... others
) {
    return for_each_batch<std::remove_const_t<Batch>>(items, count, [&](auto const& batch) {
        return launch_batch(kernel, batch, batch.first_block[batch.count], stream, others...);
    });
}

/// A launch copies its whole argument, however full it is. A few copies therefore use a smaller
/// one.
inline cudaError_t
launch_all_copies(CudaCopy const* copies, std::size_t count, cudaStream_t stream) {
    return count <= few_copies ? launch_batches(&run_copies<few_copies>, copies, count, stream)
                               : launch_batches(&run_copies<many_copies>, copies, count, stream);
}

/// An element in memory as the number that it is stepped as, and back.
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

/// Steps one element.
template <class Stored, class Update>
__host__ __device__ void
update_element(DeviceUpdate const& range, Update const& update, std::size_t element) {
    using Element = StoredElement<Stored>;
    using Number = typename Element::Number;
    constexpr std::size_t arrays = Update::state_count;
    auto* const values = static_cast<Stored*>(range.values);
    auto* const masters = static_cast<Number*>(range.masters);
    auto* const state = static_cast<Number*>(range.state);
    Number value = masters == nullptr ? Element::read(values[element]) : masters[element];
    Number gradient = Element::read(static_cast<Stored const*>(range.gradients)[element]);
    Number own[arrays == 0 ? 1 : arrays];
    for (std::size_t k = 0; k != arrays; ++k) {
        own[k] = state[k * range.stride + element];
    }
    update(value, gradient, own);
    for (std::size_t k = 0; k != arrays; ++k) {
        state[k * range.stride + element] = own[k];
    }
    if (masters != nullptr) {
        masters[element] = value;
    }
    values[element] = Element::written(value);
}

/// The number of updates in a launch; its argument has at most 4 KiB.
inline constexpr std::size_t updates_in_launch = 48;
using UpdateBatch = LaunchBatch<DeviceUpdate, updates_in_launch>;

/// The work of thread `thread` of block `block`.
template <class Stored, class Update>
__host__ __device__ void update_in_block(
    UpdateBatch const& batch, Update const& update, std::uint32_t block, unsigned int thread
) {
    auto const range = range_of_block(batch, block);
    for (std::size_t i = range.begin + thread; i < range.end; i += block_threads) {
        update_element<Stored>(range.item, update, i);
    }
}

template <class Stored, class Update>
__global__ void
run_updates(__grid_constant__ UpdateBatch const batch, __grid_constant__ Update const update) {
    update_in_block<Stored>(batch, update, blockIdx.x, threadIdx.x);
}

/// Launches updates of one step and of elements that are `Stored`.
template <class Stored>
struct UpdateLauncher {
    DeviceUpdate const* updates;
    std::size_t count;
    cudaStream_t stream;

    template <class Update>
    cudaError_t operator()(Update const& update) const {
        static_assert(
            std::is_trivially_copyable_v<Update> && sizeof(UpdateBatch) + sizeof(Update) <= 4096,
            "cuda_kernels: the update of a rule is an argument of a kernel; make it trivially copyable and "
            "small"
        );
        return launch_batches(&run_updates<Stored, Update>, updates, count, stream, update);
    }
};

/// Calls `run(updates, count, element)` for each run of updates of one dtype and step; `element` is
/// a null pointer to the type in memory. Stops at the first error.
template <class Run>
cudaError_t for_each_step(DeviceUpdate const* updates, std::size_t count, Run const& run) {
    for (std::size_t begin = 0, end = 0; begin < count; begin = end) {
        DeviceUpdate const& first = updates[begin];
        while (end < count && updates[end].dtype == first.dtype && updates[end].step == first.step
        ) {
            ++end;
        }
        auto const of = [&]<class Stored>(Stored const* element) {
            return run(&first, end - begin, element);
        };
        cudaError_t error = cudaSuccess;
        switch (first.dtype) {
        case DType::f16: error = of(static_cast<__half const*>(nullptr)); break;
        case DType::bf16: error = of(static_cast<__nv_bfloat16 const*>(nullptr)); break;
        case DType::f64: error = of(static_cast<double const*>(nullptr)); break;
        default: error = of(static_cast<float const*>(nullptr)); break;
        }
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

template <class Rule>
cudaError_t launch_rule(
    DeviceRule const& rule, DeviceUpdate const* updates, std::size_t count, cudaStream_t stream
) {
    auto const& settings = *static_cast<Rule const*>(rule.settings);
    return for_each_step(
        updates,
        count,
        [&]<class Stored>(DeviceUpdate const* first, std::size_t some, Stored const*) {
            using Number = typename StoredElement<Stored>::Number;
            return settings.template visit_update<Number>(
                first->step, UpdateLauncher<Stored>{first, some, stream}
            );
        }
    );
}

/// The number of sums in a launch; its argument has at most 4 KiB.
inline constexpr std::size_t squares_in_launch = 22;
using SquaresBatch = LaunchBatch<CudaSquares, squares_in_launch>;
static_assert(sizeof(SquaresBatch) <= 4096);
static_assert(block_threads == square_lanes && block_elements == square_block);

/// What lane `lane` has of numbers: term(lane), term(lane + square_lanes), and so on.
template <class Term>
__host__ __device__ double sum_of_lane(std::size_t count, unsigned int lane, Term const& term) {
    double sum = 0;
    for (std::size_t i = lane; i < count; i += square_lanes) {
        sum += term(i);
    }
    return sum;
}
template <class Stored>
__host__ __device__ double
squares_of_lane(CudaSquares const& squares, std::size_t begin, std::size_t end, unsigned int lane) {
    auto const* const from = static_cast<Stored const*>(squares.from);
    return sum_of_lane(end - begin, lane, [&](std::size_t i) {
        return square_of(StoredElement<Stored>::read(from[squares.order.place_of(begin + i)]));
    });
}
/// The lane of thread `thread` of block `block`: of the squares of a run.
__host__ __device__ inline double
lane_of_run(SquaresBatch const& batch, std::uint32_t block, unsigned int thread) {
    auto const [squares, begin, end] = range_of_block(batch, block);
    switch (squares.dtype) { // all threads of a block take the same branch
    case DType::f16: return squares_of_lane<__half>(squares, begin, end, thread);
    case DType::bf16: return squares_of_lane<__nv_bfloat16>(squares, begin, end, thread);
    case DType::f64: return squares_of_lane<double>(squares, begin, end, thread);
    default: return squares_of_lane<float>(squares, begin, end, thread);
    }
}
__host__ __device__ inline void
keep_run(SquaresBatch const& batch, std::uint32_t block, double sum) {
    auto const [squares, begin, end] = range_of_block(batch, block);
    squares.partials[begin / block_elements] = sum;
}
/// The lane of a thread: of the sums of a tensor's runs.
__host__ __device__ inline double lane_of_tensor(CudaSquares const& squares, unsigned int thread) {
    return sum_of_lane(square_blocks(squares.count), thread, [&](std::size_t run) {
        return squares.partials[run];
    });
}

/// Adds the lanes of a block's threads. Thread 0 gets the sum.
__device__ inline double fold_lanes(double own) {
    __shared__ double lanes[square_lanes];
    lanes[threadIdx.x] = own;
    for (unsigned int half = square_lanes / 2; half != 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            fold_lane(lanes, half, threadIdx.x);
        }
    }
    return lanes[0];
}

/// A block for each run of elements.
template <class Batch>
__global__ void sum_runs(__grid_constant__ Batch const batch) {
    double const sum = fold_lanes(lane_of_run(batch, blockIdx.x, threadIdx.x));
    if (threadIdx.x == 0) {
        keep_run(batch, blockIdx.x, sum);
    }
}
/// A block for each tensor.
template <class Batch>
__global__ void sum_tensors(__grid_constant__ Batch const batch) {
    CudaSquares const& squares = batch.items[blockIdx.x];
    double const sum = fold_lanes(lane_of_tensor(squares, threadIdx.x));
    if (threadIdx.x == 0) {
        *squares.sum += sum;
    }
}
inline cudaError_t launch_squares(CudaSquares const* sums, std::size_t count, cudaStream_t stream) {
    return for_each_batch<SquaresBatch>(sums, count, [&](SquaresBatch const& batch) {
        std::uint32_t const runs = batch.first_block[batch.count];
        auto const error = launch_batch(&sum_runs<SquaresBatch>, batch, runs, stream);
        return error != cudaSuccess
                   ? error
                   : launch_batch(&sum_tensors<SquaresBatch>, batch, batch.count, stream);
    });
}

template <class... Rules>
bool has_rule(DeviceRule const& rule) {
    return ((rule.id == &rule_id<Rules>) || ...);
}
template <class... Rules>
cudaError_t launch_updates(
    DeviceRule const& rule, DeviceUpdate const* updates, std::size_t count, cudaStream_t stream
) {
    cudaError_t error = cudaErrorInvalidDeviceFunction;
    static_cast<void>(
        ((rule.id == &rule_id<Rules> &&
          (error = launch_rule<Rules>(rule, updates, count, stream), true)) ||
         ...)
    );
    return error;
}

} // namespace detail

/// Kernels for CudaDevice::use_kernels. A submission of up to 134 copies is one launch; larger ones
/// need one launch for each 134 (16 before CUDA 12.1). The elements of a bucket that a rank steps
/// are one launch for each 48 parameters of equal step counts. Sums of squares are two launches for
/// each 22 parameters. Rules and sums compute the same bits as on the host; compile without
/// --use_fast_math. Sgd, Adam and AdamW are always there, and `Rules` are UpdateRules of yours with
/// visit_update(). Compiled by nvcc 13 and run thread by thread on the host; not run on a GPU yet.
/// Include this in one source file that nvcc compiles. Other files need only a declaration of a
/// function that returns this result.
template <class... Rules>
[[nodiscard]] CudaKernels cuda_kernels() noexcept {
    static_assert(
        (detail::has_visit_update<Rules> && ...),
        "cuda_kernels: a rule steps on a device by its member 'template <class T, class F> decltype(auto) "
        "visit_update(std::uint64_t step, F const& f) const', which returns f(update); see UpdateRule"
    );
    return {
        &detail::launch_all_copies,
        &detail::has_rule<detail::LoadMasters, Sgd, Adam, AdamW, Rules...>,
        &detail::launch_updates<detail::LoadMasters, Sgd, Adam, AdamW, Rules...>,
        &detail::launch_squares
    };
}

}} // namespace joinable::v0
