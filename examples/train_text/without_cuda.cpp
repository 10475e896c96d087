// SPDX-License-Identifier: BSL-1.0
#include <vector>

#include "on_cuda.hpp"

std::vector<train_text::Findings>
train_text::train_on_cuda(Options const&, std::vector<Text> const&, Text const&) {
    throw NoDevice{
        "--device cuda needs a program that was built with CUDA, and this one was not; run "
        "train_text_cuda, which CMake builds where it finds nvcc and NCCL, or take --device host"
    };
}
