// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <string>

#include <joinable/communicator/detail/board.hpp>
#include <joinable/communicator/detail/endpoint.hpp>
#include <joinable/communicator/detail/lent_memory.hpp>
#include <joinable/communicator/detail/process_segment.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#if defined(__linux__) // elsewhere there are no process ranks

namespace joinable::inline v0::detail {

/// What one process has of its group: what its communicator and its works have in common.
class ProcessRank : public Endpoint<ProcessSegment, StagedMemory> {
public:
    ProcessRank(ProcessSegment& segment, int rank) noexcept
        : Endpoint{segment, rank, StagedMemory{segment.staging(rank)}},
          outcome_{segment.outcome(rank)} {}

    /// The process that started this one waits as long for the others after a failure.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        outcome_.deadline.store(deadline.count());
        return Endpoint::set_deadline(deadline);
    }

    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what) {
        abort(blamed_on(rank(), {FailureKind::peer_failed, {}, "an exception left " + what}));
    }
    /// It takes part no longer: nothing can complete without it any more.
    void leave() {
        abort(
            {FailureKind::peer_failed,
             {rank()},
             concat("rank ", rank(), " left while others wait for it")}
        );
    }

private:
    Outcome& outcome_;
};

} // namespace joinable::inline v0::detail

#endif
