// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/shared_memory/board/waiting.hpp>

#include <chrono>
#include <thread>

#include <doctest/doctest.h>

#include <joinable/communicator/shared_memory/board/tuning.hpp>

namespace {

using joinable::detail::WaitQueue;
namespace tuning = joinable::detail::tuning;
using namespace std::chrono_literals;

/// How often a wait looks in vain before it says that it sleeps, if each look after the spins takes so long.
int looks_before_sleep(WaitQueue& room, std::chrono::nanoseconds time_of_look) {
    int const spins = room.is_crowded() ? tuning::crowded_spins : tuning::spins;
    int looks = 0;
    int before_sleep = 0;
    bool const is_ready = room.wait(
        [&] {
            if (before_sleep == 0 && ++looks > spins) {
                std::this_thread::sleep_for(time_of_look);
            }
            return before_sleep != 0;
        },
        1h,
        [&] {
            before_sleep = looks;
            return 0ns; // nobody wakes this one
        }
    );
    CHECK(is_ready);
    return before_sleep - spins;
}

TEST_CASE("a wait looks for deaths soon, however long the system keeps it from its core") {
    for (int const ranks : {1, 100'000}) {
        WaitQueue room{ranks};
        CHECK(room.is_crowded() == (ranks != 1));
        CHECK(looks_before_sleep(room, WaitQueue::longest_yielding) == 2); // and once in its sleep
        CHECK(looks_before_sleep(room, 0ns) <= tuning::yields + 1);
        CHECK(!room.has_sleepers());
    }
}

} // namespace
