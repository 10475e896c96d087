// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/shard.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION OptimizerShard::OptimizerShard(
    ShardBucket bucket,
    int rank,
    std::size_t names,
    bool has_masters,
    Sharding sharding,
    Device& device
)
    : bucket_{std::move(bucket)}, rank_{rank}, has_masters_{has_masters}, sharding_{sharding},
      device_{&device},
      state_{
          bucket_.dtype,
          kept_count(static_cast<std::size_t>(rank)),
          names,
          has_masters && is_half_precision(bucket_.dtype),
          device
      },
      gradients_{device.allocate(
          reduces_to_owners(sharding) ? part() * element() : 0, Arena::default_alignment
      )} {
    std::vector<std::size_t> counts(bucket_.counts.size()); // of lone pieces of each owner
    std::vector<std::pair<std::size_t, std::size_t>> turns; // of a lone piece, and its place
    for (std::size_t k = 0; k < bucket_.pieces.size(); ++k) {
        ShardPiece const& piece = bucket_.pieces[k];
        first_ += piece.owner < rank ? 1 : 0;
        own_ += piece.owner == rank ? 1 : 0;
        if (is_lone(piece)) {
            turns.emplace_back(counts[static_cast<std::size_t>(piece.owner)]++, k);
        }
    }
    std::sort(turns.begin(), turns.end());
    for (auto const& [turn, k] : turns) {
        lone_.push_back(bucket_.pieces[k]);
    }
}

JOINABLE_DEFINITION AnyView OptimizerShard::place_of(AnyView const& value, std::byte* data) {
    Shape const& extents = value.extents();
    Shape const strides = detail::dense_strides(extents, value.strides());
    return {data, value.dtype(), extents, strides, value.device()};
}

JOINABLE_DEFINITION void OptimizerShard::pack_gradients(
    ParameterList const& parameters, double factor, std::byte* bucket
) const {
    for (std::size_t k = 0; k < bucket_.pieces.size(); ++k) {
        if (bucket_.pieces[k].begin == 0) { // else its parameter has been packed
            pack_gradient(parameters, k, factor, bucket);
        }
    }
}

JOINABLE_DEFINITION void OptimizerShard::pack_gradient(
    ParameterList const& parameters, std::size_t k, double factor, std::byte* bucket
) const {
    ShardPiece const& piece = bucket_.pieces[k];
    AnyView const value = parameters[piece.parameter].value();
    AnyView const gradient = parameters[piece.parameter].grad();
    AnyView const place = place_of(value, bucket + piece.offset * element());
    if (!gradient && parameters[piece.parameter].sparse_grad().values.numel() != 0) {
        throw ContractViolation{detail::concat(
            detail::describe_parameter(parameters, piece.parameter),
            " has a sparse gradient, but averages that go to an owner are dense; give it dense gradients"
        )};
    }
    if (!gradient || factor == 0.0) {
        device_->fill_zero(place);
    } else {
        check_gradient_of(parameters, piece.parameter, value, gradient);
        device_->scale_copy(gradient, factor, place);
    }
}

JOINABLE_DEFINITION void OptimizerShard::append_gradients(
    ParameterList const& parameters,
    detail::SteppedGradients& gradients,
    std::size_t shift,
    std::vector<ShardGradient>& list
) const {
    for (ShardPiece const& piece : kept()) {
        AnyView const value = parameters[piece.parameter].value();
        std::size_t const i = shift + piece.parameter;
        if (reduces()) {
            std::byte* const data = gradient_at(piece);
            list.push_back({i, is_whole(piece, value) ? place_of(value, data) : run(data, piece)});
            continue;
        }
        AnyView const gradient = gradients.of(parameters, piece.parameter);
        if (!gradient) {
            continue;
        }
        check_gradient_of(parameters, piece.parameter, value, gradient);
        if (is_whole(piece, value)) {
            list.push_back({i, gradient});
        } else if (is_laid_out_alike(value, gradient)) {
            list.push_back({i, run(begin_of(gradient, piece), piece)});
        } else {
            throw ContractViolation{detail::concat(
                "ZeroOptions::before_step is given runs of elements with Partition::flat, but the "
                "gradient of ",
                detail::describe_parameter(parameters, piece.parameter),
                " is not laid out as its value; use Partition::by_parameters"
            )};
        }
    }
}

JOINABLE_DEFINITION std::size_t OptimizerShard::row_bytes(ParameterList const& parameters) const {
    AnyView const value = parameters[bucket_.pieces.front().parameter].value();
    std::size_t const rows = value.extents()[0];
    return rows == 0 ? 0 : value.numel() / rows * element();
}

JOINABLE_DEFINITION void
OptimizerShard::list_rows(ParameterList const& parameters, SteppedGradients& stepped) const {
    std::size_t const i = bucket_.pieces.front().parameter;
    std::vector<std::int64_t>& listed = stepped.rows(i).indices;
    listed.clear();
    if (kept().empty()) {
        return;
    }
    AnyView const value = parameters[i].value();
    auto const [indices, values] = stepped.sparse_of(parameters, i);
    bool const is_dense = static_cast<bool>(parameters[i].grad());
    if (!indices && !values && !is_dense) {
        return;
    }
    Shape extents = value.extents();
    extents[0] = indices.numel();
    bool fit = !is_dense && indices.extents().size() == 1 && values.dtype() == value.dtype() &&
               values.extents() == extents && detail::has_memory(values) &&
               detail::has_memory(indices);
    if (fit && indices.dtype() == DType::i64) {
        auto const numbers = indices.as<std::int64_t>();
        listed.assign(numbers.begin(), numbers.end());
    } else if (fit && indices.dtype() == DType::i32) {
        auto const numbers = indices.as<std::int32_t>();
        listed.assign(numbers.begin(), numbers.end());
    } else {
        fit = false;
    }
    for (std::size_t k = 0; k < listed.size(); ++k) {
        fit = fit && listed[k] > (k == 0 ? -1 : listed[k - 1]) &&
              static_cast<std::uint64_t>(listed[k]) < value.extents()[0];
    }
    if (!fit) {
        throw ContractViolation{concat(
            "the gradient of ",
            describe_parameter(parameters, i),
            is_dense
                ? " is dense, but its gradients were sparse when it was given; give it the rows"
                : " is not rows that ascend, each once, of a value of ",
            is_dense ? std::string{} : to_text(value) + "; give it those",
            " that a DistributedDataParallel without sparse_as_dense has set"
        )};
    }
}

JOINABLE_DEFINITION void OptimizerShard::step_rows(
    ParameterList const& parameters,
    SteppedGradients& stepped,
    DeviceRule const& rule,
    std::vector<std::uint64_t>& steps,
    Scratch& scratch
) const {
    if (kept().empty()) {
        return;
    }
    ShardPiece const& piece = kept().front();
    AnyView const gradient = stepped.sparse_of(parameters, piece.parameter).values;
    if (!gradient) {
        return;
    }
    auto const* gradients = static_cast<std::byte const*>(gradient.data());
    if (!gradient.is_contiguous()) {
        std::byte* const rows = scratch.data(gradient.numel() * element());
        Shape const& extents = gradient.extents();
        device_->copy(gradient, {rows, bucket_.dtype, extents, row_major_strides(extents)});
        gradients = rows;
    }
    auto* const values = static_cast<std::byte*>(parameters[piece.parameter].value().data());
    check_masters(parameters, piece, values);
    std::uint64_t const step = ++steps[piece.parameter];
    std::size_t const row = row_bytes(parameters) / element();
    std::vector<std::int64_t> const& indices = stepped.rows(piece.parameter).indices;
    for (std::size_t first = 0, last = 0; first < indices.size(); first = last) {
        last = first + 1;
        while (last < indices.size() && indices[last] == indices[last - 1] + 1) {
            ++last; // one update of rows side by side
        }
        std::size_t const at = static_cast<std::size_t>(indices[first]) * row;
        DeviceUpdate const update = state_.update(
            values + at * element(),
            gradients + first * row * element(),
            (last - first) * row,
            place_of_state(piece) + at,
            step
        );
        device_->update(rule, {&update, 1});
    }
}

JOINABLE_DEFINITION void
OptimizerShard::copy_rows(ParameterList const& parameters, SteppedRows& rows, bool packs) const {
    AnyView const value = parameters[bucket_.pieces.front().parameter].value();
    auto* const whole = static_cast<std::byte*>(value.data());
    std::size_t const bytes = row_bytes(parameters);
    for (std::size_t k = 0; k < rows.indices.size(); ++k) {
        std::byte* const place = whole + static_cast<std::size_t>(rows.indices[k]) * bytes;
        std::byte* const packed = rows.values.data() + k * bytes;
        copy_bytes(packs ? packed : place, packs ? place : packed, bytes);
    }
}

JOINABLE_DEFINITION AnyView
OptimizerShard::lone_run(ParameterList const& parameters, ShardPiece const& piece) const {
    if (!is_lone(piece)) {
        return {};
    }
    AnyView const value = parameters[piece.parameter].value();
    return is_dense(value) ? run(begin_of(value, piece), piece) : AnyView{};
}

JOINABLE_DEFINITION std::size_t OptimizerShard::count_packed(
    ParameterList const& parameters, std::vector<std::size_t>& counts
) const {
    counts = bucket_.counts;
    if (!lone_.empty()) { // else equal parts stay so, padding included
        std::fill(counts.begin(), counts.end(), std::size_t{0});
        for (ShardPiece const& piece : bucket_.pieces) {
            bool const is_packed = !travels_alone(parameters, piece);
            counts[static_cast<std::size_t>(piece.owner)] += is_packed ? piece.size : 0;
        }
    }
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

JOINABLE_DEFINITION void OptimizerShard::pack_piece(
    AnyView const& value, ShardPiece const& piece, std::byte* place, detail::Scratch& scratch
) const {
    if (is_dense(value)) {
        detail::copy_run(*device_, begin_of(value, piece), place, piece.size, bucket_.dtype);
    } else if (is_whole(piece, value)) {
        device_->copy(value, place_of(value, place));
    } else {
        std::byte* const elements = elements_of(value, value, piece, scratch);
        device_->submit();
        detail::copy_run(*device_, elements, place, piece.size, bucket_.dtype);
        device_->submit(); // before the scratch memory is used again
    }
}

JOINABLE_DEFINITION void OptimizerShard::pack_own(
    ParameterList const& parameters, std::byte* packed, detail::Scratch& scratch
) const {
    for (ShardPiece const& piece : own()) {
        if (!travels_alone(parameters, piece)) {
            pack_piece(parameters[piece.parameter].value(), piece, packed, scratch);
            packed += piece.size * element();
        }
    }
}

JOINABLE_DEFINITION void OptimizerShard::take_own(
    ParameterList const& parameters, std::byte* part, detail::Scratch& scratch
) const {
    for (ShardPiece const& piece : own()) {
        std::byte* const place = part + (piece.offset - part_offset()) * element();
        pack_piece(parameters[piece.parameter].value(), piece, place, scratch);
    }
}

JOINABLE_DEFINITION void
OptimizerShard::unpack_others(ParameterList const& parameters, std::byte const* packed) const {
    auto* from = const_cast<std::byte*>(packed);
    auto const is_other = [&](ShardPiece const& piece) { return piece.owner != rank_; };
    std::span<ShardPiece const> const pieces = bucket_.pieces;
    for (std::size_t k = 0; k < pieces.size(); ++k) {
        ShardPiece const& piece = pieces[k];
        if (travels_alone(parameters, piece)) {
            continue;
        }
        AnyView const value = parameters[piece.parameter].value();
        if (is_dense(value)) {
            if (is_other(piece)) {
                detail::copy_run(*device_, from, begin_of(value, piece), piece.size, bucket_.dtype);
            }
        } else if (piece.begin == 0) { // all pieces of the value are packed
            bool has_others = false;
            for (std::size_t p = k; p < pieces.size(); ++p) {
                if (pieces[p].parameter != piece.parameter) {
                    break;
                }
                has_others = has_others || is_other(pieces[p]);
            }
            if (has_others) {
                device_->copy(place_of(value, from), value);
            }
        }
        from += piece.size * element();
    }
}

JOINABLE_DEFINITION void OptimizerShard::load_masters(
    ParameterList const& parameters,
    detail::Scratch& scratch,
    std::function<bool(std::size_t)> const& loads
) const {
    if (!state_.has_masters()) {
        return;
    }
    detail::LoadMasters const load{};
    for (ShardPiece const& piece : kept()) {
        if (loads && !loads(piece.parameter)) {
            continue;
        }
        AnyView const value = parameters[piece.parameter].value();
        std::byte* const values = elements_of(value, value, piece, scratch);
        DeviceUpdate const update =
            state_.update(values, values, piece.size, place_of_state(piece), 1);
        device_->update(detail::device_rule(load), {&update, 1});
    }
}

JOINABLE_DEFINITION std::byte* OptimizerShard::elements_of(
    AnyView const& value, AnyView const& tensor, ShardPiece const& piece, detail::Scratch& scratch
) const {
    if (is_laid_out_alike(value, tensor)) {
        return begin_of(tensor, piece);
    }
    std::byte* const whole = scratch.data(value.numel() * element());
    device_->copy(tensor, place_of(value, whole));
    return whole + piece.begin * element();
}

JOINABLE_DEFINITION void OptimizerShard::check_gradient_of(
    ParameterList const& parameters, std::size_t i, AnyView const& value, AnyView const& gradient
) {
    detail::check_gradient(parameters, i, gradient);
    if (!detail::is_like(value, gradient)) {
        throw ContractViolation{detail::concat(
            "the gradient of ",
            detail::describe_parameter(parameters, i),
            " is ",
            detail::to_text(gradient),
            ", but its value is ",
            detail::to_text(value)
        )};
    }
}

JOINABLE_DEFINITION void OptimizerShard::check_masters(
    ParameterList const& parameters, ShardPiece const& piece, std::byte const* values
) const {
    if (!state_.has_masters() || piece.size == 0 || !detail::is_on_host(*device_)) {
        return;
    }
    visit_sixteen_bits([&]<class Stored>(std::type_identity<Stored>) {
        Stored rounded;
        detail::narrow_to<Stored>(reinterpret_cast<std::byte*>(&rounded), masters_of(piece), 1);
        if (std::memcmp(&rounded, values, sizeof(Stored)) != 0) {
            throw ContractViolation{detail::concat(
                detail::describe_parameter(parameters, piece.parameter),
                " has changed since the last step, but the optimizer steps a copy of 32 bits; call "
                "reload() on every rank when values were loaded"
            )};
        }
    });
}

}}} // namespace joinable::v0::detail
