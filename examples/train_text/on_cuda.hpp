// SPDX-License-Identifier: BSL-1.0
#pragma once

// What a program does that is asked for --device cuda: with_cuda.cu or without_cuda.cpp has it.

#include <stdexcept>
#include <vector>

#include "train.hpp"

namespace train_text {

/// There is no GPU to train on. The text says what was expected and what to do.
class NoDevice : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// As train_ranks(), on GPUs: one for each rank, but that process ranks may share them.
/// @throws NoDevice  also where this program was built without CUDA.
///         InputError  thread ranks are more than GPUs.
std::vector<Findings>
train_on_cuda(Options const& options, std::vector<Text> const& texts, Text const& held_out);

} // namespace train_text
