// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace joinable { inline namespace v0 { namespace detail {

/// Whether this process may give no file so many bytes: the system would kill it by SIGXFSZ. Other systems than Linux
/// are not asked.
[[nodiscard]] inline bool exceeds_file_limit([[maybe_unused]] std::uint64_t bytes) noexcept {
#if defined(__linux__)
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
#else
    return false;
#endif
}

}}} // namespace joinable::v0::detail
