// SPDX-License-Identifier: BSL-1.0
// What counts of the time between two tests, and between two looks of a rank that waits.
#include <joinable/communicator/detail/deadline.hpp>

#include <chrono>
#include <cstddef>
#include <optional>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace std::chrono_literals;
using joinable::detail::WaitClock;

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
    WaitClock tested;
    WaitClock waited;
    CHECK_FALSE(tested.reaches(40ms));
    CHECK_FALSE(waited.reaches(40ms, WaitClock::gap_of_waits));
    for (int look = 1; look <= 4; ++look) {
        std::this_thread::sleep_for(30ms); // or longer, which counts no more
        CHECK(tested.reaches(40ms) == (look == 4));
        CHECK(tested.count() == look * 10ms);
        CHECK(waited.reaches(40ms, WaitClock::gap_of_waits) == (look >= 2));
        CHECK(waited.count() == look * 20ms);
    }
    waited.extend(40ms, 40ms); // a rank whose deadline is shorter than a gap of tests
    std::this_thread::sleep_for(30ms);
    CHECK(waited.reaches(1ms, WaitClock::gap_of_waits));
    CHECK(waited.count() == 10ms);
}

TEST_CASE("a wait that is asked at its deadline goes on for as long as the answer says") {
    using std::chrono::nanoseconds;
    WaitClock clock;
    int questions = 0;
    auto const later = [&]() -> std::optional<nanoseconds> {
        return questions++ == 0 ? std::nullopt : std::optional<nanoseconds>{15ms};
    };
    clock.extend_when_reached((nanoseconds::max)(), WaitClock::gap_of_waits, later);
    clock.extend_when_reached((nanoseconds::max)(), WaitClock::gap_of_waits, later);
    CHECK(questions == 0);
    clock.extend_when_reached(0ms, WaitClock::gap_of_waits, later);
    CHECK(questions == 1); // the answer is not known yet
    CHECK(clock.nap(20ms) == 10ms);
    clock.extend_when_reached(0ms, WaitClock::gap_of_waits, later);
    CHECK(questions == 2);
    clock.extend(20ms, 15ms);
    CHECK(clock.count() == 5ms);
    CHECK(clock.nap(20ms) == 10ms); // half the deadline
    CHECK(clock.nap(8ms) == 3ms);
    CHECK(clock.nap(4ms) == 0ms); // shorter meanwhile
    clock.extend((nanoseconds::min)(), (nanoseconds::min)());
    CHECK(clock.count() == 0ms);
    CHECK(clock.nap((nanoseconds::max)()) == (nanoseconds::max)() / 2);
    clock.extend((nanoseconds::min)(), 1ns); // as if the deadline were 0
    CHECK(clock.count() == -1ns);
    clock.extend(1ns, (nanoseconds::min)());
    CHECK(clock.count() == 1ns);
    clock.extend((nanoseconds::max)(), 1ns);
    CHECK(clock.nap((nanoseconds::max)()) == 1ns);
    clock.extend(1ms, 9ms); // more than the deadline
    CHECK(clock.nap((nanoseconds::max)()) == (nanoseconds::max)() / 2);
}

TEST_CASE("a wait that blocks ends when it is done, and otherwise asks at its deadline") {
    using Clock = std::chrono::steady_clock;
    auto const pause = [] { std::this_thread::sleep_for(1ms); };
    int polls = 0;
    joinable::detail::wait_until(
        1h,
        [&] { return ++polls == 3; },
        pause,
        []() -> std::optional<std::chrono::nanoseconds> { throw 0; }
    );
    CHECK(polls == 3);
    auto const start = Clock::now();
    int questions = 0;
    auto const more = [&]() -> std::optional<std::chrono::nanoseconds> {
        if (++questions == 2) {
            throw Clock::now() - start;
        }
        return 20ms;
    };
    CHECK_THROWS(joinable::detail::wait_until(40ms, [] { return false; }, pause, more));
    CHECK(questions == 2);
    CHECK(Clock::now() - start >= 60ms);

    CHECK_FALSE(joinable::detail::wait_at_most(5ms, [] { return false; }, pause));
    CHECK(joinable::detail::wait_at_most(0ms, [] { return true; }, pause));
}

TEST_CASE("a rank is at work if it has said so within the deadline") {
    using Clock = std::chrono::steady_clock;
    Clock::time_point const now = Clock::now();
    std::vector<Clock::time_point> const reports{{}, now, now - 18min, now - 2h, now - 30min};
    std::vector<int> overdue{0, 2, 3, 4};
    auto const report_of = [&](int rank) { return reports[static_cast<std::size_t>(rank)]; };
    auto const left = joinable::detail::take_ranks_at_work(overdue, 1h, report_of);
    CHECK(overdue == std::vector{0, 3});
    CHECK(left <= 30min);
    CHECK(left > 20min);
    CHECK(joinable::detail::take_ranks_at_work(overdue, 1h, report_of) == 1h);
    // Longer than the clock runs: a rank that never reports is not at work.
    CHECK(joinable::detail::take_ranks_at_work(overdue, 24h * 36500, report_of) <= 24h * 36500);
    CHECK(overdue == std::vector{0});
}

} // namespace
