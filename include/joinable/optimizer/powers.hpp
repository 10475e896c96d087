// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The sum of `power`-th powers of magnitudes, computed in double, for a tensor in host memory; 0 for one
/// without elements. With an infinite power the largest magnitude, NaN if an element is NaN. @pre power > 0
[[nodiscard]] double sum_of_powers(AnyView const& tensor, double power);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/optimizer/impl/powers.ipp>
#endif
