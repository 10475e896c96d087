// SPDX-License-Identifier: BSL-1.0
// Messages between two ranks: order, tags, asynchrony, and every way in which they fail. Threads and
// processes by the same bodies; what a killed process leaves behind is in process_message.test.cpp.
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/messages.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::ReduceOp;

TEST_CASE("a ring passes every size and dtype on") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) { pass_messages_around(comm); });
}

TEST_CASE("messages of one tag keep their order, tags are independent") {
    run_all_ranks({2, 3, 4, 8}, [](auto& comm) { exchange_messages_in_two_tags(comm, 300); });
}

TEST_CASE("a message is delivered while its receiver computes, and tested without blocking") {
    Shared<std::atomic<bool>> const is_posted;
    Shared<std::atomic<bool>> const is_sent;
    run_all_ranks({2}, [&](auto& comm) {
        *is_posted = false;
        *is_sent = false;
        comm.barrier();
        double value = comm.rank() == 0 ? 3.5 : 0;
        if (comm.rank() == 0) {
            while (!*is_posted) {
                std::this_thread::yield();
            }
            comm.send({&value, 1, DType::f64}, 1).wait();
            *is_sent = true;
        } else {
            auto work = comm.receive({&value, 1, DType::f64}, 0);
            CHECK(!work.test());
            *is_posted = true;
            while (!*is_sent) { // does nothing for the message
                std::this_thread::yield();
            }
            CHECK(work.test());
            CHECK(work.test());
            CHECK(value == 3.5);
        }
    });
}

TEST_CASE("messages and collectives do not disturb each other") {
    run_all_ranks({2, 4}, [](auto& comm) {
        for (int round = 0; round < 100; ++round) {
            float mine = static_cast<float>(comm.rank());
            float theirs = -1;
            int const peer = comm.rank() ^ 1;
            auto receiving = comm.receive({&theirs, 1, DType::f32}, peer, round);
            std::vector<float> sum(round % 2 == 0 ? 1 : 5000, 1.0F);
            auto reducing = comm.all_reduce({sum.data(), sum.size(), DType::f32}, ReduceOp::sum);
            auto sending = comm.send({&mine, 1, DType::f32}, peer, round);
            reducing.wait();
            receiving.wait();
            sending.wait();
            REQUIRE(theirs == static_cast<float>(peer));
            REQUIRE(sum.back() == static_cast<float>(comm.size()));
        }
    });
}

TEST_CASE("sides that say different things are a Mismatch on both, and no data moves") {
    run_all_ranks({2, 3}, [](auto& comm) {
        std::vector<float> values(5, static_cast<float>(comm.rank()));
        std::string text;
        try {
            if (comm.rank() == 0) {
                comm.send({values.data(), 5, DType::f32}, 1, 4).wait();
            } else if (comm.rank() == 1) {
                comm.receive({values.data(), 4, DType::f32}, 0, 4).wait();
            } else {
                comm.barrier(); // wakes up as well
            }
        } catch (joinable::Mismatch const& error) {
            text = error.what();
        }
        CAPTURE(text);
        CHECK(text.find("a send of 5 f32 with tag 4") != std::string::npos);
        CHECK(text.find("a receive of 4 f32 with tag 4") != std::string::npos);
        CHECK(values == std::vector<float>(5, static_cast<float>(comm.rank())));
    });
}

TEST_CASE("of two pairs whose sides say different things the first is what all ranks hear of") {
    run_all_ranks({4}, [](auto& comm) {
        std::vector<float> values(5);
        auto const send = [&](int to) { comm.send({values.data(), 5, DType::f32}, to).wait(); };
        auto const receive = [&](int from) {
            comm.receive({values.data(), 4, DType::f32}, from).wait();
        };
        auto const take_part = [&] {
            switch (comm.rank()) {
            case 0: return send(1);
            case 1: wait_until([&] { return comm.is_aborted(); }); return receive(0);
            case 2: return send(3);
            default: return receive(2);
            }
        };
        try {
            take_part();
            FAIL_CHECK("no exception");
        } catch (joinable::Mismatch const& error) {
            CHECK(error.ranks() == std::vector{2, 3});
        }
    });
}

TEST_CASE("a message that nobody takes times out, and names who should have") {
    Shared<std::atomic<bool>> const is_over;
    run_all_ranks({2, 4}, [&](auto& comm) {
        *is_over = false;
        comm.barrier();
        float value = 1;
        if (comm.rank() == 0) {
            comm.set_deadline(std::chrono::milliseconds{50});
            auto work = comm.send({&value, 1, DType::f32}, 1, 3);
            for (int twice = 0; twice < 2; ++twice) {
                try {
                    work.wait();
                    FAIL_CHECK("no exception");
                } catch (joinable::TimedOut const& error) {
                    CHECK(error.missing() == std::vector{1});
                    CHECK(
                        std::string{error.what()} ==
                        "rank 1 did not receive within 0.05 s, while rank 0 waits in a send of 1 "
                        "f32 with tag 3"
                    );
                }
            }
            *is_over = true;
        } else {
            while (!*is_over) {
                std::this_thread::yield();
            }
            CHECK_THROWS_AS(
                (void)comm.receive({&value, 1, DType::f32}, 0, 3).wait(), joinable::TimedOut
            );
        }
    });
}

TEST_CASE("a rank that leaves fails the messages that wait for it, and no others") {
    Shared<std::atomic<bool>> const has_left;
    run_all_ranks({3, 4, 8}, [&](auto& comm) {
        *has_left = false;
        comm.barrier();
        int value = comm.rank();
        if (comm.rank() == 2) { // not the first to leave, and not before rank 0 sleeps
            std::this_thread::sleep_for(std::chrono::milliseconds{20});
            return; // its communicator leaves after this
        }
        if (comm.rank() == 0) {
            CHECK_THROWS_AS(comm.receive({&value, 1, DType::i32}, 2).wait(), joinable::PeerFailed);
            *has_left = true;
            comm.send({&value, 1, DType::i32}, 1).wait();
        } else if (comm.rank() == 1) {
            while (!*has_left) {
                std::this_thread::yield();
            }
            comm.receive({&value, 1, DType::i32}, 0).wait();
            CHECK(value == 0);
        }
    });
}

TEST_CASE("an abort wakes ranks that wait for a message, and its memory is free") {
    run_all_ranks({2, 4}, [](auto& comm) {
        std::vector<float> values(1000, 2.0F);
        if (comm.rank() == 0) {
            comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
        }
        CHECK_THROWS_WITH_AS(
            comm.receive({values.data(), values.size(), DType::f32}, comm.rank() ^ 1).wait(),
            "rank 0 gives up",
            joinable::PeerFailed
        );
        CHECK(values == std::vector<float>(1000, 2.0F));
    });
}

TEST_CASE("an exception beside an unfinished message names the rank on the other side") {
    Shared<std::atomic<int>> const named;
    auto const body = [&](auto& comm) {
        float value = 0;
        if (comm.rank() == 1) {
            auto const work = comm.receive({&value, 1, DType::f32}, 0, 5);
            throw std::out_of_range{"no such word"};
        }
        try {
            comm.receive({&value, 1, DType::f32}, 1).wait();
        } catch (joinable::PeerFailed const& error) {
            *named = error.rank();
            throw;
        }
    };
    CHECK_THROWS_AS(run_ranks({2}, body), std::out_of_range);
    CHECK(*named == 1);
    *named = 0;
    CHECK_THROWS_WITH_AS(
        run_process_ranks({2}, body), "rank 1 failed: no such word", joinable::PeerFailed
    );
    CHECK(*named == 1);
}

TEST_CASE("a message to nobody, or without memory, is refused") {
    run_all_ranks({1, 2}, [](auto& comm) {
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
