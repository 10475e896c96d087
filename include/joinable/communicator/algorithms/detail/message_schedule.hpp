// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <joinable/communicator/algorithms/detail/double_tree.hpp>
#include <joinable/communicator/algorithms/detail/message_step.hpp>
#include <joinable/communicator/algorithms/detail/ring.hpp>
#include <joinable/communicator/algorithms/detail/tree.hpp>
#include <joinable/communicator/algorithms/plan.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

class MessageSteps;

/// The steps of all ranks in one collective by messages, as consecutive phases. It moves no data: a
/// communicator runs the steps of its own rank, and a simulator those of all ranks. The same
/// arguments make the same schedule on every rank.
class MessageSchedule {
public:
    /// For `count` elements of `element_bytes` each, in place. A schedule needs memory for its
    /// phases; only double_tree needs tables of all ranks.
    /// @throws ContractViolation  the product of the extents of a torus or mesh is less than half
    ///                            the ranks, or more than the ranks.
    [[nodiscard]] static MessageSchedule
    all_reduce(AllReducePlan const& plan, int ranks, std::size_t count, std::size_t element_bytes) {
        MessageSchedule made{ranks, count};
        std::size_t const segment = detail::segment_of(plan, count, ranks, element_bytes);
        switch (plan.algorithm) {
        case AllReduceAlgorithm::star: made.add_tree((std::max)(ranks, 2)); break;
        case AllReduceAlgorithm::tree: made.add_tree(2); break;
        case AllReduceAlgorithm::double_tree: made.add_double_tree(segment); break;
        case AllReduceAlgorithm::butterfly: made.add_butterfly(); break;
        default: made.add_rings(plan, segment); break;
        }
        return made;
    }
    /// For `count` elements from `root`, along a binomial tree: one round for each power of two
    /// below N.
    [[nodiscard]] static MessageSchedule broadcast(int ranks, std::size_t count, int root) {
        MessageSchedule made{ranks, count};
        made.add({Phase::Kind::down, 2, root});
        return made;
    }
    /// For `count` equal parts from each rank, along a ring. The parts lie in the buffer in rank
    /// order.
    [[nodiscard]] static MessageSchedule all_gather(int ranks, std::size_t count) {
        MessageSchedule made{ranks, count * static_cast<std::size_t>(ranks)};
        made.rings_ = {{1, ranks}};
        made.add({Phase::Kind::gather, 0});
        return made;
    }

    [[nodiscard]] int ranks() const noexcept { return ranks_; }
    [[nodiscard]] std::size_t count() const noexcept { return count_; }
    /// The number of elements in a slot of scratch memory.
    [[nodiscard]] std::size_t slot_count() const noexcept { return slot_count_; }
    /// The number of slots into which steps receive.
    [[nodiscard]] int slots() const noexcept { return slots_; }
    /// The steps of one rank, starting with the first. They refer to the schedule.
    [[nodiscard]] MessageSteps steps(int rank) const noexcept;

private:
    friend class MessageSteps;

    /// A phase of a collective, in which all ranks run the same algorithm.
    struct Phase {
        enum class Kind : std::uint8_t {
            fold,   ///< surplus ranks give their buffers to participants
            unfold, ///< and receive the result
            up,   ///< buffers are combined along a tree with `number` - 1 children a level per rank
            down, ///< the root's buffer travels along such a tree
            blocks_up, ///< the same along two trees, in `number` blocks each
            blocks_down,
            exchange, ///< with the participant `number` away
            scatter,  ///< along ring `number` each participant gets one combined part of its range
            gather,   ///< the parts return to all participants of the ring
        };
        Kind kind;
        std::int64_t number = 0;
        int root = 0;
    };

    MessageSchedule(int ranks, std::size_t count)
        : ranks_{ranks}, count_{count}, folding_{ranks, ranks} {}

    void add(Phase phase) {
        if (ranks_ > 1) {
            phases_.push_back(phase);
        }
    }
    void need_slots(int slots, std::size_t elements) noexcept {
        slots_ = (std::max)(slots_, slots);
        slot_count_ = (std::max)(slot_count_, elements);
    }
    void add_tree(int radix) {
        need_slots(1, count_);
        add({Phase::Kind::up, radix});
        add({Phase::Kind::down, radix});
    }
    void add_double_tree(std::size_t segment) {
        trees_ = std::make_shared<detail::DoubleTree const>(ranks_);
        std::size_t const half = ElementRange{0, count_}.part(0, 2).size();
        std::size_t const blocks = detail::segments_of(half, segment);
        need_slots(1, ElementRange{0, half}.part(0, blocks).size());
        add({Phase::Kind::blocks_up, static_cast<std::int64_t>(blocks)});
        add({Phase::Kind::blocks_down, static_cast<std::int64_t>(blocks)});
    }
    void add_folded(int participants) {
        folding_.count = participants;
        if (participants != ranks_) {
            need_pieces(count_);
            add({Phase::Kind::fold});
        }
    }
    /// For blocks of at most this length that are combined in segments. Segments of a shorter block
    /// may be longer than its own, but none is longer than `segment_`.
    void need_pieces(std::size_t longest_block) noexcept {
        bool const is_cut = detail::segments_of(longest_block, segment_) != 1;
        need_slots(is_cut ? 2 : 1, is_cut ? segment_ : longest_block);
    }
    void add_unfolded() {
        if (folding_.count != ranks_) {
            add({Phase::Kind::unfold});
        }
    }
    void add_butterfly() {
        need_slots(1, count_);
        add_folded(detail::largest_power_of_two(ranks_));
        for (int distance = 1; distance < folding_.count; distance *= 2) {
            add({Phase::Kind::exchange, distance});
        }
        add_unfolded();
    }
    void add_rings(AllReducePlan const& plan, std::size_t segment) {
        std::vector<int> const extents = detail::rings_of(plan, ranks_);
        bool const is_mesh = plan.algorithm == AllReduceAlgorithm::mesh;
        check_extents(extents, is_mesh);
        segment_ = segment;
        add_folded(detail::product_of(extents));
        std::size_t longest = count_;
        int stride = 1;
        for (int const extent : extents) {
            longest = ElementRange{0, longest}.part(0, static_cast<std::size_t>(extent)).size();
            need_pieces(longest);
            add({Phase::Kind::scatter, static_cast<std::int64_t>(rings_.size())});
            rings_.push_back({stride, extent, is_mesh});
            stride *= extent;
        }
        for (std::size_t ring = rings_.size(); ring-- != 0;) {
            add({Phase::Kind::gather, static_cast<std::int64_t>(ring)});
        }
        add_unfolded();
    }
    void check_extents(std::vector<int> const& extents, bool is_mesh) const {
        int product = 1;
        bool fits = true;
        for (int const extent : extents) {
            fits = fits && extent >= 1 && extent <= ranks_ / product;
            product *= fits ? extent : 1;
        }
        if (!fits || product < ranks_ - product) {
            throw ContractViolation{detail::concat(
                is_mesh ? "a mesh of " : "a torus of ",
                ranks_,
                " ranks needs extents of at least 1 whose product is at most ",
                ranks_,
                " and at least half of it, but was given ",
                extents
            )};
        }
    }

    int ranks_;
    std::size_t count_;
    detail::Folding folding_;
    std::size_t segment_ = 0; ///< of scattered blocks, in elements; 0: not cut
    std::size_t slot_count_ = 0;
    int slots_ = 0;
    std::vector<Phase> phases_;
    std::vector<detail::Ring> rings_;
    std::shared_ptr<detail::DoubleTree const> trees_;
};

/// The steps of one rank, in order. Refers to its schedule.
class MessageSteps {
public:
    /// Writes the next step. Returns false when the rank has finished.
    [[nodiscard]] bool next(MessageStep& step) noexcept {
        while (phase_ < schedule_->phases_.size()) {
            MessageSchedule::Phase const& phase = schedule_->phases_[phase_];
            step = {};
            while (take(phase, number_, step)) {
                ++number_;
                if (!step.send.is_none() || !step.receive.is_none() || !step.combine.is_none()) {
                    return true;
                }
            }
            number_ = 0;
            if (++phase_ < schedule_->phases_.size()) {
                enter();
            }
        }
        step = {};
        return false;
    }

private:
    friend class MessageSchedule;
    using Kind = MessageSchedule::Phase::Kind;

    MessageSteps(MessageSchedule const& schedule, int rank) noexcept
        : schedule_{&schedule}, rank_{rank}, index_{schedule.folding_.index_of(rank)} {
        if (!schedule.phases_.empty()) {
            enter();
        }
    }

    /// Fills in step `number` of the phase on this rank; `step` is empty before. Returns false if
    /// there are no more.
    [[nodiscard]] bool
    take(MessageSchedule::Phase const& phase, std::int64_t number, MessageStep& step) noexcept {
        switch (phase.kind) {
        case Kind::fold: return fold(number, step);
        case Kind::unfold: return unfold(number, step);
        case Kind::up: return tree_.climb(number, step);
        case Kind::down: return tree_.descend(number, step);
        case Kind::blocks_up: return blocks_.climb(number, step);
        case Kind::blocks_down: return blocks_.descend(number, step);
        case Kind::exchange: return exchange(phase.number, number, step);
        case Kind::scatter: return index_ >= 0 && ring_.scatter(number, step);
        case Kind::gather: return index_ >= 0 && ring_.gather(number, step);
        }
        return false;
    }
    /// Computes the values that stay constant within a phase.
    void enter() noexcept {
        MessageSchedule::Phase const& phase = schedule_->phases_[phase_];
        switch (phase.kind) {
        case Kind::up:
        case Kind::down:
            tree_ = {phase.number, schedule_->ranks_, phase.root, rank_, schedule_->count_};
            break;
        case Kind::blocks_up:
        case Kind::blocks_down:
            blocks_ = {*schedule_->trees_, rank_, schedule_->count_, phase.number};
            break;
        case Kind::scatter:
        case Kind::gather: enter_ring(static_cast<std::size_t>(phase.number)); break;
        default: break;
        }
    }

    [[nodiscard]] ElementRange whole() const noexcept { return {0, schedule_->count_}; }
    [[nodiscard]] Transfer whole_with(int peer, int slot = Transfer::in_place) const noexcept {
        return whole().is_empty() ? Transfer{} : Transfer{peer, slot, whole()};
    }
    void combine_whole(bool slot_is_left, MessageStep& step) const noexcept {
        step.combine = {0, slot_is_left, whole()};
    }

    // -- surplus ranks ---------------------------------------------------------------------------------
    [[nodiscard]] bool has_surplus_neighbour() const noexcept {
        return index_ >= 0 && index_ < schedule_->folding_.surplus();
    }
    [[nodiscard]] bool fold(std::int64_t number, MessageStep& step) const noexcept {
        detail::Pieces const pieces{1, schedule_->count_, schedule_->segment_};
        if (index_ < 0) {
            if (number < pieces.count()) {
                step.send = pieces.transfer(rank_ + 1, Transfer::in_place, whole(), number);
            }
            return number < pieces.count();
        }
        if (std::int64_t const piece = pieces.received_in(number); piece >= 0) {
            step.receive = pieces.transfer(rank_ - 1, pieces.slot_of(piece), whole(), piece);
        }
        if (std::int64_t const piece = pieces.combined_in(number); piece >= 0) {
            step.combine = {pieces.slot_of(piece), true, pieces.range(whole(), piece)};
        }
        return has_surplus_neighbour() && number < pieces.steps();
    }
    [[nodiscard]] bool unfold(std::int64_t number, MessageStep& step) const noexcept {
        if (index_ < 0) {
            step.receive = whole_with(rank_ + 1);
            return number == 0;
        }
        step.send = whole_with(rank_ - 1);
        return has_surplus_neighbour() && number == 0;
    }

    // -- participants ----------------------------------------------------------------------------------
    [[nodiscard]] bool
    exchange(std::int64_t distance, std::int64_t number, MessageStep& step) const noexcept {
        if (index_ < 0 || number >= 2) {
            return false;
        }
        int const partner = index_ ^ static_cast<int>(distance);
        if (number == 0) {
            int const peer = schedule_->folding_.rank_of(partner);
            step.send = whole_with(peer);
            step.receive = whole_with(peer, 0);
        } else {
            combine_whole(partner < index_, step); // both partners have the same left operand
        }
        return true;
    }
    void enter_ring(std::size_t ring) noexcept {
        if (index_ < 0) {
            return;
        }
        ElementRange range = whole();
        for (std::size_t outer = 0; outer < ring; ++outer) {
            detail::Ring const& passed = schedule_->rings_[outer];
            range = range.part(
                static_cast<std::size_t>(passed.position_of(index_)),
                static_cast<std::size_t>(passed.extent)
            );
        }
        ring_ = {schedule_->rings_[ring], schedule_->folding_, index_, range, schedule_->segment_};
    }

    MessageSchedule const* schedule_;
    int rank_;
    int index_; ///< among participants; negative for a surplus rank
    std::size_t phase_ = 0;
    std::int64_t number_ = 0; ///< of the next step in the phase
    // The steps of the phase, which uses at most one of these.
    detail::TreeSteps tree_;
    detail::DoubleTreeSteps blocks_;
    detail::RingSteps ring_;
};

inline MessageSteps MessageSchedule::steps(int rank) const noexcept {
    return {*this, rank};
}

}}} // namespace joinable::v0::detail
