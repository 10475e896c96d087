// SPDX-License-Identifier: BSL-1.0
// What ranks of MPI tell each other beside the data, when it comes late, in pieces, or not at all.
#include <joinable/communicator/mpi/communicator.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/mpi_ranks.hpp>
#include <support/mpi_wires.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>

#include <joinable/tcp.hpp> // a program may use several transports

namespace {

using namespace joinable_tests;
using joinable::AbortReason;
using joinable::FailureKind;
using joinable::detail::MpiRank;
using joinable::detail::MpiWord;

void wait_in_barrier(MpiRank& rank) {
    rank.finish(rank.post({}));
}
void wait_for_abort(MpiRank& rank) {
    while (!rank.is_aborted()) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
}

TEST_CASE("ranks throw the reason of an abort also where they hear first that a rank has left") {
    run_mpi_groups({3, 4, 8}, [](MPI_Comm group) {
        Wires const wires{group, short_patience};
        int const last = wires.size - 1;
        AbortReason const reason{FailureKind::mismatch, {last}, "rank 0 hears it alone"};
        if (wires.rank == last) {
            wires.tell(0, MpiWord::abort, joinable::detail::packed(reason));
            return;
        }
        auto const rank = wires.make_rank();
        if (wires.rank == 0) {
            wait_for_abort(*rank);
        } else {
            CHECK_THROWS_WITH_AS(
                wait_in_barrier(*rank), "rank 0 hears it alone", joinable::Mismatch
            );
        }
        rank->close(false);
    });
}

TEST_CASE("and where a rank leaves a group because the communicator around that is aborted") {
    run_mpi_groups({3, 4, 8}, [](MPI_Comm group) {
        Wires const wires{group, short_patience};
        int const last = wires.size - 1;
        MPI_Comm inner = MPI_COMM_NULL;
        MPI_Comm_split(group, wires.rank == last ? MPI_UNDEFINED : 0, wires.rank, &inner);
        if (wires.rank == last) { // no rank of the inner group
            AbortReason const reason{FailureKind::peer_failed, {last}, "rank 0 hears it alone"};
            wires.tell(0, MpiWord::abort, joinable::detail::packed(reason));
            return;
        }
        auto const outer = wires.make_rank();
        auto const rank = Wires{inner, short_patience}.make_rank(outer);
        if (wires.rank == 0) {
            wait_for_abort(*outer);
        } else {
            check_thrown<joinable::PeerFailed>(std::vector{last}, "rank 0 hears it alone", [&] {
                wait_in_barrier(*rank);
            });
        }
        rank->close(false);
        outer->close(false);
    });
}

TEST_CASE("the message of an abort keeps the origin of its reason, and whether its ranks have left"
) {
    for (bool const has_left : {false, true}) {
        for (int const origin : {-1, 0, 9}) {
            AbortReason const sent = joinable::detail::sendable(
                {FailureKind::peer_failed, {1, 9, 8191}, std::string(5000, 'x'), origin, has_left},
                4
            );
            auto const body =
                joinable::detail::packed(sent, joinable::detail::MpiAlarm::most_bytes);
            CHECK(body.size() <= joinable::detail::MpiAlarm::most_bytes);
            AbortReason const got = joinable::detail::unpacked_reason(body).value();
            CHECK(got.kind == FailureKind::peer_failed);
            CHECK(got.ranks == (origin < 0 ? std::vector{1} : std::vector{1, 9, 8191}));
            CHECK(got.message == sent.message);
            CHECK(got.origin == origin);
            CHECK(got.has_left == has_left);
        }
    }
}

TEST_CASE("an error of MPI beside the data ends all ranks") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        Wires const wires{group, short_patience};
        if (wires.rank == wires.size - 1) {
            // More than fits, but little enough to be sent at once: with more, Open MPI writes behind the end.
            std::vector<std::byte> const body(joinable::detail::MpiAlarm::most_bytes + 100);
            wires.tell(0, MpiWord::keep_alive, body);
            return;
        }
        auto const rank = wires.make_rank();
        auto const failure =
            thrown_by<joinable::CommunicationError>([&] { wait_in_barrier(*rank); });
        std::string const text = failure.what();
        CHECK(text.substr(0, 24) == "rank 0: MPI_Test failed:");
        CHECK(text.find("runcated") != std::string::npos); // in words of MPI
        CHECK(rank->is_aborted());
        rank->close(false);
    });
}

TEST_CASE("a rank that hears of an abort of any kind in a meeting goes where the others are") {
    for (FailureKind const kind :
         {FailureKind::peer_failed,
          FailureKind::timed_out,
          FailureKind::mismatch,
          FailureKind::communication,
          FailureKind::contract}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            CAPTURE(static_cast<int>(kind));
            Wires const wires{group};
            auto const rank = wires.make_rank();
            if (wires.rank ==
                0) { // comes last, when the others have heard, and blocks in MPI after the meeting
                auto const body = joinable::detail::packed({kind, {0}, "rank 0 does not hear it"});
                for (int to = 1; to < wires.size; ++to) {
                    wires.tell(to, MpiWord::abort, body);
                }
                MPI_Barrier(group);
                auto& meeting = rank->post({});
                rank->finish_meeting(meeting);
                rank->release(meeting);
            } else {
                auto& meeting = rank->post({});
                wait_for_abort(*rank);
                MPI_Barrier(group);
                CHECK_NOTHROW(rank->finish_meeting(meeting));
                rank->release(meeting);
            }
            MPI_Barrier(group); // where MPI blocks
            rank->close(false);
        });
    }
}

TEST_CASE("a rank that sleeps while answers come hears them before it says who is missing") {
    Shared<std::atomic<bool>> has_ended;
    run_mpi_groups({2}, [&](MPI_Comm group) {
        Wires const wires{group};
        *has_ended = false;
        MPI_Barrier(group);
        joinable::detail::MpiPeers peers{wires.alarm, wires.rank, wires.size, short_patience};
        auto const poll = [&] { peers.poll(1, true, [](AbortReason const&) {}); };
        if (wires.rank == 0) {
            joinable::detail::MpiOperation operation; // the first collective
            peers.ask(operation);
            std::this_thread::sleep_for(
                short_patience + std::chrono::milliseconds{300} // the other one needs some
            );
            CHECK(!peers.has_answers(operation));
            while (!peers.has_answers(operation)) {
                poll();
            }
            CHECK(peers.missing(operation).empty());
            *has_ended = true;
        }
        while (!*has_ended) {
            poll();
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
        peers.stop_listening();
    });
}

TEST_CASE("ranks that compute are not flooded by one that says that it is at work") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        Wires const wires{group, short_patience};
        if (wires.rank == 0) {
            auto const rank = wires.make_rank();
            for (int i = 0; i < 10'000; ++i) {
                rank->keep_alive();
            }
            rank->abort({FailureKind::peer_failed, {0}, "the end"});
            rank->close(false);
            return;
        }
        int told = 0;
        for (MPI_Status status{};; ++told) {
            std::vector<std::byte> body(joinable::detail::MpiAlarm::most_bytes);
            int const bytes = static_cast<int>(body.size());
            MPI_Recv(body.data(), bytes, MPI_BYTE, 0, MPI_ANY_TAG, wires.alarm, &status);
            if (status.MPI_TAG == static_cast<int>(MpiWord::abort)) {
                break;
            }
        }
        CHECK(told >= 1);
        CHECK(told <= 20); // one a second, on a machine however slow
    });
}

} // namespace
