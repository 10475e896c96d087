// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <joinable/hook/ordering.hpp>
#include <joinable/join/joinable.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Label, class... Js>
inline constexpr bool has_label =
    (std::is_same_v<typename label_of<join_hook_t<Js>>::type, Label> || ...);
/// Whether one of them steps parameters on all ranks, joined ones too.
template <class... Js>
inline constexpr bool steps_parameters =
    has_label<labels::step, Js...> || has_label<labels::shards, Js...>;

template <class J, class... Ks>
arguments_of<J> arguments_from(KeywordArgument<Ks> const&... keywords) {
    arguments_of<J> args{};
    (args.set(keywords), ...);
    return args;
}

/// A hook constructed in place, so that it need not be movable.
template <std::size_t Index, class J>
struct HookSlot {
    template <class... Ks>
    HookSlot(J& joinable, bool const& is_lost, KeywordArgument<Ks> const&... keywords)
        : hook{joinable.join_hook(arguments_from<J>(keywords...))}, is_lost_{is_lost} {}
    HookSlot(HookSlot const&) = delete;
    HookSlot& operator=(HookSlot const&) = delete;
    ~HookSlot() {
        if (!is_lost_) {
            std::destroy_at(std::addressof(hook));
        }
    }

    union {
        join_hook_t<J> hook;
    };

private:
    bool const& is_lost_;
};

template <class Indices, class... Js>
struct HookSlots;
template <std::size_t... Is, class... Js>
struct HookSlots<std::index_sequence<Is...>, Js...> : HookSlot<Is, Js>... {
    template <class... Ks>
    HookSlots(
        std::tuple<Js&...> const& joinables,
        std::array<bool, sizeof...(Js)> const& are_lost,
        KeywordArgument<Ks> const&... keywords
    )
        : HookSlot<Is, Js>(std::get<Is>(joinables), are_lost[Is], keywords...)... {}
};

/// The hooks of a guard, stored in argument order and run in the order that their labels require.
template <class... Js>
class GuardHooks final : public HookRunner {
public:
    template <class... Ks>
    explicit GuardHooks(std::tuple<Js&...> const& joinables, KeywordArgument<Ks> const&... keywords)
        : slots_{joinables, are_lost, keywords...} {}

    /// Whose participant is destroyed, in argument order: hooks that refer to it are left as they are.
    std::array<bool, sizeof...(Js)> are_lost{};

    void forget_cleared() override { forget(std::index_sequence_for<Js...>{}); }
    void run_main_hook(std::size_t position, Round const& round) override {
        run_main(position, round, hook_sequence<Js...>{});
    }
    void run_post_hooks(JoinResult const& result, bool is_last_joiner) override {
        run_post(result, is_last_joiner, post_hook_sequence<Js...>{});
    }

    /// The facts about a participant that a session needs.
    template <class J>
    static ParticipantInfo describe(J const& joinable) {
        using Hook = join_hook_t<J>;
        ParticipantInfo info{std::string{join_name_of(joinable)}};
        if constexpr (has_takes_part<Hook>) {
            info.takes_part = [](Round const& round) -> bool { return Hook::takes_part(round); };
        }
        if constexpr (has_join_verb<J>) {
            info.verb = J::join_verb;
        }
        info.steps = steps_parameters<J>;
        return info;
    }

private:
    template <std::size_t Index>
    auto& hook() noexcept {
        using J = std::tuple_element_t<Index, std::tuple<Js...>>;
        return static_cast<HookSlot<Index, J>&>(slots_).hook;
    }

    template <std::size_t... Is>
    void forget(std::index_sequence<Is...>) {
        [[maybe_unused]] auto const run = [](auto& hook) {
            if constexpr (requires { hook.forget_cleared(); }) {
                hook.forget_cleared();
            }
        };
        (run(hook<Is>()), ...);
    }

    template <std::size_t... Is>
    void run_main(std::size_t position, Round const& round, std::index_sequence<Is...>) {
        std::size_t current = 0;
        auto const run = [&](auto& hook) {
            if constexpr (has_main_hook_of_round<std::remove_reference_t<decltype(hook)>>) {
                hook.main_hook(round);
            } else {
                hook.main_hook();
            }
        };
        ((current++ == position ? run(hook<Is>()) : void()), ...);
    }

    template <std::size_t... Is>
    void run_post(JoinResult const& result, bool is_last_joiner, std::index_sequence<Is...>) {
        auto const run = [&](auto& hook) {
            if constexpr (has_post_hook_of_result<std::remove_reference_t<decltype(hook)>>) {
                hook.post_hook(result);
            } else {
                hook.post_hook(is_last_joiner);
            }
        };
        (run(hook<Is>()), ...);
        auto const end = [](auto& hook) {
            if constexpr (has_end_hook<std::remove_reference_t<decltype(hook)>>) {
                hook.end_hook();
            }
        };
        (end(hook<Is>()), ...);
    }

    HookSlots<std::index_sequence_for<Js...>, Js...> slots_;
};

}}} // namespace joinable::v0::detail
