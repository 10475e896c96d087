// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Everything: the core, and the communicators that come with it.

#include <joinable/communicator/run_threads.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/thread.hpp>
#include <joinable/communicator/thread_work.hpp>
#include <joinable/core.hpp>
