// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: memory of CUDA devices. Needs the CUDA Toolkit's headers and libcudart; any C++20 compiler.
/// Run over a double of the CUDA runtime so far, not on a GPU yet. Kernels are in
/// device/cuda_kernels.hpp, which one source file compiled by nvcc includes.

#include <joinable/device/cuda_copy.hpp>
#include <joinable/device/cuda_device.hpp>
#include <joinable/device/cuda_runtime_copies.hpp>
#include <joinable/device/staged_collectives.hpp>
