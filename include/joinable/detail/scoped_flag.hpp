// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

/// As long as it lives a flag has another value; then that of before.
class ScopedFlag {
public:
    ScopedFlag(bool& flag, bool value) noexcept
        : flag_{flag}, before_{std::exchange(flag, value)} {}
    ScopedFlag(ScopedFlag const&) = delete;
    ScopedFlag& operator=(ScopedFlag const&) = delete;
    ~ScopedFlag() { flag_ = before_; }

private:
    bool& flag_;
    bool before_;
};

}}} // namespace joinable::v0::detail
