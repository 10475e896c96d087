// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>

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

/// Runs `body(comm)` in a thread for each rank; there is a listener for rank 0 alone.
template <class Body>
void run_tcp_threads(int size, Body const& body) {
    joinable::TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    run_in_threads(size, [&](int rank) {
        joinable::TcpOptions options = tcp_options(rank, size);
        options.port = port;
        auto comm = rank == 0 ? joinable::TcpCommunicator::attach(std::move(listener), options)
                              : joinable::TcpCommunicator::attach(options);
        body(comm);
    });
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
    void wait_for_all() { processes_.wait_for_all(); }

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
        processes.wait_for_all();
    }
}

/// Over threads, then over processes.
template <class Body>
void run_tcp_everywhere(std::initializer_list<int> sizes, Body const& body) {
    run_tcp_ranks(sizes, body);
    run_tcp_processes(sizes, body);
}

} // namespace joinable_tests
