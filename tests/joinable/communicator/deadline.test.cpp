// SPDX-License-Identifier: BSL-1.0
// What counts of the time between two tests, and between two looks of a rank that waits.
#include <joinable/communicator/detail/deadline.hpp>

#include <chrono>
#include <thread>

#include <doctest/doctest.h>

namespace {

using namespace std::chrono_literals;
using joinable::detail::PolledTime;

TEST_CASE("a wait ends between now and a year from now, whatever its deadline") {
    using std::chrono::nanoseconds;
    auto const now = std::chrono::steady_clock::now();
    using joinable::detail::end_of_wait;
    CHECK(end_of_wait((nanoseconds::min)(), now) == now);
    CHECK(end_of_wait(-1ns, now) == now);
    CHECK(end_of_wait(1ns, now) == now + 1ns);
    CHECK(end_of_wait((nanoseconds::max)(), now) == now + 365 * 24h);
}

TEST_CASE("a gap counts as at most 10 ms between tests, and as half the deadline in a wait") {
    PolledTime tested;
    PolledTime waited;
    CHECK_FALSE(tested.reaches(40ms));
    CHECK_FALSE(waited.reaches(40ms, PolledTime::gap_of_waits));
    for (int look = 1; look <= 4; ++look) {
        std::this_thread::sleep_for(30ms); // or longer, which counts no more
        CHECK(tested.reaches(40ms) == (look == 4));
        CHECK(tested.count() == look * 10ms);
        CHECK(waited.reaches(40ms, PolledTime::gap_of_waits) == (look >= 2));
        CHECK(waited.count() == look * 20ms);
    }
    waited.set(0ms); // a rank whose deadline is shorter than a gap of tests
    std::this_thread::sleep_for(30ms);
    CHECK(waited.reaches(1ms, PolledTime::gap_of_waits));
    CHECK(waited.count() == 10ms);
}

} // namespace
