// SPDX-License-Identifier: BSL-1.0
// Collectives made of messages, over thread ranks: results by every algorithm, the messages that are sent, works
// that are waited for in any order, and every way in which a rank can fail the others.
#include <joinable/communicator/algorithms/communicator.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <simulator/simulator.hpp>
#include <support/closed_forms.hpp>
#include <support/for_each_type.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/algorithms/detail/message_schedule.hpp>
#include <joinable/communicator/algorithms/detail/schedule_run.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>

namespace {

using namespace joinable_tests;
using enum joinable::AllReduceAlgorithm;
using joinable::AllReducePlan;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::MessageCommunicator;
using joinable::MessageOptions;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;

/// The least that a MessageCommunicator needs. Counts what it sends, and fails when it is told to.
class MessagesOnly {
public:
    explicit MessagesOnly(ThreadCommunicator& inner) : inner_{inner} {}
    [[nodiscard]] int rank() const { return inner_.rank(); }
    [[nodiscard]] int size() const { return inner_.size(); }
    auto send(ConstBuffer buffer, int to, int tag) {
        if (messages == fails_at) {
            throw std::runtime_error{"no more messages"};
        }
        ++messages;
        elements += buffer.count;
        return inner_.send(buffer, to, tag);
    }
    auto receive(Buffer buffer, int from, int tag) { return inner_.receive(buffer, from, tag); }

    std::size_t messages = 0;
    std::size_t elements = 0;
    std::size_t fails_at = SIZE_MAX;

protected:
    ThreadCommunicator& inner_;
};
/// The same with what makes failures known at once.
class AbortingMessages : public MessagesOnly {
public:
    using MessagesOnly::MessagesOnly;
    void abort(joinable::AbortReason const& reason) { inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return inner_.is_aborted(); }
};

static_assert(joinable::ExchangesMessages<MessagesOnly>);
static_assert(!joinable::Communicator<MessagesOnly>);
static_assert(joinable::Communicator<MessageCommunicator<MessagesOnly>>);
static_assert(joinable::SendsAndReceives<MessageCommunicator<MessagesOnly>>);
static_assert(!joinable::Aborts<MessageCommunicator<MessagesOnly>>);
static_assert(!joinable::HasDeadline<MessageCommunicator<MessagesOnly>>);
static_assert(joinable::Aborts<MessageCommunicator<ThreadCommunicator>>);
static_assert(joinable::RenewsDeadline<MessageCommunicator<ThreadCommunicator>>);
static_assert(joinable::ReportsMissing<MessageCommunicator<ThreadCommunicator>>);

/// Over groups of 1 to 17 ranks. A sanitizer has those of up to 5, and those of powers of two and beside them.
void run_all_sizes(std::function<void(ThreadCommunicator&)> const& body) {
    for (int ranks = 1; ranks <= 17; ++ranks) {
        bool const is_like_others = ranks == 6 || (ranks > 9 && ranks < 16);
        if (!is_like_others || !joinable_tests::is_reduced()) {
            run_ranks({ranks}, body);
        }
    }
}

TEST_CASE("every algorithm sums exactly over 1 to 17 ranks, whatever the count") {
    run_all_sizes([](ThreadCommunicator& comm) {
        auto const w = static_cast<std::size_t>(comm.size());
        constexpr std::size_t segment = 6; // elements
        for (AllReducePlan const& plan : all_plans(comm.size(), segment * sizeof(std::uint64_t))) {
            MessageCommunicator over{comm, {.plan = plan}};
            std::size_t number = 0;
            for (std::size_t const count :
                 {std::size_t{0},
                  std::size_t{1},
                  w - 1,
                  w,
                  w + 1,
                  segment - 1,
                  segment,
                  segment + 1,
                  w * segment - 1,
                  w * segment,
                  w * segment + 1,
                  2 * w * segment - 1,
                  2 * w * segment,
                  2 * w * segment + 1}) {
                if (joinable_tests::is_left_out(number++, 5, comm.size())) {
                    continue;
                }
                std::vector<std::uint64_t> values(count + 1);
                for (std::size_t i = 0; i < count; ++i) {
                    values[i] = (i % 7 + 1) << 3U * static_cast<unsigned>(comm.rank());
                }
                values[count] = 99; // nobody writes behind the end
                over.all_reduce({values.data(), count, DType::u64}, ReduceOp::sum).wait();
                std::size_t wrong = values[count] == 99 ? 0 : 1;
                for (std::size_t i = 0; i < count; ++i) {
                    wrong += values[i] == (i % 7 + 1) * (((1ULL << 3U * w) - 1) / 7) ? 0U : 1U;
                }
                CHECK_MESSAGE(wrong == 0, text_of(plan), " of ", count, " over ", w);
            }
        }
    });
}

// How often an element is combined depends on the number of ranks, how it is combined does not: each dtype has every
// fourth of these groups, and a sanitizer three of them. JOINABLE_TEST_WHOLE asks for all.
TEST_CASE("every dtype and operation is combined by every algorithm") {
    auto const body = [](ThreadCommunicator& comm) {
        for (AllReducePlan const& plan : all_plans(comm.size(), 16)) {
            MessageCommunicator over{comm, {.plan = plan}};
            for (std::size_t number = 0; number < joinable::dtype_count; ++number) {
                auto const turn = number + static_cast<std::size_t>(comm.size());
                if (turn % (joinable_tests::under_sanitizer ? 3 : 4) != 0 &&
                    !joinable_tests::is_whole()) {
                    continue;
                }
                auto const dtype = static_cast<DType>(number);
                joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
                    for (std::size_t op = 0; op < joinable::reduce_op_count; ++op) {
                        auto const operation = static_cast<ReduceOp>(op);
                        if (!joinable::detail::is_reducible(dtype, operation)) {
                            continue;
                        }
                        // Small numbers are exact in every dtype. One factor of a product is not 1.
                        auto const of_rank = [&](int rank, std::size_t i) {
                            int const drawn = (rank + static_cast<int>(i)) % 5;
                            return operation == ReduceOp::product ? (drawn == 0 ? 3 : 1) : drawn;
                        };
                        std::vector<T> values;
                        std::vector<float> expected;
                        for (std::size_t i = 0; i < 37; ++i) {
                            values.push_back(
                                static_cast<T>(static_cast<float>(of_rank(comm.rank(), i)))
                            );
                            int const result =
                                closed_forms::combined(operation, comm.size(), [&](int rank) {
                                    return of_rank(rank, i);
                                });
                            expected.push_back(static_cast<float>(result));
                        }
                        over.all_reduce({values.data(), values.size(), dtype}, operation).wait();
                        std::size_t wrong = 0;
                        for (std::size_t i = 0; i < values.size(); ++i) {
                            wrong += static_cast<float>(values[i]) == expected[i] ? 0U : 1U;
                        }
                        CHECK_MESSAGE(
                            wrong == 0,
                            text_of(plan),
                            " of ",
                            joinable::name_of(dtype),
                            " by ",
                            joinable::name_of(operation)
                        );
                    }
                });
            }
        }
    };
    if (joinable_tests::is_reduced()) {
        run_ranks({3, 4, 8}, body);
    } else {
        run_all_sizes(body);
    }
}

TEST_CASE("all ranks get the same bits of a sum of floats, and get them again") {
    for (int const ranks : {2, 3, 5, 8, 17}) {
        run_ranks({ranks}, [](ThreadCommunicator& comm) {
            std::mt19937 random{static_cast<std::uint32_t>(comm.rank())};
            std::vector<float> numbers(500);
            for (float& number : numbers) {
                number = std::normal_distribution<float>{}(random) * 1e3F;
            }
            for (AllReducePlan const& plan : all_plans(comm.size(), 64)) {
                MessageCommunicator over{comm, {.plan = plan}};
                std::vector<float> sums = numbers;
                std::vector<float> again = numbers;
                over.all_reduce({sums.data(), sums.size(), DType::f32}, ReduceOp::sum).wait();
                over.all_reduce({again.data(), again.size(), DType::f32}, ReduceOp::sum).wait();
                std::vector<float> of_first = sums;
                over.broadcast({of_first.data(), of_first.size(), DType::f32}, 0).wait();
                CHECK(std::memcmp(sums.data(), of_first.data(), sums.size() * sizeof(float)) == 0);
                CHECK(std::memcmp(sums.data(), again.data(), sums.size() * sizeof(float)) == 0);
            }
        });
    }
}

TEST_CASE("a rank sends the messages that the simulator counts") {
    for (int const ranks : {1, 2, 3, 4, 5, 8}) {
        for (AllReducePlan const& plan : all_plans(ranks, 64)) {
            auto const schedule =
                joinable::detail::MessageSchedule::all_reduce(plan, ranks, 1000, sizeof(float));
            Simulated const expected = Simulator<>{{}, sizeof(float)}.run({&schedule});
            run_ranks({ranks}, [&](ThreadCommunicator& comm) {
                MessagesOnly messages{comm};
                MessageCommunicator over{messages, {.plan = plan}};
                std::vector<float> values(1000, 1.0F);
                over.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum).wait();
                auto const index = static_cast<std::size_t>(comm.rank());
                CHECK(messages.messages == expected.messages[index]);
                CHECK(messages.elements == expected.elements[index]);
            });
        }
    }
}

TEST_CASE("broadcasts, barriers and messages go beside all-reduces, and works end in any order") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        for (bool const check : {false, true}) {
            MessageCommunicator over{comm, {.check = check}};
            int const next = (comm.rank() + 1) % comm.size();
            int const last = (comm.rank() + comm.size() - 1) % comm.size();
            for (int round = 0; round < 20; ++round) {
                float mine = static_cast<float>(comm.rank());
                float theirs = -1;
                std::vector<float> short_one(3, 1.0F);
                std::vector<double> long_one(4000, 1.0);
                std::int32_t root = comm.rank();
                auto sending = over.send({&mine, 1, DType::f32}, next, round);
                auto first = over.all_reduce({short_one.data(), 3, DType::f32}, ReduceOp::sum);
                auto second = over.all_reduce({long_one.data(), 4000, DType::f64}, ReduceOp::sum);
                auto third = over.broadcast({&root, 1, DType::i32}, round % comm.size());
                if ((comm.rank() + round) % 3 == 0) {
                    third.wait(); // does its part in the others first
                } else if ((comm.rank() + round) % 3 == 1) {
                    while (!second.test()) {
                    }
                    CHECK(first.test());
                    CHECK(first.progress());
                }
                over.barrier();
                CHECK(third.test());
                first.wait();
                first.wait(); // again returns at once
                CHECK(short_one == std::vector<float>(3, static_cast<float>(comm.size())));
                CHECK(long_one == std::vector<double>(4000, comm.size()));
                CHECK(root == round % comm.size());
                over.receive({&theirs, 1, DType::f32}, last, round).wait();
                sending.wait();
                CHECK(theirs == static_cast<float>(last));
            }
        }
    });
}

TEST_CASE("messages between processes make all-reduces, by every algorithm") {
    run_process_ranks({1, 2, 3, 4, 8}, [](joinable::ProcessCommunicator& comm) {
        for (AllReducePlan const& plan : all_plans(comm.size(), 1U << 16U)) {
            MessageCommunicator over{comm, {.plan = plan}};
            std::vector<float> values(100'000, 1.0F);
            over.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum).wait();
            CHECK(values == std::vector<float>(values.size(), static_cast<float>(comm.size())));
        }
    });
}

TEST_CASE("a barrier waits for every rank") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        MessageCommunicator over{comm};
        std::vector<std::int32_t> came(static_cast<std::size_t>(comm.size()));
        for (int late = 0; late < comm.size(); ++late) {
            // The late rank tells all others before its barrier, so none of them is behind its own before.
            auto const tag = 100 + late;
            std::int32_t word = 1;
            std::int32_t heard = 0;
            if (comm.rank() == late) {
                for (int other = 0; other < comm.size(); ++other) {
                    if (other != late) {
                        comm.send({&word, 1, DType::i32}, other, tag).wait();
                    }
                }
                over.barrier();
            } else {
                auto receiving = comm.receive({&heard, 1, DType::i32}, late, tag);
                over.barrier();
                CHECK(heard == 1);
                receiving.wait();
            }
        }
    });
}

TEST_CASE("a work that is destroyed unfinished waits") {
    run_ranks({2, 4}, [](ThreadCommunicator& comm) {
        MessageCommunicator over{comm, {.plan = AllReducePlan{ring}}};
        std::vector<float> values(1000, 1.0F);
        {
            auto const work = over.all_reduce({values.data(), 1000, DType::f32}, ReduceOp::sum);
        }
        CHECK(values == std::vector<float>(1000, static_cast<float>(comm.size())));
    });
}

TEST_CASE("without a plan each size has its own") {
    run_ranks({4}, [](ThreadCommunicator& comm) {
        MessageCommunicator over{comm};
        CHECK(over.plan_for(8).algorithm == butterfly);
        CHECK(over.plan_for(100'000'000).algorithm == segmented_ring);
        MessageCommunicator planned{comm, {.plan = AllReducePlan{star}}};
        CHECK(planned.plan_for(8).algorithm == star);
    });
}

/// Runs `body`, in which rank `culprit` does something to the others, over every algorithm. `check` sees what the
/// others throw.
using Culprit = std::function<
    void(ThreadCommunicator&, AbortingMessages&, std::function<void()> const& reduce)>;
template <class Failure>
void fails_on_all_others(int culprit, Culprit const& body) {
    for (int const ranks : {2, 3, 4, 8}) {
        for (AllReducePlan const& plan : all_plans(ranks, 64)) {
            int const guilty = culprit % ranks;
            std::vector<char> has_failed(static_cast<std::size_t>(ranks), 0);
            auto const start = std::chrono::steady_clock::now();
            try {
                Watchdog const watchdog{ranks};
                joinable::run_threads(ranks, [&](ThreadCommunicator& comm) {
                    AbortingMessages messages{comm};
                    MessageCommunicator over{messages, {.plan = plan}};
                    std::vector<float> values(700, 1.0F);
                    auto const reduce = [&] {
                        over.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum)
                            .wait();
                    };
                    if (comm.rank() == guilty) {
                        body(comm, messages, reduce);
                        return;
                    }
                    try {
                        for (;;) {
                            reduce();
                        }
                    } catch (Failure const& failure) {
                        CHECK_MESSAGE(
                            failure.ranks() == std::vector{guilty},
                            text_of(plan),
                            ": ",
                            failure.what()
                        );
                        has_failed[static_cast<std::size_t>(comm.rank())] = 1;
                        CHECK_THROWS_AS(reduce(), Failure); // and for ever
                        throw;
                    }
                });
            } catch (std::exception const&) {
                has_failed[static_cast<std::size_t>(guilty)] = 1;
            }
            CHECK_MESSAGE(
                std::count(has_failed.begin(), has_failed.end(), 1) == ranks,
                text_of(plan),
                " over ",
                ranks
            );
            CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds{30});
        }
    }
}

TEST_CASE("a rank that throws between collectives is PeerFailed on all others") {
    fails_on_all_others<joinable::PeerFailed>(1, [](auto&, auto&, auto const& reduce) {
        reduce();
        throw std::runtime_error{"between"};
    });
}

TEST_CASE("a rank that throws in the middle of a collective is PeerFailed on all others") {
    for (std::size_t const message : {0U, 1U, 2U}) {
        fails_on_all_others<joinable::PeerFailed>(
            3,
            [&](auto&, auto& messages, auto const& reduce) {
                messages.fails_at = message;
                for (;;) { // a leaf of a tree sends one message in each
                    reduce();
                }
            }
        );
    }
}

TEST_CASE("a rank that leaves is PeerFailed on all others") {
    fails_on_all_others<joinable::PeerFailed>(2, [](auto&, auto&, auto const& reduce) {
        reduce();
    });
}

TEST_CASE("a rank that fails tells all others before it does anything else") {
    for (int const ranks : {2, 3, 4, 8}) {
        for (auto const algorithm : {tree, double_tree, ring}) {
            std::atomic<int> failed{0};
            run_ranks({ranks}, [&](ThreadCommunicator& comm) {
                comm.set_deadline(std::chrono::seconds{20});
                AbortingMessages messages{comm};
                messages.fails_at = comm.rank() == 1 ? 2 : SIZE_MAX;
                MessageCommunicator over{messages, {.plan = AllReducePlan{algorithm}}};
                std::vector<float> values(64, 1.0F);
                auto const go_on = [&] {
                    for (;;) {
                        over.all_reduce({values.data(), 64, DType::f32}, ReduceOp::sum).wait();
                    }
                };
                if (comm.rank() == 1) {
                    CHECK_THROWS_WITH_AS(go_on(), "no more messages", std::runtime_error);
                } else {
                    CHECK_THROWS_WITH_AS(
                        go_on(), "rank 1 failed: no more messages", joinable::PeerFailed
                    );
                }
                ++failed;
                wait_until(failed, ranks); // nobody leaves, or unwinds
            });
        }
    }
}

TEST_CASE("an abort reaches all ranks with its own reason") {
    fails_on_all_others<joinable::TimedOut>(1, [](auto& comm, auto& messages, auto const& reduce) {
        reduce();
        messages.abort({joinable::FailureKind::timed_out, {comm.rank()}, "enough"});
        auto const go_on = [&] {
            for (;;) { // what the others had left for this rank may still complete a collective
                reduce();
            }
        };
        CHECK_THROWS_WITH_AS(go_on(), "enough", joinable::TimedOut);
        throw std::runtime_error{"the rank that aborted"};
    });
}

TEST_CASE("a rank that does not come is TimedOut on all others, at the deadline") {
    for (int const ranks : {2, 3, 4, 8}) {
        Watchdog const watchdog{ranks};
        std::vector<char> has_failed(static_cast<std::size_t>(ranks), 0);
        CHECK_THROWS_AS(
            joinable::run_threads(
                ranks,
                [&](ThreadCommunicator& comm) {
                    MessageCommunicator over{comm, {.plan = AllReducePlan{ring}}};
                    CHECK(
                        over.set_deadline(std::chrono::milliseconds{50}) ==
                        joinable::default_deadline
                    );
                    std::vector<float> values(100, 1.0F);
                    auto work =
                        over.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
                    if (comm.rank() == 0) {
                        while (!over.is_aborted()) { // busy with something else
                            std::this_thread::yield();
                        }
                        CHECK_THROWS_AS(work.wait(), joinable::TimedOut);
                        return;
                    }
                    try {
                        if (comm.rank() == 1) {
                            bool const is_done = work.test(); // which may throw, too
                            CHECK(!is_done);
                            CHECK(!over.missing_ranks().empty());
                        }
                        work.wait();
                    } catch (joinable::TimedOut const& failure) {
                        CHECK(failure.missing().size() == 1);
                        has_failed[static_cast<std::size_t>(comm.rank())] = 1;
                        throw;
                    }
                }
            ),
            joinable::TimedOut
        );
        CHECK(std::count(has_failed.begin(), has_failed.end(), 1) == ranks - 1);
    }
}

/// Messages that nobody takes.
struct StuckMessages {
    struct Stuck {
        void wait() {}
        [[nodiscard]] bool test() { return false; }
    };
    Stuck send(joinable::ConstBuffer, int, int) { return {}; }
    Stuck receive(Buffer, int, int) { return {}; }
};

TEST_CASE("the peers of messages in flight are in order") {
    using joinable::detail::MessageSchedule;
    StuckMessages messages;
    std::array<float, 3> values{};
    for (int const rank : {0, 1, 2}) { // of a ring: receives from the one before
        joinable::detail::ScheduleRun<StuckMessages> run{
            MessageSchedule::all_gather(3, 1),
            rank,
            {values.data(), values.size(), DType::f32},
            ReduceOp::sum,
            {},
            0
        };
        CHECK(run.missing_ranks().empty());
        CHECK_FALSE(run.advance(messages, joinable::detail::Waiting::tests));
        std::vector<int> others{0, 1, 2};
        others.erase(others.begin() + rank);
        CHECK(run.missing_ranks() == others);
    }
}

TEST_CASE("an exception that leaves the scope of a work aborts it") {
    for (int const ranks : {2, 3, 4, 8}) {
        run_ranks({ranks}, [](ThreadCommunicator& comm) {
            MessageCommunicator over{comm};
            std::vector<float> values(100, 1.0F);
            if (comm.rank() == 0) {
                try {
                    auto const work =
                        over.all_reduce({values.data(), 100, DType::f32}, ReduceOp::sum);
                    throw std::logic_error{"in its scope"};
                } catch (std::
                             logic_error const&) { // NOLINT(bugprone-empty-catch): the others are told
                }
                CHECK(over.is_aborted());
                CHECK_THROWS_AS(over.barrier(), joinable::PeerFailed);
            } else {
                try {
                    over.all_reduce({values.data(), 100, DType::f32}, ReduceOp::sum).wait();
                    over.barrier();
                    FAIL("rank 0 took no part");
                } catch (joinable::PeerFailed const& failure) {
                    CHECK(failure.rank() == 0);
                }
            }
        });
    }
}

/// All ranks throw Mismatch; returns its text and ranks.
template <class Body>
std::pair<std::string, std::vector<int>> mismatch(int ranks, Body const& body) {
    Watchdog const watchdog{ranks};
    std::vector<std::string> texts(static_cast<std::size_t>(ranks));
    std::vector<int> named;
    CHECK_THROWS_AS(
        joinable::run_threads(
            ranks,
            [&](ThreadCommunicator& comm) {
                comm.set_deadline(std::chrono::seconds{20});
                try {
                    body(comm);
                } catch (joinable::Mismatch const& failure) {
                    texts[static_cast<std::size_t>(comm.rank())] = failure.what();
                    if (comm.rank() == 0) {
                        named = failure.ranks();
                    }
                    throw;
                }
            }
        ),
        joinable::Mismatch
    );
    for (std::string const& text : texts) {
        CHECK(text == texts[0]);
    }
    return {texts[0], named};
}

TEST_CASE("ranks that compare throw Mismatch when they run different collectives") {
    for (int const ranks : {2, 3, 4, 8}) {
        int const odd = ranks / 2;
        std::vector<float> const ones(10, 1.0F);
        auto const differs = [&](auto const& on_one) {
            return mismatch(ranks, [&](ThreadCommunicator& comm) {
                MessageCommunicator over{comm, {.check = true}};
                std::vector<float> values = ones;
                if (comm.rank() == odd) {
                    on_one(over, values);
                } else {
                    over.all_reduce({values.data(), 10, DType::f32}, ReduceOp::sum).wait();
                }
            });
        };
        auto const text =
            "ranks run different collectives: rank 0 all_reduce of 10 f32 with sum, rank " +
            std::to_string(odd);
        auto const by_other_operation = differs([](auto& over, auto& values) {
            over.all_reduce({values.data(), 10, DType::f32}, ReduceOp::max).wait();
        });
        CHECK(by_other_operation.first == text + " all_reduce of 10 f32 with max");
        CHECK(by_other_operation.second == std::vector{odd});
        CHECK(differs([](auto& over, auto& values) {
                  over.all_reduce({values.data(), 9, DType::f32}, ReduceOp::sum).wait();
              }).first == text + " all_reduce of 9 f32 with sum");
        CHECK(differs([](auto& over, auto&) { over.barrier(); }).first == text + " barrier");
        CHECK(
            mismatch(
                ranks,
                [&](ThreadCommunicator& comm) {
                    bool const is_odd = comm.rank() == odd;
                    MessageCommunicator over{
                        comm, {.plan = AllReducePlan{is_odd ? star : tree}, .check = true}
                    };
                    over.barrier();
                }
            ).first ==
            "rank " + std::to_string(odd) +
                " and rank 0 have different MessageOptions: give the same plan, or the same costs, on every rank"
        );
    }
}

TEST_CASE("ranks that do not compare end by the messages that do not fit") {
    for (int const ranks : {2, 3, 4, 8}) {
        auto const [text, ranks_named] = mismatch(ranks, [](ThreadCommunicator& comm) {
            MessageCommunicator over{comm, {.plan = AllReducePlan{butterfly}}};
            std::vector<float> values(10);
            std::size_t const count = comm.rank() == 0 ? 9 : 10;
            over.all_reduce({values.data(), count, DType::f32}, ReduceOp::sum).wait();
        });
        CHECK(text.find("meets") != std::string::npos);
        // Another operation has other tags: it is never combined with this one.
        Watchdog const watchdog{ranks};
        CHECK_THROWS_AS(
            joinable::run_threads(
                ranks,
                [](ThreadCommunicator& comm) {
                    comm.set_deadline(std::chrono::milliseconds{50});
                    MessageCommunicator over{comm};
                    float value = 1;
                    over.all_reduce(
                            {&value, 1, DType::f32},
                            comm.rank() == 0 ? ReduceOp::max : ReduceOp::sum
                    )
                        .wait();
                }
            ),
            joinable::TimedOut
        );
    }
}

TEST_CASE("without an abort below, a failure ends the others one by one") {
    for (int const ranks : {2, 3, 4, 8}) {
        Watchdog const watchdog{ranks};
        CHECK_THROWS_WITH_AS(
            joinable::run_threads(
                ranks,
                [](ThreadCommunicator& comm) {
                    MessagesOnly messages{comm};
                    messages.fails_at = comm.rank() == 1 ? 1 : SIZE_MAX;
                    MessageCommunicator over{messages, {.plan = AllReducePlan{butterfly}}};
                    float value = 1;
                    over.all_reduce({&value, 1, DType::f32}, ReduceOp::sum).wait();
                    over.all_reduce({&value, 1, DType::f32}, ReduceOp::sum).wait();
                    over.all_reduce({&value, 1, DType::f32}, ReduceOp::sum).wait();
                }
            ),
            "no more messages",
            std::runtime_error
        );
    }
}

TEST_CASE("wrong arguments are refused before any data moves") {
    run_ranks({2}, [](ThreadCommunicator& comm) {
        MessageCommunicator over{comm};
        float value = 1;
        Buffer const buffer{&value, 1, DType::f32};
        CHECK_THROWS_AS(
            (void)over.all_reduce({nullptr, 1, DType::f32}, ReduceOp::sum),
            joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)over.all_reduce(buffer, ReduceOp::bit_or), joinable::ContractViolation
        );
        CHECK_THROWS_AS((void)over.broadcast(buffer, 2), joinable::ContractViolation);
        CHECK_THROWS_WITH_AS(
            (void)over.send(buffer, 0, 32'128),
            "tags from 32000 to 32128 are those of collectives, but a message was given 32128: take another "
            "one, or set MessageOptions::tag",
            joinable::ContractViolation
        );
        CHECK_THROWS_AS((void)over.receive(buffer, 0, 32'000), joinable::ContractViolation);
        CHECK_THROWS_WITH_AS(
            (void)(MessageCommunicator{comm, {.tag = -1}}),
            "MessageOptions::tag must be at least 0 and leave room for 129 tags, but is -1",
            joinable::ContractViolation
        );
        AllReducePlan const too_large{torus, 0, {3}};
        CHECK_THROWS_AS(
            (void)(MessageCommunicator{comm, {.plan = too_large}}), joinable::ContractViolation
        );
        CHECK(!over.is_aborted());
        over.barrier(); // all of it works on
    });
}

TEST_CASE("a guard runs over messages alone") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        MessagesOnly messages{comm};
        MessageCommunicator over{messages};
        int total = 0;
        auto const sum = [&](int inputs) {
            over.all_reduce({&inputs, 1, DType::i32}, ReduceOp::sum).wait();
            total += inputs;
        };
        joinable::Action count{over, [&] { sum(1); }, [&] { sum(0); }};
        joinable::Join guard{joinable::participants(count)};
        for (int i = 0; i < 5 + comm.rank(); ++i) {
            count();
        }
        guard.finish();
        CHECK(total == 5 * comm.size() + comm.size() * (comm.size() - 1) / 2);
    });
}

TEST_CASE("the ranks of messages tell why they were aborted") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& ranks) {
        MessageCommunicator comm{ranks};
        static_assert(joinable::TellsReason<MessageCommunicator<ThreadCommunicator>>);
        CHECK_FALSE(comm.abort_reason());
        ranks.barrier();
        int const last = comm.size() - 1;
        if (comm.rank() == last) {
            comm.abort({joinable::FailureKind::timed_out, {last}, "enough"});
        }
        wait_until([&] { return comm.is_aborted(); });
        auto const reason = comm.abort_reason();
        REQUIRE(reason);
        CHECK(reason->kind == joinable::FailureKind::timed_out);
        CHECK(reason->ranks == std::vector{last});
        CHECK(reason->message == "enough");
    });
}

TEST_CASE("a single rank that was aborted runs no more collectives, as ranks of larger groups") {
    run_ranks({1}, [](ThreadCommunicator& threads) {
        MessageCommunicator comm{threads};
        comm.barrier();
        comm.abort({joinable::FailureKind::timed_out, {0}, "enough"});
        CHECK_THROWS_WITH_AS(comm.barrier(), "enough", joinable::TimedOut);
    });
}

} // namespace
