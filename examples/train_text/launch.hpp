// SPDX-License-Identifier: BSL-1.0
#pragma once

// Ranks that a launcher started, each in its own process, on any machines. Another transport needs
// a word in arguments.hpp and a file like over_tcp.cpp.

#include <functional>
#include <vector>

#include "options.hpp"

namespace train_text {

/// Trains all ranks, or this rank with the others, and returns the findings of all.
using TrainRanks = std::function<
    std::vector<Findings>(Options const&, std::vector<Text> const& texts, Text const& held_out)>;

/// The program between command line and exit code. `rank` is this process's, -1 if it runs all.
using Program = std::function<int(Options const& options, TrainRanks const& train, int rank)>;

/// Runs the program on a rank of MPI, of TCP, or of Gloo.
/// @throws InputError  the program was built without this transport, or the launcher says nothing.
int run_over_mpi(Options const& options, Program const& program);
int run_over_tcp(Options const& options, Program const& program);
int run_over_gloo(Options const& options, Program const& program);
/// Runs the program on the ranks of one machine, which are processes. TCP connects the machines.
int run_over_machines(Options const& options, Program const& program);

} // namespace train_text
