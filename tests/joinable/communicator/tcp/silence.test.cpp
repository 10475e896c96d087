// SPDX-License-Identifier: BSL-1.0
// When a machine counts as lost by TCP: what it acknowledges decides, not whether its program reads.
#include <joinable/tcp.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/free_port.hpp>
#include <support/ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/tcp/detail/address.hpp>
#include <joinable/communicator/tcp/detail/connect.hpp>
#include <joinable/communicator/tcp/detail/hub.hpp>
#include <joinable/communicator/tcp/detail/rank.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::detail::SilenceWatch;
using joinable::detail::Socket;
using Clock = std::chrono::steady_clock;

/// From now on nothing that is sent to this end arrives, as if its machine were out of reach.
void cut_off(int handle) {
    sock_filter nothing[] = {{BPF_RET | BPF_K, 0, 0, 0}};
    sock_fprog const program{1, nothing};
    REQUIRE(::setsockopt(handle, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0);
}
void mend(int handle) {
    int unused = 0;
    REQUIRE(::setsockopt(handle, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused) == 0);
}

TEST_CASE("a process that is forked while a connection is made does not keep it") {
    std::atomic<int> handle{-1};
    std::thread forks;
    int status = -1;
    Socket const made = Socket::of_this_process([&] {
        handle = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        forks = std::thread{[&] {
            pid_t const child = ::fork();
            if (child == 0) {
                ::_exit(::fcntl(handle, F_GETFD) < 0 ? 0 : 1);
            }
            ::waitpid(child, &status, 0);
        }};
        std::this_thread::sleep_for(50ms); // long enough for a fork that does not wait
        return handle.load();
    });
    forks.join();
    CHECK(status == 0);
}

/// Two ends of a connection over the loopback.
struct Connection {
    Connection() {
        Socket const listener = joinable::detail::listen_at("127.0.0.1", 0);
        near = joinable::detail::connect_to("127.0.0.1", port_of(listener), Clock::now() + 30s, 1);
        far = Socket{::accept4(listener.handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)};
        REQUIRE(far.is_open());
        prepare_connection(far);
    }

    Socket near;
    Socket far;
};
/// Sends until the kernel takes no more.
void fill(Socket const& socket) {
    std::vector<std::byte> const bytes(65'536);
    for (int pauses = 0; pauses < 5;) {
        if (socket.send(bytes) == 0U) {
            ++pauses;
            std::this_thread::sleep_for(2ms);
        }
    }
}
/// How long it takes until the watch calls the machine of the other end lost, or `most`.
Clock::duration time_to_loss(Socket const& socket, SilenceWatch watch, Clock::duration most) {
    auto const start = Clock::now();
    while (Clock::now() - start < most && !watch.is_lost(socket, Clock::now())) {
        std::this_thread::sleep_for(1ms);
    }
    return Clock::now() - start;
}

TEST_CASE("no timer of the kernel ends a connection to a machine that acknowledges") {
    Connection const ends;
    for (Socket const* const end : {&ends.near, &ends.far}) {
        unsigned milliseconds = 1;
        socklen_t size = sizeof milliseconds;
        REQUIRE(
            ::getsockopt(end->handle(), IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, &size) == 0
        );
        CHECK(milliseconds == 0);
    }
}

TEST_CASE("a machine whose program does not read is not lost, while it acknowledges probes") {
    Connection ends;
    ends.far.set(SOL_SOCKET, SO_RCVBUF, 4096);
    fill(ends.near);
    CHECK(time_to_loss(ends.near, SilenceWatch{200ms}, 1500ms) >= 1500ms);
}

TEST_CASE("a machine that acknowledges nothing for the limit is lost, with an open window or none"
) {
    for (bool const is_full : {false, true}) {
        Connection ends;
        if (is_full) {
            fill(ends.near);
        }
        cut_off(ends.far.handle());
        if (is_full) {
            fill(ends.near); // what the kernel has room for since the other end took more
        } else {
            CHECK(ends.near.send(std::array<std::byte, 1>{}) == 1U);
        }
        auto const time = time_to_loss(ends.near, SilenceWatch{200ms}, 30s);
        CHECK(time >= 200ms);
        CHECK(time < 30s);
    }
}

TEST_CASE("a machine to which nothing is sent is lost if it answers no probe of the kernel") {
    Connection ends;
    ends.near.set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
    ends.near.set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
    ends.near.set(IPPROTO_TCP, TCP_KEEPCNT, 100); // not by the kernel's own count
    cut_off(ends.far.handle());
    CHECK(time_to_loss(ends.near, SilenceWatch{200ms}, 20s) < 20s);
}

TEST_CASE("a machine with nothing to acknowledge is not lost, nor one that is back in time") {
    Connection ends;
    CHECK(time_to_loss(ends.near, SilenceWatch{50ms}, 200ms) >= 200ms);
    auto const send_until_due = [&] {
        cut_off(ends.far.handle());
        CHECK(ends.near.send(std::array<std::byte, 1>{}) == 1U);
        wait_until([&] { return acknowledgement_of(ends.near).is_due; });
    };
    send_until_due();
    SilenceWatch watch{20s};
    CHECK_FALSE(watch.is_lost(ends.near, Clock::now()));
    mend(ends.far.handle());
    wait_until([&] { return !acknowledgement_of(ends.near).is_due; });
    // It looks when more is due, 25 s later: what came in between was not silence.
    send_until_due();
    CHECK_FALSE(watch.is_lost(ends.near, Clock::now() + 25s));
}

TEST_CASE("a rank out of reach is named where ranks meet, and rank 0 by the rank itself") {
    Watchdog const watchdog{2};
    joinable::detail::TcpJob const job{2, "a test", "of the test"};
    Socket listener = joinable::detail::listen_at("127.0.0.1", 0);
    std::uint16_t const port = port_of(listener);
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    joinable::detail::Hub hub{std::move(listener), Socket{ends[1]}, job, {.silence = 200ms}};
    std::jthread const thread{[&] { hub.run(); }};
    joinable::detail::TcpRank zero{Socket{ends[0]}, 0, 2, 60s};
    Socket socket = joinable::detail::connect_rank(1, job, "127.0.0.1", port, Clock::now() + 30s);
    int const handle = socket.handle();
    joinable::detail::TcpRank one{std::move(socket), 1, 2, 60s, {}, {.silence = 200ms}};
    zero.meet("");
    one.meet("");
    one.post({});
    CHECK(one.missing_ranks() == std::vector{0}); // so all that it has sent is acknowledged
    cut_off(handle);
    zero.post({});
    zero.finish(0);
    zero.post({});
    auto const start = Clock::now();
    CHECK_THROWS_WITH_AS(
        zero.finish(1),
        "rank 1 failed: its connection broke: its process died, or its machine is out of reach",
        joinable::PeerFailed
    );
    CHECK(Clock::now() - start < 20s); // before the kernel gives the connection up
    one.post({});
    CHECK_THROWS_WITH_AS(
        one.finish(0),
        "rank 0 failed: its connection broke: its process died, or its machine is out of reach",
        joinable::PeerFailed
    );
    mend(handle); // so the rank learns soon that nobody waits for its leave
}

} // namespace
