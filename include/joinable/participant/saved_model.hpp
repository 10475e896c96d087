// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's part of a model without its gradients, for a Checkpoint. Views are valid until the next round.
struct SavedModel {
    ParameterList parameters;
    std::vector<AnyView> buffers;  ///< may differ between ranks
    std::vector<AnyView> attached; ///< by attach_state()
    AgreementList settings;        ///< of the reduction, if it has state
    ReductionState reduction;
    std::vector<std::uint64_t>
        order; ///< of the parameters in its buckets; empty: as they were given
};

}}} // namespace joinable::v0::detail
