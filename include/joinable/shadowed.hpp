// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// shadowed(): a communicator for collectives that a model issues within its passes, as normalisation
/// layers and metrics do. Only such models need it, in addition to <joinable/join.hpp>.

#include <joinable/participant/shadowed.hpp>
