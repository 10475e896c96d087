// SPDX-License-Identifier: BSL-1.0
// The board lies in memory that it was given, at whatever address: here at two at once.
#include <joinable/communicator/shared_memory/board/board.hpp>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/board_group.hpp>
#include <support/seen_twice.hpp>

#include <joinable/communicator/shared_memory/engine/endpoint.hpp>

namespace {

using joinable::AbortReason;
using joinable::Buffer;
using joinable::DType;
using joinable::FailureKind;
using joinable::ReduceOp;
using joinable::detail::Board;
using joinable::detail::Collective;
using joinable_tests::BoardGroup;

TEST_CASE("ranks meet at a board that each of them sees at another address") {
    std::size_t const bytes = Board::bytes_for(2);
    joinable_tests::SeenTwice const memory{bytes};
    Board::create(2, {static_cast<std::byte*>(memory.addresses[0]), bytes});
    std::vector<std::string> heard(2);
    auto const run = [&](int rank) {
        BoardGroup const group{*static_cast<Board*>(memory.addresses[static_cast<std::size_t>(rank)]
        )};
        joinable::detail::Endpoint<BoardGroup> endpoint{group, rank};
        for (std::int64_t round = 0; round < 1000; ++round) {
            std::int64_t value = round + rank;
            endpoint.finish(endpoint.post(
                {{Collective::all_reduce, DType::i64, ReduceOp::sum, 0, 1},
                 Buffer{&value, 1, DType::i64},
                 Buffer{&value, 1, DType::i64}}
            ));
            if (value != 2 * round + 1) {
                heard[static_cast<std::size_t>(rank)] += "a wrong sum, ";
            }
        }
        if (rank == 0) {
            group.abort({FailureKind::peer_failed, {1, 0}, "rank 0 gives up"}, rank);
        }
        try {
            endpoint.finish(endpoint.post({}));
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.ranks() == std::vector{0, 1});
            heard[static_cast<std::size_t>(rank)] += error.what();
        }
    };
    {
        std::jthread const other{run, 1};
        run(0);
    }
    CHECK(heard == std::vector<std::string>(2, "rank 0 gives up"));
}

TEST_CASE("a reason with a long text is kept as far as there is room, in whole characters") {
    joinable::detail::StoredReason stored;
    for (std::size_t const n : {0U, 1U, 3999U, 4000U, 4001U, 9000U}) {
        std::string const text(n, 'x');
        stored.store({FailureKind::timed_out, {0, 63, 64, 8191}, text});
        AbortReason const reason = stored.load();
        CHECK(reason.kind == FailureKind::timed_out);
        CHECK(reason.ranks == std::vector{0, 63, 64, 8191});
        CHECK(reason.message == (n <= 4000 ? text : std::string(3997, 'x') + "..."));
    }
    std::string accents(3996, 'x');
    for (int i = 0; i < 10; ++i) {
        accents += "\xc3\xa9"; // é in UTF-8: the text would be cut between its two bytes
    }
    stored.store({FailureKind::mismatch, {}, accents});
    CHECK(stored.load().message == std::string(3996, 'x') + "...");
    CHECK(stored.load().ranks.empty());
}

TEST_CASE("a stored reason keeps its origin, and whether its ranks have left") {
    joinable::detail::StoredReason stored;
    for (bool const has_left : {true, false}) {
        for (int const origin : {9, 0, -1}) {
            stored.store({FailureKind::peer_failed, {1, 9}, "text", origin, has_left});
            AbortReason const reason = stored.load();
            CHECK(reason.ranks == std::vector{1, 9});
            CHECK(reason.origin == origin);
            CHECK(reason.has_left == has_left);
        }
    }
}

TEST_CASE("an exception names no ranks of a larger communicator") {
    for (FailureKind const kind :
         {FailureKind::peer_failed, FailureKind::timed_out, FailureKind::mismatch}) {
        for (int const origin : {-1, 0, 9}) {
            std::vector<int> ranks;
            try {
                joinable::detail::throw_failure({kind, {1, 9}, "text", origin});
            } catch (joinable::PeerFailed const& error) {
                ranks = error.ranks();
            } catch (joinable::TimedOut const& error) {
                ranks = error.ranks();
            } catch (joinable::Mismatch const& error) {
                ranks = error.ranks();
            }
            CHECK(ranks == (origin < 0 ? std::vector{1, 9} : std::vector<int>{}));
        }
    }
}

TEST_CASE("a rank that is killed while it records a death leaves the rest of it to the others") {
    if (sysconf(_SC_PAGESIZE) > 4096) {
        std::puts("skipped: the states of ranks lie on the page before them");
        return;
    }
    std::size_t const bytes = Board::bytes_for(3);
    joinable_tests::SeenTwice const memory{bytes};
    Board& board = Board::create(3, {static_cast<std::byte*>(memory.addresses[0]), bytes});
    constexpr std::uint64_t sequence = 0;
    board.begin_computing(1, joinable::detail::Worker::rank, sequence); // and dies there
    AbortReason const reason{FailureKind::peer_failed, {1}, "its process died"};
    board.abort(reason, 0);
    pid_t const recorder = fork();
    if (recorder == 0) { // it ends where it first writes to what precedes the states of ranks
        std::signal(SIGSEGV, SIG_DFL);
        mprotect(memory.addresses[0], sizeof(Board), PROT_READ);
        board.mark_dead(1, 1, reason, 2);
        _exit(0);
    }
    int status = 0;
    waitpid(recorder, &status, 0);
    CHECK(WIFSIGNALED(status));
    board.mark_dead(1, 1, reason, 0); // as each rank does that finds it
    CHECK(board.is_dead(1));
    CHECK(board.may_be_lost(sequence));
}

} // namespace
