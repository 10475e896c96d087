// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable_tests {

/// A communicator of a house engine: the least that an AnyCommunicator takes, without split(), deadlines and messages.
class HouseCommunicator {
public:
    explicit HouseCommunicator(joinable::ThreadCommunicator& comm) : comm_{comm} {}
    [[nodiscard]] int rank() const { return comm_.rank(); }
    [[nodiscard]] int size() const { return comm_.size(); }
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return comm_.all_reduce(buffer, op);
    }
    auto broadcast(joinable::Buffer buffer, int root) { return comm_.broadcast(buffer, root); }
    void barrier() { comm_.barrier(); }
    void abort(joinable::AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const {
        return comm_.abort_reason();
    }

private:
    joinable::ThreadCommunicator& comm_;
};

} // namespace joinable_tests
