// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>
#include <string_view>

#include <joinable/config.hpp>
#include <joinable/trace/trace.hpp>

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

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/impl/picture.ipp>
#endif
