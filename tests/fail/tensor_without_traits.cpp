// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: specialise joinable::tensor_traits for this very type
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Foreign {};
static_assert(joinable::models_tensor<Foreign>());
