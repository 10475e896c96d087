// SPDX-License-Identifier: BSL-1.0
// EXPECT: bucket_slots: the view owns its parameters
#include <vector>

#include <joinable/interop/range_v3.hpp>

int main() {
    using joinable::views::bucketed;
    (void)joinable::views::bucket_slots(std::vector<joinable::TensorSize>{{10}} | bucketed({80}));
}
