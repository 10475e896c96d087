// SPDX-License-Identifier: BSL-1.0
// EXPECT: Step: the communicator comes first, as in Step step{comm, [&] { optimizer.step(model); }}
#include <joinable/join.hpp>

#include <support/misuse.hpp>

int main() {
    joinable::Step step{[] {}};
}
