// SPDX-License-Identifier: BSL-1.0
// The opt-in header is installed, and needs range-v3 alone beside the library.
#include <joinable/interop/range_v3.hpp>

static_assert(ranges::view_<joinable::StridedView<float>>);
