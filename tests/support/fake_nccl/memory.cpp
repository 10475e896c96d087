// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/memory.hpp>
#include <support/fake_nccl/windows.hpp>
#include <support/fake_nccl/world.hpp>

/// The header declares it in the global namespace and leaves it to us.
struct ncclWindow_vidmem {
    joinable_tests::fake_nccl::World const* world;
    int rank;
    std::size_t number; ///< of the window in its world, the same on all ranks
    std::byte* data;
    std::size_t bytes;
};

namespace joinable_tests::fake_nccl {

namespace {

// Never destroyed: threads of streams may outlive main(). mutex() guards it.
struct Memory {
    std::map<std::byte*, std::size_t> blocks; ///< and their bytes
    std::set<ncclWindow_t> windows;
    std::size_t collectives = 0; ///< whose buffers were in windows
};
Memory& memory() {
    static auto* const all = new Memory;
    return *all;
}
thread_local Windows windows = Windows::symmetric;

/// The window of a rank that an address is in, or none.
ncclWindow_t window_of(Member const& member, void const* address) {
    auto const* const byte = static_cast<std::byte const*>(address);
    for (ncclWindow_t const window : memory().windows) {
        if (window->world == member.world.get() && window->rank == member.rank &&
            window->data <= byte && byte < window->data + window->bytes) {
            return window;
        }
    }
    return nullptr;
}

/// Whether ncclMemAlloc gave the memory that an address is in.
bool is_allocated(std::byte* address) {
    auto const after = memory().blocks.upper_bound(address);
    return after != memory().blocks.begin() &&
           address < std::prev(after)->first + std::prev(after)->second;
}

/// Where an address is: the number of a window and an offset, or none.
using Place = std::pair<std::size_t, std::ptrdiff_t>;
constexpr std::size_t no_window = static_cast<std::size_t>(-1); ///< or a local one
constexpr Place no_place{no_window, 0};
Place place_of(Member const& member, void const* address) {
    ncclWindow_t const window = window_of(member, address);
    return window == nullptr || window->number == no_window
               ? no_place
               : Place{window->number, static_cast<std::byte const*>(address) - window->data};
}

/// Whether a graph that is alive has operations of the rank in a window.
bool is_in_graph(Member const& member, ncclWindow_t window) {
    for (auto const& node : member.nodes) {
        auto const ops = node.lock();
        if (ops && std::any_of(ops->begin(), ops->end(), [&](Op const& op) {
                return window_of(member, op.in) == window || window_of(member, op.out) == window;
            })) {
            return true;
        }
    }
    return false;
}

} // namespace

std::size_t live_memory() {
    std::lock_guard const lock{mutex()};
    return memory().blocks.size();
}
std::size_t live_registrations() {
    std::lock_guard const lock{mutex()};
    return memory().windows.size();
}
void set_windows(Windows made) {
    windows = made;
}
std::size_t registered_collectives() {
    std::lock_guard const lock{mutex()};
    return memory().collectives;
}

void check_memory(void const* data, std::size_t bytes, char const* function) {
    if (bytes != 0 && !fake_cuda::is_device_memory(data, bytes)) {
        die(std::string{function} + " was given memory that is not the device's");
    }
}
void check_places(std::vector<Op> const& ops) {
    Place const in = place_of(*ops[0].member, ops[0].in);
    Place const out = place_of(*ops[0].member, ops[0].out);
    memory().collectives += in != no_place ? 1U : 0U;
    for (Op const& op : ops) {
        if (place_of(*op.member, op.in) != in || place_of(*op.member, op.out) != out) {
            die("ranks give a collective different offsets in their windows, or not all a window");
        }
    }
}
void end_windows(Member const& member) {
    std::erase_if(memory().windows, [&](ncclWindow_t const window) {
        if (window->world != member.world.get() || window->rank != member.rank) {
            return false;
        }
        if (!member.is_ended) {
            die("a communicator is destroyed that has windows");
        }
        delete window;
        return true;
    });
}

} // namespace joinable_tests::fake_nccl

using namespace joinable_tests::fake_nccl;

extern "C" {

ncclResult_t ncclMemAlloc(void** data, std::size_t bytes) {
    return call("ncclMemAlloc", [&] {
        if (cudaMalloc(data, bytes) != cudaSuccess) {
            return ncclUnhandledCudaError;
        }
        std::lock_guard const lock{mutex()};
        memory().blocks[static_cast<std::byte*>(*data)] = bytes;
        return ncclSuccess;
    });
}
ncclResult_t ncclMemFree(void* data) {
    return call("ncclMemFree", [&] {
        {
            std::lock_guard const lock{mutex()};
            auto const found = memory().blocks.find(static_cast<std::byte*>(data));
            if (found == memory().blocks.end()) {
                die("ncclMemFree was given what ncclMemAlloc did not give, or was freed");
            }
            for (ncclWindow_t const window : memory().windows) {
                if (found->first <= window->data && window->data < found->first + found->second) {
                    die("ncclMemFree was given memory that is registered");
                }
            }
            memory().blocks.erase(found);
        }
        return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
    });
}

ncclResult_t ncclCommWindowRegister(
    ncclComm_t comm, void* data, std::size_t bytes, ncclWindow_t* made, int flags
) {
    require_no_group("ncclCommWindowRegister");
    if (flags != NCCL_WIN_COLL_SYMMETRIC) {
        die("a window that is not symmetric, which the fake does not have");
    }
    return call("ncclCommWindowRegister", [&]() -> ncclResult_t {
        std::unique_lock lock{mutex()};
        Member& member = member_of(comm, "ncclCommWindowRegister");
        if (data == nullptr || bytes == 0 || windows == Windows::none) {
            return ncclSuccess; // and nothing is written
        }
        if (auto const result = ready(member); result != ncclSuccess) {
            return result;
        }
        if (windows == Windows::local) { // and no rank is asked
            return start(lock, member, "ncclCommWindowRegister", [=, &member] {
                auto* const first = static_cast<std::byte*>(data);
                *made =
                    new ncclWindow_vidmem{member.world.get(), member.rank, no_window, first, bytes};
                memory().windows.insert(*made);
                return ncclSuccess;
            });
        }
        std::size_t const number = member.windows++;
        auto& said = member.world->windows[number];
        said[member.rank] = bytes;
        for (auto const& [rank, other] : said) {
            if (other != bytes) {
                die("ranks register windows of different sizes");
            }
        }
        member.last_write = [made] { *made = nullptr; };
        changed().notify_all(); // this rank has come
        return start(lock, member, "ncclCommWindowRegister", [=, &member] {
            auto* const first = static_cast<std::byte*>(data);
            *made = nullptr;
            if (reinterpret_cast<std::size_t>(data) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
                member.text = "Window address must be suitably aligned.";
                return ncclInvalidArgument;
            }
            if (!is_allocated(first)) {
                member.text = "Cuda failure 'invalid argument'";
                return ncclUnhandledCudaError;
            }
            World const& world = *member.world;
            if (static_cast<int>(world.windows.at(number).size()) != world.size) {
                return ncclInProgress;
            }
            member.last_write = nullptr;
            *made = new ncclWindow_vidmem{&world, member.rank, number, first, bytes};
            memory().windows.insert(*made);
            return ncclSuccess;
        });
    });
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    return call(comm, "ncclCommWindowDeregister", [&](auto&, Member const& member) {
        if (window == nullptr) {
            return ncclSuccess;
        }
        if (member.pending) {
            die("ncclCommWindowDeregister while a call is in progress");
        }
        if (member.running != 0) {
            die("a window is deregistered while collectives are under way");
        }
        if (is_in_graph(member, window)) {
            die("a window is deregistered that kernels in a CUDA graph use");
        }
        if (memory().windows.erase(window) == 0 || window->world != member.world.get() ||
            window->rank != member.rank) {
            die("ncclCommWindowDeregister was given a window that is none of the communicator's");
        }
        delete window;
        return ncclSuccess;
    });
}

} // extern "C"
