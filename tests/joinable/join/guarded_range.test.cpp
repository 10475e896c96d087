// SPDX-License-Identifier: BSL-1.0
// Loops that announce every round one element early.
#include <joinable/join/guarded_range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <forward_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/meeting.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::Join;
using joinable::look_ahead;
using joinable::participants;

std::size_t inputs_of(int rank) {
    return static_cast<std::size_t>((rank * 3 + 2) % 5); // 2 0 3 1 4 2 0 3
}

TEST_CASE(
    "with look-ahead a roll call is posted before the collectives of the round before it" *
    doctest::skip(!ranks_share_memory)
) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<std::vector<std::string>> traces(static_cast<std::size_t>(world));
        std::vector<bool> arrives(10);
        std::size_t longest = 0;
        for (int rank = 0; rank < world; ++rank) {
            longest = std::max(longest, inputs_of(rank));
            arrives[inputs_of(rank)] = true;
        }
        over_ranks({world}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            AllReducer reducer{comm};
            Join guard{participants(reducer)};
            std::forward_list<int> const inputs(inputs_of(comm.rank()));
            std::size_t rounds = 0;
            for ([[maybe_unused]] int const input : guard.iterate(look_ahead, inputs)) {
                int active = 0;
                for (int rank = 0; rank < world; ++rank) {
                    active += inputs_of(rank) > rounds ? 1 : 0;
                }
                CHECK(reducer() == active);
                CHECK(guard.round().number() == rounds);
                ++rounds;
            }
            CHECK(rounds == inputs_of(comm.rank()));
            CHECK(guard.finish().rounds == longest);
            traces[static_cast<std::size_t>(comm.rank())] = comm.trace;
        });
        std::string const roll_call = "all_reduce 7 u64";
        std::string const names = "all_reduce 4 u64";
        std::vector<std::string> expected{roll_call, roll_call}; // entry, round 0
        for (std::size_t round = 0; round < longest; ++round) {
            if (arrives[round]) {
                expected.push_back(names);
            }
            expected.insert(expected.end(), {roll_call, "all_reduce 1 i32"});
        }
        expected.insert(expected.end(), {names, roll_call}); // the end, closing
        for (auto const& trace : traces) {
            CHECK(trace == expected);
        }
    }
}

TEST_CASE("every element is announced once, with its own notice") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer)};
        std::vector<std::uint64_t> const inputs{7, 8, 9};
        int announced = 0;
        for (auto const weight : guard.iterate(look_ahead, inputs, [&](std::uint64_t input) {
                 ++announced;
                 return joinable::RoundNotice{.weight = input};
             })) {
            CHECK(guard.round().weight() == weight);
            CHECK(guard.round().weight_sum() == weight * static_cast<unsigned>(comm.size()));
            reducer();
        }
        guard.finish();
        CHECK(announced == 3);
    });
}

TEST_CASE("with look-ahead a vote counts one round later") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer)};
        int rounds = 0;
        for ([[maybe_unused]] int const input : guard.iterate(look_ahead, std::vector<int>(10))) {
            reducer();
            if (++rounds == 4 && comm.rank() == comm.size() - 1) {
                guard.vote_stop();
            }
        }
        auto const result = guard.finish();
        CHECK(rounds == 5);
        CHECK(result.stopped_early);
        CHECK(result.rounds == 5);
        CHECK(result.last_joiners.size() == static_cast<std::size_t>(comm.size()));
    });
}

TEST_CASE("with look-ahead a vote counts when the rank had announced its end already") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        bool const votes = comm.rank() == 0;
        std::vector<int> const inputs(votes ? 3 : 10);
        Join guard{participants(reducer)};
        std::size_t rounds = 0;
        for ([[maybe_unused]] int const input : guard.iterate(look_ahead, inputs)) {
            reducer();
            if (++rounds == 3 && votes) {
                guard.vote_stop();
            }
        }
        auto const result = guard.finish();
        CHECK(result.stopped_early);
        CHECK(result.rounds == 4);
        CHECK(rounds == (votes ? 3 : 4));
        CHECK(result.last_joiners.size() == static_cast<std::size_t>(comm.size() - 1));
    });
}

TEST_CASE("with look-ahead a hook may run the code of active ranks") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        std::vector<std::size_t> shadowed;
        reducer.before_shadow = [&](joinable::Round const& round) {
            CHECK(joinable::announce_round(reducer).is_answered());
            CHECK(joinable::notify_join_context(reducer).number() == round.number());
            shadowed.push_back(round.number());
        };
        std::vector<int> const inputs(inputs_of(comm.rank()));
        Join guard{participants(reducer)};
        for ([[maybe_unused]] int const input : guard.iterate(look_ahead, inputs)) {
            reducer();
        }
        auto const result = guard.finish();
        CHECK(result.own_rounds == inputs.size());
        std::vector<std::size_t> expected;
        for (std::size_t round = inputs.size(); round < result.rounds; ++round) {
            expected.push_back(round);
        }
        CHECK(shadowed == expected);
    });
}

TEST_CASE("stop_at_first with look-ahead runs no round that a rank cannot") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer), {.end_policy = joinable::EndPolicy::stop_at_first}};
        std::vector<int> const inputs(3 + static_cast<std::size_t>(comm.rank()));
        int rounds = 0;
        for ([[maybe_unused]] int const input : guard.iterate(look_ahead, inputs)) {
            CHECK(reducer() == comm.size());
            ++rounds;
        }
        CHECK(rounds == 3);
        CHECK(guard.finish().rounds == 3);
    });
}

TEST_CASE("leaving a loop with look-ahead by break is a ContractViolation on all ranks") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const run = [&] {
            Join guard{participants(reducer)};
            for ([[maybe_unused]] int const input :
                 guard.iterate(look_ahead, std::vector<int>(5))) {
                reducer();
                if (comm.rank() == 0) {
                    break;
                }
            }
            guard.finish();
        };
        try {
            run();
            FAIL_CHECK("no exception");
        } catch (joinable::ContractViolation const& error) {
            CHECK(std::string{error.what()}.find("rank 0 left a loop with look-ahead") == 0);
        }
    });
}

TEST_CASE("next() inside a loop with look-ahead is refused") {
    for (int const world : {1, 2}) {
        Shared<Meeting> reduced{world};
        over_ranks({world}, [&](RankCommunicator& comm) {
            AllReducer reducer{comm};
            auto const run = [&] {
                Join guard{participants(reducer)};
                for ([[maybe_unused]] int const input :
                     guard.iterate(look_ahead, std::vector<int>(5))) {
                    reducer();
                    reduced->meet(); // who is refused first ends what others are in
                    guard.next(true);
                }
            };
            CHECK_THROWS_AS(run(), joinable::ContractViolation);
        });
    }
}

TEST_CASE("a throw in a loop with look-ahead reaches the others") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const run = [&] {
            Join guard{participants(reducer)};
            for (int const input : guard.iterate(look_ahead, std::vector<int>{0, 1, 2, 3})) {
                if (input == 2 && comm.rank() == 1) {
                    throw std::range_error{"broken input"};
                }
                reducer();
            }
            guard.finish();
        };
        if (comm.rank() == 1) {
            CHECK_THROWS_AS(run(), std::range_error);
        } else {
            try {
                run();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == 1);
            }
        }
    });
}

/// Loads batches, of which the third one is damaged on one rank.
struct DamagedShard {
    bool is_damaged;

    struct iterator {
        using difference_type = std::ptrdiff_t;
        using value_type = int;
        DamagedShard const* shard;
        int place;

        int operator*() const {
            if (place == 2 && shard->is_damaged) {
                throw std::runtime_error{"batch 2 is damaged"};
            }
            return place;
        }
        iterator& operator++() {
            ++place;
            return *this;
        }
        iterator operator++(int) { return {shard, place++}; }
        bool operator==(iterator const& other) const { return place == other.place; }
    };
    [[nodiscard]] iterator begin() const { return {this, 0}; }
    [[nodiscard]] iterator end() const { return {this, 4}; }
};

TEST_CASE("what a range throws when it is read leaves the guard with its text") {
    for (int const kind : {0, 1, 2}) {
        CAPTURE(kind);
        over_ranks({2, 3}, [kind](RankCommunicator& comm) {
            AllReducer reducer{comm};
            joinable::Step step{comm, [] { throw std::range_error{"handled"}; }};
            DamagedShard const shard{comm.rank() == 1};
            auto const run_on = [&](auto make) {
                Join guard{participants(reducer, step)};
                for (int const batch : make(guard)) {
                    reducer();
                    try {
                        step.step();
                    } catch (std::range_error const&) { // on all ranks
                    }
                    (void)batch;
                }
                guard.finish();
            };
            auto const notice = [](int) { return joinable::RoundNotice{}; };
            auto const run = [&] {
                switch (kind) {
                case 0: run_on([&](auto& guard) { return guard.iterate(shard); }); break;
                case 1: run_on([&](auto& guard) { return guard.iterate(shard, notice); }); break;
                default:
                    run_on([&](auto& guard) { return guard.iterate(look_ahead, shard, notice); });
                }
            };
            std::string text;
            try {
                run();
            } catch (std::exception const& error) {
                text = error.what();
            }
            CHECK(
                text ==
                (comm.rank() == 1 ? "batch 2 is damaged" : "rank 1 failed: batch 2 is damaged")
            );
        });
    }
}

TEST_CASE("a handler that reads its element again keeps the text that peers see") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Step step{comm, [&] {
                                if (comm.rank() == 1) {
                                    throw std::runtime_error{"bad sample"};
                                }
                            }};
        int failed = -1;
        std::string text;
        try {
            Join guard{participants(reducer, step)};
            std::vector<int> const inputs{7, 8};
            auto range = guard.iterate(inputs);
            for (auto input = range.begin(); input != range.end(); ++input) {
                reducer();
                try {
                    step.step();
                } catch (std::exception const&) {
                    failed = *input;
                    throw;
                }
            }
            guard.finish();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CHECK(failed == (comm.rank() == 1 ? 7 : -1));
        CHECK(text == (comm.rank() == 1 ? "bad sample" : "rank 1 failed: bad sample"));
    });
}

TEST_CASE("a guard that is not enabled runs a loop with look-ahead alone") {
    over_ranks({2}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        Join guard{participants(reducer), {.enable = false}};
        int rounds = 0;
        std::vector<int> const inputs(static_cast<std::size_t>(comm.rank()) + 2);
        for ([[maybe_unused]] int const input : guard.iterate(look_ahead, inputs)) {
            ++rounds;
        }
        CHECK(rounds == comm.rank() + 2);
        CHECK(guard.finish().rounds == inputs.size());
    });
}

/// A forward range whose element `i` is read(i): clang 14 has no views.
template <class Read>
class Loader {
public:
    class iterator {
    public:
        using iterator_concept = std::forward_iterator_tag;
        using difference_type = std::ptrdiff_t;
        using value_type = std::unique_ptr<int>;

        iterator() = default;
        iterator(Read const& read, int at) : read_{&read}, at_{at} {}
        decltype(auto) operator*() const { return (*read_)(at_); }
        iterator& operator++() {
            ++at_;
            return *this;
        }
        iterator operator++(int) { return {*read_, at_++}; }
        friend bool operator==(iterator const& a, iterator const& b) { return a.at_ == b.at_; }

    private:
        Read const* read_ = nullptr;
        int at_ = 0;
    };

    Loader(std::size_t size, Read read) : size_{static_cast<int>(size)}, read_{std::move(read)} {}
    [[nodiscard]] iterator begin() const { return {read_, 0}; }
    [[nodiscard]] iterator end() const { return {read_, size_}; }

private:
    int size_;
    Read read_;
};

/// Calls f(range) for a range that makes its elements and one that refers to them, which is read
/// `times` times. Reading counts.
template <class F>
void for_each_loader(std::size_t size, int times, F const& f) {
    int loaded = 0;
    f(Loader{size, [&](int batch) {
                 ++loaded;
                 return std::make_unique<int>(batch);
             }});
    CHECK(loaded == static_cast<int>(size));
    loaded = 0;
    std::vector<std::unique_ptr<int>> loader;
    for (std::size_t batch = 0; batch < size; ++batch) {
        loader.push_back(std::make_unique<int>(static_cast<int>(batch)));
    }
    f(Loader{size, [&](int batch) -> std::unique_ptr<int>& {
                 ++loaded;
                 return loader[static_cast<std::size_t>(batch)];
             }});
    CHECK(loaded == times * static_cast<int>(size));
}

TEST_CASE("a loop reads each element of its range once, but references twice to announce them early"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer reducer{comm};
        auto const weight_of = [](std::unique_ptr<int> const& batch) {
            return joinable::RoundNotice{.weight = static_cast<std::uint64_t>(*batch + 1)};
        };
        std::size_t const size = inputs_of(comm.rank());
        auto const check = [&](int times, auto const& loop) {
            for_each_loader(size, times, [&](auto range) {
                Join guard{participants(reducer)};
                int next = 0;
                for (auto&& batch : loop(guard, range)) {
                    CHECK(*batch == next++);
                    reducer();
                }
                CHECK(next == static_cast<int>(size));
                guard.finish();
            });
        };
        check(1, [](auto& guard, auto& range) { return guard.iterate(range); });
        check(1, [&](auto& guard, auto& range) { return guard.iterate(range, weight_of); });
        check(1, [](auto& guard, auto& range) { return guard.iterate(look_ahead, range); });
        check(2, [&](auto& guard, auto& range) {
            return guard.iterate(look_ahead, range, weight_of);
        });
    });
}

} // namespace
