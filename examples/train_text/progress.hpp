// SPDX-License-Identifier: BSL-1.0
#pragma once

// A progress bar for each rank: live on a terminal, an occasional line in a pipe.

#include <joinable/join.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace train_text {

/// The progress of all ranks, in memory that threads and processes share.
class Progress {
public:
    /// Make it before the ranks. `totals` are the numbers of batches of each rank over all epochs.
    /// The first `shown` ranks run where rank 0 can see them.
    Progress(std::vector<std::size_t> totals, std::size_t shown)
        : totals_{std::move(totals)}, ranks_{joinable::shared_buffer<Rank>(totals_.size())},
          shown_{static_cast<int>(shown)} {}

    void advance(int rank) const { std::atomic_ref{of(rank).done}.fetch_add(1); }
    void set_shadowing(int rank, bool is_shadowing) const {
        std::atomic_ref{of(rank).is_shadowing}.store(is_shadowing ? 1 : 0);
    }

    [[nodiscard]] int shown() const { return shown_; }
    [[nodiscard]] std::size_t total(int rank) const {
        return totals_[static_cast<std::size_t>(rank)];
    }
    [[nodiscard]] std::size_t done(int rank) const { return std::atomic_ref{of(rank).done}.load(); }
    [[nodiscard]] bool is_shadowing(int rank) const {
        return std::atomic_ref{of(rank).is_shadowing}.load() != 0;
    }

private:
    struct alignas(64) Rank { // a cache line each, because ranks count all the time
        std::size_t done;
        int is_shadowing;
    };
    [[nodiscard]] Rank& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

    std::vector<std::size_t> totals_;
    joinable::SharedBuffer<Rank> ranks_;
    int shown_;
};

/// Shows the progress of all ranks during its lifetime. Rank 0 owns it, because a thread started
/// before a fork would not exist in the child processes.
class ProgressDisplay {
public:
    explicit ProgressDisplay(Progress const& progress)
        : progress_{progress}, is_terminal_{isatty(STDOUT_FILENO) == 1},
          printer_{[this] { run(); }} {}

    ~ProgressDisplay() {
        {
            std::lock_guard const lock{mutex_};
            is_over_ = true;
        }
        changed_.notify_all();
    }
    ProgressDisplay(ProgressDisplay const&) = delete;
    ProgressDisplay& operator=(ProgressDisplay const&) = delete;

private:
    void run() {
        std::unique_lock lock{mutex_};
        std::size_t next_line = 20;
        for (bool is_first = true; !is_over_; is_first = false) {
            changed_.wait_for(lock, std::chrono::milliseconds{100}, [this] { return is_over_; });
            if (is_terminal_) {
                draw(is_first);
            } else if (std::size_t const percent = overall(); percent >= next_line) {
                print_line(percent);
                next_line = percent / 20 * 20 + 20;
            }
        }
    }

    [[nodiscard]] std::size_t overall() const {
        std::size_t done = 0;
        std::size_t total = 0;
        for (int rank = 0; rank < progress_.shown(); ++rank) {
            done += progress_.done(rank);
            total += progress_.total(rank);
        }
        return total == 0 ? 100 : 100 * done / total;
    }

    void print_line(std::size_t percent) const {
        std::string line = "trained " + std::to_string(percent) + " % of the batches, per rank";
        for (int rank = 0; rank < progress_.shown(); ++rank) {
            line += " " + std::to_string(progress_.done(rank)) + "/" +
                    std::to_string(progress_.total(rank));
        }
        std::puts(line.c_str());
        std::fflush(stdout);
    }

    void draw(bool is_first) const {
        constexpr std::size_t width = 40;
        if (!is_first) {
            std::printf("\x1b[%dA", progress_.shown());
        }
        for (int rank = 0; rank < progress_.shown(); ++rank) {
            std::size_t const done = progress_.done(rank);
            std::size_t const total = progress_.total(rank);
            std::size_t const filled =
                std::min(width, width * done / std::max<std::size_t>(total, 1));
            std::printf(
                "\x1b[2Krank %d [%s%s] %zu/%zu%s\n",
                rank,
                std::string(filled, '#').c_str(),
                std::string(width - filled, '.').c_str(),
                done,
                total,
                progress_.is_shadowing(rank) ? "  shadowing" : ""
            );
        }
        std::fflush(stdout);
    }

    Progress const& progress_;
    bool is_terminal_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_over_ = false;
    std::jthread printer_; ///< last: starts after the other members, ends first
};

} // namespace train_text
