// SPDX-License-Identifier: BSL-1.0
#include <joinable/trace/trace.hpp>

#include <chrono>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::JoinResult;

/// Read back member by member.
JoinResult parsed(std::string const& text) {
    auto const json = nlohmann::json::parse(text);
    CHECK(json.size() == 9);
    JoinResult result;
    json.at("rounds").get_to(result.rounds);
    json.at("own_rounds").get_to(result.own_rounds);
    json.at("shadow_rounds").get_to(result.shadow_rounds);
    json.at("rounds_per_rank").get_to(result.rounds_per_rank);
    json.at("last_joiners").get_to(result.last_joiners);
    json.at("authoritative_rank").get_to(result.authoritative_rank);
    json.at("stopped_early").get_to(result.stopped_early);
    json.at("unsynced_rounds").get_to(result.unsynced_rounds);
    result.waited =
        std::chrono::nanoseconds{json.at("waited_nanoseconds").get<std::chrono::nanoseconds::rep>()
        };
    return result;
}
void check_same(JoinResult const& a, JoinResult const& b) {
    CHECK(a.rounds == b.rounds);
    CHECK(a.own_rounds == b.own_rounds);
    CHECK(a.shadow_rounds == b.shadow_rounds);
    CHECK(a.rounds_per_rank == b.rounds_per_rank);
    CHECK(a.last_joiners == b.last_joiners);
    CHECK(a.authoritative_rank == b.authoritative_rank);
    CHECK(a.stopped_early == b.stopped_early);
    CHECK(a.unsynced_rounds == b.unsynced_rounds);
    CHECK(a.waited == b.waited);
}

TEST_CASE("a result as JSON has all members, also the largest numbers and empty lists") {
    JoinResult result;
    check_same(parsed(to_json(result)), result);
    result.rounds = std::numeric_limits<std::size_t>::max();
    result.own_rounds = 5;
    result.shadow_rounds = 1195;
    result.rounds_per_rank = {5, std::numeric_limits<std::size_t>::max(), 17};
    result.last_joiners = {1, 2};
    result.authoritative_rank = 2;
    result.stopped_early = true;
    result.unsynced_rounds = 3;
    result.waited = std::chrono::nanoseconds::max();
    check_same(parsed(to_json(result)), result);
    CHECK(to_json(result).find('\n') == std::string::npos);
}

TEST_CASE("the result of a guard as JSON is what finish() returned") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Join guard{joinable::participants(reducer)};
        for (int i = 0; i <= comm.rank(); ++i) {
            reducer();
        }
        auto const result = guard.finish();
        CHECK(result.rounds == static_cast<std::size_t>(comm.size()));
        check_same(parsed(to_json(result)), result);
    });
}

} // namespace
