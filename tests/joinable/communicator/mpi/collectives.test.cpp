// SPDX-License-Identifier: BSL-1.0
// Every collective, dtype and operation over MPI against closed forms of what each rank gives.
#include <joinable/communicator/mpi/communicator.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <simulator/plans.hpp>
#include <support/closed_forms.hpp>
#include <support/further_types.hpp>
#include <support/mpi_ranks.hpp>

#include <joinable/algorithms.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/shared_buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::MpiCommunicator;
using joinable::ReduceOp;

static_assert(joinable::AllGathers<MpiCommunicator> && joinable::ReduceScatters<MpiCommunicator>);
static_assert(joinable::Reduces<MpiCommunicator> && joinable::AllToAlls<MpiCommunicator>);
static_assert(joinable::Gathers<MpiCommunicator> && joinable::Scatters<MpiCommunicator>);
static_assert(joinable::SendsAndReceives<MpiCommunicator> && joinable::Splits<MpiCommunicator>);
static_assert(joinable::Aborts<MpiCommunicator> && joinable::RenewsDeadline<MpiCommunicator>);
static_assert(joinable::ReportsMissing<MpiCommunicator> && joinable::SharesMemory<MpiCommunicator>);
static_assert(joinable::AllocatesArena<MpiCommunicator>);
static_assert(joinable::ScalesScatteredSums<MpiCommunicator>);

constexpr auto deadline = std::chrono::seconds{60};

using joinable::BFloat16;
using joinable::Half;

TEST_CASE("every collective over MPI gives every dtype what a serial program computes") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        closed_forms::check_all_dtypes(comm, {3});
        closed_forms::check_all<float>(comm, {0, 1, 1000});
    });
}

TEST_CASE("booleans, i16, u16 and complex numbers go over MPI, too") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) { check_further_types(comm); });
}

TEST_CASE("the least number is the minimum and the greatest is the maximum, signed or not") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        closed_forms::check_order_of_all_dtypes(comm);
    });
}

TEST_CASE("collectives that MPI compares first give the same") {
    run_mpi_ranks(
        {1, 2, 3, 4, 8},
        [](MpiCommunicator& comm) { closed_forms::check_all<Half, double>(comm, {0, 5}); },
        {.deadline = deadline, .check = true}
    );
}

TEST_CASE("counts above the most that MPI takes are cut, or described by types of their own") {
    for (std::size_t const most : {4U, 7U}) {
        run_mpi_ranks(
            {1, 2, 3, 4, 8},
            [](MpiCommunicator& comm) {
                closed_forms::check_all<Half, double, std::uint8_t>(comm, {1, 13});
            },
            {.deadline = deadline},
            {.most = most}
        );
    }
}

TEST_CASE("numbers of 16 bits are rounded once where they travel wide, and at each combination else"
) {
    for (bool const wide : {false, true}) {
        run_mpi_ranks(
            {2, 3, 4, 8},
            [&](MpiCommunicator& comm) {
                // 2048 + 1 is a tie that Half rounds to 2048: what is lost is lost each time, or not at all.
                std::vector<Half> halves(9, Half{comm.rank() == 0 ? 2048.0F : 1.0F});
                joinable::all_reduce(comm, halves).wait();
                auto const exact = static_cast<float>(2048 + comm.size() - 1);
                if (wide) {
                    CHECK(halves == std::vector<Half>(9, Half{exact}));
                } else if (comm.size() == 2) {
                    CHECK(halves == std::vector<Half>(9, Half{2048.0F}));
                } else { // by the order in which MPI combines them
                    CHECK(static_cast<float>(halves[0]) >= 2048.0F);
                    CHECK(static_cast<float>(halves[0]) <= exact + 1);
                }
                std::vector<BFloat16> in(
                    static_cast<std::size_t>(comm.size()),
                    BFloat16{comm.rank() == 0 ? 256.0F : 1.0F}
                );
                std::vector<BFloat16> out(1);
                joinable::reduce_scatter(comm, in, out).wait();
                if (wide) {
                    CHECK(out[0] == BFloat16{static_cast<float>(256 + comm.size() - 1)});
                }
            },
            {.deadline = deadline, .wide = wide}
        );
    }
}

TEST_CASE("many collectives of many sizes are in flight together, and are waited for in any order"
) {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        for (int turn = 0; turn < 3; ++turn) {
            std::vector<std::vector<double>> buffers;
            std::vector<joinable::MpiWork> works;
            for (std::size_t k = 0; k < 20; ++k) {
                buffers.emplace_back(1 + 97 * k, static_cast<double>(comm.rank() + 1));
            }
            for (auto& buffer : buffers) {
                works.push_back(joinable::all_reduce(comm, buffer));
            }
            for (std::size_t k = works.size(); k-- > 0;) {
                if (k % 2 == 0) {
                    works[k].wait();
                    works[k].wait();
                } else {
                    while (!works[k].test()) {
                    }
                }
                double const sum = comm.size() * (comm.size() + 1) / 2.0;
                CHECK(buffers[k] == std::vector<double>(buffers[k].size(), sum));
            }
        }
        comm.barrier();
    });
}

TEST_CASE("messages of one tag keep their order, and those of another one may pass them") {
    run_mpi_ranks({2, 3, 4, 8}, [](MpiCommunicator& comm) {
        int const next = (comm.rank() + 1) % comm.size();
        int const before = (comm.rank() + comm.size() - 1) % comm.size();
        std::vector<int> first{comm.rank(), 1};
        std::vector<int> second{comm.rank(), 2};
        std::vector<double> large(300'000, comm.rank());
        auto const send_large = joinable::send(comm, large, next, 5);
        joinable::send(comm, first, next).wait();
        joinable::send(comm, second, next).wait();
        std::vector<int> got(2);
        joinable::receive(comm, got, before).wait();
        CHECK(got == std::vector<int>{before, 1});
        joinable::receive(comm, got, before).wait();
        CHECK(got == std::vector<int>{before, 2});
        std::vector<double> got_large(large.size());
        joinable::receive(comm, got_large, before, 5).wait();
        CHECK(got_large == std::vector<double>(large.size(), before));
    });
}

TEST_CASE("all-reduces are made of messages over MPI, by every algorithm") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        for (joinable::AllReducePlan const& plan : all_plans(comm.size(), 4096)) {
            joinable::MessageCommunicator over{comm, {.plan = plan, .check = true}};
            std::vector<double> values(10'000, comm.rank() + 1);
            over.all_reduce({values.data(), values.size(), DType::f64}, ReduceOp::sum).wait();
            CHECK(values == std::vector<double>(10'000, comm.size() * (comm.size() + 1) / 2));
        }
    });
}

TEST_CASE("messages above the most that MPI takes are described by types of their own") {
    for (std::size_t const most : {4U, 7U, 64U}) {
        run_mpi_groups({1, 2, 3, 4, 8}, [&](MPI_Comm group) {
            MpiCommunicator comm{group, {.deadline = deadline}, {.most = most}};
            int const next = (comm.rank() + 1) % comm.size();
            int const before = (comm.rank() + comm.size() - 1) % comm.size();
            for (std::size_t const count : {0U, 1U, 2U, 13U, 5000U}) {
                CAPTURE(most);
                CAPTURE(count);
                std::vector<double> sent(count);
                std::iota(sent.begin(), sent.end(), comm.rank());
                std::vector<double> got(count);
                std::vector<double> expected(count);
                std::iota(expected.begin(), expected.end(), before);
                auto const sending = joinable::send(comm, sent, next);
                joinable::receive(comm, got, before).wait();
                CHECK(got == expected);
            }
            MPI_Barrier(group);     // or what follows may end a rank before it is here
            if (comm.rank() == 0) { // a message of another size is told of, too
                std::vector<double> got(comm.size() == 1 ? 3 : 4);
                std::vector<double> const sent(5);
                auto const sending = joinable::send(comm, sent, 0, 1);
                CHECK_THROWS_AS(joinable::receive(comm, got, 0, 1).wait(), joinable::Mismatch);
            } else {
                CHECK_THROWS_AS(comm.barrier(), joinable::Mismatch);
            }
        });
    }
}

TEST_CASE("a group that is split off has its ranks in the order of their keys") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        auto group = comm.split(comm.rank() % 2, -comm.rank());
        int const members = (comm.size() + 1 - comm.rank() % 2) / 2;
        CHECK(group.size() == members);
        CHECK(group.rank() == members - 1 - comm.rank() / 2);
        std::vector<int> sum{comm.rank()};
        joinable::all_reduce(group, sum).wait();
        int expected = 0;
        for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) {
            expected += rank;
        }
        CHECK(sum[0] == expected);
        auto inner = group.split(0, 0);
        inner.barrier();
        comm.barrier();
    });
}

TEST_CASE("ranks of one machine share memory, which all ranks see") {
    run_mpi_ranks({1, 2, 3, 4, 8}, [](MpiCommunicator& comm) {
        auto const slots =
            joinable::shared_buffer<int>(comm, static_cast<std::size_t>(comm.size()));
        CHECK(std::all_of(slots.begin(), slots.end(), [](int x) { return x == 0; }));
        comm.barrier();
        slots[static_cast<std::size_t>(comm.rank())] = comm.rank() + 1;
        comm.barrier();
        CHECK(
            std::accumulate(slots.begin(), slots.end(), 0) == comm.size() * (comm.size() + 1) / 2
        );
        if (comm.size() > 1) {
            CHECK_THROWS_AS(
                (void)joinable::shared_buffer<int>(comm, static_cast<std::size_t>(comm.rank())),
                joinable::Mismatch
            );
        }
    });
}

TEST_CASE("an arena outlives its communicator") {
    run_mpi_groups({1, 2}, [](MPI_Comm group) {
        joinable::Arena arena;
        {
            MpiCommunicator comm{group};
            arena = comm.allocate(100, 4096);
            CHECK(reinterpret_cast<std::uintptr_t>(arena.data()) % 4096 == 0);
            CHECK_THROWS_AS((void)comm.allocate(100, 3), joinable::ContractViolation);
            CHECK(comm.allocate(0).data() == nullptr);
        }
        CHECK(std::all_of(arena.data(), arena.data() + 100, [](std::byte b) {
            return b == std::byte{};
        }));
    });
}

TEST_CASE(
    "a handle that is given away is freed, one that is lent is not, and the engine's collectives never mix"
) {
    static int freed = 0; // communicators with an attribute of this key
    run_mpi_groups({1, 2, 3, 4}, [](MPI_Comm group) {
        freed = 0;
        int key = MPI_KEYVAL_INVALID;
        auto const count = [](MPI_Comm, int, void*, void*) {
            ++freed;
            return MPI_SUCCESS;
        };
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, count, &key, nullptr);
        MPI_Comm own = MPI_COMM_NULL;
        MPI_Comm_dup(group, &own);
        MPI_Comm_set_attr(own, key, nullptr);
        {
            auto comm = MpiCommunicator::from_native_handle(own);
            CHECK(comm.native_handle() == own);
            std::vector<int> ones{1};
            joinable::all_reduce(comm, ones).wait();
            CHECK(ones[0] == comm.size());
            CHECK(freed == 0);
        }
        CHECK(freed == 1);
        MPI_Comm_set_attr(group, key, nullptr);
        {
            MpiCommunicator comm{group};
            CHECK(comm.native_handle() != group);
            // Ranks post ours and the engine's in different orders.
            std::vector<int> ours{1};
            int theirs = 2;
            int sum = 0;
            MPI_Request request = MPI_REQUEST_NULL;
            auto const post_theirs = [&] {
                MPI_Iallreduce(&theirs, &sum, 1, MPI_INT, MPI_SUM, group, &request);
            };
            if (comm.rank() % 2 == 0) {
                post_theirs();
            }
            auto work = joinable::all_reduce(comm, ours);
            if (comm.rank() % 2 != 0) {
                post_theirs();
            }
            work.wait();
            MPI_Wait(&request, MPI_STATUS_IGNORE);
            CHECK(ours[0] == comm.size());
            CHECK(sum == 2 * comm.size());
        }
        CHECK(freed == 1);
        MPI_Comm_delete_attr(group, key);
        MPI_Comm_free_keyval(&key);
    });
}

TEST_CASE("wrong arguments are refused before anything moves") {
    run_mpi_ranks({1, 2, 4}, [](MpiCommunicator& comm) {
        std::vector<float> x(2);
        CHECK_THROWS_AS(
            (void)comm.broadcast({x.data(), 2, DType::f32}, comm.size()),
            joinable::ContractViolation
        );
        CHECK_THROWS_AS((void)comm.split(-1, 0), joinable::ContractViolation);
        CHECK_THROWS_AS(
            (void)comm.send({x.data(), 2, DType::f32}, 0, -1), joinable::ContractViolation
        );
        comm.barrier();
        CHECK(!comm.is_aborted());
    });
    CHECK_THROWS_AS(MpiCommunicator{MPI_COMM_NULL}, joinable::ContractViolation);
}

} // namespace
