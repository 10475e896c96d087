// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/failed_checks.hpp>
#include <support/hang.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>
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

/// What destructors do while an exception leaves their scope.
template <class Object>
void unwind(Object& object) {
    struct Scope {
        Object* object;
        ~Scope() { std::destroy_at(object); }
    };
    try {
        Scope const scope{&object};
        throw std::runtime_error{"the helper's own trouble"};
    } catch (std::runtime_error const&) { // NOLINT(bugprone-empty-catch): it has left the scope
    }
}

/// Ranks that fork helpers, whose calls are refused: one ends as by exit(), where static objects are
/// destroyed, and one by an exception that leaves a guard. The ranks go on.
template <class Comm>
void check_helpers_of(Comm& comm) {
    float value = 1;
    auto const sum = [&] {
        return comm.all_reduce({&value, 1, joinable::DType::f32}, joinable::ReduceOp::sum);
    };
    comm.barrier();
    {
        auto work = sum();
        CHECK(succeeds_in_fork([&] {
            CHECK_THROWS_AS(comm.barrier(), joinable::ContractViolation);
            CHECK_THROWS_AS(comm.abort({}), joinable::ContractViolation);
            CHECK_THROWS_AS((void)comm.is_aborted(), joinable::ContractViolation);
            CHECK_THROWS_AS((void)comm.abort_reason(), joinable::ContractViolation);
            CHECK_THROWS_AS(comm.keep_alive(), joinable::ContractViolation);
            CHECK_THROWS_AS(work.wait(), joinable::ContractViolation);
            if constexpr (joinable::AllocatesArena<
                              Comm>) { // it would be memory that the rank uses, too
                CHECK_THROWS_AS(static_cast<void>(comm.allocate(64)), joinable::ContractViolation);
            }
            std::destroy_at(&work);
            std::destroy_at(&comm);
        }));
        work.wait();
    }
    CHECK(value == static_cast<float>(comm.size()));
    joinable::Step step{comm, [&] { sum().wait(); }};
    joinable::Join guard{joinable::participants(step)};
    step.step();
    CHECK(succeeds_in_fork([&] {
        unwind(guard);
        unwind(comm);
    }));
    step.step();
    guard.finish();
    comm.barrier();
}

} // namespace joinable_tests
