// SPDX-License-Identifier: BSL-1.0
// What is different where ranks are processes: how they die, and what is left of them. Their
// collectives are tested beside those of thread ranks, by the same bodies.
#include <joinable/communicator/shared_memory/process.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/core_dump.hpp>
#include <support/forked.hpp>
#include <support/keep_alive.hpp>
#include <support/process_ranks.hpp>
#include <support/segment_ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/agreement/on_all_ranks.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/device/arena.hpp>

namespace {

using namespace joinable_tests;
using joinable::Buffer;
using joinable::DType;
using joinable::PeerFailed;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using Clock = std::chrono::steady_clock;

static_assert(joinable::models_communicator<ProcessCommunicator>());
static_assert(joinable::AllGathers<ProcessCommunicator>);
static_assert(joinable::ReduceScatters<ProcessCommunicator>);
static_assert(joinable::Reduces<ProcessCommunicator>);
static_assert(joinable::Gathers<ProcessCommunicator>);
static_assert(joinable::Scatters<ProcessCommunicator>);
static_assert(joinable::AllToAlls<ProcessCommunicator>);
static_assert(joinable::Aborts<ProcessCommunicator>);
static_assert(joinable::RenewsDeadline<ProcessCommunicator>);
static_assert(joinable::ReportsMissing<ProcessCommunicator>);
static_assert(joinable::SendsAndReceives<ProcessCommunicator>);
static_assert(joinable::Splits<ProcessCommunicator>);
static_assert(joinable::ScalesScatteredSums<ProcessCommunicator>);

/// How many memory mappings of this process have `text` in their line of /proc/self/maps.
int mappings_with(std::string const& text) {
    std::ifstream maps{"/proc/self/maps"};
    int number = 0;
    for (std::string line; std::getline(maps, line);) {
        number += line.find(text) != std::string::npos ? 1 : 0;
    }
    return number;
}

/// What this process has open, and what memory it has that can be shared.
struct Leftovers {
    std::ptrdiff_t files = std::distance(
        std::filesystem::directory_iterator{"/proc/self/fd"}, std::filesystem::directory_iterator{}
    );
    int segments = mappings_with("/dev/zero (deleted)"); // as Linux calls memory without a name

    friend bool operator==(Leftovers const&, Leftovers const&) = default;
};

void check_nothing_is_left(Leftovers const& before) {
    CHECK(Leftovers{} == before);
    CHECK(waitpid(-1, nullptr, WNOHANG) == -1); // no child, dead or alive
    CHECK(errno == ECHILD);
}

TEST_CASE("a rank that is killed anywhere is named on all others, long before the deadline") {
    Shared<std::atomic<Clock::rep>> killed_at;
    Shared<std::atomic<Clock::rep>> heard_at;
    Shared<std::atomic<int>> named;
    Leftovers const before;
    for (int const world : groups_of_processes({2, 3, 4, 8})) {
        std::vector<Clock::duration> delays;
        for (int point = 0; point < 12; ++point) {
            int const culprit = point % world;
            *named = 0;
            *heard_at = 0;
            std::string text;
            try {
                run_process_ranks({world}, [&](ProcessCommunicator& comm) {
                    int at = 0;
                    try {
                        run_collectives(comm, [&] {
                            if (at++ == point && comm.rank() == culprit) {
                                *killed_at = Clock::now().time_since_epoch().count();
                                std::raise(SIGKILL);
                            }
                        });
                    } catch (PeerFailed const& error) {
                        Clock::rep const now = Clock::now().time_since_epoch().count();
                        Clock::rep latest = *heard_at;
                        while (latest < now && !heard_at->compare_exchange_weak(latest, now)) {
                        }
                        *named += error.rank() == culprit ? 1 : 0;
                        throw;
                    }
                });
            } catch (PeerFailed const& error) {
                text = error.what();
                CHECK(error.rank() == culprit);
            }
            CHECK(
                text ==
                "rank " + std::to_string(culprit) + " failed: its process was killed by signal 9"
            );
            CHECK(*named == world - 1);
            delays.push_back(Clock::duration{*heard_at - *killed_at});
            check_nothing_is_left(before);
        }
        // Mostly milliseconds. This also measures how busy the machine is with other programs.
        std::sort(delays.begin(), delays.end());
        CHECK(delays[delays.size() / 2] < std::chrono::seconds{1});
    }
}

TEST_CASE("a rank that is killed while it computes for all leaves nobody waiting") {
    Shared<std::atomic<int>> ended;
    Leftovers const before;
    for (int attempt = 0; attempt < 40; ++attempt) {
        *ended = 0;
        try {
            run_process_ranks({3}, [&](ProcessCommunicator& comm) {
                std::optional<joinable::ProgressThread> thread; // of every other attempt
                if (attempt % 2 != 0) {
                    thread.emplace(comm);
                }
                bool const is_in_arena = attempt % 4 < 2; // else it moves in slices
                std::size_t const bytes = 8'000'000;
                joinable::Arena const arena =
                    is_in_arena ? joinable::make_arena(comm, bytes) : joinable::Arena{bytes};
                std::span const values{reinterpret_cast<double*>(arena.data()), 1'000'000};
                std::fill(values.begin(), values.end(), 1.0);
                comm.barrier();
                if (comm.rank() == 1) { // at some moment of the collectives below
                    itimerval when{};
                    when.it_value.tv_usec = 200 + 400 * attempt;
                    std::signal(SIGALRM, [](int) { std::raise(SIGKILL); });
                    setitimer(ITIMER_REAL, &when, nullptr);
                }
                try {
                    for (;;) {
                        comm.all_reduce({values.data(), values.size(), DType::f64}, ReduceOp::max)
                            .wait();
                        CHECK(values.back() == 1.0);
                    }
                } catch (PeerFailed const& error) {
                    *ended += error.rank() == 1 ? 1 : 0;
                }
            });
            FAIL_CHECK("no exception");
        } catch (PeerFailed const& error) {
            CHECK(error.rank() == 1);
        }
        CHECK(*ended == 2);
    }
    check_nothing_is_left(before);
}

TEST_CASE("what a rank throws is thrown here with its number and text, and named on the others") {
    Shared<std::atomic<int>> named;
    Leftovers const before;
    for (int const world : groups_of_processes({1, 2, 3, 4, 8})) {
        for (int culprit = 0; culprit < world; ++culprit) {
            *named = 0;
            std::string const text = "rank " + std::to_string(culprit) + " failed: no such word";
            try {
                run_process_ranks({world}, [&](ProcessCommunicator& comm) {
                    comm.barrier();
                    if (comm.rank() == culprit) {
                        throw std::out_of_range{"no such word"};
                    }
                    try {
                        comm.barrier();
                    } catch (PeerFailed const& error) {
                        *named += error.rank() == culprit && error.what() == text ? 1 : 0;
                        throw;
                    }
                });
                FAIL_CHECK("no exception");
            } catch (PeerFailed const& error) {
                CHECK(error.ranks() == std::vector{culprit});
                CHECK(error.what() == text);
            }
            CHECK(*named == world - 1);
            check_nothing_is_left(before);
        }
    }
}

TEST_CASE("a rank that throws what it was told of others does not take the blame") {
    Leftovers const before;
    for (int const world : groups_of_processes({2, 3, 4})) {
        for (int first = 0; first < world; ++first) {
            for (int const last : {first, world - 1}) {
                for (std::string const& text :
                     {std::string{"cannot write"}, std::string(300, 'x')}) {
                    if (world == 2 && first != last) {
                        continue; // one rank is told
                    }
                    try {
                        run_process_ranks({world}, [&](ProcessCommunicator& comm) {
                            bool const fails = comm.rank() == first || comm.rank() == last;
                            joinable::detail::ControlOver<ProcessCommunicator&> control{comm};
                            try {
                                joinable::detail::on_all_ranks(control, [&](auto&) {
                                    if (fails) {
                                        throw joinable::CommunicationError{text};
                                    }
                                });
                            } catch (joinable::CommunicationError const&) {
                                while (fails && !comm.is_aborted()) { // the others end first
                                    std::this_thread::yield();
                                }
                                throw;
                            }
                        });
                        FAIL_CHECK("no exception");
                    } catch (PeerFailed const& error) {
                        CHECK(error.ranks() == std::vector{first});
                        CHECK(error.what() == "rank " + std::to_string(first) + " failed: " + text);
                    }
                    check_nothing_is_left(before);
                }
            }
        }
    }
}

TEST_CASE("a rank has no more files open than the first one, whose siblings came later") {
    run_process_ranks({2, 8}, [](ProcessCommunicator& comm) {
        std::int64_t most = Leftovers{}.files;
        std::int64_t least = most;
        comm.all_reduce({&most, 1, DType::i64}, ReduceOp::max).wait();
        comm.all_reduce({&least, 1, DType::i64}, ReduceOp::min).wait();
        CHECK(most == least);
    });
}

TEST_CASE("a rank that ends its process by itself has failed") {
    CHECK_THROWS_WITH_AS(
        run_process_ranks(
            {2},
            [](ProcessCommunicator& comm) {
                if (comm.rank() == 1) {
                    _exit(0);
                }
                comm.barrier();
            }
        ),
        "rank 1 failed: its process ended with status 0",
        PeerFailed
    );
}

/// Called by ranks that have heard of a failure, before they end: that of the first one is when the
/// others have the longest deadline left that there is among them.
void end_soon(ProcessCommunicator& comm, std::atomic<int>& heard, int ranks) {
    comm.set_deadline(std::chrono::milliseconds{100});
    ++heard;
    wait_until(heard, ranks);
}

TEST_CASE("a rank that is stuck times out, and is killed one deadline after the others failed") {
    auto const start = Clock::now();
    Shared<std::atomic<int>> waiting;
    Shared<std::atomic<int>> heard;
    Shared<std::atomic<int>> timed_out;
    Leftovers const before;
    try {
        run_process_ranks({3}, [&](ProcessCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == 2) {
                comm.set_deadline(std::chrono::milliseconds{100});
                ++*waiting;
                for (;;) {
                    pause();
                }
            }
            std::int32_t value = 0;
            auto work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
            ++*waiting;
            if (comm.rank() == 0) { // gives up, when the stuck one is the only one to miss
                wait_until(*waiting, 3);
                comm.set_deadline(std::chrono::milliseconds{100});
            }
            try {
                work.wait();
            } catch (joinable::TimedOut const& error) {
                *timed_out += error.missing() == std::vector{2} ? 1 : 0;
                end_soon(comm, *heard, 2);
                throw;
            }
        });
        FAIL_CHECK("no exception");
    } catch (PeerFailed const& error) {
        CHECK(error.rank() == 2);
    }
    CHECK(*timed_out == 2);
    CHECK(Clock::now() - start < std::chrono::seconds{30}); // half of the deadline of others
    check_nothing_is_left(before);
}

TEST_CASE("a rank that is killed because others have failed is not the one that failed") {
    Shared<std::atomic<bool>> is_stuck;
    Shared<std::atomic<int>> heard;
    Leftovers const before;
    auto const run = [&] {
        run_process_ranks({3}, [&](ProcessCommunicator& comm) {
            if (comm.rank() == 2) { // it never looks
                comm.set_deadline(std::chrono::milliseconds{100});
                *is_stuck = true;
                for (;;) {
                    pause();
                }
            }
            wait_until(*is_stuck, true); // its deadline counts when the others fail
            std::array<std::int32_t, 2> values{};
            try { // as different counts
                Buffer const mine{values.data(), comm.rank() == 0 ? 2U : 1U, DType::i32};
                (comm.rank() == 0 ? comm.send(mine, 1) : comm.receive(mine, 0)).wait();
            } catch (joinable::Mismatch const&) {
                end_soon(comm, *heard, 2);
                throw;
            }
        });
    };
    std::string text;
    try {
        run();
    } catch (PeerFailed const& error) {
        text = error.what();
        CHECK(error.ranks() == std::vector{0, 1});
    }
    CHECK(text.find("a receive of 1 i32 with tag 0") != std::string::npos);
    check_nothing_is_left(before);
}

TEST_CASE("a rank that says it is alive is waited for") {
    run_process_ranks({2}, [](ProcessCommunicator& comm) {
        comm.barrier();
        comm.set_deadline(long_deadline);
        if (comm.rank() == 1) {
            stay_away_alive(comm);
        }
        comm.barrier();
    });
}

bool is_running(pid_t process) { // its new parent may not have reaped it yet
    std::ifstream file{"/proc/" + std::to_string(process) + "/stat"};
    std::string state;
    std::getline(file, state);
    return !state.empty() && state.find(") Z ") == std::string::npos &&
           state.find(") X ") == std::string::npos;
}

/// Starts ranks in a new group of processes, as a shell does, and ends them by `end(their parent)`.
template <class End>
void check_ranks_end_with_parent(End const& end) {
    Shared<std::array<std::atomic<pid_t>, 4>> ranks;
    pid_t const parent = fork();
    if (parent == 0) {
        setpgid(0, 0);
        std::signal(SIGINT, SIG_DFL); // not the test program's, which reports a crash
        joinable::run_processes(4, [&](ProcessCommunicator& comm) {
            (*ranks)[static_cast<std::size_t>(comm.rank())] = getpid();
            for (;;) {
                pause();
            }
        });
        _exit(0);
    }
    for (auto const& rank : *ranks) {
        while (rank == 0) {
            std::this_thread::yield();
        }
    }
    end(parent);
    CHECK(waitpid(parent, nullptr, 0) == parent);
    auto const limit = Clock::now() + std::chrono::seconds{20};
    for (auto const& rank : *ranks) {
        while (is_running(rank) && Clock::now() < limit) {
            std::this_thread::yield();
        }
        CHECK(!is_running(rank));
    }
}

TEST_CASE("the ranks die with the process that started them") {
    check_ranks_end_with_parent([](pid_t parent) { kill(parent, SIGKILL); });
}

TEST_CASE("Ctrl-C ends the ranks and the process that started them") {
    check_ranks_end_with_parent([](pid_t parent) { kill(-parent, SIGINT); });
}

TEST_CASE("many more ranks than cores make progress") {
    run_process_ranks({64}, [](ProcessCommunicator& comm) {
        for (int round = 0; round < 5; ++round) {
            for (std::size_t const numel : {1U, 500U, 20'000U}) {
                std::vector<float> values(numel, static_cast<float>(comm.rank()));
                comm.all_reduce({values.data(), numel, DType::f32}, ReduceOp::sum).wait();
                CHECK(
                    std::count(values.begin(), values.end(), 63.0F * 32.0F) ==
                    static_cast<std::ptrdiff_t>(numel)
                );
            }
        }
    });
}

TEST_CASE("a rank that is stopped anywhere times out on all others, and is killed") {
    Shared<std::atomic<int>> waiting;
    Shared<std::atomic<int>> heard;
    Shared<std::atomic<int>> named;
    Leftovers const before;
    for (int point = 0; point < 12; point += 2) {
        int const culprit = point / 2 % 3;
        *waiting = *heard = *named = 0;
        try {
            run_process_ranks({3}, [&](ProcessCommunicator& comm) {
                int at = 0;
                try {
                    run_collectives(comm, [&] {
                        if (at == point && comm.rank() == culprit) {
                            comm.set_deadline(std::chrono::milliseconds{100});
                            std::raise(SIGSTOP);
                        }
                        // All that the others post before they wait is posted.
                        if (at == point - point % 4 + 3) {
                            ++*waiting;
                            if (comm.rank() == (culprit + 1) % 3) { // gives up
                                wait_until(*waiting, 2);
                                comm.set_deadline(std::chrono::milliseconds{100});
                            }
                        }
                        ++at;
                    });
                } catch (joinable::TimedOut const& error) {
                    *named += error.missing() == std::vector{culprit} ? 1 : 0;
                    end_soon(comm, *heard, 2);
                    throw;
                }
            });
            FAIL_CHECK("no exception");
        } catch (PeerFailed const& error) {
            CHECK(error.rank() == culprit);
        }
        CHECK(*named == 2);
        check_nothing_is_left(before);
    }
}

TEST_CASE("a rank that is stopped within a collective times out on all others, and is killed") {
    Shared<std::atomic<int>> stopped;
    static std::atomic<int>* has_stopped; // for the signal handler
    static ProcessCommunicator* is_stopped_in;
    has_stopped = &*stopped;
    Shared<std::atomic<int>> named;
    Leftovers const before;
    for (int attempt = 0; attempt < 6; ++attempt) { // at some moment, mostly within its share
        *stopped = *named = 0;
        try {
            run_process_ranks({2}, [&](ProcessCommunicator& comm) {
                std::size_t const bytes = 16'000'000;
                joinable::Arena const arena = joinable::make_arena(comm, bytes);
                Buffer const values{arena.data(), bytes / 2, DType::f16}; // takes long
                comm.barrier();
                if (comm.rank() == 1) {
                    itimerval when{};
                    when.it_value.tv_usec = 2000 + 700 * attempt;
                    is_stopped_in = &comm;
                    std::signal(SIGALRM, [](int) { // only now: until then it may wait for rank 0
                        is_stopped_in->set_deadline(std::chrono::milliseconds{100});
                        *has_stopped = 1;
                        std::raise(SIGSTOP);
                    });
                    setitimer(ITIMER_REAL, &when, nullptr);
                }
                try {
                    for (;;) {
                        auto work = comm.all_reduce(values, ReduceOp::max);
                        while (comm.rank() == 0 && *stopped == 0 && !work.test()) {
                        }
                        if (comm.rank() == 0 && *stopped != 0) { // gives up
                            comm.set_deadline(std::chrono::milliseconds{100});
                        }
                        while (comm.rank() == 0 && attempt % 2 != 0 && !work.test()) {
                        }
                        work.wait();
                    }
                } catch (joinable::TimedOut const& error) {
                    *named += error.missing() == std::vector{1} ? 1 : 0;
                    comm.set_deadline(std::chrono::milliseconds{100});
                    throw;
                }
            });
            FAIL_CHECK("no exception");
        } catch (joinable::Error const&) { // NOLINT(bugprone-empty-catch): of whom is counted
        }
        CHECK(*named == 1);
    }
    check_nothing_is_left(before);
}

TEST_CASE("a check that fails in a rank fails here") {
    CHECK_THROWS_WITH_AS(
        run_process_ranks(
            {2}, [](ProcessCommunicator& comm) { failed_checks += comm.rank() == 1 ? 3 : 0; }
        ),
        "rank 1 failed: 3 checks failed",
        PeerFailed
    );
}

TEST_CASE("the memory that ranks share has no name that could be left behind") {
    SegmentRanks{2}.run([](ProcessCommunicator& comm) { // shares nothing else
        comm.barrier();
        CHECK(mappings_with("/dev/zero (deleted)") == 1);
        CHECK(mappings_with("/dev/shm") == 0);
    });
}

TEST_CASE("the memory that ranks share is left out of a core dump, which would allocate all of it"
) {
    run_process_ranks({1, 3}, [](ProcessCommunicator& comm) {
        comm.barrier();
        SharedMappings const mappings;
        CHECK(mappings.all == 1);
        CHECK(mappings.dumped == 0);
    });
}

TEST_CASE("no rank, no group of processes") {
    CHECK_THROWS_AS(joinable::run_processes(0, [](auto&) {}), joinable::ContractViolation);
    CHECK_THROWS_AS(joinable::run_processes(-3, [](auto&) {}), joinable::ContractViolation);
}

/// A thread that waits until it is destroyed, as those of OpenMP do after a loop. It has begun when this is made: a
/// sanitizer's allocator may be locked while a thread begins, and stays so in a process that is forked then.
class PooledThread {
public:
    PooledThread() { wait_until(has_begun_, true); }
    ~PooledThread() { is_over_ = true; }

private:
    std::atomic<bool> has_begun_{false};
    std::atomic<bool> is_over_{false};
    std::jthread thread_{[this] {
        has_begun_ = true;
        wait_until(is_over_, true);
    }};
};

TEST_CASE(
    "a process with other threads, which ranks do not get, is refused unless it says so" *
    doctest::skip(joinable::detail::has_thread_sanitizer)
) {
    Alarm const at_hang;
    auto const body = [](ProcessCommunicator& comm) { comm.barrier(); };
    {
        PooledThread const one;
        std::string text;
        try {
            joinable::run_processes(2, body);
        } catch (joinable::ContractViolation const& error) {
            text = error.what();
        }
        CHECK(
            text ==
            "run_processes: expected a process with one thread, but it has 2 threads, of which its ranks get "
            "one: a rank that waits for another one (of OpenMP, a BLAS) hangs for ever; call run_processes "
            "before threads start, or give it {.other_threads = true} if the ranks need none"
        );
        PooledThread const two;
        CHECK_THROWS_WITH_AS(
            joinable::run_processes(2, body),
            doctest::Contains("but it has 3 threads, of which"),
            joinable::ContractViolation
        );
        joinable::run_processes(2, body, {.other_threads = true});
    }
    // A thread that was joined may be listed for a moment, as one is that ends soon.
    std::jthread const ends_soon{[] { std::this_thread::sleep_for(std::chrono::milliseconds{20}); }
    };
    CHECK(joinable::detail::count_other_threads(std::chrono::minutes{1}) == 0);
}

TEST_CASE(
    "a rank that had to be killed is said to lack the threads of its process" *
    doctest::skip(joinable::detail::has_thread_sanitizer)
) {
    Alarm const at_hang;
    PooledThread const one;
    Shared<std::atomic<int>> impatient;
    std::string text;
    try {
        joinable::run_processes(
            3,
            [&](ProcessCommunicator& comm) {
                comm.set_deadline(std::chrono::milliseconds{100});
                ++*impatient;
                while (comm.rank() != 0) { // waits for a thread that it does not have
                    pause();
                }
                wait_until(
                    *impatient, 3
                ); // when it fails the others have the longest deadline that is left
                comm.barrier();
            },
            {.other_threads = true}
        );
    } catch (PeerFailed const& error) {
        CHECK(error.ranks() == std::vector{1, 2});
        text = error.what();
    }
    std::string const end =
        "; ranks 1 and 2 had to be killed: this process had 2 threads when it was forked, and a "
        "rank gets one of them; if it waits for another (of OpenMP, a BLAS), call run_processes "
        "before threads start";
    CAPTURE(text);
    CHECK(text.ends_with(end));
}

TEST_CASE("a process that a rank has forked, and that leaves the body, says nothing for the rank") {
    for (bool const throws : {false, true}) {
        for (int const world : {1, 2, 3}) {
            joinable::run_processes(world, [&](ProcessCommunicator& comm) {
                pid_t const helper = ::fork();
                if (helper == 0) {
                    if (throws) {
                        throw std::runtime_error{"the helper's own trouble"};
                    }
                    return;
                }
                int status = 0;
                ::waitpid(helper, &status, 0);
                CHECK(WIFEXITED(status));
                CHECK(WEXITSTATUS(status) == (throws ? 1 : 0));
                comm.barrier();
            });
        }
    }
    CHECK_THROWS_WITH_AS( // the helper has ended well, and the rank has not
        joinable::run_processes(
            1,
            [](ProcessCommunicator&) {
                pid_t const helper = ::fork();
                if (helper != 0) {
                    ::waitpid(helper, nullptr, 0);
                    ::_exit(3);
                }
            }
        ),
        doctest::Contains("its process ended with status 3"),
        PeerFailed
    );
}

TEST_CASE("a process that a rank has forked changes no deadline of that rank") {
    using std::chrono::seconds;
    joinable::detail::ProcessSegment segment{1};
    ProcessCommunicator comm{segment, 0};
    comm.set_deadline(seconds{70});
    CHECK(succeeds_in_fork([&] {
        CHECK(comm.set_deadline(seconds{1}) == seconds{70});
        CHECK(comm.set_deadline(seconds{2}) == seconds{1}); // its copy has one of its own
    }));
    std::chrono::nanoseconds const told{segment.outcome(0).deadline.load()};
    CHECK(told == seconds{70});
    CHECK(comm.set_deadline(seconds{80}) == seconds{70});
}

} // namespace
