// SPDX-License-Identifier: BSL-1.0
// Roll calls that go through NCCL itself.
#include <joinable/communicator/nccl/staged.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/tells_reason.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/nccl.hpp>
#include <joinable/participant/action.hpp>

namespace {

using namespace joinable_tests;
using doctest::Contains;
using joinable::DType;
using joinable::NcclCommunicator;
using joinable::ReduceOp;
using joinable::StagedNcclCommunicator;

static_assert(joinable::Aborts<StagedNcclCommunicator>);
static_assert(joinable::HasDeadline<StagedNcclCommunicator>);
static_assert(joinable::RenewsDeadline<StagedNcclCommunicator>);
static_assert(joinable::ReportsMissing<StagedNcclCommunicator>);
static_assert(joinable::detail::reduces_host_memory<StagedNcclCommunicator>);

TEST_CASE("words of the host are summed and told through NCCL, however many") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        StagedNcclCommunicator staged{comm};
        auto const n = static_cast<std::uint64_t>(comm.size());
        auto const me = static_cast<std::uint64_t>(comm.rank());
        for (std::size_t const count : {8U, 0U, 1U, 1000U, 7U, 20'000U}) { // more memory, or enough
            std::vector<std::uint64_t> words(count);
            std::iota(words.begin(), words.end(), me << 40U);
            auto sum = staged.all_reduce({words.data(), count, DType::u64}, ReduceOp::sum);
            wait_until([&] { return sum.test(); });
            sum.wait();
            for (std::size_t i = 0; i < count; ++i) {
                CHECK(words[i] == (n * (n - 1) / 2 << 40U) + n * i);
            }
        }
        for (int root = 0; root < comm.size(); ++root) {
            std::uint8_t bytes[] = {static_cast<std::uint8_t>(comm.rank()), 7};
            staged.broadcast({bytes, 2, DType::u8}, root).wait();
            CHECK(bytes[0] == root);
            CHECK(bytes[1] == 7);
        }
        staged.barrier();
    });
}

TEST_CASE("words do not wait for the engine's stream, nor change which that is") {
    std::atomic<bool> is_answered{false};
    run_nccl_ranks({1}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        joinable::CudaDevice const& device = comm.device_memory(); // as a model keeps it
        StagedNcclCommunicator staged{comm};
        fake_cuda::enqueue(stream, [&] { wait_until(is_answered, true); });
        std::uint64_t word = 5;
        staged.all_reduce({&word, 1, DType::u64}, ReduceOp::sum).wait();
        CHECK_FALSE(fake_cuda::is_idle(stream));
        CHECK(device.stream() == stream);
        CHECK(device.engine_stream() == stream);
        is_answered = true;
    });
}

TEST_CASE("several sums of words are under way at a time, and are waited for in any order") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        StagedNcclCommunicator staged{comm};
        auto const n = static_cast<std::uint64_t>(comm.size());
        for (int time = 0; time < 3; ++time) {
            std::vector<std::uint64_t> first(5, 1);
            std::vector<std::uint64_t> second(500, 2);
            std::uint64_t third = 3;
            auto const sum = [&](std::uint64_t* words, std::size_t count) {
                return staged.all_reduce({words, count, DType::u64}, ReduceOp::sum);
            };
            auto one = sum(first.data(), first.size());
            auto two = sum(second.data(), second.size());
            {
                auto three = sum(&third, 1);
                two.wait();
                three.wait();
            }
            CHECK(third == 3 * n);
            CHECK(second == std::vector(second.size(), 2 * n));
            third = 4;
            sum(&third, 1).wait(); // in the memory of another one
            CHECK(third == 4 * n);
            one.wait();
            CHECK(first == std::vector(first.size(), n));
        }
        CHECK_THROWS_WITH_AS(
            static_cast<void>(staged.all_reduce({nullptr, 1, DType::u64}, ReduceOp::sum)),
            Contains("null pointer"),
            joinable::ContractViolation
        );
    });
}

/// A participant that sums numbers on the device, with a guard's control through NCCL, too.
struct Rank {
    Rank(NcclCommunicator& over, cudaStream_t on) : comm{over}, stream{on} {}

    [[nodiscard]] int sum(int own) {
        before_sum(own);
        DeviceArray<int> const value{{own}, stream};
        comm.all_reduce(value.buffer(), ReduceOp::sum).wait();
        return value.read(comm, stream)[0];
    }

    NcclCommunicator& comm;
    cudaStream_t stream;
    StagedNcclCommunicator staged{comm};
    std::function<void(int)> before_sum = [](int) {};
    joinable::Action<NcclCommunicator, std::function<int()>, std::function<void()>> count{
        comm, [this] { return sum(1); }, [this] { static_cast<void>(sum(0)); }
    };
};

TEST_CASE("a guard that has nothing but NCCL joins ranks with uneven inputs") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Rank rank{comm, stream};
        auto const n = static_cast<std::size_t>(comm.size());
        for (bool const looks_ahead : {false, true}) {
            joinable::Join guard{
                joinable::participants(rank.count), joinable::control(rank.staged)
            };
            int active = comm.size();
            std::vector<int> const inputs(static_cast<std::size_t>(comm.rank()) + 1);
            auto const loop = [&](auto&& range) {
                for ([[maybe_unused]] int const input : range) {
                    CHECK(rank.count() == active--);
                }
            };
            if (looks_ahead) {
                loop(guard.iterate(joinable::look_ahead, inputs));
            } else {
                loop(guard.iterate(inputs));
            }
            joinable::JoinResult const result = guard.finish();
            CHECK(result.rounds == n);
            CHECK(result.shadow_rounds == n - inputs.size());
            CHECK(result.last_joiners == std::vector{comm.size() - 1});
        }
    });
}

TEST_CASE("a guard knows the NCCL communicator whose words its control communicator stages") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Rank rank{comm, stream};
        StagedNcclCommunicator others{comm};
        joinable::Action validate{others, [] {}, [] {}};
        joinable::Join guard{joinable::participants(rank.count), joinable::control(rank.staged)};
        auto const second = [&] { joinable::Join inner{joinable::participants(validate)}; };
        CHECK_THROWS_WITH_AS(
            second(),
            "a second Join over a communicator that is inside a guard already; end that one first, "
            "or split() the communicator",
            joinable::ContractViolation
        );
        CHECK(rank.count() == comm.size());
        guard.keep_alive();
        guard.finish();
    });
}

TEST_CASE("a rank that throws in a round or between two is named over NCCL alone") {
    for (bool const is_inside : {true, false}) {
        for (int const world : {2, 4}) {
            for (int culprit = 0; culprit < world; ++culprit) {
                run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
                    Rank rank{comm, stream};
                    bool const is_me = comm.rank() == culprit;
                    auto const train = [&] {
                        joinable::Join guard{
                            joinable::participants(rank.count), joinable::control(rank.staged)
                        };
                        for (int i = 0; i < 3; ++i) {
                            if (is_me && i == 1) {
                                if (!is_inside) {
                                    throw std::runtime_error{"bad batch"};
                                }
                                rank.before_sum = [](int) {
                                    throw std::runtime_error{"bad batch"};
                                };
                            }
                            rank.count();
                        }
                        guard.finish();
                    };
                    if (is_me) {
                        CHECK_THROWS_WITH_AS(train(), "bad batch", std::runtime_error);
                    } else {
                        try {
                            train();
                            FAIL_CHECK("a rank failed, and nobody was told");
                        } catch (joinable::PeerFailed const& error) {
                            CHECK(error.ranks() == std::vector{culprit});
                        }
                    }
                    CHECK(comm.is_aborted() == is_inside);
                });
            }
        }
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a rank that never comes to a roll call over NCCL is named after the deadline") {
    for (int const world : {2, 3, 8}) {
        Meeting posted{world};
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto& hosts, cudaStream_t) {
            StagedNcclCommunicator staged{comm};
            std::uint64_t word = 1;
            bool const is_away = comm.rank() == world - 1;
            std::optional<joinable::StagedNcclWork> work;
            if (!is_away) {
                work.emplace(staged.all_reduce({&word, 1, DType::u64}, ReduceOp::sum));
            }
            posted.meet();
            if (comm.rank() == 0) { // gives up
                staged.set_deadline(std::chrono::milliseconds{200});
            }
            try {
                is_away ? hosts.barrier() : work->wait();
                FAIL_CHECK("it came to an end without a rank");
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{world - 1});
            }
        });
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an error of CUDA in a roll call over NCCL ends all ranks, whichever call has it") {
    for (std::size_t later = 0; later < 12; ++later) {
        CAPTURE(later);
        Meeting begun{2};
        run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            StagedNcclCommunicator staged{comm};
            begun.meet();
            if (comm.rank() == 0) {
                fake_cuda::fail_next(cudaErrorIllegalAddress, later);
            }
            std::vector<std::uint64_t> words(1000); // more memory than there is at first
            auto const sum = [&] {
                for (;;) {
                    staged.all_reduce({words.data(), words.size(), DType::u64}, ReduceOp::sum)
                        .wait();
                }
            };
            CHECK_THROWS_WITH_AS(
                sum(), Contains("an illegal memory access"), joinable::CommunicationError
            );
            CHECK(comm.is_aborted());
        });
    }
    fake_cuda::relaunch();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("words whose copy back was refused are not taken for those of the sum later") {
    for (std::size_t later = 0; later < 8; ++later) {
        CAPTURE(later);
        run_nccl_ranks({1}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            StagedNcclCommunicator staged{comm};
            std::uint64_t word = 5;
            auto work = staged.all_reduce({&word, 1, DType::u64}, ReduceOp::sum);
            word = 0;
            fake_cuda::fail_next(cudaErrorIllegalAddress, later);
            for (int time = 0; time < 2; ++time) {
                try {
                    work.wait();
                    CHECK(word == 5);
                } catch (joinable::CommunicationError const&) {
                    CHECK(comm.is_aborted());
                }
            }
            static_cast<void>(fake_cuda::has_failed());
        });
    }
    fake_cuda::relaunch();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an exception that leaves the scope of staged words ends the others at once") {
    auto const run = [] {
        Meeting begun{3};
        run_nccl_ranks({3}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            StagedNcclCommunicator staged{comm};
            begun.meet();
            if (comm.rank() == 2) {
                throw std::runtime_error{"bad batch"};
            }
            std::uint64_t word = 1;
            CHECK_THROWS_WITH_AS(
                staged.all_reduce({&word, 1, DType::u64}, ReduceOp::sum).wait(),
                "rank 2 failed: an exception left the scope of its communicator",
                joinable::PeerFailed
            );
        });
    };
    CHECK_THROWS_WITH_AS(run(), "bad batch", std::runtime_error);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("nothing is left of staged words") {
    std::size_t const memory = fake_cuda::live_allocations();
    std::size_t const streams = fake_cuda::live_streams();
    run_nccl_ranks({2}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        StagedNcclCommunicator staged{comm};
        std::vector<std::uint64_t> words(1000);
        auto const work =
            staged.all_reduce({words.data(), words.size(), DType::u64}, ReduceOp::sum);
    });
    fake_cuda::drain();
    CHECK(fake_cuda::live_allocations() == memory);
    CHECK(fake_cuda::live_streams() == streams);
}

TEST_CASE("ranks that stage words tell why they were aborted") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& nccl, auto&, cudaStream_t) {
        StagedNcclCommunicator comm{nccl};
        check_tells_reason(comm);
    });
}

} // namespace
