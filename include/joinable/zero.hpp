// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Sharded optimizers: what ZeRO needs in addition to <joinable/join.hpp>, which this header
/// includes.

#include <joinable/join.hpp>
#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/optimizer_state.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/optimizer.hpp>
#include <joinable/participant/sharded/options.hpp>
#include <joinable/participant/sharded/zero_memory.hpp>
#include <joinable/participant/sharded/zero_options.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
