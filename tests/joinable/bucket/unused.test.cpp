// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/reducer.hpp>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/recording_communicator.hpp>

namespace {

using namespace joinable_tests;
using joinable::Reducer;

using Trace = std::vector<std::string>;

std::vector<Param<float>> make_params(std::size_t count, bool with_gradients = true) {
    std::vector<Param<float>> params;
    for (std::size_t i = 0; i < count; ++i) {
        params.emplace_back(4);
        if (!with_gradients) {
            params.back().grad = {};
        }
    }
    return params;
}

template <class Verb>
std::string text_of(Verb const& verb) {
    try {
        verb();
    } catch (joinable::ContractViolation const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("rank 0 uses one parameter, the others another, nobody the third: it stays as it is") {
    for (bool const views : {false, true}) {
        for (bool const is_static : {false, true}) {
            for (bool const with_gradients : {false, true}) {
                over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                    auto params = make_params(3, with_gradients);
                    Reducer reducer{
                        comm,
                        joinable::parameters(params),
                        {.gradient_as_bucket_view = views,
                         .find_unused = true,
                         .static_graph = is_static}
                    };
                    if (with_gradients) {
                        params[2].g(1) = static_cast<float>(100 + comm.rank());
                    }
                    std::size_t const mine = comm.rank() == 0 ? 0 : 1;
                    for (int i = 0; i < 3; ++i) {
                        if (is_static) {
                            reducer.prepare_for_backward(1.0);
                        } else {
                            reducer.prepare_for_backward(1.0, [&](std::size_t p) {
                                return p != mine;
                            });
                        }
                        if (!params[mine].grad) {
                            params[mine].grad = joinable::AnyView{params[mine].storage};
                        }
                        params[mine].g(3) = 5.0F;
                        reducer.mark_ready(mine);
                        reducer.finalize_backward();
                        CHECK(params[0].g(3) == 5.0F);
                        if (comm.size() > 1) {
                            CHECK(params[1].g(3) == 5.0F * static_cast<float>(comm.size() - 1));
                        }
                        CHECK(bool(params[2].grad) == with_gradients);
                        if (with_gradients) {
                            CHECK(params[2].g(1) == static_cast<float>(100 + comm.rank()));
                        }
                    }
                });
            }
        }
    }
}

TEST_CASE("what nobody uses is not sent: one map, then each run of parameters that some rank uses"
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        auto params = make_params(7);
        Reducer reducer{
            comm,
            joinable::parameters(params),
            {.bucket_cap_bytes = 64, .first_bucket_bytes = 48, .find_unused = true}
        };
        // Buckets {6 5 4} {3 2 1 0}; nobody uses 5 and 1, 2 and 3 only rank 0.
        std::vector<std::size_t> unused{5, 1};
        if (comm.rank() != 0) {
            unused.insert(unused.end(), {3, 2});
        }
        reducer.prepare_for_backward(1.0, unused);
        for (std::size_t const i : {0U, 4U, 6U}) {
            reducer.mark_ready(i);
        }
        if (comm.rank() == 0) {
            reducer.mark_ready(2);
            reducer.mark_ready(3);
        }
        reducer.finalize_backward();
        CHECK(
            comm.trace ==
            Trace{
                "all_reduce 7 u64",
                "all_reduce 4 f32",
                "all_reduce 4 f32",
                "all_reduce 8 f32",
                "all_reduce 4 f32",
            }
        );
        // A rank without gradients, and a round in which nobody uses the first bucket.
        comm.trace.clear();
        if (comm.rank() == 0) {
            reducer.prepare_for_backward(1.0, {6, 5, 4});
            for (std::size_t const i : {0U, 1U, 2U, 3U}) {
                reducer.mark_ready(i);
            }
            reducer.finalize_backward();
        } else {
            reducer.contribute_zeros();
        }
        CHECK(comm.trace == Trace{"all_reduce 7 u64", "all_reduce 16 f32"});
    });
}

TEST_CASE("a static graph sends its map once, and ranks without gradients take part in it") {
    for (bool const rank_0_starts_late : {false, true}) {
        over_ranks({1, 2, 3, 4}, [&](RankCommunicator& inner) {
            RecordingCommunicator comm{inner};
            auto params = make_params(4);
            Reducer reducer{
                comm,
                joinable::parameters(params),
                {.bucket_cap_bytes = 16, .first_bucket_bytes = 16, .static_graph = true}
            };
            bool const is_late = rank_0_starts_late && comm.rank() == 0;
            int const source = comm.size() - 1; // the only rank of one is late itself
            for (int i = 0; i < 3; ++i) {
                if (is_late && i == 0) {
                    reducer.contribute_zeros(source);
                    continue;
                }
                reducer.prepare_for_backward(1.0, {}, source);
                // Parameter 1 is used twice, 2 never.
                for (std::size_t const p : {1U, 3U, 1U, 0U}) {
                    params[p].g(0) = 1.0F;
                    reducer.mark_ready(p);
                }
                reducer.finalize_backward();
                bool const all = i != 0 || !rank_0_starts_late;
                CHECK(params[1].g(0) == static_cast<float>(all ? comm.size() : comm.size() - 1));
            }
            Trace expected;
            int later = 2; // iterations
            if (comm.size() == 1 && rank_0_starts_late) {
                expected = {"all_reduce 4 u64", "broadcast 5 u64"}; // of nobody: not the graph
                later = 1;
            }
            // First one bucket with parameters 3 2 1 0, then one of each.
            for (char const* const what :
                 {"all_reduce 4 u64", "all_reduce 4 f32", "all_reduce 8 f32", "broadcast 5 u64"}) {
                expected.emplace_back(what);
            }
            for (int i = 0; i < 3 * later; ++i) {
                expected.emplace_back("all_reduce 4 f32");
            }
            CHECK(comm.trace == expected);
            CHECK(reducer.buckets()[0].parameters[0] == 3); // by the last use; unused last
            CHECK(reducer.buckets()[1].parameters[0] == 1);
            CHECK(reducer.buckets()[3].parameters[0] == 2);
        });
    }
}

TEST_CASE("a static graph that changes is refused, both ways, by the parameter's name") {
    over_ranks({1}, [](RankCommunicator& comm) {
        auto params = make_params(2);
        params[1].name = "fc.bias";
        auto const run = [&](std::vector<std::size_t> const& first, auto const& then) {
            Reducer reducer{comm, joinable::parameters(params), {.static_graph = true}};
            reducer.prepare_for_backward(1.0);
            for (std::size_t const i : first) {
                reducer.mark_ready(i);
            }
            reducer.finalize_backward();
            return text_of([&] {
                reducer.prepare_for_backward(1.0);
                for (std::size_t const i : then) {
                    reducer.mark_ready(i);
                }
                reducer.finalize_backward();
            });
        };
        CHECK(run({0, 1}, std::array<std::size_t, 2>{1, 0}).empty());
        CHECK(
            run({0}, std::array<std::size_t, 2>{0, 1}) ==
            "parameter 1 (fc.bias) on rank 0 is used, but was not in the first iteration: with "
            "static_graph all iterations use the same parameters; turn it off and find_unused on"
        );
        CHECK(
            run({0, 1}, std::array<std::size_t, 1>{0}) ==
            "parameters are not used, but were in the first iteration: with static_graph all "
            "iterations use the same parameters; turn it off and find_unused on (rank 0 did not "
            "mark parameter 1 (fc.bias))"
        );
        CHECK(
            run({0, 1}, std::array<std::size_t, 3>{0, 1, 1}) ==
            "parameter 1 (fc.bias) on rank 0 became ready more often than in the first iteration: "
            "with static_graph all iterations use parameters equally often; turn it off"
        );
    });
}

TEST_CASE("a static graph refuses what was accumulated, unless some rank used it at first") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const is_used_by_one : {false, true}) {
            if (is_used_by_one && comm.size() == 1) {
                continue;
            }
            auto params = make_params(2);
            params[1].name = "fc.bias";
            Reducer reducer{comm, joinable::parameters(params), {.static_graph = true}};
            bool const uses_it = is_used_by_one && comm.rank() == comm.size() - 1;
            auto const pass = [&] {
                reducer.prepare_for_backward(1.0);
                if (uses_it) {
                    params[1].g(0) = 1.0F;
                    reducer.mark_ready(1);
                }
                params[0].g(0) = 1.0F;
                reducer.mark_ready(0);
                reducer.finalize_backward();
            };
            pass();
            if (!uses_it) { // rounds that were not reduced used it on this rank
                params[1].g(0) = 1.0F;
                reducer.mark_accumulated(1);
            }
            if (is_used_by_one) {
                pass();
                CHECK(params[1].g(0) == static_cast<float>(comm.size()));
            } else {
                CHECK(
                    text_of(pass) ==
                    joinable::detail::concat(
                        "parameter 1 (fc.bias) on rank ",
                        comm.rank(),
                        " is used, but no rank used it in the first iteration: with static_graph all "
                        "iterations use the same parameters; turn it off and find_unused on"
                    )
                );
            }
        }
    });
}

TEST_CASE("misuse of unused parameters says what to do") {
    over_ranks({1}, [](RankCommunicator& comm) {
        auto params = make_params(3);
        params[2].requires_grad = false;
        Reducer plain{comm, joinable::parameters(params)};
        CHECK(
            text_of([&] { plain.prepare_for_backward(1.0, {0}); }) ==
            "parameter 0 on rank 0 was said to be unused, but the option find_unused is off or "
            "static_graph finds out by itself; turn find_unused on, or mark it ready with a gradient of zeros"
        );
        auto const with = [&](auto const& body) {
            Reducer reducer{comm, joinable::parameters(params), {.find_unused = true}};
            return text_of([&] { body(reducer); });
        };
        CHECK(with([](auto& r) {
                  r.prepare_for_backward(1.0, {1, 1});
              }) == "parameter 1 on rank 0 was said to be unused twice");
        CHECK(with([](auto& r) {
                  r.prepare_for_backward(1.0, {3});
              }) == "parameter 3 is out of range on rank 0: there are 3 parameters");
        CHECK(with([](auto& r) {
                  r.prepare_for_backward(1.0, {2});
              }) == "parameter 2 on rank 0 was marked, but does not require a gradient");
        CHECK(
            with([](auto& r) {
                r.prepare_for_backward(1.0, {1});
                r.mark_ready(1);
            }) == "parameter 1 on rank 0 was said to be unused, but became ready; leave it out of "
                  "the unused ones"
        );
        CHECK(
            with([](auto& r) {
                r.prepare_for_backward(1.0, {1});
                r.finalize_backward();
            }) ==
            "not all gradients became ready; give those that the pass does not use to backward() or "
            "prepare_for_backward() as unused, or check that all outputs of forward reach the loss "
            "(rank 0 did not mark parameter 0)"
        );
    });
}

TEST_CASE("what was accumulated in rounds that were not reduced counts as used") {
    for (bool const is_static : {false, true}) {
        over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
            auto params = make_params(3);
            Reducer reducer{
                comm,
                joinable::parameters(params),
                {.find_unused = !is_static, .static_graph = is_static}
            };
            bool const has_more = comm.rank() == 0;
            if (has_more) { // an earlier round used parameter 1, this one does not
                params[1].g(0) = 7.0F;
                reducer.mark_accumulated(1);
            }
            params[0].g(0) = 1.0F;
            params[2].g(0) = 9.0F;
            if (is_static) {
                reducer.prepare_for_backward(1.0);
            } else {
                reducer.prepare_for_backward(1.0, {1, 2});
            }
            reducer.mark_ready(0);
            reducer.finalize_backward();
            CHECK(params[0].g(0) == static_cast<float>(comm.size()));
            CHECK(params[1].g(0) == 7.0F);
            CHECK(params[2].g(0) == 9.0F); // of nobody
            if (!is_static) {
                // A rank that only brings what it accumulated, beside others that compute.
                params[0].g(0) = 1.0F;
                params[1].g(0) = 7.0F;
                if (has_more) {
                    reducer.mark_accumulated(1);
                    reducer.contribute_accumulated(2.0);
                } else {
                    reducer.prepare_for_backward(1.0, {1, 2});
                    reducer.mark_ready(0);
                    reducer.finalize_backward();
                }
                CHECK(params[0].g(0) == static_cast<float>(comm.size() == 1 ? 1 : comm.size() - 1));
                CHECK(params[1].g(0) == 14.0F);
                CHECK(params[2].g(0) == 9.0F);
            }
        });
    }
}

TEST_CASE("a batch can be skipped until the first bucket is on its way") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params(2);
        Reducer reducer{
            comm,
            joinable::parameters(params),
            {.bucket_cap_bytes = 16, .first_bucket_bytes = 16, .rebuild_buckets = false}
        };
        params[0].g(0) = params[1].g(0) = 3.0F;
        reducer.prepare_for_backward(1.0);
        if (comm.rank() == 0) {
            reducer.mark_ready(0); // of the second bucket
            reducer.contribute_nothing();
        } else {
            reducer.mark_ready(0);
            reducer.mark_ready(1);
        }
        reducer.finalize_backward();
        CHECK(params[0].g(0) == 3.0F * static_cast<float>(comm.size() - 1));
        CHECK(params[1].g(0) == 3.0F * static_cast<float>(comm.size() - 1));
        reducer.prepare_for_backward(1.0);
        reducer.mark_ready(1);
        CHECK(
            text_of([&] { reducer.contribute_nothing(); }) ==
            joinable::detail::concat(
                "a batch cannot be skipped on rank ",
                static_cast<int>(comm.rank()),
                " any more: its first bucket is on its way to the others; let the exception leave "
                "the guard"
            )
        );
        reducer.mark_ready(0);
        reducer.finalize_backward();
    });
}

TEST_CASE("a batch can be skipped after a bucket that no rank uses, because nothing of it is sent"
) {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        auto params = make_params(3);
        Reducer reducer{
            comm,
            joinable::parameters(params),
            {.bucket_cap_bytes = 16, .first_bucket_bytes = 16, .find_unused = true}
        };
        for (auto& param : params) {
            param.g(0) = 3.0F;
        }
        reducer.prepare_for_backward(1.0, {2}); // all of the first bucket
        comm.barrier();                         // so the map of all ranks is there
        reducer.mark_ready(0);
        if (comm.rank() == 0) {
            reducer.contribute_nothing();
        } else {
            reducer.mark_ready(1);
        }
        reducer.finalize_backward();
        float const expected = 3.0F * static_cast<float>(comm.size() - 1);
        CHECK(params[0].g(0) == expected);
        CHECK(params[1].g(0) == expected);
        CHECK(
            params[2].g(0) == (comm.rank() == 0 ? 0.0F : 3.0F)
        ); // nothing of the batch is stepped by
    });
}

TEST_CASE("trainable integers are refused at construction") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<std::int32_t>> params;
        params.emplace_back(2);
        CHECK(
            text_of([&] { Reducer const reducer{comm, joinable::parameters(params)}; }) ==
            "parameter 0 on rank 0 is of i32: gradients are averaged, which needs floating point; "
            "set its requires_grad to false, or make it a buffer"
        );
    });
}

} // namespace
