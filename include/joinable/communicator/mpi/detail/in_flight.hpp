// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mpi.h>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/mpi/detail/alarm.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/calls.hpp>
#include <joinable/communicator/mpi/detail/check.hpp>
#include <joinable/communicator/mpi/detail/lock.hpp>
#include <joinable/communicator/mpi/detail/memory.hpp>
#include <joinable/communicator/mpi/detail/messages.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/communicator/mpi/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's part, with `zeros` that must stay, in a collective that only the others have posted.
/// Like the others, it passes the parts of a request to MPI, and one buffer if that is both input
/// and output, because MPI's algorithms may depend on this.
[[nodiscard]] inline MpiTransfer stand_in_of(
    Descriptor const& signature, int rank, int size, std::deque<std::vector<std::byte>>& zeros
) {
    bool const is_one = !has_parts(signature.collective);
    auto const parts = is_one ? std::size_t{1} : static_cast<std::size_t>(size);
    std::size_t const bytes = signature.count * size_of(signature.dtype) * parts;
    std::byte* const in = zeros.emplace_back(bytes).data();
    std::byte* const out = is_one ? in : zeros.emplace_back(bytes).data();
    auto const all = PartSizes::equal(signature.count);
    auto const those_of_root = rank == signature.root ? all : PartSizes{};
    auto const only_root = PartSizes::only(signature.root, signature.count);
    switch (signature.collective) {
    case Collective::gather: return {signature, in, out, only_root, those_of_root};
    case Collective::scatter: return {signature, in, out, those_of_root, only_root};
    default: return {signature, in, out, all, all};
    }
}

/// Why an MPI error on this rank ends all ranks.
[[nodiscard]] inline AbortReason reason_of_mpi_error(int rank, CommunicationError const& error) {
    return {FailureKind::communication, {}, concat("rank ", rank, ": ", error.what())};
}

/// A rank's operations that MPI has not completed: starts them, compares them, and ends them. It
/// knows nothing of the rank's failure but that it has lost() them.
class MpiInFlight {
public:
    /// Ends the rank for a reason, and throws.
    using Fail = std::function<void(AbortReason const&)>;

    /// `beside` is a communicator of the same ranks, on which they compare collectives.
    MpiInFlight(
        MPI_Comm data,
        MPI_Comm beside,
        int rank,
        int size,
        MpiLimits limits,
        std::shared_ptr<MpiLock> lock,
        Fail fail
    )
        : data_{data}, beside_{beside}, rank_{rank}, size_{size}, limits_{limits},
          calls_{data, rank, size, limits}, fail_{std::move(fail)},
          memory_{std::make_shared<MpiMemory>(std::move(lock))} {}
    MpiInFlight(MpiInFlight const&) = delete;
    MpiInFlight& operator=(MpiInFlight const&) = delete;

    [[nodiscard]] std::shared_ptr<MpiMemory> const& memory() const noexcept { return memory_; }
    /// How many collectives the rank has posted.
    [[nodiscard]] std::uint64_t posted() const noexcept { return posted_; }

    [[nodiscard]] MpiOperation& post(Request const& request, MpiOptions const& options) {
        MpiOperation& operation = opened([&](MpiOperation& made) {
            made.prepare(request, *memory_, options.wide);
            calls_.reserve(made.transfer, made.tables);
            if (options.check) {
                made.comparison.begin(made.signature(), rank_, size_);
            }
        });
        operation.number = posted_++;
        if (options.check) {
            operation.state = MpiOperation::State::checking;
            ++unchecked_;
            require_for(operation, [&] { sum_words(operation, beside_); });
        } else {
            operation.state = MpiOperation::State::under_way;
            require_for(operation, [&] { calls_.start(operation.transfer, operation.tables); });
        }
        return operation;
    }
    /// `number` counts the messages with this peer in this direction.
    [[nodiscard]] MpiOperation&
    post_message(bool is_send, int peer, int tag, Buffer buffer, std::uint64_t number) {
        MpiOperation& operation = opened([&](MpiOperation& made) {
            made.is_send = is_send;
            made.peer = peer;
            made.tag = tag;
            made.number = number;
            made.prepare_message(buffer, *memory_);
            made.tables.reserve(1, 0, 1);
        });
        operation.state = MpiOperation::State::under_way;
        require_for(operation, [&] { start_message(operation, limits_, data_); });
        return operation;
    }
    /// Whether it is complete now.
    [[nodiscard]] bool advance(MpiOperation& operation) {
        if (unchecked_ != 0) { // else a rank that waits for another one would delay this one
            for (MpiOperation* const open : open_) { // in the order of posts
                if (!start_when_checked(*open)) {
                    break;
                }
            }
        }
        if (operation.state != MpiOperation::State::under_way || !have_requests_ended(operation)) {
            return false;
        }
        complete(operation);
        return true;
    }
    /// The same for all operations.
    void advance_all() {
        for (std::size_t i = 0; i < open_.size();) { // advance() removes what is complete
            i += advance(*open_[i]) ? 0U : 1U;
        }
    }
    /// The operations that are not complete, in the order of posts.
    [[nodiscard]] std::deque<MpiOperation*> const& open() const noexcept { return open_; }
    /// @pre MPI has finished it
    void complete(MpiOperation& operation) {
        operation.deliver(*memory_);
        open_.erase(std::find(open_.begin(), open_.end(), &operation));
    }
    /// The caller no longer waits for it.
    void release(MpiOperation& operation) {
        if (operation.state == MpiOperation::State::complete) {
            operations_.give_back(operation);
        } else { // its buffer belongs to the caller again
            operation.state = MpiOperation::State::lost;
        }
    }
    /// The oldest collective that is not complete; null if there is none.
    [[nodiscard]] MpiOperation* oldest_collective() const {
        auto const oldest = std::find_if(open_.begin(), open_.end(), [](MpiOperation const* one) {
            return !one->is_message();
        });
        return oldest == open_.end() ? nullptr : *oldest;
    }

    // -- the end ----------------------------------------------------------------------------------

    /// The rank has failed. Finishes the operations that MPI has completed. Open ones stay with
    /// MPI, except receives.
    void lose() {
        memory_->hold();
        unchecked_ = 0;
        for (MpiOperation* const operation : open_) {
            if (has_just_ended(*operation)) {
                operation->deliver(*memory_);
                continue;
            }
            operation->state = MpiOperation::State::lost;
            auto& requests = operation->tables.requests;
            if (operation->is_receive() && !operation->is_refused && !requests.empty() &&
                requests.front() != MPI_REQUEST_NULL) {
                static_cast<void>(MPI_Cancel(&requests.front()));
            }
        }
        std::erase_if(open_, [](MpiOperation const* operation) {
            return operation->state == MpiOperation::State::complete;
        });
    }
    /// Whether the other ranks can complete the collectives that are open here. `compares`: ranks
    /// compare collectives before they start them.
    [[nodiscard]] bool can_be_left(bool compares) const {
        return open_.size() <= MpiLeave::most_open && (open_.empty() || !compares) &&
               std::none_of(open_.begin(), open_.end(), [](MpiOperation* operation) {
                   return operation->is_refused || (operation->is_message() && operation->is_send &&
                                                    !has_ended(operation->tables));
               });
    }
    [[nodiscard]] std::vector<MpiLeave::Open> open_collectives() const {
        std::vector<MpiLeave::Open> open;
        for (MpiOperation const* const operation : open_) {
            auto const& signature = operation->transfer.signature;
            if (!operation->is_message()) {
                open.push_back(
                    {operation->number,
                     signature.word(),
                     signature.count,
                     signature.has_counts ? 1U : 0U}
                );
            }
        }
        return open;
    }
    /// Completes the collectives that are open on any rank. A rank that has not posted one takes
    /// part with zeros. `is_cancelled(peer)` hears of a receive that MPI will not complete. Returns
    /// whether MPI has finished with all operations within the patience.
    template <class IsCancelled>
    [[nodiscard]] bool drain(
        std::vector<MpiLeave::Open> const& open_anywhere,
        std::chrono::nanoseconds patience,
        IsCancelled const& is_cancelled
    ) {
        for (MpiLeave::Open const& one : open_anywhere) {
            if (one.number >= posted_) {
                stand_in(Descriptor::of_word(one.word, one.count, false));
            }
        }
        auto const have_stopped = [&] {
            return std::all_of(open_.begin(), open_.end(), [&](MpiOperation* const operation) {
                return has_stopped(*operation, is_cancelled);
            });
        };
        bool const is_over = wait_at_most(patience, have_stopped, MpiPause{});
        for (MpiOperation* const operation : open_) {
            if (is_over) {
                operation->give_back(*memory_);
            }
        }
        return is_over;
    }

private:
    /// A new operation, which is open. prepare(operation) gets all memory that the operation needs up
    /// to its end. If there is none, no operation was posted, and a later one gets the memory of this
    /// one.
    template <class Prepare>
    [[nodiscard]] MpiOperation& opened(Prepare const& prepare) {
        MpiOperation& operation = operations_.next();
        try {
            prepare(operation);
            open_.push_back(&operation);
        } catch (...) {
            operation.give_back(*memory_);
            operations_.give_back(operation);
            throw;
        }
        return operation;
    }
    /// Runs f(). An MPI error in it ends all ranks, and MPI keeps the operation's memory.
    template <class F>
    void require_for(MpiOperation& operation, F const& f) {
        operation.is_refused = true;
        try {
            f();
        } catch (CommunicationError const& error) {
            fail_(reason_of_mpi_error(rank_, error));
        }
        operation.is_refused = false;
    }
    [[nodiscard]] bool have_requests_ended(MpiOperation& operation) {
        bool is_done = false;
        require_for(operation, [&] {
            is_done =
                operation.is_receive() ? has_received(operation) : has_ended(operation.tables);
        });
        if (is_done && operation.is_receive()) {
            if (auto const reason = difference_of_size(operation, rank_)) {
                fail_(*reason);
            }
        }
        return is_done;
    }
    /// Whether its data has started to move.
    [[nodiscard]] bool start_when_checked(MpiOperation& operation) {
        if (operation.state >= MpiOperation::State::under_way) {
            return true;
        }
        if (!have_requests_ended(operation)) {
            return false;
        }
        operation.tables.requests.clear();
        if (auto const reason = operation.comparison.difference()) {
            fail_(*reason);
        }
        if (operation.comparison.go_on(operation.transfer.sends, operation.transfer.expects)) {
            require_for(operation, [&] { sum_words(operation, data_); });
            return false;
        }
        operation.comparison.end();
        operation.state = MpiOperation::State::under_way;
        --unchecked_;
        require_for(operation, [&] { calls_.start(operation.transfer, operation.tables); });
        return true;
    }
    /// The same after the rank has failed: it cannot fail again.
    [[nodiscard]] bool has_just_ended(MpiOperation& operation) {
        try {
            return operation.state == MpiOperation::State::under_way && !operation.is_refused &&
                   have_requests_ended(operation);
        } catch (...) {
            return false;
        }
    }
    /// Whether MPI has finished with an operation that an abort interrupted.
    template <class IsCancelled>
    [[nodiscard]] bool has_stopped(MpiOperation& operation, IsCancelled const& is_cancelled) {
        if (!operation.is_receive()) {
            return has_ended(operation.tables);
        }
        auto const is_so = detail::is_cancelled(operation);
        if (is_so.value_or(false)) {
            is_cancelled(operation.peer);
        }
        return is_so.has_value();
    }
    /// Takes part in a collective that the others have posted.
    void stand_in(Descriptor const& signature) {
        MpiOperation& operation = operations_.next();
        operation.transfer = stand_in_of(signature, rank_, size_, zeros_);
        operation.number = posted_++;
        operation.state = MpiOperation::State::lost;
        open_.push_back(&operation);
        calls_.start(operation.transfer, operation.tables);
    }

    MPI_Comm data_;
    MPI_Comm beside_;
    int rank_;
    int size_;
    MpiLimits limits_;
    MpiCalls calls_;
    Fail fail_;
    std::shared_ptr<MpiMemory> memory_;
    MpiOperations operations_{size_};
    std::deque<MpiOperation*> open_;           ///< in the order of posts
    std::uint64_t posted_ = 0;                 ///< collectives
    std::size_t unchecked_ = 0;                ///< those that are not compared yet
    std::deque<std::vector<std::byte>> zeros_; ///< for collectives of other ranks
};

}}} // namespace joinable::v0::detail
