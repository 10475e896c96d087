// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/communicator.hpp>
#include <joinable/tensor/tensor.hpp>

/// @file
/// The collectives over tensors instead of buffers. Collective, like the members that they call;
/// each returns the communicator's Work, and the tensors must live until it is waited for.
/// All throw ContractViolation before any data moves when a tensor is not contiguous.

namespace joinable::inline v0 {

namespace detail {

template <class T>
consteval bool check_written_tensor() {
    static_assert(
        WritableTensor<T>, "a collective writes this tensor: it must model WritableTensor"
    );
    return WritableTensor<T>;
}

} // namespace detail

/// Combines `tensor` over all ranks, in place. The same count and dtype on every rank.
template <Communicator Comm, class T>
[[nodiscard]] auto all_reduce(Comm& comm, T&& tensor, ReduceOp op = ReduceOp::sum) {
    static_assert(detail::check_written_tensor<T>());
    return comm.all_reduce(to_buffer(tensor), op);
}

/// Copies the tensor of `root` to all ranks. The same count and dtype on every rank.
template <Communicator Comm, class T>
[[nodiscard]] auto broadcast(Comm& comm, T&& tensor, int root) {
    static_assert(detail::check_written_tensor<T>());
    return comm.broadcast(to_buffer(tensor), root);
}

/// Concatenates the tensors of all ranks, in rank order, on every rank: `out` has size() times the
/// elements of `in`.
template <Communicator Comm, Tensor In, class Out>
[[nodiscard]] auto all_gather(Comm& comm, In const& in, Out&& out) {
    static_assert(detail::check_written_tensor<Out>());
    static_assert(
        AllGathers<Comm>,
        "all_gather: this communicator has no member 'Work all_gather(ConstBuffer in, Buffer out)'"
    );
    return comm.all_gather(to_const_buffer(in), to_buffer(out));
}

/// Combines `in` over all ranks and leaves rank r the part from r * numel(out) on: `in` has size()
/// times the elements of `out`.
template <Communicator Comm, Tensor In, class Out>
[[nodiscard]] auto
reduce_scatter(Comm& comm, In const& in, Out&& out, ReduceOp op = ReduceOp::sum) {
    static_assert(detail::check_written_tensor<Out>());
    static_assert(
        ReduceScatters<Comm>,
        "reduce_scatter: this communicator has no member 'Work reduce_scatter(ConstBuffer in, "
        "Buffer out, ReduceOp)'"
    );
    return comm.reduce_scatter(to_const_buffer(in), to_buffer(out), op);
}

} // namespace joinable::inline v0
