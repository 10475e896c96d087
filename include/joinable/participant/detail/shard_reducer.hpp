// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/detail/bucket_arenas.hpp>
#include <joinable/participant/detail/shard_exchange.hpp>
#include <joinable/participant/detail/shard_group.hpp>
#include <joinable/participant/detail/sharded_units.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Steps a shard of a group.
using StepShard = std::function<void(std::size_t group, OptimizerShard const& shard)>;

/// Averages gradients to the owners of their parameters, bucket by bucket, while the backward pass
/// still runs: the counterpart of Reducer for sharded gradients. A bucket has memory from its first
/// gradient until the owners have its sum. Every rank runs these collectives in an iteration: a
/// reduce-scatter of each bucket, always in the order in which buckets fill when gradients become
/// ready from the last one to the first. A parameter that the pass does not use counts as zeros. If
/// values are sharded, too, the passes gather them: see ShardedUnits.
template <Communicator Comm, Timeline Times>
class ShardReducer {
public:
    /// Local. `parameters` are the parameters of all groups: of the list `groups` that the
    /// participant keeps, and of `next`, which it is about to add. Only this object uses `arenas`
    /// while gradients are reduced. `values` is null if each rank has all values. `step` is called
    /// as soon as the gradients of a shard are averaged, or is empty. `timeline` is told of each bucket,
    /// under its number in the order of their launch.
    ShardReducer(
        Comm& comm,
        ParameterList parameters,
        std::vector<ShardGroup> const& groups,
        ShardGroup const& next,
        BucketArenas& arenas,
        std::unique_ptr<ShardedUnits<Comm>> values,
        StepShard step,
        Times& timeline
    )
        : comm_{comm}, device_{device_of(comm)}, parameters_{std::move(parameters)},
          groups_{groups}, arenas_{arenas}, values_{std::move(values)}, step_{std::move(step)},
          timeline_{timeline} {
        for (std::size_t k = 0; k <= groups.size(); ++k) {
            list(k, k == groups.size() ? next : groups[k]);
        }
        std::sort(buckets_.begin(), buckets_.end(), [](Slot const& a, Slot const& b) {
            return a.first > b.first;
        });
        for (std::size_t b = 0; b < buckets_.size(); ++b) {
            for (std::size_t const i : buckets_[b].parameters) {
                bucket_of_[i] = b;
            }
            buckets_[b].unit = values_ ? values_->unit_of(buckets_[b].first) : 0;
        }
        for (std::size_t i = states_.size(); i-- > 0;) {
            if (states_[i] != State::frozen) {
                order_.push_back(i);
            }
        }
        works_ = std::vector<std::optional<BucketWork>>(buckets_.size());
        ranges_ = std::vector<std::optional<Range>>(buckets_.size());
        free_.reserve(buckets_.size());
        arenas_.reserve((std::min)(buckets_.size(), overlapping), largest_);
    }
    ShardReducer(ShardReducer const&) = delete;
    ShardReducer& operator=(ShardReducer const&) = delete;

    /// Waits for the value of parameter `i` and keeps it during the lifetime of the returned
    /// object.
    [[nodiscard]] typename ShardedUnits<Comm>::Held use(std::size_t i) {
        require_in_range(i, states_.size(), static_cast<int>(comm_.rank()));
        if (!values_ || !values_->has(i)) {
            return {};
        }
        if (values_->is_due(i) && values_->approach(i)) { // it was kept, and the script continues
            advance();
        }
        while (!values_->is_present(i)) {
            if (!values_->approach(i)) {
                throw ContractViolation{concat_missing(
                    concat(
                        "the backward pass uses ",
                        values_->describe(values_->unit_of(i)),
                        " before the gradients of units before it are ready; mark them before the pass "
                        "needs the second unit after theirs, and where the backward pass uses a value early, "
                        "keep what use() returned in the forward pass"
                    ),
                    parameters_,
                    static_cast<int>(comm_.rank()),
                    [&](std::size_t k) {
                        return states_[k] == State::pending &&
                               values_->unit_of(k) > values_->unit_of(i) + 1;
                    }
                )};
            }
            advance();
        }
        return values_->hold(i);
    }
    /// The gathered values; null if each rank has all of them.
    [[nodiscard]] ShardedUnits<Comm>* values() noexcept { return values_.get(); }

    // Gradients.

    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }

    /// Local, before each iteration. Whether the pass may wait for ranks that reduce nothing until it is
    /// over. Then all buckets have memory until that time.
    void reduces_after_pass(bool reduces) noexcept { reduces_after_pass_ = reduces; }

    /// See Reducer.
    void check_factor(double factor) {
        if (rounds_factors<Comm>() && sum_scales_parts(comm_)) {
            for (Slot const& bucket : buckets_) {
                check_rounding(factor, shard_of(bucket).bucket().dtype);
            }
        }
    }

    template <class Unused>
    void prepare_for_backward(double factor, Unused const& unused, int /*order_source*/) {
        begin(factor);
        for_each_unused(unused, order_, [&](std::size_t i) {
            require(i, " was said to be unused twice");
            take_accumulated(i);
        });
        while (values_ && values_->prefetch()) { // no bucket is sent before a gradient is ready
        }
    }

    /// The next iteration sends the gradient, even if its pass does not use it.
    void mark_accumulated(std::size_t i) {
        require_trained(i);
        accumulated_.mark(i, parameters_[i]);
    }
    // See Reducer.

    [[nodiscard]] bool holds_accumulated() const noexcept { return accumulated_.has_elements(); }
    void discard_window() noexcept { accumulated_.clear(); }

    /// Marks the gradient of parameter `i` as final: copies and releases it. On a device the
    /// gradients of a bucket are copied and released together, when the last one is final.
    void mark_ready(std::size_t i) {
        if (!is_open_) {
            throw ContractViolation{
                describe(i) +
                " was marked ready outside an iteration; call prepare_for_backward() first"
            };
        }
        launches_.require_whole();
        require(
            i,
            " was marked ready twice in an iteration, or was said to be unused; mark a parameter once, "
            "when its last use is done"
        );
        if (!parameters_[i].grad() && !parameters_[i].can_set_grad()) {
            throw ContractViolation{
                describe(i) +
                " was marked ready, but has no gradient; give it one before, or give the parameter to "
                "backward() as unused"
            };
        }
        take(i);
        advance();
        if (finished_ < launched_ && make_progress(*works_[finished_])) {
            finish_oldest();
        }
    }

    /// Contributes zeros from now on.
    void contribute_nothing() {
        if (!is_open_) {
            throw ContractViolation{"zeros were to be contributed outside an iteration"};
        }
        if (launched_ != 0) {
            refuse_late_skip(static_cast<int>(comm_.rank()));
        }
        release_gradients(order_); // what was copied, before zeros replace it
        for (State& state : states_) {
            state = state == State::frozen ? state : State::unused;
        }
        for (Slot& bucket : buckets_) {
            bucket.pending = 0;
        }
        is_unattended_ = true;
        launches_.reset();
        advance();
    }

    void finalize_backward() {
        launches_.require_whole();
        require_all();
        is_unattended_ = true;
        advance();
        while (finished_ < launched_) {
            finish_oldest();
        }
        is_open_ = false;
        discard_window();
        if (values_) {
            values_->finish_passes(true);
        }
        step_reduced();
    }

    void contribute_zeros(int /*order_source*/ = 0, bool has_joined = false) {
        begin(0.0);
        contribute_nothing();
        finalize_backward();
        if (has_joined && !std::exchange(is_clear_, true)) { // what was dropped
            for (std::size_t const i : order_) {
                clear_gradient(parameters_[i], device_);
            }
            device_.finish();
        }
    }

    /// Contributes what a rank accumulated in earlier rounds. See WithoutPass.
    void contribute_accumulated(double factor, int /*order_source*/ = 0, bool has_joined = false) {
        begin(factor);
        is_unattended_ = true;
        for (std::size_t const i : order_) {
            take_accumulated(i);
            if (has_joined) {
                device_.submit(); // it is copied first
                clear_gradient(parameters_[i], device_);
            }
            advance();
        }
        finalize_backward();
    }

    void register_memory() const noexcept {}
    void begin_guard() noexcept {
        is_open_ = is_clear_ = false;
        if (values_) {
            values_->reset();
        }
    }
    void end_ranges() noexcept {
        for (auto& range : ranges_) {
            range.reset();
        }
    }

private:
    enum class State : std::uint8_t { frozen, pending, ready, unused };

    using Range = decltype(std::declval<Times&>().bucket(0, 0));
    using BucketWork = decltype(start_parts(
        std::declval<Comm&>(), std::declval<OptimizerShard const&>(), nullptr, 1.0
    ));

    /// The number of buckets with memory, unless more fill at the same time or reduces_after_pass():
    /// one travels while the next one fills.
    static constexpr std::size_t overlapping = 2;
    static constexpr std::size_t nowhere = std::size_t(-1);

    /// A bucket of a group.
    struct Slot {
        std::size_t group;
        std::size_t shard;
        std::vector<std::size_t> parameters; ///< indices among those of all groups
        std::size_t first;                   ///< the lowest of them; its gradient is ready last
        std::size_t unit = 0;                ///< the unit of its values
        std::size_t pending = 0;             ///< gradients that are not in place
        std::size_t arena = nowhere;
    };

    void list(std::size_t k, ShardGroup const& group) {
        states_.resize(group.first + group.parameters.size(), State::frozen);
        accumulated_.resize(states_.size());
        bucket_of_.resize(states_.size(), nowhere);
        piece_of_.resize(states_.size(), 0);
        for (std::size_t s = 0; s < group.shards.size(); ++s) {
            ShardBucket const& layout = group.shards[s].bucket();
            largest_ = (std::max)(largest_, group.shards[s].bucket_bytes());
            Slot bucket{k, s, {}, nowhere};
            for (std::size_t p = 0; p < layout.pieces.size(); ++p) {
                if (layout.pieces[p].begin == 0) {
                    std::size_t const i = group.first + layout.pieces[p].parameter;
                    states_[i] = State::pending;
                    piece_of_[i] = p;
                    bucket.parameters.push_back(i);
                    bucket.first = (std::min)(bucket.first, i);
                }
            }
            buckets_.push_back(std::move(bucket));
        }
    }

    [[nodiscard]] OptimizerShard const& shard_of(Slot const& bucket) const {
        return groups_[bucket.group].shards[bucket.shard];
    }
    // The course of an iteration.

    void begin(double factor) {
        if (is_open_) {
            throw ContractViolation{
                "the previous iteration was not finalized; call finalize_backward() first"
            };
        }
        if (values_) {
            values_->begin_backward(true);
        }
        is_open_ = true;
        is_unattended_ = false;
        launches_.reset();
        factors_ = ShardFactors::of(comm_, factor);
        launched_ = finished_ = stepped_ = 0;
        free_.clear();
        arenas_in_use_ = 0;
        for (State& state : states_) {
            state = state == State::frozen ? state : State::pending;
        }
        for (Slot& bucket : buckets_) {
            bucket.pending = bucket.parameters.size();
            bucket.arena = nowhere;
        }
    }

    void settle(std::size_t i, State state) {
        states_[i] = state;
        --buckets_[bucket_of_[i]].pending;
    }

    void take(std::size_t i) {
        Slot& bucket = buckets_[bucket_of_[i]];
        ShardGroup const& group = groups_[bucket.group];
        shard_of(bucket).pack_gradient(
            group.parameters, piece_of_[i], factors_.packed, memory_of(bucket)
        );
        if (is_on_host(device_)) {
            parameters_[i].release_grad();
        }
        settle(i, State::ready);
    }
    /// Takes or leaves a parameter that this iteration does not use.
    void take_accumulated(std::size_t i) { accumulated_[i] ? take(i) : settle(i, State::unused); }
    /// On a device the gradients of a bucket are copied together, and then released.
    void release_gradients(std::vector<std::size_t> const& parameters) {
        if (is_on_host(device_)) {
            return;
        }
        device_.finish();
        for (std::size_t const i : parameters) {
            if (states_[i] == State::ready) {
                parameters_[i].release_grad();
            }
        }
    }

    [[nodiscard]] std::byte* memory_of(Slot& bucket) {
        if (bucket.arena == nowhere) {
            if (free_.empty() && arenas_in_use_ >= overlapping && finished_ < launched_ &&
                !reduces_after_pass_) {
                // All ranks launch in one order, so at least one rank can continue, and then all.
                finish_oldest();
            }
            if (free_.empty()) {
                free_.push_back(arenas_in_use_++);
            }
            bucket.arena = free_.back();
            free_.pop_back();
        }
        return arenas_.data(bucket.arena, shard_of(bucket).bucket_bytes());
    }

    /// Starts every collective whose turn has come.
    void advance() {
        do {
            launch_full();
        } while (values_ &&
                 (values_->prefetch() || (is_unattended_ && is_open_ && values_->pass_by())));
    }
    void launch_full() {
        while (is_open_ && launched_ < buckets_.size() && buckets_[launched_].pending == 0 &&
               (!values_ || values_->may_reduce())) {
            Slot& bucket = buckets_[launched_];
            OptimizerShard const& shard = shard_of(bucket);
            ShardGroup const& group = groups_[bucket.group];
            std::byte* const memory = memory_of(bucket);
            for (std::size_t const i : bucket.parameters) {
                if (states_[i] == State::unused) {
                    shard.pack_gradient(group.parameters, piece_of_[i], 0.0, memory);
                }
            }
            release_gradients(bucket.parameters);
            static_cast<void>(
                ranges_[launched_].emplace(timeline_.bucket(launched_, shard.bucket_bytes()))
            );
            launches_.start([&] {
                static_cast<void>(
                    works_[launched_].emplace(start_parts(comm_, shard, memory, factors_.summed))
                );
            });
            ++launched_; // a collective that could not start is not waited for
            if (values_ &&
                (launched_ == buckets_.size() || buckets_[launched_].unit != bucket.unit)) {
                values_->note_reduced();
            }
        }
    }

    void finish_oldest() {
        Slot& bucket = buckets_[finished_];
        works_[finished_]->wait();
        works_[finished_].reset();
        ranges_[finished_].reset();
        free_.push_back(std::exchange(bucket.arena, nowhere));
        ++finished_;
        step_reduced();
    }
    /// Steps reduced buckets. A bucket waits until its values are gathered, because a step
    /// overwrites them.
    void step_reduced() {
        while (step_ && stepped_ < finished_ &&
               (!values_ || values_->is_gathered(buckets_[stepped_].unit))) {
            Slot const& bucket = buckets_[stepped_++];
            step_(bucket.group, shard_of(bucket));
        }
    }

    // Errors.

    [[nodiscard]] std::string describe(std::size_t i) const {
        return describe_parameter(parameters_, i);
    }
    void require_trained(std::size_t i) const {
        require_in_range(i, states_.size(), static_cast<int>(comm_.rank()));
        if (states_[i] == State::frozen) {
            throw ContractViolation{concat(describe(i), why_not_trained(parameters_[i]))};
        }
    }
    void require(std::size_t i, std::string_view otherwise) const {
        require_trained(i);
        if (states_[i] != State::pending) {
            throw ContractViolation{concat(describe(i), otherwise)};
        }
    }
    void require_all() const {
        auto const is_missing = [&](std::size_t i) { return states_[i] == State::pending; };
        if (std::any_of(order_.begin(), order_.end(), is_missing)) {
            throw ContractViolation{concat_missing(
                "not all gradients became ready; mark every trainable parameter in each iteration, or give "
                "those that the pass does not use to backward() as unused",
                parameters_,
                static_cast<int>(comm_.rank()),
                is_missing
            )};
        }
    }

    Comm& comm_;
    Device& device_;
    ParameterList parameters_;
    std::vector<ShardGroup> const& groups_;
    BucketArenas& arenas_;
    std::unique_ptr<ShardedUnits<Comm>> values_;
    StepShard step_;
    Times& timeline_;
    std::vector<State> states_; ///< of each parameter of all groups
    AccumulatedMarks accumulated_;
    std::vector<std::size_t> bucket_of_; ///< likewise
    std::vector<std::size_t> piece_of_;  ///< likewise: the piece at which it begins
    std::vector<std::size_t> order_;     ///< in which gradients usually become ready
    std::size_t largest_ = 0;            ///< bucket, in bytes
    std::size_t arenas_in_use_ = 0;      ///< including free ones
    std::vector<std::size_t> free_;      ///< arenas
    ShardFactors factors_;
    Launches launches_;
    std::size_t launched_ = 0;
    std::size_t finished_ = 0;
    std::size_t stepped_ = 0;
    bool is_open_ = false;
    bool is_clear_ = false; ///< since this rank joined
    bool reduces_after_pass_ = false;
    bool is_unattended_ = false; ///< the pass uses no values any more, or there is no pass
    std::vector<Slot> buckets_;  ///< in the order of their launch
    std::vector<std::optional<Range>> ranges_;     ///< likewise
    std::vector<std::optional<BucketWork>> works_; ///< of the buckets; destroyed first
};

}}} // namespace joinable::v0::detail
