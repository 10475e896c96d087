// SPDX-License-Identifier: BSL-1.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdio>
#include <string_view>

#include <mpi.h>
#include <support/count_failed_checks.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>

#include <joinable/communicator/mpi/communicator.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/error.hpp>

namespace {

/// Memory of all processes, for Shared: they run the same tests, so each takes the same pieces in the same
/// order. A piece is used again long after all have read it.
class WorldMemory {
public:
    static void begin() {
        int rank = 0;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Win_allocate_shared(
            rank == 0 ? bytes : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &start, &window
        );
        MPI_Aint size = 0;
        int unit = 0;
        MPI_Win_shared_query(window, 0, &size, &unit, &start);
        joinable_tests::shared_pages = {&take, [](void*, std::size_t) {}};
    }
    static void end() { MPI_Win_free(&window); }

private:
    static void* take(std::size_t size) {
        std::size_t const rounded = (size + 63) / 64 * 64;
        taken = taken + rounded > bytes ? 0 : taken;
        void* const piece = start + taken;
        taken += rounded;
        return piece;
    }

    static constexpr std::size_t bytes = 1 << 20;
    static inline std::byte* start = nullptr;
    static inline std::size_t taken = 0;
    static inline MPI_Win window = MPI_WIN_NULL;
};

/// Whether the library refuses to make a communicator now.
bool is_refused() {
    try {
        joinable::MpiCommunicator const comm{MPI_COMM_WORLD};
    } catch (joinable::ContractViolation const&) {
        return true;
    }
    return false;
}

/// Memory that all processes share, and that outlives its communicator and MPI.
joinable::SharedBuffer<int> shared_by_all() {
    joinable::MpiCommunicator comm{MPI_COMM_WORLD};
    auto shared = joinable::shared_buffer<int>(comm, 100'000);
    if (comm.rank() == 0) {
        shared[shared.size() - 1] = 42;
    }
    comm.barrier();
    return shared;
}

} // namespace

/// Every process that mpirun has started runs the same tests in the same order. What fails in one of them
/// fails the program. So does a communicator before MPI is initialised, or after it is finalised, and shared memory
/// that ends with MPI. --funneled asks
/// MPI for that level of threads, for the test that it is too low.
int main(int count, char** arguments) {
    int level = MPI_THREAD_MULTIPLE;
    for (int i = 1; i < count; ++i) {
        level = arguments[i] == std::string_view{"--funneled"} ? MPI_THREAD_FUNNELED : level;
    }
    bool const is_refused_before = is_refused();
    MPI_Init_thread(&count, &arguments, level, &level);
    // MPICH raises there what it finds wrong with a request, whatever its communicator says.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    joinable_tests::has_threads_of_libraries = true;
    WorldMemory::begin();
    int result = doctest::Context{count, arguments}.run();
    int worst = 1;
    MPI_Allreduce(&result, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    auto const kept = shared_by_all();
    WorldMemory::end();
    MPI_Finalize();
    if (kept[kept.size() - 1] != 42) {
        std::puts("shared memory changed when MPI was finalised");
        return 1;
    }
    if (!is_refused_before || !is_refused()) {
        std::puts("a communicator was made before MPI was initialised, or after it was finalised");
        return 1;
    }
    return worst;
}
