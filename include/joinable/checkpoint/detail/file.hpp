// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <joinable/communicator/file_limit.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Throws CommunicationError with the system's reason.
[[noreturn]] inline void fail_at(std::string_view verb, std::string const& path) {
    int const code = errno;
    throw CommunicationError{
        concat("checkpoint: cannot ", verb, " ", path, ": ", std::generic_category().message(code))
    };
}

/// An open file. Members throw CommunicationError if the system fails.
class File {
public:
    enum class Access { read, write, create, folder };

    /// `create` makes a new file for writing; it must not exist.
    File(std::string path, Access access) : path_{std::move(path)} {
        constexpr int flags[] = {
            O_RDONLY, O_WRONLY, O_WRONLY | O_CREAT | O_EXCL, O_RDONLY | O_DIRECTORY
        };
        constexpr unsigned mode = 0666; // less the umask
        do {
            handle_ = ::open(path_.c_str(), flags[static_cast<int>(access)] | O_CLOEXEC, mode);
        } while (handle_ < 0 && errno == EINTR);
        if (handle_ < 0) {
            fail_at(access == Access::create ? "create" : "open", path_);
        }
    }
    File(File const&) = delete;
    File& operator=(File const&) = delete;
    ~File() { ::close(handle_); } // what must last was synced

    [[nodiscard]] std::uint64_t bytes() const {
        ::off_t const end = ::lseek(handle_, 0, SEEK_END);
        if (end < 0) {
            fail_at("find the size of", path_);
        }
        return static_cast<std::uint64_t>(end);
    }

    void write(void const* from, std::size_t bytes, std::uint64_t at) const {
        if (bytes != 0 && exceeds_file_limit(at + bytes)) {
            errno = EFBIG;
            fail_at("write", path_);
        }
        transfer("write", ::pwrite, static_cast<std::byte const*>(from), bytes, at);
    }
    void read(void* to, std::size_t bytes, std::uint64_t at) const {
        transfer("read", ::pread, static_cast<std::byte*>(to), bytes, at);
    }

    /// Returns when everything that this rank wrote would survive a power loss.
    void sync() const { sync_by(::fsync); }
    /// The same for what was written, without the file's times.
    void sync_data() const { sync_by(::fdatasync); }
    /// The same for the names in a folder. Some file systems cannot sync a folder, and say EINVAL.
    void sync_names() const { sync_by(::fsync, EINVAL); }

private:
    /// Ignores the error `accepted`.
    void sync_by(int (*call)(int), int accepted = 0) const {
        int result = call(handle_);
        while (result != 0 && errno == EINTR) {
            result = call(handle_);
        }
        if (result != 0 && errno != accepted) {
            fail_at("sync", path_);
        }
    }

    /// The system may transfer less than requested.
    template <class Call, class Byte>
    void transfer(
        std::string_view verb, Call* call, Byte* next, std::size_t bytes, std::uint64_t at
    ) const {
        while (bytes != 0) {
            ::ssize_t const done = call(handle_, next, bytes, static_cast<::off_t>(at));
            if (done < 0 && errno == EINTR) {
                continue;
            }
            if (done < 0) {
                fail_at(verb, path_);
            }
            if (done == 0) {
                throw CommunicationError{
                    concat("checkpoint: cannot ", verb, " ", path_, ": it ends at byte ", at)
                };
            }
            next += done;
            bytes -= static_cast<std::size_t>(done);
            at += static_cast<std::uint64_t>(done);
        }
    }

    std::string path_;
    int handle_ = -1;
};

/// A file that replaces another one when it is complete. The destructor removes a file that has not
/// replaced the other one.
class TemporaryFile {
public:
    /// Creates `path`. Removes a leftover of a killed training.
    explicit TemporaryFile(std::string path)
        : path_{without_leftover(std::move(path))}, file_{path_, File::Access::create} {}
    TemporaryFile(TemporaryFile const&) = delete;
    TemporaryFile& operator=(TemporaryFile const&) = delete;
    ~TemporaryFile() {
        if (!is_renamed_) {
            ::unlink(path_.c_str());
        }
    }

    [[nodiscard]] File const& file() const noexcept { return file_; }

    /// Renames the file to `target`, so that it also survives a power loss. If the folder cannot be
    /// synced, this throws although the file has its new name.
    void replace(std::string const& target, std::string const& folder) {
        File const place{folder, File::Access::folder}; // may fail, while the old file is there
        if (std::rename(path_.c_str(), target.c_str()) != 0) {
            fail_at("rename to", target);
        }
        is_renamed_ = true;
        place.sync_names();
    }

private:
    static std::string without_leftover(std::string path) {
        ::unlink(path.c_str()); // errors of the path show when it is created
        return path;
    }

    std::string path_;
    File file_;
    bool is_renamed_ = false;
};

}}} // namespace joinable::v0::detail
