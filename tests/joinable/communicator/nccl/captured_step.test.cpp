// SPDX-License-Identifier: BSL-1.0
#include <joinable/participant/captured/captured_step.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/fake_nccl/memory.hpp>
#include <support/nccl_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/device/arena.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/nccl_graphs.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::CapturedStep;
using joinable::ContractViolation;
using joinable::DType;
using joinable::GradientKind;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

/// Two gradients, which passes make of a batch: three numbers of it and their squares.
class Engine {
public:
    explicit Engine(cudaStream_t stream)
        : stream_{stream}, batch_{std::vector<float>(3, poison), stream},
          first_{std::vector<float>(3, poison), stream},
          second_{std::vector<double>(3, poison), stream} {}

    static constexpr float poison = 1e9F;

    [[nodiscard]] std::vector<joinable::Buffer> gradients() const {
        return {first_.buffer(), second_.buffer()};
    }
    /// What a rank's batch of a round is.
    static float number(int rank, int round, std::size_t i) {
        return static_cast<float>(1 + rank + 10 * round) + static_cast<float>(i);
    }
    void load(int rank, int round) {
        fake_cuda::enqueue(stream_, [this, rank, round] {
            for (std::size_t i = 0; i < 3; ++i) {
                at<float>(batch_)[i] = number(rank, round, i);
            }
        });
    }
    template <class Ready>
    void passes(Ready const& ready) {
        ++times_captured;
        fake_cuda::enqueue(stream_, [this] {
            ++times_run;
            for (std::size_t i = 0; i < 3; ++i) {
                at<float>(first_)[i] = at<float>(batch_)[i];
            }
        });
        ready(0);
        fake_cuda::enqueue(stream_, [this] {
            for (std::size_t i = 0; i < 3; ++i) {
                double const x = at<float>(batch_)[i];
                at<double>(second_)[i] = x * x;
            }
        });
        ready(1);
    }
    /// Whether the gradients are sum(factor * gradient) of these ranks' batches.
    void check_averages(
        NcclCommunicator& comm, int round, std::vector<std::pair<int, double>> const& factors
    ) {
        std::vector<float> const first = first_.read(comm, stream_);
        std::vector<double> const second = second_.read(comm, stream_);
        for (std::size_t i = 0; i < 3; ++i) {
            double sum = 0;
            double squares = 0;
            for (auto const& [rank, factor] : factors) {
                double const x = number(rank, round, i);
                sum += factor * x;
                squares += factor * x * x;
            }
            CHECK(double{first[i]} == doctest::Approx(sum).epsilon(1e-6));
            CHECK(second[i] == doctest::Approx(squares).epsilon(1e-12));
        }
    }

    int times_captured = 0;
    std::atomic<int> times_run = 0;

private:
    template <class T>
    static T* at(DeviceArray<T> const& array) {
        return static_cast<T*>(array.buffer().data);
    }

    cudaStream_t stream_;
    DeviceArray<float> batch_;
    DeviceArray<float> first_;
    DeviceArray<double> second_;
};

void check_nothing_is_left() {
    fake_cuda::drain();
    CHECK(fake_cuda::live_graphs() == 0);
    CHECK(fake_cuda::live_allocations() == 0);
    CHECK(fake_cuda::live_events() == 0);
}

/// [first, size) with a factor.
std::vector<std::pair<int, double>> each(int first, int size, double factor) {
    std::vector<std::pair<int, double>> ranks;
    for (int rank = first; rank < size; ++rank) {
        ranks.emplace_back(rank, factor);
    }
    return ranks;
}

/// Runs `body(comm, hosts, stream)` on groups of ranks whose devices have kernels, and have none.
void run_captured(std::initializer_list<int> sizes, NcclBody const& body) {
    for (bool const has_kernels : {false, true}) {
        CAPTURE(has_kernels);
        run_nccl_ranks(sizes, [&](auto& comm, auto& hosts, cudaStream_t stream) {
            if (has_kernels) {
                comm.device_memory().use_kernels(host_kernels());
            }
            body(comm, hosts, stream);
        });
    }
}

TEST_CASE("a captured step averages in every round, and is captured once") {
    for (auto const delay : {std::chrono::microseconds{0}, std::chrono::microseconds{50}}) {
        fake_cuda::delay_every_operation(delay);
        run_captured({1, 2, 3, 4, 8}, [](auto& comm, auto&, cudaStream_t stream) {
            Engine engine{stream};
            CapturedStep step{comm, engine.gradients(), [&](auto const& ready) {
                                  engine.passes(ready);
                              }};
            for (int round = 0; round < 7; ++round) { // more than there are turns
                engine.load(comm.rank(), round);
                step.step();
                engine.check_averages(comm, round, each(0, comm.size(), 1.0 / comm.size()));
            }
            CHECK(engine.times_captured == 1);
            CHECK(engine.times_run == 7);
        });
        check_nothing_is_left();
    }
    fake_cuda::delay_every_operation({});
}

TEST_CASE("ranks that ran out replay the step with zeros, in the rounds that others capture, too") {
    run_captured({1, 2, 3, 4, 8}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        Engine engine{stream};
        CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                  engine.passes(ready);
                              }};
        // Rank r has r rounds: rank 0 captures no passes. In the second guard it is the other way
        // round, so what it captured before must not be used again.
        for (bool const is_second : {false, true}) {
            int const before = engine.times_run;
            int const own = is_second ? comm.size() - 1 - comm.rank() : comm.rank();
            int steps = 0;
            joinable::Step step{comm, [&] {
                                    auto const factor = 1.0 / comm.size();
                                    auto const ranks =
                                        is_second ? each(0, comm.size() - 1 - steps, factor)
                                                  : each(steps + 1, comm.size(), factor);
                                    engine.check_averages(
                                        comm, steps, ranks
                                    ); // on joined ranks, too
                                    ++steps;
                                }};
            joinable::Join guard{joinable::participants(captured, step), joinable::control(hosts)};
            for (int round = 0; round < own; ++round) {
                engine.load(comm.rank(), round);
                captured.step();
                step.step();
            }
            (void)guard.finish();
            CHECK(steps == comm.size() - 1);
            CHECK(engine.times_run - before == own);
        }
        // Once in each guard in which it had a round.
        int const guards = (comm.rank() != 0 ? 1 : 0) + (comm.rank() != comm.size() - 1 ? 1 : 0);
        CHECK(engine.times_captured == guards);
    });
    check_nothing_is_left();
}

TEST_CASE("weights and active ranks change what a captured step multiplies with") {
    run_captured({1, 2, 3, 4, 8}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        Engine engine{stream};
        CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                  engine.passes(ready);
                              }};
        {
            joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
            for (int round = 0; round <= comm.rank(); ++round) {
                auto const weight = [&](int rank) { return 1 + (rank + round) % 3; };
                engine.load(comm.rank(), round);
                captured.step({.weight = static_cast<std::uint64_t>(weight(comm.rank()))});
                int sum = 0;
                for (int rank = round; rank < comm.size(); ++rank) {
                    sum += weight(rank);
                }
                std::vector<std::pair<int, double>> factors;
                for (int rank = round; rank < comm.size(); ++rank) {
                    factors.emplace_back(rank, static_cast<double>(weight(rank)) / sum);
                }
                engine.check_averages(comm, round, factors);
            }
            (void)guard.finish();
        }
        {
            joinable::Join guard{
                joinable::participants(captured),
                joinable::control(hosts),
                joinable::divide_by_initial_world_size = false
            };
            for (int round = 0; round <= comm.rank(); ++round) {
                engine.load(comm.rank(), round);
                captured.step();
                int const active = comm.size() - round;
                engine.check_averages(comm, round, each(round, comm.size(), 1.0 / active));
            }
            (void)guard.finish();
        }
        // Outside guards weights are summed by the transport.
        engine.load(comm.rank(), 1);
        captured.step({.weight = static_cast<std::uint64_t>(2 * comm.rank() + 1)});
        std::vector<std::pair<int, double>> factors;
        for (int rank = 0; rank < comm.size(); ++rank) {
            factors.emplace_back(rank, (2.0 * rank + 1) / (comm.size() * comm.size()));
        }
        engine.check_averages(comm, 1, factors);
    });
    check_nothing_is_left();
}

TEST_CASE("a mean over no samples does not spread, and of no rank's samples it is zeros") {
    run_captured({1, 2, 4}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        DeviceArray<float> const gradient{{7.0F, 7.0F}, stream};
        auto* const data = static_cast<float*>(gradient.buffer().data);
        bool const has_samples = comm.rank() != 0;
        float const mean = has_samples ? 2.0F : std::nanf("");
        std::atomic<int> passes{0};
        CapturedStep captured{comm, {gradient.buffer()}, [&](auto const& ready) {
                                  fake_cuda::enqueue(stream, [&passes, data, mean] {
                                      data[0] = data[1] = mean;
                                      ++passes;
                                  });
                                  ready(0);
                              }};
        float const average = comm.size() == 1 ? 0.0F : 2.0F;
        for (bool const is_guarded : {true, false}) {
            std::optional<joinable::Join<decltype(captured)>> guard;
            if (is_guarded) {
                guard.emplace(joinable::participants(captured), joinable::control(hosts));
            }
            captured.step({.weight = has_samples ? 3U : 0U});
            CHECK(gradient.read(comm, stream) == std::vector<float>{average, average});
            captured.step({.weight = 0});
            CHECK(gradient.read(comm, stream) == std::vector<float>{0.0F, 0.0F});
        }
        CHECK(passes == 4); // also without samples: they may be there to measure
    });
    check_nothing_is_left();
}

TEST_CASE("a joined rank's gradients are zeroed when the guard ends, or kept, as the option says") {
    using joinable::JoinedGradients;
    for (JoinedGradients const option : {JoinedGradients::zeroed_at_end, JoinedGradients::kept}) {
        run_captured({1, 2, 3, 4, 8}, [&](auto& comm, auto& hosts, cudaStream_t stream) {
            DeviceArray<float> const gradient{{0.0F, 0.0F}, stream};
            auto* const data = static_cast<float*>(gradient.buffer().data);
            // An engine that adds to what is there, and zeroes nothing itself.
            CapturedStep captured{
                comm,
                {gradient.buffer()},
                [&](auto const& ready) {
                    fake_cuda::enqueue(stream, [data] { data[0] += 2.0F, data[1] += 2.0F; });
                    ready(0);
                },
                joinable::GradientKind::mean,
                option
            };
            // Rank r has r rounds; the last one has all averages from active rounds of its own.
            {
                joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
                for (int round = 0; round < comm.rank(); ++round) {
                    captured.step();
                }
                (void)guard.finish();
            }
            float average = 0.0F;
            float held = 0.0F; // by a rank that trains in each round so far
            for (int round = 0; round < comm.size() - 1; ++round) {
                int const active = comm.size() - 1 - round;
                held = (held + 2.0F) * static_cast<float>(active) / static_cast<float>(comm.size());
                average = held;
            }
            bool const has_joined = comm.rank() < comm.size() - 1;
            bool const is_zeroed = has_joined && option == JoinedGradients::zeroed_at_end;
            std::vector<float> const now = gradient.read(comm, stream);
            CHECK(now[0] == doctest::Approx(is_zeroed ? 0.0F : average));
            CHECK(now[0] == now[1]);
            if (option == JoinedGradients::kept) {
                CHECK((comm.size() == 1 || now[0] != 0.0F));
            }
            // Without a guard nothing is zeroed.
            captured.step();
            CHECK(gradient.read(comm, stream)[0] > 0.0F);
        });
    }
    check_nothing_is_left();
}

TEST_CASE("a captured step cannot leave a joined rank's gradients untouched, and says so") {
    run_nccl_ranks({2}, [](auto& comm, auto&, cudaStream_t stream) {
        Engine engine{stream};
        auto const make = [&] {
            CapturedStep const captured{
                comm,
                engine.gradients(),
                [](auto const&) {},
                joinable::GradientKind::mean,
                joinable::JoinedGradients::untouched
            };
        };
        CHECK_THROWS_WITH_AS(
            make(),
            "a captured step reduces gradients in their own memory, so a joined rank cannot leave "
            "them untouched; give it JoinedGradients::kept or JoinedGradients::zeroed_at_end",
            ContractViolation
        );
    });
    check_nothing_is_left();
}

TEST_CASE("a gradient that a captured step and another participant average is refused at the entry"
) {
    run_nccl_ranks({1, 2, 3, 4}, [](auto& comm, auto& hosts, cudaStream_t) {
        std::vector<DeviceParam> params;
        for (std::size_t const count : {2U, 3U}) {
            params.emplace_back(DType::f32, joinable::Shape{count}, joinable::Shape{1});
        }
        auto const last_two = [](joinable::AnyView const& view) {
            return joinable::Buffer{static_cast<float*>(view.data()) + 1, 2, view.dtype()};
        };
        CapturedStep captured{comm, {last_two(params[1].grad)}, [](auto const&) {}};
        joinable::DistributedDataParallel ddp{comm, params};
        CHECK_THROWS_WITH_AS(
            (void)(joinable::Join{joinable::participants(captured, ddp), joinable::control(hosts)}),
            doctest::Contains(
                "participant 0 (CapturedStep) and participant 1 (DistributedDataParallel) both "
                "average gradient 0, which is parameter 1 of the second one, so it would be averaged twice"
            ),
            ContractViolation
        );
        std::vector<DeviceParam*> const first{&params[0]};
        joinable::DistributedDataParallel other{comm, first};
        joinable::Join{joinable::participants(captured, other), joinable::control(hosts)}.finish();
    });
    check_nothing_is_left();
}

TEST_CASE("ranks that would keep different gradients of a captured step are told at the entry") {
    run_nccl_ranks({2}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        Engine engine{stream};
        CapturedStep captured{
            comm,
            engine.gradients(),
            [&](auto const& ready) { engine.passes(ready); },
            joinable::GradientKind::mean,
            comm.rank() == 0 ? joinable::JoinedGradients::kept
                             : joinable::JoinedGradients::zeroed_at_end
        };
        std::string said;
        try {
            joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
            (void)guard.finish();
        } catch (joinable::Mismatch const& error) {
            said = error.what();
        }
        CHECK(said.find("joined_gradients") != std::string::npos);
        CHECK(said.find("kept") != std::string::npos);
    });
}

TEST_CASE("a captured step is refused after rounds of its guard that did not sync") {
    run_captured({1, 2, 3, 4, 8}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        Engine engine{stream};
        CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                  engine.passes(ready);
                              }};
        std::string text;
        try {
            joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
            static_cast<void>(guard.next(true, {.will_sync = false, .weight = 4}));
            static_cast<void>(guard.next(true, {.weight = 4}));
            captured.step();
            guard.finish();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CAPTURE(text);
        CHECK(text.find("but 1 training rounds before this one did not sync") != std::string::npos);
        CHECK(engine.times_captured == 0);
    });
}

TEST_CASE("a NaN that a joined rank's gradients hold does not spread") {
    run_captured({2, 4}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        DeviceArray<float> const gradient{{0.0F, 0.0F}, stream};
        auto* const data = static_cast<float*>(gradient.buffer().data);
        CapturedStep captured{comm, {gradient.buffer()}, [&](auto const& ready) {
                                  fake_cuda::enqueue(stream, [data] { data[0] = data[1] = 2.0F; });
                                  ready(0);
                              }};
        joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
        int const rounds = comm.rank() == 0 ? 1 : 3;
        for (int round = 0; round < rounds; ++round) {
            captured.step();
            if (comm.rank() == 0) {
                fake_cuda::enqueue(stream, [data] { data[0] = std::nanf(""); });
            } else {
                auto const left = static_cast<float>(round == 0 ? comm.size() : comm.size() - 1);
                float const average = 2.0F * left / static_cast<float>(comm.size());
                CHECK(gradient.read(comm, stream) == std::vector<float>{average, average});
            }
        }
        (void)guard.finish();
    });
    check_nothing_is_left();
}

/// A gradient of `dtype` and a step whose passes write `number` there.
struct OneGradient {
    DeviceTensor tensor;
    cudaStream_t stream;
    double number = 0;

    OneGradient(DType dtype, cudaStream_t on) : tensor{dtype, {2}, {1}}, stream{on} {}
    [[nodiscard]] std::vector<joinable::Buffer> list() const {
        return {{tensor.view().data(), 2, tensor.view().dtype()}};
    }
    template <class Ready>
    void passes(Ready const& ready) {
        fake_cuda::enqueue(stream, [this] { tensor.assign({number, -number}); });
        ready(0);
    }
};

TEST_CASE("kernels average captured gradients as doubles do, however many tokens there are") {
    std::size_t const scaled_by_nccl = fake_nccl::calls("ncclRedOpCreatePreMulSum");
    run_nccl_ranks({1, 2, 3, 4, 8}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        comm.device_memory().use_kernels(host_kernels());
        for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
            for (GradientKind const kind : {GradientKind::sum, GradientKind::mean}) {
                OneGradient gradient{dtype, stream};
                gradient.number =
                    kind == GradientKind::sum ? 256.0 * (200 + comm.rank()) : 1.0 + comm.rank();
                CapturedStep captured{
                    comm,
                    gradient.list(),
                    [&](auto const& ready) { gradient.passes(ready); },
                    kind,
                    joinable::JoinedGradients::kept
                };
                joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
                // Rank 0 runs out first, but not alone.
                std::vector<std::uint64_t> const tokens{1'000, 3'000'000, 20'000'000, 40'000'000};
                std::size_t const rounds = comm.rank() == 0 && comm.size() > 1 ? 1 : tokens.size();
                auto const check = [&](std::size_t round) {
                    double sum = 0;
                    int const first = round == 0 || comm.size() == 1 ? 0 : 1;
                    for (int rank = first; rank < comm.size(); ++rank) {
                        sum += kind == GradientKind::sum ? 256.0 * (200 + rank) : 1.0 + rank;
                    }
                    double const exact =
                        sum / (comm.size() - first) /
                        (kind == GradientKind::sum ? static_cast<double>(tokens[round]) : 1.0);
                    double const unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
                    comm.synchronize();
                    Numbers const got = gradient.tensor.numbers();
                    CHECK(std::abs(got[0] - exact) <= (comm.size() + 1) * unit * exact);
                    CHECK(got[1] == -got[0]);
                };
                std::size_t const memsets = fake_cuda::calls("cudaMemsetAsync");
                for (std::size_t round = 0; round < rounds; ++round) {
                    captured.step({.weight = tokens[round]});
                    check(round);
                }
                if (comm.size() == 1) { // the graph has no nodes to zero gradients
                    CHECK(fake_cuda::calls("cudaMemsetAsync") == memsets);
                }
                (void)guard.finish();
                check(tokens.size() - 1); // joined ranks have the averages, too
            }
        }
    });
    CHECK(fake_nccl::calls("ncclRedOpCreatePreMulSum") == scaled_by_nccl); // plain sums
    check_nothing_is_left();
}

TEST_CASE("a captured sum by tokens is refused on all ranks where f16 cannot hold its factor") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](auto& comm, auto& hosts, cudaStream_t stream) {
        OneGradient gradient{DType::f16, stream};
        gradient.number = 60000;
        int times_captured = 0;
        CapturedStep captured{
            comm,
            gradient.list(),
            [&](auto const& ready) {
                ++times_captured;
                gradient.passes(ready);
            },
            GradientKind::sum
        };
        auto const averages = [&] {
            comm.synchronize();
            return gradient.tensor.numbers()[0];
        };
        std::uint64_t const many = 40'000'000;
        CHECK_THROWS_WITH_AS(
            captured.step({.weight = many}),
            doctest::Contains("call use_kernels()"),
            ContractViolation
        );
        CHECK(times_captured == 0);
        captured.step({.weight = 1});
        CHECK(averages() == 60000);
        CHECK(times_captured == 1);
        comm.device_memory().use_kernels(host_kernels());
        captured.step({.weight = many}); // captured anew
        CHECK(averages() == doctest::Approx(0.0015).epsilon(1e-5));
        CHECK(times_captured == 2);
        comm.device_memory().use_kernels({});
        std::string said;
        try {
            joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
            if (comm.rank() != 0 || comm.size() == 1) {
                captured.step({.weight = many});
            }
            (void)guard.finish();
        } catch (ContractViolation const& error) {
            said = error.what();
        }
        CHECK(said.find("call use_kernels()") != std::string::npos);
    });
    check_nothing_is_left();
}

TEST_CASE(
    "a failure while a step is captured, or after, ends it on every rank, and frees the graphs"
) {
    for (int const failing_round : {0, 2}) {
        CAPTURE(failing_round);
        run_captured({2, 3, 4, 8}, [&](auto& comm, auto& hosts, cudaStream_t stream) {
            Engine engine{stream};
            int round = 0;
            CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                      if (failing_round == 0 && comm.rank() == 1) {
                                          throw std::runtime_error{"no room for activations"};
                                      }
                                      engine.passes(ready);
                                  }};
            std::string said;
            try {
                joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
                for (; round < 5; ++round) {
                    engine.load(comm.rank(), round);
                    captured.step();
                    if (failing_round != 0 && round == failing_round && comm.rank() == 1) {
                        throw std::runtime_error{"no room for activations"};
                    }
                    comm.synchronize();
                }
                (void)guard.finish();
            } catch (joinable::PeerFailed const& error) {
                CHECK(error.rank() == 1);
                said = error.what();
            } catch (std::runtime_error const& error) {
                said = error.what();
            }
            CHECK(round <= failing_round + 1);
            CHECK(
                (comm.rank() == 1 || failing_round == 0 ? said.find("no room") != std::string::npos
                                                        : !said.empty())
            );
        });
        check_nothing_is_left();
    }
}

TEST_CASE("a rank that never launches the graph is told of by the deadline") {
    for (int const world : {2, 3, 4}) {
        std::atomic<int> posted{0};
        run_nccl_ranks({world}, [&](auto& comm, auto&, cudaStream_t stream) {
            Engine engine{stream};
            CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                      engine.passes(ready);
                                  }};
            captured.step();
            comm.synchronize();
            if (comm.rank() == 1) {
                wait_until([&] { return comm.is_aborted(); });
            } else {
                captured.step();
                ++posted;
            }
            if (comm.rank() == 0) { // gives up, when the one is the only one to miss
                wait_until(posted, world - 1);
                comm.set_deadline(std::chrono::milliseconds{300});
            }
            try {
                comm.synchronize();
                CHECK(comm.rank() == 1);
                comm.barrier();
                CHECK(false);
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector<int>{1});
            }
        });
    }
    check_nothing_is_left();
}

TEST_CASE(
    "the scope of a captured step ends at the deadline where a peer never joins what came after"
) {
    for (int const world : {2, 3, 4}) {
        std::atomic<int> posted{0};
        run_nccl_ranks({world}, [&](auto& comm, auto&, cudaStream_t stream) {
            Engine engine{stream};
            DeviceArray<float> const metric{{1.0F}, stream};
            {
                CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                          engine.passes(ready);
                                      }};
                captured.step();
                comm.synchronize();
                if (comm.rank() == 1) {
                    wait_until([&] { return comm.is_aborted(); });
                } else {
                    comm.all_reduce(metric.buffer(), ReduceOp::sum).wait();
                    ++posted;
                }
                if (comm.rank() == 0) { // gives up, when the one is the only one to miss
                    wait_until(posted, world - 1);
                    comm.set_deadline(std::chrono::milliseconds{300});
                }
            }
            CHECK(comm.is_aborted());
        });
    }
    check_nothing_is_left();
}

TEST_CASE("an exception that leaves the scope of a captured step ends what a peer never joins") {
    for (int const world : {2, 3, 4, 8}) {
        auto const run = [&] {
            run_nccl_ranks({world}, [&](auto& comm, auto&, cudaStream_t stream) {
                Engine engine{stream};
                CapturedStep captured{comm, engine.gradients(), [&](auto const& ready) {
                                          engine.passes(ready);
                                      }};
                captured.step();
                comm.synchronize();
                if (comm.rank() == 1) {
                    CHECK_THROWS_WITH_AS(
                        comm.barrier(),
                        "rank 0 failed: an exception left a captured step",
                        joinable::PeerFailed
                    );
                    return;
                }
                if (comm.rank() == 0) {
                    captured.step();
                    throw std::runtime_error{"bad batch"};
                }
                auto const step = [&] {
                    captured.step();
                    comm.synchronize();
                };
                CHECK_THROWS_AS(step(), joinable::PeerFailed);
            });
        };
        CHECK_THROWS_WITH_AS(run(), "bad batch", std::runtime_error);
    }
    check_nothing_is_left();
}

/// A graph of an all-reduce, which the end of its communicator destroys.
class KeptGraph final : public joinable::detail::HoldsNcclKernels {
public:
    void capture(NcclCommunicator& comm, joinable::Buffer buffer) {
        joinable::detail::NcclGraph{comm}.rank().add_holder(*this);
        ncclComm_t const handle = comm.native_handle();
        cuda(cudaStreamBeginCapture(comm.stream(), cudaStreamCaptureModeRelaxed));
        ncclResult_t state = ncclAllReduce(
            buffer.data, buffer.data, buffer.count, ncclFloat32, ncclSum, handle, comm.stream()
        );
        while (state == ncclInProgress) {
            REQUIRE(ncclCommGetAsyncError(handle, &state) == ncclSuccess);
        }
        CHECK(state == ncclSuccess);
        cuda(cudaStreamEndCapture(comm.stream(), &graph_));
        cuda(cudaGraphInstantiateWithFlags(&executable_, graph_, 0));
    }
    void run(cudaStream_t stream) {
        cuda(cudaGraphLaunch(executable_, stream));
        cuda(cudaStreamSynchronize(stream));
    }
    [[nodiscard]] bool is_captured() const noexcept { return executable_ != nullptr; }
    void release_kernels() noexcept override {
        if (is_captured()) {
            static_cast<void>(cudaGraphExecDestroy(std::exchange(executable_, nullptr)));
            static_cast<void>(cudaGraphDestroy(graph_));
        }
    }

private:
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

TEST_CASE("averages of shadowed rounds do not stay when an exception ends the guard") {
    run_captured({2, 3, 4, 8}, [&](auto& comm, auto& hosts, cudaStream_t stream) {
        DeviceArray<float> const gradient{{0.0F, 0.0F}, stream};
        auto* const data = static_cast<float*>(gradient.buffer().data);
        CapturedStep captured{comm, {gradient.buffer()}, [&](auto const& ready) {
                                  fake_cuda::enqueue(stream, [data] {
                                      data[0] += 2.0F;
                                      data[1] += 2.0F;
                                  });
                                  ready(0);
                              }};
        bool has_joined = false;
        try {
            joinable::Join guard{joinable::participants(captured), joinable::control(hosts)};
            captured.step();
            if (comm.rank() == 1) {
                captured.step();
                comm.synchronize();
                throw std::runtime_error{"between rounds"};
            }
            has_joined = true;
            guard.finish();
        } catch (joinable::PeerFailed const&) {
        } catch (std::runtime_error const&) {
        }
        if (has_joined) {
            CHECK(gradient.read(comm, stream) == std::vector<float>{0, 0});
        }
    });
    check_nothing_is_left();
}

TEST_CASE("a communicator has graphs let its kernels go before the windows that these use") {
    std::size_t const before = fake_nccl::registered_collectives();
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Stream const stream;
        joinable::Arena arena;
        KeptGraph graph;
        {
            joinable::NcclOptions options{.deadline = std::chrono::seconds{60}};
            options.stream = static_cast<cudaStream_t>(stream);
            NcclCommunicator comm{hosts, options};
            arena = comm.allocate(3 * sizeof(float));
            CHECK(comm.register_arena(arena));
            auto* const numbers = reinterpret_cast<float*>(arena.data());
            fake_cuda::enqueue(stream, [=, value = static_cast<float>(comm.rank() + 1)] {
                std::fill_n(numbers, 3, value);
            });
            cuda(cudaStreamSynchronize(stream));
            graph.capture(comm, {numbers, 3, joinable::DType::f32});
            graph.run(comm.stream());
            int const total = comm.size() * (comm.size() + 1) / 2;
            fake_cuda::DeviceCode const code;
            CHECK(std::vector(numbers, numbers + 3) == std::vector(3, static_cast<float>(total)));
        }
        CHECK_FALSE(graph.is_captured());
    });
    CHECK(fake_nccl::registered_collectives() == before + 4); // one rank has nothing to do
    CHECK(fake_nccl::live_registrations() == 0);
    check_nothing_is_left();
}

TEST_CASE("ranks that capture different gradients are told so, where they check") {
    run_nccl_ranks(
        {2, 3, 4},
        {.deadline = std::chrono::seconds{60}, .check = true},
        [](auto& comm, auto&, cudaStream_t stream) {
            DeviceArray<float> const gradient{std::vector<float>(4), stream};
            CapturedStep captured{
                comm,
                {gradient.part(0, comm.rank() == 1 ? 3 : 4)},
                [&](auto const& ready) { ready(0); }
            };
            CHECK_THROWS_AS(captured.step(), joinable::Mismatch);
        }
    );
    check_nothing_is_left();
}

TEST_CASE("a step that cannot be captured is refused with the reason, and leaves nothing behind") {
    run_nccl_ranks({1, 2}, [](auto& comm, auto&, cudaStream_t stream) {
        Engine engine{stream};
        auto const says = [&](auto const& passes, char const* text) {
            CapturedStep captured{comm, engine.gradients(), passes};
            CHECK_THROWS_WITH_AS(captured.step(), doctest::Contains(text), ContractViolation);
            engine.load(comm.rank(), 0); // the stream captures no more
            comm.synchronize();
        };
        says([](auto const&) {}, "called ready() for 0 of 2 gradients");
        says([](auto const& ready) { ready(1); }, "expected ready(0), but were given ready(1)");
        says(
            [](auto const& ready) {
                ready(0);
                ready(1);
                ready(2);
            },
            "expected ready(2), but were given ready(2)"
        );
        says(
            [&](auto const& ready) {
                engine.passes(ready);
                cuda(cudaLaunchHostFunc(stream, [](void*) {}, nullptr));
            },
            "such as a host function"
        );
        says(
            [&](auto const&) { comm.all_reduce(engine.gradients()[0], ReduceOp::sum).wait(); },
            "leave it to a CapturedStep"
        );
        {
            CapturedStep captured{comm, engine.gradients(), [&](auto const& r) {
                                      engine.passes(r);
                                  }};
            CHECK_THROWS_WITH_AS(
                captured.step({.will_sync = false}),
                doctest::Contains("was given a notice of a round that does not"),
                ContractViolation
            );
            comm.set_stream(nullptr);
            CHECK_THROWS_WITH_AS(
                captured.step(),
                doctest::Contains("give set_stream() a stream that is not the default one"),
                ContractViolation
            );
            comm.set_stream(stream);
            engine.load(comm.rank(), 3);
            captured.step();
            engine.check_averages(comm, 3, each(0, comm.size(), 1.0 / comm.size()));
        }
        auto const make = [&](std::vector<joinable::Buffer> gradients) {
            CapturedStep const captured{comm, std::move(gradients), [](auto const&) {}};
        };
        CHECK_THROWS_WITH_AS(
            make({}), "a captured step averages gradients, but was given none", ContractViolation
        );
        DeviceArray<float> const array{std::vector<float>(4), stream};
        make({array.part(2, 2), array.part(0, 2)});
        for (std::size_t const count : {1U, 2U, 3U}) { // of those from the second on
            CHECK_THROWS_WITH_AS(
                make({array.part(3, 1), array.part(1, count), array.part(0, 2)}),
                doctest::Contains(
                    count == 3 ? "gradients 0 and 1 of a captured step share memory"
                               : "gradients 1 and 2 of a captured step share memory"
                ),
                ContractViolation
            );
        }
        DeviceArray<int> const numbers{std::vector<int>(2), stream};
        CHECK_THROWS_WITH_AS(
            (CapturedStep{comm, {numbers.buffer()}, [](auto const& ready) { ready(0); }}),
            doctest::Contains("but was given 2 i32"),
            ContractViolation
        );
    });
    check_nothing_is_left();
}

} // namespace
