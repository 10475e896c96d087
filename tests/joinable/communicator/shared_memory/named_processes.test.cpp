// SPDX-License-Identifier: BSL-1.0
// What is different where ranks are processes that nobody started together: how they find each
// other, how they notice deaths, and what they leave. Their collectives are tested beside those of
// thread ranks, by the same bodies.
#include <joinable/communicator/shared_memory/process.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/core_dump.hpp>
#include <support/forked.hpp>
#include <support/keep_alive.hpp>
#include <support/named_ranks.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/tells_reason.hpp>
#include <support/time_of_death.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/device/arena.hpp>

namespace {

using namespace joinable_tests;
using joinable::CommunicationError;
using joinable::ContractViolation;
using joinable::DType;
using joinable::PeerFailed;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using joinable::TimedOut;
using joinable::detail::Heading;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

ProcessCommunicator
attach(int rank, int size, std::string const& job, std::chrono::nanoseconds deadline = 50s) {
    return ProcessCommunicator::attach({rank, size, job, deadline});
}

/// Where this process has mapped the board of a shared-memory object, which is in its largest mapping;
/// 0 if nowhere.
std::uint64_t mapped_at() {
    std::ifstream maps{"/proc/self/maps"};
    std::uint64_t found = 0;
    std::uint64_t largest = 0;
    for (std::string line; std::getline(maps, line);) {
        if (line.find(" /dev/shm/") != std::string::npos) {
            std::uint64_t const begin = std::stoull(line, nullptr, 16);
            std::uint64_t const bytes =
                std::stoull(line.substr(line.find('-') + 1), nullptr, 16) - begin;
            found = bytes > largest ? begin : found;
            largest = std::max(largest, bytes);
        }
    }
    return found;
}

TEST_CASE("ranks see the memory at different addresses, and its file is removed once all have come"
) {
    for (int const world : groups_of_processes({1, 2, 3, 4, 8})) {
        std::string const job = fresh_job();
        Processes processes;
        for (int rank = 0; rank < world; ++rank) {
            processes.start([&] {
                displace(rank, world);
                auto comm = attach(rank, world, job);
                CHECK(!file_exists(job));
                CHECK(comm.rank() == rank);
                CHECK(comm.size() == world);
                std::uint64_t const mine = mapped_at();
                CHECK(mine != 0);
                std::vector<std::uint64_t> all(static_cast<std::size_t>(world));
                comm.all_gather({&mine, 1, DType::u64}, {all.data(), all.size(), DType::u64})
                    .wait();
                std::sort(all.begin(), all.end());
                CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
            });
        }
        for (int rank = 0; rank < world; ++rank) {
            CHECK(processes.wait() == 0);
        }
        CHECK(!file_exists(job));
    }
}

TEST_CASE("the memory that ranks share is left out of a core dump where ranks attach, too") {
    run_named_ranks({1, 3}, [](ProcessCommunicator& comm) {
        comm.barrier();
        SharedMappings const mappings;
        CHECK(mappings.all == 1);
        CHECK(mappings.dumped == 0);
    });
}

TEST_CASE("the variables of a launcher are enough to attach") {
    std::string const job = fresh_job();
    Processes processes;
    for (int rank = 0; rank < 3; ++rank) {
        processes.start([&] {
            setenv("JOINABLE_RANK", std::to_string(rank).c_str(), 1);
            setenv("JOINABLE_WORLD_SIZE", "3", 1);
            setenv("JOINABLE_JOB", job.c_str(), 1);
            auto comm = ProcessCommunicator::from_environment(50s);
            CHECK(comm.rank() == rank);
            std::int64_t value = 1 << rank;
            comm.all_reduce({&value, 1, DType::i64}, ReduceOp::sum).wait();
            CHECK(value == 7);
        });
        processes.start([&] {
            for (char const* const name : {"RANK", "LOCAL_WORLD_SIZE"}) {
                setenv(name, "1", 1);
            }
            setenv("WORLD_SIZE", "2", 1);
            setenv("MASTER_ADDR", "127.0.0.1", 1);
            setenv("MASTER_PORT", "1", 1);
            CHECK_THROWS_WITH_AS(
                ProcessCommunicator::from_environment(1s),
                "expected all ranks on this machine, as they share its memory, but "
                "LOCAL_WORLD_SIZE is 1 and WORLD_SIZE is 2: start them on one machine, or use a "
                "communicator that has a network",
                ContractViolation
            );
        });
    }
    for (int process = 0; process < 6; ++process) {
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("one job id serves several groups, one after another") {
    std::string const job = fresh_job();
    Processes processes;
    for (int rank = 0; rank < 3; ++rank) {
        processes.start([&] {
            for (int group = 0; group < 200; ++group) {
                auto comm = attach(rank, 3, job);
                std::int32_t value = group;
                comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum).wait();
                CHECK(value == 3 * group);
            }
        });
    }
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
    CHECK(!file_exists(job));
}

/// What became of the ranks of a group in which one is killed or stopped.
struct Fates {
    TimeOfDeath time;
    std::atomic<int> peer_failed{0}; ///< how many were told of the culprit, as what
    std::atomic<int> timed_out{0};
    std::atomic<int> attached{0};

    /// Runs `body` and counts how it fails because of `culprit`.
    template <class Body>
    void count(int culprit, Body const& body) {
        try {
            body();
        } catch (PeerFailed const& error) {
            time.is_heard();
            peer_failed += error.ranks() == std::vector{culprit} ? 1 : 0;
        } catch (TimedOut const& error) {
            timed_out += error.missing() == std::vector{culprit} ? 1 : 0;
        }
    }
    void kill_me(int signal = SIGKILL) {
        time.happens();
        std::raise(signal);
    }
};

TEST_CASE("a rank that is killed anywhere is named on all others, long before the deadline") {
    for (int const world : groups_of_processes({2, 3, 4, 8})) {
        std::vector<Clock::duration> delays;
        for (int culprit = 0; culprit < world; ++culprit) {
            for (int point = world > 3 ? culprit % 3 : 0; point < 13; point += world > 3 ? 3 : 1) {
                std::string const job = fresh_job();
                Shared<Fates> fates;
                Processes processes;
                for (int rank = 0; rank < world; ++rank) {
                    processes.start([&] {
                        auto comm = attach(rank, world, job);
                        int at = 0;
                        auto const step = [&] {
                            if (at++ == point && rank == culprit) {
                                fates->kill_me();
                            }
                        };
                        fates->count(culprit, [&] {
                            step(); // after attaching, before the first collective
                            run_collectives(comm, step);
                        });
                    });
                }
                for (int rank = 0; rank < world; ++rank) {
                    CHECK(processes.wait() == (rank == culprit ? SIGKILL : 0));
                }
                CAPTURE(world);
                CAPTURE(culprit);
                CAPTURE(point);
                CHECK(fates->peer_failed == world - 1);
                delays.push_back(fates->time.delay());
                CHECK(!file_exists(job));
            }
        }
        CHECK(most_of(delays) < 1s); // mostly some 20 ms
    }
}

TEST_CASE("a rank that is killed within a large collective leaves nobody waiting") {
    for (int attempt = 0; attempt < 24; ++attempt) {
        std::string const job = fresh_job();
        Shared<Fates> fates;
        Processes processes;
        int const culprit = attempt % 3;
        std::array<pid_t, 3> ids{};
        for (int rank = 0; rank < 3; ++rank) {
            ids[static_cast<std::size_t>(rank)] = processes.start([&] {
                auto comm = attach(rank, 3, job);
                bool const is_in_arena = attempt % 2 == 0; // else it moves in slices
                std::size_t const bytes = 8'000'000;
                joinable::Arena const arena =
                    is_in_arena ? joinable::make_arena(comm, bytes) : joinable::Arena{bytes};
                std::span const values{reinterpret_cast<double*>(arena.data()), 1'000'000};
                std::fill(values.begin(), values.end(), 1.0);
                comm.barrier();
                ++fates->attached;
                fates->count(culprit, [&] {
                    for (;;) {
                        comm.all_reduce({values.data(), values.size(), DType::f64}, ReduceOp::max)
                            .wait();
                        CHECK(values.back() == 1.0);
                    }
                });
            });
        }
        wait_until(fates->attached, 3);
        std::this_thread::sleep_for(200us + 500us * attempt);
        kill(ids[static_cast<std::size_t>(culprit)], SIGKILL);
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(processes.wait() == (rank == culprit ? SIGKILL : 0));
        }
        CHECK(fates->peer_failed == 2);
    }
}

TEST_CASE("a rank that polls hears of a death, too, a tenth of a second after it at the latest") {
    for (bool const polls_late : {false, true}) {
        std::string const job = fresh_job();
        Shared<Fates> fates;
        Shared<std::atomic<bool>> is_dead;
        Processes processes;
        for (int const rank : {1, 0}) {
            processes.start([&] {
                auto comm = attach(rank, 2, job);
                comm.barrier();
                if (rank == 1) {
                    fates->kill_me();
                }
                fates->count(1, [&] {
                    std::int32_t value = 0;
                    auto work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
                    if (polls_late) {
                        wait_until(*is_dead, true);
                        std::this_thread::sleep_for(100ms);
                        CHECK(!work.test()); // finds the death, which the next call tells
                        static_cast<void>(work.test());
                    }
                    while (!polls_late && !work.test()) {
                    }
                });
            });
        }
        CHECK(processes.wait() == SIGKILL);
        *is_dead = true;
        CHECK(processes.wait() == 0);
        CHECK(fates->peer_failed == 1);
    }
}

TEST_CASE("ranks that are killed while they tell of a failure leave nobody waiting") {
    for (int attempt = 0; attempt < 60; ++attempt) {
        std::string const job = fresh_job();
        Shared<Fates> fates;
        Shared<std::atomic<int>> ended;
        Processes processes;
        std::array<pid_t, 5> ids{};
        for (int rank = 0; rank < 5; ++rank) {
            ids[static_cast<std::size_t>(rank)] = processes.start([&] {
                auto comm = attach(rank, 5, job);
                comm.barrier();
                ++fates->attached;
                try {
                    if (rank == 0) { // is killed while it writes why, or soon after
                        comm.abort({joinable::FailureKind::peer_failed, {0}, std::string(3000, 'x')}
                        );
                    }
                    for (;;) {
                        comm.barrier();
                    }
                } catch (PeerFailed const& error) {
                    CHECK(error.rank() < 3);
                    *ended += rank > 2 ? 1 : 0;
                }
            });
        }
        wait_until(fates->attached, 5);
        for (std::size_t const rank : {0U, 1U, 2U}) { // one, and those who may mark_dead it
            kill(ids[rank], SIGKILL);
            std::this_thread::sleep_for(std::chrono::microseconds{attempt * (rank == 0 ? 1 : 800)});
        }
        for (int rank = 0; rank < 5; ++rank) {
            int const how = processes.wait();
            CHECK((rank > 2 ? how == 0 : how == 0 || how == SIGKILL));
        }
        CHECK(*ended == 2);
    }
}

TEST_CASE(
    "a rank that dies while it tells of a failure is marked dead, by one that dies over it, too"
) {
    // A long text behind the bits of all ranks ends on the second page of the board, and the arrival lines of the ranks come after
    // the board: what a rank may not write there kills it.
    using joinable::detail::Board;
    constexpr std::size_t last_page = (sizeof(Board) - 1) / 4096;
    static_assert(last_page > 1); // on the first one are the state and the waiting room
    for (bool const is_long : {false, true}) {
        std::string const why(is_long ? joinable::detail::most_reason_text : 10, 'x');
        std::string const job = fresh_job();
        Shared<std::atomic<int>> dead;
        Processes processes;
        for (int const rank : {1, 2, 0}) {
            processes.start([&] {
                std::signal(SIGSEGV, SIG_DFL);
                rlimit const no_core{};
                setrlimit(RLIMIT_CORE, &no_core);
                auto comm = attach(rank, 3, job);
                comm.barrier();
                if (rank == 0) {
                    wait_until(*dead, 2);
                    std::string heard;
                    try {
                        comm.barrier();
                    } catch (PeerFailed const& error) {
                        heard = error.what();
                        CHECK(error.ranks() == (is_long ? std::vector{1, 8191} : std::vector{1}));
                    }
                    // The long text was not written to its end here, but to that of messages before.
                    CHECK(heard == why);
                    return;
                }
                wait_until(*dead, rank - 1);
                // NOLINTNEXTLINE(performance-no-int-to-ptr)
                auto* const board = reinterpret_cast<std::byte*>(mapped_at());
                auto* const end = board + (is_long ? 1 : last_page) * 4096;
                CHECK(mprotect(end, (is_long ? 1 : 3) * 4096, PROT_READ) == 0);
                std::vector<int> const ranks =
                    is_long ? std::vector{rank, 8191} : std::vector{rank};
                comm.abort({joinable::FailureKind::peer_failed, ranks, why});
            });
        }
        CHECK(processes.wait() == SIGSEGV);
        *dead = 1;
        CHECK(processes.wait() == SIGSEGV);
        *dead = 2;
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("a rank that is stopped is not dead: the others time out, and name it") {
    std::string const job = fresh_job();
    Shared<Fates> fates;
    Shared<std::atomic<int>> waiting;
    Shared<std::atomic<bool>> is_stopped;
    Shared<std::atomic<int>> over;
    Processes processes;
    pid_t stopped = 0;
    for (int rank = 0; rank < 3; ++rank) {
        pid_t const process = processes.start([&] {
            auto comm = attach(rank, 3, job);
            comm.barrier();
            if (rank == 1) {
                fates->kill_me(SIGSTOP);
                CHECK_THROWS_AS(comm.barrier(), TimedOut); // when it goes on
                return;
            }
            fates->count(1, [&] {
                std::int32_t value = 0;
                auto work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
                ++*waiting;
                if (rank == 0) { // gives up, when the stopped one is the only one to miss
                    wait_until(*waiting, 2);
                    wait_until(*is_stopped, true);
                    comm.set_deadline(200ms);
                }
                work.wait();
            });
            CHECK(fates->time.elapsed() >= 200ms);
            ++*over;
        });
        stopped = rank == 1 ? process : stopped;
    }
    CHECK(waitpid(stopped, nullptr, WUNTRACED) == stopped);
    *is_stopped = true;
    wait_until(*over, 2);
    CHECK(fates->timed_out == 2);
    kill(stopped, SIGCONT);
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("a rank that leaves is named by those who wait for it") {
    std::string const job = fresh_job();
    Processes processes;
    for (int rank = 0; rank < 3; ++rank) {
        processes.start([&] {
            auto comm = attach(rank, 3, job);
            comm.barrier();
            if (rank != 2) {
                std::string const text =
                    "rank 2 left while rank " + std::to_string(rank) + " waits for it in barrier";
                CHECK_THROWS_WITH_AS(comm.barrier(), text.c_str(), PeerFailed);
                joinable_tests::check_tells_who_has_left(comm, 2);
            }
        });
    }
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("a rank lives on when the thread that attached it ends, until its process dies") {
    std::string const job = fresh_job();
    Processes processes;
    processes.start([&] {
        std::unique_ptr<ProcessCommunicator> comm;
        std::jthread{[&] { comm.reset(new ProcessCommunicator{attach(1, 2, job)}); }}.join();
        std::this_thread::sleep_for(60ms); // the other looks for deaths meanwhile
        comm->barrier();
        std::jthread{[&] { comm->barrier(); }}.join();
        raise(SIGKILL);
    });
    processes.start([&] {
        auto comm = attach(0, 2, job);
        comm.barrier();
        comm.barrier();
        CHECK_THROWS_WITH_AS(comm.barrier(), "rank 1 failed: its process died", PeerFailed);
    });
    CHECK(processes.wait() + processes.wait() == SIGKILL);
}

TEST_CASE("the thread that attaches may be another one than that which leaves") {
    std::string const job = fresh_job();
    Processes processes;
    for (int rank = 0; rank < 2; ++rank) {
        processes.start([&] {
            std::atomic<bool> is_over{false};
            std::atomic<bool> is_attached{false};
            std::unique_ptr<ProcessCommunicator> comm;
            std::thread attaches{[&] {
                comm.reset(new ProcessCommunicator{attach(rank, 2, job)});
                is_attached = true;
                while (!is_over) {
                    std::this_thread::yield();
                }
            }};
            wait_until(is_attached, true);
            comm->barrier();
            std::this_thread::sleep_for(60ms); // the others look for deaths meanwhile
            comm->barrier();
            comm.reset();
            is_over = true;
            attaches.join();
        });
    }
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
}

TEST_CASE("threads of one rank that wait in groups of their own look for deaths together") {
    std::string const job = fresh_job();
    Processes processes;
    for (int rank = 0; rank < 2; ++rank) {
        processes.start([&] {
            auto comm = attach(rank, 2, job);
            auto group = comm.split(0, 0);
            auto const wait_in = [rank](ProcessCommunicator& place) {
                for (int i = 0; i < 10; ++i) {
                    if (rank == i % 2) { // so that the other one sleeps
                        std::this_thread::sleep_for(3ms);
                    }
                    place.barrier();
                }
            };
            std::jthread const other{[&] { wait_in(group); }};
            wait_in(comm);
        });
    }
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
}

TEST_CASE("an arena outlives its communicator, and the memory goes with the last of both") {
    std::string const job = fresh_job();
    Processes processes;
    for (int rank = 0; rank < 2; ++rank) {
        processes.start([&] {
            joinable::Arena arena;
            {
                auto comm = attach(rank, 2, job);
                arena = comm.allocate(1000 * sizeof(std::int64_t));
                auto* const values = reinterpret_cast<std::int64_t*>(arena.data());
                std::fill_n(values, 1000, std::int64_t{rank + 1});
                comm.all_reduce({values, 1000, DType::i64}, ReduceOp::sum).wait();
                comm.barrier();
            }
            CHECK(mapped_at() != 0);
            CHECK(reinterpret_cast<std::int64_t const*>(arena.data())[999] == 3);
            arena = {};
            CHECK(mapped_at() == 0);
        });
    }
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
}

TEST_CASE("a rank that never comes is named by all others at the deadline") {
    struct Case {
        Case(int size, int missing) : world{size}, culprit{missing} {}
        int world;
        int culprit;
        std::string job = fresh_job();
        Shared<Fates> fates;
        Processes processes;
    };
    std::deque<Case> cases; // all at the same time: they mostly wait
    auto const start = Clock::now();
    for (int const world : groups_of_processes({2, 3, 8})) {
        for (int const culprit : {0, 1, world - 1}) {
            // Without rank 0 there is no object, and each gives up for itself. Else one does so for
            // all: the last one to come.
            int const last = culprit == world - 1 ? world - 2 : world - 1;
            Case& one = cases.emplace_back(world, culprit);
            for (int rank = 0; rank < world; ++rank) {
                one.processes.start([&] {
                    if (rank == culprit) {
                        return;
                    }
                    bool const is_last = culprit != 0 && rank == last;
                    for (int other = 0; is_last && other < world; ++other) {
                        wait_until([&] {
                            return other == culprit || other == last || has_come(one.job, other);
                        });
                    }
                    bool const gives_up = culprit == 0 || is_last;
                    auto const came = Clock::now();
                    one.fates->count(culprit, [&] { // rank 0 makes the object within this time, too
                        attach(rank, world, one.job, gives_up ? long_deadline : 50s);
                    });
                    CHECK((!gives_up || Clock::now() - came >= long_deadline));
                });
            }
        }
    }
    for (Case& one : cases) {
        CAPTURE(one.world);
        CAPTURE(one.culprit);
        for (int rank = 0; rank < one.world; ++rank) {
            CHECK(one.processes.wait() == 0);
        }
        CHECK(one.fates->timed_out == one.world - 1);
        CHECK(Clock::now() - start < 45s); // not by the deadline of the others
        CHECK(!file_exists(one.job));
    }
}

TEST_CASE("a rank that is killed before all have come is named by those who have") {
    for (int culprit = 0; culprit < 3; ++culprit) {
        std::string const job = fresh_job();
        Shared<Fates> fates;
        Processes processes;
        std::array<pid_t, 3> ids{};
        for (int rank = 0; rank < 3; ++rank) {
            ids[static_cast<std::size_t>(rank)] =
                processes.start([&] { fates->count(culprit, [&] { attach(rank, 4, job, 50s); }); });
        }
        for (int const rank : {0, 1, 2}) { // rank 3 never comes
            wait_until([&] { return has_come(job, rank); });
        }
        kill(ids[static_cast<std::size_t>(culprit)], SIGKILL);
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(processes.wait() == (rank == culprit ? SIGKILL : 0));
        }
        CHECK(fates->peer_failed == 2);
        CHECK(!file_exists(job));
    }
}

TEST_CASE("what a job left that was killed before all had come does not disturb the next one") {
    for (int const size : {2, 4, 100}) { // of the job that was killed
        for (int const first : {0, 1}) { // which rank of the next job comes first
            CAPTURE(size);
            CAPTURE(first);
            std::string const job = fresh_job();
            {
                Processes killed;
                killed.start([&] { attach(0, size, job); });
                wait_until([&] { return file_exists(job); });
            }
            CHECK(file_exists(job));
            Processes processes;
            for (int const rank : {first, 1 - first}) {
                processes.start([&] {
                    auto comm = attach(rank, 2, job);
                    comm.barrier();
                });
                std::this_thread::sleep_for(30ms); // most of the time it comes first, indeed
            }
            CHECK(processes.wait() == 0);
            CHECK(processes.wait() == 0);
            CHECK(!file_exists(job));
        }
    }
}

TEST_CASE("a second job with the same id is refused, and the first one goes on") {
    std::string const job = fresh_job();
    Shared<std::atomic<int>> refused;
    Processes processes;
    processes.start([&] {
        auto comm = attach(0, 3, job);
        comm.barrier();
    });
    wait_until([&] { return has_come(job, 0); });
    pid_t const second = processes.start([&] {
        auto comm = attach(1, 3, job);
        comm.barrier();
    });
    wait_until([&] { return has_come(job, 1); });
    for (int const rank : {0, 1}) {
        processes.start([&] {
            try {
                attach(rank, 3, job);
            } catch (ContractViolation const& error) {
                std::string const text = error.what();
                CHECK(text.find("expected no other rank " + std::to_string(rank)) == 0);
                CHECK(text.find(file_of(job)) != std::string::npos);
                CHECK((rank == 0 || text.find(std::to_string(second)) != std::string::npos));
                ++*refused;
            }
        });
    }
    processes.start([&] {
        CHECK_THROWS_WITH_AS(
            attach(2, 4, job),
            ("expected a group of 4 ranks, but " + file_of(job) +
             " was made for 3; start all ranks of a job with the same world size, and give each "
             "job that runs at the same time another id")
                .c_str(),
            ContractViolation
        );
        ++*refused;
    });
    wait_until(*refused, 3);
    processes.start([&] {
        auto comm = attach(2, 3, job);
        comm.barrier();
    });
    for (int process = 0; process < 6; ++process) {
        CHECK(processes.wait() == 0);
    }
    CHECK(!file_exists(job));
}

TEST_CASE("a rank is one of the world") {
    for (auto const& [rank, size] : {std::pair{-1, 2}, {2, 2}, {0, 0}, {0, -1}, {9000, 9001}}) {
        CHECK_THROWS_WITH_AS(
            attach(rank, size, fresh_job(), 1ms),
            doctest::Contains(
                "expected a rank from 0 to below the world size, which is at most 8192, but"
            ),
            ContractViolation
        );
    }
}

/// A file of the name of `job`'s object that no joinable program has made like that.
class Planted {
public:
    explicit Planted(
        std::string const& job, Heading const& heading, off_t bytes, std::string const& suffix = ""
    )
        : path_{file_of(job) + suffix},
          file_{open(path_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR)} {
        REQUIRE(file_ >= 0);
        REQUIRE(fchmod(file_, S_IRUSR | S_IWUSR) == 0);
        REQUIRE(write(file_, &heading, sizeof heading) == sizeof heading);
        REQUIRE(ftruncate(file_, bytes) == 0);
    }
    ~Planted() {
        close(file_);
        unlink(path_.c_str());
    }
    Planted(Planted const&) = delete;
    Planted& operator=(Planted const&) = delete;

    [[nodiscard]] int file() const { return file_; }

    /// That ranks say `expected` and `given` of it, and leave it where it is.
    template <class Error = CommunicationError>
    void check_refused(std::string const& job, std::string const& expected) const {
        for (int const rank : {0, 1}) {
            std::string text;
            try {
                attach(rank, 2, job, 20s);
            } catch (Error const& error) {
                text = error.what();
            }
            CHECK(text == expected);
            CHECK(file_exists(job));
        }
    }

private:
    std::string path_;
    int file_;
};

Heading good_heading() {
    Heading heading;
    heading.size = 2;
    heading.room = std::uint64_t{1} << 24U;
    return heading;
}

std::string refusal(std::string const& job, std::string const& expected, std::string const& given) {
    return "expected " + file_of(job) + " to have " + expected + ", but it has " + given +
           "; remove it, or give the job another id";
}

TEST_CASE("an object that is truncated, damaged or of another version is refused, and named") {
    std::string const job = fresh_job();
    auto const refuses = [&](Heading const& heading,
                             off_t bytes,
                             std::string const& expected,
                             std::string const& given) {
        Planted const planted{job, heading, bytes};
        planted.check_refused(job, refusal(job, expected, given));
    };
    refuses({}, 0, "at least " + std::to_string(sizeof(Heading)) + " bytes", "0 bytes");
    refuses({}, 7, "at least " + std::to_string(sizeof(Heading)) + " bytes", "7 bytes");
    Heading heading = good_heading();
    // Two rooms of 16 MiB, and the tables before them.
    std::string text;
    {
        Planted const planted{job, heading, 40'000'000};
        try {
            attach(1, 2, job, 20s);
        } catch (CommunicationError const& error) {
            text = error.what();
        }
    }
    std::size_t const digits = text.find_first_of("0123456789", text.find(" to have "));
    std::string const bytes = text.substr(digits, text.find(' ', digits) - digits);
    CHECK(std::stoul(bytes) > 33'554'432);
    CHECK(std::stoul(bytes) < 34'000'000);
    refuses(heading, 4096, bytes + " bytes", "4096 bytes");
    refuses(
        heading,
        std::stol(bytes) - 1,
        bytes + " bytes",
        std::to_string(std::stol(bytes) - 1) + " bytes"
    );
    heading.room = std::uint64_t{1} << 63U; // times two ranks it is 0
    {
        Planted const planted{job, heading, std::stol(bytes) - 33'554'432};
        CHECK_THROWS_AS(attach(1, 2, job, 20s), CommunicationError);
    }
    for (std::uint64_t const size : {std::uint64_t{0}, std::uint64_t{1} << 32U}) {
        heading = good_heading();
        heading.size = size;
        refuses(
            heading,
            65536,
            "between 1 and " + std::to_string(joinable::detail::max_ranks) + " ranks",
            std::to_string(size)
        );
    }
    heading = good_heading();
    heading.magic += 1;
    refuses(heading, 12345, "what a joinable program writes first", "something else");
    heading = good_heading();
    heading.layout = 77;
    refuses(
        heading,
        12345,
        "layout " + std::to_string(Heading::own_layout) + " of this program",
        "layout 77: build the programs of all ranks with the same version of joinable"
    );
}

TEST_CASE("programs that lay out memory or share work differently have different layouts") {
    namespace tuning = joinable::detail::tuning;
    CHECK(Heading{}.layout == Heading::layout_of(Heading::agreed));
    std::vector<std::uint64_t> numbers(std::begin(Heading::agreed), std::end(Heading::agreed));
    for (std::uint64_t& number : numbers) {
        ++number;
        CHECK(Heading::layout_of(numbers) != Heading::own_layout);
        --number;
    }
    for (std::uint64_t const number :
         {std::uint64_t{joinable::detail::Board::max_in_flight},
          std::uint64_t{tuning::slot_bytes},
          std::uint64_t{tuning::one_chunk_bytes},
          std::uint64_t{tuning::chunks_per_rank},
          std::uint64_t{tuning::largest_chunk_bytes},
          std::uint64_t{tuning::slice_bytes},
          std::uint64_t{tuning::crowded_slice_bytes},
          std::uint64_t{tuning::slices_per_ring},
          std::uint64_t{tuning::spins},
          std::uint64_t{tuning::crowded_spins},
          std::uint64_t{tuning::yields}}) { // of equal ones, each must be there
        auto const found = std::find(numbers.begin(), numbers.end(), number);
        REQUIRE(found != numbers.end());
        numbers.erase(found);
    }
}

TEST_CASE("a process that a rank has forked says nothing for it when it ends") {
    run_named_ranks({1, 2, 3, 4}, [](ProcessCommunicator& comm) {
        auto group = comm.split(0, 0);
        check_helpers_of(group);
        check_helpers_of(comm);
        CHECK(succeeds_in_fork([&] {
            CHECK_THROWS_AS(joinable::ProgressThread{comm}, ContractViolation);
        }));
    });
}

TEST_CASE("a process that a rank has forked waits for no collective of it, and calls nobody late") {
    for (int const size : {2, 3}) {
        Shared<std::atomic<bool>> has_ended;
        run_named_ranks({size}, [&](ProcessCommunicator& comm) {
            float value = 1;
            joinable::Buffer const buffer{&value, 1, DType::f32};
            if (comm.rank() == 0) {
                auto work = comm.all_reduce(buffer, ReduceOp::sum);
                CHECK(succeeds_in_fork([&] {
                    comm.set_deadline(50ms);
                    std::destroy_at(&work);
                }));
                *has_ended = true;
                work.wait();
            } else {
                wait_until([&] { return has_ended->load(); });
                comm.all_reduce(buffer, ReduceOp::sum).wait();
            }
            CHECK(value == static_cast<float>(comm.size()));
        });
    }
}

TEST_CASE("another user who takes a job's names keeps no job from starting") {
    if (geteuid() != 0) {
        MESSAGE("skipped: only root can give a file to another user");
        return;
    }
    for (int const names : {1, 2}) {
        std::string const job = fresh_job();
        std::vector<std::unique_ptr<Planted>> planted;
        for (int i = 0; i < names; ++i) {
            planted.push_back(std::make_unique<Planted>(
                job, good_heading(), 12345, i == 0 ? std::string{} : "." + std::to_string(i + 1)
            ));
            REQUIRE(fchown(planted.back()->file(), 12345, 0) == 0);
        }
        std::string const third = file_of(job) + "." + std::to_string(names + 1);
        Processes processes;
        processes.start([&] { attach(0, 3, job).barrier(); });
        wait_until([&] { return access(third.c_str(), F_OK) == 0; });
        if (names == 2) { // a name before it that is free again
            unlink((file_of(job) + ".2").c_str());
        }
        processes.start([&] { attach(1, 3, job).barrier(); });
        processes.start([&] { // the name of this job is still taken
            CHECK_THROWS_AS(attach(0, 3, job), ContractViolation);
            attach(2, 3, job).barrier();
        });
        for (int process = 0; process < 3; ++process) {
            CHECK(processes.wait() == 0);
        }
        CHECK(access(third.c_str(), F_OK) != 0);
        CHECK(file_exists(job)); // the other user's
    }
}

TEST_CASE("attach returns when the name is free, though another process is late to remove it") {
    std::string const job = fresh_job();
    Shared<std::atomic<int>> returned;
    Processes processes;
    auto const run = [&](int rank) {
        processes.start([&, rank] {
            auto const comm = attach(rank, 2, job);
            CHECK(!file_exists(job));
            ++*returned;
        });
    };
    run(0);
    wait_until([&] { return file_exists(job); });
    int const late = open(
        file_of(job).c_str(), O_RDWR | O_CLOEXEC
    ); // has the lock, as one that removes the name
    REQUIRE(flock(late, LOCK_EX) == 0);
    run(1);
    for (int i = 0; i < 1500 && returned->load() == 0; ++i) { // as long as no rank ends too early
        std::this_thread::sleep_for(1ms);
    }
    CHECK(*returned == 0);
    flock(late, LOCK_UN); // rank 1 has the file, too
    close(late);
    for (int process = 0; process < 2; ++process) {
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("an object of another mode or type is refused, and named") {
    std::string const job = fresh_job();
    {
        Planted const planted{job, good_heading(), 12345};
        REQUIRE(fchmod(planted.file(), 0640) == 0);
        planted.check_refused(job, refusal(job, "mode 600 (octal)", "mode 640"));
    }
    REQUIRE(symlink("/dev/null", file_of(job).c_str()) == 0);
    CHECK_THROWS_AS(attach(1, 2, job, 20s), CommunicationError);
    REQUIRE(unlink(file_of(job).c_str()) == 0);
    REQUIRE(mkfifo(file_of(job).c_str(), 0600) == 0);
    CHECK_THROWS_WITH_AS(
        attach(1, 2, job, 20s),
        refusal(job, "a regular file", "another type").c_str(),
        CommunicationError
    );
    REQUIRE(unlink(file_of(job).c_str()) == 0);
}

TEST_CASE("where /dev/shm is too small for a board nothing is attached, and nothing is left") {
    Processes processes;
    processes.start([] {
        if (!has_own_shared_memory("size=32k")) {
            std::puts("skipped: no rights to mount a small /dev/shm");
            return;
        }
        std::string text;
        std::string const job = fresh_job();
        try {
            attach(0, 2, job, 10s);
        } catch (CommunicationError const& error) {
            text = error.what();
        }
        CHECK(
            text.find("more bytes of shared memory, but /dev/shm is full, with ") !=
            std::string::npos
        );
        CHECK(text.find(" of its 32768 bytes free; make it larger") != std::string::npos);
        CHECK(!file_exists(job));
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE("where /dev/shm is too small for an arena the rank that wants it says so, and all hear it"
) {
    Processes outer;
    outer.start([] {
        if (!has_own_shared_memory("size=8m")) {
            std::puts("skipped: no rights to mount a small /dev/shm");
            return;
        }
        std::string const job = fresh_job();
        Shared<Fates> fates;
        Processes processes;
        for (int rank = 0; rank < 2; ++rank) {
            processes.start([&] {
                auto comm = attach(rank, 2, job);
                fates->count(0, [&] {
                    if (rank == 0) {
                        joinable::Arena const small = comm.allocate(1U << 20U);
                        std::fill_n(small.data(), small.bytes(), std::byte{7});
                        CHECK_THROWS_AS(
                            static_cast<void>(comm.allocate(64U << 20U)), CommunicationError
                        );
                    }
                    comm.barrier();
                });
            });
        }
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
        CHECK(fates->peer_failed == 2);
    });
    CHECK(outer.wait() == 0);
}

TEST_CASE("where /dev/shm becomes full the rank that needs more says so, and the others hear it") {
    Processes outer;
    outer.start([] {
        if (!has_own_shared_memory("size=8m")) {
            std::puts("skipped: no rights to mount a small /dev/shm");
            return;
        }
        std::string const job = fresh_job();
        Shared<Fates> fates;
        Processes processes;
        for (int rank = 0; rank < 3; ++rank) {
            processes.start([&] {
                auto comm = attach(rank, 3, job);
                std::vector<std::int32_t> values(500'000, rank); // 2 MB on each rank
                comm.all_reduce({values.data(), values.size(), DType::i32}, ReduceOp::sum).wait();
                CHECK(values.back() == 3);
                fates->count(1, [&] {
                    if (rank == 1) { // 12 MB, where 8 MiB are all that there is
                        values.assign(3'000'000, 5);
                        std::string text;
                        try {
                            std::vector<std::int32_t> part(1'000'000);
                            auto const work = comm.scatter(
                                {values.data(), values.size(), DType::i32},
                                {part.data(), part.size(), DType::i32},
                                1
                            );
                        } catch (CommunicationError const& error) {
                            text = error.what();
                        }
                        CHECK(text.find("/dev/shm is full") != std::string::npos);
                        CHECK(values == std::vector<std::int32_t>(3'000'000, 5));
                    }
                    comm.barrier(); // throws the reason on all of them
                });
            });
        }
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(processes.wait() == 0);
        }
        CHECK(fates->peer_failed == 3);
    });
    CHECK(outer.wait() == 0);
}

/// The bytes of memory that a job's object has, once rank 0 has made it.
std::size_t memory_of(std::string const& job) {
    using namespace joinable::detail;
    wait_until([&] { return has_come(job, 0); });
    auto const object = SharedObject::find(file_of(job));
    REQUIRE(object);
    Mapping const memory{*object, MemberTable::bytes_for(1)};
    auto& table = *std::launder(reinterpret_cast<MemberTable*>(memory.begin()));
    wait_until([&] { return table.state.load() != MemberTable::starting; });
    return static_cast<std::size_t>(object->status().st_blocks) * 512;
}

TEST_CASE("a job has memory for what its ranks use: at the start some KiB for each") {
    std::vector<int> const worlds{2, 3, 4, 8, 64, 256};
    std::vector<std::string> jobs;
    Processes processes; // which wait at the same time
    for (int const world : worlds) {
        jobs.push_back(fresh_job());
        processes.start([&] { attach(0, world, jobs.back(), 300s); }); // ends with `processes`
    }
    for (std::size_t k = 0; k < worlds.size(); ++k) {
        int const world = worlds[k];
        std::size_t const bytes = memory_of(jobs[k]);
        CAPTURE(world);
        CHECK(bytes <= (std::size_t{128} << 10U) + static_cast<std::size_t>(world) * 24'000);
        CHECK(bytes <= std::size_t{8} << 20U);
        MESSAGE(world << " ranks: " << bytes << " bytes");
    }
    for (std::string const& job : jobs) {
        unlink(file_of(job).c_str());
    }
}

/// The bytes in use in /dev/shm.
std::size_t memory_in_use() {
    struct statvfs now{};
    REQUIRE(statvfs("/dev/shm", &now) == 0);
    return static_cast<std::size_t>(now.f_blocks - now.f_bfree) * now.f_frsize;
}

TEST_CASE("a group that ranks split off has memory for what they use, and leaves it to the next") {
    Processes outer;
    outer.start([] {
        if (!has_own_shared_memory("size=1g")) {
            std::puts("skipped: no rights to mount a /dev/shm");
            return;
        }
        constexpr int world = 64;
        rlimit const small{rlim_t{1} << 33U, rlim_t{1} << 33U}; // each rank maps it, in one process
        REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
        std::string const job = fresh_job();
        std::vector<std::jthread> ranks;
        for (int rank = 0; rank < world; ++rank) {
            ranks.emplace_back([&, rank] {
                auto comm = attach(rank, world, job);
                std::size_t with_one = 0;
                for (int i = 0; i < 3; ++i) {
                    comm.barrier();
                    std::size_t const before = rank == 0 ? memory_in_use() : 0;
                    comm.barrier();
                    auto group = comm.split(0, world - rank); // in reverse order
                    group.barrier();
                    if (rank == 0 && i == 0) {
                        std::size_t const more = memory_in_use() - before;
                        CHECK(more < 40'000 + std::size_t{world} * 14'000);
                        MESSAGE("a group of " << world << " ranks: " << more << " bytes");
                    }
                    group.barrier();
                    std::vector<std::int32_t> values(100, group.rank()); // in a slot
                    group.all_reduce({values.data(), 100, DType::i32}, ReduceOp::max).wait();
                    CHECK(values.back() == world - 1);
                    std::vector<std::size_t> const counts(world, 1);
                    std::vector<std::int32_t> all(world);
                    group
                        .all_gather(
                            {values.data(), 1, DType::i32}, {all.data(), world, DType::i32}, counts
                        )
                        .wait();
                    CHECK(std::count(all.begin(), all.end(), world - 1) == world);
                    int const peer = group.rank() ^ 1; // its message needs a mailbox, empty
                    std::int32_t word = 0;
                    auto sent = group.send({&rank, 1, DType::i32}, peer);
                    group.receive({&word, 1, DType::i32}, peer).wait();
                    sent.wait();
                    CHECK(word == world - 1 - peer); // its rank in the outer group
                    group.barrier();
                    std::size_t const now = rank == 0 ? memory_in_use() : 0;
                    with_one = i == 0 ? now : with_one;
                    CHECK(
                        now <= with_one + 100'000
                    ); // the memory of the group before is used again
                }
            });
        }
        ranks.clear();
    });
    CHECK(outer.wait() == 0);
}

TEST_CASE("a group in memory that a message has used begins with empty mailboxes") {
    auto const body = [](ProcessCommunicator& comm) {
        comm.set_deadline(30s);
        int const last = comm.size() - 1;
        std::vector<std::uint8_t> bytes(5'000'000, 0xff); // more than the group has
        auto const send = [&] { return comm.send({bytes.data(), bytes.size(), DType::u8}, last); };
        auto sent = comm.rank() == 0 ? std::optional{send()} : std::nullopt;
        comm.barrier(); // so rank 0 has copied it to its memory
        if (comm.rank() == last) {
            comm.receive({bytes.data(), bytes.size(), DType::u8}, 0).wait();
        } else if (sent) {
            sent->wait();
        }
        auto group = comm.split(0, comm.rank());
        for (int apart = 0; apart < group.size(); ++apart) { // every mailbox
            int const to = (group.rank() + apart) % group.size();
            std::int32_t word = -1;
            auto mine = group.send({&to, 1, DType::i32}, to);
            group
                .receive(
                    {&word, 1, DType::i32}, (group.rank() + group.size() - apart) % group.size()
                )
                .wait();
            mine.wait();
            CHECK(word == group.rank());
        }
    };
    run_process_ranks({2, 16}, body);
    run_named_ranks({2, 16}, body);
}

/// Takes all memory that is left in /dev/shm.
void fill_shared_memory() {
    int const file = open("/dev/shm/rest", O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    REQUIRE(file >= 0);
    for (off_t at = 0; posix_fallocate(file, at, 4096) == 0; at += 4096) {
    }
    close(file);
}

TEST_CASE("where /dev/shm is full, what needs memory for the first time is an error, not a signal"
) {
    for (int const kind : {0, 1, 2}) {
        Processes outer;
        outer.start([&] {
            if (!has_own_shared_memory("size=8m")) {
                std::puts("skipped: no rights to mount a small /dev/shm");
                return;
            }
            constexpr int world = 32; // of whose mailboxes some share no page with anything else
            rlimit const small{
                rlim_t{1} << 32U, rlim_t{1} << 32U
            }; // each rank maps it, in one process
            REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
            std::string const job = fresh_job();
            std::atomic<int> failed{0};
            std::vector<std::jthread> ranks;
            for (int rank = 0; rank < world; ++rank) {
                ranks.emplace_back([&, rank] {
                    auto comm = attach(rank, world, job);
                    joinable::Arena const in = comm.allocate(1000);
                    joinable::Arena const out = comm.allocate(1000 * world);
                    std::vector<std::size_t> const counts(world, 250);
                    joinable::Buffer const buffer{in.data(), 250, DType::i32};
                    joinable::Buffer const all{out.data(), 250 * world, DType::i32};
                    comm.barrier();
                    if (rank == 0) {
                        fill_shared_memory();
                    }
                    comm.barrier();
                    try {
                        for (int i = 0; i < 64; ++i) {
                            if (kind == 0) {
                                comm.all_reduce(buffer, ReduceOp::sum).wait();
                            } else if (kind == 1) {
                                comm.all_gather(joinable::ConstBuffer{buffer}, all, counts).wait();
                            } else if (rank == world / 2 || rank == world / 2 - 1) {
                                int const other = world - 1 - rank;
                                std::int32_t word = 0;
                                auto sent = comm.send({&rank, 1, DType::i32}, other);
                                comm.receive({&word, 1, DType::i32}, other).wait();
                                sent.wait();
                            }
                        }
                        comm.barrier();
                    } catch (CommunicationError const& error) {
                        std::string const text = error.what();
                        failed += text.find("/dev/shm is full") != std::string::npos ? 1 : 100;
                    } catch (PeerFailed const&) { // because of that
                        ++failed;
                    }
                });
            }
            ranks.clear();
            CHECK(failed == world);
        });
        CHECK(outer.wait() == 0);
    }
}

TEST_CASE("a rank 0 that has no memory for its ranks tells them at once") {
    Processes outer;
    outer.start([] {
        if (!has_own_shared_memory("size=64k")) {
            std::puts("skipped: no rights to mount a small /dev/shm");
            return;
        }
        std::string const job = fresh_job();
        Shared<std::atomic<int>> begun;
        Shared<std::atomic<int>> heard;
        Processes processes;
        auto const start = Clock::now();
        for (int const rank : {1, 2}) {
            processes.start([&] {
                ++*begun;
                try {
                    attach(rank, 3, job);
                } catch (PeerFailed const& error) {
                    std::string const text = error.what();
                    CHECK(error.ranks() == std::vector{0});
                    CHECK(text.find("rank 0 failed: expected ") == 0);
                    CHECK(text.find("/dev/shm is full") != std::string::npos);
                    ++*heard;
                }
            });
        }
        processes.start([&] {
            wait_until(*begun, 2); // rank 0 tells it for 2 s
            CHECK_THROWS_AS(attach(0, 3, job), CommunicationError);
        });
        for (int rank = 0; rank < 3; ++rank) {
            CHECK(processes.wait() == 0);
        }
        CHECK(*heard == 2);
        CHECK(Clock::now() - start < 20s); // of a deadline of 50
        CHECK(!file_exists(job));
    });
    CHECK(outer.wait() == 0);
}

TEST_CASE("a deadline covers the memory that rank 0 reserves, and signals do not keep it from that"
) {
    std::string const job = fresh_job();
    auto const text_of_attach = [&](std::chrono::nanoseconds deadline) {
        try {
            attach(0, 256, job, deadline);
        } catch (TimedOut const& error) {
            return std::string{error.what()};
        }
        return std::string{};
    };
    CHECK(
        text_of_attach(0ns) == "rank 0 did not reserve memory in " + file_of(job) + " within 0 s"
    );
    CHECK(!file_exists(job));
    Processes processes; // a timer that is faster than the system clears what is reserved
    processes.start([&] {
        struct sigaction action{};
        action.sa_handler = [](int) {}; // without SA_RESTART
        sigaction(SIGUSR1, &action, nullptr);
        auto comm = attach(0, 1, job);
        pthread_t const reserves = pthread_self();
        std::atomic<bool> is_over{false};
        std::jthread const timer{[&] {
            while (!is_over) {
                pthread_kill(reserves, SIGUSR1);
                std::this_thread::yield();
            }
        }};
        constexpr std::size_t bytes = std::size_t{32} << 20U;
        joinable::Arena const arena = comm.allocate(bytes);
        is_over = true;
        CHECK(arena.bytes() == bytes);
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE("a rank that is killed while it registers is seen to have died as soon as it is seen") {
    using joinable::detail::Member;
    Shared<Member> member;
    std::fflush(nullptr);
    pid_t const child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
            _exit(1);
        }
        std::raise(SIGSTOP);
        static_cast<void>(member->enter());
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    if (!WIFSTOPPED(status)) {
        MESSAGE("skipped: processes may not trace their children here");
        return;
    }
    while (member->process() == 0) { // one instruction after the other
        REQUIRE(ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0);
        REQUIRE(waitpid(child, &status, 0) == child);
        REQUIRE(WIFSTOPPED(status));
    }
    CHECK(!member->has_died());
    kill(child, SIGKILL);
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(member->has_died());
}

} // namespace
