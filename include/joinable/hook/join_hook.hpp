// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include <joinable/fwd.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class H>
concept has_main_hook_of_round = requires(H& hook, Round const& round) { hook.main_hook(round); };
template <class H>
concept has_main_hook = has_main_hook_of_round<H> || requires(H& hook) { hook.main_hook(); };
template <class H>
concept has_post_hook_of_result =
    requires(H& hook, JoinResult const& result) { hook.post_hook(result); };
template <class H>
concept has_end_hook = requires(H& hook) { hook.end_hook(); } || requires { &H::end_hook; };
template <class H>
concept has_post_hook = has_post_hook_of_result<H> || requires(H& hook) { hook.post_hook(bool{}); };
template <class H>
concept names_main_hook = requires { &H::main_hook; }; // with any parameters
template <class H>
concept names_post_hook = requires { &H::post_hook; };
template <class H>
concept names_takes_part = requires { &H::takes_part; };
template <class H>
concept has_takes_part = requires(Round const& round) {
    { H::takes_part(round) } -> std::convertible_to<bool>;
};
template <class H>
inline constexpr bool gives_notice = requires { requires H::gives_notice; };

} // namespace detail

/// The functions that a joined rank runs in place of a participant.
///
/// `hook` is an lvalue of `H`. It is constructed in place and need not be movable.
/// | expression                                | meaning                                          |
/// |-------------------------------------------|--------------------------------------------------|
/// | `hook.main_hook()` or                     | runs the collectives of one round, the same and  |
/// | `hook.main_hook(round)`                   | in the same order as the active ranks do         |
/// | `hook.post_hook(is_last_joiner)` or       | runs once on every rank, when all have joined    |
/// | `hook.post_hook(result)`                  | or the guard was stopped                         |
/// | `hook.end_hook()` (optional)              | local; runs once after the post hooks of all     |
/// |                                           | participants                                     |
/// | `H::takes_part(round)` (optional, static) | whether it takes part in the round; may read     |
/// |                                           | only number, phase and will_sync of the Round    |
/// | `H::gives_notice` (optional, static bool) | its participant's notification carries a notice, |
/// |                                           | so it must be the first of a round               |
///
/// hook/ordering.hpp describes where it runs among other hooks.
template <class H>
concept JoinHook = detail::has_main_hook<H> && detail::has_post_hook<H>;

/// Says in one sentence why a class is not a JoinHook.
template <class H>
consteval bool models_join_hook() {
    static_assert(
        detail::has_main_hook<H> || !detail::names_main_hook<H>,
        "JoinHook: main_hook cannot be called; its parameters must be 'void main_hook()' or "
        "'void main_hook(Round const&)'"
    );
    static_assert(
        detail::has_post_hook<H> || !detail::names_post_hook<H>,
        "JoinHook: post_hook cannot be called; its parameters must be "
        "'void post_hook(bool is_last_joiner)' or 'void post_hook(JoinResult const&)'"
    );
    static_assert(
        detail::has_takes_part<H> || !detail::names_takes_part<H>,
        "JoinHook: takes_part cannot be asked; declare it 'static bool takes_part(Round const&)'"
    );
    static_assert(
        detail::has_main_hook<H> || detail::names_main_hook<H>,
        "JoinHook: expected a member 'void main_hook()' or 'void main_hook(Round const&)'"
    );
    static_assert(
        detail::has_post_hook<H> || detail::names_post_hook<H>,
        "JoinHook: expected a member 'void post_hook(bool is_last_joiner)' or 'void post_hook(JoinResult const&)'"
    );
    return JoinHook<H>;
}

}} // namespace joinable::v0
