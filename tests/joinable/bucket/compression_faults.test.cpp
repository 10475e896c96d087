// SPDX-License-Identifier: BSL-1.0
// An exception, or death, at every collective of a training whose buckets are compressed: all other ranks throw
// PeerFailed, which names the rank, and each residual is that of before the round or of after it, never between.
#include <joinable/compression.hpp>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;

struct Injected : std::domain_error {
    using std::domain_error::domain_error;
};

/// Whether the culprit throws before its collective has begun, throws when it has, or dies there.
enum class Fault { throws_before, throws_after, kills };

/// Counts the collectives of a rank, of which one fails.
template <class Comm>
class Faulty : public CoreOnly<Comm> {
public:
    using CoreOnly<Comm>::CoreOnly;

    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return run([&] { return this->inner_.all_reduce(buffer, op); });
    }
    auto broadcast(joinable::Buffer buffer, int root) {
        return run([&] { return this->inner_.broadcast(buffer, root); });
    }
    template <class... Counts>
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out, Counts const&... counts) {
        return run([&] { return this->inner_.all_gather(in, out, counts...); });
    }
    template <class... Counts>
    auto all_to_all(joinable::ConstBuffer in, joinable::Buffer out, Counts const&... counts) {
        return run([&] { return this->inner_.all_to_all(in, out, counts...); });
    }
    void abort(joinable::AbortReason const& reason) { this->inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return this->inner_.is_aborted(); }
    [[nodiscard]] auto abort_reason() const { return this->inner_.abort_reason(); }
    auto set_deadline(std::chrono::nanoseconds deadline) {
        return this->inner_.set_deadline(deadline);
    }

    std::size_t count = 0;
    std::size_t fails_at = SIZE_MAX;
    Fault fault = Fault::throws_before;

private:
    template <class Start>
    auto run(Start const& start) {
        bool const fails = count++ == fails_at;
        if (fails && fault == Fault::kills) {
            std::raise(SIGKILL);
        }
        if (fails && fault == Fault::throws_before) {
            throw Injected{"the link is down"};
        }
        auto work = start();
        if (fails) {
            throw Injected{"the link is down"};
        }
        return work;
    }
};

using Residuals = std::vector<std::vector<float>>; ///< by parameter

template <class Reduction>
Residuals residuals_of(Reduction& reduction, std::vector<StridedParam> const& model) {
    Residuals residuals(model.size());
    if constexpr (requires { reduction.feedback; }) {
        for (std::size_t i = 0; i < model.size(); ++i) {
            float const* const begin = reduction.feedback.template residual<float>(i);
            residuals[i].assign(begin, begin + model[i].value.view().numel());
        }
    }
    return residuals;
}

/// Ranks have one input or two, so that some shadow. `seen` gets the residuals before the first round, after each, and,
/// once more, where the guard was left by an exception. Throws what the guard throws.
template <class Comm, class Reduction>
void train(Faulty<Comm>& comm, Reduction reduction, std::vector<Residuals>& seen) {
    using joinable::Shape;
    std::vector<StridedParam> model;
    for (auto const& [extents, strides] : std::vector<std::pair<Shape, Shape>>{
             {{24, 30}, {30, 1}}, {{400}, {1}}, {{1}, {1}}, {{20, 35}, {35, 1}}
         }) {
        model.push_back(StridedParam{
            {OwnedTensor{DType::f32, extents, strides},
             OwnedTensor{DType::f32, extents, strides},
             {}}
        });
        model.back().need_grad();
    }
    std::size_t const fails_at = std::exchange(comm.fails_at, SIZE_MAX);
    joinable::DistributedDataParallel ddp{
        comm, model, {.bucket_cap_bytes = 2400, .find_unused = true}, std::move(reduction)
    };
    auto const note = [&] { seen.push_back(residuals_of(ddp.reduction(), model)); };
    note();
    comm.count = 0; // the model is made
    comm.fails_at = fails_at;
    try {
        joinable::Action observer{comm, note, note};
        joinable::Join guard{joinable::participants(ddp, observer)};
        for (int k = 0; k <= comm.rank() % 2; ++k) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    Numbers gradient(model[i].grad.numel());
                    for (std::size_t e = 0; e < gradient.size(); ++e) {
                        gradient[e] = static_cast<double>((e * e + i) % 31) - comm.rank() - k;
                    }
                    write(model[i].grad, gradient);
                    ready(i);
                }
            });
            observer();
        }
        guard.finish();
    } catch (...) {
        note();
        throw;
    }
}

/// What happened on a rank, which process ranks share.
enum class End { died, finished, failed, was_told };
struct Ended {
    End ends[8];
    std::size_t collectives; ///< of the culprit, without a fault
};

/// Trains a rank without a fault, and again with one: a collective of the culprit fails.
template <class Comm, class Make>
void check_rank(
    Comm& inner, Make const& make, Fault fault, int culprit, std::size_t at, Ended& ended
) {
    Faulty<Comm> comm{inner};
    std::vector<Residuals> healthy;
    train(comm, make(), healthy);
    if (comm.rank() == culprit) {
        ended.collectives = comm.count;
        comm.fails_at = at;
    }
    comm.fault = fault;
    End& end = ended.ends[comm.rank()];
    std::vector<Residuals> seen;
    try {
        train(comm, make(), seen);
        end = End::finished;
        return;
    } catch (Injected const&) {
        end = End::failed;
    } catch (joinable::PeerFailed const& error) {
        CHECK(error.rank() == culprit);
        char const* const reason = fault == Fault::kills ? "its process was killed by signal 9"
                                   : fault == Fault::throws_after // its work was abandoned
                                       ? "an exception left a collective"
                                       : "the link is down";
        std::string const rank = "rank " + std::to_string(culprit);
        CHECK(std::string{error.what()} == rank + " failed: " + reason);
        end = End::was_told;
    }
    REQUIRE(seen.size() >= 2);
    REQUIRE(seen.size() <= healthy.size() + 1);
    std::size_t const rounds = seen.size() - 2; // that ended
    for (std::size_t round = 0; round <= rounds; ++round) {
        CHECK(seen[round] == healthy[round]);
    }
    for (std::size_t i = 0; i < seen.back().size(); ++i) {
        bool const is_as_before = seen.back()[i] == healthy[rounds][i];
        bool const is_as_after =
            rounds + 1 < healthy.size() && seen.back()[i] == healthy[rounds + 1][i];
        CHECK((is_as_before || is_as_after));
    }
}

/// Each collective of each rank fails, one in a training. `run(body)` runs body(comm) on the ranks.
template <class Run, class Make>
void check_each_collective(
    Fault fault, int world, std::size_t stride, Make const& make, Run const& run
) {
    CAPTURE(make().name);
    CAPTURE(static_cast<int>(fault));
    CAPTURE(world);
    for (int culprit = 0; culprit < world; ++culprit) {
        Shared<Ended> const ended;
        ended->collectives = SIZE_MAX;
        for (std::size_t at = static_cast<std::size_t>(culprit) % stride; at < ended->collectives;
             at += stride) {
            CAPTURE(culprit);
            CAPTURE(at);
            run([&](auto& comm) { check_rank(comm, make, fault, culprit, at, *ended); });
            CHECK(ended->collectives > 6); // roll calls, maps and buckets
            for (int rank = 0; rank < world; ++rank) {
                End const expected = at >= ended->collectives ? End::finished
                                     : rank != culprit        ? End::was_told
                                     : fault == Fault::kills  ? End::died
                                                              : End::failed;
                // Where the last roll call has the culprit's part, others may have what they wait for.
                bool const may_end = fault == Fault::throws_after && rank != culprit &&
                                     at + 1 == ended->collectives &&
                                     ended->ends[rank] == End::finished;
                CHECK((may_end || ended->ends[rank] == expected));
                ended->ends[rank] = End::died;
            }
        }
    }
}

template <class Run>
void check_each_reduction(Fault fault, int world, std::size_t stride, Run const& run) {
    stride *= under_sanitizer ? 5 : 1;
    auto const check = [&](auto const& make) {
        check_each_collective(fault, world, stride, make, run);
    };
    check([] { return joinable::Bf16Compression<>{}; });
    check([] { return joinable::PowerSgd{.rank = 2, .start_iteration = 0}; });
    check([] { return joinable::TopK{.density = 0.02}; });
    check([] { return joinable::Int8Compression{}; });
}

TEST_CASE("an exception at any collective of compressed rounds is PeerFailed on all other ranks") {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::size_t const stride = world < 4 ? 1 : static_cast<std::size_t>(world) - 1;
        for (Fault const fault : {Fault::throws_before, Fault::throws_after}) {
            check_each_reduction(fault, world, stride, [&](auto const& body) {
                run_ranks({world}, body);
            });
        }
    }
}

TEST_CASE(
    "a throw, or death, at any collective of compressed rounds is PeerFailed on other process ranks"
) {
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        std::size_t const stride = 2 * static_cast<std::size_t>(world) - 1;
        for (Fault const fault : {Fault::throws_after, Fault::kills}) {
            check_each_reduction(fault, world, stride, [&](auto const& body) {
                try {
                    run_process_ranks({world}, body);
                } catch (joinable::PeerFailed const&) { // the others have said whom it names
                    CHECK(fault == Fault::kills);
                }
            });
        }
    }
}

} // namespace
