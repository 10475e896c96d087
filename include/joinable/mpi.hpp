// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// MPI ranks on any number of machines. Needs MPI 3 or later, such as Open MPI or MPICH: link
/// joinable::mpi, or compile with mpicxx.

#include <joinable/communicator/mpi/communicator.hpp>
#include <joinable/communicator/mpi/options.hpp>
