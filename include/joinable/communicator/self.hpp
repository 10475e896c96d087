// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>
#include <utility>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/reduce.hpp>

namespace joinable::inline v0 {

/// The communicator of a single rank: everything is complete when it starts. Checks its arguments
/// as the others do, so that a program which runs alone also runs together.
class SelfCommunicator {
public:
    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return 1; }

    CompletedWork all_reduce(Buffer buffer, ReduceOp op) {
        start();
        detail::check_memory(buffer);
        detail::check_reduction(buffer, op);
        return {};
    }
    CompletedWork broadcast(Buffer buffer, int root) {
        start();
        detail::check_memory(buffer);
        detail::check_root(root, 1);
        return {};
    }
    void barrier() { start(); }
    CompletedWork all_gather(ConstBuffer in, Buffer out) {
        start();
        detail::check_share(in, out, 1);
        return copy(in, out);
    }
    CompletedWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        start();
        detail::check_share(out, in, 1);
        detail::check_reduction(in, op);
        return copy(in, out);
    }

    void abort(AbortReason reason) {
        if (!is_spent_) {
            reason_ = std::move(reason);
            is_spent_ = true;
        }
    }
    [[nodiscard]] bool is_spent() const noexcept { return is_spent_; }

private:
    void start() const {
        if (is_spent_) {
            throw_failure(reason_);
        }
    }
    static CompletedWork copy(ConstBuffer in, Buffer out) noexcept {
        if (in.count != 0) {
            std::memmove(out.data, in.data, in.bytes());
        }
        return {};
    }

    AbortReason reason_;
    bool is_spent_ = false;
};

} // namespace joinable::inline v0
