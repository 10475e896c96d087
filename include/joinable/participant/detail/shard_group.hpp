// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/optimizer_state.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Parameters with one rule, cut into buckets.
struct ShardGroup {
    ParameterList parameters = {};
    std::size_t first = 0; ///< index of its first parameter among those of all groups
    std::vector<OptimizerShard> shards = {};
    std::vector<std::uint64_t> steps = {}; ///< of each parameter of which this rank owns something
    std::vector<std::size_t> frozen = {};  ///< parameters that need no gradient
};

/// Names of the arrays of a shard, masters last.
inline std::vector<std::string>
array_names(std::span<std::string_view const> names, ShardState const& state) {
    std::vector<std::string> all{names.begin(), names.end()};
    if (state.has_masters()) {
        all.emplace_back("master");
    }
    return all;
}

/// What a rank has of a parameter in a bucket that holds all parts of one array.
inline AnyView array_view(
    OptimizerShard const& shard, ShardPiece const& piece, AnyView const& value, std::byte* whole
) {
    DType const dtype = shard.state().computed_in();
    Shape const& extents = value.extents();
    return {
        whole + piece.offset * size_of(dtype),
        dtype,
        extents,
        dense_strides(extents, value.strides())
    };
}
inline AnyView view_of_tensor(StateTensor& tensor) {
    return {
        tensor.elements.data(), tensor.dtype, tensor.extents, row_major_strides(tensor.extents)
    };
}

/// One array of a bucket, of all ranks at the root. Collective.
template <Communicator Comm>
void gather_array(
    Comm& comm, OptimizerShard const& shard, std::size_t k, std::span<std::byte> whole, int root
) {
    ShardState const& state = shard.state();
    DType const dtype = state.computed_in();
    std::vector<std::size_t> const& counts = shard.bucket().counts;
    if constexpr (Gathers<Comm>) {
        Buffer const all{whole.data(), shard.bucket().count(), dtype};
        comm.gather(ConstBuffer{state.array(k), shard.part(), dtype}, all, root, counts).wait();
    } else {
        for (int rank = 0; rank < comm.size(); ++rank) {
            std::size_t const count = counts[static_cast<std::size_t>(rank)];
            std::byte* const part = whole.data() + shard.bucket().offset_of(rank) * size_of(dtype);
            if (rank == comm.rank()) {
                copy_bytes(part, state.array(k), count * size_of(dtype));
            }
            comm.broadcast({part, count, dtype}, rank).wait();
        }
    }
}
/// The way back. Collective.
template <Communicator Comm>
void scatter_array(
    Comm& comm, OptimizerShard const& shard, std::size_t k, std::span<std::byte> whole, int root
) {
    ShardState const& state = shard.state();
    DType const dtype = state.computed_in();
    Buffer const all{whole.data(), shard.bucket().count(), dtype};
    if constexpr (Scatters<Comm>) {
        Buffer const part{state.array(k), shard.part(), dtype};
        comm.scatter(all, part, root, shard.bucket().counts).wait();
    } else {
        comm.broadcast(all, root).wait();
        copy_bytes(
            state.array(k),
            whole.data() + shard.part_offset() * size_of(dtype),
            shard.part() * size_of(dtype)
        );
    }
}

/// Gathers what ranks have of a group into `parameters` of the root, which has room for it. Collective.
template <Communicator Comm, class Parameter>
void gather_state(
    Comm& comm,
    int root,
    ShardGroup const& group,
    std::span<std::string_view const> names,
    std::span<Parameter> parameters
) {
    bool const is_root = comm.rank() == root;
    std::vector<std::uint64_t> steps = group.steps;
    comm.all_reduce({steps.data(), steps.size(), DType::u64}, ReduceOp::max).wait();
    for (std::size_t i = 0; is_root && i < steps.size(); ++i) {
        parameters[group.first + i].steps = steps[i];
    }
    std::vector<std::byte> whole;
    for (OptimizerShard const& shard : group.shards) {
        ShardState const& state = shard.state();
        std::vector<std::string> const all = array_names(names, state);
        whole.resize(shard.bucket().count() * size_of(state.computed_in()));
        for (std::size_t k = 0; k < all.size(); ++k) {
            gather_array(comm, shard, k, whole, root);
            for (ShardPiece const& piece : shard.bucket().pieces) {
                if (!is_root || piece.begin != 0) {
                    continue;
                }
                AnyView const value = group.parameters[piece.parameter].value();
                StateTensor tensor{all[k], state.computed_in(), value.extents(), {}};
                tensor.elements.resize(value.numel() * size_of(tensor.dtype));
                copy(array_view(shard, piece, value, whole.data()), view_of_tensor(tensor));
                parameters[group.first + piece.parameter].tensors.push_back(std::move(tensor));
            }
        }
    }
}

/// Gives ranks their parts of what the root has of a group. The shards have been made for the names. What
/// the state does not have stays as it is. Collective.
template <Communicator Comm, class Parameter>
void scatter_state(
    Comm& comm,
    int root,
    ShardGroup& group,
    std::span<std::string_view const> names,
    std::span<Parameter const> parameters
) {
    bool const is_root = comm.rank() == root;
    for (std::size_t i = 0; is_root && i < group.steps.size(); ++i) {
        group.steps[i] = parameters[group.first + i].steps;
    }
    comm.broadcast({group.steps.data(), group.steps.size(), DType::u64}, root).wait();
    std::vector<std::byte> whole;
    for (OptimizerShard const& shard : group.shards) {
        ShardState const& state = shard.state();
        whole.resize(shard.bucket().count() * size_of(state.computed_in()));
        for (std::size_t k = 0; k < array_names(names, state).size(); ++k) {
            for (ShardPiece const& piece : shard.bucket().pieces) {
                if (is_root && piece.begin == 0) {
                    StateTensor tensor = parameters[group.first + piece.parameter].tensors[k];
                    AnyView const value = group.parameters[piece.parameter].value();
                    copy(view_of_tensor(tensor), array_view(shard, piece, value, whole.data()));
                }
            }
            scatter_array(comm, shard, k, whole, root);
        }
    }
}

/// Throws ContractViolation unless a state is that of these parameters.
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

}}} // namespace joinable::v0::detail
