// SPDX-License-Identifier: BSL-1.0
// What a guard adds to the timeline of a GPU, as CUPTI records it: nothing. See ../gpu.sh.

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <cupti.h>
#include <gpu/iteration.hpp>
#include <gpu/timeline.hpp>
#include <unistd.h>

namespace {

using namespace joinable_gpu;
using Hosts = joinable::ProcessCommunicator;

void cupti(CUptiResult result) {
    char const* text = "unknown error";
    if (result != CUPTI_SUCCESS) {
        cuptiGetResultString(result, &text);
    }
    expect(result == CUPTI_SUCCESS, std::string{"CUPTI: "} + text);
}

constexpr std::array<CUpti_ActivityKind, 3> kinds{
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET
};
/// Of this process; CUPTI calls functions, which have no other way to what they fill.
std::mutex recorded_mutex;
std::vector<Activity> recorded;

void CUPTIAPI request(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
    *size = std::size_t{1} << 20U;
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *size));
    *records = 0; // as many as fit
}
template <class Record>
void note(ActivityKind kind, CUpti_Activity const* record) {
    auto const& activity = *reinterpret_cast<Record const*>(record);
    recorded.push_back({kind, activity.start, activity.end});
}
void CUPTIAPI
complete(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
    std::lock_guard const lock{recorded_mutex};
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
            note<CUpti_ActivityKernel10>(ActivityKind::kernel, record);
            break;
        case CUPTI_ACTIVITY_KIND_MEMCPY:
            note<CUpti_ActivityMemcpy6>(ActivityKind::copy, record);
            break;
        case CUPTI_ACTIVITY_KIND_MEMSET:
            note<CUpti_ActivityMemset4>(ActivityKind::memset, record);
            break;
        default: break;
        }
    }
    std::free(buffer);
}
std::vector<Activity> take_recorded() {
    cuda(cudaDeviceSynchronize()); // what CUPTI has not seen the end of is not flushed
    cupti(cuptiActivityFlushAll(0));
    std::lock_guard const lock{recorded_mutex};
    return std::exchange(recorded, {});
}

void run(Hosts& hosts) {
    hosts.set_deadline(std::chrono::seconds{60});
    cupti(cuptiActivityRegisterCallbacks(request, complete));
    Rank<Hosts> rank{hosts, kernels()};
    CopyingPasses passes{rank.stream, 100 * 100};
    Replica<Hosts, CopyingPasses> replica{rank, passes, 5, 100, false};
    measure_guard(rank, replica, 11, [](auto const& f) {
        for (CUpti_ActivityKind const kind : kinds) { // not while the host is timed
            cupti(cuptiActivityEnable(kind));
        }
        static_cast<void>(take_recorded());
        f();
        auto activities = take_recorded();
        for (CUpti_ActivityKind const kind : kinds) {
            cupti(cuptiActivityDisable(kind));
        }
        return activities;
    });
}

} // namespace

int main(int argc, char** argv) {
    int const ranks = argc == 2 ? std::atoi(argv[1]) : 0;
    if (ranks < 1) {
        std::fprintf(stderr, "usage: %s <ranks>\n", argv[0]);
        return 2;
    }
    try {
        joinable::run_processes(ranks, [](Hosts& here) {
            alarm(100); // each rank is a process, which ends when it hangs
            run(here);
        });
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
