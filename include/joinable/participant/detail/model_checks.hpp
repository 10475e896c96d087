// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/device/elements_on_host.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor_list.hpp>

/// @file
/// The properties of a model that ranks compare: see agreement/agree.hpp.

namespace joinable { inline namespace v0 { namespace detail {

void agree_on(AgreementList& list, DataParallelOptions const& options);
/// Lists JOINABLE_CHECK and turns on what it asks for; `has_replicas` is false where ranks' values may differ.
/// @throws ContractViolation  the variable has an unknown word.
void add_requested_checks(
    AgreementList& list, DataParallelOptions& options, bool has_replicas, Device const& device
);

/// Lists each parameter with its name, dtype, extents, strides and requires_grad, and which of several devices
/// has it. Returns the counts as a text.
std::string agree_on(AgreementList& list, ParameterList const& parameters, Device const& device);

/// Lists each tensor with its dtype and extents, and which of several devices has it.
void agree_on(AgreementList& list, TensorList const&, std::string_view kind, Device const& device);

/// Lists a model, in the form that guards compare: the counts, and a hash of all that was listed.
std::string agree_on_model(
    AgreementList& list, ParameterList const&, Device const&, TensorList const& buffers = {}
);

/// The values of all parameters as tensors, such as to send them.
TensorList values_of(ParameterList const& parameters);

void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
);

/// Refuses gradients of trained parameters that lie in values.
void check_gradients_apart(ParameterList const& list);

/// Refuses parameters without a value on `device`, parameters with elements at a null pointer, trained
/// ones whose elements share memory with each other, parameters whose values or gradients share memory, because they would be averaged and stepped more
/// than once, and gradients of trained ones that lie in values. Local.
/// Complexity: sorts the parameters; compares those whose address ranges overlap.
void check_parameters(ParameterList const& list, DeviceId device);

/// How a text ends that says to make a participant anew: with its refresh(), if that does it, too.
[[nodiscard]] constexpr char const* or_refresh(bool has_refresh) noexcept {
    return has_refresh ? ", or call refresh()" : "";
}

/// The parameters as they were when a participant listed them. Each training forward compares them with
/// what they are now. Local.
class ListedModel {
public:
    /// A parameter is told from others by this. Its object may be another one later.
    struct Identity {
        std::string name;
        void const* value; ///< for those without a name
    };

    /// With `holds_values` false the engine does not hold the values between passes, so they are not
    /// compared.
    ListedModel(ParameterList parameters, bool holds_values);

    /// Complexity: a few nanoseconds for each parameter.
    /// @throws ContractViolation  a frozen parameter is trained now, or a value has another dtype,
    ///         other extents or another device. `participant` is its class, for texts,
    ///         which tell the user to call its refresh() if `has_refresh`.
    void require_same(std::string_view participant, bool has_refresh) const {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (!parameters_[i].is_as(listed_[i])) {
                require_same(i, participant, has_refresh);
            }
        }
    }
    /// The same for one parameter. Makes texts, so ask is_as() before.
    void require_same(std::size_t i, std::string_view participant, bool has_refresh) const;

    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }
    [[nodiscard]] std::vector<ParameterState> const& listed() const noexcept { return listed_; }
    [[nodiscard]] std::vector<Identity> const& identities() const noexcept { return identities_; }

private:
    ParameterList parameters_;
    std::vector<ParameterState> listed_;
    std::vector<Identity> identities_;
};

/// Compares the values that ranks train, see DataParallelOptions::verify_replicas.
class ReplicaCheck {
public:
    /// Whose values are compared: those of ranks that `have_say`, of which `lowest` is the lowest.
    struct Ranks {
        int lowest;
        int count;
        bool has_say; ///< this rank
    };

    ReplicaCheck(ParameterList parameters, Device& device, std::size_t interval) noexcept
        : parameters_{std::move(parameters)}, elements_{device}, interval_{interval} {}

    /// Collective, in each training round that syncs. Compares in each `interval`-th one.
    void count_round(ControlCommunicator& control, Ranks const& ranks) {
        if ((rounds_ + 1) % interval_ == 0) {
            compare(control, ranks);
        }
        ++rounds_; // not if this rank failed: it may do its part by skip()
    }
    /// Collective; one sum of six words.
    /// @throws Mismatch  on all ranks: it names the ranks that differ from the lowest, and the first parameter.
    void compare(ControlCommunicator& control, Ranks const& ranks);

private:
    ParameterList parameters_;
    ElementsOnHost elements_;
    std::size_t interval_;
    std::size_t rounds_ = 0;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/impl/model_checks.ipp>
#endif
