// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/config.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How many elements one rank sends to each rank, or expects of each: a table of the caller's, one
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
    /// Into a table with a place for each rank.
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

/// One collective as one rank asks for it. The arguments are checked, and buffers that the collective
/// does not use on this rank are left out. A request refers to buffers and tables, and lives for the
/// call that posts it.
///
/// A collective in which ranks have parts also has their sizes. Parts lie one after another in rank
/// order, but all_gather and gather send the same part to every rank that `sends` names.
struct Request {
    Descriptor signature = {}; ///< what all ranks have to say alike
    ConstBuffer in = {};       ///< empty where this rank contributes nothing
    Buffer out = {};           ///< empty where this rank receives nothing; may be `in`
    PartSizes sends = {};      ///< elements of `in` for each rank
    PartSizes expects = {};    ///< elements of `out` from each rank
};

/// Makes the requests of one rank. Every transport makes its requests here, so all of them check
/// the same arguments with the same texts.
/// @throws ContractViolation  an argument is wrong.
struct RequestsOf {
    int rank = 0;
    int size = 1;

    using Tables = std::optional<Counts>; ///< none: all parts are equal

    [[nodiscard]] Request all_reduce(Buffer buffer, ReduceOp op) const;
    [[nodiscard]] Request all_reduce(Buffer buffer, ReduceOp op, double factor) const;
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
    /// The sizes of the parts of `whole`, in which this rank's part is as large as `part`, and may
    /// be where `part` is.
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
#include <joinable/communicator/detail/request.ipp>
#endif
