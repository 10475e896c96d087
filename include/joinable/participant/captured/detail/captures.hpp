// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <type_traits>

#include <joinable/fwd.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Explains in one sentence over which communicators a CapturedStep runs. A separate header,
/// because it needs no header of NCCL.
template <class Comm>
consteval bool models_captured_step() {
    constexpr bool is_nccl = std::is_base_of_v<NcclCollectives, Comm>;
    static_assert(
        is_nccl,
        "CapturedStep: the communicator has to be an NcclCommunicator or an NcclCommunicatorRef, "
        "whose collectives a CUDA graph can hold; over another one use DistributedDataParallel"
    );
    return is_nccl;
}

}}} // namespace joinable::v0::detail
