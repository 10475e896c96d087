// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// All-reduce algorithms over messages: their steps, their costs, and collectives over any
/// communicator that sends and receives.

#include <joinable/communicator/algorithms/communicator.hpp>
#include <joinable/communicator/algorithms/measure_costs.hpp>
#include <joinable/communicator/algorithms/options.hpp>
#include <joinable/communicator/algorithms/plan.hpp>
