// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <rapidcheck.h>

#include <joinable/bucket/tensor_size.hpp>

namespace joinable_tests {

/// At least one tensor, of three dtypes on two devices, some without elements.
inline std::vector<joinable::TensorSize> random_sizes() {
    using joinable::DType;
    auto const gen = rc::gen::construct<joinable::TensorSize>(
        rc::gen::inRange<std::size_t>(0, 50),
        rc::gen::element(DType::f32, DType::f64, DType::i8),
        rc::gen::construct<joinable::DeviceId>(
            rc::gen::just(joinable::DeviceKind::cuda), rc::gen::inRange(0, 2)
        )
    );
    return *rc::gen::nonEmpty(rc::gen::container<std::vector<joinable::TensorSize>>(gen));
}

/// At least one limit in bytes, some of them 0.
inline std::vector<std::size_t> random_limits() {
    auto const gen = rc::gen::inRange<std::size_t>(0, 300);
    return *rc::gen::nonEmpty(rc::gen::container<std::vector<std::size_t>>(gen));
}

} // namespace joinable_tests
