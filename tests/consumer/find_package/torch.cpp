// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/torch_tensor.hpp>
#include <joinable/join.hpp>

#include <ATen/ops/full.h>

int main() {
    joinable::SelfCommunicator comm;
    at::Tensor tensor = at::full({2, 3}, 4.0);
    joinable::all_reduce(comm, tensor).wait();
    return tensor.numel() == 6 ? 0 : 1;
}
