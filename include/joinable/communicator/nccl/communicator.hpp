// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/detail/setup.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// Ranks are GPUs, one each, that NCCL connects; beside it is a host communicator of the same ranks, by
/// which they meet and by which all of them end when one does. See NcclCollectives.
///
/// @code
/// joinable::NcclCommunicator comm{hosts, {.stream = compute}};
/// auto work = comm.all_reduce({gradients, count, joinable::DType::f32}, joinable::ReduceOp::sum);
/// work.wait();           // what `compute` does from here on comes after the sum
/// comm.synchronize();    // instead of cudaStreamSynchronize(compute): ends if a rank never comes
/// @endcode
class NcclCommunicator : public NcclCollectives {
public:
    /// Collective, blocks. `control` is a host communicator of the same ranks that models Aborts. It is
    /// used in here, by barrier(), by split() and by `check`; an abort of one is an abort of both. It
    /// must outlive this object. The current device is the rank's, unless the options name one.
    /// @throws CommunicationError  no usable GPU, or NCCL refuses; then PeerFailed on the others, with
    ///         the text. @throws TimedOut  ranks did not come. @throws ContractViolation  an option
    ///         needs a later NCCL, or NCCL_COMM_BLOCKING makes all communicators blocking.
    template <Communicator Control>
    explicit NcclCommunicator(Control& control, NcclOptions const& options = {})
        : NcclCommunicator{
              std::make_unique<detail::NcclControlOver<Control&>>(control), options, false
          } {
        [[maybe_unused]] constexpr bool is_control = detail::models_nccl_control<Control>();
    }

    /// The same for ranks that mpirun, mpiexec, torchrun or srun started on one machine, with a
    /// ProcessCommunicator of its own. Without a device in the options a rank takes that of its place
    /// on its machine, modulo their number, and makes it the current one.
    /// @throws ContractViolation  also if launch_environment() fails, or there are several machines.
    [[nodiscard]] static NcclCommunicator from_environment(NcclOptions const& options = {}) {
        return from_environment(
            [&] { return ProcessCommunicator::from_environment(options.deadline); }, options
        );
    }
    /// The same with the host communicator that `make_control()` returns, of ranks wherever they are. If
    /// that is a reference, as for a guard that has the communicator, too, it must outlive this object.
    template <class MakeControl>
        requires std::is_invocable_v<MakeControl const&>
    [[nodiscard]] static NcclCommunicator
    from_environment(MakeControl const& make_control, NcclOptions const& options = {}) {
        using Control = std::invoke_result_t<MakeControl const&>;
        [[maybe_unused]] constexpr bool is_control =
            detail::models_nccl_control<std::remove_reference_t<Control>>();
        return NcclCommunicator{
            std::make_unique<detail::NcclControlOver<Control>>(make_control), options, true
        };
    }

    /// Collective: waits until all ranks have done what is under way, up to the deadline, after which it
    /// aborts. While unwinding it aborts at once. NCCL's handle is freed in any case.
    ~NcclCommunicator() {
        close(true);
        if (split_ != nullptr) {
            static_cast<void>(ncclCommAbort(split_));
        }
    }

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their `key`,
    /// then of their rank here. It inherits deadline, stream and options. An abort of this communicator
    /// reaches it, not the other way round, if that is so for the control communicator.
    /// @throws ContractViolation  the control communicator does not model Splits.
    [[nodiscard]] NcclCommunicator split(int color, int key) {
        if (color < 0) {
            throw ContractViolation{
                detail::concat("split needs a color of at least 0, but was given ", color)
            };
        }
        if (!rank_.control().can_split()) {
            throw ContractViolation{
                "an NCCL communicator splits with its control communicator, but that has no member "
                "'split(int color, int key)'; use one that models Splits"
            };
        }
        rank_.begin_call();
        std::unique_ptr<detail::NcclControl> control;
        rank_.over_control([&](detail::NcclControl& whole) { control = whole.split(color, key); });
        ncclConfig_t config = config_of(options_);
        rank_.check(ncclCommSplit(rank_.handle(), color, key, &split_, &config), "ncclCommSplit");
        rank_.finish_call("splits the communicator");
        NcclOptions options = options_;
        options.device = rank_.device();
        options.stream = rank_.caller();
        options.deadline = rank_.deadline();
        return NcclCommunicator{std::move(control), options, std::exchange(split_, nullptr)};
    }

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
                make_id(id);
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
                    "NCCL_COMM_BLOCKING, which the environment or nccl.conf sets, wins over what "
                    "this library asks for; leave it out"
                );
            });
        } catch (...) {
            rank_.close(false, true);
            throw;
        }
    }
    /// The communicator of a group that split() made.
    NcclCommunicator(
        std::unique_ptr<detail::NcclControl> control, NcclOptions const& options, ncclComm_t made
    )
        : NcclCollectives{std::move(control), options}, options_{options} {
        take(made, [&] {
            detail::prepare_together(rank_, [&] { detail::prepare_device(rank_, options_, {}); });
        });
    }

    /// Owns the handle from here on, also if `finish()` throws.
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
    static void make_id(ncclUniqueId& id) {
        if (ncclResult_t const result = ncclGetUniqueId(&id); detail::is_error(result)) {
            throw CommunicationError{
                detail::concat("ncclGetUniqueId failed: ", detail::nccl_text(result, nullptr))
            };
        }
    }
    [[nodiscard]] static ncclConfig_t config_of(NcclOptions const& options) noexcept {
        ncclConfig_t config = options.config;
        config.blocking = 0; // or a rank that never comes would block the others for ever
        return config;
    }

    NcclOptions options_;
    /// What NCCL makes of a split that is under way: also if this communicator is aborted meanwhile.
    ncclComm_t split_ = nullptr;
};

}} // namespace joinable::v0
