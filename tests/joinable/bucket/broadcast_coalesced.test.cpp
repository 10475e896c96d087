// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/broadcast_coalesced.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/recording_communicator.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::BFloat16;
using joinable::detail::CoalescedBroadcast;

constexpr std::size_t piece_sizes[] = {1, 100, std::size_t{1} << 20U};

TEST_CASE("broadcast_coalesced copies tensors of all dtypes and strides in pieces of any size") {
    for (std::size_t const piece : piece_sizes) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            int const root = comm.size() - 1;
            std::vector<double> a(50, comm.rank());
            std::vector<float> b(21, static_cast<float>(comm.rank()));
            std::vector<double> c(12, comm.rank());
            auto transposed = joinable::as_strided(c, {3, 4}, {1, 3});
            std::vector<AnyView> const tensors{AnyView{a}, AnyView{b}, AnyView{transposed}};
            if (comm.rank() == root) {
                transposed(2, 1) = 77;
            }
            joinable::broadcast_coalesced(comm, tensors, piece, root);
            CHECK(a == std::vector<double>(50, root));
            CHECK(b == std::vector<float>(21, static_cast<float>(root)));
            CHECK(transposed(2, 1) == 77);
            CHECK(transposed(1, 2) == root);
        });
    }
}

TEST_CASE("a plan runs again from any root, with what the tensors hold and where they are then") {
    for (std::size_t const piece : piece_sizes) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            std::vector<std::vector<double>> doubles{
                std::vector<double>(7), {}, std::vector<double>(30)
            };
            std::vector<std::vector<std::int64_t>> counters(3, std::vector<std::int64_t>(1));
            std::vector<BFloat16> small(12);
            CoalescedBroadcast plan{
                joinable::buffers(
                    doubles, counters, std::vector{joinable::as_strided(small, {2, 3}, {6, 2})}
                ),
                piece
            };
            for (int run = 0; run < 2 * comm.size(); ++run) {
                int const root = run % comm.size();
                auto const value = [&](int rank, std::size_t i) {
                    return 100.0 * rank + 10.0 * run + static_cast<double>(i);
                };
                if (run % 3 == 1) {
                    doubles[2] = std::vector<double>(30); // other memory
                }
                for (std::size_t i = 0; i < doubles[2].size(); ++i) {
                    doubles[2][i] = value(comm.rank(), i);
                }
                counters[2][0] = comm.rank() + run;
                small.assign(12, BFloat16{static_cast<float>(comm.rank())});
                small[1] = BFloat16{-1.0F}; // a gap of the view
                plan.run(comm, root);
                for (std::size_t i = 0; i < doubles[2].size(); ++i) {
                    CHECK(doubles[2][i] == value(root, i));
                }
                CHECK(counters[2][0] == root + run);
                CHECK(static_cast<float>(small[10]) == static_cast<float>(root));
                CHECK(static_cast<float>(small[1]) == -1.0F);
            }
        });
    }
}

TEST_CASE("tensors without elements send nothing, neither do no tensors at all") {
    over_ranks({1, 2, 4}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        std::vector<std::vector<double>> empty(3);
        joinable::broadcast_coalesced(comm, empty, 100, 0);
        joinable::broadcast_coalesced(comm, joinable::buffers(), 100, 0);
        CHECK(comm.trace.empty());
    });
}

TEST_CASE("a piece closes with the tensor by which it reaches its size, one dtype in each") {
    over_ranks({1}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        std::vector<std::vector<float>> floats{
            std::vector<float>(10),
            std::vector<float>(20),
            std::vector<float>(5),
            std::vector<float>(0)
        };
        std::vector<std::vector<double>> doubles(1, std::vector<double>(3));
        joinable::broadcast_coalesced(comm, joinable::buffers(floats, doubles), 100, 0);
        CHECK(
            comm.trace ==
            std::vector<std::string>{"broadcast 30 f32", "broadcast 5 f32", "broadcast 3 f64"}
        );
    });
}

/// One rank, whose broadcasts are in flight until somebody waits for them.
struct CountingCommunicator {
    struct Work {
        CountingCommunicator* owner;
        void wait() {
            if (owner != nullptr) {
                --owner->in_flight;
                owner = nullptr;
            }
        }
        bool test() { return owner == nullptr; }
    };
    int in_flight = 0;
    int most_in_flight = 0;
    std::vector<void*> memory = {};

    [[nodiscard]] int rank() const { return 0; }
    [[nodiscard]] int size() const { return 1; }
    Work all_reduce(joinable::Buffer, joinable::ReduceOp) { return {nullptr}; }
    Work broadcast(joinable::Buffer buffer, int) {
        most_in_flight = std::max(most_in_flight, ++in_flight);
        memory.push_back(buffer.data);
        return {this};
    }
    void barrier() {}
};

TEST_CASE("two pieces are in flight, in memory of their own") {
    CountingCommunicator comm;
    std::vector<std::vector<float>> tensors(7, std::vector<float>(10));
    joinable::broadcast_coalesced(comm, tensors, 1, 0);
    CHECK(comm.in_flight == 0);
    CHECK(comm.most_in_flight == 2);
    REQUIRE(comm.memory.size() == 7);
    for (std::size_t p = 2; p < 7; ++p) {
        CHECK(comm.memory[p] == comm.memory[p - 2]);
        CHECK(comm.memory[p] != comm.memory[p - 1]);
    }
}

TEST_CASE("tensors that were resized are refused before anything is sent") {
    over_ranks({1}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        std::vector<std::vector<float>> tensors(2, std::vector<float>(3));
        CoalescedBroadcast plan{joinable::buffers(tensors), 1};
        tensors[1].resize(4);
        CHECK_THROWS_AS(plan.run(comm, 0), joinable::ContractViolation);
        CHECK(comm.trace.empty());
    });
}

} // namespace
