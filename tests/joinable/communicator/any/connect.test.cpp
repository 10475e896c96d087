// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/any/connect.hpp>

#include <cstdint>
#include <cstdlib>
#include <string>

#include <doctest/doctest.h>
#include <support/named_ranks.hpp>
#include <support/thrown_by.hpp>

#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/tcp.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::ProcessCommunicator;
using joinable::TcpCommunicator;

void set(char const* name, std::string const& value) {
    REQUIRE(setenv(name, value.c_str(), 1) == 0);
}

TEST_CASE("ranks meet by the transport of a name, or by the first that was launched") {
    for (std::string const name : {"", "processes"}) {
        for (int const world : {1, 2, 3, 4, 8}) {
            std::string const job = fresh_job();
            Processes processes;
            for (int rank = 0; rank < world; ++rank) {
                processes.start([&] {
                    set("JOINABLE_RANK", std::to_string(rank));
                    set("JOINABLE_WORLD_SIZE", std::to_string(world));
                    set("JOINABLE_JOB", job);
                    // TCP comes first, but nobody says where rank 0 is.
                    auto comm = joinable::connect<TcpCommunicator, ProcessCommunicator>(name);
                    CHECK(comm.transport() == "processes");
                    CHECK(comm.rank() == rank);
                    std::int64_t sum = 1;
                    comm.all_reduce({&sum, 1, joinable::DType::i64}, joinable::ReduceOp::sum)
                        .wait();
                    CHECK(sum == world);
                });
            }
            for (int rank = 0; rank < world; ++rank) {
                CHECK(processes.wait() == 0);
            }
        }
    }
}

TEST_CASE("a transport is launched only if its launcher says what it needs") {
    Processes processes;
    processes.start([] {
        CHECK_FALSE(ProcessCommunicator::is_launched());
        CHECK_FALSE(TcpCommunicator::is_launched());
        set("JOINABLE_ADDR", "127.0.0.1");
        CHECK_FALSE(TcpCommunicator::is_launched());
        set("RANK", "0");
        set("WORLD_SIZE", "2");
        set("MASTER_PORT", "1");
        set("MASTER_ADDR", "127.0.0.1");
        CHECK(TcpCommunicator::is_launched());
        CHECK(ProcessCommunicator::is_launched());
        set("LOCAL_WORLD_SIZE", "1"); // the other rank is on another machine
        CHECK(TcpCommunicator::is_launched());
        CHECK_FALSE(ProcessCommunicator::is_launched());
        auto const error = thrown_by<ContractViolation>([] {
            static_cast<void>(joinable::connect<ProcessCommunicator>());
        });
        CHECK(std::string{error.what()}.starts_with(
            "expected that a launcher of one of these transports started this process: processes; "
        ));
    });
    CHECK(processes.wait() == 0);
}

TEST_CASE("a name that none of the transports has is refused with theirs") {
    auto const error = thrown_by<ContractViolation>([] {
        static_cast<void>(joinable::connect<TcpCommunicator, ProcessCommunicator>("nccl"));
    });
    CHECK(
        std::string{error.what()} ==
        "expected the name of one of these transports: tcp, processes; given \"nccl\""
    );
}

} // namespace
