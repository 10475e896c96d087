// SPDX-License-Identifier: BSL-1.0
#pragma once

#if defined(__CUDACC__)
#error "joinable/interop/range_v3.hpp is for .cpp files: nvcc does not compile range-v3"
#endif

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <range/v3/range/access.hpp>
#include <range/v3/range/concepts.hpp>
#include <range/v3/range/primitives.hpp>
#include <range/v3/view/all.hpp>
#include <range/v3/view/drop.hpp>
#include <range/v3/view/drop_exactly.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/partial_sum.hpp>
#include <range/v3/view/stride.hpp>
#include <range/v3/view/take_exactly.hpp>
#include <range/v3/view/transform.hpp>
#include <range/v3/view/view.hpp>
#include <range/v3/view/zip.hpp>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/bucketed_view.hpp>
#include <joinable/data/shard.hpp>
#include <joinable/tensor/strided_view.hpp>

/// @file
/// The library's ranges as range-v3 views, and views that deal data to ranks. Opt-in: no other
/// header includes this one. Programs that include it link range-v3; in CMake, the target of
/// find_package(range-v3).

// range-v3 and std::ranges do not ask each other which classes are views.

template <class T>
inline constexpr bool ranges::enable_view<joinable::StridedView<T>> = true;

template <class Base>
inline constexpr bool ranges::enable_view<joinable::BucketedView<Base>> =
    std::ranges::enable_view<joinable::BucketedView<Base>> || ranges::enable_view<Base>;

template <class Base>
inline constexpr bool ranges::enable_view<joinable::Shard<Base, joinable::detail::Stride>> =
    joinable::detail::is_view<Base> || ranges::enable_view<Base>;

template <class BaseIterator>
inline constexpr bool ranges::enable_view<joinable::detail::LazyBucket<BaseIterator>> = true;
template <class BaseIterator>
inline constexpr bool ranges::enable_borrowed_range<joinable::detail::LazyBucket<BaseIterator>> =
    true;

namespace joinable { inline namespace v0 {

/// The place of one parameter's gradient: its bucket, and the element at which it begins.
struct BucketSlot {
    std::size_t bucket = 0;
    std::size_t parameter = 0; ///< its index
    std::size_t offset = 0;    ///< in elements
    std::size_t length = 0;    ///< in elements

    friend constexpr bool operator==(BucketSlot const&, BucketSlot const&) = default;
};

namespace views {

namespace detail {

/// Each slot begins where the previous one in the bucket ends.
inline BucketSlot place_after(BucketSlot const& previous, BucketSlot slot) {
    slot.offset = previous.offset + previous.length;
    return slot;
}
/// The slots of all buckets. `slots_of(b, bucket)` has those of one, without their offsets.
template <class Buckets, class SlotsOf>
[[nodiscard]] auto placed_slots(Buckets&& buckets, SlotsOf slots_of) {
    return ranges::views::enumerate(std::forward<Buckets>(buckets)) |
           ranges::views::transform([slots_of](auto const& numbered) {
               return slots_of(numbered.first, numbered.second) |
                      ranges::views::partial_sum(place_after);
           }) |
           ranges::views::join;
}

} // namespace detail

/// The slots of a layout, bucket by bucket, as an input range. Valid as long as the layout. Local.
/// Not called slots: that word is a macro in sources that include Qt.
[[nodiscard]] inline auto bucket_slots(BucketLayout const& layout) {
    return detail::placed_slots(layout.buckets(), [](std::size_t b, Bucket const& bucket) {
        return ranges::views::zip(bucket.parameters, bucket.views) |
               ranges::views::transform([b](auto const& member) {
                   return BucketSlot{b, member.first, 0, member.second.numel()};
               });
    });
}
void bucket_slots(BucketLayout const&&) = delete; // it would be destroyed before its slots are read

/// The slots that the buckets of a BucketedView would have, without memory for them. Offsets are
/// those of a layout that takes the parameters in the order of the view. A lazy input range; valid
/// as long as the range below the view. Local.
template <class Base>
[[nodiscard]] auto bucket_slots(BucketedView<Base> buckets) {
    static_assert(
        ranges::enable_view<BucketedView<Base>>,
        "bucket_slots: the view owns its parameters, which would be destroyed before the slots are "
        "read; give the range of parameters a name"
    );
    return detail::placed_slots(std::move(buckets), [](std::size_t b, auto const& bucket) {
        return ranges::views::iota(bucket.begin(), bucket.end()) |
               ranges::views::transform([b](auto const& member) {
                   auto const size = joinable::detail::tensor_size_of(*member);
                   return BucketSlot{b, member.index(), 0, size.numel};
               });
    });
}

/// `range | contiguous_shard(rank, world)`: this rank's part of a sized range that is dealt in
/// blocks, in rank order. Nothing is trimmed or padded: of n elements the first n % world ranks
/// have one more than the others. Local.
/// @throws ContractViolation  the rank is out of range.
[[nodiscard]] inline auto contiguous_shard(int rank, int world) {
    return ranges::make_view_closure([share = Share{rank, world}]<class Range>(Range&& range) {
        static_assert(
            ranges::sized_range<Range>,
            "contiguous_shard: the range must know its size; use strided_shard, which needs none"
        );
        using Difference = ranges::range_difference_t<Range>;
        auto const n = static_cast<std::size_t>(ranges::size(range));
        auto const [r, w, length] = joinable::detail::Stride::of(n, share);
        std::size_t const first = r * (n / w) + (std::min)(r, n % w);
        return ranges::views::all(std::forward<Range>(range)) |
               ranges::views::drop_exactly(static_cast<Difference>(first)) |
               ranges::views::take_exactly(static_cast<Difference>(length));
    });
}

/// `range | strided_shard(rank, world)`: elements rank, rank + world, rank + 2 * world, ... as
/// shard deals them, from a range that need not be random access. Local.
/// @throws ContractViolation  the rank is out of range.
[[nodiscard]] inline auto strided_shard(int rank, int world) {
    return ranges::make_view_closure([share = Share{rank, world}]<class Range>(Range&& range) {
        using Difference = ranges::range_difference_t<Range>;
        return ranges::views::all(std::forward<Range>(range)) |
               ranges::views::drop(static_cast<Difference>(share.rank())) |
               ranges::views::stride(static_cast<Difference>(share.size()));
    });
}

/// The ranks that still have an input in round `round` (from 0), ascending; rank r has `lengths[r]`
/// inputs. The others shadow that round. Valid as long as `lengths`. Local.
[[nodiscard]] inline auto active_ranks(std::span<std::size_t const> lengths, std::size_t round) {
    return ranges::views::iota(0, static_cast<int>(lengths.size())) |
           ranges::views::filter([lengths, round](int rank) {
               return round < lengths[static_cast<std::size_t>(rank)];
           });
}
void active_ranks(std::vector<std::size_t>&& lengths, std::size_t round) =
    delete; // it would dangle

/// The active ranks of every round of a guard that ends when all ranks have run out
/// (EndPolicy::drain): a random-access range with one range of ranks per round. Valid as long as
/// `lengths`. Local; finding the number of rounds is linear in the ranks.
[[nodiscard]] inline auto rounds(std::span<std::size_t const> lengths) {
    auto const longest = std::max_element(lengths.begin(), lengths.end());
    return ranges::views::iota(std::size_t{0}, longest == lengths.end() ? 0 : *longest) |
           ranges::views::transform([lengths](std::size_t round) {
               return active_ranks(lengths, round);
           });
}
void rounds(std::vector<std::size_t>&& lengths
) = delete; // it would dangle when the rounds are read

} // namespace views

}} // namespace joinable::v0
