// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/transport.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/hierarchical/detail/engine.hpp>
#include <joinable/communicator/hierarchical/detail/groups.hpp>
#include <joinable/communicator/hierarchical/options.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

/// A collective over all machines. Its wait() throws as HierarchicalCommunicator says.
using HierarchicalWork = detail::WorkOf<detail::HierarchicalEngine, std::uint64_t>;

namespace detail {
/// A std::optional, a smart pointer or a plain one.
template <class P>
concept points_to_communicator = requires(P& pointer) {
    static_cast<bool>(pointer);
    requires Communicator<std::remove_reference_t<decltype(*pointer)>>;
};

/// A communicator that a HierarchicalCommunicator takes for a level.
template <class Comm>
consteval bool fits_level() {
    static_assert(
        reduces_host_memory<Comm>,
        "HierarchicalCommunicator: expected communicators of host memory for both levels"
    );
    static_assert(
        TellsReason<Comm>,
        "HierarchicalCommunicator: expected members 'abort(AbortReason)', 'bool is_aborted()' and "
        "'std::optional<AbortReason> abort_reason() const' of both levels, by which a leader learns "
        "why ranks failed; use communicators that model TellsReason"
    );
    return reduces_host_memory<Comm> && TellsReason<Comm> && models_communicator<Comm>();
}
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
/// It has every collective. A level needs sums and broadcasts alone; what it lacks is made of these, and
/// split() or a deadline that it lacks is a ContractViolation, as AnyCommunicator says. Parts cross the
/// network once per machine, because ranks of a machine have neighbouring parts. For a reduce,
/// reduce-scatter, gather or scatter a leader has scratch memory, at most for the parts of all ranks, and
/// for an all_to_all twice what its ranks send or receive; it keeps that. Where a level lacks a gather,
/// scatter or all_to_all, its ranks have memory for what all of them send while that runs.
///
/// Collectives run one after another in the order in which they were posted. A leader makes
/// progress inside wait(), test() and posts; the other ranks post at once what they do on their
/// machine. Each takes up to two places of those that `local` has in flight. A gather or scatter by
/// counts first tells all ranks the counts, because only the root has them all; ranks then post it,
/// and what follows, inside their waits and tests. So does an all_to_all by counts. That takes two
/// words for each rank, and two for each pair of ranks that exchange parts.
///
/// An error on one rank becomes the same error on all, which names ranks by their number here. If
/// the text comes from `local` or `across`, it says how that one numbers them. It travels by aborts
/// of `local` and `across`, which model TellsReason; a busy leader carries it on at its next wait or
/// test. Exceptions of `local` and `across` themselves then name no ranks. While a leader waits, it
/// calls keep_alive() on both levels. A rank that is late is therefore missed by the ranks of its
/// machine only, if both can renew deadlines. If they cannot, ranks of other machines may miss their leaders at the same time, with other errors. A rank that
/// is told of an abort throws it from collectives that it has not seen complete.
///
/// HierarchicalOptions::check compares what ranks are about to do. Without it that is compared as far as
/// `local` and `across` compare what they do for it. Then a rank whose machine has done its part may
/// have the result before another machine's ranks find that they differ; its next collective throws.
/// Not compared are: two roots on one machine, by the ranks of other machines; the parts of other
/// machines' ranks in a table of counts, only their sums; and a barrier, with an all-reduce of one
/// byte. The counts of gathers, scatters and all_to_alls are always compared before data moves.
///
/// abort() aborts both levels; the first reason that reaches a rank wins there. set_deadline() sets the deadline of both,
/// and returns the shorter one if they had two; the deadline that this communicator had at first gives each level its own
/// back. It throws ContractViolation if a level of several ranks has none. missing_ranks() names ranks of this machine and,
/// on a leader, also leaders.
///
/// `local` and `across` must outlive this object, and nothing else uses them meanwhile. One thread
/// at a time may use an object.
class HierarchicalCommunicator
    : public detail::RankMembers<HierarchicalCommunicator>,
      public detail::Collectives<HierarchicalCommunicator, HierarchicalWork> {
public:
    /// Collective over all machines; blocks. Both levels run some small collectives, each within
    /// its deadline. `across` is null on ranks other than local rank 0.
    /// @throws ContractViolation  on all ranks that can be reached: a local rank 0 has no `across`,
    ///                            or another rank has one; an unknown word in JOINABLE_CHECK, and then
    ///                            PeerFailed on the others.
    /// @throws Mismatch           ranks differ in `check`, or in JOINABLE_CHECK=collectives.
    /// @throws TimedOut, ...      what a collective of a level throws, on all ranks; without
    ///                            culprits, because the numbers of ranks are not known.
    template <Communicator Local, Communicator Across>
    [[nodiscard]] HierarchicalCommunicator(
        Local& local, Across* across, HierarchicalOptions const& options = {}
    )
        : engine_{{refer_to(&local), refer_to(across), options}} {}
    /// The same for a std::optional, which is empty there, or a smart pointer.
    template <Communicator Local, detail::points_to_communicator Pointer>
    [[nodiscard]] HierarchicalCommunicator(
        Local& local, Pointer& across, HierarchicalOptions const& options = {}
    )
        : HierarchicalCommunicator{local, across ? &*across : nullptr, options} {}
    /// Explains what is missing.
    template <class... Others>
    [[nodiscard]] explicit HierarchicalCommunicator(Others const&...) : engine_{detail::Levels{}} {
        static_assert(
            sizeof...(Others) == std::size_t(-1),
            "HierarchicalCommunicator: expected the communicator of a machine's ranks, then a std::optional or a "
            "pointer with the communicator of the machines' leaders, which is empty on all other ranks"
        );
    }
    HierarchicalCommunicator(HierarchicalCommunicator const&) = delete;
    HierarchicalCommunicator& operator=(HierarchicalCommunicator const&) = delete;
    /// Leaves `local` and `across` as they are. During unwinding it aborts them.
    ~HierarchicalCommunicator() {
        if (unwinding_.has_begun()) {
            abort_for_exception(engine_, "the scope of its communicator");
        }
    }

    /// The number of this machine, which is its leader's rank in `across`.
    [[nodiscard]] int machine() const { return engine_.machines().own(); }
    /// The machine of a rank.
    [[nodiscard]] int machine_of(int rank) const { return engine_.machines().machine_of(rank); }

    /// Collective; blocks. The ranks of each color form a group, ordered by key, then by rank. Each
    /// level is split in the same way, and the group owns the results, with the deadline and
    /// the options of this communicator. Aborting this communicator aborts the group, but not the
    /// reverse. Errors name ranks by their numbers in the group where they occur. Destroy groups
    /// before this communicator.
    ///
    /// Leaders alone are connected. So a group with ranks of several machines has the leaders of
    /// these machines, each as the first of its machine's ranks. A group on one machine may have any
    /// of its ranks. In both cases ranks of one machine follow each other.
    /// @throws ContractViolation  on all ranks, which can go on: a group is not as described above, or a
    ///                            level cannot split, or refuses its part of a group.
    ///                            On this rank alone, before it communicates: the color is negative.
    /// @throws what all_reduce() and split() of the levels throw, on all ranks.
    [[nodiscard]] HierarchicalCommunicator split(int color, int key) {
        detail::check_color(color);
        if (!can_split()) {
            throw ContractViolation{
                "split needs the split() of both levels, but the communicator of a machine's ranks or that of the "
                "leaders has none; choose transports that have it on all ranks"
            };
        }
        std::vector<detail::GroupChoice> choices(static_cast<std::size_t>(size()));
        detail::GroupChoice& own = choices[static_cast<std::size_t>(rank())];
        own = {color, key};
        detail::Request request = detail::RequestsOf{rank(), size()}.all_reduce(
            {choices.data(), 2 * choices.size(), DType::i32}, ReduceOp::bit_or
        );
        request.signature.collective = detail::split_collective; // errors call it so
        post(request).wait();
        detail::Machines const group =
            detail::machines_of_group(choices, engine_.machines(), rank());
        return HierarchicalCommunicator{
            engine_.split(own, group, detail::members_of(choices, color))
        };
    }

    /// Local, the same on all ranks. Whether both levels can, on all machines.
    [[nodiscard]] bool can_split() const noexcept { return engine_.can_split(); }

    /// For participants that train a model: that of the ranks of this machine.
    [[nodiscard]] detail::ModelTable* model_table() { return engine_.local().model_table(); }

    /// Local. Memory that the ranks of this machine need not copy: see AllocatesArena.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return engine_.local().allocate(bytes, alignment);
    }

private:
    friend class detail::RankMembers<HierarchicalCommunicator>;
    [[nodiscard]] detail::HierarchicalEngine& own_rank() noexcept { return engine_; }
    [[nodiscard]] detail::HierarchicalEngine const& own_rank() const noexcept { return engine_; }
    friend class detail::BasicCollectives<HierarchicalCommunicator, HierarchicalWork>;
    HierarchicalWork post(detail::Request const& request) {
        return {engine_, engine_.post(request)};
    }

    explicit HierarchicalCommunicator(detail::Levels group) : engine_{std::move(group)} {}
    template <class Comm>
    [[nodiscard]] static std::unique_ptr<detail::AnyInterface> refer_to(Comm* comm) {
        if constexpr (detail::fits_level<Comm>()) { // else its sentence is the only error
            if (comm != nullptr) {
                return std::make_unique<detail::AnyHeld<Comm&>>(*comm);
            }
        }
        return nullptr;
    }

    detail::HierarchicalEngine engine_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
