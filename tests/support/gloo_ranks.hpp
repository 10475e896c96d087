// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <string>
#include <thread>
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

/// Runs `body(comm)` over groups of these sizes, one after another; ranks are threads. Throws what the
/// first rank threw that did not throw because of another.
inline void run_gloo_ranks(
    std::initializer_list<int> sizes, FunctionRef<void(joinable::GlooCommunicator&)> body
) {
    for (int const size : sizes) {
        Watchdog const watchdog{size};
        Folder const folder;
        std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
        {
            std::vector<std::jthread> threads;
            for (int rank = 0; rank < size; ++rank) {
                threads.emplace_back([&, rank] {
                    try {
                        joinable::GlooCommunicator comm{
                            gloo_options(rank, size, folder.file("ranks"))
                        };
                        body(comm);
                    } catch (...) {
                        errors[static_cast<std::size_t>(rank)] = std::current_exception();
                    }
                });
            }
        }
        if (auto const error = joinable::detail::original(errors, {}, -1)) {
            std::rethrow_exception(error);
        }
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
