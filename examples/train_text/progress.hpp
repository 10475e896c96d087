// SPDX-License-Identifier: BSL-1.0
#pragma once

// A bar for each rank: live on a terminal, a line now and then in a pipe.

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

class Progress {
public:
    /// `totals`: how many batches each rank has, over all epochs.
    explicit Progress(std::vector<std::size_t> totals)
        : totals_{std::move(totals)}, done_(totals_.size()), shadowing_(totals_.size()),
          is_terminal_{isatty(STDOUT_FILENO) == 1}, printer_{[this] { run(); }} {}

    ~Progress() {
        {
            std::lock_guard const lock{mutex_};
            is_over_ = true;
        }
        changed_.notify_all();
    }
    Progress(Progress const&) = delete;
    Progress& operator=(Progress const&) = delete;

    void advance(int rank) { ++done_[static_cast<std::size_t>(rank)]; }
    void set_shadowing(int rank, bool is_shadowing) {
        shadowing_[static_cast<std::size_t>(rank)] = is_shadowing;
    }

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
        for (std::size_t rank = 0; rank < totals_.size(); ++rank) {
            done += done_[rank];
            total += totals_[rank];
        }
        return total == 0 ? 100 : 100 * done / total;
    }

    void print_line(std::size_t percent) const {
        std::string line = "trained " + std::to_string(percent) + " % of the batches, per rank";
        for (std::size_t rank = 0; rank < totals_.size(); ++rank) {
            line += " " + std::to_string(done_[rank]) + "/" + std::to_string(totals_[rank]);
        }
        std::puts(line.c_str());
        std::fflush(stdout);
    }

    void draw(bool is_first) const {
        constexpr std::size_t width = 40;
        if (!is_first) {
            std::printf("\x1b[%zuA", totals_.size());
        }
        for (std::size_t rank = 0; rank < totals_.size(); ++rank) {
            std::size_t const total = std::max<std::size_t>(totals_[rank], 1);
            std::size_t const filled = std::min(width, width * done_[rank] / total);
            std::printf(
                "\x1b[2Krank %zu [%s%s] %zu/%zu%s\n",
                rank,
                std::string(filled, '#').c_str(),
                std::string(width - filled, '.').c_str(),
                done_[rank].load(),
                totals_[rank],
                shadowing_[rank] ? "  shadowing" : ""
            );
        }
        std::fflush(stdout);
    }

    std::vector<std::size_t> totals_;
    std::vector<std::atomic<std::size_t>> done_;
    std::vector<std::atomic<bool>> shadowing_;
    bool is_terminal_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_over_ = false;
    std::jthread printer_; ///< last: starts when all else is there, ends first
};

} // namespace train_text
