// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/check.hpp>
#include <joinable/communicator/mpi/detail/duplicate.hpp>
#include <joinable/communicator/mpi/detail/memory.hpp>
#include <joinable/communicator/mpi/detail/rank.hpp>
#include <joinable/communicator/mpi/options.hpp>
#include <joinable/communicator/mpi/work.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// Ranks are those of an MPI communicator: processes on any machines, which mpirun started.
///
/// Collectives are MPI's non-blocking ones, on a duplicate of the given communicator, so they never meet
/// those of the engine. Their results are what MPI makes of them: sums of floating-point numbers are in
/// its order. They make progress inside wait() and test(). Numbers of 16 bits are combined in f32, and
/// each combination of two is rounded; see MpiOptions::wide. There is no limit to counts.
///
/// MPI cannot cancel a collective. So it gets copies of buffers, in memory that the communicator owns;
/// nothing is copied of buffers in an arena of allocate().
///
/// An abort travels as a message that every wait and test polls: a rank that computes hears of it when it
/// waits next. What is on its way then stays with MPI, and its memory is kept until the process ends,
/// that of arenas too. Ranks that all destroy their communicators without unwinding complete it for each
/// other instead, for at most 2 s. They cannot where a rank has more than 118 collectives open, compared ones
/// (MpiOptions::check), some by counts, or a send, or where one is complete on all ranks that have posted it.
/// Two ranks that abort at the same moment may each be the first that some others hear of, so ranks may
/// throw different reasons. A rank that dies is MPI's affair: mpirun ends the job. This library never calls
/// MPI_Abort.
///
/// A wait ends at the deadline. Then the rank asks the others what they have posted; those that do not
/// answer within 2 s, because they neither wait nor test here, are named as missing.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or dtypes do
/// not fit, a root is no rank, memory is missing or overlaps, or floats are combined bit by bit. Buffers
/// are the caller's until the work has been waited for; spans of counts are copied. Errors of MPI in
/// here are CommunicationError, with MPI's text. But Open MPI and MPICH raise some of those that waits
/// meet at MPI_COMM_WORLD, and that ends the job unless the program has given it MPI_ERRORS_RETURN.
///
/// One thread at a time uses an object, its arenas, and all groups that were split from it or from one of
/// those: a group hears of aborts through the communicators around it. Threads that run side by side use
/// communicators that were each constructed from one of MPI's, for example from native_handle(); aborts do
/// not pass between these. Where several threads use MPI, it must have been started with MPI_THREAD_MULTIPLE.
class MpiCommunicator : public detail::Collectives<MpiCommunicator, MpiWork> {
public:
    /// Collective, blocks. Works on duplicates of `comm`, which stays the caller's. Where it throws, MPI
    /// keeps what it has made until the process ends, because only all ranks together can free that.
    /// @throws ContractViolation   MPI is not initialised, or finalised; there is no such communicator, it
    ///                             connects two groups, or it has more than 8192 ranks.
    /// @throws TimedOut            some ranks did not come; MPI cannot tell which. They end at their own
    ///                             deadlines. Nothing frees `comm` from then on.
    /// @throws CommunicationError  MPI refuses.
    explicit MpiCommunicator(
        MPI_Comm comm, MpiOptions const& options = {}, detail::MpiLimits limits = {}
    )
        : MpiCommunicator{duplicated(comm, options), options, limits, nullptr} {}

    /// Collective, blocks. The same with a communicator that becomes this object's: nothing else may use it,
    /// and it is freed in the end. Where this throws, `comm` stays the caller's.
    [[nodiscard]] static MpiCommunicator
    from_native_handle(MPI_Comm comm, MpiOptions const& options = {}) {
        detail::check_mpi_communicator(comm);
        return MpiCommunicator{comm, options, {}, nullptr};
    }

    MpiCommunicator(MpiCommunicator const&) = delete;
    MpiCommunicator& operator=(MpiCommunicator const&) = delete;
    /// Collective: waits until all ranks have come here, up to the deadline, or for 2 s after an abort. Ranks
    /// that wait for this one get PeerFailed. While unwinding it aborts, and waits for nobody.
    ~MpiCommunicator() { rank_->close(unwinding_.has_begun()); }

    [[nodiscard]] int rank() const noexcept { return rank_->rank(); }
    [[nodiscard]] int size() const noexcept { return rank_->size(); }
    /// On which collectives run. It stays this object's.
    [[nodiscard]] MPI_Comm native_handle() const noexcept { return rank_->data(); }

    /// Not collective. Complete when MPI has the message: then the buffer is the caller's again. Messages
    /// between two ranks with one tag arrive in their order. `tag` is at least 0, and at most MPI's largest.
    MpiWork send(ConstBuffer buffer, int to, int tag = 0) {
        check_message("destination", buffer, to, tag);
        Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
        return {*rank_, rank_->post_message(true, to, tag, read)};
    }
    /// Not collective. The other side of send(). @throws Mismatch  in wait(): it sent another number of
    /// bytes. Dtypes are not compared.
    MpiWork receive(Buffer buffer, int from, int tag = 0) {
        check_message("source", buffer, from, tag);
        return {*rank_, rank_->post_message(false, from, tag, buffer)};
    }

    /// Local. A reason that has come before wins; every wait that is not complete throws it.
    void abort(AbortReason const& reason) { rank_->abort(reason); }
    [[nodiscard]] bool is_aborted() const { return rank_->is_aborted(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_->set_deadline(deadline);
    }
    /// Local. The ranks that wait for this one do so for one more deadline from when they hear it. Calls are
    /// cheap: at most ten in a deadline, and one in a second, are told.
    void keep_alive() { rank_->keep_alive(); }
    /// Local, but asks the others, for up to 2 s. Which ranks have not posted this rank's oldest unfinished
    /// collective, or do not answer, because they neither wait nor test.
    [[nodiscard]] std::vector<int> missing_ranks() const { return rank_->missing_ranks(); }

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their `key`, then
    /// of their rank here. It inherits deadline and options. An abort of this communicator reaches it, not
    /// the other way round; errors name the ranks of the group in which they occur. A thread uses the group
    /// when none uses this communicator or another of its groups. MPI blocks here, so the ranks meet before. A rank that hears of an abort while it waits there goes on for 1 s: the others may
    /// have met already. If all meet, the group is made, and its first wait throws the reason.
    /// @throws Mismatch  some ranks share memory, or do something else. MPI may find an error before.
    [[nodiscard]] MpiCommunicator split(int color, int key) {
        if (color < 0) {
            throw ContractViolation{
                detail::concat("split needs a color of at least 0, but was given ", color)
            };
        }
        static_cast<void>(meet(detail::MpiMeeting::split, 0));
        MPI_Comm made = MPI_COMM_NULL;
        rank_->require([&] {
            detail::check_mpi(MPI_Comm_split(rank_->data(), color, key, &made), "MPI_Comm_split");
        });
        return MpiCommunicator{made, rank_->options(), rank_->limits(), rank_};
    }

    /// Local. Zeroed memory for what is to be reduced often: MPI gets the buffers in it themselves, not
    /// copies. It may outlive the communicator.
    /// @throws std::bad_alloc; ContractViolation  alignment is no power of two.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return detail::MpiMemory::allocate(rank_->memory(), bytes, alignment);
    }

    /// Collective, blocks; the ranks meet before, as in split(). See shared_buffer(). MPI frees such memory by all
    /// ranks together, so it is there until the process ends.
    /// @throws Mismatch           sizes differ, or some ranks do something else.
    /// @throws ContractViolation  on all ranks: they are on several machines.
    /// @throws std::bad_alloc     on all ranks: no object can be as large.
    [[nodiscard]] Arena share(std::size_t bytes) {
        detail::check_same_size(meet(detail::MpiMeeting::share, bytes));
        if (bytes > PTRDIFF_MAX) {
            throw std::bad_alloc{};
        }
        void* start = nullptr;
        bool is_on_one_machine = false;
        rank_->require([&] { is_on_one_machine = share_on_machine(bytes, start); });
        if (!is_on_one_machine) {
            throw ContractViolation{
                "expected all ranks on one machine, as they are to share memory, but MPI has them on "
                "several: start them on one machine, or split the communicator by machines"
            };
        }
        if (rank() == 0 && bytes != 0) {
            std::memset(start, 0, bytes);
        }
        barrier();
        return bytes == 0 ? Arena{}
                          : Arena{static_cast<std::byte*>(start), bytes, nullptr, nullptr};
    }

private:
    MpiCommunicator(
        MPI_Comm owned,
        MpiOptions const& options,
        detail::MpiLimits limits,
        std::shared_ptr<detail::MpiRank> parent
    ) {
        detail::MpiErrorsReturned errors{owned};
        MPI_Comm const alarm = detail::duplicate(owned, options.deadline);
        detail::meet(alarm, options.deadline);
        int rank = 0;
        int size = 0;
        detail::check_mpi(MPI_Comm_rank(owned, &rank), "MPI_Comm_rank");
        detail::check_mpi(MPI_Comm_size(owned, &size), "MPI_Comm_size");
        rank_ = std::make_shared<detail::MpiRank>(
            owned, alarm, rank, size, options, limits, std::move(parent)
        );
        errors.keep();
    }

    static MPI_Comm duplicated(MPI_Comm comm, MpiOptions const& options) {
        detail::check_mpi_communicator(comm);
        detail::MpiErrorsReturned const errors{comm};
        return detail::duplicate(comm, options.deadline);
    }

    /// Ranks are about to block inside MPI, where neither an abort nor the deadline reaches them. So all meet
    /// before, and compare what they are about to do. Returns a word of each rank.
    [[nodiscard]] std::vector<std::uint64_t> meet(detail::MpiMeeting meeting, std::uint64_t word) {
        static_cast<void>(is_aborted()); // hears of an abort for which the others no longer wait
        std::array<std::uint64_t, 2> const own{static_cast<std::uint64_t>(meeting), word};
        std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(size()));
        {
            auto work = all_gather(
                {own.data(), own.size(), DType::u64}, {all.data(), all.size(), DType::u64}
            );
            rank_->finish_meeting(*work.operation_);
        }
        if (auto const reason = detail::difference_of_meetings(all)) {
            rank_->fail(*reason);
        }
        std::vector<std::uint64_t> words;
        for (std::size_t at = 1; at < all.size(); at += own.size()) {
            words.push_back(all[at]);
        }
        return words;
    }
    void check_message(std::string_view role, ConstBuffer buffer, int peer, int tag) const {
        detail::check_memory(buffer);
        detail::check_rank(role, peer, size());
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
    /// Whether all ranks are on this machine; then they have memory together.
    [[nodiscard]] bool share_on_machine(std::size_t bytes, void*& start) const {
        MPI_Comm machine = MPI_COMM_NULL;
        detail::check_mpi(
            MPI_Comm_split_type(
                rank_->data(), MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &machine
            ),
            "MPI_Comm_split_type"
        );
        int here = 0;
        detail::check_mpi(MPI_Comm_size(machine, &here), "MPI_Comm_size");
        if (here == size() && bytes != 0) {
            MPI_Win window = MPI_WIN_NULL;
            auto const own = static_cast<MPI_Aint>(rank() == 0 ? bytes : 0);
            detail::check_mpi(
                MPI_Win_allocate_shared(own, 1, MPI_INFO_NULL, machine, &start, &window),
                "MPI_Win_allocate_shared"
            );
            MPI_Aint found = 0;
            int unit = 0;
            detail::check_mpi(
                MPI_Win_shared_query(window, 0, &found, &unit, &start), "MPI_Win_shared_query"
            );
        }
        detail::check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
        return here == size();
    }

    friend class detail::BasicCollectives<MpiCommunicator, MpiWork>;
    MpiWork post(detail::Request const& request) { return {*rank_, rank_->post(request)}; }

    std::shared_ptr<detail::MpiRank> rank_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
