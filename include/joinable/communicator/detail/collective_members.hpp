// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// The collectives and messages as members of a communicator. A transport derives from one of the
/// classes of collectives and implements one function, `Work post(Request const&)`. It keeps post()
/// private and makes BasicCollectives<Derived, Work> a friend. A transport that lacks some
/// collectives derives from the smaller class, so that its communicator does not model the other
/// capabilities. The same holds for Messages and its post_message().

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of every communicator.
template <class Derived, class Work>
class BasicCollectives {
public:
    /// In place.
    Work all_reduce(Buffer buffer, ReduceOp op) { return start(requests().all_reduce(buffer, op)); }
    /// Copies the buffer of `root` to all ranks.
    Work broadcast(Buffer buffer, int root) { return start(requests().broadcast(buffer, root)); }
    /// Explains what is missing.
    template <class T = Buffer>
    Work broadcast(T const& buffer) {
        static_assert(
            sizeof(T) == 0,
            "broadcast: say from which rank the buffer is copied, as in comm.broadcast(buffer, 0)"
        );
        return broadcast(buffer, 0);
    }
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

/// The collectives of all capabilities. Where a rank may give counts, one for each rank, it does so on
/// all ranks or on none.
template <class Derived, class Work>
class Collectives : public BasicCollectives<Derived, Work> {
    using Tables = RequestsOf::Tables;

public:
    using BasicCollectives<Derived, Work>::all_reduce;
    /// Sums each rank's buffer times that rank's factor, in place. The dtype is floating-point, and
    /// `op` is sum. Either all ranks give a factor or none does.
    Work all_reduce(Buffer buffer, ReduceOp op, double factor) {
        return this->start(this->requests().all_reduce(buffer, op, factor));
    }

    /// In place at the root; the other ranks' buffers do not change.
    Work reduce(Buffer buffer, ReduceOp op, int root) {
        return this->start(this->requests().reduce(buffer, op, root));
    }

    /// `out` has `size()` times the elements of `in`; `in` may be this rank's part of `out`. With
    /// counts, the same on every rank, rank r contributes counts[r] elements.
    Work all_gather(ConstBuffer in, Buffer out, Tables counts = {}) {
        return this->start(this->requests().all_gather(in, out, counts));
    }

    /// `in` has `size()` times the elements of `out`; `out` may be this rank's part of `in`. With
    /// counts, the same on every rank, rank r receives counts[r] elements.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Tables counts = {}) {
        return this->start(this->requests().reduce_scatter(in, out, op, counts));
    }
    /// Sums each rank's `in` times that rank's factor. The dtype is floating-point, and `op` is
    /// sum. Either all ranks give a factor or none does.
    Work
    reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor, Tables counts = {}) {
        return this->start(this->requests().reduce_scatter(in, out, op, factor, counts));
    }

    /// At the root `out` has `size()` times the elements of `in`, and `in` may be its part. Other
    /// ranks ignore `out`. With counts, which only the root reads, rank r contributes counts[r]
    /// elements.
    Work gather(ConstBuffer in, Buffer out, int root, Tables counts = {}) {
        return this->start(this->requests().gather(in, out, root, counts));
    }

    /// At the root `in` has `size()` times the elements of `out`, and `out` may be its part. Other
    /// ranks ignore `in`. With counts, which only the root reads, rank r receives counts[r]
    /// elements.
    Work scatter(ConstBuffer in, Buffer out, int root, Tables counts = {}) {
        return this->start(this->requests().scatter(in, out, root, counts));
    }

    /// Sends part r of `in` to rank r, which stores it as this rank's part of `out`. Both have the
    /// same count, a multiple of `size()`; they do not overlap.
    Work all_to_all(ConstBuffer in, Buffer out) {
        return this->start(this->requests().all_to_all(in, out));
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    Work all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) {
        return this->start(this->requests().all_to_all(in, out, counts_in, counts_out));
    }
};

/// Messages between two ranks, of which `Derived` implements
/// `Work post_message(bool is_send, int peer, int tag, Buffer)`.
template <class Derived, class Work>
class Messages {
public:
    /// Not collective. Sends to rank `to`. Messages between two ranks with the same tag arrive in
    /// order.
    Work send(ConstBuffer buffer, int to, int tag = 0) {
        // A send only reads its buffer; both sides of a message share one type.
        Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
        return start(true, "destination", to, tag, read);
    }
    /// Not collective. Receives a message of send().
    Work receive(Buffer buffer, int from, int tag = 0) {
        return start(false, "source", from, tag, buffer);
    }

private:
    Work start(bool is_send, std::string_view role, int peer, int tag, Buffer buffer) {
        auto& comm = static_cast<Derived&>(*this);
        check_memory(buffer);
        check_rank(role, peer, comm.size());
        return comm.post_message(is_send, peer, tag, buffer);
    }
};

}}} // namespace joinable::v0::detail
