// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/control.hpp>
#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/scoped_flag.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/result.hpp>
#include <joinable/participant/averaging.hpp>
#include <joinable/participant/detail/check_parameters.hpp>
#include <joinable/participant/detail/module_state.hpp>
#include <joinable/participant/detail/ready_check.hpp>
#include <joinable/participant/detail/verify.hpp>
#include <joinable/participant/options.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class T, class Comm, class Reduction>
concept describes_model =
    std::convertible_to<T, BufferList> || std::convertible_to<T, DataParallelOptions> ||
    (std::convertible_to<T, Reduction> && BucketReduction<Reduction, Comm>);

} // namespace detail

/// Keeps the replicas of a model in step: parameters start as rank 0's, gradients are averaged
/// while the backward pass runs, and in a guard joined ranks shadow and receive the same averages.
///
/// @code
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// ddp.forward([&] { loss = model.forward(batch); }, {.weight = batch.size()});
/// ddp.backward([&](auto ready) { model.backward(ready); }); // ready(i): gradient i is final
/// @endcode
///
/// An engine with hooks of its own calls the verbs: prepare_for_forward, prepare_for_backward,
/// mark_ready, finalize_backward. The average is over the initial world, over the active ranks
/// (divide_by_initial_world_size = false), or by weight where notices carry one. `Reduction` says how
/// a bucket travels, see BucketReduction. `Times` is told when rounds and buckets begin and end.
///
/// Zero gradients before the pass or after the step. A joined rank runs neither: its gradients hold
/// the averages of the others' rounds until the guard ends, and are zeros then, so that its first pass
/// in the next guard adds to nothing (DataParallelOptions::joined_gradients). What zeros in a Step's
/// body, after the step, runs on joined ranks as well.
template <class Comm, class Reduction = AllReduce, Timeline Times = NoTimeline>
class DistributedDataParallel {
    static_assert(models_communicator<Comm>());

public:
    /// Collective. `parameters` is a range that joinable::parameters() takes, or its result;
    /// `buffers` is what joinable::buffers() returns. All ranks agree on counts, extents, dtypes and
    /// options, then take rank 0's values.
    /// @throws ContractViolation  what Reducer refuses, or a buffer that is missing or on another
    ///         device, or whatever else fails here, as memory does; the other ranks throw PeerFailed.
    /// @throws Mismatch  ranks have different options or models; the text names the first option,
    ///         parameter or buffer that differs, with both values.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        BufferList buffers,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : comm_{comm}, averaging_{options.gradient_kind} {
        AgreementList compared;
        std::optional<CoalescedBroadcast> start;
        std::exception_ptr error;
        try {
            auto const list = joinable::parameters(std::forward<Parameters>(parameters));
            detail::check_parameters(list, detail::device_of(comm).id());
            compared.begin_section("options differ: ");
            detail::agree_on(compared, options);
            compared.add("reduction", Reduction::name);
            compared.begin_section("models differ: ");
            std::size_t const first = compared.items().size();
            model_ = detail::agree_on(compared, list);
            detail::agree_on(compared, buffers, "buffer");
            model_ += detail::concat(", hash ", compared.hash_from(first));
            reducer_.emplace(comm, list, bucket_options(options), std::move(reduction));
            module_.emplace(comm, list, std::move(buffers), options);
            if (options.verify_ready) {
                ready_check_.emplace(list, detail::device_of(comm).id());
            }
            if (options.sync_at_start) {
                start.emplace(module_->plan_sync());
            }
        } catch (...) {
            error = std::current_exception();
        }
        detail::ControlOver<Comm&> control{comm};
        detail::agree(control, compared, error);
        reducer_->register_memory();
        if (start) {
            start->run(comm, 0);
        }
    }

    /// A model without buffers.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              options,
              std::move(reduction)
          } {}
    /// With default options. The type is deduced, so that {} is never taken for a reduction.
    template <class Parameters, class R, std::enable_if_t<std::is_same_v<R, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, BufferList buffers, R reduction)
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              std::move(buffers),
              DataParallelOptions{},
              std::move(reduction)
          } {}
    template <class Parameters, class R, std::enable_if_t<std::is_same_v<R, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, R reduction)
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              DataParallelOptions{},
              std::move(reduction)
          } {}

    /// Explains what comes in the place of buffers or options, but is neither.
    template <
        class Parameters,
        class Other,
        class... Rest,
        // No requires clause: clang 14 ignores it in the deduction guide that comes of this.
        std::enable_if_t<!detail::describes_model<Other, Comm, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, Other&&, Rest&&...)
        : DistributedDataParallel{comm, std::forward<Parameters>(parameters)} {
        static_assert(
            detail::describes_model<Other, Comm, Reduction>,
            "DistributedDataParallel: after the parameters come buffers(ranges...), if the model "
            "has any, then options in braces with the names and the order of DataParallelOptions"
        );
    }

    /// Collective, outside a guard. Tensors of an optimizer's state (momentum, numbers of steps) as
    /// `ranges` that joinable::buffers() takes: all ranks agree on their count, extents and dtypes,
    /// take rank 0's values now, and when a guard ends get them with the model.
    /// @throws ContractViolation  in a guard, or a tensor is missing; then the others throw
    ///         PeerFailed. @throws Mismatch  the text names the first tensor that differs.
    template <class... Ranges>
    void attach_state(Ranges&&... ranges) {
        require_outside("attach_state()");
        module_->attach(std::forward<Ranges>(ranges)...);
    }

    /// Local, the same on every rank, outside a guard. `hook(comm, buffers, round)` takes the place
    /// of the broadcast of buffers in each round that syncs, on active ranks as on joined ones, where
    /// round.is_shadow(): it must issue the same collectives there (zeros, where it sums). What
    /// it throws has to leave the guard: skip() would call it again. A null function brings the
    /// broadcast back.
    /// @throws ContractViolation  in a guard or a round, or broadcast_buffers is off.
    void set_buffer_hook(
        std::function<void(Comm&, std::vector<AnyView> const& buffers, Round const&)> hook
    ) {
        require_outside("set_buffer_hook()");
        module_->set_buffer_hook(std::move(hook));
    }

    /// Announces a round and runs the forward pass, behind which the roll call hides.
    /// Returns what `pass` returns. Collective over the active ranks. When `pass` throws, the round
    /// is open for the others: skip() goes on with them.
    template <class F>
    decltype(auto) forward(F&& pass, RoundNotice const& notice = {}) {
        prepare_for_forward(notice);
        try {
            return guarded(std::forward<F>(pass));
        } catch (...) {
            if (stage_ == Stage::idle) {
                stage_ = Stage::failed;
            }
            throw;
        }
    }

    /// Explains what comes in the place of a notice, but is none.
    template <class F, class Other>
        requires(!std::convertible_to<Other, RoundNotice>)
    void forward(F&&, Other const&) {
        static_assert(
            std::convertible_to<Other, RoundNotice>,
            "DistributedDataParallel: after the forward pass comes a RoundNotice, as in "
            "ddp.forward(pass, {.weight = 32})"
        );
    }

    /// Runs the backward pass, averages gradients as they become ready, and waits for all of them.
    /// `pass` takes a callable `ready(i)`; `unused` is what prepare_for_backward() takes. In a round
    /// that does not sync it only runs the pass: gradients accumulate.
    template <class F, class Unused = std::initializer_list<std::size_t>>
    void backward(F&& pass, Unused const& unused = {}) {
        auto const ready = [this](std::size_t i) { mark_ready(i); };
        constexpr bool takes_ready = std::invocable<F, decltype(ready)>;
        static_assert(
            takes_ready,
            "DistributedDataParallel: the backward pass takes a callable, as in ddp.backward([&](auto ready) "
            "{ ... }), and calls ready(i) when gradient i is final"
        );
        if constexpr (takes_ready) {
            prepare_for_backward(unused);
            guarded([&] { std::forward<F>(pass)(ready); });
            finalize_backward();
        }
    }

    /// Collective over the active ranks; does not block in a round that syncs, except with
    /// EndPolicy::throw_early. Whether it syncs is what the round's opener said: under next() and
    /// iterate() the notice given there, else the notice given here, and never inside no_sync().
    /// @throws ContractViolation  the previous forward had no backward; see announce_round.
    void prepare_for_forward(RoundNotice notice = {}) {
        guarded([&] {
            // Outside a guard nothing was said of a forward pass whose outputs are not used.
            bool const is_open = stage_ == Stage::forward && detail::session_of(state_) != nullptr;
            if (is_open || stage_ == Stage::backward) {
                throw ContractViolation{
                    "a forward pass follows one without a backward pass; announce a round without "
                    "one with {.will_sync = false} or {.phase = Phase::evaluate}, and one that "
                    "failed with skip()"
                };
            }
            open_round(notice);
        });
    }

    /// Blocks until all ranks have opened the round. `unused` says which parameters the backward
    /// pass gives no gradient, a range of indices or a predicate over them: see
    /// DataParallelOptions::find_unused. See PendingRound::wait for what throws.
    template <class Unused = std::initializer_list<std::size_t>>
    void prepare_for_backward(Unused const& unused = {}) {
        guarded([&] {
            if (stage_ == Stage::unsynced) {
                has_accumulated_ = true;
                return;
            }
            if (stage_ != Stage::forward) {
                throw ContractViolation{"a backward pass needs a forward pass before it"};
            }
            begin_reduction();
            if (ready_check_) {
                ready_check_->begin();
            }
            reducer_->prepare_for_backward(
                averaging_.factor(comm_, round_), unused, round_.buffer_source()
            );
            stage_ = Stage::backward;
        });
    }

    /// See Reducer::mark_ready. In a round that does not sync the gradient counts as accumulated:
    /// the next round that syncs reduces it.
    void mark_ready(std::size_t i) {
        guarded([&] {
            if (stage_ == Stage::unsynced) {
                has_accumulated_ = true;
                reducer_->mark_accumulated(i);
            } else if (ready_check_) {
                ready_check_->mark(i);
            } else {
                reducer_->mark_ready(i);
            }
        });
    }

    /// See Reducer::finalize_backward. In a round that does not sync it ends the backward pass.
    void finalize_backward() {
        guarded([&] {
            if (stage_ == Stage::unsynced) {
                stage_ = Stage::idle;
                round_range_.reset();
            } else {
                if (ready_check_) {
                    ready_check_->release([this](std::size_t i) { reducer_->mark_ready(i); });
                }
                reducer_->finalize_backward();
                end_reduction();
            }
        });
    }

    /// Rounds that open while the result lives do not sync: gradients accumulate. Under next() and
    /// iterate() say {.will_sync = false} there instead. The same on all ranks. Local.
    [[nodiscard("rounds sync again when what no_sync() returns is gone")]] auto no_sync() noexcept {
        return detail::ScopedFlag{is_inside_no_sync_, true};
    }

    /// Goes through a round without this rank's batch, because it failed (out of memory, a bad
    /// sample); the round goes on for all. In place of forward(), or after forward() or backward()
    /// threw. The optimizer steps as always.
    ///
    /// | called                              | this rank's weight | its gradients               |
    /// |-------------------------------------|--------------------|-----------------------------|
    /// | before the round is opened, by      | 0                  | what it accumulated before  |
    /// | forward(), next() or iterate()      |                    |                             |
    /// | then, until its first bucket is sent| as announced       | zeros                       |
    /// | later                               |                    | ContractViolation: too late |
    ///
    /// In a round that does not sync, before its backward pass has ended, and in an evaluation whose
    /// forward() threw, it ends the round; nothing is taken back. Where weights sum to 0, because all
    /// ranks skip, the average is zeros: see Round::contributor_count. Outside a guard, and in one that
    /// is not enabled, say `skip({.weight = 0})` where the others give a weight. Collective: blocks
    /// until the averages are written, if the round syncs.
    void skip(RoundNotice notice = {}) {
        guarded([&] {
            detail::forget_failure(*this); // the batch's: peers need not hear of it
            auto const* const session = detail::session_of(state_);
            if (stage_ == Stage::idle && session != nullptr && session->has_announced_batch()) {
                open_round({}); // the batch failed after next() had announced it
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
                (void)averaging_.factor(comm_, round_); // the others may sum weights
                reducer_->contribute_zeros(round_.buffer_source());
                end_reduction();
            } else if (stage_ == Stage::backward) {
                reducer_->contribute_nothing();
                reducer_->finalize_backward();
                end_reduction();
            }
            stage_ = Stage::idle;
            round_range_.reset();
        });
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return reducer_->buckets();
    }
    [[nodiscard]] Reduction& reduction() noexcept { return reducer_->reduction(); }
    [[nodiscard]] Times& timeline() noexcept { return reducer_->timeline(); }

    /// What joined ranks run: the same buckets with zeros, and the averages into their gradients.
    class Hook {
    public:
        using label = labels::gradients;
        static constexpr bool gives_notice = true;

        Hook(DistributedDataParallel& ddp, bool divides_by_initial_world_size) noexcept
            : ddp_{ddp},
              divides_{
                  ddp.averaging_.divides_by_initial_world_size, divides_by_initial_world_size
              } {
            ddp.stage_ = Stage::idle; // whatever an earlier guard left open
            ddp.reducer_->begin_guard();
        }
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;

        void main_hook(Round const& round) {
            if (round.phase() != Phase::train) {
                return;
            }
            [[maybe_unused]] auto const range = ddp_.timeline().round(true);
            try {
                if (round.will_sync()) {
                    ddp_.module_->sync_buffers(round);
                    ddp_.contribute_without_pass(round);
                }
            } catch (...) {
                ddp_.end_ranges();
                throw;
            }
        }
        void post_hook(JoinResult const& result) {
            if (ddp_.module_->options().sync_at_end) {
                ddp_.module_->sync(result.authoritative_rank);
            }
        }
        void end_hook() { ddp_.reducer_->end_guard(); }

    private:
        DistributedDataParallel& ddp_;
        detail::ScopedFlag divides_; ///< as the guard asks for
    };

    using join_keywords = keywords<divide_by_initial_world_size_t>;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, args.get(divide_by_initial_world_size, true)};
    }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "DistributedDataParallel"; }
    /// Options and model: two models that ranks list in another order are told apart.
    void agree_on(AgreementList& list) const {
        detail::agree_on(list, module_->options());
        list.add("reduction", Reduction::name);
        list.add("model", model_);
    }
    /// For GuardView::averaged.
    void list_averaged(std::vector<void const*>& values) const {
        for (AnyParameter const& parameter : reducer_->parameters()) {
            if (parameter.requires_grad()) {
                values.push_back(parameter.value().data());
            }
        }
    }
    /// @throws ContractViolation  joined ranks leave their gradients untouched, but others use them.
    void check_guard(GuardView const& guard) const {
        char const* const why =
            guard.carries_accumulated
                ? "JoinedGradients::untouched leaves on a joined rank what it accumulated, which the "
                  "guard would reduce as well; give it {.carry_accumulated = false}"
            : guard.steps
                ? "JoinedGradients::untouched keeps averages from joined ranks, so a Step or a "
                  "sharded optimizer beside it would step by old gradients; leave the option out"
                : nullptr;
        if (module_->options().joined_gradients == JoinedGradients::untouched && why != nullptr) {
            throw ContractViolation{why};
        }
    }

private:
    /// Of the open round: none is open or it has no gradients; its forward pass, when it syncs;
    /// its backward pass; all of it, when it does not sync; an evaluation that threw.
    enum class Stage : std::uint8_t { idle, forward, backward, unsynced, failed };

    using RoundRange = decltype(std::declval<Times&>().round(false));

    void require_outside(std::string_view verb) const {
        if (stage_ != Stage::idle || detail::session_of(state_) != nullptr) {
            throw ContractViolation{detail::concat(
                verb, " was called in a guard or in a round; call it before, on every rank"
            )};
        }
    }

    void open_round(RoundNotice notice) {
        notice.will_sync = notice.will_sync && !is_inside_no_sync_;
        if (notice.phase == Phase::train) {
            round_range_.reset();
            static_cast<void>(round_range_.emplace(timeline().round(false)));
        }
        pending_ = announce_round(*this, notice);
        bool syncs = pending_.will_sync();
        if (!syncs || module_->syncs_before_forward() || pending_.is_answered()) {
            round_ = pending_.wait();
            syncs = round_.will_sync();
            if (!syncs) {
                round_.done(); // nothing is reduced: the part ends here
            } else {
                round_.hold(); // until the gradients are reduced nobody else communicates
                if (module_->syncs_before_forward()) {
                    module_->sync_buffers(round_);
                }
            }
        }
        stage_ = syncs                            ? Stage::forward
                 : round_.phase() == Phase::train ? Stage::unsynced
                                                  : Stage::idle;
    }

    void begin_reduction() {
        round_ = pending_.wait();
        round_.hold();
        if (!module_->syncs_before_forward()) {
            module_->sync_buffers(round_);
        }
    }
    void end_reduction() {
        stage_ = Stage::idle;
        has_accumulated_ = false;
        round_range_.reset();
        round_.done();
    }
    /// A round has failed: nothing of it is shown as under way any more.
    void end_ranges() noexcept {
        if (reducer_) {
            reducer_->end_ranges();
        }
        round_range_.reset();
    }

    /// The reduction of a rank that runs no pass: it has joined, or skips. It may hold gradients of
    /// earlier rounds.
    void contribute_without_pass(Round const& round) {
        double const factor = averaging_.factor(comm_, round);
        if (std::exchange(has_accumulated_, false) && round.contributes()) {
            reducer_->contribute_accumulated(factor, round.buffer_source(), round.is_shadow());
        } else {
            reducer_->contribute_zeros(round.buffer_source(), round.is_shadow());
        }
    }

    template <class F>
    decltype(auto) guarded(F&& verb) {
        try {
            return std::forward<F>(verb)();
        } catch (...) {
            end_ranges();
            record_failure(*this, {});
            throw;
        }
    }

    Comm& comm_;
    detail::Averaging averaging_;
    std::string model_; ///< as guards compare it
    std::optional<Reducer<Comm, Reduction, Times>> reducer_;
    std::optional<detail::ModuleState<Comm>> module_; ///< set by the constructor, as is the reducer
    std::optional<detail::ReadyCheck> ready_check_;   ///< with DataParallelOptions::verify_ready
    PendingRound pending_;
    Round round_;
    std::optional<RoundRange> round_range_; ///< while a training round of this rank is open
    Stage stage_ = Stage::idle;
    bool is_inside_no_sync_ = false;
    bool has_accumulated_ = false; ///< gradients, since the last round that synced
    JoinState state_;
};

template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, BufferList) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, BufferList, DataParallelOptions)
    -> DistributedDataParallel<Comm>;

template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, Reduction) -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, BufferList, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, BufferList, DataParallelOptions, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;

namespace detail {

/// Whatever it is: a guide that takes it is worse than others.
struct AnyArgument {
    template <class T>
    AnyArgument(T&&);
};

/// In place of a communicator where options in braces have a name that they do not have.
template <class Options>
struct MisspeltOptions {
    static_assert(
        !std::is_same_v<Options, DataParallelOptions>,
        "DistributedDataParallel: after the parameters come buffers(ranges...), if the model has any, "
        "then options in braces with the names and the order of DataParallelOptions; write "
        "DataParallelOptions{...} to be told which name is wrong"
    );
};

} // namespace detail

/// What a model with such options becomes: nothing but the explanation.
template <class Options>
class DistributedDataParallel<detail::MisspeltOptions<Options>> : detail::MisspeltOptions<Options> {
public:
    template <class... Arguments>
    explicit DistributedDataParallel(Arguments&&...);
    explicit DistributedDataParallel(...);
};
/// `...` takes braces with a misspelt name.
DistributedDataParallel(detail::AnyArgument, detail::AnyArgument, ...)
    -> DistributedDataParallel<detail::MisspeltOptions<DataParallelOptions>>;

}} // namespace joinable::v0
