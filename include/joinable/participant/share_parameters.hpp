// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 {

/// The values of one rank's model, in memory that all ranks share; share_parameters() makes it. The
/// destructor releases the values that lie there, so the parameters must live until then. On a device, that of rank 0
/// must end last: a barrier between the ends of the others and its own orders them.
class SharedParameters {
public:
    /// For share_parameters(). Changes nothing yet.
    SharedParameters(ParameterList parameters, SharedBuffer<std::byte> memory)
        : memory_{std::move(memory)}, parameters_{std::move(parameters)} {
        std::size_t at = 0;
        for (AnyParameter const& parameter : parameters_) {
            AnyView const value = parameter.value();
            Shape const strides = detail::dense_strides(value.extents(), value.strides());
            places_.push_back(
                {memory_.data() + at, value.dtype(), value.extents(), strides, memory_.device()}
            );
            at += room_of(value);
        }
    }
    SharedParameters(SharedParameters&&) noexcept = default;
    SharedParameters& operator=(SharedParameters&&) = delete;
    ~SharedParameters() {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].numel() != 0 && is_in_place(i)) {
                parameters_[i].release_value();
            }
        }
    }

    /// The memory. With <joinable/shared_memory.hpp> its handle() lets other processes open the values; on a device,
    /// rank 0's handle<CudaSharedHandle>() does.
    [[nodiscard]] SharedBuffer<std::byte> const& buffer() const noexcept { return memory_; }

    /// For share_parameters(): the bytes that a value takes, in whole cache lines.
    [[nodiscard]] static std::size_t room_of(AnyView const& value) noexcept {
        return (value.numel() * size_of(value.dtype()) + 63) / 64 * 64;
    }
    /// For share_parameters(): copies this rank's values into the memory, and waits until they are there.
    void fill(Device& device) const {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].numel() != 0) {
                device.copy(parameters_[i].value(), places_[i]);
            }
        }
        device.finish();
        if (std::byte last{}; memory_.size() != 0) {
            device.download(memory_.end() - 1, &last, 1); // which waits for the copies
        }
    }
    /// For share_parameters(): makes the memory the values.
    /// @throws ContractViolation  set_value copies; and what set_value throws.
    void take() const {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].numel() == 0) {
                continue; // there is nothing to share
            }
            parameters_[i].set_value(places_[i]);
            if (!is_in_place(i)) {
                throw ContractViolation{detail::concat(
                    "share_parameters: set_value copies the value of ",
                    detail::describe_parameter(parameters_, i),
                    ", but must keep the view that it gets"
                )};
            }
        }
    }

private:
    [[nodiscard]] bool is_in_place(std::size_t i) const {
        AnyView const value = parameters_[i].value();
        return value && value.data() == places_[i].data();
    }

    SharedBuffer<std::byte> memory_;
    ParameterList parameters_;
    std::vector<AnyView> places_;
};

namespace detail {

/// share_parameters(): `Handle` names memory of a device for other processes; void: the communicator shares the host's.
template <class Handle, Communicator Comm, class Parameters>
[[nodiscard]] SharedParameters share_values(Comm& comm, Parameters&& parameters, Device& device) {
    constexpr bool is_by_handle = !std::is_void_v<Handle>;
    require_unguarded(identity_of(comm), "share_parameters()");
    ControlOver<Comm&> control{comm};
    ParameterList list;
    std::size_t bytes = 0;
    {
        ModelEntry entry{comm};
        AgreementList compared;
        std::exception_ptr const error = exception_of([&] {
            if (is_by_handle && comm.size() > 1 && entry.is_of_threads()) {
                throw ContractViolation{
                    "share_parameters: handles are for other processes, but these ranks are threads of one; "
                    "give their parameters views of one allocation"
                };
            }
            list = joinable::parameters(std::forward<Parameters>(parameters));
            for (std::size_t i = 0; i < list.size(); ++i) {
                AnyView const value = list[i].value();
                if (value && value.device() != device.id()) {
                    throw ContractViolation{concat(
                        "share_parameters: the value of ",
                        describe_parameter(list, i),
                        " is on ",
                        to_text(value.device()),
                        ", but the shared memory would be on ",
                        to_text(device.id()),
                        value.device() == DeviceId{}
                            ? "; values on the host take share_parameters(comm, model)"
                            : "; give the device of the values, as in "
                              "share_parameters<CudaSharedHandle>(comm, model, device)"
                    )};
                }
            }
            check_parameters(list, device.id());
            for (std::size_t i = 0; i < list.size(); ++i) {
                if (!list[i].can_set_value()) {
                    throw ContractViolation{concat(
                        "share_parameters: the value of ",
                        describe_parameter(list, i),
                        " cannot be moved: parameter_traits of its type needs 'static void set_value(P&, AnyView)' "
                        "and 'static void release_value(P&)'"
                    )};
                }
                bytes += SharedParameters::room_of(list[i].value());
            }
            compared.begin_section("models differ: ");
            compared.add("device", to_text(device.id()));
            static_cast<void>(agree_on_model(compared, list, device));
            entry.enter(list, false);
        });
        agree(control, compared, error);
    }
    bool const is_maker = comm.rank() == 0;
    std::optional<SharedParameters> shared;
    try {
        if constexpr (is_by_handle) {
            Handle handle{};
            agree(control, {}, exception_of([&] {
                      SharedBuffer<std::byte> memory;
                      if (is_maker && bytes != 0) {
                          memory = {
                              device.allocate(bytes, Arena::default_alignment), bytes, device.id()
                          };
                          handle = memory.template handle<Handle>();
                      }
                      if (is_maker) {
                          shared.emplace(std::move(list), std::move(memory)).fill(device);
                      }
                  }));
            control.broadcast(handle.words, 0);
            agree(control, {}, exception_of([&] {
                      if (!is_maker) {
                          SharedBuffer<std::byte> memory;
                          if (bytes != 0) {
                              Arena opened = handle.open(1, {}, device.id());
                              DeviceId const on = Handle::device_of(opened);
                              memory = {std::move(opened), bytes, on};
                          }
                          shared.emplace(std::move(list), std::move(memory));
                      }
                      shared->take();
                  }));
        } else {
            SharedBuffer<std::byte> memory = shared_buffer<std::byte>(comm, bytes);
            agree(control, {}, exception_of([&] {
                      shared.emplace(std::move(list), std::move(memory));
                      if (is_maker) {
                          shared->fill(device);
                      }
                  }));
            agree(control, {}, exception_of([&] { shared->take(); }));
        }
    } catch (...) {
        if constexpr (is_by_handle) { // the others close the memory before rank 0 frees it
            if (!is_maker) {
                shared.reset();
            }
            static_cast<void>(exception_of([&] { comm.barrier(); })); // unless a rank is lost
        }
        throw;
    }
    return std::move(*shared);
}

} // namespace detail

/// Moves the values of a model into memory that all ranks share, so that they train one model: each
/// rank's parameters are views of the same elements, which start as rank 0's. Collective; blocks; outside of
/// guards. `parameters` is a range that joinable::parameters() takes, or its result. Keep what it returns
/// while the values are used. Gradients stay each rank's own. The ranks must order their writes themselves,
/// as those to a SharedBuffer; steps without order are Hogwild's, as in examples/hogwild.cpp. Do not step averages on all
/// ranks: each step would be made once for each rank. Models over thread ranks refuse that; over process ranks nothing
/// notices it.
///
/// parameter_traits need `set_value`, which keeps the view that it gets, and `release_value`.
/// @throws ContractViolation  a value cannot be set, is copied, is missing or is not on the host, or thread ranks
///         share it already; the other ranks throw PeerFailed.
/// @throws Mismatch  ranks have different models.
/// @throws CommunicationError, std::bad_alloc  the memory cannot be allocated; on all ranks.
/// If set_value fails on a rank, or a rank is lost from then on, values that were moved are released: make the model
/// anew. After earlier errors the models are as before.
template <Communicator Comm, class Parameters>
[[nodiscard]] SharedParameters share_parameters(Comm& comm, Parameters&& parameters) {
    static_assert(
        SharesMemory<Comm>,
        "share_parameters: this communicator has no member 'Arena share(std::size_t bytes)'; use one that models "
        "SharesMemory: its ranks must be on one machine"
    );
    return detail::share_values<void>(
        comm, std::forward<Parameters>(parameters), detail::the_host()
    );
}

/// The same for values on a device, by `share_parameters<CudaSharedHandle>(comm, model, device)` with
/// <joinable/cuda.hpp>. Rank 0 allocates the memory there and copies its values to it, in the order of the device's
/// streams; the other ranks open it by a handle. The ranks are processes of one machine, over any communicator, and give
/// the device by the same number. What rank 0 gets must end last: see SharedParameters. A write is ordered when its
/// stream has been waited for before a barrier.
/// @throws ContractViolation  as above; also: a value is on another device, or several ranks are threads of one process.
/// @throws Mismatch  ranks have different models, or give different devices.
/// @throws TimedOut  a device's stream does not come so far by its deadline.
/// @throws CommunicationError  the device has too little memory, or cannot copy; a process cannot open the memory. The
///         other ranks throw PeerFailed.
/// If opening the memory or set_value fails on a rank, values that were moved are released, as above.
template <class Handle, Communicator Comm, class Parameters>
[[nodiscard]] SharedParameters
share_parameters(Comm& comm, Parameters&& parameters, Device& device) {
    return detail::share_values<Handle>(comm, std::forward<Parameters>(parameters), device);
}

}} // namespace joinable::v0
