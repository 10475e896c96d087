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
    detail::BufferMemory const& memory,
    AnyView (*like)(ParameterList const&, std::size_t)
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
    std::vector<std::size_t> bytes;
    std::vector<AnyView> values;
    for (std::size_t const i : order) {
        detail::check_value(parameters, i, memory_.id());
        AnyView const& value = values.emplace_back(like(parameters, i));
        bytes.resize((std::max)(bytes.size(), index(value) + 1));
        bytes[index(value)] += // for any cut: each may start a bucket
            value.numel() * size_of(value.dtype()) + bucket_alignment;
    }
    for (std::size_t k = 0; k < bytes.size(); ++k) {
        arenas_.push_back(bytes[k] == 0 ? Arena{} : memory_.allocate(bytes[k], k / dtype_count));
    }
    cut(values, order, limits);
}

JOINABLE_DEFINITION std::size_t BucketLayout::index(AnyView const& like) const {
    std::size_t const position = memory_.device().position(like.device());
    return position * dtype_count + static_cast<std::size_t>(like.dtype());
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
    auto const offset_of = [&](AnyView const& view) {
        auto const offset = static_cast<std::byte*>(view.data()) - arenas_[index(view)].data();
        return static_cast<std::size_t>(offset);
    };
    std::vector<detail::Section> next(parameters);
    std::vector<std::size_t> counts(arenas_.size());
    for (Bucket const& bucket : buckets_) {
        for (std::size_t k = 0; k < bucket.views.size(); ++k) {
            AnyView const& view = bucket.views[k];
            std::size_t const bytes = view.numel() * size_of(view.dtype());
            next[bucket.parameters[k]] = {0, offset_of(view), bytes, counts[index(view)]++};
        }
    }
    std::vector<std::vector<detail::Section>> sections(arenas_.size()); // in the order of offsets
    for (Bucket const& bucket : before) {
        for (std::size_t k = 0; k < bucket.views.size(); ++k) {
            AnyView const& view = bucket.views[k];
            detail::Section& moved = sections[index(view)].emplace_back(next[bucket.parameters[k]]);
            moved.from = offset_of(view);
        }
    }
    for (std::size_t a = 0; a < arenas_.size(); ++a) {
        memory_.device().permute(arenas_[a], sections[a]);
    }
}

JOINABLE_DEFINITION void BucketLayout::cut(
    std::vector<AnyView> const& values,
    std::span<std::size_t const> order,
    std::span<std::size_t const> limits
) {
    std::vector<std::size_t> as_given(order.size()); // keeps buckets in the order they fill in
    std::iota(as_given.begin(), as_given.end(), std::size_t{0});
    auto const assignment = compute_bucket_assignment_by_size(values, limits, {}, as_given);

    std::vector<std::size_t> used(arenas_.size());
    for (auto const& members : assignment.buckets) {
        DType const dtype = values[members.front()].dtype();
        std::size_t const arena = index(values[members.front()]);
        std::size_t& offset = used[arena];
        std::byte* const base = arenas_[arena].data();
        Bucket bucket{{base + offset, 0, dtype}, {}, {}};
        for (std::size_t const member : members) {
            AnyView const& value = values[member];
            bucket.parameters.push_back(order[member]);
            bucket.views.emplace_back(
                base + offset,
                dtype,
                value.extents(),
                detail::dense_strides(value.extents(), value.strides()),
                value.device()
            );
            bucket.buffer.count += value.numel();
            offset += value.numel() * size_of(dtype);
        }
        offset = (offset + bucket_alignment - 1) / bucket_alignment * bucket_alignment;
        buckets_.push_back(std::move(bucket));
    }
}

}} // namespace joinable::v0
