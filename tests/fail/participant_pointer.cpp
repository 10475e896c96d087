// SPDX-License-Identifier: BSL-1.0
// EXPECT: participants: give the participants themselves instead of pointers to them, as in participants(*ddp, step)
#include <joinable/join.hpp>

int main() {
    joinable::SelfCommunicator comm;
    joinable::Step step{comm, [] {}};
    joinable::Join guard{joinable::participants(&step)};
}
