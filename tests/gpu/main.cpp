// SPDX-License-Identifier: BSL-1.0
// Ranks are processes on one GPU, or on as many as there are: see ../gpu.sh.

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

#include <gpu/captured.hpp>
#include <gpu/checks.hpp>
#include <gpu/iteration.hpp>
#include <gpu/measurements.hpp>
#include <gpu/operations.hpp>
#include <unistd.h>

namespace {

using namespace joinable_gpu;
using Hosts = joinable::ProcessCommunicator;

/// Ranks end with this process, which ends when it hangs.
void hang(int) {
    constexpr std::string_view text = "the watchdog: ranks hang\n";
    static_cast<void>(!write(STDERR_FILENO, text.data(), text.size()));
    _exit(1);
}

/// No rank has begun with CUDA before it is a process of its own: CUDA survives no fork.
template <class Body>
void run(int ranks, Body const& body, unsigned int seconds = 60) {
    alarm(seconds); // processes that are made from here on have none
    joinable::run_processes(ranks, [&](Hosts& hosts) {
        hosts.set_deadline(longest_wait);
        body(hosts);
    });
    alarm(0);
}

void check(int ranks) {
    run(ranks, [](Hosts& hosts) { check_results(hosts, kernels(), 300'033); });
    std::printf("%d ranks: sums and averages are what their formulas say\n", ranks);
    for (Where const where : {Where::before_a_sum, Where::in_a_backward_pass}) {
        if (ranks > 1) {
            run(ranks, [where](Hosts& hosts) { check_failure(hosts, where); });
            std::printf(
                "%d ranks: when one throws %s the others are told\n",
                ranks,
                where == Where::before_a_sum ? "before a sum" : "in a backward pass"
            );
        }
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

/// Whether the ranks can share what GPUs there are.
void meet(int ranks) {
    run(ranks, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, kernels()};
        expect_sum(rank.comm, rank.stream, 1, static_cast<float>(hosts.size()));
    });
    std::printf("%d ranks: a communicator is made, probed, and destroyed\n", ranks);
}

/// With NCCL_DEBUG=WARN NCCL says nothing but its version before "-- first abort".
void check_one(int ranks) {
    meet(ranks);
    run(ranks, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, kernels()};
        bool const is_registered = check_window(rank);
        if (hosts.rank() == 0) {
            std::printf(
                "%d ranks: registration as a symmetric window %s\n",
                hosts.size(),
                is_registered ? "took place" : "did not take place"
            );
        }
    });
    check(ranks);
    check_operations(ranks);
    for (End const end : {End::destroyed, End::aborted, End::aborted_with_a_window}) {
        if (end == End::aborted) {
            std::printf("-- first abort\n");
        }
        int const times = end == End::aborted_with_a_window ? 5 : 20;
        run(ranks, [=](Hosts& hosts) {
            std::size_t const less = check_ends(hosts, times, end);
            if (hosts.rank() == 0) {
                constexpr std::array names{"destroyed", "aborted", "aborted with a window"};
                std::printf(
                    "%d ranks: %d times %s: at most %zu B less are free than after the first time\n",
                    hosts.size(),
                    times,
                    names[static_cast<std::size_t>(end)],
                    less
                );
            }
        });
    }
}

void captured(int ranks) {
    for (joinable::CudaKernels const& with : {joinable::CudaKernels{}, kernels()}) {
        run(ranks, [&](Hosts& hosts) {
            constexpr int replays = 1000;
            Rank<Hosts> rank{hosts, with};
            Times const times = check_captured(rank, replays);
            if (hosts.rank() == 0) {
                std::printf(
                    "%d ranks: a captured step %s kernels, shadowed, captured again after a throw, and "
                    "replayed %d times; a replay takes %.1f us, of the host %.1f us\n",
                    hosts.size(),
                    with.run == nullptr ? "without" : "with",
                    replays,
                    times.gpu,
                    times.host
                );
            }
        });
    }
}

/// The names of what processes share.
std::set<std::string> shared_files() {
    std::set<std::string> names;
    for (auto const& entry : std::filesystem::directory_iterator{"/dev/shm"}) {
        names.insert(entry.path().filename().string());
    }
    return names;
}
/// Asked by a process of its own, which has the only context of CUDA.
std::size_t free_of_gpu() {
    auto const free = joinable::shared_buffer<std::size_t>(1);
    run(1, [&](Hosts& hosts) {
        take_device(hosts);
        free[0] = free_memory();
    });
    return free[0];
}

/// A rank is killed while the kernels of the others wait for it.
void check_killed(int ranks) {
    using Clock = std::chrono::steady_clock;
    struct Told {
        double after; ///< seconds
        Clock::rep at;
    };
    int const culprit = ranks - 1;
    auto const files = shared_files();
    std::size_t const free = free_of_gpu();
    auto const told = joinable::shared_buffer<Told>(static_cast<std::size_t>(ranks));
    std::string said = "nothing";
    try {
        run(ranks, [&](Hosts& hosts) {
            double const after = check_failure(hosts, Where::while_others_wait_in_a_kernel, [] {
                std::raise(SIGKILL);
            });
            told[static_cast<std::size_t>(hosts.rank())] = {
                after, Clock::now().time_since_epoch().count()
            };
        });
    } catch (joinable::PeerFailed const& failure) {
        said = failure.what();
        expect(failure.rank() == culprit, "this process is told: " + said);
    }
    auto const end = Clock::now();
    alarm(0);
    expect(said.find("killed by signal 9") != std::string::npos, "this process is told: " + said);
    double longest = 0;
    for (int rank = 0; rank < culprit; ++rank) {
        auto const [after, at] = told[static_cast<std::size_t>(rank)];
        std::chrono::duration<double> const left = end.time_since_epoch() - Clock::duration{at};
        expect(after > 0, "rank " + std::to_string(rank) + " was not told");
        expect(
            left < longest_wait / 2, // after longest_wait it is killed
            "rank " + std::to_string(rank) + " was told, and took " + exactly(left.count()) +
                " s to end"
        );
        longest = std::max(longest, after);
    }
    std::printf(
        "%d ranks: when one is killed the kernels of the others end, and they are told by name, in %.3f s\n",
        ranks,
        longest
    );
    for (std::string const& file : shared_files()) {
        expect(files.contains(file), "/dev/shm/" + file + " is left");
    }
    constexpr std::size_t allowed = std::size_t{16} << 20U; // a context has hundreds of MiB
    std::size_t free_now = free_of_gpu();
    while (free_now + allowed < free && Clock::now() - end < longest_wait) {
        free_now = free_of_gpu(); // the driver may still be at work
    }
    expect(
        free_now + allowed >= free,
        std::to_string(free) + " B of the GPU were free, and now " + std::to_string(free_now)
    );
    std::printf(
        "%d ranks: nothing is left in /dev/shm, nor on the GPU: %zu B free before, %zu B now\n",
        ranks,
        free,
        free_now
    );
}

void pair(int ranks) {
    expect(ranks > 1, "a pair has at least 2 ranks");
    check(ranks);
    check_operations(ranks);
    check_killed(ranks);
}

void host_time(int ranks) {
    run(ranks, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, kernels()};
        measure_host_time(rank, 1024, 50, 11);
    });
}

void measure(int ranks) {
    constexpr int rounds = 11;
    auto const all = [&](Hosts& hosts) {
        Rank<Hosts> rank{hosts, kernels()};
        constexpr std::size_t mib = 1U << 20U;
        measure_all_reduce(rank, {8, 1024, 65'536, mib, 25 * mib, 100 * mib}, rounds);
        CopyingPasses passes{rank.stream, 1768 * 1768};
        measure_iteration(rank, passes, 8, 1768, rounds);
    };
    run(ranks, all, 120);
}

struct Check {
    std::string_view name;
    void (*run)(int ranks);
};
constexpr std::array checks{
    Check{"meet", meet},
    Check{"check", check},
    Check{"operations", check_operations},
    Check{"one", check_one},
    Check{"captured", captured},
    Check{"pair", pair},
    Check{"host_time", host_time},
    Check{"measure", measure},
};

} // namespace

int main(int argc, char** argv) {
    std::string_view const name = argc == 3 ? argv[1] : "";
    int const ranks = argc == 3 ? std::atoi(argv[2]) : 0;
    auto const* const found = std::find_if(checks.begin(), checks.end(), [&](Check const& it) {
        return it.name == name;
    });
    if (found == checks.end() || ranks < 1) {
        std::fprintf(stderr, "usage: %s <check> <ranks>; the checks:", argv[0]);
        for (Check const& it : checks) {
            std::fprintf(stderr, " %s", std::string{it.name}.c_str());
        }
        std::fprintf(stderr, "\n");
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IONBF, 0); // in order with what NCCL says
    std::signal(SIGALRM, hang);
    try {
        found->run(ranks);
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
