// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>

namespace joinable { inline namespace v0 { namespace detail {

/// A member that tells the destructor of an object whether an exception destroys the object.
/// Exceptions from before the construction of the object do not count.
class Unwinding {
public:
    [[nodiscard]] bool has_begun() const noexcept { return std::uncaught_exceptions() > before_; }

private:
    int before_ = std::uncaught_exceptions();
};

}}} // namespace joinable::v0::detail
