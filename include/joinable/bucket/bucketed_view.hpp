// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/tensor_size.hpp>
#include <joinable/detail/kept_range.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class Range>
concept has_multi_pass_iterators = requires(Range& range) {
    { std::begin(range) } -> std::forward_iterator;
    { std::end(range) } -> std::same_as<decltype(std::begin(range))>;
};

/// The category that the legacy iterator tag may claim: it promises references to elements.
template <class Reference>
using tag_for_t = std::conditional_t<
    std::is_lvalue_reference_v<Reference>,
    std::forward_iterator_tag,
    std::input_iterator_tag>;

/// One bucket of a BucketedView: the elements of the underlying range that share it, in order.
/// Elements are found while they are read, never beyond the last one requested. Valid as long as
/// the underlying range.
template <class BaseIterator>
class LazyBucket {
public:
    class iterator {
    public:
        using value_type = std::iter_value_t<BaseIterator>;
        using difference_type = std::ptrdiff_t;
        using reference = std::iter_reference_t<BaseIterator>;
        using pointer = void;
        using iterator_concept = std::forward_iterator_tag;
        using iterator_category = detail::tag_for_t<reference>;

        iterator() = default;
        constexpr iterator(LazyBucket const& bucket, BaseIterator at, std::size_t index)
            : at_{at}, end_{bucket.end_}, index_{index}, kind_{bucket.kind_},
              bytes_{bucket.kind_.bytes()}, limit_{bucket.limit_} {}

        [[nodiscard]] constexpr reference operator*() const { return *at_; }
        /// The position of this element in the underlying range.
        [[nodiscard]] constexpr std::size_t index() const noexcept { return index_; }
        constexpr iterator& operator++() {
            if (bytes_ >= limit_) { // this element has closed the bucket
                at_ = end_;
                return *this;
            }
            for (++at_, ++index_; at_ != end_; ++at_, ++index_) {
                TensorSize const size = detail::tensor_size_of(*at_);
                if (size.shares_buckets_with(kind_)) {
                    bytes_ += size.bytes();
                    break;
                }
            }
            return *this;
        }
        constexpr iterator operator++(int) {
            iterator const old = *this;
            ++*this;
            return old;
        }
        friend constexpr bool operator==(iterator const& a, iterator const& b) {
            return a.at_ == b.at_;
        }

    private:
        BaseIterator at_{};
        BaseIterator end_{};
        std::size_t index_ = 0;
        TensorSize kind_;
        std::size_t bytes_ = 0; ///< of the bucket, up to and with this element
        std::size_t limit_ = 0;
    };

    LazyBucket() = default;
    constexpr LazyBucket(
        BaseIterator first, BaseIterator end, std::size_t index, TensorSize kind, std::size_t limit
    )
        : first_{first}, end_{end}, index_{index}, kind_{kind}, limit_{limit} {}

    [[nodiscard]] constexpr iterator begin() const { return {*this, first_, index_}; }
    [[nodiscard]] constexpr iterator end() const { return {*this, end_, index_}; }
    [[nodiscard]] constexpr DType dtype() const noexcept { return kind_.dtype; }
    [[nodiscard]] constexpr DeviceId device() const noexcept { return kind_.device; }
    /// The limit in bytes of this bucket.
    [[nodiscard]] constexpr std::size_t limit() const noexcept { return limit_; }

private:
    BaseIterator first_{};
    BaseIterator end_{};
    std::size_t index_ = 0; ///< of first_
    TensorSize kind_;       ///< of its first element
    std::size_t limit_ = 0;
};

} // namespace detail

/// The buckets of a range of Tensors, Parameters or TensorSizes, as
/// compute_bucket_assignment_by_size gives them for the same limits. Each one is cut on demand. A
/// forward range of LazyBucket; iterators are valid as long as the view. `Base` keeps the range: a
/// reference or the range itself.
///
/// Buckets come in the order of their lowest elements, and buckets of different dtypes and devices
/// interleave. A bucket that closes early waits for buckets that began before it, but never for
/// what follows: the next bucket begins at the first element that no earlier one has taken. Finding
/// the beginning of a bucket reads at most the last elements of the earlier ones and the element
/// after those. Reading a bucket reads nothing beyond its last element, which is the one that
/// reaches the limit. A bucket that stays open is read to the end of the range. No bucket is
/// stored.
///
/// Complexity: reading all buckets is linear in the elements times the number of different dtypes
/// and devices. An iterator allocates a few words per dtype and device met so far.
template <class Base>
class BucketedView {
public:
    using base_iterator = decltype(std::begin(std::declval<Base const&>()));

    class iterator {
    public:
        using value_type = detail::LazyBucket<base_iterator>;
        using difference_type = std::ptrdiff_t;
        using reference = value_type;
        using pointer = void;
        using iterator_concept = std::forward_iterator_tag;
        using iterator_category = std::input_iterator_tag; // buckets are values, not references

        iterator() = default;
        constexpr iterator(BucketedView const& view, base_iterator first)
            : view_{&view}, first_{first} {}

        [[nodiscard]] constexpr value_type operator*() const {
            TensorSize const kind = detail::tensor_size_of(*first_);
            std::size_t cut = 0;
            for (Kind const& known : kinds_) {
                if (known.size.shares_buckets_with(kind)) {
                    cut = known.buckets;
                }
            }
            auto const& limits = view_->limits_;
            return {
                first_,
                std::end(view_->base_),
                index_,
                kind,
                limits[(std::min)(cut, limits.size() - 1)]
            };
        }
        constexpr iterator& operator++() {
            take(**this);
            auto const end = std::end(view_->base_);
            do {
                ++first_;
                ++index_;
            } while (first_ != end && is_taken(index_, detail::tensor_size_of(*first_)));
            return *this;
        }
        constexpr iterator operator++(int) {
            iterator const old = *this;
            ++*this;
            return old;
        }
        friend constexpr bool operator==(iterator const& a, iterator const& b) {
            return a.first_ == b.first_;
        }

    private:
        struct Kind {
            TensorSize size;       ///< of one such tensor
            std::size_t buckets;   ///< how many of its buckets were passed
            std::size_t taken_end; ///< the position after their last element
        };

        constexpr void take(value_type const& bucket) {
            std::size_t last = index_;
            for (auto it = bucket.begin(); it != bucket.end(); ++it) {
                last = it.index();
            }
            TensorSize const size{0, bucket.dtype(), bucket.device()};
            for (Kind& known : kinds_) {
                if (known.size.shares_buckets_with(size)) {
                    ++known.buckets;
                    known.taken_end = last + 1;
                    return;
                }
            }
            kinds_.push_back({size, 1, last + 1});
        }
        [[nodiscard]] constexpr bool is_taken(std::size_t index, TensorSize const& size) const {
            return std::any_of(kinds_.begin(), kinds_.end(), [&](Kind const& known) {
                return index < known.taken_end && known.size.shares_buckets_with(size);
            });
        }

        BucketedView const* view_ = nullptr;
        base_iterator first_{};
        std::size_t index_ = 0; ///< of first_
        std::vector<Kind> kinds_;
    };

    BucketedView() = default;
    /// @throws ContractViolation  no limit is given.
    constexpr BucketedView(Base base, std::span<std::size_t const> limits)
        : base_{std::move(base)}, limits_(limits.begin(), limits.end()) {
        if (limits.empty()) {
            throw ContractViolation{"views::bucketed needs at least one limit, but got none"};
        }
    }

    [[nodiscard]] constexpr iterator begin() const { return {*this, std::begin(base_)}; }
    [[nodiscard]] constexpr iterator end() const { return {*this, std::end(base_)}; }

private:
    Base base_{};
    std::vector<std::size_t> limits_; ///< few: copying them with the view is cheap
};

namespace views {

namespace detail {

/// The right operand of `range | bucketed(limits)`.
class BucketedClosure {
public:
    explicit constexpr BucketedClosure(std::span<std::size_t const> limits)
        : limits_(limits.begin(), limits.end()) {}

    template <class Range>
    friend constexpr auto operator|(Range&& range, BucketedClosure const& closure) {
        using Value = std::remove_cvref_t<Range>;
        static_assert(
            joinable::detail::has_tensor_size<decltype(*std::begin(range))>,
            "views::bucketed: the elements of the range must model Tensor or Parameter, or be a "
            "TensorSize; specialise joinable::tensor_traits for their type"
        );
        static_assert(
            joinable::detail::has_multi_pass_iterators<Value const>,
            "views::bucketed: the range must be a forward range also when it is const, and its "
            "begin and end of one type; copy it into a container first"
        );
        using Base = joinable::detail::Kept<Range>;
        return BucketedView<Base>{
            joinable::detail::keep(std::forward<Range>(range)), closure.limits_
        };
    }

private:
    std::vector<std::size_t> limits_;
};

} // namespace detail

/// `range | views::bucketed(limits)`: the BucketedView of a forward range. A named container is
/// referenced, a view is copied, a temporary container is moved into the result. Local; an empty
/// range has no buckets.
/// @throws ContractViolation  there are no limits.
[[nodiscard]] constexpr auto bucketed(std::span<std::size_t const> limits) {
    return detail::BucketedClosure{limits};
}
[[nodiscard]] constexpr auto bucketed(std::initializer_list<std::size_t> limits) {
    return detail::BucketedClosure{std::span<std::size_t const>{limits.begin(), limits.size()}};
}

} // namespace views

}} // namespace joinable::v0

/// A view, unless it owns its range, which a copy would copy, too.
template <class Base>
inline constexpr bool std::ranges::enable_view<joinable::BucketedView<Base>> =
    joinable::detail::is_view<Base>;

/// Its iterators refer only to the underlying range.
template <class BaseIterator>
inline constexpr bool
    std::ranges::enable_borrowed_range<joinable::detail::LazyBucket<BaseIterator>> = true;
template <class BaseIterator>
inline constexpr bool std::ranges::enable_view<joinable::detail::LazyBucket<BaseIterator>> = true;
