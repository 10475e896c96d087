// SPDX-License-Identifier: BSL-1.0
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <support/fake_nccl/memory.hpp>

namespace fake = joinable_tests::fake_nccl;

/// The header declares it in the global namespace and leaves it to us.
struct ncclWindow_vidmem {
    void const* world;
    int rank;
    std::size_t number; ///< of the window in its world, the same on all ranks
    std::byte* data;
    std::size_t bytes;
};

namespace {

struct Said {
    std::byte* data;
    std::size_t bytes;
    bool is_something;
};
struct World {
    std::map<int, std::size_t> calls; ///< by rank: windows that it asked for
    std::map<std::size_t, std::map<int, Said>> said;
};

// Never destroyed: threads of streams may outlive main().
struct State {
    std::mutex mutex;
    std::map<std::byte*, std::size_t> memory; ///< and its bytes
    std::set<ncclWindow_t> windows;
    std::map<void const*, World> worlds;
    std::size_t registered = 0;
};
State& state() {
    static auto* const all = new State;
    return *all;
}
thread_local bool has_windows = true;

/// @pre the mutex is locked
ncclWindow_t window_of(void const* world, int rank, void const* address) {
    auto const* const byte = static_cast<std::byte const*>(address);
    for (ncclWindow_t const window : state().windows) {
        if (window->world == world && window->rank == rank && window->data <= byte &&
            byte < window->data + window->bytes) {
            return window;
        }
    }
    return nullptr;
}

/// Where an address is: the number of a window and an offset, or none.
std::pair<std::size_t, std::ptrdiff_t> place_of(void const* world, int rank, void const* address) {
    constexpr auto none = static_cast<std::size_t>(-1);
    ncclWindow_t const window = window_of(world, rank, address);
    return window == nullptr
               ? std::pair{none, std::ptrdiff_t{0}}
               : std::pair{window->number, static_cast<std::byte const*>(address) - window->data};
}

} // namespace

std::size_t fake::live_memory() {
    std::lock_guard const lock{state().mutex};
    return state().memory.size();
}
std::size_t fake::live_registrations() {
    std::lock_guard const lock{state().mutex};
    return state().windows.size();
}
void fake::set_windows(bool has) {
    has_windows = has;
}
std::size_t fake::registered_collectives() {
    std::lock_guard const lock{state().mutex};
    return state().registered;
}

void fake::check_places(void const* world, std::vector<Place> const& places) {
    std::lock_guard const lock{state().mutex};
    auto const first = place_of(world, places[0].rank, places[0].in);
    state().registered += first.first != static_cast<std::size_t>(-1) ? 1 : 0;
    for (Place const& place : places) {
        if (place_of(world, place.rank, place.in) != first ||
            place_of(world, place.rank, place.out) !=
                place_of(world, places[0].rank, places[0].out)) {
            die("ranks give a collective different offsets in their windows, or not all a window");
        }
    }
}
void fake::end_member(void const* world, int rank, bool is_aborted) {
    std::lock_guard const lock{state().mutex};
    for (auto it = state().windows.begin(); it != state().windows.end();) {
        if ((*it)->world == world && (*it)->rank == rank) {
            if (!is_aborted) {
                die("a communicator is destroyed that has windows");
            }
            delete *it;
            it = state().windows.erase(it);
        } else {
            ++it;
        }
    }
    state().worlds[world].calls.erase(rank);
    if (state().worlds[world].calls.empty()) {
        state().worlds.erase(world);
    }
}

extern "C" {

ncclResult_t ncclMemAlloc(void** data, std::size_t bytes) {
    if (auto const result = fake::begin_call("ncclMemAlloc"); result != ncclSuccess) {
        return result;
    }
    if (cudaMalloc(data, bytes) != cudaSuccess) {
        return ncclUnhandledCudaError;
    }
    std::lock_guard const lock{state().mutex};
    state().memory[static_cast<std::byte*>(*data)] = bytes;
    return ncclSuccess;
}
ncclResult_t ncclMemFree(void* data) {
    if (auto const result = fake::begin_call("ncclMemFree"); result != ncclSuccess) {
        return result;
    }
    {
        std::lock_guard const lock{state().mutex};
        auto const found = state().memory.find(static_cast<std::byte*>(data));
        if (found == state().memory.end()) {
            fake::die("ncclMemFree was given what ncclMemAlloc did not give, or was freed");
        }
        for (ncclWindow_t const window : state().windows) {
            if (found->first <= window->data && window->data < found->first + found->second) {
                fake::die("ncclMemFree was given memory that is registered");
            }
        }
        state().memory.erase(found);
    }
    return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(
    ncclComm_t comm, void* data, std::size_t bytes, ncclWindow_t* made, int flags
) {
    if (auto const result = fake::begin_call("ncclCommWindowRegister"); result != ncclSuccess) {
        return result;
    }
    if (flags != NCCL_WIN_COLL_SYMMETRIC ||
        reinterpret_cast<std::size_t>(data) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
        return ncclInvalidArgument;
    }
    auto number = std::make_shared<std::size_t>();
    Said const mine{static_cast<std::byte*>(data), bytes, has_windows};
    auto const is_said = std::make_shared<bool>(false);
    return fake::start_call(comm, "ncclCommWindowRegister", [=](fake::Caller const& caller) {
        std::lock_guard const lock{state().mutex};
        World& world = state().worlds[caller.world];
        if (!std::exchange(*is_said, true)) {
            *number = world.calls[caller.rank]++;
            world.said[*number][caller.rank] = mine;
        }
        auto const& said = world.said[*number];
        for (auto const& [rank, other] : said) {
            if (other.bytes != mine.bytes) {
                fake::die("ranks register windows of different sizes");
            }
        }
        if (static_cast<int>(said.size()) != caller.size) {
            return false;
        }
        *made = nullptr;
        if (mine.is_something) {
            *made =
                new ncclWindow_vidmem{caller.world, caller.rank, *number, mine.data, mine.bytes};
            state().windows.insert(*made);
        }
        return true;
    });
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    if (auto const result = fake::begin_call("ncclCommWindowDeregister"); result != ncclSuccess) {
        return result;
    }
    fake::Caller const caller = fake::caller(comm, "ncclCommWindowDeregister");
    if (caller.is_busy) {
        fake::die("a window is deregistered while collectives are under way");
    }
    std::lock_guard const lock{state().mutex};
    if (state().windows.erase(window) == 0 || window->world != caller.world ||
        window->rank != caller.rank) {
        fake::die("ncclCommWindowDeregister was given a window that is none of the communicator's");
    }
    delete window;
    return ncclSuccess;
}

} // extern "C"
