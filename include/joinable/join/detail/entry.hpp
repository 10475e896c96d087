// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/hook/ordering.hpp>
#include <joinable/join/detail/attachments.hpp>
#include <joinable/join/detail/hooks.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/options.hpp>
#include <joinable/join/parameter_claims.hpp>

/// @file
/// The lists that ranks compare when they enter a guard.

namespace joinable { inline namespace v0 { namespace detail {

/// Leaves out `enable`, because ranks without it do not enter, and what may differ by rank.
inline void agree_on(AgreementList& list, JoinOptions const& options, bool can_abort) {
    list.begin_section("options differ: ");
    list.add("end_policy", name_of(options.end_policy));
    char const* const inputs = can_abort ? "a value" : "a value, but cannot abort";
    list.add("inputs", options.inputs ? inputs : "no value");
    list.add("weight_per_input", options.weight_per_input ? "a value" : "no value");
    list.add("sync_every", options.sync_every);
    list.add("carry_accumulated", options.carry_accumulated);
}

template <class K>
void agree_on_keyword(AgreementList& list, std::optional<typename K::value_type> const& value) {
    std::string_view name = class_name<K>();
    name.remove_suffix(name.ends_with("_t") ? 2 : 0);
    std::string const label = concat("keyword ", name);
    if constexpr (compares_values<K>) {
        list.add(label, value ? "a value" : "no value");
        if (value) {
            K::agree_on(list, *value);
        }
    } else if constexpr (!is_per_rank<K>) {
        list.add(label, value);
    }
}

/// The entries of one participant: its keywords and what its agree_on() adds.
template <class J, class... Ks>
void agree_on_participant(
    AgreementList& list, J const& joinable, KeywordArgument<Ks> const&... keywords
) {
    if constexpr (!std::is_same_v<arguments_of<J>, arguments<joinable::keywords<>>>) {
        arguments_from<J>(keywords...).for_each([&]<class K>(K, auto const& value) {
            agree_on_keyword<typename K::type>(list, value);
        });
    }
    if constexpr (has_agree_on<J>) {
        joinable.agree_on(list);
    }
}

template <class J>
void list_averaged(J const& joinable, GuardView& view) {
    if constexpr (requires { joinable.list_averaged(view.averaged); }) {
        joinable.list_averaged(view.averaged);
    } else if constexpr (has_label<labels::gradients, J>) {
        view.lists_all_averaged = false;
    }
}

/// A participant averages if its hook is labelled so, or if it says so.
template <class J>
Averages averages_of(J const& joinable) {
    bool averages = has_label<labels::gradients, J>;
    if constexpr (requires { joinable.averages_gradients(); }) {
        averages = joinable.averages_gradients();
    }
    bool leaves_untouched = false;
    if constexpr (requires { joinable.leaves_joined_untouched(); }) {
        leaves_untouched = joinable.leaves_joined_untouched();
    }
    return !averages          ? Averages::none
           : leaves_untouched ? Averages::but_leaves_joined_untouched
                              : Averages::gradients;
}

template <class J>
Accumulated accumulated_by(J& joinable) {
    if constexpr (requires { joinable.accumulated_before_guard(); }) {
        if (averages_of(joinable) != Averages::none) {
            return joinable.accumulated_before_guard();
        }
    }
    return Accumulated::none;
}

/// Before a guard: participants that average forget what they accumulated, if the gradients of all were cleared.
/// Beside another's numbers, zeros are gradients.
template <class... Js>
void forget_cleared(Js&... joinables) {
    std::array<Accumulated, sizeof...(Js)> const held{{accumulated_by(joinables)...}};
    bool const has_numbers =
        std::find(held.begin(), held.end(), Accumulated::numbers) != held.end();
    std::size_t i = 0;
    auto const one = [&]<class J>(J& joinable) {
        bool const is_zeros = held[i++] == Accumulated::zeros;
        if constexpr (requires { joinable.forget_cleared(); }) {
            if (is_zeros && !has_numbers) {
                joinable.forget_cleared();
            }
        }
        WindowOf{joinable.join_state()}.begin_guard(is_zeros);
    };
    (one(joinables), ...);
}

template <class J>
void list_claims(J const& joinable, ParameterClaims& claims) {
    claims.begin_participant(join_name_of(joinable));
    if constexpr (has_list_claims<J>) {
        joinable.list_claims(claims);
    }
}

template <class J>
void check_guard(J const& joinable, GuardView const& view) {
    if constexpr (has_check_guard<J>) {
        joinable.check_guard(view);
    }
}

/// Lists the participants in hook order, the order of post hooks, the options, then each
/// participant.
template <std::size_t... Main, std::size_t... Post, class... Js, class... Ks>
AgreementList entry_list(
    std::tuple<Js&...> const& joinables,
    std::index_sequence<Main...>,
    std::index_sequence<Post...>,
    JoinOptions const& options,
    bool can_abort,
    KeywordArgument<Ks> const&... keywords
) {
    std::vector<std::string_view> const names{join_name_of(std::get<Main>(joinables))...};
    std::vector<std::size_t> positions(names.size());
    std::size_t position = 0;
    ((positions[Main] = position++), ...);
    AgreementList list;
    list.begin_section("guards differ: ");
    list.add("library version", library_version);
    list.add("participants", names);
    list.add("order of post hooks", std::vector<std::size_t>{positions[Post]...});
    agree_on(list, options, can_abort);
    position = 0;
    auto const one = [&](auto const& joinable) {
        std::string_view const name = names[position];
        list.begin_section(concat("guards differ: participant ", position++, " (", name, "): "));
        agree_on_participant(list, joinable, keywords...);
    };
    (one(std::get<Main>(joinables)), ...);
    return list;
}

}}} // namespace joinable::v0::detail
