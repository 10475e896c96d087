// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

#include <joinable/config.hpp>
#include <joinable/trace/trace.hpp>

namespace joinable { inline namespace v0 {

/// Draws a trace as an SVG picture: a lane for each rank, time to the right, and in each lane when this
/// rank trained, was blocked in roll calls, and shadowed. Beside a lane are its numbers of rounds and the
/// share of its time that it waited; above are those of all ranks. Local.
///
/// A column of a lane is filled in proportion to what its time went to, so a run of any length gives a
/// picture of the same size: two colours in one column share its time. Waits
/// for gradients of other ranks are a part of training and shadowing. Time outside rounds, as of the optimizer,
/// is the colour of the empty lane. Browsers show it light or dark, as the reader's system is.
[[nodiscard]] std::string to_svg(Trace const& trace);

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/trace/picture.ipp>
#endif
