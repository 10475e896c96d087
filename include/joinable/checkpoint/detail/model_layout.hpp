// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <joinable/checkpoint/detail/safetensors.hpp>
#include <joinable/checkpoint/detail/tensor_part.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The tensors of a model and its optimizer, whichever rank has them: for each parameter its value,
/// then the state of its rule, then the master. A value is named as its parameter, or by its index.
/// State is named by that name, a slash and its own name.
class ModelLayout {
public:
    using Names = std::span<std::string_view const>; ///< of a rule

    /// `names` are the state names of each group's rule.
    /// @throws ContractViolation  two tensors would have one name.
    ModelLayout(
        std::string_view file, std::span<ShardGroup const> groups, std::vector<Names> const& names
    )
        : groups_{groups} {
        for (std::size_t k = 0; k < groups.size(); ++k) {
            append(groups[k], names[k]);
        }
        std::set<std::string_view> all{"__metadata__"};
        for (StoredTensor const& tensor : tensors_) {
            if (!all.insert(tensor.name).second) {
                refuse_file(
                    file,
                    "two tensors would be called ",
                    tensor.name,
                    "; give parameters names that differ, or none"
                );
            }
        }
    }

    [[nodiscard]] std::vector<StoredTensor> const& tensors() const noexcept { return tensors_; }
    void place() { place_tensors(tensors_); }

    /// Takes the positions of the tensors from a file.
    /// @throws ContractViolation  the file is of another model: names the first tensor that
    ///         differs.
    void place_as(std::string_view file, FileHeader const& header) {
        std::unordered_map<std::string_view, StoredTensor const*> stored;
        for (StoredTensor const& tensor : header.tensors) {
            stored.emplace(tensor.name, &tensor);
        }
        for (StoredTensor& tensor : tensors_) {
            auto const found = stored.find(tensor.name);
            bool const is_there = found != stored.end();
            if (!is_there || found->second->dtype != tensor.dtype ||
                found->second->extents != tensor.extents) {
                refuse_file(
                    file,
                    "it is of another model: expected is tensor ",
                    tensor.name,
                    ", ",
                    to_text(tensor),
                    ", but it has ",
                    is_there ? to_text(*found->second) : "none of that name"
                );
            }
            tensor.begin = found->second->begin;
            tensor.end = found->second->end;
            stored.erase(found);
        }
        for (StoredTensor const& tensor : header.tensors) {
            if (stored.contains(tensor.name)) {
                refuse_file(
                    file,
                    "it is of another model: it has tensor ",
                    tensor.name,
                    ", ",
                    to_text(tensor),
                    ", which the model lacks"
                );
            }
        }
    }

    /// The optimizer state that this rank owns, and all that it keeps.
    [[nodiscard]] std::vector<TensorPart> own_state() const { return state(&OptimizerShard::own); }
    [[nodiscard]] std::vector<TensorPart> kept_state() const {
        return state(&OptimizerShard::kept);
    }
    /// The elements of each value that this rank owns. The frozen parameters too, if it `is_first`.
    [[nodiscard]] std::vector<TensorPart> own_values(bool is_first) const {
        std::vector<TensorPart> parts;
        for_each_own([&](ShardGroup const& group, OptimizerShard const&, ShardPiece const& piece) {
            parts.push_back(value_of(group, piece.parameter));
            parts.back().begin = piece.begin;
            parts.back().size = piece.size;
        });
        for (ShardGroup const& group : groups_) {
            for (std::size_t const i : group.frozen) {
                if (is_first) {
                    parts.push_back(value_of(group, i));
                }
            }
        }
        return parts;
    }
    /// All values, whole. If ranks keep parts of values, the parts of this rank.
    [[nodiscard]] std::vector<TensorPart> values() const {
        if (!groups_.empty() && groups_.front().shards_values()) {
            return own_values(true);
        }
        std::vector<TensorPart> parts;
        for (ShardGroup const& group : groups_) {
            for (std::size_t i = 0; i < group.parameters.size(); ++i) {
                parts.push_back(value_of(group, i));
            }
        }
        return parts;
    }
    /// The step count of each parameter whose first element this rank owns; 0 for the others.
    [[nodiscard]] std::vector<std::uint64_t> own_steps() const {
        std::vector<std::uint64_t> steps(first_of_.size());
        for_each_own([&](ShardGroup const& group, OptimizerShard const&, ShardPiece const& piece) {
            if (piece.begin == 0) {
                steps[group.first + piece.parameter] = group.steps[piece.parameter];
            }
        });
        return steps;
    }
    [[nodiscard]] std::vector<std::uint64_t> group_sizes() const {
        std::vector<std::uint64_t> sizes;
        for (ShardGroup const& group : groups_) {
            sizes.push_back(group.parameters.size());
        }
        return sizes;
    }

private:
    using Pieces = std::span<ShardPiece const> (OptimizerShard::*)() const noexcept;

    void append(ShardGroup const& group, Names names) {
        std::vector<StateArrays const*> states(group.parameters.size());
        for (OptimizerShard const& shard : group.shards) {
            for (ShardPiece const& piece : shard.bucket().pieces) {
                states[piece.parameter] = &shard.state();
            }
        }
        for (std::size_t i = 0; i < group.parameters.size(); ++i) {
            AnyView const value = group.parameters[i].value();
            std::string name{group.parameters[i].name()};
            if (name.empty()) {
                name = std::to_string(group.first + i);
            }
            first_of_.push_back(tensors_.size());
            tensors_.push_back({name, value.dtype(), value.extents()});
            if (states[i] == nullptr) {
                continue; // frozen
            }
            for (std::string const& array : array_names(names, *states[i])) {
                tensors_.push_back(
                    {concat(name, "/", array), states[i]->computed_in(), value.extents()}
                );
            }
        }
    }

    [[nodiscard]] std::vector<TensorPart> state(Pieces which) const {
        std::vector<TensorPart> parts;
        for_each_piece(
            which,
            [&](ShardGroup const& group, OptimizerShard const& shard, ShardPiece const& piece) {
                AnyView const value = group.parameters[piece.parameter].value();
                Shape const order = dense_strides(value.extents(), value.strides());
                std::size_t const place = shard.place_of_state(piece);
                std::size_t const first = first_of_[group.first + piece.parameter] + 1;
                for (std::size_t k = 0; k < shard.state().arrays(); ++k) {
                    parts.push_back(
                        {first + k,
                         shard.state().array(k, place),
                         piece.begin,
                         order,
                         order,
                         piece.begin,
                         piece.size}
                    );
                }
            }
        );
        return parts;
    }

    template <class F>
    void for_each_piece(Pieces which, F const& f) const {
        for (ShardGroup const& group : groups_) {
            for (OptimizerShard const& shard : group.shards) {
                for (ShardPiece const& piece : (shard.*which)()) {
                    f(group, shard, piece);
                }
            }
        }
    }
    template <class F>
    void for_each_own(F const& f) const {
        for_each_piece(&OptimizerShard::own, f);
    }

    [[nodiscard]] TensorPart value_of(ShardGroup const& group, std::size_t i) const {
        AnyView const value = group.parameters[i].value();
        Shape const& extents = value.extents();
        // If all ranks have the whole value, a share is one run of the file; otherwise one run of
        // this rank's memory.
        return {
            first_of_[group.first + i],
            static_cast<std::byte*>(value.data()),
            0,
            value.strides(),
            group.shards_values() ? dense_strides(extents, value.strides())
                                  : row_major_strides(extents),
            0,
            value.numel()
        };
    }

    std::span<ShardGroup const> groups_;
    std::vector<StoredTensor> tensors_;
    std::vector<std::size_t> first_of_; ///< position of each parameter's value
};

}}} // namespace joinable::v0::detail
