// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What parameters were when a participant listed them. Each training forward compares them with
/// what they are now. Local.
class ListedModel {
public:
    /// With `holds_values` false the engine does not hold the values between passes, so they are not
    /// compared.
    ListedModel(ParameterList parameters, bool holds_values);

    /// Complexity: a few nanoseconds for each parameter.
    /// @throws ContractViolation  a frozen parameter is trained now, or a value has another dtype,
    ///         other extents or another device. `participant` is its class, for texts.
    void require_same(std::string_view participant) const {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (!parameters_[i].is_as(listed_[i])) {
                require_same(i, participant);
            }
        }
    }

private:
    void require_same(std::size_t i, std::string_view participant) const;

    ParameterList parameters_;
    std::vector<ParameterState> listed_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/listed_model.ipp>
#endif
