// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/trace/trace_timeline.hpp>

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

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/impl/data_parallel_report.ipp>
#endif
