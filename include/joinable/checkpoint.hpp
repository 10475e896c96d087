// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Checkpoints of trainings in the safetensors layout. Needs nlohmann_json. Includes
/// <joinable/zero.hpp>.

#include <joinable/checkpoint/checkpoint.hpp>
#include <joinable/zero.hpp>
