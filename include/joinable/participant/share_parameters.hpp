// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/control.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/copy.hpp>
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
/// destructor releases the values that lie there, so the parameters must live until then.
class SharedParameters {
public:
    /// For share_parameters(). Changes nothing yet.
    SharedParameters(ParameterList parameters, SharedBuffer<std::byte> memory)
        : memory_{std::move(memory)}, parameters_{std::move(parameters)} {
        std::size_t at = 0;
        for (AnyParameter const& parameter : parameters_) {
            AnyView const value = parameter.value();
            Shape const strides = detail::dense_strides(value.extents(), value.strides());
            places_.push_back({memory_.data() + at, value.dtype(), value.extents(), strides});
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

    /// The memory. With <joinable/shared_memory.hpp> its handle() lets other processes open the values.
    [[nodiscard]] SharedBuffer<std::byte> const& buffer() const noexcept { return memory_; }

    /// For share_parameters(): the bytes that a value takes, in whole cache lines.
    [[nodiscard]] static std::size_t room_of(AnyView const& value) noexcept {
        return (value.numel() * size_of(value.dtype()) + 63) / 64 * 64;
    }
    /// For share_parameters(): copies this rank's values into the memory.
    void fill() const {
        for (std::size_t i = 0; i < places_.size(); ++i) {
            copy(parameters_[i].value(), places_[i]);
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
    detail::require_unguarded(detail::identity_of(comm), "share_parameters()");
    detail::ControlOver<Comm&> control{comm};
    ParameterList list;
    std::size_t bytes = 0;
    {
        detail::ModelEntry entry{comm};
        AgreementList compared;
        std::exception_ptr const error = detail::exception_of([&] {
            list = joinable::parameters(std::forward<Parameters>(parameters));
            detail::check_parameters(list, DeviceId{});
            for (std::size_t i = 0; i < list.size(); ++i) {
                if (!list[i].can_set_value()) {
                    throw ContractViolation{detail::concat(
                        "share_parameters: the value of ",
                        detail::describe_parameter(list, i),
                        " cannot be moved: parameter_traits of its type needs 'static void set_value(P&, AnyView)' "
                        "and 'static void release_value(P&)'"
                    )};
                }
                bytes += SharedParameters::room_of(list[i].value());
            }
            static_cast<void>(detail::agree_on_model(compared, list, detail::the_host()));
            entry.enter(list, false);
        });
        detail::agree(control, compared, error);
    }
    SharedParameters shared{std::move(list), shared_buffer<std::byte>(comm, bytes)};
    if (comm.rank() == 0) {
        shared.fill();
    }
    comm.barrier();
    detail::agree(control, {}, detail::exception_of([&] { shared.take(); }));
    return shared;
}

}} // namespace joinable::v0
