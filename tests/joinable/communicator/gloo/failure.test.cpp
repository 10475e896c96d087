// SPDX-License-Identifier: BSL-1.0
// What ends ranks over Gloo: a throw, a death, a rank that leaves or does not come, and ranks that do
// different things.
#include <joinable/gloo.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/forked.hpp>
#include <support/gloo_ranks.hpp>
#include <support/keep_alive.hpp>
#include <support/polling.hpp>
#include <support/shared.hpp>
#include <support/tells_reason.hpp>
#include <support/thrown_by.hpp>
#include <support/time_of_death.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::AbortReason;
using joinable::DType;
using joinable::FailureKind;
using joinable::GlooCommunicator;
using joinable::GlooWork;
using joinable::ReduceOp;

/// Two rounds of collectives of several sizes and kinds, some in flight together. Calls `step()` before
/// each and between waits.
void run_rounds(GlooCommunicator& comm, std::function<void()> const& step) {
    std::vector<float> small(3, 1);
    std::vector<float> large(50'000, 1);
    std::vector<float> const given(3, 1);
    std::vector<float> all(3 * static_cast<std::size_t>(comm.size()));
    for (int round = 0; round < 2; ++round) {
        step();
        auto first = joinable::all_reduce(comm, small);
        step();
        auto second = joinable::all_reduce(comm, large);
        step();
        auto third = joinable::all_gather(comm, given, all);
        step();
        second.wait();
        step();
        first.wait();
        third.wait();
        step();
        comm.barrier();
    }
}
constexpr int steps = 12;

TEST_CASE("a throw at any point of a rank is PeerFailed that names it on all others over Gloo") {
    for (int const world : {2, 3, 4}) {
        for (int culprit = 0; culprit < world; ++culprit) {
            for (int point = 0; point < steps; point += world == 4 ? 5 : 1) {
                CAPTURE(world);
                CAPTURE(culprit);
                CAPTURE(point);
                std::atomic<int> named{0};
                auto const body = [&](GlooCommunicator& comm) {
                    int step = 0;
                    try {
                        run_rounds(comm, [&] {
                            if (step++ == point && comm.rank() == culprit) {
                                throw std::out_of_range{"here"};
                            }
                        });
                        comm.barrier();
                    } catch (joinable::PeerFailed const& error) {
                        bool const is_right =
                            error.ranks() == std::vector{culprit} && comm.rank() != culprit;
                        named += is_right ? 1 : 100;
                        throw;
                    }
                };
                CHECK_THROWS_AS(run_gloo_ranks({world}, body), std::out_of_range);
                CHECK(named == world - 1);
            }
        }
    }
}

TEST_CASE("a process over Gloo that is killed at any step is PeerFailed on all others at once") {
    std::vector<TimeOfDeath::Clock::duration> delays;
    for (int const world : {2, 3, 4}) {
        for (int victim = 0; victim < world; ++victim) {
            for (int point = victim % 3; point < steps; point += 3) {
                CAPTURE(world);
                CAPTURE(victim);
                CAPTURE(point);
                Shared<TimeOfDeath> time;
                auto const ends = run_gloo_processes(world, [&](GlooCommunicator& comm) {
                    int step = 0;
                    try {
                        run_rounds(comm, [&] {
                            if (step++ == point && comm.rank() == victim) {
                                time->happens();
                                std::raise(SIGKILL);
                            }
                        });
                        comm.barrier();
                        FAIL_CHECK("no exception");
                    } catch (joinable::PeerFailed const& error) {
                        time->is_heard();
                        CHECK(error.ranks() == std::vector{victim});
                    }
                    CHECK(comm.is_aborted());
                    CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
                });
                for (int rank = 0; rank < world; ++rank) {
                    CHECK(ends[static_cast<std::size_t>(rank)] == (rank == victim ? SIGKILL : 0));
                }
                delays.push_back(time->delay());
            }
        }
    }
    CHECK(most_of(delays) < 2s);                                  // mostly some milliseconds
    CHECK(*std::max_element(delays.begin(), delays.end()) < 40s); // of a deadline of 60
}

TEST_CASE("a process that is killed while data moves ends the others, in the middle of a message") {
    for (int const victim : {0, 1, 2}) {
        Shared<std::atomic<int>> posted;
        auto const ends = run_gloo_processes(3, [&](GlooCommunicator& comm) {
            std::vector<float> large(20'000'000, 1);
            try {
                for (int i = 0; i < 50; ++i) {
                    auto work = joinable::all_reduce(comm, large);
                    ++*posted;
                    if (comm.rank() == victim) {
                        wait_until([&] { return *posted >= 3; });
                        std::raise(SIGKILL);
                    }
                    work.wait();
                }
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.ranks() == std::vector{victim});
            }
        });
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(ends[static_cast<std::size_t>(rank)] == (rank == victim ? SIGKILL : 0));
        }
    }
}

TEST_CASE("a rank over Gloo that is killed is named although a process that it forked lives on") {
    for (int const culprit : {0, 1}) {
        Shared<std::atomic<bool>> is_over;
        auto const ends = run_gloo_processes(3, [&](GlooCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == culprit) {
                if (::fork() == 0) { // a data loader
                    ::alarm(seconds_to_hang);
                    wait_until([&] { return is_over->load(); });
                    _exit(0);
                }
                std::raise(SIGKILL);
            }
            std::vector<float> values(30'000, 1);
            CHECK_THROWS_AS(joinable::all_reduce(comm, values).wait(), joinable::PeerFailed);
        });
        *is_over = true;
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(ends[static_cast<std::size_t>(rank)] == (rank == culprit ? SIGKILL : 0));
        }
    }
}

// A thread of its transport may hold a lock of the address sanitizer's allocator at fork: the child waits for it.
TEST_CASE(
    "a process that a rank over Gloo has forked says nothing for it, and cannot go on as it" *
    doctest::skip(sanitizer == Sanitizer::address)
) {
    auto const ends = run_gloo_processes(2, [](GlooCommunicator& comm) { check_helpers_of(comm); });
    CHECK(ends == std::vector{0, 0});
}

TEST_CASE("what an exception leaves is named over Gloo: a collective, or the communicator") {
    for (bool const has_work : {false, true}) {
        auto const body = [&](GlooCommunicator& comm) {
            std::vector<std::int32_t> values{1};
            if (comm.rank() == 1) {
                if (has_work) {
                    auto const work = joinable::all_reduce(comm, values);
                    throw std::out_of_range{"here"};
                }
                throw std::out_of_range{"here"};
            }
            std::string const what = has_work ? "a collective" : "the scope of its communicator";
            try {
                if (comm.rank() == 2) { // never posts the collective, or it might be complete
                    wait_until([&] { return comm.is_aborted(); });
                }
                joinable::all_reduce(comm, values).wait();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.ranks() == std::vector{1});
                CHECK(error.what() == "rank 1 failed: an exception left " + what);
            }
        };
        CHECK_THROWS_AS(run_gloo_ranks({3}, body), std::out_of_range);
    }
}

TEST_CASE("a rank over Gloo that returns while others wait for it is named") {
    for (int const world : {2, 3}) {
        for (int leaver = 0; leaver < world; ++leaver) {
            run_gloo_ranks({world}, [&](GlooCommunicator& comm) {
                comm.barrier();
                if (comm.rank() == leaver) {
                    return;
                }
                std::vector<float> values(3, 1);
                CHECK_THROWS_WITH_AS(
                    joinable::all_reduce(comm, values).wait(),
                    ("rank " + std::to_string(leaver) + " left while rank " +
                     std::to_string(comm.rank()) + " waits for it in all_reduce of 3 f32 with sum")
                        .c_str(),
                    joinable::PeerFailed
                );
                check_tells_who_has_left(comm, leaver);
            });
        }
    }
}

TEST_CASE("each rank over Gloo tells why it was aborted, and in a group, too") {
    run_gloo_ranks({1, 2, 3, 4, 8}, [](GlooCommunicator& comm) {
        auto group = comm.split(0, 0);
        check_tells_reason(comm);
        auto const reason = group.abort_reason();
        REQUIRE(reason);
        CHECK(reason->kind == FailureKind::timed_out);
    });
}

TEST_CASE("a rank over Gloo that leaves ends no collective in which all ranks have arrived") {
    for (int const leaver : {0, 1}) { // gives rank 2 one element, and leaves while much more comes
        run_gloo_ranks({3}, [&](GlooCommunicator& comm) {
            std::vector<std::size_t> counts(3, 40'000'000);
            counts[static_cast<std::size_t>(leaver)] = 1;
            counts[2] = 1;
            std::vector<float> const in(counts[static_cast<std::size_t>(comm.rank())], 1);
            std::vector<float> out(comm.rank() == 2 ? 40'000'002 : 0);
            comm.gather(
                    {in.data(), in.size(), DType::f32},
                    {out.data(), out.size(), DType::f32},
                    2,
                    counts
            )
                .wait();
            CHECK(std::count(out.begin(), out.end(), 1.0F) == (comm.rank() == 2 ? 40'000'002 : 0));
        });
    }
}

TEST_CASE("the reason that comes first is thrown by all over Gloo, and by groups split off") {
    for (int const world : {2, 3, 4}) {
        std::mutex mutex;
        std::multiset<std::string> texts;
        run_gloo_ranks({world}, [&](GlooCommunicator& comm) {
            auto group = comm.split(0, -comm.rank());
            std::vector<int> one{1};
            auto complete = joinable::all_reduce(comm, one);
            complete.wait();
            comm.barrier();
            if (comm.rank() != 0) { // all of them at the same time
                comm.abort({FailureKind::contract, {}, "by " + std::to_string(comm.rank())});
                CHECK(comm.is_aborted());
            }
            complete.wait(); // what was complete stays so
            for (GlooCommunicator* const over : {&comm, &group}) {
                try {
                    over->barrier();
                    FAIL_CHECK("no exception");
                } catch (joinable::ContractViolation const& error) {
                    std::lock_guard const lock{mutex};
                    texts.insert(error.what());
                }
            }
        });
        CHECK(texts.size() == 2 * static_cast<std::size_t>(world));
        CHECK(texts.count(*texts.begin()) == texts.size());
    }
}

TEST_CASE("an abort of ranks over Gloo ends those that wait in a group split off already") {
    run_gloo_ranks({2, 4}, [](GlooCommunicator& comm) {
        auto group = comm.split(0, 0);
        auto pair = group.split(comm.rank() % 2, 0);
        comm.barrier();         // all have their groups
        if (comm.rank() == 1) { // and does not come to the others
            comm.abort({FailureKind::contract, {}, "enough"});
        } else {
            CHECK_THROWS_AS(group.barrier(), joinable::ContractViolation);
            CHECK_THROWS_AS(pair.barrier(), joinable::ContractViolation);
        }
        CHECK(group.is_aborted());
    });
}

/// Whether a thread of this process sleeps in the system.
bool is_asleep(pid_t thread) {
    std::string const stat = contents_of("/proc/self/task/" + std::to_string(thread) + "/stat");
    return stat.find(") S ") != std::string::npos;
}

TEST_CASE("an abort of ranks over Gloo ends every wait in a group, also one for a silent rank 0") {
    using joinable::detail::GlooMeeting;
    using joinable::detail::GlooRank;
    for (int const wait : {0, 1, 2, 3, 4}) {
        Watchdog const watchdog{2};
        Folder const folder;
        std::atomic<pid_t> waiting{0};
        auto const run = [&](int number) {
            GlooMeeting meeting{gloo_options(number, 2, folder.file("ranks"))};
            auto const rank = std::make_shared<GlooRank>(std::move(meeting), nullptr);
            auto const group = std::make_shared<GlooRank>(rank->split(0, number), rank);
            if (number == 1) { // and does nothing in the group
                wait_until([&] { return waiting != 0 && is_asleep(waiting); });
                rank->abort({FailureKind::contract, {}, "enough"});
            } else {
                GlooMeeting other;
                other.options.size = 2;
                other.options.address = "127.0.0.1";
                other.options.connect_timeout = 20s;
                joinable::TcpListener silent{"127.0.0.1"};
                if (wait < 3) {
                    other.listener.emplace("127.0.0.1");
                } else { // rank 0 listens and does not answer, or does not listen
                    other.options.rank = 1;
                    other.options.port = silent.port();
                    if (wait == 4) {
                        joinable::TcpListener const closed = std::move(silent);
                    }
                }
                waiting = ::gettid();
                auto const enter = [&] {
                    if (wait == 0) {
                        static_cast<void>(group->split(0, 0));
                    } else if (wait != 2) {
                        GlooRank const inner{std::move(other), group};
                    } else {
                        for (int i = 0; i < 65; ++i) {
                            static_cast<void>(group->post({}));
                        }
                    }
                };
                CHECK_THROWS_AS(enter(), joinable::ContractViolation);
            }
            group->close(false);
            rank->close(false);
        };
        std::jthread const other{[&] { run(1); }};
        run(0);
    }
}

TEST_CASE("an abort of a group over Gloo does not reach the one that it was split from") {
    run_gloo_ranks({2, 3}, [](GlooCommunicator& comm) {
        {
            auto group = comm.split(0, 0);
            if (group.rank() == 0) {
                group.abort({FailureKind::communication, {}, "over"});
            }
            CHECK_THROWS_AS(group.barrier(), joinable::CommunicationError);
        }
        std::vector<int> ones{1};
        joinable::all_reduce(comm, ones).wait();
        CHECK(ones[0] == comm.size());
    });
}

TEST_CASE("a rank over Gloo that leaves ends no group of others, which still hear of aborts") {
    run_gloo_ranks({3, 4}, [&](GlooCommunicator& comm) {
        auto group = comm.split(comm.rank() % 2, 0);
        auto inner = group.split(0, 0);
        if (comm.rank() % 2 == 1) {
            return;
        }
        wait_until([&] { return comm.is_aborted(); }); // because a rank has left
        CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
        CHECK_FALSE(group.is_aborted());
        CHECK_FALSE(inner.is_aborted());
        for (GlooCommunicator* const one : {&group, &inner}) {
            std::vector<float> values(30'000, 1);
            joinable::all_reduce(*one, values).wait();
            CHECK(values.back() == 2);
        }
        inner.barrier(); // all have what they wait for
        if (comm.rank() == 0) {
            comm.abort({FailureKind::contract, {}, "enough"});
        }
        CHECK_THROWS_AS(group.barrier(), joinable::ContractViolation);
        CHECK_THROWS_AS(inner.barrier(), joinable::ContractViolation);
    });
}

TEST_CASE("a rank over Gloo where no group can meet tells the others of it at once") {
    if (under_sanitizer) {
        std::puts("skipped: where no file is left, a sanitizer cannot look at an exception");
        return;
    }
    struct Case {
        int left; ///< files: none to listen, none for its own connection, none for that of the other rank
        char const* obstacle;
    };
    for (Case const& one : {
             Case{0, "rank 0 cannot listen at "},
             Case{1, "rank 0 cannot connect to itself: "},
             Case{3, "rank 0 needs an open file for each of 1 other ranks"},
         }) {
        for (int const leader : {0, 1}) {
            CAPTURE(one.left);
            Shared<std::atomic<int>> over;
            auto const ends = run_gloo_processes(2, [&](GlooCommunicator& comm) {
                comm.barrier();
                if (comm.rank() == leader) {
                    int last = 0;
                    for (int i = 0; i < 100; ++i) { // until no number below the last one is free
                        last = ::dup(0);
                    }
                    for (int i = 0; i < one.left; ++i) {
                        ::close(last - i);
                    }
                    auto const most = static_cast<rlim_t>(last) + 1;
                    rlimit const limit{most, most};
                    REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
                }
                std::string const expected =
                    "rank " + std::to_string(leader) + " cannot go on by Gloo: " + one.obstacle;
                try {
                    static_cast<void>(comm.split(0, comm.rank() == leader ? 0 : 1));
                    FAIL_CHECK("no exception");
                } catch (joinable::CommunicationError const& error) {
                    CHECK(std::string{error.what()}.substr(0, expected.size()) == expected);
                }
                CHECK(comm.is_aborted());
                CHECK_THROWS_AS(comm.barrier(), joinable::CommunicationError);
                ++*over;
                wait_until(*over, 2); // the leader stays until the other one has thrown
            });
            CHECK(ends == std::vector<int>(2, 0));
        }
    }
}

/// What a rank throws when the last one says something else than the others.
std::string text_of_mismatch(GlooCommunicator& comm, int kind) {
    std::vector<float> const before(8, 1.0F);
    std::vector<float> values = before;
    joinable::Buffer const buffer{values.data(), values.size(), DType::f32};
    bool const is_other = comm.rank() == comm.size() - 1;
    try {
        switch (is_other ? kind : 0) {
        case 0: comm.all_reduce(buffer, ReduceOp::sum).wait(); break;
        case 1: comm.all_reduce(buffer, ReduceOp::max).wait(); break;
        case 2: comm.all_reduce({values.data(), 7, DType::f32}, ReduceOp::sum).wait(); break;
        case 3: comm.all_reduce({values.data(), 8, DType::u32}, ReduceOp::sum).wait(); break;
        case 4: comm.broadcast(buffer, 0).wait(); break;
        case 5: comm.all_reduce({values.data(), 0, DType::f32}, ReduceOp::sum).wait(); break;
        case 6: static_cast<void>(comm.split(0, 0)); break;
        default: comm.barrier(); break;
        }
        return "nothing";
    } catch (joinable::Mismatch const& error) {
        CHECK(error.ranks() == std::vector{comm.size() - 1});
        CHECK(values == before); // no data moved
        CHECK(comm.is_aborted());
        return error.what();
    }
}

TEST_CASE("ranks that run different collectives over Gloo all throw the same Mismatch") {
    for (int const world : {2, 3}) {
        char const* const said[] = {
            "all_reduce of 8 f32 with max",
            "all_reduce of 7 f32 with sum",
            "all_reduce of 8 u32 with sum",
            "broadcast of 8 f32 from rank 0",
            "all_reduce of 0 f32 with sum",
            "split",
            "barrier",
        };
        for (int kind = 1; kind <= 7; ++kind) {
            run_gloo_ranks({world}, [&](GlooCommunicator& comm) {
                std::string expected =
                    "ranks run different collectives: rank 0 all_reduce of 8 f32 with sum, rank ";
                expected += std::to_string(world - 1) + " " + said[kind - 1];
                CHECK(text_of_mismatch(comm, kind) == expected);
            });
        }
    }
}

TEST_CASE("tables of counts that differ are a Mismatch over Gloo that names where they do") {
    run_gloo_ranks({3}, [](GlooCommunicator& comm) {
        // Rank 1 expects one element more from rank 2 than that one sends.
        std::vector<std::size_t> const sent(3, 2);
        std::vector<std::size_t> const expected{2, 2, comm.rank() == 1 ? 3U : 2U};
        std::vector<float> in(6, 1);
        std::vector<float> out(comm.rank() == 1 ? 7 : 6);
        try {
            comm.all_to_all(
                    {in.data(), in.size(), DType::f32},
                    {out.data(), out.size(), DType::f32},
                    sent,
                    expected
            )
                .wait();
            FAIL_CHECK("no exception");
        } catch (joinable::Mismatch const& error) {
            CHECK(error.ranks() == std::vector{1});
            CHECK(
                std::string{error.what()} ==
                "counts differ in all_to_all by counts of f32: other ranks do not "
                "have for rank 1 what is expected there"
            );
        }
    });
}

TEST_CASE("a deadline over Gloo names the rank that did not arrive, on all, in waits and in tests"
) {
    for (int const world : {2, 3}) {
        PollCounts counts;
        run_gloo_ranks({world}, [&](GlooCommunicator& comm) { poll_until_deadline(comm, counts); });
        PollCounts seldom;
        run_gloo_ranks({world}, [&](GlooCommunicator& comm) { poll_now_and_then(comm, seldom); });
        std::atomic<int> posted{0};
        std::atomic<int> over{0};
        run_gloo_ranks({world}, [&](GlooCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == 1) {
                wait_until(over, world - 1);
                CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut);
                return;
            }
            std::vector<float> values(30'000, 3.0F);
            auto work = joinable::all_reduce(comm, values);
            ++posted;
            wait_until(posted, world - 1);
            wait_until([&] { return comm.missing_ranks() == std::vector{1}; }
            ); // others are on their way
            comm.set_deadline(comm.rank() == 0 ? 100ms : 60s);
            try {
                work.wait();
                FAIL_CHECK("no exception");
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{1});
                CHECK(
                    std::string{error.what()} ==
                    "rank 1 did not arrive within 0.1 s, while rank 0 waits in "
                    "all_reduce of 30000 f32 with sum"
                );
            }
            CHECK_THROWS_AS(work.wait(), joinable::TimedOut); // again
            ++over;
        });
    }
}

/// While it lives, the process cannot start a thread.
class NoThreads {
public:
    NoThreads() {
        pthread_attr_t more_than_any_memory;
        REQUIRE(pthread_getattr_default_np(&before_) == 0);
        REQUIRE(pthread_attr_init(&more_than_any_memory) == 0);
        REQUIRE(pthread_attr_setstacksize(&more_than_any_memory, std::size_t{1} << 50U) == 0);
        REQUIRE(pthread_setattr_default_np(&more_than_any_memory) == 0);
    }
    NoThreads(NoThreads const&) = delete;
    NoThreads& operator=(NoThreads const&) = delete;
    ~NoThreads() { pthread_setattr_default_np(&before_); }

private:
    pthread_attr_t before_{};
};

TEST_CASE("a rank over Gloo that cannot start a thread for messages says so, and ends in order") {
    std::atomic<bool> is_over{false};
    run_gloo_ranks({2}, [&](GlooCommunicator& comm) {
        comm.barrier();
        if (comm.rank() == 1) {
            wait_until([&] { return is_over.load(); });
            return;
        }
        NoThreads const here;
        std::int32_t value = 0;
        CHECK_THROWS_WITH_AS(
            comm.send({&value, 1, DType::i32}, 1).wait(),
            doctest::Contains("the thread that sends to rank 1 by Gloo could not be started: "),
            joinable::CommunicationError
        );
        is_over = true;
    });
}

TEST_CASE("a rank over Gloo that cannot start a thread to connect tells the others of it") {
    Watchdog const watchdog{3};
    Folder const folder;
    auto const expected = doctest::Contains(
        "rank 0 cannot go on by Gloo: the thread that connects rank 0 by Gloo could not be started: "
    );
    std::optional<NoThreads> here;
    {
        std::atomic<bool> may_connect{false};
        std::vector<std::jthread> others;
        for (int const rank : {1, 2}) { // they meet rank 0, and have no address
            others.emplace_back([&, rank] {
                joinable::detail::GlooMeeting meeting{gloo_options(rank, 3, folder.file("ranks"))};
                auto hub = meeting.attach();
                std::vector<char> own(std::size_t{9} * ::gloo::transport::Address::kMaxByteSize);
                if (rank == 2) {
                    wait_until(may_connect, true);
                }
                auto work = hub.all_reduce({own.data(), own.size(), DType::u8}, ReduceOp::bit_or);
                if (rank == 1) { // until rank 0 has Gloo's own thread
                    wait_until([&] { return hub.missing_ranks() == std::vector{2}; });
                    here.emplace();
                    may_connect = true;
                }
                work.wait();
                CHECK_THROWS_WITH_AS(hub.barrier(), expected, joinable::CommunicationError);
            });
        }
        CHECK_THROWS_WITH_AS(
            GlooCommunicator{gloo_options(0, 3, folder.file("ranks"))},
            expected,
            joinable::CommunicationError
        );
    }
}

TEST_CASE("a split over Gloo that a rank does not call times out by its name") {
    run_gloo_ranks({2}, [&](GlooCommunicator& comm) {
        comm.barrier();
        comm.set_deadline(comm.rank() == 0 ? 100ms : 60s);
        check_thrown<joinable::TimedOut>(
            std::vector{1},
            "rank 1 did not arrive within 0.1 s, while rank 0 waits in split",
            [&] {
                if (comm.rank() == 0) {
                    auto const group = comm.split(0, 0);
                } else {
                    wait_until([&] { return comm.is_aborted(); });
                    comm.barrier();
                }
            }
        );
    });
}

TEST_CASE("a rank over Gloo that keeps itself alive is waited for, in tests, too") {
    together({0, 1}, [](int has_tests) {
        run_gloo_ranks({3}, [&](GlooCommunicator& comm) {
            if (has_tests != 0) {
                poll_for_rank_at_work(comm);
                return;
            }
            comm.barrier();
            comm.set_deadline(long_deadline);
            if (comm.rank() == 0) {
                stay_away_alive(comm);
            }
            comm.barrier();
            CHECK(comm.missing_ranks().empty());
        });
    });
}

} // namespace
