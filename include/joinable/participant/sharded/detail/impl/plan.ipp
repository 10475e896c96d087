// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/plan.hpp>

#include <algorithm>

#include <joinable/optimizer/shard.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
check_units(std::span<std::size_t const> units, std::size_t count, Sharding sharding) {
    if (!units.empty() && sharding != Sharding::parameters) {
        throw ContractViolation{concat(
            "units are gathered with Sharding::parameters, but these are given with Sharding::",
            name_of(sharding),
            "; leave them out"
        )};
    }
    std::size_t left = count; // by subtraction, because a sum could overflow
    for (std::size_t k = 0; k < units.size(); ++k) {
        if (units[k] == 0) {
            throw ContractViolation{
                concat("unit ", k, " has no parameters; give each unit at least one")
            };
        }
        if (units[k] > left) {
            throw ContractViolation{concat(
                "units 0 to ",
                k,
                " have more parameters than the list, which has ",
                count,
                "; give the number of parameters in each unit"
            )};
        }
        left -= units[k];
    }
    if (!units.empty() && left != 0) {
        throw ContractViolation{concat(
            "the units have ",
            count - left,
            " parameters together, but the list has ",
            count,
            "; give each parameter a unit, frozen ones too"
        )};
    }
}

JOINABLE_DEFINITION void check_views(ZeroOptions const& options, Sharding sharding) {
    bool const sends_values = sharding == Sharding::optimizer || sharding == Sharding::gradients;
    if (options.parameters_as_bucket_view && !sends_values) {
        throw ContractViolation{concat(
            "parameters_as_bucket_view is for values that a step sends, but with Sharding::",
            name_of(sharding),
            " it sends none; leave it out"
        )};
    }
}

JOINABLE_DEFINITION std::vector<std::size_t> trained_in_units(
    ParameterList const& parameters,
    std::span<std::size_t const> trained,
    std::span<std::size_t const> units,
    std::size_t cap
) {
    std::vector<std::size_t> counts;
    if (units.empty()) {
        std::size_t bytes = 0;
        for (std::size_t const i : trained) {
            if (counts.empty() || bytes >= cap) {
                counts.push_back(0);
                bytes = 0;
            }
            AnyView const value = parameters[i].value();
            bytes += value.numel() * size_of(value.dtype());
            ++counts.back();
        }
        return counts;
    }
    std::size_t end = 0;
    std::size_t next = 0; // of `trained`
    for (std::size_t const unit : units) {
        end += unit;
        std::size_t const first = next;
        while (next < trained.size() && trained[next] < end) {
            ++next;
        }
        if (next != first) {
            counts.push_back(next - first);
        }
    }
    return counts;
}

JOINABLE_DEFINITION void check_rows(
    ParameterList const& list, std::size_t i, ZeroOptions const& options, Sharding sharding
) {
    AnyView const value = list[i].value();
    char const* const why =
        reduces_to_owners(sharding)
            ? "its averages go to an owner, which takes dense ones; use Sharding::none or Sharding::optimizer"
        : is_flat(options)
            ? "Partition::flat deals out runs of elements; use Partition::by_parameters"
        : options.before_step               ? "before_step takes dense ones; leave it out"
        : options.parameters_as_bucket_view ? "a value that lies in a bucket is sent whole; leave "
                                              "parameters_as_bucket_view out"
        : value.device() != DeviceId{} ? "its value is on a device; rows are stepped in host memory"
        : value.extents().empty() || !value.is_contiguous()
            ? "its value is not contiguous rows; give it a contiguous copy"
            : nullptr;
    if (why != nullptr) {
        throw ContractViolation{concat(
            describe_parameter(list, i),
            " has sparse gradients, but ",
            why,
            ", or give it dense gradients"
        )};
    }
}

JOINABLE_DEFINITION void agree_on_options(AgreementList& list, ZeroOptions const& options) {
    list.add("partition", is_flat(options) ? "flat" : "by_parameters");
    list.add("bucket_cap_bytes", options.bucket_cap_bytes);
    list.add("reduces_gradients", options.reduces_gradients);
    list.add("parameters_as_bucket_view", options.parameters_as_bucket_view);
    list.add("has before_step", static_cast<bool>(options.before_step));
    std::vector<std::size_t> shared;
    for (joinable::SharedObject const& object :
         options.shared) { // there is one of shared memory, too
        shared.push_back(object.bytes());
    }
    list.add("bytes of shared objects", shared);
}

JOINABLE_DEFINITION void check_layouts(ShardGroup const& group) {
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            if (piece.begin != 0) {
                continue; // the owner of its first element looks
            }
            check_layout(group.parameters, piece.parameter, group.layouts[piece.parameter]);
        }
    }
}

JOINABLE_DEFINITION void
check_averaged(ShardGroup const& group, std::vector<void const*> const& averaged) {
    std::vector<void const*> sorted = averaged;
    std::sort(sorted.begin(), sorted.end());
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            void const* const value = group.parameters[piece.parameter].value().data();
            if (!std::binary_search(sorted.begin(), sorted.end(), value)) {
                throw ContractViolation{concat(
                    describe_parameter(group.parameters, piece.parameter),
                    " is stepped by ZeroRedundancyOptimizer, but no participant of this guard averages its "
                    "gradient; give DistributedDataParallel the same parameters"
                )};
            }
        }
    }
}

}}} // namespace joinable::v0::detail
