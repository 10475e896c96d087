// SPDX-License-Identifier: BSL-1.0
// How ranks that are connected by TCP find each other, and whom they turn away.
#include <joinable/communicator/tcp/detail/connect.hpp>
#include <joinable/communicator/tcp/detail/handshake_server.hpp>
#include <joinable/tcp.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/free_port.hpp>
#include <support/tcp_ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::ContractViolation;
using joinable::TcpCommunicator;
using joinable::TcpListener;
using joinable::TcpOptions;
using joinable::detail::Socket;
using joinable::detail::TcpJob;

/// Runs `rank_0(listener)` and, meanwhile, `other(port)`.
void run_beside(
    std::function<void(TcpListener)> const& rank_0, std::function<void(std::uint16_t)> const& other
) {
    Watchdog const watchdog{2};
    TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    std::jthread const thread{[&] { rank_0(std::move(listener)); }};
    other(port);
}

TcpOptions at_port(TcpOptions options, std::uint16_t port) {
    options.port = port;
    return options;
}
TcpOptions with_timeout(TcpOptions options, std::chrono::nanoseconds timeout) {
    options.connect_timeout = timeout;
    return options;
}

Socket raw_connection(std::uint16_t port) {
    return joinable::detail::connect_to(
        "127.0.0.1", port, std::chrono::steady_clock::now() + 30s, 1
    );
}
TcpJob test_job(int size) {
    TcpOptions const options = tcp_options(0, size);
    return {size, options.job, options.secret};
}
/// What rank 0 answers, up to the end of the connection.
std::string answer(Socket const& socket) {
    std::string text(4096, ' ');
    auto const bytes = std::as_writable_bytes(std::span{text});
    std::size_t size = 0;
    auto const end = std::chrono::steady_clock::now() + 30s;
    while (std::chrono::steady_clock::now() < end) {
        auto const got = socket.receive(bytes.subspan(size));
        if (!got) {
            break;
        }
        size += *got;
        if (*got == 0) {
            joinable::detail::wait_for(socket, POLLIN, end);
        }
    }
    text.resize(size);
    return text;
}
void send_all(Socket const& socket, std::span<std::byte const> bytes) {
    REQUIRE(socket.send(bytes) == bytes.size());
}

/// A job of two ranks: `stranger(port)` runs before rank 1 comes, and both must meet all the same.
void meet_despite(std::function<void(std::uint16_t)> const& stranger) {
    auto const work = [](TcpCommunicator& comm) {
        std::int32_t value = comm.rank() + 1;
        comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
        CHECK(value == 3);
    };
    run_beside(
        [&](TcpListener listener) {
            auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 2));
            work(comm);
        },
        [&](std::uint16_t port) {
            stranger(port);
            auto comm = TcpCommunicator::attach(at_port(tcp_options(1, 2), port));
            work(comm);
        }
    );
}

TEST_CASE("strangers that send garbage, nothing or too little keep nobody out") {
    meet_despite([](std::uint16_t port) {
        Socket const web = raw_connection(port);
        send_all(web, std::as_bytes(std::span{std::string_view{"GET / HTTP/1.1\r\n\r\n"}}));
        CHECK(answer(web).empty());

        std::vector<std::byte> huge = joinable::detail::hello_of(1, test_job(2));
        std::memset(huge.data() + 24, 0xff, 8); // the lengths of job and secret
        Socket const greedy = raw_connection(port);
        send_all(greedy, huge);
        CHECK(answer(greedy).empty());
        {
            Socket const gone = raw_connection(port);
        }
    });
    std::vector<Socket> silent; // they stay
    meet_despite([&](std::uint16_t port) {
        for (int i = 0; i < 300; ++i) { // more than are heard at a time
            silent.push_back(raw_connection(port));
            if (i % 2 == 0) {
                auto const hello = joinable::detail::hello_of(1, test_job(2));
                send_all(silent.back(), std::span{hello}.first(static_cast<std::size_t>(i % 40)));
            }
        }
    });
}

TEST_CASE("a stranger that is refused and sends on is heard piece by piece, between the others") {
    Watchdog const watchdog{2};
    Socket listener = joinable::detail::listen_at("127.0.0.1", 0);
    Socket const stranger = raw_connection(port_of(listener));
    joinable::detail::HandshakeServer server{std::move(listener), test_job(2), 5s};
    auto const poll = [&] {
        server.poll(
            [](int rank) { return rank == 0; }, [](int, Socket const&) { FAIL("is none"); }
        );
    };
    auto hello = joinable::detail::hello_of(1, test_job(2));
    hello[8] ^= std::byte{1}; // the version of the protocol: what follows may be anything
    send_all(stranger, std::span{hello}.first(12));
    std::vector<std::byte> told(4096);
    wait_until([&] {
        poll();
        return stranger.receive(told).value_or(0) != 0;
    });
    std::vector<pollfd> polled;
    server.poll(polled);
    REQUIRE(polled.size() == 2); // the listener, too
    auto const unread = [&] {
        int bytes = 0;
        REQUIRE(::ioctl(polled.back().fd, FIONREAD, &bytes) == 0);
        return bytes;
    };
    send_all(stranger, std::vector<std::byte>(10'000));
    wait_until([&] { return unread() == 10'000; });
    poll(); // once it read all that came, for ever if that never ended
    CHECK(unread() > 0);
    wait_until([&] {
        poll();
        return unread() == 0;
    });
}

TEST_CASE("where rank 0 has hardly a file left, strangers that stay silent keep nobody out") {
    TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    std::vector<Socket> silent; // they stay, and have come before any rank
    for (int i = 0; i < 400; ++i) {
        silent.push_back(raw_connection(port));
    }
    Processes processes;
    processes.start([&] {
        silent.clear(); // of which this process has copies
        // The two ends of the connection of rank 0 to itself, two strangers or ranks, and no more.
        int const next = ::dup(0);
        rlimit const few{static_cast<rlim_t>(next) + 4, static_cast<rlim_t>(next) + 4};
        ::close(next);
        REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
        auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 3, 5s));
        comm.barrier();
    });
    for (int const rank : {1, 2}) {
        processes.start([&] {
            silent.clear();
            auto comm = TcpCommunicator::attach(at_port(tcp_options(rank, 3, 5s), port));
            comm.barrier();
        });
    }
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
}

/// From now on this process may have so many files open.
void allow_files(rlim_t most) {
    rlimit const limit{most, most};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/// Opens the standard input until so many files of this process are left.
void leave_files(int left) {
    std::vector<int> last;
    for (int file = ::dup(0); file >= 0; file = ::dup(0)) {
        last.push_back(file);
    }
    REQUIRE(last.size() >= static_cast<std::size_t>(left));
    for (; left > 0; --left, last.pop_back()) {
        ::close(last.back());
    }
}

TEST_CASE(
    "a rank 0 that may not open a file for each rank says so at once" *
    doctest::skip(under_sanitizer) // which opens files itself
) {
    Processes processes;
    processes.start([] {
        rlimit limit{};
        REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
        allow_files(std::min<rlim_t>(limit.rlim_max, 64));
        auto const start = std::chrono::steady_clock::now();
        leave_files(23); // its listener, two ends of its own connection, and 20 more
        for (int const size : {22, 100}) {
            std::string text;
            try {
                TcpCommunicator::attach(TcpListener{"127.0.0.1"}, tcp_options(0, size));
            } catch (joinable::CommunicationError const& error) {
                text = error.what();
            }
            CHECK(
                text == "rank 0 needs an open file for each of " + std::to_string(size - 1) +
                            " other ranks, but its process may open only 20 more (64 in all): "
                            "raise that limit (ulimit -n)"
            );
        }
        CHECK_THROWS_AS( // 20 are enough for 20 other ranks
            TcpCommunicator::attach(TcpListener{"127.0.0.1"}, tcp_options(0, 21, 200ms)),
            joinable::TimedOut
        );
        CHECK(std::chrono::steady_clock::now() - start < 30s); // of a deadline of 60
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE("beside nearly as many ranks as files, strangers keep no core of rank 0 busy") {
    TcpListener listener{"127.0.0.1"};
    std::vector<Socket> silent;
    for (int i = 0; i < 16; ++i) {
        silent.push_back(raw_connection(listener.port()));
    }
    Processes processes;
    processes.start([&] {
        silent.clear(); // of which this process has copies
        allow_files(64);
        leave_files(2 + 39 + 2); // two ends of its own connection, 39 ranks, two strangers
        try {
            TcpCommunicator::attach(std::move(listener), tcp_options(0, 40, 200ms));
            CHECK(false);
        } catch (joinable::TimedOut const& error) {
            CHECK(error.missing().size() == 39);
        }
        CHECK(std::clock() < CLOCKS_PER_SEC / 2); // of the 5 s for which strangers are heard
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE(
    "a rank 0 that has no file left for a rank says so, not that the rank did not come" *
    doctest::skip(under_sanitizer) // which opens files itself
) {
    Processes processes;
    processes.start([] {
        allow_files(64);
        TcpListener listener{"127.0.0.1"};
        sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        at.sin_port = htons(listener.port());
        bool is_full = false;
        auto const fill = [&]() -> std::optional<joinable::AbortReason> {
            if (!std::exchange(is_full, true)) { // rank 0 waits: it has passed the check of its hub
                int const late = ::socket(AF_INET, SOCK_STREAM, 0);
                leave_files(0);
                CHECK(::connect(late, reinterpret_cast<sockaddr const*>(&at), sizeof at) == 0);
            }
            return std::nullopt;
        };
        std::string text;
        try {
            joinable::detail::TcpEnd const end{
                tcp_options(0, 4, 100ms), std::move(listener), {.hear = fill}
            };
        } catch (joinable::TimedOut const& error) {
            text = error.what();
        }
        CHECK(
            text == "rank 0 could not accept the connections of ranks 1, 2 and 3 within 0.1 s: too "
                    "many open files: raise its limit of them (ulimit -n)"
        );
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE(
    "a rank that has no file left for its connection, or to look up a name, says so at once" *
    doctest::skip(under_sanitizer) // which opens files itself
) {
    for (std::string const address : {"127.0.0.1", "rank-0.invalid"}) {
        Processes processes;
        processes.start([&] {
            allow_files(64);
            TcpListener const listener{"127.0.0.1"};
            auto const start = std::chrono::steady_clock::now();
            leave_files(0);
            TcpOptions options = at_port(tcp_options(3, 4), listener.port());
            options.address = address;
            std::string text;
            try {
                TcpCommunicator::attach(options);
            } catch (joinable::CommunicationError const& error) {
                text = error.what();
            }
            CHECK(
                text == "rank 3 cannot connect to rank 0: Too many open files: raise its limit of "
                        "open files (ulimit -n)"
            );
            CHECK(std::chrono::steady_clock::now() - start < 20s);
        });
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("a rank that is connected, but never answered, says what may be there") {
    TcpListener const silent{"127.0.0.1"};
    auto const end = std::chrono::steady_clock::now() + 100ms;
    CHECK_THROWS_WITH_AS(
        (void)joinable::detail::connect_rank(1, test_job(2), "127.0.0.1", silent.port(), end),
        doctest::Contains(
            " in time, while rank 1 is connected: it has not attached yet, is stopped, or has no "
            "open file left for this rank; or another program listens there"
        ),
        joinable::TimedOut
    );
}

TEST_CASE("a rank 0 that the system lets no longer wait ends all ranks with the reason") {
    if (under_sanitizer) {
        std::puts("skipped: where no file is left, a sanitizer cannot look at an exception");
        return;
    }
    TcpProcesses processes{4};
    for (int rank = 0; rank < 4; ++rank) {
        processes.start([](TcpCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == 0) {
                rlimit limit{};
                REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
                limit.rlim_cur = 3; // fewer than the connections that are open
                REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
            }
            try {
                for (;;) { // the hub waits again after each
                    comm.barrier();
                }
            } catch (joinable::CommunicationError const& error) {
                std::string const text = error.what();
                CHECK(text == "rank 0 cannot wait for the other ranks: Invalid argument");
            }
        });
    }
    for (int rank = 0; rank < 4; ++rank) {
        CHECK(processes.wait() == 0);
    }
}

TEST_CASE("a rank whose first words come one by one is taken in") {
    run_beside(
        [](TcpListener listener) {
            auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 2));
            CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
        },
        [](std::uint16_t port) {
            Socket const socket = raw_connection(port);
            for (std::byte const byte : joinable::detail::hello_of(1, test_job(2))) {
                send_all(socket, {&byte, 1});
                std::this_thread::yield();
            }
            joinable::detail::Greeting greeting;
            CHECK(joinable::detail::receive_all(
                socket,
                std::as_writable_bytes(std::span{&greeting, 1}),
                std::chrono::steady_clock::now() + 30s
            ));
            CHECK(greeting.verdict == joinable::detail::Greeting::Verdict::welcome);
        }
    );
}

TEST_CASE("a process that does not belong to the job is told why, and the job goes on") {
    meet_despite([](std::uint16_t port) {
        auto const refused = [&](TcpOptions const& options, std::string const& text) {
            CHECK_THROWS_WITH_AS(
                TcpCommunicator::attach(at_port(options, port)),
                text.c_str(),
                joinable::ContractViolation
            );
        };
        TcpOptions options = tcp_options(1, 2);
        options.secret = "of the tesT";
        std::string const secret =
            "expected the secret that rank 0 has, but this rank has another one: give all ranks of "
            "a job the same JOINABLE_SECRET";
        refused(options, secret);
        options.secret = "";
        refused(options, secret);
        options = tcp_options(1, 2);
        options.job = "another job";
        refused(
            options,
            "expected a rank of job \"a test\", for which rank 0 listens here, but this is one of "
            "job \"another job\": give each job that runs at the same time another port"
        );
        refused(
            tcp_options(1, 3),
            "expected a group of 2 ranks, as rank 0 says, but this rank says 3: start all ranks of "
            "a job with the same world size"
        );
        auto const told = [&](std::vector<std::byte> const& hello) {
            Socket const socket = raw_connection(port);
            send_all(socket, hello);
            return answer(socket);
        };
        CHECK(
            told(joinable::detail::hello_of(0, test_job(2)))
                .ends_with("expected no other rank 0 of this job, but there is one: give each rank "
                           "its number")
        );
        CHECK(
            told(joinable::detail::hello_of(-1, test_job(2)))
                .ends_with("expected a rank from 0 to below the world size, which is at most 8192, "
                           "but was given rank -1 of 2")
        );
        auto hello = joinable::detail::hello_of(1, test_job(2));
        hello[12] ^= std::byte{1}; // the version of the library
        CHECK(
            told(hello).find("build the programs of all ranks with the same version") !=
            std::string::npos
        );
        hello = joinable::detail::hello_of(1, test_job(2));
        hello[8] ^= std::byte{1}; // the version of the protocol: what follows may be anything
        CHECK(
            told(hello).find("build the programs of all ranks with the same version") !=
            std::string::npos
        );
    });
}

TEST_CASE("a rank that is there twice is told so, and the first one stays") {
    std::atomic<bool> is_refused{false};
    Watchdog const watchdog{3};
    TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    auto const attach = [&](int rank) {
        auto comm = TcpCommunicator::attach(at_port(tcp_options(rank, 3), port));
        comm.barrier();
    };
    std::jthread const rank_0{[&] {
        auto comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 3));
        comm.barrier();
    }};
    auto const one_of_two = [&] { // whichever comes second
        try {
            attach(1);
        } catch (joinable::ContractViolation const& error) {
            CHECK(std::string{error.what()}.starts_with("expected no other rank 1 of this job"));
            CHECK(!is_refused.exchange(true));
        }
    };
    std::jthread const first{one_of_two};
    std::jthread const second{one_of_two};
    while (!is_refused) {
        std::this_thread::yield();
    }
    attach(2);
}

TEST_CASE("ranks that do not come are named on all that wait for them") {
    together({1, 2}, [](int missing) {
        int const present = 3 - missing;
        auto const times_out = [&](auto const& attach) {
            try {
                attach();
                FAIL_CHECK("no exception");
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{missing});
                CHECK(
                    std::string{error.what()}.find(
                        "rank " + std::to_string(missing) + " did not connect within "
                    ) == 0
                );
            }
        };
        run_beside(
            [&](TcpListener listener) {
                times_out([&] {
                    TcpCommunicator::attach(
                        std::move(listener),
                        with_timeout(tcp_options(0, 3), missing == 1 ? 5s : 60s)
                    );
                });
            },
            [&](std::uint16_t port) {
                times_out([&] { // whichever has less patience
                    TcpCommunicator::attach(with_timeout(
                        at_port(tcp_options(present, 3), port), missing == 1 ? 60s : 5s
                    ));
                });
            }
        );
    });
}

TEST_CASE("a rank 0 that does not answer is that of a group where a group meets beside a transport"
) {
    FreePort const nowhere;
    TcpListener const silent{"127.0.0.1"};
    for (bool const is_renumbered : {false, true}) {
        for (std::uint16_t const port : {nowhere.number(), silent.port()}) {
            auto const options = with_timeout(at_port(tcp_options(1, 2), port), 100ms);
            try {
                joinable::detail::TcpEnd const end{
                    options, std::nullopt, {.is_renumbered = is_renumbered}
                };
                FAIL_CHECK("no exception");
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{0});
                CHECK(error.is_renumbered() == is_renumbered);
            }
        }
    }
}

TEST_CASE("a rank 0 that never listens is named, and one that listens late is found") {
    FreePort const free;
    std::uint16_t const port = free.number();
    Watchdog const watchdog{2};
    try {
        TcpCommunicator::attach(with_timeout(at_port(tcp_options(1, 2), port), 200ms));
        FAIL_CHECK("no exception");
    } catch (joinable::TimedOut const& error) {
        CHECK(error.missing() == std::vector{0});
        CHECK(std::string{error.what()}.find("rank 0 did not listen at 127.0.0.1:") == 0);
    }
    std::jthread const rank_1{[&] {
        TcpCommunicator::attach(at_port(tcp_options(1, 2), port)).barrier();
    }};
    std::this_thread::sleep_for(50ms); // most likely it has tried meanwhile; nothing depends on it
    TcpCommunicator::attach(at_port(tcp_options(0, 2), port)).barrier();
}

TEST_CASE("another program at the port is not taken for rank 0") {
    Watchdog const watchdog{2};
    Socket const server = joinable::detail::listen_at("127.0.0.1", 0);
    std::uint16_t const port = port_of(server);
    {
        std::jthread const talks{[&] {
            joinable::detail::wait_for(server, POLLIN, std::chrono::steady_clock::now() + 30s);
            Socket const client{::accept4(server.handle(), nullptr, nullptr, SOCK_CLOEXEC)};
            send_all(
                client, std::as_bytes(std::span{std::string_view{"220 mail.example ready\r\n"}})
            );
        }};
        CHECK_THROWS_AS(
            TcpCommunicator::attach(at_port(tcp_options(1, 2), port)), joinable::CommunicationError
        );
    }
    try { // one that says nothing
        TcpCommunicator::attach(with_timeout(at_port(tcp_options(1, 2), port), 300ms));
        FAIL_CHECK("no exception");
    } catch (joinable::TimedOut const& error) {
        CHECK(error.missing() == std::vector{0});
    }
}

/// The ranks that have not come, as the connection of a rank learns of them.
std::vector<int> missing_at_meeting(Socket const& socket) {
    joinable::detail::FrameHeader header;
    header.kind = joinable::detail::FrameKind::question;
    header.sequence = joinable::detail::meeting;
    send_all(socket, joinable::detail::bytes_of(header));
    auto const end = std::chrono::steady_clock::now() + 30s;
    auto const into = std::as_writable_bytes(std::span{&header, 1});
    REQUIRE(joinable::detail::receive_all(socket, into, end));
    std::vector<int> ranks(header.bytes / sizeof(int));
    REQUIRE(joinable::detail::receive_all(socket, std::as_writable_bytes(std::span{ranks}), end));
    return ranks;
}

/// What happens when a hub of two ranks finds, all at once, that rank 0 has said `said` and that rank 1
/// has connected before: returns what rank 1 is told after its welcome, and rank 0.
std::pair<joinable::detail::FrameKind, joinable::detail::FrameKind>
told_by_hub(std::vector<std::byte> const& said) {
    Watchdog const watchdog{2};
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    Socket rank_0{ends[0]};
    send_all(rank_0, said);
    Socket listener = joinable::detail::listen_at("127.0.0.1", 0);
    Socket const rank_1 = raw_connection(port_of(listener));
    send_all(rank_1, joinable::detail::hello_of(1, test_job(2)));
    joinable::detail::Hub hub{std::move(listener), Socket{ends[1]}, test_job(2)};
    std::jthread const thread{[&] { hub.run(); }};
    auto const next = [](Socket const& socket, auto& into) {
        auto const end = std::chrono::steady_clock::now() + 30s;
        auto const bytes = std::as_writable_bytes(std::span{&into, 1});
        CHECK(joinable::detail::receive_all(socket, bytes, end));
    };
    joinable::detail::Greeting greeting;
    next(rank_1, greeting);
    joinable::detail::FrameHeader told_1;
    next(rank_1, told_1);
    joinable::detail::FrameHeader told_0;
    next(rank_0, told_0);
    rank_0.close(); // so the hub ends
    return {told_1.kind, told_0.kind};
}

std::vector<std::byte> joined(std::initializer_list<std::span<std::byte const>> parts) {
    std::vector<std::byte> all;
    for (auto const part : parts) {
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

TEST_CASE("a rank that has connected before rank 0 leaves is told why all ends") {
    using joinable::detail::FrameKind;
    auto const reason =
        joinable::detail::packed({joinable::FailureKind::mismatch, {0}, "no such model"});
    joinable::detail::FrameHeader abort;
    abort.kind = FrameKind::abort;
    abort.bytes = reason.size();
    joinable::detail::FrameHeader leave;
    leave.kind = FrameKind::leave;
    auto const said =
        joined({joinable::detail::bytes_of(abort), reason, joinable::detail::bytes_of(leave)});
    CHECK(told_by_hub(said) == std::pair{FrameKind::end, FrameKind::end});
}

TEST_CASE("a rank that has connected before somebody's time is over is not missing") {
    using joinable::detail::FrameKind;
    joinable::detail::FrameHeader overdue;
    overdue.kind = FrameKind::overdue;
    overdue.sequence = joinable::detail::meeting;
    overdue.count = 1;
    auto const said = joined({joinable::detail::bytes_of(overdue)});
    CHECK(told_by_hub(said) == std::pair{FrameKind::start, FrameKind::start});
}

TEST_CASE("a rank that dies before all have come fails those that are there") {
    Watchdog const watchdog{3};
    TcpListener listener{"127.0.0.1"};
    std::uint16_t const port = listener.port();
    auto const fails = [](auto const& attach) {
        try {
            attach();
            FAIL_CHECK("no exception");
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.ranks() == std::vector{1});
        }
    };
    std::jthread const rank_0{[&] {
        fails([&] { TcpCommunicator::attach(std::move(listener), tcp_options(0, 4)); });
    }};
    std::jthread const rank_2{[&] {
        fails([&] { TcpCommunicator::attach(at_port(tcp_options(2, 4), port)); });
    }};
    Socket rank_1 = joinable::detail::connect_rank(
        1, test_job(4), "127.0.0.1", port, std::chrono::steady_clock::now() + 30s
    );
    while (missing_at_meeting(rank_1) != std::vector{3}) {
        std::this_thread::yield();
    }
    rank_1.close();
}

TEST_CASE("addresses may be names, of IPv6, or of all interfaces") {
    bool const has_names = joinable::detail::Resolved{"localhost", 1, 0}.first() != nullptr;
    for (std::string const name : {"localhost", "::1", "::", "0.0.0.0", "any name"}) {
        if (name.front() == ':' && !Socket{::socket(AF_INET6, SOCK_STREAM, 0)}.is_open()) {
            MESSAGE("skipped: there is no IPv6 here");
            continue;
        }
        if (name == "localhost" && !has_names) {
            MESSAGE("skipped: nothing here knows the name localhost");
            continue;
        }
        CAPTURE(name);
        Watchdog const watchdog{2};
        TcpListener listener{name};
        TcpOptions options = tcp_options(1, 2);
        options.port = listener.port();
        options.address = name == "::1" ? "::1" : has_names ? "localhost" : "127.0.0.1";
        std::jthread const rank_0{[&] {
            TcpCommunicator::attach(std::move(listener), tcp_options(0, 2)).barrier();
        }};
        TcpCommunicator::attach(options).barrier();
    }
    TcpOptions options = tcp_options(1, 2);
    options.address = "no such machine.invalid";
    options.port = 1;
    CHECK_THROWS_AS(TcpCommunicator::attach(with_timeout(options, 50ms)), joinable::TimedOut);
}

TEST_CASE("the port is free once all have come, although a process that was forked before lives on"
) {
    FreePort const free; // which no other process takes meanwhile
    TcpListener listener{"127.0.0.1", free.number()};
    pid_t const helper = ::fork();
    if (helper == 0) {
        ::alarm(60);
        for (;;) {
            ::pause();
        }
    }
    TcpCommunicator comm = TcpCommunicator::attach(std::move(listener), tcp_options(0, 1));
    comm.barrier();
    CHECK_NOTHROW(TcpListener("127.0.0.1", free.number()));
    ::kill(helper, SIGKILL);
    ::waitpid(helper, nullptr, 0);
}

TEST_CASE("a process that may open no more files is told so, where rank 0 would listen") {
    pid_t const process = ::fork();
    if (process == 0) {
        int const next = ::dup(0);
        ::close(next);
        rlimit limit{};
        ::getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = static_cast<rlim_t>(next);
        ::setrlimit(RLIMIT_NOFILE, &limit);
        std::string text;
        try {
            TcpListener const listener{"127.0.0.1"};
        } catch (joinable::CommunicationError const& error) {
            limit.rlim_cur =
                limit.rlim_max; // the sanitizer opens a pipe to look at an object's type
            ::setrlimit(RLIMIT_NOFILE, &limit);
            text = error.what();
        }
        ::_exit(
            text.starts_with("rank 0 cannot listen at 127.0.0.1:0: Too many open files") ? 0 : 1
        );
    }
    int status = 0;
    ::waitpid(process, &status, 0);
    CHECK(status == 0);
}

TEST_CASE("a port that is in use, and ranks that are none, are refused at once") {
    TcpListener const taken{"127.0.0.1"};
    try {
        TcpListener const again{"127.0.0.1", taken.port()};
        FAIL_CHECK("no exception");
    } catch (joinable::CommunicationError const& error) {
        CHECK(
            std::string{error.what()}.find(
                "rank 0 cannot listen at 127.0.0.1:" + std::to_string(taken.port()) +
                ": Address already in use"
            ) == 0
        );
    }
    for (auto const& [rank, size] : {std::pair{-1, 2}, {2, 2}, {0, 0}, {0, 100'000}}) {
        CHECK_THROWS_AS(
            TcpCommunicator::attach(tcp_options(rank, size)), joinable::ContractViolation
        );
    }
    CHECK_THROWS_AS(
        TcpCommunicator::attach(TcpListener{"127.0.0.1"}, tcp_options(1, 2)),
        joinable::ContractViolation
    );
    TcpOptions options = tcp_options(1, 2);
    options.secret.assign(1025, 'x');
    CHECK_THROWS_AS(TcpCommunicator::attach(options), joinable::ContractViolation);
}

using Variables = std::map<std::string_view, char const*>;

TcpOptions read(Variables const& variables) {
    return joinable::tcp_environment([&](char const* name) {
        auto const found = variables.find(name);
        return found == variables.end() ? nullptr : found->second;
    });
}
Variables changed(Variables variables, char const* name, char const* value) {
    variables[name] = value;
    return variables;
}

TEST_CASE("rank, job and the place of rank 0 come from what a launcher sets") {
    Variables const torchrun{
        {"RANK", "3"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_ADDR", "node7"},
        {"MASTER_PORT", "29500"},
        {"TORCHELASTIC_RUN_ID", "none"},
        {"JOINABLE_SECRET", "s"},
    };
    TcpOptions const options = read(torchrun);
    CHECK(options.rank == 3);
    CHECK(options.size == 4);
    CHECK(options.job == "torchrun/node7/29500/none");
    CHECK(options.address == "node7");
    CHECK(options.port == 29500);
    CHECK(options.secret == "s");
    CHECK(read(changed(torchrun, "JOINABLE_ADDR", "10.0.0.1")).address == "10.0.0.1");
    CHECK(read(changed(torchrun, "JOINABLE_PORT", "5")).port == 5);
    for (char const* const port : {"0", "65536", "-1", "29500x", " 1"}) {
        CHECK_THROWS_AS(
            (void)read(changed(torchrun, "MASTER_PORT", port)), joinable::ContractViolation
        );
    }
    CHECK_THROWS_WITH_AS(
        (void)read(changed(torchrun, "JOINABLE_SECRET", "")),
        "expected a text that nobody else knows, as openssl rand -hex 16 makes one, in "
        "JOINABLE_SECRET, but it is not set; set it on all ranks of the job",
        joinable::ContractViolation
    );
    Variables const open_mpi{
        {"OMPI_COMM_WORLD_RANK", "2"},
        {"OMPI_COMM_WORLD_SIZE", "3"},
        {"PMIX_NAMESPACE", "15"},
        {"JOINABLE_SECRET", "s"},
    };
    CHECK_THROWS_WITH_AS(
        (void)read(open_mpi),
        "expected the machine of rank 0 in MASTER_ADDR, but it is not set; set it on all ranks of "
        "the job",
        joinable::ContractViolation
    );
}

TEST_CASE("ranks do not meet at the port where torchrun itself listens") {
    Variables torchrun{
        {"RANK", "0"},
        {"WORLD_SIZE", "2"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", "29500"},
        {"TORCHELASTIC_RUN_ID", "none"},
        {"TORCHELASTIC_USE_AGENT_STORE", "True"},
        {"JOINABLE_SECRET", "s"},
    };
    for (char const* const rank : {"0", "1"}) {
        torchrun["RANK"] = rank;
        CHECK_THROWS_WITH_AS(
            (void)read(torchrun),
            "MASTER_PORT is that of torchrun's own store: set JOINABLE_PORT to a free port of "
            "rank 0's machine, on all ranks",
            ContractViolation
        );
    }
    CHECK(read(changed(torchrun, "JOINABLE_PORT", "5")).port == 5);
    CHECK(read(changed(torchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).port == 29500);
}

TEST_CASE("processes meet by their environment alone") {
    FreePort const free;
    std::string const port = std::to_string(free.number());
    Processes processes;
    for (int rank = 0; rank < 3; ++rank) {
        processes.start([&] {
            for (auto const& [name, value] : std::map<std::string, std::string>{
                     {"JOINABLE_RANK", std::to_string(rank)},
                     {"JOINABLE_WORLD_SIZE", "3"},
                     {"JOINABLE_JOB", "by environment"},
                     {"JOINABLE_SECRET", "of the test"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", port},
                 }) {
                ::setenv(name.c_str(), value.c_str(), 1);
            }
            auto comm = TcpCommunicator::from_environment(50s);
            CHECK(comm.rank() == rank);
            CHECK(comm.set_deadline(50s) == 50s);
            std::int32_t value = rank;
            comm.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
            CHECK(value == 3);
        });
    }
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
}

} // namespace
