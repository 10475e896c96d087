// SPDX-License-Identifier: BSL-1.0
#include <joinable/device/cuda/kernels.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include <support/layouts.hpp>
#include <support/numbers.hpp>

#include <joinable/cuda.hpp>

namespace {

using joinable::AnyView;
using joinable::CudaCopy;
using joinable::DType;
using joinable_tests::counted;
using joinable_tests::Layout;
using joinable_tests::layouts;
using joinable_tests::Numbers;
using joinable_tests::OwnedTensor;

/// What a launch does, by the host: each thread of each block, one after another.
template <std::size_t Room>
void run_on_host(std::vector<CudaCopy> const& copies) {
    for (std::size_t next = 0; next < copies.size();) {
        joinable::detail::CopyBatch<Room> batch;
        next += joinable::detail::fill_batch(batch, copies.data() + next, copies.size() - next);
        for (std::uint32_t block = 0; block < batch.first_block[batch.count]; ++block) {
            for (unsigned int thread = 0; thread < joinable::detail::copy_threads; ++thread) {
                joinable::detail::copy_in_block(batch, block, thread);
            }
        }
    }
}

/// Runs `run(copies)` over copies of all layouts and dtypes at once, with and without a factor, and
/// zeros, on tensors that `run` can write; compares with numbers that were scaled one by one.
template <class Run>
void check_kernel(std::vector<DType> const& dtypes, double factor, Run const& run) {
    std::vector<OwnedTensor> sources;
    std::vector<OwnedTensor> targets;
    std::vector<Numbers> expected;
    std::vector<CudaCopy> copies;
    for (DType const dtype : dtypes) {
        for (Layout const& layout : layouts()) {
            for (bool const is_zero : {false, true}) {
                std::size_t const count = joinable::numel(layout.extents);
                sources.emplace_back(dtype, layout.extents, layout.from);
                targets.emplace_back(dtype, layout.extents, layout.to);
                joinable_tests::write(sources.back().view(), counted(count));
                joinable_tests::write(targets.back().view(), Numbers(count, 99.0));
                expected.push_back(joinable_tests::read(sources.back().view()));
                for (double& number : expected.back()) {
                    number = is_zero ? 0.0 : joinable_tests::times(dtype, number, factor);
                }
                copies.push_back(joinable::detail::cuda_copy(
                    is_zero ? nullptr : sources.back().view().data(),
                    is_zero ? layout.to : layout.from,
                    factor,
                    targets.back().view()
                ));
            }
        }
    }
    run(copies);
    for (std::size_t i = 0; i < targets.size(); ++i) {
        CHECK(joinable_tests::read(targets[i].view()) == expected[i]);
        CHECK(targets[i].has_its_gaps());
    }
}

std::vector<DType> const floats{DType::f16, DType::bf16, DType::f32, DType::f64};
std::vector<DType> const all{
    DType::f16, DType::bf16, DType::f32, DType::f64, DType::i8, DType::u8, DType::i32, DType::i64
};

TEST_CASE("what each thread of a launch does copies, scales and zeroes: run by the host") {
    check_kernel(all, 1.0, run_on_host<joinable::detail::few_copies>);
    check_kernel(all, 1.0, run_on_host<joinable::detail::many_copies>);
    check_kernel(floats, 1.0 / 3.0, run_on_host<joinable::detail::few_copies>);
    check_kernel(floats, 1.0 / 3.0, run_on_host<joinable::detail::many_copies>);
}

TEST_CASE("a batch has room for as many copies as its comment says") {
    CHECK(joinable::detail::few_copies == 17);
    CHECK(joinable::detail::many_copies == (CUDART_VERSION >= 12010 ? 138 : 17));
}

bool has_no_gpu() {
    int count = 0;
    return cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
}

TEST_CASE("the kernels copy, scale and zero on a GPU" * doctest::skip(has_no_gpu())) {
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    auto const run = [&](std::vector<CudaCopy> copies) {
        std::vector<CudaCopy> there = copies;
        std::vector<void*> blocks;
        auto const upload = [&](void const* from, std::size_t bytes) {
            void* block = nullptr;
            REQUIRE(cudaMalloc(&block, bytes + 1) == cudaSuccess);
            REQUIRE(
                cudaMemcpyAsync(block, from, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess
            );
            blocks.push_back(block);
            return block;
        };
        auto const reach = [](CudaCopy const& copy, std::size_t CudaCopy::Level::* step) {
            std::size_t last = 0;
            for (std::size_t l = 0; l < copy.levels; ++l) {
                last += copy.level[l].extent == 0
                            ? 0
                            : (copy.level[l].extent - 1) * copy.level[l].*step;
            }
            return (last + 1) * joinable::size_of(copy.dtype);
        };
        for (CudaCopy& copy : there) {
            copy.to = upload(copy.to, reach(copy, &CudaCopy::Level::to));
            if (copy.from != nullptr) {
                copy.from = upload(copy.from, reach(copy, &CudaCopy::Level::from));
            }
        }
        REQUIRE(joinable::cuda_kernels().run(there.data(), there.size(), stream) == cudaSuccess);
        for (std::size_t i = 0; i < copies.size(); ++i) {
            REQUIRE(
                cudaMemcpyAsync(
                    copies[i].to,
                    there[i].to,
                    reach(copies[i], &CudaCopy::Level::to),
                    cudaMemcpyDeviceToHost,
                    stream
                ) == cudaSuccess
            );
        }
        REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
        for (void* const block : blocks) {
            (void)cudaFree(block);
        }
    };
    check_kernel(all, 1.0, run);
    check_kernel(floats, 1.0 / 3.0, run);
    (void)cudaStreamDestroy(stream);
}

} // namespace
