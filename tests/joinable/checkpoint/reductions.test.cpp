// SPDX-License-Identifier: BSL-1.0
// Checkpoints of models whose gradients travel compressed. The oracles: the training that never stopped, and the sum of
// the gradients in double.
#include <joinable/checkpoint.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/checkpoint_file.hpp>
#include <support/folder.hpp>
#include <support/numbers.hpp>
#include <support/ranks.hpp>
#include <support/strided_param.hpp>

#include <joinable/compression.hpp>
#include <joinable/join.hpp>
#include <joinable/refresh.hpp>

namespace {

using namespace joinable_tests;
using joinable::Checkpoint;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Int8Compression;
using joinable::Join;
using joinable::participants;
using joinable::PowerSgd;
using joinable::Shape;
using joinable::ThreadCommunicator;
using joinable::TopK;

std::vector<StridedParam> make_model(bool is_permuted = false, double value = 0.5) {
    std::vector<StridedParam> model;
    for (auto const& [extents, strides] : {
             std::pair<Shape, Shape>{{24, 30}, {30, 1}},
             {{30, 12}, is_permuted ? Shape{1, 30} : Shape{12, 1}},
             {{7}, {1}},
             {{300}, {1}},
         }) {
        model.push_back(StridedParam{
            {OwnedTensor{DType::f32, extents, strides},
             OwnedTensor{DType::f32, extents, strides},
             {}}
        });
        write(model.back().value.view(), Numbers(model.back().value.view().numel(), value));
    }
    return model;
}
Numbers gradient_of(std::size_t parameter, std::size_t count, int rank, std::uint64_t round) {
    Numbers numbers(count);
    for (std::size_t i = 0; i < count; ++i) {
        double const x = static_cast<double>(i % 30) + 1.5 * static_cast<double>(parameter);
        double const y = static_cast<double>(i / 30) + static_cast<double>(round);
        numbers[i] =
            std::sin(0.3 * x) * std::cos(0.2 * y) * (rank + 1) + 0.2 * std::cos(x * y + rank);
    }
    return numbers;
}
template <class Ddp, class Gradient>
void run_round(Ddp& ddp, std::vector<StridedParam>& model, Gradient const& gradient) {
    ddp.forward([] {});
    ddp.backward([&](auto ready) {
        for (std::size_t const i :
             {2U, 0U, 3U, 1U}) { // not as they were given: buckets are cut anew
            model[i].need_grad();
            write(model[i].grad, gradient(i, model[i].grad.numel()));
            ready(i);
        }
    });
}
joinable::DataParallelOptions const small_buckets{.bucket_cap_bytes = 2000};

/// What a training without a sharded optimizer has besides its model.
struct Training {
    std::vector<StridedParam> model = make_model();
    std::vector<std::vector<double>> means{{0.25}};
    std::vector<std::vector<double>> momentum{Numbers(720), Numbers(360), Numbers(7), Numbers(300)};
};
std::uint64_t inputs_of(int rank) {
    return 9 - static_cast<std::uint64_t>(rank * 3 % 5);
}

/// Trains the inputs from save.rounds() on. A buffer that each rank changes counts in its gradients.
template <class Ddp, class Save>
void train(ThreadCommunicator& comm, Training& mine, Ddp& ddp, Save& save) {
    joinable::Step step{comm, [&] {
                            for (std::size_t i = 0; i < mine.model.size(); ++i) {
                                Numbers values = read(mine.model[i].value.view());
                                Numbers const gradient = read(mine.model[i].grad);
                                for (std::size_t k = 0; k < values.size(); ++k) {
                                    double& speed = mine.momentum[i][k];
                                    speed = 0.9 * speed + gradient[k];
                                    values[k] -= 0.1 * speed;
                                }
                                write(mine.model[i].value.view(), values);
                            }
                        }};
    std::uint64_t const first = save.rounds();
    Join guard{participants(ddp, step, save)};
    for (std::uint64_t round = first; round < inputs_of(comm.rank()); ++round) {
        run_round(ddp, mine.model, [&](std::size_t i, std::size_t count) {
            Numbers numbers = gradient_of(i, count, comm.rank(), round);
            for (double& number : numbers) {
                number += 0.1 * mine.means[0][0];
            }
            return numbers;
        });
        mine.means[0][0] = mine.means[0][0] * 0.5 + comm.rank() + 1;
        step.step();
        save.step();
    }
    guard.finish();
}

/// A reduction is not copied, so each model asks for one.
template <class Make>
void check_resumed(Folder const& folder, Make const& make_reduction, std::size_t every) {
    std::string const name = folder.file("resumed");
    run_participants({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        auto const make_ddp = [&](Training& mine) {
            return DistributedDataParallel{
                comm, mine.model, joinable::buffers(mine.means), small_buckets, make_reduction()
            };
        };
        Training whole;
        {
            auto ddp = make_ddp(whole);
            ddp.attach_state(whole.momentum);
            Checkpoint save{participants(ddp), name, {.every = every}}; // once
            train(comm, whole, ddp, save);
            CHECK(save.rounds() == 9);
        }
        Training resumed;
        resumed.model = make_model(false, 7);
        auto ddp = make_ddp(resumed);
        ddp.attach_state(resumed.momentum);
        Checkpoint save{participants(ddp), name, {.every = 99}};
        save.read();
        CHECK(save.rounds() == every);
        CHECK(values_of(resumed.model) != values_of(whole.model));
        train(comm, resumed, ddp, save);
        CHECK(save.rounds() == 9);
        CHECK(values_of(resumed.model) == values_of(whole.model));
        CHECK(resumed.momentum == whole.momentum);
        CHECK(resumed.means == whole.means);
    });
}

TEST_CASE(
    "a training whose reduction keeps something goes on from a file as if it had never stopped"
) {
    Folder const folder;
    check_resumed(folder, [] { return joinable::AllReduce{}; }, 5);
    check_resumed(folder, [] { return TopK{.density = 0.05}; }, 5);
    check_resumed(folder, [] { return Int8Compression{}; }, 6);
    check_resumed(folder, [] { return PowerSgd{.rank = 2, .start_iteration = 3}; }, 5);
    check_resumed(
        folder, [] { return PowerSgd{.rank = 1, .start_iteration = 7}; }, 6
    ); // counts the rounds before
    check_resumed(folder, [] { return PowerSgd{.start_iteration = 0, .warm_start = false}; }, 5);
    check_resumed(
        folder, [] { return PowerSgd{.start_iteration = 0, .error_feedback = false}; }, 5
    );
    check_resumed(
        folder, [] { return joinable::CastTo<DType::f64, PowerSgd>{{.start_iteration = 1}}; }, 5
    );
}

TEST_CASE("a sharded optimizer and the residuals of its model go on from one file") {
    Folder const folder;
    std::string const name = folder.file("both");
    run_participants({1, 2, 3, 4}, [&](ThreadCommunicator& comm) {
        auto const run = [&](std::vector<StridedParam>& model, std::size_t every, bool reads) {
            DistributedDataParallel ddp{comm, model, small_buckets, TopK{.density = 0.05}};
            joinable::ZeroRedundancyOptimizer zero{
                comm, model, joinable::Adam{.learning_rate = 0.1}
            };
            Checkpoint save{participants(ddp, zero), name, {.every = every}};
            if (reads) {
                save.read();
            }
            std::uint64_t const first = save.rounds();
            Join guard{participants(ddp, zero, save)};
            for (std::uint64_t round = first; round < inputs_of(comm.rank()); ++round) {
                run_round(ddp, model, [&](std::size_t i, std::size_t count) {
                    return gradient_of(i, count, comm.rank(), round);
                });
                zero.step();
                save.step();
            }
            guard.finish();
        };
        auto whole = make_model();
        run(whole, 5, false);
        auto resumed = make_model(false, 7);
        run(resumed, 99, true);
        CHECK(values_of(resumed) == values_of(whole));
    });
}

/// The sum of a parameter's residuals over all ranks.
template <class Ddp>
Numbers left_of(ThreadCommunicator& comm, Ddp& ddp, std::size_t parameter, std::size_t count) {
    Numbers left(count);
    for (joinable::ReductionTensor const& tensor : ddp.saved().reduction.tensors) {
        if (tensor.name == "residual" && tensor.parameter == parameter) {
            left = read({tensor.data, tensor.dtype, tensor.extents, tensor.strides});
        }
    }
    comm.all_reduce({left.data(), left.size(), DType::f64}, joinable::ReduceOp::sum).wait();
    return left;
}

/// Two trainings of four rounds. What ranks received in both and what is left is the sum of all gradients, divided by
/// the ranks.
template <class Make>
void check_conserved(
    Folder const& folder, int from, int to, Make const& make_reduction, bool is_permuted
) {
    CAPTURE(make_reduction().name);
    CAPTURE(from);
    CAPTURE(to);
    std::string const name = folder.file("moved");
    constexpr std::uint64_t rounds = 4;
    std::vector<Numbers> delivered;
    std::vector<Numbers> expected;
    for (StridedParam const& param : make_model()) {
        delivered.emplace_back(param.value.view().numel());
        expected.emplace_back(param.value.view().numel());
    }
    auto const run = [&](ThreadCommunicator& comm, auto& ddp, auto& model, std::uint64_t first) {
        for (std::uint64_t round = first; round < first + rounds; ++round) {
            run_round(ddp, model, [&](std::size_t i, std::size_t count) {
                return gradient_of(i, count, comm.rank(), round);
            });
            for (std::size_t i = 0; comm.rank() == 0 && i < model.size(); ++i) {
                Numbers const average = read(model[i].grad);
                for (std::size_t k = 0; k < average.size(); ++k) {
                    delivered[i][k] += average[k];
                }
                for (int rank = 0; rank < comm.size(); ++rank) {
                    Numbers const given = gradient_of(i, average.size(), rank, round);
                    for (std::size_t k = 0; k < given.size(); ++k) {
                        expected[i][k] += given[k] / comm.size();
                    }
                }
            }
        }
    };
    auto const check = [&](ThreadCommunicator& comm, auto& ddp) {
        bool is_any_left = false;
        for (std::size_t i = 0; i < expected.size(); ++i) {
            Numbers const left = left_of(comm, ddp, i, expected[i].size());
            double most = 0;
            for (std::size_t k = 0; k < left.size() && comm.rank() == 0; ++k) {
                is_any_left = is_any_left || std::abs(left[k]) > 1e-3;
                most = std::max(most, std::abs(delivered[i][k] + left[k] - expected[i][k]));
            }
            CAPTURE(i);
            CHECK(most < 1e-4);
        }
        CHECK((is_any_left || comm.rank() != 0));
    };
    run_ranks({from}, [&](ThreadCommunicator& comm) {
        auto model = make_model();
        DistributedDataParallel ddp{comm, model, small_buckets, make_reduction()};
        run(comm, ddp, model, 0);
        Checkpoint{participants(ddp), name}.write();
        check(comm, ddp);
    });
    run_ranks({to}, [&](ThreadCommunicator& comm) {
        auto model = make_model(is_permuted);
        DistributedDataParallel ddp{comm, model, small_buckets, make_reduction()};
        run_round(
            ddp,
            model,
            [&](std::size_t i, std::size_t count) { // the file replaces what this leaves
                return gradient_of(i, count, 5, 77);
            }
        );
        Checkpoint{participants(ddp), name}.read();
        check(comm, ddp);
        run(comm, ddp, model, rounds);
        check(comm, ddp);
    });
}

TEST_CASE(
    "what ranks of a file have left out, other ranks send: averages and residuals are all of the gradients"
) {
    Folder const folder;
    for (auto const& [from, to] : {std::pair{4, 2}, {2, 4}, {1, 3}, {3, 8}, {3, 2}, {8, 1}}) {
        check_conserved(folder, from, to, [] { return TopK{.density = 0.05}; }, true);
        check_conserved(folder, from, to, [] { return Int8Compression{}; }, true);
        check_conserved(folder, from, to, [] { return PowerSgd{.start_iteration = 2}; }, false);
    }
}

TEST_CASE("a file has a residual of each rank, and once what is the same on all") {
    Folder const folder;
    std::string const name = folder.file("listed");
    std::vector<Numbers> left(3); // of parameter 1, on each rank
    run_ranks({3}, [&](ThreadCommunicator& comm) {
        auto model = make_model();
        std::vector<std::vector<double>> means{{1.0 + comm.rank(), 2}};
        DistributedDataParallel ddp{
            comm,
            model,
            joinable::buffers(means),
            {.broadcast_buffers = false},
            PowerSgd{.start_iteration = 1}
        };
        for (std::uint64_t round = 0; round < 3; ++round) {
            run_round(ddp, model, [&](std::size_t i, std::size_t count) {
                return gradient_of(i, count, comm.rank(), round);
            });
        }
        means[0] = {10.0 + comm.rank(), 2};
        Checkpoint{participants(ddp), name}.write();
        for (joinable::ReductionTensor const& tensor : ddp.saved().reduction.tensors) {
            if (tensor.name == "residual" && tensor.parameter == 1) {
                left[static_cast<std::size_t>(comm.rank())] =
                    read({tensor.data, tensor.dtype, tensor.extents, tensor.strides});
            }
        }
    });
    ReadFile const file = read_checkpoint(name);
    for (std::size_t rank = 0; rank < 3; ++rank) {
        CHECK(file.numbers("1/residual/" + std::to_string(rank)) == left[rank]);
        CHECK(
            file.numbers("buffers/0/" + std::to_string(rank)) ==
            Numbers{10.0 + static_cast<double>(rank), 2}
        );
    }
    CHECK(file.shape("0/warm_start") == Shape{1, 30});
    // four values, two residuals and buffers of three ranks, two matrices
    CHECK(file.tensor_count() == 4 + 2 * 3 + 3 + 2);
    CHECK(file.metadata("reduction: reduction") == "PowerSgd");
    CHECK(file.metadata("reduction: PowerSgd::rounds") == "3");
    for (int const ranks : {1, 2, 4, 8}) {
        run_ranks({ranks}, [&](ThreadCommunicator& comm) {
            auto model = make_model();
            std::vector<std::vector<double>> means{{0, 0}};
            DistributedDataParallel ddp{
                comm,
                model,
                joinable::buffers(means),
                {.broadcast_buffers = false},
                PowerSgd{.start_iteration = 1}
            };
            Checkpoint{participants(ddp), name}.read();
            CHECK(means[0] == Numbers{10.0 + comm.rank() % 3, 2}); // of rank r mod 3
            CHECK(ddp.reduction().rounds == 3);
        });
    }
}

TEST_CASE(
    "a file of another reduction, of other settings or of none is refused by one text, and nothing changes"
) {
    Folder const folder;
    std::string const name = folder.file("refused");
    std::string const without = folder.file("without");
    run_ranks({2}, [&](ThreadCommunicator& comm) {
        auto model = make_model();
        DistributedDataParallel ddp{comm, model, TopK{.density = 0.05}};
        Checkpoint{participants(ddp), name}.write();
        DistributedDataParallel whole{comm, model};
        Checkpoint{participants(whole), without}.write();
    });
    run_participants({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        auto const check = [&](std::string const& file, auto reduction, std::string_view expected) {
            auto model = make_model(false, 3);
            auto const before = values_of(model);
            DistributedDataParallel ddp{comm, model, std::move(reduction)};
            Checkpoint save{participants(ddp), file};
            std::string text;
            try {
                save.read();
            } catch (ContractViolation const& error) {
                text = error.what();
            }
            CHECK(text == "checkpoint " + file + ": " + std::string{expected});
            CHECK(values_of(model) == before);
            comm.barrier(); // it can be used
        };
        check(
            name,
            PowerSgd{},
            "its reduction is TopK, but expected is PowerSgd; only one that is as when the file was written has a use "
            "for what it left out"
        );
        check(
            name,
            joinable::Bf16Compression<>{},
            "its reduction is TopK, but expected is none; only one that is as when the file was written has a use for "
            "what it left out"
        );
        check(
            without,
            TopK{},
            "its reduction is none, but expected is TopK; only one that is as when the file was written has a use for "
            "what it left out"
        );
        check(
            name,
            TopK{.density = 0.1},
            "the setting density of its reduction is 0.05, but expected is 0.1"
        );
        auto model = make_model(false, 3);
        DistributedDataParallel ddp{comm, model, joinable::Bf16Compression<>{}};
        Checkpoint{participants(ddp), without}.read(); // neither keeps anything
        CHECK(read(model[2].value.view()) == Numbers(7, 0.5));
    });
}

TEST_CASE("a model whose optimizer lacks one of its parameters is refused on all ranks") {
    Folder const folder;
    run_participants({1, 2, 3}, [&](ThreadCommunicator& comm) {
        auto model = make_model();
        DistributedDataParallel ddp{comm, model, TopK{}};
        std::vector<StridedParam> head = make_model();
        joinable::ZeroRedundancyOptimizer zero{comm, head, joinable::Sgd{.learning_rate = 1}};
        Checkpoint save{participants(ddp, zero), folder.file("lacking")};
        CHECK_THROWS_WITH_AS(
            save.write(),
            "Checkpoint: the optimizer has no parameter 0 of the model, so the file would lack it; give the optimizer "
            "all parameters",
            ContractViolation
        );
        CHECK(folder.names().empty());
        comm.barrier();
        auto alone = comm.split(comm.rank(), 0);
        joinable::ZeroRedundancyOptimizer own{alone, head, joinable::Sgd{.learning_rate = 1}};
        CHECK_THROWS_WITH_AS(
            (Checkpoint{participants(ddp, own), folder.file("two")}),
            "Checkpoint: the model and the optimizer have two communicators; make both with one",
            ContractViolation
        );
    });
}

void fill(std::vector<StridedParam>& model, double number) {
    for (StridedParam const& param : model) {
        write(param.value.view(), Numbers(param.value.view().numel(), number));
    }
}
/// `refresh(list)` lists others. What was listed ends once no list has it.
template <class Save, class Refresh>
void check_refreshed(
    std::string const& name,
    ThreadCommunicator& comm,
    std::vector<StridedParam>& layers,
    Save& save,
    Refresh const& refresh
) {
    auto others = make_model(false, 2.0);
    save.write();
    refresh(std::vector{&others[0], &others[2], &layers[1]});
    save.write();
    ReadFile const file = read_checkpoint(name);
    CHECK(file.tensor_count() == 3);
    CHECK(file.numbers("1") == Numbers(7, 2.0));
    CHECK(file.numbers("2") == Numbers(360, 0.5));
    comm.barrier(); // all have read it
    refresh(others);
    layers.clear();
    fill(others, 3.0);
    save.write();
    fill(others, 0.0);
    save.read_values(name);
    CHECK(read(others[3].value.view()) == Numbers(300, 3.0));
    fill(others, 4.0);
    save.write();
    auto more = make_model(false, 1.0);
    refresh(more);
    others.clear();
    save.read();
    for (StridedParam const& param : more) {
        CHECK(read(param.value.view()) == Numbers(param.value.view().numel(), 4.0));
    }
}

TEST_CASE("a checkpoint of a model that was refreshed has the parameters that are listed now") {
    Folder const folder;
    std::string const name = folder.file("refreshed");
    run_participants({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        for (bool const has_optimizer : {false, true}) {
            auto layers = make_model();
            DistributedDataParallel ddp{comm, layers};
            if (has_optimizer) {
                joinable::ZeroRedundancyOptimizer zero{
                    comm, layers, joinable::Sgd{.learning_rate = 1}
                };
                Checkpoint save{participants(ddp, zero), name};
                check_refreshed(name, comm, layers, save, [&](auto&& list) {
                    ddp.refresh(list);
                    zero.refresh(list);
                });
            } else {
                Checkpoint save{participants(ddp), name};
                check_refreshed(name, comm, layers, save, [&](auto&& list) { ddp.refresh(list); });
            }
        }
    });
}

TEST_CASE("a file written in an uneven guard has the values of a rank that trains on") {
    Folder const folder;
    std::string const name = folder.file("uneven");
    run_participants({2, 3, 4}, [&](ThreadCommunicator& comm) {
        auto model = make_model();
        DistributedDataParallel ddp{comm, model};
        Checkpoint save{participants(ddp), name, {.every = 3}};
        Join guard{participants(ddp, save)};
        std::uint64_t const inputs = comm.rank() == 0 ? 1 : 3; // rank 0 steps once
        for (std::uint64_t round = 0; round < inputs; ++round) {
            run_round(ddp, model, [](std::size_t, std::size_t count) { return Numbers(count, 1); });
            write(model[2].value.view(), Numbers(7, static_cast<double>(round)));
            save.step();
        }
        guard.finish();
        CHECK(read_checkpoint(name).numbers("2") == Numbers(7, 2));
    });
}

} // namespace
