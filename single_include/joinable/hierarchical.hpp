// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

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
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/communicator/detail/poll_pause.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_POLL_PAUSE_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_POLL_PAUSE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A pause between two polls of a wait. There is none at first, as long as `spins` says. Then the
/// wait yields, because others may need this core. After 10 ms it sleeps.
class PollPause {
public:
    explicit PollPause(std::chrono::nanoseconds spins) noexcept : spins_{spins} {}

    void operator()() {
        auto const now = std::chrono::steady_clock::now();
        if (began_at_ == std::chrono::steady_clock::time_point{}) {
            began_at_ = now;
        }
        if (now - began_at_ >= std::chrono::milliseconds{10}) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        } else if (now - began_at_ >= spins_) {
            std::this_thread::yield();
        }
    }

private:
    std::chrono::nanoseconds spins_;
    std::chrono::steady_clock::time_point began_at_{};
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/settle.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_SETTLE_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_SETTLE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// How a caller proceeds with operations in flight.
enum class Waiting : std::uint8_t {
    blocks,
    tests, ///< ends by the deadline
    polls, ///< like tests, without a deadline
};

/// Whether `work` is complete, or there is none. Complete work is destroyed.
template <Work W>
[[nodiscard]] bool is_settled(std::optional<W>& work, Waiting waiting) {
    if (!work) {
        return true;
    }
    if (waiting == Waiting::blocks) {
        work->wait();
    } else if (waiting == Waiting::tests ? !work->test() : !make_progress(*work)) {
        return false;
    }
    work.reset();
    return true;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/hierarchical/detail/comparison.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Whether ranks send parts of one size, or tables say which.
[[nodiscard]] constexpr bool has_parts(Collective collective) noexcept {
    return collective == Collective::all_gather || collective == Collective::reduce_scatter ||
           collective == Collective::scaled_reduce_scatter || collective == Collective::gather ||
           collective == Collective::scatter;
}
/// Whether each rank has only its own part of the table of counts.
[[nodiscard]] constexpr bool has_pairs(Descriptor const& said) noexcept {
    return said.has_counts && said.collective == Collective::all_to_all;
}
/// Whether leaders must be told the parts of other ranks.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& said) noexcept {
    return has_pairs(said) || (said.has_counts && (said.collective == Collective::gather ||
                                                   said.collective == Collective::scatter));
}
/// Whether the parts of ranks become one buffer, and not the other way round.
[[nodiscard]] constexpr bool collects_parts(Collective collective) noexcept {
    return collective == Collective::all_gather || collective == Collective::gather;
}

/// What each rank is about to do, in words that ranks sum before they do it. All then find the same
/// difference, or none.
class Comparison {
public:
    Comparison() = default;
    /// `parts` is the rank's table, if it has one.
    Comparison(Request const& request, std::span<std::size_t const> parts, int rank, int size)
        : said_{request.signature}, size_{size},
          words_((words_of_rank + 1) * static_cast<std::size_t>(size)) {
        std::uint64_t* const own = words_.data() + words_of_rank * static_cast<std::size_t>(rank);
        own[0] = said_.word();
        own[1] = said_.count;
        own[2] = said_.has_counts ? 1 : 0;
        own[3] = collects_parts(said_.collective) ? request.in.count : request.out.count;
        if (!said_.has_counts || has_pairs(said_)) {
            return;
        }
        if (is_for_all()) {
            Hash hash;
            for (std::size_t const part : parts) {
                hash.add(std::uint64_t{part});
            }
            own[4] = hash.value();
        }
        if (rank == holder()) {
            std::copy(parts.begin(), parts.end(), words_.data() + words_of_rank * parts.size());
        }
    }

    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    /// Once they are summed: why ranks cannot run this together.
    [[nodiscard]] std::optional<AbortReason> difference() const {
        auto reason = find_difference(size_, [&](int rank) {
            auto const* const said = of(rank);
            return Said{Descriptor::of_word(said[0], said[1], said[2] != 0), said[4]};
        });
        if (reason || !said_.has_counts || has_pairs(said_)) {
            return reason;
        }
        bool const collects = collects_parts(said_.collective);
        auto const told = [&](int from, int to) {
            return (collects ? to : from) == holder() ? of(collects ? from : to)[3] : 0;
        };
        auto const in_table = [&](int from, int to) {
            return (collects ? to : from) == holder() ? of(size_)[collects ? from : to]
                                                      : std::uint64_t{0};
        };
        return collects ? find_difference_of_counts(size_, said_, told, in_table)
                        : find_difference_of_counts(size_, said_, in_table, told);
    }
    /// Once they are summed: the elements of each rank.
    [[nodiscard]] std::size_t part(int rank) const { return of(rank)[3]; }

private:
    static constexpr std::size_t words_of_rank = 5;

    struct Said {
        Descriptor signature;
        std::uint64_t table; ///< its hash, if it must be the same on all ranks

        friend bool operator==(Said const& a, Said const& b) noexcept {
            return a.signature == b.signature && a.table == b.table;
        }
        [[nodiscard]] bool is_agreement() const noexcept { return signature.is_agreement(); }
        [[nodiscard]] std::string text() const {
            return table == 0 ? signature.text()
                              : concat(signature.text(), ", whose counts have the hash ", table);
        }
    };

    /// The rank whose table counts: for other roots it is the root's.
    [[nodiscard]] int holder() const noexcept { return said_.root; }
    [[nodiscard]] bool is_for_all() const noexcept {
        return said_.collective != Collective::gather && said_.collective != Collective::scatter;
    }
    /// The words of a rank; of `size_`, the table.
    [[nodiscard]] std::uint64_t const* of(int rank) const noexcept {
        return words_.data() + words_of_rank * static_cast<std::size_t>(rank);
    }

    Descriptor said_;
    int size_ = 0;
    std::vector<std::uint64_t> words_;
};

/// What each rank of an all_to_all by counts sends to each and expects from each, in words that ranks
/// sum when they have found that they all run it. All then find the same difference, or none.
class PairCounts {
public:
    PairCounts() = default;
    /// `parts` has what the rank sends to each, then what it expects from each.
    PairCounts(std::span<std::size_t const> parts, int rank, int size)
        : size_{static_cast<std::size_t>(size)}, words_(2 * size_ * size_) {
        auto const own = static_cast<std::size_t>(rank);
        for (std::size_t other = 0; other < size_; ++other) {
            words_[own * size_ + other] = parts[other];
            words_[(size_ + other) * size_ + own] = parts[size_ + other];
        }
    }

    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    [[nodiscard]] std::optional<AbortReason> difference(Descriptor const& said) const {
        auto const of = [&](std::size_t from, int to) {
            return words_[from * size_ + static_cast<std::size_t>(to)];
        };
        return find_difference_of_counts(
            static_cast<int>(size_),
            said,
            [&](int from, int to) { return of(static_cast<std::size_t>(from), to); },
            [&](int from, int to) { return of(size_ + static_cast<std::size_t>(from), to); }
        );
    }
    /// What rank 0 sends to each, then rank 1, and so on.
    [[nodiscard]] std::vector<std::size_t> parts() const {
        return {words_.data(), words_.data() + words_.size() / 2};
    }

private:
    std::size_t size_ = 0;
    std::vector<std::uint64_t> words_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/detail/machines.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Which ranks are on which machine. They are numbered machine by machine, and by their local rank
/// on each. A machine has also a number among the machines, which is the rank of its leader there.
class Machines {
public:
    Machines() = default; ///< not known yet
    Machines(std::span<std::uint64_t const> sizes, int own) : own_{own} {
        for (std::uint64_t const size : sizes) {
            firsts_.push_back(firsts_.back() + static_cast<int>(size));
        }
    }

    [[nodiscard]] bool are_known() const noexcept { return firsts_.size() > 1; }
    [[nodiscard]] int count() const noexcept { return static_cast<int>(firsts_.size()) - 1; }
    [[nodiscard]] int ranks() const noexcept { return firsts_.back(); }
    [[nodiscard]] int own() const noexcept { return own_; }
    /// The rank of its leader.
    [[nodiscard]] int first_of(int machine) const noexcept {
        return firsts_[static_cast<std::size_t>(machine)];
    }
    [[nodiscard]] int machine_of(int rank) const noexcept {
        auto const after = std::upper_bound(firsts_.begin(), firsts_.end(), rank);
        return static_cast<int>(after - firsts_.begin()) - 1;
    }

    /// A reason that has this origin or a greater one names ranks of a communicator around these machines. A level of
    /// a group hears the reasons of the level that it was split from, so both count alike.
    [[nodiscard]] int first_origin_around() const noexcept {
        return (std::max)(ranks(), first_origin_around_);
    }
    /// These are machines of a group that was split from `parent`.
    void become_group_of(Machines const& parent) noexcept {
        first_origin_around_ = parent.first_origin_around();
    }

private:
    std::vector<int> firsts_{0}; ///< of each machine, then the number of ranks
    int own_ = 0;
    int first_origin_around_ = 0; ///< of the communicator that it is a group of
};

/// The levels on which ranks meet.
enum class Level : std::uint8_t { local, across };

/// Cuts a reason, so that it is the same on ranks which get it by abort().
[[nodiscard]] inline AbortReason cut(AbortReason reason) {
    constexpr std::size_t most_text = most_reason_text / 2; // MPI sends ranks in the same message
    constexpr std::size_t most_ranks = 300;                 // more are left out, on every rank
    if (reason.ranks.size() > most_ranks) {
        reason.ranks.resize(most_ranks);
    }
    if (reason.message.size() > most_text) {
        reason.message.resize(length_before_cut(reason.message, most_text));
        reason.message += cut_mark;
    }
    return reason;
}

/// The reason to abort a level with, on `rank` of all machines. It keeps the ranks of all machines.
/// See Machines::first_origin_around() for ranks of a communicator around this one.
[[nodiscard]] inline AbortReason to_level(AbortReason reason, int rank, Machines const& machines) {
    reason.origin = reason.origin < 0 ? rank : machines.first_origin_around() + reason.origin;
    return reason;
}

/// The same reason, by the ranks of all machines. If they have other numbers on the level where it
/// arose, the text says so.
[[nodiscard]] inline AbortReason
to_global(AbortReason reason, Level level, Machines const& machines) {
    if (reason.origin >= 0) { // from to_level()
        int const around = machines.first_origin_around();
        bool const is_around = machines.are_known() && reason.origin >= around;
        reason.origin = is_around ? reason.origin - around : -1;
        return reason;
    }
    if (reason.kind == FailureKind::communication || reason.kind == FailureKind::contract) {
        reason.ranks.clear(); // as on ranks that learn of it by its exception
    }
    int const own = machines.own();
    int const first = machines.first_of(own);
    int const numbers = !machines.are_known()    ? 0
                        : level == Level::across ? machines.count()
                                                 : machines.first_of(own + 1) - first;
    // A group around this level may number its ranks differently.
    if (std::any_of(reason.ranks.begin(), reason.ranks.end(), [&](int rank) {
            return rank < 0 || rank >= numbers;
        })) {
        reason.ranks.clear();
        return cut(std::move(reason));
    }
    bool is_same = level == Level::across || first == 0;
    for (int& rank : reason.ranks) {
        int const number = level == Level::local ? first + rank : machines.first_of(rank);
        is_same = is_same && number == rank;
        rank = number;
    }
    if (!is_same && level == Level::local) {
        std::string const where = concat(
            "on machine ", own, ", which counts its ranks from ", first, " on as 0, 1, ...: "
        );
        reason.message = where + reason.message;
    } else if (!is_same) {
        reason.message = ranks_text(reason.ranks) +
                         concat(
                             reason.ranks.size() == 1 ? " leads a machine" : " lead machines",
                             ", and machines are counted here: ",
                             reason.message
                         );
    }
    return cut(std::move(reason));
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/options.hpp

namespace joinable { inline namespace v0 {

/// How a HierarchicalCommunicator behaves. The same on all ranks.
struct HierarchicalOptions {
    /// Ranks of all machines compare what they are about to do before data moves: collective,
    /// dtype, operation, root, count and tables of counts. If it differs, all throw Mismatch, which
    /// names the ranks. This puts a sum of six words per rank before each collective, and a rank
    /// posts what follows inside its own waits and tests. Without it each level compares what it is
    /// asked for: see HierarchicalCommunicator.
    bool check = false;
};

}} // namespace joinable::v0

// ---- joinable/communicator/hierarchical/detail/groups.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// What split() makes a group of. `across` is null on ranks that do not lead their machine in it, and
/// on all ranks of a group on one machine.
template <class Local, class Across>
struct GroupLevels {
    std::unique_ptr<Local> local;
    std::unique_ptr<Across> across;
    Machines machines;
    HierarchicalOptions options;
    std::function<std::optional<AbortReason>()> parent; ///< why its ranks have ended, if they have
    bool is_renumbered = false;                         ///< see Communicator
};

/// What a rank gives to split().
struct GroupChoice {
    std::int32_t color;
    std::int32_t key;
};

/// Whether the group of this color is_renumbered().
[[nodiscard]] inline bool
group_is_renumbered(std::span<GroupChoice const> choices, std::int32_t color) {
    std::vector<int> members;
    for (std::size_t rank = 0; rank < choices.size(); ++rank) {
        if (choices[rank].color == color) {
            members.push_back(static_cast<int>(rank));
        }
    }
    auto const key = [&](int of) { return choices[static_cast<std::size_t>(of)].key; };
    std::sort(members.begin(), members.end(), [&](int a, int b) {
        return std::tuple{key(a), a} < std::tuple{key(b), b};
    });
    return renumbers(members);
}

/// The machines of this rank's group, with those of its ranks that are in it.
/// @throws ContractViolation  on all ranks: some group cannot be made of these machines. All groups
///                            are checked, so that all ranks find the same.
[[nodiscard]] inline Machines
machines_of_group(std::span<GroupChoice const> choices, Machines const& machines, int rank) {
    std::vector<int> ranks(choices.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    auto const choice = [&](int of) { return choices[static_cast<std::size_t>(of)]; };
    std::sort(ranks.begin(), ranks.end(), [&](int a, int b) {
        return std::tuple{choice(a).color, choice(a).key, a} <
               std::tuple{choice(b).color, choice(b).key, b};
    });
    Machines result;
    for (std::size_t first = 0, end = 0; first < ranks.size(); first = end) {
        auto const color = choice(ranks[first]).color;
        std::vector<std::uint64_t> sizes; // of the group's machines
        std::vector<int> heads;           // the first rank of each of them
        int own = -1;
        for (; end < ranks.size() && choice(ranks[end]).color == color; ++end) {
            int const machine = machines.machine_of(ranks[end]);
            if (heads.empty() || machines.machine_of(heads.back()) != machine) {
                if (std::any_of(heads.begin(), heads.end(), [&](int head) {
                        return machines.machine_of(head) == machine;
                    })) {
                    throw ContractViolation{concat(
                        "split needs keys that keep the ranks of a machine next to each other, but in "
                        "the group of color ",
                        color,
                        " rank ",
                        ranks[end],
                        " of machine ",
                        machine,
                        " comes after ranks of another machine"
                    )};
                }
                sizes.push_back(0);
                heads.push_back(ranks[end]);
            }
            ++sizes.back();
            own = ranks[end] == rank ? static_cast<int>(heads.size()) - 1 : own;
        }
        for (int const head : heads) {
            int const machine = machines.machine_of(head);
            if (heads.size() > 1 && head != machines.first_of(machine)) {
                throw ContractViolation{concat(
                    "split needs the leader of each machine, if a group has ranks of several, because "
                    "leaders alone are connected; but in the group of color ",
                    color,
                    " the first rank of machine ",
                    machine,
                    " is rank ",
                    head,
                    ", and its leader is rank ",
                    machines.first_of(machine)
                )};
            }
        }
        if (own >= 0) {
            result = Machines{sizes, own};
        }
    }
    return result;
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/by_members.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_BY_MEMBERS_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_BY_MEMBERS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Starts a request by the members of any communicator, and returns run(its work). If the communicator lacks the
/// collective, returns lacks(its name) instead.
template <Communicator Comm, class Run, class Lacks>
[[nodiscard]] auto
by_members(Comm& comm, Request const& request, Run const& run, Lacks const& lacks) {
    Descriptor const& said = request.signature;
    ConstBuffer const in = request.in;
    Buffer const out = request.out;
    // Where a collective has one buffer, a rank that only sends reads it.
    Buffer const in_place =
        out.data == nullptr ? Buffer{const_cast<void*>(in.data), in.count, said.dtype} : out;
    auto const by_parts = [&](PartSizes const& parts, auto const& post) {
        return said.has_counts ? run(post(parts.table(comm.size()))) : run(post());
    };
    switch (said.collective) {
    case Collective::barrier: comm.barrier(); return run(CompletedWork{});
    case Collective::broadcast: return run(comm.broadcast(in_place, said.root));
    case Collective::all_reduce: return run(comm.all_reduce(in_place, said.op));
    case Collective::scaled_all_reduce:
        if constexpr (has_scaled_all_reduce<Comm>) {
            return run(comm.all_reduce(in_place, said.op, said.factor));
        }
        break;
    case Collective::reduce:
        if constexpr (has_reduce<Comm>) {
            return run(comm.reduce(in_place, said.op, said.root));
        }
        break;
    case Collective::all_gather:
        if constexpr (has_all_gather<Comm>) {
            return by_parts(request.expects, [&](auto... counts) {
                return comm.all_gather(in, out, counts...);
            });
        }
        break;
    case Collective::reduce_scatter:
        if constexpr (has_reduce_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.reduce_scatter(in, out, said.op, counts...);
            });
        }
        break;
    case Collective::scaled_reduce_scatter:
        if constexpr (has_scaled_reduce_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.reduce_scatter(in, out, said.op, said.factor, counts...);
            });
        }
        break;
    case Collective::gather:
        if constexpr (has_gather<Comm>) {
            return by_parts(request.expects, [&](auto... counts) {
                return comm.gather(in, out, said.root, counts...);
            });
        }
        break;
    case Collective::scatter:
        if constexpr (has_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.scatter(in, out, said.root, counts...);
            });
        }
        break;
    case Collective::all_to_all:
        if constexpr (has_all_to_all<Comm>) {
            int const size = comm.size();
            return said.has_counts
                       ? run(comm.all_to_all(
                             in, out, request.sends.table(size), request.expects.table(size)
                         ))
                       : run(comm.all_to_all(in, out));
        }
        break;
    }
    return lacks(said.collective);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/hierarchical/detail/level_step.hpp

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
    std::vector<std::size_t> counts = {};     ///< of each rank of the level
    std::vector<std::size_t> counts_out = {}; ///< of an all_to_all: what comes from each
    std::vector<LeadersCopy> copies = {};
};

/// A step that was started, whatever type its work has.
class RunningStep {
public:
    RunningStep() = default;
    RunningStep(RunningStep const&) = delete;
    RunningStep& operator=(RunningStep const&) = delete;
    virtual ~RunningStep() = default;
    [[nodiscard]] virtual bool is_settled(Waiting waiting) = 0;
};

template <Work W>
class RunningWork final : public RunningStep {
public:
    explicit RunningWork(W work) : work_{std::move(work)} {}
    [[nodiscard]] bool is_settled(Waiting waiting) override {
        return detail::is_settled(work_, waiting);
    }

private:
    std::optional<W> work_;
};

/// Starts a step on its level, which has this collective. If it cannot reduce to a root, all its
/// ranks get the sum.
template <class Comm>
[[nodiscard]] std::unique_ptr<RunningStep> start_step(Comm& comm, LevelStep const& step) {
    auto const run = []<Work W>(W work) -> std::unique_ptr<RunningStep> {
        return std::make_unique<RunningWork<W>>(std::move(work));
    };
    auto const lacks = [&](Collective collective) -> std::unique_ptr<RunningStep> {
        if (collective == Collective::reduce) {
            return run(comm.all_reduce(step.out, step.signature.op));
        }
        throw CommunicationError{concat("a level of machines has no ", name_of(collective))};
    };
    PartSizes const parts = PartSizes::of(step.counts);
    bool const exchanges = step.signature.collective == Collective::all_to_all;
    return by_members(
        comm,
        {step.signature,
         step.in,
         step.out,
         parts,
         exchanges ? PartSizes::of(step.counts_out) : parts},
        run,
        lacks
    );
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/detail/level_plan.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The capabilities of HierarchicalCommunicator, by those of `Local`. `Across` needs none of them: leaders
/// have memory for what all ranks send, so all_reduce and broadcast are enough there.
template <class Local>
struct OffersOfMachines {
    static constexpr bool scaled_sums = has_scaled_all_reduce<Local>;
    static constexpr bool all_gather = has_gather<Local>;
    static constexpr bool reduce_scatter = has_reduce_scatter<Local> && has_scatter<Local>;
    static constexpr bool reduce = reduce_scatter;
    static constexpr bool scaled_scattered_sums =
        scaled_sums && reduce_scatter && has_scaled_reduce_scatter<Local>;
    static constexpr bool gather = has_gather<Local> && has_scatter<Local>;
    static constexpr bool scatter = gather;
    static constexpr bool all_to_all = gather;
};

/// Divides a collective of all ranks into the steps of one rank on its levels. On each machine a
/// step moves data from its ranks to the leader or back; the leaders' steps are between these.
template <class Local, class Across>
class LevelPlan {
public:
    /// `parts` has the elements of each rank, if ranks have parts. In an all_to_all by counts it has
    /// those from rank 0 to each, then those from rank 1, and so on. A leader's steps use `scratch`
    /// until they are done.
    LevelPlan(
        Machines const& machines,
        Local& local,
        Request const& request,
        std::span<std::size_t const> parts,
        Arena& scratch
    )
        : machines_{machines}, local_{local}, said_{request.signature}, in_{request.in},
          out_{request.out}, parts_{parts}, scratch_{scratch} {}

    [[nodiscard]] std::vector<LevelStep> steps() && {
        switch (said_.collective) {
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
        bool const is_scaled_sum = is_scaled(said_.collective);
        if (is_scaled_sum && OffersOfMachines<Local>::scaled_scattered_sums) {
            sum_on_machine(is_leader() ? out_ : Buffer{});
        } else {
            take(in_place(
                Level::local, is_scaled_sum ? said_.collective : Collective::reduce, out_, 0
            ));
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
        if constexpr (has_reduce_scatter<Across>) {
            take(by_machines(Collective::reduce_scatter, sum, part_of(sum)));
        } else {
            take(in_place(Level::across, Collective::all_reduce, sum));
        }
        take(by_ranks(Collective::scatter, part_of(sum), out_));
    }
    void all_gather() {
        Buffer const all = at_leader(out_.count, out_);
        take(by_ranks(Collective::gather, in_, part_of(all)));
        if constexpr (has_all_gather<Across>) {
            take(by_machines(Collective::all_gather, part_of(all), all));
        } else {
            spread_parts(all);
        }
        take(spread(Level::local, out_));
    }
    void gather() {
        bool const is_collected = has_gather<Across> && !has_root_here();
        Buffer const all = at_leader(is_collected ? own_parts() : sum_of(parts_), out_);
        Buffer const part = is_collected ? all : part_of(all);
        take(by_ranks(Collective::gather, in_, part));
        if constexpr (has_gather<Across>) {
            take(by_machines(
                Collective::gather, part, has_root_here() ? all : none(), root_machine()
            ));
        } else {
            spread_parts(all);
        }
        give_to_root(all);
    }
    void scatter() {
        bool const is_divided = has_scatter<Across> && !has_root_here();
        Buffer const given{const_cast<void*>(in_.data), in_.count, in_.dtype}; // only read from
        Buffer const all = at_leader(is_divided ? own_parts() : sum_of(parts_), given);
        Buffer const part = is_divided ? all : part_of(all);
        if (has_root_here() && local_root() != 0) {
            LevelStep step = at_one(Collective::gather, local_root(), all.count);
            step.in = has_root() ? in_ : none();
            step.out = all;
            take(std::move(step));
        }
        if constexpr (has_scatter<Across>) {
            take(by_machines(
                Collective::scatter, has_root_here() ? all : none(), part, root_machine()
            ));
        } else {
            take(spread(Level::across, all, root_machine()));
        }
        take(by_ranks(Collective::scatter, part, out_));
    }

    /// Leaders exchange blocks. A block has what one machine's ranks send to another's, by sender,
    /// then by receiver. Before that a leader makes blocks of what its ranks send, and afterwards
    /// what each of them receives. Leaders without an all_to_all get the blocks of all.
    void all_to_all() {
        Ranks const own = ranks_at(machines_.own());
        Ranks const all{0, machines_.ranks()};
        bool const exchanges = has_all_to_all<Across> && machines_.count() > 1;
        std::size_t const sent = between(own, all);
        std::size_t const received = between(all, own);
        std::size_t const most = (std::max)(sent, received);
        Buffer const memory = at_leader(most + (exchanges ? most : between(all, all)));
        Buffer const whole = within(memory, 0, most);
        Buffer const blocks = within(memory, most, memory.count - most);

        take(by_ranks(Collective::gather, in_, within(whole, 0, sent), [&](Ranks rank) {
            return between(rank, all);
        }));
        if (is_leader()) {
            std::size_t const first =
                exchanges ? 0 : between({0, own.begin}, all); // of this machine's blocks
            make_blocks(whole, within(blocks, first, sent));
            Buffer const arrived = exchanges ? whole : blocks;
            exchange_blocks(blocks, arrived, exchanges);
            make_parts(arrived, exchanges ? blocks : whole, exchanges);
        }
        Buffer const parts = within(exchanges ? blocks : whole, 0, received);
        take(by_ranks(Collective::scatter, parts, out_, [&](Ranks rank) {
            return between(all, rank);
        }));
    }
    void exchange_blocks(Buffer blocks, Buffer arrived, bool exchanges) {
        Ranks const own = ranks_at(machines_.own());
        Ranks const all{0, machines_.ranks()};
        if (!exchanges) {
            for (int machine = 0; machine < machines_.count(); ++machine) {
                Ranks const those = ranks_at(machine);
                std::size_t const before = between({0, those.begin}, all);
                take(spread(Level::across, within(blocks, before, between(those, all)), machine));
            }
            return;
        }
        LevelStep step =
            in_place(Level::across, Collective::all_to_all, within(arrived, 0, between(all, own)));
        step.signature.has_counts = true;
        step.in = within(blocks, 0, between(own, all));
        for (int machine = 0; machine < machines_.count(); ++machine) {
            step.counts.push_back(between(own, ranks_at(machine)));
            step.counts_out.push_back(between(ranks_at(machine), own));
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
    void make_parts(Buffer blocks, Buffer whole, bool exchanges) {
        Ranks const own = ranks_at(machines_.own());
        std::vector<std::size_t> next; // of each rank, in `whole`
        for (int to = own.begin; to < own.end; ++to) {
            next.push_back(between({0, machines_.ranks()}, {own.begin, to}));
        }
        std::size_t read = 0;
        LevelStep step;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            Ranks const those = ranks_at(machine);
            if (!exchanges) { // among that machine's blocks for all
                read = between({0, those.begin}, {0, machines_.ranks()}) +
                       between(those, {0, own.begin});
            }
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

    /// Sums the inputs of a machine at its leader. The others' inputs do not change.
    void sum_on_machine(Buffer sum) {
        LevelStep step = at_one(
            is_scaled(said_.collective) ? Collective::scaled_reduce_scatter
                                        : Collective::reduce_scatter,
            0,
            in_.count
        );
        step.in = in_;
        step.out = is_leader() ? sum : none();
        take(std::move(step));
    }
    /// On the root's machine, if its leader has it and is another rank.
    void give_to_root(Buffer all) {
        if (has_root_here() && local_root() != 0) {
            std::size_t const count =
                said_.collective == Collective::reduce ? in_.count : sum_of(parts_);
            LevelStep step = at_one(Collective::scatter, local_root(), count);
            step.in = all;
            step.out = has_root() ? out_ : none();
            take(std::move(step));
        }
    }
    /// Instead of an all_gather between leaders.
    void spread_parts(Buffer all) {
        for (int machine = 0; machine < machines_.count(); ++machine) {
            take(spread(Level::across, part_of(all, machine), machine));
        }
    }

    // -- one step ---------------------------------------------------------------------------------

    [[nodiscard]] LevelStep
    in_place(Level level, Collective collective, Buffer buffer, int root = 0) const {
        Descriptor said = said_; // with its operation and factor
        said.collective = collective;
        said.root = root;
        return {level, said, buffer, buffer};
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
    void take(LevelStep step) {
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
    [[nodiscard]] int root_machine() const { return machines_.machine_of(said_.root); }
    [[nodiscard]] bool has_root_here() const { return root_machine() == machines_.own(); }
    [[nodiscard]] int local_root() const {
        return said_.root - machines_.first_of(machines_.own());
    }
    [[nodiscard]] bool has_root() const { return has_root_here() && local_root() == local_.rank(); }

    [[nodiscard]] Buffer none() const { return {nullptr, 0, said_.dtype}; }
    /// Memory of a leader: what the caller gave, if it has so many elements, else scratch.
    [[nodiscard]] Buffer at_leader(std::size_t count, Buffer given = {}) {
        if (!is_leader()) {
            return none();
        }
        if (given.data != nullptr && given.count == count) {
            return given;
        }
        std::size_t const bytes = count * size_of(said_.dtype);
        if (scratch_.bytes() < bytes) {
            scratch_ = Arena{}; // first: both need not fit
            scratch_ = make_arena(local_, bytes);
        }
        return {scratch_.data(), count, said_.dtype};
    }
    /// The parts of a machine's ranks in the parts of all, which only leaders have.
    [[nodiscard]] Buffer part_of(Buffer all, int machine) const {
        if (!is_leader()) {
            return none();
        }
        auto const first = static_cast<std::size_t>(machines_.first_of(machine));
        std::size_t const before = offset_of(parts_, first) * size_of(said_.dtype);
        return {static_cast<std::byte*>(all.data) + before, sum_of(ranks_of(machine)), all.dtype};
    }
    /// So many elements of a leader's memory.
    [[nodiscard]] Buffer within(Buffer memory, std::size_t first, std::size_t count) const {
        if (!is_leader()) {
            return none();
        }
        auto* const data = static_cast<std::byte*>(memory.data) + first * size_of(memory.dtype);
        return {data, count, memory.dtype};
    }
    [[nodiscard]] Buffer part_of(Buffer all) const { return part_of(all, machines_.own()); }

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
        if (!said_.has_counts) {
            return senders * receivers * said_.count;
        }
        std::size_t sum = 0;
        for (std::size_t sender = 0; sender < senders; ++sender) {
            std::size_t const row = (static_cast<std::size_t>(from.begin) + sender) *
                                    static_cast<std::size_t>(machines_.ranks());
            sum += sum_of(parts_.subspan(row + static_cast<std::size_t>(to.begin), receivers));
        }
        return sum;
    }
    [[nodiscard]] static std::size_t sum_of(std::span<std::size_t const> parts) {
        return std::accumulate(parts.begin(), parts.end(), std::size_t{0});
    }

    Machines const& machines_;
    Local& local_;
    Descriptor said_;
    ConstBuffer in_;
    Buffer out_;
    std::span<std::size_t const> parts_;
    Arena& scratch_;
    std::vector<LevelStep> steps_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/detail/engine.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of one rank. Local rank 0 leads its machine: it takes part in both levels, one
/// collective after another, and carries failures from level to level. The other ranks post at once
/// what they do on their machine, unless they compare first.
///
/// A wait on one level does not end when the other level fails, so a leader polls both. While it polls,
/// it tells both levels that it is alive. So only the ranks of its own machine name a late rank, and all
/// ranks get that reason.
template <class Local, class Across>
class HierarchicalEngine : public HasWorks {
public:
    /// Collective. `across` is not null on leaders only.
    HierarchicalEngine(Local& local, Across* across, HierarchicalOptions const& options)
        : local_{local}, across_{across}, options_{options} {
        find_deadline();
        meet();
    }
    /// Local, because split() has met. The group must outlive this.
    explicit HierarchicalEngine(GroupLevels<Local, Across> const& group)
        : local_{*group.local}, across_{group.across.get()}, options_{group.options},
          machines_{group.machines}, parent_{group.parent}, is_renumbered_{group.is_renumbered} {
        find_deadline();
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

    /// Collective; blocks. Makes the group of one rank, when ranks know the choices of all.
    [[nodiscard]] auto split(GroupChoice choice, Machines group, bool is_renumbered) {
        group.become_group_of(machines_);
        using LocalGroup = decltype(local_.split(0, 0));
        using AcrossGroup = decltype(across_->split(0, 0));
        GroupLevels<LocalGroup, AcrossGroup> levels{
            nullptr, nullptr, group, options_, [this] { return heard(); }, is_renumbered
        };
        (void)on_level(Level::local, [&] {
            levels.local.reset(new LocalGroup(local_.split(choice.color, choice.key)));
            return true;
        });
        if (across_ != nullptr) { // one group for each color, in the order of the group's machines
            (void)on_level(Level::across, [&] {
                levels.across.reset(new AcrossGroup(across_->split(choice.color, group.own())));
                return true;
            });
        }
        if (group.count() == 1) { // any of its ranks may be the first one
            levels.across.reset();
        }
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
            reason = reason_on(local_, Level::local);
        }
        if (!reason && across_ != nullptr) {
            reason = reason_on(*across_, Level::across);
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
        local_.abort(to_level(*failure_, rank(), machines_));
        if (across_ != nullptr) {
            across_->abort(to_level(*failure_, rank(), machines_));
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

    /// The first reason that this rank has heard, by the ranks of all machines.
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        auto reason = failure_;
        if (!reason) {
            reason = reason_on(local_, Level::local);
        }
        if (!reason && across_ != nullptr) {
            reason = reason_on(*across_, Level::across);
        }
        if (!reason && parent_) {
            reason = parent_();
        }
        return reason ? std::optional{here(*std::move(reason))} : reason;
    }
    [[nodiscard]] bool is_renumbered() const noexcept { return is_renumbered_; }

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
    /// What a collective does next. Its steps are known when it begins: leaders have one scratch.
    enum class Stage : std::uint8_t { posted, comparing, telling, moving };

    struct Operation {
        Operation(Request const& asked, int ranks) : request{asked} {
            Descriptor const& said = request.signature;
            if (has_parts(said.collective)) {
                parts.resize(static_cast<std::size_t>(ranks));
                PartSizes const sizes = !said.has_counts ? PartSizes::equal(said.count)
                                        : collects_parts(said.collective) ? request.expects
                                                                          : request.sends;
                sizes.copy_to(std::span{parts});
            }
            if (has_pairs(said)) {
                parts.resize(2 * static_cast<std::size_t>(ranks));
                request.sends.copy_to(std::span{parts}.first(parts.size() / 2));
                request.expects.copy_to(std::span{parts}.last(parts.size() / 2));
            }
            request.sends = request.expects = {}; // the caller's tables
        }
        explicit Operation(std::vector<LevelStep> all)
            : stage{Stage::moving}, steps{std::move(all)} {}

        Request request;
        std::vector<std::size_t>
            parts; ///< elements of each rank; of pairs: see PairCounts and LevelPlan
        Stage stage = Stage::posted;
        Comparison comparison;
        PairCounts pairs;
        std::vector<LevelStep> steps; ///< of this stage
        std::size_t started = 0;
        std::vector<std::pair<Level, std::unique_ptr<RunningStep>>> running;
    };

    [[nodiscard]] bool is_leader() const { return local_.rank() == 0; }
    /// Whether this rank waits for others on both levels. If not, it may block.
    [[nodiscard]] bool has_two_levels() const {
        return local_.size() > 1 && across_ != nullptr && across_->size() > 1;
    }

    void find_deadline() {
        if constexpr (has_set_deadline<Local>) {
            deadline_ = local_.set_deadline(default_deadline);
            local_.set_deadline(deadline_);
        }
        if constexpr (has_set_deadline<Across>) {
            if (across_ != nullptr) {
                std::chrono::nanoseconds const theirs = across_->set_deadline(deadline_);
                across_->set_deadline(theirs);
                deadline_ = (std::min)(deadline_, theirs);
            }
        }
    }

    // -- meeting ----------------------------------------------------------------------------------

    void meet() {
        std::array<std::uint64_t, 3> wrong{
            is_leader() && across_ == nullptr ? 1U : 0U,
            !is_leader() && across_ != nullptr ? 1U : 0U,
            options_.check ? 1U : 0U
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
        std::vector<std::uint64_t> sizes(place[0] + 1); // and how many ranks compare
        if (is_leader()) {
            sizes[place[1]] = static_cast<std::uint64_t>(local_.size());
            sizes.back() = wrong[2];
        }
        run({
            step(Level::across, Collective::all_reduce, sizes),
            step(Level::local, Collective::broadcast, sizes),
        });
        std::uint64_t const comparing = sizes.back();
        sizes.pop_back();
        machines_ = Machines{sizes, static_cast<int>(place[1])};
        auto const ranks = static_cast<std::uint64_t>(machines_.ranks());
        if (comparing != 0 && comparing != ranks) {
            fail(
                {FailureKind::contract,
                 {},
                 concat(
                     "expected HierarchicalOptions::check to be the same on all ranks, but ",
                     comparing,
                     " of ",
                     ranks,
                     " have it"
                 )}
            );
        }
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

    // -- collectives ------------------------------------------------------------------------------

    /// Whether ranks compare first. The elements of ranks are told with that.
    [[nodiscard]] bool compares(Descriptor const& said) const noexcept {
        return options_.check || tells_parts(said);
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
            (void)on_level(next.level, [&] {
                operation.running.emplace_back(
                    next.level,
                    next.level == Level::local ? start_step(local_, next)
                                               : start_step(*across_, next)
                );
                return true;
            });
        } while (!is_leader() && operation.started != operation.steps.size());
        return true;
    }
    void begin_stage(Operation& operation) {
        Request const& request = operation.request;
        if (operation.stage == Stage::posted && compares(request.signature)) {
            operation.stage = Stage::comparing;
            operation.comparison = {request, operation.parts, rank(), machines_.ranks()};
            plan_sum(operation, operation.comparison.words());
            return;
        }
        if (operation.stage == Stage::comparing) {
            end_by(operation.comparison.difference());
            if (has_pairs(request.signature)) {
                operation.stage = Stage::telling;
                operation.pairs = {operation.parts, rank(), machines_.ranks()};
                plan_sum(operation, operation.pairs.words());
                return;
            }
            for (std::size_t i = 0; i < operation.parts.size(); ++i) {
                operation.parts[i] = operation.comparison.part(static_cast<int>(i));
            }
        }
        if (operation.stage == Stage::telling) {
            end_by(operation.pairs.difference(request.signature));
            operation.parts = operation.pairs.parts();
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
        (void)on_level(Level::local, [&] { // it may have no memory
            operation.steps =
                LevelPlan<Local, Across>{machines_, local_, request, operation.parts, scratch_}
                    .steps();
            return true;
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
                RunningStep& running = *step;
                if (!on_level(level, [&] { return running.is_settled(waiting); })) {
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
    [[nodiscard]] bool on_level(Level level, F const& f) {
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
        reason.is_renumbered = is_renumbered_;
        return reason;
    }
    template <class Comm>
    [[nodiscard]] std::optional<AbortReason> reason_on(Comm const& comm, Level level) const {
        auto reason = comm.abort_reason();
        return reason ? to_global(*std::move(reason), level, machines_) : reason;
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

    Local& local_;
    Across* across_;
    HierarchicalOptions options_;
    Machines machines_;
    std::function<std::optional<AbortReason>()> parent_; ///< of a group
    bool is_renumbered_ = false;
    Arena scratch_; ///< of the collective that a leader has begun
    std::chrono::nanoseconds deadline_ = default_deadline;
    std::chrono::steady_clock::time_point last_sign_{}; ///< of life, from a leader that waits
    std::deque<Operation> operations_;                  ///< posted and not done
    std::uint64_t done_ = 0;                            ///< number of finished collectives
    std::uint8_t met_ = 0;                              ///< of barriers
    std::optional<AbortReason> failure_;
    std::string waits_in_; ///< the collective that the failure ended
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/communicator.hpp

namespace joinable { inline namespace v0 {

/// A collective over all machines. Its wait() throws as HierarchicalCommunicator says.
template <class Local, class Across>
using HierarchicalWork = detail::WorkOf<detail::HierarchicalEngine<Local, Across>, std::uint64_t>;

namespace detail {
/// A std::optional, a smart pointer or a plain one.
template <class P>
concept points_to_communicator = requires(P& pointer) {
    static_cast<bool>(pointer);
    requires Communicator<std::remove_reference_t<decltype(*pointer)>>;
};
} // namespace detail

/// The ranks of several machines. `local` connects the ranks of a machine, for example through
/// shared memory. Its rank 0 leads the machine, and `across` connects the leaders, by any transport.
/// Each buffer crosses the network once per machine, and not once per rank.
///
/// @code
/// std::optional<joinable::MpiCommunicator> across; // empty on ranks that lead no machine
/// if (local.rank() == 0) {
///     across.emplace(leaders);
/// }
/// joinable::HierarchicalCommunicator comm{local, across};
/// @endcode
///
/// Ranks are numbered machine by machine, in the order of the leaders' ranks in `across`, and by
/// local rank on each machine. Machines may have different numbers of ranks.
///
/// An all-reduce combines the buffers of a machine, as `local.reduce()` or else `all_reduce()` does,
/// and then those of the machines, as `across.all_reduce()` does; the result is broadcast on each
/// machine. If both combine in rank order, the sum is that of the machines' sums, in order of
/// machines, each in order of local ranks; 16-bit numbers are rounded once per level. All ranks get
/// the same bits. The other sums are made in the same way. Factors apply within machines.
///
/// It models AllGathers if `local` models Gathers; Reduces and ReduceScatters if `local` models
/// ReduceScatters and Scatters; Gathers, Scatters and AllToAlls if `local` models Gathers and
/// Scatters; ScalesSums and ScalesScatteredSums if `local` does; Splits if both do. `across`
/// needs nothing: if it lacks a collective, leaders broadcast and sum whole buffers instead. Parts
/// cross the network once per machine, because ranks of a machine have neighbouring parts. For a
/// reduce, reduce-scatter, gather or scatter a leader has scratch memory, at most for the parts of
/// all ranks, which it keeps. For an all_to_all it has twice what its ranks send or receive; if
/// `across` has none, what its ranks send or receive and what all ranks send to each other.
///
/// Collectives run one after another in the order in which they were posted. A leader makes
/// progress inside wait(), test() and posts; the other ranks post at once what they do on their
/// machine. Each takes up to two places of those that `local` has in flight. A gather or scatter by
/// counts first tells all ranks the counts, because only the root has them all; ranks then post it,
/// and what follows, inside their waits and tests. So does an all_to_all by counts, with two words
/// for each pair of ranks.
///
/// An error on one rank becomes the same error on all, which names ranks by their number here. If
/// the text comes from `local` or `across`, it says how that one numbers them. It travels by aborts
/// of `local` and `across`, which model TellsReason; a busy leader carries it on at its next wait or
/// test. Exceptions of `local` and `across` themselves then name no ranks. While a leader waits, it calls keep_alive() on both levels. A rank that is late is
/// therefore missed by the ranks of its machine only, if both model RenewsDeadline. If they do not,
/// ranks of other machines may miss their leaders at the same time, with other errors. A rank that
/// is told of an abort throws it from collectives that it has not seen complete.
///
/// What ranks are about to do is compared by HierarchicalOptions::check, and otherwise as far as
/// `local` and `across` compare what they do for it. Then a rank whose machine has done its part may
/// have the result before another machine's ranks find that they differ; its next collective throws.
/// Not compared are: two roots on one machine, by the ranks of other machines; the parts of other
/// machines' ranks in a table of counts, only their sums; and a barrier, with an all-reduce of one
/// byte. The counts of gathers, scatters and all_to_alls are always compared before data moves.
///
/// `local` and `across` must outlive this object, and nothing else uses them meanwhile. One thread
/// at a time may use an object. All members that take buffers throw ContractViolation before any
/// data moves if the root is not a rank, memory is missing, or the operation is bitwise on
/// floating-point numbers.
template <class Local, class Across>
class HierarchicalCommunicator : public detail::Collectives<
                                     HierarchicalCommunicator<Local, Across>,
                                     HierarchicalWork<Local, Across>,
                                     detail::OffersOfMachines<Local>> {
    static_assert(models_communicator<Local>());
    static_assert(models_communicator<Across>());
    static_assert(
        detail::reduces_host_memory<Local> && detail::reduces_host_memory<Across>,
        "HierarchicalCommunicator: expected communicators of host memory for both levels"
    );
    static_assert(
        TellsReason<Local> && TellsReason<Across>,
        "HierarchicalCommunicator: expected members 'abort(AbortReason)', 'bool is_aborted()' and "
        "'std::optional<AbortReason> abort_reason() const' of both levels, by which a leader learns "
        "why ranks failed; use communicators that model TellsReason"
    );

public:
    /// Collective over all machines; blocks. Both levels run some small collectives, each within
    /// its deadline. `across` is null on ranks other than local rank 0.
    /// @throws ContractViolation  on all ranks that can be reached: a local rank 0 has no `across`,
    ///                            or another rank has one, or options differ.
    /// @throws TimedOut, ...      what a collective of a level throws, on all ranks; without
    ///                            culprits, because the numbers of ranks are not known.
    [[nodiscard]] HierarchicalCommunicator(
        Local& local, Across* across, HierarchicalOptions const& options = {}
    )
        : engine_{local, across, options} {}
    /// The same for a std::optional, which is empty there, or a smart pointer.
    template <detail::points_to_communicator Pointer>
    [[nodiscard]] HierarchicalCommunicator(
        Local& local, Pointer& across, HierarchicalOptions const& options = {}
    )
        : HierarchicalCommunicator{local, across ? &*across : nullptr, options} {}
    HierarchicalCommunicator(HierarchicalCommunicator const&) = delete;
    HierarchicalCommunicator& operator=(HierarchicalCommunicator const&) = delete;
    /// Leaves `local` and `across` as they are. During unwinding it aborts them.
    ~HierarchicalCommunicator() {
        if (unwinding_.has_begun()) {
            engine_.abort_for_exception("the scope of its communicator");
        }
    }

    [[nodiscard]] int rank() const { return engine_.rank(); }
    [[nodiscard]] int size() const { return engine_.machines().ranks(); }
    /// The number of this machine, which is its leader's rank in `across`.
    [[nodiscard]] int machine() const { return engine_.machines().own(); }
    /// The machine of a rank.
    [[nodiscard]] int machine_of(int rank) const { return engine_.machines().machine_of(rank); }

    /// Local. Aborts both levels. The first reason that reaches a rank wins.
    void abort(AbortReason const& reason) { engine_.abort(reason); }
    [[nodiscard]] bool is_aborted() const {
        return engine_.is_aborted() || (own_levels_.parent && own_levels_.parent());
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return engine_.abort_reason(); }
    [[nodiscard]] bool is_renumbered() const noexcept { return engine_.is_renumbered(); }
    /// Local; of both levels, for waits that start later. Returns the deadline that was in force,
    /// the shorter one if they had two.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline)
        requires detail::has_set_deadline<Local> && detail::has_set_deadline<Across>
    {
        return engine_.set_deadline(deadline);
    }
    /// Local. Ranks that wait for this one now wait for one more deadline from this call.
    void keep_alive()
        requires detail::has_keep_alive<Local> && detail::has_keep_alive<Across>
    {
        engine_.keep_alive();
    }
    /// Local. The ranks that have not arrived in the oldest collective of this rank on its machine,
    /// and on a leader also the leaders that have not arrived in that across machines.
    [[nodiscard]] std::vector<int> missing_ranks() const
        requires detail::has_missing_ranks<Local> && detail::has_missing_ranks<Across>
    {
        return engine_.missing_ranks();
    }
    /// Collective; blocks. The ranks of each color form a group, ordered by key, then by rank. Each
    /// level is split in the same way, and the group owns the results, with the deadline and
    /// the options of this communicator. Aborting this communicator aborts the group, but not the
    /// reverse. Errors name ranks by their numbers in the group where they occur. Destroy groups
    /// before this communicator.
    ///
    /// Leaders alone are connected. So a group with ranks of several machines has the leaders of
    /// these machines, each as the first of its machine's ranks. A group on one machine may have any
    /// of its ranks. In both cases ranks of one machine follow each other.
    /// @throws ContractViolation  on all ranks, which can go on: a group is not as described above.
    ///                            On this rank alone, before it communicates: the color is negative.
    /// @throws what all_reduce() and split() of the levels throw, on all ranks.
    [[nodiscard]] auto split(int color, int key)
        requires detail::has_split<Local> && detail::has_split<Across>
    {
        detail::check_color(color);
        std::vector<detail::GroupChoice> choices(static_cast<std::size_t>(size()));
        detail::GroupChoice& own = choices[static_cast<std::size_t>(rank())];
        own = {color, key};
        this->all_reduce({choices.data(), 2 * choices.size(), DType::i32}, ReduceOp::bit_or).wait();
        detail::Machines const group =
            detail::machines_of_group(choices, engine_.machines(), rank());
        bool const is_renumbered = detail::group_is_renumbered(choices, own.color);
        return of_group(engine_.split(own, group, is_renumbered));
    }

    /// For participants that train a model: that of the ranks of this machine.
    [[nodiscard]] detail::ModelTable* model_table()
        requires detail::has_model_table<Local>
    {
        return engine_.local().model_table();
    }

    /// Local. Memory that the ranks of this machine need not copy: see AllocatesArena.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment)
        requires detail::has_allocate<Local>
    {
        return engine_.local().allocate(bytes, alignment);
    }

private:
    friend class detail::
        BasicCollectives<HierarchicalCommunicator, HierarchicalWork<Local, Across>>;
    HierarchicalWork<Local, Across> post(detail::Request const& request) {
        return {engine_, engine_.post(request)};
    }

    template <class, class>
    friend class HierarchicalCommunicator;
    explicit HierarchicalCommunicator(detail::GroupLevels<Local, Across> group)
        : own_levels_{std::move(group)}, engine_{own_levels_} {}
    template <class L, class A>
    [[nodiscard]] static HierarchicalCommunicator<L, A> of_group(detail::GroupLevels<L, A> group) {
        return HierarchicalCommunicator<L, A>{std::move(group)};
    }

    detail::GroupLevels<Local, Across> own_levels_; ///< of a group
    detail::HierarchicalEngine<Local, Across> engine_;
    detail::Unwinding unwinding_;
};

template <class Local, detail::points_to_communicator Pointer>
HierarchicalCommunicator(
    Local&, Pointer&, HierarchicalOptions const& = {}
) -> HierarchicalCommunicator<Local, std::remove_reference_t<decltype(*std::declval<Pointer&>())>>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Across>
class HierarchicalCommunicator<detail::NoCommunicator, Across> {
    static_assert(
        !std::is_same_v<Across, detail::NoCommunicator>,
        "HierarchicalCommunicator: expected the communicator of a machine's ranks, then a std::optional or a "
        "pointer with the communicator of the machines' leaders, which is empty on all other ranks"
    );

public:
    explicit HierarchicalCommunicator(...);
};
HierarchicalCommunicator(detail::AnyArgument, ...)
    -> HierarchicalCommunicator<detail::NoCommunicator, detail::NoCommunicator>;

}} // namespace joinable::v0

// ---- joinable/hierarchical.hpp

/// @file
/// Ranks of several machines: collectives within each machine, and between one rank of each.
