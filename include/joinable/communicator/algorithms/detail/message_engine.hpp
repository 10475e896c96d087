// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/algorithms/detail/message_schedule.hpp>
#include <joinable/communicator/algorithms/detail/schedule_run.hpp>
#include <joinable/communicator/algorithms/options.hpp>
#include <joinable/communicator/algorithms/plan.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/polling.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/requested_checks.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of one rank. They run one after another in the order in which they were posted.
/// A rank that waits for a later one also does its part in the earlier ones, in whatever order
/// other ranks wait.
template <class Comm>
class MessageEngine : public HasWorks {
public:
    MessageEngine(Comm& comm, MessageOptions const& options) : comm_{comm}, options_{options} {
        options_.check = options.check || RequestedChecks::read().collectives;
    }

    [[nodiscard]] Comm& communicator() const noexcept { return comm_; }
    [[nodiscard]] MessageOptions const& options() const noexcept { return options_; }
    [[nodiscard]] RequestsOf requests() const { return {comm_.rank(), comm_.size()}; }
    [[nodiscard]] AllReducePlan plan_for(std::size_t bytes) const {
        return options_.plan ? *options_.plan
                             : choose_algorithm(bytes, comm_.size(), options_.costs);
    }

    /// Returns the collective's number, for the other members.
    /// @throws the error of an earlier collective.
    [[nodiscard]] std::uint64_t post(Request const& request) {
        if (failure_) {
            std::rethrow_exception(failure_);
        }
        if constexpr (has_abort_reason<
                          Comm>) { // a single rank sends no message that would throw it
            if (auto const reason = comm_.size() == 1 ? comm_.abort_reason() : std::nullopt) {
                throw_failure(*reason);
            }
        }
        posted_.push_back({request.signature, request.out});
        return done_ + posted_.size() - 1;
    }
    [[nodiscard]] bool is_done(std::uint64_t number) const noexcept { return number < done_; }
    void finish(std::uint64_t number) {
        while (!advance(number, Waiting::blocks)) {
        }
    }
    [[nodiscard]] bool test(std::uint64_t number) { return advance(number, Waiting::tests); }
    [[nodiscard]] bool progress(std::uint64_t number) { return advance(number, Waiting::polls); }

    /// The peers of the messages that this rank waits for.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        return run_ ? run_->missing_ranks() : std::vector<int>{};
    }
    /// See Communicator. False if the communicator does not know.
    [[nodiscard]] bool is_renumbered() const { return is_renumbered_group(comm_); }
    [[nodiscard]] int rank() const { return comm_.rank(); }
    /// Tells the others, if the communicator can.
    void abort(AbortReason const& reason) {
        if constexpr (has_abort<Comm>) {
            comm_.abort(reason);
        }
    }

private:
    struct Posted {
        Descriptor signature;
        Buffer buffer;
    };
    /// A collective consists of up to three consecutive schedules.
    enum class Stage : std::uint8_t {
        compare, ///< whether all ranks request the same
        name,    ///< if not: which ranks request what
        move,
    };
    /// The words that differing ranks exchange: signature, count, options.
    using Words = std::array<std::uint64_t, 3>;

    /// Whether the collective is done. Also runs those before it.
    [[nodiscard]] bool advance(std::uint64_t number, Waiting waiting) {
        while (!is_done(number)) {
            if (failure_) {
                std::rethrow_exception(failure_);
            }
            try {
                if (!advance_first(waiting)) {
                    return false;
                }
            } catch (...) {
                fail(std::current_exception());
                throw;
            }
        }
        return true;
    }
    /// Whether the first collective's schedule has finished.
    [[nodiscard]] bool advance_first(Waiting waiting) {
        if (!run_) {
            begin(options_.check && comm_.size() > 1 ? Stage::compare : Stage::move);
        }
        if (!run_->advance(comm_, waiting)) {
            return false;
        }
        switch (stage_) {
        case Stage::compare: begin(is_same_on_all_ranks() ? Stage::move : Stage::name); break;
        case Stage::name: throw_difference();
        case Stage::move:
            run_.reset();
            posted_.pop_front();
            ++done_;
            break;
        }
        return true;
    }
    void begin(Stage stage) {
        Posted const& first = posted_.front();
        int const ranks = comm_.size();
        stage_ = stage;
        switch (stage) {
        case Stage::compare: {
            std::uint64_t const hash = hash_of(words_of(first));
            compared_ = {hash, ~hash};
            AllReducePlan const plan{AllReduceAlgorithm::butterfly};
            Buffer const buffer{compared_.data(), compared_.size(), DType::u64};
            start(
                MessageSchedule::all_reduce(plan, ranks, buffer.count, sizeof(std::uint64_t)),
                buffer,
                ReduceOp::bit_and,
                128
            );
            break;
        }
        case Stage::name: {
            Words const own = words_of(first);
            words_.assign(own.size() * static_cast<std::size_t>(ranks), 0);
            std::copy(own.begin(), own.end(), words_of_rank(comm_.rank()));
            Buffer const buffer{words_.data(), words_.size(), DType::u64};
            start(MessageSchedule::all_gather(ranks, own.size()), buffer, ReduceOp::sum, 128);
            break;
        }
        case Stage::move: move(first); break;
        }
    }
    void move(Posted const& first) {
        Descriptor const& signature = first.signature;
        Buffer buffer = first.buffer;
        int const ranks = comm_.size();
        int const offset = static_cast<int>(signature.collective) | static_cast<int>(signature.op)
                                                                        << 4;
        if (signature.collective == Collective::broadcast) {
            start(
                MessageSchedule::broadcast(ranks, buffer.count, signature.root),
                buffer,
                signature.op,
                offset
            );
            return;
        }
        AllReducePlan plan{AllReduceAlgorithm::butterfly};
        if (signature.collective == Collective::barrier) {
            buffer = {&met_, 1, DType::u8};
        } else {
            plan = plan_for(buffer.bytes());
        }
        start(
            MessageSchedule::all_reduce(plan, ranks, buffer.count, size_of(buffer.dtype)),
            buffer,
            signature.op,
            offset
        );
    }
    void start(MessageSchedule schedule, Buffer buffer, ReduceOp op, int tag_offset) {
        run_.reset(); // before its scratch memory moves
        std::size_t const slot_bytes = schedule.slot_count() * size_of(buffer.dtype);
        std::size_t const bytes = slot_bytes * static_cast<std::size_t>(schedule.slots());
        if (scratch_.size() < bytes) {
            scratch_.resize(bytes);
        }
        run_.emplace(
            std::move(schedule),
            comm_.rank(),
            buffer,
            op,
            std::array{scratch_.data(), scratch_.data() + (bytes - slot_bytes)},
            options_.tag + tag_offset
        );
    }

    // -- comparing -------------------------------------------------------------------------------------
    [[nodiscard]] Words words_of(Posted const& posted) const {
        Hash options;
        if (options_.plan) {
            options.add(static_cast<std::uint64_t>(options_.plan->algorithm));
            options.add(options_.plan->segment_bytes);
            for (int const extent : options_.plan->extents) {
                options.add(static_cast<std::uint64_t>(extent));
            }
        } else {
            MessageCosts const& costs = options_.costs;
            for (double const number :
                 {costs.message_seconds,
                  costs.bytes_per_second,
                  costs.combine_seconds,
                  costs.both_ways,
                  costs.overlap,
                  costs.uncached}) {
                options.add(std::bit_cast<std::uint64_t>(number));
            }
        }
        auto const [word, count] = posted.signature.words();
        return {word, count, options.value()};
    }
    [[nodiscard]] static std::uint64_t hash_of(Words const& words) noexcept {
        Hash hash;
        for (std::uint64_t const word : words) {
            hash.add(word);
        }
        return hash.value();
    }
    [[nodiscard]] std::uint64_t* words_of_rank(int rank) noexcept {
        return words_.data() + std::tuple_size_v<Words> * static_cast<std::size_t>(rank);
    }
    /// Where ranks differ in a bit, that bit is 0 in the conjunction of the hashes and in the
    /// conjunction of their complements.
    [[nodiscard]] bool is_same_on_all_ranks() const noexcept {
        return compared_[0] == ~compared_[1];
    }
    [[noreturn]] void throw_difference() {
        int const ranks = comm_.size();
        if (auto reason = difference_of_signatures(ranks, words_)) {
            reason->is_renumbered = is_renumbered();
            throw_failure(*reason);
        }
        auto const others = ranks_where(ranks, [&](int rank) {
            return words_of_rank(rank)[2] != words_of_rank(0)[2];
        });
        throw Mismatch{
            others,
            concat(
                ranks_text(others),
                " and rank 0 have different MessageOptions: give the same plan, or the same costs, on "
                "every rank"
            ),
            is_renumbered()
        };
    }

    /// Tells all ranks the reason, if the communicator can; then no rank uses the buffers any more.
    void fail(std::exception_ptr error) {
        abort(blamed_on(rank(), reason_of(error)));
        run_.reset();
        failure_ = std::move(error);
    }

    Comm& comm_;
    MessageOptions options_;
    std::deque<Posted> posted_; ///< and not done
    std::uint64_t done_ = 0;    ///< number of finished collectives
    std::exception_ptr failure_;
    Stage stage_ = Stage::move;
    std::array<std::uint64_t, 2> compared_{};
    std::vector<std::uint64_t> words_; ///< from all ranks
    std::uint8_t met_ = 0;
    std::vector<std::byte> scratch_;
    std::optional<ScheduleRun<Comm>> run_; ///< of the first posted collective
};

}}} // namespace joinable::v0::detail
