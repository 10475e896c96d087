// SPDX-License-Identifier: BSL-1.0
// An exception at every point of a sharded training at which the library calls the engine, its rule or its functions:
// all other ranks throw PeerFailed, which names the rank and its text.
#include <joinable/participant/sharded_data_parallel.hpp>
#include <joinable/participant/zero_redundancy_optimizer.hpp>

#include <array>
#include <atomic>
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
#include <support/ranks.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/tensor/parameters.hpp>

namespace {

struct Injected : std::domain_error {
    using std::domain_error::domain_error;
};

/// The calls of this rank, of which one throws.
struct Calls {
    std::size_t count = 0;
    std::size_t fails_at = SIZE_MAX;
    std::string_view failed = {}; ///< what threw

    void call(std::string_view what) {
        if (count++ == fails_at) {
            failed = what;
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
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::ShardGradients;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable::ZeroRedundancyOptimizer;

enum class Way { none, optimizer, gradients, parameters, in_backward, beside_a_model, alone };
constexpr Way ways[] = {
    Way::none,
    Way::optimizer,
    Way::gradients,
    Way::parameters,
    Way::in_backward,
    Way::beside_a_model,
    Way::alone
};

/// Ranks run out one after another, so that they also fail while they shadow.
template <class Guard, class Round>
void run(Guard& guard, ThreadCommunicator& comm, Round const& round) {
    for (int i = 0; i <= comm.rank(); ++i) {
        round();
    }
    guard.finish();
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

void train(ThreadCommunicator& comm, Way way) {
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
        calls = {}; // nothing throws any more
        return;
    }
    ShardedOptions options{.bucket_cap_bytes = 12};
    options.sharding = way == Way::none         ? Sharding::none
                       : way == Way::optimizer  ? Sharding::optimizer
                       : way == Way::parameters ? Sharding::parameters
                                                : Sharding::gradients;
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
    calls = {};
}

TEST_CASE("an exception in any call of a sharded training is PeerFailed on all other ranks") {
    std::set<std::string_view> failed;
    for (Way const way : ways) {
        for (int culprit = 0; culprit < 3; ++culprit) {
            bool has_failed = true;
            for (std::size_t call = 0; has_failed; ++call) {
                if (joinable_tests::is_left_out(call, 3, culprit)) {
                    continue;
                }
                CAPTURE(static_cast<int>(way));
                CAPTURE(culprit);
                CAPTURE(call);
                std::array<std::string, 3> texts;
                std::array<std::string_view, 3> where;
                run_ranks({3}, [&](ThreadCommunicator& comm) {
                    auto const rank = static_cast<std::size_t>(comm.rank());
                    calls = {};
                    calls.fails_at = comm.rank() == culprit ? call : SIZE_MAX;
                    try {
                        train(comm, way);
                    } catch (Injected const& error) {
                        texts[rank] = error.what();
                        where[rank] = calls.failed;
                    } catch (joinable::PeerFailed const& error) {
                        texts[rank] = error.what();
                        CHECK(error.rank() == culprit);
                    }
                });
                std::string const text = "the engine is out of memory";
                std::string const told = "rank " + std::to_string(culprit) + " failed: " + text;
                has_failed = texts[static_cast<std::size_t>(culprit)] == text;
                std::string_view const what = where[static_cast<std::size_t>(culprit)];
                CAPTURE(what);
                failed.insert(what);
                for (std::size_t rank = 0; rank < 3; ++rank) {
                    bool const is_culprit = static_cast<int>(rank) == culprit;
                    CHECK(texts[rank] == (!has_failed ? "" : is_culprit ? text : told));
                }
            }
        }
    }
    for (std::string_view const what :
         {"value", "grad", "set_grad", "release_grad", "set_value", "update", "before_step"}) {
        CAPTURE(what);
        CHECK(failed.contains(what));
    }
}

} // namespace
