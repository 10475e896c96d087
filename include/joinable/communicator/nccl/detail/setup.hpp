// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string_view>
#include <vector>

#include <unistd.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/failure_report.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/deadline.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// The joint preparation of ranks before they have an NCCL communicator. Everything is collective
/// over the control communicator.

namespace joinable { inline namespace v0 { namespace detail {

/// Runs `local()` on every rank. Ranks on which it throws throw that error. The others throw
/// PeerFailed with the text of the lowest such rank. The control communicator stays
/// usable.
template <class Local>
void prepare_together(NcclRank& rank, Local const& local) {
    std::exception_ptr const error = exception_of(local);
    throw_if_any_failed(
        error,
        [&] {
            std::optional<AbortReason> failure;
            rank.over_control([&](NcclControl& control) { // it would end with that error
                std::array<std::uint64_t, 1> failed{error ? 1U : 0U};
                control.sum(failed);
                if (failed[0] != 0) {
                    failure =
                        FailureReport{control}.failure(error != nullptr, failure_of(error).message);
                }
            });
            return failure;
        },
        [](AbortReason const&) {} // over_control() has told the others
    );
}

/// Collective. Whether ranks compare collectives: all have that option, or JOINABLE_CHECK asks for it.
/// @throws Mismatch  ranks differ; ContractViolation  the variable has an unknown word.
[[nodiscard]] inline bool agree_on_check(NcclRank& rank, NcclOptions const& options) {
    auto const share = [&](std::uint64_t word) {
        std::vector<std::uint64_t> words;
        rank.over_control([&](NcclControl& control) { words = control.gather({&word, 1}); });
        return words;
    };
    return agree_to_compare(options.check, "NcclOptions::check", share, rank.is_renumbered());
}

/// The number of lower ranks on this machine.
[[nodiscard]] inline int local_rank(NcclRank& rank) {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    std::uint64_t const digest = Hash{}.add(std::string_view{name.data()}).value();
    std::vector<std::uint64_t> digests;
    rank.over_control([&](NcclControl& control) { digests = control.gather({&digest, 1}); });
    return static_cast<int>(std::count(digests.begin(), digests.begin() + rank.rank(), digest));
}

/// The objects that every rank needs before it meets the others. Call it by prepare_together.
inline void
prepare_device(NcclRank& rank, NcclOptions const& options, std::optional<cudaStream_t> stream) {
    if (options.device) {
        check_cuda(cudaSetDevice(*options.device), concat("cudaSetDevice(", *options.device, ")"));
    }
    rank.use_device(stream);
    check_nccl_version();
}

/// Whether NCCL returns before it has finished a call on the rank's communicator. NCCL does not
/// report how a communicator was made. But ending a group that is not empty reports "in progress",
/// unless the communicator is blocking. The group here has a message of this rank to itself, from
/// and to one place. NCCL omits that message (before 2.22 it is an empty kernel). Does not wait for
/// other ranks.
/// @throws CommunicationError  NCCL refuses; after aborting.
[[nodiscard]] inline bool is_non_blocking(NcclRank& rank) {
    ncclComm_t const comm = rank.handle();
    cudaStream_t const stream = rank.stream();
    ncclResult_t const begun = ncclGroupStart();
    ncclResult_t const sent = ncclSend(nullptr, 0, ncclInt8, rank.rank(), comm, stream);
    ncclResult_t const received = ncclRecv(nullptr, 0, ncclInt8, rank.rank(), comm, stream);
    ncclResult_t const ended = ncclGroupEnd();
    for (ncclResult_t const result : {begun, sent, received, ended}) {
        rank.check(result, "a message of a rank to itself");
    }
    rank.finish_call("is asked how it was made");
    return ended == ncclInProgress;
}

/// Call it by prepare_together.
/// @throws ContractViolation
inline void require_non_blocking(NcclRank& rank, std::string_view advice) {
    if (!is_non_blocking(rank)) {
        throw ContractViolation{concat(
            "the NCCL communicator is blocking, so a rank that never comes would block the others "
            "for ever: ",
            advice
        )};
    }
}

/// For missing().
inline void share_arrivals(NcclRank& rank) {
    rank.over_control([&](NcclControl& control) {
        rank.share_arrivals(
            control.share(static_cast<std::size_t>(rank.size()) * NcclDeadline::line_bytes)
        );
    });
}

}}} // namespace joinable::v0::detail
