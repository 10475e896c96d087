// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include <joinable/communicator/algorithms/plan.hpp>

namespace joinable { inline namespace v0 {

/// How a MessageCommunicator behaves. The same on all ranks.
struct MessageOptions {
    /// The plan of every all-reduce. Without one, choose_algorithm() chooses for each buffer size.
    std::optional<AllReducePlan> plan = {};
    /// The costs that choose_algorithm() uses. The defaults describe no real machine: 20
    /// microseconds, and a nanosecond per byte.
    MessageCosts costs = {};
    /// Ranks compare what they are about to do before data moves, and all throw Mismatch if it
    /// differs. The error names the ranks that differ. This puts a butterfly of 16 bytes before
    /// each collective. Without the comparison, ranks that run different collectives or operations
    /// throw TimedOut, because their messages have different tags. Ranks with different counts,
    /// dtypes or plans throw the underlying communicator's error for messages that do not fit, or
    /// TimedOut.
    /// JOINABLE_CHECK=collectives turns it on, too: set it for all ranks.
    bool check = false;
    /// The first of the 129 tags that messages of collectives use. Other messages over the
    /// underlying communicator must use other tags.
    int tag = 32'000;
};

}} // namespace joinable::v0
