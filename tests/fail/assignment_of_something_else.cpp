// SPDX-License-Identifier: BSL-1.0
// EXPECT: compute_bucket_assignment_by_size: the elements of the range must model Tensor or
// EXPECT: Parameter, or be a TensorSize; specialise joinable::tensor_traits for their type
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    std::vector<int> const sizes{1, 2, 3};
    (void)joinable::compute_bucket_assignment_by_size(sizes, {400});
}
