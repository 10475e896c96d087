// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/values.hpp>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void require_settable(
    ParameterList const& parameters,
    std::size_t i,
    std::string_view what,
    std::string_view otherwise
) {
    if (!parameters[i].can_set_value()) {
        throw ContractViolation{concat(
            "the value of ",
            describe_parameter(parameters, i),
            " cannot ",
            what,
            ": parameter_traits of its type needs 'static void set_value(P&, AnyView)' and 'static void "
            "release_value(P&)'; or ",
            otherwise
        )};
    }
}

JOINABLE_DEFINITION ShardedValues::ShardedValues(
    ParameterList const& parameters,
    std::span<OptimizerShard const> shards,
    BufferMemory const& memory
)
    : whole_{parameters} {
    for (AnyParameter const& parameter : parameters) {
        parameters_.push_back({parameter});
    }
    std::size_t bytes = 0;
    for (OptimizerShard const& shard : shards) {
        begins_.push_back(bytes);
        bytes += (shard.part() * shard.element() + 63) / 64 * 64;
    }
    if (bytes != 0) { // one arena for all, because each costs up to two more pages
        memory_ = memory.allocate(bytes);
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        OptimizerShard const& shard = shards[k];
        for (ShardPiece const& piece : shard.bucket().pieces) {
            require_settable(parameters, piece.parameter, "be sharded", "use Sharding::gradients");
            AnyView& value = parameters_[piece.parameter].value;
            if (piece.begin == 0) {
                value = OptimizerShard::place_of(parameters[piece.parameter].value(), nullptr);
            }
        }
        for (ShardPiece const& piece : shard.own()) {
            AnyView& value = parameters_[piece.parameter].value;
            std::byte* const own = at(k) + (piece.offset - shard.part_offset()) * shard.element();
            if (piece.size != 0) {
                value = OptimizerShard::place_of(value, own - piece.begin * shard.element());
            }
        }
    }
}

JOINABLE_DEFINITION void
ShardedValues::take(std::span<OptimizerShard const> shards, Scratch& scratch) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        AnyView const value = whole_[i].value();
        if (parameters_[i].value && !(is_like(value, parameters_[i].value) && has_memory(value))) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(whole_, i),
                " is sharded and not there; call reload() on every rank while what use_all() returned lives"
            )};
        }
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        if (std::size_t const before = shards[k].part_offset() * shards[k].element();
            shards[k].part() != 0) {
            shards[k].pack_own(whole_, at(k) - before, scratch);
        }
    }
}

JOINABLE_DEFINITION ParameterList ShardedValues::list(std::shared_ptr<ShardedValues> const& self) {
    ParameterList list;
    for (PartOfParameter& parameter : self->parameters_) {
        list.push_back(AnyParameter{parameter, self});
    }
    return list;
}

}}} // namespace joinable::v0::detail
