// SPDX-License-Identifier: BSL-1.0
// Rounds that accumulate until one syncs, and ranks that skip a batch or run out in between.
#include <joinable/join/detail/window.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::Join;
using joinable::JoinOptions;
using joinable::participants;
using joinable::Phase;
using joinable::Round;
using joinable::RoundNotice;

/// What one rank sees of a round.
struct Seen {
    bool contributes = false;
    int contributors = 0;
    std::uint64_t weight = 0;
    std::uint64_t weight_sum = 0;
    std::size_t accumulated = 0;

    bool operator==(Seen const&) const = default;
    friend std::ostream& operator<<(std::ostream& out, Seen const& seen) {
        return out << "{contributes " << seen.contributes << " of " << seen.contributors
                   << ", weight " << seen.weight << " of " << seen.weight_sum << ", after "
                   << seen.accumulated << "}";
    }
};

/// Notes every round, as an active rank and as one that shadows. With `sums`, the ranks also add
/// up what each says of itself, which must be what every rank says of all.
template <joinable::Communicator Comm>
class Observer {
public:
    explicit Observer(Comm& comm, bool sums = true) : comm_{comm}, sums_{sums} {}

    void operator()(RoundNotice const& notice = {}) {
        Round round = joinable::notify_join_context(*this, notice);
        note(round);
        round.done();
    }

    struct Hook {
        Observer& owner;
        void main_hook(Round const& round) { owner.note(round); }
        void post_hook(bool) {}
    };
    using join_keywords = joinable::keywords<>;
    Hook join_hook(joinable::arguments<join_keywords> const&) { return {*this}; }
    Comm& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

    std::vector<Seen> seen;

private:
    void note(Round const& round) {
        seen.push_back(
            {round.contributes(),
             round.contributor_count(),
             round.weight(),
             round.weight_sum(),
             round.accumulated_rounds()}
        );
        if (sums_ && round.in_guard()) {
            std::uint64_t words[] = {round.contributes() ? 1U : 0U, round.weight()};
            comm_.all_reduce({words, 2, joinable::DType::u64}, joinable::ReduceOp::sum).wait();
            CHECK(words[0] == static_cast<std::uint64_t>(round.contributor_count()));
            CHECK(words[1] == round.weight_sum());
        }
    }

    Comm& comm_;
    bool sums_;
    joinable::JoinState state_;
};

template <class Comm>
Observer(Comm&) -> Observer<Comm>;
template <class Comm>
Observer(Comm&, bool) -> Observer<Comm>;

/// What all ranks do: `rounds` says whether each round syncs, `inputs[rank]` what a rank has.
struct Script {
    struct Input {
        std::uint64_t weight = 0;
        bool skips = false;
        bool is_silent = false; ///< it skips and does not say that others have a weight
    };
    struct Plan {
        bool syncs = true;
        Phase phase = Phase::train;
    };
    std::vector<Plan> rounds;
    std::vector<std::vector<Input>> inputs;
    bool is_weighted = true;

    [[nodiscard]] RoundNotice notice(std::size_t rank, std::size_t round) const {
        Input const& input = inputs[rank][round];
        RoundNotice notice{.will_sync = rounds[round].syncs, .phase = rounds[round].phase};
        if (is_weighted && !(input.skips && input.is_silent)) {
            notice.weight = input.weight;
        }
        notice.skips = input.skips;
        return notice;
    }
    [[nodiscard]] std::size_t longest() const {
        std::size_t longest = 0;
        for (auto const& mine : inputs) {
            longest = std::max(longest, mine.size());
        }
        return longest;
    }

    /// What the ranks see, from the definitions: `[round][rank]`.
    [[nodiscard]] std::vector<std::vector<Seen>>
    expected(bool carries, bool is_guarded = true) const {
        std::vector<std::vector<Seen>> all;
        std::size_t begin = 0; // of the rounds since the last one that synced
        for (std::size_t round = 0; round < longest(); ++round) {
            bool const syncs = rounds[round].syncs && rounds[round].phase == Phase::train;
            std::vector<Seen> seen(inputs.size());
            for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
                bool const is_active = round < inputs[rank].size();
                bool holds = false;
                std::uint64_t held = 0;
                for (std::size_t before = begin; before < round; ++before) {
                    bool const trains = rounds[before].phase == Phase::train;
                    seen[rank].accumulated += trains ? 1 : 0;
                    if (trains && before < inputs[rank].size() && !inputs[rank][before].skips) {
                        holds = true;
                        held += is_weighted ? inputs[rank][before].weight : 0;
                    }
                }
                bool const flows = syncs && (is_active || carries);
                seen[rank].weight = flows ? held : 0;
                if (is_active) {
                    auto const& input = inputs[rank][round];
                    seen[rank].contributes = !input.skips || holds;
                    seen[rank].weight += is_weighted && !input.skips ? input.weight : 0;
                } else {
                    seen[rank].contributes = flows && holds;
                }
            }
            Seen sum;
            for (Seen const& one : seen) {
                sum.contributors += one.contributes ? 1 : 0;
                sum.weight_sum += one.weight;
            }
            bool const is_zero = is_guarded && is_weighted && syncs && sum.weight_sum == 0;
            for (Seen& one : seen) {
                one.contributes = one.contributes && !is_zero;
                one.contributors = is_zero ? 0 : sum.contributors;
                one.weight_sum = sum.weight_sum;
            }
            all.push_back(seen);
            begin = syncs ? round + 1 : begin;
        }
        return all;
    }
};

enum class Mode { notification, next, iterate, look_ahead };
constexpr Mode modes[] = {Mode::notification, Mode::next, Mode::iterate, Mode::look_ahead};

/// What a rank sees where nothing is known of the others.
std::vector<std::vector<Seen>>
without_others(std::vector<std::vector<Seen>> seen, int world, std::size_t rank, std::size_t own) {
    seen.resize(own);
    for (auto& round : seen) {
        round[rank].contributors = world;
        round[rank].weight_sum = round[rank].weight;
    }
    return seen;
}

void check_seen(
    std::vector<Seen> const& seen, std::vector<std::vector<Seen>> const& expected, std::size_t rank
) {
    REQUIRE(seen.size() == expected.size());
    for (std::size_t round = 0; round < expected.size(); ++round) {
        CAPTURE(rank);
        CAPTURE(round);
        CHECK(seen[round] == expected[round][rank]);
    }
}

/// Runs a script in a guard, each rank saying what it has with a notice.
void run_guarded(
    RankCommunicator& comm, Script const& script, Mode mode, JoinOptions const& options
) {
    CAPTURE(static_cast<int>(mode));
    CAPTURE(options.enable);
    CAPTURE(options.carry_accumulated);
    auto const rank = static_cast<std::size_t>(comm.rank());
    std::vector<std::size_t> own(script.inputs[rank].size());
    for (std::size_t i = 0; i < own.size(); ++i) {
        own[i] = i;
    }
    auto const announce = [&](std::size_t i) { return script.notice(rank, i); };
    Observer observer{comm};
    Join guard{participants(observer), options};
    switch (mode) {
    case Mode::notification:
        for (std::size_t const i : own) {
            observer(announce(i));
        }
        break;
    case Mode::next:
        for (std::size_t const i : own) {
            guard.next(true, announce(i));
            observer();
        }
        break;
    case Mode::iterate:
        for ([[maybe_unused]] std::size_t const i : guard.iterate(own, announce)) {
            observer();
        }
        break;
    case Mode::look_ahead:
        for ([[maybe_unused]] std::size_t const i :
             guard.iterate(joinable::look_ahead, own, announce)) {
            observer();
        }
    }
    guard.finish();
    auto const expected = script.expected(options.carry_accumulated, options.enable);
    check_seen(
        observer.seen,
        options.enable ? expected : without_others(expected, comm.size(), rank, own.size()),
        rank
    );
}

/// The same in every kind of guard, and in none.
void run_script(RankCommunicator& comm, Script const& script, bool carries) {
    for (Mode const mode : modes) {
        run_guarded(comm, script, mode, {.carry_accumulated = carries});
        run_guarded(comm, script, mode, {.enable = false, .carry_accumulated = carries});
    }
    auto const rank = static_cast<std::size_t>(comm.rank());
    Observer observer{comm};
    for (std::size_t i = 0; i < script.inputs[rank].size(); ++i) {
        observer(script.notice(rank, i));
    }
    auto const expected = script.expected(carries, false);
    check_seen(
        observer.seen, without_others(expected, comm.size(), rank, observer.seen.size()), rank
    );
}

std::size_t inputs_of(std::size_t rank) {
    return (rank * 5 + 3) % 7; // 3 1 6 4 2 0 5 3
}

Script periodic(int world, std::size_t sync_every, bool is_weighted, bool weights_vary) {
    Script script{.rounds = {}, .inputs = {}, .is_weighted = is_weighted};
    for (std::size_t round = 0; round < 7; ++round) {
        script.rounds.push_back({.syncs = (round + 1) % sync_every == 0});
    }
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(world); ++rank) {
        auto& inputs = script.inputs.emplace_back();
        for (std::size_t i = 0; i < inputs_of(rank); ++i) {
            inputs.push_back({.weight = 10 * (rank + 1) + (weights_vary ? i * i : 0)});
        }
    }
    return script;
}

TEST_CASE("a round that syncs counts what every rank accumulated since the last one, by notices") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (std::size_t const sync_every : {1UL, 2UL, 3UL}) {
            for (bool const is_weighted : {false, true}) {
                for (bool const carries : {false, true}) {
                    Script const script = periodic(comm.size(), sync_every, is_weighted, true);
                    run_script(comm, script, carries);
                }
            }
        }
    });
}

TEST_CASE("a round that syncs counts what every rank accumulated, by the options of the guard") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        for (std::size_t const sync_every : {1UL, 2UL, 3UL}) {
            for (bool const is_weighted : {false, true}) {
                for (bool const carries : {false, true}) {
                    Script const script = periodic(comm.size(), sync_every, is_weighted, false);
                    auto const expected = script.expected(carries);
                    JoinOptions options{.sync_every = sync_every, .carry_accumulated = carries};
                    if (is_weighted) {
                        options.weight_per_input = 10 * (rank + 1);
                    }
                    auto const run = [&](bool by_next) {
                        Observer observer{comm};
                        Join guard{participants(observer), options};
                        for (std::size_t i = 0; i < inputs_of(rank); ++i) {
                            if (by_next) {
                                guard.next(true);
                            }
                            observer();
                        }
                        guard.finish();
                        return observer.seen;
                    };
                    for (bool const by_next : {false, true}) {
                        options.enable = true;
                        options.inputs = {};
                        check_seen(run(by_next), expected, rank);
                        options.inputs = inputs_of(rank);
                        check_seen(run(by_next), expected, rank);
                        options.enable = false;
                        check_seen(
                            run(by_next),
                            without_others(expected, comm.size(), rank, inputs_of(rank)),
                            rank
                        );
                    }
                }
            }
        }
    });
}

/// Numbers of a linear congruential generator (Knuth, The Art of Computer Programming 2, 3.3.4).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_{seed} {}
    bool one_in(std::uint64_t n) { return below(n) == 0; }
    std::uint64_t below(std::uint64_t n) {
        state_ = state_ * 6364136223846793005U + 1442695040888963407U;
        return (state_ >> 33) % n;
    }

private:
    std::uint64_t state_;
};

TEST_CASE("any mix of lengths, syncs, evaluations and skips counts each gradient exactly once") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (std::uint64_t seed = 0; seed < 30; ++seed) {
            Random random{seed};
            Script script{.rounds = {}, .inputs = {}, .is_weighted = random.one_in(2)};
            for (int round = 0; round < 10; ++round) {
                bool const syncs = random.one_in(3);
                script.rounds.push_back(
                    {.syncs = syncs, .phase = random.one_in(4) ? Phase::evaluate : Phase::train}
                );
            }
            for (int rank = 0; rank < comm.size(); ++rank) {
                auto& inputs = script.inputs.emplace_back(random.below(11));
                for (auto& input : inputs) {
                    input = {
                        .weight = random.below(100) / 10 * random.below(5),
                        .skips = random.one_in(3),
                        .is_silent = random.one_in(2)
                    };
                }
            }
            CAPTURE(seed);
            bool const carries = random.one_in(2);
            run_script(comm, script, carries);
        }
    });
}

TEST_CASE("what a rank held when it ran out is taken once, by the first round that syncs") {
    // Rank 1 runs out after two rounds, rank 2 after three; an evaluation comes before the sync.
    Script const script{
        .rounds = {{false}, {false}, {false}, {true, Phase::evaluate}, {true}, {false}, {true}},
        .inputs = {{{1}, {2}, {3}, {4}, {5}, {6}, {7}}, {{10}, {20}}, {{100}, {200}, {300}}},
    };
    std::vector<Seen> const of_rank_1[] = {
        // carried
        {{true, 3, 10, 111, 0},
         {true, 3, 20, 222, 1},
         {false, 2, 0, 303, 2},
         {false, 1, 0, 4, 3},
         {true, 3, 30, 1 + 2 + 3 + 5 + 30 + 600, 3},
         {false, 1, 0, 6, 0},
         {false, 1, 0, 6 + 7, 1}},
        // dropped
        {{true, 3, 10, 111, 0},
         {true, 3, 20, 222, 1},
         {false, 2, 0, 303, 2},
         {false, 1, 0, 4, 3},
         {false, 1, 0, 1 + 2 + 3 + 5, 3},
         {false, 1, 0, 6, 0},
         {false, 1, 0, 6 + 7, 1}},
    };
    over_ranks({3}, [&](RankCommunicator& comm) {
        for (bool const carries : {true, false}) {
            run_script(comm, script, carries);
            Observer observer{comm};
            Join guard{participants(observer), {.carry_accumulated = carries}};
            auto const rank = static_cast<std::size_t>(comm.rank());
            for (std::size_t i = 0; i < script.inputs[rank].size(); ++i) {
                observer(script.notice(rank, i));
            }
            guard.finish();
            if (rank == 1) {
                CHECK(observer.seen == of_rank_1[carries ? 0 : 1]);
            }
        }
    });
}

TEST_CASE("a rank that skips counts with weight 0, and with nothing if it holds nothing") {
    // [round][rank]: all accumulate; one skips what syncs, but holds; then all but rank 0 skip;
    // then all skip, holding nothing.
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        bool const is_last = comm.rank() == comm.size() - 1;
        bool const is_first = comm.rank() == 0;
        auto const world = static_cast<std::uint64_t>(comm.size());
        Observer observer{comm};
        Join guard{participants(observer), {.weight_per_input = 5}};
        observer({.will_sync = false, .weight = 5});
        observer({.skips = is_last}); // has the weight and the period of the options
        observer({.skips = !is_first});
        observer({.skips = true});
        guard.finish();
        REQUIRE(observer.seen.size() == 4);
        CHECK(observer.seen[0] == Seen{true, comm.size(), 5, 5 * world, 0});
        CHECK(observer.seen[1] == Seen{true, comm.size(), is_last ? 5U : 10U, 10 * world - 5, 1});
        CHECK(observer.seen[2] == Seen{is_first, 1, is_first ? 5U : 0U, 5, 0});
        CHECK(observer.seen[3] == Seen{false, 0, 0, 0, 0});
    });
}

TEST_CASE("with known lengths a skipped batch keeps its promised weight, and others count it") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        bool const skips = comm.rank() == 0;
        auto const world = static_cast<std::uint64_t>(comm.size());
        std::size_t const inputs = skips ? 3 : 4;
        Observer observer{comm, false};
        Join guard{
            participants(observer), {.inputs = inputs, .weight_per_input = 5, .sync_every = 2}
        };
        for (std::size_t i = 0; i < inputs; ++i) {
            observer({.skips = skips});
        }
        guard.finish();
        REQUIRE(observer.seen.size() == (world == 1 ? 3 : 4));
        CHECK(observer.seen[0] == Seen{!skips, comm.size(), 5, 5 * world, 0});
        CHECK(observer.seen[1] == Seen{!skips, comm.size(), 10, 10 * world, 1});
        CHECK(observer.seen[2] == Seen{!skips, comm.size(), 5, 5 * world, 0});
        if (world > 1) { // rank 0 ran out, having promised one round of this sum
            CHECK(
                observer.seen[3] == Seen{!skips, comm.size(), skips ? 5U : 10U, 10 * world - 5, 1}
            );
        }
    });
}

TEST_CASE("ranks that disagree on what happens to accumulated gradients are a mismatch") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        Observer observer{comm};
        auto const enter = [&] {
            Join guard{participants(observer), {.carry_accumulated = comm.rank() != 1}};
        };
        CHECK_THROWS_AS(enter(), joinable::Mismatch);
        comm.barrier();
    });
}

TEST_CASE("an accumulated weight above the maximum is refused before anything is sent") {
    constexpr std::uint64_t maximum = joinable::detail::max_weight;
    over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
        Observer observer{comm};
        auto const run = [&](std::uint64_t last) {
            Join guard{participants(observer)};
            observer({.will_sync = false, .weight = maximum - 1});
            observer({.will_sync = false, .phase = Phase::evaluate, .weight = maximum});
            observer({.weight = comm.rank() == 0 ? last : 1});
            guard.finish();
        };
        run(1);
        CHECK(observer.seen[2].weight_sum == static_cast<std::uint64_t>(comm.size()) * maximum);
        if (comm.rank() == 0) {
            CHECK_THROWS_WITH_AS(
                run(2),
                "a weight of 2 after 35184372088831 in 1 rounds that did not sync is above the "
                "maximum of 35184372088832 together; sync more often, or weigh in a larger unit",
                joinable::ContractViolation
            );
        } else {
            CHECK_THROWS_AS(run(2), joinable::PeerFailed);
        }
        // Outside a guard as well.
        observer({.will_sync = false, .weight = maximum});
        CHECK_THROWS_AS(observer({.weight = 1}), joinable::ContractViolation);
        observer({.skips = true});
        CHECK(observer.seen.back().weight == maximum);
        comm.barrier();
    });
}

TEST_CASE("a later participant may repeat the opener's notice, or only that this rank skips") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Observer first{comm};
        Observer second{comm};
        bool const skips = comm.rank() == 0;
        Join guard{participants(first, second), {.weight_per_input = 2, .sync_every = 2}};
        first({.skips = skips}); // has the period of the options, so it does not sync
        second({.skips = skips});
        first({.weight = 3, .skips = skips});
        second({.weight = 3, .skips = skips});
        CHECK(first.seen == second.seen);
        guard.next(true);
        CHECK_THROWS_AS(first({.skips = true}), joinable::ContractViolation);
        second();
        guard.finish();
    });
}

TEST_CASE("every guard counts anew, and leaves nothing to the rounds after it") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        for (bool const is_enabled : {false, true}) {
            Observer a{comm};
            Observer b{comm};
            a({.will_sync = false});
            b({.will_sync = false});
            for (int epoch = 0; epoch < 2; ++epoch) {
                Join guard{participants(a, b), {.enable = is_enabled}};
                a({.will_sync = false, .weight = 1});
                b();
                CHECK(a.seen.back().accumulated == 0);
                CHECK(b.seen.back().accumulated == 0);
                a({.will_sync = false, .weight = 1});
                b();
                CHECK(a.seen.back().accumulated == 1);
                CHECK(guard.finish().unsynced_rounds == 2);
            }
            a({.skips = true});
            CHECK(a.seen.back().accumulated == 0);
            CHECK_FALSE(a.seen.back().contributes);
        }
    });
}

TEST_CASE("what the options and next() say holds for every participant of a guard not enabled") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        for (bool const by_next : {false, true}) {
            Observer a{comm};
            Observer b{comm};
            Join guard{
                participants(a, b), {.enable = false, .weight_per_input = 5, .sync_every = 2}
            };
            for (int i = 0; i < 3; ++i) {
                if (by_next) {
                    guard.next(true, {.skips = i == 0});
                    a();
                    b({.skips = i == 0});
                } else {
                    a({.skips = i == 0});
                    b({.skips = i == 0});
                }
            }
            std::vector<Seen> const expected{
                {false, comm.size(), 0, 0, 0},
                {true, comm.size(), 5, 5, 1},
                {true, comm.size(), 5, 5, 0},
            };
            CHECK(a.seen == expected);
            CHECK(b.seen == expected);
            auto const result = guard.finish();
            CHECK(result.own_rounds == 3);
            CHECK(result.unsynced_rounds == 1);
        }
        Observer observer{comm};
        auto const never = [&] {
            Join guard{participants(observer), {.enable = false, .sync_every = 0}};
        };
        CHECK_THROWS_AS(never(), joinable::ContractViolation);
    });
}

TEST_CASE("accumulated gradients cost no message" * doctest::skip(!ranks_share_memory)) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<std::vector<std::string>> traces[2];
        for (bool const carries : {false, true}) {
            traces[carries ? 1 : 0].resize(static_cast<std::size_t>(world));
            over_ranks({world}, [&](RankCommunicator& inner) {
                RecordingCommunicator comm{inner};
                Observer observer{comm, false};
                auto const rank = static_cast<std::size_t>(comm.rank());
                Join guard{participants(observer), {.sync_every = 3, .carry_accumulated = carries}};
                for (std::size_t i = 0; i < inputs_of(rank); ++i) {
                    observer({.skips = i % 2 == rank % 2});
                }
                guard.finish();
                traces[carries ? 1 : 0][rank] = comm.trace;
            });
        }
        // Entry; each round; names where ranks arrive; the end; closing.
        std::vector<std::size_t> lengths;
        for (std::size_t rank = 0; rank < static_cast<std::size_t>(world); ++rank) {
            lengths.push_back(inputs_of(rank));
        }
        std::vector<std::string> expected{"all_reduce 7 u64"};
        for (std::size_t round = 0;; ++round) {
            expected.emplace_back("all_reduce 7 u64");
            if (std::find(lengths.begin(), lengths.end(), round) != lengths.end()) {
                expected.emplace_back("all_reduce 4 u64");
            }
            if (round == *std::max_element(lengths.begin(), lengths.end())) {
                break;
            }
        }
        expected.emplace_back("all_reduce 7 u64");
        for (auto const& of_ranks : traces) {
            for (auto const& trace : of_ranks) {
                CHECK(trace == expected);
            }
        }
    }
}

} // namespace
