// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/handle.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/detail/setup.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/device/cuda/runtime.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// Ranks are GPUs, one each, that NCCL connects. A host communicator of the same ranks lets them
/// meet, and ends all of them when one fails. See NcclCollectives.
///
/// @code
/// joinable::NcclCommunicator comm{hosts, {.stream = compute}};
/// auto work = comm.all_reduce({gradients, count, joinable::DType::f32}, joinable::ReduceOp::sum);
/// work.wait();           // later work on `compute` runs after the sum
/// comm.synchronize();    // instead of cudaStreamSynchronize(compute): ends if a rank never comes
/// @endcode
class NcclCommunicator : public NcclCollectives {
public:
    static constexpr std::string_view transport = "nccl";
    /// See ProcessCommunicator::is_launched.
    [[nodiscard]] static bool is_launched() { return ProcessCommunicator::is_launched(); }

    /// Collective; blocks. `control` is a host communicator of the same ranks that models Aborts.
    /// The constructor, barrier(), split() and `check` use it. Aborting one communicator aborts
    /// both. It must outlive this object. The rank's device is the current one unless the options
    /// name one.
    /// @throws CommunicationError  no usable GPU, or NCCL refuses; the others then throw PeerFailed
    ///                             with the text.
    /// @throws TimedOut  ranks did not come.
    /// @throws Mismatch  ranks differ in `check`, or in JOINABLE_CHECK=collectives; an unknown word there is a
    ///                   ContractViolation, and PeerFailed on the others.
    /// @throws ContractViolation  an option needs a later NCCL, or NCCL_COMM_BLOCKING makes all
    ///                            communicators blocking.
    template <Communicator Control>
    explicit NcclCommunicator(Control& control, NcclOptions const& options = {})
        : NcclCommunicator{detail::nccl_control<Control&>(control), options, false} {}

    /// The same for ranks that mpirun, mpiexec, torchrun or srun started on one machine. It owns a
    /// ProcessCommunicator. If the options name no device, a rank takes the device whose index is
    /// its local rank modulo the number of devices, and makes it the current one.
    /// @throws ContractViolation  also if launch_environment() fails, or there are several
    ///                            machines.
    [[nodiscard]] static NcclCommunicator from_environment(NcclOptions const& options = {}) {
        return from_environment(
            [&] { return ProcessCommunicator::from_environment(options.deadline); }, options
        );
    }
    /// The same with the host communicator that `make_control()` returns, for ranks on any
    /// machines. If it returns a reference, as when a guard uses the communicator too, that must
    /// outlive this object.
    template <class MakeControl>
        requires std::is_invocable_v<MakeControl const&>
    [[nodiscard]] static NcclCommunicator
    from_environment(MakeControl const& make_control, NcclOptions const& options = {}) {
        using Control = std::invoke_result_t<MakeControl const&>;
        return NcclCommunicator{detail::nccl_control<Control>(make_control), options, true};
    }

    /// Collective. Waits until all ranks have finished their outstanding work; aborts at the
    /// deadline, or at once during unwinding. NCCL's handle is freed in any case.
    ~NcclCommunicator() { close(true); }

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group inherits deadline, stream and options. Aborting this
    /// communicator aborts the group, but not the reverse, if the control communicator works that
    /// way.
    /// @throws ContractViolation  the control communicator does not model Splits, or its transport cannot.
    [[nodiscard]] NcclCommunicator split(int color, int key) {
        detail::check_color(color);
        if (!can_split()) {
            throw ContractViolation{
                "an NCCL communicator splits with its control communicator, but that has no 'split(int color, "
                "int key)', or its transport has none; use one that models Splits"
            };
        }
        rank_.begin_call();
        detail::CurrentCudaDevice const current{rank_.device(), std::nothrow};
        std::unique_ptr<detail::NcclControl> control;
        rank_.over_control([&](detail::NcclControl& whole) { control = whole.split(color, key); });
        ncclConfig_t config = config_of(options_);
        auto const group = std::make_shared<detail::NcclSplit>(rank_.deadline());
        rank_.finish_into(group, "ncclCommSplit", "splits the communicator", [&] {
            return ncclCommSplit(rank_.handle(), color, key, &group->made, &config);
        });
        rank_.forget(group.get());
        NcclOptions options = options_;
        options.device = rank_.device();
        options.stream = rank_.caller();
        options.deadline = rank_.deadline();
        options.check = compares_collectives();
        return NcclCommunicator{std::move(control), options, std::exchange(group->made, nullptr)};
    }

    /// Local, the same on all ranks. Whether the control communicator can.
    [[nodiscard]] bool can_split() const { return rank_.control().can_split(); }

private:
    NcclCommunicator(
        std::unique_ptr<detail::NcclControl> control, NcclOptions const& options, bool picks_device
    )
        : NcclCollectives{std::move(control), options}, options_{options} {
        if (picks_device && !options_.device) {
            pick_device();
        }
        ncclUniqueId id{};
        detail::prepare_together(rank_, [&] {
            detail::prepare_device(rank_, options_, {});
            if (rank() == 0) {
                detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
            }
        });
        rank_.over_control([&](detail::NcclControl& of_all) {
            auto words = std::bit_cast<std::array<std::uint64_t, sizeof id / 8>>(id);
            of_all.broadcast(words, 0);
            id = std::bit_cast<ncclUniqueId>(words);
        });
        ncclComm_t made = nullptr;
        ncclConfig_t config = config_of(options_);
        ncclResult_t const result = ncclCommInitRankConfig(&made, size(), id, rank(), &config);
        take(made, [&] {
            rank_.check(result, "ncclCommInitRankConfig");
            rank_.finish_call("joins the communicator");
        });
        try {
            detail::prepare_together(rank_, [&] {
                detail::require_non_blocking(
                    rank_,
                    "the environment or nccl.conf sets NCCL_COMM_BLOCKING, which overrides the options of "
                    "this library; unset it"
                );
            });
        } catch (...) {
            rank_.close(false, true);
            throw;
        }
    }
    /// For split(): the communicator of a group.
    NcclCommunicator(
        std::unique_ptr<detail::NcclControl> control, NcclOptions const& options, ncclComm_t made
    )
        : NcclCollectives{std::move(control), options, true}, options_{options} {
        take(made, [&] {
            detail::prepare_together(rank_, [&] { detail::prepare_device(rank_, options_, {}); });
        });
    }

    /// Owns the handle from here on, even if `finish()` throws.
    template <class Finish>
    void take(ncclComm_t made, Finish const& finish) {
        rank_.adopt(made);
        try {
            finish();
            detail::share_arrivals(rank_);
        } catch (...) {
            rank_.close(true, true);
            throw;
        }
    }

    void pick_device() {
        int const place = detail::local_rank(rank_);
        detail::prepare_together(rank_, [&] {
            int devices = 0;
            detail::check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
            options_.device = place % devices;
        });
    }
    [[nodiscard]] static ncclConfig_t config_of(NcclOptions const& options) noexcept {
        ncclConfig_t config = options.config;
        config.blocking = 0; // else a rank that never comes would block the others for ever
        return config;
    }

    NcclOptions options_;
};

}} // namespace joinable::v0
