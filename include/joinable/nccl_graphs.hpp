// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: steps as CUDA graphs, over NCCL. Needs CUDA 12.3 and everything that <joinable/nccl.hpp>
/// needs. Tested over fake CUDA and NCCL libraries, and on one H200.

#include <joinable/nccl.hpp>
#include <joinable/participant/captured/captured_step.hpp>
