// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <type_traits>

#include <joinable/bucket/timeline.hpp>

/// @file
/// Declares the class templates of headers that a program may not have included: the compiler then says so.
/// The deduction guides lose to all others. A class that is no template cannot explain: TraceTimeline and
/// NvtxTimeline, which are named in the type of a model, are declared in fwd.hpp, and Timeline explains.

namespace joinable { inline namespace v0 {

template <class Comm, class Rule>
class ZeroRedundancyOptimizer;
template <class Comm, class Rule, Timeline Times = NoTimeline>
class ShardedDataParallel;
template <class Comm, class Rule, class Model = void>
class Checkpoint;
template <class Comm, class Passes>
class CapturedStep;

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

/// The same.
template <class Rule>
class Checkpoint<detail::NoHeader, Rule> {
    static_assert(
        std::is_void_v<Rule>,
        "Checkpoint: include <joinable/checkpoint.hpp>, and give a sharded optimizer, or participants(ddp) or "
        "participants(ddp, zero), a file and options, as in Checkpoint save{zero, file, {.every = 100}}"
    );

public:
    explicit Checkpoint(...);
};
Checkpoint(...) -> Checkpoint<detail::NoHeader, int>;

/// The same.
template <class Passes>
class CapturedStep<detail::NoHeader, Passes> {
    static_assert(
        std::is_void_v<Passes>,
        "CapturedStep: include <joinable/nccl_graphs.hpp>, and give an NcclCommunicator, gradients and passes, as "
        "in CapturedStep captured{comm, gradients, [&](auto ready) { model.passes(ready); }}"
    );

public:
    explicit CapturedStep(...);
};
CapturedStep(...) -> CapturedStep<detail::NoHeader, int>;

}} // namespace joinable::v0
