// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/memory.hpp>
#include <support/house_communicator.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/any_communicator.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/hierarchical.hpp>

namespace {

using namespace joinable_tests;
using doctest::Contains;
using joinable::NcclCommunicator;
using joinable::NcclCommunicatorRef;
using joinable::ReduceOp;

/// What an engine has: a communicator of NCCL, and a stream.
class Engine {
public:
    Engine(ncclUniqueId id, int size, int rank, bool is_blocking) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = is_blocking ? 1 : 0;
        ncclCommInitRankConfig(&comm, size, id, rank, &config);
        ncclResult_t state = ncclInProgress;
        while (!is_blocking && state == ncclInProgress) {
            ncclCommGetAsyncError(comm, &state);
        }
    }
    Engine(Engine const&) = delete;
    Engine& operator=(Engine const&) = delete;
    ~Engine() {
        if (comm != nullptr) {
            ncclCommDestroy(comm);
        }
    }

    ncclComm_t comm = nullptr;
    Stream stream;
};

/// Runs `body(hosts, engine)` over ranks with engines.
template <class Body>
void run_engines(std::initializer_list<int> sizes, bool is_blocking, Body const& body) {
    for (int const size : sizes) {
        ncclUniqueId id{};
        ncclGetUniqueId(&id);
        run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
            cuda(cudaSetDevice(hosts.rank()));
            Engine engine{id, hosts.size(), hosts.rank(), is_blocking};
            body(hosts, engine);
        });
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an engine's communicator and stream are lent, and its own afterwards") {
    run_engines({1, 2, 3, 8}, false, [](joinable::ThreadCommunicator& hosts, Engine& engine) {
        DeviceArray<int> const data{{hosts.rank(), 1}, engine.stream};
        for (int turn = 0; turn < 2; ++turn) {
            NcclCommunicatorRef comm{hosts, engine.comm, engine.stream};
            CHECK(comm.stream() == engine.stream);
            CHECK(comm.native_handle() == engine.comm);
            comm.all_reduce(data.buffer(), ReduceOp::max).wait();
            CHECK(data.read(comm, engine.stream) == std::vector{hosts.size() - 1, 1});
        }
        // The engine goes on with it.
        int ranks = 0;
        CHECK(ncclCommCount(engine.comm, &ranks) == ncclSuccess);
        CHECK(ranks == hosts.size());
    });
}

TEST_CASE("a lent communicator has no windows when its owner has it back, but after a revocation") {
    run_engines({1, 2, 4}, false, [](joinable::ThreadCommunicator& hosts, Engine& engine) {
        joinable::Arena arena;
        {
            NcclCommunicatorRef comm{hosts, engine.comm, engine.stream};
            arena = comm.allocate(64);
            CHECK(comm.register_arena(arena));
            comm.all_reduce({arena.data(), 16, joinable::DType::f32}, ReduceOp::sum).wait();
        }
        hosts.barrier();
        CHECK(fake_nccl::live_registrations() == 0); // so the fake lets the engine destroy it
    });
    CHECK(fake_nccl::live_memory() == 0);
}

TEST_CASE("data of another stream goes through a lent communicator") {
    run_engines({2}, false, [](joinable::ThreadCommunicator& hosts, Engine& engine) {
        Stream const compute;
        NcclCommunicatorRef comm{
            hosts, engine.comm, engine.stream, {.stream = static_cast<cudaStream_t>(compute)}
        };
        DeviceArray<int> const data{{hosts.rank() + 1}, compute};
        comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
        CHECK(data.read(comm, compute) == std::vector{3});
    });
}

TEST_CASE("a blocking communicator is refused on all ranks, and stays the engine's") {
    run_engines({1, 3}, true, [](joinable::ThreadCommunicator& hosts, Engine& engine) {
        CHECK_THROWS_WITH_AS(
            (NcclCommunicatorRef{hosts, engine.comm, engine.stream}),
            Contains("make the lent one by ncclCommInitRankConfig with config.blocking = 0"),
            joinable::ContractViolation
        );
        CHECK_FALSE(hosts.is_aborted());
        hosts.barrier();
    });
}

TEST_CASE("a communicator that is blocking on one rank is refused on all, without waiting for it") {
    ncclUniqueId id{};
    ncclGetUniqueId(&id);
    run_ranks({3}, [&](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        bool const is_blocking = hosts.rank() == 1;
        Engine engine{id, hosts.size(), hosts.rank(), is_blocking};
        if (is_blocking) {
            CHECK_THROWS_WITH_AS(
                (NcclCommunicatorRef{hosts, engine.comm, engine.stream}),
                Contains("the NCCL communicator is blocking"),
                joinable::ContractViolation
            );
        } else {
            CHECK_THROWS_WITH_AS(
                (NcclCommunicatorRef{hosts, engine.comm, engine.stream}),
                Contains("rank 1 failed: the NCCL communicator is"),
                joinable::PeerFailed
            );
        }
        CHECK_FALSE(hosts.is_aborted());
        hosts.barrier();
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a communicator that the environment makes blocking is refused, own or lent") {
    for (bool const is_own : {false, true}) {
        ncclUniqueId id{};
        ncclGetUniqueId(&id);
        run_ranks({1, 2}, [&](joinable::ThreadCommunicator& hosts) {
            cuda(cudaSetDevice(hosts.rank()));
            if (hosts.rank() == 0) {
                ncclGetUniqueId(&id);
                fake_nccl::force_blocking(1);
            }
            hosts.barrier();
            auto const make = [&] {
                if (is_own) {
                    NcclCommunicator{hosts};
                } else {
                    Engine engine{id, hosts.size(), hosts.rank(), false};
                    NcclCommunicatorRef{hosts, engine.comm, engine.stream};
                }
            };
            CHECK_THROWS_WITH_AS(
                make(), Contains("NCCL_COMM_BLOCKING"), joinable::ContractViolation
            );
            CHECK_FALSE(hosts.is_aborted());
            hosts.barrier();
        });
        fake_nccl::force_blocking(-1);
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("what is lent must fit the control communicator") {
    run_engines({2}, false, [](joinable::ThreadCommunicator& hosts, Engine& engine) {
        auto const refused = [&](ncclComm_t comm, auto& control, char const* text) {
            CHECK_THROWS_WITH_AS(
                (NcclCommunicatorRef{control, comm, engine.stream}),
                Contains(text),
                joinable::ContractViolation
            );
        };
        refused(nullptr, hosts, "was given a null pointer");
        joinable::SelfCommunicator alone;
        refused(
            engine.comm, alone, hosts.rank() == 0 ? "number of ranks 2, but 1" : "rank 1, but 0"
        );
        cuda(cudaSetDevice(5));
        refused(engine.comm, hosts, "but 5 was expected");
        cuda(cudaSetDevice(hosts.rank()));

        // On one rank only: the others are told.
        if (hosts.rank() == 1) {
            refused(nullptr, hosts, "was given a null pointer");
        } else {
            CHECK_THROWS_WITH_AS(
                (NcclCommunicatorRef{hosts, engine.comm, engine.stream}),
                Contains("rank 1 failed: an NCCL communicator is lent"),
                joinable::PeerFailed
            );
        }
        CHECK_FALSE(hosts.is_aborted());
        NcclCommunicatorRef const comm{hosts, engine.comm, engine.stream}; // it is still good
    });
}

TEST_CASE("what NCCL does not say of a lent communicator is told on all ranks") {
    for (char const* const call : {"ncclCommUserRank", "ncclCommCount", "ncclCommCuDevice"}) {
        std::string const text = std::string{call} + " failed: unhandled system error";
        run_engines({1, 2, 3}, false, [&](joinable::ThreadCommunicator& hosts, Engine& engine) {
            auto const lend = [&] { NcclCommunicatorRef{hosts, engine.comm, engine.stream}; };
            if (hosts.rank() == hosts.size() - 1) {
                fake_nccl::fail_next(call, ncclSystemError);
                CHECK_THROWS_WITH_AS(lend(), Contains(text.c_str()), joinable::CommunicationError);
            } else {
                CHECK_THROWS_WITH_AS(lend(), Contains(text.c_str()), joinable::PeerFailed);
            }
            CHECK_FALSE(hosts.is_aborted());
            lend(); // it is still good
        });
    }
}

TEST_CASE("a communicator that is in an error state is not taken") {
    run_engines({2}, false, [](joinable::ThreadCommunicator& hosts, Engine& engine) {
        if (hosts.rank() == 0) {
            fake_nccl::fail_async(engine.comm, ncclSystemError, "link down");
        }
        CHECK_THROWS_WITH_AS(
            (NcclCommunicatorRef{hosts, engine.comm, engine.stream}),
            "rank 0: an asynchronous error while it waits for what NCCL does with the "
            "communicator: unhandled system error (run with NCCL_DEBUG=INFO for "
            "details): link down",
            joinable::CommunicationError
        );
        engine.comm = nullptr; // aborted, on all ranks
    });
}

TEST_CASE("a lent handle is freed by an abort") {
    Meeting begun{2};
    run_engines({2}, false, [&](joinable::ThreadCommunicator& hosts, Engine& engine) {
        NcclCommunicatorRef comm{
            hosts, engine.comm, engine.stream, {.deadline = std::chrono::seconds{60}}
        };
        begun.meet();
        DeviceArray<int> const data{{1}, engine.stream};
        if (hosts.rank() == 0) {
            comm.set_deadline(std::chrono::milliseconds{300});
            CHECK_THROWS_AS(
                comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize(), joinable::TimedOut
            );
        } else {
            CHECK_THROWS_AS(hosts.barrier(), joinable::TimedOut);
            CHECK_THROWS_AS(comm.barrier(), joinable::TimedOut);
        }
        CHECK(comm.is_aborted());
        CHECK(comm.native_handle() == nullptr);
        engine.comm = nullptr;
        cuda(cudaStreamSynchronize(engine.stream));
    });
}

TEST_CASE("who gives a lent communicator back learns whether another rank has ended it meanwhile") {
    for (bool const fails : {false, true}) {
        std::atomic<bool> has_asked{false};
        run_engines({2}, false, [&](joinable::ThreadCommunicator& hosts, Engine& engine) {
            NcclCommunicatorRef comm{hosts, engine.comm, engine.stream};
            if (hosts.rank() == 0) {
                CHECK_FALSE(comm.is_aborted()); // which may be different a moment later
                has_asked = true;
            } else {
                wait_until(has_asked, true);
                if (fails) {
                    comm.abort({joinable::FailureKind::peer_failed, {1}, "enough"});
                }
            }
            ncclComm_t const lent = std::exchange(engine.comm, comm.give_back());
            CHECK(engine.comm == (fails ? nullptr : lent));
        });
    }
}

TEST_CASE("an exception that leaves the scope of a lent communicator aborts it") {
    Meeting begun{2};
    auto const run = [&] {
        run_engines({2}, false, [&](joinable::ThreadCommunicator& hosts, Engine& engine) {
            struct Gone {
                Engine& engine;
                ~Gone() { engine.comm = nullptr; }
            } const gone{engine};
            NcclCommunicatorRef comm{hosts, engine.comm, engine.stream};
            begun.meet();
            if (hosts.rank() == 1) {
                throw std::runtime_error{"no more"};
            }
            CHECK_THROWS_WITH_AS(
                comm.barrier(),
                "rank 1 failed: an exception left the scope of its communicator",
                joinable::PeerFailed
            );
        });
    };
    CHECK_THROWS_WITH_AS(run(), "no more", std::runtime_error);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("groups of ranks are split off, in the order of their keys") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        int const color = comm.rank() % 2;
        auto group = comm.split(color, -comm.rank());
        int const members = (comm.size() + 1 - color) / 2;
        CHECK(group.size() == members);
        CHECK(group.rank() == members - 1 - comm.rank() / 2);
        CHECK(group.device() == comm.device());
        DeviceArray<int> const ours{{comm.rank()}, stream};
        DeviceArray<int> const all{{comm.rank()}, stream};
        auto work = group.all_reduce(ours.buffer(), ReduceOp::sum);
        comm.all_reduce(all.buffer(), ReduceOp::sum).wait();
        work.wait();
        CHECK(ours.read(group, stream) == std::vector{members * (members - 1) + members * color});
        CHECK(all.read(comm, stream) == std::vector{comm.size() * (comm.size() - 1) / 2});
        group.barrier();
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an abort reaches the groups that were split off, not the other way round") {
    Meeting split{4};
    run_nccl_ranks({4}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<int> const data{{1}, stream};
        {
            auto group = comm.split(comm.rank() / 2, 0);
            split.meet();
            if (comm.rank() == 0) {
                group.abort({joinable::FailureKind::peer_failed, {0}, "a group ends"});
            }
            if (comm.rank() < 2) {
                CHECK_THROWS_WITH_AS(
                    group.all_reduce(data.buffer(), ReduceOp::sum).synchronize(),
                    "a group ends",
                    joinable::PeerFailed
                );
            } else {
                group.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
            }
        }
        comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
        auto group = comm.split(0, 0);
        split.meet();
        if (comm.rank() == 3) {
            comm.abort({joinable::FailureKind::peer_failed, {3}, "all end"});
        }
        CHECK_THROWS_WITH_AS(
            for (;;) { group.all_reduce(data.buffer(), ReduceOp::sum).synchronize(); },
            "all end",
            joinable::PeerFailed
        );
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

/// A control communicator that cannot split.
class Whole : public joinable::SelfCommunicator {};

TEST_CASE("a control communicator that cannot split is said to be why") {
    Whole hosts;
    NcclCommunicator comm{hosts};
    CHECK_FALSE(comm.can_split());
    CHECK_THROWS_WITH_AS(
        static_cast<void>(comm.split(0, 0)),
        Contains("use one that models Splits"),
        joinable::ContractViolation
    );
}

/// One that has deadlines, and cannot split.
class WithDeadline : public HouseCommunicator {
public:
    using HouseCommunicator::HouseCommunicator;
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        return inner_.set_deadline(deadline);
    }
};

TEST_CASE(
    "a control communicator whose transport has no split() and no deadlines is used for what it has"
) {
    run_ranks({2, 4}, [](joinable::ThreadCommunicator& threads) {
        HouseCommunicator house{threads};
        auto const is_used = [](auto& hosts) {
            NcclCommunicator comm{hosts};
            comm.barrier();
            CHECK_FALSE(comm.can_split());
            CHECK_FALSE(joinable::BasicAnyCommunicator<joinable::CudaDevice>{comm}.can_split());
            CHECK_THROWS_WITH_AS(
                static_cast<void>(comm.split(0, 0)),
                Contains("or its transport has none"),
                joinable::ContractViolation
            );
            comm.barrier();
        };
        joinable::AnyCommunicator hosts{house};
        is_used(hosts);
        joinable::SelfCommunicator alone;
        WithDeadline leaders{threads};
        joinable::HierarchicalCommunicator machines{alone, &leaders}; // whose type has split()
        is_used(machines);
    });
}

TEST_CASE("ranks find each other and their devices from their environment") {
    for (int const devices : {8, 2}) {
        fake_cuda::set_device_count(devices);
        std::string const job =
            "nccl test " + std::to_string(getpid()) + " " + std::to_string(devices);
        run_ranks({1, 4}, [&](joinable::ThreadCommunicator& threads) {
            // The ranks of a launcher are processes; these are threads, which may attach as well.
            auto comm = NcclCommunicator::from_environment([&] {
                return joinable::ProcessCommunicator::attach(
                    {threads.rank(), threads.size(), job, std::chrono::seconds{50}}
                );
            });
            CHECK(comm.size() == threads.size());
            CHECK(comm.device() == threads.rank() % devices);
            int current = -1;
            cuda(cudaGetDevice(&current));
            CHECK(current == comm.device());
            Stream const stream;
            comm.set_stream(stream);
            DeviceArray<int> const data{{comm.rank()}, stream};
            comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
            CHECK(data.read(comm, stream) == std::vector{comm.size() * (comm.size() - 1) / 2});
            auto group = comm.split(0, 0);
            group.barrier();
            threads.barrier();
        });
    }
    fake_cuda::set_device_count(8);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a launcher's single rank needs nothing but its variables") {
    std::string const job = "nccl alone " + std::to_string(getpid());
    setenv("JOINABLE_RANK", "0", 1);
    setenv("JOINABLE_WORLD_SIZE", "1", 1);
    setenv("JOINABLE_JOB", job.c_str(), 1);
    {
        auto const comm = NcclCommunicator::from_environment({.device = 3});
        CHECK(comm.size() == 1);
        CHECK(comm.device() == 3);
    }
    unsetenv("JOINABLE_WORLD_SIZE");
    CHECK_THROWS_WITH_AS(
        static_cast<void>(NcclCommunicator::from_environment()),
        Contains("JOINABLE_WORLD_SIZE was expected"),
        joinable::ContractViolation
    );
    unsetenv("JOINABLE_RANK");
    unsetenv("JOINABLE_JOB");
    cuda(cudaSetDevice(0));
}

} // namespace
