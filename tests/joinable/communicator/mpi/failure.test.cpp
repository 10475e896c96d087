// SPDX-License-Identifier: BSL-1.0
// What ends ranks of MPI: a throw, a rank that leaves or never comes, and ranks that do different things.
#include <joinable/communicator/mpi/communicator.hpp>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/forked.hpp>
#include <support/keep_alive.hpp>
#include <support/mpi_ranks.hpp>
#include <support/shared.hpp>
#include <support/tells_reason.hpp>
#include <support/thrown_by.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::AbortReason;
using joinable::DType;
using joinable::FailureKind;
using joinable::MpiCommunicator;
using joinable::ReduceOp;
using Clock = std::chrono::steady_clock;

std::size_t kept() {
    return joinable::detail::kept_mpi_ranks().size();
}

/// Whether the process has memory there.
bool is_mapped(std::byte const* place) {
    auto const page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    auto const start = reinterpret_cast<std::uintptr_t>(place) / page * page;
    return ::msync(reinterpret_cast<void*>(start), page, MS_ASYNC) == 0;
}

struct Injected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Three rounds of collectives, some in flight together, with a message around the ring. Calls step()
/// before each.
void run_rounds(MpiCommunicator& comm, std::function<void()> const& step) {
    std::vector<float> small(3, 1);
    std::vector<float> large(50'000, 1);
    std::vector<float> all(3 * static_cast<std::size_t>(comm.size()));
    std::vector<float> got(3);
    for (int round = 0; round < 3; ++round) {
        step();
        auto first = joinable::all_reduce(comm, small);
        step();
        auto second = joinable::all_reduce(comm, large);
        step();
        auto third = joinable::all_gather(comm, std::vector<float>(3, 1), all);
        step();
        second.wait();
        step();
        first.wait();
        third.wait();
        step();
        auto const sent = joinable::send(comm, small, (comm.rank() + 1) % comm.size());
        joinable::receive(comm, got, (comm.rank() + comm.size() - 1) % comm.size()).wait();
        step();
        comm.barrier();
    }
}
constexpr int steps = 21;

TEST_CASE(
    "a throw at any point of a rank is PeerFailed that names it on all others, within a moment"
) {
    for (int const helped : {2, 3, 4, 8, -3}) {
        int const world = std::abs(helped); // below 0: ranks 0 and 2 have a ProgressThread
        for (int culprit = 0; culprit < world; culprit += world == 8 ? 5 : 1) {
            for (int point = 0; point < steps; ++point) {
                CAPTURE(helped);
                CAPTURE(culprit);
                CAPTURE(point);
                run_mpi_groups({world}, [&](MPI_Comm group) {
                    auto const start = Clock::now();
                    std::vector<int> named;
                    bool threw_own = false;
                    int rank = -1;
                    try {
                        MpiCommunicator comm{group};
                        rank = comm.rank();
                        std::optional<joinable::ProgressThread> progress;
                        if (helped < 0 && rank != 1) {
                            progress.emplace(comm);
                        }
                        int step = 0;
                        run_rounds(comm, [&] {
                            if (comm.rank() == culprit && step++ == point) {
                                throw Injected{"disk on fire"};
                            }
                        });
                        comm.barrier();
                    } catch (Injected const&) {
                        threw_own = true;
                    } catch (joinable::PeerFailed const& failure) {
                        named = failure.ranks();
                    }
                    CHECK(threw_own == (rank == culprit));
                    CHECK(named == (rank == culprit ? std::vector<int>{} : std::vector{culprit}));
                    CHECK(Clock::now() - start < std::chrono::seconds{20});
                });
            }
        }
    }
}

TEST_CASE(
    "an abort is thrown by all, in what waits and in what comes after, and by groups split off"
) {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        auto pair = comm.split(comm.rank() / 2, 0);
        AbortReason const reason{FailureKind::mismatch, {1}, "a reason " + std::string(5000, 'x')};
        float x = 1;
        auto const expect = [&](auto const& call) {
            auto const failure = thrown_by<joinable::Mismatch>(call);
            CHECK(failure.ranks() == std::vector{1});
            CHECK(std::string{failure.what()}.substr(0, 12) == "a reason xxx");
            CHECK(std::string{failure.what()}.size() < 4000);
        };
        {
            auto work = comm.all_reduce({&x, 1, DType::f32}, ReduceOp::sum);
            work.wait();
            MPI_Barrier(group); // or the abort may come first
            if (comm.rank() == 1) {
                comm.abort(reason);
                comm.abort({FailureKind::contract, {}, "the second does not count"});
                CHECK(comm.is_aborted());
            } else {
                expect([&] { comm.barrier(); });
            }
            work.wait(); // what was complete stays so
        }
        expect([&] { comm.barrier(); });
        expect([&] { (void)comm.all_reduce({&x, 1, DType::f32}, ReduceOp::sum); });
        expect([&] { pair.barrier(); });
    });
}

TEST_CASE("a process that a rank over MPI has forked says nothing for it, and cannot go on as it") {
    MpiCommunicator comm{MPI_COMM_WORLD};
    check_helpers_of(comm);
}

TEST_CASE("a rank that does not come is missed in a split or a share, not in what they are made of"
) {
    for (bool const shares : {false, true}) {
        run_mpi_groups({2, 4}, [&](MPI_Comm group) {
            // Nobody waits for a rank that has left.
            MpiCommunicator comm{group, {.patience = std::chrono::seconds{40}}};
            comm.set_deadline(std::chrono::milliseconds{100});
            auto const start = Clock::now();
            if (comm.rank() == 1) {
                wait_until([&] { return comm.is_aborted(); });
                return;
            }
            auto const failure = thrown_by<joinable::TimedOut>([&] {
                if (shares) {
                    static_cast<void>(comm.share(8));
                } else {
                    static_cast<void>(comm.split(0, 0));
                }
            });
            CHECK(failure.ranks() == std::vector{1});
            std::string const text = failure.what();
            CHECK(
                text.substr(text.rfind(" waits in ")) ==
                (shares ? " waits in share" : " waits in split")
            );
            CHECK(Clock::now() - start < std::chrono::seconds{10});
        });
    }
}

TEST_CASE("a collective after a split is called by its own name") {
    run_mpi_groups({2, 4}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, {.patience = std::chrono::seconds{40}}};
        static_cast<void>(comm.split(0, 0)); // the barrier takes over its operation
        comm.set_deadline(std::chrono::milliseconds{100});
        if (comm.rank() == 1) {
            wait_until([&] { return comm.is_aborted(); });
            return;
        }
        auto const failure = thrown_by<joinable::TimedOut>([&] { comm.barrier(); });
        std::string const text = failure.what();
        CHECK(text.find("split") == std::string::npos);
        CHECK(text.substr(text.rfind(" waits in ")) == " waits in barrier");
    });
}

TEST_CASE("an abort of a group does not reach the one that it was split from") {
    run_mpi_ranks({2, 3, 4, 8}, [](MpiCommunicator& comm) {
        {
            auto group = comm.split(0, 0);
            if (group.rank() == 0) {
                group.abort({FailureKind::communication, {}, "over"});
            }
            CHECK_THROWS_AS(group.barrier(), joinable::CommunicationError);
        }
        std::vector<int> ones{1};
        joinable::all_reduce(comm, ones).wait();
        CHECK(ones[0] == comm.size());
    });
}

TEST_CASE("what an abort has cut off is completed for each other, so that MPI keeps nothing") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        std::size_t const before = kept();
        {
            MpiCommunicator comm{group};
            auto arena = comm.allocate(1000 * sizeof(float));
            joinable::Buffer const buffer{arena.data(), 1000, DType::f32};
            std::vector<float> more(100'000);
            try {
                if (comm.rank() != 1) {
                    auto first = comm.all_reduce(buffer, ReduceOp::sum);
                    auto second = joinable::all_reduce(comm, more);
                    if (comm.rank() == 0) {
                        auto third = joinable::broadcast(comm, more, 1);
                        third.wait();
                    }
                    first.wait();
                    CHECK(false);
                } else {
                    comm.abort({FailureKind::peer_failed, {1}, "enough"});
                }
            } catch (joinable::PeerFailed const& failure) {
                CHECK(failure.rank() == 1);
            }
        }
        CHECK(kept() == before);
    });
}

TEST_CASE("any collective that an abort has cut off is completed") {
    for (int const kind : {0, 1, 2}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            std::size_t const before = kept();
            {
                joinable::detail::MpiLimits const limits{kind == 1 ? 7 : std::size_t{INT_MAX}};
                MpiCommunicator comm{group, {.wide = kind == 2}, limits};
                auto const size = static_cast<std::size_t>(comm.size());
                std::vector<joinable::Half> halves(10, joinable::Half{1});
                std::vector<float> part(10, 1);
                std::vector<float> whole(10 * size, 1);
                std::vector<float> more(10 * size);
                {
                    std::vector<joinable::MpiWork> works;
                    if (comm.rank() != 1) { // none of them is complete on all ranks without rank 1
                        works.push_back(joinable::all_reduce(comm, halves));
                        works.push_back(
                            comm.all_reduce({part.data(), 10, DType::f32}, ReduceOp::sum, 0.5)
                        );
                        works.push_back(joinable::reduce(comm, halves, ReduceOp::sum, 0));
                        works.push_back(joinable::reduce_scatter(comm, whole, part));
                        works.push_back(joinable::all_gather(comm, part, whole));
                        works.push_back(joinable::gather(comm, part, whole, 0));
                        works.push_back(joinable::scatter(comm, whole, part, 1));
                        works.push_back(joinable::all_to_all(comm, whole, more));
                        works.push_back(joinable::broadcast(comm, halves, 1));
                    }
                    MPI_Barrier(group);
                    if (comm.rank() == 1) {
                        comm.abort({FailureKind::peer_failed, {1}, "enough"});
                    } else {
                        CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
                    }
                }
            }
            CHECK(kept() == before);
        });
    }
}

TEST_CASE("all ranks keep what MPI has where none can tell the others what was cut off") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        std::size_t const before = kept();
        {
            MpiCommunicator comm{group};
            std::vector<float> x(3, 1);
            if (comm.rank() == 0) { // complete here, and posted nowhere else
                joinable::broadcast(comm, x, 0).wait();
            }
            MPI_Barrier(group);
            if (comm.rank() == 1) {
                comm.abort({FailureKind::peer_failed, {1}, "enough"});
            }
        }
        CHECK(kept() == before + 1);
    });
}

TEST_CASE("all ranks keep what MPI has where what was cut off differs, or has counts") {
    for (bool const has_counts : {false, true}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            CAPTURE(has_counts);
            std::size_t const before = kept();
            {
                MpiCommunicator comm{group};
                auto const size = static_cast<std::size_t>(comm.size());
                std::vector<float> x(3, 1);
                std::vector<float> all(3 * size);
                std::vector<std::size_t> const counts(size, 3);
                std::optional<joinable::MpiWork> work;
                if (!has_counts) { // no rank is the root that it names
                    work.emplace(joinable::broadcast(comm, x, (comm.rank() + 1) % comm.size()));
                } else if (comm.rank() != 1) {
                    work.emplace(joinable::all_gather(comm, x, all, counts));
                }
                MPI_Barrier(group);
                if (comm.rank() == 1) {
                    comm.abort({FailureKind::peer_failed, {1}, "enough"});
                } else {
                    CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
                }
            }
            CHECK(kept() == before + 1);
        });
    }
}

TEST_CASE("a work that is complete before an abort is heard does not throw it") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        std::vector<float> x(3, 1);
        int sent = comm.rank();
        int got = -1;
        auto work = joinable::all_reduce(comm, x);
        auto send = comm.send({&sent, 1, DType::i32}, (comm.rank() + 1) % comm.size());
        auto receive =
            comm.receive({&got, 1, DType::i32}, (comm.rank() + comm.size() - 1) % comm.size());
        for (int i = 0; i < 20; ++i) { // MPI completes them meanwhile
            MPI_Barrier(group);
        }
        if (comm.rank() == 1) {
            work.wait();
            comm.abort({FailureKind::peer_failed, {1}, "enough"});
        }
        MPI_Barrier(group);
        while (!comm.is_aborted()) {
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
        CHECK_NOTHROW(work.wait());
        CHECK_NOTHROW(send.wait());
        CHECK_NOTHROW(receive.wait());
        CHECK(x == std::vector<float>(3, static_cast<float>(comm.size())));
        CHECK(got == (comm.rank() + comm.size() - 1) % comm.size());
        CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
    });
}

TEST_CASE("where a rank has ended, the others keep what MPI has, and end at once") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        std::size_t const before = kept();
        auto const start = Clock::now();
        try {
            MpiCommunicator comm{group};
            if (comm.rank() == 0) {
                throw Injected{"disk on fire"};
            }
            CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
        } catch (Injected const&) {
        }
        CHECK(kept() == before + 1);
        CHECK(Clock::now() - start < std::chrono::seconds{10});
    });
}

TEST_CASE(
    "after an abort a rank waits its patience for one that does not end, and keeps what MPI has"
) {
    run_mpi_groups({2, 3}, [](MPI_Comm group) {
        std::size_t const before = kept();
        int size = 0;
        MPI_Comm_size(group, &size);
        auto const patience = (size - 1) * short_patience;
        joinable::MpiOptions const options{.patience = patience};
        auto comm = std::make_unique<MpiCommunicator>(group, options);
        bool const is_late = comm->rank() == 0;
        std::vector<float> x(3, 1);
        {
            std::optional<joinable::MpiWork> work;
            if (!is_late) {
                work.emplace(joinable::all_reduce(*comm, x));
            }
            MPI_Barrier(group);
            if (is_late) {
                comm->abort({FailureKind::peer_failed, {0}, "enough"});
            } else {
                CHECK_THROWS_AS(comm->barrier(), joinable::PeerFailed);
            }
        }
        if (is_late) {
            MPI_Barrier(group); // the others have ended
            return;
        }
        auto const start = Clock::now();
        comm.reset();
        auto const taken = Clock::now() - start;
        CHECK(taken >= patience);
        CHECK(taken < std::chrono::seconds{10}); // of a deadline of five minutes
        CHECK(kept() == before + 1);
        MPI_Barrier(group);
    });
}

TEST_CASE("an arena that is destroyed after an abort leaves its memory to MPI, else it frees it") {
    for (bool const aborts : {false, true}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            CAPTURE(aborts);
            std::byte const* place = nullptr;
            bool is_culprit = false;
            try {
                MpiCommunicator comm{group};
                is_culprit = aborts && comm.rank() == 1;
                auto arena = comm.allocate(40U << 20U); // the heap unmaps so much when it is freed
                place = arena.data();
                if (is_culprit) {
                    throw Injected{"disk on fire"};
                }
                comm.all_reduce({arena.data(), 1000, DType::f32}, ReduceOp::sum).wait();
                CHECK(!aborts);
            } catch (Injected const&) {
            } catch (joinable::PeerFailed const&) {
                CHECK(aborts);
            }
            CHECK(is_mapped(place) == (aborts && !is_culprit));
        });
    }
}

TEST_CASE("an exception of a rank does not cut off what it has done its part of, or has none in") {
    for (bool const is_message : {false, true}) {
        for (bool const comes : {true, false}) { // the rank that is waited for
            run_mpi_groups({3}, [&](MPI_Comm group) {
                CAPTURE(is_message);
                CAPTURE(comes);
                int rank = -1;
                MPI_Comm_rank(group, &rank);
                std::vector<int> const own{rank};
                std::vector<int> all(3, -1);
                auto const start = [&](MpiCommunicator& comm) {
                    return !is_message ? joinable::gather(comm, own, all, 1)
                           : rank == 0 ? joinable::send(comm, own, 1)
                                       : comm.receive({all.data(), 1, DType::i32}, 0);
                };
                joinable::MpiOptions options{.deadline = std::chrono::seconds{60}};
                options.patience = comes ? options.patience : short_patience;
                if (rank == 2) {
                    try {
                        MpiCommunicator comm{group, options};
                        if (!is_message) {
                            start(comm).wait();
                        }
                        throw Injected{"disk on fire"};
                    } catch (Injected const&) {
                    }
                    for (int i = 0; i < 3; ++i) {
                        MPI_Barrier(group);
                    }
                    return;
                }
                MpiCommunicator comm{group, options};
                if (rank == 0) {
                    MPI_Barrier(group);
                    MPI_Barrier(group);
                    if (comes) { // it has not heard of the exception
                        CHECK_NOTHROW(start(comm).wait());
                    }
                } else {
                    auto work = start(comm);
                    MPI_Barrier(group);
                    CHECK(!work.test()); // now it hears
                    MPI_Barrier(group);
                    if (comes) {
                        CHECK_NOTHROW(work.wait());
                        CHECK(all == (is_message ? std::vector{0, -1, -1} : std::vector{0, 1, 2}));
                    } else { // which it does not wait for for ever
                        CHECK(thrown_by<joinable::PeerFailed>([&] { work.wait(); }).rank() == 2);
                    }
                }
                MPI_Barrier(group
                ); // or the next collective of rank 0 would reach this one of rank 1
                check_thrown<joinable::PeerFailed>(
                    std::vector{2},
                    "rank 2 failed: an exception left the scope of its communicator",
                    [&] { comm.barrier(); }
                );
            });
        }
    }
}

TEST_CASE("communicators that were each constructed are used, and end, in threads side by side") {
    run_mpi_groups({1, 2, 3, 4, 8}, [](MPI_Comm group) {
        std::size_t const before = kept();
        std::vector<std::unique_ptr<MpiCommunicator>> comms;
        for (int i = 0; i < 3; ++i) {
            comms.push_back(
                std::make_unique<MpiCommunicator>(i == 0 ? group : comms.front()->native_handle())
            );
        }
        std::atomic<int> right{0};
        {
            std::vector<std::thread> threads;
            for (auto& comm : comms) {
                threads.emplace_back([&] {
                    try {
                        auto const own = std::move(comm);
                        for (int turn = 0; turn < 50; ++turn) {
                            std::vector<int> ones(100, 1);
                            joinable::all_reduce(*own, ones).wait();
                            right += ones == std::vector<int>(100, own->size()) ? 1 : 0;
                        }
                        throw Injected{"disk on fire"}; // so each is kept
                    } catch (std::exception const&) {
                    }
                });
            }
            for (auto& thread : threads) {
                thread.join();
            }
        }
        CHECK(right >= 3 * 49); // a throw may cut off the last one of another rank
        CHECK(kept() == before + 3);
    });
}

TEST_CASE("each rank over MPI tells why it was aborted, and in a group, too") {
    run_mpi_groups({1, 2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        auto halves = comm.split(comm.rank() / 2, 0);
        check_tells_reason(comm);
        auto const reason = halves.abort_reason();
        REQUIRE(reason);
        CHECK(reason->kind == FailureKind::timed_out);
    });
}

TEST_CASE("a rank that leaves while others wait for it is PeerFailed at once") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        comm.barrier();
        MPI_Barrier(group); // or what follows may reach a rank before it has left the first one
        if (comm.rank() == 1) {
            return;
        }
        check_thrown<joinable::PeerFailed>(
            std::vector{1},
            "rank 1 left while rank " + std::to_string(comm.rank()) + " waits for it in barrier",
            [&] { comm.barrier(); }
        );
        check_tells_who_has_left(comm, 1);
    });
    run_mpi_groups({2, 3, 4}, [](MPI_Comm group) { // the same in a message
        MpiCommunicator comm{group};
        int x = 0;
        if (comm.rank() == 0) {
            comm.send({&x, 1, DType::i32}, 1).wait();
        } else if (comm.rank() == 1) {
            comm.receive({&x, 1, DType::i32}, 0).wait();
            CHECK_THROWS_AS(comm.receive({&x, 1, DType::i32}, 0).wait(), joinable::PeerFailed);
        } else {
            CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
        }
    });
}

TEST_CASE("a message for which a rank of MPI has no memory does not count as its part") {
    for (int const culprit : {0, 1}) { // sends, receives
        run_mpi_groups({2, 3}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.deadline = std::chrono::seconds{5}}};
            std::vector<std::byte> values(4'000'000); // MPI keeps no message of that size
            joinable::Buffer const buffer{values.data(), values.size(), DType::u8};
            joinable::Buffer const most{values.data(), std::size_t{1} << 60U, DType::u8};
            auto const post = [&](joinable::Buffer const& one) {
                return comm.rank() == 0 ? comm.send(one, 1) : comm.receive(one, 0);
            };
            if (comm.rank() == culprit) {
                CHECK_THROWS_AS(static_cast<void>(post(most)), std::bad_alloc);
                comm.barrier();
            } else if (comm.rank() == 2) {
                comm.barrier();
            } else {
                auto work = post(buffer);
                comm.barrier();
                check_thrown<joinable::PeerFailed>(
                    std::vector{culprit},
                    "rank " + std::to_string(culprit) + " left while rank " +
                        std::to_string(comm.rank()) + " waits for it in " +
                        (culprit == 0 ? "a receive from rank 0" : "a send to rank 1") +
                        " with tag 0",
                    [&] { work.wait(); }
                );
            }
        });
    }
}

TEST_CASE("a rank that does not come is named after the deadline, by waits and by tests") {
    for (bool const tests : {false, true}) {
        run_mpi_groups({2, 3, 4}, [&](MPI_Comm group) {
            MpiCommunicator comm{group};
            comm.set_deadline(std::chrono::milliseconds{100});
            if (comm.rank() == comm.size() - 1) {
                while (!comm.is_aborted()) { // it hears, but posts nothing
                    std::this_thread::sleep_for(std::chrono::milliseconds{1});
                }
                return;
            }
            int x = 1;
            auto work = comm.all_reduce({&x, 1, DType::i32}, ReduceOp::sum);
            CHECK(comm.missing_ranks() == std::vector{comm.size() - 1});
            auto const start = Clock::now();
            auto const failure = thrown_by<joinable::TimedOut>([&] {
                if (tests) {
                    while (!work.test()) {
                        std::this_thread::yield();
                    }
                } else {
                    work.wait();
                }
            });
            CHECK(failure.missing() == std::vector{comm.size() - 1});
            CHECK(Clock::now() - start < std::chrono::seconds{10});
        });
    }
}

TEST_CASE("ranks wait for one that says that it is at work") {
    run_mpi_groups({2, 3, 4}, [](MPI_Comm group) {
        MpiCommunicator comm{group, {.deadline = long_deadline}};
        if (comm.rank() == 0) {
            stay_away_alive(comm);
        }
        int x = 1;
        CHECK_NOTHROW(comm.all_reduce({&x, 1, DType::i32}, ReduceOp::sum).wait());
        CHECK(x == comm.size());
        comm.set_deadline(std::chrono::seconds{20});
        comm.barrier();
    });
}

TEST_CASE(
    "ranks that say different things throw the same Mismatch before data moves, where they compare it"
) {
    joinable::MpiOptions const options{.deadline = std::chrono::seconds{20}, .check = true};
    run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, options};
        std::vector<float> x(10, 1);
        auto const differs = static_cast<std::size_t>(comm.rank() == 1 ? 9 : 10);
        check_thrown<joinable::Mismatch>(
            std::vector{1},
            "ranks run different collectives: rank 0 all_reduce of 10 f32 with sum, rank 1 "
            "all_reduce of 9 f32 with sum",
            [&] { comm.all_reduce({x.data(), differs, DType::f32}, ReduceOp::sum).wait(); }
        );
        CHECK(x == std::vector<float>(10, 1));
    });
    run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, options};
        auto const size = static_cast<std::size_t>(comm.size());
        std::vector<std::size_t> counts(size, 2);
        if (comm.rank() == 1) {
            counts[0] = 3;
        }
        std::vector<float> in(2);
        std::vector<float> out(2 * size + (comm.rank() == 1 ? 1 : 0));
        CHECK_THROWS_WITH_AS(
            joinable::all_gather(comm, in, out, counts).wait(),
            "counts differ in all_gather by counts of f32: rank 0 has 2 elements for rank 1, which "
            "expects 3",
            joinable::Mismatch
        );
    });
}

TEST_CASE("ranks that wait for different broadcasts end, where nothing compares them") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        comm.set_deadline(std::chrono::milliseconds{100});
        std::vector<float> x(3);
        auto const start = Clock::now();
        MPI_Barrier(group); // no rank begins to wait before each has looked at its clock
        auto const failure = thrown_by<joinable::CommunicationError>([&] {
            // No rank is the root that it names.
            joinable::broadcast(comm, x, (comm.rank() + 1) % comm.size()).wait();
        });
        std::string const text = failure.what();
        CHECK(text.substr(0, 36) == "all ranks have posted a collective, ");
        CHECK(text.find("check = true") != std::string::npos);
        CHECK(Clock::now() - start >= std::chrono::milliseconds{200});
    });
}

TEST_CASE("ranks that compare collectives start them while they wait for a message") {
    joinable::MpiOptions const options{.deadline = std::chrono::seconds{5}, .check = true};
    run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{group, options};
        std::vector<float> x(3, 1);
        std::vector<float> all(3 * static_cast<std::size_t>(comm.size()));
        std::vector<std::size_t> const counts(static_cast<std::size_t>(comm.size()), 3);
        int token = comm.rank();
        auto first = joinable::all_gather(comm, x, all, counts);
        auto second = joinable::all_reduce(comm, x);
        if (comm.rank() == 0) {
            comm.receive({&token, 1, DType::i32}, 1).wait();
        }
        second.wait();
        first.wait();
        if (comm.rank() == 1) {
            comm.send({&token, 1, DType::i32}, 0).wait();
        }
        CHECK(token == (comm.rank() == 0 ? 1 : comm.rank()));
        CHECK(x == std::vector<float>(3, static_cast<float>(comm.size())));
    });
}

TEST_CASE("dtypes that travel as one are compared as they were given") {
    run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
        MpiCommunicator comm{
            group, {.deadline = std::chrono::seconds{20}, .check = true, .wide = true}
        };
        std::vector<joinable::Half> x(3, joinable::Half{1.0F});
        joinable::all_reduce(comm, x).wait();
        CHECK(x == std::vector<joinable::Half>(3, joinable::Half{static_cast<float>(comm.size())}));
        DType const dtype = comm.rank() == 1 ? DType::bf16 : DType::f16;
        CHECK_THROWS_WITH_AS(
            comm.all_reduce({x.data(), 3, dtype}, ReduceOp::sum).wait(),
            "ranks run different collectives: rank 0 all_reduce of 3 f16 with sum, rank 1 "
            "all_reduce of 3 bf16 with sum",
            joinable::Mismatch
        );
    });
}

TEST_CASE("a message of another size than expected is Mismatch") {
    for (std::size_t const sent : {1U, 5U}) {
        run_mpi_groups({2, 3}, [&](MPI_Comm group) {
            std::size_t const before = kept();
            {
                MpiCommunicator comm{group, {.deadline = std::chrono::seconds{20}}};
                std::vector<int> x(5);
                if (comm.rank() == 0) {
                    comm.send({x.data(), sent, DType::i32}, 1).wait();
                    CHECK_THROWS_AS(comm.barrier(), joinable::Mismatch);
                } else if (comm.rank() == 1) {
                    CHECK_THROWS_AS(
                        comm.receive({x.data(), 3, DType::i32}, 0).wait(), joinable::Mismatch
                    );
                } else {
                    CHECK_THROWS_AS(comm.barrier(), joinable::Mismatch);
                }
            }
            CHECK(kept() == before);
        });
    }
}

TEST_CASE("ranks that are not all there end at the deadline of the constructor") {
    run_mpi_groups({2, 3}, [](MPI_Comm group) {
        MPI_Comm own = MPI_COMM_NULL;
        MPI_Comm_dup(group, &own); // in which a barrier stays open
        int rank = 0;
        MPI_Comm_rank(group, &rank);
        if (rank != 0) {
            auto const make = [&] {
                MpiCommunicator comm{own, {.deadline = std::chrono::milliseconds{50}}};
            };
            CHECK_THROWS_AS(make(), joinable::TimedOut);
        }
    });
}

TEST_CASE("an exception of one rank reaches the others while a work is destroyed") {
    run_mpi_groups({2, 4}, [](MPI_Comm group) {
        bool threw_own = false;
        try {
            MpiCommunicator comm{group, {.deadline = std::chrono::seconds{20}}};
            std::vector<float> x(1000);
            auto const work = joinable::all_reduce(comm, x);
            if (comm.rank() == 1) {
                throw Injected{"disk on fire"};
            }
            CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
        } catch (Injected const&) {
            threw_own = true;
        }
        int rank = 0;
        MPI_Comm_rank(group, &rank);
        CHECK(threw_own == (rank == 1));
    });
}

} // namespace
