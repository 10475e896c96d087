// SPDX-License-Identifier: BSL-1.0
#include <joinable/join/result.hpp>

#include <sstream>

#include <doctest/doctest.h>

namespace {

TEST_CASE("a result prints as a table with a line per rank") {
    joinable::JoinResult result;
    result.rounds = 1200;
    result.own_rounds = 5;
    result.shadow_rounds = 1195;
    result.rounds_per_rank = {5, 1200, 17};
    result.last_joiners = {1};
    result.waited = std::chrono::microseconds{1500};
    std::ostringstream stream;
    stream << result;
    CHECK(
        stream.str() == "rank   rounds shadowed\n"
                        "   0        5     1195\n"
                        "   1     1200        0 last\n"
                        "   2       17     1183\n"
                        "1200 rounds; this rank ran 5, shadowed 1195, waited 1.5 ms\n"
    );
}

TEST_CASE("a result says when it stopped early and what has not synced") {
    joinable::JoinResult result;
    result.rounds = result.own_rounds = 3;
    result.rounds_per_rank = {3};
    result.last_joiners = {0};
    result.stopped_early = true;
    result.unsynced_rounds = 2;
    CHECK(
        to_string(result) == "rank   rounds shadowed\n"
                             "   0        3        0 last\n"
                             "3 rounds, stopped early; this rank ran 3, shadowed 0, waited 0 ms; "
                             "the last 2 did not sync\n"
    );
}

} // namespace
