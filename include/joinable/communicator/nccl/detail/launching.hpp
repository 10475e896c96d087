// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/launch.hpp>
#include <joinable/communicator/nccl/detail/streams.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

class NcclLaunching;

/// Whose group is open on this thread: NCCL has one for all communicators of a thread.
inline thread_local NcclLaunching const* grouping_rank = nullptr;

/// What one rank has handed to NCCL, and whether it has run. NCCL takes one thing at a time, a
/// collective or a group of them: so what comes next waits until that is launched.
class NcclLaunching : public NcclStreams {
public:
    using NcclStreams::NcclStreams;

    /// Before NCCL is asked something that is no collective.
    void begin_call() {
        begin();
        if (group_ != nullptr) {
            throw ContractViolation{"a group of this communicator is open, which takes collectives "
                                    "and messages only: end "
                                    "it first"};
        }
        settle();
    }

    // -- launches -----------------------------------------------------------------------------------

    /// Hands something to NCCL by `issue()`, after what is on the caller's stream. `collectives` says
    /// how many collectives it is; messages are none. Blocks only until NCCL has launched what came
    /// before.
    /// @throws ContractViolation  the caller's stream cannot be used; nothing was handed over.
    template <class Issue>
    [[nodiscard]] NcclLaunch& post(std::uint64_t collectives, Issue const& issue) {
        begin();
        if (group_ == nullptr) {
            settle();
        }
        order_after_caller();
        NcclLaunch& launch = group_ != nullptr ? *group_ : take_launch();
        launch.users += group_ != nullptr ? 1 : 0;
        try {
            issue();
        } catch (...) {
            --launch.users;
            if (group_ == nullptr) {
                launch.state = NcclLaunch::State::lost;
            }
            throw;
        }
        posted_ += collectives;
        if (collectives != 0) {
            launch.number = posted_;
            arrivals().arrive(rank(), posted_);
        }
        if (group_ == nullptr) {
            hand_over(launch);
        }
        return launch;
    }

    [[nodiscard]] bool has_group() const noexcept { return group_ != nullptr; }
    /// What is posted from here on goes to NCCL at once, by end_group(). Returns what that will be.
    [[nodiscard]] NcclLaunch& begin_group() {
        begin_call();
        NcclLaunch& launch = take_launch();
        check(ncclGroupStart(), "ncclGroupStart");
        group_ = &launch;
        grouping_rank = this;
        return launch;
    }
    void end_group() {
        NcclLaunch& launch = *std::exchange(group_, nullptr);
        grouping_rank = nullptr;
        ncclResult_t const result = ncclGroupEnd();
        launch.state = NcclLaunch::State::posted;
        check(result, "ncclGroupEnd");
        hand_over(launch);
    }

    void release(NcclLaunch& launch) noexcept { --launch.users; }

    // -- waiting ------------------------------------------------------------------------------------

    /// Makes `stream` wait for the launch. The host waits only until NCCL has launched it.
    void order_before(NcclLaunch& launch, cudaStream_t stream) {
        require_ended(launch);
        if (launch.state == NcclLaunch::State::posted) {
            settle();
        }
        if (!has_run(launch)) {
            check_stream(cudaStreamWaitEvent(stream, launch.done, 0), "cudaStreamWaitEvent");
        }
    }
    /// Does not wait. Whether the results are final.
    [[nodiscard]] bool test(NcclLaunch& launch) {
        require_ended(launch);
        return (launch.state != NcclLaunch::State::posted || try_settle()) && has_run(launch);
    }
    /// Makes the host wait for the launch.
    void synchronize(NcclLaunch& launch) {
        require_ended(launch);
        if (launch.state == NcclLaunch::State::posted) {
            settle();
        }
        wait_until([&] { return has_run(launch); }, "waits for a collective", launch.number);
    }
    /// Makes the host wait for everything that is posted.
    void finish_launches() {
        settle();
        launches_.for_each_unsettled([&](NcclLaunch& launch) { synchronize(launch); });
    }
    /// Does not wait, nor throw. Whether everything that was posted has run.
    [[nodiscard]] bool is_idle() const noexcept {
        bool is_idle = true;
        launches_.for_each_unsettled([&](NcclLaunch const& launch) {
            is_idle = is_idle && launch.has_run();
        });
        return is_idle;
    }
    /// Makes the host wait for what is on the caller's stream.
    void wait_for_caller() {
        wait_until([&] { return has_caller_run(); }, "waits for a stream", 0);
    }
    /// Makes the host wait for everything that is posted, and for what is on the caller's stream.
    void synchronize() {
        finish_launches();
        wait_for_caller();
    }

    /// Who has not posted this rank's oldest unfinished collective, where that is known.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        std::uint64_t oldest = posted_ + 1;
        launches_.for_each_unsettled([&](NcclLaunch const& launch) {
            if (launch.number != 0 && launch.number < oldest && !launch.has_run()) {
                oldest = launch.number;
            }
        });
        return oldest > posted_ ? std::vector<int>{} : arrivals().missing(size(), oldest);
    }

protected:
    ~NcclLaunching() = default;

    /// Until NCCL has launched what it was given last.
    void settle() {
        if (unsettled_ != nullptr) {
            wait_until(
                [&] { return try_settle(); },
                "waits for NCCL to launch a collective",
                unsettled_->number
            );
        }
    }

private:
    void lose_launches() noexcept final {
        unsettled_ = nullptr;
        if (group_ != nullptr) { // of this thread: until it ends, NCCL aborts nothing
            group_ = nullptr;
            grouping_rank = nullptr;
            static_cast<void>(ncclGroupEnd());
        }
        launches_.for_each_unsettled([](NcclLaunch& launch) {
            launch.state = launch.has_run() ? NcclLaunch::State::complete : NcclLaunch::State::lost;
        });
    }

    /// Before anything that NCCL is asked.
    void begin() {
        throw_if_aborted();
        if (grouping_rank != nullptr && grouping_rank != this) {
            throw ContractViolation{"a group of another NCCL communicator is open on this thread, "
                                    "and NCCL would put this "
                                    "off until it ends: end it first"};
        }
    }
    [[nodiscard]] NcclLaunch& take_launch() {
        try {
            return launches_.take();
        } catch (CommunicationError const& error) {
            fail({FailureKind::communication, {}, concat("rank ", rank(), ": ", error.what())});
        }
    }
    void hand_over(NcclLaunch& launch) {
        launch.state = NcclLaunch::State::posted;
        unsettled_ = &launch;
        static_cast<void>(try_settle());
    }
    /// Puts the event behind what NCCL was given last, if NCCL has put that on the stream.
    bool try_settle() {
        if (unsettled_ == nullptr) {
            return true;
        }
        throw_if_aborted();
        if (async_state() != ncclSuccess) {
            return false;
        }
        NcclLaunch& launch = *std::exchange(unsettled_, nullptr);
        check(cudaEventRecord(launch.done, stream()), "cudaEventRecord");
        launch.state = NcclLaunch::State::launched;
        return true;
    }

    /// Whether the results are final. @throws what ended this rank, if they never will be.
    [[nodiscard]] bool has_run(NcclLaunch& launch) {
        if (launch.state == NcclLaunch::State::launched) {
            cudaError_t const found = cudaEventQuery(launch.done);
            if (found == cudaSuccess) {
                launch.state = NcclLaunch::State::complete;
            } else if (found == cudaErrorNotReady) {
                static_cast<void>(cudaGetLastError()); // that is no error: nobody is to find one
                poll();
            } else {
                check(found, "cudaEventQuery");
            }
        }
        if (launch.state == NcclLaunch::State::lost) {
            rethrow_failure();
        }
        return launch.state == NcclLaunch::State::complete;
    }
    static void require_ended(NcclLaunch const& launch) {
        if (launch.state == NcclLaunch::State::open) {
            throw ContractViolation{
                "this work is in a group that is still open, so it cannot be waited for: end the "
                "group first"
            };
        }
    }

    NcclLaunches launches_;
    NcclLaunch* unsettled_ = nullptr; ///< NCCL may not have launched it yet; at most one
    NcclLaunch* group_ = nullptr;     ///< while a group is open
    std::uint64_t posted_ = 0;        ///< collectives
};

}}} // namespace joinable::v0::detail
