// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: communicators of GPUs over NCCL. Needs its header and CUDA's, and libraries nccl and cudart:
/// in CMake, the target joinable::nccl.

#include <joinable/communicator/nccl.hpp>
#include <joinable/communicator/nccl_collectives.hpp>
#include <joinable/communicator/nccl_group.hpp>
#include <joinable/communicator/nccl_options.hpp>
#include <joinable/communicator/nccl_ref.hpp>
#include <joinable/communicator/nccl_staged.hpp>
#include <joinable/communicator/nccl_work.hpp>
