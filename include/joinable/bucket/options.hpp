// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace joinable::inline v0 {

/// What a rank's gradient is, where notices carry weights: g is the gradient, w the weight.
enum class GradientKind : std::uint8_t {
    mean, ///< the mean over the rank's own samples: the average is sum(w * g) / sum(w)
    sum,  ///< their sum: the average is sum(g) / sum(w)
};

/// How gradients are cut into buckets and averaged. The same on every rank.
struct DataParallelOptions {
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U; ///< a bucket closes when it reaches this
    /// The limit of the bucket that is launched first, at most bucket_cap_bytes: small, so that
    /// communication starts early.
    std::size_t first_bucket_bytes = std::size_t{1} << 20U;
    /// Gradients live in the buckets and are never copied; needs parameter_traits::set_grad for
    /// every parameter. They are valid as long as the reducer.
    bool gradient_as_bucket_view = false;
    GradientKind gradient_kind = GradientKind::mean;
};

} // namespace joinable::inline v0
