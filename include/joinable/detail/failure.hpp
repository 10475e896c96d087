// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <string>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

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

/// The same, ready to be thrown elsewhere: without culprits it is `rank` that failed.
inline AbortReason blamed_on(int rank, AbortReason reason) {
    if (reason.ranks.empty()) {
        reason.ranks = {rank};
        reason.message = concat(
            "rank ",
            rank,
            " failed: ",
            reason.message.empty() ? std::string{"an exception left the guard"} : reason.message
        );
    }
    return reason;
}

} // namespace joinable::inline v0::detail
