// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/linear_model.hpp>
#include <support/nccl_ranks.hpp>

#include <joinable/communicator/arena.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

/// NCCL ranks as a communicator of the host: the memory of the fake's devices is the host's, too.
/// Arenas are on the device; what is not goes through a copy there. To wait is to make the host wait.
class HostNccl {
public:
    class Work {
    public:
        Work(
            joinable::NcclWork work,
            joinable::Buffer host,
            std::optional<DeviceArray<std::uint8_t>> staged
        )
            : work_{std::move(work)}, host_{host}, staged_{std::move(staged)} {}

        void wait() {
            work_.synchronize();
            if (staged_) {
                std::memcpy(host_.data, staged_->buffer().data, host_.bytes());
                staged_.reset();
            }
        }
        [[nodiscard]] bool test() {
            if (!work_.test()) {
                return false;
            }
            wait();
            return true;
        }

    private:
        joinable::NcclWork work_;
        joinable::Buffer host_;
        std::optional<DeviceArray<std::uint8_t>> staged_;
    };

    explicit HostNccl(NcclCommunicator& comm) noexcept : comm_{comm} {}

    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }
    Work all_reduce(joinable::Buffer buffer, ReduceOp op) {
        return start(buffer, [&](joinable::Buffer there) { return comm_.all_reduce(there, op); });
    }
    Work broadcast(joinable::Buffer buffer, int root) {
        return start(buffer, [&](joinable::Buffer there) { return comm_.broadcast(there, root); });
    }
    void barrier() { comm_.barrier(); }
    void abort(joinable::AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_spent() const { return comm_.is_spent(); }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        return comm_.set_deadline(deadline);
    }
    [[nodiscard]] joinable::Arena allocate(std::size_t bytes, std::size_t) {
        if (bytes == 0) {
            return {};
        }
        void* data = nullptr;
        cuda(cudaMalloc(&data, bytes));
        std::memset(data, 0, bytes);
        auto const release = [](void*, std::byte* memory, std::size_t) noexcept {
            cudaFree(memory);
        };
        return {static_cast<std::byte*>(data), bytes, release, nullptr};
    }

private:
    template <class Call>
    Work start(joinable::Buffer buffer, Call const& call) {
        if (buffer.count == 0 || fake_cuda::is_device_memory(buffer.data, buffer.bytes())) {
            return {call(buffer), buffer, {}};
        }
        DeviceArray<std::uint8_t> staged{buffer.bytes()};
        void* const there = staged.buffer().data;
        std::memcpy(there, buffer.data, buffer.bytes());
        auto work = call({there, buffer.count, buffer.dtype});
        return {std::move(work), buffer, std::move(staged)};
    }

    NcclCommunicator& comm_;
};
static_assert(joinable::Aborts<HostNccl> && joinable::AllocatesArena<HostNccl>);

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
        HostNccl comm{nccl};
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
                CHECK(comm.is_spent());
            }
        });
    };
    CHECK_THROWS_WITH_AS(run(), "overflow", std::runtime_error);
    CHECK(fake_nccl::live_communicators() == 0);
}

} // namespace
