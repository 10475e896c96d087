// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <mpi.h>
#include <support/function_ref.hpp>
#include <support/hang.hpp>

#include <joinable/mpi.hpp>

namespace joinable_tests {

[[nodiscard]] inline int mpi_world_size() {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}
[[nodiscard]] inline int mpi_world_rank() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

/// MpiOptions::patience for ranks that wait in vain. Those that have to get what they wait for keep the default.
inline constexpr std::chrono::milliseconds short_patience{200};

/// What one process threw.
struct MpiOutcome {
    enum Kind : int { success, other_failed, failed };
    int kind = success;
    std::array<char, 512> text{};
};

[[nodiscard]] inline MpiOutcome mpi_outcome(std::exception_ptr const& error) {
    MpiOutcome outcome;
    if (!error) {
        return outcome;
    }
    auto const set = [&](int kind, char const* text) {
        outcome.kind = kind;
        std::strncpy(outcome.text.data(), text, outcome.text.size() - 1);
    };
    try {
        std::rethrow_exception(error);
    } catch (joinable::PeerFailed const& failure) {
        set(MpiOutcome::other_failed, failure.what());
    } catch (std::exception const& failure) {
        set(MpiOutcome::failed, failure.what());
    } catch (...) {
        set(MpiOutcome::failed, "no std::exception");
    }
    return outcome;
}

/// All processes meet, and tell each other how they fared. None of them keeps a core busy meanwhile.
[[nodiscard]] inline std::vector<MpiOutcome> meet_mpi_world(MpiOutcome const& own) {
    std::vector<MpiOutcome> all(static_cast<std::size_t>(mpi_world_size()));
    MPI_Request request = MPI_REQUEST_NULL;
    constexpr int bytes = sizeof own;
    MPI_Iallgather(&own, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, MPI_COMM_WORLD, &request);
    for (int is_done = 0; is_done == 0;) {
        MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
        if (is_done == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds{100});
        }
    }
    return all;
}

/// Runs `body(group)` in the first `size` processes for each of these sizes, one after another, with a
/// communicator of MPI for them; sizes above the world are left out. All processes call it. If a body
/// throws, all throw PeerFailed, as the parent of process ranks does.
/// Inside a body there are groups of one alone.
inline void
run_mpi_groups(std::initializer_list<int> sizes, std::function<void(MPI_Comm)> const& body) {
    static bool is_inside = false;
    if (is_inside) {
        for (int const size : sizes) {
            if (size != 1) {
                throw std::logic_error{"inside a group of MPI ranks a test has groups of one alone"
                };
            }
            body(MPI_COMM_SELF);
        }
        return;
    }
    for (int const size : sizes) {
        if (size > mpi_world_size()) {
            continue;
        }
        Alarm const at_hang;
        bool const is_in = mpi_world_rank() < size;
        MPI_Comm group = MPI_COMM_NULL;
        MPI_Comm_split(MPI_COMM_WORLD, is_in ? 0 : MPI_UNDEFINED, mpi_world_rank(), &group);
        std::exception_ptr error;
        if (is_in) {
            is_inside = true;
            try {
                body(group);
            } catch (...) {
                error = std::current_exception();
            }
            is_inside = false;
            MPI_Comm_free(&group);
        }
        auto const all = meet_mpi_world(mpi_outcome(error));
        auto const worst =
            std::max_element(all.begin(), all.end(), [](auto const& a, auto const& b) {
                return a.kind < b.kind;
            });
        if (worst->kind != MpiOutcome::success) {
            int const rank = static_cast<int>(worst - all.begin());
            throw joinable::PeerFailed{
                {rank}, "rank " + std::to_string(rank) + " failed: " + worst->text.data()
            };
        }
    }
}

/// The same with a communicator of this library.
inline void run_mpi_ranks(
    std::initializer_list<int> sizes,
    FunctionRef<void(joinable::MpiCommunicator&)> body,
    joinable::MpiOptions const& options = {.deadline = std::chrono::seconds{60}},
    joinable::detail::MpiLimits limits = {}
) {
    run_mpi_groups(sizes, [&](MPI_Comm group) {
        joinable::MpiCommunicator comm{group, options, limits};
        body(comm);
    });
}

} // namespace joinable_tests
