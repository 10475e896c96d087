// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string_view>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

/// The payload of one collective of a reducer: a bucket, or a run of its parameters if some of them
/// are not used. The same runs on all ranks.
struct BucketRun {
    std::size_t bucket; ///< its index
    Buffer buffer;      ///< in the bucket's memory, valid as long as the reducer
    /// Where its parts lie, if not in the buffer. Only AllReduce itself gets them. start() may change the list.
    detail::BufferPieces pieces = {};
};

namespace detail {

template <class R>
concept names_reduction = requires {
    { R::name } -> std::convertible_to<std::string_view>;
};
template <class R>
concept says_whether_it_delivers = requires(R const& reduction) {
    { reduction.delivers } -> std::convertible_to<bool>;
};
template <class R, class Comm>
concept says_whether_it_scales = requires(R const& reduction, Comm& comm) {
    { reduction.scales(comm) } -> std::convertible_to<bool>;
};
template <class R, class Comm>
concept starts_runs = requires(R& reduction, Comm& comm, BucketRun const& run, double factor) {
    { reduction.start(comm, run, factor, true) } -> Work;
};
template <class R, class Comm>
concept finishes_runs =
    requires(R& reduction, Comm& comm, BucketRun const& run) { reduction.finish(comm, run); };

} // namespace detail

/// How a bucket travels: the operation of a Reducer on a full bucket. The same on all ranks.
///
/// `reduction` is an lvalue of `R`, `comm` of `Comm`, `run` a BucketRun.
/// | expression                      | result      | meaning                                        |
/// |---------------------------------|-------------|------------------------------------------------|
/// | `R::name`                       | string view | for error texts; ranks compare it              |
/// | `reduction.delivers`            | bool        | whether run.buffer holds the averages after    |
/// |                                 |             | finish(): then the reducer writes them into    |
/// |                                 |             | the gradients of all ranks. Else the reduction |
/// |                                 |             | put them where they belong, such as to owners  |
/// | `reduction.scales(comm)`        | bool        | whether start() multiplies by the factor; else |
/// |                                 |             | gradients are multiplied as they are packed    |
/// | `reduction.start(comm, run,     | Work        | collective, does not block: sends the run.     |
/// | factor, contributes)`           |             | `factor` is 1 unless it scales and this rank   |
/// |                                 |             | contributes; else the run holds zeros          |
/// | `reduction.finish(comm, run)`   |             | called after waiting for the work, in the order|
/// |                                 |             | of start(); may release what the run needed    |
/// Not checkable, but required: start() issues the same collectives on every rank, whether the rank
/// contributes or not. The reducer owns the reduction. Models: AllReduce, and inside ShardedDataParallel a sum to owners.
template <class R, class Comm>
concept BucketReduction =
    std::move_constructible<R> && Communicator<Comm> && detail::names_reduction<R> &&
    detail::says_whether_it_delivers<R> && detail::says_whether_it_scales<R, Comm> &&
    detail::starts_runs<R, Comm> && detail::finishes_runs<R, Comm>;

/// Says in one sentence why a class is not a BucketReduction.
template <class R, class Comm>
consteval bool models_bucket_reduction() {
    static_assert(
        detail::names_reduction<R>,
        "BucketReduction: expected a member 'static constexpr std::string_view name'"
    );
    static_assert(
        detail::says_whether_it_delivers<R>,
        "BucketReduction: expected a member 'static constexpr bool delivers'"
    );
    static_assert(
        detail::says_whether_it_scales<R, Comm>,
        "BucketReduction: expected a member 'bool scales(Comm&) const'"
    );
    static_assert(
        detail::starts_runs<R, Comm>,
        "BucketReduction: expected a member 'Work start(Comm&, BucketRun const&, double factor, "
        "bool "
        "contributes)'"
    );
    static_assert(
        detail::finishes_runs<R, Comm>,
        "BucketReduction: expected a member 'void finish(Comm&, BucketRun const&)'"
    );
    return BucketReduction<R, Comm>;
}

namespace detail {

/// The turns of a reduction whose buckets alternate with other collectives. The defaults are those of a reduction
/// without such collectives. A Reducer calls them on every rank in the same order.
struct ReductionTurns {
    /// An iteration begins.
    static void begin_iteration() noexcept {}
    /// Whether a full bucket may start now.
    [[nodiscard]] static bool may_start(std::size_t /*bucket*/) noexcept { return true; }
    static void note_started(std::size_t /*bucket*/) noexcept {}
    /// Starts other collectives whose turn has come. Returns whether it did, and buckets may follow.
    [[nodiscard]] static bool proceed() { return false; }
    /// No pass needs anything of this iteration any more, or there is none.
    static void end_pass() noexcept {}
    /// All averages are where they belong.
    static void end_iteration() {}
    /// A guard begins: forgets what one that failed has left open.
    static void begin_guard() noexcept {}
};

} // namespace detail

/// Sums each bucket over all ranks, in place: every rank gets every average.
struct AllReduce {
    static constexpr std::string_view name = "AllReduce";
    static constexpr bool delivers = true;

    /// If the sum scales, gradients that live in their buckets are not touched before it.
    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm& comm) noexcept {
        return ScalesSums<Comm> && !detail::scales_before_sum(comm);
    }
    template <Communicator Comm>
    [[nodiscard]] static work_of<Comm>
    start(Comm& comm, BucketRun const& run, [[maybe_unused]] double factor, bool /*contributes*/) {
        if constexpr (detail::has_sum_of_pieces<Comm>) {
            if (run.pieces.number != 0) {
                return comm.sum_pieces(run.pieces, factor);
            }
        }
        if constexpr (ScalesSums<Comm>) {
            if (scales(comm)) { // also without a contribution: all ranks run the same collective
                return comm.all_reduce(run.buffer, ReduceOp::sum, factor);
            }
        }
        return comm.all_reduce(run.buffer, ReduceOp::sum);
    }
    template <Communicator Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

}} // namespace joinable::v0
