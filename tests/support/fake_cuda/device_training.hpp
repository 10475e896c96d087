// SPDX-License-Identifier: BSL-1.0
#pragma once

// The model of sharded_training.hpp on a device of the fake: an engine that computes on a stream, and
// allocates and frees in its order. Where memory is freed before it is read, what is read is poison.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <support/fake_cuda/device_tensor.hpp>
#include <support/numbers.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// Memory that is allocated and freed in the order of a stream.
class StreamTensor {
public:
    StreamTensor() = default;
    /// Like `tensor`, on the current device.
    StreamTensor(joinable::AnyView const& tensor, cudaStream_t stream) {
        int device = 0;
        (void)cudaGetDevice(&device);
        std::size_t const size = joinable::size_of(tensor.dtype());
        void* data = nullptr;
        (void)cudaMallocAsync(
            &data,
            size * joinable::detail::checked_reach(tensor.extents(), tensor.strides(), size),
            stream
        );
        memory_ = {data, [stream](void* block) { (void)cudaFreeAsync(block, stream); }};
        view = {
            data,
            tensor.dtype(),
            tensor.extents(),
            tensor.strides(),
            {joinable::DeviceKind::cuda, device}
        };
    }

    joinable::AnyView view;

private:
    std::shared_ptr<void> memory_;
};

/// A parameter whose value and gradient are the engine's, or where somebody says.
struct EngineParam {
    cudaStream_t stream;
    joinable::AnyView like; ///< the gradient's layout, in host memory
    StreamTensor own_value;
    StreamTensor own_grad;
    joinable::AnyView value;
    joinable::AnyView grad;
    bool requires_grad;
    int releases = 0; ///< of gradients

    /// A parameter with the value of one in host memory.
    EngineParam(StridedParam const& from, cudaStream_t on)
        : stream{on}, like{from.own.view()}, own_value{from.value.view(), on},
          value{own_value.view}, requires_grad{from.requires_grad} {
        launch(stream, [to = value, numbers = read(from.value.view())] { write(to, numbers); });
    }
    void need_grad() {
        if (!grad) {
            own_grad = StreamTensor{like, stream};
            grad = own_grad.view;
        }
    }
};

/// What an element adds to its gradient: with it, sums of a few ranks are exact in each dtype.
inline double share_of(double value) {
    return std::round(std::clamp(value, -1.0, 1.0) * 8) / 8;
}

/// A rank's parameters on its device.
class DeviceEngine {
public:
    DeviceEngine(Model const& model, int rank) : DeviceEngine{model, rank, make_stream(rank)} {}
    /// One more model on the stream of another one.
    DeviceEngine(Model const& model, DeviceEngine const& other)
        : DeviceEngine{model, other.rank_, other.stream_} {}
    DeviceEngine(DeviceEngine const&) = delete;
    DeviceEngine& operator=(DeviceEngine const&) = delete;
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_.get(); }

    /// A pass whose kernels read values, which `use(i)` keeps there until they are launched.
    template <class Ready, class Use>
    void backward(int round, Ready const& ready, Use const& use) {
        for (std::size_t i = params.size(); i-- > 0;) {
            [[maybe_unused]] auto const held = use(i);
            EngineParam& param = params[i];
            if (!param.requires_grad) {
                continue;
            }
            param.need_grad();
            launch(stream(), [grad = param.grad, value = param.value, i, round, rank = rank_] {
                Numbers numbers = read(value);
                for (std::size_t k = 0; k < numbers.size(); ++k) {
                    numbers[k] = gradient_of(rank, round, i, k) + share_of(numbers[k]);
                }
                write(grad, numbers);
            });
            ready(i);
        }
    }
    template <class Ready>
    void backward(int round, Ready const& ready) {
        backward(round, ready, [](std::size_t) { return 0; });
    }
    /// In the order of the engine's stream.
    [[nodiscard]] std::vector<Numbers> values() {
        std::vector<Numbers> all(params.size());
        launch(stream(), [&] {
            for (std::size_t i = 0; i < params.size(); ++i) {
                all[i] = read(params[i].value);
            }
        });
        (void)cudaStreamSynchronize(stream());
        return all;
    }

private:
    DeviceEngine(Model const& model, int rank, std::shared_ptr<CUstream_st> stream)
        : rank_{rank}, stream_{std::move(stream)}, host_{make(model)} {
        for (StridedParam const& param : host_) {
            params.emplace_back(param, stream_.get());
        }
    }
    static std::shared_ptr<CUstream_st> make_stream(int rank) {
        (void)cudaSetDevice(rank);
        cudaStream_t stream = nullptr;
        (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        return {stream, [](cudaStream_t used) {
                    (void)cudaStreamSynchronize(used);
                    (void)cudaStreamDestroy(used);
                }};
    }

    int rank_;
    std::shared_ptr<CUstream_st> stream_;
    std::vector<StridedParam> host_; ///< what it began with

public:
    std::vector<EngineParam> params; ///< destroyed before the stream
};

/// The same pass in host memory.
template <class Ready>
void backward_on_host(std::vector<StridedParam>& params, int rank, int round, Ready const& ready) {
    for (std::size_t i = params.size(); i-- > 0;) {
        if (params[i].requires_grad) {
            params[i].need_grad();
            Numbers numbers = read(params[i].value.view());
            for (std::size_t k = 0; k < numbers.size(); ++k) {
                numbers[k] = gradient_of(rank, round, i, k) + share_of(numbers[k]);
            }
            write(params[i].grad, numbers);
            ready(i);
        }
    }
}

/// The values after a training in host memory, by the whole optimizer on every rank.
template <class Comm, class Rule>
std::vector<Numbers>
train_on_host(Comm& comm, Model const& model, Inputs const& inputs, Rule const& rule) {
    std::vector<StridedParam> params = make(model);
    DistributedDataParallel ddp{comm, params};
    WholeOptimizer<Rule> whole{params, rule};
    Step step{comm, [&] { whole.step(); }};
    Join guard{participants(ddp, step)};
    for (int round = 0; round < inputs(comm.rank()); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) { backward_on_host(params, comm.rank(), round, ready); });
        step.step();
    }
    guard.finish();
    return values_of(params);
}

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::EngineParam> {
    using P = joinable_tests::EngineParam;
    static AnyView* value(P& p) { return p.value ? &p.value : nullptr; }
    static AnyView* grad(P& p) { return p.grad ? &p.grad : nullptr; }
    static bool requires_grad(P const& p) { return p.requires_grad; }
    static void set_grad(P& p, AnyView const& view) {
        p.grad = view;
        p.own_grad = {};
    }
    static void release_grad(P& p) {
        p.grad = {};
        p.own_grad = {};
        ++p.releases;
    }
    static void set_value(P& p, AnyView const& view) {
        p.value = view;
        p.own_value = {};
    }
    static void release_value(P& p) {
        p.value = {};
        p.own_value = {};
    }
};
