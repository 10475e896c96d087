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
/// One concept for each optional operation of a communicator that moves data or owns memory. All
/// are collective unless stated otherwise. `comm` is an lvalue of `C`, `in` is a ConstBuffer, and
/// `out` and `buffer` are Buffers. `counts` is a std::span<std::size_t const> with each rank's
/// number of elements; it need not outlive the call. Parts lie one after another in rank order.
///
/// communicator.hpp has those that end waits: Aborts, TellsReason, HasDeadline, RenewsDeadline and
/// ReportsMissing.
///
/// ProcessCommunicator models all but RegistersArenas. ThreadCommunicator also lacks
/// AllocatesArena, because its ranks share the heap. SelfCommunicator also lacks SendsAndReceives
/// and Splits.

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

/// A communicator that combines buffers over all ranks and stores the result on one of them.
///
/// | expression                      | result | meaning                                           |
/// |---------------------------------|--------|---------------------------------------------------|
/// | `comm.reduce(buffer, op, root)` | Work   | in place at the root; the others' are not changed |
template <class C>
concept Reduces = Communicator<C> && detail::has_reduce<C>;

/// A communicator that concatenates one buffer of each rank, in rank order, on one rank.
///
/// | expression                           | result | meaning                                      |
/// |--------------------------------------|--------|----------------------------------------------|
/// | `comm.gather(in, out, root)`         | Work   | root: `out.count == in.count * size()`;      |
/// |                                      |        | other ranks ignore `out`                     |
/// | `comm.gather(in, out, root, counts)` | Work   | rank r has `in.count == counts[r]`; only the |
/// |                                      |        | root reads `counts`                          |
template <class C>
concept Gathers = Communicator<C> && detail::has_gather<C>;

/// A communicator that distributes the parts of one rank's buffer to all ranks.
///
/// | expression                            | result | meaning                                     |
/// |---------------------------------------|--------|---------------------------------------------|
/// | `comm.scatter(in, out, root)`         | Work   | root: `in.count == out.count * size()`;     |
/// |                                       |        | other ranks ignore `in`                     |
/// | `comm.scatter(in, out, root, counts)` | Work   | rank r has `out.count == counts[r]`; only   |
/// |                                       |        | the root reads `counts`                     |
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
/// | `comm.send(in, to, tag)`          | Work   | messages with one tag between two ranks stay in |
/// | `comm.receive(buffer, from, tag)` | Work   | order; count and dtype are the same on both     |
template <class C>
concept SendsAndReceives = Communicator<C> && detail::has_send<C> && detail::has_receive<C>;

/// A communicator that can be split into communicators of groups of its ranks.
///
/// | expression               | result       | meaning                                            |
/// |--------------------------|--------------|----------------------------------------------------|
/// | `comm.split(color, key)` | Communicator | blocks; one for the ranks of each color (>= 0),    |
/// |                          |              | ordered by key, then rank; aborting `comm` aborts  |
/// |                          |              | it too                                             |
///
/// Required, but not checkable: if it throws, all ranks throw. After a ContractViolation they can go
/// on, unless it is the reason of an abort; after anything else `comm` is aborted, and all throw
/// that. A rank alone refuses its own color, before it sends anything.
template <class C>
concept Splits = Communicator<C> && detail::has_split<C>;

/// A communicator that scales each rank's buffer by that rank's factor while it sums. Averaging
/// then needs one pass fewer. This is a separate collective: either all ranks give a factor or none
/// does.
///
/// | expression                              | result | meaning                                   |
/// |-----------------------------------------|--------|-------------------------------------------|
/// | `comm.all_reduce(buffer, op, factor)`   | Work   | sums `factor * buffer` in place; `op` is  |
/// |                                         |        | sum, the dtype is floating-point          |
/// | `C::rounds_factors`                     | bool   | optional, static: whether the factor is   |
/// |                                         |        | rounded to the buffer's dtype. Without it:|
/// |                                         |        | if the communicator moves device memory.  |
/// |                                         |        | Then gradients are scaled before the sum, |
/// |                                         |        | if their device can (Device::can_scale)   |
template <class C>
concept ScalesSums = Communicator<C> && detail::has_scaled_all_reduce<C>;

/// A communicator that scales in the same way when each rank gets a part of the sum.
///
/// | expression                                         | result | meaning                               |
/// |----------------------------------------------------|--------|---------------------------------------|
/// | `comm.reduce_scatter(in, out, op, factor)`         | Work   | like ReduceScatters, but sums         |
/// | `comm.reduce_scatter(in, out, op, factor, counts)` | Work   | `factor * in`; `op` is sum            |
template <class C>
concept ScalesScatteredSums =
    ScalesSums<C> && ReduceScatters<C> && detail::has_scaled_reduce_scatter<C>;

/// A communicator that provides memory whose buffers it moves without copying them first. Not
/// collective. Use make_arena() in code that must also run on other communicators.
///
/// | expression                         | result | meaning                                        |
/// |------------------------------------|--------|------------------------------------------------|
/// | `comm.allocate(bytes, alignment)`  | Arena  | zeroed; alignment is a power of two; may       |
/// |                                    |        | outlive `comm`                                 |
template <class C>
concept AllocatesArena = Communicator<C> && detail::has_allocate<C>;

/// A communicator that moves buffers in its own arenas faster once all ranks have registered them.
/// It may refuse. Allocation stays local, so ranks can first find out whether all of them have the
/// same arena.
///
/// | expression                   | result | meaning                                             |
/// |------------------------------|--------|-----------------------------------------------------|
/// | `comm.register_arena(arena)` | bool   | blocks; `arena` is from `comm.allocate()` and has   |
/// |                              |        | the same size on all ranks, else Mismatch; false on |
/// |                              |        | all ranks: refused, and usable as it is             |
template <class C>
concept RegistersArenas = AllocatesArena<C> && detail::has_register_arena<C>;

/// A communicator whose ranks run on one machine and can share memory. shared_buffer() makes typed
/// elements of it.
///
/// | expression           | result | meaning                                                      |
/// |----------------------|--------|--------------------------------------------------------------|
/// | `comm.share(bytes)`  | Arena  | blocks; the same zeroed memory on every rank, freed when the |
/// |                      |        | last rank destroys its arena; `bytes` is the same on all     |
/// |                      |        | ranks, else Mismatch                                         |
template <class C>
concept SharesMemory = Communicator<C> && detail::has_share<C>;

}} // namespace joinable::v0
