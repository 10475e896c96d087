// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/launching.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank of an NCCL communicator, that of an engine or its own, from beginning to end: what its
/// collectives, works and groups have in common.
class NcclRank final : public NcclLaunching {
public:
    using NcclLaunching::NcclLaunching;

    /// Takes the current device. Collectives run on `stream`; none: on one of its own.
    void use_device(std::optional<cudaStream_t> stream) {
        int device = -1;
        check_cuda(
            cudaGetDevice(&device),
            "an NCCL rank needs a GPU that this process can use, but cudaGetDevice"
        );
        set_device(device);
        use_stream(stream);
    }

    /// Collective. Frees the handle, if it is to, after what is under way on all ranks, within the
    /// deadline: later it aborts, and at once if `is_unwinding`. Returns the handle if it is another
    /// one's and lives.
    ncclComm_t close(bool is_unwinding, bool owns_handle) noexcept {
        release_kernels();
        try {
            if (is_unwinding) {
                abort_for_exception("the scope of its communicator");
            } else if (!is_aborted()) {
                settle();
                if (owns_handle) {
                    check(ncclCommFinalize(handle()), "ncclCommFinalize");
                    finish_call("leaves the communicator");
                }
                // A rank that leaves the control communicator looks to the others like one that failed.
                over_control([](NcclControl& control) { control.barrier(); });
                // NCCL destroys no handle that is not ready, as where the network failed meanwhile: it
                // leaves a group open on this thread instead.
                if (owns_handle && async_state() == ncclSuccess) {
                    static_cast<void>(ncclCommDestroy(give_up()));
                }
            } else {
                poll();
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): the failure has ended it on all ranks
        }
        if (owns_handle && handle() != nullptr) { // revoked, or not ready
            static_cast<void>(ncclCommAbort(handle()));
        }
        ncclComm_t const left = give_up();
        return owns_handle ? nullptr : left;
    }
};

}}} // namespace joinable::v0::detail
