// SPDX-License-Identifier: BSL-1.0
#include <joinable/trace/data_parallel_report.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>

#include <joinable/bucket/compression/no_reduction.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::DataParallelReport;
using joinable::TraceEvent;
using joinable::TraceKind;
using std::chrono::nanoseconds;

TEST_CASE("a report has the buckets and options of its model, before and after they are cut anew") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4, 8}, 1.0);
        params[1].requires_grad = false;
        joinable::DistributedDataParallel ddp{
            comm,
            params,
            joinable::DataParallelOptions{
                .bucket_cap_bytes = 48, .first_bucket_bytes = 16, .broadcast_buffers = false
            }
        };
        auto report = joinable::data_parallel_report(ddp);
        CHECK(report.rank == comm.rank());
        CHECK(report.world_size == comm.size());
        CHECK(report.reduction == joinable::AllReduce::name);
        CHECK(report.parameters == 2);
        CHECK(report.parameter_bytes == 96);
        CHECK(report.bucket_bytes == std::vector<std::size_t>{96}); // cut by both limits only later
        CHECK(!report.buckets_are_final);
        CHECK(report.bucket_cap_bytes == 48);
        CHECK(report.first_bucket_bytes == 16);
        CHECK(!report.find_unused);
        CHECK(!report.broadcast_buffers);
        CHECK(report.model.empty());
        CHECK(report.device == "host");
        CHECK(!report.uneven_inputs);
        CHECK(report.divisor == 0);      // nothing was averaged
        CHECK(report.timed_rounds == 0); // no timeline
        ddp.forward([] {});
        ddp.backward([](auto ready) {
            ready(0);
            ready(2);
        });
        report = joinable::data_parallel_report(ddp);
        CHECK(report.buckets_are_final);
        CHECK(report.bucket_bytes == std::vector<std::size_t>{32, 64});

        auto const json = nlohmann::json::parse(to_json(report));
        CHECK(json.size() == 23); // the model has no name
        CHECK(json.at("rank") == comm.rank());
        CHECK(json.at("world_size") == comm.size());
        CHECK(json.at("reduction") == std::string{joinable::AllReduce::name});
        CHECK(json.at("parameters") == 2);
        CHECK(json.at("parameter_bytes") == 96);
        CHECK(json.at("bucket_bytes") == std::vector<std::size_t>{32, 64});
        CHECK(json.at("buckets_are_final") == true);
        CHECK(json.at("bucket_cap_bytes") == 48);
        CHECK(json.at("first_bucket_bytes") == 16);
        CHECK(json.at("find_unused") == false);
        CHECK(json.at("static_graph") == false);
        CHECK(json.at("gradient_as_bucket_view") == false);
        CHECK(json.at("broadcast_buffers") == false);
        CHECK(json.at("device") == "host");
        CHECK(json.at("uneven_inputs") == false);
        CHECK(json.at("divisor") == comm.size());
        CHECK(json.at("timed_rounds") == 0);
        CHECK(json.at("overlap_nanoseconds") == 0);
        CHECK(to_string(report).find("\nbucket_bytes             [32, 64]\n") != std::string::npos);
    });
}

TEST_CASE("a name that is not UTF-8 is read as Latin-1 where it is not, so that the line is JSON") {
    struct Name {
        char const* given;
        char const* expected;
    };
    for (Name const name :
         {Name{"caf\xe9", "caf\xc3\xa9"},
          {"\xe9\xc3\xa9", "\xc3\xa9\xc3\xa9"},
          {"\xe2\x82\xac", "\xe2\x82\xac"},
          {"\xe2\x82", "\xc3\xa2\xc2\x82"}, // cut
          {"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80"},
          {"\xc1\xaf", "\xc3\x81\xc2\xaf"}, // longer than needed
          {"\xe0\x9f\xbf", "\xc3\xa0\xc2\x9f\xc2\xbf"},
          {"\xf0\x8f\xbf\xbf", "\xc3\xb0\xc2\x8f\xc2\xbf\xc2\xbf"},
          {"\xed\xa0\x80", "\xc3\xad\xc2\xa0\xc2\x80"},             // a surrogate
          {"\xf4\x90\x80\x80", "\xc3\xb4\xc2\x90\xc2\x80\xc2\x80"}, // above all characters
          {"\xff", "\xc3\xbf"}}) {
        DataParallelReport report;
        report.model = name.given;
        CHECK(nlohmann::json::parse(to_json(report)).at("model") == name.expected);
    }
}

template <class Comm>
bool sums_gradients_where_they_lie(Comm const& comm) {
    if constexpr (joinable::detail::has_sum_of_pieces<Comm>) {
        return comm.sums_pieces();
    } else {
        return false;
    }
}

TEST_CASE("a report says that gradients could be views of the buckets where they are copied") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const are_views : {false, true}) {
            auto params = make_params<double>({4, 8}, 1.0);
            joinable::DistributedDataParallel ddp{
                comm, params, joinable::DataParallelOptions{.gradient_as_bucket_view = are_views}
            };
            CHECK(!joinable::data_parallel_report(ddp).could_be_views); // nothing was copied yet
            ddp.forward([] {});
            ddp.backward([](auto ready) {
                ready(1);
                ready(0);
            });
            bool const copies = !are_views && !sums_gradients_where_they_lie(comm);
            auto const report = joinable::data_parallel_report(ddp);
            CHECK(report.could_be_views == copies);
            CHECK(to_string(report).ends_with("set gradient_as_bucket_view\n") == copies);
            if (comm.rank() == 0) { // gives zeros
                ddp.skip();
            } else {
                ddp.forward([] {});
                ddp.backward([](auto ready) {
                    ready(1);
                    ready(0);
                });
            }
            CHECK(joinable::data_parallel_report(ddp).could_be_views == copies);
        }
    });
}

TEST_CASE("times are averages over the rounds of this rank that were recorded whole") {
    DataParallelReport report;
    std::vector<TraceEvent> const events{
        {-9, -5, 0, 0, TraceKind::backward}, // its round began before start()
        {-8, -6, 0, 0, TraceKind::bucket},
        {10, 40, 0, 0, TraceKind::forward},
        {50, 90, 0, 0, TraceKind::backward},
        {70, 95, 0, 0, TraceKind::bucket},
        {80, 100, 0, 1, TraceKind::bucket},
        {0, 110, 0, 0, TraceKind::round}, // 30, 40, from 70 to 100, of these 20 in the pass
        {200, 300, 0, 0, TraceKind::bucket},
        {190, 310, 1, 0, TraceKind::shadow_round},
        {400, 410, 0, 0, TraceKind::forward},
        {410, 420, 0, 0, TraceKind::backward},
        {395, 425, 2, 0, TraceKind::round},   // 10, 10, no buckets
        {430, 440, 0, 0, TraceKind::forward}, // of an evaluation
        {450, 460, 0, 0, TraceKind::forward},
        {460, 470, 0, 0, TraceKind::backward},
        {445, 475, 3, 0, TraceKind::round},   // as the one before
        {500, 900, 0, 0, TraceKind::forward}, // its round was dropped
    };
    joinable::detail::add_times(report, events);
    CHECK(report.timed_rounds == 3);
    CHECK(report.round == nanoseconds{170 / 3});
    CHECK(report.forward == nanoseconds{50 / 3});
    CHECK(report.backward == nanoseconds{20});
    CHECK(report.buckets == nanoseconds{10});
    CHECK(report.overlap == nanoseconds{20 / 3});
    CHECK(nlohmann::json::parse(to_json(report)).at("backward_nanoseconds") == 20);
    CHECK(to_string(report).find("\nbackward                 0.02 us\n") != std::string::npos);
}

TEST_CASE("with a timeline that records, a report has the times of this rank's rounds") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4, 4}, 1.0);
        joinable::
            DistributedDataParallel<RankCommunicator, joinable::AllReduce, joinable::TraceTimeline>
                ddp{comm, params};
        ddp.timeline().start(1000);
        joinable::Join guard{joinable::participants(ddp)};
        for (int input = 0; input <= comm.rank(); ++input) {
            ddp.forward([] {});
            ddp.backward([](auto ready) {
                ready(1);
                ready(0);
            });
        }
        guard.finish();
        auto const report = joinable::data_parallel_report(ddp);
        CHECK(report.timed_rounds == static_cast<std::size_t>(comm.rank()) + 1);
        CHECK(report.forward > nanoseconds{});
        CHECK(report.backward > nanoseconds{});
        CHECK(report.buckets > nanoseconds{});
        CHECK(report.overlap <= report.backward);
        CHECK(report.overlap <= report.buckets);
        CHECK(report.forward + report.backward <= report.round);
    });
}

/// Runs a round of a model of one parameter.
template <class Ddp>
void train(Ddp& ddp, joinable::RoundNotice const& notice = {}) {
    ddp.forward([] {}, notice);
    ddp.backward([](auto ready) { ready(0); });
}

TEST_CASE("a report names its model, and escapes the name") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4}, 1.0);
        std::string const name = "a \"small\"\nmodel\x01";
        joinable::DistributedDataParallel ddp{
            comm, params, joinable::DataParallelOptions{.model_name = name}
        };
        auto const report = joinable::data_parallel_report(ddp);
        CHECK(report.model == name);
        std::string const line = to_json(report);
        CHECK(line.find('\n') == std::string::npos);
        CHECK(nlohmann::json::parse(line).at("model") == name);
    });
}

TEST_CASE("the divisor is that of the last average: all ranks, those that contributed, or weights"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const size = static_cast<double>(comm.size());
        for (bool const divides_by_all : {true, false}) {
            auto params = make_params<double>({4}, 1.0);
            joinable::DistributedDataParallel ddp{comm, params};
            train(ddp);
            CHECK(joinable::data_parallel_report(ddp).divisor == size);
            CHECK(!joinable::data_parallel_report(ddp).uneven_inputs);
            joinable::Join guard{
                joinable::participants(ddp), joinable::divide_by_initial_world_size = divides_by_all
            };
            CHECK(joinable::data_parallel_report(ddp).uneven_inputs);
            for (int input = 0; input <= comm.rank(); ++input) { // rank r trains r + 1 rounds
                train(ddp);
                CHECK(
                    joinable::data_parallel_report(ddp).divisor ==
                    (divides_by_all ? size : size - input)
                );
            }
            guard.finish();
            CHECK(joinable::data_parallel_report(ddp).divisor == (divides_by_all ? size : 1));
            CHECK(joinable::data_parallel_report(ddp).uneven_inputs);
            // Outside a guard, too: the sum of 1, 2, ..., or of nothing.
            train(ddp, {.weight = static_cast<std::uint64_t>(comm.rank()) + 1});
            CHECK(joinable::data_parallel_report(ddp).divisor == size * (size + 1) / 2);
            train(ddp, {.weight = 0});
            CHECK(joinable::data_parallel_report(ddp).divisor == 0);
        }
    });
}

TEST_CASE("in a guard that is not enabled ranks have equally many inputs") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4}, 1.0);
        joinable::DistributedDataParallel ddp{comm, params};
        joinable::Join guard{joinable::participants(ddp), {.enable = false}};
        train(ddp);
        guard.finish();
        CHECK(!joinable::data_parallel_report(ddp).uneven_inputs);
    });
}

TEST_CASE("a line comes in every so many rounds on each rank, also where rounds are shadowed") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (std::size_t const every : {1U, 2U, 3U, 100U}) {
            auto params = make_params<double>({4}, 1.0);
            joinable::DistributedDataParallel ddp{
                comm, params, joinable::DataParallelOptions{.report_every = every}
            };
            train(ddp); // nobody has said where to
            std::vector<std::string> lines;
            joinable::report_to(ddp, [&](std::string_view line) { lines.emplace_back(line); });
            joinable::Join guard{joinable::participants(ddp)};
            for (int input = 0; input <= comm.rank(); ++input) {
                {
                    auto const quiet = ddp.no_sync(); // averages nothing, so it does not count
                    train(ddp);
                }
                train(ddp);
            }
            guard.finish();
            auto const rounds = static_cast<std::size_t>(comm.size()); // of the highest rank
            CHECK(lines.size() == rounds / every);
            train(ddp);
            ddp.skip(); // counts: the others train
            CHECK(lines.size() == (rounds + 2) / every);
            for (std::string const& line : lines) {
                CHECK(line.ends_with("}\n"));
                auto const json = nlohmann::json::parse(line);
                CHECK(json.at("rank") == comm.rank());
                CHECK(json.at("divisor") == comm.size());
            }
        }
    });
}

TEST_CASE("lines go into a file, and only from ranks that say so") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4}, 1.0);
        joinable::DistributedDataParallel ddp{
            comm, params, joinable::DataParallelOptions{.report_every = 2}
        };
        std::FILE* const file = std::tmpfile();
        REQUIRE(file != nullptr);
        if (comm.rank() == 0) {
            joinable::report_to(ddp, file);
        }
        std::string expected;
        for (int round = 0; round < 4; ++round) {
            train(ddp);
            if (comm.rank() == 0 && round % 2 == 1) {
                expected += to_json(joinable::data_parallel_report(ddp)) + "\n";
            }
        }
        std::rewind(file);
        std::string text(10'000, ' ');
        text.resize(std::fread(text.data(), 1, text.size(), file));
        static_cast<void>(std::fclose(file));
        CHECK(text == expected);
    });
}

TEST_CASE("what a sink of lines throws leaves the guard, and the others hear of it") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4}, 1.0);
        joinable::DistributedDataParallel ddp{
            comm, params, joinable::DataParallelOptions{.report_every = 2}
        };
        if (comm.rank() == 1) {
            joinable::report_to(ddp, [](std::string_view) {
                throw std::runtime_error{"disk full"};
            });
        }
        int rounds = 0;
        int failed = -1;
        std::string text;
        try {
            joinable::Join guard{joinable::participants(ddp)};
            for (; rounds < 5; ++rounds) {
                train(ddp);
            }
            guard.finish();
        } catch (joinable::PeerFailed const& error) {
            failed = error.rank();
        } catch (std::runtime_error const& error) {
            text = error.what();
        }
        CHECK(failed == (comm.rank() == 1 ? -1 : 1));
        CHECK(text == (comm.rank() == 1 ? "disk full" : ""));
        CHECK(rounds == (comm.rank() == 1 ? 1 : 2));
        std::uint64_t sum = 1; // it failed between rounds, so collectives go on
        comm.all_reduce({&sum, 1, joinable::DType::u64}, joinable::ReduceOp::sum).wait();
        CHECK(sum == static_cast<std::uint64_t>(comm.size()));
    });
}

TEST_CASE("a model that never reports refuses a sink of lines") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4}, 1.0);
        joinable::DistributedDataParallel ddp{comm, params};
        CHECK_THROWS_WITH_AS(
            joinable::report_to(ddp, stderr),
            "a report is written in every DataParallelOptions::report_every rounds, but that is 0, which is never; "
            "set it on all ranks",
            joinable::ContractViolation
        );
    });
}

TEST_CASE("a model that averages nothing has no divisor") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({4}, 1.0);
        joinable::DistributedDataParallel ddp{
            comm,
            params,
            joinable::DataParallelOptions{.sync_at_end = false},
            joinable::NoReduction{}
        };
        train(ddp);
        CHECK(joinable::data_parallel_report(ddp).divisor == 0);
    });
}

} // namespace
