// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/mpi/detail/alarm.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// An exception ended a rank between its operations.
struct MpiUnwinding {
    int blamed = -1;                                  ///< the rank where that was first
    std::chrono::steady_clock::time_point heard_at{}; ///< here
};

/// One rank's control messages to and from the others, and what it has learned from them.
class MpiPeers {
public:
    /// `patience`: for how long answers are waited for.
    MpiPeers(MPI_Comm comm, int rank, int size, std::chrono::nanoseconds patience)
        : rank_{rank}, patience_{patience}, others_(static_cast<std::size_t>(size)),
          alarm_{comm, rank, size} {}

    [[nodiscard]] int size() const noexcept { return static_cast<int>(others_.size()); }

    void tell_all(MpiWord word, std::span<std::byte const> body = {}) {
        alarm_.tell_all(word, body);
    }
    [[nodiscard]] bool has_sent() { return alarm_.has_sent(); }
    /// Reports that this rank is working, but at most ten times per deadline, or once a second.
    /// Busy ranks receive nothing, so MPI has to keep all messages to them.
    void keep_alive(std::chrono::nanoseconds deadline) {
        constexpr std::chrono::nanoseconds longest = std::chrono::seconds{1};
        auto const now = Clock::now();
        if (!told_alive_at_ || now - *told_alive_at_ >= (std::min)(deadline / 10, longest)) {
            told_alive_at_ = now;
            static_cast<void>(alarm_.has_sent());
            alarm_.tell_all(MpiWord::keep_alive);
        }
    }

    /// Receives messages. While `answers`, it answers that this rank has posted `posted`
    /// collectives. Calls end(reason) with the reason of an abort.
    template <class End>
    void poll(std::uint64_t posted, bool answers, End const& end) {
        if (is_closed_) {
            return;
        }
        if (asked_ != 0) {
            heard_at_ = Clock::now();
        }
        alarm_.poll([&](MpiWord word, int from, std::span<std::byte const> body) {
            Other& other = others_[as_index(from)];
            switch (word) {
            case MpiWord::abort: end(unpacked_reason(body).value()); break;
            case MpiWord::leave: take_leave(other, MpiLeave::unpacked(body)); break;
            case MpiWord::gone: take_leave(other, MpiLeave{.is_gone = true}); break;
            case MpiWord::unwound: {
                MpiLeave leave = MpiLeave::unpacked(body);
                leave.is_gone = true;
                if (!unwinding_) {
                    unwinding_ = MpiUnwinding{static_cast<int>(leave.blamed), Clock::now()};
                }
                take_leave(other, std::move(leave));
                break;
            }
            case MpiWord::keep_alive: other.alive_at = Clock::now(); break;
            case MpiWord::question:
                if (answers && !has_sent_last_word_) {
                    Answer answer{0, posted};
                    std::memcpy(&answer.question, body.data(), sizeof answer.question);
                    alarm_.tell(from, MpiWord::answer, std::as_bytes(std::span{&answer, 1}));
                }
                break;
            case MpiWord::answer: {
                Answer answer;
                std::memcpy(&answer, body.data(), sizeof answer);
                other.posted = answer.posted;
                other.answered = answer.question;
                break;
            }
            }
        });
    }

    /// How many messages this rank has posted to or from that rank.
    [[nodiscard]] std::uint64_t messages(int peer, bool is_send) const noexcept {
        Other const& other = others_[as_index(peer)];
        return is_send ? other.sent : other.received;
    }
    void count_message(int peer, bool is_send) noexcept {
        Other& other = others_[as_index(peer)];
        ++(is_send ? other.sent : other.received);
    }
    /// MPI has cancelled a receive from that rank.
    void discount_receive(int peer) noexcept { --others_[as_index(peer)].received; }
    /// Whether that rank has sent more messages than were received here. @pre have_all_left()
    [[nodiscard]] bool has_unreceived(int from) const noexcept {
        Other const& other = others_[as_index(from)];
        return (from == rank_ ? other.sent : other.left->sent) > other.received;
    }

    /// A rank that has left without doing its part of the operation, if there is one.
    [[nodiscard]] std::optional<int> departed_peer(MpiOperation const& operation) const noexcept {
        for (int rank = 0; has_any_left_ && rank < size(); ++rank) {
            auto const& left = others_[as_index(rank)].left;
            if (!left || (operation.is_message() && rank != operation.peer)) {
                continue;
            }
            std::uint64_t const last = !operation.is_message() ? left->posted
                                       : operation.is_send     ? left->received
                                                               : left->sent;
            if (operation.number >= last) {
                return rank;
            }
        }
        return std::nullopt;
    }

    /// The words of the first unwound rank, if there is one.
    [[nodiscard]] std::optional<MpiUnwinding> const& unwinding() const noexcept {
        return unwinding_;
    }

    // -- the deadline -----------------------------------------------------------------------------

    /// Asks the others what they have posted, unless this operation has asked already. Each
    /// operation has its own question, because the answers to an earlier one may be older than its
    /// deadline.
    void ask(MpiOperation& operation) {
        if (operation.question.number == 0) {
            ++asked_;
            alarm_.tell_all(MpiWord::question, std::as_bytes(std::span{&asked_, 1}));
            operation.question = {asked_, Clock::now()}; // not while some rank is not asked
        }
    }
    /// Whether all have answered, or their time was over when this rank last received messages: it
    /// may have slept since then, and their answers have come.
    [[nodiscard]] bool has_answers(MpiOperation const& operation) const {
        auto const& [question, asked_at] = operation.question;
        return heard_at_ - asked_at >= patience_ ||
               !any_rank(size(), [&, after = question](int rank) {
                   Other const& other = others_[as_index(rank)];
                   return rank != rank_ && other.answered < after && !other.left;
               });
    }
    /// The ranks that have not answered that they have posted the operation. The next ask() asks
    /// again.
    [[nodiscard]] std::vector<int> missing(MpiOperation& operation) const {
        operation.question = {};
        return ranks_where(size(), [&](int rank) {
            bool const is_here = others_[as_index(rank)].posted > operation.number;
            return operation.is_message() ? rank == operation.peer : rank != rank_ && !is_here;
        });
    }
    /// See detail::take_ranks_at_work.
    [[nodiscard]] std::chrono::nanoseconds
    take_at_work(std::vector<int>& overdue, std::chrono::nanoseconds deadline) const {
        return take_ranks_at_work(overdue, deadline, [&](int rank) {
            return others_[as_index(rank)].alive_at;
        });
    }

    // -- closing ----------------------------------------------------------------------------------

    /// Tells all ranks what this one leaves behind. It sends nothing more after that. `word` is
    /// leave, gone or unwound. If there is no memory for it, another call tells the other ranks.
    void say_last_word(MpiWord word, MpiLeave leave) {
        leave.is_gone = word != MpiWord::leave;
        for (int& to = told_last_word_; to < size(); ++to) {
            if (to != rank_) {
                leave.sent = others_[as_index(to)].sent;
                leave.received = others_[as_index(to)].received;
                alarm_.tell(
                    to, word, word == MpiWord::gone ? std::vector<std::byte>{} : leave.packed()
                );
            }
        }
        others_[as_index(rank_)].left = std::move(leave);
        has_sent_last_word_ = true;
    }
    [[nodiscard]] bool have_all_left() const noexcept {
        return std::all_of(others_.begin(), others_.end(), [](Other const& other) {
            return other.left.has_value();
        });
    }
    [[nodiscard]] bool is_any_gone() const noexcept {
        return std::any_of(others_.begin(), others_.end(), [](Other const& other) {
            return other.left && other.left->is_gone;
        });
    }
    /// The collectives that are open on any rank, sorted by number. They include all that some rank
    /// has not posted. Nothing if these are unknown: ranks have different collectives of one
    /// number, or some with counts, or the ranks that posted one have completed it. All ranks find
    /// the same. @pre have_all_left()
    [[nodiscard]] std::optional<std::vector<MpiLeave::Open>> open() const {
        std::vector<MpiLeave::Open> open;
        auto const [least, most] =
            std::minmax_element(others_.begin(), others_.end(), [](Other const& a, Other const& b) {
                return a.left->posted < b.left->posted;
            });
        for (Other const& other : others_) {
            open.insert(open.end(), other.left->open.begin(), other.left->open.end());
        }
        std::sort(open.begin(), open.end(), [](auto const& a, auto const& b) {
            return a.number < b.number;
        });
        std::uint64_t next = least->left->posted;
        for (std::size_t i = 0; i < open.size(); ++i) {
            bool const is_new = i == 0 || open[i].number != open[i - 1].number;
            if (open[i].has_counts != 0 || (!is_new && open[i] != open[i - 1])) {
                return std::nullopt;
            }
            next += open[i].number == next ? 1U : 0U;
        }
        if (next < most->left->posted) {
            return std::nullopt;
        }
        open.erase(std::unique(open.begin(), open.end()), open.end());
        return open;
    }
    /// Frees the communicator. @pre have_all_left()
    void close() {
        is_closed_ = true;
        alarm_.close();
    }
    /// Stops receiving, but leaves the communicator to those that still receive.
    void stop_listening() {
        is_closed_ = true;
        alarm_.stop_listening();
    }

private:
    using Clock = std::chrono::steady_clock;

    struct Answer {
        std::uint64_t question = 0;
        std::uint64_t posted = 0; ///< collectives
    };
    struct Other {
        std::uint64_t posted = 0;     ///< collectives, by its last message
        std::uint64_t answered = 0;   ///< the last of our questions that it has answered
        Clock::time_point alive_at{}; ///< its last keep_alive(); none: the clock's epoch
        std::optional<MpiLeave> left;
        std::uint64_t sent = 0; ///< messages from this rank to it
        std::uint64_t received = 0;
    };

    void take_leave(Other& other, MpiLeave leave) {
        other.posted = leave.posted;
        other.left = std::move(leave);
        has_any_left_ = true;
    }

    int rank_;
    std::chrono::nanoseconds patience_;
    std::vector<Other> others_; ///< including this one
    MpiAlarm alarm_;            ///< last, because it starts to receive, and others may throw
    bool has_any_left_ = false;
    int told_last_word_ = 0; ///< how many ranks
    bool has_sent_last_word_ = false;
    bool is_closed_ = false;
    std::uint64_t asked_ = 0;      ///< questions
    Clock::time_point heard_at_{}; ///< when it last began to receive, if it has asked
    std::optional<Clock::time_point> told_alive_at_;
    std::optional<MpiUnwinding> unwinding_;
};

}}} // namespace joinable::v0::detail
