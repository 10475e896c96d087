// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 {

/// While it lives, what its communicator is given is collected; then it is launched as one. Made by
/// group() of the communicator. Nothing in it can be waited for before, and between its beginning and
/// its end its thread calls nothing of other NCCL communicators.
class NcclGroup {
public:
    NcclGroup(NcclGroup const&) = delete;
    NcclGroup& operator=(NcclGroup const&) = delete;
    /// Ends the group; while unwinding it aborts, as the others' groups have more. What goes wrong is
    /// thrown by the waits for what is in it.
    ~NcclGroup() {
        if (is_open()) {
            try {
                if (unwinding_.has_begun()) {
                    rank_.abort_for_exception("a group of collectives");
                } else {
                    rank_.end_group();
                }
            } catch (...) { // NOLINT(bugprone-empty-catch): the works throw it
            }
        }
        rank_.release(launch_);
    }

    /// Ends the group before the token goes. Ending it twice is fine.
    /// @throws CommunicationError, PeerFailed  NCCL refuses what is in it.
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
