// SPDX-License-Identifier: BSL-1.0
// A process that is stopped within an abort, in any of its steps, holds up nobody for long.
#include <joinable/communicator/shared_memory/process.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/named_ranks.hpp>
#include <support/shared.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::AbortReason;
using joinable::FailureKind;
using joinable::ProcessCommunicator;
using joinable::detail::Board;
using joinable::detail::FirstReason;
using joinable::detail::WaitQueue;
using Clock = std::chrono::steady_clock;

/// The pages where this process stops when it writes to them, once.
std::byte* trap = nullptr;
constexpr std::size_t trap_bytes = 4096;

void stop_at(std::byte* address) {
    auto const place = reinterpret_cast<std::uintptr_t>(address) / trap_bytes * trap_bytes;
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    trap = reinterpret_cast<std::byte*>(place);
    struct sigaction action{};
    action.sa_handler = [](int) {
        ::raise(SIGSTOP);
        ::mprotect(trap, trap_bytes, PROT_READ | PROT_WRITE); // when it goes on
    };
    ::sigaction(SIGSEGV, &action, nullptr);
    REQUIRE(::mprotect(trap, trap_bytes, PROT_READ) == 0);
}
void wait_for_stop(pid_t process) {
    siginfo_t info;
    while (::waitid(P_PID, static_cast<id_t>(process), &info, WSTOPPED | WEXITED | WNOWAIT) != 0) {
    }
}

/// The board of a job of so many ranks, in this process: in the largest mapping of a shared object.
std::byte* board_of_job(int size) {
    std::uint64_t begin = 0;
    std::uint64_t largest = 0;
    std::ifstream maps{"/proc/self/maps"};
    for (std::string line; std::getline(maps, line);) {
        if (line.find(" /dev/shm/") == std::string::npos) {
            continue;
        }
        std::size_t read = 0;
        std::uint64_t const from = std::stoull(line, &read, 16);
        std::string const rest = line.substr(read + 1);
        std::uint64_t const to = std::stoull(rest, &read, 16);
        std::uint64_t const offset = std::stoull(rest.substr(read + 6), nullptr, 16);
        if (to - from > largest) {
            largest = to - from;
            begin = from + joinable::detail::MemberTable::bytes_for(size) - offset;
        }
    }
    REQUIRE(begin != 0);
    return reinterpret_cast<std::byte*>(begin); // NOLINT(performance-no-int-to-ptr)
}

/// What one rank throws, for all to compare.
struct Heard {
    std::array<char, 512> text{};

    void set(char const* what) { std::strncpy(text.data(), what, text.size() - 1); }
    [[nodiscard]] std::string get() const { return text.data(); }
};

/// Rank 1 of three stops at the first write to what `place(board)` says, in its abort. Each of the
/// others does `other(comm)` meanwhile, which must throw in time; then all three throw the same.
template <class Place, class Other>
void stop_in_abort(Place const& place, Other const& other, std::string const& begin) {
    std::string const job = fresh_job();
    Shared<std::atomic<bool>> is_stopped;
    Shared<std::atomic<int>> over;
    Shared<std::array<Heard, 3>> heard;
    Processes processes;
    pid_t stopped = 0;
    for (int rank = 0; rank < 3; ++rank) {
        pid_t const process = processes.start([&] {
            auto comm = ProcessCommunicator::attach({rank, 3, job, 50s});
            comm.barrier();
            Heard& mine = (*heard)[static_cast<std::size_t>(rank)];
            if (rank == 1) {
                stop_at(place(board_of_job(3)));
                // Long, so that its end is on the page after that of the state: with the bits of many ranks.
                std::string const text = "the reason of rank 1" + std::string(4500, '.');
                comm.abort({FailureKind::contract, {1, joinable::detail::max_ranks - 1}, text});
            } else {
                wait_until(*is_stopped, true);
                auto const start = Clock::now();
                other(comm);
                CHECK(Clock::now() - start < 30s);
            }
            CHECK(comm.is_aborted());
            try {
                comm.barrier();
            } catch (std::exception const& error) {
                mine.set(error.what());
            }
            ++*over;
        });
        stopped = rank == 1 ? process : stopped;
    }
    wait_for_stop(stopped);
    *is_stopped = true;
    wait_until([&] { return *over >= 2; });
    ::kill(stopped, SIGCONT);
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
        CHECK((*heard)[static_cast<std::size_t>(rank)].get() == (*heard)[0].get());
    }
    CHECK((*heard)[0].get().starts_with(begin));
}

/// Where a stop is right: each of them on a page that the steps before do not write to.
std::byte* reason_of_group(std::byte* board) {
    return board + joinable::detail::in_cache_lines(Board::bytes_for(3)) + trap_bytes;
}
std::byte* reason_of_board(std::byte* board) {
    return board + trap_bytes;
}
std::byte* last_lines(std::byte* board) { // an abort freezes them after the reason is written
    return board + sizeof(Board) + 2 * Board::max_in_flight * sizeof(joinable::detail::ArrivalLine);
}

TEST_CASE("a rank that is stopped before its reason is written is overtaken by one that aborts") {
    stop_in_abort(
        reason_of_group,
        [](ProcessCommunicator& comm) {
            comm.abort({FailureKind::timed_out, {1}, "a reason of another rank"});
        },
        "a reason of another rank"
    );
}

TEST_CASE("a rank that is stopped before it ends collectives is overtaken by one that aborts") {
    for (auto const& place : {reason_of_board, last_lines}) {
        stop_in_abort(
            place,
            [](ProcessCommunicator& comm) {
                comm.abort({FailureKind::timed_out, {1}, "a reason of another rank"});
            },
            "the reason of rank 1" // which had said why before
        );
    }
}

TEST_CASE("a rank that waits, or asks, beside one that is stopped in its abort goes on") {
    for (auto const& place : {reason_of_group, reason_of_board, last_lines}) {
        std::string const reason =
            place == reason_of_group ? "rank 1 did not " : "the reason of rank 1";
        stop_in_abort(place, [](ProcessCommunicator& comm) { CHECK(comm.is_aborted()); }, reason);
        stop_in_abort(
            place,
            [](ProcessCommunicator& comm) {
                comm.set_deadline(300ms);
                CHECK_THROWS_AS(comm.barrier(), std::exception);
            },
            ""
        );
    }
}

TEST_CASE("writers that are stopped one after another do not keep the others from an end") {
    WaitQueue room{1};
    FirstReason end;
    auto const now = [] { return 0ns; };
    std::atomic<int> closed{0};
    std::atomic<bool> goes_on{false};
    // One that stops as it closes, after it has written: another one closes for it.
    std::jthread const first{[&] {
        end.give({FailureKind::mismatch, {3}, "first"}, 3, [&] {
            ++closed;
            wait_until(goes_on, true);
        });
    }};
    wait_until(closed, 1);
    CHECK_FALSE(end.is_given());
    auto const start = Clock::now();
    end.await_given(room, {FailureKind::timed_out, {}, "second"}, 4, [&] { ++closed; }, now);
    CHECK(Clock::now() - start >= FirstReason::patience);
    CHECK(end.is_given());
    CHECK(closed == 2);
    goes_on = true;
    CHECK(end.reason().message == "first");
}

} // namespace
