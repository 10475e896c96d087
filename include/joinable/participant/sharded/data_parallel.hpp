// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/gradients.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/join/result.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/participant/detail/ready_check.hpp>
#include <joinable/participant/detail/relisted.hpp>
#include <joinable/participant/gradient_participant.hpp>
#include <joinable/participant/needs_header.hpp>
#include <joinable/participant/sharded/detail/gradients_for_owners.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/detail/to_owners.hpp>
#include <joinable/participant/sharded/detail/units.hpp>
#include <joinable/participant/sharded/optimizer.hpp>
#include <joinable/participant/sharded/options.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// Checks the communicator before a base class does.
template <class Comm, class Times>
struct ShardedParticipantOver {
    static_assert(models_communicator<Comm>());
    using type = GradientParticipant<Comm, Reducer<Comm, ToOwners<Comm>, Times>>;
};

} // namespace detail

/// Trains replicas of a model and shards a part of it among the ranks: the state of the optimizer,
/// or also the averaged gradients, or also the values (ShardedOptions::sharding; the stages 1, 2
/// and 3 of ZeRO, Rajbhandari et al., 2020), or nothing, for comparison. It combines
/// DistributedDataParallel and ZeroRedundancyOptimizer in one participant.
///
/// @code
/// joinable::ShardedDataParallel sharded{
///     comm, model.parameters(), joinable::Adam{.learning_rate = 1e-2},
///     joinable::ShardedOptions{.sharding = joinable::Sharding::gradients}};
/// joinable::Join guard{joinable::participants(sharded)};
/// for (auto const& batch : my_shard) {
///     sharded.forward([&] { loss = model.forward(batch); });
///     sharded.backward([&](auto ready) { model.backward(ready); });
///     sharded.step();
/// }
/// guard.finish();
/// @endcode
///
/// The values equal those of an unsharded optimizer on every rank, bit for bit, in whatever round a
/// rank runs out of inputs. They are equal up to rounding if gradients of 16 bits use a
/// communicator that does not model ScalesScatteredSums, or if a communicator's reduce-scatter sums in
/// another order than its all-reduce, as that of MPICH does. With Sharding::gradients a parameter's own
/// gradient keeps what the pass wrote. It is released if parameter_traits have `release_grad`, and
/// counts as zeros if the pass does not use the parameter. Averages are visible in
/// ShardedOptions::before_step. Zero gradients before the pass or after the step.
///
/// With Sharding::parameters a pass also takes `use`. `use(i)` waits for value i, which exists
/// during the lifetime of the returned object:
/// @code
/// sharded.forward([&](auto use) {
///     for (std::size_t i = 0; i < layers; ++i) {
///         auto const held = use(i);
///         model.forward(i, batch);
///     }
/// });
/// sharded.backward([&](auto ready, auto use) { ... });
/// @endcode
/// All ranks gather units of parameters once per pass: in ascending order in a forward pass, in
/// descending order in a backward pass. Joined ranks follow. Hold a value that is used again in
/// between. The gradients of a unit must be ready before the backward pass needs the second unit
/// after it. Values are released at construction and destruction: read them during the lifetime of
/// the result of use_all().
///
/// `Rule` is an UpdateRule or a LocalOptimizer. `Times` is notified when rounds and buckets of
/// gradients begin and end.
template <class Comm, class Rule, Timeline Times>
class ShardedDataParallel : public ShardedOptimizer<Comm, Rule>, // outlives gradients in flight
                            public detail::ShardedParticipantOver<Comm, Times>::type {
    using Training = typename detail::ShardedParticipantOver<Comm, Times>::type;
    using Optimizer = ShardedOptimizer<Comm, Rule>;

public:
    /// The result of use() in a pass: values exist during its lifetime, or until its release().
    /// Move-only.
    using HeldValues = typename detail::ToOwners<Comm>::Held;

    /// Collective. `parameters` is a range that joinable::parameters() takes, `buffers` the result
    /// of joinable::buffers(). All ranks agree on them, on the rule and on the options, then take
    /// rank 0's values. The parameters must outlive this object.
    /// @throws ContractViolation  as for ZeroRedundancyOptimizer and DistributedDataParallel; with
    ///         Sharding::parameters also if a value cannot be set. The other ranks throw
    ///         PeerFailed.
    /// @throws Mismatch  ranks differ; the text names the first parameter or setting that does.
    template <class Parameters>
    ShardedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        BufferList buffers,
        Rule rule,
        ShardedOptions const& options = {}
    )
        : Optimizer{comm, comm, detail::zero_options(options), options.sharding},
          Training{
              comm, Optimizer::join_state(), options.gradient_kind, true, Optimizer::can_refresh()
          },
          steps_in_backward_{options.step_in_backward},
          buckets_{detail::bucket_options(detail::data_parallel_options(options))} {
        std::optional<detail::CoalescedBroadcast> start;
        DataParallelOptions passes = detail::data_parallel_options(options);
        auto const compare = [&](AgreementList& list) {
            check(options);
            list.begin_section("options differ: ");
            detail::add_requested_checks(list, passes, false, detail::device_of(comm));
            compare_sharding(list);
            detail::agree_on(list, passes);
            list.begin_section("models differ: ");
            detail::agree_on(list, buffers, "buffer", detail::device_of(comm));
        };
        detail::ShardChoices const choices{options.owners, options.units};
        try {
            add(std::forward<Parameters>(parameters), std::move(rule), choices, compare, [&] {
                this->module_ = std::make_unique<detail::ModuleState<Comm>>(
                    comm, ParameterList{}, std::move(buffers), passes
                );
                start.emplace(this->module_->plan_sync());
            });
            start->run(comm, 0);
        } catch (...) {
            Optimizer::leave_values(this->groups());
            throw;
        }
    }
    /// A model without buffers.
    template <class Parameters>
    ShardedDataParallel(
        Comm& comm, Parameters&& parameters, Rule rule, ShardedOptions const& options = {}
    )
        : ShardedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              std::move(rule),
              options
          } {}

    /// Adds parameters with their own settings. Collective, outside a guard. Their indices follow
    /// those of earlier groups, also for ready(i). `owners` and `units` as in ShardedOptions. Throws
    /// what the constructor throws; the groups are then unchanged.
    template <class Parameters>
    void add_parameter_group(
        Parameters&& parameters,
        Rule rule,
        std::vector<int> const& owners = {},
        std::vector<std::size_t> const& units = {}
    ) {
        Training::require_outside("add_parameter_group()");
        auto const nothing = [](AgreementList&) {};
        detail::ShardChoices const choices{owners, units};
        add(std::forward<Parameters>(parameters), std::move(rule), choices, nothing, [] {});
    }

    /// Lists the parameters again: see ZeroRedundancyOptimizer::refresh(). Buffers and attached state stay as they are.
    /// Collective, outside a guard and a round.
    /// @throws ContractViolation  also with Sharding::parameters, whose values are nowhere as a whole.
    template <class... Parameters>
    void refresh(Parameters&&... parameters) {
        Training::require_outside("refresh()");
        auto const nothing = [](detail::ShardGroup const&) {};
        with_reducer(nothing, [&](Last const& last) {
            this->relist(last, std::forward<Parameters>(parameters)...);
        });
        this->forget_window(false);
    }

    /// Gathers all values and keeps them during the lifetime of the returned object. Collective,
    /// outside a guard. If ranks keep parts of the values, read them here, or write them equally on
    /// all ranks and then call reload(). Does nothing with another sharding. Destroy the returned
    /// object before the next pass.
    /// @throws ContractViolation  called in a guard, or values are held.
    /// @throws std::bad_alloc  there is not enough memory for all values; then the other ranks
    ///         throw PeerFailed.
    [[nodiscard]] std::vector<HeldValues> use_all() {
        Training::require_outside("use_all()");
        auto* const units = this->hooks().units();
        if (units == nullptr) {
            return {};
        }
        try {
            this->fail_together("use_all()", [&] { units->reserve_all(); });
            return units->hold_all();
        } catch (...) {
            units->free_reserve();
            throw;
        }
    }
    [[nodiscard]] Times& timeline() noexcept { return this->reducer_->timeline(); }
    /// Bytes of the memory in which passes gather values. Local.
    [[nodiscard]] std::size_t unit_bytes() const noexcept {
        auto const* const units = this->hooks().units();
        return units == nullptr ? 0 : units->bytes();
    }

    /// Steps what this rank owns and exchanges it. Call it once after each backward pass that syncs
    /// and after each skip(). Collective; blocks until all parameters are written. Throws what
    /// ZeroRedundancyOptimizer::step() throws.
    /// @throws ContractViolation  no gradients have been reduced since the last step.
    void step() {
        this->guarded([&] {
            if (this->stage_ != Training::Stage::reduced) {
                throw ContractViolation{
                    "step() follows a backward pass that syncs, once; call it after backward() or skip(), and "
                    "not in rounds that accumulate"
                };
            }
            run(this->round_);
            this->end_round();
        });
    }
    /// As step(closure) of ZeroRedundancyOptimizer. The closure calls forward() and backward().
    template <class Closure>
    decltype(auto) step(Closure&& closure) {
        return detail::step_after(*this, std::forward<Closure>(closure), [this] { step(); });
    }

    /// Runs on joined ranks: what the passes run there, and the same steps.
    class Hook : public Training::Hook {
    public:
        Hook(ShardedDataParallel& sharded, bool divides_by_initial_world_size) noexcept
            : Training::Hook{sharded, divides_by_initial_world_size}, sharded_{sharded} {}

        void main_hook(Round const& round) {
            Training::Hook::main_hook(round);
            if (round.will_sync()) {
                sharded_.run(round);
            }
        }
        void post_hook(JoinResult const& result) {
            Training::Hook::post_hook(result);
            sharded_.take_settings(result);
        }

    private:
        ShardedDataParallel& sharded_;
    };

    using Optimizer::join_communicator;
    using Optimizer::join_state;
    using typename Training::join_keywords;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, Training::divides(args)};
    }
    [[nodiscard]] std::string_view join_name() const noexcept { return "ShardedDataParallel"; }
    /// Options, and the rule of each group.
    void agree_on(AgreementList& list) const {
        compare_sharding(list);
        this->module_->agree_on(list);
        this->model_collectives_.agree_on(list);
        Optimizer::agree_on(list);
    }
    /// @throws ContractViolation  another participant that steps has no averages to step by.
    void check_guard(GuardView const& guard) const {
        if (guard.steps && guard.lists_all_averaged && guard.averaged.empty()) {
            throw ContractViolation{
                "another participant of this guard steps, but only ShardedDataParallel averages gradients, and it "
                "steps by them itself; leave the other one out, or make a Step that steps nothing an Action"
            };
        }
    }
    void list_claims(ParameterClaims& claims) const { this->claim(claims, true); }
    /// For GuardView::averaged: empty, because no other participant steps by these averages.
    void list_averaged(std::vector<void const*>&) const noexcept {}

private:
    using Averages = Reducer<Comm, detail::ToOwners<Comm>, Times>;

    void compare_sharding(AgreementList& list) const {
        list.add("sharding", name_of(this->sharding()));
        list.add("step_in_backward", steps_in_backward_);
    }
    static void check(ShardedOptions const& options) {
        if (!options.step_in_backward) {
            return;
        }
        if (detail::steps_all_at_once<Rule>) {
            throw ContractViolation{
                "step_in_backward steps a bucket as soon as its averages arrive, but this optimizer steps all "
                "parameters at once; leave it out"
            };
        }
        if (options.before_step) {
            throw ContractViolation{
                "step_in_backward steps a bucket before the gradients of others are there, but before_step is "
                "to see all of them; leave one of the two out"
            };
        }
        if (!detail::reduces_to_owners(options.sharding)) {
            throw ContractViolation{detail::concat(
                "step_in_backward steps buckets that are averaged to their owners, but with Sharding::",
                name_of(options.sharding),
                " gradients are averaged on all ranks; use Sharding::gradients or Sharding::parameters"
            )};
        }
    }

    template <class Parameters, class Compare, class F>
    void
    add(Parameters&& parameters,
        Rule rule,
        detail::ShardChoices const& choices,
        Compare const& compare,
        F const& prepare) {
        auto const also = [&](detail::ShardGroup const&) {
            if (this->reducer_) { // in the agreement, or a rank alone would refuse
                this->hooks().require_released();
                if (this->window().window().is_open()) {
                    throw ContractViolation{
                        "add_parameter_group() was called while gradients hold batches that no round has reduced; add "
                        "groups after a round that syncs, or call discard_window() before"
                    };
                }
            }
            prepare();
        };
        with_reducer(also, [&](Last const& last) {
            Optimizer::add(
                std::forward<Parameters>(parameters), std::move(rule), choices, compare, last
            );
        });
    }

    using Last = std::function<void(detail::ShardGroup const&)>;

    /// Calls make(last), which makes groups and, by last(group), a reducer of the gradients of all.
    template <class Also, class Make>
    void with_reducer(Also const& also, Make const& make) {
        typename Training::Model made;
        Last const last = [&](detail::ShardGroup const& group) {
            also(group);
            ParameterList const all = parameters_with(group);
            former_.reserve(former_.size() + 1); // after the agreement a rank alone would throw
            made.reducer_ = reducer_with(group, all);
            made.listed_ = std::make_unique<detail::ListedModel>(
                all, this->sharding() != Sharding::parameters
            );
            if (this->module_->options().verify_ready) {
                made.ready_check_ = std::make_unique<detail::ReadyCheck>(
                    all,
                    detail::device_of(Training::comm_),
                    detail::reduces_to_owners(this->sharding()) ? detail::CheckedMarks::at_once
                                                                : detail::CheckedMarks::after_pass
                );
            }
        };
        make(last);
        if (this->reducer_ && !detail::reduces_to_owners(this->sharding())) {
            former_.push_back(std::move(this->reducer_)); // gradients may lie in its buckets
        }
        made.module_ = std::move(this->module_);
        this->model() = std::move(made);
        detail::abort_if_throws(Training::comm_, [&] { this->reducer_->take_gradients(); });
        this->reducer_->register_memory();
        std::erase_if(former_, [](auto const& one) { return !one->holds_gradients(); });
    }

    /// Those of the groups before and of the next one.
    [[nodiscard]] ParameterList parameters_with(detail::ShardGroup const& next) const {
        ParameterList all;
        for (detail::ShardGroup const& before : this->groups()) {
            append(all, before.given());
        }
        append(all, next.given());
        return all;
    }
    [[nodiscard]] std::unique_ptr<Averages>
    reducer_with(detail::ShardGroup const& group, ParameterList all) {
        Comm& comm = Training::comm_;
        auto const rank = static_cast<int>(comm.rank());
        auto times = this->reducer_ ? this->reducer_->shared_timeline() : std::make_shared<Times>();
        if (!detail::reduces_to_owners(this->sharding())) {
            return std::make_unique<Averages>(
                comm,
                std::make_shared<detail::ToOwners<Comm>>(),
                detail::gradients_in_buckets(
                    std::move(all),
                    buckets_,
                    rank,
                    static_cast<int>(comm.size()),
                    detail::BufferMemory{comm}
                ),
                buckets_,
                std::move(times)
            );
        }
        std::unique_ptr<detail::ShardedUnits<Comm>> units;
        if (this->sharding() == Sharding::parameters) {
            units = std::make_unique<detail::ShardedUnits<Comm>>(comm, this->groups(), group);
        }
        detail::StepShard step;
        std::function<void(Round const&)> begin;
        if (steps_in_backward_) {
            step = [this](std::size_t k, detail::OptimizerShard const& s) {
                this->step_shard(k, s);
            };
            begin = [this](Round const& round) { this->begin_step(round, this->has_refresh()); };
        }
        auto gradients = std::make_unique<detail::GradientsForOwners>(
            std::move(all), this->groups(), group, rank, detail::device_of(comm), this->arenas()
        );
        auto reduction = std::make_shared<detail::ToOwners<Comm>>(
            *gradients, std::move(units), std::move(step), std::move(begin)
        );
        return std::make_unique<Averages>(
            comm,
            std::move(reduction),
            std::move(gradients),
            BucketOptions{.find_unused = true},
            std::move(times)
        );
    }

    /// The same on active and shadowing ranks.
    void run(Round const& round) {
        if (steps_in_backward_) {
            this->finish_stepped();
        } else {
            this->begin_step(round, this->has_refresh());
            this->finish_step();
        }
    }

    bool steps_in_backward_;
    std::vector<std::unique_ptr<Averages>> former_; ///< of earlier group lists
    BucketOptions buckets_;                         ///< used if all ranks have all averages
};

template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, Rule) -> ShardedDataParallel<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, Rule, ShardedOptions) -> ShardedDataParallel<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, BufferList, Rule) -> ShardedDataParallel<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, BufferList, Rule, ShardedOptions)
    -> ShardedDataParallel<Comm, Rule>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Options>
class ShardedDataParallel<detail::NoCommunicator, Options> {
    static_assert(
        !std::is_same_v<Options, ShardedOptions>,
        "ShardedDataParallel: expected a communicator, parameters, buffers(ranges...) if the model has any, "
        "the optimizer as in Adam{...}, then options in braces with the names and the order of "
        "ShardedOptions; write ShardedOptions{...} to be told which name is wrong"
    );

public:
    explicit ShardedDataParallel(...);
};
/// `...` takes missing arguments, too many, or braces with a wrong name.
ShardedDataParallel(detail::AnyArgument, ...)
    -> ShardedDataParallel<detail::NoCommunicator, ShardedOptions>;

}} // namespace joinable::v0
