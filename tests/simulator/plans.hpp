// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <joinable/communicator/algorithms/plan.hpp>

namespace joinable_tests {

/// Every algorithm, whole and in segments, and tori and meshes of several shapes, which all fit the ranks.
inline std::vector<joinable::AllReducePlan> all_plans(int ranks, std::size_t segment_bytes) {
    std::vector<joinable::AllReducePlan> plans;
    for (std::size_t number = 0; number < joinable::detail::all_reduce_algorithm_count; ++number) {
        auto const algorithm = static_cast<joinable::AllReduceAlgorithm>(number);
        plans.push_back({algorithm, 0, {}});
        plans.push_back({algorithm, segment_bytes, {}});
    }
    for (auto const grid :
         {joinable::AllReduceAlgorithm::torus, joinable::AllReduceAlgorithm::mesh}) {
        plans.push_back({grid, segment_bytes, joinable::torus_extents(ranks, 2)});
        if (ranks > 1) { // with surplus ranks, unless there are two
            plans.push_back({grid, 0, {ranks / 2 + ranks % 2, 1}});
        }
    }
    return plans;
}

inline std::string text_of(joinable::AllReducePlan const& plan) {
    std::string text{name_of(plan.algorithm)};
    text += " in segments of ";
    text += std::to_string(plan.segment_bytes);
    for (int const extent : plan.extents) {
        text += " x";
        text += std::to_string(extent);
    }
    return text;
}

} // namespace joinable_tests
