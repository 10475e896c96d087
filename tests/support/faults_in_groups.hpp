// SPDX-License-Identifier: BSL-1.0
#pragma once

// What tests share in which a rank of a group throws or dies while an optimizer that is dealt out steps.

#include <cstddef>
#include <functional>

#include <doctest/doctest.h>

#include <joinable/optimizer/local_optimizer.hpp>

namespace joinable_tests {

/// A plain rule that calls a function whenever its owner steps.
struct CallingRule {
    std::function<void()> before_step;
    double rate = 0.5;

    double& settings() { return rate; }
    void step(joinable::WholeParameter const& parameter) const {
        before_step();
        auto const value = parameter.value.as<double>();
        auto const gradient = parameter.gradient.as<double>();
        for (std::size_t k = 0; k < parameter.value.numel(); ++k) {
            value(k) -= rate * gradient(k);
        }
    }
};

/// Calls run(world, point, culprit): two groups of about half of the ranks, and the first, a middle or the last rank.
template <class Point, std::size_t count, class Run>
void at_all(Point const (&points)[count], Run const& run) {
    for (int const world : {2, 3, 4, 8}) {
        for (Point const point : points) {
            for (int const culprit : {0, world / 2, world - 1}) {
                if (culprit == world / 2 && world != 8) {
                    continue;
                }
                CAPTURE(world);
                CAPTURE(static_cast<int>(point));
                CAPTURE(culprit);
                run(world, point, culprit);
            }
        }
    }
}

} // namespace joinable_tests
