// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Opt-in: ranges for NVIDIA's profilers. Needs NVTX 3, a header-only library of the CUDA Toolkit;
/// in CMake, the target CUDA::nvtx3.

#include <joinable/interop/nvtx_timeline.hpp>
