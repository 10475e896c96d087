// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/join/result.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/optimizer_state.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/participant/detail/relisted.hpp>
#include <joinable/participant/sharded/detail/before_step.hpp>
#include <joinable/participant/sharded/detail/exchange.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/detail/plan.hpp>
#include <joinable/participant/sharded/detail/settings.hpp>
#include <joinable/participant/sharded/detail/state_exchange.hpp>
#include <joinable/participant/sharded/detail/value_store.hpp>
#include <joinable/participant/sharded/zero_options.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor_list.hpp>

namespace joinable { inline namespace v0 {

/// The ranks' shares of an optimizer: groups of parameters, their settings and state, and the step
/// that ZeroRedundancyOptimizer and ShardedDataParallel share. `Rule` is an UpdateRule or a
/// LocalOptimizer.
template <class Comm, class Rule>
class ShardedOptimizer {
    static_assert(models_communicator<Comm>());
    static_assert(detail::steps_shards<Rule>());
    static_assert(
        !std::same_as<typename detail::device_type_of<Comm>::type, SeveralDevices>,
        "sharded optimizer: PerDevice has several devices, but shards are dealt out on one; make an optimizer of the "
        "parameters of each device, with its communicator"
    );
    static_assert(
        detail::reduces_host_memory<Comm> || detail::has_visit_update<Rule> || LocalOptimizer<Rule>,
        "sharded optimizer: this communicator moves the memory of a device, where a rule steps by its member "
        "'template <class T, class F> decltype(auto) visit_update(std::uint64_t step, F const& f) const', which "
        "returns f(update) for an update that kernels call; see UpdateRule"
    );

public:
    /// The settings of a group. Set a learning rate here, equally on every active rank. If ranks
    /// have joined, all ranks take the settings of the lowest active rank with each step. Otherwise
    /// each element is stepped by its owner's settings, and the next roll call compares those that
    /// ranks have used, if the rule has agree_on(): a difference is a Mismatch on all ranks, one
    /// round after the step, two with look-ahead, and at the end of the guard with known lengths.
    /// The values of the step are mixed then. They are compared when a guard begins, too; where one ends, ranks that
    /// joined early take them from the highest that did not. After a guard that failed set them again on all ranks. Over a
    /// group (groups_of()) all its ranks take those of its lowest active rank with each step, and none are compared. The
    /// reference stays valid while the optimizer lives. Local.
    [[nodiscard]] Rule& rule(std::size_t group = 0) { return rules_.at(group); }

    /// Reads values of 16 bits into the masters again after the engine changed the values. If
    /// values are sharded it reads what this rank owns of all values: call it during the lifetime
    /// of the result of use_all(). Local.
    /// @throws ContractViolation  values are sharded and not gathered, a value was converted, or its elements come in
    ///         another order than when it was given.
    void reload() {
        for (Group const& group : groups_) {
            if (group.shards_values()) {
                group.values->take(group.shards, scratch_[0]);
            } else {
                detail::check_layouts(group);
            }
        }
        reload_masters([](Group const&, std::size_t) { return true; });
        device().finish();
    }

    /// Gathers the state of all ranks at `to_rank`, where state() returns it, in host memory.
    /// Collective, outside a guard.
    /// @throws ContractViolation  called in a guard, `to_rank` is out of range, or a rule keeps
    ///         another number of states than when its group was added; nothing was changed.
    /// @throws Mismatch  settings differ between ranks, as after a guard that failed; nothing was changed.
    /// @throws what the communicator throws.
    void consolidate(int to_rank = 0) {
        require_own_state();
        require_outside("consolidate()");
        state_.gather(shards_, host_, to_rank, rules_, groups_, [&](auto const& f) {
            fail_together("consolidate()", [&](AgreementList& compared) {
                detail::agree_on_rules(compared, rules_);
                f();
            });
        });
    }
    /// The result of consolidate() on this rank: rules, step counts and tensors, in the order of
    /// the parameters. The next step frees it. Local.
    /// @throws ContractViolation  nothing was gathered here since the last step.
    [[nodiscard]] OptimizerState<Rule> const& state() const { return state_.on(shards_.rank()); }
    /// Takes rules, step counts and state from rank `from_rank`; the other ranks' `state` is
    /// ignored. The state may come from any number of ranks and either partition. It has no values:
    /// load values of 16 bits before. Collective, outside a guard.
    /// @throws ContractViolation  called in a guard, `from_rank` is out of range, the state is of another model, or
    ///         the elements of a value come in another order than when it was given; then the other ranks throw
    ///         PeerFailed, and nothing was changed.
    void load(OptimizerState<Rule> const& state, int from_rank = 0) {
        require_own_state();
        require_outside("load()");
        require_same_state(state, from_rank);
        state_.deal(shards_, host_, from_rank, state, rules_, groups_, [&](auto const& f) {
            fail_together("load()", f);
        });
        if (has_groups()) { // a rule may compare no settings
            settings_.send(words_, 0, rules_, {}, {});
        }
    }

    /// The rank that steps parameter `i`. Local.
    /// @throws ContractViolation  the partition is flat, each rank steps all parameters, or `i`
    ///         needs no gradient or is out of range.
    [[nodiscard]] int owner_of(std::size_t i) const {
        bool const has_owners = !is_flat() && sharding_ != Sharding::none;
        for (Group const& group : groups_) {
            for (detail::OptimizerShard const& shard : group.shards) {
                for (detail::ShardPiece const& piece : shard.bucket().pieces) {
                    if (group.first + piece.parameter == i && has_owners) {
                        return piece.owner;
                    }
                }
            }
        }
        throw ContractViolation{detail::concat(
            "parameter ",
            static_cast<std::ptrdiff_t>(i), // which may have been -1
            has_owners  ? " has no owner: it needs no gradient, or there is none of this index"
            : is_flat() ? " has no owner: with Partition::flat ranks own runs of elements"
                        : " has no owner: with Sharding::none each rank steps all"
        )};
    }

    /// This rank's parameters, shards and step counts of each group, for Checkpoint. Adding a group
    /// invalidates references to its elements. Local.
    [[nodiscard]] std::vector<detail::ShardGroup> const& groups() const noexcept { return groups_; }
    /// The settings of all groups. Local.
    [[nodiscard]] std::deque<Rule> const& rules() const noexcept { return rules_; }
    /// Copies of what changes between steps, of all groups: UpdateRules, or what settings() refers to. Local.
    [[nodiscard]] std::vector<detail::SettingsOf<Rule>> settings() {
        std::vector<detail::SettingsOf<Rule>> all;
        for (Rule& rule : rules_) {
            all.push_back(detail::settings_of(rule));
        }
        return all;
    }
    /// Reads masters again from values that were written in place, for Checkpoint: of parameters for
    /// which `loads(group, i)`. Local.
    template <class Loads>
    void reload_masters(Loads const& loads) {
        for (Group const& group : groups_) {
            load_masters(group, [&](std::size_t i) { return loads(group, i); });
        }
    }
    /// Takes settings and step counts of another training of these parameters. Checkpoint then
    /// reads values and state in place. A shard is zeroed if the new settings keep another number
    /// of states. Local.
    /// @throws ContractViolation  there is not one rule for each group and one count for each
    ///         parameter; nothing was changed.
    void resume(std::vector<detail::SettingsOf<Rule>> rules, std::span<std::uint64_t const> steps) {
        if (rules.size() != groups_.size() || steps.size() != detail::parameter_count(groups_)) {
            throw ContractViolation{detail::concat(
                "resume() takes a rule for each of ",
                groups_.size(),
                " groups and a step count for each of ",
                detail::parameter_count(groups_),
                " parameters, but was given ",
                rules.size(),
                " rules and ",
                steps.size(),
                " counts"
            )};
        }
        state_.reset();
        for (std::size_t k = 0; k < groups_.size(); ++k) {
            Group& group = groups_[k];
            for (detail::OptimizerShard& shard : group.shards) {
                std::size_t const names = detail::state_names_of(rules[k]).size();
                if (names != shard.state().names()) {
                    shard = shard.with_state(names);
                }
            }
            auto const own = steps.subspan(group.first, group.steps.size());
            std::copy(own.begin(), own.end(), group.steps.begin());
        }
        for (std::size_t k = 0; k < groups_.size(); ++k) {
            detail::settings_of(rules_[k]) = std::move(rules[k]);
            detail::apply_settings_of(rules_[k]);
        }
    }

    /// Ranks that have joined take the settings that the lowest active rank has now, for Checkpoint.
    /// Collective.
    void take_settings(Round const& round) {
        if (round.active_count() != comm_.size()) {
            settings_.send(words(), round.buffer_source(), rules_, options_.shared, {});
        }
    }

    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    /// That of the ranks which share the state. Local.
    [[nodiscard]] Comm& shard_communicator() noexcept { return shards_; }
    /// Whether this rank's group is that of rank 0, of which a Checkpoint takes the state: other groups have the same.
    /// Collective.
    [[nodiscard]] bool writes_state() {
        if (!has_groups()) {
            return true;
        }
        std::uint64_t has_first = comm_.rank() == 0 ? 1 : 0;
        shard_words_.sum({&has_first, 1});
        return has_first != 0;
    }
    [[nodiscard]] JoinState& join_state() noexcept { return join_state_; }

    /// A line for each rank: the elements that it steps, and the bytes of its optimizer state,
    /// including masters. The same text on every rank, of a group if groups share the state. Local.
    [[nodiscard]] std::string table() const {
        return detail::table_of_shards(groups_, loads_.size());
    }
    /// Bytes of the averaged gradients, if this rank keeps only its part. Local.
    [[nodiscard]] std::size_t gradient_bytes() const noexcept {
        return detail::gradient_bytes_of(groups_);
    }
    /// Bytes of the values, if this rank keeps only its part or they lie in buckets. Local.
    [[nodiscard]] std::size_t value_bytes() const noexcept {
        return detail::value_bytes_of(groups_);
    }
    /// Bytes of the buckets in which gradients and values travel. Local.
    [[nodiscard]] std::size_t bucket_bytes() const noexcept { return arenas_.bytes(); }
    /// Bytes of optimizer state on this rank, including masters. Local.
    [[nodiscard]] std::size_t state_bytes() const noexcept {
        return detail::state_bytes_of(groups_);
    }

    /// Options, and the rule of each group.
    void agree_on(AgreementList& list) const {
        detail::agree_on_options(list, options_);
        for (std::size_t group = 0; group < groups_.size(); ++group) {
            list.add(
                detail::concat("parameters of group ", group), groups_[group].parameters.size()
            );
            detail::agree_on_rule(list, rules_[group]);
        }
    }

protected:
    using Group = detail::ShardGroup;

    /// `shards`: `comm`, or this rank's group of it, whose ranks share the state.
    ShardedOptimizer(Comm& comm, Comm& shards, ZeroOptions options, Sharding sharding)
        : comm_{comm}, shards_{shards}, host_{shards}, words_{comm}, shard_words_{shards},
          options_{std::move(options)}, sharding_{sharding},
          loads_(static_cast<std::size_t>(shards.size())), arenas_{detail::BufferMemory{shards}},
          scratch_{detail::Scratch{device()}, detail::Scratch{device()}},
          before_step_{shards, host_, sharding} {}
    ShardedOptimizer(ShardedOptimizer const&) = delete;
    ShardedOptimizer& operator=(ShardedOptimizer const&) = delete;
    ~ShardedOptimizer() = default;

    [[nodiscard]] ZeroOptions const& optimizer_options() const noexcept { return options_; }
    [[nodiscard]] Sharding sharding() const noexcept { return sharding_; }
    /// Whether refresh() takes this rule and this sharding.
    [[nodiscard]] bool can_refresh() const noexcept { return UpdateRule<Rule> && !shards_values(); }
    /// After a failure: values that were moved to buckets stay there, which are then never freed.
    static void leave_values(std::span<Group const> groups) noexcept {
        for (Group const& group : groups) {
            if (group.values) {
                group.values->leave();
            }
        }
    }
    /// By which all ranks sum a few words: see GradientParticipant::words().
    [[nodiscard]] detail::ControlCommunicator& words() noexcept {
        detail::ControlCommunicator* const words = detail::words_of(join_state_);
        return words != nullptr ? *words : words_;
    }

    /// Claims that its parameters are stepped here, and, with `averages`, that their gradients are
    /// averaged here.
    void claim(ParameterClaims& claims, bool averages) const {
        for (Group const& group : groups_) {
            claims.add_stepped(group.given(), group.first);
            if (averages) {
                claims.add_averaged(group.given(), group.first);
            }
        }
    }

    void require_outside(std::string_view verb) const {
        if (detail::session_of(join_state_) != nullptr) {
            throw ContractViolation{detail::concat(
                verb, " was called in a guard; call it before or after, on every rank"
            )};
        }
        detail::require_listed(join_state_, comm_, verb);
        detail::require_listed(join_state_, shards_, verb);
    }

    /// Runs f(), or f(list), which adds what ranks compare; if it throws on one rank, all ranks throw. Collective.
    template <class F>
    void fail_together(char const* verb, F const& f) {
        AgreementList compared;
        fail_together(compared, [&] {
            compared.begin_section("sharded optimizers differ: ");
            compared.add("verb", verb);
            if constexpr (std::invocable<F const&, AgreementList&>) {
                f(compared);
            } else {
                f();
            }
        });
    }
    /// The same; ranks compare the list that f() fills.
    template <class F>
    void fail_together(AgreementList const& compared, F const& f) {
        std::exception_ptr const error = detail::exception_of(f);
        detail::agree(words_, compared, error);
    }

    /// Adds a group. `compare(list)` adds further items to compare, and `also(group)` prepares more
    /// on each rank. If they throw on one rank, all ranks throw. Collective.
    template <class Parameters, class Compare, class F>
    void
    add(Parameters&& parameters,
        Rule rule,
        detail::ShardChoices const& choices,
        Compare const& compare,
        F const& also) {
        detail::require_unguarded(detail::identity_of(comm_), "a sharded optimizer that is made");
        std::size_t const first = groups_.size();
        std::vector<std::size_t> loads; // before
        auto const prepare = [&](Making& making) {
            loads = loads_;
            ParameterList list;
            if constexpr (std::is_invocable_r_v<
                              ParameterList,
                              Parameters>) { // what it throws is told
                list = std::forward<Parameters>(parameters)();
            } else {
                list = joinable::parameters(std::forward<Parameters>(parameters));
            }
            compare(making.compared);
            making.first = first;
            for (AnyParameter const& parameter : list) {
                making.sent.push_back(parameter.value());
            }
            Rule& kept = rules_.emplace_back(std::move(rule));
            make_group(making, std::move(list), kept, choices, also);
        };
        auto const undo = [&] {
            while (rules_.size() > first) {
                rules_.pop_back();
            }
            groups_.erase(groups_.begin() + std::ptrdiff_t(first), groups_.end());
            given_.erase(given_.begin() + std::ptrdiff_t(first), given_.end());
            std::copy(loads.begin(), loads.end(), loads_.begin());
        };
        auto const loads_all = [](std::size_t, std::size_t) { return true; };
        make_groups("group of parameters", prepare, [] {}, loads_all, undo);
    }

    /// refresh() takes no other owners than those that were given.
    static void require_owners_for(std::vector<int> const& owners, ParameterList const& list) {
        if (!owners.empty() && owners.size() != list.size()) {
            throw ContractViolation{detail::concat(
                "refresh() lists ",
                list.size(),
                " parameters, but the owners that were given are those of ",
                owners.size(),
                "; make the optimizer anew with an owner for each, and move its state with a Checkpoint"
            )};
        }
    }
    /// Makes all groups anew, of `ranges`, one for each, or of the same parameters if there are none, and moves the
    /// state. `also(group)` prepares more on each rank once the groups are all there, the last one in `group`. If it throws
    /// on one rank, all ranks throw, and the groups are those of before. Collective, outside a guard.
    template <class F, class... Ranges>
    void relist(F const& also, Ranges&&... ranges) {
        static_assert(
            UpdateRule<Rule>,
            "refresh: an engine's optimizer keeps its state itself; make the optimizer anew, of the new parameters, and "
            "move the state with a Checkpoint or on the owner of each parameter, which owner_of() names"
        );
        if constexpr (UpdateRule<Rule>) {
            std::vector<std::function<ParameterList()>> const lists{std::function<ParameterList()>{
                [&] { return joinable::parameters(std::forward<Ranges>(ranges)); }
            }...};
            relist_groups(lists, also);
        }
    }
    template <class F>
    void relist_groups(std::vector<std::function<ParameterList()>> const& lists, F const& also) {
        fail_together("refresh()", [&] { // before anything is gathered
            if (shards_values()) {
                throw ContractViolation{
                    "refresh() is not for Sharding::parameters, where no rank has whole values; write a Checkpoint, make "
                    "the ShardedDataParallel anew, and read it"
                };
            }
            detail::require_no_window(detail::WindowOf{join_state_}, [&] { return are_cleared(); });
        });
        consolidate(0); // each rank gets what it owns from there
        bool has_begun = false;
        std::vector<Group> before;
        std::vector<Given> given;
        std::vector<std::size_t> loads(loads_.size());
        std::vector<detail::Relisted> relisted;
        auto const prepare = [&](Making& making) {
            has_begun = true;
            exchange_groups(before, given, loads);
            if (!lists.empty() && lists.size() != before.size()) {
                throw ContractViolation{detail::concat(
                    "refresh() was given ",
                    lists.size(),
                    " lists of parameters, but there are ",
                    before.size(),
                    " groups; give one for each, in their order, or none for the same parameters"
                )};
            }
            former_values_.reserve(former_values_.size() + before.size());
            for (std::size_t k = 0; k < before.size(); ++k) {
                ParameterList const list = lists.empty() ? before[k].given() : lists[k]();
                require_owners_for(given[k].choices.owners, list);
                make_group(making, list, rules_[k], given[k].choices, [&](Group const& group) {
                    relisted.emplace_back(*given[k].listed, list, lists.empty());
                    relisted.back().agree_on(making.compared, list);
                    if (k + 1 == before.size()) {
                        also(group);
                    }
                });
                for (std::size_t i = 0; i < list.size(); ++i) {
                    if (!relisted[k].is_equal(i)) {
                        making.sent.push_back(list[i].value());
                    }
                }
            }
        };
        auto const undo = [&] {
            if (has_begun) {
                exchange_groups(before, given, loads);
            }
            state_.reset();
        };
        auto const loads_anew = [&](std::size_t k, std::size_t i) {
            return !relisted[k].was_trained(i) || !relisted[k].is_equal(i);
        };
        make_groups("refresh()", prepare, [&] { deal_again(before, relisted); }, loads_anew, undo);
        for (Group const& group : before) {
            if (group.values) {
                former_values_.push_back(group.values);
            }
        }
        std::erase_if(former_values_, [](auto const& values) { return !values->holds_any(); });
    }

    /// Whether all gradients are absent or zeros. Local.
    [[nodiscard]] bool are_cleared() {
        return std::all_of(groups_.begin(), groups_.end(), [&](Group const& group) {
            return detail::are_cleared(group.given(), device());
        });
    }

    /// They grow during a step only if an engine changes the layout of a tensor that was sent in
    /// place.
    [[nodiscard]] detail::BucketArenas& arenas() noexcept { return arenas_; }

    // The script of a step, the same on active and shadowing ranks. Gradients are reduced between
    // begin_step() and finish_step().

    /// `has_refresh`: see detail::or_refresh().
    void begin_step(Round const& round, bool has_refresh) {
        for (std::size_t group = 0; group < groups_.size(); ++group) {
            detail::check_before_step(groups_[group], rules_[group], has_refresh);
        }
        state_.reset(); // it is of an earlier step
        // In a guard with groups, ranks of a group do not compare them.
        bool const always =
            detail::session_of(join_state_) != nullptr && detail::words_of(join_state_) == nullptr;
        settings_.share(comm_, words(), round, rules_, options_.shared, groups_, always);
        has_all_ranks_ = round.active_count() == comm_.size();
    }
    /// Where a guard ends: a rank that joined early knows the settings of the last step, not those for the next.
    void take_settings(JoinResult const& result) {
        if (static_cast<int>(result.last_joiners.size()) != comm_.size()) {
            settings_.send(words(), result.authoritative_rank, rules_, options_.shared, {});
        }
    }
    void finish_step() {
        if (!options_.before_step || before_step_(options_.before_step, groups_, words())) {
            if constexpr (detail::steps_all_at_once<Rule>) {
                step_all_at_once();
                finish_stepped();
            } else {
                step_and_exchange([this](auto const&... which) { step_pieces(which...); });
            }
        }
    }
    /// Replaces finish_step() if each shard has been stepped.
    void finish_stepped() {
        step_and_exchange([](auto const&...) {});
    }
    /// Steps what this rank owns of a shard of group `k` whose gradients are reduced, unless the rule steps all at once.
    /// Local. No requires-clause says so, because nvcc 13 then refuses it to derived classes.
    void step_shard(std::size_t k, detail::OptimizerShard const& shard) {
        step_pieces(k, shard, shard.kept(), false);
    }

private:
    using Exchanges = detail::ShardExchanges<Comm>;

    static void require_own_state() {
        static_assert(
            !detail::keeps_state_with_shard<Rule>,
            "sharded optimizer: a Checkpoint has the state of this engine's optimizer; write and read it by Checkpoint"
        );
        static_assert(
            UpdateRule<Rule> || detail::keeps_state_with_shard<Rule>,
            "sharded optimizer: an engine's optimizer keeps its state itself; save and load it on the "
            "owner of each parameter, which owner_of() names"
        );
    }

    /// An engine's optimizer has the whole shard, because Partition::flat refuses it.
    void step_pieces(
        std::size_t k,
        [[maybe_unused]] detail::OptimizerShard const& shard,
        [[maybe_unused]] std::span<detail::ShardPiece const> pieces,
        [[maybe_unused]] bool is_packed
    ) {
        [[maybe_unused]] Group& group = groups_[k];
        if constexpr (detail::steps_all_at_once<Rule>) {
            return;
        } else if constexpr (LocalOptimizer<Rule>) {
            shard.step_whole(
                group.parameters, group.gradients, rules_[k], group.steps, group.first
            );
        } else {
            shard.step(
                pieces,
                is_packed,
                group.parameters,
                group.gradients,
                rules_[k],
                group.steps,
                scratch_
            );
        }
    }
    void step_all_at_once() {
        device().finish();
        std::vector<WholeParameter> all;
        for (std::size_t k = 0; k < groups_.size(); ++k) {
            Group& group = groups_[k];
            all.clear();
            for (detail::OptimizerShard const& shard : group.shards) {
                shard.for_each_whole(
                    group.parameters,
                    group.gradients,
                    group.steps,
                    group.first,
                    [&](WholeParameter&& parameter) { all.push_back(std::move(parameter)); }
                );
            }
            rules_[k].step(std::span<WholeParameter const>{all});
        }
    }
    /// Gives an engine's optimizer what this rank steps; only then its settings are known.
    static void hand_over(Group& group, Rule& rule) {
        std::vector<WholeParameter> own;
        for (detail::OptimizerShard const& shard : group.shards) {
            for (detail::ShardPiece const& piece : shard.kept()) {
                std::size_t const i = piece.parameter;
                own.push_back({group.first + i, group.parameters[i].value(), {}, 0, {}});
            }
        }
        rule.take(std::span<WholeParameter const>{own});
        detail::check_rule(rule);
        for (detail::OptimizerShard& shard : group.shards) {
            shard = shard.with_state(detail::state_names_of(rule).size());
        }
    }

    /// How a group was given.
    struct Given {
        detail::ShardChoices choices;
        std::optional<detail::ListedModel> listed;
    };
    /// Groups that are being made, from the first one on.
    struct Making {
        std::size_t first = 0;
        AgreementList compared = {};
        std::vector<ParameterList> kept = {}; ///< of each group: what takes their place
        std::vector<AnyView> sent = {};       ///< what all ranks take from rank 0
    };

    /// Makes the next group, of these parameters; `also(group)` prepares more before it is there. Local; a failure here
    /// becomes a failure on all ranks.
    template <class F>
    void make_group(
        Making& making,
        ParameterList list,
        Rule& rule,
        detail::ShardChoices const& choices,
        F const& also
    ) {
        Group group;
        group.parameters = std::move(list);
        plan(group, rule, choices, making.compared);
        making.kept.push_back(make_store(group));
        Given given{choices, std::nullopt};
        list_given(given, group.parameters);
        also(std::as_const(group));
        given_.push_back(std::move(given));
        groups_.push_back(std::move(group));
    }
    /// Enters the memory of the groups from `first` on.
    void enter_made(detail::ModelEntry& entry, std::size_t first) const {
        ParameterList all;
        for (std::size_t k = first; k < groups_.size(); ++k) {
            append(all, groups_[k].parameters);
        }
        entry.enter(all, false);
    }
    /// Runs prepare(making), which makes groups on each rank, then accept() once all ranks have them, and moves their
    /// values to where they are kept, with masters of those for which `loads(group, i)`. If one throws on one rank, all
    /// ranks throw after undo(), which brings back what was before. Collective.
    template <class Prepare, class Accept, class Loads, class Undo>
    void make_groups(
        char const* verb,
        Prepare const& prepare,
        Accept const& accept,
        Loads const& loads,
        Undo const& undo
    ) {
        Making making;
        std::optional<detail::CoalescedBroadcast> values;
        try {
            detail::ModelEntry entry{comm_};
            fail_together(making.compared, [&] {
                prepare(making);
                enter_made(entry, making.first);
                values.emplace(
                    detail::tensor_list(std::move(making.sent)),
                    options_.bucket_cap_bytes / 2, // there are two of them
                    "parameter",
                    detail::BufferMemory{comm_}
                );
            });
            entry.leave();
            accept();
            values->run(comm_, 0);
        } catch (...) {
            undo();
            throw;
        }
        std::span<Group> const made = std::span{groups_}.subspan(making.first);
        try {
            fail_together(verb, [&] {
                for (std::size_t k = making.first; k < groups_.size(); ++k) {
                    Group const& group = groups_[k];
                    if (group.values) {
                        group.values->take(group.shards, scratch_[0]);
                        list_given(given_[k], group.parameters); // they lie elsewhere now
                    }
                    load_masters(group, [&](std::size_t i) { return loads(k, i); });
                }
                device().finish(); // before the engine's memory ends
            });
        } catch (...) {
            leave_values(made);
            undo();
            // A refresh brings back groups whose values may have moved to those that it made.
            for (Group const& group : std::span{groups_}.subspan(making.first)) {
                if (group.values) {
                    static_cast<void>(detail::exception_of([&] {
                        group.values->take(group.shards, scratch_[0]);
                    }));
                }
            }
            throw;
        }
        for (std::size_t k = 0; k < made.size(); ++k) {
            if (made[k].values) {
                made[k].values->release();
                made[k].parameters = std::move(making.kept[k]);
            }
        }
    }

    /// Lists what refresh() compares with; it refuses values that lie in parts.
    void list_given(Given& given, ParameterList const& parameters) const {
        if (!shards_values()) {
            static_cast<void>(given.listed.emplace(parameters, true));
        }
    }
    void load_masters(Group const& group, std::function<bool(std::size_t)> const& loads) {
        for (detail::OptimizerShard const& shard : group.shards) {
            shard.load_masters(group.parameters, scratch_[0], loads);
        }
    }
    /// Makes these the groups, and the present ones these.
    void exchange_groups(
        std::vector<Group>& groups, std::vector<Given>& given, std::vector<std::size_t>& loads
    ) noexcept {
        std::swap(groups_, groups);
        std::swap(given_, given);
        std::swap(loads_, loads);
    }
    /// Memory for the values of a group, if the engine's is not used. Returns what then takes the place of its parameters.
    [[nodiscard]] ParameterList make_store(Group& group) const {
        if (!shards_values() && !options_.parameters_as_bucket_view) {
            return {};
        }
        group.values = std::make_shared<detail::ValueStore>(
            group.parameters,
            group.shards,
            shards_values() ? detail::Residence::own_part : detail::Residence::bucket,
            detail::BufferMemory{shards_}
        );
        return detail::ValueStore::list(group.values);
    }

    /// Deals out what consolidate() gathered: to each parameter that was trained before what is its own. Collective.
    void
    deal_again(std::vector<Group> const& before, std::vector<detail::Relisted> const& relisted) {
        OptimizerState<Rule> state;
        auto const together = [&](auto const& f) { fail_together("refresh()", f); };
        together([&] {
            if (shards_.rank() != 0) {
                return;
            }
            OptimizerState<Rule> former = state_.take();
            state = {
                std::move(former.rules),
                std::vector<typename OptimizerState<Rule>::Parameter>(
                    detail::parameter_count(groups_)
                )
            };
            for (std::size_t k = 0; k < groups_.size(); ++k) {
                std::span const all{state.parameters};
                detail::make_tensors(groups_[k], detail::state_names_of(rules_[k]), all);
                for (std::size_t i = 0; i < groups_[k].parameters.size(); ++i) {
                    if (relisted[k].was_trained(i) && groups_[k].parameters[i].requires_grad()) {
                        all[groups_[k].first + i] =
                            std::move(former.parameters[before[k].first + *relisted[k].was(i)]);
                    }
                }
            }
        });
        state_.deal(shards_, host_, 0, state, rules_, groups_, together);
    }

    /// Whether groups of ranks share the state, each all of it.
    [[nodiscard]] bool has_groups() const noexcept {
        return detail::identity_of(comm_) != detail::identity_of(shards_);
    }
    /// The values of groups that took other states would part. Collective.
    void require_same_state(OptimizerState<Rule> const& state, int from_rank) {
        if (!has_groups()) {
            return;
        }
        std::uint64_t common = 0;
        fail_together("load()", [&] { // before some wait in their group
            state_.check_rank("from_rank", from_rank, shards_.size());
            if (shards_.rank() != from_rank) {
                return;
            }
            AgreementList rules;
            detail::agree_on_rules(rules, state.rules);
            detail::Hash hash;
            hash.add(rules.hash_from(0));
            for (auto const& parameter : state.parameters) {
                hash.add(parameter.steps);
                for (StateTensor const& tensor : parameter.tensors) {
                    auto const* const elements =
                        reinterpret_cast<char const*>(tensor.elements.data());
                    hash.add({elements, tensor.elements.size()});
                }
            }
            common = hash.value();
        });
        fail_together("load()", [&](AgreementList& compared) {
            shard_words_.broadcast({&common, 1}, from_rank);
            compared.add("hash of the state that a group of shards loads", common);
        });
    }

    [[nodiscard]] Device& device() noexcept { return detail::device_of(comm_); }
    [[nodiscard]] bool shards_values() const noexcept { return sharding_ == Sharding::parameters; }
    /// Whether the step sends the values that owners have stepped to the other ranks.
    [[nodiscard]] bool sends_values() const noexcept {
        return sharding_ != Sharding::none && !shards_values();
    }
    /// Whether it copies them into buckets.
    [[nodiscard]] bool packs_values() const noexcept {
        return sends_values() && !options_.parameters_as_bucket_view;
    }
    [[nodiscard]] bool is_flat() const noexcept { return detail::is_flat(options_); }

    void check_groups() const {
        if (shards_.size() > comm_.size()) {
            throw ContractViolation{detail::concat(
                "the communicator of the ranks that share the state has more ranks (",
                shards_.size(),
                ") than that of all ranks (",
                comm_.size(),
                "); give that of all first"
            )};
        }
        if (has_groups() && options_.reduces_gradients) {
            throw ContractViolation{
                "ZeroOptions::reduces_gradients averages over the ranks that share the state alone; leave the option out, "
                "and average by a DistributedDataParallel over all ranks"
            };
        }
    }
    void
    plan(Group& group, Rule& rule, detail::ShardChoices const& choices, AgreementList& compared) {
        check_groups();
        detail::check_group<Rule>(
            group.parameters, rule, choices, groups_, options_, sharding_, device(), shards_.size()
        );
        group.first = detail::parameter_count(groups_);
        if constexpr (!detail::takes_parameters<Rule>) {
            detail::check_rule(rule);
        }
        detail::cut_group(
            group,
            rule,
            choices,
            loads_,
            options_,
            sharding_,
            shards_.rank(),
            detail::reaches_all(shards_),
            device()
        );
        if constexpr (detail::takes_parameters<Rule>) {
            hand_over(group, rule);
        }
        if constexpr (!detail::reduces_host_memory<Comm> && UpdateRule<Rule>) {
            detail::check_kernels(rule, device());
        }
        compared.begin_section("options differ: ");
        detail::agree_on_options(compared, options_);
        compared.add("groups of ranks share the state", has_groups());
        compared.add("owners", choices.owners);
        compared.add("units", choices.units);
        detail::agree_on_rule(compared, rule);
        compared.begin_section("models differ: ");
        static_cast<void>(detail::agree_on(compared, group.parameters, device()));
        group.steps.resize(group.parameters.size());
        group.gradients.reserve(detail::reduces_to_owners(sharding_) ? 0 : group.parameters.size());
        make_arenas(group);
        groups_.reserve(groups_.size() + 1);
    }

    /// Allocates memory for the largest packed bucket and for messages.
    void make_arenas(Group const& group) {
        std::size_t reduced = 0;
        std::size_t packed = 0;
        for (detail::OptimizerShard const& shard : group.shards) {
            reduced = (std::max)(
                reduced, detail::reduces_to_owners(sharding_) ? shard.bucket_bytes() : 0
            );
            packed = (std::max)(packed, packs_values() ? packed_bytes(group, shard) : 0);
        }
        arenas_.reserve(1, (std::max)(reduced, packed));
        arenas_.reserve(2, packed);
        std::size_t const parameters = group.first + group.parameters.size();
        settings_.reserve(groups_.size() + 1, parameters, options_.shared);
    }

    /// The bytes of a bucket's values that are not sent from where they lie. Counts them for its next exchange.
    [[nodiscard]] std::size_t
    packed_bytes(Group const& group, detail::OptimizerShard const& shard, std::size_t turn = 0) {
        return shard.count_packed(group.parameters, packed_counts_[turn]) * shard.element();
    }

    /// Lists the rows that this rank is about to step, and how many each owner steps of what it owns.
    void list_rows() {
        row_counts_.clear();
        auto const for_each = [&](auto const& f) {
            for (Group& group : groups_) {
                for (detail::OptimizerShard const& shard : group.shards) {
                    if (shard.bucket().is_rows) {
                        f(group, shard);
                    }
                }
            }
        };
        for_each([&](Group& group, detail::OptimizerShard const& shard) {
            shard.list_rows(group.parameters, group.gradients);
            std::size_t const i = shard.bucket().pieces.front().parameter;
            row_counts_.push_back(group.gradients.rows(i).indices.size());
        });
        if (row_counts_.empty() || !sends_values()) {
            return;
        }
        (has_groups() ? shard_words_ : words()).sum(row_counts_);
        auto count = row_counts_.begin();
        for_each([&](Group& group, detail::OptimizerShard const& shard) {
            std::size_t const i = shard.bucket().pieces.front().parameter;
            group.gradients.rows(i).indices.resize(static_cast<std::size_t>(*count++));
        });
    }

    /// Steps the next bucket while one travels. If values are sharded, the passes exchange them.
    template <class F>
    void step_and_exchange(F const& step) {
        if (has_all_ranks_) { // else settings have been sent
            settings_.note(join_state_, rules_);
        }
        list_rows();
        Exchanges exchanges;
        try {
            for (std::size_t k = 0; k < groups_.size(); ++k) {
                for (std::size_t s = 0; s < groups_[k].shards.size(); ++s) {
                    step_and_exchange(step, k, s, exchanges);
                }
            }
            exchanges.finish_one();
        } catch (...) {
            // Before an exchange is destroyed, which aborts without the text of the exception.
            if constexpr (Aborts<Comm>) {
                if (exchanges.has_any()) {
                    shards_.abort(detail::blamed_on(
                        shards_.rank(), detail::failure_of(std::current_exception())
                    ));
                    if (has_groups() && detail::session_of(join_state_) == nullptr) {
                        detail::abort_for(words_, detail::failure_of(std::current_exception()));
                    }
                }
            }
            throw;
        }
        device().finish();
    }
    template <class F>
    void step_and_exchange(F const& step, std::size_t k, std::size_t s, Exchanges& exchanges) {
        Group& group = groups_[k];
        ParameterList const& parameters = group.parameters;
        detail::OptimizerShard const& shard = group.shards[s];
        auto const send = [&](auto&&... what) {
            exchanges.start(shards_, parameters, shard, what...);
        };
        if (!sends_values()) {
            step(k, shard, shard.kept(), false);
        } else if (shard.bucket().is_rows) {
            step(k, shard, shard.kept(), true);
            send(group.gradients.rows(shard.bucket().pieces.front().parameter));
        } else if (group.values) {
            step(k, shard, shard.kept(), false);
            send(group.values->at(s), shard.bucket().counts, nullptr);
        } else {
            std::size_t const turn = exchanges.turn();
            std::size_t const bytes = packed_bytes(group, shard, turn);
            if (bytes != 0 || shard.lone().size() != shard.bucket().pieces.size()) {
                step(k, shard, shard.kept(), true);
                send(arenas_.data(turn, bytes), packed_counts_[turn], &scratch_[0]);
            }
            for (detail::ShardPiece const& piece : shard.lone()) {
                if (shard.travels_alone(parameters, piece)) {
                    bool const is_own = piece.owner == shards_.rank();
                    step(k, shard, std::span{&piece, is_own ? 1U : 0U}, false);
                    send(piece);
                }
            }
        }
    }

    Comm& comm_;
    Comm& shards_;                       ///< which share the state
    detail::HostCollectives<Comm> host_; ///< of these
    detail::ControlOver<Comm&> words_;   ///< outside guards
    detail::ControlOver<Comm&> shard_words_;
    ZeroOptions options_;
    Sharding sharding_;
    std::deque<Rule> rules_; ///< of the groups; none moves when one is added
    std::vector<Group> groups_;
    std::vector<Given> given_; ///< of the groups
    std::vector<std::shared_ptr<detail::ValueStore>>
        former_values_;              ///< of groups before: values of frozen parameters lie there
    std::vector<std::size_t> loads_; ///< elements of each rank, by the rule of by_parameters
    detail::BucketArenas arenas_;    ///< of the bucket in flight and the next one
    std::vector<std::size_t> packed_counts_[2]; ///< of their packed elements
    detail::Scratch scratch_[2];
    detail::ShardedSettings<Rule> settings_;
    std::vector<std::uint64_t> row_counts_; ///< of each parameter whose gradients are rows
    bool has_all_ranks_ = false;            ///< whether all ranks are active in the round
    detail::ShardedBeforeStep<Comm> before_step_;
    detail::StateExchange<Rule> state_;
    JoinState join_state_;
};

}} // namespace joinable::v0
