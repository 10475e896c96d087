// SPDX-License-Identifier: BSL-1.0
// How communicators of MPI and groups of them begin: late ranks, what MPI refuses, ranks that do something else
// meanwhile, and what an earlier communicator has left behind.
#include <joinable/communicator/mpi/communicator.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/environment_variable.hpp>
#include <support/mpi_ranks.hpp>
#include <support/polling.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>

#include <joinable/communicator/collectives.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::MpiCommunicator;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

int rank_in(MPI_Comm comm) {
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    return rank;
}
MPI_Comm duplicate_of(MPI_Comm comm) {
    MPI_Comm made = MPI_COMM_NULL;
    MPI_Comm_dup(comm, &made);
    return made;
}
MPI_Errhandler handler_of(MPI_Comm comm) {
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(comm, &handler);
    return handler;
}

/// Sets the error handler of a communicator, for as long as this is there.
class Handling {
public:
    Handling(MPI_Comm comm, MPI_Errhandler handler) : comm_{comm}, before_{handler_of(comm)} {
        MPI_Comm_set_errhandler(comm, handler);
    }
    ~Handling() { MPI_Comm_set_errhandler(comm_, before_); }
    Handling(Handling const&) = delete;
    Handling& operator=(Handling const&) = delete;

private:
    MPI_Comm comm_;
    MPI_Errhandler before_;
};

/// A duplicate of `comm` that MPI refuses to duplicate.
class Unduplicable {
public:
    explicit Unduplicable(MPI_Comm comm) : comm_{duplicate_of(comm)} {
        MPI_Comm_create_keyval(&refuse, MPI_COMM_NULL_DELETE_FN, &key_, nullptr);
        MPI_Comm_set_attr(comm_, key_, nullptr);
    }
    ~Unduplicable() {
        MPI_Comm_delete_attr(comm_, key_);
        MPI_Comm_free_keyval(&key_);
        MPI_Comm_free(&comm_);
    }
    Unduplicable(Unduplicable const&) = delete;
    Unduplicable& operator=(Unduplicable const&) = delete;
    [[nodiscard]] MPI_Comm get() const { return comm_; }

private:
    static int refuse(MPI_Comm, int, void*, void*, void*, int*) { return MPI_ERR_OTHER; }

    MPI_Comm comm_;
    int key_ = MPI_KEYVAL_INVALID;
};

TEST_CASE("a rank that comes after the others' deadline ends at its own") {
    for (bool const gives_away : {false, true}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            MPI_Comm const own = duplicate_of(group); // in which something stays open
            joinable::MpiOptions const options{.deadline = milliseconds{50}};
            auto const make = [&] {
                if (gives_away) {
                    auto comm = MpiCommunicator::from_native_handle(own, options);
                } else {
                    MpiCommunicator comm{own, options};
                }
            };
            if (rank_in(group) == 0) {
                MPI_Barrier(group); // all others have thrown
            }
            auto const start = Clock::now();
            CHECK_THROWS_AS(make(), joinable::TimedOut);
            CHECK(Clock::now() - start < std::chrono::seconds{10});
            if (rank_in(group) != 0) {
                MPI_Barrier(group);
            }
        });
    }
}

TEST_CASE("a rank that comes late, but within the deadline, is waited for") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        if (rank_in(group) == 0) {
            std::this_thread::sleep_for(milliseconds{50});
        }
        MpiCommunicator comm{group};
        std::vector<int> ones{1};
        joinable::all_reduce(comm, ones).wait();
        CHECK(ones[0] == comm.size());
    });
}

TEST_CASE("what MPI refuses is CommunicationError, though the given communicator would end the job"
) {
    run_mpi_groups({1, 2, 3, 4, 8}, [](MPI_Comm group) {
        Unduplicable const own{group};
        Handling const world{MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL};
        Handling const given{own.get(), MPI_ERRORS_ARE_FATAL};
        CHECK_THROWS_AS(MpiCommunicator{own.get()}, joinable::CommunicationError);
        CHECK(handler_of(own.get()) == MPI_ERRORS_ARE_FATAL);
        CHECK_THROWS_AS(
            (void)MpiCommunicator::from_native_handle(own.get()), joinable::CommunicationError
        );
        CHECK(handler_of(own.get()) == MPI_ERRORS_ARE_FATAL); // it has stayed the caller's
    });
}

TEST_CASE("a given communicator keeps its error handler, and the one made of it returns errors") {
    run_mpi_groups({1, 2, 4}, [](MPI_Comm group) {
        Handling const given{group, MPI_ERRORS_ARE_FATAL};
        MpiCommunicator comm{group};
        CHECK(handler_of(group) == MPI_ERRORS_ARE_FATAL);
        CHECK(handler_of(comm.native_handle()) == MPI_ERRORS_RETURN);
        auto part = comm.split(0, 0);
        CHECK(handler_of(part.native_handle()) == MPI_ERRORS_RETURN);
    });
}

TEST_CASE("memory that is not to be had is bad_alloc, though MPI_COMM_WORLD would end the job") {
    run_mpi_groups({1, 2}, [](MPI_Comm group) {
        Handling const world{MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL};
        MpiCommunicator comm{group};
        for (std::size_t const bytes :
             {std::size_t{1} << 60U, std::size_t{PTRDIFF_MAX} + 1, SIZE_MAX - 100, SIZE_MAX}) {
            CHECK_THROWS_AS((void)comm.allocate(bytes), std::bad_alloc);
        }
        for (std::size_t const bytes : {std::size_t{PTRDIFF_MAX} + 1, SIZE_MAX}) {
            CHECK_THROWS_AS((void)comm.share(bytes), std::bad_alloc);
        }
        comm.barrier();
    });
}

TEST_CASE("a message that nobody received does not reach the next communicator") {
    for (bool const aborts : {false, true}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            std::size_t const before = joinable::detail::kept_mpi_ranks().size();
            for (int turn = 0; turn < 4; ++turn) {
                CAPTURE(turn);
                MpiCommunicator comm{group, {.deadline = std::chrono::seconds{20}}};
                if (comm.rank() == 0) {
                    for (int const value : {turn, -1, -2}) { // one is received
                        comm.send({const_cast<int*>(&value), 1, DType::i32}, 1).wait();
                    }
                    comm.send({nullptr, 0, DType::i32}, 1, 3).wait();
                } else if (comm.rank() == 1) {
                    int got = -3;
                    comm.receive({&got, 1, DType::i32}, 0).wait();
                    CHECK(got == turn);
                }
                comm.barrier();
                MPI_Barrier(group); // or the abort may reach a rank before it has left that barrier
                if (aborts && comm.rank() == 0) {
                    comm.abort({joinable::FailureKind::communication, {}, "enough"});
                } else if (aborts && comm.rank() == 1) {
                    int never = 0;
                    CHECK_THROWS_AS(
                        comm.receive({&never, 1, DType::i32}, 0, 7).wait(),
                        joinable::CommunicationError
                    );
                } else if (aborts) {
                    CHECK_THROWS_AS(comm.barrier(), joinable::CommunicationError);
                }
            }
            CHECK(joinable::detail::kept_mpi_ranks().size() == before);
        });
    }
}

TEST_CASE("a split or shared memory that meets another collective ends, and tells of it") {
    for (bool const shares : {false, true}) {
        for (bool const checks : {false, true}) {
            run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
                CAPTURE(shares);
                CAPTURE(checks);
                MpiCommunicator comm{group, {.deadline = milliseconds{500}, .check = checks}};
                auto const start = Clock::now();
                if (comm.rank() ==
                    1) { // what it throws depends on which message of MPI comes first
                    CHECK_THROWS_AS((comm.barrier(), comm.barrier()), joinable::Error);
                } else if (checks) {
                    CHECK_THROWS_AS(
                        shares ? (void)comm.share(8) : (void)comm.split(0, 0), joinable::Mismatch
                    );
                } else {
                    CHECK_THROWS_AS(
                        shares ? (void)comm.share(8) : (void)comm.split(0, 0), joinable::Error
                    );
                }
                CHECK(comm.is_aborted());
                CHECK(Clock::now() - start < std::chrono::seconds{10});
            });
        }
    }
}

TEST_CASE("a split that meets shared memory is Mismatch") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        check_thrown<joinable::Mismatch>(
            std::vector{1},
            "ranks run different collectives: rank 0 split, rank 1 share",
            [&] {
                if (comm.rank() == 1) {
                    (void)comm.share(8);
                } else {
                    (void)comm.split(0, 0);
                }
            }
        );
        CHECK_THROWS_AS(comm.barrier(), joinable::Mismatch);
    });
}

TEST_CASE("shared memory of different sizes is Mismatch, and the communicator lives on") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        CHECK_THROWS_AS((void)comm.share(comm.rank() == 1 ? 16 : 8), joinable::Mismatch);
        comm.barrier();
    });
}

TEST_CASE("an abort of the parent while a group splits reaches all, and no rank stays in MPI") {
    for (int const delay : {0, 3}) { // in milliseconds
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            // Nobody waits for a rank that has left.
            MpiCommunicator comm{group, {.patience = std::chrono::seconds{40}}};
            auto inner = comm.split(0, comm.rank());
            auto const start = Clock::now();
            MPI_Barrier(group);
            if (comm.rank() == comm.size() - 1) {
                std::this_thread::sleep_for(milliseconds{delay});
                comm.abort({joinable::FailureKind::communication, {}, "enough"});
            }
            auto const use = [&] {
                for (int turn = 0; turn < 100; ++turn) {
                    auto part = inner.split(comm.rank() % 2, 0);
                    part.barrier();
                    inner.barrier();
                }
            };
            CHECK_THROWS_AS(use(), joinable::CommunicationError);
            CHECK(Clock::now() - start < std::chrono::seconds{10});
        });
    }
}

TEST_CASE("a late rank does not split alone when the others have heard of an abort") {
    constexpr milliseconds patience{400}; // ranks hear of an abort within half of it
    Shared<std::atomic<bool>> has_aborted;
    for (milliseconds const delay : {patience / 20, patience}) {
        run_mpi_groups({3, 4, 8}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.patience = patience}};
            bool const is_last = comm.rank() == comm.size() - 1;
            auto inner = comm.split(is_last ? 1 : 0, 0);
            *has_aborted = false;
            MPI_Barrier(group);
            if (is_last) {
                comm.abort({joinable::FailureKind::communication, {}, "enough"});
                *has_aborted = true;
                return;
            }
            if (comm.rank() == 0) { // it has not heard yet, and the others are in the split
                wait_until(*has_aborted, true);
                std::this_thread::sleep_for(delay);
            }
            auto const start = Clock::now();
            auto const use = [&] {
                auto part = inner.split(0, 0); // made where all have met in time
                part.barrier();
            };
            CHECK_THROWS_AS(use(), joinable::CommunicationError);
            CHECK(Clock::now() - start < std::chrono::seconds{10});
        });
    }
}

TEST_CASE("an abort of a grandparent reaches a group two splits below") {
    run_mpi_groups({2, 3, 4, 8}, [](MPI_Comm group) {
        MpiCommunicator comm{group};
        auto child = comm.split(0, -comm.rank());
        auto grandchild = child.split(0, 0);
        grandchild.barrier();
        MPI_Barrier(group); // or the abort may reach a rank before it has left that barrier
        if (comm.rank() == 0) {
            comm.abort({joinable::FailureKind::mismatch, {1}, "enough"});
        }
        CHECK_THROWS_WITH_AS(grandchild.barrier(), "enough", joinable::Mismatch);
        CHECK(grandchild.is_aborted());
        CHECK(child.is_aborted());
        CHECK_THROWS_AS((void)child.split(0, 0), joinable::Mismatch);
        CHECK_THROWS_AS((void)child.share(8), joinable::Mismatch);
    });
}

TEST_CASE("JOINABLE_CHECK=collectives makes ranks of MPI compare collectives, also of a group") {
    EnvironmentVariable const set{"JOINABLE_CHECK", "collectives"};
    run_mpi_groups({2, 3, 4}, [](MPI_Comm group) {
        MpiCommunicator all{group};
        MpiCommunicator comm = all.split(0, all.rank());
        std::vector<float> values(10, 1.0F);
        auto const count = static_cast<std::size_t>(comm.rank() == 1 ? 9 : 10);
        CHECK_THROWS_WITH_AS(
            comm.all_reduce({values.data(), count, DType::f32}, joinable::ReduceOp::sum).wait(),
            "ranks run different collectives: rank 0 all_reduce of 10 f32 with sum, rank 1 "
            "all_reduce of 9 f32 with sum",
            joinable::Mismatch
        );
        CHECK(values == std::vector<float>(10, 1.0F));
    });
}

TEST_CASE("ranks of MPI that differ in whether 16-bit sums are wide are refused") {
    for (bool const first : {false, true}) {
        run_mpi_groups({2, 3, 4, 8}, [&](MPI_Comm group) {
            check_thrown<joinable::Mismatch>(
                std::vector{1},
                std::string{"options differ: MpiOptions::wide: rank 0 has "} +
                    (first ? "true, rank 1 has false" : "false, rank 1 has true"),
                [&] { MpiCommunicator const comm{group, {.wide = (rank_in(group) == 1) != first}}; }
            );
            MpiCommunicator comm{group, {.wide = true}};
            comm.barrier();
        });
    }
}

TEST_CASE("ranks of MPI with other words in JOINABLE_CHECK, or an unknown one, are all told") {
    run_mpi_groups({2, 3, 4}, [](MPI_Comm group) {
        auto const text_with = [&](char const* word) -> std::string {
            EnvironmentVariable const set{
                "JOINABLE_CHECK", rank_in(group) == 1 ? word : "ready,replicas"
            };
            try {
                MpiCommunicator const comm{group};
            } catch (joinable::Mismatch const& error) {
                return error.ranks() == std::vector{1} ? error.what() : "other ranks";
            } catch (joinable::PeerFailed const& error) {
                return error.what();
            } catch (joinable::ContractViolation const& error) {
                return error.what();
            }
            return "nothing";
        };
        CHECK(
            text_with("collectives")
                .find(
                    "options differ: MpiOptions::check, or JOINABLE_CHECK=collectives: rank 0 has "
                    "false, rank 1 has true"
                ) != std::string::npos
        );
        CHECK(
            text_with("collectiv")
                .find(
                    rank_in(group) == 1 ? "but found \"collectiv\""
                                        : "rank 1 failed: JOINABLE_CHECK has an unknown word there"
                ) != std::string::npos
        );
        CHECK(text_with("ready") == "nothing");
    });
}

} // namespace
