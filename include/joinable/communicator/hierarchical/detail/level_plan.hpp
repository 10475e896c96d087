// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/hierarchical/detail/machines.hpp>
#include <joinable/communicator/substitute.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Bytes that a leader copies within its memory. Source and destination do not overlap.
struct LeadersCopy {
    std::byte* to;
    std::byte const* from;
    std::size_t bytes;
};

/// A collective of one level, which is a part of one of all ranks. Or, if it has copies, only these.
struct LevelStep {
    Level level = Level::local;
    Descriptor signature = {}; ///< with counts if parts differ
    ConstBuffer in = {};       ///< as `out` if the collective is in place
    Buffer out = {};
    std::vector<std::size_t> counts = {}; ///< of each rank of the level
    std::vector<std::size_t> pairs = {
    }; ///< in an all_to_all: from each rank, then from each to each
    Buffer memory = {}; ///< of what replaces it
    std::vector<LeadersCopy> copies = {};
};

[[nodiscard]] inline AnyWork start_step(AnyInterface& level, LevelStep const& step) {
    PartSizes const parts = PartSizes::of(step.counts);
    bool const exchanges = step.signature.collective == Collective::all_to_all;
    return level.post(
        {step.signature, step.in, step.out, parts, exchanges ? PartSizes::of(step.pairs) : parts},
        {exchanges ? Counts{step.pairs}.subspan(step.counts.size()) : step.counts, step.memory}
    );
}

/// Divides a collective of all ranks into the steps of one rank on its levels. On each machine a
/// step moves data from its ranks to the leader or back; the leaders' steps are between these.
class LevelPlan {
public:
    /// `parts` has the elements of each rank, if ranks have parts. In an all_to_all by counts it has
    /// those from rank 0 to each, then those from rank 1, and so on. A leader's steps use `scratch`
    /// until they are done.
    LevelPlan(
        Machines const& machines,
        AnyInterface& local,
        Request const& request,
        std::span<std::size_t const> parts,
        Arena& scratch
    )
        : machines_{machines}, local_{local}, signature_{request.signature}, in_{request.in},
          out_{request.out}, parts_{parts}, scratch_{scratch} {}

    [[nodiscard]] std::vector<LevelStep> steps() && {
        switch (signature_.collective) {
        case Collective::broadcast: broadcast(); break;
        case Collective::reduce: reduce(); break;
        case Collective::all_gather: all_gather(); break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: reduce_scatter(); break;
        case Collective::gather: gather(); break;
        case Collective::scatter: scatter(); break;
        case Collective::all_to_all: all_to_all(); break;
        default: all_reduce();
        }
        return std::move(steps_);
    }

private:
    /// Neighbours.
    struct Ranks {
        int begin;
        int end;
    };

    void broadcast() {
        LevelStep across = spread(Level::across, out_, root_machine());
        LevelStep local = spread(Level::local, out_, has_root_here() ? local_root() : 0);
        if (has_root_here(
            )) { // also from the leader: so its machine compares before others get data
            std::swap(across, local);
        }
        take(std::move(across));
        take(std::move(local));
    }
    void all_reduce() {
        if (is_scaled(signature_.collective)) {
            sum_on_machine(out_, out_);
        } else {
            take(in_place(Level::local, Collective::reduce, out_));
        }
        take(in_place(Level::across, Collective::all_reduce, out_));
        take(spread(Level::local, out_));
    }
    void reduce() {
        Buffer const sum = at_leader(in_.count, has_root() ? out_ : Buffer{});
        sum_on_machine(sum);
        take(in_place(Level::across, Collective::reduce, sum, root_machine()));
        give_to_root(sum);
    }
    void reduce_scatter() {
        Buffer const sum = at_leader(in_.count);
        sum_on_machine(sum);
        LevelStep across = by_machines(Collective::reduce_scatter, sum, part_of(sum));
        across.memory = sum;
        take(std::move(across));
        take(by_ranks(Collective::scatter, part_of(sum), out_));
    }
    void all_gather() {
        Buffer const all = at_leader(out_.count, out_);
        take(by_ranks(Collective::gather, in_, part_of(all)));
        take(by_machines(Collective::all_gather, part_of(all), all));
        take(spread(Level::local, out_));
    }
    void gather() {
        Buffer const all = at_leader(has_root_here() ? sum_of(parts_) : own_parts(), out_);
        Buffer const part = has_root_here() ? part_of(all) : all;
        take(by_ranks(Collective::gather, in_, part));
        take(by_machines(Collective::gather, part, has_root_here() ? all : none(), root_machine()));
        give_to_root(all);
    }
    void scatter() {
        Buffer const all = at_leader(has_root_here() ? sum_of(parts_) : own_parts(), readable(in_));
        Buffer part = has_root_here() ? part_of(all) : all;
        if (has_root() && machines_.count() > 1) { // a level may write there, even what it holds
            part = at_leader(own_parts());
        }
        if (has_root_here() && local_root() != 0) {
            LevelStep step = at_one(Collective::gather, local_root(), sum_of(parts_));
            step.in = has_root() ? in_ : none();
            step.out = all;
            take(std::move(step));
        }
        take(by_machines(Collective::scatter, has_root_here() ? all : none(), part, root_machine())
        );
        take(by_ranks(Collective::scatter, part, out_));
    }

    /// Leaders exchange blocks. A block has what one machine's ranks send to another's, by sender,
    /// then by receiver. Before that a leader makes blocks of what its ranks send, and afterwards
    /// what each of them receives.
    void all_to_all() {
        Ranks const own = ranks_at(machines_.own());
        Ranks const all{0, machines_.ranks()};
        std::size_t const sent = between(own, all);
        std::size_t const received = between(all, own);
        std::size_t const most = (std::max)(sent, received);
        Buffer const memory = at_leader(2 * most);
        Buffer const whole = within(memory, 0, most);
        Buffer const blocks = within(memory, is_leader() ? most : 0, most);

        take(by_ranks(Collective::gather, in_, within(whole, 0, sent), [&](Ranks rank) {
            return between(rank, all);
        }));
        if (is_leader()) {
            if (machines_.count() > 1) { // else its ranks have sent the one block
                make_blocks(whole, blocks);
                exchange_blocks(within(blocks, 0, sent), within(whole, 0, received));
            }
            make_parts(whole, blocks);
        }
        take(by_ranks(Collective::scatter, within(blocks, 0, received), out_, [&](Ranks rank) {
            return between(all, rank);
        }));
    }
    void exchange_blocks(Buffer blocks, Buffer arrived) {
        LevelStep step = in_place(Level::across, Collective::all_to_all, arrived);
        step.signature.has_counts = true;
        step.in = blocks;
        for (int other = 0; other < machines_.count(); ++other) {
            step.counts.push_back(between(ranks_at(machines_.own()), ranks_at(other)));
            step.pairs.push_back(between(ranks_at(other), ranks_at(machines_.own())));
        }
        for (int from = 0; from < machines_.count(); ++from) {
            for (int to = 0; to < machines_.count(); ++to) {
                step.pairs.push_back(between(ranks_at(from), ranks_at(to)));
            }
        }
        take(std::move(step));
    }
    /// From what each rank of this machine sends.
    void make_blocks(Buffer whole, Buffer blocks) {
        Ranks const own = ranks_at(machines_.own());
        std::vector<std::size_t> next; // of each rank, in `whole`
        for (int from = own.begin; from < own.end; ++from) {
            next.push_back(between({own.begin, from}, {0, machines_.ranks()}));
        }
        std::size_t written = 0;
        LevelStep step;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            for (int from = own.begin; from < own.end; ++from) {
                std::size_t const count = between({from, from + 1}, ranks_at(machine));
                std::size_t& read = next[static_cast<std::size_t>(from - own.begin)];
                add_copy(step, within(blocks, written, count), within(whole, read, count));
                read += count;
                written += count;
            }
        }
        take_copies(std::move(step));
    }
    /// To what each rank of this machine receives.
    void make_parts(Buffer blocks, Buffer whole) {
        Ranks const own = ranks_at(machines_.own());
        std::vector<std::size_t> next; // of each rank, in `whole`
        for (int to = own.begin; to < own.end; ++to) {
            next.push_back(between({0, machines_.ranks()}, {own.begin, to}));
        }
        std::size_t read = 0;
        LevelStep step;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            Ranks const those = ranks_at(machine);
            for (int from = those.begin; from < those.end; ++from) {
                for (int to = own.begin; to < own.end; ++to) {
                    std::size_t const count = between({from, from + 1}, {to, to + 1});
                    std::size_t& written = next[static_cast<std::size_t>(to - own.begin)];
                    add_copy(step, within(whole, written, count), within(blocks, read, count));
                    read += count;
                    written += count;
                }
            }
        }
        take_copies(std::move(step));
    }

    // -- steps of several of them -----------------------------------------------------------------

    /// Sums the inputs of a machine at its leader. The others' inputs do not change, unless they are `memory`.
    void sum_on_machine(Buffer sum, Buffer memory = {}) {
        LevelStep step = at_one(
            is_scaled(signature_.collective) ? Collective::scaled_reduce_scatter
                                             : Collective::reduce_scatter,
            0,
            in_.count
        );
        step.in = in_;
        step.out = is_leader() ? sum : none();
        step.memory = memory;
        take(std::move(step));
    }
    /// On the root's machine, if its leader has it and is another rank.
    void give_to_root(Buffer all) {
        if (has_root_here() && local_root() != 0) {
            std::size_t const count =
                signature_.collective == Collective::reduce ? in_.count : sum_of(parts_);
            LevelStep step = at_one(Collective::scatter, local_root(), count);
            step.in = all;
            step.out = has_root() ? out_ : none();
            take(std::move(step));
        }
    }

    // -- one step ---------------------------------------------------------------------------------

    [[nodiscard]] LevelStep
    in_place(Level level, Collective collective, Buffer buffer, int root = 0) const {
        Descriptor signature = signature_; // with its operation and factor
        signature.collective = collective;
        signature.root = root;
        return {level, signature, buffer, buffer};
    }
    [[nodiscard]] LevelStep spread(Level level, Buffer buffer, int root = 0) const {
        return in_place(level, Collective::broadcast, buffer, root);
    }
    /// With the parts of this machine's ranks.
    [[nodiscard]] LevelStep by_ranks(Collective collective, ConstBuffer in, Buffer out) const {
        return by_ranks(collective, in, out, [&](Ranks rank) {
            return parts_[static_cast<std::size_t>(rank.begin)];
        });
    }
    /// With parts of `count_of(rank)` elements.
    template <class F>
    [[nodiscard]] LevelStep
    by_ranks(Collective collective, ConstBuffer in, Buffer out, F const& count_of) const {
        LevelStep step = in_place(Level::local, collective, out);
        step.in = in;
        Ranks const own = ranks_at(machines_.own());
        for (int rank = own.begin; rank < own.end; ++rank) {
            step.counts.push_back(count_of(Ranks{rank, rank + 1}));
        }
        return step;
    }
    /// With the parts of machines.
    [[nodiscard]] LevelStep
    by_machines(Collective collective, ConstBuffer in, Buffer out, int root = 0) const {
        LevelStep step = in_place(Level::across, collective, out, root);
        step.signature.has_counts = true;
        step.in = in;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            step.counts.push_back(sum_of(ranks_of(machine)));
        }
        return step;
    }
    /// All elements are one local rank's.
    [[nodiscard]] LevelStep at_one(Collective collective, int rank, std::size_t count) const {
        LevelStep step = in_place(Level::local, collective, {});
        step.signature.has_counts = true;
        step.counts.resize(static_cast<std::size_t>(local_.size()));
        step.counts[static_cast<std::size_t>(rank)] = count;
        return step;
    }
    /// Keeps a step that this rank takes part in, unless it has nobody to exchange data with.
    void take(LevelStep&& step) {
        bool const is_local = step.level == Level::local;
        bool const is_alone = is_local ? local_.size() == 1 : machines_.count() == 1;
        bool const is_done =
            is_alone && step.in.data == step.out.data && !is_scaled(step.signature.collective);
        if ((is_local || is_leader()) && !is_done) {
            steps_.push_back(std::move(step));
        }
    }

    static void add_copy(LevelStep& step, Buffer to, Buffer from) {
        auto* const data = static_cast<std::byte*>(to.data);
        auto const* const read = static_cast<std::byte const*>(from.data);
        if (!step.copies.empty()) {
            LeadersCopy& last = step.copies.back();
            if (last.to + last.bytes == data && last.from + last.bytes == read) {
                last.bytes += to.bytes();
                return;
            }
        }
        if (to.count != 0) {
            step.copies.push_back({data, read, to.bytes()});
        }
    }
    void take_copies(LevelStep step) {
        if (!step.copies.empty()) {
            steps_.push_back(std::move(step));
        }
    }

    // -- places -----------------------------------------------------------------------------------

    [[nodiscard]] bool is_leader() const { return local_.rank() == 0; }
    [[nodiscard]] int root_machine() const { return machines_.machine_of(signature_.root); }
    [[nodiscard]] bool has_root_here() const { return root_machine() == machines_.own(); }
    [[nodiscard]] int local_root() const {
        return signature_.root - machines_.first_of(machines_.own());
    }
    [[nodiscard]] bool has_root() const { return has_root_here() && local_root() == local_.rank(); }

    [[nodiscard]] Buffer none() const { return {nullptr, 0, signature_.dtype}; }
    /// Memory of a leader: what the caller gave, if it has so many elements, else scratch.
    [[nodiscard]] Buffer at_leader(std::size_t count, Buffer given = {}) {
        if (!is_leader()) {
            return none();
        }
        if (given.data != nullptr && given.count == count) {
            return given;
        }
        std::size_t const bytes = count * size_of(signature_.dtype);
        if (scratch_.bytes() < bytes) {
            scratch_ = Arena{}; // first: both need not fit
            scratch_ = local_.allocate(bytes, Arena::default_alignment);
        }
        return {scratch_.data(), count, signature_.dtype};
    }
    /// The parts of this machine's ranks in the parts of all, which only leaders have.
    [[nodiscard]] Buffer part_of(Buffer all) const {
        auto const first = static_cast<std::size_t>(machines_.first_of(machines_.own()));
        return within(all, offset_of(parts_, first), own_parts());
    }
    /// So many elements of a leader's memory.
    [[nodiscard]] Buffer within(Buffer memory, std::size_t first, std::size_t count) const {
        return is_leader() ? detail::within(memory, first, count) : none();
    }

    [[nodiscard]] std::span<std::size_t const> ranks_of(int machine) const {
        int const first = machines_.first_of(machine);
        return parts_.subspan(
            static_cast<std::size_t>(first),
            static_cast<std::size_t>(machines_.first_of(machine + 1) - first)
        );
    }
    [[nodiscard]] std::size_t own_parts() const { return sum_of(ranks_of(machines_.own())); }
    [[nodiscard]] Ranks ranks_at(int machine) const {
        return {machines_.first_of(machine), machines_.first_of(machine + 1)};
    }
    /// The elements that some ranks send to others in an all_to_all.
    [[nodiscard]] std::size_t between(Ranks from, Ranks to) const {
        auto const senders = static_cast<std::size_t>(from.end - from.begin);
        auto const receivers = static_cast<std::size_t>(to.end - to.begin);
        if (!signature_.has_counts) {
            return senders * receivers * signature_.count;
        }
        std::size_t sum = 0;
        for (std::size_t sender = 0; sender < senders; ++sender) {
            std::size_t const row = (static_cast<std::size_t>(from.begin) + sender) *
                                    static_cast<std::size_t>(machines_.ranks());
            sum += sum_of(parts_.subspan(row + static_cast<std::size_t>(to.begin), receivers));
        }
        return sum;
    }

    Machines const& machines_;
    AnyInterface& local_;
    Descriptor signature_;
    ConstBuffer in_;
    Buffer out_;
    std::span<std::size_t const> parts_;
    Arena& scratch_;
    std::vector<LevelStep> steps_;
};

}}} // namespace joinable::v0::detail
