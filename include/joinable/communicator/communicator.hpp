// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/work.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

/// How long a collective waits for the other ranks unless set_deadline() says otherwise.
inline constexpr std::chrono::nanoseconds default_deadline = std::chrono::minutes{5};

namespace detail {

/// The length of the sums by which ranks agree: the roll calls of a guard, its entry, and the comparison of
/// models when they are made.
inline constexpr std::size_t agreement_words = 7;

template <class C>
concept has_rank = requires(C const& comm) {
    { comm.rank() } -> std::convertible_to<int>;
};
template <class C>
concept has_size = requires(C const& comm) {
    { comm.size() } -> std::convertible_to<int>;
};
template <class C>
concept has_all_reduce = requires(C& comm, Buffer buffer, ReduceOp op) {
    { comm.all_reduce(buffer, op) } -> Work;
};
template <class C>
concept has_broadcast = requires(C& comm, Buffer buffer, int root) {
    { comm.broadcast(buffer, root) } -> Work;
};
template <class C>
concept has_barrier = requires(C& comm) { comm.barrier(); };

template <class C>
concept has_abort = requires(C& comm, AbortReason reason) {
    comm.abort(reason);
    { comm.is_aborted() } -> std::convertible_to<bool>;
};
template <class C>
concept has_abort_reason = requires(C const& comm) {
    { comm.abort_reason() } -> std::same_as<std::optional<AbortReason>>;
};
template <class C>
concept has_is_renumbered = requires(C const& comm) {
    { comm.is_renumbered() } -> std::convertible_to<bool>;
};
template <class C>
concept has_set_deadline = requires(C& comm, std::chrono::nanoseconds deadline) {
    { comm.set_deadline(deadline) } -> std::convertible_to<std::chrono::nanoseconds>;
};
template <class C>
concept has_missing_ranks = requires(C const& comm) {
    { comm.missing_ranks() } -> std::convertible_to<std::vector<int>>;
};

template <class C>
concept has_keep_alive = requires(C& comm) { comm.keep_alive(); };

} // namespace detail

/// The possible `device_type`s of a communicator: the device whose memory it moves. Without one it
/// moves host memory. All are Devices (device/device.hpp).
class HostDevice;
class CudaDevice;
class SeveralDevices;

namespace detail {

template <class C>
struct device_type_of : std::type_identity<HostDevice> {};
template <class C>
    requires requires { typename C::device_type; }
struct device_type_of<C> : std::type_identity<typename C::device_type> {};

template <class C>
concept reduces_host_memory = std::same_as<typename device_type_of<C>::type, HostDevice>;

} // namespace detail

/// A group of ranks that run collectives together. Optional operations: capabilities.hpp.
///
/// `comm` is an lvalue of `C`.
/// | expression                     | result             | meaning                                  |
/// |--------------------------------|--------------------|------------------------------------------|
/// | `comm.rank()`                  | convertible to int | this rank, in [0, size()); never changes |
/// | `comm.size()`                  | convertible to int | number of ranks, the same on every rank  |
/// | `comm.all_reduce(buffer, op)`  | Work               | combines `buffer` over all ranks in place|
/// | `comm.broadcast(buffer, root)` | Work               | copies the buffer of `root` to all ranks |
/// | `comm.barrier()`               |                    | blocks until every rank has called it    |
/// | `C::device_type`               | optional           | HostDevice (default), CudaDevice or      |
/// |                                |                    | SeveralDevices                           |
/// | `comm.device_memory()`         | `device_type&`     | needed unless device_type is HostDevice; |
/// |                                |                    | work submitted there before a collective |
/// |                                |                    | runs before it; work submitted after its |
/// |                                |                    | wait() sees the result                   |
/// | `comm.is_renumbered()`         | optional, bool     | local; whether it was split from another |
/// |                                |                    | communicator, where some of its ranks    |
/// |                                |                    | have other numbers. A guard over that    |
/// |                                |                    | one then takes no rank from its failures |
///
/// Required, but not checkable: every rank calls the same collectives in the same order. A
/// collective that throws because of another rank leaves the communicator aborted. One thread at a
/// time may use an object; different ranks are independent. A communicator need not be movable.
///
/// Those of this library throw ContractViolation before any data moves if counts or dtypes do not
/// fit, the root is not a rank, memory is missing or overlaps, or the operation is bitwise on
/// floating-point numbers. The caller must keep buffers until the work has been waited for; spans of
/// counts are copied.
///
/// Archetype: MinimalCommunicator in tests/static/concepts.test.cpp. Models: SelfCommunicator, ThreadCommunicator.
template <class C>
concept Communicator = detail::has_rank<C> && detail::has_size<C> && detail::has_all_reduce<C> &&
                       detail::has_broadcast<C> && detail::has_barrier<C>;

/// A communicator on which any rank can end the waits of all ranks.
///
/// | expression           | result              | meaning                                         |
/// |----------------------|---------------------|-------------------------------------------------|
/// | `comm.abort(reason)` |                     | local; every wait that cannot complete throws   |
/// |                      |                     | `reason` on every rank; the first reason wins   |
/// | `comm.is_aborted()`  | convertible to bool | whether any rank has aborted                    |
template <class C>
concept Aborts = Communicator<C> && detail::has_abort<C>;

/// A communicator that tells why it was aborted, without a collective that throws it.
///
/// | expression            | result                     | meaning                               |
/// |-----------------------|----------------------------|---------------------------------------|
/// | `comm.abort_reason()` | std::optional<AbortReason> | local; the first reason that this     |
/// |                       |                            | rank has heard; empty unless          |
/// |                       |                            | is_aborted(). Tests of a work hear it |
template <class C>
concept TellsReason = Aborts<C> && detail::has_abort_reason<C>;

/// A communicator whose waits end in `TimedOut` (default: `default_deadline`).
///
/// | expression             | result                   | meaning                                   |
/// |------------------------|--------------------------|-------------------------------------------|
/// | `comm.set_deadline(d)` | std::chrono::nanoseconds | local; for waits that start later;        |
/// |                        |                          | returns the deadline that was in force    |
template <class C>
concept HasDeadline = Communicator<C> && detail::has_set_deadline<C>;

/// A communicator on which a slow rank can report that it is still working.
///
/// | expression          | result | meaning                                                        |
/// |---------------------|--------|----------------------------------------------------------------|
/// | `comm.keep_alive()` |        | local; waits for this rank are extended: they now end one      |
/// |                     |        | deadline from this call                                        |
template <class C>
concept RenewsDeadline = HasDeadline<C> && detail::has_keep_alive<C>;

/// A communicator that reports which ranks have not arrived at the oldest pending collective.
///
/// | expression             | result           | meaning                                         |
/// |------------------------|------------------|-------------------------------------------------|
/// | `comm.missing_ranks()` | std::vector<int> | local; ascending; empty when nothing is pending |
template <class C>
concept ReportsMissing = Communicator<C> && detail::has_missing_ranks<C>;

/// Explains in one sentence why a class is not a Communicator.
template <class C>
consteval bool models_communicator() {
    static_assert(detail::has_rank<C>, "Communicator: expected a member 'int rank() const'");
    static_assert(detail::has_size<C>, "Communicator: expected a member 'int size() const'");
    static_assert(
        detail::has_all_reduce<C>,
        "Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)"
    );
    static_assert(
        detail::has_broadcast<C>,
        "Communicator: expected a member 'Work broadcast(Buffer, int root)' (in place)"
    );
    static_assert(detail::has_barrier<C>, "Communicator: expected a member 'void barrier()'");
    return Communicator<C>;
}

namespace detail {
template <class C>
concept has_identity = requires(C const& comm) {
    { comm.identity() } -> std::same_as<void const*>;
};
/// Whether a communicator says that it is renumbered. False if it does not know.
template <class C>
[[nodiscard]] bool is_renumbered_group(C const& comm) {
    if constexpr (has_is_renumbered<C>) {
        return comm.is_renumbered();
    } else {
        return false;
    }
}
/// By which a guard knows a communicator: the same for an object, and for what refers to it.
template <class C>
[[nodiscard]] void const* identity_of(C const& comm) noexcept {
    if constexpr (has_identity<C>) {
        return comm.identity();
    } else {
        return std::addressof(comm);
    }
}

/// Stands for a communicator that was not passed to a participant. The assertion explains it.
struct NoCommunicator {};

/// Accepts any argument. A deduction guide that takes it loses to every other guide, and explains
/// the error.
struct AnyArgument {
    template <class T>
    AnyArgument(T&&);
};
} // namespace detail

/// The work that `C` returns from its all-reduce.
template <Communicator C>
using work_of =
    std::remove_cvref_t<decltype(std::declval<C&>().all_reduce(Buffer{}, ReduceOp::sum))>;

}} // namespace joinable::v0
