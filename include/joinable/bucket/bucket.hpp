// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/assignment.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

/// Where buckets start in an arena, in bytes: whole cache lines, so that no two buckets share one.
inline constexpr std::size_t bucket_alignment = Arena::default_alignment;

/// Gradients, or other tensors, of one dtype that go through one collective.
struct Bucket {
    Buffer buffer;                       ///< all of them, one after another
    std::vector<std::size_t> parameters; ///< whose gradients: indices into the ParameterList
    std::vector<AnyView> views;          ///< where each one's gradient is in the buffer
};

namespace detail {

/// The trainable parameters, last one first: gradients usually become ready in this order.
inline std::vector<std::size_t> expected_ready_order(ParameterList const& parameters) {
    std::vector<std::size_t> order;
    for (std::size_t i = parameters.size(); i-- > 0;) {
        if (parameters[i].requires_grad()) {
            order.push_back(i);
        }
    }
    return order;
}

} // namespace detail

/// The buckets of a model, and the memory that they are in: one arena per dtype. All members local;
/// the same calls have the same results on all ranks that have the same parameters.
class BucketLayout {
public:
    BucketLayout() = default; ///< no buckets

    /// Cuts the parameters that `order` lists into buckets that close when they reach their limit
    /// in bytes, in arenas of `memory`, which are as large as the gradients plus at most one cache
    /// line per parameter. Complexity: linear in the parameters, plus what the arenas cost.
    /// @throws ContractViolation  no parameter is listed; a value is missing or on another device.
    BucketLayout(
        ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits,
        BufferMemory const& memory = {}
    )
        : memory_{memory} {
        if (order.empty()) {
            throw ContractViolation{"no parameter requires a gradient: there is nothing to reduce"};
        }
        std::array<std::size_t, dtype_count> bytes{};
        for (std::size_t const i : order) {
            detail::check_value(parameters, i, memory_.id());
            AnyView const value = parameters[i].value();
            bytes[index(value.dtype())] += // whatever the cut: each one may start a bucket
                value.numel() * size_of(value.dtype()) + bucket_alignment;
        }
        for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
            if (bytes[dtype] != 0) {
                arenas_[dtype] = memory_.allocate(bytes[dtype]);
            }
        }
        cut(parameters, order, limits);
    }

    /// In the order in which they are launched: as they fill when gradients come in `order`.
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept { return buckets_; }
    /// Of all arenas.
    [[nodiscard]] std::size_t bytes() const noexcept {
        std::size_t bytes = 0;
        for (Arena const& arena : arenas_) {
            bytes += arena.bytes();
        }
        return bytes;
    }

    /// Calls f(arena) for each, in an order that all ranks have which have the same parameters.
    template <class F>
    void for_each_arena(F const& f) const {
        for (Arena const& arena : arenas_) {
            if (arena.bytes() != 0) {
                f(arena);
            }
        }
    }

    /// Cuts the same parameters again. Contents move along inside the arenas, on the host without a
    /// second copy of them; views of before point to other gradients afterwards.
    /// Complexity: of the bytes, linear where the order stays, else times at most the square of the
    /// logarithm of the number of parameters. `order` is a permutation of what was given before.
    void rebuild(
        ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits
    ) {
        std::vector<Bucket> const before = std::exchange(buckets_, {});
        cut(parameters, order, limits);
        for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
            Arena const& arena = arenas_[dtype];
            std::vector<std::size_t> position(parameters.size());
            std::vector<std::size_t> offset(parameters.size());
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

private:
    static std::size_t index(DType dtype) noexcept { return static_cast<std::size_t>(dtype); }

    static std::size_t offset_in(Arena const& arena, AnyView const& view) noexcept {
        return static_cast<std::size_t>(static_cast<std::byte*>(view.data()) - arena.data());
    }
    /// Calls f(parameter, view) for what is in the arena of a dtype, in the order of offsets.
    template <class F>
    static void for_each_place(std::vector<Bucket> const& buckets, std::size_t dtype, F const& f) {
        for (Bucket const& bucket : buckets) {
            for (std::size_t k = 0; k < bucket.views.size(); ++k) {
                if (index(bucket.buffer.dtype) == dtype) {
                    f(bucket.parameters[k], bucket.views[k]);
                }
            }
        }
    }

    void
    cut(ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits) {
        std::vector<AnyView> values;
        for (std::size_t const i : order) {
            values.push_back(parameters[i].value());
        }
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

    BufferMemory memory_;
    std::array<Arena, dtype_count> arenas_; ///< by dtype; empty where no parameter has it
    std::vector<Bucket> buckets_;
};

/// The buckets of a model whose gradients become ready from the last trainable parameter to the
/// first: to look at, or to plan with. Local. Throws what BucketLayout throws.
[[nodiscard]] inline BucketLayout
make_bucket_layout(ParameterList const& parameters, BucketOptions const& options) {
    return {parameters, detail::expected_ready_order(parameters), detail::bucket_limits(options)};
}

}} // namespace joinable::v0
