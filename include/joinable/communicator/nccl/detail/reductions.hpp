// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/posting.hpp>
#include <joinable/communicator/nccl/detail/scaled_sum.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable::inline v0::detail {

/// The collectives that NCCL has as such: one call of it each, but for a reduce-scatter by counts.
class NcclReductions : public NcclPosting {
public:
    /// In place.
    NcclWork all_reduce(Buffer buffer, ReduceOp op) {
        check(buffer, op);
        ncclRedOp_t const how = nccl_op(op);
        return post(
            {Collective::all_reduce, buffer.dtype, op, 0, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclAllReduce(
                    buffer.data, buffer.data, buffer.count, type(buffer), how, comm, stream
                );
            }
        );
    }

    /// The sum of `factor` times the buffer, of a floating-point dtype, in place. Each rank has a factor
    /// of its own, which is rounded to the dtype. On all ranks or none.
    NcclWork all_reduce(Buffer buffer, ReduceOp op, double factor) {
        check(buffer, op);
        if (op != ReduceOp::sum || !is_floating_point(buffer.dtype)) {
            throw ContractViolation{concat(
                "an all-reduce with a factor is a sum of floating-point numbers, but was given ",
                name_of(op),
                " of ",
                name_of(buffer.dtype),
                "; leave the factor out, or convert the buffer"
            )};
        }
        return post(
            {Collective::scaled_all_reduce, buffer.dtype, op, 0, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                NcclScaledSum const sum{comm, buffer.dtype, factor};
                return sum.result() != ncclSuccess ? sum.result()
                                                   : ncclAllReduce(
                                                         buffer.data,
                                                         buffer.data,
                                                         buffer.count,
                                                         type(buffer),
                                                         sum.op(),
                                                         comm,
                                                         stream
                                                     );
            }
        );
    }

    /// In place at the root; the other buffers keep what they have.
    NcclWork reduce(Buffer buffer, ReduceOp op, int root) {
        check(buffer, op);
        check_root(root, size());
        ncclRedOp_t const how = nccl_op(op);
        return post(
            {Collective::reduce, buffer.dtype, op, root, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclReduce(
                    buffer.data, buffer.data, buffer.count, type(buffer), how, root, comm, stream
                );
            }
        );
    }

    NcclWork broadcast(Buffer buffer, int root) {
        check(buffer);
        check_root(root, size());
        return post(
            {Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclBroadcast(
                    buffer.data, buffer.data, buffer.count, type(buffer), root, comm, stream
                );
            }
        );
    }

    /// `in` is `size()` times `out`; `out` may be this rank's part of `in`.
    NcclWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        check_share(out, in, size());
        check_place(out, in, out.count * index());
        check(in, op);
        check(out);
        ncclRedOp_t const how = nccl_op(op);
        return post(
            {Collective::reduce_scatter, in.dtype, op, 0, out.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclReduceScatter(in.data, out.data, out.count, type(in), how, comm, stream);
            }
        );
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    NcclWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Counts counts) {
        check_counts(counts, out, in, rank(), size());
        check_place(out, in, offset_of(counts, index()));
        check(in, op);
        check(out);
        ncclRedOp_t const how = nccl_op(op);
        std::vector<std::size_t> const expects(ranks(), out.count);
        return post(
            by_counts({Collective::reduce_scatter, in.dtype, op}),
            [&](ncclComm_t comm, cudaStream_t stream) { // a reduction to each rank, as one
                return grouped([&](auto const& note) {
                    auto const* part = static_cast<std::byte const*>(in.data);
                    for (std::size_t root = 0; root < counts.size(); ++root) {
                        if (counts[root] != 0) {
                            note(ncclReduce(
                                part,
                                out.data,
                                counts[root],
                                type(in),
                                how,
                                static_cast<int>(root),
                                comm,
                                stream
                            ));
                        }
                        part += counts[root] * size_of(in.dtype);
                    }
                });
            },
            counts,
            expects
        );
    }

protected:
    using NcclPosting::NcclPosting;
    ~NcclReductions() = default;
};

} // namespace joinable::inline v0::detail
