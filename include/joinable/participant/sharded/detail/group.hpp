// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/communicator/substitute.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/optimizer_state.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/optimizer/stepped_gradients.hpp>
#include <joinable/participant/sharded/detail/value_store.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How the user wants a group cut; empty lists leave it to the rules.
struct ShardChoices {
    std::vector<int> owners = {};        ///< of each parameter
    std::vector<std::size_t> units = {}; ///< parameters in each, if values are sharded
};

/// Parameters with one rule, cut into buckets.
struct ShardGroup {
    ParameterList parameters = {};
    std::size_t first = 0; ///< index of its first parameter among those of all groups
    std::vector<OptimizerShard> shards = {};
    std::vector<std::uint64_t> steps = {}; ///< of each parameter of which this rank owns elements
    SteppedGradients gradients = {};       ///< unless they are reduced to owners
    std::vector<std::size_t> frozen = {};  ///< parameters that need no gradient
    /// The values when they were given, as dense as in a bucket: the state has elements in their order.
    std::vector<AnyView> layouts = {};
    std::vector<std::size_t> units = {
    }; ///< where each begins among the shards, if values are sharded
    /// The values, if they lie in buckets or are sharded; in the latter case `parameters` are
    /// stand-ins.
    std::shared_ptr<ValueStore> values = {};

    [[nodiscard]] bool shards_values() const noexcept { return values && values->is_sharded(); }

    /// The engine's parameters.
    [[nodiscard]] ParameterList const& given() const noexcept {
        return values ? values->given() : parameters;
    }
};

[[nodiscard]] inline std::size_t parameter_count(std::span<ShardGroup const> groups) noexcept {
    return groups.empty() ? 0 : groups.back().first + groups.back().parameters.size();
}

/// The names of a shard's arrays, masters last.
std::vector<std::string>
array_names(std::span<std::string_view const> names, StateArrays const& state);

/// Memory for messages that carry state between ranks, allocated before the first collective: a
/// rank that ran out of memory later would leave the others waiting.
class StateMessages {
public:
    StateMessages(std::span<ShardGroup const> groups, Device& device);

    /// All parts of one array, in host memory.
    [[nodiscard]] std::byte* array() const noexcept { return array_.data(); }
    /// The same in memory that communicators move.
    [[nodiscard]] std::byte* sent() const noexcept {
        return on_device_.data() == nullptr ? array() : on_device_.data();
    }
    /// Copies bytes from sent() to array(). Ends at the deadline.
    template <class Comm>
    void download(HostCollectives<Comm>& host, std::size_t bytes) {
        if (sent() != array()) {
            host.download(sent(), array(), bytes);
        }
    }
    /// Copies bytes from array() to sent(). array() must not change before a later collective is
    /// over.
    void upload(std::size_t bytes) {
        if (sent() != array()) {
            device_.upload(array(), sent(), bytes);
        }
    }

    std::vector<std::uint64_t> steps; ///< of the largest group

private:
    Device& device_;
    Arena array_;     ///< the longest array of all ranks
    Arena on_device_; ///< empty if array_ is sent
};

/// Waits until a collective is over, also on a device, whose streams have no deadline.
template <class W>
void complete(W work) {
    if constexpr (requires { work.synchronize(); }) {
        work.synchronize();
    }
    work.wait();
}

/// A parameter in a bucket that holds all parts of one array.
AnyView array_view(
    OptimizerShard const& shard, ShardPiece const& piece, AnyView const& value, std::byte* whole
);
AnyView view_of_tensor(StateTensor const& tensor);

/// Gathers one array of a bucket from all ranks into `messages` of the root. Collective.
template <Communicator Comm>
void gather_array(
    Comm& comm,
    HostCollectives<Comm>& host,
    OptimizerShard const& shard,
    std::size_t k,
    StateMessages& messages,
    int root
) {
    StateArrays const& state = shard.state();
    DType const dtype = state.computed_in();
    Buffer const all{messages.sent(), shard.bucket().count(), dtype};
    if (shard.keeps_all()) {
        if (comm.rank() == root) {
            shard.copy_array(state.array(k), messages.sent(), all.count);
            shard.device().submit();
        }
    } else {
        ConstBuffer const part{state.array(k), shard.part(), dtype};
        complete(any_gather(comm, part, all, root, shard.bucket().counts));
    }
    if (comm.rank() == root) {
        messages.download(host, all.bytes());
    }
}
/// Sends one array of a bucket from `messages` of the root back to the ranks. Collective.
template <Communicator Comm>
void scatter_array(
    Comm& comm, OptimizerShard const& shard, std::size_t k, StateMessages& messages, int root
) {
    StateArrays const& state = shard.state();
    DType const dtype = state.computed_in();
    Buffer const all{messages.sent(), shard.bucket().count(), dtype};
    if (comm.rank() == root) {
        messages.upload(all.bytes());
        shard.device().submit();
    }
    if (shard.keeps_all()) {
        complete(comm.broadcast(all, root));
        shard.copy_array(messages.sent(), state.array(k), all.count);
        shard.device().submit();
    } else {
        Buffer const part{state.array(k), shard.part(), dtype};
        complete(any_scatter(comm, all, part, root, shard.bucket().counts));
    }
}

/// Calls f(piece, tensors of its parameter) for each piece in a bucket that begins a parameter.
template <class Parameters, class F>
void for_each_tensors(
    ShardGroup const& group, OptimizerShard const& shard, Parameters&& parameters, F const& f
) {
    for (ShardPiece const& piece : shard.bucket().pieces) {
        if (piece.begin == 0) {
            f(piece, parameters[group.first + piece.parameter].tensors);
        }
    }
}

/// Allocates tensors for the state of a group. Local.
template <class Parameter>
void make_tensors(
    ShardGroup const& group,
    std::span<std::string_view const> names,
    std::span<Parameter> parameters
) {
    for (OptimizerShard const& shard : group.shards) {
        std::vector<std::string> const all = array_names(names, shard.state());
        for_each_tensors(group, shard, parameters, [&](ShardPiece const& piece, auto& tensors) {
            AnyView const value = group.parameters[piece.parameter].value();
            DType const dtype = shard.state().computed_in();
            for (std::string const& name : all) {
                std::vector<std::byte> elements(value.numel() * size_of(dtype));
                tensors.push_back({name, dtype, value.extents(), std::move(elements)});
            }
        });
    }
}

/// Gathers the state of a group into `parameters` of the root, whose tensors make_tensors() has
/// made. Collective.
template <Communicator Comm, class Parameter>
void gather_state(
    Comm& comm,
    HostCollectives<Comm>& host,
    int root,
    ShardGroup const& group,
    StateMessages& messages,
    std::span<Parameter> parameters
) {
    bool const is_root = comm.rank() == root;
    std::uint64_t* const steps = messages.steps.data();
    std::size_t const count = group.steps.size();
    std::copy(group.steps.begin(), group.steps.end(), steps);
    host.all_reduce({steps, count, DType::u64}, ReduceOp::max).wait();
    for (std::size_t i = 0; is_root && i < count; ++i) {
        parameters[group.first + i].steps = steps[i];
    }
    for (OptimizerShard const& shard : group.shards) {
        for (std::size_t k = 0; k < shard.state().arrays(); ++k) {
            gather_array(comm, host, shard, k, messages, root);
            if (is_root) {
                for_each_tensors(group, shard, parameters, [&](auto& piece, auto& tensors) {
                    AnyView const value = group.parameters[piece.parameter].value();
                    AnyView const array = array_view(shard, piece, value, messages.array());
                    copy(array, view_of_tensor(tensors[k]));
                });
            }
        }
    }
}

/// Sends the root's state of a group to the ranks that own it. The shards have been made for the
/// names. Other state does not change. Collective.
template <Communicator Comm, class Parameter>
void scatter_state(
    Comm& comm,
    HostCollectives<Comm>& host,
    int root,
    ShardGroup& group,
    StateMessages& messages,
    std::span<Parameter const> parameters
) {
    bool const is_root = comm.rank() == root;
    for (std::size_t i = 0; is_root && i < group.steps.size(); ++i) {
        group.steps[i] = parameters[group.first + i].steps;
    }
    host.broadcast({group.steps.data(), group.steps.size(), DType::u64}, root).wait();
    for (OptimizerShard const& shard : group.shards) {
        for (std::size_t k = 0; k < shard.state().arrays(); ++k) {
            if (is_root) {
                for_each_tensors(group, shard, parameters, [&](auto& piece, auto& tensors) {
                    AnyView const value = group.parameters[piece.parameter].value();
                    AnyView const array = array_view(shard, piece, value, messages.array());
                    copy(view_of_tensor(tensors[k]), array);
                });
            }
            scatter_array(comm, shard, k, messages, root);
        }
    }
}

/// Throws ContractViolation unless the state fits these parameters.
template <class Parameter>
void check_state(
    ShardGroup const& group,
    std::span<std::string_view const> names,
    std::span<Parameter const> parameters
) {
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            auto const& tensors = parameters[group.first + piece.parameter].tensors;
            std::vector<std::string> const all = array_names(names, shard.state());
            auto const text = describe_parameter(group.parameters, piece.parameter);
            if (tensors.size() != all.size()) {
                throw ContractViolation{concat(
                    "the state of ",
                    text,
                    " has ",
                    tensors.size(),
                    " tensors, but its rule keeps ",
                    all.size()
                )};
            }
            for (std::size_t k = 0; k < all.size(); ++k) {
                AnyView const value = group.parameters[piece.parameter].value();
                StateTensor const& tensor = tensors[k];
                DType const dtype = shard.state().computed_in();
                if (tensor.name != all[k] || tensor.dtype != dtype ||
                    tensor.extents != value.extents() ||
                    tensor.elements.size() != value.numel() * size_of(dtype)) {
                    throw ContractViolation{concat(
                        "the state of ",
                        text,
                        " has ",
                        tensor.name,
                        " ",
                        name_of(tensor.dtype),
                        " ",
                        to_text(tensor.extents),
                        " of ",
                        tensor.elements.size(),
                        " bytes, where the model needs ",
                        all[k],
                        " ",
                        name_of(dtype),
                        " ",
                        to_text(value.extents())
                    )};
                }
            }
        }
    }
}

// The memory that the shards of a rank, or of all ranks, take. Local.

/// A line for each rank. @see ShardedOptimizer::table
[[nodiscard]] std::string table_of_shards(std::span<ShardGroup const> groups, std::size_t ranks);
/// Bytes of averaged gradients that this rank keeps.
[[nodiscard]] std::size_t gradient_bytes_of(std::span<ShardGroup const> groups) noexcept;
/// Bytes of values that this rank keeps, or that lie in buckets.
[[nodiscard]] std::size_t value_bytes_of(std::span<ShardGroup const> groups) noexcept;
/// Bytes of optimizer state on this rank.
[[nodiscard]] std::size_t state_bytes_of(std::span<ShardGroup const> groups) noexcept;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/impl/group.ipp>
#endif
