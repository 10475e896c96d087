// SPDX-License-Identifier: BSL-1.0
// Trains one vector of weights that all ranks write at once, without locks: a sparse logistic
// regression after Niu, Recht, Re, Wright: Hogwild! A Lock-Free Approach to Parallelizing
// Stochastic Gradient Descent (2011). Ranks are processes or threads. Their shards are uneven, and
// no rank waits for another.
#include <joinable/join.hpp>
#include <joinable/shared_memory.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace {

constexpr std::size_t features = 50'000;
constexpr std::size_t words = 12; ///< features of a sample that are not zero

struct Sample {
    std::uint32_t word[words];
    float value[words];
    float label; ///< 1 or -1
};

enum class Ranks { thread, process };

struct Options {
    int ranks = 4;
    Ranks kind = Ranks::process;
    std::size_t samples = 500'000;
    int epochs = 20;
    float rate = 0.1F;
};

/// Some words are many times as frequent as others, as in text, so ranks do meet on a weight.
/// Labels come from hidden weights; one label of ten is wrong.
std::vector<Sample> make_samples(std::size_t count) {
    std::mt19937 random{1};
    std::uniform_real_distribution<float> uniform{0.0F, 1.0F};
    std::normal_distribution<float> normal;
    std::vector<float> hidden(features);
    std::generate(hidden.begin(), hidden.end(), [&] { return normal(random); });
    std::vector<Sample> samples(count);
    for (Sample& sample : samples) {
        float sum = 0;
        for (std::size_t k = 0; k < words; ++k) {
            float const u = uniform(random);
            sample.word[k] = static_cast<std::uint32_t>(u * u * (features - 1));
            sample.value[k] = normal(random);
            sum += sample.value[k] * hidden[sample.word[k]];
        }
        bool const is_wrong = uniform(random) < 0.1F;
        sample.label = (sum > 0) != is_wrong ? 1.0F : -1.0F;
    }
    return samples;
}

/// The model: a view of weights. Any rank may read and write any of them at any time. Only a single
/// number is never torn. An addition by another rank in between is lost, which Hogwild tolerates if
/// samples are sparse.
struct Weights {
    std::span<float> numbers;

    [[nodiscard]] float operator[](std::size_t i) const {
        return std::atomic_ref{numbers[i]}.load(std::memory_order_relaxed);
    }
    void add(std::size_t i, float step) {
        std::atomic_ref number{numbers[i]};
        number.store(number.load(std::memory_order_relaxed) + step, std::memory_order_relaxed);
    }
};

} // namespace

template <>
struct joinable::parameter_traits<Weights> {
    static std::span<float>* value(Weights& w) { return &w.numbers; }
    static std::span<float>* grad(Weights&) { return nullptr; } // each sample is a step
    static void set_value(Weights& w, AnyView view) {
        w.numbers = {static_cast<float*>(view.data()), view.numel()};
    }
    static void release_value(Weights& w) { w.numbers = {}; }
};

namespace {

float margin(Weights const& weights, Sample const& sample) {
    float sum = 0;
    for (std::size_t k = 0; k < words; ++k) {
        sum += weights[sample.word[k]] * sample.value[k];
    }
    return sample.label * sum;
}

void step(Weights& weights, Sample const& sample, float rate) {
    float const slope = sample.label / (1.0F + std::exp(margin(weights, sample)));
    for (std::size_t k = 0; k < words; ++k) {
        weights.add(sample.word[k], rate * slope * sample.value[k]);
    }
}

/// The results of a run.
struct Report {
    double seconds;
    double loss;
    double right; ///< the share of samples whose label is found
};

/// The mean loss per sample, in nats, and the share of labels found.
Report measure(Weights const& weights, std::vector<Sample> const& samples) {
    Report report{};
    for (Sample const& sample : samples) {
        double const found = margin(weights, sample);
        report.loss += std::log1p(std::exp(-found)) / static_cast<double>(samples.size());
        report.right += (found > 0    ? 1.0
                         : found == 0 ? 0.5
                                      : 0.0) /
                        static_cast<double>(samples.size());
    }
    return report;
}

/// The beginning of rank r's shard. Shards are uneven: rank r has r + 1 parts of all.
std::size_t shard_begin(std::size_t count, int rank, int ranks) {
    auto const parts_before = [](int r) {
        return static_cast<std::size_t>(r) * static_cast<std::size_t>(r + 1) / 2;
    };
    return count * parts_before(rank) / parts_before(ranks);
}

template <class Comm>
void train(
    Comm& comm,
    Options const& options,
    std::vector<Sample> const& samples,
    std::vector<Sample> const& held_out,
    Report& report
) {
    std::vector<float> zeros(features);
    Weights weights{zeros}; // of this rank alone, until all ranks share those of rank 0
    auto const shared = joinable::share_parameters(comm, std::span{&weights, 1});
    auto const done = joinable::shared_buffer<std::size_t>(comm, 1);
    std::size_t const all = samples.size() * static_cast<std::size_t>(options.epochs);
    std::size_t const begin = shard_begin(samples.size(), comm.rank(), comm.size());
    std::size_t const end = shard_begin(samples.size(), comm.rank() + 1, comm.size());

    comm.barrier();
    auto const start = std::chrono::steady_clock::now();
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        float const rate = options.rate / static_cast<float>(epoch + 1);
        for (std::size_t i = begin; i < end; ++i) {
            step(weights, samples[i], rate);
        }
        std::size_t const before = std::atomic_ref{done[0]}.fetch_add(end - begin);
        std::fprintf(
            stderr, "\r%2d ranks: %3zu %%", comm.size(), 100 * (before + end - begin) / all
        );
    }
    comm.barrier(); // the weights are final
    std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
    if (comm.rank() == 0) {
        report = measure(weights, held_out);
        report.seconds = taken.count();
    }
}

Report
run(int ranks,
    Options const& options,
    std::vector<Sample> const& samples,
    std::vector<Sample> const& held_out) {
    auto const report = joinable::shared_buffer<Report>(1); // exists before and after the ranks
    auto const body = [&](auto& comm) { train(comm, options, samples, held_out, report[0]); };
    if (options.kind == Ranks::process) {
        joinable::run_processes(ranks, body);
    } else {
        joinable::run_threads(ranks, body);
    }
    std::fprintf(stderr, "\r               \r");
    return report[0];
}

void print(char const* what, Report const& report) {
    std::printf(
        "%-14s %8.3f s   loss %.3f   %4.1f %% right\n",
        what,
        report.seconds,
        report.loss,
        100 * report.right
    );
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{
        "Trains one sparse logistic regression by ranks that share its weights without locks."
    };
    app.add_option("--ranks", options.ranks, "How many ranks, 1 to 256. Default: 4.")
        ->check(CLI::Range(1, 256))
        ->option_text("N");
    std::map<std::string, Ranks> const kinds{
        {"thread", Ranks::thread}, {"process", Ranks::process}
    };
    app.add_option(
           "--communicator", options.kind, "What a rank is, thread or process. Default: process."
    )
        ->transform(CLI::CheckedTransformer(kinds))
        ->option_text("WORD");
    app.add_option(
           "--samples", options.samples, "Samples to train on, at least 100. Default: 500000."
    )
        ->check(CLI::Range(100, 10'000'000))
        ->option_text("N");
    app.add_option("--epochs", options.epochs, "Passes over the samples. Default: 20.")
        ->check(CLI::Range(1, 1000))
        ->option_text("N");
    app.add_option("--rate", options.rate, "Learning rate of the first epoch. Default: 0.1.")
        ->check([](std::string const& word) { // CLI11's own checks accept NaN
            float const rate = std::strtof(word.c_str(), nullptr);
            return rate > 0 && std::isfinite(rate)
                       ? std::string{}
                       : word + " is not allowed; give a number above 0";
        })
        ->option_text("X");
    CLI11_PARSE(app, argc, argv);
    try {
        std::size_t const held_out_count = options.samples / 10;
        std::vector<Sample> samples = make_samples(options.samples + held_out_count);
        std::vector<Sample> const held_out{
            samples.end() - static_cast<std::ptrdiff_t>(held_out_count), samples.end()
        };
        samples.resize(options.samples);
        std::printf(
            "%zu samples of %zu words each, %zu weights, labels of which 10 %% are wrong\n",
            samples.size(),
            words,
            features
        );
        std::vector<float> zeros(features);
        print("untrained", measure(Weights{zeros}, held_out));
        Report const alone = run(1, options, samples, held_out);
        print("one rank", alone);
        Report const together = run(options.ranks, options, samples, held_out);
        std::string const name = std::to_string(options.ranks) +
                                 (options.kind == Ranks::process ? " processes" : " threads");
        print(name.c_str(), together);
        std::printf(
            "%.2f times as fast as one rank; the largest shard is %.0f %% of the samples\n",
            alone.seconds / together.seconds,
            200.0 / (options.ranks + 1)
        );
    } catch (std::exception const& error) {
        std::fprintf(stderr, "hogwild: %s\n", error.what());
        return 1;
    }
}
