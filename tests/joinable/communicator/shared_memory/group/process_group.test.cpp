// SPDX-License-Identifier: BSL-1.0
// What is left of messages and groups when a process is killed that had a part in them.
#include <joinable/communicator/shared_memory/group/group.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/hang.hpp>
#include <support/named_ranks.hpp>
#include <support/process_ranks.hpp>
#include <support/segment_ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/shared_memory/run_processes.hpp>
#include <joinable/device/arena.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::PeerFailed;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using Clock = std::chrono::steady_clock;

/// What run_processes says of a rank that was killed. Checks that it took far less than a deadline.
template <class Body>
void check_killed(int world, int culprit, Body const& body) {
    auto const start = Clock::now();
    CHECK_THROWS_WITH_AS(
        run_process_ranks({world}, body),
        ("rank " + std::to_string(culprit) + " failed: its process was killed by signal 9").c_str(),
        PeerFailed
    );
    CHECK(Clock::now() - start < std::chrono::seconds{20});
}

/// Bytes of which one in the middle kills or stops a process that touches it.
class Trap {
public:
    static constexpr std::size_t bytes = std::size_t{4} << 20U;

    explicit Trap(bool only_stops = false)
        : data_{static_cast<std::uint8_t*>(
              mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
          )} {
        mprotect(data_ + bytes / 2, 1, PROT_NONE);
        struct sigaction action{};
        action.sa_handler = [](int) { std::raise(SIGKILL); };
        if (only_stops) {
            action.sa_handler = [](int) { std::raise(SIGSTOP); };
        }
        sigaction(SIGSEGV, &action, nullptr);
    }
    [[nodiscard]] joinable::Buffer buffer() const { return {data_, bytes, DType::u8}; }

private:
    std::uint8_t* data_; // gone with the process
};

/// Kills this process in a moment.
void kill_in(std::chrono::microseconds moment) {
    itimerval when{};
    when.it_value.tv_usec = moment.count();
    std::signal(SIGALRM, [](int) { std::raise(SIGKILL); });
    setitimer(ITIMER_REAL, &when, nullptr);
}

/// Whether the system has stopped it.
bool is_stopped(pid_t process) {
    std::ifstream file{"/proc/" + std::to_string(process) + "/stat"};
    std::string state;
    std::getline(file, state);
    return state.find(") T ") != std::string::npos;
}

void spin_until(std::atomic<bool> const& flag) {
    while (!flag) {
        std::this_thread::yield();
    }
}

TEST_CASE("a rank that is killed is named on the rank that waits for its message") {
    Shared<std::atomic<int>> const named;
    for (int const world : groups_of_processes({2, 3, 4, 8})) {
        for (int const culprit : {0, world - 1}) {
            *named = 0;
            check_killed(world, culprit, [&](ProcessCommunicator& comm) {
                float value = 0;
                comm.barrier();
                if (comm.rank() == culprit) {
                    std::raise(SIGKILL);
                }
                try {
                    if (comm.rank() % 2 == 0) {
                        comm.receive({&value, 1, DType::f32}, culprit).wait();
                    } else {
                        comm.send({&value, 1, DType::f32}, culprit).wait();
                    }
                } catch (PeerFailed const& error) {
                    *named += error.rank() == culprit ? 1 : 0;
                    throw;
                }
            });
            CHECK(*named == world - 1);
        }
    }
}

TEST_CASE("every message to a rank that was killed fails, however many follow the first") {
    Shared<std::atomic<int>> const failed;
    constexpr int messages = 8;
    for (bool const is_send : {false, true}) {
        *failed = 0;
        check_killed(2, 1, [&](ProcessCommunicator& comm) {
            float value = 0;
            if (comm.rank() == 1) {
                std::raise(SIGKILL);
            }
            for (int i = 0; i < messages; ++i) {
                try {
                    is_send ? comm.send({&value, 1, DType::f32}, 1).wait()
                            : comm.receive({&value, 1, DType::f32}, 1).wait();
                } catch (PeerFailed const& error) {
                    *failed += error.rank() == 1 ? 1 : 0;
                }
            }
        });
        CHECK(*failed == messages);
    }
}

TEST_CASE("a rank that is killed while it copies a message fails it, and no half of it arrives") {
    enum Moment : int { on_arrival, before_arrival, while_it_takes };
    Shared<std::atomic<bool>> const is_posted;
    Shared<std::atomic<int>> const named;
    for (int const moment : {on_arrival, before_arrival, while_it_takes}) {
        *is_posted = false;
        *named = 0;
        check_killed(2, 1, [&](ProcessCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == 1) {
                Trap const trap;
                if (moment != before_arrival) {
                    spin_until(*is_posted);
                }
                if (moment == while_it_takes) {
                    comm.receive(trap.buffer(), 0).wait();
                } else {
                    comm.send(trap.buffer(), 0).wait();
                }
                return;
            }
            std::vector<std::uint8_t> bytes(Trap::bytes, 7);
            joinable::Buffer const buffer{bytes.data(), bytes.size(), DType::u8};
            auto work = moment == while_it_takes ? comm.send(buffer, 1) : comm.receive(buffer, 1);
            *is_posted = true;
            try {
                work.wait();
            } catch (PeerFailed const& error) {
                *named = error.rank();
                CHECK(bytes == std::vector<std::uint8_t>(Trap::bytes, 7));
                CHECK_THROWS_AS(work.wait(), PeerFailed); // again
                throw;
            }
        });
        CHECK(*named == 1);
    }
}

/// Rank 1 is stopped in its `part` of a message with rank 0, which gives up once it is: 'it did not
/// <missed>'. Rank 0 waits, or tests in a loop.
template <class Part>
void check_stopped(bool sends, std::string const& missed, Part const& part, bool tests = false) {
    Shared<std::atomic<pid_t>> const process;
    Shared<std::atomic<bool>> const is_posted;
    Shared<std::array<char, 200>> const text;
    SegmentRanks ranks{2};
    auto const run = [&](ProcessCommunicator& comm) {
        if (comm.rank() == 1) {
            comm.set_deadline(std::chrono::milliseconds{100});
            *process = getpid();
            spin_until(*is_posted);
            part(comm, ranks);
            return;
        }
        wait_until([&] { return *process != 0; });
        std::vector<std::uint8_t> bytes(Trap::bytes, 7);
        joinable::Buffer const buffer{bytes.data(), bytes.size(), DType::u8};
        auto work = sends ? comm.send(buffer, 1) : comm.receive(buffer, 1);
        *is_posted = true;
        wait_until([&] { return is_stopped(*process); });
        comm.set_deadline(std::chrono::milliseconds{100});
        try {
            while (tests && !work.test()) {
            }
            work.wait();
            FAIL_CHECK("no exception");
        } catch (joinable::TimedOut const& error) {
            std::snprintf(text->data(), text->size(), "%s", error.what());
            CHECK(error.missing() == std::vector{1});
            CHECK_THROWS_AS(work.wait(), joinable::TimedOut); // again
            CHECK(bytes == std::vector<std::uint8_t>(Trap::bytes, 7));
            throw;
        }
    };
    CHECK_THROWS_AS(ranks.run(run), PeerFailed);
    CHECK(
        std::string{text->data()} == "rank 1 did not " + missed +
                                         " within 0.1 s, while rank 0 waits in a " +
                                         (sends ? "send" : "receive") + " of 4194304 u8 with tag 0"
    );
}

TEST_CASE("a rank that is stopped while it copies a message times out, and no half of it arrives") {
    for (bool const tests : {false, true}) {
        for (bool const sends : {false, true}) {
            auto const stops = [&](ProcessCommunicator& comm, SegmentRanks&) {
                Trap const trap{true};
                (sends ? comm.receive(trap.buffer(), 0) : comm.send(trap.buffer(), 0)).wait();
            };
            check_stopped(sends, "finish its copy", stops, tests);
        }
    }
}

TEST_CASE("a Mismatch beside a message whose other side is stopped ends the wait for it, too") {
    Shared<std::atomic<pid_t>> const process;
    Shared<std::atomic<bool>> const is_posted;
    Shared<std::atomic<bool>> const has_heard;
    auto const reduce = [](ProcessCommunicator& comm, std::vector<float>& values) {
        return comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
    };
    auto const run = [&](ProcessCommunicator& comm) {
        comm.set_deadline(std::chrono::milliseconds{100});
        std::vector<float> values(100'000 + static_cast<std::size_t>(comm.rank()));
        if (comm.rank() == 1) {
            Trap const trap{true};
            *process = getpid();
            spin_until(*is_posted);
            auto const differs = reduce(comm, values);
            comm.receive(trap.buffer(), 0).wait();
            return;
        }
        wait_until([&] { return *process != 0; });
        std::vector<std::uint8_t> bytes(Trap::bytes, 7);
        auto message = comm.send({bytes.data(), bytes.size(), DType::u8}, 1);
        *is_posted = true;
        wait_until([&] { return is_stopped(*process); });
        auto differs = reduce(comm, values);
        CHECK_THROWS_AS(message.wait(), joinable::Mismatch);
        CHECK_THROWS_AS(differs.wait(), joinable::Mismatch);
        *has_heard = true;
        throw std::runtime_error{"rank 0 has heard"};
    };
    CHECK_THROWS_AS(run_process_ranks({2}, run), PeerFailed);
    CHECK(*has_heard);
}

TEST_CASE("a rank that is stopped with a mailbox locked times out") {
    for (bool const sends : {false, true}) {
        char const* const missed = sends ? "receive" : "send";
        check_stopped(sends, missed, [&](ProcessCommunicator&, SegmentRanks& ranks) {
            CHECK(ranks.segment().group().mailbox(sends ? 0 : 1, sends ? 1 : 0).try_lock());
            std::raise(SIGSTOP);
        });
    }
}

TEST_CASE("a rank that is killed with a mailbox locked stops nobody") {
    using namespace joinable::detail;
    Shared<std::atomic<int>> const named;
    auto const body = [&](ProcessSegment& segment, ProcessCommunicator& comm, bool is_late) {
        float value = 0;
        comm.set_deadline(std::chrono::seconds{60});
        comm.barrier();
        if (comm.rank() == 1) {
            if (is_late) {
                std::this_thread::sleep_for(std::chrono::milliseconds{20}); // the other one waits
            }
            while (!segment.group().mailbox(0, 1).try_lock()) {
            }
            std::raise(SIGKILL);
        }
        try {
            auto work = comm.send({&value, 1, DType::f32}, 1);
            work.wait();
        } catch (PeerFailed const& error) {
            *named += error.rank();
        }
        CHECK_THROWS_AS(comm.send({&value, 1, DType::f32}, 1).wait(), PeerFailed);
    };
    for (bool const is_late : {false, true}) {
        *named = 0;
        Alarm const at_hang;
        auto const run = [&] {
            ProcessSegment segment{2};
            ChildProcesses children{segment};
            for (int rank = 0; rank < 2; ++rank) {
                if (children.start()) {
                    auto const of_rank = [&](ProcessCommunicator& comm) {
                        body(segment, comm, is_late);
                    };
                    run_rank(segment, rank, of_rank);
                }
            }
            children.wait();
            throw_first_failure(segment, children);
        };
        CHECK_THROWS_WITH_AS(
            run(), "rank 1 failed: its process was killed by signal 9", PeerFailed
        );
        CHECK(*named == 1);
    }
}

/// Groups of groups, with messages and collectives in them. Calls `step` before each.
template <class Step>
void run_steps(ProcessCommunicator& comm, Step const& step) {
    step();
    auto group = comm.split(comm.rank() % 2, -comm.rank());
    step();
    auto deeper = group.split(0, 0);
    std::vector<float> mine(100'000, 1.0F);
    std::vector<float> theirs(mine.size());
    for (auto* const place : {&comm, &group, &deeper}) {
        int const size = place->size();
        step();
        auto sending =
            place->send({mine.data(), mine.size(), DType::f32}, (place->rank() + 1) % size);
        step();
        place
            ->receive({theirs.data(), theirs.size(), DType::f32}, (place->rank() + size - 1) % size)
            .wait();
        CHECK(theirs == mine);
        sending.wait();
        step();
        place->all_reduce({theirs.data(), theirs.size(), DType::f32}, ReduceOp::sum).wait();
        CHECK(theirs.back() == static_cast<float>(size));
    }
    step();
    comm.barrier();
}

TEST_CASE("a rank that is killed anywhere among groups ends them all") {
    Shared<std::atomic<int>> const ended;
    for (int const world : groups_of_processes({2, 3, 4, 8})) {
        for (int point = 0; point < 12; ++point) {
            int const culprit = point % world;
            *ended = 0;
            check_killed(world, culprit, [&](ProcessCommunicator& comm) {
                int at = 0;
                try {
                    run_steps(comm, [&] {
                        if (at++ == point && comm.rank() == culprit) {
                            std::raise(SIGKILL);
                        }
                    });
                } catch (PeerFailed const&) { // with the number in the group where it was noticed
                    ++*ended;
                    throw;
                }
            });
            CHECK(*ended == world - 1);
        }
    }
}

TEST_CASE("a rank that is killed at any moment among groups leaves nobody waiting") {
    Shared<std::atomic<int>> const ended;
    for (int attempt = 0; attempt < 60; ++attempt) {
        *ended = 0;
        check_killed(4, 2, [&](ProcessCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == 2) {
                kill_in(std::chrono::microseconds{100 + 131 * attempt});
            }
            try {
                for (;;) {
                    run_steps(comm, [] {});
                }
            } catch (PeerFailed const&) {
                ++*ended;
            }
        });
        CHECK(*ended == 3);
    }
}

TEST_CASE("ranks that attached by a name form groups, and one that is killed leaves nobody waiting"
) {
    run_named_ranks({1, 2, 3, 4}, [](ProcessCommunicator& comm) { run_steps(comm, [] {}); });
    for (int attempt = 0; attempt < 40; ++attempt) {
        std::string const job = fresh_job();
        Processes processes;
        for (int rank = 0; rank < 4; ++rank) {
            processes.start([&] {
                displace(rank, 4);
                auto comm = ProcessCommunicator::attach({rank, 4, job, std::chrono::seconds{50}});
                comm.barrier();
                if (rank == 2) {
                    kill_in(std::chrono::microseconds{100 + 197 * attempt});
                }
                CHECK_THROWS_AS(
                    [&] {
                        for (;;) {
                            run_steps(comm, [] {});
                        }
                    }(),
                    PeerFailed
                );
            });
        }
        for (int rank = 0; rank < 4; ++rank) {
            CHECK(processes.wait() == (rank == 2 ? SIGKILL : 0));
        }
    }
}

TEST_CASE("a killed rank has the number that it has in the group of the rank that hears of it") {
    Shared<std::array<std::atomic<int>, 4>> const named;
    check_killed(4, 3, [&](ProcessCommunicator& comm) {
        auto group = comm.split(comm.rank() / 2, -comm.rank()); // 1, 0 and 3, 2
        auto deeper = group.split(group.rank(), 0);             // everybody alone
        comm.barrier();
        if (comm.rank() == 3) {
            std::raise(SIGKILL);
        }
        float value = 0;
        auto& place = comm.rank() == 0 ? deeper : group; // where nobody sends
        try {
            place.receive({&value, 1, DType::f32}, 0).wait();
        } catch (PeerFailed const& error) {
            (*named)[static_cast<std::size_t>(comm.rank())] = 100 + error.rank();
            CHECK(
                std::string{error.what()} == "rank " + std::to_string(error.rank()) +
                                                 " failed: its process was killed by signal 9"
            );
        }
    });
    CHECK((*named)[0] == 103); // no member of its groups: as all are numbered
    CHECK((*named)[1] == 103);
    CHECK((*named)[2] == 100);
}

TEST_CASE(
    "what a rank was about to end all groups with is what all hear, though it is killed meanwhile"
) {
    Shared<std::atomic<pid_t>> const process;
    Shared<std::atomic<int>> const named;
    for (int attempt = 0; attempt < 5; ++attempt) {
        *process = *named = 0;
        check_killed(4, 0, [&](ProcessCommunicator& comm) {
            std::vector<std::unique_ptr<ProcessCommunicator>> groups;
            for (int i = 0; i < 50; ++i) {
                groups.emplace_back(new ProcessCommunicator(comm.split(0, comm.rank())));
            }
            if (comm.rank() == 0) {
                *process = getpid();
                comm.abort({joinable::FailureKind::mismatch, {3}, "rank 0 gives up"});
                for (;;) {
                    pause();
                }
            }
            if (comm.rank() == 1) {
                wait_until([&] { return *process != 0; });
                while (!comm.is_aborted()) {
                }
                kill(*process, SIGKILL);
            }
            for (auto const& group : groups) { // from the one that the abort reaches last
                try {
                    group->barrier();
                } catch (joinable::Mismatch const& error) {
                    *named += error.ranks() == std::vector{3} ? 1 : 0;
                }
            }
        });
        CHECK(*named == 3 * 50);
    }
}

TEST_CASE("a message between arenas is not copied into other memory, at whichever side it waits") {
    constexpr std::size_t count = 50'000;
    for (bool const uses_arenas : {true, false}) {
        SegmentRanks ranks{2};
        ranks.run([&](ProcessCommunicator& comm) {
            auto const make = [&] {
                std::size_t const bytes = count * sizeof(std::int32_t);
                return uses_arenas ? comm.allocate(bytes) : joinable::Arena{bytes};
            };
            joinable::Arena const out = make();
            joinable::Arena const in = make();
            auto* const sent = reinterpret_cast<std::int32_t*>(out.data());
            auto* const received = reinterpret_cast<std::int32_t*>(in.data());
            for (int const first : {0, 1}) {
                std::fill(sent, sent + count, 10 * first + comm.rank() + 1);
                auto const send = [&] {
                    return comm.send({sent, count, DType::i32}, 1 - comm.rank());
                };
                auto const receive = [&] {
                    return comm.receive({received, count, DType::i32}, 1 - comm.rank());
                };
                auto one = comm.rank() == first ? send() : receive();
                auto two = comm.rank() == first ? receive() : send();
                two.wait();
                one.wait();
                CHECK(
                    std::count(received, received + count, 10 * first + 2 - comm.rank()) == count
                );
            }
        });
        // Messages lie there, too. The rank that comes first copies: it may be the same rank every time.
        CHECK((std::max(ranks.copied(0), ranks.copied(1)) < 1000) == uses_arenas);
    }
}

} // namespace
