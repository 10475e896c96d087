// SPDX-License-Identifier: BSL-1.0
// Two libraries in one program that were built with different versions of joinable.
#include <cstdint>
#include <cstdio>

namespace this_version {
bool run();
std::uint32_t const& number();
} // namespace this_version
namespace next_version {
bool run();
std::uint32_t const& number();
} // namespace next_version

int main() {
    std::printf(
        "versions %u at %p and %u at %p\n",
        this_version::number(),
        static_cast<void const*>(&this_version::number()),
        next_version::number(),
        static_cast<void const*>(&next_version::number())
    );
    // One definition for both would mean that the linker took one version's code for the other's.
    bool const is_separate = next_version::number() == this_version::number() + 10'000;
    if (!is_separate) {
        std::puts("the versions share their definitions");
    }
    bool const is_right = this_version::run() && next_version::run();
    if (!is_right) {
        std::puts("ranks with uneven inputs got wrong sums");
    }
    return is_separate && is_right ? 0 : 1;
}
