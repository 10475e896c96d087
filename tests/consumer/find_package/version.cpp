// SPDX-License-Identifier: BSL-1.0
// The installed package says the version that its headers say.
#include <joinable/join.hpp>

#include <type_traits>

static_assert(JOINABLE_VERSION_MAJOR == PACKAGE_MAJOR);
static_assert(JOINABLE_VERSION_MINOR == PACKAGE_MINOR);
static_assert(JOINABLE_VERSION_PATCH == PACKAGE_PATCH);
static_assert(
    joinable::library_version == PACKAGE_MAJOR * 10'000 + PACKAGE_MINOR * 100 + PACKAGE_PATCH
);
static_assert(JOINABLE_VERSION_MAJOR == 0, "the inline namespace follows the major version");
static_assert(std::is_same_v<joinable::Round, joinable::v0::Round>);
