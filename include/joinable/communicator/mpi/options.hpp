// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>

#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 {

/// How an MPI communicator behaves. The same on all ranks.
struct MpiOptions {
    /// Applies to construction and all waits. A collective that all ranks have posted in time gets
    /// one more deadline to complete; after that it ends in CommunicationError, even if it is only
    /// slow. In split() and share() MPI blocks once all ranks have met, and no deadline ends that.
    std::chrono::nanoseconds deadline = default_deadline;
    /// How long a rank waits for the others beyond that: at a deadline for their answers, and after an
    /// abort for them to close. Shorter ends a job sooner in which a rank does neither; longer names
    /// fewer ranks that only have a busy machine.
    std::chrono::nanoseconds patience = std::chrono::seconds{2};
    /// Ranks compare what they are about to do before data moves, and all throw Mismatch if it
    /// differs. This puts a small collective before each one. Without the comparison MPI may report
    /// an error, give wrong numbers, crash, or never finish; the last ends in CommunicationError
    /// two deadlines later. Ranks with two such communicators must wait for the collectives of both
    /// in the same order, because the data of a collective starts to move in its own waits and
    /// tests.
    /// JOINABLE_CHECK=collectives turns it on, too. Ranks agree on it when they make a communicator.
    bool check = false;
    /// Reductions of f16 and bf16 send f32 and round once. Otherwise MPI sends 16 bits and rounds
    /// every combination of two. Ranks that differ in it throw Mismatch when they make a communicator.
    bool wide = false;
};

}} // namespace joinable::v0
