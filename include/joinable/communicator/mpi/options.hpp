// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>

#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 {

/// How an MPI communicator behaves. The same on all ranks.
struct MpiOptions {
    /// To find each other, and of all waits. A collective that all ranks have posted by then has one more to
    /// complete: after that it ends in CommunicationError, be it only slow. In split() and share() MPI
    /// blocks once all ranks have met there: nothing here ends that.
    std::chrono::nanoseconds deadline = default_deadline;
    /// Ranks compare what they are about to do before data moves, and throw Mismatch on all of them. Each
    /// collective then has a small one before it. Without the comparison MPI may report an error, give wrong
    /// numbers, crash, or never finish; the last ends in CommunicationError two deadlines later.
    /// Ranks with two such communicators wait for collectives of both in one order: the data of one starts in
    /// its own waits and tests.
    bool check = false;
    /// Reductions of f16 and bf16 send f32, and round once. Without it MPI sends 16 bits and rounds each
    /// combination of two.
    bool wide = false;
};

}} // namespace joinable::v0
