// SPDX-License-Identifier: BSL-1.0
// Which collectives a model issues, in each of its modes: on every rank the same, in this order,
// also on one that had no input from the first round on. And how many bytes sharded trainings send.
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/recording_communicator.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>

namespace {

using namespace joinable_tests;
using joinable::DataParallelOptions;
using Trace = std::vector<std::string>;

enum class Mode { plain, rebuilds, finds_unused, is_static, accumulates, skips };

DataParallelOptions options_of(Mode mode) {
    DataParallelOptions options{.bucket_cap_bytes = 24, .first_bucket_bytes = 8};
    options.sync_at_end = false;
    options.find_unused = mode == Mode::finds_unused;
    options.static_graph = mode == Mode::is_static;
    options.rebuild_buckets = mode == Mode::rebuilds || mode == Mode::is_static;
    return options;
}

/// Three rounds of all ranks but the last, which has no input, and four of rank 0. Parameters have
/// 3, 1, 2 and 4 elements of 4 bytes; parameter 1 is used by nobody where that is allowed.
template <class Comm>
Trace trace_of(Comm& inner, Mode mode, bool with_roll_calls) {
    RecordingCommunicator comm{inner};
    std::vector<Param<float>> params;
    for (std::size_t const n : {3U, 1U, 2U, 4U}) {
        params.emplace_back(n);
    }
    joinable::DistributedDataParallel ddp{comm, params, options_of(mode)};
    std::size_t const inputs = comm.rank() == 0 ? 4 : comm.rank() != comm.size() - 1 ? 3 : 0;
    joinable::JoinOptions options;
    if (!with_roll_calls) {
        options.inputs = inputs;
    }
    options.sync_every = mode == Mode::accumulates ? 2 : 1;
    joinable::Join guard{joinable::participants(ddp), options};
    comm.trace.clear();
    for (std::size_t i = 0; i < inputs; ++i) {
        if (mode == Mode::skips && i == 1 && comm.rank() == 0) {
            ddp.skip();
            continue;
        }
        bool const may_be_unused = mode == Mode::finds_unused || mode == Mode::is_static;
        std::vector<std::size_t> unused;
        if (mode == Mode::finds_unused) {
            unused = {1};
        }
        ddp.forward([] {});
        ddp.backward(
            [&](auto ready) {
                // Another order on every rank.
                for (std::size_t k = 0; k < params.size(); ++k) {
                    std::size_t const p = (k + static_cast<std::size_t>(comm.rank())) % 4;
                    if (p != 1 || !may_be_unused) {
                        ready(p);
                    }
                }
            },
            unused
        );
    }
    if (!with_roll_calls) {
        guard.finish();
        comm.trace.pop_back(); // the closing roll call
        return comm.trace;
    }
    guard.finish();
    return comm.trace;
}

/// The collectives of the model itself, in rounds without roll calls.
Trace expected_of(Mode mode) {
    // As they are cut from the last parameter to the first: {3} {2 1 0}.
    Trace const round{"all_reduce 4 f32", "all_reduce 6 f32"};
    // By the order of rank 0, which is 0 1 2 3: {0} {1 2 3}; before that all in one.
    Trace const rebuilt{"all_reduce 3 f32", "all_reduce 7 f32"};
    // Bucket {2 1 0} without 1, which no rank uses.
    Trace const used{
        "all_reduce 4 u64", "all_reduce 4 f32", "all_reduce 2 f32", "all_reduce 3 f32"
    };
    // All in one, last to first: {3 2}, not 1, {0}; then by the order 0 2 3: {0} {2 3}, {1} unused.
    Trace const recorded{
        "all_reduce 4 u64", "all_reduce 6 f32", "all_reduce 3 f32", "broadcast 5 u64"
    };
    Trace const later{"all_reduce 3 f32", "all_reduce 6 f32"};
    Trace trace;
    auto const append = [&](Trace const& more) {
        trace.insert(trace.end(), more.begin(), more.end());
    };
    for (int i = 0; i < 4; ++i) {
        switch (mode) {
        case Mode::plain:
        case Mode::skips: append(round); break;
        case Mode::rebuilds:
            append(i == 0 ? Trace{"all_reduce 10 f32", "broadcast 5 u64"} : rebuilt);
            break;
        case Mode::finds_unused: append(used); break;
        case Mode::is_static: append(i == 0 ? recorded : later); break;
        case Mode::accumulates: append(i % 2 == 1 ? round : Trace{}); break;
        }
    }
    return trace;
}

constexpr Mode modes[] = {
    Mode::plain, Mode::rebuilds, Mode::finds_unused, Mode::is_static, Mode::accumulates, Mode::skips
};

TEST_CASE("in every mode all ranks issue the collectives that the mode is documented to have") {
    for (Mode const mode : modes) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            CAPTURE(static_cast<int>(mode));
            CHECK(trace_of(comm, mode, false) == expected_of(mode));
        });
    }
}

TEST_CASE(
    "with roll calls, too, all ranks issue the same collectives in every mode" *
    doctest::skip(!ranks_share_memory)
) {
    for (Mode const mode : modes) {
        for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
            std::vector<Trace> traces(static_cast<std::size_t>(world));
            over_ranks({world}, [&](RankCommunicator& comm) {
                traces[static_cast<std::size_t>(comm.rank())] = trace_of(comm, mode, true);
            });
            for (Trace const& trace : traces) {
                CHECK(trace == traces.front());
                CHECK(trace.size() > 8);
            }
        }
    }
}

/// Adds up the bytes of f32 that all ranks together send at least: W ranks send a buffer W - 1 times where each
/// rank gets all of it or a part of its sum, and twice as often where each gets all of the sum.
template <class Comm>
class CountingCommunicator : public CoreOnly<Comm> {
public:
    using Counts = std::span<std::size_t const>;
    explicit CountingCommunicator(Comm& inner) : CoreOnly<Comm>{inner} {}

    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        add(2, buffer.count, buffer.dtype);
        return this->inner_.all_reduce(buffer, op);
    }
    auto broadcast(joinable::Buffer buffer, int root) {
        broadcasts += buffer.dtype == joinable::DType::f32 ? 1 : 0;
        add(1, buffer.count, buffer.dtype);
        return this->inner_.broadcast(buffer, root);
    }
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out)
        requires joinable::AllGathers<Comm>
    {
        gathers += out.dtype == joinable::DType::f32 ? 1 : 0;
        add(1, out.count, out.dtype);
        return this->inner_.all_gather(in, out);
    }
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out, Counts counts)
        requires joinable::AllGathers<Comm>
    {
        gathers += out.dtype == joinable::DType::f32 ? 1 : 0;
        add(1, out.count, out.dtype);
        return this->inner_.all_gather(in, out, counts);
    }
    auto reduce_scatter(joinable::ConstBuffer in, joinable::Buffer out, joinable::ReduceOp op)
        requires joinable::ReduceScatters<Comm>
    {
        add(1, in.count, in.dtype);
        return this->inner_.reduce_scatter(in, out, op);
    }
    auto reduce_scatter(
        joinable::ConstBuffer in, joinable::Buffer out, joinable::ReduceOp op, Counts counts
    )
        requires joinable::ReduceScatters<Comm>
    {
        add(1, in.count, in.dtype);
        return this->inner_.reduce_scatter(in, out, op, counts);
    }

    std::size_t bytes = 0;
    int broadcasts = 0;
    int gathers = 0;

private:
    void add(std::size_t times, std::size_t count, joinable::DType dtype) {
        if (dtype == joinable::DType::f32) { // else it is control
            auto const others = static_cast<std::size_t>(this->size() - 1);
            bytes += times * others * count * sizeof(float);
        }
    }
};

/// Elements of parameters, of which one is sent alone if it has one owner. Parts for 1, 2, 3, 4 and 8 ranks are
/// whole cache lines.
constexpr std::size_t sizes[] = {384, 24 * 1024, 768, 1152, 384};

/// How many times all ranks together send the model in a round. Rank r has r + 1 inputs, and shadows then.
template <class Comm, class Participant, class Round>
double models_sent(CountingCommunicator<Comm>& comm, Participant& participant, Round const& round) {
    std::size_t elements = 0;
    for (std::size_t const size : sizes) {
        elements += size;
    }
    comm.bytes = 0;
    joinable::Join guard{joinable::participants(participant)};
    for (int i = 0; i <= comm.rank(); ++i) {
        round();
    }
    guard.finish();
    auto const model = static_cast<double>(elements * sizeof(float));
    return static_cast<double>(comm.bytes) / (comm.size() * model);
}

// Rajbhandari et al., "ZeRO", 2020, section 7: a rank that shards states, or gradients as well, sends twice its
// model, times (W - 1) / W; one that shards values, too, one and a half times as much. So does one that gets all
// averages (Sharding::optimizer).
TEST_CASE("sharded trainings send two or three models in a round, on joined ranks too") {
    using joinable::Partition;
    using joinable::Sharding;
    for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& inner) {
            CountingCommunicator comm{inner};
            std::vector<CopyingParam> params;
            for (std::size_t const size : sizes) {
                params.emplace_back(size);
            }
            int const others = comm.size() - 1;
            // Gradients to their owners: by an all-reduce where the communicator knows no more.
            int const reduction = joinable::ReduceScatters<RankCommunicator> ? 1 : 2;
            joinable::ZeroRedundancyOptimizer zero{
                comm,
                params,
                joinable::Adam{},
                {.partition = partition, .bucket_cap_bytes = 4096, .reduces_gradients = true}
            };
            CHECK(models_sent(comm, zero, [&] { zero.step(); }) == (reduction + 1) * others);
            for (Sharding const sharding :
                 {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
                joinable::ShardedDataParallel sharded{
                    comm,
                    params,
                    joinable::Adam{},
                    joinable::ShardedOptions{
                        .sharding = sharding,
                        .partition = partition,
                        .bucket_cap_bytes = 4096,
                        .sync_at_end = false
                    }
                };
                int const models = sharding == Sharding::optimizer   ? 2 + 1
                                   : sharding == Sharding::gradients ? reduction + 1
                                                                     : reduction + 2;
                CHECK(models_sent(comm, sharded, [&] {
                          sharded.forward([](auto const&) {});
                          sharded.backward([&](auto const& ready, auto const&) {
                              for (std::size_t i = params.size(); i-- > 0;) {
                                  ready(i);
                              }
                          });
                          sharded.step();
                      }) == models * others);
            }
        });
    }
}

TEST_CASE("after a step a bucket is one all-gather, or one broadcast from each of its owners") {
    using joinable::Partition;
    for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& inner) {
            joinable::ZeroOptions const options{
                .partition = partition, .bucket_cap_bytes = 12 * 96 * sizeof(float)
            };
            auto params = make_params<float>(std::vector<std::size_t>(24, 96)); // two buckets
            CountingCommunicator comm{inner};
            joinable::ZeroRedundancyOptimizer zero{comm, params, joinable::Adam{}, options};
            comm.gathers = comm.broadcasts = 0;
            zero.step();
            bool const gathers = joinable::AllGathers<CountingCommunicator<RankCommunicator>>;
            CHECK(comm.gathers == (gathers ? 2 : 0));
            CHECK(comm.broadcasts == (gathers ? 0 : 2 * comm.size()));

            CoreOnly core{inner};
            CountingCommunicator few{core};
            joinable::ZeroRedundancyOptimizer other{few, params, joinable::Adam{}, options};
            few.broadcasts = 0;
            other.step();
            CHECK(few.gathers == 0);
            CHECK(few.broadcasts == 2 * few.size());
        });
    }
}

} // namespace
