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
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/mpi_ranks.hpp>
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
template <class F>
std::size_t without_memory(MpiCommunicator const& comm, int culprit, F const& f) {
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
                        MPI_Barrier(group); // a rank without memory may not hear that others leave
                    }
                    // What did not start has kept nothing; a few blocks are made once.
                    CHECK(blocks_in_use - before < 10);
                });
            }
        }
    }
}

} // namespace
