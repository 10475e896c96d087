// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <optional>
#include <utility>

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
concept times_rounds = requires(T& timeline, bool is_shadow) {
    { timeline.round(is_shadow) } -> std::move_constructible;
};
template <class T>
concept times_buckets = requires(T& timeline, std::size_t n) {
    { timeline.bucket(n, n) } -> std::move_constructible;
};
template <class T>
concept times_forward = requires(T& timeline) {
    { timeline.forward() } -> std::move_constructible;
};
template <class T>
concept times_backward = requires(T& timeline) {
    { timeline.backward() } -> std::move_constructible;
};
template <class T>
concept times_roll_calls = requires(T& timeline) {
    { timeline.roll_call() } -> std::move_constructible;
};
template <class T>
concept notes_waits = requires(T& timeline, std::chrono::steady_clock::time_point time) {
    timeline.waited(time, time);
};

template <class T>
concept is_defined = requires { sizeof(T); };

/// Explains a timeline that is only declared. The standard library would explain it in its own words.
template <class T>
consteval bool has_header() {
    static_assert(
        is_defined<T>,
        "Timeline: this class is only declared; include <joinable/trace.hpp> for TraceTimeline, "
        "<joinable/nvtx.hpp> for NvtxTimeline"
    );
    return is_defined<T>;
}

} // namespace detail

/// A class that is told when a rank's rounds and buckets begin and end, to show them in a profiler. Each
/// expression begins a range of time and returns an object. The destruction of the object ends the range.
/// Ranges end in any order, and also if a round fails.
///
/// `timeline` is an lvalue of `T`.
/// | expression                      | begins                                                       |
/// |---------------------------------|--------------------------------------------------------------|
/// | `timeline.round(is_shadow)`     | a training round: from where it is opened, or shadowed, to   |
/// |                                 | its end on this rank                                         |
/// | `timeline.bucket(index, bytes)` | a collective of a bucket, or of a part of it: from its launch|
/// |                                 | to its wait, as the host sees it                             |
///
/// Optional; each may be missing without the others:
/// | expression                      | begins, or reports                                           |
/// |---------------------------------|--------------------------------------------------------------|
/// | `timeline.forward()`            | a forward pass, in a round or of an evaluation               |
/// | `timeline.backward()`           | a backward pass, including the wait for its last buckets     |
/// | `timeline.roll_call()`          | a roll call that the model opens: from announcing the round  |
/// |                                 | to the verdict, so the forward pass is inside                |
/// | `timeline.waited(begin, end)`   | when the host was blocked in the roll call of a round, by    |
/// |                                 | std::chrono::steady_clock; called afterwards                 |
///
/// Local; called by the thread that runs the round. Models: NoTimeline, NvtxTimeline (nvtx.hpp),
/// TraceTimeline (trace.hpp).
template <class T>
concept Timeline = detail::has_header<T>() && std::default_initializable<T> &&
                   detail::times_rounds<T> && detail::times_buckets<T>;

/// Records nothing and costs nothing.
struct NoTimeline {
    struct Range {};
    static constexpr Range round(bool /*is_shadow*/) noexcept { return {}; }
    static constexpr Range bucket(std::size_t /*index*/, std::size_t /*bytes*/) noexcept {
        return {};
    }
    /// Explains that a model without a TraceTimeline has nothing to start.
    template <class Capacity>
    static void start(Capacity) {
        static_assert(
            sizeof(Capacity) == 0,
            "start: this model records nothing; name a TraceTimeline in its type, as in "
            "DistributedDataParallel<Comm, AllReduce, TraceTimeline> ddp{...}"
        );
    }
};

namespace detail {

/// The optional ranges of a Timeline `T`. A member does nothing if `T` lacks its expression.
template <class T>
class PassRanges {
    struct Nothing {};
    static auto begin_forward(T& timeline) {
        if constexpr (times_forward<T>) {
            return timeline.forward();
        } else {
            return Nothing{};
        }
    }
    static auto begin_backward(T& timeline) {
        if constexpr (times_backward<T>) {
            return timeline.backward();
        } else {
            return Nothing{};
        }
    }
    static auto begin_roll_call(T& timeline) {
        if constexpr (times_roll_calls<T>) {
            return timeline.roll_call();
        } else {
            return Nothing{};
        }
    }

public:
    void open_forward(T& timeline) { static_cast<void>(forward_.emplace(begin_forward(timeline))); }
    void open_backward(T& timeline) {
        static_cast<void>(backward_.emplace(begin_backward(timeline)));
    }
    /// A round is announced. Without `is_answered` its verdict is still to come.
    void announce(T& timeline, bool is_answered) {
        is_heard_ = false;
        if (!is_answered) {
            static_cast<void>(roll_call_.emplace(begin_roll_call(timeline)));
        }
    }
    /// The verdict is there, and with it `round`. Only the first of these after announce() counts.
    template <class R>
    void hear(T& timeline, R const& round) {
        if (!std::exchange(is_heard_, true)) {
            roll_call_.reset();
            note_wait(timeline, round);
        }
    }
    void end_passes() noexcept { // inner ranges first
        forward_.reset();
        backward_.reset();
    }
    void end_all() noexcept {
        end_passes();
        roll_call_.reset();
    }
    template <class R>
    static void note_wait(T& timeline, R const& round) {
        if constexpr (notes_waits<T>) {
            if (auto const wait = round.waited(); wait.begin != wait.end) {
                timeline.waited(wait.begin, wait.end);
            }
        }
    }

private:
    std::optional<decltype(begin_roll_call(std::declval<T&>()))> roll_call_;
    std::optional<decltype(begin_forward(std::declval<T&>()))> forward_;
    std::optional<decltype(begin_backward(std::declval<T&>()))> backward_;
    bool is_heard_ = true;
};

} // namespace detail

}} // namespace joinable::v0
