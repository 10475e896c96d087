// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <compare>
#include <cstddef>
#include <iterator>
#include <utility>

namespace joinable_tests {

/// The numbers from 0 on, made while they are read: a view in every compiler's eyes.
class Counting {
public:
    class iterator {
    public:
        using value_type = std::size_t;
        using difference_type = std::ptrdiff_t;
        using iterator_concept = std::random_access_iterator_tag;

        iterator() = default;
        explicit constexpr iterator(std::ptrdiff_t at) : at_{at} {}
        constexpr std::size_t operator*() const { return static_cast<std::size_t>(at_); }
        constexpr std::size_t operator[](std::ptrdiff_t n) const { return *(*this + n); }
        constexpr iterator& operator++() { return *this += 1; }
        constexpr iterator& operator--() { return *this += -1; }
        constexpr iterator operator++(int) { return std::exchange(*this, *this + 1); }
        constexpr iterator operator--(int) { return std::exchange(*this, *this - 1); }
        constexpr iterator& operator+=(std::ptrdiff_t n) {
            at_ += n;
            return *this;
        }
        constexpr iterator& operator-=(std::ptrdiff_t n) { return *this += -n; }
        friend constexpr iterator operator+(iterator it, std::ptrdiff_t n) { return it += n; }
        friend constexpr iterator operator+(std::ptrdiff_t n, iterator it) { return it += n; }
        friend constexpr iterator operator-(iterator it, std::ptrdiff_t n) { return it -= n; }
        friend constexpr std::ptrdiff_t operator-(iterator a, iterator b) { return a.at_ - b.at_; }
        friend constexpr auto operator<=>(iterator, iterator) = default;

    private:
        std::ptrdiff_t at_ = 0;
    };
    struct sentinel {
        std::ptrdiff_t at = 0;
        friend constexpr bool operator==(iterator it, sentinel end) { return it - end == 0; }
        friend constexpr std::ptrdiff_t operator-(sentinel end, iterator it) { return -(it - end); }
        friend constexpr std::ptrdiff_t operator-(iterator it, sentinel end) {
            return it - iterator{end.at};
        }
    };

    Counting() = default;
    explicit constexpr Counting(std::size_t count) : count_{static_cast<std::ptrdiff_t>(count)} {}
    [[nodiscard]] constexpr iterator begin() const { return {}; }
    [[nodiscard]] constexpr sentinel end() const { return {count_}; }

private:
    std::ptrdiff_t count_ = 0;
};

} // namespace joinable_tests

template <>
inline constexpr bool std::ranges::enable_view<joinable_tests::Counting> = true;
