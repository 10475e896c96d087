// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <sys/resource.h>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether this process may give no file so many bytes: the system would kill it by SIGXFSZ.
[[nodiscard]] inline bool exceeds_file_limit(std::uint64_t bytes) noexcept {
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
}

}}} // namespace joinable::v0::detail
