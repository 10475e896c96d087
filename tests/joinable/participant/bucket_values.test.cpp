// SPDX-License-Identifier: BSL-1.0
// Values that lie in the buckets in which they travel: parameters_as_bucket_view. The oracle: the whole optimizer
// on every rank.
#include <joinable/participant/sharded/detail/value_store.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/sharded_training.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::Partition;
using joinable::PeerFailed;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

using Model = joinable_tests::Model;
using Gathered = std::vector<GatheredParam>;

ZeroOptions in_buckets(Partition partition, std::size_t cap) {
    return {.partition = partition, .bucket_cap_bytes = cap, .parameters_as_bucket_view = true};
}

template <class Ready>
void backward(Gathered& params, int rank, int round, Ready const& ready) {
    for (std::size_t i = params.size(); i-- > 0;) {
        StridedParam& engine = *params[i].own;
        if (engine.requires_grad) {
            engine.need_grad();
            Numbers numbers;
            for (std::size_t k = 0; k < engine.grad.numel(); ++k) {
                numbers.push_back(gradient_of(rank, round, i, k));
            }
            write(engine.grad, numbers);
            ready(i);
        }
    }
}

std::vector<Numbers> values_of(Gathered const& params) {
    std::vector<Numbers> values;
    for (GatheredParam const& param : params) {
        values.push_back(read(param.value));
    }
    return values;
}

/// Whether its value lies in a bucket: it is stepped and has elements.
bool is_in_bucket(GatheredParam const& param) {
    return param.own->requires_grad && param.own->value.view().numel() != 0;
}

/// Values after a training by an optimizer beside a model, which must not move them.
template <class Comm, class Rule>
std::vector<Numbers> train_in_buckets(
    Comm& comm,
    Model const& model,
    Inputs const& inputs,
    Rule const& rule,
    ZeroOptions const& options
) {
    Gathered params = gathered(make(model));
    std::vector<Numbers> values;
    {
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{comm, params, rule, options};
        std::vector<void*> places;
        for (GatheredParam const& param : params) {
            places.push_back(param.value.data());
            CHECK(param.sets == (is_in_bucket(param) ? 1 : 0));
        }
        Join guard{participants(ddp, zero)};
        for (int round = 0; round < inputs(comm.rank()); ++round) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) { backward(params, comm.rank(), round, ready); });
            zero.step();
        }
        guard.finish();
        CHECK(zero.bucket_bytes() == 0); // no memory for copies of values
        values = values_of(params);
        for (std::size_t i = 0; i < params.size(); ++i) {
            CHECK(params[i].value.data() == places[i]);
        }
    }
    for (GatheredParam const& param : params) {
        CHECK(param.releases == param.sets);
    }
    return values;
}

TEST_CASE(
    "values in buckets are those of the whole optimizer, bit for bit, and stay where they are" *
    doctest::test_suite("[long]")
) {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::size_t turn = static_cast<std::size_t>(comm.size());
        for (Model const& model : {
                 Model{},
                 Model{.dtype = DType::f64, .has_strides = true, .frozen = 3},
                 Model{.dtype = DType::f16, .has_strides = true},
                 Model{.dtype = DType::bf16, .is_large = true, .frozen = 1},
             }) {
            for (Inputs const& inputs : inputs_of) {
                if (is_left_out(turn++, 2, comm.size())) {
                    continue;
                }
                AdamW const rule{.learning_rate = 0.02, .weight_decay = 0.1};
                auto const whole = train_whole(comm, model, inputs, rule);
                for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
                    std::size_t const cap = turn % 2 == 0 ? 64 : 1U << 20U;
                    CHECK(
                        train_in_buckets(comm, model, inputs, rule, in_buckets(partition, cap)) ==
                        whole
                    );
                }
            }
        }
    });
}

TEST_CASE("a sharded model has its values in buckets, those of each group, and gathers nothing else"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        for (Sharding const sharding : {Sharding::optimizer, Sharding::gradients}) {
            Gathered first = gathered(make({}));
            Gathered second = gathered(make({.dtype = DType::f64}));
            ShardedDataParallel sharded{
                comm,
                first,
                Sgd{.learning_rate = 1.0},
                ShardedOptions{.sharding = sharding, .parameters_as_bucket_view = true}
            };
            sharded.add_parameter_group(second, Sgd{.learning_rate = 0.5});
            auto const engine = [&](std::size_t i) -> StridedParam& {
                return i < 7 ? *first[i].own : *second[i - 7].own;
            };
            std::vector<Numbers> expected;
            for (Gathered const* group : {&first, &second}) {
                for (Numbers numbers : values_of(*group)) {
                    for (double& number : numbers) {
                        number -= group == &first ? 2.0 : 1.0;
                    }
                    expected.push_back(std::move(numbers));
                }
            }
            for (int round = 0; round < 2; ++round) {
                sharded.forward([] {});
                sharded.backward([&](auto ready) {
                    for (std::size_t i = 14; i-- > 0;) {
                        engine(i).need_grad();
                        write(engine(i).grad, Numbers(engine(i).grad.numel(), 1.0));
                        ready(i);
                    }
                });
                sharded.step();
            }
            std::vector<Numbers> values = values_of(first);
            for (Numbers& numbers : values_of(second)) {
                values.push_back(std::move(numbers));
            }
            CHECK(values == expected);
            std::size_t const elements = 5 + 64 + 1 + 33 + 8 + 40;
            CHECK(sharded.value_bytes() >= elements * (4 + 8));
            CHECK(sharded.value_bytes() < elements * (4 + 8) + 2 * 64);
        }
    });
}

TEST_CASE(
    "weights are loaded where the values are, and another place is refused before anything is sent"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        Gathered params = gathered(make({}));
        DistributedDataParallel ddp{comm, params};
        ZeroRedundancyOptimizer zero{
            comm, params, Sgd{.learning_rate = 1.0}, in_buckets(Partition::by_parameters, 64)
        };
        auto const step = [&] {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    params[i].own->need_grad();
                    write(params[i].own->grad, Numbers(params[i].own->grad.numel(), 1.0));
                    ready(i);
                }
            });
            zero.step();
        };
        for (GatheredParam& param : params) {
            write(param.value, Numbers(param.value.numel(), 3.0));
        }
        step();
        for (Numbers const& numbers : values_of(params)) {
            CHECK(numbers == Numbers(numbers.size(), 2.0));
        }
        params[3].value = params[3].own->value.view();
        CHECK_THROWS_WITH_AS(
            step(),
            "the value of parameter 3 is not in the bucket any more, where parameters_as_bucket_view put it; "
            "write new values into the memory of the old ones",
            ContractViolation
        );
    });
}

/// What the constructor says on this rank.
template <class Comm, class Parameters>
std::string refusal(Comm& comm, Parameters& params, ShardedOptions const& options) {
    try {
        ShardedDataParallel{comm, params, Sgd{}, options};
    } catch (joinable::Error const& error) {
        return error.what();
    } catch (ContractViolation const& error) {
        return error.what();
    } catch (std::bad_alloc const&) {
        return "no memory";
    }
    return "nothing";
}

TEST_CASE("values that cannot lie in buckets are refused on every rank") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        ShardedOptions const options{.parameters_as_bucket_view = true};
        std::vector<StridedParam> fixed = make({});
        CHECK(
            refusal(comm, fixed, options) ==
            "the value of parameter 0 cannot lie in a bucket: parameter_traits of its type needs 'static void "
            "set_value(P&, AnyView)' and 'static void release_value(P&)'; or turn parameters_as_bucket_view off"
        );
        std::vector<CopyingParam> copying;
        copying.emplace_back(3U, 1.0F);
        CHECK(
            refusal(comm, copying, options) ==
            "set_value copies the value of parameter 0, but parameters_as_bucket_view needs a view; turn it off"
        );
        CHECK(copying[0].value == std::vector<float>(3, 1.0F));
        for (Sharding const sharding : {Sharding::none, Sharding::parameters}) {
            Gathered params = gathered(make({}));
            CHECK(
                refusal(comm, params, {.sharding = sharding, .parameters_as_bucket_view = true}) ==
                "parameters_as_bucket_view is for values that a step sends, but with Sharding::" +
                    std::string{name_of(sharding)} + " it sends none; leave it out"
            );
        }
    });
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        bool const is_last = comm.rank() == comm.size() - 1;
        std::string const last = std::to_string(comm.size() - 1);
        Gathered params = gathered(make({}));
        std::string const differs = refusal(comm, params, {.parameters_as_bucket_view = is_last});
        CAPTURE(differs);
        CHECK(
            differs.find("options differ: parameters_as_bucket_view: rank 0 has") !=
            std::string::npos
        );
        for (GatheredParam const& param : params) {
            CHECK(param.sets == 0);
            CHECK(param.releases == 0);
        }
        params[4].set_fails = is_last;
        std::string const fails = refusal(comm, params, {.parameters_as_bucket_view = true});
        CAPTURE(fails);
        CHECK((is_last ? fails == "no memory" : fails.find("rank " + last) != std::string::npos));
        for (std::size_t i = 0; i < params.size(); ++i) { // sanitizers see whether memory was freed
            bool const is_moved = is_in_bucket(params[i]) && (!is_last || i < 4);
            CHECK(params[i].sets == (is_moved ? 1 : 0));
            CHECK(params[i].releases == 0);
            CHECK(read(params[i].value) == read(params[i].own->value.view()));
        }
        params[4].set_fails = false; // what was refused may be tried again, from where it is
        CHECK(refusal(comm, params, {.parameters_as_bucket_view = true}) == "nothing");
    });
}

TEST_CASE("values that moved stay where they are if a constructor fails after that") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        bool const is_last = comm.rank() == comm.size() - 1;
        std::vector<std::vector<double>> means(1, std::vector<double>(2));
        Gathered params = gathered(make({}));
        params[4].set_grad_fails = is_last;
        auto const construct = [&] {
            ShardedDataParallel{
                comm,
                params,
                joinable::buffers(means),
                joinable::Sgd{},
                ShardedOptions{
                    .sharding = Sharding::optimizer,
                    .gradient_as_bucket_view = true,
                    .parameters_as_bucket_view = true
                }
            };
        };
        bool fails = false; // another rank may be done before it hears of the last one
        try {
            construct();
        } catch (std::bad_alloc const&) {
            CHECK(is_last);
            fails = true;
        } catch (PeerFailed const&) {
            CHECK(!is_last);
            fails = true;
        }
        CHECK((fails || !is_last));
        if (!fails) {
            return;
        }
        for (GatheredParam const& param : params) { // sanitizers see whether memory was freed
            CHECK(param.sets == (is_in_bucket(param) ? 1 : 0));
            CHECK(param.releases == 0);
            CHECK(read(param.value) == read(param.own->value.view()));
        }
    });
}

} // namespace
