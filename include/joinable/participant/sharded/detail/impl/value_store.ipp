// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/value_store.hpp>

#include <atomic>
#include <new>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
check_layout(ParameterList const& parameters, std::size_t i, AnyView const& given) {
    AnyView const value = parameters[i].value();
    if (is_like(value, given) && value.strides() == given.strides()) {
        return; // as nearly always: as dense as it was, without a look at its dimensions
    }
    AnyView const now = OptimizerShard::place_of(value, nullptr);
    if (!is_like(now, given) || !has_same_steps(now, given)) {
        throw ContractViolation{concat(
            describe_parameter(parameters, i),
            " is ",
            to_text(now),
            " with strides ",
            to_text(now.strides()),
            " now, but was ",
            to_text(given),
            " with strides ",
            to_text(given.strides()),
            " when it was given, and the optimizer keeps its elements in that order; give the value "
            "that layout on every rank, or make a new optimizer"
        )};
    }
}

JOINABLE_DEFINITION ValueStore::ValueStore(
    ParameterList const& parameters,
    std::span<OptimizerShard const> shards,
    Residence residence,
    BufferMemory const& memory
)
    : whole_{parameters}, residence_{residence}, device_{memory.device()} {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad() && !parameters[i].can_set_value()) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(parameters, i),
                is_sharded() ? " cannot be sharded" : " cannot lie in a bucket",
                ": parameter_traits of its type needs 'static void set_value(P&, AnyView)' and 'static void "
                "release_value(P&)'; or ",
                is_sharded() ? "use Sharding::gradients" : "turn parameters_as_bucket_view off"
            )};
        }
        parts_.push_back({parameters[i]});
    }
    std::size_t bytes = 0;
    for (OptimizerShard const& shard : shards) {
        begins_.push_back(bytes);
        std::size_t const count = is_sharded() ? shard.part() : shard.bucket().count();
        bytes += (count * shard.element() + 63) / 64 * 64;
    }
    if (bytes != 0) { // one arena for all, because each costs up to two more pages
        memory_ = memory.allocate(bytes);
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        std::size_t const element = shards[k].element();
        for (ShardPiece const& piece : shards[k].bucket().pieces) {
            if (piece.begin == 0 && (is_sharded() || piece.size != 0)) {
                std::byte* const place = is_sharded() ? nullptr : at(k) + piece.offset * element;
                AnyView const value = parameters[piece.parameter].value();
                parts_[piece.parameter].value = OptimizerShard::place_of(value, place);
            }
        }
        for (ShardPiece const& piece : shards[k].own()) {
            if (is_sharded() && piece.size != 0) {
                std::byte* const own = at(k) + (piece.offset - shards[k].part_offset()) * element;
                AnyView& value = parts_[piece.parameter].value;
                value = OptimizerShard::place_of(value, own - piece.begin * element);
            }
        }
    }
}

JOINABLE_DEFINITION ValueStore::~ValueStore() {
    for (std::size_t i = 0; is_taken_ && i < parts_.size(); ++i) {
        if (parts_[i].value && !is_moved(i)) {
            parts_[i].whole.release_value();
        }
    }
}

JOINABLE_DEFINITION void
ValueStore::take(std::span<OptimizerShard const> shards, Scratch& scratch) {
    if (!is_sharded()) {
        return move_to_buckets();
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        AnyView const value = whole_[i].value();
        if (parts_[i].value && !(is_like(value, parts_[i].value) && has_memory(value))) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(whole_, i),
                value && has_memory(value)
                    ? " has another type, extents or device than when it was given; copy values into it, or make the "
                      "model anew"
                    : " is sharded and not there; call reload() on every rank while what use_all() returned lives"
            )};
        }
        if (parts_[i].value) {
            check_layout(whole_, i, parts_[i].value);
        }
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        shards[k].take_own(whole_, at(k), scratch);
    }
}

JOINABLE_DEFINITION void ValueStore::move_to_buckets() {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (is_moved(i)) {
            device_.copy(whole_[i].value(), parts_[i].value);
        }
    }
    device_.finish(); // before the engine's memory ends
    is_taken_ = true;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (is_moved(i)) {
            whole_[i].set_value(parts_[i].value);
        }
        if (is_moved(i)) {
            throw ContractViolation{concat(
                "set_value copies the value of ",
                describe_parameter(whole_, i),
                ", but parameters_as_bucket_view needs a view; turn it off"
            )};
        }
    }
}

JOINABLE_DEFINITION void ValueStore::leave() noexcept {
    struct Left {
        Arena memory;
        Left* next;
    };
    static std::atomic<Left*> first{nullptr}; // so that no leak checker misses them
    if (!is_taken_) {
        return;
    }
    auto* const left = new (std::nothrow) Left{std::move(memory_), first.load()};
    if (left == nullptr) {
        return; // the destructor releases the values
    }
    while (!first.compare_exchange_weak(left->next, left)) {
    }
    is_taken_ = false;
}

JOINABLE_DEFINITION void ValueStore::release() const {
    for (PartOfParameter const& parameter : parts_) {
        if (is_sharded() && parameter.value) {
            parameter.whole.release_value();
        }
    }
}

JOINABLE_DEFINITION void ValueStore::check() const {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (is_moved(i)) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(whole_, i),
                " is not in the bucket any more, where parameters_as_bucket_view put it; write new values "
                "into the memory of the old ones"
            )};
        }
    }
}

JOINABLE_DEFINITION ParameterList ValueStore::list(std::shared_ptr<ValueStore> const& self) {
    if (!self->is_sharded()) {
        return self->whole_;
    }
    ParameterList list;
    for (PartOfParameter& parameter : self->parts_) {
        list.push_back(AnyParameter{parameter, self});
    }
    return list;
}

}}} // namespace joinable::v0::detail
