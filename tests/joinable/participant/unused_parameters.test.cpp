// SPDX-License-Identifier: BSL-1.0
// What optimizers do with a parameter that no rank uses in a round. Engines drop gradients or zero them, before a
// pass, in it, or after the step: an optimizer then skips the parameter, or steps it by zeros. Joined ranks run
// none of that, and must step as the others. The oracle is one rank that adds up the gradients of a round in
// double and steps the whole model. Gradients are multiples of size() / 8, so an average is exact.
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/draw.hpp>
#include <support/numbers.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>
#include <support/whole_optimizer.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::Partition;
using joinable::ShardGradients;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

/// `allocates_before`: zeroes as well what had no gradient.
enum class Habit {
    drops_before,
    drops_in_pass,
    drops_after,
    zeroes_before,
    zeroes_after,
    allocates_before
};
constexpr Habit habits[] = {
    Habit::drops_before,
    Habit::drops_in_pass,
    Habit::drops_after,
    Habit::zeroes_before,
    Habit::zeroes_after,
    Habit::allocates_before
};
[[nodiscard]] bool drops(Habit habit) {
    return habit < Habit::zeroes_before;
}

/// Two guards, one after another, in which ranks have other numbers of inputs.
struct Training {
    Habit habit = Habit::drops_before;
    bool starts_with_zeros = false; ///< every gradient, before the first pass
    bool is_static = false;
    bool has_views = false;
    bool is_shifted = false; ///< by before_step, on all ranks: each gradient by 1
    bool has_skips =
        false; ///< a rank skips some batches before the engine drops or zeroes gradients
    std::size_t seed = 0;
    std::vector<int> inputs[2] = {};

    [[nodiscard]] int rounds(int epoch) const {
        return *std::max_element(inputs[epoch].begin(), inputs[epoch].end());
    }
    [[nodiscard]] bool uses(int rank, int round, std::size_t i) const {
        auto const r = static_cast<std::size_t>(rank);
        auto const t = static_cast<std::size_t>(round);
        if (is_static) { // always, by all
            return (i + seed) % 3 != 1;
        }
        switch ((i + seed) % 6) {
        case 0: return true;
        case 1: return false;
        case 2: return t % 2 == 0; // all of them or none
        case 3: return r == 0;
        case 4: return (r * 5 + t * 3 + seed) % 7 < 2;
        default: return t >= 1 && (r + t) % 3 == 0;
        }
    }
    [[nodiscard]] bool skips(int rank, int round) const {
        return has_skips && (rank * 5 + round * 3 + static_cast<int>(seed)) % 4 == 0;
    }
    /// For `world` ranks.
    [[nodiscard]] Numbers
    gradient(int world, int rank, int round, std::size_t i, std::size_t n) const {
        Numbers numbers;
        for (std::size_t k = 0; k < n; ++k) {
            numbers.push_back(world * gradient_of(rank, round, i, k));
        }
        return numbers;
    }
};

/// Does what the engine does with gradients at the moments `now`.
void reset(std::vector<StridedParam>& params, Habit habit, std::initializer_list<Habit> now) {
    if (std::find(now.begin(), now.end(), habit) == now.end()) {
        return;
    }
    for (StridedParam& param : params) {
        if (habit == Habit::allocates_before) {
            param.need_grad();
        }
        if (drops(habit)) {
            param.grad = {};
        } else if (param.grad) {
            write(param.grad, Numbers(param.grad.numel()));
        }
    }
}
void add(AnyView const& gradient, Numbers const& numbers) {
    Numbers sum = read(gradient);
    for (std::size_t k = 0; k < sum.size(); ++k) {
        sum[k] += numbers[k];
    }
    write(gradient, sum);
}

/// One rank, which computes what all ranks do.
template <class Rule>
std::vector<Numbers> train_serially(Training const& training, Model const& model, Rule rule) {
    std::vector<StridedParam> params = make(model);
    WholeOptimizer<Rule> whole{params, rule};
    auto const world = static_cast<int>(training.inputs[0].size());
    for (StridedParam& param : params) {
        training.starts_with_zeros ? param.need_grad() : void();
    }
    for (int epoch = 0; epoch < 2; ++epoch) {
        for (int round = 0; round < training.rounds(epoch); ++round) {
            reset(
                params,
                training.habit,
                {Habit::drops_before,
                 Habit::drops_in_pass,
                 Habit::zeroes_before,
                 Habit::allocates_before}
            );
            bool is_empty = true; // no rank has a batch
            for (int rank = 0; rank < world; ++rank) {
                int const inputs = training.inputs[epoch][static_cast<std::size_t>(rank)];
                is_empty = is_empty && (round >= inputs || training.skips(rank, round));
            }
            for (std::size_t i = 0; i < params.size(); ++i) {
                is_empty ? params[i].need_grad() : void(); // averages are zeros then
                for (int rank = 0; rank < world; ++rank) {
                    if (round < training.inputs[epoch][static_cast<std::size_t>(rank)] &&
                        training.uses(rank, round, i) && !training.skips(rank, round)) {
                        params[i].need_grad();
                        std::size_t const n = params[i].grad.numel();
                        add(params[i].grad, training.gradient(1, rank, round, i, n));
                    }
                }
                if (training.is_shifted && params[i].grad) {
                    add(params[i].grad, Numbers(params[i].grad.numel(), 1.0));
                }
            }
            whole.step();
            reset(params, training.habit, {Habit::drops_after, Habit::zeroes_after});
        }
    }
    return values_of(params);
}

/// `optimizer` has step(), beside a model of `parameters`, which refer to `params`.
template <class Comm, class Parameters, class Optimizer>
void train_in_guards(
    Comm& comm,
    Training const& training,
    std::vector<StridedParam>& params,
    Parameters& parameters,
    Optimizer& optimizer
) {
    DistributedDataParallel ddp{
        comm,
        parameters,
        {.bucket_cap_bytes = 64,
         .gradient_as_bucket_view = training.has_views,
         .find_unused = !training.is_static,
         .static_graph = training.is_static,
         .sync_at_end = false}
    };
    int const world = comm.size();
    auto const rank = static_cast<std::size_t>(comm.rank());
    for (auto const& inputs : training.inputs) {
        Join guard{participants(ddp, optimizer)};
        for (int round = 0; round < inputs[rank]; ++round) {
            if (training.skips(comm.rank(), round)) {
                ddp.skip();
                optimizer.step();
                reset(params, training.habit, {Habit::drops_after, Habit::zeroes_after});
                continue;
            }
            reset(
                params,
                training.habit,
                {Habit::drops_before, Habit::zeroes_before, Habit::allocates_before}
            );
            std::vector<std::size_t> unused;
            for (std::size_t i = 0; !training.is_static && i < params.size(); ++i) {
                if (!training.uses(comm.rank(), round, i)) {
                    unused.push_back(i);
                }
            }
            ddp.forward([] {});
            ddp.backward(
                [&](auto ready) {
                    reset(params, training.habit, {Habit::drops_in_pass});
                    for (std::size_t i = params.size(); i-- > 0;) {
                        if (training.uses(comm.rank(), round, i)) {
                            params[i].need_grad();
                            std::size_t const n = params[i].grad.numel();
                            add(params[i].grad, training.gradient(world, comm.rank(), round, i, n));
                            ready(i);
                        }
                    }
                },
                unused
            );
            optimizer.step();
            reset(params, training.habit, {Habit::drops_after, Habit::zeroes_after});
        }
        guard.finish();
        reset(params, training.habit, {Habit::drops_after});
    }
}

std::vector<StridedParam> make_for(Training const& training, Model const& model) {
    std::vector<StridedParam> params = make(model);
    for (StridedParam& param : params) {
        training.starts_with_zeros ? param.need_grad() : void();
    }
    return params;
}

template <class Comm, class Rule>
std::vector<Numbers> train_sharded(
    Comm& comm, Training const& training, Model const& model, Rule rule, ZeroOptions options
) {
    std::vector<StridedParam> params = make_for(training, model);
    if (training.is_shifted) {
        options.before_step = [](ShardGradients const& gradients) {
            for (auto const& gradient : gradients) {
                add(gradient.view, Numbers(gradient.view.numel(), 1.0));
            }
            return true;
        };
    }
    auto const train = [&](auto& parameters) {
        ZeroRedundancyOptimizer zero{comm, parameters, rule, options};
        train_in_guards(comm, training, params, parameters, zero);
    };
    if (training.has_skips) { // also an active rank may have to release a gradient
        std::vector<DroppableParam> parameters = droppable(params);
        train(parameters);
    } else {
        train(params);
    }
    return values_of(params);
}

/// Returns the values after training by the whole optimizer on this rank. Nothing is sent at the end.
template <class Comm, class Rule>
std::vector<Numbers>
train_whole(Comm& comm, Training const& training, Model const& model, Rule rule) {
    std::vector<StridedParam> params = make_for(training, model);
    std::vector<DroppableParam> parameters = droppable(params);
    WholeOptimizer<Rule> whole{params, rule};
    Step step{comm, [&] {
                  for (StridedParam const& param : params) {
                      if (training.is_shifted && param.grad) {
                          add(param.grad, Numbers(param.grad.numel(), 1.0));
                      }
                  }
                  whole.step();
              }};
    train_in_guards(comm, training, params, parameters, step);
    return values_of(params);
}

std::vector<ZeroOptions> const partitions{
    {},
    {.bucket_cap_bytes = 64},
    {.partition = Partition::flat},
    {.partition = Partition::flat, .bucket_cap_bytes = 64},
};

Training training_of(Inputs const& inputs, int world, Habit habit, std::size_t seed) {
    Training training{
        .habit = habit,
        .starts_with_zeros = seed % 2 == 0,
        .is_shifted = seed / 2 % 2 == 0,
        .seed = seed
    };
    for (int rank = 0; rank < world; ++rank) {
        training.inputs[0].push_back(inputs(rank));
        training.inputs[1].push_back(inputs(world - 1 - rank));
    }
    return training;
}

TEST_CASE(
    "a parameter that no rank uses is stepped on a joined owner as on an active one, or skipped on both" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Inputs const& inputs : inputs_of) {
            for (Habit const habit : habits) {
                for_each_rule([&](auto const& rule) {
                    std::size_t const seed = turn++;
                    if (is_left_out(seed, 5, 0)) {
                        return;
                    }
                    Training training = training_of(inputs, comm.size(), habit, seed);
                    for (bool const is_static : {false, true}) {
                        training.is_static = is_static;
                        CAPTURE(static_cast<int>(habit));
                        CAPTURE(is_static);
                        auto const whole = train_serially(training, {}, rule);
                        ZeroOptions const& options = partitions[turn % partitions.size()];
                        CHECK(train_sharded(comm, training, {}, rule, options) == whole);
                    }
                });
            }
        }
    });
}

TEST_CASE(
    "a Step does on joined ranks what it does on active ones, if gradients can be released" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Inputs const& inputs : inputs_of) {
            for (Habit const habit : habits) {
                if (habit == Habit::drops_in_pass) { // later than the message of the round
                    continue;
                }
                for_each_rule([&](auto const& rule) {
                    std::size_t const seed = turn++;
                    if (is_left_out(seed, 5, 0)) {
                        return;
                    }
                    Training const training = training_of(inputs, comm.size(), habit, seed);
                    CAPTURE(static_cast<int>(habit));
                    auto const whole = train_serially(training, {}, rule);
                    CHECK(train_whole(comm, training, {}, rule) == whole);
                });
            }
        }
    });
}

TEST_CASE(
    "any usage, habit, partition and order of joining trains as one rank does: a draw" *
    doctest::test_suite("[long]")
) {
    for (std::uint64_t seed = 0; seed < volume<std::uint64_t>(60); ++seed) {
        CAPTURE(seed);
        Draw draw{seed};
        int const world = group_of_participants(draw.one_of({1, 2, 3, 4, 8}));
        Training training{
            .habit = habits[draw.below(std::size(habits))],
            .starts_with_zeros = draw.one_in(2),
            .is_static = draw.one_in(4),
            .has_views = draw.one_in(2),
            .is_shifted = draw.one_in(2),
            .seed = draw.below(100),
        };
        for (auto& inputs : training.inputs) {
            for (int rank = 0; rank < world; ++rank) {
                inputs.push_back(static_cast<int>(draw.below(6)));
            }
        }
        training.has_skips =
            !training.is_static && training.habit != Habit::drops_in_pass && draw.one_in(2);
        ZeroOptions options = partitions[draw.below(partitions.size())];
        Model const model{
            .dtype = draw.one_of({DType::f32, DType::f64, DType::bf16}),
            .has_strides = draw.one_in(2) && options.partition == Partition::by_parameters
        };
        if (options.partition == Partition::by_parameters && draw.one_in(2)) {
            for (std::size_t i = 0; i < make(model).size(); ++i) {
                options.owners.push_back(static_cast<int>(draw.below(static_cast<std::size_t>(world)
                )));
            }
        }
        auto const compare = [&](auto const& rule) {
            auto const whole = train_serially(training, model, rule);
            over_ranks({world}, [&](RankCommunicator& comm) {
                CHECK(train_sharded(comm, training, model, rule, options) == whole);
                if (training.habit != Habit::drops_in_pass && !training.is_static) {
                    CHECK(train_whole(comm, training, model, rule) == whole);
                }
            });
        };
        switch (draw.below(3)) {
        case 0: compare(Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.1}); break;
        case 1: compare(Adam{.learning_rate = 0.02, .amsgrad = true}); break;
        default: compare(AdamW{.learning_rate = 0.02, .weight_decay = 0.1}); break;
        }
    }
}

} // namespace
