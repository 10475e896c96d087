// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/communicator/algorithms/detail/message_step.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The elements [begin, end) of a collective's buffer.
struct ElementRange {
    std::size_t begin = 0;
    std::size_t end = 0;

    [[nodiscard]] constexpr std::size_t size() const noexcept { return end - begin; }
    [[nodiscard]] constexpr bool is_empty() const noexcept { return begin == end; }
    /// Part `index` of `parts` consecutive parts. If the parts cannot be equal, the first ones have
    /// one more element than the others.
    [[nodiscard]] constexpr ElementRange part(std::size_t index, std::size_t parts) const noexcept {
        std::size_t const least = size() / parts;
        std::size_t const longer = size() % parts;
        std::size_t const first = begin + least * index + (std::min)(index, longer);
        return {first, first + least + (index < longer ? 1 : 0)};
    }

    friend constexpr bool operator==(ElementRange const&, ElementRange const&) = default;
};

/// One side of a message: these elements travel to or from rank `peer`.
struct Transfer {
    static constexpr int nobody = -1;   ///< as a peer: no message
    static constexpr int in_place = -1; ///< as a slot: the elements in the buffer itself

    int peer = nobody;
    int slot = in_place; ///< a receive may use scratch memory instead: slot 0 or 1
    ElementRange range = {};

    [[nodiscard]] constexpr bool is_none() const noexcept { return peer == nobody; }
};

/// Combines a slot into these elements of the buffer.
struct Combination {
    int slot = 0;
    bool slot_is_left = false; ///< the slot's elements are the left operands
    ElementRange range = {};

    [[nodiscard]] constexpr bool is_none() const noexcept { return range.is_empty(); }
};

/// One step of one rank in a collective: at most one send, at most one receive and at most one
/// combination. They use different elements and slots, so they may run at the same time. The next
/// step begins when all of them have ended.
///
/// In every schedule of this library, the steps of all ranks belong to rounds. In a round each rank
/// sends at most one message and receives at most one, and both sides of a message are in the same
/// round. If ranks start both messages of a step before they wait for either, they never deadlock.
struct MessageStep {
    Transfer send = {};
    Transfer receive = {};
    Combination combine = {};
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/algorithms/detail/double_tree.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Two binary trees over the same ranks, and the rounds in which blocks travel down them. A rank
/// has at most two children in both trees together. (Sanders, Speck and Träff, "Two-tree algorithms
/// for full bandwidth broadcast, reduction and scan", 2009.)
///
/// A tree is over positions. Position 0 is the root and has one child. The others are numbered in
/// order, so odd positions are leaves. Tree 0 has rank r at position r. Tree 1 has it at position N
/// - 1 - r if N is even, and at r - 1 (mod N) if N is odd. Leaves of one tree then have children in
/// the other.
///
/// Each edge goes from a parent to a child, and has colour 0 or 1. Edges that leave a rank differ
/// in colour, as do edges that reach it. A block travels down an edge in a round of the edge's
/// colour, and the next block two rounds later. A rank therefore sends at most one block in a
/// round, and receives at most one.
class DoubleTree {
public:
    static constexpr int trees = 2;

    explicit DoubleTree(int ranks) : ranks_{ranks} {
        for (auto& starts : starts_) {
            starts.assign(static_cast<std::size_t>(ranks), -1);
        }
        paint();
        start();
    }

    [[nodiscard]] int ranks() const noexcept { return ranks_; }
    [[nodiscard]] int root(int tree) const noexcept { return rank_at(tree, 0); }
    /// Transfer::nobody for the root.
    [[nodiscard]] int parent(int tree, int rank) const noexcept {
        int const position = position_of(tree, rank);
        return position == 0 ? Transfer::nobody : rank_at(tree, parent_of(position));
    }
    /// Transfer::nobody for each child that is missing.
    [[nodiscard]] std::array<int, 2> children(int tree, int rank) const noexcept {
        int const position = position_of(tree, rank);
        std::array<int, 2> found{Transfer::nobody, Transfer::nobody};
        int const half = position == 0 ? 0 : lowest_bit(position) / 2;
        if (position == 0) {
            found[0] = ranks_ == 1 ? Transfer::nobody : rank_at(tree, top());
        } else if (half != 0) {
            found[0] = rank_at(tree, position - half);
            for (int right = half; right != 0 && found[1] == Transfer::nobody; right /= 2) {
                found[1] =
                    position + right < ranks_ ? rank_at(tree, position + right) : Transfer::nobody;
            }
        }
        return found;
    }
    /// Whether `rank` comes before `other` in the order of operands. That is the order of ranks,
    /// except that rank 0 is the last one in tree 1 if N is odd.
    [[nodiscard]] bool comes_before(int tree, int rank, int other) const noexcept {
        auto const place = [&](int of) {
            return tree == 1 && ranks_ % 2 == 1 && of == 0 ? ranks_ : of;
        };
        return place(rank) < place(other);
    }
    /// The round in which the first block reaches `rank` from its parent; its lowest bit is the colour.
    [[nodiscard]] int start(int tree, int rank) const noexcept {
        return starts_[static_cast<std::size_t>(tree)][static_cast<std::size_t>(rank)];
    }
    /// The number of rounds until the first block has reached all ranks.
    [[nodiscard]] int rounds() const noexcept { return rounds_; }

private:
    /// The edge from the parent of `rank` to it. A negative rank: no edge.
    struct Edge {
        int tree = 0;
        int rank = Transfer::nobody;
    };

    static constexpr int lowest_bit(int position) noexcept { return position & -position; }
    /// The highest position that is a power of two: the child of the root.
    [[nodiscard]] int top() const noexcept {
        return static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks_ - 1)));
    }
    [[nodiscard]] int position_of(int tree, int rank) const noexcept {
        if (tree == 0) {
            return rank;
        }
        return ranks_ % 2 == 0 ? ranks_ - 1 - rank : (rank == 0 ? ranks_ : rank) - 1;
    }
    [[nodiscard]] int rank_at(int tree, int position) const noexcept {
        if (tree == 0) {
            return position;
        }
        if (ranks_ % 2 == 0) {
            return ranks_ - 1 - position;
        }
        return position + 1 == ranks_ ? 0 : position + 1;
    }
    /// @pre position != 0
    [[nodiscard]] int parent_of(int position) const noexcept {
        int const bit = lowest_bit(position);
        int const in_full_tree = (position ^ bit) | bit * 2;
        return in_full_tree < ranks_ ? in_full_tree : position ^ bit;
    }

    [[nodiscard]] std::int32_t& colour(Edge edge) noexcept {
        return starts_[static_cast<std::size_t>(edge.tree)][static_cast<std::size_t>(edge.rank)];
    }
    /// The other edge that reaches the same rank.
    [[nodiscard]] Edge other_to(Edge edge) const noexcept {
        int const tree = 1 - edge.tree;
        return {tree, root(tree) == edge.rank ? Transfer::nobody : edge.rank};
    }
    /// The other edge that leaves the same rank.
    [[nodiscard]] Edge other_from(Edge edge) const noexcept {
        int const from = parent(edge.tree, edge.rank);
        for (int tree = 0; tree < trees; ++tree) {
            for (int const child : children(tree, from)) {
                if (child != Transfer::nobody && (tree != edge.tree || child != edge.rank)) {
                    return {tree, child};
                }
            }
        }
        return {};
    }
    /// Edges are adjacent if they leave or reach the same rank. They form paths, and rings of even
    /// length, along which colours alternate.
    void paint() {
        for (int tree = 0; tree < trees; ++tree) {
            for (int rank = 0; rank < ranks_; ++rank) {
                Edge const edge{tree, rank};
                if (root(tree) != rank && colour(edge) < 0) {
                    colour(edge) = 0;
                    paint_path(edge, true);
                    paint_path(edge, false);
                }
            }
        }
    }
    void paint_path(Edge edge, bool by_receiver) {
        for (std::int32_t next = 1;; next = 1 - next, by_receiver = !by_receiver) {
            edge = by_receiver ? other_to(edge) : other_from(edge);
            if (edge.rank == Transfer::nobody || colour(edge) >= 0) {
                return;
            }
            colour(edge) = next;
        }
    }
    /// A child's first round is the first one of its colour after its parent's. Parents come first,
    /// because the lowest set bit of their positions is higher.
    void start() {
        for (int tree = 0; tree < trees && ranks_ > 1; ++tree) {
            for (int bit = top(); bit != 0; bit /= 2) {
                for (int position = bit; position < ranks_; position += 2 * bit) {
                    Edge const edge{tree, rank_at(tree, position)};
                    int const after = colour({tree, rank_at(tree, parent_of(position))}) + 1;
                    colour(edge) = after + ((after ^ colour(edge)) & 1);
                    rounds_ = colour(edge) < rounds_ ? rounds_ : colour(edge) + 1;
                }
            }
        }
    }

    int ranks_;
    int rounds_ = 0;
    std::array<std::vector<std::int32_t>, trees>
        starts_; ///< first the colours, then the rounds; roots: -1
};

/// The steps of one rank along two trees. Each tree carries one half of the buffer, in blocks.
class DoubleTreeSteps {
public:
    DoubleTreeSteps() = default;
    DoubleTreeSteps(
        DoubleTree const& trees, int rank, std::size_t count, std::int64_t blocks
    ) noexcept
        : whole_{0, count}, blocks_{blocks}, rounds_{trees.rounds() + 2 * (blocks - 1)} {
        for (int tree = 0; tree < DoubleTree::trees; ++tree) {
            if (int const parent = trees.parent(tree, rank); parent != Transfer::nobody) {
                add(from_parents_, {parent, tree, trees.start(tree, rank)});
            }
            for (int const child : trees.children(tree, rank)) {
                if (child != Transfer::nobody) {
                    bool const is_left = trees.comes_before(tree, child, rank);
                    add(to_children_, {child, tree, trees.start(tree, child), is_left});
                }
            }
        }
    }

    /// The roots' blocks travel to all ranks.
    [[nodiscard]] bool descend(std::int64_t round, MessageStep& step) const noexcept {
        step.receive = block_of(from_parents_, round, Transfer::in_place, false);
        step.send = block_of(to_children_, round, Transfer::in_place, false);
        return round < rounds_;
    }
    /// Blocks are combined at the roots. They travel the same edges backwards, in the opposite
    /// order of rounds.
    [[nodiscard]] bool climb(std::int64_t number, MessageStep& step) const noexcept {
        std::int64_t const round = rounds_ - 1 - number / 2;
        if (round < 0) {
            return false;
        }
        Transfer const received = block_of(to_children_, round, 0, true);
        if (number % 2 == 0) {
            step.receive = received;
            step.send = block_of(from_parents_, round, Transfer::in_place, true);
        } else if (!received.is_none()) {
            step.combine = {0, to_children_[parity_of(round)].is_left, received.range};
        }
        return true;
    }

private:
    struct Edge {
        int peer = Transfer::nobody;
        int tree = 0;
        int start = 0;
        bool is_left = false; ///< the child's elements are the left operands
    };
    using Edges = std::array<Edge, 2>; ///< by colour

    static void add(Edges& edges, Edge edge) noexcept { edges[parity_of(edge.start)] = edge; }
    static std::size_t parity_of(std::int64_t round) noexcept {
        return static_cast<std::size_t>(round & 1);
    }
    /// The block that travels down an edge in a round, if any. In backward rounds the first block
    /// comes last.
    [[nodiscard]] Transfer
    block_of(Edges const& edges, std::int64_t round, int slot, bool is_backwards) const noexcept {
        Edge const& edge = edges[parity_of(round)];
        std::int64_t const block = (round - edge.start) / 2;
        if (edge.peer == Transfer::nobody || round < edge.start || block >= blocks_) {
            return {};
        }
        ElementRange const range =
            whole_.part(static_cast<std::size_t>(edge.tree), 2)
                .part(
                    static_cast<std::size_t>(is_backwards ? blocks_ - 1 - block : block),
                    static_cast<std::size_t>(blocks_)
                );
        return range.is_empty() ? Transfer{} : Transfer{edge.peer, slot, range};
    }

    ElementRange whole_;
    std::int64_t blocks_ = 1; ///< in each half
    std::int64_t rounds_ = 0; ///< to travel down the trees
    Edges from_parents_;
    Edges to_children_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/algorithms/plan.hpp

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

// ---- joinable/communicator/algorithms/detail/ring.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The ranks that take part in an algorithm, numbered from 0. The first surplus ranks are the even
/// ones; the next rank takes part for each of them.
struct Folding {
    int ranks = 1;
    int count = 1;

    [[nodiscard]] constexpr int surplus() const noexcept { return ranks - count; }
    [[nodiscard]] constexpr int rank_of(int index) const noexcept {
        return index < surplus() ? 2 * index + 1 : index + surplus();
    }
    /// Negative for a surplus rank.
    [[nodiscard]] constexpr int index_of(int rank) const noexcept {
        if (rank >= 2 * surplus()) {
            return rank - surplus();
        }
        return rank % 2 == 1 ? rank / 2 : -1;
    }
};

/// Rings of participants. Each has `extent` participants that are `stride` apart. An extent of 2
/// makes partners, which exchange halves. A folded ring has the even participants in ascending order,
/// then the odd ones in descending order.
struct Ring {
    int stride = 1;
    int extent = 1;
    bool is_folded = false;

    [[nodiscard]] constexpr int position_of(int index) const noexcept {
        int const place = place_of(index);
        return !is_folded ? place : place % 2 == 0 ? place / 2 : extent - 1 - place / 2;
    }
    /// The participant at another position of the ring of `index`.
    [[nodiscard]] constexpr int at(int position, int index) const noexcept {
        int const place = !is_folded              ? position
                          : 2 * position < extent ? 2 * position
                                                  : 2 * (extent - 1 - position) + 1;
        return index + (place - place_of(index)) * stride;
    }

private:
    [[nodiscard]] constexpr int place_of(int index) const noexcept {
        return index / stride % extent;
    }
};

/// Blocks that arrive one after another, each in pieces, and are combined. It tells which step does
/// what.
///
/// A whole block is combined before it is sent on. A piece of a block is combined while the next
/// piece travels, and is sent on after that, because there are at least two.
class Pieces {
public:
    Pieces() = default;
    Pieces(std::int64_t blocks, std::size_t longest_block, std::size_t segment) noexcept
        : of_block_{static_cast<std::int64_t>(segments_of(longest_block, segment))},
          count_{blocks * of_block_} {}

    [[nodiscard]] std::int64_t count() const noexcept { return count_; }
    [[nodiscard]] std::int64_t steps() const noexcept {
        return of_block_ == 1 ? 2 * count_ : count_ + (count_ == 0 ? 0 : 1);
    }
    /// The piece that travels in a step; negative: none.
    [[nodiscard]] std::int64_t received_in(std::int64_t step) const noexcept {
        if (of_block_ == 1) {
            return step % 2 == 0 ? step / 2 : -1;
        }
        return step < count_ ? step : -1;
    }
    /// The piece that is combined in a step; negative: none.
    [[nodiscard]] std::int64_t combined_in(std::int64_t step) const noexcept {
        if (of_block_ == 1) {
            return step % 2 == 0 ? -1 : step / 2;
        }
        return step - 1;
    }
    [[nodiscard]] std::int64_t block_of(std::int64_t piece) const noexcept {
        return of_block_ == 1 ? piece : piece / of_block_;
    }
    [[nodiscard]] int slot_of(std::int64_t piece) const noexcept {
        return of_block_ == 1 ? 0 : static_cast<int>(piece % 2);
    }
    /// A piece of its block.
    [[nodiscard]] ElementRange range(ElementRange block, std::int64_t piece) const noexcept {
        return of_block_ == 1 ? block
                              : block.part(
                                    static_cast<std::size_t>(piece % of_block_),
                                    static_cast<std::size_t>(of_block_)
                                );
    }
    [[nodiscard]] Transfer
    transfer(int peer, int slot, ElementRange block, std::int64_t piece) const noexcept {
        ElementRange const elements = range(block, piece);
        return elements.is_empty() ? Transfer{} : Transfer{peer, slot, elements};
    }

private:
    std::int64_t of_block_ = 1;
    std::int64_t count_ = 0;
};

/// The steps of one participant along its ring. A range has one block for each position.
class RingSteps {
public:
    RingSteps() = default;
    RingSteps(
        Ring ring, Folding folding, int index, ElementRange range, std::size_t segment
    ) noexcept
        : extent_{ring.extent}, position_{ring.position_of(index)},
          next_{folding.rank_of(ring.at(modulo(position_ + 1), index))},
          last_{folding.rank_of(ring.at(modulo(position_ + extent_ - 1), index))},
          begin_{range.begin}, least_{range.size() / static_cast<std::size_t>(extent_)},
          longer_{range.size() % static_cast<std::size_t>(extent_)},
          pieces_{extent_ - 1, least_ + (longer_ == 0 ? 0 : 1), segment} {}

    /// Combines block p of the range over the ring; the result is at position p. Each block starts
    /// at the next position and is combined with the block of each rank that it reaches.
    [[nodiscard]] bool scatter(std::int64_t number, MessageStep& step) const noexcept {
        if (number >= pieces_.steps()) {
            return false;
        }
        if (std::int64_t const piece = pieces_.received_in(number); piece >= 0) {
            std::int64_t const block = position_ - pieces_.block_of(piece);
            step.send = pieces_.transfer(next_, Transfer::in_place, block_at(block - 1), piece);
            step.receive =
                pieces_.transfer(last_, pieces_.slot_of(piece), block_at(block - 2), piece);
        }
        if (std::int64_t const piece = pieces_.combined_in(number); piece >= 0) {
            ElementRange const block = block_at(position_ - pieces_.block_of(piece) - 2);
            step.combine = {pieces_.slot_of(piece), true, pieces_.range(block, piece)};
        }
        return true;
    }
    /// Distributes block p of position p to all positions.
    [[nodiscard]] bool gather(std::int64_t number, MessageStep& step) const noexcept {
        if (number >= extent_ - 1) {
            return false;
        }
        ElementRange const sent = block_at(position_ - number);
        ElementRange const received = block_at(position_ - number - 1);
        step.send = sent.is_empty() ? Transfer{} : Transfer{next_, Transfer::in_place, sent};
        step.receive =
            received.is_empty() ? Transfer{} : Transfer{last_, Transfer::in_place, received};
        return true;
    }

private:
    [[nodiscard]] int modulo(int position) const noexcept {
        return position >= extent_ ? position - extent_ : position;
    }
    /// @pre -extent <= position < extent
    [[nodiscard]] ElementRange block_at(std::int64_t position) const noexcept {
        auto const index = static_cast<std::size_t>(position < 0 ? position + extent_ : position);
        std::size_t const first = begin_ + least_ * index + (std::min)(index, longer_);
        return {first, first + least_ + (index < longer_ ? 1 : 0)};
    }

    int extent_ = 1;
    int position_ = 0;
    int next_ = 0;
    int last_ = 0;
    std::size_t begin_ = 0;
    std::size_t least_ = 0;  ///< elements of a shorter block
    std::size_t longer_ = 0; ///< the number of blocks with one more
    Pieces pieces_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/algorithms/detail/tree.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The steps of one rank along a tree in which whole buffers travel.
///
/// Ranks are numbered from 0, starting with the root. The parent's number is the rank's number
/// without its lowest non-zero digit, in base `radix`: 2 makes a binomial tree, N a star.
class TreeSteps {
public:
    TreeSteps() = default;
    TreeSteps(std::int64_t radix, int ranks, int root, int rank, std::size_t count) noexcept
        : radix_{radix}, ranks_{ranks}, root_{root}, number_{(rank + ranks - root) % ranks},
          whole_{0, count} {
        std::int64_t power = 1;
        for (; power < ranks && number_ / power % radix == 0; power *= radix) {
            children_ += (std::min)((ranks - 1 - number_) / power, radix - 1);
        }
        if (number_ != 0) {
            parent_ = rank_of(number_ - number_ / power % radix * power);
        }
    }

    /// Combines the buffers of all ranks at the root, those of children in ascending order.
    [[nodiscard]] bool climb(std::int64_t step_number, MessageStep& step) const noexcept {
        if (step_number < 2 * children_) {
            if (step_number % 2 == 0) {
                step.receive = whole_with(child(step_number / 2), 0);
            } else {
                step.combine = {0, false, whole_};
            }
            return true;
        }
        if (parent_ != Transfer::nobody) {
            step.send = whole_with(parent_);
        }
        return parent_ != Transfer::nobody && step_number == 2 * children_;
    }
    /// Sends the root's buffer to all ranks. The last children come first, because they have the
    /// most to do.
    [[nodiscard]] bool descend(std::int64_t step_number, MessageStep& step) const noexcept {
        std::int64_t const received = parent_ != Transfer::nobody ? 1 : 0;
        if (step_number < received) {
            step.receive = whole_with(parent_);
            return true;
        }
        std::int64_t const next = children_ - 1 - (step_number - received);
        if (next >= 0) {
            step.send = whole_with(child(next));
        }
        return next >= 0;
    }

private:
    [[nodiscard]] int rank_of(std::int64_t number) const noexcept {
        return static_cast<int>((number + root_) % ranks_);
    }
    [[nodiscard]] int child(std::int64_t index) const noexcept {
        std::int64_t power = 1;
        for (; index >= radix_ - 1; index -= radix_ - 1) {
            power *= radix_;
        }
        return rank_of(number_ + (index + 1) * power);
    }
    [[nodiscard]] Transfer whole_with(int peer, int slot = Transfer::in_place) const noexcept {
        return whole_.is_empty() ? Transfer{} : Transfer{peer, slot, whole_};
    }

    std::int64_t radix_ = 2;
    std::int64_t ranks_ = 1;
    std::int64_t root_ = 0;
    std::int64_t number_ = 0; ///< of this rank
    std::int64_t children_ =
        0; ///< radix - 1 for each digit below the lowest one that is not 0, if there are as many
    int parent_ = Transfer::nobody;
    ElementRange whole_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/algorithms/detail/message_schedule.hpp

namespace joinable { inline namespace v0 { namespace detail {

class MessageSteps;

/// The steps of all ranks in one collective by messages, as consecutive phases. It moves no data: a
/// communicator runs the steps of its own rank, and a simulator those of all ranks. The same
/// arguments make the same schedule on every rank.
class MessageSchedule {
public:
    /// For `count` elements of `element_bytes` each, in place. A schedule needs memory for its
    /// phases; only double_tree needs tables of all ranks.
    /// @throws ContractViolation  the product of the extents of a torus or mesh is less than half
    ///                            the ranks, or more than the ranks.
    [[nodiscard]] static MessageSchedule
    all_reduce(AllReducePlan const& plan, int ranks, std::size_t count, std::size_t element_bytes) {
        MessageSchedule made{ranks, count};
        std::size_t const segment = detail::segment_of(plan, count, ranks, element_bytes);
        switch (plan.algorithm) {
        case AllReduceAlgorithm::star: made.add_tree((std::max)(ranks, 2)); break;
        case AllReduceAlgorithm::tree: made.add_tree(2); break;
        case AllReduceAlgorithm::double_tree: made.add_double_tree(segment); break;
        case AllReduceAlgorithm::butterfly: made.add_butterfly(); break;
        default: made.add_rings(plan, segment); break;
        }
        return made;
    }
    /// For `count` elements from `root`, along a binomial tree: one round for each power of two
    /// below N.
    [[nodiscard]] static MessageSchedule broadcast(int ranks, std::size_t count, int root) {
        MessageSchedule made{ranks, count};
        made.add({Phase::Kind::down, 2, root});
        return made;
    }
    /// For `count` equal parts from each rank, along a ring. The parts lie in the buffer in rank
    /// order.
    [[nodiscard]] static MessageSchedule all_gather(int ranks, std::size_t count) {
        MessageSchedule made{ranks, count * static_cast<std::size_t>(ranks)};
        made.rings_ = {{1, ranks}};
        made.add({Phase::Kind::gather, 0});
        return made;
    }

    [[nodiscard]] int ranks() const noexcept { return ranks_; }
    [[nodiscard]] std::size_t count() const noexcept { return count_; }
    /// The number of elements in a slot of scratch memory.
    [[nodiscard]] std::size_t slot_count() const noexcept { return slot_count_; }
    /// The number of slots into which steps receive.
    [[nodiscard]] int slots() const noexcept { return slots_; }
    /// The steps of one rank, starting with the first. They refer to the schedule.
    [[nodiscard]] MessageSteps steps(int rank) const noexcept;

private:
    friend class MessageSteps;

    /// A phase of a collective, in which all ranks run the same algorithm.
    struct Phase {
        enum class Kind : std::uint8_t {
            fold,   ///< surplus ranks give their buffers to participants
            unfold, ///< and receive the result
            up,   ///< buffers are combined along a tree with `number` - 1 children a level per rank
            down, ///< the root's buffer travels along such a tree
            blocks_up, ///< the same along two trees, in `number` blocks each
            blocks_down,
            exchange, ///< with the participant `number` away
            scatter,  ///< along ring `number` each participant gets one combined part of its range
            gather,   ///< the parts return to all participants of the ring
        };
        Kind kind;
        std::int64_t number = 0;
        int root = 0;
    };

    MessageSchedule(int ranks, std::size_t count)
        : ranks_{ranks}, count_{count}, folding_{ranks, ranks} {}

    void add(Phase phase) {
        if (ranks_ > 1) {
            phases_.push_back(phase);
        }
    }
    void need_slots(int slots, std::size_t elements) noexcept {
        slots_ = (std::max)(slots_, slots);
        slot_count_ = (std::max)(slot_count_, elements);
    }
    void add_tree(int radix) {
        need_slots(1, count_);
        add({Phase::Kind::up, radix});
        add({Phase::Kind::down, radix});
    }
    void add_double_tree(std::size_t segment) {
        trees_ = std::make_shared<detail::DoubleTree const>(ranks_);
        std::size_t const half = ElementRange{0, count_}.part(0, 2).size();
        std::size_t const blocks = detail::segments_of(half, segment);
        need_slots(1, ElementRange{0, half}.part(0, blocks).size());
        add({Phase::Kind::blocks_up, static_cast<std::int64_t>(blocks)});
        add({Phase::Kind::blocks_down, static_cast<std::int64_t>(blocks)});
    }
    void add_folded(int participants) {
        folding_.count = participants;
        if (participants != ranks_) {
            need_pieces(count_);
            add({Phase::Kind::fold});
        }
    }
    /// For blocks of at most this length that are combined in segments. Segments of a shorter block
    /// may be longer than its own, but none is longer than `segment_`.
    void need_pieces(std::size_t longest_block) noexcept {
        bool const is_cut = detail::segments_of(longest_block, segment_) != 1;
        need_slots(is_cut ? 2 : 1, is_cut ? segment_ : longest_block);
    }
    void add_unfolded() {
        if (folding_.count != ranks_) {
            add({Phase::Kind::unfold});
        }
    }
    void add_butterfly() {
        need_slots(1, count_);
        add_folded(detail::largest_power_of_two(ranks_));
        for (int distance = 1; distance < folding_.count; distance *= 2) {
            add({Phase::Kind::exchange, distance});
        }
        add_unfolded();
    }
    void add_rings(AllReducePlan const& plan, std::size_t segment) {
        std::vector<int> const extents = detail::rings_of(plan, ranks_);
        bool const is_mesh = plan.algorithm == AllReduceAlgorithm::mesh;
        check_extents(extents, is_mesh);
        segment_ = segment;
        add_folded(detail::product_of(extents));
        std::size_t longest = count_;
        int stride = 1;
        for (int const extent : extents) {
            longest = ElementRange{0, longest}.part(0, static_cast<std::size_t>(extent)).size();
            need_pieces(longest);
            add({Phase::Kind::scatter, static_cast<std::int64_t>(rings_.size())});
            rings_.push_back({stride, extent, is_mesh});
            stride *= extent;
        }
        for (std::size_t ring = rings_.size(); ring-- != 0;) {
            add({Phase::Kind::gather, static_cast<std::int64_t>(ring)});
        }
        add_unfolded();
    }
    void check_extents(std::vector<int> const& extents, bool is_mesh) const {
        int product = 1;
        bool fits = true;
        for (int const extent : extents) {
            fits = fits && extent >= 1 && extent <= ranks_ / product;
            product *= fits ? extent : 1;
        }
        if (!fits || product < ranks_ - product) {
            throw ContractViolation{detail::concat(
                is_mesh ? "a mesh of " : "a torus of ",
                ranks_,
                " ranks needs extents of at least 1 whose product is at most ",
                ranks_,
                " and at least half of it, but was given ",
                extents
            )};
        }
    }

    int ranks_;
    std::size_t count_;
    detail::Folding folding_;
    std::size_t segment_ = 0; ///< of scattered blocks, in elements; 0: not cut
    std::size_t slot_count_ = 0;
    int slots_ = 0;
    std::vector<Phase> phases_;
    std::vector<detail::Ring> rings_;
    std::shared_ptr<detail::DoubleTree const> trees_;
};

/// The steps of one rank, in order. Refers to its schedule.
class MessageSteps {
public:
    /// Writes the next step. Returns false when the rank has finished.
    [[nodiscard]] bool next(MessageStep& step) noexcept {
        while (phase_ < schedule_->phases_.size()) {
            MessageSchedule::Phase const& phase = schedule_->phases_[phase_];
            step = {};
            while (take(phase, number_, step)) {
                ++number_;
                if (!step.send.is_none() || !step.receive.is_none() || !step.combine.is_none()) {
                    return true;
                }
            }
            number_ = 0;
            if (++phase_ < schedule_->phases_.size()) {
                enter();
            }
        }
        step = {};
        return false;
    }

private:
    friend class MessageSchedule;
    using Kind = MessageSchedule::Phase::Kind;

    MessageSteps(MessageSchedule const& schedule, int rank) noexcept
        : schedule_{&schedule}, rank_{rank}, index_{schedule.folding_.index_of(rank)} {
        if (!schedule.phases_.empty()) {
            enter();
        }
    }

    /// Fills in step `number` of the phase on this rank; `step` is empty before. Returns false if
    /// there are no more.
    [[nodiscard]] bool
    take(MessageSchedule::Phase const& phase, std::int64_t number, MessageStep& step) noexcept {
        switch (phase.kind) {
        case Kind::fold: return fold(number, step);
        case Kind::unfold: return unfold(number, step);
        case Kind::up: return tree_.climb(number, step);
        case Kind::down: return tree_.descend(number, step);
        case Kind::blocks_up: return blocks_.climb(number, step);
        case Kind::blocks_down: return blocks_.descend(number, step);
        case Kind::exchange: return exchange(phase.number, number, step);
        case Kind::scatter: return index_ >= 0 && ring_.scatter(number, step);
        case Kind::gather: return index_ >= 0 && ring_.gather(number, step);
        }
        return false;
    }
    /// Computes the values that stay constant within a phase.
    void enter() noexcept {
        MessageSchedule::Phase const& phase = schedule_->phases_[phase_];
        switch (phase.kind) {
        case Kind::up:
        case Kind::down:
            tree_ = {phase.number, schedule_->ranks_, phase.root, rank_, schedule_->count_};
            break;
        case Kind::blocks_up:
        case Kind::blocks_down:
            blocks_ = {*schedule_->trees_, rank_, schedule_->count_, phase.number};
            break;
        case Kind::scatter:
        case Kind::gather: enter_ring(static_cast<std::size_t>(phase.number)); break;
        default: break;
        }
    }

    [[nodiscard]] ElementRange whole() const noexcept { return {0, schedule_->count_}; }
    [[nodiscard]] Transfer whole_with(int peer, int slot = Transfer::in_place) const noexcept {
        return whole().is_empty() ? Transfer{} : Transfer{peer, slot, whole()};
    }
    void combine_whole(bool slot_is_left, MessageStep& step) const noexcept {
        step.combine = {0, slot_is_left, whole()};
    }

    // -- surplus ranks ---------------------------------------------------------------------------------
    [[nodiscard]] bool has_surplus_neighbour() const noexcept {
        return index_ >= 0 && index_ < schedule_->folding_.surplus();
    }
    [[nodiscard]] bool fold(std::int64_t number, MessageStep& step) const noexcept {
        detail::Pieces const pieces{1, schedule_->count_, schedule_->segment_};
        if (index_ < 0) {
            if (number < pieces.count()) {
                step.send = pieces.transfer(rank_ + 1, Transfer::in_place, whole(), number);
            }
            return number < pieces.count();
        }
        if (std::int64_t const piece = pieces.received_in(number); piece >= 0) {
            step.receive = pieces.transfer(rank_ - 1, pieces.slot_of(piece), whole(), piece);
        }
        if (std::int64_t const piece = pieces.combined_in(number); piece >= 0) {
            step.combine = {pieces.slot_of(piece), true, pieces.range(whole(), piece)};
        }
        return has_surplus_neighbour() && number < pieces.steps();
    }
    [[nodiscard]] bool unfold(std::int64_t number, MessageStep& step) const noexcept {
        if (index_ < 0) {
            step.receive = whole_with(rank_ + 1);
            return number == 0;
        }
        step.send = whole_with(rank_ - 1);
        return has_surplus_neighbour() && number == 0;
    }

    // -- participants ----------------------------------------------------------------------------------
    [[nodiscard]] bool
    exchange(std::int64_t distance, std::int64_t number, MessageStep& step) const noexcept {
        if (index_ < 0 || number >= 2) {
            return false;
        }
        int const partner = index_ ^ static_cast<int>(distance);
        if (number == 0) {
            int const peer = schedule_->folding_.rank_of(partner);
            step.send = whole_with(peer);
            step.receive = whole_with(peer, 0);
        } else {
            combine_whole(partner < index_, step); // both partners have the same left operand
        }
        return true;
    }
    void enter_ring(std::size_t ring) noexcept {
        if (index_ < 0) {
            return;
        }
        ElementRange range = whole();
        for (std::size_t outer = 0; outer < ring; ++outer) {
            detail::Ring const& passed = schedule_->rings_[outer];
            range = range.part(
                static_cast<std::size_t>(passed.position_of(index_)),
                static_cast<std::size_t>(passed.extent)
            );
        }
        ring_ = {schedule_->rings_[ring], schedule_->folding_, index_, range, schedule_->segment_};
    }

    MessageSchedule const* schedule_;
    int rank_;
    int index_; ///< among participants; negative for a surplus rank
    std::size_t phase_ = 0;
    std::int64_t number_ = 0; ///< of the next step in the phase
    // The steps of the phase, which uses at most one of these.
    detail::TreeSteps tree_;
    detail::DoubleTreeSteps blocks_;
    detail::RingSteps ring_;
};

inline MessageSteps MessageSchedule::steps(int rank) const noexcept {
    return {*this, rank};
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/polling.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A pause between two polls of a wait. There is none at first, as long as `spins` says. Then the
/// wait yields, because others may need this core. After 10 ms it sleeps.
class PollPause {
public:
    explicit PollPause(std::chrono::nanoseconds spins) noexcept : spins_{spins} {}

    void operator()() {
        auto const now = std::chrono::steady_clock::now();
        if (began_at_ == std::chrono::steady_clock::time_point{}) {
            began_at_ = now;
        }
        if (now - began_at_ >= std::chrono::milliseconds{10}) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        } else if (now - began_at_ >= spins_) {
            std::this_thread::yield();
        }
    }

private:
    std::chrono::nanoseconds spins_;
    std::chrono::steady_clock::time_point began_at_{};
};

/// How a caller proceeds with operations in flight.
enum class Waiting : std::uint8_t {
    blocks,
    tests, ///< ends by the deadline
    polls, ///< like tests, without a deadline
};

/// Whether `work` is complete, or there is none. Complete work is destroyed.
template <Work W>
[[nodiscard]] bool is_complete(std::optional<W>& work, Waiting waiting) {
    if (!work) {
        return true;
    }
    if (waiting == Waiting::blocks) {
        work->wait();
    } else if (waiting == Waiting::tests ? !work->test() : !make_progress(*work)) {
        return false;
    }
    work.reset();
    return true;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/reduce.hpp

#ifndef JOINABLE_REDUCTION_REDUCE_HPP_PART_1
#define JOINABLE_REDUCTION_REDUCE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A function from an index to a value, or none. Refers to the given function.
template <class T>
class Numbered {
public:
    Numbered() = default;
    template <class Function>
    Numbered(std::size_t number, Function const& function) noexcept
        : size_{number}, function_{&function}, call_{[](void const* called, std::size_t i) {
              return (*static_cast<Function const*>(called))(i);
          }} {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] T operator[](std::size_t i) const { return call_(function_, i); }

private:
    std::size_t size_ = 0;
    void const* function_ = nullptr;
    T (*call_)(void const*, std::size_t) = nullptr;
};
/// The addresses of all ranks' inputs, or of the outputs.
using Places = Numbered<std::byte*>;
/// The factors by which inputs are multiplied before they are added. May be empty.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. The bits
/// do not depend on which rank computes them or on how the work was divided. There is at least one
/// input and one output, and is_reducible(dtype, op). An output may be one of the inputs; otherwise they do not overlap. With
/// factors it is a sum of floating-point or complex numbers, each multiplied and rounded first. 16-bit numbers
/// are multiplied as floats.
void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors = {},
    InstructionSet set = instruction_set()
);

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/algorithms/detail/schedule_run.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Runs one rank's steps of a schedule over messages of `Comm`.
template <class Comm>
class ScheduleRun {
public:
    ScheduleRun(
        MessageSchedule schedule,
        int rank,
        Buffer buffer,
        ReduceOp op,
        std::array<std::byte*, 2> slots,
        int tag
    )
        : schedule_{std::move(schedule)}, steps_{schedule_.steps(rank)}, buffer_{buffer}, op_{op},
          slots_{slots}, tag_{tag} {}
    ScheduleRun(ScheduleRun const&) = delete;
    ScheduleRun& operator=(ScheduleRun const&) = delete;

    /// Whether all steps are done. @throws what messages throw.
    [[nodiscard]] bool advance(Comm& comm, Waiting waiting) {
        for (;;) {
            if (!is_complete(receiving_, waiting) || !is_complete(sending_, waiting)) {
                return false;
            }
            if (!steps_.next(step_)) {
                return true;
            }
            start(comm, step_);
        }
    }
    /// The peers of messages in flight, in order.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        if (!receiving_ && !sending_) {
            return {};
        }
        Transfer const& one = receiving_ ? step_.receive : step_.send;
        return both_ranks(one.peer, sending_ ? step_.send.peer : one.peer);
    }

private:
    using Sending = decltype(std::declval<Comm&>().send(ConstBuffer{}, 0, 0));
    using Receiving = decltype(std::declval<Comm&>().receive(Buffer{}, 0, 0));

    void start(Comm& comm, MessageStep const& step) {
        if (!step.receive.is_none()) {
            (void)receiving_.emplace(comm.receive(place_of(step.receive), step.receive.peer, tag_)
            ); // keeps the work: nvcc 13 looks at emplace()'s result
        }
        if (!step.send.is_none()) {
            (void)sending_.emplace(comm.send(place_of(step.send), step.send.peer, tag_));
        }
        if (!step.combine.is_none()) {
            combine(step.combine);
        }
    }
    [[nodiscard]] std::byte* address_of(ElementRange range) const noexcept {
        return static_cast<std::byte*>(buffer_.data) + range.begin * size_of(buffer_.dtype);
    }
    [[nodiscard]] Buffer place_of(Transfer const& transfer) const noexcept {
        std::byte* const data = transfer.slot == Transfer::in_place
                                    ? address_of(transfer.range)
                                    : slots_[static_cast<std::size_t>(transfer.slot)];
        return {data, transfer.range.size(), buffer_.dtype};
    }
    void combine(Combination const& combination) const {
        std::byte* const own = address_of(combination.range);
        std::byte* const slot = slots_[static_cast<std::size_t>(combination.slot)];
        std::array<std::byte*, 2> const operands =
            combination.slot_is_left ? std::array{slot, own} : std::array{own, slot};
        auto const operand = [&](std::size_t i) { return operands[i]; };
        auto const result = [&](std::size_t) { return own; };
        reduce_to(buffer_.dtype, op_, {2, operand}, {1, result}, combination.range.size());
    }

    MessageSchedule schedule_;
    MessageSteps steps_;
    Buffer buffer_;
    ReduceOp op_;
    std::array<std::byte*, 2> slots_;
    int tag_;
    MessageStep step_;
    std::optional<Receiving> receiving_;
    std::optional<Sending> sending_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/algorithms/options.hpp

namespace joinable { inline namespace v0 {

/// How a MessageCommunicator behaves. The same on all ranks.
struct MessageOptions {
    /// The plan of every all-reduce. Without one, choose_algorithm() chooses for each buffer size.
    std::optional<AllReducePlan> plan = {};
    /// The costs that choose_algorithm() uses. The defaults describe no real machine: 20
    /// microseconds, and a nanosecond per byte.
    MessageCosts costs = {};
    /// Ranks compare what they are about to do before data moves, and all throw Mismatch if it
    /// differs. The error names the ranks that differ. This puts a butterfly of 16 bytes before
    /// each collective. Without the comparison, ranks that run different collectives or operations
    /// throw TimedOut, because their messages have different tags. Ranks with different counts,
    /// dtypes or plans throw the underlying communicator's error for messages that do not fit, or
    /// TimedOut.
    /// JOINABLE_CHECK=collectives turns it on, too: set it for all ranks.
    bool check = false;
    /// The first of the 129 tags that messages of collectives use. Other messages over the
    /// underlying communicator must use other tags.
    int tag = 32'000;
};

}} // namespace joinable::v0

// ---- joinable/detail/requested_checks.hpp

#ifndef JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1
#define JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// The checks that the environment variable JOINABLE_CHECK turns on, in programs that are not compiled for them.
struct RequestedChecks {
    std::string_view text; ///< as the variable has it; empty if it is not set
    bool collectives = false;
    bool ready = false;
    bool replicas = false;

    /// @throws ContractViolation  it has an unknown word.
    [[nodiscard]] static RequestedChecks read();
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/comparison.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1

/// @file
/// How ranks compare what they are about to do.

namespace joinable { inline namespace v0 { namespace detail {

/// Why the signatures differ. `words` has as many words from each rank, in rank order, which begin with its
/// Descriptor::words().
[[nodiscard]] inline std::optional<AbortReason>
difference_of_signatures(int size, std::span<std::uint64_t const> words) {
    std::size_t const width = words.size() / static_cast<std::size_t>(size);
    return find_difference(size, [&](int rank) {
        return Descriptor::of_words(words.subspan(width * static_cast<std::size_t>(rank)));
    });
}

/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& signature) noexcept {
    return signature.has_counts && (signature.collective == Collective::gather ||
                                    signature.collective == Collective::scatter ||
                                    signature.collective == Collective::all_to_all);
}

/// The words that ranks sum before data moves: first the signatures, then, if these are equal and have
/// counts, the tables of counts. All find the same difference, or none. Its memory is kept for the next one.
class Comparison {
public:
    /// Begins with the signatures.
    void begin(Descriptor const& own, int rank, int size) {
        signature_ = own;
        rank_ = rank;
        size_ = size;
        has_tables_ = false;
        auto const mine = own.words();
        bool const has_pairs = own.has_counts && own.collective != Collective::gather &&
                               own.collective != Collective::scatter;
        words_.reserve(2 * as_index(size) * (has_pairs ? as_index(size) : 1)); // for go_on(), too
        words_.assign(mine.size() * as_index(size), 0);
        std::copy(mine.begin(), mine.end(), words_.data() + mine.size() * as_index(rank));
    }
    /// Goes on to the tables of the same collective. False if it has none, or they were compared.
    [[nodiscard]] bool go_on(PartSizes const& sends, PartSizes const& expects) {
        if (!signature_.has_counts || std::exchange(has_tables_, true)) {
            return false;
        }
        words_.clear();
        for (int from = 0; from < size_; ++from) {
            for (int to = 0; to < size_; ++to) {
                if (has_part(from, to)) {
                    words_.push_back(from == rank_ ? sends[to] : 0);
                    words_.push_back(to == rank_ ? expects[from] : 0);
                }
            }
        }
        return true;
    }
    /// There is nothing more to compare, until the next begin().
    void end() noexcept { words_.clear(); }
    [[nodiscard]] bool is_over() const noexcept { return words_.empty(); }

    /// To be summed over all ranks, in place.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    /// @pre ranks have summed the words
    [[nodiscard]] std::optional<AbortReason> difference() const {
        if (!has_tables_) {
            return difference_of_signatures(size_, words_);
        }
        auto const word = [&](int from, int to, int side) -> std::uint64_t {
            int const pair = signature_.collective == Collective::gather    ? from
                             : signature_.collective == Collective::scatter ? to
                                                                            : size_ * from + to;
            return has_part(from, to) ? words_[static_cast<std::size_t>(2 * pair + side)] : 0;
        };
        return find_difference_of_counts(
            size_,
            signature_,
            [&](int from, int to) { return word(from, to, 0); },
            [&](int from, int to) { return word(from, to, 1); }
        );
    }
    /// The counts of all ranks, as a Substitute takes them. @pre ranks have summed the tables
    [[nodiscard]] std::vector<std::size_t> known() const {
        std::vector<std::size_t> counts;
        for (std::size_t pair = 0; pair < words_.size(); pair += 2) {
            counts.push_back(words_[pair]);
        }
        return counts;
    }

private:
    /// Only the root has parts for others in a scatter, or gets some in a gather.
    [[nodiscard]] bool has_part(int from, int to) const noexcept {
        return signature_.collective == Collective::gather    ? to == signature_.root
               : signature_.collective == Collective::scatter ? from == signature_.root
                                                              : true;
    }

    Descriptor signature_;
    int rank_ = 0;
    int size_ = 0;
    bool has_tables_ = false;
    std::vector<std::uint64_t> words_;
};

/// `words` are an option of all ranks, 0 or 1, by rank. `option` is its name.
/// @throws Mismatch  ranks differ.
inline void check_same_option(
    std::vector<std::uint64_t> const& words, std::string_view option, bool is_renumbered = false
) {
    auto const others = ranks_where(static_cast<int>(words.size()), [&](int rank) {
        return words[as_index(rank)] != words[0];
    });
    if (!others.empty()) {
        throw Mismatch{
            others,
            concat(
                "options differ: ",
                option,
                words[0] != 0 ? ": rank 0 has true, rank " : ": rank 0 has false, rank ",
                others.front(),
                words[0] != 0 ? " has false" : " has true"
            ),
            is_renumbered
        };
    }
}

/// Collective. Whether all ranks compare collectives, because their options say so or JOINABLE_CHECK=collectives
/// does. `option` is the option's name, and `share(word)` returns the words of all ranks, by rank.
/// @throws Mismatch           ranks differ.
/// @throws ContractViolation  the variable has an unknown word; PeerFailed on the others.
template <class Share>
[[nodiscard]] bool agree_to_compare(
    bool by_options, std::string_view option, Share const& share, bool is_renumbered = false
) {
    constexpr std::uint64_t unknown = 2;
    bool compares = by_options;
    std::exception_ptr const error =
        exception_of([&] { compares = compares || RequestedChecks::read().collectives; });
    std::vector<std::uint64_t> words;
    try {
        words = share(error ? unknown : std::uint64_t{compares ? 1U : 0U});
    } catch (...) {
        std::rethrow_exception(error ? error : std::current_exception());
    }
    if (error) {
        std::rethrow_exception(error);
    }
    int const size = static_cast<int>(words.size());
    auto const failed =
        ranks_where(size, [&](int rank) { return words[as_index(rank)] == unknown; });
    if (!failed.empty()) {
        throw PeerFailed{
            failed, failure_text(failed, "JOINABLE_CHECK has an unknown word there"), is_renumbered
        };
    }
    check_same_option(words, concat(option, ", or JOINABLE_CHECK=collectives"), is_renumbered);
    return compares;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/algorithms/detail/message_engine.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of one rank. They run one after another in the order in which they were posted.
/// A rank that waits for a later one also does its part in the earlier ones, in whatever order
/// other ranks wait.
template <class Comm>
class MessageEngine : public HasWorks {
public:
    MessageEngine(Comm& comm, MessageOptions const& options) : comm_{comm}, options_{options} {
        options_.check = options.check || RequestedChecks::read().collectives;
    }

    [[nodiscard]] Comm& communicator() const noexcept { return comm_; }
    [[nodiscard]] MessageOptions const& options() const noexcept { return options_; }
    [[nodiscard]] RequestsOf requests() const { return {comm_.rank(), comm_.size()}; }
    [[nodiscard]] AllReducePlan plan_for(std::size_t bytes) const {
        return options_.plan ? *options_.plan
                             : choose_algorithm(bytes, comm_.size(), options_.costs);
    }

    /// Returns the collective's number, for the other members.
    /// @throws the error of an earlier collective.
    [[nodiscard]] std::uint64_t post(Request const& request) {
        if (failure_) {
            std::rethrow_exception(failure_);
        }
        if constexpr (has_abort_reason<
                          Comm>) { // a single rank sends no message that would throw it
            if (auto const reason = comm_.size() == 1 ? comm_.abort_reason() : std::nullopt) {
                throw_failure(*reason);
            }
        }
        posted_.push_back({request.signature, request.out});
        return done_ + posted_.size() - 1;
    }
    [[nodiscard]] bool is_done(std::uint64_t number) const noexcept { return number < done_; }
    void finish(std::uint64_t number) {
        while (!advance(number, Waiting::blocks)) {
        }
    }
    [[nodiscard]] bool test(std::uint64_t number) { return advance(number, Waiting::tests); }
    [[nodiscard]] bool progress(std::uint64_t number) { return advance(number, Waiting::polls); }

    /// The peers of the messages that this rank waits for.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        return run_ ? run_->missing_ranks() : std::vector<int>{};
    }
    /// See Communicator. False if the communicator does not know.
    [[nodiscard]] bool is_renumbered() const { return is_renumbered_group(comm_); }
    [[nodiscard]] int rank() const { return comm_.rank(); }
    /// Tells the others, if the communicator can.
    void abort(AbortReason const& reason) {
        if constexpr (has_abort<Comm>) {
            comm_.abort(reason);
        }
    }

private:
    struct Posted {
        Descriptor signature;
        Buffer buffer;
    };
    /// A collective consists of up to three consecutive schedules.
    enum class Stage : std::uint8_t {
        compare, ///< whether all ranks request the same
        name,    ///< if not: which ranks request what
        move,
    };
    /// The words that differing ranks exchange: signature, count, options.
    using Words = std::array<std::uint64_t, 3>;

    /// Whether the collective is done. Also runs those before it.
    [[nodiscard]] bool advance(std::uint64_t number, Waiting waiting) {
        while (!is_done(number)) {
            if (failure_) {
                std::rethrow_exception(failure_);
            }
            try {
                if (!advance_first(waiting)) {
                    return false;
                }
            } catch (...) {
                fail(std::current_exception());
                throw;
            }
        }
        return true;
    }
    /// Whether the first collective's schedule has finished.
    [[nodiscard]] bool advance_first(Waiting waiting) {
        if (!run_) {
            begin(options_.check && comm_.size() > 1 ? Stage::compare : Stage::move);
        }
        if (!run_->advance(comm_, waiting)) {
            return false;
        }
        switch (stage_) {
        case Stage::compare: begin(is_same_on_all_ranks() ? Stage::move : Stage::name); break;
        case Stage::name: throw_difference();
        case Stage::move:
            run_.reset();
            posted_.pop_front();
            ++done_;
            break;
        }
        return true;
    }
    void begin(Stage stage) {
        Posted const& first = posted_.front();
        int const ranks = comm_.size();
        stage_ = stage;
        switch (stage) {
        case Stage::compare: {
            std::uint64_t const hash = hash_of(words_of(first));
            compared_ = {hash, ~hash};
            AllReducePlan const plan{AllReduceAlgorithm::butterfly};
            Buffer const buffer{compared_.data(), compared_.size(), DType::u64};
            start(
                MessageSchedule::all_reduce(plan, ranks, buffer.count, sizeof(std::uint64_t)),
                buffer,
                ReduceOp::bit_and,
                128
            );
            break;
        }
        case Stage::name: {
            Words const own = words_of(first);
            words_.assign(own.size() * static_cast<std::size_t>(ranks), 0);
            std::copy(own.begin(), own.end(), words_of_rank(comm_.rank()));
            Buffer const buffer{words_.data(), words_.size(), DType::u64};
            start(MessageSchedule::all_gather(ranks, own.size()), buffer, ReduceOp::sum, 128);
            break;
        }
        case Stage::move: move(first); break;
        }
    }
    void move(Posted const& first) {
        Descriptor const& signature = first.signature;
        Buffer buffer = first.buffer;
        int const ranks = comm_.size();
        int const offset = static_cast<int>(signature.collective) | static_cast<int>(signature.op)
                                                                        << 4;
        if (signature.collective == Collective::broadcast) {
            start(
                MessageSchedule::broadcast(ranks, buffer.count, signature.root),
                buffer,
                signature.op,
                offset
            );
            return;
        }
        AllReducePlan plan{AllReduceAlgorithm::butterfly};
        if (signature.collective == Collective::barrier) {
            buffer = {&met_, 1, DType::u8};
        } else {
            plan = plan_for(buffer.bytes());
        }
        start(
            MessageSchedule::all_reduce(plan, ranks, buffer.count, size_of(buffer.dtype)),
            buffer,
            signature.op,
            offset
        );
    }
    void start(MessageSchedule schedule, Buffer buffer, ReduceOp op, int tag_offset) {
        run_.reset(); // before its scratch memory moves
        std::size_t const slot_bytes = schedule.slot_count() * size_of(buffer.dtype);
        std::size_t const bytes = slot_bytes * static_cast<std::size_t>(schedule.slots());
        if (scratch_.size() < bytes) {
            scratch_.resize(bytes);
        }
        run_.emplace(
            std::move(schedule),
            comm_.rank(),
            buffer,
            op,
            std::array{scratch_.data(), scratch_.data() + (bytes - slot_bytes)},
            options_.tag + tag_offset
        );
    }

    // -- comparing -------------------------------------------------------------------------------------
    [[nodiscard]] Words words_of(Posted const& posted) const {
        Hash options;
        if (options_.plan) {
            options.add(static_cast<std::uint64_t>(options_.plan->algorithm));
            options.add(options_.plan->segment_bytes);
            for (int const extent : options_.plan->extents) {
                options.add(static_cast<std::uint64_t>(extent));
            }
        } else {
            MessageCosts const& costs = options_.costs;
            for (double const number :
                 {costs.message_seconds,
                  costs.bytes_per_second,
                  costs.combine_seconds,
                  costs.both_ways,
                  costs.overlap,
                  costs.uncached}) {
                options.add(std::bit_cast<std::uint64_t>(number));
            }
        }
        auto const [word, count] = posted.signature.words();
        return {word, count, options.value()};
    }
    [[nodiscard]] static std::uint64_t hash_of(Words const& words) noexcept {
        Hash hash;
        for (std::uint64_t const word : words) {
            hash.add(word);
        }
        return hash.value();
    }
    [[nodiscard]] std::uint64_t* words_of_rank(int rank) noexcept {
        return words_.data() + std::tuple_size_v<Words> * static_cast<std::size_t>(rank);
    }
    /// Where ranks differ in a bit, that bit is 0 in the conjunction of the hashes and in the
    /// conjunction of their complements.
    [[nodiscard]] bool is_same_on_all_ranks() const noexcept {
        return compared_[0] == ~compared_[1];
    }
    [[noreturn]] void throw_difference() {
        int const ranks = comm_.size();
        if (auto reason = difference_of_signatures(ranks, words_)) {
            reason->is_renumbered = is_renumbered();
            throw_failure(*reason);
        }
        auto const others = ranks_where(ranks, [&](int rank) {
            return words_of_rank(rank)[2] != words_of_rank(0)[2];
        });
        throw Mismatch{
            others,
            concat(
                ranks_text(others),
                " and rank 0 have different MessageOptions: give the same plan, or the same costs, on "
                "every rank"
            ),
            is_renumbered()
        };
    }

    /// Tells all ranks the reason, if the communicator can; then no rank uses the buffers any more.
    void fail(std::exception_ptr error) {
        abort(blamed_on(rank(), reason_of(error)));
        run_.reset();
        failure_ = std::move(error);
    }

    Comm& comm_;
    MessageOptions options_;
    std::deque<Posted> posted_; ///< and not done
    std::uint64_t done_ = 0;    ///< number of finished collectives
    std::exception_ptr failure_;
    Stage stage_ = Stage::move;
    std::array<std::uint64_t, 2> compared_{};
    std::vector<std::uint64_t> words_; ///< from all ranks
    std::uint8_t met_ = 0;
    std::vector<std::byte> scratch_;
    std::optional<ScheduleRun<Comm>> run_; ///< of the first posted collective
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/algorithms/communicator.hpp

namespace joinable { inline namespace v0 {

/// Ranks that exchange messages in host memory. A MessageCommunicator needs nothing else. Every
/// communicator that models SendsAndReceives and reduces host memory is a model.
///
/// `comm` is an lvalue of `C`.
/// | expression                        | result             | meaning                                     |
/// |-----------------------------------|--------------------|---------------------------------------------|
/// | `comm.rank()`, `comm.size()`      | convertible to int | as in Communicator                          |
/// | `comm.send(in, to, tag)`          | Work               | returns before the receive is posted        |
/// | `comm.receive(buffer, from, tag)` | Work               | messages with one tag between two ranks     |
/// |                                   |                    | stay in order; count and dtype are the same |
template <class C>
concept ExchangesMessages = detail::has_rank<C> && detail::has_size<C> && detail::has_send<C> &&
                            detail::has_receive<C> && detail::reduces_host_memory<C>;

/// Explains in one sentence why a class does not model ExchangesMessages.
template <class C>
consteval bool models_exchanges_messages() {
    static_assert(detail::has_rank<C>, "ExchangesMessages: expected a member 'int rank() const'");
    static_assert(detail::has_size<C>, "ExchangesMessages: expected a member 'int size() const'");
    static_assert(
        detail::has_send<C>,
        "ExchangesMessages: expected a member 'Work send(ConstBuffer, int to, int tag)'"
    );
    static_assert(
        detail::has_receive<C>,
        "ExchangesMessages: expected a member 'Work receive(Buffer, int from, int tag)'"
    );
    static_assert(
        detail::reduces_host_memory<C>,
        "ExchangesMessages: expected a communicator of host memory, where messages are combined"
    );
    return ExchangesMessages<C>;
}

/// A collective of one rank, made of messages. Its wait() throws the errors of these messages
/// unchanged, or Mismatch: see MessageOptions::check.
template <class Comm>
using MessageWork = detail::WorkOf<detail::MessageEngine<Comm>, std::uint64_t>;

/// All-reduces, broadcasts and barriers, made of the messages of another communicator.
/// AllReduceAlgorithm lists the messages and the order in which elements are combined. All ranks
/// get the same bits, every time.
///
/// The underlying communicator must outlive this object and may also be used directly: see
/// MessageOptions::tag. If it has abort(), set_deadline() or keep_alive(), this object has them
/// too.
///
/// Collectives make progress inside wait() and test(). They run one at a time, in the order in
/// which they were posted. They need scratch memory, which is kept for reuse: see
/// AllReducePlan::segment_bytes.
///
/// The error of a message is thrown unchanged. If the underlying communicator models Aborts, it is
/// first aborted with the same reason: all ranks then throw that reason at once, and both
/// communicators are unusable. Otherwise each rank throws at its own deadline. That deadline
/// applies to one message, so TimedOut may name a rank that is itself waiting for others. If a rank
/// destroys this object while others wait for its messages, they time out, unless it is unwinding
/// or destroys the underlying communicator too.
///
/// One thread at a time may use an object and the underlying communicator.
template <class Comm>
class MessageCommunicator
    : public detail::BasicCollectives<MessageCommunicator<Comm>, MessageWork<Comm>> {
    static_assert(models_exchanges_messages<Comm>());

public:
    /// Local.
    /// @throws ContractViolation  the extents of a torus or mesh do not fit the number of ranks, or the tag
    ///                            range would exceed the largest int or begin below 0.
    [[nodiscard]] explicit MessageCommunicator(Comm& comm, MessageOptions const& options = {})
        : engine_{comm, options} {
        if (options.plan) {
            (void)detail::MessageSchedule::all_reduce(*options.plan, size(), 0, 1);
        }
        if (options.tag < 0 || options.tag > INT_MAX - tags) {
            throw ContractViolation{detail::concat(
                "MessageOptions::tag must be at least 0 and leave room for ",
                tags,
                " tags, but is ",
                options.tag
            )};
        }
    }
    MessageCommunicator(MessageCommunicator const&) = delete;
    MessageCommunicator& operator=(MessageCommunicator const&) = delete;
    ~MessageCommunicator() {
        if (unwinding_.has_begun()) {
            abort_for_exception(engine_, "the scope of its communicator");
        }
    }

    [[nodiscard]] int rank() const { return engine_.communicator().rank(); }
    [[nodiscard]] int size() const { return engine_.communicator().size(); }
    /// The plan for an all-reduce of this many bytes.
    [[nodiscard]] AllReducePlan plan_for(std::size_t bytes) const {
        return engine_.plan_for(bytes);
    }

    /// Not collective. Sends a message of the underlying communicator. Its tag must not be one of
    /// the collectives.
    auto send(ConstBuffer buffer, int to, int tag = 0) {
        check_tag(tag);
        return engine_.communicator().send(buffer, to, tag);
    }
    /// Not collective. Receives a message of send().
    auto receive(Buffer buffer, int from, int tag = 0) {
        check_tag(tag);
        return engine_.communicator().receive(buffer, from, tag);
    }

    /// Local. Aborts the underlying communicator.
    void abort(AbortReason const& reason)
        requires detail::has_abort<Comm>
    {
        engine_.communicator().abort(reason);
    }
    [[nodiscard]] bool is_aborted() const
        requires detail::has_abort<Comm>
    {
        return engine_.communicator().is_aborted();
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const
        requires detail::has_abort_reason<Comm>
    {
        return engine_.communicator().abort_reason();
    }
    [[nodiscard]] bool is_renumbered() const { return engine_.is_renumbered(); }
    /// Local; for messages that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline)
        requires detail::has_set_deadline<Comm>
    {
        return engine_.communicator().set_deadline(deadline);
    }
    /// Local. Ranks that wait for a message of this one now wait for one more deadline from this
    /// call.
    void keep_alive()
        requires detail::has_keep_alive<Comm>
    {
        engine_.communicator().keep_alive();
    }
    /// Local. The peers of the messages that this rank waits for.
    [[nodiscard]] std::vector<int> missing_ranks() const { return engine_.missing_ranks(); }
    /// Local. That of the underlying communicator: ranks that share memory there share it here.
    [[nodiscard]] detail::ModelTable* model_table()
        requires detail::has_model_table<Comm>
    {
        return engine_.communicator().model_table();
    }

private:
    static constexpr int tags = 129; ///< one per collective and operation, and one to compare

    friend class detail::BasicCollectives<MessageCommunicator, MessageWork<Comm>>;
    MessageWork<Comm> post(detail::Request const& request) {
        return {engine_, engine_.post(request)};
    }
    void check_tag(int tag) const {
        int const first = engine_.options().tag;
        if (tag >= first && tag - first < tags) {
            throw ContractViolation{detail::concat(
                "tags from ",
                first,
                " to ",
                first + tags - 1,
                " are those of collectives, but a message was given ",
                tag,
                ": take another one, or set MessageOptions::tag"
            )};
        }
    }

    detail::MessageEngine<Comm> engine_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0

// ---- joinable/communicator/algorithms/measure_costs.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// The part of the shorter of two works that runs while the other one does, by the times of each alone and of both.
[[nodiscard]] constexpr double overlap_of(double one, double other, double both) noexcept {
    return (std::min)((std::max)((one + other - both) / (std::min)(one, other), 0.0), 1.0);
}

/// Times messages and additions on all ranks at once, as an all-reduce runs them.
template <class Clock, class Comm>
class CostMeasurement {
public:
    static constexpr std::size_t short_bytes = 64;
    static constexpr std::size_t long_bytes = std::size_t{1} << 20U;
    static constexpr std::size_t uncached_bytes = std::size_t{1} << 24U;

    explicit CostMeasurement(Comm& comm)
        : over_{comm}, sent_(long_bytes / sizeof(float)), received_(sent_.size()),
          sum_(sent_.size()), term_(sent_.size()), times_(kinds * places()) {}

    [[nodiscard]] MessageCosts run() {
        times_[addition * places() + own_place()] = timed([&] { add(); });
        each_round([&](int peer, std::size_t place) {
            times_[short_message * places() + place] = there_and_back(peer, short_bytes);
            times_[long_message * places() + place] = there_and_back(peer, long_bytes);
            times_[exchange * places() + place] = both_at_once(peer, [] {});
            times_[exchange_and_addition * places() + place] = both_at_once(peer, [&] { add(); });
        });
        gather();
        MessageCosts costs;
        double const combine = median_of(addition);
        costs.combine_seconds = combine / long_bytes;
        if (over_.size() > 1) {
            double const longer = median_of(long_message);
            double const shorter = (std::min)(median_of(short_message), longer / 2);
            double const exchanged = (std::max)(median_of(exchange), longer);
            costs.bytes_per_second = (long_bytes - short_bytes) / (longer - shorter);
            costs.message_seconds =
                (std::max)(shorter - short_bytes / costs.bytes_per_second, least_seconds);
            costs.both_ways = (std::min)((exchanged - shorter) / (longer - shorter), 2.0);
            costs.overlap = overlap_of(exchanged, combine, median_of(exchange_and_addition));
            costs.uncached = uncached_factor(shorter, exchanged + combine);
        }
        return costs;
    }

private:
    enum Kind : std::size_t {
        addition,
        short_message,
        long_message,
        exchange,
        exchange_and_addition,
        kinds
    };
    static constexpr double least_seconds = 1e-9; ///< what clocks tell apart
    static constexpr std::size_t most_times = 25;
    static constexpr double patience =
        0.25; ///< seconds for times of one kind, unless three take longer

    /// Times of one kind: of all ranks, in each round.
    [[nodiscard]] std::size_t places() const {
        auto const rounds = static_cast<std::size_t>((std::max)(rounded_up_log2(over_.size()), 1));
        return rounds * static_cast<std::size_t>(over_.size());
    }

    [[nodiscard]] std::size_t own_place() const { return static_cast<std::size_t>(over_.rank()); }
    /// Calls f(peer, place of its times): ranks whose numbers differ in one bit are peers.
    template <class F>
    void each_round(F const& f) {
        std::size_t place = own_place();
        for (int distance = 1; distance < over_.size(); distance *= 2) {
            f(over_.rank() ^ distance, place);
            place += static_cast<std::size_t>(over_.size());
        }
    }
    /// Other ranks have zeros in this rank's places, so all ranks get the bits of each.
    void gather() {
        over_.all_reduce({times_.data(), times_.size(), DType::f64}, ReduceOp::sum).wait();
    }

    /// How many times as long a byte takes in long buffers, by an exchange and a combination of 1 MiB, `cached`, which
    /// includes alpha. A link that takes its time is as slow there: it is not made to carry them.
    [[nodiscard]] double uncached_factor(double alpha, double cached) {
        constexpr std::size_t times_longer = uncached_bytes / long_bytes;
        if (cached * times_longer * 3 > patience) {
            return 1;
        }
        for (std::vector<float>* const floats : {&sent_, &received_, &sum_, &term_}) {
            floats->resize(uncached_bytes / sizeof(float));
        }
        std::fill(times_.begin(), times_.end(), 0.0);
        times_[addition * places() + own_place()] = timed([&] { add(); });
        each_round([&](int peer, std::size_t place) {
            times_[exchange * places() + place] = both_at_once(peer, [] {});
        });
        gather();
        double const uncached = median_of(addition) + median_of(exchange) - alpha;
        return (std::max)(uncached / times_longer / (cached - alpha), 1.0);
    }

    /// The median of some times of `f()`. All ranks begin together and take as many.
    template <class F>
    [[nodiscard]] double timed(F const& f) {
        double first = once(f); // also brings memory into caches
        over_.all_reduce({&first, 1, DType::f64}, ReduceOp::max).wait();
        double const fit = first > 0 ? patience / first : double{most_times};
        std::size_t const count = fit < 3            ? 3
                                  : fit < most_times ? static_cast<std::size_t>(fit)
                                                     : most_times;
        std::vector<double> times;
        times.reserve(count);
        over_.barrier();
        while (times.size() < count) {
            times.push_back(once(f));
        }
        return (std::max)(median(times), least_seconds);
    }
    template <class F>
    [[nodiscard]] static double once(F const& f) {
        auto const begin = Clock::now();
        f();
        return std::chrono::duration<double>{Clock::now() - begin}.count();
    }
    /// Half of the time of `f()`, which sends two messages. 0 on a rank whose peer does not exist.
    template <class F>
    [[nodiscard]] double halved(int peer, F const& f) {
        bool const has_peer = peer < over_.size();
        double const seconds = timed([&] {
            if (has_peer) {
                f();
            }
        });
        return seconds / 2 * (has_peer ? 1 : 0);
    }
    /// The time of a message: half of there and back.
    [[nodiscard]] double there_and_back(int peer, std::size_t bytes) {
        std::size_t const count = bytes / sizeof(float);
        return halved(peer, [&] {
            if (over_.rank() < peer) {
                wait(send(peer, count));
                wait(receive(peer, count));
            } else {
                wait(receive(peer, count));
                wait(send(peer, count));
            }
        });
    }
    /// The time of messages of all of `sent_` in both directions at once. This rank does something else while they are
    /// under way.
    template <class F>
    [[nodiscard]] double both_at_once(int peer, F const& meanwhile) {
        return halved(peer, [&] {
            for (int i = 0; i < 2; ++i) {
                auto receiving = receive(peer, received_.size());
                auto sending = send(peer, sent_.size());
                meanwhile();
                wait(receiving);
                wait(sending);
            }
        });
    }
    /// The first elements go to or come from `peer`. All ranks hear what a message throws, as from a collective.
    [[nodiscard]] auto send(int peer, std::size_t count) {
        return abort_if_throws(over_, [&] {
            return over_.send({sent_.data(), count, DType::f32}, peer);
        });
    }
    [[nodiscard]] auto receive(int peer, std::size_t count) {
        return abort_if_throws(over_, [&] {
            return over_.receive({received_.data(), count, DType::f32}, peer);
        });
    }
    template <class W>
    void wait(W&& work) {
        abort_if_throws(over_, [&] { work.wait(); });
    }
    /// As a MessageCommunicator combines.
    void add() {
        std::array<void*, 2> const operands{sum_.data(), term_.data()};
        auto const operand = [&](std::size_t i) { return static_cast<std::byte*>(operands[i]); };
        auto const result = [&](std::size_t) { return static_cast<std::byte*>(operands[0]); };
        reduce_to(DType::f32, ReduceOp::sum, {2, operand}, {1, result}, sum_.size());
    }

    [[nodiscard]] double median_of(Kind kind) const {
        auto const begin = times_.begin() + static_cast<std::ptrdiff_t>(kind * places());
        std::vector<double> some(begin, begin + static_cast<std::ptrdiff_t>(places()));
        some.erase(std::remove(some.begin(), some.end(), 0.0), some.end());
        return some.empty() ? 0 : median(some);
    }
    [[nodiscard]] static double median(std::vector<double>& times) {
        auto const middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
        std::nth_element(times.begin(), middle, times.end());
        return *middle;
    }

    MessageCommunicator<Comm> over_;
    std::vector<float> sent_;
    std::vector<float> received_;
    std::vector<float> sum_; ///< what is added, also while messages are under way
    std::vector<float> term_;
    std::vector<double> times_; ///< of each kind, for each round and rank
};

} // namespace detail

/// The costs of messages between these ranks, for choose_algorithm() and MessageOptions::costs.
/// `comm` models SendsAndReceives or at least ExchangesMessages.
///
/// In each of log2 size() rounds, ranks whose numbers differ in one bit send each other messages of
/// 64 bytes and of 1 MiB, there and back, all pairs at the same time. Each number is the median of
/// up to 25 times, and of all pairs and rounds: links that differ give the costs of a usual one.
/// combine_seconds is that of a sum of 1 MiB of f32, on all ranks at the same time. The peers then also send each
/// other 1 MiB at once, for both_ways, and add meanwhile, for overlap; and, where that is fast enough to be a matter
/// of caches, 16 MiB, for uncached. A rank that is alone sends nothing, and keeps the defaults of all but combine_seconds.
///
/// Collective; returns the same numbers on all ranks. No message with tag 0 or with a tag of a
/// MessageCommunicator may be under way. Takes up to half a second and a quarter more a round in
/// shared memory, up to a second a round elsewhere, unless three messages of 1 MiB take longer. Allocates 64 MiB a rank
/// where links are fast.
/// @throws what messages throw; then all ranks throw, as from collectives of a MessageCommunicator.
template <class Clock = std::chrono::steady_clock, class Comm>
[[nodiscard]] MessageCosts measure_costs(Comm& comm) {
    static_assert(models_exchanges_messages<Comm>());
    if constexpr (ExchangesMessages<Comm>) {
        return detail::CostMeasurement<Clock, Comm>{comm}.run();
    }
}

}} // namespace joinable::v0

// ---- joinable/algorithms.hpp

/// @file
/// All-reduce algorithms over messages: their steps, their costs, and collectives over any
/// communicator that sends and receives.
