// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Ranks on any number of machines, over Gloo's TCP transport. Needs Gloo 0.5 or later and Linux:
/// link joinable::gloo.

#include <joinable/communicator/gloo/communicator.hpp>
#include <joinable/communicator/gloo/options.hpp>
