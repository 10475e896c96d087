// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include <cuda_runtime_api.h>

#include <support/fake_cuda/fake_cuda.hpp>
#include <support/numbers.hpp>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable_tests {

/// read() and write() of device memory, when no stream is at work on it.
inline Numbers peek(joinable::AnyView const& view) {
    fake_cuda::DeviceCode const code;
    return read(view);
}
inline void poke(joinable::AnyView const& view, Numbers const& numbers) {
    fake_cuda::DeviceCode const code;
    write(view, numbers);
}

/// A tensor with any strides in memory of the current device of the fake.
class DeviceTensor {
public:
    DeviceTensor(
        joinable::DType dtype, joinable::Shape const& extents, joinable::Shape const& strides
    ) {
        int device = 0;
        (void)cudaGetDevice(&device);
        std::size_t const reach =
            joinable::detail::checked_reach(extents, strides, joinable::size_of(dtype));
        void* data = nullptr;
        (void)cudaMalloc(&data, reach * joinable::size_of(dtype));
        memory_ = {data, [](void* block) { (void)cudaFree(block); }};
        view_ = {data, dtype, extents, strides, {joinable::DeviceKind::cuda, device}};
    }

    [[nodiscard]] joinable::AnyView const& view() const noexcept { return view_; }
    /// What is in it, or is to be, when no stream is at work on it.
    [[nodiscard]] Numbers numbers() const { return peek(view_); }
    void assign(Numbers const& numbers) const { poke(view_, numbers); }

private:
    std::shared_ptr<void> memory_;
    joinable::AnyView view_;
};

/// A parameter on a device, whose gradient can be told where it is.
struct DeviceParam {
    DeviceTensor value;
    DeviceTensor own; ///< what the engine allocated for the gradient
    joinable::AnyView grad;

    DeviceParam(
        joinable::DType dtype, joinable::Shape const& extents, joinable::Shape const& strides
    )
        : value{dtype, extents, strides}, own{dtype, extents, strides}, grad{own.view()} {
        value.assign(Numbers(value.view().numel()));
        own.assign(Numbers(value.view().numel()));
    }
};

/// Does `work` when the stream comes to it: the engine's kernels.
template <class Work>
void launch(cudaStream_t stream, Work work) {
    fake_cuda::enqueue(stream, std::move(work));
}

} // namespace joinable_tests

template <>
struct joinable::parameter_traits<joinable_tests::DeviceParam> {
    using P = joinable_tests::DeviceParam;
    static AnyView const* value(P& p) { return &p.value.view(); }
    static AnyView* grad(P& p) { return p.grad ? &p.grad : nullptr; }
    static void set_grad(P& p, AnyView const& view) { p.grad = view; }
};
