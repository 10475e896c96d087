// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's side of its connection to the hub. `wait()` and `test()` move frames; nothing
/// does it in between. What was posted is under way as far as the kernel takes it.
class TcpRank {
public:
    TcpRank(Socket socket, int rank, int size, std::chrono::nanoseconds deadline)
        : socket_{std::move(socket)}, rank_{rank}, size_{size}, deadline_{deadline} {}
    TcpRank(TcpRank const&) = delete;
    TcpRank& operator=(TcpRank const&) = delete;
    ~TcpRank() { leave(); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }

    /// Returns when all ranks have come. `meanwhile` says what this one does until then.
    void meet(std::string const& meanwhile);

    /// Arrives in the next collective and returns its number.
    std::uint64_t post(Request const& request);
    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept {
        return sequence < finished_;
    }
    /// Whether finish() would return at once. Asks the hub at the deadline, but does not wait for it.
    /// @throws as finish() does.
    [[nodiscard]] bool test(std::uint64_t sequence) {
        bool const is_over = progress(sequence);
        if (!is_over) {
            count_poll(sequence);
        }
        return is_over;
    }
    /// The same without a deadline.
    [[nodiscard]] bool progress(std::uint64_t sequence);
    void finish(std::uint64_t sequence);

    /// What all ranks throw is the first reason that reaches the hub. Returns when the hub has said
    /// which that is: what others do because of what this rank does next cannot be before it. If it
    /// does not answer, it is this rank's own.
    void abort(AbortReason const& reason);
    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(std::string const& what);
    [[nodiscard]] bool is_aborted() {
        look();
        return over_.has_value();
    }

    void keep_alive();

    /// Who has not arrived in the oldest collective that is not finished here.
    [[nodiscard]] std::vector<int> missing_ranks();

private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::size_t most_in_flight = 64;

    /// What the hub was asked at the deadline of one wait: for how much longer it may last.
    struct Overdue {
        int asked = 0;                                     ///< how often it has not answered yet
        std::chrono::nanoseconds deadline = {};            ///< the longest of these
        std::optional<std::chrono::nanoseconds> left = {}; ///< its answer
        // For a work that is tested:
        PolledTime polled = {};
        std::uint64_t consumed = 0; ///< when the hub was asked last, or has been seen to live
    };
    struct Pending {
        Descriptor said;
        Buffer out;
        Overdue overdue = {};
    };

    [[nodiscard]] std::uint64_t next() const noexcept { return finished_ + pending_.size(); }
    /// Null: nobody can wait for that.
    [[nodiscard]] Overdue* overdue_of(std::uint64_t sequence) noexcept;
    void throw_if_over(bool is_done) const;

    /// Waits until `ready()`, until all is over, or until the hub says that it is, as it does when it
    /// is asked at the deadline. `meanwhile()` tells the others what this rank does.
    template <class Ready, class Meanwhile>
    void wait_until(Ready const& ready, std::uint64_t sequence, Meanwhile const& meanwhile) {
        look();
        TimePoint end = end_of_wait(deadline_);
        bool is_asked = false;
        while (!ready() && !over_) {
            std::uint64_t const consumed = inbox_.consumed();
            pump(end);
            Overdue* const overdue = overdue_of(sequence);
            if (overdue != nullptr && overdue->left) {
                end = end_of_wait(*std::exchange(overdue->left, std::nullopt));
                is_asked = false;
            } else if (is_asked && consumed != inbox_.consumed()) {
                end = Clock::now() + tcp_patience;
            }
            if (ready() || over_ || Clock::now() < end) {
                continue;
            }
            if (is_asked) {
                give_up(meanwhile());
                return;
            }
            ask_for_more(sequence, meanwhile());
            is_asked = true;
            end = Clock::now() + tcp_patience;
        }
    }
    /// A test that has found nothing: the same as wait_until(), one step at a time.
    void count_poll(std::uint64_t sequence);
    [[nodiscard]] std::string waiting_text(std::uint64_t sequence) const;
    /// Tells the hub that the deadline has passed: it ends all, or says for how much longer to wait.
    /// @pre overdue_of(sequence) is not null
    void ask_for_more(std::uint64_t sequence, std::string const& meanwhile);
    /// Rank 0 is stopped, or cannot be reached: nobody else can tell this rank anything.
    void give_up(std::string const& meanwhile);

    // -- moving -----------------------------------------------------------------------------------

    void send(FrameHeader header, std::span<std::byte const> body);
    /// Does what can be done now, else waits until something can, or until `end`.
    void pump(TimePoint end);
    /// Does what can be done now.
    void look();

    /// Nothing that rank 0 sends is right any more. All ranks hear it, if rank 0 still tells them.
    void refuse(ProtocolError const& error);

    [[nodiscard]] std::span<std::byte> place_for(FrameHeader const& header, std::uint64_t done);
    /// What this rank gets of its oldest collective.
    [[nodiscard]] std::size_t bytes_of_result() const noexcept;
    /// @throws ProtocolError  the hub does not say that now.
    void require_expected(FrameHeader const& header);
    /// @pre require_expected(header) was called
    void take(FrameHeader const& header);

    /// Says that nothing more comes from this rank, and waits a little until the hub has all that was
    /// sent: closing a connection before can destroy it.
    void leave() noexcept;

    Socket socket_;
    int rank_;
    int size_;
    std::chrono::nanoseconds deadline_;
    Inbox inbox_;
    Outbox outbox_;
    std::vector<std::byte> body_; ///< of a frame that is no result
    std::uint64_t told_ = 0;      ///< of what was consumed
    bool has_started_ = false;
    std::deque<Pending> pending_; ///< posted, but not finished
    std::uint64_t finished_ = 0;
    bool is_alone_ = false;                 ///< the hub answers no more
    std::optional<AbortReason> own_reason_; ///< of this rank's abort
    std::optional<AbortReason> over_;       ///< what every wait throws that did not complete before
    Overdue overdue_;                       ///< of the meeting
    int questions_ = 0;                     ///< that the hub has not answered yet
    bool has_answer_ = false;
    std::vector<int> missing_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/rank.ipp>
#endif
