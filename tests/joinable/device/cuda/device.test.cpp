// SPDX-License-Identifier: BSL-1.0
#include <joinable/cuda.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/layouts.hpp>
#include <support/wait_until.hpp>

#include <joinable/device/elements_on_host.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;
using joinable::AnyView;
using joinable::Arena;
using joinable::CudaDevice;
using joinable::DType;
using joinable::Shape;
using joinable_tests::counted;
using joinable_tests::DeviceTensor;
using joinable_tests::Layout;
using joinable_tests::layouts;
using joinable_tests::Numbers;
using joinable_tests::wait_until;

/// A device with two streams, and proof that nothing of it is left.
struct Fixture {
    cudaStream_t stream = make_stream();
    cudaStream_t engine = make_stream();
    CudaDevice device{0, stream, engine};

    static cudaStream_t make_stream() {
        cudaStream_t made = nullptr;
        REQUIRE(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking) == cudaSuccess);
        return made;
    }
    Fixture() = default;
    Fixture(Fixture const&) = delete;
    Fixture& operator=(Fixture const&) = delete;
    ~Fixture() {
        (void)cudaStreamDestroy(stream);
        (void)cudaStreamDestroy(engine);
        fake::drain();
    }
    void finish() {
        device.finish();
        (void)cudaStreamSynchronize(engine);
    }
};

TEST_CASE("a copy on a device goes by any strides, with kernels as without") {
    for (bool const has_kernels : {false, true}) {
        for (DType const dtype : {DType::f16, DType::f32, DType::f64, DType::i8}) {
            for (Layout const& layout : layouts()) {
                Fixture f;
                if (has_kernels) {
                    f.device.use_kernels(joinable_tests::host_kernels());
                }
                DeviceTensor const from{dtype, layout.extents, layout.from};
                DeviceTensor const to{dtype, layout.extents, layout.to};
                std::size_t const count = joinable::numel(layout.extents);
                from.assign(counted(count));
                Numbers const expected = from.numbers(); // a row that is there once holds one value
                f.device.copy(from.view(), to.view());
                f.finish();
                CHECK(to.numbers() == expected);
                f.device.fill_zero(to.view());
                f.finish();
                CHECK(to.numbers() == Numbers(count));
            }
        }
    }
    CHECK(fake::live_allocations() == 0);
    CHECK(fake::live_events() == 0);
}

TEST_CASE("nothing between the elements of a strided target is written") {
    for (bool const has_kernels : {false, true}) {
        Fixture f;
        if (has_kernels) {
            f.device.use_kernels(joinable_tests::host_kernels());
        }
        DeviceTensor const all{DType::i32, {4, 9}, {9, 1}};
        all.assign(Numbers(36, -1.0));
        AnyView const part{all.view().data(), DType::i32, {4, 6}, {9, 1}, f.device.id()};
        f.device.fill_zero(part);
        f.finish();
        Numbers const after = all.numbers();
        for (std::size_t i = 0; i < after.size(); ++i) {
            CHECK(after[i] == (i % 9 < 6 ? 0.0 : -1.0));
        }
    }
}

TEST_CASE("kernels are loaded on their device when they are given to it, not at a launch") {
    static int loaded_on = -1;
    CudaDevice device{1, nullptr, nullptr};
    joinable::CudaKernels kernels = joinable_tests::host_kernels();
    kernels.load = [] { return cudaErrorNoKernelImageForDevice; };
    CHECK_THROWS_AS(device.use_kernels(kernels), joinable::CommunicationError);
    CHECK(!device.can_scale());
    kernels.load = [] { return cudaGetDevice(&loaded_on); };
    device.use_kernels(kernels);
    CHECK(device.can_scale());
    CHECK(loaded_on == 1);
    int now = -1;
    CHECK(cudaGetDevice(&now) == cudaSuccess);
    CHECK(now == 0);
}

TEST_CASE("a factor in the device's memory is for kernels, which read it when they run") {
    Fixture f;
    DeviceTensor const from{DType::f32, {3}, {1}};
    DeviceTensor const to{DType::f32, {3}, {1}};
    DeviceTensor const factor{DType::f64, {1}, {1}};
    from.assign({1, 2, std::nan("")});
    auto copy = joinable::detail::cuda_copy(from.view().data(), {1}, 99.0, to.view());
    copy.factor_at = static_cast<double const*>(factor.view().data());
    CHECK(joinable::detail::CudaRuntimeCopies{f.stream}.run(copy) == cudaErrorNotSupported);
    for (double const now : {0.5, 0.0}) {
        factor.assign({now});
        CHECK(joinable_tests::host_kernels().run(&copy, 1, f.stream) == cudaSuccess);
        f.finish();
        CHECK(to.numbers()[1] == 2 * now);
    }
    CHECK(to.numbers() == Numbers(3));
}

TEST_CASE("rows at even distances are one call of the runtime") {
    Fixture f;
    DeviceTensor const from{DType::f32, {64, 6}, {8, 1}};
    DeviceTensor const to{DType::f32, {64, 6}, {6, 1}};
    auto const before = fake::calls("cudaMemcpy2DAsync");
    auto const others = fake::calls("cudaMemcpyAsync");
    f.device.copy(from.view(), to.view());
    f.finish();
    CHECK(fake::calls("cudaMemcpy2DAsync") == before + 1);
    CHECK(fake::calls("cudaMemcpyAsync") == others);
}

TEST_CASE("a submission waits for what the engine has asked for, and the engine for finish") {
    for (int repetition = 0; repetition < 20; ++repetition) {
        Fixture f;
        DeviceTensor const gradient{DType::f32, {4}, {1}};
        DeviceTensor const bucket{DType::f32, {4}, {1}};
        std::atomic<bool> is_open{false};
        fake::enqueue(f.engine, [&] { is_open.wait(false); });
        fake::enqueue(f.engine, [&] { gradient.assign({1, 2, 3, 4}); });
        f.device.copy(gradient.view(), bucket.view());
        f.device.submit();
        CHECK_FALSE(fake::is_idle(f.stream));
        fake::enqueue(f.stream, [&] { bucket.assign({5, 6, 7, 8}); }); // stands for a collective
        f.device.copy(bucket.view(), gradient.view());
        f.device.finish();
        Numbers seen;
        fake::enqueue(f.engine, [&] { seen = gradient.numbers(); });
        is_open = true;
        is_open.notify_all();
        (void)cudaStreamSynchronize(f.engine);
        CHECK(seen == Numbers{5, 6, 7, 8});
    }
}

TEST_CASE("a submission is one launch with kernels, and nothing is launched for nothing") {
    Fixture f;
    f.device.use_kernels(joinable_tests::host_kernels());
    std::vector<DeviceTensor> tensors;
    DeviceTensor const bucket{DType::f32, {40}, {1}};
    int const before = joinable_tests::kernel_launches;
    for (std::size_t i = 0; i < 10; ++i) {
        tensors.emplace_back(DType::f32, Shape{2, 2}, Shape{1, 2});
        tensors.back().assign({1, 2, 3, 4});
        AnyView const place{
            bucket.view().as<float>().data() + 4 * i, DType::f32, {2, 2}, {2, 1}, f.device.id()
        };
        f.device.scale_copy(tensors.back().view(), 0.5, place);
    }
    f.finish();
    f.finish();
    CHECK(joinable_tests::kernel_launches == before + 1);
    for (std::size_t i = 0; i < 40; ++i) {
        CHECK(bucket.numbers()[i] == 0.5 * static_cast<double>(i % 4 + 1));
    }
}

TEST_CASE("squares are summed on a device after what was submitted before, and added") {
    {
        Fixture f;
        f.device.use_kernels(joinable_tests::host_kernels());
        CHECK(f.device.can_sum_squares());
        for (std::size_t const count : {std::size_t{1000}, std::size_t{9000}}) { // more memory
            DeviceTensor const sums{DType::f64, {3}, {1}};
            DeviceTensor const dense{DType::f32, {count}, {1}};
            DeviceTensor const rows{DType::bf16, {4, 6}, {9, 1}};
            DeviceTensor const none{DType::f32, {0}, {1}};
            auto* const first = sums.view().as<double>().data();
            sums.assign({1, 2, 3});
            dense.assign(counted(count));
            rows.assign(Numbers(24, 2.0));
            f.device.scale_copy(dense.view(), 2.0, dense.view());
            joinable::detail::SquareSum const all[] = {
                {dense.view(), first, nullptr},
                {rows.view(), first + 1, nullptr},
                {none.view(), first + 2, nullptr}
            };
            f.device.sum_squares(all);
            f.finish();
            // The squares of 1 to 100 add up to 338350.
            double const squares = 4.0 * 338350.0 * static_cast<double>(count / 100);
            CHECK(sums.numbers() == Numbers{1 + squares, 2 + 24 * 4.0, 3});
        }
        DeviceTensor const sums{DType::f64, {1}, {1}};
        double host[4] = {};
        joinable::detail::SquareSum const wrong{
            {host, DType::f64, {4}, {1}}, sums.view().as<double>().data(), nullptr
        };
        CHECK_THROWS_AS(f.device.sum_squares({&wrong, 1}), joinable::ContractViolation);
    }
    CHECK(fake::live_allocations() == 0);
    Fixture f;
    CHECK(!f.device.can_sum_squares());
    CHECK_THROWS_WITH_AS(
        f.device.sum_squares({}),
        "sum_squares: there are no kernels for it; call CudaDevice::use_kernels first",
        joinable::ContractViolation
    );
}

TEST_CASE("arenas are zeroed, aligned and outlive their device") {
    Arena arena;
    {
        Fixture f;
        arena = f.device.allocate(1000, 64);
        Arena const other = f.device.allocate(10, 4096);
        CHECK(reinterpret_cast<std::uintptr_t>(other.data()) % 4096 == 0);
        CHECK(fake::is_device_memory(other.data(), other.bytes()));
        CHECK(f.device.allocate(0, 64).data() == nullptr);
        CHECK_THROWS_AS((void)f.device.allocate(8, 3), joinable::ContractViolation);
    }
    CHECK(fake::is_device_memory(arena.data(), 1000));
    fake::DeviceCode const code;
    for (std::size_t i = 0; i < arena.bytes(); ++i) {
        REQUIRE(arena.data()[i] == std::byte{0});
    }
    arena = {};
    CHECK(fake::live_allocations() == 0);
}

TEST_CASE("memory is given, zeroed, and an upload taken while the device's stream is stuck") {
    Fixture f;
    std::atomic<bool> is_open{false};
    fake::enqueue(f.device.stream(), [&] { is_open.wait(false); });
    Arena const arena = f.device.allocate(64, 64);
    Arena const staging = f.device.allocate_staging(64);
    for (std::size_t i = 0; i < arena.bytes(); ++i) {
        fake::DeviceCode const code;
        CHECK(arena.data()[i] == std::byte{0});
        CHECK(staging.data()[i] == std::byte{0});
        staging.data()[i] = std::byte{7};
    }
    f.device.upload(staging.data(), arena.data(), arena.bytes());
    CHECK_FALSE(fake::is_idle(f.device.stream()));
    is_open = true;
    is_open.notify_all();
    std::array<std::byte, 64> back{};
    f.device.download(arena.data(), back.data(), back.size());
    CHECK(std::count(back.begin(), back.end(), std::byte{7}) == 64);
    CHECK(f.device.allocate_staging(0).data() == nullptr);
}

/// Another stream of a device, as of a communicator whose collective a rank never joins.
struct Stuck {
    cudaStream_t stream = Fixture::make_stream();
    std::atomic<bool> is_open{false};

    Stuck() {
        fake::enqueue(stream, [this] { is_open.wait(false); });
    }
    Stuck(Stuck const&) = delete;
    Stuck& operator=(Stuck const&) = delete;
    ~Stuck() {
        open();
        (void)cudaStreamDestroy(stream);
        fake::drain();
    }
    void open() {
        is_open = true;
        is_open.notify_all();
    }
};

TEST_CASE("a copy to the host ends at the deadline where the device never comes to it") {
    Fixture f;
    DeviceTensor const tensor{DType::f64, {2}, {1}};
    tensor.assign({3, 4});
    std::array<double, 2> back{1, 2};
    auto const download = [&] {
        f.device.download(tensor.view().data(), back.data(), sizeof back);
    };
    std::atomic<bool> is_open{false};
    fake::enqueue(f.stream, [&] { is_open.wait(false); });
    auto const open = [&] {
        is_open = true;
        is_open.notify_all();
    };
    std::thread late{[&] { // where nothing ends the wait
        wait_until([&, end = std::chrono::steady_clock::now() + std::chrono::seconds{10}] {
            return is_open || std::chrono::steady_clock::now() > end;
        });
        open();
    }};
    f.device.set_deadline(std::chrono::milliseconds{20});
    CHECK_THROWS_WITH_AS(
        download(),
        "CUDA device 0 has not finished its work within 0.02 s; a collective in it may wait for a rank that "
        "never comes",
        joinable::TimedOut
    );
    open();
    late.join();
    (void)cudaStreamSynchronize(f.stream);
    CHECK(back == std::array<double, 2>{1, 2}); // no copy was left behind
    f.device.set_deadline((std::chrono::nanoseconds::max)());
    download();
    CHECK(back == std::array<double, 2>{3, 4});
}

TEST_CASE("a copy to the host tells an error that a launch of the engine has left") {
    Fixture f;
    DeviceTensor const tensor{DType::f64, {2}, {1}};
    std::array<double, 2> back{};
    auto const download = [&] {
        f.device.download(tensor.view().data(), back.data(), sizeof back);
    };
    fake::fail_next(cudaErrorInvalidConfiguration);
    (void)cudaStreamQuery(f.stream); // for a launch
    CHECK_THROWS_AS(download(), joinable::ContractViolation);
    download(); // it was told once
}

TEST_CASE("memory of a device that is stuck goes back later, and the host waits for one deadline") {
    Fixture f;
    f.device.set_deadline(std::chrono::milliseconds{20});
    std::vector<Arena> arenas;
    arenas.push_back(f.device.allocate(64, 64));
    f.device.set_deadline(std::chrono::hours{1}); // what it would wait for the others
    for (int i = 0; i < 3; ++i) {
        arenas.push_back(f.device.allocate(64, 64));
        arenas.push_back(f.device.allocate_staging(64));
    }
    {
        Stuck stuck;
        for (Arena& arena : arenas) {
            arena = {}; // the host goes on
        }
        CHECK(fake::live_allocations() != 0);
        stuck.open();
        wait_until([] { return fake::live_allocations() == 0; });
        wait_until([] { return joinable::detail::late_cuda_frees() == 0; });
    }
    Arena arena = f.device.allocate(64, 64);
    arena = {};
    CHECK(fake::live_allocations() == 0); // at once, on a device that is idle
}

TEST_CASE("sections are moved beside a stream that is stuck, with memory of a pool or without") {
    for (bool const has_pools : {true, false}) {
        CAPTURE(has_pools);
        fake::set_memory_pools(has_pools);
        Fixture f;
        f.device.set_deadline(std::chrono::milliseconds{20});
        {
            Arena const arena = f.device.allocate(8, 64);
            Arena const staging = f.device.allocate_staging(8);
            for (std::size_t i = 0; i < 8; ++i) {
                staging.data()[i] = std::byte(i);
            }
            f.device.upload(staging.data(), arena.data(), 8);
            {
                Stuck const stuck;
                std::size_t const freed = fake::calls("cudaFree");
                std::vector<joinable::detail::Section> sections{{0, 3, 5, 1}, {5, 0, 3, 0}};
                f.device.permute(arena, sections);
                f.device.set_deadline(std::chrono::minutes{1}); // of the copy, which is not stuck
                f.device.download(arena.data(), staging.data(), 8);
                for (std::size_t i = 0; i < 8; ++i) {
                    CHECK(staging.data()[i] == std::byte((i + 5) % 8));
                }
                // Without pools a thread begins to free it, which may be after the host has gone on.
                wait_until([&] { return has_pools || fake::calls("cudaFree") != freed; });
                CHECK((fake::calls("cudaFree") == freed) == has_pools);
                std::vector<joinable::detail::Section> nothing;
                f.device.permute({}, nothing);
            }
        }
        wait_until([] { return joinable::detail::late_cuda_frees() == 0; });
        CHECK(fake::live_allocations() == 0);
    }
    fake::set_memory_pools(true);
}

TEST_CASE("what the runtime refuses is an error that names the call, and is not left for others") {
    Fixture f;
    auto const text_of = [](auto const& work) -> std::string {
        try {
            work();
        } catch (joinable::CommunicationError const& error) {
            return error.what();
        }
        return {};
    };
    fake::fail_next(cudaErrorMemoryAllocation, 1);
    CHECK(text_of([&] {
              (void)f.device.allocate(8, 8);
          }) == "cudaMalloc failed: cudaErrorMemoryAllocation, out of memory");
    CHECK(cudaGetLastError() == cudaSuccess);
    std::size_t const streams = fake::live_streams();
    std::size_t later = 2; // memory goes back, whatever fails after it was given
    for (char const* const call :
         {"cudaStreamCreateWithFlags", "cudaMemsetAsync", "cudaStreamSynchronize"}) {
        fake::fail_next(cudaErrorIllegalAddress, later++);
        CHECK(text_of([&] { (void)f.device.allocate(8, 8); }).find(call) == 0);
        CHECK(fake::live_allocations() == 0);
        CHECK(fake::live_streams() == streams);
        fake::relaunch();
    }
    fake::fail_next(cudaErrorMemoryAllocation, 2);
    CHECK(text_of([&] { f.device.submit(); }).find("cudaEventCreateWithFlags") == 0);
    CHECK(fake::live_events() == 0);
}

TEST_CASE("a copy ends with the first of its calls that the runtime refuses") {
    Fixture f;
    Arena const from = f.device.allocate(64, 64);
    Arena const to = f.device.allocate(64, 64);
    Shape const strides{20, 6, 1}; // two blocks of rows
    auto const view = [&](Arena const& arena) {
        return AnyView{arena.data(), DType::u8, {2, 2, 2}, strides, f.device.id()};
    };
    int refused = 0;
    for (bool was_reached = true; was_reached; refused += was_reached ? 1 : 0) {
        f.device.copy(view(from), view(to));
        fake::fail_next(cudaErrorInvalidValue, static_cast<std::size_t>(refused));
        std::string text;
        try {
            f.device.submit();
        } catch (joinable::CommunicationError const& error) {
            text = error.what();
        }
        was_reached = fake::has_failed();
        CHECK(text.empty() != was_reached);
    }
    CHECK(refused >= 4); // what orders streams, and two blocks
    f.finish();
}

TEST_CASE("the host reads elements as they are after what the engine has requested") {
    Fixture f;
    joinable::detail::ElementsOnHost elements{f.device};
    for (Layout const& layout : layouts()) {
        for (Shape const& strides : {layout.from, layout.to}) {
            DeviceTensor const tensor{DType::f64, layout.extents, strides};
            std::size_t const count = tensor.view().numel();
            bool const repeats = // elements lie in one place
                joinable::detail::checked_reach(layout.extents, strides, 8) < count;
            Numbers const numbers = repeats ? Numbers(count, 7) : counted(count);
            joinable_tests::launch(f.engine, [&] {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
                tensor.assign(numbers);
            });
            auto const bytes = elements.read(tensor.view());
            std::vector<double> read(count);
            if (!bytes.empty()) {
                std::memcpy(read.data(), bytes.data(), bytes.size());
            }
            CHECK(bytes.size() == 8 * count);
            if (strides != Shape{2, 1}) { // rows that overlap
                CHECK(read == std::vector<double>(numbers.begin(), numbers.end()));
            }
            f.finish(); // nothing waits for a tensor without elements
        }
    }
}

TEST_CASE("a question about memory that fails leaves no error to the thread") {
    Fixture f;
    DeviceTensor const tensor{DType::f32, {4}, {1}};
    CHECK(f.device.id_of(tensor.view().data()) == f.device.id());
    joinable_tests::fake_cuda::fail_next(cudaErrorUnknown, 1); // behind cudaGetDevice
    CHECK_THROWS_AS((void)f.device.id_of(tensor.view().data()), joinable::CommunicationError);
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("misuse of a device says what to do") {
    Fixture f;
    auto const text_of = [](auto const& work) -> std::string {
        try {
            work();
        } catch (joinable::ContractViolation const& error) {
            return error.what();
        }
        return {};
    };
    DeviceTensor const tensor{DType::f32, {4}, {1}};
    std::vector<float> host(4);
    CHECK(
        text_of([&] { f.device.copy(AnyView{host}, tensor.view()); }) ==
        "copy on CUDA device 0: a tensor is on the host; copy it there first, with the engine's "
        "own "
        "means"
    );
    CHECK(
        text_of([&] { f.device.scale_copy(tensor.view(), 0.5, tensor.view()); }) ==
        "scale_copy: a tensor of f32 cannot be scaled by 0.5 without kernels; call "
        "CudaDevice::use_kernels first"
    );
    CHECK(cudaStreamBeginCapture(f.engine, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    CHECK(text_of([&] {
              f.device.submit();
          }).find("captures a CUDA graph; end the capture") != std::string::npos);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(f.engine, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    f.device.submit();
}

} // namespace
