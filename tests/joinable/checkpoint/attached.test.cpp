// SPDX-License-Identifier: BSL-1.0
// What a training attaches to its checkpoint, and values from files of other tools. The oracles: a reader and a writer of
// the layout that are written here, and the training that never stopped.
#include <joinable/checkpoint/checkpoint.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <over_ranks.hpp>
#include <support/checkpoint_file.hpp>
#include <support/failure_text.hpp>
#include <support/folder.hpp>
#include <support/gathered_param.hpp>
#include <support/numbers.hpp>
#include <support/strided_param.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::Checkpoint;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::Sgd;
using joinable::Shape;
using joinable::ShardedDataParallel;
using joinable::Sharding;
using joinable::ZeroRedundancyOptimizer;

std::vector<StridedParam> make_model(DType dtype = DType::f32) {
    std::vector<StridedParam> model;
    for (Shape const& extents : {Shape{3, 4}, Shape{5}, Shape{9}}) {
        // The first one is not row-major, as the file is.
        Shape const strides =
            extents.size() == 2 ? Shape{1, extents[0]} : row_major_strides(extents);
        model.push_back({{{dtype, extents, strides}, {dtype, extents, strides}, {}}});
        write(model.back().value.view(), Numbers(model.back().value.view().numel(), 1));
    }
    return model;
}

/// A step of a generator that each rank has to itself.
std::uint64_t next(std::uint64_t& state) {
    return state = state * 6364136223846793005U + 1442695040888963407U;
}
std::size_t inputs_of(int rank) {
    return 4 + static_cast<std::size_t>(rank % 3);
}

/// A training by noisy gradients, whose values are averaged over rounds.
struct Training {
    std::vector<StridedParam> model = make_model();
    std::vector<std::vector<double>> averages{Numbers(12), Numbers(5), Numbers(9)};
    std::vector<std::uint64_t> random;

    explicit Training(int rank) : random{static_cast<std::uint64_t>(rank) + 7} {}

    template <class Comm>
    void run(Comm& comm, std::string const& file, std::size_t every, bool reads) {
        DistributedDataParallel ddp{comm, model};
        joinable::Step step{comm, [&] {
                                for (std::size_t i = 0; i < model.size(); ++i) {
                                    Numbers values = read(model[i].value.view());
                                    Numbers const gradient = read(model[i].grad);
                                    for (std::size_t k = 0; k < values.size(); ++k) {
                                        values[k] -= 0.25 * gradient[k];
                                        averages[i][k] = 0.5 * averages[i][k] + 0.5 * values[k];
                                    }
                                    write(model[i].value.view(), values);
                                }
                            }};
        Checkpoint save{participants(ddp), file, {.every = every}};
        save.attach("average", averages);
        save.attach_per_rank("random", random);
        if (reads) {
            save.read();
        }
        std::size_t const first = save.rounds();
        Join guard{participants(ddp, step, save)};
        for (std::size_t round = first; round < inputs_of(comm.rank()); ++round) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    model[i].need_grad();
                    Numbers gradient(model[i].grad.numel());
                    for (double& number : gradient) {
                        number = static_cast<double>(next(random[0]) >> 56U) / 64;
                    }
                    write(model[i].grad, gradient);
                    ready(i);
                }
            });
            step.step();
            save.step();
        }
        guard.finish();
    }
};

TEST_CASE("averages and random states that are attached go on from a file as if nothing had stopped"
) {
    Folder const folder;
    std::string const name = folder.file("attached");
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        Training whole{comm.rank()};
        std::size_t const every = comm.size() > 2 ? 5 : 3; // some have run out of inputs
        whole.run(comm, name, every, false);
        Training resumed{comm.rank() + 100};
        resumed.model[0].value = std::move(make_model()[0].value);
        resumed.averages.back().assign(9, 3);
        resumed.run(comm, name, 99, true);
        CHECK(values_of(resumed.model) == values_of(whole.model));
        CHECK(resumed.averages == whole.averages);
        CHECK(resumed.random == whole.random);
    });
}

TEST_CASE("another number of ranks gets what is attached per rank in turn") {
    Folder const folder;
    std::string const name = folder.file("attached");
    over_ranks({3}, [&](RankCommunicator& comm) {
        auto model = make_model();
        ZeroRedundancyOptimizer zero{comm, model, Sgd{}};
        Checkpoint save{zero, name};
        std::vector<float> scale{2, 3};
        std::vector<std::int32_t> seed(4, comm.rank() + 10);
        std::vector<std::vector<double>> two{Numbers(2, comm.rank()), Numbers(3, -comm.rank())};
        save.attach("scale", scale);
        save.attach_per_rank("seed", seed);
        save.attach_per_rank("two", two);
        seed.assign(
            4, comm.rank() + 20
        ); // what a vector has when the file is written, wherever it lies
        save.write();
        auto const file = read_checkpoint(name);
        CHECK(file.tensor_count() == 3 + 1 + 3 + 6);
        CHECK(file.numbers("scale") == Numbers{2, 3});
        for (int rank = 0; rank < 3; ++rank) {
            auto const behind = "/" + std::to_string(rank);
            CHECK(file.numbers("seed" + behind) == Numbers(4, rank + 20));
            CHECK(file.numbers("two/0" + behind) == Numbers(2, rank));
            CHECK(file.numbers("two/1" + behind) == Numbers(3, -rank));
        }
    });
    over_ranks({1, 2, 4, 8}, [&](RankCommunicator& comm) {
        auto model = make_model();
        ZeroRedundancyOptimizer zero{comm, model, Sgd{}};
        Checkpoint save{zero, name};
        std::vector<float> scale(2);
        std::vector<std::int32_t> seed(4);
        std::vector<std::vector<double>> two{Numbers(2), Numbers(3)};
        save.attach("scale", scale);
        save.attach_per_rank("seed", seed);
        save.attach_per_rank("two", two);
        save.read();
        CHECK(scale == std::vector<float>{2, 3});
        CHECK(seed == std::vector<std::int32_t>(4, comm.rank() % 3 + 20));
        CHECK(two[1] == Numbers(3, -(comm.rank() % 3)));
    });
}

TEST_CASE("what cannot be attached is refused, and what ranks attach differently on all of them") {
    Folder const folder;
    std::string const name = folder.file("attached");
    over_ranks({2, 3}, [&](RankCommunicator& comm) {
        auto model = make_model();
        ZeroRedundancyOptimizer zero{comm, model, Sgd{}};
        Checkpoint save{zero, name};
        std::vector<float> scale(2, 5);
        save.attach("scale", scale);
        says(
            failure_of([&] { save.attach_per_rank("scale", scale); }),
            "contract: Checkpoint: scale is attached twice; give it another name"
        );
        says(failure_of([&] { save.attach("", scale); }), "was given an empty name");
        std::vector<std::vector<float>*> missing{nullptr};
        says(failure_of([&] { save.attach("missing", missing); }), "attached tensor 0");
        save.write();
        CHECK(read_checkpoint(name).numbers("scale") == Numbers(2, 5));

        Checkpoint without{zero, name};
        scale.assign(2, 6);
        says(
            failure_of([&] { without.read(); }),
            "it has tensor scale, f32 (2), which the model lacks"
        );
        Checkpoint more{zero, name};
        std::vector<float> other(3);
        more.attach("scale", other);
        says(
            failure_of([&] { more.read(); }),
            "expected is tensor scale, f32 (3), but it has f32 (2)"
        );
        Checkpoint same{zero, name};
        same.attach("1", other);
        says(failure_of([&] { same.write(); }), "two tensors would be called 1");

        Checkpoint uneven{zero, name};
        uneven.attach(comm.rank() == 0 ? "a" : "b", other);
        std::string const text = failure_of([&] { uneven.write(); });
        says(text, "mismatch: ");
        says(text, "checkpoints differ: attached tensors");
        says(failure_of([&] { uneven.read(); }), "contract: ");
        CHECK(read_checkpoint(name).numbers("scale") == Numbers(2, 5)); // as it was
        CHECK(scale == std::vector<float>(2, 6));
        scale.resize(4); // another tensor than the one that was attached
        says(failure_of([&] { save.write(); }), "attached tensor 0");
        comm.barrier();
    });
}

/// A file as other tools write it: no names of ours, no hashes.
class Foreign {
public:
    explicit Foreign(std::string format = "pt") : header_{{"__metadata__", {{"format", format}}}} {}

    /// Numbers by their row-major position.
    Foreign& add(std::string const& name, DType dtype, Shape const& extents, double first) {
        OwnedTensor tensor{dtype, extents, row_major_strides(extents)};
        Numbers numbers(tensor.view().numel());
        for (std::size_t k = 0; k < numbers.size(); ++k) {
            numbers[k] = first + static_cast<double>(k);
        }
        write(tensor.view(), numbers);
        std::size_t const begin = data_.size();
        data_.append(
            static_cast<char const*>(tensor.view().data()), numbers.size() * size_of(dtype)
        );
        auto& entry = header_[name];
        entry["dtype"] = stored_names.at(static_cast<std::size_t>(dtype));
        entry["shape"] = std::vector<std::size_t>(extents.begin(), extents.end());
        entry["data_offsets"] = {begin, data_.size()};
        return *this;
    }
    Foreign& add_model(DType dtype, double first) {
        return add("2", dtype, {9}, first + 20)
            .add("0", dtype, {3, 4}, first)
            .add("1", dtype, {5}, first + 12);
    }
    void write_to(std::string const& name) const {
        std::string const text = header_.dump();
        std::string length(8, '\0');
        std::uint64_t const bytes = text.size();
        std::memcpy(length.data(), &bytes, 8);
        write_contents(name, length + text + data_);
    }

private:
    nlohmann::json header_;
    std::string data_;
};

Numbers counted(std::size_t count, double first) {
    Numbers numbers(count);
    for (std::size_t k = 0; k < count; ++k) {
        numbers[k] = first + static_cast<double>(k);
    }
    return numbers;
}
/// Checks the values of a model that a Foreign has, from its first number on.
void check_values(std::vector<Numbers> const& values, double first) {
    CHECK(values[0] == counted(12, first));
    CHECK(values[1] == counted(5, first + 12));
    CHECK(values[2] == counted(9, first + 20));
}

TEST_CASE("values of another tool's file are read into a model, whatever steps it") {
    Folder const folder;
    std::string const name = folder.file("theirs");
    for (DType const dtype : {DType::f32, DType::bf16}) {
        Foreign{}.add_model(dtype, 2).write_to(name);
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            {
                auto model = make_model(dtype);
                DistributedDataParallel ddp{comm, model};
                Checkpoint{participants(ddp), name}.read_values(name);
                check_values(values_of(model), 2);
            }
            for (auto const partition :
                 {joinable::Partition::by_parameters, joinable::Partition::flat}) {
                auto model = make_model(dtype);
                ZeroRedundancyOptimizer zero{
                    comm, model, Sgd{.learning_rate = 1}, {.partition = partition}
                };
                Checkpoint save{zero, name};
                save.read_values(name);
                check_values(values_of(model), 2);
                CHECK(save.rounds() == 0);
                for (StridedParam& param : model) { // a step by masters that are those of the file
                    param.need_grad();
                    write(param.grad, Numbers(param.grad.numel(), -1));
                }
                zero.step();
                check_values(values_of(model), 3);
            }
            auto model = gathered(make_model(dtype));
            ShardedDataParallel sharded{
                comm, model, Sgd{.learning_rate = 1}, {.sharding = Sharding::parameters}
            };
            Checkpoint save{sharded, name};
            save.read_values(name);
            std::vector<Numbers> values;
            auto const whole = sharded.use_all();
            for (GatheredParam const& param : model) {
                values.push_back(read(param.value));
            }
            check_values(values, 2);
        });
    }
}

TEST_CASE("masters of values that are not read keep what 16 bits do not hold") {
    Folder const folder;
    over_ranks({1, 2, 4}, [&](RankCommunicator& comm) {
        if (comm.rank() == 0) {
            Foreign{}.add_model(DType::bf16, 2).write_to(folder.file("theirs"));
        }
        comm.barrier();
        auto model = make_model(DType::bf16);
        ZeroRedundancyOptimizer zero{comm, model, Sgd{.learning_rate = 1.0 / 4096}};
        for (StridedParam& param : model) {
            param.need_grad();
            write(param.grad, Numbers(param.grad.numel(), -1));
        }
        zero.step();
        CHECK(read(model[1].value.view()) == Numbers(5, 1)); // too little for a value to move
        Checkpoint save{zero, folder.file("ours")};
        save.read_values(folder.file("theirs"), {"0"});
        save.write();
        auto const file = read_checkpoint(folder.file("ours"));
        CHECK(file.numbers("0/master") == counted(12, 2));
        CHECK(file.numbers("1/master") == Numbers(5, 1 + 1.0 / 4096));
        comm.barrier();
    });
}

TEST_CASE("attached tensors are read by their names from another tool's file, and only if asked for"
) {
    Folder const folder;
    std::string const name = folder.file("theirs");
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        if (comm.rank() == 0) {
            Foreign{}
                .add_model(DType::f32, 4)
                .add("body.mean", DType::f32, {3}, 7)
                .add("body.batches", DType::i64, {}, 9)
                .write_to(name);
        }
        comm.barrier();
        auto model = make_model();
        auto const before = values_of(model);
        std::vector<float> mean(3, 1.0F);
        std::vector<std::int64_t> batches(1, 2);
        std::vector<float> own(3, 3.0F);
        ZeroRedundancyOptimizer zero{comm, model, Sgd{}};
        Checkpoint save{zero, folder.file("ours")};
        save.attach("body.mean", mean);
        save.attach("body.batches", joinable::AnyView{batches.data(), DType::i64, {}, {}});
        save.attach_per_rank("own", own);
        says(
            failure_of([&] { save.read_values(name, {"body.mean", "own/0"}); }),
            "asked for is own/0, but no parameter is called so, nor a tensor that attach() was given; "
            "what each rank has to itself comes with read()"
        );
        says(failure_of([&] { save.read_values(name); }), "which the model lacks");
        CHECK(mean == std::vector<float>(3, 1.0F));
        CHECK(values_of(model) == before);
        save.read_values(name, {"0", "body.mean"});
        CHECK(read(model[0].value.view()) == counted(12, 4));
        CHECK(read(model[1].value.view()) == before[1]);
        CHECK(mean == std::vector<float>{7, 8, 9});
        CHECK(batches[0] == 2);
        save.read_values(name, {"body.batches"});
        CHECK(batches[0] == 9);
        CHECK(own == std::vector<float>(3, 3.0F));
        comm.barrier();
    });
}

TEST_CASE(
    "values are read by a list of names, and what does not fit is refused before anything changes"
) {
    Folder const folder;
    std::string const name = folder.file("theirs");
    over_ranks({1, 3}, [&](RankCommunicator& comm) {
        auto model = make_model();
        auto const before = values_of(model);
        ZeroRedundancyOptimizer zero{comm, model, Sgd{}};
        Checkpoint save{zero, folder.file("ours")};
        auto const refused = [&](Foreign const& file, std::vector<std::string> const& names) {
            comm.barrier();
            if (comm.rank() == 0) {
                file.write_to(name);
            }
            comm.barrier();
            std::string const failure = failure_of([&] { save.read_values(name, names); });
            CHECK(values_of(model) == before);
            return failure;
        };
        Foreign const more = Foreign{}.add_model(DType::f32, 4).add("bias", DType::i64, {}, 0);
        says(refused(more, {}), "it has tensor bias, i64 (), which the model lacks");
        says(
            refused(more, {"0", "bias"}),
            "asked for is bias, but no parameter is called so, nor a tensor that attach() was given; "
            "what each rank has to itself comes with read()"
        );
        says(
            refused(Foreign{}.add("0", DType::f32, {3, 4}, 1), {"0", "1"}),
            "expected is tensor 1, f32 (5), but it has none of that name"
        );
        says(
            refused(Foreign{}.add_model(DType::f16, 4), {}),
            "expected is tensor 0, f32 (3, 4), but it has f16 (3, 4)"
        );
        if (comm.size() > 1) {
            std::vector<std::string> const names{std::to_string(comm.rank())};
            says(refused(more, names), "names of values to read");
        }
        {
            DistributedDataParallel ddp{comm, model};
            Join guard{participants(ddp, zero)};
            says(
                failure_of([&] { save.read_values(name); }),
                "read_values() was called in a guard; call it before or after, on every rank"
            );
        }
        comm.barrier();
        if (comm.rank() == 0) {
            more.write_to(name);
        }
        comm.barrier();
        save.read_values(name, {"2", "0"});
        CHECK(read(model[0].value.view()) == counted(12, 4));
        CHECK(read(model[1].value.view()) == before[1]);
        CHECK(read(model[2].value.view()) == counted(9, 24));
    });
}

} // namespace
