// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>
#include <string_view>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/config.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor_list.hpp>

/// @file
/// The properties of a model that ranks compare: see agreement/agree.hpp.

namespace joinable { inline namespace v0 { namespace detail {

void agree_on(AgreementList& list, DataParallelOptions const& options);

/// Lists each parameter with its name, dtype, extents, strides and requires_grad. Returns the
/// counts as a text.
std::string agree_on(AgreementList& list, ParameterList const& parameters);

/// Lists each tensor with its dtype and extents.
void agree_on(AgreementList& list, TensorList const& tensors, std::string_view kind);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/compared_model.ipp>
#endif
