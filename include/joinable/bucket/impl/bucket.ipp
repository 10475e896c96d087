// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/bucket.hpp>

#include <numeric>
#include <utility>

#include <joinable/bucket/assignment.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<std::size_t> expected_ready_order(ParameterList const& parameters) {
    std::vector<std::size_t> order;
    for (std::size_t i = parameters.size(); i-- > 0;) {
        if (parameters[i].requires_grad()) {
            order.push_back(i);
        }
    }
    return order;
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION BucketLayout::BucketLayout(
    ParameterList const& parameters,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits,
    detail::BufferMemory const& memory
)
    : memory_{memory} {
    if (order.empty()) {
        throw ContractViolation{detail::concat(
            parameters.size() == 0 ? "the list of parameters is empty"
                                   : "no parameter requires a gradient",
            ": there is nothing to reduce; give the parameters to train, with requires_grad = true, or run "
            "without this model"
        )};
    }
    std::array<std::size_t, dtype_count> bytes{};
    std::vector<AnyView> values;
    for (std::size_t const i : order) {
        detail::check_value(parameters, i, memory_.id());
        AnyView const& like = values.emplace_back(detail::like_gradient(parameters, i));
        bytes[index(like.dtype())] += // for any cut: each may start a bucket
            like.numel() * size_of(like.dtype()) + bucket_alignment;
    }
    for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
        if (bytes[dtype] != 0) {
            arenas_[dtype] = memory_.allocate(bytes[dtype]);
        }
    }
    cut(values, order, limits);
}

JOINABLE_DEFINITION std::size_t BucketLayout::bytes() const noexcept {
    std::size_t bytes = 0;
    for (Arena const& arena : arenas_) {
        bytes += arena.bytes();
    }
    return bytes;
}

JOINABLE_DEFINITION void BucketLayout::rebuild(
    ParameterList const& parameters,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits
) {
    std::vector<Bucket> before = std::exchange(buckets_, {});
    try {
        // Not the values as they are now: an engine may have laid them out anew on some ranks.
        std::vector<AnyView> like(parameters.size());
        for (Bucket const& bucket : before) {
            for (std::size_t k = 0; k < bucket.views.size(); ++k) {
                like[bucket.parameters[k]] = bucket.views[k];
            }
        }
        std::vector<AnyView> values;
        for (std::size_t const i : order) {
            values.push_back(like[i]);
        }
        cut(values, order, limits);
        move_sections(parameters.size(), before);
    } catch (...) {
        buckets_ = std::move(before); // others hold the addresses of their views
        throw;
    }
}

JOINABLE_DEFINITION void
BucketLayout::move_sections(std::size_t parameters, std::vector<Bucket> const& before) {
    for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
        Arena const& arena = arenas_[dtype];
        std::vector<std::size_t> position(parameters);
        std::vector<std::size_t> offset(parameters);
        std::size_t count = 0;
        for_each_place(buckets_, dtype, [&](std::size_t i, AnyView const& view) {
            position[i] = count++;
            offset[i] = offset_in(arena, view);
        });
        std::vector<detail::Section> sections;
        for_each_place(before, dtype, [&](std::size_t i, AnyView const& view) {
            std::size_t const bytes = view.numel() * size_of(view.dtype());
            sections.push_back({offset_in(arena, view), offset[i], bytes, position[i]});
        });
        memory_.device().permute(arena, sections);
    }
}

JOINABLE_DEFINITION std::size_t
BucketLayout::offset_in(Arena const& arena, AnyView const& view) noexcept {
    return static_cast<std::size_t>(static_cast<std::byte*>(view.data()) - arena.data());
}

JOINABLE_DEFINITION void BucketLayout::cut(
    std::vector<AnyView> const& values,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits
) {
    std::vector<std::size_t> as_given(order.size()); // keeps buckets in the order they fill in
    std::iota(as_given.begin(), as_given.end(), std::size_t{0});
    auto const assignment = compute_bucket_assignment_by_size(values, limits, {}, as_given);

    std::array<std::size_t, dtype_count> used{};
    for (auto const& members : assignment.buckets) {
        DType const dtype = values[members.front()].dtype();
        std::size_t& offset = used[index(dtype)];
        std::byte* const base = arenas_[index(dtype)].data();
        Bucket bucket{{base + offset, 0, dtype}, {}, {}};
        for (std::size_t const member : members) {
            AnyView const& value = values[member];
            bucket.parameters.push_back(order[member]);
            bucket.views.emplace_back(
                base + offset,
                dtype,
                value.extents(),
                detail::dense_strides(value.extents(), value.strides()),
                memory_.id()
            );
            bucket.buffer.count += value.numel();
            offset += value.numel() * size_of(dtype);
        }
        offset = (offset + bucket_alignment - 1) / bucket_alignment * bucket_alignment;
        buckets_.push_back(std::move(bucket));
    }
}

}} // namespace joinable::v0
