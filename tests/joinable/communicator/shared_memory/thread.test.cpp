// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/shared_memory/thread.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/for_each_type.hpp>
#include <support/process_ranks.hpp>
#include <support/repeating.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>

namespace {

using namespace joinable_tests;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;

static_assert(joinable::models_communicator<ThreadCommunicator>());
static_assert(joinable::AllGathers<ThreadCommunicator>);
static_assert(joinable::ReduceScatters<ThreadCommunicator>);
static_assert(joinable::Aborts<ThreadCommunicator>);
static_assert(joinable::HasDeadline<ThreadCommunicator>);
static_assert(joinable::ReportsMissing<ThreadCommunicator>);

constexpr std::size_t sizes[] = {0, 1, 7, 14, 15, 1000, 100'003};

constexpr std::size_t period = 3; ///< of the values

/// A value of rank `rank` at place `i`: 1 to 3, and another one on the next rank. Also the product of those of 8
/// ranks is exact in every dtype that does not wrap.
template <class T>
T value_of(int rank, std::size_t i) {
    auto const number = static_cast<int>((i + static_cast<std::size_t>(rank)) % period) + 1;
    if constexpr (std::is_arithmetic_v<T>) {
        return static_cast<T>(number);
    } else {
        return T{static_cast<float>(number)};
    }
}

/// Serial oracle in double and 64-bit integers, combined as a person would write it.
template <class T>
T expected(ReduceOp op, int world, std::size_t i) {
    auto const number = [](T value) {
        if constexpr (std::is_integral_v<T>) {
            return static_cast<std::int64_t>(value);
        } else {
            return static_cast<std::int64_t>(static_cast<float>(value));
        }
    };
    std::int64_t result = number(value_of<T>(0, i));
    for (int rank = 1; rank < world; ++rank) {
        std::int64_t const next = number(value_of<T>(rank, i));
        switch (op) {
        case ReduceOp::sum: result += next; break;
        case ReduceOp::product: result *= next; break;
        case ReduceOp::min: result = std::min(result, next); break;
        case ReduceOp::max: result = std::max(result, next); break;
        case ReduceOp::bit_and: result &= next; break;
        case ReduceOp::bit_or: result |= next; break;
        }
    }
    if constexpr (std::is_arithmetic_v<T>) {
        return static_cast<T>(result);
    } else {
        return T{static_cast<float>(result)};
    }
}

template <class T, class Comm>
void check_reductions(Comm& comm) {
    DType const dtype = joinable::dtype_of<T>;
    for (ReduceOp const op :
         {ReduceOp::sum,
          ReduceOp::product,
          ReduceOp::min,
          ReduceOp::max,
          ReduceOp::bit_and,
          ReduceOp::bit_or}) {
        bool const is_bitwise = op == ReduceOp::bit_and || op == ReduceOp::bit_or;
        if (is_bitwise && !std::is_integral_v<T>) {
            T value{};
            CHECK_THROWS_AS(
                (void)comm.all_reduce({&value, 1, dtype}, op), joinable::ContractViolation
            );
            continue;
        }
        for (std::size_t number = 0; std::size_t const n : sizes) {
            if (joinable_tests::is_left_out(number++, 2, comm.size())) {
                continue;
            }
            auto const world = static_cast<std::size_t>(comm.size());
            std::size_t const share = n / 10;
            auto const in = repeating<T>(period, (std::max)(n, share * world), [&](std::size_t i) {
                return value_of<T>(comm.rank(), i);
            });
            auto const results = repeating<T>(period, in.size(), [&](std::size_t i) {
                return expected<T>(op, comm.size(), i);
            });
            std::vector<T> values(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(n));
            comm.all_reduce({values.data(), n, dtype}, op).wait();
            CAPTURE(joinable::name_of(op));
            CAPTURE(n);
            CHECK(same_bits(values.data(), results.data(), n));

            std::vector<T> out(share);
            comm.reduce_scatter({in.data(), share * world, dtype}, {out.data(), share, dtype}, op)
                .wait();
            auto const* const mine = results.data() + share * static_cast<std::size_t>(comm.rank());
            CHECK(same_bits(out.data(), mine, share));
        }
    }
}

TEST_CASE("every operation of every dtype and size equals a serial computation") {
    auto const check = [](auto& comm) {
        for_each_type([&]<class T>() { check_reductions<T>(comm); });
    };
    run_ranks({1, 2, 3, 4, 8}, check);
    // What differs here is where the memory lies.
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        run_process_ranks({ranks}, check);
    }
    run_named_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_reductions<float>(comm); });
}

template <class T>
void check_scaled_sums(auto& comm) {
    auto const factor_of = [](int rank) { return 1.0 / (rank + 3); };
    for (std::size_t const n : sizes) {
        std::vector<T> values(n, static_cast<T>(0.1));
        for (std::size_t i = 0; i < n; ++i) {
            values[i] = static_cast<T>(i % 7) + static_cast<T>(comm.rank());
        }
        comm.all_reduce(
                {values.data(), n, joinable::dtype_of<T>}, ReduceOp::sum, factor_of(comm.rank())
        )
            .wait();
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
            T sum = 0;
            for (int rank = 0; rank < comm.size(); ++rank) {
                T const volatile product = (static_cast<T>(i % 7) + static_cast<T>(rank)) *
                                           static_cast<T>(factor_of(rank));
                sum = rank == 0 ? product : sum + product;
            }
            wrong += values[i] == sum ? 0U : 1U;
        }
        CAPTURE(n);
        CHECK(wrong == 0);
    }
}

/// The same, of which rank r gets r + n elements, or all get n.
template <class T>
void check_scattered_scaled_sums(auto& comm) {
    auto const factor_of = [](int rank) { return 1.0 / (rank + 3); };
    for (std::size_t const n : sizes) {
        for (bool const has_counts : {false, true}) {
            std::vector<std::size_t> counts;
            for (int rank = 0; rank < comm.size(); ++rank) {
                counts.push_back(n + (has_counts ? static_cast<std::size_t>(rank) : 0));
            }
            auto const own = static_cast<std::size_t>(comm.rank());
            auto const offset = std::accumulate(counts.begin(), counts.begin() + comm.rank(), 0UL);
            std::vector<T> values(std::accumulate(counts.begin(), counts.end(), 0UL));
            for (std::size_t i = 0; i < values.size(); ++i) {
                values[i] = static_cast<T>(i % 7) + static_cast<T>(comm.rank());
            }
            std::vector<T> const given = values;
            std::vector<T> part(counts[own]);
            joinable::ConstBuffer const in{values.data(), values.size(), joinable::dtype_of<T>};
            joinable::Buffer const out{part.data(), part.size(), joinable::dtype_of<T>};
            double const factor = factor_of(comm.rank());
            if (has_counts) {
                comm.reduce_scatter(in, out, ReduceOp::sum, factor, counts).wait();
            } else {
                comm.reduce_scatter(in, out, ReduceOp::sum, factor).wait();
            }
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < part.size(); ++i) {
                T sum = 0;
                for (int rank = 0; rank < comm.size(); ++rank) {
                    T const volatile product =
                        (static_cast<T>((offset + i) % 7) + static_cast<T>(rank)) *
                        static_cast<T>(factor_of(rank));
                    sum = rank == 0 ? product : sum + product;
                }
                wrong += part[i] == sum ? 0U : 1U;
            }
            CAPTURE(n);
            CHECK(wrong == 0);
            CHECK(values == given);
        }
    }
}

TEST_CASE("a scaled sum multiplies what each rank has by that rank's own factor, at every size") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        check_scaled_sums<float>(comm);
        check_scaled_sums<double>(comm);
        check_scattered_scaled_sums<float>(comm);
        check_scattered_scaled_sums<double>(comm);
    });
    joinable::SelfCommunicator alone;
    check_scaled_sums<float>(alone);
    check_scaled_sums<double>(alone);
    check_scattered_scaled_sums<float>(alone);
}

TEST_CASE("a scaled sum is of floating-point elements, and is no plain one") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        std::array<float, 3> values{1, 2, 3};
        std::array<int, 3> integers{1, 2, 3};
        joinable::Buffer const buffer{values.data(), 3, DType::f32};
        CHECK_THROWS_WITH_AS(
            (void)comm.all_reduce({integers.data(), 3, DType::i32}, ReduceOp::sum, 0.5),
            "a reduction with a factor is a sum of floating-point or complex numbers, but was given sum of "
            "i32; leave the factor out, or convert the buffer",
            joinable::ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            (void)comm.all_reduce(buffer, ReduceOp::max, 0.5),
            "a reduction with a factor is a sum of floating-point or complex numbers, but was given max of "
            "f32; leave the factor out, or convert the buffer",
            joinable::ContractViolation
        );
        if (comm.size() > 1) {
            CHECK_THROWS_AS(
                (comm.rank() == 0 ? comm.all_reduce(buffer, ReduceOp::sum, 1.0)
                                  : comm.all_reduce(buffer, ReduceOp::sum))
                    .wait(),
                joinable::Mismatch
            );
            CHECK(values == std::array<float, 3>{1, 2, 3});
        }
    });
}

TEST_CASE("broadcast and all_gather copy every element, from every root, at every size") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        for (std::size_t const n : sizes) {
            for (int root = 0; root < comm.size(); ++root) {
                std::vector<std::int32_t> values(n, comm.rank());
                comm.broadcast({values.data(), n, DType::i32}, root).wait();
                CHECK(values == std::vector<std::int32_t>(n, root));
            }
            std::vector<std::int32_t> in(n, comm.rank());
            std::vector<std::int32_t> out(n * static_cast<std::size_t>(comm.size()), -1);
            comm.all_gather({in.data(), n, DType::i32}, {out.data(), out.size(), DType::i32})
                .wait();
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < out.size(); ++i) {
                wrong += out[i] == static_cast<std::int32_t>(i / n) ? 0U : 1U;
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("sums are in rank order, the same bit for bit at every size") {
    // 1e8 + 1 is not exact in float: another order of summation gives another result.
    run_all_ranks({3, 4, 8}, [](auto& comm) {
        auto const part = [](int rank) {
            return rank % 2 == 0 ? 1.0F : (rank == 1 ? 1e8F : -1e8F);
        };
        float sum = part(0);
        for (int rank = 1; rank < comm.size(); ++rank) {
            sum += part(rank);
        }
        for (std::size_t const n : {1U, 14U, 15U, 5000U, 300'000U}) {
            std::vector<float> values(n, part(comm.rank()));
            comm.all_reduce({values.data(), n, DType::f32}, ReduceOp::sum).wait();
            std::size_t wrong = 0;
            for (float const value : values) {
                wrong += value == sum ? 0U : 1U;
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("more collectives than slots can be in flight, waited for in any order") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        for (std::size_t const n : {3U, 5000U}) {
            std::vector<std::vector<double>> buffers(200, std::vector<double>(n));
            std::vector<joinable::work_of<std::remove_cvref_t<decltype(comm)>>> works;
            for (std::size_t k = 0; k < buffers.size(); ++k) {
                std::fill(buffers[k].begin(), buffers[k].end(), static_cast<double>(k));
                works.push_back(comm.all_reduce({buffers[k].data(), n, DType::f64}, ReduceOp::sum));
            }
            for (std::size_t k = buffers.size(); k-- > 0;) { // the last one first
                works[k].wait();
                works[k].wait();
                CHECK(works[k].test());
                CHECK(buffers[k].back() == static_cast<double>(k) * comm.size());
            }
        }
    });
}

TEST_CASE("a rank that only tests gets to the end, and a rank that computes holds up nobody") {
    std::atomic<bool> is_done{false};
    run_ranks({2}, [&](ThreadCommunicator& comm) {
        std::vector<float> values(100'000, 1.0F);
        auto work = comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
        if (comm.rank() == 0) { // does not touch the work until the other one has finished
            while (!is_done) {
                std::this_thread::yield();
            }
        } else {
            while (!work.test()) {
                std::this_thread::yield();
            }
            is_done = true;
        }
        work.wait();
        CHECK(values.back() == 2.0F);
    });
}

TEST_CASE("thousands of small rounds leave nothing behind") {
    run_all_ranks({2, 3}, [](auto& comm) {
        std::array<std::uint64_t, 7> words{};
        for (std::uint64_t round = 0; round < volume<std::uint64_t>(20'000); ++round) {
            words.fill(round);
            comm.all_reduce({words.data(), 7, DType::u64}, ReduceOp::sum).wait();
            REQUIRE(words[6] == round * static_cast<std::uint64_t>(comm.size()));
        }
    });
}

TEST_CASE("sixteen ranks make progress on few cores") {
    run_all_ranks({16}, [](auto& comm) {
        for (int round = 0; round < 200; ++round) {
            std::vector<std::int64_t> values(round % 2 == 0 ? 1 : 20'000, comm.rank());
            comm.all_reduce({values.data(), values.size(), DType::i64}, ReduceOp::sum).wait();
            REQUIRE(values.back() == 120);
        }
    });
}

/// Runs different collectives on the last rank and on the others; all must throw the same Mismatch.
template <class A, class B>
void check_mismatch(A const& usual, B const& odd, std::string const& odd_text) {
    run_all_ranks({2, 3, 4, 8}, [&](auto& comm) {
        std::string text;
        bool const is_odd = comm.rank() == comm.size() - 1;
        try {
            std::vector<std::int32_t> values(2000, 7);
            if (is_odd) {
                odd(comm, values);
            } else {
                usual(comm, values);
            }
            FAIL_CHECK("no exception");
            (void)values;
        } catch (joinable::Mismatch const& error) {
            text = error.what();
            CHECK(error.ranks() == std::vector{comm.size() - 1});
        }
        CAPTURE(text);
        CHECK(text.find(odd_text) != std::string::npos);
        CHECK(comm.is_aborted());
    });
}

TEST_CASE("ranks that say different things all throw Mismatch, and no data moves") {
    using Values = std::vector<std::int32_t>;
    auto const reduce = [](std::size_t n, DType dtype, ReduceOp op) {
        return [=](auto& comm, Values& values) {
            try {
                comm.all_reduce({values.data(), n, dtype}, op).wait();
            } catch (...) {
                CHECK(values == Values(values.size(), 7));
                throw;
            }
        };
    };
    auto const broadcast = [](std::size_t n, int root) {
        return [=](auto& comm, Values& values) {
            comm.broadcast({values.data(), n, DType::i32}, root).wait();
        };
    };
    auto const barrier = [](auto& comm, Values&) { comm.barrier(); };
    for (std::size_t const n : {4U, 1000U}) { // on one line, and by chunks
        auto const usual = reduce(n, DType::i32, ReduceOp::sum);
        check_mismatch(usual, reduce(n + 1, DType::i32, ReduceOp::sum), "all_reduce of");
        check_mismatch(usual, reduce(n, DType::u32, ReduceOp::sum), "u32");
        check_mismatch(usual, reduce(n, DType::i32, ReduceOp::max), "with max");
        check_mismatch(usual, broadcast(n, 0), "broadcast of");
        check_mismatch(broadcast(n, 0), broadcast(n, 1), "from rank 1");
        check_mismatch(usual, barrier, "barrier");
    }
    check_mismatch(
        reduce(4, DType::i32, ReduceOp::sum), reduce(1000, DType::i32, ReduceOp::sum), "of 1000 i32"
    );
}

TEST_CASE("a collective beside a guard is told from the roll call that it meets, with the remedy") {
    run_all_ranks({2, 3}, [](auto& comm) {
        std::string text;
        try {
            joinable::Action count{comm, [&] { comm.barrier(); }, [&] { comm.barrier(); }};
            joinable::Join guard{joinable::participants(count)};
            float loss = 1;
            for (int i = 0; i <= comm.rank(); ++i) {
                count();
                if (comm.rank() > 0) {
                    comm.all_reduce({&loss, 1, DType::f32}, ReduceOp::sum).wait();
                }
            }
            guard.finish();
        } catch (joinable::Mismatch const& error) {
            text = error.what();
        }
        CHECK(
            text.find(
                "rank 0 all_reduce of 7 u64 with sum (a guard's roll call or entry, or the making of a "
                "model), rank 1 all_reduce of 1 f32 with sum"
            ) != std::string::npos
        );
        CHECK(
            text.find(
                "; joined ranks follow only the participants of their guard: give any other collective "
                "to an Action or to shadowed(comm)"
            ) != std::string::npos
        );
    });
}

TEST_CASE("a guard that only one rank enters is a Mismatch with the remedy on every rank") {
    for (int const entering : {0, 1}) {
        run_all_ranks({2, 3}, [&](auto& comm) {
            std::string text;
            try {
                joinable::Action count{comm, [&] { comm.barrier(); }, [&] { comm.barrier(); }};
                if (comm.rank() == entering) {
                    joinable::Join guard{joinable::participants(count)};
                } else {
                    comm.barrier();
                }
            } catch (joinable::Mismatch const& error) {
                text = error.what();
            }
            CAPTURE(text);
            CHECK(
                text.find("rank " + std::to_string(1 - entering) + " barrier") != std::string::npos
            );
            CHECK(
                text.find(" u64 with sum (a guard's roll call or entry, or the making of a model)"
                ) != std::string::npos
            );
            CHECK(
                text.find("; joined ranks follow only the participants of their guard: give any "
                          "other collective to an Action or to shadowed(comm), and enter the same "
                          "guards on all ranks, one after another") != std::string::npos
            );
        });
    }
}

TEST_CASE("bad arguments are refused before any data moves, and the communicator stays usable") {
    run_all_ranks({1, 2}, [](auto& comm) {
        int value = 1;
        CHECK_THROWS_AS(
            (void)comm.broadcast({&value, 1, DType::i32}, comm.size()), joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)comm.broadcast({&value, 1, DType::i32}, -1), joinable::ContractViolation
        );
        CHECK_THROWS_AS(
            (void)comm.all_reduce({nullptr, 1, DType::i32}, ReduceOp::sum),
            joinable::ContractViolation
        );
        std::vector<int> out(static_cast<std::size_t>(comm.size()) + 1);
        CHECK_THROWS_AS(
            (void)comm.all_gather(
                ConstBuffer{&value, 1, DType::i32}, Buffer{out.data(), out.size(), DType::i32}
            ),
            joinable::ContractViolation
        );
        comm.barrier();
    });
}

TEST_CASE("run_threads rethrows the original exception, the others see who failed and why") {
    for (int const world : {2, 3, 4, 8}) {
        for (int culprit = 0; culprit < world; ++culprit) {
            std::atomic<int> named{0};
            CHECK_THROWS_WITH_AS(
                run_ranks(
                    {world},
                    [&](ThreadCommunicator& comm) {
                        comm.barrier();
                        if (comm.rank() == culprit) {
                            throw std::out_of_range{"no such word"};
                        }
                        try {
                            comm.barrier();
                        } catch (joinable::PeerFailed const& error) {
                            named += error.rank() == culprit && std::string{error.what()} ==
                                                                    "rank " +
                                                                        std::to_string(culprit) +
                                                                        " failed: no such word"
                                         ? 1
                                         : 0;
                            throw;
                        }
                    }
                ),
                "no such word",
                std::out_of_range
            );
            CHECK(named == world - 1);
        }
    }
}

TEST_CASE("an abort that names ranks which are none takes nothing from the exception") {
    CHECK_THROWS_WITH_AS(
        run_ranks(
            {2},
            [&](ThreadCommunicator& comm) {
                if (comm.rank() == 1) {
                    comm.abort({joinable::FailureKind::peer_failed, {3}, "of another world"});
                    throw std::out_of_range{"no such word"};
                }
                comm.barrier();
            }
        ),
        "no such word",
        std::out_of_range
    );
}

TEST_CASE("a rank that leaves while others wait is named at once") {
    run_all_ranks({2, 4}, [](auto& comm) {
        comm.barrier();
        if (comm.rank() == 1) {
            return;
        }
        try {
            comm.barrier();
            FAIL_CHECK("no exception");
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.rank() == 1);
        }
    });
}

TEST_CASE("nothing starts any more after a communicator was seen to be aborted") {
    for (int attempt = 0; attempt < 50; ++attempt) {
        run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
            comm.barrier();
            if (comm.rank() == 0) {
                comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
            }
            while (!comm.is_aborted()
            ) { // no pause: the others are to see it as soon as it can be seen
            }
            CHECK_THROWS_WITH_AS(
                (void)comm.all_reduce({}, ReduceOp::sum), "rank 0 gives up", joinable::PeerFailed
            );
        });
    }
}

TEST_CASE("ranks may leave one after another when nobody waits for them") {
    run_all_ranks({1, 2, 4, 8}, [](auto& comm) {
        for (int i = 0; i < 10; ++i) {
            std::vector<float> values(static_cast<std::size_t>(1 + i * 500), 1.0F);
            comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum).wait();
        }
    });
}

TEST_CASE("the missing ranks are named when the deadline passes") {
    for (int const world : {2, 3, 4, 8}) {
        std::atomic<int> arrived{0};
        std::atomic<int> waiting{world - 1};
        run_ranks({world}, [&](ThreadCommunicator& comm) {
            if (comm.rank() == world - 1) {
                wait_until(waiting, 0);
                CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut); // it hears of it too
                return;
            }
            CHECK(comm.set_deadline(std::chrono::milliseconds{50}) == std::chrono::seconds{60});
            std::vector<float> values(1000);
            auto work = comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
            ++arrived;
            wait_until(arrived, world - 1); // or they could be missed, too
            CHECK(comm.missing_ranks() == std::vector{world - 1});
            for (int twice = 0; twice < 2; ++twice) {
                try {
                    work.wait();
                    FAIL_CHECK("no exception");
                } catch (joinable::TimedOut const& error) {
                    CHECK(error.missing() == std::vector{world - 1});
                }
            }
            --waiting;
        });
    }
}

TEST_CASE("a collective that all ranks have posted completes, although one aborts") {
    std::atomic<int> posted{0};
    run_ranks({2, 3, 4}, [&](ThreadCommunicator& comm) {
        posted = 0;
        comm.barrier();
        std::vector<float> values(50'000, 1.0F);
        auto work = comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
        ++posted;
        while (posted != comm.size()) {
            std::this_thread::yield();
        }
        comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
        CHECK(comm.is_aborted());
        work.wait();
        CHECK(values.front() == static_cast<float>(comm.size()));
        CHECK_THROWS_WITH_AS(comm.barrier(), "rank 0 gives up", joinable::PeerFailed);
    });
}

TEST_CASE("a work that is destroyed unfinished waits, and aborts while unwinding") {
    run_all_ranks({1, 2, 4}, [](auto& comm) {
        std::vector<float> values(1000, 1.0F);
        {
            auto const work =
                comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
        }
        CHECK(values.front() == static_cast<float>(comm.size()));
    });
    run_all_ranks({2, 4}, [](auto& comm) {
        if (comm.rank() != 0) {
            while (!comm.is_aborted()) {
                std::this_thread::yield();
            }
            CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
            return;
        }
        try {
            std::vector<float> values(1000);
            auto const work =
                comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
            throw std::runtime_error{"changed my mind"};
        } catch (std::runtime_error const&) {
            CHECK(comm.is_aborted());
        }
    });
}

TEST_CASE("no rank, no group") {
    CHECK_THROWS_AS(joinable::run_threads(0, [](auto&) {}), joinable::ContractViolation);
    CHECK_THROWS_AS(joinable::run_threads(-3, [](auto&) {}), joinable::ContractViolation);
}

TEST_CASE("a rank that leaves is named with what each of the others waits for it in") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        comm.barrier();
        if (comm.rank() == 0) {
            return;
        }
        auto const text_of = [&](std::string const& what) {
            std::string const rank = std::to_string(comm.rank());
            return "rank 0 left while rank " + rank + " waits for it in " + what;
        };
        std::vector<float> values(3, 1);
        Buffer const buffer{values.data(), values.size(), DType::f32};
        CHECK_THROWS_WITH_AS(
            comm.all_reduce(buffer, ReduceOp::sum).wait(),
            text_of("all_reduce of 3 f32 with sum").c_str(),
            joinable::PeerFailed
        );
        CHECK_THROWS_WITH_AS( // it does not begin
            comm.broadcast(buffer, 1).wait(),
            text_of("broadcast of 3 f32 from rank 1").c_str(),
            joinable::PeerFailed
        );
    });
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        float value = 0;
        if (comm.rank() == 1) {
            CHECK_THROWS_WITH_AS(
                comm.receive({&value, 1, DType::f32}, 0, 5).wait(),
                "rank 0 left while rank 1 waits for it in a receive of 1 f32 with tag 5",
                joinable::PeerFailed
            );
        }
    });
}

} // namespace
