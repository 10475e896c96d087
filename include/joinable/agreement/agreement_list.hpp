// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/detail/hash.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class V>
inline constexpr bool is_optional = false;
template <class V>
inline constexpr bool is_optional<std::optional<V>> = true;

template <class V>
using element_of = std::remove_cvref_t<decltype(*std::begin(std::declval<V const&>()))>;

/// Whether AgreementList can hold a value: a number, an enumerator, a string, or a range or an
/// optional of these.
template <class V>
consteval bool is_agreeable() {
    if constexpr (std::is_arithmetic_v<V> || std::is_enum_v<V> ||
                  std::is_convertible_v<V const&, std::string_view>) {
        return true;
    } else if constexpr (is_optional<V>) {
        return is_agreeable<typename V::value_type>();
    } else if constexpr (requires { typename element_of<V>; }) {
        if constexpr (!std::is_same_v<element_of<V>, V>) { // a path's element is a path
            return is_agreeable<element_of<V>>();
        }
    }
    return false;
}

inline std::string in_quotes(std::string_view string) {
    std::string text = "\"";
    for (char const letter : string) {
        if (auto const code = static_cast<unsigned char>(letter); code < 0x20) { // as JSON has it
            constexpr std::string_view digits = "0123456789abcdef";
            ((text += "\\u00") += digits[code / 16]) += digits[code % 16];
        } else {
            text.append(letter == '"' || letter == '\\' ? "\\" : "") += letter;
        }
    }
    return text + '"';
}

/// A text that no other value of the type has. In ranges and optionals, strings are quoted.
template <class V>
std::string agreed_text(V const& value, bool is_inside = false) {
    if constexpr (std::is_same_v<V, bool>) {
        return value ? "true" : "false";
    } else if constexpr (std::is_enum_v<V>) {
        return agreed_text(static_cast<std::underlying_type_t<V>>(value));
    } else if constexpr (std::is_floating_point_v<V>) {
        std::array<char, 64> text{}; // the shortest text that reads back as the number
        return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
    } else if constexpr (std::is_integral_v<V>) {
        return std::to_string(value);
    } else if constexpr (std::is_convertible_v<V const&, std::string_view>) {
        return is_inside ? in_quotes(value) : std::string{std::string_view{value}};
    } else if constexpr (is_optional<V>) {
        if (!value) {
            return "no value";
        }
        std::string text = agreed_text(*value, true);
        return is_optional<typename V::value_type> ? "a value (" + text + ")" : text;
    } else {
        std::string text;
        for (auto const& element : value) {
            text += text.empty() ? "" : ", ";
            text += agreed_text<element_of<V>>(element, true);
        }
        return "[" + text + "]";
    }
}

/// An agreed value in memory: an enumerator as its number.
enum class AgreedType : std::uint8_t {
    other,
    boolean,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
    f32,
    f64
};
template <class V>
consteval AgreedType agreed_type() {
    if constexpr (std::is_same_v<V, bool>) {
        return AgreedType::boolean;
    } else if constexpr (std::is_enum_v<V>) {
        return agreed_type<std::underlying_type_t<V>>();
    } else if constexpr (std::is_same_v<V, float>) {
        return AgreedType::f32;
    } else if constexpr (std::is_same_v<V, double>) {
        return AgreedType::f64;
    } else if constexpr (std::is_integral_v<V> && sizeof(V) <= 8) {
        constexpr int first = std::is_signed_v<V> ? static_cast<int>(AgreedType::i8)
                                                  : static_cast<int>(AgreedType::u8);
        return static_cast<AgreedType>(first + std::countr_zero(sizeof(V)));
    } else {
        return AgreedType::other;
    }
}

} // namespace detail

/// The labels and values that must be the same on all ranks, in the order in which they are
/// compared. A participant lists what its ranks must share in
/// `void agree_on(AgreementList& list) const`; a guard calls it when it is entered. An item
/// consists of its two texts, and its hash follows from them.
class AgreementList {
public:
    /// `value` is a number, an enumerator, a string, or a range or an optional of these.
    /// Floating-point numbers are compared by their bits, except for NaNs.
    template <class V>
    void add(std::string_view label, V const& value) {
        static_assert(
            detail::is_agreeable<V>(),
            "AgreementList: expected a number, an enumerator, a string, or a range or an optional of these"
        );
        items_.push_back({title_ + std::string{label}, detail::agreed_text(value)});
        places_.push_back({&value, detail::agreed_type<V>()});
    }

    /// The labels of the following items begin with `title`, such as "options differ: ".
    void begin_section(std::string title) { title_ = std::move(title); }

    struct Item {
        std::string label;
        std::string value;
    };
    [[nodiscard]] std::vector<Item> const& items() const noexcept { return items_; }

    /// Where the value of an item was when it was added. A checkpoint sets members there.
    struct Place {
        void const* at;
        detail::AgreedType type;
    };
    [[nodiscard]] std::vector<Place> const& places() const noexcept { return places_; }

    /// The hash of an item; 0 beyond the last one.
    [[nodiscard]] std::uint64_t hash(std::size_t i) const noexcept {
        if (i >= items_.size()) {
            return 0;
        }
        auto const& [label, value] = items_[i];
        detail::Hash const hash = detail::Hash{}.add(label).add(value).add(value.size());
        return (std::max)(hash.value(), std::uint64_t{1});
    }
    /// The hash of item `first` and all items after it; 0 beyond the last one. Allocates nothing.
    [[nodiscard]] std::uint64_t hash_from(std::size_t first) const noexcept {
        std::uint64_t rest = 0;
        for (std::size_t i = items_.size(); i > first; --i) {
            rest = detail::Hash{}.add(hash(i - 1)).add(rest).value();
        }
        return rest;
    }

private:
    std::string title_;
    std::vector<Item> items_;
    std::vector<Place> places_; ///< one for each item
};

}} // namespace joinable::v0
