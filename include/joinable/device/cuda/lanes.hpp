// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__CUDACC__)
#error "joinable/device/cuda/lanes.hpp is for kernels: include it where nvcc compiles"
#endif

#include <cstddef>

#include <joinable/device/combined_terms.hpp>
#include <joinable/device/cuda/launch_batch.hpp>

/// @file
/// The order of device/combined_terms.hpp by a block of threads, one for each lane.

namespace joinable { inline namespace v0 { namespace detail {

static_assert(block_threads == square_lanes && block_elements == square_block);

/// The sum that lane `lane` has: term(lane), term(lane + square_lanes), and so on.
/// `unroll` terms are computed before one is added.
template <std::size_t unroll, class Term>
__host__ __device__ double sum_of_lane(std::size_t count, unsigned int lane, Term const& term) {
    double sum = 0;
    std::size_t i = lane;
    for (; i + (unroll - 1) * square_lanes < count; i += unroll * square_lanes) {
        double terms[unroll];
#pragma unroll
        for (std::size_t k = 0; k < unroll; ++k) {
            terms[k] = term(i + k * square_lanes);
        }
#pragma unroll
        for (double const one : terms) {
            sum += one;
        }
    }
    for (; i < count; i += square_lanes) {
        sum += term(i);
    }
    return sum;
}

/// Adds the lanes of a block's threads. Thread 0 gets the sum; others get what no thread changes any
/// more.
__device__ inline double fold_lanes(double own) {
    __shared__ double lanes[square_lanes];
    lanes[threadIdx.x] = own;
    for (unsigned int half = square_lanes / 2; half != 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            fold_lane(lanes, half, threadIdx.x);
        }
    }
    return lanes[threadIdx.x];
}

}}} // namespace joinable::v0::detail
