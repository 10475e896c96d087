// SPDX-License-Identifier: BSL-1.0
// Trains by a parameter server: rank 0 has the model, the other ranks have data. In a round each
// worker sends its gradients, and the server averages them, steps, and sends the values back. It
// posts one receive per worker and tests them in turn, so workers may come in any order. They have
// different numbers of batches, and each leaves when it has run out.
#include "rank_failure.hpp"

#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

namespace {

constexpr std::size_t features = 8;
constexpr double rate = 0.5;

using Vector = std::array<double, features>;

struct Sample {
    Vector inputs;
    double target;
};
using Batch = std::vector<Sample>;

/// The weights to be found.
double hidden_weight(std::size_t i) {
    return 1.0 + static_cast<double>(i);
}

/// Worker w has 60 + 30 w batches of 4 + w samples.
std::vector<Batch> make_batches(int worker) {
    std::mt19937 random{static_cast<std::mt19937::result_type>(worker)};
    auto const w = static_cast<std::size_t>(worker);
    std::vector<Batch> batches(60 + 30 * w, Batch(4 + w));
    for (Batch& batch : batches) {
        for (Sample& sample : batch) {
            sample.target = 0;
            for (std::size_t i = 0; i < features; ++i) {
                sample.inputs[i] = static_cast<double>(random()) / 0x1p31 - 1.0;
                sample.target += hidden_weight(i) * sample.inputs[i];
            }
        }
    }
    return batches;
}

/// Adds the gradient of the squared errors of a batch, halved, to `gradient`.
void add_gradient(Vector const& weights, Batch const& batch, std::span<double> gradient) {
    for (Sample const& sample : batch) {
        double error = -sample.target;
        for (std::size_t i = 0; i < features; ++i) {
            error += weights[i] * sample.inputs[i];
        }
        for (std::size_t i = 0; i < features; ++i) {
            gradient[i] += error * sample.inputs[i];
        }
    }
}

void step(Vector& weights, std::span<double const> gradient, double samples) {
    for (std::size_t i = 0; i < features; ++i) {
        weights[i] -= rate * gradient[i] / samples;
    }
}

/// What a worker sends: how many samples, 0 when it leaves, and the sum of their gradients.
struct Contribution {
    std::array<double, 1 + features> numbers{};

    [[nodiscard]] double& samples() { return numbers[0]; }
    [[nodiscard]] std::span<double> gradient() { return std::span{numbers}.subspan(1); }
};

struct Outcome {
    Vector weights{};
    std::array<int, 256> rounds{}; ///< of each worker
};

template <class Comm>
void serve(Comm& comm, examples::RunOptions const& options, Outcome& outcome) {
    using Receive = decltype(joinable::receive(comm, std::declval<std::span<double>>(), 1));
    struct Worker {
        int rank;
        Contribution sent;
        std::optional<Receive> receive; ///< empty once it is complete
        bool is_here = true;
    };
    std::vector<Worker> workers;
    for (int rank = 1; rank < comm.size(); ++rank) {
        workers.push_back({rank, {}, {}});
    }
    std::size_t here = workers.size();
    for (int round = 1; here > 0; ++round) {
        if (round == 5) {
            examples::fail_if_asked(options, comm.rank());
        }
        for (Worker& worker : workers) {
            if (worker.is_here) {
                worker.receive.emplace(joinable::receive(comm, worker.sent.numbers, worker.rank));
            }
        }
        for (std::size_t awaited = here; awaited > 0; std::this_thread::yield()) {
            for (Worker& worker : workers) {
                if (worker.receive && worker.receive->test()) { // throws if the worker has failed
                    worker.receive.reset();
                    --awaited;
                }
            }
        }
        Contribution sum; // in the order of ranks: the same bits in every run
        for (Worker& worker : workers) {
            if (worker.is_here && worker.sent.samples() == 0) {
                worker.is_here = false;
                --here;
            } else if (worker.is_here) {
                ++outcome.rounds[static_cast<std::size_t>(worker.rank)];
                for (std::size_t i = 0; i < sum.numbers.size(); ++i) {
                    sum.numbers[i] += worker.sent.numbers[i];
                }
            }
        }
        if (here == 0) {
            break;
        }
        step(outcome.weights, sum.gradient(), sum.samples());
        std::vector<Receive> sends;
        for (Worker const& worker : workers) {
            if (worker.is_here) {
                sends.push_back(joinable::send(comm, outcome.weights, worker.rank));
            }
        }
        for (Receive& send : sends) {
            send.wait();
        }
        std::fprintf(stderr, "\rround %d, %zu workers ", round, here);
    }
    std::fprintf(stderr, "\r                        \r");
}

template <class Comm>
void work(Comm& comm, examples::RunOptions const& options) {
    Vector weights{};
    std::vector<Batch> const batches = make_batches(comm.rank());
    for (std::size_t i = 0; i < batches.size(); ++i) {
        if (i == 5) {
            examples::fail_if_asked(options, comm.rank());
        }
        Contribution own;
        own.samples() = static_cast<double>(batches[i].size());
        add_gradient(weights, batches[i], own.gradient());
        joinable::send(comm, own.numbers, 0).wait();
        joinable::receive(comm, weights, 0).wait();
    }
    joinable::send(comm, Contribution{}.numbers, 0).wait(); // no samples: this worker leaves
}

/// The same training in one process: a round is one batch of all samples that workers have for it.
Vector train_alone(int workers) {
    std::vector<std::vector<Batch>> batches;
    for (int worker = 1; worker <= workers; ++worker) {
        batches.push_back(make_batches(worker));
    }
    Vector weights{};
    for (std::size_t round = 0; round < batches.back().size(); ++round) {
        Batch all;
        for (std::vector<Batch> const& own : batches) {
            if (round < own.size()) {
                all.insert(all.end(), own[round].begin(), own[round].end());
            }
        }
        Vector gradient{};
        add_gradient(weights, all, gradient);
        step(weights, gradient, static_cast<double>(all.size()));
    }
    return weights;
}

} // namespace

int main(int argc, char** argv) {
    int workers = 3;
    examples::RunOptions options;
    CLI::App app{"Trains a linear model by a parameter server. Rank 0 is the server."};
    app.add_option("--workers", workers, "How many workers, 1 to 31. Default: 3.")
        ->check(CLI::Range(1, 31))
        ->option_text("N");
    examples::add_run_options(app, options);
    CLI11_PARSE(app, argc, argv);
    try {
        auto const outcome = joinable::shared_buffer<Outcome>(1);
        bool const is_done = examples::run_ranks(1 + workers, options, [&](auto& comm) {
            if (comm.rank() == 0) {
                serve(comm, options, outcome[0]);
            } else {
                work(comm, options);
            }
        });
        if (!is_done) {
            return 1;
        }
        for (int worker = 1; worker <= workers; ++worker) {
            int const rounds = outcome[0].rounds[static_cast<std::size_t>(worker)];
            std::printf("worker %d left after %d rounds\n", worker, rounds);
        }
        Vector const alone = train_alone(workers);
        double from_hidden = 0;
        double from_alone = 0;
        for (std::size_t i = 0; i < features; ++i) {
            double const weight = outcome[0].weights[i];
            from_hidden = std::max(from_hidden, std::abs(weight - hidden_weight(i)));
            from_alone = std::max(from_alone, std::abs(weight - alone[i]));
        }
        std::printf("weights of 1 to %zu, found to within 1e-6: ", features);
        std::printf("%s\n", from_hidden < 1e-6 ? "yes" : "NO");
        std::printf("the same as in one process, to within 1e-12: ");
        std::printf("%s\n", from_alone < 1e-12 ? "yes" : "NO");
        return from_hidden < 1e-6 && from_alone < 1e-12 ? 0 : 1;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "parameter_server: %s\n", error.what());
        return 1;
    }
}

// Output:
// worker 1 left after 90 rounds
// worker 2 left after 120 rounds
// worker 3 left after 150 rounds
// weights of 1 to 8, found to within 1e-6: yes
// the same as in one process, to within 1e-12: yes
