// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/detail/scope.hpp>

namespace joinable { inline namespace v0 {

/// Collects the calls on its communicator while it lives, and then launches them as one. Made by
/// group() of the communicator. Their work cannot be waited for before that. While the group is
/// open, its thread must not call other NCCL communicators.
class NcclGroup {
public:
    NcclGroup(NcclGroup const&) = delete;
    NcclGroup& operator=(NcclGroup const&) = delete;
    /// Ends the group. During unwinding it aborts, because the other ranks' groups have more calls.
    /// The waits for the group's work throw its errors.
    ~NcclGroup() {
        if (is_open()) {
            try {
                if (unwinding_.has_begun()) {
                    abort_for_exception(rank_, "a group of collectives");
                } else {
                    rank_.end_group();
                }
            } catch (...) { // NOLINT(bugprone-empty-catch): the works throw it
            }
        }
        rank_.release(launch_);
    }

    /// Ends the group before the token is destroyed. A second call has no effect.
    /// @throws CommunicationError, PeerFailed  NCCL refuses the group's calls.
    void end() {
        if (is_open()) {
            rank_.end_group();
        }
    }

private:
    friend class NcclCollectives;
    explicit NcclGroup(detail::NcclRank& rank) : rank_{rank}, launch_{rank.begin_group()} {}

    [[nodiscard]] bool is_open() const noexcept {
        return launch_.state == detail::NcclLaunch::State::open;
    }

    detail::NcclRank& rank_;
    detail::NcclLaunch& launch_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
