// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/buffer.hpp>

/// @file
/// One concept for each optional operation of a communicator that moves data or has memory for it.
/// Collective unless said otherwise; `comm` is an lvalue of `C`, `in` a ConstBuffer, `out` and `buffer` a Buffer, and
/// `counts` a std::span<std::size_t const> with the number of elements of each rank, which need not
/// outlive the call. Parts lie one after another in rank order. Models: ProcessCommunicator has all
/// but RegistersArenas. ThreadCommunicator lacks AllocatesArena, too, because its ranks share the
/// heap. SelfCommunicator also lacks SendsAndReceives and Splits.

namespace joinable { inline namespace v0 {

namespace detail {

using Counts = std::span<std::size_t const>;

template <class C>
concept has_all_gather = requires(C& comm, ConstBuffer in, Buffer out, Counts counts) {
    { comm.all_gather(in, out) } -> Work;
    { comm.all_gather(in, out, counts) } -> Work;
};
template <class C>
concept has_reduce_scatter =
    requires(C& comm, ConstBuffer in, Buffer out, ReduceOp op, Counts counts) {
        { comm.reduce_scatter(in, out, op) } -> Work;
        { comm.reduce_scatter(in, out, op, counts) } -> Work;
    };
template <class C>
concept has_reduce = requires(C& comm, Buffer buffer, ReduceOp op, int root) {
    { comm.reduce(buffer, op, root) } -> Work;
};
template <class C>
concept has_gather = requires(C& comm, ConstBuffer in, Buffer out, int root, Counts counts) {
    { comm.gather(in, out, root) } -> Work;
    { comm.gather(in, out, root, counts) } -> Work;
};
template <class C>
concept has_scatter = requires(C& comm, ConstBuffer in, Buffer out, int root, Counts counts) {
    { comm.scatter(in, out, root) } -> Work;
    { comm.scatter(in, out, root, counts) } -> Work;
};
template <class C>
concept has_all_to_all = requires(C& comm, ConstBuffer in, Buffer out, Counts counts) {
    { comm.all_to_all(in, out) } -> Work;
    { comm.all_to_all(in, out, counts, counts) } -> Work;
};
template <class C>
concept has_send = requires(C& comm, ConstBuffer buffer, int to, int tag) {
    { comm.send(buffer, to, tag) } -> Work;
};
template <class C>
concept has_receive = requires(C& comm, Buffer buffer, int from, int tag) {
    { comm.receive(buffer, from, tag) } -> Work;
};
template <class C>
concept has_split = requires(C& comm, int color, int key) {
    { comm.split(color, key) } -> Communicator;
};

template <class C>
concept has_scaled_all_reduce = requires(C& comm, Buffer buffer, ReduceOp op, double factor) {
    { comm.all_reduce(buffer, op, factor) } -> Work;
};
template <class C>
concept has_scaled_reduce_scatter = requires(
    C& comm,
    ConstBuffer in,
    Buffer out,
    ReduceOp op,
    double factor,
    std::span<std::size_t const> counts
) {
    { comm.reduce_scatter(in, out, op, factor) } -> Work;
    { comm.reduce_scatter(in, out, op, factor, counts) } -> Work;
};
template <class C>
concept has_allocate = requires(C& comm, std::size_t bytes, std::size_t alignment) {
    { comm.allocate(bytes, alignment) } -> std::same_as<Arena>;
};
template <class C>
concept has_register_arena = requires(C& comm, Arena const& arena) {
    { comm.register_arena(arena) } -> std::same_as<bool>;
};
template <class C>
concept has_share = requires(C& comm, std::size_t bytes) {
    { comm.share(bytes) } -> std::same_as<Arena>;
};

} // namespace detail

/// A communicator that concatenates one buffer of each rank, in rank order, on every rank.
///
/// | expression                         | result | meaning                                        |
/// |------------------------------------|--------|------------------------------------------------|
/// | `comm.all_gather(in, out)`         | Work   | `out.count == in.count * size()`               |
/// | `comm.all_gather(in, out, counts)` | Work   | rank r has `in.count == counts[r]`; the same   |
/// |                                    |        | counts on every rank                           |
template <class C>
concept AllGathers = Communicator<C> && detail::has_all_gather<C>;

/// A communicator that combines buffers over all ranks and leaves each rank its part.
///
/// | expression                                 | result | meaning                                |
/// |--------------------------------------------|--------|----------------------------------------|
/// | `comm.reduce_scatter(in, out, op)`         | Work   | `in.count == out.count * size()`       |
/// | `comm.reduce_scatter(in, out, op, counts)` | Work   | rank r has `out.count == counts[r]`;   |
/// |                                            |        | the same counts on every rank          |
template <class C>
concept ReduceScatters = Communicator<C> && detail::has_reduce_scatter<C>;

/// A communicator that combines buffers over all ranks and leaves the result to one.
///
/// | expression                      | result | meaning                                           |
/// |---------------------------------|--------|---------------------------------------------------|
/// | `comm.reduce(buffer, op, root)` | Work   | in place at the root; the others' are not changed |
template <class C>
concept Reduces = Communicator<C> && detail::has_reduce<C>;

/// A communicator that concatenates one buffer of each rank, in rank order, on one of them.
///
/// | expression                           | result | meaning                                      |
/// |--------------------------------------|--------|----------------------------------------------|
/// | `comm.gather(in, out, root)`         | Work   | root: `out.count == in.count * size()`;      |
/// |                                      |        | elsewhere `out` is not looked at             |
/// | `comm.gather(in, out, root, counts)` | Work   | rank r has `in.count == counts[r]`; only the |
/// |                                      |        | root's counts are looked at                  |
template <class C>
concept Gathers = Communicator<C> && detail::has_gather<C>;

/// A communicator that deals a buffer of one rank out to all.
///
/// | expression                            | result | meaning                                     |
/// |---------------------------------------|--------|---------------------------------------------|
/// | `comm.scatter(in, out, root)`         | Work   | root: `in.count == out.count * size()`;     |
/// |                                       |        | elsewhere `in` is not looked at             |
/// | `comm.scatter(in, out, root, counts)` | Work   | rank r has `out.count == counts[r]`; only   |
/// |                                       |        | the root's counts are looked at             |
template <class C>
concept Scatters = Communicator<C> && detail::has_scatter<C>;

/// A communicator that sends a part of each rank's buffer to each other rank.
///
/// | expression                                         | result | meaning                        |
/// |----------------------------------------------------|--------|--------------------------------|
/// | `comm.all_to_all(in, out)`                         | Work   | equal parts: part r of `in` is |
/// |                                                    |        | part `rank()` of r's `out`     |
/// | `comm.all_to_all(in, out, counts_in, counts_out)`  | Work   | counts_in[r] elements go to r, |
/// |                                                    |        | counts_out[r] come from it     |
template <class C>
concept AllToAlls = Communicator<C> && detail::has_all_to_all<C>;

/// A communicator on which two ranks exchange messages. Not collective.
///
/// | expression                        | result | meaning                                         |
/// |-----------------------------------|--------|-------------------------------------------------|
/// | `comm.send(in, to, tag)`          | Work   | messages of one tag between two ranks keep      |
/// | `comm.receive(buffer, from, tag)` | Work   | their order; count and dtype agree on both      |
template <class C>
concept SendsAndReceives = Communicator<C> && detail::has_send<C> && detail::has_receive<C>;

/// A communicator of which groups of ranks can be made communicators of their own.
///
/// | expression               | result       | meaning                                            |
/// |--------------------------|--------------|----------------------------------------------------|
/// | `comm.split(color, key)` | Communicator | blocks; ranks of one color (>= 0), in the order of |
/// |                          |              | key, then rank; abort reaches it from `comm`       |
template <class C>
concept Splits = Communicator<C> && detail::has_split<C>;

/// A communicator that multiplies what it sums, each rank's buffer with a factor of its own, on its
/// way: a pass less over what is averaged. The factor may be rounded to the buffer's dtype. A
/// collective of its own: all ranks give a factor, or none.
///
/// | expression                              | result | meaning                                   |
/// |-----------------------------------------|--------|-------------------------------------------|
/// | `comm.all_reduce(buffer, op, factor)`   | Work   | `op` is sum; of `factor * buffer`, which  |
/// |                                         |        | is of a floating-point dtype, in place    |
template <class C>
concept ScalesSums = Communicator<C> && detail::has_scaled_all_reduce<C>;

/// A communicator that does the same with sums of which each rank gets a part.
///
/// | expression                                         | result | meaning                               |
/// |----------------------------------------------------|--------|---------------------------------------|
/// | `comm.reduce_scatter(in, out, op, factor)`         | Work   | as ReduceScatters has them, of        |
/// | `comm.reduce_scatter(in, out, op, factor, counts)` | Work   | `factor * in`; `op` is sum            |
template <class C>
concept ScalesScatteredSums =
    ScalesSums<C> && ReduceScatters<C> && detail::has_scaled_reduce_scatter<C>;

/// A communicator that has memory from which it moves buffers without copies of its own. Not
/// collective. Where a program may also run over others, make_arena() takes their place.
///
/// | expression                         | result | meaning                                        |
/// |------------------------------------|--------|------------------------------------------------|
/// | `comm.allocate(bytes, alignment)`  | Arena  | zeroed; alignment is a power of two; may       |
/// |                                    |        | outlive `comm`                                 |
template <class C>
concept AllocatesArena = Communicator<C> && detail::has_allocate<C>;

/// A communicator that moves buffers in an arena of its own faster once all ranks have registered it,
/// which it can refuse. What is allocated stays local that way: ranks whose arenas differ, or that have
/// none, can find out in between.
///
/// | expression                   | result | meaning                                             |
/// |------------------------------|--------|-----------------------------------------------------|
/// | `comm.register_arena(arena)` | bool   | blocks; `arena` is of `comm.allocate()`, of as many |
/// |                              |        | bytes on all ranks, else Mismatch; false on all     |
/// |                              |        | ranks: it is used as it is                          |
template <class C>
concept RegistersArenas = AllocatesArena<C> && detail::has_register_arena<C>;

/// A communicator whose ranks can have one memory: they are on one machine. shared_buffer() makes
/// elements of it.
///
/// | expression           | result | meaning                                                      |
/// |----------------------|--------|--------------------------------------------------------------|
/// | `comm.share(bytes)`  | Arena  | blocks; the same zeroed memory on every rank, which is there |
/// |                      |        | until the last rank's arena ends; the same bytes on all,     |
/// |                      |        | else Mismatch                                                |
template <class C>
concept SharesMemory = Communicator<C> && detail::has_share<C>;

}} // namespace joinable::v0
