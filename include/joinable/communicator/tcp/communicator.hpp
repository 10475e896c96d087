// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/tcp/listener.hpp>
#include <joinable/communicator/tcp/options.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/error.hpp>

#if defined(__linux__) // elsewhere there are no such sockets

#include <joinable/communicator/tcp/detail/hub_thread.hpp>
#include <joinable/communicator/tcp/detail/rank.hpp>

namespace joinable { inline namespace v0 {

/// A collective of ranks that are connected by TCP. Destroyed unfinished it waits up to the deadline;
/// while unwinding it aborts. After that nothing writes to this rank's buffer.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] TcpWork {
public:
    TcpWork(TcpWork&& other) noexcept;
    TcpWork& operator=(TcpWork&&) = delete;

    ~TcpWork();

    /// Blocks until this rank's buffer is final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  ranks said different things; no data moved.
    /// @throws TimedOut, PeerFailed, ...  what the communicator was aborted with, unless every rank
    ///         had arrived before.
    void wait() { rank_->finish(sequence_); }
    /// Makes progress; true once wait() would return at once. @throws as wait() does; TimedOut, while
    /// some rank has not arrived, once the time between tests of this work, each gap counted as at
    /// most 10 ms, adds up to the deadline.
    [[nodiscard]] bool test() { return rank_->test(sequence_); }
    /// The same without that deadline, for a rank that waits in the end.
    [[nodiscard]] bool progress() { return rank_->progress(sequence_); }

private:
    friend class TcpCommunicator;
    TcpWork(detail::TcpRank& rank, std::uint64_t sequence) noexcept
        : rank_{&rank}, sequence_{sequence} {}

    detail::TcpRank* rank_;
    std::uint64_t sequence_;
    detail::Unwinding unwinding_;
};

/// Ranks are processes or threads on any machines: one object in each, connected by TCP to rank 0. For
/// the roll calls of a guard and other small collectives, next to a communicator that moves gradients.
///
/// Collectives are those of ThreadCommunicator, with the same results bit for bit: asynchronous, in
/// rank order, up to 64 in flight, and compared across ranks. A message goes to rank 0, where a thread
/// of its own combines it, and back: so what completes, and why all ends, is decided in one place, and
/// rank 0 may compute meanwhile. The other ranks have no thread. What they post is under way at once as
/// far as the kernel takes it, some ten thousand bytes; the rest goes when they wait, test or post.
///
/// An abort, a rank that leaves, or one that dies reaches all others at once, also while they
/// compute; a machine that is out of reach is noticed after 30 s, or at the deadline. A rank 0 that
/// is stopped answers nobody: then each rank throws TimedOut, 5 s after its deadline. If rank 0
/// dies, a collective may have completed on some ranks alone.
///
/// A process that connects has to know the secret, which is sent as it is: that keeps out other
/// jobs and strangers, not those who can read the network. All machines have one order of bytes. A
/// process that forks keeps the connections of its rank open in the child: they end with both.
///
/// All members that take buffers throw ContractViolation before any data moves when a root is no rank,
/// memory is missing, floats are combined bit by bit, or there are more than 1 GiB. Buffers are the
/// caller's until the work has been waited for.
class TcpCommunicator : public detail::BasicCollectives<TcpCommunicator, TcpWork> {
public:
    /// Meets the other ranks of the job, which call this, too. Returns when all have come. Rank 0
    /// listens until then; who connects and does not belong to the job disturbs nobody.
    /// @throws TimedOut            naming the ranks that had not come when the time was over.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   the rank is none, or somebody is that rank already; rank 0 has
    ///                             another job, secret or world size.
    /// @throws CommunicationError  rank 0 cannot listen there; another program answers, or one with
    ///                             another version of this library.
    static TcpCommunicator attach(TcpOptions const& options);
    /// The same for rank 0, which listens already. What the options say of address and port is of no
    /// account. @throws ContractViolation  also if it is another rank.
    static TcpCommunicator attach(TcpListener listener, TcpOptions const& options);
    /// The same for ranks that mpirun, mpiexec, torchrun or srun started; see tcp_environment().
    /// @throws ContractViolation  also if that fails.
    static TcpCommunicator from_environment(std::chrono::nanoseconds deadline = default_deadline) {
        TcpOptions options = tcp_environment();
        options.connect_timeout = deadline;
        options.deadline = deadline;
        return attach(options);
    }

    TcpCommunicator(TcpCommunicator const&) = delete;
    TcpCommunicator& operator=(TcpCommunicator const&) = delete;
    /// The rank leaves: ranks that wait for it get PeerFailed. Blocks for a moment, and for up to 5 s
    /// where somebody does not answer.
    ~TcpCommunicator();

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    /// Local. The first reason wins; every wait that cannot complete any more throws it. Returns when
    /// rank 0 has said which that is, and after 5 s where it does not answer.
    void abort(AbortReason const& reason) { rank_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return rank_.is_aborted(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. The ranks that wait for this one do so for one more deadline from now.
    void keep_alive() { rank_.keep_alive(); }

    /// Local, but asks rank 0. Who has not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const { return rank_.missing_ranks(); }

private:
    /// The two ends of the connection between rank 0 and where all meet.
    struct Ends {
        detail::Socket hub;
        detail::Socket rank;
    };

    TcpCommunicator(detail::HubThread hub, detail::Socket socket, TcpOptions const& options);

    static void check(TcpOptions const& options);

    static detail::TcpJob job_of(TcpOptions const& options) {
        return {options.size, options.job, options.secret};
    }
    static detail::Socket connect(TcpOptions const& options);
    static Ends connected();

    friend class detail::BasicCollectives<TcpCommunicator, TcpWork>;
    TcpWork post(detail::Request const& request);

    detail::HubThread hub_;        // on rank 0
    mutable detail::TcpRank rank_; // asking reads what has come
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0

#endif

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/communicator.ipp>
#endif
