// SPDX-License-Identifier: BSL-1.0
// Groups of ranks of several machines as communicators of their own.
#include <joinable/communicator/hierarchical/communicator.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/closed_forms.hpp>
#include <support/house_communicator.hpp>
#include <support/machines.hpp>
#include <support/tcp_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/any_communicator.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/error.hpp>
#include <joinable/hierarchical.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using Sizes = std::vector<int>;

static_assert(joinable::Splits<ThreadMachines>);

int sum_of_ones(auto& comm) {
    std::int32_t one = 1;
    comm.all_reduce({&one, 1, DType::i32}, ReduceOp::sum).wait();
    return one;
}

/// Splits by `choose(comm)`, a color and a key, and compares the group with the one that all ranks' own
/// choices say.
void check_group(
    ThreadMachines& comm, std::function<std::pair<int, int>(ThreadMachines&, int)> const& choose
) {
    auto const [color, key] = choose(comm, comm.rank());
    auto group = comm.split(color, key);
    CHECK(comm.can_split());
    CHECK(group.can_split());
    std::vector<std::pair<int, int>> members; // key and rank
    for (int rank = 0; rank < comm.size(); ++rank) {
        auto const [other, place] = choose(comm, rank);
        if (other == color) {
            members.emplace_back(place, rank);
        }
    }
    std::sort(members.begin(), members.end());
    CHECK(group.size() == static_cast<int>(members.size()));
    CHECK(members[static_cast<std::size_t>(group.rank())].second == comm.rank());
    for (int root = 0; root < group.size(); ++root) {
        std::int32_t told = comm.rank();
        group.broadcast({&told, 1, DType::i32}, root).wait();
        CHECK(told == members[static_cast<std::size_t>(root)].second);
    }
    closed_forms::check_all<float>(group, {0, 3});
    CHECK(sum_of_ones(comm) == comm.size()); // both can be used in turn
    auto deeper = group.split(0, 0);
    CHECK(deeper.rank() == group.rank());
    closed_forms::check_all<float>(deeper, {3});
}

TEST_CASE("groups over machines are those of the colors, in the order of the keys") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        run_machines(sizes, [](ThreadMachines& comm) {
            CAPTURE(comm.rank());
            check_group(comm, [](auto&, int) { return std::pair{7, 0}; });
            check_group(comm, [](auto&, int rank) { return std::pair{rank, 0}; });
            // Each machine has its own, in reverse order: any of its ranks may be the first.
            check_group(comm, [](auto& all, int rank) {
                return std::pair{all.machine_of(rank), -rank};
            });
            // The leaders are among themselves, and so are the others of each machine.
            check_group(comm, [](auto& all, int rank) {
                int const machine = all.machine_of(rank);
                bool const leads = rank == 0 || all.machine_of(rank - 1) != machine;
                return std::pair{leads ? 0 : 1 + machine, 0};
            });
            // The machines in reverse order, with the second rank of each by itself.
            check_group(comm, [](auto& all, int rank) {
                int const machine = all.machine_of(rank);
                bool const is_second = rank > 0 && all.machine_of(rank - 1) == machine &&
                                       (rank == 1 || all.machine_of(rank - 2) != machine);
                return std::pair{is_second ? 1 + machine : 0, -machine};
            });
        });
    }
}

TEST_CASE("a group that leaders do not connect is refused on all ranks, which go on") {
    run_machines({2, 1, 2}, [](ThreadMachines& comm) {
        int const second = comm.rank() == 1 || comm.rank() == 4 ? 1 : 0;
        CHECK_THROWS_WITH_AS(
            (void)comm.split(second, 0),
            "split needs the leader of each machine, if a group has ranks of several, because leaders "
            "alone are connected; but in the group of color 1 the first rank of machine 0 is rank 1, "
            "and its leader is rank 0",
            joinable::ContractViolation
        );
        CHECK_THROWS_AS((void)comm.split(0, -comm.rank()), joinable::ContractViolation);
        CHECK_THROWS_WITH_AS(
            (void)comm.split(0, comm.rank() == 1 ? 9 : comm.rank()),
            "split needs keys that keep the ranks of a machine next to each other, but in the group of "
            "color 0 rank 1 of machine 0 comes after ranks of another machine",
            joinable::ContractViolation
        );
        CHECK_THROWS_AS((void)comm.split(-1, 0), joinable::ContractViolation);
        CHECK(sum_of_ones(comm) == 5);
    });
}

TEST_CASE("a group of machines inherits the deadline and whether ranks compare") {
    auto const body = [](ThreadMachines& comm) {
        comm.set_deadline(std::chrono::seconds{57});
        auto group = comm.split(0, 0);
        CHECK(group.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{57});
        std::vector<std::int32_t> values(8, 1);
        group.broadcast({values.data(), 8, DType::i32}, comm.rank() == 3 ? 0 : 1).wait();
    };
    MachineFailures<joinable::Mismatch> const failures{
        {2, 2},
        [&](ThreadMachines& comm) {
            try {
                body(comm);
            } catch (joinable::Mismatch const& error) {
                CHECK(!comm.is_aborted()); // the group's failures are its own
                comm.barrier();
                comm.abort({joinable::FailureKind::mismatch, error.ranks(), error.what()});
                throw;
            }
        },
        {.check = true}
    };
    failures.check({3}, "broadcast");
}

TEST_CASE("if the leaders cannot be split, all ranks are told, and go on") {
    auto const is_refused = []<class Across>(Across& across) {
        joinable::run_threads(2, [&](ThreadCommunicator& local) {
            joinable::HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            CHECK_THROWS_WITH_AS(
                (void)comm.split(0, 0),
                "split needs the split() of both levels, but the communicator of a machine's ranks or that of "
                "the leaders has none; choose transports that have it on all ranks",
                joinable::ContractViolation
            );
            CHECK(sum_of_ones(comm) == 4);
            CHECK_FALSE(comm.can_split()); // also where this rank leads no machine
            CHECK_FALSE(joinable::AnyCommunicator{comm}.can_split());
            joinable::SelfCommunicator alone;
            joinable::HierarchicalCommunicator outer{comm, comm.rank() == 0 ? &alone : nullptr};
            CHECK_THROWS_AS((void)outer.split(0, 0), joinable::ContractViolation);
            CHECK(sum_of_ones(outer) == 4);
        });
    };
    run_tcp_threads(2, [&](joinable::TcpCommunicator& across) {
        is_refused(across);
        joinable::AnyCommunicator of_any{across}; // whose type has split()
        is_refused(of_any);
    });
}

TEST_CASE("a group that machines of a level do not connect is refused on all ranks, which go on") {
    constexpr std::array connected{0, 0, 1, 1};
    constexpr std::array apart{0, 1, 1, 0}; // rank 3 of 0 is not the leader of its machine
    joinable::run_threads(2, [&](ThreadCommunicator& top) {
        on_machines({2, 2}, [&](OnMachine place) {
            ThreadMachines rack{place.local, place.across};
            joinable::HierarchicalCommunicator comm{rack, rack.rank() == 0 ? &top : nullptr};
            auto const choose = [&](auto const& of_first) {
                int const choice = of_first[static_cast<std::size_t>(rack.rank())];
                return comm.machine() == 0 ? choice : 2;
            };
            CHECK_THROWS_WITH_AS(
                (void)comm.split(choose(apart), 0),
                doctest::Contains(
                    comm.machine() == 0 ? "and its leader is rank 2"
                                        : "on 4 other ranks, which throw why"
                ),
                joinable::ContractViolation
            );
            CHECK(sum_of_ones(comm) == 8);
            auto group = comm.split(choose(connected), 0);
            CHECK(sum_of_ones(group) == (comm.machine() == 0 ? 2 : 4));
        });
    });
}

/// A group whose class has no split().
struct OwnedThreads {
    ThreadCommunicator own;
};
struct Undivided : OwnedThreads, HouseCommunicator {
    Undivided(ThreadCommunicator& whole, int color, int key)
        : OwnedThreads{whole.split(color, key)}, HouseCommunicator{own} {}
};
/// The leaders, by a class whose split() is a function of a test.
template <class Split>
struct Leaders : HouseCommunicator {
    Leaders(ThreadCommunicator& inner, Split const& how) : HouseCommunicator{inner}, how_{how} {}
    auto split(int color, int key) { return how_(inner_, color, key); }

private:
    Split how_;
};
/// Runs `body(local, comm)` on each of so many machines of two ranks, whose leaders split as
/// `how(leaders, color, key)`.
template <class Split, class Body>
void run_leaders(
    int machines,
    Split const& how,
    Body const& body,
    std::chrono::seconds deadline = std::chrono::seconds{60}
) {
    joinable::run_threads(machines, [&](ThreadCommunicator& top) {
        Leaders across{top, how};
        joinable::run_threads(2, [&](ThreadCommunicator& local) {
            local.set_deadline(deadline);
            joinable::HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            body(local, comm);
        });
    });
}

TEST_CASE("a group whose leaders cannot be split again says so on all of its ranks, and no other") {
    auto const how = [](ThreadCommunicator& leaders, int color, int key) {
        return Undivided{leaders, color, key};
    };
    run_leaders(3, how, [](ThreadCommunicator&, ThreadMachines& comm) {
        CHECK(comm.can_split());
        bool const is_alone = comm.machine() == 2;
        auto group = comm.split(is_alone ? 1 : 0, 0);
        CHECK(group.can_split() == is_alone);
        if (is_alone) {
            CHECK(sum_of_ones(group) == 2);
            CHECK(group.split(0, 0).can_split());
        } else {
            CHECK_THROWS_AS((void)group.split(0, 0), joinable::ContractViolation);
            CHECK(sum_of_ones(group) == 4);
        }
        CHECK(sum_of_ones(comm) == 6);
    });
}

TEST_CASE("leaders may take longer in split() than the deadline of their machine's ranks") {
    auto const how = [](ThreadCommunicator& leaders, int color, int key) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1500});
        return leaders.split(color, key);
    };
    auto const body = [](ThreadCommunicator& local, ThreadMachines& comm) {
        auto group = comm.split(0, 0);
        CHECK(local.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{1});
        CHECK(sum_of_ones(group) == 4);
    };
    run_leaders(2, how, body, std::chrono::seconds{1});
}

TEST_CASE("a level that refuses a group when it was aborted ends all ranks for the reason of that"
) {
    auto const how = [](ThreadCommunicator& leaders, int, int) -> ThreadCommunicator {
        leaders.abort({joinable::FailureKind::peer_failed, {1}, "out of memory"});
        throw joinable::ContractViolation{"this level refuses all groups"};
    };
    run_leaders(2, how, [](ThreadCommunicator&, ThreadMachines& comm) {
        CHECK_THROWS_WITH_AS(
            (void)comm.split(0, 0), doctest::Contains("out of memory"), joinable::PeerFailed
        );
        CHECK(comm.is_aborted());
    });
}

TEST_CASE("a level without deadlines stays one behind an AnyCommunicator") {
    run_ranks({1, 2, 4}, [](ThreadCommunicator& hosts) {
        HouseCommunicator house{hosts};
        joinable::AnyCommunicator across{house};
        joinable::run_threads(2, [&](ThreadCommunicator& local) {
            joinable::HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            CHECK(sum_of_ones(comm) == 2 * hosts.size());
        });
    });
}

TEST_CASE("an abort reaches the groups of machines that were split off, and theirs") {
    for (int culprit = 0; culprit < 4; ++culprit) {
        MachineFailures<joinable::PeerFailed> const failures{
            {2, 2},
            [&](ThreadMachines& comm) {
                // The group of the leaders has no number 3.
                bool const leads = comm.rank() % 2 == 0;
                auto group = comm.split(leads ? 0 : comm.rank(), 0);
                auto deeper = group.split(0, 0);
                comm.barrier();
                deeper.barrier();
                if (comm.rank() == culprit) {
                    comm.abort({joinable::FailureKind::peer_failed, {culprit}, "out of memory"});
                    deeper.barrier();
                }
                for (;;) {
                    deeper.barrier();
                }
            }
        };
        failures.check({culprit}, "deeper");
    }
}

TEST_CASE("groups over machines go on without a rank of another group that has left") {
    run_machines({3, 2}, [](ThreadMachines& comm) {
        auto group = comm.split(comm.rank() == 2 ? 1 : 0, 0);
        comm.barrier();
        if (comm.rank() == 2) {
            return;
        }
        if (comm.machine() == 0) {
            wait_until([&] { return comm.is_aborted(); }); // rank 2 has ended
        }
        for (int round = 0; round < 3; ++round) {
            CHECK(sum_of_ones(group) == 4);
        }
    });
}

} // namespace
