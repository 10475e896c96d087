// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/background_thread.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/polling.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/gloo/detail/collectives.hpp>
#include <joinable/communicator/gloo/detail/mesh.hpp>
#include <joinable/communicator/gloo/detail/messages.hpp>
#include <joinable/communicator/gloo/detail/operation.hpp>
#include <joinable/communicator/gloo/detail/rendezvous.hpp>
#include <joinable/communicator/tcp/communicator.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// How long a rank whose connection broke waits for the reason.
inline constexpr std::chrono::seconds gloo_patience{5};

/// One rank. A thread of its own runs its collectives in the order of posts, because Gloo blocks.
/// The user's thread has the TCP communicator by which all ranks say that they have arrived, and
/// why they fail: see poll().
class GlooRank : public HasWorks {
public:
    using Operation = GlooOperation;

    GlooRank(GlooMeeting rendezvous, std::shared_ptr<GlooRank> parent)
        : parent_{std::move(parent)}, control_{attached(rendezvous, parent_)},
          options_{rendezvous.options}, own_address_{rendezvous.address_here()} {
        control_.set_deadline(options_.connect_timeout); // until the last wait of construction
        try {
            mesh_.emplace(
                rank(),
                size(),
                own_address_,
                options_.connect_timeout,
                [&](std::vector<char> const& own) { return share(control_, own); },
                [&] {
                    if (abort_reason()) {
                        throw_reason();
                    }
                }
            );
            lane_.emplace(*mesh_);
            messages_.emplace(*mesh_);
            control_.barrier();
            control_.set_deadline(options_.deadline);
            static_cast<void>(worker_.emplace(
                concat("the thread of rank ", rank(), "'s collectives by Gloo"), [this] { work(); }
            ));
        } catch (CommunicationError const& error) { // there is no thread to connect, or to work
            fail({FailureKind::communication, {}, blame(error.what())});
        } catch (Error const&) {
            throw;
        } catch (std::exception const& error) {
            fail({FailureKind::communication, {}, blame(error.what())});
        }
    }
    GlooRank(GlooRank const&) = delete;
    GlooRank& operator=(GlooRank const&) = delete;
    ~GlooRank() = default; // see close()

    [[nodiscard]] int rank() const noexcept { return options_.rank; }
    [[nodiscard]] int size() const noexcept { return options_.size; }
    [[nodiscard]] bool is_renumbered() const noexcept { return control_.is_renumbered(); }

    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        options_.deadline = deadline;
        return control_.set_deadline(deadline);
    }
    void keep_alive() { control_.keep_alive(); }
    [[nodiscard]] std::vector<int> missing_ranks() const { return control_.missing_ranks(); }

    [[nodiscard]] Operation& post(Request const& request) {
        return ended_by_failure([&]() -> Operation& {
            take_over_from_parent();
            compare_arrivals();
            std::erase_if(open_, [&](auto const& one) {
                return one->is_released && one->is_compared && state_of(*one) != State::posted;
            });
            Operation& operation =
                *open_.emplace_back(std::make_unique<Operation>(request, posted_, rank(), size()));
            try {
                static_cast<void>(
                    operation.arriving.emplace(arrive(operation.arrival, request.signature))
                );
            } catch (...) {
                open_.pop_back();
                throw;
            }
            ++posted_;
            if (operation.goes_with_arrival()) {
                operation.state = State::complete; // once all ranks have arrived
                return operation;
            }
            {
                std::lock_guard const lock{mutex_};
                queue_.push_back(&operation);
            }
            has_work_.notify_one();
            return operation;
        });
    }
    [[nodiscard]] GlooMessage& post_message(bool is_send, int peer, int tag, Buffer buffer) {
        return ended_by_failure([&]() -> GlooMessage& {
            take_over_from_parent();
            return messages_->post(is_send, peer, tag, buffer);
        });
    }
    void finish(GlooMessage& message) {
        for (auto gap = WaitClock::gap_of_tests; !is_over(message, gap);
             gap = WaitClock::gap_of_waits) {
            messages_->wait_until_over(message, long_time);
        }
    }
    void finish(Operation& operation) {
        for (auto gap = WaitClock::gap_of_tests; !is_over(operation, gap);
             gap = WaitClock::gap_of_waits) {
            if (state_of(operation) == State::complete) { // but others are missing
                ended_by_failure([&] { operation.arriving->wait(); });
                continue;
            }
            std::unique_lock lock{mutex_};
            has_progress_.wait_for(lock, long_time, [&] {
                return operation.state == State::complete;
            });
        }
    }
    /// A collective or a message.
    template <class One>
    [[nodiscard]] bool test(One& one) {
        return is_over(one, WaitClock::gap_of_tests);
    }
    template <class One>
    [[nodiscard]] bool progress(One& one) {
        return is_over(one, std::nullopt);
    }
    [[nodiscard]] bool is_done(Operation const& operation) const {
        return state_of(operation) == State::complete &&
               (operation.is_compared || !operation.needs_arrivals());
    }
    [[nodiscard]] bool is_done(GlooMessage const& message) const {
        return messages_->state_of(message) == GlooMessage::State::complete;
    }

    [[nodiscard]] static char const* kind_of(Operation const&) noexcept { return "a collective"; }
    [[nodiscard]] static char const* kind_of(GlooMessage const&) noexcept { return "a message"; }
    static void release(Operation& operation) noexcept { operation.is_released = true; }
    static void release(GlooMessage& message) noexcept { message.is_released = true; }

    /// The reason reaches the others before the connections close.
    void abort(AbortReason const& reason) {
        let_arrive();
        own_reason_ = own_reason_.value_or(reason);
        control_.abort(reason);
        end();
    }
    [[nodiscard]] bool is_aborted() { return abort_reason().has_value(); }
    /// The first reason that reached rank 0.
    [[nodiscard]] std::optional<AbortReason> abort_reason() {
        if (parent_ != nullptr) {
            if (auto const reason = parent_->reason_for_groups()) {
                control_.abort(*reason);
            }
        }
        return control_.abort_reason();
    }

    /// Where the ranks of one color meet. Collective; blocks.
    [[nodiscard]] GlooMeeting split(int color, int key) {
        return ended_by_failure([&] {
            take_over_from_parent();
            Descriptor const split{split_collective};
            GlooArrival arrival{split, rank(), size()};
            arrive(arrival, split).wait();
            compare_arrivals();
            if (auto const reason = arrival.difference()) {
                fail(*reason);
            }
            try {
                return meeting_of_group(control_, options_, own_address_, splits_++, color, key);
            } catch (std::exception const& error) {
                // The others wait for this rank, which cannot listen; or they failed before it.
                fail({FailureKind::communication, {}, blame(error.what())});
            }
        });
    }

    /// The rank's last act.
    void close(bool is_unwinding) noexcept {
        try {
            take_over_from_parent(); // before the others hear that this rank leaves
        } catch (...) { // NOLINT(bugprone-empty-catch): the others notice that it leaves
        }
        if (is_unwinding) {
            abort_for_exception(*this, "the scope of its communicator");
        }
        {
            std::lock_guard const lock{mutex_};
            is_closing_ = true;
        }
        has_work_.notify_one();
        worker_.reset(); // waits for it
        open_.clear();   // waits for arrivals of other ranks
        messages_.reset();
        mesh_.reset();
    }

private:
    using State = Operation::State;

    static constexpr std::chrono::microseconds short_time{100};
    static constexpr std::chrono::milliseconds long_time{2};

    [[nodiscard]] State state_of(Operation const& operation) const {
        std::lock_guard const lock{mutex_};
        return operation.state;
    }
    [[nodiscard]] std::string blame(std::string const& error) const {
        return concat("rank ", rank(), " cannot go on by Gloo: ", error);
    }

    [[nodiscard]] static std::string waiting_in(GlooMessage const& message) {
        char const* const whose = message.is_send ? " to rank " : " from rank ";
        return concat(message.text(), whose, message.peer);
    }
    [[nodiscard]] std::string text_of_stall(Operation const& operation) const {
        double const seconds = std::chrono::duration<double>(options_.deadline).count();
        int const other = lane_->awaited();
        return concat(
            "no data moved ",
            other < 0 ? concat("on rank ", rank())
                      : "between " + ranks_text(both_ranks(rank(), other)),
            " within ",
            seconds,
            " s, in ",
            operation.request.signature.text(),
            ", which all ranks have posted: the network between them is broken or too slow for "
            "the deadline, or one is stopped"
        );
    }

    // -- the thread -------------------------------------------------------------------------------

    void work() {
        std::unique_lock lock{mutex_};
        for (;;) {
            has_work_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
            if (queue_.empty()) {
                return;
            }
            Operation& operation = *queue_.front();
            lock.unlock();
            std::string error;
            State const state = run(operation, error);
            lock.lock();
            operation.state = state;
            operation.error = std::move(error);
            queue_.pop_front();
            has_progress_.notify_all();
        }
    }
    [[nodiscard]] State run(Operation const& operation, std::string& error) {
        try {
            GlooCollective{*lane_, scratch_, operation.request, operation.number}.run();
            return State::complete;
        } catch (std::exception const& failure) {
            error = failure.what();
        } catch (...) {
            error = "an unknown exception";
        }
        mesh_->close(); // the others wait for what this rank no longer sends
        return State::broken;
    }

    // -- how collectives end ----------------------------------------------------------------------

    /// The most for which the time since the last look counts. None: there is no deadline.
    using Gap = std::optional<std::chrono::nanoseconds>;

    template <class One>
    [[nodiscard]] bool is_over(One& one, Gap longest_gap) {
        // In a forked process a thread that was not forked may hold the lock for ever.
        require_here(rank());
        if (!is_done(one)) {
            ended_by_failure([&] { poll(one, longest_gap); });
        }
        return is_done(one);
    }
    /// When a rank has left, the messages of others may still come. So that does not end this at
    /// once: a closed connection tells, or the patience is over.
    /// @throws what ends all ranks
    void poll(GlooMessage& message, Gap longest_gap) {
        take_over_from_parent();
        if (auto const reason = messages_->mismatch()) {
            fail(*reason);
        }
        auto const gap = longest_gap.value_or(WaitClock::gap_of_tests);
        bool const is_over = control_.is_aborted(); // what broke it was told before
        auto const state = messages_->state_of(message);
        if (state == GlooMessage::State::complete) {
            return;
        }
        bool const is_broken = state == GlooMessage::State::broken;
        if (is_broken || is_over) {
            bool const is_late = message.ending.reaches(gloo_patience, gap);
            if (is_over && (is_broken || is_late || !has_any_left())) {
                throw_reason(waiting_in(message));
            }
            if (is_late) {
                fail({FailureKind::communication, {}, blame(message.error)});
            }
        } else if (longest_gap) {
            message.waited.extend_when_reached(options_.deadline, gap, [&] {
                return std::optional{
                    control_.own_rank().ask_about(message.peer, "waits in " + waiting_in(message))
                };
            });
        }
    }
    /// Learns from the others. When all ranks have arrived, a rank that leaves or fails does not end
    /// this at once: the data may be complete without it, or its closed connections tell.
    /// @throws what ends all ranks
    void poll(Operation& operation, Gap longest_gap) {
        bool const is_over = control_.is_aborted(); // arrivals that came before that are compared
        compare_arrivals(&operation);               // throws the reason if one did not
        if (!operation.is_compared) {
            take_over_from_parent();
            auto const test = [&](TcpRank& hub, std::uint64_t number) {
                return hub.test(number, *longest_gap);
            };
            if (longest_gap && with_rank(*operation.arriving, test)) {
                compare_arrivals(&operation);
            }
        }
        if (is_done(operation)) {
            return;
        }
        std::unique_lock lock{mutex_};
        bool const is_broken = operation.state == State::broken;
        std::string const error = operation.error;
        lock.unlock();
        std::uint64_t const moved = lane_->moved();
        if (std::exchange(operation.moved, moved) != moved) {
            operation.stalled = {};
        }
        auto const has_stalled_for = [&](std::chrono::nanoseconds time) {
            return operation.stalled.reaches(time, longest_gap.value_or(WaitClock::gap_of_tests));
        };
        if (is_over && is_broken) {
            throw_reason(operation.request.signature.text());
        }
        if (is_broken) { // because another rank has closed its connections, which says why, or died
            if (has_stalled_for(gloo_patience)) {
                fail({FailureKind::communication, {}, blame(error)});
            }
        } else if (is_over) {
            if (has_stalled_for(gloo_patience)) {
                throw_reason(operation.request.signature.text());
            }
        } else if (longest_gap && operation.is_compared && has_stalled_for(options_.deadline)) {
            fail({FailureKind::communication, {}, text_of_stall(operation)});
        }
    }
    /// Arrivals complete in the order of posts. Stops behind `last`.
    void compare_arrivals(Operation const* last = nullptr) {
        for (auto const& one : open_) {
            if (!one->is_compared && !compare(*one)) {
                return;
            }
            if (one.get() == last) {
                return;
            }
        }
    }
    /// Data can arrive before the arrival words. Lets completed collectives finish before this rank aborts.
    void let_arrive() noexcept {
        auto const is_missing = [&](auto const& one) { return !one->is_compared && is_done(*one); };
        auto const is_over = [&] {
            if (control_.is_aborted() || std::none_of(open_.begin(), open_.end(), is_missing)) {
                return true;
            }
            compare_arrivals();
            return false;
        };
        try {
            wait_at_most(std::chrono::milliseconds{100}, is_over, PollPause{short_time});
        } catch (...) { // NOLINT(bugprone-empty-catch): another reason was first
        }
    }
    /// Whether all ranks have arrived. @throws Mismatch; what ends all ranks, if some did not arrive
    [[nodiscard]] bool compare(Operation& operation) {
        if (!operation.arriving->progress()) {
            return false;
        }
        if (auto const reason = operation.arrival.difference()) {
            fail(*reason);
        }
        operation.is_compared = true;
        if (operation.goes_with_arrival() &&
            !operation.is_released) { // else its buffer may be freed
            operation.arrival.give_data(operation.request.out);
        }
        return true;
    }
    void take_over_from_parent() {
        if (parent_ != nullptr) {
            if (auto const reason = parent_->reason_for_groups()) {
                fail(*reason);
            }
        }
    }
    /// Why this rank's groups end, if they do. A rank that has left does not end those of others.
    [[nodiscard]] std::optional<AbortReason> reason_for_groups() {
        auto reason = abort_reason();
        return !reason || has_any_left() ? own_reason_ : reason;
    }
    /// An abort of the parent reaches every wait. The rank with the hub of a group ends the parent if
    /// that hub cannot run: nobody else could tell the ranks that wait for it.
    static TcpEnd attached(GlooMeeting& rendezvous, std::shared_ptr<GlooRank> const& parent) {
        if (parent != nullptr) {
            rendezvous.hear = [parent] { return parent->reason_for_groups(); };
        }
        try {
            return rendezvous.attach();
        } catch (CommunicationError const& error) {
            if (parent == nullptr || rendezvous.options.rank != 0) {
                throw;
            }
            parent->abort({FailureKind::communication, {}, parent->blame(error.what())});
            parent->throw_reason();
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        control_.abort(reason);
        throw_reason();
    }
    /// Whether the ranks have ended because one of them left.
    [[nodiscard]] bool has_any_left() {
        auto const reason = control_.abort_reason();
        return reason && reason->has_left && reason->origin < 0; // by itself, without an abort
    }
    /// The first reason that reached rank 0. @pre control_.is_aborted()
    [[noreturn]] void throw_reason() { throw_failure(*control_.abort_reason()); }
    [[noreturn]] void throw_reason(std::string const& what) {
        throw_failure(in_words_of(rank(), what, *control_.abort_reason()));
    }
    /// After any failure no collective can complete, and nothing may write to the caller's memory.
    template <class F>
    std::invoke_result_t<F const&> ended_by_failure(F const& f) {
        require_here(rank());
        try {
            return f();
        } catch (...) {
            end();
            throw;
        }
    }
    void end() noexcept {
        if (mesh_) {
            mesh_->close();
            messages_->end();
            std::unique_lock lock{mutex_};
            has_progress_.wait(lock, [this] { return queue_.empty(); });
        }
    }

    [[nodiscard]] TcpWork arrive(GlooArrival& arrival, Descriptor const& shown) {
        RequestsOf const requests{rank(), size()};
        return control_.post(requests.all_reduce(arrival.buffer(), ReduceOp::sum), shown);
    }

    std::shared_ptr<GlooRank> parent_;
    TcpEnd control_;
    TcpOptions options_; ///< by which the ranks have met
    std::string own_address_;
    std::optional<GlooMesh> mesh_;
    std::optional<GlooLane> lane_;
    std::optional<GlooMessages> messages_;
    GlooCollective::Kept scratch_{Scratch{the_host()}, Scratch{the_host()}}; ///< of the thread
    std::deque<std::unique_ptr<Operation>> open_; ///< in the order of posts
    std::uint64_t posted_ = 0;
    std::uint64_t splits_ = 0;
    std::optional<AbortReason> own_reason_; ///< this rank's own abort

    mutable std::mutex mutex_; ///< for what follows
    std::condition_variable has_work_;
    std::condition_variable has_progress_;
    std::deque<Operation*> queue_; ///< the first one is under way
    bool is_closing_ = false;
    std::optional<BackgroundThread> worker_;
};

}}} // namespace joinable::v0::detail
