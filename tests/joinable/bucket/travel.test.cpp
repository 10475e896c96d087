// SPDX-License-Identifier: BSL-1.0
// How a bucket travels is a parameter: what the reducer asks of it, on ranks that contribute and on
// ranks that do not.
#include <cmath>
#include <cstddef>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/recording_communicator.hpp>

#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/cast_to.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/compression.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using joinable::BucketRun;
using joinable::Reducer;
using joinable::ThreadCommunicator;

struct Parameter {
    std::vector<float> value = std::vector<float>(4, 0.0F);
    std::vector<float> grad = std::vector<float>(4, 0.0F);
};

/// One call of a reduction, as it was made.
struct Call {
    std::string_view verb;
    std::size_t bucket;
    std::size_t count;
    double factor = 0;
    bool contributes = false;

    friend bool operator==(Call const&, Call const&) = default;
};

/// Reduces each bucket to one owner, as a sharded optimizer does: nobody else gets the averages.
struct ToOwners {
    static constexpr std::string_view name = "ToOwners";
    static constexpr bool delivers = false;

    std::vector<Call>* calls = nullptr;

    [[nodiscard]] static bool scales(ThreadCommunicator&) noexcept { return false; }
    joinable::ThreadWork
    start(ThreadCommunicator& comm, BucketRun const& run, double factor, bool contributes) const {
        calls->push_back({"start", run.bucket, run.buffer.count, factor, contributes});
        int const owner = static_cast<int>(run.bucket) % comm.size();
        return comm.reduce(run.buffer, joinable::ReduceOp::sum, owner);
    }
    void finish(ThreadCommunicator&, BucketRun const& run) const {
        calls->push_back({"finish", run.bucket, run.buffer.count});
    }
};
struct WithoutFinish {
    static constexpr std::string_view name = "WithoutFinish";
    static constexpr bool delivers = true;
    static bool scales(ThreadCommunicator&);
    static joinable::ThreadWork start(ThreadCommunicator&, BucketRun const&, double, bool);
};
struct WithoutStart {
    static constexpr std::string_view name = "WithoutStart";
    static constexpr bool delivers = true;
    static bool scales(ThreadCommunicator&);
    static void finish(ThreadCommunicator&, BucketRun const&);
};

/// Says that a run needs two collectives, and starts one.
struct WithoutAdvance : joinable::AllReduce {
    static constexpr std::size_t steps = 2;
};

/// Says that its sums round factors, as NCCL's do.
struct RoundsFactors : joinable_tests::CoreOnly<ThreadCommunicator> {
    static constexpr bool rounds_factors = true;
    using CoreOnly::CoreOnly;
};

static_assert(joinable::detail::rounds_factors<RoundsFactors>());

static_assert(joinable::BucketReduction<ToOwners, ThreadCommunicator>);
static_assert(!joinable::BucketReduction<WithoutAdvance, ThreadCommunicator>);
static_assert(joinable::BucketReduction<joinable::AllReduce, ThreadCommunicator>);
static_assert(!joinable::BucketReduction<WithoutFinish, ThreadCommunicator>);
static_assert(!joinable::BucketReduction<WithoutStart, ThreadCommunicator>);

} // namespace

TEST_CASE("a reduction that delivers to owners leaves gradients to them") {
    for (int const size : {1, 2, 3, 4, 8}) {
        joinable::run_threads(size, [&](ThreadCommunicator& comm) {
            std::vector<Parameter> model(2);
            std::vector<Call> calls;
            Reducer reducer{
                comm,
                joinable::parameters(model),
                joinable::BucketOptions{.bucket_caps_bytes = {16}, .rebuild_buckets = false},
                ToOwners{&calls}
            };
            auto const own = static_cast<float>(comm.rank() + 1);
            for (Parameter& parameter : model) {
                parameter.grad.assign(4, own);
            }
            reducer.prepare_for_backward(0.5);
            reducer.mark_ready(1);
            reducer.mark_ready(0);
            reducer.finalize_backward();

            CHECK(
                calls ==
                std::vector<Call>{
                    {"start", 0, 4, 1.0, true},
                    {"start", 1, 4, 1.0, true},
                    {"finish", 0, 4},
                    {"finish", 1, 4}
                }
            );
            auto const sum = 0.5F * static_cast<float>(size * (size + 1) / 2);
            for (std::size_t bucket = 0; bucket < 2; ++bucket) {
                auto const* const at =
                    static_cast<float const*>(reducer.buckets()[bucket].buffer.data);
                if (static_cast<int>(bucket) % size == comm.rank()) {
                    CHECK(std::vector<float>(at, at + 4) == std::vector<float>(4, sum));
                }
            }
            for (Parameter const& parameter : model) {
                CHECK(parameter.grad == std::vector<float>(4, own)); // as the engine left them
            }
        });
    }
}

TEST_CASE("a cast multiplies gradients of f16 by factors that f16 and a sum of f16 cannot hold") {
    for (int const size : {1, 2, 3, 4, 8}) {
        joinable::run_threads(size, [&](ThreadCommunicator& threads) {
            RoundsFactors comm{threads};
            std::vector<joinable::Half> value(5);
            float const number = 2048.0F * static_cast<float>(threads.rank() + 1);
            std::vector<joinable::Half> gradient(5, joinable::Half{number});
            struct Weights {
                joinable::AnyView value, grad;
            };
            std::vector<Weights> model{{joinable::AnyView{value}, joinable::AnyView{gradient}}};
            double const tokens = 3.0 * (1 << 21) * size; // f16 would be off by 12 % and more
            Reducer reducer{
                comm, joinable::parameters(model), {}, joinable::CastTo<joinable::DType::f32>{}
            };
            reducer.check_factor(1 / tokens);
            reducer.prepare_for_backward(1 / tokens);
            reducer.mark_ready(0);
            reducer.finalize_backward();
            double const exact = 1024.0 * size * (size + 1) / tokens;
            auto const got = static_cast<double>(static_cast<float>(gradient[4]));
            CHECK(std::abs(got - exact) <= exact * 0x1p-11); // rounded once
        });
    }
}

TEST_CASE("a reduction hears which ranks contribute, joined ones too") {
    for (int const size : {1, 2, 3, 4, 8}) {
        joinable::run_threads(size, [&](ThreadCommunicator& comm) {
            std::vector<Parameter> model(1);
            std::vector<Call> calls;
            joinable::DistributedDataParallel ddp{comm, model, ToOwners{&calls}};
            joinable::Join guard{joinable::participants(ddp)};
            for (int i = 0; i <= comm.rank(); ++i) { // rank r has r + 1 inputs
                ddp.forward([] {});
                ddp.backward([](auto ready) { ready(0); });
            }
            guard.finish();

            REQUIRE(calls.size() == 2 * static_cast<std::size_t>(size));
            for (int round = 0; round < size; ++round) {
                Call const& start = calls[2 * static_cast<std::size_t>(round)];
                CHECK(start == Call{"start", 0, 4, 1.0, round <= comm.rank()});
            }
        });
    }
}

TEST_CASE("every compression that is given room delivers the average") {
    for (int const size : {1, 2, 3, 4, 8}) {
        joinable::run_threads(size, [&](ThreadCommunicator& comm) {
            auto const check = [&](auto reduction) {
                CAPTURE(reduction.name);
                std::vector<Parameter> model(2);
                joinable::DistributedDataParallel ddp{comm, model, std::move(reduction)};
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    for (std::size_t const p : {1U, 0U}) {
                        model[p].grad.assign(4, static_cast<float>(comm.rank() + 1));
                        ready(p);
                    }
                });
                for (Parameter const& parameter : model) {
                    CHECK(parameter.grad[3] == doctest::Approx(0.5 * (size + 1)).epsilon(0.02));
                }
            };
            check(joinable::Fp16Compression<>{});
            check(joinable::Bf16Compression<>{});
            check(joinable::CastTo<joinable::DType::f64, joinable::PowerSgd>{});
            check(joinable::PowerSgd{.start_iteration = 0});
            check(joinable::TopK{.density = 1.0});
            check(joinable::Int8Compression{});
            check(joinable::reduce_by("sum", [](auto& with, joinable::BucketRun const& run) {
                return with.all_reduce(run.buffer, joinable::ReduceOp::sum);
            }));
        });
    }
}
