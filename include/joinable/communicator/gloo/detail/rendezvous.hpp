// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <cerrno>
#include <fcntl.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/gloo/options.hpp>
#include <joinable/communicator/tcp/communicator.hpp>
#include <joinable/communicator/tcp/options.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// How the ranks of a job find each other: they attach to the hub of a TcpEnd, at an
/// address that they know or read in a file.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::string host_name() {
    char name[256]{};
    return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

/// This machine's address in packets to `address`, in numbers. Sends nothing.
/// @throws CommunicationError  `address` is no address, or no network leads there.
[[nodiscard]] inline std::string own_address_towards(std::string const& address) {
    Resolved const found{address.c_str(), 9, 0};
    std::string own;
    for (auto const* one = found.first(); one != nullptr && own.empty(); one = one->ai_next) {
        Socket const socket{::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
        sockaddr_storage at{};
        socklen_t size = sizeof at;
        char text[256]{};
        if (::connect(socket.handle(), one->ai_addr, one->ai_addrlen) == 0 &&
            ::getsockname(socket.handle(), reinterpret_cast<sockaddr*>(&at), &size) == 0 &&
            ::getnameinfo(
                reinterpret_cast<sockaddr*>(&at),
                size,
                text,
                sizeof text,
                nullptr,
                0,
                NI_NUMERICHOST
            ) == 0) {
            own = text;
        }
    }
    if (own.empty()) {
        throw CommunicationError{
            concat("found no way from this machine to rank 0 at \"", address, "\"")
        };
    }
    return own;
}

[[nodiscard]] inline std::string new_secret() {
    std::random_device random;
    return concat(random(), "-", random(), "-", random(), "-", random());
}

/// The file by which ranks meet, as rank 0 writes it and the others read it. Other users may write
/// into its folder, so rank 0 writes a new file, and the others read no file of another user.
class MeetingFile {
public:
    explicit MeetingFile(std::string path) : path_{std::move(path)} {}

    /// The others see the whole file at once, or none.
    /// @throws CommunicationError
    void write(TcpOptions const& options) const {
        std::string const unfinished = concat(path_, ".", new_secret());
        constexpr int as_new = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
        Socket const file{::open(unfinished.c_str(), as_new, S_IRUSR | S_IWUSR)};
        int error = file.is_open() ? 0 : errno;
        if (error == 0) {
            std::string const text = concat(
                mark,
                "\n",
                options.address,
                "\n",
                options.port,
                "\n",
                options.secret,
                "\n",
                mark,
                "\n"
            );
            ssize_t const written = ::write(file.handle(), text.data(), text.size());
            error = written < 0 ? errno : written != std::ssize(text) ? ENOSPC : 0;
            if (error == 0 && ::rename(unfinished.c_str(), path_.c_str()) != 0) {
                error = errno;
            }
            if (error != 0) {
                ::unlink(unfinished.c_str());
            }
        }
        if (error != 0) {
            throw CommunicationError{concat(
                "rank 0 cannot write the file \"",
                path_,
                "\", by which the ranks are to meet: ",
                std::strerror(error)
            )};
        }
    }
    void remove() const noexcept { ::unlink(path_.c_str()); }
    /// Waits for the file.
    /// @throws TimedOut
    void read(TcpOptions& options) const {
        auto const nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds{5}); };
        if (!wait_at_most(options.connect_timeout, [&] { return has_read(options); }, nap)) {
            throw TimedOut{
                {0},
                concat(
                    "rank 0 did not write the file \"",
                    path_,
                    "\", by which the ranks are to meet, within ",
                    std::chrono::duration<double>(options.connect_timeout).count(),
                    " s: start all ranks of a job as one user, with the same path; a file that "
                    "another user owns, or may read or write, does not count"
                )
            };
        }
    }
    /// Whether there is a file now. The options are changed only then.
    [[nodiscard]] bool has_read(TcpOptions& options) const {
        Socket const file{::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)};
        struct stat status{};
        if (!file.is_open() || ::fstat(file.handle(), &status) != 0 || !S_ISREG(status.st_mode) ||
            status.st_uid != ::geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
            return false;
        }
        std::string text(most_bytes, ' ');
        ssize_t const bytes = ::read(file.handle(), text.data(), text.size());
        text.resize(bytes < 0 ? 0 : static_cast<std::size_t>(bytes));
        std::istringstream lines{text};
        std::string first;
        std::string address;
        std::string port;
        std::string secret;
        std::string last;
        if (!std::getline(lines, first) || first != mark || !std::getline(lines, address) ||
            !std::getline(lines, port) || !std::getline(lines, secret) ||
            !std::getline(lines, last) || last != mark) {
            return false;
        }
        options.address = address;
        options.port = static_cast<std::uint16_t>(std::strtoul(port.c_str(), nullptr, 10));
        options.secret = secret;
        return options.port != 0;
    }

private:
    static constexpr std::string_view mark = "ranks of joinable meet here";
    static constexpr std::size_t most_bytes = 4096;

    std::string path_;
};

/// How a rank attaches to the others. The hub lives in rank 0's process.
struct GlooMeeting {
    TcpOptions options = {};
    std::string own_address = {};             ///< of this rank's machine, if it was given
    std::optional<TcpListener> listener = {}; ///< of rank 0, if it has one already
    std::optional<MeetingFile> file = {};     ///< by which the ranks meet; there may be none
    Hear hear = {};                           ///< what else may end these ranks
    bool is_renumbered = false;               ///< see Communicator

    /// Blocks until this rank knows where to attach.
    explicit GlooMeeting(GlooOptions const& given) : own_address{given.address} {
        options.rank = given.rank;
        options.size = given.size;
        options.connect_timeout = given.connect_timeout;
        options.deadline = given.deadline;
        if (auto const* const hub = std::get_if<GlooHub>(&given.store)) {
            options.job = hub->job;
            options.address = hub->address;
            options.port = hub->port;
            options.secret = hub->secret;
        } else {
            find_by_file(std::get<GlooFile>(given.store).path);
        }
    }
    GlooMeeting() = default;

    /// Collective; blocks. An earlier job may have left its file: rank 0 writes another one then, and
    /// `options` are those by which the ranks have met.
    [[nodiscard]] TcpEnd attach() {
        struct Removal { // also when some ranks did not come
            MeetingFile const* file;
            ~Removal() {
                if (file != nullptr) {
                    file->remove();
                }
            }
        } const removal{options.rank == 0 && file ? &*file : nullptr};
        auto const look = [this](TcpOptions const& tried) -> std::optional<TcpOptions> {
            TcpOptions found = tried;
            bool const is_elsewhere = file && file->has_read(found) &&
                                      (found.address != tried.address || found.port != tried.port ||
                                       found.secret != tried.secret);
            if (!is_elsewhere) {
                return std::nullopt;
            }
            options = found;
            return found;
        };
        return TcpEnd{options, std::move(listener), {hear, look, is_renumbered}};
    }
    /// The address of this rank's machine on the way to rank 0. Call it after attach().
    /// @throws CommunicationError
    [[nodiscard]] std::string address_here() const {
        return own_address.empty() ? own_address_towards(options.address) : own_address;
    }

private:
    void find_by_file(std::string const& path) {
        file.emplace(path);
        if (options.rank != 0) {
            file->read(options);
            return;
        }
        options.address = own_address.empty() ? host_name() : own_address;
        options.secret = new_secret();
        listener.emplace(options.address);
        options.port = listener->port();
        file->write(options);
    }
};

// -- small exchanges of the ranks ---------------------------------------------------------------

/// The same number of bytes from each rank. Collective; blocks.
[[nodiscard]] inline std::vector<char> share(TcpEnd& comm, std::vector<char> const& own) {
    std::vector<char> all(own.size() * static_cast<std::size_t>(comm.size()));
    auto const begin = static_cast<std::ptrdiff_t>(own.size()) * comm.rank();
    std::copy(own.begin(), own.end(), all.begin() + begin);
    comm.all_reduce({all.data(), all.size(), DType::u8}, ReduceOp::bit_or).wait();
    return all;
}
template <class T>
[[nodiscard]] std::vector<T> share_value(TcpEnd& comm, T const& own) {
    std::vector<char> bytes(sizeof(T));
    std::memcpy(bytes.data(), &own, sizeof(T));
    bytes = share(comm, bytes);
    std::vector<T> all(static_cast<std::size_t>(comm.size()));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
}

/// Where the ranks of one color meet. `number` is that of the split, `options` and `own_address` are
/// this rank's in `comm`. Collective; blocks.
[[nodiscard]] inline GlooMeeting meeting_of_group(
    TcpEnd& comm,
    TcpOptions const& options,
    std::string const& own_address,
    std::uint64_t number,
    int color,
    int key
) {
    auto const members = members_of(share_value(comm, GroupChoice{color, key}), color);
    auto const place = std::find(members.begin(), members.end(), comm.rank());
    GlooMeeting rendezvous;
    rendezvous.options = options;
    rendezvous.options.job = concat(options.job.substr(0, 900), "/", number, "/", color);
    rendezvous.options.rank = static_cast<int>(place - members.begin());
    rendezvous.options.size = static_cast<int>(members.size());
    rendezvous.own_address = own_address;
    rendezvous.is_renumbered = renumbers(members);
    struct Address {
        std::uint16_t port;
        char text[256];
    };
    Address own{};
    if (members.front() == comm.rank()) {
        rendezvous.listener.emplace(own_address);
        own.port = rendezvous.listener->port();
        std::memcpy(own.text, own_address.data(), (std::min)(own_address.size(), std::size_t{255}));
    }
    Address const found = share_value(comm, own)[as_index(members.front())];
    rendezvous.options.port = found.port;
    rendezvous.options.address = found.text;
    return rendezvous;
}

}}} // namespace joinable::v0::detail
