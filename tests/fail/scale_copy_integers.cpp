// SPDX-License-Identifier: BSL-1.0
// EXPECT: scale_copy: integers cannot be scaled, only floating-point and complex elements can
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<int> counts(3);
    auto const view = joinable::as_strided(counts, {3}, {1});
    joinable::scale_copy(view, 0.5, view);
}
