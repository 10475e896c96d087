// SPDX-License-Identifier: BSL-1.0
// What ranks measure of their messages. The oracle: links on a virtual clock, whose costs are known. What the numbers
// choose is compared with every other plan on the simulator's clock; simulator/measured.cpp does it by a real one.
#include <joinable/communicator/algorithms/measure_costs.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <simulator/simulator.hpp>
#include <support/machines.hpp>
#include <support/ranks.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/error.hpp>
#include <joinable/hierarchical.hpp>

namespace {

using namespace joinable_tests;
using joinable::AllReduceAlgorithm;
using joinable::AllReducePlan;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::measure_costs;
using joinable::MessageCommunicator;
using joinable::MessageCosts;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;

/// The clock of a rank, which is a thread. It goes on when a message arrives, and a tick each time it is read.
struct VirtualClock {
    using duration = std::chrono::duration<double>;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<VirtualClock>;
    static inline thread_local double seconds = 0;
    static inline thread_local double tick = 0;

    static time_point now() {
        seconds += tick;
        return time_point{duration{seconds}};
    }
};

/// Messages of threads, each of which takes the time of its link: of MessageCosts::exchange while this rank also waits
/// for one. Long ones, which only measure, carry their first elements.
class VirtualLinks {
public:
    using CostsOf = std::function<MessageCosts(int from, int to)>;
    VirtualLinks(ThreadCommunicator& comm, CostsOf costs_of)
        : comm_{comm}, costs_of_{std::move(costs_of)} {}
    [[nodiscard]] int rank() const { return comm_.rank(); }
    [[nodiscard]] int size() const { return comm_.size(); }

    struct Sending {
        joinable::ThreadWork payload;
        void wait() { payload.wait(); }
        bool test() { return payload.test(); }
    };
    struct Receiving {
        std::shared_ptr<double> arrival;
        joinable::ThreadWork arrives;
        joinable::ThreadWork payload;
        int* open;
        void wait() {
            arrives.wait();
            payload.wait();
            *open = 0;
            VirtualClock::seconds = (std::max)(VirtualClock::seconds, *arrival);
        }
        bool test() {
            wait();
            return true;
        }
    };
    Sending send(ConstBuffer buffer, int to, int tag) {
        if (sends_left-- == 0) {
            throw std::runtime_error{"the cable is cut"};
        }
        auto const bytes = static_cast<double>(buffer.count * size_of(buffer.dtype));
        MessageCosts const costs = costs_of_(rank(), to);
        double const arrival =
            VirtualClock::seconds + (open_ != 0 ? costs.exchange(bytes) : costs.message(bytes));
        comm_.send({&arrival, 1, DType::f64}, to, 1'000'000 + tag).wait();
        return {comm_.send(carried(buffer), to, tag)};
    }
    Receiving receive(Buffer buffer, int from, int tag) {
        auto const arrival = std::make_shared<double>();
        auto arrives = comm_.receive({arrival.get(), 1, DType::f64}, from, 1'000'000 + tag);
        open_ = 1;
        return {arrival, std::move(arrives), comm_.receive(carried(buffer), from, tag), &open_};
    }
    void abort(joinable::AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }

    int sends_left = std::numeric_limits<int>::max();

private:
    template <class Memory>
    [[nodiscard]] static Memory carried(Memory buffer) {
        buffer.count = (std::min)(buffer.count, std::size_t{4096});
        return buffer;
    }

    ThreadCommunicator& comm_;
    CostsOf costs_of_;
    int open_ = 0; ///< whether this rank waits for a message
};

MessageCosts
measured(ThreadCommunicator& comm, double tick, VirtualLinks::CostsOf const& costs_of) {
    VirtualClock::seconds = 0;
    VirtualClock::tick = tick;
    VirtualLinks links{comm, costs_of};
    MessageCosts const costs = measure_costs<VirtualClock>(links);
    for (double const number :
         {costs.message_seconds,
          costs.bytes_per_second,
          costs.combine_seconds,
          costs.both_ways,
          costs.overlap,
          costs.uncached}) {
        double least = number;
        double most = number;
        comm.all_reduce({&least, 1, DType::f64}, ReduceOp::min).wait();
        comm.all_reduce({&most, 1, DType::f64}, ReduceOp::max).wait();
        CHECK(least == most); // the same numbers on all ranks
    }
    return costs;
}

/// Whether the `k`-th link is left out: numbers do not depend on how threads meet, and the thread sanitizer looks at each
/// element of buffers of 16 MiB.
bool is_number_left_out(std::size_t k) {
    return sanitizer == Sanitizer::thread && is_reduced() && k > 0;
}

TEST_CASE("measured costs are those of the links and of the additions") {
    std::size_t k = 0;
    for (MessageCosts const& link :
         {MessageCosts{20e-6, 1e9, 0}, MessageCosts{2e-3, 100e6, 0}, MessageCosts{1e-3, 1e6, 0}}) {
        if (is_number_left_out(k)) {
            break;
        }
        in_turn({2, 3, 4, 5, 8}, k++, [&](int ranks) {
            run_ranks({ranks}, [&](ThreadCommunicator& comm) {
                double const tick = 1e-6; // between two readings of the clock
                MessageCosts const found = measured(comm, tick, [&](int, int) { return link; });
                CHECK(found.message_seconds == doctest::Approx(link.message_seconds + tick / 2));
                CHECK(found.bytes_per_second == doctest::Approx(link.bytes_per_second));
                CHECK(found.combine_seconds == doctest::Approx(tick / (1 << 20)));
            });
        });
    }
}

static_assert(joinable::detail::overlap_of(3, 2, 3) == 1);
static_assert(joinable::detail::overlap_of(3, 2, 4) == 0.5);
static_assert(joinable::detail::overlap_of(2, 3, 5) == 0);
static_assert(joinable::detail::overlap_of(2, 3, 9) == 0); // they are in each other's way
static_assert(joinable::detail::overlap_of(2, 3, 2) == 1);

TEST_CASE("messages that pass each other take the time that they are measured to take") {
    std::size_t k = 0;
    for (double const both_ways :
         {1.0, 1.5, 2.0, 9.0}) { // more than twice is something else that was in the way
        if (is_number_left_out(k)) {
            break;
        }
        MessageCosts const link{1e-6, 1e9, 0, both_ways};
        in_turn({2, 3, 4, 8}, k++, [&](int ranks) {
            run_ranks({ranks}, [&](ThreadCommunicator& comm) {
                MessageCosts const found = measured(comm, 1e-7, [&](int, int) { return link; });
                CHECK(found.both_ways == doctest::Approx((std::min)(both_ways, 2.0)).epsilon(1e-3));
                CHECK(found.bytes_per_second == doctest::Approx(link.bytes_per_second));
                CHECK(found.overlap == doctest::Approx(1)); // an addition takes no time beside
                CHECK(found.uncached == doctest::Approx(1));
            });
        });
    }
}

TEST_CASE("what an addition adds to an exchange is measured") {
    run_ranks({2, 3, 4}, [](ThreadCommunicator& comm) {
        int sent = 0; // so exchanges beside an addition, which are the last ones, take longer
        MessageCosts const found =
            measured(comm, 1e-6, [&](int, int) { return MessageCosts{1e-3 * ++sent, 1e12, 0}; });
        CHECK(found.overlap == 0);
    });
}

TEST_CASE("long messages are measured where they are as fast as memory, and cost what they take") {
    struct Case {
        MessageCosts link;
        double uncached;
    };
    std::size_t k = 0;
    for (Case const& one :
         {Case{{1e-6, 10e9, 0, 1, 1, 3}, 3}, // 1.7 ms for 16 MiB of a cache
          Case{{1e-6, 10e9, 0, 2, 1, 2}, 2},
          Case{{1e-6, 100e6, 0, 1, 1, 3}, 1}}) { // 170 ms, three times, are not spent on it
        if (is_number_left_out(k)) {
            break;
        }
        in_turn({2, 3, 4}, k++, [&](int ranks) {
            run_ranks({ranks}, [&](ThreadCommunicator& comm) {
                MessageCosts const found = measured(comm, 0, [&](int, int) { return one.link; });
                CHECK(found.uncached == doctest::Approx(one.uncached).epsilon(1e-3));
            });
        });
    }
}

TEST_CASE(
    "links that differ give the costs of a usual one" * doctest::skip(is_number_left_out(1))
) {
    MessageCosts const near{1e-6, 10e9, 0};
    MessageCosts const far{100e-6, 1e9, 0};
    run_ranks({8}, [&](ThreadCommunicator& comm) {
        // Machines of 2: two of three rounds cross. Machines of 4: one of three.
        for (int const ranks_of_machine : {2, 4}) {
            MessageCosts const found = measured(comm, 0, [&](int from, int to) {
                return from / ranks_of_machine == to / ranks_of_machine ? near : far;
            });
            MessageCosts const& usual = ranks_of_machine == 2 ? far : near;
            CHECK(found.message_seconds == doctest::Approx(usual.message_seconds));
            CHECK(found.bytes_per_second == doctest::Approx(usual.bytes_per_second));
        }
    });
}

TEST_CASE("a rank without a peer in a round does not count there") {
    MessageCosts const near{1e-6, 10e9, 0};
    MessageCosts const far{100e-6, 1e9, 0};
    run_ranks(
        {3},
        [&](ThreadCommunicator& comm
        ) { // rank 2 has one peer, and so has rank 1: of two, the slower
            MessageCosts const found =
                measured(comm, 0, [&](int from, int to) { return from + to == 1 ? near : far; });
            CHECK(found.message_seconds == doctest::Approx(far.message_seconds));
            CHECK(found.bytes_per_second == doctest::Approx(far.bytes_per_second));
        }
    );
}

TEST_CASE("a link that takes no time gives numbers that can choose a plan") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        MessageCosts const nothing{0, std::numeric_limits<double>::infinity(), 0};
        MessageCosts const found = measured(comm, 0, [&](int, int) { return nothing; });
        CHECK(found.message_seconds > 0);
        CHECK(found.bytes_per_second > 0);
        CHECK(std::isfinite(found.bytes_per_second));
        CHECK(found.combine_seconds > 0);
        for (double const factor : {found.both_ways, found.uncached}) {
            CHECK(factor >= 1);
            CHECK(std::isfinite(factor));
        }
        CHECK(joinable::choose_algorithm(1U << 20U, comm.size(), found).segment_bytes <= 1U << 20U);
    });
}

TEST_CASE("a rank alone measures its additions, and keeps the defaults of messages") {
    run_ranks({1}, [](ThreadCommunicator& comm) {
        MessageCosts const found = measure_costs(comm);
        CHECK(found.message_seconds == MessageCosts{}.message_seconds);
        CHECK(found.bytes_per_second == MessageCosts{}.bytes_per_second);
        CHECK(found.combine_seconds > 0);
        CHECK(found.combine_seconds < 1e-6); // a microsecond for a byte
    });
}

TEST_CASE("measured costs choose for a mesh, a hierarchical ring and plans of one level") {
    for (std::vector<int> const& sizes :
         {std::vector{1}, {2}, {3}, {2, 2}, {4, 4}, {2, 2, 2, 2}, {3, 3}, {1, 3}}) {
        int const ranks = ranks_of(sizes);
        if (is_reduced() && ranks > 4) {
            continue;
        }
        // All ranks of one level: what is chosen, a mesh and a torus of machines.
        run_ranks({ranks}, [&](ThreadCommunicator& comm) {
            MessageCosts const costs = measure_costs(comm);
            std::vector<joinable::MessageOptions> options{{.costs = costs, .check = true}};
            if (sizes[0] == sizes.back()) {
                std::vector<int> const grid{sizes[0], static_cast<int>(sizes.size())};
                options.push_back({.plan = AllReducePlan{AllReduceAlgorithm::mesh, 0, grid}});
                options.push_back({.plan = AllReducePlan{AllReduceAlgorithm::torus, 0, grid}});
            }
            for (joinable::MessageOptions const& one : options) {
                MessageCommunicator over{comm, one};
                for (std::size_t const count : {1U, 7U, 5000U}) {
                    std::vector<double> numbers(count, 1.0 + comm.rank());
                    over.all_reduce({numbers.data(), count, DType::f64}, ReduceOp::sum).wait();
                    CHECK(numbers == std::vector<double>(count, ranks * (ranks + 1) / 2.0));
                }
            }
        });
        // A ring on each machine, and one of the leaders.
        on_machines(sizes, [&](OnMachine place) {
            AllReducePlan const ring{AllReduceAlgorithm::ring};
            MessageCommunicator local{place.local, {.plan = ring}};
            std::optional<MessageCommunicator<ThreadCommunicator>> across;
            if (place.across != nullptr) {
                MessageCosts const costs = measure_costs(*place.across);
                CHECK(costs.message_seconds > 0);
                across.emplace(*place.across, joinable::MessageOptions{.plan = ring});
            }
            joinable::HierarchicalCommunicator comm{local, across};
            std::vector<double> numbers(5000, 1.0 + comm.rank());
            comm.all_reduce({numbers.data(), numbers.size(), DType::f64}, ReduceOp::sum).wait();
            CHECK(numbers == std::vector<double>(numbers.size(), ranks * (ranks + 1) / 2.0));
        });
    }
}

// A hierarchical ring sends the whole buffer along a ring of each machine, then along one of the machines, and then
// to the ranks of each machine; a torus or mesh of these extents sends a part of it between machines.
TEST_CASE("a mesh of machines takes the time of its rings, and less than a hierarchical ring") {
    MessageCosts const costs{20e-6, 1e9, 0.1e-9};
    std::size_t const bytes = 1U << 20U;
    auto const seconds = [&](AllReducePlan const& plan, int ranks) {
        auto const schedule = joinable::detail::MessageSchedule::all_reduce(plan, ranks, bytes, 1);
        return Simulator<>{costs, 1}.run({&schedule}).seconds;
    };
    AllReducePlan const ring{AllReduceAlgorithm::ring};
    for (int const local : {2, 4, 8}) {
        for (int const machines : {2, 4, 8}) {
            double const n = bytes;
            double const block = n / local;
            double const textbook = 2 * (local - 1) * costs.message(block) +
                                    (local - 1) * costs.combination(block) +
                                    2 * (machines - 1) * costs.message(block / machines) +
                                    (machines - 1) * costs.combination(block / machines);
            AllReducePlan const mesh{AllReduceAlgorithm::mesh, 0, {local, machines}};
            CHECK(seconds(mesh, local * machines) == doctest::Approx(textbook));
            auto const down = joinable::detail::MessageSchedule::broadcast(local, bytes, 0);
            double const hierarchical = seconds(ring, local) + seconds(ring, machines) +
                                        Simulator<>{costs, 1}.run({&down}).seconds;
            CHECK(textbook < hierarchical);
        }
    }
}

TEST_CASE("what measured costs choose is within 20 % of the fastest plan on the virtual clock") {
    double worst = 0;
    std::size_t k = 0;
    for (MessageCosts const& link :
         {MessageCosts{20e-6, 1e9, 0},
          MessageCosts{2e-3, 100e6, 0},
          MessageCosts{1e-6, 10e9, 0},
          MessageCosts{0.3e-6, 3e9, 0}}) {
        if (is_left_out(k++, 4, 0)) { // the plans of each are of one thread
            continue;
        }
        MessageCosts found;
        run_ranks({4}, [&](ThreadCommunicator& comm) {
            MessageCosts const own = measured(comm, 1e-7, [&](int, int) { return link; });
            if (comm.rank() == 0) {
                found = own;
            }
        });
        MessageCosts real = link;
        real.combine_seconds = found.combine_seconds;
        for (int const ranks : {2, 3, 4, 6, 7, 8, 12, 16, 17, 33}) {
            for (std::size_t const bytes : {64U, 4096U, 1U << 16U, 1U << 20U, 1U << 24U}) {
                auto const seconds = [&](AllReducePlan const& plan) {
                    auto const schedule =
                        joinable::detail::MessageSchedule::all_reduce(plan, ranks, bytes, 1);
                    return Simulator<>{real, 1}.run({&schedule}).seconds;
                };
                double const chosen = seconds(joinable::choose_algorithm(bytes, ranks, found));
                for (std::size_t const cuts : {2U, 8U, 64U}) {
                    for (AllReducePlan const& plan : all_plans(ranks, bytes / cuts)) {
                        double const ratio = chosen / seconds(plan);
                        CHECK_MESSAGE(ratio <= 1.2, text_of(plan), " of ", bytes, " over ", ranks);
                        worst = (std::max)(worst, ratio);
                    }
                }
            }
        }
    }
    CHECK(worst >= 1); // the chosen plan is among them where it is not cut
}

TEST_CASE("a rank that fails while costs are measured fails the others") {
    // Before it measures; in a collective; in messages there and back; in messages at once.
    for (int const sends : {0, 1, 20, 100}) {
        run_ranks({2, 3, 4, 8}, [sends](ThreadCommunicator& comm) {
            int const last = comm.size() - 1;
            try {
                VirtualClock::tick = 1e-6;
                VirtualLinks links{comm, [](int, int) { return MessageCosts{}; }};
                if (comm.rank() == last) {
                    links.sends_left = sends;
                }
                (void)measure_costs<VirtualClock>(links);
                CHECK(false);
            } catch (joinable::PeerFailed const& error) {
                CHECK(comm.rank() != last);
                CHECK(error.rank() == last);
                CHECK(std::string{error.what()}.find("the cable is cut") != std::string::npos);
            } catch (std::runtime_error const& error) {
                CHECK(comm.rank() == last);
                CHECK(std::string{error.what()} == "the cable is cut");
            }
        });
    }
    CHECK_THROWS_WITH_AS(
        run_ranks(
            {3},
            [](ThreadCommunicator& comm) {
                if (comm.rank() == 1) {
                    throw std::runtime_error{"out of memory"};
                }
                CHECK_THROWS_AS((void)measure_costs(comm), joinable::PeerFailed);
            }
        ),
        "out of memory",
        std::runtime_error
    );
}

} // namespace
