// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/detail/host_words.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

/// A collective of a StagedNcclCommunicator, whose `comm` must outlive it. wait() blocks the host until
/// the result is in the host's buffer. The buffer must stay in place until then.
using StagedNcclWork = detail::NcclHostWords::Work;

/// NCCL ranks as a host communicator, for the roll calls of a guard when no other host communicator
/// is available: NcclCommunicator::from_environment() keeps its own private.
///
/// @code
/// auto comm = joinable::NcclCommunicator::from_environment();
/// joinable::StagedNcclCommunicator staged{comm};
/// joinable::Join guard{joinable::participants(ddp), joinable::control(staged)};
/// @endcode
///
/// Each collective copies to the device, runs NCCL's all-reduce or broadcast after all earlier work
/// of NCCL, and copies back. The host waits for that. A host communicator answers a roll call while
/// the device computes; this one answers after the last round's gradients have been reduced. It
/// does not wait for the engine's stream. Prefer control() with a host communicator.
///
/// NCCL does not end a collective on all ranks at once. If a rank aborts right after a roll call, a
/// rank that has not seen its answer throws the abort's reason instead.
///
/// Several collectives may be under way. It is for a few words, not for gradients; `comm` keeps their
/// memory.
class StagedNcclCommunicator {
public:
    /// Local. `comm` must outlive this object.
    explicit StagedNcclCommunicator(NcclCollectives& comm) noexcept : comm_{comm} {}
    StagedNcclCommunicator(StagedNcclCommunicator const&) = delete;
    StagedNcclCommunicator& operator=(StagedNcclCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }

    /// In place, on host memory.
    /// @throws as the members of NcclCommunicator.
    StagedNcclWork all_reduce(Buffer buffer, ReduceOp op) {
        return comm_.host_words().all_reduce(buffer, op);
    }
    StagedNcclWork broadcast(Buffer buffer, int root) {
        return comm_.host_words().broadcast(buffer, root);
    }
    void barrier() { comm_.barrier(); }

    void abort(AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return comm_.abort_reason(); }
    [[nodiscard]] bool is_renumbered() const { return comm_.is_renumbered(); }
    /// Sets the deadline of `comm`, too.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return comm_.set_deadline(deadline);
    }
    /// See NcclCollectives.
    void keep_alive() { comm_.keep_alive(); }
    bool renew_deadline() { return comm_.renew_deadline(); }
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_.missing_ranks(); }
    /// For guards.
    [[nodiscard]] void const* identity() const noexcept { return comm_.identity(); }

private:
    NcclCollectives& comm_;
};

}} // namespace joinable::v0
