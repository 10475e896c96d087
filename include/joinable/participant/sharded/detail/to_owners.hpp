// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/round.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/detail/pass_hooks.hpp>
#include <joinable/participant/sharded/detail/exchange.hpp>
#include <joinable/participant/sharded/detail/gradients_for_owners.hpp>
#include <joinable/participant/sharded/detail/units.hpp>

namespace joinable { inline namespace v0 { namespace detail {

using StepShard = std::function<void(std::size_t group, OptimizerShard const& shard)>;

/// The reduction of sharded training. Sums each bucket to the owners of its parameters, by a reduce-scatter, or, made
/// without gradients for owners, to all ranks. If values are sharded, too, the passes gather them, and gathers and
/// buckets take turns: see ShardedUnits.
template <Communicator Comm>
class ToOwners : public ReductionTurns, public PassHooks {
    using Scattered = decltype(start_parts(
        std::declval<Comm&>(), std::declval<OptimizerShard const&>(), nullptr, 1.0
    ));
    using Summed = work_of<Comm>;
    using Started = std::conditional_t<std::is_same_v<Scattered, Summed>, Summed, AnyWork>;
    using Units = ShardedUnits<Comm>;

public:
    using Held = typename Units::Held;

    static constexpr std::string_view name = "ToOwners";
    bool delivers = true;

    ToOwners() = default;
    /// Local. The reducer owns `gradients`. `units` is null if each rank has all values. `step` is called as soon as
    /// the gradients of a shard are averaged, or is empty, and `begin` before a round reduces.
    ToOwners(
        GradientsForOwners const& gradients,
        std::unique_ptr<Units> units,
        StepShard step,
        std::function<void(Round const&)> begin
    )
        : delivers{false}, gradients_{&gradients}, units_{std::move(units)}, step_{std::move(step)},
          begin_{std::move(begin)} {}

    [[nodiscard]] bool scales(Comm& comm) const noexcept {
        return delivers ? AllReduce::scales(comm) : sum_scales_parts(comm);
    }
    [[nodiscard]] Started
    start(Comm& comm, BucketRun const& run, double factor, bool contributes) const {
        if (delivers) {
            return Started{AllReduce::start(comm, run, factor, contributes)};
        }
        auto* const memory = static_cast<std::byte*>(run.buffer.data);
        return Started{start_parts(comm, gradients_->shard_of(run.bucket), memory, factor)};
    }
    void finish(Comm& /*comm*/, BucketRun const& /*run*/) {
        if (!delivers) {
            ++finished_;
            step_reduced();
        }
    }

    // -- ReductionTurns ----------------------------------------------------------------------------

    void begin_iteration() {
        if (units_) {
            units_->begin_backward(true);
        }
        finished_ = stepped_ = 0;
        is_unattended_ = false;
    }
    [[nodiscard]] bool may_start(std::size_t /*bucket*/) const noexcept {
        return !units_ || units_->may_reduce();
    }
    void note_started(std::size_t bucket) noexcept {
        if (units_) {
            std::size_t const next = bucket + 1;
            if (next == gradients_->buckets().size() || unit_of(next) != unit_of(bucket)) {
                units_->note_reduced(); // all of the unit
            }
        }
    }
    [[nodiscard]] bool proceed() {
        return units_ && (units_->prefetch() || (is_unattended_ && units_->pass_by()));
    }
    void end_pass() noexcept { is_unattended_ = true; }
    void end_iteration() {
        is_unattended_ = false;
        finish_passes(true);
        step_reduced();
    }
    void begin_guard() noexcept {
        is_unattended_ = false;
        if (units_) {
            units_->reset();
        }
    }

    // -- PassHooks ---------------------------------------------------------------------------------

    [[nodiscard]] bool gathers_values() const noexcept { return units_ != nullptr; }
    void begin_forward() {
        if (units_) {
            units_->begin_forward();
        }
    }
    void finish_forward() {
        if (units_) {
            units_->finish_forward();
        }
    }
    void begin_accumulating() {
        if (units_) {
            units_->begin_backward(false);
        }
    }
    void finish_passes(bool trains) {
        if (units_) {
            units_->finish_passes(trains);
        }
    }
    void require_released() const {
        if (units_) {
            units_->require_released();
        }
    }
    [[nodiscard]] bool meets_between_passes() const noexcept { return begin_ != nullptr; }
    void begin_round(Round const& round) const {
        if (begin_) {
            begin_(round);
        }
    }

    /// Waits for the value of parameter `i` and keeps it during the lifetime of the returned
    /// object.
    template <class R>
    [[nodiscard]] Held use(std::size_t i, R& reducer) {
        if (!units_ || !units_->has(i)) {
            return {};
        }
        if (units_->is_due(i) && units_->approach(i)) { // it was kept, and the script continues
            reducer.proceed();
        }
        while (!units_->is_present(i)) {
            if (!units_->approach(i)) {
                throw ContractViolation{concat_missing(
                    concat(
                        "the backward pass uses ",
                        units_->describe(units_->unit_of(i)),
                        " before the gradients of units before it are ready; mark them before the pass "
                        "needs the second unit after theirs, and where the backward pass uses a value early, "
                        "keep what use() returned in the forward pass"
                    ),
                    reducer.parameters(),
                    gradients_->rank(),
                    [&](std::size_t k) {
                        return reducer.is_missing(k) && units_->unit_of(k) > units_->unit_of(i) + 1;
                    }
                )};
            }
            reducer.proceed();
        }
        return units_->hold(i);
    }
    /// The gathered values; null if each rank has all of them.
    [[nodiscard]] Units* units() const noexcept { return units_.get(); }

private:
    [[nodiscard]] std::size_t unit_of(std::size_t bucket) const {
        return units_->unit_of(gradients_->first_in(bucket));
    }
    /// Steps reduced buckets. A bucket waits until its values are gathered, because a step
    /// overwrites them.
    void step_reduced() {
        while (step_ && stepped_ < finished_ && (!units_ || units_->is_gathered(unit_of(stepped_)))
        ) {
            std::size_t const bucket = stepped_++;
            step_(gradients_->group_of(bucket), gradients_->shard_of(bucket));
        }
    }

    GradientsForOwners const* gradients_ = nullptr;
    std::unique_ptr<Units> units_;
    StepShard step_;
    std::function<void(Round const&)> begin_;
    std::size_t finished_ = 0; ///< buckets whose sum the owners have
    std::size_t stepped_ = 0;
    bool is_unattended_ = false; ///< the pass uses no values any more, or there is no pass
};

}}} // namespace joinable::v0::detail
