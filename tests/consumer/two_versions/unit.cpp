// SPDX-License-Identifier: BSL-1.0
// Compiled once with each version of the library.
#include "../uneven_inputs.hpp"

#include <cstdint>

namespace VERSION_NAMESPACE {

bool run() {
    return uneven_inputs_run();
}
std::uint32_t const& number() {
    return joinable::library_version;
}

} // namespace VERSION_NAMESPACE
