// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/several.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

/// The ranks of one model that lies on several devices of each rank: a communicator for each device. Each bucket of
/// gradients, and each piece of values and buffers, is on one device. It travels by the communicator of that device, in
/// the order of that device's stream.
///
/// @code
/// joinable::PerDevice comm{lower, upper};                          // NcclCommunicators of two GPUs
/// joinable::DistributedDataParallel ddp{comm, model.parameters()}; // some on either GPU
/// joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
/// @endcode
///
/// Every rank gives as many communicators, in the same order, else ranks wait for each other until the deadline
/// (TimedOut). A parameter on the device of another communicator than on other ranks is a Mismatch when the model is made.
/// The devices' numbers may differ. A collective runs over the communicator of the device whose memory the buffer is, which
/// CUDA is asked for: of managed memory, that where it was allocated. Memory elsewhere, such as pinned memory of the
/// host, is refused. Words of the host travel
/// by the first one. abort() aborts all of them.
///
/// It averages by AllReduce, or a reduction that allocates no memory and runs no kernels. A sharded optimizer or model,
/// and a CapturedStep, take a communicator of one device. A guard knows this object alone: in one, use none of the
/// communicators by itself, which nothing refuses. Refers to the communicators, which must outlive it. Neither
/// copyable nor movable.
template <Communicator Comm>
class PerDevice {
    static_assert(
        !detail::reduces_host_memory<Comm>,
        "PerDevice: expected communicators of CUDA devices, one for each; memory of the host needs only one"
    );

public:
    using device_type = SeveralDevices;
    static constexpr bool rounds_factors = detail::rounds_factors<Comm>();

    /// Local.
    /// @throws ContractViolation  two communicators are of one device, or differ in rank or size.
    template <std::same_as<Comm>... Further>
    explicit PerDevice(Comm& first, Further&... further)
        : PerDevice{std::vector<Comm*>{&first, &further...}} {}
    /// The same for a number of devices that is known at run time. None may be null.
    explicit PerDevice(std::vector<Comm*> communicators)
        : communicators_{std::move(communicators)}, devices_{devices_of(communicators_)} {
        for (Comm const* const other : communicators_) {
            if (other->rank() != rank() || other->size() != size()) {
                throw ContractViolation{detail::concat(
                    "PerDevice: this is rank ",
                    rank(),
                    " of ",
                    size(),
                    " in the first communicator, but rank ",
                    other->rank(),
                    " of ",
                    other->size(),
                    " in another one; give communicators of the same ranks in the same order"
                )};
            }
        }
    }
    PerDevice(PerDevice const&) = delete;
    PerDevice& operator=(PerDevice const&) = delete;

    [[nodiscard]] int rank() const { return communicators_.front()->rank(); }
    [[nodiscard]] int size() const { return communicators_.front()->size(); }
    /// The communicator of a device.
    /// @throws ContractViolation  none is of this device.
    [[nodiscard]] Comm& at(DeviceId device) {
        std::size_t const position = devices_.position(device);
        if (devices_.at(position).id() != device) {
            throw ContractViolation{detail::concat(
                "PerDevice: there is no communicator of ",
                detail::to_text(device),
                ", but one of ",
                detail::to_text(devices_.id())
            )};
        }
        return *communicators_[position];
    }
    [[nodiscard]] SeveralDevices& device_memory() noexcept { return devices_; }

    auto all_reduce(Buffer buffer, ReduceOp op) { return of(buffer).all_reduce(buffer, op); }
    auto all_reduce(Buffer buffer, ReduceOp op, double factor)
        requires ScalesSums<Comm>
    {
        return of(buffer).all_reduce(buffer, op, factor);
    }
    auto broadcast(Buffer buffer, int root) { return of(buffer).broadcast(buffer, root); }
    void barrier() {
        for (Comm* const comm : communicators_) {
            comm->barrier();
        }
    }

    /// Local. Memory for buffers that the communicator of this position moves: see make_arena().
    [[nodiscard]] Arena allocate_at(std::size_t position, std::size_t bytes) {
        return make_arena(*communicators_[position], bytes);
    }
    /// Such memory without a device, as make_arena() asks for it.
    /// @throws ContractViolation  always.
    [[nodiscard]] Arena allocate(std::size_t, std::size_t = Arena::default_alignment) {
        throw ContractViolation{
            "PerDevice: memory was asked for that has no device, as reductions with memory of their own do; average by "
            "AllReduce, or make a model for each device"
        };
    }
    /// Collective. `arena` is from allocate_at().
    bool register_arena(Arena const& arena)
        requires RegistersArenas<Comm>
    {
        return of({arena.data(), arena.bytes(), DType::u8}).register_arena(arena);
    }

    /// Local.
    void abort(AbortReason const& reason)
        requires Aborts<Comm>
    {
        for (Comm* const comm : communicators_) {
            comm->abort(reason);
        }
    }
    /// Whether one of them is.
    [[nodiscard]] bool is_aborted() const
        requires Aborts<Comm>
    {
        return std::any_of(communicators_.begin(), communicators_.end(), [](Comm* comm) {
            return static_cast<bool>(comm->is_aborted());
        });
    }
    /// That of the first one that has a reason.
    [[nodiscard]] std::optional<AbortReason> abort_reason() const
        requires TellsReason<Comm>
    {
        for (Comm* const comm : communicators_) {
            if (auto reason = comm->abort_reason()) {
                return reason;
            }
        }
        return {};
    }
    /// Local; for waits that start later. Returns the longest of the deadlines that were in force: a guard with a timeout
    /// gives it to all of them when it ends, so that no wait is shorter than before.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline)
        requires HasDeadline<Comm>
    {
        std::chrono::nanoseconds before{};
        for (Comm* const comm : communicators_) {
            before = (std::max)(before, comm->set_deadline(deadline));
        }
        return before;
    }
    void keep_alive()
        requires RenewsDeadline<Comm>
    {
        for (Comm* const comm : communicators_) {
            comm->keep_alive();
        }
    }
    /// The same for callers that can do without, as guards: whether all of them have.
    bool renew_deadline()
        requires requires(Comm& comm) { bool{comm.renew_deadline()}; }
    {
        bool have_all = true;
        for (Comm* const comm : communicators_) {
            have_all = comm->renew_deadline() && have_all;
        }
        return have_all;
    }
    /// Those of the first one for which some are.
    [[nodiscard]] std::vector<int> missing_ranks() const
        requires ReportsMissing<Comm>
    {
        for (Comm* const comm : communicators_) {
            if (std::vector<int> missing = comm->missing_ranks(); !missing.empty()) {
                return missing;
            }
        }
        return {};
    }
    [[nodiscard]] bool is_renumbered() const {
        return detail::is_renumbered_group(*communicators_.front());
    }
    /// The first one's: agreements use it.
    [[nodiscard]] auto& host_words()
        requires requires(Comm& comm) { comm.host_words(); }
    {
        return communicators_.front()->host_words();
    }

private:
    [[nodiscard]] static std::vector<Device*> devices_of(std::vector<Comm*> const& communicators) {
        std::vector<Device*> devices;
        for (Comm* const comm : communicators) {
            devices.push_back(&detail::device_of(*comm));
        }
        return devices;
    }
    [[nodiscard]] Comm& of(Buffer const& buffer) {
        bool const has_memory = buffer.data != nullptr && buffer.count != 0;
        return has_memory ? at(devices_.id_of(buffer.data)) : *communicators_.front();
    }

    std::vector<Comm*> communicators_;
    SeveralDevices devices_;
};

template <class Comm, class... Further>
PerDevice(Comm&, Further&...) -> PerDevice<Comm>;

}} // namespace joinable::v0
