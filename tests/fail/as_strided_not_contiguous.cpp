// SPDX-License-Identifier: BSL-1.0
// EXPECT: as_strided: the storage must be a contiguous range, such as std::vector or std::span
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<float> storage(12);
    auto const columns = joinable::as_strided(storage, {4}, {3});
    (void)joinable::as_strided(columns, {2, 2}, {2, 1}); // of a view whose elements lie apart
}
