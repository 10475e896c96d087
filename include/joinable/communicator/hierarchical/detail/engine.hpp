// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/polling.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/hierarchical/detail/groups.hpp>
#include <joinable/communicator/hierarchical/detail/level_plan.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
#include <joinable/communicator/hierarchical/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of one rank. Local rank 0 leads its machine: it takes part in both levels, one
/// collective after another, and carries failures from level to level. The other ranks post at once
/// what they do on their machine, unless they compare first.
///
/// A wait on one level does not end when the other level fails, so a leader polls both. While it polls,
/// it tells both levels that it is alive. So only the ranks of its own machine name a late rank, and all
/// ranks get that reason.
class HierarchicalEngine : public HasWorks {
public:
    /// Collective, unless the levels are a group's: split() has met.
    explicit HierarchicalEngine(Levels levels)
        : levels_{std::move(levels)}, local_{*levels_.local}, across_{levels_.across.get()},
          machines_{levels_.machines}, parent_{levels_.parent} {
        find_deadline();
        if (!machines_.are_known()) {
            meet();
        }
    }
    HierarchicalEngine(HierarchicalEngine const&) = delete;
    HierarchicalEngine& operator=(HierarchicalEngine const&) = delete;

    [[nodiscard]] AnyInterface& local() const noexcept { return local_; }
    [[nodiscard]] Machines const& machines() const noexcept { return machines_; }
    [[nodiscard]] int rank() const { return machines_.first_of(machines_.own()) + local_.rank(); }
    [[nodiscard]] int size() const noexcept { return machines_.ranks(); }

    /// Returns the collective's number, for the other members.
    /// @throws the error that ended the engine.
    [[nodiscard]] std::uint64_t post(Request const& request) {
        if (failure_) {
            throw_failure(in_words_of(rank(), request.signature.text(), *failure_));
        }
        hear_parent();
        std::uint64_t const number = done_ + operations_.size();
        operations_.emplace_back(request, machines_.ranks());
        if (is_leader()) {
            (void)advance(number, Waiting::polls); // earlier ones
        } else {
            start_posted();
        }
        return number;
    }
    [[nodiscard]] bool is_done(std::uint64_t number) const noexcept { return number < done_; }
    void finish(std::uint64_t number) {
        if (has_two_levels() || parent_) {
            for (PollPause pause{std::chrono::microseconds{20}}; !advance(number, Waiting::tests);
                 pause()) {
            }
        } else {
            (void)advance(number, Waiting::blocks);
        }
    }
    [[nodiscard]] bool test(std::uint64_t number) { return advance(number, Waiting::tests); }
    [[nodiscard]] bool progress(std::uint64_t number) { return advance(number, Waiting::polls); }

    /// The same on all ranks.
    [[nodiscard]] bool can_split() const noexcept { return levels_.can_split; }
    /// Collective; blocks. Makes the group of one rank, when ranks know the choices of all: its
    /// `members`, in its order.
    /// @throws ContractViolation  on all ranks, which can go on: a level refuses a group.
    [[nodiscard]] Levels
    split(GroupChoice choice, Machines group, std::vector<int> const& members) {
        group.become_group_of(machines_);
        Levels levels{
            nullptr, nullptr, options(), group, [this] { return heard(); }, renumbers(members)
        };
        std::exception_ptr refusal; // the ranks of that level go on
        auto const part_of = [&](Level level, AnyInterface& whole, int key) {
            return on_level(level, [&]() -> std::unique_ptr<AnyInterface> {
                try {
                    return whole.split(choice.color, key);
                } catch (ContractViolation const&) {
                    end_by(reason_on(whole, level));
                    refusal = std::current_exception();
                    return nullptr;
                }
            });
        };
        levels.local = part_of(Level::local, local_, choice.key);
        if (across_ != nullptr) { // one group for each color, in the order of the group's machines
            levels.across = part_of(Level::across, *across_, group.own());
        }
        if (group.count() == 1) { // any of its ranks may be the first one
            levels.across.reset();
        }
        enum Answer : std::uint64_t { can, cannot, refused };
        // By rank: whether its part can split again.
        std::vector<std::uint64_t> answers(as_index(size()));
        answers[as_index(rank())] = refusal ? refused : levels.can_split_here() ? can : cannot;
        share_answers(answers);
        if (auto const others = std::count(answers.begin(), answers.end(), refused); others != 0) {
            levels.across.reset(); // before an exception is under way, which would abort them
            levels.local.reset();
            if (refusal) {
                std::rethrow_exception(refusal);
            }
            throw ContractViolation{concat(
                "split was refused by the communicator of a machine's ranks, or of the leaders, on ",
                others,
                " other ranks, which throw why: choose groups that each level can make"
            )};
        }
        levels.can_split = std::none_of(members.begin(), members.end(), [&](int member) {
            return answers[as_index(member)] == cannot;
        });
        return levels;
    }

    /// Local. Why all ranks have ended, also if no collective of theirs is under way, and tells both
    /// levels. A rank that has left does not end the groups of the others.
    [[nodiscard]] std::optional<AbortReason> heard() {
        auto reason = failure_;
        if (!reason && parent_) {
            reason = parent_();
        }
        if (!reason) {
            reason = reason_on_levels();
        }
        if (!reason || reason->has_left) {
            return std::nullopt;
        }
        abort(*reason);
        return failure_;
    }

    /// All ranks throw the first reason that reaches them.
    void abort(AbortReason const& reason) {
        if (!failure_) {
            failure_ = here(cut(reason));
        }
        on_levels([&](AnyInterface& level) { level.abort(to_level(*failure_, rank(), machines_)); }
        );
    }
    [[nodiscard]] bool is_aborted() const {
        return failure_ || local_.is_aborted() || (across_ != nullptr && across_->is_aborted()) ||
               (parent_ && parent_());
    }

    /// The first reason that this rank has heard, by the ranks of all machines.
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        auto reason = failure_;
        if (!reason) {
            reason = reason_on_levels();
        }
        if (!reason && parent_) {
            reason = parent_();
        }
        return reason ? std::optional{here(*std::move(reason))} : reason;
    }
    [[nodiscard]] bool is_renumbered() const noexcept { return levels_.is_renumbered; }

    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        on_levels([&](AnyInterface& level) { // before one of them is changed
            if (!own_deadline(level) && level.size() > 1) {
                lacks(level.transport(), "deadlines");
            }
        });
        bool const is_first = deadline == first_deadline_; // a guard puts it back
        on_levels([&](AnyInterface& level) {
            level.exchange_deadline(is_first ? own_deadline(level).value_or(deadline) : deadline);
        });
        return std::exchange(deadline_, deadline);
    }
    void keep_alive() {
        on_levels([](AnyInterface& level) { level.keep_alive(); });
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
    /// The next step of a collective. Its steps are known when it begins: leaders have one scratch.
    enum class Stage : std::uint8_t { posted, comparing, moving };

    struct Operation {
        Operation(Request const& asked, int ranks) : request{asked} {
            if (request.signature.has_counts) { // the caller's tables may end
                kept.keep(request.sends, request.expects, ranks);
            }
        }
        explicit Operation(std::vector<LevelStep> all)
            : stage{Stage::moving}, steps{std::move(all)} {}

        Request request;
        KeptTables kept;
        Stage stage = Stage::posted;
        Comparison comparison;
        std::vector<std::size_t> parts; ///< of ranks, if they have some: see LevelPlan
        std::vector<LevelStep> steps;   ///< of this stage
        std::size_t started = 0;
        std::vector<std::pair<Level, std::optional<AnyWork>>> running;
    };

    [[nodiscard]] bool is_leader() const { return local_.rank() == 0; }
    /// Whether this rank waits for others on both levels. If not, it may block.
    [[nodiscard]] bool has_two_levels() const {
        return local_.size() > 1 && across_ != nullptr && across_->size() > 1;
    }

    [[nodiscard]] HierarchicalOptions const& options() const noexcept { return levels_.options; }
    template <class F>
    void on_levels(F const& f) const {
        f(local_);
        if (across_ != nullptr) {
            f(*across_);
        }
    }
    /// The deadline that a level had at first, if it has deadlines.
    [[nodiscard]] std::optional<std::chrono::nanoseconds>& own_deadline(AnyInterface const& level) {
        return own_deadlines_[&level == &local_ ? 0 : 1];
    }
    /// The shorter one, if both levels have one.
    void find_deadline() {
        std::optional<std::chrono::nanoseconds> shorter;
        on_levels([&](AnyInterface& level) {
            auto& own = own_deadline(level);
            own = level.exchange_deadline(deadline_);
            if (own) {
                level.exchange_deadline(*own);
                shorter = (std::min)(shorter.value_or(*own), *own);
            }
        });
        first_deadline_ = deadline_ = shorter.value_or(deadline_);
    }

    // -- meeting ----------------------------------------------------------------------------------

    void meet() {
        std::array<std::uint64_t, 2> wrong{
            is_leader() && across_ == nullptr ? 1U : 0U,
            !is_leader() && across_ != nullptr ? 1U : 0U
        };
        run({step(Level::local, Collective::all_reduce, wrong)});
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
        run({step(Level::local, Collective::broadcast, place)});
        // The last one counts leaders that cannot split a level.
        std::vector<std::uint64_t> sizes(place[0] + 1);
        if (is_leader()) {
            sizes[place[1]] = static_cast<std::uint64_t>(local_.size());
            sizes.back() = levels_.can_split_here() ? 0 : 1;
        }
        run({
            step(Level::across, Collective::all_reduce, sizes),
            step(Level::local, Collective::broadcast, sizes),
        });
        levels_.can_split = sizes.back() == 0;
        sizes.pop_back();
        machines_ = Machines{sizes, static_cast<int>(place[1])};
        auto const share = [&](std::uint64_t word) {
            std::vector<std::uint64_t> words(as_index(machines_.ranks()));
            words[as_index(rank())] = word;
            Buffer const buffer{words.data(), words.size(), DType::u64};
            finish(post(RequestsOf{rank(), size()}.all_reduce(buffer, ReduceOp::sum)));
            return words;
        };
        bool const compares = std::exchange(levels_.options.check, false); // not this sum
        levels_.options.check = agree_to_compare(compares, "HierarchicalOptions::check", share);
    }
    template <class Words>
    [[nodiscard]] static LevelStep step(Level level, Collective collective, Words& words) {
        Buffer const buffer{words.data(), words.size(), DType::u64};
        return {level, {collective, DType::u64}, buffer, buffer};
    }
    void run(std::initializer_list<LevelStep> steps) {
        std::vector<LevelStep> taken;
        for (LevelStep const& step : steps) {
            if (step.level == Level::local ? local_.size() > 1
                                           : across_ != nullptr && across_->size() > 1) {
                taken.push_back(step);
            }
        }
        operations_.emplace_back(std::move(taken));
        finish(done_);
    }

    /// Collective. Sums answers to split(). A leader may arrive one deadline late: while it is in
    /// split() of the leaders, it gives no sign of life.
    void share_answers(std::vector<std::uint64_t>& answers) {
        Request request = RequestsOf{rank(), size()}.all_reduce(
            {answers.data(), answers.size(), DType::u64}, ReduceOp::sum
        );
        request.signature.collective = split_collective; // errors call it so
        constexpr std::chrono::nanoseconds longest = (std::chrono::nanoseconds::max)();
        auto const before = is_leader()
                                ? std::nullopt
                                : local_.exchange_deadline(2 * (std::min)(deadline_, longest / 2));
        finish(post(request)); // if this throws, no rank waits on this level again
        if (before) {
            local_.exchange_deadline(*before);
        }
    }

    // -- collectives ------------------------------------------------------------------------------

    [[nodiscard]] static bool has_parts(Collective collective) noexcept {
        return collective == Collective::all_gather || collective == Collective::reduce_scatter ||
               collective == Collective::scaled_reduce_scatter ||
               collective == Collective::gather || collective == Collective::scatter;
    }
    /// Whether ranks compare first. The elements of ranks are told after that.
    [[nodiscard]] bool compares(Descriptor const& signature) const noexcept {
        return options().check || tells_parts(signature);
    }
    /// Ranks other than leaders start what they can: all up to one that compares first.
    void start_posted() {
        for (Operation& operation : operations_) {
            if (operation.stage == Stage::posted) {
                (void)start_more(operation);
            }
            if (operation.stage != Stage::moving) {
                return;
            }
        }
    }
    /// Starts what follows the steps that are done, if there is something. A leader starts one
    /// step. The steps of other ranks are all local, and the leader starts the second one when it
    /// has all that the first one reads: so they start all of a stage.
    [[nodiscard]] bool start_more(Operation& operation) {
        while (operation.started == operation.steps.size()) {
            if (operation.stage == Stage::moving) {
                return false;
            }
            begin_stage(operation);
        }
        do {
            LevelStep const& next = operation.steps[operation.started++];
            for (LeadersCopy const& copy : next.copies) {
                std::memcpy(copy.to, copy.from, copy.bytes);
            }
            if (!next.copies.empty()) {
                continue;
            }
            on_level(next.level, [&] {
                operation.running.emplace_back(
                    next.level, start_step(next.level == Level::local ? local_ : *across_, next)
                );
            });
        } while (!is_leader() && operation.started != operation.steps.size());
        return true;
    }
    void begin_stage(Operation& operation) {
        Request const& request = operation.request;
        Descriptor const& signature = request.signature;
        if (operation.stage == Stage::posted && compares(signature)) {
            operation.stage = Stage::comparing;
            operation.comparison.begin(signature, rank(), machines_.ranks());
            plan_sum(operation, operation.comparison.words());
            return;
        }
        if (operation.stage == Stage::comparing) {
            end_by(operation.comparison.difference());
            if (operation.comparison.go_on(request.sends, request.expects)) {
                plan_sum(operation, operation.comparison.words());
                return;
            }
        }
        if (tells_parts(signature)) {
            operation.parts = operation.comparison.known();
        } else if (has_parts(signature.collective)) {
            PartSizes const sizes = !signature.has_counts ? PartSizes::equal(signature.count)
                                    : signature.collective == Collective::all_gather
                                        ? request.expects
                                        : request.sends;
            operation.parts.resize(static_cast<std::size_t>(machines_.ranks()));
            sizes.copy_to(std::span{operation.parts});
        }
        operation.stage = Stage::moving;
        Request all = request;
        if (request.signature.collective == Collective::barrier) {
            all.in = all.out = Buffer{&met_, 1, DType::u8};
        }
        plan(operation, all);
    }
    void plan_sum(Operation& operation, std::span<std::uint64_t> words) {
        Buffer const sum{words.data(), words.size(), DType::u64};
        plan(operation, {{Collective::all_reduce, DType::u64}, sum, sum});
    }
    void plan(Operation& operation, Request const& request) {
        operation.started = 0;
        on_level(Level::local, [&] { // it may have no memory
            operation.steps =
                LevelPlan{machines_, local_, request, operation.parts, scratch_}.steps();
        });
    }
    /// Whether that collective is done. Also does those before it.
    [[nodiscard]] bool advance(std::uint64_t number, Waiting waiting) {
        while (!is_done(number)) {
            if (failure_) {
                end();
            }
            if (!advance_first(waiting)) {
                hear_parent();
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
            for (auto& [level, step] : first.running) {
                if (!on_level(level, [&, &running = step] {
                        return is_complete(running, waiting);
                    })) {
                    return false;
                }
            }
            first.running.clear();
            if (!start_more(first)) {
                return true;
            }
            if (!is_leader()) {
                start_posted();
            }
        }
    }

    // -- failures ---------------------------------------------------------------------------------

    /// An error of a level ends all ranks.
    template <class F>
    std::invoke_result_t<F const&> on_level(Level level, F const& f) {
        try {
            return f();
        } catch (...) {
            AbortReason reason = reason_of(std::current_exception());
            auto told = level == Level::local ? local_.abort_reason() : across_->abort_reason();
            if (told && is_same_failure(*told, reason)) {
                reason = *std::move(told);
            }
            fail(to_global(std::move(reason), level, machines_));
        }
    }
    /// Carries failures from level to level, and tells both that this rank waits. Steps in flight
    /// report failures themselves. Checks only the levels that the collective still needs: ranks may
    /// leave a level once their part is done.
    void listen() {
        Operation const& first = operations_.front();
        auto const is_ahead = [&](Level level) {
            return first.stage != Stage::moving ||
                   std::any_of(
                       first.steps.begin() + static_cast<std::ptrdiff_t>(first.started),
                       first.steps.end(),
                       [&](LevelStep const& step) { return step.level == level; }
                   );
        };
        if (is_ahead(Level::local)) {
            end_by(reason_on(local_, Level::local));
        }
        if (is_ahead(Level::across)) {
            end_by(reason_on(*across_, Level::across));
        }
        auto const now = std::chrono::steady_clock::now();
        if (now - last_sign_ >= deadline_ / 8) {
            last_sign_ = now;
            keep_alive();
        }
    }
    void hear_parent() {
        if (parent_) {
            if (auto const reason = parent_()) {
                fail(*reason);
            }
        }
    }
    /// The reason as these ranks throw it.
    [[nodiscard]] AbortReason here(AbortReason reason) const {
        reason.is_renumbered = is_renumbered();
        return reason;
    }
    [[nodiscard]] std::optional<AbortReason>
    reason_on(AnyInterface const& comm, Level level) const {
        auto reason = comm.abort_reason();
        return reason ? to_global(*std::move(reason), level, machines_) : reason;
    }
    [[nodiscard]] std::optional<AbortReason> reason_on_levels() const {
        auto reason = reason_on(local_, Level::local);
        return reason || across_ == nullptr ? reason : reason_on(*across_, Level::across);
    }
    void end_by(std::optional<AbortReason> const& reason) {
        if (reason) {
            fail(*reason);
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        end();
    }
    /// No rank uses the buffers after that.
    [[noreturn]] void end() {
        if (!operations_.empty()) {
            waits_in_ = operations_.front().request.signature.text();
            operations_.clear();
        }
        throw_failure(in_words_of(rank(), waits_in_, *failure_));
    }

    Levels levels_; // before what refers to them
    AnyInterface& local_;
    AnyInterface* across_;
    Machines machines_;
    std::function<std::optional<AbortReason>()> parent_; ///< of a group
    Arena scratch_; ///< of the collective that a leader has begun
    std::chrono::nanoseconds deadline_ = default_deadline;
    std::chrono::nanoseconds first_deadline_ = deadline_;
    std::array<std::optional<std::chrono::nanoseconds>, 2> own_deadlines_; ///< of local and across
    std::chrono::steady_clock::time_point last_sign_{}; ///< of life, from a leader that waits
    std::deque<Operation> operations_;                  ///< posted and not done
    std::uint64_t done_ = 0;                            ///< number of finished collectives
    std::uint8_t met_ = 0;                              ///< of barriers
    std::optional<AbortReason> failure_;
    std::string waits_in_; ///< the collective that the failure ended
};

}}} // namespace joinable::v0::detail
