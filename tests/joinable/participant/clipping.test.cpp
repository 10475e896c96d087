// SPDX-License-Identifier: BSL-1.0
// What before_step clips and agrees on, in every sharding. The oracles: each rank beside a DistributedDataParallel
// does the same to all averages, in double; norms that PyTorch's clip_grad_norm_ returned.
#include <joinable/optimizer/before_step.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/alike.hpp>
#include <support/gathered_param.hpp>
#include <support/numbers.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>

#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::ClipNorm;
using joinable::ClipValue;
using joinable::ContractViolation;
using joinable::Partition;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::ShardGradients;
using joinable::Sharding;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr Sgd rule{.learning_rate = 0.25, .momentum = 0.5};

/// Every sharding and partition, with many buckets.
std::vector<ShardedOptions> all_options() {
    std::vector<ShardedOptions> all;
    for (Sharding const sharding :
         {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            all.push_back({.sharding = sharding, .partition = partition, .bucket_cap_bytes = 64});
        }
    }
    return all;
}

/// Trains with a `before_step`. `bad` is a number that the last rank's first gradient has in its last round.
std::vector<Numbers> train_sharded(
    RankCommunicator& comm,
    Model const& model,
    Inputs const& inputs,
    ShardedOptions const& options,
    double bad = 0
) {
    std::vector<GatheredParam> params = gathered(make(model));
    ShardedDataParallel sharded{comm, params, rule, options};
    {
        Join guard{participants(sharded)};
        int const last = inputs(comm.rank()) - 1;
        for (int round = 0; round <= last; ++round) {
            sharded.forward([&](auto use) {
                for (std::size_t i = 0; i < params.size(); ++i) {
                    [[maybe_unused]] auto const held = use(i);
                }
            });
            sharded.backward([&](auto ready, auto use) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    [[maybe_unused]] auto const held = use(i);
                    StridedParam& own = *params[i].own;
                    own.need_grad();
                    Numbers numbers;
                    for (std::size_t k = 0; k < own.grad.numel(); ++k) {
                        numbers.push_back(gradient_of(comm.rank(), round, i, k));
                    }
                    if (bad != 0 && i == 0 && round == last && comm.rank() == comm.size() - 1) {
                        numbers[0] = bad;
                    }
                    write(own.grad, numbers);
                    ready(i);
                }
            });
            sharded.step();
        }
        guard.finish();
    }
    auto const held = sharded.use_all();
    std::vector<Numbers> values;
    for (GatheredParam const& param : params) {
        values.push_back(read(param.value));
    }
    return values;
}

/// Trains on every rank by all averages, which `change(gradients)` changes before a step.
std::vector<Numbers> train_changed(
    RankCommunicator& comm,
    Model const& model,
    Inputs const& inputs,
    std::function<void(std::vector<Numbers>&)> const& change
) {
    std::optional<WholeOptimizer<Sgd>> whole;
    return train(comm, model, inputs, [&](auto& params) {
        whole.emplace(params, rule);
        return Step{comm, [&] {
                        std::vector<Numbers> gradients;
                        for (StridedParam const& param : params) {
                            gradients.push_back(read(param.grad));
                        }
                        change(gradients);
                        for (std::size_t i = 0; i < gradients.size(); ++i) {
                            write(params[i].grad, gradients[i]);
                        }
                        whole->step();
                    }};
    });
}

/// PyTorch's definition: the norm of the tensors' norms.
double norm_of(std::vector<Numbers> const& gradients, double type) {
    auto const norm = [type](Numbers const& numbers) {
        double result = 0;
        for (double const number : numbers) {
            result = std::isinf(type) ? (std::max)(result, std::abs(number))
                                      : result + std::pow(std::abs(number), type);
        }
        return std::isinf(type) ? result : std::pow(result, 1 / type);
    };
    Numbers norms;
    for (Numbers const& gradient : gradients) {
        norms.push_back(norm(gradient));
    }
    return norm(norms);
}

} // namespace

TEST_CASE("gradients are clipped by a norm of any type, in each sharding, on joined ranks too") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = 0;
        Model const model{.dtype = DType::f64};
        for (double const type : {0.5, 1.0, 2.0, 3.0, infinity}) {
            Inputs const& inputs = inputs_of[++turn % 4];
            double norm = 0;
            double const most = type == 0.5 ? 20.0 : 0.05;
            auto const expected = train_changed(comm, model, inputs, [&](auto& gradients) {
                norm = norm_of(gradients, type);
                double const factor = (std::min)(1.0, most / (norm + 1e-6));
                for (Numbers& gradient : gradients) {
                    for (double& number : gradient) {
                        number *= factor;
                    }
                }
            });
            for (ShardedOptions options : all_options()) {
                CAPTURE(type);
                CAPTURE(static_cast<int>(options.sharding));
                ClipNorm clip{most, {.norm_type = type}};
                options.before_step = std::ref(clip);
                auto const found = train_sharded(comm, model, inputs, options);
                CHECK(clip.norm() == doctest::Approx(norm).epsilon(1e-13));
                CHECK((norm > most || (comm.size() == 1 && norm == 0.0)));
                for (std::size_t i = 0; i < expected.size(); ++i) {
                    for (std::size_t k = 0; k < expected[i].size(); ++k) {
                        CHECK(std::abs(found[i][k] - expected[i][k]) < 1e-13);
                    }
                }
            }
        }
    });
}

TEST_CASE("gradients are clipped by value, in each sharding and dtype, on joined ranks too") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = 0;
        for (DType const dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
            for (bool const has_strides : {false, true}) {
                Model const model{.dtype = dtype, .has_strides = has_strides};
                Inputs const& inputs = inputs_of[++turn % 4];
                auto const expected = train_changed(comm, model, inputs, [&](auto& gradients) {
                    for (Numbers& gradient : gradients) {
                        for (double& number : gradient) {
                            number = std::clamp(number, -0.125, 0.125);
                        }
                    }
                });
                for (ShardedOptions options : all_options()) {
                    if (has_strides && options.partition == Partition::flat) {
                        continue; // some are refused
                    }
                    options.before_step = ClipValue{0.125};
                    CHECK(are_alike(train_sharded(comm, model, inputs, options), expected));
                }
            }
        }
    });
}

TEST_CASE("a maximum is over all ranks, with any sign and NaN, on joined ranks too") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (ShardedOptions options : all_options()) {
            int steps = 0;
            options.before_step = [&](ShardGradients const& gradients) {
                double const rank = comm.rank();
                bool const is_last = comm.rank() == comm.size() - 1;
                double numbers[] = {
                    rank,
                    -1.5 - rank,
                    is_last ? -not_a_number : infinity,
                    comm.rank() == 0 ? 0.0 : -0.0,
                    -infinity,
                    is_last ? 5e-324 : -5e-324,
                };
                gradients.max(numbers);
                CHECK(numbers[0] == comm.size() - 1);
                CHECK(numbers[1] == -1.5);
                CHECK(std::isnan(numbers[2]));
                CHECK(numbers[3] == 0.0);
                CHECK(!std::signbit(numbers[3]));
                CHECK(numbers[4] == -infinity);
                CHECK(numbers[5] == 5e-324);
                CHECK(gradients.max(-rank) == 0.0);
                ++steps;
                return true;
            };
            train_sharded(comm, {}, inputs_of[1], options);
            CHECK(steps == comm.size()); // rounds of the last rank
        }
    });
}

TEST_CASE("a norm of infinite type is NaN where one rank's gradient is, and spreads") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        for (ShardedOptions options : all_options()) {
            ClipNorm clip{0.25, {.norm_type = infinity}};
            options.before_step = std::ref(clip);
            auto const values = train_sharded(comm, {}, inputs_of[0], options, not_a_number);
            CHECK(std::isnan(clip.norm()));
            for (Numbers const& numbers : values) {
                for (double const number : numbers) {
                    CHECK(std::isnan(number));
                }
            }
        }
    });
}

TEST_CASE("a norm that is not finite is an error on all ranks, where the options ask for it") {
    over_ranks({1, 2, 3, 4}, [](RankCommunicator& comm) {
        ShardedOptions options{.sharding = Sharding::gradients};
        std::string text;
        options.before_step = [&](ShardGradients const& gradients) {
            try {
                return ClipNorm{1.0, {.norm_type = 1, .error_if_nonfinite = true}}(gradients);
            } catch (joinable::Error const& error) {
                text = error.what();
                return false; // all ranks
            }
        };
        train_sharded(comm, {}, inputs_of[1], options, infinity);
        CHECK(
            text == "the norm of type 1 of all gradients is inf, so they cannot be clipped; skip "
                    "such steps, or leave out error_if_nonfinite"
        );
        options.before_step = ClipNorm{1.0, {.norm_type = 1, .error_if_nonfinite = true}};
        CHECK_THROWS_AS( // its own, or that of a rank that was faster
            train_sharded(comm, {}, inputs_of[1], options, infinity),
            joinable::Error
        );
    });
}

TEST_CASE("norms are those that PyTorch returned for the same gradients") {
    // total = torch.nn.utils.clip_grad_norm_(parameters, 1e9, norm_type=p) in float64, gradients of make({})
    struct Recorded {
        double type;
        double norm;
    };
    over_ranks({1}, [](RankCommunicator& comm) {
        for (auto const& [type, norm] :
             {Recorded{0.5, 10617.272266208116},
              Recorded{1.0, 80.25},
              Recorded{2.0, 7.5374067158406675},
              Recorded{3.0, 3.5688943331158502},
              Recorded{infinity, 1.0}}) {
            ClipNorm clip{1e9, {.norm_type = type}};
            ShardedOptions options{.before_step = std::ref(clip)};
            train_sharded(comm, {}, [](int) { return 1; }, options);
            CHECK(clip.norm() == doctest::Approx(norm).epsilon(1e-14));
        }
    });
}

TEST_CASE("a norm or limit that makes no sense is refused in a sentence") {
    for (double const type : {0.0, -1.0, -infinity, not_a_number}) {
        CHECK_THROWS_WITH_AS(
            (ClipNorm{1.0, {.norm_type = type}}),
            doctest::Contains("give a number above 0, or infinity for the maximum"),
            ContractViolation
        );
    }
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        ShardedOptions options;
        options.before_step = [](ShardGradients const& gradients) {
            std::vector<double> sums(3);
            CHECK_THROWS_WITH_AS(
                gradients.sum_powers(3, sums),
                "sum_powers gives a number for each of 7 parameters, but was given room for 3; give "
                "as many as parameter_count()",
                ContractViolation
            );
            CHECK_THROWS_AS(gradients.sum_powers(0, sums), ContractViolation);
            for (double const limit : {-1.0, not_a_number}) {
                CHECK_THROWS_WITH_AS(
                    ClipValue{limit}(gradients),
                    doctest::Contains("gradients cannot be clipped to a magnitude of "),
                    ContractViolation
                );
            }
            return true;
        };
        CHECK(are_alike(
            train_sharded(comm, {}, inputs_of[1], options),
            train_changed(comm, {}, inputs_of[1], [](auto&) {})
        ));
    });
}
