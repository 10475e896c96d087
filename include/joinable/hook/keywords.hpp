// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/fwd.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// One `keyword = value`, as given to a guard.
template <class K>
struct KeywordArgument {
    typename K::value_type value;
};

/// The type of the value in an optional, which converts it without a warning. Any other type holds itself.
template <class T>
struct held_by : std::type_identity<T> {};
template <class T>
struct held_by<std::optional<T>> : std::type_identity<T> {};

template <class From, class To>
inline constexpr bool keeps_meaning = std::same_as<From, bool> == std::same_as<To, bool> &&
                                      !(std::floating_point<From> && std::integral<To>);
/// An empty optional.
template <class To>
inline constexpr bool keeps_meaning<std::nullopt_t, To> = true;

/// Refuses silent changes of meaning: a flag takes only flags, and a whole number takes no
/// fraction.
template <class From, class To>
concept keyword_value =
    std::convertible_to<From, To> &&
    keeps_meaning<typename held_by<std::remove_cvref_t<From>>::type, typename held_by<To>::type>;

/// @throws ContractViolation  `To` cannot hold the number.
template <class To, class From>
constexpr void check_keyword_value(From const& value) {
    if constexpr (!std::same_as<From, typename held_by<From>::type>) {
        if (value) {
            check_keyword_value<To>(*value);
        }
    } else if constexpr (!std::same_as<To, typename held_by<To>::type>) {
        check_keyword_value<typename held_by<To>::type>(value);
    } else if constexpr (std::is_enum_v<From> && std::is_arithmetic_v<To>) {
        check_keyword_value<To>(static_cast<std::underlying_type_t<From>>(value));
    } else if constexpr (std::floating_point<From> && std::floating_point<To>) {
        constexpr To most = (std::numeric_limits<To>::max)();
        bool const is_finite = value - value == From{};
        if (is_finite && (value > most || value < -most)) {
            throw ContractViolation{concat(
                "a keyword whose value is a floating-point number of ",
                8 * sizeof(To),
                " bits was given ",
                value,
                "; give it a number that fits, or make its type larger"
            )};
        }
    } else if constexpr (std::integral<From> && std::integral<To> && !std::same_as<To, bool>) {
        auto const held = static_cast<To>(value); // std::in_range refuses characters
        if (static_cast<From>(held) != value || (held > To{}) != (value > From{})) {
            throw ContractViolation{concat(
                "a keyword whose value is a whole number ",
                std::signed_integral<To> ? "of " : "without sign of ",
                8 * sizeof(To),
                " bits was given ",
                value,
                "; give it a number that fits, or make its type larger"
            )};
        }
    }
}

template <class K>
concept compares_values = requires(AgreementList& list, typename K::value_type const& value) {
    K::agree_on(list, value);
};
template <class K>
inline constexpr bool is_per_rank = requires { requires K::per_rank; };

} // namespace detail

/// The base of a keyword object `K` whose value is a `V`:
/// @code
/// inline constexpr struct sync_max_count_t : keyword<sync_max_count_t, bool> {
///     using keyword::operator=;
/// } sync_max_count{};
/// @endcode
/// `sync_max_count = true` is then an argument of `Join`, and `args.get(sync_max_count, false)`
/// reads it in `join_hook`. The value must be the same on every rank or given on none, unless `K`
/// has a `static constexpr bool per_rank = true`. Numbers, enumerators, strings, ranges and
/// optionals of these are compared. For another type `K` needs a
/// `static void agree_on(AgreementList& list, V const& value)`.
template <class K, class V>
struct keyword {
    using value_type = V;

    // NOLINTNEXTLINE(misc-unconventional-assign-operator): spells an argument, assigns nothing
    constexpr detail::KeywordArgument<K> operator=(detail::keyword_value<V> auto&& value) const {
        detail::check_keyword_value<V>(value);
        return {static_cast<V>(std::forward<decltype(value)>(value))};
    }
};

/// The keywords that a joinable accepts: `using join_keywords = keywords<sync_max_count_t>;`.
template <class... Ks>
struct keywords {};

/// The keyword values that `join_hook` receives. The type is the same whichever keywords were
/// given, so the hook's type does not depend on the call.
template <class Keywords>
class arguments;

template <class... Ks>
class arguments<keywords<Ks...>> {
public:
    arguments() = default;

    /// The value given for a keyword, or `otherwise`.
    template <class K>
    [[nodiscard]] constexpr typename K::value_type
    get(K const&, typename K::value_type otherwise) const {
        static_assert(
            (std::same_as<K, Ks> || ...),
            "arguments::get: this keyword is not in the joinable's join_keywords; add it there"
        );
        auto const& given = std::get<Slot<K>>(values_).value;
        return given ? *given : otherwise;
    }

    /// Stores a value if this joinable accepts the keyword, otherwise does nothing.
    template <class K>
    constexpr void set(detail::KeywordArgument<K> const& argument) {
        if constexpr ((std::same_as<K, Ks> || ...)) {
            std::get<Slot<K>>(values_).value = argument.value;
        }
    }

    /// Calls `visit(std::type_identity<K>{}, value)` for each keyword; the value is an optional.
    template <class Visit>
    constexpr void for_each(Visit const& visit) const {
        (visit(std::type_identity<Ks>{}, std::get<Slot<Ks>>(values_).value), ...);
    }

private:
    template <class K>
    struct Slot {
        std::optional<typename K::value_type> value;
    };
    std::tuple<Slot<Ks>...> values_;
};

namespace detail {

template <class K, class Keywords>
inline constexpr bool accepts_keyword = false;
template <class K, class... Ks>
inline constexpr bool accepts_keyword<K, keywords<Ks...>> = (std::same_as<K, Ks> || ...);

/// A function template, so that a failing assertion shows the keyword.
template <class K, std::size_t TimesGiven, class... AcceptedKeywords>
consteval bool check_keyword() {
    static_assert(
        (accepts_keyword<K, AcceptedKeywords> || ...),
        "no participant of this Join accepts the keyword (see check_keyword<...>); correct its "
        "name or add it to a participant's join_keywords"
    );
    static_assert(
        TimesGiven == 1, "the keyword is given twice (see check_keyword<...>); give it once"
    );
    return true;
}

} // namespace detail

}} // namespace joinable::v0
