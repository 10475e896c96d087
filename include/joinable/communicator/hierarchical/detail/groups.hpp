// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
#include <joinable/communicator/hierarchical/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The communicators of a rank. `across` is null on ranks that do not lead their machine, and
/// on all ranks of a group on one machine.
struct Levels {
    std::unique_ptr<AnyInterface> local;
    std::unique_ptr<AnyInterface> across;
    HierarchicalOptions options;
    // The parts of a group, which split() makes.
    Machines machines = {};
    std::function<std::optional<AbortReason>()> parent = {
    }; ///< why its ranks have ended, if they have
    bool is_renumbered = false; ///< see Communicator
    bool can_split = true;      ///< all ranks can; the same on all of them

    /// Whether this rank can.
    [[nodiscard]] bool can_split_here() const {
        return local->can_split() && (across == nullptr || across->can_split());
    }
};

/// The machines of this rank's group, with those of its ranks that are in it.
/// @throws ContractViolation  on all ranks: some group cannot be made of these machines. All groups
///                            are checked, so that all ranks find the same.
[[nodiscard]] inline Machines
machines_of_group(std::span<GroupChoice const> choices, Machines const& machines, int rank) {
    std::set<std::int32_t> colors;
    for (GroupChoice const& choice : choices) {
        colors.insert(choice.color);
    }
    Machines result;
    for (std::int32_t const color : colors) {
        std::vector<std::uint64_t> sizes; // of the group's machines
        std::vector<int> heads;           // the first rank of each of them
        int own = -1;
        for (int const member : members_of(choices, color)) {
            int const machine = machines.machine_of(member);
            if (heads.empty() || machines.machine_of(heads.back()) != machine) {
                if (std::any_of(heads.begin(), heads.end(), [&](int head) {
                        return machines.machine_of(head) == machine;
                    })) {
                    throw ContractViolation{concat(
                        "split needs keys that keep the ranks of a machine next to each other, but in "
                        "the group of color ",
                        color,
                        " rank ",
                        member,
                        " of machine ",
                        machine,
                        " comes after ranks of another machine"
                    )};
                }
                sizes.push_back(0);
                heads.push_back(member);
            }
            ++sizes.back();
            own = member == rank ? static_cast<int>(heads.size()) - 1 : own;
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
