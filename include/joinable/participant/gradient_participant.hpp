// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/marks.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/averaging.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/participant/detail/model_collectives.hpp>
#include <joinable/participant/detail/module_state.hpp>
#include <joinable/participant/detail/pass_hooks.hpp>
#include <joinable/participant/detail/ready_check.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// A model that passes run, made of a list of parameters by the class derived from a GradientParticipant.
template <class Comm, class GradientReducer>
struct TrainedModel {
    std::unique_ptr<GradientReducer> reducer_;
    std::unique_ptr<ModuleState<Comm>> module_;
    std::unique_ptr<ListedModel> listed_;
    std::unique_ptr<ReadyCheck> ready_check_;     ///< with verify_ready
    std::unique_ptr<ReplicaCheck> replica_check_; ///< with verify_replicas
    std::string name_;                            ///< in the form that guards compare
};

} // namespace detail

/// The passes of a model whose gradients are averaged: the verbs that DistributedDataParallel and
/// ShardedDataParallel share. `GradientReducer` is a Reducer. If its reduction has `use(i, reducer)`, which waits for a
/// value, passes may take `use` as their last argument; see also detail::PassHooks.
template <Communicator Comm, class GradientReducer>
class GradientParticipant : protected detail::TrainedModel<Comm, GradientReducer> {
    using Reduction = std::remove_cvref_t<decltype(std::declval<GradientReducer&>().reduction())>;

public:
    /// Attaches tensors of an optimizer's state (momentum, step counts). `ranges` are ranges that
    /// joinable::buffers() takes. All ranks agree on count, extents and dtypes and take rank 0's
    /// values. When a guard ends, the tensors are sent with the model. Collective, outside a guard.
    /// @throws ContractViolation  called in a guard, or a tensor is missing; then the others throw
    ///         PeerFailed.
    /// @throws Mismatch  the text names the first tensor that differs.
    template <class... Ranges>
    void attach_state(Ranges&&... ranges) {
        require_outside("attach_state()");
        module_->attach(std::forward<Ranges>(ranges)...);
    }

    /// Replaces the broadcast of buffers by `hook(comm, buffers, round)` in each round that syncs.
    /// On joined ranks round.is_shadow() is true, and the hook must issue the same collectives
    /// (with zeros, if it sums). Its exceptions must leave the guard, because skip() would call it
    /// again. A null function restores the broadcast. Local, the same on every rank, outside a
    /// guard.
    /// @throws ContractViolation  in a guard or a round, or broadcast_buffers is off.
    void set_buffer_hook(
        std::function<void(Comm&, std::vector<AnyView> const& buffers, Round const&)> hook
    ) {
        require_outside("set_buffer_hook()");
        module_->set_buffer_hook(std::move(hook));
    }

    /// Attaches the result of shadowed() for this participant's communicator. In guards, joined ranks then
    /// take part in the collectives that the model runs over it in its passes, until one of the two objects is
    /// destroyed. As long as it is attached, skip() is refused, and in a guard each forward pass of a training
    /// round needs its backward pass. See ShadowedCommunicator. Local, the same on every rank, outside a guard.
    /// @throws ContractViolation  called in a guard or a round; `collectives` is of another communicator or
    ///         attached already, or another one is; or Sharding::parameters, whose passes gather values.
    void attach_collectives(detail::ModelCommunicator& collectives) {
        require_outside("attach_collectives()");
        if (hooks().gathers_values()) {
            throw ContractViolation{
                "with Sharding::parameters joined ranks follow only the gathering of values, not the "
                "collectives of a model; use another sharding"
            };
        }
        model_collectives_.attach(collectives, detail::identity_of(comm_));
    }
    /// Explains a communicator that shadowed() has not made.
    template <class Other>
        requires(!std::derived_from<Other, detail::ModelCommunicator>)
    void attach_collectives(Other const&) {
        static_assert(
            std::derived_from<Other, detail::ModelCommunicator>,
            "attach_collectives: give it the result of joinable::shadowed(comm), which has a name and lives as "
            "long as the model"
        );
    }

    /// Announces a round and runs the forward pass, which overlaps with the roll call. Returns what
    /// `pass` returns. Collective over the active ranks. If `pass` throws, the round is open for
    /// the others: continue with skip().
    /// @throws ContractViolation  in training, a parameter was unfrozen, or its value has another
    ///         dtype, other extents or another device than when it was listed; or the open round was
    ///         announced as skipped on this rank, and `notice` does not say so. Outside an enabled
    ///         guard this aborts the communicator.
    template <class F>
    decltype(auto) forward(F&& pass, RoundNotice const& notice = {}) {
        static_assert(
            takes<F>(),
            "forward: the pass is a callable, as in ddp.forward([&] { loss = model.forward(batch); }); a value "
            "was given, or a callable of other arguments"
        );
        begin_forward(notice);
        try {
            return guarded([&]() -> decltype(auto) {
                ForwardEnd const end{*this};
                return run(std::forward<F>(pass));
            });
        } catch (...) {
            if (stage_ == Stage::idle) {
                stage_ = Stage::failed;
            }
            throw;
        }
    }

    /// Explains an argument in the place of a notice that is none.
    template <class F, class Other>
        requires(!std::convertible_to<Other, RoundNotice>)
    void forward(F&&, Other const&) {
        static_assert(
            std::convertible_to<Other, RoundNotice>,
            "forward: after the pass comes a RoundNotice, as in ddp.forward(pass, {.weight = 32})"
        );
    }

    /// Runs the backward pass, averages gradients as they become ready, and waits for all of them.
    /// `pass` takes a callable `ready(i)`; `unused` is as for prepare_for_backward(). In a round
    /// that does not sync it only runs the pass, and gradients accumulate.
    template <class F, class Unused = std::initializer_list<std::size_t>>
    void backward(F&& pass, Unused const& unused = {}) {
        detail::Ready const ready{[this](std::size_t i) { mark_ready(i); }};
        constexpr bool takes_ready = takes<F, decltype(ready)>();
        static_assert(
            takes_ready,
            "backward: the pass takes a callable, as in ddp.backward([&](auto ready) { ... }), and calls ready(i) "
            "when gradient i is final"
        );
        if constexpr (takes_ready) {
            prepare_for_backward(unused);
            guarded([&] { run(std::forward<F>(pass), ready); });
            finalize_backward();
        }
    }

    /// Announces a round. Collective over the active ranks. Does not block in a round that syncs,
    /// except with EndPolicy::throw_early. The opener of the round says whether it syncs: with
    /// next() and iterate() by the notice given there, otherwise by this notice. A round inside
    /// no_sync() never syncs.
    /// @throws ContractViolation  the previous forward had no backward; see announce_round.
    void prepare_for_forward(RoundNotice notice = {}) {
        guarded([&] {
            if (hooks().gathers_values()) {
                throw ContractViolation{
                    "with Sharding::parameters values are there while a pass uses them; call forward(pass) and "
                    "backward(pass)"
                };
            }
            begin_forward(notice);
            if (stage_ == Stage::idle) {
                ranges_.end_passes(); // no call marks the end of an evaluation
                if (model_collectives_.are_followed()) {
                    throw ContractViolation{
                        "joined ranks follow the collectives of an evaluation until it ends; call forward(pass)"
                    };
                }
            }
        });
    }

    /// Blocks until all ranks have opened the round. `unused` names the parameters that the
    /// backward pass gives no gradient: a range of indices or a predicate over them, see
    /// DataParallelOptions::find_unused. See PendingRound::wait for the errors.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(Unused const& unused = {}) {
        guarded([&] {
            ranges_.end_passes();
            forget_if_cleared();
            window().stop_looking(); // zeros from here on are gradients
            if (stage_ == Stage::unsynced) {
                has_accumulated_ = true;
                hooks().begin_accumulating();
                ranges_.open_backward(reducer_->timeline());
                return;
            }
            if (stage_ != Stage::forward) {
                throw ContractViolation{"a backward pass needs a forward pass before it"};
            }
            begin_reduction();
            if (ready_check_) {
                ready_check_->begin();
            }
            double const factor = factor_of(round_);
            stage_ = Stage::backward; // skip() can follow if `unused` throws
            reducer_->prepare_for_backward(factor, unused, round_.buffer_source());
            ranges_.open_backward(reducer_->timeline());
        });
    }

    /// See Reducer::mark_ready. In a round that does not sync the gradient counts as accumulated,
    /// and the next round that syncs reduces it.
    void mark_ready(std::size_t i) {
        guarded([&] {
            if (stage_ == Stage::unsynced) {
                has_accumulated_ = true;
                reducer_->mark_accumulated(i);
            } else if (ready_check_) {
                ready_check_->mark(i, [this](std::size_t k) { reducer_->mark_ready(k); });
            } else {
                reducer_->mark_ready(i);
            }
        });
    }

    /// See Reducer::finalize_backward. In a round that does not sync it ends the backward pass.
    void finalize_backward() {
        guarded([&] {
            ranges_.end_passes();
            if (stage_ == Stage::unsynced) {
                end_unsynced(true);
                stage_ = Stage::idle;
                round_range_.reset();
            } else {
                if (ready_check_) {
                    ready_check_->release([this](std::size_t i) { reducer_->mark_ready(i); });
                }
                // In another stage no joined rank follows, and the reducer refuses.
                if (stage_ == Stage::backward) {
                    model_collectives_.end(round_);
                }
                reducer_->finalize_backward();
                end_reduction();
            }
        });
        report_if_due();
    }

    /// Rounds that open during the lifetime of the result do not sync: gradients accumulate. With
    /// next() and iterate(), use {.will_sync = false} there instead. The same on all ranks. Local.
    [[nodiscard("keep what no_sync() returns: rounds do not sync while it lives")]] auto
    no_sync() noexcept {
        return detail::ScopedFlag{is_inside_no_sync_, true};
    }

    /// Forgets what this rank accumulated since the last round that synced, because its gradients were cleared.
    /// The next average counts neither. Inside an enabled guard all its participants forget their weights; call it
    /// for each of them. Local, between rounds.
    ///
    /// It is seldom needed: where a guard begins, and until the first backward pass after a guard has begun or ended,
    /// the participant looks whether all gradients are absent or zeros, and forgets the window then. Where a guard
    /// begins and gradients of another of its models are not, zeros are gradients, and nothing is forgotten.
    /// @throws ContractViolation  a round is open, or one of an enabled guard is announced: by next(), with look-ahead,
    ///                            or with known lengths. Nothing was changed.
    void discard_window() {
        if (!is_idle()) {
            throw ContractViolation{"discard_window() was called in a round; call it between rounds"
            };
        }
        window().require_between_rounds();
        forget_window(false);
    }

    /// Runs a round without this rank's batch, because the batch failed (out of memory, a bad
    /// sample). The round continues on all ranks. Call it instead of forward(), or after forward()
    /// or backward() threw. The optimizer steps as usual.
    ///
    /// | called                              | this rank's weight | its gradients               |
    /// |-------------------------------------|--------------------|-----------------------------|
    /// | before the round is opened, by      | 0                  | what it accumulated before  |
    /// | forward(), next() or iterate()      |                    |                             |
    /// | then, until its first bucket is full| as announced       | zeros                       |
    /// | later                               |                    | ContractViolation: too late |
    ///
    /// A bucket that no rank uses does not count. In a round that does not sync (before its backward pass has ended) it ends the round and undoes nothing.
    /// After an evaluation whose forward() threw it skips the next batch, as forward() would run it; but it ends the
    /// evaluation where next() or iterate() opened it and no further round, and where passes communicate. If the
    /// weights sum to 0, because all ranks skip, the average is zeros: see Round::contributor_count. Outside a guard,
    /// and in one that is not enabled, call `skip({.weight = 0})` if the others give a weight.
    /// Call it for each model of a guard that has yet to run the batch: forward() is refused in a round that is
    /// announced as skipped.
    /// With a shadowed() communicator it is a ContractViolation, because others wait for this rank
    /// within their passes. Collective: blocks until the averages are written, if the round syncs.
    void skip(RoundNotice notice = {}) {
        guarded([&] {
            require_stepped();
            model_collectives_.require_pass("skip()");
            hooks().require_released();    // before any collective, so skip() can be called again
            detail::forget_failure(*this); // the failure of the batch: peers need not learn of it
            ranges_.end_passes();
            auto const* const session = detail::session_of(state_);
            if (stage_ == Stage::failed && !is_last_evaluation_open(session)) {
                stage_ = Stage::idle; // as for forward()
            }
            bool const is_announced = detail::announced_batch(state_) != nullptr;
            bool const has_begun = stage_ != Stage::idle || is_announced;
            if (stage_ == Stage::idle && is_announced) {
                open_round({}); // the batch failed after it was announced
            } else if (stage_ == Stage::idle) {
                notice.skips = true;
                open_round(notice);
                if (stage_ == Stage::forward) {
                    begin_reduction();
                    contribute_without_pass(round_);
                    end_reduction();
                }
            }
            if (stage_ == Stage::forward) {
                begin_reduction();
                (void)factor_of(round_); // the others may sum weights
                reducer_->contribute_zeros(round_.buffer_source());
                end_reduction();
            } else if (stage_ == Stage::backward) {
                reducer_->contribute_nothing();
                reducer_->finalize_backward();
                end_reduction();
            }
            if (has_begun && round_.phase() == Phase::train) {
                window().stop_looking();
            }
            if (stage_ != Stage::reduced) {
                end_unsynced(round_.phase() == Phase::train);
                stage_ = Stage::idle;
            }
            round_range_.reset();
        });
        report_if_due();
    }

    /// Explains an argument that is no notice.
    template <class Other>
        requires(!std::convertible_to<Other, RoundNotice>)
    void skip(Other const&) {
        static_assert(
            std::convertible_to<Other, RoundNotice>,
            "skip: it takes no argument or a RoundNotice, as in ddp.skip({.weight = 0})"
        );
    }

    /// For guards: each rank steps by its own gradients, none are averaged.
    [[nodiscard]] static constexpr bool leaves_gradients_local() noexcept {
        return !detail::sends_runs<Reduction>;
    }

    /// Runs on joined ranks: the same buckets with zeros, and the averages into their gradients.
    class Hook {
    public:
        using label = labels::gradients;
        static constexpr bool gives_notice = true;

        Hook(GradientParticipant& passes, bool divides_by_initial_world_size) noexcept
            : passes_{passes},
              divides_{
                  passes.averaging_.divides_by_initial_world_size, divides_by_initial_world_size
              } {
            passes.begin_guard();
        }
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;
        /// An iteration may be open, if an exception ends the guard.
        ~Hook() { passes_.end_guard(); }

        void main_hook(Round const& round) {
            detail::PassRanges<Times>::note_wait(passes_.reducer_->timeline(), round);
            passes_.shadow_round(round);
            passes_.report_if_due();
        }
        void forget_cleared() { passes_.forget_if_cleared(); }
        void post_hook(JoinResult const& result) { passes_.sync_at_end(result); }

    private:
        GradientParticipant& passes_;
        detail::ScopedFlag divides_; ///< set for the guard
    };

    using join_keywords = std::conditional_t<
        leaves_gradients_local(),
        keywords<>,
        keywords<divide_by_initial_world_size_t>>;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, divides(args)};
    }
    static constexpr std::string_view join_verb = "forward() or skip()";
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }

    /// For guards, before they begin: what was accumulated, and how to forget it.
    [[nodiscard]] detail::Accumulated accumulated_before_guard() const {
        return window().before_guard([this] { return are_cleared(); });
    }
    void forget_cleared() { forget_window(false); }
    /// For guards: joined ranks then keep what they accumulated.
    [[nodiscard]] bool leaves_joined_untouched() const noexcept {
        return module_->options().joined_gradients == JoinedGradients::untouched;
    }

protected:
    /// The keyword, which is not there if nothing is divided.
    template <class Arguments>
    [[nodiscard]] static bool divides([[maybe_unused]] Arguments const& args) {
        if constexpr (leaves_gradients_local()) {
            return true;
        } else {
            return args.get(divide_by_initial_world_size, true);
        }
    }
    /// Whether passes may take `use`.
    static constexpr bool gives_use = requires(Reduction& reduction, GradientReducer& reducer) {
        reduction.use(std::size_t{}, reducer);
    };
    /// The reduction's work in passes.
    [[nodiscard]] auto& hooks() const noexcept {
        if constexpr (std::derived_from<Reduction, detail::PassHooks>) {
            return reducer_->reduction();
        } else {
            static detail::PassHooks none;
            return none;
        }
    }

    /// The argument `use` of a pass. A template, because most reductions have none.
    template <class R = Reduction>
    class Use {
    public:
        explicit Use(GradientParticipant& passes) noexcept : passes_{passes} {}
        [[nodiscard("the value is there while what use() returns lives")]] auto
        operator()(std::size_t i) const {
            return passes_.guarded([&] {
                auto& reducer = *passes_.reducer_;
                auto const rank = static_cast<int>(passes_.comm_.rank());
                detail::require_in_range(i, reducer.parameters().size(), rank);
                R& reduction = reducer.reduction();
                return reduction.use(i, reducer);
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
        GradientParticipant& passes_;
    };

    template <class F, class... Args>
    [[nodiscard]] static consteval bool takes_use() {
        if constexpr (gives_use) {
            return std::invocable<F, Args..., Use<>>;
        }
        return false;
    }
    /// Whether a pass takes these arguments.
    template <class F, class... Args>
    [[nodiscard]] static consteval bool takes() {
        return takes_use<F, Args...>() || std::invocable<F, Args...>;
    }
    /// Runs a backward pass, or a forward pass, which has no arguments but `use`.
    template <class F, class... Args>
    decltype(auto) run(F&& pass, Args const&... args) {
        constexpr bool is_forward = sizeof...(Args) == 0;
        if constexpr (takes_use<F&, Args...>()) {
            if constexpr (is_forward) {
                hooks().begin_forward();
            }
            return pass(args..., Use<>{*this});
        } else {
            if (hooks().gathers_values()) {
                throw ContractViolation{detail::concat(
                    is_forward ? "forward" : "backward",
                    ": with Sharding::parameters values are there while the pass uses them; it takes 'use' last, and "
                    "calls 'auto const held = use(i);' before it reads value i"
                )};
            }
            return std::forward<F>(pass)(args...);
        }
    }

    /// `state` is the participant's. With `steps` the derived class calls end_round() after its
    /// step; otherwise the round ends with the reduction. `has_refresh`: see detail::or_refresh().
    GradientParticipant(
        Comm& comm, JoinState& state, GradientKind kind, bool steps, bool has_refresh
    ) noexcept
        : comm_{comm}, averaging_{kind}, model_collectives_{state}, state_{state}, steps_{steps},
          has_refresh_{has_refresh} {}
    GradientParticipant(GradientParticipant const&) = delete;
    GradientParticipant& operator=(GradientParticipant const&) = delete;
    ~GradientParticipant() = default;

    [[nodiscard]] bool has_refresh() const noexcept { return has_refresh_; }
    /// For a class without refresh() whose base class has it.
    void hide_refresh() noexcept { has_refresh_ = false; }

    /// The stage of the open round.
    /// - idle: no round is open, or it has no gradients
    /// - forward: the forward pass of a round that syncs
    /// - backward: its backward pass
    /// - reduced: its step, if this class steps
    /// - unsynced: all of a round that does not sync
    /// - failed: an evaluation that threw
    enum class Stage : std::uint8_t { idle, forward, backward, reduced, unsynced, failed };

    using Times = std::remove_reference_t<decltype(std::declval<GradientReducer&>().timeline())>;
    using RoundRange = decltype(std::declval<Times&>().round(false));

    void require_stepped() const {
        if (stage_ == Stage::reduced) {
            throw ContractViolation{
                "the previous round has not been stepped; call step() after each backward pass that syncs, and "
                "after skip()"
            };
        }
    }
    [[nodiscard]] bool is_idle() const {
        bool const is_over = // an evaluation that failed
            stage_ == Stage::failed && !hooks().gathers_values() &&
            !model_collectives_.are_followed();
        return stage_ == Stage::idle || is_over;
    }
    void require_outside(std::string_view verb) const {
        if (!is_idle() || detail::session_of(state_) != nullptr) {
            throw ContractViolation{detail::concat(
                verb, " was called in a guard or in a round; call it before, on every rank"
            )};
        }
        detail::require_listed(state_, comm_, verb);
    }

    void begin_forward(RoundNotice notice) {
        guarded([&] {
            // Outside a guard, a forward pass whose outputs are not used announced nothing.
            bool const is_open = stage_ == Stage::forward && detail::session_of(state_) != nullptr;
            require_stepped();
            bool const is_unfinished = stage_ == Stage::unsynced || stage_ == Stage::failed;
            char const* const why =
                is_unfinished && hooks().gathers_values()
                    ? "the passes of the previous round have not ended, and all ranks gather values in them; "
                      "call backward(), or skip() after a failure"
                : is_unfinished && model_collectives_.are_followed()
                    ? "the passes of the previous round have not ended, and joined ranks follow collectives in "
                      "them; call backward(), or announce a forward pass that has no backward pass with {.phase = "
                      "Phase::evaluate}"
                : is_open || stage_ == Stage::backward
                    ? "the previous forward pass had no backward pass; announce such a round with {.will_sync "
                      "= false} or {.phase = Phase::evaluate}, and call skip() after a pass that failed"
                    : nullptr;
            if (why != nullptr) {
                throw ContractViolation{why};
            }
            // Before the round is announced, so that the failure of a rank is one between rounds.
            if (trains(notice)) {
                told_to_others([&] { require_same_model(); });
            }
            require_no_skip(notice);
            open_round(notice);
            ranges_.open_forward(reducer_->timeline());
        });
    }
    /// @throws ContractViolation  a parameter is not as it was when this participant was made.
    void require_same_model() const { listed_->require_same(name_in_texts(), has_refresh()); }
    /// In a round that is announced as skipped this rank counts nothing, so its pass would be lost.
    void require_no_skip(RoundNotice const& notice) {
        auto const* const announced = detail::announced_round(state_);
        if (announced != nullptr && announced->skips && announced->phase == Phase::train &&
            !notice.skips) {
            told_to_others([] {
                throw ContractViolation{
                    "this round was announced as skipped on this rank, by the skip() of another participant or by "
                    "RoundNotice::skips, so the gradients of this pass would not count; skip() this participant, too"
                };
            });
        }
    }
    /// Tells other ranks what f() throws on this rank alone. Outside an enabled guard no roll call tells the others,
    /// and they would wait for it.
    template <class F>
    void told_to_others(F const& f) {
        detail::session_of(state_) != nullptr ? f() : detail::abort_if_throws(comm_, f);
    }
    /// Whether the round of a notice trains: another participant, or a loop, may have announced it.
    [[nodiscard]] bool trains(RoundNotice const& notice) const {
        auto const* const announced = detail::announced_batch(state_);
        return (announced != nullptr ? announced->phase : notice.phase) == Phase::train;
    }
    [[nodiscard]] std::string_view name_in_texts() const noexcept {
        return steps_ ? "ShardedDataParallel" : "DistributedDataParallel";
    }
    void open_round(RoundNotice notice) {
        notice.will_sync = notice.will_sync && !is_inside_no_sync_;
        if (hooks().gathers_values() || detail::syncs(notice)) {
            detail::require_listed(state_, comm_, name_in_texts());
        }
        ranges_.end_all();
        forget_if_cleared();
        if (trains(notice)) {
            round_range_.reset();
            static_cast<void>(round_range_.emplace(reducer_->timeline().round(false)));
        }
        pending_ = PendingRound{state_, comm_.size(), notice, detail::WindowEnd::reduction};
        ranges_.announce(reducer_->timeline(), pending_.is_answered());
        bool syncs = pending_.will_sync();
        model_collectives_.begin(pending_);
        bool const holds = hooks().gathers_values() || model_collectives_.are_followed();
        if (!syncs || hooks().gathers_values() || module_->syncs_before_forward() ||
            pending_.is_answered()) {
            hear_round();
            syncs = round_.will_sync();
            if (!syncs && !holds) {
                round_.done(); // nothing is reduced, so the part ends here
            } else {
                round_.hold(); // no other participant communicates until the gradients are reduced
                if (syncs && module_->syncs_before_forward()) {
                    module_->sync_buffers(round_);
                }
            }
        }
        stage_ = syncs                            ? Stage::forward
                 : round_.phase() == Phase::train ? Stage::unsynced
                                                  : Stage::idle;
    }

    /// Whether skip() belongs to the evaluation that failed.
    [[nodiscard]] bool is_last_evaluation_open(detail::Session const* session) const noexcept {
        bool const is_of_loop = session != nullptr && session->loop_opens_rounds() &&
                                session->round().number() == round_.number();
        return hooks().gathers_values() || model_collectives_.are_followed() || is_of_loop;
    }
    void hear_round() {
        round_ = pending_.wait();
        ranges_.hear(reducer_->timeline(), round_);
    }
    void begin_reduction() {
        hear_round();
        round_.hold();
        if (meets_between_passes()) {
            model_collectives_.end_section(round_); // joined ranks come there
        }
        prepare_reduction(round_);
    }
    /// Whether ranks wait for each other between the passes.
    [[nodiscard]] bool meets_between_passes() const noexcept {
        return module_->syncs_after_forward() || replica_check_ != nullptr ||
               hooks().meets_between_passes();
    }
    [[nodiscard]] bool steps_joined_ranks() const noexcept {
        auto const* const session = detail::session_of(state_);
        return session != nullptr && session->steps_joined_ranks();
    }
    /// By which all ranks sum a few words: the guard's control communicator, which no gradients
    /// delay; outside a guard, and if that has more ranks, the communicator of the gradients.
    [[nodiscard]] detail::ControlCommunicator& words() noexcept {
        detail::ControlCommunicator* const words = detail::words_of(state_);
        return words != nullptr ? *words : reducer_->words();
    }
    /// The work between the passes, on training and on shadowing ranks.
    void prepare_reduction(Round const& round) {
        if (leaves_gradients_local() && round.is_weighted()) {
            told_to_others([] {
                throw ContractViolation{
                    "this round has a weight, but NoReduction averages nothing; announce rounds without weights"
                };
            });
        }
        reducer_->send_words_by(words());
        reducer_->reduce_after_pass(
            model_collectives_.are_followed() && round.active_count() < comm_.size()
        );
        hooks().finish_forward();
        hooks().begin_round(round); // if it refuses, no message was sent, so skip() can follow
        if (!module_->syncs_before_forward()) {
            module_->sync_buffers(round);
        }
        if (replica_check_) {
            bool const all = steps_joined_ranks();
            replica_check_->count_round(
                words(),
                {all ? 0 : round.buffer_source(),
                 all ? comm_.size() : round.active_count(),
                 all || !round.is_shadow()}
            );
        }
    }
    void end_reduction() {
        stage_ = Stage::reduced;
        has_accumulated_ = false;
        window().end();
        round_range_.reset();
        count_reduction();
        if (!steps_) {
            end_round();
        }
    }
    void set_report(std::function<void()> report) {
        report_ = std::move(report);
        reductions_ = 0;
    }
    /// Counts a round that trained and synced, also one that this rank shadowed.
    void count_reduction() {
        is_report_due_ = report_ && ++reductions_ % module_->options().report_every == 0;
    }
    void report_if_due() {
        if (std::exchange(is_report_due_, false)) {
            report_();
        }
    }
    void end_round() {
        stage_ = Stage::idle;
        round_.done();
    }
    /// A round that reduces nothing was held if its passes communicate.
    void end_unsynced(bool trains) {
        if (hooks().gathers_values()) {
            hooks().finish_passes(trains);
            round_.done();
        }
        model_collectives_.end(round_);
        if (model_collectives_.are_followed()) {
            round_.done();
        }
    }
    /// Ends a forward pass, and the round too if the pass returned and nothing follows.
    struct ForwardEnd {
        GradientParticipant& passes;
        detail::Unwinding unwinding{};

        explicit ForwardEnd(GradientParticipant& of) : passes{of} {}
        ForwardEnd(ForwardEnd const&) = delete;
        ForwardEnd& operator=(ForwardEnd const&) = delete;
        ~ForwardEnd() noexcept(false) {
            passes.ranges_.end_passes();
            if (unwinding.has_begun()) {
                return;
            }
            passes.hooks().finish_forward();
            if (passes.stage_ == Stage::idle) { // an evaluation
                passes.end_unsynced(false);
            }
        }
    };
    /// Ends the timeline ranges of a round that failed.
    void end_ranges() noexcept {
        if (reducer_) {
            reducer_->end_ranges();
        }
        ranges_.end_all();
        round_range_.reset();
    }

    /// @throws ContractViolation  on all ranks: see Reducer::check_factor.
    [[nodiscard]] double factor_of(Round const& round) {
        return averaging_.factor(words(), round, [&](double factor) {
            reducer_->check_factor(factor);
        });
    }

    /// The reduction of a rank that runs no pass, because it has joined or skips. It may hold
    /// gradients of earlier rounds.
    void contribute_without_pass(Round const& round) {
        double const factor = factor_of(round);
        bool const sends_accumulated = has_accumulated_ && round.contributes();
        if (!round.is_shadow() || !leaves_joined_untouched()) {
            has_accumulated_ = false;
        }
        if (sends_accumulated) {
            reducer_->contribute_accumulated(factor, round.buffer_source(), round.is_shadow());
        } else {
            reducer_->contribute_zeros(round.buffer_source(), round.is_shadow());
        }
    }

    [[nodiscard]] detail::WindowOf window() const noexcept { return detail::WindowOf{state_}; }
    [[nodiscard]] bool are_cleared() const {
        return detail::are_cleared(reducer_->parameters(), detail::device_of(comm_));
    }
    /// Both halves: how much was accumulated, and in which gradients. With `in_round` they were cleared
    /// within a round that does not sync.
    void forget_window(bool in_round) {
        window().clear(in_round);
        has_accumulated_ = false;
        reducer_->discard_window();
    }
    /// Before a round is announced, and before its backward pass. A forward pass whose backward pass is yet to come
    /// has a weight, but no gradients, so zeros do not tell that these were cleared.
    /// @throws ContractViolation  ranks have been told of the window's weight.
    void forget_if_cleared() {
        if (leaves_gradients_local() || !window().may_be_cleared() ||
            !reducer_->holds_accumulated() || !are_cleared()) {
            return;
        }
        detail::Window const before = window().window();
        forget_window(stage_ == Stage::unsynced);
        if (stage_ == Stage::forward) {
            pending_.forget(before); // outside a guard
        }
    }

    void begin_guard() {
        has_had_guard_ = true;
        stage_ = Stage::idle; // discards what was left open
        model_collectives_.reset();
        reducer_->begin_guard();
    }
    /// On every path out of a guard. Runs no collective. Waits only for ranks that still use gradients of this one.
    void end_guard() noexcept {
        stage_ = Stage::idle;
        model_collectives_.reset();
        reducer_->forget_words();
        try {
            reducer_->end_guard();
        } catch (...
        ) { // NOLINT(bugprone-empty-catch): another exception may be in flight, or a device is lost
        }
    }
    void sync_at_end(JoinResult const& result) {
        if (replica_check_) {
            replica_check_->compare(
                words(),
                {result.last_joiners.front(),
                 static_cast<int>(result.last_joiners.size()),
                 detail::is_last_joiner(result, comm_.rank())}
            );
        }
        if (module_->options().sync_at_end) {
            module_->plan_sync().run(comm_, result.authoritative_rank);
        }
    }
    /// Runs on joined ranks in place of the passes of a round.
    void shadow_round(Round const& round) {
        try {
            bool const trains = round.phase() == Phase::train;
            [[maybe_unused]] std::optional<RoundRange> range;
            if (trains) {
                static_cast<void>(range.emplace(reducer_->timeline().round(true)));
            }
            if (round.will_sync()) {
                shadow(round);
                count_reduction();
            } else {
                model_collectives_.follow(round);
                hooks().finish_passes(trains);
            }
        } catch (...) {
            end_ranges();
            throw;
        }
    }
    /// The same for a round that syncs.
    void shadow(Round const& round) {
        if (module_->syncs_before_forward()) {
            module_->sync_buffers(round);
        }
        if (meets_between_passes()) {
            model_collectives_.follow(round);
        }
        prepare_reduction(round);
        model_collectives_.follow(round);
        contribute_without_pass(round);
    }

    template <class F>
    decltype(auto) guarded(F&& verb) {
        try {
            return std::forward<F>(verb)();
        } catch (...) {
            end_ranges();
            detail::record_failure(*this, {});
            reducer_->take_gradients_back([this] { detail::fail_at_once(*this); });
            throw;
        }
    }

    using Model = detail::TrainedModel<Comm, GradientReducer>;
    using Model::listed_;
    using Model::module_;
    using Model::ready_check_;
    using Model::reducer_;
    using Model::replica_check_;

    /// The model that passes run. Another one may take its place.
    [[nodiscard]] Model& model() noexcept { return *this; }

    Comm& comm_;
    detail::Averaging averaging_;
    detail::ModelCollectives model_collectives_; ///< collectives of the model
    Round round_;
    Stage stage_ = Stage::idle;
    bool has_had_guard_ = false;

private:
    JoinState& state_;
    PendingRound pending_;
    std::optional<RoundRange> round_range_; ///< during an open training round of this rank
    detail::PassRanges<Times> ranges_;      ///< inside the round
    bool steps_;
    bool has_refresh_;
    bool is_inside_no_sync_ = false;
    bool has_accumulated_ = false; ///< gradients, since the last round that synced
    std::function<void()> report_; ///< called in every report_every-th reduction
    std::size_t reductions_ = 0;   ///< since report_ was set
    bool is_report_due_ = false;
};

}} // namespace joinable::v0
