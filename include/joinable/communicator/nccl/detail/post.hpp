// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <optional>
#include <string_view>

#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/calls.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Compares the calls that all ranks are about to make. Collective over the control communicator;
/// blocks.
/// @throws Mismatch  on all ranks, after aborting.
inline void agree_on_collective(NcclRank& rank, Request const& mine) {
    std::optional<AbortReason> reason;
    rank.over_control([&](NcclControl& control) {
        Comparison comparison;
        comparison.begin(mine.signature, control.rank(), control.size());
        do {
            control.sum(comparison.words());
            reason = comparison.difference();
        } while (!reason && comparison.go_on(mine.sends, mine.expects));
    });
    if (reason) {
        rank.fail(*reason);
    }
}

/// Submits calls of NCCL after the work on the stream `after`. `collectives` is the number of
/// collectives among them.
template <class Call>
[[nodiscard]] NcclAwaited post_calls(
    NcclRank& rank,
    std::uint64_t collectives,
    std::string_view what,
    cudaStream_t after,
    Call const& call
) {
    return {&rank.post(collectives, after, [&] {
        rank.check(call(NcclCalls{rank.handle(), rank.stream(), rank.size()}), what);
    })};
}

/// Starts a collective after the work on the stream `after`. With `checks` ranks compare it first.
/// @throws ContractViolation  see NcclCollectives; nothing was submitted.
[[nodiscard]] inline NcclAwaited
post_collective(NcclRank& rank, Request const& request, bool checks, cudaStream_t after) {
    Descriptor const& signature = request.signature;
    rank.check_memory(request.in);
    if (request.out.data != request.in.data || request.out.count != request.in.count) {
        rank.check_memory(request.out);
    }
    if (signature.is_reduction()) {
        static_cast<void>(nccl_op(signature.dtype, signature.op)); // throws where NCCL has none
    }
    if (checks) {
        agree_on_collective(rank, request);
    }
    return post_calls(rank, 1, name_of(signature.collective), after, [&](NcclCalls const& nccl) {
        return nccl.collective(request);
    });
}

}}} // namespace joinable::v0::detail
