// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>

namespace joinable_benchmarks {

/// A parameter whose gradient may be moved into a bucket.
struct Weights {
    std::vector<float> value;
    std::vector<float> storage;
    joinable::AnyView grad; ///< of `storage`, or of a bucket

    explicit Weights(std::size_t numel, float number = 1.0F)
        : value(numel, number), storage(numel), grad{storage} {}
    Weights(Weights&&) = default; // a copy's gradient would be a view of the original
    Weights& operator=(Weights&&) = default;
};

/// Whose value may be moved into a bucket, too.
struct MovableWeights : Weights {
    joinable::AnyView view; ///< of `value`, or of a bucket

    explicit MovableWeights(std::size_t numel, float number = 1.0F)
        : Weights{numel, number}, view{value} {}
};

} // namespace joinable_benchmarks

template <>
struct joinable::parameter_traits<joinable_benchmarks::Weights> {
    using Weights = joinable_benchmarks::Weights;
    static auto* value(Weights& weights) { return &weights.value; }
    static AnyView* grad(Weights& weights) { return &weights.grad; }
    static void set_grad(Weights& weights, AnyView const& view) { weights.grad = view; }
};
template <>
struct joinable::parameter_traits<joinable_benchmarks::MovableWeights>
    : joinable::parameter_traits<joinable_benchmarks::Weights> {
    using Weights = joinable_benchmarks::MovableWeights;
    static AnyView* value(Weights& weights) { return &weights.view; }
    static void set_value(Weights& weights, AnyView const& view) {
        weights.view = view;
        std::vector<float>{}.swap(weights.value);
    }
    static void release_value(Weights& weights) { weights.view = {}; }
};
