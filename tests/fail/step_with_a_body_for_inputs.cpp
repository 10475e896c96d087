// SPDX-License-Identifier: BSL-1.0
// EXPECT: Step: the body is a function that takes nothing or the Round, as in Step step{comm, [&] { optimizer.step(model); }}
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    joinable::Step step{comm, [](float) {}};
}
