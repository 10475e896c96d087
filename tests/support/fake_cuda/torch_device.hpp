// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/nccl_ranks.hpp>
#include <torch/library.h>

/// @file The devices of the fake as those of a libtorch that was built without CUDA:
/// use_fake_cuda_in_torch() gives it streams, memory and operations there. Autograd then has a
/// thread for each device, as with CUDA. A process that has run a backward pass before has none.

namespace joinable_tests {

/// What libtorch asks of CUDA about streams, answered by the fake. Each thread has its own current
/// streams.
class TorchStreams final : public c10::impl::DeviceGuardImplInterface {
public:
    static cudaStream_t set_current(int device, cudaStream_t stream) {
        return std::exchange(current[static_cast<std::size_t>(device)], stream);
    }
    static cudaStream_t stream_of(c10::Stream const& stream) {
        return reinterpret_cast<cudaStream_t>(static_cast<std::intptr_t>(stream.id()));
    }

    [[nodiscard]] c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    [[nodiscard]] c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device const before = getDevice();
        setDevice(device);
        return before;
    }
    [[nodiscard]] c10::Device getDevice() const override {
        int device = 0;
        cuda(cudaGetDevice(&device));
        return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
    }
    void setDevice(c10::Device device) const override { cuda(cudaSetDevice(device.index())); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        (void)cudaSetDevice(device.index());
    }
    [[nodiscard]] c10::Stream getStream(c10::Device device) const noexcept override {
        auto const stream = current[static_cast<std::size_t>(device.index())];
        return c10::Stream{c10::Stream::UNSAFE, device, reinterpret_cast<std::intptr_t>(stream)};
    }
    [[nodiscard]] c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        c10::Stream const before = getStream(stream.device());
        set_current(stream.device_index(), stream_of(stream));
        return before;
    }
    void record(void** event, c10::Stream const& stream, c10::DeviceIndex, c10::EventFlag)
        const override {
        c10::Device const before = exchangeDevice(stream.device());
        auto made = static_cast<cudaEvent_t>(*event);
        if (made == nullptr) {
            cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
            *event = made;
        }
        cuda(cudaEventRecord(made, stream_of(stream)));
        setDevice(before);
    }
    void block(void* event, c10::Stream const& stream) const override {
        cuda(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event), 0));
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        if (event != nullptr) {
            (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
        }
    }
    [[nodiscard]] c10::DeviceIndex deviceCount() const noexcept override {
        return static_cast<c10::DeviceIndex>(current.size());
    }

private:
    static thread_local inline std::array<cudaStream_t, 8> current{};
};

/// Says that devices are in use, so that autograd looks after their streams.
class TorchHooks final : public at::CUDAHooksInterface {
    template <class Index> // another one in later versions
    static Index index_of(bool (at::CUDAHooksInterface::*)(Index) const);

public:
    using Index = decltype(index_of(&at::CUDAHooksInterface::hasPrimaryContext));

    [[nodiscard]] bool hasCUDA() const override { return true; }
    [[nodiscard]] bool hasPrimaryContext(Index) const override { return true; }
};

/// Runs an operation of libtorch as a kernel: the host's one works on copies, made when the current
/// stream comes to it, of the memory that tensors have on a device. What it writes goes back in the
/// order of that stream, and the host does not wait.
class TorchKernel {
public:
    static void run(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
        at::AutoDispatchBelowADInplaceOrView const below_autograd;
        TorchKernel kernel;
        auto const& arguments = op.schema().arguments();
        auto argument = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
        for (auto const& declared : arguments) {
            kernel.take(
                *argument++, declared.alias_info() != nullptr && declared.alias_info()->isWrite()
            );
        }
        if (!kernel.device_.is_cuda()) {
            throw std::logic_error{"no tensor on a device: " + op.schema().name()};
        }
        op.callBoxed(stack);
        kernel.write_back();
        auto const results = static_cast<std::ptrdiff_t>(op.schema().returns().size());
        for (auto result = stack->end() - results; result != stack->end(); ++result) {
            kernel.give(*result);
        }
    }

private:
    struct Argument {
        at::Tensor on_device;
        at::Tensor on_host;
    };
    struct Copy {
        c10::Storage on_device;
        at::Tensor on_host; ///< bytes
        bool is_written = false;
    };
    /// Freed in the order of the stream in which it was allocated, as libtorch's allocator does.
    struct Memory {
        void* data;
        cudaStream_t stream;

        static void free(void* context) {
            std::unique_ptr<Memory> const memory{static_cast<Memory*>(context)};
            (void)cudaFreeAsync(memory->data, memory->stream);
        }
    };

    [[nodiscard]] cudaStream_t stream() const {
        auto const* const streams = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
        return TorchStreams::stream_of(streams->getStream(device_));
    }
    void copy(void* to, void const* from, at::Tensor const& keep) const {
        auto const bytes = static_cast<std::size_t>(keep.numel());
        if (bytes != 0) {
            fake_cuda::enqueue(device_.index(), stream(), [to, from, bytes, keep] {
                std::memcpy(to, from, bytes);
            });
        }
    }

    void take(c10::IValue& value, bool is_written) {
        if (value.isTensor()) {
            value = on_host(value.toTensor(), is_written);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> all;
            for (at::Tensor const& tensor : value.toTensorVector()) {
                all.push_back(on_host(tensor, is_written));
            }
            value = all;
        } else if (value.isDevice() && value.toDevice().is_cuda()) {
            c10::Device const device = value.toDevice();
            device_ = device.has_index() ? device : TorchStreams{}.getDevice();
            value = c10::Device{c10::DeviceType::CPU};
        }
    }
    at::Tensor on_host(at::Tensor const& tensor, bool is_written) {
        if (!tensor.defined() || !tensor.device().is_cuda()) {
            arguments_.push_back({tensor, tensor});
            return tensor;
        }
        device_ = tensor.device();
        Copy& memory = copy_of(tensor.storage());
        memory.is_written = memory.is_written || is_written;
        for (Argument const& argument : arguments_) {
            if (argument.on_device.is_same(tensor)) {
                return argument.on_host;
            }
        }
        at::Tensor const host = at::empty({0}, tensor.options().device(at::kCPU));
        host.set_(
            memory.on_host.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides()
        );
        arguments_.push_back({tensor, host});
        return host;
    }
    Copy& copy_of(c10::Storage const& storage) {
        auto const known = std::find_if(copies_.begin(), copies_.end(), [&](Copy const& one) {
            return one.on_device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
        });
        if (known != copies_.end()) {
            return *known;
        }
        auto const bytes = static_cast<std::int64_t>(storage.nbytes());
        at::Tensor const host = at::empty({bytes}, at::kByte);
        copy(host.data_ptr(), storage.data_ptr().get(), host);
        cuda(cudaStreamSynchronize(stream()));
        return copies_.emplace_back(Copy{storage, host});
    }

    void write_back() {
        for (Copy const& one : copies_) {
            if (one.is_written) {
                copy(one.on_device.data_ptr().get(), one.on_host.data_ptr(), one.on_host);
            }
        }
    }
    void give(c10::IValue& value) {
        if (value.isTensor()) {
            value = on_device(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> all;
            for (at::Tensor const& tensor : value.toTensorVector()) {
                all.push_back(on_device(tensor));
            }
            value = all;
        }
    }
    [[nodiscard]] at::Tensor on_device(at::Tensor const& host) {
        for (Argument const& argument : arguments_) {
            if (argument.on_host.is_same(host)) {
                return argument.on_device;
            }
        }
        if (!host.defined()) {
            return host;
        }
        auto tensor = at::detail::make_tensor<c10::TensorImpl>(
            memory_of(host.storage()), c10::DispatchKeySet{c10::DispatchKey::CUDA}, host.dtype()
        );
        auto* const made = tensor.unsafeGetTensorImpl();
        made->set_sizes_and_strides(host.sizes(), host.strides());
        made->set_storage_offset(host.storage_offset());
        return tensor;
    }
    /// That of an argument, of which the result is a view, or new memory.
    c10::Storage memory_of(c10::Storage const& host) {
        for (Copy const& one : copies_) {
            if (one.on_host.storage().unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) {
                return one.on_device;
            }
        }
        auto const bytes = static_cast<std::int64_t>(host.nbytes());
        auto memory = std::make_unique<Memory>(Memory{nullptr, stream()});
        if (bytes != 0) {
            c10::DeviceGuard const on_its_device{device_};
            cuda(cudaMallocAsync(&memory->data, host.nbytes(), memory->stream));
        }
        at::Tensor const made = at::empty({0}, at::kByte).set_(host, 0, {bytes}, {1});
        copy(memory->data, made.data_ptr(), made);
        void* const data = memory->data;
        return {
            c10::Storage::use_byte_size_t{},
            host.nbytes(),
            data == nullptr ? at::DataPtr{nullptr, device_}
                            : at::DataPtr{data, memory.release(), &Memory::free, device_}
        };
    }

    c10::Device device_{c10::DeviceType::CPU};
    std::vector<Argument> arguments_;
    std::vector<Copy> copies_;
};

/// Once in a process, before its first backward pass.
inline void use_fake_cuda_in_torch() {
    static constexpr auto key = c10::DispatchKey::CUDA;
    static TorchStreams streams;
    static c10::impl::DeviceGuardImplRegistrar const guard{c10::DeviceType::CUDA, &streams};
    [[maybe_unused]] static bool const has_hooks = [] {
        at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs const&) {
            return std::unique_ptr<at::CUDAHooksInterface>{std::make_unique<TorchHooks>()};
        });
        return true;
    }();
    static torch::Library const operations = [] {
        torch::Library library{torch::Library::IMPL, "_", key, __FILE__, __LINE__};
        library.fallback(torch::CppFunction::makeFromBoxedFunction<&TorchKernel::run>());
        return library;
    }();
    static torch::Library const copies = [] { // which has a kernel for all devices
        torch::Library library{torch::Library::IMPL, "aten", key, __FILE__, __LINE__};
        library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&TorchKernel::run>());
        return library;
    }();
}

} // namespace joinable_tests
