// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/numbers.hpp>

#include <joinable/participant/options.hpp>

namespace joinable_tests {

/// As many devices as 8 ranks have.
struct SixteenDevices {
    SixteenDevices() { fake_cuda::set_device_count(16); }
    ~SixteenDevices() { fake_cuda::set_device_count(8); }
    SixteenDevices(SixteenDevices const&) = delete;
    SixteenDevices& operator=(SixteenDevices const&) = delete;
};

/// A rank with a model on its device, and a stream on which the engine computes.
class DeviceModel {
public:
    DeviceModel(int rank, joinable::DType dtype) : DeviceModel{rank, dtype, rank} {}
    DeviceModel(int rank, joinable::DType dtype, int device)
        : rank_{rank}, device_{device}, dtype_{dtype} {
        (void)cudaSetDevice(device_);
        (void)cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
        params.emplace_back(dtype, joinable::Shape{3, 4}, joinable::Shape{4, 1});
        params.emplace_back(dtype, joinable::Shape{5}, joinable::Shape{1});
        params.emplace_back(
            dtype, joinable::Shape{3, 2}, joinable::Shape{1, 3}
        ); // by columns, and so its gradient
        params.emplace_back(
            dtype, joinable::Shape{2, 2}, joinable::Shape{3, 1}
        ); // with gaps, which buckets have not
    }
    DeviceModel(DeviceModel const&) = delete;
    DeviceModel& operator=(DeviceModel const&) = delete;
    ~DeviceModel() {
        (void)cudaStreamSynchronize(stream_);
        (void)cudaStreamDestroy(stream_);
    }

    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

    /// What a batch of a rank adds up to: small integers, which 16 bits hold exactly.
    static double gradient_of(int rank, std::size_t param, std::size_t element, int batch) {
        return static_cast<double>(
            (rank + 1) * (static_cast<int>(param + element) % 5 + 1) + batch
        );
    }

    /// A backward pass: kernels on the engine's stream, which the host does not wait for.
    template <class Ready>
    void backward(int batch, Ready const& ready) {
        (void)cudaSetDevice(device_);
        for (std::size_t i = params.size(); i-- > 0;) {
            joinable::AnyView const grad = params[i].grad;
            launch(stream_, [grad, i, batch, rank = rank_] {
                Numbers numbers(grad.numel());
                for (std::size_t e = 0; e < numbers.size(); ++e) {
                    numbers[e] = gradient_of(rank, i, e, batch);
                }
                write(grad, numbers);
            });
            ready(i);
        }
    }
    /// The gradients, read in the order of the engine's stream.
    [[nodiscard]] std::vector<Numbers> gradients() {
        (void)cudaSetDevice(device_);
        std::vector<Numbers> all(params.size());
        launch(stream_, [&] {
            for (std::size_t i = 0; i < params.size(); ++i) {
                all[i] = read(params[i].grad);
            }
        });
        (void)cudaStreamSynchronize(stream_);
        return all;
    }
    /// What they are after a round in which these ranks' batches are averaged, each scaled and
    /// rounded by its rank, over `divisor`.
    [[nodiscard]] std::vector<Numbers>
    averages(int batch, std::vector<int> const& ranks, int divisor) const {
        std::vector<Numbers> all;
        for (std::size_t i = 0; i < params.size(); ++i) {
            Numbers numbers(params[i].grad.numel());
            for (std::size_t e = 0; e < numbers.size(); ++e) {
                Numbers terms;
                for (int const rank : ranks) {
                    terms.push_back(times(dtype_, gradient_of(rank, i, e, batch), 1.0 / divisor));
                }
                numbers[e] = sum_of(dtype_, terms);
            }
            all.push_back(std::move(numbers));
        }
        return all;
    }

    /// Checks the gradients after a round of batch 0, in which rank r of `ranks` had weight r + 1.
    void check_weighted(int ranks) {
        std::vector<Numbers> const all = gradients();
        for (std::size_t i = 0; i < all.size(); ++i) {
            for (std::size_t e = 0; e < all[i].size(); ++e) {
                double weighted = 0;
                double weights = 0;
                for (int rank = 0; rank < ranks; ++rank) {
                    weighted += (rank + 1) * gradient_of(rank, i, e, 0);
                    weights += rank + 1;
                }
                CHECK(all[i][e] == doctest::Approx(weighted / weights));
            }
        }
    }

    std::vector<DeviceParam> params;

private:
    int rank_;
    int device_;
    joinable::DType dtype_;
    cudaStream_t stream_ = nullptr;
};

/// Several buckets, of a few parameters each.
inline joinable::DataParallelOptions small_buckets(bool views) {
    return {.bucket_cap_bytes = 64, .first_bucket_bytes = 16, .gradient_as_bucket_view = views};
}

/// To be called when all ranks have gone.
inline void check_nothing_is_left() {
    fake_cuda::drain();
    CHECK(fake_cuda::live_allocations() == 0);
    CHECK(fake_cuda::live_streams() == 0);
    CHECK(fake_cuda::live_events() == 0);
}

/// [first, size).
inline std::vector<int> all_ranks(int first, int size) {
    std::vector<int> ranks;
    for (int rank = first; rank < size; ++rank) {
        ranks.push_back(rank);
    }
    return ranks;
}

} // namespace joinable_tests
