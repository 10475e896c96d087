// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/collectives.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <support/further_types.hpp>
#include <support/process_ranks.hpp>
#include <support/repeating.hpp>

#include <joinable/communicator/self.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
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

TEST_CASE("booleans, i16, u16 and complex numbers are moved, and reduced where ReduceOp says so") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) { joinable_tests::check_further_types(comm); });
}

TEST_CASE("collectives take any contiguous tensor") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_collectives(comm); });
}

/// All at once, of the sizes around which a message takes another way, each with sums of its own.
template <class Comm>
void check_sizes(Comm& comm) {
    std::vector<std::size_t> sizes;
    for (std::size_t const edge : {0U, 56U, 64U, 2048U, 65536U, 262144U}) {
        for (std::size_t const near : {edge - 3, edge - 1, edge, edge + 1, edge + 3}) {
            if (near <= edge + 3) { // not below 0
                sizes.push_back(near);
            }
        }
    }
    auto const value = [](std::size_t size, std::size_t i, int rank) {
        return static_cast<std::uint8_t>(size + 3 * i + static_cast<std::size_t>(rank) * 7);
    };
    std::vector<std::vector<std::uint8_t>> data;
    for (std::size_t const size : sizes) {
        data.push_back(repeating<std::uint8_t>(256, size, [&](std::size_t i) {
            return value(size, i, comm.rank());
        }));
    }
    auto const buffer = [&](std::size_t k) {
        return joinable::Buffer{data[k].data(), sizes[k], joinable::DType::u8};
    };
    using Work = decltype(comm.all_reduce(buffer(0), joinable::ReduceOp::sum));
    std::vector<Work> works;
    int const root = comm.size() - 1;
    auto const op = [](std::size_t k) {
        return k % 3 == 1 ? joinable::ReduceOp::bit_or : joinable::ReduceOp::sum;
    };
    for (std::size_t k = 0; k < sizes.size(); ++k) {
        works.push_back(
            k % 3 == 2 ? comm.broadcast(buffer(k), root) : comm.all_reduce(buffer(k), op(k))
        );
    }
    for (std::size_t k = sizes.size(); k-- > 0;) { // not in their order
        works[k].wait();
    }
    for (std::size_t k = 0; k < sizes.size(); ++k) {
        auto const expected = repeating<std::uint8_t>(256, sizes[k], [&](std::size_t i) {
            std::uint8_t result = value(sizes[k], i, k % 3 == 2 ? root : 0);
            for (int rank = 1; k % 3 != 2 && rank < comm.size(); ++rank) {
                std::uint8_t const next = value(sizes[k], i, rank);
                result = static_cast<std::uint8_t>(
                    op(k) == joinable::ReduceOp::sum ? result + next : result | next
                );
            }
            return result;
        });
        CAPTURE(sizes[k]);
        CHECK(data[k] == expected);
    }
}

TEST_CASE("messages of every size class are right, many at once and finished in any order") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_sizes(comm); });
}

TEST_CASE("tensors on a device are refused over a communicator of host memory before data moves") {
    run_all_ranks({1, 2}, [](auto& comm) {
        auto const world = static_cast<std::size_t>(comm.size());
        std::vector<float> host(4, 1.0F);
        std::vector<float> more(4 * world);
        auto const on_device = [](std::vector<float>& memory) {
            return joinable::AnyView{
                memory.data(),
                joinable::DType::f32,
                {memory.size()},
                {1},
                {joinable::DeviceKind::cuda, 1}
            };
        };
        auto const is_refused = [](auto const& call) {
            CHECK_THROWS_WITH_AS(
                call(),
                "a tensor is on CUDA device 1, but the communicator of its collective moves memory of the "
                "host; give a communicator of its device",
                joinable::ContractViolation
            );
        };
        auto const one = on_device(host);
        auto const all = on_device(more);
        is_refused([&] { (void)joinable::all_reduce(comm, one); });
        is_refused([&] { (void)joinable::broadcast(comm, one, 0); });
        is_refused([&] { (void)joinable::reduce(comm, one, joinable::ReduceOp::sum, 0); });
        is_refused([&] { (void)joinable::all_gather(comm, one, more); });
        is_refused([&] { (void)joinable::all_gather(comm, host, all); });
        is_refused([&] { (void)joinable::reduce_scatter(comm, all, host); });
        is_refused([&] { (void)joinable::gather(comm, one, more, 0); });
        is_refused([&] { (void)joinable::scatter(comm, more, one, 0); });
        is_refused([&] { (void)joinable::all_to_all(comm, all, more); });
        if constexpr (joinable::SendsAndReceives<decltype(comm)>) {
            is_refused([&] { (void)joinable::send(comm, one, 0); });
            is_refused([&] { (void)joinable::receive(comm, one, 0); });
        }
        joinable::all_reduce(comm, host).wait(); // no rank has begun any of them
        CHECK(host == std::vector<float>(4, static_cast<float>(world)));
    });
}

TEST_CASE("a single rank runs the same code") {
    joinable::SelfCommunicator comm;
    check_collectives(comm);
    check_sizes(comm);
    comm.abort({joinable::FailureKind::peer_failed, {0}, "enough"});
    CHECK(comm.is_aborted());
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
