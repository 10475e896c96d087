// SPDX-License-Identifier: BSL-1.0
// EXPECT: copy, scale_copy and add: the elements of the target must not be const
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<float> const storage(3);
    auto const view = joinable::as_strided(storage, {3}, {1});
    joinable::copy(view, view);
}
