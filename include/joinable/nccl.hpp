// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: GPU communicators over NCCL. Needs the headers of NCCL and CUDA and the libraries nccl
/// and cudart; in CMake, the target joinable::nccl.

#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/communicator.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/nccl/ref.hpp>
#include <joinable/communicator/nccl/staged.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/communicator/staged_collectives.hpp>
