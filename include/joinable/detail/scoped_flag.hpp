// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

/// Sets a flag for its lifetime, then restores the previous value.
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
