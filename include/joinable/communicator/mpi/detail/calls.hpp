// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether the result replaces the input.
[[nodiscard]] inline bool is_one_buffer(Collective collective) noexcept {
    return collective == Collective::all_reduce || collective == Collective::scaled_all_reduce ||
           collective == Collective::reduce || collective == Collective::broadcast;
}
/// Whether ranks pass parts to each other.
[[nodiscard]] inline bool has_parts(Collective collective) noexcept {
    return !is_one_buffer(collective) && collective != Collective::barrier;
}

/// A collective as MPI runs it. Buffers and tables stay valid until it is complete. `in` is either
/// `out` or does not overlap it.
struct MpiTransfer {
    Descriptor signature; ///< its dtype is the one that is sent
    std::byte const* in = nullptr;
    std::byte* out = nullptr;
    PartSizes sends = {};
    PartSizes expects = {};
};

/// The tables that MPI reads until a collective is complete. Their memory is reused.
struct MpiTables {
    std::vector<MPI_Request> requests;
    std::vector<int> counts;
    std::vector<int> places;
    std::vector<MPI_Datatype> types;
    std::vector<MPI_Datatype> made; ///< those of `types` that must be freed

    /// After that the tables get so many elements without allocating.
    void reserve(std::size_t most_requests, std::size_t most_parts, std::size_t most_made) {
        requests.reserve(most_requests);
        counts.reserve(most_parts);
        places.reserve(most_parts);
        types.reserve(most_parts);
        made.reserve(most_made);
    }
    void clear() noexcept {
        for (MPI_Datatype& type : made) {
            static_cast<void>(MPI_Type_free(&type));
        }
        made.clear();
        requests.clear();
    }
};

[[nodiscard]] inline bool has_ended(MpiTables& tables) {
    int is_done = 0;
    check_mpi(
        MPI_Testall(
            static_cast<int>(tables.requests.size()),
            tables.requests.data(),
            &is_done,
            MPI_STATUSES_IGNORE
        ),
        "MPI_Testall"
    );
    return is_done != 0;
}

/// Starts MPI collectives. All ranks start the same ones in the same order, so decisions by size
/// use only sizes that all ranks know.
class MpiCalls {
public:
    MpiCalls(MPI_Comm comm, int rank, int size, MpiLimits limits)
        : comm_{comm}, rank_{rank}, size_{size}, most_{limits.most} {}

    /// Reserves all that start() needs, and one request for a comparison before it.
    void reserve(MpiTransfer const& transfer, MpiTables& tables) const {
        std::size_t requests = 1 + transfer.signature.count / most_;
        std::size_t parts = 0;
        if (has_parts(transfer.signature.collective)) {
            parts = 2 * static_cast<std::size_t>(size_); // sent and received ones
            for (int rank = 0; rank < size_; ++rank) {
                requests += 1 + transfer.sends[rank] / most_;
            }
        }
        tables.reserve(requests, parts, parts);
    }
    void start(MpiTransfer const& transfer, MpiTables& tables) const {
        switch (transfer.signature.collective) {
        case Collective::all_reduce:
        case Collective::scaled_all_reduce: all_reduce(transfer, tables); break;
        case Collective::broadcast: broadcast(transfer, tables); break;
        case Collective::barrier:
            check_mpi(MPI_Ibarrier(comm_, &add_to(tables)), "MPI_Ibarrier");
            break;
        case Collective::reduce: reduce(transfer, tables); break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: reduce_scatter(transfer, tables); break;
        default:
            if (has_equal_parts(transfer)) {
                exchange_equal(transfer, tables);
            } else if (!gather_by_counts(transfer, tables)) {
                exchange(transfer, tables);
            }
        }
    }

private:
    [[nodiscard]] static MPI_Request& add_to(MpiTables& tables) {
        return tables.requests.emplace_back(MPI_REQUEST_NULL);
    }
    /// Calls f(at, count) for pieces of `count` elements that MPI accepts; once if there are none.
    template <class F>
    void in_pieces(std::size_t count, F const& f) const {
        std::size_t at = 0;
        do {
            std::size_t const piece = (std::min)(most_, count - at);
            f(at, static_cast<int>(piece));
            at += piece;
        } while (at < count);
    }
    [[nodiscard]] static void const*
    or_in_place(MpiTransfer const& transfer, std::size_t at_bytes) {
        return transfer.in == transfer.out ? MPI_IN_PLACE
                                           : static_cast<void const*>(transfer.in + at_bytes);
    }

    void all_reduce(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        in_pieces(signature.count, [&](std::size_t at, int count) {
            std::size_t const at_bytes = at * size_of(signature.dtype);
            check_mpi(
                MPI_Iallreduce(
                    or_in_place(transfer, at_bytes),
                    transfer.out + at_bytes,
                    count,
                    mpi_type_of(signature.dtype),
                    mpi_op_of(signature.dtype, signature.op),
                    comm_,
                    &add_to(tables)
                ),
                "MPI_Iallreduce"
            );
        });
    }
    void reduce(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        in_pieces(signature.count, [&](std::size_t at, int count) {
            std::size_t const at_bytes = at * size_of(signature.dtype);
            reduce_piece(
                rank_ == signature.root ? or_in_place(transfer, at_bytes) : transfer.in + at_bytes,
                rank_ == signature.root ? transfer.out + at_bytes : nullptr,
                count,
                signature,
                signature.root,
                tables
            );
        });
    }
    void reduce_piece(
        void const* in,
        void* out,
        int count,
        Descriptor const& signature,
        int root,
        MpiTables& tables
    ) const {
        check_mpi(
            MPI_Ireduce(
                in,
                out,
                count,
                mpi_type_of(signature.dtype),
                mpi_op_of(signature.dtype, signature.op),
                root,
                comm_,
                &add_to(tables)
            ),
            "MPI_Ireduce"
        );
    }
    void broadcast(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        in_pieces(signature.count, [&](std::size_t at, int count) {
            check_mpi(
                MPI_Ibcast(
                    transfer.out + at * size_of(signature.dtype),
                    count,
                    mpi_type_of(signature.dtype),
                    signature.root,
                    comm_,
                    &add_to(tables)
                ),
                "MPI_Ibcast"
            );
        });
    }

    /// Every rank knows all parts: they are in `sends`.
    void reduce_scatter(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        std::size_t total = 0;
        for (int rank = 0; rank < size_; ++rank) {
            total += transfer.sends[rank];
        }
        if (total > most_) { // one reduction per rank, for its part
            std::size_t at_bytes = 0;
            for (int rank = 0; rank < size_; ++rank) {
                in_pieces(transfer.sends[rank], [&](std::size_t at, int count) {
                    std::size_t const bytes = at * size_of(signature.dtype);
                    reduce_piece(
                        transfer.in + at_bytes + bytes,
                        rank == rank_ ? transfer.out + bytes : nullptr,
                        count,
                        signature,
                        rank,
                        tables
                    );
                });
                at_bytes += transfer.sends[rank] * size_of(signature.dtype);
            }
            return;
        }
        tables.counts.resize(static_cast<std::size_t>(size_));
        for (int rank = 0; rank < size_; ++rank) {
            tables.counts[static_cast<std::size_t>(rank)] = static_cast<int>(transfer.sends[rank]);
        }
        check_mpi(
            MPI_Ireduce_scatter(
                transfer.in,
                transfer.out,
                tables.counts.data(),
                mpi_type_of(signature.dtype),
                mpi_op_of(signature.dtype, signature.op),
                comm_,
                &add_to(tables)
            ),
            "MPI_Ireduce_scatter"
        );
    }

    [[nodiscard]] bool has_equal_parts(MpiTransfer const& transfer) const noexcept {
        return !transfer.signature.has_counts &&
               transfer.signature.count <= most_ / static_cast<std::size_t>(size_);
    }
    void exchange_equal(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        int const count = static_cast<int>(signature.count);
        MPI_Datatype const type = mpi_type_of(signature.dtype);
        void const* const in = transfer.in;
        void* const out = transfer.out;
        MPI_Request* const request = &add_to(tables);
        switch (signature.collective) {
        case Collective::all_gather:
            check_mpi(
                MPI_Iallgather(in, count, type, out, count, type, comm_, request), "MPI_Iallgather"
            );
            break;
        case Collective::gather:
            check_mpi(
                MPI_Igather(in, count, type, out, count, type, signature.root, comm_, request),
                "MPI_Igather"
            );
            break;
        case Collective::scatter:
            check_mpi(
                MPI_Iscatter(in, count, type, out, count, type, signature.root, comm_, request),
                "MPI_Iscatter"
            );
            break;
        default:
            check_mpi(
                MPI_Ialltoall(in, count, type, out, count, type, comm_, request), "MPI_Ialltoall"
            );
        }
    }

    /// Only all_gather with counts has all counts on all ranks.
    [[nodiscard]] bool gather_by_counts(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const& signature = transfer.signature;
        if (signature.collective != Collective::all_gather) {
            return false;
        }
        tables.counts.clear();
        tables.places.clear();
        std::size_t total = 0;
        for (int rank = 0; rank < size_; ++rank) {
            std::size_t const part = transfer.expects[rank];
            tables.counts.push_back(static_cast<int>(part));
            tables.places.push_back(static_cast<int>(total));
            total += part;
            if (total > most_) {
                return false;
            }
        }
        MPI_Datatype const type = mpi_type_of(signature.dtype);
        check_mpi(
            MPI_Iallgatherv(
                transfer.in,
                tables.counts[static_cast<std::size_t>(rank_)],
                type,
                transfer.out,
                tables.counts.data(),
                tables.places.data(),
                type,
                comm_,
                &add_to(tables)
            ),
            "MPI_Iallgatherv"
        );
        return true;
    }

    /// For parts of any sizes: each rank describes its own with derived types.
    void exchange(MpiTransfer const& transfer, MpiTables& tables) const {
        auto const ranks = static_cast<std::size_t>(size_);
        std::size_t const element = size_of(transfer.signature.dtype);
        bool const sends_one_part = transfer.signature.collective == Collective::all_gather ||
                                    transfer.signature.collective == Collective::gather;
        tables.counts.assign(2 * ranks, 0);
        tables.places.assign(2 * ranks, 0);
        tables.types.assign(2 * ranks, MPI_BYTE);
        std::size_t in_at = 0;
        std::size_t out_at = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            std::size_t const sent = transfer.sends[static_cast<int>(rank)];
            std::size_t const expected = transfer.expects[static_cast<int>(rank)];
            describe(transfer.signature.dtype, sent, in_at, rank, tables);
            describe(transfer.signature.dtype, expected, out_at, ranks + rank, tables);
            in_at += sends_one_part ? 0 : sent * element;
            out_at += expected * element;
        }
        std::byte nothing[2]{}; // MPI needs two distinct buffers, even for nothing
        check_mpi(
            MPI_Ialltoallw(
                transfer.in == nullptr ? &nothing[0] : transfer.in,
                tables.counts.data(),
                tables.places.data(),
                tables.types.data(),
                transfer.out == nullptr ? &nothing[1] : transfer.out,
                tables.counts.data() + ranks,
                tables.places.data() + ranks,
                tables.types.data() + ranks,
                comm_,
                &add_to(tables)
            ),
            "MPI_Ialltoallw"
        );
    }
    void describe(
        DType dtype, std::size_t count, std::size_t at_bytes, std::size_t index, MpiTables& tables
    ) const {
        if (count == 0) {
            return;
        }
        if (count <= most_ && at_bytes <= most_) {
            tables.counts[index] = static_cast<int>(count);
            tables.places[index] = static_cast<int>(at_bytes);
            tables.types[index] = mpi_type_of(dtype);
        } else {
            tables.counts[index] = 1;
            tables.types[index] =
                tables.made.emplace_back(type_of_part(dtype, count, at_bytes, most_));
        }
    }

    MPI_Comm comm_;
    int rank_;
    int size_;
    std::size_t most_;
};

}}} // namespace joinable::v0::detail
