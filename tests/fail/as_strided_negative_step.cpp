// SPDX-License-Identifier: BSL-1.0
// EXPECT: narrow
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<float> storage(3);
    (void)joinable::as_strided(storage, {3}, {-1}, 2);
}
