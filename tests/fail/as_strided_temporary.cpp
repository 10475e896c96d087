// SPDX-License-Identifier: BSL-1.0
// EXPECT: as_strided: a temporary storage would be destroyed before the view is used; give it a name
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    (void)joinable::as_strided(std::vector<float>(12), {3, 4}, {4, 1});
}
