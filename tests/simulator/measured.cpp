// SPDX-License-Identifier: BSL-1.0
// Runs all-reduces of 2 to 16 thread ranks over links that take their time by the clock, and prints what they took
// beside what the simulator says. The ranks only wait most of the time, so two cores do for all of them.
//
//   measured [REPETITIONS]
//
// Exit status: 1 if a run was faster than the simulator says. How much slower it is depends on the machine.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

#include <simulator/plans.hpp>
#include <simulator/simulator.hpp>

namespace {

using namespace joinable_tests;
using Clock = std::chrono::steady_clock;
using joinable::Buffer;
using joinable::ConstBuffer;

/// A message takes this long from when both sides have posted it.
constexpr joinable::MessageCosts costs{2e-3, 100e6, 0};

/// The links between all ranks.
class Links {
public:
    struct Message {
        ConstBuffer sent{};
        Buffer received{};
        int sides = 0;
        Clock::time_point arrives;
    };

    /// One side posts the next message of its direction. The second one copies it.
    std::shared_ptr<Message>
    post(int from, int to, int tag, ConstBuffer const* sent, Buffer received) {
        std::lock_guard const lock{mutex_};
        auto& waiting = (sent != nullptr ? sends_ : receives_)[{from, to, tag}];
        auto& others = (sent != nullptr ? receives_ : sends_)[{from, to, tag}];
        std::shared_ptr<Message> message;
        if (others.empty()) {
            message = std::make_shared<Message>();
            waiting.push_back(message);
        } else {
            message = others.front();
            others.pop_front();
        }
        if (sent != nullptr) {
            message->sent = *sent;
        } else {
            message->received = received;
        }
        if (++message->sides == 2) {
            std::size_t const bytes = message->sent.count * size_of(message->sent.dtype);
            std::memcpy(message->received.data, message->sent.data, bytes);
            std::chrono::duration<double> const takes{costs.message(static_cast<double>(bytes))};
            message->arrives = Clock::now() + std::chrono::duration_cast<Clock::duration>(takes);
            posted_.notify_all();
        }
        return message;
    }
    void wait(Message const& message) {
        std::unique_lock lock{mutex_};
        posted_.wait(lock, [&] { return message.sides == 2; });
        lock.unlock();
        std::this_thread::sleep_until(message.arrives);
    }
    bool test(Message const& message) {
        std::lock_guard const lock{mutex_};
        return message.sides == 2 && Clock::now() >= message.arrives;
    }

private:
    using Queues = std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Message>>>;
    std::mutex mutex_;
    std::condition_variable posted_;
    Queues sends_; ///< that no receive has met yet
    Queues receives_;
};

class Linked {
public:
    struct Work {
        Links* links;
        std::shared_ptr<Links::Message> message;
        void wait() const { links->wait(*message); }
        [[nodiscard]] bool test() const { return links->test(*message); }
    };
    Linked(Links& links, int rank, int size) : links_{&links}, rank_{rank}, size_{size} {}
    [[nodiscard]] int rank() const { return rank_; }
    [[nodiscard]] int size() const { return size_; }
    Work send(ConstBuffer buffer, int to, int tag) {
        return {links_, links_->post(rank_, to, tag, &buffer, {})};
    }
    Work receive(Buffer buffer, int from, int tag) {
        return {links_, links_->post(from, rank_, tag, nullptr, buffer)};
    }

private:
    Links* links_;
    int rank_;
    int size_;
};

/// The fastest of some runs. A run begins when the last rank comes to the barrier before it, though a rank
/// may leave that barrier late.
double measure(joinable::AllReducePlan const& plan, int ranks, std::size_t count, int repetitions) {
    Links links;
    double fastest = 1e9;
    std::vector<Clock::time_point> came(static_cast<std::size_t>(ranks));
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        Linked linked{links, comm.rank(), comm.size()};
        joinable::MessageCommunicator over{linked, {.plan = plan}};
        std::vector<float> values(count, 1.0F);
        for (int i = 0; i < repetitions; ++i) {
            came[static_cast<std::size_t>(comm.rank())] = Clock::now();
            comm.barrier();
            over.all_reduce({values.data(), count, joinable::DType::f32}, joinable::ReduceOp::max)
                .wait();
            comm.barrier();
            if (comm.rank() == 0) {
                std::chrono::duration<double> const took =
                    Clock::now() - *std::max_element(came.begin(), came.end());
                fastest = (std::min)(fastest, took.count());
            }
            comm.barrier(); // rank 0 has read when ranks came
        }
    });
    return fastest;
}

} // namespace

int main(int count, char** arguments) {
    int const repetitions = count > 1 ? std::atoi(arguments[1]) : 5;
    std::vector<double> ratios;
    std::printf(
        "%-40s %6s %8s %10s %10s %6s\n",
        "algorithm",
        "ranks",
        "bytes",
        "measured",
        "simulated",
        "ratio"
    );
    for (int const ranks : {2, 3, 4, 6, 8, 12, 16}) {
        for (std::size_t const bytes : {std::size_t{64}, std::size_t{1} << 18U}) {
            for (joinable::AllReducePlan const& plan : all_plans(ranks, 1U << 15U)) {
                std::size_t const elements = bytes / sizeof(float);
                auto const schedule = joinable::detail::MessageSchedule::all_reduce(
                    plan, ranks, elements, sizeof(float)
                );
                double const simulated = Simulator<>{costs, sizeof(float)}.run({&schedule}).seconds;
                double const measured = measure(plan, ranks, elements, repetitions);
                double const ratio = measured / simulated;
                std::printf(
                    "%-40s %6d %8zu %10.4f %10.4f %6.3f\n",
                    text_of(plan).c_str(),
                    ranks,
                    bytes,
                    measured,
                    simulated,
                    ratio
                );
                ratios.push_back(ratio);
            }
        }
    }
    std::sort(ratios.begin(), ratios.end());
    std::printf(
        "measured / simulated: %.3f at least, %.3f in the median, %.3f at most\n",
        ratios.front(),
        ratios[ratios.size() / 2],
        ratios.back()
    );
    return ratios.front() < 1 ? 1 : 0;
}
