// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Memory that processes share beyond what their communicator makes: handles of shared buffers, and
/// models whose values lie in one. Needs the sockets of Linux and no other library; for memory of a GPU,
/// include <joinable/cuda.hpp> as well.

#include <joinable/communicator/shared_handle.hpp>
#include <joinable/participant/share_parameters.hpp>
