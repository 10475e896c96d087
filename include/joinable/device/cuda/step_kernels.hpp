// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/device/cuda/step_kernels.hpp has kernels: include it where nvcc compiles"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>

#include <joinable/device/cuda/copy_kernels.hpp>
#include <joinable/device/cuda/lanes.hpp>
#include <joinable/device/cuda/launch_batch.hpp>
#include <joinable/device/step.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// A kernel for each kind of step. A block of threads takes some elements, a row of multiply_right, some columns of a chunk of
/// rows of multiply_left, or a matrix that becomes orthonormal.

namespace joinable { inline namespace v0 { namespace detail {

/// The block of device/step.hpp by its threads.
struct ThreadBlock {
    template <class F>
    __device__ void each(std::size_t count, F const& f) const {
        for (std::size_t i = threadIdx.x; i < count; i += block_threads) {
            f(i);
        }
    }
    template <class Term>
    __device__ double sum(std::size_t count, Term const& term) const {
        __shared__ double total;
        __syncthreads(); // all have read the last one
        double const folded = fold_lanes(sum_of_lane<1>(count, threadIdx.x, term));
        if (threadIdx.x == 0) {
            total = folded;
        }
        __syncthreads();
        return total;
    }
};

/// A step and how many units its blocks share.
struct StepItem {
    DeviceStep step;
    std::size_t count;
};
/// Of multiply_left.
[[nodiscard]] __host__ __device__ constexpr std::size_t tiles_of(MatrixSize const& size) {
    return (size.columns + block_threads - 1) / block_threads;
}
[[nodiscard]] __host__ __device__ constexpr bool is_elementwise(StepKind kind) {
    return kind != StepKind::orthogonalize && kind != StepKind::multiply_right &&
           kind != StepKind::multiply_left && kind != StepKind::keep_rows;
}
__host__ __device__ inline std::size_t block_share(StepItem const& item) {
    return is_elementwise(item.step.kind) ? block_elements : 1;
}
/// Takes the steps of a kind.
struct TakeKind {
    StepKind kind;

    bool operator()(DeviceStep const& step, StepItem& item) const noexcept {
        if (step.kind != kind) {
            return false;
        }
        item = {step, step.count};
        switch (kind) {
        case StepKind::orthogonalize: item.count = step.size.rank == 0 ? 0 : 1; break;
        case StepKind::multiply_right: item.count = step.size.rows; break;
        case StepKind::multiply_left:
            item.count = tiles_of(step.size) * chunks_of(step.size);
            break;
        case StepKind::keep_rows: item.count = step.size.rank; break;
        default: break;
        }
        return true;
    }
};
/// Takes the sums of chunks of multiply_left, as elements.
struct TakeChunks {
    bool operator()(DeviceStep const& step, StepItem& item) const noexcept {
        bool const takes = step.kind == StepKind::multiply_left;
        if (takes) {
            item = {step, step.size.rank * step.size.columns};
            item.step.kind = StepKind::add;
        }
        return takes;
    }
};

template <class Block>
__host__ __device__ void
cast_elements(Block const& block, DeviceStep const& step, std::size_t begin, std::size_t end) {
    visit_stored(step.dtype, [&]<class To>(To const*) {
        auto* const to = static_cast<To*>(step.to);
        using Wide = typename StoredElement<To>::Number;
        if (step.from == nullptr) {
            block.each(end - begin, [&](std::size_t i) {
                to[begin + i] = StoredElement<To>::written(static_cast<Wide>(step.number));
            });
            return;
        }
        visit_stored(step.from_dtype, [&]<class From>(From const*) {
            auto const* const from = static_cast<From const*>(step.from);
            using Number = std::common_type_t<Wide, typename StoredElement<From>::Number>;
            auto const factor = static_cast<Number>(step.number);
            block.each(end - begin, [&](std::size_t i) {
                auto const number = static_cast<Number>(StoredElement<From>::read(from[begin + i]));
                to[begin + i] = StoredElement<To>::written(static_cast<Wide>(number * factor));
            });
        });
    });
}

/// Units [begin, end) of a step. Numbers are of T, elements are Stored.
template <StepKind kind, class Stored, class Block>
__host__ __device__ void
run_units(Block const& block, DeviceStep const& step, std::size_t begin, std::size_t end) {
    using T = typename StoredElement<Stored>::Number;
    auto const* const from = static_cast<T const*>(step.from);
    auto const* const left = static_cast<T const*>(step.left);
    auto const* const right = static_cast<T const*>(step.right);
    auto* const to = static_cast<T*>(step.to);
    MatrixSize const size = step.size;
    bool const is_off = step.only_if != nullptr && *step.only_if == 0;
    if constexpr (kind == StepKind::fill_random) {
        block.each(end - begin, [&](std::size_t i) {
            to[begin + i] = random_number<T>(step.seed, begin + i);
        });
    } else if constexpr (kind == StepKind::orthogonalize) {
        orthogonalize(block, to, size.rank, size.columns, step.number);
    } else if constexpr (kind == StepKind::multiply_right) {
        T const* const row = from + begin * size.columns;
        for (std::size_t r = 0; r < size.rank; ++r) {
            double const sum = inner_product(block, row, right + r * size.columns, size.columns);
            block.each(1, [&](std::size_t) { to[r * size.rows + begin] = static_cast<T>(sum); });
        }
    } else if constexpr (kind == StepKind::multiply_left) {
        std::size_t const tiles = tiles_of(size);
        std::size_t const first_column = begin % tiles * block_threads;
        std::size_t const chunk = begin / tiles;
        std::size_t const first = chunk * rows_of_chunk;
        std::size_t const last =
            size.rows - first < rows_of_chunk ? size.rows : first + rows_of_chunk;
        std::size_t const columns = size.columns - first_column < block_threads
                                        ? size.columns - first_column
                                        : block_threads;
        auto* const sums = static_cast<T*>(step.room) + chunk * size.rank * size.columns;
        for (std::size_t r = 0; r < size.rank; ++r) {
            block.each(columns, [&](std::size_t j) {
                double sum = 0;
                for (std::size_t i = first; i < last; ++i) {
                    sum += wide_product(
                        from[i * size.columns + first_column + j], left[r * size.rows + i]
                    );
                }
                sums[r * size.columns + first_column + j] = static_cast<T>(sum);
            });
        }
    } else if constexpr (kind == StepKind::multiply) {
        auto* const elements = static_cast<Stored*>(step.to);
        block.each(end - begin, [&](std::size_t i) {
            T const number = is_off ? T{0} : product_element(size, left, right, begin + i);
            elements[begin + i] = StoredElement<Stored>::written(number);
        });
    } else if constexpr (kind == StepKind::keep_rows) {
        T const* const row = from + begin * size.columns;
        if (!is_off && inner_product(block, row, row, size.columns) > 0) {
            block.each(size.columns, [&](std::size_t j) { to[begin * size.columns + j] = row[j]; });
        }
    } else if constexpr (kind == StepKind::subtract) {
        if (!is_off) {
            block.each(end - begin, [&](std::size_t i) {
                to[begin + i] = from[begin + i] - product_element(size, left, right, begin + i);
            });
        }
    }
}
/// Elements [begin, end) of a sum of elements and numbers.
template <class Block>
__host__ __device__ void
add_elements(Block const& block, DeviceStep const& step, std::size_t begin, std::size_t end) {
    visit_stored(step.from_dtype, [&]<class Stored>(Stored const*) {
        using T = typename StoredElement<Stored>::Number;
        auto const* const from = static_cast<Stored const*>(step.from);
        auto const* const other = static_cast<T const*>(step.left);
        auto* const to = static_cast<T*>(step.to);
        block.each(end - begin, [&](std::size_t i) {
            to[begin + i] = StoredElement<Stored>::read(from[begin + i]) + other[begin + i];
        });
    });
}
template <class Block>
__host__ __device__ void
note_not_finite(Block const& block, DeviceStep const& step, std::size_t begin, std::size_t end) {
    auto* const verdict = static_cast<double*>(step.to);
    visit_stored(step.from_dtype, [&]<class Stored>(Stored const*) {
        auto const* const from = static_cast<Stored const*>(step.from);
        block.each(end - begin, [&](std::size_t i) {
            auto const number = StoredElement<Stored>::read(from[begin + i]);
            if (!(number - number == 0)) { // threads that write write the same
                *verdict = 0;
            }
        });
    });
}
/// Adds the sums of chunks to numbers [begin, end) of a right matrix.
template <class Block>
__host__ __device__ void
add_chunks(Block const& block, DeviceStep const& step, std::size_t begin, std::size_t end) {
    visit_stored(step.dtype, [&]<class Stored>(Stored const*) {
        using T = typename StoredElement<Stored>::Number;
        auto const* const sums = static_cast<T const*>(step.room);
        std::size_t const numbers = step.size.rank * step.size.columns;
        block.each(end - begin, [&](std::size_t i) {
            double sum = 0;
            for (std::size_t chunk = 0; chunk < chunks_of(step.size); ++chunk) {
                sum += static_cast<double>(sums[chunk * numbers + begin + i]);
            }
            static_cast<T*>(step.to)[begin + i] = static_cast<T>(sum);
        });
    });
}

/// The work of a block.
template <StepKind kind, class Block>
__host__ __device__ void run_step(Block const& block, BlockRange<StepItem> const& range) {
    DeviceStep const& step = range.item.step;
    if constexpr (kind == StepKind::cast) {
        cast_elements(block, step, range.begin, range.end);
    } else if constexpr (kind == StepKind::add) {
        add_elements(block, step, range.begin, range.end);
    } else if constexpr (kind == StepKind::note_not_finite) {
        note_not_finite(block, step, range.begin, range.end);
    } else {
        visit_stored(step.dtype, [&]<class Stored>(Stored const*) {
            run_units<kind, Stored>(block, step, range.begin, range.end);
        });
    }
}

/// The number of steps in a launch; its argument has at most 4 KiB.
inline constexpr std::size_t steps_in_launch = items_in<StepItem, 4096>;
using StepBatch = LaunchBatch<StepItem, steps_in_launch>;
static_assert(sizeof(StepBatch) <= 4096);

template <StepKind kind>
__global__ void run_steps(__grid_constant__ StepBatch const batch) {
    run_step<kind>(ThreadBlock{}, range_of_block(batch, blockIdx.x));
}
template <class Batch>
__global__ void run_chunks(__grid_constant__ Batch const batch) {
    auto const [item, begin, end] = range_of_block(batch, blockIdx.x);
    add_chunks(ThreadBlock{}, item.step, begin, end);
}

/// Calls f.operator()<kind>() for each kind, in their order, until one returns an error.
template <class F>
cudaError_t for_each_kind(F const& f) {
    cudaError_t error = cudaSuccess;
    auto const run = [&]<std::uint8_t... kinds>(std::integer_sequence<std::uint8_t, kinds...>) {
        static_cast<void>((
            ((error = f.template operator()<static_cast<StepKind>(kinds)>()) == cudaSuccess) && ...
        ));
    };
    run(std::make_integer_sequence<std::uint8_t, step_kinds>{});
    return error;
}
inline cudaError_t launch_steps(DeviceStep const* steps, std::size_t count, cudaStream_t stream) {
    return for_each_kind([&]<StepKind kind>() {
        auto const error = for_each_batch<StepBatch>(
            steps,
            count,
            [&](StepBatch const& batch) {
                return launch_batch(
                    &run_steps<kind>, batch, batch.first_block[batch.count], stream
                );
            },
            TakeKind{kind}
        );
        if (error != cudaSuccess || kind != StepKind::multiply_left) {
            return error;
        }
        return for_each_batch<StepBatch>(
            steps,
            count,
            [&](StepBatch const& batch) {
                return launch_batch(
                    &run_chunks<StepBatch>, batch, batch.first_block[batch.count], stream
                );
            },
            TakeChunks{}
        );
    });
}
struct LoadKind {
    template <StepKind kind>
    cudaError_t operator()() const {
        return load_kernel(&run_steps<kind>);
    }
};
inline cudaError_t load_steps() {
    auto const error = for_each_kind(LoadKind{});
    return error == cudaSuccess ? load_kernel(&run_chunks<StepBatch>) : error;
}

}}} // namespace joinable::v0::detail
