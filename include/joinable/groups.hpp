// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Guards some of whose participants have communicators of groups of ranks. In addition to <joinable/join.hpp>.

#include <joinable/join/groups.hpp>
