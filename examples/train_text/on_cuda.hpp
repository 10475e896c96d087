// SPDX-License-Identifier: BSL-1.0
#pragma once

// Training on GPUs. with_cuda.cu or without_cuda.cpp defines it.

#include <stdexcept>
#include <vector>

#include "options.hpp"

namespace train_text {

/// There is no GPU to train on. The text says what is missing and what to do.
class NoDevice : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The counterpart of train_ranks() on GPUs. Each rank has its own GPU, but process ranks may share
/// them.
/// @throws NoDevice  no GPU was found, or this program was built without CUDA.
/// @throws InputError  there are more thread ranks than GPUs.
std::vector<Findings>
train_on_cuda(Options const& options, std::vector<Text> const& texts, Text const& held_out);

} // namespace train_text
