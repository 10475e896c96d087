// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/file_limit.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// Where the system keeps POSIX shared memory.
inline constexpr char const* shared_memory_folder = "/dev/shm";

inline void sleep_for(std::chrono::nanoseconds time) noexcept {
    std::timespec left{};
    left.tv_nsec = static_cast<decltype(left.tv_nsec)>(time.count());
    nanosleep(&left, nullptr);
}

/// A POSIX shared-memory object, open in this process. It gets its name when it is complete. A
/// process removes the name only after it has checked that it is this object's. No process
/// therefore finds an incomplete object or removes another one.
class SharedObject {
public:
    /// Creates an object without name and bytes. It ends with the last process that has it open.
    /// @throws CommunicationError  the system refuses.
    static SharedObject create() {
        SharedObject object{
            ::open(shared_memory_folder, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR)
        };
        if (object.file_.number() < 0 || fchmod(object.file_.number(), S_IRUSR | S_IWUSR) != 0) {
            throw CommunicationError{concat(
                "expected to make a shared-memory object in ",
                shared_memory_folder,
                ", but the system says: ",
                std::strerror(errno),
                "; mount a tmpfs there that user ",
                geteuid(),
                " may write"
            )};
        }
        return object;
    }
    /// Nothing if no object has this name.
    /// @throws CommunicationError  there is one, but this process may not open it.
    static std::optional<SharedObject> find(std::string const& path) {
        SharedObject object{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
        if (object.file_.number() >= 0) {
            return object;
        }
        if (int const error = errno; error != ENOENT) {
            struct stat of{};
            bool const is_known = lstat(path.c_str(), &of) == 0;
            throw CommunicationError{concat(
                "expected to open ",
                path,
                ", which belongs to user ",
                is_known ? concat(of.st_uid) : "unknown",
                ", as user ",
                geteuid(),
                ", but the system says: ",
                std::strerror(error),
                "; remove it, or give the job another id"
            )};
        }
        return std::nullopt;
    }

    [[nodiscard]] struct stat status() const noexcept {
        struct stat now{};
        fstat(file_.number(), &now);
        return now;
    }
    /// Reads the first bytes without mapping them, because the object may be shorter. Returns
    /// whether they exist.
    [[nodiscard]] bool read(std::span<std::byte> bytes) const noexcept {
        return pread(file_.number(), bytes.data(), bytes.size(), 0) ==
               static_cast<ssize_t>(bytes.size());
    }
    /// Whether this process may give the object this size, and map it.
    [[nodiscard]] bool can_have(std::size_t bytes) const noexcept {
        return !exceeds_file_limit(bytes) && map(bytes).data() != nullptr;
    }
    /// @throws CommunicationError  the system refuses.
    void resize(std::size_t bytes) const {
        if (int const error = resize_file(file_.number(), bytes); error != 0) {
            throw CommunicationError{concat(
                "a shared-memory object could not have ",
                bytes,
                " bytes: ",
                std::strerror(error),
                error == EFBIG ? "; raise the limit of file sizes (ulimit -f)" : ""
            )};
        }
    }
    /// Locks the object until this view of it is closed: by the destructor, or by the system when
    /// the process ends, in whatever way. Another lock than that of remove_name(). Returns false if
    /// the system has no such locks.
    /// @pre no other process has locked it
    [[nodiscard]] bool lock() const noexcept {
        struct flock all = lock_of_all();
        return fcntl(file_.number(), F_OFD_SETLK, &all) == 0;
    }
    /// Whether another view of this object has locked it.
    [[nodiscard]] bool is_locked() const noexcept {
        struct flock all = lock_of_all();
        return fcntl(file_.number(), F_OFD_GETLK, &all) != 0 || all.l_type != F_UNLCK;
    }
    /// Maps the object, starting at byte `from`, the first of a page. Null if there is no address
    /// space.
    [[nodiscard]] Arena map(std::size_t bytes, std::size_t from = 0) const noexcept {
        return map_shared(bytes, file_.number(), MAP_NORESERVE, from);
    }

    /// Gives it a name. Returns false if another object has that name.
    /// @throws CommunicationError  the system refuses.
    [[nodiscard]] bool publish(std::string const& path) const {
        std::string const self = concat("/proc/self/fd/", file_.number());
        if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
            return true;
        }
        if (errno != EEXIST) {
            throw CommunicationError{
                concat("the name ", path, " could not be made: ", std::strerror(errno))
            };
        }
        return false;
    }

    /// Does nothing if the name is another object's, or free. Processes that remove the name of the
    /// same object do so one after another, so that no new object can get the name in between. A
    /// process that was stopped in here is waited for until `end`, and for 100 ms at least: it
    /// removes the name when it continues.
    void remove_name(std::string const& path, std::chrono::steady_clock::time_point end = {})
        const noexcept {
        end = (std::max)(end, std::chrono::steady_clock::now() + std::chrono::milliseconds{100});
        while (has_name(path)) {
            if (flock(file_.number(), LOCK_EX | LOCK_NB) == 0) {
                if (has_name(path)) {
                    unlink(path.c_str());
                }
                flock(file_.number(), LOCK_UN);
                return;
            }
            if (std::chrono::steady_clock::now() >= end) {
                return;
            }
            sleep_for(std::chrono::milliseconds{1});
        }
    }

    /// Allocates the memory now. If the system had none, a later write would raise SIGBUS. Returns
    /// whether this was complete by `end`. Complexity: linear in the bytes that the system has to
    /// clear.
    /// @throws CommunicationError  memory is full. Part of [at, at + bytes) may be reserved.
    bool reserve(
        std::size_t at,
        std::size_t bytes,
        std::chrono::steady_clock::time_point end = (std::chrono::steady_clock::time_point::max)()
    ) const {
        // In steps, which get smaller if a fast interval timer interrupts them, because the system
        // restarts an interrupted one.
        constexpr std::size_t smallest_step = 4096;
        std::size_t step = std::size_t{16} << 20U;
        for (std::size_t done = 0; done < bytes;) {
            if (std::chrono::steady_clock::now() >= end) {
                return false;
            }
            std::size_t const next = (std::min)(step, bytes - done);
            int const error = posix_fallocate(
                file_.number(), static_cast<off_t>(at + done), static_cast<off_t>(next)
            );
            if (error == 0) {
                done += next;
            } else if (error == EINTR) {
                step = (std::max)(step / 2, smallest_step);
            } else {
                throw CommunicationError{full(bytes - done, error)};
            }
        }
        return true;
    }

    /// The objects of this user that have this name, with or without a number: see
    /// publish_first_free.
    [[nodiscard]] static std::vector<std::string> own_of(std::string const& path) {
        std::vector<std::string> found;
        std::unique_ptr<DIR, int (*)(DIR*)> const folder{opendir(shared_memory_folder), closedir};
        std::string_view const name =
            std::string_view{path}.substr(std::string_view{shared_memory_folder}.size() + 1);
        for (dirent const* entry = nullptr;
             folder != nullptr && (entry = readdir(folder.get())) != nullptr;) {
            std::string_view const other{entry->d_name};
            std::string const of_entry = concat(shared_memory_folder, "/", other);
            bool const is_named =
                other.starts_with(name) &&
                (other.size() == name.size() || other.substr(name.size()).starts_with("."));
            struct stat status{};
            if (is_named && lstat(of_entry.c_str(), &status) == 0 && status.st_uid == geteuid()) {
                found.push_back(of_entry);
            }
        }
        std::sort(found.begin(), found.end());
        return found;
    }
    /// Gives the object this name, followed by the first number that avoids other users' objects,
    /// if needed. No other user can thus block a job's name. Returns the name, or nothing if
    /// another object of this user has it.
    [[nodiscard]] std::optional<std::string> publish_first_free(std::string const& path) const {
        for (int number = 1;; ++number) {
            std::string const named = number == 1 ? path : concat(path, ".", number);
            if (publish(named)) {
                return named;
            }
            struct stat status{};
            if (lstat(named.c_str(), &status) != 0 || status.st_uid == geteuid()) {
                return std::nullopt;
            }
        }
    }

    /// How much memory the system has for objects, for people.
    [[nodiscard]] static std::string bytes_free() {
        struct statvfs room{};
        statvfs(shared_memory_folder, &room);
        return concat(
            static_cast<std::size_t>(room.f_bavail) * room.f_frsize,
            " of its ",
            static_cast<std::size_t>(room.f_blocks) * room.f_frsize,
            " bytes free"
        );
    }

private:
    [[nodiscard]] bool has_name(std::string const& path) const noexcept {
        struct stat named{};
        struct stat const own = status();
        return lstat(path.c_str(), &named) == 0 && named.st_ino == own.st_ino &&
               named.st_dev == own.st_dev;
    }
    static struct flock lock_of_all() noexcept {
        struct flock all{};
        all.l_type = F_WRLCK;
        all.l_whence = SEEK_SET;
        return all;
    }
    explicit SharedObject(int file) noexcept : file_{file} {}

    static std::string full(std::size_t bytes, int error) {
        return concat(
            "expected ",
            bytes,
            " more bytes of shared memory, but ",
            shared_memory_folder,
            error == ENOSPC ? " is full" : concat(" refuses: ", std::strerror(error)),
            ", with ",
            bytes_free(),
            "; make it larger, or have less in flight"
        );
    }

    FileHandle file_;
};

/// Memory mapped from an object. The destructor unmaps it.
class Mapping {
public:
    /// @throws CommunicationError  there is no address space.
    Mapping(SharedObject const& object, std::size_t bytes, std::size_t from = 0)
        : memory_{object.map(bytes, from)} {
        if (begin() == nullptr) {
            throw CommunicationError{concat(
                "expected to map ",
                bytes,
                " bytes of shared memory, but the system says: ",
                std::strerror(errno),
                "; allow more address space"
            )};
        }
        madvise(begin(), bytes, MADV_DONTDUMP); // a dump would allocate all of it
    }
    [[nodiscard]] std::byte* begin() const noexcept { return memory_.data(); }

private:
    Arena memory_;
};

}}} // namespace joinable::v0::detail
