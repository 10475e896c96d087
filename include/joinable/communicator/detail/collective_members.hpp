// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// The collectives as members of a communicator. A transport derives from one of these classes and
/// implements one function, `Work post(Request const&)`. It keeps post() private and makes
/// BasicCollectives<Derived, Work> a friend. A transport that lacks some collectives derives from
/// the smaller class, or says what it offers, so that its communicator does not model the other
/// capabilities.

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

/// Says which collectives a communicator has beyond those of every communicator.
struct OffersAll {
    static constexpr bool scaled_sums = true;
    static constexpr bool reduce = true;
    static constexpr bool all_gather = true;
    static constexpr bool reduce_scatter = true;
    static constexpr bool scaled_scattered_sums = true;
    static constexpr bool gather = true;
    static constexpr bool scatter = true;
    static constexpr bool all_to_all = true;
};

/// The collectives of all capabilities that `Offers` names.
template <class Derived, class Work, class Offers = OffersAll>
class Collectives : public BasicCollectives<Derived, Work> {
public:
    using BasicCollectives<Derived, Work>::all_reduce;
    /// Sums each rank's buffer times that rank's factor, in place. The dtype is floating-point, and
    /// `op` is sum. Either all ranks give a factor or none does.
    Work all_reduce(Buffer buffer, ReduceOp op, double factor)
        requires(Offers::scaled_sums)
    {
        return this->start(this->requests().all_reduce(buffer, op, factor));
    }

    /// In place at the root; the other ranks' buffers do not change.
    Work reduce(Buffer buffer, ReduceOp op, int root)
        requires(Offers::reduce)
    {
        return this->start(this->requests().reduce(buffer, op, root));
    }

    /// `out` has `size()` times the elements of `in`; `in` may be this rank's part of `out`.
    Work all_gather(ConstBuffer in, Buffer out)
        requires(Offers::all_gather)
    {
        return this->start(this->requests().all_gather(in, out));
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    Work all_gather(ConstBuffer in, Buffer out, Counts counts)
        requires(Offers::all_gather)
    {
        return this->start(this->requests().all_gather(in, out, counts));
    }

    /// `in` has `size()` times the elements of `out`; `out` may be this rank's part of `in`.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op)
        requires(Offers::reduce_scatter)
    {
        return this->start(this->requests().reduce_scatter(in, out, op));
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Counts counts)
        requires(Offers::reduce_scatter)
    {
        return this->start(this->requests().reduce_scatter(in, out, op, counts));
    }

    /// Sums each rank's `in` times that rank's factor. The dtype is floating-point, and `op` is
    /// sum. Either all ranks give a factor or none does.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor)
        requires(Offers::scaled_scattered_sums)
    {
        return this->start(this->requests().reduce_scatter(in, out, op, factor));
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, double factor, Counts counts)
        requires(Offers::scaled_scattered_sums)
    {
        return this->start(this->requests().reduce_scatter(in, out, op, factor, counts));
    }

    /// At the root `out` has `size()` times the elements of `in`, and `in` may be its part. Other
    /// ranks ignore `out`.
    Work gather(ConstBuffer in, Buffer out, int root)
        requires(Offers::gather)
    {
        return this->start(this->requests().gather(in, out, root));
    }
    /// Rank r contributes counts[r] elements; only the root reads `counts`.
    Work gather(ConstBuffer in, Buffer out, int root, Counts counts)
        requires(Offers::gather)
    {
        return this->start(this->requests().gather(in, out, root, counts));
    }

    /// At the root `in` has `size()` times the elements of `out`, and `out` may be its part. Other
    /// ranks ignore `in`.
    Work scatter(ConstBuffer in, Buffer out, int root)
        requires(Offers::scatter)
    {
        return this->start(this->requests().scatter(in, out, root));
    }
    /// Rank r receives counts[r] elements; only the root reads `counts`.
    Work scatter(ConstBuffer in, Buffer out, int root, Counts counts)
        requires(Offers::scatter)
    {
        return this->start(this->requests().scatter(in, out, root, counts));
    }

    /// Sends part r of `in` to rank r, which stores it as this rank's part of `out`. Both have the
    /// same count, a multiple of `size()`; they do not overlap.
    Work all_to_all(ConstBuffer in, Buffer out)
        requires(Offers::all_to_all)
    {
        return this->start(this->requests().all_to_all(in, out));
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    Work all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out)
        requires(Offers::all_to_all)
    {
        return this->start(this->requests().all_to_all(in, out, counts_in, counts_out));
    }
};

}}} // namespace joinable::v0::detail
