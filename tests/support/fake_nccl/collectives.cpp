// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <support/fake_nccl/arithmetic.hpp>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/rendezvous.hpp>
#include <support/fake_nccl/windows.hpp>
#include <support/fake_nccl/world.hpp>

using namespace joinable_tests::fake_nccl;

namespace {

ncclResult_t in_group(ncclResult_t result) {
    if (result != ncclSuccess && group.depth > 0) {
        group.error = result;
    }
    return result;
}

/// What NCCL looks at before it takes an operation, and what is undefined there.
ncclResult_t check(Op& op, Member const& member, char const* function) {
    if (auto const result = ready(member); result != ncclSuccess) {
        return result;
    }
    if (member.is_finalized) {
        die(std::string{function} + " on a communicator that was finalized");
    }
    auto const ranks = static_cast<std::size_t>(member.world->size);
    if (op.peer < 0 || op.peer >= member.world->size) {
        return refuse(ncclInvalidArgument, std::string{function} + " : invalid root");
    }
    if (op.op >= ncclNumOps) {
        auto const found = member.factors.find(op.op);
        if (found == member.factors.end() || found->second.type != op.type) {
            die(std::string{function} + " was given an operator of another type, or none");
        }
        op.factor = found->second.value;
        op.scalar = found->second.scalar;
        op.is_scaled = true;
        op.op = ncclSum;
    }
    std::size_t const part = op.count * size_of(op.type);
    bool const is_root = op.peer == member.rank;
    bool const reads = op.kind != Kind::receive && (op.kind != Kind::broadcast || is_root);
    bool const writes = op.kind != Kind::send && (op.kind != Kind::reduce || is_root);
    check_memory(op.in, reads ? part * (op.kind == Kind::reduce_scatter ? ranks : 1) : 0, function);
    check_memory(op.out, writes ? part * (op.kind == Kind::all_gather ? ranks : 1) : 0, function);
    return ncclSuccess;
}

/// The elements of a scaled sum that NCCL before 2.29.7 writes on one rank: its kernel rounds down where it cuts
/// them into runs for its blocks (device/onerank.cu:25).
std::size_t written_on_one_rank(Op const& op) {
    std::size_t const element = size_of(op.type);
    std::size_t const pack = 16 / element;
    std::size_t const blocks =
        std::min(std::size_t{32}, (op.count * element + (16U << 10U) - 1) / (16U << 10U));
    std::size_t const run = (op.count / blocks + pack - 1) / pack * pack;
    return std::min(op.count, blocks * run);
}

ncclResult_t collect(Op op, ncclComm_t comm, char const* function) {
    ncclResult_t const told = begin(function);
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, function);
    op.member = comm->member;
    if (auto const result = told == ncclSuccess ? check(op, member, function) : told;
        result != ncclSuccess) {
        return in_group(poison(member, result));
    }
    if (op.count == 0 && !op.is_message()) { // of a message the others learn that it was sent
        return ncclSuccess;
    }
    if (member.world->size == 1 && !op.is_message()) { // at once, also in a group
        op.count = op.is_scaled ? written_on_one_rank(op) : op.count;
        return in_group(poison(member, put_on_stream({op})));
    }
    if (group.depth == 0) {
        return or_state(member, launch(lock, {op}, function));
    }
    group.members.push_back(comm->member);
    group.ops.push_back(std::move(op));
    return ncclSuccess;
}

} // namespace

extern "C" {

ncclResult_t ncclAllReduce(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::all_reduce, in, out, count, type, op, 0, {}, stream}, comm, "ncclAllReduce"
    );
}
ncclResult_t ncclReduce(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    int root,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect({Kind::reduce, in, out, count, type, op, root, {}, stream}, comm, "ncclReduce");
}
ncclResult_t ncclBroadcast(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::broadcast, in, out, count, type, ncclSum, root, {}, stream}, comm, "ncclBroadcast"
    );
}
ncclResult_t ncclReduceScatter(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::reduce_scatter, in, out, count, type, op, 0, {}, stream}, comm, "ncclReduceScatter"
    );
}
ncclResult_t ncclAllGather(
    void const* in,
    void* out,
    std::size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::all_gather, in, out, count, type, ncclSum, 0, {}, stream}, comm, "ncclAllGather"
    );
}
ncclResult_t ncclSend(
    void const* in,
    std::size_t count,
    ncclDataType_t type,
    int peer,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::send, in, nullptr, count, type, ncclSum, peer, {}, stream}, comm, "ncclSend"
    );
}
ncclResult_t ncclRecv(
    void* out,
    std::size_t count,
    ncclDataType_t type,
    int peer,
    ncclComm_t comm,
    cudaStream_t stream
) {
    return collect(
        {Kind::receive, nullptr, out, count, type, ncclSum, peer, {}, stream}, comm, "ncclRecv"
    );
}

} // extern "C"
