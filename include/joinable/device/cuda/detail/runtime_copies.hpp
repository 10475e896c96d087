// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <limits>

#include <cuda_runtime_api.h>

#include <joinable/device/cuda/copy.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Runs a copy without kernels, as a minimal number of the runtime's copies of rows.
class CudaRuntimeCopies {
public:
    explicit CudaRuntimeCopies(cudaStream_t stream) noexcept : stream_{stream} {}

    /// @pre the factor is 1. One that only a kernel can read is refused: cudaErrorNotSupported.
    [[nodiscard]] cudaError_t run(CudaCopy const& copy) const {
        if (copy.factor_at != nullptr) {
            return cudaErrorNotSupported;
        }
        if (copy.count == 0) {
            return cudaSuccess;
        }
        std::size_t const size = size_of(copy.dtype);
        std::size_t const width = copy.has_rows() ? copy.level[0].extent * size : size;
        return loop(copy, copy.levels, copy.has_rows() ? 1 : 0, width, copy.from, copy.to);
    }

private:
    /// Runs the loops in [first, last), starting with the outermost one.
    cudaError_t loop(
        CudaCopy const& copy,
        std::size_t last,
        std::size_t first,
        std::size_t width,
        void const* from,
        void* to
    ) const {
        if (last == first) {
            return rows(from, width, to, width, width, 1);
        }
        std::size_t const size = size_of(copy.dtype);
        CudaCopy::Level const& level = copy.level[last - 1];
        std::size_t const from_step = level.from * size;
        std::size_t const to_step = level.to * size;
        if (last == first + 1 && is_pitch(to_step, width) &&
            (from == nullptr || is_pitch(from_step, width))) {
            return rows(from, from_step, to, to_step, width, level.extent);
        }
        for (std::size_t i = 0; i < level.extent; ++i) {
            auto const error = loop(
                copy,
                last - 1,
                first,
                width,
                from == nullptr ? from : static_cast<std::byte const*>(from) + i * from_step,
                static_cast<std::byte*>(to) + i * to_step
            );
            if (error != cudaSuccess) {
                return error;
            }
        }
        return cudaSuccess;
    }

    /// Whether the runtime accepts this distance of rows: at least their width, less than 2 GiB.
    static bool is_pitch(std::size_t step, std::size_t width) noexcept {
        return step >= width && step <= std::size_t{(std::numeric_limits<int>::max)()};
    }

    cudaError_t rows(
        void const* from,
        std::size_t from_step,
        void* to,
        std::size_t to_step,
        std::size_t width,
        std::size_t count
    ) const {
        if (from == nullptr) {
            return count == 1 ? cudaMemsetAsync(to, 0, width, stream_)
                              : cudaMemset2DAsync(to, to_step, 0, width, count, stream_);
        }
        return count == 1 ? cudaMemcpyAsync(to, from, width, cudaMemcpyDeviceToDevice, stream_)
                          : cudaMemcpy2DAsync(
                                to,
                                to_step,
                                from,
                                from_step,
                                width,
                                count,
                                cudaMemcpyDeviceToDevice,
                                stream_
                            );
    }

    cudaStream_t stream_;
};

}}} // namespace joinable::v0::detail
