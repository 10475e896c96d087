// SPDX-License-Identifier: BSL-1.0
// A guard whose roll calls go by TCP: beside a communicator that moves the data, or alone.
#include <joinable/tcp.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/all_reducer.hpp>
#include <support/keep_alive.hpp>
#include <support/tcp_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::TcpCommunicator;
using joinable::ThreadCommunicator;

/// How many inputs rank `rank` has: uneven, none for some.
std::size_t inputs_of(int rank, int variant) {
    return static_cast<std::size_t>((rank * 5 + variant * 3) % 7);
}
/// How many ranks still have an input in round `round`.
int active_in(std::size_t round, int size, int variant) {
    int active = 0;
    for (int rank = 0; rank < size; ++rank) {
        active += inputs_of(rank, variant) > round ? 1 : 0;
    }
    return active;
}

/// Checks what a guard counted against the closed form.
template <class Guard, class Reducer>
void train(Guard& guard, Reducer& reducer, int rank, int size, int variant) {
    for (std::size_t round = 0; round < inputs_of(rank, variant); ++round) {
        CHECK(reducer() == active_in(round, size, variant));
    }
    joinable::JoinResult const result = guard.finish();
    std::vector<std::size_t> rounds;
    for (int other = 0; other < size; ++other) {
        rounds.push_back(inputs_of(other, variant));
    }
    std::size_t const most = *std::max_element(rounds.begin(), rounds.end());
    CHECK(result.rounds == most);
    CHECK(result.rounds_per_rank == rounds);
    CHECK(result.shadow_rounds == most - inputs_of(rank, variant));
    std::vector<int> last;
    for (int other = 0; other < size; ++other) {
        if (inputs_of(other, variant) == most) {
            last.push_back(other);
        }
    }
    CHECK(result.last_joiners == last);
    CHECK(reducer.posts == 1);
}

TEST_CASE("a guard with nothing but a communicator by TCP joins ranks with uneven inputs") {
    run_tcp_everywhere({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) {
        for (int variant = 0; variant < 4; ++variant) {
            AllReducer reducer{comm};
            joinable::Join guard{joinable::participants(reducer)};
            train(guard, reducer, comm.rank(), comm.size(), variant);
        }
        for (int variant = 0; variant < 4; ++variant) { // lengths are known: no roll calls
            AllReducer reducer{comm};
            joinable::Join guard{
                joinable::participants(reducer), {.inputs = inputs_of(comm.rank(), variant)}
            };
            train(guard, reducer, comm.rank(), comm.size(), variant);
        }
    });
}

/// Thread ranks that have connections by TCP, too.
template <class Body>
void run_with_control(int size, Body const& body) {
    joinable::TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    run_ranks({size}, [&](ThreadCommunicator& data) {
        joinable::TcpOptions options = tcp_options(data.rank(), size);
        options.port = port;
        if (data.rank() == 0) {
            auto control = TcpCommunicator::attach(std::move(listener), options);
            body(data, control);
        } else {
            auto control = TcpCommunicator::attach(options);
            body(data, control);
        }
    });
}

TEST_CASE("roll calls by TCP guard collectives of another communicator") {
    for (int const size : {1, 2, 3, 4, 8}) {
        run_with_control(size, [](ThreadCommunicator& data, TcpCommunicator& tcp) {
            for (int variant = 0; variant < 4; ++variant) {
                AllReducer reducer{data};
                joinable::Join guard{joinable::participants(reducer), joinable::control(tcp)};
                train(guard, reducer, data.rank(), data.size(), variant);
            }
        });
    }
}

TEST_CASE("votes and the first end stop all ranks by TCP after the same round") {
    run_tcp_ranks({2, 4}, [](TcpCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Join guard{
            joinable::participants(reducer), {.end_policy = joinable::EndPolicy::stop_at_first}
        };
        std::size_t own = 0;
        while (guard.next(own < 3 + static_cast<std::size_t>(comm.rank()))) {
            CHECK(reducer() == comm.size());
            ++own;
        }
        auto const result = guard.finish();
        CHECK(result.rounds == 3);
        CHECK(result.stopped_early);
    });
    run_tcp_ranks({2, 4}, [](TcpCommunicator& comm) {
        AllReducer reducer{comm};
        joinable::Join guard{joinable::participants(reducer)};
        std::size_t own = 0;
        while (guard.next(true)) {
            reducer();
            if (++own == 5 && comm.rank() == 1) {
                guard.vote_stop();
            }
        }
        CHECK(guard.finish().rounds == 5);
    });
}

TEST_CASE("a throw between rounds is heard by TCP in the next roll call, and the ranks go on") {
    for (int const world : {2, 3, 4}) {
        for (int culprit = 0; culprit < world; ++culprit) {
            for (std::size_t round = 0; round < 3; ++round) {
                run_tcp_ranks({world}, [&](TcpCommunicator& comm) {
                    AllReducer reducer{comm};
                    reducer.ends_its_part = true;
                    try {
                        joinable::Join guard{joinable::participants(reducer)};
                        for (std::size_t i = 0; i < 3; ++i) {
                            if (i == round && comm.rank() == culprit) {
                                throw std::out_of_range{"here"};
                            }
                            reducer();
                        }
                        guard.finish();
                        FAIL_CHECK("no exception");
                    } catch (std::out_of_range const&) {
                        CHECK(comm.rank() == culprit);
                    } catch (joinable::PeerFailed const& error) {
                        CHECK(error.ranks() == std::vector{culprit});
                    }
                    CHECK(!comm.is_aborted());
                    comm.barrier();
                });
            }
        }
    }
}

TEST_CASE("a throw within a round ends the group by TCP, with its text") {
    for (int culprit = 0; culprit < 3; ++culprit) {
        auto const body = [&](ThreadCommunicator& data, TcpCommunicator& tcp) {
            AllReducer reducer{data};
            reducer.before_reduction = [&](joinable::Round const& round) {
                if (round.number() == 1 && data.rank() == culprit) {
                    throw std::out_of_range{"here"};
                }
            };
            try {
                joinable::Join guard{joinable::participants(reducer), joinable::control(tcp)};
                for (int i = 0; i < 3; ++i) {
                    reducer();
                }
                guard.finish();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(data.rank() != culprit);
                CHECK(error.ranks() == std::vector{culprit});
                throw;
            }
        };
        CHECK_THROWS_AS(run_with_control(3, body), std::out_of_range);
    }
}

TEST_CASE("what ended the roll calls ends the collectives of the data, in the same words") {
    // A guard that fails aborts its communicators one after another. Here rank 1 comes between.
    std::atomic<bool> has_heard{false};
    run_with_control(3, [&](ThreadCommunicator& data, TcpCommunicator& tcp) {
        joinable::AbortReason const reason{
            joinable::FailureKind::contract, {2}, "rank 2 left the loop"
        };
        AllReducer reducer{data};
        joinable::Join guard{joinable::participants(reducer), joinable::control(tcp)};
        reducer();
        if (data.rank() == 2) {
            tcp.abort(reason);
            wait_until(has_heard, true);
            data.abort(reason);
        }
        auto const wait = [&] { data.rank() == 1 ? (void)reducer() : data.barrier(); };
        CHECK_THROWS_WITH_AS(wait(), "rank 2 left the loop", joinable::ContractViolation);
        if (data.rank() == 1) {
            has_heard = true;
        }
        try {
            guard.finish();
        } catch (joinable::ContractViolation const&) { // it is over
        }
    });
}

TEST_CASE("a process that is killed in a guard over TCP is named on all others") {
    for (int const world : {2, 4}) {
        for (int victim = 0; victim < world; ++victim) {
            for (int round = 0; round < 4; ++round) {
                TcpProcesses processes{world};
                for (int rank = 0; rank < world; ++rank) {
                    processes.start([&](TcpCommunicator& comm) {
                        AllReducer reducer{comm};
                        try {
                            joinable::Join guard{joinable::participants(reducer)};
                            // Rank 1 has joined when it is killed in the later rounds.
                            for (int i = 0; i < (comm.rank() == 1 ? 2 : 4); ++i) {
                                reducer.before_reduction = [&](joinable::Round const& now) {
                                    if (static_cast<int>(now.number()) == round &&
                                        comm.rank() == victim) {
                                        std::raise(SIGKILL);
                                    }
                                };
                                reducer.before_shadow = reducer.before_reduction;
                                reducer();
                            }
                            guard.finish();
                            FAIL_CHECK("no exception");
                        } catch (joinable::PeerFailed const& error) {
                            CHECK(error.ranks() == std::vector{victim});
                        }
                    });
                }
                for (int rank = 0; rank < world; ++rank) {
                    CAPTURE(victim);
                    CAPTURE(round);
                    CHECK(processes.wait() == (rank == victim ? SIGKILL : 0));
                }
            }
        }
    }
}

TEST_CASE("a guard over TCP has its own deadline, which a rank renews") {
    together({1, 0}, [](int turn) {
        bool const says_so = turn != 0;
        std::atomic<bool> is_over{false};
        run_tcp_ranks({3}, [&](TcpCommunicator& comm) {
            AllReducer reducer{comm};
            try {
                joinable::Join guard{joinable::participants(reducer), {.timeout = long_deadline}};
                reducer();
                if (comm.rank() == 1 && says_so) {
                    stay_away_alive(guard);
                } else if (comm.rank() == 1) {
                    wait_until(is_over, true);
                }
                reducer();
                CHECK(guard.finish().rounds == 2);
                CHECK(says_so);
            } catch (joinable::TimedOut const& error) {
                CHECK(!says_so);
                CHECK(error.missing() == std::vector{1});
            }
            is_over = true;
        });
    });
}

} // namespace
