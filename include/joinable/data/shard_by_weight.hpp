// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/data/shard.hpp>
#include <joinable/data/shuffle.hpp>
#include <joinable/detail/kept_range.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class W>
concept is_weight = (std::integral<W> && !std::same_as<W, bool>) || std::floating_point<W>;

/// The type in which weights are summed: exact for integers.
template <class W>
using WeightSum = std::conditional_t<std::integral<W>, std::uint64_t, double>;

template <class W>
[[nodiscard]] constexpr bool is_valid_weight(W weight) noexcept {
    if constexpr (std::unsigned_integral<W>) {
        return true;
    } else { // NaN fails both comparisons
        return weight >= 0 &&
               static_cast<WeightSum<W>>(weight) <= (std::numeric_limits<WeightSum<W>>::max)();
    }
}

/// @throws ContractViolation  a weight is negative or not finite, or their sum is too large.
template <class Range, class Weight>
[[nodiscard]] auto weights_of(Range const& range, Weight& weight) {
    using W = std::remove_cvref_t<decltype(std::invoke(weight, *std::begin(range)))>;
    using Load = WeightSum<W>;
    std::vector<Load> weights;
    weights.reserve(count_of(range));
    Load left = (std::numeric_limits<Load>::max)();
    for (auto const& element : range) {
        W const given = std::invoke(weight, element);
        if (!is_valid_weight(given)) {
            throw ContractViolation{concat(
                "shard_by_weight: the weight of an element must be finite and not negative, but "
                "that of element ",
                weights.size(),
                " is ",
                std::conditional_t<std::integral<W>, W, double>(given)
            )};
        }
        auto const value = static_cast<Load>(given);
        if (value > left) {
            throw ContractViolation{concat(
                "shard_by_weight: the weights up to element ",
                weights.size(),
                " add up to more than ",
                (std::numeric_limits<Load>::max)(),
                "; give them in a larger unit"
            )};
        }
        left -= value;
        weights.push_back(value);
    }
    return weights;
}

/// The elements of the rank, in the order of `order`, a permutation of all elements. The heaviest
/// element goes first; each goes to the least loaded rank.
template <class Weight>
[[nodiscard]] std::vector<std::size_t> longest_processing_time_first(
    std::span<Weight const> weights, Share share, std::vector<std::size_t> order
) {
    struct Load {
        Weight weight = 0;
        std::size_t count = 0; ///< or one rank would get all elements without a weight
        int rank = 0;
    };
    auto const is_behind = [](Load const& a, Load const& b) {
        return std::tie(a.weight, a.count, a.rank) > std::tie(b.weight, b.count, b.rank);
    };
    std::vector<std::size_t> places(order.size()); // in `order`, heaviest first
    std::iota(places.begin(), places.end(), std::size_t{0});
    // Not std::stable_sort: clang 19 warns of what libstdc++ 12 calls in it.
    std::sort(places.begin(), places.end(), [&](std::size_t a, std::size_t b) {
        return std::tie(weights[order[b]], a) < std::tie(weights[order[a]], b);
    });
    std::vector<Load> loads(static_cast<std::size_t>(share.size()));
    for (std::size_t rank = 0; rank < loads.size(); ++rank) {
        loads[rank].rank = static_cast<int>(rank);
    } // ascending: already a heap
    std::vector<bool> is_own(weights.size());
    for (std::size_t const place : places) {
        std::pop_heap(loads.begin(), loads.end(), is_behind);
        Load& least = loads.back();
        least.weight += weights[order[place]];
        ++least.count;
        is_own[order[place]] = least.rank == share.rank();
        std::push_heap(loads.begin(), loads.end(), is_behind);
    }
    std::erase_if(order, [&](std::size_t element) { return !is_own[element]; });
    order.shrink_to_fit();
    return order;
}

template <class Range, class Weight>
[[nodiscard]] auto
deal_by_weight(Range&& range, Share share, Weight& weight, std::vector<std::size_t> order) {
    static_assert(
        is_weight<std::remove_cvref_t<decltype(std::invoke(weight, *std::begin(range)))>>,
        "shard_by_weight: the weight of an element must be an integer or a floating-point number"
    );
    auto const weights = weights_of(range, weight);
    auto positions = longest_processing_time_first(std::span{weights}, share, std::move(order));
    return Shard<Kept<Range>, std::vector<std::size_t>>{
        keep(std::forward<Range>(range)), std::move(positions)
    };
}

} // namespace detail

/// The elements that one rank works on when a range is dealt by weight, in the order of the range.
/// Ranks get about the same total weight although elements differ, as files differ in length. Every
/// element belongs to one rank. Local; the range and its weights must be the same on all ranks.
///
///     for (File const& file : joinable::shard_by_weight(files, comm, &File::bytes)) { ... }
///
/// `weight` is called once with each element, in order, and returns an integer or a floating-point
/// number that is not negative. Elements are dealt from the heaviest on. Each goes to the rank with
/// the smallest sum so far; ties go to the rank with the fewest elements, then to the lowest rank.
/// The largest sum of a rank is at most 4/3 - 1/(3 * size) times the optimum: Graham, "Bounds on
/// multiprocessing timing anomalies" (SIAM J. Appl. Math. 17, 1969), theorem 2.
///
/// The range: as for shard. The result owns a list of its positions.
/// @throws ContractViolation  a weight is negative or not finite, or the sum of all weights does
///         not fit into a std::uint64_t (of integers) or a double.
/// Complexity: n log n + n log size comparisons for n elements, on every rank. Memory for a weight
/// and two positions per element during construction.
template <class Range, class Weight>
[[nodiscard]] auto shard_by_weight(Range&& range, Share share, Weight weight) {
    std::vector<std::size_t> order(detail::count_of(range));
    std::iota(order.begin(), order.end(), std::size_t{0});
    return detail::deal_by_weight(std::forward<Range>(range), share, weight, std::move(order));
}

/// The same in the order of an epoch. Elements of equal weight are dealt at random; the ranks' sums
/// of weights are the same in every epoch.
template <class Range, class Weight>
[[nodiscard]] auto shard_by_weight(Range&& range, Share share, Weight weight, Shuffle shuffle) {
    auto order = permutation(detail::count_of(range), shuffle);
    return detail::deal_by_weight(std::forward<Range>(range), share, weight, std::move(order));
}

}} // namespace joinable::v0
