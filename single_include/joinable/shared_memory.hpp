// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <linux/sockios.h>
#include <memory>
#include <optional>
#include <poll.h>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <system_error>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/communicator/detail/background_thread.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_BACKGROUND_THREAD_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_BACKGROUND_THREAD_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// While it lives, these signals reach neither this thread nor threads that it starts.
class BlockedSignals {
public:
    explicit BlockedSignals(sigset_t const& set) noexcept {
        pthread_sigmask(SIG_BLOCK, &set, &before_);
    }
    BlockedSignals(BlockedSignals const&) = delete;
    BlockedSignals& operator=(BlockedSignals const&) = delete;
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

    [[nodiscard]] static sigset_t all() noexcept {
        sigset_t set{};
        sigfillset(&set);
        return set;
    }
    [[nodiscard]] static sigset_t only(int signal) noexcept {
        sigset_t set{};
        sigemptyset(&set);
        sigaddset(&set, signal);
        return set;
    }

private:
    sigset_t before_{};
};

/// A thread of the library. It handles no signals. The destructor waits until it ends; in a process that was
/// forked meanwhile, which does not have the thread, it does nothing.
class BackgroundThread {
public:
    BackgroundThread() = default;
    /// `purpose` is for the error, as "the thread where ranks meet".
    /// @throws CommunicationError  the system cannot start another thread.
    template <class F>
    BackgroundThread(std::string_view purpose, F&& run) {
        BlockedSignals const of_both{BlockedSignals::all()};
        try {
            thread_ = std::jthread{std::forward<F>(run)};
        } catch (std::system_error const& error) {
            throw CommunicationError{concat(purpose, " could not be started: ", error.what())};
        }
    }

    BackgroundThread(BackgroundThread&&) = default;
    BackgroundThread& operator=(BackgroundThread&&) = delete;
    ~BackgroundThread() {
        if (thread_.joinable() && !home_.is_here()) {
            // A forked process does not have the thread, so it can neither join nor detach it.
            static_cast<void>(new std::jthread{std::move(thread_)});
        }
    }

private:
    std::jthread thread_;
    HomeProcess home_;
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/file_limit.hpp

#ifndef JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1
#define JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace joinable { inline namespace v0 { namespace detail {

/// Whether this process may give no file so many bytes: the system would kill it by SIGXFSZ. Other systems than Linux
/// are not asked.
[[nodiscard]] inline bool exceeds_file_limit([[maybe_unused]] std::uint64_t bytes) noexcept {
#if defined(__linux__)
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
#else
    return false;
#endif
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/shared_mapping.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_SHARED_MAPPING_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_SHARED_MAPPING_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Gives a file this size. Returns 0, or why the system refuses.
[[nodiscard]] inline int resize_file(int file, std::size_t bytes) noexcept {
    if (exceeds_file_limit(bytes)) {
        return EFBIG;
    }
    return ftruncate(file, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

/// Maps memory of a file, from an offset on. Without a file, only processes that are created later
/// share the memory. `more` are flags of mmap. If the system refuses, returns an empty arena and sets
/// errno.
[[nodiscard]] inline Arena
map_shared(std::size_t bytes, int file = -1, int more = 0, std::size_t from = 0) noexcept {
    int const kind = MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0) | more;
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind, file, static_cast<off_t>(from));
    if (memory == MAP_FAILED) {
        return {};
    }
    auto const unmap = [](void*, std::byte* data, std::size_t size) noexcept {
        munmap(data, size);
    };
    return {static_cast<std::byte*>(memory), bytes, unmap, nullptr};
}

/// An open file, which the destructor closes. Negative: none.
class FileHandle {
public:
    explicit FileHandle(int number) noexcept : number_{number} {}
    ~FileHandle() {
        if (number_ >= 0) {
            close(number_);
        }
    }
    FileHandle(FileHandle&& other) noexcept : number_{std::exchange(other.number_, -1)} {}
    FileHandle& operator=(FileHandle&&) = delete;
    [[nodiscard]] int number() const noexcept { return number_; }

private:
    int number_;
};

/// A new file of this size, without a name. None, and errno, if the system refuses.
[[nodiscard]] inline FileHandle make_file(std::size_t bytes) noexcept {
    FileHandle file{memfd_create("joinable", MFD_CLOEXEC)};
    if (int const error = file.number() < 0 ? errno : resize_file(file.number(), bytes);
        error != 0) {
        errno = error;
        return FileHandle{-1};
    }
    return file;
}

/// A file of which an arena is the mapping. It stays open, so that other processes can get it.
struct SharedFile {
    FileHandle file;
    Arena mapped = {};
    /// To other processes, once SharedBuffer::handle() was called.
    std::shared_ptr<void> offer = {};

    /// If the system refuses, returns an empty arena and sets errno.
    [[nodiscard]] static Arena map(FileHandle file, std::size_t bytes) {
        auto kept = std::make_unique<SharedFile>(SharedFile{std::move(file)});
        kept->mapped = map_shared(bytes, kept->file.number());
        std::byte* const data = kept->mapped.data();
        return data == nullptr ? Arena{} : Arena{data, bytes, &release, kept.release()};
    }
    /// Null if the arena has another kind of memory.
    [[nodiscard]] static SharedFile* of(Arena const& arena) noexcept {
        return static_cast<SharedFile*>(arena.context_of(&release));
    }

private:
    static void release(void* context, std::byte*, std::size_t) noexcept {
        delete static_cast<SharedFile*>(context);
    }
};

/// Memory that the processes of all ranks map, each at its own address. The system counts its
/// mappings, so killing any process leaves nothing of it. Collective; blocks. Rank 0 makes a file
/// without a name, and the others open it through rank 0's process. A process number may mean
/// another process there, as in another container, so they compare device and inode.
/// @throws Mismatch            see check_same_size.
/// @throws CommunicationError  a rank cannot map it; on all ranks.
template <class Comm>
[[nodiscard]] Arena share_mapping(Comm& comm, std::size_t bytes) {
    std::uint64_t const mine = bytes;
    std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
    comm.all_gather({&mine, 1, DType::u64}, {all.data(), all.size(), DType::u64}).wait();
    check_same_size(all, is_renumbered_group(comm));
    if (bytes == 0) {
        return {};
    }
    enum Word : std::size_t { error, process, number, device, inode, words };
    auto const identity = [](int file) noexcept {
        struct stat status{};
        fstat(file, &status);
        return std::array{
            static_cast<std::int64_t>(status.st_dev), static_cast<std::int64_t>(status.st_ino)
        };
    };
    bool const is_maker = comm.rank() == 0;
    FileHandle file = is_maker ? make_file(bytes) : FileHandle{-1};
    int const refused = file.number() < 0 ? errno : 0;
    auto const own = identity(file.number());
    std::array<std::int64_t, words> maker{refused, getpid(), file.number(), own[0], own[1]};
    comm.broadcast({maker.data(), maker.size(), DType::i64}, 0).wait();

    Arena memory;
    auto failure = static_cast<std::int32_t>(maker[error]);
    if (failure == 0) {
        std::string const path = concat("/proc/", maker[process], "/fd/", maker[number]);
        FileHandle opened{
            is_maker ? -1 : open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
        };
        FileHandle& own_view = is_maker ? file : opened;
        if (own_view.number() < 0) {
            failure = errno;
        } else if (identity(own_view.number()) != std::array{maker[device], maker[inode]}) {
            failure = ESTALE;
        } else {
            memory = SharedFile::map(std::move(own_view), bytes);
            failure = memory.data() != nullptr ? 0 : errno;
        }
    }
    comm.all_reduce({&failure, 1, DType::i32}, ReduceOp::max).wait();
    if (failure != 0) {
        throw CommunicationError{concat(
            "expected ",
            bytes,
            " bytes of memory that all ranks share, but on one of them ",
            failure == ESTALE ? "rank 0's process number is another process"
                              : concat("the system says: ", std::strerror(failure)),
            "; ranks need memfd_create() and each other's /proc/<process>/fd, and so one machine, "
            "one user and one namespace of processes"
        )};
    }
    return memory;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/socket.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_SOCKET_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_SOCKET_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

using TimePoint = std::chrono::steady_clock::time_point;

/// Forks of this process wait while it lives. No Socket that is kept from children may be closed meanwhile.
class ForkPause {
public:
    ForkPause();
    ForkPause(ForkPause const&) = delete;
    ForkPause& operator=(ForkPause const&) = delete;
    ~ForkPause();
};

/// A connection or a listener. Nothing here blocks. If the kernel accepts nothing, or has no data
/// yet, the caller tries again.
class Socket {
public:
    Socket() = default;
    explicit Socket(int handle) noexcept : handle_{handle} {}
    Socket(Socket&& other) noexcept
        : handle_{std::exchange(other.handle_, -1)}, forks_{other.forks_} {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(forks_, other.forks_);
        return *this;
    }
    ~Socket() { close(); }

    [[nodiscard]] bool is_open() const noexcept { return handle_ >= 0; }
    [[nodiscard]] int handle() const noexcept { return handle_; }
    void close() noexcept {
        if (is_open()) {
            close_handle(std::exchange(handle_, -1), forks_);
        }
    }
    /// Processes that are forked from now on close their copy at once. A connection thus ends with
    /// this process, whatever it leaves running. The pause began before the socket was made, or another
    /// thread could have forked in between.
    void keep_from_children(ForkPause const& pause);
    /// The socket whose handle make() returns, kept from children from its first moment on.
    template <class Make>
    [[nodiscard]] static Socket of_this_process(Make const& make) {
        Socket socket; // outlives the pause
        ForkPause const pause;
        socket.handle_ = make();
        if (socket.is_open()) {
            socket.keep_from_children(pause);
        }
        return socket;
    }

    /// The next connection of a listener. Not open if there is none now; then errno tells why.
    [[nodiscard]] Socket accept() const {
        return of_this_process([this] {
            return ::accept4(handle_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        });
    }

    /// The number of bytes received: at least 1, or 0 if there are none yet. Nothing if no more
    /// will come, because the other side has closed or is lost.
    [[nodiscard]] std::optional<std::size_t> receive(std::span<std::byte> into) const noexcept;
    /// The number of bytes accepted from the parts, in order. Nothing if the other side is lost;
    /// data that it sent earlier can still be received.
    [[nodiscard]] std::optional<std::size_t>
    send(std::span<std::byte const> first, std::span<std::byte const> second = {}) const noexcept;
    /// Ends sending. The other side learns of it after all data.
    void end_sending() const noexcept { ::shutdown(handle_, SHUT_WR); }
    /// Ends listening, also where processes that were forked before have a copy. The port is free then.
    void end_listening() const noexcept { ::shutdown(handle_, SHUT_RDWR); }
    /// How much of what was sent the other machine has not received.
    [[nodiscard]] std::size_t undelivered() const noexcept {
        int left = 0;
        return ioctl(handle_, SIOCOUTQ, &left) != 0 ? 0 : static_cast<std::size_t>(left);
    }

    void set(int level, int option, int value) const noexcept {
        ::setsockopt(handle_, level, option, &value, sizeof value);
    }

private:
    template <class Call>
    static ssize_t again(Call const& call) noexcept {
        ssize_t result = call();
        while (result < 0 && errno == EINTR) {
            result = call();
        }
        return result;
    }
    static iovec part(std::span<std::byte const> bytes) noexcept {
        return {const_cast<std::byte*>(bytes.data()), bytes.size()}; // it only reads
    }

    static void close_handle(int handle, int forks) noexcept;

    int handle_ = -1;
    int forks_ = -1; ///< that had led to this process; -1: it is not kept from children
};

/// Returns after an event, at `until`, or early. Returns 0, or why the system cannot wait.
int wait_for_any(std::span<pollfd> polled, TimePoint until) noexcept;
inline void wait_for(Socket const& socket, short events, TimePoint until) noexcept {
    pollfd polled{socket.handle(), events, 0};
    wait_for_any({&polled, 1}, until);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/impl/socket.ipp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_COMMUNICATOR_DETAIL_IMPL_SOCKET_IPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_IMPL_SOCKET_IPP_PART_1

#include <algorithm>
#include <ctime>
#include <mutex>
#include <pthread.h>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::optional<std::size_t> Socket::receive(std::span<std::byte> into
) const noexcept {
    ssize_t const got = again([&] { return ::recv(handle_, into.data(), into.size(), 0); });
    if (got > 0) {
        return static_cast<std::size_t>(got);
    }
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? std::optional{std::size_t{0}}
                                                                : std::nullopt;
}

JOINABLE_DEFINITION std::optional<std::size_t>
Socket::send(std::span<std::byte const> first, std::span<std::byte const> second) const noexcept {
    iovec parts[] = {part(first), part(second)};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = second.empty() ? 1 : 2;
    ssize_t const taken = again([&] { return ::sendmsg(handle_, &message, MSG_NOSIGNAL); });
    if (taken >= 0) {
        return static_cast<std::size_t>(taken);
    }
    bool const is_full = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS;
    return is_full ? std::optional{std::size_t{0}} : std::nullopt;
}

/// The open connections of this process. A fork waits until no other thread changes them.
struct OwnConnections {
    std::mutex mutex;
    std::vector<int> handles;
    int forks = 0; ///< a handle of before one may be another file's by now

    /// Exists until the process ends, because threads may run that long.
    static OwnConnections& of_process() {
        static auto* const connections = make();
        return *connections;
    }

private:
    static OwnConnections* make() {
        ::pthread_atfork(
            [] { of_process().mutex.lock(); },
            [] { of_process().mutex.unlock(); },
            [] {
                OwnConnections& own = of_process();
                for (int const handle : own.handles) {
                    ::close(handle);
                }
                own.handles.clear();
                ++own.forks;
                own.mutex.unlock();
            }
        );
        return new OwnConnections;
    }
};

JOINABLE_DEFINITION ForkPause::ForkPause() {
    OwnConnections::of_process().mutex.lock();
}
JOINABLE_DEFINITION ForkPause::~ForkPause() {
    OwnConnections::of_process().mutex.unlock();
}

JOINABLE_DEFINITION void Socket::keep_from_children(ForkPause const& /*pause*/) {
    OwnConnections& own = OwnConnections::of_process();
    own.handles.push_back(handle_);
    forks_ = own.forks;
}

JOINABLE_DEFINITION void Socket::close_handle(int handle, int forks) noexcept {
    if (forks < 0) {
        ::close(handle);
        return;
    }
    OwnConnections& own = OwnConnections::of_process();
    std::lock_guard const lock{own.mutex};
    if (forks == own.forks) { // else it was closed by the fork
        std::erase(own.handles, handle);
        ::close(handle);
    }
}

JOINABLE_DEFINITION int wait_for_any(std::span<pollfd> polled, TimePoint until) noexcept {
    auto const left = std::clamp<std::chrono::nanoseconds>(
        until - std::chrono::steady_clock::now(), std::chrono::nanoseconds{0}, std::chrono::hours{1}
    );
    auto const seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    timespec const time{
        static_cast<time_t>(seconds.count()), static_cast<long>((left - seconds).count())
    };
    if (::ppoll(polled.data(), polled.size(), &time, nullptr) >= 0) {
        return 0;
    }
    int const error = errno == EINTR ? 0 : errno;
    for (pollfd& one : polled) { // nothing has set these
        one.revents = 0;
    }
    return error;
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/communicator/shared_handle.hpp

#if !defined(__linux__)
#error "<joinable/shared_memory.hpp> needs the sockets of Linux; elsewhere ranks are threads"
#endif

namespace joinable { inline namespace v0 {

namespace detail {

using FileSecret = std::array<std::uint64_t, 2>;

/// The address of an abstract socket: it has no file, and ends with the processes that have it open.
struct AbstractAddress {
    sockaddr_un address{};
    socklen_t size;

    explicit AbstractAddress(std::uint64_t number) {
        std::string const name = concat("joinable-1-", number);
        address.sun_family = AF_UNIX;
        std::copy(name.begin(), name.end(), address.sun_path + 1); // the first byte stays 0
        size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }
    [[nodiscard]] sockaddr const* get() const noexcept {
        return reinterpret_cast<sockaddr const*>(&address);
    }
};

/// Not connected, and kept from forked processes. One message of it is one of the other side.
[[nodiscard]] inline Socket local_socket() {
    return Socket::of_this_process([] {
        return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    });
}

/// The user of the process at the other end of a local connection.
[[nodiscard]] inline std::optional<uid_t> peer_user(Socket const& socket) noexcept {
    ucred peer{};
    socklen_t size = sizeof peer;
    bool const is_known = ::getsockopt(socket.handle(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
    return is_known ? std::optional{peer.uid} : std::nullopt;
}

/// The answer to a process that asks for a file.
enum class FileVerdict : std::uint8_t { welcome, other_secret, other_user };

/// The bytes of a message that carries a verdict and a file.
struct FileMessage {
    FileVerdict verdict{};
    iovec bytes{&verdict, sizeof verdict};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
    msghdr header{};

    FileMessage() {
        header.msg_iov = &bytes;
        header.msg_iovlen = 1;
        header.msg_control = control.data();
        header.msg_controllen = control.size();
    }
    FileMessage(FileMessage const&) = delete;
    FileMessage& operator=(FileMessage const&) = delete;

    void send(Socket const& socket, FileVerdict answer, int file) {
        verdict = answer;
        if (answer == FileVerdict::welcome) {
            cmsghdr* const part = CMSG_FIRSTHDR(&header);
            part->cmsg_level = SOL_SOCKET;
            part->cmsg_type = SCM_RIGHTS;
            part->cmsg_len = CMSG_LEN(sizeof file);
            std::memcpy(CMSG_DATA(part), &file, sizeof file);
        } else {
            header.msg_controllen = 0;
        }
        ::sendmsg(socket.handle(), &header, MSG_NOSIGNAL); // it fits: nothing was sent before
    }
    /// As recvmsg().
    [[nodiscard]] ssize_t receive(Socket const& socket) noexcept {
        return ::recvmsg(socket.handle(), &header, MSG_CMSG_CLOEXEC);
    }
    [[nodiscard]] FileHandle file() noexcept {
        int file = -1;
        cmsghdr const* const part = CMSG_FIRSTHDR(&header);
        if (part != nullptr && part->cmsg_type == SCM_RIGHTS) {
            std::memcpy(&file, CMSG_DATA(part), sizeof file);
        }
        return FileHandle{file};
    }
};

/// Gives a file to processes of this user that know a secret, in a thread of its own, until it is
/// destroyed. A process that asks and says nothing keeps no other one waiting.
class FileOffer {
public:
    /// `file` stays open while the offer lives.
    /// @throws CommunicationError
    explicit FileOffer(int file) : file_{file} {
        clients_.reserve(most_clients);
        polled_.reserve(most_clients + 1);
        std::random_device random; // the system's source of random numbers
        auto const word = [&] { return std::uint64_t{random()} << 32U | random(); };
        secret_ = {word(), word()};
        listener_ = local_socket();
        bool is_bound = false;
        for (int i = 0; i < 8 && listener_.is_open() && !is_bound; ++i) { // others may have a name
            AbstractAddress const at{number_ = word()};
            is_bound = ::bind(listener_.handle(), at.get(), at.size) == 0;
        }
        if (!is_bound || ::listen(listener_.handle(), SOMAXCONN) != 0) {
            throw CommunicationError{concat(
                "expected a local socket by which processes get shared memory, but the system says: ",
                std::strerror(errno)
            )};
        }
        thread_.emplace("the thread that gives shared memory to other processes", [this] {
            serve();
        });
    }
    FileOffer(FileOffer const&) = delete;
    FileOffer& operator=(FileOffer const&) = delete;
    ~FileOffer() {
        if (is_here()) { // else the handle may be another file's
            listener_.end_listening();
        }
    }

    /// Whether this process made it. A process that was forked since does not serve.
    [[nodiscard]] bool is_here() const noexcept { return home_.is_here(); }
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    [[nodiscard]] FileSecret const& secret() const noexcept { return secret_; }

private:
    struct Client {
        Socket socket;
        TimePoint end;
    };
    static constexpr std::size_t most_clients = 64;
    static constexpr std::chrono::seconds patience{5};

    void serve() noexcept {
        for (;;) {
            TimePoint until = std::chrono::steady_clock::now() + std::chrono::hours{1};
            polled_.assign(1, {listener_.handle(), POLLIN, 0});
            for (Client const& client : clients_) {
                polled_.push_back({client.socket.handle(), POLLIN, 0});
                until = (std::min)(until, client.end);
            }
            if (wait_for_any(polled_, until) != 0 ||
                (polled_.front().revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) {
                break;
            }
            accept_all();
            auto const now = std::chrono::steady_clock::now();
            std::erase_if(clients_, [&](Client& client) {
                return is_answered(client) || now >= client.end;
            });
        }
        listener_.end_listening(); // nobody waits for an answer that does not come
    }
    void accept_all() noexcept {
        for (;;) {
            Socket socket = listener_.accept();
            if (!socket.is_open()) {
                if (errno != EAGAIN && errno != EINTR) { // too many open files: it stays ready
                    wait_for(listener_, 0, end_of_wait(std::chrono::milliseconds{20}));
                }
                return;
            }
            if (clients_.size() == most_clients) { // those that have told their secret leave first
                std::erase_if(clients_, [&](Client const& client) { return is_answered(client); });
            }
            if (clients_.size() == most_clients) {
                clients_.erase(clients_.begin());
            }
            clients_.push_back({std::move(socket), end_of_wait(patience)});
        }
    }
    bool is_answered(Client const& client) noexcept {
        FileSecret told{};
        auto const got = client.socket.receive(std::as_writable_bytes(std::span{told}));
        if (got && *got == 0) {
            return false;
        }
        if (got) {
            bool const is_own = peer_user(client.socket) == ::geteuid();
            bool const knows = *got == sizeof told && told == secret_;
            FileMessage{}.send(
                client.socket,
                !is_own ? FileVerdict::other_user
                : knows ? FileVerdict::welcome
                        : FileVerdict::other_secret,
                file_
            );
        }
        return true;
    }

    int file_;
    std::uint64_t number_ = 0;
    FileSecret secret_{};
    Socket listener_;
    std::vector<Client> clients_;
    std::vector<pollfd> polled_;
    HomeProcess home_;
    std::optional<BackgroundThread> thread_; ///< ends before all that it uses
};

[[noreturn]] inline void refuse_file(std::string const& why) {
    throw CommunicationError{concat("expected the shared memory of a handle, but ", why)};
}

/// The file that an offer of this number gives. Waits at most for `patience`.
/// @throws CommunicationError
[[nodiscard]] inline FileHandle
receive_file(std::uint64_t number, FileSecret const& secret, std::chrono::nanoseconds patience) {
    TimePoint const end = end_of_wait(patience);
    auto const refuse_if_late = [&] {
        if (std::chrono::steady_clock::now() >= end) {
            refuse_file(concat(
                "the process that offers it did not answer within ",
                std::chrono::duration<double>(patience).count(),
                " s: it may be stopped"
            ));
        }
    };
    constexpr std::string_view has_ended =
        "no process offers it: the buffer on which handle() was called must live while others open "
        "it, and be of a process in the same network namespace, so in the same container";
    Socket const socket = local_socket();
    if (!socket.is_open()) {
        refuse_file(concat("this process cannot open a socket: ", std::strerror(errno)));
    }
    AbstractAddress const at{number};
    while (::connect(socket.handle(), at.get(), at.size) != 0) {
        int const error = errno; // EAGAIN: many processes ask
        if (error != EAGAIN && error != EINTR) {
            refuse_file(
                error == ECONNREFUSED ? to_text(has_ended)
                                      : concat("the system says: ", std::strerror(error))
            );
        }
        refuse_if_late();
        wait_for_any({}, (std::min)(end, end_of_wait(std::chrono::milliseconds{1})));
    }
    if (auto const user = peer_user(socket); user != ::geteuid()) {
        refuse_file(concat(
            "it belongs to user ",
            user ? concat(*user) : "unknown",
            ", and this process runs as user ",
            ::geteuid(),
            ": processes that share memory run as one user"
        ));
    }
    static_cast<void>(socket.send(std::as_bytes(std::span{secret})));
    FileMessage message;
    ssize_t got = -1;
    while ((got = message.receive(socket)) < 0 && (errno == EAGAIN || errno == EINTR)) {
        refuse_if_late();
        wait_for(socket, POLLIN, end);
    }
    if (got <= 0) {
        refuse_file(to_text(has_ended));
    }
    if (message.verdict == FileVerdict::other_user) {
        refuse_file("the process that offers it runs as another user");
    }
    if (message.verdict == FileVerdict::other_secret) {
        refuse_file("its secret is another one: the handle was changed on its way, or made up");
    }
    FileHandle file = message.file();
    if (file.number() < 0) {
        refuse_file("this process can open no more files: raise its limit of them (ulimit -n)");
    }
    return file;
}

} // namespace detail

/// Names the elements of a SharedBuffer for other processes of this machine; SharedBuffer::handle() makes
/// it. A plain value of five numbers, which has the same size in every process and so travels in one
/// message: it models Tensor, as in `broadcast(comm, handle, 0)`; a pipe or a file takes it, too. It
/// has a secret of 128 bits: a process of the same user that knows the handle may read and write
/// the elements.
struct SharedHandle {
    /// The socket's number, the secret, the number of elements, and the bytes of one. Zeros: no handle.
    std::array<std::uint64_t, 5> words{};

    [[nodiscard]] std::size_t count() const noexcept { return static_cast<std::size_t>(words[3]); }
    [[nodiscard]] std::uint64_t element_bytes() const noexcept { return words[4]; }

    /// For SharedBuffer.
    [[nodiscard]] static SharedHandle
    of(Arena const& memory, std::size_t count, std::size_t element_bytes) {
        detail::SharedFile* const shared = detail::SharedFile::of(memory);
        if (shared == nullptr) {
            throw ContractViolation{detail::concat(
                "SharedBuffer::handle(): ",
                count == 0 ? "the buffer has no elements, which no process can open"
                           : "the elements are in the heap of this process; make the buffer by "
                             "shared_buffer<T>(count), or over process ranks"
            )};
        }
        auto offer = std::static_pointer_cast<detail::FileOffer>(shared->offer);
        if (!offer || !offer->is_here()) {
            offer = std::make_shared<detail::FileOffer>(shared->file.number());
            shared->offer = offer;
        }
        return {{offer->number(), offer->secret()[0], offer->secret()[1], count, element_bytes}};
    }
    /// For SharedBuffer: where an arena of open() is.
    [[nodiscard]] static DeviceId device_of(Arena const&) noexcept { return {}; }
    /// For SharedBuffer. @pre the handle names elements of `element_bytes`
    [[nodiscard]] Arena open(std::size_t element_bytes, std::chrono::nanoseconds patience) const {
        detail::FileHandle file = detail::receive_file(words[0], {words[1], words[2]}, patience);
        struct stat status{};
        auto const size = ::fstat(file.number(), &status) == 0
                              ? static_cast<std::uint64_t>(status.st_size)
                              : std::uint64_t{0};
        if (count() > size / element_bytes) {
            detail::refuse_file(detail::concat(
                "it has ",
                size,
                " bytes, too few for ",
                count(),
                " elements: the handle was changed"
            ));
        }
        Arena memory = detail::SharedFile::map(std::move(file), count() * element_bytes);
        if (memory.data() == nullptr) {
            detail::refuse_file(detail::concat("the system says: ", std::strerror(errno)));
        }
        return memory;
    }
};

template <>
struct tensor_traits<SharedHandle> {
    using value_type = std::uint64_t;
    static std::uint64_t* data(SharedHandle& handle) noexcept { return handle.words.data(); }
    static std::uint64_t const* data(SharedHandle const& handle) noexcept {
        return handle.words.data();
    }
    static std::array<std::size_t, 1> extents(SharedHandle const& handle) noexcept {
        return {{handle.words.size()}};
    }
};

}} // namespace joinable::v0

// ---- joinable/participant/share_parameters.hpp

namespace joinable { inline namespace v0 {

/// The values of one rank's model, in memory that all ranks share; share_parameters() makes it. The
/// destructor releases the values that lie there, so the parameters must live until then. On a device, that of rank 0
/// must end last: a barrier between the ends of the others and its own orders them.
class SharedParameters {
public:
    /// For share_parameters(). Changes nothing yet.
    SharedParameters(ParameterList parameters, SharedBuffer<std::byte> memory)
        : memory_{std::move(memory)}, parameters_{std::move(parameters)} {
        std::size_t at = 0;
        for (AnyParameter const& parameter : parameters_) {
            AnyView const value = parameter.value();
            Shape const strides = detail::dense_strides(value.extents(), value.strides());
            places_.push_back(
                {memory_.data() + at, value.dtype(), value.extents(), strides, memory_.device()}
            );
            at += room_of(value);
        }
    }
    SharedParameters(SharedParameters&&) noexcept = default;
    SharedParameters& operator=(SharedParameters&&) = delete;
    ~SharedParameters() {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].numel() != 0 && is_in_place(i)) {
                parameters_[i].release_value();
            }
        }
    }

    /// The memory. With <joinable/shared_memory.hpp> its handle() lets other processes open the values; on a device,
    /// rank 0's handle<CudaSharedHandle>() does.
    [[nodiscard]] SharedBuffer<std::byte> const& buffer() const noexcept { return memory_; }

    /// For share_parameters(): the bytes that a value takes, in whole cache lines.
    [[nodiscard]] static std::size_t room_of(AnyView const& value) noexcept {
        return (value.numel() * size_of(value.dtype()) + 63) / 64 * 64;
    }
    /// For share_parameters(): copies this rank's values into the memory, and waits until they are there.
    void fill(Device& device) const {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].numel() != 0) {
                device.copy(parameters_[i].value(), places_[i]);
            }
        }
        device.finish();
        if (std::byte last{}; memory_.size() != 0) {
            device.download(memory_.end() - 1, &last, 1); // which waits for the copies
        }
    }
    /// For share_parameters(): makes the memory the values.
    /// @throws ContractViolation  set_value copies; and what set_value throws.
    void take() const {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].numel() == 0) {
                continue; // there is nothing to share
            }
            parameters_[i].set_value(places_[i]);
            if (!is_in_place(i)) {
                throw ContractViolation{detail::concat(
                    "share_parameters: set_value copies the value of ",
                    detail::describe_parameter(parameters_, i),
                    ", but must keep the view that it gets"
                )};
            }
        }
    }

private:
    [[nodiscard]] bool is_in_place(std::size_t i) const {
        AnyView const value = parameters_[i].value();
        return value && value.data() == places_[i].data();
    }

    SharedBuffer<std::byte> memory_;
    ParameterList parameters_;
    std::vector<AnyView> places_;
};

namespace detail {

/// share_parameters(): `Handle` names memory of a device for other processes; void: the communicator shares the host's.
template <class Handle, Communicator Comm, class Parameters>
[[nodiscard]] SharedParameters share_values(Comm& comm, Parameters&& parameters, Device& device) {
    constexpr bool is_by_handle = !std::is_void_v<Handle>;
    require_unguarded(identity_of(comm), "share_parameters()");
    ControlOver<Comm&> control{comm};
    ParameterList list;
    std::size_t bytes = 0;
    {
        ModelEntry entry{comm};
        AgreementList compared;
        std::exception_ptr const error = exception_of([&] {
            if (is_by_handle && comm.size() > 1 && entry.is_of_threads()) {
                throw ContractViolation{
                    "share_parameters: handles are for other processes, but these ranks are threads of one; "
                    "give their parameters views of one allocation"
                };
            }
            list = joinable::parameters(std::forward<Parameters>(parameters));
            for (std::size_t i = 0; i < list.size(); ++i) {
                AnyView const value = list[i].value();
                if (value && value.device() != device.id()) {
                    throw ContractViolation{concat(
                        "share_parameters: the value of ",
                        describe_parameter(list, i),
                        " is on ",
                        to_text(value.device()),
                        ", but the shared memory would be on ",
                        to_text(device.id()),
                        value.device() == DeviceId{}
                            ? "; values on the host take share_parameters(comm, model)"
                            : "; give the device of the values, as in "
                              "share_parameters<CudaSharedHandle>(comm, model, device)"
                    )};
                }
            }
            check_parameters(list, device.id());
            for (std::size_t i = 0; i < list.size(); ++i) {
                if (!list[i].can_set_value()) {
                    throw ContractViolation{concat(
                        "share_parameters: the value of ",
                        describe_parameter(list, i),
                        " cannot be moved: parameter_traits of its type needs 'static void set_value(P&, AnyView)' "
                        "and 'static void release_value(P&)'"
                    )};
                }
                bytes += SharedParameters::room_of(list[i].value());
            }
            compared.begin_section("models differ: ");
            compared.add("device", to_text(device.id()));
            static_cast<void>(agree_on_model(compared, list, device));
            entry.enter(list, false);
        });
        agree(control, compared, error);
    }
    bool const is_maker = comm.rank() == 0;
    std::optional<SharedParameters> shared;
    try {
        if constexpr (is_by_handle) {
            Handle handle{};
            agree(control, {}, exception_of([&] {
                      SharedBuffer<std::byte> memory;
                      if (is_maker && bytes != 0) {
                          memory = {
                              device.allocate(bytes, Arena::default_alignment), bytes, device.id()
                          };
                          handle = memory.template handle<Handle>();
                      }
                      if (is_maker) {
                          shared.emplace(std::move(list), std::move(memory)).fill(device);
                      }
                  }));
            control.broadcast(handle.words, 0);
            agree(control, {}, exception_of([&] {
                      if (!is_maker) {
                          SharedBuffer<std::byte> memory;
                          if (bytes != 0) {
                              Arena opened = handle.open(1, {}, device.id());
                              DeviceId const on = Handle::device_of(opened);
                              memory = {std::move(opened), bytes, on};
                          }
                          shared.emplace(std::move(list), std::move(memory));
                      }
                      shared->take();
                  }));
        } else {
            SharedBuffer<std::byte> memory = shared_buffer<std::byte>(comm, bytes);
            agree(control, {}, exception_of([&] {
                      shared.emplace(std::move(list), std::move(memory));
                      if (is_maker) {
                          shared->fill(device);
                      }
                  }));
            agree(control, {}, exception_of([&] { shared->take(); }));
        }
    } catch (...) {
        if constexpr (is_by_handle) { // the others close the memory before rank 0 frees it
            if (!is_maker) {
                shared.reset();
            }
            static_cast<void>(exception_of([&] { comm.barrier(); })); // unless a rank is lost
        }
        throw;
    }
    return std::move(*shared);
}

} // namespace detail

/// Moves the values of a model into memory that all ranks share, so that they train one model: each
/// rank's parameters are views of the same elements, which start as rank 0's. Collective; blocks; outside of
/// guards. `parameters` is a range that joinable::parameters() takes, or its result. Keep what it returns
/// while the values are used. Gradients stay each rank's own. The ranks must order their writes themselves,
/// as those to a SharedBuffer; steps without order are Hogwild's, as in examples/hogwild.cpp. Do not step averages on all
/// ranks: each step would be made once for each rank. Models over thread ranks refuse that; over process ranks nothing
/// notices it.
///
/// parameter_traits need `set_value`, which keeps the view that it gets, and `release_value`.
/// @throws ContractViolation  a value cannot be set, is copied, is missing or is not on the host, or thread ranks
///         share it already; the other ranks throw PeerFailed.
/// @throws Mismatch  ranks have different models.
/// @throws CommunicationError, std::bad_alloc  the memory cannot be allocated; on all ranks.
/// If set_value fails on a rank, or a rank is lost from then on, values that were moved are released: make the model
/// anew. After earlier errors the models are as before.
template <Communicator Comm, class Parameters>
[[nodiscard]] SharedParameters share_parameters(Comm& comm, Parameters&& parameters) {
    static_assert(
        SharesMemory<Comm>,
        "share_parameters: this communicator has no member 'Arena share(std::size_t bytes)'; use one that models "
        "SharesMemory: its ranks must be on one machine"
    );
    return detail::share_values<void>(
        comm, std::forward<Parameters>(parameters), detail::the_host()
    );
}

/// The same for values on a device, by `share_parameters<CudaSharedHandle>(comm, model, device)` with
/// <joinable/cuda.hpp>. Rank 0 allocates the memory there and copies its values to it, in the order of the device's
/// streams; the other ranks open it by a handle. The ranks are processes of one machine, over any communicator, and give
/// the device by the same number. What rank 0 gets must end last: see SharedParameters. A write is ordered when its
/// stream has been waited for before a barrier.
/// @throws ContractViolation  as above; also: a value is on another device, or several ranks are threads of one process.
/// @throws Mismatch  ranks have different models, or give different devices.
/// @throws TimedOut  a device's stream does not come so far by its deadline.
/// @throws CommunicationError  the device has too little memory, or cannot copy; a process cannot open the memory. The
///         other ranks throw PeerFailed.
/// If opening the memory or set_value fails on a rank, values that were moved are released, as above.
template <class Handle, Communicator Comm, class Parameters>
[[nodiscard]] SharedParameters
share_parameters(Comm& comm, Parameters&& parameters, Device& device) {
    return detail::share_values<Handle>(comm, std::forward<Parameters>(parameters), device);
}

}} // namespace joinable::v0

// ---- joinable/shared_memory.hpp

/// @file
/// Memory that processes share beyond what their communicator makes: handles of shared buffers, and
/// models whose values lie in one. Needs the sockets of Linux and no other library; for memory of a GPU,
/// include <joinable/cuda.hpp> as well.
