// SPDX-License-Identifier: BSL-1.0
#pragma once

// Training on the host, which is compiled once for all transports.

#include <joinable/any_communicator.hpp>

#include <vector>

#include "options.hpp"
#include "train.hpp"

namespace train_text {

/// Trains a rank. Collective. `hosts` connects the same ranks as `comm`, for roll calls.
Findings
train_on_host(joinable::AnyCommunicator& comm, joinable::AnyCommunicator& hosts, Job const& job);

/// Trains threads or processes.
std::vector<Findings>
train_ranks(Options const& options, std::vector<Text> const& texts, Text const& held_out);

} // namespace train_text
