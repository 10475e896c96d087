// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/optimizer/cuda/kernels.hpp has kernels: include it where nvcc compiles"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <joinable/device/cuda/copy.hpp>
#include <joinable/device/cuda/copy_kernels.hpp>
#include <joinable/device/cuda/lanes.hpp>
#include <joinable/device/cuda/launch_batch.hpp>
#include <joinable/device/cuda/step_kernels.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/device/update.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

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
        auto const error = visit_stored(first.dtype, [&](auto const* element) {
            return run(&first, end - begin, element);
        });
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

template <class Stored>
__host__ __device__ double
squares_of_lane(CudaSquares const& squares, std::size_t begin, std::size_t end, unsigned int lane) {
    auto const* const from = static_cast<Stored const*>(squares.from);
    auto const square_at = [from](std::size_t place) {
        return square_of(StoredElement<Stored>::read(from[place]));
    };
    if (squares.order.levels == 1) {
        std::size_t const step = squares.order.level[0].step;
        return sum_of_lane<8>(end - begin, lane, [&](std::size_t i) {
            return square_at((begin + i) * step);
        });
    }
    return sum_of_lane<1>(end - begin, lane, [&](std::size_t i) {
        return square_at(squares.order.place_of(begin + i));
    });
}
/// The lane of thread `thread` of block `block`: of the squares of a run.
__host__ __device__ inline double
lane_of_run(SquaresBatch const& batch, std::uint32_t block, unsigned int thread) {
    auto const [squares, begin, end] = range_of_block(batch, block);
    return visit_stored(squares.dtype, [&]<class Stored>(Stored const*) {
        return squares_of_lane<Stored>(squares, begin, end, thread);
    });
}
__host__ __device__ inline void
keep_run(SquaresBatch const& batch, std::uint32_t block, double sum) {
    auto const [squares, begin, end] = range_of_block(batch, block);
    squares.partials[begin / block_elements] = sum;
}
/// The lane of a thread: of the sums of a tensor's runs.
__host__ __device__ inline double lane_of_tensor(CudaSquares const& squares, unsigned int thread) {
    return sum_of_lane<4>(square_blocks(squares.count), thread, [&](std::size_t run) {
        return squares.partials[run];
    });
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

/// Calls `f(rule)` for rules whose visit_update() gives all types of updates, as far as a default
/// rule and its flags tell.
template <class Rule, class F>
void for_each_variant(F const& f) {
    if constexpr (std::is_default_constructible_v<Rule>) {
        Rule rule{};
        f(rule);
        if constexpr (requires { rule.momentum = 0.5; }) {
            rule.momentum = 0.5;
            f(rule);
        }
        if constexpr (requires { rule.amsgrad = true; }) {
            rule.amsgrad = true;
            f(rule);
        }
    }
}
template <class Stored, class Rule>
cudaError_t load_rule() {
    cudaError_t error = cudaSuccess;
    for_each_variant<Rule>([&](Rule const& rule) {
        using Number = typename StoredElement<Stored>::Number;
        rule.template visit_update<Number>(1, [&]<class Update>(Update const&) {
            if (error == cudaSuccess) {
                error = load_kernel(&run_updates<Stored, Update>);
            }
            return error;
        });
    });
    return error;
}
template <class... Rules>
cudaError_t load_all() {
    auto error = load_copies();
    auto const load = [&](auto const& one) { error = error == cudaSuccess ? one() : error; };
    load([] { return load_kernel(&sum_runs<SquaresBatch>); });
    load([] { return load_kernel(&sum_tensors<SquaresBatch>); });
    load(&load_steps);
    (load(&load_rule<__half, Rules>), ...);
    (load(&load_rule<__nv_bfloat16, Rules>), ...);
    (load(&load_rule<float, Rules>), ...);
    (load(&load_rule<double, Rules>), ...);
    return error;
}

} // namespace detail

/// Kernels for CudaDevice::use_kernels. Copies of elements that lie side by side move 16 bytes at
/// once, many in one launch: up to 92, or 744 from CUDA 12.1 on. Other copies are one launch for each
/// 16. The elements of a bucket that a rank steps are one launch for each 48 parameters of equal step
/// counts. Sums of squares are two launches for each 22 parameters. Rules and sums compute the same
/// bits as on the host; compile without --use_fast_math. A reduction that computes (CastTo, PowerSgd) needs a launch or two for
/// each kind of step and 35 parameters. Sgd, Adam and AdamW are always there, and
/// `Rules` are UpdateRules of yours with visit_update().
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
        &detail::launch_squares,
        &detail::load_all<detail::LoadMasters, Sgd, Adam, AdamW, Rules...>,
        &detail::launch_steps
    };
}

}} // namespace joinable::v0
