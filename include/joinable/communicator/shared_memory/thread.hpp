// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/board_communicator.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message between thread ranks, with wait() and test().
using ThreadWork = detail::WorkOf<detail::GroupRank<detail::Heap>, std::uint64_t, detail::Message>;

/// Ranks are threads of this process. run_threads() makes one object per rank.
///
/// Reductions combine every element in rank order, so results are bitwise identical in whatever
/// order ranks arrive. A scaled sum rounds each product before adding it; products of 16-bit
/// numbers are rounded to float. Everything is asynchronous: a rank that waits or tests does the
/// work of all ranks, so a busy rank delays nobody. Up to 64 collectives may be in flight; posting
/// another one first completes the oldest. Every collective compares what the ranks are about to
/// do. A collective neither allocates nor locks, and makes no system call unless a rank waits long.
class ThreadCommunicator
    : public detail::BoardCommunicator<detail::GroupRank<detail::Heap>, ThreadWork> {
public:
    static constexpr std::string_view transport = "threads";

    /// For run_threads.
    ThreadCommunicator(
        detail::Group group, int rank, std::shared_ptr<detail::GroupStorage<detail::Heap>> storage
    );

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits the deadline. Aborting this communicator aborts
    /// the group, but not the reverse. Errors name ranks by their numbers in the group where they
    /// occur.
    [[nodiscard]] ThreadCommunicator split(int color, int key);

    /// Collective; blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes);

    /// For participants that train a model.
    [[nodiscard]] detail::ModelTable* model_table() noexcept { return &models_; }

private:
    ThreadCommunicator(detail::GroupRank<detail::Heap> const& parent, Slot const& slot);

    detail::ThreadModelTable models_;
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/impl/thread.ipp>
#endif

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_INSTANTIATE(class Endpoint<Group, LentBy<Heap>>)
JOINABLE_INSTANTIATE(class GroupRank<Heap>)
JOINABLE_INSTANTIATE(class WorkOf<GroupRank<Heap>, std::uint64_t, Message>)
JOINABLE_INSTANTIATE(class BoardCommunicator<GroupRank<Heap>, ThreadWork>)

}}} // namespace joinable::v0::detail
