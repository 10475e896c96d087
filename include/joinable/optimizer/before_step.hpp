// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// The gradient of a piece that this rank steps: a whole parameter or a run of its elements.
struct ShardGradient {
    std::size_t parameter; ///< its index
    AnyView view;
};

namespace detail {

/// The part of a sharded optimizer that ShardGradients calls on all ranks. Collective.
class ShardSums {
public:
    ShardSums() = default;
    ShardSums(ShardSums const&) = delete;
    ShardSums& operator=(ShardSums const&) = delete;

    virtual void sum(std::span<double> numbers) = 0;
    virtual void max(std::span<double> numbers) = 0;
    virtual void
    sum_powers(double power, std::span<ShardGradient const> pieces, std::span<double> sums) = 0;

protected:
    ~ShardSums() = default;
};

/// The sum of `power`-th powers of magnitudes, computed in double, for a tensor in host memory; 0 for one
/// without elements. With an infinite power the largest magnitude, NaN if an element is NaN. @pre power > 0
[[nodiscard]] double sum_of_powers(AnyView const& tensor, double power);

} // namespace detail

/// The gradients that a rank is about to step by, and sums and maxima over all ranks. Code that gets
/// it runs on every rank, also on joined ones, and must call the collective members in the same
/// order on each. Gradients may be in the memory of a device: then kernels that change them go on
/// the stream on which the engine makes gradients.
class ShardGradients {
public:
    ShardGradients(
        std::span<ShardGradient const> pieces,
        std::size_t parameters,
        Device& device,
        detail::ShardSums& sums,
        bool has_f16 = false
    ) noexcept
        : pieces_{pieces}, parameters_{parameters}, device_{device}, sums_{sums},
          has_f16_{has_f16} {}

    [[nodiscard]] auto begin() const noexcept { return pieces_.begin(); }
    [[nodiscard]] auto end() const noexcept { return pieces_.end(); }
    /// Where the gradients are, also if this rank has none.
    [[nodiscard]] DeviceId device() const noexcept { return device_.id(); }
    /// The number of parameters in all groups, on all ranks.
    [[nodiscard]] std::size_t parameter_count() const noexcept { return parameters_; }
    /// Whether gradients of some rank are f16. The same on every rank.
    [[nodiscard]] bool has_f16() const noexcept { return has_f16_; }

    /// Sums numbers over all ranks, in place, such as results from each rank's own gradients. With
    /// Sharding::none each rank has all gradients, and the numbers stay as they are. Where groups share the state, this and
    /// the following are over the group of rank 0, whose results all ranks get. Collective; the same count on every rank.
    void sum(std::span<double> numbers) const { sums_.sum(numbers); }
    [[nodiscard]] double sum(double number) const {
        sums_.sum({&number, 1});
        return number;
    }
    /// The largest of all ranks' numbers, in place, with every Sharding: NaN if a number is NaN, and -0
    /// is less than 0, over every transport. Collective; the same count on every rank.
    void max(std::span<double> numbers) const { sums_.max(numbers); }
    [[nodiscard]] double max(double number) const {
        max({&number, 1});
        return number;
    }
    /// Gives the sum of the squares of each parameter's gradient on all ranks, computed in double.
    /// `squares` has parameter_count() numbers; a frozen parameter has 0. If parameters are owned
    /// whole, the bits are the same for any number of ranks and on every device. A number is not
    /// finite if one of the gradient's elements is not, or one of f64 is beyond 1e154. Collective;
    /// the host waits for it.
    /// @throws ContractViolation  `squares` has another size, or the device has no kernels for it;
    ///         nothing was sent.
    void sum_squares(std::span<double> squares) const { sum_powers(2, squares); }
    /// The same for magnitudes to the power of `power`, a number above 0. If it is infinite the
    /// result is each parameter's largest magnitude, NaN if an element is NaN. A number is infinite
    /// where a power is beyond the range of double. Gradients on a device are copied to the host, one after another,
    /// unless the power is 2. Collective.
    /// @throws ContractViolation  also if the power is not above 0; nothing was sent.
    void sum_powers(double power, std::span<double> sums) const;
    /// Multiplies all gradients by a factor, in the type that they are computed in: f16 and bf16 in
    /// float. Local.
    void scale(double factor) const;
    /// Moves elements outside [-limit, limit] to the nearer end, rounded to their type. NaN stays. Local.
    /// @throws ContractViolation  the limit is negative or NaN, or the gradients are not in host
    ///         memory; nothing was changed.
    void clamp(double limit) const;

private:
    std::span<ShardGradient const> pieces_;
    std::size_t parameters_;
    Device& device_;
    detail::ShardSums& sums_;
    bool has_f16_;
};

/// Options of a ClipNorm. They must be the same on every rank.
struct ClipNormOptions {
    /// Above 0: the norm is the root of this degree of the sum of such powers of magnitudes. Infinity:
    /// the largest magnitude.
    double norm_type = 2;
    /// Whether to throw where the norm is not finite, instead of scaling by the factor that it gives.
    bool error_if_nonfinite = false;
};

/// Scales gradients so that the norm of all of them is at most `max_norm`: PyTorch's
/// clip_grad_norm_, as ZeroOptions::before_step. Powers are summed in double, first for each
/// parameter, then in the order of parameters. If parameters are owned whole, the bits are the same
/// for any number of ranks, and on a device those of the host.
class ClipNorm {
public:
    /// @throws ContractViolation  the norm's type is not above 0.
    explicit ClipNorm(double max_norm, ClipNormOptions const& options = {});

    /// Collective.
    /// @throws ContractViolation  the gradients are on a device without kernels.
    /// @throws Error  on all ranks: the norm is not finite, and the options refuse it. No gradient was
    ///         changed.
    bool operator()(ShardGradients const& gradients);

    /// The norm before the last step was clipped.
    [[nodiscard]] double norm() const noexcept { return norm_; }

private:
    double max_norm_;
    ClipNormOptions options_;
    double norm_ = 0;
    std::vector<double> sums_;
};

/// Clips each element of the gradients to [-limit, limit]: PyTorch's clip_grad_value_, as
/// ZeroOptions::before_step. The same limit on every rank. Local, so no rank waits for others.
struct ClipValue {
    double limit;

    /// @throws ContractViolation  what ShardGradients::clamp() throws.
    bool operator()(ShardGradients const& gradients) const {
        gradients.clamp(limit);
        return true;
    }
};

/// The scale of a loss, without which what a pass computes in f16 would be too small for that type: the rule of PyTorch's
/// GradScaler. The engine multiplies its loss by `scale`. As ZeroOptions::before_step, `std::ref(scaler)` beside
/// `.shared = {scaler}`, it divides the averages by it, or skips the step on all ranks where one is not finite. As there,
/// gradients of f16 are refused: the quotients would be rounded to f16, and those that the scale has kept become 0. In a
/// Step there are the same averages on all ranks: there the body calls update().
struct LossScaler {
    double scale = 65536; ///< above 0
    double growth = 2;    ///< of the scale, after `interval` steps by finite gradients; at least 1
    double backoff = 0.5; ///< of the scale, where a gradient is not finite; above 0 and below 1
    std::uint64_t interval = 2000; ///< at least 1
    std::uint64_t steps = 0;       ///< by finite gradients, since the scale changed

    /// Collective. Allocates a number for each parameter.
    /// @throws ContractViolation  what update() throws; gradients are f16, on all ranks if on one; they are on a device
    ///         without kernels. Nothing was changed.
    bool operator()(ShardGradients const& gradients);
    /// Changes the scale as the rule says, and returns `are_finite`, which is whether to step. Local; all ranks say the
    /// same.
    /// @throws ContractViolation  a member is out of range. Nothing was changed.
    bool update(bool are_finite);
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/optimizer/impl/before_step.ipp>
#endif
