// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/board_communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/sharing.hpp>
#include <joinable/communicator/detail/thread_rank.hpp>
#include <joinable/communicator/thread_work.hpp>
#include <joinable/detail/text.hpp>

namespace joinable::inline v0 {

/// Ranks are threads of this process: made by run_threads(), one object per rank.
///
/// Reductions combine every element in rank order, so results are the same bit for bit whoever
/// arrives first. Everything is asynchronous: whoever waits or tests does the work for all, so a
/// rank that computes holds up nobody. Up to 64 collectives are in flight, further ones finish the
/// oldest. Ranks compare what they are about to do in every collective. No allocation, no lock and
/// no system call in a collective unless a rank waits long.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or
/// dtypes do not fit, a root is no rank, memory is missing or overlaps, or floats are combined bit
/// by bit. Buffers are the caller's until the work has been waited for; spans of counts are copied.
class ThreadCommunicator : public detail::BoardCommunicator<detail::ThreadRank, ThreadWork> {
public:
    /// For run_threads and split.
    ThreadCommunicator(
        std::shared_ptr<detail::ThreadGroup> group,
        int rank,
        std::chrono::nanoseconds deadline = default_deadline
    ) noexcept
        : BoardCommunicator{std::move(group), rank} {
        rank_.set_deadline(deadline);
    }
    /// The rank leaves its group: whoever waits for it gets PeerFailed.
    ~ThreadCommunicator() {
        if (std::uncaught_exceptions() > exceptions_) {
            rank_.abort_for_exception("the scope of its communicator");
        }
        rank_.group().leave(rank());
    }

    /// Not collective. Complete when rank `to` has received it: messages between two ranks with one
    /// tag arrive in their order. Both sides say the same count and dtype, else Mismatch on both.
    ThreadWork send(ConstBuffer buffer, int to, int tag = 0) {
        detail::check_memory(buffer);
        detail::check_rank("destination", to, size());
        // A send is only read from; both sides of a message share one type.
        Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
        return {rank_, rank_.post_message(true, to, tag, read), to};
    }
    /// Not collective. The other side of send().
    ThreadWork receive(Buffer buffer, int from, int tag = 0) {
        detail::check_memory(buffer);
        detail::check_rank("source", from, size());
        return {rank_, rank_.post_message(false, from, tag, buffer), from};
    }

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their
    /// `key`, then of their rank here. It inherits the deadline. An abort of this communicator
    /// reaches it, not the other way round; errors name the ranks of the group in which they occur.
    [[nodiscard]] ThreadCommunicator split(int color, int key) {
        if (color < 0) {
            throw ContractViolation{
                detail::concat("split needs a color of at least 0, but was given ", color)
            };
        }
        std::array<std::int32_t, 2> const mine{color, key};
        std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
        auto work =
            all_gather({mine.data(), 2, DType::i32}, {all.data(), 2 * all.size(), DType::i32});
        work.wait();
        auto const before = [&](int a, int b) {
            return std::pair{all[static_cast<std::size_t>(a)][1], a} <
                   std::pair{all[static_cast<std::size_t>(b)][1], b};
        };
        int members = 0;
        int place = 0;
        for (int other = 0; other < size(); ++other) {
            bool const is_member = all[static_cast<std::size_t>(other)][0] == color;
            members += is_member ? 1 : 0;
            place += is_member && before(other, rank()) ? 1 : 0;
        }
        return {rank_.group().child(work.sequence_, color, members), place, rank_.deadline()};
    }

    /// Collective, blocks. See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes) {
        std::uint64_t const mine = bytes;
        std::vector<std::uint64_t> all(static_cast<std::size_t>(size()));
        auto work = all_gather({&mine, 1, DType::u64}, {all.data(), all.size(), DType::u64});
        work.wait();
        detail::check_same_size(all);
        return rank_.group().share(work.sequence_, bytes);
    }

private:
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace joinable::inline v0
