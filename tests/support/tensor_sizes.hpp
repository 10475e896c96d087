// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <rapidcheck.h>

#include <joinable/bucket/assignment.hpp>
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

/// All that bucket assignment can be given: flags and indices are there in half of the cases.
struct AssignmentInput {
    std::vector<joinable::TensorSize> sizes = random_sizes();
    std::vector<std::size_t> limits = random_limits();
    std::size_t flags_size = *rc::gen::arbitrary<bool>() ? sizes.size() : 0;
    std::unique_ptr<bool[]> flags{new bool[flags_size]}; ///< std::vector<bool> is no span
    std::vector<std::size_t> indices;                    ///< in any order

    AssignmentInput() {
        std::generate_n(flags.get(), flags_size, [] { return *rc::gen::inRange(0, 4) == 0; });
        if (*rc::gen::arbitrary<bool>()) {
            indices.resize(sizes.size());
            std::iota(indices.begin(), indices.end(), std::size_t{0});
            for (std::size_t i = indices.size(); i > 1; --i) {
                std::swap(indices[i - 1], indices[*rc::gen::inRange<std::size_t>(0, i)]);
            }
        }
    }

    [[nodiscard]] bool is_sparse(std::size_t tensor) const {
        return flags_size != 0 && flags[tensor];
    }
    [[nodiscard]] joinable::BucketAssignment assign() const {
        return joinable::compute_bucket_assignment_by_size(
            sizes,
            std::span<std::size_t const>{limits},
            std::span<bool const>{flags.get(), flags_size},
            std::span<std::size_t const>{indices}
        );
    }
};

} // namespace joinable_tests
