// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/nccl/detail/posting.hpp>
#include <joinable/communicator/nccl/detail/reductions.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable::inline v0::detail {

/// Messages, and the collectives that are made of messages: those in which ranks have parts, of their own
/// sizes or with a root.
class NcclExchanges : public NcclReductions {
public:
    /// `out` is `size()` times `in`; `in` may be this rank's part of `out`.
    NcclWork all_gather(ConstBuffer in, Buffer out) {
        check_share(in, out, size());
        check_place(in, out, in.count * index());
        check(in);
        check(out);
        return post(
            {Collective::all_gather, in.dtype, ReduceOp::sum, 0, in.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclAllGather(in.data, out.data, in.count, type(in), comm, stream);
            }
        );
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    NcclWork all_gather(ConstBuffer in, Buffer out, Counts counts) {
        check_counts(counts, in, out, rank(), size());
        check_place(in, out, offset_of(counts, index()));
        std::vector<std::size_t> const sends(ranks(), in.count);
        return exchange(
            by_counts({Collective::all_gather, in.dtype}), in, sends, Parts::same, out, counts
        );
    }

    /// At the root `out` is `size()` times `in`, and `in` may be its part; elsewhere `out` is not
    /// looked at.
    NcclWork gather(ConstBuffer in, Buffer out, int root) {
        check_memory(in);
        check_root(root, size());
        if (rank() == root) {
            check_share(in, out, size());
            check_place(in, out, in.count * index());
        }
        std::vector<std::size_t> const counts(rank() == root ? ranks() : 0, in.count);
        return gather_parts(in, out, root, counts, false);
    }
    /// Rank r contributes counts[r] elements; only the root's counts are looked at.
    NcclWork gather(ConstBuffer in, Buffer out, int root, Counts counts) {
        check_memory(in);
        check_root(root, size());
        if (rank() == root) {
            check_counts(counts, in, out, rank(), size());
            check_place(in, out, offset_of(counts, index()));
        }
        return gather_parts(in, out, root, counts, true);
    }

    /// At the root `in` is `size()` times `out`, and `out` may be its part; elsewhere `in` is not
    /// looked at.
    NcclWork scatter(ConstBuffer in, Buffer out, int root) {
        check_memory(out);
        check_root(root, size());
        if (rank() == root) {
            check_share(out, in, size());
            check_place(out, in, out.count * index());
        }
        std::vector<std::size_t> const counts(rank() == root ? ranks() : 0, out.count);
        return scatter_parts(in, out, root, counts, false);
    }
    /// Rank r receives counts[r] elements; only the root's counts are looked at.
    NcclWork scatter(ConstBuffer in, Buffer out, int root, Counts counts) {
        check_memory(out);
        check_root(root, size());
        if (rank() == root) {
            check_counts(counts, out, in, rank(), size());
            check_place(out, in, offset_of(counts, index()));
        }
        return scatter_parts(in, out, root, counts, true);
    }

    /// Part r of `in` goes to rank r, where it is the part of this rank in `out`. Both have the same
    /// count, a multiple of `size()`; they do not overlap.
    NcclWork all_to_all(ConstBuffer in, Buffer out) {
        check_parts(in, out, size());
        check_apart(in, out);
        std::vector<std::size_t> const counts(ranks(), in.count / ranks());
        return exchange(
            {Collective::all_to_all, in.dtype, ReduceOp::sum, 0, in.count / ranks()},
            in,
            counts,
            Parts::own,
            out,
            counts
        );
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    NcclWork all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) {
        check_same_dtype(in, out);
        check_counts(counts_in, in, size());
        check_counts(counts_out, out, size());
        check_apart(in, out);
        return exchange(
            by_counts({Collective::all_to_all, in.dtype}),
            in,
            counts_in,
            Parts::own,
            out,
            counts_out
        );
    }

    /// Not collective, and not compared by `check`. NCCL has no tags: between two ranks, messages meet
    /// in the order of the calls, whatever their tags, and two ranks that send to each other do it in
    /// a group().
    NcclWork send(ConstBuffer buffer, int to, [[maybe_unused]] int tag = 0) {
        check(buffer);
        check_rank("destination", to, size());
        check_other_side(to);
        return message([&](ncclComm_t comm, cudaStream_t stream) {
            return ncclSend(buffer.data, buffer.count, type(buffer), to, comm, stream);
        });
    }
    /// The other side of send(): the same count and dtype, which NCCL does not compare.
    NcclWork receive(Buffer buffer, int from, [[maybe_unused]] int tag = 0) {
        check(buffer);
        check_rank("source", from, size());
        check_other_side(from);
        return message([&](ncclComm_t comm, cudaStream_t stream) {
            return ncclRecv(buffer.data, buffer.count, type(buffer), from, comm, stream);
        });
    }

protected:
    using NcclReductions::NcclReductions;
    ~NcclExchanges() = default;

private:
    enum class Parts : bool {
        own,
        same
    }; ///< what a rank sends: other elements to each, or the same

    void check_other_side(int peer) const {
        if (peer == rank() && !rank_.has_group()) {
            throw ContractViolation{
                "with NCCL a message of a rank to itself needs its other side in the same group: "
                "call send() and receive() in a group()"
            };
        }
    }
    /// sends[r] elements of `in` to each rank r, expects[r] from it: messages, as one.
    NcclWork exchange(
        Descriptor const& said,
        ConstBuffer in,
        Counts sends,
        Parts parts,
        Buffer out,
        Counts expects
    ) {
        check(in);
        check(out);
        auto const call = [&](ncclComm_t comm, cudaStream_t stream) {
            return grouped([&](auto const& note) {
                auto const* from = static_cast<std::byte const*>(in.data);
                auto* to = static_cast<std::byte*>(out.data);
                for (std::size_t peer = 0; peer < ranks(); ++peer) {
                    auto const number = static_cast<int>(peer);
                    if (sends[peer] != 0) {
                        note(ncclSend(from, sends[peer], type(in), number, comm, stream));
                    }
                    if (expects[peer] != 0) {
                        note(ncclRecv(to, expects[peer], type(out), number, comm, stream));
                    }
                    from += parts == Parts::own ? sends[peer] * size_of(in.dtype) : 0;
                    to += expects[peer] * size_of(out.dtype);
                }
            });
        };
        return post(said, call, sends, expects);
    }
    /// `counts` are the root's.
    NcclWork gather_parts(ConstBuffer in, Buffer out, int root, Counts counts, bool has_counts) {
        std::vector<std::size_t> sends(ranks());
        std::vector<std::size_t> expects(ranks());
        sends[static_cast<std::size_t>(root)] = in.count;
        if (rank() == root) {
            std::copy(counts.begin(), counts.end(), expects.begin());
        } else {
            out = {};
        }
        Descriptor said{Collective::gather, in.dtype, ReduceOp::sum, root, in.count};
        said.has_counts = has_counts;
        out.dtype = in.dtype;
        return exchange(said, in, sends, Parts::same, out, expects);
    }
    NcclWork scatter_parts(ConstBuffer in, Buffer out, int root, Counts counts, bool has_counts) {
        std::vector<std::size_t> sends(ranks());
        std::vector<std::size_t> expects(ranks());
        expects[static_cast<std::size_t>(root)] = out.count;
        if (rank() == root) {
            std::copy(counts.begin(), counts.end(), sends.begin());
        } else {
            in = {};
        }
        Descriptor said{Collective::scatter, out.dtype, ReduceOp::sum, root, out.count};
        said.has_counts = has_counts;
        in.dtype = out.dtype;
        return exchange(said, in, sends, Parts::own, out, expects);
    }
};

} // namespace joinable::inline v0::detail
