// SPDX-License-Identifier: BSL-1.0
// What tests/gpu.sh runs on a GPU, over the fakes: its logic, not its numbers.
#include <gpu/captured.hpp>
#include <gpu/checks.hpp>
#include <gpu/iteration.hpp>
#include <gpu/measurements.hpp>
#include <gpu/operations.hpp>
#include <gpu/timeline.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/fake_nccl/fake_nccl.hpp>

namespace {

using namespace joinable_gpu;
using joinable_tests::host_kernels;
using joinable_tests::run_participants;
using joinable_tests::run_ranks;
using Hosts = joinable::ThreadCommunicator;
namespace fake_cuda = joinable_tests::fake_cuda;
namespace fake_nccl = joinable_tests::fake_nccl;

} // namespace

TEST_CASE("what is checked on a GPU holds over the fakes") {
    // Some of these NCCL's blocks do not share evenly.
    run_participants({1, 2, 3, 4, 8}, [](Hosts& hosts) {
        check_results(hosts, host_kernels(), 8193);
    });
    for (Where const where :
         {Where::before_a_sum, Where::in_a_backward_pass, Where::while_others_wait_in_a_kernel}) {
        run_participants(
            {2, 3, 4, 8},
            [where](Hosts& hosts) { // a thread cannot be killed, so it throws
                CHECK((check_failure(hosts, where) > 0) == (hosts.rank() != hosts.size() - 1));
            }
        );
    }
    fake_cuda::drain();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("what NCCL ranks have besides sums holds over the fakes, as it is checked on a GPU") {
    run_ranks({1, 2, 4}, [](Hosts& hosts) {
        {
            Rank<Hosts> rank{hosts, host_kernels()};
            CHECK(check_window(rank));
            check_split(rank);
            check_messages(rank);
            check_bad_input(rank);
            check_staged(rank);
        }
        check_lent(hosts);
        check_tcp_control(hosts);
        for (End const end : {End::destroyed, End::aborted, End::aborted_with_a_window}) {
            CHECK(check_ends(hosts, 3, end) == 0);
        }
    });
    run_ranks({2, 4}, [](Hosts& hosts) { check_mismatch(hosts); });
    fake_cuda::drain();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a captured step holds over the fakes what it is checked for on a GPU") {
    for (joinable::CudaKernels const& with : {joinable::CudaKernels{}, host_kernels()}) {
        run_participants({1, 2, 3, 4, 8}, [&](Hosts& hosts) {
            Rank<Hosts> rank{hosts, with};
            (void)check_captured(rank, 10);
        });
    }
    fake_cuda::drain();
    CHECK(fake_cuda::live_graphs() == 0);
}

TEST_CASE("what is measured on a GPU runs over the fakes") {
    run_ranks({1, 2}, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, host_kernels()};
        measure_all_reduce(rank, {8, 1024}, 1);
        measure_host_time(rank, 1024, 3, 1);
        CopyingPasses passes{rank.stream, 8 * 8};
        measure_iteration(rank, passes, 3, 8, 1);
    });
}

TEST_CASE("the time of a GPU alone is marked where a call waits for the stream") {
    run_ranks({1, 2}, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, host_kernels()};
        auto const waits = [&] { rank.comm.synchronize(); };
        CHECK_FALSE(time_device(rank, 1, waits).is_alone);
    });
}

TEST_CASE("a guard adds nothing to what an iteration puts on streams") {
    auto const work_of = [](bool has_guard) {
        std::atomic<std::size_t> sums = 0;
        int launches = 0;
        std::size_t calls = 0;
        run_ranks({2}, [&](Hosts& hosts) {
            Rank<Hosts> rank{hosts, host_kernels()};
            CopyingPasses passes{rank.stream, 8 * 8};
            Replica<Hosts, CopyingPasses> replica{rank, passes, 3, 8, false};
            replica.iterate(); // cuts the buckets
            std::optional<joinable::Join<std::remove_reference_t<decltype(replica.ddp())>>> guard;
            if (has_guard) {
                guard.emplace(joinable::participants(replica.ddp()), joinable::control(hosts));
            }
            replica.iterate();
            auto const count = [&] {
                std::size_t all = 0;
                // Not cudaStreamWaitEvent: nobody waits for what has run by then.
                for (char const* const call :
                     {"cudaMemcpyAsync",
                      "cudaMemcpy2DAsync",
                      "cudaMemcpy3DAsync",
                      "cudaMemsetAsync",
                      "cudaMemset2DAsync",
                      "cudaEventRecord",
                      "cudaLaunchHostFunc",
                      "cudaMallocAsync",
                      "cudaFreeAsync"}) {
                    all += fake_cuda::calls(call);
                }
                return all;
            };
            rank.comm.synchronize();
            hosts.barrier();
            std::size_t const before = fake_nccl::calls("ncclAllReduce");
            int const launches_before = joinable_tests::kernel_launches;
            std::size_t const calls_before = count();
            hosts.barrier();
            for (int i = 0; i < 10; ++i) {
                replica.iterate();
            }
            hosts.barrier();
            sums += fake_nccl::calls("ncclAllReduce") - before;
            if (hosts.rank() == 0) {
                launches = joinable_tests::kernel_launches - launches_before;
                calls = count() - calls_before;
            }
            hosts.barrier();
            if (guard) {
                (void)guard->finish();
            }
        });
        // Sums, kernels, and all else that takes its turn on a stream.
        return std::vector<std::size_t>{sums, static_cast<std::size_t>(launches), calls};
    };
    auto const without = work_of(false);
    CHECK(without[0] >= 20);
    CHECK(without[1] >= 20);
    CHECK(without[2] >= 20);
    auto const with = work_of(true);
    CHECK(with[0] == without[0]);
    CHECK(with[1] == without[1]);
    CHECK(with[2] == without[2]);
}

TEST_CASE("the idle gaps of a timeline are those in which nothing runs") {
    using enum ActivityKind;
    CHECK(sum_up({}) == TimelineSums{});
    // The second one runs beside the first, and ends before it.
    TimelineSums const sums =
        sum_up({{copy, 130, 140}, {kernel, 100, 120}, {kernel, 105, 110}, {memset, 145, 150}});
    CHECK(sums.counts == std::array<std::size_t, 3>{2, 1, 1});
    CHECK(sums.idle == 15);
}

TEST_CASE("a guard that added a kernel, a copy or a memset would be found, and ours adds none") {
    run_ranks({1, 2}, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, host_kernels()};
        CopyingPasses passes{rank.stream, 8 * 8};
        Replica<Hosts, CopyingPasses> replica{rank, passes, 3, 8, false};
        // What all ranks have launched, by kinds, after the other.
        auto const record = [&](auto const& f) {
            auto const count = [&] {
                rank.comm.synchronize();
                hosts.barrier();
                std::array<std::size_t, 3> const counts{
                    static_cast<std::size_t>(joinable_tests::kernel_launches),
                    fake_cuda::calls("cudaMemcpyAsync"),
                    fake_cuda::calls("cudaMemsetAsync")
                };
                hosts.barrier();
                return counts;
            };
            auto const before = count();
            f();
            auto const after = count();
            std::vector<Activity> activities;
            for (std::size_t kind = 0; kind < after.size(); ++kind) {
                for (std::size_t i = before[kind]; i < after[kind]; ++i) {
                    activities.push_back({static_cast<ActivityKind>(kind), 0, 1});
                }
            }
            return activities;
        };
        measure_guard(rank, replica, 1, record);
        for (ActivityKind const kind :
             {ActivityKind::kernel, ActivityKind::copy, ActivityKind::memset}) {
            int calls = 0;
            auto const record_more = [&](auto const& f) {
                auto activities = record(f);
                if (calls++ % 3 == 1) { // in the guard
                    activities.push_back({kind, 0, 1});
                }
                return activities;
            };
            CHECK_THROWS_AS(measure_guard(rank, replica, 1, record_more), std::runtime_error);
        }
    });
}
