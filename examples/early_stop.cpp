// SPDX-License-Identifier: BSL-1.0
// Stops a training before it overfits. One rank watches the validation loss and votes; all ranks
// leave after the same round, although their numbers of batches differ.
#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <random>
#include <vector>

constexpr std::size_t features = 40;
constexpr int ranks = 3;

struct Sample {
    std::array<double, features> inputs;
    double target;
};

/// Only five inputs matter, and the target is noisy. With few samples, more rounds learn the noise.
std::vector<Sample> make_samples(std::size_t count, std::mt19937::result_type seed) {
    std::mt19937 random{seed};
    auto const between_minus_one_and_one = [&] {
        return static_cast<double>(random()) / 0x1p31 - 1.0;
    };
    std::vector<Sample> samples(count);
    for (Sample& sample : samples) {
        for (double& input : sample.inputs) {
            input = between_minus_one_and_one();
        }
        sample.target = 2 * between_minus_one_and_one();
        for (std::size_t i = 0; i < 5; ++i) {
            sample.target += sample.inputs[i];
        }
    }
    return samples;
}

/// A linear model: the target is a weighted sum of the inputs.
class Model {
public:
    struct Parameter {
        std::vector<double> value = std::vector<double>(features);
        std::vector<double> grad = std::vector<double>(features);
    };

    [[nodiscard]] double predict(Sample const& sample) const {
        double sum = 0;
        for (std::size_t i = 0; i < features; ++i) {
            sum += parameters[0].value[i] * sample.inputs[i];
        }
        return sum;
    }
    [[nodiscard]] double loss(std::vector<Sample> const& samples) const {
        double sum = 0;
        for (Sample const& sample : samples) {
            double const off = predict(sample) - sample.target;
            sum += off * off / static_cast<double>(samples.size());
        }
        return sum;
    }
    void backward(Sample const& sample) {
        double const off = predict(sample) - sample.target;
        for (std::size_t i = 0; i < features; ++i) {
            parameters[0].grad[i] = 2 * off * sample.inputs[i];
        }
    }
    void step() {
        for (std::size_t i = 0; i < features; ++i) {
            parameters[0].value[i] -= 0.02 * parameters[0].grad[i];
        }
    }

    std::vector<Parameter> parameters = {{}};
};

/// Tells when ten checks in a row have found no new lowest loss.
class Patience {
public:
    bool is_over(double loss) {
        if (loss < lowest_) {
            lowest_ = loss;
            checks_ = 0;
        }
        return ++checks_ > 10;
    }

private:
    double lowest_ = 1e30;
    int checks_ = 0;
};

struct Outcome {
    joinable::JoinResult result;
    double training_loss = 0;
    double validation_loss = 0;
};

Outcome train(joinable::ThreadCommunicator& comm, bool stops_early) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    auto const samples = make_samples(12 + 4 * rank, static_cast<std::mt19937::result_type>(rank));
    auto const validation = make_samples(500, 100);
    Model model;
    Patience patience;
    joinable::DistributedDataParallel ddp{comm, model.parameters};
    joinable::Step step{comm, [&] { model.step(); }};
    joinable::Join guard{joinable::participants(ddp, step)};

    std::size_t const limit = 100 * samples.size(); // a hundred epochs, of different lengths
    for (std::size_t round = 0; guard.next(round < limit); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            model.backward(samples[round % samples.size()]);
            ready(0);
        });
        step.step();
        if (stops_early && rank == 1 && round % 10 == 9 &&
            patience.is_over(model.loss(validation))) {
            guard.vote_stop(); // no rank runs the next round
        }
    }
    return {guard.finish(), model.loss(samples), model.loss(validation)};
}

int main() {
    for (bool const stops_early : {false, true}) {
        std::vector<Outcome> outcomes(ranks);
        joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
            outcomes[static_cast<std::size_t>(comm.rank())] = train(comm, stops_early);
        });
        std::printf("%s\n", stops_early ? "rank 1 votes to stop:" : "to the end:");
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            std::printf(
                "  rank %zu ran %4zu rounds and shadowed %3zu, loss %.2f on its samples\n",
                rank,
                outcomes[rank].result.own_rounds,
                outcomes[rank].result.shadow_rounds,
                outcomes[rank].training_loss
            );
        }
        bool const same = std::all_of(outcomes.begin(), outcomes.end(), [&](Outcome const& other) {
            return other.validation_loss == outcomes[0].validation_loss &&
                   other.result.stopped_early == stops_early;
        });
        std::printf(
            "  validation loss %.2f%s\n",
            outcomes[0].validation_loss,
            same ? ", the same on all ranks" : ", WHICH DIFFERS BETWEEN RANKS"
        );
    }
}

// Output:
// to the end:
//   rank 0 ran 1200 rounds and shadowed 800, loss 2.80 on its samples
//   rank 1 ran 1600 rounds and shadowed 400, loss 0.42 on its samples
//   rank 2 ran 2000 rounds and shadowed   0, loss 0.01 on its samples
//   validation loss 3.38, the same on all ranks
// rank 1 votes to stop:
//   rank 0 ran  170 rounds and shadowed   0, loss 0.59 on its samples
//   rank 1 ran  170 rounds and shadowed   0, loss 0.46 on its samples
//   rank 2 ran  170 rounds and shadowed   0, loss 0.73 on its samples
//   validation loss 2.24, the same on all ranks
