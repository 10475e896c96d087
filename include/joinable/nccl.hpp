// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: communicators of GPUs over NCCL. Needs its header and CUDA's, and libraries nccl and cudart:
/// in CMake, the target joinable::nccl.

#include <joinable/agreement/staged_collectives.hpp>
#include <joinable/communicator/nccl/collectives.hpp>
#include <joinable/communicator/nccl/communicator.hpp>
#include <joinable/communicator/nccl/group.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/nccl/ref.hpp>
#include <joinable/communicator/nccl/staged.hpp>
#include <joinable/communicator/nccl/work.hpp>
