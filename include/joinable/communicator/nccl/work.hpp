// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message on the stream of an NCCL communicator, which must outlive it.
///
/// wait() orders a stream after it; the host continues. Destroying it without a wait blocks the
/// host up to the deadline; during unwinding it aborts. After a wait, buffers may be freed in the
/// order of the stream that waits (cudaFreeAsync). test() and progress() say whether the results are
/// final.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] NcclWork
    : public detail::WorkOf<detail::NcclRank, detail::NcclAwaited> {
public:
    using WorkOf::WorkOf;

    /// Later work on the caller's stream runs after the collective. The host waits only until NCCL
    /// has launched it.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...  the reason why the communicator
    ///         ended, unless the results were final before; ContractViolation  its group is still
    ///         open.
    void wait() {
        checked([](detail::NcclRank& rank, detail::NcclAwaited& awaited) {
            rank.order_before(awaited, rank.caller());
        });
    }
    /// The same for another stream than the communicator's caller stream.
    void wait(cudaStream_t stream) {
        checked([&](detail::NcclRank& rank, detail::NcclAwaited& awaited) {
            rank.order_before(awaited, stream);
        });
    }
    /// Blocks the host until the results are final, up to the deadline.
    /// @throws as wait() does.
    void synchronize() { WorkOf::wait(); }
};

}} // namespace joinable::v0
