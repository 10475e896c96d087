// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/assignment.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/copy.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable::inline v0 {

/// Where buckets start in an arena, in bytes: whole cache lines, so that no two buckets share one.
inline constexpr std::size_t bucket_alignment = 64;

/// Zeroed host memory with the alignment of buckets. Owns it; moves, never copies.
class Arena {
public:
    explicit Arena(std::size_t bytes)
        : data_{static_cast<std::byte*>(::operator new(bytes, std::align_val_t{bucket_alignment}))},
          bytes_{bytes} {
        std::fill_n(data_.get(), bytes, std::byte{});
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    struct Release {
        void operator()(std::byte* memory) const noexcept {
            ::operator delete(memory, std::align_val_t{bucket_alignment});
        }
    };
    std::unique_ptr<std::byte, Release> data_;
    std::size_t bytes_;
};

/// Gradients of one dtype that are reduced by one collective.
struct Bucket {
    Buffer buffer;                       ///< all of them, one after another
    std::vector<std::size_t> parameters; ///< whose gradients: indices into the ParameterList
    std::vector<AnyView> views;          ///< where each one's gradient is in the buffer
};

/// The buckets of a model, and the memory that they are in: one arena per dtype.
struct BucketLayout {
    std::vector<Arena> arenas;
    std::vector<Bucket> buckets; ///< in the order in which they are launched
};

namespace detail {

/// How error texts call a parameter.
inline std::string describe_parameter(ParameterList const& parameters, std::size_t i) {
    auto const name = parameters[i].name();
    return name.empty() ? concat("parameter ", i) : concat("parameter ", i, " (", name, ")");
}

/// Throws ContractViolation unless parameter `i` has a value that host code can read.
inline void check_value(ParameterList const& parameters, std::size_t i) {
    AnyView const value = parameters[i].value();
    if (!value || value.device() != DeviceId{}) {
        throw ContractViolation{concat(
            describe_parameter(parameters, i), value ? " is not on the host" : " has no value"
        )};
    }
}

/// A gradient is laid out like its value where that is dense, so that both are read in the same
/// order; else row-major.
inline Shape gradient_strides(AnyView const& value) {
    return is_non_overlapping_and_dense(value.extents(), value.strides())
               ? value.strides()
               : row_major_strides(value.extents());
}

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

/// Cuts the trainable parameters into buckets. Local; the same on ranks with the same parameters.
/// Complexity: linear in the parameters; allocates the arenas, which are as large as the gradients
/// plus at most one cache line per bucket.
/// Throws ContractViolation if no parameter is trainable, and for values that are missing or not on
/// the host.
inline BucketLayout
make_bucket_layout(ParameterList const& parameters, DataParallelOptions const& options) {
    std::vector<std::size_t> const order = detail::expected_ready_order(parameters);
    if (order.empty()) {
        throw ContractViolation{"no parameter requires a gradient: there is nothing to reduce"};
    }
    std::vector<AnyView> values;
    values.reserve(order.size());
    for (std::size_t const i : order) {
        detail::check_value(parameters, i);
        values.push_back(parameters[i].value());
    }
    std::array<std::size_t, 2> const limits{
        {(std::min)(options.first_bucket_bytes, options.bucket_cap_bytes), options.bucket_cap_bytes}
    };
    auto const assignment = compute_bucket_assignment_by_size(values, limits);

    constexpr std::size_t dtypes = 10;
    std::array<std::size_t, dtypes> arena_bytes{};
    std::vector<std::size_t> starts;
    auto const padded = [](std::size_t bytes) {
        return (bytes + bucket_alignment - 1) / bucket_alignment * bucket_alignment;
    };
    BucketLayout layout;
    for (auto const& members : assignment.buckets) {
        Bucket bucket;
        bucket.buffer.dtype = values[members.front()].dtype();
        for (std::size_t const member : members) {
            bucket.parameters.push_back(order[member]);
            bucket.buffer.count += values[member].numel();
        }
        std::size_t& bytes = arena_bytes[static_cast<std::size_t>(bucket.buffer.dtype)];
        starts.push_back(bytes);
        bytes += padded(bucket.buffer.bytes());
        layout.buckets.push_back(std::move(bucket));
    }
    std::array<std::byte*, dtypes> bases{};
    for (std::size_t dtype = 0; dtype < dtypes; ++dtype) {
        if (arena_bytes[dtype] != 0) {
            bases[dtype] = layout.arenas.emplace_back(arena_bytes[dtype]).data();
        }
    }
    for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
        Bucket& bucket = layout.buckets[b];
        std::byte* const base = bases[static_cast<std::size_t>(bucket.buffer.dtype)];
        bucket.buffer.data = base == nullptr ? nullptr : base + starts[b];
        std::size_t offset = starts[b];
        for (std::size_t const i : bucket.parameters) {
            AnyView const value = parameters[i].value();
            bucket.views.emplace_back(
                base == nullptr ? nullptr : base + offset,
                value.dtype(),
                value.extents(),
                detail::gradient_strides(value)
            );
            offset += value.numel() * size_of(value.dtype());
        }
    }
    return layout;
}

} // namespace joinable::inline v0
