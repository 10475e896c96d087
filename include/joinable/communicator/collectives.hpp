// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <type_traits>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/tensor.hpp>

/// @file
/// The collectives over tensors instead of buffers. They are collective, as the members that they
/// call are. Each returns the communicator's Work. The tensors must live until that work has been
/// waited for. All throw ContractViolation before any data moves if a tensor is not contiguous, or
/// on a device although the communicator moves memory of the host.
/// Elements travel in memory order, so gathering column-major tensors places their columns side by
/// side.

namespace joinable { inline namespace v0 {

namespace detail {

// These return auto, so compilers instantiate them where they are called, before they miss a to_buffer().
/// @throws ContractViolation  the tensor is on a device, but the communicator moves host memory.
template <class T, class Comm>
auto check_tensor(Comm const&, T const& tensor) {
    if constexpr (models_tensor<T>() && has_device<T> && reduces_host_memory<Comm>) {
        if (DeviceId const device = joinable::device(tensor); device != DeviceId{}) {
            throw ContractViolation{
                "a tensor is on " + to_text(device) +
                ", but the communicator of its collective moves memory of the host; give a communicator "
                "of its device"
            };
        }
    }
}
template <class T, class Comm>
auto check_written_tensor(Comm const& comm, T& tensor) {
    static_assert(
        !Tensor<T> || WritableTensor<T>,
        "a collective writes this tensor: give it one whose data() is a pointer to non-const"
    );
    check_tensor<T>(comm, tensor);
}

/// The elements that are reduced. @throws ContractViolation  its type does not reduce them so, though
/// its dtype would: see tensor_traits.
template <class T>
void check_reduced_tensor(T const& tensor, ReduceOp op) {
    if constexpr (has_static_dtype<T>) {
        constexpr DType dtype = dtype_of<typename traits_of<T>::value_type>;
        static_assert(
            is_reducible(dtype, ReduceOp::sum) || is_reducible(dtype, ReduceOp::max),
            "a reduction: integers of 16 bits are broadcast, gathered and stored, but not reduced; use int"
        );
    }
    if constexpr (requires { traits_of<T>::check_reduction(tensor, op); }) {
        traits_of<T>::check_reduction(tensor, op);
    }
}

template <class T>
concept communicator_to_use =
    std::is_lvalue_reference_v<T> && Communicator<std::remove_reference_t<T>>;

/// Arguments among which is a communicator, but not in first place, or one that is const or
/// temporary.
template <class First, class... Rest>
concept misplaces_communicator =
    !communicator_to_use<First> &&
    (Communicator<std::remove_cvref_t<First>> || ... || Communicator<std::remove_cvref_t<Rest>>);

/// A communicator, and arguments among which is a pointer: it is no tensor, and its count is one argument
/// too many.
template <class First, class... Rest>
concept gives_pointers =
    communicator_to_use<First> && (std::is_pointer_v<std::remove_cvref_t<Rest>> || ...);

template <class First, class... Rest>
concept misuses_collective =
    misplaces_communicator<First, Rest...> || gives_pointers<First, Rest...>;

/// Explains them. The result of such a collective, for which the caller may wait.
template <class First, class... Rest>
    requires misuses_collective<First, Rest...>
struct Explanation : CompletedWork {
    static_assert(
        !misplaces_communicator<First, Rest...>,
        "a collective takes the communicator first, which is an object with a name and not const, as in "
        "all_reduce(comm, tensor)"
    );
    static_assert(
        !gives_pointers<First, Rest...>,
        "a collective takes tensors; give a pointer and its count as a span, as in all_reduce(comm, "
        "std::span{pointer, count})"
    );
};

} // namespace detail

/// Combines `tensor` over all ranks, in place. The same count and dtype on every rank.
template <Communicator Comm, class T>
[[nodiscard]] auto all_reduce(Comm& comm, T&& tensor, ReduceOp op = ReduceOp::sum) {
    detail::check_written_tensor<T>(comm, tensor);
    detail::check_reduced_tensor(tensor, op);
    return comm.all_reduce(joinable::to_buffer(tensor), op);
}

/// Copies the tensor of `root` to all ranks. The same count and dtype on every rank.
template <Communicator Comm, class T>
[[nodiscard]] auto broadcast(Comm& comm, T&& tensor, int root) {
    detail::check_written_tensor<T>(comm, tensor);
    return comm.broadcast(joinable::to_buffer(tensor), root);
}
/// Explains what is missing.
template <Communicator Comm, class T>
[[nodiscard]] auto broadcast(Comm& comm, T&& tensor) {
    static_assert(
        !Communicator<Comm>,
        "broadcast: say from which rank the tensor is copied, as in broadcast(comm, tensor, 0)"
    );
    return joinable::broadcast(comm, tensor, 0);
}

/// Combines `tensor` over all ranks, in place at `root`. The tensors of the other ranks do not
/// change.
template <Communicator Comm, class T>
[[nodiscard]] auto reduce(Comm& comm, T&& tensor, ReduceOp op, int root) {
    detail::check_written_tensor<T>(comm, tensor);
    static_assert(
        Reduces<Comm>,
        "reduce: this communicator has no member 'Work reduce(Buffer, ReduceOp, int root)'; add "
        "it, or use one that models Reduces"
    );
    detail::check_reduced_tensor(tensor, op);
    return comm.reduce(joinable::to_buffer(tensor), op, root);
}

/// Concatenates the tensors of all ranks, in rank order, on every rank: `out` has size() times the
/// elements of `in`. With `counts`, rank r contributes counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto all_gather(Comm& comm, In const& in, Out&& out, Counts const&... counts) {
    detail::check_tensor<In>(comm, in);
    detail::check_written_tensor<Out>(comm, out);
    static_assert(
        AllGathers<Comm>,
        "all_gather: this communicator has no member 'Work all_gather(ConstBuffer in, Buffer "
        "out)' without and with counts; add it, or use one that models AllGathers"
    );
    return comm.all_gather(
        joinable::to_const_buffer(in), joinable::to_buffer(out), detail::Counts{counts}...
    );
}

/// Combines `in` over all ranks. Rank r receives the part that starts at r * numel(out): `in` has
/// size() times the elements of `out`. With `counts`, rank r receives counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto reduce_scatter(
    Comm& comm, In const& in, Out&& out, ReduceOp op = ReduceOp::sum, Counts const&... counts
) {
    detail::check_tensor<In>(comm, in);
    detail::check_written_tensor<Out>(comm, out);
    static_assert(
        ReduceScatters<Comm>,
        "reduce_scatter: this communicator has no member 'Work reduce_scatter(ConstBuffer in, "
        "Buffer out, ReduceOp)' without and with counts; add it, or use one that models ReduceScatters"
    );
    detail::check_reduced_tensor(in, op);
    return comm.reduce_scatter(
        joinable::to_const_buffer(in), joinable::to_buffer(out), op, detail::Counts{counts}...
    );
}

/// Concatenates the tensors of all ranks, in rank order, in `out` of the root. Other ranks ignore
/// `out`. With `counts`, rank r contributes counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto gather(Comm& comm, In const& in, Out&& out, int root, Counts const&... counts) {
    detail::check_tensor<In>(comm, in);
    detail::check_written_tensor<Out>(comm, out);
    static_assert(
        Gathers<Comm>,
        "gather: this communicator has no member 'Work gather(ConstBuffer in, Buffer out, int "
        "root)' without and with counts; add it, or use one that models Gathers"
    );
    return comm.gather(
        joinable::to_const_buffer(in), joinable::to_buffer(out), root, detail::Counts{counts}...
    );
}

/// Distributes the parts of the root's `in` to `out` of all ranks. Other ranks ignore `in`. With
/// `counts`, rank r receives counts[r] elements.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto scatter(Comm& comm, In const& in, Out&& out, int root, Counts const&... counts) {
    detail::check_tensor<In>(comm, in);
    detail::check_written_tensor<Out>(comm, out);
    static_assert(
        Scatters<Comm>,
        "scatter: this communicator has no member 'Work scatter(ConstBuffer in, Buffer out, int "
        "root)' without and with counts; add it, or use one that models Scatters"
    );
    return comm.scatter(
        joinable::to_const_buffer(in), joinable::to_buffer(out), root, detail::Counts{counts}...
    );
}

/// Sends part r of `in` to rank r, and receives part r of `out` from it. Parts differ in size if
/// the counts of `in` and of `out` are given.
template <Communicator Comm, class In, class Out, class... Counts>
[[nodiscard]] auto all_to_all(Comm& comm, In const& in, Out&& out, Counts const&... counts) {
    detail::check_tensor<In>(comm, in);
    detail::check_written_tensor<Out>(comm, out);
    static_assert(
        AllToAlls<Comm>,
        "all_to_all: this communicator has no member 'Work all_to_all(ConstBuffer in, Buffer "
        "out)' without and with counts; add it, or use one that models AllToAlls"
    );
    static_assert(
        sizeof...(Counts) == 0 || sizeof...(Counts) == 2,
        "all_to_all takes the counts of the input and of the output, or neither"
    );
    return comm.all_to_all(
        joinable::to_const_buffer(in), joinable::to_buffer(out), detail::Counts{counts}...
    );
}

/// Not collective. Sends `tensor` to rank `to`, which receives it with the same tag.
template <Communicator Comm, class In>
[[nodiscard]] auto send(Comm& comm, In const& tensor, int to, int tag = 0) {
    detail::check_tensor<In>(comm, tensor);
    static_assert(
        SendsAndReceives<Comm>,
        "send: this communicator has no members 'Work send(ConstBuffer, int to, int tag)' and "
        "'Work receive(Buffer, int from, int tag)'; add them, or use one that models SendsAndReceives"
    );
    return comm.send(joinable::to_const_buffer(tensor), to, tag);
}

/// Not collective. Receives the tensor that rank `from` sends with the same tag, count and dtype.
template <Communicator Comm, class Out>
[[nodiscard]] auto receive(Comm& comm, Out&& tensor, int from, int tag = 0) {
    detail::check_written_tensor<Out>(comm, tensor);
    static_assert(
        SendsAndReceives<Comm>,
        "receive: this communicator has no members 'Work send(ConstBuffer, int to, int tag)' and "
        "'Work receive(Buffer, int from, int tag)'; add them, or use one that models SendsAndReceives"
    );
    return comm.receive(joinable::to_buffer(tensor), from, tag);
}

/// @cond
// Each explains a call whose communicator is misplaced, const or temporary, or that gives pointers.
template <class First, class... Rest>
detail::Explanation<First, Rest...> all_reduce(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> broadcast(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> reduce(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> all_gather(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> reduce_scatter(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> gather(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> scatter(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> all_to_all(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> send(First&&, Rest&&...);
template <class First, class... Rest>
detail::Explanation<First, Rest...> receive(First&&, Rest&&...);
/// @endcond

}} // namespace joinable::v0
