// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/mpi/detail/alarm.hpp>
#include <joinable/communicator/mpi/detail/calls.hpp>
#include <joinable/communicator/mpi/detail/memory.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/communicator/mpi/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How long a rank waits for answers, for its last words to be taken, and for what others complete for it.
inline constexpr std::chrono::seconds mpi_patience{2};

/// Between two looks of a wait: at first it only yields, because the others may need this core.
class MpiPause {
public:
    void operator()() {
        if (turn_ < spins) {
            ++turn_;
        } else if (auto const now = std::chrono::steady_clock::now(); now < sleeps_at_) {
            std::this_thread::yield();
        } else if (sleeps_at_ == std::chrono::steady_clock::time_point{}) {
            sleeps_at_ = now + std::chrono::milliseconds{10};
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        }
    }

private:
    static constexpr int spins = 20;
    int turn_ = 0;
    std::chrono::steady_clock::time_point sleeps_at_{};
};

/// One rank of an MPI communicator: what it has posted, what it hears from the others, and how it ends.
/// It lives on until the process ends where MPI may still use its memory: keep().
class MpiRank : public std::enable_shared_from_this<MpiRank> {
public:
    /// Owns both communicators of MPI. An abort of `parent` is one of this rank.
    MpiRank(
        MPI_Comm data,
        MPI_Comm alarm,
        int rank,
        int size,
        MpiOptions const& options,
        MpiLimits limits,
        std::shared_ptr<MpiRank> parent
    )
        : data_{data}, rank_{rank}, size_{size}, options_{options}, limits_{limits},
          calls_{data, rank, size, limits}, alarm_{alarm, rank, size}, parent_{std::move(parent)},
          others_(static_cast<std::size_t>(size)) {}
    MpiRank(MpiRank const&) = delete;
    MpiRank& operator=(MpiRank const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] MPI_Comm data() const noexcept { return data_; }
    [[nodiscard]] MpiOptions const& options() const noexcept { return options_; }
    [[nodiscard]] MpiLimits limits() const noexcept { return limits_; }
    [[nodiscard]] std::shared_ptr<MpiMemory> const& memory() const noexcept { return memory_; }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(options_.deadline, deadline);
    }

    // -- collectives and messages -----------------------------------------------------------------

    [[nodiscard]] MpiOperation& post(Request const& request) {
        throw_if_aborted();
        MpiOperation& operation = next_operation();
        operation.prepare(request, *memory_, options_.wide);
        operation.number = posted_++;
        open_.push_back(&operation);
        if (options_.check) {
            operation.state = MpiOperation::State::checking;
            require([&] { say(operation); });
        } else {
            operation.state = MpiOperation::State::under_way;
            require([&] { calls_.start(operation.transfer, operation.tables); });
        }
        return operation;
    }
    [[nodiscard]] MpiOperation& post_message(bool is_send, int peer, int tag, Buffer buffer) {
        throw_if_aborted();
        MpiOperation& operation = next_operation();
        operation.is_send = is_send;
        operation.peer = peer;
        operation.tag = tag;
        Other& other = others_[index(peer)];
        operation.number = is_send ? other.sent++ : other.received++;
        operation.prepare_message(buffer, *memory_);
        operation.state = MpiOperation::State::under_way;
        open_.push_back(&operation);
        require([&] { start_message(operation); });
        return operation;
    }
    void finish(MpiOperation& operation) {
        auto end = end_of_wait(options_.deadline);
        for (MpiPause pause; !progress(operation); pause()) {
            if (std::chrono::steady_clock::now() >= end) {
                if (auto const left = more_time(operation)) {
                    end = end_of_wait(*left);
                }
            }
        }
    }
    [[nodiscard]] bool test(MpiOperation& operation) {
        if (progress(operation)) {
            return true;
        }
        if (operation.polled.reaches(options_.deadline)) {
            if (auto const left = more_time(operation)) {
                operation.polled.set(options_.deadline - *left);
            }
        }
        return false;
    }
    /// Whether the operation is complete. @throws what ended the rank, if that came first.
    [[nodiscard]] bool progress(MpiOperation& operation) {
        if (operation.state == MpiOperation::State::complete) {
            return true;
        }
        if (operation.state != MpiOperation::State::lost) {
            if (advance(operation)) {
                return true;
            }
            poll();
            require_peers(operation);
        }
        throw_if_aborted();
        return false;
    }
    /// Nobody waits for it any more.
    void release(MpiOperation& operation) {
        if (operation.state == MpiOperation::State::complete) {
            free_.push_back(&operation);
        }
    }

    /// Who has not posted this rank's oldest unfinished collective, as far as ranks answer: those that wait
    /// or test do.
    [[nodiscard]] std::vector<int> missing_ranks() {
        poll();
        auto const oldest = std::find_if(open_.begin(), open_.end(), [](MpiOperation const* one) {
            return !one->is_message();
        });
        if (oldest == open_.end() || failure_) {
            return {};
        }
        MpiOperation& operation = **oldest;
        ask(operation);
        for (MpiPause pause; !is_answered() && !failure_; pause()) {
            poll();
        }
        asked_for_ = nullptr;
        return failure_ || advance(operation) ? std::vector<int>{} : missing(operation);
    }

    // -- the end ----------------------------------------------------------------------------------

    void abort(AbortReason const& reason) {
        poll();
        if (!failure_) {
            failure_ = sendable(reason, size_);
            lose();
            alarm_.tell_all(MpiWord::abort, packed(*failure_, size_));
            static_cast<void>(alarm_.has_sent());
        }
    }
    void abort_for_exception(std::string const& what) {
        abort(blamed_on(rank_, {FailureKind::peer_failed, {}, "an exception left " + what}));
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        throw_failure(*failure_);
    }
    [[nodiscard]] bool is_aborted() {
        poll();
        return failure_.has_value();
    }
    void throw_if_aborted() {
        if (parent_ != nullptr && parent_->failure_) {
            take_over(*parent_->failure_);
        }
        if (failure_) {
            throw_failure(*failure_);
        }
    }
    void keep_alive() {
        if (!failure_) {
            alarm_.tell_all(MpiWord::keep_alive);
        }
    }
    /// Runs f(). What MPI refuses ends all ranks.
    template <class F>
    void require(F const& f) {
        try {
            f();
        } catch (CommunicationError const& error) {
            fail({FailureKind::communication, {}, concat("rank ", rank_, ": ", error.what())});
        }
    }

    /// The rank's last act. Collective, unless it is unwinding: waits for the others, up to the deadline,
    /// and after an abort for a moment. Ranks complete for each other what an abort has cut off; where
    /// they cannot, or one is gone, MPI keeps this rank's memory.
    void close(bool is_unwinding) noexcept {
        if (!is_mpi_running()) {
            keep();
            return;
        }
        try {
            if (is_unwinding) {
                abort_for_exception("the scope of its communicator");
            }
            bool const is_staying = !is_unwinding && can_leave();
            say_last_word(is_staying);
            if (!is_staying || !hear_last_words() || !drain()) {
                wait_for([&] { return alarm_.has_sent(); });
                is_closed_ = true;
                keep();
                alarm_.stop_listening();
                return;
            }
            is_closed_ = true;
            memory_->let_go();
            alarm_.close();
            check_mpi(MPI_Comm_free(&data_), "MPI_Comm_free");
        } catch (...) {
            keep();
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    /// What this rank knows of another one.
    struct Other {
        std::uint64_t posted = 0; ///< collectives, by its last answer
        bool has_answered = false;
        Clock::time_point alive_at{}; ///< its last sign; none yet: the clock's epoch
        std::optional<MpiLeave> left;
        std::uint64_t sent = 0; ///< messages from here to there
        std::uint64_t received = 0;
    };

    [[nodiscard]] static std::size_t index(int rank) noexcept {
        return static_cast<std::size_t>(rank);
    }

    [[nodiscard]] MpiOperation& next_operation() {
        if (free_.empty()) {
            operations_.push_back(std::make_unique<MpiOperation>());
            operations_.back()->request_size = index(size_);
            free_.reserve(operations_.size());
            return *operations_.back();
        }
        MpiOperation& operation = *free_.back();
        free_.pop_back();
        operation.peer = -1;
        operation.polled = {};
        operation.is_stalled = false;
        return operation;
    }

    // -- moving -----------------------------------------------------------------------------------

    void start_message(MpiOperation& operation) {
        auto const& said = operation.transfer.said;
        auto const bytes = said.count * size_of(said.dtype);
        MPI_Datatype type = MPI_BYTE;
        int count = static_cast<int>(bytes);
        if (bytes > limits_.most) {
            type =
                operation.tables.made.emplace_back(type_of_part(DType::u8, bytes, 0, limits_.most));
            count = 1;
        }
        MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
        std::byte* const data = operation.transfer.out;
        if (operation.is_send) {
            check_mpi(
                MPI_Isend(data, count, type, operation.peer, operation.tag, data_, &request),
                "MPI_Isend"
            );
        } else {
            check_mpi(
                MPI_Irecv(data, count, type, operation.peer, operation.tag, data_, &request),
                "MPI_Irecv"
            );
        }
    }
    /// Tells the others what this rank is about to do.
    void say(MpiOperation& operation) {
        auto const& said = operation.transfer.said;
        operation.words.assign(3 * (index(size_) + 1), 0);
        operation.words[0] = said.word();
        operation.words[1] = said.count;
        operation.words[2] = said.has_counts ? 1 : 0;
        gather_words(operation, 3, alarm_.comm());
    }
    /// Of each rank the first `count` words, behind them in rank order.
    void gather_words(MpiOperation& operation, int count, MPI_Comm comm) {
        std::uint64_t* const words = operation.words.data();
        MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
        check_mpi(
            MPI_Iallgather(
                words, count, MPI_UINT64_T, words + count, count, MPI_UINT64_T, comm, &request
            ),
            "MPI_Iallgather"
        );
    }
    [[nodiscard]] static bool has_ended(MpiTables& tables) {
        int is_done = 0;
        check_mpi(
            MPI_Testall(
                static_cast<int>(tables.requests.size()),
                tables.requests.data(),
                &is_done,
                MPI_STATUSES_IGNORE
            ),
            "MPI_Testall"
        );
        return is_done != 0;
    }
    [[nodiscard]] bool have_requests_ended(MpiOperation& operation) {
        bool is_done = false;
        require([&] {
            bool const is_receive = operation.is_message() && !operation.is_send;
            is_done = is_receive ? has_received(operation) : has_ended(operation.tables);
        });
        return is_done;
    }
    [[nodiscard]] bool has_received(MpiOperation& operation) {
        int is_done = 0;
        MPI_Status status;
        int const code = MPI_Test(&operation.tables.requests.front(), &is_done, &status);
        MPI_Count bytes = 0;
        if (code == MPI_SUCCESS && is_done != 0) {
            check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
        }
        int error_class = MPI_SUCCESS;
        if (code != MPI_SUCCESS) {
            check_mpi(MPI_Error_class(code, &error_class), "MPI_Error_class");
        }
        auto const& said = operation.transfer.said;
        auto const expected = said.count * size_of(said.dtype);
        if (error_class == MPI_ERR_TRUNCATE ||
            (code == MPI_SUCCESS && is_done != 0 && static_cast<std::size_t>(bytes) != expected)) {
            std::vector<int> ranks{
                (std::min)(rank_, operation.peer), (std::max)(rank_, operation.peer)
            };
            fail(
                {FailureKind::mismatch,
                 std::move(ranks),
                 concat(
                     "rank ",
                     rank_,
                     " expects ",
                     expected,
                     " bytes in ",
                     operation.text(),
                     ", which sent ",
                     code == MPI_SUCCESS ? to_text(bytes) : to_text(std::string_view{"more"})
                 )}
            );
        }
        check_mpi(code, "MPI_Test");
        return is_done != 0;
    }
    /// Whether it is complete now.
    [[nodiscard]] bool advance(MpiOperation& operation) {
        if (operation.state < MpiOperation::State::under_way) {
            for (MpiOperation* const open : open_) { // data starts in the order of posts
                if (!start_when_checked(*open)) {
                    break;
                }
            }
        }
        if (operation.state != MpiOperation::State::under_way || !have_requests_ended(operation)) {
            return false;
        }
        operation.deliver(*memory_);
        open_.erase(std::find(open_.begin(), open_.end(), &operation));
        return true;
    }
    /// Whether its data moves.
    [[nodiscard]] bool start_when_checked(MpiOperation& operation) {
        if (operation.state >= MpiOperation::State::under_way) {
            return true;
        }
        if (!have_requests_ended(operation)) {
            return false;
        }
        operation.tables.requests.clear();
        auto const& transfer = operation.transfer;
        if (operation.state == MpiOperation::State::checking) {
            require_agreement([&] {
                return find_difference(size_, [&](int rank) {
                    auto const* const said = &operation.words[3 * (index(rank) + 1)];
                    return Descriptor::of_word(said[0], said[1], said[2] != 0);
                });
            });
            if (transfer.said.has_counts) {
                operation.words.assign(2 * index(size_) * (index(size_) + 1), 0);
                for (int rank = 0; rank < size_; ++rank) {
                    operation.words[index(rank)] = transfer.sends[rank];
                    operation.words[index(size_ + rank)] = transfer.expects[rank];
                }
                operation.state = MpiOperation::State::checking_counts;
                require([&] { gather_words(operation, 2 * size_, data_); });
                return false;
            }
        } else {
            require_agreement([&] {
                auto const count = [&](int of, int offset) {
                    return operation.words[index(2 * size_ * (of + 1) + offset)];
                };
                return find_difference_of_counts(
                    size_,
                    transfer.said,
                    [&](int from, int to) { return count(from, to); },
                    [&](int from, int to) { return count(to, size_ + from); }
                );
            });
        }
        operation.state = MpiOperation::State::under_way;
        require([&] { calls_.start(transfer, operation.tables); });
        return true;
    }
    template <class Find>
    void require_agreement(Find const& find) {
        if (auto const reason = find()) {
            fail(*reason);
        }
    }

    // -- what the others say ----------------------------------------------------------------------

    /// Hears what has come, here and in the groups around this one.
    void poll() {
        if (parent_ != nullptr) {
            parent_->poll();
            if (parent_->failure_ && !failure_) {
                take_over(*parent_->failure_);
            }
        }
        if (!is_closed_) {
            alarm_.poll([this](MpiWord word, int from, std::span<std::byte const> body) {
                take(word, others_[index(from)], from, body);
            });
        }
    }
    void take(MpiWord word, Other& other, int from, std::span<std::byte const> body) {
        switch (word) {
        case MpiWord::abort: take_over(unpacked_reason(body, size_)); break;
        case MpiWord::leave:
            other.left = MpiLeave::unpacked(body);
            other.posted = other.left->posted;
            has_any_left_ = true;
            break;
        case MpiWord::gone:
            other.left = MpiLeave{};
            other.left->is_gone = true;
            has_any_left_ = true;
            break;
        case MpiWord::keep_alive: other.alive_at = Clock::now(); break;
        case MpiWord::question:
            if (!failure_ && !has_said_last_word_) {
                std::uint64_t const posted = posted_;
                alarm_.tell(from, MpiWord::answer, std::as_bytes(std::span{&posted, 1}));
            }
            break;
        case MpiWord::answer:
            std::memcpy(&other.posted, body.data(), sizeof other.posted);
            other.has_answered = true;
            break;
        }
    }
    void take_over(AbortReason const& reason) {
        if (!failure_) {
            failure_ = reason;
            lose();
        }
    }
    /// What is open stays with MPI, but for receives.
    void lose() {
        memory_->hold();
        for (MpiOperation* const operation : open_) {
            operation->state = MpiOperation::State::lost;
            auto& requests = operation->tables.requests;
            if (operation->is_message() && !operation->is_send && !requests.empty() &&
                requests.front() != MPI_REQUEST_NULL) {
                static_cast<void>(MPI_Cancel(&requests.front()));
            }
        }
    }
    /// Of a rank that has left, nothing more comes.
    void require_peers(MpiOperation const& operation) {
        if (!has_any_left_ || failure_) {
            return;
        }
        for (int rank = 0; rank < size_; ++rank) {
            auto const& left = others_[index(rank)].left;
            if (!left || (operation.is_message() && rank != operation.peer)) {
                continue;
            }
            std::uint64_t const last = !operation.is_message() ? left->posted
                                       : operation.is_send     ? left->received
                                                               : left->sent;
            if (operation.number >= last) {
                fail(reason_of_leaving(rank));
            }
        }
    }

    // -- the deadline -----------------------------------------------------------------------------

    void ask(MpiOperation const& operation) {
        asked_for_ = &operation;
        asked_at_ = Clock::now();
        for (Other& other : others_) {
            other.has_answered = false;
        }
        alarm_.tell_all(MpiWord::question);
    }
    [[nodiscard]] bool is_answered() const {
        bool is_answered = true;
        for (int rank = 0; rank < size_; ++rank) {
            Other const& other = others_[index(rank)];
            is_answered = is_answered && (rank == rank_ || other.has_answered || other.left);
        }
        return is_answered || Clock::now() - asked_at_ >= mpi_patience;
    }
    /// As far as ranks have answered.
    [[nodiscard]] std::vector<int> missing(MpiOperation const& operation) const {
        std::vector<int> ranks;
        for (int rank = 0; rank < size_; ++rank) {
            Other const& other = others_[index(rank)];
            bool const is_here =
                (other.has_answered || other.left) && other.posted > operation.number;
            if (operation.is_message() ? rank == operation.peer : rank != rank_ && !is_here) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }
    /// At the deadline: for how much longer to wait. Nothing: that is not known yet.
    /// @throws TimedOut
    [[nodiscard]] std::optional<std::chrono::nanoseconds> more_time(MpiOperation& operation) {
        if (asked_for_ != &operation) {
            ask(operation);
        }
        if (!is_answered()) {
            return std::nullopt;
        }
        asked_for_ = nullptr;
        std::vector<int> overdue = missing(operation);
        if (overdue.empty()) { // all have come, and MPI is at work
            if (std::exchange(operation.is_stalled, true)) {
                fail(
                    {FailureKind::communication,
                     {},
                     concat(
                         "all ranks have posted a collective, but MPI does not complete it; rank ",
                         rank_,
                         " waits in ",
                         operation.text(),
                         ": MpiOptions{.check = true} tells whether the others do"
                     )}
                );
            }
            return options_.deadline;
        }
        auto const now = Clock::now();
        auto const left = take_ranks_at_work(overdue, options_.deadline, [&](int rank) {
            auto const alive_at = others_[index(rank)].alive_at;
            return alive_at == Clock::time_point{} ? options_.deadline
                                                   : std::chrono::nanoseconds{now - alive_at};
        });
        if (!overdue.empty()) {
            fail(reason_of_delay(
                overdue, "arrive", options_.deadline, rank_, "waits in " + operation.text()
            ));
        }
        return left;
    }

    // -- closing ----------------------------------------------------------------------------------

    /// Polls until `is_so()`, for a moment. Whether it came to be.
    template <class IsSo>
    bool wait_for(IsSo const& is_so) {
        auto const end = Clock::now() + mpi_patience;
        for (MpiPause pause; !is_so(); pause()) {
            if (Clock::now() >= end) {
                return false;
            }
        }
        return true;
    }
    /// Whether the others can complete for this rank what is open here.
    [[nodiscard]] bool can_leave() const noexcept {
        return open_.size() <= MpiLeave::most_open && (open_.empty() || !options_.check) &&
               std::none_of(open_.begin(), open_.end(), [](MpiOperation const* operation) {
                   return operation->is_message() && operation->is_send;
               });
    }
    void say_last_word(bool is_staying) {
        MpiLeave& own = others_[index(rank_)].left.emplace();
        own.is_gone = !is_staying;
        own.posted = posted_;
        for (MpiOperation const* const operation : open_) {
            auto const& said = operation->transfer.said;
            if (is_staying && !operation->is_message()) {
                own.open.push_back(
                    {operation->number, said.word(), said.count, said.has_counts ? 1U : 0U}
                );
            }
        }
        for (int to = 0; to < size_; ++to) {
            if (to == rank_) {
                continue;
            }
            own.sent = others_[index(to)].sent;
            own.received = others_[index(to)].received;
            alarm_.tell(
                to,
                is_staying ? MpiWord::leave : MpiWord::gone,
                is_staying ? own.packed() : std::vector<std::byte>{}
            );
        }
        has_said_last_word_ = true;
    }
    /// Whether all ranks have left in time, and none of them is gone.
    [[nodiscard]] bool hear_last_words() {
        auto end = end_of_wait(options_.deadline);
        bool is_short = false;
        auto const is_gone = [](Other const& other) { return other.left && other.left->is_gone; };
        auto const has_left = [](Other const& other) { return other.left.has_value(); };
        for (MpiPause pause; !std::all_of(others_.begin(), others_.end(), has_left); pause()) {
            poll();
            if (failure_ && !std::exchange(is_short, true)) {
                end = (std::min)(end, Clock::now() + mpi_patience);
            }
            if (Clock::now() >= end || std::any_of(others_.begin(), others_.end(), is_gone)) {
                return false;
            }
        }
        return std::none_of(others_.begin(), others_.end(), is_gone);
    }
    /// Completes what is open on any rank: ranks that have not posted it do, with zeros. All ranks know
    /// the same words, so all decide alike.
    [[nodiscard]] bool drain() {
        std::uint64_t most = 0;
        std::vector<MpiLeave::Open> open;
        for (Other const& other : others_) {
            most = (std::max)(most, other.left->posted);
            open.insert(open.end(), other.left->open.begin(), other.left->open.end());
        }
        auto const by_number = [](auto const& a, auto const& b) { return a.number < b.number; };
        std::sort(open.begin(), open.end(), by_number);
        for (std::size_t i = 0; i < open.size(); ++i) {
            bool const differs =
                i != 0 && open[i].number == open[i - 1].number && open[i] != open[i - 1];
            if (open[i].has_counts != 0 || differs) {
                return false;
            }
        }
        for (std::uint64_t number = posted_; number < most; ++number) {
            auto const found = std::lower_bound(
                open.begin(), open.end(), MpiLeave::Open{number, 0, 0, 0}, by_number
            );
            if (found == open.end() || found->number != number) {
                return false;
            }
            shadow(Descriptor::of_word(found->word, found->count, false));
        }
        return wait_for([&] {
            return std::all_of(open_.begin(), open_.end(), [](MpiOperation* const operation) {
                return has_ended(operation->tables);
            });
        });
    }
    /// Takes part in a collective of the others with zeros. As all ranks do, it gives MPI one buffer where
    /// that is both input and output: algorithms may depend on it.
    void shadow(Descriptor const& said) {
        bool const is_one =
            is_one_buffer(said.collective) || said.collective == Collective::barrier;
        std::size_t const bytes = said.count * size_of(said.dtype) * (is_one ? 1 : index(size_));
        MpiOperation& operation = next_operation();
        std::byte* const in = zeros_.emplace_back(bytes).data();
        std::byte* const out = is_one ? in : zeros_.emplace_back(bytes).data();
        auto const parts = PartSizes::equal(said.count);
        operation.transfer = {said, in, out, parts, parts};
        operation.number = posted_++;
        operation.state = MpiOperation::State::lost;
        open_.push_back(&operation);
        calls_.start(operation.transfer, operation.tables);
    }

    void keep() noexcept;

    MPI_Comm data_;
    int rank_;
    int size_;
    MpiOptions options_;
    MpiLimits limits_;
    MpiCalls calls_;
    MpiAlarm alarm_;
    std::shared_ptr<MpiRank> parent_;
    std::shared_ptr<MpiMemory> memory_ = std::make_shared<MpiMemory>();
    std::vector<Other> others_;
    std::vector<std::unique_ptr<MpiOperation>> operations_;
    std::vector<MpiOperation*> free_;
    std::deque<MpiOperation*> open_; ///< in the order of their posts
    std::uint64_t posted_ = 0;       ///< collectives
    std::optional<AbortReason> failure_;
    bool has_any_left_ = false;
    bool has_said_last_word_ = false;
    bool is_closed_ = false;
    MpiOperation const* asked_for_ = nullptr; ///< about which the others were asked
    Clock::time_point asked_at_{};
    std::deque<std::vector<std::byte>> zeros_; ///< of collectives that only the others wanted
};

/// What MPI may still use when its rank is gone. It is never freed.
inline std::vector<std::shared_ptr<MpiRank>>& kept_mpi_ranks() {
    static auto& kept = *new std::vector<std::shared_ptr<MpiRank>>;
    return kept;
}

inline void MpiRank::keep() noexcept {
    memory_->hold();
    try {
        kept_mpi_ranks().push_back(shared_from_this());
    } catch (...) {
        new std::shared_ptr<MpiRank>{shared_from_this()};
    }
}

}}} // namespace joinable::v0::detail
