// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/device/cuda/device.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The device of a rank, on the caller's stream. The host waits for it as for a collective: the deadline,
/// an error of NCCL or an abort of any rank ends the wait.
class NcclDevice final : public CudaDevice {
public:
    explicit NcclDevice(NcclRank& rank) noexcept
        : CudaDevice{rank.device(), rank.caller(), rank.caller()}, rank_{rank} {
        set_deadline(rank.deadline());
    }

private:
    void wait_for_stream() override {
        rank_.require_no_error();
        rank_.wait_for(stream());
    }

    NcclRank& rank_;
};

}}} // namespace joinable::v0::detail
