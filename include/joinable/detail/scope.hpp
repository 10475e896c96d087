// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

/// A member that tells the destructor of an object whether an exception destroys the object.
/// Exceptions from before the construction of the object do not count.
class Unwinding {
public:
    [[nodiscard]] bool has_begun() const noexcept { return std::uncaught_exceptions() > before_; }

private:
    int before_ = std::uncaught_exceptions();
};

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
