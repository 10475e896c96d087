// SPDX-License-Identifier: BSL-1.0
// Guards whose ranks know at entry how many inputs each of them has.
#include <joinable/join/detail/schedule.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <rapidcheck.h>
#include <support/all_reducer.hpp>
#include <support/recording_communicator.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::Join;
using joinable::participants;
using joinable::RoundNotice;
using joinable::detail::Schedule;

std::size_t inputs_of(int rank) {
    return static_cast<std::size_t>((rank * 5 + 3) % 7); // 3 1 6 4 2 0 5 3
}

TEST_CASE("a schedule says in every round what the ranks would have said") {
    CHECK(rc::check([] {
        auto const world = *rc::gen::inRange<std::size_t>(1, 20);
        auto const inputs =
            *rc::gen::container<std::vector<unsigned>>(world, rc::gen::inRange(0U, 8U));
        auto const weights =
            *rc::gen::container<std::vector<unsigned>>(world, rc::gen::inRange(0U, 100U));
        bool const is_weighted = *rc::gen::arbitrary<bool>();
        auto const sync_every = *rc::gen::inRange<std::size_t>(1, 4);
        std::vector<Schedule::Shard> shards;
        for (std::size_t rank = 0; rank < world; ++rank) {
            shards.push_back({inputs[rank], is_weighted ? weights[rank] : 0});
        }
        Schedule schedule{shards, is_weighted, sync_every};
        for (std::size_t round = 0; round <= *std::max_element(inputs.begin(), inputs.end());
             ++round) {
            auto const said = schedule.next();
            std::size_t active = 0;
            std::size_t weight = 0;
            std::vector<int> arriving;
            joinable::detail::Carry carry;
            bool const syncs = (round + 1) % sync_every == 0;
            std::size_t const unsynced = round % sync_every; // since the last one that did
            for (std::size_t rank = 0; rank < world; ++rank) {
                if (inputs[rank] > round) {
                    ++active;
                    weight += is_weighted ? weights[rank] * (syncs ? unsynced + 1 : 1) : 0;
                } else if (inputs[rank] == round) {
                    arriving.push_back(static_cast<int>(rank));
                    carry.ranks += unsynced > 0 ? 1 : 0;
                    carry.weight += is_weighted ? weights[rank] * unsynced : 0;
                    carry.weighted += is_weighted && unsynced > 0 ? 1 : 0;
                }
            }
            RC_ASSERT(said.active == active);
            RC_ASSERT(said.contributors == active);
            RC_ASSERT(said.weighted == (is_weighted ? active : 0));
            RC_ASSERT(schedule.carry() == carry);
            RC_ASSERT(said.arrived == arriving.size());
            RC_ASSERT(schedule.arriving() == arriving);
            RC_ASSERT(said.weight == weight);
            auto const code = joinable::detail::RoundCode::decode(said.code.value(active).value());
            RC_ASSERT(code.syncs == (active != 0 && syncs));
            RC_ASSERT(said.failed + said.stop == 0U);
            RC_ASSERT(said.code.value(said.active).has_value());
        }
    }));
}

TEST_CASE(
    "with known lengths a round sends nothing but its own collectives" *
    doctest::skip(!ranks_share_memory)
) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<std::vector<std::string>> traces(static_cast<std::size_t>(world));
        std::size_t longest = 0;
        for (int rank = 0; rank < world; ++rank) {
            longest = std::max(longest, inputs_of(rank));
        }
        over_ranks({world}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            AllReducer reducer{comm};
            std::size_t const inputs = inputs_of(comm.rank());
            Join guard{participants(reducer), {.inputs = inputs}};
            for (std::size_t i = 0; i < inputs; ++i) {
                int active = 0;
                for (int rank = 0; rank < world; ++rank) {
                    active += inputs_of(rank) > i ? 1 : 0;
                }
                CHECK(reducer() == active);
                CHECK(guard.round().active_count() == active);
            }
            auto const result = guard.finish();
            CHECK(result.rounds == longest);
            CHECK(result.shadow_rounds == longest - inputs);
            for (int rank = 0; rank < world; ++rank) {
                CHECK(result.rounds_per_rank[static_cast<std::size_t>(rank)] == inputs_of(rank));
            }
            traces[static_cast<std::size_t>(comm.rank())] = comm.trace;
        });
        std::vector<std::string> expected{
            "all_reduce 7 u64", "all_reduce " + std::to_string(4 * world) + " u64"
        };
        expected.insert(expected.end(), longest, "all_reduce 1 i32");
        expected.emplace_back("all_reduce 7 u64"); // closing: a post hook may have failed
        for (auto const& trace : traces) {
            CHECK(trace == expected);
        }
    }
}

TEST_CASE("known lengths end by every policy as unknown ones do") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        std::vector<int> const inputs(2 + static_cast<std::size_t>(comm.rank()));
        {
            Join guard{
                participants(reducer),
                {.end_policy = joinable::EndPolicy::stop_at_first, .inputs = inputs.size()}
            };
            int rounds = 0;
            for ([[maybe_unused]] int const input : guard.iterate(inputs)) {
                CHECK(reducer() == comm.size());
                ++rounds;
            }
            CHECK(rounds == 2);
            CHECK(guard.finish().stopped_early);
        }
        auto const throw_early = [&] {
            Join guard{
                participants(reducer),
                {.end_policy = joinable::EndPolicy::throw_early, .inputs = inputs.size()}
            };
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                reducer();
            }
            guard.finish();
        };
        CHECK_THROWS_AS(throw_early(), joinable::EarlyTermination);
        comm.barrier(); // still usable
    });
}

TEST_CASE("weights and the sync period are fixed at entry") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const knows_lengths : {false, true}) {
            AllReducer reducer{comm};
            std::size_t const inputs = 5 - static_cast<std::size_t>(comm.rank()) % 2;
            joinable::JoinOptions options{
                .weight_per_input = 10 + static_cast<std::uint64_t>(comm.rank()), .sync_every = 2
            };
            if (knows_lengths) {
                options.inputs = inputs;
            }
            Join guard{participants(reducer), options};
            for (std::size_t i = 0; i < inputs; ++i) {
                reducer();
                auto const& round = guard.round();
                CHECK(round.will_sync() == (i % 2 == 1));
                std::uint64_t sum = 0;
                for (int rank = 0; rank < comm.size(); ++rank) {
                    sum += i < 4 || rank % 2 == 0 ? 10 + static_cast<std::uint64_t>(rank) : 0;
                }
                std::uint64_t const inputs_in_weight = i % 2 == 1 ? 2 : 1; // since the last sync
                CHECK(round.weight_sum() == sum * inputs_in_weight);
                CHECK(
                    round.weight() ==
                    (10 + static_cast<std::uint64_t>(comm.rank())) * inputs_in_weight
                );
            }
            CHECK(guard.finish().unsynced_rounds == 1);
        }
    });
}

/// Runs `body` on rank 0 in a guard with known lengths; the others do what they promised.
template <class Body>
void check_broken_promise(Body const& body, char const* text) {
    over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const run = [&] {
            Join guard{participants(reducer), {.inputs = 3}};
            if (comm.rank() == 0) {
                body(guard, reducer);
            } else {
                for (int i = 0; i < 3; ++i) {
                    reducer();
                }
            }
            guard.finish();
        };
        if (comm.rank() == 0) {
            try {
                run();
                FAIL_CHECK("no exception");
            } catch (joinable::ContractViolation const& error) {
                CHECK_MESSAGE(
                    std::string{error.what()}.find(text) != std::string::npos, error.what()
                );
            }
        } else {
            try {
                run();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == 0);
            }
        }
    });
}

TEST_CASE("a rank that does not keep to its length fails with all others") {
    check_broken_promise([](auto&, auto& reducer) { reducer(); }, "left after 1 rounds");
    check_broken_promise(
        [](auto&, auto& reducer) {
            for (int i = 0; i < 4; ++i) {
                reducer();
            }
        },
        "opened more rounds"
    );
    check_broken_promise(
        [](auto& guard, auto&) { guard.next(true, {.will_sync = false}); }, "differs from what"
    );
    check_broken_promise(
        [](auto& guard, auto&) {
            guard.vote_stop();
            guard.next(true);
        },
        "vote_stop() needs roll calls"
    );
}

TEST_CASE("a throw in a guard with known lengths reaches the others") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const run = [&] {
            Join guard{participants(reducer), {.inputs = 5}};
            for (int i = 0; i < 5; ++i) {
                if (comm.rank() == 1 && i == 2) {
                    throw std::range_error{"broken input"};
                }
                reducer();
            }
            guard.finish();
        };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(run(), std::range_error);
        } else {
            CHECK_THROWS_AS(run(), joinable::PeerFailed);
        }
    });
}

TEST_CASE("all ranks or none know their lengths") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const enter = [&] {
            joinable::JoinOptions options;
            if (comm.rank() == 1) {
                options.inputs = 3;
            }
            Join guard{participants(reducer), options};
        };
        CHECK_THROWS_AS(enter(), joinable::Mismatch);
        comm.barrier();
    });
}

TEST_CASE("without abort, lengths do not replace roll calls") {
    over_ranks({2, 4}, [](RankCommunicator& inner) {
        CoreOnly comm{inner};
        AllReducer reducer{comm};
        Join guard{participants(reducer), {.inputs = 3}};
        reducer(); // and leaves early, which only roll calls permit
        CHECK(guard.finish().rounds == 1);
    });
}

TEST_CASE(
    "a period of 0, a timeout of 0, weights above the maximum and negative numbers are refused"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        for (int const ns : {0, -1}) {
            auto const at_once = [&] {
                Join guard{participants(reducer), {.timeout = std::chrono::nanoseconds{ns}}};
            };
            CHECK_THROWS_WITH_AS(
                at_once(),
                doctest::Contains("JoinOptions::timeout must be positive"),
                joinable::ContractViolation
            );
        }
        auto const never = [&] { Join guard{participants(reducer), {.sync_every = 0}}; };
        CHECK_THROWS_AS(never(), joinable::ContractViolation);
        auto const heavy = [&] {
            Join guard{participants(reducer), {.weight_per_input = std::uint64_t{1} << 46}};
        };
        CHECK_THROWS_AS(heavy(), joinable::ContractViolation);
        auto const negative = [&] { Join guard{participants(reducer), {.weight_per_input = -3}}; };
        CHECK_THROWS_WITH_AS(
            negative(),
            "JoinOptions::weight_per_input: a weight of -3 is negative; give the number of samples or tokens",
            joinable::ContractViolation
        );
        for (bool const enable : {false, true}) {
            auto const fewer = [&] {
                Join guard{participants(reducer), {.enable = enable, .inputs = -1}};
            };
            CHECK_THROWS_WITH_AS(
                fewer(),
                "JoinOptions::inputs is -1; give the number of this rank's inputs",
                joinable::ContractViolation
            );
        }
    });
}

} // namespace
