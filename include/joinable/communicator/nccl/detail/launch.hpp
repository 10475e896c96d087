// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One submission to NCCL, a collective or a group of them, and the event after it. Members here call
/// CUDA while a CurrentCudaDevice lives.
struct NcclLaunch {
    enum class State : std::uint8_t {
        open,     ///< a group that accepts more
        posted,   ///< possibly not on the stream yet: no event
        launched, ///< on the stream, followed by the event
        complete, ///< the results are final
        lost,     ///< they never will be final
    };
    CudaEvent done;
    State state = State::open;
    int users = 0;            ///< works and tokens that refer to it
    std::uint64_t number = 0; ///< of its last collective; messages have none

    [[nodiscard]] bool is_final() const noexcept {
        return state == State::complete || state == State::lost;
    }
    /// Call this before a wait. @throws ContractViolation
    void require_posted() const {
        if (state == State::open) {
            throw ContractViolation{
                "this work is in a group that is still open, so it cannot be waited for: end the "
                "group first"
            };
        }
    }
    /// Queries the event. Returns its error.
    cudaError_t poll() noexcept {
        if (state != State::launched) {
            return cudaSuccess;
        }
        cudaError_t const found = cudaEventQuery(done.get());
        if (found == cudaSuccess) {
            state = State::complete;
            return cudaSuccess;
        }
        return found == cudaErrorNotReady ? cudaSuccess : found;
    }
    [[nodiscard]] bool has_run() noexcept {
        static_cast<void>(poll());
        return state == State::complete;
    }
};

/// A launch as its work knows it.
struct NcclAwaited {
    NcclLaunch* launch;
    bool is_in_order = false; ///< a stream waits for it
    WaitClock polled = {};
};

class NcclLaunches;

/// The object whose group is open on this thread. NCCL has one group for all communicators of a
/// thread.
inline thread_local NcclLaunches const* grouping_launches = nullptr;

/// The submissions of one rank to NCCL. NCCL takes one submission at a time, a collective or a
/// group. At most one launch is therefore possibly not on the stream yet, and the next
/// submission waits until it is there. Launches are reused, so after a while nothing allocates.
class NcclLaunches {
public:
    NcclLaunches() = default;
    NcclLaunches(NcclLaunches const&) = delete;
    NcclLaunches& operator=(NcclLaunches const&) = delete;

    [[nodiscard]] bool has_group() const noexcept { return group_ != nullptr; }
    /// @throws ContractViolation
    void require_no_group() const {
        if (group_ != nullptr) {
            throw ContractViolation{"a group of this communicator is open, which takes collectives "
                                    "and messages only: end it first"};
        }
    }
    /// @throws ContractViolation  another rank has an open group on this thread.
    void require_no_other_group() const {
        if (grouping_launches != nullptr && grouping_launches != this) {
            throw ContractViolation{"a group of another NCCL communicator is open on this thread, "
                                    "and NCCL would put this off until it ends: end it first"};
        }
    }
    /// Null if there is none.
    [[nodiscard]] NcclLaunch const* launching() const noexcept { return launching_; }

    /// The launch for the next collective, with one more user: the open group, or a launch of its
    /// own.
    /// @throws CommunicationError  CUDA cannot create an event, or an earlier launch failed.
    [[nodiscard]] NcclLaunch& take() {
        if (group_ != nullptr) {
            ++group_->users;
            return *group_;
        }
        // wait() leaves the launch unfinished, so this asks the device. One stream runs launches
        // in order: after the first one that has not run, it need not ask about later ones.
        bool may_have_run = true;
        for (auto place = all_.begin(); place != all_.end(); ++place) {
            NcclLaunch& launch = **place;
            if (launch.users != 0) {
                continue;
            }
            if (!launch.is_final() && may_have_run) {
                check_cuda(launch.poll(), "cudaEventQuery");
                may_have_run = launch.is_final();
            }
            if (launch.is_final()) {
                std::rotate(place, place + 1, all_.end());
                return reset(launch);
            }
        }
        auto launch = std::make_unique<NcclLaunch>();
        check_cuda(make_event(launch->done), "cudaEventCreate");
        all_.push_back(std::move(launch));
        return reset(*all_.back());
    }
    /// For a launch that was taken but not submitted to NCCL.
    void give_back(NcclLaunch& launch) const noexcept {
        --launch.users;
        if (group_ == nullptr) {
            launch.state = NcclLaunch::State::lost;
        }
    }
    void count(NcclLaunch& launch, std::uint64_t collectives) noexcept {
        posted_ += collectives;
        launch.number = collectives != 0 ? posted_ : launch.number;
    }
    /// The launch has been submitted. @pre launching() is null
    void hand_over(NcclLaunch& launch) noexcept {
        launch.state = NcclLaunch::State::posted;
        launching_ = &launch;
    }
    /// NCCL has put launching() on the stream: records the event after it.
    /// @throws CommunicationError
    void record(cudaStream_t stream) {
        NcclLaunch& launch = *std::exchange(launching_, nullptr);
        check_cuda(cudaEventRecord(launch.done.get(), stream), "cudaEventRecord");
        launch.state = NcclLaunch::State::launched;
    }

    /// Collects the calls until end_group() in `launch`, to submit them together.
    void begin_group(NcclLaunch& launch) noexcept {
        group_ = &launch;
        grouping_launches = this;
    }
    /// @pre has_group()
    [[nodiscard]] NcclLaunch& end_group() noexcept {
        grouping_launches = nullptr;
        return *std::exchange(group_, nullptr);
    }

    /// Before a failure ends the handle: launches that have not run never will.
    void lose() noexcept {
        launching_ = nullptr;
        if (has_group()) { // or it would call the handle later
            static_cast<void>(end_group());
            static_cast<void>(ncclGroupEnd());
        }
        for_each_unfinished([](NcclLaunch& launch) {
            launch.state = launch.has_run() ? NcclLaunch::State::complete : NcclLaunch::State::lost;
        });
    }

    /// Whether all launches have run.
    [[nodiscard]] bool is_idle() const noexcept {
        return std::all_of(all_.begin(), all_.end(), [](auto const& launch) {
            return launch->is_final() || launch->has_run();
        });
    }
    /// The number of the first collective that has not run; 0 if all have.
    [[nodiscard]] std::uint64_t oldest_unfinished() const noexcept {
        auto const oldest = std::find_if(all_.begin(), all_.end(), [](auto const& launch) {
            return launch->number != 0 && !launch->is_final() && !launch->has_run();
        });
        return oldest == all_.end() ? 0 : (*oldest)->number;
    }
    /// Calls f(launch) for each launch that may still run, the oldest first.
    template <class F>
    void for_each_unfinished(F const& f) const {
        for (auto const& launch : all_) {
            if (!launch->is_final()) {
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

    std::vector<std::unique_ptr<NcclLaunch>> all_; ///< in the order in which they were taken
    NcclLaunch* launching_ = nullptr;
    NcclLaunch* group_ = nullptr;
    std::uint64_t posted_ = 0;
};

}}} // namespace joinable::v0::detail
