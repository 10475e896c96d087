// SPDX-License-Identifier: BSL-1.0
// Every collective, dtype and operation over MPI against closed forms of what each rank gives.
#include <joinable/communicator/mpi/communicator.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <support/mpi_ranks.hpp>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::MpiCommunicator;
using joinable::ReduceOp;

static_assert(joinable::AllGathers<MpiCommunicator> && joinable::ReduceScatters<MpiCommunicator>);
static_assert(joinable::Reduces<MpiCommunicator> && joinable::AllToAlls<MpiCommunicator>);
static_assert(joinable::Gathers<MpiCommunicator> && joinable::Scatters<MpiCommunicator>);
static_assert(joinable::SendsAndReceives<MpiCommunicator> && joinable::Splits<MpiCommunicator>);
static_assert(joinable::Aborts<MpiCommunicator> && joinable::RenewsDeadline<MpiCommunicator>);
static_assert(joinable::ReportsMissing<MpiCommunicator> && joinable::SharesMemory<MpiCommunicator>);
static_assert(joinable::AllocatesArena<MpiCommunicator>);
static_assert(joinable::ScalesScatteredSums<MpiCommunicator>);

constexpr auto deadline = std::chrono::seconds{60};

/// Small whole numbers, which every dtype holds, and whose sums and products of 8 are exact.
int number(int rank, std::size_t i) {
    return 1 + (rank + static_cast<int>(i)) % 2;
}
int combined(ReduceOp op, int world, std::size_t i) {
    int result = number(0, i);
    for (int rank = 1; rank < world; ++rank) {
        int const next = number(rank, i);
        switch (op) {
        case ReduceOp::sum: result += next; break;
        case ReduceOp::product: result *= next; break;
        case ReduceOp::min: result = std::min(result, next); break;
        case ReduceOp::max: result = std::max(result, next); break;
        case ReduceOp::bit_and: result &= next; break;
        case ReduceOp::bit_or: result |= next; break;
        }
    }
    return result;
}

/// The elements of one rank: in memory of the communicator, or of the heap.
template <class T>
class Elements {
public:
    Elements(MpiCommunicator& comm, bool is_in_arena, std::size_t count)
        : arena_{is_in_arena ? comm.allocate(count * sizeof(T)) : joinable::Arena{count * sizeof(T)}},
          count_{count} {}
    T* data() { return reinterpret_cast<T*>(arena_.data()); }
    std::span<T> span() { return {data(), count_}; }
    operator Buffer() { return {data(), count_, joinable::dtype_of<T>}; }
    operator ConstBuffer() { return {data(), count_, joinable::dtype_of<T>}; }
    Buffer part(std::size_t at, std::size_t count) {
        return {data() + at, count, joinable::dtype_of<T>};
    }
    template <class Value>
    void fill(Value const& value) {
        for (std::size_t i = 0; i < count_; ++i) {
            data()[i] = static_cast<T>(static_cast<float>(value(i)));
        }
    }
    /// Counts what is not as expected.
    template <class Value>
    std::size_t wrong(Value const& value) {
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < count_; ++i) {
            wrong += static_cast<float>(data()[i]) != static_cast<float>(value(i)) ? 1U : 0U;
        }
        return wrong;
    }

private:
    joinable::Arena arena_;
    std::size_t count_;
};

template <class T>
void check_reductions(MpiCommunicator& comm, bool arena, std::size_t count) {
    int const world = comm.size();
    int const rank = comm.rank();
    auto const ranks = static_cast<std::size_t>(world);
    auto const own = [&](std::size_t i) { return number(rank, i); };
    int const last_op = std::is_integral_v<T> ? 6 : 4;
    for (int number_of_op = 0; number_of_op < last_op; ++number_of_op) {
        auto const op = static_cast<ReduceOp>(number_of_op);
        CAPTURE(name_of(op));
        auto const all = [&](std::size_t i) { return combined(op, world, i); };
        Elements<T> buffer{comm, arena, count};
        buffer.fill(own);
        comm.all_reduce(buffer, op).wait();
        CHECK(buffer.wrong(all) == 0);

        int const root = number_of_op % world;
        buffer.fill(own);
        comm.reduce(buffer, op, root).wait();
        CHECK((rank == root ? buffer.wrong(all) : buffer.wrong(own)) == 0);

        Elements<T> in{comm, arena, count * ranks};
        in.fill(own);
        auto const first = count * static_cast<std::size_t>(rank);
        auto const share = [&](std::size_t i) { return combined(op, world, first + i); };
        comm.reduce_scatter(in, buffer, op).wait();
        CHECK(buffer.wrong(share) == 0);
        CHECK(in.wrong(own) == 0);

        // By counts: rank r gets count + r elements; into its own part of the input.
        std::vector<std::size_t> counts(ranks);
        std::iota(counts.begin(), counts.end(), count);
        std::size_t const total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
        std::size_t const at =
            std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
        Elements<T> whole{comm, arena, total};
        whole.fill(own);
        std::size_t const mine = counts[static_cast<std::size_t>(rank)];
        comm.reduce_scatter(whole, whole.part(at, mine), op, counts).wait();
        CHECK(whole.wrong([&](std::size_t i) {
            return i >= at && i < at + mine ? combined(op, world, i) : own(i);
        }) == 0);
    }
    if constexpr (!std::is_integral_v<T>) {
        double const factor = rank == 0 ? 2.0 : 0.5;
        auto const scaled = [&](std::size_t i) {
            double sum = 0;
            for (int other = 0; other < world; ++other) {
                sum += (other == 0 ? 2.0 : 0.5) * number(other, i);
            }
            return sum;
        };
        Elements<T> buffer{comm, arena, count};
        buffer.fill(own);
        comm.all_reduce(buffer, ReduceOp::sum, factor).wait();
        CHECK(buffer.wrong(scaled) == 0);
        Elements<T> in{comm, arena, count * ranks};
        in.fill(own);
        comm.reduce_scatter(in, buffer, ReduceOp::sum, factor).wait();
        auto const first = count * static_cast<std::size_t>(rank);
        CHECK(buffer.wrong([&](std::size_t i) { return scaled(first + i); }) == 0);
        CHECK(in.wrong(own) == 0);

        // By counts: rank r gets count + r elements.
        std::vector<std::size_t> counts(ranks);
        std::iota(counts.begin(), counts.end(), count);
        std::size_t const at =
            std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
        Elements<T> whole{
            comm, arena, std::accumulate(counts.begin(), counts.end(), std::size_t{0})
        };
        Elements<T> part{comm, arena, counts[static_cast<std::size_t>(rank)]};
        whole.fill(own);
        comm.reduce_scatter(whole, part, ReduceOp::sum, factor, counts).wait();
        CHECK(part.wrong([&](std::size_t i) { return scaled(at + i); }) == 0);
        CHECK(whole.wrong(own) == 0);
    }
}

template <class T>
void check_exchanges(MpiCommunicator& comm, bool arena, std::size_t count) {
    int const world = comm.size();
    int const rank = comm.rank();
    auto const ranks = static_cast<std::size_t>(world);
    auto const index = static_cast<std::size_t>(rank);
    auto const own = [&](std::size_t i) { return number(rank, i); };
    std::vector<std::size_t> counts(ranks);
    std::iota(counts.begin(), counts.end(), count);
    std::vector<std::size_t> starts(ranks + 1);
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
    /// Element i of what all ranks have, one after another: equal parts, or by counts.
    auto const of_all = [&](std::size_t i) {
        return number(static_cast<int>(i / count), i % count);
    };
    auto const of_all_by_counts = [&](std::size_t i) {
        auto const from = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
        return number(static_cast<int>(from), i - starts[static_cast<std::size_t>(from)]);
    };
    int const root = world - 1;

    Elements<T> part{comm, arena, count};
    Elements<T> part_by_counts{comm, arena, counts[index]};
    Elements<T> whole{comm, arena, count * ranks};
    Elements<T> whole_by_counts{comm, arena, starts.back()};

    part.fill(own);
    comm.broadcast(part, root).wait();
    CHECK(part.wrong([&](std::size_t i) { return number(root, i); }) == 0);

    part.fill(own);
    part_by_counts.fill(own);
    comm.all_gather(part, whole).wait();
    CHECK(whole.wrong(of_all) == 0);
    comm.all_gather(part_by_counts, whole_by_counts, counts).wait();
    CHECK(whole_by_counts.wrong(of_all_by_counts) == 0);
    // In place: the input is this rank's part of the output.
    whole.fill([&](std::size_t i) { return count != 0 && i / count == index ? of_all(i) : 7; });
    comm.all_gather(whole.part(count * index, count), whole).wait();
    CHECK(whole.wrong(of_all) == 0);
    whole_by_counts.fill([&](std::size_t i) {
        return i >= starts[index] && i < starts[index + 1] ? of_all_by_counts(i) : 7;
    });
    comm.all_gather(whole_by_counts.part(starts[index], counts[index]), whole_by_counts, counts)
        .wait();
    CHECK(whole_by_counts.wrong(of_all_by_counts) == 0);

    auto const zero = [](std::size_t) { return 0; };
    whole.fill(zero);
    whole_by_counts.fill(zero);
    comm.gather(part, whole, root).wait();
    CHECK((rank == root ? whole.wrong(of_all) : whole.wrong(zero)) == 0);
    comm.gather(part_by_counts, whole_by_counts, root, counts).wait();
    CHECK(
        (rank == root ? whole_by_counts.wrong(of_all_by_counts) : whole_by_counts.wrong(zero)) == 0
    );

    whole.fill(of_all);
    whole_by_counts.fill(of_all_by_counts);
    part.fill(zero);
    part_by_counts.fill(zero);
    comm.scatter(whole, part, root).wait();
    CHECK(part.wrong(own) == 0);
    comm.scatter(whole_by_counts, part_by_counts, root, counts).wait();
    CHECK(part_by_counts.wrong(own) == 0);
    if (rank == root) { // in place at the root
        comm.scatter(whole, whole.part(count * index, count), root).wait();
        CHECK(whole.wrong(of_all) == 0);
    } else {
        comm.scatter(whole, part, root).wait();
        CHECK(part.wrong(own) == 0);
    }

    // Element i of what goes from one rank to another.
    auto const between = [](int from, int to, std::size_t i) {
        return from + 2 * to + static_cast<int>(i % 3);
    };
    Elements<T> received{comm, arena, count * ranks};
    whole.fill([&](std::size_t i) { return between(rank, static_cast<int>(i / count), i % count); }
    );
    comm.all_to_all(whole, received).wait();
    CHECK(received.wrong([&](std::size_t i) {
        return between(static_cast<int>(i / count), rank, i % count);
    }) == 0);
    // By counts: rank r sends count + r elements to each rank, but nothing to rank 0.
    std::vector<std::size_t> sent(ranks, counts[index]);
    sent[0] = 0;
    std::vector<std::size_t> expected = counts;
    if (rank == 0) {
        expected.assign(ranks, 0);
    }
    Elements<T> out{comm, arena, counts[index] * (ranks - 1)};
    Elements<T> in{comm, arena, rank == 0 ? 0 : starts.back()};
    out.fill([&](std::size_t i) {
        return between(rank, 1 + static_cast<int>(i / counts[index]), i % counts[index]);
    });
    comm.all_to_all(out, in, sent, expected).wait();
    CHECK(in.wrong([&](std::size_t i) {
        auto const from = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
        return between(static_cast<int>(from), rank, i - starts[static_cast<std::size_t>(from)]);
    }) == 0);
}

template <class... Ts>
void check_all(MpiCommunicator& comm, std::initializer_list<std::size_t> list) {
    for (bool const arena : {false, true}) {
        for (std::size_t const count : list) {
            CAPTURE(comm.rank());
            CAPTURE(comm.size());
            CAPTURE(arena);
            CAPTURE(count);
            (check_reductions<Ts>(comm, arena, count), ...);
            (check_exchanges<Ts>(comm, arena, count), ...);
        }
    }
}

using joinable::BFloat16;
using joinable::Half;

TEST_CASE("every collective over MPI gives every dtype what a serial program computes") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        check_all<
            Half,
            BFloat16,
            float,
            double,
            std::int8_t,
            std::uint8_t,
            std::int32_t,
            std::uint32_t,
            std::int64_t,
            std::uint64_t>(comm, {3});
        check_all<float>(comm, {0, 1, 1000});
    });
}

/// Rank 0 gives the least or greatest number, the others 1.
template <class T>
void check_order(MpiCommunicator& comm) {
    T const least =
        std::is_integral_v<T> ? std::numeric_limits<T>::lowest() : static_cast<T>(-3e4F);
    T const greatest =
        std::is_integral_v<T> ? (std::numeric_limits<T>::max)() : static_cast<T>(3e4F);
    T const one = static_cast<T>(1.0F);
    for (T const given : {least, greatest}) {
        for (ReduceOp const op : {ReduceOp::min, ReduceOp::max}) {
            CAPTURE(name_of(joinable::dtype_of<T>));
            CAPTURE(name_of(op));
            bool const wins = comm.size() == 1 || (given == least) == (op == ReduceOp::min);
            std::vector<T> all(5, comm.rank() == 0 ? given : one);
            std::vector<T> part(1, one);
            std::vector<T> const in(static_cast<std::size_t>(comm.size()), all[0]);
            comm.reduce_scatter(
                    {in.data(), in.size(), joinable::dtype_of<T>},
                    {part.data(), 1, joinable::dtype_of<T>},
                    op
            )
                .wait();
            joinable::all_reduce(comm, all, op).wait();
            CHECK(all == std::vector<T>(5, wins ? given : one));
            CHECK(part == std::vector<T>(1, wins ? given : one));
        }
    }
}

TEST_CASE("the least number is the minimum and the greatest is the maximum, signed or not") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        [&]<class... T>(std::type_identity<T>...) {
            (check_order<T>(comm), ...);
        }(std::type_identity<Half>{},
          std::type_identity<BFloat16>{},
          std::type_identity<float>{},
          std::type_identity<double>{},
          std::type_identity<std::int8_t>{},
          std::type_identity<std::uint8_t>{},
          std::type_identity<std::int32_t>{},
          std::type_identity<std::uint32_t>{},
          std::type_identity<std::int64_t>{},
          std::type_identity<std::uint64_t>{});
    });
}

TEST_CASE("collectives that MPI compares first give the same") {
    run_mpi_ranks(
        {1, 2, 3, 4, 8},
        [](MpiCommunicator& comm) { check_all<Half, double>(comm, {0, 5}); },
        {.deadline = deadline, .check = true}
    );
}

TEST_CASE("counts above the most that MPI takes are cut, or described by types of their own") {
    for (std::size_t const most : {4U, 7U}) {
        run_mpi_ranks(
            {1, 2, 3, 4, 8},
            [](MpiCommunicator& comm) { check_all<Half, double, std::uint8_t>(comm, {1, 13}); },
            {.deadline = deadline},
            {.most = most}
        );
    }
}

TEST_CASE("numbers of 16 bits are rounded once where they travel wide, and at each combination else"
) {
    for (bool const wide : {false, true}) {
        run_mpi_ranks(
            {2, 3, 4, 8},
            [&](MpiCommunicator& comm) {
                // 2048 + 1 is a tie that Half rounds to 2048: what is lost is lost each time, or not at all.
                std::vector<Half> halves(9, Half{comm.rank() == 0 ? 2048.0F : 1.0F});
                joinable::all_reduce(comm, halves).wait();
                auto const exact = static_cast<float>(2048 + comm.size() - 1);
                if (wide) {
                    CHECK(halves == std::vector<Half>(9, Half{exact}));
                } else if (comm.size() == 2) {
                    CHECK(halves == std::vector<Half>(9, Half{2048.0F}));
                } else { // by the order in which MPI combines them
                    CHECK(static_cast<float>(halves[0]) >= 2048.0F);
                    CHECK(static_cast<float>(halves[0]) <= exact + 1);
                }
                std::vector<BFloat16> in(
                    static_cast<std::size_t>(comm.size()),
                    BFloat16{comm.rank() == 0 ? 256.0F : 1.0F}
                );
                std::vector<BFloat16> out(1);
                joinable::reduce_scatter(comm, in, out).wait();
                if (wide) {
                    CHECK(out[0] == BFloat16{static_cast<float>(256 + comm.size() - 1)});
                }
            },
            {.deadline = deadline, .wide = wide}
        );
    }
}

TEST_CASE("many collectives of many sizes are in flight together, and are waited for in any order"
) {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        for (int turn = 0; turn < 3; ++turn) {
            std::vector<std::vector<double>> buffers;
            std::vector<joinable::MpiWork> works;
            for (std::size_t k = 0; k < 20; ++k) {
                buffers.emplace_back(1 + 97 * k, static_cast<double>(comm.rank() + 1));
            }
            for (auto& buffer : buffers) {
                works.push_back(joinable::all_reduce(comm, buffer));
            }
            for (std::size_t k = works.size(); k-- > 0;) {
                if (k % 2 == 0) {
                    works[k].wait();
                    works[k].wait();
                } else {
                    while (!works[k].test()) {
                    }
                }
                double const sum = comm.size() * (comm.size() + 1) / 2.0;
                CHECK(buffers[k] == std::vector<double>(buffers[k].size(), sum));
            }
        }
        comm.barrier();
    });
}

TEST_CASE("messages of one tag keep their order, and those of another one may pass them") {
    run_mpi_ranks({2, 3, 4, 8}, [](MpiCommunicator& comm) {
        int const next = (comm.rank() + 1) % comm.size();
        int const before = (comm.rank() + comm.size() - 1) % comm.size();
        std::vector<int> first{comm.rank(), 1};
        std::vector<int> second{comm.rank(), 2};
        std::vector<double> large(300'000, comm.rank());
        auto const send_large = joinable::send(comm, large, next, 5);
        joinable::send(comm, first, next).wait();
        joinable::send(comm, second, next).wait();
        std::vector<int> got(2);
        joinable::receive(comm, got, before).wait();
        CHECK(got == std::vector<int>{before, 1});
        joinable::receive(comm, got, before).wait();
        CHECK(got == std::vector<int>{before, 2});
        std::vector<double> got_large(large.size());
        joinable::receive(comm, got_large, before, 5).wait();
        CHECK(got_large == std::vector<double>(large.size(), before));
    });
}

TEST_CASE("all-reduces are made of messages over MPI, by every algorithm") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        for (joinable::AllReducePlan const& plan : all_plans(comm.size(), 4096)) {
            joinable::MessageCommunicator over{comm, {.plan = plan, .check = true}};
            std::vector<double> values(10'000, comm.rank() + 1);
            over.all_reduce({values.data(), values.size(), DType::f64}, ReduceOp::sum).wait();
            CHECK(values == std::vector<double>(10'000, comm.size() * (comm.size() + 1) / 2));
        }
    });
}

TEST_CASE("messages above the most that MPI takes are described by types of their own") {
    for (std::size_t const most : {4U, 7U, 64U}) {
        run_mpi_groups({1, 2, 3, 4, 8}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.deadline = deadline}, {.most = most}};
            int const next = (comm.rank() + 1) % comm.size();
            int const before = (comm.rank() + comm.size() - 1) % comm.size();
            for (std::size_t const count : {0U, 1U, 2U, 13U, 5000U}) {
                CAPTURE(most);
                CAPTURE(count);
                std::vector<double> sent(count);
                std::iota(sent.begin(), sent.end(), comm.rank());
                std::vector<double> got(count);
                std::vector<double> expected(count);
                std::iota(expected.begin(), expected.end(), before);
                auto const sending = joinable::send(comm, sent, next);
                joinable::receive(comm, got, before).wait();
                CHECK(got == expected);
            }
            MPI_Barrier(group);     // or what follows may end a rank before it is here
            if (comm.rank() == 0) { // a message of another size is told of, too
                std::vector<double> got(comm.size() == 1 ? 3 : 4);
                std::vector<double> const sent(5);
                auto const sending = joinable::send(comm, sent, 0, 1);
                CHECK_THROWS_AS(joinable::receive(comm, got, 0, 1).wait(), joinable::Mismatch);
            } else {
                CHECK_THROWS_AS(comm.barrier(), joinable::Mismatch);
            }
        });
    }
}

TEST_CASE("a group that is split off has its ranks in the order of their keys") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        auto group = comm.split(comm.rank() % 2, -comm.rank());
        int const members = (comm.size() + 1 - comm.rank() % 2) / 2;
        CHECK(group.size() == members);
        CHECK(group.rank() == members - 1 - comm.rank() / 2);
        std::vector<int> sum{comm.rank()};
        joinable::all_reduce(group, sum).wait();
        int expected = 0;
        for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) {
            expected += rank;
        }
        CHECK(sum[0] == expected);
        auto inner = group.split(0, 0);
        inner.barrier();
        comm.barrier();
    });
}

TEST_CASE("ranks of one machine share memory, which all ranks see") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        auto const slots =
            joinable::shared_buffer<int>(comm, static_cast<std::size_t>(comm.size()));
        CHECK(std::all_of(slots.begin(), slots.end(), [](int x) { return x == 0; }));
        comm.barrier();
        slots[static_cast<std::size_t>(comm.rank())] = comm.rank() + 1;
        comm.barrier();
        CHECK(
            std::accumulate(slots.begin(), slots.end(), 0) == comm.size() * (comm.size() + 1) / 2
        );
        if (comm.size() > 1) {
            CHECK_THROWS_AS(
                (void)joinable::shared_buffer<int>(comm, static_cast<std::size_t>(comm.rank())),
                joinable::Mismatch
            );
        }
    });
}

TEST_CASE("an arena outlives its communicator") {
    run_mpi_groups({1, 2}, [](MPI_Comm group) {
        joinable::Arena arena;
        {
            MpiCommunicator comm{group};
            arena = comm.allocate(100, 4096);
            CHECK(reinterpret_cast<std::uintptr_t>(arena.data()) % 4096 == 0);
            CHECK_THROWS_AS((void)comm.allocate(100, 3), joinable::ContractViolation);
            CHECK(comm.allocate(0).data() == nullptr);
        }
        CHECK(std::all_of(arena.data(), arena.data() + 100, [](std::byte b) {
            return b == std::byte{};
        }));
    });
}

TEST_CASE(
    "a handle that is given away is freed, one that is lent is not, and the engine's collectives never mix"
) {
    run_mpi_groups({1, 2, 3, 4}, [](MPI_Comm group) {
        MPI_Comm own = MPI_COMM_NULL;
        MPI_Comm_dup(group, &own);
        {
            auto comm = MpiCommunicator::from_native_handle(own);
            CHECK(comm.native_handle() == own);
            std::vector<int> ones{1};
            joinable::all_reduce(comm, ones).wait();
            CHECK(ones[0] == comm.size());
        }
        MpiCommunicator comm{group};
        CHECK(comm.native_handle() != group);
        // Ranks post ours and the engine's in different orders.
        std::vector<int> ours{1};
        int theirs = 2;
        int sum = 0;
        MPI_Request request = MPI_REQUEST_NULL;
        auto const post_theirs = [&] {
            MPI_Iallreduce(&theirs, &sum, 1, MPI_INT, MPI_SUM, group, &request);
        };
        if (comm.rank() % 2 == 0) {
            post_theirs();
        }
        auto work = joinable::all_reduce(comm, ours);
        if (comm.rank() % 2 != 0) {
            post_theirs();
        }
        work.wait();
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        CHECK(ours[0] == comm.size());
        CHECK(sum == 2 * comm.size());
    });
}

TEST_CASE("wrong arguments are refused before anything moves") {
    run_mpi_ranks({1, 2, 4}, [](MpiCommunicator& comm) {
        std::vector<float> x(2);
        CHECK_THROWS_AS(
            (void)comm.broadcast({x.data(), 2, DType::f32}, comm.size()),
            joinable::ContractViolation
        );
        CHECK_THROWS_AS((void)comm.split(-1, 0), joinable::ContractViolation);
        CHECK_THROWS_AS(
            (void)comm.send({x.data(), 2, DType::f32}, 0, -1), joinable::ContractViolation
        );
        comm.barrier();
        CHECK(!comm.is_aborted());
    });
    CHECK_THROWS_AS(MpiCommunicator{MPI_COMM_NULL}, joinable::ContractViolation);
}

} // namespace
