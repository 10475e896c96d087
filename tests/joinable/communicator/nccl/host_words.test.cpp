// SPDX-License-Identifier: BSL-1.0
// Words of the host that travel between devices: they keep their memory, and do not wait for the
// engine's stream.
#include <joinable/nccl.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/nccl_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/agreement/agree.hpp>
#include <joinable/communicator/control.hpp>
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
        DeviceArray<float> const gradient{{1.0F, 2.0F}, model.stream()};
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

TEST_CASE("sums of weights, and what ranks agree on, do not wait for the engine's stream") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        comm.device_memory().use_kernels(host_kernels());
        DeviceModel model{comm.rank(), DType::f32};
        comm.set_stream(model.stream());
        joinable::DistributedDataParallel ddp{comm, model.params, small_buckets(false)};
        std::atomic<bool> goes_on = false;
        fake_cuda::enqueue(model.stream(), [&] { wait_until(goes_on, true); });
        ddp.prepare_for_forward({.weight = 3});
        ddp.prepare_for_backward(); // the host would stand still here
        joinable::detail::ControlOver<NcclCommunicator&> control{comm};
        joinable::detail::agree(control, {});
        hosts.barrier();
        CHECK_FALSE(fake_cuda::is_idle(model.stream()));
        goes_on = true;
        model.backward(0, [&](std::size_t i) { ddp.mark_ready(i); });
        ddp.finalize_backward();
        comm.synchronize();
        comm.set_stream(stream);
    });
    check_nothing_is_left();
}

TEST_CASE("a copy to the host follows the engine's stream, and ends with the deadline or an abort"
) {
    for (bool const aborts : {false, true}) {
        CAPTURE(aborts);
        run_nccl_ranks({2, 4}, [&](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
            joinable::CudaDevice& device = comm.device_memory();
            joinable::Arena const to = device.allocate_staging(sizeof(float));
            auto const number = [&] { return *reinterpret_cast<float const*>(to.data()); };
            DeviceArray<float> const value{{5.0F}, stream};
            std::atomic<bool> goes_on = false;
            fake_cuda::enqueue(stream, [&] { wait_until(goes_on, true); });
            fake_cuda::enqueue(stream, [&] { *static_cast<float*>(value.buffer().data) = 6.0F; });
            goes_on = true;
            comm.host_words().download(value.buffer().data, to.data(), sizeof(float));
            CHECK(number() == 6.0F);
            hosts.barrier();
            if (comm.rank() == 0) { // the others never come to its sum
                auto work = comm.all_reduce(value.buffer(), ReduceOp::sum);
                work.wait();
                if (!aborts) {
                    comm.set_deadline(std::chrono::milliseconds{100});
                }
            }
            hosts.barrier();
            if (aborts && comm.rank() == 1) {
                comm.abort({joinable::FailureKind::peer_failed, {1}, "rank 1 failed: by hand"});
            }
            auto const copy = [&] {
                comm.rank() == 0
                    ? comm.host_words().download(value.buffer().data, to.data(), sizeof(float))
                    : hosts.barrier();
            };
            if (aborts) {
                CHECK_THROWS_WITH_AS(copy(), "rank 1 failed: by hand", joinable::PeerFailed);
            } else {
                CHECK_THROWS_AS(copy(), joinable::TimedOut);
            }
            comm.set_stream(stream);
        });
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

} // namespace
