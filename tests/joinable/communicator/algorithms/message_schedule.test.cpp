// SPDX-License-Identifier: BSL-1.0
// The steps of all ranks, run one after another over numbers and texts: results, the order of combination, and
// the messages that textbooks count. Threads run them in communicator.test.cpp.
#include <joinable/communicator/algorithms/detail/message_schedule.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <simulator/simulator.hpp>

#include <joinable/error.hpp>

namespace {

using namespace joinable_tests;
using enum joinable::AllReduceAlgorithm;
using joinable::AllReducePlan;
using joinable::detail::ElementRange;
using joinable::detail::MessageSchedule;
using joinable::detail::MessageStep;
using joinable::detail::Transfer;

/// The buffers of all ranks. A combination adds: texts, too, so that they tell its order.
template <class T>
struct Buffers {
    Buffers(MessageSchedule const& schedule)
        : own(static_cast<std::size_t>(schedule.ranks()), std::vector<T>(schedule.count())),
          slots(
              own.size(),
              {std::vector<T>(schedule.slot_count()), std::vector<T>(schedule.slot_count())}
          ) {}

    T* place(int rank, int slot, ElementRange range) {
        auto const index = static_cast<std::size_t>(rank);
        return slot == Transfer::in_place ? own[index].data() + range.begin
                                          : slots[index].at(static_cast<std::size_t>(slot)).data();
    }
    void message(int from, Transfer const& sent, int to, Transfer const& received) {
        T const* const first = place(from, sent.slot, sent.range);
        if (received.slot != Transfer::in_place) {
            REQUIRE(received.range.size() <= slots[static_cast<std::size_t>(to)][0].size());
        }
        std::copy_n(first, sent.range.size(), place(to, received.slot, received.range));
    }
    void combination(int rank, joinable::detail::Combination const& combine) {
        T* const result = place(rank, Transfer::in_place, combine.range);
        T const* const slot = place(rank, combine.slot, combine.range);
        for (std::size_t i = 0; i < combine.range.size(); ++i) {
            result[i] = combine.slot_is_left ? slot[i] + result[i] : result[i] + slot[i];
        }
    }

    std::vector<std::vector<T>> own;
    std::vector<std::array<std::vector<T>, 2>> slots;
};

/// Lets the simulator's copy write to the buffers of the test.
template <class T>
struct Into {
    Buffers<T>* buffers;
    void message(int from, Transfer const& sent, int to, Transfer const& received) const {
        buffers->message(from, sent, to, received);
    }
    void combination(int rank, joinable::detail::Combination const& combine) const {
        buffers->combination(rank, combine);
    }
};

template <class T>
Simulated run(MessageSchedule const& schedule, Buffers<T>& buffers) {
    return Simulator<Into<T>>{{}, 1, {&buffers}}.run({&schedule});
}

MessageSchedule all_reduce(AllReducePlan const& plan, int ranks, std::size_t count) {
    return MessageSchedule::all_reduce(plan, ranks, count, 1);
}

TEST_CASE("every rank gets each rank's elements once, by every algorithm over 1 to 17 ranks") {
    for (int ranks = 1; ranks <= 17; ++ranks) {
        auto const w = static_cast<std::size_t>(ranks);
        constexpr std::size_t segment = 6;
        for (AllReducePlan const& plan : all_plans(ranks, segment)) {
            for (std::size_t const count :
                 {std::size_t{0},
                  std::size_t{1},
                  w - 1,
                  w,
                  w + 1,
                  segment - 1,
                  segment,
                  segment + 1,
                  2 * w * segment + 1, // parts of parts differ in length
                  5 * w * segment + 3}) {
                MessageSchedule const schedule = all_reduce(plan, ranks, count);
                Buffers<std::uint64_t> buffers{schedule};
                for (std::size_t rank = 0; rank < w; ++rank) {
                    for (std::size_t i = 0; i < count; ++i) {
                        buffers.own[rank][i] = (i % 7 + 1)
                                               << 3U * rank; // no rank can count twice unseen
                    }
                }
                run(schedule, buffers);
                std::size_t wrong = 0;
                for (std::size_t i = 0; i < count; ++i) {
                    std::uint64_t expected = 0;
                    for (std::size_t rank = 0; rank < w; ++rank) {
                        expected += (i % 7 + 1) << 3U * rank;
                    }
                    for (auto const& own : buffers.own) {
                        wrong += own[i] == expected ? 0U : 1U;
                    }
                }
                CHECK_MESSAGE(wrong == 0, text_of(plan), " of ", count, " over ", ranks);
                bool const is_cut =
                    plan.algorithm != star && plan.algorithm != tree && plan.algorithm != butterfly;
                if (plan.segment_bytes != 0 && is_cut) {
                    CHECK(schedule.slot_count() <= segment);
                }
            }
        }
    }
}

/// The text of element `i` after an all-reduce in which rank r has the letter 'a' + r.
std::vector<std::string> combined(AllReducePlan const& plan, int ranks, std::size_t count) {
    MessageSchedule const schedule = all_reduce(plan, ranks, count);
    Buffers<std::string> buffers{schedule};
    for (std::size_t rank = 0; rank < buffers.own.size(); ++rank) {
        for (std::string& text : buffers.own[rank]) {
            text = static_cast<char>('a' + rank);
        }
    }
    run(schedule, buffers);
    for (auto const& own : buffers.own) {
        CHECK(own == buffers.own[0]); // so all ranks have the same bits
    }
    return buffers.own[0];
}

TEST_CASE(
    "elements are combined in the order that the table of algorithms names, the same on all ranks"
) {
    for (int ranks = 1; ranks <= 17; ++ranks) {
        auto const w = static_cast<std::size_t>(ranks);
        std::string const in_rank_order = std::string{"abcdefghijklmnopq"}.substr(0, w);
        for (auto const algorithm : {star, tree, butterfly}) {
            CHECK(combined({algorithm}, ranks, 3) == std::vector<std::string>(3, in_rank_order));
        }
        for (auto const algorithm : {ring, segmented_ring}) {
            std::vector<std::string> const texts = combined({algorithm}, ranks, 2 * w);
            for (std::size_t block = 0; block < w; ++block) {
                std::string const rotated = in_rank_order.substr((block + 1) % w) +
                                            in_rank_order.substr(0, (block + 1) % w);
                CHECK(texts[2 * block] == rotated);
                CHECK(texts[2 * block + 1] == rotated);
            }
        }
        std::vector<std::string> in_trees(3, in_rank_order);
        in_trees.insert(
            in_trees.end(), 3, ranks % 2 == 0 ? in_rank_order : in_rank_order.substr(1) + "a"
        );
        CHECK(combined({double_tree, 1, {}}, ranks, 6) == in_trees);
    }
    // Rings of 2 inside, of 3 outside: block 0 begins at position 1 of each.
    CHECK(combined({torus, 0, {2, 3}}, 6, 6)[0] == "dcfeba");
    // Rings of a mesh go 0, 2, 3, 1 and 0, 2, 1.
    CHECK(
        combined({mesh, 0, {4}}, 4, 4) == std::vector<std::string>{"cdba", "dbac", "bacd", "acdb"}
    );
    CHECK(combined({mesh, 0, {2, 3}}, 6, 6)[0] == "fedcba");
}

TEST_CASE("what a rank does in one step touches different elements and slots") {
    for (int ranks = 2; ranks <= 17; ++ranks) {
        for (AllReducePlan const& plan : all_plans(ranks, 4)) {
            MessageSchedule const schedule = all_reduce(plan, ranks, 200);
            for (int rank = 0; rank < ranks; ++rank) {
                auto steps = schedule.steps(rank);
                std::size_t wrong = 0;
                for (MessageStep step; steps.next(step);) {
                    auto const apart = [&](ElementRange a, ElementRange b) {
                        wrong +=
                            a.is_empty() || b.is_empty() || a.end <= b.begin || b.end <= a.begin
                                ? 0U
                                : 1U;
                    };
                    apart(step.send.range, step.combine.range);
                    if (step.receive.slot == Transfer::in_place) {
                        apart(step.receive.range, step.combine.range);
                        apart(step.receive.range, step.send.range);
                    } else {
                        wrong += step.receive.slot == step.combine.slot && !step.combine.is_none()
                                     ? 1U
                                     : 0U;
                    }
                    wrong += step.send.slot == Transfer::in_place ? 0U : 1U;
                    wrong += step.send.peer == rank || step.receive.peer == rank ? 1U : 0U;
                }
                CHECK_MESSAGE(wrong == 0, text_of(plan), " over ", ranks);
            }
        }
    }
}

/// Messages and elements that each rank sends.
Simulated trace(AllReducePlan const& plan, int ranks, std::size_t count) {
    MessageSchedule const schedule = all_reduce(plan, ranks, count);
    return Simulator<>{{}, 1}.run({&schedule});
}

/// What each rank sends.
struct Sent {
    std::vector<std::size_t> messages;
    std::vector<std::size_t> elements;
};

/// By star or binomial tree, as textbooks draw them: a message to the parent, and one to each child. With `radix` 2
/// the children of rank r are r + 1, r + 2, r + 4, ..., as long as these are below its lowest bit.
Sent along_tree(std::size_t ranks, std::size_t radix, std::size_t count) {
    Sent sent;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::size_t messages = rank == 0 ? 0 : 1;
        if (radix == 2) {
            for (std::size_t bit = 1; (rank & bit) == 0 && rank + bit < ranks; bit *= 2) {
                ++messages;
            }
        } else {
            messages += rank == 0 ? ranks - 1 : 0;
        }
        sent.messages.push_back(messages);
        sent.elements.push_back(messages * count);
    }
    return sent;
}

/// By what runs over `participants` ranks, each of which sends as much. With M ranks beyond them, each even one of the
/// first 2 M gives its buffer to the next rank, which also sends it the result.
Sent with_surplus(
    std::size_t ranks,
    std::size_t participants,
    std::size_t messages,
    std::size_t elements,
    std::size_t count
) {
    Sent sent;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        bool const is_paired = rank < 2 * (ranks - participants);
        bool const is_surplus = is_paired && rank % 2 == 0;
        sent.messages.push_back(is_surplus ? 1 : messages + (is_paired ? 1 : 0));
        sent.elements.push_back(is_surplus ? count : elements + (is_paired ? count : 0));
    }
    return sent;
}

void sends(AllReducePlan const& plan, std::size_t ranks, std::size_t count, Sent const& expected) {
    Simulated const found = trace(plan, static_cast<int>(ranks), count);
    CAPTURE(text_of(plan));
    CAPTURE(ranks);
    CHECK(found.messages == expected.messages);
    CHECK(found.elements == expected.elements);
}

TEST_CASE("each rank sends the messages and bytes that textbooks count, by every algorithm") {
    for (std::size_t w = 1; w <= 17; ++w) {
        auto const log = static_cast<std::size_t>(std::bit_width(w) - 1);
        std::size_t const cube = std::size_t{1} << log;
        std::size_t const count = 48 * w * cube;
        std::size_t const twice = 2 * (w - 1) * count / w; // each block but one, on both ways
        sends({star}, w, count, along_tree(w, w, count));
        sends({tree}, w, count, along_tree(w, 2, count));
        sends({ring}, w, count, with_surplus(w, w, 2 * (w - 1), twice, count));
        // Blocks in three pieces: three times the messages in the first half, the same bytes.
        std::size_t const piece = 16 * cube;
        sends({ring, piece, {}}, w, count, with_surplus(w, w, 4 * (w - 1), twice, count));
        sends({segmented_ring}, w, count, with_surplus(w, w, 3 * (w - 1), twice, count));
        sends({butterfly}, w, count, with_surplus(w, cube, log, log * count, count));
        std::size_t const halves = 2 * (cube - 1) * count / cube;
        sends({halving_doubling}, w, count, with_surplus(w, cube, 2 * log, halves, count));
    }
    for (std::vector<int> const& extents :
         {std::vector{4, 3}, {3, 4}, {2, 3, 2}, {5, 3}, {2, 2, 2, 2}, {17}, {1, 7}}) {
        auto const w = static_cast<std::size_t>(joinable::detail::product_of(extents));
        std::size_t messages = 0;
        for (int const extent : extents) {
            messages += 2 * static_cast<std::size_t>(extent - 1);
        }
        // The bytes of a ring, in fewer messages; also where ranks are left over.
        std::size_t const count = 48 * w;
        for (std::size_t const more : {std::size_t{0}, std::size_t{1}, w}) {
            for (auto const grid : {torus, mesh}) {
                sends(
                    {grid, 0, extents},
                    w + more,
                    count,
                    with_surplus(w + more, w, messages, 2 * (w - 1) * 48, count)
                );
            }
        }
    }
}

/// The messages of a collective: who has sent to whom.
struct Pairs {
    std::set<std::pair<int, int>>* pairs;
    void message(int from, Transfer const&, int to, Transfer const&) const {
        pairs->insert({from, to});
    }
    void combination(int, joinable::detail::Combination const&) const {}
};

// A link joins neighbours of one dimension. A message takes the links between its ranks.
TEST_CASE("in a mesh no message passes more than one rank, and no link carries two of one direction"
) {
    for (std::vector<int> const& extents :
         {std::vector{2}, {3}, {4}, {5}, {8}, {17}, {4, 3}, {3, 4}, {5, 7}, {2, 3, 4}}) {
        int const ranks = joinable::detail::product_of(extents);
        auto const count = static_cast<std::size_t>(ranks);
        MessageSchedule const schedule = all_reduce({mesh, 0, extents}, ranks, count);
        std::set<std::pair<int, int>> pairs;
        Simulator<Pairs>{{}, 1, {&pairs}}.run({&schedule});
        std::set<std::pair<int, int>> links;
        std::size_t messages = 0;
        for (auto const& [from, to] : pairs) {
            int stride = 1;
            int dimensions = 0;
            for (int const extent : extents) {
                int const begin = from / stride % extent;
                int const end = to / stride % extent;
                if (begin != end) {
                    ++dimensions;
                    int const way = end > begin ? stride : -stride;
                    int const passed = (end > begin ? end - begin : begin - end);
                    CHECK(passed <= 2);
                    for (int i = 0; i < passed; ++i) {
                        CHECK(links.insert({from + i * way, from + (i + 1) * way}).second);
                    }
                }
                stride *= extent;
            }
            CHECK(dimensions == 1);
            ++messages;
        }
        CHECK(messages != 0);
    }
}

// In each tree a rank sends all blocks to its parent, and to each child. Two trees have 2 (N - 1) edges, and no rank
// has more than two children: Sanders, Speck and Träff.
TEST_CASE("by two trees a rank sends at most twice the buffer, and all but a few exactly that") {
    for (std::size_t w = 2; w <= 17; ++w) {
        std::size_t const count = 48 * w;
        constexpr std::size_t block = 8;
        Simulated const sent = trace({double_tree, block, {}}, static_cast<int>(w), count);
        std::size_t const all = 2 * count;
        std::size_t missing = 0;
        for (std::size_t rank = 0; rank < w; ++rank) {
            CHECK(sent.elements[rank] == sent.messages[rank] * block);
            CHECK(sent.elements[rank] <= all);
            CHECK(sent.elements[rank] % (count / 2) == 0);
            missing += all - sent.elements[rank];
        }
        CHECK(missing == all); // roots have no parent: two halves; and two children are missing
    }
    // Drawn by hand. 0 -> 2 -> 1, 3 and 3 -> 1 -> 2, 0: ranks 0 and 3 have one child, 1 and 2 have two.
    CHECK(trace({double_tree, 8, {}}, 4, 32).messages == std::vector<std::size_t>{4, 8, 8, 4});
    // 0 -> 4 -> 2 -> 1, 3 and 1 -> 0 -> 3 -> 2, 4.
    CHECK(trace({double_tree, 8, {}}, 5, 32).messages == std::vector<std::size_t>{6, 4, 8, 8, 6});
}

TEST_CASE("two trees share the work: no rank has more than two children, and rounds suffice for all"
) {
    for (int const ranks : {2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 64, 100, 1023, 1025}) {
        joinable::detail::DoubleTree const trees{ranks};
        int const depth = joinable::detail::rounded_up_log2(ranks);
        CHECK(trees.rounds() <= 2 * depth);
        CHECK(trees.root(0) != trees.root(1));
        std::size_t wrong = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            std::vector<int> leaving;
            for (int const tree : {0, 1}) {
                for (int const child : trees.children(tree, rank)) {
                    if (child != Transfer::nobody) {
                        wrong += trees.parent(tree, child) == rank ? 0U : 1U;
                        wrong += trees.start(tree, child) > trees.start(tree, rank) ? 0U : 1U;
                        leaving.push_back(trees.start(tree, child) % 2);
                    }
                }
            }
            wrong +=
                leaving.size() > 2 || (leaving.size() == 2 && leaving[0] == leaving[1]) ? 1U : 0U;
            if (trees.root(0) != rank && trees.root(1) != rank) {
                wrong += trees.start(0, rank) % 2 == trees.start(1, rank) % 2 ? 1U : 0U;
            }
        }
        CHECK_MESSAGE(wrong == 0, ranks, " ranks");
    }
}

TEST_CASE("a broadcast and an all-gather reach all ranks") {
    for (int ranks = 1; ranks <= 17; ++ranks) {
        for (int root = 0; root < ranks; ++root) {
            MessageSchedule const schedule = MessageSchedule::broadcast(ranks, 3, root);
            Buffers<int> buffers{schedule};
            buffers.own[static_cast<std::size_t>(root)] = {1, 2, 3};
            run(schedule, buffers);
            for (auto const& own : buffers.own) {
                CHECK(own == std::vector{1, 2, 3});
            }
        }
        MessageSchedule const schedule = MessageSchedule::all_gather(ranks, 2);
        Buffers<int> buffers{schedule};
        std::vector<int> expected;
        for (int rank = 0; rank < ranks; ++rank) {
            auto const index = static_cast<std::size_t>(rank);
            buffers.own[index][2 * index] = buffers.own[index][2 * index + 1] = rank + 1;
            expected.insert(expected.end(), 2, rank + 1);
        }
        run(schedule, buffers);
        for (auto const& own : buffers.own) {
            CHECK(own == expected);
        }
    }
}

TEST_CASE("a torus or mesh that does not fit the ranks is refused") {
    for (std::vector<int> const& extents :
         {std::vector{4, 4}, {2, 1}, {0, 6}, {-2, -3}, {1 << 30, 1 << 30}}) {
        CHECK_THROWS_AS(all_reduce({torus, 0, extents}, 6, 8), joinable::ContractViolation);
    }
    CHECK_THROWS_WITH(
        all_reduce({torus, 0, {4, 4}}, 6, 8),
        "a torus of 6 ranks needs extents of at least 1 whose product is at most 6 and at least half of it, "
        "but was given 4 and 4"
    );
    CHECK_THROWS_WITH(
        all_reduce({mesh, 0, {7}}, 6, 8),
        "a mesh of 6 ranks needs extents of at least 1 whose product is at most 6 and at least half of it, "
        "but was given 7"
    );
    CHECK(trace({torus, 0, {3, 1}}, 6, 6).messages[0] == 1); // each surplus rank has a participant
}

} // namespace
