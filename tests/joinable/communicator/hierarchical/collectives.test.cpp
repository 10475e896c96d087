// SPDX-License-Identifier: BSL-1.0
// Collectives over machines of thread ranks: those that move parts, over levels that have all collectives and
// over leaders that have next to none, from every root, and with every rank failing the others.
#include <joinable/communicator/hierarchical/communicator.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <doctest/doctest.h>
#include <support/closed_forms.hpp>
#include <support/further_types.hpp>
#include <support/linear_model.hpp>
#include <support/machines.hpp>
#include <support/process_ranks.hpp>
#include <support/tcp_ranks.hpp>
#include <support/thrown_by.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/error.hpp>
#include <joinable/hierarchical.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::Half;
using joinable::HierarchicalCommunicator;
using joinable::HierarchicalOptions;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using Sizes = std::vector<int>;

static_assert(joinable::AllGathers<ThreadMachines> && joinable::Reduces<ThreadMachines>);
static_assert(joinable::Gathers<ThreadMachines> && joinable::Scatters<ThreadMachines>);
static_assert(joinable::ScalesScatteredSums<ThreadMachines>);
static_assert(joinable::AllToAlls<ThreadMachines>);

[[nodiscard]] std::size_t index(int rank) {
    return static_cast<std::size_t>(rank);
}

TEST_CASE("every collective over machines gives every dtype what a serial program computes") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        run_machines(sizes, [](ThreadMachines& comm) {
            closed_forms::check_all_dtypes(comm, {3});
            closed_forms::check_all<float>(comm, {0, 1, 3000});
            closed_forms::check_order_of_all_dtypes(comm);
        });
    }
}

TEST_CASE("booleans, i16, u16 and complex numbers go over machines, too") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        run_machines(sizes, [](ThreadMachines& comm) {
            joinable_tests::check_further_types(comm);
        });
    }
}

TEST_CASE("machines whose ranks only sum and broadcast give the same") {
    joinable::run_threads(2, [](ThreadCommunicator& across) {
        run_tcp_threads(2, [&](joinable::TcpCommunicator& local) {
            HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            closed_forms::check_all_dtypes(comm, {3});
            closed_forms::check_all<float>(comm, {0, 1, 300});
        });
    });
}

TEST_CASE("leaders that only sum and broadcast give the same") {
    for (int const ranks_of_second : {1, 3}) {
        run_tcp_threads(2, [&](joinable::TcpCommunicator& across) {
            int const ranks = across.rank() == 0 ? 2 : ranks_of_second;
            joinable::run_threads(ranks, [&](ThreadCommunicator& local) {
                HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
                closed_forms::check_all<float, std::uint8_t>(comm, {0, 3, 3000});
            });
        });
    }
}

TEST_CASE("machines of process ranks give the same, from arenas and from other memory") {
    run_process_ranks({4}, [](joinable::ProcessCommunicator& all) {
        joinable::ProcessCommunicator local = all.split(all.rank() == 0 ? 0 : 1, all.rank());
        joinable::ProcessCommunicator leaders = all.split(local.rank() == 0 ? 0 : 1, all.rank());
        HierarchicalCommunicator comm{local, local.rank() == 0 ? &leaders : nullptr};
        closed_forms::check_all<float>(comm, {0, 3, 30'000});
    });
}

/// Element i of a rank's part.
[[nodiscard]] std::int32_t element(int rank, std::size_t i) {
    return static_cast<std::int32_t>(1000 * (rank + 1) + static_cast<int>(i));
}
/// The elements of rank r: some ranks have none.
[[nodiscard]] std::vector<std::size_t> uneven_counts(int ranks) {
    std::vector<std::size_t> counts;
    for (int rank = 0; rank < ranks; ++rank) {
        counts.push_back(index(rank * 3 + 2) % 5);
    }
    return counts;
}
[[nodiscard]] std::vector<std::int32_t> part_of(int rank, std::size_t count) {
    std::vector<std::int32_t> part(count);
    for (std::size_t i = 0; i < count; ++i) {
        part[i] = element(rank, i);
    }
    return part;
}
[[nodiscard]] std::vector<std::int32_t> parts_of_all(std::vector<std::size_t> const& counts) {
    std::vector<std::int32_t> all;
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
        auto const part = part_of(static_cast<int>(rank), counts[rank]);
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

template <class Comm>
void check_root(Comm& comm, int root, std::vector<std::size_t> const& counts, bool by_counts) {
    bool const is_root = comm.rank() == root;
    std::size_t const mine = counts[index(comm.rank())];
    std::vector<std::int32_t> const all = parts_of_all(counts);
    std::vector<std::int32_t> const own = part_of(comm.rank(), mine);

    std::vector<std::int32_t> gathered(is_root ? all.size() : 1, -1);
    std::vector<std::int32_t> scattered(mine, -1);
    std::vector<std::int32_t> const given = is_root ? all : std::vector<std::int32_t>{};
    // A root gives its table; the other ranks give tables that nobody reads.
    if (by_counts) {
        std::vector<std::size_t> const table = is_root ? counts : std::vector<std::size_t>{};
        joinable::gather(comm, own, gathered, root, table).wait();
        joinable::scatter(comm, given, scattered, root, table).wait();
    } else {
        joinable::gather(comm, own, gathered, root).wait();
        joinable::scatter(comm, given, scattered, root).wait();
    }
    CHECK(gathered == (is_root ? all : std::vector<std::int32_t>{-1}));
    CHECK(scattered == own);

    std::vector<std::int32_t> sum(17, comm.rank() + 1);
    joinable::reduce(comm, sum, ReduceOp::sum, root).wait();
    CHECK(
        sum == std::vector<std::int32_t>(
                   17, is_root ? comm.size() * (comm.size() + 1) / 2 : comm.rank() + 1
               )
    );
}

TEST_CASE("every rank of every machine is a root, of equal parts and of parts by counts") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        run_machines(sizes, [](ThreadMachines& comm) {
            for (int root = 0; root < comm.size(); ++root) {
                check_root(comm, root, std::vector<std::size_t>(index(comm.size()), 3), false);
                check_root(comm, root, uneven_counts(comm.size()), true);
            }
        });
    }
    run_tcp_threads(2, [](joinable::TcpCommunicator& across) {
        joinable::run_threads(across.rank() == 0 ? 2 : 3, [&](ThreadCommunicator& local) {
            HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            for (int root = 0; root < comm.size(); ++root) {
                check_root(comm, root, std::vector<std::size_t>(index(comm.size()), 3), false);
                check_root(comm, root, uneven_counts(comm.size()), true);
            }
        });
    });
}

/// Elements from one rank to another: some pairs have none.
[[nodiscard]] std::size_t count_between(int from, int to) {
    return index(from * 3 + to * to + 1) % 4;
}

template <class Comm>
void check_exchange(Comm& comm) {
    std::vector<std::size_t> sends;
    std::vector<std::size_t> expects;
    std::vector<std::int32_t> in;
    std::vector<std::int32_t> expected;
    for (int other = 0; other < comm.size(); ++other) {
        sends.push_back(count_between(comm.rank(), other));
        expects.push_back(count_between(other, comm.rank()));
        for (std::size_t i = 0; i < sends.back(); ++i) {
            in.push_back(element(comm.rank() * 100 + other, i));
        }
        for (std::size_t i = 0; i < expects.back(); ++i) {
            expected.push_back(element(other * 100 + comm.rank(), i));
        }
    }
    std::vector<std::int32_t> out(expected.size(), -1);
    joinable::all_to_all(comm, in, out, sends, expects).wait();
    CHECK(out == expected);
}

TEST_CASE("in an all_to_all every pair of ranks may have another count") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        run_machines(sizes, [](ThreadMachines& comm) { check_exchange(comm); });
        run_machines(sizes, [](ThreadMachines& comm) { check_exchange(comm); }, {.check = true});
    }
    run_tcp_threads(3, [](joinable::TcpCommunicator& across) { // leaders get the blocks of all
        joinable::run_threads(across.rank() + 1, [&](ThreadCommunicator& local) {
            HierarchicalCommunicator comm{local, local.rank() == 0 ? &across : nullptr};
            check_exchange(comm);
        });
    });
}

// -- orders of sums ------------------------------------------------------------------------------------------

/// The sum of the machines' sums, in order of machines, each in order of local ranks.
[[nodiscard]] std::vector<float>
sum_by_machines(Sizes const& sizes, std::vector<std::vector<float>> const& inputs) {
    std::vector<float> total;
    std::size_t rank = 0;
    for (int const size : sizes) {
        std::vector<float> machine = inputs[rank++];
        for (int other = 1; other < size; ++other, ++rank) {
            for (std::size_t i = 0; i < machine.size(); ++i) {
                machine[i] += inputs[rank][i];
            }
        }
        for (std::size_t i = 0; i < total.size(); ++i) {
            total[i] += machine[i];
        }
        if (total.empty()) {
            total = machine;
        }
    }
    return total;
}

TEST_CASE("every sum of floats is that of the machines' sums, each in order of local ranks") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        int const ranks = ranks_of(sizes);
        std::size_t const share = 700;
        std::size_t const count = share * index(ranks);
        // Powers of two, so that products are exact.
        auto const factor = [](int rank) { return rank % 3 == 1 ? 0.25 : 2.0; };
        std::vector<std::vector<float>> inputs;
        std::vector<std::vector<float>> scaled;
        std::mt19937 random{7};
        for (int rank = 0; rank < ranks; ++rank) {
            std::vector<float> numbers(count);
            std::vector<float> products;
            for (float& number : numbers) {
                number = std::normal_distribution<float>{}(random) * 1e3F;
                products.push_back(number * static_cast<float>(factor(rank)));
            }
            inputs.push_back(numbers);
            scaled.push_back(products);
        }
        std::vector<float> const plain_sum = sum_by_machines(sizes, inputs);
        std::vector<float> const scaled_sum = sum_by_machines(sizes, scaled);
        run_machines(sizes, [&](ThreadMachines& comm) {
            std::vector<float> const& mine = inputs[index(comm.rank())];
            auto const part_of_rank = [&](std::vector<float> const& all) {
                auto const from = all.begin() + static_cast<std::ptrdiff_t>(share) * comm.rank();
                return std::vector<float>(from, from + static_cast<std::ptrdiff_t>(share));
            };
            std::vector<float> part(share);
            joinable::Buffer const out{part.data(), share, DType::f32};
            joinable::ConstBuffer const in{mine.data(), count, DType::f32};
            comm.reduce_scatter(in, out, ReduceOp::sum).wait();
            CHECK((part == part_of_rank(plain_sum)));
            comm.reduce_scatter(in, out, ReduceOp::sum, factor(comm.rank())).wait();
            CHECK((part == part_of_rank(scaled_sum)));
            std::vector<float> whole = mine;
            comm.reduce({whole.data(), count, DType::f32}, ReduceOp::sum, ranks - 1).wait();
            CHECK((whole == (comm.rank() == ranks - 1 ? plain_sum : mine)));
            whole = mine;
            comm.all_reduce({whole.data(), count, DType::f32}, ReduceOp::sum, factor(comm.rank()))
                .wait();
            CHECK((whole == scaled_sum));
        });
    }
}

TEST_CASE("sums of 16 bits with factors are rounded once per level") {
    // Three times a third of it, rounded to 16 bits, would be 2. 2048 + 1 is a tie that Half rounds to 2048, so
    // rounding after each rank would lose both ones.
    Half const number{2047.0F / 1024};
    REQUIRE(static_cast<float>(Half{3 * static_cast<float>(Half{2047.0F / 1024 / 3})}) == 2.0F);
    run_machines({3}, [&](ThreadMachines& comm) {
        std::vector<Half> numbers(9, number);
        comm.all_reduce({numbers.data(), 9, DType::f16}, ReduceOp::sum, 1 / 3.0).wait();
        CHECK((numbers == std::vector<Half>(9, number)));
    });
    run_machines({1, 3}, [](ThreadMachines& comm) {
        float const given = comm.rank() == 0 ? 0.0F : comm.rank() == 1 ? 4096.0F : 2.0F;
        std::vector<Half> in(12, Half{given});
        std::vector<Half> out(3);
        comm.reduce_scatter(
                {in.data(), 12, DType::f16}, {out.data(), 3, DType::f16}, ReduceOp::sum, 0.5
        )
            .wait();
        CHECK((out == std::vector<Half>(3, Half{2050.0F})));
    });
}

TEST_CASE("averages of gradients of 16 bits are rounded once on a machine, as over its ranks alone"
) {
    Half const number{2047.0F / 1024};
    run_machines({3}, [&](ThreadMachines& comm) {
        auto params = make_params<Half>({9});
        joinable::DistributedDataParallel ddp{comm, params};
        ddp.forward([] {});
        ddp.backward([&](auto const& ready) {
            for (std::size_t i = 0; i < 9; ++i) {
                params[0].g(i) = number;
            }
            ready(0);
        });
        for (std::size_t i = 0; i < 9; ++i) {
            CHECK((params[0].g(i) == number));
        }
    });
}

// -- many at a time ------------------------------------------------------------------------------------------

TEST_CASE("collectives of all kinds are under way at a time, and end in any order") {
    for (bool const check : {false, true}) {
        for (Sizes const& sizes : {Sizes{3}, Sizes{1, 1}, Sizes{1, 3}, Sizes{2, 1, 2}}) {
            CAPTURE(text_of(sizes));
            CAPTURE(check);
            auto const body = [](ThreadMachines& comm) {
                auto const ranks = index(comm.size());
                auto const counts = uneven_counts(comm.size());
                auto const all = parts_of_all(counts);
                auto const own = part_of(comm.rank(), counts[index(comm.rank())]);
                int const sum_of_ranks = comm.size() * (comm.size() + 1) / 2;
                for (int order = 0; order < 4; ++order) {
                    int const root = order % comm.size();
                    std::vector<std::int32_t> gathered(all.size());
                    std::vector<std::int32_t> collected(all.size(), -1);
                    std::vector<std::int32_t> given = all;
                    std::vector<std::int32_t> received(own.size());
                    std::vector<std::int32_t> sums(40 * ranks, comm.rank() + 1);
                    std::vector<std::int32_t> part(40);
                    std::vector<std::int32_t> total(50'000, comm.rank() + 1);
                    std::vector<joinable::work_of<ThreadMachines>> works;
                    works.reserve(6); // gathers and scatters by counts take a further step first
                    works.push_back(joinable::all_gather(comm, own, gathered, counts));
                    works.push_back(joinable::gather(comm, own, collected, root, counts));
                    works.push_back(joinable::reduce_scatter(comm, sums, part));
                    works.push_back(joinable::scatter(comm, given, received, root, counts));
                    works.push_back(joinable::all_reduce(comm, total));
                    works.push_back(joinable::reduce(comm, sums, ReduceOp::sum, root));
                    for (std::size_t i = 0; i < works.size(); ++i) {
                        auto const next =
                            (i * 5 + index(order) + index(comm.rank())) % works.size();
                        if (next % 2 == 0) {
                            works[next].wait();
                        }
                        while (!works[next].test()) {
                            std::this_thread::yield();
                        }
                    }
                    bool const is_root = comm.rank() == root;
                    CHECK(gathered == all);
                    CHECK(collected == (is_root ? all : std::vector<std::int32_t>(all.size(), -1)));
                    CHECK(received == own);
                    CHECK(part == std::vector<std::int32_t>(40, sum_of_ranks));
                    CHECK(total == std::vector<std::int32_t>(50'000, sum_of_ranks));
                    CHECK(
                        sums == std::vector<std::int32_t>(
                                    40 * ranks, is_root ? sum_of_ranks : comm.rank() + 1
                                )
                    );
                }
            };
            run_machines(sizes, body, {.check = check});
        }
    }
}

// -- failures ------------------------------------------------------------------------------------------------

struct Kind {
    std::string name;
    std::function<void(ThreadMachines&)> run; ///< one collective
};

[[nodiscard]] std::vector<Kind> kinds() {
    static auto const buffers = [](ThreadMachines& comm, auto const& use) {
        std::vector<std::int32_t> part(5, 1);
        std::vector<std::int32_t> whole(5 * index(comm.size()), 1);
        std::vector<std::size_t> const counts(index(comm.size()), 5);
        use(part, whole, counts);
    };
    return {
        {"all_gather",
         [](ThreadMachines& comm) {
             buffers(comm, [&](auto& part, auto& whole, auto&) {
                 joinable::all_gather(comm, part, whole).wait();
             });
         }},
        {"reduce_scatter",
         [](ThreadMachines& comm) {
             buffers(comm, [&](auto& part, auto& whole, auto& counts) {
                 joinable::reduce_scatter(comm, whole, part, ReduceOp::max, counts).wait();
             });
         }},
        {"all_to_all",
         [](ThreadMachines& comm) {
             buffers(comm, [&](auto&, auto& whole, auto& counts) {
                 auto received = whole;
                 joinable::all_to_all(comm, whole, received, counts, counts).wait();
             });
         }},
        {"reduce",
         [](ThreadMachines& comm) {
             buffers(comm, [&](auto&, auto& whole, auto&) {
                 joinable::reduce(comm, whole, ReduceOp::max, 1).wait();
                 comm.barrier(); // else a rank that only sends never waits for the others
             });
         }},
        {"gather",
         [](ThreadMachines& comm) {
             buffers(comm, [&](auto& part, auto& whole, auto& counts) {
                 joinable::gather(comm, part, whole, 1, counts).wait();
             });
         }},
        {"scatter",
         [](ThreadMachines& comm) {
             buffers(comm, [&](auto& part, auto& whole, auto&) {
                 joinable::scatter(comm, whole, part, 1).wait();
                 comm.barrier();
             });
         }},
    };
}

TEST_CASE("a scatter only reads the root's buffer, which may be in memory that nobody can write") {
    run_process_ranks({2, 3}, [](joinable::ProcessCommunicator& across) {
        joinable::SelfCommunicator local;
        HierarchicalCommunicator comm{local, &across};
        std::size_t const part = 5000;
        std::size_t const count = comm.rank() == 0 ? part * index(comm.size()) : 0;
        std::size_t const bytes = part * index(comm.size()) * sizeof(float);
        void* const memory =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        std::iota(static_cast<float*>(memory), static_cast<float*>(memory) + count, 0.0F);
        REQUIRE(mprotect(memory, bytes, PROT_READ) == 0);
        std::vector<float> received(part);
        comm.scatter({memory, count, DType::f32}, {received.data(), received.size(), DType::f32}, 0)
            .wait();
        CHECK(received.front() == static_cast<float>(part * index(comm.rank())));
        CHECK(received.back() == static_cast<float>(part * index(comm.rank()) + part - 1));
        munmap(memory, bytes);
    });
}

TEST_CASE("a rank that aborts in any collective is the same error on all ranks") {
    for (bool const check : {false, true}) {
        for (Kind const& kind : kinds()) {
            for (Sizes const& sizes : {Sizes{1, 3}, Sizes{2, 2}, Sizes{3, 1}, Sizes{1, 1}}) {
                for (int culprit = 0; culprit < ranks_of(sizes); ++culprit) {
                    auto const body = [&](ThreadMachines& comm) {
                        for (int round = 0;; ++round) {
                            if (round == 2 && comm.rank() == culprit) {
                                comm.abort(
                                    {joinable::FailureKind::peer_failed, {culprit}, "out of memory"}
                                );
                            }
                            kind.run(comm);
                        }
                    };
                    MachineFailures<joinable::PeerFailed> const failures{
                        sizes, body, {.check = check}
                    };
                    failures.check({culprit}, kind.name + " over " + text_of(sizes));
                    for (auto const& failure : failures.of_rank) {
                        CHECK(failure->what() == std::string{"out of memory"});
                    }
                }
            }
        }
    }
}

TEST_CASE("a rank that does not come to a collective is TimedOut with its number on all others") {
    std::vector<std::future<void>> running; // they mostly wait
    for (bool const check : {false, true}) {
        for (Kind const& kind : kinds()) {
            for (int const late : {0, 3}) {
                running.push_back(std::async(std::launch::async, [=] {
                    std::atomic<int> failed{0};
                    auto const body = [&](ThreadMachines& comm) {
                        comm.barrier();
                        comm.set_deadline(std::chrono::seconds{3});
                        if (comm.rank() == late) {
                            wait_until([&] { return failed == comm.size() - 1; });
                            return;
                        }
                        try {
                            for (;;) {
                                kind.run(comm);
                            }
                        } catch (...) {
                            ++failed;
                            throw;
                        }
                    };
                    MachineFailures<joinable::TimedOut> const failures{
                        {2, 2}, body, {.check = check}
                    };
                    failures.check({late}, kind.name, late);
                }));
            }
        }
    }
    for (auto& one : running) {
        one.get();
    }
}

// -- comparing -----------------------------------------------------------------------------------------------

TEST_CASE(
    "ranks of other machines whose counts are not the root's throw Mismatch, also without check"
) {
    for (bool const is_scatter : {false, true}) {
        for (int const root : {0, 3}) {
            auto const body = [&](ThreadMachines& comm) {
                std::vector<std::size_t> counts{2, 2, 2, 2};
                std::vector<std::int32_t> part(comm.rank() == 1 ? 1 : comm.rank() == 2 ? 3 : 2, 7);
                std::vector<std::int32_t> whole(8, 5);
                try {
                    if (is_scatter) {
                        joinable::scatter(comm, whole, part, root, counts).wait();
                    } else {
                        joinable::gather(comm, part, whole, root, counts).wait();
                    }
                } catch (joinable::Mismatch const&) {
                    CHECK(whole == std::vector<std::int32_t>(8, 5));
                    CHECK(part == std::vector<std::int32_t>(part.size(), 7));
                    throw;
                }
            };
            MachineFailures<joinable::Mismatch> const failures{{2, 2}, body};
            std::vector<int> const culprits = root == 0 ? std::vector{0, 1} : std::vector{1, 3};
            failures.check(culprits, is_scatter ? "scatter" : "gather");
        }
    }
}

TEST_CASE("counts that differ in an all_to_all are Mismatch on all ranks, also without check") {
    // What machines send to each other is the same in sum.
    auto const body = [](ThreadMachines& comm) {
        std::vector<std::size_t> const sends(4, 2);
        std::vector<std::size_t> const expects = comm.rank() == 3
                                                     ? std::vector<std::size_t>{1, 3, 2, 2}
                                                     : std::vector<std::size_t>(4, 2);
        std::vector<std::int32_t> const in(8, comm.rank());
        std::vector<std::int32_t> out(8, -1);
        try {
            joinable::all_to_all(comm, in, out, sends, expects).wait();
        } catch (joinable::Mismatch const&) {
            CHECK(out == std::vector<std::int32_t>(8, -1));
            throw;
        }
    };
    MachineFailures<joinable::Mismatch> const failures{{2, 2}, body};
    failures.check({0, 3}, "all_to_all");
    for (auto const& failure : failures.of_rank) {
        CHECK(
            failure->what() ==
            std::string{"counts differ in all_to_all by counts of i32: rank 0 has 2 elements "
                        "for rank 3, which expects 1"}
        );
    }
}

TEST_CASE(
    "with check, whatever one rank of any machine does differently is Mismatch before data moves"
) {
    struct Case {
        std::string name;
        std::function<void(ThreadMachines&, bool is_different, std::vector<std::int32_t>&)> run;
        std::string text;
        bool are_tables = false; ///< then the error names a rank of the other machine, too
    };
    static auto const narrowed = [](std::vector<std::int32_t>& values, std::size_t count) {
        return joinable::Buffer{values.data(), count, DType::i32};
    };
    std::vector<Case> const cases{
        {"collectives",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             if (is_different) {
                 comm.broadcast(narrowed(values, 8), 0).wait();
             } else {
                 comm.all_reduce(narrowed(values, 8), ReduceOp::sum).wait();
             }
         },
         "broadcast of 8 i32 from rank 0"},
        {"counts",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             comm.all_reduce(narrowed(values, is_different ? 7 : 8), ReduceOp::sum).wait();
         },
         "all_reduce of 7 i32 with sum"},
        {"dtypes",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             DType const dtype = is_different ? DType::u32 : DType::i32;
             comm.broadcast({values.data(), 8, dtype}, 1).wait();
         },
         "broadcast of 8 u32 from rank 1"},
        {"operations",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             comm.reduce(narrowed(values, 8), is_different ? ReduceOp::max : ReduceOp::sum, 0)
                 .wait();
         },
         "reduce of 8 i32 with max"},
        {"roots of one machine",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             comm.broadcast(narrowed(values, 8), is_different ? 1 : 0).wait();
         },
         "broadcast of 8 i32 from rank 1"},
        {"roots of two machines",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             std::vector<std::int32_t> part(2);
             comm.scatter(narrowed(values, 8), narrowed(part, 2), is_different ? 3 : 0).wait();
         },
         "scatter of 2 i32 from rank 3"},
        {"a barrier, and a sum of one byte",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             if (is_different) {
                 comm.barrier();
             } else {
                 comm.all_reduce({values.data(), 1, DType::u8}, ReduceOp::sum).wait();
             }
         },
         "barrier"},
        {"tables of which only parts of others differ",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             std::vector<std::size_t> counts{2, 2, 2, 2};
             std::size_t const other = comm.rank() < 2 ? 2 : 0; // on the other machine
             if (is_different) {
                 ++counts[other];
                 --counts[other + 1];
             }
             std::vector<std::int32_t> const part(2, 3);
             comm.all_gather({part.data(), 2, DType::i32}, narrowed(values, 8), counts).wait();
         },
         "counts differ in all_gather by counts of i32: rank ",
         true},
        {"parts with counts, and equal ones",
         [](ThreadMachines& comm, bool is_different, auto& values) {
             std::vector<std::size_t> const counts{2, 2, 2, 2};
             std::vector<std::int32_t> part(2, 3);
             if (is_different) {
                 comm.reduce_scatter(narrowed(values, 8), narrowed(part, 2), ReduceOp::sum).wait();
             } else {
                 comm.reduce_scatter(narrowed(values, 8), narrowed(part, 2), ReduceOp::sum, counts)
                     .wait();
             }
         },
         "reduce_scatter of 2 i32"},
    };
    for (Case const& one : cases) {
        for (int different = 1; different < 4;
             ++different) { // rank 0 is what others are compared with
            for (bool const is_tested : {false, true}) {
                auto const body = [&](ThreadMachines& comm) {
                    std::vector<std::int32_t> values(8, comm.rank());
                    // An earlier one is not disturbed.
                    std::vector<std::int32_t> sum(3, 1);
                    auto earlier = joinable::all_reduce(comm, sum);
                    if (is_tested) {
                        while (!earlier.test()) {
                            std::this_thread::yield();
                        }
                    }
                    try {
                        one.run(comm, comm.rank() == different, values);
                    } catch (joinable::Mismatch const&) {
                        CHECK(values == std::vector<std::int32_t>(8, comm.rank()));
                        CHECK(sum == std::vector<std::int32_t>(3, 4));
                        throw;
                    }
                };
                MachineFailures<joinable::Mismatch> const failures{{2, 2}, body, {.check = true}};
                int const other = different < 2 ? 2 : 0;
                std::vector<int> culprits{different};
                if (one.are_tables) {
                    culprits.insert(other < different ? culprits.begin() : culprits.end(), other);
                }
                failures.check(culprits, one.name);
                std::string const what = failures.of_rank[0] ? failures.of_rank[0]->what() : "";
                CHECK_MESSAGE(what.find(one.text) != std::string::npos, one.name, ": ", what);
                for (auto const& failure : failures.of_rank) {
                    CHECK(failure->what() == what);
                }
            }
        }
    }
}

TEST_CASE("with check, collectives that fit give what they give without it") {
    for (Sizes const& sizes : machine_layouts) {
        CAPTURE(text_of(sizes));
        run_machines(
            sizes,
            [](ThreadMachines& comm) {
                closed_forms::check_all<float, std::uint8_t>(comm, {0, 3, 700});
                for (int root = 0; root < comm.size(); ++root) {
                    check_root(comm, root, uneven_counts(comm.size()), true);
                }
                comm.barrier();
            },
            {.check = true}
        );
    }
    joinable::SelfCommunicator local;
    joinable::SelfCommunicator across;
    HierarchicalCommunicator comm{local, &across, {.check = true}};
    closed_forms::check_all<float>(comm, {3});
    comm.barrier();
}

TEST_CASE("a rank that does not compare while others do is refused on all ranks") {
    std::string const options_differ =
        "options differ: HierarchicalOptions::check, or JOINABLE_CHECK=collectives: ";
    for (int const different : {0, 1, 3}) {
        std::atomic<int> refused{0};
        on_machines({2, 2}, [&](OnMachine place) {
            int const rank = 2 * place.machine + place.local.rank();
            auto const make = [&] {
                HierarchicalCommunicator const comm{
                    place.local, place.across, {.check = rank == different}
                };
            };
            joinable_tests::check_thrown<joinable::Mismatch>(
                different == 0 ? std::vector{1, 2, 3} : std::vector{different},
                different == 0 ? options_differ + "rank 0 has true, rank 1 has false"
                               : options_differ + "rank 0 has false, rank " +
                                     std::to_string(different) + " has true",
                make
            );
            ++refused;
            wait_until([&] { return refused == 4; });
        });
    }
}

} // namespace
