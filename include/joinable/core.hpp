// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Everything that needs no threads: guards over an engine's own communicator.

// Each header follows the headers it includes. g++ then needs three lines, not ten, to say where an
// error was included from.
// clang-format off
#include <joinable/config.hpp>
#include <joinable/fwd.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/traits.hpp>
#include <joinable/tensor/tensor.hpp>
#include <joinable/tensor/strided_view.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor_list.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/hook/join_hook.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/hook/ordering.hpp>
#include <joinable/bucket/tensor_size.hpp>
#include <joinable/bucket/assignment.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/join/options.hpp>
#include <joinable/join/round.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/detail/roll_call.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/participants.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/join/explain.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>
// clang-format on
