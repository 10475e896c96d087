// SPDX-License-Identifier: BSL-1.0
// Every collective over Gloo against closed forms, and sums against loops in rank order.
#include <joinable/gloo.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/closed_forms.hpp>
#include <support/further_types.hpp>
#include <support/gloo_ranks.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::GlooCommunicator;
using joinable::GlooWork;
using joinable::Half;
using joinable::ReduceOp;

static_assert(joinable::AllGathers<GlooCommunicator> && joinable::Reduces<GlooCommunicator>);
static_assert(joinable::Gathers<GlooCommunicator> && joinable::Scatters<GlooCommunicator>);
static_assert(joinable::AllToAlls<GlooCommunicator> && joinable::Splits<GlooCommunicator>);
static_assert(joinable::ScalesScatteredSums<GlooCommunicator>);
static_assert(joinable::Aborts<GlooCommunicator> && joinable::RenewsDeadline<GlooCommunicator>);
static_assert(joinable::ReportsMissing<GlooCommunicator>);

TEST_CASE("every collective over Gloo gives every dtype what a serial program computes") {
    run_gloo_ranks({1, 2, 3, 4}, [](GlooCommunicator& comm) {
        closed_forms::check_all_dtypes(comm, {3});
        closed_forms::check_all<float>(comm, {0, 1});
        closed_forms::check_order_of_all_dtypes(comm);
    });
    run_gloo_ranks({8}, [](GlooCommunicator& comm) { // 8 words go with arrivals, 9 do not
        closed_forms::check_all<std::uint64_t>(comm, {8, 9});
    });
}

TEST_CASE("booleans, i16, u16 and complex numbers go over Gloo, too") {
    run_gloo_ranks({1, 2, 3, 4, 8}, [](GlooCommunicator& comm) { check_further_types(comm); });
}

TEST_CASE("collectives over Gloo that take two steps, and several pieces, give the same") {
    run_gloo_ranks({1, 2, 3, 4}, [](GlooCommunicator& comm) {
        closed_forms::check_all<float>(comm, {10'007});
    });
    run_gloo_ranks({2, 3}, [](GlooCommunicator& comm) {
        closed_forms::check_all<double>(comm, {200'003});
    });
}

/// Numbers whose sum depends on the order of additions.
float uneven(int rank, std::size_t i) {
    constexpr float numbers[] = {1e8F, 1.0F, -1e8F, 3.0F, 0.125F};
    return numbers[(static_cast<std::size_t>(rank) + i) % 5] * static_cast<float>(i % 7 + 1);
}

TEST_CASE("sums over Gloo have the bits of a sum in rank order, whatever their size") {
    run_gloo_ranks({2, 3, 4}, [](GlooCommunicator& comm) {
        for (std::size_t const count : {5U, 4096U, 4097U, 1'000'003U}) {
            CAPTURE(count);
            std::vector<float> buffer(count);
            std::vector<float> expected(count);
            for (std::size_t i = 0; i < count; ++i) {
                buffer[i] = uneven(comm.rank(), i);
                expected[i] = uneven(0, i);
                for (int rank = 1; rank < comm.size(); ++rank) {
                    expected[i] += uneven(rank, i);
                }
            }
            std::vector<float> reduced = buffer;
            joinable::all_reduce(comm, buffer).wait();
            CHECK((buffer == expected));
            joinable::reduce(comm, reduced, ReduceOp::sum, comm.size() - 1).wait();
            if (comm.rank() == comm.size() - 1) {
                CHECK((reduced == expected));
            }
        }
    });
}

TEST_CASE("numbers of 16 bits are rounded once over Gloo") {
    run_gloo_ranks({2, 3, 4}, [](GlooCommunicator& comm) {
        // 2048 + 1 is a tie that Half rounds to 2048, so rounding each addition would lose all ones.
        for (std::size_t const count : {9U, 20'000U}) {
            std::vector<Half> halves(count, Half{comm.rank() == 0 ? 2048.0F : 1.0F});
            joinable::all_reduce(comm, halves).wait();
            CHECK((halves == std::vector<Half>(count, Half{static_cast<float>(2047 + comm.size())}))
            );
        }
    });
}

TEST_CASE("a root's large buffer reaches every rank, from any root") {
    run_gloo_ranks({2, 3, 4}, [](GlooCommunicator& comm) {
        for (int root = 0; root < comm.size(); ++root) {
            std::vector<std::int32_t> values(70'001);
            for (std::size_t i = 0; i < values.size(); ++i) {
                values[i] = comm.rank() == root ? static_cast<std::int32_t>(i) * 3 + root : -1;
            }
            joinable::broadcast(comm, values, root).wait();
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < values.size(); ++i) {
                wrong += values[i] == static_cast<std::int32_t>(i) * 3 + root ? 0U : 1U;
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("many collectives are in flight at a time, more than the hub takes, and end in any order"
) {
    run_gloo_ranks({1, 2, 4}, [](GlooCommunicator& comm) {
        std::vector<std::vector<std::int64_t>> buffers;
        std::vector<GlooWork> works;
        for (std::int64_t i = 0; i < 150; ++i) {
            buffers.emplace_back(i % 3 == 0 ? 5000U : 2U, i + comm.rank());
            works.push_back(joinable::all_reduce(comm, buffers.back()));
        }
        for (std::size_t i = works.size(); i-- > 0;) {
            works[i].wait();
            works[i].wait();
            CHECK(works[i].test());
            auto const ranks = static_cast<std::int64_t>(comm.size());
            CHECK(
                buffers[i].back() == static_cast<std::int64_t>(i) * ranks + ranks * (ranks - 1) / 2
            );
        }
    });
}

TEST_CASE("a work that is only tested completes, and one that is dropped is waited for") {
    run_gloo_ranks({1, 2, 3}, [](GlooCommunicator& comm) {
        std::vector<int> ones(3, 1);
        {
            auto const dropped = joinable::all_reduce(comm, ones);
        }
        CHECK(ones[0] == comm.size());
        auto work = joinable::all_reduce(comm, ones);
        while (!work.test()) {
            std::this_thread::yield();
        }
        CHECK(ones[2] == comm.size() * comm.size());
        std::vector<int> none;
        auto empty = joinable::all_reduce(comm, none);
        while (!empty.progress()) {
            std::this_thread::yield();
        }
    });
}

TEST_CASE("groups split from ranks over Gloo have their own collectives, in the order of keys") {
    run_gloo_ranks({1, 2, 3, 4}, [](GlooCommunicator& comm) {
        GlooCommunicator group = comm.split(comm.rank() % 2, -comm.rank());
        std::vector<int> members;
        for (int rank = comm.size() - 1; rank >= 0; --rank) {
            if (rank % 2 == comm.rank() % 2) {
                members.push_back(rank);
            }
        }
        REQUIRE(group.size() == static_cast<int>(members.size()));
        std::vector<int> found(members.size());
        int const own = comm.rank();
        group.all_gather({&own, 1, DType::i32}, {found.data(), found.size(), DType::i32}).wait();
        CHECK(found == members);
        std::vector<int> all{1}; // the parent goes on beside the group
        joinable::all_reduce(comm, all).wait();
        CHECK(all[0] == comm.size());
        GlooCommunicator half = group.split(0, group.rank());
        CHECK(half.rank() == group.rank());
        half.barrier();
    });
}

} // namespace
