// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

#include <support/ranks.hpp>

#include <joinable/hierarchical.hpp>

namespace joinable_tests {

using ThreadMachines =
    joinable::HierarchicalCommunicator<joinable::ThreadCommunicator, joinable::ThreadCommunicator>;

/// What one thread of a machine has.
struct OnMachine {
    int machine;
    joinable::ThreadCommunicator& local;
    joinable::ThreadCommunicator* across; ///< null unless it leads its machine
};

/// Runs `body(place)` in a thread for each rank of machines with so many ranks. What a body throws is
/// rethrown. Groups that are split from one of all ranks would hear of each other's failures.
inline void on_machines(std::vector<int> const& sizes, std::function<void(OnMachine)> const& body) {
    Watchdog const watchdog{static_cast<int>(sizes.size())};
    auto const machines = static_cast<int>(sizes.size());
    joinable::run_threads(machines, [&](joinable::ThreadCommunicator& across) {
        int const machine = across.rank();
        across.set_deadline(std::chrono::seconds{60});
        int const ranks = sizes[static_cast<std::size_t>(machine)];
        joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& local) {
            local.set_deadline(std::chrono::seconds{60});
            body({machine, local, local.rank() == 0 ? &across : nullptr}
            ); // nobody else uses it now
        });
    });
}
/// Runs `body(comm)` in a thread for each rank.
inline void
run_machines(std::vector<int> const& sizes, std::function<void(ThreadMachines&)> const& body) {
    on_machines(sizes, [&](OnMachine place) {
        ThreadMachines comm{place.local, place.across};
        body(comm);
    });
}

} // namespace joinable_tests
