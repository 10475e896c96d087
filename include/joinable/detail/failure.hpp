// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <string>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What peers should be told about an exception. A failure that came from other ranks keeps its
/// culprits; anything else has none yet, which stands for the rank that throws it.
inline AbortReason failure_of(std::exception_ptr const& error) {
    if (!error) {
        return {FailureKind::peer_failed, {}, {}};
    }
    try {
        std::rethrow_exception(error);
    } catch (PeerFailed const& failure) {
        return {FailureKind::peer_failed, failure.ranks(), failure.what()};
    } catch (TimedOut const& failure) {
        return {FailureKind::timed_out, failure.ranks(), failure.what()};
    } catch (Mismatch const& failure) {
        return {FailureKind::mismatch, failure.ranks(), failure.what()};
    } catch (std::exception const& other) {
        return {FailureKind::peer_failed, {}, other.what()};
    } catch (...) {
        return {FailureKind::peer_failed, {}, "an exception that is no std::exception"};
    }
}

/// The reason of what the communicator threw by which ranks meet: what ended it for all of them.
inline AbortReason reason_of(std::exception_ptr const& error) {
    try {
        std::rethrow_exception(error);
    } catch (CommunicationError const& failure) {
        return {FailureKind::communication, {}, failure.what()};
    } catch (ContractViolation const& failure) {
        return {FailureKind::contract, {}, failure.what()};
    } catch (...) {
        return failure_of(error);
    }
}

inline std::string failure_text(std::vector<int> const& ranks, std::string const& text) {
    std::string const left = "an exception left the guard";
    return ranks_text(ranks) + " failed: " + (text.empty() ? left : text);
}

/// The same, ready to be thrown elsewhere: without culprits it is `rank` that failed, unless all
/// ranks throw an error that names none.
inline AbortReason blamed_on(int rank, AbortReason reason) {
    bool const is_of_all =
        reason.kind == FailureKind::communication || reason.kind == FailureKind::contract;
    if (reason.ranks.empty() && !is_of_all) {
        reason.ranks = {rank};
        reason.message = failure_text(reason.ranks, reason.message);
    }
    return reason;
}

}}} // namespace joinable::v0::detail
