// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/detail/iteration.hpp>
#include <joinable/bucket/detail/run_parts.hpp>
#include <joinable/bucket/gradients.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 {

/// Averages gradients over ranks, bucket by bucket, while the backward pass still runs. An engine
/// without a guard can drive it directly by its verbs.
///
/// One iteration: prepare_for_backward(factor), then mark_ready(i) for every trainable parameter in
/// any order, then finalize_backward(). A rank without gradients calls contribute_zeros() instead.
/// Every rank runs these collectives in an iteration:
///
/// | collective                 | when                                                            |
/// |----------------------------|-----------------------------------------------------------------|
/// | sum of the map of used     | find_unused: every iteration; static_graph: the first one       |
/// | parameters                 |                                                                 |
/// | buckets, by the reduction  | in index order, each when it is full, never in ready order. With|
/// |                            | a map, one for each run of parameters that some rank uses       |
/// | gather of numbers of rows  | after the last bucket, if gradients are rows that some rank uses |
/// | (parameter_traits)         |                                                                 |
/// | gathers of indices, of rows| at the end, for each such gradient of which some rank has rows   |
/// | broadcast of the ready     | once, after the first iteration, to cut the buckets again       |
/// | order                      | (BucketOptions::rebuild_buckets)                                |
///
/// `Reduction` defines how a bucket travels, see BucketReduction. Rows travel as they are, in no bucket, and are added
/// in rank order: the memory for them grows to the most rows so far. With NoReduction no collective of these is run. Nothing
/// is allocated after the buckets are final, unless gradients that are summed where they lie get other memory. `Times` is notified of each collective of a bucket.
template <Communicator Comm, class Reduction = AllReduce, Timeline Times = NoTimeline>
class Reducer {
    static_assert(models_bucket_reduction<Reduction, Comm>());
    static constexpr bool sends = detail::sends_runs<Reduction>;

public:
    /// Local. Buckets are in arenas of make_arena(). `comm` and the objects that the parameters
    /// refer to must outlive the reducer.
    /// @throws ContractViolation  no parameter requires a gradient, or one of integers does; a
    ///         gradient does not fit its value; gradients as bucket views lack set_grad; gradients are rows that
    ///         travel as such, and `comm` has no all_gather or the reduction does not deliver; neither
    ///         the device (Device::can_scale()) nor the reduction can scale gradients. Nothing was
    ///         changed.
    Reducer(
        Comm& comm,
        ParameterList parameters,
        BucketOptions const& options = {},
        Reduction reduction = {}
    )
        : Reducer{
              comm,
              std::make_shared<Reduction>(std::move(reduction)),
              detail::gradients_in_buckets(
                  std::move(parameters),
                  options,
                  static_cast<int>(comm.rank()),
                  static_cast<int>(comm.size()),
                  detail::BufferMemory{comm},
                  sends
              ),
              options
          } {
        take_gradients();
    }
    /// For participants, which may keep the gradients elsewhere, and whose next reducer of other parameters goes on
    /// with the same reduction and timeline.
    Reducer(
        Comm& comm,
        std::shared_ptr<Reduction> reduction,
        std::unique_ptr<detail::Gradients> gradients,
        BucketOptions const& options,
        std::shared_ptr<Times> timeline = std::make_shared<Times>()
    )
        : comm_{comm}, host_{comm}, reduction_{checked(comm, std::move(reduction))},
          gradients_{std::move(gradients)}, sparse_{sends ? gradients_->sparse() : nullptr},
          iteration_{*gradients_, options}, is_rebuild_due_{detail::rebuilds(options) && sends},
          timeline_{std::move(timeline)}, words_{&own_words_}, own_words_{comm} {
        if (sparse_ != nullptr && !(AllGathers<Comm> && reduction_->delivers)) {
            throw ContractViolation{detail::concat(
                detail::describe_parameter(parameters(), sparse_->parameters().front()),
                " has sparse gradients, but ",
                AllGathers<Comm> ? "the reduction delivers no averages"
                                 : "this communicator has no all_gather; give it one",
                ", give dense gradients, or set sparse_as_dense"
            )};
        }
        order_message_.resize(is_rebuild_due_ ? gradients_->trained().size() + 1 : 0);
        fit_to_buckets();
        if constexpr (sums_in_place) {
            // Where ranks copy gradients anyway, these come to their buckets sooner when they are ready.
            bool const is_copied = options.gradient_as_bucket_view && !detail::reaches_all(comm_);
            if (comm_.sums_pieces() && scales(comm_, *reduction_) && !is_copied) {
                gradients_->leave_in_place();
            }
        }
    }

    Reducer(Reducer const&) = delete;
    Reducer& operator=(Reducer const&) = delete;

    /// Registers the memory of the buckets with the communicator, if it can (RegistersArenas).
    /// Collective, once, after all ranks have made their reducers of the same parameters. All
    /// iterations use that memory, also on ranks without gradients.
    void register_memory() {
        if constexpr (RegistersArenas<Comm>) {
            gradients_->for_each_arena([this](Arena const& arena) {
                static_cast<void>(comm_.register_arena(arena)); // else it is used unregistered
            });
        }
    }

    /// Makes gradients views of the buckets, if BucketOptions::gradient_as_bucket_view is set. For
    /// a reducer of a participant, after all ranks have made theirs. Local.
    void take_gradients() { gradients_->take(); }

    [[nodiscard]] ParameterList const& parameters() const noexcept {
        return gradients_->parameters();
    }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return gradients_->buckets();
    }

    /// Whether buckets are still to be cut anew. Local.
    [[nodiscard]] bool is_rebuild_due() const noexcept { return is_rebuild_due_; }

    /// The order by which the buckets were cut anew; empty if they were not. Local.
    [[nodiscard]] std::span<std::uint64_t const> order() const noexcept {
        return std::span{order_message_}.subspan(
            is_rebuild_due_ || order_message_.empty() ? order_message_.size() : 1
        );
    }
    /// Whether `order` is one of the trained parameters.
    [[nodiscard]] bool is_order(std::span<std::uint64_t const> order) const {
        std::vector<std::uint64_t> given{order.begin(), order.end()};
        std::vector<std::uint64_t> own{gradients_->trained().begin(), gradients_->trained().end()};
        std::sort(given.begin(), given.end());
        std::sort(own.begin(), own.end());
        return given == own;
    }
    /// Cuts the buckets as the reducer of another training did, from which a checkpoint has order(). If buckets are
    /// never cut anew, it does nothing. The same on all ranks, between iterations. Local.
    void take_order(std::span<std::uint64_t const> order) {
        iteration_.require_closed();
        if (order.size() + 1 == order_message_.size()) {
            std::copy(order.begin(), order.end(), order_message_.begin() + 1);
            cut_anew();
        }
    }

    /// Whether the last iteration copied gradients that BucketOptions::gradient_as_bucket_view would make views of the
    /// buckets. Local.
    [[nodiscard]] bool copies_without_need() const {
        return launched_ != 0 && gradients_->copies_without_need();
    }
    [[nodiscard]] Reduction& reduction() noexcept { return *reduction_; }
    [[nodiscard]] std::shared_ptr<Reduction> const& shared_reduction() const noexcept {
        return reduction_;
    }
    /// Prepares the reduction for these buckets, again if another reducer had it. Local.
    void prepare_reduction() {
        if constexpr (detail::prepares_runs<Reduction, Comm>) {
            reduction_->prepare(comm_, parts_.all());
        }
    }
    /// After the last iteration: whether gradients live in the buckets. Other parameters may end from now on. Local.
    [[nodiscard]] bool holds_gradients() { return gradients_->hold_any(); }
    [[nodiscard]] Times& timeline() noexcept { return *timeline_; }
    [[nodiscard]] std::shared_ptr<Times> const& shared_timeline() const noexcept {
        return timeline_;
    }
    /// Ends the timeline ranges of an iteration that failed. Local.
    void end_ranges() noexcept {
        for (auto& range : ranges_) {
            range.reset();
        }
    }

    /// Checks a factor that all ranks are about to give, such as that of a sum over all tokens. Local,
    /// the same verdict on all ranks.
    /// @throws ContractViolation  gradients have f16, the sum multiplies by the factor and rounds it
    ///         (ScalesSums), and f16 cannot hold it. Nothing was changed.
    void check_factor(double factor) {
        if (detail::rounds_factors<Comm, Reduction>() && scales(comm_, *reduction_)) {
            for (Bucket const& bucket : buckets()) {
                detail::check_rounding(factor, bucket.buffer.dtype);
            }
        }
    }

    /// Sends the map of the next iteration by `words`, of the same ranks in host memory, not by the
    /// communicator of the gradients. On a device, a map does not travel behind gradients then. The
    /// same on every rank. Local.
    void send_words_by(detail::ControlCommunicator& words) noexcept { words_ = &words; }
    /// A communicator of the same ranks in host memory. Local.
    [[nodiscard]] detail::ControlCommunicator& words() noexcept { return own_words_; }
    /// Called before `words` is destroyed. A map that is under way there is lost. Local.
    void forget_words() noexcept {
        words_ = &own_words_;
        is_map_posted_ = false;
    }

    /// Starts an iteration. This rank's gradients are multiplied by `factor`, the divisor of the
    /// average with this rank's weight in it, as they are packed or as they are summed
    /// (ScalesSums). With factor 0 this rank contributes zeros whatever its gradients hold, because
    /// a mean over no samples is NaN. See check_factor() for small factors. `unused` names the
    /// parameters that get no gradient: a range of indices or a predicate over them; with find_unused, parameters that were frozen since they
    /// were listed are unused as well. `order_source` is the rank whose ready order is used
    /// for new buckets, the same on all ranks. Collective in effect; does not block.
    /// @throws ContractViolation  the previous iteration was not finalized; parameters are unused
    ///         without find_unused, or are listed twice, out of range or not trainable.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(double factor, Unused const& unused = {}, int order_source = 0) {
        begin(factor, order_source, nullptr);
        detail::for_each_unused(unused, gradients_->trained(), [&](std::size_t i) {
            iteration_.leave_out(i);
        });
        iteration_.leave_out_others();
        if (iteration_.sends_map()) {
            launch_map();
        }
        while (turns().proceed()) { // no bucket starts before a gradient is ready
        }
    }

    /// Records that gradient `i` was added to in a round that is not reduced: if parameters may be
    /// unused, the next iteration sends it even if the pass does not use it. Local.
    /// @throws ContractViolation  `i` is out of range or needs no gradient.
    void mark_accumulated(std::size_t i) { iteration_.mark_accumulated(i); }

    /// Marks the gradient of parameter `i` as final. Packs it, launches every full bucket whose
    /// predecessors are launched, and tests the oldest bucket in flight, so that communicators can
    /// make progress during the pass. A parameter without a gradient contributes zeros. With a
    /// static graph every use marks, and the last mark counts. Collective in effect; does not
    /// block, unless gradients go to owners and a bucket waits for the memory of another one.
    /// @throws ContractViolation  no iteration is prepared, `i` is out of range or needs no
    ///         gradient, was marked before or declared unused, or its gradient does not fit its
    ///         value. The iteration is lost.
    /// @throws what the communicator throws.
    void mark_ready(std::size_t i) {
        detail::require_nothing_lost(has_failed_start_, has_lost_average_);
        if (iteration_.mark(i)) {
            make_room(gradients_->bucket_of(i));
            iteration_.take(i);
        }
        advance();
        if (tested_ < launched_ && detail::make_progress(*works_[tested_])) {
            ++tested_;
            if (!gradients_->receive_averages()) {
                finish_oldest();
            }
        }
    }
    /// Whether the open iteration waits for a mark of trained parameter `i`. Local.
    [[nodiscard]] bool is_missing(std::size_t i) const { return iteration_.is_missing(i); }

    /// Launches what a reduction with other collectives can launch once one of these is over. Collective in
    /// effect; does not block.
    void proceed() { advance(); }
    /// Whether a pass may wait until it is over for ranks that reduce nothing before. Then a bucket gets memory
    /// without waiting for another one. Before an iteration. Local.
    void reduce_after_pass(bool after_pass) noexcept { reduces_after_pass_ = after_pass; }

    /// Contributes zeros from now on, because a batch failed. Call finalize_backward() afterwards.
    /// Collective in effect. Blocks until all ranks have begun the iteration, if gradients were marked and find_unused is on.
    /// @throws ContractViolation  no iteration is open, or it is too late: a bucket is full that some rank uses.
    void contribute_nothing() {
        iteration_.require_open("contribute_nothing()");
        if (is_map_posted_ && iteration_.is_marked()) { // as if other ranks had been faster
            wait_for_map();
            advance();
        }
        if (launched_ != 0 || counts_) {
            detail::refuse_late_skip(static_cast<int>(comm_.rank()));
        }
        gradients_->submit(gradients_->trained()); // what was packed, before zeros replace it
        iteration_.contribute_nothing();
        contributes_ = false;
        factor_ = 1.0; // of zeros
        next_bucket_ = 0;
        has_failed_start_ = false;
        turns().end_pass();
        advance();
    }

    /// Waits for all buckets and writes the averages into the gradients. A parameter without a
    /// gradient gets a view of its bucket if it has set_grad. Parameters that no rank uses are not
    /// touched, except by contribute_zeros(). Collective.
    /// @throws ContractViolation  parameters were not marked (the text lists them), the graph
    ///         differs from the first iteration's, or a parameter has no place for its average.
    /// @throws what the communicator throws.
    void finalize_backward() {
        iteration_.require_open("finalize_backward()");
        detail::require_nothing_lost(has_failed_start_, has_lost_average_);
        iteration_.complete();
        if (auto const& used = iteration_.used(); used && !used->is_known()) {
            if (!is_map_posted_) {
                launch_map();
            }
            wait_for_map();
        }
        turns().end_pass();
        advance();
        for (std::size_t step = 1; step < detail::steps_of<Reduction>; ++step) {
            advance_runs(step);
        }
        gather_rows();
        while (finished_ < launched_) {
            finish_oldest();
        }
        gradients_->complete();
        iteration_.follow_others();
        if (is_rebuild_due_) {
            rebuild();
        }
        gradients_->device().finish();
        iteration_.end();
        words_ = &own_words_;
        if constexpr (requires { reduction_->end_iteration(); } || requires { &Reduction::end_iteration; }) {
            reduction_->end_iteration();
        }
    }

    /// Runs a whole iteration for a rank that has no gradients: the same collectives with zeros;
    /// the averages are written into its gradients, and zeros or nothing for a parameter that no
    /// rank uses. For a rank that has joined a guard, BucketOptions::joined_gradients says what
    /// happens to these. Collective. Throws what finalize_backward() throws.
    void contribute_zeros(int order_source = 0, bool has_joined = false) {
        detail::WithoutPass const without = without_pass(has_joined, false);
        begin(0.0, order_source, &without);
        contribute_nothing();
        finalize_backward();
    }

    /// The same for a rank without a backward pass whose gradients hold what it accumulated in
    /// earlier rounds (mark_accumulated). They are multiplied by `factor` and contribute.
    void contribute_accumulated(double factor, int order_source = 0, bool has_joined = false) {
        detail::WithoutPass const without = without_pass(has_joined, true);
        begin(factor, order_source, &without);
        turns().end_pass();
        for (std::size_t const i : gradients_->trained()) {
            make_room(gradients_->bucket_of(i));
            iteration_.contribute_accumulated(i);
            advance();
        }
        finalize_backward();
    }

    /// Whether mark_accumulated() was called since the last iteration. Local.
    [[nodiscard]] bool holds_accumulated() const noexcept { return iteration_.holds_accumulated(); }
    /// Forgets what mark_accumulated() recorded, because the gradients were cleared. Between iterations. Local.
    void discard_window() { iteration_.discard_accumulated(); }

    /// Called when a guard begins. Averages for owners: forgets an iteration that was not finished. Local.
    void begin_guard() noexcept {
        if (!gradients_->receive_averages()) { // else a map of used parameters may be under way
            iteration_.abandon();
        }
        turns().begin_guard();
    }
    /// Called when a guard has ended, in any way: averages in the gradients of joined ranks last until then.
    /// Enqueues on the device. Local. Afterwards no rank uses this one's gradients, or waits for its share of a sum.
    void end_guard() {
        take_gradients_back([] {}, detail::sums_pieces(comm_)); // which also move slices of buckets
        gradients_->end_guard();
    }
    /// An exception has left the iteration. If other ranks may still use this one's gradients where they lie, calls
    /// `end()`, which ends the communicator, and waits until they no longer do; `of_all`: also if this rank's are in buckets.
    /// Over processes it finishes sums that have begun with the others, at most until the deadline: their slices need this
    /// rank's share. Local.
    template <class End>
    void take_gradients_back(End const& end, bool of_all = false) {
        bool is_any_in_use = false;
        for (std::size_t k = finished_; k < launched_; ++k) {
            bool const is_asked = of_all || launched_runs_[k].run.pieces.number != 0;
            is_any_in_use = is_any_in_use || (is_asked && !is_over(*works_[k]));
        }
        if (!is_any_in_use) {
            return;
        }
        end();
        for (; finished_ < launched_; ++finished_) {
            works_[finished_].reset();
        }
        tested_ = launched_;
        has_lost_average_ = true;
    }

private:
    /// Whether the sum may read gradients where they lie, without a bucket. A reduction derived from AllReduce may look into it.
    static constexpr bool sums_in_place =
        std::same_as<Reduction, AllReduce> && detail::has_sum_of_pieces<Comm>;

    /// The library's own two do not; owners' buckets have no views of their parts.
    static constexpr bool looks_at_parts = !std::same_as<Reduction, AllReduce> &&
                                           !std::derived_from<Reduction, detail::ReductionTurns>;

    using Range = decltype(std::declval<Times&>().bucket(0, 0));
    [[nodiscard]] static auto gather(Comm& comm, detail::SparseGradients::Gather const& rows) {
        if constexpr (AllGathers<Comm>) {
            return comm.all_gather(rows.part, rows.whole, rows.counts);
        } else {
            return CompletedWork{}; // the constructor refuses rows
        }
    }
    using CountsWork =
        decltype(gather(std::declval<Comm&>(), std::declval<detail::SparseGradients::Gather&>()));
    using BucketWork = std::remove_cvref_t<decltype(std::declval<Reduction&>().start(
        std::declval<Comm&>(), std::declval<BucketRun const&>(), 1.0, true
    ))>;

    /// A run of a bucket that was launched, and where its parameters are in the bucket's.
    struct Launched {
        BucketRun run;
        std::size_t first = 0;
        std::size_t last = 0;
    };

    /// The turns of the reduction, if it has some.
    [[nodiscard]] auto& turns() noexcept {
        if constexpr (std::derived_from<Reduction, detail::ReductionTurns>) {
            return *reduction_;
        } else {
            static detail::ReductionTurns none;
            return none;
        }
    }

    // The script of an iteration, the same on ranks with and without gradients.

    [[nodiscard]] detail::WithoutPass without_pass(bool has_joined, bool sends_accumulated) const {
        return {has_joined, sends_accumulated, gradients_->joined_gradients()};
    }

    /// No `without`: gradients will be marked.
    void begin(double factor, int order_source, detail::WithoutPass const* without) {
        contributes_ = factor != 0.0; // else zeros are packed
        // A device may have got its kernels since the last iteration.
        bool const scales_later = scales(comm_, *reduction_) && contributes_;
        iteration_.require_closed();
        turns().begin_iteration();
        gradients_->begin(without != nullptr && without->has_joined);
        end_ranges(); // of an iteration that failed
        iteration_.begin(scales_later ? 1.0 : factor, without);
        factor_ = scales_later ? factor : 1.0;
        order_source_ = order_source;
        next_bucket_ = 0;
        has_failed_start_ = has_lost_average_ = false;
        launched_ = tested_ = finished_ = 0;
        counts_.reset();
        if (sparse_ != nullptr) {
            sparse_->begin(factor, without == nullptr || !without->is_untouched());
        }
    }

    void launch_map() {
        iteration_.write_used();
        words_->post_sum(iteration_.used()->words());
        is_map_posted_ = true;
    }
    void wait_for_map() {
        words_->wait_sum();
        is_map_posted_ = false;
        iteration_.used()->set_known();
    }

    /// Launches the full buckets in index order, and other collectives of the reduction in between. The map of used
    /// parameters is known before the first one, so parameters that no rank uses are never sent.
    void advance() {
        if constexpr (!sends) {
            return;
        }
        if (auto const& used = iteration_.used(); used && !used->is_known()) {
            if (!is_map_posted_ || !words_->test_sum()) {
                return;
            }
            wait_for_map();
        }
        do {
            while (iteration_.is_open() && next_bucket_ < buckets().size() &&
                   iteration_.is_full(next_bucket_) && turns().may_start(next_bucket_)) {
                launch_bucket(next_bucket_);
                turns().note_started(next_bucket_++);
            }
        } while (turns().proceed());
        if (sparse_ != nullptr && next_bucket_ == buckets().size()) {
            launch_counts();
        }
    }

    /// Calls f(i) for every gradient of rows that some rank uses.
    template <class F>
    void for_each_sparse(F const& f) {
        if (sparse_ != nullptr) {
            for (std::size_t const i : sparse_->parameters()) {
                if (iteration_.is_used(i)) {
                    f(i);
                }
            }
        }
    }
    /// Starts to gather how many rows each rank has, once they are final.
    void launch_counts() {
        bool is_any_used = false;
        for_each_sparse([&](std::size_t) { is_any_used = true; });
        if (!is_any_used || counts_ || !iteration_.is_open() ||
            !iteration_.is_full(buckets().size())) {
            return;
        }
        has_failed_start_ = true; // unless this one returns
        for_each_sparse([&](std::size_t i) { iteration_.take_unused(i); });
        static_cast<void>(counts_.emplace(gather(comm_, sparse_->counts())));
        has_failed_start_ = false;
    }
    void gather_rows() {
        if (!counts_) {
            return;
        }
        has_lost_average_ = true; // unless this one returns
        counts_->wait();
        for_each_sparse([&](std::size_t i) {
            sparse_->for_each_gather(i, [&](detail::SparseGradients::Gather const& rows) {
                [[maybe_unused]] auto const range =
                    timeline_->bucket(buckets().size(), rows.whole.bytes());
                gather(comm_, rows).wait();
            });
            gradients_->deliver(i);
        });
        counts_.reset();
        has_lost_average_ = false;
    }

    void launch_bucket(std::size_t index) {
        Bucket const& bucket = buckets()[index];
        has_failed_start_ = true; // unless this returns
        make_room(index);
        for_each_run(bucket, [&](std::size_t first, std::size_t last) {
            for (std::size_t k = first; k < last; ++k) {
                iteration_.take_unused(bucket.parameters[k]);
            }
            gradients_->submit(bucket.parameters);
            Launched& launched = launched_runs_[launched_];
            launched = {run_of(index, first, last), first, last};
            if constexpr (sums_in_place) {
                launched.run.pieces = gradients_->pieces_of(index, first, last);
            }
            static_cast<void>(
                ranges_[launched_].emplace(timeline_->bucket(index, launched.run.buffer.bytes()))
            );
            static_cast<void>(works_[launched_].emplace(
                reduction_->start(comm_, launched.run, factor_, contributes_)
            ));
            ++launched_; // a work that could not start is not waited for
        });
        has_failed_start_ = false;
    }
    [[nodiscard]] BucketRun run_of(std::size_t index, std::size_t first, std::size_t last) const {
        Bucket const& bucket = buckets()[index];
        BucketParts const parts = parts_.of(index, first, last);
        if (last - first == bucket.parameters.size()) {
            return {index, bucket.buffer, parts};
        }
        BucketRun run{index, {bucket.views[first].data(), 0, bucket.buffer.dtype}, parts};
        for (std::size_t k = first; k < last; ++k) {
            run.buffer.count += bucket.views[k].numel();
        }
        return run;
    }

    [[nodiscard]] static std::shared_ptr<Reduction>
    checked(Comm& comm, std::shared_ptr<Reduction> reduction) {
        static_cast<void>(scales(comm, *reduction));
        return reduction;
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

    /// All ranks launch in one order, so at least one rank can continue while another one waits here.
    void make_room(std::size_t bucket) {
        if (finished_ < launched_ && !reduces_after_pass_ && gradients_->waits_for_memory(bucket)) {
            finish_oldest();
        }
    }
    [[nodiscard]] static bool is_over(BucketWork& work) noexcept {
        try {
            return detail::make_progress(work);
        } catch (...) {
            return false;
        }
    }
    /// Starts the next collective of each run, once its last one has ended.
    void advance_runs([[maybe_unused]] std::size_t step) {
        if constexpr (detail::steps_of<Reduction> > 1) {
            has_failed_start_ = true; // unless all of them start
            for (std::size_t k = finished_; k < launched_; ++k) {
                works_[k]->wait();
                static_cast<void>(
                    works_[k].emplace(reduction_->advance(comm_, launched_runs_[k].run, step))
                );
            }
            has_failed_start_ = false;
        }
    }
    void finish_oldest() {
        auto const [run, first, last] = launched_runs_[finished_];
        works_[finished_]->wait();
        ranges_[finished_].reset();
        works_[finished_].reset();
        tested_ = (std::max)(tested_, ++finished_); // also where what follows throws
        has_lost_average_ = true;                   // unless this returns
        gradients_->give_back(run.bucket);
        reduction_->finish(comm_, run);
        for (std::size_t k = first; reduction_->delivers && k < last; ++k) {
            gradients_->deliver(buckets()[run.bucket].parameters[k]);
        }
        has_lost_average_ = false;
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

    /// Takes the order of `order_source`. A rank that skipped has none; then the next iteration
    /// tries again.
    void rebuild() {
        if (comm_.rank() == order_source_) {
            std::vector<std::size_t> const& order = iteration_.ready_order();
            order_message_[0] = order.size() + 1 == order_message_.size() ? 1 : 0;
            std::copy(order.begin(), order.end(), order_message_.begin() + 1);
        }
        Buffer const message{order_message_.data(), order_message_.size(), DType::u64};
        host_.broadcast(message, order_source_).wait();
        if (order_message_[0] != 0) {
            cut_anew();
        }
    }
    void cut_anew() {
        gradients_->rebuild({order_message_.begin() + 1, order_message_.end()});
        iteration_.set_ordered();
        fit_to_buckets();
        is_rebuild_due_ = false;
    }

    void fit_to_buckets() {
        // With a map each parameter may be a run of its own, between two unused ones.
        std::size_t const runs =
            iteration_.used() ? gradients_->trained().size() : buckets().size();
        works_ = std::vector<std::optional<BucketWork>>(runs);
        ranges_ = std::vector<std::optional<Range>>(runs);
        launched_runs_.resize(runs);
        parts_.list(buckets());
        prepare_reduction();
    }

    Comm& comm_;
    detail::HostCollectives<Comm> host_;
    std::shared_ptr<Reduction> reduction_;
    double factor_ = 1; ///< applied by the reduction
    bool contributes_ = false;
    std::unique_ptr<detail::Gradients> gradients_;
    detail::SparseGradients* sparse_; ///< of these; null: none are rows that travel
    detail::Iteration iteration_;
    int order_source_ = 0;
    std::size_t next_bucket_ = 0;
    bool has_failed_start_ = false; ///< a bucket of this iteration could not start
    bool has_lost_average_ = false; ///< or was not delivered
    std::size_t launched_ = 0;      ///< number of works started
    std::size_t tested_ = 0;        ///< number of works known to be complete
    std::size_t finished_ = 0;      ///< number of works whose averages are where they belong
    bool reduces_after_pass_ = false;
    bool is_rebuild_due_;
    std::vector<std::uint64_t> order_message_; ///< whether there is an order, and the order
    std::shared_ptr<Times> timeline_;
    detail::RunParts<looks_at_parts> parts_;
    std::vector<Launched> launched_runs_;      ///< of the works
    std::vector<std::optional<Range>> ranges_; ///< of the works
    bool is_map_posted_ = false;
    detail::ControlCommunicator* words_ = nullptr; ///< of the open or the next iteration
    // Destroyed first, because they use the memory of the members above.
    detail::ControlOver<Comm&> own_words_;
    std::vector<std::optional<BucketWork>> works_;
    std::optional<CountsWork> counts_; ///< how many rows of gradients each rank has
};

template <class Comm>
Reducer(Comm&, ParameterList, BucketOptions = {}) -> Reducer<Comm>;
template <class Comm, class Reduction>
Reducer(Comm&, ParameterList, BucketOptions, Reduction) -> Reducer<Comm, Reduction>;

}} // namespace joinable::v0
