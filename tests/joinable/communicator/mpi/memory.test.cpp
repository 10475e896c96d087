// SPDX-License-Identifier: BSL-1.0
// Ranks of MPI that have no memory for a collective or a message. The program's operator new is
// replaced.
#include <joinable/communicator/mpi/communicator.hpp>

#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/mpi_ranks.hpp>
#include <support/mpi_wires.hpp>
#include <support/thrown_by.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/error.hpp>

namespace {

constexpr std::size_t all_of_them = std::numeric_limits<std::size_t>::max();
thread_local std::size_t allocations_that_work = all_of_them;
thread_local std::ptrdiff_t blocks_in_use = 0;

} // namespace

// Not inlined: g++ 12 warns of free() on memory of new where it sees only one of the pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    void* const memory =
        allocations_that_work-- == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) {
        throw std::bad_alloc{};
    }
    ++blocks_in_use;
    return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    blocks_in_use -= memory == nullptr ? 0 : 1;
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    operator delete(memory);
}

namespace {

using namespace joinable_tests;
using joinable::MpiCommunicator;
using Numbers = std::vector<std::int32_t>;

/// Calls f() until it does not throw. Each allocation in it fails once on one rank. Returns how many
/// did.
template <class Rank, class F>
std::size_t without_memory(Rank const& comm, int culprit, F const& f) {
    for (std::size_t failures = 0;; ++failures) {
        allocations_that_work = comm.rank() == culprit ? failures : all_of_them;
        try {
            f();
            allocations_that_work = all_of_them;
            return failures;
        } catch (std::bad_alloc const&) {
            allocations_that_work = all_of_them;
        }
    }
}

/// Posts and waits. Returns how many allocations failed.
class WithoutMemory {
public:
    WithoutMemory(MpiCommunicator& comm, int culprit) : comm_{comm}, culprit_{culprit} {}

    /// `post()` returns the work.
    template <class Post>
    void operator()(Post const& post) {
        std::optional<joinable::MpiWork> work;
        failures_ += without_memory(comm_, culprit_, [&] { work.emplace(post()); });
        failures_ += without_memory(comm_, culprit_, [&] { work->wait(); });
    }
    [[nodiscard]] std::size_t failures() const noexcept { return failures_; }

private:
    MpiCommunicator& comm_;
    int culprit_;
    std::size_t failures_ = 0;
};

/// A sum of all ranks. Returns how many of its allocations failed.
std::size_t sum_without_memory(MpiCommunicator& comm, int culprit) {
    WithoutMemory run{comm, culprit};
    Numbers values(100, 1);
    run([&] { return joinable::all_reduce(comm, values); });
    CHECK(values == Numbers(100, comm.size()));
    return run.failures();
}

/// All other collectives, of parts that differ.
void exchange_without_memory(MpiCommunicator& comm, int culprit) {
    WithoutMemory run{comm, culprit};
    auto const ranks = static_cast<std::size_t>(comm.size());
    auto const rank = static_cast<std::size_t>(comm.rank());
    std::vector<std::size_t> counts; // 3, 13, 23, ...
    Numbers all;                     // rank r has its part of r's
    for (std::size_t r = 0; r < ranks; ++r) {
        counts.push_back(3 + 10 * r);
        all.insert(all.end(), counts.back(), static_cast<std::int32_t>(r));
    }
    Numbers const own(counts[rank], comm.rank());

    Numbers told(20, comm.rank());
    run([&] { return joinable::broadcast(comm, told, 1); });
    CHECK(told == Numbers(20, 1));
    Numbers sum(20, 1);
    run([&] { return joinable::reduce(comm, sum, joinable::ReduceOp::sum, 1); });
    CHECK(sum == Numbers(20, rank == 1 ? comm.size() : 1));
    Numbers part(counts[rank]);
    run([&] { return joinable::reduce_scatter(comm, all, part, joinable::ReduceOp::sum, counts); });
    CHECK(part == Numbers(counts[rank], comm.size() * comm.rank()));
    Numbers gathered(all.size());
    run([&] { return joinable::all_gather(comm, own, gathered, counts); });
    CHECK(gathered == all);
    gathered.assign(rank == 1 ? all.size() : 0, -1);
    run([&] { return joinable::gather(comm, own, gathered, 1, counts); });
    CHECK(gathered == (rank == 1 ? all : Numbers{}));
    part.assign(counts[rank], -1);
    Numbers const scattered = rank == 1 ? all : Numbers{};
    run([&] { return joinable::scatter(comm, scattered, part, 1, counts); });
    CHECK(part == own);
    std::vector<std::size_t> const equal(ranks, counts[rank]);
    Numbers received(ranks * counts[rank]);
    run([&] { return joinable::all_to_all(comm, all, received, counts, equal); });
    CHECK(received == Numbers(ranks * counts[rank], comm.rank()));
}

/// A message from each rank to the next one.
void message_without_memory(MpiCommunicator& comm, int culprit) {
    int const before = (comm.rank() + comm.size() - 1) % comm.size();
    Numbers const sent(30, comm.rank());
    Numbers received(30, -1);
    std::optional<joinable::MpiWork> send;
    std::optional<joinable::MpiWork> receive;
    static_cast<void>(without_memory(comm, culprit, [&] {
        send.emplace(joinable::send(comm, sent, (comm.rank() + 1) % comm.size()));
    }));
    static_cast<void>(without_memory(comm, culprit, [&] {
        receive.emplace(joinable::receive(comm, received, before));
    }));
    static_cast<void>(without_memory(comm, culprit, [&] { receive->wait(); }));
    static_cast<void>(without_memory(comm, culprit, [&] { send->wait(); }));
    CHECK(received == Numbers(30, before));
}

TEST_CASE(
    "a collective for which a rank of MPI has no memory was not posted, and may be posted again"
) {
    for (bool const compares : {false, true}) {
        for (int const culprit : {0, 1}) {
            run_mpi_groups({2, 3}, [&](MPI_Comm group) {
                MpiCommunicator comm{group, {.check = compares}};
                std::size_t failures = 0;
                for (int round = 0; round < 100;
                     ++round) { // the list of open ones allocates at times
                    failures += sum_without_memory(comm, culprit);
                }
                CHECK((failures > 0) == (comm.rank() == culprit));
                comm.set_deadline(std::chrono::milliseconds{300});
                MPI_Barrier(group);
                std::int32_t value = 1;
                if (comm.rank() !=
                    culprit) { // it knows that the culprit has posted no more than these
                    auto work =
                        comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum);
                    auto const failure = thrown_by<joinable::TimedOut>([&] { work.wait(); });
                    CHECK(failure.missing() == std::vector{culprit});
                }
                while (!comm.is_aborted()) { // meanwhile it hears
                    std::this_thread::sleep_for(std::chrono::milliseconds{1});
                }
            });
        }
    }
}

TEST_CASE(
    "collectives by counts and in pieces, and messages, start whole or not at all where a rank of MPI has no memory"
) {
    for (std::size_t const most : {std::size_t{INT_MAX}, std::size_t{7}}) {
        for (bool const compares : {false, true}) {
            for (int const culprit : {0, 1}) {
                CAPTURE(most);
                CAPTURE(compares);
                run_mpi_groups({2, 3}, [&](MPI_Comm group) {
                    std::ptrdiff_t const before = blocks_in_use;
                    {
                        MpiCommunicator comm{
                            group, {.deadline = std::chrono::seconds{10}, .check = compares}, {most}
                        };
                        for (int round = 0; round < 20; ++round) {
                            static_cast<void>(sum_without_memory(comm, culprit));
                            exchange_without_memory(comm, culprit);
                            message_without_memory(comm, culprit);
                        }
                    }
                    // What did not start has kept nothing; a few blocks are made once.
                    CHECK(blocks_in_use - before < 10);
                });
            }
        }
    }
}

// -- what others say meanwhile -------------------------------------------------------------------

using joinable::AbortReason;
using joinable::FailureKind;
using joinable::detail::MpiWord;
using Clock = std::chrono::steady_clock;

TEST_CASE("a rank of MPI that has no memory for the reason of an abort hears it later") {
    run_mpi_groups({2, 3}, [](MPI_Comm group) {
        MpiCommunicator comm{group, {.patience = short_patience}};
        if (comm.rank() == 0) {
            comm.abort({FailureKind::mismatch, {0}, "the reason"});
            return;
        }
        auto const end = Clock::now() + std::chrono::seconds{10};
        std::size_t const failures = without_memory(comm, 1, [&] {
            while (!comm.is_aborted() && Clock::now() < end) {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
            }
        });
        CHECK((failures > 0) == (comm.rank() == 1));
        check_thrown<joinable::Mismatch>(std::vector{0}, "the reason", [&] { comm.barrier(); });
    });
}

TEST_CASE("and an error of MPI beside the data") {
    run_mpi_groups({2}, [](MPI_Comm group) {
        Wires const wires{group, short_patience};
        if (wires.rank == 1) {
            std::vector<std::byte> const body(joinable::detail::MpiAlarm::most_bytes + 100);
            wires.tell(0, MpiWord::keep_alive, body); // too long
            return;
        }
        auto const rank = wires.make_rank();
        auto const end = Clock::now() + std::chrono::seconds{10};
        std::size_t const failures = without_memory(*rank, 0, [&] {
            while (!rank->is_aborted() && Clock::now() < end) {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
            }
        });
        CHECK(failures > 0);
        CHECK(rank->is_aborted());
        rank->close(false);
    });
}

TEST_CASE("a rank of MPI that has no memory to say it still says that a message has another size") {
    for (std::size_t const count : {std::size_t{29}, std::size_t{31}}) {
        run_mpi_groups({2, 3}, [&](MPI_Comm group) {
            MpiCommunicator comm{
                group, {.deadline = std::chrono::seconds{10}, .patience = short_patience}
            };
            Numbers values(comm.rank() == 0 ? 30 : count);
            if (comm.rank() == 0) {
                joinable::send(comm, values, 1).wait();
            } else if (comm.rank() == 1) {
                auto work = joinable::receive(comm, values, 0);
                auto const failure = thrown_by<joinable::Mismatch>([&] {
                    static_cast<void>(without_memory(comm, 1, [&] { work.wait(); }));
                });
                allocations_that_work = all_of_them;
                CHECK(failure.ranks() == std::vector{0, 1});
                std::string const sent = count < 30 ? "which sent more" : "which sent 120";
                CHECK(std::string{failure.what()}.find(sent) != std::string::npos);
            }
            while (!comm.is_aborted()) {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
            }
        });
    }
}

TEST_CASE("a rank of MPI that has no memory to ask names nobody as missing whom it has not asked") {
    for (std::size_t works = 0; works < 4; ++works) { // two for each question
        run_mpi_groups({3}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.deadline = std::chrono::seconds{20}}};
            if (comm.rank() == 2) {
                while (!comm.is_aborted()) {
                    std::this_thread::sleep_for(std::chrono::milliseconds{1});
                }
                return;
            }
            Numbers values(1);
            auto work = joinable::all_reduce(comm, values);
            if (comm.rank() == 0) {
                comm.set_deadline(std::chrono::milliseconds{20});
                allocations_that_work = works;
                CHECK_THROWS_AS(work.wait(), std::bad_alloc);
                allocations_that_work = all_of_them;
            }
            auto const failure = thrown_by<joinable::TimedOut>([&] { work.wait(); });
            CHECK(failure.missing() == std::vector{2});
        });
    }
}

TEST_CASE("a rank of MPI that has no memory to answer does not leave a meeting for that") {
    run_mpi_groups({2}, [](MPI_Comm group) {
        Wires const wires{group};
        if (wires.rank == 1) {
            std::vector<std::byte> question(8);
            std::vector<std::byte> answer(16);
            wires.tell(0, MpiWord::question, question);
            MPI_Recv(
                answer.data(),
                16,
                MPI_BYTE,
                0,
                static_cast<int>(MpiWord::answer),
                wires.alarm,
                MPI_STATUS_IGNORE
            );
        }
        auto const rank = wires.make_rank();
        auto& meeting = rank->post({});
        allocations_that_work = wires.rank == 0 ? 0 : all_of_them;
        CHECK_NOTHROW(rank->finish_meeting(meeting));
        CHECK((allocations_that_work > all_of_them / 2));
        allocations_that_work = all_of_them;
        rank->release(meeting);
        rank->close(false);
    });
}

TEST_CASE("a rank of MPI that has no memory when it tells of its abort tells of it at its end") {
    run_mpi_groups({2, 3}, [](MPI_Comm group) {
        MpiCommunicator comm{group, {.patience = short_patience}};
        if (comm.rank() == 0) {
            AbortReason const reason{FailureKind::mismatch, {0}, "the reason of rank 0, in words"};
            static_cast<void>(without_memory(comm, 0, [&] { comm.abort(reason); }));
            return;
        }
        check_thrown<joinable::Mismatch>(std::vector{0}, "the reason of rank 0, in words", [&] {
            comm.barrier();
        });
    });
}

TEST_CASE("a rank of MPI that has no memory at its end leaves as any other") {
    constexpr std::size_t most = 12;
    for (int const culprit : {0, 1}) {
        for (std::size_t failures = 0; failures < most; ++failures) {
            CAPTURE(failures);
            run_mpi_groups({2, 3}, [&](MPI_Comm group) {
                std::ptrdiff_t const before = blocks_in_use;
                {
                    MpiCommunicator comm{group, {.deadline = std::chrono::seconds{10}}};
                    Numbers value(1);
                    int const next = (comm.rank() + 1) % comm.size();
                    joinable::send(comm, value, next).wait(); // nobody receives it
                    allocations_that_work = comm.rank() == culprit ? failures : all_of_them;
                }
                allocations_that_work = all_of_them;
                CHECK(blocks_in_use == before);
            });
        }
    }
}

TEST_CASE("a rank of MPI that hears of an abort at its end, and has no memory for it, leaves, too"
) {
    for (bool const is_early : {true, false}) {
        for (std::size_t failures = 0; failures < 10; ++failures) {
            run_mpi_groups({2}, [&](MPI_Comm group) {
                CAPTURE(is_early);
                CAPTURE(failures);
                Wires const wires{group};
                if (wires.rank == 0) {
                    auto const rank = wires.make_rank();
                    MPI_Barrier(group);
                    allocations_that_work = failures;
                    rank->close(false);
                    allocations_that_work = all_of_them;
                    CHECK(rank.use_count() == 1); // MPI keeps nothing
                    return;
                }
                auto const abort = [&] {
                    wires.tell(
                        0,
                        MpiWord::abort,
                        joinable::detail::packed(AbortReason{FailureKind::mismatch, {1}, "late"})
                    );
                };
                if (is_early) {
                    abort();
                }
                MPI_Barrier(group);
                int has_left = 0;
                auto const end = Clock::now() + std::chrono::seconds{2};
                while (has_left == 0 && Clock::now() < end) {
                    int const leave = static_cast<int>(MpiWord::leave);
                    MPI_Iprobe(0, leave, wires.alarm, &has_left, MPI_STATUS_IGNORE);
                }
                CHECK(has_left != 0);
                if (!is_early) {
                    abort();
                }
                wires.tell(0, MpiWord::leave, joinable::detail::MpiLeave{}.packed());
            });
        }
    }
}

} // namespace
