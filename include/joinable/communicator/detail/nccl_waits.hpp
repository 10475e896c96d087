// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/nccl_arrivals.hpp>
#include <joinable/communicator/detail/nccl_handle.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// How the host of one rank waits: it polls what can end the wait, up to the deadline, and says for
/// whom it waited. There is no other wait beside those of the control communicator.
class NcclWaits : public NcclHandle {
public:
    using NcclHandle::NcclHandle;

    void set_arrivals(NcclArrivals arrivals) noexcept { arrivals_ = std::move(arrivals); }

    /// Waits until NCCL is done with what was asked of the handle: `doing` says what that is.
    void finish_call(std::string_view doing) {
        wait_until([&] { return async_state() == ncclSuccess; }, doing, 0);
    }

protected:
    ~NcclWaits() = default;

    [[nodiscard]] NcclArrivals const& arrivals() const noexcept { return arrivals_; }

    /// Polls `ready()`, which throws where it finds that it never will be. `number` is that of the
    /// collective that this is about; 0: none.
    /// @throws TimedOut  after aborting.
    template <class Ready>
    void wait_until(Ready const& ready, std::string_view doing, std::uint64_t number) {
        auto const start = Clock::now();
        for (int turn = 0; !ready(); ++turn) {
            throw_if_spent();
            if (Clock::now() - start >= deadline()) {
                time_out(doing, number);
            }
            if (turn < spins) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(nap);
            }
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    [[noreturn]] void time_out(std::string_view doing, std::uint64_t number) {
        std::vector<int> const missing =
            number == 0 ? std::vector<int>{} : arrivals_.missing(size(), number);
        std::string who = "no answer";
        if (!missing.empty()) {
            who = concat(ranks_text(missing), " did not arrive");
        } else if (number != 0 && arrivals_.is_known()) {
            who = "all ranks arrived, but nothing came";
        }
        double const seconds = std::chrono::duration<double>(deadline()).count();
        fail(
            {FailureKind::timed_out,
             missing,
             concat(who, " within ", seconds, " s, while rank ", rank(), " ", doing)}
        );
    }

    static constexpr int spins = 200;
    static constexpr std::chrono::microseconds nap{50};

    NcclArrivals arrivals_;
};

} // namespace joinable::inline v0::detail
