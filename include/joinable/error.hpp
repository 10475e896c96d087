// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace joinable { inline namespace v0 {

/// What went wrong, as it travels between ranks. See `throw_failure` for the matching exception.
enum class FailureKind : std::uint8_t { peer_failed, timed_out, mismatch, communication, contract };

/// Why a communicator was aborted. The first reason wins, and every rank throws it.
struct AbortReason {
    FailureKind kind = FailureKind::communication;
    std::vector<int> ranks; ///< the culprits, ascending: who failed, did not arrive or differs
    std::string message;
};

/// The base of all failures that a correct program can meet.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The caller broke a documented precondition; nothing was moved because of the call.
class ContractViolation : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

/// The transport failed: the communicator is aborted. Or a file did, see Checkpoint: it is not.
class CommunicationError : public Error {
public:
    using Error::Error;
};

/// A failure with culprits: one class per `FailureKind`, so that a handler can tell them apart.
template <FailureKind>
class FailureOfRanks : public Error {
public:
    FailureOfRanks(std::vector<int> ranks, std::string const& message)
        : Error{message}, ranks_{std::move(ranks)} {}

    /// The culprits, ascending. Empty only where the communicator cannot tell.
    [[nodiscard]] std::vector<int> const& ranks() const noexcept { return ranks_; }

private:
    std::vector<int> ranks_;
};

/// Another rank threw, died or left: `rank()` is the lowest that did.
class PeerFailed : public FailureOfRanks<FailureKind::peer_failed> {
public:
    using FailureOfRanks::FailureOfRanks;
    [[nodiscard]] int rank() const noexcept { return ranks().empty() ? -1 : ranks().front(); }
};

/// Some ranks did not arrive within the deadline: `missing()` where the communicator can tell.
class TimedOut : public FailureOfRanks<FailureKind::timed_out> {
public:
    using FailureOfRanks::FailureOfRanks;
    [[nodiscard]] std::vector<int> const& missing() const noexcept { return ranks(); }
};

/// Ranks do different things where all must do the same: `ranks()` are those that differ from
/// the lowest rank. No data moved.
class Mismatch : public FailureOfRanks<FailureKind::mismatch> {
public:
    using FailureOfRanks::FailureOfRanks;
};

/// Some ranks ran out of inputs under `EndPolicy::throw_early`. The communicator stays usable.
class EarlyTermination : public Error {
public:
    EarlyTermination(std::vector<int> ranks, std::string const& message)
        : Error{message}, ranks_{std::move(ranks)} {}

    /// The ranks that ran out, ascending.
    [[nodiscard]] std::vector<int> const& ranks() const noexcept { return ranks_; }

private:
    std::vector<int> ranks_;
};

/// Throws the exception that stands for `reason`: the same type and text on every rank.
[[noreturn]] inline void throw_failure(AbortReason const& reason) {
    switch (reason.kind) {
    case FailureKind::peer_failed: throw PeerFailed{reason.ranks, reason.message};
    case FailureKind::timed_out: throw TimedOut{reason.ranks, reason.message};
    case FailureKind::mismatch: throw Mismatch{reason.ranks, reason.message};
    case FailureKind::contract: throw ContractViolation{reason.message};
    case FailureKind::communication: break;
    }
    throw CommunicationError{reason.message};
}

}} // namespace joinable::v0
