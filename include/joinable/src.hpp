// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// What JOINABLE_SEPARATE_COMPILATION leaves to one source file of a program, which includes this header
/// and nothing else of the library before it. The target joinable::compiled has such a file.
#define JOINABLE_SOURCE
#include <joinable/join.hpp>
#include <joinable/tcp.hpp>
#include <joinable/trace.hpp>
#include <joinable/zero.hpp>
