// SPDX-License-Identifier: BSL-1.0
// An exception, or death, at every point of a sharded training at which the library calls the engine, its rule or its
// functions: all other ranks throw PeerFailed, which names the rank and its text.
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/tensor/parameters.hpp>

namespace {

struct Injected : std::domain_error {
    using std::domain_error::domain_error;
};

/// The calls of this rank, of which one throws, or kills it.
struct Calls {
    std::size_t count = 0;
    std::size_t fails_at = SIZE_MAX;
    bool kills = false;
    std::string_view* seen = nullptr; ///< gets what failed

    void call(std::string_view what) {
        if (count++ == fails_at) {
            *seen = what;
            if (kills) {
                std::raise(SIGKILL);
            }
            throw Injected{"the engine is out of memory"};
        }
    }
};
thread_local Calls calls; // NOLINT(misc-use-internal-linkage)

struct Failing {
    std::vector<float> value;
    std::vector<float> storage;
    joinable::AnyView grad;

    explicit Failing(std::size_t size) : value(size, 1.0F) {}
    void need_grad() {
        if (!grad) {
            storage.assign(3, 0);
            grad = joinable::AnyView{storage};
        }
    }
};

/// Plain descent.
struct FailingRule {
    double learning_rate = 0.5;

    static std::span<std::string_view const> state_names() { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const& range) const {
        calls.call("update");
        for (std::size_t i = 0; i < range.size; ++i) {
            range.values[i] -= static_cast<T>(learning_rate) * range.gradients[i];
        }
    }
};

} // namespace

template <>
struct joinable::parameter_traits<Failing> {
    static std::vector<float>* value(Failing& p) {
        calls.call("value");
        return p.value.empty() ? nullptr : &p.value;
    }
    static AnyView* grad(Failing& p) {
        calls.call("grad");
        return p.grad ? &p.grad : nullptr;
    }
    static void set_grad(Failing& p, AnyView const& view) {
        calls.call("set_grad");
        p.grad = view;
    }
    static void release_grad(Failing& p) {
        calls.call("release_grad");
        p.grad = {};
    }
    static void set_value(Failing& p, AnyView const& view) {
        calls.call("set_value");
        auto const* const data = static_cast<float const*>(view.data());
        p.value.assign(data, data + view.numel());
    }
    static void release_value(Failing& p) { p.value.clear(); } // must not throw
};

namespace {

using namespace joinable_tests;
using joinable::Join;
using joinable::participants;
using joinable::Partition;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::ShardGradients;
using joinable::Sharding;
using joinable::ZeroRedundancyOptimizer;

enum class Way { none, optimizer, flat, gradients, parameters, in_backward, beside_a_model, alone };
constexpr Way ways[] = {
    Way::none,
    Way::optimizer,
    Way::flat,
    Way::gradients,
    Way::parameters,
    Way::in_backward,
    Way::beside_a_model,
    Way::alone
};

/// Ranks run out one after another, so that they also fail while they shadow.
template <class Guard, class Comm, class Round>
void run(Guard& guard, Comm& comm, Round const& round) {
    for (int i = 0; i <= comm.rank(); ++i) {
        round();
    }
    guard.finish();
    calls = {}; // nothing throws any more, also when a model ends, which releases its gradients
}
void pass(std::vector<Failing>& params, auto const& ready, auto const&... use) {
    for (std::size_t i = params.size(); i-- > 0;) {
        (static_cast<void>(use(i)), ...);
        params[i].need_grad();
        ready(i);
    }
}
bool before(ShardGradients const& gradients) {
    calls.call("before_step");
    return gradients.sum(0.0) == 0.0;
}

template <class Comm>
void train_by(Comm& comm, Way way) {
    std::vector<Failing> params;
    for (int i = 0; i < 3; ++i) {
        params.emplace_back(3U);
    }
    if (way == Way::beside_a_model || way == Way::alone) {
        ZeroRedundancyOptimizer zero{
            comm,
            params,
            FailingRule{},
            {.bucket_cap_bytes = 12, .reduces_gradients = way == Way::alone, .before_step = before}
        };
        if (way == Way::alone) {
            Join guard{participants(zero)};
            run(guard, comm, [&] {
                pass(params, [](std::size_t) {});
                zero.step();
            });
        } else {
            joinable::DistributedDataParallel ddp{
                comm, params, {.bucket_cap_bytes = 12, .gradient_as_bucket_view = true}
            };
            Join guard{participants(ddp, zero)};
            run(guard, comm, [&] {
                ddp.forward([] {});
                ddp.backward([&](auto const& ready) { pass(params, ready); });
                zero.step();
            });
        }
        return;
    }
    ShardedOptions options{.bucket_cap_bytes = 12};
    options.sharding = way == Way::none                            ? Sharding::none
                       : way == Way::optimizer || way == Way::flat ? Sharding::optimizer
                       : way == Way::parameters                    ? Sharding::parameters
                                                                   : Sharding::gradients;
    options.partition = way == Way::flat ? Partition::flat : Partition::by_parameters;
    options.step_in_backward = way == Way::in_backward;
    options.gradient_as_bucket_view = way == Way::optimizer;
    if (!options.step_in_backward) {
        options.before_step = before;
    }
    ShardedDataParallel sharded{comm, params, FailingRule{}, options};
    Join guard{participants(sharded)};
    run(guard, comm, [&] {
        sharded.forward([&](auto const& use) {
            for (std::size_t i = 0; i < params.size(); ++i) {
                static_cast<void>(use(i));
            }
        });
        sharded.backward([&](auto const& ready, auto const& use) { pass(params, ready, use); });
        sharded.step();
    });
}

/// What happens to the culprit, and how a training ended on a rank.
enum class Fault { throws, kills };
enum class End { finished, failed, was_told };
struct Seen {
    std::array<End, 8> ends{};
    std::string_view where; ///< the call that failed
};

/// Trains a rank, and tells `seen`, which process ranks share, how that ended. The fault happens in this call.
template <class Comm>
void train_and_see(Comm& comm, Way way, Fault fault, int culprit, std::size_t call, Seen& seen) {
    std::string const rank = "rank " + std::to_string(culprit);
    End& end = seen.ends[static_cast<std::size_t>(comm.rank())];
    calls = {};
    calls.fails_at = comm.rank() == culprit ? call : SIZE_MAX;
    calls.seen = &seen.where;
    calls.kills = fault == Fault::kills;
    try {
        train_by(comm, way);
        end = End::finished;
    } catch (Injected const&) {
        end = End::failed;
    } catch (joinable::PeerFailed const& error) {
        CHECK(
            error.what() == rank + (calls.kills ? " failed: its process was killed by signal 9"
                                                : " failed: the engine is out of memory")
        );
        CHECK(error.rank() == culprit);
        end = End::was_told;
    }
}

/// When a guard has ended, hooks zero the gradients of ranks that had joined. That runs on every path out, so it
/// hides its failures, and others need not hear of them.
bool is_after_the_end(Seen const& seen, int culprit, int world) {
    bool have_others_finished = world > 1;
    for (int rank = 0; rank < world; ++rank) {
        End const end = seen.ends[static_cast<std::size_t>(rank)];
        have_others_finished = have_others_finished && (rank == culprit || end == End::finished);
    }
    return have_others_finished && seen.where == "grad";
}

using Kinds = std::set<std::string_view>; ///< of calls

/// One call in `stride` fails, on each rank. `run(body)` runs body(comm) on the ranks. Adds to `failed`.
template <class Run>
void check_each_fault(Fault fault, int world, std::size_t stride, Kinds& failed, Run const& run) {
    stride *= under_sanitizer ? 3 : 1;
    std::size_t turn = 0;
    for (Way const way : ways) {
        for (int culprit = 0; culprit < world; ++culprit) {
            if (is_left_out(++turn, 5, world)) {
                continue;
            }
            bool has_failed = true;
            for (std::size_t call = turn % stride; has_failed; call += stride) {
                CAPTURE(static_cast<int>(way));
                CAPTURE(world);
                CAPTURE(culprit);
                CAPTURE(call);
                Shared<Seen> const seen;
                seen->ends.fill(End::failed); // as of a rank that is killed
                run([&](auto& comm) { train_and_see(comm, way, fault, culprit, call, *seen); });
                CAPTURE(seen->where);
                failed.insert(seen->where);
                has_failed = !seen->where.empty();
                if (has_failed && is_after_the_end(*seen, culprit, world)) {
                    continue;
                }
                for (int rank = 0; rank < world; ++rank) {
                    End const expected = !has_failed       ? End::finished
                                         : rank == culprit ? End::failed
                                                           : End::was_told;
                    CHECK(seen->ends[static_cast<std::size_t>(rank)] == expected);
                }
            }
        }
    }
}

/// Under a sanitizer too few calls fail for that.
void check_all_kinds(Kinds const& failed) {
    for (std::string_view const what :
         {"value", "grad", "set_grad", "release_grad", "set_value", "update", "before_step"}) {
        CAPTURE(what);
        CHECK((under_sanitizer || failed.contains(what)));
    }
}

TEST_CASE("an exception in any call of a sharded training is PeerFailed on all other ranks") {
    Kinds failed;
    for (int const world : {1, 2, 3, 4, 8}) {
        std::size_t const stride = world == 3 ? 1 : 3 * static_cast<std::size_t>(world);
        check_each_fault(Fault::throws, world, stride, failed, [&](auto const& body) {
            run_ranks({world}, body);
        });
    }
    check_all_kinds(failed);
}

TEST_CASE(
    "a throw, or death, in any call of a sharded training is PeerFailed on other process ranks"
) {
    Kinds failed;
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        std::size_t const stride = 5 * static_cast<std::size_t>(world);
        check_each_fault(Fault::throws, world, stride, failed, [&](auto const& body) {
            run_process_ranks({world}, body);
        });
        check_each_fault(Fault::kills, world, stride, failed, [&](auto const& body) {
            try {
                run_process_ranks({world}, body);
            } catch (joinable::PeerFailed const&) { // the others have said whom it names
            }
        });
    }
    check_all_kinds(failed);
}

} // namespace
