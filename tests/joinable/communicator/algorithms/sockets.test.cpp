// SPDX-License-Identifier: BSL-1.0
// The smallest transport, which has messages alone: they, the collectives made of them, and how they fail.
#include <joinable/algorithms.hpp>

#include <cstddef>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/further_types.hpp>
#include <support/keep_alive.hpp>
#include <support/messages.hpp>
#include <support/ranks.hpp>
#include <support/socket_ranks.hpp>
#include <support/tells_reason.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/error.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::MessageCommunicator;
using joinable::ReduceOp;

static_assert(joinable::ExchangesMessages<SocketCommunicator>);
static_assert(joinable::Aborts<MessageCommunicator<SocketCommunicator>>);
static_assert(joinable::TellsReason<MessageCommunicator<SocketCommunicator>>);
static_assert(joinable::RenewsDeadline<MessageCommunicator<SocketCommunicator>>);

TEST_CASE("a ring over sockets passes every size and dtype on") {
    run_socket_ranks({1, 2, 3, 4, 8}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets};
        pass_messages_around(comm);
    });
}

TEST_CASE("booleans, i16, u16 and complex numbers go over sockets, too") {
    run_socket_ranks({1, 2, 3, 4, 8}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets};
        check_further_types(comm);
    });
}

TEST_CASE("messages of one tag keep their order over sockets, tags are independent") {
    run_socket_ranks({1, 2, 3, 4}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets};
        exchange_messages_in_two_tags(comm, 40);
    });
}

TEST_CASE("collectives are made of messages over sockets, of any size") {
    run_socket_ranks({1, 2, 3, 4, 8}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets, {.check = true}};
        for (std::size_t const count : {0U, 1U, 1000U, 300'000U}) {
            std::vector<float> sums(count, static_cast<float>(comm.rank()));
            joinable::all_reduce(comm, sums, ReduceOp::sum).wait();
            auto const sum = static_cast<float>(comm.size() * (comm.size() - 1) / 2);
            CHECK(sums == std::vector<float>(count, sum));
            std::vector<float> all(count, static_cast<float>(comm.rank()));
            joinable::broadcast(comm, all, comm.size() - 1).wait();
            CHECK(all == std::vector<float>(count, static_cast<float>(comm.size() - 1)));
        }
        comm.barrier();
    });
}

/// The exception that ends this rank, as a reason.
template <class F>
[[nodiscard]] std::optional<joinable::AbortReason> reason_of(F const& f) {
    try {
        f();
    } catch (...) {
        return joinable::detail::reason_of(std::current_exception());
    }
    return std::nullopt;
}

TEST_CASE("ranks over sockets that issue different collectives throw the same Mismatch") {
    run_socket_ranks({2, 3}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets, {.check = true}};
        std::vector<float> values(comm.rank() == 1 ? 3 : 2);
        auto const reason =
            reason_of([&] { joinable::all_reduce(comm, values, ReduceOp::sum).wait(); });
        REQUIRE(reason);
        CHECK(reason->kind == joinable::FailureKind::mismatch);
        CHECK(reason->ranks == std::vector{1});
    });
}

TEST_CASE("both sides of messages over sockets that differ throw Mismatch") {
    run_socket_ranks({2}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets};
        std::vector<float> values(comm.rank() == 0 ? 3 : 2);
        auto const reason = reason_of([&] {
            if (comm.rank() == 0) {
                joinable::send(comm, values, 1).wait();
                joinable::receive(comm, values, 1).wait();
            } else {
                joinable::receive(comm, values, 0).wait();
            }
        });
        REQUIRE(reason);
        CHECK(reason->kind == joinable::FailureKind::mismatch);
        CHECK(reason->ranks == std::vector{0, 1});
    });
}

TEST_CASE("an exception on one rank over sockets ends the collectives of all") {
    run_socket_ranks({2, 4}, [](SocketCommunicator& sockets) {
        auto const reason = reason_of([&] {
            MessageCommunicator comm{sockets};
            if (comm.rank() == 1) {
                throw std::runtime_error{"the disk is full"};
            }
            comm.barrier();
        });
        REQUIRE(reason);
        CHECK(reason->kind == joinable::FailureKind::peer_failed);
        if (sockets.rank() != 1) {
            CHECK(reason->ranks == std::vector{1});
            CHECK(sockets.abort_reason().has_value());
        }
    });
}

TEST_CASE("each rank over sockets tells why its communicator was aborted: the first reason") {
    run_socket_ranks({1, 2, 4}, [](SocketCommunicator& sockets) {
        MessageCommunicator comm{sockets};
        check_tells_reason(comm);
    });
}

TEST_CASE("a rank that leaves is named by those that wait for its message") {
    run_socket_ranks({2}, [](SocketCommunicator& comm) {
        if (comm.rank() == 1) {
            float value = 0;
            auto const reason = reason_of([&] { comm.receive({&value, 1, DType::f32}, 0).wait(); });
            REQUIRE(reason);
            CHECK(reason->ranks == std::vector{0});
            CHECK(
                reason->message ==
                "rank 0 left while rank 1 waits for it in a receive of 1 f32 with tag 0"
            );
        }
    });
}

TEST_CASE("a rank over sockets that never comes is named at the deadline, and one at work is not") {
    together({0, 1, 2, 3}, [](int turn) {
        bool const is_at_work = turn % 2 != 0;
        run_socket_ranks({2 + turn / 2}, [&](SocketCommunicator& sockets) {
            MessageCommunicator comm{sockets};
            comm.set_deadline(long_deadline);
            if (comm.rank() != comm.size() - 1) {
                auto const reason = reason_of([&] { comm.barrier(); });
                REQUIRE(reason.has_value() == !is_at_work);
                if (reason) {
                    CHECK(reason->kind == joinable::FailureKind::timed_out);
                    CHECK(reason->ranks == std::vector{comm.size() - 1});
                }
                return;
            }
            if (is_at_work) {
                stay_away_alive(comm);
                comm.barrier();
            } else {
                wait_until([&] { return comm.is_aborted(); });
            }
        });
    });
}

} // namespace
