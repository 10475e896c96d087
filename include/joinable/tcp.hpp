// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Small collectives between machines, without MPI: the control communicator of a guard whose
/// gradients are moved by something else. Needs the sockets of Linux, no other library.

#include <joinable/communicator/tcp.hpp>
#include <joinable/communicator/tcp_listener.hpp>
#include <joinable/communicator/tcp_options.hpp>
#include <joinable/communicator/tcp_work.hpp>
