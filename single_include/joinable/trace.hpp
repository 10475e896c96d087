// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/trace/trace_timeline.hpp

namespace joinable { inline namespace v0 {

/// The kind of a TraceEvent.
enum class TraceKind : std::uint32_t {
    round,        ///< a training round with an input of this rank; `value` is its number
    shadow_round, ///< a training round that this rank shadowed; `value` is its number
    forward,
    backward,
    roll_call, ///< from announcing a round to its verdict
    wait,      ///< blocked in a roll call
    bucket,    ///< the collective of bucket `index`, of `value` bytes; on a device only its launch
    sample,    ///< a number of the program at the moment `begin`, see TraceTimeline::sample()
};

/// A range of time on one rank. Times are nanoseconds of std::chrono::steady_clock. Plain bytes
/// without gaps, so that ranks can send it.
struct TraceEvent {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::uint64_t value = 0;
    std::uint32_t index = 0;
    TraceKind kind = TraceKind::round;

    /// The number of a sample.
    [[nodiscard]] constexpr double number() const noexcept { return std::bit_cast<double>(value); }

    friend constexpr bool operator==(TraceEvent const&, TraceEvent const&) = default;
};

/// Records rounds, passes, buckets and roll calls of one rank, in memory that start() reserves.
/// write_trace() writes the events of all ranks to a file for Perfetto; write_picture() draws them.
///
/// @code
/// joinable::DistributedDataParallel<Comm, joinable::AllReduce, joinable::TraceTimeline> ddp{
///     comm, model.parameters()};
/// ddp.timeline().start(100'000);
/// // ... train ...
/// joinable::write_trace(comm, ddp.timeline(), "run.json");
/// @endcode
///
/// Nothing is recorded before start(); a range then costs one test. A recorded range costs two readings of
/// the clock and no allocation. (NoTimeline costs nothing.) A range that ends when the memory is full is
/// counted but not kept, so a full trace shows the beginning of the run. Rounds, including shadowed ones,
/// are numbered from 0 during the lifetime of this object, so a round has the same number on all ranks. A forward pass
/// that is made again, outside of a guard or after its notice was refused, counts again, and a group of groups_of()
/// without an active rank counts none.
///
/// Times are those of the host. On a device, a bucket's range ends when the engine's stream has been told to
/// wait for the bucket, which says nothing about when the device reduces it. Use NvtxTimeline with a profiler.
///
/// Local; one thread at a time. It must outlive its ranges.
class TraceTimeline {
    using Clock = std::chrono::steady_clock;

public:
    /// Recorded when it ends.
    class [[nodiscard]] Range {
    public:
        Range(Range&& other) noexcept
            : timeline_{std::exchange(other.timeline_, nullptr)}, start_{other.start_},
              event_{other.event_} {}
        Range& operator=(Range&&) = delete;
        ~Range() {
            if (timeline_ != nullptr && timeline_->is_recording_ && timeline_->starts_ == start_) {
                event_.end = ticks(Clock::now());
                timeline_->add(event_);
            }
        }

    private:
        friend class TraceTimeline;
        Range(
            TraceTimeline& timeline,
            TraceKind kind,
            std::uint64_t value = 0,
            std::uint32_t index = 0
        ) noexcept
            : timeline_{timeline.is_recording_ ? &timeline : nullptr}, start_{timeline.starts_} {
            if (timeline_ != nullptr) {
                event_ = {ticks(Clock::now()), 0, value, index, kind};
            }
        }

        TraceTimeline* timeline_;
        std::uint64_t start_; ///< by which it is recorded
        TraceEvent event_;
    };

    TraceTimeline() = default;
    TraceTimeline(TraceTimeline const&) = delete;
    TraceTimeline& operator=(TraceTimeline const&) = delete;

    /// Discards recorded events and records up to `capacity` new ones, of 32 bytes each. A training round
    /// takes four, and one more for each bucket, each wait and each sample.
    /// @throws std::bad_alloc  nothing has changed.
    void start(std::size_t capacity) {
        std::vector<TraceEvent> events(capacity); // writes to all pages, so none is mapped later
        events_.swap(events);
        count_ = 0;
        dropped_ = 0;
        ++starts_;
        is_recording_ = true;
    }
    /// Records nothing more, nor the ranges that have begun. Recorded events stay.
    void stop() noexcept { is_recording_ = false; }

    /// Records a number of the program, such as the loss of a batch: pictures draw its mean over ranks as a
    /// curve below the lanes, and traces for Perfetto have it as a counter of the rank.
    void sample(double number) noexcept {
        if (is_recording_) {
            std::int64_t const now = ticks(Clock::now());
            add({now, now, std::bit_cast<std::uint64_t>(number), 0, TraceKind::sample});
        }
    }

    /// The recorded events, in the order in which they ended.
    [[nodiscard]] std::span<TraceEvent const> events() const noexcept {
        return {events_.data(), count_};
    }
    /// How many events ended after the memory was full.
    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

    // The members of a Timeline.

    Range round(bool is_shadow) noexcept {
        return {*this, is_shadow ? TraceKind::shadow_round : TraceKind::round, rounds_++};
    }
    Range bucket(std::size_t index, std::size_t bytes) noexcept {
        return {*this, TraceKind::bucket, bytes, static_cast<std::uint32_t>(index)};
    }
    Range forward() noexcept { return {*this, TraceKind::forward}; }
    Range backward() noexcept { return {*this, TraceKind::backward}; }
    Range roll_call() noexcept { return {*this, TraceKind::roll_call}; }
    void waited(Clock::time_point begin, Clock::time_point end) noexcept {
        if (is_recording_) {
            add({ticks(begin), ticks(end), 0, 0, TraceKind::wait});
        }
    }

private:
    static std::int64_t ticks(Clock::time_point time) noexcept {
        return std::chrono::nanoseconds{time.time_since_epoch()}.count();
    }
    void add(TraceEvent const& event) noexcept {
        if (count_ < events_.size()) {
            events_[count_++] = event;
        } else {
            ++dropped_;
        }
    }

    std::vector<TraceEvent> events_; ///< room for the capacity
    std::size_t count_ = 0;          ///< recorded events, at the front
    std::uint64_t dropped_ = 0;
    std::uint64_t rounds_ = 0;
    std::uint64_t starts_ = 0;
    bool is_recording_ = false;
};
static_assert(Timeline<TraceTimeline>);

}} // namespace joinable::v0

// ---- joinable/trace/data_parallel_report.hpp

namespace joinable { inline namespace v0 {

/// How a model trains, for a log of runs. PyTorch calls this DDP logging data.
struct DataParallelReport {
    int rank = 0;
    int world_size = 0;
    std::string model;               ///< DataParallelOptions::model_name; empty: none
    std::string device;              ///< where gradients are averaged: "host" or "CUDA device 0"
    std::string reduction;           ///< how buckets travel
    std::size_t parameters = 0;      ///< the number of those that require a gradient
    std::size_t parameter_bytes = 0; ///< of their gradients
    std::vector<std::size_t> bucket_bytes;
    bool buckets_are_final = false; ///< false: they will be cut anew
    std::size_t bucket_cap_bytes = 0;
    std::size_t first_bucket_bytes = 0;
    bool find_unused = false;
    bool static_graph = false;
    bool gradient_as_bucket_view = false;
    bool could_be_views =
        false; ///< gradients were copied; with gradient_as_bucket_view they need not
    bool broadcast_buffers = false;
    bool uneven_inputs = false; ///< an enabled guard has had the model
    double divisor = 0;         ///< of the last average; 0: there was none, or weights summed to 0

    // Averages over the rounds in which this rank trained and that a TraceTimeline recorded completely;
    // zeros without one.
    std::size_t timed_rounds = 0; ///< the number of these rounds
    std::chrono::nanoseconds round{};
    std::chrono::nanoseconds forward{};
    std::chrono::nanoseconds backward{};
    // None for buckets on a device: a timeline has the times of the host, which does not wait for them.
    std::optional<std::chrono::nanoseconds> buckets =
        std::chrono::nanoseconds{}; ///< from the launch of the first one to the end of the last one
    std::optional<std::chrono::nanoseconds> overlap =
        std::chrono::nanoseconds{}; ///< the part of `buckets` during the backward pass
};

namespace detail {

void add_buckets(DataParallelReport& report, std::vector<Bucket> const& buckets);
void add_times(DataParallelReport& report, std::span<TraceEvent const> events);

} // namespace detail

/// The report of a DistributedDataParallel on this rank. Local; between rounds.
template <class Ddp>
[[nodiscard]] DataParallelReport data_parallel_report(Ddp& ddp) {
    DataParallelReport report;
    report.rank = static_cast<int>(ddp.join_communicator().rank());
    report.world_size = static_cast<int>(ddp.join_communicator().size());
    report.model = ddp.options().model_name;
    Device const& device = detail::device_of(ddp.join_communicator());
    report.device = detail::is_on_host(device) ? "host" : detail::to_text(device.id());
    report.reduction = ddp.reduction().name;
    detail::add_buckets(report, ddp.buckets());
    report.buckets_are_final = !ddp.is_rebuild_due();
    auto const& options = ddp.options();
    report.bucket_cap_bytes = options.bucket_cap_bytes;
    report.first_bucket_bytes = options.first_bucket_bytes;
    report.find_unused = options.find_unused;
    report.static_graph = options.static_graph;
    report.gradient_as_bucket_view = options.gradient_as_bucket_view;
    report.could_be_views = ddp.copies_without_need();
    report.broadcast_buffers = options.broadcast_buffers;
    report.uneven_inputs = ddp.has_had_guard();
    report.divisor = ddp.divisor();
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(ddp.timeline())>, TraceTimeline>) {
        detail::add_times(report, ddp.timeline().events());
    }
    using Comm = std::remove_cvref_t<decltype(ddp.join_communicator())>;
    if constexpr (!detail::reduces_host_memory<Comm>) {
        report.buckets = report.overlap = std::nullopt;
    }
    return report;
}

/// As a table for people: a line for each member, with its unit, but for those that are none. If gradients could be views
/// of the buckets, a last line says so.
[[nodiscard]] std::string to_string(DataParallelReport const& report);

/// As one line of JSON: an object with the members under their names, but those that are none. "_nanoseconds" follows the name of a
/// time.
[[nodiscard]] std::string to_json(DataParallelReport const& report);

/// Writes the report of a DistributedDataParallel of this rank as a line of JSON, in every
/// DataParallelOptions::report_every rounds that train and sync, from here on, also in those that this rank shadows.
///
/// The sink is a FILE*, which must outlive the model, or a function that takes each line as a
/// std::string_view, "\n" included. Errors of a file are ignored; what a function throws leaves the guard. Nothing is
/// sent: each rank that calls this writes its own report. Local, between rounds.
/// @throws ContractViolation  report_every is 0.
template <class Ddp>
void report_to(Ddp& ddp, std::function<void(std::string_view)> sink) {
    ddp.set_report_hook([&ddp, sink = std::move(sink)] {
        sink(to_json(data_parallel_report(ddp)) + "\n");
    });
}
template <class Ddp>
void report_to(Ddp& ddp, std::FILE* file) {
    joinable::report_to(ddp, std::function<void(std::string_view)>{[file](std::string_view line) {
                            static_cast<void>(std::fwrite(line.data(), 1, line.size(), file));
                            static_cast<void>(std::fflush(file));
                        }});
}

}} // namespace joinable::v0

// ---- joinable/trace/trace.hpp

namespace joinable { inline namespace v0 {

namespace detail {
/// The same text, in which each byte that belongs to no UTF-8 character is one of Latin-1: JSON and
/// XML have characters alone.
[[nodiscard]] std::string as_utf8(std::string_view text);
} // namespace detail

/// The events of one rank.
struct RankTrace {
    std::vector<TraceEvent> events;
    std::uint64_t dropped = 0; ///< the number of events for which there was no room
};

/// The events of all ranks, by rank, on one clock: see gather_trace().
struct Trace {
    std::vector<RankTrace> ranks;
};

/// Writes the trace in pieces, as one object of the Trace Event Format, which ui.perfetto.dev and
/// chrome://tracing open. Local.
///
/// | event                            | shows                                                       |
/// |----------------------------------|-------------------------------------------------------------|
/// | complete ("X"), nested           | round, shadow round, roll call, forward, wait, backward     |
/// | asynchronous ("b" and "e")       | buckets, as they overlap                                    |
/// | counter ("C")                    | samples; JSON has no number for those that are not finite   |
/// | metadata ("M")                   | the names of the tracks                                     |
/// | instant ("i")                    | how many events a rank dropped, if it dropped any           |
///
/// Rank r is the process and the thread r + 1, because viewers take 0 for the idle thread. Times are
/// microseconds since the first event of all ranks, with three decimals. Throws what `sink` throws.
void write_json(Trace const& trace, std::function<void(std::string_view)> const& sink);

/// The same as one string.
[[nodiscard]] std::string to_json(Trace const& trace);

/// The result as one line of JSON: an object with the members of JoinResult under their names. Only
/// `waited` is called `waited_nanoseconds`.
[[nodiscard]] std::string to_json(JoinResult const& result);

}} // namespace joinable::v0

// ---- joinable/trace/impl/trace.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>

namespace joinable { inline namespace v0 {

namespace detail {

/// How many bytes the character has that a text begins with. 0: they are not UTF-8.
inline std::size_t bytes_of_character(std::string_view text) noexcept {
    auto const byte = [&](std::size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
    };
    unsigned const first = byte(0);
    std::size_t const bytes = first < 0x80U                      ? 1
                              : first >= 0xc2U && first <= 0xdfU ? 2
                              : first >= 0xe0U && first <= 0xefU ? 3
                              : first >= 0xf0U && first <= 0xf4U ? 4
                                                                 : 0;
    for (std::size_t i = 1; i < bytes; ++i) {
        if ((byte(i) & 0xc0U) != 0x80U) {
            return 0;
        }
    }
    unsigned const second = byte(1);
    bool const is_longer_than_needed =
        (first == 0xe0U && second < 0xa0U) || (first == 0xf0U && second < 0x90U);
    bool const is_surrogate = first == 0xedU && second >= 0xa0U;
    bool const is_above_all = first == 0xf4U && second >= 0x90U;
    bool const is_none_of_xml = first == 0xefU && second == 0xbfU && byte(2) >= 0xbeU;
    return is_longer_than_needed || is_surrogate || is_above_all || is_none_of_xml ? 0 : bytes;
}

JOINABLE_DEFINITION std::string as_utf8(std::string_view text) {
    std::string valid;
    while (!text.empty()) {
        std::size_t const bytes = bytes_of_character(text);
        if (bytes == 0) {
            auto const letter = static_cast<unsigned char>(text.front());
            valid += static_cast<char>(0xc0U | (letter >> 6U));
            valid += static_cast<char>(0x80U | (letter & 0x3fU));
        }
        valid += text.substr(0, bytes);
        text.remove_prefix((std::max)(bytes, std::size_t{1}));
    }
    return valid;
}

/// Writes events as JSON, each on a line of its own.
class TraceWriter {
public:
    TraceWriter(Trace const& trace, std::function<void(std::string_view)> const& sink)
        : sink_{sink} {
        for (RankTrace const& rank : trace.ranks) {
            dropped_ += rank.dropped;
            for (TraceEvent const& event : rank.events) {
                start_ = (std::min)(start_, event.begin);
            }
        }
    }

    void write(Trace const& trace) {
        text_ = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"producer\":\"joinable\",\"ranks\":";
        text_ +=
            concat(trace.ranks.size(), ",\"dropped_events\":", dropped_, "},\"traceEvents\":[");
        for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
            write_rank(rank, trace.ranks[rank]);
        }
        text_ += "\n]}\n";
        sink_(text_);
    }

private:
    void write_rank(std::size_t rank, RankTrace const& recorded) {
        track_ = concat("\"pid\":", rank + 1, ",\"tid\":", rank + 1);
        std::string const name = concat(",\"args\":{\"name\":\"rank ", rank, "\"}}");
        begin_event("M", "process_name");
        text_ += name;
        begin_event("M", "process_sort_index");
        text_ += concat(",\"args\":{\"sort_index\":", rank, "}}");
        begin_event("M", "thread_name");
        text_ += name;
        std::vector<TraceEvent> events = recorded.events;
        std::sort(events.begin(), events.end(), is_before);
        for (TraceEvent const& event : events) {
            if (event.kind == TraceKind::bucket) {
                write_bucket(event);
            } else if (event.kind == TraceKind::sample) {
                write_sample(event);
            } else {
                write_complete(event);
            }
        }
        if (recorded.dropped != 0) {
            begin_event("i", concat(recorded.dropped, " events were dropped, there was no room"));
            append_time("ts", events.empty() ? start_ : end_of(events));
            text_ += ",\"s\":\"t\"}";
        }
    }

    /// Outer events first, also where two begin at once.
    static bool is_before(TraceEvent const& a, TraceEvent const& b) noexcept {
        return a.begin != b.begin ? a.begin < b.begin
               : a.end != b.end   ? a.end > b.end
                                  : depth(a.kind) < depth(b.kind);
    }
    static int depth(TraceKind kind) noexcept {
        bool const is_round = kind == TraceKind::round || kind == TraceKind::shadow_round;
        return is_round ? 0 : kind == TraceKind::roll_call ? 1 : 2;
    }
    static std::int64_t end_of(std::vector<TraceEvent> const& events) noexcept {
        std::int64_t end = events.front().end;
        for (TraceEvent const& event : events) {
            end = (std::max)(end, event.end);
        }
        return end;
    }

    void write_complete(TraceEvent const& event) {
        constexpr char const* names[] = {
            "round", "shadow round", "forward", "backward", "roll call", "wait"
        };
        begin_event("X", names[static_cast<std::size_t>(event.kind)]);
        text_ += ",\"cat\":\"round\"";
        append_time("ts", event.begin);
        append_time("dur", start_ + (event.end - event.begin));
        if (event.kind == TraceKind::round || event.kind == TraceKind::shadow_round) {
            text_ += concat(",\"args\":{\"number\":", event.value, "}");
        }
        text_ += '}';
    }
    void write_bucket(TraceEvent const& event) {
        std::string const name = concat("bucket ", event.index);
        std::string const id = concat(",\"cat\":\"bucket\",\"id\":\"", ids_++, "\"");
        begin_event("b", name);
        text_ += id;
        append_time("ts", event.begin);
        text_ += concat(",\"args\":{\"bytes\":", event.value, "}}");
        begin_event("e", name);
        text_ += id;
        append_time("ts", event.end);
        text_ += '}';
    }
    void write_sample(TraceEvent const& event) {
        if (std::isfinite(event.number())) {
            begin_event("C", "sample");
            append_time("ts", event.begin);
            std::string const number = number_text(event.number(), std::chars_format::general, 17);
            text_ += concat(",\"args\":{\"number\":", number, "}}");
        }
    }

    void begin_event(char const* phase, std::string_view name) {
        constexpr std::size_t piece = std::size_t{1} << 16U;
        if (text_.size() > piece) {
            sink_(text_);
            text_.clear();
        }
        text_ += concat(is_first_ ? "\n" : ",\n", "{\"ph\":\"", phase, "\",\"name\":\"", name);
        text_ += concat("\",", track_);
        is_first_ = false;
    }
    void append_time(char const* key, std::int64_t time) {
        std::string const nanoseconds = to_text(time - start_);
        std::size_t const zeros = nanoseconds.size() < 4 ? 4 - nanoseconds.size() : 0;
        std::string const padded = std::string(zeros, '0') + nanoseconds;
        std::size_t const point = padded.size() - 3;
        text_ += concat(",\"", key, "\":", padded.substr(0, point), ".", padded.substr(point));
    }

    std::function<void(std::string_view)> const& sink_;
    std::string text_; ///< what the sink is yet to get
    std::string track_;
    std::int64_t start_ = (std::numeric_limits<std::int64_t>::max)();
    std::uint64_t dropped_ = 0;
    std::uint64_t ids_ = 1;
    bool is_first_ = true;
};

} // namespace detail

JOINABLE_DEFINITION void
write_json(Trace const& trace, std::function<void(std::string_view)> const& sink) {
    detail::TraceWriter{trace, sink}.write(trace);
}

JOINABLE_DEFINITION std::string to_json(Trace const& trace) {
    std::string text;
    write_json(trace, [&](std::string_view piece) { text += piece; });
    return text;
}

JOINABLE_DEFINITION std::string to_json(JoinResult const& result) {
    auto const array = [](auto const& numbers) {
        std::string text = "[";
        for (auto const number : numbers) {
            text += detail::concat(text.size() == 1 ? "" : ",", number);
        }
        return text + "]";
    };
    std::string text = detail::concat("{\"rounds\":", result.rounds);
    text += detail::concat(",\"own_rounds\":", result.own_rounds);
    text += detail::concat(",\"shadow_rounds\":", result.shadow_rounds);
    text += ",\"rounds_per_rank\":" + array(result.rounds_per_rank);
    text += ",\"last_joiners\":" + array(result.last_joiners);
    text += detail::concat(",\"authoritative_rank\":", result.authoritative_rank);
    text += detail::concat(",\"stopped_early\":", result.stopped_early ? "true" : "false");
    text += detail::concat(",\"unsynced_rounds\":", result.unsynced_rounds);
    return text + detail::concat(",\"waited_nanoseconds\":", result.waited.count(), "}");
}

}} // namespace joinable::v0

#endif

// ---- joinable/trace/impl/data_parallel_report.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

namespace joinable { inline namespace v0 {

namespace detail {

JOINABLE_DEFINITION void
add_buckets(DataParallelReport& report, std::vector<Bucket> const& buckets) {
    for (Bucket const& bucket : buckets) {
        report.bucket_bytes.push_back(bucket.buffer.bytes());
        report.parameters += bucket.parameters.size();
        for (AnyView const& view : bucket.views) {
            report.parameter_bytes += view.numel() * size_of(view.dtype());
        }
    }
}

JOINABLE_DEFINITION void add_times(DataParallelReport& report, std::span<TraceEvent const> events) {
    struct Range {
        std::int64_t begin = (std::numeric_limits<std::int64_t>::max)();
        std::int64_t end = 0;

        void add(TraceEvent const& event) {
            begin = (std::min)(begin, event.begin);
            end = (std::max)(end, event.end);
        }
        [[nodiscard]] std::chrono::nanoseconds length() const {
            return std::chrono::nanoseconds{(std::max)(end - begin, std::int64_t{0})};
        }
    };
    std::size_t first = 0; // of the events since the last round
    for (std::size_t i = 0; i < events.size(); ++i) {
        TraceEvent const& event = events[i];
        bool const trains = event.kind == TraceKind::round;
        if (trains) { // a round ends after what is in it
            Range forward;
            Range backward;
            Range buckets;
            for (TraceEvent const& inner : events.subspan(first, i - first)) {
                if (inner.begin < event.begin) {
                    continue; // of an evaluation, or of a round that was not recorded whole
                }
                switch (inner.kind) {
                case TraceKind::forward: forward.add(inner); break;
                case TraceKind::backward: backward.add(inner); break;
                case TraceKind::bucket: buckets.add(inner); break;
                case TraceKind::round:
                case TraceKind::shadow_round:
                case TraceKind::roll_call:
                case TraceKind::wait:
                case TraceKind::sample: break;
                }
            }
            Range const both{
                (std::max)(backward.begin, buckets.begin), (std::min)(backward.end, buckets.end)
            };
            ++report.timed_rounds;
            report.round += std::chrono::nanoseconds{event.end - event.begin};
            report.forward += forward.length();
            report.backward += backward.length();
            *report.buckets += buckets.length();
            *report.overlap += both.length();
        }
        if (trains || event.kind == TraceKind::shadow_round) {
            first = i + 1;
        }
    }
    auto const rounds =
        static_cast<std::chrono::nanoseconds::rep>((std::max)(report.timed_rounds, std::size_t{1}));
    for (auto* const time :
         {&report.round, &report.forward, &report.backward, &*report.buckets, &*report.overlap}) {
        *time /= rounds;
    }
}

/// Calls f(name, value, unit) for each member.
template <class F>
void for_each_member(DataParallelReport const& report, F const& f) {
    f("rank", report.rank, "");
    f("world_size", report.world_size, "");
    if (!report.model.empty()) {
        f("model", report.model, "");
    }
    f("device", report.device, "");
    f("reduction", report.reduction, "");
    f("parameters", report.parameters, "");
    f("parameter_bytes", report.parameter_bytes, "");
    f("bucket_bytes", report.bucket_bytes, "");
    f("buckets_are_final", report.buckets_are_final, "");
    f("bucket_cap_bytes", report.bucket_cap_bytes, "");
    f("first_bucket_bytes", report.first_bucket_bytes, "");
    f("find_unused", report.find_unused, "");
    f("static_graph", report.static_graph, "");
    f("gradient_as_bucket_view", report.gradient_as_bucket_view, "");
    f("could_be_views", report.could_be_views, "");
    f("broadcast_buffers", report.broadcast_buffers, "");
    f("uneven_inputs", report.uneven_inputs, "");
    f("divisor", report.divisor, "");
    f("timed_rounds", report.timed_rounds, "");
    f("round", report.round.count(), "_nanoseconds");
    f("forward", report.forward.count(), "_nanoseconds");
    f("backward", report.backward.count(), "_nanoseconds");
    if (report.buckets) {
        f("buckets", report.buckets->count(), "_nanoseconds");
    }
    if (report.overlap) {
        f("overlap", report.overlap->count(), "_nanoseconds");
    }
}

} // namespace detail

JOINABLE_DEFINITION std::string to_string(DataParallelReport const& report) {
    std::string table;
    detail::for_each_member(
        report,
        [&](std::string_view name, auto const& value, char const* unit) {
            constexpr std::size_t width = 25;
            table += name;
            table += std::string(width - name.size(), ' ');
            if (*unit == 0) {
                table += detail::agreed_text(value);
            } else if constexpr (requires { value / 1e3; }) {
                table += detail::concat(static_cast<double>(value) / 1e3, " us");
            }
            table += '\n';
        }
    );
    if (report.could_be_views) {
        table += "gradients could be views of the buckets: set gradient_as_bucket_view\n";
    }
    return table;
}

JOINABLE_DEFINITION std::string to_json(DataParallelReport const& report) {
    std::string text;
    detail::for_each_member(
        report,
        [&](std::string_view name, auto const& value, char const* unit) {
            text += detail::concat(text.empty() ? "{\"" : ",\"", name, unit, "\":");
            text += detail::agreed_text(value, true); // strings in quotes
        }
    );
    return detail::as_utf8(text + "}");
}

}} // namespace joinable::v0

#endif

// ---- joinable/trace/picture.hpp

namespace joinable { inline namespace v0 {

/// Draws a trace as an SVG picture. Time runs to the right. Each rank has a lane that shows when the rank
/// trained, waited in roll calls, and shadowed. The numbers beside a lane are the rank's rounds and the
/// share of its time that it waited; the line above the lanes has the shares of all ranks together. Local.
///
/// A picture has the same width for a run of any length. A column of a lane is filled in proportion to how
/// its time was spent: if it has two colours, both happened within it. Waits for gradients of other ranks
/// are a part of training and shadowing. Time outside rounds, such as that of the optimizer, has the
/// colour of the empty lane. A curve below the lanes, with the name `samples`, is the mean of what ranks gave
/// TraceTimeline::sample() in the time of a column; samples that are not finite are left out. Browsers draw the
/// picture light or dark, by the setting of the reader's system.
[[nodiscard]] std::string to_svg(Trace const& trace, std::string_view samples = "sample");

}} // namespace joinable::v0

// ---- joinable/trace/impl/picture.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// The uses of a rank's time, from first to last in a column from the bottom up.
enum class Spent : std::size_t { training, shadowing, waiting };
inline constexpr std::size_t spent_count = 3;

/// One rank's lane: for each column of the picture the shares of its time.
class Lane {
public:
    static constexpr std::size_t columns = 720;

    Lane(RankTrace const& rank, std::int64_t begin, std::int64_t end)
        : begin_{begin}, scale_{static_cast<double>(columns) / static_cast<double>(end - begin)},
          shares_(columns) {
        std::vector<TraceEvent> rounds;
        for (TraceEvent const& event : rank.events) {
            if (event.kind == TraceKind::round) {
                rounds.push_back(event);
                add(Spent::training, event.begin, event.end, 1);
            } else if (event.kind == TraceKind::shadow_round) {
                ++shadow_rounds_;
                add(Spent::shadowing, event.begin, event.end, 1);
            }
        }
        rounds_ = rounds.size();
        for (TraceEvent const& event : rank.events) {
            if (event.kind == TraceKind::wait) {
                add(Spent::waiting, event.begin, event.end, 1);
                take_from_training(rounds, event);
            }
        }
    }

    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_; }
    [[nodiscard]] std::size_t shadow_rounds() const noexcept { return shadow_rounds_; }
    /// The share of the whole picture's time.
    [[nodiscard]] double share(Spent spent) const noexcept {
        double sum = 0;
        for (Shares const& column : shares_) {
            sum += column[static_cast<std::size_t>(spent)];
        }
        return sum / static_cast<double>(columns);
    }

    /// An SVG path of what is filled, in a lane at these coordinates. Columns that are alike are one.
    [[nodiscard]] std::string path(Spent spent, int x, int y, int height) const {
        std::string text;
        for (std::size_t first = 0; first < columns;) {
            auto const [bottom, top] = extent(first, spent, height);
            std::size_t last = first + 1;
            while (last < columns && extent(last, spent, height) == std::array{bottom, top}) {
                ++last;
            }
            if (bottom != top) {
                text += concat("M", x + static_cast<int>(first), " ");
                text += to_text(y + height - bottom / 10.0);
                text += concat("v", (bottom - top) / 10.0, "h", last - first);
                text += concat("v", (top - bottom) / 10.0, "z");
            }
            first = last;
        }
        return text;
    }

private:
    using Shares = std::array<double, spent_count>;

    void add(Spent spent, std::int64_t begin, std::int64_t end, double factor) {
        double const from = static_cast<double>(begin - begin_) * scale_;
        double const to = static_cast<double>(end - begin_) * scale_;
        for (auto column = static_cast<std::size_t>((std::max)(from, 0.0));
             column < columns && static_cast<double>(column) < to;
             ++column) {
            auto const left = static_cast<double>(column);
            double const share = (std::min)(to, left + 1) - (std::max)(from, left);
            shares_[column][static_cast<std::size_t>(spent)] += factor * share;
        }
    }
    /// Rounds of a rank do not overlap and are in order.
    void take_from_training(std::vector<TraceEvent> const& rounds, TraceEvent const& wait) {
        auto const ends_before = [](TraceEvent const& round, std::int64_t time) {
            return round.end <= time;
        };
        auto round = std::lower_bound(rounds.begin(), rounds.end(), wait.begin, ends_before);
        for (; round != rounds.end() && round->begin < wait.end; ++round) {
            std::int64_t const from = (std::max)(round->begin, wait.begin);
            add(Spent::training, from, (std::min)(round->end, wait.end), -1);
        }
    }

    /// Bottom and top of what is filled, in tenths of a pixel from the lane's bottom.
    [[nodiscard]] std::array<int, 2> extent(std::size_t column, Spent spent, int height) const {
        double below = 0;
        for (std::size_t s = 0; s < static_cast<std::size_t>(spent); ++s) {
            below += shares_[column][s];
        }
        double const above = below + shares_[column][static_cast<std::size_t>(spent)];
        auto const tenths = [&](double share) {
            return static_cast<int>(std::lround((std::clamp)(share, 0.0, 1.0) * 10 * height));
        };
        return {tenths(below), tenths(above)};
    }

    std::int64_t begin_;
    double scale_; ///< columns in a nanosecond
    std::vector<Shares> shares_;
    std::size_t rounds_ = 0;
    std::size_t shadow_rounds_ = 0;
};

/// The mean of the samples of all ranks in each column of the picture.
class Curve {
public:
    void add(RankTrace const& rank, std::int64_t begin, std::int64_t end) {
        for (TraceEvent const& event : rank.events) {
            if (event.kind == TraceKind::sample && std::isfinite(event.number())) {
                double const share =
                    static_cast<double>(event.begin - begin) / static_cast<double>(end - begin);
                auto const column =
                    static_cast<std::size_t>((std::clamp)(share, 0.0, 1.0) * Lane::columns);
                Column& here = columns_[(std::min)(column, Lane::columns - 1)];
                here.mean += (event.number() - here.mean) / static_cast<double>(++here.count);
            }
        }
    }

    /// The least and the largest mean, or nothing without samples.
    [[nodiscard]] std::optional<std::pair<double, double>> range() const {
        std::optional<std::pair<double, double>> found;
        for (Column const& column : columns_) {
            if (column.count != 0) {
                auto const [least, largest] = found.value_or(std::pair{column.mean, column.mean});
                found = std::pair{(std::min)(least, column.mean), (std::max)(largest, column.mean)};
            }
        }
        return found;
    }

    /// The points of an SVG polyline, in a chart at these coordinates whose height is the range.
    [[nodiscard]] std::string points(int x, int y, int height) const {
        auto const [least, largest] = range().value();
        std::string text;
        std::size_t points = 0;
        auto const add = [&](std::size_t column, double share) {
            double const at = std::round(10 * (y + height * (1 - share))) / 10;
            text += concat(text.empty() ? "" : " ", x + static_cast<int>(column), ",", at);
            ++points;
        };
        for (std::size_t c = 0; c < Lane::columns; ++c) {
            if (columns_[c].count != 0) {
                add(c, largest > least ? (columns_[c].mean - least) / (largest - least) : 0.5);
            }
        }
        if (points == 1) { // a line of one point is not drawn
            std::string const one = text;
            text += concat(" ", x, one.substr(one.find(',')));
        }
        return text;
    }

private:
    struct Column {
        double mean = 0;
        std::size_t count = 0;
    };
    std::array<Column, Lane::columns> columns_{};
};

/// Puts the parts of a picture one below another.
class Picture {
public:
    Picture(Trace const& trace, std::string_view samples) : samples_{samples} {
        begin_ = (std::numeric_limits<std::int64_t>::max)();
        for (RankTrace const& rank : trace.ranks) {
            dropped_ += rank.dropped;
            for (TraceEvent const& event : rank.events) {
                begin_ = (std::min)(begin_, event.begin);
                end_ = (std::max)(end_, event.end);
            }
        }
        is_empty_ = begin_ > end_;
        begin_ = is_empty_ ? 0 : begin_;
        end_ = (std::max)(end_, begin_ + 1);
        for (RankTrace const& rank : trace.ranks) {
            lanes_.emplace_back(rank, begin_, end_);
            curve_.add(rank, begin_, end_);
        }
        auto const ranks = static_cast<int>(lanes_.size());
        height_ = ranks <= 4 ? 32 : ranks <= 8 ? 24 : ranks <= 16 ? 18 : 12;
        gap_ = height_ / 4;
    }

    [[nodiscard]] std::string draw() const {
        auto const ranks = static_cast<int>(lanes_.size());
        int const below_lanes = top + ranks * (height_ + gap_);
        int const bottom = below_lanes + (curve_.range() ? above_curve + curve_height + 8 : 0);
        std::string text = concat(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ",
            width,
            " ",
            bottom + 52,
            "\" width=\"",
            width,
            "\" height=\"",
            bottom + 52,
            "\" role=\"img\">\n<title>",
            title(),
            "</title>\n<desc>",
            summary(),
            "</desc>\n",
            style
        );
        text += element("rect", "page", {{"width", width}, {"height", bottom + 52}});
        text += label("title", left, 30, title());
        text += label("note", left, 51, summary());
        text += legend();
        text += label("head", trained_at, top - 8, "trained");
        text += label("head", shadowed_at, top - 8, "shadowed");
        text += label("head", waited_at, top - 8, "waited");
        for (int rank = 0; rank < ranks; ++rank) {
            text += lane(rank, top + rank * (height_ + gap_));
        }
        text += curve(below_lanes + above_curve) + axis(bottom) + "</svg>\n";
        return text;
    }

private:
    static constexpr int width = 1040;
    static constexpr int left = 80; ///< where lanes begin
    static constexpr int top = 116;
    static constexpr int curve_height = 110;
    static constexpr int above_curve = 34; ///< for its name
    static constexpr int plot = static_cast<int>(Lane::columns);
    static constexpr int trained_at = left + plot + 74; ///< right edges of the numbers
    static constexpr int shadowed_at = trained_at + 74;
    static constexpr int waited_at = shadowed_at + 70;
    static constexpr std::array<char const*, spent_count> classes{"train", "shadow", "wait"};
    // Each pair of neighbours differs in lightness, too, for readers who see fewer colours.
    static constexpr char const* style =
        "<style>\n"
        "text{font-family:system-ui,sans-serif;font-size:13px;fill:#1f2328}\n"
        ".title{font-size:18px;font-weight:600}\n"
        ".note,.head,.tick{fill:#59636e}\n"
        ".rank,.head,.number{text-anchor:end;font-variant-numeric:tabular-nums}\n"
        ".tick{text-anchor:middle;font-size:12px}\n"
        ".warn{fill:#b42318}\n"
        ".page{fill:#ffffff}.lane{fill:#eaeef2}.line{stroke:#8c959f}\n"
        ".train{fill:#2a6fbb}.shadow{fill:#9fb3c8}.wait{fill:#e8961e}\n"
        ".curve{fill:none;stroke:#1a7f37;stroke-width:1.5}\n"
        "@media (prefers-color-scheme:dark){\n"
        "text{fill:#e6edf3}.note,.head,.tick{fill:#9198a1}.warn{fill:#ff8f83}\n"
        ".page{fill:#0d1117}.lane{fill:#21262d}.line{stroke:#6e7681}\n"
        ".train{fill:#4c9bf0}.shadow{fill:#566b85}.wait{fill:#f0b23e}\n"
        ".curve{stroke:#56d364}\n"
        "}\n"
        "</style>\n";

    static std::string label(char const* kind, int x, int y, std::string_view text) {
        return concat("<text class=\"", kind, "\" x=\"", x, "\" y=\"", y, "\">", text, "</text>\n");
    }
    using Attributes = std::initializer_list<std::pair<char const*, int>>;
    static std::string element(char const* name, char const* kind, Attributes attributes) {
        std::string text = concat("<", name, " class=\"", kind, "\"");
        for (auto const& [key, value] : attributes) {
            text += concat(" ", key, "=\"", value, "\"");
        }
        return text + "/>\n";
    }
    static std::string percent(double share) {
        return number_text(100 * share, std::chars_format::fixed, 1) + " %";
    }
    [[nodiscard]] double seconds() const noexcept {
        return static_cast<double>(end_ - begin_) / 1e9;
    }

    [[nodiscard]] std::string title() const {
        std::size_t rounds = 0; // of all ranks: each trained or shadowed
        for (Lane const& lane : lanes_) {
            rounds = (std::max)(rounds, lane.rounds() + lane.shadow_rounds());
        }
        auto const count = [](std::size_t number, char const* thing) {
            return concat(number, " ", thing, number == 1 ? "" : "s");
        };
        std::string text = count(lanes_.size(), "rank") + ", " + count(rounds, "round");
        if (!is_empty_) {
            text += concat(" in ", duration(seconds(), seconds()));
        }
        return text;
    }
    [[nodiscard]] std::string summary() const {
        if (is_empty_) {
            return "Nothing was recorded.";
        }
        auto const share = [&](Spent spent) {
            double sum = 0;
            for (Lane const& lane : lanes_) {
                sum += lane.share(spent);
            }
            return percent(sum / static_cast<double>(lanes_.size()));
        };
        return concat(
            "Of their time, ranks trained ",
            share(Spent::training),
            ", shadowed ",
            share(Spent::shadowing),
            " and waited ",
            share(Spent::waiting),
            "."
        );
    }
    /// In the unit that `longest` has.
    static std::string duration(double time, double longest) {
        return longest < 1e-3  ? rounded_text(1e6 * time) + " us"
               : longest < 1.0 ? rounded_text(1e3 * time) + " ms"
               : longest < 600 ? rounded_text(time) + " s"
                               : rounded_text(time / 60) + " min";
    }

    [[nodiscard]] static std::string legend() {
        constexpr std::array<char const*, 4> kinds{"train", "wait", "shadow", "lane"};
        constexpr std::array<char const*, 4> texts{
            "training", "waiting in roll calls", "shadowing the others", "outside rounds"
        };
        constexpr std::array<int, 4> widths{100, 170, 180, 0};
        std::string text;
        int x = left;
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            text += element("rect", kinds[i], {{"x", x}, {"y", 68}, {"width", 14}, {"height", 14}});
            text += label("key", x + 20, 80, texts[i]);
            x += widths[i];
        }
        return text;
    }

    [[nodiscard]] std::string lane(int rank, int y) const {
        Lane const& drawn = lanes_[static_cast<std::size_t>(rank)];
        int const base = y + height_ / 2 + 5;
        std::string text = label("rank", left - 10, base, concat("rank ", rank));
        text +=
            element("rect", "lane", {{"x", left}, {"y", y}, {"width", plot}, {"height", height_}});
        for (std::size_t s = 0; s < spent_count; ++s) {
            std::string const path = drawn.path(static_cast<Spent>(s), left, y, height_);
            if (!path.empty()) {
                text += concat("<path class=\"", classes[s], "\" d=\"", path, "\"/>\n");
            }
        }
        text += label("number", trained_at, base, to_text(drawn.rounds()));
        text += label("number", shadowed_at, base, to_text(drawn.shadow_rounds()));
        text += label("number", waited_at, base, percent(drawn.share(Spent::waiting)));
        return text;
    }

    /// The chart of the samples with its name, and its range at the left.
    [[nodiscard]] std::string curve(int y) const {
        auto const range = curve_.range();
        if (!range) {
            return {};
        }
        std::string name;
        for (char const letter : as_utf8(samples_)) { // XML gives some a meaning, and has no others
            name += letter == '<'                                ? "&lt;"
                    : letter == '>'                              ? "&gt;"
                    : letter == '&'                              ? "&amp;"
                    : static_cast<unsigned char>(letter) < 0x20U ? " "
                                                                 : std::string(1, letter);
        }
        std::string text = label("note", left, y - 10, concat(name, ", mean of samples"));
        text += label("head", left - 10, y + 5, rounded_text(range->second));
        if (range->first != range->second) {
            text += label("head", left - 10, y + curve_height + 5, rounded_text(range->first));
        }
        text += concat(
            "<polyline class=\"curve\" points=\"", curve_.points(left, y, curve_height), "\"/>\n"
        );
        return text;
    }

    /// Ticks at one, two or five of a power of ten, and what was dropped.
    [[nodiscard]] std::string axis(int y) const {
        std::string text =
            element("line", "line", {{"x1", left}, {"y1", y}, {"x2", left + plot}, {"y2", y}});
        if (!is_empty_) {
            double const unit = seconds() < 600 ? 1 : 60;
            double const least = seconds() / unit / 8;
            double step = std::pow(10, std::floor(std::log10(least)));
            step *= least <= step ? 1 : least <= 2 * step ? 2 : least <= 5 * step ? 5 : 10;
            for (int i = 0; i * step * unit <= seconds(); ++i) {
                double const time = i * step * unit;
                int const x = left + static_cast<int>(std::lround(plot * time / seconds()));
                text += element("line", "line", {{"x1", x}, {"y1", y}, {"x2", x}, {"y2", y + 5}});
                text += label("tick", x, y + 20, duration(time, seconds()));
            }
        }
        if (dropped_ != 0) {
            text += label(
                "warn",
                left,
                y + 42,
                concat(
                    dropped_,
                    " events were dropped because there was no room for them; start() with more."
                )
            );
        }
        return text;
    }

    std::string_view samples_;
    std::vector<Lane> lanes_;
    Curve curve_;
    std::int64_t begin_ = 0;
    std::int64_t end_ = 0;
    std::uint64_t dropped_ = 0;
    bool is_empty_ = false;
    int height_ = 0;
    int gap_ = 0;
};

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION std::string to_svg(Trace const& trace, std::string_view samples) {
    return detail::Picture{trace, samples}.draw();
}

}} // namespace joinable::v0

#endif

// ---- joinable/trace/gather.hpp

namespace joinable { inline namespace v0 {

/// How the traces of ranks are merged. The same on every rank.
struct TraceOptions {
    /// For ranks on several machines, whose clocks have different origins. gather_trace() then runs a
    /// collective and shifts times as if all ranks had returned from it at one moment. Two errors
    /// remain: the time between the first and the last return, and the drift of the clocks between an
    /// event and the collective. Threads and processes of one machine share a clock and need no shift.
    bool align_clocks = false;
    /// A picture writes this name beside the curve of TraceTimeline::sample(). Rank 0's counts.
    std::string_view samples = "sample";
};

namespace detail {

/// Explains a model, or a timeline that records nothing, in place of a TraceTimeline.
template <class Given>
consteval bool check_traced() {
    static_assert(
        std::same_as<Given, TraceTimeline>,
        "trace: expected a TraceTimeline, as ddp.timeline() of DistributedDataParallel<Comm, AllReduce, "
        "TraceTimeline> is one"
    );
    return std::same_as<Given, TraceTimeline>;
}

Trace gather_trace(ControlCommunicator& control, TraceTimeline const& mine, TraceOptions options);

/// Collective. Rank 0 writes to the file what `write(sink)` passes to the sink. Fails on all ranks or on
/// none.
void write_on_first_rank(
    ControlCommunicator& control,
    std::string const& path,
    std::function<void(std::function<void(std::string_view)> const& sink)> const& write
);

} // namespace detail

/// Returns the events of all ranks on rank 0, and an empty Trace on the others. Every rank keeps its own
/// events, see TraceTimeline::events().
///
/// Collective, outside a guard. Ranks may have different numbers of events.
/// @throws ContractViolation  `comm` is inside a guard.
/// @throws std::bad_alloc  a rank has not enough memory; the others throw PeerFailed.
/// @throws Mismatch  ranks have different options.
/// @throws what the communicator throws.
/// Complexity: events travel in sums of 64 KiB. Call it after the training.
template <Communicator Comm>
[[nodiscard]] Trace
gather_trace(Comm& comm, TraceTimeline const& mine, TraceOptions const& options = {}) {
    detail::require_unguarded(detail::identity_of(comm), "gather_trace()");
    detail::ControlOver<Comm&> control{comm};
    return detail::gather_trace(control, mine, options);
}

/// Writes one file with the events of all ranks for ui.perfetto.dev, see write_json(). Rank 0 writes it
/// to its `path`; the other ranks ignore theirs. Collective, outside a guard.
/// @throws CommunicationError  on all ranks: rank 0 cannot write the file, which may be incomplete.
/// @throws what gather_trace() throws.
template <Communicator Comm>
void write_trace(
    Comm& comm, TraceTimeline const& mine, std::string const& path, TraceOptions const& options = {}
) {
    Trace const trace = gather_trace(comm, mine, options);
    detail::ControlOver<Comm&> control{comm};
    detail::write_on_first_rank(control, path, [&](auto const& sink) { write_json(trace, sink); });
}

/// Explains what is no TraceTimeline.
template <Communicator Comm, class Other, class... More>
    requires(!std::same_as<Other, TraceTimeline>)
void write_trace(Comm&, Other const&, More const&...) {
    static_assert(detail::check_traced<Other>());
}

/// Draws the events of all ranks into an SVG file, see to_svg(). Otherwise as write_trace().
template <Communicator Comm>
void write_picture(
    Comm& comm, TraceTimeline const& mine, std::string const& path, TraceOptions const& options = {}
) {
    Trace const trace = gather_trace(comm, mine, options);
    detail::ControlOver<Comm&> control{comm};
    detail::write_on_first_rank(control, path, [&](auto const& sink) {
        sink(to_svg(trace, options.samples));
    });
}

/// Explains what is no TraceTimeline.
template <Communicator Comm, class Other, class... More>
    requires(!std::same_as<Other, TraceTimeline>)
void write_picture(Comm&, Other const&, More const&...) {
    static_assert(detail::check_traced<Other>());
}

}} // namespace joinable::v0

// ---- joinable/agreement/on_all_ranks.hpp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_AGREEMENT_ON_ALL_RANKS_HPP_PART_1
#define JOINABLE_AGREEMENT_ON_ALL_RANKS_HPP_PART_1

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>

namespace joinable { inline namespace v0 { namespace detail {

/// Collective. Like agree(), but if ranks fail, ranks without an error throw the type of the lowest
/// failed rank's error: a file that one rank cannot write is the same failure on all.
inline void agree_alike(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& error
) {
    throw_if_any_failed(
        error,
        [&] {
            std::optional<AbortReason> failure = find_disagreement(control, list, error);
            if (failure && failure->kind == FailureKind::peer_failed) {
                FailureKind const own = error ? reason_of(error).kind : FailureKind::peer_failed;
                std::array<std::uint64_t, 1> kind{static_cast<std::uint64_t>(own)};
                control.broadcast(kind, failure->ranks.front());
                failure->kind = static_cast<FailureKind>(kind[0]);
            }
            return failure;
        },
        [&](AbortReason const& reason) { abort_for(control, reason); }
    );
}

/// Collective. Runs `work(list)` on every rank, then agrees on its exception and its entries in the
/// list.
template <class F>
void on_all_ranks(ControlCommunicator& control, F const& work) {
    AgreementList list;
    std::exception_ptr const error = exception_of([&] { work(list); });
    agree_alike(control, list, error);
}

/// Renews the deadline of the ranks that wait for this one, each time that it has gone through
/// another piece_bytes. Pieces are large, because a renewal is a message to every rank.
class DeadlineRenewal {
public:
    static constexpr std::size_t piece_bytes = std::size_t{8} << 20U;

    explicit DeadlineRenewal(ControlCommunicator& control) noexcept : control_{control} {}

    void has_passed(std::size_t bytes) {
        bytes_ += bytes;
        if (bytes_ >= piece_bytes) {
            bytes_ = 0;
            control_.keep_alive();
        }
    }

private:
    ControlCommunicator& control_;
    std::size_t bytes_ = 0; ///< since the last renewal
};

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/file_limit.hpp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1
#define JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1

#include <cstdint>

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace joinable { inline namespace v0 { namespace detail {

/// Whether this process may give no file so many bytes: the system would kill it by SIGXFSZ. Other systems than Linux
/// are not asked.
[[nodiscard]] inline bool exceeds_file_limit([[maybe_unused]] std::uint64_t bytes) noexcept {
#if defined(__linux__)
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
#else
    return false;
#endif
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/trace/impl/gather.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// Of events, as words that ranks can sum: one rank says them, and the others zeros.
class EventWords {
public:
    explicit EventWords(ControlCommunicator& control) : control_{control}, words_(piece * each) {}

    /// Collective. `root` has `events`, which are written to `to` on rank 0.
    void move(int root, std::uint64_t count, std::span<TraceEvent const> events, TraceEvent* to) {
        for (std::uint64_t first = 0; first < count; first += piece) {
            auto const here = static_cast<std::size_t>((std::min)(piece, count - first));
            std::span const words = std::span{words_}.first(here * each);
            for (std::size_t i = 0; i < here && control_.rank() == root; ++i) {
                auto const event = std::bit_cast<Words>(events[first + i]);
                std::copy(event.begin(), event.end(), words.data() + i * each);
            }
            control_.broadcast(words, root);
            for (std::size_t i = 0; i < here && control_.rank() == 0; ++i) {
                Words event{};
                std::copy_n(words.data() + i * each, each, event.begin());
                to[first + i] = std::bit_cast<TraceEvent>(event);
            }
        }
    }

private:
    static constexpr std::size_t each = sizeof(TraceEvent) / sizeof(std::uint64_t);
    static constexpr std::uint64_t piece = 2048; ///< events
    using Words = std::array<std::uint64_t, each>;

    ControlCommunicator& control_;
    std::vector<std::uint64_t> words_;
};

/// This rank's clock at about the time at which the others look at theirs.
inline std::uint64_t common_moment(ControlCommunicator& control) {
    for (int i = 0; i < 2; ++i) { // after the first one all ranks are there
        std::array<std::uint64_t, 1> nothing{};
        control.sum(nothing);
    }
    auto const now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(std::chrono::nanoseconds{now}.count());
}

JOINABLE_DEFINITION Trace
gather_trace(ControlCommunicator& control, TraceTimeline const& mine, TraceOptions options) {
    std::optional<EventWords> words;
    on_all_ranks(control, [&](AgreementList& list) {
        list.add("TraceOptions::align_clocks", options.align_clocks);
        words.emplace(control);
    });
    std::array<std::uint64_t, 3> const own{
        mine.events().size(), mine.dropped(), options.align_clocks ? common_moment(control) : 0
    };
    std::vector<std::uint64_t> const words_of_all = control.gather(own);
    Trace trace;
    on_all_ranks(control, [&](AgreementList&) {
        if (control.rank() == 0) {
            trace.ranks.resize(static_cast<std::size_t>(control.size()));
            for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
                trace.ranks[rank].events.resize(words_of_all[rank * own.size()]);
                trace.ranks[rank].dropped = words_of_all[rank * own.size() + 1];
            }
        }
    });
    for (int rank = 0; rank < control.size(); ++rank) {
        auto const r = static_cast<std::size_t>(rank);
        TraceEvent* const to = trace.ranks.empty() ? nullptr : trace.ranks[r].events.data();
        words->move(rank, words_of_all[r * own.size()], mine.events(), to);
    }
    for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
        auto const ahead =
            static_cast<std::int64_t>(words_of_all[rank * own.size() + 2] - words_of_all[2]);
        for (TraceEvent& event : trace.ranks[rank].events) {
            event.begin -= ahead;
            event.end -= ahead;
        }
    }
    return trace;
}

JOINABLE_DEFINITION void write_on_first_rank(
    ControlCommunicator& control,
    std::string const& path,
    std::function<void(std::function<void(std::string_view)> const& sink)> const& write
) {
    on_all_ranks(control, [&](AgreementList&) {
        if (control.rank() != 0) {
            return;
        }
        auto const require = [&](bool is_done, char const* verb) {
            if (!is_done) {
                int const code = errno;
                throw CommunicationError{
                    concat("cannot ", verb, " ", path, ": ", std::generic_category().message(code))
                };
            }
        };
        std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{
            std::fopen(path.c_str(), "wb"), &std::fclose
        };
        require(file != nullptr, "create");
        DeadlineRenewal renewal{control};
        std::uint64_t written = 0;
        write([&](std::string_view piece) {
            written += piece.size();
            errno = EFBIG;
            require(!exceeds_file_limit(written), "write");
            require(
                std::fwrite(piece.data(), 1, piece.size(), file.get()) == piece.size(), "write"
            );
            renewal.has_passed(piece.size());
        });
        require(std::fclose(file.release()) == 0, "write");
    });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/trace/progress_line.hpp

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

// ---- joinable/trace/impl/progress_line.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// "8 s", "3 min 20 s", "2 h 5 min", "3 d 4 h": two units, as a person would say it.
inline std::string time_left(double seconds) {
    if (!(seconds < 1e9)) { // some 30 years
        return "years";
    }
    auto const whole = static_cast<std::uint64_t>(std::ceil(seconds));
    struct Unit {
        std::uint64_t seconds;
        char const* name;
        std::uint64_t smaller_seconds;
        char const* smaller;
    };
    constexpr std::array<Unit, 3> units{
        {{86400, " d", 3600, " h"}, {3600, " h", 60, " min"}, {60, " min", 1, " s"}}
    };
    for (Unit const& unit : units) {
        if (whole >= unit.seconds) {
            std::uint64_t const rest = whole % unit.seconds / unit.smaller_seconds;
            std::string const more = rest == 0 ? "" : concat(" ", rest, unit.smaller);
            return concat(whole / unit.seconds, unit.name, more);
        }
    }
    return concat(whole, " s");
}

JOINABLE_DEFINITION
ProgressWriter::ProgressWriter(Sink sink, ProgressOptions options)
    : sink_{std::move(sink)}, options_{std::move(options)},
      every_{options_.every.value_or(
          std::chrono::milliseconds{options_.rewrites.value_or(false) ? 100 : 5000}
      )} {}

JOINABLE_DEFINITION
ProgressWriter::ProgressWriter(std::FILE* file, ProgressOptions options)
    : ProgressWriter{
          [file](std::string_view text) {
              static_cast<void>(std::fwrite(text.data(), 1, text.size(), file));
              static_cast<void>(std::fflush(file));
          },
          [&]() -> ProgressOptions&& {
              if (!options.rewrites) {
                  options.rewrites = ::isatty(::fileno(file)) == 1;
              }
              return std::move(options);
          }()
      } {}

JOINABLE_DEFINITION void ProgressWriter::count(Round const& round, int world_size) {
    ++rounds_;
    world_size_ = world_size;
    joined_ = world_size - round.active_count();
    Time const now = options_.clock();
    if (rounds_ == 1 || now - written_at_ >= every_) {
        write(now);
    }
}

JOINABLE_DEFINITION void ProgressWriter::end() {
    if (written_rounds_ != rounds_) {
        write(options_.clock());
    }
    if (width_ != 0) {
        width_ = 0;
        sink_("\n");
    }
}

JOINABLE_DEFINITION void ProgressWriter::write(Time now) {
    if (written_rounds_ !=
        0) { // time is counted from the first round: what came before was no training
        double const seconds = std::chrono::duration<double>(now - written_at_).count();
        constexpr double memory = 30; // seconds after which a third is left of what was
        double const kept = std::exp(-seconds / memory);
        recent_seconds_ = recent_seconds_ * kept + seconds;
        recent_rounds_ = recent_rounds_ * kept + static_cast<double>(rounds_ - written_rounds_);
    }
    written_at_ = now;
    written_rounds_ = rounds_;
    std::string const line = text(recent_seconds_ > 0 ? recent_rounds_ / recent_seconds_ : 0);
    if (!options_.rewrites.value_or(false)) {
        sink_(line + "\n");
        return;
    }
    std::string const blanks((std::max)(width_, line.size()) - line.size(), ' ');
    width_ = line.size();
    sink_("\r" + line + blanks);
}

JOINABLE_DEFINITION std::string ProgressWriter::text(double rate) const {
    std::string line = concat("round ", rounds_);
    if (options_.rounds) {
        line += concat(" of ", *options_.rounds);
    }
    if (rate > 0) {
        line += concat(", ", rounded_text(rate), " rounds/s");
        if (options_.rounds && rounds_ < *options_.rounds) {
            line += concat(
                ", ", time_left(static_cast<double>(*options_.rounds - rounds_) / rate), " left"
            );
        }
    }
    line += concat(", ", joined_, " of ", world_size_);
    return line + (world_size_ == 1 ? " rank has joined" : " ranks have joined");
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/trace.hpp

/// @file
/// The work of ranks, for people: a trace that Perfetto opens, a picture, and a line of progress.
