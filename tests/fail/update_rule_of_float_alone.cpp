// SPDX-License-Identifier: BSL-1.0
// EXPECT: UpdateRule: expected a const member 'template <class T> void update(joinable::UpdateRange<T> const& range)' for float and double
#include <joinable/zero.hpp>

#include <span>
#include <string_view>

struct Lion {
    double learning_rate = 1e-4;
    std::span<std::string_view const> state_names() const { return {}; }
    void update(joinable::UpdateRange<float> const&) const {}
};

static_assert(joinable::models_update_rule<Lion>());

int main() {}
