// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/detail/failure.hpp>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION AbortReason failure_of(std::exception_ptr const& error) {
    if (!error) {
        return {FailureKind::peer_failed, {}, {}};
    }
    try {
        std::rethrow_exception(error);
    } catch (std::exception const& failure) {
        AbortReason reason{FailureKind::peer_failed, {}, failure.what()};
        if (auto const* const culprits = dynamic_cast<Culprits const*>(&failure)) {
            reason.kind = culprits->told_as;
            reason.ranks = culprits->numbers;
            reason.is_renumbered = culprits->are_renumbered;
        }
        return reason;
    } catch (...) {
        return {FailureKind::peer_failed, {}, "an exception that is no std::exception"};
    }
}

JOINABLE_DEFINITION AbortReason reason_of(std::exception_ptr const& error) {
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

JOINABLE_DEFINITION AbortReason failure_in_group(AbortReason reason) {
    std::string const where = reason.message.empty() ? "" : "in a group split off: ";
    return {FailureKind::peer_failed, {}, where + reason.message};
}

JOINABLE_DEFINITION std::string
failure_text(std::vector<int> const& ranks, std::string const& text) {
    std::string const left =
        "an exception left the guard, whose text only that rank knows; guard.fail(text) passes a text on";
    return ranks_text(ranks) + " failed: " + (text.empty() ? left : text);
}

JOINABLE_DEFINITION AbortReason blamed_on(int rank, AbortReason reason) {
    bool const is_of_all =
        reason.kind == FailureKind::communication || reason.kind == FailureKind::contract;
    if (reason.ranks.empty() && !is_of_all) {
        reason.ranks = {rank};
        reason.message = failure_text(reason.ranks, reason.message);
    }
    return reason;
}

}}} // namespace joinable::v0::detail
