// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/sparse_rows.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Rows of a gradient in host memory.
struct RowList {
    std::vector<std::int64_t> indices;
    std::vector<std::byte> values; ///< row by row

    void resize(std::size_t rows, std::size_t row_bytes) {
        indices.resize(rows);
        values.resize(rows * row_bytes);
    }
};

/// The gradients of a model that are rows of embeddings, on the host. What ranks send of them depends on the batch,
/// so they lie in no bucket: after the last bucket each rank gathers how many rows the others have, then the rows. All
/// ranks add them in rank order. Where they travel as dense ones, it adds them up in the bucket. Local.
class SparseGradients {
public:
    /// `as_dense`: the gradients travel in buckets.
    SparseGradients(ParameterList parameters, int rank, int size, bool as_dense = false);

    /// The parameters whose gradients are rows, in the order of the list.
    [[nodiscard]] std::vector<std::size_t> const& parameters() const noexcept { return listed_; }
    [[nodiscard]] bool empty() const noexcept { return listed_.empty(); }
    [[nodiscard]] bool has(std::size_t i) const noexcept { return position_[i] != nowhere; }

    // -- this rank's rows --------------------------------------------------------------------------

    /// Begins an iteration in which this rank's rows are multiplied by `factor`. If it does not receive the sums, they
    /// stay what they were, because the engine may hold them.
    void begin(double factor, bool receives) noexcept {
        factor_ = factor;
        receives_ = receives;
    }
    /// @throws ContractViolation  gradient `i` is not rows.
    void require_no_dense(std::size_t i) const;
    /// Takes the rows of gradient `i`, times the factor, each once.
    /// @throws ContractViolation  an index is out of range, or indices or values do not fit the parameter.
    void pack(std::size_t i);
    /// The sum of the rows of gradient `i` in `place`, zeros elsewhere. Rows that lie there stay. Then all rows of `place`
    /// can be the gradient.
    /// @throws ContractViolation  as pack(). `place` is as before.
    void scatter(std::size_t i, AnyView const& place);
    /// Whether gradient `i` is all rows of `place`, where they lie.
    [[nodiscard]] bool is_all_of(std::size_t i, AnyView const& place) const;
    /// Makes all rows of `place` gradient `i`.
    void deliver_all(std::size_t i, AnyView const& place);
    /// This rank has no rows of gradient `i`.
    void zero(std::size_t i) { at(i).mine.resize(0, 0); }

    // -- what ranks gather -------------------------------------------------------------------------

    /// One gather: a part of each rank.
    struct Gather {
        ConstBuffer part;
        Buffer whole;
        std::span<std::size_t const> counts; ///< per rank, valid until the next gather
    };
    /// How many rows each rank has of each gradient.
    [[nodiscard]] Gather counts();
    /// Calls f(gather) twice for gradient `i`, for indices and then for values, unless no rank has rows; after
    /// counts(). Then the sum is complete.
    template <class F>
    void for_each_gather(std::size_t i, F const& f) {
        if (std::size_t const rows = begin_gathering(i); rows != 0) {
            f(indices_of(i));
            f(values_of(i));
            if (receives_) {
                add_up(i);
            }
        }
    }

    // -- the sums ----------------------------------------------------------------------------------

    /// Makes the sum of all ranks gradient `i`. Valid until the next one.
    void deliver(std::size_t i);
    /// Makes gradient `i` one without rows.
    void clear(std::size_t i);
    /// Whether gradient `i` lies in the memory of its sum.
    [[nodiscard]] bool is_resident(std::size_t i);

private:
    static constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

    struct Sparse {
        std::size_t parameter;
        Shape extents; ///< of the value
        DType dtype;
        RowList mine;
        RowList sum;

        [[nodiscard]] std::size_t row() const noexcept { return numel_of_row; }
        [[nodiscard]] std::size_t row_bytes() const noexcept { return row() * size_of(dtype); }
        std::size_t numel_of_row = 1;
    };

    [[nodiscard]] Sparse& at(std::size_t i) noexcept { return sparse_[position_[i]]; }
    [[nodiscard]] std::string describe(std::size_t i) const;
    void require_fit(std::size_t i, SparseRows const& rows) const;
    /// Reads the indices of gradient `i` to `raw_`. False: there is no gradient.
    [[nodiscard]] bool take_indices(std::size_t i, SparseRows const& rows);
    [[nodiscard]] static SparseRows rows_of(Sparse& sparse, RowList& rows);
    [[nodiscard]] static AnyView row_of(Sparse const& sparse, std::byte* data);
    [[nodiscard]] static AnyView row_at(AnyView const& rows, std::size_t row);

    /// Returns the rows of all ranks.
    std::size_t begin_gathering(std::size_t i);
    [[nodiscard]] Gather indices_of(std::size_t i);
    [[nodiscard]] Gather values_of(std::size_t i);
    void add_up(std::size_t i);
    /// Writes this rank's rows of `sparse` once each, after take_indices(): `sparse.mine`.
    SparseRows coalesce_own(Sparse& sparse, SparseRows const& rows);
    /// Writes rows once each, ascending. Those of one index are added in the order in which they come, those of 16 bits in
    /// float.
    /// Complexity: n log n for n rows.
    void coalesce(Sparse const& sparse, RowList const& from, RowList& to);

    ParameterList parameters_;
    int rank_;
    double factor_ = 1;
    bool receives_ = true;
    std::vector<std::size_t> listed_;
    std::vector<std::size_t> position_; ///< per parameter, in the lists that follow
    std::vector<Sparse> sparse_;
    std::vector<std::uint64_t> mine_;   ///< rows of this rank, per sparse parameter
    std::vector<std::uint64_t> counts_; ///< the same of all ranks, one after another
    // Memory of the parameter that is packed or gathered now; it grows to the largest so far.
    RowList raw_;
    std::vector<std::size_t> rank_counts_;
    std::vector<std::size_t> order_;
    std::vector<float> wide_; ///< the sum of the rows of an index, if they have 16 bits
    std::vector<std::int64_t>
        all_; ///< the indices of the most rows of a parameter that travel as dense
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/detail/impl/sparse_gradients.ipp>
#endif
