// SPDX-License-Identifier: BSL-1.0
// Counts that do not fit into an int, for real: other tests lower the limit. These need memory, so they run only when
// they are asked for, with two ranks:
//
//   mpirun -n 2 test_openmpi --no-skip --test-case="more elements than an int*"
//
// On two busy cores that took 137 s and 8 GB over Open MPI 4.1.4, 86 s and 11 GB over MPICH 4.0.2.
#include <joinable/communicator/mpi/communicator.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include <doctest/doctest.h>
#include <support/mpi_ranks.hpp>

#include <joinable/device/arena.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::Arena;
using joinable::Buffer;
using joinable::DType;
using joinable::MpiCommunicator;
using joinable::ReduceOp;

constexpr std::size_t block = 4096;
constexpr std::size_t half = (std::size_t{1} << 30U) + block;
constexpr std::size_t count = 2 * half; // an int counts to 2 * 2^30 - 1

/// What a rank has in a block of its buffer. The next block has another number, and sums of two ranks fit.
int number_of(int rank, std::size_t at) {
    return 1 + static_cast<int>(at / block % (rank == 0 ? 101 : 97));
}
/// Calls f(at, n) for each block and what is left after the last one.
template <class F>
void in_blocks(std::size_t whole, F const& f) {
    for (std::size_t at = 0; at < whole; at += block) {
        f(at, (std::min)(block, whole - at));
    }
}

/// The numbers of a rank, or zeros, in memory that MPI uses in place.
class Numbers {
public:
    Numbers(MpiCommunicator& comm, std::size_t size)
        : arena_{comm.allocate(size)}, buffer_{arena_.data(), size, DType::u8} {}
    Numbers(MpiCommunicator& comm, std::size_t size, int rank) : Numbers{comm, size} {
        in_blocks(size, [&](std::size_t at, std::size_t n) {
            std::memset(arena_.data() + at, number_of(rank, at), n);
        });
    }

    [[nodiscard]] Buffer buffer() const { return buffer_; }
    /// Whether each element from `begin` on is the number that `expected` gives for its place after `begin`.
    [[nodiscard]] bool
    are(std::function<int(std::size_t)> const& expected, std::size_t begin, std::size_t size
    ) const {
        bool are_right = true;
        std::array<std::byte, block> right{};
        in_blocks(size, [&](std::size_t at, std::size_t n) {
            std::memset(right.data(), expected(at), n);
            are_right = are_right && std::memcmp(arena_.data() + begin + at, right.data(), n) == 0;
        });
        return are_right;
    }
    [[nodiscard]] bool are(std::function<int(std::size_t)> const& expected) const {
        return are(expected, 0, buffer_.count);
    }

private:
    Arena arena_;
    Buffer buffer_;
};

int of_first(std::size_t at) {
    return number_of(0, at);
}
int of_second(std::size_t at) {
    return number_of(1, at);
}
int sum_of_both(std::size_t at) {
    return of_first(at) + of_second(at);
}

TEST_CASE(
    "more elements than an int counts are summed, broadcast, exchanged and sent" * doctest::skip()
) {
    REQUIRE(mpi_world_size() >= 2);
    joinable::MpiOptions const options{.deadline = std::chrono::minutes{4}};
    auto const run = [&](std::function<void(MpiCommunicator&)> const& body) {
        run_mpi_ranks({2}, body, options);
    };
    run([](MpiCommunicator& comm) {
        Numbers const numbers{comm, count, comm.rank()};
        comm.all_reduce(numbers.buffer(), ReduceOp::sum).wait();
        CHECK(numbers.are(&sum_of_both));
    });
    run([](MpiCommunicator& comm) {
        Numbers const numbers{comm, count, comm.rank()};
        comm.broadcast(numbers.buffer(), 1).wait();
        CHECK(numbers.are(&of_second));
    });
    run([](MpiCommunicator& comm) { // each half fits
        Numbers const in{comm, half, comm.rank()};
        Numbers const out{comm, count};
        comm.all_gather(in.buffer(), out.buffer()).wait();
        CHECK(out.are(&of_first, 0, half));
        CHECK(out.are(&of_second, half, half));
    });
    run([](MpiCommunicator& comm) { // no part of rank 0 fits, and no place of rank 1
        std::array<std::size_t, 2> const counts{count, 3};
        Numbers const in{comm, counts[static_cast<std::size_t>(comm.rank())], comm.rank()};
        Numbers const out{comm, count + 3};
        comm.all_gather(in.buffer(), out.buffer(), counts).wait();
        CHECK(out.are(&of_first, 0, count));
        CHECK(out.are(&of_second, count, 3));
    });
    run([](MpiCommunicator& comm) {
        bool const is_first = comm.rank() == 0;
        using Counts = std::array<std::size_t, 2>;
        Counts const sends = is_first ? Counts{count, 5} : Counts{block, 9};
        Counts const expects = is_first ? Counts{count, block} : Counts{5, 9};
        Numbers const in{comm, sends[0] + sends[1], comm.rank()};
        Numbers const out{comm, expects[0] + expects[1]};
        comm.all_to_all(in.buffer(), out.buffer(), sends, expects).wait();
        auto const from_first = [&](std::size_t at) {
            return of_first(is_first ? at : count + at);
        };
        auto const from_second = [&](std::size_t at) {
            return of_second(is_first ? at : block + at);
        };
        CHECK(out.are(from_first, 0, expects[0]));
        CHECK(out.are(from_second, expects[0], expects[1]));
    });
    run([](MpiCommunicator& comm) {
        Numbers const in{comm, count, comm.rank()};
        Numbers const out{comm, half};
        comm.reduce_scatter(in.buffer(), out.buffer(), ReduceOp::sum).wait();
        std::size_t const begin = comm.rank() == 0 ? 0 : half;
        CHECK(out.are([&](std::size_t at) { return sum_of_both(begin + at); }));
    });
    run([](MpiCommunicator& comm) {
        Numbers const numbers{comm, count, comm.rank()};
        if (comm.rank() == 0) {
            comm.send(numbers.buffer(), 1).wait();
        } else {
            comm.receive(numbers.buffer(), 0).wait();
        }
        CHECK(numbers.are(&of_first));
    });
}

} // namespace
