// SPDX-License-Identifier: BSL-1.0
// What a guard changes outside itself, and what it needs to be its own.
#include <joinable/join/detail/attachments.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/recording_communicator.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::Join;
using joinable::participants;

TEST_CASE("a second guard on a communicator is refused, and the first one goes on") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer a{comm};
        AllReducer b{comm};
        Join guard{participants(a)};
        CHECK(a() == comm.size());
        auto const second = [&] { Join inner{participants(b)}; };
        CHECK_THROWS_WITH_AS(
            second(),
            "a second Join over a communicator that is inside a guard already; end that one first, "
            "or split() the communicator",
            joinable::ContractViolation
        );
        CHECK(a() == comm.size());
        CHECK(guard.finish().rounds == 2);
    });
}

TEST_CASE("a guard that has finished makes room for the next in the same scope") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const before = comm.set_deadline(std::chrono::seconds{50});
        Join first{participants(reducer), {.timeout = std::chrono::seconds{40}}};
        reducer();
        auto const result = first.finish();
        CHECK(comm.set_deadline(before) == std::chrono::seconds{50});
        Join second{participants(reducer)};
        reducer();
        reducer();
        CHECK(second.finish().rounds == 2);
        CHECK(first.finish().rounds == result.rounds);
    });
}

TEST_CASE("a rank alone takes a timeout, and its communicator gets its own deadline back") {
    joinable::SelfCommunicator comm;
    CHECK(comm.set_deadline(std::chrono::seconds{50}) == joinable::default_deadline);
    AllReducer reducer{comm};
    Join guard{participants(reducer), {.timeout = std::chrono::seconds{40}}};
    CHECK(reducer() == 1);
    guard.finish();
    CHECK(comm.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{50});
    CHECK(comm.missing_ranks().empty());
}

TEST_CASE(
    "roll calls run over the control communicator, and nothing else does" *
    doctest::skip(!ranks_share_memory)
) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<std::vector<std::string>> controls(static_cast<std::size_t>(world));
        over_ranks({world}, [&](RankCommunicator& inner) {
            RecordingCommunicator data{inner};
            RecordingCommunicator host{inner};
            AllReducer reducer{data};
            {
                Join guard{participants(reducer), joinable::control(host), reductions = 1};
                for (int i = 0; i <= inner.rank(); ++i) {
                    reducer();
                }
            }
            auto const sums = static_cast<std::size_t>(world);
            CHECK(data.trace == std::vector<std::string>(sums, "all_reduce 1 i32"));
            controls[static_cast<std::size_t>(inner.rank())] = host.trace;
        });
        for (auto const& trace : controls) {
            CHECK(trace == controls.front());
            CHECK(std::count(trace.begin(), trace.end(), "all_reduce 7 u64") == world + 3);
        }
    }
}

TEST_CASE("deadlines come back although one communicator sets another's") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        RecordingCommunicator outer{comm};
        AllReducer of_outer{outer};
        AllReducer of_comm{comm};
        auto const before = comm.set_deadline(std::chrono::seconds{50});
        {
            Join guard{participants(of_outer, of_comm), {.timeout = std::chrono::seconds{40}}};
            guard.finish();
        }
        CHECK(comm.set_deadline(before) == std::chrono::seconds{50});
    });
}

TEST_CASE("a guard that is not enabled changes nothing inside one that is") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer)};
        reducer();
        {
            Join inner{participants(reducer), {.enable = false}};
            reducer();
        }
        reducer();
        CHECK(guard.finish().rounds == 3);
    });
}

} // namespace
