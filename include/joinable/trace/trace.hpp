// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/join/result.hpp>
#include <joinable/trace/trace_timeline.hpp>

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

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/impl/trace.ipp>
#endif
