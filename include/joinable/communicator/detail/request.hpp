// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/config.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How many elements one rank sends to each rank, or expects from each: the caller's table, one
/// size for all ranks, or one for a single rank. Refers to the table.
class PartSizes {
public:
    constexpr PartSizes() = default; ///< nothing for any rank
    [[nodiscard]] static constexpr PartSizes equal(std::size_t size) noexcept {
        return {nullptr, size, all_ranks};
    }
    [[nodiscard]] static constexpr PartSizes only(int rank, std::size_t size) noexcept {
        return {nullptr, size, rank};
    }
    [[nodiscard]] static constexpr PartSizes of(Counts table) noexcept {
        return {table.data(), 0, all_ranks};
    }

    [[nodiscard]] constexpr std::size_t operator[](int rank) const noexcept {
        if (table_ != nullptr) {
            return table_[rank];
        }
        return rank_ == all_ranks || rank_ == rank ? size_ : 0;
    }
    /// The caller's table of `size` ranks, if it gave one.
    [[nodiscard]] constexpr Counts table(int size) const noexcept {
        return table_ == nullptr ? Counts{} : Counts{table_, static_cast<std::size_t>(size)};
    }
    /// Copies the sizes to a table with one entry per rank.
    template <class Count>
    constexpr void copy_to(std::span<Count> table) const noexcept {
        int rank = 0;
        for (Count& count : table) {
            count = (*this)[rank++];
        }
    }

private:
    static constexpr int all_ranks = -1;

    constexpr PartSizes(std::size_t const* table, std::size_t size, int rank) noexcept
        : table_{table}, size_{size}, rank_{rank} {}

    std::size_t const* table_ = nullptr;
    std::size_t size_ = 0;
    int rank_ = all_ranks;
};

/// Copies of a rank's tables, for a collective that outlasts the call that posts it.
class KeptTables {
public:
    /// Both refer to the copies from here on.
    void keep(PartSizes& sends, PartSizes& expects, int size) {
        auto const ranks = static_cast<std::size_t>(size);
        tables_.resize(2 * ranks);
        std::size_t* table = tables_.data();
        for (PartSizes* const sizes : {&sends, &expects}) {
            sizes->copy_to(std::span{table, ranks});
            *sizes = PartSizes::of({table, ranks});
            table += ranks;
        }
    }

private:
    std::vector<std::size_t> tables_;
};

/// One collective as one rank requests it. Its arguments have been checked, and it omits buffers
/// that the collective does not use on this rank. It refers to buffers and tables, and lives only
/// during the call that posts it.
///
/// If ranks have parts, it also has the sizes of the parts. Parts lie one after another in rank
/// order. In all_gather and gather, however, every rank in `sends` gets the same part.
struct Request {
    Descriptor signature = {}; ///< must be the same on all ranks
    ConstBuffer in = {};       ///< empty if this rank contributes nothing
    Buffer out = {};           ///< empty if this rank receives nothing; may be `in`
    PartSizes sends = {};      ///< elements of `in` for each rank
    PartSizes expects = {};    ///< elements of `out` from each rank
    /// Where the input lies, and `out` if they are the same: that begins in the first piece. Empty: in one place. The list
    /// outlives the collective.
    BufferPieces pieces = {};
};

/// Makes the requests of one rank. Every transport uses it, so all check the same arguments with
/// the same error texts.
/// @throws ContractViolation  an argument is wrong.
struct RequestsOf {
    int rank = 0;
    int size = 1;

    using Tables = std::optional<Counts>; ///< none: all parts are equal

    [[nodiscard]] Request all_reduce(Buffer buffer, ReduceOp op) const;
    [[nodiscard]] Request all_reduce(Buffer buffer, ReduceOp op, double factor) const;
    [[nodiscard]] Request sum_pieces(BufferPieces const& buffer, double factor) const;
    [[nodiscard]] Request reduce(Buffer buffer, ReduceOp op, int root) const;
    [[nodiscard]] Request broadcast(Buffer buffer, int root) const;
    [[nodiscard]] Request barrier() const { return {}; }

    [[nodiscard]] Request all_gather(ConstBuffer in, Buffer out, Tables counts = {}) const;
    [[nodiscard]] Request
    reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Tables counts = {}) const;
    [[nodiscard]] Request reduce_scatter(
        ConstBuffer in, Buffer out, ReduceOp op, double factor, Tables counts = {}
    ) const;
    [[nodiscard]] Request gather(ConstBuffer in, Buffer out, int root, Tables counts = {}) const;
    [[nodiscard]] Request scatter(ConstBuffer in, Buffer out, int root, Tables counts = {}) const;
    [[nodiscard]] Request all_to_all(ConstBuffer in, Buffer out) const;
    [[nodiscard]] Request
    all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) const;

private:
    /// The sizes of the parts of `whole`. This rank's part has the size of `part`, and `part` may
    /// be at that place in `whole`.
    [[nodiscard]] PartSizes divide(ConstBuffer part, ConstBuffer whole, Tables const& counts) const;
    [[nodiscard]] static Descriptor by_parts(
        Collective collective,
        ConstBuffer part,
        Tables const& counts,
        int root = 0,
        ReduceOp op = ReduceOp::sum
    ) {
        return {collective, part.dtype, op, root, counts ? 0 : part.count, counts.has_value()};
    }
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/detail/impl/request.ipp>
#endif
