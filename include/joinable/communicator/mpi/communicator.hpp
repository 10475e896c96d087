// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/detail/transport.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/environment.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/check.hpp>
#include <joinable/communicator/mpi/detail/duplicate.hpp>
#include <joinable/communicator/mpi/detail/helper.hpp>
#include <joinable/communicator/mpi/detail/memory.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/communicator/mpi/detail/rank.hpp>
#include <joinable/communicator/mpi/detail/session.hpp>
#include <joinable/communicator/mpi/options.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message of MPI. After its end MPI may still write to this rank's buffer if that
/// is in an arena. At the deadline test() first gives the ranks the patience of MpiOptions to
/// answer.
using MpiWork = detail::WorkOf<detail::MpiRank, std::reference_wrapper<detail::MpiOperation>>;

/// Ranks are those of an MPI communicator: processes on any machines, started by mpirun.
///
/// Collectives are MPI's non-blocking ones. They run on a duplicate of the given communicator, so
/// they never match the engine's. MPI determines the results: it chooses the order of
/// floating-point sums. Collectives make progress inside wait() and test(), and in a ProgressThread.
/// 16-bit numbers are combined in f32, and every combination of two is rounded; see
/// MpiOptions::wide. Counts are not limited.
///
/// MPI cannot cancel a collective. It therefore gets copies of buffers, in memory that the
/// communicator owns. Buffers in an arena of allocate() are not copied.
///
/// An abort travels as a message that every wait and test polls, so a busy rank sees it at its next
/// wait. Collectives in flight then stay with MPI, and their memory, arenas included, is kept until
/// the process ends. Ranks that all destroy their communicators without unwinding avoid this: for
/// up to MpiOptions::patience they complete these collectives for each other. That fails if a rank
/// has more than 117 collectives open, compared ones (MpiOptions::check), ones with counts, or a
/// send. It also fails if a collective is complete on all ranks that have posted it.
///
/// The first reason that a rank receives wins there. If two ranks abort at the same moment, others may hear of
/// either first, so ranks may throw different reasons. MPI handles the death of a rank: mpirun ends the job. This library never
/// calls MPI_Abort.
///
/// A wait ends at the deadline. The rank then asks the others what they have posted. Ranks that do
/// not answer within the patience are named as missing: they neither wait nor test here, and have no
/// ProgressThread. missing_ranks() asks and names them in the same way. Calls of keep_alive() are cheap: at most ten
/// per deadline, and one per second, send a message; the others wait longer from when they learn of it.
///
/// MPI errors become CommunicationError with MPI's text. But Open MPI and MPICH raise some errors of
/// waits at MPI_COMM_WORLD. These end the job unless the program has set MPI_ERRORS_RETURN there.
///
/// A send is complete when MPI has the message; the caller may then reuse the buffer. The wait() of a
/// receive throws Mismatch if the sender sent another number of bytes. Dtypes are not compared. A tag
/// is at least 0 and at most MPI's largest.
///
/// One thread at a time may use an object, its arenas, and all groups split from it or from one of
/// its groups, because a group receives aborts through its parents. ProgressThreads of these may
/// run beside it: its calls and theirs exclude each other. Without one there is no lock. Threads that run in parallel
/// need communicators that were each constructed from one of MPI's, for example from
/// native_handle(). Aborts do not pass between these. If several threads use MPI, it must be
/// initialised with MPI_THREAD_MULTIPLE.
class MpiCommunicator : public detail::RankMembers<MpiCommunicator>,
                        public detail::Collectives<MpiCommunicator, MpiWork>,
                        public detail::Messages<MpiCommunicator, MpiWork> {
public:
    static constexpr std::string_view transport = "mpi";
    /// Whether MPI is initialised, or its launcher started this process. Local.
    [[nodiscard]] static bool is_launched() {
        return detail::is_mpi_running() ||
               detail::own_environment().finds_any({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
               );
    }
    /// Collective; blocks. Connects all ranks of MPI_COMM_WORLD. If nobody has initialised MPI, this does, for
    /// several threads if MPI can, and the destructor finalises it; destroy groups and arenas before. It does not if
    /// a rank does not get there within 5 s; mpirun then ends the job.
    /// @throws as the constructor; ContractViolation  MPI is finalised already, or the ranks were started by the
    ///         launcher of another MPI.
    [[nodiscard]] static MpiCommunicator from_environment(MpiOptions const& options = {}) {
        return MpiCommunicator{detail::MpiSession::begin(), options};
    }

    /// Collective; blocks. Works on duplicates of `comm`, which stays the caller's. If it throws,
    /// MPI keeps the objects that it has made until the process ends, because only all ranks
    /// together can free them.
    /// @throws ContractViolation   MPI is not initialised or is finalised; `comm` is null, an
    ///                             intercommunicator, or has more than 8192 ranks.
    /// @throws TimedOut            some ranks did not come; MPI cannot tell which. They end at
    ///                             their own deadlines. From then on nothing frees `comm`.
    /// @throws CommunicationError  MPI reports an error.
    /// @throws Mismatch            ranks differ in `wide`, in `check`, or in JOINABLE_CHECK=collectives;
    ///                             an unknown word there is a ContractViolation, and PeerFailed on the
    ///                             others.
    explicit MpiCommunicator(
        MPI_Comm comm, MpiOptions const& options = {}, detail::MpiLimits limits = {}
    )
        : MpiCommunicator{duplicated(comm, options), options, limits, nullptr} {}

    /// Collective; blocks. Takes ownership of `comm`: nothing else may use it, and this object
    /// frees it. If this throws, `comm` stays the caller's.
    [[nodiscard]] static MpiCommunicator
    from_native_handle(MPI_Comm comm, MpiOptions const& options = {}) {
        detail::check_mpi_communicator(comm);
        return MpiCommunicator{comm, options, {}, nullptr};
    }

    MpiCommunicator(MpiCommunicator const&) = delete;
    MpiCommunicator& operator=(MpiCommunicator const&) = delete;
    /// Collective. Waits for all ranks up to the deadline, or for the patience after an abort. Ranks
    /// that wait for this one throw PeerFailed. During unwinding it aborts without waiting. Other
    /// ranks may still complete, for up to half the patience, collectives to which this rank has
    /// contributed; these may tell them why.
    ~MpiCommunicator() {
        if (rank_->is_here()) {
            held()->close(unwinding_.has_begun());
        } else { // a forked process must not call MPI
            static_cast<void>(new std::shared_ptr{std::move(rank_)});
        }
    }

    /// The communicator on which collectives run. This object keeps ownership.
    [[nodiscard]] MPI_Comm native_handle() const noexcept { return rank_->data(); }

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits deadline and options. Aborting this communicator
    /// aborts the group, but not the reverse. Errors name ranks by their numbers in the group where
    /// they occur. Use the group from one thread only while no thread uses this communicator or its
    /// other groups.
    ///
    /// MPI blocks here, so the ranks meet first. A rank that learns of an abort while it waits
    /// there continues for up to half the patience, because the others may have met already; not if
    /// a rank has left that did not come. If all meet, the group is made, and its first wait throws
    /// the reason.
    /// @throws Mismatch  some ranks call share() or something else. MPI may report an error first.
    [[nodiscard]] MpiCommunicator split(int color, int key) {
        detail::check_color(color);
        static_cast<void>(meet(detail::MpiMeeting::split, 0));
        MPI_Comm made = MPI_COMM_NULL;
        require([&] {
            detail::check_mpi(MPI_Comm_split(rank_->data(), color, key, &made), "MPI_Comm_split");
        });
        return MpiCommunicator{made, rank_->options(), rank_->limits(), rank_};
    }

    /// Local. Zeroed memory for buffers that are reduced often: MPI uses buffers in it directly,
    /// without copies. It may outlive the communicator.
    /// @throws std::bad_alloc; ContractViolation  alignment is not a power of two.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return detail::MpiMemory::allocate(held()->memory(), bytes, alignment);
    }

    /// For ProgressThread.
    [[nodiscard]] detail::MpiHelper helper() { return detail::MpiHelper{rank_}; }

    /// Collective; blocks. The ranks meet first, as in split(). See shared_buffer(). The memory is
    /// not MPI's, and may be used after MPI_Finalize().
    /// @throws Mismatch            sizes differ, or some ranks call something else.
    /// @throws ContractViolation   on all ranks: they are on several machines.
    /// @throws std::bad_alloc      on all ranks: `bytes` exceeds the largest possible object.
    /// @throws CommunicationError  on all ranks: one of them cannot map the memory.
    [[nodiscard]] Arena share(std::size_t bytes) {
        detail::check_same_size(meet(detail::MpiMeeting::share, bytes), is_renumbered());
        if (bytes > PTRDIFF_MAX) {
            throw std::bad_alloc{};
        }
        bool are_here = false;
        require([&] { are_here = are_on_this_machine(); });
        if (!are_here) {
            throw ContractViolation{
                "expected all ranks on one machine, as they are to share memory, but MPI has them on "
                "several: start them on one machine, or split the communicator by machines"
            };
        }
        return detail::share_mapping(*this, bytes); // a window of MPI ends with MPI
    }

private:
    MpiCommunicator(detail::MpiSession session, MpiOptions const& options)
        : MpiCommunicator{MPI_COMM_WORLD, options} {
        session_ = std::move(session);
    }
    MpiCommunicator(
        MPI_Comm owned,
        MpiOptions const& options,
        detail::MpiLimits limits,
        std::shared_ptr<detail::MpiRank> parent
    ) {
        detail::MpiErrorsReturned errors{owned};
        MPI_Comm const alarm = detail::duplicate(owned, options.deadline);
        MpiOptions agreed = options; // as the ranks of a group's parent have agreed
        auto const share = [&](std::uint64_t word) {
            return detail::meet(alarm, word, options.deadline);
        };
        if (parent == nullptr) {
            agreed.check = detail::agree_to_compare(options.check, "MpiOptions::check", share);
            detail::check_same_option(share(options.wide ? 1U : 0U), "MpiOptions::wide");
        } else {
            static_cast<void>(share(0));
        }
        int rank = 0;
        int size = 0;
        detail::check_mpi(MPI_Comm_rank(owned, &rank), "MPI_Comm_rank");
        detail::check_mpi(MPI_Comm_size(owned, &size), "MPI_Comm_size");
        rank_ = std::make_shared<detail::MpiRank>(
            owned, alarm, rank, size, agreed, limits, std::move(parent)
        );
        errors.keep();
    }

    static MPI_Comm duplicated(MPI_Comm comm, MpiOptions const& options) {
        detail::check_mpi_communicator(comm);
        detail::MpiErrorsReturned const errors{comm};
        return detail::duplicate(comm, options.deadline);
    }

    /// The ranks are about to block inside MPI, where neither an abort nor the deadline can end the
    /// wait. All of them meet first and compare what they are about to do. Returns one word from
    /// each rank.
    [[nodiscard]] std::vector<std::uint64_t> meet(detail::MpiMeeting meeting, std::uint64_t word) {
        static_cast<void>(is_aborted()); // receives an abort for which the others no longer wait
        std::array<std::uint64_t, 2> const own{static_cast<std::uint64_t>(meeting), word};
        std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(size()));
        std::vector<std::uint64_t> words; // made here: after the meeting the others block
        words.reserve(static_cast<std::size_t>(size()));
        {
            auto work = all_gather(
                {own.data(), own.size(), DType::u64}, {all.data(), all.size(), DType::u64}
            );
            with_rank(work, [&](detail::MpiRank& rank, detail::MpiOperation& operation) {
                operation.called = name_of(meeting);
                rank.finish_meeting(operation);
            });
        }
        if (auto const reason = detail::difference_of_meetings(all)) {
            held()->fail(*reason);
        }
        for (std::size_t at = 1; at < all.size(); at += own.size()) {
            words.push_back(all[at]);
        }
        return words;
    }
    /// Runs f(), in which MPI may block. An MPI error in it ends all ranks.
    template <class F>
    void require(F const& f) {
        held()->require(f);
    }
    void check_tag(int tag) const {
        void* most = nullptr;
        int has_most = 0;
        static_cast<void>(MPI_Comm_get_attr(rank_->data(), MPI_TAG_UB, &most, &has_most));
        int const largest = has_most != 0 ? *static_cast<int*>(most) : 32'767;
        if (tag < 0 || tag > largest) {
            throw ContractViolation{detail::concat(
                "a message by MPI has a tag from 0 to ", largest, ", but was given ", tag
            )};
        }
    }
    [[nodiscard]] bool are_on_this_machine() const {
        MPI_Comm machine = MPI_COMM_NULL;
        detail::check_mpi(
            MPI_Comm_split_type(
                rank_->data(), MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &machine
            ),
            "MPI_Comm_split_type"
        );
        int here = 0;
        detail::check_mpi(MPI_Comm_size(machine, &here), "MPI_Comm_size");
        detail::check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
        return here == size();
    }

    friend class detail::RankMembers<MpiCommunicator>;
    [[nodiscard]] detail::MpiRank& own_rank() const noexcept { return *rank_; }
    friend class detail::BasicCollectives<MpiCommunicator, MpiWork>;
    MpiWork post(detail::Request const& request) { return {*rank_, held()->post(request)}; }
    friend class detail::Messages<MpiCommunicator, MpiWork>;
    MpiWork post_message(bool is_send, int peer, int tag, Buffer buffer) {
        check_tag(tag);
        return {*rank_, held()->post_message(is_send, peer, tag, buffer)};
    }

    [[nodiscard]] detail::HeldMpiRank held() const { return detail::HeldMpiRank{*rank_}; }

    detail::MpiSession session_; // the first member: it ends after the rank
    std::shared_ptr<detail::MpiRank> rank_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
