// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

/// A parameter's gradient in a bucket: dense, in the order of its strides.
struct BucketPart {
    std::size_t bucket;    ///< the index of its bucket
    std::size_t parameter; ///< its index in the ParameterList
    std::size_t offset;    ///< of its first element in the bucket, in elements
    std::size_t count;     ///< elements
    DType dtype;
    Shape extents;
    Shape strides; ///< in elements
};

/// A list of parts, which the reducer has. As light as it can be: every training compiles it.
class BucketParts {
public:
    constexpr BucketParts() noexcept = default;
    constexpr BucketParts(BucketPart const* data, std::size_t count) noexcept
        : data_{data}, count_{count} {}

    [[nodiscard]] constexpr std::size_t size() const noexcept { return count_; }
    [[nodiscard]] constexpr BucketPart const& operator[](std::size_t k) const noexcept {
        return data_[k];
    }
    [[nodiscard]] constexpr BucketPart const* begin() const noexcept { return data_; }
    [[nodiscard]] constexpr BucketPart const* end() const noexcept { return data_ + count_; }

private:
    BucketPart const* data_ = nullptr;
    std::size_t count_ = 0;
};

/// The payload of one collective of a reducer: a bucket, or a run of its parameters if some of them
/// are not used. The same runs on all ranks.
struct BucketRun {
    std::size_t bucket; ///< its index
    Buffer buffer;      ///< in the bucket's memory, valid as long as the reducer
    /// The parameters of the run, in the order in which they lie in the buffer, without gaps.
    BucketParts parts = {};
    /// Where its parts lie, if not in the buffer. Only AllReduce itself gets them. start() may change the list.
    detail::BufferPieces pieces = {};

    /// The elements of part `k`.
    [[nodiscard]] Buffer part(std::size_t k) const noexcept {
        std::size_t const begin = parts[k].offset - parts[0].offset;
        return {
            static_cast<std::byte*>(buffer.data) + begin * size_of(buffer.dtype),
            parts[k].count,
            buffer.dtype
        };
    }
};

/// Where a reduction keeps a tensor of a parameter.
struct ReductionTensor {
    std::string_view name; ///< such as "residual"
    std::size_t parameter; ///< its index in the ParameterList
    std::byte* data;
    DType dtype; ///< of a tensor of each rank: f32 or f64
    Shape extents;
    Shape strides; ///< dense
    bool is_same =
        false; ///< on all ranks; else each rank has its own, and those of two ranks may be added
    DeviceId device = {}; ///< whose memory it is
};
/// A number that changes as a reduction works, the same on all ranks. `label` is the one that agree_on() has for it.
struct ReductionCount {
    std::string_view label;
    std::uint64_t* value;
};
/// The state that a reduction carries from one round to the next, for a Checkpoint.
struct ReductionState {
    std::vector<ReductionTensor> tensors;
    std::vector<ReductionCount> counts;
};

namespace detail {

template <class R>
concept names_reduction = requires(R const& reduction) {
    { reduction.name } -> std::convertible_to<std::string_view>;
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
template <class R, class Comm>
concept prepares_runs = requires(R& reduction, Comm& comm, BucketParts parts) {
    reduction.prepare(comm, parts);
} || requires { &R::prepare; }; // of another signature: the call says so

/// How many collectives a run needs, one after another.
template <class R>
inline constexpr std::size_t steps_of = 1;
template <class R>
    requires requires { R::steps; }
inline constexpr std::size_t steps_of<R> = R::steps;

/// Whether buckets travel at all.
template <class R>
inline constexpr bool sends_runs = true;
template <class R>
    requires requires { R::sends; }
inline constexpr bool sends_runs<R> = R::sends;

template <class R, class Comm>
concept advances_runs =
    steps_of<R> == 1 || requires(R& reduction, Comm& comm, BucketRun const& run, std::size_t step) {
        {
            reduction.advance(comm, run, step)
        } -> std::same_as<decltype(reduction.start(comm, run, 1.0, true))>;
    };

/// Whether a reduction has something that a checkpoint keeps.
template <class R>
concept saves_state = requires(R& reduction, ReductionState& state) {
    reduction.save(state);
    reduction.load(state);
} || requires { &R::save; }; // of another signature: the call says so

/// The settings of a reduction, which ranks compare.
template <class R>
void agree_on_reduction(AgreementList& list, R const& reduction) {
    list.add("reduction", reduction.name);
    if constexpr (requires { reduction.agree_on(list); } || requires { &R::agree_on; }) {
        reduction.agree_on(list);
    }
}

} // namespace detail

/// How a bucket travels: the operation of a Reducer on a full bucket. The same on all ranks.
///
/// `reduction` is an lvalue of `R`, `comm` of `Comm`, `run` a BucketRun.
/// | expression                      | result      | meaning                                        |
/// |---------------------------------|-------------|------------------------------------------------|
/// | `reduction.name`                | string view | for error texts; ranks compare it              |
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
/// |                                 |             | of start(); may write the averages, and release |
/// |                                 |             | what the run needed                            |
///
/// It may have these members, too. `parts` is a BucketParts, `list` an AgreementList:
/// | expression                          | meaning                                                          |
/// |-------------------------------------|------------------------------------------------------------------|
/// | `R::sends`                          | false: gradients stay as they are on each rank. The reducer packs |
/// |                                     | nothing, sends neither map nor order, and never calls start()    |
/// | `R::rounds_factors`                 | whether a factor that f16 cannot hold is refused for gradients of |
/// |                                     | f16; false if start() multiplies by it in f32. Without it, what  |
/// |                                     | the communicator says (ScalesSums)                               |
/// | `R::steps`                          | the collectives of a run, one after another; 1 if it is not there|
/// | `reduction.advance(comm, run, step)`| starts the next one, for `step` from 1 to steps - 1, once the one|
/// |                                     | before has ended; returns what start() returns, which may be     |
/// |                                     | complete. In the order of start(), one step of all runs after    |
/// |                                     | another, when the pass is over                                   |
/// | `reduction.prepare(comm, parts)`    | local; `parts` of all buckets, in their order, valid until the   |
/// |                                     | next call. When the reducer is made and when its buckets are cut |
/// |                                     | anew: the place to allocate. State is kept by parameter          |
/// | `reduction.end_iteration()`         | on every rank, once its averages are where they belong           |
/// | `reduction.agree_on(list)`          | lists settings, which ranks compare with those of others         |
/// | `reduction.save(state)`             | local, between rounds: adds to a ReductionState where its state  |
/// |                                     | lies, which a Checkpoint writes, or reads and then calls load()  |
/// | `reduction.load(state)`             | local: what save() listed has the contents of a file             |
/// | `reduction.feedback`,               | of one that keeps what it left out for the next round: CastTo    |
/// | `reduction.scale_residuals(factor)` | refuses it, and the user calls this when the loss scale changes  |
/// Not checkable, but required: start() issues the same collectives on every rank, whether the rank
/// contributes or not. The reducer owns the reduction. Models: AllReduce, those of <joinable/compression.hpp>, and inside
/// ShardedDataParallel a sum to owners.
template <class R, class Comm>
concept BucketReduction = std::move_constructible<R> && Communicator<Comm> &&
                          detail::names_reduction<R> && detail::says_whether_it_delivers<R> &&
                          detail::says_whether_it_scales<R, Comm> && detail::starts_runs<R, Comm> &&
                          detail::finishes_runs<R, Comm> && detail::advances_runs<R, Comm>;

/// Says in one sentence why a class is not a BucketReduction.
template <class R, class Comm>
consteval bool models_bucket_reduction() {
    static_assert(
        detail::names_reduction<R>,
        "BucketReduction: expected a member 'std::string_view name', which may be static"
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
        "BucketReduction: expected a member 'Work start(Comm&, BucketRun const&, double factor, bool contributes)'"
    );
    static_assert(
        detail::finishes_runs<R, Comm>,
        "BucketReduction: expected a member 'void finish(Comm&, BucketRun const&)'"
    );
    static_assert(
        detail::advances_runs<R, Comm>,
        "BucketReduction: with more than one step, expected a member 'advance(Comm&, BucketRun const&, std::size_t "
        "step)' that returns what start() returns"
    );
    return BucketReduction<R, Comm>;
}

namespace detail {

/// The turns of a reduction whose buckets alternate with other collectives. The defaults are those of a reduction
/// without such collectives. A Reducer calls them on every rank in the same order.
struct ReductionTurns {
    static void begin_iteration() noexcept {}
    /// Whether a full bucket may start now.
    [[nodiscard]] static bool may_start(std::size_t /*bucket*/) noexcept { return true; }
    static void note_started(std::size_t /*bucket*/) noexcept {}
    /// Starts other collectives whose turn has come. Returns whether it did, and buckets may follow.
    [[nodiscard]] static bool proceed() { return false; }
    /// No pass needs anything of this iteration any more, or there is none.
    static void end_pass() noexcept {}
    /// A guard begins: forgets what one that failed has left open.
    static void begin_guard() noexcept {}
};

} // namespace detail

}} // namespace joinable::v0
