// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Small collectives between machines, without MPI: a control communicator for guards whose
/// gradients are moved by another library. Needs the sockets of Linux and no other library.

#include <joinable/communicator/tcp/communicator.hpp>
#include <joinable/communicator/tcp/options.hpp>
