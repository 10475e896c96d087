// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

#include <joinable/communicator/nccl/detail/api.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What NCCL was given at once, a collective or a group of them, and the event behind it.
struct NcclLaunch {
    enum class State : std::uint8_t {
        open,     ///< a group that takes more
        posted,   ///< NCCL may not have put it on the stream yet: there is no event
        launched, ///< on the stream, with the event behind it
        complete, ///< the results are final
        lost,     ///< they never will be
    };
    cudaEvent_t done = nullptr;
    State state = State::open;
    int users = 0;            ///< works and tokens that refer to it
    std::uint64_t number = 0; ///< of the last collective in it; messages have none

    [[nodiscard]] bool is_settled() const noexcept {
        return state == State::complete || state == State::lost;
    }
    /// Looks at the event, and at no error.
    [[nodiscard]] bool has_run() const noexcept {
        bool const has = state == State::launched && cudaEventQuery(done) == cudaSuccess;
        static_cast<void>(cudaGetLastError()); // not ready is no error: nobody is to find one
        return has || state == State::complete;
    }
};

/// Launches that are in use, or were: so after a while none allocates.
class NcclLaunches {
public:
    NcclLaunches() = default;
    NcclLaunches(NcclLaunches const&) = delete;
    NcclLaunches& operator=(NcclLaunches const&) = delete;
    ~NcclLaunches() {
        for (auto const& launch : all_) {
            static_cast<void>(cudaEventDestroy(launch->done));
        }
    }

    /// With one user. @throws CommunicationError  there is no event to be had.
    [[nodiscard]] NcclLaunch& take() {
        for (auto const& launch : all_) {
            if (launch->users == 0 && launch->is_settled()) {
                return reset(*launch);
            }
        }
        auto launch = std::make_unique<NcclLaunch>();
        check_cuda(
            cudaEventCreateWithFlags(&launch->done, cudaEventDisableTiming), "cudaEventCreate"
        );
        all_.push_back(std::move(launch));
        return reset(*all_.back());
    }

    /// Calls f(launch) with each that may still run, in the order of creation.
    template <class F>
    void for_each_unsettled(F const& f) const {
        for (auto const& launch : all_) {
            if (!launch->is_settled()) {
                f(*launch);
            }
        }
    }

private:
    static NcclLaunch& reset(NcclLaunch& launch) noexcept {
        launch.state = NcclLaunch::State::open;
        launch.users = 1;
        launch.number = 0;
        return launch;
    }

    std::vector<std::unique_ptr<NcclLaunch>> all_;
};

}}} // namespace joinable::v0::detail
