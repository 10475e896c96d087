// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/guarded.hpp>
#include <support/fake_cuda/runtime.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/// @file
/// Device memory that other processes open. From its first handle on, the pages of an allocation are those of a file
/// without a name, which the system frees with the last process that has them, however that ends.

namespace joinable_tests::fake_cuda {

namespace {

/// What is in the 64 bytes: the process, its file, and which file that was.
struct Words {
    std::uint64_t magic = 0x6661'6b65'6375'6461U;
    std::int64_t process = 0;
    std::int64_t file = -1;
    std::uint64_t inode = 0;
    std::uint64_t bytes = 0;
};
static_assert(sizeof(Words) <= sizeof(cudaIpcMemHandle_t));

std::uint64_t inode_of(int file) {
    struct stat status{};
    return fstat(file, &status) == 0 ? status.st_ino : 0;
}
std::size_t whole_pages(std::size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
}
/// Makes the pages those of a file, with what is in them. -1: the system refuses.
int share_pages(std::byte* data, std::size_t bytes) {
    int const file = memfd_create("fake_cuda", MFD_CLOEXEC);
    std::size_t const room = whole_pages(bytes);
    if (file < 0 || ftruncate(file, static_cast<off_t>(room)) != 0 ||
        pwrite(file, data, bytes, 0) != static_cast<ssize_t>(bytes) ||
        mmap(data, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        close(file);
        return -1;
    }
    return file;
}

} // namespace

void unshare(std::byte* data, Allocation const& allocation) {
    if (flock(allocation.file, LOCK_EX | LOCK_NB) !=
        0) { // an opener holds a lock, which ends with its process
        die("cudaFree of memory that another process has open is undefined behaviour");
    }
    close(allocation.file);
    if (mmap(
            data,
            whole_pages(allocation.bytes),
            PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
            -1,
            0
        ) == MAP_FAILED) {
        die("the system gives no memory");
    }
}

} // namespace joinable_tests::fake_cuda

using namespace joinable_tests::fake_cuda;

extern "C" {

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
    return call("cudaIpcGetMemHandle", [&]() -> cudaError_t {
        runtime().wait_until_idle(current_device); // pages are copied here
        std::lock_guard const lock{runtime().mutex};
        auto const found = runtime().allocations.find(static_cast<std::byte*>(data));
        if (found == runtime().allocations.end() || found->second.type != cudaMemoryTypeDevice ||
            found->second.is_of_a_pool) {
            return cudaErrorInvalidValue; // also what is not the base
        }
        Allocation& allocation = found->second;
        if (allocation.file < 0) {
            unguard(found->first);
            allocation.file = share_pages(found->first, allocation.bytes);
            guard(found->first, allocation.bytes, allocation.device);
        }
        if (allocation.file < 0) {
            return cudaErrorMapBufferObjectFailed;
        }
        Words words;
        words.process = getpid();
        words.file = allocation.file;
        words.inode = inode_of(allocation.file);
        words.bytes = allocation.bytes;
        *handle = {};
        std::memcpy(handle, &words, sizeof words);
        return cudaSuccess;
    });
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned int flags) {
    return call("cudaIpcOpenMemHandle", [&]() -> cudaError_t {
        Words words;
        std::uint64_t const magic = words.magic;
        std::memcpy(static_cast<void*>(&words), &handle, sizeof words);
        if (flags != cudaIpcMemLazyEnablePeerAccess || words.magic != magic) {
            return cudaErrorInvalidValue;
        }
        if (words.process == getpid()) {
            return cudaErrorDeviceUninitialized;
        }
        std::lock_guard const lock{runtime().mutex};
        auto const key = std::pair{words.inode, current_device};
        if (auto const found = runtime().opened.find(key); found != runtime().opened.end()) {
            ++found->second.times;
            *data = found->second.data;
            return cudaSuccess;
        }
        std::string const path =
            "/proc/" + std::to_string(words.process) + "/fd/" + std::to_string(words.file);
        int const file = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (file < 0 || inode_of(file) != words.inode || flock(file, LOCK_SH | LOCK_NB) != 0) {
            close(file);
            return cudaErrorInvalidResourceHandle;
        }
        void* const mapped =
            mmap(nullptr, whole_pages(words.bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) {
            close(file);
            return cudaErrorMapBufferObjectFailed;
        }
        runtime().opened[key] = {static_cast<std::byte*>(mapped), words.bytes, file, 1};
        guard(static_cast<std::byte*>(mapped), words.bytes, current_device);
        *data = mapped;
        return cudaSuccess;
    });
}
cudaError_t cudaIpcCloseMemHandle(void* data) {
    return call("cudaIpcCloseMemHandle", [&]() -> cudaError_t {
        std::lock_guard const lock{runtime().mutex};
        for (auto& [key, opened] : runtime().opened) {
            if (opened.data == data) {
                if (--opened.times == 0) {
                    unguard(opened.data);
                    munmap(opened.data, whole_pages(opened.bytes));
                    close(opened.file); // which unlocks it
                    runtime().opened.erase(key);
                }
                return cudaSuccess;
            }
        }
        return cudaErrorInvalidValue;
    });
}

} // extern "C"
