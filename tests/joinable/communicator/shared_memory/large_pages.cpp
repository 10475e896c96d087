// SPDX-License-Identifier: BSL-1.0
// Process ranks on a system whose pages have 64 KiB. This program plays one: its mmap(), madvise() and
// sysconf() follow their manual pages for such pages. An address or an offset in a file that is no
// multiple of them is an error, and a length is rounded up to one.
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>

namespace {

constexpr std::size_t large = 65'536;

void* map_now(void* at, std::size_t bytes, int access, int flags, int file, off_t from) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): so the system tells addresses
    return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, access, flags, file, from));
}
std::byte* next_page(void* at) {
    auto const address = reinterpret_cast<std::uintptr_t>(at);
    return static_cast<std::byte*>(at) + (large - address % large) % large;
}

/// The blocks of a room that lie beside a cleared one must keep their bytes.
bool clears_only_what_it_is_given() {
    joinable::detail::ProcessSegment segment{1};
    std::byte* const at = next_page(segment.staging(0).data());
    bool is_right = true;
    for (std::size_t const cleared : {std::size_t{8192}, large, large + 8192}) {
        std::memset(at, 0x5a, 2 * large);
        segment.clear(at, cleared);
        for (std::size_t i = 0; i < 2 * large; ++i) {
            is_right =
                is_right && at[i] == std::byte{i < cleared ? std::uint8_t{0} : std::uint8_t{0x5a}};
        }
    }
    return is_right;
}

bool attaches() {
    try {
        std::string const job = "large pages " + std::to_string(getpid());
        auto comm = joinable::ProcessCommunicator::attach({0, 1, job, std::chrono::seconds{20}});
        comm.barrier();
        return true;
    } catch (std::exception const& error) {
        std::puts(error.what());
        return false;
    }
}

} // namespace

extern "C" void*
mmap(void* at, std::size_t bytes, int access, int flags, int file, off_t from) noexcept {
    if ((flags & MAP_ANONYMOUS) == 0 && static_cast<std::size_t>(from) % large != 0) {
        errno = EINVAL;
        return MAP_FAILED;
    }
    if (at != nullptr) {
        return map_now(at, bytes, access, flags, file, from);
    }
    constexpr int nothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const place = map_now(nullptr, bytes + large, PROT_NONE, nothing, -1, 0);
    return place == MAP_FAILED
               ? place
               : map_now(next_page(place), bytes, access, flags | MAP_FIXED, file, from);
}
extern "C" int madvise(void* at, std::size_t bytes, int advice) noexcept {
    if (next_page(at) != at) {
        errno = EINVAL;
        return -1;
    }
    bytes = (bytes + large - 1) / large * large;
    return static_cast<int>(syscall(SYS_madvise, at, bytes, advice));
}
extern "C" long sysconf(int name) noexcept {
    using Function = long (*)(int);
    static auto const real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "sysconf"));
    return name == _SC_PAGESIZE ? static_cast<long>(large) : real(name);
}

int main() {
    bool const clears = clears_only_what_it_is_given();
    bool const comes = attaches();
    std::printf("clear: %s, attach: %s\n", clears ? "right" : "wrong", comes ? "right" : "wrong");
    return clears && comes ? 0 : 1;
}
