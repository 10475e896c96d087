// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// DistributedDataParallel::refresh(), for models whose parameters become trainable or frozen, are added, or are
/// converted. In addition to <joinable/join.hpp>.

#include <joinable/participant/refresh.hpp>
