// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Everything: the core, its communicators, the planning of buckets, the dealing of data to ranks,
/// and adapters for models with one memory or with several tensor types.

// The core comes first. It orders its own headers so that errors need few lines to say where they
// were included from.
// clang-format off
#include <joinable/core.hpp>
#include <joinable/bucket/bucketed_view.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/environment.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/communicator/shared_memory/run_processes.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/participant/over_shared_memory.hpp>
#include <joinable/data/shard.hpp>
#include <joinable/data/shard_by_weight.hpp>
#include <joinable/data/shuffle.hpp>
#include <joinable/tensor/flat_parameters.hpp>
#include <joinable/tensor/variant.hpp>
#include <joinable/optimizer/settings.hpp>
#include <joinable/participant/needs_header.hpp>
// clang-format on
