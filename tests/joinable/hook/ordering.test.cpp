// SPDX-License-Identifier: BSL-1.0
#include <joinable/hook/ordering.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <utility>

#include <doctest/doctest.h>

namespace {

using joinable::labels_of;
namespace labels = joinable::labels;

template <class... Hooks>
using order =
    typename joinable::detail::ordered_hooks<joinable::detail::MainPhase, Hooks...>::sequence;
template <class... Hooks>
using post_order =
    typename joinable::detail::ordered_hooks<joinable::detail::PostPhase, Hooks...>::sequence;
template <std::size_t... I>
using is = std::index_sequence<I...>;

struct Unlabelled {};
struct OtherUnlabelled {};
struct Gradients {
    using label = labels::gradients;
};
struct Optimizer {
    using runs_after = labels_of<labels::gradients>;
};
struct Early {
    using runs_before = labels_of<labels::gradients>;
};
struct PostFirst {
    using post_runs_before = labels_of<Unlabelled>;
};
struct Notices {
    static constexpr bool gives_notice = true;
};
struct Foreign { // declares nothing, placed from outside
    void use();
};
struct ForeignTarget {
    using label = labels::shards;
};

} // namespace

template <>
struct joinable::hook_order<Foreign> {
    using label = Foreign;
    using before = labels_of<>;
    using after = labels_of<labels::shards>;
};

namespace {

// Nothing declared: the argument order, whatever it is.
static_assert(std::same_as<order<Unlabelled, OtherUnlabelled>, is<0, 1>>);
static_assert(std::same_as<order<OtherUnlabelled, Unlabelled>, is<0, 1>>);
static_assert(std::same_as<order<Unlabelled>, is<0>>);
// Declared: the same for every argument order.
static_assert(std::same_as<order<Gradients, Optimizer>, is<0, 1>>);
static_assert(std::same_as<order<Optimizer, Gradients>, is<1, 0>>);
static_assert(std::same_as<order<Optimizer, Gradients, Early>, is<2, 1, 0>>);
// The lowest argument index that is ready comes first.
static_assert(std::same_as<order<Optimizer, Unlabelled, Gradients>, is<1, 2, 0>>);
// A label that nobody carries constrains nothing.
static_assert(std::same_as<order<Optimizer, Unlabelled>, is<0, 1>>);
// Two hooks may share a label.
static_assert(std::same_as<order<Optimizer, Gradients, Gradients>, is<1, 2, 0>>);
// A hook of another library is placed from outside.
static_assert(std::same_as<order<Foreign, ForeignTarget>, is<1, 0>>);
// The post order follows the main order unless it is declared.
static_assert(std::same_as<post_order<Optimizer, Gradients>, is<1, 0>>);
static_assert(std::same_as<order<Unlabelled, PostFirst>, is<0, 1>>);
static_assert(std::same_as<post_order<Unlabelled, PostFirst>, is<1, 0>>);
// Participants that give notices come first, unless the order says otherwise.
static_assert(std::same_as<order<Unlabelled, Notices>, is<1, 0>>);
struct NoticesLater {
    static constexpr bool gives_notice = true;
    using runs_after = labels_of<Unlabelled>;
};
static_assert(std::same_as<order<Unlabelled, NoticesLater>, is<0, 1>>);

constexpr bool only_the_hooks_on_a_cycle_are_blamed() {
    // head -> a <-> b -> tail, and c alone
    using joinable::detail::Edges;
    Edges<5> edges{};
    edges[0][1] = edges[1][2] = edges[2][1] = edges[2][3] = true;
    auto const solved = joinable::detail::solve<5>(edges, {});
    return solved.has_cycle && solved.on_cycle == std::array{false, true, true, false, false};
}
static_assert(only_the_hooks_on_a_cycle_are_blamed());

TEST_CASE("the order is the lexicographically first permutation that respects every edge") {
    for (unsigned bits = 0; bits < 4096; ++bits) { // every graph over four hooks
        joinable::detail::Edges<4> edges{};
        unsigned bit = 0;
        for (std::size_t i = 0; i < 4; ++i) {
            for (std::size_t j = 0; j < 4; ++j) {
                edges[i][j] = i != j && ((bits >> bit++) & 1U) != 0;
            }
        }
        auto const respects_edges = [&](std::array<std::size_t, 4> const& permutation) {
            for (std::size_t k = 0; k < 4; ++k) {
                for (std::size_t later = k + 1; later < 4; ++later) {
                    if (edges[permutation[later]][permutation[k]]) {
                        return false;
                    }
                }
            }
            return true;
        };
        std::array<std::size_t, 4> permutation{0, 1, 2, 3};
        bool found = respects_edges(permutation);
        while (!found && std::next_permutation(permutation.begin(), permutation.end())) {
            found = respects_edges(permutation);
        }
        auto const solved = joinable::detail::solve<4>(edges, {});
        REQUIRE(solved.has_cycle == !found);
        if (found) {
            REQUIRE(solved.sequence == permutation);
        }
    }
}

} // namespace
