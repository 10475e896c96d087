// SPDX-License-Identifier: BSL-1.0
// Collectives of ranks that are connected by TCP, and what they say of each other. How they meet is in
// tcp_meeting.test.cpp, how they end in tcp_faults.test.cpp.
#include <joinable/tcp.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/draw.hpp>
#include <support/for_each_type.hpp>
#include <support/further_types.hpp>
#include <support/repeating.hpp>
#include <support/tcp_ranks.hpp>
#include <support/volume.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::DType;
using joinable::ReduceOp;
using joinable::TcpCommunicator;
using joinable::TcpWork;

static_assert(joinable::models_communicator<TcpCommunicator>());
static_assert(joinable::Aborts<TcpCommunicator>);
static_assert(joinable::RenewsDeadline<TcpCommunicator>);
static_assert(joinable::ReportsMissing<TcpCommunicator>);
static_assert(!joinable::ScalesSums<TcpCommunicator>);
static_assert(!joinable::Reduces<TcpCommunicator>);
static_assert(!joinable::AllGathers<TcpCommunicator>);
static_assert(!joinable::ReduceScatters<TcpCommunicator>);
static_assert(!joinable::Gathers<TcpCommunicator>);
static_assert(!joinable::Scatters<TcpCommunicator>);
static_assert(!joinable::AllToAlls<TcpCommunicator>);

// Around what fits in a frame's first read, in the window of a rank, and in the kernel's buffers.
constexpr std::size_t sizes[] = {0, 1, 7, 4096, 49'152, 300'001};

constexpr ReduceOp operations[] = {
    ReduceOp::sum,
    ReduceOp::product,
    ReduceOp::min,
    ReduceOp::max,
    ReduceOp::bit_and,
    ReduceOp::bit_or,
};

constexpr std::size_t period = 3; ///< of the numbers

/// A number of rank `rank` at place `i`: 1 to 3, and another one on the next rank. Also the product of those of 8
/// ranks is exact in every dtype that does not wrap.
int number_of(int rank, std::size_t i) {
    return static_cast<int>((i + static_cast<std::size_t>(rank)) % period) + 1;
}
int combined(ReduceOp op, int a, int b) {
    switch (op) {
    case ReduceOp::sum: return a + b;
    case ReduceOp::product: return a * b;
    case ReduceOp::min: return std::min(a, b);
    case ReduceOp::max: return std::max(a, b);
    case ReduceOp::bit_and: return a & b;
    case ReduceOp::bit_or: break;
    }
    return a | b;
}
template <class T>
T as(int number) {
    if constexpr (std::is_arithmetic_v<T>) {
        return static_cast<T>(number);
    } else {
        return T{static_cast<float>(number)};
    }
}

template <class T>
void check_reductions(TcpCommunicator& comm) {
    DType const dtype = joinable::dtype_of<T>;
    for (ReduceOp const op : operations) {
        if ((op == ReduceOp::bit_and || op == ReduceOp::bit_or) && !std::is_integral_v<T>) {
            T value{};
            CHECK_THROWS_AS(
                (void)comm.all_reduce({&value, 1, dtype}, op), joinable::ContractViolation
            );
            continue;
        }
        for (std::size_t number = 0; std::size_t const bytes : sizes) {
            if (joinable_tests::is_left_out(number++, 2, comm.size())) {
                continue;
            }
            std::size_t const n = bytes / sizeof(T);
            auto values = repeating<T>(period, n, [&](std::size_t i) {
                return as<T>(number_of(comm.rank(), i));
            });
            comm.all_reduce({values.data(), n, dtype}, op).wait();
            auto const expected = repeating<T>(period, n, [&](std::size_t i) {
                int result = number_of(0, i);
                for (int rank = 1; rank < comm.size(); ++rank) {
                    result = combined(op, result, number_of(rank, i));
                }
                return as<T>(result);
            });
            CAPTURE(joinable::name_of(op));
            CAPTURE(n);
            CHECK(same_bits(values.data(), expected.data(), n));
        }
    }
}

TEST_CASE("every operation of every dtype and size equals a serial computation by TCP, too") {
    run_tcp_everywhere({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) {
        for_each_type([&]<class T>() { check_reductions<T>(comm); });
    });
}

TEST_CASE("booleans, i16, u16 and complex numbers go by TCP, too") {
    run_tcp_everywhere({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) {
        joinable_tests::check_further_types(comm);
    });
}

TEST_CASE("broadcast by TCP copies every element from every root, and a barrier is one") {
    run_tcp_everywhere({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) {
        for (std::size_t const bytes : sizes) {
            for (int root = 0; root < comm.size(); ++root) {
                std::vector<std::int32_t> values(bytes / 4, comm.rank());
                comm.broadcast({values.data(), values.size(), DType::i32}, root).wait();
                CHECK(values == std::vector<std::int32_t>(bytes / 4, root));
            }
            comm.barrier();
        }
    });
}

TEST_CASE("sums by TCP are in rank order, the same bit for bit") {
    // 1e8 + 1 is not exact in float: another order of summation gives another result.
    run_tcp_everywhere({3, 4, 8}, [](TcpCommunicator& comm) {
        auto const part = [](int rank) {
            return rank % 2 == 0 ? 1.0F : (rank == 1 ? 1e8F : -1e8F);
        };
        float sum = part(0);
        for (int rank = 1; rank < comm.size(); ++rank) {
            sum += part(rank);
        }
        for (std::size_t const n : {1U, 15U, 5000U}) {
            std::vector<float> values(n, part(comm.rank()));
            comm.all_reduce({values.data(), n, DType::f32}, ReduceOp::sum).wait();
            CHECK(values == std::vector<float>(n, sum));
        }
    });
}

TEST_CASE("more collectives than may be in flight by TCP are waited for in any order") {
    run_tcp_everywhere({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) {
        for (std::size_t const n : {3U, 5000U}) {
            std::vector<std::vector<double>> buffers(200, std::vector<double>(n));
            std::vector<TcpWork> works;
            for (std::size_t k = 0; k < buffers.size(); ++k) {
                std::fill(buffers[k].begin(), buffers[k].end(), static_cast<double>(k));
                works.push_back(comm.all_reduce({buffers[k].data(), n, DType::f64}, ReduceOp::sum));
            }
            std::size_t wrong = 0;
            for (std::size_t k = buffers.size(); k-- > 0;) { // the last one first
                works[k].wait();
                works[k].wait();
                wrong += works[k].test() ? 0U : 1U;
                wrong += buffers[k] == std::vector<double>(n, static_cast<double>(k) * comm.size())
                             ? 0U
                             : 1U;
            }
            CHECK(wrong == 0);
        }
    });
}

/// The same on all ranks, but what is in the buffers and the order of the waits.
void run_script(TcpCommunicator& comm, std::uint64_t seed) {
    Draw script{seed};
    Draw own{seed * 1000 + static_cast<std::uint64_t>(comm.rank())};
    struct Step {
        bool is_broadcast;
        int root;
        ReduceOp op;
        std::vector<std::uint64_t> values;
    };
    auto const element = [&](int rank, std::size_t step, std::size_t i) {
        std::uint64_t x = seed * 1'000'003 + static_cast<std::size_t>(rank) * 977 + step * 31 + i;
        x *= 0x9e37'79b9'7f4a'7c15U;
        return x ^ (x >> 29U);
    };
    std::vector<Step> steps(script.between(1, 80)); // works refer to them
    std::vector<TcpWork> works;
    for (std::size_t k = 0; k < steps.size(); ++k) {
        Step& step = steps[k];
        step.is_broadcast = script.one_in(3);
        step.root = static_cast<int>(script.below(static_cast<std::size_t>(comm.size())));
        step.op = operations[script.below(std::size(operations))];
        std::size_t const n = script.one_in(8) ? script.below(20'000) : script.below(12);
        for (std::size_t i = 0; i < n; ++i) {
            step.values.push_back(element(comm.rank(), k, i));
        }
        joinable::Buffer const buffer{step.values.data(), n, DType::u64};
        works.push_back(
            step.is_broadcast ? comm.broadcast(buffer, step.root) : comm.all_reduce(buffer, step.op)
        );
        if (own.one_in(4)) {
            works[own.below(works.size())].wait();
        }
        if (own.one_in(4)) {
            (void)works[own.below(works.size())].test();
        }
        if (script.one_in(10)) {
            comm.barrier();
        }
    }
    std::vector<std::size_t> order(steps.size());
    for (std::size_t k = 0; k < order.size(); ++k) {
        order[k] = k;
    }
    for (std::size_t const k : own.shuffled(order)) {
        works[k].wait();
    }
    std::size_t wrong = 0;
    for (std::size_t k = 0; k < steps.size(); ++k) {
        Step const& step = steps[k];
        for (std::size_t i = 0; i < step.values.size(); ++i) {
            std::uint64_t expected = element(step.is_broadcast ? step.root : 0, k, i);
            for (int rank = 1; rank < comm.size() && !step.is_broadcast; ++rank) {
                std::uint64_t const next = element(rank, k, i);
                switch (step.op) {
                case ReduceOp::sum: expected += next; break;
                case ReduceOp::product: expected *= next; break;
                case ReduceOp::min: expected = std::min(expected, next); break;
                case ReduceOp::max: expected = std::max(expected, next); break;
                case ReduceOp::bit_and: expected &= next; break;
                case ReduceOp::bit_or: expected |= next; break;
                }
            }
            wrong += step.values[i] == expected ? 0U : 1U;
        }
    }
    CAPTURE(seed);
    CHECK(wrong == 0);
}

TEST_CASE("random collectives by TCP, waited for in random orders, equal a serial model") {
    run_tcp_everywhere({1, 2, 3, 4, 8}, [](TcpCommunicator& comm) {
        for (std::uint64_t seed = 1; seed <= 12; ++seed) {
            run_script(comm, seed);
        }
    });
}

TEST_CASE("a rank that tests sees its collective complete without waiting") {
    run_tcp_ranks({1, 2, 4}, [](TcpCommunicator& comm) {
        std::vector<std::int64_t> values(10'000, 1);
        TcpWork work = comm.all_reduce({values.data(), values.size(), DType::i64}, ReduceOp::sum);
        while (!work.test()) {
            std::this_thread::yield();
        }
        CHECK(values == std::vector<std::int64_t>(10'000, comm.size()));
    });
}

TEST_CASE("others complete collectives by TCP while rank 0 computes") {
    std::atomic<int> waiting{0};
    run_tcp_ranks({2, 3, 4}, [&](TcpCommunicator& comm) {
        std::array<std::int64_t, 2> values{1, 1};
        TcpWork first = comm.all_reduce({values.data(), 1, DType::i64}, ReduceOp::sum);
        TcpWork second = comm.all_reduce({values.data() + 1, 1, DType::i64}, ReduceOp::sum);
        if (comm.rank() == 0) {
            while (waiting != comm.size() - 1) { // it computes
                std::this_thread::yield();
            }
            waiting = 0;
        } else {
            first.wait();
            second.wait();
            ++waiting;
        }
        first.wait();
        second.wait();
        CHECK(values == std::array<std::int64_t, 2>{comm.size(), comm.size()});
        comm.barrier();
    });
}

TEST_CASE("a rank that does not read holds up nobody by TCP, and loses nothing") {
    // More in flight than all buffers of the kernel: what rank 1 does not read waits at rank 0.
    std::atomic<int> done{0};
    run_tcp_ranks({2, 3}, [&](TcpCommunicator& comm) {
        std::vector<std::vector<float>> buffers(60, std::vector<float>(100'000));
        std::vector<TcpWork> works;
        for (std::size_t k = 0; k < buffers.size(); ++k) {
            std::fill(buffers[k].begin(), buffers[k].end(), comm.rank() == 0 ? 1.0F : 0.0F);
            works.push_back(comm.broadcast({buffers[k].data(), buffers[k].size(), DType::f32}, 0));
        }
        while (comm.rank() == 1 && done != comm.size() - 1) {
            std::this_thread::yield();
        }
        for (TcpWork& work : works) {
            work.wait();
        }
        if (comm.rank() == 1) {
            done = 0;
        } else {
            ++done;
        }
        std::size_t wrong = 0;
        for (std::vector<float> const& buffer : buffers) {
            wrong += buffer == std::vector<float>(100'000, 1.0F) ? 0U : 1U;
        }
        CHECK(wrong == 0);
        comm.barrier();
    });
}

TEST_CASE("misuse is refused before anything is sent, and the ranks go on") {
    run_tcp_ranks({1, 2}, [](TcpCommunicator& comm) {
        float value = 1;
        CHECK_THROWS_WITH_AS(
            (void)comm.broadcast({&value, 1, DType::f32}, comm.size()),
            (comm.size() == 1 ? "root 1 is no rank of a communicator of 1 ranks"
                              : "root 2 is no rank of a communicator of 2 ranks"),
            joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)comm.all_reduce({nullptr, 1, DType::f32}, ReduceOp::sum),
            joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)comm.all_reduce({&value, std::size_t{1} << 29U, DType::f32}, ReduceOp::sum),
            joinable::ContractViolation
        );
        comm.all_reduce({&value, 1, DType::f32}, ReduceOp::sum).wait();
        CHECK(value == static_cast<float>(comm.size()));
    });
}

TEST_CASE("the ranks that have not come are known by TCP before any deadline") {
    std::atomic<int> have_looked{0};
    run_tcp_ranks({2, 3, 8}, [&](TcpCommunicator& comm) {
        have_looked = 0;
        comm.barrier();
        CHECK(comm.missing_ranks().empty());
        int const late = comm.size() - 1;
        std::int32_t value = 1;
        if (comm.rank() == late) {
            while (have_looked != late) {
                std::this_thread::yield();
            }
            comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum).wait();
            return;
        }
        TcpWork work = comm.all_reduce({&value, 1, DType::i32}, ReduceOp::sum);
        std::vector<int> missing = comm.missing_ranks();
        while (missing.size() > 1) { // others are on their way
            std::this_thread::yield();
            missing = comm.missing_ranks();
        }
        CHECK(missing == std::vector{late});
        ++have_looked;
        work.wait();
        CHECK(value == comm.size());
    });
}

} // namespace
