// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Ranks of several machines: collectives within each machine, and between one rank of each.

#include <joinable/communicator/hierarchical/communicator.hpp>
