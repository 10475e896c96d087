// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/control.hpp>
#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/detail/shard_reducer.hpp>
#include <joinable/participant/detail/sharded_units.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Averages gradients on all ranks, or only to their owners; in the second case it may also gather
/// values. Holds a Reducer or a ShardReducer.
template <Communicator Comm, Timeline Times>
class ShardedReduction {
    /// A reducer tells `times`, which outlives it.
    struct SharedTimeline {
        Times* times = nullptr;

        auto round(bool is_shadow) { return times->round(is_shadow); }
        auto bucket(std::size_t index, std::size_t bytes) { return times->bucket(index, bytes); }
    };

public:
    using Whole = Reducer<Comm, AllReduce, SharedTimeline>;
    using Parts = ShardReducer<Comm, Times>;

    ShardedReduction(std::shared_ptr<Times> times, std::unique_ptr<Whole> whole)
        : times_{std::move(times)}, whole_{std::move(whole)} {
        whole_->timeline().times = times_.get();
    }
    /// `parts` tells `times`. `begin` is called before a round reduces, or is empty.
    ShardedReduction(
        std::shared_ptr<Times> times,
        std::unique_ptr<Parts> parts,
        std::function<void(Round const&)> begin
    )
        : times_{std::move(times)}, parts_{std::move(parts)}, begin_{std::move(begin)} {}

    [[nodiscard]] Times& timeline() const noexcept { return *times_; }
    [[nodiscard]] ParameterList const& parameters() const noexcept {
        return whole_ ? whole_->parameters() : parts_->parameters();
    }
    [[nodiscard]] std::shared_ptr<Times> const& shared_timeline() const noexcept { return times_; }

    /// Whether begin_round() is collective.
    [[nodiscard]] bool meets_between_passes() const noexcept { return begin_ != nullptr; }
    /// Called between the passes of a round that syncs, on every rank.
    void begin_round(Round const& round) const {
        if (begin_) {
            begin_(round);
        }
    }

    /// See ShardReducer. Reducer has memory for all buckets.
    void reduces_after_pass(bool reduces) noexcept {
        if (parts_) {
            parts_->reduces_after_pass(reduces);
        }
    }
    void check_factor(double factor) {
        visit([&](auto& r) { r.check_factor(factor); });
    }
    /// See Reducer. ShardReducer sends no words.
    void send_words_by(ControlCommunicator& words) noexcept {
        if (whole_) {
            whole_->send_words_by(words);
        }
    }
    void forget_words() noexcept {
        if (whole_) {
            whole_->forget_words();
        }
    }
    template <class Unused>
    void prepare_for_backward(double factor, Unused const& unused, int order_source) {
        visit([&](auto& r) { r.prepare_for_backward(factor, unused, order_source); });
    }
    void mark_accumulated(std::size_t i) {
        visit([&](auto& r) { r.mark_accumulated(i); });
    }
    void mark_ready(std::size_t i) {
        visit([&](auto& r) { r.mark_ready(i); });
    }
    void contribute_nothing() {
        visit([](auto& r) { r.contribute_nothing(); });
    }
    void finalize_backward() {
        visit([](auto& r) { r.finalize_backward(); });
    }
    void contribute_zeros(int order_source = 0, bool has_joined = false) {
        visit([&](auto& r) { r.contribute_zeros(order_source, has_joined); });
    }
    void contribute_accumulated(double factor, int order_source = 0, bool has_joined = false) {
        visit([&](auto& r) { r.contribute_accumulated(factor, order_source, has_joined); });
    }
    void register_memory() {
        visit([](auto& r) { r.register_memory(); });
    }
    /// See Reducer::take_gradients().
    void take_gradients() {
        if (whole_) {
            whole_->take_gradients();
        }
    }
    [[nodiscard]] bool holds_accumulated() const noexcept {
        return whole_ ? whole_->holds_accumulated() : parts_->holds_accumulated();
    }
    void discard_window() {
        visit([](auto& r) { r.discard_window(); });
    }
    void begin_guard() noexcept {
        if (parts_) {
            parts_->begin_guard();
        }
    }
    void end_guard() {
        if (whole_) {
            whole_->end_guard();
        }
    }
    void end_ranges() noexcept {
        visit([](auto& r) { r.end_ranges(); });
    }

    // Passes may take `use` as their last argument. It waits for values if they are sharded.

    /// The argument `use` of a pass.
    template <class Passes>
    class Use {
    public:
        explicit Use(Passes& passes) noexcept : passes_{passes} {}
        [[nodiscard("the value is there while what use() returns lives")]] auto
        operator()(std::size_t i) const {
            return passes_.guarded([&] {
                ShardedReduction& reduction = *passes_.reducer_;
                return reduction.parts_ ? reduction.parts_->use(i) : Held{};
            });
        }
        /// Explains an argument that is no index.
        template <class Other>
            requires(!std::convertible_to<Other, std::size_t>)
        auto operator()(Other const&) const {
            static_assert(
                std::convertible_to<Other, std::size_t>,
                "use: it takes the index of a parameter in the list that was given, as in use(0)"
            );
            return 0; // for the result that is kept
        }

    private:
        Passes& passes_;
    };
    template <class Passes, class F, class... Args>
    [[nodiscard]] static consteval bool takes() {
        return std::invocable<F, Args..., Use<Passes>> || std::invocable<F, Args...>;
    }
    /// Runs a backward pass, or a forward pass, which has no further arguments.
    template <class Passes, class F, class... Args>
    static decltype(auto) run(Passes& passes, F& pass, Args const&... args) {
        constexpr bool is_forward = sizeof...(Args) == 0;
        if constexpr (!std::invocable<F&, Args..., Use<Passes>>) {
            passes.reducer_->require_no_use(is_forward ? "forward" : "backward");
            return pass(args...);
        } else {
            if constexpr (is_forward) {
                passes.reducer_->begin_forward();
            }
            return pass(args..., Use<Passes>{passes});
        }
    }

    // With sharded values see ShardedUnits; otherwise these do nothing.

    [[nodiscard]] bool gathers_values() const noexcept { return values() != nullptr; }
    void begin_forward() {
        if (auto* const units = values()) {
            units->begin_forward();
        }
    }
    void finish_forward() {
        if (auto* const units = values()) {
            units->finish_forward();
        }
    }
    void begin_accumulating() {
        if (auto* const units = values()) {
            units->begin_backward(false);
        }
    }
    void finish_passes(bool trains) {
        if (auto* const units = values()) {
            units->finish_passes(trains);
        }
    }
    /// The gathered values; null if each rank has all of them.
    [[nodiscard]] ShardedUnits<Comm>* values() const noexcept {
        return parts_ ? parts_->values() : nullptr;
    }
    /// @throws ContractViolation  values are held.
    void require_let_go() const {
        if (auto const* const units = values()) {
            units->require_let_go();
        }
    }

private:
    using Held = typename ShardedUnits<Comm>::Held;

    void require_no_use(std::string_view verb) const {
        if (gathers_values()) {
            throw ContractViolation{concat(
                verb,
                ": with Sharding::parameters values are there while the pass uses them; it takes 'use' last, and "
                "calls 'auto const held = use(i);' before it reads value i"
            )};
        }
    }

    template <class F>
    void visit(F const& f) {
        whole_ ? f(*whole_) : f(*parts_);
    }

    std::shared_ptr<Times> times_; ///< outlives what it is told of; shared with later reductions
    std::unique_ptr<Whole> whole_;
    std::unique_ptr<Parts> parts_;
    std::function<void(Round const&)> begin_;
};

}}} // namespace joinable::v0::detail
