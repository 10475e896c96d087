// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__linux__)
#error "<joinable/tcp.hpp> needs the sockets of Linux; elsewhere ranks are threads"
#endif

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/background_thread.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/transport.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/tcp/detail/address.hpp>
#include <joinable/communicator/tcp/detail/hub.hpp>
#include <joinable/communicator/tcp/detail/rank.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/communicator/tcp/options.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

namespace detail {
class TcpEnd;
} // namespace detail

/// Listens for rank 0 before it attaches. It is for programs that let the system choose a port and
/// tell the other ranks themselves. Ranks that connect before rank 0 attaches wait. A process that is forked
/// before keeps the port, also when this listener is destroyed unused.
class TcpListener {
public:
    /// Listens on a numeric address of this machine, or on "localhost". Any other name may mean a
    /// different address on another machine, so the listener then takes every address of this
    /// machine. Port 0: the system chooses one.
    /// @throws CommunicationError  the port is in use, or the address is not of this machine.
    explicit TcpListener(std::string const& address, std::uint16_t port = 0)
        : socket_{detail::listen_at(address, port)} {}

    [[nodiscard]] std::uint16_t port() const noexcept {
        sockaddr_storage at{};
        socklen_t size = sizeof at;
        ::getsockname(socket_.handle(), reinterpret_cast<sockaddr*>(&at), &size);
        return ntohs(
            at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 const&>(at).sin6_port
                                     : reinterpret_cast<sockaddr_in const&>(at).sin_port
        );
    }

private:
    friend class detail::TcpEnd;
    detail::Socket socket_;
};

/// A collective of ranks that TCP connects.
using TcpWork = detail::WorkOf<detail::TcpRank, std::uint64_t>;

namespace detail {
/// The facts of a rank of another communicator, beside its connection.
struct TcpSurroundings {
    Hear hear = {}; ///< asked in every wait, also while the rank attaches
    /// Where rank 0 is, if not where the options say.
    std::function<std::optional<TcpOptions>(TcpOptions const&)> look = {};
    bool is_renumbered = false; ///< see Communicator
};

/// One end of the connections by which ranks meet: the rank, and on rank 0 the hub. It is a TcpCommunicator, or it stands
/// beside the other connections of a transport.
class TcpEnd : public RankMembers<TcpEnd>, public BasicCollectives<TcpEnd, TcpWork> {
public:
    /// Collective; blocks until all ranks have met. Only rank 0 may have a listener.
    /// @throws as TcpCommunicator::attach.
    TcpEnd(
        TcpOptions const& options,
        std::optional<TcpListener> listener = std::nullopt,
        TcpSurroundings const& around = {}
    );
    TcpEnd(TcpEnd const&) = delete;
    TcpEnd& operator=(TcpEnd const&) = delete;
    ~TcpEnd();

    /// Posts a request. Errors show `shown`: a collective of another transport for which it stands.
    TcpWork post(Request const& request, Descriptor const& shown);
    TcpWork post(Request const& request) { return post(request, request.signature); }
    [[nodiscard]] TcpRank& own_rank() const noexcept { return rank_; }

private:
    /// A rank that has not met the others yet.
    struct Begun {
        BackgroundThread hub; ///< on rank 0, also while that computes
        Socket socket;
        TcpOptions options; ///< with the port that rank 0 listens on
    };

    TcpEnd(Begun begun, TcpSurroundings const& around);
    [[nodiscard]] static Begun begin(
        TcpOptions const& options,
        std::optional<TcpListener> listener,
        TcpSurroundings const& around
    );

    BackgroundThread hub_;
    mutable TcpRank rank_; // asking reads incoming messages
    Unwinding unwinding_;
};
} // namespace detail

/// Ranks are processes or threads on any machines. There is one object in each, connected by TCP to
/// rank 0. It is for the roll calls of a guard and other small collectives, next to a communicator
/// that moves gradients.
///
/// Collectives behave like those of ThreadCommunicator and give bitwise identical results. They are
/// asynchronous, combine in rank order, and are compared across ranks; up to 64 may be in flight.
/// Each buffer goes to rank 0, where a separate thread combines it, and back. One place thus
/// decides which collectives complete and why they end, and rank 0 may compute meanwhile. The other
/// ranks have no thread. The kernel takes some ten thousand bytes when a rank posts; the rest is
/// sent when the rank waits, tests or posts.
///
/// An abort, a rank that leaves, and one that dies reach all others at once, even while they
/// compute. abort() returns when rank 0 has reported the winning reason, and missing_ranks() asks
/// it; if it does not answer, both return when the rank's patience has passed since the last byte
/// that moved. A machine that acknowledges nothing for 30 s is out of reach; a process that is
/// stopped is not. Both are noticed at the deadline, too. If rank 0 is stopped, it answers nobody:
/// each rank throws TimedOut after its deadline and then its patience (see TcpOptions). If rank 0
/// dies, a collective may have completed on some ranks only.
///
/// A process that connects must know the secret, which is sent in plain text. It keeps out other
/// jobs and strangers, but nobody who can read the network. All machines must have the same byte
/// order. A process that a rank forks has none of the rank's connections. It says nothing for the rank when
/// it ends, and its calls throw ContractViolation.
///
/// A collective of more than 1 GiB throws ContractViolation before any data moves.
class TcpCommunicator : public detail::TcpEnd {
public:
    static constexpr std::string_view transport = "tcp";
    /// Whether a launcher started this process and says where rank 0 is. Local.
    [[nodiscard]] static bool is_launched() { return detail::is_launched_with_address(); }

    /// Meets the other ranks of the job, which call this too. Returns when all have arrived. Rank 0
    /// listens until then; connections that do not belong to the job disturb no rank.
    /// @throws TimedOut            some ranks, which it names, had not arrived in time.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   the rank is out of range or already taken; rank 0 has
    ///                             another job, secret or world size.
    /// @throws CommunicationError  rank 0 cannot listen there; another program answers, or one with
    ///                             another version of this library; this process may open no more
    ///                             files.
    static TcpCommunicator attach(TcpOptions const& options) { return TcpCommunicator{options}; }
    /// The same for rank 0, with a listener that it has already. The address and port of the
    /// options are ignored.
    /// @throws ContractViolation  also if this is not rank 0.
    static TcpCommunicator attach(TcpListener listener, TcpOptions const& options) {
        return TcpCommunicator{options, std::move(listener)};
    }
    /// Attaches a rank that mpirun, mpiexec, torchrun or srun started; see tcp_environment().
    /// @throws ContractViolation  also if tcp_environment() fails.
    static TcpCommunicator from_environment(std::chrono::nanoseconds deadline = default_deadline) {
        TcpOptions options = tcp_environment();
        options.connect_timeout = deadline;
        options.deadline = deadline;
        return attach(options);
    }

    /// The rank leaves: ranks that wait for it throw PeerFailed. Blocks briefly. If a rank does not
    /// answer, blocks until its patience has passed since that rank received the last byte.
    ~TcpCommunicator() = default;

private:
    using TcpEnd::own_rank, TcpEnd::post; // not for users

    explicit TcpCommunicator(
        TcpOptions const& options, std::optional<TcpListener> listener = std::nullopt
    )
        : TcpEnd{options, std::move(listener)} {}
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/impl/communicator.ipp>
#endif
