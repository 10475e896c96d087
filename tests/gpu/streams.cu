// SPDX-License-Identifier: BSL-1.0
// The order of streams, and how buckets overlap with a backward pass. Ranks are threads, which share a
// GPU.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include <gpu/overlap.hpp>
#include <gpu/streams.hpp>
#include <unistd.h>

#include <joinable/cuda_kernels.hpp>

namespace {

using namespace joinable_gpu;

__device__ unsigned long long now() {
    unsigned long long nanoseconds = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}
__global__ void wait_for(unsigned long long nanoseconds) {
    unsigned long long const begun = now();
    while (now() - begun < nanoseconds) {
    }
}
Spin spin_for(double milliseconds) {
    return [=](cudaStream_t stream) {
        wait_for<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(1e6 * milliseconds));
        cuda(cudaGetLastError());
    };
}

/// Ends the program after this many seconds.
void bound(unsigned int seconds) {
    std::signal(SIGALRM, [](int) {
        constexpr std::string_view text = "streams: it hangs\n";
        [[maybe_unused]] auto const written = write(STDERR_FILENO, text.data(), text.size());
        _exit(1);
    });
    alarm(seconds);
}

void order(bool is_small) {
    Machine const machine{
        joinable::cuda_kernels(),
        spin_for(is_small ? 0.1 : 2),
        is_small ? std::size_t{2'000} : std::size_t{100'001}
    };
    joinable::run_threads(is_small ? 2 : 4, [&](ThreadHosts& hosts) {
        check_order(hosts, machine);
    });
}

void overlap(bool is_small) {
    Machine const machine{joinable::cuda_kernels(), spin_for(is_small ? 0.5 : 5), 0};
    OverlapSizes const sizes =
        is_small ? OverlapSizes{1'000, 1} : OverlapSizes{std::size_t{1} << 18U, 7};
    joinable::run_threads(2, [&](ThreadHosts& hosts) {
        std::size_t const early = measure_overlap(hosts, machine, sizes);
        expect(
            is_small || early == 4,
            "of 4 buckets " + std::to_string(early) + " were posted before the pass had run, not 4"
        );
    });
}

} // namespace

int main(int argc, char** argv) {
    std::string_view const what = argc >= 2 ? argv[1] : "";
    bool const is_small = argc == 3 && argv[2] == std::string_view{"--small"};
    if ((what != "order" && what != "overlap") || argc != (is_small ? 3 : 2)) {
        std::fprintf(stderr, "usage: %s order|overlap [--small]\n", argv[0]);
        return 2;
    }
    setenv(
        "CUDA_DEVICE_MAX_CONNECTIONS", "32", 1
    ); // no stream is to wait for another one by chance
    bound(100);
    try {
        (what == "order" ? order : overlap)(is_small);
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
