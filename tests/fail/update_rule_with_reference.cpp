// SPDX-License-Identifier: BSL-1.0
// EXPECT: UpdateRule: a member is a pointer, a reference or const, but settings travel from rank to rank, where an address leads nowhere; keep numbers in it
#include <joinable/zero.hpp>

#include <span>
#include <string_view>

struct Scheduled {
    double const& learning_rate;
    bool maximize = false;
    std::span<std::string_view const> state_names() const { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const&) const {}
};

static_assert(joinable::models_update_rule<Scheduled>());

int main() {}
