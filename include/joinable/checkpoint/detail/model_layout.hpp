// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
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
#include <joinable/participant/saved_model.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A tensor of a model besides its parameters, on this rank.
struct KeptTensor {
    enum class Kind {
        same, ///< on all ranks: one of them writes it
        own,  ///< each rank has one; of a file of W ranks, rank r reads that of rank r mod W
        summed ///< each rank has one; in a file for W ranks, that of rank r is added to that of rank r mod W
    };
    Kind kind;
    std::string name; ///< with a rank's number behind it, if each has one
    AnyView view;

    /// The tensors of a file of `writers` ranks that rank `rank` of `ranks` reads.
    [[nodiscard]] std::vector<std::size_t>
    read_by(std::size_t rank, std::size_t ranks, std::size_t writers) const {
        if (kind != Kind::summed) {
            return {kind == Kind::same ? 0 : rank % writers};
        }
        std::vector<std::size_t> all;
        for (; rank < writers; rank += ranks) {
            all.push_back(rank);
        }
        return all;
    }
};

/// A parameter is named by its index, if it has no name.
[[nodiscard]] inline std::string
stored_name(ParameterList const& parameters, std::size_t i, std::size_t first = 0) {
    std::string name{parameters[i].name()};
    return name.empty() ? std::to_string(first + i) : name;
}

/// All of it, in the order of a file.
[[nodiscard]] inline std::vector<KeptTensor> kept_tensors(SavedModel const& model) {
    std::vector<KeptTensor> kept;
    for (std::size_t i = 0; i < model.buffers.size(); ++i) {
        kept.push_back({KeptTensor::Kind::own, concat("buffers/", i), model.buffers[i]});
    }
    for (std::size_t i = 0; i < model.attached.size(); ++i) {
        kept.push_back({KeptTensor::Kind::same, concat("state/", i), model.attached[i]});
    }
    for (ReductionTensor const& tensor : model.reduction.tensors) {
        kept.push_back(
            {tensor.is_same ? KeptTensor::Kind::same : KeptTensor::Kind::summed,
             concat(stored_name(model.parameters, tensor.parameter), "/", tensor.name),
             AnyView{tensor.data, tensor.dtype, tensor.extents, tensor.strides, tensor.device}}
        );
    }
    return kept;
}

/// The tensors of a model and its optimizer, whichever rank has them: for each parameter its value,
/// then the state of its rule, then the master. A value is named as its parameter, or by its index.
/// State is named by that name, a slash and its own name.
class ModelLayout {
public:
    using Names = std::span<std::string_view const>; ///< of a rule

    /// `names` are the state names of each group's rule, `kept` other tensors, which `writers` ranks write.
    /// @throws ContractViolation  two tensors would have one name.
    ModelLayout(
        std::string_view file,
        std::span<ShardGroup const> groups,
        std::vector<Names> const& names,
        std::vector<KeptTensor> kept,
        std::size_t writers
    )
        : groups_{groups}, kept_{std::move(kept)}, writers_{writers} {
        for (std::size_t k = 0; k < groups.size(); ++k) {
            append(groups[k], names[k]);
        }
        for (KeptTensor& tensor : kept_) {
            bool const is_complex = detail::is_complex(tensor.view.dtype());
            tensor.view = as_reals(tensor.view);
            first_of_kept_.push_back(tensors_.size());
            bool const is_one = tensor.kind == KeptTensor::Kind::same;
            for (std::size_t rank = 0; rank < (is_one ? 1 : writers); ++rank) {
                std::string name = is_one ? tensor.name : concat(tensor.name, "/", rank);
                tensors_.push_back({std::move(name), tensor.view.dtype(), tensor.view.extents()});
                tensors_.back().is_complex = is_complex;
            }
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
        Stored stored = by_name(header);
        for (StoredTensor& tensor : tensors_) {
            place_as(file, tensor, stored, header);
        }
        require_none_left(file, header, stored);
    }
    /// Takes the positions of values alone: of all, which are all that the file has; or of those in `names`, and of other
    /// tensors that are the same on all ranks and named there.
    /// @returns the parts that this rank keeps of them
    /// @throws ContractViolation  as above, or there is no parameter of a name.
    [[nodiscard]] std::vector<TensorPart>
    values_as(std::string_view file, FileHeader const& header, std::span<std::string const> names) {
        Stored stored = by_name(header);
        std::set<std::string_view> unknown{names.begin(), names.end()};
        std::set<std::size_t> placed;
        for (std::size_t const value : first_of_) {
            std::string_view const name = tensors_[value].name;
            if (names.empty() || unknown.erase(name) != 0) {
                place_as(file, tensors_[value], stored, header);
                placed.insert(value);
            }
        }
        std::vector<TensorPart> parts = values();
        std::erase_if(parts, [&](TensorPart const& part) { return !placed.contains(part.tensor); });
        for (std::size_t k = 0; k < kept_.size(); ++k) {
            StoredTensor& tensor = tensors_[first_of_kept_[k]];
            if (kept_[k].kind == KeptTensor::Kind::same && unknown.erase(tensor.name) != 0) {
                place_as(file, tensor, stored, header);
                parts.push_back(whole_of(first_of_kept_[k], kept_[k].view));
            }
        }
        if (!unknown.empty()) {
            refuse_file(
                file,
                "asked for is ",
                *unknown.begin(),
                ", but no parameter is called so, nor a tensor that attach() was given; what each "
                "rank has to itself comes with read()"
            );
        }
        if (names.empty()) {
            require_none_left(file, header, stored);
        }
        return parts;
    }

    /// Whether one of these parts is of the value of parameter `i` of a group.
    [[nodiscard]] bool
    has_value(std::span<TensorPart const> parts, ShardGroup const& group, std::size_t i) const {
        return std::any_of(parts.begin(), parts.end(), [&](TensorPart const& part) {
            return part.tensor == first_of_[group.first + i];
        });
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
    /// The parts of the other tensors that a rank writes. One rank, which `is_source`, writes those that are the same on all.
    [[nodiscard]] std::vector<TensorPart> own_kept(std::size_t rank, bool is_source) const {
        std::vector<TensorPart> parts;
        for (std::size_t k = 0; k < kept_.size(); ++k) {
            bool const is_one = kept_[k].kind == KeptTensor::Kind::same;
            if (is_source || !is_one) {
                parts.push_back(whole_of(first_of_kept_[k] + (is_one ? 0 : rank), kept_[k].view));
            }
        }
        return parts;
    }
    /// Calls f(view, parts) for each other tensor: in this rank's memory, one part for each tensor of the file whose sum it
    /// is. If there is none, it is to be zeros: f(view, {}).
    template <class F>
    void for_each_kept(std::size_t rank, std::size_t ranks, F const& f) const {
        for (std::size_t k = 0; k < kept_.size(); ++k) {
            std::vector<TensorPart> parts;
            for (std::size_t const from : kept_[k].read_by(rank, ranks, writers_)) {
                parts.push_back(whole_of(first_of_kept_[k] + from, kept_[k].view));
            }
            f(kept_[k].view, parts);
        }
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
    using Stored = std::unordered_map<std::string_view, StoredTensor const*>;

    [[nodiscard]] static Stored by_name(FileHeader const& header) {
        Stored stored;
        for (StoredTensor const& tensor : header.tensors) {
            stored.emplace(tensor.name, &tensor);
        }
        return stored;
    }
    static void place_as(
        std::string_view file, StoredTensor& tensor, Stored& stored, FileHeader const& header
    ) {
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
        bool const is_complex = header.metadata.contains(mark_of_complex(tensor.name));
        if (is_complex != tensor.is_complex && (is_complex || is_ours(header))) {
            refuse_file(
                file,
                "it is of another model: tensor ",
                tensor.name,
                tensor.is_complex ? " is complex, but the file has reals of the same extents"
                                  : " has reals, but that of the file is complex"
            );
        }
        tensor.begin = found->second->begin;
        tensor.end = found->second->end;
        stored.erase(found);
    }
    static void
    require_none_left(std::string_view file, FileHeader const& header, Stored const& stored) {
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
            std::string const name = stored_name(group.parameters, i, group.first);
            first_of_.push_back(tensors_.size());
            tensors_.push_back({name, value.dtype(), value.extents()});
            tensors_.back().is_complex = group.parameters[i].is_complex();
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
        // If all ranks have the whole value, a share is one run of the file; otherwise one run of
        // this rank's memory.
        TensorPart part = whole_of(first_of_[group.first + i], value);
        if (group.shards_values()) {
            part.order = dense_strides(value.extents(), value.strides());
        }
        return part;
    }
    [[nodiscard]] static TensorPart whole_of(std::size_t tensor, AnyView const& view) {
        return {
            tensor,
            static_cast<std::byte*>(view.data()),
            0,
            view.strides(),
            row_major_strides(view.extents()),
            0,
            view.numel()
        };
    }

    std::span<ShardGroup const> groups_;
    std::vector<StoredTensor> tensors_;
    std::vector<std::size_t> first_of_; ///< position of each parameter's value
    std::vector<KeptTensor> kept_;
    std::size_t writers_;
    std::vector<std::size_t> first_of_kept_; ///< position of each one's first
};

}}} // namespace joinable::v0::detail
