// SPDX-License-Identifier: BSL-1.0
// Machines of thread ranks, of equal and unequal sizes: results, orders of sums, and every way in which a rank
// can fail the others. The suites of guards and participants run over such machines, too: see rank_kinds/.
#include <joinable/communicator/hierarchical/communicator.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/all_reducer.hpp>
#include <support/closed_forms.hpp>
#include <support/for_each_type.hpp>
#include <support/keep_alive.hpp>
#include <support/linear_model.hpp>
#include <support/machines.hpp>
#include <support/recording_communicator.hpp>
#include <support/tcp_ranks.hpp>
#include <support/tells_reason.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/error.hpp>
#include <joinable/hierarchical.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::HierarchicalCommunicator;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using Sizes = std::vector<int>;

static_assert(joinable::Aborts<ThreadMachines>);
static_assert(joinable::RenewsDeadline<ThreadMachines>);
static_assert(joinable::ReportsMissing<ThreadMachines>);
static_assert(joinable::AllocatesArena<ThreadMachines>);
static_assert(joinable::AllToAlls<ThreadMachines>);

TEST_CASE("ranks are numbered machine by machine, by local rank on each") {
    for (Sizes const& sizes : machine_layouts) {
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(ranks_of(sizes)));
        on_machines(sizes, [&](OnMachine place) {
            HierarchicalCommunicator comm{place.local, place.across};
            CHECK(comm.size() == ranks_of(sizes));
            int const before = std::accumulate(sizes.begin(), sizes.begin() + place.machine, 0);
            CHECK(comm.rank() == before + place.local.rank());
            CHECK(comm.machine() == place.machine);
            CHECK(comm.machine_of(comm.rank()) == place.machine);
            CHECK(comm.machine_of(comm.size() - 1) == static_cast<int>(sizes.size()) - 1);
            ++seen[static_cast<std::size_t>(comm.rank())];
        });
        CHECK(std::all_of(seen.begin(), seen.end(), [](auto const& one) { return one == 1; }));
    }
}

TEST_CASE("every dtype and operation is combined over all ranks") {
    for (Sizes const& sizes : machine_layouts) {
        run_machines(sizes, [&](ThreadMachines& comm) {
            for (std::size_t number = 0; number < joinable::dtype_count; ++number) {
                auto const dtype = static_cast<DType>(number);
                joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
                    for (std::size_t op = 0; op < joinable::reduce_op_count; ++op) {
                        auto const operation = static_cast<ReduceOp>(op);
                        if (!joinable::detail::is_reducible(dtype, operation)) {
                            continue;
                        }
                        // Small numbers are exact in every dtype. One factor of a product is not 1.
                        auto const of_rank = [&](int rank, std::size_t i) {
                            int const drawn = (rank + static_cast<int>(i)) % comm.size();
                            return operation == ReduceOp::product ? (drawn == 0 ? 3 : 1) : drawn;
                        };
                        std::vector<T> values;
                        for (std::size_t i = 0; i < 37; ++i) {
                            values.push_back(
                                static_cast<T>(static_cast<float>(of_rank(comm.rank(), i)))
                            );
                        }
                        comm.all_reduce({values.data(), values.size(), dtype}, operation).wait();
                        std::size_t wrong = 0;
                        for (std::size_t i = 0; i < values.size(); ++i) {
                            int const result =
                                closed_forms::combined(operation, comm.size(), [&](int rank) {
                                    return of_rank(rank, i);
                                });
                            wrong += static_cast<float>(values[i]) == static_cast<float>(result)
                                         ? 0U
                                         : 1U;
                        }
                        CHECK_MESSAGE(
                            wrong == 0,
                            text_of(sizes),
                            ": ",
                            joinable::name_of(dtype),
                            " by ",
                            joinable::name_of(operation)
                        );
                    }
                });
            }
        });
    }
}

TEST_CASE("a sum of floats is that of the machines' sums, each in order of local ranks") {
    for (Sizes const& sizes : machine_layouts) {
        constexpr std::size_t count = 5000;
        std::vector<std::vector<float>> inputs;
        std::mt19937 random{7};
        for (int rank = 0; rank < ranks_of(sizes); ++rank) {
            std::vector<float> numbers(count);
            for (float& number : numbers) {
                number = std::normal_distribution<float>{}(random) * 1e3F;
            }
            inputs.push_back(numbers);
        }
        std::vector<float> expected;
        std::size_t rank = 0;
        for (int const size : sizes) {
            std::vector<float> machine = inputs[rank++];
            for (int other = 1; other < size; ++other, ++rank) {
                for (std::size_t i = 0; i < count; ++i) {
                    machine[i] += inputs[rank][i];
                }
            }
            if (expected.empty()) {
                expected = machine;
            } else {
                for (std::size_t i = 0; i < count; ++i) {
                    expected[i] += machine[i];
                }
            }
        }
        run_machines(sizes, [&](ThreadMachines& comm) {
            std::vector<float> values = inputs[static_cast<std::size_t>(comm.rank())];
            comm.all_reduce({values.data(), count, DType::f32}, ReduceOp::sum).wait();
            CHECK(std::memcmp(values.data(), expected.data(), count * sizeof(float)) == 0);
        });
    }
}

TEST_CASE("every rank broadcasts, and works end in any order") {
    for (Sizes const& sizes : machine_layouts) {
        run_machines(sizes, [](ThreadMachines& comm) {
            for (int root = 0; root < comm.size(); ++root) {
                for (int order = 0; order < 3; ++order) {
                    std::vector<std::int32_t> sent(700, comm.rank() == root ? 100 + root : -1);
                    std::vector<double> small(3, 1.0);
                    std::vector<std::uint64_t> large(20'000, 1);
                    auto first = comm.all_reduce({small.data(), 3, DType::f64}, ReduceOp::sum);
                    auto second = comm.broadcast({sent.data(), 700, DType::i32}, root);
                    auto third = comm.all_reduce({large.data(), 20'000, DType::u64}, ReduceOp::sum);
                    if ((comm.rank() + order) % 3 == 0) {
                        third.wait(); // does its part in the others first
                        CHECK(first.test());
                    } else if ((comm.rank() + order) % 3 == 1) {
                        while (!second.test()) {
                            std::this_thread::yield();
                        }
                        third.wait();
                        third.wait();
                    }
                    first.wait();
                    second.wait();
                    third.wait();
                    comm.barrier();
                    CHECK(small == std::vector<double>(3, comm.size()));
                    CHECK(sent == std::vector<std::int32_t>(700, 100 + root));
                    CHECK(
                        large ==
                        std::vector<std::uint64_t>(20'000, static_cast<std::uint64_t>(comm.size()))
                    );
                }
            }
        });
    }
}

TEST_CASE("no rank leaves a barrier before all have come, and fifty collectives are under way") {
    for (Sizes const& sizes : {Sizes{1, 3}, Sizes{2, 2}}) {
        std::atomic<int> arrived{0};
        run_machines(sizes, [&](ThreadMachines& comm) {
            for (int round = 1; round <= 20; ++round) {
                ++arrived;
                comm.barrier();
                CHECK(arrived >= round * comm.size());
            }
            std::vector<std::uint64_t> values(50, 1);
            {
                std::vector<joinable::HierarchicalWork> works;
                works.reserve(values.size());
                for (std::uint64_t& value : values) {
                    works.push_back(comm.all_reduce({&value, 1, DType::u64}, ReduceOp::sum));
                }
            } // each waits
            CHECK(
                values == std::vector<std::uint64_t>(50, static_cast<std::uint64_t>(comm.size()))
            );
        });
    }
}

TEST_CASE("the leaders' communicator is in an optional, or behind a pointer of any kind") {
    joinable::SelfCommunicator local;
    std::optional<joinable::SelfCommunicator> across{std::in_place};
    HierarchicalCommunicator comm{local, across};
    std::uint64_t value = 5;
    comm.all_reduce({&value, 1, DType::u64}, ReduceOp::sum).wait();
    CHECK(value == 5);
    CHECK(comm.size() == 1);
    across.reset();
    auto const without = [&] { HierarchicalCommunicator const other{local, across}; };
    CHECK_THROWS_AS(without(), joinable::ContractViolation);
    auto const pointer = std::make_unique<joinable::SelfCommunicator>();
    joinable::SelfCommunicator alone;
    CHECK(HierarchicalCommunicator{alone, pointer}.rank() == 0);
}

TEST_CASE("one deadline is that of both levels") {
    on_machines({2, 2}, [](OnMachine place) {
        HierarchicalCommunicator comm{place.local, place.across};
        CHECK(comm.set_deadline(std::chrono::seconds{41}) == std::chrono::seconds{60});
        CHECK(place.local.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{41});
        if (place.across != nullptr) {
            CHECK(place.across->set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{41});
        }
        CHECK(comm.missing_ranks().empty());
    });
}

TEST_CASE("after a guard with a timeout each level has its own deadline again") {
    on_machines({2, 2}, [](OnMachine place) {
        place.local.set_deadline(std::chrono::seconds{100});
        if (place.across != nullptr) {
            place.across->set_deadline(std::chrono::seconds{70});
        }
        HierarchicalCommunicator comm{place.local, place.across};
        joinable::Step step{comm, [] {}};
        {
            joinable::Join guard{
                joinable::participants(step), {.timeout = std::chrono::seconds{50}}
            };
            step.step();
            guard.finish();
        }
        CHECK(place.local.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{100});
        if (place.across != nullptr) {
            CHECK(place.across->set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{70});
        }
    });
}

/// Has no deadlines.
struct Timeless : CoreOnly<ThreadCommunicator> {
    using CoreOnly<ThreadCommunicator>::CoreOnly;
    void abort(joinable::AbortReason const& reason) { inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return inner_.is_aborted(); }
    [[nodiscard]] auto abort_reason() const { return inner_.abort_reason(); }
};

TEST_CASE("a deadline that one level cannot keep changes none") {
    joinable::run_threads(4, [](ThreadCommunicator& world) {
        auto local = world.split(world.rank() / 2, 0);
        auto leaders = world.split(world.rank() % 2, 0);
        std::optional<Timeless> across;
        if (local.rank() == 0) {
            across.emplace(leaders);
        }
        local.set_deadline(std::chrono::seconds{60});
        HierarchicalCommunicator comm{local, across};
        if (across) {
            CHECK_THROWS_AS(
                comm.set_deadline(std::chrono::seconds{7}), joinable::ContractViolation
            );
        }
        CHECK(local.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{60});
        world.barrier();
    });
}

TEST_CASE("a level of one rank needs no deadline") {
    joinable::run_threads(2, [](ThreadCommunicator& across) {
        joinable::SelfCommunicator alone;
        across.set_deadline(std::chrono::seconds{60});
        HierarchicalCommunicator comm{alone, &across};
        CHECK(comm.set_deadline(std::chrono::seconds{41}) == std::chrono::seconds{60});
        CHECK(across.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{41});
    });
}

// -- failures ------------------------------------------------------------------------------------------------

void sum_for_ever(ThreadMachines& comm) {
    std::vector<float> values(700, 1.0F);
    for (;;) {
        comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::max).wait();
    }
}

TEST_CASE("a rank that aborts is the same error with the same text on all ranks of all machines") {
    for (Sizes const& sizes : machine_layouts) {
        for (int culprit = 0; culprit < ranks_of(sizes); ++culprit) {
            MachineFailures<joinable::PeerFailed> const failures{
                sizes,
                [&](ThreadMachines& comm) {
                    if (comm.rank() == culprit) {
                        std::uint64_t one = 1;
                        comm.all_reduce({&one, 1, DType::u64}, ReduceOp::sum).wait();
                        comm.abort({joinable::FailureKind::peer_failed, {culprit}, "out of memory"}
                        );
                    } else {
                        std::uint64_t one = 1;
                        comm.all_reduce({&one, 1, DType::u64}, ReduceOp::sum).wait();
                    }
                    sum_for_ever(comm);
                }
            };
            failures.check({culprit}, text_of(sizes));
            for (auto const& failure : failures.of_rank) {
                CHECK(failure->what() == std::string{"out of memory"});
            }
        }
    }
}

TEST_CASE("a rank that leaves is named by its number on all other machines, and has left there") {
    for (auto const& sizes : machine_layouts) {
        int const ranks = ranks_of(sizes);
        for (int leaver = 0; leaver < ranks; ++leaver) {
            std::atomic<int> named{0};
            run_machines(sizes, [&](ThreadMachines& comm) {
                comm.barrier();
                if (comm.rank() == leaver) {
                    return;
                }
                std::uint64_t one = 1;
                try {
                    comm.all_reduce({&one, 1, DType::u64}, ReduceOp::sum).wait();
                } catch (joinable::PeerFailed const& failure) {
                    named += failure.ranks() == std::vector{leaver} ? 1 : 0;
                    std::string const text = "rank " + std::to_string(leaver) +
                                             " left while rank " + std::to_string(comm.rank()) +
                                             " waits for it in all_reduce of 1 u64 with sum";
                    CHECK(failure.what() == text);
                }
                check_tells_who_has_left(comm, leaver);
            });
            CHECK_MESSAGE(named == ranks - 1, text_of(sizes), ": rank ", leaver);
        }
    }
}

TEST_CASE("machines of machines throw one failure, by the ranks of all of them") {
    for (int culprit = 0; culprit < 6; ++culprit) {
        std::atomic<int> ended{0};
        std::atomic<int> right{0};
        joinable::run_threads(2, [&](ThreadCommunicator& top) {
            on_machines({2, 1}, [&](OnMachine place) {
                ThreadMachines rack{place.local, place.across};
                ThreadMachines comm{rack, rack.rank() == 0 ? &top : nullptr};
                comm.barrier();
                if (comm.rank() == culprit) {
                    comm.abort({joinable::FailureKind::peer_failed, {culprit}, "out of memory"});
                }
                try {
                    comm.barrier();
                } catch (joinable::PeerFailed const& failure) {
                    bool const is_right = failure.ranks() == std::vector{culprit} &&
                                          failure.what() == std::string{"out of memory"};
                    right += is_right ? 1 : 0;
                }
                auto const reason = rack.abort_reason();
                REQUIRE(reason);
                CHECK(reason->ranks == std::vector{culprit});
                CHECK(reason->origin >= 0); // these are no ranks of the rack, which names none
                try {
                    rack.barrier();
                } catch (joinable::PeerFailed const& failure) {
                    CHECK(failure.ranks().empty());
                }
                ++ended;
                wait_until(ended, 6);
            });
        });
        CHECK_MESSAGE(right == 6, "culprit ", culprit);
    }
}

TEST_CASE("an exception that leaves a rank's scope, or a work, is PeerFailed on all others") {
    for (Sizes const& sizes : {Sizes{1, 3}, Sizes{2, 2}, Sizes{3, 1}}) {
        for (int culprit = 0; culprit < ranks_of(sizes); ++culprit) {
            for (bool const has_work : {false, true}) {
                std::atomic<int> failed{0};
                CHECK_THROWS_WITH_AS(
                    run_machines(
                        sizes,
                        [&](ThreadMachines& comm) {
                            if (comm.rank() == culprit) {
                                std::vector<float> values(700, 1.0F);
                                std::optional<joinable::work_of<ThreadMachines>> work;
                                if (has_work) {
                                    work.emplace(comm.all_reduce(
                                        {values.data(), 700, DType::f32}, ReduceOp::max
                                    ));
                                }
                                throw std::runtime_error{"the original"};
                            }
                            try {
                                sum_for_ever(comm);
                            } catch (joinable::PeerFailed const& failure) {
                                CHECK(failure.ranks() == std::vector{culprit});
                                ++failed;
                                throw;
                            }
                        }
                    ),
                    "the original",
                    std::runtime_error
                );
                CHECK(failed == ranks_of(sizes) - 1);
            }
        }
    }
}

TEST_CASE("a rank that does not come is TimedOut with its number on all others") {
    struct Case {
        Sizes sizes;
        int late;
    };
    std::vector<std::future<void>> running; // they mostly wait
    for (Case const& one :
         {Case{{2, 2}, 0},
          Case{{2, 2}, 1},
          Case{{2, 2}, 2},
          Case{{2, 2}, 3},
          Case{{1, 3}, 2},
          Case{{1, 1, 1}, 2}}) {
        running.push_back(std::async(std::launch::async, [one] {
            std::atomic<int> failed{0};
            MachineFailures<joinable::TimedOut> const failures{
                one.sizes,
                [&](ThreadMachines& comm) {
                    comm.barrier();
                    comm.set_deadline(std::chrono::seconds{3});
                    if (comm.rank() == one.late) {
                        wait_until([&] { return failed == comm.size() - 1; });
                        return;
                    }
                    try {
                        sum_for_ever(comm);
                    } catch (...) {
                        ++failed;
                        throw;
                    }
                }
            };
            failures.check({one.late}, text_of(one.sizes), one.late);
        }));
    }
    for (auto& one : running) {
        one.get();
    }
}

TEST_CASE("what happens on a level that a collective has left does not end it") {
    std::atomic<bool> is_over{false};
    std::atomic<bool> has_tested{false};
    on_machines({1, 2}, [&](OnMachine place) {
        HierarchicalCommunicator comm{place.local, place.across};
        if (comm.rank() == 2) {
            // Its leader waits for it on their machine.
            wait_until([&] { return has_tested || comm.is_aborted(); });
        }
        std::int32_t value = comm.rank() == 0 ? 7 : -1;
        auto work = comm.broadcast({&value, 1, DType::i32}, 0);
        if (comm.rank() == 1) {
            wait_until([&] { return work.test() || is_over; });
            CHECK(!work.test());
            has_tested = true;
        }
        work.wait();
        CHECK(value == 7);
        if (comm.rank() == 0) {
            place.across->abort({joinable::FailureKind::peer_failed, {0}, "rank 0 has left"});
            is_over = true;
        }
    });
}

TEST_CASE("a leader that waits for other machines hears of an abort on its own") {
    std::atomic<bool> waits{false};
    std::atomic<int> failed{0};
    MachineFailures<joinable::PeerFailed> const failures{
        {1, 3},
        [&](ThreadMachines& comm) {
            comm.set_deadline(std::chrono::seconds{20});
            if (comm.rank() == 0) {
                wait_until(failed, 3);
            }
            std::uint64_t one = 1;
            try { // rank 2 may still be posting when rank 3 aborts
                auto work = comm.all_reduce({&one, 1, DType::u64}, ReduceOp::sum);
                if (comm.rank() == 1) {
                    wait_until([&] { return work.test() || comm.missing_ranks() == std::vector{0}; }
                    );
                    waits = true;
                } else if (comm.rank() == 3) {
                    wait_until([&] { return waits || comm.is_aborted(); });
                    comm.abort({joinable::FailureKind::peer_failed, {3}, "out of memory"});
                }
                work.wait();
            } catch (...) {
                ++failed;
                throw;
            }
        }
    };
    failures.check({3}, "1+3");
}

TEST_CASE("a slow rank that says that it works makes no rank of any machine time out") {
    together({0, 3}, [](int slow) {
        run_machines({2, 2}, [&](ThreadMachines& comm) {
            comm.barrier();
            comm.set_deadline(long_deadline);
            if (comm.rank() == slow) {
                stay_away_alive(comm);
            }
            comm.barrier();
        });
    });
}

TEST_CASE("ranks that run different collectives throw Mismatch with their numbers") {
    for (bool const is_polled : {false, true}) {
        for (int const different : {1, 3}) {
            MachineFailures<joinable::Mismatch> const failures{
                {2, 2},
                [&](ThreadMachines& comm) {
                    std::vector<float> values(8, 1.0F);
                    auto work = comm.all_reduce(
                        {values.data(), comm.rank() == different ? 7U : 8U, DType::f32},
                        ReduceOp::sum
                    );
                    while (is_polled && !work.test()) {
                    }
                    work.wait();
                }
            };
            failures.check({different}, "within a machine");
        }
    }
    MachineFailures<joinable::Mismatch> const across{
        {2, 2, 1},
        [](ThreadMachines& comm) {
            std::vector<float> values(8, 1.0F);
            bool const is_different = comm.machine() == 1;
            comm.all_reduce({values.data(), is_different ? 7U : 8U, DType::f32}, ReduceOp::sum)
                .wait();
        }
    };
    across.check({2}, "of whole machines"); // its leader
    CHECK(std::string{across.of_rank[0]->what()}.find("rank 2 leads a machine") == 0);
    MachineFailures<joinable::Mismatch> const roots{
        {2, 2},
        [](ThreadMachines& comm) {
            std::vector<float> values(8, 1.0F);
            comm.broadcast({values.data(), 8, DType::f32}, comm.rank() == 3 ? 3 : 2).wait();
        }
    };
    roots.check({3}, "of roots");
}

TEST_CASE("a communicator is refused on all ranks if the wrong ones have the leaders'") {
    std::atomic<int> refused{0};
    on_machines({2, 2}, [&](OnMachine place) { // no rank of machine 1 leads it
        ThreadCommunicator* const across = place.machine == 0 ? place.across : nullptr;
        auto const make = [&] { HierarchicalCommunicator const comm{place.local, across}; };
        if (place.machine == 1) {
            CHECK_THROWS_WITH_AS(
                make(),
                doctest::Contains("on local rank 0, which leads its machine, but it has none"),
                joinable::ContractViolation
            );
            if (place.across != nullptr) { // as a program does that gives up
                place.across->abort({joinable::FailureKind::contract, {}, "machine 1 has none"});
            }
        } else {
            CHECK_THROWS_AS(make(), joinable::ContractViolation);
        }
        ++refused;
        wait_until([&] { return refused == 4; });
    });
    refused = 0;
    on_machines({1, 3}, [&](OnMachine place) {
        bool const is_wrong = place.machine == 1 && place.local.rank() == 2;
        ThreadCommunicator* const across = is_wrong ? &place.local : place.across; // any one
        auto const make = [&] { HierarchicalCommunicator const comm{place.local, across}; };
        CHECK_THROWS_WITH_AS(
            make(),
            doctest::Contains("1 other ranks of its machine have one"),
            joinable::ContractViolation
        );
        ++refused;
        wait_until([&] { return refused == 4; });
    });
}

// -- guards --------------------------------------------------------------------------------------------------

TEST_CASE("an exception at any point of a round is PeerFailed with the rank's number on all others"
) {
    using Place = std::function<void(AllReducer<ThreadMachines>&, std::function<void()>)>;
    std::vector<Place> const places{
        [](auto& reducer, auto fail) {
            reducer.before_reduction = [=](auto const& round) {
                if (round.number() == 1) {
                    fail();
                }
            };
        },
        [](auto& reducer, auto fail) { reducer.before_shadow = [=](auto const&) { fail(); }; },
        [](auto& reducer, auto fail) { reducer.before_post = [=](auto const&) { fail(); }; },
    };
    for (Sizes const& sizes : {Sizes{1, 3}, Sizes{2, 2}}) {
        for (int culprit = 0; culprit < 3; ++culprit) { // the last rank shadows nothing
            for (std::size_t place = 0; place <= places.size(); ++place) {
                std::atomic<int> failed{0};
                auto const all = [&] {
                    run_machines(sizes, [&](ThreadMachines& comm) {
                        bool const is_culprit = comm.rank() == culprit;
                        try {
                            AllReducer reducer{comm};
                            if (is_culprit && place < places.size()) {
                                places[place](reducer, [] {
                                    throw std::runtime_error{"the original"};
                                });
                            }
                            joinable::Join guard{joinable::participants(reducer)};
                            for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
                                reducer();
                                if (is_culprit && place == places.size()) { // between rounds
                                    throw std::runtime_error{"the original"};
                                }
                            }
                            guard.finish();
                        } catch (joinable::PeerFailed const& failure) {
                            CHECK_MESSAGE(failure.ranks() == std::vector{culprit}, failure.what());
                            ++failed;
                            throw;
                        }
                    });
                };
                CHECK_THROWS_WITH_AS(all(), "the original", std::runtime_error);
                CHECK_MESSAGE(failed == 3, text_of(sizes), ", place ", place, ", rank ", culprit);
            }
        }
    }
}

TEST_CASE("joined ranks of all machines shadow the others, as in the tests of upstream") {
    for (Sizes const& sizes : machine_layouts) {
        run_machines(sizes, [](ThreadMachines& comm) {
            AllReducer reducer{comm};
            int total = 0;
            joinable::Join guard{joinable::participants(reducer)};
            for (int i = 0; i < upstream_inputs(comm.rank()); ++i) {
                total += reducer();
            }
            joinable::JoinResult const result = guard.finish();
            CHECK(total == upstream_total(comm.rank(), comm.size()));
            CHECK(result.authoritative_rank == comm.size() - 1);
        });
    }
}

TEST_CASE("ranks of all machines average the gradients of a model, whatever rank runs out") {
    for (Sizes const& sizes : {Sizes{1, 3}, Sizes{2, 2}, Sizes{3, 1}, Sizes{1, 1, 1, 1}}) {
        run_machines(sizes, [](ThreadMachines& comm) {
            auto params = make_params<float>({3, 5});
            joinable::DistributedDataParallel ddp{comm, params};
            joinable::Step step{comm, [&] {
                                    for (auto& param : params) {
                                        for (std::size_t i = 0; i < param.value.size(); ++i) {
                                            param.value[i] -= param.g(i);
                                        }
                                    }
                                }};
            int const inputs_of_last = 2 + comm.size() - 1;
            auto const average = [&](int round) { // exact: of powers of two, by four ranks
                int sum = 0;
                for (int rank = 0; rank < comm.size(); ++rank) {
                    sum += round < 2 + rank ? 1 << rank : 0;
                }
                return static_cast<float>(sum) / static_cast<float>(comm.size());
            };
            joinable::Join guard{joinable::participants(ddp, step)};
            for (int round = 0; round < 2 + comm.rank(); ++round) {
                ddp.forward([] {});
                ddp.backward([&](auto const& ready) {
                    for (std::size_t p = params.size(); p-- != 0;) {
                        for (std::size_t i = 0; i < params[p].value.size(); ++i) {
                            params[p].g(i) = static_cast<float>((1 << comm.rank()) << p);
                        }
                        ready(p);
                    }
                });
                CHECK(params[0].g(2) == average(round));
                CHECK(params[1].g(4) == 2 * average(round));
                step.step();
            }
            guard.finish();
            float total = 0;
            for (int round = 0; round < inputs_of_last; ++round) {
                total += average(round);
            }
            CHECK(params[0].value == std::vector<float>(3, -total));
            CHECK(params[1].value == std::vector<float>(5, -2 * total));
        });
    }
}

// -- over TCP ------------------------------------------------------------------------------------------------

TEST_CASE("machines of threads that TCP connects sum, and fail together") {
    std::atomic<int> failed{0};
    run_tcp_threads(2, [&](joinable::TcpCommunicator& across) {
        joinable::run_threads(across.rank() == 0 ? 1 : 3, [&](ThreadCommunicator& local) {
            HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            for (int round = 0; round < 20; ++round) {
                std::vector<std::uint64_t> values(1000, static_cast<std::uint64_t>(comm.rank()));
                comm.all_reduce({values.data(), values.size(), DType::u64}, ReduceOp::sum).wait();
                CHECK(values == std::vector<std::uint64_t>(1000, 6));
            }
            try {
                if (comm.rank() == 3) {
                    comm.abort({joinable::FailureKind::peer_failed, {3}, "no more memory"});
                }
                for (;;) {
                    comm.barrier();
                }
            } catch (joinable::PeerFailed const& failure) {
                CHECK(failure.ranks() == std::vector{3});
                CHECK(failure.what() == std::string{"no more memory"});
                ++failed;
                wait_until([&] { return failed == 4; });
            }
        });
    });
    CHECK(failed == 4);
}

} // namespace
