// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include <mpi.h>

#include <joinable/communicator/detail/polling.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/lock.hpp>
#include <joinable/communicator/mpi/detail/rank.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  MPI does not let several threads call it at once.
inline void require_mpi_thread_multiple() {
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level >= MPI_THREAD_MULTIPLE) {
        return;
    }
    std::string_view const name = level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
                                  : level == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED"
                                                                 : "MPI_THREAD_SINGLE";
    throw ContractViolation{concat(
        "a ProgressThread needs MPI_THREAD_MULTIPLE, but MPI runs with ",
        name,
        ": start MPI by MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level) and look at the level that "
        "it gives, or do without a ProgressThread and call test() now and then"
    )};
}

/// The work of a ProgressThread for a rank of MPI.
class MpiHelper {
public:
    /// @throws ContractViolation  MPI's thread level is too low.
    explicit MpiHelper(std::shared_ptr<MpiRank> rank) : rank_{std::move(rank)} {
        require_mpi_thread_multiple();
        rank_->lock().add_helper(1);
    }
    ~MpiHelper() { rank_->lock().add_helper(-1); }
    MpiHelper(MpiHelper const&) = delete;
    MpiHelper& operator=(MpiHelper const&) = delete;

    /// Runs until stop().
    void run() {
        MpiRank::InFlight seen;
        PollPause pause{std::chrono::nanoseconds{0}};
        while (true) {
            auto held = rank_->lock().take_turn();
            if (stops_) {
                return;
            }
            auto const now = rank_->help();
            if (now.open == 0) {
                rank_->lock().sleep(held, std::chrono::milliseconds{10});
            }
            held.unlock();
            if (now != seen) { // something was posted, or has ended: more will follow soon
                seen = now;
                pause = PollPause{std::chrono::nanoseconds{0}};
            }
            if (now.open != 0) {
                pause();
            }
        }
    }
    void stop() { rank_->lock().stop(stops_); }

private:
    std::shared_ptr<MpiRank> rank_;
    bool stops_ = false; ///< under the lock
};

}}} // namespace joinable::v0::detail
