// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>
#include <utility>

#include <joinable/bucket/bucket_reduction.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class F>
struct ReduceBy {
    static constexpr bool delivers = true;

    std::string_view name;
    F function;

    template <class Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    template <class Comm>
    [[nodiscard]] auto
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool /*contributes*/) {
        return function(comm, run);
    }
    template <class Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

} // namespace detail

/// A BucketReduction of one function: `function(comm, run)` starts the collective that makes `run.buffer` the sum over all
/// ranks, and returns its work. It is the same on all ranks, contributing or not. Gradients are multiplied by the factor
/// as they are packed. Ranks compare `name`, whose characters must outlive the reduction.
template <class F>
[[nodiscard]] detail::ReduceBy<F> reduce_by(std::string_view name, F function) {
    return {name, std::move(function)};
}

}} // namespace joinable::v0
