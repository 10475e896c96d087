// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: cuda_kernels(), for the device_memory() of a communicator. Include it in one source file that nvcc compiles
/// without --use_fast_math.

#include <joinable/optimizer/cuda/kernels.hpp>
