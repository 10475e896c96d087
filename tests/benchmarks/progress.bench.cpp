// SPDX-License-Identifier: BSL-1.0
// When do sums of buckets get on while ranks compute? An iteration makes 8 buckets, one after another, and sums
// each over the ranks as soon as it is made; then it waits for all. Making one takes 2 ms in which a rank either
// computes or sleeps, as one does that waits for a device. Three ways: nobody looks after a sum before the end,
// each rank tests the oldest one whenever a bucket is made (as DistributedDataParallel does), or each rank has a
// ProgressThread. Every line is "<MiB> <ranks> <meanwhile> <way> <microseconds> <exposed>": medians on rank 0 of an
// iteration, and of what it takes longer than one without sums.
//
//   progress.bench [ranks] [rounds]
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include <joinable/join.hpp>

namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr std::size_t buckets = 8;
constexpr std::chrono::milliseconds making{2};

/// Arithmetic in registers, as long as on an idle core. A thread that takes the core away takes time.
double volatile sink = 1;
void compute(long steps) {
    double x = sink;
    for (long i = 0; i < steps; ++i) {
        x = x * 0.999999 + 1e-6;
    }
    sink = x;
}
long calibrate() {
    long steps = 1 << 10;
    for (;;) {
        auto const start = Clock::now();
        compute(steps);
        auto const took = Clock::now() - start;
        if (took > making) {
            return static_cast<long>(static_cast<double>(steps) * (Microseconds{making} / took));
        }
        steps *= 2;
    }
}

double median(std::vector<double> values) {
    auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

void measure(joinable::ThreadCommunicator& comm, std::size_t mebibytes, int rounds, long steps) {
    std::vector<std::vector<float>> data(buckets, std::vector<float>(mebibytes << 18U));
    std::optional<joinable::ProgressThread> thread;
    auto const iterate = [&](bool sleeps, std::string_view way) {
        auto const start = Clock::now();
        std::deque<joinable::ThreadWork> works;
        for (std::vector<float>& bucket : data) {
            if (sleeps) {
                std::this_thread::sleep_for(making);
            } else {
                compute(steps);
            }
            if (way != "none") {
                works.push_back(comm.all_reduce(
                    {bucket.data(), bucket.size(), joinable::DType::f32}, joinable::ReduceOp::sum
                ));
            }
            if (way == "test") {
                static_cast<void>(works.front().test());
            }
        }
        for (joinable::ThreadWork& work : works) {
            work.wait();
        }
        comm.barrier();
        return Microseconds{Clock::now() - start}.count();
    };
    for (bool const sleeps : {false, true}) {
        std::vector<std::string_view> const ways{"none", "wait", "test", "thread"};
        std::vector<std::vector<double>> times(ways.size());
        for (int round = 0; round < rounds; ++round) {
            for (std::size_t k = 0; k < ways.size(); ++k) {
                if (ways[k] == "thread") {
                    thread.emplace(comm);
                }
                iterate(sleeps, ways[k]); // warms up
                times[k].push_back(iterate(sleeps, ways[k]));
                thread.reset();
            }
        }
        for (std::size_t k = 0; comm.rank() == 0 && k < ways.size(); ++k) {
            std::printf(
                "%zu %d %s %s %.0f %.0f\n",
                mebibytes,
                comm.size(),
                sleeps ? "sleeps" : "computes",
                ways[k].data(),
                median(times[k]),
                median(times[k]) - median(times[0])
            );
        }
    }
}

} // namespace

int main(int count, char** arguments) {
    int const ranks = count > 1 ? std::atoi(arguments[1]) : 2;
    int const rounds = count > 2 ? std::atoi(arguments[2]) : 11;
    long const steps = calibrate();
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        for (std::size_t const mebibytes : {1U, 4U, 16U}) {
            measure(comm, mebibytes, rounds, steps);
        }
    });
}
