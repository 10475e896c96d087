// SPDX-License-Identifier: BSL-1.0
// A process over Gloo that is stopped while data is on its way: the others end within their deadline, and a
// stated time more where the hub is in the process that is stopped.
#include <joinable/gloo.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <string>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <support/folder.hpp>
#include <support/gloo_ranks.hpp>
#include <support/named_ranks.hpp>
#include <support/shared.hpp>
#include <support/wait_for_process.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::GlooCommunicator;

/// Three processes, of which one is stopped when all have posted a collective and its data cannot be
/// complete, because `late` was stopped as well until then.
class StoppedRank {
public:
    explicit StoppedRank(int victim) : victim_{victim}, late_{victim == 2 ? 1 : 2} {
        for (int rank = 0; rank < 3; ++rank) {
            ranks_.push_back(processes_.start([&] {
                GlooCommunicator comm{gloo_options(rank, 3, folder_.file("ranks"))};
                run(comm);
            }));
        }
    }
    void stop() {
        wait_for_stop(process(late_));
        late_is_stopped_->store(true);
        wait_for_stop(process(victim_));
        ::kill(process(late_), SIGCONT);
        victim_is_stopped_->store(true);
    }
    /// What the other two throw, and how all have ended.
    void check() {
        for (int rank = 0; rank < 3; ++rank) {
            if (rank != victim_) {
                wait_for_end(process(rank));
            }
        }
        ::kill(process(victim_), SIGKILL);
        for (int rank = 0; rank < 3; ++rank) {
            CAPTURE(victim_);
            CAPTURE(rank);
            CHECK(processes_.wait() == (rank == victim_ ? SIGKILL : 0));
        }
    }

private:
    [[nodiscard]] pid_t process(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

    void run(GlooCommunicator& comm) const {
        comm.barrier();
        if (comm.rank() != late_) {
            wait_until([&] { return late_is_stopped_->load(); });
        }
        std::vector<float> large(3'000'000, 1);
        auto work = joinable::all_reduce(comm, large);
        if (comm.rank() == late_) {
            std::raise(SIGSTOP);
        } else if (comm.rank() == victim_) {
            wait_until([&] { return comm.missing_ranks().empty(); });
            std::raise(SIGSTOP);
        }
        wait_until([&] { return victim_is_stopped_->load(); });
        comm.set_deadline(1s);
        auto const start = std::chrono::steady_clock::now();
        std::string text;
        try {
            work.wait();
        } catch (joinable::CommunicationError const& error) {
            text = error.what();
        }
        CHECK(std::chrono::steady_clock::now() - start < 25s); // 1 s, or 6 s, when it is not busy
        CAPTURE(text);
        CHECK(text.find("no data moved between ranks ") == 0);
        CHECK(text.find(" within 1 s, in all_reduce of 3000000 f32 with sum") != std::string::npos);
        std::string const silent = "rank 0, where the ranks meet, did not answer this within 5 s";
        CHECK((text.find(silent) != std::string::npos) == (victim_ == 0));
    }

    int victim_;
    int late_;
    Folder folder_;
    Shared<std::atomic<bool>> late_is_stopped_;
    Shared<std::atomic<bool>> victim_is_stopped_;
    Processes processes_;
    std::vector<pid_t> ranks_;
};

TEST_CASE("a process over Gloo that is stopped in the middle of data ends the others in time") {
    StoppedRank with_hub{0};
    StoppedRank second{1};
    StoppedRank last{2};
    for (StoppedRank* const one : {&with_hub, &second, &last}) {
        one->stop();
    }
    for (StoppedRank* const one : {&with_hub, &second, &last}) {
        one->check();
    }
}

} // namespace
