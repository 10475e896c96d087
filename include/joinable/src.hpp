// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// The definitions that JOINABLE_SEPARATE_COMPILATION leaves to one source file of a program. That
/// file includes this header before any other header of the library. The target joinable::compiled
/// has such a file.
#define JOINABLE_SOURCE
#include <joinable/join.hpp>
#if defined(__linux__)
#include <joinable/tcp.hpp>
#endif
#include <joinable/trace.hpp>
#include <joinable/zero.hpp>
