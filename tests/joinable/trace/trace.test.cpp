// SPDX-License-Identifier: BSL-1.0
#include <joinable/trace.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/delayed_communicator.hpp>
#include <support/folder.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/trace_format.hpp>

#include <joinable/communicator/control.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/options.hpp>

namespace {

using namespace joinable_tests;
using joinable::Trace;
using joinable::TraceEvent;
using joinable::TraceKind;
using joinable::TraceTimeline;
using Ddp = joinable::DistributedDataParallel<RankCommunicator, joinable::AllReduce, TraceTimeline>;
static_assert(std::has_unique_object_representations_v<TraceEvent>); // no gaps

/// One rank, which counts its signs of life.
struct Renewing : joinable::SelfCommunicator {
    void keep_alive() { ++renewals; }
    int renewals = 0;
};

/// Two parameters, each in a bucket of its own, of 32 bytes.
constexpr joinable::DataParallelOptions two_buckets{
    .bucket_cap_bytes = 32, .first_bucket_bytes = 32, .rebuild_buckets = false
};

template <class Model, class Params>
void run_backward(Model& model, Params& params, std::size_t last = 0) {
    model.backward([&](auto ready) {
        for (std::size_t p = params.size(); p-- > last;) {
            ready(p);
        }
        if (last != 0) {
            throw std::runtime_error{"bad sample"};
        }
    });
}
/// A guard in which this rank trains on `inputs`.
template <class Params>
joinable::JoinResult train(Ddp& ddp, Params& params, int inputs) {
    joinable::Join guard{joinable::participants(ddp)};
    for (int input = 0; input < inputs; ++input) {
        ddp.forward([] {});
        run_backward(ddp, params);
    }
    return guard.finish();
}
std::size_t count(std::vector<Slice> const& slices, std::string const& name) {
    return static_cast<std::size_t>(std::count_if(
        slices.begin(), slices.end(), [&](Slice const& slice) { return slice.name == name; }
    ));
}
std::size_t count(TraceTimeline const& timeline, TraceKind kind) {
    auto const events = timeline.events();
    return static_cast<std::size_t>(std::count_if(
        events.begin(), events.end(), [&](TraceEvent const& event) { return event.kind == kind; }
    ));
}

/// What a rank with `own` inputs and gradients of 64 bytes has to show.
void check_track(
    ReadTrace const& trace,
    int rank,
    std::size_t own,
    std::size_t rounds,
    bool overlaps_roll_call = true
) {
    ReadTrace::Track const track{rank + 1, rank + 1};
    CHECK(trace.names.at(track) == "rank " + std::to_string(rank));
    std::vector<Slice> const& slices = trace.slices.at(track);
    CHECK(count(slices, "round") == own);
    CHECK(count(slices, "shadow round") == rounds - own);
    CHECK(count(slices, "forward") == own);
    CHECK(count(slices, "backward") == own);
    CHECK(count(slices, "roll call") == own);
    std::size_t number = 0;
    for (Slice const& slice : slices) {
        if (slice.name == "round" || slice.name == "shadow round") {
            CHECK(slice.inside.empty());
            CHECK(slice.name == (number < own ? "round" : "shadow round"));
            CHECK(slice.args.at("number") == number++);
        } else if (slice.name == "forward") {
            std::vector<std::string> outer{"round", "roll call"};
            outer.resize(overlaps_roll_call ? 2 : 1);
            CHECK(slice.inside == outer);
        } else if (slice.name != "wait") {
            CHECK(slice.inside == std::vector<std::string>{"round"});
        }
    }
    std::int64_t bytes = 0;
    for (Slice const& bucket : trace.asynchronous.at(track)) {
        bytes += bucket.args.at("bytes").get<std::int64_t>();
        CHECK(std::any_of(slices.begin(), slices.end(), [&](Slice const& slice) {
            bool const is_round = slice.name == "round" || slice.name == "shadow round";
            return is_round && slice.begin <= bucket.begin && bucket.end <= slice.end;
        }));
    }
    CHECK(bytes == 64 * static_cast<std::int64_t>(rounds));
}
/// The same, with two buckets in each round.
void check_two_buckets(ReadTrace const& trace, int rank, std::size_t own, std::size_t rounds) {
    check_track(trace, rank, own, rounds);
    std::vector<Slice> const& buckets = trace.asynchronous.at({rank + 1, rank + 1});
    CHECK(count(buckets, "bucket 0") == rounds);
    CHECK(count(buckets, "bucket 1") == rounds);
    CHECK(buckets.size() == 2 * rounds);
}

TEST_CASE("a trace has a track for each rank, whose rounds hold passes, roll calls and buckets") {
    Folder const folder;
    std::string const path = folder.file("run.json");
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        ddp.timeline().start(1000);
        auto const result = train(ddp, params, comm.rank() + 1);
        CHECK(count(ddp.timeline(), TraceKind::round) == result.own_rounds);
        CHECK(count(ddp.timeline(), TraceKind::shadow_round) == result.shadow_rounds);
        joinable::write_trace(comm, ddp.timeline(), path);
        if (comm.rank() == 0) {
            ReadTrace const trace{contents_of(path)};
            auto const world = static_cast<std::size_t>(comm.size());
            CHECK(trace.names.size() == world);
            CHECK(trace.other.at("ranks") == comm.size());
            CHECK(trace.other.at("dropped_events") == 0);
            CHECK(trace.instants.empty());
            std::int64_t first = 1;
            for (int rank = 0; rank < comm.size(); ++rank) {
                check_two_buckets(trace, rank, static_cast<std::size_t>(rank) + 1, world);
                first = std::min(first, trace.slices.at({rank + 1, rank + 1}).front().begin);
            }
            CHECK(first == 0); // times are counted from the first event
        }
    });
}

using Sharded = joinable::ShardedDataParallel<RankCommunicator, joinable::Sgd, TraceTimeline>;

TEST_CASE("a sharded model has the same track, also after a group of parameters was added") {
    Folder const folder;
    std::string const path = folder.file("run.json");
    for (auto const sharding :
         {joinable::Sharding::none,
          joinable::Sharding::optimizer,
          joinable::Sharding::gradients,
          joinable::Sharding::parameters}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            CAPTURE(name_of(sharding));
            std::vector<CopyingParamOf<double>> params;
            params.emplace_back(4);
            params.emplace_back(4);
            Sharded sharded{
                comm,
                std::span{params}.first(1),
                joinable::Sgd{},
                joinable::ShardedOptions{.sharding = sharding, .bucket_cap_bytes = 32}
            };
            sharded.timeline().start(1000);
            sharded.add_parameter_group(std::span{params}.last(1), joinable::Sgd{});
            joinable::Join guard{joinable::participants(sharded)};
            for (int input = 0; input <= comm.rank(); ++input) {
                sharded.forward([](auto use) {
                    auto const first = use(0);
                    auto const second = use(1);
                });
                sharded.backward([](auto ready, auto use) {
                    for (std::size_t const p : {1U, 0U}) {
                        auto const held = use(p);
                        ready(p);
                    }
                });
                sharded.step();
            }
            guard.finish();
            joinable::write_trace(comm, sharded.timeline(), path);
            if (comm.rank() == 0) {
                ReadTrace const trace{contents_of(path)};
                for (int rank = 0; rank < comm.size(); ++rank) {
                    auto const own = static_cast<std::size_t>(rank) + 1;
                    auto const rounds = static_cast<std::size_t>(comm.size());
                    bool const gathers = sharding == joinable::Sharding::parameters;
                    check_track(trace, rank, own, rounds, !gathers);
                }
            }
        });
    }
}

TEST_CASE("where a sharded model's round fails, its ranges have ended when the error is seen") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Sharded sharded{
            comm,
            params,
            joinable::Sgd{},
            joinable::ShardedOptions{
                .sharding = joinable::Sharding::gradients, .bucket_cap_bytes = 32
            }
        };
        sharded.timeline().start(1000);
        bool const fails = comm.rank() == comm.size() - 1;
        auto const run = [&] {
            joinable::Join guard{joinable::participants(sharded)};
            for (int input = 0; input <= comm.rank();
                 ++input) { // rank 0 shadows the round that fails
                sharded.forward([] {});
                run_backward(sharded, params, fails && input == comm.rank() ? 1 : 0);
                sharded.step();
            }
            guard.finish();
        };
        CHECK_THROWS_AS(run(), std::exception);
        std::size_t const begun = count(sharded.timeline(), TraceKind::round) +
                                  count(sharded.timeline(), TraceKind::shadow_round);
        auto const rounds = static_cast<std::size_t>(comm.size());
        CHECK((begun == rounds || (!fails && begun + 1 == rounds))
        ); // others may hear of it before they open the round
        if (fails) {
            CHECK(count(sharded.timeline(), TraceKind::bucket) == 2 * begun - 1);
        }
        Trace trace{{{{}, 0}}};
        auto const events = sharded.timeline().events();
        trace.ranks[0].events.assign(events.begin(), events.end());
        ReadTrace const read{joinable::to_json(trace)}; // nests
    });
}

TEST_CASE("on one clock, a bucket that all ranks sum ends on none before it has begun on all") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        ddp.timeline().start(1000);
        train(ddp, params, comm.rank() + 1);
        Trace const trace = joinable::gather_trace(comm, ddp.timeline());
        CHECK(trace.ranks.size() == (comm.rank() == 0 ? static_cast<std::size_t>(comm.size()) : 0));
        if (comm.rank() != 0) {
            return;
        }
        std::vector<std::int64_t> last_begin(2 * static_cast<std::size_t>(comm.size()));
        auto first_end = std::vector<std::int64_t>(last_begin.size(), INT64_MAX);
        for (auto const& rank : trace.ranks) {
            std::size_t number = 0;
            for (TraceEvent const& event : rank.events) {
                if (event.kind == TraceKind::bucket) {
                    last_begin.at(number) = std::max(last_begin[number], event.begin);
                    first_end.at(number) = std::min(first_end[number], event.end);
                    ++number;
                }
            }
            CHECK(number == last_begin.size());
        }
        for (std::size_t i = 0; i < last_begin.size(); ++i) {
            CHECK(last_begin[i] <= first_end[i]);
        }
    });
}

TEST_CASE(
    "a wait is shown for each round whose roll call blocks: the answer is late, or a rank arrives"
) {
    for (bool const is_late : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& inner) {
            DelayedCommunicator comm{inner, is_late};
            auto params = make_params<double>({4, 4}, 1.0);
            Ddp ddp{inner, params, two_buckets};
            ddp.timeline().start(1000);
            joinable::Join guard{joinable::participants(ddp), joinable::control(comm)};
            for (int input = 0; input <= inner.rank(); ++input) {
                ddp.forward([] {}, {.will_sync = input % 2 == 0});
                run_backward(ddp, params);
            }
            auto const result = guard.finish();
            std::chrono::nanoseconds sum{};
            for (TraceEvent const& event : ddp.timeline().events()) {
                if (event.kind == TraceKind::wait) {
                    std::chrono::nanoseconds const time{event.end - event.begin};
                    CHECK(time.count() > 0);
                    CHECK((!is_late || time >= DelayedCommunicator<RankCommunicator>::delay));
                    sum += time;
                }
            }
            // A rank arrives in each round but the first, and ranks then ask which one.
            std::size_t const with_arrivals = result.rounds - 1;
            CHECK(
                count(ddp.timeline(), TraceKind::wait) == (is_late ? result.rounds : with_arrivals)
            );
            CHECK(sum <= result.waited);
            // The end has roll calls, too, that belong to no round.
            CHECK(
                sum + DelayedCommunicator<RankCommunicator>::delay <=
                result.waited + (is_late ? std::chrono::nanoseconds{}
                                         : DelayedCommunicator<RankCommunicator>::delay)
            );
        });
    }
}

TEST_CASE("a wait in a loop that opens rounds lies before its round") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& inner) {
        DelayedCommunicator comm{inner, true};
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{inner, params, two_buckets};
        ddp.timeline().start(1000);
        joinable::Join guard{joinable::participants(ddp), joinable::control(comm)};
        while (guard.next(guard.round().number() + 1 < 3 || !guard.round().in_guard())) {
            ddp.forward([] {});
            run_backward(ddp, params);
        }
        guard.finish();
        Trace trace{{{{}, 0}}};
        auto const events = ddp.timeline().events();
        trace.ranks[0].events.assign(events.begin(), events.end());
        ReadTrace const read{joinable::to_json(trace)};
        std::vector<Slice> const& slices = read.slices.at({1, 1});
        CHECK(count(slices, "wait") == 3);
        CHECK(count(slices, "roll call") == 0); // the loop's, not the model's
        for (Slice const& slice : slices) {
            CHECK((slice.name != "wait" || slice.inside.empty()));
        }
    });
}

TEST_CASE("rounds that do not sync, evaluations and skipped batches are shown as what they are") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        TraceTimeline& timeline = ddp.timeline();
        timeline.start(1000);
        joinable::Join guard{joinable::participants(ddp)};
        ddp.forward([] {}, {.will_sync = false});
        run_backward(ddp, params);
        CHECK(count(timeline, TraceKind::round) == 1);
        CHECK(count(timeline, TraceKind::backward) == 1);
        ddp.forward([] {}, {.phase = joinable::Phase::evaluate});
        ddp.prepare_for_forward({.phase = joinable::Phase::evaluate});
        CHECK(count(timeline, TraceKind::round) == 1);
        CHECK(count(timeline, TraceKind::forward) == 3);
        ddp.skip();
        CHECK(count(timeline, TraceKind::round) == 2);
        CHECK(count(timeline, TraceKind::forward) == 3);
        CHECK(count(timeline, TraceKind::bucket) == 2);
        guard.finish();
    });
}

TEST_CASE("the verbs of an engine with hooks show the same ranges as passes do") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        ddp.timeline().start(1000);
        joinable::Join guard{joinable::participants(ddp)};
        ddp.prepare_for_forward();
        ddp.prepare_for_backward();
        CHECK(count(ddp.timeline(), TraceKind::forward) == 1);
        CHECK(count(ddp.timeline(), TraceKind::roll_call) == 1);
        CHECK(count(ddp.timeline(), TraceKind::backward) == 0);
        ddp.mark_ready(1);
        ddp.mark_ready(0);
        ddp.finalize_backward();
        CHECK(count(ddp.timeline(), TraceKind::backward) == 1);
        CHECK(count(ddp.timeline(), TraceKind::round) == 1);
        guard.finish();
    });
}

/// Has one of the ranges that a timeline need not have.
struct ForwardTimes : joinable::NoTimeline {
    int passes = 0;
    int open = 0;
    struct Range {
        int* count;
        explicit Range(int& counted) : count{&++counted} {}
        Range(Range&& other) noexcept : count{std::exchange(other.count, nullptr)} {}
        Range& operator=(Range&&) = delete;
        ~Range() { count != nullptr ? --*count : 0; }
    };
    Range forward() {
        ++passes;
        return Range{open};
    }
};
static_assert(joinable::Timeline<ForwardTimes>);

TEST_CASE("a timeline that has some of the ranges is told of these, and they end with the pass") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        joinable::DistributedDataParallel<RankCommunicator, joinable::AllReduce, ForwardTimes> ddp{
            comm, params, two_buckets
        };
        joinable::Join guard{joinable::participants(ddp)};
        for (int input = 0; input <= comm.rank(); ++input) {
            int const inside = ddp.forward([&] { return ddp.timeline().open; });
            CHECK(inside == 1);
            CHECK(ddp.timeline().open == 0);
            ddp.backward([](auto ready) {
                ready(1);
                ready(0);
            });
        }
        guard.finish();
        CHECK(ddp.timeline().passes == comm.rank() + 1); // none where it shadows
    });
}

TEST_CASE("where a round fails, its ranges have ended when the error is seen") {
    for (bool const in_backward : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            int const last = comm.size() - 1;
            auto params = make_params<double>({4, 4}, 1.0);
            Ddp ddp{comm, params, two_buckets};
            ddp.timeline().start(1000);
            bool const fails = comm.rank() == last;
            auto const run = [&] {
                joinable::Join guard{joinable::participants(ddp)};
                for (int input = 0; input < 2; ++input) {
                    if (comm.rank() == 0 && last != 0 && input == 1) {
                        break; // shadows the round that fails
                    }
                    ddp.forward([&] {
                        if (fails && input == 1 && !in_backward) {
                            throw std::runtime_error{"bad sample"};
                        }
                    });
                    run_backward(ddp, params, fails && input == 1 ? 1 : 0);
                }
                guard.finish();
            };
            CHECK_THROWS_AS(run(), std::exception);
            Trace trace{{{{}, 0}}};
            auto const events = ddp.timeline().events();
            trace.ranks[0].events.assign(events.begin(), events.end());
            ReadTrace const read{joinable::to_json(trace)}; // nests
            if (fails) {
                CHECK(count(ddp.timeline(), TraceKind::round) == 2);
                CHECK(count(ddp.timeline(), TraceKind::forward) == 2);
                CHECK(count(ddp.timeline(), TraceKind::roll_call) == 2);
                CHECK(count(ddp.timeline(), TraceKind::backward) == (in_backward ? 2 : 1));
                CHECK(count(ddp.timeline(), TraceKind::bucket) == (in_backward ? 3 : 2));
            }
        });
    }
}

TEST_CASE("what there is no room for is counted, and the trace says so") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        ddp.timeline().start(5);
        for (int input = 0; input < 3; ++input) { // outside a guard: no roll call, so no waits
            ddp.forward([] {});
            run_backward(ddp, params);
        }
        CHECK(ddp.timeline().events().size() == 5);
        CHECK(ddp.timeline().dropped() == 10);
        Trace const trace = joinable::gather_trace(comm, ddp.timeline());
        if (comm.rank() == 0) {
            ReadTrace const read{joinable::to_json(trace)};
            CHECK(read.other.at("dropped_events") == 10 * comm.size());
            for (int rank = 0; rank < comm.size(); ++rank) {
                CHECK(
                    read.instants.at({rank + 1, rank + 1}) ==
                    std::vector<std::string>{"10 events were dropped, there was no room"}
                );
                CHECK(count(read.slices.at({rank + 1, rank + 1}), "round") == 1);
            }
        }
        ddp.timeline().start(1); // anew
        CHECK(ddp.timeline().events().empty());
        CHECK(ddp.timeline().dropped() == 0);
    });
}

TEST_CASE("nothing is recorded before start() and after stop(), and ranks may record differently") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        train(ddp, params, 1);
        CHECK(ddp.timeline().events().empty());
        CHECK(ddp.timeline().dropped() == 0);
        if (comm.rank() % 2 == 1) {
            ddp.timeline().start(100);
        }
        train(ddp, params, 1);
        ddp.timeline().stop();
        train(ddp, params, 1);
        CHECK(count(ddp.timeline(), TraceKind::round) == (comm.rank() % 2 == 1 ? 1 : 0));
        Trace const trace = joinable::gather_trace(comm, ddp.timeline());
        if (comm.rank() == 0) {
            ReadTrace const read{joinable::to_json(trace)};
            CHECK(read.names.size() == static_cast<std::size_t>(comm.size()));
            CHECK(read.slices.size() == static_cast<std::size_t>(comm.size() / 2));
            for (auto const& [track, slices] : read.slices) {
                CHECK(track.first % 2 == 0);
                for (Slice const& slice : slices) { // counted from the first round of all
                    CHECK((slice.name != "round" || slice.args.at("number") == 1));
                }
            }
        }
    });
}

TEST_CASE("a range that was open at start() or stop() is not recorded") {
    TraceTimeline timeline;
    timeline.start(10);
    {
        auto const range = timeline.forward();
        timeline.stop();
    }
    CHECK(timeline.events().empty());
    {
        auto const range = timeline.forward();
        timeline.start(10);
    }
    {
        auto const range = timeline.backward();
        timeline.start(10);
        auto const inner = timeline.forward();
    }
    CHECK(timeline.events().size() == 1);
    CHECK(timeline.dropped() == 0);
}

TEST_CASE("more events than travel at once arrive as they were") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const own = static_cast<std::size_t>(comm.rank()) * 2048 + 3;
        TraceTimeline timeline;
        timeline.start(own);
        for (std::size_t i = 0; i < own; ++i) {
            auto const range =
                timeline.bucket(i, (static_cast<std::size_t>(comm.rank()) << 40U) + i);
        }
        Trace const trace = joinable::gather_trace(comm, timeline);
        for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
            auto const& events = trace.ranks[rank].events;
            CHECK(events.size() == rank * 2048 + 3);
            bool is_right = true;
            for (std::size_t i = 0; i < events.size(); ++i) {
                is_right = is_right && events[i].index == i &&
                           events[i].value == (rank << 40U) + i &&
                           events[i].begin <= events[i].end && events[i].kind == TraceKind::bucket;
            }
            CHECK(is_right);
        }
        auto const mine = timeline.events();
        CHECK((
            comm.rank() != 0 ||
            std::equal(
                mine.begin(), mine.end(), trace.ranks[0].events.begin(), trace.ranks[0].events.end()
            )
        ));
    });
}

TEST_CASE("aligned clocks move all events of a rank alike, on one clock by less than it takes") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        TraceTimeline timeline;
        timeline.start(2);
        for (std::size_t i = 0; i < 2; ++i) {
            auto const range = timeline.forward();
        }
        Trace const exact = joinable::gather_trace(comm, timeline);
        auto const before = std::chrono::steady_clock::now();
        Trace const aligned = joinable::gather_trace(comm, timeline, {.align_clocks = true});
        std::chrono::nanoseconds const taken = std::chrono::steady_clock::now() - before;
        for (std::size_t rank = 0; rank < exact.ranks.size(); ++rank) {
            TraceEvent const& a = exact.ranks[rank].events.at(0);
            TraceEvent const& b = aligned.ranks[rank].events.at(0);
            std::int64_t const moved = b.begin - a.begin;
            CHECK(std::abs(moved) <= (rank == 0 ? 0 : taken.count()));
            CHECK(b.end - a.end == moved);
            CHECK(
                aligned.ranks[rank].events.at(1).end - exact.ranks[rank].events.at(1).end == moved
            );
        }
    });
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        TraceTimeline const timeline;
        CHECK_THROWS_AS(
            (void)joinable::gather_trace(comm, timeline, {.align_clocks = comm.rank() == 0}),
            joinable::Mismatch
        );
        CHECK(
            joinable::gather_trace(comm, timeline).ranks.size() ==
            (comm.rank() == 0 ? comm.size() : 0)
        );
    });
}

TEST_CASE("a file that rank 0 cannot write fails on all ranks, and a second try may succeed") {
    Folder const folder;
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        TraceTimeline timeline;
        timeline.start(4000);
        for (std::size_t i = 0; i < 4000; ++i) { // more than a buffer of the file
            auto const range = timeline.round(false);
        }
        auto const text_of = [&](std::string const& path, auto const& write) -> std::string {
            try {
                write(comm, timeline, path);
            } catch (joinable::CommunicationError const& error) {
                return error.what();
            }
            return "";
        };
        auto const both = [&](auto const& write) {
            std::string const nowhere = "/no/such/folder/run"; // on all ranks the same
            CHECK(
                text_of(nowhere, write).find("cannot create " + nowhere + ": ") != std::string::npos
            );
            CHECK(
                text_of("/dev/full", write).find("cannot write /dev/full: ") != std::string::npos
            );
            CHECK(text_of(folder.file("run"), write).empty());
        };
        both([](auto&... arguments) { joinable::write_trace(arguments...); });
        both([](auto&... arguments) { joinable::write_picture(arguments...); });
        if (comm.rank() == 0) {
            CHECK(contents_of(folder.file("run")).starts_with("<svg "));
        }
        comm.barrier();
    });
}

TEST_CASE("a rank that writes a large trace renews the deadline of the others each 8 MiB") {
    Renewing comm;
    joinable::detail::ControlOver<Renewing&> control{comm};
    std::string const piece(std::size_t{1} << 20U, ' ');
    joinable::detail::write_on_first_rank(control, "/dev/null", [&](auto const& sink) {
        for (int i = 0; i < 24; ++i) {
            sink(piece);
        }
    });
    CHECK(comm.renewals == 3);
}

TEST_CASE("samples of all ranks reach rank 0 and are counters of their ranks") {
    Folder const folder;
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        TraceTimeline timeline;
        timeline.sample(1); // before start(): not recorded
        timeline.start(5);
        timeline.sample(comm.rank() + 0.5);
        timeline.sample(std::numeric_limits<double>::infinity());
        timeline.sample(-1.000000001e9);
        timeline.stop();
        timeline.sample(2);
        REQUIRE(timeline.events().size() == 3);
        CHECK(timeline.events()[0].number() == comm.rank() + 0.5);
        joinable::write_trace(comm, timeline, folder.file("run.json"));
        joinable::write_picture(comm, timeline, folder.file("run.svg"), {.samples = "loss"});
        Trace const trace = joinable::gather_trace(comm, timeline);
        if (comm.rank() != 0) {
            return;
        }
        ReadTrace const read{contents_of(folder.file("run.json"))};
        for (int rank = 0; rank < comm.size(); ++rank) {
            auto const& events = trace.ranks[static_cast<std::size_t>(rank)].events;
            auto const since = [&](std::size_t i) {
                std::int64_t first = events[0].begin;
                for (auto const& other : trace.ranks) {
                    first = (std::min)(first, other.events[0].begin);
                }
                return events[i].begin - first;
            };
            CHECK(
                (read.counters.at({rank + 1, rank + 1}) ==
                 std::vector<Counted>{
                     {"sample.number", since(0), rank + 0.5},
                     {"sample.number", since(2), -1.000000001e9}
                 })
            );
        }
        std::string const picture = contents_of(folder.file("run.svg"));
        CHECK(picture.find(">loss, mean of samples<") != std::string::npos);
    });
}

TEST_CASE("a trace is not gathered inside a guard, whose joined ranks would not follow") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        auto const run = [&] {
            joinable::Join guard{joinable::participants(ddp)};
            if (comm.rank() == 0) {
                (void)joinable::gather_trace(comm, ddp.timeline());
            }
            guard.finish();
        };
        if (comm.rank() == 0) {
            CHECK_THROWS_AS(run(), joinable::ContractViolation);
        } else {
            CHECK_THROWS_AS(run(), joinable::PeerFailed);
        }
    });
}

TEST_CASE("of events that begin at once the outer one comes first, also where both end at once") {
    Trace trace;
    trace.ranks.resize(1);
    trace.ranks[0].events = {
        {0, 50, 0, 0, TraceKind::forward},
        {0, 100, 0, 0, TraceKind::roll_call},
        {0, 100, 0, 0, TraceKind::round},
    };
    ReadTrace const read{joinable::to_json(trace)};
    std::vector<Slice> const& slices = read.slices.at({1, 1});
    CHECK(slices.at(0).name == "round");
    CHECK(slices.at(1).inside == std::vector<std::string>{"round"});
    CHECK(slices.at(2).inside == std::vector<std::string>{"round", "roll call"});
}

TEST_CASE("times have three decimals of a microsecond, whatever the clock shows") {
    std::int64_t const start = 987'654'321'000'000'000;
    Trace trace;
    trace.ranks.resize(2);
    trace.ranks[0].events = {{start + 7, start + 1'000'000'007, 0, 0, TraceKind::forward}};
    trace.ranks[1].events = {{start, start + 12'345, 3, 0, TraceKind::round}};
    std::string const text = joinable::to_json(trace);
    CHECK(text.find("\"ts\":0.007,\"dur\":1000000.000") != std::string::npos);
    CHECK(text.find("\"ts\":0.000,\"dur\":12.345,\"args\":{\"number\":3}") != std::string::npos);
    ReadTrace const read{text};
    CHECK(read.slices.at({1, 1}).at(0).end == 1'000'000'007);
    CHECK(ReadTrace{joinable::to_json(joinable::Trace{})}.names.empty());
}

} // namespace
