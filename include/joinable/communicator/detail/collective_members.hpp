// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// The collectives as members of a communicator. A transport derives from one of these classes and
/// writes one function, `Work post(Request const&)`. It keeps post() private and makes
/// BasicCollectives<Derived, Work> a friend. A transport that lacks some collectives takes the
/// smaller class: its communicator then does not model those capabilities.

namespace joinable { inline namespace v0 { namespace detail {

/// What every communicator has.
template <class Derived, class Work>
class BasicCollectives {
public:
    /// In place.
    Work all_reduce(Buffer buffer, ReduceOp op) { return start(requests().all_reduce(buffer, op)); }
    /// The buffer of `root` is copied to all ranks.
    Work broadcast(Buffer buffer, int root) { return start(requests().broadcast(buffer, root)); }
    /// Blocks until every rank has called it.
    void barrier() { start(requests().barrier()).wait(); }

protected:
    [[nodiscard]] RequestsOf requests() const noexcept {
        auto const& comm = static_cast<Derived const&>(*this);
        return {comm.rank(), comm.size()};
    }
    [[nodiscard]] Work start(Request const& request) {
        return static_cast<Derived&>(*this).post(request);
    }
};

/// The collectives of all capabilities.
template <class Derived, class Work>
class Collectives : public BasicCollectives<Derived, Work> {
public:
    using BasicCollectives<Derived, Work>::all_reduce;
    /// The sum of each rank's buffer times a factor of its own, of a floating-point dtype, in place.
    /// `op` is sum. On all ranks or none.
    Work all_reduce(Buffer buffer, ReduceOp op, double factor) {
        return this->start(this->requests().all_reduce(buffer, op, factor));
    }

    /// In place at the root; the other buffers keep what they have.
    Work reduce(Buffer buffer, ReduceOp op, int root) {
        return this->start(this->requests().reduce(buffer, op, root));
    }

    /// `out` is `size()` times `in`; `in` may be this rank's part of `out`.
    Work all_gather(ConstBuffer in, Buffer out) {
        return this->start(this->requests().all_gather(in, out));
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    Work all_gather(ConstBuffer in, Buffer out, Counts counts) {
        return this->start(this->requests().all_gather(in, out, counts));
    }

    /// `in` is `size()` times `out`; `out` may be this rank's part of `in`.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        return this->start(this->requests().reduce_scatter(in, out, op));
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Counts counts) {
        return this->start(this->requests().reduce_scatter(in, out, op, counts));
    }

    /// The sum of each rank's `in` times a factor of its own, of a floating-point dtype. `op` is sum. On all
    /// ranks or none.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor) {
        return this->start(this->requests().reduce_scatter(in, out, op, factor));
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor, Counts counts) {
        return this->start(this->requests().reduce_scatter(in, out, op, factor, counts));
    }

    /// At the root `out` is `size()` times `in`, and `in` may be its part; elsewhere `out` is not
    /// looked at.
    Work gather(ConstBuffer in, Buffer out, int root) {
        return this->start(this->requests().gather(in, out, root));
    }
    /// Rank r contributes counts[r] elements; only the root's counts are looked at.
    Work gather(ConstBuffer in, Buffer out, int root, Counts counts) {
        return this->start(this->requests().gather(in, out, root, counts));
    }

    /// At the root `in` is `size()` times `out`, and `out` may be its part; elsewhere `in` is not
    /// looked at.
    Work scatter(ConstBuffer in, Buffer out, int root) {
        return this->start(this->requests().scatter(in, out, root));
    }
    /// Rank r receives counts[r] elements; only the root's counts are looked at.
    Work scatter(ConstBuffer in, Buffer out, int root, Counts counts) {
        return this->start(this->requests().scatter(in, out, root, counts));
    }

    /// Part r of `in` goes to rank r, where it is the part of this rank in `out`. Both have the same
    /// count, a multiple of `size()`; they do not overlap.
    Work all_to_all(ConstBuffer in, Buffer out) {
        return this->start(this->requests().all_to_all(in, out));
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    Work all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) {
        return this->start(this->requests().all_to_all(in, out, counts_in, counts_out));
    }
};

}}} // namespace joinable::v0::detail
