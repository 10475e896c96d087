// SPDX-License-Identifier: BSL-1.0
// How well choose_algorithm() chooses by what measure_costs() measured: bench_plans [RANKS]. Ranks are threads, then
// processes. For MPI see mpi.bench.cpp.
#include <cstdlib>

#include <joinable/join.hpp>

#include "chosen_plans.hpp"

int main(int count, char** arguments) {
    int const ranks = count > 1 ? std::atoi(arguments[1]) : 2;
    joinable::run_threads(ranks, [](joinable::ThreadCommunicator& comm) {
        print_chosen_plans("threads", comm);
    });
    joinable::run_processes(ranks, [](joinable::ProcessCommunicator& comm) {
        print_chosen_plans("processes", comm);
    });
}
