// SPDX-License-Identifier: BSL-1.0
// The steps of all ranks, run one after another over numbers and texts: results, the order of combination, and
// the messages that textbooks count. Threads run them in communicator.test.cpp.
#include <joinable/communicator/algorithms/message_schedule.hpp>

#include <algorithm>
#include <array>
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
using joinable::ElementRange;
using joinable::MessageSchedule;
using joinable::MessageStep;
using joinable::Transfer;

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
    void combination(int rank, joinable::Combination const& combine) {
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
    void combination(int rank, joinable::Combination const& combine) const {
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

TEST_CASE("ranks send the messages and bytes that textbooks count") {
    for (int ranks = 2; ranks <= 17; ++ranks) {
        auto const w = static_cast<std::size_t>(ranks);
        std::size_t const count = 48 * w;
        Simulated const along_ring = trace({ring}, ranks, count);
        CHECK(along_ring.messages == std::vector<std::size_t>(w, 2 * (w - 1)));
        CHECK(along_ring.elements == std::vector<std::size_t>(w, 2 * (w - 1) * count / w));
        // Blocks of 48 in pieces of 16: three times the messages in the first half, the same bytes.
        Simulated const in_pieces = trace({ring, 16, {}}, ranks, count);
        CHECK(in_pieces.messages == std::vector<std::size_t>(w, 4 * (w - 1)));
        CHECK(in_pieces.elements == along_ring.elements);
        CHECK(
            trace({segmented_ring}, ranks, count).messages ==
            std::vector<std::size_t>(w, 3 * (w - 1))
        );

        Simulated const by_star = trace({star}, ranks, count);
        CHECK(by_star.messages[0] == w - 1);
        CHECK(std::all_of(by_star.messages.begin() + 1, by_star.messages.end(), [](std::size_t n) {
            return n == 1;
        }));

        Simulated const by_tree = trace({tree}, ranks, count);
        auto const rounds = static_cast<std::size_t>(joinable::detail::rounded_up_log2(ranks));
        CHECK(by_tree.messages[0] == rounds); // the root's, on the way down
        std::size_t all = 0;
        for (std::size_t const messages : by_tree.messages) {
            all += messages;
        }
        CHECK(all == 2 * (w - 1));

        // Two trees of half of the buffer each, in blocks of 8: nobody sends more than twice the buffer.
        Simulated const by_trees = trace({double_tree, 8, {}}, ranks, count);
        std::size_t elements = 0;
        for (std::size_t const sent : by_trees.elements) {
            elements += sent;
            CHECK(sent <= 2 * count);
        }
        CHECK(elements == 2 * (w - 1) * count);
        CHECK(
            *std::max_element(by_trees.messages.begin(), by_trees.messages.end()) <=
            4 * (count / 2 / 8)
        );
    }
    for (std::size_t const log : {1U, 2U, 3U, 4U}) {
        std::size_t const w = std::size_t{1} << log;
        Simulated const exchanged = trace({butterfly}, static_cast<int>(w), 48 * w);
        CHECK(exchanged.messages == std::vector<std::size_t>(w, log));
        CHECK(exchanged.elements == std::vector<std::size_t>(w, log * 48 * w));
        Simulated const halved = trace({halving_doubling}, static_cast<int>(w), 48 * w);
        CHECK(halved.messages == std::vector<std::size_t>(w, 2 * log));
        CHECK(halved.elements == std::vector<std::size_t>(w, 2 * (w - 1) * 48));
    }
    // Along a torus of 4 by 3: 2 (3 + 2) messages, and the bytes of a ring.
    Simulated const along_torus = trace({torus, 0, {4, 3}}, 12, 480);
    CHECK(along_torus.messages == std::vector<std::size_t>(12, 10));
    CHECK(along_torus.elements == std::vector<std::size_t>(12, 2 * 11 * 40));
    // Rank 0 is one more than 4: it hands its buffer over, and gets the result from rank 1.
    Simulated const with_surplus = trace({butterfly}, 5, 10);
    CHECK(with_surplus.messages == std::vector<std::size_t>{1, 3, 2, 2, 2});
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

TEST_CASE("a torus that does not fit the ranks is refused") {
    for (std::vector<int> const& extents :
         {std::vector{4, 4}, {2, 1}, {0, 6}, {-2, -3}, {1 << 30, 1 << 30}}) {
        CHECK_THROWS_AS(all_reduce({torus, 0, extents}, 6, 8), joinable::ContractViolation);
    }
    CHECK_THROWS_WITH(
        all_reduce({torus, 0, {4, 4}}, 6, 8),
        "a torus of 6 ranks needs extents of at least 1 whose product is at most 6 and at least half of it, "
        "but was given 4 and 4"
    );
    CHECK(trace({torus, 0, {3, 1}}, 6, 6).messages[0] == 1); // each surplus rank has a participant
}

} // namespace
