// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/file_limit.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
