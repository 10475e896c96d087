// SPDX-License-Identifier: BSL-1.0
// ALONE: the header itself is refused
// EXPECT: joinable/optimizer/cuda/kernels.hpp has kernels: include it where nvcc compiles
#include <joinable/cuda_kernels.hpp>

int main() {
    return joinable::cuda_kernels().run == nullptr ? 1 : 0;
}
