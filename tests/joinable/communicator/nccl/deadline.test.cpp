// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/nccl/detail/deadline.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace {

using joinable::Arena;
using joinable::detail::NcclDeadline;
using Clock = NcclDeadline::Clock;

/// Much longer than a test takes, but two of them have passed since the clock began.
auto const length = Clock::now().time_since_epoch() / 4;

/// The deadlines of all ranks, which share memory.
struct Ranks {
    explicit Ranks(int size) : memory(static_cast<std::size_t>(size) * words_in_line) {
        for (int rank = 0; rank < size; ++rank) {
            of.emplace_back(length, rank, size);
            of.back().share(Arena{
                reinterpret_cast<std::byte*>(memory.data()),
                memory.size() * sizeof(std::uint64_t),
                nullptr,
                nullptr
            });
        }
    }
    static constexpr std::size_t words_in_line = NcclDeadline::line_bytes / sizeof(std::uint64_t);
    Clock::time_point made = Clock::now();
    std::vector<std::uint64_t> memory;
    std::deque<NcclDeadline> of;
};

struct Asked {
    std::chrono::nanoseconds left{};
    std::optional<joinable::AbortReason> reason = {};
};
/// What rank 0 finds at the deadline of a wait for this collective.
Asked ask(Ranks const& ranks, std::uint64_t number) {
    Asked asked;
    asked.left = ranks.of[0].more_time("waits", number, [&](joinable::AbortReason const& why) {
        asked.reason = why;
    });
    return asked;
}
bool goes_on(Ranks const& ranks, std::uint64_t number) {
    Asked const asked = ask(ranks, number);
    CHECK((asked.left >= length - (Clock::now() - ranks.made))); // from the last sign on
    return !asked.reason;
}

std::vector<int> from(int first, int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size - first));
    std::iota(ranks.begin(), ranks.end(), first);
    return ranks;
}

TEST_CASE("a deadline is renewed if all late ranks are at work, and names those that are not") {
    for (int const size : {2, 3, 4, 8}) {
        Ranks ranks{size};
        ranks.of[0].arrive(1);
        for (int next = 1; next < size; ++next) {
            auto const reason = ask(ranks, 1).reason;
            REQUIRE(reason);
            CHECK(reason->kind == joinable::FailureKind::timed_out);
            CHECK(reason->ranks == from(next, size));
            ranks.of[static_cast<std::size_t>(next)].keep_alive();
        }
        CHECK(goes_on(ranks, 1));
    }
}

TEST_CASE("a deadline is renewed by any other rank at work where nobody knows who is late") {
    for (int const size : {1, 2, 3, 4, 8}) {
        Ranks ranks{size};
        ranks.of[0].keep_alive(); // it does not wait for itself
        CHECK_FALSE(goes_on(ranks, 0));
        if (size > 1) {
            ranks.of.back().keep_alive();
            CHECK(goes_on(ranks, 0));
        }
    }
}

TEST_CASE("a deadline that nobody renews says what is known") {
    for (int const size : {1, 2, 3, 4, 8}) {
        Ranks ranks{size};
        for (NcclDeadline const& rank : ranks.of) {
            rank.arrive(3);
        }
        auto const text = [&](std::uint64_t number) {
            auto const reason = ask(ranks, number).reason;
            REQUIRE(reason);
            CHECK(reason->ranks.empty());
            return reason->message;
        };
        CHECK(text(0).starts_with("no answer within "));
        CHECK(text(3).starts_with("all ranks arrived, but nothing came within "));
        CHECK(text(3).ends_with(" s, while rank 0 waits"));
    }
}

} // namespace
