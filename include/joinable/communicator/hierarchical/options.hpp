// SPDX-License-Identifier: BSL-1.0
#pragma once

namespace joinable { inline namespace v0 {

/// How a HierarchicalCommunicator behaves. The same on all ranks.
struct HierarchicalOptions {
    /// Ranks of all machines compare what they are about to do before data moves: collective,
    /// dtype, operation, root, count and tables of counts. If it differs, all throw Mismatch, which
    /// names the ranks. This puts a sum of two words per rank before each collective, and one of two
    /// words for each pair of ranks before those with tables. A rank posts what follows inside its
    /// own waits and tests. Without it each level compares what it is asked for: see
    /// HierarchicalCommunicator.
    /// JOINABLE_CHECK=collectives turns it on, too. Ranks agree on it when they make a communicator.
    bool check = false;
};

}} // namespace joinable::v0
