// SPDX-License-Identifier: BSL-1.0
#include "../../../examples/train_text/cuda_ranks.hpp"
#include "../../../examples/train_text/host_ranks.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/folder.hpp>
#include <support/volume.hpp>

// All of the example that a GPU does not run itself, over fakes of CUDA and NCCL: kernels run on the
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
train_on_fakes(Options const& options, std::vector<Text> const& texts, Text const& held_out) {
    return run_ranks(options, texts, held_out, [&](auto& hosts, Job const& job) {
        return train_on_gpu(hosts, job, 8, [](joinable::NcclCommunicator& comm) {
            comm.device_memory().use_kernels(joinable_tests::host_kernels());
            return StreamLaunch{comm.device_memory().engine_stream()};
        });
    });
}

std::vector<Text> uneven_texts(int ranks) {
    int const most = joinable_tests::under_sanitizer ? 120 : 700; // bytes, of rank 0
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

constexpr std::size_t batch_size = joinable_tests::under_sanitizer ? 12 : 64;

} // namespace

TEST_CASE("ranks on devices train as ranks on the host do, and hold the same bits") {
    Text const held_out = uneven_texts(1).front();
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        CAPTURE(ranks);
        Options options;
        options.ranks = ranks;
        options.epochs = 2;
        options.batch_size = batch_size;
        options.bucket_bytes = 4096; // several
        auto const texts = uneven_texts(ranks);
        auto const on_host = train_ranks(options, texts, held_out);
        options.device = Where::cuda;
        auto const on_devices = train_on_fakes(options, texts, held_out);
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

TEST_CASE("each rule trains to the same bits on devices, whatever is sharded there") {
    Text const held_out = uneven_texts(1).front();
    bool const is_of_threads = joinable_tests::sanitizer == joinable_tests::Sanitizer::thread;
    for (Rule const rule : {Rule::sgd, Rule::adamw}) {
        if (joinable_tests::is_left_out(rule == Rule::sgd ? 0 : 1, 2, is_of_threads ? 0 : 1)) {
            continue; // each sanitizer has one
        }
        int const ranks = rule == Rule::sgd ? 2 : 3;
        CAPTURE(static_cast<int>(rule));
        Options options;
        options.ranks = ranks;
        options.epochs = 2;
        options.batch_size = batch_size;
        options.bucket_bytes = 4096;
        options.rule = rule;
        auto const texts = uneven_texts(ranks);
        auto const on_host = train_ranks(options, texts, held_out);
        options.device = Where::cuda;
        auto const whole = train_on_fakes(options, texts, held_out);
        CHECK(whole[0].bits_after == doctest::Approx(on_host[0].bits_after).epsilon(1e-2));
        CHECK(whole[0].bits_after < whole[0].bits_before);
        CHECK(whole[0].state_bytes == on_host[0].state_bytes);
        for (Findings const& of_rank : whole) {
            CHECK(of_rank.digest == whole[0].digest);
            CHECK(of_rank.state_digest == whole[0].state_digest);
        }
        for (Sharding const sharding :
             {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
            options.sharding = sharding;
            auto const sharded = train_on_fakes(options, texts, held_out);
            std::size_t bytes = 0;
            for (std::size_t rank = 0; rank < texts.size(); ++rank) {
                CHECK(sharded[rank].digest == whole[0].digest);
                CHECK(sharded[rank].shadow_rounds == on_host[rank].shadow_rounds);
                bytes += sharded[rank].state_bytes;
            }
            CHECK(bytes == whole[0].state_bytes);
            CHECK(sharded[0].bits_after == whole[0].bits_after);
        }
        // A training goes on from a file, sharded otherwise.
        if (can_save && rule == Rule::adamw) {
            joinable_tests::Folder const folder;
            options.sharding = Sharding::gradients;
            options.save = {folder.file("model"), whole[0].rounds / 2 + 1, ""};
            CHECK(train_on_fakes(options, texts, held_out)[0].digest == whole[0].digest);
            options.sharding = Sharding::parameters;
            options.save = {"", 1, folder.file("model")};
            auto const resumed = train_on_fakes(options, texts, held_out);
            CHECK(resumed[0].rounds < whole[0].rounds);
            CHECK(resumed[0].digest == whole[0].digest);
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
