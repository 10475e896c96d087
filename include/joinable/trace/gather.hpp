// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <joinable/agreement/control.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/config.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/trace/picture.hpp>
#include <joinable/trace/trace.hpp>
#include <joinable/trace/trace_timeline.hpp>

namespace joinable { inline namespace v0 {

/// How traces of ranks are put together. The same on every rank.
struct TraceOptions {
    /// For ranks on several machines, whose clocks have nothing in common: times are moved so that all
    /// clocks show the same after a collective that is run now. What is left is the time between the
    /// first rank's and the last rank's return from it, and what the clocks drifted apart since an event.
    /// Threads and processes of one machine have one clock, which is exact.
    bool align_clocks = false;
};

namespace detail {

Trace gather_trace(ControlCommunicator& control, TraceTimeline const& mine, TraceOptions options);

/// Collective. Rank 0 makes the file of what `write(sink)` says; it fails on all ranks or on none.
void write_on_first_rank(
    ControlCommunicator& control,
    std::string const& path,
    std::function<void(std::function<void(std::string_view)> const& sink)> const& write
);

} // namespace detail

/// What all ranks have recorded, on rank 0; on the others there are no ranks in it. Every rank keeps its
/// own events, see TraceTimeline::events().
///
/// Collective, outside a guard. Ranks may have different numbers of events.
/// @throws ContractViolation  `comm` is inside a guard. PeerFailed, bad_alloc: rank 0 has no memory for them.
///         What else a collective throws. The events stay.
/// Complexity: the events travel through sums of 64 KiB, so it is for after a training.
template <Communicator Comm>
[[nodiscard]] Trace
gather_trace(Comm& comm, TraceTimeline const& mine, TraceOptions const& options = {}) {
    detail::require_unguarded(std::addressof(comm), "gather_trace()");
    detail::ControlOver<Comm&> control{comm};
    return detail::gather_trace(control, mine, options);
}

/// Writes one file with the events of all ranks for ui.perfetto.dev, see write_json(). Rank 0 writes it.
///
/// Collective, outside a guard; `path` counts on rank 0.
/// @throws CommunicationError  the file could not be written, on all ranks; what was written of it is left.
///         What gather_trace() throws. The events stay.
template <Communicator Comm>
void write_trace(
    Comm& comm, TraceTimeline const& mine, std::string const& path, TraceOptions const& options = {}
) {
    Trace const trace = gather_trace(comm, mine, options);
    detail::ControlOver<Comm&> control{comm};
    detail::write_on_first_rank(control, path, [&](auto const& sink) { write_json(trace, sink); });
}

/// Draws the events of all ranks into an SVG file, see to_svg(). Otherwise as write_trace().
template <Communicator Comm>
void write_picture(
    Comm& comm, TraceTimeline const& mine, std::string const& path, TraceOptions const& options = {}
) {
    Trace const trace = gather_trace(comm, mine, options);
    detail::ControlOver<Comm&> control{comm};
    detail::write_on_first_rank(control, path, [&](auto const& sink) { sink(to_svg(trace)); });
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/gather.ipp>
#endif
