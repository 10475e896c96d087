// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: memory of CUDA devices. Needs the CUDA Toolkit's headers and libcudart; any C++20
/// compiler. Tested over a fake CUDA runtime, and on an H100. Kernels are in cuda_kernels.hpp, which one source file
/// compiled by nvcc includes.

#include <joinable/communicator/staged_collectives.hpp>
#include <joinable/device/cuda/copy.hpp>
#include <joinable/device/cuda/device.hpp>
#include <joinable/device/cuda/shared_handle.hpp>
