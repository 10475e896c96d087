// SPDX-License-Identifier: BSL-1.0
// Optimizers of an engine, which see whole parameters. The oracles: a serial run, and closed forms.
#include <joinable/optimizer/local_optimizer.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::WholeParameter;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

struct Settings {
    double learning_rate = 0.125;
};

/// Momentum, and steps as long as the parameter: LAMB's way. It cannot be copied.
class TrustingMomentum {
public:
    Settings& settings() { return *settings_; }
    void step(WholeParameter const& parameter) {
        Numbers values = read(parameter.value);
        step(parameter.index, values, read(parameter.gradient));
        write(parameter.value, values);
        CHECK(parameter.step == ++steps_[parameter.index]);
    }
    void step(std::size_t index, Numbers& values, Numbers const& gradients) {
        Numbers& momentum = momenta_[index];
        momentum.resize(values.size());
        step(momentum, values, gradients);
    }
    void step(Numbers& momentum, Numbers& values, Numbers const& gradients) const {
        double of_values = 0;
        double of_momentum = 0;
        for (std::size_t k = 0; k < values.size(); ++k) {
            momentum[k] = 0.5 * momentum[k] + gradients[k];
            of_values += values[k] * values[k];
            of_momentum += momentum[k] * momentum[k];
        }
        double const trust = of_momentum == 0.0 ? 0.0 : std::sqrt(of_values / of_momentum);
        for (std::size_t k = 0; k < values.size(); ++k) {
            values[k] -= settings_->learning_rate * trust * momentum[k];
        }
    }
    [[nodiscard]] std::size_t size() const { return momenta_.size(); }

private:
    std::unique_ptr<Settings> settings_ = std::make_unique<Settings>();
    std::map<std::size_t, Numbers> momenta_;
    std::map<std::size_t, std::uint64_t> steps_;
};

/// The same with its state in the shards, which steps all that it was given at once.
class TrustingMomentumAtOnce {
public:
    struct Rate {
        double learning_rate = 0.125;
        static std::span<std::string_view const> state_names() {
            static constexpr std::array<std::string_view, 1> names{"momentum"};
            return names;
        }
        void agree_on(joinable::AgreementList& list) const {
            list.add("learning_rate", learning_rate);
        }
    };
    Rate& settings() { return rate_; }
    void apply_settings() { applied_ = rate_.learning_rate; }
    static std::span<std::string_view const> state_names() { return Rate::state_names(); }
    void agree_on(joinable::AgreementList& list) const { rate_.agree_on(list); }
    void take(std::span<WholeParameter const> own) {
        for (WholeParameter const& parameter : own) {
            CHECK((parameter.value && !parameter.gradient));
            own_.push_back(parameter.index);
        }
    }
    void step(std::span<WholeParameter const> parameters) {
        TrustingMomentum serial;
        serial.settings().learning_rate = rate_.learning_rate;
        ++steps_;
        CHECK(parameters.size() == own_.size());
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            WholeParameter const& one = parameters[i];
            CHECK((one.index == own_[i] && one.step == steps_));
            Numbers values = read(one.value);
            Numbers momentum = read(one.state.at(0));
            serial.step(momentum, values, read(one.gradient));
            write(one.value, values);
            write(one.state[0], momentum);
        }
    }
    [[nodiscard]] std::size_t size() const { return own_.size(); }
    [[nodiscard]] std::uint64_t steps() const { return steps_; }
    /// The rate of the last settings of another rank.
    [[nodiscard]] double applied() const { return applied_; }

private:
    Rate rate_;
    std::vector<std::size_t> own_;
    std::uint64_t steps_ = 0;
    double applied_ = 0;
};

double gradient_of(int rank, int round, std::size_t i, std::size_t k) {
    return static_cast<double>((static_cast<std::size_t>(rank * 5 + round * 3) + i * 7 + k) % 11) -
           5.0;
}
int inputs_of(int rank) {
    return 1 + 2 * rank;
}
double rate_of(int round) {
    return 0.125 / (1 + round);
}

template <class P = Param<double>>
std::vector<P> make() {
    std::vector<P> params;
    for (std::size_t const size : {6U, 1U, 3U, 4U}) {
        params.emplace_back(size);
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
        for (std::size_t k = 0; k < params[i].value.size(); ++k) {
            params[i].value[k] = 1.0 + static_cast<double>((i + 3 * k) % 5);
        }
    }
    params[1].requires_grad = false;
    return params;
}

/// What one rank computes from the averages.
std::vector<std::vector<double>> serial(int world) {
    std::vector<Param<double>> params = make();
    TrustingMomentum optimizer;
    for (int round = 0; round < inputs_of(world - 1); ++round) {
        optimizer.settings().learning_rate = rate_of(round);
        for (std::size_t i = 0; i < params.size(); ++i) {
            Numbers average(params[i].value.size());
            for (std::size_t k = 0; k < average.size(); ++k) {
                for (int rank = 0; rank < world; ++rank) {
                    average[k] +=
                        round < inputs_of(rank) ? gradient_of(rank, round, i, k) / world : 0.0;
                }
            }
            if (params[i].requires_grad) {
                optimizer.step(i, params[i].value, average);
            }
        }
    }
    std::vector<std::vector<double>> values;
    for (Param<double> const& param : params) {
        values.push_back(param.value);
    }
    return values;
}

template <class P>
void pass(std::vector<P>& params, int rank, int round) {
    for (std::size_t i = 0; i < params.size(); ++i) {
        for (std::size_t k = 0; k < params[i].value.size(); ++k) {
            params[i].g(k) = gradient_of(rank, round, i, k);
        }
    }
}

template <class Optimizer>
void check_steps_on_owners() {
    constexpr bool at_once = std::is_same_v<Optimizer, TrustingMomentumAtOnce>;
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const expected = serial(comm.size());
        for (bool const reduces : {false, true}) {
            for (std::size_t const cap : {std::size_t{1} << 20U, std::size_t{24}}) {
                std::vector<Param<double>> params = make();
                DistributedDataParallel ddp{comm, params};
                ZeroOptions const options{.bucket_cap_bytes = cap, .reduces_gradients = reduces};
                ZeroRedundancyOptimizer zero{comm, params, Optimizer{}, options};
                auto const train = [&](auto& guard) {
                    for (int round = 0; round < inputs_of(comm.rank()); ++round) {
                        zero.rule().settings().learning_rate =
                            rate_of(round); // active ranks set it
                        if (reduces) {
                            pass(params, comm.rank(), round);
                        } else {
                            ddp.forward([] {});
                            ddp.backward([&](auto ready) {
                                pass(params, comm.rank(), round);
                                for (std::size_t const i : std::vector<std::size_t>{3, 2, 0}) {
                                    ready(i);
                                }
                            });
                        }
                        zero.step();
                    }
                    guard.finish();
                };
                if (reduces) {
                    Join guard{participants(zero)};
                    train(guard);
                } else {
                    Join guard{participants(ddp, zero)};
                    train(guard);
                }
                std::size_t owned = 0;
                std::size_t elements = 0;
                for (std::size_t i = 0; i < params.size(); ++i) {
                    bool const is_owner =
                        params[i].requires_grad && zero.owner_of(i) == comm.rank();
                    owned += is_owner ? 1U : 0U;
                    elements += is_owner ? params[i].value.size() : 0U;
                    for (std::size_t k = 0; k < params[i].value.size(); ++k) {
                        CHECK(std::abs(params[i].value[k] - expected[i][k]) < 1e-12);
                    }
                }
                CHECK(zero.rule().size() == owned); // nobody else has the state
                CHECK(zero.state_bytes() == (at_once ? elements * sizeof(double) : 0U));
                if constexpr (at_once) {
                    int const rounds = inputs_of(comm.size() - 1);
                    CHECK(zero.rule().steps() == static_cast<std::uint64_t>(rounds));
                    bool const has_joined = inputs_of(comm.rank()) != rounds;
                    CHECK((!has_joined || zero.rule().applied() == rate_of(rounds - 1)));
                }
            }
        }
    });
}
TEST_CASE("an engine's optimizer steps whole parameters on their owners, joined ones too") {
    check_steps_on_owners<TrustingMomentum>();
}
TEST_CASE("an engine's optimizer steps all that its rank owns at once, by state in the shards") {
    check_steps_on_owners<TrustingMomentumAtOnce>();
}

template <class Optimizer>
void check_each_sharding() {
    using Weights =
        CopyingParamOf<double>; // has room for a gradient, also while its value is released
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const expected = serial(comm.size());
        for (Sharding const sharding :
             {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
            std::vector<Weights> params = make<Weights>();
            ShardedDataParallel sharded{
                comm,
                params,
                Optimizer{},
                ShardedOptions{.sharding = sharding, .bucket_cap_bytes = 24}
            };
            {
                Join guard{participants(sharded)};
                for (int round = 0; round < inputs_of(comm.rank()); ++round) {
                    sharded.rule().settings().learning_rate = rate_of(round);
                    sharded.forward([](auto) {});
                    sharded.backward([&](auto ready, auto use) {
                        for (std::size_t const i : std::vector<std::size_t>{3, 2, 0}) {
                            static_cast<void>(use(i));
                            for (std::size_t k = 0; k < expected[i].size(); ++k) {
                                params[i].g(k) = gradient_of(comm.rank(), round, i, k);
                            }
                            ready(i);
                        }
                    });
                    sharded.step();
                }
                guard.finish();
            }
            std::size_t owned = 0;
            auto const held = sharded.use_all();
            for (std::size_t i = 0; i < params.size(); ++i) {
                owned += params[i].requires_grad &&
                                 (sharding == Sharding::none || sharded.owner_of(i) == comm.rank())
                             ? 1U
                             : 0U;
                for (std::size_t k = 0; k < expected[i].size(); ++k) {
                    CHECK(std::abs(params[i].value[k] - expected[i][k]) < 1e-12);
                }
            }
            CHECK(sharded.rule().size() == owned);
        }
    });
}
TEST_CASE("an engine's optimizer steps whole parameters in each sharding, on joined owners too") {
    check_each_sharding<TrustingMomentum>();
}
TEST_CASE("an engine's optimizer steps all that its rank owns at once in each sharding") {
    check_each_sharding<TrustingMomentumAtOnce>();
}

/// Indices, in the order of calls.
struct Listing {
    Settings rate;
    std::vector<std::size_t> indices;
    Settings& settings() { return rate; }
    void step(WholeParameter const& parameter) { indices.push_back(parameter.index); }
    void check() const {
        if (rate.learning_rate < 0) {
            throw ContractViolation{"a learning rate below 0"};
        }
    }
    void agree_on(joinable::AgreementList& list) const {
        list.add("Listing::learning_rate", rate.learning_rate);
    }
};

TEST_CASE(
    "groups of an engine's optimizers count parameters through, and skip those without gradients"
) {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make();
        std::vector<Param<float>> more = make_params<float>({3, 3});
        ZeroRedundancyOptimizer zero{comm, params, Listing{}};
        zero.add_parameter_group(more, Listing{});
        params[2].grad = {};
        zero.step();
        CHECK(zero.rule(0).indices == std::vector<std::size_t>{0, 3});
        CHECK(zero.rule(1).indices == std::vector<std::size_t>{4, 5});
    });
}

TEST_CASE("an engine's optimizer gets values of 16 bits as they are") {
    struct Halving {
        Settings rate;
        Settings& settings() { return rate; }
        void step(WholeParameter const& parameter) {
            Numbers values = read(parameter.value);
            for (double& value : values) {
                value /= 2;
            }
            CHECK(parameter.value.dtype() == DType::f16);
            write(parameter.value, values);
        }
    };
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<joinable::Half>({3, 2}, joinable::Half{3.0F});
        ZeroRedundancyOptimizer zero{comm, params, Halving{}};
        CHECK(zero.state_bytes() == 0);
        for (int i = 0; i < 3; ++i) {
            params[0].value.assign(
                3, joinable::Half{1.0F}
            ); // there is no master that it could differ from
            zero.step();
            CHECK(static_cast<float>(params[0].value[1]) == 0.5F);
        }
    });
}

template <class F>
std::string refusal(F const& f) {
    try {
        f();
    } catch (std::exception const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("what an engine's optimizer cannot do is refused in a sentence") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make();
        CHECK(
            refusal([&] {
                ZeroRedundancyOptimizer{
                    comm, params, Listing{}, {.partition = joinable::Partition::flat}
                };
            }) ==
            "an engine's optimizer steps whole parameters, but Partition::flat deals out parts of "
            "them; use Partition::by_parameters"
        );
        CHECK(
            refusal([&] {
                ShardedDataParallel{
                    comm,
                    params,
                    TrustingMomentumAtOnce{},
                    ShardedOptions{.sharding = Sharding::gradients, .step_in_backward = true}
                };
            }) ==
            "step_in_backward steps a bucket as soon as its averages arrive, but this optimizer steps all "
            "parameters at once; leave it out"
        );
        CHECK(refusal([&] {
                  ZeroRedundancyOptimizer{comm, params, Listing{{-1.0}, {}}};
              }) == "a learning rate below 0");
        bool const is_last = comm.rank() == comm.size() - 1 && comm.size() > 1;
        std::string const text = refusal([&] {
            ZeroRedundancyOptimizer{comm, params, Listing{{is_last ? 0.5 : 0.25}, {}}};
        });
        bool const is_named = text.find("Listing::learning_rate") != std::string::npos;
        CHECK(is_named == (comm.size() > 1));
    });
}

TEST_CASE("what an engine's optimizer throws on one owner is PeerFailed on all others") {
    struct Failing {
        Settings rate;
        int left = 2;
        Settings& settings() { return rate; }
        void step(WholeParameter const& parameter) {
            if (parameter.index == 0 && left-- == 0) {
                throw std::domain_error{"the engine ran out of memory"};
            }
        }
    };
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make();
        ZeroRedundancyOptimizer zero{comm, params, Failing{}, {.reduces_gradients = true}};
        int const culprit = zero.owner_of(0);
        std::string text;
        try {
            Join guard{participants(zero)};
            for (int round = 0; round < (comm.rank() == culprit ? 1 : 4); ++round) {
                zero.step(); // the culprit fails while it shadows
            }
            guard.finish();
        } catch (joinable::PeerFailed const& error) {
            CHECK(comm.rank() != culprit);
            CHECK(error.rank() == culprit);
            text = error.what();
        } catch (std::domain_error const& error) {
            CHECK(comm.rank() == culprit);
            text = error.what();
        }
        CHECK(text.find("the engine ran out of memory") != std::string::npos);
    });
}

TEST_CASE("a text does not tell to call refresh() where an engine's optimizer steps") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<Param<double>> params = make();
        ZeroRedundancyOptimizer zero{comm, params, TrustingMomentum{}};
        params[2].requires_grad = false;
        CHECK_THROWS_WITH_AS(
            zero.step(),
            "parameter 2 requires no gradient any more, but did when it was given; make a new optimizer",
            ContractViolation
        );
    });
}

} // namespace
