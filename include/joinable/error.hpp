// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace joinable { inline namespace v0 {

/// The kind of a failure, as it is sent between ranks. See `throw_failure` for the matching
/// exceptions.
enum class FailureKind : std::uint8_t { peer_failed, timed_out, mismatch, communication, contract };

/// The reason of an abort. The first reason wins, and every rank throws it.
struct AbortReason {
    FailureKind kind = FailureKind::communication;
    std::vector<int> ranks; ///< ascending: the ranks that failed, did not arrive or differ
    std::string message;
    /// -1: `ranks` are ranks of the aborted communicator. Otherwise they are ranks of a larger
    /// communicator that runs on it, and this is the rank there that passed the reason on. See
    /// HierarchicalCommunicator.
    int origin = -1;
    bool has_left = false; ///< `ranks` have destroyed their communicator, and did not fail
    /// `ranks` are ranks of a group that numbers its members otherwise than the communicator that it
    /// was split from. Each communicator sets this itself in what it throws.
    bool is_renumbered = false;
};

/// The base of all failures that a correct program can meet.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The caller violated a documented precondition; the call moved no data.
class ContractViolation : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

/// The transport failed, and the communicator is aborted; or a file operation failed (see
/// Checkpoint), and it is not.
class CommunicationError : public Error {
public:
    using Error::Error;
};

namespace detail {
/// Culprits beside the text of an error, for ranks that are told it. See failure_of().
struct Culprits {
    FailureKind told_as;
    std::vector<int> numbers;
    bool are_renumbered;
};
} // namespace detail

/// A failure with culprits: one class per `FailureKind`, so that handlers can distinguish them.
template <FailureKind kind>
class FailureOfRanks : public Error, public detail::Culprits {
public:
    FailureOfRanks(std::vector<int> ranks, std::string const& message, bool is_renumbered = false)
        : Error{message}, Culprits{kind, std::move(ranks), is_renumbered} {}

    /// The culprits, ascending. Empty only if the communicator does not know them.
    [[nodiscard]] std::vector<int> const& ranks() const noexcept { return numbers; }
    /// Whether they are ranks of a group that numbers its members otherwise than the communicator
    /// that it was split from.
    [[nodiscard]] bool is_renumbered() const noexcept { return are_renumbered; }
};

/// Another rank threw, died or left. `rank()` is the lowest such rank.
class PeerFailed : public FailureOfRanks<FailureKind::peer_failed> {
public:
    using FailureOfRanks::FailureOfRanks;
    [[nodiscard]] int rank() const noexcept { return ranks().empty() ? -1 : ranks().front(); }
};

/// Some ranks did not arrive before the deadline: `missing()`, if the communicator knows them.
class TimedOut : public FailureOfRanks<FailureKind::timed_out> {
public:
    using FailureOfRanks::FailureOfRanks;
    [[nodiscard]] std::vector<int> const& missing() const noexcept { return ranks(); }
};

/// Ranks do different things where all must do the same. `ranks()` are the ranks that differ from
/// the lowest rank. No data was moved.
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

namespace detail {
/// The culprits as ranks of the aborted communicator. Empty if the reason has ranks of a larger one.
[[nodiscard]] inline std::vector<int> own_ranks(AbortReason const& reason) {
    return reason.origin < 0 ? reason.ranks : std::vector<int>{};
}

/// An error whose type names no culprits, to which other ranks react as to a peer's.
template <class E>
struct Told : E, Culprits {
    explicit Told(AbortReason const& reason)
        : E{reason.message},
          Culprits{FailureKind::peer_failed, own_ranks(reason), reason.is_renumbered} {}
};

/// Throws the exception for `reason`: the same type and text on every rank.
[[noreturn]] inline void throw_failure(AbortReason const& reason) {
    bool const is_renumbered = reason.is_renumbered;
    std::vector<int> const ranks = detail::own_ranks(reason);
    switch (reason.kind) {
    case FailureKind::peer_failed: throw PeerFailed{ranks, reason.message, is_renumbered};
    case FailureKind::timed_out: throw TimedOut{ranks, reason.message, is_renumbered};
    case FailureKind::mismatch: throw Mismatch{ranks, reason.message, is_renumbered};
    case FailureKind::contract: throw Told<ContractViolation>{reason};
    case FailureKind::communication: break;
    }
    throw Told<CommunicationError>{reason};
}

} // namespace detail

}} // namespace joinable::v0
