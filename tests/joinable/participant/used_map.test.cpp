// SPDX-License-Identifier: BSL-1.0
// By which communicator the map of used parameters travels, and in which order.
#include <joinable/participant/data_parallel.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::ThreadCommunicator;

std::string const map = "all_reduce 5 u64"; ///< of the five parameters below
std::string const roll_call = "all_reduce 7 u64";

std::size_t count(std::vector<std::string> const& trace, std::string const& entry) {
    return static_cast<std::size_t>(std::count(trace.begin(), trace.end(), entry));
}

enum class Opens { notification, look_ahead, known_lengths };

/// One rank's model, of which no rank uses parameter 0.
struct Rank {
    using Comm = RecordingCommunicator<ThreadCommunicator>;

    explicit Rank(ThreadCommunicator& hosts, int models = 1) : own_{hosts.split(0, hosts.rank())} {
        for (int i = 0; i < models; ++i) {
            params.push_back(make_params<double>({3, 1, 4, 2, 2}));
        }
    }
    template <class Ddp>
    void round(Ddp& ddp, std::vector<Param<double>>& of, int number) {
        ddp.forward([] {});
        ddp.backward(
            [&](auto ready) {
                for (std::size_t i = of.size(); i-- > 1;) {
                    for (std::size_t k = 0; k < of[i].value.size(); ++k) {
                        of[i].g(k) = number + 1.0;
                    }
                    ready(i);
                }
            },
            std::vector<std::size_t>{0}
        );
    }

private:
    ThreadCommunicator own_;

public:
    Comm comm{own_};
    std::vector<std::vector<Param<double>>> params;
};

template <class Control, class Body, class... Js>
void run_rounds(Opens opens, Control control, int inputs, Body const& body, Js&... participants) {
    std::vector<int> numbers(static_cast<std::size_t>(inputs));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = static_cast<int>(i);
    }
    joinable::JoinOptions options;
    if (opens == Opens::known_lengths) {
        options.inputs = numbers.size();
    }
    joinable::Join guard{joinable::participants(participants...), control, options};
    if (opens == Opens::look_ahead) {
        for (int const number : guard.iterate(joinable::look_ahead, numbers)) {
            body(number);
        }
    } else {
        for (int const number : numbers) {
            body(number);
        }
    }
    guard.finish();
}

joinable::DataParallelOptions const options{
    .bucket_cap_bytes = 16, .first_bucket_bytes = 16, .find_unused = true
};

TEST_CASE("in a guard each map goes by the control communicator, in one order on all ranks") {
    for (Opens const opens : {Opens::notification, Opens::look_ahead, Opens::known_lengths}) {
        for (bool const has_own_control : {true, false}) {
            run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& hosts) {
                Rank rank{hosts, 2};
                RecordingCommunicator control{hosts};
                joinable::DistributedDataParallel one{rank.comm, rank.params[0], options};
                joinable::DistributedDataParallel two{rank.comm, rank.params[1], options};
                auto const n = static_cast<std::size_t>(hosts.size());
                rank.comm.trace.clear();
                auto const body = [&](int number) {
                    rank.round(one, rank.params[0], number);
                    rank.round(two, rank.params[1], number);
                };
                auto const run = [&](auto& words) {
                    run_rounds(opens, joinable::control(words), hosts.rank() + 1, body, one, two);
                };
                has_own_control ? run(control) : run(rank.comm);
                std::vector<std::string> const& trace =
                    has_own_control ? control.trace : rank.comm.trace;
                CHECK(count(trace, map) == 2 * n);
                CHECK(count(control.trace, map) == (has_own_control ? 2 * n : 0));
                CHECK(rank.comm.has_trace_of_all());
                CHECK(control.has_trace_of_all());
                // Before the first map: ranks enter the guard, and open this round; with look-ahead
                // the next one, too.
                auto const first = std::find(trace.begin(), trace.end(), map);
                CHECK(
                    std::count(trace.begin(), first, roll_call) == (opens == Opens::look_ahead ? 3
                                                                    : opens == Opens::notification
                                                                        ? 2
                                                                        : 1)
                );
                // Outside a guard there is but the model's own.
                std::size_t const before = count(rank.comm.trace, map);
                std::size_t const words = control.trace.size();
                rank.round(one, rank.params[0], 0);
                CHECK(count(rank.comm.trace, map) == before + 1);
                CHECK(control.trace.size() == words);
            });
        }
    }
}

TEST_CASE("a throw beside a map that goes by a control communicator is heard by all ranks") {
    for (Opens const opens : {Opens::notification, Opens::look_ahead, Opens::known_lengths}) {
        for (bool const is_in_forward : {true, false}) {
            run_ranks({2, 3, 4, 8}, [&](ThreadCommunicator& hosts) {
                Rank rank{hosts};
                joinable::DistributedDataParallel ddp{rank.comm, rank.params[0], options};
                int const culprit = hosts.size() - 1;
                auto const fail_at = [&](bool here, int number) {
                    if (here && hosts.rank() == culprit && number == 1) {
                        throw std::runtime_error{"bad sample"};
                    }
                };
                auto const train = [&] {
                    run_rounds(
                        opens,
                        joinable::control(hosts),
                        hosts.rank() + 1,
                        [&](int number) {
                            ddp.forward([&] { fail_at(is_in_forward, number); });
                            ddp.backward(
                                [&](auto ready) {
                                    ready(4);
                                    fail_at(!is_in_forward, number);
                                    for (std::size_t i = 4; i-- > 1;) {
                                        ready(i);
                                    }
                                },
                                std::vector<std::size_t>{0}
                            );
                        },
                        ddp
                    );
                };
                if (hosts.rank() == culprit) {
                    CHECK_THROWS_WITH_AS(train(), "bad sample", std::runtime_error);
                } else {
                    try {
                        train();
                        FAIL_CHECK("a rank failed, and nobody was told");
                    } catch (joinable::PeerFailed const& error) {
                        CHECK(error.ranks() == std::vector{culprit});
                    }
                }
            });
        }
    }
}

} // namespace
