// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <variant>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/own_rank.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/transport.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/gloo/detail/messages.hpp>
#include <joinable/communicator/gloo/detail/operation.hpp>
#include <joinable/communicator/gloo/detail/rank.hpp>
#include <joinable/communicator/gloo/detail/rendezvous.hpp>
#include <joinable/communicator/gloo/options.hpp>
#include <joinable/communicator/tcp/options.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// A collective or a message of ranks that Gloo connects. Its data moves without tests.
using GlooWork = detail::WorkOf<
    detail::GlooRank,
    std::reference_wrapper<detail::GlooOperation>,
    std::reference_wrapper<detail::GlooMessage>>;

/// Ranks are processes or threads on any machines, where there is no MPI. There is one object in
/// each. Gloo's TCP transport moves data directly between each two of them.
///
/// Collectives are asynchronous. A thread of each rank runs them in the order of posts, so data
/// moves while the rank computes. They combine in rank order by the library's own arithmetic: the
/// results are bitwise identical to those of ThreadCommunicator. 16-bit numbers are computed in f32
/// and rounded once. A rank combines its part of a buffer and sends it to the others, so a large
/// all-reduce sends each element twice, whatever the number of ranks.
///
/// A TcpCommunicator stands beside Gloo, with its hub in rank 0's process. In each collective every
/// rank sends three words for each rank there, and eight more. So ranks compare what they run, the hub
/// knows which ranks have not arrived, and all ranks get the same reason when one fails: a rank that
/// aborts tells the hub first, and then closes its connections of Gloo, which ends the waits of all.
/// Data does not pass through the hub, and most collectives do not wait for it; those with counts
/// or without elements do. Barriers and sums of at most eight u64, such as roll calls, go with these
/// words alone. Up to 64 collectives may be in flight; a further one waits for the oldest.
///
/// The death of a process reaches all others at once. An unreachable machine is noticed after 30 s,
/// or at the deadline. The first reason that reaches rank 0 wins; missing_ranks() asks rank 0. If rank 0 is stopped or out of reach, it answers nobody: each rank throws 5 s
/// after its deadline. If rank 0 dies, a collective may have completed on some ranks only. Each rank
/// connects to every other one, which suits up to some tens of ranks.
///
/// Messages between two ranks do not pass through the hub either. A send is complete when the other
/// rank has posted the receive and the system has the data; the caller may then reuse the buffer.
/// Count and dtype must be the same on both sides, else all ranks throw Mismatch. Messages that come
/// before those of the tag that a rank receives are kept. The first message to a rank, and the first
/// one from it, start a thread. A rank that leaves ends the messages between others that are not
/// complete 5 s later.
///
/// Nothing is encrypted. The secret of the job keeps strangers from its hub, but a stranger that
/// connects to a port of Gloo while ranks meet can make them fail. Use it in a network that you
/// trust. All machines must have the same byte order. A process that a rank forks says nothing for
/// it when it ends, and its calls throw ContractViolation.
///
/// One thread at a time may use an object and all groups split from it or from one of its groups,
/// because a group receives aborts through its parents.
class GlooCommunicator : public detail::RankMembers<GlooCommunicator>,
                         public detail::Collectives<GlooCommunicator, GlooWork>,
                         public detail::Messages<GlooCommunicator, GlooWork> {
public:
    static constexpr std::string_view transport = "gloo";
    /// Whether a launcher started this process and says where rank 0 is. Local.
    [[nodiscard]] static bool is_launched() { return detail::is_launched_with_address(); }

    /// Collective; blocks until all ranks are connected.
    /// @throws ContractViolation   the rank is out of range or already taken; the path is empty;
    ///                             rank 0 has another job, secret or world size.
    /// @throws TimedOut            some ranks had not arrived in time.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws CommunicationError  rank 0 cannot listen or write the file; ranks cannot reach each
    ///                             other; another program answers.
    explicit GlooCommunicator(GlooOptions const& options)
        : GlooCommunicator{detail::GlooMeeting{checked(options)}, nullptr} {}

    /// Collective; blocks. For a rank that mpirun, mpiexec, torchrun or srun started; the ranks meet
    /// at the port that tcp_environment() finds.
    /// @throws as the constructor; ContractViolation if tcp_environment() fails.
    [[nodiscard]] static GlooCommunicator
    from_environment(std::chrono::nanoseconds deadline = default_deadline) {
        TcpOptions const found = tcp_environment();
        return GlooCommunicator{GlooOptions{
            found.rank,
            found.size,
            detail::GlooHub{found.job, found.address, found.port, found.secret},
            {},
            deadline,
            deadline
        }};
    }

    GlooCommunicator(GlooCommunicator const&) = delete;
    GlooCommunicator& operator=(GlooCommunicator const&) = delete;
    /// The rank leaves: ranks that wait for it throw PeerFailed. Waits up to the deadline for ranks
    /// that have not arrived in a collective of this rank. During unwinding it aborts without
    /// waiting. The rank has left only when all groups that it split off are destroyed, too; so
    /// destroy groups first.
    ~GlooCommunicator() {
        if (rank_->is_here()) {
            rank_->close(unwinding_.has_begun());
        } else { // a forked process has none of the threads that it would wait for
            static_cast<void>(new std::shared_ptr{std::move(rank_)});
        }
    }

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group has connections, a hub and a thread of its own, and
    /// inherits the deadline. Aborting this communicator aborts the group, but not the reverse. A
    /// rank that leaves this communicator ends no group of the others. It has left only when its
    /// groups are destroyed, too; so destroy groups first. Errors name ranks by their numbers in
    /// the group where they occur.
    /// @throws Mismatch            some ranks run something else.
    /// @throws CommunicationError  on all ranks: the first rank of a group cannot be where it meets.
    /// @throws PeerFailed          a rank died meanwhile.
    [[nodiscard]] GlooCommunicator split(int color, int key) {
        detail::check_color(color);
        return GlooCommunicator{rank_->split(color, key), rank_};
    }

private:
    GlooCommunicator(detail::GlooMeeting rendezvous, std::shared_ptr<detail::GlooRank> parent)
        : rank_{std::make_shared<detail::GlooRank>(std::move(rendezvous), std::move(parent))} {}

    /// Before the rank waits for the others.
    static GlooOptions const& checked(GlooOptions const& options) {
        detail::check_own_rank(options.rank, options.size);
        auto const* const file = std::get_if<GlooFile>(&options.store);
        if (file != nullptr && file->path.empty()) {
            throw ContractViolation{
                "expected where the ranks meet, a GlooFile with a path or a GlooHub, but "
                "GlooOptions::store was given neither"
            };
        }
        return options;
    }

    friend class detail::RankMembers<GlooCommunicator>;
    [[nodiscard]] detail::GlooRank& own_rank() const noexcept { return *rank_; }
    friend class detail::BasicCollectives<GlooCommunicator, GlooWork>;
    GlooWork post(detail::Request const& request) { return {*rank_, rank_->post(request)}; }
    friend class detail::Messages<GlooCommunicator, GlooWork>;
    GlooWork post_message(bool is_send, int peer, int tag, Buffer const& buffer) {
        return {*rank_, rank_->post_message(is_send, peer, tag, buffer)};
    }

    std::shared_ptr<detail::GlooRank> rank_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
