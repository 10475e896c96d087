// SPDX-License-Identifier: BSL-1.0
// What tests/gpu.sh runs on a GPU, over the doubles: its logic, not its numbers.
#include <gpu/checks.hpp>
#include <gpu/measurements.hpp>
#include <gpu/operations.hpp>

#include <atomic>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/fake_nccl/fake_nccl.hpp>

namespace {

using namespace joinable_gpu;
using joinable_tests::host_kernels;
using joinable_tests::run_ranks;
using Hosts = joinable::ThreadCommunicator;
namespace fake_cuda = joinable_tests::fake_cuda;
namespace fake_nccl = joinable_tests::fake_nccl;

} // namespace

TEST_CASE("what is checked on a GPU holds over the doubles") {
    run_ranks({1, 2, 4}, [](Hosts& hosts) { check_results(hosts, host_kernels(), 2000); });
    for (Where const where : {Where::before_a_sum, Where::in_a_backward_pass}) {
        run_ranks({2, 4}, [where](Hosts& hosts) { check_failure(hosts, where); });
    }
    fake_cuda::drain();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("what NCCL ranks have besides sums holds over the doubles, as it is checked on a GPU") {
    run_ranks({1, 2, 4}, [](Hosts& hosts) {
        {
            Rank<Hosts> rank{hosts, host_kernels()};
            check_split(rank);
            check_messages(rank);
            check_bad_input(rank);
            check_staged(rank);
        }
        check_lent(hosts);
        check_tcp_control(hosts);
    });
    run_ranks({2, 4}, [](Hosts& hosts) { check_mismatch(hosts); });
    fake_cuda::drain();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("what is measured on a GPU runs over the doubles") {
    run_ranks({1, 2}, [](Hosts& hosts) {
        Rank<Hosts> rank{hosts, host_kernels()};
        measure_all_reduce(rank, {8, 1024}, 1);
        measure_packing(rank, 20, 64, 1);
        CopyingPasses passes{rank.stream, 8 * 8};
        measure_iteration(rank, passes, 3, 8, 1);
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
