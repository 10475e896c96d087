// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/detail/setup.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// Borrows an engine's own NCCL communicator. See NcclCollectives. Nobody else may use the handle
/// while this object lives. If a rank fails before this object has ended on all ranks, the handle
/// is aborted, which frees it. An engine therefore calls give_back(), which returns the handle if
/// there is one left to destroy.
class NcclCommunicatorRef : public NcclCollectives {
public:
    /// Collective; blocks. `comm` has the ranks of `control` in the same order and was made with
    /// config.blocking = 0: a blocking one could block the host for ever. Its collectives run on
    /// `stream`. `control` is as for NcclCommunicator. All three must outlive this object.
    /// @throws Mismatch  as NcclCommunicator.
    /// @throws ContractViolation  the handle is null or blocking, or its ranks or its device differ
    ///                            from `control` and the current device; ranks where it is fine
    ///                            then throw PeerFailed.
    template <Communicator Control>
    NcclCommunicatorRef(
        Control& control, ncclComm_t comm, cudaStream_t stream, NcclOptions const& options = {}
    )
        : NcclCollectives{detail::nccl_control<Control&>(control), options} {
        rank_.set_caller(options.stream.value_or(stream));
        detail::prepare_together(rank_, [&] {
            detail::prepare_device(rank_, options, stream);
            if (comm == nullptr) {
                throw ContractViolation{
                    "an NCCL communicator is lent as a handle, but was given a null pointer"
                };
            }
        });
        rank_.adopt(comm);
        try {
            rank_.finish_call("waits for what NCCL does with the communicator");
            detail::prepare_together(rank_, [&] {
                check_members(comm);
                detail::require_non_blocking(
                    rank_,
                    "make the lent one by ncclCommInitRankConfig with config.blocking = 0, "
                    "and do not set NCCL_COMM_BLOCKING"
                );
            });
            detail::share_arrivals(rank_);
        } catch (...) {
            rank_.close(false, false);
            throw;
        }
    }

    /// Collective. Waits for the other ranks; aborts at the deadline, or at once during unwinding.
    /// Otherwise the owner may use the handle again.
    ~NcclCommunicatorRef() {
        if (is_lent_) {
            close(false);
        }
    }

    /// Collective. Does early what the destructor does; call nothing else afterwards. Returns the
    /// handle to its owner, or null if a failure of any rank has freed it.
    [[nodiscard]] ncclComm_t give_back() noexcept {
        is_lent_ = false;
        return close(false);
    }

private:
    void check_members(ncclComm_t comm) {
        expect("rank", rank(), asked(ncclCommUserRank, "ncclCommUserRank", comm));
        expect("number of ranks", size(), asked(ncclCommCount, "ncclCommCount", comm));
        expect("device", device(), asked(ncclCommCuDevice, "ncclCommCuDevice", comm));
    }
    template <class Ask>
    static int asked(Ask ask, std::string_view call, ncclComm_t comm) {
        int found = -1;
        detail::check_nccl(ask(comm, &found), call, comm);
        return found;
    }
    static void expect(std::string_view what, int expected, int found) {
        if (found != expected) {
            throw ContractViolation{detail::concat(
                "the NCCL communicator that is lent has ",
                what,
                " ",
                found,
                ", but ",
                expected,
                " was expected: it must have the ranks of the control communicator, and its device "
                "be the current one"
            )};
        }
    }

    bool is_lent_ = true;
};

}} // namespace joinable::v0
