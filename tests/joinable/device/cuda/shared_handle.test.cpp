// SPDX-License-Identifier: BSL-1.0
// Device memory that processes share by CUDA's handles, over the fake runtime. The oracle: closed forms of what each
// process writes there.
#include <joinable/device/cuda/shared_handle.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <csignal>
#include <cuda_runtime_api.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/hang.hpp>
#include <support/process_ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/tensor/tensor.hpp>

namespace {

namespace fake = joinable_tests::fake_cuda;
using joinable::Arena;
using joinable::CommunicationError;
using joinable::ContractViolation;
using joinable::CudaDevice;
using joinable::CudaSharedHandle;
using joinable::ProcessCommunicator;
using joinable::SharedBuffer;

constexpr joinable::DeviceId second{joinable::DeviceKind::cuda, 1};

SharedBuffer<float> allocated(std::size_t count) {
    CudaDevice device{second.index, nullptr, nullptr};
    return {device.allocate(count * sizeof(float), Arena::default_alignment), count, second};
}
/// An arena that begins so many bytes after its allocation, as one of a larger alignment does.
SharedBuffer<float> allocated_at(std::size_t offset, std::size_t count) {
    auto* const block =
        new joinable::detail::CudaBlock{nullptr, second.index, std::chrono::seconds{1}, &cudaFree};
    std::size_t const bytes = count * sizeof(float);
    REQUIRE(cudaSetDevice(second.index) == cudaSuccess);
    REQUIRE(cudaMalloc(&block->data, offset + bytes) == cudaSuccess);
    auto* const data = static_cast<std::byte*>(block->data) + offset;
    return {Arena{data, bytes, &joinable::detail::CudaBlock::release, block}, count, second};
}
/// A fork has none of the streams' threads of the process that made it.
template <class Body>
void over_processes(Body const& body) {
    joinable_tests::run_process_ranks({1, 2, 3, 4, 8}, body, {.other_threads = true});
}

float at(SharedBuffer<float> const& buffer, std::size_t i) {
    fake::DeviceCode const code;
    return buffer.data()[i];
}
void set(SharedBuffer<float> const& buffer, std::size_t i, float value) {
    fake::DeviceCode const code;
    buffer.data()[i] = value;
}

TEST_CASE("processes read and write one device memory by its handle") {
    over_processes([](ProcessCommunicator& comm) {
        auto const ranks = static_cast<std::size_t>(comm.size());
        auto const rank = static_cast<std::size_t>(comm.rank());
        REQUIRE(cudaSetDevice(second.index) == cudaSuccess);
        std::size_t const before = fake::live_allocations();
        for (std::size_t const offset : {0U, 256U, 4096U + 512U}) {
            CAPTURE(offset);
            std::size_t const count = 3000 + ranks; // more than a page
            std::optional<SharedBuffer<float>> weights;
            CudaSharedHandle handle;
            if (rank == 0) {
                weights = allocated_at(offset, count);
                set(*weights, count - 1, 7); // before there is a handle
                handle = weights->handle<CudaSharedHandle>();
            }
            joinable::broadcast(comm, handle, 0).wait();
            if (rank != 0) {
                weights = SharedBuffer<float>::open(handle);
            }
            CHECK(weights->size() == count);
            CHECK(weights->device() == second);
            CHECK(joinable::tensor_traits<SharedBuffer<float>>::device(*weights) == second);
            CHECK(at(*weights, count - 1) == 7);
            set(*weights, rank, static_cast<float>(rank) + 1);
            comm.barrier();
            float sum = 0;
            for (std::size_t i = 0; i < ranks; ++i) {
                sum += at(*weights, i);
            }
            CHECK(sum == static_cast<float>(ranks * (ranks + 1)) / 2);
            if (rank != 0) {
                weights.reset();
            }
            comm.barrier(); // the maker's buffer ends last
            weights.reset();
        }
        CHECK(fake::live_allocations() == before);
    });
}

TEST_CASE("memory that is opened twice stays open until both have ended") {
    joinable_tests::run_process_ranks(
        {2},
        [](ProcessCommunicator& comm) {
            REQUIRE(cudaSetDevice(second.index) == cudaSuccess);
            std::optional<SharedBuffer<float>> made;
            std::array<CudaSharedHandle, 1> handle;
            if (comm.rank() == 0) {
                made = allocated(4);
                set(*made, 0, 5);
                handle[0] = made->handle<CudaSharedHandle>();
                CHECK(made->handle<CudaSharedHandle>().words == handle[0].words);
            }
            joinable::broadcast(comm, handle[0], 0).wait();
            if (comm.rank() == 1) {
                auto one = std::make_optional(SharedBuffer<float>::open(handle[0]));
                auto const other = SharedBuffer<float>::open(handle[0]);
                one.reset();
                CHECK(at(other, 0) == 5);
                CHECK_THROWS_WITH_AS(
                    (void)other.handle<CudaSharedHandle>(),
                    "SharedBuffer::handle(): another process has made the memory; take that one's handle",
                    ContractViolation
                );
            }
            comm.barrier();
        },
        {.other_threads = true}
    );
}

TEST_CASE("a handle of memory that was freed, or of this process, is refused, and leaves nothing") {
    joinable_tests::run_process_ranks(
        {2},
        [](ProcessCommunicator& comm) {
            REQUIRE(cudaSetDevice(second.index) == cudaSuccess);
            CudaSharedHandle handle;
            if (comm.rank() == 0) {
                auto const made = allocated(4);
                handle = made.handle<CudaSharedHandle>();
                CHECK_THROWS_WITH_AS(
                    (void)SharedBuffer<float>::open(handle),
                    doctest::Contains("cudaIpcOpenMemHandle"),
                    CommunicationError
                );
            }
            joinable::broadcast(comm, handle, 0).wait();
            if (comm.rank() == 1) {
                CHECK_THROWS_AS((void)SharedBuffer<float>::open(handle), CommunicationError);
                CHECK(cudaGetLastError() == cudaSuccess);
            }
            comm.barrier();
        },
        {.other_threads = true}
    );
}

TEST_CASE("memory of a process that is killed is closed as any other, and cannot be opened again") {
    joinable_tests::Alarm const at_hang;
    std::array<int, 2> pipe{};
    REQUIRE(::pipe(pipe.data()) == 0);
    pid_t const maker = ::fork();
    if (maker == 0) {
        try {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            auto const made = allocated(4);
            set(made, 3, 9);
            CudaSharedHandle const handle = made.handle<CudaSharedHandle>();
            (void)!::write(pipe[1], handle.words.data(), sizeof handle.words);
            for (;;) {
                ::pause();
            }
        } catch (...) {
            ::_exit(1); // and not the rest of the tests
        }
    }
    ::close(pipe[1]);
    CudaSharedHandle handle;
    REQUIRE(::read(pipe[0], handle.words.data(), sizeof handle.words) == sizeof handle.words);
    REQUIRE(cudaSetDevice(second.index) == cudaSuccess);
    {
        auto const opened = SharedBuffer<float>::open(handle);
        CHECK(CudaDevice{0, nullptr, nullptr}.id_of(opened.data()) == second);
        ::kill(maker, SIGKILL);
        ::waitpid(maker, nullptr, 0);
        CHECK(at(opened, 3) == 9); // the fake's pages; CUDA does not say what is there
    }
    CHECK_THROWS_AS((void)SharedBuffer<float>::open(handle), CommunicationError);
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    ::close(pipe[0]);
}

TEST_CASE("mistakes with handles of device memory are answered in a sentence") {
    SharedBuffer<float> const on_host{Arena{64}, 16};
    CHECK_THROWS_WITH_AS(
        (void)on_host.handle<CudaSharedHandle>(),
        "SharedBuffer::handle(): the elements are not of CudaDevice::allocate(); a handle of host memory is "
        "SharedHandle",
        ContractViolation
    );
    CHECK_THROWS_WITH_AS(
        (void)SharedBuffer<float>{}.handle<CudaSharedHandle>(),
        "SharedBuffer::handle(): the buffer has no elements, which no process can open",
        ContractViolation
    );
    CHECK_THROWS_WITH_AS(
        (void)SharedBuffer<float>::open(CudaSharedHandle{}),
        "SharedBuffer::open(): the handle is empty; give one that handle() has made",
        ContractViolation
    );
    auto const made = allocated(4);
    auto const handle = made.handle<CudaSharedHandle>();
    CHECK_THROWS_WITH_AS(
        (void)SharedBuffer<double>::open(handle),
        "SharedBuffer::open(): expected a handle of elements of 8 bytes, but its elements have 4: open it with the "
        "element type with which the buffer was made",
        ContractViolation
    );
    fake::fail_next(cudaErrorNotSupported, 4); // after what makes the device current
    bool is_told = false;
    for (int call = 0; call < 8 && !is_told; ++call) {
        try {
            (void)made.handle<CudaSharedHandle>();
        } catch (CommunicationError const&) {
            is_told = true;
        }
    }
    CHECK(is_told);
    (void)fake::has_failed();
}

} // namespace
