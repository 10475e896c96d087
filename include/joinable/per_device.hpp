// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// One model on several devices of each rank: a communicator for each device.

#include <joinable/communicator/per_device.hpp>
