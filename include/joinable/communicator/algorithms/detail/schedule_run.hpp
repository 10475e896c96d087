// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/algorithms/detail/message_schedule.hpp>
#include <joinable/communicator/algorithms/detail/message_step.hpp>
#include <joinable/communicator/detail/polling.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/reduction/reduce.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Runs one rank's steps of a schedule over messages of `Comm`.
template <class Comm>
class ScheduleRun {
public:
    ScheduleRun(
        MessageSchedule schedule,
        int rank,
        Buffer buffer,
        ReduceOp op,
        std::array<std::byte*, 2> slots,
        int tag
    )
        : schedule_{std::move(schedule)}, steps_{schedule_.steps(rank)}, buffer_{buffer}, op_{op},
          slots_{slots}, tag_{tag} {}
    ScheduleRun(ScheduleRun const&) = delete;
    ScheduleRun& operator=(ScheduleRun const&) = delete;

    /// Whether all steps are done. @throws what messages throw.
    [[nodiscard]] bool advance(Comm& comm, Waiting waiting) {
        for (;;) {
            if (!is_complete(receiving_, waiting) || !is_complete(sending_, waiting)) {
                return false;
            }
            if (!steps_.next(step_)) {
                return true;
            }
            start(comm, step_);
        }
    }
    /// The peers of messages in flight, in order.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        if (!receiving_ && !sending_) {
            return {};
        }
        Transfer const& one = receiving_ ? step_.receive : step_.send;
        return both_ranks(one.peer, sending_ ? step_.send.peer : one.peer);
    }

private:
    using Sending = decltype(std::declval<Comm&>().send(ConstBuffer{}, 0, 0));
    using Receiving = decltype(std::declval<Comm&>().receive(Buffer{}, 0, 0));

    void start(Comm& comm, MessageStep const& step) {
        if (!step.receive.is_none()) {
            (void)receiving_.emplace(comm.receive(place_of(step.receive), step.receive.peer, tag_)
            ); // keeps the work: nvcc 13 looks at emplace()'s result
        }
        if (!step.send.is_none()) {
            (void)sending_.emplace(comm.send(place_of(step.send), step.send.peer, tag_));
        }
        if (!step.combine.is_none()) {
            combine(step.combine);
        }
    }
    [[nodiscard]] std::byte* address_of(ElementRange range) const noexcept {
        return static_cast<std::byte*>(buffer_.data) + range.begin * size_of(buffer_.dtype);
    }
    [[nodiscard]] Buffer place_of(Transfer const& transfer) const noexcept {
        std::byte* const data = transfer.slot == Transfer::in_place
                                    ? address_of(transfer.range)
                                    : slots_[static_cast<std::size_t>(transfer.slot)];
        return {data, transfer.range.size(), buffer_.dtype};
    }
    void combine(Combination const& combination) const {
        std::byte* const own = address_of(combination.range);
        std::byte* const slot = slots_[static_cast<std::size_t>(combination.slot)];
        std::array<std::byte*, 2> const operands =
            combination.slot_is_left ? std::array{slot, own} : std::array{own, slot};
        auto const operand = [&](std::size_t i) { return operands[i]; };
        auto const result = [&](std::size_t) { return own; };
        reduce_to(buffer_.dtype, op_, {2, operand}, {1, result}, combination.range.size());
    }

    MessageSchedule schedule_;
    MessageSteps steps_;
    Buffer buffer_;
    ReduceOp op_;
    std::array<std::byte*, 2> slots_;
    int tag_;
    MessageStep step_;
    std::optional<Receiving> receiving_;
    std::optional<Sending> sending_;
};

}}} // namespace joinable::v0::detail
