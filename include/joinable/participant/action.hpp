// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/communicator/communicator.hpp>
#include <joinable/join/joinable.hpp>

namespace joinable { inline namespace v0 {

/// Makes any collective a participant, without a class: `Action log{comm, act, shadow};`.
///
/// Active ranks call `log(...)` once per round, which runs `act(...)`. Joined ranks run `shadow()`
/// (or `shadow(round)`), which must issue the same collectives in the same order.
template <class Comm, class Act, class Shadow>
class Action {
    static_assert(
        !std::is_same_v<Comm, detail::NoCommunicator>,
        "Action: expected a communicator and two functions, as in Action log{comm, act, shadow}"
    );
    static_assert(models_communicator<Comm>());
    static_assert(
        std::invocable<Shadow&> || std::invocable<Shadow&, Round const&>,
        "Action: the shadow, which is the last argument, is a function that takes nothing or the Round"
    );

public:
    Action(Comm& comm, Act act, Shadow shadow)
        : comm_{comm}, act_{std::move(act)}, shadow_{std::move(shadow)} {}

    /// Collective. Returns what `act` returns, throws what it throws.
    template <class... Args>
        requires std::invocable<Act&, Args...>
    decltype(auto) operator()(Args&&... args) {
        Round const round = notify_join_context(*this);
        return detail::run_part(*this, round, [&]() -> decltype(auto) {
            return act_(std::forward<Args>(args)...);
        });
    }

    class Hook {
    public:
        explicit Hook(Action& action) noexcept : action_{action} {}
        void main_hook(Round const& round) {
            if constexpr (std::invocable<Shadow&, Round const&>) {
                action_.shadow_(round);
            } else {
                action_.shadow_();
            }
        }
        void post_hook(bool) noexcept {}

    private:
        Action& action_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "Action"; }
    static constexpr std::string_view join_verb = "operator()";

private:
    Comm& comm_;
    Act act_;
    Shadow shadow_;
    JoinState state_;
};

template <class Comm, class Act, class Shadow>
Action(Comm&, Act, Shadow) -> Action<Comm, Act, Shadow>;
/// Explains which argument is missing.
template <class Act, class Shadow>
Action(Act, Shadow) -> Action<detail::NoCommunicator, Act, Shadow>;

}} // namespace joinable::v0
