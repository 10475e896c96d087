// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/tensor/overlap.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The dimensions of extent above 1, sorted by stride, smallest first.
inline Shape dimensions_by_stride(Shape const& extents, Shape const& strides) {
    Shape order;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        if (extents[d] > 1) {
            order.push_back(d);
            for (std::size_t k = order.size() - 1; // insertion sort of at most eight
                 k > 0 && strides[order[k]] < strides[order[k - 1]];
                 --k) {
                std::swap(order[k], order[k - 1]);
            }
        }
    }
    return order;
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION bool is_non_overlapping_and_dense(Shape const& extents, Shape const& strides) {
    if (numel(extents) == 0) {
        return true;
    }
    std::size_t expected = 1;
    for (std::size_t const d : detail::dimensions_by_stride(extents, strides)) {
        if (strides[d] != expected) {
            return false;
        }
        expected *= extents[d];
    }
    return true;
}

}} // namespace joinable::v0

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void SumsOfStrides::add(std::size_t stride, std::size_t count) noexcept {
    if (stride != 0 && count > 1) {
        std::size_t place = size_++; // largest stride first
        for (; place > 0 && terms_[place - 1].stride < stride; --place) {
            terms_[place] = terms_[place - 1];
        }
        terms_[place] = {stride, count, 0, 0};
    }
}

JOINABLE_DEFINITION void SumsOfStrides::merge_equal_strides() noexcept {
    std::size_t merged = 0;
    for (std::size_t i = 0; i < size_; ++i) {
        if (merged != 0 && terms_[merged - 1].stride == terms_[i].stride) {
            terms_[merged - 1].count += terms_[i].count - 1;
        } else {
            terms_[merged++] = terms_[i];
        }
    }
    size_ = merged;
}

JOINABLE_DEFINITION bool SumsOfStrides::has(std::size_t total, int wanted) noexcept {
    std::size_t rest = 0;
    std::size_t divisor = 0;
    for (std::size_t i = size_; i-- > 0;) {
        rest += terms_[i].stride * (terms_[i].count - 1);
        divisor = std::gcd(divisor, terms_[i].stride);
        terms_[i].rest = rest;
        terms_[i].divisor = divisor;
    }
    wanted_ = wanted;
    steps_ = 0;
    search(0, total);
    return wanted_ <= 0;
}

JOINABLE_DEFINITION void SumsOfStrides::search(std::size_t i, std::size_t total) noexcept {
    if (i == size_) {
        wanted_ -= total == 0 ? 1 : 0;
        return;
    }
    Term const& term = terms_[i];
    if (total > term.rest || total % term.divisor != 0) {
        return;
    }
    std::size_t const later = term.rest - term.stride * (term.count - 1);
    std::size_t const first = total <= later ? 0 : (total - later + term.stride - 1) / term.stride;
    std::size_t const last = (std::min)(term.count - 1, total / term.stride);
    for (std::size_t k = first; k <= last && wanted_ > 0; ++k) {
        if (++steps_ > max_steps) {
            wanted_ = 0;
            return;
        }
        search(i + 1, total - k * term.stride);
    }
}

/// Whether each stride exceeds the distance that all smaller ones span. Then no two indices share
/// an element.
inline bool is_nested(Shape const& extents, Shape const& strides) {
    std::size_t reach = 0;
    for (std::size_t const d : dimensions_by_stride(extents, strides)) {
        if (strides[d] <= reach) {
            return false;
        }
        reach += strides[d] * (extents[d] - 1);
    }
    return true;
}

JOINABLE_DEFINITION bool is_overlapping(Shape const& extents, Shape const& strides) {
    if (numel(extents) < 2 || is_nested(extents, strides)) {
        return false;
    }
    // Two indices name one element if the difference of indices, each in -(extent - 1) to extent -
    // 1, steps to 0 without being 0. Counted from the lowest difference:
    SumsOfStrides sums;
    std::size_t total = 0;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        if (extents[d] > 1 && strides[d] == 0) {
            return true;
        }
        sums.add(strides[d], 2 * extents[d] - 1);
        total += strides[d] * (extents[d] - 1);
    }
    return sums.has(total, 2);
}

JOINABLE_DEFINITION std::string
text_of_overlap(AnyView const& view, std::string_view done_and_remedy) {
    return concat(
        " has elements that share memory (extents ",
        to_text(view.extents()),
        ", strides ",
        to_text(view.strides()),
        "), so it cannot be ",
        done_and_remedy
    );
}

JOINABLE_DEFINITION AddressRange AddressRange::of(AnyView const& view, std::size_t index) {
    if (view.data() == nullptr || view.numel() == 0) {
        return {};
    }
    auto const* const begin = static_cast<std::byte const*>(view.data());
    std::size_t const size = size_of(view.dtype());
    std::size_t reach = 1;
    for (std::size_t d = 0; d < view.extents().size(); ++d) {
        reach += (view.extents()[d] - 1) * view.strides()[d];
    }
    return {begin, begin + size * reach, index};
}

JOINABLE_DEFINITION bool share_memory(AnyView const& a, AnyView const& b) {
    AddressRange const range_a = AddressRange::of(a);
    AddressRange const range_b = AddressRange::of(b);
    if (a.device() != b.device() || !range_a.meets(range_b)) {
        return false;
    }
    auto const first_a = reinterpret_cast<std::uintptr_t>(range_a.begin);
    auto const first_b = reinterpret_cast<std::uintptr_t>(range_b.begin);
    // The difference may be negative, modulo 2^64. The reach of b, added below, makes up for it.
    std::size_t const difference = first_b - first_a;
    std::size_t const size_a = size_of(a.dtype());
    std::size_t const size_b = size_of(b.dtype());
    // What is counted: elements if each one of a is one of b or apart from it, else bytes.
    std::size_t const unit = size_a == size_b && difference % size_a == 0 ? size_a : 1;
    // Unit i of a is unit k of b if a's steps up to i and b's steps from k to its last
    // unit together equal the distance from a's first unit to b's last one.
    SumsOfStrides sums;
    std::size_t total =
        first_b >= first_a ? difference / unit : std::size_t{0} - (first_a - first_b) / unit;
    sums.add(1, size_a / unit);
    for (std::size_t d = 0; d < a.extents().size(); ++d) {
        sums.add(a.strides()[d] * (size_a / unit), a.extents()[d]);
    }
    sums.add(1, size_b / unit);
    total += size_b / unit - 1;
    for (std::size_t d = 0; d < b.extents().size(); ++d) {
        sums.add(b.strides()[d] * (size_b / unit), b.extents()[d]);
        total += b.strides()[d] * (size_b / unit) * (b.extents()[d] - 1);
    }
    sums.merge_equal_strides();
    return sums.has(total, 1);
}

JOINABLE_DEFINITION std::optional<std::pair<std::size_t, std::size_t>> find_shared(
    std::vector<AddressRange> ranges,
    std::function<AnyView(std::size_t)> const& view_of,
    std::function<bool(std::size_t, std::size_t)> const& counts
) {
    std::sort(ranges.begin(), ranges.end(), [](AddressRange const& a, AddressRange const& b) {
        return std::less<>{}(a.begin, b.begin);
    });
    std::optional<std::pair<std::size_t, std::size_t>> least;
    for (std::size_t a = 0; a < ranges.size(); ++a) { // a range without elements overlaps none
        for (std::size_t b = a + 1;
             b < ranges.size() && std::less<>{}(ranges[b].begin, ranges[a].end);
             ++b) {
            std::size_t const i = (std::min)(ranges[a].index, ranges[b].index);
            std::size_t const k = (std::max)(ranges[a].index, ranges[b].index);
            if ((!least || std::pair{i, k} < *least) && counts(i, k) &&
                share_memory(view_of(i), view_of(k))) {
                least.emplace(i, k);
            }
        }
    }
    return least;
}

JOINABLE_DEFINITION std::optional<std::pair<std::size_t, std::size_t>> find_shared(
    std::size_t count,
    std::function<AnyView(std::size_t)> const& view_of,
    std::function<bool(std::size_t, std::size_t)> const& counts
) {
    std::vector<AddressRange> ranges;
    for (std::size_t i = 0; i < count; ++i) {
        ranges.push_back(AddressRange::of(view_of(i), i));
    }
    return find_shared(std::move(ranges), view_of, counts);
}

}}} // namespace joinable::v0::detail
