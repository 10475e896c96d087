// SPDX-License-Identifier: BSL-1.0
// What reductions keep of parameters moves with them when a model is listed again.
#include <joinable/compression.hpp>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/refresh.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;

constexpr std::size_t rows = 8;
constexpr std::size_t numel_of_row = 6;

/// A matrix, because thin ones travel whole.
struct Matrix : Param<double> {
    explicit Matrix(std::string called) : Param<double>{rows * numel_of_row} {
        name = std::move(called);
        grad = {storage.data(), joinable::DType::f64, {rows, numel_of_row}, {numel_of_row, 1}};
    }
};
double gradient_of(int rank, std::size_t step, std::string const& name, std::size_t element) {
    return static_cast<double>((7 * static_cast<std::size_t>(rank) + 3 * step + 5 * element) % 11) -
           5 + static_cast<double>(name.front() - 'a') / 4;
}

struct Training {
    int rank;
    int world;
    std::deque<Matrix> matrices = {};
    std::vector<Matrix*> listed = {};
    std::size_t steps = 0;
    /// Sums over rounds of the averages of each matrix: as they were delivered, and of what ranks gave.
    std::vector<std::vector<double>> delivered = {};
    std::vector<std::vector<double>> given = {};

    void add(std::string name, bool in_front) {
        Matrix& added = matrices.emplace_back(std::move(name));
        listed.insert(in_front ? listed.begin() : listed.end(), &added);
        delivered.emplace_back(rows * numel_of_row);
        given.emplace_back(rows * numel_of_row);
    }
    template <class Ddp>
    void round(Ddp& ddp) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = listed.size(); i-- > 0;) {
                if (listed[i]->requires_grad) {
                    for (std::size_t e = 0; e < rows * numel_of_row; ++e) {
                        listed[i]->storage[e] = gradient_of(rank, steps, listed[i]->name, e);
                    }
                    ready(i);
                }
            }
        });
    }
    /// Rank 0 runs out of inputs first.
    template <class Ddp>
    void epoch(Ddp& ddp) {
        std::size_t const begin = steps;
        joinable::Step count{
            ddp.join_communicator(),
            [&](joinable::Round const&) {
                for (std::size_t m = 0; m < matrices.size(); ++m) {
                    for (std::size_t e = 0; matrices[m].requires_grad && e < rows * numel_of_row;
                         ++e) {
                        delivered[m][e] += matrices[m].storage[e];
                        for (int r = 0; r < world; ++r) {
                            bool const is_active = r != 0 || world == 1 || steps - begin < 2;
                            given[m][e] +=
                                is_active ? gradient_of(r, steps, matrices[m].name, e) / world : 0;
                        }
                    }
                }
                ++steps;
            }
        };
        Join guard{participants(ddp, count)};
        for (std::size_t input = 0; input < (rank == 0 ? 2U : 3U); ++input) {
            round(ddp);
            count.step();
        }
        guard.finish();
    }
    /// What ranks keep of a matrix, over all of them.
    template <class Ddp>
    std::vector<double> residual(Ddp& ddp, Matrix const& matrix) {
        std::vector<double> sum(rows * numel_of_row);
        joinable::detail::SavedModel const saved = ddp.saved();
        for (joinable::ReductionTensor const& tensor : saved.reduction.tensors) {
            if (tensor.name == "residual" && listed[tensor.parameter] == &matrix) {
                std::memcpy(sum.data(), tensor.data, sum.size() * sizeof(double));
            }
        }
        joinable::all_reduce(ddp.join_communicator(), sum).wait();
        return sum;
    }
    template <class Ddp>
    void check(Ddp& ddp, std::size_t m) {
        CAPTURE(matrices[m].name);
        std::vector<double> const kept = residual(ddp, matrices[m]);
        for (std::size_t e = 0; e < kept.size(); ++e) {
            CHECK(delivered[m][e] + kept[e] == doctest::Approx(given[m][e]).epsilon(1e-9));
        }
    }
};
} // namespace

template <>
struct joinable::parameter_traits<Matrix> : joinable::parameter_traits<Param<double>> {
    static auto value(Matrix& p) {
        return std::optional{
            AnyView{p.value.data(), DType::f64, {rows, numel_of_row}, {numel_of_row, 1}}
        };
    }
};

namespace {

template <class Reduction, class Comm>
void train(Comm& comm, Reduction reduction) {
    Training training{comm.rank(), comm.size()};
    training.add("body", false);
    training.add("crown", false);
    DistributedDataParallel ddp{comm, training.listed, std::move(reduction)};
    training.epoch(ddp);
    training.check(ddp, 0);
    training.add("alpha", true); // all indices change, and other sizes follow
    ddp.refresh(training.listed);
    training.check(ddp, 0);
    training.check(ddp, 1);
    training.epoch(ddp);
    for (std::size_t m = 0; m < 3; ++m) {
        training.check(ddp, m);
    }
    training.matrices[1].requires_grad = false; // what ranks keep of it is dropped
    ddp.refresh();
    training.epoch(ddp);
    training.check(ddp, 0);
    training.check(ddp, 2);
    training.matrices[1].requires_grad = true;
    ddp.refresh();
    training.delivered[1].assign(rows * numel_of_row, 0);
    training.given[1].assign(rows * numel_of_row, 0);
    training.check(ddp, 1);
    training.epoch(ddp);
    training.check(ddp, 1);

    // A list that is refused after the reduction was prepared for it.
    std::vector<Matrix*> list = training.listed;
    std::vector<double> const before = training.residual(ddp, training.matrices[0]);
    if (comm.rank() == comm.size() - 1) {
        std::reverse(list.begin(), list.end());
    }
    if (comm.size() > 1) {
        CHECK_THROWS_AS(ddp.refresh(list), joinable::Mismatch);
    }
    CHECK(training.residual(ddp, training.matrices[0]) == before);
    training.epoch(ddp);
    training.check(ddp, 0);
}

TEST_CASE("the residuals of a reduction move with their parameters") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        train(comm, joinable::TopK{.density = 0.2});
        train(comm, joinable::PowerSgd{.start_iteration = 0, .min_compression_rate = 0.5});
        train(comm, joinable::Int8Compression{});
    });
}

TEST_CASE("a process rank that is killed ends the refresh of the others") {
    for (int const size : groups_of_participants({2, 3, 4, 8})) {
        CAPTURE(size);
        Shared<std::atomic<int>> told;
        CHECK_THROWS_AS(
            run_process_ranks(
                {size},
                [&](joinable::ProcessCommunicator& comm) {
                    Training training{comm.rank(), comm.size()};
                    training.add("body", false);
                    DistributedDataParallel ddp{comm, training.listed};
                    comm.barrier();
                    if (comm.rank() == comm.size() - 1) {
                        std::raise(SIGKILL);
                    }
                    auto const error = thrown_by<joinable::PeerFailed>([&] { ddp.refresh(); });
                    *told += error.rank() == comm.size() - 1 ? 1 : 0;
                    throw joinable::ContractViolation{"the end"};
                }
            ),
            joinable::PeerFailed
        );
        CHECK(*told == size - 1);
    }
}

} // namespace
