// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <nccl.h>
#include <support/fake_nccl/world.hpp>

#include <joinable/tensor/dtype.hpp>

namespace joinable_tests::fake_nccl {

[[nodiscard]] joinable::DType dtype(ncclDataType_t type);
[[nodiscard]] inline std::size_t size_of(ncclDataType_t type) {
    return joinable::size_of(dtype(type));
}
/// Writes the outputs of a collective, of which `ops` has each rank's part, in rank order.
void run_collective(std::vector<Op> const& ops);

} // namespace joinable_tests::fake_nccl
