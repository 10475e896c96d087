// SPDX-License-Identifier: BSL-1.0
// Counts the allocations of each rank: an executable of its own, because it replaces operator new.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <malloc.h>
#include <sys/socket.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/all_reducer.hpp>
#include <support/free_port.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>
#include <support/tcp_ranks.hpp>

#include <joinable/any_communicator.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/tcp/detail/address.hpp>
#include <joinable/communicator/tcp/detail/connect.hpp>
#include <joinable/communicator/tcp/detail/hub.hpp>
#include <joinable/communicator/tcp/detail/rank.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/optimizer_state.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/shadowed.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/tcp.hpp>
#include <joinable/trace/trace_timeline.hpp>

namespace {

// Or what a block may hold depends on where malloc takes it from, which changes as blocks are freed.
[[maybe_unused]] int const takes_all_from_the_heap = mallopt(M_MMAP_THRESHOLD, 1 << 30);

// Of this thread, which is one rank.
thread_local std::size_t allocations = 0;
thread_local std::size_t live_bytes = 0;
thread_local std::size_t peak_bytes = 0;
thread_local std::size_t allocations_left = static_cast<std::size_t>(-1); ///< of those that work

void* counted(void* memory) {
    if (allocations_left-- == 0) {
        std::free(memory);
        throw std::bad_alloc{};
    }
    if (memory == nullptr) {
        throw std::bad_alloc{};
    }
    ++allocations;
    live_bytes += malloc_usable_size(memory);
    peak_bytes = std::max(peak_bytes, live_bytes);
    return memory;
}
void release(void* memory) noexcept {
    live_bytes -= memory == nullptr ? 0 : malloc_usable_size(memory);
    std::free(memory);
}

} // namespace

// Not inlined: g++ 12 warns of free() on memory of new where it sees only one of the pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    return counted(std::malloc(bytes == 0 ? 1 : bytes));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
    auto const unit = static_cast<std::size_t>(alignment);
    return counted(std::aligned_alloc(unit, (bytes / unit + 1) * unit));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    release(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    release(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
    release(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
    release(memory);
}

namespace {

/// A parameter of zeros whose memory comes from operator new, and which lets go of it when it is told to.
struct FreedParam {
    joinable::DType dtype;
    std::size_t numel;
    std::vector<std::byte> own_value; // no array: sanitizers replace operator new[]
    std::vector<std::byte> own_grad;
    joinable::AnyView value;
    joinable::AnyView grad;

    FreedParam(joinable::DType type, std::size_t size)
        : dtype{type}, numel{size}, own_value(bytes()), value{at(own_value)} {}
    [[nodiscard]] std::size_t bytes() const { return numel * size_of(dtype); }
    /// What the engine's backward pass does.
    void need_grad() {
        if (!grad) {
            own_grad = std::vector<std::byte>(bytes());
            grad = at(own_grad);
        }
    }

private:
    [[nodiscard]] joinable::AnyView at(std::vector<std::byte>& memory) const {
        return {memory.data(), dtype, joinable::Shape{numel}, joinable::Shape{1}};
    }
};

} // namespace

template <>
struct joinable::parameter_traits<FreedParam> {
    static AnyView* value(FreedParam& p) { return p.value ? &p.value : nullptr; }
    static AnyView* grad(FreedParam& p) { return p.grad ? &p.grad : nullptr; }
    static void set_grad(FreedParam& p, AnyView const& view) {
        p.grad = view;
        p.own_grad = std::vector<std::byte>{};
    }
    static void release_grad(FreedParam& p) { set_grad(p, {}); }
    static void set_value(FreedParam& p, AnyView const& view) {
        p.value = view;
        p.own_value = std::vector<std::byte>{};
    }
    static void release_value(FreedParam& p) { set_value(p, {}); }
};

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::Sharding;
using joinable::ThreadCommunicator;
static_assert(!joinable::AllocatesArena<
              ThreadCommunicator>); // so operator new sees all that ranks have

template <class Comm>
void check_iterations(Comm& comm) {
    std::vector<Param<float>> params;
    for (std::size_t const n : {100U, 5000U, 3U}) {
        params.emplace_back(n);
    }
    joinable::DistributedDataParallel ddp{
        comm, params, {.bucket_cap_bytes = 4096, .first_bucket_bytes = 64}
    };
    std::size_t active = 0;
    std::size_t counted = 0;
    {
        joinable::Join guard{joinable::participants(ddp)};
        for (int i = 0; i < 10 + 20 * comm.rank(); ++i) {
            std::size_t const before = allocations;
            ddp.forward([] {});
            ddp.backward([](auto ready) {
                for (std::size_t const p : {2U, 1U, 0U}) {
                    ready(p);
                }
            });
            // Only the first one cuts buckets, and rounds in which a rank arrives exchange names.
            bool const is_steady = i != 0 && i % 20 != 10;
            active += is_steady ? allocations - before : 0;
        }
        counted = allocations;
        guard.finish();
    }
    CHECK(active == 0);
    // The names of arriving ranks, the result and the end: the same few however long it is.
    CHECK(allocations - counted < 60);
}

TEST_CASE("nothing is allocated in an iteration, nor in a shadow round after the first") {
    run_ranks({1, 2, 3, 4}, [](ThreadCommunicator& comm) {
        check_iterations(comm);
        joinable::AnyCommunicator any{comm};
        check_iterations(any);
    });
}

TEST_CASE("a timeline that records allocates nothing, nor when its memory is full") {
    for (std::size_t const capacity : {100'000U, 50U}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            auto params = make_params<float>({100, 5000, 3});
            joinable::DistributedDataParallel<
                ThreadCommunicator,
                joinable::AllReduce,
                joinable::TraceTimeline>
                ddp{comm, params, {.bucket_cap_bytes = 4096, .first_bucket_bytes = 64}};
            ddp.timeline().start(capacity);
            std::size_t active = 0;
            joinable::Join guard{joinable::participants(ddp)};
            for (int i = 0; i < 30; ++i) {
                std::size_t const before = allocations;
                ddp.forward([] {});
                ddp.backward([](auto ready) {
                    for (std::size_t const p : {2U, 1U, 0U}) {
                        ready(p);
                    }
                });
                active += i != 0 ? allocations - before : 0; // the first one cuts buckets
            }
            guard.finish();
            CHECK(active == 0);
            CHECK(ddp.timeline().events().size() >= 50);
            CHECK((ddp.timeline().dropped() == 0) == (capacity != 50));
        });
    }
}

TEST_CASE("a shadow round allocates nothing but where a rank arrives") {
    for (int const world : {2, 3, 4, 8}) {
        run_ranks({world}, [](ThreadCommunicator& comm) {
            std::vector<Param<float>> params;
            for (std::size_t const n : {100U, 5000U, 3U}) {
                params.emplace_back(n);
            }
            joinable::DistributedDataParallel ddp{
                comm, params, {.bucket_cap_bytes = 4096, .first_bucket_bytes = 64}
            };
            AllReducer reducer{comm};
            std::size_t last = 0;
            std::size_t in_rounds = 0;
            reducer.before_shadow = [&](joinable::Round const& round) {
                // From one shadow round to the next: the averages, the roll call, the hooks. In the
                // first round of all buckets are cut.
                if (last != 0 && round.number() > 1 && round.number() % 10 != 0) {
                    in_rounds += allocations - last;
                }
                last = allocations;
            };
            joinable::Join guard{joinable::participants(ddp, reducer)};
            for (int i = 0; i < 10 * comm.rank(); ++i) { // ranks arrive in rounds 0, 10, 20 ...
                ddp.forward([] {});
                ddp.backward([](auto ready) {
                    for (std::size_t const p : {2U, 1U, 0U}) {
                        ready(p);
                    }
                });
                reducer();
            }
            auto const result = guard.finish();
            CHECK(
                result.shadow_rounds ==
                static_cast<std::size_t>(10 * (comm.size() - 1 - comm.rank()))
            );
            CHECK(in_rounds == 0);
        });
    }
}

TEST_CASE("a joined rank follows the collectives of a model in memory that it keeps") {
    for (int const world : {2, 3, 4, 8}) {
        run_ranks({world}, [](ThreadCommunicator& comm) {
            std::vector<Param<float>> params;
            params.emplace_back(100U);
            auto hidden = joinable::shadowed(comm);
            joinable::DistributedDataParallel ddp{comm, params};
            ddp.attach_collectives(hidden);
            AllReducer reducer{comm};
            std::size_t last = 0;
            std::size_t in_rounds = 0;
            reducer.before_shadow = [&](joinable::Round const& round) {
                if (round.number() > 6) {
                    in_rounds += allocations - last;
                }
                last = allocations;
            };
            std::vector<float> sum(200);
            std::vector<double> most(50);
            joinable::Join guard{joinable::participants(ddp, reducer)};
            int const inputs = comm.rank() == comm.size() - 1 ? 40 : 0;
            for (std::size_t i = 0; i < static_cast<std::size_t>(inputs); ++i) {
                ddp.forward([&] {
                    joinable::Buffer const part{sum.data(), 100 + i % 3, DType::f32};
                    auto first = hidden.all_reduce(part, joinable::ReduceOp::sum);
                    joinable::Buffer const all{most.data(), most.size(), DType::f64};
                    auto second = hidden.all_reduce(all, joinable::ReduceOp::max);
                    first.wait();
                    second.wait();
                    hidden.broadcast(part, hidden.rank()).wait();
                });
                ddp.backward([](auto ready) { ready(0); });
                reducer();
            }
            guard.finish();
            CHECK(in_rounds <= 8); // two places more, if no three collectives met before
        });
    }
}

TEST_CASE("sending buffers allocates nothing, neither in active rounds nor in shadow rounds") {
    using joinable::BufferSync;
    for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            std::vector<Param<float>> params;
            params.emplace_back(100);
            std::vector<std::vector<float>> floats(3, std::vector<float>(50));
            std::vector<std::vector<double>> doubles(2, std::vector<double>(7));
            joinable::DistributedDataParallel ddp{
                comm, params, joinable::buffers(floats, doubles), {.buffer_sync = position}
            };
            AllReducer reducer{comm};
            std::size_t last = 0;
            std::size_t shadowing = 0;
            reducer.before_shadow = [&](joinable::Round const& round) {
                if (last != 0 && round.number() % 10 != 0) { // there ranks arrive
                    shadowing += allocations - last;
                }
                last = allocations;
            };
            std::size_t active = 0;
            joinable::Join guard{joinable::participants(ddp, reducer)};
            for (int i = 0; i < 10 * (comm.rank() + 1); ++i) {
                std::size_t const before = allocations;
                floats[1][3] = static_cast<float>(comm.rank());
                ddp.forward([] {});
                ddp.backward([](auto ready) { ready(0); });
                CHECK(floats[1][3] == static_cast<float>(i / 10)); // the lowest active rank's
                reducer();
                active += i % 10 == 0 ? 0 : allocations - before;
            }
            guard.finish();
            CHECK(active == 0);
            CHECK(shadowing == 0);
            CHECK((last != 0) == (comm.rank() + 1 < comm.size()));
        });
    }
}

enum class Mode { plain, finds_unused, is_static, accumulates, skips };

TEST_CASE("in every mode, once warm, neither iterations nor shadow rounds allocate") {
    for (Mode const mode :
         {Mode::plain, Mode::finds_unused, Mode::is_static, Mode::accumulates, Mode::skips}) {
        for (bool const views : {false, true}) {
            run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
                CAPTURE(static_cast<int>(mode));
                CAPTURE(views);
                std::vector<Param<float>> params;
                for (std::size_t const n : {100U, 5000U, 3U, 7U}) {
                    params.emplace_back(n);
                }
                joinable::DistributedDataParallel ddp{
                    comm,
                    params,
                    {.bucket_cap_bytes = 4096,
                     .first_bucket_bytes = 64,
                     .gradient_as_bucket_view = views,
                     .find_unused = mode == Mode::finds_unused,
                     .static_graph = mode == Mode::is_static}
                };
                bool const some_unused = mode == Mode::finds_unused || mode == Mode::is_static;
                AllReducer reducer{comm}; // sees the shadow rounds
                std::size_t in_rounds = 0;
                std::size_t last = 0;
                auto const count = [&](std::size_t round) {
                    // The first ten rounds are for warming up; ranks arrive in rounds 10, 20 ...
                    if (last != 0 && round > 4 && round % 10 > 1) {
                        in_rounds += allocations - last;
                    }
                    last = allocations;
                };
                reducer.before_shadow = [&](joinable::Round const& round) {
                    count(round.number());
                };
                joinable::Join guard{joinable::participants(ddp, reducer)};
                std::size_t const mine = 10U * static_cast<std::size_t>(comm.rank() + 1);
                for (std::size_t i = 0; i < mine; ++i) {
                    if (mode == Mode::skips && i % 3 == static_cast<std::size_t>(comm.rank()) % 3) {
                        ddp.skip();
                    } else {
                        bool const syncs = mode != Mode::accumulates || i % 3 == 2;
                        ddp.forward([] {}, {.will_sync = syncs});
                        auto const pass = [&](auto ready) {
                            for (std::size_t const p : {2U, 1U, 0U}) {
                                ready(p);
                            }
                            if (!some_unused) {
                                ready(3U);
                            }
                        };
                        if (mode == Mode::finds_unused) {
                            ddp.backward(pass, {3U});
                        } else {
                            ddp.backward(pass);
                        }
                    }
                    reducer();
                    count(i);
                }
                guard.finish();
                CHECK(in_rounds == 0);
            });
        }
    }
}

TEST_CASE("gradients in buckets are there once, and at most one bucket more while buckets are cut"
) {
    for (bool const is_static : {false, true}) {
        run_ranks({1, 2, 4}, [&](ThreadCommunicator& comm) {
            constexpr std::size_t numel = 16 * 1024;
            constexpr std::size_t count = 64;
            std::vector<Param<float>> params;
            for (std::size_t i = 0; i < count; ++i) {
                params.emplace_back(numel);
                params.back().grad = {};
                params.back().storage = {}; // the buckets have it
            }
            std::size_t const gradients = count * numel * sizeof(float);
            std::size_t const bucket = 256 * 1024;
            std::size_t const before = live_bytes;
            joinable::DistributedDataParallel ddp{
                comm,
                params,
                {.bucket_cap_bytes = bucket,
                 .gradient_as_bucket_view = true,
                 .static_graph = is_static}
            };
            peak_bytes = live_bytes;
            for (int iteration = 0; iteration < 3; ++iteration) {
                ddp.forward([] {});
                ddp.backward([](auto ready) {
                    for (std::size_t k = 0; k < count; ++k) {
                        ready((k * 37) % count); // far from the order at first
                    }
                });
            }
            CHECK(ddp.buckets().size() == count * numel * sizeof(float) / bucket);
            CHECK(peak_bytes >= before + gradients);
            CHECK(peak_bytes <= before + gradients + bucket);
            CHECK(live_bytes <= before + gradients + bucket / 4); // lists, one line per parameter
        });
    }
}

TEST_CASE("a sharded optimizer has its share of the state, and two buckets") {
    for (auto const partition : {joinable::Partition::by_parameters, joinable::Partition::flat}) {
        for (bool const reduces : {false, true}) {
            run_ranks({1, 2, 4, 8}, [&](ThreadCommunicator& comm) {
                constexpr std::size_t numel = 8 * 1024;
                constexpr std::size_t count = 64;
                constexpr std::size_t bucket = 256 * 1024;
                std::vector<Param<float>> params = make_params<float>(std::vector(count, numel));
                auto const world = static_cast<std::size_t>(comm.size());
                std::size_t const share = count * numel * sizeof(float) / world;
                std::size_t const before = live_bytes;
                peak_bytes = live_bytes;
                joinable::ZeroRedundancyOptimizer zero{
                    comm,
                    params,
                    joinable::Adam{},
                    {.partition = partition,
                     .bucket_cap_bytes = bucket,
                     .reduces_gradients = reduces}
                };
                for (int round = 0; round < 3; ++round) {
                    zero.step();
                }
                // Two averages of each element, and what it reduces. When it is made, one bucket more.
                std::size_t const expected = (reduces ? 3 : 2) * share + 2 * bucket;
                // Of parameters: compared on all ranks, the layout of each value, and where it lies in lists of groups.
                std::size_t const lists = bucket / 4 + (48 + sizeof(joinable::AnyView)) * count;
                CHECK(live_bytes - before >= expected);
                CHECK(live_bytes - before <= expected + expected / 20);
                CHECK(peak_bytes - before <= expected + expected / 20 + bucket + lists);
            });
        }
    }
}

/// Bytes of one rank.
struct Training {
    std::size_t live; ///< at the end of the last round
    std::size_t peak; ///< of all rounds
};

/// Two rounds over `count` parameters of `numel` elements each, each of which fills a bucket. `look(sharded)` sees
/// what was trained.
template <class F>
Training train_sharded(
    ThreadCommunicator& comm,
    DType dtype,
    std::size_t count,
    std::size_t numel,
    joinable::ShardedOptions options,
    F const& look
) {
    options.bucket_cap_bytes = numel * size_of(dtype);
    std::size_t const before = live_bytes;
    std::vector<FreedParam> params;
    params.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        params.emplace_back(dtype, numel);
    }
    joinable::ShardedDataParallel sharded{comm, params, joinable::Adam{}, options};
    joinable::Join guard{joinable::participants(sharded)};
    peak_bytes = live_bytes;
    for (int round = 0; round < 2; ++round) {
        sharded.forward([&](auto const& use) {
            for (std::size_t i = 0; i < count; ++i) {
                static_cast<void>(use(i));
            }
        });
        sharded.backward([&](auto const& ready, auto const& use) {
            for (std::size_t i = count; i-- > 0;) {
                static_cast<void>(use(i));
                params[i].need_grad();
                ready(i);
            }
        });
        sharded.step();
    }
    Training const result{live_bytes - before, peak_bytes - before};
    guard.finish();
    look(sharded);
    return result;
}

// Rajbhandari et al., "ZeRO", 2020, section 3 and figure 1: with P parameters, values and gradients of 2 bytes
// and K bytes of state, W ranks have (2 + 2 + K/W) P, (2 + (2 + K)/W) P and (2 + 2 + K)/W P.
TEST_CASE("a rank has the bytes that ZeRO's formulas say, in all of a training round") {
    constexpr std::size_t numel = 32 * 1024;
    constexpr std::size_t count = 64;
    constexpr std::size_t parameters = count * numel;
    for (DType const dtype : {DType::f32, DType::bf16}) {
        std::size_t const element = size_of(dtype);
        std::size_t const state = dtype == DType::f32 ? 4 + 4 : 4 + 4 + 4; // bf16 has masters
        for (Sharding const sharding :
             {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
            run_participants({1, 2, 4, 8}, [&](ThreadCommunicator& comm) {
                bool const has_all_gradients = sharding == Sharding::optimizer;
                bool const has_all_values = sharding != Sharding::parameters;
                auto const world = static_cast<std::size_t>(comm.size());
                auto const bytes_of = [&](bool has_all, std::size_t bytes) {
                    return parameters * bytes / (has_all ? 1 : world);
                };
                std::size_t const values = bytes_of(has_all_values, element);
                std::size_t const gradients = bytes_of(has_all_gradients, element);
                std::size_t const states = bytes_of(false, state);
                std::size_t const formula = values + gradients + states;
                std::size_t listed = 0;
                Training const found = train_sharded(
                    comm,
                    dtype,
                    count,
                    numel,
                    {.sharding = sharding,
                     .partition = joinable::Partition::flat,
                     .gradient_as_bucket_view = true},
                    [&](auto const& sharded) {
                        CHECK(sharded.value_bytes() == (has_all_values ? 0 : values));
                        CHECK(sharded.gradient_bytes() == (has_all_gradients ? 0 : gradients));
                        CHECK(sharded.state_bytes() == states);
                        listed = formula + sharded.bucket_bytes() + sharded.unit_bytes();
                    }
                );
                CAPTURE(static_cast<int>(sharding));
                CAPTURE(world);
                // Where values are sharded: two buckets, two units, and the engine's gradient of one.
                std::size_t const bucket = numel * element;
                std::size_t const buckets = (has_all_values ? 1 : 5) * bucket;
                CHECK(found.live >= formula);
                CHECK(found.peak <= formula + formula / 20 + buckets);
                CHECK(found.live >= listed);
                CHECK(found.live <= listed + formula / 20);
            });
        }
    }
}

TEST_CASE("a rank that keeps whole gradients has them once where they lie in buckets, else twice") {
    run_ranks({1, 2, 4}, [](ThreadCommunicator& comm) {
        constexpr std::size_t numel = 32 * 1024;
        constexpr std::size_t count = 16;
        auto const live = [&](bool are_views) {
            joinable::ShardedOptions const options{.gradient_as_bucket_view = are_views};
            return train_sharded(comm, DType::f32, count, numel, options, [](auto const&) {}).live;
        };
        std::size_t const gradients = count * numel * sizeof(float);
        std::size_t const once = live(true);
        std::size_t const twice = live(false);
        CHECK(twice + numel >= once + gradients); // a thirty-second of them
        CHECK(twice <= once + gradients + numel);
    });
}

TEST_CASE("a large parameter of one owner needs no bucket, nor do large pieces between threads") {
    for (auto const partition : {joinable::Partition::by_parameters, joinable::Partition::flat}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            constexpr std::size_t numel = 256 * 1024;
            std::vector<Param<float>> params = make_params<float>({numel, numel, 100});
            std::size_t const before = live_bytes;
            peak_bytes = live_bytes;
            joinable::ZeroRedundancyOptimizer zero{
                comm, params, joinable::Sgd{}, {.partition = partition}
            };
            for (int round = 0; round < 3; ++round) {
                zero.step();
            }
            CHECK(live_bytes - before < numel); // a quarter of one
            // The start sends the values of rank 0 in buckets.
            CHECK(peak_bytes - before < 2 * numel * sizeof(float) + numel);
        });
    }
}

TEST_CASE("a sharded step allocates nothing once warm, nor while it shadows") {
    for (auto const partition : {joinable::Partition::by_parameters, joinable::Partition::flat}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            // The large one travels by itself, or its pieces do.
            std::vector<Param<float>> params = make_params<float>({100, 5000, 136'000, 3, 7});
            std::size_t in_steps = 0;
            std::size_t last = 0;
            std::size_t round = 0;
            auto const count = [&](joinable::ShardGradients const&) {
                // From step to step. Ranks arrive in rounds 10, 20 ...
                if (++round > 4 && round % 10 > 2) {
                    in_steps += allocations - last;
                }
                last = allocations;
                return true;
            };
            joinable::ZeroRedundancyOptimizer zero{
                comm,
                params,
                joinable::AdamW{},
                {.partition = partition,
                 .bucket_cap_bytes = 4096,
                 .reduces_gradients = true,
                 .before_step = count}
            };
            joinable::Join guard{joinable::participants(zero)};
            for (int i = 0; i < 10 * (comm.rank() + 1); ++i) {
                zero.step();
            }
            guard.finish();
            CHECK(in_steps == 0);
        });
    }
}

TEST_CASE("a sharded training allocates nothing once warm, nor while it shadows") {
    for (Sharding const sharding :
         {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
        run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            std::vector<joinable_tests::CopyingParam> params;
            for (std::size_t const size : {100U, 5000U, 3U, 7U}) {
                params.emplace_back(size);
            }
            for (auto& param : params) {
                add_gradient(param, 1.0);
            }
            std::size_t in_rounds = 0;
            std::size_t last = 0;
            std::size_t round = 0;
            auto const count = [&](joinable::ShardGradients const&) {
                // From step to step. Ranks arrive in rounds 10, 20 ...
                if (++round > 4 && round % 10 > 2) {
                    in_rounds += allocations - last;
                }
                last = allocations;
                return true;
            };
            joinable::ShardedOptions const options{
                .sharding = sharding, .bucket_cap_bytes = 4096, .before_step = count
            };
            joinable::ShardedDataParallel sharded{comm, params, joinable::AdamW{}, options};
            joinable::Join guard{joinable::participants(sharded)};
            for (int i = 0; i < 10 * (comm.rank() + 1); ++i) {
                sharded.forward([&](auto const& use) {
                    for (std::size_t k = 0; k < params.size(); ++k) {
                        static_cast<void>(use(k));
                    }
                });
                sharded.backward([&](auto const& ready, auto const& use) {
                    for (std::size_t k = params.size(); k-- > 0;) {
                        static_cast<void>(use(k));
                        ready(k);
                    }
                });
                sharded.step();
            }
            guard.finish();
            CHECK(in_rounds == 0);
        });
    }
}

/// Resident memory of this process, in bytes (proc(5): the second number of statm).
std::size_t resident_bytes() {
    std::ifstream statm{"/proc/self/statm"};
    std::size_t pages = 0;
    statm >> pages >> pages;
    return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

TEST_CASE("many rounds of two ranks, half of them shadowed by one, grow no memory") {
#if defined(__OPTIMIZE__)
    constexpr std::size_t rounds = 1'000'000;
#else
    constexpr std::size_t rounds = 20'000; // a sample where nothing is optimized
#endif
    std::size_t before = 0;
    run_ranks({2}, [&](ThreadCommunicator& comm) {
        AllReducer reducer{comm};
        std::size_t in_rounds = 0;
        std::size_t last = 0;
        auto const count = [&](std::size_t round) {
            if (round == 1000) {
                last = allocations;
                if (comm.rank() == 0) {
                    before = resident_bytes();
                }
            } else if (round > 1000 && round != rounds / 2 + 1) { // before it rank 0 arrives
                in_rounds += allocations - last;
            }
            last = allocations;
        };
        reducer.before_shadow = [&](joinable::Round const& round) {
            if (round.number() > rounds / 2) {
                count(round.number());
            } else {
                last = allocations;
            }
        };
        joinable::Join guard{joinable::participants(reducer)};
        std::size_t const mine = comm.rank() == 0 ? rounds / 2 : rounds;
        std::size_t active = 0;
        for (std::size_t i = 0; i < mine; ++i) {
            count(i);
            active += static_cast<std::size_t>(reducer());
        }
        CHECK(guard.finish().rounds == rounds);
        CHECK(in_rounds == 0);
        CHECK(active == (comm.rank() == 0 ? rounds : rounds + rounds / 2));
    });
    std::size_t const after = resident_bytes();
    CHECK(after < before + (std::size_t{1} << 20U));
}

TEST_CASE("a guard that is out of memory at any point of its construction leaves nothing behind") {
    run_ranks({1}, [](ThreadCommunicator& comm) {
        AllReducer reducer{comm};
        auto const deadline = std::chrono::seconds{50};
        comm.set_deadline(deadline);
        bool is_built = false;
        std::size_t failures = 0;
        while (!is_built) {
            try {
                allocations_left = failures;
                joinable::Join guard{
                    joinable::participants(reducer), {.timeout = std::chrono::seconds{40}}
                };
                allocations_left = static_cast<std::size_t>(-1);
                is_built = true;
                CHECK(reducer() == 1);
            } catch (std::bad_alloc const&) {
                ++failures;
            }
            CHECK(comm.set_deadline(deadline) == deadline);
        }
        CHECK(failures > 5);
    });
}

/// Calls f on all ranks until rank 0 has enough memory for it; before, its allocations fail one after another.
template <class F>
std::size_t fail_each_allocation(ThreadCommunicator& comm, F const& f) {
    for (std::size_t failures = 0;; ++failures) {
        try {
            allocations_left = comm.rank() == 0 ? failures : static_cast<std::size_t>(-1);
            f();
            allocations_left = static_cast<std::size_t>(-1);
            return failures;
        } catch (std::bad_alloc const&) {
            CHECK(comm.rank() == 0);
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.rank() == 0);
        }
    }
}

/// A sum of more than the kernel takes at once, of which each allocation fails once on one rank. Returns how many did.
std::size_t sum_without_memory(joinable::TcpCommunicator& comm, int victim) {
    std::vector<std::int32_t> values(4'000'000, 1 + comm.rank());
    std::size_t failures = 0;
    std::optional<joinable::TcpWork> work;
    while (!work) {
        allocations_left = comm.rank() == victim ? failures : static_cast<std::size_t>(-1);
        try {
            work.emplace(joinable::all_reduce(comm, values));
        } catch (std::bad_alloc const&) {
            ++failures;
        }
        allocations_left = static_cast<std::size_t>(-1);
    }
    work->wait();
    std::int32_t const expected = comm.size() * (comm.size() + 1) / 2;
    CHECK(std::count(values.begin(), values.end(), expected) == std::ssize(values));
    return failures;
}

TEST_CASE(
    "a collective by TCP for which a rank has no memory was not posted, and may be posted again"
) {
    for (int const world : {1, 2, 3}) {
        for (int victim = 0; victim < world; ++victim) {
            run_tcp_ranks({world}, [&](joinable::TcpCommunicator& comm) {
                std::size_t const failures = sum_without_memory(comm, victim);
                CHECK((failures > 0) == (comm.rank() == victim));
                // The memory for the data is kept; a place among the collectives in flight may not be.
                CHECK(sum_without_memory(comm, victim) <= 1);
            });
        }
    }
}

TEST_CASE("a rank by TCP that has no memory for the reason of an end has it later") {
    using namespace joinable::detail;
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    Socket hub{ends[0]};
    TcpRank rank{Socket{ends[1]}, 1, 2, std::chrono::seconds{60}};
    auto const reason = packed({joinable::FailureKind::mismatch, {0}, std::string(100, 'x')});
    FrameHeader end;
    end.kind = FrameKind::end;
    end.bytes = reason.size();
    CHECK(hub.send(bytes_of(end), reason) == sizeof end + reason.size());
    hub.close();
    std::size_t failures = 0;
    bool is_heard = false;
    for (int tries = 0; tries < 50 && !is_heard; ++tries) {
        allocations_left = failures;
        try {
            is_heard = rank.is_aborted();
        } catch (std::bad_alloc const&) {
            ++failures;
        }
        allocations_left = static_cast<std::size_t>(-1);
    }
    CHECK(is_heard);
    CHECK(failures > 1);
    CHECK(rank.abort_reason().value_or(joinable::AbortReason{}).message == std::string(100, 'x'));
}

TEST_CASE("a rank by TCP that leaves takes no memory for what it no longer reads") {
    using joinable::detail::Socket;
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    Socket hub{ends[0]};
    std::optional<joinable::detail::TcpRank> rank{
        std::in_place, Socket{ends[1]}, 1, 2, std::chrono::seconds{60}
    };
    hub.close();
    std::size_t const before = allocations;
    rank.reset();
    CHECK(allocations == before);
}

TEST_CASE("where ranks meet by TCP without memory, they hear of it") {
    using joinable::detail::Socket;
    bool is_done = false;
    std::size_t failures = 0;
    for (; !is_done; ++failures) {
        int ends[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        Socket listener = joinable::detail::listen_at("127.0.0.1", 0);
        joinable::detail::Hub hub{std::move(listener), Socket{ends[1]}, {1, "a test", "of it"}};
        std::jthread const thread{[&] {
            allocations_left = failures;
            hub.run();
        }};
        joinable::detail::TcpRank zero{Socket{ends[0]}, 0, 1, std::chrono::seconds{60}};
        try {
            zero.meet("");
            std::vector<std::int32_t> values(1'000'000, 1);
            joinable::detail::Request request;
            request.signature = {
                joinable::detail::Collective::all_reduce,
                joinable::DType::i32,
                joinable::ReduceOp::sum,
                0,
                values.size()
            };
            request.out = {values.data(), values.size(), joinable::DType::i32};
            request.in = request.out;
            zero.finish(zero.post(request));
            is_done = true;
        } catch (joinable::CommunicationError const& error) {
            std::string const text = error.what();
            CHECK(text == "rank 0, where the ranks meet, ran out of memory");
        }
    }
    CHECK(failures > 5);
}

/// Why the hub ends the group, as it tells the rank at the other end; empty: it does not.
std::string text_of_end(joinable::detail::Socket const& socket) {
    using namespace joinable::detail;
    auto const until = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    FrameHeader header;
    while (receive_all(socket, std::as_writable_bytes(std::span{&header, 1}), until)) {
        std::vector<std::byte> body(header.bytes);
        CHECK(receive_all(socket, body, until));
        if (header.kind == FrameKind::end) {
            return unpacked_reason(body).value().message;
        }
    }
    return "";
}

TEST_CASE("where ranks meet by TCP without memory for the reason of an end, all hear it") {
    using namespace joinable::detail;
    TcpJob const job{3, "a test", "of it"};
    auto const reason = packed({joinable::FailureKind::mismatch, {1}, "enough"});
    FrameHeader abort;
    abort.kind = FrameKind::abort;
    abort.bytes = reason.size();
    std::size_t ends_told = 0;
    for (bool const is_late : {false, true}) { // rank 2 comes after the end
        CAPTURE(is_late);
        bool is_done = false;
        for (std::size_t failures = 0; !is_done; ++failures) {
            CAPTURE(failures);
            int ends[2];
            REQUIRE(
                ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0
            );
            std::vector<Socket> ranks(3);
            ranks[0] = Socket{ends[0]};
            Socket listener = listen_at("127.0.0.1", 0);
            auto const until = std::chrono::steady_clock::now() + std::chrono::seconds{60};
            for (int rank : {1, 2}) {
                ranks[as_index(rank)] = connect_to("127.0.0.1", port_of(listener), until, rank);
            }
            auto const greet = [&](int rank) {
                auto const hello = hello_of(rank, job);
                CHECK(ranks[as_index(rank)].send(hello) == hello.size());
            };
            greet(1);
            if (!is_late) {
                greet(2);
            }
            CHECK(ranks[1].send(bytes_of(abort), reason) == sizeof abort + reason.size());
            Hub hub{std::move(listener), Socket{ends[1]}, job};
            std::jthread const thread{[&] {
                allocations_left = failures;
                hub.run();
                is_done = allocations_left <= failures; // none was refused
            }};
            Greeting greeting;
            auto const into = std::as_writable_bytes(std::span{&greeting, 1});
            std::array<std::string, 3> texts;
            bool const is_here = receive_all(ranks[1], into, until);
            if (is_here && is_late) {
                texts[1] = text_of_end(ranks[1]);
                greet(2);
            }
            if (is_here && receive_all(ranks[2], into, until)) {
                for (std::size_t rank = 0; rank < 3; ++rank) {
                    std::string& text = texts[rank];
                    if (text.empty()) {
                        text = text_of_end(ranks[rank]);
                    }
                    CHECK(
                        (text == "enough" ||
                         text == "rank 0, where the ranks meet, ran out of memory")
                    );
                    ends_told += text == "enough" ? 1U : 0U;
                }
            }
            ranks.clear(); // so the hub ends
        }
    }
    CHECK(ends_told > 3 * 3);
}

TEST_CASE("a model or an optimizer that is out of memory on one rank is refused on all") {
    run_ranks({2, 3, 4}, [](ThreadCommunicator& comm) {
        comm.set_deadline(std::chrono::seconds{20});
        std::vector<Param<float>> params = make_params<float>({100, 5000, 3, 7});
        std::size_t const made = fail_each_allocation(comm, [&] {
            joinable::ZeroRedundancyOptimizer const zero{comm, params, joinable::Adam{}};
        });
        std::size_t const modelled = fail_each_allocation(comm, [&] {
            joinable::DistributedDataParallel const ddp{comm, params};
        });
        CHECK(modelled > 20);
        joinable::ZeroRedundancyOptimizer zero{comm, params, joinable::Adam{}};
        zero.step();
        std::size_t const gathered = fail_each_allocation(comm, [&] { zero.consolidate(0); });
        joinable::OptimizerState<joinable::Adam> state;
        if (comm.rank() == 0) {
            state = zero.state();
        }
        std::size_t const loaded = fail_each_allocation(comm, [&] { zero.load(state); });
        CHECK(zero.state_bytes() < 2 * 5110 * sizeof(float));
        CHECK(made > 10);
        CHECK(gathered > 5);
        CHECK(loaded > 1);
        {
            std::vector<Param<float>> more = make_params<float>({5});
            joinable::ShardedDataParallel sharded{
                comm, params, joinable::Adam{}, {.sharding = Sharding::optimizer}
            };
            std::size_t const added = fail_each_allocation(comm, [&] {
                sharded.add_parameter_group(more, joinable::Adam{});
            });
            CHECK(added > 20);
            CHECK(sharded.groups().size() == 2);
        }
        for (Sharding const sharding :
             {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
            joinable::ShardedOptions const options{.sharding = sharding};
            std::vector<joinable_tests::CopyingParam> copying;
            for (std::size_t const size : {100U, 5000U, 3U, 7U}) {
                copying.emplace_back(size);
            }
            std::size_t const allocated = fail_each_allocation(comm, [&] {
                joinable::ShardedDataParallel const sharded{
                    comm, copying, joinable::Adam{}, options
                };
            });
            CHECK(allocated > 20);
        }
    });
}

} // namespace
