// SPDX-License-Identifier: BSL-1.0
// What tests/gpu/streams.cpp runs on a GPU, over the fakes: its logic, and the order of streams.
#include <gpu/overlap.hpp>
#include <gpu/streams.hpp>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/ranks.hpp>

namespace {

using namespace joinable_gpu;
namespace fake_cuda = joinable_tests::fake_cuda;

Machine fake_machine() {
    return {
        joinable_tests::host_kernels(),
        [](cudaStream_t stream) {
            fake_cuda::enqueue(stream, [] {
                std::this_thread::sleep_for(std::chrono::microseconds{300});
            });
        },
        500
    };
}

void check_nothing_is_left() {
    fake_cuda::drain();
    CHECK(fake_cuda::live_allocations() == 0);
    CHECK(fake_cuda::live_streams() == 0);
    CHECK(fake_cuda::live_events() == 0);
}

} // namespace

TEST_CASE("a collective through pinned memory follows the caller's stream, and the host goes on") {
    joinable_tests::run_ranks({1, 2, 4}, [](ThreadHosts& hosts) {
        share_device(hosts);
        std::atomic<bool> is_open = false;
        {
            Stream const stream;
            DeviceArray<float> const array{3};
            DeviceArray<float> const values{
                std::vector<float>(3, static_cast<float>(hosts.rank() + 1)), stream
            };
            PinnedCommunicator comm{hosts, {.caller = stream}};
            fake_cuda::enqueue(stream, [&] { is_open.wait(false); });
            copy_on_device(array.buffer().data, values.buffer().data, 3 * sizeof(float), stream);
            auto sum = comm.all_reduce(array.buffer(), joinable::ReduceOp::sum);
            sum.wait();
            CHECK(!sum.test());
            hosts.barrier(); // nobody's gate is open yet
            is_open = true;
            is_open.notify_all();
            auto const due = static_cast<float>(hosts.size() * (hosts.size() + 1) / 2);
            CHECK(array.read(comm, stream) == std::vector<float>(3, due));
            CHECK(sum.test());
        }
    });
    check_nothing_is_left();
}

TEST_CASE("streams that are kept busy stay in order over the fakes, as they are checked on a GPU") {
    fake_cuda::set_device_count(1); // which all ranks share
    joinable_tests::run_participants({1, 2, 4}, [](ThreadHosts& hosts) {
        check_order(hosts, fake_machine());
    });
    fake_cuda::set_device_count(8);
    check_nothing_is_left();
}

TEST_CASE("what is measured of overlap on a GPU runs over the fakes") {
    joinable_tests::run_ranks({1, 2}, [](ThreadHosts& hosts) {
        (void)measure_overlap(hosts, fake_machine(), {64, 1});
    });
    check_nothing_is_left();
}
