// SPDX-License-Identifier: BSL-1.0
// Trains a network of Eigen's matrices over ranks whose shards differ in length, and for comparison
// one network alone on the union of their batches. Both end with the same values, up to rounding.
#include <joinable/interop/eigen.hpp>
#include <joinable/join.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include <CLI/CLI.hpp>
#include <Eigen/Core>

namespace {

using Eigen::Index;
using Eigen::MatrixXf;
using Eigen::VectorXf;

struct Options {
    int ranks = 4;
    int epochs = 10;
};

constexpr Index samples = 6000;
constexpr Index batch_size = 32;
constexpr Index hidden = 24;
constexpr float rate = 0.2F;

/// A sample is a column.
struct Batch {
    MatrixXf inputs, targets;

    [[nodiscard]] Index size() const { return inputs.cols(); }
    [[nodiscard]] Batch part(Index begin, Index count) const {
        return {inputs.middleCols(begin, count), targets.middleCols(begin, count)};
    }
};

/// joinable takes it as a parameter because of these two members.
template <class Matrix>
struct Parameter {
    Matrix value, grad;
};

/// y = V tanh(W x + b) + c
class Network {
public:
    explicit Network(unsigned seed) {
        std::mt19937 random{seed};
        std::uniform_real_distribution<float> uniform{-1, 1};
        auto const draw = [&] { return uniform(random); };
        w_.value = MatrixXf::NullaryExpr(hidden, 2, draw);
        b_.value = VectorXf::NullaryExpr(hidden, draw);
        v_.value = MatrixXf::NullaryExpr(1, hidden, draw) / 5;
        c_.value = VectorXf::Zero(1);
        w_.grad = MatrixXf::Zero(hidden, 2);
        b_.grad = VectorXf::Zero(hidden);
        v_.grad = MatrixXf::Zero(1, hidden);
        c_.grad = VectorXf::Zero(1);
    }

    [[nodiscard]] joinable::ParameterList parameters() {
        return joinable::parameters(w_, b_, v_, c_);
    }

    /// Half the mean squared distance to the targets.
    float forward(Batch const& batch) {
        hidden_ = ((w_.value * batch.inputs).colwise() + b_.value).array().tanh();
        error_ = ((v_.value * hidden_).colwise() + c_.value) - batch.targets;
        return error_.squaredNorm() / 2 / static_cast<float>(batch.size());
    }
    /// Computes the gradients of forward()'s result. Calls ready(i) when the gradient of parameter
    /// i is final.
    template <class Ready>
    void backward(Batch const& batch, Ready ready) {
        MatrixXf const slope = error_ / static_cast<float>(batch.size());
        c_.grad = slope.rowwise().sum();
        ready(3);
        v_.grad = slope * hidden_.transpose();
        ready(2);
        MatrixXf const inner =
            (v_.value.transpose() * slope).array() * (1 - hidden_.array().square());
        b_.grad = inner.rowwise().sum();
        ready(1);
        w_.grad = inner * batch.inputs.transpose();
        ready(0);
    }
    void descend() {
        w_.value -= rate * w_.grad;
        b_.value -= rate * b_.grad;
        v_.value -= rate * v_.grad;
        c_.value -= rate * c_.grad;
    }

    /// The largest difference between two values.
    [[nodiscard]] float distance(Network const& other) const {
        return std::max(
            {(w_.value - other.w_.value).cwiseAbs().maxCoeff(),
             (b_.value - other.b_.value).cwiseAbs().maxCoeff(),
             (v_.value - other.v_.value).cwiseAbs().maxCoeff(),
             (c_.value - other.c_.value).cwiseAbs().maxCoeff()}
        );
    }

private:
    Parameter<MatrixXf> w_;
    Parameter<VectorXf> b_;
    Parameter<MatrixXf> v_;
    Parameter<VectorXf> c_;
    MatrixXf hidden_, error_; // of the last forward pass
};

/// The function to learn: a wave in one input, scaled by the other.
Batch make_data() {
    std::mt19937 random{1};
    std::uniform_real_distribution<float> uniform{-1, 1};
    Batch data;
    data.inputs = MatrixXf::NullaryExpr(2, samples, [&] { return uniform(random); });
    data.targets = (3 * data.inputs.row(0).array()).sin() * data.inputs.row(1).array();
    return data;
}

/// The batches of each rank. Rank r gets r + 1 parts of all, so the last rank has the most.
std::vector<std::vector<Batch>> deal(Batch const& data, int ranks) {
    auto const parts_before = [](int rank) { return static_cast<Index>(rank) * (rank + 1) / 2; };
    std::vector<std::vector<Batch>> shards;
    for (int rank = 0; rank < ranks; ++rank) {
        std::vector<Batch>& shard = shards.emplace_back();
        Index const end = data.size() * parts_before(rank + 1) / parts_before(ranks);
        for (Index i = data.size() * parts_before(rank) / parts_before(ranks); i < end;
             i += batch_size) {
            shard.push_back(data.part(i, std::min(batch_size, end - i)));
        }
    }
    return shards;
}

/// Trains `network` on this rank's shard together with the other ranks; rank 0 appends a loss per epoch.
void train_together(
    joinable::ThreadCommunicator& comm,
    std::vector<Batch> const& shard,
    Batch const& data,
    int epochs,
    Network& network,
    std::vector<float>& losses
) {
    joinable::DistributedDataParallel ddp{comm, network.parameters()}; // all get rank 0's values
    joinable::Step step{comm, [&] { network.descend(); }};
    for (int epoch = 0; epoch < epochs; ++epoch) {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (Batch const& batch : shard) {
            // Weighted by samples, so that a short batch counts for less.
            auto const weight = static_cast<std::uint64_t>(batch.size());
            ddp.forward([&] { network.forward(batch); }, {.weight = weight});
            ddp.backward([&](auto ready) { network.backward(batch, ready); });
            step.step();
        }
        guard.finish(); // shadows until the last rank has run out
        if (comm.rank() == 0) {
            losses.push_back(network.forward(data));
        }
    }
}

/// Trains a network on all batches of a round at once.
std::vector<float> train_alone(
    std::vector<std::vector<Batch>> const& shards, Batch const& data, int epochs, Network& network
) {
    std::vector<float> losses;
    for (int epoch = 0; epoch < epochs; ++epoch) {
        for (std::size_t round = 0; round < shards.back().size(); ++round) {
            Batch all{MatrixXf(2, 0), MatrixXf(1, 0)};
            for (std::vector<Batch> const& shard : shards) {
                if (round < shard.size()) {
                    Index const before = all.size();
                    Index const more = shard[round].size();
                    all.inputs.conservativeResize(Eigen::NoChange, before + more);
                    all.inputs.rightCols(more) = shard[round].inputs;
                    all.targets.conservativeResize(Eigen::NoChange, before + more);
                    all.targets.rightCols(more) = shard[round].targets;
                }
            }
            network.forward(all);
            network.backward(all, [](std::size_t) {});
            network.descend();
        }
        losses.push_back(network.forward(data));
    }
    return losses;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Trains a network of Eigen's matrices over thread ranks with uneven shards, and "
                 "alone."};
    app.add_option("--ranks", options.ranks, "How many ranks, 1 to 64. Default: 4.")
        ->check(CLI::Range(1, 64))
        ->option_text("N");
    app.add_option("--epochs", options.epochs, "Passes over the samples. Default: 10.")
        ->check(CLI::Range(1, 1000))
        ->option_text("N");
    CLI11_PARSE(app, argc, argv);
    try {
        Batch const data = make_data();
        auto const shards = deal(data, options.ranks);
        std::vector<Network> networks;
        for (int rank = 0; rank < options.ranks; ++rank) {
            std::size_t const batches = shards[static_cast<std::size_t>(rank)].size();
            std::printf("rank %d has %zu batches\n", rank, batches);
            networks.emplace_back(static_cast<unsigned>(rank));
        }
        std::vector<float> together;
        joinable::run_threads(options.ranks, [&](joinable::ThreadCommunicator& comm) {
            auto const rank = static_cast<std::size_t>(comm.rank());
            train_together(comm, shards[rank], data, options.epochs, networks[rank], together);
        });
        Network single{0};
        std::vector<float> const alone = train_alone(shards, data, options.epochs, single);
        std::printf("epoch  loss of %2d ranks  loss alone\n", options.ranks);
        for (std::size_t epoch = 0; epoch < alone.size(); ++epoch) {
            std::printf(
                "%5zu %17.6f %11.6f\n",
                epoch + 1,
                static_cast<double>(together[epoch]),
                static_cast<double>(alone[epoch])
            );
        }
        float distance = 0;
        for (Network const& network : networks) {
            distance = std::max(distance, network.distance(single));
        }
        std::printf(
            "values of any rank differ from those alone by at most %.0e\n",
            static_cast<double>(distance)
        );
        return distance < 1e-3F ? 0 : 1;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "train_eigen: %s\n", error.what());
        return 1;
    }
}
