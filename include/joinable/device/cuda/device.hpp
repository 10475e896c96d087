// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/combined_terms.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/device/cuda/copy.hpp>
#include <joinable/device/cuda/detail/runtime_copies.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/device/step.hpp>
#include <joinable/device/update.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// Memory of a CUDA device, used by two streams. On the first, everything here runs in order with
/// the collectives of a communicator. On the second, the engine makes and uses gradients. They may
/// be the same stream; a communicator with its own streams then orders them.
///
/// Without kernels, copies go through the runtime, with one call for each two-dimensional block of
/// a tensor, only the communicator can scale (ScalesSums), and nothing steps parameters, sums
/// squares or compresses gradients. With kernels (use_kernels), a submission is a launch or a few, packing scales,
/// sharded optimizers step, and CastTo and PowerSgd compute.
class CudaDevice : public Device {
public:
    /// The streams are of device `index` and must outlive this object; null is the default stream.
    CudaDevice(int index, cudaStream_t stream, cudaStream_t engine_stream) noexcept
        : index_{index}, stream_{stream}, engine_stream_{engine_stream} {}

    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
    [[nodiscard]] cudaStream_t engine_stream() const noexcept { return engine_stream_; }
    /// Takes effect at the next submission. Submitted work stays on the old streams; the caller
    /// orders both.
    void set_streams(cudaStream_t stream, cudaStream_t engine_stream) noexcept {
        stream_ = stream;
        engine_stream_ = engine_stream;
    }
    /// For downloads, and for memory that is allocated later. Memory goes back when the device is idle; at
    /// this deadline the host no longer waits for that, and a thread frees the memory later. Collectives
    /// whose ranks never come keep a device busy for ever.
    void set_deadline(std::chrono::nanoseconds deadline) noexcept { deadline_ = deadline; }
    /// Call this before a reducer or an optimizer uses the device. See cuda_kernels(). Loads the
    /// kernels, so that no launch waits for a collective.
    /// @throws CommunicationError  the runtime cannot load them: no kernels are used.
    void use_kernels(CudaKernels const& kernels) {
        if (kernels.load != nullptr) {
            detail::CurrentCudaDevice const current{index_};
            detail::require_cuda(kernels.load(), "loading the kernels");
        }
        kernels_ = kernels;
    }
    [[nodiscard]] CudaKernels const& kernels() const noexcept { return kernels_; }

    [[nodiscard]] DeviceId id() const noexcept override { return {DeviceKind::cuda, index_}; }
    /// @throws CommunicationError  the runtime refuses.
    [[nodiscard]] DeviceId id_of(void const* memory) const override {
        detail::CurrentCudaDevice const current{index_};
        cudaPointerAttributes found{};
        detail::require_cuda(cudaPointerGetAttributes(&found, memory), "cudaPointerGetAttributes");
        // Pinned memory is the host's, although it has the device that was current when it was made.
        bool const is_host =
            found.type == cudaMemoryTypeHost || found.type == cudaMemoryTypeUnregistered;
        return is_host ? DeviceId{} : DeviceId{DeviceKind::cuda, found.device};
    }

    /// Uses cudaMalloc, not a pool: it is called once, and memory from a pool cannot be registered
    /// with a transport. It goes back when the device is idle: see set_deadline(). Blocks only until the memory is zeroed, because a stream may be waiting
    /// for a collective that a failed rank never joins.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        detail::check_alignment(alignment);
        if (bytes == 0) {
            return {};
        }
        constexpr std::size_t given = 256; // cudaMalloc aligns to it
        std::size_t const room = alignment <= given ? 0 : alignment;
        detail::CurrentCudaDevice const current{index_};
        auto block = no_block(&cudaFree);
        detail::require_cuda(cudaMalloc(&block->data, bytes + room), "cudaMalloc");
        std::size_t space = bytes + room;
        void* data = block->data;
        std::align(alignment, bytes, data, space);
        Arena arena = arena_of(std::move(block), data, bytes);
        clear(data, bytes);
        return arena;
    }

    void copy(AnyView const& from, AnyView const& to) override { take("copy", from, 1.0, to); }
    /// @throws ContractViolation  also if there are no kernels and the factor is not 1.
    void scale_copy(AnyView const& from, double factor, AnyView const& to) override {
        if (factor != 1.0 && (!can_scale() || !detail::is_scalable(to.dtype()))) {
            throw ContractViolation{detail::concat(
                "scale_copy: a tensor of ",
                name_of(to.dtype()),
                " cannot be scaled by ",
                factor,
                can_scale() ? "; only floating-point and complex dtypes can"
                            : " without kernels; call CudaDevice::use_kernels first"
            )};
        }
        take("scale_copy", from, factor, to);
    }
    void fill_zero(AnyView const& to) override {
        require_here("fill_zero", to);
        AnyView const target = detail::as_reals(to);
        queue_.push_back(detail::cuda_copy(nullptr, target.strides(), 1.0, target));
    }
    [[nodiscard]] bool can_scale() const noexcept override { return kernels_.run != nullptr; }

    /// If it throws, what was requested before is forgotten: its memory may end.
    /// @throws ContractViolation  the engine's stream is capturing a graph: nothing was submitted.
    /// @throws CommunicationError  the runtime refuses.
    void submit() override {
        running_.clear();
        running_.swap(queue_);
        detail::CurrentCudaDevice const current{index_};
        if (detail::is_capturing(engine_stream_)) {
            throw ContractViolation{
                "gradients cannot be reduced while the engine's stream captures a CUDA graph; end "
                "the capture before the backward pass, or capture the passes without the reduction"
            };
        }
        order(engine_stream_, stream_);
        run(running_);
    }
    void finish() override {
        submit();
        detail::CurrentCudaDevice const current{index_};
        order(stream_, engine_stream_);
    }

    [[nodiscard]] bool can_update(detail::DeviceRule const& rule) const noexcept override {
        return kernels_.has_rule != nullptr && kernels_.has_rule(rule);
    }
    /// @throws ContractViolation  there are no kernels for the rule, or as submit().
    /// @throws CommunicationError  the runtime refuses.
    void
    update(detail::DeviceRule const& rule, std::span<detail::DeviceUpdate const> updates) override {
        if (!can_update(rule)) {
            throw ContractViolation{
                "update: there are no kernels for this rule; call CudaDevice::use_kernels first"
            };
        }
        submit();
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(
            kernels_.update(rule, updates.data(), updates.size(), stream_), "a kernel of a rule"
        );
    }

    [[nodiscard]] bool can_sum_squares() const noexcept override {
        return kernels_.sum_squares != nullptr;
    }
    /// @throws ContractViolation  there are no kernels for it, or as submit().
    /// @throws CommunicationError  the runtime refuses.
    void sum_squares(std::span<detail::SquareSum const> sums) override {
        if (!can_sum_squares()) {
            throw ContractViolation{
                "sum_squares: there are no kernels for it; call CudaDevice::use_kernels first"
            };
        }
        std::size_t blocks = 0;
        for (detail::SquareSum const& one : sums) {
            require_here("sum_squares", one.tensor);
            blocks += detail::square_blocks(one.tensor.numel());
        }
        auto* partials = reinterpret_cast<double*>(partials_.data(blocks * sizeof(double)));
        std::vector<detail::CudaSquares> squares;
        for (auto const& [tensor, sum, on_host] : sums) {
            std::size_t const count = tensor.numel();
            detail::IndexOrder const order{tensor.extents(), tensor.strides()};
            squares.push_back({tensor.data(), sum, partials, count, order, tensor.dtype()});
            partials += detail::square_blocks(count);
        }
        submit();
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(
            kernels_.sum_squares(squares.data(), squares.size(), stream_),
            "a kernel that sums squares"
        );
    }

    [[nodiscard]] bool can_compute() const noexcept override { return kernels_.compute != nullptr; }
    /// @throws ContractViolation  there are no kernels for it, or as submit().
    /// @throws CommunicationError  the runtime refuses.
    void compute(detail::DeviceStep const* steps, std::size_t count) override {
        if (!can_compute()) {
            throw ContractViolation{
                "compute: there are no kernels for it; call CudaDevice::use_kernels first"
            };
        }
        submit();
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(kernels_.compute(steps, count, stream_), "a kernel of a reduction");
    }

    /// Uses a second arena as large as the first one, until the stream has come so far.
    void permute(Arena const& arena, std::vector<detail::Section>& sections) override {
        submit();
        Arena const other = arena.bytes() == 0 ? Arena{} : allocate_in_order(arena.bytes());
        for (detail::Section const& section : sections) {
            move(arena.data() + section.from, other.data() + section.to, section.bytes);
        }
        submit();
        for (detail::Section const& section : sections) {
            move(other.data() + section.to, arena.data() + section.to, section.bytes);
        }
        submit();
    }

    /// Pinned memory: copying from other memory, the runtime may wait for the stream without a
    /// deadline.
    [[nodiscard]] Arena allocate_staging(std::size_t bytes) override {
        if (bytes == 0) {
            return {};
        }
        detail::CurrentCudaDevice const current{index_};
        auto block = no_block(&cudaFreeHost);
        detail::require_cuda(cudaMallocHost(&block->data, bytes), "cudaMallocHost");
        void* const data = block->data;
        std::memset(data, 0, bytes);
        return arena_of(std::move(block), data, bytes);
    }
    void upload(void const* from, void* to, std::size_t bytes) override {
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(
            cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync"
        );
    }
    /// @throws TimedOut  the stream has not come so far by the deadline. Nothing was copied.
    /// @throws CommunicationError  the runtime refuses.
    void download(void const* from, void* to, std::size_t bytes) override {
        detail::CurrentCudaDevice const current{index_};
        wait_for_stream(); // before the copy, which nothing could call back when `to` ends
        detail::require_cuda(
            cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync"
        );
        cudaError_t const waited = cudaStreamSynchronize(stream_);
        if (waited != cudaSuccess) { // the copy may still run, but `to` may end after a throw
            static_cast<void>(cudaStreamSynchronize(stream_));
        }
        detail::require_cuda(waited, "cudaStreamSynchronize");
    }

protected:
    /// Blocks the host until the stream has run what is on it, up to the deadline. A communicator's own device
    /// waits as the communicator does. @pre the device is the current one
    virtual void wait_for_stream() {
        constexpr std::chrono::microseconds spin{300}; // as a wait for a collective of NCCL
        constexpr std::chrono::microseconds nap{50};
        detail::require_no_cuda_error();
        auto const begun = std::chrono::steady_clock::now();
        for (;;) {
            cudaError_t const found = cudaStreamQuery(stream_);
            if (found != cudaErrorNotReady) {
                return detail::require_cuda(found, "cudaStreamQuery");
            }
            auto const waited = std::chrono::steady_clock::now() - begun;
            if (waited >= deadline_) {
                throw TimedOut{
                    {},
                    detail::concat(
                        detail::to_text(id()),
                        " has not finished its work within ",
                        std::chrono::duration<double>(deadline_).count(),
                        " s; a collective in it may wait for a rank that never comes"
                    )
                };
            }
            if (waited < spin) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(nap);
            }
        }
    }

private:
    /// On a stream that waits for no other. @pre the device is the current one
    static void clear(void* data, std::size_t bytes) {
        detail::CudaStream stream;
        detail::require_cuda(detail::make_stream(stream), "cudaStreamCreateWithFlags");
        detail::require_cuda(cudaMemsetAsync(data, 0, bytes, stream.get()), "cudaMemsetAsync");
        detail::require_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    }
    /// For memory that is allocated next. Owns none: `free` is for the arena.
    [[nodiscard]] std::unique_ptr<detail::CudaBlock> no_block(cudaError_t (*free)(void*)) const {
        return std::make_unique<detail::CudaBlock>(
            detail::CudaBlock{nullptr, index_, deadline_, free}
        );
    }
    static Arena
    arena_of(std::unique_ptr<detail::CudaBlock> block, void* data, std::size_t bytes) noexcept {
        return {static_cast<std::byte*>(data), bytes, &detail::CudaBlock::release, block.release()};
    }
    /// Memory for operations of the next submissions, not zeroed. It is given and taken back in the
    /// order of the stream, so the host waits for nothing; for that the device needs pools. NCCL must
    /// not see it: it may access memory directly, which a pool would have to permit. The device
    /// outlives it.
    [[nodiscard]] Arena allocate_in_order(std::size_t bytes) {
        detail::CurrentCudaDevice const current{index_};
        int has_pools = 0;
        detail::require_cuda(
            cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, index_),
            "cudaDeviceGetAttribute"
        );
        if (has_pools == 0) {
            return allocate(bytes, Arena::default_alignment);
        }
        void* block = nullptr;
        detail::require_cuda(cudaMallocAsync(&block, bytes, stream_), "cudaMallocAsync");
        return {static_cast<std::byte*>(block), bytes, &free_in_order, this};
    }
    static void free_in_order(void* context, std::byte* data, std::size_t) noexcept {
        auto const& device = *static_cast<CudaDevice*>(context);
        detail::CurrentCudaDevice const current{device.index_, std::nothrow};
        static_cast<void>(cudaFreeAsync(data, device.stream_));
    }

    void require_here(std::string_view what, AnyView const& view) const {
        if (view.device() != id()) {
            throw ContractViolation{detail::concat(
                what,
                " on ",
                detail::to_text(id()),
                ": a tensor is on ",
                detail::to_text(view.device()),
                "; copy it there first, with the engine's own means"
            )};
        }
    }
    static AnyView without_device(AnyView const& view) {
        return view ? AnyView{view.data(), view.dtype(), view.extents(), view.strides()} : view;
    }
    void take(std::string_view what, AnyView const& from, double factor, AnyView const& to) {
        require_here(what, from);
        require_here(what, to);
        detail::check_pair(what, without_device(from), without_device(to));
        if (to.numel() != 0 && !(factor == 1.0 && detail::is_same_view(from, to))) {
            put(from, factor, to);
        }
    }
    /// Kernels know no complex numbers.
    void put(AnyView const& from, double factor, AnyView const& to) {
        if (detail::is_complex(to.dtype())) {
            return put(detail::as_reals(from), factor, detail::as_reals(to));
        }
        queue_.push_back(detail::cuda_copy(from.data(), from.strides(), factor, to));
    }
    void move(std::byte* from, std::byte* to, std::size_t bytes) {
        if (bytes != 0) {
            AnyView const target{to, DType::u8, {bytes}, {1}, id()};
            queue_.push_back(detail::cuda_copy(from, {1}, 1.0, target));
        }
    }

    /// Later work on `later` runs after earlier work on `earlier`.
    void order(cudaStream_t earlier, cudaStream_t later) {
        if (earlier != later) {
            if (event_ == nullptr) {
                detail::require_cuda(detail::make_event(event_), "cudaEventCreateWithFlags");
            }
            detail::require_cuda(cudaEventRecord(event_.get(), earlier), "cudaEventRecord");
            detail::require_cuda(
                cudaStreamWaitEvent(later, event_.get(), 0), "cudaStreamWaitEvent"
            );
        }
    }

    void run(std::vector<detail::CudaCopy> const& queue) const {
        if (kernels_.run != nullptr && !queue.empty()) {
            detail::require_cuda(kernels_.run(queue.data(), queue.size(), stream_), "a kernel");
        } else {
            for (detail::CudaCopy const& copy : queue) {
                detail::require_cuda(
                    detail::CudaRuntimeCopies{stream_}.run(copy), "a copy on the device"
                );
            }
        }
    }

    int index_;
    cudaStream_t stream_;
    cudaStream_t engine_stream_;
    std::chrono::nanoseconds deadline_ = std::chrono::minutes{5};
    detail::CudaEvent event_;
    CudaKernels kernels_{};
    std::vector<detail::CudaCopy> queue_;   ///< since the last submission
    std::vector<detail::CudaCopy> running_; ///< of the last submission
    detail::Scratch partials_{*this};       ///< of sums of squares
};

}} // namespace joinable::v0
