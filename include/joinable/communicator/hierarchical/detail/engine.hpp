// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/poll_pause.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/settle.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A collective of one level, which is a part of one of all ranks.
struct LevelStep {
    Level level = Level::local;
    Collective collective = Collective::broadcast; ///< or reduce, all_reduce
    Buffer buffer = {};
    ReduceOp op = ReduceOp::sum;
    int root = 0;
};

/// What one collective of all ranks has in flight on one level.
template <class Comm>
class LevelWorks {
public:
    void start(Comm& comm, LevelStep const& step) { // keeps the works: nvcc 13 looks at emplace()
        if (step.collective == Collective::broadcast) {
            (void)broadcast_.emplace(comm.broadcast(step.buffer, step.root));
            return;
        }
        if constexpr (has_reduce<Comm>) {
            if (step.collective == Collective::reduce) {
                (void)reduce_.emplace(comm.reduce(step.buffer, step.op, step.root));
                return;
            }
        } // else all ranks get the sum, and a broadcast overwrites it
        (void)all_reduce_.emplace(comm.all_reduce(step.buffer, step.op));
    }
    [[nodiscard]] bool are_settled(Waiting waiting) {
        return is_settled(reduce_, waiting) && is_settled(all_reduce_, waiting) &&
               is_settled(broadcast_, waiting);
    }

private:
    template <class C>
    struct ReduceWork {
        using type = CompletedWork;
    };
    template <class C>
        requires has_reduce<C>
    struct ReduceWork<C> {
        using type = decltype(std::declval<C&>().reduce(Buffer{}, ReduceOp::sum, 0));
    };

    std::optional<typename ReduceWork<Comm>::type> reduce_;
    std::optional<work_of<Comm>> all_reduce_;
    std::optional<decltype(std::declval<Comm&>().broadcast(Buffer{}, 0))> broadcast_;
};

/// The collectives of one rank. Local rank 0 leads its machine: it takes part in both levels, one
/// collective after another, and carries failures from level to level. The other ranks post at once
/// what they do on their machine.
///
/// A leader polls, because no wait on one level ends by what happens on the other. While it polls,
/// it tells both levels that it is alive. So a rank that is late is missed by the ranks of its own
/// machine only, and all ranks get that reason.
template <class Local, class Across>
class HierarchicalEngine {
public:
    /// Collective. `across` is not null on leaders only.
    HierarchicalEngine(Local& local, Across* across) : local_{local}, across_{across} {
        if constexpr (has_set_deadline<Local>) {
            deadline_ = local.set_deadline(default_deadline);
            local.set_deadline(deadline_);
        }
        if constexpr (has_set_deadline<Across>) {
            if (across != nullptr) {
                std::chrono::nanoseconds const theirs = across->set_deadline(deadline_);
                across->set_deadline(theirs);
                deadline_ = (std::min)(deadline_, theirs);
            }
        }
        meet();
    }
    HierarchicalEngine(HierarchicalEngine const&) = delete;
    HierarchicalEngine& operator=(HierarchicalEngine const&) = delete;

    [[nodiscard]] Local& local() const noexcept { return local_; }
    [[nodiscard]] Machines const& machines() const noexcept { return machines_; }
    [[nodiscard]] int rank() const { return machines_.first_of(machines_.own()) + local_.rank(); }

    /// Returns the collective's number, for the other members.
    /// @throws the error that ended the engine.
    [[nodiscard]] std::uint64_t post(Request const& request) {
        if (failure_) {
            throw_failure(*failure_);
        }
        std::uint64_t const number = done_ + operations_.size();
        add(steps_of(request));
        if (is_leader()) {
            (void)advance(number, Waiting::polls); // earlier ones
        }
        return number;
    }
    [[nodiscard]] bool is_done(std::uint64_t number) const noexcept { return number < done_; }
    void wait(std::uint64_t number) {
        if (has_two_levels()) {
            for (PollPause pause{std::chrono::microseconds{20}}; !advance(number, Waiting::tests);
                 pause()) {
            }
        } else {
            (void)advance(number, Waiting::blocks);
        }
    }
    [[nodiscard]] bool test(std::uint64_t number) { return advance(number, Waiting::tests); }
    [[nodiscard]] bool progress(std::uint64_t number) { return advance(number, Waiting::polls); }

    /// All ranks throw the first reason that reaches them.
    void abort(AbortReason const& reason) {
        if (!failure_) {
            failure_ = cut(reason);
        }
        if constexpr (has_abort<Local>) {
            local_.abort(sealed(*failure_, Level::local, machines_));
        }
        if constexpr (has_abort<Across>) {
            if (across_ != nullptr) {
                across_->abort(sealed(*failure_, Level::across, machines_));
            }
        }
    }
    /// Tells the others that an exception is leaving `what` on this rank.
    void abort_for_exception(char const* what) {
        abort(blamed_on(rank(), {FailureKind::peer_failed, {}, concat("an exception left ", what)})
        );
    }
    [[nodiscard]] bool is_aborted() const {
        return failure_ || local_.is_aborted() || (across_ != nullptr && across_->is_aborted());
    }

    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        local_.set_deadline(deadline);
        if (across_ != nullptr) {
            across_->set_deadline(deadline);
        }
        return std::exchange(deadline_, deadline);
    }
    void keep_alive() {
        if constexpr (has_keep_alive<Local>) {
            local_.keep_alive();
        }
        if constexpr (has_keep_alive<Across>) {
            if (across_ != nullptr) {
                across_->keep_alive();
            }
        }
    }
    [[nodiscard]] std::vector<int> missing_ranks() const {
        std::vector<int> ranks = local_.missing_ranks();
        for (int& rank : ranks) {
            rank += machines_.first_of(machines_.own());
        }
        if (across_ != nullptr) {
            for (int const machine : across_->missing_ranks()) {
                ranks.push_back(machines_.first_of(machine));
            }
        }
        std::sort(ranks.begin(), ranks.end());
        return ranks;
    }

private:
    struct Operation {
        explicit Operation(std::vector<LevelStep> all) : steps{std::move(all)} {}

        std::vector<LevelStep> steps;
        std::size_t started = 0;
        LevelWorks<Local> local;
        LevelWorks<Across> across;
    };

    [[nodiscard]] bool is_leader() const { return local_.rank() == 0; }
    /// Whether this rank waits for others on both levels. If not, it may block.
    [[nodiscard]] bool has_two_levels() const {
        return local_.size() > 1 && across_ != nullptr && across_->size() > 1;
    }

    // -- meeting ----------------------------------------------------------------------------------

    void meet() {
        std::array<std::uint64_t, 2> wrong{
            is_leader() && across_ == nullptr ? 1U : 0U,
            !is_leader() && across_ != nullptr ? 1U : 0U
        };
        run({{Level::local, Collective::all_reduce, words(wrong)}});
        if (wrong[0] != 0) {
            fail(
                {FailureKind::contract,
                 {},
                 "expected a communicator of the machines' leaders on local rank 0, which leads its "
                 "machine, but it has none"}
            );
        }
        if (wrong[1] != 0) {
            fail(
                {FailureKind::contract,
                 {},
                 concat(
                     "expected a communicator of the machines' leaders on local rank 0 alone, but ",
                     wrong[1],
                     " other ranks of its machine have one: leave the optional empty there"
                 )}
            );
        }
        std::array<std::uint64_t, 2> place{};
        if (across_ != nullptr) {
            place = {
                static_cast<std::uint64_t>(across_->size()),
                static_cast<std::uint64_t>(across_->rank())
            };
        }
        run({{Level::local, Collective::broadcast, words(place)}});
        std::vector<std::uint64_t> sizes(place[0]);
        if (is_leader()) {
            sizes[place[1]] = static_cast<std::uint64_t>(local_.size());
        }
        run({
            {Level::across, Collective::all_reduce, words(sizes)},
            {Level::local, Collective::broadcast, words(sizes)},
        });
        machines_ = Machines{sizes, static_cast<int>(place[1])};
    }
    template <class Words>
    [[nodiscard]] static Buffer words(Words& words) noexcept {
        return {words.data(), words.size(), DType::u64};
    }
    void run(std::initializer_list<LevelStep> steps) {
        std::vector<LevelStep> taken;
        for (LevelStep const& step : steps) {
            take(taken, step);
        }
        add(std::move(taken));
        wait(done_);
    }

    // -- collectives ------------------------------------------------------------------------------

    /// Keeps a step that this rank takes part in.
    void take(std::vector<LevelStep>& steps, LevelStep const& step) const {
        bool const is_alone = step.level == Level::local
                                  ? local_.size() == 1
                                  : across_ == nullptr || across_->size() == 1;
        if (!is_alone) {
            steps.push_back(step);
        }
    }
    [[nodiscard]] std::vector<LevelStep> steps_of(Request const& request) {
        Descriptor const& said = request.signature;
        std::vector<LevelStep> steps;
        if (said.collective == Collective::broadcast) {
            int const machine = machines_.machine_of(said.root);
            bool const is_here = machine == machines_.own();
            int const local_root = is_here ? said.root - machines_.first_of(machine) : 0;
            std::array<LevelStep, 2> both{
                LevelStep{Level::across, Collective::broadcast, request.out, said.op, machine},
                LevelStep{Level::local, Collective::broadcast, request.out, said.op, local_root},
            };
            if (is_here) { // also from the leader: so its machine compares before others get data
                std::swap(both[0], both[1]);
            }
            take(steps, both[0]);
            take(steps, both[1]);
            return steps;
        }
        bool const is_barrier = said.collective == Collective::barrier;
        Buffer const buffer = is_barrier ? Buffer{&met_, 1, DType::u8} : request.out;
        take(steps, {Level::local, Collective::reduce, buffer, said.op});
        take(steps, {Level::across, Collective::all_reduce, buffer, said.op});
        take(steps, {Level::local, Collective::broadcast, buffer, said.op});
        return steps;
    }
    void add(std::vector<LevelStep> steps) {
        operations_.emplace_back(std::move(steps));
        if (!is_leader()) {
            start_next(operations_.back());
        }
    }
    /// A leader starts one step. The steps of other ranks are all local, and the leader starts the
    /// second one when it has all that the first one reads: so they start both.
    void start_next(Operation& operation) {
        do {
            if (operation.started == operation.steps.size()) {
                return;
            }
            LevelStep const& step = operation.steps[operation.started++];
            (void)on_level(step.level, [&] {
                if (step.level == Level::local) {
                    operation.local.start(local_, step);
                } else {
                    operation.across.start(*across_, step);
                }
                return true;
            });
        } while (!is_leader());
    }
    /// Whether that collective is done. Also does those before it.
    [[nodiscard]] bool advance(std::uint64_t number, Waiting waiting) {
        while (!is_done(number)) {
            if (failure_) {
                end();
            }
            if (!advance_first(waiting)) {
                if (has_two_levels()) {
                    listen();
                }
                return false;
            }
            operations_.pop_front();
            ++done_;
        }
        return true;
    }
    [[nodiscard]] bool advance_first(Waiting waiting) {
        Operation& first = operations_.front();
        for (;;) {
            bool const is_settled =
                on_level(Level::local, [&] { return first.local.are_settled(waiting); }) &&
                on_level(Level::across, [&] { return first.across.are_settled(waiting); });
            if (!is_settled) {
                return false;
            }
            if (first.started == first.steps.size()) {
                return true;
            }
            start_next(first);
        }
    }

    // -- failures ---------------------------------------------------------------------------------

    /// An error of a level ends all ranks.
    template <class F>
    [[nodiscard]] bool on_level(Level level, F const& f) {
        try {
            return f();
        } catch (...) {
            fail(globalised(reason_of(std::current_exception()), level, machines_));
        }
    }
    /// Carries failures from level to level, and tells both that this rank waits. What is in flight
    /// throws by itself, and a level that the collective has left may have ended, because ranks that
    /// have finished may leave. So this listens to those to which it has yet to go.
    void listen() {
        Operation const& first = operations_.front();
        for (std::size_t next = first.started; next < first.steps.size(); ++next) {
            if (first.steps[next].level == Level::local) {
                listen_to(local_, Level::local);
            } else {
                listen_to(*across_, Level::across);
            }
        }
        auto const now = std::chrono::steady_clock::now();
        if (now - last_sign_ >= deadline_ / 8) {
            last_sign_ = now;
            keep_alive();
        }
    }
    template <class Comm>
    void listen_to(Comm& comm, Level level) {
        if constexpr (has_abort<Comm>) {
            if (comm.is_aborted()) { // a collective that begins now throws the reason
                (void)on_level(level, [&]() -> bool {
                    std::uint8_t byte = 0;
                    comm.broadcast({&byte, 1, DType::u8}, 0).wait();
                    throw CommunicationError{"a communicator was aborted, and does not say why"};
                });
            }
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        end();
    }
    /// No rank uses the buffers after that.
    [[noreturn]] void end() {
        operations_.clear();
        throw_failure(*failure_);
    }

    Local& local_;
    Across* across_;
    Machines machines_;
    std::chrono::nanoseconds deadline_ = default_deadline;
    std::chrono::steady_clock::time_point last_sign_{}; ///< of life, from a leader that waits
    std::deque<Operation> operations_;                  ///< posted and not done
    std::uint64_t done_ = 0;                            ///< number of finished collectives
    std::uint8_t met_ = 0;                              ///< of barriers
    std::optional<AbortReason> failure_;
};

}}} // namespace joinable::v0::detail
