// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <cuda_runtime_api.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/nccl.hpp>

namespace joinable_tests {

/// NCCL ranks as a communicator of the host. Arenas are managed memory, which host and device reach; what is not
/// there goes through a copy on the device. To wait is to make the host wait.
/// Words of 64 bits, of which roll calls consist, go over the control communicator, as where a guard
/// has control(...): NCCL does not end a collective on all ranks at once, so who aborts after it may
/// take it from the others.
class HostNccl {
public:
    static constexpr bool rounds_factors = true; ///< NCCL does

    class Work {
    public:
        Work(
            joinable::NcclWork work,
            joinable::Buffer host,
            std::optional<DeviceArray<std::uint8_t>> staged
        )
            : work_{std::move(work)}, host_{host}, staged_{std::move(staged)} {}
        explicit Work(joinable::ThreadWork words) : words_{std::move(words)} {}

        void wait() {
            if (words_) {
                words_->wait();
                return;
            }
            work_->synchronize();
            if (staged_) {
                fake_cuda::DeviceCode const code;
                std::memcpy(host_.data, staged_->buffer().data, host_.bytes());
                staged_.reset();
            }
        }
        [[nodiscard]] bool test() {
            if (words_) {
                return words_->test();
            }
            if (!work_->test()) {
                return false;
            }
            wait();
            return true;
        }

    private:
        std::optional<joinable::ThreadWork> words_;
        std::optional<joinable::NcclWork> work_;
        joinable::Buffer host_{};
        std::optional<DeviceArray<std::uint8_t>> staged_;
    };

    HostNccl(joinable::NcclCommunicator& comm, joinable::ThreadCommunicator& control) noexcept
        : comm_{comm}, control_{control} {}

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }
    Work all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        if (buffer.dtype == joinable::DType::u64) {
            return Work{control_.all_reduce(buffer, op)};
        }
        return start(buffer, [&](joinable::Buffer there) { return comm_.all_reduce(there, op); });
    }
    Work all_reduce(joinable::Buffer buffer, joinable::ReduceOp op, double factor) {
        return start(buffer, [&](joinable::Buffer there) {
            return comm_.all_reduce(there, op, factor);
        });
    }
    Work broadcast(joinable::Buffer buffer, int root) {
        return start(buffer, [&](joinable::Buffer there) { return comm_.broadcast(there, root); });
    }
    /// Of memory of the host.
    Work all_gather(joinable::ConstBuffer in, joinable::Buffer out) {
        joinable::detail::CurrentCudaDevice const current{comm_.device()};
        DeviceArray<std::uint8_t> const part{in.bytes()};
        {
            fake_cuda::DeviceCode const code;
            std::memcpy(part.buffer().data, in.data, in.bytes());
        }
        Work work = start(out, [&](joinable::Buffer there) {
            return comm_.all_gather({part.buffer().data, in.count, in.dtype}, there);
        });
        work.wait(); // its part goes
        return work;
    }
    void barrier() { comm_.barrier(); }
    [[nodiscard]] HostNccl split(int color, int key) {
        return HostNccl{std::make_unique<Owned>(comm_, control_, color, key)};
    }
    void abort(joinable::AbortReason const& reason) {
        control_.abort(reason); // that of a group's communicator is another one
        comm_.abort(reason);
    }
    [[nodiscard]] bool is_aborted() const { return comm_.is_aborted(); }
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const {
        return comm_.abort_reason();
    }
    [[nodiscard]] bool is_renumbered() const { return comm_.is_renumbered(); }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        control_.set_deadline(deadline);
        return comm_.set_deadline(deadline);
    }
    [[nodiscard]] joinable::Arena allocate(std::size_t bytes, std::size_t) {
        if (bytes == 0) {
            return {};
        }
        joinable::detail::CurrentCudaDevice const current{comm_.device()};
        void* data = nullptr;
        cuda(cudaMallocManaged(&data, bytes, cudaMemAttachGlobal));
        std::memset(data, 0, bytes);
        auto const release = [](void*, std::byte* memory, std::size_t) noexcept {
            cudaFree(memory);
        };
        return {static_cast<std::byte*>(data), bytes, release, nullptr};
    }

private:
    /// What a group of its own consists of.
    struct Owned {
        Owned(
            joinable::NcclCommunicator& comm,
            joinable::ThreadCommunicator& control,
            int color,
            int key
        )
            : nccl(comm.split(color, key)), hosts(control.split(color, key)) {}
        joinable::NcclCommunicator nccl;
        joinable::ThreadCommunicator hosts;
    };
    explicit HostNccl(std::unique_ptr<Owned> owned)
        : owned_{std::move(owned)}, comm_{owned_->nccl}, control_{owned_->hosts} {}

    template <class Call>
    Work start(joinable::Buffer buffer, Call const& call) {
        if (buffer.count == 0 || fake_cuda::is_device_memory(buffer.data, buffer.bytes())) {
            return {call(buffer), buffer, {}};
        }
        joinable::detail::CurrentCudaDevice const current{comm_.device()};
        DeviceArray<std::uint8_t> staged{buffer.bytes()};
        void* const there = staged.buffer().data;
        {
            fake_cuda::DeviceCode const code;
            std::memcpy(there, buffer.data, buffer.bytes());
        }
        auto work = call({there, buffer.count, buffer.dtype});
        return {std::move(work), buffer, std::move(staged)};
    }

    std::unique_ptr<Owned> owned_; ///< by split()
    joinable::NcclCommunicator& comm_;
    joinable::ThreadCommunicator& control_;
};
static_assert(joinable::Aborts<HostNccl> && joinable::AllocatesArena<HostNccl>);

} // namespace joinable_tests
