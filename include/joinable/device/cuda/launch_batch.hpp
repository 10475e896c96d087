// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/device/cuda/launch_batch.hpp is for kernels: include it where nvcc compiles"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr unsigned int block_threads = 256;
/// The number of elements of a block of threads, unless block_share() says another.
inline constexpr std::size_t block_elements = 8 * block_threads;

/// The argument of one launch, passed by value: copies, updates or sums, each with a `count` of
/// elements. CUDA copies all of it, however full it is.
template <class Item, std::size_t Room>
struct LaunchBatch {
    Item items[Room];
    std::uint32_t first_block[Room + 1]; ///< of each item, and the number of all blocks
    std::uint32_t count;
};
/// The number of items that fit into a kernel's arguments of so many bytes.
template <class Item, std::size_t Bytes>
inline constexpr std::size_t items_in =
    (Bytes - 2 * sizeof(std::uint32_t)) / (sizeof(Item) + sizeof(std::uint32_t));

/// The number of elements of an item that one block takes.
template <class Item>
__host__ __device__ std::size_t block_share(Item const&) {
    return block_elements;
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
range_of_item(LaunchBatch<Item, Room> const& batch, std::uint32_t index, std::uint32_t block) {
    Item const& item = batch.items[index];
    std::size_t const share = block_share(item);
    std::size_t const begin = (block - batch.first_block[index]) * share;
    return {item, begin, item.count - begin < share ? item.count : begin + share};
}
template <class Item, std::size_t Room>
__host__ __device__ BlockRange<Item>
range_of_block(LaunchBatch<Item, Room> const& batch, std::uint32_t block) {
    std::uint32_t low = 0; // the last item that begins at or before this block
    std::uint32_t high = batch.count;
    while (high - low > 1) {
        std::uint32_t const middle = low + (high - low) / 2;
        (batch.first_block[middle] <= block ? low : high) = middle;
    }
    return range_of_item(batch, low, block);
}
/// The same by all threads of a block, for batches of many items. They look for the item together,
/// and read the arguments of the kernel like other memory to find it: dependent reads through the
/// cache for constants, which knows the arguments of no earlier launch, took 10 us a block on an H200.
template <class Item, std::size_t Room>
__device__ BlockRange<Item> range_of_this_block(LaunchBatch<Item, Room> const& argument) {
    LaunchBatch<Item, Room> const* batch = &argument;
    asm("" : "+l"(batch)); // it hides that this is an argument
    constexpr std::uint32_t stride = (Room + block_threads - 1) / block_threads;
    auto const begins = [&](std::uint32_t index) {
        return index < batch->count && batch->first_block[index] <= blockIdx.x;
    };
    auto const strides =
        static_cast<std::uint32_t>(__syncthreads_count(begins(threadIdx.x * stride)));
    std::uint32_t const index = (strides - 1) * stride;
    std::uint32_t more = 0;
#pragma unroll
    for (std::uint32_t k = 1; k < stride; ++k) {
        more += begins(index + k) ? 1 : 0;
    }
    return range_of_item(argument, JOINABLE_OF_WARP(index + more), blockIdx.x);
}

/// Takes each source as it is.
struct TakeAll {
    template <class Item>
    bool operator()(Item const& source, Item& item) const {
        item = source;
        return true;
    }
};

/// Fills a batch with the items that `take(source, item)` makes of the sources and returns true
/// for. Returns how many sources were seen; items without elements need no block.
template <class Item, std::size_t Room, class Source, class Take = TakeAll>
std::size_t fill_batch(
    LaunchBatch<Item, Room>& batch, Source const* sources, std::size_t count, Take const& take = {}
) {
    std::size_t seen = 0;
    batch.count = 0;
    batch.first_block[0] = 0;
    for (; seen < count && batch.count < Room; ++seen) {
        Item& item = batch.items[batch.count];
        if (take(sources[seen], item) && item.count != 0) {
            std::size_t const share = block_share(item);
            std::uint32_t const first = batch.first_block[batch.count++];
            batch.first_block[batch.count] =
                first + static_cast<std::uint32_t>((item.count + share - 1) / share);
        }
    }
    return seen;
}
/// Calls `run(batch)` for each batch of all sources that needs a block. Stops at the first error.
template <class Batch, class Source, class Run, class Take = TakeAll>
cudaError_t
for_each_batch(Source const* sources, std::size_t count, Run const& run, Take const& take = {}) {
    cudaError_t error = cudaSuccess;
    for (std::size_t next = 0; next < count && error == cudaSuccess;) {
        Batch batch;
        next += fill_batch(batch, sources + next, count - next, take);
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

/// Makes CUDA load a kernel on the current device, which it else does at the first launch.
template <class... Arguments>
cudaError_t load_kernel(void (*kernel)(Arguments...)) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(kernel));
}

}}} // namespace joinable::v0::detail
