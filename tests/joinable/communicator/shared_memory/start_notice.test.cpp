// SPDX-License-Identifier: BSL-1.0
// Rank 0 fails before the others can see its table of members: they hear of it long before their
// deadline.
#include <joinable/communicator/shared_memory/process.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>

#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/named_ranks.hpp>
#include <support/shared.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/shared_memory/process/shared_object.hpp>
#include <joinable/communicator/shared_memory/process/start_notice.hpp>

namespace {

using namespace joinable_tests;
using joinable::CommunicationError;
using joinable::PeerFailed;
using joinable::ProcessCommunicator;
using joinable::TimedOut;
using joinable::detail::SharedObject;
using joinable::detail::StartNotice;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

ProcessCommunicator
attach(int rank, int size, std::string const& job, std::chrono::nanoseconds deadline = 50s) {
    return ProcessCommunicator::attach({rank, size, job, deadline});
}

std::string notice_of(std::string const& job) {
    return StartNotice::path_for(file_of(job));
}
bool has_notice(std::string const& job) {
    return access(notice_of(job).c_str(), F_OK) == 0;
}

/// From now on no file may have the size of a table, so this process fails where it makes one.
void allow_no_table() {
    rlimit const small{1024, 1024};
    setrlimit(RLIMIT_FSIZE, &small);
}

/// What an older job leaves whose rank 0 was killed before it had a table.
SharedObject older_notice(std::string const& job) {
    auto object = SharedObject::create();
    REQUIRE(object.publish(notice_of(job)));
    return object;
}

TEST_CASE("a rank 0 that fails before it has a table of ranks is named on the others at once") {
    for (int const world : {2, 4}) {
        std::string const job = fresh_job();
        Shared<std::atomic<int>> begun;
        Shared<std::atomic<int>> heard;
        Processes processes;
        auto const start = Clock::now();
        for (int rank = world - 1; rank > 0; --rank) {
            processes.start([&] {
                ++*begun;
                try {
                    attach(rank, world, job);
                } catch (PeerFailed const& error) {
                    std::string const text = error.what();
                    CHECK(error.ranks() == std::vector{0});
                    CHECK(
                        text.find(
                            "rank 0 failed before it had memory for a table of its ranks: its "
                            "own error says why; /dev/shm has "
                        ) == 0
                    );
                    ++*heard;
                }
            });
        }
        processes.start([&] {
            allow_no_table();              // whose signal would end this process
            wait_until(*begun, world - 1); // rank 0 tells it for 2 s
            std::string text;
            try {
                attach(0, world, job);
            } catch (CommunicationError const& error) {
                text = error.what();
            }
            CHECK(text.find("raise the limit of file sizes (ulimit -f)") != std::string::npos);
        });
        for (int rank = 0; rank < world; ++rank) {
            CHECK(processes.wait() == 0);
        }
        CHECK(*heard == world - 1);
        CHECK(Clock::now() - start < 20s); // of a deadline of 50
        CHECK(!file_exists(job));
        CHECK(!has_notice(job));
    }
}

TEST_CASE("a rank 0 that is killed before it has a table of ranks is named on a rank that waits") {
    std::string const job = fresh_job();
    std::optional<SharedObject> older{older_notice(job)};
    Processes processes;
    auto const start = Clock::now();
    processes.start([&] {
        CHECK_THROWS_WITH_AS(attach(1, 2, job), "rank 0 failed: its process died", PeerFailed);
    });
    wait_until([&] { return !has_notice(job); }); // rank 1 has looked
    processes.start([&] {
        auto const notice = StartNotice::make(file_of(job));
        std::raise(SIGKILL);
    });
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == SIGKILL);
    CHECK(Clock::now() - start < 20s);
    CHECK(!file_exists(job));
    CHECK(!has_notice(job));
}

TEST_CASE("the notice of a job that was killed does not disturb the next one") {
    for (int const first : {0, 1}) { // which rank of the next job comes first
        std::string const job = fresh_job();
        auto const older = older_notice(job);
        Processes processes;
        processes.start([&] { attach(first, 2, job).barrier(); });
        wait_until([&] { return !has_notice(job); });
        processes.start([&] { attach(1 - first, 2, job).barrier(); });
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
        CHECK(!file_exists(job));
        CHECK(!has_notice(job));
    }
}

TEST_CASE("a rank 0 that takes its time is waited for until the deadline") {
    std::string const job = fresh_job();
    auto const notice = StartNotice::make(file_of(job));
    REQUIRE(notice);
    CHECK(!StartNotice::make(file_of(job))); // another one of this job
    Processes processes;
    processes.start([&] {
        try {
            attach(1, 2, job, 300ms);
            CHECK(false);
        } catch (TimedOut const& error) {
            CHECK(error.missing() == std::vector{0});
        }
    });
    CHECK(processes.wait() == 0);
    CHECK(has_notice(job));
}

TEST_CASE(
    "where a file may have a table of ranks but not the rest, all ranks are told, by no signal"
) {
    std::string const job = fresh_job();
    Shared<std::atomic<int>> heard;
    Processes processes;
    for (int const rank : {1, 0}) {
        processes.start([&] {
            rlimit const small{1U << 20U, 1U << 20U};
            setrlimit(RLIMIT_FSIZE, &small);
            std::string text;
            try {
                attach(rank, 2, job);
            } catch (joinable::Error const& error) {
                text = error.what();
            }
            CHECK(text.find("raise the limit of file sizes (ulimit -f)") != std::string::npos);
            ++*heard;
        });
    }
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
    CHECK(*heard == 2);
    CHECK(!file_exists(job));
}

TEST_CASE("where no rank can make a file in /dev/shm each of them says so at once") {
    Processes processes;
    for (int const rank : {0, 1}) {
        processes.start([&] {
            if (!has_own_shared_memory("size=32k", MS_RDONLY)) {
                std::puts("skipped: no rights to mount a /dev/shm");
                return;
            }
            std::string text;
            try {
                attach(rank, 2, "job");
            } catch (CommunicationError const& error) {
                text = error.what();
            }
            CHECK(text.find("expected to make a shared-memory object in /dev/shm, but ") == 0);
        });
    }
    CHECK(processes.wait() == 0);
    CHECK(processes.wait() == 0);
}

TEST_CASE("where /dev/shm has no byte left the others hear of rank 0 at once") {
    Processes outer;
    outer.start([] {
        if (!has_own_shared_memory("size=4k")) {
            std::puts("skipped: no rights to mount a small /dev/shm");
            return;
        }
        {
            auto const rest = SharedObject::create();
            REQUIRE(rest.publish("/dev/shm/rest"));
            rest.resize(4096);
            REQUIRE(rest.reserve(0, 4096));
        }
        std::string const job = fresh_job();
        Shared<std::atomic<int>> heard;
        Processes processes;
        processes.start([&] {
            try {
                attach(1, 2, job);
            } catch (PeerFailed const& error) {
                std::string const text = error.what();
                CHECK(text.find("/dev/shm has 0 of its 4096 bytes free") != std::string::npos);
                ++*heard;
            }
        });
        processes.start([&] { CHECK_THROWS_AS(attach(0, 2, job), CommunicationError); });
        CHECK(processes.wait() == 0);
        CHECK(processes.wait() == 0);
        CHECK(*heard == 1);
        CHECK(!has_notice(job));
    });
    CHECK(outer.wait() == 0);
}

} // namespace
