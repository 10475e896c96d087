// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/hierarchical.hpp>

namespace joinable_tests {

using ThreadMachines = joinable::HierarchicalCommunicator;

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
inline void run_machines(
    std::vector<int> const& sizes,
    std::function<void(ThreadMachines&)> const& body,
    joinable::HierarchicalOptions const& options = {}
) {
    on_machines(sizes, [&](OnMachine place) {
        ThreadMachines comm{place.local, place.across, options};
        body(comm);
    });
}

[[nodiscard]] inline int ranks_of(std::vector<int> const& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 0);
}
[[nodiscard]] inline std::string text_of(std::vector<int> const& sizes) {
    std::string text;
    for (int const size : sizes) {
        text += (text.empty() ? "" : "+") + std::to_string(size);
    }
    return text;
}
/// Numbers of ranks on each machine: under a sanitizer of at most 6 ranks, which meet as those of more do.
inline std::vector<std::vector<int>> const machine_layouts = [] {
    std::vector<std::vector<int>> all{
        {1}, {3}, {1, 1}, {1, 3}, {3, 1}, {2, 2}, {1, 1, 1, 1}, {2, 1, 3}, {4, 4}
    };
    std::erase_if(all, [](std::vector<int> const& sizes) {
        return is_reduced() && ranks_of(sizes) > 6;
    });
    return all;
}();

/// What each rank throws from `body(comm)`, when all have ended.
template <class Failure>
struct MachineFailures {
    std::vector<std::optional<Failure>> of_rank;

    MachineFailures(
        std::vector<int> const& sizes,
        std::function<void(ThreadMachines&)> const& body,
        joinable::HierarchicalOptions const& options = {}
    )
        : of_rank(static_cast<std::size_t>(ranks_of(sizes))) {
        auto const run = [&](ThreadMachines& comm) {
            auto& mine = of_rank[static_cast<std::size_t>(comm.rank())];
            try {
                body(comm);
            } catch (Failure const& failure) {
                mine = failure;
                std::uint8_t byte = 0;
                auto const again = [&] {
                    comm.all_reduce({&byte, 1, joinable::DType::u8}, joinable::ReduceOp::max)
                        .wait();
                };
                CHECK_THROWS_AS(again(), Failure); // and for ever
                CHECK(comm.is_aborted());
            } catch (...) {
                ++ended_;
                throw;
            }
            wait_until_all_have_ended();
        };
        run_machines(sizes, run, options);
    }
    /// All of them, or all but one, name these ranks.
    void check(std::vector<int> const& culprits, std::string const& where, int but = -1) const {
        for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
            if (static_cast<int>(rank) != but) {
                CHECK_MESSAGE(of_rank[rank].has_value(), where, ": rank ", rank, " throws nothing");
                if (of_rank[rank]) {
                    CHECK_MESSAGE(
                        of_rank[rank]->ranks() == culprits, where, ": ", of_rank[rank]->what()
                    );
                }
            }
        }
    }

private:
    /// A rank that left would be another reason for those that are late.
    void wait_until_all_have_ended() {
        ++ended_;
        wait_until([&] { return ended_ == static_cast<int>(of_rank.size()); });
    }
    std::atomic<int> ended_{0};
};

} // namespace joinable_tests
