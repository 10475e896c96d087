// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// A gradient of which only some rows are not zero, such as that of an embedding.
struct SparseRows {
    AnyView indices = {
    }; ///< of n rows of the parameter's first dimension: i32 or i64, one dimension
    AnyView values = {}; ///< n times the extents of a row, of the parameter's dtype

    /// Whether there is a gradient, even one without rows.
    explicit operator bool() const noexcept { return static_cast<bool>(values); }
};

}} // namespace joinable::v0
