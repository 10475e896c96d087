// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__linux__)
#error "<joinable/shared_memory.hpp> needs the sockets of Linux; elsewhere ranks are threads"
#endif

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/background_thread.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/home_process.hpp>
#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/detail/socket.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/traits.hpp>

#include <cerrno>
#include <cstring>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

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
