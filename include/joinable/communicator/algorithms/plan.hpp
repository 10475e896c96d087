// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string_view>
#include <vector>

/// @file
/// The all-reduce algorithms, what each of them costs, and which one is the cheapest.

namespace joinable { inline namespace v0 {

/// The algorithm by which messages make an all-reduce. N is the number of ranks, S the bytes of the
/// buffer. All ranks get the same bits from every algorithm. Algorithms differ in the order in
/// which elements are combined:
///
/// | algorithm        | messages, one after another     | order of combination                          |
/// |------------------|---------------------------------|-----------------------------------------------|
/// | star             | 2 (N - 1) of S                  | rank order 0, 1, ..., N - 1                   |
/// | tree             | 2 log2 N of S                   | rank order; brackets are those of a binomial  |
/// |                  |                                 | tree                                          |
/// | double_tree      | 4 (log2 N + k - 1) of S / 2k    | rank order, in the second half of the buffer  |
/// |                  |                                 | 1, ..., N - 1, 0 where N is odd; brackets are |
/// |                  |                                 | those of a binary tree for each half          |
/// | butterfly        | log2 N of S                     | rank order; brackets are those of a binary    |
/// |                  |                                 | tree                                          |
/// | ring             | 2 (N - 1) of S / N              | of block b: b + 1, b + 2, ..., b (mod N)      |
/// | segmented_ring   | (k + 1) (N - 1), of S / kN and  | as ring                                       |
/// |                  | of S / N                        |                                               |
/// | halving_doubling | 2 log2 N of S / 2, S / 4, ...   | as torus with extents of 2                    |
/// | torus            | 2 (d - 1) along each dimension  | as ring along each dimension, the first       |
/// |                  | of d ranks                      | dimension inside                              |
/// | mesh             | as torus                        | as torus, with the ranks of a dimension in    |
/// |                  |                                 | the order 0, 2, 4, ..., 5, 3, 1               |
///
/// A combination of f16 or bf16 is rounded to 16 bits.
///
/// A mesh is for networks without a link from the last rank of a dimension to the first one. Along
/// each dimension a ring goes out by every second rank and back by the others, so no message passes
/// more than one rank, and no link carries two messages in the same direction.
///
/// Butterfly and halving_doubling run over a power of two of ranks, and torus and mesh over the
/// product of their extents. With M surplus ranks, the first M even ranks each give their buffer to the next
/// rank first, and receive the result from it at the end. (Thakur, Rabenseifner and Gropp,
/// "Optimization of Collective Communication Operations in MPICH", 2005.) The other algorithms take
/// any number of ranks.
enum class AllReduceAlgorithm : std::uint8_t {
    star,        ///< all ranks to rank 0 and back: a parameter server
    tree,        ///< reduce and broadcast along a binomial tree
    double_tree, ///< halves along two binary trees, k blocks; a leaf of one is inner in the other
    butterfly,   ///< recursive doubling: partners exchange whole buffers
    ring,        ///< each block passes through all ranks, twice
    segmented_ring,   ///< in k pieces: a piece is combined while the next one travels
    halving_doubling, ///< Rabenseifner's: partners exchange halves, quarters, ...
    torus,            ///< rings along the dimensions of a grid of ranks
    mesh,             ///< the same, where the ends of a dimension are not linked
};

namespace detail {

/// The number of algorithms. Their values start at 0.
inline constexpr std::size_t all_reduce_algorithm_count = 9;

} // namespace detail

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view name_of(AllReduceAlgorithm algorithm) noexcept {
    constexpr std::string_view names[] = {
        "star",
        "tree",
        "double_tree",
        "butterfly",
        "ring",
        "segmented_ring",
        "halving_doubling",
        "torus",
        "mesh",
    };
    static_assert(std::size(names) == detail::all_reduce_algorithm_count);
    return names[static_cast<std::size_t>(algorithm)];
}

/// An algorithm and its parameters. The same on all ranks.
struct AllReducePlan {
    AllReduceAlgorithm algorithm = AllReduceAlgorithm::ring;
    /// The longest message of double_tree, and of the first half of ring, segmented_ring,
    /// halving_doubling, torus and mesh. These then combine a piece while the next one travels. Scratch
    /// memory is two such pieces. 0: messages are not cut, except that segmented_ring cuts its
    /// blocks in two. Scratch memory is then as large as the longest message.
    std::size_t segment_bytes = 0;
    /// The extents of a torus or mesh, starting with the dimension in which consecutive ranks are
    /// neighbours. Empty: torus_extents(ranks).
    std::vector<int> extents = {};

    friend bool operator==(AllReducePlan const&, AllReducePlan const&) = default;
};

/// The cost of messages and combinations on the ranks' machines.
struct MessageCosts {
    double message_seconds = 20e-6;  ///< per message, however short: alpha
    double bytes_per_second = 1e9;   ///< per link, in each direction: B
    double combine_seconds = 0.1e-9; ///< per byte: C
    /// How many times as long a byte takes if all ranks send and receive at once. On a network whose links carry both
    /// directions it is 1. At 2, messages could as well take turns: in shared memory both sides copy one message.
    double both_ways = 1;
    /// The part of a combination or a message, whichever is shorter, that runs while the other one does: 1 where links
    /// work alone, 0 where the ranks' own cores copy.
    double overlap = 1;
    /// How many times as long a byte takes, sent or combined, in pieces of 16 MiB as in those of 1 MiB, which caches
    /// hold; at least 1. Between them it grows with the piece.
    double uncached = 1;

    /// The time of a message of this many bytes: alpha + bytes / B.
    [[nodiscard]] constexpr double message(double bytes) const noexcept {
        return message_seconds + weighed(bytes) / bytes_per_second;
    }
    /// The same while all ranks send and receive.
    [[nodiscard]] constexpr double exchange(double bytes) const noexcept {
        return message_seconds + both_ways * weighed(bytes) / bytes_per_second;
    }
    [[nodiscard]] constexpr double combination(double bytes) const noexcept {
        return weighed(bytes) * combine_seconds;
    }

private:
    [[nodiscard]] constexpr double weighed(double bytes) const noexcept {
        constexpr double cached = 1U << 20U;
        constexpr double far = 1U << 24U;
        double const place = ((std::min)((std::max)(bytes, cached), far) - cached) / (far - cached);
        return bytes * (1 + (uncached - 1) * place);
    }
};

/// The dimensions of a torus of all ranks: their prime factors, ascending. If there are more than
/// `dimensions`, factors are multiplied so that extents are nearly equal. A prime number of ranks
/// makes a ring.
[[nodiscard]] constexpr std::vector<int> torus_extents(int ranks, std::size_t dimensions = 31) {
    std::vector<int> factors;
    for (int factor = 2; ranks > 1;) {
        if (factor > ranks / factor) {
            factor = ranks; // the rest is prime
        }
        if (ranks % factor == 0) {
            factors.push_back(factor);
            ranks /= factor;
        } else {
            ++factor;
        }
    }
    std::vector<int> extents((std::min)(dimensions, factors.size()), 1);
    for (auto factor = factors.rbegin(); factor != factors.rend(); ++factor) {
        *std::min_element(extents.begin(), extents.end()) *= *factor;
    }
    std::sort(extents.begin(), extents.end());
    return extents;
}

namespace detail {

/// The smallest number of rounds in which information from each rank can reach all ranks.
[[nodiscard]] constexpr int rounded_up_log2(int ranks) noexcept {
    return static_cast<int>(std::bit_width(static_cast<unsigned>(ranks) - 1U));
}
[[nodiscard]] constexpr int largest_power_of_two(int ranks) noexcept {
    return static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
}
/// The dimensions of a hypercube; the number of ranks is a power of two.
[[nodiscard]] constexpr std::vector<int> hypercube(int ranks) {
    return std::vector<int>(static_cast<std::size_t>(rounded_up_log2(ranks)), 2);
}
/// The number of segments of `whole`; one if segments have no length.
[[nodiscard]] constexpr std::size_t segments_of(std::size_t whole, std::size_t segment) noexcept {
    return segment == 0 || whole <= segment ? 1 : whole / segment + (whole % segment == 0 ? 0 : 1);
}
[[nodiscard]] constexpr int product_of(std::vector<int> const& extents) noexcept {
    int product = 1;
    for (int const extent : extents) {
        product *= extent;
    }
    return product;
}
/// The length of segments, in the units of `whole`; 0: the buffer is not cut.
[[nodiscard]] constexpr std::size_t
segment_of(AllReducePlan const& plan, std::size_t whole, int ranks, std::size_t unit) noexcept {
    if (plan.segment_bytes == 0 && plan.algorithm == AllReduceAlgorithm::segmented_ring) {
        std::size_t const half_blocks = 2 * static_cast<std::size_t>(ranks);
        return (whole + half_blocks - 1) / half_blocks;
    }
    return plan.segment_bytes == 0 ? 0 : (std::max)(plan.segment_bytes / unit, std::size_t{1});
}
/// The dimensions along which a plan has rings, starting with the first. @pre it has rings
[[nodiscard]] constexpr std::vector<int> rings_of(AllReducePlan const& plan, int ranks) {
    // No conditional operator: with a vector and a temporary one, g++ 12 loses the latter in
    // constants.
    if (plan.algorithm == AllReduceAlgorithm::halving_doubling) {
        return hypercube(largest_power_of_two(ranks));
    }
    if (plan.algorithm != AllReduceAlgorithm::torus && plan.algorithm != AllReduceAlgorithm::mesh) {
        return std::vector<int>(1, ranks);
    }
    if (plan.extents.empty()) {
        return torus_extents(ranks);
    }
    return plan.extents;
}

/// The time to send a block `hops` times and combine it after each, whole or in segments. A segment
/// is combined while the next one travels.
[[nodiscard]] constexpr double combining_seconds(
    double hops, double block, std::size_t segment_bytes, MessageCosts const& costs
) noexcept {
    std::size_t const segments = segments_of(static_cast<std::size_t>(block), segment_bytes);
    double const count = static_cast<double>(segments);
    double const send = costs.exchange(block / count);
    double const combine = costs.combination(block / count);
    double const hidden = costs.overlap * (std::min)(send, combine);
    return segments == 1 ? hops * (send + combine)
                         : hops * count * (send + combine) - (hops * count - 1) * hidden;
}

/// The costs for messages that nothing comes back for at the same time.
[[nodiscard]] constexpr MessageCosts one_way(MessageCosts costs) noexcept {
    costs.both_ways = 1;
    return costs;
}

/// The time in which ranks beyond a power of two, or beyond a torus, give their buffers away and
/// receive results.
[[nodiscard]] constexpr double surplus_seconds(
    double bytes, int ranks, int participants, std::size_t segment_bytes, MessageCosts const& costs
) noexcept {
    return ranks == participants
               ? 0
               : combining_seconds(1, bytes, segment_bytes, one_way(costs)) + costs.message(bytes);
}

/// Rings along each dimension d: sum of 2 (d - 1) (alpha + s / B) + (d - 1) s C, where s is S
/// divided by the extents up to d. With k segments, the first half takes the longer of message and
/// combination for all pieces but the first and the last.
[[nodiscard]] constexpr double ring_seconds(
    std::size_t bytes,
    int ranks,
    std::vector<int> const& extents,
    std::size_t segment_bytes,
    MessageCosts const& costs
) {
    double block = static_cast<double>(bytes);
    double seconds = surplus_seconds(block, ranks, product_of(extents), segment_bytes, costs);
    for (int const extent : extents) {
        block /= extent;
        if (extent > 1) { // on the way back nothing is combined
            seconds += combining_seconds(extent - 1, block, segment_bytes, costs) +
                       (extent - 1) * costs.exchange(block);
        }
    }
    return seconds;
}

/// 2 (D + k - 1) rounds up and as many down, of blocks of S / 2k, where D = log2 N rounded up. An
/// upper bound: not every rank has a message in every round.
[[nodiscard]] constexpr double double_tree_seconds(
    std::size_t bytes, int ranks, std::size_t segment_bytes, MessageCosts const& costs
) noexcept {
    std::size_t const blocks = segments_of(bytes - bytes / 2, segment_bytes);
    double const rounds = 2 * (rounded_up_log2(ranks) + static_cast<double>(blocks) - 1);
    double const block = static_cast<double>(bytes) / 2 / static_cast<double>(blocks);
    return rounds * (costs.exchange(block) + costs.message(block) + costs.combination(block));
}

} // namespace detail

/// The duration of an all-reduce by this plan. It assumes that all ranks begin at once, that links
/// are independent, and that a rank sends one message and receives one at a time. With L = log2 N
/// rounded up:
///
/// | algorithm        | seconds, without surplus ranks                                                |
/// |------------------|-------------------------------------------------------------------------------|
/// | star             | 2 (N - 1) (alpha + S / B) + (N - 1) S C                                       |
/// | tree             | 2 L (alpha + S / B) + L S C                                                   |
/// | butterfly        | L (alpha + S / B + S C)                                                       |
/// | ring             | 2 (N - 1) (alpha + S / NB) + (N - 1) S C / N                                  |
/// | segmented_ring   | as ring, but alpha + S / kNB and S C / kN overlap, in k (N - 1) steps          |
/// | torus, mesh      | the sum of rings along each dimension, of ever smaller blocks                 |
/// | halving_doubling | 2 L alpha + 2 (N - 1) S / NB + (N - 1) S C / N                                |
/// | double_tree      | at most 2 (L + k - 1) (2 (alpha + S / 2kB) + S C / 2k)                         |
///
/// Surplus ranks add 2 (alpha + S / B) + S C. The literature also gives 2 (alpha + S / B) + N S C
/// for a star, whose root then receives all messages at once, and 2 L (alpha + S / B + S C) for a
/// tree, which then also combines on its way down.
///
/// In all of them but star and tree, every rank sends and receives at once: their B is divided by
/// MessageCosts::both_ways, in every second message of double_tree. Pieces overlap as MessageCosts::overlap says, and long ones take longer: see
/// MessageCosts::uncached.
[[nodiscard]] constexpr double all_reduce_seconds(
    AllReducePlan const& plan, std::size_t bytes, int ranks, MessageCosts const& costs
) {
    if (ranks == 1) {
        return 0;
    }
    double const message = costs.message(static_cast<double>(bytes));
    double const combine = costs.combination(static_cast<double>(bytes));
    switch (plan.algorithm) {
    case AllReduceAlgorithm::star: return (ranks - 1) * (2 * message + combine);
    case AllReduceAlgorithm::tree: return detail::rounded_up_log2(ranks) * (2 * message + combine);
    case AllReduceAlgorithm::butterfly: {
        int const participants = detail::largest_power_of_two(ranks);
        return detail::surplus_seconds(static_cast<double>(bytes), ranks, participants, 0, costs) +
               detail::rounded_up_log2(participants) *
                   (costs.exchange(static_cast<double>(bytes)) + combine);
    }
    case AllReduceAlgorithm::double_tree:
        return detail::double_tree_seconds(bytes, ranks, plan.segment_bytes, costs);
    default: break;
    }
    return detail::ring_seconds(
        bytes,
        ranks,
        detail::rings_of(plan, ranks),
        detail::segment_of(plan, bytes, ranks, 1),
        costs
    );
}

/// The fastest plan; among equals, the one with the fewest steps. Its segments are powers of two.
/// It does not know which ranks are neighbours, so a mesh, or a torus of given extents, is the
/// caller's choice.
[[nodiscard]] constexpr AllReducePlan
choose_algorithm(std::size_t bytes, int ranks, MessageCosts const& costs) {
    using enum AllReduceAlgorithm;
    AllReducePlan best{butterfly};
    double least = std::numeric_limits<double>::infinity();
    auto const consider = [&](AllReduceAlgorithm algorithm, std::size_t segment_bytes) {
        AllReducePlan plan{algorithm, segment_bytes, {}};
        double const seconds = all_reduce_seconds(plan, bytes, ranks, costs);
        if (seconds < least) {
            least = seconds;
            best = plan;
        }
        return seconds;
    };
    for (AllReduceAlgorithm const algorithm :
         {butterfly, tree, star, halving_doubling, torus, ring}) {
        consider(algorithm, 0);
    }
    // Segments get smaller as long as that pays: alpha limits it.
    for (AllReduceAlgorithm const algorithm :
         {double_tree, segmented_ring, halving_doubling, torus}) {
        double before = std::numeric_limits<double>::infinity();
        for (std::size_t segment = bytes; segment != 0; segment /= 2) {
            double const seconds = consider(algorithm, segment);
            if (seconds > before) {
                break;
            }
            before = seconds;
        }
    }
    return best;
}

}} // namespace joinable::v0
