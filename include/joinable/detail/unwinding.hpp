// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>

namespace joinable { inline namespace v0 { namespace detail {

/// Tells a destructor whether an exception destroys its object: one that was thrown after the object
/// was made. A member of the object.
class Unwinding {
public:
    [[nodiscard]] bool has_begun() const noexcept { return std::uncaught_exceptions() > before_; }

private:
    int before_ = std::uncaught_exceptions();
};

}}} // namespace joinable::v0::detail
