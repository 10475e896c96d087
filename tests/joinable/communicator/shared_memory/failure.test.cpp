// SPDX-License-Identifier: BSL-1.0
// How collectives of thread ranks end when they cannot complete, beyond the plain cases of
// thread.test.cpp.
#include <joinable/communicator/shared_memory/thread.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/ranks.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using joinable::ThreadWork;

TEST_CASE("a rank that posts more than fits is told who has not finished its share") {
    for (int const world : {2, 3, 4, 8}) {
        std::atomic<int> ready{0};
        std::atomic<int> waiting{world - 1};
        run_ranks({world}, [&](ThreadCommunicator& comm) {
            std::array<std::int64_t, 64> values{};
            std::vector<ThreadWork> works;
            for (std::int64_t& value : values) {
                value = 1;
                works.push_back(comm.all_reduce({&value, 1, DType::i64}, ReduceOp::sum));
            }
            if (comm.rank() == world - 1) { // has arrived everywhere, but finishes nothing
                ++ready;
                wait_until(waiting, 0);
            } else {
                if (comm.rank() == 0) { // gives up, when the last one is the only one to hold it up
                    wait_until(ready, world - 1);
                    comm.set_deadline(std::chrono::milliseconds{50});
                } else {
                    works.front().wait();
                    ++ready;
                }
                try {
                    comm.barrier();
                    FAIL_CHECK("no exception");
                } catch (joinable::TimedOut const& error) {
                    CHECK(error.missing() == std::vector{world - 1});
                    CHECK(std::string{error.what()}.find("rank " + std::to_string(world - 1)) == 0);
                }
                --waiting;
            }
            for (ThreadWork& work : works) { // all had arrived in these
                work.wait();
            }
            CHECK(values.back() == world);
        });
    }
}

TEST_CASE("the longest deadline there is does not pass at once") {
    run_ranks({2}, [](ThreadCommunicator& comm) {
        comm.set_deadline(std::chrono::nanoseconds::max());
        if (comm.rank() == 0) { // long enough for the other one to fall asleep
            std::this_thread::sleep_for(std::chrono::milliseconds{20});
        }
        comm.barrier();
        CHECK(comm.set_deadline(std::chrono::seconds{1}) == std::chrono::nanoseconds::max());
    });
}

TEST_CASE("a work that is destroyed while a rank is missing ends at the deadline") {
    std::atomic<bool> is_over{false};
    run_ranks({2}, [&](ThreadCommunicator& comm) {
        if (comm.rank() == 1) {
            while (!is_over) {
                std::this_thread::yield();
            }
            CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut);
            return;
        }
        comm.set_deadline(std::chrono::milliseconds{50});
        std::vector<float> values(1000, 3.0F);
        {
            auto const work =
                comm.all_reduce({values.data(), values.size(), DType::f32}, ReduceOp::sum);
        }
        CHECK(comm.is_aborted());
        CHECK(values == std::vector<float>(1000, 3.0F)); // and nobody touches them any more
        is_over = true;
    });
}

TEST_CASE("sums and products of integers wrap around") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        auto const world = static_cast<std::uint64_t>(comm.size());
        auto const check = [&]<class T>(T largest) {
            for (std::size_t const n : {1U, 3000U}) {
                std::vector<T> values(n, largest);
                Buffer const buffer{values.data(), n, joinable::dtype_of<T>};
                comm.all_reduce(buffer, ReduceOp::sum).wait();
                CHECK(values.back() == static_cast<T>(static_cast<std::uint64_t>(largest) * world));
                values.assign(n, largest);
                comm.all_reduce(buffer, ReduceOp::product).wait();
                CHECK(values.back() == static_cast<T>(comm.size() == 2 ? 1 : largest));
            }
        };
        check(std::numeric_limits<std::int8_t>::max());
        check(std::numeric_limits<std::uint8_t>::max());
        check(std::numeric_limits<std::int32_t>::max());
        check(std::numeric_limits<std::uint32_t>::max());
        check(std::numeric_limits<std::int64_t>::max());
        check(std::numeric_limits<std::uint64_t>::max());
    });
}

TEST_CASE("half-precision sums are rounded once, at the end") {
    // 2048 and 256 are where the next odd number is no longer exact: rounded after every rank, the
    // ones would all be lost.
    run_ranks({3, 4, 8}, [](ThreadCommunicator& comm) {
        auto const check = [&]<class T>(T, float large) {
            for (std::size_t const n : {1U, 3000U}) {
                std::vector<T> values(n, T{comm.rank() == 0 ? large : 1.0F});
                comm.all_reduce({values.data(), n, joinable::dtype_of<T>}, ReduceOp::sum).wait();
                float const exact = large + static_cast<float>(comm.size() - 1);
                CHECK(static_cast<float>(values.back()) == static_cast<float>(T{exact}));
                CHECK(static_cast<float>(values.back()) > large);
            }
        };
        check(joinable::Half{}, 2048.0F);
        check(joinable::BFloat16{}, 256.0F);
    });
}

TEST_CASE("ranks that gather and scatter different things all throw Mismatch") {
    run_ranks({2, 4}, [](ThreadCommunicator& comm) {
        std::vector<std::int32_t> in(8, 1);
        std::vector<std::int32_t> out(8 * static_cast<std::size_t>(comm.size()), 2);
        std::size_t const n = comm.rank() == 0 ? 8 : 7;
        std::size_t const all = n * static_cast<std::size_t>(comm.size());
        CHECK_THROWS_AS(
            comm.all_gather(
                    ConstBuffer{in.data(), n, DType::i32}, Buffer{out.data(), all, DType::i32}
            )
                .wait(),
            joinable::Mismatch
        );
        CHECK(out == std::vector<std::int32_t>(out.size(), 2));
    });
    run_ranks({2, 4}, [](ThreadCommunicator& comm) {
        std::vector<std::int32_t> in(8 * static_cast<std::size_t>(comm.size()), 1);
        std::vector<std::int32_t> out(8, 2);
        auto const op = comm.rank() == 0 ? ReduceOp::min : ReduceOp::max;
        CHECK_THROWS_AS(
            comm.reduce_scatter(
                    ConstBuffer{in.data(), in.size(), DType::i32},
                    Buffer{out.data(), out.size(), DType::i32},
                    op
            )
                .wait(),
            joinable::Mismatch
        );
        CHECK(out == std::vector<std::int32_t>(8, 2));
    });
}

TEST_CASE("a throw at any point, with works in flight, is named on every other rank") {
    for (int const world : {2, 3, 4}) {
        for (int culprit = 0; culprit < world; ++culprit) {
            for (int point = 0; point < 12; ++point) {
                std::atomic<int> named{0};
                auto const body = [&](ThreadCommunicator& comm) {
                    std::array<std::vector<float>, 3> buffers;
                    int step = 0;
                    auto const maybe_throw = [&] {
                        if (step++ == point && comm.rank() == culprit) {
                            throw std::out_of_range{"here"};
                        }
                    };
                    try {
                        for (int round = 0; round < 3; ++round) {
                            std::vector<ThreadWork> works;
                            for (std::size_t k = 0; k < buffers.size(); ++k) {
                                maybe_throw();
                                buffers[k].assign(k == 1 ? 5000 : 3, 1.0F);
                                works.push_back(comm.all_reduce(
                                    {buffers[k].data(), buffers[k].size(), DType::f32},
                                    ReduceOp::sum
                                ));
                            }
                            maybe_throw();
                            for (ThreadWork& work : works) {
                                work.wait();
                            }
                        }
                        comm.barrier();
                    } catch (joinable::PeerFailed const& error) {
                        named += error.rank() == culprit ? 1 : 0;
                        throw;
                    }
                };
                CHECK_THROWS_WITH_AS(run_ranks({world}, body), "here", std::out_of_range);
                CHECK(named == world - 1);
            }
        }
    }
}

} // namespace
