// SPDX-License-Identifier: BSL-1.0
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/guarded.hpp>
#include <support/fake_cuda/runtime.hpp>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace joinable_tests::fake_cuda {

namespace {

struct Guarded {
    std::size_t bytes;
    int device;
    std::uint64_t number; ///< no other memory has or had it
    std::size_t users;    ///< that have it open
};

/// Never destroyed: threads of streams may outlive main(). Its lock is taken where a thread touches device memory, so
/// nobody touches any who has it.
struct Guard {
    std::mutex mutex;
    std::map<std::byte*, Guarded> memory;
    std::uint64_t numbers = 0;
    struct sigaction previous{}; ///< doctest's, or a sanitizer's
    bool is_over = false;        ///< a fault was left to that one

    std::map<std::byte*, Guarded>::iterator containing(void const* address) {
        auto const* const byte = static_cast<std::byte const*>(address);
        auto found = memory.upper_bound(const_cast<std::byte*>(byte));
        if (found == memory.begin()) {
            return memory.end();
        }
        --found;
        return byte < found->first + found->second.bytes ? found : memory.end();
    }
};
Guard& all() {
    static auto* const one = new Guard;
    return *one;
}
thread_local DeviceCode* device_code = nullptr;

void protect(std::byte* data, std::size_t bytes, int protection) {
    if (mprotect(data, bytes, protection) != 0) {
        die("the system does not protect memory: it may have too many parts");
    }
}

/// Says what the host did, if that was with device memory.
void tell(void const* address, void const* context) {
    char const* did = "touched";
#ifdef REG_ERR // on x86, where its second bit is a write
    auto const* const state = static_cast<ucontext_t const*>(context);
    did = (state->uc_mcontext.gregs[REG_ERR] & 2) != 0 ? "wrote" : "read";
#else
    static_cast<void>(context);
#endif
    std::lock_guard const lock{all().mutex};
    auto const found = all().containing(address);
    if (found == all().memory.end()) {
        return;
    }
    std::array<char, 200> text;
    int const size = std::snprintf(
        text.data(),
        text.size(),
        "fake_cuda: the host %s device memory: byte %td of %zu at %p of device %d\n",
        did,
        static_cast<std::byte const*>(address) - found->first,
        found->second.bytes,
        static_cast<void const*>(found->first),
        found->second.device
    );
    static_cast<void>(!write(STDERR_FILENO, text.data(), static_cast<std::size_t>(size)));
}

void on_fault(int, siginfo_t* info, void* context) {
    int const error = errno;
    bool const is_touch = info->si_code > 0; // else somebody raised it
    if (!is_touch || device_code == nullptr || !device_code->open(info->si_addr)) {
        if (is_touch) {
            tell(info->si_addr, context);
        }
        std::lock_guard const lock{all().mutex};
        struct sigaction last{};
        last.sa_handler = SIG_DFL;
        sigaction(SIGSEGV, all().is_over ? &last : &all().previous, nullptr);
        all().is_over = true;
        if (!is_touch) {
            raise(SIGSEGV); // as a touch does, it comes again there
        }
    }
    errno = error;
}

/// doctest takes the handler at the begin of each test, and gives it back at the end.
void take_faults() {
    std::lock_guard const lock{all().mutex};
    struct sigaction now{};
    sigaction(SIGSEGV, nullptr, &now);
    if (all().is_over || ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &on_fault)) {
        return;
    }
    all().previous = now;
    struct sigaction ours{};
    ours.sa_sigaction = &on_fault;
    ours.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &ours, nullptr);
}

} // namespace

void guard(std::byte* data, std::size_t bytes, int device) {
    if (guards_memory) {
        take_faults();
        std::lock_guard const lock{all().mutex};
        all().memory[data] = {bytes, device, all().numbers++, 0};
        protect(data, bytes, PROT_NONE);
    }
}
void unguard(std::byte* data) {
    std::lock_guard const lock{all().mutex};
    if (auto const node = all().memory.extract(data)) {
        protect(data, node.mapped().bytes, PROT_READ | PROT_WRITE);
    }
}

DeviceCode::DeviceCode() : outer_{std::exchange(device_code, this)} {
    if (guards_memory) {
        take_faults();
    }
}
DeviceCode::~DeviceCode() {
    device_code = outer_;
    if (count_ == 0) {
        return;
    }
    std::lock_guard const lock{all().mutex};
    for (std::size_t i = 0; i < count_; ++i) {
        auto const found = all().memory.find(opened_[i].data);
        if (found != all().memory.end() && found->second.number == opened_[i].number &&
            --found->second.users == 0) {
            protect(found->first, found->second.bytes, PROT_NONE);
        }
    }
}
bool DeviceCode::open(void* address) {
    std::lock_guard const lock{all().mutex};
    auto const found = all().containing(address);
    if (found ==
        all().memory.end()) { // it may be open to all since the touch: then that succeeds now
        return std::exchange(not_found_, address) != address;
    }
    if (count_ == opened_.size()) {
        die("a kernel uses more allocations than the fake can open at once");
    }
    opened_[count_++] = {found->first, found->second.number};
    ++found->second.users;
    protect(found->first, found->second.bytes, PROT_READ | PROT_WRITE);
    return true;
}

HostCode::HostCode() noexcept : outer_{std::exchange(device_code, nullptr)} {}
HostCode::~HostCode() {
    device_code = outer_;
}

} // namespace joinable_tests::fake_cuda
