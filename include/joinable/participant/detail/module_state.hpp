// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/participant/saved_model.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// All of a model except its gradients, kept equal on all ranks. Parameters, buffers and attached
/// state are sent from one rank at the start and the end, buffers in every round that syncs.
template <Communicator Comm>
class ModuleState {
public:
    using BufferHook =
        std::function<void(Comm&, std::vector<AnyView> const& buffers, Round const&)>;

    /// Local. @throws ContractViolation  a buffer is missing, on another device, or cannot be written.
    ModuleState(
        Comm& comm, ParameterList parameters, BufferList buffers, DataParallelOptions const& options
    )
        : comm_{comm}, parameters_{std::move(parameters)},
          has_buffers_{!(buffers.begin() == buffers.end())},
          buffers_{std::move(buffers), piece_bytes, "buffer", BufferMemory{comm}},
          options_{options} {}

    /// The script of a round that syncs, on active and shadowing ranks. Collective; only a hook may
    /// allocate.
    void sync_buffers(Round const& round) {
        if (!options_.broadcast_buffers) {
            return;
        }
        if (hook_) {
            hook_(comm_, buffers_.current_views(), round);
        } else {
            buffers_.run(comm_, round.buffer_source());
        }
    }

    /// Local. Allocates everything that sync() needs, so that a rank without enough memory can
    /// report it before the others wait. `is_equal`, if given, tells what ranks have
    /// already: attached state, the values of parameters for which `is_equal(i)`, and buffers if
    /// `is_equal(number of parameters)`.
    [[nodiscard]] CoalescedBroadcast
    plan_sync(std::function<bool(std::size_t)> const& is_equal = {}) {
        std::vector<AnyView> views;
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (!is_equal || !is_equal(i)) {
                views.push_back(parameters_[i].value());
            }
        }
        if (options_.broadcast_buffers && (!is_equal || !is_equal(parameters_.size()))) {
            auto const& buffers = buffers_.current_views();
            views.insert(views.end(), buffers.begin(), buffers.end());
        }
        if (!is_equal) {
            auto const& state = attached_.views();
            views.insert(views.end(), state.begin(), state.end());
        }
        TensorList list = tensor_list(std::move(views));
        return CoalescedBroadcast{std::move(list), piece_bytes, "tensor", BufferMemory{comm_}};
    }

    /// Local. Valid until the next call of a member.
    [[nodiscard]] SavedModel saved() {
        return {parameters_, buffers_.current_views(), attached_.views(), {}, {}, {}};
    }

    [[nodiscard]] DataParallelOptions const& options() const noexcept { return options_; }
    /// For guards: the options, and whether a hook takes the place of a broadcast.
    void agree_on(AgreementList& list) const {
        detail::agree_on(list, options_);
        if (hook_) {
            list.add("set_buffer_hook()", "called");
        }
    }
    [[nodiscard]] BufferList buffers() const { return BufferList{buffers_.tensors()}; }
    /// Takes what was attached to a model before, and its hook. Local; for ranks to compare.
    void take_over(ModuleState const& former, AgreementList& compared) {
        detail::agree_on(compared, former.attached_.tensors(), "state tensor", device_of(comm_));
        attached_ = {former.attached_.tensors(), "state tensor", device_of(comm_).id()};
        hook_ = former.hook_;
    }
    /// Whether buffers are sent before the forward pass; if not, before the backward pass.
    [[nodiscard]] bool syncs_before_forward() const noexcept {
        return options_.broadcast_buffers && options_.buffer_sync == BufferSync::before_forward;
    }
    /// Whether they are sent after it, so that ranks wait for each other there.
    [[nodiscard]] bool syncs_after_forward() const noexcept {
        return options_.broadcast_buffers && options_.buffer_sync == BufferSync::after_forward &&
               (hook_ != nullptr || has_buffers_);
    }

    /// Local. @throws ContractViolation  no broadcast would be replaced.
    void set_buffer_hook(BufferHook hook) {
        if (!options_.broadcast_buffers) {
            throw ContractViolation{
                "a buffer hook takes the place of the broadcast of buffers, which is off; turn broadcast_buffers on"
            };
        }
        hook_ = std::move(hook);
    }

    /// Collective. See DistributedDataParallel::attach_state.
    template <class... Ranges>
    void attach(Ranges&&... ranges) {
        std::optional<FixedTensors> all;
        std::optional<CoalescedBroadcast> broadcast;
        AgreementList compared;
        compared.begin_section("models differ: ");
        std::exception_ptr const error = exception_of([&] {
            TensorList const list = tensor_list(std::forward<Ranges>(ranges)...);
            detail::agree_on(compared, list, "state tensor", device_of(comm_));
            all.emplace(attached_).append({list, "state tensor", device_of(comm_).id()});
            broadcast.emplace(list, piece_bytes, "state tensor", BufferMemory{comm_});
        });
        ControlOver<Comm&> control{comm_};
        agree(control, compared, error);
        broadcast->run(comm_, 0);
        attached_ = std::move(*all);
    }

private:
    static constexpr std::size_t piece_bytes = std::size_t{250} << 20U;

    Comm& comm_;
    ParameterList parameters_;
    bool has_buffers_;
    CoalescedBroadcast buffers_;
    FixedTensors attached_{{}, "state tensor"};
    DataParallelOptions options_;
    BufferHook hook_;
};

}}} // namespace joinable::v0::detail
