// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
#include <joinable/communicator/hierarchical/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What the ranks of machines communicate by. `across` is null on ranks that do not lead their machine, and
/// on all ranks of a group on one machine.
struct Levels {
    std::unique_ptr<AnyInterface> local;
    std::unique_ptr<AnyInterface> across;
    HierarchicalOptions options;
    // What a group has, which split() makes.
    Machines machines = {};
    std::function<std::optional<AbortReason>()> parent = {
    }; ///< why its ranks have ended, if they have
    bool is_renumbered = false; ///< see Communicator
};

/// What a rank gives to split().
struct GroupChoice {
    std::int32_t color;
    std::int32_t key;
};

/// Whether the group of this color is_renumbered().
[[nodiscard]] inline bool
group_is_renumbered(std::span<GroupChoice const> choices, std::int32_t color) {
    std::vector<int> members;
    for (std::size_t rank = 0; rank < choices.size(); ++rank) {
        if (choices[rank].color == color) {
            members.push_back(static_cast<int>(rank));
        }
    }
    auto const key = [&](int of) { return choices[static_cast<std::size_t>(of)].key; };
    std::sort(members.begin(), members.end(), [&](int a, int b) {
        return std::tuple{key(a), a} < std::tuple{key(b), b};
    });
    return renumbers(members);
}

/// The machines of this rank's group, with those of its ranks that are in it.
/// @throws ContractViolation  on all ranks: some group cannot be made of these machines. All groups
///                            are checked, so that all ranks find the same.
[[nodiscard]] inline Machines
machines_of_group(std::span<GroupChoice const> choices, Machines const& machines, int rank) {
    std::vector<int> ranks(choices.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    auto const choice = [&](int of) { return choices[static_cast<std::size_t>(of)]; };
    std::sort(ranks.begin(), ranks.end(), [&](int a, int b) {
        return std::tuple{choice(a).color, choice(a).key, a} <
               std::tuple{choice(b).color, choice(b).key, b};
    });
    Machines result;
    for (std::size_t first = 0, end = 0; first < ranks.size(); first = end) {
        auto const color = choice(ranks[first]).color;
        std::vector<std::uint64_t> sizes; // of the group's machines
        std::vector<int> heads;           // the first rank of each of them
        int own = -1;
        for (; end < ranks.size() && choice(ranks[end]).color == color; ++end) {
            int const machine = machines.machine_of(ranks[end]);
            if (heads.empty() || machines.machine_of(heads.back()) != machine) {
                if (std::any_of(heads.begin(), heads.end(), [&](int head) {
                        return machines.machine_of(head) == machine;
                    })) {
                    throw ContractViolation{concat(
                        "split needs keys that keep the ranks of a machine next to each other, but in "
                        "the group of color ",
                        color,
                        " rank ",
                        ranks[end],
                        " of machine ",
                        machine,
                        " comes after ranks of another machine"
                    )};
                }
                sizes.push_back(0);
                heads.push_back(ranks[end]);
            }
            ++sizes.back();
            own = ranks[end] == rank ? static_cast<int>(heads.size()) - 1 : own;
        }
        for (int const head : heads) {
            int const machine = machines.machine_of(head);
            if (heads.size() > 1 && head != machines.first_of(machine)) {
                throw ContractViolation{concat(
                    "split needs the leader of each machine, if a group has ranks of several, because "
                    "leaders alone are connected; but in the group of color ",
                    color,
                    " the first rank of machine ",
                    machine,
                    " is rank ",
                    head,
                    ", and its leader is rank ",
                    machines.first_of(machine)
                )};
            }
        }
        if (own >= 0) {
            result = Machines{sizes, own};
        }
    }
    return result;
}

}}} // namespace joinable::v0::detail
