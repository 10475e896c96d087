// SPDX-License-Identifier: BSL-1.0
// The collectives that share data out: every dtype, root, operation, with equal, uneven and zero
// counts. The oracle is a closed form: who sent an element, to whom, and which one.
#include <joinable/communicator/shared_memory/thread.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>
#include <support/repeating.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/self.hpp>

namespace {

using namespace joinable_tests;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::dtype_of;
using joinable::ReduceOp;

using Counts = std::vector<std::size_t>;

constexpr std::size_t period = 11; ///< of the elements

/// Small numbers, exact in every dtype, also when 8 of them are added.
template <class T>
T element(int from, int to, std::size_t i) {
    auto const number = static_cast<int>((static_cast<std::size_t>(from * 5 + to * 3) + i) % 11);
    if constexpr (std::is_arithmetic_v<T>) {
        return static_cast<T>(number);
    } else {
        return T{static_cast<float>(number)};
    }
}

template <class T>
std::vector<T> part(int from, int to, std::size_t count) {
    return repeating<T>(period, count, [&](std::size_t i) { return element<T>(from, to, i); });
}

template <class T>
void append(std::vector<T>& all, std::vector<T> const& more) {
    all.insert(all.end(), more.begin(), more.end());
}

template <class T>
ConstBuffer read(std::vector<T> const& values) {
    return {values.data(), values.size(), dtype_of<T>};
}
template <class T>
Buffer write(std::vector<T>& values) {
    return {values.data(), values.size(), dtype_of<T>};
}

constexpr int everybody = 99; ///< as the receiver in `part`: the same elements for all

/// Parts of `shape`: nothing, everything at one rank, equal ones, and uneven ones.
Counts counts_of(std::string const& shape, int world, std::size_t scale) {
    Counts counts(static_cast<std::size_t>(world));
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
        if (shape == "equal") {
            counts[rank] = scale;
        } else if (shape == "one") {
            counts[rank] = rank + 1 == counts.size() ? scale : 0;
        } else if (shape == "uneven") {
            counts[rank] = (rank * 7 + 3) % 5 * scale;
        }
    }
    return counts;
}

std::size_t sum(Counts const& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

template <class T>
bool same(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

/// Both forms of one collective, where the parts are equal; else the one by counts.
template <class Plain, class ByCounts>
void run_forms(bool is_equal, Plain const& plain, ByCounts const& by_counts) {
    by_counts();
    if (is_equal) {
        plain();
    }
}

template <class T, class Comm>
void check_all_gather(Comm& comm, Counts const& counts, bool is_equal) {
    std::vector<T> expected;
    for (int from = 0; from < comm.size(); ++from) {
        append(expected, part<T>(from, everybody, counts[static_cast<std::size_t>(from)]));
    }
    auto const mine =
        part<T>(comm.rank(), everybody, counts[static_cast<std::size_t>(comm.rank())]);
    auto const check = [&](auto const&... forms) {
        std::vector<T> out(expected.size());
        comm.all_gather(read(mine), write(out), forms...).wait();
        CHECK(same(out, expected));
    };
    run_forms(is_equal, [&] { check(); }, [&] { check(counts); });
}

template <class T, class Comm>
void check_gather(Comm& comm, Counts const& counts, bool is_equal) {
    auto const mine =
        part<T>(comm.rank(), everybody, counts[static_cast<std::size_t>(comm.rank())]);
    for (int root = 0; root < comm.size(); ++root) {
        std::vector<T> expected;
        for (int from = 0; comm.rank() == root && from < comm.size(); ++from) {
            append(expected, part<T>(from, everybody, counts[static_cast<std::size_t>(from)]));
        }
        auto const check = [&](auto const&... forms) {
            std::vector<T> out(expected.size()); // none where it is not the root
            comm.gather(read(mine), write(out), root, forms...).wait();
            CHECK(same(out, expected));
        };
        // Only the root's counts are looked at.
        run_forms(
            is_equal, [&] { check(); }, [&] { check(comm.rank() == root ? counts : Counts{}); }
        );
    }
}

template <class T, class Comm>
void check_scatter(Comm& comm, Counts const& counts, bool is_equal) {
    for (int root = 0; root < comm.size(); ++root) {
        std::vector<T> all;
        for (int to = 0; comm.rank() == root && to < comm.size(); ++to) {
            append(all, part<T>(root, to, counts[static_cast<std::size_t>(to)]));
        }
        auto const expected =
            part<T>(root, comm.rank(), counts[static_cast<std::size_t>(comm.rank())]);
        auto const check = [&](auto const&... forms) {
            std::vector<T> out(expected.size());
            comm.scatter(read(all), write(out), root, forms...).wait();
            CHECK(same(out, expected));
        };
        run_forms(
            is_equal, [&] { check(); }, [&] { check(comm.rank() == root ? counts : Counts{}); }
        );
    }
}

template <class T, class Comm>
void check_reduce_scatter(Comm& comm, Counts const& counts, bool is_equal) {
    auto const count = counts[static_cast<std::size_t>(comm.rank())];
    std::vector<T> mine;
    for (int to = 0; to < comm.size(); ++to) {
        append(mine, part<T>(comm.rank(), to, counts[static_cast<std::size_t>(to)]));
    }
    for (ReduceOp const op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
        auto const expected = repeating<T>(period, count, [&](std::size_t i) {
            float value = static_cast<float>(element<T>(0, comm.rank(), i));
            for (int from = 1; from < comm.size(); ++from) {
                auto const next = static_cast<float>(element<T>(from, comm.rank(), i));
                value = op == ReduceOp::sum   ? value + next
                        : op == ReduceOp::min ? std::min(value, next)
                                              : std::max(value, next);
            }
            return static_cast<T>(value);
        });
        auto const check = [&](auto const&... forms) {
            std::vector<T> out(count);
            comm.reduce_scatter(read(mine), write(out), op, forms...).wait();
            CHECK(same(out, expected));
        };
        run_forms(is_equal, [&] { check(); }, [&] { check(counts); });
    }
}

template <class T, class Comm>
void check_reduce(Comm& comm, std::size_t count) {
    for (int root = 0; root < comm.size(); ++root) {
        auto const mine = part<T>(comm.rank(), everybody, count);
        auto const expected = repeating<T>(period, count, [&](std::size_t i) {
            if (comm.rank() != root) { // no other rank's buffer changes
                return mine[i];
            }
            float value = 0;
            for (int from = 0; from < comm.size(); ++from) {
                value += static_cast<float>(element<T>(from, everybody, i));
            }
            return static_cast<T>(value);
        });
        auto values = mine;
        comm.reduce(write(values), ReduceOp::sum, root).wait();
        CHECK(same(values, expected));
    }
}

template <class T, class Comm>
void check_all_to_all(Comm& comm, Counts const& counts, bool is_equal) {
    // Rank p sends to rank r as many elements as the counts, turned by p, say.
    auto const count = [&](int from, int to) {
        return counts[static_cast<std::size_t>((from + to) % comm.size())];
    };
    Counts sent;
    Counts received;
    std::vector<T> in;
    std::vector<T> expected;
    for (int other = 0; other < comm.size(); ++other) {
        sent.push_back(count(comm.rank(), other));
        received.push_back(count(other, comm.rank()));
        append(in, part<T>(comm.rank(), other, sent.back()));
        append(expected, part<T>(other, comm.rank(), received.back()));
    }
    auto const check = [&](auto const&... forms) {
        std::vector<T> out(expected.size());
        comm.all_to_all(read(in), write(out), forms...).wait();
        CHECK(same(out, expected));
    };
    run_forms(is_equal, [&] { check(); }, [&] { check(sent, received); });
}

/// All shapes in one dtype, and all dtypes in one shape: neither makes the other harder.
template <class T, class Comm>
void check_dtype(Comm& comm) {
    std::vector<std::string> shapes{"uneven"};
    if (std::is_same_v<T, float>) {
        shapes.insert(shapes.end(), {"none", "one", "equal"});
    }
    for (std::string const& shape : shapes) {
        for (std::size_t number = 0;
             std::size_t const scale : {1U, 13U, 3001U}) { // by chunks of 16 KiB: within, across
            if (joinable_tests::is_left_out(number++, 3, comm.size())) {
                continue;
            }
            CAPTURE(shape);
            CAPTURE(scale);
            Counts const counts = counts_of(shape, comm.size(), scale);
            bool const is_equal = shape == "equal" || shape == "none";
            check_all_gather<T>(comm, counts, is_equal);
            check_gather<T>(comm, counts, is_equal);
            check_scatter<T>(comm, counts, is_equal);
            check_reduce_scatter<T>(comm, counts, is_equal);
            check_all_to_all<T>(comm, counts, is_equal);
            check_reduce<T>(comm, counts.back());
        }
    }
}

TEST_CASE("every dtype, root and size of parts arrives where it belongs") {
    auto const check = [](auto& comm) {
        check_dtype<joinable::Half>(comm);
        check_dtype<joinable::BFloat16>(comm);
        check_dtype<float>(comm);
        check_dtype<double>(comm);
        check_dtype<std::int8_t>(comm);
        check_dtype<std::uint8_t>(comm);
        check_dtype<std::int32_t>(comm);
        check_dtype<std::uint32_t>(comm);
        check_dtype<std::int64_t>(comm);
        check_dtype<std::uint64_t>(comm);
    };
    run_ranks({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
    // What differs here is where the memory lies.
    run_named_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_dtype<float>(comm); });
}

TEST_CASE("five, six and seven ranks exchange uneven parts as well") {
    run_all_ranks({5, 6, 7}, [](auto& comm) { check_dtype<float>(comm); });
}

TEST_CASE("many different ones are in flight, and counts need not outlive the call") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        auto const world = static_cast<std::size_t>(comm.size());
        std::vector<std::vector<float>> outs;
        std::vector<std::vector<float>> ins;
        std::vector<joinable::work_of<std::remove_cvref_t<decltype(comm)>>> works;
        for (std::size_t k = 0; k < 100; ++k) { // more than there are slots
            Counts const counts(world, k);
            ins.push_back(std::vector<float>(k, static_cast<float>(k + rank)));
            outs.push_back(std::vector<float>(k * world));
            works.push_back(comm.all_gather(read(ins.back()), write(outs.back()), counts));
        }
        for (std::size_t k = works.size(); k-- > 0;) {
            works[k].wait();
            for (std::size_t i = 0; i < outs[k].size(); ++i) {
                REQUIRE(outs[k][i] == static_cast<float>(k + i / k));
            }
        }
    });
}

TEST_CASE("an input may be this rank's part of the output, and nothing else of it") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        auto const world = static_cast<std::size_t>(comm.size());
        std::size_t const n = 5000;
        std::vector<std::int64_t> all(n * world);
        auto const own = all.begin() + static_cast<std::ptrdiff_t>(rank * n);
        std::fill(own, own + static_cast<std::ptrdiff_t>(n), comm.rank());
        Buffer const whole{all.data(), all.size(), DType::i64};
        ConstBuffer const in_place{all.data() + rank * n, n, DType::i64};
        comm.all_gather(in_place, whole).wait();
        for (std::size_t i = 0; i < all.size(); ++i) {
            REQUIRE(all[i] == static_cast<std::int64_t>(i / n));
        }
        comm.reduce_scatter(whole, {all.data() + rank * n, n, DType::i64}, ReduceOp::sum).wait();
        CHECK(all[rank * n] == static_cast<std::int64_t>(rank * world));
        CHECK(all[rank * n + n - 1] == static_cast<std::int64_t>(rank * world));
        comm.barrier();
        if (world > 1) {
            ConstBuffer const shifted{all.data() + (rank == 0 ? 1 : rank * n - 1), n, DType::i64};
            CHECK_THROWS_AS((void)comm.all_gather(shifted, whole), joinable::ContractViolation);
            CHECK_THROWS_AS((void)comm.all_to_all(whole, whole), joinable::ContractViolation);
        }
    });
}

TEST_CASE("counts that do not fit a rank's own buffers are refused before any data moves") {
    auto const check = [](auto& comm) {
        auto const world = static_cast<std::size_t>(comm.size());
        std::vector<float> in(3);
        std::vector<float> out(3 * world);
        std::vector<double> doubles(3 * world);
        Counts const right(world, 3);
        Counts const too_many(world + 1, 3);
        Counts huge(world, 3);
        huge[0] = ~std::size_t{0};
        Counts const zeros(world, 0);
        if (auto const rank = static_cast<std::size_t>(comm.rank()); world > 2) {
            Counts wrapping(world, 3); // around, to the right sum
            wrapping[(rank + 1) % world] = ~std::size_t{0};
            wrapping[(rank + 2) % world] = 7;
            CHECK_THROWS_AS(
                (void)comm.all_gather(read(in), write(out), wrapping), joinable::ContractViolation
            );
        }
        using joinable::ContractViolation;
        CHECK_THROWS_AS((void)comm.all_gather(read(in), write(out), too_many), ContractViolation);
        CHECK_THROWS_AS((void)comm.all_gather(read(in), write(out), huge), ContractViolation);
        CHECK_THROWS_AS((void)comm.all_gather(read(in), write(out), zeros), ContractViolation);
        CHECK_THROWS_AS((void)comm.all_gather(read(in), write(doubles), right), ContractViolation);
        CHECK_THROWS_AS(
            (void)comm.reduce_scatter(read(out), write(in), ReduceOp::bit_or, right),
            ContractViolation
        );
        CHECK_THROWS_AS(
            (void)comm.reduce_scatter(read(out), write(in), ReduceOp::sum, zeros), ContractViolation
        );
        CHECK_THROWS_AS((void)comm.gather(read(in), write(out), comm.size()), ContractViolation);
        CHECK_THROWS_AS(
            (void)comm.gather(read(in), write(out), comm.rank(), zeros), ContractViolation
        );
        CHECK_THROWS_AS((void)comm.scatter(read(out), write(in), -1), ContractViolation);
        CHECK_THROWS_AS(
            (void)comm.scatter(read(out), write(in), comm.rank(), zeros), ContractViolation
        );
        CHECK_THROWS_AS((void)comm.all_to_all(read(in), write(doubles)), ContractViolation);
        CHECK_THROWS_AS(
            (void)comm.all_to_all(read(out), write(out), right, right), ContractViolation
        );
        CHECK_THROWS_AS((void)comm.reduce(write(in), ReduceOp::sum, -1), ContractViolation);
        comm.barrier(); // still usable
    };
    run_all_ranks({1, 2, 3}, [&](auto& comm) { check(comm); });
    joinable::SelfCommunicator alone;
    check(alone);
}

TEST_CASE("a single rank exchanges with itself") {
    joinable::SelfCommunicator comm;
    std::vector<float> const in{1, 2, 3};
    Counts const counts{3};
    auto const check = [&](auto const& exchange) {
        std::vector<float> out(3);
        exchange(read(in), write(out));
        CHECK(out == in);
    };
    check([&](auto a, auto b) { comm.all_gather(a, b).wait(); });
    check([&](auto a, auto b) { comm.all_gather(a, b, counts).wait(); });
    check([&](auto a, auto b) { comm.reduce_scatter(a, b, ReduceOp::sum).wait(); });
    check([&](auto a, auto b) { comm.reduce_scatter(a, b, ReduceOp::sum, counts).wait(); });
    check([&](auto a, auto b) { comm.gather(a, b, 0).wait(); });
    check([&](auto a, auto b) { comm.gather(a, b, 0, counts).wait(); });
    check([&](auto a, auto b) { comm.scatter(a, b, 0).wait(); });
    check([&](auto a, auto b) { comm.scatter(a, b, 0, counts).wait(); });
    check([&](auto a, auto b) { comm.all_to_all(a, b).wait(); });
    check([&](auto a, auto b) { comm.all_to_all(a, b, counts, counts).wait(); });
}

/// The last rank does something else; all throw the same Mismatch, and no output is touched.
template <class Usual, class Odd>
void check_mismatch(Usual const& usual, Odd const& odd, std::string const& expected) {
    run_all_ranks({2, 3, 4, 8}, [&](auto& comm) {
        auto const world = static_cast<std::size_t>(comm.size());
        std::vector<float> in(3 * world, 1);
        std::vector<float> out(3 * world, -1);
        std::string text;
        std::vector<int> ranks;
        try {
            if (comm.rank() + 1 == comm.size()) {
                odd(comm, in, out);
            } else {
                usual(comm, in, out);
            }
        } catch (joinable::Mismatch const& error) {
            text = error.what();
            ranks = error.ranks();
        }
        CAPTURE(text);
        CHECK(text.find(expected) != std::string::npos);
        CHECK(!ranks.empty());
        CHECK(
            std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>{}) == ranks.end()
        );
        CHECK(out == std::vector<float>(3 * world, -1));
        CHECK(comm.is_aborted());
    });
}

TEST_CASE("parts that do not fit each other are a Mismatch on all ranks") {
    auto const gather = [](std::size_t count, int root) {
        return [=](auto& comm, auto& in, auto& out) {
            std::size_t const all =
                comm.rank() == root ? count * static_cast<std::size_t>(comm.size()) : 0;
            comm.gather({in.data(), count, DType::f32}, {out.data(), all, DType::f32}, root).wait();
        };
    };
    check_mismatch(gather(3, 0), gather(2, 0), "gather of 2 f32 to rank 0");
    check_mismatch(gather(3, 0), gather(3, 1), "gather of 3 f32 to rank 1");
    auto const scatter = [](std::size_t count) {
        return [=](auto& comm, auto& in, auto& out) {
            std::size_t const all =
                comm.rank() == 0 ? count * static_cast<std::size_t>(comm.size()) : 0;
            comm.scatter({in.data(), all, DType::f32}, {out.data(), count, DType::f32}, 0).wait();
        };
    };
    check_mismatch(scatter(3), scatter(1), "scatter of 1 f32 from rank 0");
    check_mismatch(scatter(3), gather(3, 0), "gather");
    auto const by_counts = [](std::size_t count) { // the root expects 3 of everybody
        return [=](auto& comm, auto& in, auto& out) {
            Counts const counts(static_cast<std::size_t>(comm.size()), 3);
            std::size_t const all = comm.rank() == 0 ? out.size() : 0;
            comm.gather({in.data(), count, DType::f32}, {out.data(), all, DType::f32}, 0, counts)
                .wait();
        };
    };
    check_mismatch(by_counts(3), by_counts(2), "has 2 elements for rank 0, which expects 3");
    check_mismatch(by_counts(3), gather(3, 0), "gather of 3 f32 to rank 0");
    auto const exchange = [](std::size_t received) {
        return [=](auto& comm, auto& in, auto& out) {
            Counts const sent(static_cast<std::size_t>(comm.size()), 3);
            Counts expected = sent;
            expected[0] = received;
            comm.all_to_all(
                    read(in),
                    {out.data(), 3 * expected.size() - 3 + received, DType::f32},
                    sent,
                    expected
            )
                .wait();
        };
    };
    check_mismatch(exchange(3), exchange(1), "rank 0 has 3 elements for rank");
    auto const gather_all = [](std::size_t last) { // counts differ between the ranks
        return [=](auto& comm, auto& in, auto& out) {
            Counts counts(static_cast<std::size_t>(comm.size()), 3);
            counts[comm.rank() == 0 ? counts.size() - 1 : 0] = last;
            std::size_t const own = counts[static_cast<std::size_t>(comm.rank())];
            comm.all_gather(
                    {in.data(), own, DType::f32}, {out.data(), sum(counts), DType::f32}, counts
            )
                .wait();
        };
    };
    check_mismatch(gather_all(3), gather_all(2), "counts differ in all_gather by counts of f32");
}

} // namespace
