// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

// ---- joinable/src.hpp

/// @file
/// The definitions that JOINABLE_SEPARATE_COMPILATION leaves to one source file of a program. That
/// file includes this header before any other header of the library. The target joinable::compiled
/// has such a file.
#define JOINABLE_SOURCE
#if defined(__linux__)
#endif

#include "join.hpp"
#include "tcp.hpp"
#include "trace.hpp"
#include "zero.hpp"
