// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <tuple>
#include <type_traits>

#include <joinable/hook/ordering.hpp>
#include <joinable/join/joinable.hpp>

namespace joinable { inline namespace v0 {

/// The participants of a guard: made by participants().
template <class... Js>
struct Participants {
    std::tuple<Js&...> joinables;
};

namespace detail {

/// The result of participants() after an assertion has explained what is wrong with its arguments.
/// A guard that is made of it does not repeat the error in worse words.
struct RefusedParticipants {};

template <class>
inline constexpr bool never = false;

template <class J>
concept is_dereferenceable = requires(J& joinable) { *joinable; };

template <class... Hooks>
consteval void check_order() {
    static_assert(ordered_hooks<MainPhase, Hooks...>::is_solved);
    static_assert(ordered_hooks<PostPhase, Hooks...>::is_solved);
}

} // namespace detail

/// Lists the joinables of a guard and marks where the list ends. It takes non-const lvalues only;
/// they must outlive the guard. All compile-time errors of participants are reported here: the
/// return type is deduced, so compilers check this body before the guard.
template <class... Js>
[[nodiscard]] auto participants(Js&&... joinables) {
    static_assert(sizeof...(Js) > 0, "participants: a Join needs at least one participant");
    static_assert(sizeof...(Js) < 32, "participants: a Join takes at most 31 participants");
    constexpr bool are_named = (std::is_lvalue_reference_v<Js> && ...);
    static_assert(
        are_named,
        "participants: a temporary cannot take part; give it a name that outlives the Join"
    );
    constexpr bool are_mutable = (!std::is_const_v<std::remove_reference_t<Js>> && ...);
    static_assert(
        are_mutable,
        "participants: a const object cannot take part, because the guard changes its "
        "join_state(); pass one that is not const"
    );
    constexpr bool are_joinable = (models_joinable<std::remove_cvref_t<Js>>() && ...);
    if constexpr (sizeof...(Js) > 0 && are_named && are_mutable && are_joinable) {
        detail::check_order<join_hook_t<std::remove_cvref_t<Js>>...>();
        return Participants<std::remove_cvref_t<Js>...>{
            std::tuple<std::remove_cvref_t<Js>&...>{joinables...}
        };
    } else {
        return detail::RefusedParticipants{};
    }
}

/// Explains pointers in place of participants.
template <class... Js>
    requires(detail::is_dereferenceable<Js> || ...)
[[nodiscard]] auto participants(Js&&...) {
    static_assert(
        !(detail::is_dereferenceable<Js> || ...),
        "participants: give the participants themselves instead of pointers to them, as in participants(*ddp, step)"
    );
    return detail::RefusedParticipants{};
}

/// The communicator of a guard's roll calls and of its participants' words: made by control().
template <Communicator Comm>
struct Control {
    Comm& communicator;
    detail::MakesGroups make_groups = nullptr; ///< set by groups_of()
};

/// Names the communicator for a guard's roll calls, in place of the communicator of the first
/// participant in hook order. Participants also send words by it, such as maps of used parameters.
/// It must reduce host memory and have the same ranks in the same order.
/// It must outlive the guard, and must not be used for anything that could come between two roll
/// calls.
template <class Comm>
[[nodiscard]] Control<Comm> control(Comm& communicator) {
    static_assert(models_communicator<Comm>());
    static_assert(
        detail::reduces_host_memory<Comm>,
        "control: expected a communicator that reduces host memory"
    );
    return {communicator};
}

}} // namespace joinable::v0
