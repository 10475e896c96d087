// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/communicator/algorithms/detail/message_step.hpp>

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
