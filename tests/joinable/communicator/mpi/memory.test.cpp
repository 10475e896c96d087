// SPDX-License-Identifier: BSL-1.0
// Ranks of MPI that have no memory for a collective. The program's operator new is replaced.
#include <joinable/communicator/mpi/communicator.hpp>

#include <chrono>
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

} // namespace

// Not inlined: g++ 12 warns of free() on memory of new where it sees only one of the pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    void* const memory =
        allocations_that_work-- == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) {
        throw std::bad_alloc{};
    }
    return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

using namespace joinable_tests;
using joinable::MpiCommunicator;

/// A sum of all ranks, of which each allocation fails once on one rank. Returns how many did.
std::size_t sum_without_memory(MpiCommunicator& comm, int culprit) {
    std::vector<std::int32_t> values(100, 1);
    std::size_t failures = 0;
    std::optional<joinable::MpiWork> work;
    while (!work) {
        allocations_that_work = comm.rank() == culprit ? failures : all_of_them;
        try {
            work.emplace(joinable::all_reduce(comm, values));
        } catch (std::bad_alloc const&) {
            ++failures;
        }
        allocations_that_work = all_of_them;
    }
    work->wait();
    CHECK(values == std::vector<std::int32_t>(100, comm.size()));
    return failures;
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
                CHECK((failures > 4) == (comm.rank() == culprit));
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

} // namespace
