// SPDX-License-Identifier: BSL-1.0
// What algorithms cost by the formulas of textbooks, and which one is chosen. How the formulas compare with
// the steps is in simulator/simulator.test.cpp.
#include <joinable/communicator/algorithms/plan.hpp>

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace {

using enum joinable::AllReduceAlgorithm;
using joinable::all_reduce_seconds;
using joinable::AllReduceAlgorithm;
using joinable::AllReducePlan;
using joinable::choose_algorithm;
using joinable::MessageCosts;
using joinable::torus_extents;

/// Numbers of which all sums here are exact: a message of n bytes takes 1 + n seconds, a combination 2 n.
constexpr MessageCosts simple{1.0, 1.0, 2.0};

constexpr double seconds(AllReduceAlgorithm algorithm, std::size_t bytes, int ranks) {
    return all_reduce_seconds({algorithm, 0, {}}, bytes, ranks, simple);
}

static_assert(seconds(star, 16, 8) == 7 * (2 * 17 + 32));
static_assert(seconds(tree, 16, 8) == 3 * (2 * 17 + 32));
static_assert(seconds(tree, 16, 5) == seconds(tree, 16, 8)); // one more rank is one more round
static_assert(seconds(butterfly, 16, 8) == 3 * (17 + 32));
static_assert(seconds(butterfly, 16, 9) == 3 * (17 + 32) + 2 * 17 + 32);
static_assert(seconds(ring, 16, 8) == 2 * 7 * (1 + 2) + 7 * 4);
static_assert(seconds(halving_doubling, 16, 8) == 2 * (9 + 5 + 3) + 2 * (8 + 4 + 2));
static_assert(seconds(torus, 16, 8) == seconds(halving_doubling, 16, 8));
static_assert(
    all_reduce_seconds({torus, 0, {4, 2}}, 16, 8, simple) == 2 * 3 * 5 + 3 * 8 + 2 * 3 + 4
);
static_assert(
    all_reduce_seconds({mesh, 0, {4, 2}}, 16, 8, simple) == 2 * 3 * 5 + 3 * 8 + 2 * 3 + 4
);
// Two pieces of 1 byte: the first message, 13 combinations that outlast messages, and the last one.
static_assert(seconds(segmented_ring, 16, 8) == 2 + 13 * 2 + 2 + 7 * 3);
static_assert(all_reduce_seconds({ring, 1, {}}, 16, 8, simple) == seconds(segmented_ring, 16, 8));
static_assert(
    all_reduce_seconds({double_tree, 2, {}}, 16, 8, simple) == 2 * (3 + 4 - 1) * (2 * 3 + 4)
);
static_assert(seconds(butterfly, 16, 1) == 0);

/// As `simple`, but a byte of an exchange takes 3 seconds, and half of a combination or message is hidden.
constexpr MessageCosts shared_cores{1.0, 1.0, 2.0, 3.0, 0.5};

constexpr double shared_seconds(AllReduceAlgorithm algorithm, std::size_t bytes, int ranks) {
    return all_reduce_seconds({algorithm, 0, {}}, bytes, ranks, shared_cores);
}

static_assert(shared_seconds(star, 16, 8) == seconds(star, 16, 8)); // one message at a time
static_assert(shared_seconds(tree, 16, 8) == seconds(tree, 16, 8));
static_assert(shared_seconds(butterfly, 16, 8) == 3 * (1 + 3 * 16 + 32));
static_assert(shared_seconds(butterfly, 16, 9) == 3 * (1 + 3 * 16 + 32) + 2 * 17 + 32);
static_assert(shared_seconds(ring, 16, 8) == 2 * 7 * (1 + 3 * 2) + 7 * 4);
static_assert(shared_seconds(halving_doubling, 16, 8) == 2 * (25 + 13 + 7) + 2 * (8 + 4 + 2));
// 14 pieces of 1 byte, with messages of 4 s and combinations of 2, of which 1 s is hidden but for the first one.
static_assert(shared_seconds(segmented_ring, 16, 8) == 14 * (4 + 2) - 13 * 1 + 7 * 7);
static_assert(
    all_reduce_seconds({double_tree, 2, {}}, 16, 8, shared_cores) == 2 * (3 + 4 - 1) * (7 + 3 + 4)
);

/// Bytes of pieces of 16 MiB and more take 3 times as long, and those of 8.5 MiB, half way from 1 MiB, twice.
constexpr MessageCosts caches{0.0, 1.0, 1.0, 1.0, 1.0, 3.0};
constexpr double mib = 1U << 20U;
static_assert(caches.message(mib) == mib && caches.combination(mib / 2) == mib / 2);
static_assert(caches.message(8.5 * mib) == 2 * 8.5 * mib);
static_assert(caches.combination(16 * mib) == 3 * 16 * mib);
static_assert(caches.exchange(32 * mib) == 3 * 32 * mib);
// So long buffers are cut into pieces that caches hold, also where nothing overlaps.
static_assert(
    choose_algorithm(1U << 25U, 2, {1e-6, 1e9, 1e-9, 1, 0, 3}).segment_bytes == 1U << 20U
);
static_assert(choose_algorithm(1U << 25U, 2, {1e-6, 1e9, 1e-9, 1, 0, 1}).segment_bytes == 0);

TEST_CASE("a torus of all ranks is made of their prime factors") {
    CHECK(torus_extents(1).empty());
    CHECK(torus_extents(7) == std::vector{7});
    CHECK(torus_extents(360) == std::vector{2, 2, 2, 3, 3, 5});
    CHECK(torus_extents(64, 2) == std::vector{8, 8});
    CHECK(torus_extents(1000, 3) == std::vector{10, 10, 10});
    CHECK(torus_extents(12, 2) == std::vector{3, 4});
    CHECK(torus_extents(2 * 46'337, 2) == std::vector{2, 46'337});
    CHECK(torus_extents(2'147'483'647) == std::vector{2'147'483'647});
}

TEST_CASE("short messages are exchanged whole, long ones in parts") {
    MessageCosts const costs{20e-6, 1e9, 0.1e-9};
    CHECK(choose_algorithm(56, 64, costs).algorithm == butterfly);
    CHECK(choose_algorithm(56, 65, costs).algorithm == butterfly);
    CHECK(choose_algorithm(100'000'000, 64, costs).algorithm == halving_doubling);
    CHECK(choose_algorithm(100'000'000, 60, costs).algorithm == torus);
    CHECK(choose_algorithm(100'000'000, 7, costs).algorithm == segmented_ring);
    CHECK(choose_algorithm(100'000, 7, {20e-6, 1e9, 0}).algorithm == torus); // which is a ring
    // A prime number of ranks makes no torus, and a long ring has many messages.
    CHECK(choose_algorithm(100'000'000, 9973, costs).algorithm == double_tree);
    CHECK(choose_algorithm(1'000'000, 1, costs).algorithm == butterfly);
    CHECK(choose_algorithm(0, 5, costs).algorithm == butterfly);
}

TEST_CASE("the chosen plan is the cheapest of all") {
    MessageCosts const costs{50e-6, 10e9, 0.2e-9};
    for (int const ranks : {1, 2, 3, 4, 7, 8, 12, 17, 64, 100, 1000}) {
        for (std::size_t const bytes : {0U, 8U, 4096U, 1U << 20U, 100U << 20U}) {
            double const least =
                all_reduce_seconds(choose_algorithm(bytes, ranks, costs), bytes, ranks, costs);
            for (std::size_t number = 0; number < joinable::detail::all_reduce_algorithm_count;
                 ++number) {
                for (std::size_t const segment_bytes : {0U, 1U << 16U, 1U << 20U}) {
                    AllReducePlan const other{
                        static_cast<AllReduceAlgorithm>(number), segment_bytes, {}
                    };
                    // Segments are halved from one that depends on the bytes: others may be a little better.
                    double const slack = segment_bytes == 0 ? 1 : 1.05;
                    CHECK_MESSAGE(
                        least <= slack * all_reduce_seconds(other, bytes, ranks, costs),
                        name_of(other.algorithm),
                        " of ",
                        bytes,
                        " bytes over ",
                        ranks
                    );
                }
            }
        }
    }
}

} // namespace
