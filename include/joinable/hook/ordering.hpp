// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <joinable/fwd.hpp>
#include <joinable/hook/join_hook.hpp>

namespace joinable { inline namespace v0 {

/// A list of labels, for what a hook runs before or after.
template <class... Labels>
struct labels_of {};

/// Labels of this library's hooks. An engine may add types of its own.
namespace labels {
struct gradients; ///< gradients are reduced here
struct shards;    ///< sharded optimizer state is exchanged here
struct step;      ///< a plain optimizer steps here
} // namespace labels

/// Places a hook among the hooks of one guard. The default reads the hook's own members, all
/// optional: `label` (default: the hook's type), `runs_before`, `runs_after` (labels_of<...>), and
/// `post_runs_before`, `post_runs_after` if the post hooks run in another order. To place a hook of
/// another library, specialise this with `label`, `before`, `after` and, if needed, `post_before`,
/// `post_after`. A label that no hook of the guard carries constrains nothing. Among hooks that may
/// come next, hooks that give notices come first; then the argument order decides. Meant for up to
/// 31 hooks in one guard.
template <class Hook>
struct hook_order {};

namespace detail {

// The declarations of a hook: hook_order's member, else the hook's own, else a default.
template <class H>
struct label_of : std::type_identity<H> {};
template <class H>
    requires requires { typename H::label; } && (!requires { typename hook_order<H>::label; })
struct label_of<H> : std::type_identity<typename H::label> {};
template <class H>
    requires requires { typename hook_order<H>::label; }
struct label_of<H> : std::type_identity<typename hook_order<H>::label> {};

template <class H>
struct before_of : std::type_identity<labels_of<>> {};
template <class H>
    requires requires { typename H::runs_before; } &&
             (!requires { typename hook_order<H>::before; })
struct before_of<H> : std::type_identity<typename H::runs_before> {};
template <class H>
    requires requires { typename hook_order<H>::before; }
struct before_of<H> : std::type_identity<typename hook_order<H>::before> {};

template <class H>
struct after_of : std::type_identity<labels_of<>> {};
template <class H>
    requires requires { typename H::runs_after; } && (!requires { typename hook_order<H>::after; })
struct after_of<H> : std::type_identity<typename H::runs_after> {};
template <class H>
    requires requires { typename hook_order<H>::after; }
struct after_of<H> : std::type_identity<typename hook_order<H>::after> {};

template <class H>
struct post_before_of : before_of<H> {};
template <class H>
    requires requires { typename H::post_runs_before; } &&
             (!requires { typename hook_order<H>::post_before; })
struct post_before_of<H> : std::type_identity<typename H::post_runs_before> {};
template <class H>
    requires requires { typename hook_order<H>::post_before; }
struct post_before_of<H> : std::type_identity<typename hook_order<H>::post_before> {};

template <class H>
struct post_after_of : after_of<H> {};
template <class H>
    requires requires { typename H::post_runs_after; } &&
             (!requires { typename hook_order<H>::post_after; })
struct post_after_of<H> : std::type_identity<typename H::post_runs_after> {};
template <class H>
    requires requires { typename hook_order<H>::post_after; }
struct post_after_of<H> : std::type_identity<typename hook_order<H>::post_after> {};

template <class Label, class Labels>
inline constexpr bool contains_label = false;
template <class Label, class... Ls>
inline constexpr bool contains_label<Label, labels_of<Ls...>> = (std::same_as<Label, Ls> || ...);

struct MainPhase {
    template <class H>
    using before = typename before_of<H>::type;
    template <class H>
    using after = typename after_of<H>::type;
};
struct PostPhase {
    template <class H>
    using before = typename post_before_of<H>::type;
    template <class H>
    using after = typename post_after_of<H>::type;
};

template <std::size_t N>
struct Order {
    std::array<std::size_t, N> sequence{}; ///< hook indices in the order in which they run
    std::array<bool, N> on_cycle{};
    bool has_cycle = false;
};

template <std::size_t N>
using Edges = std::array<std::array<bool, N>, N>; ///< [i][j]: hook i runs before hook j

template <class Phase, class H, class Other>
inline constexpr bool runs_before =
    contains_label<typename label_of<Other>::type, typename Phase::template before<H>> ||
    contains_label<typename label_of<H>::type, typename Phase::template after<Other>>;
template <class Phase, class H, class... Hooks>
inline constexpr std::array<bool, sizeof...(Hooks)> edges_from{{runs_before<Phase, H, Hooks>...}};

/// Kahn's algorithm (1962), always taking the lowest ready index, `preferred` ones first. The order
/// is unique, stable, and the same on every rank. Hooks that remain are also peeled from the end,
/// so that only hooks on a cycle are blamed.
template <std::size_t N>
constexpr Order<N> solve(Edges<N> const& edges, std::array<bool, N> const& preferred) {
    Order<N> order;
    std::array<bool, N> done{};
    auto const is_free = [&](std::size_t i, bool from_the_end) {
        for (std::size_t j = 0; j < N; ++j) {
            if (i != j && !done[j] && (from_the_end ? edges[i][j] : edges[j][i])) {
                return false;
            }
        }
        return !done[i];
    };
    std::size_t count = 0;
    for (bool progress = true; progress;) {
        progress = false;
        for (bool const preference : {true, false}) {
            for (std::size_t i = 0; i < N && !progress; ++i) {
                if (preferred[i] == preference && is_free(i, false)) {
                    done[i] = true;
                    order.sequence[count++] = i;
                    progress = true;
                }
            }
        }
    }
    order.has_cycle = count != N;
    for (bool progress = order.has_cycle; progress;) {
        progress = false;
        for (std::size_t i = 0; i < N; ++i) {
            if (is_free(i, true)) {
                done[i] = true;
                progress = true;
            }
        }
    }
    for (std::size_t i = 0; i < N; ++i) {
        order.on_cycle[i] = !done[i];
    }
    return order;
}

/// A class template, so that a failing assertion shows the hooks.
template <class... Hooks>
struct hooks_on_cycle {
    static_assert(
        sizeof...(Hooks) == 0,
        "these hooks must run both before and after each other (see hooks_on_cycle<...>); remove "
        "one of their before or after labels"
    );
};

template <class Phase, class... Hooks>
struct ordered_hooks {
    static constexpr Order<sizeof...(Hooks)> order = solve<sizeof...(Hooks)>(
        {{edges_from<Phase, Hooks, Hooks...>...}}, {{gives_notice<Hooks>...}}
    );

    template <class Cycle, std::size_t Index, class... Rest>
    struct collect : std::type_identity<Cycle> {};
    template <class... Found, std::size_t Index, class H, class... Rest>
    struct collect<labels_of<Found...>, Index, H, Rest...>
        : collect<
              std::
                  conditional_t<order.on_cycle[Index], labels_of<Found..., H>, labels_of<Found...>>,
              Index + 1,
              Rest...> {};

    template <class Culprits>
    struct blame;
    template <class... Culprits>
    struct blame<labels_of<Culprits...>> : hooks_on_cycle<Culprits...> {};

    static constexpr bool is_solved =
        sizeof(blame<typename collect<labels_of<>, 0, Hooks...>::type>) != 0;

    template <std::size_t... Is>
    static auto sequence_of(std::index_sequence<Is...>)
        -> std::index_sequence<order.sequence[Is]...>;
    using sequence = decltype(sequence_of(std::make_index_sequence<sizeof...(Hooks)>{}));
};

} // namespace detail

}} // namespace joinable::v0
