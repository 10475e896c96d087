// SPDX-License-Identifier: BSL-1.0
// As a file of a program that compiles the library once has it.
#define JOINABLE_SEPARATE_COMPILATION
#include <joinable/join.hpp>
