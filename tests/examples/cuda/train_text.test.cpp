// SPDX-License-Identifier: BSL-1.0
#include "../../../examples/train_text/cuda_ranks.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/volume.hpp>

// All of the example that a GPU does not run itself, over doubles of CUDA and NCCL: kernels run on the
// streams' threads.

namespace {

using namespace train_text;
namespace fake_cuda = joinable_tests::fake_cuda;

struct StreamLaunch {
    cudaStream_t stream;
    template <class Kernel>
    void operator()(std::size_t count, Kernel const& kernel) const {
        fake_cuda::enqueue(stream, [=] { HostLoop{}(count, kernel); });
    }
};

std::vector<Findings>
train_on_doubles(Options const& options, std::vector<Text> const& texts, Text const& held_out) {
    return run_ranks(options, texts, held_out, [&](auto& hosts, Job const& job) {
        return train_on_gpu(hosts, job, 8, [](joinable::NcclCommunicator& comm) {
            comm.device_memory().use_kernels(joinable_tests::host_kernels());
            return StreamLaunch{comm.device_memory().engine_stream()};
        });
    });
}

std::vector<Text> uneven_texts(int ranks) {
    int const most = joinable_tests::under_sanitizer ? 350 : 700; // bytes, of rank 0
    std::vector<Text> texts;
    for (int rank = 0; rank < ranks; ++rank) {
        Text text;
        for (int i = 0; i < most - most / 9 * rank; ++i) {
            text.push_back(static_cast<std::uint8_t>((i * i / 7 + rank) % 97 + i % 5));
        }
        texts.push_back(std::move(text));
    }
    return texts;
}

} // namespace

TEST_CASE("ranks on devices train as ranks on the host do, and hold the same bits") {
    Text const held_out = uneven_texts(1).front();
    for (int const ranks : {1, 2, 3, 4, 8}) {
        CAPTURE(ranks);
        Options options;
        options.ranks = ranks;
        options.epochs = 2;
        options.bucket_bytes = 4096; // several
        auto const texts = uneven_texts(ranks);
        auto const on_host = train_ranks(options, texts, held_out);
        options.device = Where::cuda;
        auto const on_devices = train_on_doubles(options, texts, held_out);
        CHECK(on_devices[0].bits_before == doctest::Approx(on_host[0].bits_before).epsilon(1e-5));
        CHECK(on_devices[0].bits_after == doctest::Approx(on_host[0].bits_after).epsilon(1e-3));
        CHECK(on_devices[0].bits_after < on_devices[0].bits_before);
        for (std::size_t rank = 0; rank < texts.size(); ++rank) {
            CHECK(on_devices[rank].digest == on_devices[0].digest);
            CHECK(on_devices[rank].rounds == on_host[rank].rounds);
            CHECK(on_devices[rank].own_rounds == on_host[rank].own_rounds);
            CHECK(on_devices[rank].shadow_rounds == on_host[rank].shadow_rounds);
        }
        fake_cuda::drain();
        CHECK(fake_cuda::live_allocations() == 0);
        CHECK(fake_cuda::live_streams() == 0);
        CHECK(fake_cuda::live_events() == 0);
    }
}

TEST_CASE("a machine without a GPU is told in one sentence, and so are more ranks than GPUs") {
    fake_cuda::set_device_count(0);
    CHECK_THROWS_WITH_AS(
        count_gpus(),
        doctest::Contains("--device cuda needs a GPU, but CUDA finds none here"),
        NoDevice
    );
    fake_cuda::set_device_count(3);
    CHECK(count_gpus() == 3);
    fake_cuda::set_device_count(8);
    Options options;
    options.ranks = 4;
    CHECK_THROWS_WITH_AS(
        require_gpus(options, 2),
        "--device cuda with thread ranks needs a GPU for each of the 4 ranks, but there are 2; "
        "give "
        "--ranks 2, or --communicator process, whose ranks may share one",
        InputError
    );
    CHECK_NOTHROW(require_gpus(options, 4));
    options.communicator = Kind::process;
    CHECK_NOTHROW(require_gpus(options, 1));
}
