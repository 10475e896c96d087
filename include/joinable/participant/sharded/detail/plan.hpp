// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/zero_options.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>

/// @file
/// How a sharded optimizer adds a group of parameters. All functions are local; errors are
/// ContractViolations.

namespace joinable { inline namespace v0 { namespace detail {

inline bool is_flat(ZeroOptions const& options) noexcept {
    return options.partition == Partition::flat;
}

void check_units(std::span<std::size_t const> units, std::size_t count, Sharding sharding);
void check_views(ZeroOptions const& options, Sharding sharding);
/// The number of trained parameters in each unit, in list order: in those that the user chose, or
/// in runs that reach `cap` bytes. Every unit has at least one.
std::vector<std::size_t> trained_in_units(
    ParameterList const& parameters,
    std::span<std::size_t const> trained,
    std::span<std::size_t const> units,
    std::size_t cap
);

/// Checks that a device can step by a rule.
template <class Rule>
void check_kernels(Rule const& rule, Device const& device) {
    if (is_on_host(device)) {
        return;
    }
    if (!device.can_update(device_rule(rule))) {
        throw ContractViolation{concat(
            to_text(device.id()),
            " has no kernels that step by ",
            class_name<Rule>(),
            "; give the communicator's device_memory().use_kernels() what joinable::cuda_kernels() returns, or "
            "for a rule of your own cuda_kernels<",
            class_name<Rule>(),
            ">(), in a source file that nvcc compiles"
        )};
    }
    std::size_t const names = rule.state_names().size();
    std::size_t const count = rule.template visit_update<float>(1, []<class Update>(Update const&) {
        return std::size_t{Update::state_count};
    });
    if (count != names) {
        throw ContractViolation{concat(
            "the update of ",
            class_name<Rule>(),
            " has a state_count of ",
            count,
            ", but its state_names() are ",
            names,
            "; give it one number for each name"
        )};
    }
}

/// Checks that a rule steps parameter `i`, whose gradients are rows.
template <class Rule>
void check_rows_rule(ParameterList const& list, std::size_t i, Rule const& rule) {
    if (!leaves_other_rows(rule)) {
        throw ContractViolation{concat(
            describe_parameter(list, i),
            " has sparse gradients, but ",
            class_name<Rule>(),
            " with these settings also steps elements without a gradient; use a rule with steps_rows, such as "
            "Sgd without momentum and weight decay, or give it dense gradients"
        )};
    }
}
/// Checks that sharded training steps parameter `i`, whose gradients are rows.
void check_rows(
    ParameterList const& list, std::size_t i, ZeroOptions const& options, Sharding sharding
);

/// `groups` are the earlier ones. `choices` are for `list`.
template <class Rule>
void check_group(
    ParameterList const& list,
    Rule const& rule,
    ShardChoices const& choices,
    std::vector<ShardGroup> const& groups,
    ZeroOptions const& options,
    Sharding sharding,
    Device const& device,
    int world_size
) {
    std::vector<int> const& owners = choices.owners;
    if (is_flat(options) && LocalOptimizer<Rule>) {
        throw ContractViolation{
            "an engine's optimizer steps whole parameters, but Partition::flat deals out parts of them; "
            "use Partition::by_parameters"
        };
    }
    check_parameters(list, device.id());
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].requires_grad() && list[i].is_sparse()) {
            check_rows(list, i, options, sharding);
            check_rows_rule(list, i, rule);
        }
        if (list[i].requires_grad() && grad_dtype(list, i) != list[i].value().dtype()) {
            throw ContractViolation{concat(
                describe_parameter(list, i),
                " has gradients of f32 beside a value of 16 bits, which sharded training does not step; give them "
                "the value's dtype: their owner steps them in f32"
            )};
        }
    }
    ParameterList all;
    for (ShardGroup const& group : groups) {
        if (!group.shards_values()) { // else the engine has no memory for them
            append(all, group.parameters);
        }
    }
    append(all, list);
    check_distinct(all, "of all groups, ", [](AnyParameter const& parameter) {
        return parameter.value();
    });
    check_gradients_apart(all);
    if (!owners.empty() && (is_flat(options) || owners.size() != list.size())) {
        throw ContractViolation{concat(
            "owners has ",
            owners.size(),
            is_flat(options)
                ? " ranks, but with Partition::flat parameters have no owner; leave it out"
                : " ranks; give one for each parameter, ",
            is_flat(options) ? "" : std::to_string(list.size())
        )};
    }
    for (int const owner : owners) {
        if (owner < 0 || owner >= world_size) {
            throw ContractViolation{
                concat("owners names rank ", owner, ", but the ranks are 0 to ", world_size - 1)
            };
        }
    }
    check_units(choices.units, list.size(), sharding);
    check_views(options, sharding);
}

/// Cuts the parameters of a group into the buckets of `rank`, and into units if values are sharded.
/// `loads` holds the elements of each rank in earlier groups and is updated. `reaches_all`: a rank reads values of the
/// others wherever they lie.
template <class Rule>
void cut_group(
    ShardGroup& group,
    Rule const& rule,
    ShardChoices const& choices,
    std::vector<std::size_t>& loads,
    ZeroOptions const& options,
    Sharding sharding,
    int rank,
    bool reaches_all,
    Device& device
) {
    std::vector<std::size_t> trained;
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        AnyView const value = group.parameters[i].value();
        group.layouts.push_back(OptimizerShard::place_of(value, nullptr));
        if (!group.parameters[i].requires_grad()) {
            group.frozen.push_back(i);
            continue;
        }
        if (!is_floating_point(value.dtype())) {
            throw ContractViolation{concat(
                describe_parameter(group.parameters, i),
                " is of ",
                name_of(value.dtype()),
                ", which no rule steps; give it requires_grad = false"
            )};
        }
        if (sharding == Sharding::parameters && group.parameters[i].is_complex()) {
            throw ContractViolation{concat(
                describe_parameter(group.parameters, i),
                " is complex, but values that are released are reals; use Sharding::gradients"
            )};
        }
        trained.push_back(i);
        sizes.push_back(value.numel());
    }
    if (trained.empty()) {
        throw ContractViolation{concat(
            group.parameters.size() == 0 ? "the list of parameters is empty"
                                         : "no parameter requires a gradient",
            ": there is nothing to step; give the parameters to train, with requires_grad = true, or run "
            "without this optimizer"
        )};
    }
    std::vector<int> all_owners = choices.owners;
    if (all_owners.empty() && !is_flat(options)) {
        auto const chosen = owners_by_size(sizes, loads);
        all_owners.resize(group.parameters.size());
        for (std::size_t k = 0; k < trained.size(); ++k) {
            all_owners[trained[k]] = chosen[k];
        }
    } else if (!is_flat(options)) { // a later group goes to the ranks that have less
        for (std::size_t k = 0; k < trained.size(); ++k) {
            loads[static_cast<std::size_t>(all_owners[trained[k]])] += sizes[k];
        }
    }
    auto const cut = [&](std::span<std::size_t const> chosen, std::size_t cap, std::size_t alone) {
        for (auto const& run : runs_by_size(group.parameters, chosen, cap, alone)) {
            ShardBucket bucket =
                is_flat(options)
                    ? flat_bucket(group.parameters, run, loads.size())
                    : bucket_by_owners(group.parameters, run, all_owners, loads.size());
            if (reaches_all) {
                bucket.alone = lone_bytes;
            }
            group.shards.emplace_back(
                std::move(bucket),
                rank,
                state_names_of(rule).size(),
                UpdateRule<Rule>,
                sharding,
                device
            );
        }
    };
    std::size_t const none = std::size_t(-1);
    if (sharding != Sharding::parameters) {
        // A flat bucket is as large as possible, because each one has parts of whole cache lines.
        // From a bucket in which values lie, each is sent in place, alone or not.
        bool const any_size = is_flat(options) || options.parameters_as_bucket_view;
        cut(trained, options.bucket_cap_bytes, any_size ? none : lone_bytes);
        return;
    }
    // A unit is a run of parameters of any dtypes.
    std::size_t begin = 0;
    for (std::size_t const count :
         trained_in_units(group.parameters, trained, choices.units, options.bucket_cap_bytes)) {
        group.units.push_back(group.shards.size());
        cut(std::span{trained}.subspan(begin, count), none, none);
        begin += count;
    }
}

void agree_on_options(AgreementList& list, ZeroOptions const& options);
template <class Rule>
void agree_on_rule(AgreementList& list, Rule const& rule) {
    std::span<std::string_view const> const names = state_names_of(rule);
    list.add("state of the rule", std::vector<std::string_view>{names.begin(), names.end()});
    list.add("class of the rule", type_name<Rule>());
    if constexpr (requires { rule.agree_on(list); }) {
        rule.agree_on(list);
    }
}

/// The rules of all groups, for ranks that must have the same settings.
template <class Rules>
void agree_on_rules(AgreementList& list, Rules const& rules) {
    for (std::size_t group = 0; group < rules.size(); ++group) {
        list.begin_section(
            group == 0 ? "settings differ: " : concat("settings of group ", group, " differ: ")
        );
        agree_on_rule(list, rules[group]);
    }
}

/// `averaged` are the values whose gradients a guard averages.
void check_averaged(ShardGroup const& group, std::vector<void const*> const& averaged);

/// Checks that a rule keeps as many numbers for each element as its group has room for.
template <class Rule>
void check_state_count(ShardGroup const& group, Rule const& rule) {
    std::size_t const names = group.shards.empty() ? 0 : group.shards.front().state().names();
    std::size_t const names_now = state_names_of(rule).size();
    if (names_now != names) {
        throw ContractViolation{concat(
            "the rule of a group keeps ",
            names_now,
            " numbers for each element now, but kept ",
            names,
            " when it was given; leave settings that add or drop state as they were"
        )};
    }
}
/// Checks that the elements of each stepped value lie in the order in which the state has them.
void check_layouts(ShardGroup const& group);
/// Both, for all groups and their rules.
template <class Rules>
void check_before_save(std::span<ShardGroup const> groups, Rules const& rules) {
    for (std::size_t k = 0; k < groups.size(); ++k) {
        check_state_count(groups[k], rules[k]);
        check_layouts(groups[k]);
    }
}

/// Checks that a group and its rule have not changed since they were added. `has_refresh`: see or_refresh().
template <class Rule>
void check_before_step(ShardGroup const& group, Rule const& rule, bool has_refresh) {
    check_rule(rule);
    if (group.values) {
        group.values->check();
    }
    check_state_count(group, rule);
    for (OptimizerShard const& shard : group.shards) {
        if (shard.bucket().is_rows) {
            check_rows_rule(group.parameters, shard.bucket().pieces.front().parameter, rule);
        }
    }
    for (std::size_t i = 0, frozen = 0; i < group.parameters.size(); ++i) {
        bool const was_frozen = frozen < group.frozen.size() && group.frozen[frozen] == i;
        frozen += was_frozen ? 1 : 0;
        if (group.parameters[i].requires_grad() == was_frozen) {
            throw ContractViolation{concat(
                describe_parameter(group.parameters, i),
                was_frozen
                    ? " requires a gradient now, but did not when it was given, so no rank steps it"
                    : " requires no gradient any more, but did when it was given",
                "; make a new optimizer",
                or_refresh(has_refresh)
            )};
        }
    }
    check_layouts(group);
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/impl/plan.ipp>
#endif
