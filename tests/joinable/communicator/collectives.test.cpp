// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/collectives.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/tensor/strided_view.hpp>

namespace {

using namespace joinable_tests;

template <class Comm>
void check_collectives(Comm& comm) {
    auto const world = static_cast<std::size_t>(comm.size());
    std::array<double, 3> array{1, 2, 3};
    joinable::all_reduce(comm, array).wait();
    CHECK(array[2] == 3.0 * comm.size());
    std::vector<int> ranks{comm.rank(), comm.rank()};
    joinable::all_reduce(comm, std::span{ranks}, joinable::ReduceOp::max).wait();
    CHECK(ranks == std::vector<int>(2, comm.size() - 1));
    ranks.assign(2, comm.rank());
    std::vector<int> all(2 * world);
    joinable::all_gather(comm, ranks, all).wait();
    CHECK(all.back() == comm.size() - 1);
    joinable::reduce_scatter(comm, all, ranks).wait();
    CHECK(ranks == std::vector<int>(2, comm.rank() * comm.size()));
    joinable::broadcast(comm, ranks, 0).wait();
    CHECK(ranks == std::vector<int>{0, 0});

    auto const column = joinable::as_strided(all, {world}, {2});
    if (world > 1) {
        CHECK_THROWS_AS((void)joinable::all_reduce(comm, column), joinable::ContractViolation);
    }
    std::vector<int> one_more(2 * world + 1);
    CHECK_THROWS_AS((void)joinable::all_gather(comm, ranks, one_more), joinable::ContractViolation);
    comm.barrier();
}

TEST_CASE("collectives take any contiguous tensor") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_collectives(comm); });
}

TEST_CASE("a single rank runs the same code") {
    joinable::SelfCommunicator comm;
    check_collectives(comm);
    comm.abort({joinable::FailureKind::peer_failed, {0}, "enough"});
    CHECK(comm.is_spent());
    CHECK_THROWS_WITH_AS(comm.barrier(), "enough", joinable::PeerFailed);
}

TEST_CASE("a single rank refuses what several would refuse") {
    joinable::SelfCommunicator comm;
    std::vector<float> values(2);
    CHECK_THROWS_AS((void)joinable::broadcast(comm, values, 1), joinable::ContractViolation);
    CHECK_THROWS_AS(
        (void)joinable::all_reduce(comm, values, joinable::ReduceOp::bit_and),
        joinable::ContractViolation
    );
    std::vector<float> more(3);
    CHECK_THROWS_AS((void)joinable::all_gather(comm, values, more), joinable::ContractViolation);
}

} // namespace
