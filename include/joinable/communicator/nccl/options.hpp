// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <optional>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 {

/// How an NCCL communicator behaves. The same on all ranks, but for streams and devices.
struct NcclOptions {
    /// Where the caller makes and uses data, until set_stream(). None: the legacy default stream, or the
    /// one that a NcclCommunicatorRef was given.
    std::optional<cudaStream_t> stream = {};
    std::chrono::nanoseconds deadline = default_deadline; ///< of every wait of the host
    /// Before each collective, ranks compare over the control communicator what they are about to do,
    /// and throw Mismatch on all of them: a host round trip each, for finding mistakes.
    bool check = false;
    /// A failure stops what is under way, but leaves the handle to ncclCommShrink, ncclCommSplit or
    /// ncclCommDestroy, which are the caller's. Needs NCCL 2.28.7.
    ///
    /// Leave it out with NCCL 2.28.9 and 2.30.7, and make a new communicator after a failure. By the
    /// sources of these versions, ncclCommRevoke frees the record of an operation that NCCL is still
    /// launching, or that has failed. The handle keeps its pointer to the record, and a later look at
    /// the handle's state reads freed memory. Without `revoke` the handle is aborted, which frees both.
    bool revoke = false;
    std::optional<int> device = {}; ///< made the current one; none: the current one is taken
    ncclConfig_t config =
        NCCL_CONFIG_INITIALIZER; ///< of an own communicator; its `blocking` is ignored
};

}} // namespace joinable::v0
