// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/update_rule.hpp>

namespace joinable { inline namespace v0 {

/// An object that ZeroOptions::before_step reads or changes. If ranks have joined, they get the
/// lowest active rank's object before each step. Refers to the object, which must have no pointers,
/// because addresses are not valid on another rank.
class SharedObject {
public:
    template <class T>
        requires(!std::is_same_v<T, SharedObject>) // a copy refers to the same object
    SharedObject(T& object) noexcept : data_{std::addressof(object)}, bytes_{sizeof(T)} {
        static_assert(
            std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
            "SharedObject: ranks send the object as it is in memory; give one that is trivially copyable "
            "and not const, such as a struct of numbers"
        );
        static_assert(
            !detail::has_address<std::remove_all_extents_t<T>>(),
            "SharedObject: ranks send the object as it is in memory, but it has a pointer or a reference, and an "
            "address leads nowhere on another rank; give a struct of numbers"
        );
    }

    [[nodiscard]] void* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    void* data_;
    std::size_t bytes_;
};

/// Options of a ZeroRedundancyOptimizer. All except `before_step` must be the same on every rank.
struct ZeroOptions {
    Partition partition = Partition::by_parameters;
    /// The owner of each parameter of the constructor's list, instead of the rule of by_parameters.
    std::vector<int> owners = {};
    /// Parameters are sent to the other ranks in buckets, which close when they reach this size. A
    /// rank has memory for two of them.
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U;
    /// Averages gradients itself, only to their owners, for guards without a
    /// DistributedDataParallel. Weights and the divisor are those of
    /// DataParallelOptions::gradient_kind `mean`. A rank's gradients are not changed. Every
    /// parameter is stepped, with zeros if no rank has a gradient.
    bool reduces_gradients = false;
    /// Called between the reduction and the step on every rank, also on joined ones, with the
    /// gradients that this rank owns. It may clip, unscale or set a rate. Returning false skips the
    /// step. The result must be the same on every rank: base it on ShardGradients::sum(). On a
    /// device, gradients are in its memory: kernels that change them go on the engine's stream.
    std::function<bool(ShardGradients const&)> before_step = {};
    /// The state of `before_step` besides the rules. Joined ranks take it as they take settings; after a guard
    /// that failed set it again on all ranks.
    std::vector<SharedObject> shared = {};
    /// Values live in the buckets in which they travel, and a step copies none. Needs `set_value`
    /// and `release_value` in parameter_traits; set_value must keep the view. The values are
    /// released at destruction: copy them before. They stay where they are: write new values into
    /// that memory. If a rank is refused, those that were moved stay in buckets that are never freed.
    bool parameters_as_bucket_view = false;
};

}} // namespace joinable::v0
