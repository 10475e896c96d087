// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: steps as CUDA graphs, over NCCL. Needs what <joinable/nccl.hpp> needs, and CUDA 12.3. Run over
/// doubles of CUDA and NCCL so far, not on a GPU yet.

#include <joinable/nccl.hpp>
#include <joinable/participant/captured_step.hpp>
