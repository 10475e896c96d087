// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Training that sends less: reductions to give to a DistributedDataParallel, and values that are averaged now and then in
/// place of gradients. In addition to <joinable/join.hpp>.

#include <joinable/bucket/compression/cast_to.hpp>
#include <joinable/bucket/compression/int8.hpp>
#include <joinable/bucket/compression/no_reduction.hpp>
#include <joinable/bucket/compression/power_sgd.hpp>
#include <joinable/bucket/compression/reduce_by.hpp>
#include <joinable/bucket/compression/top_k.hpp>
#include <joinable/participant/periodic_average.hpp>
