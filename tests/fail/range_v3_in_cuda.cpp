// SPDX-License-Identifier: BSL-1.0
// ALONE: the header itself is refused
// EXPECT: joinable/interop/range_v3.hpp is for .cpp files: nvcc does not compile range-v3
#define __CUDACC__ // as nvcc does
#include <joinable/interop/range_v3.hpp>

int main() {}
