// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <string_view>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/trace/picture.hpp>
#include <joinable/trace/trace.hpp>
#include <joinable/trace/trace_timeline.hpp>

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

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/impl/gather.ipp>
#endif
