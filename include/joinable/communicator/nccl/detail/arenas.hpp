// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/home_process.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/detail/registration.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The arenas of one rank in memory from NCCL's allocator, and their registration. Arenas may
/// outlive this object and the handle. They are deregistered while the handle lives, or end with
/// it.
class NcclArenas {
public:
    explicit NcclArenas(NcclRank& rank) noexcept : rank_{rank} {}
    NcclArenas(NcclArenas const&) = delete;
    NcclArenas& operator=(NcclArenas const&) = delete;
    ~NcclArenas() {
        for (Segment* const segment : segments_) {
            segment->owner = nullptr;
        }
    }

    /// Local. Zeroed; an empty arena if NCCL has no memory.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) {
        check_alignment(alignment);
        constexpr std::size_t given = 256; // like cudaMalloc, which NCCL may call
        std::size_t const aligned = (std::max)(alignment, window_alignment);
        auto const segment = std::make_shared<Segment>(rank_.device(), rank_.deadline());
        std::size_t space = bytes + aligned - given;
        void* block = nullptr;
        if (space < bytes ||
            is_error(rank_.on_device([&] { return nccl_allocate(&block, space); }))) {
            return {};
        }
        segment->data = segment->block = block;
        std::align(aligned, bytes, segment->data, space);
        segments_.push_back(segment.get());
        segment->owner = this;
        segment->of_arena = segment;
        auto* const data = static_cast<std::byte*>(segment->data);
        Arena arena{data, bytes, &release, segment.get()};
        CudaStream own; // the caller's may wait for a collective of other ranks, or capture a graph
        rank_.on_device([&] {
            check_cuda(make_stream(own), "cudaStreamCreateWithFlags");
            check_cuda(cudaMemsetAsync(data, 0, bytes, own.get()), "cudaMemsetAsync");
        });
        rank_.wait_for(own.get());
        return arena;
    }

    /// See NcclCollectives::register_arena.
    [[nodiscard]] bool register_arena(Arena const& arena) {
        rank_.begin_call();
        Segment* const segment = find(arena);
        if (segment != nullptr && segment->registration != nullptr) {
            return true;
        }
        check_same_size(gather(arena.bytes()), rank_.is_renumbered(), "register arenas");
        if (!all_ranks_have(nccl_can_register<ncclComm_t> && segment != nullptr)) {
            return false;
        }
        auto const start = [&] {
            return nccl_register(
                rank_.handle(), arena.data(), arena.bytes(), &segment->registration
            );
        };
        rank_.finish_into(
            segment->of_arena, "the registration of an arena", "registers an arena", start
        );
        if (!all_ranks_have(segment->registration != nullptr)) {
            deregister(*segment);
            return false;
        }
        return true;
    }

    /// Call this before the handle ends or returns to its owner. Waits for outstanding work up to
    /// the deadline, and has graphs release NCCL's kernels, because these may use registered
    /// memory.
    void deregister_all() noexcept {
        auto const is_registered = [](Segment* segment) {
            return segment->registration != nullptr;
        };
        bool const is_alive = rank_.handle() != nullptr; // else NCCL may still write registrations
        if (is_alive && std::any_of(segments_.begin(), segments_.end(), is_registered) &&
            finish()) {
            rank_.release_kernels();
            for (Segment* const segment : segments_) {
                deregister(*segment);
            }
        }
    }

private:
    /// The memory of an arena. The arena owns it, and while NCCL uses it the handle, too.
    struct Segment {
        Segment(int device_of_rank, std::chrono::nanoseconds time) noexcept
            : device{device_of_rank}, deadline{time} {}
        Segment(Segment const&) = delete;
        Segment& operator=(Segment const&) = delete;
        /// Unlike cudaFree, freeing mapped memory does not wait for work that uses it. The wait here ends
        /// at the deadline: see give_back(). In a forked process the memory is the rank's.
        ~Segment() {
            if (block != nullptr && home.is_here()) {
                joinable::detail::give_back(device, deadline, [block = block] {
                    wait_for_cuda_device();
                    nccl_free(block);
                });
            }
        }

        int device;
        std::chrono::nanoseconds deadline;
        std::shared_ptr<Segment> of_arena; ///< null: the arena has gone
        NcclArenas* owner = nullptr;       ///< null: it was destroyed
        void* block = nullptr;             ///< from NCCL's allocator
        void* data = nullptr;
        void* registration = nullptr; ///< null: none. NCCL may write it until the handle has ended.
        Unwinding unwinding;
        HomeProcess home;
    };

    [[nodiscard]] Segment* find(Arena const& arena) const noexcept {
        auto const found = std::find_if(segments_.begin(), segments_.end(), [&](Segment* segment) {
            return segment->data == arena.data();
        });
        return found == segments_.end() ? nullptr : *found;
    }

    /// The values of all ranks, by rank. Collective over the control communicator.
    [[nodiscard]] std::vector<std::uint64_t> gather(std::uint64_t mine) {
        std::vector<std::uint64_t> all;
        rank_.over_control([&](NcclControl& control) { all = control.gather({&mine, 1}); });
        return all;
    }
    [[nodiscard]] bool all_ranks_have(bool mine) {
        auto const all = gather(mine ? 1 : 0);
        return std::count(all.begin(), all.end(), 1U) == rank_.size();
    }

    /// Whether all work is complete and the handle lives.
    [[nodiscard]] bool finish() noexcept {
        try {
            rank_.throw_if_aborted();
            rank_.finish_launches();
            return rank_.handle() != nullptr;
        } catch (...) { // all ranks and their work have ended
            return false;
        }
    }
    void deregister(Segment& segment) noexcept {
        if (segment.registration != nullptr) {
            CurrentCudaDevice const current{rank_.device(), std::nothrow};
            nccl_deregister(rank_.handle(), segment.registration);
            segment.registration = nullptr;
        }
        rank_.forget(&segment);
    }

    void take_back(Segment& segment) noexcept {
        if (rank_.is_here() && rank_.handle() != nullptr) {
            if (segment.unwinding.has_begun() && !rank_.is_idle()) {
                abort_for_exception(rank_, "the scope of an arena"); // no later wait may come
            }
            if (finish()) {
                deregister(segment);
            }
        }
        std::erase(segments_, &segment);
    }
    static void release(void* context, std::byte*, std::size_t) noexcept {
        std::shared_ptr<Segment> const segment =
            std::move(static_cast<Segment*>(context)->of_arena);
        if (segment->owner != nullptr) {
            segment->owner->take_back(*segment);
        }
    }

    NcclRank& rank_;
    std::vector<Segment*> segments_; ///< of living arenas
};

}}} // namespace joinable::v0::detail
