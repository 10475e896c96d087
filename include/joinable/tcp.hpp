// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Small collectives between machines, without MPI: the control communicator of a guard whose
/// gradients are moved by something else. Needs the sockets of Linux, no other library.

#include <joinable/communicator/tcp/communicator.hpp>
#include <joinable/communicator/tcp/listener.hpp>
#include <joinable/communicator/tcp/options.hpp>
