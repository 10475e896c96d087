// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdio>
#include <exception>
#include <memory>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/failed_checks.hpp>
#include <support/hang.hpp>

#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable_tests {

/// Runs `body()` in a process that this rank forks. Returns whether it succeeded and no check failed.
template <class Body>
bool succeeds_in_fork(Body const& body) {
    std::fflush(nullptr);
    pid_t const process = ::fork();
    if (process == 0) {
        ::alarm(seconds_to_hang);
        failed_checks = 0;
        try {
            body();
        } catch (std::exception const& error) {
            std::printf("a forked process failed: %s\n", error.what());
            ++failed_checks;
        }
        std::fflush(nullptr);
        _exit(failed_checks == 0 ? 0 : 1);
    }
    int status = 0;
    ::waitpid(process, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Ranks that fork a helper: it ends as by exit(), where static objects are destroyed, and the ranks
/// go on. If `is_refused`, its calls are.
template <class Comm>
void check_helper_of(Comm& comm, bool is_refused) {
    float value = 1;
    comm.barrier();
    {
        auto work = comm.all_reduce({&value, 1, joinable::DType::f32}, joinable::ReduceOp::sum);
        CHECK(succeeds_in_fork([&] {
            if (is_refused) {
                CHECK_THROWS_AS(comm.barrier(), joinable::ContractViolation);
                CHECK_THROWS_AS(work.wait(), joinable::ContractViolation);
            }
            std::destroy_at(&work);
            std::destroy_at(&comm);
        }));
        work.wait();
    }
    CHECK(value == static_cast<float>(comm.size()));
    comm.barrier();
}

} // namespace joinable_tests
