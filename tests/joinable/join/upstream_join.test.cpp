// SPDX-License-Identifier: BSL-1.0
// What PyTorch's tests of its join context expect (test/distributed/algorithms/test_join.py), said of
// this library. Above each case the name of the test there, whose fixture AllReducer is. There ranks
// are 2 to 4: as many as there are GPUs.
#include <joinable/join/guard.hpp>

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>

namespace {

using namespace joinable_tests;
using joinable::EndPolicy;
using joinable::Join;
using joinable::participants;

TEST_CASE("the formula of PyTorch's tests gives the numbers that PyTorch computes") {
    // Printed by PyTorch 2.15 with Gloo, for 2, 3 and 4 ranks.
    std::vector<std::vector<int>> const printed{{6, 7}, {9, 11, 12}, {12, 15, 17, 18}};
    for (auto const& row : printed) {
        for (std::size_t rank = 0; rank < row.size(); ++rank) {
            CHECK(
                upstream_total(static_cast<int>(rank), static_cast<int>(row.size())) == row[rank]
            );
        }
    }
}

/// The arguments of upstream's skeleton.
struct Case {
    int participants = 1; ///< 1 or 3
    bool uneven = true;
    bool enable = true;
    bool throws = false;
    int reductions = 1; ///< in each call
    bool runs_post_hook = false;
};

struct Outcome {
    int total = 0;              ///< of all sums
    std::size_t rounds = 0;     ///< of this rank, that were held
    bool has_thrown = false;    ///< EarlyTermination
    std::vector<int> exhausted; ///< the ranks that it names
};

/// Upstream's loop over these reducers. The end of the scope waits for the others, as that of `with`.
template <class... Reducers>
Outcome sum_inputs(RankCommunicator& comm, Case const& what, Reducers&... reducers) {
    Outcome outcome;
    try {
        Join guard{
            participants(reducers...),
            {.enable = what.enable,
             .end_policy = what.throws ? EndPolicy::throw_early : EndPolicy::drain},
            reductions = what.reductions,
            runs_post_hook = what.runs_post_hook
        };
        for (int i = 0; i < (what.uneven ? upstream_inputs(comm.rank()) : 3); ++i) {
            ((outcome.total += reducers(what.reductions)), ...);
            ++outcome.rounds;
        }
    } catch (joinable::EarlyTermination const& error) {
        outcome.has_thrown = true;
        outcome.exhausted = error.ranks();
    }
    return outcome;
}

/// Upstream's skeleton, with what every one of its tests checks; more is checked by the cases below.
template <class Check>
void check(Case const& what, Check const& check_outcome) {
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        AllReducer a{comm};
        AllReducer b{comm};
        AllReducer c{comm};
        std::vector<AllReducer<RankCommunicator>*> reducers{&a};
        for (auto* const reducer : {&a, &b, &c}) {
            reducer->before_post = [&](joinable::JoinResult const& result) {
                CHECK(result.authoritative_rank == comm.size() - 1); // whose number all others get
            };
        }
        Outcome outcome;
        if (what.participants == 1) {
            outcome = sum_inputs(comm, what, a);
        } else {
            reducers = {&a, &b, &c};
            outcome = sum_inputs(comm, what, a, b, c);
        }
        bool const throws = what.throws && what.uneven && comm.size() > 1;
        CHECK(outcome.has_thrown == throws);
        for (auto* const reducer : reducers) {
            CHECK(reducer->post_value == (what.runs_post_hook && !throws ? 42 : 41));
            CHECK(reducer->posts == (what.enable && !throws ? 1 : 0));
            CHECK(
                reducer->shadows ==
                (what.enable && !throws && what.uneven ? comm.size() - 1 - comm.rank() : 0)
            );
        }
        check_outcome(comm, outcome);
        int sum = 1; // all ranks go on together
        comm.all_reduce({&sum, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
        CHECK(sum == comm.size());
    });
}

// test_single_joinable_main_hooks; guard.test.cpp says what else the result holds
TEST_CASE("a rank's sums count the ranks that have not joined: the numbers of PyTorch") {
    check({}, [](auto& comm, Outcome const& outcome) {
        CHECK(outcome.total == upstream_total(comm.rank(), comm.size()));
    });
}

// test_single_joinable_post_hooks, which asks for none, and what its name says
TEST_CASE("ranks without collectives in their rounds end together, with and without post hooks") {
    for (bool const runs : {false, true}) {
        check({.reductions = 0, .runs_post_hook = runs}, [](auto& comm, Outcome const& outcome) {
            CHECK(outcome.total == 0);
            CHECK(outcome.rounds == static_cast<std::size_t>(upstream_inputs(comm.rank())));
        });
    }
}

// test_single_joinable
TEST_CASE("main hooks and post hooks of one participant work together") {
    check({.runs_post_hook = true}, [](auto& comm, Outcome const& outcome) {
        CHECK(outcome.total == upstream_total(comm.rank(), comm.size()));
    });
}

// test_multiple_joinables
TEST_CASE("main hooks and post hooks of three participants work together") {
    check({.participants = 3, .runs_post_hook = true}, [](auto& comm, Outcome const& outcome) {
        CHECK(outcome.total == 3 * upstream_total(comm.rank(), comm.size()));
    });
}

// test_single_joinable_disable, test_multiple_joinable_disable
TEST_CASE("a guard that is not enabled leaves even inputs alone, of one participant or three") {
    for (int const count : {1, 3}) {
        check(
            {.participants = count, .uneven = false, .enable = false},
            [&](auto& comm, Outcome const& outcome) {
                CHECK(outcome.total == 3 * count * comm.size());
            }
        );
    }
}

// test_single_joinable_throw, test_multiple_joinables_throw. There the text on rank 0 is another one
// than that on the others; here the error is the same on all ranks and names rank 0.
TEST_CASE("under throw_early all ranks throw when rank 0 runs out, after its three inputs") {
    for (int const count : {1, 3}) {
        check({.participants = count, .throws = true}, [&](auto& comm, Outcome const& outcome) {
            CHECK(outcome.total == 3 * count * comm.size());
            CHECK(outcome.rounds == 3);
            CHECK(outcome.exhausted == std::vector<int>(comm.size() > 1 ? 1 : 0, 0));
        });
    }
}

// test_join_kwargs
TEST_CASE("a keyword of the guard reaches the hook: two sums in each round, shadowed by two") {
    check({.reductions = 2}, [](auto& comm, Outcome const& outcome) {
        CHECK(outcome.total == 2 * upstream_total(comm.rank(), comm.size()));
    });
}

} // namespace
