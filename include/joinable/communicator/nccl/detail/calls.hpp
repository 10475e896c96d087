// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The bytes of a number. A dtype uses as many as it has.
using NcclScalar = std::array<std::byte, 8>;

/// `value` rounded to a floating-point dtype.
[[nodiscard]] inline NcclScalar nccl_scalar(DType dtype, double value) {
    NcclScalar scalar{};
    visit_floating(dtype, [&]<class T>(std::type_identity<T>) {
        if constexpr (sizeof(T) == 2) {
            T const rounded{static_cast<float>(value)};
            std::memcpy(&scalar, &rounded, sizeof(T));
        } else {
            auto const rounded = static_cast<T>(value);
            std::memcpy(&scalar, &rounded, sizeof(T));
        }
    });
    return scalar;
}

/// A sum that multiplies each rank's buffer by that rank's factor. NCCL reads the factor during
/// construction. The object is not needed after the function that takes it has returned.
class NcclScaledSum {
public:
    /// The factor is rounded to the dtype, a floating-point one. NCCL must have launched all
    /// earlier calls.
    NcclScaledSum(ncclComm_t comm, DType dtype, double factor) : comm_{comm} {
        NcclScalar scalar = nccl_scalar(dtype, factor);
        result_ = ncclRedOpCreatePreMulSum(
            &op_, scalar.data(), nccl_type(dtype), ncclScalarHostImmediate, comm
        );
    }
    /// NCCL reads the factor from device memory each time the collective runs.
    NcclScaledSum(ncclComm_t comm, DType dtype, void* factor) : comm_{comm} {
        result_ = ncclRedOpCreatePreMulSum(&op_, factor, nccl_type(dtype), ncclScalarDevice, comm);
    }
    NcclScaledSum(NcclScaledSum const&) = delete;
    NcclScaledSum& operator=(NcclScaledSum const&) = delete;
    ~NcclScaledSum() {
        if (result_ == ncclSuccess) {
            static_cast<void>(ncclRedOpDestroy(op_, comm_));
        }
    }

    /// Whether NCCL has made the operation.
    [[nodiscard]] ncclResult_t result() const noexcept { return result_; }
    [[nodiscard]] ncclRedOp_t op() const noexcept { return op_; }

private:
    ncclComm_t comm_;
    ncclRedOp_t op_ = ncclSum;
    ncclResult_t result_;
};

/// Collectives as NCCL calls on one handle and one stream. Each member returns the worst result of
/// its calls.
class NcclCalls {
public:
    NcclCalls(ncclComm_t comm, cudaStream_t stream, int size) noexcept
        : comm_{comm}, stream_{stream}, size_{size} {}

    /// @pre the request is not a barrier, which NCCL lacks, and NCCL has its operation.
    [[nodiscard]] ncclResult_t collective(Request const& request) const {
        Descriptor const& signature = request.signature;
        void const* const in = request.in.data;
        void* const out = request.out.data;
        std::size_t const count = signature.count * reals_in(signature.dtype);
        ncclDataType_t const type = nccl_type(signature.dtype);
        switch (signature.collective) {
        case Collective::all_reduce:
            return ncclAllReduce(
                in, out, count, type, nccl_op(signature.dtype, signature.op), comm_, stream_
            );
        case Collective::scaled_all_reduce: return scaled_all_reduce(request.out, signature.factor);
        case Collective::reduce: {
            void* const data = const_cast<void*>(in); // in place; only the root writes
            ncclRedOp_t const op = nccl_op(signature.dtype, signature.op);
            return ncclReduce(data, data, count, type, op, signature.root, comm_, stream_);
        }
        case Collective::broadcast: // in place; the root only reads
            return ncclBroadcast(out, out, count, type, signature.root, comm_, stream_);
        case Collective::all_gather:
            return signature.has_counts ? exchange(request, Sends::same)
                                        : ncclAllGather(in, out, count, type, comm_, stream_);
        case Collective::reduce_scatter:
            return reduce_parts(request, nccl_op(signature.dtype, signature.op));
        case Collective::scaled_reduce_scatter: {
            NcclScaledSum const sum{comm_, real_of(signature.dtype), signature.factor};
            return sum.result() != ncclSuccess ? sum.result()
                   : size_ == 1                ? scale_alone(in, as_reals(request.out), sum.op())
                                               : reduce_parts(request, sum.op());
        }
        case Collective::gather: return exchange(request, Sends::same);
        default: return exchange(request, Sends::parts);
        }
    }

    /// The factor is a number, or the address in device memory at which it will be.
    template <class Factor>
    [[nodiscard]] ncclResult_t scaled_all_reduce(Buffer elements, Factor factor) const {
        Buffer const buffer = as_reals(elements);
        NcclScaledSum const sum{comm_, buffer.dtype, factor};
        ncclDataType_t const type = nccl_type(buffer.dtype);
        return sum.result() != ncclSuccess ? sum.result()
               : size_ == 1
                   ? scale_alone(buffer.data, buffer, sum.op())
                   : ncclAllReduce(
                         buffer.data, buffer.data, buffer.count, type, sum.op(), comm_, stream_
                     );
    }

    [[nodiscard]] ncclResult_t send(ConstBuffer buffer, int to) const {
        std::size_t const count = buffer.count * reals_in(buffer.dtype);
        return ncclSend(buffer.data, count, nccl_type(buffer.dtype), to, comm_, stream_);
    }
    [[nodiscard]] ncclResult_t receive(Buffer buffer, int from) const {
        std::size_t const count = buffer.count * reals_in(buffer.dtype);
        return ncclRecv(buffer.data, count, nccl_type(buffer.dtype), from, comm_, stream_);
    }

private:
    /// A scaled sum of one rank. NCCL 2.19 to 2.29.6 cut it for at most 32 blocks, one for each 16 KiB,
    /// and lose elements at the end unless all blocks get the same number (nccl #1950). So a second
    /// call takes what exceeds a multiple of 16 KiB.
    [[nodiscard]] ncclResult_t scale_alone(void const* in, Buffer out, ncclRedOp_t op) const {
        std::size_t const rest = out.count % ((std::size_t{16} << 10U) / size_of(out.dtype));
        auto const scale = [&](std::size_t begin, std::size_t count) {
            std::size_t const offset = begin * size_of(out.dtype);
            return ncclAllReduce(
                static_cast<std::byte const*>(in) + offset,
                static_cast<std::byte*>(out.data) + offset,
                count,
                nccl_type(out.dtype),
                op,
                comm_,
                stream_
            );
        };
        std::size_t const even = out.count - rest;
        ncclResult_t const result = even == 0 ? ncclSuccess : scale(0, even);
        return rest == 0 || is_error(result) ? result : scale(even, rest);
    }

    /// Whether a rank sends each rank its own part, or the same data.
    enum class Sends : bool { parts, same };

    /// Runs `call(rank)` for each rank, in one NCCL group.
    template <class Call>
    [[nodiscard]] ncclResult_t for_each_rank(Call const& call) const {
        ncclResult_t worst = ncclGroupStart();
        auto const note = [&](ncclResult_t result) {
            if (is_error(result) && !is_error(worst)) {
                worst = result;
            }
        };
        for (int rank = 0; rank < size_; ++rank) {
            call(rank, note);
        }
        note(ncclGroupEnd());
        return worst;
    }

    /// A message to each rank and one from each rank.
    [[nodiscard]] ncclResult_t exchange(Request const& request, Sends what) const {
        std::size_t const element = size_of(real_of(request.signature.dtype));
        std::size_t const reals = reals_in(request.signature.dtype);
        ncclDataType_t const type = nccl_type(request.signature.dtype);
        auto const* from = static_cast<std::byte const*>(request.in.data);
        auto* to = static_cast<std::byte*>(request.out.data);
        return for_each_rank([&](int peer, auto const& note) {
            std::size_t const sent = reals * request.sends[peer];
            std::size_t const expected = reals * request.expects[peer];
            if (sent != 0) {
                note(ncclSend(from, sent, type, peer, comm_, stream_));
            }
            if (expected != 0) {
                note(ncclRecv(to, expected, type, peer, comm_, stream_));
            }
            from += what == Sends::parts ? sent * element : 0;
            to += expected * element;
        });
    }
    /// A reduction to each rank. NCCL's own needs equal parts.
    [[nodiscard]] ncclResult_t reduce_parts(Request const& request, ncclRedOp_t op) const {
        Descriptor const& signature = request.signature;
        auto const* part = static_cast<std::byte const*>(request.in.data);
        if (!signature.has_counts) {
            void* const out = request.out.data;
            ncclDataType_t const type = nccl_type(signature.dtype);
            std::size_t const count = signature.count * reals_in(signature.dtype);
            return ncclReduceScatter(part, out, count, type, op, comm_, stream_);
        }
        return for_each_rank([&](int root, auto const& note) {
            if (std::size_t const count = request.sends[root]; count != 0) {
                note(ncclReduce(
                    part,
                    request.out.data,
                    count * reals_in(signature.dtype),
                    nccl_type(signature.dtype),
                    op,
                    root,
                    comm_,
                    stream_
                ));
                part += count * size_of(signature.dtype);
            }
        });
    }

    ncclComm_t comm_;
    cudaStream_t stream_;
    int size_;
};

}}} // namespace joinable::v0::detail
