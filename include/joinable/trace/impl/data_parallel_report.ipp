// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/trace/data_parallel_report.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/trace/trace.hpp>

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
