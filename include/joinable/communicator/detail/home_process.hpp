// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// The process in which an object was made. A process that is forked later has a copy of the
/// object, which must not speak for the rank.
class HomeProcess {
public:
    [[nodiscard]] bool is_here() const noexcept { return id_ == ::getpid(); }
    /// @throws ContractViolation  this is another process.
    void require_here(int rank) const {
        if (!is_here()) {
            throw ContractViolation{concat(
                "expected rank ",
                rank,
                " in process ",
                id_,
                ", which attached, but process ",
                ::getpid(),
                " that was forked since calls its communicator: attach after the fork"
            )};
        }
    }

private:
    pid_t id_ = ::getpid();
};

}}} // namespace joinable::v0::detail
