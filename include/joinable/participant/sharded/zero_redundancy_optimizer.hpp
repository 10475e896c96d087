// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/join/result.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/averaging.hpp>
#include <joinable/participant/needs_header.hpp>
#include <joinable/participant/sharded/detail/exchange.hpp>
#include <joinable/participant/sharded/detail/plan.hpp>
#include <joinable/participant/sharded/optimizer.hpp>
#include <joinable/participant/sharded/zero_options.hpp>

namespace joinable { inline namespace v0 {

/// An optimizer whose state is dealt out to ranks. Each rank keeps the state of the elements it
/// owns, steps these elements, and sends them to the others. This is the first stage of ZeRO
/// (Rajbhandari et al., 2020): a rank has 1 / size() of the state.
///
/// @code
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// joinable::ZeroRedundancyOptimizer zero{comm, model.parameters(), joinable::Adam{.learning_rate = 1e-2}};
/// joinable::Join guard{joinable::participants(ddp, zero)};
/// for (auto const& batch : my_shard) {
///     ddp.forward([&] { loss = model.forward(batch); });
///     ddp.backward([&](auto ready) { model.backward(ready); });
///     zero.step();
/// }
/// guard.finish();
/// @endcode
///
/// The result equals that of an unsharded optimizer on every rank, bit for bit, also when ranks run
/// out of inputs: a joined owner steps by the same averages as the others. Numbers of 16 bits are
/// stepped as masters of 32 bits, which their owner keeps. A parameter without a gradient on its
/// owner is not stepped; a joined owner steps those that have a gradient on the lowest active rank.
/// Which parameters need gradients is fixed when they are added, until refresh(). A parameter whose gradients are rows is stepped
/// row by row, by a rule with UpdateRule's steps_rows: its owner sends the rows that it has stepped.
///
/// `Rule` is an UpdateRule or a LocalOptimizer: an engine's optimizer that keeps its own state.
///
/// If the communicator moves the memory of a device, parameters and state are there, and kernels
/// (CudaDevice::use_kernels) step them in the order of the engine's stream, to the bits of the
/// host. What blocks then blocks the stream and not the host.
template <class Comm, class Rule>
class ZeroRedundancyOptimizer : public ShardedOptimizer<Comm, Rule> {
    using Base = ShardedOptimizer<Comm, Rule>;

public:
    /// Collective. `parameters` is a range that joinable::parameters() takes. All ranks agree on
    /// parameters, rule and options, then take rank 0's values. The parameters must outlive it.
    /// @throws ContractViolation  a parameter is not where the communicator's memory is, one of
    ///         integers needs a gradient, none needs one, the rule or the options are invalid, the
    ///         device has no kernels for the rule, or thread ranks train the same memory. The other
    ///         ranks throw PeerFailed.
    /// @throws Mismatch  ranks differ; the text names the first parameter or setting that does.
    template <class Parameters>
    ZeroRedundancyOptimizer(
        Comm& comm, Parameters&& parameters, Rule rule, ZeroOptions options = {}
    )
        : ZeroRedundancyOptimizer{
              comm, comm, std::forward<Parameters>(parameters), std::move(rule), std::move(options)
          } {}

    /// The same for hybrid sharding: groups of ranks, such as those of one node, share the state, and each group has all of
    /// it. `shards` is this rank's group, of one split() of `comm` on all ranks. Values travel in the group alone, while
    /// DistributedDataParallel averages their gradients over `comm`:
    ///
    /// @code
    /// auto node = comm.split(comm.rank() / ranks_per_node, comm.rank());
    /// joinable::DistributedDataParallel ddp{comm, model.parameters()};
    /// joinable::ZeroRedundancyOptimizer zero{comm, node, model.parameters(), joinable::Adam{}};
    /// joinable::Join guard{joinable::participants(ddp, zero), joinable::groups_of(comm)};
    /// @endcode
    ///
    /// A rank has 1 / shards.size() of the state. Owners, and the ranks of consolidate(), load() and table(), are numbers
    /// in the group. consolidate() gathers on such a rank of each group, and load() takes the same state in each.
    /// ZeroOptions::before_step sums over the group, which has all gradients; all ranks take the sums of rank 0's group. A
    /// Checkpoint has the state of one group.
    /// @throws ContractViolation  also with ZeroOptions::reduces_gradients, which would average over the group alone.
    template <class Parameters>
    ZeroRedundancyOptimizer(
        Comm& comm, Comm& shards, Parameters&& parameters, Rule rule, ZeroOptions options = {}
    )
        : Base{
              comm,
              shards,
              options,
              options.reduces_gradients ? Sharding::gradients : Sharding::optimizer
          } {
        add(std::forward<Parameters>(parameters), std::move(rule), this->optimizer_options().owners
        );
    }

    /// Adds parameters with their own settings. Collective, outside a guard. Their indices follow
    /// those of earlier groups. `owners` as in ZeroOptions. Throws what the constructor throws; the
    /// groups are then unchanged.
    template <class Parameters>
    void
    add_parameter_group(Parameters&& parameters, Rule rule, std::vector<int> const& owners = {}) {
        require_outside("add_parameter_group()");
        add(std::forward<Parameters>(parameters), std::move(rule), owners);
    }

    /// Lists the parameters again, after some became trainable or frozen or were added. Without arguments these are the
    /// same; otherwise give a range for each group, in their order. Collective, outside a guard, on all ranks in the same
    /// way.
    ///
    /// Ranks compare what the constructor compares. Parameters that are new or newly trained take rank 0's values, and their
    /// state begins anew. That of others moves to its new owners, by way of rank 0, whose host memory holds all of it
    /// meanwhile. A parameter is the one of the same name in its group, or, without a name, the one whose value is at the
    /// same address, unless that one has other memory now; with another dtype it is a new one. What is frozen now loses its state. Those that were listed before
    /// must exist until this returns; one that is left out while its gradient (or, with parameters_as_bucket_view, its value)
    /// lies in a bucket must live as long as this object.
    /// @throws ContractViolation  in a guard; gradients hold batches that no round has reduced, and are not all absent or
    ///         zeros; there is not one range for each group; a value has other extents than when it was given; or what
    ///         the constructor throws. The other ranks throw PeerFailed.
    /// @throws Mismatch  ranks list different parameters, or other ranks do something else. After this and a
    ///         ContractViolation the optimizer is as it was before.
    template <class... Parameters>
    void refresh(Parameters&&... parameters) {
        require_outside("refresh()");
        this->relist([](auto const&) {}, std::forward<Parameters>(parameters)...);
        discard_window();
    }

    /// Steps what this rank owns and exchanges it. Call it once in each round that syncs, after the
    /// gradients are reduced. Collective; blocks until all parameters are written. `notice` has the
    /// weight of this rank's batch, for ZeroOptions::reduces_gradients. Some parameters may be
    /// stepped after an error.
    /// @throws ContractViolation  a gradient does not fit its value; a value has other extents, or its elements
    ///         another order, than when it was given; a setting is invalid or
    ///         changes the amount of state; a value of 16 bits in host memory is not its rounded
    ///         master, see reload(); the round of the guard, enabled or not, does not sync.
    /// @throws what the communicator throws.
    void step(RoundNotice const& notice = {}) {
        detail::require_listed(this->join_state(), this->shard_communicator(), join_name());
        Round const round = notify_join_context(*this, notice);
        detail::run_part(*this, round, [&] { run(round); });
    }
    /// Runs the closure once, then step(notice), and returns what the closure returned, such as the loss. The closure
    /// runs the passes; joined ranks do not run it. What it throws is as thrown by a pass: nothing is stepped.
    template <class Closure>
        requires(!std::convertible_to<Closure, RoundNotice>)
    decltype(auto) step(Closure&& closure, RoundNotice const& notice = {}) {
        return detail::step_after(*this, std::forward<Closure>(closure), [&] { step(notice); });
    }

    /// Runs the same steps on joined ranks.
    class Hook {
    public:
        using label = labels::shards;
        using runs_after = labels_of<labels::gradients>;

        Hook(ZeroRedundancyOptimizer& zero, bool divides_by_initial_world_size) noexcept
            : zero_{zero},
              divides_{
                  zero.averaging_.divides_by_initial_world_size, divides_by_initial_world_size
              } {}
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;

        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) {
            zero_.run(round);
            if (!std::exchange(is_clear_, true)) { // what was sent or dropped
                zero_.clear_gradients();
            }
        }
        void post_hook(JoinResult const& result) { zero_.take_settings(result); }

    private:
        ZeroRedundancyOptimizer& zero_;
        detail::ScopedFlag divides_; ///< set for the guard
        bool is_clear_ = false;
    };

    /// Forgets what this rank accumulated since the last round that synced, the batch that a loop announced last
    /// included, because its gradients were cleared. A guard does so by itself where it begins and all gradients of
    /// its participants are absent or zeros. Inside an enabled guard all its participants forget their weights; call
    /// it for each of them. Local, between rounds.
    /// @throws ContractViolation  a round of an enabled guard is open, or one that syncs is announced: by next(), with
    ///                            look-ahead, or with known lengths. Nothing was changed.
    void discard_window() {
        detail::WindowOf window{this->join_state()};
        window.require_between_rounds();
        window.clear(false);
        window.end(); // also the batch that a loop has announced, of which this object sees no pass
    }
    /// For guards, before they begin: what was accumulated, and how to forget it.
    [[nodiscard]] detail::Accumulated accumulated_before_guard() {
        return detail::WindowOf{this->join_state()}.before_guard([this] {
            return this->are_cleared();
        });
    }
    void forget_cleared() { detail::WindowOf{this->join_state()}.clear(false); }
    /// For guards.
    [[nodiscard]] bool averages_gradients() const noexcept {
        return optimizer_options().reduces_gradients;
    }

    using Base::join_communicator;
    using join_keywords = keywords<divide_by_initial_world_size_t>;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) noexcept {
        return Hook{*this, args.get(divide_by_initial_world_size, true)};
    }
    [[nodiscard]] std::string_view join_name() const noexcept { return "ZeroRedundancyOptimizer"; }
    static constexpr std::string_view join_verb = "step()";
    /// @throws ContractViolation  the gradients of this guard or of a parameter are averaged by no
    ///         participant, or other gradients of this guard are averaged by another participant.
    void check_guard(GuardView const& guard) const {
        if (guard.reduces == optimizer_options().reduces_gradients) {
            throw ContractViolation{
                guard.reduces
                    ? "ZeroOptions::reduces_gradients averages gradients that another participant of "
                      "this guard has averaged; leave the option out"
                    : "no participant of this guard averages the gradients that "
                      "ZeroRedundancyOptimizer steps by; add the DistributedDataParallel to "
                      "participants(...), or set ZeroOptions::reduces_gradients"
            };
        }
        if (!optimizer_options().reduces_gradients && guard.lists_all_averaged) {
            for (detail::ShardGroup const& group : this->groups()) {
                detail::check_averaged(group, guard.averaged);
            }
        }
    }
    void list_claims(ParameterClaims& claims) const {
        this->claim(claims, optimizer_options().reduces_gradients);
    }

private:
    using Base::optimizer_options;
    using Base::require_outside;

    template <class Parameters>
    void add(Parameters&& parameters, Rule rule, std::vector<int> const& owners) {
        auto const nothing = [](auto const&) {};
        Base::add(
            std::forward<Parameters>(parameters), std::move(rule), {owners, {}}, nothing, nothing
        );
    }

    void run(Round const& round) {
        this->begin_step(round, this->can_refresh());
        if (optimizer_options().reduces_gradients) {
            auto const any = [](double) {}; // ranks' factors of a mean add up to 1
            reduce(averaging_.factor(this->words(), round, any));
        }
        this->finish_step();
    }

    /// Averages all gradients, each only to its owner.
    void reduce(double factor) {
        auto const factors = detail::ShardFactors::of(join_communicator(), factor);
        for (detail::ShardGroup const& group : this->groups()) {
            for (detail::OptimizerShard const& shard : group.shards) {
                std::byte* const bucket = this->arenas().data(0, shard.bucket_bytes());
                shard.pack_gradients(group.parameters, factors.packed, bucket);
                detail::start_parts(join_communicator(), shard, bucket, factors.summed).wait();
            }
        }
    }

    /// On a joined rank whose gradients were averaged here. See WithoutPass.
    void clear_gradients() {
        if (optimizer_options().reduces_gradients) {
            Device& device = detail::device_of(join_communicator());
            for (detail::ShardGroup const& group : this->groups()) {
                for (AnyParameter const& parameter : group.parameters) {
                    if (parameter.requires_grad()) {
                        detail::clear_gradient(parameter, device);
                    }
                }
            }
            device.finish();
        }
    }

    detail::Averaging averaging_{GradientKind::mean};
};

template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Parameters&&, Rule) -> ZeroRedundancyOptimizer<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Parameters&&, Rule, ZeroOptions)
    -> ZeroRedundancyOptimizer<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Comm&, Parameters&&, Rule) -> ZeroRedundancyOptimizer<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Comm&, Parameters&&, Rule, ZeroOptions)
    -> ZeroRedundancyOptimizer<Comm, Rule>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Options>
class ZeroRedundancyOptimizer<detail::NoCommunicator, Options> {
    static_assert(
        !std::is_same_v<Options, ZeroOptions>,
        "ZeroRedundancyOptimizer: expected a communicator, parameters, the optimizer as in Adam{...}, then "
        "options in braces with the names and the order of ZeroOptions; write ZeroOptions{...} to be told "
        "which name is wrong"
    );

public:
    explicit ZeroRedundancyOptimizer(...);
};
/// `...` takes missing arguments, too many, or braces with a wrong name.
ZeroRedundancyOptimizer(detail::AnyArgument, ...)
    -> ZeroRedundancyOptimizer<detail::NoCommunicator, ZeroOptions>;

}} // namespace joinable::v0
