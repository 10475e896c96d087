// SPDX-License-Identifier: BSL-1.0
// What a guard adds to the work of a GPU, counted by CUPTI: nothing. See ../gpu.sh.

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include <cupti.h>
#include <gpu/iteration.hpp>

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

/// Kernels, copies and memsets.
using Counts = std::array<std::size_t, 3>;
constexpr std::array<CUpti_ActivityKind, 3> kinds{
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET
};
/// Of this process; CUPTI calls functions, which have no other way to what they fill.
std::array<std::atomic<std::size_t>, 3> counted;

void CUPTIAPI request(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
    *size = std::size_t{1} << 20U;
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *size));
    *records = 0; // as many as fit
}
void CUPTIAPI
complete(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            counted[i] += record->kind == kinds[i] ? 1 : 0;
        }
    }
    std::free(buffer);
}

/// What f() leaves on the GPU.
template <class F>
Counts count(Rank<Hosts>& rank, F const& f) {
    rank.comm.synchronize();
    cupti(cuptiActivityFlushAll(0));
    for (auto& number : counted) {
        number = 0;
    }
    f();
    rank.comm.synchronize();
    cuda(cudaDeviceSynchronize()); // what CUPTI has not seen the end of is not flushed
    cupti(cuptiActivityFlushAll(0));
    return {counted[0], counted[1], counted[2]};
}

void run(Hosts& hosts) {
    hosts.set_deadline(std::chrono::seconds{60});
    cupti(cuptiActivityRegisterCallbacks(request, complete));
    for (CUpti_ActivityKind const kind : kinds) {
        cupti(cuptiActivityEnable(kind));
    }
    Rank<Hosts> rank{hosts, kernels()};
    CopyingPasses passes{rank.stream, 100 * 100};
    Replica<Hosts, CopyingPasses> replica{rank, passes, 5, 100, false};
    replica.iterate(); // cuts the buckets
    auto const iterate = [&] {
        for (int i = 0; i < 10; ++i) {
            replica.iterate();
        }
    };
    Counts const without = count(rank, iterate);
    joinable::Join guard{joinable::participants(replica.ddp()), joinable::control(hosts)};
    replica.iterate();
    Counts const with = count(rank, iterate);
    (void)guard.finish();
    if (hosts.rank() == 0) {
        for (auto const& [what, counts] : {std::pair{"outside", without}, {"inside", with}}) {
            std::printf(
                "%d ranks: 10 iterations %s a guard: %zu kernels, %zu copies, %zu memsets\n",
                hosts.size(),
                what,
                counts[0],
                counts[1],
                counts[2]
            );
        }
    }
    expect(without[0] > 0 && without[1] > 0, "CUPTI saw no kernel or no copy of an iteration");
    expect(with == without, "a guard adds to the work of the GPU");
}

} // namespace

int main(int argc, char** argv) {
    int const ranks = argc == 2 ? std::atoi(argv[1]) : 0;
    if (ranks < 1) {
        std::fprintf(stderr, "usage: %s <ranks>\n", argv[0]);
        return 2;
    }
    try {
        joinable::run_processes(ranks, run);
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
