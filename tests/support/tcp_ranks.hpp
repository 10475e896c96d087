// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <support/named_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/tcp.hpp>

namespace joinable_tests {

/// What the ranks of a test have in common; port 0 is told later.
inline joinable::TcpOptions
tcp_options(int rank, int size, std::chrono::nanoseconds deadline = std::chrono::seconds{60}) {
    joinable::TcpOptions options;
    options.rank = rank;
    options.size = size;
    options.job = "a test";
    options.address = "127.0.0.1";
    options.secret = "of the test";
    options.connect_timeout = deadline;
    options.deadline = deadline;
    return options;
}

/// Runs `body(rank, listener)` in a thread for each rank; there is a listener for rank 0 alone. Throws
/// what the first rank threw that did not throw because of another.
template <class Body>
void run_tcp_threads(int size, Body const& body) {
    Watchdog const watchdog{size};
    joinable::TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
    {
        std::vector<std::jthread> threads;
        for (int rank = 0; rank < size; ++rank) {
            threads.emplace_back([&, rank] {
                try {
                    joinable::TcpOptions options = tcp_options(rank, size);
                    options.port = port;
                    if (rank == 0) {
                        auto comm = joinable::TcpCommunicator::attach(std::move(listener), options);
                        body(comm);
                    } else {
                        auto comm = joinable::TcpCommunicator::attach(options);
                        body(comm);
                    }
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

/// Runs `body(comm)` over groups of these sizes, one after another; ranks are threads.
template <class Body>
void run_tcp_ranks(std::initializer_list<int> sizes, Body const& body) {
    for (int const size : sizes) {
        run_tcp_threads(size, body);
    }
}

/// A group of processes that connect to each other.
class TcpProcesses {
public:
    explicit TcpProcesses(
        int size, std::chrono::nanoseconds patience = joinable::TcpOptions{}.patience
    )
        : size_{size}, patience_{patience}, listener_{std::in_place, "127.0.0.1"} {
        port_ = listener_->port();
    }

    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

    /// Starts the next rank, which runs `body(comm)`.
    template <class Body>
    pid_t start(Body const& body) {
        int const rank = started_++;
        pid_t const process = processes_.start([&] {
            joinable::TcpOptions options = tcp_options(rank, size_, std::chrono::seconds{50});
            options.port = port_;
            options.patience = patience_;
            if (rank == 0) {
                auto comm = joinable::TcpCommunicator::attach(std::move(*listener_), options);
                body(comm);
            } else {
                listener_.reset(); // or connections wait here after rank 0 has ended
                auto comm = joinable::TcpCommunicator::attach(options);
                body(comm);
            }
        });
        if (started_ == size_) {
            listener_.reset();
        }
        return process;
    }
    /// As that of Processes.
    int wait() { return processes_.wait(); }

private:
    int size_;
    std::chrono::nanoseconds patience_;
    int started_ = 0;
    std::uint16_t port_ = 0;
    std::optional<joinable::TcpListener> listener_;
    Processes processes_;
};

/// The same over processes.
template <class Body>
void run_tcp_processes(std::initializer_list<int> sizes, Body const& body) {
    for (int const size : sizes) {
        TcpProcesses processes{size};
        for (int rank = 0; rank < size; ++rank) {
            processes.start(body);
        }
        for (int rank = 0; rank < size; ++rank) {
            if (int const how = processes.wait(); how != 0) {
                throw std::runtime_error{
                    "rank " + std::to_string(rank) + " of a group of processes ended with " +
                    std::to_string(how)
                };
            }
        }
    }
}

/// Over threads, then over processes.
template <class Body>
void run_tcp_everywhere(std::initializer_list<int> sizes, Body const& body) {
    run_tcp_ranks(sizes, body);
    run_tcp_processes(sizes, body);
}

} // namespace joinable_tests
