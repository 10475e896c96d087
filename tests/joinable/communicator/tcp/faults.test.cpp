// SPDX-License-Identifier: BSL-1.0
// How collectives of ranks that are connected by TCP end when they cannot complete.
#include <joinable/tcp.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/forked.hpp>
#include <support/free_port.hpp>
#include <support/hang.hpp>
#include <support/keep_alive.hpp>
#include <support/polling.hpp>
#include <support/shared.hpp>
#include <support/tcp_ranks.hpp>
#include <support/tells_reason.hpp>
#include <support/time_of_death.hpp>
#include <support/volume.hpp>
#include <support/wait_for_process.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/shared_memory/run_processes.hpp>
#include <joinable/communicator/tcp/detail/address.hpp>
#include <joinable/communicator/tcp/detail/connect.hpp>
#include <joinable/communicator/tcp/detail/hub.hpp>
#include <joinable/communicator/tcp/detail/rank.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::Buffer;
using joinable::DType;
using joinable::FailureKind;
using joinable::ReduceOp;
using joinable::TcpCommunicator;
using joinable::TcpWork;

/// Three rounds of collectives of two sizes, some in flight together. Calls `step()` before each.
template <class Step>
void run_collectives_by_tcp(
    TcpCommunicator& comm, Step const& step, std::size_t largest = 100'000
) {
    std::array<std::vector<float>, 3> buffers;
    for (int round = 0; round < 3; ++round) {
        std::vector<TcpWork> works;
        for (std::size_t k = 0; k < buffers.size(); ++k) {
            step();
            buffers[k].assign(k == 1 ? largest : 3, 1.0F);
            works.push_back(
                comm.all_reduce({buffers[k].data(), buffers[k].size(), DType::f32}, ReduceOp::sum)
            );
        }
        step();
        for (TcpWork& work : works) {
            work.wait();
        }
    }
    comm.barrier();
}
constexpr int steps = 12;

/// Everything that another thread says within one test.
class Told {
public:
    void add(std::string text) {
        std::lock_guard const lock{mutex_};
        all_.insert(std::move(text));
    }
    std::multiset<std::string> all() {
        std::lock_guard const lock{mutex_};
        return all_;
    }

private:
    std::mutex mutex_;
    std::multiset<std::string> all_;
};

TEST_CASE("a rank that is killed at any step is PeerFailed on all others at once") {
    for (int const world : {2, 3, 4}) {
        std::vector<TimeOfDeath::Clock::duration> delays;
        for (int victim = 0; victim < world; ++victim) {
            for (int point = 0; point < steps; point += world == 4 ? 3 : 1) {
                Shared<TimeOfDeath> time;
                TcpProcesses processes{world};
                for (int rank = 0; rank < world; ++rank) {
                    processes.start([&](TcpCommunicator& comm) {
                        int step = 0;
                        auto const die = [&] {
                            if (step++ == point && comm.rank() == victim) {
                                time->happens();
                                std::raise(SIGKILL);
                            }
                        };
                        try {
                            run_collectives_by_tcp(comm, die);
                            FAIL_CHECK("no exception");
                        } catch (joinable::PeerFailed const& error) {
                            time->is_heard();
                            CHECK(error.ranks() == std::vector{victim});
                            CHECK(
                                error.what() == "rank " + std::to_string(victim) +
                                                    " failed: its connection broke: its process "
                                                    "died, or its machine is out of reach"
                            );
                        }
                        CHECK(comm.is_aborted());
                        CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
                    });
                }
                for (int rank = 0; rank < world; ++rank) {
                    CAPTURE(world);
                    CAPTURE(victim);
                    CAPTURE(point);
                    CAPTURE(rank);
                    CHECK(processes.wait() == (rank == victim ? SIGKILL : 0));
                }
                delays.push_back(time->delay());
            }
        }
        CHECK(most_of(delays) < 1s);                                  // mostly some milliseconds
        CHECK(*std::max_element(delays.begin(), delays.end()) < 40s); // of a deadline of 50
    }
}

TEST_CASE("a rank that is killed is PeerFailed by TCP although a process that it forked lives on") {
    for (int const culprit : {0, 1}) {
        Shared<std::atomic<bool>> is_over;
        Shared<std::atomic<int>> heard;
        TcpProcesses processes{3};
        for (int rank = 0; rank < 3; ++rank) {
            processes.start([&](TcpCommunicator& comm) {
                comm.barrier();
                if (comm.rank() == culprit) {
                    if (::fork() == 0) { // a data loader
                        ::alarm(seconds_to_hang);
                        wait_until([&] { return is_over->load(); });
                        _exit(0);
                    }
                    std::raise(SIGKILL);
                }
                try {
                    comm.barrier();
                } catch (joinable::PeerFailed const& error) {
                    *heard += error.ranks() == std::vector{culprit} ? 1 : 0;
                }
            });
        }
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(processes.wait() == (rank == culprit ? SIGKILL : 0));
        }
        CHECK(*heard == 2);
        *is_over = true;
    }
}

// The hub's thread may hold a lock of the address sanitizer's allocator at fork: the child waits for it.
TEST_CASE(
    "a process that a rank by TCP has forked says nothing for it, and cannot go on as it" *
    doctest::skip(sanitizer == Sanitizer::address)
) {
    run_tcp_processes({1, 2, 3}, [](TcpCommunicator& comm) {
        check_helpers_of(comm);
        CHECK(succeeds_in_fork([&] {
            std::string text;
            try {
                comm.barrier();
            } catch (joinable::ContractViolation const& error) {
                text = error.what();
            }
            CHECK(text.find("expected rank " + std::to_string(comm.rank()) + " in process ") == 0);
            CHECK(text.find("attach after the fork") != std::string::npos);
            CHECK_THROWS_AS(comm.keep_alive(), joinable::ContractViolation);
            CHECK_THROWS_AS((void)comm.is_aborted(), joinable::ContractViolation);
            CHECK_THROWS_AS(comm.abort({}), joinable::ContractViolation);
            int const file = ::dup(0); // may have the number of a connection
            std::destroy_at(&comm);
            CHECK(::fcntl(file, F_GETFD) >= 0);
        }));
        comm.barrier();
    });
}

TEST_CASE("a throw at any point, with works in flight, is named by TCP on every other rank") {
    for (int const world : {2, 3, 4}) {
        for (int culprit = 0; culprit < world; ++culprit) {
            for (int point = 0; point < steps; ++point) {
                std::atomic<int> named{0};
                auto const body = [&](TcpCommunicator& comm) {
                    int step = 0;
                    try {
                        run_collectives_by_tcp(comm, [&] {
                            if (step++ == point && comm.rank() == culprit) {
                                throw std::out_of_range{"here"};
                            }
                        });
                    } catch (joinable::PeerFailed const& error) {
                        bool const is_right =
                            error.ranks() == std::vector{culprit} && comm.rank() != culprit;
                        named += is_right ? 1 : 100;
                        throw;
                    }
                };
                CHECK_THROWS_AS(run_tcp_threads(world, body), std::out_of_range);
                CHECK(named == world - 1);
            }
        }
    }
}

TEST_CASE("what an exception leaves is named: a collective, or the communicator") {
    for (bool const has_work : {false, true}) {
        auto const body = [&](TcpCommunicator& comm) {
            std::int32_t value = 1;
            if (comm.rank() == 1) {
                std::optional<TcpWork> work;
                if (has_work) {
                    TcpWork posted = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
                    throw std::out_of_range{"here"};
                }
                throw std::out_of_range{"here"};
            }
            std::string const what = has_work ? "a collective" : "the scope of its communicator";
            try {
                if (comm.rank() == 2) { // never posts the collective, or it might be complete
                    wait_until([&] { return comm.is_aborted(); });
                }
                comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum).wait();
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.ranks() == std::vector{1});
                CHECK(error.what() == "rank 1 failed: an exception left " + what);
            }
        };
        CHECK_THROWS_AS(run_tcp_threads(3, body), std::out_of_range);
    }
}

TEST_CASE("a rank that returns while others wait for it is named, as thread ranks say it") {
    for (int const world : {2, 3, 8}) {
        for (int leaver = 0; leaver < world; ++leaver) {
            run_tcp_ranks({world}, [&](TcpCommunicator& comm) {
                comm.barrier();
                if (comm.rank() == leaver) {
                    return;
                }
                try {
                    comm.barrier();
                    FAIL_CHECK("no exception");
                } catch (joinable::PeerFailed const& error) {
                    CHECK(error.ranks() == std::vector{leaver});
                    CHECK(
                        error.what() == "rank " + std::to_string(leaver) + " left while rank " +
                                            std::to_string(comm.rank()) + " waits for it in barrier"
                    );
                    check_tells_who_has_left(comm, leaver);
                }
            });
        }
    }
}

TEST_CASE("each rank over TCP tells why it was aborted") {
    run_tcp_ranks({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) { check_tells_reason(comm); });
}

/// What the other end tells this one next.
joinable::detail::FrameHeader next_frame(joinable::detail::Socket const& socket) {
    joinable::detail::FrameHeader header;
    auto const end = std::chrono::steady_clock::now() + 60s;
    REQUIRE(
        joinable::detail::receive_all(socket, std::as_writable_bytes(std::span{&header, 1}), end)
    );
    std::vector<std::byte> body(header.bytes);
    REQUIRE(joinable::detail::receive_all(socket, body, end));
    return header;
}

TEST_CASE("what was complete when rank 0 left can still be waited for") {
    std::atomic<bool> has_left{false};
    Watchdog const watchdog{2};
    joinable::TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    std::jthread const rank_0{[&] {
        {
            auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 2));
            std::vector<std::int64_t> values(2000, 1);
            for (int i = 0; i < 3; ++i) {
                comm.all_reduce({values.data(), 2000, DType::i64}, ReduceOp::sum).wait();
            }
        }
        has_left = true;
    }};
    joinable::TcpOptions options = tcp_options(1, 2);
    options.port = port;
    auto comm = TcpCommunicator::attach(options);
    std::array<std::vector<std::int64_t>, 3> values;
    std::vector<TcpWork> works;
    for (auto& value : values) {
        value.assign(2000, 2);
        works.push_back(comm.all_reduce({value.data(), 2000, DType::i64}, ReduceOp::sum));
    }
    while (!has_left) {
        std::this_thread::yield();
    }
    comm.keep_alive(); // is answered by a reset of the connection
    for (TcpWork& work : works) {
        work.wait();
    }
    CHECK(values[0] == std::vector<std::int64_t>(2000, 3));
    CHECK(values[1].back() == 2 + 3);
    CHECK_THROWS_WITH_AS(
        comm.barrier(), "rank 0 left while rank 1 waits for it in barrier", joinable::PeerFailed
    );
}

/// A hub whose rank 0 has broadcast bytes and left. A test is rank 1, which has read none of them.
struct HubWithoutRank0 {
    /// What the kernel keeps for rank 1, sent and received; 0: as usual.
    struct Room {
        int sent = 0;
        int received = 0;
    };

    HubWithoutRank0(std::size_t bytes, std::chrono::nanoseconds patience, Room room) {
        using namespace joinable::detail;
        TcpJob const job{2, "a test", "of the test"};
        Socket listener = listen_at("127.0.0.1", 0);
        std::uint16_t const port = port_of(listener);
        if (room.sent > 0) {
            listener.set(SOL_SOCKET, SO_SNDBUF, room.sent);
        }
        int ends[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        thread_ = std::jthread{
            [this, job, patience, socket = std::move(listener), end = Socket{ends[1]}]() mutable {
                Hub hub{std::move(socket), std::move(end), job, {.patience = patience}};
                hub.run();
                is_over = true;
            }
        };
        TcpRank zero{Socket{ends[0]}, 0, 2, 60s};
        rank_1 = connect_rank(1, job, "127.0.0.1", port, std::chrono::steady_clock::now() + 60s);
        if (room.received > 0) {
            rank_1.set(SOL_SOCKET, SO_RCVBUF, room.received);
        }
        zero.meet("");
        std::vector<std::byte> values(bytes);
        Request request;
        request.signature.collective = Collective::broadcast;
        request.signature.count = bytes;
        request.in = {values.data(), bytes, DType::u8};
        FrameHeader header;
        header.kind = FrameKind::arrival;
        header.collective = request.signature.collective;
        header.dtype = request.signature.dtype;
        header.op = request.signature.op;
        header.count = bytes;
        CHECK(rank_1.send(bytes_of(header)) == sizeof header);
        zero.finish(zero.post(request));
    }

    std::atomic<bool> is_over{false};

private:
    std::jthread thread_;

public:
    joinable::detail::Socket rank_1; ///< closed before the thread is joined
};

TEST_CASE("what was complete when rank 0 left is still sent over a slow connection") {
    using joinable::detail::FrameHeader;
    using joinable::detail::FrameKind;
    together({0, 1}, [](int turn) {
        Watchdog const watchdog{2};
        constexpr std::size_t bytes = 2'500'000;
        HubWithoutRank0 hub{bytes, 2s, {.sent = turn == 0 ? 65'536 : 0}}; // or its kernel has most
        std::size_t left = 2 * sizeof(FrameHeader) + bytes;               // a start, and the result
        std::vector<std::byte> some(30'000);
        FrameHeader credit;
        credit.kind = FrameKind::credit;
        while (left > 0) { // for 2.6 s or more in all
            auto const got =
                hub.rank_1.receive(std::span{some}.first((std::min)(some.size(), left)));
            REQUIRE(got.has_value());
            left -= *got;
            credit.consumed += *got; // as ranks do, also when all has come
            static_cast<void>(hub.rank_1.send(joinable::detail::bytes_of(credit)));
            std::this_thread::sleep_for(31ms);
        }
        CHECK(next_frame(hub.rank_1).kind == FrameKind::end);
    });
}

TEST_CASE("a rank that goes on asking and reads nothing keeps rank 0 for one patience") {
    Watchdog const watchdog{2};
    // Some bytes wait in the kernel of rank 1, the rest in the hub's, which doubles its room.
    HubWithoutRank0 hub{250'000, 300ms, {.sent = 200'000, .received = 4096}};
    joinable::detail::FrameHeader question;
    question.kind = joinable::detail::FrameKind::question;
    for (int i = 0; i < 1000 && !hub.is_over; ++i) { // for 20 s
        static_cast<void>(hub.rank_1.send(joinable::detail::bytes_of(question)));
        std::this_thread::sleep_for(20ms);
    }
    CHECK(hub.is_over);
}

/// What a rank throws when it says something else than the others.
template <class Comm>
std::string text_of_mismatch(Comm& comm, int kind) {
    std::vector<float> values(8, 1.0F);
    Buffer buffer{values.data(), values.size(), DType::f32};
    bool const is_other = comm.rank() == comm.size() - 1;
    try {
        switch (is_other ? kind : 0) {
        case 0: comm.all_reduce(buffer, ReduceOp::sum).wait(); break;
        case 1: comm.all_reduce(buffer, ReduceOp::max).wait(); break;
        case 2: comm.all_reduce({values.data(), 7, DType::f32}, ReduceOp::sum).wait(); break;
        case 3: comm.all_reduce({values.data(), 8, DType::u32}, ReduceOp::sum).wait(); break;
        case 4: comm.broadcast(buffer, 0).wait(); break;
        case 5: comm.broadcast(buffer, comm.rank()).wait(); break;
        default: comm.barrier(); break;
        }
        return "nothing";
    } catch (joinable::Mismatch const& error) {
        CHECK(error.ranks() == std::vector{comm.size() - 1});
        CHECK(values == std::vector<float>(8, 1.0F)); // no data moved
        CHECK(comm.is_aborted());
        return error.what();
    }
}

TEST_CASE("ranks that run different collectives all throw what thread ranks throw") {
    for (int const world : {2, 3, 4}) {
        for (int kind = 1; kind <= 6; ++kind) {
            Told by_threads;
            Told by_tcp;
            run_ranks({world}, [&](auto& comm) { by_threads.add(text_of_mismatch(comm, kind)); });
            run_tcp_ranks({world}, [&](auto& comm) { by_tcp.add(text_of_mismatch(comm, kind)); });
            CHECK(by_tcp.all() == by_threads.all());
            CHECK(by_tcp.all().count("nothing") == 0);
        }
    }
}

TEST_CASE("the rank that aborts first is heard by all, also while rank 0 computes") {
    for (int const world : {2, 3, 8}) {
        std::atomic<int> heard{0};
        Told told;
        run_tcp_ranks({world}, [&](TcpCommunicator& comm) {
            int const rank = comm.rank();
            if (rank != 0 || world == 2) { // two of them at the same time, or one
                if (rank == 1 || rank == 2) {
                    comm.abort({FailureKind::contract, {rank}, "by " + std::to_string(rank)});
                    CHECK(comm.is_aborted());
                }
            }
            while (rank == 0 && heard != world - 1) {
                std::this_thread::yield();
            }
            try {
                comm.barrier();
                FAIL_CHECK("no exception");
            } catch (joinable::ContractViolation const& error) {
                told.add(error.what());
                ++heard;
            }
            CHECK(comm.is_aborted());
            std::int32_t value = 1;
            CHECK_THROWS_AS(
                (void)comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum),
                joinable::ContractViolation
            );
            while (heard != world) { // nobody leaves before all have heard
                std::this_thread::yield();
            }
        });
        auto const all = told.all();
        CHECK(all.size() == static_cast<std::size_t>(world));
        CHECK(all.count(*all.begin()) == all.size()); // the same reason on all
    }
}

TEST_CASE("a deadline by TCP names who has not arrived, in the words of thread ranks") {
    std::atomic<int> posted{0};
    auto const wait = [&](auto& comm, Told& told, std::atomic<int>& waiting) {
        bool const is_late = comm.rank() == 1;
        comm.barrier();
        comm.set_deadline(comm.rank() == 0 ? 500ms : 60s);
        std::int32_t value = 1;
        if (comm.rank() == 0) { // gives up, when the others but the late one have arrived
            wait_until(posted, comm.size() - 2);
        }
        if (is_late) {
            while (waiting != comm.size() - 1) {
                std::this_thread::yield();
            }
        }
        try {
            auto work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
            ++posted;
            work.wait();
            FAIL_CHECK("no exception");
        } catch (joinable::TimedOut const& error) {
            CHECK(error.missing() == std::vector{1});
            told.add(error.what());
        }
        ++waiting;
        while (waiting != comm.size()) {
            std::this_thread::yield();
        }
    };
    for (int const world : {2, 3}) {
        Told by_threads;
        Told by_tcp;
        std::atomic<int> waiting{0};
        posted = 0;
        run_ranks({world}, [&](auto& comm) { wait(comm, by_threads, waiting); });
        waiting = 0;
        posted = 0;
        run_tcp_ranks({world}, [&](auto& comm) { wait(comm, by_tcp, waiting); });
        CHECK(by_tcp.all() == by_threads.all());
    }
}

TEST_CASE("a rank that keeps itself alive is waited for by TCP, one that does not is named") {
    together({0, 1, 2, 3}, [](int turn) {
        int const busy = turn < 2 ? 0 : 2;
        bool const says_so = turn % 2 == 0;
        std::atomic<bool> is_over{false};
        run_tcp_ranks({3}, [&](TcpCommunicator& comm) {
            comm.barrier();
            comm.set_deadline(long_deadline);
            if (comm.rank() == busy && says_so) {
                stay_away_alive(comm);
            } else if (comm.rank() == busy) {
                wait_until(is_over, true);
            }
            if (says_so) {
                comm.barrier();
            } else {
                try {
                    comm.barrier();
                    FAIL_CHECK("no exception");
                } catch (joinable::TimedOut const& error) {
                    CHECK(error.missing() == std::vector{busy});
                }
                is_over = true;
            }
        });
    });
}

TEST_CASE("a work by TCP that is destroyed while a rank is missing ends at the deadline") {
    std::atomic<bool> is_over{false};
    run_tcp_ranks({2}, [&](TcpCommunicator& comm) {
        if (comm.rank() == 1) {
            while (!is_over) {
                std::this_thread::yield();
            }
            CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut);
            return;
        }
        comm.set_deadline(50ms);
        std::vector<float> values(1000, 3.0F);
        {
            auto const work =
                comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
        }
        CHECK(comm.is_aborted());
        CHECK(values == std::vector<float>(1000, 3.0F)); // and nobody touches them any more
        is_over = true;
    });
}

TEST_CASE("the longest deadline by TCP does not pass at once") {
    run_tcp_ranks({2}, [](TcpCommunicator& comm) {
        comm.set_deadline(std::chrono::nanoseconds::max());
        if (comm.rank() == 0) { // long enough for the other one to fall asleep
            std::this_thread::sleep_for(20ms);
        }
        comm.barrier();
        CHECK(comm.set_deadline(1s) == std::chrono::nanoseconds::max());
    });
}

TEST_CASE("a rank that is stopped is TimedOut on all, and on itself when it goes on") {
    auto const is_stopped = joinable::shared_buffer<std::int32_t>(3); // by the victim
    std::deque<TcpProcesses> groups; // all at the same time: they mostly wait
    std::vector<pid_t> all;
    auto const process = [&](int victim, int rank) {
        return all[static_cast<std::size_t>(victim * 3 + rank)];
    };
    for (int const victim : {0, 1, 2}) {
        std::int32_t& group_is_stopped = is_stopped[static_cast<std::size_t>(victim)];
        // A rank 0 that is stopped does not answer, so nobody waits for it in vain.
        groups.emplace_back(3, victim == 0 ? 200ms : joinable::TcpOptions{}.patience);
        for (int rank = 0; rank < 3; ++rank) {
            all.push_back(groups.back().start([&](TcpCommunicator& comm) {
                comm.barrier();
                comm.set_deadline(4s);
                auto const start = std::chrono::steady_clock::now();
                if (comm.rank() == victim) {
                    std::raise(SIGSTOP);
                } else { // so rank 0 finds all that they say at once, when it goes on
                    while (std::atomic_ref{group_is_stopped} == 0) {
                        std::this_thread::yield();
                    }
                }
                try { // small ones: who is stopped has the reason in the kernel's memory
                    run_collectives_by_tcp(comm, [] {}, 100);
                    FAIL_CHECK("no exception");
                } catch (joinable::TimedOut const& error) {
                    CHECK(error.missing() == std::vector{victim});
                    std::string const text = error.what();
                    CHECK(text.find("rank " + std::to_string(victim)) == 0);
                    if (victim == 0) { // nobody else could tell
                        CHECK(text.find("answer for all ranks") != std::string::npos);
                        CHECK(text.find(" within 4.2 s, ") != std::string::npos);
                    }
                }
                if (comm.rank() != victim) {
                    CHECK(std::chrono::steady_clock::now() - start < 40s);
                }
            }));
        }
    }
    for (int const victim : {0, 1, 2}) {
        wait_for_stop(process(victim, victim));
        std::atomic_ref{is_stopped[static_cast<std::size_t>(victim)]} = 1;
    }
    for (int const victim : {0, 1, 2}) {
        for (int rank = 0; rank < 3; ++rank) {
            if (rank != victim) {
                wait_for_end(process(victim, rank));
            }
        }
        ::kill(process(victim, victim), SIGCONT);
        for (int rank = 0; rank < 3; ++rank) {
            CAPTURE(victim);
            CAPTURE(rank);
            CHECK(groups[static_cast<std::size_t>(victim)].wait() == 0);
        }
    }
}

TEST_CASE("a rank that is stopped for less than the deadline goes on") {
    for (int const victim : {0, 1}) {
        TcpProcesses processes{2};
        std::vector<pid_t> all;
        for (int rank = 0; rank < 2; ++rank) {
            all.push_back(processes.start([&](TcpCommunicator& comm) {
                comm.barrier();
                if (comm.rank() == victim) {
                    std::raise(SIGSTOP);
                }
                run_collectives_by_tcp(comm, [] {});
            }));
        }
        pid_t const stopped = all[static_cast<std::size_t>(victim)];
        wait_for_stop(stopped);
        ::kill(stopped, SIGCONT);
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("signals that interrupt what waits change nothing") {
    static std::atomic<int> signals{0};
    TcpProcesses processes{3};
    for (int rank = 0; rank < 3; ++rank) {
        processes.start([](TcpCommunicator& comm) {
            struct sigaction action{};
            action.sa_handler = [](int) { ++signals; }; // without SA_RESTART
            sigaction(SIGALRM, &action, nullptr);
            itimerval const often{{0, 200}, {0, 200}};
            setitimer(ITIMER_REAL, &often, nullptr);
            for (int i = 0; i < 50 || signals < 50; ++i) {
                std::array<std::int64_t, 2> values{1, signals < 50 ? 1 : 0};
                comm.all_reduce({values.data(), 2, DType::i64}, ReduceOp::sum).wait();
                if (values[0] != comm.size()) {
                    FAIL_CHECK("wrong sum");
                }
                run_collectives_by_tcp(comm, [] {});
                if (values[1] == 0 && i >= 49) { // agreed by all
                    break;
                }
            }
            comm.barrier();
            itimerval const never{};
            setitimer(ITIMER_REAL, &never, nullptr);
        });
    }
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
}

/// Of this process, as the system counts them.
std::ptrdiff_t entries(char const* folder) {
    return std::distance(std::filesystem::directory_iterator{folder}, {});
}

TEST_CASE("however a group ends, no descriptor and no thread is left") {
    auto const run = [] {
        run_tcp_ranks({1, 3}, [](TcpCommunicator& comm) { comm.barrier(); });
        auto const fails = [](TcpCommunicator& comm) {
            if (comm.rank() == 1) {
                throw std::out_of_range{"here"};
            }
            comm.barrier();
        };
        CHECK_THROWS_AS(run_tcp_threads(3, fails), std::out_of_range);
        auto alone = tcp_options(0, 2, 10ms);
        CHECK_THROWS_AS(
            TcpCommunicator::attach(joinable::TcpListener{"127.0.0.1"}, alone), joinable::TimedOut
        );
    };
    run(); // what the library of C++ opens once is there from here on
    auto const files = entries("/proc/self/fd");
    auto const threads = entries("/proc/self/task");
    for (int i = 0; i < 10; ++i) {
        run();
    }
    CHECK(entries("/proc/self/fd") == files);
    // A wait for a thread's end ends when the thread runs nothing more. The system removes it a moment later.
    auto const end = std::chrono::steady_clock::now() + 30s;
    wait_until([&] {
        return entries("/proc/self/task") <= threads || std::chrono::steady_clock::now() > end;
    });
    CHECK(entries("/proc/self/task") <= threads); // fewer where one was listed before, too
}

TEST_CASE("a rank that breaks the protocol ends the group, and rank 0 lives on") {
    using joinable::detail::FrameHeader;
    using joinable::detail::FrameKind;
    auto const headers = [] {
        std::vector<FrameHeader> bad(9);
        bad[0].kind = static_cast<FrameKind>(77);
        for (std::size_t i = 1; i < bad.size(); ++i) {
            bad[i].kind = FrameKind::arrival;
        }
        bad[1].sequence = 5; // not the next one
        bad[2].collective = joinable::detail::Collective::all_to_all;
        bad[3].dtype = static_cast<DType>(joinable::dtype_count);
        bad[4].op = static_cast<ReduceOp>(joinable::reduce_op_count);
        bad[5].root = 2;
        bad[6].collective = joinable::detail::Collective::all_reduce;
        bad[6].count = ~std::uint64_t{0};
        bad[7].bytes = 8; // more than it has to give
        bad[8].collective = joinable::detail::Collective::all_reduce;
        bad[8].op = static_cast<ReduceOp>(255);
        return bad;
    }();
    for (FrameHeader const& header : headers) {
        Watchdog const watchdog{2};
        joinable::TcpListener listener{"127.0.0.1"};
        std::uint16_t const port = listener.port();
        std::jthread const rank_0{[&] {
            auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 2));
            CHECK_THROWS_WITH_AS(
                comm.barrier(),
                "rank 1 sent what no rank sends: is it this version of joinable?",
                joinable::CommunicationError
            );
        }};
        joinable::TcpOptions const options = tcp_options(1, 2);
        auto const socket = joinable::detail::connect_rank(
            1,
            {2, options.job, options.secret},
            "127.0.0.1",
            port,
            std::chrono::steady_clock::now() + 30s
        );
        CHECK(socket.send(joinable::detail::bytes_of(header)) == sizeof header);
    }
}

TEST_CASE("a collective is complete if its last arrival and an abort come together") {
    using joinable::detail::bytes_of;
    using joinable::detail::FrameHeader;
    using joinable::detail::FrameKind;
    Watchdog const watchdog{2};
    joinable::TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    std::atomic<bool> has_posted{false};
    std::jthread const rank_0{[&] {
        auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 2));
        std::int32_t value = 1;
        auto work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
        has_posted = true;
        CHECK_NOTHROW(work.wait());
        CHECK(value == 3);
        CHECK_THROWS_WITH_AS(comm.barrier(), "enough", joinable::Mismatch);
    }};
    joinable::TcpOptions const options = tcp_options(1, 2);
    auto const socket = joinable::detail::connect_rank(
        1,
        {2, options.job, options.secret},
        "127.0.0.1",
        port,
        std::chrono::steady_clock::now() + 30s
    );
    wait_until([&] { return has_posted.load(); });
    std::int32_t const value = 2;
    FrameHeader arrival;
    arrival.kind = FrameKind::arrival;
    arrival.collective = joinable::detail::Collective::all_reduce;
    arrival.dtype = DType::i32;
    arrival.count = 1;
    arrival.bytes = sizeof value;
    auto const reason = joinable::detail::packed({FailureKind::mismatch, {1}, "enough"});
    FrameHeader abort;
    abort.kind = FrameKind::abort;
    abort.bytes = reason.size();
    std::vector<std::byte> said; // in one piece, so that the hub reads all of it at once
    for (auto const part :
         {bytes_of(arrival), bytes_of(value), bytes_of(abort), std::span<std::byte const>{reason}
         }) {
        said.insert(said.end(), part.begin(), part.end());
    }
    CHECK(socket.send(said) == said.size());
}

TEST_CASE("an abort returns when it is settled what all ranks throw") {
    using joinable::detail::FrameKind;
    using joinable::detail::Socket;
    int handles[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
    Watchdog const watchdog{1};
    Socket hub{handles[0]}; // which has heard of something else before
    std::atomic<bool> has_returned{false};
    std::jthread const aborts{[&] {
        joinable::detail::TcpRank rank{Socket{handles[1]}, 1, 2, 60s};
        rank.abort({FailureKind::mismatch, {1}, "mine"});
        has_returned = true;
        CHECK_THROWS_WITH_AS((void)rank.post({}), "first", joinable::PeerFailed);
    }};
    CHECK(next_frame(hub).kind == FrameKind::abort);
    std::this_thread::sleep_for(20ms); // it would return meanwhile if it did not wait for an answer
    CHECK_FALSE(has_returned);
    auto const reason = joinable::detail::packed({FailureKind::peer_failed, {0}, "first"});
    joinable::detail::FrameHeader end;
    end.kind = FrameKind::end;
    end.bytes = reason.size();
    CHECK(hub.send(joinable::detail::bytes_of(end), reason) == sizeof end + reason.size());
    CHECK(next_frame(hub).kind == FrameKind::leave);
    hub.close();
}

TEST_CASE("an abort waits as long as the bytes before it are read, and so does a rank that leaves"
) {
    using joinable::detail::FrameKind;
    using joinable::detail::Socket;
    together({0, 1, 2}, [](int turn) {
        bool const aborts = turn != 1;
        int handles[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
        Watchdog const watchdog{1};
        Socket hub{handles[0]};
        Socket own{handles[1]};
        if (turn == 2) { // the kernel takes all at once, and delivers what is read
            Socket const listener = joinable::detail::listen_at("127.0.0.1", 0);
            listener.set(SOL_SOCKET, SO_RCVBUF, 65'536);
            auto const until = std::chrono::steady_clock::now() + 60s;
            own = joinable::detail::connect_to("127.0.0.1", port_of(listener), until, 1);
            wait_until([&] { return (hub = listener.accept()).is_open(); });
        }
        std::vector<std::byte> data(std::size_t{2} << 20U);
        std::jthread const ends{[&] {
            joinable::detail::TcpRank rank{std::move(own), 1, 2, 60s, {}, {.patience = 2s}};
            joinable::detail::Request request;
            request.in = {data.data(), data.size(), DType::u8};
            rank.post(request);
            if (aborts) {
                rank.abort({FailureKind::mismatch, {1}, "mine"});
                CHECK_THROWS_WITH_AS((void)rank.post({}), "first", joinable::PeerFailed);
            }
        }};
        std::size_t left = sizeof(joinable::detail::FrameHeader) + data.size();
        std::vector<std::byte> some(30'000);
        while (left > 0) { // for 2.8 s or more in all, with pauses much shorter than the patience
            auto const got = hub.receive(std::span{some}.first((std::min)(some.size(), left)));
            REQUIRE(got.has_value());
            left -= *got;
            std::this_thread::sleep_for(40ms);
        }
        if (aborts) {
            CHECK(next_frame(hub).kind == FrameKind::abort);
            auto const reason = joinable::detail::packed({FailureKind::peer_failed, {0}, "first"});
            joinable::detail::FrameHeader end;
            end.kind = FrameKind::end;
            end.bytes = reason.size();
            CHECK(hub.send(joinable::detail::bytes_of(end), reason) == sizeof end + reason.size());
        }
        CHECK(next_frame(hub).kind == FrameKind::leave);
        hub.close();
    });
}

TEST_CASE("a rank by TCP that leaves late has read all that came, or closing could destroy data") {
    int handles[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
    joinable::detail::Socket const hub{handles[0]};
    std::optional<joinable::detail::TcpRank> rank{
        std::in_place,
        joinable::detail::Socket{handles[1]},
        1,
        2,
        60s,
        joinable::detail::Hear{},
        joinable::detail::TcpLimits{.patience = 0s}
    };
    std::vector<std::byte> some(50'000);
    CHECK(hub.send(some) == some.size());
    rank.reset();
    CHECK(next_frame(hub).kind == joinable::detail::FrameKind::leave);
    CHECK(::recv(hub.handle(), some.data(), some.size(), 0) == 0); // no reset of the connection
}

TEST_CASE("a rank that aborts or asks waits as long as bytes come before the answer of rank 0") {
    using joinable::detail::bytes_of;
    using joinable::detail::FrameHeader;
    using joinable::detail::FrameKind;
    using joinable::detail::Socket;
    together({0, 1}, [](int turn) {
        bool const aborts = turn == 0;
        int handles[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
        Watchdog const watchdog{1};
        Socket hub{handles[0]};
        std::vector<std::byte> values(14'000); // too few for the rank to report that it reads them
        std::jthread const waits{[&] {
            joinable::detail::TcpRank rank{Socket{handles[1]}, 1, 2, 60s, {}, {.patience = 2s}};
            rank.meet("");
            joinable::detail::Request request;
            request.signature.collective = joinable::detail::Collective::broadcast;
            request.out = {values.data(), values.size(), DType::u8};
            rank.post(request);
            if (aborts) {
                rank.abort({FailureKind::mismatch, {1}, "mine"});
                CHECK_THROWS_WITH_AS((void)rank.post({}), "first", joinable::PeerFailed);
            } else {
                CHECK(rank.missing_ranks().empty());
            }
        }};
        FrameHeader header;
        header.kind = FrameKind::start;
        CHECK(hub.send(bytes_of(header)) == sizeof header);
        CHECK(next_frame(hub).kind == FrameKind::arrival);
        CHECK(next_frame(hub).kind == (aborts ? FrameKind::abort : FrameKind::question));
        header.kind = FrameKind::result;
        header.bytes = values.size();
        CHECK(hub.send(bytes_of(header)) == sizeof header);
        std::vector<std::byte> const some(200);
        for (std::size_t left = values.size(); left > 0;) { // for 2.8 s or more in all
            auto const sent = hub.send(std::span{some}.first((std::min)(some.size(), left)));
            REQUIRE(sent.has_value());
            left -= *sent;
            std::this_thread::sleep_for(40ms);
        }
        auto const reason = joinable::detail::packed({FailureKind::peer_failed, {0}, "first"});
        auto const body = std::span{reason}.first(aborts ? reason.size() : 0);
        header.kind = aborts ? FrameKind::end : FrameKind::answer;
        header.bytes = body.size();
        CHECK(hub.send(bytes_of(header), body) == sizeof header + body.size());
        while (next_frame(hub).kind != FrameKind::leave) {
        }
        hub.close();
    });
}

TEST_CASE("a frame without a place is read when there is one, and one that is not taken again") {
    using joinable::detail::FrameHeader;
    for (std::size_t const bytes : {3U, 20'000U}) { // the second one fills the buffer
        CAPTURE(bytes);
        int handles[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
        joinable::detail::Socket const from{handles[0]};
        joinable::detail::Socket const to{handles[1]};
        FrameHeader header;
        header.bytes = bytes;
        header.sequence = 7;
        std::vector<std::byte> body(bytes, std::byte{1});
        body.back() = std::byte{2};
        CHECK(from.send(joinable::detail::bytes_of(header), body) == sizeof header + bytes);
        joinable::detail::Inbox inbox;
        std::vector<std::byte> got(bytes);
        std::uint64_t sequence = 0;
        bool has_place = false;
        bool is_taken = false;
        auto const read = [&] {
            return inbox.read(
                to,
                [&](FrameHeader const&, std::uint64_t done) {
                    return has_place ? std::span{got}.subspan(done) : throw std::bad_alloc{};
                },
                [&](FrameHeader const& taken) {
                    sequence = is_taken ? taken.sequence : throw std::bad_alloc{};
                }
            );
        };
        CHECK_THROWS_AS((void)read(), std::bad_alloc);
        CHECK_THROWS_AS((void)read(), std::bad_alloc);
        has_place = true;
        CHECK_THROWS_AS((void)read(), std::bad_alloc);
        is_taken = true;
        CHECK(read());
        CHECK(sequence == 7);
        CHECK(got == body);
    }
}

TEST_CASE("no rank is missing in a group by TCP that has ended") {
    std::atomic<int> have_asked{0};
    run_tcp_ranks({2, 3}, [&](TcpCommunicator& comm) {
        have_asked = 0;
        comm.barrier();
        int const others = comm.size() - 1;
        if (comm.rank() == others) {
            wait_until([&] { return have_asked == others; });
            comm.abort({FailureKind::mismatch, {others}, "enough"});
            return;
        }
        std::int32_t value = 1;
        TcpWork work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
        CHECK(comm.missing_ranks().size() >= 1);
        ++have_asked;
        wait_until([&] { return comm.is_aborted(); });
        CHECK(comm.missing_ranks().empty());
        CHECK_THROWS_AS(work.wait(), joinable::Mismatch);
    });
}

/// What a rank throws that has posted an all_reduce of three numbers, then a barrier, when it gets
/// `frames` from rank 0 after a start. The rank asks for more time if it `is_overdue`.
std::string text_of_refusal(std::vector<std::byte> const& frames, bool is_overdue = false) {
    using joinable::detail::Collective;
    using joinable::detail::Socket;
    using namespace std::chrono;
    int handles[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
    Socket hub{handles[0]};
    std::array<std::int32_t, 4> values{1, 1, 1, 4}; // the last one is not part of it
    std::string text;
    {
        joinable::detail::TcpRank rank{Socket{handles[1]}, 1, 2, is_overdue ? 1ms : 60s};
        joinable::detail::FrameHeader start;
        start.kind = joinable::detail::FrameKind::start;
        REQUIRE(hub.send(joinable::detail::bytes_of(start)) == sizeof start);
        rank.meet("");
        joinable::detail::Request request;
        request.signature = {Collective::all_reduce, DType::i32, ReduceOp::sum, 0, 3};
        request.out = {values.data(), 3, DType::i32};
        request.in = request.out;
        rank.post(request);
        rank.post({});
        std::jthread answers{[&] {
            while (is_overdue && next_frame(hub).kind != joinable::detail::FrameKind::overdue) {
            }
            CHECK(hub.send(frames) == frames.size());
            hub.end_sending();
        }};
        try {
            rank.finish(0);
            rank.finish(1);
            wait_until([&] { return rank.is_aborted(); });
            rank.post({}); // throws why
        } catch (joinable::CommunicationError const& error) {
            text = error.what();
        } catch (joinable::PeerFailed const&) {
            text = "the connection broke";
        }
        CHECK(values[3] == 4);
        answers.join();
        hub.close();
    }
    return text;
}

TEST_CASE("a rank 0 that breaks the protocol is a CommunicationError that says how") {
    using joinable::detail::bytes_of;
    using joinable::detail::FrameHeader;
    using joinable::detail::FrameKind;
    Watchdog const watchdog{1};
    struct Case {
        FrameKind kind;
        std::uint64_t sequence;
        std::uint64_t bytes;
        std::string what;
        std::uint64_t count = 0;
        std::uint64_t consumed = 0;
    };
    std::uint64_t const huge = std::uint64_t{1} << 40U;
    for (Case const& one : std::vector<Case>{
             {FrameKind::result, 0, 8, "8 bytes where 12 were expected"},
             {FrameKind::result, 0, 0, "0 bytes where 12 were expected"}, // once a wrong sum
             {FrameKind::result, 0, 16, "16 bytes where 12 were expected"},
             {FrameKind::result, 0, huge, "1099511627776 bytes where 12 were expected"},
             {FrameKind::result, 1, 12, "a result for which it did not ask"},
             {FrameKind::start, 0, 0, "a second start"},
             {FrameKind::end, 0, huge, "1099511627776 bytes where 5032 are the most"},
             {FrameKind::end, 0, 3, "an end without a reason"},
             {FrameKind::wait, 0, 0, "more time, for which it did not ask", 1},
             {FrameKind::wait, 7, 0, "more time, for which it did not ask", 1},
             {FrameKind::answer, 0, 4, "an answer to no question"},
             {FrameKind::arrival, 0, 0, "a message of the unknown kind 0"},
             {FrameKind::credit, 0, 0, "a message of the unknown kind 6"},
             {static_cast<FrameKind>(77), 0, 0, "a message of the unknown kind 77"},
             {FrameKind::result, 0, 12, "word of bytes that it never got", 0, huge},
         }) {
        CAPTURE(one.what);
        FrameHeader header;
        header.kind = one.kind;
        header.sequence = one.sequence;
        header.bytes = one.bytes;
        header.count = one.count;
        header.consumed = one.consumed;
        std::vector<std::byte> frames(sizeof header + (one.bytes <= 16 ? one.bytes : 0));
        std::memcpy(frames.data(), &header, sizeof header);
        CHECK(
            text_of_refusal(frames) ==
            "rank 0 sent rank 1 " + one.what + ": is it this version of joinable?"
        );
    }
    FrameHeader result; // one for each collective, and one too many
    result.kind = FrameKind::result;
    result.bytes = 12;
    std::vector<std::byte> frames(sizeof result + 12);
    std::memcpy(frames.data(), &result, sizeof result);
    result.bytes = 0;
    for (result.sequence = 1; result.sequence < 3; ++result.sequence) {
        auto const more = bytes_of(result);
        frames.insert(frames.end(), more.begin(), more.end());
    }
    CHECK(
        text_of_refusal(frames) ==
        "rank 0 sent rank 1 a result for which it did not ask: is it this version of joinable?"
    );
    frames.resize(sizeof result + 12 + sizeof result);
    CHECK(text_of_refusal(frames) == "the connection broke"); // after that, and nothing else
    FrameHeader wait;                                         // for longer than the deadline
    wait.kind = FrameKind::wait;
    wait.count = 2'000'000;
    std::vector<std::byte> more(sizeof wait);
    std::memcpy(more.data(), &wait, sizeof wait);
    CHECK(
        text_of_refusal(more, true) == "rank 0 sent rank 1 more time, for which it did not ask: is "
                                       "it this version of joinable?"
    );
}

TEST_CASE("a packed reason keeps its origin, and whether its ranks have left") {
    for (bool const has_left : {false, true}) {
        for (int const origin : {-1, 0, 9, 1 << 20}) {
            auto const got = joinable::detail::unpacked_reason(joinable::detail::packed(
                {FailureKind::peer_failed, {1, 9}, "text", origin, has_left}
            ));
            REQUIRE(got);
            CHECK(got->ranks == std::vector{1, 9});
            CHECK(got->message == "text");
            CHECK(got->origin == origin);
            CHECK(got->has_left == has_left);
        }
    }
}

TEST_CASE("a reason that is none ends the connection on either side, and a long one is cut") {
    using joinable::detail::packed;
    using joinable::detail::unpacked_reason;
    joinable::AbortReason const reason{FailureKind::mismatch, {0, 3}, std::string(5000, 'x')};
    auto const sent = packed({FailureKind::mismatch, {-1, 0, 3, 1 << 20}, reason.message});
    CHECK(sent.size() <= joinable::detail::most_told_bytes);
    auto const got = unpacked_reason(sent);
    REQUIRE(got);
    CHECK(got->kind == reason.kind);
    CHECK(got->ranks == reason.ranks);
    CHECK(got->message == std::string(3997, 'x') + "...");
    CHECK(got->origin == -1);
    CHECK_FALSE(got->has_left);
    CHECK(unpacked_reason(std::span{sent}.first(8 + 1))->message.empty());
    for (std::size_t const bytes : {0U, 7U, 8U}) {
        CHECK_FALSE(unpacked_reason(std::span{sent}.first(bytes)));
    }
    auto bad = sent;
    bad[0] = std::byte{5}; // the kind
    CHECK_FALSE(unpacked_reason(bad));
    bad = sent;
    bad[3] = std::byte{0x80}; // how many bytes have ranks
    CHECK_FALSE(unpacked_reason(bad));
    bad = sent;
    bad[1] = std::byte{2}; // has_left
    CHECK_FALSE(unpacked_reason(bad));
    bad = sent;
    bad[7] = std::byte{0xfe}; // the origin
    CHECK_FALSE(unpacked_reason(bad));
}

/// The most memory that this process had since it began, or forked, in KiB.
long peak_of_memory() {
    std::ifstream status{"/proc/self/status"};
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("VmHWM:")) {
            return std::stol(line.substr(6));
        }
    }
    return 0;
}

TEST_CASE("headers that announce gigabytes cost rank 0 no memory") {
    Processes processes; // so that what it had before does not hide it
    processes.start([] {
        using joinable::detail::Socket;
        int handles[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
        Socket rank_0{handles[0]};
        long const before = peak_of_memory();
        {
            joinable::detail::FrameHeader header;
            header.kind = joinable::detail::FrameKind::arrival;
            header.collective = joinable::detail::Collective::all_reduce;
            header.dtype = DType::f32;
            header.count = std::uint64_t{1} << 28U;
            header.bytes = std::uint64_t{1} << 30U;
            CHECK(rank_0.send(joinable::detail::bytes_of(header)) == sizeof header);
            joinable::detail::Hub hub{Socket{}, Socket{handles[1]}, {1, "", ""}};
            std::jthread const thread{[&] { hub.run(); }};
            rank_0.end_sending(); // so it reads that and ends
        }
        CHECK(peak_of_memory() - before < 300'000);
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE("a loop of tests by TCP ends at the deadline, in the words of thread ranks") {
    for (int const world : {2, 3, 4, 8}) {
        PollCounts counts;
        run_tcp_ranks({world}, [&](auto& comm) { poll_until_deadline(comm, counts); });
    }
}

TEST_CASE("a loop of tests by TCP goes on while the missing rank says that it is at work") {
    together({2, 3}, [](int size) {
        run_tcp_ranks({size}, [](auto& comm) { poll_for_rank_at_work(comm); });
    });
}

TEST_CASE("a rank that tests now and then by TCP has more time, and progress() never times out") {
    for (int const world : {2, 3}) {
        PollCounts counts;
        run_tcp_ranks({world}, [&](auto& comm) { poll_now_and_then(comm, counts); });
    }
}

TEST_CASE("a loop of tests ends when rank 0 does not answer, and never waits for that") {
    using joinable::detail::FrameKind;
    using joinable::detail::Socket;
    using Clock = std::chrono::steady_clock;
    int handles[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
    Watchdog const watchdog{1};
    Socket hub{handles[0]};
    joinable::detail::TcpRank rank{Socket{handles[1]}, 1, 2, 100ms, {}, {.patience = 300ms}};
    joinable::detail::FrameHeader header;
    header.kind = FrameKind::start;
    REQUIRE(hub.send(joinable::detail::bytes_of(header)) == sizeof header);
    rank.meet("");
    rank.post({});
    auto const start = Clock::now();
    int tests = 0;
    int questions = 0;
    std::vector<std::byte> said;
    try {
        while (!rank.test(0)) {
            ++tests;
            joinable::detail::FrameHeader got;
            auto const bytes = hub.receive(std::as_writable_bytes(std::span{&got, 1}));
            if (bytes == sizeof got && got.kind == FrameKind::overdue) {
                std::vector<std::byte> text(got.bytes);
                CHECK(hub.receive(text) == got.bytes);
                if (questions++ == 0) { // the first time it has more time, the second no answer
                    header.kind = FrameKind::wait;
                    header.count = 50'000'000;
                    CHECK(hub.send(joinable::detail::bytes_of(header)) == sizeof header);
                }
            }
            std::this_thread::sleep_for(1ms);
        }
        FAIL_CHECK("no exception");
    } catch (joinable::TimedOut const& error) {
        CHECK(error.missing() == std::vector{0});
    }
    CHECK(questions == 2);
    CHECK(Clock::now() - start >= 450ms);
    CHECK(
        tests > 40
    ); // a gap between two counts as 10 ms at most: none of them has waited for long
    hub.close();
}

TEST_CASE("a wait after tests has the whole deadline, and then the patience of rank 0") {
    using joinable::detail::FrameKind;
    using joinable::detail::Socket;
    using Clock = std::chrono::steady_clock;
    int handles[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, handles) == 0);
    Watchdog const watchdog{1};
    Socket hub{handles[0]};
    joinable::detail::TcpRank rank{Socket{handles[1]}, 1, 2, 200ms, {}, {.patience = 100ms}};
    joinable::detail::FrameHeader header;
    header.kind = FrameKind::start;
    REQUIRE(hub.send(joinable::detail::bytes_of(header)) == sizeof header);
    rank.meet("");
    rank.post({});
    for (auto const begin = Clock::now(); Clock::now() - begin < 150ms;) {
        CHECK_FALSE(rank.test(0));
        std::this_thread::sleep_for(1ms);
    }
    auto const start = Clock::now();
    CHECK_THROWS_AS(rank.finish(0), joinable::TimedOut);
    auto const waited = Clock::now() - start;
    CHECK(waited >= 300ms);
    CHECK(waited < 10s);
    hub.close();
}

} // namespace
