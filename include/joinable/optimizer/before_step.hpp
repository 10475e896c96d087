// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/strided_view.hpp>

namespace joinable { inline namespace v0 {

/// The gradient of a piece that this rank steps: a whole parameter or a run of its elements.
struct ShardGradient {
    std::size_t parameter; ///< its index
    AnyView view;
};

/// The gradients that a rank is about to step by, and sums over all ranks. Code that gets it runs
/// on every rank, also on joined ones, and must call sum() the same number of times on each.
class ShardGradients {
public:
    using Sum = std::function<void(std::span<double>)>;

    ShardGradients(
        std::span<ShardGradient const> pieces,
        std::size_t parameters,
        Sum const& sum,
        DeviceId device = {}
    ) noexcept
        : pieces_{pieces}, parameters_{parameters}, sum_{sum}, device_{device} {}

    [[nodiscard]] auto begin() const noexcept { return pieces_.begin(); }
    [[nodiscard]] auto end() const noexcept { return pieces_.end(); }
    /// Where the gradients are, also if this rank has none. On a device, kernels that change them go
    /// on the stream on which the engine makes gradients.
    [[nodiscard]] DeviceId device() const noexcept { return device_; }
    /// The number of parameters in all groups, on all ranks.
    [[nodiscard]] std::size_t parameter_count() const noexcept { return parameters_; }
    /// Sums numbers over all ranks, in place, such as results from each rank's own gradients. With
    /// Sharding::none each rank has all gradients, and the numbers stay as they are. Collective;
    /// the same count on every rank.
    void sum(std::span<double> numbers) const { sum_(numbers); }
    [[nodiscard]] double sum(double number) const {
        sum_({&number, 1});
        return number;
    }

private:
    std::span<ShardGradient const> pieces_;
    std::size_t parameters_;
    Sum const& sum_;
    DeviceId device_;
};

namespace detail {

/// The type that an element is computed in.
template <class T>
using wide_of = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Calls f(element) for each element of a floating-point tensor, in the order of its indices.
template <class F>
void for_each_element(AnyView const& view, F const& f) {
    auto const visit = [&]<class T>(std::type_identity<T>) {
        StridedView<T> const elements = view.as<T>();
        std::size_t const rank = view.extents().size();
        auto const descend = [&](auto const& self, std::size_t d, T* at) -> void {
            if (d == rank) {
                return f(*at);
            }
            for (std::size_t i = 0; i < view.extents()[d]; ++i) {
                self(self, d + 1, at + i * view.strides()[d]);
            }
        };
        descend(descend, 0, elements.data());
    };
    switch (view.dtype()) {
    case DType::f16: return visit(std::type_identity<Half>{});
    case DType::bf16: return visit(std::type_identity<BFloat16>{});
    case DType::f64: return visit(std::type_identity<double>{});
    default: return visit(std::type_identity<float>{});
    }
}

} // namespace detail

/// Scales gradients so that the norm of all of them is at most `max_norm`: PyTorch's
/// clip_grad_norm_, as ZeroOptions::before_step. Squares are summed in double, first for each
/// parameter, then in the order of parameters. If parameters are owned whole, the bits are the same
/// for any number of ranks.
class ClipNorm {
public:
    explicit ClipNorm(double max_norm) noexcept : max_norm_{max_norm} {}

    /// Collective.
    /// @throws ContractViolation  the gradients are on a device.
    bool operator()(ShardGradients const& gradients);

    /// The norm before the last step was clipped.
    [[nodiscard]] double norm() const noexcept { return norm_; }

private:
    double max_norm_;
    double norm_ = 0;
    std::vector<double> squares_;
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/optimizer/before_step.ipp>
#endif
