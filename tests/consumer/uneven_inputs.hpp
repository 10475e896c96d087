// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join.hpp>

#include <atomic>
#include <vector>

/// Three ranks with 1, 2 and 3 inputs sum a one in every round. Returns whether each rank saw the
/// sums 3, 2 and 1 of the rounds it was active in, and three rounds in all. Static, because
/// programs with two versions of the library compile it twice.
static bool uneven_inputs_run() {
    std::atomic<bool> is_right = true;
    joinable::run_threads(3, [&](joinable::ThreadCommunicator& comm) {
        auto const sum = [&](float own) {
            std::vector<float> values(5, own);
            comm.all_reduce(joinable::to_buffer(values), joinable::ReduceOp::sum).wait();
            return values.back();
        };
        joinable::Action count{comm, [&] { return sum(1.0F); }, [&] { sum(0.0F); }};
        joinable::Join guard{joinable::participants(count)};
        for (int input = 0; input <= comm.rank(); ++input) {
            if (count() != static_cast<float>(3 - input)) {
                is_right = false;
            }
        }
        if (guard.finish().rounds != 3) {
            is_right = false;
        }
    });
    return is_right;
}
