// SPDX-License-Identifier: BSL-1.0
// EXPECT: flat_parameters: values and gradients are contiguous ranges, such as std::vector or std::span; for a
// EXPECT: pointer and a count give std::span{pointer, count}
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    float params_memory[6]{};
    float* grads_memory = params_memory;
    (void)joinable::flat_parameters(params_memory, grads_memory, std::array{4, 2});
}
