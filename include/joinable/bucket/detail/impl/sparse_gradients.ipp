// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/detail/sparse_gradients.hpp>

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Adds rows of 16-bit numbers in float, and rounds once. `sums` has room for a row.
template <class T>
void add_in_float(
    std::span<std::size_t const> rows, T const* from, std::span<float> sums, T* to
) noexcept {
    std::fill(sums.begin(), sums.end(), 0.0F);
    for (std::size_t const row : rows) {
        for (std::size_t c = 0; c < sums.size(); ++c) {
            sums[c] += static_cast<float>(from[row * sums.size() + c]);
        }
    }
    std::transform(sums.begin(), sums.end(), to, [](float sum) { return T{sum}; });
}

JOINABLE_DEFINITION
SparseGradients::SparseGradients(ParameterList parameters, int rank, int size, bool as_dense)
    : parameters_{std::move(parameters)}, rank_{rank}, position_(parameters_.size(), nowhere) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        if (!parameters_[i].requires_grad() || !parameters_[i].is_sparse()) {
            continue;
        }
        AnyView const value = parameters_[i].value();
        char const* const wrong =
            value.device() != DeviceId{} ? " is on a device; rows are added on the host"
            : value.extents().size() == (parameters_[i].is_complex() ? 1U : 0U)
                ? " has no dimension, so there are no rows"
                : nullptr;
        if (wrong != nullptr) {
            throw ContractViolation{
                concat(describe(i), " has sparse gradients, but", wrong, "; give it a dense one")
            };
        }
        position_[i] = listed_.size();
        listed_.push_back(i);
        DType const dtype = as_dense ? grad_dtype(parameters_, i) : value.dtype();
        Sparse& sparse = sparse_.emplace_back(Sparse{i, value.extents(), dtype, {}, {}});
        for (std::size_t d = 1; d < sparse.extents.size(); ++d) {
            sparse.numel_of_row *= sparse.extents[d];
        }
        all_.resize((std::max)(all_.size(), as_dense ? sparse.extents[0] : 0));
    }
    std::iota(all_.begin(), all_.end(), std::int64_t{0});
    mine_.resize(listed_.size());
    counts_.resize(listed_.size() * static_cast<std::size_t>(size));
    rank_counts_.resize(static_cast<std::size_t>(size));
}

JOINABLE_DEFINITION std::string SparseGradients::describe(std::size_t i) const {
    return concat(describe_parameter(parameters_, i), " on rank ", rank_);
}

JOINABLE_DEFINITION void SparseGradients::require_fit(std::size_t i, SparseRows const& rows) const {
    auto const& [indices, values] = rows;
    Sparse const& sparse = sparse_[position_[i]];
    Shape extents = sparse.extents;
    extents[0] = indices.numel();
    bool const are_indices = indices && indices.extents().size() == 1 &&
                             (indices.dtype() == DType::i64 || indices.dtype() == DType::i32);
    bool const fit = values.dtype() == sparse.dtype && values.extents() == extents;
    bool const are_on_host = indices.device() == DeviceId{} && values.device() == DeviceId{};
    if (!are_indices || !fit || !are_on_host || !has_memory(indices) || !has_memory(values)) {
        throw ContractViolation{concat(
            "the sparse gradient of ",
            describe(i),
            " has indices of ",
            to_text(indices),
            " and values of ",
            to_text(values),
            are_on_host ? "" : " on a device",
            "; give it n indices of i32 or i64 and n rows of values in host memory, for a value of ",
            name_of(sparse.dtype),
            " ",
            to_text(sparse.extents)
        )};
    }
}

JOINABLE_DEFINITION void SparseGradients::require_no_dense(std::size_t i) const {
    if (parameters_[i].grad()) {
        throw ContractViolation{concat(
            describe(i),
            " has a dense gradient, but its gradients were sparse when the model was made; give it rows, or let "
            "is_sparse return false (an embedding of libtorch: sparse(false))"
        )};
    }
}

JOINABLE_DEFINITION bool SparseGradients::take_indices(std::size_t i, SparseRows const& rows) {
    if (!rows && !rows.indices) {
        return false;
    }
    require_fit(i, rows);
    Sparse const& sparse = at(i);
    raw_.indices.resize(rows.indices.numel());
    if (rows.indices.dtype() == DType::i64) {
        auto const indices = rows.indices.as<std::int64_t>();
        std::copy(indices.begin(), indices.end(), raw_.indices.begin());
    } else {
        auto const indices = rows.indices.as<std::int32_t>();
        std::copy(indices.begin(), indices.end(), raw_.indices.begin());
    }
    for (std::int64_t const index : raw_.indices) {
        if (index < 0 || static_cast<std::uint64_t>(index) >= sparse.extents[0]) {
            throw ContractViolation{concat(
                "the sparse gradient of ",
                describe(i),
                " has the index ",
                index,
                ", but the parameter has ",
                sparse.extents[0],
                " rows"
            )};
        }
    }
    return true;
}

JOINABLE_DEFINITION void SparseGradients::pack(std::size_t i) {
    require_no_dense(i);
    SparseRows const rows = parameters_[i].sparse_grad();
    if (!take_indices(i, rows)) {
        zero(i);
        return;
    }
    AnyView const mine = coalesce_own(at(i), rows).values;
    scale_copy(mine, factor_, mine); // after the additions, as a dense gradient is
}

JOINABLE_DEFINITION SparseRows
SparseGradients::coalesce_own(Sparse& sparse, SparseRows const& rows) {
    raw_.resize(raw_.indices.size(), sparse.row_bytes());
    copy(rows.values, rows_of(sparse, raw_).values);
    coalesce(sparse, raw_, sparse.mine);
    return rows_of(sparse, sparse.mine);
}

JOINABLE_DEFINITION AnyView SparseGradients::row_at(AnyView const& rows, std::size_t row) {
    Shape extents = rows.extents();
    Shape strides = rows.strides();
    std::size_t const offset = row * strides[0] * size_of(rows.dtype());
    extents[0] = strides[0] = 1;
    return {static_cast<std::byte*>(rows.data()) + offset, rows.dtype(), extents, strides};
}

JOINABLE_DEFINITION void SparseGradients::scatter(std::size_t i, AnyView const& place) {
    SparseRows rows = parameters_[i].sparse_grad();
    bool const is_any = take_indices(i, rows);
    if (is_any && is_all_of(i, place)) {
        return;
    }
    bool const is_half = is_any && is_half_precision(rows.values.dtype());
    if (is_half) {
        rows = coalesce_own(at(i), rows);
    }
    auto const& indices = is_half ? at(i).mine.indices : raw_.indices;
    fill_zero(place);
    for (std::size_t k = 0; is_any && k < indices.size(); ++k) {
        add(row_at(rows.values, k), row_at(place, static_cast<std::size_t>(indices[k])));
    }
}

JOINABLE_DEFINITION bool SparseGradients::is_all_of(std::size_t i, AnyView const& place) const {
    AnyView const values = parameters_[i].sparse_grad().values;
    return values.numel() != 0 && values.data() == place.data() && values.numel() == place.numel();
}

JOINABLE_DEFINITION void SparseGradients::deliver_all(std::size_t i, AnyView const& place) {
    parameters_[i].set_sparse_grad({{all_.data(), DType::i64, {place.extents()[0]}, {1}}, place});
}

JOINABLE_DEFINITION SparseGradients::Gather SparseGradients::counts() {
    for (std::size_t k = 0; k < sparse_.size(); ++k) {
        mine_[k] = sparse_[k].mine.indices.size();
    }
    rank_counts_.assign(rank_counts_.size(), sparse_.size());
    return {
        {mine_.data(), mine_.size(), DType::u64},
        {counts_.data(), counts_.size(), DType::u64},
        rank_counts_
    };
}

JOINABLE_DEFINITION std::size_t SparseGradients::begin_gathering(std::size_t i) {
    for (std::size_t rank = 0; rank < rank_counts_.size(); ++rank) {
        rank_counts_[rank] =
            static_cast<std::size_t>(counts_[rank * sparse_.size() + position_[i]]);
    }
    std::size_t const rows =
        std::accumulate(rank_counts_.begin(), rank_counts_.end(), std::size_t{0});
    raw_.resize(rows, at(i).row_bytes());
    if (receives_) {
        at(i).sum.resize(0, 0);
    }
    return rows;
}

JOINABLE_DEFINITION SparseGradients::Gather SparseGradients::indices_of(std::size_t i) {
    auto const& mine = at(i).mine.indices;
    return {
        {mine.data(), mine.size(), DType::i64},
        {raw_.indices.data(), raw_.indices.size(), DType::i64},
        rank_counts_
    };
}

JOINABLE_DEFINITION SparseGradients::Gather SparseGradients::values_of(std::size_t i) {
    Sparse const& sparse = at(i);
    for (std::size_t& count : rank_counts_) {
        count *= sparse.row();
    }
    return {
        {sparse.mine.values.data(), sparse.mine.indices.size() * sparse.row(), sparse.dtype},
        {raw_.values.data(), raw_.indices.size() * sparse.row(), sparse.dtype},
        rank_counts_
    };
}

JOINABLE_DEFINITION void SparseGradients::add_up(std::size_t i) {
    coalesce(at(i), raw_, at(i).sum);
}

JOINABLE_DEFINITION AnyView SparseGradients::row_of(Sparse const& sparse, std::byte* data) {
    return {data, sparse.dtype, {sparse.row()}, {1}};
}

JOINABLE_DEFINITION void
SparseGradients::coalesce(Sparse const& sparse, RowList const& from, RowList& to) {
    order_.resize(from.indices.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
        return from.indices[a] != from.indices[b] ? from.indices[a] < from.indices[b] : a < b;
    });
    std::size_t const bytes = sparse.row_bytes();
    to.resize(order_.size(), bytes); // at most
    wide_.resize(is_half_precision(sparse.dtype) ? sparse.row() : 0);
    std::size_t rows = 0;
    for (std::size_t first = 0; first < order_.size();) {
        std::size_t last = first + 1;
        while (last < order_.size() && from.indices[order_[last]] == from.indices[order_[first]]) {
            ++last;
        }
        AnyView const sum = row_of(sparse, to.values.data() + rows * bytes);
        fill_zero(sum); // as a dense gradient begins, so -0 becomes 0
        visit_floating(real_of(sparse.dtype), [&]<class T>(std::type_identity<T>) {
            if constexpr (sizeof(T) == 2) {
                auto const* const all = reinterpret_cast<T const*>(from.values.data());
                std::span const same{order_.data() + first, last - first};
                add_in_float<T>(same, all, wide_, static_cast<T*>(sum.data()));
            }
        });
        for (std::size_t k = is_half_precision(sparse.dtype) ? last : first; k < last; ++k) {
            // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): it is not written
            add(row_of(sparse, const_cast<std::byte*>(from.values.data()) + order_[k] * bytes),
                sum);
        }
        to.indices[rows++] = from.indices[order_[first]];
        first = last;
    }
    to.resize(rows, bytes);
}

JOINABLE_DEFINITION SparseRows SparseGradients::rows_of(Sparse& sparse, RowList& rows) {
    Shape extents = sparse.extents;
    extents[0] = rows.indices.size();
    return {
        {rows.indices.data(), DType::i64, {extents[0]}, {1}},
        {rows.values.data(), sparse.dtype, extents, row_major_strides(extents)}
    };
}

JOINABLE_DEFINITION void SparseGradients::deliver(std::size_t i) {
    parameters_[i].set_sparse_grad(rows_of(at(i), at(i).sum));
}

JOINABLE_DEFINITION bool SparseGradients::is_resident(std::size_t i) {
    AnyView const values = parameters_[i].sparse_grad().values;
    return values.numel() != 0 && values.data() == at(i).sum.values.data();
}

JOINABLE_DEFINITION void SparseGradients::clear(std::size_t i) {
    at(i).sum.resize(0, 0);
    deliver(i);
}

}}} // namespace joinable::v0::detail
