// SPDX-License-Identifier: BSL-1.0
// JOINABLE_CHECK=collectives: communicators that compare collectives only if asked.
#include <joinable/detail/requested_checks.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/environment_variable.hpp>
#include <support/machines.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/algorithms/communicator.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/error.hpp>

namespace {

using namespace joinable_tests;
using joinable::Mismatch;

/// What the last rank's sum of one element less makes all ranks throw.
template <class Comm>
void check_compared(Comm& comm) {
    int const last = comm.size() - 1;
    std::vector<float> values(10, 1.0F);
    auto const count = static_cast<std::size_t>(comm.rank() == last ? 9 : 10);
    std::string text = "nothing";
    try {
        comm.all_reduce({values.data(), count, joinable::DType::f32}, joinable::ReduceOp::sum)
            .wait();
    } catch (Mismatch const& error) {
        CHECK(error.ranks() == std::vector{last});
        text = error.what();
    }
    CHECK(
        text == "ranks run different collectives: rank 0 all_reduce of 10 f32 with sum, rank " +
                    std::to_string(last) + " all_reduce of 9 f32 with sum"
    );
    CHECK(values == std::vector<float>(10, 1.0F)); // before data moves
}

TEST_CASE("JOINABLE_CHECK=collectives makes ranks of several machines compare collectives") {
    EnvironmentVariable const set{"JOINABLE_CHECK", "ready,collectives"};
    for (auto const& sizes : {std::vector{2, 2}, std::vector{1, 3}, std::vector{3, 1}}) {
        run_machines(sizes, [](ThreadMachines& comm) { check_compared(comm); });
    }
}

TEST_CASE("JOINABLE_CHECK=collectives makes collectives of messages compare") {
    EnvironmentVariable const set{"JOINABLE_CHECK", "collectives"};
    for (int const ranks : {2, 3, 4, 8}) {
        joinable::run_threads(ranks, [](joinable::ThreadCommunicator& comm) {
            joinable::MessageCommunicator over{comm};
            check_compared(over);
        });
    }
}

TEST_CASE("communicators refuse an unknown word in JOINABLE_CHECK") {
    EnvironmentVariable const set{"JOINABLE_CHECK", "collective"};
    std::string const text =
        "expected words of collectives, ready and replicas in JOINABLE_CHECK, with commas between "
        "them, but found \"collective\"";
    on_machines({2, 1}, [&](OnMachine place) {
        CHECK_THROWS_WITH_AS(
            static_cast<void>(joinable::HierarchicalCommunicator{place.local, place.across}),
            text.c_str(),
            joinable::ContractViolation
        );
    });
    joinable::run_threads(2, [&](joinable::ThreadCommunicator& comm) {
        CHECK_THROWS_WITH_AS(
            static_cast<void>(joinable::MessageCommunicator{comm}),
            text.c_str(),
            joinable::ContractViolation
        );
    });
}

} // namespace
