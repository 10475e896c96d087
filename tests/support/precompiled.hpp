// SPDX-License-Identifier: BSL-1.0
#pragma once

// CMake includes this before each test file, parsed once for all of them. It only saves time: a test
// file compiles without it.

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <joinable/join.hpp>
#include <joinable/tcp.hpp>
