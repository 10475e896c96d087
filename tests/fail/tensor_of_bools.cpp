// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: std::vector<bool> has no contiguous elements; use std::vector<unsigned char>, or an array of bool
#include <joinable/join.hpp>

#include <support/misuse.hpp>

static_assert(joinable::models_tensor<std::vector<bool>>());
