// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable::inline v0 {

/// The communicator of a single rank: everything is complete when it starts. Checks its arguments
/// as the others do, so that a program which runs alone also runs together. It has nobody to send
/// to, and nothing to split.
class SelfCommunicator {
public:
    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return 1; }

    CompletedWork all_reduce(Buffer buffer, ReduceOp op) { return reduce(buffer, op, 0); }
    CompletedWork all_reduce(Buffer buffer, ReduceOp op, double factor) {
        start();
        detail::check_memory(buffer);
        detail::check_scaled(buffer, op);
        AnyView const elements{buffer.data, buffer.dtype, {buffer.count}, {1}};
        scale_copy(elements, factor, elements);
        return {};
    }
    CompletedWork reduce(Buffer buffer, ReduceOp op, int root) {
        detail::check_reduction(buffer, op);
        return broadcast(buffer, root);
    }
    CompletedWork broadcast(Buffer buffer, int root) {
        start();
        detail::check_memory(buffer);
        detail::check_root(root, 1);
        return {};
    }
    void barrier() { start(); }

    CompletedWork all_gather(ConstBuffer in, Buffer out) {
        detail::check_share(in, out, 1);
        return copy(in, out);
    }
    CompletedWork all_gather(ConstBuffer in, Buffer out, detail::Counts counts) {
        detail::check_counts(counts, in, out, 0, 1);
        return copy(in, out);
    }
    CompletedWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        detail::check_reduction(in, op);
        return all_gather(in, out);
    }
    CompletedWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, detail::Counts counts) {
        detail::check_reduction(in, op);
        return all_gather(in, out, counts);
    }
    CompletedWork gather(ConstBuffer in, Buffer out, int root) {
        detail::check_root(root, 1);
        return all_gather(in, out);
    }
    CompletedWork gather(ConstBuffer in, Buffer out, int root, detail::Counts counts) {
        detail::check_root(root, 1);
        return all_gather(in, out, counts);
    }
    CompletedWork scatter(ConstBuffer in, Buffer out, int root) { return gather(in, out, root); }
    CompletedWork scatter(ConstBuffer in, Buffer out, int root, detail::Counts counts) {
        return gather(in, out, root, counts);
    }
    CompletedWork all_to_all(ConstBuffer in, Buffer out) {
        detail::check_apart(in, out);
        return all_gather(in, out);
    }
    CompletedWork
    all_to_all(ConstBuffer in, Buffer out, detail::Counts counts_in, detail::Counts counts_out) {
        detail::check_apart(in, out);
        detail::check_counts(counts_in, in, 1);
        return all_gather(in, out, counts_out);
    }

    /// See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes) {
        start();
        return Arena{bytes};
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
    [[nodiscard]] CompletedWork copy(ConstBuffer in, Buffer out) const {
        start();
        detail::check_place(in, out, 0);
        if (in.count != 0) {
            std::memmove(out.data, in.data, in.bytes());
        }
        return {};
    }

    AbortReason reason_;
    bool is_spent_ = false;
};

} // namespace joinable::inline v0
