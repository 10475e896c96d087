// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: steps as CUDA graphs, over NCCL. Needs CUDA 12.3 and everything that <joinable/nccl.hpp>
/// needs. Tested over doubles of CUDA and NCCL so far, not on a GPU.

#include <joinable/nccl.hpp>
#include <joinable/participant/captured_step.hpp>
