// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <type_traits>

#include <joinable/bucket/timeline.hpp>

/// @file
/// Declares the classes of <joinable/zero.hpp> for a program that has not included it: the compiler then says so.
/// The deduction guides lose to all others.

namespace joinable { inline namespace v0 {

template <class Comm, class Rule>
class ZeroRedundancyOptimizer;
template <class Comm, class Rule, Timeline Times = NoTimeline>
class ShardedDataParallel;

namespace detail {

/// Stands for the communicator where no constructor was seen.
struct NoHeader {};

} // namespace detail

/// The class for arguments that no constructor takes. It holds only the explanation.
template <class Rule>
class ZeroRedundancyOptimizer<detail::NoHeader, Rule> {
    static_assert(
        std::is_void_v<Rule>,
        "ZeroRedundancyOptimizer: include <joinable/zero.hpp>, and give a communicator, parameters and the "
        "optimizer as in Adam{...}"
    );

public:
    explicit ZeroRedundancyOptimizer(...);
};
ZeroRedundancyOptimizer(...) -> ZeroRedundancyOptimizer<detail::NoHeader, int>;

/// The same.
template <class Rule>
class ShardedDataParallel<detail::NoHeader, Rule> {
    static_assert(
        std::is_void_v<Rule>,
        "ShardedDataParallel: include <joinable/zero.hpp>, and give a communicator, parameters and the "
        "optimizer as in Adam{...}"
    );

public:
    explicit ShardedDataParallel(...);
};
ShardedDataParallel(...) -> ShardedDataParallel<detail::NoHeader, int>;

}} // namespace joinable::v0
