// SPDX-License-Identifier: BSL-1.0
#include <joinable/join/detail/skew.hpp>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::Join;
using joinable::participants;

TEST_CASE("a warning passes at most once a minute") {
    joinable::detail::OncePerMinute gate;
    std::chrono::steady_clock::time_point const start{};
    CHECK(gate.allows(start));
    CHECK_FALSE(gate.allows(start));
    CHECK_FALSE(gate.allows(start + std::chrono::seconds{59}));
    CHECK(gate.allows(start + std::chrono::seconds{60}));
    CHECK_FALSE(gate.allows(start + std::chrono::seconds{61}));
    CHECK(gate.allows(start + std::chrono::hours{5}));
}

TEST_CASE("ranks that shadow for long say so once" * doctest::skip(!ranks_share_memory)) {
    std::mutex mutex;
    std::vector<std::string> warnings;
    auto const sink = [&](std::string_view text) {
        std::lock_guard const lock{mutex};
        warnings.emplace_back(text);
    };
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer), {.warn = sink, .skew_limit = 5}};
        for (int i = 0; comm.rank() == 0 && i < 20; ++i) {
            reducer();
        }
        guard.finish();
    });
    REQUIRE(warnings.size() == 1); // of this process, in this minute
    CHECK(warnings[0].find("ran out of inputs and has shadowed 6 rounds") != std::string::npos);
}

} // namespace
