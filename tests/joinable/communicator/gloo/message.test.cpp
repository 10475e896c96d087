// SPDX-License-Identifier: BSL-1.0
// Messages between two ranks over Gloo: order, tags, asynchrony, what is made of them, and how they fail.
#include <joinable/gloo.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <support/gloo_ranks.hpp>
#include <support/keep_alive.hpp>
#include <support/messages.hpp>
#include <support/shared.hpp>
#include <support/wait_until.hpp>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::DType;
using joinable::GlooCommunicator;
using joinable::GlooWork;
using joinable::ReduceOp;

static_assert(joinable::SendsAndReceives<GlooCommunicator>);

TEST_CASE("a ring over Gloo passes every size and dtype on") {
    run_gloo_ranks({1, 2, 3, 4, 8}, [](GlooCommunicator& comm) {
        pass_messages_around(comm); // a rank that is ready leaves, while others still receive
    });
}

TEST_CASE("messages of one tag keep their order over Gloo, tags are independent") {
    run_gloo_ranks({1, 2, 3, 4}, [](GlooCommunicator& comm) {
        exchange_messages_in_two_tags(comm, 40);
    });
}

TEST_CASE("messages over Gloo pass collectives that wait for another rank") {
    run_gloo_ranks({2, 4}, [](GlooCommunicator& comm) {
        for (int round = 0; round < 20; ++round) {
            float mine = static_cast<float>(comm.rank());
            float theirs = -1;
            int const peer = comm.rank() ^ 1;
            std::vector<float> sum(round % 2 == 0 ? 1 : 50'000, 1.0F);
            auto receiving = comm.receive({&theirs, 1, DType::f32}, peer, round);
            if (comm.rank() == 0) { // posts the collective only when it has the message
                comm.send({&mine, 1, DType::f32}, peer, round).wait();
                receiving.wait();
                joinable::all_reduce(comm, sum).wait();
            } else {
                auto reducing = joinable::all_reduce(comm, sum);
                auto sending = comm.send({&mine, 1, DType::f32}, peer, round);
                while (!receiving.test()) {
                    std::this_thread::yield();
                }
                sending.wait();
                reducing.wait();
            }
            REQUIRE(theirs == static_cast<float>(peer));
            REQUIRE(sum.back() == static_cast<float>(comm.size()));
        }
    });
}

TEST_CASE("all-reduces are made of messages over Gloo, by every algorithm") {
    run_gloo_ranks({1, 2, 3, 4}, [](GlooCommunicator& comm) {
        for (joinable::AllReducePlan const& plan : all_plans(comm.size(), 4096)) {
            joinable::MessageCommunicator over{comm, {.plan = plan, .check = true}};
            std::vector<double> values(3'000, comm.rank() + 1);
            over.all_reduce({values.data(), values.size(), DType::f64}, ReduceOp::sum).wait();
            CHECK(values == std::vector<double>(3'000, comm.size() * (comm.size() + 1) / 2));
        }
        comm.barrier();
    });
}

TEST_CASE("sides that say different things over Gloo are a Mismatch on all, and no data moves") {
    for (bool const is_early : {false, true}) { // the message comes before its receive is posted
        run_gloo_ranks({2, 3}, [&](GlooCommunicator& comm) {
            std::vector<float> values(5, static_cast<float>(comm.rank()));
            float other = 0;
            try {
                if (comm.rank() == 0) {
                    auto const early = comm.send({values.data(), 5, DType::f32}, 1, 4);
                    if (is_early) {
                        comm.send({&other, 1, DType::f32}, 1, 1).wait();
                    }
                    comm.barrier();
                } else if (comm.rank() == 1) {
                    if (is_early) { // that of tag 4 is kept
                        comm.receive({&other, 1, DType::f32}, 0, 1).wait();
                    }
                    comm.receive({values.data(), 4, DType::f32}, 0, 4).wait();
                } else {
                    comm.barrier(); // hears of it as well
                }
                FAIL_CHECK("no exception");
            } catch (joinable::Mismatch const& error) {
                CHECK(error.ranks() == std::vector{0, 1});
                CHECK(
                    std::string{error.what()} ==
                    "messages between rank 1 and rank 0: a receive of 4 f32 with tag 4 meets a "
                    "send of 5 f32 with tag 4"
                );
            }
            CHECK(values == std::vector<float>(5, static_cast<float>(comm.rank())));
        });
    }
    run_gloo_ranks({1, 2}, [](GlooCommunicator& comm) { // to itself
        if (comm.rank() == 0) {
            std::vector<float> values(2);
            auto const sending = comm.send({values.data(), 2, DType::f32}, 0);
            CHECK_THROWS_AS(
                comm.receive({values.data(), 1, DType::f64}, 0).wait(), joinable::Mismatch
            );
        } else {
            CHECK_THROWS_AS(comm.barrier(), joinable::Mismatch);
        }
    });
}

TEST_CASE("a message over Gloo that nobody takes, or sends, times out and names who should have") {
    for (bool const is_send : {true, false}) {
        for (bool const is_tested : {true, false}) {
            std::atomic<bool> is_over{false};
            run_gloo_ranks({2}, [&](GlooCommunicator& comm) {
                float value = 1;
                joinable::Buffer const buffer{&value, 1, DType::f32};
                if (comm.rank() == 1) {
                    wait_until([&] { return is_over.load(); });
                    CHECK_THROWS_AS(comm.receive(buffer, 0, 3).wait(), joinable::TimedOut);
                    return;
                }
                comm.set_deadline(50ms);
                auto work = is_send ? comm.send(buffer, 1, 3) : comm.receive(buffer, 1, 3);
                try {
                    while (is_tested && !work.test()) {
                    }
                    work.wait();
                    FAIL_CHECK("no exception");
                } catch (joinable::TimedOut const& error) {
                    CHECK(error.missing() == std::vector{1});
                    std::string text =
                        "rank 1 did not arrive within 0.05 s, while rank 0 waits in a ";
                    text += is_send ? "send of 1 f32 with tag 3 to rank 1"
                                    : "receive of 1 f32 with tag 3 from rank 1";
                    CHECK(error.what() == text);
                }
                is_over = true;
            });
            is_over = false;
        }
    }
}

TEST_CASE("a rank over Gloo that keeps itself alive is waited for in messages") {
    run_gloo_ranks({2}, [](GlooCommunicator& comm) {
        comm.set_deadline(long_deadline);
        int value = comm.rank();
        if (comm.rank() == 0) {
            stay_away_alive(comm);
            comm.send({&value, 1, DType::i32}, 1).wait();
        } else {
            comm.receive({&value, 1, DType::i32}, 0).wait();
            CHECK(value == 0);
        }
    });
}

TEST_CASE("an abort, an exception, and a rank that leaves end messages over Gloo, and name it") {
    run_gloo_ranks({2, 4}, [](GlooCommunicator& comm) {
        std::vector<float> values(1000, 2.0F);
        auto work = comm.receive({values.data(), values.size(), DType::f32}, comm.rank() ^ 1);
        if (comm.rank() == 0) {
            comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
        }
        CHECK_THROWS_WITH_AS(work.wait(), "rank 0 gives up", joinable::PeerFailed);
        CHECK(values == std::vector<float>(1000, 2.0F));
    });
    std::atomic<int> named{0};
    auto const body = [&](GlooCommunicator& comm) {
        float value = 0;
        if (comm.rank() == 1) {
            auto const work = comm.receive({&value, 1, DType::f32}, 0, 5);
            throw std::out_of_range{"here"};
        }
        try {
            comm.receive({&value, 1, DType::f32}, 1).wait();
        } catch (joinable::PeerFailed const& error) {
            named = error.rank();
            CHECK(std::string{error.what()} == "rank 1 failed: an exception left a message");
            throw;
        }
    };
    CHECK_THROWS_AS(run_gloo_ranks({2}, body), std::out_of_range);
    CHECK(named == 1);
    run_gloo_ranks({2, 3}, [](GlooCommunicator& comm) {
        comm.barrier();
        if (comm.rank() == 0) {
            float value = 0;
            CHECK_THROWS_WITH_AS(
                comm.receive({&value, 1, DType::f32}, comm.size() - 1).wait(),
                ("rank " + std::to_string(comm.size() - 1) +
                 " left while rank 0 waits for it in a receive of 1 f32 with tag 0 from rank " +
                 std::to_string(comm.size() - 1))
                    .c_str(),
                joinable::PeerFailed
            );
        } else if (comm.rank() == 1 && comm.size() == 3) { // the last one leaves first
            wait_until([&] { return comm.is_aborted(); });
        }
    });
}

TEST_CASE("a process over Gloo that is killed in the middle of a message is PeerFailed on the other"
) {
    for (bool const is_sender : {true, false}) {
        auto const ends = run_gloo_processes(2, [&](GlooCommunicator& comm) {
            std::vector<float> large(20'000'000, 1);
            joinable::Buffer const buffer{large.data(), large.size(), DType::f32};
            float token = 0;
            bool const sends = (comm.rank() == 1) == is_sender;
            if (comm.rank() == 1) { // has its part of one message only
                comm.receive({&token, 1, DType::f32}, 0, 1).wait();
                auto const work = sends ? comm.send(buffer, 0) : comm.receive(buffer, 0);
                std::raise(SIGKILL);
            }
            comm.send({&token, 1, DType::f32}, 1, 1).wait();
            std::vector<GlooWork> works;
            for (int i = 0; i < 2; ++i) {
                works.push_back(sends ? comm.send(buffer, 1) : comm.receive(buffer, 1));
            }
            try {
                for (GlooWork& work : works) {
                    work.wait();
                }
                FAIL_CHECK("no exception");
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.ranks() == std::vector{1});
            }
        });
        CHECK(ends == std::vector{0, SIGKILL});
    }
}

TEST_CASE("a message over Gloo to nobody, or without memory, is refused") {
    run_gloo_ranks({1, 2}, [](GlooCommunicator& comm) {
        float value = 0;
        using joinable::ContractViolation;
        CHECK_THROWS_AS((void)comm.send({&value, 1, DType::f32}, comm.size()), ContractViolation);
        CHECK_THROWS_AS((void)comm.send({nullptr, 1, DType::f32}, 0), ContractViolation);
        CHECK_THROWS_WITH_AS(
            (void)comm.receive({&value, 1, DType::f32}, -1),
            ("source -1 is no rank of a communicator of " + std::to_string(comm.size()) + " ranks")
                .c_str(),
            ContractViolation
        );
        comm.barrier();
    });
}

} // namespace
