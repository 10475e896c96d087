// SPDX-License-Identifier: BSL-1.0
#include <joinable/nvtx.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nvtx3/nvToolsExt.h>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>

#include <joinable/join.hpp>

namespace {

using namespace joinable_tests;
using joinable::ThreadCommunicator;

// -- a profiler, as NVTX's headers attach one ----------------------------------------------------------

/// What it has seen: "+name" where a range begins, "-name" where it ends, by the rank of the thread.
struct Profile {
    std::mutex mutex;
    std::string domain;
    std::map<nvtxRangeId_t, std::string> open;
    std::map<int, std::vector<std::string>> events;
    std::map<std::string, std::set<std::uint64_t>> payloads;
    nvtxRangeId_t ids = 0;
};
Profile& profile() {
    static Profile one;
    return one;
}
thread_local int this_rank = -1;

nvtxDomainHandle_t create_domain(char const* name) {
    std::lock_guard const lock{profile().mutex};
    profile().domain = name;
    return reinterpret_cast<nvtxDomainHandle_t>(&profile());
}
nvtxRangeId_t start_range(nvtxDomainHandle_t domain, nvtxEventAttributes_t const* event) {
    std::lock_guard const lock{profile().mutex};
    std::string const name = event->message.ascii;
    CHECK(domain == reinterpret_cast<nvtxDomainHandle_t>(&profile()));
    profile().payloads[name].insert(event->payload.ullValue);
    profile().events[this_rank].push_back("+" + name);
    profile().open[++profile().ids] = name;
    return profile().ids;
}
void end_range(nvtxDomainHandle_t, nvtxRangeId_t id) {
    std::lock_guard const lock{profile().mutex};
    auto const found = profile().open.find(id);
    if (found == profile().open.end()) {
        profile().events[this_rank].push_back("-no such range");
        return;
    }
    profile().events[this_rank].push_back("-" + found->second);
    profile().open.erase(found);
}

int attach(NvtxGetExportTableFunc_t tables) {
    auto const* const callbacks =
        static_cast<NvtxExportTableCallbacks const*>(tables(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned int size = 0;
    if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
        return 0;
    }
    *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create_domain);
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] =
        reinterpret_cast<NvtxFunctionPointer>(&start_range);
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = reinterpret_cast<NvtxFunctionPointer>(&end_range);
    return 1;
}
[[maybe_unused]] bool const is_attached = [] { // before the first range of any test
    InitializeInjectionNvtx2_fnptr = &attach;
    return true;
}();

// -- what it has to see ----------------------------------------------------------------------------------

using Ddp = joinable::
    DistributedDataParallel<ThreadCommunicator, joinable::AllReduce, joinable::NvtxTimeline>;
static_assert(joinable::Timeline<joinable::NvtxTimeline>);

/// Two parameters, each in a bucket of its own, of 32 bytes.
constexpr joinable::DataParallelOptions two_buckets{
    .bucket_cap_bytes = 32, .first_bucket_bytes = 32, .rebuild_buckets = false
};

template <class Params>
void backward(Ddp& ddp, Params& params, std::size_t last = 0) {
    ddp.backward([&](auto ready) {
        for (std::size_t p = params.size(); p-- > last;) {
            ready(p);
        }
        if (last != 0) {
            throw std::runtime_error{"bad sample"};
        }
    });
}
using Events = std::vector<std::string>;
/// The events of a rank that trains or shadows.
void append_round(Events& events, bool is_shadow) {
    if (is_shadow) {
        events.push_back("+shadow round");
    } else {
        for (char const* event : {"+round", "+roll call", "+forward", "-forward", "-roll call"}) {
            events.push_back(event);
        }
        events.push_back("+backward");
    }
    events.insert(events.end(), {"+bucket 0", "+bucket 1"});
    if (!is_shadow) {
        events.push_back("-backward");
    }
    events.insert(events.end(), {"-bucket 0", "-bucket 1"});
    events.push_back(is_shadow ? "-shadow round" : "-round");
}
/// Forgets what was seen.
std::map<int, std::vector<std::string>> take_events() {
    std::lock_guard const lock{profile().mutex};
    CHECK(profile().open.empty());
    return std::exchange(profile().events, {});
}

TEST_CASE("a profiler sees each round, each shadow round and each bucket begin and end") {
    for (int const world : {1, 2, 3, 4, 8}) {
        run_ranks({world}, [](ThreadCommunicator& comm) {
            this_rank = comm.rank();
            auto params = make_params<double>({4, 4}, 1.0);
            Ddp ddp{comm, params, two_buckets};
            joinable::Join guard{joinable::participants(ddp)};
            for (int input = 0; input <= comm.rank(); ++input) {
                ddp.forward([] {});
                backward(ddp, params);
            }
            guard.finish();
        });
        auto const seen = take_events();
        CHECK(seen.size() == static_cast<std::size_t>(world));
        for (auto const& [rank, events] : seen) {
            std::vector<std::string> expected;
            for (int round = 0; round < world; ++round) {
                append_round(expected, round > rank);
            }
            CHECK(events == expected);
        }
    }
    CHECK(profile().domain == "joinable");
    CHECK(profile().payloads["bucket 1"] == std::set<std::uint64_t>{32});
    CHECK(profile().payloads["round"] == std::set<std::uint64_t>{0, 1, 2, 3, 4, 5, 6, 7});
}

TEST_CASE(
    "a round that does not sync has no buckets, an evaluation is no round, a skipped batch is one"
) {
    run_ranks({1, 2}, [](ThreadCommunicator& comm) {
        this_rank = comm.rank();
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        joinable::Join guard{joinable::participants(ddp)};
        ddp.forward([] {}, {.will_sync = false});
        backward(ddp, params);
        ddp.forward([] {}, {.phase = joinable::Phase::evaluate});
        ddp.skip();
        guard.finish();
    });
    for (auto const& [rank, events] : take_events()) {
        std::vector<std::string> expected;
        for (int group = rank; group < 2; ++group) { // rank 0 is in both
            for (char const* event :
                 {"+round",    "+roll call", "-roll call", "+forward",   "-forward",
                  "+backward", "-backward",  "-round",     "+roll call", "-roll call",
                  "+forward",  "-forward",   "+round",     "+roll call", "-roll call",
                  "+bucket 0", "+bucket 1",  "-bucket 0",  "-bucket 1",  "-round"}) {
                expected.push_back(event); // of the evaluation the pass
            }
        }
        CHECK(events == expected);
    }
}

TEST_CASE("where a round fails, what it began has ended when the error is seen") {
    for (int const world : {1, 2, 3, 4, 8}) {
        for (bool const in_backward : {false, true}) {
            auto const run = [&] {
                run_ranks({world}, [&](ThreadCommunicator& comm) {
                    this_rank = comm.rank();
                    int const last = comm.size() - 1;
                    auto params = make_params<double>({4, 4}, 1.0);
                    Ddp ddp{comm, params, two_buckets};
                    auto const train = [&] {
                        joinable::Join guard{joinable::participants(ddp)};
                        for (int input = 0; input < 3; ++input) {
                            bool const fails = comm.rank() == last && input == 1;
                            if (comm.rank() == 0 && last != 0 && input == 1) {
                                break; // shadows the round that fails
                            }
                            ddp.forward([&] {
                                if (fails && !in_backward) {
                                    throw std::runtime_error{"bad sample"};
                                }
                            });
                            backward(ddp, params, fails ? 1 : 0);
                        }
                        guard.finish();
                    };
                    try {
                        train();
                        FAIL_CHECK("no exception");
                    } catch (std::exception const&) {
                        std::lock_guard const lock{profile().mutex};
                        int open = 0;
                        for (std::string const& event : profile().events[comm.rank()]) {
                            open += event[0] == '+' ? 1 : -1;
                        }
                        CHECK(open == 0);
                        if (comm.rank() == last) { // after a whole round
                            CHECK(profile().events[last].size() == (in_backward ? 22 : 18));
                            throw;
                        }
                    }
                });
            };
            CHECK_THROWS_WITH_AS(run(), "bad sample", std::runtime_error);
            static_cast<void>(take_events());
        }
    }
}

TEST_CASE("a round whose pass never comes ends with the model") {
    run_ranks({1, 2, 4}, [](ThreadCommunicator& comm) {
        this_rank = comm.rank();
        auto params = make_params<double>({4, 4}, 1.0);
        Ddp ddp{comm, params, two_buckets};
        ddp.forward([] {});
    });
    auto const seen = take_events();
    CHECK(seen.at(3) == Events{"+round", "+forward", "-forward", "-round"});
}

} // namespace
