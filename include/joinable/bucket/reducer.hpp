// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/host_collectives.hpp>
#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/detail/gradients.hpp>
#include <joinable/bucket/detail/iteration.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 {

/// Averages gradients over ranks, bucket by bucket, while the backward pass still runs. Stands
/// alone: an engine without a guard drives it by its verbs.
///
/// One iteration: prepare_for_backward(factor); mark_ready(i) for every trainable parameter, in any
/// order; finalize_backward(). A rank without gradients runs contribute_zeros() instead. The
/// collectives of an iteration, on every rank:
///
/// | collective                 | when                                                            |
/// |----------------------------|-----------------------------------------------------------------|
/// | sum of the map of used     | find_unused: every iteration; static_graph: the first one       |
/// | parameters                 |                                                                 |
/// | buckets, by the reduction  | in index order, each when it is full: never in ready order. With|
/// |                            | a map, of each run of parameters that some rank uses            |
/// | broadcast of the ready     | once, after the first iteration: the buckets are cut anew       |
/// | order                      | (BucketOptions::rebuild_buckets)                                |
///
/// `Reduction` says how a bucket travels, see BucketReduction. Nothing is allocated after the buckets
/// are final. `Times` is told of each collective of a bucket.
template <Communicator Comm, class Reduction = AllReduce, Timeline Times = NoTimeline>
class Reducer {
    static_assert(models_bucket_reduction<Reduction, Comm>());

public:
    /// Local. Buckets are in arenas of make_arena(). `comm` must outlive the reducer; so must what
    /// the parameters refer to.
    /// @throws ContractViolation  no parameter requires a gradient, or one of integers does; a
    ///         gradient does not fit its value; gradients as bucket views without set_grad; nobody
    ///         can scale gradients of a device: neither Device::can_scale() nor the reduction. Nothing
    ///         was changed.
    Reducer(
        Comm& comm,
        ParameterList parameters,
        BucketOptions const& options = {},
        Reduction reduction = {},
        detail::TakeGradients take = detail::TakeGradients::now
    )
        : comm_{comm}, host_{comm}, reduction_{std::move(reduction)},
          reduction_scales_{scales(comm, reduction_)},
          gradients_{
              std::move(parameters),
              options,
              static_cast<int>(comm.rank()),
              BufferMemory{comm},
              take
          },
          iteration_{gradients_, options}, is_rebuild_due_{detail::rebuilds(options)} {
        order_message_.resize(is_rebuild_due_ ? gradients_.trained().size() + 1 : 0);
        fit_to_buckets();
    }

    Reducer(Reducer const&) = delete;
    Reducer& operator=(Reducer const&) = delete;

    /// Collective, once, when all ranks have made their reducers, of the same parameters: registers
    /// the memory of the buckets with the communicator, where it can (RegistersArenas). All
    /// iterations use that memory, those of ranks without gradients, too.
    void register_memory() {
        if constexpr (RegistersArenas<Comm>) {
            gradients_.for_each_arena([this](Arena const& arena) {
                static_cast<void>(comm_.register_arena(arena)); // or it is used as it is
            });
        }
    }

    /// Local. Gradients become views of the buckets, where BucketOptions::gradient_as_bucket_view says so: for
    /// what was made with TakeGradients::later.
    void take_gradients() { gradients_.take(); }

    [[nodiscard]] ParameterList const& parameters() const noexcept {
        return gradients_.parameters();
    }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return gradients_.buckets();
    }

    /// Whether buckets are still to be cut anew. Local.
    [[nodiscard]] bool is_rebuild_due() const noexcept { return is_rebuild_due_; }

    [[nodiscard]] Reduction& reduction() noexcept { return reduction_; }
    [[nodiscard]] Times& timeline() noexcept { return timeline_; }
    /// An iteration has failed: nothing of it is shown as under way any more. Local.
    void end_ranges() noexcept {
        for (auto& range : ranges_) {
            range.reset();
        }
    }

    /// Starts an iteration in which this rank's gradients are multiplied by `factor`: the divisor of
    /// the average, with this rank's weight in it. It happens as they are packed, or as they are summed
    /// (ScalesSums). With factor 0 this rank contributes zeros, whatever its gradients hold: a mean
    /// over no samples is not a number. `unused` says which parameters get no gradient: a range of
    /// indices, or a predicate over them. `order_source` is the rank whose ready order is taken for new
    /// buckets, the same on all ranks. Collective in effect; does not block.
    /// @throws ContractViolation  the previous iteration was not finalized; parameters are unused
    ///         without find_unused, or are listed twice, out of range or not trainable.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(double factor, Unused const& unused = {}, int order_source = 0) {
        begin(factor, order_source, true);
        detail::for_each_unused(unused, gradients_.trained(), [&](std::size_t i) {
            iteration_.leave_out(i);
        });
        iteration_.leave_out_unrecorded();
        if (iteration_.finds_unused()) {
            launch_map();
        }
        advance();
    }

    /// Gradient `i` was added to in a round that is not reduced. Needed where parameters may go
    /// unused: what was accumulated counts in the next iteration, used there or not. Local.
    /// @throws ContractViolation  `i` is out of range or needs no gradient.
    void mark_accumulated(std::size_t i) { iteration_.mark_accumulated(i); }

    /// The gradient of parameter `i` is final: packs it, launches every bucket that is full and whose
    /// predecessors are launched, and tests the oldest bucket under way: communicators that need it
    /// make progress so while the pass computes. A parameter without gradient contributes zeros. With a
    /// static graph every use marks; the last one counts. Collective in effect; does not block.
    /// @throws ContractViolation  no iteration is prepared, `i` is out of range or needs no
    ///         gradient, was marked before or said to be unused, or its gradient does not fit its
    ///         value. The iteration is lost. Or what the communicator throws.
    void mark_ready(std::size_t i) {
        iteration_.mark(i);
        advance();
        if (tested_ < launched_ && detail::make_progress(*works_[tested_])) {
            ++tested_;
        }
    }

    /// From here on this rank contributes zeros: a batch failed. finalize_backward() is still to be
    /// called. Collective in effect; does not block.
    /// @throws ContractViolation  no iteration is open, or a bucket is on its way: too late.
    void contribute_nothing() {
        iteration_.require_open("contribute_nothing()");
        if (launched_ != 0) {
            detail::refuse_late_skip(static_cast<int>(comm_.rank()));
        }
        gradients_.device().submit(); // what was packed, before zeros take its place
        iteration_.contribute_nothing();
        contributes_ = false;
        advance();
    }

    /// Waits for all buckets and writes the averages into the gradients; a parameter without
    /// gradient gets a view of its bucket where set_grad allows it. What no rank uses stays as it
    /// is. Collective.
    /// @throws ContractViolation  parameters were not marked (the text lists them), the graph is not
    ///         the first iteration's, or one has no place for its average; what the communicator
    ///         throws.
    void finalize_backward() {
        iteration_.require_open("finalize_backward()");
        iteration_.complete();
        if (auto const& used = iteration_.used(); used && !used->is_known()) {
            if (!map_work_) {
                launch_map();
            }
            wait_for_map();
        }
        advance();
        deliver();
        if (is_rebuild_due_) {
            rebuild();
        }
        gradients_.device().finish();
        iteration_.end();
    }

    /// The whole iteration of a rank that has no gradients: the same collectives with zeros, and
    /// the averages written into its gradients. For one that has joined a guard the options say what
    /// becomes of these (BucketOptions::joined_gradients). Collective. Throws what finalize_backward()
    /// throws.
    void contribute_zeros(int order_source = 0, bool has_joined = false) {
        begin(0.0, order_source, false, has_joined);
        contribute_nothing();
        finalize_backward();
    }

    /// The same for a rank that runs no backward pass, but whose gradients hold what it accumulated
    /// in earlier rounds (mark_accumulated): they are multiplied by `factor` and take part.
    void contribute_accumulated(double factor, int order_source = 0, bool has_joined = false) {
        begin(factor, order_source, false, has_joined);
        iteration_.contribute_accumulated();
        finalize_backward();
    }

    /// A guard begins or ends, after its post hooks: what joined ranks write into gradients is meant
    /// until then. Local.
    void begin_guard() noexcept { gradients_.begin_guard(); }
    void end_guard() {
        gradients_.end_guard();
        gradients_.device().finish();
    }

private:
    using Range = decltype(std::declval<Times&>().bucket(0, 0));
    using BucketWork = std::remove_cvref_t<decltype(std::declval<Reduction&>().start(
        std::declval<Comm&>(), std::declval<BucketRun const&>(), 1.0, true
    ))>;

    // The script of an iteration, the same for ranks with and without gradients.

    void begin(double factor, int order_source, bool has_pass, bool has_joined = false) {
        contributes_ = factor != 0.0; // else zeros are packed
        gradients_.begin(has_joined);
        bool const scales_later = reduction_scales_ && contributes_;
        end_ranges(); // of one that failed
        iteration_.begin(scales_later ? 1.0 : factor, has_pass);
        factor_ = scales_later ? factor : 1.0;
        order_source_ = order_source;
        next_bucket_ = 0;
        launched_ = 0;
        tested_ = 0;
    }

    void launch_map() {
        iteration_.write_used();
        static_cast<void>( // nvcc 13 warns of a dropped reference to a work
            map_work_.emplace(host_.all_reduce(iteration_.used()->buffer(), ReduceOp::sum))
        );
    }
    void wait_for_map() {
        map_work_->wait();
        map_work_.reset();
        iteration_.used()->set_known();
    }

    /// Launches, in index order, the buckets that are full. What is used by some rank is known
    /// before the first one: so nothing that no rank uses is sent.
    void advance() {
        if (auto const& used = iteration_.used(); used && !used->is_known()) {
            if (!map_work_ || !detail::make_progress(*map_work_)) {
                return;
            }
            wait_for_map();
        }
        while (next_bucket_ < buckets().size() && iteration_.is_full(next_bucket_)) {
            launch_bucket(next_bucket_++);
        }
    }

    void launch_bucket(std::size_t index) {
        Bucket const& bucket = buckets()[index];
        for_each_run(bucket, [&](std::size_t first, std::size_t last) {
            for (std::size_t k = first; k < last; ++k) {
                iteration_.take_unused(bucket.parameters[k]);
            }
            gradients_.device().submit();
            BucketRun const& run = runs_[launched_] = run_of(index, first, last);
            static_cast<void>(ranges_[launched_].emplace(timeline_.bucket(index, run.buffer.bytes())
            ));
            static_cast<void>(
                works_[launched_++].emplace(reduction_.start(comm_, run, factor_, contributes_))
            );
        });
    }
    [[nodiscard]] BucketRun run_of(std::size_t index, std::size_t first, std::size_t last) const {
        Bucket const& bucket = buckets()[index];
        BucketRun run{index, {bucket.views[first].data(), 0, bucket.buffer.dtype}};
        for (std::size_t k = first; k < last; ++k) {
            run.buffer.count += bucket.views[k].numel();
        }
        return run;
    }

    [[nodiscard]] static bool scales(Comm& comm, Reduction const& reduction) {
        bool const can = reduction.scales(comm);
        if (!can && !detail::device_of(comm).can_scale()) {
            throw ContractViolation{
                "gradients of a device are to be scaled, but its kernels are missing and the "
                "communicator cannot scale what it sums; give the device its kernels, see Device"
            };
        }
        return can;
    }

    void deliver() {
        std::size_t work = 0;
        for (Bucket const& bucket : buckets()) {
            for_each_run(bucket, [&](std::size_t first, std::size_t last) {
                works_[work]->wait();
                ranges_[work].reset();
                works_[work].reset();
                reduction_.finish(comm_, runs_[work++]);
                for (std::size_t k = first; Reduction::delivers && k < last; ++k) {
                    gradients_.deliver(bucket.parameters[k]);
                }
            });
        }
        gradients_.complete([&](std::size_t i) { return iteration_.is_used(i); });
    }

    /// Calls f(first, last) for every run of a bucket's parameters that some rank uses.
    template <class F>
    void for_each_run(Bucket const& bucket, F const& f) const {
        std::size_t const count = bucket.parameters.size();
        auto const is_used = [&](std::size_t k) {
            return iteration_.is_used(bucket.parameters[k]);
        };
        for (std::size_t first = 0; first < count; ++first) {
            if (is_used(first)) {
                std::size_t last = first + 1;
                while (last < count && is_used(last)) {
                    ++last;
                }
                f(first, last);
                first = last;
            }
        }
    }

    /// Takes over the order of `order_source`, if it has one: a rank that skipped has none, and the
    /// next iteration tries again.
    void rebuild() {
        if (comm_.rank() == order_source_) {
            std::vector<std::size_t> const& order = iteration_.ready_order();
            order_message_[0] = order.size() + 1 == order_message_.size() ? 1 : 0;
            std::copy(order.begin(), order.end(), order_message_.begin() + 1);
        }
        Buffer const message{order_message_.data(), order_message_.size(), DType::u64};
        host_.broadcast(message, order_source_).wait();
        if (order_message_[0] != 0) {
            gradients_.rebuild({order_message_.begin() + 1, order_message_.end()});
            iteration_.set_ordered();
            fit_to_buckets();
            is_rebuild_due_ = false;
        }
    }

    void fit_to_buckets() {
        // With a map each parameter may be a run of its own, between two that nobody uses.
        std::size_t const runs = iteration_.used() ? gradients_.trained().size() : buckets().size();
        works_ = std::vector<std::optional<BucketWork>>(runs);
        ranges_ = std::vector<std::optional<Range>>(runs);
        runs_.resize(runs);
    }

    Comm& comm_;
    detail::HostCollectives<Comm> host_;
    Reduction reduction_;
    bool reduction_scales_;
    double factor_ = 1; ///< by which it does
    bool contributes_ = false;
    detail::Gradients gradients_;
    detail::Iteration iteration_;
    int order_source_ = 0;
    std::size_t next_bucket_ = 0;
    std::size_t launched_ = 0; ///< works
    std::size_t tested_ = 0;   ///< of them, those that are known to be through
    bool is_rebuild_due_;
    std::vector<std::uint64_t> order_message_; ///< whether there is an order, and the order
    Times timeline_;
    std::vector<BucketRun> runs_;              ///< of the works
    std::vector<std::optional<Range>> ranges_; ///< of the works
    // Destroyed first: they use the memory of what is above.
    std::optional<typename detail::HostCollectives<Comm>::Work> map_work_;
    std::vector<std::optional<BucketWork>> works_;
};

template <class Comm>
Reducer(Comm&, ParameterList) -> Reducer<Comm>;
template <class Comm>
Reducer(Comm&, ParameterList, BucketOptions) -> Reducer<Comm>;
template <class Comm, class Reduction>
Reducer(Comm&, ParameterList, BucketOptions, Reduction) -> Reducer<Comm, Reduction>;

}} // namespace joinable::v0
