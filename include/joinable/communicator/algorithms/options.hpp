// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include <joinable/communicator/algorithms/plan.hpp>

namespace joinable { inline namespace v0 {

/// How a MessageCommunicator behaves. The same on all ranks.
struct MessageOptions {
    /// For every all-reduce. Without one, choose_algorithm() chooses for each size of buffers.
    std::optional<AllReducePlan> plan = {};
    /// By which it chooses. The defaults are of no machine: 20 microseconds and a nanosecond for a byte.
    MessageCosts costs = {};
    /// Ranks compare what they are about to do before data moves, and throw Mismatch on all of them, which
    /// names the ranks that differ. Each collective then has a butterfly of 16 bytes before it. Without the
    /// comparison, ranks that run different collectives or operations throw TimedOut, because their messages
    /// have different tags, and ranks with other counts, dtypes or plans throw what the communicator below
    /// makes of messages that do not fit, or TimedOut.
    bool check = false;
    /// The first of 129 tags that messages of collectives have. Whatever else sends over the communicator
    /// below uses others.
    int tag = 32'000;
};

}} // namespace joinable::v0
