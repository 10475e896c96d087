// SPDX-License-Identifier: BSL-1.0
// Checkpoints of sharded trainings. The oracles: a reader of the layout that is written here, the training that
// never stopped, and Python's safetensors.
#include <joinable/checkpoint/checkpoint.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <over_ranks.hpp>
#include <support/checkpoint_file.hpp>
#include <support/failure_text.hpp>
#include <support/folder.hpp>
#include <support/gathered_param.hpp>
#include <support/named_param.hpp>
#include <support/numbers.hpp>
#include <support/recording_communicator.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>
#include <support/whole_optimizer.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::AdamW;
using joinable::Checkpoint;
using joinable::CommunicationError;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::Partition;
using joinable::PeerFailed;
using joinable::Sgd;
using joinable::Shape;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ZeroOptions;
using joinable::ZeroRedundancyOptimizer;

struct Model {
    DType dtype = DType::f32;
    bool is_permuted = false; ///< dense, but not row-major
    bool has_gaps = false;
    std::size_t frozen = 99; ///< index of a parameter that needs no gradient
    std::size_t last = 40;   ///< elements of the last parameter
};

std::vector<StridedParam> make(Model const& model, double shift = 0) {
    std::vector<StridedParam> params;
    std::size_t i = 0;
    for (Shape const& extents :
         {Shape{5}, Shape{8, 8}, Shape{}, Shape{3, 11}, Shape{2, 3, 4}, Shape{0}, Shape{model.last}
         }) {
        Shape strides = row_major_strides(extents);
        if (model.is_permuted && extents == Shape{8, 8}) {
            strides = Shape{1, 8};
        }
        if (model.is_permuted && extents == Shape{2, 3, 4}) {
            strides = Shape{3, 1, 6};
        }
        if (model.has_gaps && extents == Shape{3, 11}) {
            strides = Shape{13, 1};
        }
        params.push_back({{{model.dtype, extents, strides}, {model.dtype, extents, strides}, {}}});
        params.back().requires_grad = i != model.frozen;
        Numbers values;
        for (std::size_t k = 0; k < params.back().value.view().numel(); ++k) {
            values.push_back(shift + static_cast<double>((i * 5 + k * 3) % 13) / 8.0 - 0.75);
        }
        write(params.back().value.view(), values);
        ++i;
    }
    return params;
}

/// The pass of an engine that zeroes gradients before it.
void backward(std::vector<StridedParam>& params, int rank, std::uint64_t round, auto const& ready) {
    for (std::size_t i = params.size(); i-- > 0;) {
        if (!params[i].requires_grad) {
            continue;
        }
        params[i].need_grad();
        Numbers numbers;
        for (std::size_t k = 0; k < params[i].grad.numel(); ++k) {
            auto const r = static_cast<std::size_t>(rank);
            numbers.push_back(
                static_cast<double>((r * 7 + round * 5 + i * 3 + k * 11) % 17) / 8.0 - 1.0
            );
        }
        write(params[i].grad, numbers);
        ready(i);
    }
}

std::uint64_t inputs_of(int rank) {
    return 3 + static_cast<std::uint64_t>(rank) % 4;
}
std::uint64_t most_inputs(int ranks) {
    return 3 + (std::min)(static_cast<std::uint64_t>(ranks) - 1, std::uint64_t{3});
}

/// Trains the inputs from `save.rounds()` on.
template <class Comm, class Zero, class Save>
void train(Comm& comm, std::vector<StridedParam>& params, Zero& zero, Save& save) {
    DistributedDataParallel ddp{comm, params};
    std::uint64_t const first = save.rounds();
    Join guard{participants(ddp, zero, save)};
    for (std::uint64_t round = first; round < inputs_of(comm.rank()); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) { backward(params, comm.rank(), round, ready); });
        zero.step();
        save.step();
    }
    guard.finish();
}

/// Compares a file with what ranks have.
template <class Comm, class Zero>
void check_file(
    Comm& comm, std::string const& name, std::vector<StridedParam> const& params, Zero& zero
) {
    ReadFile const file = read_checkpoint(name);
    for (std::size_t i = 0; i < params.size(); ++i) {
        auto const& value = params[i].value.view();
        CHECK(file.numbers(std::to_string(i)) == read(value));
        CHECK(file.shape(std::to_string(i)) == value.extents());
    }
    zero.consolidate();
    if (comm.rank() != 0) {
        return;
    }
    std::string steps;
    std::size_t tensors = params.size();
    for (std::size_t i = 0; i < params.size(); ++i) {
        auto const& state = zero.state().parameters[i];
        steps += (i == 0 ? "" : " ") + std::to_string(state.steps);
        for (joinable::StateTensor const& tensor : state.tensors) {
            CHECK(file.bytes(std::to_string(i) + "/" + tensor.name) == tensor.elements);
            ++tensors;
        }
    }
    CHECK(file.metadata("steps") == steps);
    CHECK(file.tensor_count() == tensors);
}

std::vector<ZeroOptions> const all_options{
    {},
    {.bucket_cap_bytes = 64},
    {.partition = Partition::flat},
    {.partition = Partition::flat, .bucket_cap_bytes = 64},
};
std::vector<Model> const models{
    {},
    {.dtype = DType::bf16, .is_permuted = true},
    {.dtype = DType::f16, .frozen = 1},
    {.dtype = DType::f64, .is_permuted = true, .frozen = 4},
};

/// Writes with some ranks, reads with others.
void move(Folder const& folder, int from, int to, Model const& model, std::size_t options) {
    std::string const name = folder.file("model.safetensors");
    AdamW const rule{.learning_rate = 0.02, .amsgrad = true};
    over_ranks({from}, [&](RankCommunicator& comm) {
        auto params = make(model);
        ZeroRedundancyOptimizer zero{comm, params, rule, all_options[options % 4]};
        Checkpoint save{zero, name};
        train(comm, params, zero, save);
        CHECK(save.rounds() == most_inputs(from));
        check_file(comm, name, params, zero); // as the last round left it
    });
    over_ranks({to}, [&](RankCommunicator& comm) {
        auto params = make(model, 1.5);
        ZeroOptions const other = all_options[(options / 2 + options) % 4];
        ZeroRedundancyOptimizer zero{comm, params, AdamW{.learning_rate = 7}, other};
        Checkpoint save{zero, name};
        save.read();
        CHECK(save.rounds() == most_inputs(from));
        CHECK(zero.rule().learning_rate == 0.02);
        CHECK(zero.rule().amsgrad);
        check_file(comm, name, params, zero);
        static_cast<void>(values_of(params)); // gaps are as they were
    });
}

TEST_CASE(
    "what some ranks wrote, any number of ranks reads, with either partition" *
    doctest::test_suite("[long]")
) {
    Folder const folder;
    std::size_t turn = 0;
    for (int const from : {1, 2, 3, 4, 8}) {
        for (int const to : {1, 2, 3, 4, 8}) {
            if (!is_left_out(turn, 9, 7)) { // 2 to 3, and 4 to 2
                move(folder, from, to, models[turn % models.size()], turn);
            }
            ++turn;
        }
    }
    CHECK(folder.names() == std::vector<std::string>{"model.safetensors"});
}

TEST_CASE("every dtype, layout and partition is written and read") {
    Folder const folder;
    for (Model const& model : models) {
        for (std::size_t options = 0; options < 4; ++options) {
            move(folder, 3, 2, model, options);
        }
    }
    move(folder, 2, 3, {.has_gaps = true}, 0); // Partition::flat has dense values alone
    move(folder, 2, 3, {.last = 20'000}, 0);   // a parameter that travels alone
}

/// One round of a training whose values are sharded.
template <class Sharded>
void train_round(Sharded& sharded, std::vector<GatheredParam>& params, int rank) {
    sharded.forward([](auto) {});
    sharded.backward([&](auto ready, auto) {
        for (std::size_t i = params.size(); i-- > 0;) {
            if (!params[i].own->requires_grad) {
                continue;
            }
            params[i].own->need_grad();
            Numbers numbers(params[i].own->grad.numel());
            for (std::size_t k = 0; k < numbers.size(); ++k) {
                numbers[k] = static_cast<double>((i * 3 + k * 11) % 17) / 8.0 - 1.0 + rank;
            }
            write(params[i].own->grad, numbers);
            ready(i);
        }
    });
    sharded.step();
}
template <class Sharded>
std::vector<Numbers> all_values(Sharded& sharded, std::vector<GatheredParam> const& params) {
    auto const held = sharded.use_all();
    std::vector<Numbers> values;
    for (GatheredParam const& param : params) {
        values.push_back(read(param.value));
    }
    return values;
}

TEST_CASE(
    "values that are sharded are written and read, whatever their layout" *
    doctest::test_suite("[long]")
) {
    Folder const folder;
    std::string const name = folder.file("sharded");
    std::vector<Model> all = models;
    all.push_back({.has_gaps = true});
    for (Model const& model : all) {
        for (Partition const partition : {Partition::by_parameters, Partition::flat}) {
            over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
                AdamW const rule{.learning_rate = 0.02};
                ShardedOptions options{
                    .sharding = Sharding::parameters, .partition = partition, .bucket_cap_bytes = 64
                };
                auto params = gathered(make(model));
                ShardedDataParallel sharded{comm, params, rule, options};
                train_round(sharded, params, comm.rank());
                Checkpoint{sharded, name}.write();
                ReadFile const file = read_checkpoint(name);
                auto const values = all_values(sharded, params);
                for (std::size_t i = 0; i < params.size(); ++i) {
                    CHECK(file.numbers(std::to_string(i)) == values[i]);
                }
                auto others = gathered(make(model, 1.5));
                options.partition =
                    partition == Partition::flat ? Partition::by_parameters : Partition::flat;
                ShardedDataParallel other{comm, others, rule, options};
                Checkpoint{other, name}.read();
                CHECK(all_values(other, others) == values);
                train_round(sharded, params, comm.rank());
                train_round(other, others, comm.rank());
                CHECK(all_values(other, others) == all_values(sharded, params));
            });
        }
    }
}

TEST_CASE(
    "what ranks wrote with one sharding they read with any other" * doctest::test_suite("[long]")
) {
    Folder const folder;
    std::string const name = folder.file("any");
    Model const model{.dtype = DType::bf16, .is_permuted = true};
    ShardedOptions const all[] = {
        {.sharding = Sharding::none},
        {.sharding = Sharding::optimizer},
        {.sharding = Sharding::gradients},
        {.sharding = Sharding::parameters},
        {.sharding = Sharding::parameters, .units = std::vector(make(model).size(), std::size_t{1})
        },
        {.sharding = Sharding::optimizer, .parameters_as_bucket_view = true},
        {.sharding = Sharding::gradients,
         .partition = Partition::flat,
         .parameters_as_bucket_view = true},
    };
    over_ranks({1, 2, 3, 4}, [&](RankCommunicator& comm) {
        AdamW const rule{.learning_rate = 0.02};
        for (ShardedOptions const& from : all) {
            auto params = gathered(make(model));
            ShardedDataParallel sharded{comm, params, rule, from};
            train_round(sharded, params, comm.rank());
            Checkpoint{sharded, name}.write();
            train_round(sharded, params, comm.rank());
            auto const values = all_values(sharded, params);
            for (ShardedOptions const& to : all) {
                auto others = gathered(make(model, 1.5));
                ShardedDataParallel other{comm, others, rule, to};
                Checkpoint{other, name}.read();
                train_round(other, others, comm.rank());
                CHECK(all_values(other, others) == values);
            }
        }
    });
}

TEST_CASE("groups have their rules, and integers that are frozen travel too") {
    Folder const folder;
    std::string const name = folder.file("groups");
    for (int const ranks : {3, 2}) {
        over_ranks({ranks}, [&](RankCommunicator& comm) {
            bool const writes = ranks == 3;
            auto first = make({});
            auto second = make({.dtype = DType::f64}, 1);
            second.push_back(
                {{{DType::i64, Shape{3}, Shape{1}}, {DType::i64, Shape{3}, Shape{1}}, {}}}
            );
            second.back().requires_grad = false;
            write(second.back().value.view(), writes ? Numbers{1, -2, 3} : Numbers{0, 0, 0});
            double const rate = writes ? 0.5 : 0;
            ZeroRedundancyOptimizer zero{comm, first, Sgd{.learning_rate = rate}};
            zero.add_parameter_group(second, Sgd{.learning_rate = rate / 2, .momentum = rate});
            Checkpoint save{zero, name};
            if (writes) {
                save.write();
            } else {
                save.read();
                CHECK(zero.rule(0).learning_rate == 0.5);
                CHECK(zero.rule(1).momentum == 0.5);
                CHECK(read(second.back().value.view()) == Numbers{1, -2, 3});
            }
        });
    }
}

TEST_CASE(
    "a training that goes on from a file of a round in an uneven guard is the one that never stopped" *
    doctest::test_suite("[long]")
) {
    Folder const folder;
    std::string const name = folder.file("model.safetensors");
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        std::uint64_t const most = most_inputs(comm.size());
        std::size_t turn = 0;
        for (Model const& model : models) {
            for (ZeroOptions const& options : {all_options[1], all_options[3]}) {
                if (is_left_out(turn++, 3, comm.size())) {
                    continue;
                }
                Adam const rule{.learning_rate = 0.02};
                auto whole = make(model);
                {
                    ZeroRedundancyOptimizer zero{comm, whole, rule, options};
                    Checkpoint save{zero, name, {.every = most / 2 + 1}}; // once
                    train(comm, whole, zero, save);
                    CHECK(save.rounds() == most);
                }
                auto resumed = make(model, 0.5);
                ZeroRedundancyOptimizer zero{comm, resumed, Adam{}, options};
                Checkpoint save{zero, name, {.every = 99}};
                save.read();
                CHECK(save.rounds() == most / 2 + 1);
                CHECK(values_of(resumed) != values_of(whole));
                train(comm, resumed, zero, save);
                CHECK(save.rounds() == most);
                CHECK(values_of(resumed) == values_of(whole));
            }
        }
    });
}

/// Rounds come in pairs, of which the second one syncs. Rank r of the first training has 6 to 3 batches, and of the
/// second one, which goes on from round 4, 4 to 1: where that is odd, its last gradient and weight are carried to
/// the next round that syncs.
constexpr int first_of_second = 4;
int end_of(int training, int rank) {
    return training == 0 ? 6 - rank % 4 : first_of_second + 4 - rank % 4;
}
std::uint64_t weight_of(int rank, int round) {
    return static_cast<std::uint64_t>(1 + (rank + 2 * round) % 3);
}
double carried_gradient(int rank, int round, std::size_t i, std::size_t k) {
    auto const r = static_cast<std::size_t>(rank);
    auto const t = static_cast<std::size_t>(round);
    return static_cast<double>((r * 7 + t * 5 + i * 3 + k * 11) % 17) / 8.0 - 1.0;
}

/// One training by `comm`'s ranks, from what `save` says on.
template <class Comm, class Zero, class Save>
void train_in_pairs(
    Comm& comm, std::vector<StridedParam>& params, Zero& zero, Save& save, int training
) {
    DistributedDataParallel ddp{comm, params, {.gradient_kind = joinable::GradientKind::sum}};
    auto const first = static_cast<int>(2 * save.rounds());
    Join guard{participants(ddp, zero, save)};
    for (int round = first; round < end_of(training, comm.rank()); ++round) {
        bool const syncs = round % 2 == 1;
        ddp.forward([] {}, {.will_sync = syncs, .weight = weight_of(comm.rank(), round)});
        ddp.backward([&](auto ready) {
            for (std::size_t i = params.size(); i-- > 0;) {
                params[i].need_grad();
                Numbers numbers(params[i].grad.numel());
                numbers = syncs ? read(params[i].grad) : numbers;
                for (std::size_t k = 0; k < numbers.size(); ++k) {
                    numbers[k] += carried_gradient(comm.rank(), round, i, k);
                }
                write(params[i].grad, numbers);
                ready(i);
            }
        });
        if (syncs) {
            zero.step();
            save.step();
        }
    }
    guard.finish();
}

// The oracle: one rank in double.
TEST_CASE(
    "any number of ranks goes on in the middle of an uneven guard, whose ranks accumulate and have weights" *
    doctest::test_suite("[long]")
) {
    Folder const folder;
    std::string const name = folder.file("middle");
    Model const model{.dtype = DType::f64, .is_permuted = true};
    // Sums that are zero but for rounding make no steps.
    AdamW const rule{.learning_rate = 0.02, .epsilon = 1e-2, .weight_decay = 0.1, .amsgrad = true};
    std::size_t turn = 0;
    for (int const from : {1, 2, 3, 4, 8}) {
        for (int const to : {1, 2, 3, 4, 8}) {
            if (is_left_out(turn++, 9, 7)) { // 2 to 3, and 4 to 2 run
                continue;
            }
            over_ranks({from}, [&](RankCommunicator& comm) {
                auto params = make(model);
                ZeroRedundancyOptimizer zero{comm, params, rule, all_options[turn % 4]};
                Checkpoint save{zero, name, {.every = 2}}; // of three rounds that sync
                train_in_pairs(comm, params, zero, save, 0);
                CHECK(save.rounds() == 3);
            });
            std::vector<StridedParam> serial = make(model);
            WholeOptimizer<AdamW> whole{serial, rule};
            for (int round = 0; round < 8; round += 2) {
                int const training = round < first_of_second ? 0 : 1;
                double weights = 0;
                std::vector<Numbers> sums;
                for (StridedParam& param : serial) {
                    param.need_grad();
                    sums.emplace_back(param.grad.numel());
                }
                for (int rank = 0; rank < (training == 0 ? from : to); ++rank) {
                    for (int r = round; r < round + 2 && r < end_of(training, rank); ++r) {
                        weights += static_cast<double>(weight_of(rank, r));
                        for (std::size_t i = 0; i < sums.size(); ++i) {
                            for (std::size_t k = 0; k < sums[i].size(); ++k) {
                                sums[i][k] += carried_gradient(rank, r, i, k);
                            }
                        }
                    }
                }
                for (std::size_t i = 0; i < sums.size(); ++i) {
                    for (double& number : sums[i]) {
                        number /= weights;
                    }
                    write(serial[i].grad, sums[i]);
                }
                whole.step();
            }
            auto const expected = values_of(serial);
            over_ranks({to}, [&](RankCommunicator& comm) {
                auto params = make(model, 1.5);
                ZeroRedundancyOptimizer zero{comm, params, AdamW{}, all_options[turn / 2 % 4]};
                Checkpoint save{zero, name, {.every = 99}};
                save.read();
                CHECK(save.rounds() == 2);
                train_in_pairs(comm, params, zero, save, 1);
                CHECK(save.rounds() == 4);
                auto const found = values_of(params);
                CAPTURE(from);
                for (std::size_t i = 0; i < expected.size(); ++i) {
                    for (std::size_t k = 0; k < expected[i].size(); ++k) {
                        CHECK(std::abs(found[i][k] - expected[i][k]) < 1e-12);
                    }
                }
            });
        }
    }
}

TEST_CASE("a file that was cut anywhere is refused on all ranks, and nothing changes") {
    Folder const folder;
    std::string const name = folder.file("cut");
    Model const model{.last = 5'000};
    over_ranks({2}, [&](RankCommunicator& comm) {
        auto params = make(model);
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint{zero, name}.write();
    });
    std::string const whole = contents_of(name);
    REQUIRE(whole.size() > 60'000);
    std::vector<std::size_t> sizes{0, 1, 7, 8, 9, 100, whole.size() - 1};
    for (std::size_t size = 4096; size < whole.size(); size += 4096) {
        sizes.push_back(size);
    }
    for (std::size_t const size : sizes) {
        write_contents(name, whole.substr(0, size));
        over_ranks({2}, [&](RankCommunicator& comm) {
            auto params = make(model, 2);
            auto const before = values_of(params);
            ZeroRedundancyOptimizer zero{comm, params, Adam{.learning_rate = 3}};
            Checkpoint save{zero, name};
            says(failure_of([&] { save.read(); }), "contract: ");
            CHECK(values_of(params) == before);
            CHECK(zero.rule().learning_rate == 3);
            comm.barrier(); // it can be used
        });
    }
}

TEST_CASE("a file with a wrong header is refused by one text on all ranks, and nothing changes") {
    Folder const folder;
    std::string const name = folder.file("wrong");
    over_ranks({2}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint{zero, name}.write();
    });
    std::string const whole = contents_of(name);
    auto const with_length = [&](std::uint64_t length) {
        std::string changed = whole;
        std::memcpy(changed.data(), &length, sizeof length); // safetensors' files are little-endian
        return changed;
    };
    auto const with = [&](std::string_view old, std::string_view other) {
        std::string changed = whole;
        auto const at = changed.find(old);
        REQUIRE(at != std::string::npos);
        return changed.replace(at, old.size(), other);
    };
    struct Case {
        std::string contents;
        std::string_view expected;
    };
    std::uint64_t length = 0;
    std::memcpy(&length, whole.data(), sizeof length);
    auto const of_ranks = [&](std::string const& count) { // all else is right
        auto metadata = nlohmann::json::parse(whole.substr(8, length)).at("__metadata__");
        REQUIRE(metadata.at("world size") == "2");
        std::string const old_checksum = metadata.at("checksum");
        std::map<std::string, std::string> entries = metadata;
        entries["world size"] = count;
        std::string changed = with(old_checksum, joinable::detail::checksum_of(entries));
        std::string const old = "\"world size\":\"2\"";
        changed.replace(changed.find(old), old.size(), "\"world size\":\"" + count + "\"");
        std::uint64_t const now = length + count.size() - 1;
        std::memcpy(changed.data(), &now, sizeof now);
        return changed;
    };
    Case const cases[] = {
        {with_length(length - 8), ""},
        {with_length(whole.size()), ""},
        {with_length(~std::uint64_t{0}), ""},
        {with("{", "["), "no JSON"},
        {with("\"dtype\"", "\"dtypo\""), "has no dtype"},
        {with("\"F32\"", "\"I32\""), "expected is tensor"},
        {with("[8,8]", "[8,9]"), "f32 (8, 9)"},
        {with("\"data_offsets\":[0,", "\"data_offsets\":[4,"), ""},
        {with("__metadata__", "__metadate__"), ""},
        {of_ranks("0"), "its world size is 0, but expected is 1 to 262144"},
        {of_ranks("262145"), "its world size is 262145, but expected is 1 to 262144"},
        {of_ranks("1000000000000"), "its world size is 1000000000000"},
    };
    for (Case const& c : cases) {
        write_contents(name, c.contents);
        over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
            auto params = make({}, 2);
            auto const before = values_of(params);
            ZeroRedundancyOptimizer zero{comm, params, Adam{.learning_rate = 3}};
            Checkpoint save{zero, name};
            std::string const failure = failure_of([&] { save.read(); });
            says(failure, "contract: checkpoint " + name);
            says(failure, c.expected);
            CHECK(values_of(params) == before);
            CHECK(zero.rule().learning_rate == 3);
            CHECK(save.rounds() == 0);
            comm.barrier(); // it can be used
        });
    }
}

TEST_CASE(
    "a byte of the file that changed is refused, or changes nothing of the training" *
    doctest::test_suite("[long]")
) {
    Folder const folder;
    std::string const name = folder.file("flipped");
    auto const make_small = [] {
        auto params = make({.dtype = DType::bf16});
        params.erase(params.begin() + 1, params.end());
        return params;
    };
    over_ranks({1}, [&](RankCommunicator& comm) {
        auto params = make_small();
        ZeroRedundancyOptimizer zero{comm, params, Adam{.learning_rate = 0.25}};
        Checkpoint save{zero, name};
        train(comm, params, zero, save);
    });
    std::string const whole = contents_of(name);
    over_ranks({1}, [&](RankCommunicator& comm) {
        auto params = make_small();
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, name};
        std::size_t refused = 0;
        std::size_t const step = under_sanitizer ? 7 : 1;
        for (std::size_t i = 0; i < whole.size(); i += step) {
            for (unsigned const mask : {0x01U, 0x20U, 0x80U}) {
                std::string changed = whole;
                changed[i] = static_cast<char>(static_cast<unsigned char>(changed[i]) ^ mask);
                write_contents(name, changed);
                std::string const failure = failure_of([&] { save.read(); });
                if (failure.empty()) {
                    save.write();
                    CHECK(contents_of(name) == whole);
                } else {
                    CHECK(failure.starts_with("contract: "));
                    ++refused;
                }
            }
        }
        CHECK(refused >= whole.size() / step * 3 - 3 * 7); // but those of spaces behind the header
    });
}

TEST_CASE("a file of another model, rule or program is refused by what differs first") {
    Folder const folder;
    std::string const name = folder.file("other");
    over_ranks({2}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint{zero, name}.write();
    });
    over_ranks({1, 3}, [&](RankCommunicator& comm) {
        auto const read_with = [&](std::vector<StridedParam> params, auto const& rule) {
            auto const before = values_of(params);
            ZeroRedundancyOptimizer zero{comm, params, rule};
            Checkpoint save{zero, name};
            std::string const failure = failure_of([&] { save.read(); });
            CHECK(values_of(params) == before);
            says(failure, "contract: checkpoint " + name);
            return failure;
        };
        says(
            read_with(make({.last = 41}), Adam{}),
            "it is of another model: expected is tensor 6, f32 (41), but it has f32 (40)"
        );
        says(
            read_with(make({.dtype = DType::bf16}), Adam{}),
            "expected is tensor 0, bf16 (5), but it has f32 (5)"
        );
        says(
            read_with(make({.frozen = 3}), Adam{}),
            "it has tensor 3/exp_avg, f32 (3, 11), which the model lacks"
        );
        auto more = make({});
        more.push_back({{{DType::f32, Shape{1}, Shape{1}}, {DType::f32, Shape{1}, Shape{1}}, {}}});
        says(
            read_with(std::move(more), Adam{}),
            "expected is tensor 7, f32 (1), but it has none of that name"
        );
        says(read_with(make({}), AdamW{}), "its rule is Adam, but expected is AdamW");
        says(read_with(make({}), Sgd{}), "but expected is Sgd");
    });
    write_contents(name, std::string{"\x02\0\0\0\0\0\0\0{}", 10});
    over_ranks({2}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, name};
        says(failure_of([&] { save.read(); }), "expected is a file that Checkpoint wrote");
    });
}

TEST_CASE("a rank that cannot write or read fails all by one type, and the old file stays") {
    Folder const folder;
    std::string const name = folder.file("model");
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, name};
        save.write();
        std::string const before = contents_of(name);
        comm.barrier();
        write(params[0].value.view(), Numbers{1, 2, 3, 4, 5});
        for (int culprit = 0; culprit < comm.size(); culprit += 1 + comm.size() / 3) {
            bool const is_culprit = comm.rank() == culprit;
            std::string const elsewhere = folder.file("none/model");
            Checkpoint other{zero, is_culprit ? elsewhere : name};
            std::string const cannot_write = failure_of([&] { other.write(); });
            std::string const cannot_read = failure_of([&] { other.read(); });
            says(cannot_write, "communication: ");
            says(cannot_write, elsewhere + ".part: No such file or directory");
            says(cannot_read, "communication: ");
            says(cannot_read, elsewhere + ": No such file or directory");
            CHECK(contents_of(name) == before);
            CHECK(folder.names() == std::vector<std::string>{"model"});
            comm.barrier();
        }
        save.write(); // the communicator can be used
        CHECK(contents_of(name) != before);
        comm.barrier();
    });
}

TEST_CASE("a target that is a folder, or is in none, is the same failure on all ranks") {
    Folder const folder;
    std::filesystem::create_directories(folder.file("target/inner"));
    over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        for (char const* const target : {"target", "none/model", "target/none/model"}) {
            Checkpoint save{zero, folder.file(target)};
            says(failure_of([&] { save.write(); }), "communication: ");
            says(failure_of([&] { save.read(); }), "communication: ");
        }
        CHECK(folder.names() == std::vector<std::string>{"target"});
        comm.barrier();
    });
    if (::geteuid() == 0) {
        std::puts("skipped: root may write into every folder");
        return;
    }
    std::filesystem::permissions(folder.file("target"), std::filesystem::perms::owner_read);
    over_ranks({2}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, folder.file("target/model")};
        says(failure_of([&] { save.write(); }), "communication: ");
    });
    std::filesystem::permissions(folder.file("target"), std::filesystem::perms::owner_all);
}

std::vector<NamedParam> named(std::vector<std::string> const& names) {
    std::vector<NamedParam> params;
    for (std::string const& name : names) {
        params.emplace_back(NamedParam{
            {{DType::f32, Shape{2, 3}, Shape{3, 1}}, {DType::f32, Shape{2, 3}, Shape{3, 1}}, {}},
            name,
            false
        });
        write(params.back().value.view(), {1, 2, 3, 4, 5, 6});
    }
    return params;
}

TEST_CASE("a rank whose engine throws fails all, and the old file stays") {
    Folder const folder;
    std::string const name = folder.file("model");
    over_ranks({2, 3}, [&](RankCommunicator& comm) {
        auto params = named({"a", "b"});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, name};
        save.write();
        params[1].throws = comm.rank() == 1;
        std::string const failure = failure_of([&] { save.write(); });
        says(
            failure,
            comm.rank() == 1 ? "other: the engine failed" : "peer: rank 1 failed: the engine failed"
        );
        CHECK(folder.names() == std::vector<std::string>{"model"});
        comm.barrier();
    });
}

/// Waits for collectives in flight, as a communicator of devices does.
template <class Comm>
struct Synchronizing : CoreOnly<Comm> {
    using CoreOnly<Comm>::CoreOnly;
    bool fails = false;
    void synchronize() const {
        if (fails) {
            throw std::runtime_error{"the device is lost"};
        }
    }
};

TEST_CASE("a rank whose device fails while it waits for collectives fails all at once") {
    Folder const folder;
    over_ranks({2, 3}, [&](RankCommunicator& inner) {
        Synchronizing<RankCommunicator> comm{inner};
        auto params = named({"a", "b"});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, folder.file("model")};
        save.write();
        comm.fails = comm.rank() == 1;
        std::string const told = comm.rank() == 1 ? "other: the device is lost"
                                                  : "peer: rank 1 failed: the device is lost";
        says(failure_of([&] { save.write(); }), told);
        says(failure_of([&] { save.read(); }), told);
        inner.barrier();
    });
}

TEST_CASE("a file has the settings for the next step, also if rank 0 has joined") {
    Folder const folder;
    std::vector<double> const rates{0.5, std::sqrt(0.5), 0.25, 0.1, 1.0 / 3, 0.75, 2};
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = rates[0]}};
        Checkpoint save{zero, folder.file("model")};
        DistributedDataParallel ddp{comm, params};
        {
            Join guard{participants(ddp, zero, save)};
            for (std::uint64_t round = 0; round < inputs_of(comm.rank()); ++round) {
                ddp.forward([] {});
                ddp.backward([&](auto ready) { backward(params, comm.rank(), round, ready); });
                zero.step();
                zero.rule().learning_rate = rates[round + 1];
                save.step();
            }
            guard.finish();
        }
        zero.rule().learning_rate = 77;
        save.read();
        CHECK(zero.rule().learning_rate == rates[most_inputs(comm.size())]);
    });
}

TEST_CASE("settings that differ between ranks are neither written nor gathered") {
    Folder const folder;
    over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 0.5}};
        Checkpoint save{zero, folder.file("model")};
        save.write();
        zero.rule().learning_rate = comm.rank() == 1 ? 0.25 : 0.5;
        char const* const text = "settings differ: learning_rate: rank 0 has 0.5, rank 1 has 0.25";
        CHECK_THROWS_WITH_AS(save.write(), text, joinable::Mismatch);
        CHECK_THROWS_WITH_AS(zero.consolidate(1), text, joinable::Mismatch);
        save.read();
        CHECK(zero.rule().learning_rate == 0.5);
        zero.consolidate(1);
    });
}

TEST_CASE("tensors are called by their parameters' names, which differ") {
    Folder const folder;
    std::string const name = folder.file("model");
    over_ranks({2}, [&](RankCommunicator& comm) {
        {
            auto params = named({"layer.weight", "", "\xc3\xa4 \" \\"});
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.momentum = 0.5}};
            Checkpoint{zero, name}.write();
            ReadFile const file = read_checkpoint(name);
            CHECK(file.numbers("layer.weight") == Numbers{1, 2, 3, 4, 5, 6});
            CHECK(file.numbers("1") == Numbers{1, 2, 3, 4, 5, 6});
            CHECK(file.numbers("1/momentum_buffer") == Numbers{0, 0, 0, 0, 0, 0});
            CHECK(file.numbers("\xc3\xa4 \" \\") == Numbers{1, 2, 3, 4, 5, 6});
            Checkpoint{zero, name}.read();
        }
        for (std::vector<std::string> const& names : {
                 std::vector<std::string>{"a", "a"},
                 {"1", ""},
                 {"a", "a/momentum_buffer"},
                 {"__metadata__"},
             }) {
            auto params = named(names);
            ZeroRedundancyOptimizer zero{comm, params, Sgd{.momentum = 0.5}};
            Checkpoint save{zero, name};
            says(failure_of([&] { save.write(); }), "two tensors would be called " + names.back());
        }
        auto params = named({"\xff"});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{}};
        Checkpoint save{zero, name};
        says(failure_of([&] { save.write(); }), "its header cannot be written");
    });
}

TEST_CASE("in a guard write() and read() are refused, and every has a meaning") {
    Folder const folder;
    over_ranks({1, 2}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        CHECK_THROWS_AS((Checkpoint{zero, folder.file("model"), {.every = 0}}), ContractViolation);
        Checkpoint save{zero, folder.file("model")};
        Checkpoint outside{zero, folder.file("other")};
        DistributedDataParallel ddp{comm, params};
        {
            Join guard{participants(ddp, zero, save)};
            says(
                failure_of([&] { save.write(); }),
                "contract: Checkpoint::write() was called in a guard"
            );
            says(
                failure_of([&] { save.read(); }),
                "contract: Checkpoint::read() was called in a guard"
            );
            says(failure_of([&] { outside.write(); }), "was called in a guard");
            guard.finish();
        }
        save.write();
    });
}

/// Has settings of every type, of which some are not always there, and some are computed.
struct ManySettings {
    enum class Mode : std::uint8_t { plain, nested };

    bool is_on = false;
    std::int8_t small = 0;
    std::uint64_t large = 0;
    float rate = 0;
    double decay = 0;
    Mode mode = Mode::plain;
    std::int32_t depth = 0; ///< only if nested
    std::uint16_t left_out = 0;

    static std::span<std::string_view const> state_names() { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const&) const {}
    void agree_on(joinable::AgreementList& list) const {
        list.add("is on", is_on);
        list.add("small", small);
        list.add("large", large);
        list.add("rate", rate);
        list.add("decay", decay);
        list.add("mode", mode);
        if (mode == Mode::nested) {
            list.add("depth", depth);
        }
        list.add("product", rate * 2);
    }
    bool operator==(ManySettings const&) const = default;
};

/// Changes what the file says besides tensors, with the checksum that fits.
template <class Edit>
void forge(std::string const& name, Edit const& edit) {
    std::string const whole = contents_of(name);
    std::uint64_t length = 0;
    std::memcpy(&length, whole.data(), sizeof length);
    auto header = nlohmann::json::parse(whole.substr(sizeof length, length));
    std::map<std::string, std::string> metadata = header["__metadata__"];
    edit(metadata);
    metadata["checksum"] = joinable::detail::checksum_of(metadata);
    header["__metadata__"] = metadata;
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    std::string start(sizeof length, '\0');
    std::uint64_t const size = text.size();
    std::memcpy(start.data(), &size, sizeof size);
    write_contents(name, start + text + whole.substr(sizeof length + length));
}

TEST_CASE("settings of every type come back from a file as they were, to the bit") {
    Folder const folder;
    std::string const name = folder.file("settings");
    using Mode = ManySettings::Mode;
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    ManySettings const rules[] = {
        {true, -128, ~std::uint64_t{0}, 0.1F, -5e-324, Mode::nested, -7, 0},
        {false, 127, 1, -0.0F, -std::numeric_limits<double>::infinity(), Mode::plain, 0, 0},
        {true, 0, 0, std::numeric_limits<float>::denorm_min(), nan, Mode::plain, 0, 0},
    };
    for (ManySettings const& rule : rules) {
        over_ranks({2}, [&](RankCommunicator& comm) {
            auto params = make({});
            ZeroRedundancyOptimizer zero{comm, params, rule};
            Checkpoint{zero, name}.write();
            for (Mode const mode : {Mode::plain, Mode::nested}) {
                ManySettings const other{.mode = mode, .depth = 9, .left_out = 3};
                ZeroRedundancyOptimizer reader{comm, params, other};
                Checkpoint{reader, name}.read();
                ManySettings const read = reader.rule();
                using joinable::detail::stored_settings;
                CHECK(stored_settings(read) == stored_settings(rule));
                CHECK(std::signbit(read.rate) == std::signbit(rule.rate));
                CHECK(read.left_out == 3); // what no file has stays
            }
            comm.barrier();
        });
        CHECK(read_checkpoint(name).metadata("rule 0: small") == std::to_string(rule.small));
    }
}

TEST_CASE("a file with a setting that is none of its type, or of no rule, is refused on all ranks"
) {
    Folder const folder;
    std::string const name = folder.file("forged");
    struct Case {
        char const* key;
        char const* value; ///< null: it is left out
        char const* expected;
    };
    Case const cases[] = {
        {"rule 0: amsgrad", "7", "its setting amsgrad of group 0 is \"7\", but here it is \"true\""
        },
        {"rule 0: amsgrad", nullptr, "amsgrad of group 0 is missing, but here it is \"true\""},
        {"rule 0: beta1", "0.9x", "beta1 of group 0 is \"0.9x\", but here it is \"0.75\""},
        {"rule 0: beta1",
         "1e999",
         "is \"1e999\", but here it is \"0.75\", and cannot be set to that"},
        {"rule 0: beta1", "", "is \"\", but"},
        {"rule 0: beta1", "0.50", "is \"0.50\", but here it is \"0.5\""},
        {"rule 0: beta3", "1", "beta3 of group 0 is \"1\", but here it is missing"},
        {"rule 0: beta1", "-1", "beta1"}, // by the rule itself
        {"version",
         "1",
         "its version is 1, but expected is 2; continue this training with the version"},
    };
    for (Case const& c : cases) {
        CAPTURE(c.key);
        CAPTURE(c.value);
        over_ranks({1}, [&](RankCommunicator& comm) {
            auto params = make({});
            ZeroRedundancyOptimizer zero{comm, params, Adam{}};
            Checkpoint{zero, name}.write();
        });
        forge(name, [&](auto& metadata) {
            if (c.value == nullptr) {
                metadata.erase(c.key);
            } else {
                metadata[c.key] = c.value;
            }
        });
        over_ranks({1, 3}, [&](RankCommunicator& comm) {
            auto params = make({});
            ZeroRedundancyOptimizer zero{comm, params, Adam{.beta1 = 0.75, .amsgrad = true}};
            Checkpoint save{zero, name};
            says(failure_of([&] { save.read(); }), c.expected);
            CHECK(zero.rule().beta1 == 0.75);
            CHECK(zero.rule().amsgrad);
        });
    }
}

TEST_CASE("files of equal trainings are equal, whatever lies between the members of a rule") {
    Folder const folder;
    std::string contents[2];
    for (int const fill : {0, 1}) {
        std::string const name = folder.file(std::to_string(fill));
        over_ranks({1}, [&](RankCommunicator& comm) {
            auto params = make({});
            alignas(Adam) std::byte memory[sizeof(Adam)];
            std::memset(memory, fill == 0 ? 0x00 : 0xff, sizeof memory);
            Adam const values;
            auto const copy = [&](auto member) {
                std::memcpy(
                    memory + (reinterpret_cast<std::byte const*>(&(values.*member)) -
                              reinterpret_cast<std::byte const*>(&values)),
                    &(values.*member),
                    sizeof(values.*member)
                );
            };
            for (auto const member :
                 {&Adam::learning_rate,
                  &Adam::beta1,
                  &Adam::beta2,
                  &Adam::epsilon,
                  &Adam::weight_decay}) {
                copy(member);
            }
            copy(&Adam::amsgrad);
            copy(&Adam::maximize);
            Adam rule;
            std::memcpy(&rule, memory, sizeof rule); // with all its bytes
            ZeroRedundancyOptimizer zero{comm, params, rule};
            std::memcpy(&zero.rule(), memory, sizeof rule);
            Checkpoint{zero, name}.write();
        });
        contents[fill] = contents_of(name);
    }
    CHECK(contents[0] == contents[1]);
}

TEST_CASE("two settings of one name cannot be written") {
    struct TwoOfOneName {
        int one = 1;
        static void agree_on(joinable::AgreementList& list) {
            list.add("rate", 1);
            list.add("rate", 2);
        }
    };
    CHECK_THROWS_WITH_AS(
        static_cast<void>(joinable::detail::stored_settings(TwoOfOneName{})),
        "the rule's agree_on() adds two settings named rate, but a checkpoint has one of each name",
        ContractViolation
    );
}

TEST_CASE("a checkpoint is not read while the elements of a value come in another order") {
    Folder const folder;
    over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
        Shape const extents{2, 2};
        std::vector<StridedParam> params;
        params.push_back({{{DType::f32, extents, {2, 1}}, {DType::f32, extents, {2, 1}}, {}}});
        params[0].need_grad();
        write(params[0].grad, {1.0, 2.0, 4.0, 8.0});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.learning_rate = 1.0, .momentum = 0.5}};
        Checkpoint save{zero, folder.file("of_" + std::to_string(comm.size()))};
        zero.step();
        save.write();
        OwnedTensor rows = std::exchange(params[0].value, {DType::f32, extents, {1, 2}});
        says(
            failure_of([&] { save.read(); }),
            "parameter 0 is f32 (2, 2) with strides (1, 2) now, but was f32 (2, 2) with strides (2, 1)"
        );
        params[0].value = std::move(rows);
        save.read();
        zero.step();
        CHECK(read(params[0].value.view()) == Numbers{-2.5, -5.0, -10.0, -20.0});
        comm.barrier();
    });
}

TEST_CASE("a rule whose number of states has changed is refused, and the old file stays") {
    Folder const folder;
    over_ranks({1, 2, 3}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Sgd{.momentum = 0.5}};
        std::string const name = folder.file("of_" + std::to_string(comm.size()));
        Checkpoint save{zero, name};
        save.write();
        std::string const before = contents_of(name);
        comm.barrier();
        zero.rule().momentum = 0;
        char const* const text =
            "the rule of a group keeps 0 numbers for each element now, but kept 1 when it was given";
        says(failure_of([&] { save.write(); }), text);
        says(failure_of([&] { zero.consolidate(); }), text);
        CHECK(contents_of(name) == before);
        comm.barrier();
        zero.rule().momentum = 0.5;
        save.write();
        CHECK(contents_of(name) == before);
        comm.barrier();
    });
}

TEST_CASE("outside a guard step() counts and writes, too") {
    Folder const folder;
    over_ranks({1, 3}, [&](RankCommunicator& comm) {
        auto params = make({});
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        std::string const name = folder.file("of_" + std::to_string(comm.size()));
        Checkpoint save{zero, name, {.every = 2}};
        save.step();
        CHECK(!std::filesystem::exists(name));
        comm.barrier();
        save.step();
        CHECK(read_checkpoint(name).metadata("rounds") == "2");
        CHECK(read_checkpoint(name).metadata("world size") == std::to_string(comm.size()));
        Checkpoint other{zero, name + ".other"};
        other.read(name);
        CHECK(other.rounds() == 2);
        other.write();
        CHECK(contents_of(name + ".other") == contents_of(name));
        comm.barrier();
    });
}

TEST_CASE("Python's safetensors reads our file, and ours reads what it wrote") {
    if (std::system("python3 -c 'import safetensors, numpy' 2>/dev/null") !=
        0) { // NOLINT(concurrency-mt-unsafe)
        std::puts("skipped: python3 has no safetensors and numpy");
        return;
    }
    Folder const folder;
    std::string const name = folder.file("ours");
    std::string const theirs = folder.file("theirs");
    Model const model{.dtype = DType::f16, .is_permuted = true, .frozen = 2};
    over_ranks({3}, [&](RankCommunicator& comm) {
        auto params = make(model);
        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
        Checkpoint save{zero, name};
        train(comm, params, zero, save);
    });
    write_contents(folder.file("turn.py"), R"(import sys
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
ours, theirs, text = sys.argv[1:]
tensors = load_file(ours)
with safe_open(ours, "numpy") as file:
    metadata = file.metadata()
with open(text, "w") as out:
    for name in sorted(tensors):
        tensor = tensors[name]
        numbers = " ".join("%.17g" % float(x) for x in tensor.ravel())
        out.write(f"{name} {tensor.dtype} {list(tensor.shape)} {numbers}\n")
save_file(dict(reversed(tensors.items())), theirs, metadata)
)");
    std::string const command =
        "python3 " + folder.file("turn.py") + " " + name + " " + theirs + " " + folder.file("text");
    REQUIRE(std::system(command.c_str()) == 0); // NOLINT(concurrency-mt-unsafe)
    std::string const text = contents_of(folder.file("text"));
    over_ranks({2}, [&](RankCommunicator& comm) {
        auto params = make(model, 1);
        ZeroRedundancyOptimizer zero{comm, params, AdamW{}};
        Checkpoint wrong{zero, theirs};
        says(failure_of([&] { wrong.read(); }), "its rule is Adam of");
        ZeroRedundancyOptimizer right{comm, params, Adam{}, {.partition = Partition::flat}};
        Checkpoint save{right, theirs};
        save.read();
        check_file(comm, name, params, right); // ours, which they read
        for (std::size_t i = 0; i < params.size(); ++i) {
            auto const& view = params[i].value.view();
            std::string line = std::to_string(i) + " float16 [";
            for (std::size_t d = 0; d < view.extents().size(); ++d) {
                line += (d == 0 ? "" : ", ") + std::to_string(view.extents()[d]);
            }
            line += "] ";
            for (double const number : read(view)) {
                char digits[32];
                std::snprintf(digits, sizeof digits, "%.17g ", number);
                line += digits;
            }
            line.back() = '\n';
            CHECK((view.numel() == 0 || ("\n" + text).find("\n" + line) != std::string::npos));
        }
    });
}

} // namespace
