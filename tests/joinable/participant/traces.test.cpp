// SPDX-License-Identifier: BSL-1.0
// Which collectives a model issues, in each of its modes: on every rank the same, in this order,
// also on one that had no input from the first round on.
#include <joinable/participant/data_parallel.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/join/guard.hpp>

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
        "all_reduce 4 i32", "all_reduce 4 f32", "all_reduce 2 f32", "all_reduce 3 f32"
    };
    // All in one, last to first: {3 2}, not 1, {0}; then by the order 0 2 3: {0} {2 3}, {1} unused.
    Trace const recorded{
        "all_reduce 4 i32", "all_reduce 6 f32", "all_reduce 3 f32", "broadcast 5 u64"
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
        for (int const world : {1, 2, 3, 4, 8}) {
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

} // namespace
