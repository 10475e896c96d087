// SPDX-License-Identifier: BSL-1.0
// Checks that JOINABLE_CHECK turns on in a program that was not compiled for them.
#include <joinable/detail/requested_checks.hpp>

#include <cstddef>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/failure_text.hpp>

#include <support/environment_variable.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>

#include <joinable/bucket/compression/no_reduction.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::detail::RequestedChecks;

constexpr char const* variable = "JOINABLE_CHECK";

/// Trains up to four rounds with a guard. In round 1 the last rank spoils its first value, or adds to a gradient
/// after it was ready. Returns how many rounds were completed.
template <class Model>
std::size_t train(Model& model, std::vector<Param<double>>& params, bool is_late, bool is_spoiled) {
    std::size_t rounds = 0;
    joinable::Join guard{joinable::participants(model)};
    for (; rounds < 4; ++rounds) {
        if (is_spoiled && rounds == 1) {
            params[0].value[0] += 1;
        }
        model.forward([] {});
        model.backward([&](auto ready) {
            for (std::size_t p = params.size(); p-- > 0;) {
                add_gradient(params[p], 1);
                ready(p);
            }
            if (is_late) {
                add_gradient(params[1], 1);
            }
        });
    }
    guard.finish();
    return rounds;
}

/// The same body over threads and processes, with the variable set before they start.
template <class Body>
void run_with(char const* words, Body const& body) {
    EnvironmentVariable const set{variable, words};
    run_ranks({1, 2, 3, 4, 8}, body);
    run_process_ranks({1, 2, 3, 4, 8}, body);
}

TEST_CASE("JOINABLE_CHECK has words with commas between them, and an unknown one is refused") {
    auto const found = [](char const* words) {
        EnvironmentVariable const set{variable, words};
        RequestedChecks const checks = RequestedChecks::read();
        return 100 * checks.collectives + 10 * checks.ready + checks.replicas;
    };
    CHECK(found("") == 0);
    CHECK(found("collectives") == 100);
    CHECK(found("ready") == 10);
    CHECK(found("replicas") == 1);
    CHECK(found("replicas,collectives") == 101);
    CHECK(found("collectives,ready,replicas") == 111);
    for (char const* const words :
         {"all", "Ready", "ready replicas", "ready,,replicas", "ready2"}) {
        CHECK_THROWS_AS((void)found(words), ContractViolation);
    }
    REQUIRE(std::getenv(variable) == nullptr);
    CHECK(RequestedChecks::read().text.empty());
    run_with("ready,replica", [](auto& comm) {
        auto params = make_params<double>({3});
        CHECK(
            failure_of([&] { DistributedDataParallel{comm, params}; }) ==
            "contract: expected words of collectives, ready and replicas in JOINABLE_CHECK, "
            "with commas between them, but found \"replica\""
        );
        comm.barrier();
    });
}

TEST_CASE(
    "with JOINABLE_CHECK=ready models find gradients that change after ready" *
    doctest::skip(joinable::detail::has_thread_sanitizer) // the mistake is a race
) {
    for (char const* const words : {"", "replicas", "ready", "replicas,ready"}) {
        bool const finds = std::string{words}.find("ready") != std::string::npos;
        run_with(words, [&](auto& comm) {
            auto params = make_params<double>({3, 1, 5});
            DistributedDataParallel ddp{comm, params, {.sync_at_end = false}};
            bool const is_late = comm.rank() == comm.size() - 1;
            std::string const text = failure_of([&] { train(ddp, params, is_late, false); });
            CAPTURE(text);
            CHECK(
                (text.find("the gradient of parameter 1 changed after ready(1)") !=
                 std::string::npos) == finds
            );
            CHECK(text.empty() != finds);
        });
    }
    run_with("ready", [](auto& comm) {
        auto params = make_params<double>({3, 1, 5});
        joinable::ShardedDataParallel sharded{
            comm,
            params,
            joinable::Sgd{.learning_rate = 0.5},
            {.sharding = joinable::Sharding::none}
        };
        bool const is_late = comm.rank() == comm.size() - 1;
        std::string const text = failure_of([&] { train(sharded, params, is_late, false); });
        CAPTURE(text);
        CHECK(text.find("parameter 1 changed after ready(1)") != std::string::npos);
    });
}

TEST_CASE("with JOINABLE_CHECK=replicas ranks compare in each round, or as often as the options say"
) {
    for (std::size_t const every : {0U, 1U, 3U}) {
        run_with("replicas", [&](auto& comm) {
            auto params = make_params<double>({3, 1}, 1.0);
            DistributedDataParallel ddp{comm, params, {.verify_replicas = every}};
            bool const is_spoiled = comm.rank() == 1;
            std::string const text = failure_of([&] {
                std::size_t const rounds = train(ddp, params, false, is_spoiled);
                CHECK(rounds == 4);
            });
            CAPTURE(text);
            CHECK((text.find("mismatch: replicas differ: parameter 0") == 0) == (comm.size() > 1));
            // Each of its three elements got 1 in each round that was completed.
            CHECK(params[0].g(2) == (comm.size() == 1 ? 4.0 : every == 3 ? 2.0 : 1.0));
        });
    }
    run_with("replicas,ready", [](auto& comm) { // values that differ on purpose
        auto params = make_params<double>({3, 1}, 1.0);
        DistributedDataParallel ddp{
            comm, params, DataParallelOptions{.sync_at_end = false}, joinable::NoReduction{}
        };
        CHECK(train(ddp, params, false, comm.rank() == 1) == 4);
    });
}

TEST_CASE(
    "ranks with other words in JOINABLE_CHECK are told, and so are those beside an unknown word"
) {
    run_process_ranks({2, 3, 4, 8}, [](auto& comm) {
        auto params = make_params<double>({3});
        auto const failure = [&](char const* words, auto const& make) {
            EnvironmentVariable const set{variable, comm.rank() == 1 ? words : "ready"};
            return failure_of(make);
        };
        auto const ddp = [&] { DistributedDataParallel{comm, params}; };
        auto const sharded = [&] {
            joinable::ShardedDataParallel{comm, params, joinable::Sgd{.learning_rate = 0.5}};
        };
        std::string const differs =
            "options differ: JOINABLE_CHECK: rank 0 has ready, rank 1 has ready,replicas";
        CHECK(failure("ready,replicas", ddp).find(differs) != std::string::npos);
        CHECK(failure("ready,replicas", ddp).find("mismatch: ") == 0);
        CHECK(failure("ready,replicas", sharded).find(differs) != std::string::npos);
        std::string const unknown = failure("redy", ddp);
        CHECK(unknown.find(comm.rank() == 1 ? "contract: " : "peer: rank 1 failed: ") == 0);
        CHECK(unknown.find("but found \"redy\"") != std::string::npos);
        CHECK(failure("ready", ddp).empty()); // they go on
    });
}

} // namespace
