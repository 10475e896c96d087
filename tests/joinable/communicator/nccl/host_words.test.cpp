// SPDX-License-Identifier: BSL-1.0
// Words of the host that travel between devices keep their memory.
#include <joinable/nccl.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/nccl_graphs.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/shadowed.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

/// How often all ranks have made or freed memory or a stream. Collective.
std::size_t allocations(joinable::ThreadCommunicator& hosts) {
    hosts.barrier();
    std::size_t count = 0;
    for (char const* const call :
         {"cudaMalloc", "cudaMallocHost", "cudaFree", "cudaFreeHost", "cudaStreamCreateWithFlags"
         }) {
        count += fake_cuda::calls(call);
    }
    hosts.barrier();
    return count;
}

TEST_CASE("weighted rounds outside a guard allocate nothing after the first, captured or not") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        auto const me = static_cast<std::uint64_t>(comm.rank());
        comm.device_memory().use_kernels(host_kernels());
        DeviceModel model{comm.rank(), DType::f32};
        comm.set_stream(model.stream());
        joinable::DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
        DeviceArray<float> const gradient{{1.0F, 2.0F}, stream};
        joinable::CapturedStep captured{comm, {gradient.buffer()}, [](auto ready) { ready(0); }};
        auto const round = [&](int batch) {
            ddp.forward([] {}, {.weight = me + 1});
            ddp.backward([&](auto ready) { model.backward(batch, ready); });
            captured.step({.weight = me + 2});
        };
        for (int warm = 0; warm < 3; ++warm) { // the second one uses buckets that are cut anew
            round(warm);
        }
        std::size_t const before = allocations(hosts);
        for (int batch = 0; batch < 4; ++batch) {
            round(batch);
        }
        CHECK(allocations(hosts) == before);
        comm.synchronize();
        comm.set_stream(stream);
    });
    check_nothing_is_left();
}

TEST_CASE("a joined rank follows collectives within the passes in memory that it keeps") {
    run_nccl_ranks({2, 3, 4, 8}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        comm.device_memory().use_kernels(host_kernels());
        DeviceModel model{comm.rank(), DType::f32};
        comm.set_stream(model.stream());
        auto hidden = joinable::shadowed(comm);
        joinable::DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
        ddp.attach_collectives(hidden);
        DeviceArray<float> const sum{40};
        DeviceArray<double> const most{3};
        DeviceArray<int> const told{50};
        bool const is_active = comm.rank() == comm.size() - 1; // the others join at once
        joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
        constexpr int rounds = 5;
        std::array<std::size_t, rounds> counts{};
        for (int batch = 0; is_active && batch < rounds; ++batch) {
            auto const lasting = hidden.rank();
            ddp.forward([&] {
                auto first = hidden.all_reduce(sum.buffer(), ReduceOp::sum);
                auto second = hidden.all_reduce(most.buffer(), ReduceOp::max);
                auto third = hidden.broadcast(told.buffer(), lasting);
                first.wait();
                second.wait();
                third.wait();
            });
            ddp.backward([&](auto ready) { model.backward(batch, ready); });
            for (char const* const call :
                 {"cudaMalloc", "cudaMallocHost", "cudaFree", "cudaStreamCreateWithFlags"}) {
                counts[static_cast<std::size_t>(batch)] += fake_cuda::calls(call);
            }
        }
        guard.finish();
        if (is_active) {
            CHECK(counts[rounds - 1] == counts[2]);
        }
        comm.synchronize();
        comm.set_stream(stream);
    });
    check_nothing_is_left();
}

} // namespace
