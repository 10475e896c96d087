// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class C>
concept says_whether_it_rounds = requires { bool{C::rounds_factors}; };

/// Whether a communicator rounds the factors of its scaled sums: see ScalesSums. A reduction that multiplies before the
/// sum may say so itself.
template <Communicator Comm, class Reduction = Comm>
[[nodiscard]] consteval bool rounds_factors() {
    if constexpr (says_whether_it_rounds<Reduction>) {
        return Reduction::rounds_factors;
    } else if constexpr (says_whether_it_rounds<Comm>) {
        return Comm::rounds_factors;
    } else {
        return !reduces_host_memory<Comm>;
    }
}

/// Whether gradients are multiplied as they are packed, although the sum could do it. A device
/// multiplies numbers of 16 bits in float, and so is more exact than a sum that rounds factors.
template <Communicator Comm>
[[nodiscard]] bool scales_before_sum(Comm& comm) noexcept {
    return rounds_factors<Comm>() && device_of(comm).can_scale();
}

/// Checks the factor of a sum that rounds it to the dtype of the gradients. All ranks have the same
/// one, and so the same verdict. bf16 has the exponents of f32, so it holds the factor of any
/// divisor as closely as it holds a gradient. f16 does not.
/// @throws ContractViolation
inline void check_rounding(double factor, DType dtype) {
    if (dtype != DType::f16) {
        return;
    }
    constexpr double epsilon = 0x1p-10; // of f16
    auto const rounded = static_cast<double>(static_cast<float>(Half{static_cast<float>(factor)}));
    if ((std::max)(rounded - factor, factor - rounded) > epsilon * (std::max)(factor, -factor)) {
        throw ContractViolation{concat(
            "gradients of f16 would be multiplied by ",
            factor,
            ", which the communicator rounds to f16, to ",
            rounded,
            "; call use_kernels() of its device_memory(), so that the device multiplies in f32"
        )};
    }
}

}}} // namespace joinable::v0::detail
