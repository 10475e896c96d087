// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/trace/trace.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>

#include <joinable/detail/text.hpp>

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
