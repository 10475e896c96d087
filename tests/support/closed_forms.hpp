// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/for_each_type.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// Every collective of a communicator that has them all, or all but all_to_all, against closed forms of what each rank gives.

namespace joinable_tests { namespace closed_forms {

/// Small whole numbers, which every dtype holds, and whose sums and products of 8 are exact.
inline int number(int rank, std::size_t i) {
    return 1 + (rank + static_cast<int>(i)) % 2;
}
/// The numbers of all ranks, combined one after another: of_rank(rank) is a rank's.
template <class OfRank>
int combined(joinable::ReduceOp op, int world, OfRank const& of_rank) {
    int result = of_rank(0);
    for (int rank = 1; rank < world; ++rank) {
        int const next = of_rank(rank);
        switch (op) {
        case joinable::ReduceOp::sum: result += next; break;
        case joinable::ReduceOp::product: result *= next; break;
        case joinable::ReduceOp::min: result = std::min(result, next); break;
        case joinable::ReduceOp::max: result = std::max(result, next); break;
        case joinable::ReduceOp::bit_and: result &= next; break;
        case joinable::ReduceOp::bit_or: result |= next; break;
        }
    }
    return result;
}
inline int combined(joinable::ReduceOp op, int world, std::size_t i) {
    return combined(op, world, [i](int rank) { return number(rank, i); });
}

/// The elements of one rank: in memory of the communicator, or of the heap.
template <class T>
class Elements {
public:
    template <class Comm>
    Elements(Comm& comm, bool is_in_arena, std::size_t count)
        : arena_{count * sizeof(T)}, count_{count} {
        if constexpr (joinable::AllocatesArena<Comm>) {
            if (is_in_arena) {
                arena_ = comm.allocate(count * sizeof(T));
            }
        }
    }
    T* data() { return reinterpret_cast<T*>(arena_.data()); }
    std::span<T> span() { return {data(), count_}; }
    operator joinable::Buffer() { return {data(), count_, joinable::dtype_of<T>}; }
    operator joinable::ConstBuffer() { return {data(), count_, joinable::dtype_of<T>}; }
    joinable::Buffer part(std::size_t at, std::size_t count) {
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

template <class T, class Comm>
void check_reductions(Comm& comm, bool arena, std::size_t count) {
    int const world = comm.size();
    int const rank = comm.rank();
    auto const ranks = static_cast<std::size_t>(world);
    auto const own = [&](std::size_t i) { return number(rank, i); };
    int const last_op = std::is_integral_v<T> ? 6 : 4;
    for (int number_of_op = 0; number_of_op < last_op; ++number_of_op) {
        auto const op = static_cast<joinable::ReduceOp>(number_of_op);
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
        comm.all_reduce(buffer, joinable::ReduceOp::sum, factor).wait();
        CHECK(buffer.wrong(scaled) == 0);
        Elements<T> in{comm, arena, count * ranks};
        in.fill(own);
        comm.reduce_scatter(in, buffer, joinable::ReduceOp::sum, factor).wait();
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
        comm.reduce_scatter(whole, part, joinable::ReduceOp::sum, factor, counts).wait();
        CHECK(part.wrong([&](std::size_t i) { return scaled(at + i); }) == 0);
        CHECK(whole.wrong(own) == 0);
    }
}

template <class T, class Comm>
void check_exchanges(Comm& comm, bool arena, std::size_t count) {
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
}

template <class T, class Comm>
void check_all_to_all(Comm& comm, bool arena, std::size_t count) {
    int const rank = comm.rank();
    auto const ranks = static_cast<std::size_t>(comm.size());
    auto const index = static_cast<std::size_t>(rank);
    std::vector<std::size_t> counts(ranks);
    std::iota(counts.begin(), counts.end(), count);
    std::vector<std::size_t> starts(ranks + 1);
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
    // Element i of what goes from one rank to another.
    auto const between = [](int from, int to, std::size_t i) {
        return from + 2 * to + static_cast<int>(i % 3);
    };
    Elements<T> whole{comm, arena, count * ranks};
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

template <class... Ts, class Comm>
void check_all(Comm& comm, std::initializer_list<std::size_t> list) {
    for (bool const arena : {false, true}) {
        if (arena && !joinable::AllocatesArena<Comm>) {
            continue;
        }
        for (std::size_t const count : list) {
            CAPTURE(comm.rank());
            CAPTURE(comm.size());
            CAPTURE(arena);
            CAPTURE(count);
            (check_reductions<Ts>(comm, arena, count), ...);
            (check_exchanges<Ts>(comm, arena, count), ...);
            if constexpr (joinable::AllToAlls<Comm>) {
                (check_all_to_all<Ts>(comm, arena, count), ...);
            }
        }
    }
}

/// `check_all` for every dtype.
template <class Comm>
void check_all_dtypes(Comm& comm, std::initializer_list<std::size_t> list) {
    for_each_type([&]<class T>() { check_all<T>(comm, list); });
}

/// Rank 0 gives the least or greatest number, the others 1.
template <class T, class Comm>
void check_order(Comm& comm) {
    T const least =
        std::is_integral_v<T> ? std::numeric_limits<T>::lowest() : static_cast<T>(-3e4F);
    T const greatest =
        std::is_integral_v<T> ? (std::numeric_limits<T>::max)() : static_cast<T>(3e4F);
    T const one = static_cast<T>(1.0F);
    for (T const given : {least, greatest}) {
        for (joinable::ReduceOp const op : {joinable::ReduceOp::min, joinable::ReduceOp::max}) {
            CAPTURE(name_of(joinable::dtype_of<T>));
            CAPTURE(name_of(op));
            bool const wins =
                comm.size() == 1 || (given == least) == (op == joinable::ReduceOp::min);
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

/// The only NaN, then the only -0, is of each rank in turn. One element goes another way than many.
template <class T, class Comm>
void check_floats_without_order(Comm& comm) {
    using Bits = joinable::detail::bits_of_size<sizeof(T)>;
    using Number = std::conditional_t<std::is_class_v<T>, float, T>;
    auto const given = [&](int rank, auto value, auto others) {
        return static_cast<T>(static_cast<Number>(comm.rank() == rank ? value : others));
    };
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    for (int rank = 0; rank < comm.size(); ++rank) {
        for (joinable::ReduceOp const op : {joinable::ReduceOp::min, joinable::ReduceOp::max}) {
            bool const has_positive_zero = comm.size() > 1 && op == joinable::ReduceOp::max;
            for (std::size_t const count : {1U, 4096U}) {
                CAPTURE(joinable::name_of(joinable::dtype_of<T>));
                CAPTURE(name_of(op));
                CAPTURE(rank);
                CAPTURE(count);
                auto const finds = [&](T value, Number expected) {
                    std::vector<T> all(count, value);
                    joinable::all_reduce(comm, all, op).wait();
                    auto const bits = std::bit_cast<Bits>(static_cast<T>(expected));
                    return std::all_of(all.begin(), all.end(), [&](T result) {
                        return std::bit_cast<Bits>(result) == bits;
                    });
                };
                CHECK(finds(given(rank, nan, 1.0F + static_cast<float>(comm.rank())), nan));
                CHECK(finds(given(rank, -0.0F, 0.0F), has_positive_zero ? 0.0F : -0.0F));
            }
        }
    }
}

template <class Comm>
void check_order_of_all_dtypes(Comm& comm) {
    for_each_type([&]<class T>() {
        check_order<T>(comm);
        if constexpr (!std::is_integral_v<T>) {
            check_floats_without_order<T>(comm);
        }
    });
}

}} // namespace joinable_tests::closed_forms
