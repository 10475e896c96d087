// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/post.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Collectives over words of the host, through the device of an NCCL rank. They have a stream of their
/// own: the copy to the device waits for nothing, NCCL runs the collective after that copy and after
/// its earlier collectives, and the copy back follows. The caller's stream neither delays them nor
/// waits for them. The host waits for events, up to the deadline. Several may be under way. Their
/// memory is kept for later ones. An error of CUDA ends all ranks.
class NcclHostWords {
    struct Slot {
        Arena host; ///< pinned
        Arena device;
        CudaEvent copied; ///< after the copy back
        bool is_taken = false;
    };
    struct GiveBack {
        void operator()(Slot* slot) const noexcept { slot->is_taken = false; }
    };
    using TakenSlot = std::unique_ptr<Slot, GiveBack>;

public:
    /// A collective over words of the host. wait() blocks the host until the result is in the host's
    /// buffer, which must stay in place until then.
    class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] Work {
    public:
        /// Ends at the deadline. @throws as NcclWork::synchronize() does.
        void wait() {
            if (!is_done_) {
                copy_back();
                inner_.synchronize();
                words_->wait_for(*slot_);
                take();
            }
        }
        /// True once the result is there. Does not block.
        /// @throws as NcclWork::test() does.
        [[nodiscard]] bool test() { return is_done_ || (inner_.test() && has_come()); }
        /// test() without a deadline. @see NcclWork::progress
        [[nodiscard]] bool progress() { return is_done_ || (inner_.progress() && has_come()); }

    private:
        friend NcclHostWords;
        Work(NcclHostWords& words, TakenSlot slot, Buffer to, NcclWork inner) noexcept
            : words_{&words}, slot_{std::move(slot)}, to_{to}, inner_{std::move(inner)} {}

        void copy_back() {
            if (!is_copied_back_) {
                inner_.wait(words_->stream_.get());
                words_->copy(slot_->device.data(), slot_->host.data(), to_.bytes(), *slot_);
                is_copied_back_ = true;
            }
        }
        /// @pre the collective is complete
        [[nodiscard]] bool has_come() {
            copy_back();
            if (words_->has_copied(*slot_)) {
                take();
            }
            return is_done_;
        }
        void take() noexcept {
            if (to_.count != 0) {
                std::memcpy(to_.data, slot_->host.data(), to_.bytes());
            }
            is_done_ = true;
        }

        NcclHostWords* words_;
        TakenSlot slot_; ///< given back after the collective has ended
        Buffer to_;
        NcclWork inner_;
        bool is_copied_back_ = false; ///< the copy is on the stream
        bool is_done_ = false;
    };

    /// Local; allocates nothing yet.
    NcclHostWords(NcclRank& rank, bool checks) noexcept : rank_{rank}, checks_{checks} {}
    NcclHostWords(NcclHostWords const&) = delete;
    NcclHostWords& operator=(NcclHostWords const&) = delete;
    /// Does not wait for the stream, which may wait for a rank that never comes. The memory goes back
    /// by the deadline, see give_back().
    ~NcclHostWords() = default;

    /// In place.
    Work all_reduce(Buffer buffer, ReduceOp op) {
        return start(buffer, [&](RequestsOf const& requests, Buffer staged) {
            return requests.all_reduce(staged, op);
        });
    }
    Work broadcast(Buffer buffer, int root) {
        return start(buffer, [&](RequestsOf const& requests, Buffer staged) {
            return requests.broadcast(staged, root);
        });
    }

    /// Copies from the device after the work on the caller's stream. `to` is from
    /// Device::allocate_staging(). Blocks the host, up to the deadline.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...
    void download(void const* from, void* to, std::size_t bytes) {
        rank_.require_no_error(); // waits below would replace it
        rank_.on_device([&] {
            prepare();
            check_cuda(cudaEventRecord(caller_has_run_.get(), rank_.caller()), "cudaEventRecord");
            check_cuda(
                cudaStreamWaitEvent(stream_.get(), caller_has_run_.get(), 0), "cudaStreamWaitEvent"
            );
        });
        TakenSlot const slot = take(0);
        copy(from, to, bytes, *slot);
        rank_.wait_until([&] { return has_copied(*slot); }, "waits for a copy to the host");
    }

private:
    template <class Ask>
    Work start(Buffer words, Ask const& ask) {
        check_memory(words);
        rank_.throw_if_aborted();
        rank_.require_no_error(); // queries below would replace it
        TakenSlot slot = take(words.bytes());
        Buffer const staged{slot->device.data(), words.count, words.dtype};
        Request const request = ask(RequestsOf{rank_.rank(), rank_.size()}, staged);
        if (words.count != 0) {
            std::memcpy(slot->host.data(), words.data, words.bytes());
            rank_.on_device([&] { device_->upload(slot->host.data(), staged.data, words.bytes()); }
            );
        }
        NcclWork inner{rank_, post_collective(rank_, request, checks_, stream_.get())};
        return {*this, std::move(slot), words, std::move(inner)};
    }

    /// Copies to the host on the stream, and records the slot's event after it.
    void copy(void const* from, void* to, std::size_t bytes, Slot& slot) {
        rank_.on_device([&] {
            if (bytes != 0) {
                check_cuda(
                    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_.get()),
                    "cudaMemcpyAsync"
                );
            }
            check_cuda(cudaEventRecord(slot.copied.get(), stream_.get()), "cudaEventRecord");
        });
    }
    [[nodiscard]] bool has_copied(Slot const& slot) {
        return rank_.on_device([&] {
            cudaError_t const found = cudaEventQuery(slot.copied.get());
            if (found != cudaErrorNotReady) {
                check_cuda(found, "cudaEventQuery");
            }
            return found == cudaSuccess;
        });
    }
    /// The collective is complete, so the copy needs no other rank.
    void wait_for(Slot const& slot) {
        rank_.wait_here([&] { return has_copied(slot); }, "waits for a copy to the host");
    }

    /// The smallest free slot of so many bytes, or a new one.
    [[nodiscard]] TakenSlot take(std::size_t bytes) {
        Slot* best = nullptr;
        for (auto const& slot : slots_) {
            if (!slot->is_taken && slot->host.bytes() >= bytes &&
                (best == nullptr || slot->host.bytes() < best->host.bytes()) && has_copied(*slot)) {
                best = slot.get();
            }
        }
        if (best == nullptr) {
            best = &rank_.on_device([&]() -> Slot& { return make(bytes); });
        }
        best->is_taken = true;
        return TakenSlot{best};
    }
    Slot& make(std::size_t bytes) {
        constexpr std::size_t least = 1024;
        std::size_t const room = std::bit_ceil((std::max)(bytes, least));
        prepare();
        device_->set_deadline(rank_.deadline());
        auto slot = std::make_unique<Slot>();
        slot->host = device_->allocate_staging(room);
        slot->device = device_->allocate(room, Arena::default_alignment);
        check_cuda(make_event(slot->copied), "cudaEventCreate");
        slots_.push_back(std::move(slot));
        return *slots_.back();
    }
    /// Makes the stream when it is first needed. Within on_device().
    void prepare() {
        if (stream_ == nullptr) {
            check_cuda(make_event(caller_has_run_), "cudaEventCreate");
            check_cuda(make_stream(stream_), "cudaStreamCreateWithFlags");
            device_.emplace(rank_.device(), stream_.get(), stream_.get());
        }
    }

    NcclRank& rank_;
    bool checks_;
    CudaStream stream_;
    CudaEvent caller_has_run_;
    std::optional<CudaDevice> device_; ///< works on the stream
    std::vector<std::unique_ptr<Slot>> slots_;
};

}}} // namespace joinable::v0::detail
