// SPDX-License-Identifier: BSL-1.0
// Complex parameters in files: reals with a last extent of 2, and a mark in the metadata.
#include <joinable/checkpoint/checkpoint.hpp>

#include <array>
#include <complex>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/checkpoint_file.hpp>
#include <support/folder.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>

namespace {

using namespace joinable_tests;
using joinable::Checkpoint;

struct ComplexWeight {
    std::vector<std::complex<float>> value{{1, 2}, {3, 4}, {5, 6}};
    std::vector<std::complex<float>> grad{{0, 0}, {0, 0}, {0, 0}};
};

/// A matrix of reals of the extents that the file has.
struct Pairs {
    std::vector<float> data = std::vector<float>(6);
};

} // namespace

template <>
struct joinable::tensor_traits<Pairs> {
    using value_type = float;
    static float* data(Pairs& t) { return t.data.data(); }
    static float const* data(Pairs const& t) { return t.data.data(); }
    static std::array<std::size_t, 2> extents(Pairs const&) { return {3, 2}; }
};

namespace {

struct RealWeight {
    Pairs value, grad;
};

} // namespace

TEST_CASE("complex values are stored as reals with a last extent of 2, and marked") {
    Folder const folder;
    std::string const name = folder.file("complex");
    auto const check = [&](auto& comm) {
        std::vector<ComplexWeight> model(2);
        model[1].value[2] = {-7, 8};
        joinable::ZeroRedundancyOptimizer zero{comm, model, joinable::Sgd{.learning_rate = 0.5}};
        Checkpoint{zero, name}.write();
        if (comm.rank() == 0) {
            ReadFile const file = read_checkpoint(name);
            CHECK(file.shape("1") == joinable::Shape{3, 2});
            CHECK(file.numbers("1") == Numbers{1, 2, 3, 4, -7, 8});
            CHECK(file.metadata("parts of 0") == "real, imaginary");
            CHECK(file.metadata("parts of 1") == "real, imaginary");
        }
        std::vector<ComplexWeight> other(2);
        other[1].value.assign(3, {});
        joinable::ZeroRedundancyOptimizer again{comm, other, joinable::Sgd{.learning_rate = 0.5}};
        Checkpoint{again, name}.read();
        CHECK(other[1].value == model[1].value);

        std::vector<RealWeight> reals(2);
        joinable::ZeroRedundancyOptimizer real{comm, reals, joinable::Sgd{.learning_rate = 0.5}};
        CHECK_THROWS_AS(Checkpoint(real, name).read(), joinable::ContractViolation);
    };
    run_ranks({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}

TEST_CASE("complex, boolean and short buffers of a model are stored and read") {
    Folder const folder;
    std::string const name = folder.file("buffers");
    auto const check = [&](auto& comm) {
        std::vector<ComplexWeight> model(1);
        std::vector<std::complex<double>> phases{{1, -1}, {0, 2}};
        std::array<bool, 3> mask{true, false, true};
        std::vector<short> counts{-3, 9};
        std::vector<unsigned short> ports{65'535, 1};
        auto const buffers = joinable::buffers(phases, mask, counts, ports);
        joinable::DistributedDataParallel ddp{comm, model, buffers};
        joinable::ZeroRedundancyOptimizer zero{comm, model, joinable::Sgd{.learning_rate = 0.5}};
        Checkpoint{joinable::participants(ddp, zero), name}.write();
        phases.assign(2, {});
        mask.fill(false);
        counts.assign(2, 0);
        ports.assign(2, 0);
        Checkpoint{joinable::participants(ddp, zero), name}.read();
        CHECK(phases == std::vector<std::complex<double>>{{1, -1}, {0, 2}});
        CHECK((mask == std::array{true, false, true}));
        CHECK(counts == std::vector<short>{-3, 9});
        CHECK(ports == std::vector<unsigned short>{65'535, 1});
    };
    run_ranks({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}

TEST_CASE("complex momentum goes on from a file as if nothing had stopped, with uneven inputs") {
    using Number = std::complex<double>;
    Folder const folder;
    std::string const name = folder.file("momentum");
    auto const check = [&](auto& comm) {
        joinable::Sgd const rule{.learning_rate = 0.5, .momentum = 0.75};
        auto const gradient_of = [](int rank, int input) {
            return Number{1.0 + rank, 0.5 * input - 2.0};
        };
        auto const train = [&](std::vector<ComplexWeight>& model, bool goes_on) {
            joinable::DistributedDataParallel ddp{comm, model};
            joinable::ZeroRedundancyOptimizer zero{comm, model, rule};
            Checkpoint save{joinable::participants(ddp, zero), name};
            if (goes_on) {
                save.read();
            }
            joinable::Join guard{joinable::participants(ddp, zero)};
            for (int input = 0; input <= comm.rank(); ++input) { // rank r has r + 1
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    for (std::size_t p = model.size(); p-- > 0;) {
                        model[p].grad.assign(
                            3, std::complex<float>{gradient_of(comm.rank(), input)}
                        );
                        ready(p);
                    }
                });
                zero.step();
            }
            guard.finish();
            save.write();
        };
        std::vector<ComplexWeight> model(3);
        train(model, false);
        std::vector<ComplexWeight> other(3);
        for (ComplexWeight& weight : other) {
            weight.value.assign(3, {});
        }
        train(other, true);
        Number expected{1, 2}; // on one process
        Number velocity{};
        for (int epoch = 0; epoch < 2; ++epoch) {
            for (int input = 0; input < comm.size(); ++input) {
                Number sum{};
                for (int rank = input; rank < comm.size(); ++rank) {
                    sum += gradient_of(rank, input);
                }
                velocity = 0.75 * velocity + sum / static_cast<double>(comm.size());
                expected -= 0.5 * velocity;
            }
        }
        for (ComplexWeight const& weight : other) {
            CHECK(std::abs(Number{weight.value[0]} - expected) <= 1e-5 * std::abs(expected));
        }
    };
    run_participants({1, 2, 3, 4, 8}, check);
    run_process_ranks({1, 2, 3, 4, 8}, check);
}
