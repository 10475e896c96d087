// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <joinable/bucket/options.hpp>
#include <joinable/config.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The gradient, on ranks with a backward pass, of a parameter that no rank used.
enum class OtherGradient : std::uint8_t { zeros, none, unknown };

/// The rule for a rank that runs no backward pass in a round, because it has joined, skips, or failed. It
/// sends zeros, or what it accumulated in earlier rounds. The rule says what its gradients are afterwards, so
/// that optimizers do the same on all ranks and nothing counts twice.
struct WithoutPass {
    bool has_joined = false;
    bool sends_accumulated = false;
    JoinedGradients joined = JoinedGradients::zeroed_at_end;

    /// Whether the rank keeps what it holds, and receives nothing.
    [[nodiscard]] constexpr bool is_untouched() const noexcept {
        return has_joined && joined == JoinedGradients::untouched;
    }
    /// Whether the gradients of its engine count like those of a rank with a pass, where no rank uses a
    /// parameter. A joined rank may hold averages of earlier rounds.
    [[nodiscard]] constexpr bool is_like_pass() const noexcept {
        return sends_accumulated && !has_joined;
    }
    /// Whether a gradient that receives no average becomes what the others have.
    [[nodiscard]] constexpr bool follows_others() const noexcept {
        return !is_untouched() && !is_like_pass();
    }
};

/// Makes a gradient what `other` says. If the parameter cannot drop or take gradients, what it has becomes
/// zeros. `zeros` makes a view of zeros for a parameter that has no gradient, but needs one. Enqueues.
template <class Zeros>
void follow_other(
    AnyParameter const& parameter, OtherGradient other, Device& device, Zeros const& zeros
) {
    AnyView const gradient = parameter.grad();
    if (gradient && other == OtherGradient::none && parameter.can_release_grad() &&
        parameter.can_set_grad()) {
        parameter.release_grad();
    } else if (gradient) {
        device.fill_zero(gradient);
    } else if (other == OtherGradient::zeros && parameter.can_set_grad()) {
        parameter.set_grad(zeros());
    }
}

/// On a joined rank: zeroes a gradient that must not count again. Enqueues.
inline void clear_gradient(AnyParameter const& parameter, Device& device) {
    if (AnyView const gradient = parameter.grad()) {
        device.fill_zero(gradient);
    }
}

/// Whether the engine has cleared all gradients: each is absent, or its bytes are zero. Reads until the first
/// byte that is not; copies gradients of a device to the host. Local.
/// @throws ContractViolation  a gradient has elements, but no memory.
[[nodiscard]] bool are_cleared(ParameterList const& parameters, Device& device);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/impl/without_pass.ipp>
#endif
