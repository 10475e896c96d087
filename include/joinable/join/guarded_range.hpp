// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include <joinable/join/detail/verdict.hpp>
#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 {

/// The tag of Join::iterate that posts every roll call one element early.
inline constexpr struct look_ahead_t {
} look_ahead{};

namespace detail {

/// The notice of a range whose elements need none.
struct DefaultNotice {
    template <class Element>
    RoundNotice operator()(Element const&) const noexcept {
        return {};
    }
};

template <class Range>
concept is_range = requires(std::remove_reference_t<Range>& range) {
    std::begin(range);
    std::end(range);
};

} // namespace detail

/// The result of Join::iterate: an input range that opens a round before each element and calls
/// `announce` once for each.
template <class Guard, class Range, class Announce, bool LooksAhead>
class GuardedRange {
    using Inner = decltype(std::begin(std::declval<std::remove_reference_t<Range>&>()));
    using InnerEnd = decltype(std::end(std::declval<std::remove_reference_t<Range>&>()));
    static_assert(
        std::is_invocable_r_v<RoundNotice, Announce&, decltype(*std::declval<Inner const&>())>,
        "iterate: what announces a round takes an element and returns a RoundNotice, such as "
        "[](auto const& batch) { return joinable::RoundNotice{.weight = batch.size()}; }; look_ahead comes "
        "before the range"
    );
    static_assert(
        !LooksAhead || std::forward_iterator<Inner>,
        "iterate: look_ahead needs a forward range, because it looks at the next element early"
    );

public:
    GuardedRange(Guard& guard, Range&& range, Announce announce)
        : guard_{guard}, range_{std::forward<Range>(range)}, announce_{std::move(announce)} {}

    class iterator {
    public:
        iterator(GuardedRange& parent, Inner position, InnerEnd end)
            : parent_{&parent}, position_{std::move(position)}, end_{std::move(end)},
              notice_{parent.notice_of(position_, end_)} {
            open();
        }
        decltype(auto) operator*() const { return *position_; }
        iterator& operator++() {
            ++position_;
            if constexpr (!LooksAhead) { // else the notice is known
                notice_ = parent_->notice_of(position_, end_);
            }
            open();
            return *this;
        }
        friend bool operator==(iterator const& it, std::default_sentinel_t) { return it.is_done_; }

    private:
        void open() {
            RoundNotice const notice = notice_.value_or(RoundNotice{});
            if constexpr (LooksAhead) {
                is_done_ = !parent_->guard_.next_ahead(notice_.has_value(), notice);
                if (!is_done_) {
                    notice_ = parent_->notice_of(std::next(position_), end_);
                    parent_->guard_.announce_ahead(notice_);
                }
            } else {
                is_done_ = !parent_->guard_.next(notice_.has_value(), notice);
            }
        }

        GuardedRange* parent_;
        Inner position_;
        InnerEnd end_;
        std::optional<RoundNotice> notice_; ///< none at the end
        bool is_done_ = false;
    };

    iterator begin() { return {*this, std::begin(range_), std::end(range_)}; }
    [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

private:
    std::optional<RoundNotice> notice_of(Inner const& position, InnerEnd const& end) {
        if (position == end) {
            return {};
        }
        RoundNotice const notice = announce_(*position); // an optional would also accept a number
        return notice;
    }

    Guard& guard_;
    Range range_;
    Announce announce_;
};

}} // namespace joinable::v0
