// SPDX-License-Identifier: BSL-1.0
// EXPECT: ProgressLine: expected a communicator, then a FILE*, such as stderr, or a function that takes a std::string_view, then options in braces with the names and the order of ProgressOptions; write ProgressOptions{...} to be told which name is wrong
#include <joinable/trace.hpp>

#include <joinable/communicator/self.hpp>

#include <cstdio>

int main() {
    joinable::SelfCommunicator comm;
    joinable::ProgressLine progress{comm, stderr, {.round = 400}};
}
