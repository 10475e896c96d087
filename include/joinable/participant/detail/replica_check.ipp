// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/replica_check.hpp>

#include <array>
#include <cstdint>
#include <string>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void ReplicaCheck::compare(ControlCommunicator& control, Ranks const& ranks) {
    AgreementList values;
    values.begin_section("replicas differ: ");
    for (std::size_t i = 0; ranks.has_say && i < parameters_.size(); ++i) {
        AnyParameter const& parameter = parameters_[i];
        AnyView const value = parameter.requires_grad() ? parameter.value() : AnyView{};
        std::string text = "no trained value";
        if (value && has_memory(value)) {
            text = concat("values of hash ", elements_.hash(value));
        }
        values.add(describe_parameter(parameters_, i), text);
    }
    std::array<std::uint64_t, HashAgreement::words> words{};
    if (ranks.has_say) {
        HashAgreement::write(words.data(), values.hash_from(0));
    }
    control.sum(words);
    auto const count = static_cast<std::uint64_t>(ranks.count);
    if (HashAgreement::is_common(words.data(), count)) {
        return;
    }
    DifferenceReport report{control, ranks.lowest, count, ranks.has_say};
    AbortReason reason = report.difference(values);
    reason.message +=
        "; start all ranks from the same values (sync_at_start), and change them on all ranks alike";
    throw_failure(reason);
}

}}} // namespace joinable::v0::detail
