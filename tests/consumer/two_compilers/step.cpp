// SPDX-License-Identifier: BSL-1.0
#include <joinable/optimizer/rules.hpp>

void step_in_cpp(joinable::Adam const& rule, joinable::UpdateRange<float> const& range);
void step_in_cpp(joinable::Adam const& rule, joinable::UpdateRange<float> const& range) {
    rule.update(range);
}
