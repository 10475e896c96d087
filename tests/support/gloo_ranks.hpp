// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <initializer_list>
#include <string>
#include <vector>

#include <support/folder.hpp>
#include <support/function_ref.hpp>
#include <support/named_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/gloo.hpp>

namespace joinable_tests {

/// A rank of a test, whose ranks meet by this file.
[[nodiscard]] inline joinable::GlooOptions gloo_options(
    int rank,
    int size,
    std::string const& path,
    std::chrono::nanoseconds deadline = std::chrono::seconds{60}
) {
    return {
        .rank = rank,
        .size = size,
        .store = joinable::GlooFile{path},
        .address = "127.0.0.1",
        .connect_timeout = std::chrono::seconds{60},
        .deadline = deadline
    };
}

/// Runs `body(comm)` over groups of these sizes, one after another; ranks are threads.
inline void run_gloo_ranks(
    std::initializer_list<int> sizes, FunctionRef<void(joinable::GlooCommunicator&)> body
) {
    for (int const size : sizes) {
        Folder const folder;
        run_in_threads(size, [&](int rank) {
            joinable::GlooCommunicator comm{gloo_options(rank, size, folder.file("ranks"))};
            body(comm);
        });
    }
}

/// Runs `body(comm)` in a process for each rank. Returns how each ended: 0, a signal, or -1.
template <class Body>
std::vector<int> run_gloo_processes(int size, Body const& body) {
    Folder const folder;
    Processes processes;
    for (int rank = 0; rank < size; ++rank) {
        processes.start([&] {
            joinable::GlooCommunicator comm{gloo_options(rank, size, folder.file("ranks"))};
            body(comm);
        });
    }
    std::vector<int> ends;
    for (int rank = 0; rank < size; ++rank) {
        ends.push_back(processes.wait());
    }
    return ends;
}

} // namespace joinable_tests
