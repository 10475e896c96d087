// SPDX-License-Identifier: BSL-1.0
// Tensors of libtorch in the memory of a GPU, over the fakes of CUDA and NCCL. libtorch itself computes nothing
// here: without CUDA it can only say where such a tensor is.
#include <joinable/interop/torch_tensor.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using torch::Tensor;

constexpr std::size_t rows = 5;
constexpr std::size_t columns = 3;

/// A parameter on the current device, column-major, and its gradient.
class DeviceParameter {
public:
    explicit DeviceParameter(int device, cudaStream_t stream)
        : value_{std::vector<float>(rows * columns, 1.0F), stream},
          grad_{std::vector<float>(rows * columns), stream}, tensor{on(value_, device)} {
        tensor.set_requires_grad(true);
        tensor.mutable_grad() = on(grad_, device);
    }

private:
    static Tensor on(DeviceArray<float> const& memory, int device) {
        at::Device const place{at::kCUDA, static_cast<at::DeviceIndex>(device)};
        return at::for_blob(memory.buffer().data, {rows, columns})
            .strides({1, rows})
            .options(at::TensorOptions{place}.dtype(at::kFloat))
            .target_device(place)
            .make_tensor();
    }

    DeviceArray<float> value_;
    DeviceArray<float> grad_;

public:
    Tensor tensor;
};

std::vector<float>
read(joinable::NcclCommunicator& comm, Tensor const& tensor, cudaStream_t stream) {
    std::vector<float> values(rows * columns);
    cuda(cudaMemcpyAsync(
        values.data(), tensor.data_ptr(), values.size() * 4, cudaMemcpyDeviceToHost, stream
    ));
    comm.synchronize();
    return values;
}

/// Rank r has r + 1 inputs; in round k its gradients are (r + 1)(k + 1).
void train(
    joinable::NcclCommunicator& comm,
    joinable::ThreadCommunicator& hosts,
    cudaStream_t stream,
    bool views
) {
    comm.device_memory().use_kernels(host_kernels());
    std::vector<DeviceParameter> storage;
    for (int i = 0; i < 3; ++i) {
        storage.emplace_back(comm.rank(), stream);
    }
    std::vector<Tensor> parameters;
    for (DeviceParameter const& parameter : storage) {
        parameters.push_back(parameter.tensor);
    }
    joinable::DistributedDataParallel ddp{
        comm,
        parameters,
        {.gradient_as_bucket_view = views, .joined_gradients = joinable::JoinedGradients::kept}
    };
    joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
    auto const check = [&](int round) {
        float sum = 0;
        for (int active = round; active < comm.size(); ++active) {
            sum += static_cast<float>((active + 1) * (round + 1));
        }
        std::vector<float> const average(rows * columns, sum / static_cast<float>(comm.size()));
        for (Tensor const& parameter : parameters) {
            CHECK(parameter.grad().device().is_cuda());
            CHECK(parameter.grad().stride(1) == static_cast<std::int64_t>(rows));
            CHECK(read(comm, parameter.grad(), stream) == average);
        }
    };
    for (int round = 0; round <= comm.rank(); ++round) {
        std::vector<float> const own(
            rows * columns, static_cast<float>((comm.rank() + 1) * (round + 1))
        );
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = parameters.size(); i-- > 0;) {
                void* const grad = parameters[i].grad().data_ptr();
                cuda(cudaMemcpyAsync(
                    grad, own.data(), own.size() * 4, cudaMemcpyHostToDevice, stream
                ));
                ready(i);
            }
        });
        check(round);
    }
    CHECK(guard.finish().rounds == static_cast<std::size_t>(comm.size()));
    check(comm.size() - 1);
}

TEST_CASE(
    "gradients of torch tensors on a GPU are averaged by NCCL, in place or as views of buckets"
) {
    for (bool const views : {false, true}) {
        run_nccl_ranks({1, 2, 4}, [views](auto& comm, auto& hosts, cudaStream_t stream) {
            train(comm, hosts, stream, views);
        });
    }
}

} // namespace
