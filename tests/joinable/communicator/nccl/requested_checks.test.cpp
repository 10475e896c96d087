// SPDX-License-Identifier: BSL-1.0
// JOINABLE_CHECK=collectives over NCCL, which compares nothing by itself.
#include <joinable/nccl.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/environment_variable.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/error.hpp>

namespace {

using namespace joinable_tests;
using joinable::NcclCommunicator;

TEST_CASE("JOINABLE_CHECK=collectives makes ranks of NCCL compare collectives, also of a group") {
    EnvironmentVariable const set{"JOINABLE_CHECK", "collectives"};
    run_nccl_ranks({2, 3}, {}, [](NcclCommunicator& all, auto&, cudaStream_t) {
        NcclCommunicator comm = all.split(0, all.rank());
        DeviceArray<float> const values{10};
        joinable::Buffer buffer = values.buffer();
        buffer.count -= comm.rank() == 1 ? 1U : 0U;
        std::string text = "nothing";
        try {
            comm.all_reduce(buffer, joinable::ReduceOp::sum).wait();
        } catch (joinable::Mismatch const& error) {
            CHECK(error.ranks() == std::vector{1});
            text = error.what();
        }
        CHECK(
            text == "ranks run different collectives: rank 0 all_reduce of 10 f32 with sum, rank 1 "
                    "all_reduce of 9 f32 with sum"
        );
    });
}

TEST_CASE("ranks of NCCL refuse an unknown word in JOINABLE_CHECK, and agree on the option") {
    auto const text_of = [](auto const& make) -> std::string {
        try {
            make();
        } catch (joinable::ContractViolation const& error) {
            return error.what();
        } catch (joinable::Mismatch const& error) {
            return error.what();
        }
        return "nothing";
    };
    joinable::run_threads(2, [&](joinable::ThreadCommunicator& control) {
        std::string const text =
            text_of([&] { NcclCommunicator const comm{control, {.check = control.rank() == 1}}; });
        CHECK(
            text.find(
                "options differ: NcclOptions::check, or JOINABLE_CHECK=collectives: rank 0 has "
                "false, rank 1 has true"
            ) != std::string::npos
        );
    });
    EnvironmentVariable const set{"JOINABLE_CHECK", "sums"};
    joinable::run_threads(2, [&](joinable::ThreadCommunicator& control) {
        CHECK(text_of([&] {
                  NcclCommunicator{control};
              }).find("but found \"sums\"") != std::string::npos);
    });
}

} // namespace
