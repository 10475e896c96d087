// SPDX-License-Identifier: BSL-1.0
// EXPECT: SharedBuffer: include <joinable/shared_memory.hpp> for handle() and open()
#include <joinable/join.hpp>

int main() {
    auto const weights = joinable::shared_buffer<float>(8);
    static_cast<void>(weights.handle());
}
