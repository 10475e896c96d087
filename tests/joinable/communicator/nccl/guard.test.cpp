// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <chrono>
#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/host_nccl.hpp>
#include <support/linear_model.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

TEST_CASE("a guard over NCCL ranks shadows collectives for those that have no more inputs") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        auto const sum = [&](float own) {
            DeviceArray<float> const value{{own}, stream};
            comm.all_reduce(value.buffer(), ReduceOp::sum).wait();
            return value.read(comm, stream)[0];
        };
        joinable::Action count{comm, [&] { return sum(1.0F); }, [&] { sum(0.0F); }};
        joinable::Join guard{joinable::participants(count), joinable::control(hosts)};
        for (int input = 0; input <= comm.rank(); ++input) {
            CHECK(count() == static_cast<float>(comm.size() - input));
        }
        CHECK(guard.finish().rounds == static_cast<std::size_t>(comm.size()));
    });
}

TEST_CASE("replicas train over NCCL ranks with uneven inputs as their formula says") {
    run_nccl_ranks({1, 2, 4, 8}, [](NcclCommunicator& nccl, auto& hosts, cudaStream_t) {
        HostNccl comm{nccl, hosts};
        int const n = comm.size();
        auto params = make_params<double>({3, 1, 4}, 1.0 + comm.rank());
        joinable::DistributedDataParallel ddp{comm, params};
        auto const descend = [&] {
            for (auto& param : params) {
                for (std::size_t i = 0; i < param.value.size(); ++i) {
                    param.value[i] -= param.g(i);
                }
            }
        };
        joinable::Step step{comm, descend};
        joinable::Join guard{joinable::participants(ddp, step), joinable::control(hosts)};
        for (int input = 0; input <= comm.rank(); ++input) { // rank r has r + 1 of them
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t p = params.size(); p-- > 0;) {
                    for (std::size_t i = 0; i < params[p].value.size(); ++i) {
                        params[p].g(i) = (comm.rank() + 1.0) * (input + 1.0);
                    }
                    ready(p);
                }
            });
            step.step();
        }
        guard.finish();
        // Powers of two divide exactly.
        double expected = 1.0;
        for (int round = 0; round < n; ++round) {
            double total = 0;
            for (int rank = round; rank < n; ++rank) {
                total += (rank + 1.0) * (round + 1.0);
            }
            expected -= total / n;
        }
        for (auto const& param : params) {
            CHECK(param.value == std::vector(param.value.size(), expected));
        }
    });
}

TEST_CASE("a rank that throws within a round ends the guard and NCCL on all ranks") {
    auto const run = [] {
        run_nccl_ranks({4}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
            auto const sum = [&](float own) {
                if (comm.rank() == 1 && own == 1.0F) {
                    throw std::runtime_error{"overflow"};
                }
                DeviceArray<float> const value{{own}, stream};
                comm.all_reduce(value.buffer(), ReduceOp::sum).wait();
                comm.synchronize();
            };
            joinable::Action count{comm, [&] { sum(1.0F); }, [&] { sum(0.0F); }};
            auto const train = [&] {
                joinable::Join guard{joinable::participants(count), joinable::control(hosts)};
                count();
                guard.finish();
            };
            if (comm.rank() == 1) {
                train();
            } else {
                try {
                    train();
                    FAIL_CHECK("a rank failed, and nobody was told");
                } catch (joinable::PeerFailed const& failure) {
                    CHECK(failure.rank() == 1);
                    CHECK(std::string{failure.what()}.find("rank 1 failed") == 0);
                }
                CHECK(comm.is_aborted());
            }
        });
    };
    CHECK_THROWS_WITH_AS(run(), "overflow", std::runtime_error);
    CHECK(fake_nccl::live_communicators() == 0);
}

} // namespace
