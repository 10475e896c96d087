// SPDX-License-Identifier: BSL-1.0
// EXPECT: CastTo: NoReduction sends nothing, so there is nothing to cast; give NoReduction alone
#include <joinable/compression.hpp>

joinable::Bf16Compression<joinable::NoReduction> reduction;
int main() {}
