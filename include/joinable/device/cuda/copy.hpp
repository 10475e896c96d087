// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include <joinable/device/combined_terms.hpp>
#include <joinable/device/detail/loops.hpp>
#include <joinable/device/step.hpp>
#include <joinable/device/update.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// A copy within a device's memory, times a factor, in the form that kernels take.
struct CudaCopy {
    /// A loop over elements. Steps are in elements.
    struct Level {
        std::size_t extent;
        std::size_t from;
        std::size_t to;
    };

    void const* from; ///< null: zeros
    void* to;
    double factor; ///< 1 copies bits; any other needs a floating-point dtype
    /// Null: `factor` counts. Else the kernel reads the factor here when it runs, in stream order;
    /// 0 then writes zeros, whatever the source holds.
    double const* factor_at;
    std::size_t count;
    DType dtype;
    std::uint8_t element_bytes;   ///< size_of(dtype), at most 8: a complex number is two elements
    std::uint8_t levels;          ///< at least one
    Level level[max_tensor_rank]; ///< innermost first; neighbours are merged where possible

    /// Whether the innermost loop is a row: contiguous in both places.
    [[nodiscard]] bool has_rows() const noexcept {
        return level[0].to == 1 && (from == nullptr || level[0].from == 1);
    }
};

/// A sum of the squares of a tensor's elements, in the form that kernels take.
struct CudaSquares {
    void const* from;
    double* sum;      ///< what is added to
    double* partials; ///< memory for the sum of each run of elements, see detail::square_blocks
    std::size_t count;
    detail::IndexOrder order;
    DType dtype;
};

} // namespace detail

/// Functions that run kernels, from a source file compiled by nvcc. See cuda_kernels.hpp.
struct CudaKernels {
    /// Runs all copies, which are independent, in the order of the stream. `copies` may change when
    /// this returns. The current device is the stream's.
    cudaError_t (*run)(detail::CudaCopy const* copies, std::size_t count, cudaStream_t stream);
    /// Whether update() knows a rule. Null: no rule.
    bool (*has_rule)(detail::DeviceRule const& rule) = nullptr;
    /// Steps elements by a rule, in the order of the stream. `rule` and `updates` may change when
    /// this returns. The current device is the stream's.
    cudaError_t (*update)(
        detail::DeviceRule const& rule,
        detail::DeviceUpdate const* updates,
        std::size_t count,
        cudaStream_t stream
    ) = nullptr;
    /// Computes all sums, in the order of the stream. `sums` may change when this returns. The
    /// current device is the stream's. Null: there are no such kernels.
    cudaError_t (*sum_squares)(
        detail::CudaSquares const* sums, std::size_t count, cudaStream_t stream
    ) = nullptr;
    /// Loads all kernels on the current device. CUDA else loads a kernel at its first launch, and
    /// may then wait for what runs on the device, such as a collective. Null: nothing to load.
    cudaError_t (*load)() = nullptr;
    /// Runs steps in the order of their kinds, and of the stream. `steps` may change when this returns. The current device is
    /// the stream's. Null: there are no such kernels.
    cudaError_t (*compute)(
        detail::DeviceStep const* steps, std::size_t count, cudaStream_t stream
    ) = nullptr;
};

namespace detail {

/// A copy of elements in the same order in both places. `from` null: zeros.
[[nodiscard]] inline CudaCopy
cuda_copy(void const* from, Shape const& from_strides, double factor, AnyView const& to) {
    auto const element_bytes = static_cast<std::uint8_t>(size_of(to.dtype()));
    CudaCopy copy{from, to.data(), factor, nullptr, to.numel(), to.dtype(), element_bytes, 0, {}};
    Loops const loops{to.extents(), from_strides, to.strides(), 1};
    auto const levels = loops.levels();
    for (std::size_t l = levels.size(); l-- > 0;) {
        copy.level[copy.levels++] = {levels[l].extent, levels[l].from, levels[l].to};
    }
    return copy;
}

} // namespace detail

}} // namespace joinable::v0
