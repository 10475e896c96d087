// SPDX-License-Identifier: BSL-1.0
#include <joinable/tcp.hpp>

#include "launch.hpp"
#include "launched.hpp"
#include "options.hpp"

int train_text::run_over_tcp(Options const& options, Program const& program) {
    return run_as_launched_rank<joinable::TcpCommunicator>(options, program);
}
