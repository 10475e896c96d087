// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// The work of ranks, for people: a trace that Perfetto opens, a picture, and a line of progress.

#include <joinable/trace/data_parallel_report.hpp>
#include <joinable/trace/gather.hpp>
#include <joinable/trace/picture.hpp>
#include <joinable/trace/progress_line.hpp>
#include <joinable/trace/trace.hpp>
#include <joinable/trace/trace_timeline.hpp>
