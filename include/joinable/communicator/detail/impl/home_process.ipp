// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/detail/home_process.hpp>

#include <pthread.h>
#include <unistd.h>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION HomeProcess::HomeProcess() : id_{::getpid()} {
    [[maybe_unused]] static int const counts =
        pthread_atfork(nullptr, nullptr, [] { ++forks(); }); // a macro where no process forks
    forks_before_ = forks().load(std::memory_order_relaxed); // a fork from now on is counted
}

JOINABLE_DEFINITION void HomeProcess::require_here(int rank) const {
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

}}} // namespace joinable::v0::detail
