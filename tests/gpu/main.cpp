// SPDX-License-Identifier: BSL-1.0
// Ranks are processes on one GPU, or on as many as there are: see ../gpu.sh.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

#include <gpu/checks.hpp>
#include <gpu/measurements.hpp>
#include <gpu/operations.hpp>

namespace {

using namespace joinable_gpu;
using Hosts = joinable::ProcessCommunicator;

/// No rank has begun with CUDA before it is a process of its own: CUDA survives no fork.
template <class Body>
void run(int ranks, Body const& body) {
    joinable::run_processes(ranks, [&](Hosts& hosts) {
        hosts.set_deadline(std::chrono::seconds{60});
        body(hosts);
    });
}

void check(int ranks) {
    run(ranks, [](Hosts& hosts) { check_results(hosts, kernels(), 300'001); });
    std::printf("%d ranks: sums and averages are what their formulas say\n", ranks);
    if (ranks > 1) {
        for (Where const where : {Where::before_a_sum, Where::in_a_backward_pass}) {
            run(ranks, [where](Hosts& hosts) { check_failure(hosts, where); });
        }
        std::printf("%d ranks: when one fails the others are told\n", ranks);
    }
}

void check_operations(int ranks) {
    run(ranks, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts};
        check_split(rank);
        check_messages(rank);
        check_bad_input(rank);
        check_staged(rank);
    });
    std::printf("%d ranks: groups, messages, refusals, and roll calls through NCCL\n", ranks);
    run(ranks, [](Hosts& hosts) { check_lent(hosts); });
    std::printf("%d ranks: an engine's communicator, lent and given back\n", ranks);
    run(ranks, [](Hosts& hosts) { check_tcp_control(hosts); });
    std::printf("%d ranks: roll calls by TCP\n", ranks);
    if (ranks > 1) {
        run(ranks, [](Hosts& hosts) { check_mismatch(hosts); });
        std::printf("%d ranks: a sum that one of them makes with another count\n", ranks);
    }
}

void measure(int ranks) {
    constexpr int rounds = 11;
    run(ranks, [&](Hosts& hosts) {
        Rank<Hosts> rank{hosts, kernels()};
        constexpr std::size_t mib = 1U << 20U;
        measure_all_reduce(rank, {8, 1024, 65'536, mib, 25 * mib, 100 * mib}, rounds);
        if (ranks == 1) {
            measure_packing(rank, 6400, 4096, rounds);
            measure_packing(rank, 400, 65'536, rounds);
            measure_packing(rank, 100, 4 * mib, rounds);
        }
        CopyingPasses passes{rank.stream, 1768 * 1768};
        measure_iteration(rank, passes, 8, 1768, rounds);
    });
}

} // namespace

int main(int argc, char** argv) {
    std::string_view const what = argc == 3 ? argv[1] : "";
    int const ranks = argc == 3 ? std::atoi(argv[2]) : 0;
    if ((what != "check" && what != "operations" && what != "measure") || ranks < 1) {
        std::fprintf(stderr, "usage: %s check|operations|measure <ranks>\n", argv[0]);
        return 2;
    }
    try {
        (what == "check" ? check : what == "measure" ? measure : check_operations)(ranks);
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
