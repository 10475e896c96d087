// SPDX-License-Identifier: BSL-1.0
// What a roll call by TCP costs over loopback, and beside it the least that it can: a message there and
// back between two threads that wait in poll() and receive.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <joinable/tcp.hpp>

namespace {

joinable::TcpOptions options_of(int rank, int size, std::uint16_t port) {
    joinable::TcpOptions options;
    options.rank = rank;
    options.size = size;
    options.job = "benchmark";
    options.address = "127.0.0.1";
    options.port = port;
    return options;
}

/// Arguments: ranks, 64-bit words.
void roll_call(benchmark::State& state) {
    int const size = static_cast<int>(state.range(0));
    std::vector<std::uint64_t> words(static_cast<std::size_t>(state.range(1)));
    auto const sum = [](joinable::TcpCommunicator& comm, std::vector<std::uint64_t>& of) {
        comm.all_reduce({of.data(), of.size(), joinable::DType::u64}, joinable::ReduceOp::sum)
            .wait();
    };
    joinable::TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    std::vector<std::jthread> threads;
    for (int rank = 1; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            auto comm = joinable::TcpCommunicator::attach(options_of(rank, size, port));
            std::vector<std::uint64_t> mine(words.size());
            while (mine[0] == 0) { // the first word is not 0 in the last roll call
                sum(comm, mine);
            }
        });
    }
    auto comm = joinable::TcpCommunicator::attach(std::move(listener), options_of(0, size, port));
    for (auto _ : state) {
        sum(comm, words);
    }
    words[0] = 1;
    sum(comm, words);
}
BENCHMARK(roll_call)
    ->ArgNames({"ranks", "words"})
    ->ArgsProduct({{2, 4}, {1, 7}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

/// Argument: bytes.
void there_and_back(benchmark::State& state) {
    using joinable::detail::Socket;
    std::vector<std::byte> message(static_cast<std::size_t>(state.range(0)));
    auto const end = std::chrono::steady_clock::now() + std::chrono::minutes{5};
    auto const receive = [&](Socket const& socket, std::span<std::byte> into) {
        joinable::detail::wait_for(socket, POLLIN, end);
        return joinable::detail::receive_all(socket, into, end);
    };
    Socket const server = joinable::detail::listen_at("127.0.0.1", 0);
    sockaddr_in at{};
    socklen_t size = sizeof at;
    ::getsockname(server.handle(), reinterpret_cast<sockaddr*>(&at), &size);
    std::jthread const other{[&] {
        Socket const socket = joinable::detail::connect_to("127.0.0.1", ntohs(at.sin_port), end, 1);
        std::vector<std::byte> mine(message.size());
        while (receive(socket, mine)) {
            (void)socket.send(mine);
        }
    }};
    joinable::detail::wait_for(server, POLLIN, end);
    Socket socket{::accept4(server.handle(), nullptr, nullptr, SOCK_NONBLOCK)};
    prepare_connection(socket);
    for (auto _ : state) {
        (void)socket.send(message);
        (void)receive(socket, message);
    }
}
BENCHMARK(there_and_back)->ArgName("bytes")->Arg(96)->UseRealTime()->Unit(benchmark::kMicrosecond);

} // namespace
