// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/nccl/detail/arrivals.hpp>
#include <joinable/communicator/nccl/detail/handle.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How the host of one rank waits: it polls what can end the wait, up to the deadline, and says for
/// whom it waited. There is no other wait beside those of the control communicator.
class NcclWaits : public NcclHandle {
public:
    using NcclHandle::NcclHandle;

    void set_arrivals(NcclArrivals arrivals) noexcept { arrivals_ = std::move(arrivals); }

    /// See NcclCollectives::keep_alive.
    void keep_alive() {
        arrivals_.keep_alive(rank());
        if (!control().keep_alive() && !arrivals_.is_known()) {
            throw ContractViolation{
                "keep_alive() reaches the ranks that wait through the control communicator, but "
                "that "
                "models neither RenewsDeadline nor SharesMemory: use one that does"
            };
        }
    }

    /// Waits until NCCL is done with what was asked of the handle: `doing` says what that is. Of what
    /// NCCL refuses, most calls tell nothing: it is here that it shows.
    void finish_call(std::string_view doing) {
        auto const is_done = [&] { return async_state() == ncclSuccess; };
        wait_until(is_done, doing, 0, concat(asynchronous_error, " while it ", doing));
    }

protected:
    ~NcclWaits() = default;

    [[nodiscard]] NcclArrivals const& arrivals() const noexcept { return arrivals_; }

    /// Polls `ready()`, which throws where it finds that it never will be. `number` is that of the
    /// collective that this is about; 0: none. `error` is what an error of NCCL is called. The deadline begins anew when those that hold this
    /// rank up have said meanwhile that they are at work.
    /// @throws TimedOut  after aborting.
    template <class Ready>
    void wait_until(
        Ready const& ready,
        std::string_view doing,
        std::uint64_t number,
        std::string_view error = asynchronous_error
    ) {
        auto start = Clock::now();
        for (int turn = 0; !ready(); ++turn) {
            throw_if_aborted(error);
            if (Clock::now() - start >= deadline()) {
                start = last_sign_of_life(start, doing, number);
            }
            if (turn < spins) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(nap);
            }
        }
    }

private:
    using Clock = NcclArrivals::Clock;

    /// From when on the deadline counts, once it has passed since `start`. All whom this rank is known
    /// to wait for must have said that they are at work; where they are not known, any other rank.
    /// @throws TimedOut  after aborting.
    [[nodiscard]] Clock::time_point
    last_sign_of_life(Clock::time_point start, std::string_view doing, std::uint64_t number) {
        std::vector<int> overdue =
            number == 0 ? std::vector<int>{} : arrivals_.missing(size(), number);
        bool const is_any = overdue.empty();
        auto const now = Clock::now();
        auto since = is_any ? start : now;
        for (int other = 0; is_any && other < size(); ++other) {
            since = other == rank() ? since : (std::max)(since, arrivals_.alive_at(other));
        }
        std::erase_if(overdue, [&](int other) {
            auto const alive_at = (std::max)(start, arrivals_.alive_at(other));
            bool const is_alive = now - alive_at < deadline();
            since = is_alive ? (std::min)(since, alive_at) : since;
            return is_alive;
        });
        if (!overdue.empty() || now - since >= deadline()) {
            time_out(doing, number, overdue);
        }
        return since;
    }

    [[noreturn]] void
    time_out(std::string_view doing, std::uint64_t number, std::vector<int> const& missing) {
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

}}} // namespace joinable::v0::detail
