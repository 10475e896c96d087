// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <joinable/communicator/communicator.hpp>
#include <joinable/config.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 {

/// How a ProgressLine writes.
struct ProgressOptions {
    /// How many rounds are expected, in all guards together: then the time that is left is said, too.
    std::optional<std::size_t> rounds = {};
    /// Whether each text takes the place of the one before, as on a terminal; else each is a line. None:
    /// so on a FILE* that is a terminal, lines elsewhere.
    std::optional<bool> rewrites = {};
    /// From one text to the next at least. None: 5 seconds, or 100 milliseconds where it rewrites.
    std::optional<std::chrono::nanoseconds> every = {};
    int rank = 0; ///< that writes
    std::function<std::chrono::steady_clock::time_point()> clock = std::chrono::steady_clock::now;
};

namespace detail {

/// Counts rounds, and says so now and then.
class ProgressWriter {
public:
    using Sink = std::function<void(std::string_view)>;

    ProgressWriter(Sink sink, ProgressOptions options);
    /// A line that cannot be written there is lost: no training ends for it.
    ProgressWriter(std::FILE* file, ProgressOptions options);

    void count(Round const& round, int world_size);
    /// Says the last state, if it was not, and ends the line.
    void end();

private:
    using Time = std::chrono::steady_clock::time_point;

    void write(Time now);
    [[nodiscard]] std::string text(double rate) const;

    Sink sink_;
    ProgressOptions options_;
    std::chrono::nanoseconds every_;
    std::size_t rounds_ = 0;
    int joined_ = 0;
    int world_size_ = 0;
    // The rate is that of some recent time: what is older counts less.
    double recent_rounds_ = 0;
    double recent_seconds_ = 0;
    std::size_t written_rounds_ = 0; ///< in the last text
    Time written_at_{};
    std::size_t width_ = 0; ///< of the text that the next one takes the place of
};

} // namespace detail

/// A participant that says how far a training is: "round 120 of 400, 35.1 rounds/s, 8 s left, 2 of 4 ranks
/// have joined". One rank writes, also in rounds that it shadows. Nothing is sent.
///
/// @code
/// joinable::ProgressLine progress{comm, stderr, {.rounds = 400}};
/// joinable::Join guard{joinable::participants(ddp, step, progress)};
/// for (...) { ddp.forward(...); ddp.backward(...); step.step(); progress.step(); }
/// @endcode
///
/// The sink is a FILE* that outlives this, or takes a std::string_view with each text. A terminal keeps one line that
/// changes; anything else gets whole lines without control characters. When a guard ends, and when
/// this is destroyed, the last state is said.
template <class Comm>
class ProgressLine {
    static_assert(models_communicator<Comm>());

public:
    explicit ProgressLine(Comm& comm, std::FILE* file = stderr, ProgressOptions const& options = {})
        : comm_{comm}, writes_{comm.rank() == options.rank}, writer_{file, options} {}
    ProgressLine(
        Comm& comm, std::function<void(std::string_view)> sink, ProgressOptions const& options = {}
    )
        : comm_{comm}, writes_{comm.rank() == options.rank}, writer_{std::move(sink), options} {}
    ProgressLine(ProgressLine const&) = delete;
    ProgressLine& operator=(ProgressLine const&) = delete;
    ~ProgressLine() {
        try {
            end();
        } catch (...
        ) { // NOLINT(bugprone-empty-catch): the sink's, and nobody is left to hear of it
        }
    }

    /// Active ranks call it once in every round, after the other participants. Local. What the sink throws
    /// leaves it, and the guard then.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { count(round); });
    }

    class Hook {
    public:
        explicit Hook(ProgressLine& line) noexcept : line_{line} {}
        void main_hook(Round const& round) { line_.count(round); }
        void post_hook(bool) noexcept {}
        void end_hook() { line_.end(); }

    private:
        ProgressLine& line_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "ProgressLine"; }
    static constexpr std::string_view join_verb = "step()";

private:
    void count(Round const& round) {
        if (writes_) {
            writer_.count(round, comm_.size());
        }
    }
    void end() {
        if (writes_) {
            writer_.end();
        }
    }

    Comm& comm_;
    bool writes_;
    detail::ProgressWriter writer_;
    JoinState state_;
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/progress_line.ipp>
#endif
