// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
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
    /// The expected number of rounds, in all guards together. If given, the text has the time that is left.
    /// With EndPolicy::drain it is the number of inputs of the rank that has the most.
    std::optional<std::size_t> rounds = {};
    /// Whether each text overwrites the previous one, as on a terminal; else each text is a line. None: on
    /// a FILE* that is a terminal it does, elsewhere not.
    std::optional<bool> rewrites = {};
    /// The shortest time between two texts. None: 5 seconds, or 100 milliseconds if texts are overwritten.
    std::optional<std::chrono::nanoseconds> every = {};
    int rank = 0; ///< the rank that writes
    std::function<std::chrono::steady_clock::time_point()> clock = std::chrono::steady_clock::now;
};

namespace detail {

/// Counts rounds and writes a text from time to time.
class ProgressWriter {
public:
    using Sink = std::function<void(std::string_view)>;

    ProgressWriter(Sink sink, ProgressOptions options);
    /// Ignores errors of the file: a text that cannot be written is lost, and the training goes on.
    ProgressWriter(std::FILE* file, ProgressOptions options);

    void count(Round const& round, int world_size);
    /// Writes the last state, if it was not written yet, and ends the line.
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
    // The rate is an average over recent time, in which older rounds count less.
    double recent_rounds_ = 0;
    double recent_seconds_ = 0;
    std::size_t written_rounds_ = 0; ///< in the last text
    Time written_at_{};
    std::size_t width_ = 0; ///< of the text that the next one overwrites
};

} // namespace detail

/// A participant that shows the progress of a training: "round 120 of 400, 35.1 rounds/s, 8 s left, 2 of 4
/// ranks have joined". One rank writes, also in rounds that it shadows. Nothing is sent.
///
/// @code
/// joinable::ProgressLine progress{comm, stderr, {.rounds = 400}};
/// joinable::Join guard{joinable::participants(ddp, step, progress)};
/// for (...) { ddp.forward(...); ddp.backward(...); step.step(); progress.step(); }
/// @endcode
///
/// The sink is a FILE*, which must outlive this object, or a function that takes each text as a
/// std::string_view. On a terminal one line changes; any other sink gets whole lines without control
/// characters. The last state is written when a guard ends and when this object is destroyed.
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
        } catch (...) { // NOLINT(bugprone-empty-catch): a destructor cannot report it
        }
    }

    /// Active ranks call it once in every round, after the other participants. Local, apart from the
    /// notification. Throws what the sink throws; the exception then leaves the guard.
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

/// The class for arguments that fit no constructor. It holds only the explanation.
template <std::same_as<detail::NoCommunicator> None>
class ProgressLine<None> {
    static_assert(
        !std::same_as<None, detail::NoCommunicator>,
        "ProgressLine: expected a communicator, then a FILE*, such as stderr, or a function that takes a "
        "std::string_view, then options in braces with the names and the order of ProgressOptions; write "
        "ProgressOptions{...} to be told which name is wrong"
    );

public:
    explicit ProgressLine(...);
};
/// `...` takes missing arguments, too many, or braces with a wrong name.
ProgressLine(detail::AnyArgument, ...) -> ProgressLine<detail::NoCommunicator>;

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/impl/progress_line.ipp>
#endif
