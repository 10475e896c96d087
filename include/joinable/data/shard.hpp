// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/data/shuffle.hpp>
#include <joinable/detail/kept_range.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// One rank's share of a range. Any object with rank() and size() converts to it, and so does
/// `{rank, size}`. A rank with several workers gives each its own share:
/// `{rank * workers + worker, size * workers}`.
class Share {
public:
    /// @throws ContractViolation  the rank is out of range.
    constexpr Share(int rank, int size) : rank_{rank}, size_{size} {
        if (rank < 0 || rank >= size) {
            throw ContractViolation{detail::concat(
                "a shard is for a rank from 0 to the number of ranks - 1, but got rank ",
                rank,
                " of ",
                size
            )};
        }
    }
    template <class Comm>
        requires detail::has_rank<Comm> && detail::has_size<Comm>
    // NOLINTNEXTLINE(google-explicit-constructor)
    constexpr Share(Comm const& comm)
        : Share{static_cast<int>(comm.rank()), static_cast<int>(comm.size())} {}

    [[nodiscard]] constexpr int rank() const noexcept { return rank_; }
    [[nodiscard]] constexpr int size() const noexcept { return size_; }

private:
    int rank_;
    int size_;
};

namespace detail {

/// The positions `first`, `first + step`, ... without a list in memory.
struct Stride {
    std::size_t first = 0;
    std::size_t step = 1;
    std::size_t count = 0;

    /// Deals `count` elements one by one.
    static constexpr Stride of(std::size_t count, Share share) noexcept {
        auto const rank = static_cast<std::size_t>(share.rank());
        auto const size = static_cast<std::size_t>(share.size());
        return {rank, size, count / size + (rank < count % size ? 1 : 0)};
    }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return count; }
    [[nodiscard]] constexpr std::size_t operator[](std::size_t i) const noexcept {
        return first + i * step;
    }
};

/// The form of the positions that iterators keep.
constexpr Stride cursor_of(Stride const& positions) noexcept {
    return positions;
}
constexpr std::size_t const* cursor_of(std::vector<std::size_t> const& positions) noexcept {
    return positions.data();
}

template <class Range>
concept has_sized_random_access = requires(Range& range) {
    { std::begin(range) } -> std::random_access_iterator;
    { std::end(range) } -> std::sized_sentinel_for<decltype(std::begin(range))>;
};

/// Explains what cannot be dealt out.
template <class Range>
[[nodiscard]] consteval bool can_be_dealt() {
    static_assert(
        !std::integral<Range>,
        "shard: expected a range of inputs; for a number of inputs give std::views::iota(0, inputs)"
    );
    static_assert(
        std::integral<Range> || has_sized_random_access<Range const>,
        "shard: the range must be random access and sized, also when it is const; copy it into a "
        "std::vector first"
    );
    return has_sized_random_access<Range const>;
}

template <class Range>
[[nodiscard]] constexpr std::size_t count_of(Range const& range) {
    static_cast<void>(can_be_dealt<Range>());
    return static_cast<std::size_t>(std::end(range) - std::begin(range));
}

} // namespace detail

/// Some elements of a range, in their own order. A sized random-access range.
///
/// `Base` keeps the range: a reference or the range itself. `Positions` are positions in it: a list
/// or a rule. Iterators are valid as long as the shard. With a rule and a referenced range they are
/// valid as long as the range. Made by shard and shard_by_weight.
template <class Base, class Positions>
class Shard {
public:
    using base_iterator = decltype(std::begin(std::declval<Base const&>()));

    class iterator {
        using Cursor = decltype(detail::cursor_of(std::declval<Positions const&>()));

    public:
        using value_type = std::iter_value_t<base_iterator>;
        using difference_type = std::ptrdiff_t;
        using reference = std::iter_reference_t<base_iterator>;
        using pointer = std::add_pointer_t<reference>;
        using iterator_concept = std::random_access_iterator_tag;
        using iterator_category = std::conditional_t<
            std::is_lvalue_reference_v<reference>,
            std::random_access_iterator_tag,
            std::input_iterator_tag>; // the old tag promises references to elements

        iterator() = default;
        constexpr iterator(base_iterator const& base, Cursor cursor, std::size_t place)
            : base_{base}, cursor_{cursor}, place_{static_cast<std::ptrdiff_t>(place)} {}

        /// The position of this element in the underlying range.
        [[nodiscard]] constexpr std::size_t index() const {
            return cursor_[static_cast<std::size_t>(place_)];
        }
        [[nodiscard]] constexpr reference operator*() const {
            return base_[static_cast<std::iter_difference_t<base_iterator>>(index())];
        }
        [[nodiscard]] constexpr pointer operator->() const
            requires std::is_lvalue_reference_v<reference>
        {
            return std::addressof(**this);
        }
        [[nodiscard]] constexpr reference operator[](std::ptrdiff_t n) const {
            return *(*this + n);
        }
        constexpr iterator& operator++() { return *this += 1; }
        constexpr iterator& operator--() { return *this -= 1; }
        constexpr iterator operator++(int) { return std::exchange(*this, *this + 1); }
        constexpr iterator operator--(int) { return std::exchange(*this, *this - 1); }
        constexpr iterator& operator+=(std::ptrdiff_t n) {
            place_ += n;
            return *this;
        }
        constexpr iterator& operator-=(std::ptrdiff_t n) { return *this += -n; }
        friend constexpr iterator operator+(iterator it, std::ptrdiff_t n) { return it += n; }
        friend constexpr iterator operator+(std::ptrdiff_t n, iterator it) { return it += n; }
        friend constexpr iterator operator-(iterator it, std::ptrdiff_t n) { return it -= n; }
        friend constexpr std::ptrdiff_t operator-(iterator const& a, iterator const& b) {
            return a.place_ - b.place_;
        }
        friend constexpr bool operator==(iterator const& a, iterator const& b) {
            return a.place_ == b.place_;
        }
        friend constexpr auto operator<=>(iterator const& a, iterator const& b) {
            return a.place_ <=> b.place_;
        }

    private:
        base_iterator base_{};
        Cursor cursor_{};
        std::ptrdiff_t place_ = 0; ///< in the shard
    };

    Shard() = default;
    /// @pre every position lies in the range.
    constexpr Shard(Base base, Positions positions)
        : base_{std::move(base)}, positions_{std::move(positions)} {}

    [[nodiscard]] constexpr iterator begin() const { return at(0); }
    [[nodiscard]] constexpr iterator end() const { return at(size()); }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return positions_.size(); }
    [[nodiscard]] constexpr bool empty() const noexcept { return size() == 0; }
    /// @pre i < size()
    [[nodiscard]] constexpr decltype(auto) operator[](std::size_t i) const { return *at(i); }
    /// The position in the underlying range of element `i`. @pre i < size()
    [[nodiscard]] constexpr std::size_t index(std::size_t i) const { return positions_[i]; }

private:
    [[nodiscard]] constexpr iterator at(std::size_t place) const {
        return {std::begin(base_), detail::cursor_of(positions_), place};
    }

    Base base_{};
    Positions positions_{};
};

/// The elements that one rank works on when a range is dealt to all ranks one by one: elements
/// rank, rank + size, rank + 2 * size, ... Every element belongs to one rank. Nothing is padded and
/// nothing is dropped, so ranks may differ by one element, and some have none if there are fewer
/// elements than ranks. A Join guard allows this. Local; the range must be the same on all ranks.
///
/// Elements are dealt one by one, not in blocks. Round k of all ranks thus takes the elements from
/// k * size on, in the order in which a single rank would take them. If the data is sorted by label
/// or length, each rank still gets elements from everywhere.
///
///     for (auto& batch : joinable::shard(batches, comm)) { ... }
///
/// The range must be random access (also when const) and sized, and must keep its size while the
/// shard is used. A named container is referenced. A view is copied. A temporary container is moved
/// into the result; copying such a result copies the container, so it is not a view. Constant time
/// and no memory.
template <class Range>
[[nodiscard]] constexpr auto shard(Range&& range, Share share) {
    if constexpr (detail::can_be_dealt<std::remove_cvref_t<Range>>()) {
        detail::Stride const positions = detail::Stride::of(detail::count_of(range), share);
        return Shard<detail::Kept<Range>, detail::Stride>{
            detail::keep(std::forward<Range>(range)), positions
        };
    } else {
        return std::span<int const>{}; // a loop over it adds no error of its own
    }
}

/// Explains swapped arguments.
template <class Comm, class Range>
    requires detail::has_rank<Comm> && detail::has_size<Comm> &&
             (!std::convertible_to<Range, Share>)
constexpr auto shard(Comm const&, Range&&, Shuffle = {}) {
    static_assert(
        std::convertible_to<Range, Share>,
        "shard: the range comes first and then the communicator, as in shard(batches, comm)"
    );
}

/// The same for the range in the order of an epoch, which is the same on all ranks. Every epoch
/// deals and orders anew. The result owns a list of its positions.
///
///     for (auto& batch : joinable::shard(batches, comm, {.seed = 7, .epoch = epoch})) { ... }
///
/// Complexity: linear in the range, on every rank. Memory for one position per element during
/// construction, and per own element afterwards.
template <class Range>
[[nodiscard]] constexpr auto shard(Range&& range, Share share, Shuffle shuffle) {
    if constexpr (detail::can_be_dealt<std::remove_cvref_t<Range>>()) {
        auto const dealt = joinable::shard(permutation(detail::count_of(range), shuffle), share);
        return Shard<detail::Kept<Range>, std::vector<std::size_t>>{
            detail::keep(std::forward<Range>(range)),
            std::vector<std::size_t>(dealt.begin(), dealt.end())
        };
    } else {
        return std::span<int const>{};
    }
}

}} // namespace joinable::v0

/// A view, unless it owns its range or a list, which a copy would copy, too.
template <class Base>
inline constexpr bool std::ranges::enable_view<joinable::Shard<Base, joinable::detail::Stride>> =
    joinable::detail::is_view<Base>;
template <class Base>
inline constexpr bool
    std::ranges::enable_borrowed_range<joinable::Shard<Base, joinable::detail::Stride>> =
        joinable::detail::is_borrowed<Base>;
