// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// The bytes that a rank of a training needs for its model, without activations. See zero_memory().
struct ZeroMemory {
    std::size_t values = 0;
    std::size_t gradients = 0;
    std::size_t state = 0;   ///< of the optimizer, without masters
    std::size_t masters = 0; ///< copies of 32 bits of values of 16 bits
    std::size_t buckets = 0; ///< copies of gradients and values that travel

    [[nodiscard]] constexpr std::size_t total() const noexcept {
        return values + gradients + state + masters + buckets;
    }
    friend bool operator==(ZeroMemory const&, ZeroMemory const&) = default;
};

/// The bytes that a rank needs to train `parameters` elements of `dtype`, the type of values and
/// gradients, by `rule` on `ranks` ranks. The formulas are those of ZeRO (Rajbhandari et al., 2020,
/// figure 1), and buckets in addition. Local; no model is needed.
///
/// `masters`: values of 16 bits are stepped as copies of 32 bits, as every UpdateRule does; without
/// them the state has the type of the values. `views`: gradients and values lie in the buckets in
/// which they travel, as far as the sharding has these options: gradient_as_bucket_view with
/// Sharding::none and `optimizer`, parameters_as_bucket_view with `optimizer` and `gradients`.
///
/// A part is divided evenly and rounded up. Partition::flat adds less than a cache line for each
/// bucket; with by_parameters a rank may have more or less, see ShardedOptimizer::table().
/// Gradients count as freed by `release_grad` from Sharding::gradients on. Buckets are as large as
/// `bucket_cap_bytes`, or as the whole model if it is smaller; a parameter that is larger makes its
/// bucket larger.
/// @throws ContractViolation  there is no rank, or `dtype` is of integers.
template <UpdateRule Rule>
[[nodiscard]] constexpr ZeroMemory zero_memory(
    std::size_t parameters,
    DType dtype,
    Sharding sharding,
    int ranks,
    bool masters = true,
    bool views = false,
    Rule const& rule = {},
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U
) {
    if (ranks < 1) {
        throw ContractViolation{
            detail::concat("zero_memory() was asked about ", ranks, " ranks; give at least 1")
        };
    }
    if (!is_floating_point(dtype)) {
        throw ContractViolation{detail::concat(
            "zero_memory() was asked about parameters of ",
            name_of(dtype),
            "; give a floating-point type, and count a complex number as two of its reals"
        )};
    }
    auto const divided_by = static_cast<std::size_t>(ranks);
    std::size_t const part = parameters / divided_by + (parameters % divided_by != 0 ? 1 : 0);
    std::size_t const stepped = sharding == Sharding::none ? parameters : part;
    std::size_t const whole = parameters * size_of(dtype);
    bool const has_masters = masters && is_half_precision(dtype);
    std::size_t const computed_in = size_of(has_masters ? DType::f32 : dtype);

    ZeroMemory memory;
    memory.values = (sharding == Sharding::parameters ? part : parameters) * size_of(dtype);
    memory.gradients = (detail::reduces_to_owners(sharding) ? part : parameters) * size_of(dtype);
    memory.state = stepped * rule.state_names().size() * computed_in;
    memory.masters = has_masters ? stepped * computed_in : 0;

    std::size_t const bucket = (std::min)(whole, bucket_cap_bytes);
    std::size_t const overlapping = whole > bucket ? 2 * bucket : bucket; // one fills, one travels
    switch (sharding) {
    case Sharding::none: memory.buckets = views ? 0 : whole; break;
    case Sharding::optimizer: memory.buckets = views ? 0 : whole + 2 * bucket; break;
    case Sharding::gradients: memory.buckets = views ? overlapping : 2 * bucket; break;
    case Sharding::parameters: memory.buckets = 2 * overlapping; break; // of gradients and of units
    }
    return memory;
}

}} // namespace joinable::v0
