// SPDX-License-Identifier: BSL-1.0
// Groups of ranks as communicators of their own, and how failures travel between them.
#include <joinable/communicator/thread.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/ranks.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;

int sum_of_ones(ThreadCommunicator& comm) {
    std::int32_t one = 1;
    comm.all_reduce({&one, 1, DType::i32}, ReduceOp::sum).wait();
    return one;
}

TEST_CASE("ranks of one color form a group, in the order of their keys") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        for (int const colors : {1, 2, 3, 100}) {
            int const color = comm.rank() % colors;
            ThreadCommunicator group = comm.split(color, -comm.rank()); // backwards
            int members = 0;
            int after = 0; // members of a higher rank come first
            for (int rank = color; rank < comm.size(); rank += colors) {
                ++members;
                after += rank > comm.rank() ? 1 : 0;
            }
            CHECK(group.size() == members);
            CHECK(group.rank() == after);
            CHECK(sum_of_ones(group) == members);
            CHECK(sum_of_ones(comm) == comm.size()); // both can be used in turn
            std::int32_t first = comm.rank();
            group.broadcast({&first, 1, DType::i32}, 0).wait();
            CHECK(first >= comm.rank());
            CHECK(first % colors == color);
            ThreadCommunicator same = group.split(0, group.rank()); // a group of a group
            CHECK(same.rank() == group.rank());
            CHECK(sum_of_ones(same) == members);
        }
    });
}

TEST_CASE("equal keys keep the order of the ranks") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        ThreadCommunicator const group = comm.split(5, 0);
        CHECK(group.rank() == comm.rank());
        CHECK(group.size() == comm.size());
    });
}

TEST_CASE("a group inherits the deadline, and a negative color is refused") {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        comm.set_deadline(std::chrono::seconds{17});
        ThreadCommunicator group = comm.split(0, 0);
        CHECK(group.set_deadline(std::chrono::seconds{1}) == std::chrono::seconds{17});
        CHECK_THROWS_AS((void)comm.split(-1, 0), joinable::ContractViolation);
        comm.barrier();
    });
}

TEST_CASE("an abort reaches the groups that were split off, not the other way round") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        ThreadCommunicator group = comm.split(comm.rank() % 2, comm.rank());
        ThreadCommunicator deeper = group.split(0, 0);
        comm.barrier();
        if (comm.rank() == 0) {
            ThreadCommunicator other = comm.split(0, 0);
            comm.barrier();
            comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
            CHECK(other.is_spent());
        } else {
            ThreadCommunicator other = comm.split(0, 0);
            other.abort({joinable::FailureKind::peer_failed, {1}, "only here"});
            CHECK(!comm.is_spent());
            comm.barrier();
            // Nobody else is in `deeper` forever: it ends because of the abort two levels above.
            CHECK_THROWS_WITH_AS(
                [&] {
                    while (true) {
                        deeper.barrier();
                    }
                }(),
                "rank 0 gives up",
                joinable::PeerFailed
            );
        }
        CHECK(deeper.is_spent());
        CHECK(group.is_spent());
        CHECK_THROWS_AS((void)comm.split(0, 0), joinable::PeerFailed);
    });
}

TEST_CASE("groups go on without a rank of the parent that has left") {
    run_ranks({3, 4, 8}, [](ThreadCommunicator& comm) {
        ThreadCommunicator group = comm.split(comm.rank() == 0 ? 0 : 1, comm.rank());
        if (comm.rank() == 0) {
            return;
        }
        while (!comm.is_spent()) { // rank 0 is gone
            std::this_thread::yield();
        }
        CHECK(sum_of_ones(group) == comm.size() - 1);
    });
}

TEST_CASE("who leaves a group while others wait in it is named by its rank there") {
    run_ranks({4}, [](ThreadCommunicator& comm) {
        std::optional<int> named;
        {
            ThreadCommunicator group = comm.split(comm.rank() / 2, comm.rank());
            if (comm.rank() % 2 == 0) {
                try {
                    group.barrier();
                } catch (joinable::PeerFailed const& error) {
                    named = error.rank();
                }
                CHECK(named == 1);
            }
        }
        comm.barrier(); // the parent has no part in it
    });
}

TEST_CASE("an exception inside a group ends as the original one, whoever hears of it first") {
    for (int repeat = 0; repeat < 20; ++repeat) {
        std::atomic<int> failures{0};
        auto const body = [&](ThreadCommunicator& comm) {
            try {
                ThreadCommunicator group = comm.split(comm.rank() / 2, comm.rank());
                if (comm.rank() == 3) {
                    throw std::out_of_range{"no such word"};
                }
                group.barrier();
                comm.barrier();
            } catch (joinable::PeerFailed const&) {
                ++failures;
                throw;
            }
        };
        CHECK_THROWS_WITH_AS(run_ranks({4}, body), "no such word", std::out_of_range);
        CHECK(failures == 3);
    }
}

TEST_CASE("keep_alive extends what others wait, by one deadline from then on") {
    for (int const world : {2, 3, 4, 8}) {
        run_ranks({world}, [](ThreadCommunicator& comm) {
            using namespace std::chrono_literals;
            comm.set_deadline(1500ms); // and a busy machine may stall a thread for a second
            comm.barrier();
            if (comm.rank() == 1) { // stays away for longer, and says so
                for (int i = 0; i < 10; ++i) {
                    std::this_thread::sleep_for(250ms);
                    comm.keep_alive();
                }
            }
            comm.barrier();
            if (comm.rank() == 1) { // once is not for ever
                comm.keep_alive();
                while (!comm.is_spent()) {
                    std::this_thread::sleep_for(1ms);
                }
            }
            try {
                comm.barrier();
                FAIL_CHECK("no exception");
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{1});
            }
        });
    }
}

} // namespace
