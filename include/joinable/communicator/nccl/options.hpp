// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <optional>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 {

/// How an NCCL communicator behaves. The same on all ranks, except streams and devices.
struct NcclOptions {
    /// The stream on which the caller makes and uses data, until set_stream(). None: the legacy
    /// default stream, or the stream given to NcclCommunicatorRef.
    std::optional<cudaStream_t> stream = {};
    std::chrono::nanoseconds deadline = default_deadline; ///< of every wait of the host
    /// Before each collective, ranks compare over the control communicator what they are about to
    /// do, and all throw Mismatch if it differs. This finds mistakes; it costs a host round trip
    /// per collective.
    /// JOINABLE_CHECK=collectives turns it on, too. Ranks agree on it when they make a communicator.
    bool check = false;
    std::optional<int> device = {}; ///< made current; none: the current one is used
    ncclConfig_t config =
        NCCL_CONFIG_INITIALIZER; ///< for a handle that this library creates; `blocking` is ignored
};

}} // namespace joinable::v0
