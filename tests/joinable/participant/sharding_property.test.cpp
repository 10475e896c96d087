// SPDX-License-Identifier: BSL-1.0
// Trainings with sharded optimizers, drawn from seeds: whatever the model, the rules, the partition and the
// inputs, the values are those of the whole optimizer on every rank, bit for bit, after every guard. A rank may leave
// the first of two guards between rounds. A table of the choices that matter most has every pair of them over 20
// rounds: draws miss some, such as even inputs of 8 ranks. JOINABLE_TEST_SEEDS="first count" runs other seeds. For
// the product of the table see support/rows.hpp: one program that runs all of it takes some minutes.
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/draw.hpp>
#include <support/gathered_param.hpp>
#include <support/numbers.hpp>
#include <support/rows.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>
#include <support/whole_optimizer.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::AdamW;
using joinable::DistributedDataParallel;
using joinable::divide_by_initial_world_size;
using joinable::DType;
using joinable::Join;
using joinable::OptimizerState;
using joinable::participants;
using joinable::Partition;
using joinable::Round;
using joinable::RoundNotice;
using joinable::Sgd;
using joinable::Shape;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::Step;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

// -- what is drawn -----------------------------------------------------------------------------------

struct ParameterPlan {
    DType dtype;
    Shape extents;
    Shape value_strides;
    Shape gradient_strides;
    bool is_trained;
};
using Groups = std::vector<std::vector<ParameterPlan>>;
enum class Way {
    beside_a_model,
    alone,
    not_sharded,
    sharded_optimizer,
    sharded_gradients,
    sharded_parameters
};
/// A rank leaves between rounds by an exception: before this round, or after its last one.
struct Leave {
    int rank;
    int round;
};
/// A guard of an epoch, and the rounds in it.
struct GuardPlan {
    std::vector<int> lengths;
    std::optional<Leave> leave;
    int first_turn; ///< what passes do in a round comes from its turn

    [[nodiscard]] int round_count() const {
        return leave ? leave->round : *std::max_element(lengths.begin(), lengths.end());
    }
};
struct EpochPlan {
    Way way;
    ZeroOptions options;
    int state_root; ///< which rank gathers the state afterwards
    /// One guard, or, if a rank leaves the first one, two.
    std::vector<GuardPlan> guards;
    bool keeps_window; ///< of a guard that a rank left
    bool is_weighted;
    bool divides_by_all; ///< ranks, in place of those that are active
    int sync_every;
    std::vector<bool> skips; ///< by turn and rank
    bool zeroes;             ///< gradients after a step, in place of dropping them
    bool steps_early;        ///< in the backward pass
    /// With sharded values: those of each group, or an empty list.
    std::vector<std::vector<std::size_t>> units;
    bool has_value_views; ///< values in buckets
    /// A partition of the user's own: the owners of each group, or empty lists.
    std::vector<std::vector<int>> owners;
    std::vector<bool> evaluates; ///< by turn: a forward pass alone
};
template <class Rule>
struct TrainingPlan {
    int world;
    Groups groups;
    std::vector<Rule> rules;
    std::vector<EpochPlan> epochs;
    joinable::DataParallelOptions data_parallel;
};

constexpr int most_rounds = 20;
constexpr int turns = 2 * most_rounds;

template <class Rule>
Rule draw_rule(Draw& draw) {
    Rule rule;
    rule.learning_rate = draw.one_of({0.5, 0.125, 0.01});
    rule.weight_decay = draw.one_of({0.0, 0.125});
    rule.maximize = draw.one_in(3);
    if constexpr (std::is_same_v<Rule, Sgd>) {
        rule.momentum = draw.one_of({0.0, 0.5});
        rule.nesterov = rule.momentum != 0.0 && draw.one_in(2);
        rule.dampening = rule.nesterov ? 0.0 : draw.one_of({0.0, 0.25});
    } else {
        rule.amsgrad = draw.one_in(2);
        rule.beta2 = draw.one_of({0.999, 0.5});
    }
    return rule;
}

Shape draw_strides(Draw& draw, Shape const& extents) {
    Shape strides = joinable::row_major_strides(extents);
    if (extents.size() != 2 || draw.one_in(2)) {
        return strides;
    }
    return draw.one_in(2) ? Shape{1, extents[0]} : Shape{extents[1] + 2, 1};
}

ParameterPlan draw_parameter(Draw& draw) {
    ParameterPlan plan;
    plan.dtype = draw.one_of({DType::f32, DType::f64, DType::f16, DType::bf16});
    std::size_t const rows = draw.one_in(9) ? 0 : draw.between(1, 40);
    plan.extents = draw.one_in(2) ? Shape{rows} : Shape{rows, draw.between(1, 5)};
    plan.value_strides = draw_strides(draw, plan.extents);
    plan.gradient_strides = draw_strides(draw, plan.extents);
    plan.is_trained = !draw.one_in(4);
    return plan;
}

bool can_step_early(Way way) {
    return way == Way::sharded_gradients || way == Way::sharded_parameters;
}

/// Cuts `count` parameters into units, or leaves it to bucket_cap_bytes.
std::vector<std::size_t> draw_units(Draw& draw, std::size_t count, Way way) {
    std::vector<std::size_t> units;
    if (way != Way::sharded_parameters || draw.one_in(2)) {
        return units;
    }
    for (; count > 0; count -= units.back()) {
        units.push_back(draw.between(1, count));
    }
    return units;
}

GuardPlan draw_guard(Draw& draw, int world) {
    GuardPlan plan{};
    for (int rank = 0; rank < world; ++rank) {
        plan.lengths.push_back(static_cast<int>(draw.below(6)));
    }
    return plan;
}
/// A rank leaves the guard of the epoch, and a second guard follows.
void leave_guard(Draw& draw, EpochPlan& epoch) {
    GuardPlan& guard = epoch.guards.front();
    auto const rank = draw.below(guard.lengths.size());
    auto const rounds = static_cast<std::size_t>(guard.lengths[rank]);
    guard.leave = Leave{static_cast<int>(rank), static_cast<int>(draw.below(rounds + 1))};
    epoch.guards.push_back(draw_guard(draw, static_cast<int>(guard.lengths.size())));
    epoch.guards.back().first_turn = most_rounds;
}

EpochPlan draw_epoch(Draw& draw, int world, Way way, Groups const& groups) {
    EpochPlan plan;
    plan.way = way;
    bool const is_alone = way == Way::alone;
    plan.options.partition = draw.one_in(2) ? Partition::flat : Partition::by_parameters;
    plan.options.bucket_cap_bytes = draw.one_of<std::size_t>({1, 100, 600, 1U << 20U});
    plan.options.reduces_gradients = is_alone;
    auto const ranks = static_cast<std::size_t>(world);
    plan.state_root = static_cast<int>(draw.below(ranks));
    plan.guards.push_back(draw_guard(draw, world));
    plan.is_weighted = draw.one_in(2);
    plan.divides_by_all = draw.one_in(2);
    plan.sync_every = is_alone || draw.one_in(2) ? 1 : 2;
    for (std::size_t k = 0; k < ranks * turns; ++k) {
        plan.skips.push_back(!is_alone && plan.sync_every == 1 && draw.one_in(5));
    }
    plan.zeroes = draw.one_in(2);
    plan.steps_early = can_step_early(way) && draw.one_in(2);
    for (auto const& group : groups) {
        plan.units.push_back(draw_units(draw, group.size(), way));
    }
    plan.has_value_views =
        (way == Way::sharded_optimizer || way == Way::sharded_gradients) && draw.one_in(2);
    bool const has_owners = draw.one_in(3);
    for (auto const& group : groups) {
        auto& owners = plan.owners.emplace_back();
        for (std::size_t k = 0; has_owners && k < group.size(); ++k) {
            owners.push_back(static_cast<int>(draw.below(ranks)));
        }
    }
    for (int turn = 0; turn < turns; ++turn) {
        plan.evaluates.push_back(!is_alone && plan.sync_every == 1 && draw.one_in(6));
    }
    plan.keeps_window = draw.one_in(2);
    if (draw.one_in(3)) {
        leave_guard(draw, plan);
    }
    return plan;
}

template <class Rule>
TrainingPlan<Rule> draw_training(Draw& draw) {
    TrainingPlan<Rule> plan;
    plan.world = group_of_participants(draw.one_of({1, 2, 3, 4, 8}));
    auto const draw_way = [&] {
        return draw.one_of(
            {Way::beside_a_model,
             Way::alone,
             Way::not_sharded,
             Way::sharded_optimizer,
             Way::sharded_gradients,
             Way::sharded_parameters}
        );
    };
    std::vector<Way> ways;
    for (std::size_t epochs = draw.between(1, 3); epochs > 0; --epochs) {
        ways.push_back(draw_way());
    }
    for (std::size_t groups = draw.between(1, 3); groups > 0; --groups) {
        auto& group = plan.groups.emplace_back();
        for (std::size_t count = draw.between(1, 5); count > 0; --count) {
            group.push_back(draw_parameter(draw));
        }
        group[draw.below(group.size())].is_trained = true;
        plan.rules.push_back(draw_rule<Rule>(draw));
    }
    for (Way const way : ways) {
        plan.epochs.push_back(draw_epoch(draw, plan.world, way, plan.groups));
    }
    plan.data_parallel.gradient_as_bucket_view = draw.one_in(2);
    plan.data_parallel.bucket_cap_bytes = draw.one_of<std::size_t>({1, 300, 1U << 20U});
    return plan;
}

// -- what engines and the model of them share --------------------------------------------------------

template <class Rule>
class Model {
public:
    explicit Model(TrainingPlan<Rule> const& plan) : plan_{plan} {
        for (auto const& group : plan.groups) {
            auto& params = groups_.emplace_back();
            for (ParameterPlan const& p : group) {
                params.push_back(
                    {{{p.dtype, p.extents, p.value_strides},
                      {p.dtype, p.extents, p.gradient_strides},
                      {},
                      p.is_trained}}
                );
                Numbers values(params.back().value.view().numel());
                for (std::size_t k = 0; k < values.size(); ++k) {
                    values[k] = static_cast<double>((k * 3 + params.size()) % 13) / 8.0 - 0.75;
                }
                write(params.back().value.view(), values);
            }
        }
        for (auto& group : groups_) {
            for (StridedParam& param : group) {
                all_.push_back(&param);
            }
        }
    }

protected:
    [[nodiscard]] double rate_of(std::size_t group, std::size_t round) const {
        return plan_.rules[group].learning_rate / static_cast<double>(1 + round % 3);
    }
    [[nodiscard]] static std::uint64_t weight_of(int rank, int turn) {
        return static_cast<std::uint64_t>(1 + (rank + 2 * turn) % 3);
    }
    [[nodiscard]] static bool skips(EpochPlan const& epoch, int rank, int turn) {
        auto const ranks = epoch.guards.front().lengths.size();
        return epoch.skips[static_cast<std::size_t>(turn) * ranks + static_cast<std::size_t>(rank)];
    }
    /// Adds to `numbers` what a pass adds to the gradient of parameter `i`. Nothing, if the pass does not use it.
    static bool add_gradient(int rank, int turn, std::size_t i, Numbers& numbers) {
        auto const seed = static_cast<std::size_t>(rank * 7 + turn * 5) + i * 3;
        if (seed % 6 == 0) {
            return false;
        }
        for (std::size_t k = 0; k < numbers.size(); ++k) {
            numbers[k] += (static_cast<double>((seed + k * 11) % 17) - 8.0) / 8.0;
        }
        return true;
    }
    [[nodiscard]] std::vector<WholeOptimizer<Rule>> whole_optimizers() {
        std::vector<WholeOptimizer<Rule>> whole;
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            whole.emplace_back(groups_[g], plan_.rules[g]);
        }
        return whole;
    }
    void step(std::vector<WholeOptimizer<Rule>>& whole, std::size_t round) const {
        for (std::size_t g = 0; g < whole.size(); ++g) {
            whole[g].rule.learning_rate = rate_of(g, round);
            whole[g].step();
        }
    }
    [[nodiscard]] std::vector<Numbers> read_values() const {
        std::vector<Numbers> values;
        for (StridedParam const* param : all_) {
            values.push_back(read(param->value.view()));
            CHECK(param->value.has_its_gaps());
        }
        return values;
    }

    TrainingPlan<Rule> const& plan_;
    std::vector<std::vector<StridedParam>> groups_;
    std::vector<StridedParam*> all_;
};

// -- the model: no communicator, no guard ------------------------------------------------------------

/// The same training on one rank, by what the documentation says of averages. A guard that a rank leaves ends before
/// that round, and what ranks hold then counts in the next guard.
template <class Rule>
class SerialModel : Model<Rule> {
public:
    using Model<Rule>::Model;

    /// After each epoch: the values of all parameters.
    std::vector<std::vector<Numbers>> train() {
        auto whole = this->whole_optimizers();
        std::vector<std::vector<Numbers>> values;
        for (EpochPlan const& epoch : this->plan_.epochs) {
            clear(held_);
            for (GuardPlan const& guard : epoch.guards) {
                for (Held& held :
                     held_) { // where it begins, a rank looks if all its gradients are zeros
                    bool const is_kept = epoch.keeps_window && !is_zero(held);
                    held = is_kept ? std::move(held) : Held{};
                }
                for (int round = 0; round < guard.round_count(); ++round) {
                    train_round(epoch, guard, round, whole);
                }
            }
            values.push_back(this->read_values());
        }
        return values;
    }

private:
    /// What a rank accumulated since the last round that synced.
    struct Held {
        std::vector<Numbers> gradients; ///< of all parameters, or an empty list
        int batches = 0;
        std::uint64_t weight = 0;
    };

    void clear(std::vector<Held>& held) const {
        held.assign(static_cast<std::size_t>(this->plan_.world), Held{});
    }
    [[nodiscard]] static bool is_zero(Held const& held) {
        return std::all_of(held.gradients.begin(), held.gradients.end(), [](Numbers const& all) {
            return all == Numbers(all.size());
        });
    }

    void train_round(
        EpochPlan const& epoch,
        GuardPlan const& guard,
        int round,
        std::vector<WholeOptimizer<Rule>>& whole
    ) {
        int const turn = guard.first_turn + round;
        if (epoch.evaluates[static_cast<std::size_t>(turn)]) {
            return;
        }
        for (int rank = 0; rank < this->plan_.world; ++rank) {
            auto const r = static_cast<std::size_t>(rank);
            if (round < guard.lengths[r] && !this->skips(epoch, rank, turn)) {
                train_batch(held_[r], rank, turn);
            }
        }
        if ((round + 1) % epoch.sync_every == 0) {
            average(epoch);
            clear(held_);
            this->step(whole, static_cast<std::size_t>(round));
        }
    }
    void train_batch(Held& held, int rank, int turn) {
        held.gradients.resize(this->all_.size());
        for (std::size_t i = 0; i < this->all_.size(); ++i) {
            if (this->all_[i]->requires_grad) {
                held.gradients[i].resize(this->all_[i]->value.view().numel());
                this->add_gradient(rank, turn, i, held.gradients[i]);
            }
        }
        ++held.batches;
        held.weight += this->weight_of(rank, turn);
    }

    void average(EpochPlan const& epoch) {
        std::uint64_t weights = 0;
        int contributors = 0;
        for (Held const& held : held_) {
            weights += held.weight;
            contributors += held.batches != 0 ? 1 : 0;
        }
        Numbers factors;
        for (Held const& held : held_) {
            double const divisor = epoch.divides_by_all ? this->plan_.world : contributors;
            factors.push_back(
                held.batches == 0 ? 0.0
                : epoch.is_weighted
                    ? static_cast<double>(held.weight) / static_cast<double>(weights)
                    : 1.0 / divisor
            );
        }
        for (std::size_t i = 0; i < this->all_.size(); ++i) {
            if (!this->all_[i]->requires_grad) {
                continue;
            }
            this->all_[i]->need_grad();
            auto const& gradient = this->all_[i]->grad;
            Numbers averages;
            for (std::size_t k = 0; k < gradient.numel(); ++k) {
                Numbers numbers;
                for (Held const& held : held_) {
                    numbers.push_back(held.batches == 0 ? 0.0 : held.gradients[i][k]);
                }
                averages.push_back(
                    scaled_sum_of(gradient.dtype(), numbers, factors, joinable::ScalesScatteredSums<RankCommunicator>)
                );
            }
            write(gradient, averages);
        }
    }

    std::vector<Held> held_;
};

// -- one rank ----------------------------------------------------------------------------------------

/// Thrown where a rank leaves a guard.
struct RankLeft {};

template <class Rule>
class Engine : Model<Rule> {
public:
    Engine(RankCommunicator& comm, TrainingPlan<Rule> const& plan)
        : Model<Rule>{plan}, comm_{comm} {}

    /// With the whole optimizer on each rank. No rank leaves a guard, but the rounds are the same. For ranks whose sums
    /// SerialModel does not know.
    std::vector<std::vector<Numbers>> train_whole() {
        leaves_ = false;
        auto whole = this->whole_optimizers();
        std::vector<std::vector<Numbers>> values;
        for (EpochPlan const& epoch : this->plan_.epochs) {
            Step step{comm_, [&](Round const& round) { this->step(whole, round.number()); }};
            train_by_model(epoch, step, [](std::size_t) {});
            values.push_back(this->read_values());
        }
        return values;
    }

    std::vector<std::vector<Numbers>> train_sharded() {
        OptimizerState<Rule> state;
        std::vector<std::vector<Numbers>> values;
        for (EpochPlan const& epoch : this->plan_.epochs) {
            auto const owners_of = [&](std::size_t g) {
                bool const is_flat = epoch.options.partition == Partition::flat;
                return is_flat && epoch.way != Way::not_sharded ? std::vector<int>{}
                                                                : epoch.owners[g];
            };
            auto const train_epoch = [&](auto& optimizer, auto& groups, auto const& train) {
                for (std::size_t g = 1; g < groups.size(); ++g) {
                    if constexpr (requires { optimizer.use_all(); }) {
                        optimizer.add_parameter_group(
                            groups[g], this->plan_.rules[g], owners_of(g), epoch.units[g]
                        );
                    } else {
                        optimizer.add_parameter_group(
                            groups[g], this->plan_.rules[g], owners_of(g)
                        );
                    }
                }
                if (!values.empty()) {
                    optimizer.load(state, (&epoch - 1)->state_root);
                }
                train([&](std::size_t round) { // on active ranks
                    for (std::size_t g = 0; g < this->groups_.size(); ++g) {
                        optimizer.rule(g).learning_rate = this->rate_of(g, round);
                    }
                });
                optimizer.consolidate(epoch.state_root);
                state =
                    comm_.rank() == epoch.state_root ? optimizer.state() : OptimizerState<Rule>{};
                values.push_back(this->read_values());
            };
            if (epoch.way == Way::beside_a_model || epoch.way == Way::alone) {
                ZeroOptions options = epoch.options;
                options.owners = owners_of(0);
                ZeroRedundancyOptimizer zero{
                    comm_, this->groups_[0], this->plan_.rules[0], options
                };
                train_epoch(zero, this->groups_, [&](auto const& set_rates) {
                    epoch.way == Way::alone ? train_alone(epoch, zero, set_rates)
                                            : train_by_model(epoch, zero, set_rates);
                });
            } else {
                ShardedOptions const options{
                    .sharding = epoch.way == Way::not_sharded         ? Sharding::none
                                : epoch.way == Way::sharded_optimizer ? Sharding::optimizer
                                : epoch.way == Way::sharded_gradients ? Sharding::gradients
                                                                      : Sharding::parameters,
                    .partition = epoch.options.partition,
                    .owners = owners_of(0),
                    .bucket_cap_bytes = epoch.options.bucket_cap_bytes,
                    .step_in_backward = epoch.steps_early,
                    .gradient_as_bucket_view = this->plan_.data_parallel.gradient_as_bucket_view,
                    .units = epoch.units[0],
                    .parameters_as_bucket_view = epoch.has_value_views,
                };
                reset_gradients(false); // they may lie in the buckets of an earlier model
                // They may have values in memory of the library.
                std::vector<std::vector<GatheredParam>> parameters(this->groups_.size());
                for (std::size_t g = 0; g < this->groups_.size(); ++g) {
                    for (StridedParam& param : this->groups_[g]) {
                        parameters[g].emplace_back(
                            std::shared_ptr<StridedParam>{std::shared_ptr<void>{}, &param}
                        );
                    }
                }
                ShardedDataParallel sharded{comm_, parameters[0], this->plan_.rules[0], options};
                train_epoch(sharded, parameters, [&](auto const& set_rates) {
                    in_guards(epoch, set_rates, [&](GuardPlan const& plan) {
                        Join guard{
                            participants(sharded),
                            divide_by_initial_world_size = epoch.divides_by_all
                        };
                        train_in(guard, epoch, plan, sharded, sharded, set_rates);
                    });
                    auto const held = sharded.use_all();
                    for (auto& group : parameters) {
                        for (GatheredParam& param : group) {
                            if (param.sets != 0) {
                                write(param.own->value.view(), read(param.value));
                            }
                        }
                    }
                });
            }
        }
        return values;
    }

private:
    /// Runs the guards of an epoch. The rank that leaves one catches what it threw, and all others the failure.
    template <class SetRates, class Run>
    void in_guards(EpochPlan const& epoch, SetRates const& set_rates, Run const& run) {
        for (GuardPlan guard : epoch.guards) {
            if (guard.first_turn != 0) {
                set_rates(0); // some ranks had set those of the round that did not take place
                if (!epoch.keeps_window) {
                    reset_gradients(epoch.zeroes);
                }
            }
            auto const leave = guard.leave;
            if (!leaves_ && leave) {
                for (int& length : guard.lengths) {
                    length = (std::min)(length, leave->round);
                }
                guard.leave.reset();
            }
            bool is_left = false;
            try {
                run(guard);
            } catch (RankLeft const&) {
                is_left = true;
            } catch (joinable::PeerFailed const& error) {
                is_left = guard.leave && error.rank() == guard.leave->rank;
                if (!is_left) {
                    throw;
                }
            }
            CHECK(is_left == guard.leave.has_value());
        }
    }
    void may_leave(GuardPlan const& guard, int round) const {
        if (guard.leave && guard.leave->rank == comm_.rank() && guard.leave->round == round) {
            throw RankLeft{};
        }
    }
    [[nodiscard]] RoundNotice notice_of(EpochPlan const& epoch, int round, int turn) const {
        RoundNotice notice{.will_sync = (round + 1) % epoch.sync_every == 0};
        if (epoch.is_weighted) {
            notice.weight = this->weight_of(comm_.rank(), turn);
        }
        return notice;
    }

    void use_values(auto const&... use) const {
        for (std::size_t i = 0; i < this->all_.size(); i += 1 + this->all_.size() / 4) { // not all
            (static_cast<void>(use(i)), ...);
        }
    }
    template <class Ready>
    void backward(int turn, Ready const& ready) {
        for (std::size_t i = this->all_.size(); i-- > 0;) {
            StridedParam& param = *this->all_[i];
            if (!param.requires_grad) {
                continue;
            }
            Numbers numbers = param.grad ? read(param.grad) : Numbers(param.value.view().numel());
            if (this->add_gradient(comm_.rank(), turn, i, numbers)) {
                param.need_grad();
                write(param.grad, numbers);
            }
            ready(i);
        }
    }
    void reset_gradients(bool zeroes) {
        for (StridedParam* param : this->all_) {
            if (param->grad && zeroes) {
                write(param->grad, Numbers(param->grad.numel()));
            } else {
                param->grad = {};
            }
        }
    }

    template <class Optimizer, class SetRates>
    void train_by_model(EpochPlan const& epoch, Optimizer& optimizer, SetRates const& set_rates) {
        reset_gradients(false);
        DistributedDataParallel ddp{comm_, this->all_, this->plan_.data_parallel};
        in_guards(epoch, set_rates, [&](GuardPlan const& plan) {
            Join guard{
                participants(ddp, optimizer), divide_by_initial_world_size = epoch.divides_by_all
            };
            train_in(guard, epoch, plan, ddp, optimizer, set_rates);
        });
    }
    template <class Guard, class Trained, class Optimizer, class SetRates>
    void train_in(
        Guard& guard,
        EpochPlan const& epoch,
        GuardPlan const& plan,
        Trained& model,
        Optimizer& optimizer,
        SetRates const& set_rates
    ) {
        int const length = plan.lengths[static_cast<std::size_t>(comm_.rank())];
        for (int round = 0; round < length; ++round) {
            may_leave(plan, round);
            int const turn = plan.first_turn + round;
            RoundNotice const notice = notice_of(epoch, round, turn);
            if (epoch.evaluates[static_cast<std::size_t>(turn)]) {
                model.forward(
                    [&](auto const&... use) { use_values(use...); },
                    {.phase = joinable::Phase::evaluate}
                );
                continue;
            }
            if (epoch.steps_early) {
                set_rates(static_cast<std::size_t>(round));
            }
            if (this->skips(epoch, comm_.rank(), turn)) {
                model.skip();
            } else {
                model.forward([&](auto const&... use) { use_values(use...); }, notice);
                model.backward([&](auto const& ready, auto const&... use) {
                    backward(turn, [&](std::size_t i) {
                        (static_cast<void>(use(i)), ...);
                        ready(i);
                    });
                });
            }
            if (notice.will_sync) {
                if (!epoch.steps_early) {
                    set_rates(guard.round().number());
                }
                optimizer.step();
                reset_gradients(epoch.zeroes);
            }
        }
        may_leave(plan, length);
        guard.finish();
    }
    template <class Optimizer, class SetRates>
    void train_alone(EpochPlan const& epoch, Optimizer& optimizer, SetRates const& set_rates) {
        reset_gradients(false); // they may lie in the buckets of an earlier model
        in_guards(epoch, set_rates, [&](GuardPlan const& plan) {
            Join guard{
                participants(optimizer), divide_by_initial_world_size = epoch.divides_by_all
            };
            int const length = plan.lengths[static_cast<std::size_t>(comm_.rank())];
            for (int round = 0; round < length; ++round) {
                may_leave(plan, round);
                int const turn = plan.first_turn + round;
                reset_gradients(epoch.zeroes);
                backward(turn, [](std::size_t) {});
                set_rates(static_cast<std::size_t>(round));
                optimizer.step(notice_of(epoch, round, turn));
            }
            may_leave(plan, length);
            guard.finish();
        });
    }

    RankCommunicator& comm_;
    bool leaves_ = true;
};

template <class Rule>
void compare(TrainingPlan<Rule> const& plan) {
    using Values = std::vector<std::vector<Numbers>>;
    Values const serial = sums_in_rank_order ? SerialModel<Rule>{plan}.train() : Values{};
    over_ranks({plan.world}, [&](RankCommunicator& comm) {
        Values const whole = sums_in_rank_order ? serial : Engine<Rule>{comm, plan}.train_whole();
        CHECK(Engine<Rule>{comm, plan}.train_sharded() == whole);
    });
}

// Where collectives sum in orders of their own, values of 16 bits drift apart in twenty rounds.
TEST_CASE(
    "any training with a sharded optimizer has the values of the whole one, bit for bit" *
    doctest::test_suite("[long]") * doctest::skip(!sums_have_one_order)
) {
    std::uint64_t first = 0;
    std::uint64_t count = volume<std::uint64_t>(200);
    if (char const* const seeds = std::getenv("JOINABLE_TEST_SEEDS")) {
        std::istringstream{seeds} >> first >> count;
    }
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        CAPTURE(seed);
        Draw draw{seed};
        switch (draw.below(3)) {
        case 0: compare(draw_training<Sgd>(draw)); break;
        case 1: compare(draw_training<Adam>(draw)); break;
        default: compare(draw_training<AdamW>(draw)); break;
        }
    }
}

// -- a table -----------------------------------------------------------------------------------------

/// What a row of it chooses: the index of one of `choices[factor]`.
enum Factor : std::size_t {
    rule,
    maximizes,
    groups,
    frozen,
    way,
    partition,
    views,
    world,
    inputs,
    early,
    leaves
};
using Choices = Row<11>;
/// The rules: Sgd, Adam and AdamW, then with nesterov or amsgrad. The inputs: even, uneven, one rank without.
constexpr Choices choices{6, 2, 3, 2, 6, 2, 2, 5, 3, 2, 2};

/// Steps in the backward pass only where they can be.
bool is_distinct(Choices const& row) {
    return row[early] == 0 || can_step_early(static_cast<Way>(row[way]));
}

template <class Rule>
TrainingPlan<Rule> plan_of(Choices const& row, Draw& draw) {
    TrainingPlan<Rule> plan;
    plan.world = group_of_participants(std::array{1, 2, 3, 4, 8}[row[world]]);
    for (std::size_t group = 0; group <= row[groups]; ++group) {
        auto& parameters = plan.groups.emplace_back();
        for (int i = 0; i < 4; ++i) {
            parameters.push_back(draw_parameter(draw));
            parameters.back().is_trained = i != 1 || row[frozen] == 0;
        }
        Rule settings = draw_rule<Rule>(draw);
        settings.maximize = row[maximizes] == 1;
        if constexpr (std::is_same_v<Rule, Sgd>) {
            settings.nesterov = row[rule] >= 3;
            settings.momentum = settings.nesterov ? 0.5 : settings.momentum;
            settings.dampening = settings.nesterov ? 0.0 : settings.dampening;
        } else {
            settings.amsgrad = row[rule] >= 3;
        }
        plan.rules.push_back(settings);
    }
    EpochPlan epoch = draw_epoch(draw, plan.world, static_cast<Way>(row[way]), plan.groups);
    epoch.options.partition = row[partition] == 0 ? Partition::by_parameters : Partition::flat;
    epoch.guards.resize(1);
    epoch.guards[0].leave.reset();
    std::vector<int>& lengths = epoch.guards[0].lengths;
    for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
        // Each of 8 ranks runs out at another round.
        lengths[rank] =
            row[inputs] == 1 ? 1 + static_cast<int>(rank * 3 % most_rounds) : most_rounds;
    }
    if (row[inputs] == 2) {
        lengths[draw.below(lengths.size())] = 0;
    }
    if (row[leaves] == 1) {
        leave_guard(draw, epoch);
    }
    epoch.steps_early = can_step_early(epoch.way) && row[early] == 1;
    plan.epochs.push_back(epoch);
    plan.data_parallel.gradient_as_bucket_view = row[views] == 1;
    return plan;
}

void compare(Choices const& row, Draw& draw) {
    switch (row[rule] % 3) {
    case 0: compare(plan_of<Sgd>(row, draw)); break;
    case 1: compare(plan_of<Adam>(row, draw)); break;
    default: compare(plan_of<AdamW>(row, draw)); break;
    }
}

TEST_CASE(
    "every pair of choices trains as the whole optimizer does, bit for bit" *
    doctest::test_suite("[long]") * doctest::skip(!sums_have_one_order)
) {
    Draw draw{1};
    std::size_t const rows =
        for_rows(choices, draw, is_distinct, [&](Choices const& row) { compare(row, draw); });
    CHECK(rows >= choices[rule] * choices[way]); // as many pairs of these two
}

} // namespace
