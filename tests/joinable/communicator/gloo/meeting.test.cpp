// SPDX-License-Identifier: BSL-1.0
// How ranks over Gloo meet: by a file, at a port, by the variables of a launcher; and when some do not.
#include <joinable/gloo.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/free_port.hpp>
#include <support/gloo_ranks.hpp>
#include <support/named_ranks.hpp>
#include <support/ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/tcp.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::GlooCommunicator;
using joinable::GlooFile;
using joinable::GlooOptions;
using joinable::detail::GlooHub;

TEST_CASE("ranks meet by a file, in any order, and leave none behind") {
    Folder const folder;
    std::string const path = folder.file("ranks");
    for (int const size : {1, 3}) {
        Processes processes;
        for (int rank = size - 1; rank >= 0; --rank) {
            processes.start([&] {
                GlooCommunicator comm{gloo_options(rank, size, path)};
                std::vector<int> ones{1};
                joinable::all_reduce(comm, ones).wait();
                CHECK(ones[0] == size);
            });
        }
        for (int rank = 0; rank < size; ++rank) {
            CHECK(processes.wait() == 0);
        }
        CHECK(folder.names().empty());
    }
}

TEST_CASE("the file by which ranks meet can be read by its owner alone, as it has the secret") {
    Folder const folder;
    std::string const path = folder.file("ranks");
    {
        Processes processes;
        processes.start([&] { GlooCommunicator const comm{gloo_options(0, 2, path)}; });
        while (!std::filesystem::exists(path)) {
            std::this_thread::sleep_for(1ms);
        }
        using std::filesystem::perms;
        perms const found = std::filesystem::status(path).permissions();
        CHECK((found & ~(perms::owner_read | perms::owner_write)) == perms::none);
        processes.start([&] { GlooCommunicator const comm{gloo_options(1, 2, path)}; });
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
    }
}

/// Leaves a file as that of an earlier job, whose rank 0 was killed and listened at this port.
void leave_file(std::string const& path, std::uint16_t port) {
    std::string const mark = "ranks of joinable meet here";
    write_contents(path, mark + "\n127.0.0.1\n" + std::to_string(port) + "\nold\n" + mark + "\n");
    using std::filesystem::perms;
    std::filesystem::permissions(path, perms::owner_read | perms::owner_write);
}

TEST_CASE("a file that an earlier job left keeps no rank from those of the next job") {
    for (bool const is_silent :
         {false, true}) { // the program that has its port by now, or none has
        Folder const folder;
        std::string const path = folder.file("ranks");
        auto other = joinable::detail::listen_at("127.0.0.1", 0);
        leave_file(path, port_of(other));
        Processes processes;
        processes.start([&] {
            other.close();
            GlooCommunicator comm{gloo_options(1, 2, path)};
            comm.split(0, 0).barrier(); // by what the next job's file says
            comm.barrier();
        });
        pollfd polled{other.handle(), POLLIN, 0};
        REQUIRE(::poll(&polled, 1, -1) == 1); // rank 1 has read that file
        if (!is_silent) {
            other.close();
        }
        processes.start([&] {
            GlooCommunicator comm{gloo_options(0, 2, path)};
            comm.split(0, 0).barrier();
            comm.barrier();
        });
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
        CHECK(folder.names().empty());
    }
}

TEST_CASE("a file of all users, or a link, is not read, and no other file is written") {
    Folder const folder;
    std::string const path = folder.file("ranks");
    GlooOptions options = gloo_options(1, 2, path);
    options.connect_timeout = 100ms;
    FreePort const free;
    leave_file(path, free.number());
    std::filesystem::permissions(
        path, std::filesystem::perms::others_read, std::filesystem::perm_options::add
    );
    auto const refusal = [&] {
        std::string text;
        try {
            GlooCommunicator const comm{options};
        } catch (joinable::TimedOut const& error) {
            text = error.what();
        }
        return text;
    };
    std::string const text = refusal();
    CHECK(text.find("rank 0 did not write the file ") == 0); // not: did not listen
    leave_file(folder.file("elsewhere"), free.number());
    std::filesystem::remove(path);
    std::filesystem::create_symlink(folder.file("elsewhere"), path);
    CHECK(refusal() == text);
    // Rank 0 follows no link that somebody has made where it writes.
    std::filesystem::create_symlink(folder.file("precious"), path + ".unfinished");
    {
        Processes processes;
        for (int const rank : {0, 1}) {
            processes.start([&] { GlooCommunicator{gloo_options(rank, 2, path)}.barrier(); });
        }
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
    }
    CHECK(!std::filesystem::exists(folder.file("precious")));
    CHECK(std::filesystem::is_regular_file(folder.file("elsewhere")));
    if (::geteuid() == 0) {
        leave_file(path, free.number());
        REQUIRE(::chown(path.c_str(), 12345, 12345) == 0);
        CHECK(refusal() == text);
    }
}

TEST_CASE("ranks meet at a port of rank 0, and by what a launcher says") {
    FreePort const free;
    Processes processes;
    for (int rank = 0; rank < 3; ++rank) {
        processes.start([&] {
            GlooCommunicator comm{GlooOptions{
                .rank = rank,
                .size = 3,
                .store =
                    GlooHub{
                        .job = "a test",
                        .address = "127.0.0.1",
                        .port = free.number(),
                        .secret = "s"
                    }
            }};
            comm.barrier();
        });
    }
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(processes.wait() == 0);
    }
    FreePort const free_too;
    std::string const next = std::to_string(free_too.number());
    for (int rank = 0; rank < 2; ++rank) {
        processes.start([&] {
            ::setenv("JOINABLE_RANK", std::to_string(rank).c_str(), 1);
            ::setenv("JOINABLE_WORLD_SIZE", "2", 1);
            ::setenv("JOINABLE_JOB", "a test", 1);
            ::setenv("JOINABLE_ADDR", "127.0.0.1", 1);
            ::setenv("JOINABLE_PORT", next.c_str(), 1);
            ::setenv("JOINABLE_SECRET", "of the test", 1);
            GlooCommunicator comm = GlooCommunicator::from_environment(60s);
            CHECK(comm.size() == 2);
            comm.barrier();
        });
    }
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
}

TEST_CASE("options that cannot be are refused before a rank waits for others") {
    auto const construct = [](GlooOptions const& options) { GlooCommunicator const comm{options}; };
    CHECK_THROWS_WITH_AS(
        construct({.rank = 2, .size = 2, .store = GlooFile{"/nowhere"}}),
        "expected a rank from 0 to below the world size, which is at most 8192, but was given rank 2 "
        "of 2",
        joinable::ContractViolation
    );
    CHECK_THROWS_WITH_AS(
        construct({.rank = 0, .size = 1}),
        "expected where the ranks meet, a GlooFile with a path or a GlooHub, but GlooOptions::store "
        "was given neither",
        joinable::ContractViolation
    );
    CHECK_THROWS_AS(
        construct(
            {.rank = 0,
             .size = 1,
             .store = GlooFile{"/no such folder/ranks"},
             .address = "127.0.0.1"}
        ),
        joinable::CommunicationError
    );
}

TEST_CASE("ranks that do not come are named by those that wait, and the file is removed") {
    Folder const folder;
    GlooOptions options = gloo_options(0, 3, folder.file("ranks"));
    options.connect_timeout = 100ms;
    try {
        GlooCommunicator const comm{options};
        FAIL_CHECK("no exception");
    } catch (joinable::TimedOut const& error) {
        CHECK(error.missing() == std::vector{1, 2});
    }
    CHECK(folder.names().empty());
    options.rank = 2;
    CHECK_THROWS_AS(GlooCommunicator{options}, joinable::TimedOut); // there is no rank 0
}

TEST_CASE("a process that is killed while ranks meet is named by the others") {
    Folder const folder;
    Processes processes;
    for (int rank = 0; rank < 2; ++rank) {
        processes.start([&] {
            CHECK_THROWS_AS(
                GlooCommunicator{gloo_options(rank, 3, folder.file("ranks"))}, joinable::PeerFailed
            );
        });
    }
    processes.start([&] { // knows the hub, and dies before it knows Gloo
        joinable::detail::GlooMeeting meeting{gloo_options(2, 3, folder.file("ranks"))};
        auto const hub = meeting.attach();
        std::raise(SIGKILL);
    });
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == SIGKILL);
}

/// As rank 1 of two: says where Gloo reaches it, so that rank 0, whose address is lower, waits for it.
void share_address(joinable::detail::TcpEnd& hub) {
    auto const device = ::gloo::transport::tcp::CreateDevice("127.0.0.2");
    auto const transport = device->createContext(1, 2);
    auto const address = transport->createPair(0)->address().bytes();
    std::vector<char> own(2 * ::gloo::transport::Address::kMaxByteSize);
    std::copy(address.begin(), address.end(), own.begin());
    static_cast<void>(joinable::detail::share(hub, own));
}

TEST_CASE("a process that is killed before Gloo connects it is named at once") {
    Folder const folder;
    Processes processes;
    processes.start([&] {
        GlooOptions options = gloo_options(0, 2, folder.file("ranks"));
        options.connect_timeout = 20min; // or what ends it is heard when Gloo gives up
        CHECK_THROWS_AS(GlooCommunicator{options}, joinable::PeerFailed);
    });
    processes.start([&] {
        joinable::detail::GlooMeeting meeting{gloo_options(1, 2, folder.file("ranks"))};
        auto hub = meeting.attach();
        share_address(hub);
        std::raise(SIGKILL);
    });
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == SIGKILL);
}

/// What rank 0 throws for a rank that meets it, and does not connect; or does not even say where Gloo reaches it.
std::string text_of_half_meeting(std::chrono::nanoseconds connect_timeout, bool shares) {
    Folder const folder;
    std::atomic<bool> is_over{false};
    GlooOptions options = gloo_options(1, 2, folder.file("ranks"), 3s);
    options.connect_timeout = connect_timeout;
    std::jthread const other{[&, of_other = options] {
        try {
            joinable::detail::GlooMeeting meeting{of_other};
            auto hub = meeting.attach();
            if (shares) {
                share_address(hub);
            }
            wait_until([&] { return is_over.load(); });
        } catch (joinable::Error const&) { // one of them came too late
        }
    }};
    options.rank = 0;
    std::string text;
    try {
        GlooCommunicator const comm{options};
    } catch (joinable::Error const& error) {
        text = error.what();
    }
    is_over = true;
    return text;
}

TEST_CASE("all of the construction over Gloo waits for connect_timeout, and all after for deadline"
) {
    Watchdog const watchdog{2};
    std::string const expected = "while rank 0 waits in all_reduce of ";
    std::string text; // another one on a machine too busy for ranks to meet in that time
    for (auto time = 50ms; time < 10s && text.find(expected) == text.npos; time *= 2) {
        text = text_of_half_meeting(time, false);
    }
    CHECK(text.find(expected) != text.npos);
    CHECK(text.find("rank 1 did not arrive within 3 s") == text.npos);
    bool is_told = false;
    for (auto time = 50ms; time < 10s && !is_told; time *= 2) {
        is_told = text_of_half_meeting(time, true)
                      .starts_with("rank 0 cannot go on by Gloo: rank 1 is not connected after ");
    }
    CHECK(is_told);
    Folder const folder;
    GlooCommunicator comm{gloo_options(0, 1, folder.file("ranks"), 7s)};
    CHECK(comm.set_deadline(60s) == 7s);
}

TEST_CASE(
    "Gloo's thread takes no core from other threads when it wakes up, and those stay as they are"
) {
    for (int const policy : {SCHED_OTHER, SCHED_BATCH}) {
        std::thread{[&] {
            sched_param const none{};
            REQUIRE(sched_setscheduler(0, policy, &none) == 0);
            Folder const folder;
            GlooCommunicator const comm{gloo_options(0, 1, folder.file("ranks"))};
            CHECK(sched_getscheduler(0) == policy);
            int batch = 0;
            for (auto const& entry : std::filesystem::directory_iterator{"/proc/self/task"}) {
                batch += sched_getscheduler(std::stoi(entry.path().filename())) == SCHED_BATCH;
            }
            CHECK(batch >= 1);
            CHECK((policy == SCHED_BATCH || batch == 1)); // Gloo's alone
        }}.join();
    }
}

} // namespace
