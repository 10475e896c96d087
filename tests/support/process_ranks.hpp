// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include <support/failed_checks.hpp>
#include <support/hang.hpp>
#include <support/named_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/shared_memory/run_processes.hpp>

namespace joinable_tests {

/// Whether libraries of this program have threads that its ranks need not, as MPI has. Set by its main().
inline bool has_threads_of_libraries = false;

/// Runs `body(comm)` over groups of processes of these sizes, one after another. A CHECK that fails
/// in one of them is printed by it, and PeerFailed here.
template <class Body>
void run_process_ranks(
    std::initializer_list<int> sizes, Body const& body, joinable::ProcessOptions options = {}
) {
    options.other_threads = options.other_threads || has_threads_of_libraries;
    for (int const size : groups_of_processes(sizes)) {
        Alarm const at_hang;
        Shared<std::atomic<int>> const failed;
        auto const of_rank = [&](joinable::ProcessCommunicator& comm) {
            comm.set_deadline(std::chrono::seconds{60});
            failed_checks = 0;
            auto const report = [&] {
                if (failed_checks != 0) {
                    *failed += failed_checks;
                    throw std::logic_error{std::to_string(failed_checks) + " checks failed"};
                }
            };
            try {
                body(comm);
            } catch (...) {
                report();
                throw;
            }
            report();
        };
        try {
            joinable::run_processes(size, of_rank, options);
        } catch (joinable::PeerFailed const& error) {
            // Another rank may be the first that failed, and the test may expect that.
            if (*failed != 0 &&
                std::string{error.what()}.find("checks failed") == std::string::npos) {
                throw std::logic_error{
                    std::to_string(*failed) + " checks failed, beside: " + error.what()
                };
            }
            throw;
        }
    }
}

/// The same body over threads, then over processes, then over processes that meet by a name.
template <class Body>
void run_all_ranks(std::initializer_list<int> sizes, Body const& body) {
    run_ranks(sizes, body);
    run_process_ranks(sizes, body);
    run_named_ranks(sizes, body);
}

/// Three rounds of collectives of two sizes, some in flight together. Calls `step` before each.
template <class Step>
void run_collectives(joinable::ProcessCommunicator& comm, Step const& step) {
    std::array<std::vector<float>, 3> buffers;
    for (int round = 0; round < 3; ++round) {
        std::vector<joinable::ProcessWork> works;
        for (std::size_t k = 0; k < buffers.size(); ++k) {
            step();
            buffers[k].assign(k == 1 ? 100'000 : 3, 1.0F);
            works.push_back(comm.all_reduce(
                {buffers[k].data(), buffers[k].size(), joinable::DType::f32},
                joinable::ReduceOp::sum
            ));
        }
        step();
        for (joinable::ProcessWork& work : works) {
            work.wait();
        }
    }
    comm.barrier();
}

} // namespace joinable_tests
