// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>

#include <joinable/tensor/tensor.hpp>

namespace joinable { inline namespace v0 {

/// A non-owning tensor of up to `max_tensor_rank` dimensions whose elements need not be contiguous.
/// Cheap to copy. Iterates over all elements in row-major order of their indices.
template <class T>
class StridedView {
public:
    using value_type = std::remove_const_t<T>;

    class iterator {
    public:
        using value_type = std::remove_const_t<T>;
        using difference_type = std::ptrdiff_t;
        using reference = T&;
        using pointer = T*;
        using iterator_category = std::random_access_iterator_tag;

        iterator() = default;
        iterator(StridedView const* view, std::size_t position) noexcept
            : view_{view}, position_{position} {}

        reference operator*() const noexcept { return view_->data_[view_->offset_of(position_)]; }
        pointer operator->() const noexcept { return &**this; }
        reference operator[](difference_type n) const noexcept { return *(*this + n); }
        iterator& operator++() noexcept { return *this += 1; }
        iterator& operator--() noexcept { return *this -= 1; }
        iterator operator++(int) noexcept { return std::exchange(*this, *this + 1); }
        iterator operator--(int) noexcept { return std::exchange(*this, *this - 1); }
        iterator& operator+=(difference_type n) noexcept {
            position_ = static_cast<std::size_t>(static_cast<difference_type>(position_) + n);
            return *this;
        }
        iterator& operator-=(difference_type n) noexcept { return *this += -n; }
        friend iterator operator+(iterator it, difference_type n) noexcept { return it += n; }
        friend iterator operator+(difference_type n, iterator it) noexcept { return it += n; }
        friend iterator operator-(iterator it, difference_type n) noexcept { return it -= n; }
        friend difference_type operator-(iterator const& a, iterator const& b) noexcept {
            return static_cast<difference_type>(a.position_) -
                   static_cast<difference_type>(b.position_);
        }
        friend bool operator==(iterator const& a, iterator const& b) noexcept {
            return a.position_ == b.position_;
        }
        friend auto operator<=>(iterator const& a, iterator const& b) noexcept {
            return a.position_ <=> b.position_;
        }

    private:
        StridedView const* view_ = nullptr; ///< iterators are valid as long as the view object
        std::size_t position_ = 0;
    };

    StridedView() = default;

    /// @throws ContractViolation  extents and strides differ in number, one is negative (a signed
    ///                            number converted to std::size_t), or the view is larger than
    ///                            memory can be.
    StridedView(T* data, Shape const& extents, Shape const& strides)
        : data_{data}, extents_{extents}, strides_{strides} {
        (void)detail::checked_reach(extents, strides, sizeof(T));
        numel_ = joinable::numel(extents);
    }

    /// A view of mutable elements converts to a view of const elements.
    template <class U>
        requires std::same_as<U const, T> && (!std::is_const_v<U>)
    // NOLINTNEXTLINE(google-explicit-constructor)
    StridedView(StridedView<U> const& other)
        : StridedView{other.data(), other.extents(), other.strides()} {}

    [[nodiscard]] T* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t numel() const noexcept { return numel_; }
    [[nodiscard]] std::size_t size() const noexcept { return numel_; }
    [[nodiscard]] Shape const& extents() const noexcept { return extents_; }
    [[nodiscard]] Shape const& strides() const noexcept { return strides_; }
    [[nodiscard]] bool is_contiguous() const { return joinable::is_contiguous(extents_, strides_); }

    /// The element at one index per dimension. @pre every index is below its extent.
    template <std::convertible_to<std::size_t>... Indices>
    T& operator()(Indices... indices) const {
        if (sizeof...(Indices) != extents_.size()) {
            throw ContractViolation{
                "a view of " + detail::to_text(extents_.size()) + " dimensions was given " +
                detail::to_text(sizeof...(Indices)) + " indices"
            };
        }
        std::size_t offset = 0;
        std::size_t dimension = 0;
        ((offset += static_cast<std::size_t>(indices) * strides_[dimension++]), ...);
        return data_[offset];
    }

    [[nodiscard]] iterator begin() const noexcept { return {this, 0}; }
    [[nodiscard]] iterator end() const noexcept { return {this, numel_}; }

private:
    [[nodiscard]] std::size_t offset_of(std::size_t position) const noexcept {
        std::size_t offset = 0;
        for (std::size_t d = extents_.size(); d-- > 0;) {
            offset += position % extents_[d] * strides_[d];
            position /= extents_[d];
        }
        return offset;
    }

    T* data_ = nullptr;
    Shape extents_{0}; ///< a default-constructed view has no elements
    Shape strides_{1};
    std::size_t numel_ = 0;
};

template <class T>
    requires Element<std::remove_const_t<T>>
struct tensor_traits<StridedView<T>> {
    using value_type = std::remove_const_t<T>;
    static T* data(StridedView<T> const& view) noexcept { return view.data(); }
    static Shape const& extents(StridedView<T> const& view) noexcept { return view.extents(); }
    static Shape const& strides(StridedView<T> const& view) noexcept { return view.strides(); }
};

/// Views contiguous storage with any extents and strides, starting at element `offset`. Local.
/// Negative strides are refused: by the compiler in a list of constants, else at run time.
/// @throws ContractViolation  the view would reach beyond the storage; also as StridedView.
template <class Storage>
[[nodiscard]] auto as_strided(
    Storage&& storage,
    std::span<std::size_t const> extents,
    std::span<std::size_t const> strides,
    std::size_t offset = 0
) {
    static_assert(
        std::contiguous_iterator<decltype(std::begin(storage))>,
        "as_strided: the storage must be a contiguous range, such as std::vector or std::span"
    );
    static_assert(
        std::is_lvalue_reference_v<Storage> ||
            std::ranges::enable_borrowed_range<std::remove_cv_t<Storage>>,
        "as_strided: a temporary storage would be destroyed before the view is used; give it a name"
    );
    using T = std::remove_pointer_t<decltype(std::data(storage))>;
    StridedView<T> const whole{std::data(storage), Shape{extents}, Shape{strides}};
    std::size_t const needed = detail::checked_reach(whole.extents(), whole.strides(), sizeof(T));
    std::size_t const given = std::size(storage);
    if (offset > given || needed > given - offset) {
        throw ContractViolation{
            "a strided view needs " + detail::to_text(needed) + " elements from offset " +
            detail::to_text(offset) + " on, but the storage has " + detail::to_text(given) +
            "; make extents, strides or the offset smaller"
        };
    }
    return StridedView<T>{whole.data() + offset, whole.extents(), whole.strides()};
}

template <class Storage>
[[nodiscard]] auto as_strided(
    Storage&& storage,
    std::initializer_list<std::size_t> extents,
    std::initializer_list<std::size_t> strides,
    std::size_t offset = 0
) {
    return as_strided(
        std::forward<Storage>(storage),
        std::span<std::size_t const>{extents.begin(), extents.size()},
        std::span<std::size_t const>{strides.begin(), strides.size()},
        offset
    );
}

/// The part of a view with indices [start, start + length) in one dimension. Local.
/// @throws ContractViolation  the dimension does not exist, or the range is not within it.
template <class T>
[[nodiscard]] StridedView<T>
narrow(StridedView<T> const& view, std::size_t dimension, std::size_t start, std::size_t length) {
    if (dimension >= view.extents().size()) {
        throw ContractViolation{detail::concat(
            "narrow: there is no dimension ", dimension, " in a view of ", view.extents().size()
        )};
    }
    std::size_t const extent = view.extents()[dimension];
    if (start > extent || length > extent - start) {
        throw ContractViolation{
            "narrow: " + detail::to_text(length) + " elements from " + detail::to_text(start) +
            " on are not in dimension " + detail::to_text(dimension) + ", which has " +
            detail::to_text(extent)
        };
    }
    Shape extents = view.extents();
    extents[dimension] = length;
    // An empty view keeps the pointer, which must not leave the storage.
    T* const data = length == 0 ? view.data() : view.data() + start * view.strides()[dimension];
    return {data, extents, view.strides()};
}

}} // namespace joinable::v0
