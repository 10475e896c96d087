// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

/// Alignment of buckets in an arena, in bytes: whole cache lines, so that no two buckets share one.
inline constexpr std::size_t bucket_alignment = Arena::default_alignment;

/// Gradients, or other tensors, of one dtype that are sent in one collective.
struct Bucket {
    Buffer buffer;                       ///< all of them, one after another; see BucketOptions
    std::vector<std::size_t> parameters; ///< indices into the ParameterList
    std::vector<AnyView> views;          ///< each one's gradient in the buffer
};

namespace detail {

/// The trainable parameters, last one first. Gradients usually become ready in this order.
std::vector<std::size_t> expected_ready_order(ParameterList const& parameters);

} // namespace detail

/// The buckets of a model and their memory, one arena per dtype and device. All members are local. The same
/// calls give the same results on all ranks with the same parameters.
class BucketLayout {
public:
    BucketLayout() = default; ///< no buckets

    /// Cuts the parameters in `order` into buckets, which close when they reach their limit in
    /// bytes. What lies there of a parameter is as `like(parameters, i)` says. The arenas are in
    /// `memory` and have the size of all these plus at most one cache line per parameter.
    /// Complexity: linear in the parameters, plus the cost of the arenas.
    /// @throws ContractViolation  no parameter is listed, or a value is missing or on none of
    ///         the memory's devices.
    BucketLayout(
        ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits,
        detail::BufferMemory const& memory = {},
        AnyView (*like)(ParameterList const&, std::size_t) = &detail::like_gradient
    );

    /// In launch order: as they fill when gradients become ready in `order`.
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept { return buckets_; }
    /// The bytes of all arenas.
    [[nodiscard]] std::size_t bytes() const noexcept;

    /// Calls f(arena) for each arena, in the same order on all ranks with the same parameters.
    template <class F>
    void for_each_arena(F const& f) const {
        for (Arena const& arena : arenas_) {
            if (arena.bytes() != 0) {
                f(arena);
            }
        }
    }

    /// Cuts the same parameters again, with the extents and strides that they had when they were cut
    /// first: those are the same on all ranks. Contents move with them inside the arenas, on the host
    /// without a second copy. Earlier views then refer to other gradients. `order` is a permutation
    /// of the previous one. If it throws, all views are those from before; contents may have moved.
    /// Complexity: in bytes, linear if the order stays, else times at most the square of the
    /// logarithm of the number of parameters.
    void rebuild(
        ParameterList const& parameters,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits
    );

private:
    /// The index of the arena for a gradient: by its device, then by its dtype.
    [[nodiscard]] std::size_t index(AnyView const& like) const;

    /// `values` are like the gradients, in the order of `order`.
    void
    cut(std::vector<AnyView> const& values,
        std::span<std::size_t const> order,
        std::span<std::size_t const> limits);

    /// Moves contents from where they were before.
    void move_sections(std::size_t parameters, std::vector<Bucket> const& before);

    detail::BufferMemory memory_;
    std::vector<Arena> arenas_; ///< by index(); empty if no gradient has it
    std::vector<Bucket> buckets_;
};

/// The buckets of a model whose gradients become ready from the last trainable parameter to the
/// first, for inspection or planning. Local. Throws what BucketLayout throws.
[[nodiscard]] inline BucketLayout
make_bucket_layout(ParameterList const& parameters, BucketOptions const& options) {
    return {parameters, detail::expected_ready_order(parameters), detail::bucket_limits(options)};
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/impl/bucket.ipp>
#endif
