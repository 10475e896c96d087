// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <joinable/join/detail/guard.hpp>
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

/// An element of a range that was read once: a range may load a batch each time it is read.
template <class Element>
class ReadElement {
    using Kept = std::conditional_t<
        std::is_reference_v<Element>,
        std::remove_reference_t<Element>*,
        std::optional<Element>>;

public:
    template <class Iterator>
    void read(Iterator& position) {
        if constexpr (std::is_reference_v<Element>) {
            Element&& element = *position;
            kept_ = std::addressof(element);
        } else {
            kept_.reset();
            kept_.emplace(*position);
        }
    }
    void take(ReadElement& other) {
        if constexpr (std::is_reference_v<Element>) {
            kept_ = other.kept_;
        } else {
            kept_.reset();
            if (other.kept_) {
                kept_.emplace(std::move(*other.kept_));
            }
        }
    }
    /// The element, as a new read gives it.
    [[nodiscard]] Element&& get() const noexcept { return static_cast<Element&&>(*kept_); }

private:
    mutable Kept kept_{};
};

/// The result of Join::iterate: an input range that opens a round before each element, and reads
/// each element of its range once. It calls `announce` once for each. With look-ahead and `announce`
/// an element that is a reference is read twice, as forward ranges allow: the next one may lie in the
/// same place. An element that is a value can be moved from.
template <class Range, class Announce, bool LooksAhead>
class GuardedRange {
    using Inner = decltype(std::begin(std::declval<std::remove_reference_t<Range>&>()));
    using InnerEnd = decltype(std::end(std::declval<std::remove_reference_t<Range>&>()));
    using Element = decltype(*std::declval<Inner&>());
    static constexpr bool reads_early = !std::is_same_v<Announce, detail::DefaultNotice>;
    static_assert(
        std::is_invocable_r_v<RoundNotice, Announce&, std::remove_reference_t<Element>&>,
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
            : parent_{&parent}, position_{std::move(position)}, end_{std::move(end)} {
            parent_->guard_.recorded([&] { notice_ = notice_of(position_); });
            open();
        }
        /// Valid until the next increment.
        decltype(auto) operator*() const {
            if constexpr (reads_early && !(LooksAhead && std::is_reference_v<Element>)) {
                return (LooksAhead ? current_ : next_).get();
            } else {
                return parent_->guard_.recorded([&]() -> decltype(auto) { return *position_; });
            }
        }
        iterator& operator++() {
            parent_->guard_.recorded([&] {
                ++position_;
                if constexpr (!LooksAhead) { // else the notice is known
                    notice_ = notice_of(position_);
                }
            });
            open();
            return *this;
        }
        friend bool operator==(iterator const& it, std::default_sentinel_t) { return it.is_done_; }

    private:
        void open() {
            RoundNotice const notice = notice_.value_or(RoundNotice{});
            Guard& guard = parent_->guard_;
            is_done_ = !guard.next(
                notice_.has_value(), notice, LooksAhead ? Opening::look_ahead : Opening::next
            );
            if constexpr (LooksAhead) {
                if (!is_done_) {
                    current_.take(next_);
                    guard.recorded([&] {
                        Inner ahead = std::next(position_);
                        notice_ = notice_of(ahead);
                    });
                    guard.announce_ahead(notice_);
                }
            }
        }
        /// Reads the element there, if announcing needs it.
        std::optional<RoundNotice> notice_of(Inner& position) {
            if (position == end_) {
                return {};
            }
            if constexpr (reads_early) {
                next_.read(position);
                auto&& element = next_.get();
                RoundNotice const notice =
                    parent_->announce_(element); // an optional would also accept a number
                return notice;
            } else {
                return RoundNotice{};
            }
        }

        GuardedRange* parent_;
        mutable Inner position_; ///< those of libtorch are read only if they are not const
        InnerEnd end_;
        std::optional<RoundNotice> notice_; ///< of the element that was read last; none at the end
        detail::ReadElement<Element> next_; ///< was read last
        detail::ReadElement<Element> current_; ///< was read before it
        bool is_done_ = false;
    };

    iterator begin() { return {*this, std::begin(range_), std::end(range_)}; }
    [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

private:
    Guard& guard_;
    Range range_;
    Announce announce_;
};

} // namespace detail

}} // namespace joinable::v0
